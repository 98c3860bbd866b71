"""The token layout: one place that says which number stands where, for constructed and learned networks alike.

A token is a row of width ``2 C + 2 A + 9`` with named slices

    kind (4) | s (C) | a (A) | s_next (C) | a_next (A) | log_pi | adv | Q | eta | r

where C is the length of a state's code: S for one-hot states.  The causal order in a round is memory, actor queries, (the
environment samples), transitions, critic queries.  Sampling lives here, outside every network.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .mdp import MDP

KINDS = ("memory", "actor_query", "transition", "critic_query")
ABSENT = -1e4  # log-weight of a pair that a batch mate has and this MDP has not: exp(-1e4) is exactly 0


@dataclass(frozen=True)
class TokenLayout:
    """Named slices of a token.

    Attributes:
        state_dim: length C of a state's code (S for one-hot states).
        n_actions: A.
    """

    state_dim: int
    n_actions: int

    def __post_init__(self) -> None:
        for name in ("state_dim", "n_actions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)!r}")

    @property
    def slices(self) -> dict[str, slice]:
        sizes = dict(kind=len(KINDS), s=self.state_dim, a=self.n_actions, s_next=self.state_dim, a_next=self.n_actions)
        sizes |= dict(log_pi=1, adv=1, Q=1, eta=1, r=1)
        ends = np.cumsum(list(sizes.values())).tolist()
        return {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}

    @property
    def width(self) -> int:
        return 2 * self.state_dim + 2 * self.n_actions + len(KINDS) + 5

    def column(self, name: str) -> int:
        """Column of a one-wide slot, or of a token kind (``"memory"``, ...)."""
        if name in KINDS:
            return self.slices["kind"].start + KINDS.index(name)
        where = self.slices[name]
        if where.stop - where.start != 1:
            raise KeyError(f"{name} is {where.stop - where.start} columns wide; use slices[{name!r}]")
        return where.start


@dataclass(frozen=True)
class Transitions:
    """Transitions between numbered states and actions: s, a, s_next, a_next int64, r and log_weight float, ``[*batch, n]``.

    `log_weight` is 0 for a sampled transition; a population token carries log P(s'|s,a) + log pi(a'|s').
    """

    s: Tensor
    a: Tensor
    s_next: Tensor
    a_next: Tensor
    r: Tensor
    log_weight: Tensor


def gauge_fixed(Q: Tensor) -> Tensor:
    """adv(s,a) = Q(s,a) - max_a Q(s,a) <= 0: PMD does not see a per-state shift of Q.  ``[..., S, A]`` to the same."""
    return Q - Q.amax(-1, keepdim=True)


def one_hot_codes(n_states: int, like: Tensor) -> Tensor:
    """The plain state codes: the identity, ``[S, S]``."""
    return torch.eye(n_states, dtype=like.dtype, device=like.device)


def _pairs(layout: TokenLayout, codes: Tensor, batch: torch.Size) -> Tensor:
    """Tokens for every (s, a), s-major, with kind and value slots empty: ``[*batch, S*A, width]``."""
    n_states, n_actions = codes.shape[-2], layout.n_actions
    tokens = codes.new_zeros(*batch, n_states, n_actions, layout.width)
    tokens[..., layout.slices["s"]] = codes[..., :, None, :]
    tokens[..., layout.slices["a"]] = torch.eye(n_actions, dtype=codes.dtype, device=codes.device)
    return tokens.flatten(-3, -2)


def memory_tokens(
    layout: TokenLayout,
    like: Tensor,
    *,
    log_pi: Tensor | None = None,
    adv: Tensor | None = None,
    Q: Tensor | None = None,
    codes: Tensor | None = None,
) -> Tensor:
    """One token for every (s, a): ``[*batch, S*A, width]``, s-major.

    Args:
        layout: the token layout.
        like: any ``[*batch, S, A]`` tensor; gives shape, dtype and device.
        log_pi, adv, Q: values ``[*batch, S, A]`` for their slots; a slot that is not given stays 0.
        codes: state codes ``[S, C]`` or ``[*batch, S, C]``; one-hot if not given.
    """
    codes = one_hot_codes(like.shape[-2], like) if codes is None else codes
    tokens = _pairs(layout, codes, like.shape[:-2])
    tokens[..., layout.column("memory")] = 1
    for name, value in (("log_pi", log_pi), ("adv", adv), ("Q", Q)):
        if value is not None:
            tokens[..., layout.column(name)] = value.flatten(-2)
    return tokens


def actor_query_tokens(
    layout: TokenLayout, like: Tensor, eta: float | Tensor, *, codes: Tensor | None = None
) -> Tensor:
    """One token for every state, carrying eta: ``[*batch, S, width]``.  `eta` is a scalar or ``[*batch]``."""
    codes = one_hot_codes(like.shape[-2], like) if codes is None else codes
    tokens = like.new_zeros(*like.shape[:-1], layout.width)
    tokens[..., layout.column("actor_query")] = 1
    tokens[..., layout.slices["s"]] = codes
    eta = torch.as_tensor(eta, dtype=like.dtype, device=like.device)
    tokens[..., layout.column("eta")] = eta[..., None] if eta.dim() else eta
    return tokens


def critic_query_tokens(layout: TokenLayout, like: Tensor, *, codes: Tensor | None = None) -> Tensor:
    """One token for every (s, a): ``[*batch, S*A, width]``, s-major."""
    codes = one_hot_codes(like.shape[-2], like) if codes is None else codes
    tokens = _pairs(layout, codes, like.shape[:-2])
    tokens[..., layout.column("critic_query")] = 1
    return tokens


def transition_tokens(
    layout: TokenLayout, like: Tensor, transitions: Transitions, *, codes: Tensor | None = None
) -> Tensor:
    """One token for every transition: ``[*batch, n, width]``; the `log_pi` slot carries the log-weight."""
    codes = one_hot_codes(like.shape[-2], like) if codes is None else codes
    codes = codes.expand(*like.shape[:-2], *codes.shape[-2:])
    actions = torch.eye(layout.n_actions, dtype=like.dtype, device=like.device)
    tokens = like.new_zeros(*transitions.s.shape, layout.width)
    tokens[..., layout.column("transition")] = 1
    for name in ("s", "s_next"):
        index = getattr(transitions, name)[..., None].expand(*transitions.s.shape, codes.shape[-1])
        tokens[..., layout.slices[name]] = codes.gather(-2, index)
    for name in ("a", "a_next"):
        tokens[..., layout.slices[name]] = actions[getattr(transitions, name)]
    tokens[..., layout.column("r")] = transitions.r.to(like)
    tokens[..., layout.column("log_pi")] = transitions.log_weight.to(like)
    return tokens


def round_tokens(
    layout: TokenLayout,
    log_pi: Tensor,
    Q: Tensor,
    *,
    eta: float | Tensor | None = None,
    transitions: Transitions | None = None,
) -> Tensor:
    """A round's tokens in causal order, ``[*batch, T, width]``: memory | actor queries | transitions | critic queries.

    Actor queries are there if `eta` is given; transitions and critic queries if `transitions` are.
    """
    parts = [memory_tokens(layout, Q, log_pi=log_pi, adv=gauge_fixed(Q), Q=Q)]
    if eta is not None:
        parts.append(actor_query_tokens(layout, Q, eta))
    if transitions is not None:
        parts += [transition_tokens(layout, Q, transitions), critic_query_tokens(layout, Q)]
    return torch.cat(parts, -2)


def _inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """Indices drawn from rows of `weights` ``[..., K]`` with uniforms `u` ``[..., m]`` in [0, 1)."""
    cdf = weights.cumsum(-1)
    # Scaled by the row's own total, u stays below it, so an index of weight 0 can never be hit.
    return torch.searchsorted(cdf, u * cdf[..., -1:], right=True).clamp(max=weights.shape[-1] - 1)


def sample_transitions(mdp: MDP, log_pi_next: Tensor, m: int, rng: np.random.Generator) -> Transitions:
    """`m` generative draws for every pair: s' ~ P(.|s,a), a' ~ pi_next(.|s'), r = R[s,a] exactly.

    The draws are made on the CPU from `rng` alone, so that data are equal on every device.

    Args:
        mdp: MDPs ``[*batch]``.
        log_pi_next: the policy that the actor returned, ``[*batch, S, A]``.
        m: draws a pair, >= 1.
        rng: generator.

    Returns:
        `Transitions` ``[*batch, S*A*m]``, pair-major, on the MDP's device.
    """
    if m < 1:
        raise ValueError(f"every pair needs at least one transition, got m = {m}")
    *batch, n_states, n_actions = mdp.R.shape
    shape = (*batch, n_states, n_actions, m)
    u = torch.from_numpy(rng.random((2, *shape)))
    device = mdp.P.device
    s_next = _inverse_cdf(mdp.P.cpu(), u[0]).flatten(-3)
    rows = log_pi_next.cpu().exp().gather(-2, s_next[..., None].expand(*s_next.shape, n_actions))
    a_next = _inverse_cdf(rows, u[1].flatten(-3)[..., None])[..., 0]
    s = torch.arange(n_states)[:, None, None].expand(shape).flatten(-3)
    a = torch.arange(n_actions)[:, None].expand(shape).flatten(-3)
    r = mdp.R.cpu()[..., None].expand(shape).flatten(-3)
    return Transitions(*(x.to(device) for x in (s, a, s_next, a_next, r, torch.zeros_like(r))))


def population_transitions(mdp: MDP, log_pi_next: Tensor) -> Transitions:
    """One weighted transition for every (s, a, s', a') with P > 0 anywhere in the batch: softmax averaging is exact.

    Returns:
        `Transitions` ``[*batch, n]``; an MDP that lacks a pair which a batch mate has carries it at log-weight -1e4.
    """
    *batch, n_states, n_actions = mdp.R.shape
    present = (mdp.P > 0).reshape(-1, n_states, n_actions, n_states).any(0)
    s, a, s_next = present.nonzero().repeat_interleave(n_actions, 0).T
    a_next = torch.arange(n_actions, device=s.device).repeat(len(s) // n_actions)
    P = mdp.P[..., s, a, s_next]
    log_weight = torch.where(P > 0, P.log() + log_pi_next[..., s_next, a_next], ABSENT)
    index = (x.expand(*batch, -1) for x in (s, a, s_next, a_next))
    return Transitions(*index, mdp.R[..., s, a], log_weight)
