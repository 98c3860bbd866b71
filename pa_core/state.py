"""The resumable state of a training run: tensors and plain JSON in one file, written atomically; no pickle."""

import json
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from .files import write_atomically
from .runs import RunError


def save_state(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write tensors and plain JSON as one file, so that a kill leaves the old state or the new one."""
    data = {name: t.detach().contiguous().cpu() for name, t in tensors.items()}
    write_atomically(path, safetensors.torch.save(data, {"state": json.dumps(state)}))


def read_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save_state` wrote.

    Raises:
        RunError: if the file is damaged; the message names it.
    """
    data = path.read_bytes()
    try:
        tensors = safetensors.torch.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return tensors, json.loads(header["__metadata__"]["state"])
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise RunError(f"{path}: damaged training state ({error}); delete it to start again") from None
