"""Controllers without a network: update rules against loops by hand, convergence, batch independence, tuning grids."""

import math

import numpy as np
import pytest
import torch

from pa_core.families import random_mdps
from pa_core.mdp import MDP, backup, solve
from pa_core.model_based import CertaintyEquivalencePMD, Counts, PosteriorSampling, history_backup
from pa_core.online import Draws, Sizes, Steps, make_draws, run_online
from pa_core.pmd import q_td_pmd
from pa_core.tabular import (
    BatchActorCritic,
    ExpectedSarsa,
    OnlineActorCritic,
    QLearning,
    Sarsa,
    actor_critic_increments,
)


def mdps(n=6, S=4, A=3, gamma=0.9, seed=0):
    return random_mdps(n, S, A, gamma=gamma, rng=np.random.default_rng(seed))


def run(mdp, controller, rounds=5, per_round=20, seed=1):
    draws = make_draws(tuple(mdp.batch_shape[-1:]), rounds * per_round, np.random.default_rng(seed))
    return run_online(mdp, controller, rounds=rounds, per_round=per_round, draws=draws)


def window(n=7, S=4, A=3, seed=0, batch=(2,)):
    rng = np.random.default_rng(seed)
    index = lambda k: torch.from_numpy(rng.integers(k, size=(*batch, n)))
    return Steps(index(S), index(A), torch.from_numpy(rng.normal(size=(*batch, n))), index(S))


CONTROLLERS = {
    "batch_ac": lambda: BatchActorCritic(25.0, 6.0),
    "batch_ac_plain": lambda: BatchActorCritic(25.0, 6.0, discounted_actor=False, exploration=0.1),
    "online_ac": lambda: OnlineActorCritic(1.0, 0.3),
    "sarsa": lambda: Sarsa(0.5, 4.0),
    "expected_sarsa": lambda: ExpectedSarsa(0.5, 0.1, behaviour="epsilon"),
    "q_learning": lambda: QLearning(0.5, 4.0, q0=1.0, decay=0.5),
    "ce_pmd": lambda: CertaintyEquivalencePMD(1.6, q0=2.0, prior=1.0),
    "psrl": lambda: PosteriorSampling(np.random.default_rng(3)),
    "psrl_mean": lambda: PosteriorSampling(np.random.default_rng(3), returned="mean"),
}


# ---- update rules, each written out once more transition by transition ----


@pytest.mark.parametrize("discounted", [True, False])
def test_actor_critic_increments_by_hand(discounted):
    steps, g = window(), 0.9
    rng = np.random.default_rng(1)
    w, logits = torch.from_numpy(rng.normal(size=(2, 4))), torch.from_numpy(rng.normal(size=(2, 4, 3)))
    dw, dlogits = actor_critic_increments(w, logits, steps, g, discounted_actor=discounted)
    for b in range(2):
        my_w, my_l = np.zeros(4), np.zeros((4, 3))
        for i in range(7):
            s, a, r, t = (getattr(steps, k)[b, i].item() for k in ("s", "a", "r", "s_next"))
            delta = r + g * w[b, t].item() - w[b, s].item()
            my_w[s] += delta / 7
            my_l[s] += (g**i if discounted else 1) * delta * (np.eye(3)[a] - logits[b, s].softmax(-1).numpy()) / 7
        np.testing.assert_allclose(dw[b], my_w, atol=1e-14)
        np.testing.assert_allclose(dlogits[b], my_l, atol=1e-14)


def _by_hand(rule, steps, lr, beta, gamma, q0, decay):
    Q, visits = np.full((4, 3), q0), np.zeros((4, 3))
    s, a, r, t = (getattr(steps, k)[0].tolist() for k in ("s", "a", "r", "s_next"))
    for i in range(len(s) - (rule == "sarsa")):
        p = np.exp(beta * Q[t[i]]) / np.exp(beta * Q[t[i]]).sum()
        following = {"q": Q[t[i]].max(), "expected": p @ Q[t[i]], "sarsa": Q[t[i], a[i + 1]] if i + 1 < len(s) else None}
        visits[s[i], a[i]] += 1
        rate = lr * visits[s[i], a[i]] ** -decay
        Q[s[i], a[i]] += rate * (r[i] + gamma * following[rule] - Q[s[i], a[i]])
    return Q


