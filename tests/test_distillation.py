"""Algorithm Distillation: sizes, causality, incremental reading, histories, resumable training, qualification."""

import json

import numpy as np
import pytest
import torch

from pa_core.adaptations.algorithm_distillation import AlgorithmDistillation, Cache, Distiller, DistillerSizes, Tokens
from pa_core.adaptations.distillation_checks import DistillationCriteria, qualify
from pa_core.adaptations.distillation_training import (
    BLOCK,
    DistillationConfig,
    DistillationTrainer,
    load_distiller,
    make_histories,
    nll,
    relabelled,
)
from pa_core.families import random_mdps
from pa_core.online import make_draws, run_online
from pa_core.protocol import load_protocol
from pa_core.runs import RunError, run_paths


def small(**change):
    """A cell shrunk to seconds, on a root seed of its own."""
    base = dict(n_states=3, root_seed=7, environment=load_protocol().environment, alpha=20.0, beta=2.0)
    tiny = dict(rounds=6, per_round=5, histories=32, held_out=8, context=20, width=16, n_layer=2, n_head=2, d_ffn=32)
    budget = dict(steps=2 * BLOCK, batch=4, warmup_steps=5, points=2)
    return DistillationConfig(**base | tiny | budget | change)


def network(config=None, seed=0):
    """Random weights, large enough that every input matters."""
    model = Distiller((config or small()).sizes)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.3)
    return model.eval()


def history(T=12, n=4, seed=0):
    rng = np.random.default_rng(seed)
    index = lambda k: torch.from_numpy(rng.integers(k, size=(n, T)))
    return index(3), index(3), torch.from_numpy(rng.normal(size=(n, T))).to(torch.float32)


def test_parameter_counts():
    """About 1.14 million, as the paper's adaptation has; 16 more rows of 144 at twice the states."""
    assert Distiller(DistillerSizes(8, 3)).n_parameters == 1_145_235
    assert Distiller(DistillerSizes(16, 3)).n_parameters == 1_145_235 + 16 * 144
    assert DistillationConfig.model_fields["width"].default == 144


def test_tokens_carry_the_last_transition_and_the_present_state():
    s, a, r = history()
    t = Tokens.of(s, a, r)
    assert torch.equal(t.s, s)
    for shifted, x in ((t.s_prev, s), (t.a_prev, a), (t.r_prev, r)):
        assert torch.equal(shifted[:, 1:], x[:, :-1]) and (shifted[:, 0] == 0).all()
    assert (t.first[:, 0] == 0).all() and (t.first[:, 1:] == 1).all()


@torch.no_grad()
def test_the_network_is_causal_and_reads_everything_before():
    model, (s, a, r) = network(), history()
    base = model(Tokens.of(s, a, r))
    for name in "sar":
        changed = {"s": s.clone(), "a": a.clone(), "r": r.clone()}
        changed[name][:, 6] = (changed[name][:, 6] + 1) % 3
        out = model(Tokens.of(**changed))
        first = 6 if name == "s" else 7  # the action and reward of step 6 are seen from token 7 on
        assert torch.equal(out[:, :first], base[:, :first])
        assert ((out[:, first:] - base[:, first:]).abs().amax((0, 2)) > 1e-4).all()


