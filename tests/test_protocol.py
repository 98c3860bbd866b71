"""The protocol: errors name file and key, every field is read, hashes cover their own cell, history bears the runs out."""

import ast
import inspect
import re
import subprocess

import pytest
import torch
import yaml
from pydantic import BaseModel

from pa_core import protocol as protocol_module
from pa_core import stats
from pa_core.chapters import read_chapter
from pa_core.contexts import shift_sets, test_mdps
from pa_core.protocol import PATH, SIGNALS, CellConfig, Protocol, load_protocol, read_protocol
from pa_core.runs import REPOSITORY, finished_runs, read_record
from pa_core.train import Trainer, learning_rate

RUNS = [(cell, run) for cell in load_protocol().cells for run in finished_runs(cell)]


def edited(tmp_path, change):
    """The protocol's file with its mapping changed in place by `change`."""
    raw = yaml.safe_load(PATH.read_text(encoding="utf-8"))
    change(raw)
    path = tmp_path / "changed.yaml"
    path.write_text(yaml.safe_dump(raw, sort_keys=False), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.update(extra=1), "extra: Extra inputs"),
        (lambda p: p["optimiser"].update(momentum=0.9), "optimiser.momentum: Extra inputs"),
        (lambda p: p["shifts"]["ring"].update(slop=0.1), "shifts.ring.slop: Extra inputs"),
        (lambda p: p["contexts"].pop("noise_sd"), "contexts.noise_sd: Field required"),
        (lambda p: p["environment"].update(gamma=1.0), "environment.gamma: Input should be less than 1"),
        (lambda p: p["budgets"]["critic"].update(steps="many"), "budgets.critic.steps: Input should be a valid integer"),
        (lambda p: p["cells"].update(policy_attention_s4=0), "cells.policy_attention_s4: Input should be greater"),
        (lambda p: p["cells"].update(policy_attention=1), "cells: cell 'policy_attention' is not <signal>_s<S>"),
        (lambda p: p["cells"].update(magic_s4=1), "cells: cell 'magic_s4' is not <signal>_s<S>"),
    ],
)
def test_errors_name_file_and_key(change, message, tmp_path):
    path = edited(tmp_path, change)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: {message}')}"):
        read_protocol(path)


@pytest.mark.parametrize("text", ["a: [", "- 1", ""])
def test_files_that_hold_no_mapping_are_refused(text, tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"broken\.yaml: (cannot be read as YAML|must hold a mapping)"):
        read_protocol(path)


def test_a_hash_covers_its_own_cell_and_nothing_else(tmp_path):
    def hashes(change):
        p = read_protocol(edited(tmp_path, change))
        return {name: p.cell(name).hash for name in load_protocol().cells}

    def change_later_sections(p):
        p["cells"]["policy_attention_s32"] = 2
        p["deployment"]["eta"] = 0.1
        p["criteria"]["shifts"]["max_ratio"] = 9.0
        p["analysis"]["replicates"] = 10

    now = {name: load_protocol().cell(name).hash for name in load_protocol().cells}
    assert len(set(now.values())) == len(now)
    assert hashes(lambda p: None) == now  # formatting and comments do not count
    assert hashes(change_later_sections) == now
    critic = hashes(lambda p: p["critic"].update(samples_per_pair=7))
    assert all((critic[name] != now[name]) == name.startswith("critic") for name in now)
    actor = hashes(lambda p: p["budgets"]["actor"].update(steps=400))
    assert all((actor[n] != now[n]) == (not n.startswith(("critic", "policy_attention_increment"))) for n in now)
    assert all(v != now[n] for n, v in hashes(lambda p: p["optimiser"].update(lr=2e-3)).items())


def test_the_protocol_is_frozen_and_covers_every_signal():
    p = load_protocol()
    with pytest.raises(ValueError, match="frozen"):
        p.environment.gamma = 0.5
    assert {p.cell(name).signal for name in p.cells} == set(SIGNALS)
    with pytest.raises(KeyError, match="no cell 'critic_s5'"):
        p.cell("critic_s5")


# ---- every field is read ---------------------------------------------------------------------------------------------