@pytest.mark.parametrize("rule,cls", [("q", QLearning), ("expected", ExpectedSarsa), ("sarsa", Sarsa)])
def test_action_value_learners_by_hand(rule, cls):
    mdp = mdps(1)
    learner = cls(0.4, 2.0, q0=0.5, decay=0.3)
    record = run(mdp, learner, rounds=2)
    expected = _by_hand(rule, record.steps, 0.4, 2.0, 0.9, 0.5, 0.3)
    np.testing.assert_allclose(learner.Q[0], expected, atol=1e-12)
    np.testing.assert_allclose(record.log_pi[-1, 0], (2 * learner.Q[0]).log_softmax(-1), atol=1e-12)


def test_online_actor_critic_by_hand():
    learner = OnlineActorCritic(0.7, 0.3)
    steps = run(mdps(1), learner, rounds=2).steps
    w, logits = np.zeros(4), np.zeros((4, 3))
    for s, a, r, t in zip(*(getattr(steps, k)[0].tolist() for k in ("s", "a", "r", "s_next")), strict=True):
        delta = r + 0.9 * w[t] - w[s]
        w[s] += 0.3 * delta
        pi = np.exp(logits[s]) / np.exp(logits[s]).sum()
        logits[s] += 0.7 * delta * (np.eye(3)[a] - pi)
    np.testing.assert_allclose(learner.w[0], w, atol=1e-12)
    np.testing.assert_allclose(learner.logits[0], logits, atol=1e-12)


def test_counts_and_history_backup_by_hand():
    sizes = Sizes(torch.Size([2]), 4, 3, 0.9, 20)
    counts = Counts(sizes)
    parts = [window(seed=0), window(seed=1)]
    for steps in parts:
        counts.add(steps)
    joined = Steps.join(parts)
    rng = np.random.default_rng(2)
    Q = torch.from_numpy(rng.normal(size=(2, 4, 3)))
    pi = torch.from_numpy(rng.dirichlet(np.ones(3), size=(2, 4)))
    value = history_backup(counts, pi, Q, 0.9, q0=7.0, prior=0.5)
    V = (pi * Q).sum(-1)
    for b in range(2):
        for s in range(4):
            for a in range(3):
                mine = (joined.s[b] == s) & (joined.a[b] == a)
                if not mine.any():
                    assert value[b, s, a] == 7
                    continue
                total = V[b, joined.s_next[b][mine]].sum() + 0.5 * V[b].mean()
                last_reward = joined.r[b][mine][-1]
                expected = last_reward + 0.9 * total / (mine.sum() + 0.5)
                assert value[b, s, a].item() == pytest.approx(expected.item(), abs=1e-13)


def test_certainty_equivalence_is_q_td_pmd_once_the_counts_are_the_truth():
    """With counts proportional to P and the rewards known, the controller's rounds are the exact loop's."""
    mdp = mdps(3)
    controller = CertaintyEquivalencePMD(0.8)
    controller.reset(Sizes(mdp.batch_shape, 4, 3, 0.9, 20))
    controller.counts.N, controller.counts.R = mdp.P.clone() * 1e6, mdp.R.clone()
    controller.counts.add = lambda steps: None
    log_pi, Q = q_td_pmd(mdp, eta=0.8, rounds=6)
    # The loop's first mirror step sees Q_0 = 0 and stays uniform; the controller's first round is that evaluation.
    for k in range(1, 6):
        controller.observe(None)
        torch.testing.assert_close(controller.Q, Q[k], rtol=0, atol=1e-12)
        torch.testing.assert_close(controller.policy(), log_pi[k + 1], rtol=0, atol=1e-12)


def test_a_critic_and_an_actor_can_be_put_in_place():
    mdp = mdps(3)
    exact = CertaintyEquivalencePMD(0.8, critic=lambda counts, pi, Q, gamma: backup(mdp, pi, Q))
    record = run(mdp, exact, rounds=5)
    log_pi, _ = q_td_pmd(mdp, eta=0.8, rounds=6)
    torch.testing.assert_close(record.log_pi, log_pi[1:], rtol=0, atol=1e-12)
    lazy = run(mdp, CertaintyEquivalencePMD(0.8, actor=lambda log_pi, Q, eta: log_pi), rounds=2)
    torch.testing.assert_close(lazy.log_pi.exp(), torch.full_like(lazy.log_pi, 1 / 3), rtol=0, atol=1e-15)


