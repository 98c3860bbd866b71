"""Scoring finished runs in the closed loop: all runs of a cell on the same MDPs, beside one oracle, with the same draws.

Arrays of scores are NumPy ``[n_runs, n_tasks]``, lower is better; an oracle without a run axis is ``[n_tasks]``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from . import contexts, runs, stats
from .control import Actor, Critic, Trajectory, closed_loop, exact_actor, exact_critic
from .decoder import Decoder
from .mdp import MDP, Solution, normalized_loss, solve
from .protocol import Protocol, load_protocol
from .seeding import rng_for, seed_sequence
from .tokens import sample_transitions

STRESS = "longer_horizon_stress"


def reseeded(protocol: Protocol, seed: int) -> Protocol:
    """The protocol with its evaluation streams moved by a reader's `seed`; 0 is the registered one, unchanged."""
    if seed == 0:
        return protocol
    root = int(seed_sequence("reader", seed, root=protocol.root_seed).generate_state(1)[0])
    return protocol.model_copy(update={"root_seed": root})


@dataclass(frozen=True)
class Problem:
    """What controllers are scored on: MDPs ``[n]``, their solution and the first policy (None: uniform)."""

    mdp: MDP
    solution: Solution
    log_pi: Tensor | None = None

    @classmethod
    def of(cls, mdp: MDP, log_pi: Tensor | None = None) -> "Problem":
        return cls(mdp, solve(mdp), log_pi)

    @property
    def n_tasks(self) -> int:
        return self.mdp.batch_shape[0]

    def losses(self, log_pi: Tensor) -> np.ndarray:
        """Normalised loss of policies ``[..., n, S, A]`` to ``[..., n]``."""
        return normalized_loss(self.mdp, log_pi.exp(), self.solution).numpy()


def check_n_mdps(n_mdps: int, protocol: Protocol) -> None:
    """Refuse more MDPs than the registered sets hold."""
    if not 1 <= n_mdps <= protocol.deployment.n_test_mdps:
        raise ValueError(f"n_mdps must be between 1 and {protocol.deployment.n_test_mdps}, got {n_mdps}")


def test_problem(n_states: int, *, n_mdps: int = 64, seed: int = 0) -> Problem:
    """The first `n_mdps` test MDPs of a size; the registered ones for ``seed = 0``, fresh ones for any other."""
    protocol = load_protocol()
    check_n_mdps(n_mdps, protocol)
    return Problem.of(contexts.test_mdps(reseeded(protocol, seed), n_states)[:n_mdps])


test_problem.__test__ = False  # the name is not a test for pytest


def shift_problems(n_states: int = 4, *, n_mdps: int = 64, seed: int = 0) -> dict[str, Problem]:
    """The no-retraining families by name, and ``longer_horizon_stress``; `n_mdps` and `seed` as in `test_problem`."""
    protocol = load_protocol()
    check_n_mdps(n_mdps, protocol)
    sets = contexts.shift_sets(reseeded(protocol, seed), n_states)
    return {
        name: Problem.of(mdp[:n_mdps], None if log_pi is None else log_pi[:n_mdps]) for name, (mdp, log_pi) in sets.items()
    }


def chosen_runs(cell: str, n_runs: int, root: Path = runs.ARTIFACTS) -> list[int]:
    """The first `n_runs` finished runs of a cell: fewer, or none, while its training goes on."""
    return runs.finished_runs(cell, root)[:n_runs]


def completeness(cells: Sequence[str], n_runs: int, root: Path = runs.ARTIFACTS) -> pd.DataFrame:
    """One row a cell: runs registered, finished and used.  What a chapter shows before any result."""
    registered = load_protocol().cells
    rows = [(c, registered[c], len(runs.finished_runs(c, root)), len(chosen_runs(c, n_runs, root))) for c in cells]
    return pd.DataFrame(rows, columns=["cell", "registered", "finished", "used"])


def missing_sentence(cell: str) -> str:
    """What a chapter says in place of the results of a cell that has no finished run."""
    return f"The runs of `{cell}` are not there yet: this chapter shows nothing for them and records no claim about them."


def grouped_actor(actors: Sequence[Actor]) -> Actor:
    """Several actors as one on ``[G, n, S, A]``: actor g gets slice g."""

    def act(log_pi: Tensor, Q: Tensor, eta: float | Tensor) -> Tensor:
        etas = eta if isinstance(eta, Tensor) and eta.dim() else [eta] * len(actors)
        return torch.stack([a(p, q, e) for a, p, q, e in zip(actors, log_pi, Q, etas, strict=True)])

    return act


