"""Policy mirror descent with negative entropy, the Q-TD-PMD loop, and the fixed rules it is compared with.

Works on ``log_pi`` (finite: full support) and ``Q``, float64 ``[*batch, S, A]``.  `eta` is everywhere a positive scalar, a
``[*batch]`` tensor, or a callable of the round that gives either; never an array over rounds.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .mdp import MDP, backup

Eta = float | Tensor | Callable[[int], float | Tensor]


def eta_at(eta: Eta, k: int, batch_shape: torch.Size) -> float | Tensor:
    """The step size of round `k`: a float or a ``[*batch]`` tensor.

    Raises:
        ValueError: if it is not positive and finite, or its shape is neither scalar nor the batch's.
    """
    value = eta(k) if callable(eta) else eta
    tensor = torch.as_tensor(value, dtype=torch.float64)
    if tensor.shape not in (torch.Size(), batch_shape):
        raise ValueError(
            f"eta must be a scalar or have the batch shape {tuple(batch_shape)}, got {tuple(tensor.shape)}; "
            "a step size that changes by round is a callable of the round"
        )
    if not (torch.isfinite(tensor) & (tensor > 0)).all():
        bad = tensor[~(torch.isfinite(tensor) & (tensor > 0))][0].item()
        raise ValueError(f"eta must be positive and finite, got {bad:g} at round {k}")
    return tensor.item() if tensor.dim() == 0 else tensor


def per_pair(eta: float | Tensor) -> float | Tensor:
    """`eta` shaped to multiply ``[*batch, S, A]``."""
    return eta[..., None, None] if isinstance(eta, Tensor) and eta.dim() else eta


def check_log_policy(log_pi: Tensor, where: str = "log_pi") -> None:
    """Refuse log-probabilities that are not finite or rows that do not sum to 1 within 1e-9; the index is named.

    Raises:
        ValueError: a zero probability (log 0), NaN, or a shifted row.  PMD needs full support and the constructed
            circuit needs finite logits (book, chapter 04).
    """
    if (bad := ~torch.isfinite(log_pi)).any():
        at = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"{where} must be finite (full support), got {log_pi[at].item()} at index {at}")
    total = torch.logsumexp(log_pi, -1)
    if (bad := total.abs() > 1e-9).any():
        at = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"{where} is not normalised: logsumexp = {total[at].item():.3g} at index {at}")


def uniform_log_policy(mdp: MDP) -> Tensor:
    """log(1/A) everywhere, ``[*batch, S, A]``."""
    return torch.full_like(mdp.R, -math.log(mdp.n_actions))


def start(mdp: MDP, log_pi: Tensor | None, Q: Tensor | None) -> tuple[Tensor, Tensor]:
    """The start of a loop as float64: uniform and 0 where nothing is given.

    Raises:
        ValueError: for a shape other than the MDP's ``[*batch, S, A]`` (one MDP under many starts: `MDP.expand`), or a
            policy or Q that is not finite, or a policy row that is not normalised; the index is named.
    """
    log_pi = uniform_log_policy(mdp) if log_pi is None else torch.as_tensor(log_pi).to(mdp.R)
    Q = torch.zeros_like(mdp.R) if Q is None else torch.as_tensor(Q).to(mdp.R)
    for name, value in (("log_pi", log_pi), ("Q", Q)):
        if value.shape != mdp.R.shape:
            raise ValueError(f"{name} must have shape {tuple(mdp.R.shape)}, got {tuple(value.shape)}")
    check_log_policy(log_pi)
    if (bad := ~torch.isfinite(Q)).any():
        at = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"Q must be finite, got {Q[at].item()} at index {at}")
    return log_pi, Q


def pmd_step(log_pi: Tensor, Q: Tensor, eta: float | Tensor) -> Tensor:
    """One step of negative-entropy PMD, log softmax(log pi + eta Q).  ``[*batch, S, A]`` twice to the same.

    It maximises eta <p, Q(s, .)> - KL(p || pi(. | s)) over the simplex in every state (paper, introduction; Xiao 2022).
    """
    return torch.log_softmax(log_pi + per_pair(eta) * Q, dim=-1)


def kl(p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) of each row, ``[..., A]`` twice to ``[...]``; `p` probabilities (zeros allowed), `log_q` logarithms."""
    return (torch.special.xlogy(p, p) - p * log_q).sum(-1)


