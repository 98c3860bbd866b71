"""Histories of a source learner, and the training of the Transformer that distils them."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from tqdm import tqdm

from ..contexts import environment_mdps
from ..online import make_draws, run_online
from ..protocol import Environment
from ..runs import ARTIFACTS, provenance, save_run
from ..seeding import rng_for, torch_generator
from ..state import save_state
from ..tabular import BatchActorCritic
from ..train import STATE, learning_rate
from ..validated import Count, Frozen, Positive
from .algorithm_distillation import Distiller, DistillerSizes, Tokens
from .store import load_state, load_tensors

BLOCK = 20  # steps between two points at which a run can resume
SAVE_SECONDS = 60.0  # a kill costs at most this much work, and a block



class DistillationConfig(Frozen):
    """One cell.  The source is the batch actor-critic at rates alpha and beta; the optimiser is AdamW with a cosine."""

    n_states: Count
    root_seed: int
    environment: Environment
    alpha: Positive
    beta: Positive
    discounted_actor: bool = False
    rounds: Count = 50
    per_round: Count = 20
    histories: Count = 2000
    held_out: Count = 128
    context: Count = 800
    width: Count = 144
    n_layer: Count = 4
    n_head: Count = 4
    d_ffn: Count = 576
    steps: Count = 2000
    batch: Count = 8
    lr: Positive = 1e-3
    betas: Annotated[list[float], Field(min_length=2, max_length=2)] = [0.9, 0.99]
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    warmup_steps: Count = 200
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    clip: Positive = 1.0
    points: Count = 20  # audits along training; nothing is selected by them

    @property
    def name(self) -> str:
        return f"algorithm_distillation_s{self.n_states}"

    @property
    def sizes(self) -> DistillerSizes:
        positions = self.rounds * self.per_round
        A = self.environment.n_actions
        return DistillerSizes(self.n_states, A, self.width, self.n_layer, self.n_head, self.d_ffn, positions)


@dataclass(frozen=True)
class Histories:
    """Source histories ``[N, T]``: s, a int64, r float32, and the source's behaviour entropy at every step (nats)."""

    s: Tensor
    a: Tensor
    r: Tensor
    entropy: Tensor


def make_histories(config: DistillationConfig, n: int, *name: str | int) -> Histories:
    """`n` histories of the source, each on an MDP of its own; the same name gives the same ones."""
    mdp = environment_mdps(config.environment, n, config.n_states, rng_for(*name, "mdps", root=config.root_seed))
    draws = make_draws((n,), config.rounds * config.per_round, rng_for(*name, "draws", root=config.root_seed))
    source = BatchActorCritic(config.alpha, config.beta, discounted_actor=config.discounted_actor)
    record = run_online(mdp, source, rounds=config.rounds, per_round=config.per_round, draws=draws)
    log_pi = record.log_pi[:-1]  # [rounds, n, S, A]: what was played in every round
    entropy = torch.special.entr(log_pi.exp()).sum(-1)
    states = record.steps.s.unflatten(-1, (config.rounds, config.per_round))  # [n, rounds, per_round]
    played = entropy.transpose(0, 1).gather(-1, states)
    return Histories(record.steps.s, record.steps.a, record.steps.r.to(torch.float32), played.flatten(1))


