"""The common harness: budgets are counted, draws are common, scores are the ones of `mdp`."""

import math

import numpy as np
import pytest
import torch

from pa_core.families import random_mdps
from pa_core.mdp import MDP, evaluate, normalized_loss, solve
from pa_core.online import BudgetError, Draws, Steps, Trajectories, make_draws, pick, regret_unit, rows, run_online
from pa_core.tokens import _inverse_cdf


def mdps(n=6, S=4, A=3, gamma=0.9, seed=0):
    return random_mdps(n, S, A, gamma=gamma, rng=np.random.default_rng(seed))


def draws(tail, n, seed=1):
    return make_draws(tail, n, np.random.default_rng(seed))


class Fixed:
    """Plays one policy for ever, and keeps what it is handed."""

    def __init__(self, log_pi=None, window=None):
        self.log_pi, self.window = log_pi, window

    def reset(self, sizes):
        self.sizes, self.seen = sizes, []
        self.table = sizes.table(-math.log(sizes.n_actions)) if self.log_pi is None else self.log_pi

    def act(self, state):
        return rows(self.table, state)

    def observe(self, steps):
        self.seen.append(steps)

    def policy(self):
        return self.table


def random_policy(mdp, seed=2):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(mdp.R.shape, generator=g, dtype=torch.float64).log_softmax(-1)


# ---- budget ----


@pytest.mark.parametrize("window", [None, 1, 3, 20])
def test_the_harness_counts_and_hands_over_every_transition_once(window):
    mdp, controller = mdps(), Fixed(window=window)
    record = run_online(mdp, controller, rounds=3, draws=draws((6,), 60))
    assert record.n_transitions == 60 and record.steps.s.shape == (6, 60)
    sizes = [20] if window in (None, 20) else [1] * 20 if window == 1 else [3] * 6 + [2]
    assert [p.s.shape[-1] for p in controller.seen] == sizes * 3
    joined = Steps.join(controller.seen)
    for name in ("s", "a", "r", "s_next"):
        assert torch.equal(getattr(joined, name), getattr(record.steps, name))
    assert torch.equal(joined.s[:, 1:], joined.s_next[:, :-1])  # one continuing trajectory, across rounds too
    pair = (torch.arange(6)[:, None], joined.s, joined.a)
    assert torch.equal(joined.r, mdp.R[pair])


@pytest.mark.parametrize("window", [21, 144, 0])
def test_a_controller_that_asks_for_more_than_a_round_is_stopped(window):
    controller = Fixed(window=window)
    with pytest.raises(BudgetError, match=f"asks for {window} transitions.*has 20"):
        run_online(mdps(), controller, rounds=2, draws=draws((6,), 40))
    assert not hasattr(controller, "seen")  # before a single transition


def test_trajectories_give_no_step_beyond_the_round_or_the_draws():
    mdp = mdps()
    world = Trajectories(mdp, draws((6,), 5))
    log_pi = torch.full((6, 3), -math.log(3), dtype=torch.float64)
    with pytest.raises(BudgetError, match="used up"):
        world.step(log_pi)
    world.open_round(2)
    world.step(log_pi), world.step(log_pi)
    with pytest.raises(BudgetError, match=r"used up \(2 so far\)"):
        world.step(log_pi)
    world.open_round(9)
    for _ in range(3):
        world.step(log_pi)
    with pytest.raises(BudgetError, match="the draws hold 5 steps"):
        world.step(log_pi)
    assert world.used == 5


def test_bad_requests_are_refused():
    mdp = mdps()
    with pytest.raises(ValueError, match="need 40 draws, got 39"):
        run_online(mdp, Fixed(), rounds=2, draws=draws((6,), 39))
    with pytest.raises(ValueError, match="rounds and per_round"):
        run_online(mdp, Fixed(), rounds=0, draws=draws((6,), 39))
    with pytest.raises(ValueError, match="draws for"):
        run_online(mdp, Fixed(), rounds=1, draws=draws((5,), 20))
    shifted = random_policy(mdp)
    shifted[4, 2] += 0.1
    with pytest.raises(ValueError, match=r"not normalised at index \(4, 2\)"):
        run_online(mdp, Fixed(shifted), rounds=1, draws=draws((6,), 20))
    world = Trajectories(mdp, draws((6,), 5))
    world.open_round(1)
    bad = torch.full((6, 3), -math.log(3), dtype=torch.float64)
    bad[3] = torch.nan
    with pytest.raises(ValueError, match=r"index \(3,\) sum to nan"):
        world.step(bad)


# ---- draws ----


def test_pick_is_the_inverse_cdf_of_the_token_sampler():
    rng = np.random.default_rng(3)
    weights = torch.from_numpy(rng.dirichlet(np.full(5, 0.3), size=500))
    weights[:100, 0] = 0
    weights[50:150, -1] = 0
    u = torch.from_numpy(rng.random(500))
    u[:200] = 0
    u[200:300] = 1 - 2**-53
    index = pick(weights.cumsum(-1), u)
    assert torch.equal(index, _inverse_cdf(weights, u[:, None])[:, 0])
    assert (weights[torch.arange(500), index] > 0).all()


def test_common_random_numbers():
    """Controllers with equal policies walk the same path; longer runs go on from shorter ones; other seeds differ."""
    mdp = mdps()
    one = run_online(mdp, Fixed(window=1), rounds=2, draws=draws((6,), 40))
    two = run_online(mdp, Fixed(window=None), rounds=3, draws=draws((6,), 60))
    assert torch.equal(one.steps.s_next, two.steps.s_next[:, :40])
    torch.manual_seed(0)
    np.random.seed(0)
    again = run_online(mdp, Fixed(), rounds=3, draws=draws((6,), 60))
    assert torch.equal(two.steps.s_next, again.steps.s_next)
    other = run_online(mdp, Fixed(), rounds=3, draws=draws((6,), 60, seed=9))
    assert not torch.equal(two.steps.s_next, other.steps.s_next)
    # Budgets of 5 and 20 a round see the same uniforms step by step.
    small = run_online(mdp, Fixed(), rounds=12, per_round=5, draws=draws((6,), 60))
    assert torch.equal(small.steps.s_next, two.steps.s_next)