def check_floor(floor: float) -> None:
    """Refuse a floor outside ``[0, 1)``."""
    if not 0 <= floor < 1:
        raise ValueError(f"floor must satisfy 0 <= floor < 1, got {floor!r}")


def mix_floor(log_pi: Tensor, floor: float) -> Tensor:
    """log((1 - floor) pi + floor / A): every probability is at least floor / A (paper, support floor).

    Raises:
        ValueError: unless ``0 <= floor < 1``.
    """
    check_floor(floor)
    if floor == 0:
        return log_pi
    lower = torch.full_like(log_pi, math.log(floor) - math.log(log_pi.shape[-1]))
    return torch.logaddexp(log_pi + math.log1p(-floor), lower)


def q_td_pmd(
    mdp: MDP,
    *,
    eta: Eta,
    rounds: int,
    log_pi: Tensor | None = None,
    Q: Tensor | None = None,
    floor: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Exact Q-TD-PMD, policy first (Liu, Li and Wei 2025; book, chapter 02):

        pi_{k+1} = PMD_eta(pi_k, Q_k) mixed with the floor;   Q_{k+1} = F^{pi_{k+1}} Q_k.

    Args:
        mdp: MDPs ``[*batch]``.
        eta: step size (see the module's text).
        rounds: number of rounds, >= 0.
        log_pi, Q: the start, ``[*batch, S, A]``; uniform and 0 if not given.
        floor: mass that every round mixes with the uniform policy.

    Returns:
        ``(log_pi, Q)``, each ``[rounds + 1, *batch, S, A]``, the start included.
    """
    if rounds < 0:
        raise ValueError(f"rounds must be >= 0, got {rounds}")
    check_floor(floor)
    log_pi, Q = start(mdp, log_pi, Q)
    log_pis, Qs = [log_pi], [Q]
    for k in range(rounds):
        log_pi = mix_floor(pmd_step(log_pi, Q, eta_at(eta, k, mdp.batch_shape)), floor)
        Q = backup(mdp, log_pi.exp(), Q)
        log_pis.append(log_pi)
        Qs.append(Q)
    return torch.stack(log_pis), torch.stack(Qs)


def project_simplex(x: Tensor) -> Tensor:
    """Euclidean projection of each row onto the simplex by sorting (Duchi et al. 2008).  ``[..., A]`` to the same."""
    x = x - x.amax(-1, keepdim=True)  # the projection ignores a shift; this keeps huge entries exact
    ordered = x.sort(-1, descending=True).values
    excess = ordered.cumsum(-1) - 1
    count = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device)
    support = (ordered * count > excess).sum(-1, keepdim=True)  # at least 1: the largest entry stays
    shift = excess.gather(-1, support - 1) / support
    return (x - shift).clamp(min=0)


def _additive_projected(log_pi: Tensor, Q: Tensor, eta: float | Tensor) -> Tensor:
    return project_simplex(log_pi.exp() + per_pair(eta) * Q)


def _greedy(log_pi: Tensor, Q: Tensor, eta: float | Tensor) -> Tensor:
    best = (Q == Q.amax(-1, keepdim=True)).to(Q.dtype)
    return best / best.sum(-1, keepdim=True)


RULES: dict[str, Callable[[Tensor, Tensor, float | Tensor], Tensor]] = {
    "pmd": lambda log_pi, Q, eta: pmd_step(log_pi, Q, eta).exp(),
    "additive_projected": _additive_projected,
    "identity": lambda log_pi, Q, eta: log_pi.exp(),
    "boltzmann_q": lambda log_pi, Q, eta: torch.softmax(per_pair(eta) * Q, dim=-1),
    "reward_only": _greedy,
}
"""Fixed one-step rules ``(log_pi, Q, eta) -> pi`` of the audit (paper, Figure 2; book, chapter 08).

`additive_projected` is the Euclidean projection of pi + eta Q, `boltzmann_q` forgets the prior, and `reward_only` is the
maximiser of <p, Q>, uniform over exact ties.
"""
