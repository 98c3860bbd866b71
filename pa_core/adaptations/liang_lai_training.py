"""Training of the linear-attention actor-critic by teacher mimicking.

A chain is one MDP with a learner that the teacher moves (the source's teacher forcing, at the source's rates); every window
of transitions under the learner's policy is one example: the block must return the teacher's unit-rate increments.
Only P12 and V21 are trained, since nothing else ever gets a gradient (the source's Proposition 3.1).
"""

import math
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from tqdm import tqdm

from ..contexts import environment_mdps
from ..online import Steps, Trajectories, make_draws, rows
from ..protocol import Environment
from ..runs import ARTIFACTS, provenance, save_run
from ..seeding import rng_for
from ..state import save_state
from ..tabular import actor_critic_increments, explored
from ..train import STATE
from ..validated import Count, Frozen, Positive
from .liang_lai import Block, Shape, assemble, learner_column, transition_columns
from .store import load_state, load_tensors


class LiangLaiConfig(Frozen):
    """One cell: `blocks` times `chains` MDPs, `windows` a chain, batches of `batch` windows of `per_round` transitions."""

    n_states: Count
    root_seed: int
    environment: Environment
    per_round: Count = 20
    blocks: Count = 20
    chains: Count = 512
    windows: Count = 200
    batch: Count = 256
    lr: Positive = 1e-2
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    init_gain: Positive = 0.1
    alpha: Positive = 0.2  # rates at which the teacher moves the chains' learners: the source's own
    beta: Positive = 0.8
    start_range: Positive = 1.0  # first learners ~ U[-start_range, start_range]
    exploration: Annotated[float, Field(ge=0, le=1)] = 0.1

    @property
    def name(self) -> str:
        return f"liang_lai_s{self.n_states}"

    @property
    def shape(self) -> Shape:
        return Shape(self.n_states, self.environment.n_actions)

    @property
    def steps(self) -> int:
        """Optimiser steps of a run."""
        return self.blocks * self.windows * (self.chains // self.batch)


def initial_weights(config: LiangLaiConfig, run: int) -> tuple[Tensor, Tensor]:
    """P12 and V21, Xavier-normal with the configured gain, float32."""
    shape, rng = config.shape, rng_for("init", config.name, run, root=config.root_seed)
    sizes = ((shape.transition, shape.learner), (shape.actor + shape.critic, shape.transition))
    weights = (rng.normal(size=s) * config.init_gain * math.sqrt(2 / sum(s)) for s in sizes)
    return tuple(torch.from_numpy(x).to(torch.float32) for x in weights)  # type: ignore[return-value]


def training_windows(config: LiangLaiConfig, run: int, block: int):
    """The windows of a block of chains, one after the other: ``(X, learner, target)`` with a leading chain axis, float32."""

    def rng(name: str) -> np.random.Generator:
        return rng_for("train", config.name, name, run, block, root=config.root_seed)

    n, length = config.chains, config.per_round
    mdp = environment_mdps(config.environment, n, config.n_states, rng("mdps"))
    world = Trajectories(mdp, make_draws((n,), config.windows * length, rng("draws")))
    start = rng("start")
    uniform = lambda *size: torch.from_numpy(start.uniform(-config.start_range, config.start_range, size=size))
    w, logits = uniform(n, config.n_states), uniform(*mdp.R.shape)
    for _ in range(config.windows):
        steps = roll(world, explored(logits.log_softmax(-1), config.exploration), length)
        dw, dlogits = actor_critic_increments(w, logits, steps, mdp.gamma)
        X, u = transition_columns(logits, steps, mdp.gamma), learner_column(w, logits)
        yield tuple(x.to(torch.float32) for x in (X, u, torch.cat([dlogits.flatten(-2), dw], -1)))
        w, logits = w + config.beta * dw, logits + config.alpha * dlogits


def roll(world: Trajectories, log_pi: Tensor, n: int) -> Steps:
    """`n` transitions under policies ``[*batch, S, A]``."""
    world.open_round(n)
    return Steps.join([world.step(rows(log_pi, world.state)) for _ in range(n)])


def loss(P12: Tensor, V21: Tensor, X: Tensor, learner: Tensor, target: Tensor) -> Tensor:
    """Mean over windows of 1/2 ||increment - teacher's increment||^2 (the source's loss, at unit rates)."""
    delta = X.mT @ (learner @ P12.T)[..., None]  # [B, n, 1]
    out = (X @ delta)[..., 0] @ V21.T / X.shape[-1]
    return (out - target).square().sum(-1).mean() / 2


class LiangLaiTrainer:
    """One run; killed at any moment and started again, it ends with the same bytes."""

    def __init__(self, config: LiangLaiConfig, run: int, state_path: Path) -> None:
        if config.chains % config.batch:
            raise ValueError(f"batch {config.batch} must divide the {config.chains} chains")
        self.config, self.run, self.state_path = config, run, state_path
        self.P12, self.V21 = (x.requires_grad_() for x in initial_weights(config, run))
        self.optimiser = torch.optim.Adam([self.P12, self.V21], lr=config.lr)
        self.progress: dict[str, Any] = {"block": 0, "seconds": 0.0, "log": []}
        self._identity = {"cell": config.name, "run": run, "config_hash": config.hash}
        self._provenance = [provenance(torch.device("cpu"))]
        self._resume()

    def train(self, *, until: int | None = None, show_progress: bool = True) -> None:
        """Train to the end, or up to block `until`; the state is saved after every block."""
        p, c = self.progress, self.config
        end = c.blocks if until is None else min(until, c.blocks)
        for block in tqdm(range(p["block"], end), desc=f"{c.name} run {self.run}", disable=not show_progress):
            started, total = time.monotonic(), 0.0
            step = block * c.windows * (c.chains // c.batch)
            for window in training_windows(c, self.run, block):
                for i in range(0, c.chains, c.batch):
                    progress = step / c.steps
                    rate = c.final_fraction + (1 - c.final_fraction) * (1 + math.cos(math.pi * progress)) / 2
                    self.optimiser.param_groups[0]["lr"] = c.lr * rate
                    self.optimiser.zero_grad()
                    value = loss(self.P12, self.V21, *(x[i : i + c.batch] for x in window))
                    value.backward()
                    self.optimiser.step()
                    total += value.item()
                    step += 1
            p["block"] = block + 1
            p["seconds"] += time.monotonic() - started
            p["log"].append({"step": step, "loss": total / (c.windows * (c.chains // c.batch))})
            self._save()

    def block(self) -> Block:
        """The weights as they are, with P and V in full."""
        return assemble(self.config.shape, self.P12.detach().clone(), self.V21.detach().clone())

    def _named(self) -> dict[str, Tensor]:
        return {"P12": self.P12, "V21": self.V21}

    def _save(self) -> None:
        tensors: dict[str, Tensor] = dict(self._named())
        for name, parameter in self._named().items():
            tensors |= {f"{key}.{name}": value for key, value in self.optimiser.state[parameter].items()}
        save_state(self.state_path, tensors, self._identity | {"progress": self.progress, "provenance": self._provenance})

    def _resume(self) -> None:
        loaded = load_state(self.state_path, self._identity)
        if loaded is None:
            return
        tensors, state = loaded
        self.progress, here = state["progress"], self._provenance[0]
        self._provenance = state["provenance"] + ([here] if here != state["provenance"][-1] else [])
        with torch.no_grad():
            for name, parameter in self._named().items():
                parameter.copy_(tensors[name])
                moments = {key: tensors[f"{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq")}
                self.optimiser.state[parameter] = moments

    def save_run(self, out: Path) -> None:
        """Write the finished run and drop the training state."""
        c = self.config
        record = self._identity | {
            "config": c.model_dump(mode="json"),
            "n_parameters": c.shape.n_parameters,
            "n_trained": c.shape.n_trained,
            "mdps": c.blocks * c.chains,
            "windows": c.blocks * c.chains * c.windows,
            "steps": c.steps,
            "wall_seconds": round(self.progress["seconds"], 1),
            "provenance": self._provenance,
            "log": self.progress["log"],
        }
        block = self.block()
        save_run(c.name, self.run, {"P": block.P, "V": block.V}, record, out)
        self.state_path.unlink(missing_ok=True)


def train_liang_lai(
    config: LiangLaiConfig, run: int, *, out: Path = ARTIFACTS, state: Path = STATE, show_progress: bool = True
) -> None:
    """Train one run and write it under `out`; a killed call goes on from its last block when it is called again."""
    trainer = LiangLaiTrainer(config, run, state / config.name / f"{run}.safetensors")
    trainer.train(show_progress=show_progress)
    trainer.save_run(out)


def load_liang_lai(config: LiangLaiConfig, run: int, root: Path = ARTIFACTS) -> Block:
    """A finished run's block, verified.

    Raises:
        RunError: for a missing or damaged run, or one of another configuration.
    """
    D = config.shape.width
    tensors, _ = load_tensors(config.name, run, root, config.hash, {"P": (D, D), "V": (D, D)})
    return Block(config.shape, tensors["P"], tensors["V"])
