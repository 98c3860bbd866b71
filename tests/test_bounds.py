"""The returned-policy theorem, parts (a)-(d), as properties of random, adversarial, frozen and exact rounds."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pa_core.bounds import (
    actor_residual,
    critic_range_bound,
    critic_residual,
    error_recursion,
    floor_distance_bound,
    floored_bound,
    floored_step_size,
    greedy_gap,
    greedy_gap_bound,
    prior_mass_price,
    returned_policy_bound,
    span,
    transition_lift,
)
from pa_core.control import (
    closed_loop,
    contrary_actor,
    contrary_critic,
    exact_actor,
    exact_critic,
    frozen_actor,
    noisy_actor,
    noisy_critic,
)
from pa_core.families import random_mdps
from pa_core.mdp import MDP, backup, evaluate, optimal_backup, solve
from pa_core.pmd import mix_floor, pmd_step, uniform_log_policy

N = 3  # MDPs in a batch


# ---- what hypothesis draws ----


def make_mdp(rng, S, A, gamma, concentration, quantised):
    mdp = random_mdps(N, S, A, gamma=gamma, concentration=concentration, rng=rng)
    return MDP(mdp.P, mdp.R.round(), gamma) if quantised else mdp  # rewards in {-1, 0, 1}: exact ties


def make_policy(rng, S, A, kind):
    if kind == "uniform":
        return torch.full((N, S, A), -math.log(A), dtype=torch.float64)
    sd = {"random": 1.0, "peaked": 30.0, "underflowing": 800.0}[kind]
    return torch.log_softmax(torch.from_numpy(sd * rng.standard_normal((N, S, A))), -1)


def make_q(rng, mdp, kind):
    if kind == "zero":
        return torch.zeros_like(mdp.R)
    scale = {"inside": 1.0, "ties": 1.0, "outside": 300.0}[kind]
    Q = torch.from_numpy(rng.uniform(-1, 1, size=mdp.R.shape)) * scale * mdp.value_bound[:, None, None]
    return Q.round() if kind == "ties" else Q


def make_actor(rng, kind):
    return {
        "exact": exact_actor,
        "frozen": frozen_actor,
        "noisy": noisy_actor(0.3, rng),
        "random": lambda log_pi, Q, eta: torch.log_softmax(torch.from_numpy(3 * rng.standard_normal(Q.shape)), -1),
        "adversarial": contrary_actor,
    }[kind]


def make_critic(kind, Q_star):
    return {
        "exact": exact_critic,
        "frozen": lambda mdp, log_pi, Q, _: Q,
        "noisy": noisy_critic(0.3),
        "adversarial": contrary_critic(0.5, Q_star),
        "misleading": lambda mdp, log_pi, Q, _: -backup(mdp, log_pi.exp(), Q),
    }[kind]


ACTORS = st.sampled_from(["exact", "frozen", "noisy", "random", "adversarial"])
CRITICS = st.sampled_from(["exact", "frozen", "noisy", "adversarial", "misleading"])
CASES = dict(
    seed=st.integers(0, 2**32 - 1),
    S=st.integers(1, 6),
    A=st.integers(1, 5),
    gamma=st.one_of(st.sampled_from([0.0, 0.5, 0.9, 0.99, 0.999]), st.floats(0, 0.999)),
    concentration=st.sampled_from([0.02, 1.0]),  # .02: many transition probabilities are exactly or nearly 0
    quantised=st.booleans(),
    policy=st.sampled_from(["uniform", "random", "peaked", "underflowing"]),
    values=st.sampled_from(["zero", "inside", "ties", "outside"]),
    eta=st.floats(-6, 6).map(math.exp),
    floor=st.sampled_from([0.0, 1e-30, 0.01]),
)


def slack(mdp, Q):
    """1e-12 (1 + B + max |Q_k|): a few thousand float64 roundings of the largest quantity in the inequality."""
    return 1e-12 * (1 + mdp.value_bound + Q.abs().amax((-2, -1)))


# ---- one round from any context: (a) and (b) ----


@settings(max_examples=250, deadline=None, derandomize=True)
@given(actor=ACTORS, critic=CRITICS, **CASES)
def test_one_round_contracts_and_pays_the_price(
    actor, critic, seed, S, A, gamma, concentration, quantised, policy, values, eta, floor
):
    rng = np.random.default_rng(seed)
    mdp = make_mdp(rng, S, A, gamma, concentration, quantised)
    log_pi, Q = make_policy(rng, S, A, policy), make_q(rng, mdp, values)
    Q_star = solve(mdp).Q_star
    log_pi_next = mix_floor(make_actor(rng, actor)(log_pi, Q, eta), floor)
    Q_next = make_critic(critic, Q_star)(mdp, log_pi_next, Q, rng)
    zeta, delta = actor_residual(log_pi, Q, eta, log_pi_next), critic_residual(mdp, log_pi_next, Q, Q_next)
    gap, price = greedy_gap(log_pi_next, Q), prior_mass_price(log_pi, Q)
    gbar, E, E_next = transition_lift(mdp, gap), (Q_star - Q).abs().amax((-2, -1)), (Q_star - Q_next).abs().amax((-2, -1))
    tol = slack(mdp, Q)

    assert ((0 <= zeta) & (zeta <= 2 + 1e-15) & (gbar >= 0)).all()
    # (a), and the two steps of its proof.
    assert (E_next <= gamma * E + delta + gamma * gbar + tol).all()
    optimal, actual = optimal_backup(mdp, Q), backup(mdp, log_pi_next.exp(), Q)
    assert ((optimal - Q_star).abs().amax((-2, -1)) <= gamma * E + tol).all()
    assert ((optimal - actual).abs().amax((-2, -1)) <= gamma * gbar + tol).all()
    # (b), lifted and per state.
    assert (gbar <= greedy_gap_bound(transition_lift(mdp, price), eta, span(Q), zeta) + tol).all()
    assert (gap.amax(-1) <= greedy_gap_bound(price.amax(-1), eta, span(Q), zeta) + tol).all()
    assert (gbar <= gap.amax(-1) + tol).all()
    # The paper's form with B needs |Q| <= B.
    if values != "outside" and (Q.abs().amax((-2, -1)) <= mdp.value_bound).all():
        lifted = transition_lift(mdp, price)
        assert (gbar <= lifted / eta + mdp.value_bound * zeta + tol).all()
        assert (span(Q) / 2 <= mdp.value_bound).all()


# ---- closed loops: (a)-(c) along trajectories, from ranges to the returned policy ----


@settings(max_examples=120, deadline=None, derandomize=True)
@given(actor=ACTORS, critic=CRITICS, rounds=st.integers(1, 8), **CASES)
def test_every_returned_policy_is_within_its_bound(
    actor, critic, rounds, seed, S, A, gamma, concentration, quantised, policy, values, eta, floor
):
    rng = np.random.default_rng(seed)
    mdp = make_mdp(rng, S, A, gamma, concentration, quantised)
    solution = solve(mdp)
    start = make_q(rng, mdp, values)
    run = closed_loop(
        mdp,
        make_actor(rng, actor),
        make_critic(critic, solution.Q_star),
        rounds=rounds,
        eta=eta,
        log_pi=make_policy(rng, S, A, policy),
        Q=start,
        floor=floor,
        rng=rng,
    )
    loss = (solution.V_star - evaluate(mdp, run.log_pi.exp())).abs().amax(-1)  # [rounds + 1, N]
    recursion = error_recursion(run.E[0], run.delta, run.gbar, gamma)
    # Errors of each round are discounted and added: 1/(1-gamma) times one round's rounding, once more for the policy.
    tol = slack(mdp, run.Q.abs().amax(0)) / (1 - gamma)
    assert (run.E <= recursion + tol).all()
    for T in range(1, rounds + 1):
        assert (loss[T] <= returned_policy_bound(run.E[T - 1], run.gmax[T - 1], gamma) + tol).all()
        assert (loss[T] <= returned_policy_bound(recursion[T - 1], run.gmax[T - 1], gamma) + tol / (1 - gamma)).all()
    if values != "outside":
        inside = start.abs().amax((-2, -1)).clamp(min=0) <= mdp.value_bound
        limit = critic_range_bound(mdp.value_bound, run.delta.amax(0), gamma)
        assert (run.Q.abs().amax((-2, -1)).amax(0)[inside] <= (limit + tol)[inside]).all()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    actor=st.sampled_from(["exact", "noisy", "frozen", "adversarial"]),
    noise=st.sampled_from([0.0, 0.1, 5.0]),
    rounds=st.integers(1, 8),
    floor=st.sampled_from([1e-12, 1e-6, 0.01, 0.3]),
    theta=st.floats(0.01, 2.0),
    **{k: CASES[k] for k in ("seed", "S", "A", "gamma", "concentration", "quantised")},
)
def test_floored_loop_is_within_its_bound(actor, noise, rounds, floor, theta, seed, S, A, gamma, concentration, quantised):
    rng = np.random.default_rng(seed)
    mdp = make_mdp(rng, S, A, gamma, concentration, quantised)
    B = mdp.value_bound

    def critic(mdp, log_pi, Q, _):  # noisy, then put back into [-B, B]
        Q = backup(mdp, log_pi.exp(), Q) + torch.from_numpy(noise * rng.uniform(-1, 1, Q.shape))
        return Q.clamp(-B[:, None, None], B[:, None, None])

    eta = floored_step_size(floor, A, theta)
    run = closed_loop(mdp, make_actor(rng, actor), critic, rounds=rounds, eta=eta, floor=floor)
    solution = solve(mdp)
    tol = slack(mdp, run.Q.abs().amax(0)) / (1 - gamma)
    price = torch.stack([transition_lift(mdp, prior_mass_price(run.log_pi[k], run.Q[k])) for k in range(rounds)])
    assert (price <= math.log(A / floor) + 1e-12).all()
    zeta, delta = run.zeta.amax(0), run.delta.amax(0)
    assert (run.gbar <= theta + B * zeta + tol).all()
    for T in range(1, rounds + 1):
        loss = (solution.V_star - evaluate(mdp, run.log_pi[T].exp())).amax(-1)
        bound = floored_bound(run.E[0], rounds=T, gamma=gamma, theta=theta, zeta=zeta, delta=delta, value_bound=B)
        assert (loss <= bound + tol / (1 - gamma)).all()


# ---- the constants are the right ones ----


def test_contraction_is_attained():
    # One state, one action: Q* = 2, Q = 5, so F Q = 1 + .5 * 5 = 3.5; a critic 1 too high lands at 4.5.
    mdp = MDP(torch.ones(1, 1, 1), torch.ones(1, 1), 0.5)
    Q, one = torch.tensor([[5.0]]).double(), torch.zeros(1, 1).double()
    delta = critic_residual(mdp, one, Q, torch.tensor([[4.5]]).double())
    assert delta.item() == 1.0
    assert (4.5 - 2) == 0.5 * 3 + delta.item()  # E_{k+1} = gamma E_k + delta_k


def test_lifted_gap_enters_with_gamma():
    # From below Q* nothing is lost by a wrong policy but the gap: Q = (1, 0), Q* = 2 and 1 (gamma .5, r = (1, 0)).
    mdp = MDP(torch.ones(1, 2, 1), torch.tensor([[1.0, 0.0]]), 0.5)
    Q = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    worst = torch.tensor([[-800.0, 0.0]], dtype=torch.float64)
    gap = transition_lift(mdp, greedy_gap(worst, Q)).item()
    Q_next = backup(mdp, worst.exp(), Q)
    assert gap == 1.0
    assert (solve(mdp).Q_star - Q_next).abs().max().item() == 0.5 * 1 + 0.5 * gap  # E_0 = 1, attained


def test_price_over_eta_is_the_right_order():
    # One better action with prior mass m: below eta = log(1/m) hardly anything moves, so the gap stays near 1 < price / eta.
    log_pi = torch.tensor([[math.log(1e-200), 0.0]], dtype=torch.float64)
    Q = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    price = prior_mass_price(log_pi, Q)[0].item()
    assert price == pytest.approx(200 * math.log(10), rel=1e-13)
    gap = greedy_gap(pmd_step(log_pi, Q, 0.99 * price), Q)[0].item()
    bound = greedy_gap_bound(price, 0.99 * price, span(Q), torch.zeros(())).item()
    assert 0.98 * bound < gap <= bound


def test_half_the_span_times_the_distance_is_attained():
    Q = torch.tensor([[3.0, 1.0, -5.0]], dtype=torch.float64)
    log_pi = torch.log_softmax(torch.tensor([[900.0, 0.0, 0.0]], dtype=torch.float64), -1)  # PMD puts all mass on action 0
    log_next = torch.tensor([[0.75, 1e-300, 0.25]], dtype=torch.float64).log()
    zeta = actor_residual(log_pi, Q, 1.0, log_next)
    assert zeta.item() == pytest.approx(0.5, rel=1e-14)
    assert span(Q).item() == 8.0
    assert greedy_gap(log_next, Q).item() == pytest.approx(8.0 / 2 * 0.5, rel=1e-14)


def test_returned_policy_bound_is_attained_at_gamma_zero():
    # gamma = 0: V* - V^pi is the regret in R; Q = R - e on the best action and R + e on the other makes both terms count.
    mdp = MDP(torch.ones(1, 2, 1), torch.tensor([[1.0, 0.0]]), 0.0)
    Q = torch.tensor([[0.4, 0.6]], dtype=torch.float64)
    log_pi = torch.tensor([[-800.0, 0.0]], dtype=torch.float64)
    E = (mdp.R - Q).abs().amax((-2, -1))
    loss = (solve(mdp).V_star - evaluate(mdp, log_pi.exp())).max().item()
    bound = returned_policy_bound(E, greedy_gap(log_pi, Q).amax(-1), 0.0).item()
    assert loss == 1.0 and bound == pytest.approx(1.2, rel=1e-15)  # 2 E + gap = 2 * .6 + 0
    Q = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    assert returned_policy_bound((mdp.R - Q).abs().max(), greedy_gap(log_pi, Q).max(), 0.0).item() == loss  # attained


# ---- formulas by hand ----


def test_residuals_by_hand():
    log_pi = torch.tensor([[0.5, 0.5], [0.5, 0.5]], dtype=torch.float64).log()
    Q = torch.tensor([[math.log(3), 0.0], [0.0, 0.0]], dtype=torch.float64)
    frozen = actor_residual(log_pi, Q, 1.0, log_pi)
    assert frozen.item() == pytest.approx(0.5, rel=1e-14)  # (3/4, 1/4) against (1/2, 1/2) in state 0, nothing in state 1
    assert actor_residual(log_pi, Q, 1.0, pmd_step(log_pi, Q, 1.0)).item() == 0.0
    assert greedy_gap(log_pi, Q).tolist() == pytest.approx([math.log(3) / 2, 0.0])


def test_price_by_hand():
    log_pi = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
    price = lambda *q: prior_mass_price(log_pi, torch.tensor([q], dtype=torch.float64)).item()
    assert price(0.0, 1.0, 0.0) == pytest.approx(math.log(4))
    assert price(0.0, 1.0, 1.0) == pytest.approx(math.log(2))
    assert price(0.0, 1.0, 1.0 - 1e-15) == pytest.approx(math.log(4))  # exact equality, not closeness, is the greedy set
    assert price(1.0, 1.0, 1.0) == 0.0  # never -1e-16
    assert prior_mass_price(torch.tensor([[0.0, -math.inf]]), torch.tensor([[0.0, 1.0]])).item() == math.inf


def test_lift_by_hand_and_with_infinite_prices():
    P = torch.tensor([[[0.5, 0.5, 0.0]], [[0.0, 1.0, 0.0]], [[0.25, 0.75, 0.0]]], dtype=torch.float64)
    mdp = MDP(P, torch.zeros(3, 1), 0.9)
    x = torch.tensor([4.0, 1.0, math.inf], dtype=torch.float64)
    assert transition_lift(mdp, x).item() == 2.5  # 0 * inf is not NaN: nobody goes to state 2
    assert transition_lift(mdp, torch.tensor([math.inf, 0.0, 0.0]).double()).item() == math.inf
    batch = mdp.expand(2)
    assert transition_lift(batch, torch.tensor([[4.0, 1.0, 0.0], [0.0, 1.0, 9.0]]).double()).tolist() == [2.5, 1.0]


def test_recursion_equals_its_closed_form():
    rng = np.random.default_rng(0)
    gamma, T = 0.7, 9
    E0, delta, gbar = (torch.from_numpy(rng.uniform(size=size)) for size in ((2,), (T, 2), (T, 2)))
    E = error_recursion(E0, delta, gbar, gamma)
    assert E.shape == (T + 1, 2)
    for k in range(T + 1):
        closed = gamma**k * E0 + sum(gamma ** (k - 1 - j) * (delta[j] + gamma * gbar[j]) for j in range(k))
        torch.testing.assert_close(E[k], closed, rtol=1e-14, atol=0)
    assert error_recursion(1.0, delta, gbar, gamma).shape == (T + 1, 2)
    with pytest.raises(ValueError, match="one shape"):
        error_recursion(E0, delta, gbar[1:], gamma)


def test_floored_bound_is_the_sum_of_its_parts():
    # Unroll (a), bound gbar and gmax by theta + B zeta, put both into (c): the geometric sum is at most its limit.
    gamma, theta, zeta, delta, B, T = 0.6, 0.1, 0.05, 0.2, 3.0, 60
    gbar = torch.full((T - 1,), theta + B * zeta, dtype=torch.float64)
    E = error_recursion(2.0, torch.full_like(gbar, delta), gbar, gamma)[-1]
    unrolled = returned_policy_bound(E, theta + B * zeta, gamma).item()
    bound = floored_bound(2.0, rounds=T, gamma=gamma, theta=theta, zeta=zeta, delta=delta, value_bound=B)
    assert bound == pytest.approx(unrolled, rel=1e-11)  # gamma^59 = 8e-14 is what the finite sum lacks
    short = floored_bound(2.0, rounds=1, gamma=gamma, theta=0.0, zeta=0.0, delta=0.0, value_bound=B)
    assert short == 2 * 2.0 / (1 - gamma)
    with pytest.raises(ValueError, match="rounds must be >= 1"):
        floored_bound(2.0, rounds=0, gamma=gamma, theta=theta, zeta=zeta, delta=delta, value_bound=B)


def test_floor_formulas():
    assert floor_distance_bound(0.3, 3) == pytest.approx(0.4)
    log_pi = torch.tensor([[0.0, -math.inf, -math.inf]], dtype=torch.float64)
    assert (mix_floor(log_pi, 0.3).exp() - log_pi.exp()).abs().sum().item() == pytest.approx(0.4)  # attained at a vertex
    assert floored_step_size(0.01, 3, 0.5) == pytest.approx(2 * math.log(300))
    for bad in ((0.0, 0.5), (1.0, 0.5), (0.01, 0.0), (0.01, math.nan)):
        with pytest.raises(ValueError, match="0 < floor < 1 and theta > 0"):
            floored_step_size(bad[0], 3, bad[1])


# ---- what is false ----


def test_the_form_with_b_is_false_outside_the_range():
    mdp = MDP(torch.ones(1, 2, 1), torch.tensor([[1.0, -1.0]]), 0.5)  # B = 2
    log_pi = uniform_log_policy(mdp)
    Q = torch.tensor([[100.0, -100.0]], dtype=torch.float64)
    zeta = actor_residual(log_pi, Q, 1.0, log_pi)  # frozen: PMD would put all mass on action 0
    gap = transition_lift(mdp, greedy_gap(log_pi, Q)).item()
    price = transition_lift(mdp, prior_mass_price(log_pi, Q)).item()
    assert gap == pytest.approx(100)
    assert gap > 30 * (price / 1.0 + mdp.value_bound.item() * zeta.item())  # log 2 + 2: the form with B
    assert gap <= greedy_gap_bound(price, 1.0, span(Q), zeta).item()  # log 2 + 100: the form with the span


# ---- the lock-up counterexample ----


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.9])
@pytest.mark.parametrize(("mass", "eta"), [(1e-3, 1.0), (1e-6, 5.0), (1e-8, 10.0)])
def test_a_small_residual_can_hide_a_locked_actor(gamma, mass, eta):
    mdp = MDP(torch.ones(1, 2, 1), torch.tensor([[1.0, 0.0]]), gamma)
    start = torch.tensor([[mass, 1 - mass]], dtype=torch.float64).log()
    options = dict(rounds=40, eta=eta, log_pi=start, Q=torch.tensor([[1.0, 0.0]]))
    locked = closed_loop(mdp, frozen_actor, exact_critic, **options)
    assert (locked.zeta <= 2 * mass * math.expm1(eta) * (1 + 1e-9)).all()  # the actor's residual, round after round
    loss = (1 - gamma) * (solve(mdp).V_star - evaluate(mdp, locked.log_pi[-1].exp()))
    assert loss.item() == pytest.approx(1 - mass, rel=1e-12)
    exact = closed_loop(mdp, exact_actor, exact_critic, **options)
    assert exact.log_pi[-1].exp()[0, 0] > 1 - 1e-6  # eta 40 rounds against log(1/mass)
    gap = locked.Q[:, 0, 0] - locked.Q[:, 0, 1]
    assert (gap - 1).abs().max() < 1e-12  # the critic tells the truth about the two actions all the time


def test_a_floor_at_a_fixed_step_lets_a_frozen_actor_drift_to_one_half():
    mdp = MDP(torch.ones(1, 2, 1), torch.tensor([[1.0, 0.0]]), 0.5)
    phi, mass = 0.1, 1e-6
    start = torch.tensor([[mass, 1 - mass]], dtype=torch.float64).log()
    run = closed_loop(mdp, frozen_actor, exact_critic, rounds=200, eta=0.01, log_pi=start, floor=phi)
    k = torch.arange(201, dtype=torch.float64)
    torch.testing.assert_close(run.log_pi.exp()[:, 0, 0], 0.5 + (1 - phi) ** k * (mass - 0.5), rtol=0, atol=1e-13)


@pytest.mark.parametrize(("phi", "theta"), [(0.01, 0.25), (1e-3, 0.1), (1e-6, 0.3)])
def test_floor_and_step_size_together_unmask_a_locked_actor(phi, theta):
    eta = floored_step_size(phi, 2, theta)
    Q = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    prior = torch.tensor([[phi / 2, 1 - phi / 2]], dtype=torch.float64).log()
    locked = mix_floor(torch.tensor([[-800.0, 0.0]], dtype=torch.float64), phi)
    zeta = actor_residual(prior, Q, eta, locked).item()
    assert zeta >= 2 * (1 - phi / 2 - theta)
    moved = mix_floor(pmd_step(prior, Q, eta), phi).exp()[0, 0].item()
    assert moved >= 1 - phi / 2 - (phi / 2) ** (1 / theta - 1) - 1e-15  # (phi/2)^9 is below the rounding of 1 - phi/2
