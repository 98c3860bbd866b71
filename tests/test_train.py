"""Training: grouped and single runs agree, kills cost nothing, signals and learning rates are what they claim."""

import json
import math

import pytest
import torch

from pa_core import train
from pa_core.__main__ import main
from pa_core.cards import card, cell_table, write_cards
from pa_core.protocol import load_protocol
from pa_core.runs import ARTIFACTS, RunError, finished_runs, load_decoder, read_record, run_paths, save_run
from pa_core.tasks import least_losses, make_task
from pa_core.train import BLOCK, Trainer, choose_device, learning_rate, parse_runs, retrain, train_cell

CPU = torch.device("cpu")


def small(cell: str, steps: int = 2 * BLOCK, points: int = 2):
    """A registered cell shrunk to seconds; its seed root differs, so no registered stream is touched."""
    config = load_protocol().cell(cell)
    return config.model_copy(
        update={
            "root_seed": 7,
            "contexts": config.contexts.model_copy(update={"n_contexts": 64, "n_mdps": 4}),
            "model": config.model.model_copy(update={"d_model": 16, "n_layer": 2, "n_head": 2, "d_head": 8, "d_ffn": 16}),
            "budget": config.budget.model_copy(update={"steps": steps, "batch": 4}),
            "audit": config.audit.model_copy(update={"n_mdps": 4, "n_contexts": 16, "points": points}),
        }
    )


def trainer(config, runs, tmp_path, name="state"):
    return Trainer(config, runs, device=CPU, compiled=False, state_path=tmp_path / f"{name}.safetensors")


@pytest.mark.parametrize("cell", ["policy_attention_s4", "policy_attention_increment_s4", "critic_s4"])
def test_grouped_and_single_runs_agree_after_20_steps(cell, tmp_path):
    config = small(cell)
    group = trainer(config, [0, 1], tmp_path, "group")
    batches = group.task.block(0, 20, 4)
    for i in range(20):
        group.step({k: v[i] for k, v in batches.items()})
    for g, run in enumerate((0, 1)):
        single = trainer(config, [run], tmp_path, f"single{run}")
        own = single.task.block(0, 20, 4)
        for i in range(20):
            single.step({k: v[i] for k, v in own.items()})
        for name, value in single.decoder.named_parameters():
            together = dict(group.decoder.named_parameters())[name][g : g + 1]
            # Adam divides by the square root of squared gradients: where a gradient is only rounding noise the two orders
            # of summation may differ by a whole step of the rate (1e-3 * 20/500 warmed up), hence the absolute part.
            torch.testing.assert_close(together, value, rtol=1e-4, atol=1e-4)
        loss = group.task.loss(group.decoder, {k: v[0] for k, v in batches.items()})[g]
        torch.testing.assert_close(
            loss, single.task.loss(single.decoder, {k: v[0] for k, v in own.items()})[0], rtol=1e-4, atol=0
        )


@pytest.mark.parametrize("cell", ["policy_attention_s4", "critic_s4"])
def test_a_resumed_run_ends_with_the_same_bytes(cell, tmp_path, monkeypatch):
    block = 20  # the shorter the block, the more resumptions a second of the test buys
    monkeypatch.setattr(train, "BLOCK", block)
    config = small(cell, steps=3 * block, points=3)
    whole = trainer(config, [0, 1], tmp_path, "whole")
    whole.train(show_progress=False)
    whole.save_runs(tmp_path / "a")
    for until in (block, 2 * block, None):  # a new object each time, as after a kill
        trainer(config, [0, 1], tmp_path, "pieces").train(until=until, show_progress=False)
    pieces = trainer(config, [0, 1], tmp_path, "pieces")
    pieces.save_runs(tmp_path / "b")
    for run in (0, 1):
        (a, a_record), (b, b_record) = (run_paths(config.name, run, tmp_path / x) for x in "ab")
        assert a.read_bytes() == b.read_bytes()
        a_log, b_log = (json.loads(path.read_text())["log"] for path in (a_record, b_record))
        for a_entry, b_entry in zip(a_log, b_log, strict=True):
            # Measures are not fed back; their float64 sums depend, in the last digit, on where in memory they are made.
            assert a_entry.keys() == b_entry.keys() and a_entry["loss"] == b_entry["loss"]
            for name, value in a_entry.items():
                assert b_entry[name] == pytest.approx(value, rel=1e-12, abs=1e-14)
    assert not (tmp_path / "pieces.safetensors").exists()


