"""The residual ledger of the constructed loop: every error of the circuit, measured and bounded (book, chapters 04 and 05).

An actor call telescopes: exact PMD -> routing leaks -> LayerNorm -> floor.  A critic call: exact backup -> sampling ->
leaks of the lookup -> leaks of the averages -> LayerNorm.  Each part is the largest change between two neighbours in the
same context, so the parts sum to at least zeta and delta.  All bounds are for real arithmetic: float64 adds about 1e-16
times the largest score.  ``u = e^-kappa``; arrays are float64 ``[*batch, S, A]``, results ``[*batch]``.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from . import bounds
from . import tokens as tk
from .construct import ConstructedActor, ConstructedCritic, constructed_decoder, residual_slots
from .control import Trajectory, closed_loop
from .mdp import MDP, backup
from .pmd import Eta, eta_at, per_pair, pmd_step

LN_EPS = 1e-5  # torch's layer_norm
NO_LEAK = 750.0  # e^-750 is exactly 0 in float64


def tilted_logits(log_pi: Tensor, Q: Tensor, eta: float | Tensor) -> Tensor:
    """log pi + eta adv, ``[*batch, S, A]``; its logsumexp over actions is log Z(s) <= 0."""
    return log_pi + per_pair(eta) * tk.gauge_fixed(Q)


def actor_routing_bound(log_pi: Tensor, Q: Tensor, eta: float | Tensor, kappa: float) -> Tensor:
    """2 lambda / (1 + lambda), lambda = u max_s sum_{s' != s} Z(s') / Z(s): L1 distance of a row to the PMD step.

    A key of another state misses one match of two.  Actor queries hold no action, so their share leaves with the
    renormalisation.
    """
    log_Z = torch.logsumexp(tilted_logits(log_pi, Q, eta), -1)
    own = torch.eye(log_Z.shape[-1], dtype=torch.bool, device=log_Z.device)
    others = torch.logsumexp(log_Z[..., None, :].masked_fill(own, -math.inf), -1)  # [*batch, S]
    return 2 * torch.sigmoid(others - log_Z - kappa).amax(-1)


def actor_routing_constant(log_pi: Tensor, Q: Tensor, eta: float | Tensor) -> Tensor:
    """The actor's routing error to first order in u is this times u: the other states' rows, over Z(s), pull at the row."""
    weight = tilted_logits(log_pi, Q, eta).exp()
    Z = weight.sum(-1, keepdim=True)
    pull = (weight.sum(-2, keepdim=True) - weight) / Z
    return (pull - pull.sum(-1, keepdim=True) * weight / Z).abs().sum(-1).amax(-1)


def uniform_actor_routing_bound(n_states: int, n_actions: int, floor: float, kappa: float) -> float:
    """2 (S - 1) e^{-kappa + log(A / floor)}: holds for every Q, every eta and every prior with that floor."""
    return 2 * (n_states - 1) * math.exp(-kappa + math.log(n_actions / floor))


def lookup_leak(n_states: int, n_actions: int, kappa: float, n_transitions: int) -> float:
    """lambda_1: weight of all other keys over the one right memory key, at most `n_transitions` a pair in the context.

    (1+(S-1)u)(1+(A-1)u)(1+nu) - 1 from memory and transition keys, u^2 (1+(S-1)u) from actor queries.
    """
    u = math.exp(-kappa)
    S, A = (n_states - 1) * u, (n_actions - 1) * u
    return math.expm1(math.log1p(S) + math.log1p(A) + math.log1p(n_transitions * u)) + u**2 * (1 + S)


def average_leak(n_states: int, n_actions: int, kappa: float, mass: float) -> float:
    """lambda_2: weight of all other keys over a pair's own transitions, whose weights sum to `mass` (m, or 1: population).

    (1+u/W)(1+(S-1)u)(1+(A-1)u) - 1 from transitions and critic queries, u (1+(S-1)u) / W from memory keys (their log pi
    is normalised) and u^2 (1+(S-1)u) / W from actor queries.
    """
    u = math.exp(-kappa)
    S, A = (n_states - 1) * u, (n_actions - 1) * u
    return math.expm1(math.log1p(S) + math.log1p(A) + math.log1p(u / mass)) + (u + u**2) * (1 + S) / mass


def leak_share(leak: float) -> float:
    """Lambda = lambda / (1 + lambda): the attention that the other keys get."""
    return leak / (1 + leak)


def sampling_bound(Q: Tensor, gamma: float, m: int, failure: float) -> Tensor:
    """gamma (max Q - min Q) sqrt(log(2 S A / failure) / (2 m)): Hoeffding and a union over pairs; R[s, a] is exact."""
    spread = Q.amax((-2, -1)) - Q.amin((-2, -1))  # over all pairs: the next state is random too
    return gamma * spread * math.sqrt(math.log(2 * Q.shape[-2] * Q.shape[-1] / failure) / (2 * m))


def draw_variance(mdp: MDP, log_pi: Tensor, Q: Tensor) -> Tensor:
    """Variance of R + gamma Q(s', a') for a single draw of each pair, ``[*batch, S, A]``."""
    first, second = (torch.einsum("...sap,...pb,...pb->...sa", mdp.P, log_pi.exp(), x) for x in (Q, Q**2))
    return mdp.gamma**2 * (second - first**2).clamp(min=0)


def deficit(norm_sq: Tensor, n_states: int, n_actions: int, carrier: float) -> Tensor:
    """1 - rho_H for tokens of squared norm `norm_sq`, rho_H = (1 + (norm_sq + d eps) / H^2)^(-1/2)."""
    d_model = 2 + 2 * residual_slots(tk.TokenLayout(n_states, n_actions))["Qbar"].stop
    return -torch.expm1(-0.5 * torch.log1p((norm_sq + d_model * LN_EPS) / carrier**2))


def tilt(x: Tensor) -> Tensor:
    """min(2, 2 x / (1 - x)): L1 distance of p to p e^D / sum p e^D, if sum p |e^D - 1| <= x."""
    return torch.where(x < 0.5, 2 * x / (1 - x.clamp(max=0.5)), 2.0)


def actor_normalisation_bound(log_pi: Tensor, Q: Tensor, eta: float | Tensor, kappa: float, carrier: float) -> Tensor:
    """L1 distance that LayerNorm adds to a row of the policy.

    With rho of the query and rho' of the key a score s becomes rho rho' s and a value rho' times itself, so a weight changes
    by e^D, D = (rho rho' - 1) s + log rho'.  A common factor of a row's weights, and the read-out's own rho, leave with the
    renormalisation; what is left of D is the difference from its mean.
    """
    *batch, S, A = Q.shape
    norm_sq = tk.round_tokens(tk.TokenLayout(S, A), log_pi, Q, eta=eta).square().sum(-1)
    e = deficit(norm_sq, S, A, carrier)
    key, query = e[..., None, : S * A], e[..., S * A :, None]
    own = torch.eye(S, dtype=Q.dtype, device=Q.device)[..., None]
    score = (kappa * (1 + own) + tilted_logits(log_pi, Q, eta)[..., None, :, :]).flatten(-2)  # [*batch, S, S A]
    log_weight = torch.log_softmax(score, -1)
    weight = log_weight.exp()
    D = (key * query - key - query) * score + torch.log1p(-key)
    D = D - (weight * D).sum(-1, keepdim=True)
    x = torch.where(D < 1, weight * torch.expm1(D.clamp(max=1)).abs(), torch.exp(log_weight + D))
    return tilt(x.sum(-1)).amax(-1)


def critic_normalisation_bound(
    mdp: MDP,
    Q: Tensor,
    kappa: tuple[float, float, float],
    shares: tuple[float, float],
    tokens: Tensor,
    n: int,
    carrier: float,
) -> Tensor:
    """Value error that LayerNorm adds to the critic's read-out of a context ``[*batch, T, width]``, n transitions a pair.

    As for the actor, what counts is how differently the right keys' weights change (with the log-weights w, mean of
    w^-t at most n^t by Hoelder), and the leaks, whose shares are `shares` = (lookup, average).  Between the blocks a token
    gains a policy (norm <= 1) and a looked-up value (<= ||Q||).  The carrier divides out the read-out's own rho.
    """
    q = Q.abs().amax((-2, -1))
    norm_sq = tokens.square().sum(-1).amax(-1)
    least, first, second = (deficit(x, *Q.shape[-2:], carrier) for x in (0 * q + 5, norm_sq, norm_sq + 1 + q**2))
    t1, t2 = 1 - (1 - first) ** 2, 1 - (1 - second) ** 2
    longest = tokens[..., tk.TokenLayout(*Q.shape[-2:]).column("log_pi")].abs().amax(-1)
    own = torch.expm1(3 * kappa[2] * (second - least) + t2 * math.log(n))
    lookup = tilt(shares[0] * torch.expm1(6 * kappa[1] * t1)) + first
    average = tilt(own + shares[1] * torch.expm1(t2 * (6 * kappa[2] + longest))) + second
    return average * mdp.reward_bound + mdp.gamma * (lookup + average) * q


@dataclass(frozen=True)
class Part:
    """One residual of each round, ``[rounds, *batch]``: as measured and its bound."""

    measured: Tensor
    bound: Tensor


@dataclass(frozen=True)
class Ledger:
    """A run of the constructed loop and its parts: `actor` routing, normalisation, floor (L1 of a row); `critic` sampling,
    lookup, averaging, normalisation (value)."""

    run: Trajectory
    actor: dict[str, Part]
    critic: dict[str, Part]

    @property
    def zeta_bound(self) -> Tensor:
        return sum(part.bound for part in self.actor.values())

    @property
    def delta_bound(self) -> Tensor:
        return sum(part.bound for part in self.critic.values())


def transition_mean(mdp: MDP, Q: Tensor, transitions: tk.Transitions) -> Tensor:
    """R + gamma times the weighted mean of Q(s', a') over each pair's transitions, without attention."""
    value = Q.flatten(-2).gather(-1, transitions.s_next * mdp.n_actions + transitions.a_next)
    pair, weight = transitions.s * mdp.n_actions + transitions.a, transitions.log_weight.exp()
    total = torch.zeros_like(Q.flatten(-2)).scatter_add(-1, pair, weight)
    mean = torch.zeros_like(total).scatter_add(-1, pair, weight * value) / total
    return mdp.R + mdp.gamma * mean.reshape(Q.shape)


