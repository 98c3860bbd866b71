"""The closed loop: any actor and any critic, fed their own outputs, with the residuals of every round on record.

An actor is a callable ``(log_pi, Q, eta) -> log_pi_next``; a critic a callable ``(mdp, log_pi_next, Q, rng) -> Q_next``.
Both work on float64 ``[*batch, S, A]``.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .bounds import (
    actor_residual,
    critic_residual,
    error_recursion,
    greedy_gap,
    greedy_gap_bound,
    prior_mass_price,
    returned_policy_bound,
    span,
    transition_lift,
)
from .mdp import MDP, Solution, backup, evaluate, solve
from .pmd import Eta, check_floor, check_log_policy, eta_at, mix_floor, pmd_step, start

Actor = Callable[[Tensor, Tensor, float | Tensor], Tensor]
Critic = Callable[[MDP, Tensor, Tensor, np.random.Generator | None], Tensor]


@dataclass(frozen=True)
class Trajectory:
    """History of a closed loop of T rounds.

    Attributes:
        log_pi, Q: ``[T + 1, *batch, S, A]``, the start included; ``log_pi[-1]`` is the returned policy.
        E: ``||Q* - Q_k||_inf``, ``[T + 1, *batch]``.
        zeta: actor residual against the exact PMD step in the same context, measured after the floor, ``[T, *batch]``.
        delta: critic residual against the exact one-step backup in the same context, ``[T, *batch]``.
        gbar: transition-lifted greedy gap, ``[T, *batch]``.
        gmax: largest greedy gap over states, ``[T, *batch]``.
    """

    log_pi: Tensor
    Q: Tensor
    E: Tensor
    zeta: Tensor
    delta: Tensor
    gbar: Tensor
    gmax: Tensor


def exact_actor(log_pi: Tensor, Q: Tensor, eta: float | Tensor) -> Tensor:
    """The exact PMD step."""
    return pmd_step(log_pi, Q, eta)


def exact_critic(mdp: MDP, log_pi_next: Tensor, Q: Tensor, rng: np.random.Generator | None = None) -> Tensor:
    """The exact one-step backup F^{pi_next} Q."""
    return backup(mdp, log_pi_next.exp(), Q)


def frozen_actor(log_pi: Tensor, Q: Tensor, eta: float | Tensor) -> Tensor:
    """An actor that never moves."""
    return log_pi


def contrary_actor(log_pi: Tensor, Q: Tensor, eta: float | Tensor) -> Tensor:
    """The adversary: all but e^-500 of the mass on the worst action of Q."""
    worst = torch.nn.functional.one_hot(Q.argmin(-1), Q.shape[-1]).to(Q)
    return torch.log_softmax(500 * worst, -1)


def noisy_actor(sd: float, rng: np.random.Generator) -> Actor:
    """The exact step with Gaussian noise on its logits."""

    def actor(log_pi: Tensor, Q: Tensor, eta: float | Tensor) -> Tensor:
        noise = torch.from_numpy(rng.normal(0, sd, Q.shape)).to(Q)
        return torch.log_softmax(pmd_step(log_pi, Q, eta) + noise, -1)

    return actor


def noisy_critic(sd: float) -> Critic:
    """The exact backup with Gaussian noise, drawn from the loop's `rng`."""

    def critic(mdp: MDP, log_pi_next: Tensor, Q: Tensor, rng: np.random.Generator) -> Tensor:
        return exact_critic(mdp, log_pi_next, Q) + torch.from_numpy(rng.normal(0, sd, Q.shape)).to(Q)

    return critic


def contrary_critic(size: float, Q_star: Tensor) -> Critic:
    """The adversary: the exact backup with the optimal action lowered by `size` and all others raised by `size`."""
    best = torch.nn.functional.one_hot(Q_star.argmax(-1), Q_star.shape[-1]).to(Q_star)

    def critic(mdp: MDP, log_pi_next: Tensor, Q: Tensor, rng: np.random.Generator | None = None) -> Tensor:
        return exact_critic(mdp, log_pi_next, Q) + size * (1 - 2 * best)

    return critic


def corrupted_critic(size: float, *, call: int) -> Critic:
    """The exact backup, except that call number `call` (from 0) subtracts `size` from each state's best action."""
    calls = itertools.count()

    def critic(mdp: MDP, log_pi_next: Tensor, Q: Tensor, rng: np.random.Generator | None = None) -> Tensor:
        target = exact_critic(mdp, log_pi_next, Q)
        best = torch.nn.functional.one_hot(target.argmax(-1), target.shape[-1]).to(target)
        return target - size * best if next(calls) == call else target

    return critic


