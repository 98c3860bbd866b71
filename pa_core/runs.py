"""Finished training runs: weights with provenance, written atomically, verified when loaded, found by name.

A run of a cell is two files, ``artifacts/<cell>/<run>.safetensors`` and ``.json``.  Nothing here can execute what it reads:
no pickle, no YAML tags.
"""

import hashlib
import json
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from .decoder import Decoder, DecoderConfig
from .files import write_atomically
from .learned import LearnedActor, LearnedCritic
from .protocol import PATH as PROTOCOL_PATH
from .protocol import CellConfig, load_protocol
from .tokens import TokenLayout

REPOSITORY = Path(__file__).resolve().parents[1]
ARTIFACTS = REPOSITORY / "artifacts"


class RunError(ValueError):
    """A run is missing, damaged or not the one that was asked for; the message names the file."""


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None  # a copy without history, or no git: the record says null


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def provenance(device: torch.device) -> dict[str, Any]:
    """Where a run comes from: commits, versions, device and threads."""
    protocol = PROTOCOL_PATH.read_bytes()
    changed = _git("status", "--porcelain", "--", "pa_core")
    return {
        "source_commit": _git("rev-parse", "HEAD"),
        "source_modified": None if changed is None else bool(changed),
        "protocol_commit": _git("log", "-1", "--format=%H", "--", str(PROTOCOL_PATH)),
        "protocol_sha256": hashlib.sha256(protocol).hexdigest(),
        "versions": {name: version(name) for name in ("torch", "numpy", "safetensors")} | {
            "python": platform.python_version()
        },
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}: {_cpu_name()}",
        "threads": torch.get_num_threads(),
    }


def decoder_config(config: CellConfig) -> DecoderConfig:
    """Sizes of the cell's network."""
    layout = TokenLayout(config.n_states, config.environment.n_actions)
    n_out = 2 if config.signal == "critic" else config.environment.n_actions
    return DecoderConfig(layout.width, n_out, **config.model.model_dump())


def run_paths(cell: str, run: int, root: Path = ARTIFACTS) -> tuple[Path, Path]:
    """The weights and the record of a run."""
    return root / cell / f"{run}.safetensors", root / cell / f"{run}.json"


def finished_runs(cell: str, root: Path = ARTIFACTS) -> list[int]:
    """Numbers of the runs of a cell that are complete on disk, in order."""
    numbers = (int(path.stem) for path in (root / cell).glob("*.json") if path.stem.isdigit())
    return sorted(run for run in numbers if run_paths(cell, run, root)[0].exists())


def save_run(cell: str, run: int, tensors: dict[str, Tensor], record: dict[str, Any], root: Path) -> None:
    """Write a finished run, weights first, then the record that vouches for them.

    Raises:
        RunError: if the run exists already; a finished run is never overwritten.
    """
    weights_path, record_path = run_paths(cell, run, root)
    for path in (weights_path, record_path):
        if path.exists() and record_path.exists():
            raise RunError(f"{path} exists already; a finished run is never overwritten (use another --out)")
    data = safetensors.torch.save({name: t.contiguous().cpu() for name, t in tensors.items()})
    write_atomically(weights_path, data)
    record = record | {"weights_sha256": hashlib.sha256(data).hexdigest()}
    write_atomically(record_path, (json.dumps(record, indent=1) + "\n").encode())


def read_record(cell: str, run: int, root: Path = ARTIFACTS, *, config: CellConfig | None = None) -> dict[str, Any]:
    """The JSON record of a run, checked against the configuration that the protocol has for its cell.

    Raises:
        RunError: if the file is missing or damaged, or was made under another configuration; the message names the file.
    """
    path = run_paths(cell, run, root)[1]
    config = config or load_protocol().cell(cell)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        stored = CellConfig.model_validate(record["config"])
    except FileNotFoundError:
        raise RunError(f"{path}: no such run; finished runs of {cell}: {finished_runs(cell, root) or 'none'}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path}: damaged record ({type(error).__name__}: {str(error).splitlines()[0]})") from None
    if record.get("config_hash") != stored.hash or stored.hash != config.hash:
        mine, theirs = config.model_dump(mode="json"), stored.model_dump(mode="json")
        keys = [key for key in mine if mine[key] != theirs[key]] or ["config_hash"]
        raise RunError(f"{path}: made under another configuration of {cell}; differs in {', '.join(keys)}")
    return record


def load_decoder(
    cell: str, run: int, root: Path = ARTIFACTS, *, config: CellConfig | None = None, device: str | torch.device = "cpu"
) -> Decoder:
    """The network of a run, verified against its record.

    Raises:
        RunError: for a missing file, a flipped byte, a wrong shape or dtype, or a configuration mismatch.
    """
    config = config or load_protocol().cell(cell)
    record = read_record(cell, run, root, config=config)
    path = run_paths(cell, run, root)[0]
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None
    if hashlib.sha256(data).hexdigest() != record.get("weights_sha256"):
        raise RunError(f"{path}: checksum differs from the one in {run}.json; the file is damaged or was replaced")
    try:
        tensors = safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise RunError(f"{path}: not a safetensors file: {error}") from None
    decoder = Decoder(decoder_config(config))
    expected = {name: tuple(p.shape) for name, p in decoder.named_parameters()}
    if (found := {name: tuple(t.shape) for name, t in tensors.items()}) != expected:
        wrong = sorted(name for name in expected | found if expected.get(name) != found.get(name))
        raise RunError(f"{path}: weights of another shape: {', '.join(wrong[:3])}")
    decoder.load_state_dict(tensors)
    return decoder.requires_grad_(False).to(device)


def make_actor(decoder: Decoder, config: CellConfig) -> LearnedActor:
    """The closed-loop callable of an actor's network (one run) under its cell's configuration."""
    layout = TokenLayout(config.n_states, config.environment.n_actions)
    return LearnedActor(
        decoder,
        layout,
        config.contexts.log_pi_clamp,
        raw=config.signal == "policy_attention_raw",
        increment=config.signal == "policy_attention_increment",
    )


def load_actor(cell: str, run: int, root: Path = ARTIFACTS, *, device: str | torch.device = "cpu") -> LearnedActor:
    """A trained actor by name, e.g. ``load_actor("policy_attention_s4", 0)``: a callable for `control.closed_loop`.

    Raises:
        RunError: see `load_decoder`; also if the cell is a critic's.
    """
    config = load_protocol().cell(cell)
    if config.signal == "critic":
        raise RunError(f"{cell} is a critic; use load_critic")
    return make_actor(load_decoder(cell, run, root, config=config, device=device), config)


def load_critic(cell: str, run: int, root: Path = ARTIFACTS, *, device: str | torch.device = "cpu") -> LearnedCritic:
    """A trained critic by name, e.g. ``load_critic("critic_s4", 0)``: a callable for `control.closed_loop`."""
    config = load_protocol().cell(cell)
    if config.critic is None:
        raise RunError(f"{cell} is an actor; use load_actor")
    layout = TokenLayout(config.n_states, config.environment.n_actions)
    decoder = load_decoder(cell, run, root, config=config, device=device)
    return LearnedCritic(decoder, layout, config.critic.samples_per_pair)
