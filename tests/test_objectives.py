"""Objectives and effective coordinates: each formula against automatic differentiation or a direct computation."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pa_core.coordinates import (
    LogitModel,
    decay_rate,
    descent_factor,
    effective_model,
    flow_rate,
    gradient_descent,
    gradient_flow,
    realizable_model,
)
from pa_core.families import dirichlet_log_policies
from pa_core.objectives import centred, effective_coordinates, fisher, label_loss, prox_loss, reward_loss
from pa_core.pmd import kl, pmd_step
from pa_core.seeding import rng_for

seeds = st.integers(0, 2**32 - 1)


def normal(rng, *shape, scale=1.0):
    return torch.from_numpy(rng.normal(0, scale, size=shape))


def random_context(rng, n=64, n_states=4, n_actions=3):
    log_pi = dirichlet_log_policies(n, n_states, n_actions, rng)
    return log_pi, normal(rng, n, n_states, n_actions), torch.from_numpy(rng.uniform(0.2, 1.4, size=n))


def random_model(rng, n=200, n_actions=4, d=3, scale=1.0):
    theta_star = normal(rng, d)
    log_pi = dirichlet_log_policies(1, n, n_actions, rng)[0]
    return realizable_model(normal(rng, n, n_actions, d, scale=scale), theta_star, log_pi), theta_star


@settings(max_examples=50, deadline=None)
@given(seeds, st.integers(2, 8), st.floats(1e-3, 20))
def test_prox_loss_exceeds_its_minimum_by_the_divergence(seed, n_actions, eta):
    rng = np.random.default_rng(seed)
    log_pi, Q, _ = random_context(rng, 16, 3, n_actions)
    logits = normal(rng, *Q.shape, scale=3)
    log_q = pmd_step(log_pi, Q, eta)
    excess = prox_loss(logits, log_pi, Q, eta) - prox_loss(log_q, log_pi, Q, eta)
    torch.testing.assert_close(excess, kl(logits.softmax(-1), log_q), rtol=0, atol=1e-12 * (1 + 20 * eta))


def test_losses_of_the_other_signals():
    rng = rng_for("tests", "signals")
    log_pi, Q, eta = random_context(rng)
    logits, q = normal(rng, *Q.shape), pmd_step(log_pi, Q, eta).exp()
    entropy = -(q * q.log()).sum(-1)
    torch.testing.assert_close(label_loss(logits, q) - entropy, kl(q, logits.log_softmax(-1)), rtol=0, atol=1e-12)
    best = torch.nn.functional.one_hot(Q.argmax(-1), 3) * 1e3
    torch.testing.assert_close(reward_loss(best, Q), -Q.amax(-1), rtol=0, atol=1e-12)
    assert (reward_loss(logits, Q) > -Q.amax(-1)).all()


@settings(max_examples=50, deadline=None)
@given(seeds, st.integers(2, 8))
def test_fisher_matrix(seed, n_actions):
    """H(q) is the covariance of a one-hot action: blind to constants, between 0 and 1/2."""
    rng = np.random.default_rng(seed)
    q = torch.from_numpy(rng.dirichlet(np.full(n_actions, 0.3), size=20))
    H, x = fisher(q), normal(rng, 20, n_actions)
    assert H.sum(-1).abs().max() < 1e-15 * n_actions
    eigenvalues = torch.linalg.eigvalsh(H)
    assert eigenvalues.min() > -1e-15 * n_actions and eigenvalues.max() <= 0.5 + 1e-15 * n_actions
    variance = (q * (x - (q * x).sum(-1, keepdim=True)).square()).sum(-1)
    torch.testing.assert_close((x[:, None] @ H @ x[..., None])[:, 0, 0], variance, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close((centred(x)[:, None] @ H @ centred(x)[..., None])[:, 0, 0], variance, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("weighted", [False, True])
def test_effective_coordinates_are_recovered(weighted):
    rng = rng_for("tests", "coordinates")
    log_pi, Q, eta = random_context(rng)
    weight = pmd_step(log_pi, Q, eta).exp() if weighted else None
    logits = 0.7 * log_pi + 1.3 * eta[:, None, None] * Q + normal(rng, *Q.shape[:-1], 1, scale=5)  # any gauge
    for given_logits in (logits, logits.log_softmax(-1)):
        found, r_squared = effective_coordinates(given_logits, log_pi, Q, eta, weight=weight)
        torch.testing.assert_close(found, torch.tensor([0.7, 1.3], dtype=torch.float64), rtol=1e-10, atol=0)
        assert r_squared.item() == pytest.approx(1, abs=1e-12)
    _, r_squared = effective_coordinates(logits + normal(rng, *Q.shape), log_pi, Q, eta, weight=weight)
    assert 0 < r_squared < 0.99


def test_weighted_coordinates_minimise_the_fisher_error():
    """Against the normal equations written with H(q) itself, on logits that no coefficients fit."""
    rng = rng_for("tests", "weighted coordinates")
    log_pi, Q, eta = random_context(rng)
    q, logits = pmd_step(log_pi, Q, eta).exp(), normal(rng, *Q.shape)
    found, _ = effective_coordinates(logits, log_pi, Q, eta, weight=q)
    X = torch.stack([log_pi, eta[:, None, None] * Q], -1)
    gram = (X.mT @ fisher(q) @ X).sum((0, 1))
    moment = (X.mT @ fisher(q) @ logits[..., None]).sum((0, 1))
    torch.testing.assert_close(found, torch.linalg.solve(gram, moment)[:, 0], rtol=1e-9, atol=0)


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(2, 6), st.integers(1, 5), st.floats(0.1, 6))
def test_gradient_formula_equals_automatic_differentiation(seed, n_actions, d, distance):
    rng = np.random.default_rng(seed)
    model, theta_star = random_model(rng, 50, n_actions, d)
    theta = theta_star + distance * normal(rng, d)
    torch.testing.assert_close(
        model.gradient()(theta), model.population_gradient(theta, theta_star), rtol=1e-9, atol=1e-12
    )


def test_effective_model_is_realizable_at_one_one():
    rng = rng_for("tests", "effective model")
    log_pi, Q, eta = random_context(rng)
    model, one = effective_model(log_pi, Q, eta), torch.ones(2, dtype=torch.float64)
    torch.testing.assert_close(model.policy(one), pmd_step(log_pi, Q, eta).exp().flatten(0, 1), rtol=0, atol=1e-14)
    assert model.gradient()(one).abs().max() < 1e-14
    theta = torch.tensor([-0.5, 2.0], dtype=torch.float64)
    torch.testing.assert_close(model.gradient()(theta), model.population_gradient(theta, one), rtol=1e-9, atol=0)
    direct = prox_loss((model.Phi @ theta).view_as(Q), log_pi, Q, eta).mean()
    torch.testing.assert_close(model.risk(theta), direct, rtol=1e-12, atol=0)


def test_labels_have_the_same_curvature_at_the_optimum():
    model, theta_star = random_model(rng_for("tests", "curvature"))
    for loss in ("prox", "label"):
        hessian = torch.autograd.functional.hessian(lambda theta, loss=loss: model.risk(theta, loss), theta_star)
        torch.testing.assert_close(hessian, model.information(theta_star), rtol=1e-9, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(seeds, st.floats(0.1, 4), st.floats(0.1, 1))
def test_gradient_descent_contracts_up_to_the_certified_rate(seed, distance, share):
    """||theta_{k+1} - theta*|| <= (1 - alpha lambda_min(M(theta_k))) ||theta_k - theta*|| for alpha <= 2 / E||Phi||^2."""
    rng = np.random.default_rng(seed)
    model, theta_star = random_model(rng, 40)
    lr = share * 2 / model.squared_norm
    theta = theta_star + distance * normal(rng, 3)
    assert torch.linalg.eigvalsh(model.information(theta))[-1] <= model.squared_norm / 2 + 1e-12
    path = gradient_descent(model.gradient(), theta, lr, 30)
    error = (path - theta_star).norm(dim=-1)
    factors = torch.tensor([1 - lr * model.slowest_rate(x) for x in path[:-1]], dtype=torch.float64)
    assert (error[1:] <= factors * error[:-1] + 1e-13).all()


def test_flow_and_descent_end_at_the_slowest_rate():
    model, theta_star = random_model(rng_for("tests", "flow"))
    for loss in ("prox", "label"):
        predicted, measured = flow_rate(model, theta_star, theta_star + 1.0, loss)
        # At a distance below 1e-5 the curvature differs from its limit by about as much.
        assert measured == pytest.approx(predicted, rel=1e-4)
    predicted, measured = descent_factor(model, theta_star, 2 / model.squared_norm)
    assert 0 < predicted < 1 and measured == pytest.approx(predicted, rel=1e-4)


def test_flow_is_never_slower_than_the_least_rate_on_its_path():
    model, theta_star = random_model(rng_for("tests", "path"))
    times = np.linspace(0, 5 / model.slowest_rate(theta_star), 51)
    path = gradient_flow(model.gradient(), theta_star + 2.0, times, origin=theta_star)
    error = (path - theta_star).norm(dim=-1).numpy()
    slowest = min(model.slowest_rate(x) for x in path)
    assert slowest < 0.9 * model.slowest_rate(theta_star)  # the start is far
    assert (error <= np.exp(-slowest * times) * error[0] * (1 + 1e-6)).all()


def test_unidentified_directions_never_move():
    rng = rng_for("tests", "poor tasks")
    log_pi, Q, eta = random_context(rng)
    start = torch.tensor([0.3, -0.4], dtype=torch.float64)
    uniform = effective_model(torch.full_like(log_pi, -np.log(3)), Q, eta)
    collinear = effective_model(torch.log_softmax(2 * eta[:, None, None] * Q, -1), Q, eta)
    for model, direction in ((uniform, [1.0, 0.0]), (collinear, [1.0, -2.0])):
        direction = torch.tensor(direction, dtype=torch.float64)
        assert model.slowest_rate(start) == pytest.approx(0, abs=1e-15)
        path = gradient_descent(model.gradient(), start, 2 / model.squared_norm, 300)
        assert ((path - start) @ direction).abs().max() < 1e-12
        assert (path[-1] - start).norm() > 0.5  # the other direction does move, and is learned
        assert (model.policy(path[-1]) - model.policy(torch.ones(2, dtype=torch.float64))).abs().max() < 1e-2


def test_bad_models_and_rates_are_refused():
    x = torch.zeros(5, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"need Phi \[N, A, d\]"):
        LogitModel(x, x, x)
    with pytest.raises(ValueError, match="a rate needs two"):
        decay_rate(np.arange(3.0), np.ones(3), low=2, high=3)