# ---- behaviour ----


@pytest.mark.parametrize("name", CONTROLLERS)
def test_every_controller_starts_uniform_and_learns(name):
    mdp = mdps(24)
    record = run(mdp, CONTROLLERS[name](), rounds=20)
    torch.testing.assert_close(record.log_pi[0].exp(), torch.full_like(mdp.R, 1 / 3), rtol=0, atol=1e-12)
    assert record.n_transitions == 400
    # Uniform play scores 1 and pays 1 a step by definition; untuned settings are far below it on 4 states.
    assert record.loss[-1].median() < 0.4
    assert record.regret[-1].median() < 0.6 * 400


@pytest.mark.parametrize("name", CONTROLLERS)
def test_an_mdp_does_not_feel_its_batch_mates(name):
    mdp, other = mdps(), mdps(seed=8)
    mixed = MDP(torch.cat([mdp.P[:3], other.P[3:]]), torch.cat([mdp.R[:3], other.R[3:]]), 0.9)
    a, b = (run(m, CONTROLLERS[name](), rounds=6) for m in (mdp, mixed))
    assert torch.equal(a.steps.s_next[:3], b.steps.s_next[:3])
    assert not torch.equal(a.steps.s_next[3:], b.steps.s_next[3:])
    torch.testing.assert_close(a.log_pi[:, :3].exp(), b.log_pi[:, :3].exp(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [n for n in CONTROLLERS if "psrl" not in n])
def test_part_of_a_batch_gives_the_same_results(name):
    mdp = mdps()
    d = make_draws((6,), 60, np.random.default_rng(1))
    part = Draws(d.start[:2], d.action[:, :2], d.move[:, :2])
    whole = run_online(mdp, CONTROLLERS[name](), rounds=3, draws=d)
    few = run_online(mdp[:2], CONTROLLERS[name](), rounds=3, draws=part)
    torch.testing.assert_close(whole.log_pi[:, :2].exp(), few.log_pi.exp(), rtol=1e-10, atol=1e-12)


def test_a_tuning_grid_is_one_run():
    mdp, x = mdps(), torch.tensor([[0.5], [2.0]], dtype=torch.float64)
    makers = {
        "batch_ac": lambda v: BatchActorCritic(20 * v, 4 * v, exploration=v / 10),
        "online_ac": lambda v: OnlineActorCritic(v, v / 4),
        "sarsa": lambda v: Sarsa(v / 4, v, q0=v, decay=v / 8),
        "expected_sarsa": lambda v: ExpectedSarsa(v / 4, v / 10, behaviour="epsilon"),
        "q_learning": lambda v: QLearning(v / 4, 2 * v),
        "ce_pmd": lambda v: CertaintyEquivalencePMD(v, q0=v, prior=v),
    }
    for make in makers.values():
        grid = run(mdp.expand(2, 6), make(x), rounds=3)
        for g in range(2):
            single = run(mdp, make(x[g, 0].item()), rounds=3)
            torch.testing.assert_close(grid.log_pi[:, g].exp(), single.log_pi.exp(), rtol=1e-10, atol=1e-12)


def test_a_controller_can_be_used_again():
    mdp, controller = mdps(), CONTROLLERS["sarsa"]()
    first, second = (run(mdp, controller, rounds=2) for _ in range(2))
    assert torch.equal(first.log_pi, second.log_pi)


# ---- limits ----


def test_q_learning_reaches_the_optimum_with_much_data():
    mdp = mdps(8, S=3, A=2, gamma=0.5)
    learner = QLearning(1.0, 0.5, behaviour="epsilon", decay=0.7)
    run(mdp, learner, rounds=20, per_round=100)
    Q_star = solve(mdp).Q_star
    # A pair has some 100 visits or more; steps of n^-0.7 leave noise of about sqrt(100^-0.7 / 2) = 0.14 times a target's
    # sd, which at gamma = 0.5 is below 0.3; the largest of 48 entries lies within three such deviations.
    assert (learner.Q - Q_star).abs().max() < 0.13
    assert (learner.Q.argmax(-1) == Q_star.argmax(-1)).double().mean() > 0.9


def test_posterior_sampling_finds_the_optimum_of_tiny_mdps():
    mdp = mdps(16, S=2, A=2, gamma=0.5)
    for returned in ("sampled", "mean"):
        record = run(mdp, PosteriorSampling(np.random.default_rng(0), returned=returned), rounds=40)
        assert record.loss[-1].median() < 1e-12
        assert record.loss[-1].mean() < 0.02
        # Regret flattens: the second half costs less than a third of the first.
        total = record.regret.mean(-1)
        assert total[-1] - total[20] < total[20] / 3


def test_posterior_draws_follow_the_dirichlet_law():
    """The first sampled model of an unseen MDP is Dirichlet(1): its means and variances are the closed forms."""
    sizes = Sizes(torch.Size([4000]), 3, 1, 0.5, 1)
    sampler = PosteriorSampling(np.random.default_rng(0))
    sampler.reset(sizes)
    models = []
    sampler._optimal = lambda weight, R: models.append((weight / weight.sum(-1, keepdim=True), R)) or sizes.table()
    zero = torch.zeros(4000, 1, dtype=torch.int64)
    sampler.observe(Steps(zero, zero, torch.full((4000, 1), 0.25, dtype=torch.float64), zero + 2))
    P, R = models[0]
    seen, unseen = P[:, 0, 0], P[:, 1, 0]  # alpha = (1, 1, 2) and (1, 1, 1)
    # Standard errors at 4000 draws are below 0.005.
    np.testing.assert_allclose(seen.mean(0), [0.25, 0.25, 0.5], atol=0.02)
    np.testing.assert_allclose(unseen.mean(0), [1 / 3] * 3, atol=0.02)
    np.testing.assert_allclose(seen[:, 2].var(), 0.5 * 0.5 / 5, atol=0.005)
    assert (R[:, 0] == 0.25).all() and -1 <= R[:, 1].min() < -0.9 and 0.9 < R[:, 1].max() <= 1


def test_a_strong_prior_keeps_posterior_sampling_from_committing():
    mdp = mdps(16, S=2, A=2, gamma=0.5)
    grid = torch.tensor([[1.0], [1e4]], dtype=torch.float64)
    record = run(mdp.expand(2, 16), PosteriorSampling(np.random.default_rng(0), concentration=grid), rounds=20)
    assert record.loss[-1, 0].mean() < record.loss[-1, 1].mean()


def test_optimism_explores():
    """Pairs not seen yet keep q0: a large one makes the controller visit more of them."""
    mdp = mdps(24, S=8)
    seen = {}
    for q0 in (0.0, 5.0):
        controller = CertaintyEquivalencePMD(1.6, q0=q0)
        run(mdp, controller, rounds=10)
        seen[q0] = (controller.counts.visits > 0).double().mean()
    assert seen[5.0] > seen[0.0]


def test_unknown_options_are_refused():
    with pytest.raises(ValueError, match="softmax or epsilon"):
        QLearning(0.5, 1.0, behaviour="greedy")
    with pytest.raises(ValueError, match="sampled or mean"):
        PosteriorSampling(np.random.default_rng(0), returned="median")


def test_epsilon_greedy_shares_ties_and_mixes_uniform_actions():
    learner = QLearning(0.5, 0.3, behaviour="epsilon")
    learner.reset(Sizes(torch.Size([1]), 1, 3, 0.9, 20))
    learner.Q = torch.tensor([[[1.0, 1.0, 0.0]]], dtype=torch.float64)
    np.testing.assert_allclose(learner.policy().exp()[0, 0], [0.45, 0.45, 0.1], atol=1e-12)
    np.testing.assert_allclose(learner.act(torch.zeros(1, dtype=torch.int64)).exp()[0], [0.45, 0.45, 0.1], atol=1e-12)
    assert math.isclose(BatchActorCritic(1.0, 1.0, exploration=0.1).exploration, 0.1)
