"""Where MDPs come from: random families, the shift families of the protocol, rings, Gymnasium tables and a reader's file."""

from collections.abc import Mapping
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch

from .mdp import MDP


def _positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}")


def random_transitions(n: int, n_states: int, n_actions: int, concentration: float, rng: np.random.Generator) -> np.ndarray:
    """P(.|s,a) ~ Dirichlet(concentration), independent; ``[n, S, A, S]``."""
    for name, value in (("n", n), ("n_states", n_states), ("n_actions", n_actions)):
        _positive(name, value)
    if not (np.isfinite(concentration) and concentration > 0):
        raise ValueError(f"concentration must be positive and finite, got {concentration!r}")
    P = rng.dirichlet(np.full(n_states, float(concentration)), size=(n, n_states, n_actions))
    return P / P.sum(-1, keepdims=True)


def random_mdps(
    n: int,
    n_states: int,
    n_actions: int,
    *,
    gamma: float,
    concentration: float = 1.0,
    reward_range: tuple[float, float] = (-1.0, 1.0),
    rng: np.random.Generator,
) -> MDP:
    """`n` random MDPs: P(.|s,a) ~ Dirichlet(concentration), R(s,a) ~ U[reward_range] (protocol).

    Returns:
        MDP with batch shape ``[n]``.

    Raises:
        ValueError: for sizes below 1, a concentration that is not positive, or a reward range whose ends are not in order.
    """
    low, high = reward_range
    if not (np.isfinite(low) and np.isfinite(high) and low <= high):
        raise ValueError(f"reward_range must be (low, high) with low <= high, got {reward_range!r}")
    P = random_transitions(n, n_states, n_actions, concentration, rng)
    R = rng.uniform(low, high, size=(n, n_states, n_actions))
    return MDP(torch.from_numpy(P), torch.from_numpy(R), gamma)


def sparse_reward_mdps(
    n: int,
    n_states: int,
    n_actions: int,
    *,
    gamma: float,
    concentration: float = 1.0,
    reward_rate: float = 0.2,
    rng: np.random.Generator,
) -> MDP:
    """`n` MDPs with R(s,a) in {-1, 0, 1}: non-zero with probability `reward_rate`, then either sign equally likely.

    Raises:
        ValueError: as `random_mdps`, or unless ``0 < reward_rate <= 1``.
    """
    if not 0 < reward_rate <= 1:
        raise ValueError(f"reward_rate must satisfy 0 < reward_rate <= 1, got {reward_rate!r}")
    P = random_transitions(n, n_states, n_actions, concentration, rng)
    size = (n, n_states, n_actions)
    R = (rng.random(size) < reward_rate) * rng.choice([-1.0, 1.0], size=size)
    return MDP(torch.from_numpy(P), torch.from_numpy(R), gamma)