def test_a_grid_of_settings_shares_the_draws_of_its_mdps():
    mdp = mdps()
    d = draws((6,), 40)
    log_pi = torch.stack([random_policy(mdp, k) for k in range(3)])
    grid = run_online(mdp.expand(3, 6), Fixed(log_pi), rounds=2, draws=d)
    for g in range(3):
        single = run_online(mdp, Fixed(log_pi[g]), rounds=2, draws=d)
        assert torch.equal(grid.steps.s_next[g], single.steps.s_next)
        torch.testing.assert_close(grid.loss[:, g], single.loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grid.regret[:, g], single.regret, rtol=1e-12, atol=1e-12)


def test_frequencies_are_those_of_policy_and_transitions():
    mdp = mdps(1, S=3, A=2)
    log_pi = random_policy(mdp)
    n = 4000
    many = run_online(mdp.expand(n, 1), Fixed(log_pi.expand(n, 1, 3, 2)), rounds=1, per_round=2, draws=draws((n, 1), 2))
    s, a, s_next = (getattr(many.steps, k)[:, 0] for k in ("s", "a", "s_next"))
    # 4 sd of a frequency from 4000 / 3 / 2 samples is below 0.08
    assert np.allclose(np.bincount(s[:, 0]) / n, 1 / 3, atol=0.04)
    for i in range(3):
        at = s[:, 0] == i
        assert np.allclose((a[at, 0] == 0).double().mean(), log_pi[0, i, 0].exp(), atol=0.08)
        for b in range(2):
            chosen = s_next[:, 0][at & (a[:, 0] == b)]
            frequency = torch.bincount(chosen, minlength=3) / len(chosen)
            assert np.allclose(frequency, mdp.P[0, i, b], atol=0.12)


# ---- scores ----


def test_scores_are_the_normalised_loss_of_the_returned_policy():
    mdp = mdps()
    log_pi = random_policy(mdp)
    record = run_online(mdp, Fixed(log_pi), rounds=2, draws=draws((6,), 40))
    assert torch.equal(record.log_pi, log_pi.expand(3, *log_pi.shape))
    expected = normalized_loss(mdp, log_pi.exp())
    torch.testing.assert_close(record.loss, expected.expand(3, 6), rtol=1e-12, atol=1e-14)
    best = solve(mdp).pi_star
    optimal = run_online(mdp, Fixed(best.log()), rounds=2, draws=draws((6,), 40))  # -inf is allowed
    assert optimal.loss.abs().max() < 1e-12 and optimal.greedy_loss.abs().max() < 1e-12
    assert optimal.regret.abs().max() < 1e-10


def test_uniform_play_pays_about_one_unit_of_regret_a_step():
    """(1 - gamma)(J* - J(pi)) is the discounted mean of the gaps, so the long-run mean of uniform play is near 1."""
    mdp = mdps(40, S=8, gamma=0.99)
    record = run_online(mdp, Fixed(), rounds=20, draws=draws((40,), 400))
    assert record.regret[0].abs().max() == 0
    assert (record.regret[1:] >= record.regret[:-1]).all()
    # sd of the mean over 400 dependent steps and 40 MDPs is below 0.01
    assert record.regret[-1].mean() / 400 == pytest.approx(1, abs=0.05)


def test_regret_is_the_gap_of_the_behaviour_at_the_visited_states():
    mdp = mdps(3)
    log_pi, solution = random_policy(mdp), solve(mdp)
    record = run_online(mdp, Fixed(log_pi), rounds=1, per_round=4, draws=draws((3,), 4))
    scale = (solution.V_star - evaluate(mdp, torch.full_like(mdp.R, 1 / 3))).mean(-1) * (1 - mdp.gamma)
    torch.testing.assert_close(regret_unit(mdp, solution), scale, rtol=1e-12, atol=0)
    for i in range(3):
        gaps = [solution.V_star[i, s] - (log_pi[i, s].exp() * solution.Q_star[i, s]).sum() for s in record.steps.s[i]]
        assert record.regret[-1, i].item() == pytest.approx((sum(gaps) / scale[i]).item(), rel=1e-10)


def test_an_mdp_where_every_policy_is_optimal_costs_nothing():
    flat = MDP(torch.full((1, 2, 3, 2), 0.5, dtype=torch.float64), torch.ones(1, 2, 3, dtype=torch.float64), 0.9)
    record = run_online(flat, Fixed(), rounds=1, draws=draws((1,), 20))
    assert record.loss.abs().max() == 0 and record.regret.abs().max() == 0


def test_an_mdp_does_not_feel_its_batch_mates():
    mdp, other = mdps(), mdps(seed=8)
    mixed = MDP(torch.cat([mdp.P[:3], other.P[3:]]), torch.cat([mdp.R[:3], other.R[3:]]), 0.9)
    d = draws((6,), 40)
    a, b = (run_online(m, Fixed(), rounds=2, draws=d) for m in (mdp, mixed))
    alone = run_online(mdp[:3], Fixed(), rounds=2, draws=Draws(d.start[:3], d.action[:, :3], d.move[:, :3]))
    for record in (b, alone):
        assert torch.equal(a.steps.s_next[:3], record.steps.s_next[:3])
        torch.testing.assert_close(a.loss[:, :3], record.loss[:, :3], rtol=1e-12, atol=1e-14)
