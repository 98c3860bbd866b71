"""Where a closed loop loses: what the returned-policy theorem gives away step by step, and drift in near ties."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .bounds import error_recursion, greedy_gap_bound, prior_mass_price, returned_policy_bound, span, transition_lift
from .control import Trajectory
from .evaluation import Problem
from .mdp import evaluate
from .pmd import pmd_step

TIE = 1e-9  # actions closer than this in Q* are equally good


def bound_ladder(problem: Problem, loop: Trajectory, eta: float) -> dict[str, Tensor]:
    """The returned-policy theorem in steps from the truth to what residuals alone certify (book, chapter 03).

    Every entry is ``[T, *batch]`` for the policies returned after 1, ..., T rounds, and each is at most the next:

    - truth: max_s V*(s) - V^{pi_T}(s)
    - measured E and gap: the theorem's last step alone, from the measured E_{T-1} and gmax
    - measured gaps: E_{T-1} from the recursion over the measured delta_j and gbar_j
    - residuals: gbar_j and gmax replaced by the prior-mass price and the span times zeta_j
    """
    mdp, gamma = problem.mdp, problem.mdp.gamma
    truth = (problem.solution.V_star - evaluate(mdp, loop.log_pi[1:].exp())).amax(-1)
    price = prior_mass_price(loop.log_pi[:-1], loop.Q[:-1])  # [T, *batch, S]
    width = span(loop.Q[:-1])
    gbar = greedy_gap_bound(transition_lift(mdp, price), eta, width, loop.zeta)
    gmax = greedy_gap_bound(price.amax(-1), eta, width, loop.zeta)
    measured = error_recursion(loop.E[0], loop.delta, loop.gbar, gamma)[:-1]
    certified = error_recursion(loop.E[0], loop.delta, gbar, gamma)[:-1]
    return {
        "truth": truth,
        "measured E and gap": returned_policy_bound(loop.E[:-1], loop.gmax, gamma),
        "measured gaps": returned_policy_bound(measured, loop.gmax, gamma),
        "residuals": returned_policy_bound(certified, gmax, gamma),
    }


@dataclass(frozen=True)
class NearTie:
    """Log-odds of the two best actions in each MDP's state of the smallest gap; exact ties cost nothing and do not count.

    Attributes:
        gap: Q* of the best minus Q* of the second action there, ``[n]``.
        exact: the oracle's log-odds, ``[n]``.
        learned: those of the learned loops, ``[n_runs, n]``.
        summed: same-context errors of the single steps in these log-odds, added up over the rounds, ``[n_runs, n]``.
    """

    gap: Tensor
    exact: Tensor
    learned: Tensor
    summed: Tensor

    @property
    def drift(self) -> Tensor:
        """Learned minus exact, ``[n_runs, n]``."""
        return self.learned - self.exact

    def excess(self) -> Tensor:
        """Mass on the second of the two actions, learned over exact, ``[n_runs, n]``."""
        return torch.sigmoid(-self.learned) / torch.sigmoid(-self.exact)


def near_ties(problem: Problem, loop: Trajectory, oracle: Trajectory, eta: float, rounds: int) -> NearTie:
    """`NearTie` of learned loops ``[n_runs, n]`` and the exact one ``[n]`` after `rounds` rounds at step size `eta`."""
    values, order = problem.solution.Q_star.sort(-1, descending=True)
    gaps = values[..., 0] - values[..., 1]
    gap, state = gaps.where(gaps > TIE, torch.inf).min(-1)
    n = torch.arange(problem.n_tasks)
    best, second = order[n, state, 0], order[n, state, 1]

    def odds(log_pi: Tensor) -> Tensor:
        return log_pi[..., n, state, best] - log_pi[..., n, state, second]

    exact_steps = pmd_step(loop.log_pi[:rounds], loop.Q[:rounds], eta)
    summed = (odds(loop.log_pi[1 : rounds + 1]) - odds(exact_steps)).sum(0)
    return NearTie(gap, odds(oracle.log_pi[rounds]), odds(loop.log_pi[rounds]), summed)
