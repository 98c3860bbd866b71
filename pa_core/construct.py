"""The constructed decoder: fixed weights that do policy mirror descent and one-step policy evaluation (book, chapter 04).

Two blocks of two heads, no MLP.  A head is a row of the table `heads`: its score is a sum of matches (a query slot times a
key slot), and it copies one slot of the keys into one output slot.  The weights hold no MDP, no step size and no round, and
this module knows neither the PMD step nor the exact critic.  `carrier` compiles the circuit into a pre-LN / final-LN
decoder (book, chapter 05).
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from . import tokens as tk
from .decoder import Decoder, DecoderConfig
from .mdp import MDP

QUERY_CHUNK = 128  # queries that attend at once: short chunks skip most of the later keys and need little memory
ROW_TOL = 1e-9  # |logsumexp log pi| of a row that counts as normalised


@dataclass(frozen=True)
class Head:
    """One attention head, as a rule on named slots.

    Attributes:
        name: what it does.
        matches: ``(query slot, key slot, gain)``; the score is the sum of gain * <query slot, key slot>.
        value, out: the slot that is read from the keys, and the slot that the average is written to.
    """

    name: str
    matches: tuple[tuple[str, str, float], ...]
    value: str
    out: str


def heads(routing_logit: float | tuple[float, float, float]) -> tuple[tuple[Head, Head], tuple[Head, Head]]:
    """The two blocks of the circuit.  A match whose key slot is a token kind is a gate."""
    kappa = (routing_logit,) * 3 if isinstance(routing_logit, (int, float)) else tuple(routing_logit)
    if len(kappa) != 3 or not all(math.isfinite(k) and k > 0 for k in kappa):
        raise ValueError(f"routing_logit must be one or three positive finite numbers, got {routing_logit!r}")
    act, look, mean = map(float, kappa)
    improve = (("s", "s", act), ("actor_query", "memory", act), ("actor_query", "log_pi", 1.0), ("eta", "adv", 1.0))
    find = (("s_next", "s", look), ("a_next", "a", look), ("transition", "memory", look))
    collect = (("s", "s", mean), ("a", "a", mean), ("critic_query", "transition", mean), ("critic_query", "log_pi", 1.0))
    return (
        (Head("actor", improve, "a", "policy"), Head("lookup", find, "Q", "lookup")),
        (Head("mean reward", collect, "r", "rbar"), Head("mean value", collect, "lookup", "Qbar")),
    )


def residual_slots(layout: tk.TokenLayout) -> dict[str, slice]:
    """Named slices of the residual stream: the token's own slots and kinds, then the four that the heads write."""
    named = layout.slices | {kind: slice(layout.column(kind), layout.column(kind) + 1) for kind in tk.KINDS}
    start = layout.width
    for name, size in (("policy", layout.n_actions), ("lookup", 1), ("rbar", 1), ("Qbar", 1)):
        named[name] = slice(start, start + size)
        start += size
    return named


