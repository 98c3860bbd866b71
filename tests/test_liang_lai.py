"""The linear-attention actor-critic: construction, gradients, training, qualification; and grids of settings."""

import json

import numpy as np
import pytest
import torch

from pa_core.adaptations.liang_lai import (
    Block,
    LiangLai,
    Shape,
    assemble,
    construct_block,
    learner_column,
    make_prompt,
    transition_columns,
)
from pa_core.adaptations.liang_lai_checks import increment_errors, qualify
from pa_core.adaptations.liang_lai_training import (
    LiangLaiConfig,
    LiangLaiTrainer,
    initial_weights,
    load_liang_lai,
    train_liang_lai,
    training_windows,
)
from pa_core.families import random_mdps
from pa_core.online import Steps, make_draws, run_online
from pa_core.protocol import load_protocol
from pa_core.runs import RunError, run_paths
from pa_core.tabular import BatchActorCritic, actor_critic_increments
from pa_core.tuning import select, sweep

SHAPE = Shape(4, 3)


def small(**change):
    """A cell shrunk to seconds, on a root seed of its own."""
    base = dict(n_states=4, root_seed=7, environment=load_protocol().environment)
    return LiangLaiConfig(**base | dict(blocks=2, chains=128, windows=20, batch=32) | change)


def learner_and_window(seed=0, n=20, batch=(5,)):
    rng = np.random.default_rng(seed)
    index = lambda k: torch.from_numpy(rng.integers(k, size=(*batch, n)))
    steps = Steps(index(4), index(3), torch.from_numpy(rng.normal(size=(*batch, n))), index(4))
    return torch.from_numpy(rng.normal(size=(*batch, 4))), torch.from_numpy(rng.normal(size=(*batch, 4, 3))), steps


def mdps(n=16, S=4):
    return random_mdps(n, S, 3, gamma=0.9, rng=np.random.default_rng(0))


def draws(n=16, steps=200):
    return make_draws((n,), steps, np.random.default_rng(1))


def random_block(seed=0):
    g = torch.Generator().manual_seed(seed)
    P, V = (torch.randn(SHAPE.width, SHAPE.width, generator=g, dtype=torch.float64) / 5 for _ in range(2))
    return Block(SHAPE, P, V)


# ---- sizes and construction ----


@pytest.mark.parametrize("n_states,width,allocated,trained", [(8, 74, 10_952, 2_665), (16, 146, 42_632, 10_449)])
def test_parameter_counts(n_states, width, allocated, trained):
    """The source's 10.9 thousand at 8 states and 3 actions are all entries of P and V; a quarter of them ever moves."""
    shape = Shape(n_states, 3)
    assert (shape.width, shape.n_parameters, shape.n_trained) == (width, allocated, trained)
    block = construct_block(shape)
    assert block.P.numel() + block.V.numel() == allocated
    config = small(n_states=n_states)
    assert sum(x.numel() for x in initial_weights(config, 0)) == trained


@pytest.mark.parametrize("c", [1.0, -3.0, 1e-3])
def test_the_construction_is_the_teacher(c):
    w, logits, steps = learner_and_window()
    block = construct_block(SHAPE, c=c)
    out = block.attend(make_prompt(w, logits, steps, 0.9))[..., -1]
    dw, dlogits = actor_critic_increments(w, logits, steps, 0.9)
    new_logits, new_w = out[..., -16:-4].reshape(logits.shape), out[..., -4:]
    assert (new_w - (w + dw)).abs().max() < 1e-12
    assert (new_logits - (logits + dlogits)).abs().max() < 1e-12
    for alpha, beta in ((0.2, 0.8), (50.0, 6.4)):  # rates are rows of V
        out = block.with_rates(alpha, beta).attend(make_prompt(w, logits, steps, 0.9))[..., -1]
        assert (out[..., -4:] - (w + beta * dw)).abs().max() < 1e-12
        assert (out[..., -16:-4].reshape(logits.shape) - (logits + alpha * dlogits)).abs().max() < 1e-12


def test_scale_zero_is_refused():
    with pytest.raises(ValueError, match="not 0"):
        construct_block(SHAPE, c=0.0)


