"""The registered protocol: validated, frozen models read from ``protocol.yaml``; an unknown key is an error."""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

PATH = Path(__file__).with_name("protocol.yaml")
SIGNALS = (
    "policy_attention",
    "pmd_target",
    "reward_only",
    "policy_attention_increment",
    "policy_attention_raw",
    "critic",
)

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
Discount = Annotated[float, Field(ge=0, lt=1)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Environment(_Frozen):
    n_actions: Count
    gamma: Discount
    concentration: Positive
    reward_range: list[float] = Field(min_length=2, max_length=2)


class Contexts(_Frozen):
    n_mdps: Count
    n_contexts: Count
    rounds: Count
    uniform_start: Probability
    noise_probability: Probability
    noise_sd: Annotated[float, Field(ge=0)]
    eta_range: list[Positive] = Field(min_length=2, max_length=2)
    log_pi_clamp: Annotated[float, Field(lt=0)]


class CriticSampling(_Frozen):
    samples_per_pair: Count


class Model(_Frozen):
    d_model: Count
    n_layer: Count
    n_head: Count
    d_head: Count
    d_ffn: Count


class Optimiser(_Frozen):
    lr: Positive
    betas: list[Probability] = Field(min_length=2, max_length=2)
    weight_decay: Annotated[float, Field(ge=0)]
    warmup_steps: Count
    final_fraction: Probability


class Budget(_Frozen):
    steps: Count
    batch: Count


class Budgets(_Frozen):
    actor: Budget
    increment: Budget
    critic: Budget


class Audit(_Frozen):
    n_mdps: Count
    n_contexts: Count
    points: Count


class Deployment(_Frozen):
    eta: Positive
    horizons: list[Count]
    stress_horizon: Count
    n_test_mdps: Count
    floor: Annotated[float, Field(ge=0, lt=1)]
    floor_ablation: Annotated[float, Field(gt=0, lt=1)]


class SparseTransitions(_Frozen):
    concentration: Positive


class SparseRewards(_Frozen):
    reward_rate: Annotated[float, Field(gt=0, le=1)]


class LongerHorizon(_Frozen):
    gamma: Discount
    stress_gamma: Discount


class Ring(_Frozen):
    slip: Probability


class Shifts(_Frozen):
    sparse_transitions: SparseTransitions
    sparse_rewards: SparseRewards
    longer_horizon: LongerHorizon
    ring: Ring


class Criterion(_Frozen):
    horizon: Count
    max_ratio: Positive


class Criteria(_Frozen):
    repeated_control: Criterion
    shifts: Criterion


class Analysis(_Frozen):
    replicates: Count
    level: Annotated[float, Field(gt=0, lt=1)]


class CellConfig(_Frozen):
    """Everything that determines the runs of one cell; its hash goes with each run."""

    signal: str
    n_states: Count
    root_seed: int
    environment: Environment
    contexts: Contexts
    critic: CriticSampling | None
    model: Model
    optimiser: Optimiser
    budget: Budget
    audit: Audit

    @property
    def name(self) -> str:
        return f"{self.signal}_s{self.n_states}"

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical JSON of this configuration."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


class Protocol(_Frozen):
    version: Count
    root_seed: int
    environment: Environment
    contexts: Contexts
    critic: CriticSampling
    model: Model
    optimiser: Optimiser
    budgets: Budgets
    audit: Audit
    cells: dict[str, Count]
    deployment: Deployment
    shifts: Shifts
    criteria: Criteria
    analysis: Analysis

    def cell(self, name: str) -> CellConfig:
        """The resolved configuration of cell ``<signal>_s<S>``.

        Raises:
            KeyError: if the protocol registers no such cell; the message lists those it has.
        """
        if name not in self.cells:
            raise KeyError(f"no cell {name!r} in the protocol; it has {', '.join(self.cells)}")
        signal, n_states = _split(name)
        kind = {"critic": "critic", "policy_attention_increment": "increment"}.get(signal, "actor")
        return CellConfig(
            signal=signal,
            n_states=n_states,
            root_seed=self.root_seed,
            environment=self.environment,
            contexts=self.contexts,
            critic=self.critic if kind == "critic" else None,  # an actor's hash must not depend on the critic's draws
            model=self.model,
            optimiser=self.optimiser,
            budget=getattr(self.budgets, kind),
            audit=self.audit,
        )


def _split(name: str) -> tuple[str, int]:
    signal, _, size = name.rpartition("_s")
    if signal not in SIGNALS or not size.isdigit() or int(size) < 1:
        raise ValueError(f"cell {name!r} is not <signal>_s<S> with a signal among {', '.join(SIGNALS)}")
    return signal, int(size)


def read_protocol(path: Path) -> Protocol:
    """Read and validate a protocol file.

    Raises:
        ValueError: one line a problem, each naming the file and the key.
    """
    try:
        raw: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: cannot be read as YAML: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: must hold a mapping of sections")
    try:
        protocol = Protocol.model_validate(raw)
        for name in protocol.cells:
            _split(name)
    except ValidationError as error:
        lines = (f"{path}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ValueError("\n".join(lines)) from None
    except ValueError as error:
        raise ValueError(f"{path}: cells: {error}") from None
    return protocol


@cache
def load_protocol() -> Protocol:
    """The project's own protocol, ``pa_core/protocol.yaml``."""
    return read_protocol(PATH)
