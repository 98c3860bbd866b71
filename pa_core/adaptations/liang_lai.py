"""The linear-attention actor-critic of Liang and Lai 2026: one layer, one head, all of P and V allocated.

    H_out = H + (1/n) (V H) (H^T P H),   H in R^{D x (n+1)}, columns are tokens (the transpose of the rest of the package).

With one-hot features, d = S for the critic w and m = S A for the actor's logits.  Column i < n of the prompt is a
transition, the last column is the present learner:

    x_i = [e(s_i); gamma e(s_i'); r_i; gamma^i (e(s_i, a_i) - pi(. | s_i) at s_i)]  over zeros,    zeros over [1; logits; w].

The rows of a matrix split accordingly: block 1 is the transition (2d + 1 + m rows), block 2 the learner (1 + m + d rows).
The read-out, the last m + d rows of the last column, is the learner after one actor-critic step (the source's Theorem 3.3).
Rates stay outside: V21 = diag(alpha, beta) times a unit-rate block, so that one trained block serves every rate exactly.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..online import Setting, Steps
from ..tabular import BatchActorCritic


@dataclass(frozen=True)
class Shape:
    """Sizes of the prompt for S states and A actions."""

    n_states: int
    n_actions: int

    @property
    def critic(self) -> int:
        """d, the length of w."""
        return self.n_states

    @property
    def actor(self) -> int:
        """m, the length of the logits."""
        return self.n_states * self.n_actions

    @property
    def transition(self) -> int:
        """Rows of block 1."""
        return 2 * self.critic + 1 + self.actor

    @property
    def learner(self) -> int:
        """Rows of block 2."""
        return 1 + self.actor + self.critic

    @property
    def width(self) -> int:
        """D, the length of a token."""
        return self.transition + self.learner

    @property
    def n_parameters(self) -> int:
        """Entries of P and V."""
        return 2 * self.width**2

    @property
    def n_trained(self) -> int:
        """Entries that ever get a gradient: P12, and V21 without its first row."""
        return self.transition * (self.learner + self.actor + self.critic)


@dataclass(frozen=True)
class Block:
    """The weights ``P, V [D, D]`` at unit rates."""

    shape: Shape
    P: Tensor
    V: Tensor

    def with_rates(self, alpha: float, beta: float) -> "Block":
        """The block whose read-out moves by `alpha` (actor) and `beta` (critic): rows of V are scaled."""
        scale = torch.ones(self.shape.width, dtype=self.V.dtype)
        scale[-self.shape.actor - self.shape.critic : -self.shape.critic] = alpha
        scale[-self.shape.critic :] = beta
        return Block(self.shape, self.P, scale[:, None] * self.V)

    def attend(self, H: Tensor) -> Tensor:
        """H + (1/n)(V H)(H^T P H), ``[*batch, D, n + 1]`` to the same."""
        return H + (self.V @ H) @ (H.mT @ self.P @ H) / (H.shape[-1] - 1)

    def increments(self, X: Tensor, learner: Tensor) -> Tensor:
        """What the read-out adds to (logits, w): the last column of `attend`, computed from the blocks that reach it.

            (1/n) [ V21 X X^T P12 u + (u^T P22 u) V22 u ],   u the learner's column.

        Args:
            X: the transitions' columns, ``[*batch, 2d + 1 + m, n]``.
            learner: u = [1; logits; w], ``[*batch, 1 + m + d]``.

        Returns:
            ``[*batch, m + d]``.
        """
        k, n = self.shape.transition, X.shape[-1]
        out = self.V[k + 1 :, :k] @ (X @ (X.mT @ (self.P[:k, k:] @ learner[..., None])))
        weight = learner[..., None, :] @ self.P[k:, k:] @ learner[..., None]
        out = out + self.V[k + 1 :, k:] @ (weight * learner[..., None])
        return out[..., 0] / n


def transition_columns(logits: Tensor, steps: Steps, gamma: float, *, discounted_actor: bool = True) -> Tensor:
    """Block 1 of the prompt, ``[*batch, 2d + 1 + m, n]``; `discounted_actor` keeps the actor's factor gamma^i."""
    S, A, n = *logits.shape[-2:], steps.s.shape[-1]
    one_hot = torch.nn.functional.one_hot
    state, action = one_hot(steps.s, S).to(logits), one_hot(steps.a, A).to(logits)
    score = action - torch.take_along_dim(logits.softmax(-1), steps.s[..., None], -2)  # [*batch, n, A]
    if discounted_actor:
        score = score * gamma ** torch.arange(n, dtype=logits.dtype)[:, None]
    pair = (state[..., :, None] * score[..., None, :]).flatten(-2)
    following = gamma * one_hot(steps.s_next, S).to(logits)
    return torch.cat([state, following, steps.r.to(logits)[..., None], pair], -1).mT