@torch.no_grad()
def test_reading_token_by_token_is_reading_at_once():
    model, (s, a, r) = network(), history()
    tokens = Tokens.of(s, a, r)
    expected = model(tokens)
    cache, at_once = Cache(model.sizes, 4, 13), Cache(model.sizes, 4, 13)
    one = lambda t, k: Tokens(*(getattr(t, f)[:, k : k + 1] for f in ("s_prev", "a_prev", "r_prev", "s", "first")))
    for k in range(12):
        # A query for every state stands at the same position, and leaves no trace.
        asked = Tokens(*(x.expand(4, 3) for x in vars(one(tokens, k)).values()))
        asked = Tokens(asked.s_prev, asked.a_prev, asked.r_prev, torch.arange(3).expand(4, 3), asked.first)
        answers = model.extend(asked, cache, keep=False)
        assert cache.length == k
        out = model.extend(one(tokens, k), cache, keep=True)
        # float32 sums in another order
        torch.testing.assert_close(out[:, 0], expected[:, k], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(answers[torch.arange(4), s[:, k]], expected[:, k], rtol=1e-4, atol=1e-5)
    model(tokens, at_once)
    torch.testing.assert_close(cache.k[:, :, :, :12], at_once.k[:, :, :, :12], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_in_the_harness_it_plays_what_the_network_says():
    model = network()
    mdp = random_mdps(4, 3, 3, gamma=0.9, rng=np.random.default_rng(0))
    draws = make_draws((2, 2), 30, np.random.default_rng(1))
    grid = type(mdp)(mdp.P.reshape(2, 2, 3, 3, 3), mdp.R.reshape(2, 2, 3, 3), 0.9)
    record = run_online(grid, AlgorithmDistillation(model, context=20), rounds=6, per_round=5, draws=draws)
    steps = record.steps
    for k in (1, 4, 5, 6):
        kept = slice(max(0, 5 * k - 20), 5 * k)  # whole rounds, the newest 20 transitions
        s, a, r = (x.reshape(4, 30)[:, kept] for x in (steps.s, steps.a, steps.r.to(torch.float32)))
        for state in range(3):  # every state in place of the present one
            present, zero = torch.full((4, 1), state), torch.zeros(4, 1, dtype=torch.int64)
            more = (torch.cat(x, 1) for x in ((s, present), (a, zero), (r, zero.to(r))))
            expected = model(Tokens.of(*more))[:, -1].to(torch.float64).log_softmax(-1)
            mine = record.log_pi[k].reshape(4, 3, 3)[:, state]
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


def test_misfits_are_refused():
    mdp = random_mdps(2, 4, 3, gamma=0.9, rng=np.random.default_rng(0))
    draws = make_draws((2,), 50, np.random.default_rng(1))
    with pytest.raises(ValueError, match="3 states"):
        run_online(mdp, AlgorithmDistillation(network(), context=20), rounds=1, draws=draws)
    with pytest.raises(ValueError, match="does not fit a context of 20"):
        run_online(mdp, AlgorithmDistillation(network(small(n_states=4)), context=20), rounds=1, per_round=25, draws=draws)
    with pytest.raises(ValueError, match="positions"):
        AlgorithmDistillation(network(), context=30)
    with pytest.raises(ValueError, match="longer histories"):
        DistillationTrainer(small(context=30), 0, "nowhere")
    with pytest.raises(ValueError, match="must divide"):
        Distiller(DistillerSizes(3, 3, width=15, n_head=2))


def test_shuffled_rewards_are_ones_that_the_mdp_has_paid():
    mdp = random_mdps(4, 3, 3, gamma=0.9, rng=np.random.default_rng(0))
    draws = make_draws((4,), 20, np.random.default_rng(1))
    controller = AlgorithmDistillation(network(), context=20, shuffle=np.random.default_rng(2))
    record = run_online(mdp, controller, rounds=4, per_round=5, draws=draws)
    seen = torch.stack([r for _, _, r in controller.history], 1)
    paid = record.steps.r.to(torch.float32)
    assert not torch.equal(seen, paid)
    for i in range(4):
        assert all(seen[i, t] in paid[i, : t + 1] for t in range(20))


# ---- histories ----


def test_histories_are_the_sources_runs():
    config = small(n_states=4, histories=6, rounds=20, per_round=20)
    h = make_histories(config, 64, "test")
    assert h.s.shape == h.a.shape == h.r.shape == h.entropy.shape == (64, 400)
    assert h.s.max() < 4 and h.a.max() < 3 and h.r.abs().max() <= 1
    np.testing.assert_allclose(h.entropy[:, :20], np.log(3), atol=1e-12)  # the first round is uniform
    assert h.entropy[:, -20:].mean() < 0.9 * np.log(3)  # and the source commits itself
    assert h.r[:, -100:].mean() > h.r[:, :20].mean() + 0.1  # to better actions
    again, other = make_histories(config, 64, "test"), make_histories(config, 64, "other")
    assert torch.equal(h.s, again.s) and not torch.equal(h.s, other.s)


def test_relabelling_is_a_permutation_of_each_sequence():
    s, a, _ = history(T=200, n=50)
    t, b = relabelled(s, a, 3, 3, np.random.default_rng(0))
    maps = set()
    for i in range(50):
        pairs = {(x, y) for x, y in zip(s[i].tolist(), t[i].tolist(), strict=True)}
        assert len(pairs) == 3 and len({y for _, y in pairs}) == 3
        maps.add(tuple(sorted(pairs)))
    assert len(maps) == 6  # all 3! of them in 50 sequences
    assert not torch.equal(a, b)


# ---- training ----


def test_an_untrained_network_is_near_uniform(tmp_path):
    config = small()
    model = DistillationTrainer(config, 0, tmp_path / "state").model
    s, a, r = history()
    # Logits are of size 0.02 sqrt(16) at most
    assert abs(nll(model, s, a, r).mean().item() - np.log(3)) < 0.05


def test_training_learns_and_a_kill_costs_nothing(tmp_path):
    config = small(steps=6 * BLOCK, points=3, lr=1e-2)
    whole = DistillationTrainer(config, 0, tmp_path / "whole")
    before = whole.held_out_nll()["nll"]
    whole.train(show_progress=False)
    assert len(whole.progress["log"]) == 3
    assert whole.progress["log"][-1]["loss"] < before - 0.02  # the source's late rounds are predictable
    whole.save_run(tmp_path / "a")
    for until in (BLOCK, 3 * BLOCK, None):  # a new object each time, as after a kill
        DistillationTrainer(config, 0, tmp_path / "pieces").train(until=until, show_progress=False)
    DistillationTrainer(config, 0, tmp_path / "pieces").save_run(tmp_path / "b")
    (a, a_record), (b, b_record) = (run_paths(config.name, 0, tmp_path / x) for x in "ab")
    assert a.read_bytes() == b.read_bytes()
    a_record, b_record = (json.loads(x.read_text()) for x in (a_record, b_record))
    assert a_record["log"] == b_record["log"]
    assert a_record["tokens"] == 6 * BLOCK * 4 * 21
    assert not (tmp_path / "pieces").exists()

    model = load_distiller(config, 0, tmp_path / "a")
    for name, p in whole.model.named_parameters():
        assert torch.equal(dict(model.named_parameters())[name], p)
    with pytest.raises(RunError, match="another configuration"):
        load_distiller(small(), 0, tmp_path / "a")


def test_qualification_names_what_fails():
    config = small(steps=BLOCK)
    mdp = random_mdps(8, 3, 3, gamma=0.9, rng=np.random.default_rng(0))
    draws = make_draws((8,), 20, np.random.default_rng(1))
    criteria = DistillationCriteria(rounds=[1, 2, 4], replicates=200)
    held_out = make_histories(config, 8, "test")
    rng = np.random.default_rng(2)
    table = qualify(network(), config, mdp, held_out, draws=draws, rng=rng, criteria=criteria).set_index("check")
    assert len(table) == 7
    assert not table.passed["L(4) / L(1)"] and not table.passed["held-out NLL minus source entropy"]
    excess = nll(network(), held_out.s[:, :21], held_out.a[:, :21], held_out.r[:, :21]).mean().item()
    assert table.value["held-out NLL minus source entropy"] == pytest.approx(
        excess - held_out.entropy[:, :21].mean().item(), rel=1e-5
    )
