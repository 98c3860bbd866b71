"""The hierarchical paired bootstrap: estimands over runs and tasks, with percentile intervals.  Knows no RL.

Scores are ``[n_runs, n_tasks]``, lower is better: run i (a training seed) scored on task j.  A *reference* is scored on the
same tasks, either once, ``[n_tasks]``, or beside every run, ``[n_runs, n_tasks]``; what is compared is always paired by run
and task.  Every estimand has two levels: a statistic over tasks gives one value a run, and the median over runs gives the
value that is reported.  The interval resamples runs, then tasks inside each resampled run, and recomputes the whole thing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

CHUNK_ENTRIES = 1 << 20  # scores gathered at a time; 8 MB an array, which stays in cache-sized pieces

STATISTICS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "median": lambda x: np.median(x, axis=-1),
    "mean": lambda x: x.mean(axis=-1),
    "p90": lambda x: np.quantile(x, 0.9, axis=-1),
}
"""Statistics over tasks (the last axis) by name."""


@dataclass(frozen=True)
class Estimate:
    """An estimand with its interval and everything that stands behind it.

    Attributes:
        value: the estimand on the scores as they are.
        ci: lower and upper end of the percentile interval.
        runs: the value of each run alone (their median is `value`).
        n_runs, n_tasks: sizes of the sample.
        level: confidence level of the interval.
    """

    value: float
    ci: tuple[float, float]
    runs: tuple[float, ...]
    n_runs: int
    n_tasks: int
    level: float

    def __format__(self, spec: str) -> str:
        """``value [lower, upper]``, each number in the given format (``.3g`` by default)."""
        value, low, high = (format(x, spec or ".3g") for x in (self.value, *self.ci))
        return f"{value} [{low}, {high}]"

    def __str__(self) -> str:
        return format(self)

    def describe(self, spec: str = ".3g", *, task: str = "tasks") -> str:
        """The value never alone: interval, sample sizes and the individual runs."""
        runs = " ".join(format(x, spec) for x in self.runs)
        word = "run" if self.n_runs == 1 else "runs"
        return f"{format(self, spec)}; {self.n_runs} {word} x {self.n_tasks} {task}; by run: {runs}"


def _statistic(name: str) -> Callable[[np.ndarray], np.ndarray]:
    if name not in STATISTICS:
        raise ValueError(f"statistic must be one of {sorted(STATISTICS)}, got {name!r}")
    return STATISTICS[name]


def _checked(name: str, x) -> np.ndarray:
    x = np.asarray(x, dtype=np.float64)
    if x.ndim != 2 or min(x.shape) < 1:
        raise ValueError(f"{name} must have shape [n_runs, n_tasks] with at least one of each, got {x.shape}")
    if (bad := ~np.isfinite(x)).any():
        run, task = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(f"{name} must be finite, got {x[run, task]} at run {run}, task {task}")
    return x


def _paired(scores, reference) -> tuple[np.ndarray, np.ndarray]:
    scores = _checked("scores", scores)
    reference = np.asarray(reference, dtype=np.float64)
    if reference.ndim == 1:
        reference = reference[None, :]
    reference = _checked("reference", reference)
    if reference.shape not in (scores.shape, (1, scores.shape[1])):
        raise ValueError(
            f"reference must have shape {scores.shape} or ({scores.shape[1]},) to be paired with scores {scores.shape}, "
            f"got {reference.shape}"
        )
    return scores, np.broadcast_to(reference, scores.shape)


def bootstrap(
    per_run: Callable[..., np.ndarray],
    *arrays: np.ndarray,
    rng: np.random.Generator,
    n_resamples: int = 10_000,
    level: float = 0.95,
    shared_tasks: bool = False,
) -> Estimate:
    """Hierarchical percentile bootstrap of ``median over runs of per_run(*arrays)``.

    Args:
        per_run: takes arrays ``[..., n_tasks]`` and reduces the last axis, so that it works on one run and on a stack.
        arrays: paired scores, all ``[n_runs, n_tasks]``; every one is resampled by the same indices.
        rng: the only source of randomness.
        n_resamples: number of replicates.
        level: confidence level.
        shared_tasks: False draws the tasks of each resampled run independently (the registered estimand: tasks nested in
            runs).  True draws one set of tasks a replicate for all its runs, which is the wider and the honest interval
            for a claim about new tasks when a task is hard for every run alike.

    Returns:
        Estimate.  Its interval takes the order statistics just outside the two tails, without interpolation.  A replicate
        that is not a number (0 / 0 in a ratio) counts against both ends.

    Raises:
        ValueError: for arrays that are not finite or not of one shape, a level outside (0, 1) or no replicates.
        TypeError: if `rng` is not a `numpy.random.Generator`.
    """
    if not isinstance(rng, np.random.Generator):
        raise TypeError(f"rng must be a numpy.random.Generator, got {type(rng).__name__}")
    if not 0 < level < 1:
        raise ValueError(f"level must satisfy 0 < level < 1, got {level!r}")
    if n_resamples < 1:
        raise ValueError(f"n_resamples must be >= 1, got {n_resamples!r}")
    arrays = tuple(_checked(f"array {i}", x) for i, x in enumerate(arrays))
    if len({x.shape for x in arrays}) != 1:
        raise ValueError(f"paired arrays must have one shape, got {[x.shape for x in arrays]}")
    n_runs, n_tasks = arrays[0].shape
    runs = per_run(*arrays)  # [n_runs]
    chunk = max(1, CHUNK_ENTRIES // (n_runs * n_tasks))
    replicates = []
    for first in range(0, n_resamples, chunk):
        n = min(chunk, n_resamples - first)
        run = rng.integers(n_runs, size=(n, n_runs, 1))
        task = rng.integers(n_tasks, size=(n, 1 if shared_tasks else n_runs, n_tasks))
        replicates.append(np.median(per_run(*(x[run, task] for x in arrays)), axis=-1))
    ordered = np.concatenate(replicates)
    unknown = np.isnan(ordered)
    tail = (1 - level) / 2 * (n_resamples - 1)
    low = np.sort(np.where(unknown, -np.inf, ordered))[int(np.floor(tail))]
    high = np.sort(np.where(unknown, np.inf, ordered))[int(np.ceil(n_resamples - 1 - tail))]
    return Estimate(
        value=float(np.median(runs)),
        ci=(float(low), float(high)),
        runs=tuple(runs.tolist()),
        n_runs=n_runs,
        n_tasks=n_tasks,
        level=level,
    )


def location(scores, *, rng: np.random.Generator, statistic: str = "median", **options) -> Estimate:
    """Median over runs of the statistic over tasks.  `options` are those of `bootstrap`."""
    return bootstrap(_statistic(statistic), _checked("scores", scores), rng=rng, **options)


def difference(scores, reference, *, rng: np.random.Generator, statistic: str = "median", **options) -> Estimate:
    """Median over runs of the statistic over tasks of ``scores - reference``, paired by run and task."""
    scores, reference = _paired(scores, reference)
    return bootstrap(_statistic(statistic), scores - reference, rng=rng, **options)


def ratio(scores, reference, *, rng: np.random.Generator, statistic: str = "median", **options) -> Estimate:
    """Median over runs of (statistic over tasks of scores) / (statistic over the same tasks of reference).

    With ``statistic="mean"`` the means over tasks are divided; the median over runs stays.

    Raises:
        ValueError: as `bootstrap`, and if the reference's statistic is not positive in some run (the run is named): a
            ratio to it means nothing, and the difference is the estimand to use.
    """
    scores, reference = _paired(scores, reference)
    over_tasks = _statistic(statistic)
    if (bad := ~(over_tasks(reference) > 0)).any():
        run = int(np.argmax(bad))
        raise ValueError(f"the {statistic} of the reference is {over_tasks(reference)[run]:g} in run {run}: no ratio exists")

    def per_run(x, y):
        with np.errstate(divide="ignore", invalid="ignore"):
            return over_tasks(x) / over_tasks(y)

    return bootstrap(per_run, scores, reference, rng=rng, **options)
