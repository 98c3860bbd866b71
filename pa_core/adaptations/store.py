"""What the adaptations' trainers share: a resumable state on disk, and finished runs that are verified when loaded."""

import hashlib
import json
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from ..runs import RunError, finished_runs, run_paths
from ..state import read_state


def load_state(path: Path, identity: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The state saved last, or None if there is none.

    Args:
        path: the file.
        identity: entries that the state must have, e.g. run and configuration.

    Raises:
        RunError: for a damaged file, or a state of another run or configuration.
    """
    if not path.exists():
        return None
    tensors, state = read_state(path)
    if found := {k: state.get(k) for k, v in identity.items() if state.get(k) != v}:
        raise RunError(f"{path}: a state of another run: {found}; delete it to start again")
    return tensors, state


def load_tensors(
    cell: str, run: int, root: Path, config_hash: str, shapes: dict[str, tuple[int, ...]]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Weights and record of a finished run, verified.

    Raises:
        RunError: for a missing or damaged file, another configuration or other shapes; the message names the file.
    """
    weights_path, record_path = run_paths(cell, run, root)
    try:
        record = json.loads(record_path.read_text(encoding="utf-8"))
        found = record["config_hash"]
    except FileNotFoundError:
        have = finished_runs(cell, root) or "none"
        raise RunError(f"{record_path}: no such run; finished runs of {cell}: {have}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise RunError(f"{record_path}: damaged record ({type(error).__name__})") from None
    if found != config_hash:
        raise RunError(f"{record_path}: made under another configuration of {cell}")
    try:
        data = weights_path.read_bytes()
    except OSError as error:
        raise RunError(f"{weights_path}: cannot be read: {error.strerror}") from None
    if hashlib.sha256(data).hexdigest() != record.get("weights_sha256"):
        raise RunError(f"{weights_path}: checksum differs from the one in {run}.json; the file is damaged or was replaced")
    tensors = safetensors.torch.load(data)
    if {k: tuple(t.shape) for k, t in tensors.items()} != shapes:
        raise RunError(f"{weights_path}: weights of another shape")
    return tensors, record
