"""Tuning of online controllers: whole grids in one batched run, the selected setting, and whether it lies on an edge."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from .mdp import MDP, Solution, solve
from .online import PER_ROUND, Controller, Draws, run_online


def sweep(
    make: Callable[..., Controller],
    grid: Mapping[str, Sequence[float]],
    mdp: MDP,
    *,
    draws: Draws,
    horizons: Sequence[int],
    per_round: int = PER_ROUND,
    chunk: int = 32,
) -> pd.DataFrame:
    """Score a controller at every setting of a grid, all on the same MDPs and draws.

    Args:
        make: ``(**settings) -> controller``; settings come as tensors ``[G, 1]``.
        grid: values of each setting; every combination is run.
        mdp: validation MDPs ``[n]``.
        draws: for ``[n]`` MDPs.
        horizons: rounds T after which the returned policy is scored.
        per_round: transitions a round.
        chunk: settings run at a time (memory).

    Returns:
        one row a setting and horizon: the settings, horizon, and median, mean and p90 of the loss over MDPs, the same of
        the greedy read-out (``greedy_median``, ...), and the mean regret.
    """
    points = list(itertools.product(*grid.values()))
    solution, n = solve(mdp), mdp.batch_shape[0]
    rows = []
    for first in range(0, len(points), chunk):
        part = points[first : first + chunk]
        columns = torch.tensor(part, dtype=torch.float64).T[..., None]  # [settings, G, 1]
        controller = make(**dict(zip(grid, columns, strict=True)))
        wide = Solution(*(x.expand(len(part), *x.shape) for x in (solution.V_star, solution.Q_star, solution.pi_star)))
        record = run_online(
            mdp.expand(len(part), n),
            controller,
            rounds=max(horizons),
            draws=draws,
            per_round=per_round,
            solution=wide,
        )
        for g, point in enumerate(part):
            for T in horizons:
                scores = _summary(record.loss[T, g], "") | _summary(record.greedy_loss[T, g], "greedy_")
                regret = record.regret[T, g].mean().item()
                rows.append(dict(zip(grid, point, strict=True)) | {"horizon": T} | scores | {"regret": regret})
    return pd.DataFrame(rows)


def _summary(loss: Tensor, prefix: str) -> dict[str, float]:
    values = {"median": loss.quantile(0.5), "mean": loss.mean(), "p90": loss.quantile(0.9)}
    return {prefix + name: value.item() for name, value in values.items()}


@dataclass(frozen=True)
class Selected:
    """The best setting of a sweep at one horizon.

    Attributes:
        setting: its values.
        score: its statistic.
        edges: settings whose value is the first or last of its grid: the optimum may lie beyond.
    """

    setting: dict[str, float]
    score: float
    edges: tuple[str, ...]


def select(
    table: pd.DataFrame,
    names: Sequence[str],
    horizon: int,
    *,
    statistic: str = "median",
    bounded: Sequence[str] = (),
) -> Selected:
    """The setting with the smallest statistic at a horizon; ties (medians can be 0) go to the smaller mean.

    Args:
        table: of `sweep`.
        names: the settings.
        horizon: one of the table's.
        statistic: column to minimise.
        bounded: settings whose grid ends where they end, e.g. an exploration of 0: such an end is no edge.
    """
    mine = table[table.horizon == horizon].sort_values([statistic, "mean"], kind="stable").iloc[0]
    edges = []
    for name in names:
        values = sorted(table[name].unique())
        ends = (values[0], values[-1])
        if len(values) > 1 and mine[name] in ends and name not in bounded:
            edges.append(name)
    return Selected({name: float(mine[name]) for name in names}, float(mine[statistic]), tuple(edges))
