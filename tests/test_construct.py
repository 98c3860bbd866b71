"""The constructed decoder: it is Q-TD-PMD up to leaks, and every leak, LayerNorm and sample stays inside its bound."""

import ast
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pa_core import ledger as lg
from pa_core import tokens as tk
from pa_core.bounds import actor_residual, critic_residual
from pa_core.construct import (
    ConstructedActor,
    ConstructedCritic,
    check_domain,
    constructed_decoder,
    heads,
    layout_of,
    residual_slots,
    slot_values,
)
from pa_core.control import closed_loop, exact_actor
from pa_core.decoder import Record
from pa_core.families import dirichlet_log_policies, from_gymnasium, random_mdps
from pa_core.mdp import MDP, backup, evaluate, normalized_loss, solve
from pa_core.pmd import mix_floor, pmd_step, q_td_pmd

ETAS = torch.tensor([0.1, 0.8, 10.0, 100.0, 300.0, 1000.0], dtype=torch.float64)
EPS = 2.3e-16


def rounding(kappa, logit=0.0):
    """What float64 adds to attention weights: a rounding of the largest score, with room for a few of them."""
    return 8 * EPS * (10 + 3 * kappa + logit)


def instance(S, A, *, n=None, seed=0, concentration=1.0):
    rng = np.random.default_rng((seed, S, A))
    mdp = random_mdps(n or 1, S, A, gamma=0.9, concentration=concentration, rng=rng)
    log_pi = dirichlet_log_policies(n or 1, S, A, rng)
    Q = torch.from_numpy(rng.normal(0, 2, (n or 1, S, A)))
    return (mdp, log_pi, Q) if n else (mdp[0], log_pi[0], Q[0])


def sparse(mdp, support):
    """Keep the `support` likeliest successors of each pair (fewer population tokens)."""
    P = mdp.P * (mdp.P >= mdp.P.sort(-1, descending=True).values[..., support - 1 : support])
    return MDP(P / P.sum(-1, keepdim=True), mdp.R, mdp.gamma)


# --- the circuit is Q-TD-PMD --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kappa", [100, 300])
@pytest.mark.parametrize(("S", "A"), [(2, 2), (2, 5), (4, 3), (8, 2), (8, 3), (16, 5)])
def test_population_loop_is_exact_control_with_the_same_floor(S, A, kappa):
    """One set of weights for six step sizes and 40 rounds; 1e-10 is 1e5 roundings, for logits that add up over rounds."""
    etas = ETAS if S < 16 else ETAS[[1, 5]]
    mdp = sparse(instance(S, A)[0], min(S, 8 if S < 16 else 2)).expand(len(etas))
    decoder = constructed_decoder(S, A, routing_logit=kappa)
    rounds = 40 if S < 16 or kappa == 100 else 5
    run = closed_loop(mdp, ConstructedActor(decoder), ConstructedCritic(decoder, "population"), rounds=rounds, eta=etas)
    log_pi, Q = q_td_pmd(mdp, eta=etas, rounds=rounds, floor=1e-30)
    assert (run.log_pi.exp() - log_pi.exp()).abs().max() < 1e-10
    assert (run.Q - Q).abs().max() < 1e-10 * (1 + Q.abs().max())
    low = etas <= 100
    log_pi, Q = q_td_pmd(mdp, eta=etas, rounds=rounds)  # no floor
    assert (run.log_pi.exp() - log_pi.exp())[:, low].abs().max() < 1e-10 and (run.Q - Q)[:, low].abs().max() < 1e-10