def grouped_critic(critics: Sequence[Critic], mdp: MDP, rngs: Sequence[np.random.Generator]) -> Critic:
    """Several critics as one on ``[G, n, S, A]``: critic g gets slice g, the shared `mdp` and its own generator."""

    def criticise(_: MDP, log_pi_next: Tensor, Q: Tensor, __: np.random.Generator | None) -> Tensor:
        return torch.stack([c(mdp, p, q, g) for c, p, q, g in zip(critics, log_pi_next, Q, rngs, strict=True)])

    return criticise


def tabular_critic(m: int) -> Critic:
    """The one-step backup with the mean of `m` generative draws a pair in place of the expectation.

    From the same generator state it sees the uniforms that a learned critic sees, so the two are paired draw by draw.
    """

    def criticise(mdp: MDP, log_pi_next: Tensor, Q: Tensor, rng: np.random.Generator | None) -> Tensor:
        if rng is None:
            raise ValueError("a critic that samples needs rng, a numpy Generator")
        return sampled_backup(mdp, log_pi_next, Q, m, rng)

    return criticise


def sampled_backup(mdp: MDP, log_pi_next: Tensor, Q: Tensor, m: int, rng: np.random.Generator) -> Tensor:
    """R + gamma times the mean of Q(s', a') over `m` draws of every pair, ``[*batch, S, A]``."""
    draws = sample_transitions(mdp, log_pi_next, m, rng)
    value = Q.flatten(-2).gather(-1, draws.s_next * Q.shape[-1] + draws.a_next)
    return mdp.R + mdp.gamma * value.unflatten(-1, (*Q.shape[-2:], m)).mean(-1)


def draw_streams(run_numbers: Sequence[int], n_states: int, *, seed: int = 0) -> list[np.random.Generator]:
    """Fresh generators of the critic's draws in deployment, one a run: every controller beside run i sees the same draws."""
    return [rng_for("deployment-draws", n_states, run, seed) for run in run_numbers]


def run_loops(
    problem: Problem,
    actors: Sequence[Actor],
    *,
    rounds: int,
    eta: float,
    critics: Sequence[Critic] | None = None,
    rngs: Sequence[np.random.Generator] | None = None,
    floor: float = 0.0,
) -> Trajectory:
    """The closed loop of every actor on every MDP at once; the batch of the result is ``[n_runs, n_tasks]``.

    Args:
        problem: MDPs ``[n]``.
        actors: one a run.
        rounds, eta, floor: see `closed_loop`.
        critics: one a run; the exact one-step critic if not given.
        rngs: one a run, for critics that sample.
    """
    group, mdp = len(actors), problem.mdp.expand(len(actors), problem.n_tasks)
    critic = exact_critic if critics is None else grouped_critic(critics, problem.mdp, rngs or [None] * group)
    log_pi = None if problem.log_pi is None else problem.log_pi.expand(group, *problem.log_pi.shape)
    return closed_loop(
        mdp,
        grouped_actor(actors),
        critic,
        rounds=rounds,
        eta=eta,
        log_pi=log_pi,
        floor=floor,
        solution=problem.solution,
    )


def oracle_loop(problem: Problem, *, rounds: int, eta: float, floor: float = 0.0) -> Trajectory:
    """Exact PMD with the exact one-step critic; batch ``[n_tasks]``."""
    return closed_loop(
        problem.mdp,
        exact_actor,
        exact_critic,
        rounds=rounds,
        eta=eta,
        log_pi=problem.log_pi,
        floor=floor,
        solution=problem.solution,
    )