def ring_mdp(n_states: int, n_actions: int, *, gamma: float, slip: float = 0.1) -> MDP:
    """The structured ring: one MDP whose states lie on a circle (protocol).

    Action a moves by ``a - A // 2`` places (left, stay, right at A = 3); with probability `slip` the move is drawn
    uniformly from all A.  State 0 pays 1, the state opposite pays -1, and each place moved costs 0.1.

    Returns:
        MDP without batch dimensions.
    """
    _positive("n_states", n_states)
    _positive("n_actions", n_actions)
    if not 0 <= slip <= 1:
        raise ValueError(f"slip must satisfy 0 <= slip <= 1, got {slip!r}")
    moves = np.arange(n_actions) - n_actions // 2
    target = (np.arange(n_states)[:, None] + moves) % n_states  # [S, A]
    landing = np.eye(n_states)[target]  # [S, A, S]
    P = (1 - slip) * landing + slip * landing.mean(1, keepdims=True)
    R = np.repeat(-0.1 * np.abs(moves)[None, :], n_states, axis=0)
    R[0] += 1
    R[n_states // 2] -= 1
    return MDP(torch.from_numpy(P), torch.from_numpy(R), gamma)


def dirichlet_log_policies(
    n: int, n_states: int, n_actions: int, rng: np.random.Generator, *, concentration: float = 1.0
) -> torch.Tensor:
    """log pi with every row ~ Dirichlet(concentration), ``[n, S, A]``: normalised gammas, taken in log space."""
    log_gamma = np.log(np.maximum(rng.gamma(concentration, size=(n, n_states, n_actions)), 1e-300))
    return torch.log_softmax(torch.from_numpy(log_gamma), -1)


def load_npz(path: str | Path, *, gamma: float | None = None) -> MDP:
    """A reader's own MDP from an ``.npz`` file with arrays ``P [*batch, S, A, S]``, ``R [*batch, S, A]`` and ``gamma``.

    Args:
        path: the file; arrays of other names in it are ignored.
        gamma: replaces the file's discount, which may then be missing.

    Raises:
        ValueError: if the file is missing, is no ``.npz`` archive, holds pickled objects, lacks an array or holds one that
            is not numeric, and for every reason for which `MDP` refuses (shapes, rows off the simplex, ...).
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    try:
        archive = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError, BadZipFile):
        archive = None
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise ValueError(f"{path} is not an .npz archive; write one with numpy.savez(path, P=P, R=R, gamma=gamma)")
    arrays = {}
    with archive:
        for name in ("P", "R") if gamma is not None else ("P", "R", "gamma"):
            if name not in archive:
                raise ValueError(f"{path} has no array {name!r}; it holds {sorted(archive)}")
            try:
                arrays[name] = archive[name]
            except ValueError as error:
                raise ValueError(f"{path}: array {name!r} cannot be read: {error}") from None
            if arrays[name].dtype.kind not in "fiu":
                raise ValueError(f"{path}: array {name!r} must hold real numbers, got dtype {arrays[name].dtype}")
    if gamma is None:
        if arrays["gamma"].size != 1:
            raise ValueError(f"{path}: gamma must be one number, got shape {arrays['gamma'].shape}")
        gamma = arrays["gamma"].item()
    return MDP(arrays["P"].astype(np.float64), arrays["R"].astype(np.float64), gamma)


def _table(env_or_id, make_kwargs: Mapping):
    import gymnasium

    if isinstance(env_or_id, str):
        try:
            env = gymnasium.make(env_or_id, **make_kwargs)
        except (gymnasium.error.Error, TypeError) as error:
            raise ValueError(f"Gymnasium cannot make {env_or_id!r}: {error}") from None
    else:
        if make_kwargs:
            raise ValueError("options such as map_name go with an environment's name, not with a ready environment")
        env = env_or_id
    name = env_or_id if isinstance(env_or_id, str) else type(env.unwrapped).__name__
    P = getattr(env.unwrapped, "P", None)
    if isinstance(env_or_id, str):
        env.close()
    if not isinstance(P, Mapping) or not P:
        raise ValueError(f"environment {name!r} has no transition table P (toy-text environments such as FrozenLake-v1 do)")
    return name, P


def from_gymnasium(env_or_id, *, gamma: float, **make_kwargs) -> MDP:
    """The MDP of a Gymnasium environment with a transition table `P` (FrozenLake-v1, CliffWalking-v1, Taxi-v4, ...).

    Terminal states follow one rule: a transition marked `done` goes to its own target if that state already loops on
    itself with zero reward under every action (FrozenLake's holes and goal), and to one added absorbing state with zero
    reward otherwise (CliffWalking's goal, Taxi's drop-offs).  Outcomes that repeat are summed; R[s, a] is the expected
    reward.

    Args:
        env_or_id: an environment or the name of one.
        gamma: discount.
        make_kwargs: passed to `gymnasium.make`, e.g. ``map_name="8x8"``.

    Returns:
        MDP without batch dimensions; S is one more than the environment's if the absorbing state was needed (it is last).

    Raises:
        ValueError: if the environment cannot be made, has no table, or the table's states have unequal action sets.
    """
    name, table = _table(env_or_id, make_kwargs)
    states = sorted(table)
    actions = sorted(table[states[0]])
    index = {s: i for i, s in enumerate(states)}
    n_states, n_actions = len(states), len(actions)
    P = np.zeros((n_states + 1, n_actions, n_states + 1))
    R = np.zeros((n_states + 1, n_actions))
    sink = n_states
    P[sink, :, sink] = 1

    def absorbs(s) -> bool:
        return all(t == s and r == 0 for outcomes in table[s].values() for p, t, r, _ in outcomes if p > 0)

    resting = {s for s in states if absorbs(s)}
    for s in states:
        if sorted(table[s]) != actions:
            raise ValueError(f"environment {name!r}: state {s} has actions {sorted(table[s])}, state {states[0]} {actions}")
        for j, a in enumerate(actions):
            for p, t, r, done in table[s][a]:
                if t not in index:
                    raise ValueError(f"environment {name!r}: state {s}, action {a} leads to {t}, which is not in its table")
                target = sink if done and t not in resting else index[t]
                P[index[s], j, target] += p
                R[index[s], j] += p * r
    if not P[:sink, :, sink].any():
        P, R = P[:sink, :, :sink], R[:sink]
    # Sums such as 3 x (1/3) miss 1 by rounding; anything more is a broken table, which MDP refuses by index.
    total = P.sum(-1, keepdims=True)
    P = np.where(np.abs(total - 1) < 1e-12, P / total, P)
    return MDP(torch.from_numpy(P), torch.from_numpy(R), gamma)
