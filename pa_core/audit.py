"""The one-step audit: what a frozen network does in one context, before any loop closes (paper, Figure 2; book, chapter 08).

Inputs are `ContextSet`s of ``n_mdps * per_mdp`` rows, MDP by MDP, so that scores reduce to one number an MDP: contexts of
one MDP are not independent.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from .contexts import ContextSet, environment_mdps
from .control import Actor, Critic
from .evaluation import sampled_backup
from .families import dirichlet_log_policies
from .mdp import MDP, backup
from .pmd import RULES, pmd_step, q_td_pmd
from .protocol import load_protocol
from .seeding import rng_for


def _repeat(mdp: MDP, times: int) -> MDP:
    return mdp[torch.arange(mdp.batch_shape[0]).repeat_interleave(times)]


def on_trajectory(n_states: int, *, n_mdps: int, seed: int = 0) -> ContextSet:
    """Rounds 0 to 23 of exact loops from the uniform policy on fresh MDPs, one eta ~ U[eta_range] an MDP.

    The MDPs and step sizes come from streams of their own: no training run, test set or validation set shares them.
    """
    protocol = load_protocol()
    spec = protocol.contexts
    mdps = environment_mdps(protocol.environment, n_mdps, n_states, rng_for("audit-mdps", n_states, seed))
    eta = torch.from_numpy(rng_for("audit-eta", n_states, seed).uniform(*spec.eta_range, size=n_mdps))
    log_pi, Q = (x.transpose(0, 1).flatten(0, 1) for x in q_td_pmd(mdps, eta=eta, rounds=spec.rounds - 1))
    return ContextSet(_repeat(mdps, spec.rounds), log_pi, Q, eta.repeat_interleave(spec.rounds))


def broad(n_states: int, *, n_mdps: int, per_mdp: int = 24, half_width: float = 2.0, seed: int = 0) -> ContextSet:
    """Contexts that no loop need ever reach: Dirichlet(1) policies and action values across the whole range [-B, B].

    Q(s, a) = level + U[-half_width, half_width] with one level ~ U[-B, B] a context, B = max |R| / (1 - gamma).
    """
    protocol = load_protocol()
    env, rng = protocol.environment, rng_for("audit-broad", n_states, seed)
    n = n_mdps * per_mdp
    mdps = environment_mdps(env, n_mdps, n_states, rng)
    log_pi = dirichlet_log_policies(n, n_states, env.n_actions, rng)
    bound = max(map(abs, env.reward_range)) / (1 - env.gamma)
    level = rng.uniform(-bound, bound, size=(n, 1, 1))
    Q = torch.from_numpy(level + rng.uniform(-half_width, half_width, size=(n, n_states, env.n_actions)))
    eta = torch.from_numpy(rng.uniform(*protocol.contexts.eta_range, size=n))
    return ContextSet(_repeat(mdps, per_mdp), log_pi, Q, eta)


def thin(inputs: ContextSet, every: int) -> ContextSet:
    """Every so many rows (a divisor of the contexts of an MDP, so that all MDPs keep equally many)."""
    rows = torch.arange(0, len(inputs), every)
    return ContextSet(inputs.mdp[rows], inputs.log_pi[rows], inputs.Q[rows], inputs.eta[rows])


def by_mdp(x: Tensor | np.ndarray, n_mdps: int) -> np.ndarray:
    """Mean over the contexts of each MDP: ``[..., N]`` to ``[..., n_mdps]``."""
    x = np.asarray(x)
    return x.reshape(*x.shape[:-1], n_mdps, -1).mean(-1)


def predictions(actors: Sequence[Actor], inputs: ContextSet, *, eta: float | None = None) -> Tensor:
    """log-probabilities that each actor returns, ``[n_runs, N, S, A]``; `eta` replaces the step size that it is given."""
    step = inputs.eta if eta is None else torch.full_like(inputs.eta, eta)
    return torch.stack([actor(inputs.log_pi, inputs.Q, step) for actor in actors])


def row_l1(log_p: Tensor, inputs: ContextSet, rule: str = "pmd") -> Tensor:
    """Mean over states of || p(.|s) - rule(pi, Q, eta)(.|s) ||_1, ``[..., N, S, A]`` to ``[..., N]``."""
    return (log_p.exp() - RULES[rule](inputs.log_pi, inputs.Q, inputs.eta)).abs().sum(-1).mean(-1)


def distances(log_p: Tensor, inputs: ContextSet, n_mdps: int) -> dict[str, np.ndarray]:
    """`row_l1` to every fixed rule, by MDP: ``{rule: [..., n_mdps]}``."""
    return {rule: by_mdp(row_l1(log_p, inputs, rule), n_mdps) for rule in RULES}


def refit_eta(log_p: Tensor, log_pi: Tensor, Q: Tensor, *, largest: float = 16.0) -> Tensor:
    """The step size that explains returned policies best: argmin_e of the mean KL(p || PMD_e(pi, Q)) over rows.

    The objective is convex in e and its derivative is mean <PMD_e - p, Q>, so e is where the exact step gains as much value
    as the network did; found by bisection on [0, largest].

    Args:
        log_p, log_pi, Q: ``[..., rows, A]``, rows of one fit.

    Returns:
        ``[...]``.
    """
    gain = (log_p.exp() * Q).sum(-1).mean(-1)
    low, high = torch.zeros_like(gain), torch.full_like(gain, largest)
    for _ in range(math.ceil(math.log2(largest / 1e-9))):
        e = (low + high) / 2
        short = (pmd_step(log_pi, Q, e).exp() * Q).sum(-1).mean(-1) < gain
        low, high = torch.where(short, e, low), torch.where(short, high, e)
    return (low + high) / 2


def refitted(actor: Actor, inputs: ContextSet, etas: Sequence[float], n_mdps: int) -> np.ndarray:
    """`refit_eta` of one actor by MDP at each supplied step size, ``[len(etas), n_mdps]``; the contexts stay the same."""

    def rows(x: Tensor) -> Tensor:  # [N, S, A] -> [n_mdps, rows, A]
        return x.reshape(n_mdps, -1, x.shape[-1])

    fits = [refit_eta(rows(predictions([actor], inputs, eta=e)[0]), rows(inputs.log_pi), rows(inputs.Q)) for e in etas]
    return torch.stack(fits).numpy()


def td_errors(
    critics: Sequence[Critic], inputs: ContextSet, rng: Callable[[], np.random.Generator], m: int, n_mdps: int
) -> dict[str, np.ndarray]:
    """Mean absolute errors of one-step backups under the exact PMD step, by MDP.

    Args:
        critics: one a run.
        inputs: contexts.
        rng: gives a fresh generator in the same state, so that all critics and the plain mean see the same draws.
        m: draws of a pair.
        n_mdps: number of MDPs in `inputs`.

    Returns:
        ``learned`` (to the exact backup), ``learned_to_draws`` (to the mean of the draws it was shown), both
        ``[n_runs, n_mdps]``, and ``draws`` (that mean to the exact backup: the noise floor), ``[n_mdps]``.
    """
    log_pi_next = inputs.target()
    exact = backup(inputs.mdp, log_pi_next.exp(), inputs.Q)
    mean = sampled_backup(inputs.mdp, log_pi_next, inputs.Q, m, rng())
    read = torch.stack([critic(inputs.mdp, log_pi_next, inputs.Q, rng()) for critic in critics])

    def mae(error: Tensor) -> np.ndarray:
        return by_mdp(error.abs().mean((-2, -1)), n_mdps)

    return {"learned": mae(read - exact), "learned_to_draws": mae(read - mean), "draws": mae(mean - exact)}
