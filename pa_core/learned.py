"""Between a trained network and the closed loop: what each network sees, and the callables that `control` runs."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .decoder import Decoder
from .mdp import MDP
from .tokens import (
    TokenLayout,
    Transitions,
    actor_query_tokens,
    critic_query_tokens,
    gauge_fixed,
    memory_tokens,
    sample_transitions,
    transition_tokens,
)


def actor_inputs(
    layout: TokenLayout, log_pi: Tensor, Q: Tensor, eta: float | Tensor, *, clamp: float, raw: bool = False
) -> Tensor:
    """Tokens of an actor's round, ``[*batch, S*A + S, width]``: memory, then the queries.

    Args:
        layout: the token layout.
        log_pi, Q: the context, ``[*batch, S, A]``.
        eta: scalar or ``[*batch]``.
        clamp: the network sees max(log pi, clamp).
        raw: give Q itself in the Q slot (the ablation) instead of Q - max_a Q in the adv slot.
    """
    value = {"Q": Q} if raw else {"adv": gauge_fixed(Q)}
    memory = memory_tokens(layout, Q, log_pi=log_pi.clamp(min=clamp), **value)
    return torch.cat([memory, actor_query_tokens(layout, Q, eta)], -2)


def critic_inputs(layout: TokenLayout, Q: Tensor, transitions: Transitions) -> Tensor:
    """Tokens of a critic's round, ``[*batch, S*A + n + S*A, width]``: memory with Q minus its mean, transitions, queries."""
    centred = Q - Q.mean((-2, -1), keepdim=True)
    parts = [memory_tokens(layout, Q, Q=centred), transition_tokens(layout, Q, transitions)]
    return torch.cat([*parts, critic_query_tokens(layout, Q)], -2)


@dataclass(frozen=True)
class LearnedActor:
    """A trained actor as `control` wants it: ``(log_pi, Q, eta) -> log_pi_next``, float64 ``[*batch, S, A]``.

    Attributes:
        decoder: one run.
        layout, clamp, raw: see `actor_inputs`.
        increment: the read-out is log pi + network output instead of the network output.
    """

    decoder: Decoder
    layout: TokenLayout
    clamp: float
    raw: bool = False
    increment: bool = False

    @torch.no_grad()
    def logits(self, log_pi: Tensor, Q: Tensor, eta: float | Tensor) -> Tensor:
        """The read-out before the softmax, ``[*batch, S, A]``."""
        weight = self.decoder.head_w
        n_states = Q.shape[-2]
        tokens = actor_inputs(self.layout, log_pi, Q, eta, clamp=self.clamp, raw=self.raw).to(weight)
        out = self.decoder(tokens.reshape(-1, *tokens.shape[-2:]), last=n_states).to(Q)
        out = out.reshape(Q.shape)
        return out + log_pi if self.increment else out

    def __call__(self, log_pi: Tensor, Q: Tensor, eta: float | Tensor) -> Tensor:
        return torch.log_softmax(self.logits(log_pi, Q, eta), -1)


@dataclass(frozen=True)
class LearnedCritic:
    """A trained critic as `control` wants it: ``(mdp, log_pi_next, Q, rng) -> Q_next``.

    It sees `samples_per_pair` generative draws of every (s, a) and returns rbar + gamma (Qbar + mean Q); gamma stays
    outside the network, and the mean of Q is taken out before it and added back after it.
    """

    decoder: Decoder
    layout: TokenLayout
    samples_per_pair: int

    @torch.no_grad()
    def read(self, Q: Tensor, transitions: Transitions) -> tuple[Tensor, Tensor]:
        """(rbar, Qbar) for given transitions, each ``[*batch, S, A]``; Qbar is relative to the mean of Q."""
        tokens = critic_inputs(self.layout, Q, transitions).to(self.decoder.head_w)
        out = self.decoder(tokens.reshape(-1, *tokens.shape[-2:]), last=Q.shape[-2] * Q.shape[-1]).to(Q)
        r, q = out.reshape(*Q.shape, 2).unbind(-1)
        return r, q

    def __call__(self, mdp: MDP, log_pi_next: Tensor, Q: Tensor, rng: np.random.Generator | None) -> Tensor:
        if rng is None:
            raise ValueError("a critic that samples needs rng, a numpy Generator")
        r, q = self.read(Q, sample_transitions(mdp, log_pi_next, self.samples_per_pair, rng))
        return r + mdp.gamma * (q + Q.mean((-2, -1), keepdim=True))
