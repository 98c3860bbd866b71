"""The common harness of the benchmark: controllers that learn from sampled transitions alone, many MDPs at once.

A controller is anything with the methods of `Controller`.  It never holds the environment: the harness steps, counts the
transitions and hands them over.  One continuing trajectory an MDP, started from a uniform state; every draw is an inverse
CDF of uniforms that the caller fixes beforehand (`make_draws`), so controllers are compared on common random numbers.

Shapes: ``*batch`` are the MDPs' leading dimensions.  Draws may lack leading ones: a grid of settings ``[G, n]`` on the same
n MDPs shares the uniforms of ``[n]``, and a controller's settings are then numbers or tensors ``[G, 1]``.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .mdp import MDP, Solution, evaluate, normalized_loss, one_hot_greedy, solve

PER_ROUND = 20  # on-policy transitions a round in the benchmark
Setting = float | Tensor


class BudgetError(RuntimeError):
    """A controller asks for more transitions than the round gives."""


@dataclass(frozen=True)
class Sizes:
    """All that a controller knows before it sees data; `per_round` is its budget of transitions a round."""

    batch_shape: torch.Size
    n_states: int
    n_actions: int
    gamma: float
    per_round: int

    def table(self, value: float = 0.0) -> Tensor:
        """A float64 table ``[*batch, S, A]``."""
        return torch.full((*self.batch_shape, self.n_states, self.n_actions), value, dtype=torch.float64)


@dataclass(frozen=True)
class Steps:
    """Consecutive transitions in the order in which they happened: s, a, s_next int64, r float64, all ``[*batch, n]``."""

    s: Tensor
    a: Tensor
    r: Tensor
    s_next: Tensor

    @classmethod
    def join(cls, parts: "list[Steps]") -> "Steps":
        """Parts one after the other."""
        return cls(*(torch.cat([getattr(p, name) for p in parts], -1) for name in ("s", "a", "r", "s_next")))


class Controller(Protocol):
    """A policy that learns.

    `window` is the number of transitions that it wants at a time: None for a whole round, 1 for every step.  `reset` comes
    first, then for each round `act` at every step, `observe` whenever a window is full (and at the end of a round, with
    what there is), and `policy` at its end.
    """

    window: int | None

    def reset(self, sizes: Sizes) -> None:
        """Forget everything; `sizes` fits what follows."""

    def act(self, state: Tensor) -> Tensor:
        """Log-probabilities of the actions in the present states: int64 ``[*batch]`` to ``[*batch, A]``."""

    def observe(self, steps: Steps) -> None:
        """Learn from the transitions since the last call."""

    def policy(self) -> Tensor:
        """The policy that would be returned now, ``[*batch, S, A]`` of log-probabilities (-inf allowed)."""


@dataclass(frozen=True)
class Draws:
    """Uniforms in [0, 1): `start` ``[*tail]`` for the first state, `action` and `move` ``[n_steps, *tail]``."""

    start: Tensor
    action: Tensor
    move: Tensor

    def __len__(self) -> int:
        return len(self.action)


def make_draws(tail: tuple[int, ...], n_steps: int, rng: np.random.Generator) -> Draws:
    """Uniforms for `n_steps` steps of ``[*tail]`` MDPs; from the same generator state, fewer steps are the first of more."""
    start = torch.from_numpy(rng.random(tail))
    u = torch.from_numpy(rng.random((n_steps, 2, *tail)))
    return Draws(start, u[:, 0], u[:, 1])


def pick(cdf: Tensor, u: Tensor) -> Tensor:
    """Indices by inverse CDF: running sums ``[..., K]`` and uniforms ``[...]`` to int64 ``[...]``.

    Scaled by the row's own total, u stays below it, so that an index of weight 0 is never hit.
    """
    return (cdf <= (u * cdf[..., -1])[..., None]).sum(-1).clamp(max=cdf.shape[-1] - 1)


def rows(table: Tensor, state: Tensor) -> Tensor:
    """The present states' rows of a table: ``[*batch, S, K]`` and ``[*batch]`` to ``[*batch, K]``."""
    return torch.take_along_dim(table, state[..., None, None], -2).squeeze(-2)