def test_seeds_matter_and_the_global_generators_do_not(tmp_path):
    config = small("policy_attention_s4", steps=10, points=1)
    weights = []
    for name, run, seed in (("x", 0, 1), ("y", 0, 2), ("z", 1, 1)):
        torch.manual_seed(seed)
        t = trainer(config, [run], tmp_path, name)
        t.train(show_progress=False)
        weights.append(t.decoder.head_w.detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_state_of_another_grouping_is_refused(tmp_path):
    config = small("policy_attention_s4")
    trainer(config, [0], tmp_path).train(until=BLOCK, show_progress=False)
    with pytest.raises(RunError, match="grouping"):
        trainer(config, [0, 1], tmp_path)


def test_damaged_state_is_refused_by_name(tmp_path):
    (tmp_path / "state.safetensors").write_bytes(b"not a state")
    with pytest.raises(RunError, match="state.safetensors: damaged"):
        trainer(small("policy_attention_s4"), [0], tmp_path)


@pytest.mark.parametrize(
    "signal", ["policy_attention", "pmd_target", "reward_only", "policy_attention_increment", "policy_attention_raw"]
)
def test_an_actor_overfits_one_batch(signal, tmp_path):
    """Every signal drives its loss to the value of its own minimiser on one small batch."""
    config = small(f"{signal}_s4")
    config = config.model_copy(
        update={"optimiser": config.optimiser.model_copy(update={"warmup_steps": 1, "weight_decay": 0.0, "lr": 1e-2})}
    )
    t = trainer(config, [0], tmp_path)
    batch = {k: v[0] for k, v in t.task.block(0, 1, 2).items()}
    q = batch["target"]
    best = {
        "pmd_target": -(q * q.clamp(min=1e-30).log()).sum(-1).mean(),
        "reward_only": torch.zeros(()),  # the best action has adv = 0
    }.get(
        signal,
        (q * (q.clamp(min=1e-30).log() - batch["log_pi"] - batch["eta"][..., None, None] * batch["adv"])).sum(-1).mean(),
    )
    first = t.task.loss(t.decoder, batch).item()
    for _ in range(150):
        last = t.step(batch).item()
    # 150 steps close at least 95% of the way; a wrong target leaves a multiple of that.
    assert best.item() - 1e-5 <= last < best.item() + 0.05 * (first - best.item())


def test_critic_targets_are_the_means_of_the_draws_in_the_context():
    config = small("critic_s4")
    task = make_task(config, [0], CPU)
    batch = task.block(0, 1, 3)
    tokens, target = batch["tokens"][0, 0], batch["target"][0, 0]  # [B, T, D], [B, S*A, 2]
    cut = task.layout.slices
    memory, n = tokens[:, :12], 12 * task.m
    for b in range(3):
        for pair in range(12):
            mine = [
                t
                for t in tokens[b, 12 : 12 + n]
                if torch.equal(t[cut["s"]], memory[b, pair, cut["s"]])
                and torch.equal(t[cut["a"]], memory[b, pair, cut["a"]])
            ]
            assert len(mine) == task.m
            looked_up = []
            for t in mine:
                row = int(t[cut["s_next"]].argmax()) * 3 + int(t[cut["a_next"]].argmax())
                looked_up.append(memory[b, row, task.layout.column("Q")])
            assert target[b, pair, 0] == pytest.approx(mine[0][task.layout.column("r")].item())
            # float32 sums of six numbers of order 1
            assert target[b, pair, 1] == pytest.approx(torch.stack(looked_up).mean().item(), abs=1e-6)


def test_signals_share_data_and_order():
    blocks = [
        make_task(small(f"{s}_s4"), [1], CPU).block(3, 2, 4) for s in ("policy_attention", "pmd_target", "reward_only")
    ]
    for other in blocks[1:]:
        for name, value in blocks[0].items():
            assert torch.equal(value, other[name])


@pytest.mark.parametrize("signal", ["policy_attention", "pmd_target", "reward_only", "critic"])
def test_least_losses_are_those_of_the_minimiser_on_the_same_batches(signal):
    """An actor that returns the minimiser itself, scored by the task's own loss."""
    config = small(f"{signal}_s4", steps=8)
    task, least = make_task(config, [1], CPU), least_losses(config, 1, 4)
    assert least.shape == (2,)
    for number in range(2):
        block = task.block(number, 4, config.budget.batch)
        if signal == "reward_only":
            perfect = block["adv"] * 1e6
        elif signal == "critic":
            perfect = block["target"]
        else:
            perfect = block["log_pi"] + block["eta"][..., None, None] * block["adv"]
        losses = [task.loss(lambda *_, x=x, **__: x, {k: v[i] for k, v in block.items()}) for i, x in enumerate(perfect)]
        # float32 against float64
        assert torch.stack(losses).mean().item() == pytest.approx(least[number].item(), rel=1e-5, abs=1e-6)


def test_learning_rate_schedule():
    spec = load_protocol().optimiser
    rates = [learning_rate(spec, k, 51200) for k in range(51200)]
    assert rates[0] == pytest.approx(spec.lr / spec.warmup_steps)
    assert max(rates) == pytest.approx(spec.lr) and rates.index(max(rates)) in (spec.warmup_steps - 1, spec.warmup_steps)
    assert rates[-1] == pytest.approx(spec.lr * spec.final_fraction, rel=1e-3)  # the last step is one short of the end
    middle = (spec.warmup_steps + 51200) // 2
    assert rates[middle] == pytest.approx(spec.lr * (1 + spec.final_fraction) / 2, rel=1e-3)
    assert all(math.isfinite(r) and r > 0 for r in rates)


def test_a_block_divides_the_steps_between_audits_of_every_budget():
    p = load_protocol()
    for name in p.cells:
        steps = p.cell(name).budget.steps
        assert steps % p.audit.points == 0 and (steps // p.audit.points) % BLOCK == 0


def test_finished_runs_are_refused_when_damaged(tmp_path):
    config = small("policy_attention_s4", steps=BLOCK, points=1)
    t = trainer(config, [0], tmp_path)
    t.train(show_progress=False)
    out = tmp_path / "artifacts"
    t.save_runs(out)
    cell = config.name
    decoder = load_decoder(cell, 0, out, config=config)
    assert torch.equal(decoder.head_w, t.decoder.head_w)
    assert finished_runs(cell, out) == [0]
    weights, record = run_paths(cell, 0, out)

    with pytest.raises(RunError, match="never overwritten"):
        save_run(cell, 0, {}, {}, out)
    with pytest.raises(RunError, match=r"0\.json: made under another configuration.*root_seed"):
        read_record(cell, 0, out)
    with pytest.raises(RunError, match=r"1\.json: no such run"):
        read_record(cell, 1, out, config=config)

    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(RunError, match=r"0\.safetensors: checksum"):
        load_decoder(cell, 0, out, config=config)
    weights.unlink()
    with pytest.raises(RunError, match=r"0\.safetensors: cannot be read"):
        load_decoder(cell, 0, out, config=config)
    record.write_text("{")
    with pytest.raises(RunError, match=r"0\.json: damaged"):
        read_record(cell, 0, out, config=config)


def test_unknown_cells_runs_and_devices_are_refused(tmp_path):
    with pytest.raises(KeyError, match="no cell 'policy_attention_s5'"):
        train_cell("policy_attention_s5", out=tmp_path)
    with pytest.raises(ValueError, match="runs 0-4"):
        train_cell("policy_attention_s4", [9], out=tmp_path)
    with pytest.raises(ValueError, match="not available"):
        choose_device("tpu")


def test_run_numbers_of_the_command_line():
    assert parse_runs("0-2,4") == [0, 1, 2, 4] and parse_runs("3") == [3] and parse_runs("1, 0,1") == [1, 0]
    for text in ("", "x", "2-1", "-1", "1-", "0,,1"):
        with pytest.raises(ValueError, match="write 0, 0-4 or 0,2"):
            parse_runs(text)


@pytest.fixture
def small_protocol(monkeypatch):
    """The registered cells, shrunk, wherever the command looks them up."""
    protocol = load_protocol()
    shrunk = type(protocol).model_construct(**{name: getattr(protocol, name) for name in type(protocol).model_fields})
    object.__setattr__(shrunk, "cell", lambda name: small(protocol.cell(name).name, steps=20, points=1))
    for module in ("train", "cards", "runs"):
        monkeypatch.setattr(f"pa_core.{module}.load_protocol", lambda: shrunk)


def test_train_command(small_protocol, tmp_path, capsys):
    out = tmp_path / "runs"
    command = ["train", "policy_attention_s4", "--runs", "0-1", "--device", "cpu", "--out", str(out)]
    assert main(command) == 0
    assert "trained runs 0, 1" in capsys.readouterr().out
    assert finished_runs("policy_attention_s4", out) == [0, 1]
    assert (out / "policy_attention_s4" / "README.md").read_text() == card("policy_attention_s4", out)
    assert not list((out / "_state").rglob("*.safetensors"))
    before = run_paths("policy_attention_s4", 0, out)[0].stat().st_mtime_ns
    assert main(command) == 0 and "nothing is missing" in capsys.readouterr().out
    assert run_paths("policy_attention_s4", 0, out)[0].stat().st_mtime_ns == before

    assert main(["train", "--list", "--out", str(out)]) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.split()[0] == "policy_attention_s4")
    assert line.split()[1:5] == ["2", "of", "5", "2,3,4"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "which cell"),
        (["policy_attention_s5"], "no cell 'policy_attention_s5' in the protocol; it has policy_attention_s4"),
        (["critic_s4", "--runs", "0-9"], "critic_s4 has runs 0-4 in the protocol"),
        (["critic_s4", "--runs", "all"], "runs 'all' can't be read"),
        (["critic_s4", "--device", "tpu"], "device 'tpu' is not available here"),
        (["critic_s4", "--out", "FILE"], "can't write to"),
    ],
)
def test_train_command_refuses_in_one_line(words, message, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    words = [str(tmp_path / "file") if word == "FILE" else word for word in words]
    assert main(["train", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_retraining_never_touches_committed_runs(small_protocol, tmp_path):
    cell = "policy_attention_raw_s4"
    records = retrain(cell, tmp_path, device="cpu")
    assert [record["run"] for record in records] == [0] and finished_runs(cell, tmp_path) == [0]
    for out in ("artifacts", "artifacts/deep/er", "_build/../artifacts", ARTIFACTS / "x"):
        with pytest.raises(ValueError, match="never overwritten"):
            retrain(cell, out)


def test_cards_tell_what_the_records_hold(small_protocol, tmp_path):
    for cell in ("policy_attention_increment_s4", "critic_s4"):
        train_cell(cell, [0], device="cpu", out=tmp_path, state=tmp_path / "_state", show_progress=False)
        text = card(cell, tmp_path)
        record = json.loads(run_paths(cell, 0, tmp_path)[1].read_text())
        for part in (record["weights_sha256"][:16], record["config_hash"], record["provenance"][0]["source_commit"][:10]):
            assert part in text
        assert f"{record['n_parameters']:,} parameters" in text and "20 steps of batch 4" in text and "MIT" in text
    assert [path.parent.name for path in write_cards(tmp_path)] == ["critic_s4", "policy_attention_increment_s4"]
    assert "1 of 5" in cell_table(tmp_path).set_index("cell").loc["critic_s4", "finished"]
    with pytest.raises(ValueError, match="no finished run"):
        card("pmd_target_s4", tmp_path)


def test_committed_cards_are_up_to_date():
    """`python -m pa_core cards` writes them again."""
    for cell in load_protocol().cells:
        if finished_runs(cell):
            path = ARTIFACTS / cell / "README.md"
            assert path.exists() and path.read_text(encoding="utf-8") == card(cell), f"{path}: run `python -m pa_core cards`"
