"""Training contexts and the fixed, named sets on which everything is evaluated."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .families import dirichlet_log_policies, random_mdps, ring_mdp, sparse_reward_mdps
from .mdp import MDP
from .pmd import pmd_step, q_td_pmd
from .protocol import Contexts, Environment, Protocol
from .seeding import rng_for


@dataclass(frozen=True)
class ContextSet:
    """Rounds of control, one a row: float64 ``log_pi, Q [N, S, A]``, ``eta [N]`` and the row's MDP ``mdp [N]``."""

    mdp: MDP
    log_pi: Tensor
    Q: Tensor
    eta: Tensor

    def __len__(self) -> int:
        return len(self.eta)

    def target(self) -> Tensor:
        """log of the exact PMD step of every row, ``[N, S, A]``."""
        return pmd_step(self.log_pi, self.Q, self.eta)


def environment_mdps(environment: Environment, n: int, n_states: int, rng: np.random.Generator) -> MDP:
    """`n` MDPs of the protocol's random family."""
    return random_mdps(
        n,
        n_states,
        environment.n_actions,
        gamma=environment.gamma,
        concentration=environment.concentration,
        reward_range=tuple(environment.reward_range),
        rng=rng,
    )


def make_contexts(mdps: MDP, n: int, spec: Contexts, rng: np.random.Generator) -> ContextSet:
    """`n` contexts: a round of Q-TD-PMD on one of `mdps`, from a uniform or Dirichlet(1) policy, with or without noise on Q.

    Args:
        mdps: MDPs ``[M]`` to choose from.
        n: number of contexts.
        spec: the protocol's section `contexts`.
        rng: generator.
    """
    owner = mdps[torch.from_numpy(rng.integers(mdps.batch_shape[0], size=n))]
    start = dirichlet_log_policies(n, mdps.n_states, mdps.n_actions, rng)
    uniform = torch.from_numpy(rng.random(n) < spec.uniform_start)[:, None, None]
    start = torch.where(uniform, -np.log(mdps.n_actions), start)
    eta = torch.from_numpy(rng.uniform(*spec.eta_range, size=n))
    log_pi, Q = q_td_pmd(owner, eta=eta, rounds=spec.rounds - 1, log_pi=start)
    k, row = torch.from_numpy(rng.integers(spec.rounds, size=n)), torch.arange(n)
    noisy = rng.random((n, 1, 1)) < spec.noise_probability
    noise = torch.from_numpy(noisy * rng.normal(0, spec.noise_sd, size=owner.R.shape))
    return ContextSet(owner, log_pi[k, row], Q[k, row] + noise, eta)


def training_contexts(
    environment: Environment, spec: Contexts, n_states: int, run: int, *, root: int
) -> ContextSet:
    """The examples of training run `run` at size `n_states`: shared by every signal, so that runs are paired."""
    mdps = environment_mdps(environment, spec.n_mdps, n_states, rng_for("train-mdps", n_states, run, root=root))
    return make_contexts(mdps, spec.n_contexts, spec, rng_for("train-contexts", n_states, run, root=root))


def validation_contexts(
    environment: Environment, spec: Contexts, n_states: int, *, n_mdps: int, n: int, root: int
) -> ContextSet:
    """Contexts on MDPs that no run trains on and no test uses: for the log along training."""
    mdps = environment_mdps(environment, n_mdps, n_states, rng_for("validation-mdps", n_states, root=root))
    return make_contexts(mdps, n, spec, rng_for("validation-contexts", n_states, root=root))


def test_mdps(protocol: Protocol, n_states: int) -> MDP:
    """The 64 test MDPs of a size: all runs and all signals are scored on the same ones."""
    rng = rng_for("test-mdps", n_states, root=protocol.root_seed)
    return environment_mdps(protocol.environment, protocol.deployment.n_test_mdps, n_states, rng)


test_mdps.__test__ = False  # the name is not a test for pytest


def shift_sets(protocol: Protocol, n_states: int = 4) -> dict[str, tuple[MDP, Tensor | None]]:
    """The no-retraining shift families: name to (MDPs ``[n]``, initial log-policies ``[n, S, A]`` or None for uniform)."""
    env, shifts, n = protocol.environment, protocol.shifts, protocol.deployment.n_test_mdps

    def rng(name: str) -> np.random.Generator:
        return rng_for("test-shift", name, n_states, root=protocol.root_seed)

    def varied(name: str, **change) -> MDP:
        return environment_mdps(env.model_copy(update=change), n, n_states, rng(name))

    sparse = sparse_reward_mdps(
        n,
        n_states,
        env.n_actions,
        gamma=env.gamma,
        concentration=env.concentration,
        reward_rate=shifts.sparse_rewards.reward_rate,
        rng=rng("sparse_rewards"),
    )
    ring = ring_mdp(n_states, env.n_actions, gamma=env.gamma, slip=shifts.ring.slip).expand(n)
    return {
        "sparse_transitions": (varied("sparse_transitions", **shifts.sparse_transitions.model_dump()), None),
        "sparse_rewards": (sparse, None),
        "longer_horizon": (varied("longer_horizon", gamma=shifts.longer_horizon.gamma), None),
        "ring": (ring, dirichlet_log_policies(n, n_states, env.n_actions, rng("ring"))),
        "longer_horizon_stress": (varied("longer_horizon", gamma=shifts.longer_horizon.stress_gamma), None),
    }
