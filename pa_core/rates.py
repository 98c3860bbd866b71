"""Known convergence rates of exact Q-TD-PMD as curves that a measured run must stay under (book, chapter 02).

Sources: Liu, Li and Wei 2025 for TD-PMD, Xiao 2022 and Lan 2023 for PMD.  The constants here are re-derived in the chapter
for this loop's indices (policy first, ``Q_0 = 0``).  Curves are ``[rounds + 1, *batch]``, entry k bounding the policy
``pi_k``; entry 0 is +inf, since nothing is claimed about the start.
"""

import torch
from torch import Tensor

from .mdp import MDP, Solution, action_values, backup, check_policy
from .pmd import kl, pmd_step, start


def _chain(mdp: MDP, pi: Tensor) -> Tensor:
    return torch.einsum("...sa,...sap->...sp", check_policy(mdp, pi), mdp.P)  # [*batch, S, S]


def occupancy(mdp: MDP, pi: Tensor, mu: Tensor | None = None) -> Tensor:
    """Discounted occupancy d = (1 - gamma) mu^T (I - gamma P^pi)^{-1}, ``[*batch, S]``; it sums to 1.

    Args:
        mdp: MDPs ``[*batch]``.
        pi: policies ``[*batch, S, A]``.
        mu: law of the first state, ``[*batch, S]``; uniform if not given.
    """
    P_pi = _chain(mdp, pi)
    mu = torch.full_like(P_pi[..., 0], 1 / mdp.n_states) if mu is None else mu
    identity = torch.eye(mdp.n_states, dtype=P_pi.dtype, device=P_pi.device)
    return (1 - mdp.gamma) * torch.linalg.solve(identity - mdp.gamma * P_pi.mT, mu[..., None])[..., 0]


def is_irreducible(mdp: MDP, pi: Tensor) -> Tensor:
    """Whether the chain of `pi` leads from every state to every state, ``[*batch]`` of bool."""
    reach = (_chain(mdp, pi) > 0).to(torch.float64)
    reach = reach + torch.eye(mdp.n_states, dtype=reach.dtype, device=reach.device)
    for _ in range(max(mdp.n_states - 1, 1).bit_length()):  # paths of up to 2, 4, 8, ... steps
        reach = (reach @ reach > 0).to(torch.float64)
    return (reach > 0).all(-1).all(-1)


def stationary_law(mdp: MDP, pi: Tensor) -> Tensor:
    """The law nu with nu^T P^pi = nu^T, ``[*batch, S]``.

    Raises:
        ValueError: if a chain is not irreducible (the first such index of the batch is named): there may be several laws,
            and states without mass.
    """
    if not (ok := is_irreducible(mdp, pi)).all():
        where = f" at index {tuple((~ok).nonzero()[0].tolist())}" if ok.dim() else ""
        raise ValueError(f"the policy's chain is not irreducible{where}: it has no single stationary law on all states")
    P_pi = _chain(mdp, pi)
    identity = torch.eye(mdp.n_states, dtype=P_pi.dtype, device=P_pi.device)
    # nu^T (I - P + 1 1^T) = 1^T has the stationary law as its only solution.
    return torch.linalg.solve((identity - P_pi + 1).mT, torch.ones_like(P_pi[..., :1]))[..., 0]


def sublinear_bound(
    mdp: MDP,
    solution: Solution,
    *,
    eta: float | Tensor,
    rounds: int,
    log_pi: Tensor | None = None,
    Q: Tensor | None = None,
    mu: Tensor | None = None,
) -> Tensor:
    """O(1/k) for any constant step, any MDP and any law mu of the first state (uniform if not given):

        mu^T (V* - V^{pi_k}) <= (1/k) [ E_d KL(pi* || pi_1) / eta + E_d [V* - V_1 + c] ] / (1 - gamma),   k >= 1,

    where d is the occupancy of pi* from mu, V_1 = <pi_1, Q_0> and c = max_s [V_1 - T^{pi_1} V_1]_+ / (1 - gamma).

    The index starts at 1, since from there on the Q loop is a loop on state values, Q_k = R + gamma P V_k, whatever Q_0 was.
    """
    log_pi, Q = start(mdp, log_pi, Q)
    log_pi = pmd_step(log_pi, Q, eta)
    V = (log_pi.exp() * Q).sum(-1)
    shift = (V - (log_pi.exp() * action_values(mdp, V)).sum(-1)).clamp(min=0).amax(-1) / (1 - mdp.gamma)
    d = occupancy(mdp, solution.pi_star, mu)
    distance = (d * kl(solution.pi_star, log_pi)).sum(-1)
    height = (d * (solution.V_star - V)).sum(-1) + shift
    constant = (distance / eta + height) / (1 - mdp.gamma)
    return torch.stack([torch.full_like(constant, torch.inf)] + [constant / k for k in range(1, rounds + 1)])


def geometric_bound(
    mdp: MDP,
    solution: Solution,
    *,
    eta_0: float | Tensor,
    rounds: int,
    log_pi: Tensor | None = None,
    Q: Tensor | None = None,
) -> Tensor:
    """gamma^k for steps that grow, eta_{k+1} >= eta_k / gamma, weighted by the stationary law nu of pi*:

        nu^T (V* - V^{pi_k}) <= gamma^{k-1} [ E_nu <pi*, Q* - Q_0 + c> + E_nu KL(pi* || pi_0) / eta_0 ],   k >= 1,

    where c = max_{s,a} [Q_0 - F^{pi_0} Q_0]_+ / (1 - gamma).

    Raises:
        ValueError: if the chain of pi* is not irreducible.
    """
    log_pi, Q = start(mdp, log_pi, Q)
    nu = stationary_law(mdp, solution.pi_star)
    shift = (Q - backup(mdp, log_pi.exp(), Q)).clamp(min=0).amax((-2, -1)) / (1 - mdp.gamma)
    height = (nu * (solution.pi_star * (solution.Q_star - Q)).sum(-1)).sum(-1) + shift
    constant = height + (nu * kl(solution.pi_star, log_pi)).sum(-1) / eta_0
    return torch.stack(
        [torch.full_like(constant, torch.inf)] + [mdp.gamma ** (k - 1) * constant for k in range(1, rounds + 1)]
    )
