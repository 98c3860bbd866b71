"""What the distilled Transformer must show before it competes: it improves in context, as its source does, by rewards."""

import numpy as np
import pandas as pd

from ..mdp import MDP, solve
from ..online import Draws, run_online
from ..tabular import BatchActorCritic
from ..validated import Frozen
from .algorithm_distillation import AlgorithmDistillation, Distiller
from .distillation_training import DistillationConfig, Histories, held_out_nll


class DistillationCriteria(Frozen):
    """The registered qualification."""

    rounds: list[int] = [1, 5, 20]  # the median loss falls along them
    final_share: float = 0.5  # L(last) / L(first) at most
    source_difference: float = 0.15  # |L(last) - source's| at most
    nll_excess: float = 0.06  # held-out NLL minus the source's entropy, in nats, at most
    shuffled_share: float = 0.25  # share of the fall that is left when rewards are shuffled, at most
    replicates: int = 10_000
    level: float = 0.95


def qualify(
    model: Distiller,
    config: DistillationConfig,
    mdp: MDP,
    held_out: Histories,
    *,
    draws: Draws,
    rng: np.random.Generator,
    criteria: DistillationCriteria | None = None,
) -> pd.DataFrame:
    """Every check of the qualification on held-out MDPs; the network qualifies when all pass.

    Args:
        model, config: a finished run.
        mdp: held-out MDPs ``[n]``.
        held_out: histories for the NLL.
        draws: common draws of network, negative control and source.
        rng: of the bootstrap over MDPs and of the shuffled rewards.
        criteria: the limits; the registered ones if not given.

    Returns:
        one row a check: check, value, limit, passed; a value passes when it is at most its limit.
    """
    limits, solution = criteria or DistillationCriteria(), solve(mdp)
    first, *_, last = limits.rounds
    options = dict(rounds=last, per_round=config.per_round, draws=draws, solution=solution)
    source = BatchActorCritic(config.alpha, config.beta, discounted_actor=config.discounted_actor)
    controllers = {
        "network": AlgorithmDistillation(model, context=config.context),
        "shuffled": AlgorithmDistillation(model, context=config.context, shuffle=rng),
        "source": source,
    }
    losses = {name: run_online(mdp, c, **options).loss.numpy() for name, c in controllers.items()}
    median = {name: np.median(x, axis=1) for name, x in losses.items()}
    mine, n = losses["network"], losses["network"].shape[1]
    picks = rng.integers(n, size=(limits.replicates, n))
    falls = np.median(mine[first][picks], axis=1) - np.median(mine[last][picks], axis=1)
    low = np.quantile(falls, (1 - limits.level) / 2)
    fall = median["network"][first] - median["network"][last]
    left = (median["shuffled"][first] - median["shuffled"][last]) / fall
    excess = held_out_nll(model, held_out, config) - held_out.entropy[:, : config.context + 1].mean().item()
    found = [
        (f"median loss, round {b} minus round {a}", median["network"][b] - median["network"][a], 0.0)
        for a, b in zip(limits.rounds, limits.rounds[1:], strict=False)
    ]
    found += [
        (f"L({last}) / L({first})", median["network"][last] / median["network"][first], limits.final_share),
        ("minus the lower end of the fall's interval", -low, 0.0),
        ("|L - source's|, last round", abs(median["network"][last] - median["source"][last]), limits.source_difference),
        ("held-out NLL minus source entropy", excess, limits.nll_excess),
        ("share of the fall with shuffled rewards", left if fall > 0 else np.inf, limits.shuffled_share),
    ]
    rows = [(name, float(value), limit, bool(value <= limit)) for name, value, limit in found]
    return pd.DataFrame(rows, columns=["check", "value", "limit", "passed"])