def routing_errors(mdp: MDP, log_pi: Tensor, Q: Tensor, eta: float | Tensor, kappa: float) -> dict[str, Part]:
    """Each routing alone at `kappa`, the others at `NO_LEAK`, population critic; parts ``[*batch]``."""
    size, q = (mdp.n_states, mdp.n_actions), Q.abs().amax((-2, -1))
    exact = backup(mdp, log_pi.exp(), Q)
    decoders = [constructed_decoder(*size, routing_logit=[NO_LEAK] * i + [kappa] + [NO_LEAK] * (2 - i)) for i in range(3)]
    read = lambda decoder: (ConstructedCritic(decoder, "population")(mdp, log_pi, Q) - exact).abs().amax((-2, -1))
    pi = ConstructedActor(decoders[0]).probabilities(log_pi, Q, eta)
    look = 2 * mdp.gamma * leak_share(lookup_leak(*size, kappa, mdp.n_states * mdp.n_actions)) * q
    mean = 2 * leak_share(average_leak(*size, kappa, 1)) * (mdp.reward_bound + mdp.gamma * q)
    actor = (pi - pmd_step(log_pi, Q, eta).exp()).abs().sum(-1).amax(-1)
    return {
        "actor": Part(actor, actor_routing_bound(log_pi, Q, eta, kappa)),
        "lookup": Part(read(decoders[1]), look),
        "average": Part(read(decoders[2]), mean),
    }


