"""Learning in effective coordinates: the logit model ``p = softmax(Phi theta)``, its population gradient and its flows.

Shapes in comments: N rows (a state of a context each), A actions, d coordinates.  Float64 throughout.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .objectives import centred, fisher, label_loss, prox_loss, reward_loss
from .pmd import per_pair

Gradient = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LogitModel:
    """Rows of tasks under the logit model ``p = softmax(Phi theta)`` with the action-constant gauge removed.

    It is realizable when some theta* has ``softmax(Phi theta*) = PMD_eta(pi, Q)`` on every row.

    Attributes:
        Phi: features ``[N, A, d]``, centred over actions by the constructor.
        log_pi, eta_Q: the context of each row, ``[N, A]``.
    """

    Phi: Tensor
    log_pi: Tensor
    eta_Q: Tensor

    def __post_init__(self) -> None:
        shapes = {name: tuple(getattr(self, name).shape) for name in ("Phi", "log_pi", "eta_Q")}
        if len(shapes["Phi"]) != 3 or not shapes["Phi"][:2] == shapes["log_pi"] == shapes["eta_Q"]:
            raise ValueError(f"need Phi [N, A, d], log_pi [N, A] and eta_Q [N, A], got {shapes}")
        object.__setattr__(self, "Phi", self.Phi - self.Phi.mean(-2, keepdim=True))

    def policy(self, theta: Tensor) -> Tensor:
        """q_theta = softmax(Phi theta), ``[d]`` to ``[N, A]``."""
        return torch.softmax(self.Phi @ theta, -1)

    def risk(self, theta: Tensor, loss: str = "prox") -> Tensor:
        """Mean over rows of a training signal: ``prox`` (no labels), ``label`` (cross-entropy) or ``reward``."""
        logits = self.Phi @ theta
        if loss == "label":
            return label_loss(logits, torch.softmax(self.log_pi + self.eta_Q, -1)).mean()
        if loss == "reward":
            return reward_loss(logits, self.eta_Q).mean()
        return prox_loss(logits, self.log_pi, self.eta_Q, 1.0).mean()

    def information(self, theta: Tensor) -> Tensor:
        """M(theta) = E[Phi^T H(q_theta) Phi], ``[d]`` to ``[d, d]``."""
        return (self.Phi.mT @ fisher(self.policy(theta)) @ self.Phi).mean(0)

    def population_gradient(self, theta: Tensor, theta_star: Tensor) -> Tensor:
        """M(theta) (theta - theta*): the gradient of the ``prox`` risk if the model is realizable at theta*."""
        return self.information(theta) @ (theta - theta_star)

    def gradient(self, loss: str = "prox") -> Gradient:
        """The gradient of `risk` by automatic differentiation, a function of theta."""

        def of(theta: Tensor) -> Tensor:
            theta = theta.detach().requires_grad_(True)
            return torch.autograd.grad(self.risk(theta, loss), theta)[0]

        return of

    def slowest_rate(self, theta: Tensor) -> float:
        """lambda_min(M(theta))."""
        return torch.linalg.eigvalsh(self.information(theta))[0].item()

    @property
    def squared_norm(self) -> float:
        """E ||Phi||^2 in the operator norm; M(theta) <= E ||Phi||^2 / 2 for every theta, since H(q) <= 1/2."""
        return torch.linalg.matrix_norm(self.Phi, 2).square().mean().item()


def effective_model(log_pi: Tensor, Q: Tensor, eta: float | Tensor) -> LogitModel:
    """The two effective coordinates of an actor: features log pi and eta Q, realizable at theta* = (1, 1).

    Args:
        log_pi, Q: contexts ``[*batch, S, A]``.
        eta: scalar or ``[*batch]``.
    """
    rows = torch.stack([log_pi, per_pair(eta) * Q], -1).to(torch.float64).flatten(0, -3)  # [N, A, 2]
    return LogitModel(rows, rows[..., 0], rows[..., 1])


def realizable_model(Phi: Tensor, theta_star: Tensor, log_pi: Tensor) -> LogitModel:
    """Any features made realizable: eta Q is chosen so that log pi + eta Q = Phi theta* up to a constant of the row."""
    return LogitModel(Phi, log_pi, centred(Phi @ theta_star) - log_pi)


def gradient_flow(gradient: Gradient, theta: Tensor, times: np.ndarray, *, origin: Tensor) -> Tensor:
    """d theta / dt = -gradient(theta), solved at increasing `times` (the first is the start), ``[d]`` to ``[T, d]``.

    Errors are controlled relative to theta - origin: with the limit as origin even its last digits decay at the right rate.
    """
    from scipy.integrate import solve_ivp

    def velocity(_: float, x: np.ndarray) -> np.ndarray:
        return -gradient(origin + torch.from_numpy(x)).numpy()

    span, start = (times[0], times[-1]), (theta - origin).numpy()
    # Rates spread over orders of magnitude (the flow is stiff), which LSODA takes in its stride.
    solution = solve_ivp(velocity, span, start, method="LSODA", t_eval=times, rtol=1e-8, atol=1e-14)
    if not solution.success:
        raise RuntimeError(f"the flow could not be solved: {solution.message}")
    return origin + torch.from_numpy(solution.y.T.copy())


def gradient_descent(gradient: Gradient, theta: Tensor, lr: float, steps: int) -> Tensor:
    """theta_{k+1} = theta_k - lr gradient(theta_k), ``[d]`` to ``[steps + 1, d]``."""
    path = [theta]
    for _ in range(steps):
        path.append(path[-1] - lr * gradient(path[-1]))
    return torch.stack(path)


def decay_rate(times: np.ndarray, distance: np.ndarray, *, low: float, high: float) -> float:
    """Slope of -log(distance) over time by least squares, on the points with low <= distance <= high."""
    inside = (distance >= low) & (distance <= high)
    if inside.sum() < 2:
        raise ValueError(f"only {inside.sum()} distances lie in [{low:g}, {high:g}]; a rate needs two")
    return -np.polyfit(times[inside], np.log(distance[inside]), 1)[0]


def flow_rate(model: LogitModel, theta_star: Tensor, start: Tensor, loss: str = "prox") -> tuple[float, float]:
    """The rate of gradient flow at theta*: predicted, lambda_min(M(theta*)), and measured on the flow from `start`."""
    predicted = model.slowest_rate(theta_star)
    times = np.linspace(0, 20 / predicted, 401)
    path = gradient_flow(model.gradient(loss), start, times, origin=theta_star)
    return predicted, decay_rate(times, (path - theta_star).norm(dim=-1).numpy(), low=1e-8, high=1e-5)


def descent_factor(model: LogitModel, theta_star: Tensor, lr: float, steps: int = 50) -> tuple[float, float]:
    """The factor of a step of descent near theta*: predicted, 1 - lr lambda_min(M(theta*)), and measured."""
    values, vectors = torch.linalg.eigh(model.information(theta_star))
    path = gradient_descent(model.gradient(), theta_star + 1e-4 * vectors[:, 0], lr, steps)
    error = (path - theta_star).norm(dim=-1)
    return 1 - lr * values[0].item(), ((error[-1] / error[0]) ** (1 / steps)).item()
