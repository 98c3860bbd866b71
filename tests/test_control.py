"""The closed loop: it is Q-TD-PMD with exact parts, records what it says, and refuses broken parts by round and index."""

import math

import numpy as np
import pytest
import torch

from pa_core import bounds
from pa_core.control import certify, closed_loop, corrupted_critic, exact_actor, exact_critic, noisy_actor, noisy_critic
from pa_core.families import dirichlet_log_policies, random_mdps
from pa_core.mdp import backup, evaluate, solve
from pa_core.pmd import mix_floor, pmd_step, q_td_pmd


@pytest.fixture
def mdp():
    return random_mdps(5, 4, 3, gamma=0.9, rng=np.random.default_rng(0))


@pytest.mark.parametrize("floor", [0.0, 1e-3])
def test_exact_parts_give_q_td_pmd_and_zero_residuals(mdp, floor):
    rng = np.random.default_rng(1)
    start = dict(log_pi=dirichlet_log_policies(5, 4, 3, rng), Q=torch.from_numpy(rng.standard_normal((5, 4, 3))))
    run = closed_loop(mdp, exact_actor, exact_critic, rounds=12, eta=0.8, floor=floor, **start)
    log_pi, Q = q_td_pmd(mdp, eta=0.8, rounds=12, floor=floor, **start)
    assert torch.equal(run.log_pi, log_pi) and torch.equal(run.Q, Q)  # the same operations in the same order
    assert (run.delta == 0).all()
    if floor:
        assert ((0 < run.zeta) & (run.zeta <= bounds.floor_distance_bound(floor, 3) + 1e-15)).all()  # zeta holds the floor
    else:
        assert (run.zeta == 0).all()


def test_shapes_and_every_recorded_quantity(mdp):
    rng = np.random.default_rng(2)
    schedule = lambda k: torch.linspace(0.1, 1.0, 5, dtype=torch.float64) * (k + 1)
    run = closed_loop(
        mdp, noisy_actor(0.2, rng), noisy_critic(0.2), rounds=6, eta=schedule, floor=0.01, rng=np.random.default_rng(3)
    )
    assert run.log_pi.shape == run.Q.shape == (7, 5, 4, 3)
    assert run.E.shape == (7, 5) and run.zeta.shape == run.delta.shape == run.gbar.shape == run.gmax.shape == (6, 5)
    Q_star = solve(mdp).Q_star
    assert torch.equal(run.E, (Q_star - run.Q).abs().amax((-2, -1)))
    for k in range(6):  # recomputed from the history alone, in other words than the loop's
        q = torch.softmax(run.log_pi[k] + schedule(k)[:, None, None] * run.Q[k], -1)
        p = run.log_pi[k + 1].exp()
        close = dict(rtol=0, atol=1e-13)
        torch.testing.assert_close(run.zeta[k], (p - q).abs().sum(-1).max(-1).values, **close)
        error = run.Q[k + 1] - (mdp.R + 0.9 * torch.einsum("nsap,npb,npb->nsa", mdp.P, p, run.Q[k]))
        torch.testing.assert_close(run.delta[k], error.abs().amax((-2, -1)), **close)
        gap = run.Q[k].max(-1).values - (p * run.Q[k]).sum(-1)
        torch.testing.assert_close(run.gmax[k], gap.max(-1).values, **close)
        torch.testing.assert_close(run.gbar[k], torch.einsum("nsap,np->nsa", mdp.P, gap).amax((-2, -1)), **close)
    assert run.log_pi[1:].exp().min() >= 0.01 / 3 - 1e-15


