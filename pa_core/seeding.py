"""Named random streams from one root seed.

Every draw in the project comes from a stream that is named by what it is for, e.g. ``rng_for("test", "s4")``.  The name,
not the order of creation, fixes the stream, so adding a stream never changes another one and the global generators of
NumPy and torch are never touched.
"""

import hashlib

import numpy as np
import torch

ROOT_SEED = 20261130


def seed_sequence(*name: str | int, root: int = ROOT_SEED) -> np.random.SeedSequence:
    """The `SeedSequence` of a named stream.

    Args:
        name: parts of the stream's name, e.g. ``("train", "policy_attention_s4", 0)``.  At least one.
        root: the root seed (the protocol's; a chapter's ``seed`` parameter enters as a part of the name).

    Raises:
        ValueError: if no name is given, or a part is neither a string nor an integer.
    """
    if not name:
        raise ValueError("a random stream needs a name")
    for part in name:
        if isinstance(part, bool) or not isinstance(part, (str, int, np.integer)):
            raise ValueError(f"stream name parts are strings or integers, got {part!r}")
    # A type tag and a length before each part keep ("a", "b") apart from ("ab",) and ("1",) from (1,).
    text = "".join(f"{'s' if isinstance(p, str) else 'i'}{len(str(p))}:{p}" for p in name)
    digest = hashlib.sha256(text.encode()).digest()
    return np.random.SeedSequence([root, *np.frombuffer(digest, dtype="<u4").tolist()])


def rng_for(*name: str | int, root: int = ROOT_SEED) -> np.random.Generator:
    """The NumPy generator of a named stream; see `seed_sequence`."""
    return np.random.default_rng(seed_sequence(*name, root=root))


def torch_generator(*name: str | int, root: int = ROOT_SEED) -> torch.Generator:
    """A CPU torch generator of a named stream (weights are drawn on the CPU so that every device starts equal)."""
    seed = int(seed_sequence(*name, root=root).generate_state(1, dtype=np.uint64)[0] >> np.uint64(1))
    return torch.Generator().manual_seed(seed)