def relabelled(s: Tensor, a: Tensor, n_states: int, n_actions: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Sequences ``[B, T]`` with states and actions renamed by a random permutation of each sequence's own."""
    out = []
    for x, k in ((s, n_states), (a, n_actions)):
        names = torch.from_numpy(rng.permuted(np.tile(np.arange(k), (len(x), 1)), axis=1))
        out.append(names.gather(1, x))
    return out[0], out[1]


def nll(model: Distiller, s: Tensor, a: Tensor, r: Tensor) -> Tensor:
    """-log p(a_t | history, s_t), ``[B, T]``."""
    return F.cross_entropy(model(Tokens.of(s, a, r)).mT, a, reduction="none")


class DistillationTrainer:
    """One run; killed at any moment and started again on the same machine, it ends with the same bytes."""

    def __init__(self, config: DistillationConfig, run: int, state_path: Path, device: str = "cpu") -> None:
        if config.context >= config.rounds * config.per_round:
            raise ValueError(f"a context of {config.context} needs longer histories than {config.rounds * config.per_round}")
        self.config, self.run, self.state_path, self.device = config, run, state_path, torch.device(device)
        self.model = Distiller(config.sizes).initialise(torch_generator("init", config.name, run, root=config.root_seed))
        self.model.to(self.device)
        options = dict(lr=config.lr, betas=tuple(config.betas), weight_decay=config.weight_decay)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), **options)
        self.histories = make_histories(config, config.histories, "train", config.name, run)
        self.held_out = make_histories(config, config.held_out, "validation", config.name)
        self.progress: dict[str, Any] = {"step": 0, "seconds": 0.0, "loss_sum": 0.0, "log": []}
        self._identity = {"cell": config.name, "run": run, "config_hash": config.hash, "device": self.device.type}
        self._provenance = [provenance(self.device)]
        self._resume()

    def _batches(self, block: int):
        """The batches of a block of steps: s, a, r ``[B, context + 1]``, renamed at random."""
        c = self.config
        rng = rng_for("batches", c.name, self.run, block, root=c.root_seed)
        for _ in range(BLOCK):
            index = torch.from_numpy(rng.integers(c.histories, size=c.batch))
            s, a, r = (x[index, : c.context + 1] for x in (self.histories.s, self.histories.a, self.histories.r))
            s, a = relabelled(s, a, c.n_states, c.environment.n_actions, rng)
            yield tuple(x.to(self.device) for x in (s, a, r))

    def train(self, *, until: int | None = None, show_progress: bool = True) -> None:
        """Train to the end, or to step `until` (a multiple of the block)."""
        c, p = self.config, self.progress
        end, saved = c.steps if until is None else min(until, c.steps), time.monotonic()
        bar = tqdm(total=c.steps, initial=p["step"], desc=f"{c.name} run {self.run}", disable=not show_progress)
        with bar:
            while p["step"] < end:
                started, before = time.monotonic(), p["step"]
                for batch in self._batches(before // BLOCK):
                    if p["step"] >= c.steps:
                        break
                    p["loss_sum"] += self._step(batch)
                p["seconds"] += time.monotonic() - started
                if p["step"] * c.points // c.steps != before * c.points // c.steps:
                    self._audit()
                bar.update(p["step"] - before)
                if time.monotonic() - saved > SAVE_SECONDS or p["step"] >= end:
                    self._save()
                    saved = time.monotonic()

    def _step(self, batch: tuple[Tensor, Tensor, Tensor]) -> float:
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(self.config, self.progress["step"], self.config.steps)  # type: ignore[arg-type]
        self.optimiser.zero_grad()
        loss = nll(self.model, *batch).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimiser.step()
        self.progress["step"] += 1
        return loss.item()

    def _audit(self) -> None:
        p = self.progress
        since = p["step"] - (p["log"][-1]["step"] if p["log"] else 0)
        entry = {"step": p["step"], "loss": p["loss_sum"] / since} | self.held_out_nll()
        p["log"].append(entry)
        p["loss_sum"] = 0.0

    def held_out_nll(self) -> dict[str, float]:
        """Mean NLL on histories of other MDPs, and the source's own entropy on them, over the context."""
        measured = held_out_nll(self.model, self.held_out, self.config)
        return {"nll": measured, "source_entropy": self.held_out.entropy[:, : self.config.context + 1].mean().item()}

    def _save(self) -> None:
        tensors = {f"weight.{name}": p.cpu() for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            tensors |= {f"{key}.{name}": value.cpu() for key, value in self.optimiser.state[p].items()}
        save_state(self.state_path, tensors, self._identity | {"progress": self.progress, "provenance": self._provenance})

    def _resume(self) -> None:
        loaded = load_state(self.state_path, self._identity)
        if loaded is None:
            return
        tensors, state = loaded
        self.progress, here = state["progress"], self._provenance[0]
        self._provenance = state["provenance"] + ([here] if here != state["provenance"][-1] else [])
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(tensors[f"weight.{name}"])
                self.optimiser.state[p] = {
                    key: tensors[f"{key}.{name}"].to(self.device if key != "step" else "cpu")
                    for key in ("step", "exp_avg", "exp_avg_sq")
                }

    def save_run(self, out: Path) -> None:
        """Write the finished run (the last step's weights, never a selected one) and drop the training state."""
        c = self.config
        record = self._identity | {
            "config": c.model_dump(mode="json"),
            "n_parameters": self.model.n_parameters,
            "steps": self.progress["step"],
            "tokens": self.progress["step"] * c.batch * (c.context + 1),
            "wall_seconds": round(self.progress["seconds"], 1),
            "provenance": self._provenance,
            "log": self.progress["log"],
        }
        weights = {name: p.detach().cpu() for name, p in self.model.named_parameters()}
        save_run(c.name, self.run, weights, record, out)
        self.state_path.unlink(missing_ok=True)


@torch.no_grad()
def held_out_nll(model: Distiller, histories: Histories, config: DistillationConfig, *, chunk: int = 16) -> float:
    """Mean -log p of the source's actions over the context of histories that the model has not seen."""
    device, cut = next(model.parameters()).device, config.context + 1
    total = 0.0
    for first in range(0, len(histories.s), chunk):
        part = (x[first : first + chunk, :cut].to(device) for x in (histories.s, histories.a, histories.r))
        total += nll(model, *part).sum().item()
    return total / histories.s[:, :cut].numel()


def train_distillation(
    config: DistillationConfig,
    run: int,
    *,
    device: str = "cpu",
    out: Path = ARTIFACTS,
    state: Path = STATE,
    show_progress: bool = True,
) -> None:
    """Train one run and write it under `out`; a killed call goes on where it was when it is called again."""
    if device == "cpu":
        torch.set_flush_denormal(True)
    trainer = DistillationTrainer(config, run, state / config.name / f"{run}.safetensors", device)
    trainer.train(show_progress=show_progress)
    trainer.save_run(out)


def load_distiller(config: DistillationConfig, run: int, root: Path = ARTIFACTS) -> Distiller:
    """A finished run's network, verified.

    Raises:
        RunError: for a missing or damaged run, or one of another configuration.
    """
    model = Distiller(config.sizes)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    tensors, _ = load_tensors(config.name, run, root, config.hash, shapes)
    model.load_state_dict(tensors)
    return model.requires_grad_(False).eval()