@dataclass(frozen=True)
class Pieces:
    """A network that takes a large batch in pieces which fit a processor's cache: the same rows, in half the time."""

    decoder: Decoder
    n_tokens: int = 1536  # in a piece

    @property
    def head_w(self) -> Tensor:
        return self.decoder.head_w

    def __call__(self, tokens: Tensor, *, last: int | None = None) -> Tensor:
        size = max(1, self.n_tokens // tokens.shape[-2])
        return torch.cat([self.decoder(piece, last=last) for piece in tokens.split(size)])


def load_actors(cell: str, numbers: Sequence[int], root: Path = runs.ARTIFACTS) -> list[Actor]:
    """The trained actors of a cell, in order."""
    actors = (runs.load_actor(cell, run, root) for run in numbers)
    return [replace(actor, decoder=Pieces(actor.decoder)) for actor in actors]


def load_critics(cell: str, numbers: Sequence[int], root: Path = runs.ARTIFACTS) -> list[Critic]:
    """The trained critics of a cell, in order."""
    critics = (runs.load_critic(cell, run, root) for run in numbers)
    return [replace(critic, decoder=Pieces(critic.decoder)) for critic in critics]


def losses_at(problem: Problem, loop: Trajectory, horizons: Sequence[int]) -> dict[int, np.ndarray]:
    """Losses of the policies returned after each horizon, ``{T: [*runs, n_tasks]}``."""
    return {T: problem.losses(loop.log_pi[T]) for T in horizons}


def compare(scores: np.ndarray, oracle: np.ndarray, *name: str | int, replicates: int, **options) -> pd.DataFrame:
    """The registered estimands of scores beside an oracle: ratio of medians, ratio of means, median paired difference.

    Args:
        scores: ``[n_runs, n_tasks]``.
        oracle: ``[n_tasks]``, or ``[n_runs, n_tasks]`` where each run has its own (its own draws).
        name: name of the bootstrap's stream; everything else is fixed.
        replicates: of the bootstrap.
        options: see `stats.bootstrap`, e.g. ``shared_tasks=True``.

    Returns:
        one row an estimand with columns estimand, value, low, high, runs (the individual runs), n_runs, n_tasks; a ratio to
        an oracle without a positive median (or mean) is nan.
    """
    wanted = {
        "ratio of medians": (stats.ratio, "median"),
        "ratio of means": (stats.ratio, "mean"),
        "median difference": (stats.difference, "median"),
    }
    rows = []
    for title, (estimand, statistic) in wanted.items():
        rng = rng_for("bootstrap", title, *name)
        try:
            e = estimand(scores, oracle, rng=rng, statistic=statistic, n_resamples=replicates, **options)
            rows.append((title, e.value, *e.ci, e.runs, e.n_runs, e.n_tasks))
        except ValueError as error:
            if "no ratio exists" not in str(error):
                raise
            rows.append((title, np.nan, np.nan, np.nan, (np.nan,) * len(scores), *scores.shape))
    return pd.DataFrame(rows, columns=["estimand", "value", "low", "high", "runs", "n_runs", "n_tasks"])


def comparison_table(
    scores: Mapping[tuple, np.ndarray], oracle: Mapping[tuple, np.ndarray], names: Sequence[str], **options
) -> pd.DataFrame:
    """`compare` for every key of `scores`, tidy: the parts of the key become the first columns, called `names`."""
    frames = []
    for key, values in scores.items():
        frame = compare(values, oracle[key], *key, **options)
        for position, (name, part) in enumerate(zip(names, key, strict=True)):
            frame.insert(position, name, part)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def pick(frame: pd.DataFrame, **where: object) -> pd.Series:
    """The one row of a tidy table whose columns have the given values.

    Raises:
        KeyError: if none or several have.
    """
    rows = frame[np.all([np.ones(len(frame), dtype=bool)] + [frame[c] == value for c, value in where.items()], axis=0)]
    if len(rows) != 1:
        raise KeyError(f"{len(rows)} rows have {where}")
    return rows.iloc[0]


def shown(frame: pd.DataFrame, spec: str = ".3g") -> pd.DataFrame:
    """A comparison as readers see it: one line a key, estimands side by side, individual runs of the first, the sample."""
    keys = [c for c in frame.columns if c not in ("estimand", "value", "low", "high", "runs", "n_runs", "n_tasks")]
    estimands = list(dict.fromkeys(frame["estimand"]))
    lines = []
    for key, part in frame.groupby(keys, sort=False):
        rows = part.set_index("estimand")
        texts = {e: f"{r['value']:{spec}} [{r['low']:{spec}}, {r['high']:{spec}}]" for e, r in rows.iterrows()}
        first = rows.loc[estimands[0]]
        runs_text = " ".join(format(x, ".3g") for x in first["runs"])
        sample = f"{first['n_runs']} x {first['n_tasks']}"
        lines.append({**dict(zip(keys, key, strict=True)), **texts, f"runs ({estimands[0]})": runs_text, "n": sample})
    return pd.DataFrame(lines).set_index(keys)
