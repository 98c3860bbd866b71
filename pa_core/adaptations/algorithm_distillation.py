"""Algorithm Distillation (Laskin et al. 2023) for finite MDPs: a causal Transformer that continues a learner's history.

Token t carries the last transition and the present state, the sum of their embeddings and of a learned position,

    x_t = E_prev[s_{t-1}] + E_action[a_{t-1}] + r_{t-1} e_reward + E_state[s_t] + E_position[t],

without the first three at t = 0; the read-out at t gives the logits of a_t.  Pre-LN blocks without biases, GELU, and a final
LayerNorm.  Deployed frozen, it improves because the histories that it imitates do.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..online import Sizes, Steps


@dataclass(frozen=True)
class DistillerSizes:
    """Sizes of the network; `positions` bounds the length of a history in tokens."""

    n_states: int
    n_actions: int
    width: int = 144
    n_layer: int = 4
    n_head: int = 4
    d_ffn: int = 576
    positions: int = 1000


@dataclass(frozen=True)
class Tokens:
    """Histories as the network reads them, ``[B, T]``: previous state, action, reward and present state.

    `first` is 0 where there is no last transition, else 1.
    """

    s_prev: Tensor
    a_prev: Tensor
    r_prev: Tensor
    s: Tensor
    first: Tensor

    @classmethod
    def of(cls, s: Tensor, a: Tensor, r: Tensor) -> "Tokens":
        """Tokens of whole histories: s, a, r ``[B, T]`` in order of time."""
        zero = torch.zeros_like(s[:, :1])
        present = torch.ones_like(r)
        present[:, 0] = 0
        shifted = (torch.cat([zero.to(x), x[:, :-1]], 1) for x in (s, a, r))
        return cls(*shifted, s, present)


class Distiller(nn.Module):
    """The network.  ``forward`` reads whole histories, `extend` one more token against a `Cache`."""

    def __init__(self, sizes: DistillerSizes) -> None:
        super().__init__()
        self.sizes, d = sizes, sizes.width
        if d % sizes.n_head:
            raise ValueError(f"n_head {sizes.n_head} must divide width {d}")
        self.prev_state, self.state = nn.Embedding(sizes.n_states, d), nn.Embedding(sizes.n_states, d)
        self.action, self.position = nn.Embedding(sizes.n_actions, d), nn.Embedding(sizes.positions, d)
        self.reward = nn.Linear(1, d, bias=False)
        layers = range(sizes.n_layer)
        self.ln1, self.ln2 = (nn.ModuleList(nn.LayerNorm(d) for _ in layers) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(d, 3 * d, bias=False) for _ in layers)
        self.out = nn.ModuleList(nn.Linear(d, d, bias=False) for _ in layers)
        self.up = nn.ModuleList(nn.Linear(d, sizes.d_ffn, bias=False) for _ in layers)
        self.down = nn.ModuleList(nn.Linear(sizes.d_ffn, d, bias=False) for _ in layers)
        self.final = nn.LayerNorm(d)
        self.head = nn.Linear(d, sizes.n_actions)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> "Distiller":
        """N(0, 0.02^2) everywhere, residual writes / sqrt(2 n_layer); LayerNorms the identity, the head's bias 0."""
        for name, p in self.named_parameters():
            if name.startswith(("ln", "final")) or name == "head.bias":
                continue
            sd = 0.02 / math.sqrt(2 * self.sizes.n_layer) if name.startswith(("out", "down")) else 0.02
            p.copy_(torch.randn(p.shape, generator=generator) * sd)
        self.head.bias.zero_()
        return self

    @property
    def n_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def embed(self, tokens: Tokens, position: Tensor) -> Tensor:
        """``[B, T, width]``; `position` ``[T]`` or a single one."""
        last = self.prev_state(tokens.s_prev) + self.action(tokens.a_prev) + self.reward(tokens.r_prev[..., None])
        return tokens.first[..., None] * last + self.state(tokens.s) + self.position(position)

    def _heads(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of a block, each ``[B, H, T, d]``."""
        qkv = self.qkv[layer](self.ln1[layer](x)).unflatten(-1, (3, self.sizes.n_head, -1))
        return qkv.permute(2, 0, 3, 1, 4).unbind(0)  # type: ignore[return-value]

    def _finish(self, layer: int, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self.out[layer](mixed.transpose(1, 2).flatten(-2))
        return x + self.down[layer](F.gelu(self.up[layer](self.ln2[layer](x))))

    def forward(self, tokens: Tokens, cache: "Cache | None" = None) -> Tensor:
        """Logits at every position, ``[B, T, A]``; with an empty `cache`, its keys and values are kept there."""
        T = tokens.s.shape[1]
        x = self.embed(tokens, torch.arange(T, device=tokens.s.device))
        for layer in range(self.sizes.n_layer):
            q, k, v = self._heads(layer, x)
            if cache is not None:
                cache.k[layer, :, :, :T], cache.v[layer, :, :, :T] = k, v
            x = self._finish(layer, x, F.scaled_dot_product_attention(q, k, v, is_causal=True))
        if cache is not None:
            cache.length = T
        return self.head(self.final(x))

    def extend(self, tokens: Tokens, cache: "Cache", *, keep: bool) -> Tensor:
        """Logits of tokens ``[B, n]`` that all stand at the next position, each seeing the cache and itself: ``[B, n, A]``.

        With `keep` (n = 1) the token is added to the cache.
        """
        t = cache.length
        x = self.embed(tokens, torch.tensor(t))
        for layer in range(self.sizes.n_layer):
            q, k, v = self._heads(layer, x)
            past_k, past_v = cache.k[layer, :, :, :t], cache.v[layer, :, :, :t]
            own = (q * k).sum(-1, keepdim=True)
            weight = (torch.cat([q @ past_k.mT, own], -1) / math.sqrt(q.shape[-1])).softmax(-1)
            mixed = weight[..., :t] @ past_v + weight[..., t:] * v
            if keep:
                cache.k[layer, :, :, t], cache.v[layer, :, :, t] = k[:, :, 0], v[:, :, 0]
            x = self._finish(layer, x, mixed)
        cache.length += keep
        return self.head(self.final(x))


class Cache:
    """Keys and values ``[n_layer, B, H, positions, d]`` of the tokens read so far."""

    def __init__(self, sizes: DistillerSizes, n: int, positions: int) -> None:
        shape = (sizes.n_layer, n, sizes.n_head, positions, sizes.width // sizes.n_head)
        self.k, self.v, self.length = torch.zeros(shape), torch.zeros(shape), 0


class AlgorithmDistillation:
    """A trained network in the harness.

    Behaviour at every step is the network's, given all transitions so far; the returned policy asks it for every state in
    place of the present one, on the same context.

    Args:
        model: the network.
        context: transitions that it is given; beyond that it keeps the newest, dropping whole rounds.
        shuffle: a generator: rewards are replaced by ones drawn from those that the MDP has paid so far (the negative
            control).
    """

    window = 1

    def __init__(self, model: Distiller, *, context: int = 800, shuffle: np.random.Generator | None = None) -> None:
        if context >= model.sizes.positions:
            raise ValueError(f"a context of {context} transitions needs more than {model.sizes.positions} positions")
        self.model, self.context, self.shuffle = model.eval(), context, shuffle

    def reset(self, sizes: Sizes) -> None:
        m = self.model.sizes
        if (sizes.n_states, sizes.n_actions) != (m.n_states, m.n_actions):
            raise ValueError(f"the network has {m.n_states} states and {m.n_actions} actions, the MDPs {sizes}")
        if sizes.per_round > self.context:
            raise ValueError(f"a round of {sizes.per_round} does not fit a context of {self.context}")
        self.sizes, self.n = sizes, sizes.batch_shape.numel()
        self.cache = Cache(m, self.n, self.context + 1)
        self.history: list[tuple[Tensor, Tensor, Tensor]] = []  # (s, a, r seen) of every step in the context, each [n]
        self.paid: list[Tensor] = []  # rewards as they were

    @torch.no_grad()
    def _logits(self, state: Tensor, *, keep: bool) -> Tensor:
        """Log-probabilities for present states ``[n, k]``, ``[n, k, A]`` in float64."""
        zero = torch.zeros(self.n, dtype=torch.int64)
        s, a, r = self.history[-1] if self.history else (zero, zero, torch.zeros(self.n))
        last = (x[:, None].expand(state.shape) for x in (s, a, r))
        present = torch.full(state.shape, float(bool(self.history)))
        out = self.model.extend(Tokens(*last, state, present), self.cache, keep=keep)
        return out.to(torch.float64).log_softmax(-1)

    def act(self, state: Tensor) -> Tensor:
        if self.cache.length >= self.context:
            self._drop_a_round()
        log_pi = self._logits(state.reshape(self.n, 1), keep=True)
        return log_pi.reshape(*self.sizes.batch_shape, -1)

    @torch.no_grad()
    def _drop_a_round(self) -> None:
        """Forget the oldest round and read the rest again from position 0."""
        self.history, self.cache.length = self.history[self.sizes.per_round :], 0
        if self.history:
            self.model(Tokens.of(*(torch.stack(x, 1) for x in zip(*self.history, strict=True))), self.cache)

    def observe(self, steps: Steps) -> None:
        s, a, r = (x.reshape(self.n) for x in (steps.s, steps.a, steps.r.to(torch.float32)))
        self.paid.append(r)
        if self.shuffle is not None:
            pick = torch.from_numpy(self.shuffle.integers(len(self.paid), size=self.n))
            r = torch.stack(self.paid)[pick, torch.arange(self.n)]
        self.history.append((s, a, r))

    def policy(self) -> Tensor:
        every = torch.arange(self.sizes.n_states).expand(self.n, -1)
        return self._logits(every, keep=False).reshape(*self.sizes.batch_shape, self.sizes.n_states, -1)
