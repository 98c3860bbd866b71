"""Training: several runs of a cell in one pass, resumable at any moment, with an audit log along the way.

Everything random comes from streams named by size, run and block of steps, so a run needs no generator state to resume:
killed and resumed, it ends with the same bytes as a run that was left alone.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from .decoder import Decoder
from .protocol import CellConfig, Optimiser, load_protocol
from .runs import (
    ARTIFACTS,
    REPOSITORY,
    RunError,
    decoder_config,
    finished_runs,
    provenance,
    read_record,
    save_run,
)
from .seeding import torch_generator
from .state import read_state, save_state
from .tasks import Task, make_task

BLOCK = 80  # steps between two points at which a run can resume; divides the steps between audits of every budget
SAVE_SECONDS = 20.0  # a kill costs at most this much work
STATE = REPOSITORY / "_state"


def learning_rate(spec: Optimiser, step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to `final_fraction` of the rate; `step` counts from 0."""
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    progress = (step - spec.warmup_steps) / max(1, steps - spec.warmup_steps)
    return spec.lr * (spec.final_fraction + (1 - spec.final_fraction) * (1 + math.cos(math.pi * progress)) / 2)


def choose_device(name: str = "auto") -> torch.device:
    """`auto` takes CUDA, then MPS, then the CPU.

    Raises:
        ValueError: if a device is asked for that torch cannot use here.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, there in available.items() if there))
    if not available.get(name.split(":")[0], False):
        raise ValueError(f"device {name!r} is not available here; there are {[k for k, v in available.items() if v]}")
    return torch.device(name)


@dataclass
class _Progress:
    """What a resumed run must know beside weights and moments: all of it plain JSON."""

    step: int
    seconds: float
    loss_sum: list[float]  # of each run, since the last audit
    log: list[dict[str, Any]]
    provenance: list[dict[str, Any]]  # of the start, and of each resumption under other code or on another machine


class Trainer:
    """One cell, several runs at once (the grouping); see `train_cell` for the usual way in."""

    def __init__(
        self, config: CellConfig, runs: Sequence[int], *, device: torch.device, compiled: bool, state_path: Path
    ) -> None:
        self.config, self.runs, self.device, self.state_path = config, list(runs), device, state_path
        self.grouping = {"runs": self.runs, "compiled": compiled, "device": device.type, "config_hash": config.hash}
        self.decoder = Decoder(decoder_config(config), len(self.runs))
        kind = "critic" if config.signal == "critic" else "actor"
        generators = [torch_generator("init", kind, config.n_states, r, root=config.root_seed) for r in self.runs]
        self.decoder.initialise(generators).to(device)
        self.task: Task = make_task(config, self.runs, device)
        self.optimiser = torch.optim.AdamW(
            self.decoder.parameters(),
            lr=config.optimiser.lr,
            betas=tuple(config.optimiser.betas),
            weight_decay=config.optimiser.weight_decay,
            fused=device.type != "mps",
        )
        self._loss = torch.compile(self.task.loss) if compiled else self.task.loss
        self.progress = _Progress(0, 0.0, [0.0] * len(self.runs), [], [provenance(device)])
        if state_path.exists():
            self._resume()

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        """One optimiser step on a batch ``[G, B, ...]``; returns each run's loss ``[G]``."""
        rate = learning_rate(self.config.optimiser, self.progress.step, self.config.budget.steps)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.zero_grad()
        loss = self._loss(self.decoder, batch)
        loss.sum().backward()  # the runs share no weight, so each gets its own gradient
        self.optimiser.step()
        self.progress.step += 1
        return loss.detach()

    def train(self, *, until: int | None = None, show_progress: bool = True) -> None:
        """Train to the end of the budget (or to step `until`, a multiple of the block), saving state along the way."""
        budget, p = self.config.budget, self.progress
        end = budget.steps if until is None else min(until, budget.steps)
        saved = time.monotonic()
        bar = tqdm(total=budget.steps, initial=p.step, desc=self.config.name, unit="step", disable=not show_progress)
        with bar:
            while p.step < end:
                started, before = time.monotonic(), p.step
                block = self.task.block(p.step // BLOCK, BLOCK, budget.batch)
                losses = torch.zeros(len(self.runs), device=self.device)
                for i in range(min(BLOCK, end - before)):
                    losses += self.step({name: x[i] for name, x in block.items()})
                p.loss_sum = [a + b for a, b in zip(p.loss_sum, losses.tolist(), strict=True)]
                p.seconds += time.monotonic() - started
                self._audit_if_due(before)
                bar.update(p.step - before)
                bar.set_postfix(loss=f"{losses.mean().item() / (p.step - before):.4g}")
                if time.monotonic() - saved > SAVE_SECONDS or p.step >= end:
                    self._save()
                    saved = time.monotonic()

    def _audit_if_due(self, before: int) -> None:
        p, steps, points = self.progress, self.config.budget.steps, self.config.audit.points
        if p.step * points // steps == before * points // steps:
            return
        since = p.step - (p.log[-1]["step"] if p.log else 0)
        measured = self.task.audit(self.decoder)
        p.log.append({"step": p.step, "loss": [x / since for x in p.loss_sum], **measured})
        p.loss_sum = [0.0] * len(self.runs)

    def _moments(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.decoder.named_parameters():
            tensors[f"weight.{name}"] = parameter.detach()
            for key, value in self.optimiser.state[parameter].items():
                tensors[f"{key}.{name}"] = value
        return tensors

    def _save(self) -> None:
        save_state(self.state_path, self._moments(), {"grouping": self.grouping, "progress": vars(self.progress)})

    def _resume(self) -> None:
        tensors, state = read_state(self.state_path)
        if state["grouping"] != self.grouping:
            raise RunError(
                f"{self.state_path}: began as {state['grouping']}, cannot go on as {self.grouping}; "
                "a run resumes in the grouping in which it started (delete the file to start again)"
            )
        here = self.progress.provenance[0]
        self.progress = _Progress(**state["progress"])
        if here != self.progress.provenance[-1]:
            self.progress.provenance.append(here)
        if not self.progress.step:
            return
        with torch.no_grad():
            for name, parameter in self.decoder.named_parameters():
                parameter.copy_(tensors[f"weight.{name}"])
                self.optimiser.state[parameter] = {
                    key: tensors[f"{key}.{name}"].to(self.device if key != "step" else "cpu")
                    for key in ("step", "exp_avg", "exp_avg_sq")
                }

    def save_runs(self, out: Path) -> None:
        """Write each finished run of the group to `out`, then drop the training state."""
        p = self.progress
        for g, run in enumerate(self.runs):
            log = [{k: v[g] if isinstance(v, list) else v for k, v in entry.items()} for entry in p.log]
            record = {
                "cell": self.config.name,
                "run": run,
                "config": self.config.model_dump(mode="json"),
                "config_hash": self.config.hash,
                "n_parameters": self.decoder.n_parameters,
                "steps": p.step,
                "grouping": self.grouping,
                "wall_seconds_of_group": round(p.seconds, 1),
                "provenance": p.provenance,
                "log": log,
            }
            weights = {name: t.detach()[g : g + 1] for name, t in self.decoder.named_parameters()}
            if run not in finished_runs(self.config.name, out):
                save_run(self.config.name, run, weights, record, out)
        self.state_path.unlink(missing_ok=True)


def parse_runs(text: str) -> list[int]:
    """Run numbers as the command line writes them: ``"0-2,4"`` is [0, 1, 2, 4].

    Raises:
        ValueError: for anything else.
    """
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
            raise ValueError(f"runs {text!r} can't be read; write 0, 0-4 or 0,2")
        numbers += range(int(first), int(last or first) + 1)
    return list(dict.fromkeys(numbers))


def check_request(
    cell: str, runs: Sequence[int] | None, device: str
) -> tuple[CellConfig, list[int], torch.device]:
    """The cell's configuration, the runs asked for (all if None) and the device; raises as `train_cell` does."""
    protocol = load_protocol()
    config, registered = protocol.cell(cell), range(protocol.cells[cell])
    wanted = list(registered if runs is None else runs)
    if unknown := [r for r in wanted if r not in registered]:
        raise ValueError(f"{cell} has runs 0-{registered[-1]} in the protocol, not {unknown}")
    return config, wanted, choose_device(device)


def train_cell(
    cell: str,
    runs: Sequence[int] | None = None,
    *,
    device: str = "auto",
    compiled: bool = False,
    out: Path = ARTIFACTS,
    state: Path = STATE,
    show_progress: bool = True,
) -> list[int]:
    """Train the missing runs of a registered cell and write them under `out`.

    Args:
        cell: a name of the protocol, e.g. ``policy_attention_s4``.
        runs: run numbers; all that the protocol registers if not given.
        device: ``auto``, ``cpu``, ``cuda`` or ``mps``.
        compiled: use `torch.compile` for the loss (slower start, faster steps).
        out: artefact folder; finished runs in it are left alone.
        state: folder of the resumable state; a killed call goes on from there when it is called again.
        show_progress: show a bar with loss, steps a second and time left.

    Returns:
        the runs that were trained by this call; empty if nothing was missing.

    Raises:
        KeyError, ValueError: unknown cell, run or device.
        RunError: a damaged state, or one that began in another grouping.
    """
    config, wanted, chosen = check_request(cell, runs, device)
    missing = [r for r in wanted if r not in finished_runs(cell, out)]
    if not missing:
        return []
    if chosen.type == "cpu":
        torch.set_flush_denormal(True)  # denormal moments of AdamW cost up to ten times the step
    label = "-".join(map(str, missing))
    trainer = Trainer(config, missing, device=chosen, compiled=compiled, state_path=state / cell / f"{label}.safetensors")
    trainer.train(show_progress=show_progress)
    trainer.save_runs(out)
    return missing


def retrain(cell: str, out: str | Path, *, device: str = "auto") -> list[dict[str, Any]]:
    """Train every registered run of a cell again in a folder of its own; returns the records, in order.

    Args:
        cell: see `train_cell`.
        out: folder, from the top of the repository if it is relative; a call that was killed goes on from there.
        device: see `train_cell`.

    Raises:
        ValueError: if `out` is the folder of the committed runs or in it, and as `train_cell`.
    """
    folder = (REPOSITORY / out).resolve()
    if folder.is_relative_to(ARTIFACTS.resolve()):
        raise ValueError(f"out = {str(out)!r} holds the committed runs, which are never overwritten; name another folder")
    train_cell(cell, device=device, out=folder, state=folder / "_state", show_progress=False)
    return [read_record(cell, run, folder) for run in finished_runs(cell, folder)]