def fitted(x: Setting, n: int) -> Setting:
    """A setting with `n` axes of size 1 appended, to meet ``*batch`` and `n` further axes."""
    return x.reshape(*x.shape, *[1] * n) if isinstance(x, Tensor) and x.dim() else x


class Trajectories:
    """One continuing trajectory an MDP, with the transitions counted: the harness's side of the boundary.

    Attributes:
        state: where each MDP is, int64 ``[*batch]``.
        used: transitions that each MDP has given so far.
        left: transitions that the present round still gives.
    """

    def __init__(self, mdp: MDP, draws: Draws) -> None:
        batch, n_states, n_actions = mdp.batch_shape, mdp.n_states, mdp.n_actions
        tail = draws.start.shape
        if any(n not in (1, m) for n, m in zip(tail[::-1], batch[::-1], strict=False)) or len(tail) > len(batch):
            raise ValueError(f"draws for {tuple(tail)} MDPs do not fit a batch {tuple(batch)}")
        self.mdp, self.draws, self.used, self.left = mdp, draws, 0, 0
        self._cdf = mdp.P.cumsum(-1).reshape(-1, n_states)
        self._reward = mdp.R.reshape(-1)
        self._first = (torch.arange(batch.numel()) * (n_states * n_actions)).reshape(batch)
        start = (draws.start * n_states).long().clamp(max=n_states - 1)
        self.state = start.expand(batch).clone()

    def open_round(self, per_round: int) -> None:
        """Grant a round's transitions; what was left of the last round is lost."""
        self.left = per_round

    def step(self, log_pi: Tensor) -> Steps:
        """One step of every MDP under log-probabilities ``[*batch, A]``; returns it as ``[*batch, 1]``.

        Raises:
            BudgetError: if the round's transitions, or the draws, are used up.
            ValueError: if a row is not a distribution.
        """
        if not self.left:
            raise BudgetError(f"the round's transitions are used up ({self.used} so far); no controller gets more")
        if self.used >= len(self.draws):
            raise BudgetError(f"the draws hold {len(self.draws)} steps, and all are used")
        cdf = log_pi.exp().cumsum(-1)
        if not ((cdf[..., -1] - 1).abs() < 1e-9).all():  # NaN fails the comparison
            at = tuple((~((cdf[..., -1] - 1).abs() < 1e-9)).nonzero()[0].tolist())
            raise ValueError(f"act() must return log-probabilities; those at index {at} sum to {cdf[at][-1].item():.12g}")
        s = self.state
        a = pick(cdf, self.draws.action[self.used])
        pair = self._first + s * self.mdp.n_actions + a
        self.state = pick(self._cdf[pair], self.draws.move[self.used])
        self.used += 1
        self.left -= 1
        return Steps(*(x[..., None] for x in (s, a, self._reward[pair], self.state)))


@dataclass(frozen=True)
class OnlineRecord:
    """What a run leaves: T rounds, entry 0 before any data.

    Attributes:
        log_pi: returned policies, ``[T + 1, *batch, S, A]``.
        loss: their normalised loss, ``[T + 1, *batch]``.
        greedy_loss: the loss of their most probable actions, ``[T + 1, *batch]``.
        regret: cumulated gap V*(s_t) - sum_a pi_t(a|s_t) Q*(s_t, a) of the behaviour at the visited states, in units of
            (1 - gamma)(J* - J(uniform)), what uniform play pays a step on average; ``[T + 1, *batch]``.
        steps: all transitions, ``[*batch, T * n]``.
        n_transitions: transitions an MDP, as the harness counted them.
    """

    log_pi: Tensor
    loss: Tensor
    greedy_loss: Tensor
    regret: Tensor
    steps: Steps
    n_transitions: int