def closed_loop(
    mdp: MDP,
    actor: Actor,
    critic: Critic,
    *,
    rounds: int,
    eta: Eta,
    log_pi: Tensor | None = None,
    Q: Tensor | None = None,
    floor: float = 0.0,
    rng: np.random.Generator | None = None,
    solution: Solution | None = None,
) -> Trajectory:
    """Run `rounds` rounds, policy first, and record every residual (book, chapter 03).

    Args:
        mdp: MDPs ``[*batch]``.
        actor, critic: see the module's text; `exact_actor` and `exact_critic` give Q-TD-PMD itself.
        rounds: number of rounds, >= 1.
        eta: step size: a scalar, a ``[*batch]`` tensor or a callable of the round.
        log_pi, Q: the start ``[*batch, S, A]``; uniform and 0 if not given.
        floor: mass mixed with the uniform policy after each actor call, ``0 <= floor < 1``.
        rng: generator handed to the critic, for critics that sample.
        solution: `solve(mdp)` if it is known already.

    Raises:
        ValueError: for a bad start, step size or floor, or when the actor returns rows that are not finite and
            normalised or the critic a non-finite value; the round and the index are named.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be >= 1, got {rounds}")
    check_floor(floor)
    log_pi, Q = start(mdp, log_pi, Q)
    Q_star = (solution or solve(mdp)).Q_star
    log_pis, Qs, E = [log_pi], [Q], [(Q_star - Q).abs().amax((-2, -1))]
    zeta, delta, gbar, gmax = [], [], [], []
    for k in range(rounds):
        eta_k = eta_at(eta, k, mdp.batch_shape)
        log_pi_next = actor(log_pi, Q, eta_k).to(torch.float64)
        if log_pi_next.shape != Q.shape:
            raise ValueError(f"the actor's log_pi of round {k} has shape {tuple(log_pi_next.shape)}, not {tuple(Q.shape)}")
        check_log_policy(log_pi_next, f"the actor's log_pi of round {k}")
        log_pi_next = mix_floor(log_pi_next, floor)
        Q_next = critic(mdp, log_pi_next, Q, rng).to(torch.float64)
        if Q_next.shape != Q.shape:
            raise ValueError(f"the critic's Q of round {k} has shape {tuple(Q_next.shape)}, not {tuple(Q.shape)}")
        if not torch.isfinite(Q_next).all():
            at = tuple((~torch.isfinite(Q_next)).nonzero()[0].tolist())
            raise ValueError(f"the critic's Q of round {k} is {Q_next[at].item()} at index {at}")
        gap = greedy_gap(log_pi_next, Q)
        zeta.append(actor_residual(log_pi, Q, eta_k, log_pi_next))
        delta.append(critic_residual(mdp, log_pi_next, Q, Q_next))
        gbar.append(transition_lift(mdp, gap))
        gmax.append(gap.amax(-1))
        log_pi, Q = log_pi_next, Q_next
        log_pis.append(log_pi)
        Qs.append(Q)
        E.append((Q_star - Q).abs().amax((-2, -1)))
    return Trajectory(*(torch.stack(x) for x in (log_pis, Qs, E, zeta, delta, gbar, gmax)))


@dataclass(frozen=True)
class Certificate:
    """What the returned-policy theorem says about a run, beside the truth; everything ``[T, *batch]`` by round.

    Attributes:
        contraction: part (a), ``gamma E_k + delta_k + gamma gbar_k``, a bound on ``E[k + 1]``.
        price: part (b), the lifted price over eta plus half the span times zeta, a bound on ``gbar[k]``.
        gap: the truth ``||V* - V^{pi_{k+1}}||_inf`` of the policy that round k returns.
        measured: part (c), a bound on `gap` from the measured ``E_k``.
        unrolled: part (c) with ``E_k`` bounded by the residuals of the rounds before it.
    """

    contraction: Tensor
    price: Tensor
    gap: Tensor
    measured: Tensor
    unrolled: Tensor


def certify(mdp: MDP, run: Trajectory, *, eta: Eta, solution: Solution | None = None) -> Certificate:
    """Parts (a)-(c) of the returned-policy theorem for a run that `closed_loop` recorded with step sizes `eta`."""
    solution = solution or solve(mdp)
    price = []
    for k, zeta in enumerate(run.zeta):
        lifted = transition_lift(mdp, prior_mass_price(run.log_pi[k], run.Q[k]))
        price.append(greedy_gap_bound(lifted, eta_at(eta, k, mdp.batch_shape), span(run.Q[k]), zeta))
    E = error_recursion(run.E[0], run.delta, run.gbar, mdp.gamma)
    return Certificate(
        contraction=mdp.gamma * run.E[:-1] + run.delta + mdp.gamma * run.gbar,
        price=torch.stack(price),
        gap=(solution.V_star - evaluate(mdp, run.log_pi[1:].exp())).abs().amax(-1),
        measured=returned_policy_bound(run.E[:-1], run.gmax, mdp.gamma),
        unrolled=returned_policy_bound(E[:-1], run.gmax, mdp.gamma),
    )
