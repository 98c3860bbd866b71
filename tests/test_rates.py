"""The known rates: their ingredients by hand and by simulation, the curves against exact runs."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pa_core.families import dirichlet_log_policies, from_gymnasium, random_mdps, ring_mdp
from pa_core.mdp import MDP, evaluate, solve
from pa_core.pmd import q_td_pmd
from pa_core.rates import geometric_bound, is_irreducible, occupancy, stationary_law, sublinear_bound

CHAIN = torch.tensor([[[0.0, 1.0, 0.0]], [[0.0, 0.0, 1.0]], [[0.5, 0.5, 0.0]]], dtype=torch.float64)


def one_action(P, gamma=0.5):
    mdp = MDP(P, torch.zeros(P.shape[:-1]), gamma)
    return mdp, torch.ones(P.shape[0], 1, dtype=torch.float64)


def test_occupancy_by_hand_and_as_a_series():
    mdp, pi = one_action(torch.tensor([[[0.0, 1.0]], [[0.0, 1.0]]], dtype=torch.float64), gamma=0.75)
    first = torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert occupancy(mdp, pi, first).tolist() == pytest.approx([0.25, 0.75], rel=1e-15)
    mdp, pi = one_action(CHAIN)
    law, total = torch.full((3,), 1 / 3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for t in range(60):  # gamma^60 = 1e-18
        total += 0.5 * 0.5**t * law
        law = law @ CHAIN[:, 0]
    torch.testing.assert_close(occupancy(mdp, pi), total, rtol=0, atol=1e-15)


def test_stationary_law_by_hand():
    mdp, pi = one_action(CHAIN)
    # nu = (1/2 nu_2, nu_0 + 1/2 nu_2, nu_1): proportional to (1, 2, 2).
    assert stationary_law(mdp, pi).tolist() == pytest.approx([0.2, 0.4, 0.4], rel=1e-14)


def test_irreducibility():
    assert is_irreducible(*one_action(CHAIN))
    broken = CHAIN.clone()
    broken[2, 0] = torch.tensor([0.0, 0.0, 1.0])
    assert not is_irreducible(*one_action(broken))
    n = 9  # a cycle is irreducible, though it takes n - 1 steps to see all of it
    cycle = torch.roll(torch.eye(n, dtype=torch.float64), 1, dims=1)[:, None, :]
    assert is_irreducible(*one_action(cycle))
    path = cycle.clone()
    path[n - 1, 0] = torch.eye(n, dtype=torch.float64)[n - 1]
    assert not is_irreducible(*one_action(path))
    both = MDP(torch.stack([cycle, path]), torch.zeros(2, n, 1), 0.5)
    assert is_irreducible(both, torch.ones(2, n, 1)).tolist() == [True, False]
    with pytest.raises(ValueError, match=r"not irreducible at index \(1,\)"):
        stationary_law(both, torch.ones(2, n, 1))
    assert is_irreducible(*one_action(torch.ones(1, 1, 1, dtype=torch.float64)))
    lake = from_gymnasium("FrozenLake-v1", gamma=0.9)
    with pytest.raises(ValueError, match="not irreducible"):
        geometric_bound(lake, solve(lake), eta_0=1.0, rounds=2)


def gap_curve(mdp, solution, log_pi, weights):
    return (weights * (solution.V_star - evaluate(mdp, log_pi.exp()))).sum(-1)  # [rounds + 1, n]


CASES = dict(
    seed=st.integers(0, 2**32 - 1),
    S=st.integers(1, 6),
    A=st.integers(1, 4),
    gamma=st.sampled_from([0.0, 0.3, 0.9, 0.99]),
    eta=st.floats(-4, 4).map(math.exp),
    informed=st.booleans(),
)


def start_for(rng, mdp, informed):
    """Uniform and 0, or a random policy with critic values of either sign, well out of range."""
    if not informed:
        return {}
    n, S, A = mdp.R.shape
    Q = torch.from_numpy(rng.normal(0, 3, mdp.R.shape)) * (1 + mdp.value_bound[:, None, None])
    return {"log_pi": dirichlet_log_policies(n, S, A, rng), "Q": Q}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(**CASES, concentrated=st.booleans())
def test_measured_curve_is_under_the_sublinear_bound(seed, S, A, gamma, eta, informed, concentrated):
    rng = np.random.default_rng(seed)
    mdp = random_mdps(4, S, A, gamma=gamma, concentration=0.3, rng=rng)
    solution = solve(mdp)
    begin = start_for(rng, mdp, informed)
    mu = torch.from_numpy(rng.dirichlet(np.full(S, 0.2), size=4)) if concentrated else torch.full((4, S), 1 / S).double()
    log_pi, Q = q_td_pmd(mdp, eta=eta, rounds=25, **begin)
    bound = sublinear_bound(mdp, solution, eta=eta, rounds=25, mu=mu, **begin)
    assert bound.shape == (26, 4) and (bound[0] == math.inf).all()
    tol = 1e-12 * (1 + Q.abs().amax()) / (1 - gamma)  # a linear solve of values of the size of Q
    assert (gap_curve(mdp, solution, log_pi, mu) <= bound + tol).all()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(**CASES, faster=st.sampled_from([1.0, 1.5]))
def test_measured_curve_is_under_the_geometric_bound(seed, S, A, gamma, eta, informed, faster):
    gamma = max(gamma, 0.3)  # steps grow by 1/gamma
    rng = np.random.default_rng(seed)
    mdp = random_mdps(4, S, A, gamma=gamma, rng=rng)
    solution = solve(mdp)
    begin = start_for(rng, mdp, informed)
    log_pi, Q = q_td_pmd(mdp, eta=lambda k: eta * (faster / gamma) ** k, rounds=15, **begin)
    bound = geometric_bound(mdp, solution, eta_0=eta, rounds=15, **begin)
    gap = gap_curve(mdp, solution, log_pi, stationary_law(mdp, solution.pi_star))
    tol = 1e-12 * (1 + Q.abs().amax()) / (1 - gamma)
    assert (gap <= bound + tol).all() and (bound[0] == math.inf).all()


def test_constants_by_hand():
    # One state, r = (1, 0): d = nu = 1, pi* = first action, V* = 1/(1-gamma) = 2; Q_0 = 0 and pi_0 uniform.
    mdp = MDP(torch.ones(1, 2, 1), torch.tensor([[1.0, 0.0]]), 0.5)
    bound = sublinear_bound(mdp, solve(mdp), eta=2.0, rounds=2)
    assert bound.tolist() == pytest.approx([math.inf, (math.log(2) / 2 + 2) / 0.5, (math.log(2) / 2 + 2) / 0.5 / 2])
    bound = geometric_bound(mdp, solve(mdp), eta_0=2.0, rounds=3)
    assert bound.tolist() == pytest.approx([math.inf, *((2 + math.log(2) / 2) * 0.5**k for k in range(3))])
    # r = (-1, -2): now the start lies above its own backup and must be shifted down.
    mdp = MDP(torch.ones(1, 2, 1), torch.tensor([[-1.0, -2.0]]), 0.5)
    bound = sublinear_bound(mdp, solve(mdp), eta=2.0, rounds=1)  # V* = -2, c = 1.5 / .5
    assert bound[1].item() == pytest.approx((math.log(2) / 2 - 2 + 3) / 0.5)
    bound = geometric_bound(mdp, solve(mdp), eta_0=2.0, rounds=1)  # c = 2 / .5
    assert bound[1].item() == pytest.approx(-2 + 4 + math.log(2) / 2)


def test_the_shift_is_needed():
    # Without c the sublinear bound is false for a start far above Q*: at k = 1 its right side would be negative.
    mdp = ring_mdp(5, 3, gamma=0.9)
    solution = solve(mdp)
    Q = torch.full_like(mdp.R, 1000.0)
    bound = sublinear_bound(mdp, solution, eta=1.0, rounds=1, Q=Q)
    shift = 1000 - (0.9 * 1000 + mdp.R.mean(-1).min())
    without = bound[1] - shift / 0.1 / 0.1
    log_pi, _ = q_td_pmd(mdp, eta=1.0, rounds=1, Q=Q)
    gap = gap_curve(mdp, solution, log_pi, torch.full((5,), 0.2).double())[1]
    assert without < 0 < gap <= bound[1]


def test_batches_of_steps_and_single_mdps():
    mdp = random_mdps(3, 4, 2, gamma=0.8, rng=np.random.default_rng(0))
    solution = solve(mdp)
    eta = torch.tensor([0.1, 1.0, 4.0], dtype=torch.float64)
    for curve in (
        lambda m, e: sublinear_bound(m, solve(m), eta=e, rounds=4),
        lambda m, e: geometric_bound(m, solve(m), eta_0=e, rounds=4),
    ):
        whole = curve(mdp, eta)
        for i in range(3):
            torch.testing.assert_close(whole[1:, i], curve(mdp[i], eta[i].item())[1:], rtol=1e-12, atol=0)
    assert solution.V_star.shape == (3, 4)