def test_floored_and_unfloored_control_are_different_algorithms_at_a_large_step():
    """The floor lets a greedy action flip at once; without it the log-probabilities of many rounds must be undone."""
    mdp = random_mdps(64, 4, 3, gamma=0.9, rng=np.random.default_rng(0))
    (with_floor, _), (without, _) = (q_td_pmd(mdp, eta=1000.0, rounds=40, floor=floor) for floor in (1e-30, 0.0))
    assert (with_floor.exp() - without.exp()).abs().max() > 0.99
    with pytest.raises(ValueError, match="actor's log_pi of round 0 must be finite.*-inf"):
        decoder = constructed_decoder(4, 3, routing_logit=100)
        Q = 10 * torch.randn(64, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        critic = ConstructedCritic(decoder, "population")
        closed_loop(mdp, ConstructedActor(decoder, floor=0.0), critic, rounds=2, eta=1000.0, Q=Q)


def test_two_states_by_hand():
    """Block by block: the policy from e^{log pi + eta Q}, the lookup of Q(s', a'), the averages of r and Q(s', a')."""
    layout, decoder = tk.TokenLayout(2, 2), constructed_decoder(2, 2, routing_logit=200)
    log_pi = torch.tensor([[0.5, 0.5], [0.25, 0.75]], dtype=torch.float64).log()
    Q = torch.tensor([[math.log(3), 0.0], [0.0, 7.0]], dtype=torch.float64)
    pi = ConstructedActor(decoder).probabilities(log_pi, Q, 1.0)
    top = 0.75 * math.exp(7)
    expected = [[0.75, 0.25], [0.25 / (0.25 + top), top / (0.25 + top)]]
    torch.testing.assert_close(pi, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=rounding(200))
    s, a, s_next, a_next = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1], [0, 1, 0, 0], [1, 0, 1, 1], [1, 1, 1, 0]]).T
    r = torch.tensor([2.0, 2.0, -1.0, 0.0, 5.0], dtype=torch.float64)
    moves = tk.Transitions(s, a, s_next, a_next, r, torch.zeros(5))
    read = ConstructedCritic(decoder).read(log_pi, Q, 0.5, moves)
    expected = [[2 + 0.5 * 7.0, -1 + 0.5 * math.log(3)], [0 + 0.5 * 7.0, 5.0]]
    torch.testing.assert_close(read, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=10 * rounding(200))
    record = Record([], [])
    decoder(tk.round_tokens(layout, log_pi, Q, transitions=moves)[None], record=record)
    lookup = slot_values(decoder, record.resid[1])[0, 0, 4:9, residual_slots(layout)["lookup"]].flatten()
    torch.testing.assert_close(lookup, Q[s_next, a_next], rtol=0, atol=7 * rounding(200))


def test_one_context_serves_both_calls():
    """The round as one sequence, actor queries and all: the read-outs are those of the two calls, to leaks below 1e-12."""
    mdp, log_pi, Q = instance(4, 3, n=5)
    decoder = constructed_decoder(4, 3, routing_logit=60)
    actor, critic = ConstructedActor(decoder), ConstructedCritic(decoder, 6)
    log_pi_next = actor(log_pi, Q, 0.8)
    moves = critic.transitions(mdp, log_pi_next, np.random.default_rng(0))
    out = decoder(tk.round_tokens(actor.layout, log_pi, Q, eta=0.8, transitions=moves))
    policy = out[:, 12:16, :3] / out[:, 12:16, :3].sum(-1, keepdim=True)
    rbar, Qbar = out[:, -12:, 3].view(Q.shape), out[:, -12:, 4].view(Q.shape)
    torch.testing.assert_close(policy, log_pi_next.exp(), rtol=0, atol=1e-12)
    torch.testing.assert_close(rbar + 0.9 * Qbar, critic.read(log_pi_next, Q, 0.9, moves), rtol=0, atol=1e-12)


def test_frozen_lake_is_solved():
    mdp = from_gymnasium("FrozenLake-v1", gamma=0.9)
    decoder = constructed_decoder(16, 4, routing_logit=200)
    run = closed_loop(mdp, ConstructedActor(decoder), ConstructedCritic(decoder, "population"), rounds=120, eta=100.0)
    assert normalized_loss(mdp, run.log_pi[-1].exp()) < 1e-8
    assert normalized_loss(mdp, run.log_pi[20].exp()) > 1e-4  # not by accident at once


# --- independence, causality, symmetry ----------------------------------------------------------------------------------