def isometry(n_slots: int, carrier: float | None, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """J ``[n_slots, d_model]`` with orthonormal rows, and the unit carrier direction ``[d_model]`` (0 without carrier)."""
    if carrier is None:
        return torch.eye(n_slots, dtype=dtype), torch.zeros(n_slots, dtype=dtype)
    pair = torch.tensor([1.0, -1.0], dtype=torch.float64) / math.sqrt(2)
    J = torch.kron(torch.eye(n_slots + 1, dtype=torch.float64), pair[None]).to(dtype)
    return J[1:], J[0]


@torch.no_grad()
def constructed_decoder(
    n_states: int,
    n_actions: int,
    *,
    routing_logit: float | tuple[float, float, float],
    carrier: float | None = None,
    gates: bool = True,
    dtype: torch.dtype = torch.float64,
) -> Decoder:
    """The circuit's weights in a `Decoder` (paper, construction; book, chapters 04 and 05).

    Args:
        n_states, n_actions: sizes.
        routing_logit: kappa > 0, or one for each routing: (actor, lookup, average).  A key that misses one match weighs
            e^-kappa as much, so kappa sets every leak.
        carrier: norm H of the constant carrier of the normalised compilation; None: no LayerNorm at all.
        gates: False drops the matches with token kinds (a negative control: the critic is then wrong for every kappa).
        dtype: of the weights.

    Returns:
        Decoder whose read-out is ``[policy (A), rbar, Qbar, carrier]``; the carrier reads 1 without LayerNorm.
    """
    if carrier is not None and not (math.isfinite(carrier) and carrier > 0):
        raise ValueError(f"carrier must be positive and finite, got {carrier!r}")
    layout = tk.TokenLayout(n_states, n_actions)
    where = residual_slots(layout)
    n_slots, d_head = where["Qbar"].stop, n_states + n_actions + 2
    J, c = isometry(n_slots, carrier, dtype)
    sizes = dict(d_model=J.shape[1], n_layer=2, n_head=2, d_head=d_head, d_ffn=0, layer_norm=carrier is not None)
    config = DecoderConfig(layout.width, n_actions + 3, **sizes)
    decoder = Decoder(config, dtype=dtype, query_chunk=QUERY_CHUNK, value_width=n_actions).requires_grad_(False)
    weights = dict(decoder.named_parameters())
    weights["embed_w"][0] = J[: layout.width]
    eye = lambda name: torch.eye(where[name].stop - where[name].start, dtype=dtype)
    for block, pair in enumerate(heads(routing_logit)):
        qkv = torch.zeros(n_slots, 3, 2, d_head, dtype=dtype)
        out = torch.zeros(2, d_head, n_slots, dtype=dtype)
        for h, head in enumerate(pair):
            used = 0
            for query, key, gain in head.matches:
                if key in tk.KINDS and not gates:
                    continue
                n = len(eye(query))
                qkv[where[query], 0, h, used : used + n] = gain * math.sqrt(d_head) * eye(query)
                qkv[where[key], 1, h, used : used + n] = eye(key)
                used += n
            n = len(eye(head.value))
            qkv[where[head.value], 2, h, :n] = eye(head.value)
            out[h, :n, where[head.out]] = eye(head.out)
        weights[f"block{block}_qkv_w"][0] = J.T @ qkv.flatten(1)
        weights[f"block{block}_out_w"][0] = out.flatten(0, 1) @ J
    read = torch.cat([J[where[name]] for name in ("policy", "rbar", "Qbar")])
    weights["head_w"][0, :, : n_actions + 2] = read.T
    if carrier is None:
        weights["head_b"][0, 0, -1] = 1
    else:
        weights["embed_b"][0, 0] = carrier * c
        weights["head_w"][0, :, -1] = c / carrier
        for name in ("block0_ln1", "block1_ln1", "final"):
            weights[f"{name}_gain"].fill_(carrier / math.sqrt(J.shape[1]))
    return decoder


def layout_of(decoder: Decoder) -> tk.TokenLayout:
    """The token layout that a constructed decoder was built for."""
    n_actions = decoder.config.d_out - 3
    return tk.TokenLayout(decoder.config.d_head - n_actions - 2, n_actions)


def slot_values(decoder: Decoder, resid: Tensor) -> Tensor:
    """A residual stream ``[..., T, d_model]`` in slot coordinates, ``[..., T, n_slots]`` (see `residual_slots`)."""
    n_slots = residual_slots(layout_of(decoder))["Qbar"].stop
    J, _ = isometry(n_slots, 1.0 if decoder.config.layer_norm else None, resid.dtype)
    return resid @ J.T


def check_domain(layout: tk.TokenLayout, log_pi: Tensor, Q: Tensor, eta: float | Tensor = 1.0) -> None:
    """Raise ValueError outside the circuit's finite-logit domain; the message names the value and the index.

    The domain: log pi finite (full support) with |logsumexp| <= 1e-9 in every state, Q and eta (Q - max_a Q) finite,
    eta positive and finite.
    """
    domain = "outside the circuit's finite-logit domain"
    for name, x in (("log_pi", log_pi), ("Q", Q)):
        if x.shape[-2:] != (layout.state_dim, layout.n_actions) or x.shape != log_pi.shape:
            need = f"[*batch, {layout.state_dim}, {layout.n_actions}], equal for log_pi and Q"
            raise ValueError(f"{name} must have shape {need}, got {tuple(x.shape)}")
    eta = torch.as_tensor(eta, dtype=torch.float64)
    if not (torch.isfinite(eta) & (eta > 0)).all():
        raise ValueError(f"{domain}: eta must be positive and finite, got {eta.flatten().tolist()}")
    total = torch.logsumexp(log_pi, -1)
    tilt = eta.reshape(*eta.shape, 1, 1) * tk.gauge_fixed(Q)
    for name, x, bad, need in (
        ("log_pi", log_pi, ~torch.isfinite(log_pi), "must be finite (every action needs positive probability)"),
        ("Q", Q, ~torch.isfinite(Q), "must be finite"),
        ("logsumexp(log_pi)", total, ~(total.abs() <= ROW_TOL), f"must be 0 to {ROW_TOL:g} (normalise the row)"),
        ("eta * (Q - max Q)", tilt, ~torch.isfinite(tilt), "must be finite"),
    ):
        if bad.any():
            at = tuple(bad.nonzero()[0].tolist())
            raise ValueError(f"{domain}: {name} {need}, got {x[at].item():.6g} at index {at}")


@torch.no_grad()
def _run(decoder: Decoder, tokens: Tensor, last: int) -> Tensor:
    """Read-outs ``[*batch, last, A + 3]`` of the last tokens, float64."""
    flat = tokens.reshape(-1, *tokens.shape[-2:]).to(decoder.embed_w)
    out = decoder(flat, last=last).to(torch.float64)
    lost = decoder.config.layer_norm and decoder.embed_b.norm() < 1e-8 * flat.norm(dim=-1).max()  # H^2 < 1e-16 ||x||^2
    if lost or not torch.isfinite(out).all():
        size = flat.abs().max().item()
        raise ValueError(f"outside the circuit's finite-logit domain: a token entry is too large ({size:.6g}), output lost")
    return out.reshape(*tokens.shape[:-2], last, -1).to(tokens.device)


class ConstructedActor:
    """The circuit as an actor: ``(log_pi, Q, eta) -> log_pi_next`` on ``[*batch, S, A]``.

    `floor` is the mass mixed with the uniform policy after the read-out, so that no probability underflows to 0.
    """

    def __init__(self, decoder: Decoder, floor: float = 1e-30) -> None:
        if not 0 <= floor < 1:
            raise ValueError(f"floor must satisfy 0 <= floor < 1, got {floor!r}")
        self.decoder, self.layout, self.floor = decoder, layout_of(decoder), floor

    def probabilities(self, log_pi: Tensor, Q: Tensor, eta: float | Tensor) -> Tensor:
        """The policy that the actor queries read, renormalised, before the floor."""
        check_domain(self.layout, log_pi, Q, eta)
        read = _run(self.decoder, tk.round_tokens(self.layout, log_pi, Q, eta=eta), self.layout.state_dim)
        policy = read[..., : self.layout.n_actions].clamp(min=0)
        total = policy.sum(-1, keepdim=True)
        if (bad := total[..., 0] == 0).any():
            at = tuple(bad.nonzero()[0].tolist())
            raise ValueError(f"outside the circuit's finite-logit domain: the policy read at index {at} has no mass left")
        return policy / total

    def __call__(self, log_pi: Tensor, Q: Tensor, eta: float | Tensor) -> Tensor:
        pi = self.probabilities(log_pi, Q, eta)
        return ((1 - self.floor) * pi + self.floor / self.layout.n_actions).log()


class ConstructedCritic:
    """The circuit as a critic: ``(mdp, log_pi_next, Q, rng) -> Q_next`` on ``[*batch, S, A]``.

    `samples_per_pair`: m generative draws for every pair, or "population": one weighted token for every (s, a, s', a').
    """

    def __init__(self, decoder: Decoder, samples_per_pair: int | str = 6) -> None:
        if samples_per_pair != "population" and (not isinstance(samples_per_pair, int) or samples_per_pair < 1):
            raise ValueError(f'samples_per_pair must be an integer >= 1 or "population", got {samples_per_pair!r}')
        self.decoder, self.layout, self.samples_per_pair = decoder, layout_of(decoder), samples_per_pair

    def transitions(self, mdp: MDP, log_pi_next: Tensor, rng: np.random.Generator | None) -> tk.Transitions:
        if self.samples_per_pair == "population":
            return tk.population_transitions(mdp, log_pi_next)
        if rng is None:
            raise ValueError("a sampled critic needs a random generator: pass rng to the loop")
        return tk.sample_transitions(mdp, log_pi_next, self.samples_per_pair, rng)

    def read(self, log_pi_next: Tensor, Q: Tensor, gamma: float, transitions: tk.Transitions) -> Tensor:
        """rbar + gamma Qbar at the critic queries; raises ValueError if some pair has no transition."""
        check_domain(self.layout, log_pi_next, Q)
        n_pairs = self.layout.state_dim * self.layout.n_actions
        pair = transitions.s * self.layout.n_actions + transitions.a
        seen = torch.zeros(*Q.shape[:-2], n_pairs, dtype=torch.bool, device=Q.device).scatter(-1, pair, True)
        if not seen.all():
            *batch, missing = (~seen).nonzero()[0].tolist()
            at = (*batch, *divmod(missing, self.layout.n_actions))
            raise ValueError(f"every pair needs at least one transition, pair (..., s, a) = {at} has none")
        out = _run(self.decoder, tk.round_tokens(self.layout, log_pi_next, Q, transitions=transitions), n_pairs)
        rbar, Qbar, carrier = out[..., -3:].unbind(-1)
        return ((rbar + gamma * Qbar) / carrier).reshape(Q.shape)

    def __call__(self, mdp: MDP, log_pi_next: Tensor, Q: Tensor, rng: np.random.Generator | None = None) -> Tensor:
        return self.read(log_pi_next, Q, mdp.gamma, self.transitions(mdp, log_pi_next, rng))
