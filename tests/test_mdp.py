"""MDPs: closed forms, an independent solver, equivariance, refusals."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from pa_core.families import random_mdps
from pa_core.mdp import MDP, action_values, backup, evaluate, normalized_loss, one_hot_greedy, optimal_backup, solve


def uniform(mdp):
    return torch.full_like(mdp.R, 1 / mdp.n_actions)


def two_state(gamma, stay=0.25):
    """Action 0 stays put and pays 0 in state 0 and 1 in state 1; action 1 switches state for free."""
    P = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)  # [s, a, s']: a names s'
    R = torch.tensor([[0.0, stay], [0.0, 1.0]], dtype=torch.float64)
    return MDP(P, R, gamma)


# ---- closed forms ----


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.9, 0.999])
def test_two_state_closed_form(gamma):
    # Action a moves to state a; paying 1/4 on entering and 1 for staying in state 1.
    solution = solve(two_state(gamma))
    v1 = 1 / (1 - gamma)
    expected = torch.tensor([0.25 + gamma * v1, v1], dtype=torch.float64)
    # Linear solve: relative error about condition number 2/(1-gamma) times 1e-16.
    torch.testing.assert_close(solution.V_star, expected, rtol=1e-12, atol=0)
    assert solution.pi_star.tolist() == [[0, 1], [0, 1]]
    value = evaluate(two_state(gamma), uniform(two_state(gamma)))
    mean = (0.25 / 2 + 1 / 2) / 2  # uniform policy: next state uniform whatever happens
    tail = gamma * mean / (1 - gamma)
    torch.testing.assert_close(value, torch.tensor([0.125 + tail, 0.5 + tail], dtype=torch.float64), rtol=1e-12, atol=0)


def test_one_state_one_action_is_a_geometric_series():
    mdp = MDP(torch.ones(1, 1, 1), torch.tensor([[-3.0]]), 0.75)
    assert solve(mdp).V_star.item() == pytest.approx(-12, rel=1e-15)
    assert solve(mdp).Q_star.item() == pytest.approx(-12, rel=1e-15)
    assert mdp.value_bound.item() == 12
    assert normalized_loss(mdp, torch.ones(1, 1)).item() == 0  # the only policy is optimal


def test_gamma_zero_is_a_bandit():
    mdp = random_mdps(5, 4, 3, gamma=0.0, rng=np.random.default_rng(0))
    solution = solve(mdp)
    assert torch.equal(solution.Q_star, mdp.R)
    torch.testing.assert_close(solution.V_star, mdp.R.amax(-1), rtol=1e-15, atol=0)
    pi = one_hot_greedy(-mdp.R)
    torch.testing.assert_close(evaluate(mdp, pi), mdp.R.amin(-1), rtol=1e-15, atol=0)
    Q = torch.randn(5, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(backup(mdp, pi, Q), mdp.R)


def test_ties_take_the_lowest_action_and_cost_nothing():
    P = torch.full((3, 4, 3), 1 / 3, dtype=torch.float64)
    R = torch.tensor([[1.0, 2.0, 2.0, 0.0], [0, 0, 0, 0], [5.0, 5.0, 5.0 - 1e-13, 5.0]], dtype=torch.float64)
    mdp = MDP(P, R, 0.9)
    assert solve(mdp).pi_star.argmax(-1).tolist() == [1, 0, 0]
    # A tie within the slack 1e-10 (1 + B) still goes to the lowest index, though another action is ahead by rounding.
    R[2, 1] = 5.0 + 1e-12
    assert solve(MDP(P, R, 0.9)).pi_star.argmax(-1).tolist() == [1, 0, 0]
    flat = MDP(P, torch.ones(3, 4), 0.9)
    assert solve(flat).pi_star.argmax(-1).tolist() == [0, 0, 0]
    assert normalized_loss(flat, one_hot_greedy(torch.rand(3, 4))).tolist() == 0  # all policies optimal: 0 by convention


def test_score_is_0_at_the_optimum_1_at_uniform_and_above_1_below_uniform():
    mdp = random_mdps(8, 5, 3, gamma=0.9, rng=np.random.default_rng(1))
    solution = solve(mdp)
    # Two linear solves of condition 20 over a scale of order .1: errors about 1e-13.
    torch.testing.assert_close(normalized_loss(mdp, solution.pi_star), torch.zeros(8).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(normalized_loss(mdp, uniform(mdp)), torch.ones(8).double(), atol=1e-12, rtol=0)
    worst = solve(MDP(mdp.P, -mdp.R, 0.9)).pi_star
    assert (normalized_loss(mdp, worst) > 1).all()


def test_score_by_hand():
    mdp = two_state(0.5, stay=0.0)  # J* = ((0 + 1) + 2) / 2; uniform: mean reward 1/4 on entry, (0 + 1/2)/2 + tail
    stay_put = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    J_star, J_uniform, J = 1.5, 0.25 + 0.25, (0.0 + 2.0) / 2
    assert normalized_loss(mdp, stay_put).item() == pytest.approx((J_star - J) / (J_star - J_uniform), rel=1e-14)


# ---- the independent route ----


def linear_programme(mdp):
    """V* as the least v with v >= R(s,a) + gamma P(s,a) v, by scipy's linprog."""
    S, A = mdp.n_states, mdp.n_actions
    rows = mdp.gamma * mdp.P.numpy().reshape(S * A, S) - np.repeat(np.eye(S), A, axis=0)
    result = linprog(np.ones(S), A_ub=rows, b_ub=-mdp.R.numpy().reshape(S * A), bounds=(None, None), method="highs")
    assert result.status == 0
    return torch.from_numpy(result.x)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    S=st.integers(1, 8),
    A=st.integers(1, 5),
    gamma=st.sampled_from([0.0, 0.3, 0.9, 0.99]),
    concentration=st.sampled_from([0.05, 1.0, 50.0]),
)
def test_policy_iteration_agrees_with_the_linear_programme(seed, S, A, gamma, concentration):
    mdp = random_mdps(1, S, A, gamma=gamma, concentration=concentration, rng=np.random.default_rng(seed))[0]
    P = torch.where(
        mdp.P < 1e-7, 0.0, mdp.P
    )  # HiGHS drops coefficients below 1e-9, which alone would cost 1e-9 V / (1-gamma)
    mdp = MDP(P / P.sum(-1, keepdim=True), mdp.R, gamma)
    solution = solve(mdp)
    V = linear_programme(mdp)
    # HiGHS returns a vertex, exact up to a linear solve of condition 200 at most; 1e-8 is the contract.
    assert (solution.V_star - V).abs().max() <= 1e-8
    assert (solution.Q_star - action_values(mdp, V)).abs().max() <= 1e-8


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    S=st.integers(1, 8),
    A=st.integers(1, 5),
    gamma=st.floats(0, 0.999),
    quantised=st.booleans(),
)
def test_solution_is_a_fixed_point_and_its_policy_attains_it(seed, S, A, gamma, quantised):
    rng = np.random.default_rng(seed)
    mdp = random_mdps(3, S, A, gamma=gamma, concentration=0.3, rng=rng)
    if quantised:  # rewards in {-1, 0, 1}: many exact ties
        mdp = MDP(mdp.P, mdp.R.round(), gamma)
    solution = solve(mdp)
    B = mdp.value_bound
    tol = 1e-12 * (1 + B)  # a handful of float64 operations on values of size B
    assert ((optimal_backup(mdp, solution.Q_star) - solution.Q_star).abs().amax((-2, -1)) <= tol).all()
    assert (solution.Q_star.abs().amax((-2, -1)) <= B + tol).all()
    # A near-tie within 1e-10 (1 + B) may cost its size over 1 - gamma.
    loss = (solution.V_star - evaluate(mdp, solution.pi_star)).abs().amax(-1)
    assert (loss <= 2e-10 * (1 + B) / (1 - gamma)).all()
    pi = torch.from_numpy(rng.dirichlet(np.ones(A), size=(3, S)))
    assert (evaluate(mdp, pi) <= solution.V_star + tol[:, None] / (1 - gamma)).all()