def test_construct_knows_no_exact_algorithm():
    tree = ast.parse((Path(__file__).parent.parent / "pa_core" / "construct.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom | ast.Import)]
    names = {(getattr(node, "module", None), alias.name) for node in imports for alias in node.names}
    assert {name for module, name in names if module == "mdp"} == {"MDP"}
    assert not any(word in f"{module}.{name}" for module, name in names for word in ("pmd", "bounds", "control", "ledger"))


@pytest.mark.parametrize("carrier", [None, 1e4])
def test_later_tokens_do_not_reach_the_policy(carrier):
    mdp, log_pi, Q = instance(4, 3)
    decoder = constructed_decoder(4, 3, routing_logit=50, carrier=carrier)
    moves = tk.sample_transitions(mdp, log_pi, 6, np.random.default_rng(0))
    tokens = tk.round_tokens(layout_of(decoder), log_pi, Q, eta=0.8, transitions=moves)[None]
    full = decoder(tokens)
    # one context is shorter, so the order of sums differs: 1e-12 is far above that and far below any leak of a later token
    torch.testing.assert_close(decoder(tokens[:, :16])[:, 12:], full[:, 12:16], rtol=0, atol=1e-12)
    changed = tokens.clone()
    changed[:, 20:] = torch.randn(changed[:, 20:].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(decoder(changed)[:, :20], full[:, :20])  # bit for bit: same shapes, masked keys weigh exactly 0


def test_permutations():
    """Renaming states or actions renames the output; the order of the transitions does not matter."""
    mdp, log_pi, Q = instance(5, 3)
    decoder = constructed_decoder(5, 3, routing_logit=20)  # leaks of 1e-8 must permute as well
    actor, critic = ConstructedActor(decoder), ConstructedCritic(decoder, "population")
    s, a = torch.tensor([3, 0, 4, 1, 2]), torch.tensor([2, 0, 1])
    rename = lambda x: x[s][:, a]
    renamed = MDP(rename(mdp.P)[..., s], rename(mdp.R), mdp.gamma)
    close = dict(rtol=0, atol=1e-12)  # order of sums only
    torch.testing.assert_close(actor(rename(log_pi), rename(Q), 0.8), rename(actor(log_pi, Q, 0.8)), **close)
    # In the critic a transition or query also sees those before it, at weight e^-kappa: an order moves leaks of 1e-8.
    close = dict(rtol=0, atol=100 * math.exp(-20) * Q.abs().max().item())
    torch.testing.assert_close(critic(renamed, rename(log_pi), rename(Q)), rename(critic(mdp, log_pi, Q)), **close)
    moves = tk.sample_transitions(mdp, log_pi, 4, np.random.default_rng(0))
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    shuffled = tk.Transitions(*(getattr(moves, f)[order] for f in ("s", "a", "s_next", "a_next", "r", "log_weight")))
    torch.testing.assert_close(critic.read(log_pi, Q, 0.9, shuffled), critic.read(log_pi, Q, 0.9, moves), **close)


def test_a_shift_of_q_leaves_the_policy():
    _, log_pi, Q = instance(4, 3)
    actor = ConstructedActor(constructed_decoder(4, 3, routing_logit=100))
    shift = torch.tensor([[8.0], [-64.0], [1024.0], [0.0]], dtype=torch.float64)
    # Q + shift rounds at 1e-13, eta = 100 makes that 1e-11 in a logit
    torch.testing.assert_close(actor(log_pi, Q + shift, 100.0), actor(log_pi, Q, 100.0), rtol=0, atol=1e-10)


# --- slopes and gates ---------------------------------------------------------------------------------------------------


def test_error_falls_as_e_to_the_minus_kappa():
    mdp, log_pi, Q = instance(6, 3)
    kappas = np.arange(8.0, 25.0, 2.0)
    zeta, delta = [], []
    for kappa in kappas:
        decoder = constructed_decoder(6, 3, routing_logit=kappa)
        zeta.append(actor_residual(log_pi, Q, 0.8, ConstructedActor(decoder, floor=0)(log_pi, Q, 0.8)))
        delta.append(critic_residual(mdp, log_pi, Q, ConstructedCritic(decoder, "population")(mdp, log_pi, Q)))
    for error in (zeta, delta):
        slope = np.polyfit(kappas, np.log(torch.stack(error).numpy()), 1)[0]
        assert abs(slope + 1) < 2e-3  # second order in u: below e^-8 S A = 6e-3 at the left end
    constant = lg.actor_routing_constant(log_pi, Q, 0.8)
    np.testing.assert_allclose(zeta[-1] * math.exp(kappas[-1]), constant, rtol=1e-5)  # rounding 1e-16 / 1e-10


def test_error_falls_as_h_to_the_minus_two():
    mdp, log_pi, Q = instance(6, 3)
    carriers, kappa = np.array([1e3, 1e4, 1e5, 1e6]), 40
    plain = constructed_decoder(6, 3, routing_logit=kappa)
    base = ConstructedActor(plain).probabilities(log_pi, Q, 0.8), ConstructedCritic(plain, "population")(mdp, log_pi, Q)
    errors = []
    for H in carriers:
        decoder = constructed_decoder(6, 3, routing_logit=kappa, carrier=H)
        pi, Q_next = ConstructedActor(decoder).probabilities(log_pi, Q, 0.8), ConstructedCritic(decoder, "population")
        errors.append(((pi - base[0]).abs().max(), (Q_next(mdp, log_pi, Q) - base[1]).abs().max()))
    slopes = np.polyfit(np.log(carriers), np.log(np.array(errors)), 1)[0]
    assert (np.abs(slopes + 2) < 0.02).all()  # the error at 1e6 is some 1e-11, rounding some 1e-14


@pytest.mark.parametrize("kappa", [5, 50, 300])
def test_without_kind_gates_the_critic_fails(kappa):
    """Memory and query tokens match on s and a as well as transitions do: sharper routing does not help."""
    mdp, log_pi, Q = instance(8, 3)
    open_ = constructed_decoder(8, 3, routing_logit=kappa, gates=False)
    # Q of the size of the value bound: what leaks in is of that size
    assert critic_residual(mdp, log_pi, 5 * Q, ConstructedCritic(open_, 6)(mdp, log_pi, 5 * Q, np.random.default_rng(0))) > 1
    Q_exact = torch.full_like(Q, 10.0)  # even where every next value is the same
    assert critic_residual(mdp, log_pi, Q_exact, ConstructedCritic(open_, "population")(mdp, log_pi, Q_exact)) > 1


# --- the sampled critic -------------------------------------------------------------------------------------------------


def test_sampled_critic_is_unbiased_with_the_right_variance():
    replicas, m = 4000, 3
    mdp, log_pi, Q = instance(3, 2)
    wide = lambda x: x.expand(replicas, *x.shape)
    critic = ConstructedCritic(constructed_decoder(3, 2, routing_logit=60), m)
    draws = critic(mdp.expand(replicas), wide(log_pi), wide(Q), np.random.default_rng(1))
    exact = backup(mdp, log_pi.exp(), Q)
    second = torch.einsum("sap,pb,pb->sa", mdp.P, log_pi.exp(), Q**2)
    variance = 0.81 * (second - ((exact - mdp.R) / 0.9) ** 2) / m
    torch.testing.assert_close(lg.draw_variance(mdp, log_pi, Q) / m, variance)
    # 6 pairs: the mean of 4,000 within 5 of its standard deviations; the variance within 5 * sqrt(kurtosis / n) < 20%
    assert ((draws.mean(0) - exact).abs() < 5 * (variance / replicas).sqrt()).all()
    assert ((draws.var(0) / variance - 1).abs() < 0.2).all()


def test_sampling_error_falls_as_one_over_root_m():
    mdp, log_pi, Q = instance(4, 3)
    wide, counts = lambda x: x.expand(200, *x.shape), [2, 8, 32]
    decoder, rng = constructed_decoder(4, 3, routing_logit=60), np.random.default_rng(2)
    errors = []
    for m in counts:
        draws = ConstructedCritic(decoder, m)(mdp.expand(200), wide(log_pi), wide(Q), rng)
        errors.append((draws - backup(mdp, log_pi.exp(), Q)).square().mean().sqrt())
    # each r.m.s. of 2,400 errors is known to about 1.5%, the slope over a factor 16 to about .01
    assert abs(np.polyfit(np.log(counts), np.log(errors), 1)[0] + 0.5) < 0.04


# --- the ledger ---------------------------------------------------------------------------------------------------------


def start(kind, n, S, A, rng):
    """Policies and Q of a kind, the extreme ones included."""
    log_pi = dirichlet_log_policies(n, S, A, rng)
    Q = torch.from_numpy(rng.normal(0, 2, (n, S, A)))
    if kind == "ties":
        Q = Q.round()
    elif kind == "equal":
        Q = torch.full_like(Q, -3.0)
    elif kind == "tiny":  # probabilities of 1e-300 on whatever action comes first
        log_pi[..., 0] = -690.0
        log_pi = torch.log_softmax(log_pi, -1)
    elif kind == "huge":
        Q = Q * 1e6
    return log_pi, Q


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    S=st.integers(1, 6),
    A=st.integers(1, 4),
    kappa=st.tuples(*[st.floats(0.5, 60)] * 3),
    eta=st.floats(-1, 3).map(lambda x: 10**x),
    kind=st.sampled_from(["plain", "ties", "equal", "tiny", "huge"]),
    carrier=st.none() | st.floats(1.5, 9).map(lambda x: 10**x),
    samples=st.sampled_from(["population", 1, 3]),
    floor=st.sampled_from([1e-30, 1e-6, 0.1]),
    gamma=st.floats(0, 0.999),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_part_is_within_its_bound(S, A, kappa, eta, kind, carrier, samples, floor, gamma, seed):
    rng = np.random.default_rng(seed)
    n = 3
    mdp = random_mdps(n, S, A, gamma=gamma, concentration=float(rng.choice([0.1, 1])), rng=rng)
    log_pi, Q = start(kind, n, S, A, rng)
    args = dict(rounds=2, eta=eta, samples_per_pair=samples, carrier=carrier, floor=floor, rng=rng, failure=1e-9)
    book = lg.run_ledger(mdp, kappa, log_pi=log_pi, Q=Q, **args)
    run = book.run
    weight = rounding(max(kappa), 1400)  # log-weights of 1e-300 are -690, and enter twice
    value = rounding(lg.NO_LEAK, 1400) * (mdp.reward_bound + run.Q[:-1].abs().amax((-2, -1)))
    for name, part in book.actor.items():
        assert (part.measured <= part.bound + weight).all(), name
    for name, part in book.critic.items():
        assert (part.measured <= part.bound + value).all(), name
    assert (run.zeta <= sum(part.measured for part in book.actor.values()) + weight).all()  # telescoping
    assert (run.delta <= sum(part.measured for part in book.critic.values()) + value).all()
    assert (run.zeta <= book.zeta_bound + weight).all() and (run.delta <= book.delta_bound + value).all()


def test_the_ledger_feeds_the_theorem():
    mdp = random_mdps(8, 4, 3, gamma=0.5, rng=np.random.default_rng(3))
    book = lg.run_ledger(mdp, 30, rounds=30, eta=5.0, carrier=1e6)
    measured, bounded = lg.returned_bounds(mdp, book, 5.0)
    loss = (solve(mdp).V_star - evaluate(mdp, book.run.log_pi[1:].exp())).amax(-1)
    assert (loss <= measured + 1e-12).all() and (measured <= bounded + 1e-9).all()  # (loss is a difference of values)
    assert measured[-1].median() < 1e-5 and measured[0].min() > 1  # it says something at gamma = .5


def test_switching_one_routing_moves_one_part():
    mdp = random_mdps(4, 4, 3, gamma=0.9, rng=np.random.default_rng(4))
    parts = {}
    for name, kappa in (("actor", (6, 40, 40)), ("lookup", (40, 6, 40)), ("average", (40, 40, 6))):
        book = lg.run_ledger(mdp, kappa, rounds=3, eta=0.8)
        found = (book.actor["routing"], book.critic["lookup"], book.critic["averaging"])
        parts[name] = [part.measured.max().item() > 1e-6 for part in found]
    assert parts == {"actor": [True, False, False], "lookup": [False, True, False], "average": [False, False, True]}


def test_uniform_bound_covers_every_round_and_step():
    mdp = random_mdps(4, 4, 3, gamma=0.9, rng=np.random.default_rng(5))
    for eta in (0.1, 1000.0):
        run = lg.run_ledger(mdp, 45, rounds=20, eta=eta, floor=1e-6)
        bound = lg.uniform_actor_routing_bound(4, 3, 1e-6, 45)
        assert (run.actor["routing"].bound <= bound).all() and bound < 1e-12


# --- degenerate input and refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("S", "A"), [(1, 1), (1, 3), (3, 1)])
@pytest.mark.parametrize("carrier", [None, 1e6])
def test_one_state_and_one_action(S, A, carrier):
    mdp, log_pi, Q = instance(S, A)
    decoder = constructed_decoder(S, A, routing_logit=100, carrier=carrier)
    run = closed_loop(mdp, ConstructedActor(decoder), ConstructedCritic(decoder, "population"), rounds=5, eta=2.0)
    log_pi, Q = q_td_pmd(mdp, eta=2.0, rounds=5, floor=1e-30)
    slack = 1e-12 if carrier is None else 1e-8  # kappa ||x||^2 / H^2
    assert (run.log_pi.exp() - log_pi.exp()).abs().max() < slack and (run.Q - Q).abs().max() < slack


def test_tiny_probabilities_huge_and_equal_q():
    _, log_pi, Q = instance(4, 3)
    actor = ConstructedActor(constructed_decoder(4, 3, routing_logit=800))
    rare = torch.log_softmax(torch.tensor([-690.0, 0.0, 0.1], dtype=torch.float64), -1).expand(4, 3)
    cases = ((rare, Q, 1.0), (rare, Q, 1000.0), (log_pi, Q * 1e200, 1.0), (log_pi, torch.ones_like(Q), 9.0))
    for prior, value, eta in cases:
        expected = mix_floor(pmd_step(prior, value, eta), 1e-30).exp()
        torch.testing.assert_close(actor(prior, value, eta).exp(), expected, rtol=0, atol=rounding(800, 2000))
    # a rare greedy action lowers Z(s): with kappa below 690 the other states leak in, and the bound says so
    weak = ConstructedActor(constructed_decoder(4, 3, routing_logit=100))
    value = torch.zeros(4, 3, dtype=torch.float64)
    value[0, 0] = 1.0  # only state 0 wants the action of probability 1e-300
    bound = lg.actor_routing_bound(rare, value, 1e4, 100)
    assert bound > 1.99 and actor_residual(rare, value, 1e4, weak(rare, value, 1e4)) <= bound + rounding(100)


def bad_inputs():
    log_pi, Q = torch.full((2, 3), -math.log(3), dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float64)
    put = lambda x, value: x.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(value, dtype=torch.float64))
    yield put(log_pi, -math.inf), Q, 1.0, r"log_pi must be finite .*got -inf at index \(1, 2\)"
    yield put(log_pi, math.nan), Q, 1.0, r"log_pi must be finite .*got nan at index \(1, 2\)"
    yield put(log_pi, -1.0), Q, 1.0, r"logsumexp\(log_pi\) must be 0 to 1e-09 .* at index \(1,\)"
    yield log_pi + 1e-8, Q, 1.0, r"logsumexp\(log_pi\) must be 0 to 1e-09 \(normalise the row\), got 1e-08 at index \(0,\)"
    yield log_pi, put(Q, math.inf), 1.0, r"Q must be finite, got inf at index \(1, 2\)"
    yield log_pi, put(Q, -1.7e308), 1e9, r"eta \* \(Q - max Q\) must be finite, got -inf at index \(1, 2\)"
    yield log_pi, Q, math.nan, "eta must be positive and finite"
    yield log_pi, Q, 0.0, "eta must be positive and finite"
    yield log_pi[:1], Q[:1], 1.0, r"log_pi must have shape \[\*batch, 2, 3\]"
    yield log_pi, Q[None], 1.0, r"Q must have shape \[\*batch, 2, 3\]"


@pytest.mark.parametrize(("log_pi", "Q", "eta", "message"), list(bad_inputs()))
def test_refusals_name_the_domain_the_value_and_the_index(log_pi, Q, eta, message):
    actor = ConstructedActor(constructed_decoder(2, 3, routing_logit=100))
    with pytest.raises(ValueError, match=message) as error:
        actor(log_pi, Q, eta)
    assert "finite-logit domain" in str(error.value) or "shape" in str(error.value)


def test_refusals_of_batches_sizes_and_missing_pairs():
    mdp, log_pi, Q = instance(2, 2, n=3)
    decoder = constructed_decoder(2, 2, routing_logit=100)
    bad = log_pi.clone()
    bad[2, 1, 0] = -math.inf
    with pytest.raises(ValueError, match=r"-inf at index \(2, 1, 0\)"):
        check_domain(layout_of(decoder), bad, Q)
    moves = tk.sample_transitions(mdp, log_pi, 1, np.random.default_rng(0))
    moves.s[1, 2], moves.a[1, 2] = 0, 0
    with pytest.raises(ValueError, match=r"at least one transition, pair \(..., s, a\) = \(1, 1, 0\) has none"):
        ConstructedCritic(decoder).read(log_pi, Q, 0.9, moves)
    with pytest.raises(ValueError, match="needs a random generator"):
        ConstructedCritic(decoder, 6)(mdp, log_pi, Q)
    carried = constructed_decoder(2, 2, routing_logit=100, carrier=1e6)
    with pytest.raises(ValueError, match="finite-logit domain"):  # LayerNorm of 1e200 drowns the carrier
        ConstructedCritic(carried, "population")(mdp, log_pi, Q * 1e200)
    for call in (
        lambda: constructed_decoder(2, 2, routing_logit=0),
        lambda: constructed_decoder(2, 2, routing_logit=(1, 2)),
        lambda: constructed_decoder(2, 2, routing_logit=1, carrier=math.inf),
        lambda: ConstructedActor(decoder, floor=1.0),
        lambda: ConstructedCritic(decoder, 0),
        lambda: ConstructedCritic(decoder, "all"),
    ):
        with pytest.raises(ValueError, match=r"must (be|satisfy)"):
            call()


# --- the normalised compilation -----------------------------------------------------------------------------------------


def test_layer_norm_scales_the_slots_by_rho():
    """J^T LN(H c + J x) = rho_H(x) x, by torch's own layer_norm."""
    decoder = constructed_decoder(3, 2, routing_logit=10, carrier=50.0)
    x = torch.randn(1, 1, 9, 19, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    stream = decoder._linear(x, "embed")
    read = slot_values(decoder, decoder._norm(stream, "block0_ln1"))
    assert read.shape[-1] == 19 + 2 + 3
    rho = 1 - lg.deficit(x.square().sum(-1, keepdim=True), 3, 2, 50.0)
    torch.testing.assert_close(read[..., :19], rho * x, rtol=0, atol=1e-13)
    assert (read[..., 19:].abs() < 1e-13).all()


def test_a_large_carrier_recovers_the_whole_loop():
    mdp = instance(4, 3, n=8)[0]
    runs = {}
    for H in (None, 1e4, 1e6, 1e8):
        decoder = constructed_decoder(4, 3, routing_logit=60, carrier=H)
        critic = ConstructedCritic(decoder, "population")
        runs[H] = closed_loop(mdp, ConstructedActor(decoder, 1e-6), critic, rounds=40, eta=0.8)
    gap = {H: (runs[H].log_pi.exp() - runs[None].log_pi.exp()).abs().max() for H in (1e4, 1e6, 1e8)}
    assert 0.8e-4 < gap[1e6] / gap[1e4] < 1.25e-4 and gap[1e8] < 1e-9  # slope -2 through 40 rounds


def test_plain_and_normalised_weights_have_one_class_and_one_meaning():
    for carrier in (None, 1e7):
        decoder = constructed_decoder(3, 2, routing_logit=30, carrier=carrier)
        assert layout_of(decoder) == tk.TokenLayout(3, 2) and decoder.config.d_head == 3 + 2 + 2
        assert (decoder.config.n_layer, decoder.config.n_head, decoder.config.d_ffn) == (2, 2, 0)
        mdp, log_pi, Q = instance(3, 2)
        record = Record([], [])
        decoder(tk.round_tokens(layout_of(decoder), log_pi, Q, eta=1.0)[None], record=record)
        before, after = (slot_values(decoder, x)[0, 0] for x in record.resid[:2])
        where = residual_slots(layout_of(decoder))
        torch.testing.assert_close(before[:6, where["Q"]][:, 0], Q.flatten(), rtol=0, atol=1e-8)  # 1e7 eats 1e-16 1e7
        policy = after[6:, where["policy"]]
        expected = exact_actor(log_pi, Q, 1.0).exp()
        torch.testing.assert_close(policy / policy.sum(-1, keepdim=True), expected, rtol=0, atol=1e-8)
    used = {slot for pair in heads(1.0) for head in pair for q, k, _ in head.matches for slot in (q, k)}
    assert used <= set(residual_slots(tk.TokenLayout(3, 2)))
