"""The registered protocol: validated, frozen models read from ``protocol.yaml``; an unknown key is an error."""

from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from .validated import Count, Discount, Frozen, Positive, Probability, read_model

PATH = Path(__file__).with_name("protocol.yaml")
SIGNALS = (
    "policy_attention",
    "pmd_target",
    "reward_only",
    "policy_attention_increment",
    "policy_attention_raw",
    "critic",
)


class Environment(Frozen):
    n_actions: Count
    gamma: Discount
    concentration: Positive
    reward_range: list[float] = Field(min_length=2, max_length=2)


class Contexts(Frozen):
    n_mdps: Count
    n_contexts: Count
    rounds: Count
    uniform_start: Probability
    noise_probability: Probability
    noise_sd: Annotated[float, Field(ge=0)]
    eta_range: list[Positive] = Field(min_length=2, max_length=2)
    log_pi_clamp: Annotated[float, Field(lt=0)]


class CriticSampling(Frozen):
    samples_per_pair: Count


class Model(Frozen):
    d_model: Count
    n_layer: Count
    n_head: Count
    d_head: Count
    d_ffn: Count


class Optimiser(Frozen):
    lr: Positive
    betas: list[Probability] = Field(min_length=2, max_length=2)
    weight_decay: Annotated[float, Field(ge=0)]
    warmup_steps: Count
    final_fraction: Probability


class Budget(Frozen):
    steps: Count
    batch: Count


class Budgets(Frozen):
    actor: Budget
    increment: Budget
    critic: Budget


class Audit(Frozen):
    n_mdps: Count
    n_contexts: Count
    points: Count


class Deployment(Frozen):
    eta: Positive
    horizons: list[Count]
    stress_horizon: Count
    n_test_mdps: Count
    floor: Annotated[float, Field(ge=0, lt=1)]
    floor_ablation: Annotated[float, Field(gt=0, lt=1)]


class SparseTransitions(Frozen):
    concentration: Positive


class SparseRewards(Frozen):
    reward_rate: Annotated[float, Field(gt=0, le=1)]


class LongerHorizon(Frozen):
    gamma: Discount
    stress_gamma: Discount


class Ring(Frozen):
    slip: Probability


class Shifts(Frozen):
    sparse_transitions: SparseTransitions
    sparse_rewards: SparseRewards
    longer_horizon: LongerHorizon
    ring: Ring


class Criterion(Frozen):
    horizon: Count
    max_ratio: Positive


class Criteria(Frozen):
    repeated_control: Criterion
    shifts: Criterion


class Analysis(Frozen):
    replicates: Count
    level: Annotated[float, Field(gt=0, lt=1)]


class CellConfig(Frozen):
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


class Protocol(Frozen):
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
    protocol = read_model(path, Protocol.model_validate, "sections")
    try:
        for name in protocol.cells:
            _split(name)
    except ValueError as error:
        raise ValueError(f"{path}: cells: {error}") from None
    return protocol


@cache
def load_protocol() -> Protocol:
    """The project's own protocol, ``pa_core/protocol.yaml``."""
    return read_protocol(PATH)