def learner_column(w: Tensor, logits: Tensor) -> Tensor:
    """Block 2 of the prompt's last column, [1; logits; w], ``[*batch, 1 + m + d]``."""
    flat = logits.flatten(-2)
    return torch.cat([torch.ones_like(flat[..., :1]), flat, w], -1)


def make_prompt(w: Tensor, logits: Tensor, steps: Steps, gamma: float) -> Tensor:
    """The whole prompt H, ``[*batch, D, n + 1]``."""
    X, u = transition_columns(logits, steps, gamma), learner_column(w, logits)
    H = X.new_zeros(*X.shape[:-2], X.shape[-2] + u.shape[-1], X.shape[-1] + 1)
    H[..., : X.shape[-2], :-1] = X
    H[..., X.shape[-2] :, -1] = u
    return H


def assemble(shape: Shape, P12: Tensor, V21: Tensor) -> Block:
    """A block from the trained parts, ``P12 [2d+1+m, 1+m+d]`` and ``V21 [m+d, 2d+1+m]``; everything else is 0."""
    P, V = (P12.new_zeros(shape.width, shape.width) for _ in range(2))
    P[: shape.transition, shape.transition :] = P12
    V[shape.transition + 1 :, : shape.transition] = V21
    return Block(shape, P, V)


def construct_block(shape: Shape, *, c: float = 1.0) -> Block:
    """The exact actor-critic as weights: X^T P12 u are the TD errors (times c), V21 sorts them into actor and critic.

    Raises:
        ValueError: unless ``c`` is finite and not 0 (every such c gives the same function).
    """
    if not (abs(c) > 0 and abs(c) < float("inf")):
        raise ValueError(f"c must be finite and not 0, got {c!r}")
    d, m = shape.critic, shape.actor
    P12 = torch.zeros(shape.transition, shape.learner, dtype=torch.float64)
    P12[:d, 1 + m :] = -torch.eye(d)
    P12[d : 2 * d, 1 + m :] = torch.eye(d)
    P12[2 * d, 0] = 1
    V21 = torch.zeros(m + d, shape.transition, dtype=torch.float64)
    V21[:m, 2 * d + 1 :] = torch.eye(m)
    V21[m:, :d] = torch.eye(d)
    return assemble(shape, c * P12, V21 / c)


class LiangLai(BatchActorCritic):
    """The block in the harness: its own outputs are the next learner; `tabular.BatchActorCritic` is its teacher."""

    def __init__(
        self,
        block: Block,
        alpha: Setting,
        beta: Setting,
        *,
        discounted_actor: bool = True,
        exploration: Setting = 0.0,
    ) -> None:
        super().__init__(alpha, beta, discounted_actor=discounted_actor, exploration=exploration)
        self.block = Block(block.shape, block.P.to(torch.float64), block.V.to(torch.float64))

    def increments(self, steps: Steps) -> tuple[Tensor, Tensor]:
        X = transition_columns(self.logits, steps, self.sizes.gamma, discounted_actor=self.discounted_actor)
        out = self.block.increments(X, learner_column(self.w, self.logits))
        m = self.block.shape.actor
        return out[..., m:], out[..., :m].reshape(self.logits.shape)