def check_returned(log_pi: Tensor, mdp: MDP, where: str) -> Tensor:
    """A returned policy as float64, refused unless its rows are log-probabilities ``[*batch, S, A]``.

    Raises:
        ValueError: for a wrong shape or a row that does not sum to 1; the index is named.
    """
    log_pi = log_pi.to(torch.float64)
    if log_pi.shape != mdp.R.shape:
        raise ValueError(f"{where} has shape {tuple(log_pi.shape)}, not {tuple(mdp.R.shape)}")
    if not (ok := (log_pi.exp().sum(-1) - 1).abs() < 1e-9).all():
        at = tuple((~ok).nonzero()[0].tolist())
        raise ValueError(f"{where} is not normalised at index {at}: it sums to {log_pi[at].exp().sum().item():.12g}")
    return log_pi


def regret_unit(mdp: MDP, solution: Solution) -> Tensor:
    """(1 - gamma)(J* - J(uniform)), ``[*batch]``; infinite where every policy is optimal."""
    uniform = torch.full_like(mdp.R, 1 / mdp.n_actions)
    scale = (solution.V_star - evaluate(mdp, uniform)).mean(-1)
    flat = scale <= 1e-12 * mdp.value_bound.clamp(min=1)
    return torch.where(flat, torch.inf, (1 - mdp.gamma) * scale)


def run_online(
    mdp: MDP,
    controller: Controller,
    *,
    rounds: int,
    draws: Draws,
    per_round: int = PER_ROUND,
    solution: Solution | None = None,
) -> OnlineRecord:
    """Run a controller for `rounds` rounds of `per_round` on-policy transitions and score what it returns after each.

    Args:
        mdp: MDPs ``[*batch]``.
        controller: see `Controller`; it is reset first.
        rounds: number of rounds, >= 1.
        draws: uniforms for at least ``rounds * per_round`` steps.
        per_round: transitions a round, >= 1.
        solution: `solve(mdp)` if it is known already.

    Raises:
        BudgetError: if the controller's window is longer than a round.
        ValueError: for sizes below 1, too few draws, or a policy that is not one.
    """
    if rounds < 1 or per_round < 1:
        raise ValueError(f"rounds and per_round must be >= 1, got {rounds} and {per_round}")
    if len(draws) < rounds * per_round:
        raise ValueError(f"{rounds} rounds of {per_round} need {rounds * per_round} draws, got {len(draws)}")
    window = per_round if controller.window is None else controller.window
    if not 1 <= window <= per_round:
        raise BudgetError(f"the controller asks for {window} transitions at a time; a round has {per_round}")
    solution = solution or solve(mdp)
    gap = (solution.V_star[..., None] - solution.Q_star) / regret_unit(mdp, solution)[..., None, None]
    world = Trajectories(mdp, draws)
    controller.reset(Sizes(mdp.batch_shape, mdp.n_states, mdp.n_actions, mdp.gamma, per_round))
    returned = [check_returned(controller.policy(), mdp, "the first policy")]
    paid = torch.zeros(mdp.batch_shape, dtype=torch.float64)
    regret, steps = [paid], []
    for k in range(rounds):
        world.open_round(per_round)
        pending: list[Steps] = []
        while world.left:
            state, log_pi = world.state, controller.act(world.state).to(torch.float64)
            pending.append(world.step(log_pi))
            paid = paid + (log_pi.exp() * rows(gap, state)).sum(-1)
            if len(pending) == window or not world.left:
                steps.append(Steps.join(pending))
                controller.observe(steps[-1])
                pending = []
        returned.append(check_returned(controller.policy(), mdp, f"the policy after round {k + 1}"))
        regret.append(paid)
    log_pi = torch.stack(returned)
    loss = normalized_loss(mdp, log_pi.exp(), solution)
    greedy = normalized_loss(mdp, one_hot_greedy(log_pi), solution)
    return OnlineRecord(log_pi, loss, greedy, torch.stack(regret), Steps.join(steps), world.used)
