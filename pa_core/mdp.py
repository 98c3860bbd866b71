"""Finite discounted MDPs in batches: validated objects, Bellman operators, exact evaluation, solution and score.

Shapes: ``*batch`` are any leading dimensions; ``P [*batch, S, A, S]``, ``R [*batch, S, A]``, policies and action values
``[*batch, S, A]``, state values ``[*batch, S]``.  A policy may carry more leading dimensions than its MDP (a whole
trajectory at once): everything broadcasts.  All of it is float64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

ROW_TOL = 1e-9  # rows of a float32 table miss 1 by about 1e-7; a float64 table by about 1e-15
TIE_TOL = 1e-10  # actions within TIE_TOL * (1 + B) of the maximum count as optimal


def _index(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0].tolist())


def check_rows(name: str, x: Tensor, axes: str) -> None:
    """Refuse an array whose last axis is not a probability distribution; the message names the first bad index.

    Raises:
        ValueError: for NaN, infinite or negative entries, or a row that misses 1 by more than 1e-9.
    """
    if (bad := ~torch.isfinite(x)).any():
        at = _index(bad)
        raise ValueError(f"{name}[{axes}, :] has a non-finite entry {x[at].item()} at index {at}")
    if (bad := x < 0).any():
        at = _index(bad)
        raise ValueError(f"{name}[{axes}, :] has a negative probability {x[at].item():.3g} at index {at}")
    total = x.sum(-1)
    if (bad := (total - 1).abs() > ROW_TOL).any():
        at = _index(bad)
        raise ValueError(
            f"{name}[{axes}, :] sums to {total[at].item():.12g}, not 1, at index {at} "
            f"(tolerance {ROW_TOL:g}; a float32 table must be converted to float64 and renormalised)"
        )


@dataclass(frozen=True, eq=False)
class MDP:
    """A finite discounted MDP, or a batch of them with one discount (paper, problem setting).

    Attributes:
        P: transition probabilities ``P[..., s, a, s']``, float64 ``[*batch, S, A, S]``; rows sum to 1 within 1e-9.
        R: expected rewards ``R[..., s, a]``, float64 ``[*batch, S, A]``.
        gamma: discount, ``0 <= gamma < 1``.

    Raises:
        ValueError: for wrong shapes, non-finite or negative entries, rows off the simplex (the index is named) or a
            discount outside ``[0, 1)``.
    """

    P: Tensor
    R: Tensor
    gamma: float

    def __post_init__(self) -> None:
        for name in ("P", "R"):
            # dtype here, not afterwards: a list of Python floats must not pass through torch's default float32.
            object.__setattr__(self, name, torch.as_tensor(getattr(self, name), dtype=torch.float64))
        P, R = self.P, self.R
        if P.dim() < 3 or P.shape[-3] != P.shape[-1] or min(P.shape) < 1:
            raise ValueError(f"P must have shape [*batch, S, A, S] with S, A >= 1, got {tuple(P.shape)}")
        if R.shape != P.shape[:-1]:
            raise ValueError(f"R must have shape {tuple(P.shape[:-1])} to fit P {tuple(P.shape)}, got {tuple(R.shape)}")
        if isinstance(self.gamma, bool) or not isinstance(self.gamma, (int, float)) or not 0 <= self.gamma < 1:
            raise ValueError(f"gamma must be a number with 0 <= gamma < 1, got {self.gamma!r}")
        object.__setattr__(self, "gamma", float(self.gamma))
        check_rows("P", P, "..., s, a")
        if (bad := ~torch.isfinite(R)).any():
            raise ValueError(f"R[..., s, a] has a non-finite entry {R[_index(bad)].item()} at index {_index(bad)}")

    @property
    def n_states(self) -> int:
        return self.P.shape[-1]

    @property
    def n_actions(self) -> int:
        return self.P.shape[-2]

    @property
    def batch_shape(self) -> torch.Size:
        return self.P.shape[:-3]

    @property
    def reward_bound(self) -> Tensor:
        """R_max = max |R| of each MDP, ``[*batch]``."""
        return self.R.abs().amax((-2, -1))

    @property
    def value_bound(self) -> Tensor:
        """B = R_max / (1 - gamma) of each MDP, ``[*batch]``: no policy's value exceeds it in absolute value."""
        return self.reward_bound / (1 - self.gamma)

    def __getitem__(self, index) -> "MDP":
        """Select along the batch dimensions; an index that would reach states or actions is an `IndexError`."""
        batch = self.batch_shape
        if not batch:
            raise IndexError("this MDP has no batch dimension to index")
        chosen = torch.arange(batch.numel(), device=self.P.device).reshape(batch)[index]
        last = len(batch) - 1
        return MDP(self.P.flatten(0, last)[chosen], self.R.flatten(0, last)[chosen], self.gamma)

    def expand(self, *batch: int) -> "MDP":
        """The same MDP seen as a batch (no copy), e.g. one MDP under 64 initial policies."""
        return MDP(self.P.expand(*batch, *self.P.shape[-3:]), self.R.expand(*batch, *self.R.shape[-2:]), self.gamma)

    def to(self, device: str | torch.device) -> "MDP":
        return MDP(self.P.to(device), self.R.to(device), self.gamma)


@dataclass(frozen=True)
class Solution:
    """Optimal values ``V_star [*batch, S]``, ``Q_star [*batch, S, A]`` and a one-hot ``pi_star [*batch, S, A]``."""

    V_star: Tensor
    Q_star: Tensor
    pi_star: Tensor


def check_policy(mdp: MDP, pi: Tensor) -> Tensor:
    """`pi` as float64, refused unless it is ``[..., S, A]`` for this MDP with rows on the simplex."""
    pi = torch.as_tensor(pi, dtype=torch.float64)
    if pi.dim() < 2 or pi.shape[-2:] != mdp.R.shape[-2:]:
        raise ValueError(f"pi must have shape [..., {mdp.n_states}, {mdp.n_actions}], got {tuple(pi.shape)}")
    check_rows("pi", pi, "..., s")
    return pi


def _expected_next(mdp: MDP, V: Tensor) -> Tensor:
    return torch.einsum("...sap,...p->...sa", mdp.P, V)


def backup(mdp: MDP, pi: Tensor, Q: Tensor) -> Tensor:
    """(F^pi Q)(s,a) = R(s,a) + gamma sum_s' P(s'|s,a) sum_a' pi(a'|s') Q(s',a').  ``[..., S, A]`` twice to the same."""
    pi = check_policy(mdp, pi)
    if Q.shape[-2:] != pi.shape[-2:]:
        raise ValueError(f"Q must have shape [..., {mdp.n_states}, {mdp.n_actions}], got {tuple(Q.shape)}")
    return mdp.R + mdp.gamma * _expected_next(mdp, (pi * Q).sum(-1))


def optimal_backup(mdp: MDP, Q: Tensor) -> Tensor:
    """(F Q)(s,a) = R(s,a) + gamma sum_s' P(s'|s,a) max_a' Q(s',a').  ``[..., S, A]`` to the same."""
    return mdp.R + mdp.gamma * _expected_next(mdp, Q.amax(-1))


def action_values(mdp: MDP, V: Tensor) -> Tensor:
    """Q(s,a) = R(s,a) + gamma sum_s' P(s'|s,a) V(s').  ``[..., S]`` to ``[..., S, A]``."""
    return mdp.R + mdp.gamma * _expected_next(mdp, V)


def _evaluate(mdp: MDP, pi: Tensor) -> Tensor:
    P_pi = torch.einsum("...sa,...sap->...sp", pi, mdp.P)
    r_pi = (pi * mdp.R).sum(-1)
    identity = torch.eye(mdp.n_states, dtype=P_pi.dtype, device=P_pi.device)
    return torch.linalg.solve(identity - mdp.gamma * P_pi, r_pi[..., None])[..., 0]


def evaluate(mdp: MDP, pi: Tensor) -> Tensor:
    """V^pi = (I - gamma P^pi)^{-1} r^pi by a linear solve.  pi ``[..., S, A]`` to ``[..., S]``.

    Raises:
        ValueError: if `pi` has the wrong shape or leaves the simplex.
    """
    return _evaluate(mdp, check_policy(mdp, pi))


def one_hot_greedy(Q: Tensor, slack: Tensor | float = 0.0) -> Tensor:
    """One-hot policy at the lowest action index within `slack` of the maximum.  ``[..., S, A]`` to the same."""
    near = Q >= Q.amax(-1, keepdim=True) - slack
    return torch.nn.functional.one_hot(near.to(torch.uint8).argmax(-1), Q.shape[-1]).to(Q.dtype)


def solve(mdp: MDP, *, max_iterations: int = 1000) -> Solution:
    """Exact solution by policy iteration on the whole batch at once (Puterman 1994, section 6.4).

    `pi_star` is one-hot at the lowest action index within ``1e-10 (1 + B)`` of the maximum of ``Q_star``.

    Raises:
        RuntimeError: if policy iteration has not settled after `max_iterations` (never seen; it ends in a few steps).
    """
    tol = (1e-14 * (1 + mdp.value_bound))[..., None]
    pi = one_hot_greedy(mdp.R)
    V = _evaluate(mdp, pi)
    for _ in range(max_iterations):
        Q = action_values(mdp, V)
        better = Q.amax(-1) > (pi * Q).sum(-1) + tol
        candidate = torch.where(better[..., None], one_hot_greedy(Q), pi)
        V_next = _evaluate(mdp, candidate)
        # Rounding can make two near-tied policies look better than each other in turn: only a real gain counts.
        gain = better.any(-1) & (V_next.sum(-1) > V.sum(-1))
        if not gain.any():
            slack = (TIE_TOL * (1 + mdp.value_bound))[..., None, None]
            return Solution(V, Q, one_hot_greedy(Q, slack))
        pi = torch.where(gain[..., None, None], candidate, pi)
        V = torch.where(gain[..., None], V_next, V)
    raise RuntimeError(f"policy iteration did not settle in {max_iterations} iterations")


def normalized_loss(mdp: MDP, pi: Tensor, solution: Solution | None = None) -> Tensor:
    """Score of a returned policy: (J* - J(pi)) / (J* - J(uniform)), J(pi) = mean_s V^pi(s); 0 is optimal, 1 is uniform.

    Args:
        mdp: the MDPs, ``[*batch]``.
        pi: policies ``[..., S, A]``, with any leading dimensions that broadcast against the batch.
        solution: `solve(mdp)` if it is known already.

    Returns:
        ``[...]``; 0 where J* - J(uniform) <= 1e-12 max(1, B), since every policy is optimal there.
    """
    solution = solution or solve(mdp)
    J_star = solution.V_star.mean(-1)
    uniform = torch.full_like(mdp.R, 1 / mdp.n_actions)
    scale = J_star - _evaluate(mdp, uniform).mean(-1)
    flat = scale <= 1e-12 * mdp.value_bound.clamp(min=1)
    gap = J_star - evaluate(mdp, pi).mean(-1)
    return torch.where(flat, 0.0, gap / torch.where(flat, 1.0, scale))