def test_policy_first_then_the_critic_sees_the_floored_policy(mdp):
    seen = []

    def actor(log_pi, Q, eta):
        seen.append(("actor", log_pi, Q))
        return pmd_step(log_pi, Q, eta)

    def critic(mdp, log_pi_next, Q, rng):
        seen.append(("critic", log_pi_next, Q))
        return backup(mdp, log_pi_next.exp(), Q)

    run = closed_loop(mdp, actor, critic, rounds=2, eta=1.0, floor=0.1)
    assert [name for name, *_ in seen] == ["actor", "critic"] * 2
    for k in range(2):
        (_, log_pi, Q), (_, log_pi_next, Q_again) = seen[2 * k], seen[2 * k + 1]
        assert torch.equal(log_pi, run.log_pi[k]) and torch.equal(Q, run.Q[k]) and torch.equal(Q_again, run.Q[k])
        assert torch.equal(log_pi_next, mix_floor(pmd_step(log_pi, Q, 1.0), 0.1))


def test_the_last_critic_call_changes_nothing_and_the_one_before_does(mdp):
    T = 6
    clean = closed_loop(mdp, exact_actor, exact_critic, rounds=T, eta=0.8)
    last = closed_loop(mdp, exact_actor, corrupted_critic(50.0, call=T - 1), rounds=T, eta=0.8)
    before = closed_loop(mdp, exact_actor, corrupted_critic(50.0, call=T - 2), rounds=T, eta=0.8)
    error = lambda run: bounds.error_recursion(run.E[0], run.delta, run.gbar, 0.9)[T - 1]
    bound = lambda run: bounds.returned_policy_bound(error(run), run.gmax[T - 1], 0.9)
    assert (last.delta[T - 1] == 50).all()
    assert torch.equal(last.log_pi[-1], clean.log_pi[-1]) and torch.equal(bound(last), bound(clean))
    assert (before.delta[T - 2] == 50).all()
    torch.testing.assert_close(error(before), error(clean) + 50, rtol=0, atol=1e-12)  # weight 1, then 2/(1-gamma) in (c)
    assert (evaluate(mdp, before.log_pi[-1].exp()) - evaluate(mdp, clean.log_pi[-1].exp())).abs().max() > 0.1


def test_same_generator_same_loop_and_the_global_one_is_untouched(mdp):
    go = lambda seed: closed_loop(mdp, exact_actor, noisy_critic(0.2), rounds=4, eta=0.8, rng=np.random.default_rng(seed))
    np.random.seed(0)
    torch.manual_seed(0)
    first = go(1).Q
    before = np.random.get_state()[1].copy(), torch.get_rng_state()
    np.random.seed(99)
    torch.manual_seed(99)
    assert torch.equal(go(1).Q, first) and not torch.equal(go(2).Q, first)
    np.random.seed(0)
    torch.manual_seed(0)
    assert (np.random.get_state()[1] == before[0]).all() and torch.equal(torch.get_rng_state(), before[1])


def test_one_mdp_without_a_batch(mdp):
    single = closed_loop(mdp[2], exact_actor, exact_critic, rounds=5, eta=0.8)
    batch = closed_loop(mdp, exact_actor, exact_critic, rounds=5, eta=0.8)
    assert single.E.shape == (6,) and single.gbar.shape == (5,)
    torch.testing.assert_close(single.Q, batch.Q[:, 2], rtol=0, atol=1e-13)
    torch.testing.assert_close(single.gbar, batch.gbar[:, 2], rtol=0, atol=1e-13)


