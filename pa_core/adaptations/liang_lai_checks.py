"""What the linear-attention actor-critic must show before it competes: it does what its teacher does."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..mdp import MDP, solve
from ..online import Draws, Steps, run_online
from ..tabular import BatchActorCritic
from ..validated import Frozen
from .liang_lai import Block, LiangLai


class LiangLaiCriteria(Frozen):
    """Upper limits of the registered qualification."""

    increment_error: float = 1e-2  # ||increment - teacher's||_F / ||teacher's||_F over all windows, actor and critic each
    increment_error_p95: float = 5e-2  # its 95th percentile over single windows
    loss_difference: float = 0.005  # |block's loss - teacher's|, of medians and of means, at every horizon


@dataclass(frozen=True)
class IncrementErrors:
    """||increment - teacher's|| / ||teacher's||: pooled over all windows (Frobenius), and the 95th percentile of windows."""

    actor: float
    critic: float
    actor_p95: float
    critic_p95: float


class _Shadowed(BatchActorCritic):
    """The teacher, noting at every window what the block would have answered."""

    def __init__(self, block: Block, alpha: float, beta: float) -> None:
        super().__init__(alpha, beta)
        self.student = LiangLai(block, alpha, beta)
        self.squares: list[list[Tensor]] = [[], [], [], []]  # actor's error and size, critic's error and size

    def increments(self, steps: Steps) -> tuple[Tensor, Tensor]:
        dw, dlogits = super().increments(steps)
        self.student.sizes, self.student.w, self.student.logits = self.sizes, self.w, self.logits
        my_dw, my_dlogits = self.student.increments(steps)
        parts = ((my_dlogits - dlogits).flatten(-2), dlogits.flatten(-2), my_dw - dw, dw)
        for total, part in zip(self.squares, parts, strict=True):
            total.append(part.square().sum(-1))
        return dw, dlogits


def increment_errors(
    block: Block, mdp: MDP, alpha: float, beta: float, *, rounds: int, draws: Draws
) -> IncrementErrors:
    """Errors of a block on the windows of its teacher's own closed loop: increments, never learners, are compared."""
    teacher = _Shadowed(block, alpha, beta)
    run_online(mdp, teacher, rounds=rounds, draws=draws)
    pooled, tails = [], []
    for error, size in (teacher.squares[:2], teacher.squares[2:]):
        error, size = torch.stack(error), torch.stack(size)
        pooled.append(math.sqrt(error.sum() / size.sum()))
        moved = size > 0  # a saturated softmax has no increment to compare with
        tails.append((error[moved] / size[moved]).sqrt().quantile(0.95).item())
    return IncrementErrors(*pooled, *tails)


def qualify(
    block: Block,
    mdp: MDP,
    rates: Sequence[tuple[float, float]],
    *,
    draws: Draws,
    horizons: Sequence[int] = (20, 40),
    criteria: LiangLaiCriteria | None = None,
) -> pd.DataFrame:
    """Every check of the qualification on held-out MDPs; the block qualifies when all pass.

    Args:
        block: the trained block.
        mdp: held-out MDPs ``[n]``.
        rates: pairs (alpha, beta) at which the checks are made.
        draws: common draws of block and teacher.
        horizons: rounds at which their losses are compared.
        criteria: the limits; the registered ones if not given.

    Returns:
        one row a check: alpha, beta, check, value, limit, passed.
    """
    limits, solution, found = criteria or LiangLaiCriteria(), solve(mdp), []
    for alpha, beta in rates:
        errors = increment_errors(block, mdp, alpha, beta, rounds=max(horizons), draws=draws)
        options = dict(rounds=max(horizons), draws=draws, solution=solution)
        mine = run_online(mdp, LiangLai(block, alpha, beta), **options).loss.numpy()
        teacher = run_online(mdp, BatchActorCritic(alpha, beta), **options).loss.numpy()
        values = [(f"{part} increment", getattr(errors, part), limits.increment_error) for part in ("actor", "critic")]
        values += [
            (f"{part} increment, 95th percentile", getattr(errors, f"{part}_p95"), limits.increment_error_p95)
            for part in ("actor", "critic")
        ]
        for T in horizons:
            for name, statistic in (("median", np.median), ("mean", np.mean)):
                difference = abs(float(statistic(mine[T]) - statistic(teacher[T])))
                values.append((f"{name} loss against teacher, T = {T}", difference, limits.loss_difference))
        found += [(alpha, beta, name, value, limit, value <= limit) for name, value, limit in values]
    return pd.DataFrame(found, columns=["alpha", "beta", "check", "value", "limit", "passed"])
