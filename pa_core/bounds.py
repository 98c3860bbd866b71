"""Residuals of an implemented round and the returned-policy theorem (paper, returned-policy theorem; book, chapter 03).

Round k: an actor returns ``log_pi_{k+1}`` from ``(log_pi_k, Q_k)``, then a critic returns ``Q_{k+1}``.  All residuals are
measured in the same context, never as differences between two trajectories that have drifted apart.  State-action arrays
are float64 ``[*batch, S, A]``; residuals are ``[*batch]`` and per-state quantities ``[*batch, S]``.
"""

import math

import torch
from torch import Tensor

from .mdp import MDP, backup
from .pmd import pmd_step


def actor_residual(log_pi: Tensor, Q: Tensor, eta: float | Tensor, log_pi_next: Tensor) -> Tensor:
    """zeta = max_s || pi_next(.|s) - PMD_eta(pi, Q)(.|s) ||_1, ``[*batch]``, between 0 and 2."""
    return (log_pi_next.exp() - pmd_step(log_pi, Q, eta).exp()).abs().sum(-1).amax(-1)


def critic_residual(mdp: MDP, log_pi_next: Tensor, Q: Tensor, Q_next: Tensor) -> Tensor:
    """delta = || Q_next - F^{pi_next} Q ||_inf, ``[*batch]``, in units of value."""
    return (Q_next - backup(mdp, log_pi_next.exp(), Q)).abs().amax((-2, -1))


def greedy_gap(log_pi_next: Tensor, Q: Tensor) -> Tensor:
    """g(s) = max_a Q(s,a) - <pi_next(.|s), Q(s,.)>, ``[*batch, S]``.

    Written as <pi_next, max Q - Q> so that it cannot turn negative by rounding.
    """
    return (log_pi_next.exp() * (Q.amax(-1, keepdim=True) - Q)).sum(-1)


def transition_lift(mdp: MDP, x: Tensor) -> Tensor:
    """max_{s,a} sum_s' P(s'|s,a) x(s'), ``[*batch, S]`` to ``[*batch]``; x may hold +inf where P is 0."""
    x = x[..., None, None, :]
    return torch.where(mdp.P > 0, mdp.P * x, 0.0).sum(-1).amax((-2, -1))


def prior_mass_price(log_pi: Tensor, Q: Tensor) -> Tensor:
    """D(s) = -log pi(argmax_a Q(s,a) | s), ``[*batch, S]``: what the prior charges for reaching the greedy set.

    The greedy set is exact equality with the maximum; +inf where the prior gives it no mass.
    """
    greedy = Q == Q.amax(-1, keepdim=True)
    mass = torch.logsumexp(torch.where(greedy, log_pi, -math.inf), dim=-1)
    return (-mass).clamp(min=0)  # a mass of 1 may round to 1 + 1e-16; a negative price divided by a small eta would show


def span(Q: Tensor) -> Tensor:
    """sp = max_s (max_a Q - min_a Q), ``[*batch]``."""
    return (Q.amax(-1) - Q.amin(-1)).amax(-1)


def greedy_gap_bound(price: Tensor, eta: float | Tensor, span: Tensor, zeta: Tensor) -> Tensor:
    """Theorem part (b): gap <= price / eta + (span / 2) zeta, ``[*batch]``.

    With the transition-lifted price it bounds gbar, with max_s D(s) it bounds gmax.  Proof: the PMD optimum does no worse
    than the prior conditioned on the greedy set, whose KL to the prior is the price; swapping the optimum for an actor at
    L1 distance zeta costs at most half the span of Q times zeta.
    """
    return price / eta + span / 2 * zeta


def critic_range_bound(value_bound: Tensor | float, delta_max: Tensor | float, gamma: float) -> Tensor | float:
    """||Q_k||_inf <= B + max_j delta_j / (1 - gamma) for every k, if ||Q_0||_inf <= B."""
    return value_bound + delta_max / (1 - gamma)


def error_recursion(E0: Tensor, delta: Tensor, gbar: Tensor, gamma: float) -> Tensor:
    """Theorem part (a) unrolled: the bound on E_k = ||Q* - Q_k||_inf from E_{k+1} <= gamma E_k + delta_k + gamma gbar_k.

    Args:
        E0: ``[*batch]``.
        delta, gbar: ``[rounds, *batch]``.
        gamma: discount.

    Returns:
        ``[rounds + 1, *batch]``; entry k uses delta_j and gbar_j for j < k only.
    """
    if delta.shape != gbar.shape:
        raise ValueError(f"delta and gbar must have one shape, got {tuple(delta.shape)} and {tuple(gbar.shape)}")
    E = [torch.as_tensor(E0, dtype=torch.float64).expand(delta.shape[1:])]
    for d, g in zip(delta, gbar, strict=True):
        E.append(gamma * E[-1] + d + gamma * g)
    return torch.stack(E)


def returned_policy_bound(E: Tensor, gmax: Tensor, gamma: float) -> Tensor:
    """Theorem part (c): ||V* - V^{pi_T}||_inf <= (2 E_{T-1} + max_s g_{T-1}(s)) / (1 - gamma).

    Args:
        E: E_{T-1} or a bound on it, ``[...]``; the last critic call (E_T, delta_{T-1}) does not enter.
        gmax: max_s g_{T-1}(s), ``[...]``.
        gamma: discount.
    """
    return (2 * E + gmax) / (1 - gamma)


def floor_distance_bound(floor: float, n_actions: int) -> float:
    """L1 distance that mixing with the uniform policy costs a row: at most 2 floor (A - 1) / A."""
    return 2 * floor * (n_actions - 1) / n_actions


def floored_step_size(floor: float, n_actions: int, theta: float) -> float:
    """eta = log(A / floor) / theta, the step at which a floored prior costs at most theta a round (part (d)).

    Raises:
        ValueError: unless ``0 < floor < 1`` and ``theta > 0``.
    """
    if not 0 < floor < 1 or not theta > 0:
        raise ValueError(f"need 0 < floor < 1 and theta > 0, got floor = {floor!r}, theta = {theta!r}")
    return math.log(n_actions / floor) / theta


def floored_bound(
    E0: Tensor | float, *, rounds: int, gamma: float, theta: float, zeta: float, delta: float, value_bound: float
) -> Tensor | float:
    """Theorem part (d): geometric transient plus residual neighbourhood for the floored loop at `floored_step_size`.

    ``2 gamma^{T-1} E_0 / (1-gamma) + 2 delta / (1-gamma)^2 + (1+gamma) (theta + B zeta) / (1-gamma)^2``, where `zeta` and
    `delta` bound every round (zeta measured after the floor, so it holds the floor's own term), |Q_k| <= B and the first
    policy has the floor.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be >= 1, got {rounds}")
    transient = 2 * gamma ** (rounds - 1) * E0 / (1 - gamma)
    return transient + (2 * delta + (1 + gamma) * (theta + value_bound * zeta)) / (1 - gamma) ** 2
