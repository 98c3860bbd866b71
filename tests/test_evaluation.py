"""Evaluation and audit: exact parts score as the oracle, runs stay paired, draws are common, the instrument reads true."""

import numpy as np
import pytest
import torch

from pa_core import audit, contexts, diagnosis, evaluation
from pa_core.control import closed_loop, exact_actor, exact_critic
from pa_core.families import dirichlet_log_policies, random_mdps
from pa_core.learned import LearnedCritic
from pa_core.mdp import backup, evaluate
from pa_core.pmd import RULES, pmd_step
from pa_core.protocol import load_protocol
from pa_core.runs import decoder_config, make_actor
from pa_core.seeding import rng_for, torch_generator
from pa_core.train import Decoder


def problem(n=6, seed=0, log_pi=None):
    return evaluation.Problem.of(random_mdps(n, 4, 3, gamma=0.9, rng=np.random.default_rng(seed)), log_pi)


def biased(scale):
    return lambda log_pi, Q, eta: pmd_step(log_pi, Q, eta * scale)


def random_network(cell, seed):
    """An untrained network of a registered cell: what it returns is arbitrary, but it is a network."""
    config = load_protocol().cell(cell)
    decoder = Decoder(decoder_config(config)).initialise([torch_generator("test", seed)]).requires_grad_(False)
    actor = make_actor(decoder, config)
    return LearnedCritic(decoder, actor.layout, 6) if config.signal == "critic" else actor


def test_the_exact_actor_scores_as_the_oracle():
    p = problem()
    oracle = evaluation.oracle_loop(p, rounds=7, eta=0.8)
    loop = evaluation.run_loops(p, [exact_actor] * 3, rounds=7, eta=0.8)
    assert loop.zeta.shape == (7, 3, 6) and (loop.zeta == 0).all() and (loop.delta == 0).all()
    scores, reference = p.losses(loop.log_pi[-1]), p.losses(oracle.log_pi[-1])
    assert scores.shape == (3, 6) and (scores == reference).all()
    table = evaluation.compare(scores, reference, "test", replicates=200)
    for estimand, value in (("ratio of medians", 1), ("ratio of means", 1), ("median difference", 0)):
        row = evaluation.pick(table, estimand=estimand)
        assert (row["value"], row["low"], row["high"]) == (value, value, value)
        assert row["runs"] == (value,) * 3 and (row["n_runs"], row["n_tasks"]) == (3, 6)


def test_compare_knows_toy_numbers_and_pairs_by_task():
    oracle = np.array([1.0, 2.0, 4.0])
    table = evaluation.compare(np.stack([oracle * 2, oracle + 1, oracle]), oracle, "toy", replicates=100)
    assert evaluation.pick(table, estimand="ratio of medians")["runs"] == (2.0, 1.5, 1.0)
    assert evaluation.pick(table, estimand="ratio of medians")["value"] == 1.5
    difference = evaluation.pick(table, estimand="median difference")
    assert difference["runs"] == (2.0, 1.0, 0.0)  # unpaired tasks would spread the second one, which is 1 everywhere
    assert evaluation.compare(oracle[None] + 1, oracle, "toy", replicates=100).query("estimand == 'median difference'")[
        ["low", "high"]
    ].values.tolist() == [[1.0, 1.0]]
    with pytest.raises(KeyError, match="3 rows"):
        evaluation.pick(table)


def test_a_ratio_to_zero_is_nan_and_the_difference_remains():
    table = evaluation.compare(np.ones((2, 4)), np.zeros(4), "zero", replicates=50)
    assert np.isnan(evaluation.pick(table, estimand="ratio of medians")["value"])
    assert evaluation.pick(table, estimand="median difference")["value"] == 1