def sections(model: type[BaseModel], where: str = "") -> dict[str, set[str]]:
    """Class name to its fields, for a model and all models below it."""
    found = {model.__name__: set(model.model_fields)}
    for field in model.model_fields.values():
        for kind in getattr(field.annotation, "__args__", (field.annotation,)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= sections(kind)
    return found


def fields_read_by_training(monkeypatch, tmp_path) -> set[tuple[str, str]]:
    """(class, field) of what is looked up when cells are trained and evaluation sets are made; dumps for hashes apart."""
    seen: set[tuple[str, str]] = set()
    base = protocol_module.Frozen

    def getattribute(self, name):
        if name in type(self).model_fields:
            seen.add((type(self).__name__, name))
        return super(base, self).__getattribute__(name)

    def model_dump(self, **options):
        if options.get("mode") != "json":  # handed on as keyword arguments, each of which its receiver must know
            seen.update((type(self).__name__, name) for name in type(self).model_fields)
        return super(base, self).model_dump(**options)

    p = load_protocol()
    monkeypatch.setattr(base, "__getattribute__", getattribute, raising=False)
    monkeypatch.setattr(base, "model_dump", model_dump, raising=False)
    for name in p.cells:
        config = p.cell(name)
        if name not in ("policy_attention_s4", "critic_s4"):
            continue
        trainer = Trainer(config, [0], device=torch.device("cpu"), compiled=False, state_path=tmp_path / name)
        trainer.step({key: x[0] for key, x in trainer.task.block(0, 1, config.budget.batch).items()})
        trainer._audit_if_due(0)
        learning_rate(config.optimiser, config.budget.steps - 1, config.budget.steps)
    shift_sets(p)
    test_mdps(p, 4)
    monkeypatch.undo()
    return seen


def names_read_in(paths) -> set[str]:
    """Attribute names that occur in modules and in the code cells of chapters."""
    names = set()
    for path in paths:
        source = path.read_text(encoding="utf-8")
        if path.suffix == ".md":
            cells = read_chapter(REPOSITORY, path).code_cells if "kernelspec:" in source else []
            source = "\n".join(cell.source for cell in cells)
        names |= {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    return names


# A chapter's parameters are literals, so a registered value that readers may vary is repeated there as the default.
CARRIED = {
    "Deployment.eta": ("eta", lambda p: p.deployment.eta),
    "Deployment.horizons": ("horizon", lambda p: p.deployment.horizons[0]),
    "Deployment.stress_horizon": ("stress_horizon", lambda p: p.deployment.stress_horizon),
    "Deployment.n_test_mdps": ("n_mdps", lambda p: p.deployment.n_test_mdps),
    "Deployment.floor_ablation": ("floor", lambda p: p.deployment.floor_ablation),
    "Criterion.horizon": ("horizon", lambda p: p.criteria.repeated_control.horizon),
    "Analysis.replicates": ("replicates", lambda p: p.analysis.replicates),
}


@pytest.mark.parametrize("name", ["09_repeated_control", "10_shifts", "11_boundaries"])
def test_parameter_defaults_of_the_registered_analyses(name):
    p, declared = load_protocol(), read_chapter(REPOSITORY, REPOSITORY / "chapters" / f"{name}.md").parameters
    for parameter, value in (*CARRIED.values(), ("late_horizon", lambda p: p.deployment.horizons[1])):
        if parameter in declared:
            assert declared[parameter].default == value(p), f"{name}: {parameter}"
    assert {"horizon", "n_mdps", "replicates", "eta"} <= set(declared)
    assert p.criteria.shifts.horizon == p.criteria.repeated_control.horizon == p.deployment.horizons[0]


def test_the_bootstrap_has_the_registered_level():
    defaults = inspect.signature(stats.bootstrap).parameters
    assert defaults["level"].default == load_protocol().analysis.level
    assert defaults["n_resamples"].default == load_protocol().analysis.replicates


def test_every_field_is_read(monkeypatch, tmp_path):
    """Training and the evaluation sets are watched at work; what analyses read is looked for in code and chapters."""
    seen = fields_read_by_training(monkeypatch, tmp_path)
    unread = {(c, f) for c, fields in sections(Protocol).items() for f in fields} - seen
    analysed = {"Deployment", "Criteria", "Criterion", "Analysis", "Protocol"}
    assert not {(c, f) for c, f in unread if c not in analysed}
    named = names_read_in([*PATH.parent.glob("*.py"), *(REPOSITORY / "chapters").glob("*.md")])
    carried = {*CARRIED, "Protocol.analysis"}
    assert not {f"{c}.{f}" for c, f in unread if f not in named} - carried


# ---- committed runs and the history ----------------------------------------------------------------------------------


def git(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run(["git", "-C", str(REPOSITORY), *words], capture_output=True, text=True)


def has_history() -> bool:
    try:
        shallow = git("rev-parse", "--is-shallow-repository")
    except OSError:
        return False
    return shallow.returncode == 0 and shallow.stdout.strip() == "false"


@pytest.mark.skipif(not RUNS, reason="no run is committed")
@pytest.mark.parametrize(("cell", "run"), RUNS)
def test_the_protocol_was_registered_before_the_run(cell, run, tmp_path):
    if not has_history():
        pytest.skip("no git history here")
    record = read_record(cell, run)
    assert record["provenance"], f"{cell}/{run} has no provenance"
    for where in record["provenance"]:
        registered, source = where["protocol_commit"], where["source_commit"]
        assert where["source_modified"] is False, f"{cell}/{run} ran on uncommitted code"
        ancestor = git("merge-base", "--is-ancestor", registered, source)
        assert ancestor.returncode == 0, f"{registered} is not an ancestor of {source}: {ancestor.stderr}"
        assert git("merge-base", "--is-ancestor", source, "HEAD").returncode == 0, f"{source} is not in this history"
        path = tmp_path / "protocol.yaml"
        path.write_text(git("show", f"{registered}:pa_core/protocol.yaml").stdout, encoding="utf-8")
        assert read_protocol(path).cell(cell) == CellConfig.model_validate(record["config"])