def test_the_short_form_is_the_last_column_of_attention():
    """For any weights, blocks that the construction leaves at 0 included."""
    w, logits, steps = learner_and_window(n=7)
    block, H = random_block(), make_prompt(w, logits, steps, 0.9)
    X, u = transition_columns(logits, steps, 0.9), learner_column(w, logits)
    assert torch.equal(H[..., : SHAPE.transition, :-1], X) and torch.equal(H[..., SHAPE.transition :, -1], u)
    expected = (block.attend(H) - H)[..., -16:, -1]
    torch.testing.assert_close(block.increments(X, u), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("discounted", [True, False])
def test_the_constructed_block_is_the_teacher_in_the_harness(discounted):
    mdp, d = mdps(), draws()
    options = dict(discounted_actor=discounted, exploration=0.1)
    mine = run_online(mdp, LiangLai(construct_block(SHAPE), 25.0, 6.0, **options), rounds=10, draws=d)
    teacher = run_online(mdp, BatchActorCritic(25.0, 6.0, **options), rounds=10, draws=d)
    assert torch.equal(mine.steps.s, teacher.steps.s)
    assert (mine.log_pi.exp() - teacher.log_pi.exp()).abs().max() < 1e-12


def test_only_two_parts_ever_get_a_gradient():
    """With P22 = 0 and the learner's rows of V22 = 0, as they start, nothing but P12 and V21 below its first row moves."""
    w, logits, steps = learner_and_window()
    P12, V21 = (x.to(torch.float64) for x in initial_weights(small(), 0))
    block = assemble(SHAPE, P12, V21)
    k = SHAPE.transition
    g = torch.Generator().manual_seed(0)
    free_P, free_V = torch.zeros_like(block.P), torch.zeros_like(block.V)
    free_P[:, :k] = torch.randn(SHAPE.width, k, generator=g, dtype=torch.float64)  # P11, P21 may be anything
    free_V[: k + 1] = torch.randn(k + 1, SHAPE.width, generator=g, dtype=torch.float64)  # V11, V12 and the first row too
    P, V = (block.P + free_P).requires_grad_(), (block.V + free_V).requires_grad_()
    out = Block(SHAPE, P, V).attend(make_prompt(w, logits, steps, 0.9))[..., -16:, -1]
    dw, dlogits = actor_critic_increments(w, logits, steps, 0.9)
    target = torch.cat([(logits + dlogits).flatten(-2), w + dw], -1)
    ((out - target) ** 2).sum().backward()
    moves_P, moves_V = torch.zeros_like(P, dtype=torch.bool), torch.zeros_like(V, dtype=torch.bool)
    moves_P[:k, k:] = True
    moves_V[k + 1 :, :k] = True
    assert (P.grad[~moves_P] == 0).all() and (V.grad[~moves_V] == 0).all()
    assert (P.grad[moves_P] != 0).any() and (V.grad[moves_V] != 0).any()
    assert moves_P.sum() + moves_V.sum() == SHAPE.n_trained


# ---- training ----


def test_training_windows_carry_the_teachers_increments():
    config = small(chains=8, batch=8, windows=3)
    windows = list(training_windows(config, 0, 0))
    exact = construct_block(SHAPE)
    for X, u, target in windows:
        assert X.shape == (8, SHAPE.transition, 20) and u.shape == (8, SHAPE.learner) and target.shape == (8, 16)
        # float32 examples, sums of 20 terms of order 1
        torch.testing.assert_close(exact.increments(X.double(), u.double()), target.double(), rtol=0, atol=1e-6)
    (_, first, target), (_, second, _) = windows[:2]
    rates = torch.tensor([config.alpha] * 12 + [config.beta] * 4)
    torch.testing.assert_close(second[:, 1:], first[:, 1:] + rates * target, rtol=0, atol=1e-6)  # teacher forcing
    again, other, later = (next(iter(training_windows(config, *x)))[0] for x in ((0, 0), (1, 0), (0, 1)))
    assert torch.equal(windows[0][0], again) and not torch.equal(again, other) and not torch.equal(again, later)


def test_a_tiny_budget_learns_and_a_kill_costs_nothing(tmp_path):
    config = small(blocks=3)
    whole = LiangLaiTrainer(config, 0, tmp_path / "whole")
    before = increment_errors(whole.block(), mdps(), 25.0, 6.0, rounds=5, draws=draws())
    whole.train(show_progress=False)
    losses = [entry["loss"] for entry in whole.progress["log"]]
    assert losses[-1] < losses[0] / 5
    after = increment_errors(whole.block(), mdps(), 25.0, 6.0, rounds=5, draws=draws())
    assert before.actor > 0.9 and before.critic > 0.9  # an untrained block answers nothing
    assert after.actor < 0.5 and after.critic < 0.5
    whole.save_run(tmp_path / "a")
    for until in (1, 2, None):  # a new object each time, as after a kill
        LiangLaiTrainer(config, 0, tmp_path / "pieces").train(until=until, show_progress=False)
    LiangLaiTrainer(config, 0, tmp_path / "pieces").save_run(tmp_path / "b")
    (a, a_record), (b, b_record) = (run_paths(config.name, 0, tmp_path / x) for x in "ab")
    assert a.read_bytes() == b.read_bytes()
    a_record, b_record = (json.loads(x.read_text()) for x in (a_record, b_record))
    assert a_record["log"] == b_record["log"]
    assert (a_record["n_parameters"], a_record["n_trained"]) == (SHAPE.n_parameters, SHAPE.n_trained)
    assert a_record["windows"] == 3 * 128 * 20
    assert not (tmp_path / "pieces").exists()


def test_finished_runs_are_verified(tmp_path):
    config = small(blocks=1, windows=2)
    train_liang_lai(config, 0, out=tmp_path, state=tmp_path / "state", show_progress=False)
    block = load_liang_lai(config, 0, tmp_path)
    assert block.P.shape == (SHAPE.width, SHAPE.width) and block.P.abs().sum() > 0
    with pytest.raises(RunError, match="no such run; finished runs of liang_lai_s4: .0."):
        load_liang_lai(config, 1, tmp_path)
    with pytest.raises(RunError, match="another configuration"):
        load_liang_lai(small(blocks=1, windows=3), 0, tmp_path)
    with pytest.raises(RunError, match="never overwritten"):
        train_liang_lai(config, 0, out=tmp_path, state=tmp_path / "state", show_progress=False)
    weights, _ = run_paths(config.name, 0, tmp_path)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(RunError, match="checksum"):
        load_liang_lai(config, 0, tmp_path)


def test_states_of_other_runs_and_damaged_ones_are_refused(tmp_path):
    LiangLaiTrainer(small(windows=2), 0, tmp_path / "state").train(until=1, show_progress=False)
    with pytest.raises(RunError, match="another run"):
        LiangLaiTrainer(small(windows=2), 1, tmp_path / "state")
    with pytest.raises(RunError, match="another run"):
        LiangLaiTrainer(small(windows=3), 0, tmp_path / "state")
    (tmp_path / "state").write_bytes(b"not a state")
    with pytest.raises(RunError, match="damaged"):
        LiangLaiTrainer(small(windows=2), 0, tmp_path / "state")
    with pytest.raises(ValueError, match="must divide"):
        LiangLaiTrainer(small(batch=100), 0, tmp_path / "other")


# ---- qualification ----


def test_qualification_passes_the_construction_and_fails_what_is_wrong():
    mdp, d = mdps(), draws()
    exact = construct_block(SHAPE)
    table = qualify(exact, mdp, [(0.8, 3.2), (25.0, 6.4)], draws=d, horizons=(5, 10))
    assert len(table) == 16 and table.passed.all() and table.value.max() < 1e-9
    wrong = {
        "untrained": assemble(SHAPE, *initial_weights(small(), 0)),
        "2% too fast": Block(SHAPE, exact.P, 1.02 * exact.V),
        "no bootstrap": Block(SHAPE, exact.P.clone(), exact.V),
    }
    wrong["no bootstrap"].P[4:8, SHAPE.transition :] = 0
    for name, block in wrong.items():
        failed = qualify(block, mdp, [(25.0, 6.4)], draws=d, horizons=(5, 10))
        failed = failed[~failed.passed].check.tolist()
        assert "critic increment" in failed and "actor increment" in failed, name
    fast = increment_errors(wrong["2% too fast"], mdp, 25.0, 6.4, rounds=5, draws=d)
    assert fast.actor == pytest.approx(0.02) and fast.critic_p95 == pytest.approx(0.02)


# ---- tuning ----


def test_a_sweep_scores_every_setting_and_selection_names_edges():
    mdp, d = mdps(), draws()
    grid = {"alpha": [0.5, 25.0, 100.0], "beta": [0.8, 6.0]}
    table = sweep(BatchActorCritic, grid, mdp, draws=d, horizons=(5, 10), chunk=4)
    assert len(table) == 12
    single = run_online(mdp, BatchActorCritic(25.0, 6.0), rounds=10, draws=d)
    mine = table[(table.alpha == 25) & (table.beta == 6) & (table.horizon == 10)].iloc[0]
    assert mine["median"] == pytest.approx(np.median(single.loss[10]), rel=1e-9)
    assert mine["regret"] == pytest.approx(single.regret[10].mean().item(), rel=1e-9)
    assert mine["greedy_p90"] == pytest.approx(single.greedy_loss[10].quantile(0.9).item(), rel=1e-9)
    chosen = select(table, list(grid), 10)
    assert chosen.score == table[table.horizon == 10]["median"].min()
    assert "beta" in chosen.edges  # two values: both are ends
    assert "beta" not in select(table, list(grid), 10, bounded=["beta"]).edges
    block = construct_block(SHAPE)
    same = sweep(lambda alpha, beta: LiangLai(block, alpha, beta), grid, mdp, draws=d, horizons=(5, 10))
    np.testing.assert_allclose(same["median"], table["median"], atol=1e-10)
