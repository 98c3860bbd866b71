"""Controllers that learn a model from all transitions so far: certainty-equivalence PMD and posterior sampling.

Settings are numbers or tensors that broadcast against ``*batch``, as in `tabular`.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from scipy.special import gammaincinv
from torch import Tensor

from .control import Actor, exact_actor
from .mdp import MDP, one_hot_greedy, solve
from .online import Setting, Sizes, Steps, fitted, rows


class Counts:
    """What transitions say about an MDP: visits ``N [*batch, S, A, S]``, deterministic rewards ``R [*batch, S, A]``."""

    def __init__(self, sizes: Sizes) -> None:
        self.N = sizes.table()[..., None].repeat_interleave(sizes.n_states, -1)
        self.R = sizes.table()

    def add(self, steps: Steps) -> None:
        *_, S, A, _ = self.N.shape
        pair = steps.s * A + steps.a
        self.N = self.N.flatten(-3).scatter_add(-1, pair * S + steps.s_next, torch.ones_like(steps.r)).reshape(self.N.shape)
        self.R = self.R.flatten(-2).scatter(-1, pair, steps.r).reshape(self.R.shape)

    @property
    def visits(self) -> Tensor:
        """``[*batch, S, A]``."""
        return self.N.sum(-1)


def history_backup(
    counts: Counts, pi: Tensor, Q: Tensor, gamma: float, *, q0: Setting = 0.0, prior: Setting = 0.0
) -> Tensor:
    """One-step evaluation on the model that the counts give, ``[*batch, S, A]``:

        R(s,a) + gamma sum_s' (N(s,a,s') + prior / S) / (N(s,a) + prior) <pi(.|s'), Q(s',.)>,   and q0 on pairs never seen.

    `prior` is the weight of one token a pair whose next state is uniform.
    """
    value = (pi * Q).sum(-1)  # [*batch, S]
    n = counts.visits
    total = torch.einsum("...sap,...p->...sa", counts.N, value) + fitted(prior, 2) * value.mean(-1)[..., None, None]
    seen = counts.R + gamma * total / (n + fitted(prior, 2)).clamp(min=1e-300)
    return torch.where(n > 0, seen, fitted(q0, 2))


class CertaintyEquivalencePMD:
    """Q-TD-PMD on the model of all transitions so far, one step a round: evaluate pi_k, then pi_{k+1} from (pi_k, Q_{k+1}).

    Args:
        eta: step size of the mirror step.
        q0: value of pairs never seen, and of every pair at first (optimism where positive).
        prior: see `history_backup`.
        actor: a callable of `control`; the exact PMD step if not given.
        critic: ``(counts, pi, Q, gamma) -> Q``; `history_backup` with this `q0` and `prior` if not given.
    """

    window = None

    def __init__(
        self,
        eta: Setting,
        *,
        q0: Setting = 0.0,
        prior: Setting = 0.0,
        actor: Actor = exact_actor,
        critic: Callable[[Counts, Tensor, Tensor, float], Tensor] | None = None,
    ) -> None:
        self.eta, self.q0, self.prior, self.actor, self.critic = eta, q0, prior, actor, critic

    def reset(self, sizes: Sizes) -> None:
        self.sizes, self.counts = sizes, Counts(sizes)
        self.Q = sizes.table() + fitted(self.q0, 2)
        self.log_pi = sizes.table(-math.log(sizes.n_actions))
        self._eta = self.eta
        if isinstance(self.eta, Tensor) and self.eta.dim():
            self._eta = self.eta.expand(sizes.batch_shape)

    def policy(self) -> Tensor:
        return self.log_pi

    def act(self, state: Tensor) -> Tensor:
        return rows(self.log_pi, state)

    def observe(self, steps: Steps) -> None:
        self.counts.add(steps)
        pi, gamma = self.log_pi.exp(), self.sizes.gamma
        if self.critic is None:
            self.Q = history_backup(self.counts, pi, self.Q, gamma, q0=self.q0, prior=self.prior)
        else:
            self.Q = self.critic(self.counts, pi, self.Q, gamma)
        self.log_pi = self.actor(self.log_pi, self.Q, self._eta)


class PosteriorSampling:
    """Posterior sampling (Osband et al. 2013): each round plays the optimal policy of one MDP drawn from the posterior.

    P(.|s,a) ~ Dirichlet(concentration + N(s,a,.)); a reward is known once seen, and before that uniform on `reward_range`.

    Args:
        rng: generator of the posterior draws.
        concentration: of the Dirichlet prior; 1 is the law of the random family itself.
        reward_range: prior of rewards not seen yet.
        returned: ``"sampled"`` returns the policy that the next round would play, ``"mean"`` the optimal policy of the
            posterior mean.
    """

    window = None

    def __init__(
        self,
        rng: np.random.Generator,
        *,
        concentration: Setting = 1.0,
        reward_range: tuple[float, float] = (-1.0, 1.0),
        returned: str = "sampled",
    ) -> None:
        if returned not in ("sampled", "mean"):
            raise ValueError(f"returned must be sampled or mean, got {returned!r}")
        self.rng, self.concentration, self.reward_range, self.returned = rng, concentration, reward_range, returned

    def reset(self, sizes: Sizes) -> None:
        self.sizes, self.counts = sizes, Counts(sizes)
        self._sampled = self._returned = sizes.table(-math.log(sizes.n_actions))

    def policy(self) -> Tensor:
        return self._returned

    def act(self, state: Tensor) -> Tensor:
        return rows(self._sampled, state)

    def observe(self, steps: Steps) -> None:
        self.counts.add(steps)
        seen, weight = self.counts.visits > 0, self.counts.N + fitted(self.concentration, 3)
        low, high = self.reward_range
        u = torch.from_numpy(self.rng.random(weight.shape))
        reward = low + (high - low) * torch.from_numpy(self.rng.random(seen.shape))
        # Gammas by inverse CDF: every entry uses one uniform, so an MDP's draws don't depend on its batch mates' counts.
        gammas = torch.from_numpy(gammaincinv(weight.numpy(), u.numpy())).clamp(min=1e-300)
        self._sampled = self._returned = self._optimal(gammas, torch.where(seen, self.counts.R, reward))
        if self.returned == "mean":
            self._returned = self._optimal(weight, torch.where(seen, self.counts.R, (low + high) / 2))

    def _optimal(self, weight: Tensor, R: Tensor) -> Tensor:
        """log of the optimal policy under P ~ weight: 0 on the greedy action, -inf elsewhere."""
        model = MDP(weight / weight.sum(-1, keepdim=True), R, self.sizes.gamma)
        return one_hot_greedy(solve(model).Q_star).log()
