"""Model-free controllers without a network: actor-critics, SARSA, expected SARSA, Q-learning.

All are batched and run in `online.run_online`.  Settings (step sizes, temperatures, ...) are numbers or tensors that
broadcast against ``*batch``, so that a whole tuning grid is one run.  Tables start at 0, hence policies at uniform, unless
said otherwise.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from .online import Setting, Sizes, Steps, fitted, rows


def add_at(table: Tensor, index: Tensor, value: Tensor) -> Tensor:
    """`table` ``[*batch, S, K]`` plus rows `value` ``[*batch, n, K]`` added at states `index` ``[*batch, n]``."""
    return table.scatter_add(-2, index[..., None].expand(value.shape), value)


def explored(log_pi: Tensor, exploration: Setting) -> Tensor:
    """log((1 - e) pi + e / A), the behaviour with a share `e` of uniform actions.  ``[..., A]`` to the same."""
    return torch.log((1 - exploration) * log_pi.exp() + exploration / log_pi.shape[-1])


def actor_critic_increments(
    w: Tensor, logits: Tensor, steps: Steps, gamma: float, *, discounted_actor: bool = True
) -> tuple[Tensor, Tensor]:
    """Unit-rate increments of the batch actor-critic on a window of n transitions, one-hot features (Liang and Lai 2026):

        delta_i = r_i + gamma w(s_i') - w(s_i),
        dw = (1/n) sum_i delta_i e(s_i),   dlogits(s_i, .) = (1/n) sum_i gamma^i delta_i (e(a_i) - pi(. | s_i)).

    Args:
        w: critic ``[*batch, S]``.
        logits: actor ``[*batch, S, A]``; pi is its softmax.
        steps: the window, ``[*batch, n]``.
        gamma: discount.
        discounted_actor: with the factor gamma^i of the source, or without.

    Returns:
        ``(dw [*batch, S], dlogits [*batch, S, A])``.
    """
    n, A = steps.s.shape[-1], logits.shape[-1]
    delta = steps.r + gamma * w.gather(-1, steps.s_next) - w.gather(-1, steps.s)  # [*batch, n]
    dw = torch.zeros_like(w).scatter_add(-1, steps.s, delta) / n
    pi = torch.take_along_dim(logits.softmax(-1), steps.s[..., None], -2)  # [*batch, n, A]
    weight = delta * gamma ** torch.arange(n, dtype=delta.dtype) if discounted_actor else delta
    score = torch.nn.functional.one_hot(steps.a, A) - pi
    return dw, add_at(torch.zeros_like(logits), steps.s, weight[..., None] * score) / n


class _SoftmaxActor:
    """A softmax policy over logits, with a share of uniform exploration; it returns the policy that it plays."""

    def __init__(self, exploration: Setting) -> None:
        self.exploration = exploration

    def reset(self, sizes: Sizes) -> None:
        self.sizes, self.logits = sizes, sizes.table()
        self.w = torch.zeros(*sizes.batch_shape, sizes.n_states, dtype=torch.float64)
        self._behaviour = self.policy()

    def policy(self) -> Tensor:
        log_pi = self.logits.log_softmax(-1)
        return explored(log_pi, fitted(self.exploration, 2)) if not _is_zero(self.exploration) else log_pi

    def act(self, state: Tensor) -> Tensor:
        return rows(self._behaviour, state)


def _is_zero(x: Setting) -> bool:
    return not isinstance(x, Tensor) and x == 0


class BatchActorCritic(_SoftmaxActor):
    """Softmax actor-critic that moves once a round by `actor_critic_increments`; rates `alpha` (actor), `beta` (critic).

    `discounted_actor` keeps the source's factor gamma^i; without it, every transition of the window counts alike.
    """

    window = None

    def __init__(
        self, alpha: Setting, beta: Setting, *, discounted_actor: bool = True, exploration: Setting = 0.0
    ) -> None:
        super().__init__(exploration)
        self.alpha, self.beta, self.discounted_actor = alpha, beta, discounted_actor

    def increments(self, steps: Steps) -> tuple[Tensor, Tensor]:
        """Unit-rate increments on a window; a trained block overrides this."""
        return actor_critic_increments(
            self.w, self.logits, steps, self.sizes.gamma, discounted_actor=self.discounted_actor
        )

    def observe(self, steps: Steps) -> None:
        dw, dlogits = self.increments(steps)
        self.w = self.w + fitted(self.beta, 1) * dw
        self.logits = self.logits + fitted(self.alpha, 2) * dlogits
        self._behaviour = self.policy()


class OnlineActorCritic(_SoftmaxActor):
    """Softmax actor-critic that moves at every transition: w(s) += beta delta, logits(s) += alpha delta (e(a) - pi(.|s))."""

    window = 1

    def __init__(self, alpha: Setting, beta: Setting, *, exploration: Setting = 0.0) -> None:
        super().__init__(exploration)
        self.alpha, self.beta = alpha, beta

    def observe(self, steps: Steps) -> None:
        dw, dlogits = actor_critic_increments(self.w, self.logits, steps, self.sizes.gamma)  # n = 1: gamma^0
        self.w = self.w + fitted(self.beta, 1) * dw
        self.logits = self.logits + fitted(self.alpha, 2) * dlogits
        self._behaviour = self.policy()


class _ActionValueLearner(ABC):
    """Q(s, a) += step * (target - Q(s, a)) at every transition, under a softmax or epsilon-greedy behaviour.

    Args:
        lr: step size; the n-th visit of a pair moves by ``lr * n^-decay``.
        level: for `softmax`, the inverse temperature; for `epsilon`, the share of uniform actions.
        behaviour: ``"softmax"`` or ``"epsilon"``.
        q0: first value of every pair (optimism).
        decay: 0 for a constant step, 1 for a running mean.
    """

    window = 1

    def __init__(
        self, lr: Setting, level: Setting, *, behaviour: str = "softmax", q0: Setting = 0.0, decay: Setting = 0.0
    ) -> None:
        if behaviour not in ("softmax", "epsilon"):
            raise ValueError(f"behaviour must be softmax or epsilon, got {behaviour!r}")
        self.lr, self.level, self.behaviour, self.q0, self.decay = lr, level, behaviour, q0, decay

    def reset(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.Q = sizes.table() + fitted(self.q0, 2)
        self.visits = sizes.table()

    def _behave(self, Q: Tensor, level: Setting) -> Tensor:
        if self.behaviour == "softmax":
            return (level * Q).log_softmax(-1)
        best = (Q == Q.amax(-1, keepdim=True)).to(Q.dtype)  # ties share, so that a flat row is uniform
        return explored((best / best.sum(-1, keepdim=True)).log(), level)

    def policy(self) -> Tensor:
        return self._behave(self.Q, fitted(self.level, 2))

    def act(self, state: Tensor) -> Tensor:
        return self._behave(rows(self.Q, state), fitted(self.level, 1))

    @abstractmethod
    def observe(self, steps: Steps) -> None: ...

    def _update(self, s: Tensor, a: Tensor, target: Tensor) -> None:
        """Move the pairs (s, a) ``[*batch, 1]`` towards targets ``[*batch, 1]``."""
        pair, A = s * self.sizes.n_actions + a, self.sizes.n_actions
        self.visits = self.visits.flatten(-2).scatter_add(-1, pair, torch.ones_like(target)).unflatten(-1, (-1, A))
        rate = fitted(self.lr, 1)
        if not _is_zero(self.decay):
            rate = rate * self.visits.flatten(-2).gather(-1, pair) ** -fitted(self.decay, 1)
        change = rate * (target - self.Q.flatten(-2).gather(-1, pair))
        self.Q = self.Q.flatten(-2).scatter_add(-1, pair, change).unflatten(-1, (-1, A))


class QLearning(_ActionValueLearner):
    """target = r + gamma max_a' Q(s', a')."""

    def observe(self, steps: Steps) -> None:
        best = rows(self.Q, steps.s_next[..., 0]).amax(-1, keepdim=True)
        self._update(steps.s, steps.a, steps.r + self.sizes.gamma * best)


class ExpectedSarsa(_ActionValueLearner):
    """target = r + gamma sum_a' pi(a'|s') Q(s', a') under the present behaviour pi."""

    def observe(self, steps: Steps) -> None:
        row = rows(self.Q, steps.s_next[..., 0])
        expected = (self._behave(row, fitted(self.level, 1)).exp() * row).sum(-1, keepdim=True)
        self._update(steps.s, steps.a, steps.r + self.sizes.gamma * expected)


class Sarsa(_ActionValueLearner):
    """target = r + gamma Q(s', a') with the action a' that was taken: a transition counts once the next one is there."""

    def reset(self, sizes: Sizes) -> None:
        super().reset(sizes)
        self._last: Steps | None = None

    def observe(self, steps: Steps) -> None:
        if (last := self._last) is not None:
            next_pair = steps.s * self.sizes.n_actions + steps.a
            following = self.Q.flatten(-2).gather(-1, next_pair)
            self._update(last.s, last.a, last.r + self.sizes.gamma * following)
        self._last = steps