def test_evaluation_is_the_limit_of_the_backup():
    mdp = random_mdps(4, 6, 3, gamma=0.8, rng=np.random.default_rng(2))
    pi = torch.from_numpy(np.random.default_rng(3).dirichlet(np.ones(3), size=(4, 6)))
    Q = torch.zeros_like(mdp.R)
    for _ in range(200):  # gamma^200 = 4e-20
        Q = backup(mdp, pi, Q)
    torch.testing.assert_close((pi * Q).sum(-1), evaluate(mdp, pi), atol=1e-13, rtol=0)


def test_backup_by_hand():
    # One state entered from everywhere, so that each factor of the formula can be read off.
    P = torch.tensor([[[0.25, 0.75], [1.0, 0.0]], [[0.0, 1.0], [0.5, 0.5]]], dtype=torch.float64)
    R = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    mdp = MDP(P, R, 0.5)
    Q = torch.tensor([[8.0, 0.0], [0.0, 16.0]], dtype=torch.float64)
    pi = torch.tensor([[0.5, 0.5], [0.75, 0.25]], dtype=torch.float64)  # values 4 and 4
    assert backup(mdp, pi, Q).tolist() == [[3.0, 4.0], [5.0, 6.0]]
    assert optimal_backup(mdp, Q).tolist() == [[1 + 0.5 * 14, 2 + 0.5 * 8], [3 + 0.5 * 16, 4 + 0.5 * 12]]
    assert action_values(mdp, torch.tensor([8.0, 0.0]).double()).tolist() == [[2.0, 6.0], [3.0, 6.0]]