def run_ledger(
    mdp: MDP,
    routing_logit: float | tuple[float, float, float],
    *,
    rounds: int,
    eta: Eta,
    samples_per_pair: int | str = "population",
    carrier: float | None = None,
    floor: float = 1e-30,
    failure: float = 0.05,
    rng: np.random.Generator | None = None,
    log_pi: Tensor | None = None,
    Q: Tensor | None = None,
) -> Ledger:
    """Run the constructed loop and enter every part of every round.

    Args:
        mdp, rounds, eta, rng, log_pi, Q: as in `control.closed_loop`.
        routing_logit, carrier: of the circuit that runs; without carrier the normalisation parts are 0.
        samples_per_pair: of the critic.
        floor: of the actor.
        failure: probability that any sampling bound of the run fails, shared by the rounds.
    """
    kappa = (routing_logit,) * 3 if isinstance(routing_logit, (int, float)) else tuple(routing_logit)
    size = (mdp.n_states, mdp.n_actions)
    plain = constructed_decoder(*size, routing_logit=kappa)
    deployed = plain if carrier is None else constructed_decoder(*size, routing_logit=kappa, carrier=carrier)
    lookup_only = constructed_decoder(*size, routing_logit=(NO_LEAK, kappa[1], NO_LEAK))
    zero = torch.zeros_like(mdp.reward_bound)
    entries: dict[tuple[str, str], list[tuple[Tensor, Tensor]]] = {}
    layout = ConstructedActor(plain).layout

    def enter(call: str, stages: list[tuple[str, Tensor, Tensor]], distance) -> Tensor:
        for (_, before, _), (name, after, bound) in zip(stages, stages[1:], strict=False):
            entries.setdefault((call, name), []).append((distance(after - before), bound + zero))
        return stages[-1][1]

    def actor(log_pi: Tensor, Q: Tensor, eta: float | Tensor) -> Tensor:
        stages = [("exact", pmd_step(log_pi, Q, eta).exp(), zero)]
        routed = ConstructedActor(plain).probabilities(log_pi, Q, eta)
        stages.append(("routing", routed, actor_routing_bound(log_pi, Q, eta, kappa[0])))
        if carrier is not None:
            normed = ConstructedActor(deployed).probabilities(log_pi, Q, eta)
            stages.append(("normalisation", normed, actor_normalisation_bound(log_pi, Q, eta, kappa[0], carrier)))
        mixed = (1 - floor) * stages[-1][1] + floor / mdp.n_actions
        stages.append(("floor", mixed, zero + bounds.floor_distance_bound(floor, mdp.n_actions)))
        return enter("actor", stages, lambda x: x.abs().sum(-1).amax(-1)).log()

    def critic(mdp: MDP, log_pi_next: Tensor, Q: Tensor, rng: np.random.Generator | None) -> Tensor:
        drawn = ConstructedCritic(plain, samples_per_pair).transitions(mdp, log_pi_next, rng)
        population = samples_per_pair == "population"
        read = lambda decoder: ConstructedCritic(decoder, samples_per_pair).read(log_pi_next, Q, mdp.gamma, drawn)
        q = Q.abs().amax((-2, -1))
        n = int(torch.bincount((drawn.s * size[1] + drawn.a).reshape(-1, drawn.s.shape[-1])[0]).max())
        look = leak_share(lookup_leak(*size, kappa[1], n))
        mean = leak_share(average_leak(*size, kappa[2], 1 if population else samples_per_pair))
        sampled = zero if population else sampling_bound(Q, mdp.gamma, samples_per_pair, failure / rounds)
        stages = [("exact", backup(mdp, log_pi_next.exp(), Q), zero)]
        stages.append(("sampling", transition_mean(mdp, Q, drawn), sampled))
        stages.append(("lookup", read(lookup_only), 2 * mdp.gamma * look * q))
        stages.append(("averaging", read(plain), 2 * mean * (mdp.reward_bound + mdp.gamma * q)))
        if carrier is not None:
            tokens = tk.round_tokens(layout, log_pi_next, Q, transitions=drawn)
            stages.append(
                (
                    "normalisation",
                    read(deployed),
                    critic_normalisation_bound(mdp, Q, kappa, (look, mean), tokens, n, carrier),
                )
            )
        return enter("critic", stages, lambda x: x.abs().amax((-2, -1)))

    run = closed_loop(mdp, actor, critic, rounds=rounds, eta=eta, rng=rng, log_pi=log_pi, Q=Q)
    parts = {key: Part(*(torch.stack(column) for column in zip(*rows, strict=True))) for key, rows in entries.items()}
    return Ledger(run, *({name: part for (c, name), part in parts.items() if c == call} for call in ("actor", "critic")))