def test_tables_are_tidy_and_reproducible():
    rng = np.random.default_rng(0)
    scores = {("a", 20): rng.random((2, 5)), ("b", 20): rng.random((3, 5))}
    oracle = {key: np.full(5, 0.5) for key in scores}
    table = evaluation.comparison_table(scores, oracle, ["cell", "T"], replicates=100)
    again = evaluation.comparison_table(scores, oracle, ["cell", "T"], replicates=100)
    assert list(table.columns[:3]) == ["cell", "T", "estimand"] and len(table) == 6
    assert table.equals(again)
    text = evaluation.shown(table)
    assert text.shape[0] == 2 and text.loc[("b", 20), "n"] == "3 x 5"


def test_a_group_is_its_runs_one_by_one():
    start = dirichlet_log_policies(6, 4, 3, np.random.default_rng(3))
    p = problem(log_pi=start)
    networks = [random_network("policy_attention_increment_s4", seed) for seed in (0, 1)]
    critics = [random_network("critic_s4", seed) for seed in (2, 3)]
    rngs = lambda: [np.random.default_rng(s) for s in (5, 6)]
    together = evaluation.run_loops(p, networks, rounds=3, eta=0.7, critics=critics, rngs=rngs(), floor=0.01)
    for g, (actor, critic, rng) in enumerate(zip(networks, critics, rngs(), strict=True)):
        alone = closed_loop(p.mdp, actor, critic, rounds=3, eta=0.7, log_pi=start, floor=0.01, rng=rng)
        for name in ("log_pi", "Q", "E", "zeta", "delta", "gbar", "gmax"):
            assert torch.equal(getattr(together, name)[:, g], getattr(alone, name)), name


def test_draws_are_common_to_controllers_and_apart_for_runs():
    p = problem()
    seen = {}

    def spy(name):
        def critic(mdp, log_pi_next, Q, rng):
            seen.setdefault(name, []).append(rng.random(3).tolist())
            return backup(mdp, log_pi_next.exp(), Q)

        return critic

    for label, actor in (("x", exact_actor), ("y", biased(1.3))):
        critics = [spy((label, run)) for run in (0, 4)]
        evaluation.run_loops(p, [actor] * 2, rounds=2, eta=0.8, critics=critics, rngs=evaluation.draw_streams([0, 4], 4))
    assert seen["x", 0] == seen["y", 0] and seen["x", 4] == seen["y", 4]
    assert seen["x", 0] != seen["x", 4]
    moved = evaluation.draw_streams([0], 4, seed=1)[0].random(3).tolist()
    assert moved != seen["x", 0][0]


def test_the_tabular_critic_averages_the_draws_that_the_network_sees():
    p = problem(n=2)
    log_pi = dirichlet_log_policies(2, 4, 3, np.random.default_rng(1))
    Q = torch.from_numpy(np.random.default_rng(2).standard_normal((2, 4, 3)))

    class Reader:  # stands for a network that reads its context perfectly
        def read(self, Q, draws):
            value = (Q - Q.mean((-2, -1), keepdim=True)).flatten(-2).gather(-1, draws.s_next * 3 + draws.a_next)
            return tuple(x.unflatten(-1, (4, 3, 6)).mean(-1) for x in (draws.r, value))

    learned = LearnedCritic(None, None, 6)
    object.__setattr__(learned, "read", Reader().read)
    tabular = evaluation.tabular_critic(6)
    a, b = (critic(p.mdp, log_pi, Q, np.random.default_rng(9)) for critic in (learned, tabular))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-14)  # the same sums in another order
    many = evaluation.tabular_critic(40_000)(p.mdp, log_pi, Q, np.random.default_rng(9))
    # 40,000 draws of values of order 1: standard error .9 * 1.5 / 200
    assert (many - backup(p.mdp, log_pi.exp(), Q)).abs().max() < 0.03
    with pytest.raises(ValueError, match="needs rng"):
        tabular(p.mdp, log_pi, Q, None)


