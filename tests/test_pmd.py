"""The PMD step, step-size forms, the floor, Q-TD-PMD and the fixed comparison rules."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pa_core.families import dirichlet_log_policies, random_mdps
from pa_core.mdp import MDP, backup, evaluate, normalized_loss, optimal_backup, solve
from pa_core.pmd import (
    RULES,
    check_log_policy,
    eta_at,
    kl,
    mix_floor,
    pmd_step,
    project_simplex,
    q_td_pmd,
    uniform_log_policy,
)


def context(seed, n=3, S=4, A=3, scale=1.0):
    rng = np.random.default_rng(seed)
    return dirichlet_log_policies(n, S, A, rng), torch.from_numpy(scale * rng.standard_normal((n, S, A))), rng


# ---- the step ----


def test_step_by_hand():
    log_pi = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
    Q = torch.tensor([[0.0, math.log(2), math.log(4)]], dtype=torch.float64)
    # Weights 1/2, 1/4 * 2, 1/4 * 4 at eta = 1; 1/2, 1/4 * 4, 1/4 * 16 at eta = 2.  Rounding of a three-term softmax.
    assert pmd_step(log_pi, Q, 1.0).exp()[0].tolist() == pytest.approx([0.25, 0.25, 0.5], rel=1e-15)
    assert pmd_step(log_pi, Q, 2.0).exp()[0].tolist() == pytest.approx([1 / 11, 2 / 11, 8 / 11], rel=1e-15)


def test_divergence_by_hand():
    p = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.25, 0.25, 0.5]], dtype=torch.float64)
    q = torch.tensor([[0.25, 0.5, 0.25]], dtype=torch.float64).expand(3, 3)
    assert kl(p, q.log()).tolist() == pytest.approx(
        [0.5 * math.log(2), math.log(4), 0.25 * math.log(0.5) + 0.5 * math.log(2)]
    )


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), A=st.integers(1, 6), log_eta=st.floats(-7, 7), scale=st.sampled_from([0, 1, 100]))
def test_step_is_the_maximiser_and_the_gap_is_a_divergence(seed, A, log_eta, scale):
    eta = math.exp(log_eta)
    log_pi, Q, rng = context(seed, A=A, scale=scale)
    log_q = pmd_step(log_pi, Q, eta)
    objective = lambda p: eta * (p * Q).sum(-1) - kl(p, log_pi)
    p = torch.from_numpy(rng.dirichlet(np.full(A, 0.5), size=Q.shape[:-1]))
    # The identity objective(q) - objective(p) = KL(p || q) holds for every p; its terms are as large as eta |Q|.
    tol = 1e-13 * (1 + eta * float(Q.abs().max()))
    assert (objective(log_q.exp()) - objective(p) - kl(p, log_q)).abs().max() <= tol
    assert torch.logsumexp(log_q, -1).abs().max() <= 1e-13  # a normalised row


@settings(max_examples=50, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1))
def test_step_ignores_a_shift_of_q_and_commutes_with_renaming(seed):
    log_pi, Q, rng = context(seed)
    shift = torch.from_numpy(rng.standard_normal((3, 4, 1)))
    step = pmd_step(log_pi, Q, 0.8)
    torch.testing.assert_close(pmd_step(log_pi, Q + shift, 0.8), step, rtol=0, atol=1e-14)
    a = torch.from_numpy(rng.permutation(3))
    torch.testing.assert_close(pmd_step(log_pi[..., a], Q[..., a], 0.8), step[..., a], rtol=0, atol=1e-15)
    two = pmd_step(pmd_step(log_pi, Q, 0.3), Q, 0.5)  # steps add up while Q stands still
    torch.testing.assert_close(two, step, rtol=0, atol=1e-14)


def test_large_steps_become_greedy_and_small_steps_stay():
    log_pi, Q, _ = context(0)
    torch.testing.assert_close(pmd_step(log_pi, Q, 1e6).exp(), RULES["reward_only"](log_pi, Q, 1e6), rtol=0, atol=1e-12)
    assert (pmd_step(log_pi, Q, 1e-9) - log_pi).abs().max() < 1e-8  # at most eta times the span of Q


def test_support_survives_what_underflows_as_a_probability():
    log_pi = torch.log_softmax(torch.tensor([[0.0, -5000.0]], dtype=torch.float64), -1)
    assert log_pi.exp()[0, 1] == 0  # not a float64 probability, but a finite logit
    back = pmd_step(log_pi, torch.tensor([[0.0, 1.0]], dtype=torch.float64), 6000.0)
    assert back.exp()[0].tolist() == [0.0, 1.0]


# ---- step sizes ----


def test_step_sizes_are_scalars_batches_or_callables():
    mdp = random_mdps(3, 4, 2, gamma=0.9, rng=np.random.default_rng(1))
    scalar = q_td_pmd(mdp, eta=0.7, rounds=5)
    for eta in (
        torch.tensor(0.7),
        torch.full((3,), 0.7, dtype=torch.float64),
        lambda k: 0.7,
        lambda k: torch.full((3,), 0.7),
    ):
        for one, two in zip(scalar, q_td_pmd(mdp, eta=eta, rounds=5), strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-6)  # 0.7 in float32 is 0.7 + 1e-8
    mixed = torch.tensor([0.1, 0.7, 3.0], dtype=torch.float64)
    log_pi, Q = q_td_pmd(mdp, eta=mixed, rounds=5)
    for i, eta in enumerate(mixed.tolist()):
        alone = q_td_pmd(mdp[i], eta=eta, rounds=5)
        torch.testing.assert_close(log_pi[:, i], alone[0], rtol=0, atol=1e-13)
        torch.testing.assert_close(Q[:, i], alone[1], rtol=0, atol=1e-13)
    # A callable sees rounds 0, 1, ...: a growing schedule equals single rounds with those steps.
    schedule = lambda k: 0.5 * 2.0**k
    whole = q_td_pmd(mdp, eta=schedule, rounds=3)
    log_pi, Q = uniform_log_policy(mdp), torch.zeros_like(mdp.R)
    for eta in (0.5, 1.0, 2.0):
        (_, log_pi), (_, Q) = q_td_pmd(mdp, eta=eta, rounds=1, log_pi=log_pi, Q=Q)
    torch.testing.assert_close(whole[0][-1], log_pi, rtol=0, atol=0)
    torch.testing.assert_close(whole[1][-1], Q, rtol=0, atol=0)


def test_a_batch_of_steps_as_wide_as_the_states_multiplies_the_batch():
    mdp = random_mdps(4, 4, 4, gamma=0.9, rng=np.random.default_rng(1))  # n = S = A: a wrong axis would fit
    eta = torch.tensor([0.1, 1.0, 2.0, 5.0], dtype=torch.float64)
    log_pi, Q, _ = context(3, n=4, S=4, A=4)
    for i in range(4):
        torch.testing.assert_close(pmd_step(log_pi, Q, eta)[i], pmd_step(log_pi[i], Q[i], eta[i].item()), rtol=0, atol=1e-15)
    assert q_td_pmd(mdp, eta=eta, rounds=1)[0].shape == (2, 4, 4, 4)


@pytest.mark.parametrize(
    ("eta", "message"),
    [
        (0.0, "positive and finite, got 0 at round 2"),
        (-1.0, "got -1 at round 2"),
        (float("nan"), "got nan"),
        (float("inf"), "got inf"),
        (torch.tensor([1.0, float("inf"), 1.0]), "got inf"),
        (torch.ones(20), r"batch shape \(3,\), got \(20,\); a step size that changes by round is a callable"),
        (lambda k: 1.0 - k / 2, "got 0 at round 2"),
    ],
)
def test_bad_step_sizes_are_refused(eta, message):
    with pytest.raises(ValueError, match=message):
        eta_at(eta, 2, torch.Size([3]))


# ---- the floor ----


@pytest.mark.parametrize("floor", [1e-30, 1e-6, 0.01, 0.5])
def test_floor_bounds_every_probability_and_the_distance(floor):
    log_pi = torch.log_softmax(torch.tensor([[0.0, -900.0, -3.0], [5.0, 5.0, 5.0]], dtype=torch.float64), -1)
    mixed = mix_floor(log_pi, floor)
    expected = (1 - floor) * log_pi.exp() + floor / 3
    torch.testing.assert_close(mixed.exp(), expected, rtol=1e-14, atol=0)
    assert (mixed >= math.log(floor / 3) - 1e-12).all()  # 1e-12: log of a number near 1e-31 carries 70 times epsilon
    assert (mixed.exp() - log_pi.exp()).abs().sum(-1).max() <= 2 * floor * 2 / 3 + 1e-15
    assert torch.logsumexp(mixed, -1).abs().max() < 1e-14
    assert mix_floor(log_pi, 0.0) is log_pi


@pytest.mark.parametrize("floor", [-0.1, 1.0, float("nan")])
def test_bad_floors_are_refused(floor):
    with pytest.raises(ValueError, match="floor must satisfy 0 <= floor < 1"):
        mix_floor(torch.zeros(1, 1), floor)
    with pytest.raises(ValueError, match="floor must satisfy"):
        q_td_pmd(MDP(torch.ones(1, 1, 1), torch.ones(1, 1), 0.5), eta=1.0, rounds=0, floor=floor)


# ---- the loop ----


def test_loop_by_hand():
    mdp = MDP(torch.ones(1, 2, 1), torch.tensor([[1.0, 0.0]]), 0.5)
    log_pi, Q = q_td_pmd(mdp, eta=math.log(3), rounds=2)
    assert log_pi.shape == Q.shape == (3, 1, 2)
    assert log_pi[1].exp()[0].tolist() == pytest.approx([0.5, 0.5], rel=1e-15)  # policy first, with the old critic Q_0 = 0
    assert Q[1][0].tolist() == [1.0, 0.0]
    assert log_pi[2].exp()[0].tolist() == pytest.approx([0.75, 0.25], rel=1e-14)
    assert Q[2][0].tolist() == pytest.approx([1 + 0.5 * 0.75, 0.5 * 0.75], rel=1e-14)  # the critic sees the new policy


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), S=st.integers(1, 6), A=st.integers(1, 4), eta=st.floats(0.05, 20))
def test_every_round_of_the_loop_is_the_two_steps(seed, S, A, eta):
    rng = np.random.default_rng(seed)
    mdp = random_mdps(2, S, A, gamma=0.9, rng=rng)
    log_pi, Q = q_td_pmd(mdp, eta=eta, rounds=6, log_pi=dirichlet_log_policies(2, S, A, rng), floor=1e-3)
    for k in range(6):
        q = torch.softmax(log_pi[k] + eta * Q[k], -1)
        torch.testing.assert_close(log_pi[k + 1].exp(), (1 - 1e-3) * q + 1e-3 / A, rtol=0, atol=1e-14)
        torch.testing.assert_close(Q[k + 1], backup(mdp, log_pi[k + 1].exp(), Q[k]), rtol=0, atol=0)
    unfloored, Qs = q_td_pmd(mdp, eta=eta, rounds=6)
    total = eta * Qs[:-1].cumsum(0)  # log pi_k = log pi_0 + eta sum of Q_i up to a constant of the state
    torch.testing.assert_close(unfloored[1:], torch.log_softmax(total, -1), rtol=0, atol=1e-12)


def test_huge_steps_are_value_iteration_and_policy_improvement():
    mdp = random_mdps(8, 5, 3, gamma=0.9, rng=np.random.default_rng(2))
    _, Q = q_td_pmd(mdp, eta=lambda k: 1e6 * 4.0**k, rounds=10)
    reference = torch.zeros_like(mdp.R)
    for k in range(10):
        # The round's policy is greedy on Q_k, so the backup is the optimal one; up to the first gap e^{-eta gap}.
        reference = optimal_backup(mdp, reference)
        torch.testing.assert_close(
            Q[k + 1], reference if k else backup(mdp, uniform_log_policy(mdp).exp(), Q[0]), atol=1e-9, rtol=0
        )


def test_values_never_fall_and_reach_the_optimum():
    # From the constant R_min/(1-gamma), which lies below its own backup, the exact loop improves monotonically.
    mdp = random_mdps(16, 5, 3, gamma=0.8, rng=np.random.default_rng(3))
    low = (mdp.R.amin((-2, -1), keepdim=True) / (1 - 0.8)).expand_as(mdp.R).clone()
    log_pi, Q = q_td_pmd(mdp, eta=5.0, rounds=400, Q=low)
    values = evaluate(mdp, log_pi.exp())
    assert ((Q[1:] - Q[:-1]).amin() > -1e-12) and ((values[1:] - values[:-1]).amin() > -1e-12)  # rounding of values <= 5
    assert normalized_loss(mdp, log_pi[-1].exp()).max() < 1e-2
    assert (solve(mdp).V_star - values[-1]).amin() > -1e-12


def test_starts_are_checked():
    mdp = random_mdps(2, 3, 2, gamma=0.9, rng=np.random.default_rng(4))
    ok = uniform_log_policy(mdp)
    zero = ok.clone()
    zero[1, 2] = torch.tensor([0.0, -math.inf])
    nan = torch.zeros_like(mdp.R)
    nan[0, 1, 1] = math.nan
    for start, message in (
        ({"log_pi": zero}, r"log_pi must be finite \(full support\), got -inf at index \(1, 2, 1\)"),
        ({"log_pi": ok + 1e-8}, r"log_pi is not normalised: logsumexp = 1e-08 at index \(0, 0\)"),
        ({"log_pi": ok[0]}, r"log_pi must have shape \(2, 3, 2\), got \(3, 2\)"),
        ({"Q": nan}, r"Q must be finite, got nan at index \(0, 1, 1\)"),
        ({"Q": nan[:, :2]}, r"Q must have shape \(2, 3, 2\), got \(2, 2, 2\)"),
        ({"rounds": -1}, "rounds must be >= 0"),
    ):
        with pytest.raises(ValueError, match=message):
            q_td_pmd(mdp, **({"eta": 1.0, "rounds": 2} | start))
    with pytest.raises(ValueError, match="the actor's row must be finite"):
        check_log_policy(zero, "the actor's row")


def test_zero_rounds_return_the_start():
    mdp = random_mdps(2, 3, 2, gamma=0.9, rng=np.random.default_rng(4))
    log_pi, Q = q_td_pmd(mdp, eta=1.0, rounds=0)
    assert log_pi.shape == Q.shape == (1, 2, 3, 2) and (Q == 0).all()


# ---- comparison rules ----


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), A=st.integers(1, 6), scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_projection_satisfies_its_optimality_conditions(seed, A, scale):
    x = torch.from_numpy(scale * np.random.default_rng(seed).standard_normal((20, A)))
    p = project_simplex(x)
    tol = 1e-13 * (1 + scale)  # differences of entries of size `scale`
    assert (p >= 0).all() and (p.sum(-1) - 1).abs().max() <= tol
    # Variational inequality <x - p, v - p> <= 0 at every vertex v characterises the projection onto a convex set.
    assert (((x - p)[:, None, :] * (torch.eye(A).double() - p[:, None, :])).sum(-1)).max() <= tol * (1 + scale)


def test_projection_by_hand_and_far_out():
    x = torch.tensor([[0.6, 0.6], [1.5, 0.2], [3e17, 0.0], [2.0, 2.0]], dtype=torch.float64)
    expected = torch.tensor([[0.5, 0.5], [1.0, 0.0], [1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(project_simplex(x), expected, rtol=0, atol=1e-15)


def test_comparison_rules_by_hand():
    log_pi = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
    Q = torch.tensor([[0.0, 0.5, 0.5]], dtype=torch.float64)
    rows = {name: rule(log_pi, Q, 0.5)[0].tolist() for name, rule in RULES.items()}
    e = math.exp(0.25)
    assert set(rows) == {"pmd", "additive_projected", "identity", "boltzmann_q", "reward_only"}
    assert rows["pmd"] == pytest.approx([0.5 / (0.5 + 0.5 * e), 0.25 * e / (0.5 + 0.5 * e)] + [0.25 * e / (0.5 + 0.5 * e)])
    assert rows["additive_projected"] == pytest.approx([1 / 3] * 3)  # (.5, .5, .5) projected
    assert rows["identity"] == pytest.approx([0.5, 0.25, 0.25])
    assert rows["boltzmann_q"] == pytest.approx([1 / (1 + 2 * e), e / (1 + 2 * e), e / (1 + 2 * e)])
    assert rows["reward_only"] == [0.0, 0.5, 0.5]  # uniform over the exact tie


def test_every_rule_returns_policies_for_batches_of_steps():
    log_pi, Q, _ = context(5)
    eta = torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64)
    for name, rule in RULES.items():
        p = rule(log_pi, Q, eta)
        assert p.shape == Q.shape and (p >= 0).all() and (p.sum(-1) - 1).abs().max() < 1e-12, name
        torch.testing.assert_close(p[1], rule(log_pi[1], Q[1], 1.0), rtol=0, atol=1e-14)