def test_certificate_is_the_theorem_applied_to_the_record(mdp):
    eta = lambda k: torch.linspace(0.1, 1.0, 5, dtype=torch.float64) * (k + 1)
    run = closed_loop(mdp, noisy_actor(0.2, np.random.default_rng(4)), exact_critic, rounds=6, eta=eta)
    c = certify(mdp, run, eta=eta)
    Q_star, V_star = solve(mdp).Q_star, solve(mdp).V_star
    for k in range(6):  # by the formulas, from the history alone
        Q, p = run.Q[k], run.log_pi[k + 1].exp()
        close = dict(rtol=0, atol=1e-12)
        E = (Q_star - Q).abs().amax((-2, -1))
        torch.testing.assert_close(c.contraction[k], 0.9 * E + run.delta[k] + 0.9 * run.gbar[k], **close)
        price = -(run.log_pi[k].exp() * (Q == Q.amax(-1, keepdim=True))).sum(-1).log()
        lifted = torch.einsum("nsap,np->nsa", mdp.P, price).amax((-2, -1))
        half_span = (Q.amax(-1) - Q.amin(-1)).amax(-1) / 2
        torch.testing.assert_close(c.price[k], lifted / eta(k) + half_span * run.zeta[k], **close)
        torch.testing.assert_close(c.gap[k], (V_star - evaluate(mdp, p)).amax(-1), **close)
        torch.testing.assert_close(c.measured[k], (2 * E + run.gmax[k]) / 0.1, **close)
        past = 0.9**k * run.E[0] + sum(0.9 ** (k - 1 - j) * (run.delta[j] + 0.9 * run.gbar[j]) for j in range(k))
        torch.testing.assert_close(c.unrolled[k], (2 * past + run.gmax[k]) / 0.1, **close)


def test_a_given_solution_is_used(mdp):
    solution = solve(mdp)
    run = closed_loop(mdp, exact_actor, exact_critic, rounds=1, eta=0.8, solution=solution)
    assert torch.equal(run.E[0], solution.Q_star.abs().amax((-2, -1)))


def spoiled(value, at, rounds):
    """An actor or critic output that is right until the given round."""

    def spoil(x, k):
        if k == rounds:
            x = x.clone()
            x[at] = value
        return x

    return spoil


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("actor", math.nan, r"the actor's log_pi of round 1 must be finite \(full support\), got nan at index \(2, 3, 1\)"),
        ("actor", -math.inf, r"the actor's log_pi of round 1 .* got -inf at index \(2, 3, 1\)"),
        ("actor", 5.0, r"the actor's log_pi of round 1 is not normalised: .* at index \(2, 3\)"),
        ("critic", math.nan, r"the critic's Q of round 1 is nan at index \(2, 3, 1\)"),
        ("critic", math.inf, r"the critic's Q of round 1 is inf at index \(2, 3, 1\)"),
    ],
)
def test_broken_parts_are_refused_with_round_and_index(mdp, part, value, message):
    count = iter(range(100))
    spoil = spoiled(value, (2, 3, 1), rounds=1)
    actor, critic = exact_actor, exact_critic
    if part == "actor":
        actor = lambda log_pi, Q, eta: spoil(pmd_step(log_pi, Q, eta), next(count))
    else:
        critic = lambda mdp, log_pi, Q, rng: spoil(backup(mdp, log_pi.exp(), Q), next(count))
    with pytest.raises(ValueError, match=message):
        closed_loop(mdp, actor, critic, rounds=3, eta=1.0)


def test_wrong_shapes_and_arguments_are_refused(mdp):
    go = lambda **change: closed_loop(
        mdp, **({"actor": exact_actor, "critic": exact_critic, "rounds": 2, "eta": 1.0} | change)
    )
    with pytest.raises(ValueError, match=r"the actor's log_pi of round 0 has shape \(4, 3\), not \(5, 4, 3\)"):
        go(actor=lambda log_pi, Q, eta: log_pi[0])
    with pytest.raises(ValueError, match=r"the critic's Q of round 0 has shape \(5, 4, 1\), not \(5, 4, 3\)"):
        go(critic=lambda mdp, log_pi, Q, rng: Q[..., :1])
    with pytest.raises(ValueError, match="rounds must be >= 1, got 0"):
        go(rounds=0)
    with pytest.raises(ValueError, match="floor must satisfy"):
        go(floor=1.0)
    with pytest.raises(ValueError, match="eta must be positive"):
        go(eta=-1.0)
    with pytest.raises(ValueError, match=r"log_pi must have shape \(5, 4, 3\), got \(4, 3\)"):
        go(log_pi=torch.zeros(4, 3))
    with pytest.raises(ValueError, match=r"Q must be finite, got nan at index \(0, 0, 0\)"):
        go(Q=torch.full((5, 4, 3), math.nan))
