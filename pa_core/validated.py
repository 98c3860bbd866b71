"""Frozen, validated models and the YAML files that hold them; an unknown key is an error that names file and key."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
Discount = Annotated[float, Field(ge=0, lt=1)]

Model = TypeVar("Model", bound=BaseModel)


class Frozen(BaseModel):
    """A model that cannot be changed, takes no unknown key and converts no type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical JSON of this model."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def read_model(path: Path, validate: Callable[[Any], Model], holds: str, *, skip: int = 0) -> Model:
    """Read a YAML mapping and validate it.

    Args:
        path: the file.
        validate: from the mapping to the model, e.g. ``Protocol.model_validate``.
        holds: what the mapping holds, for the message when the file is none.
        skip: leading parts of a key's path that the file itself does not show.

    Raises:
        ValueError: one line a problem, each naming the file and the key.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: cannot be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: must hold a mapping of {holds}")
    try:
        return validate(raw)
    except ValidationError as error:
        lines = (f"{path}: {'.'.join(map(str, e['loc'][skip:]))}: {e['msg']}" for e in error.errors())
        raise ValueError("\n".join(lines)) from None