def test_registered_sets_come_first_and_a_reader_gets_fresh_ones():
    protocol = load_protocol()
    registered = contexts.test_mdps(protocol, 4)
    assert torch.equal(evaluation.test_problem(4, n_mdps=5).mdp.P, registered.P[:5])
    assert not torch.isin(evaluation.test_problem(4, n_mdps=5, seed=1).mdp.P, registered.P).any()
    shifts = evaluation.shift_problems(4, n_mdps=5)
    sets = contexts.shift_sets(protocol)
    assert list(shifts) == list(sets) and evaluation.STRESS in shifts
    assert torch.equal(shifts["ring"].log_pi, sets["ring"][1][:5])
    with pytest.raises(ValueError, match="n_mdps must be between 1 and 64"):
        evaluation.test_problem(4, n_mdps=65)


def test_unfinished_cells_are_counted_not_refused(tmp_path):
    frame = evaluation.completeness(["policy_attention_s4", "policy_attention_raw_s4"], 3, tmp_path)
    assert frame[["registered", "finished", "used"]].values.tolist() == [[5, 0, 0], [1, 0, 0]]
    assert evaluation.chosen_runs("policy_attention_s4", 3, tmp_path) == []
    assert "`policy_attention_s4` are not there yet" in evaluation.missing_sentence("policy_attention_s4")


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_each_step_of_the_bound_holds(scale):
    p = problem(seed=4)
    loop = evaluation.run_loops(p, [biased(scale), random_network("policy_attention_s4", 1)], rounds=9, eta=0.8)
    ladder = diagnosis.bound_ladder(p, loop, 0.8)
    steps = list(ladder.values())
    assert all(x.shape == (9, 2, 6) for x in steps)
    for lower, higher in zip(steps[:-1], steps[1:], strict=True):
        assert (lower <= higher + 1e-9).all()
    truth = (p.solution.V_star - evaluate(p.mdp, loop.log_pi[-1].exp())).amax(-1)
    assert torch.equal(truth, ladder["truth"][-1])


def test_audit_inputs_have_their_own_streams():
    protocol = load_protocol()
    on, wide = audit.on_trajectory(4, n_mdps=3), audit.broad(4, n_mdps=3)
    assert len(on) == len(wide) == 72
    others = [contexts.test_mdps(protocol, 4).P]
    others += [
        contexts.training_contexts(protocol.environment, protocol.contexts, 4, run, root=protocol.root_seed).mdp.P
        for run in range(5)
    ]
    for c in (on, wide):
        assert not torch.isin(c.mdp.P, torch.cat(others)).any()
    assert not torch.isin(on.mdp.P, wide.mdp.P).any()
    assert torch.equal(on.mdp.P[0], on.mdp.P[23]) and not torch.equal(on.mdp.P[23], on.mdp.P[24])
    assert (on.log_pi[::24] == -np.log(3)).all() and (on.Q[::24] == 0).all()  # round 0 of each MDP
    torch.testing.assert_close(on.log_pi[1:24], on.target()[:23], rtol=0, atol=1e-12)  # the next round is the exact step
    assert len(audit.thin(on, 6)) == 12 and torch.equal(audit.thin(on, 6).eta, on.eta[::6])
    assert not torch.equal(audit.broad(4, n_mdps=3, seed=1).Q, wide.Q)


@pytest.mark.parametrize("rule", [r for r in RULES if r != "additive_projected"])
def test_the_audit_recognises_each_rule(rule):
    inputs = audit.broad(4, n_mdps=4)
    log_p = RULES[rule](inputs.log_pi, inputs.Q, inputs.eta).log()
    by_rule = audit.distances(log_p[None], inputs, 4)
    assert by_rule[rule].shape == (1, 4) and by_rule[rule].max() < 1e-12
    assert min(d.min() for name, d in by_rule.items() if name != rule) > 0.05


def test_row_l1_is_the_mean_over_states():
    inputs = audit.thin(audit.broad(4, n_mdps=2), 24)
    p = inputs.target().exp().clone()
    best = p[0, 0].argmax()
    p[0, 0] = torch.nn.functional.one_hot(best, 3).to(p)
    expected = 2 * (1 - inputs.target().exp()[0, 0].max()) / 4
    torch.testing.assert_close(audit.row_l1(p.log(), inputs), torch.stack([expected, torch.zeros_like(expected)]))