# ---- equivariance and batches ----


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), S=st.integers(1, 7), A=st.integers(1, 5), gamma=st.floats(0, 0.99))
def test_renaming_states_and_actions_renames_the_answers(seed, S, A, gamma):
    rng = np.random.default_rng(seed)
    mdp = random_mdps(2, S, A, gamma=gamma, rng=rng)
    s, a = torch.from_numpy(rng.permutation(S)), torch.from_numpy(rng.permutation(A))
    renamed = MDP(mdp.P[:, s][:, :, a][:, :, :, s], mdp.R[:, s][:, :, a], gamma)
    pi = torch.from_numpy(rng.dirichlet(np.ones(A), size=(2, S)))
    pi_renamed = pi[:, s][:, :, a]
    one, two = solve(mdp), solve(renamed)
    close = dict(rtol=0, atol=1e-12 / (1 - gamma))  # the sums run in another order; solves have condition 2/(1-gamma)
    torch.testing.assert_close(two.V_star, one.V_star[:, s], **close)
    torch.testing.assert_close(two.Q_star, one.Q_star[:, s][:, :, a], **close)
    assert torch.equal(two.pi_star, one.pi_star[:, s][:, :, a])  # continuous rewards: no ties
    torch.testing.assert_close(evaluate(renamed, pi_renamed), evaluate(mdp, pi)[:, s], **close)
    torch.testing.assert_close(normalized_loss(renamed, pi_renamed), normalized_loss(mdp, pi), rtol=1e-8, atol=1e-12)


def test_a_batch_is_its_members():
    mdp = random_mdps(6, 4, 3, gamma=0.9, rng=np.random.default_rng(4))
    grid = MDP(mdp.P.reshape(2, 3, 4, 3, 4), mdp.R.reshape(2, 3, 4, 3), 0.9)
    pi = torch.from_numpy(np.random.default_rng(5).dirichlet(np.ones(3), size=(2, 3, 4)))
    batch, losses = solve(grid), normalized_loss(grid, pi)
    assert batch.V_star.shape == (2, 3, 4) and batch.Q_star.shape == (2, 3, 4, 3) and losses.shape == (2, 3)
    assert grid.value_bound.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            alone = solve(grid[i, j])
            assert grid[i, j].batch_shape == ()
            torch.testing.assert_close(batch.V_star[i, j], alone.V_star, rtol=0, atol=1e-13)
            assert torch.equal(batch.pi_star[i, j], alone.pi_star)
            torch.testing.assert_close(losses[i, j], normalized_loss(grid[i, j], pi[i, j]), rtol=0, atol=1e-12)


def test_a_trajectory_of_policies_broadcasts_over_its_mdps():
    mdp = random_mdps(3, 4, 2, gamma=0.9, rng=np.random.default_rng(6))
    pi = torch.from_numpy(np.random.default_rng(7).dirichlet(np.ones(2), size=(5, 3, 4)))
    values, losses = evaluate(mdp, pi), normalized_loss(mdp, pi)
    assert values.shape == (5, 3, 4) and losses.shape == (5, 3)
    for k in range(5):
        torch.testing.assert_close(values[k], evaluate(mdp, pi[k]), rtol=0, atol=1e-13)
        torch.testing.assert_close(losses[k], normalized_loss(mdp, pi[k]), rtol=0, atol=1e-12)


def test_indexing_never_reaches_states_or_actions():
    mdp = random_mdps(4, 4, 3, gamma=0.9, rng=np.random.default_rng(8))  # n = S: a wrong axis would fit
    with pytest.raises(IndexError):
        mdp[:, 0]
    with pytest.raises(IndexError):
        mdp[0][0]
    assert torch.equal(mdp[..., 2].P, mdp.P[2]) and torch.equal(mdp[1:3].R, mdp.R[1:3])
    assert torch.equal(mdp[0].expand(2, 5).P[1, 4], mdp.P[0])