def returned_bounds(mdp: MDP, ledger: Ledger, eta: Eta) -> tuple[Tensor, Tensor]:
    """The returned-policy theorem fed with a ledger, ``[rounds, *batch]`` twice: entry k bounds ||V* - V^{pi_{k+1}}||_inf.

    The first uses the measured residuals and greedy gaps of the run; the second only bounds: the ledger's delta and zeta,
    and the price of the prior that each round starts from.
    """
    run, gamma = ledger.run, mdp.gamma
    measured = bounds.error_recursion(run.E[0], run.delta, run.gbar, gamma)
    lifted, largest = [], []
    for k, zeta in enumerate(ledger.zeta_bound):
        price = bounds.prior_mass_price(run.log_pi[k], run.Q[k])
        step, span = eta_at(eta, k, mdp.batch_shape), bounds.span(run.Q[k])
        lifted.append(bounds.greedy_gap_bound(bounds.transition_lift(mdp, price), step, span, zeta))
        largest.append(bounds.greedy_gap_bound(price.amax(-1), step, span, zeta))
    bounded = bounds.error_recursion(run.E[0], ledger.delta_bound, torch.stack(lifted), gamma)
    return (
        bounds.returned_policy_bound(measured[:-1], run.gmax, gamma),
        bounds.returned_policy_bound(bounded[:-1], torch.stack(largest), gamma),
    )