def test_refitting_returns_the_step_that_was_taken():
    inputs = audit.on_trajectory(4, n_mdps=3)
    etas = [0.1, 0.8, 2.5]
    fits = audit.refitted(exact_actor, inputs, etas, 3)
    np.testing.assert_allclose(fits, np.repeat(etas, 3).reshape(3, 3), atol=1e-7)
    shrunk = audit.refitted(lambda p, Q, eta: pmd_step(p, Q, 0.4 + 0.5 * eta), inputs, etas, 3)
    np.testing.assert_allclose(shrunk[:, 0], [0.45, 0.8, 1.65], atol=1e-7)


def test_refitting_minimises_the_divergence():
    inputs = audit.broad(4, n_mdps=1)
    rows = [x.reshape(1, -1, 3) for x in (inputs.log_pi, inputs.Q)]
    noise = torch.from_numpy(np.random.default_rng(0).normal(0, 0.5, rows[0].shape))
    log_p = torch.log_softmax(pmd_step(*rows, 0.7) + noise, -1)
    fit = audit.refit_eta(log_p, *rows).item()

    def divergence(e):
        return (log_p.exp() * (log_p - pmd_step(*rows, e))).sum(-1).mean().item()

    assert divergence(fit) < min(divergence(fit - 0.01), divergence(fit + 0.01))


def test_td_errors_put_a_perfect_reader_on_the_noise_floor():
    inputs = audit.thin(audit.on_trajectory(4, n_mdps=3), 8)
    fresh = lambda: rng_for("test-draws")
    critics = [evaluation.tabular_critic(6), exact_critic]
    errors = audit.td_errors(critics, inputs, fresh, 6, 3)
    np.testing.assert_array_equal(errors["learned"][0], errors["draws"])
    assert (errors["learned"][1] == 0).all() and (errors["learned_to_draws"][0] == 0).all()
    np.testing.assert_array_equal(errors["learned_to_draws"][1], errors["draws"])


def test_drift_is_the_sum_of_one_step_errors_when_only_the_actor_errs():
    """A constant bias of the log-odds adds up round by round; the critic is frozen so that contexts stay the same."""
    p = problem()
    frozen = lambda mdp, log_pi_next, Q, rng: Q
    Q = p.solution.Q_star
    best = torch.nn.functional.one_hot(Q.argmax(-1), 3).to(Q)
    actors = [exact_actor, lambda log_pi, Q, eta: torch.log_softmax(pmd_step(log_pi, Q, eta) - 0.1 * best, -1)]
    start = dict(rounds=5, eta=0.8, log_pi=torch.full_like(Q, -np.log(3)), Q=Q)
    oracle = closed_loop(p.mdp, exact_actor, frozen, **start)
    pair = [closed_loop(p.mdp, a, frozen, **start) for a in actors]
    for loop, size in zip(pair, (0.0, -0.5), strict=True):
        ties = diagnosis.near_ties(p, loop, oracle, 0.8, 5)
        assert (ties.gap > 0).all() and ties.gap.shape == ties.drift.shape == (6,)
        torch.testing.assert_close(ties.drift, torch.full_like(ties.drift, size), rtol=0, atol=1e-12)
        torch.testing.assert_close(ties.summed, ties.drift, rtol=0, atol=1e-12)
        torch.testing.assert_close(ties.exact, 5 * 0.8 * ties.gap, rtol=0, atol=1e-12)
        assert bool((ties.excess() > 1.0001).all()) == (size < 0)


def test_pieces_change_no_row():
    """float32 sums over a model width of 64 may be blocked differently: 1e-5 of numbers of order 1."""
    critic = random_network("critic_s4", 0)
    tokens = torch.from_numpy(np.random.default_rng(0).standard_normal((7, 96, critic.layout.width))).float()
    whole = critic.decoder(tokens, last=12)
    for size in (96, 300, 5000):
        torch.testing.assert_close(evaluation.Pieces(critic.decoder, size)(tokens, last=12), whole, rtol=0, atol=1e-5)