def test_an_mdp_is_frozen():
    mdp = two_state(0.5)
    with pytest.raises(AttributeError):
        mdp.gamma = 0.9


# ---- refusals ----


def good():
    return torch.full((2, 3, 2, 3), 1 / 3, dtype=torch.float64), torch.zeros(2, 3, 2, dtype=torch.float64)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (float("nan"), r"P.*non-finite entry nan at index \(1, 2, 0, 1\)"),
        (float("inf"), r"P.*non-finite entry inf at index \(1, 2, 0, 1\)"),
        (-0.1, r"P.*negative probability -0.1 at index \(1, 2, 0, 1\)"),
        (0.5, r"P.*sums to 1.1666.*at index \(1, 2, 0\).*float32.*renormalised"),
        (1 / 3 + 2e-9, r"P.*sums to .* at index \(1, 2, 0\)"),
    ],
)
def test_bad_transitions_are_refused_with_their_index(entry, message):
    P, R = good()
    P[1, 2, 0, 1] = entry
    with pytest.raises(ValueError, match=message):
        MDP(P, R, 0.9)


def test_rows_within_the_tolerance_are_accepted_and_float32_tables_are_explained():
    P, R = good()
    P[0, 0, 0, 0] += 5e-10
    MDP(P, R, 0.9)
    table = np.random.default_rng(0).dirichlet(np.ones(7), size=(7, 3)).astype(np.float32)
    with pytest.raises(ValueError, match="float32 table must be converted to float64 and renormalised"):
        MDP(table, np.zeros((7, 3)), 0.9)
    table = table.astype(np.float64)
    MDP(table / table.sum(-1, keepdims=True), np.zeros((7, 3)), 0.9)


def test_lists_of_python_floats_keep_their_precision():
    mdp = MDP([[[0.1, 0.9]], [[0.7, 0.3]]], [[0.1], [0.2]], 0.5)
    assert mdp.P[0, 0, 0].item() == 0.1 and mdp.R.dtype == torch.float64


@pytest.mark.parametrize("entry", [float("nan"), float("inf"), -float("inf")])
def test_bad_rewards_are_refused_with_their_index(entry):
    P, R = good()
    R[1, 0, 1] = entry
    with pytest.raises(ValueError, match=r"R.*non-finite entry .* at index \(1, 0, 1\)"):
        MDP(P, R, 0.9)


@pytest.mark.parametrize("gamma", [1.0, 1.5, -0.1, float("nan"), "0.9", None, True])
def test_bad_discounts_are_refused(gamma):
    with pytest.raises(ValueError, match="gamma must be a number with 0 <= gamma < 1"):
        MDP(*good(), gamma)


@pytest.mark.parametrize(
    ("P_shape", "R_shape", "message"),
    [
        ((3, 2, 4), (3, 2), "P must have shape"),
        ((3, 3), (3,), "P must have shape"),
        ((0, 2, 0), (0, 2), "P must have shape"),
        ((3, 2, 3), (2, 3), r"R must have shape \(3, 2\).*got \(2, 3\)"),
        ((2, 3, 2, 3), (3, 2), r"R must have shape \(2, 3, 2\)"),
    ],
)
def test_bad_shapes_are_refused(P_shape, R_shape, message):
    P = torch.full(P_shape, 1 / max(P_shape[-1], 1))
    with pytest.raises(ValueError, match=message):
        MDP(P, torch.zeros(R_shape), 0.9)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([float("nan"), 1.0], r"pi.*non-finite entry nan at index \(1, 0\)"),
        ([1.5, -0.5], r"pi.*negative probability -0.5 at index \(1, 1\)"),
        ([0.5, 0.4], r"pi.*sums to 0.9.*at index \(1,\)"),
    ],
)
def test_bad_policies_are_refused_everywhere(row, message):
    mdp = two_state(0.5)
    pi = torch.tensor([[0.5, 0.5], row], dtype=torch.float64)
    for call in (evaluate, normalized_loss, lambda m, p: backup(m, p, m.R)):
        with pytest.raises(ValueError, match=message):
            call(mdp, pi)


def test_wrong_policy_and_value_shapes_are_refused():
    mdp = two_state(0.5)
    with pytest.raises(ValueError, match=r"pi must have shape \[..., 2, 2\], got \(2, 3\)"):
        evaluate(mdp, torch.full((2, 3), 1 / 3))
    with pytest.raises(ValueError, match=r"Q must have shape \[..., 2, 2\], got \(2, 1\)"):
        backup(mdp, uniform(mdp), torch.zeros(2, 1))
