"""Training signals of an actor, and the effective coordinates of what it learned (paper, objective and Fisher result).

Rows are over the last axis (actions); losses keep the leading axes so that the caller averages.
"""

import torch
from torch import Tensor

from .pmd import per_pair


def prox_loss(logits: Tensor, log_pi: Tensor, Q: Tensor, eta: float | Tensor) -> Tensor:
    """l_prox(p) = KL(p || pi) - eta <p, Q> with p = softmax(logits), ``[*batch, S, A]`` to ``[*batch, S]``.

    Its minimiser is the PMD step q, and l_prox(p) - l_prox(q) = KL(p || q): the actor trains without PMD labels.
    """
    log_p = torch.log_softmax(logits, -1)
    return (log_p.exp() * (log_p - log_pi - per_pair(eta) * Q)).sum(-1)


def label_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy -<target, log p> to given probabilities, ``[*batch, S]``."""
    return -(target * torch.log_softmax(logits, -1)).sum(-1)


def reward_loss(logits: Tensor, Q: Tensor) -> Tensor:
    """-<p, Q>: reward alone, no prior, ``[*batch, S]``."""
    return -(torch.softmax(logits, -1) * Q).sum(-1)


def centred(x: Tensor) -> Tensor:
    """x minus its mean over actions: the softmax gauge removed."""
    return x - x.mean(-1, keepdim=True)


def fisher(q: Tensor) -> Tensor:
    """H(q) = diag(q) - q q^T, ``[..., A]`` to ``[..., A, A]``."""
    return torch.diag_embed(q) - q[..., :, None] * q[..., None, :]


def effective_coordinates(
    logits: Tensor, log_pi: Tensor, Q: Tensor, eta: float | Tensor, *, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Coefficients (a, b) of ``logits ~ a log pi + b eta Q`` after centring, by least squares over all rows.

    Args:
        logits: what a network returned, ``[*batch, S, A]`` (log-probabilities serve as well).
        log_pi, Q, eta: its context.
        weight: probabilities q ``[*batch, S, A]``; then the error is measured in the Fisher metric H(q), the one in which
            the objective is flat or steep, instead of the Euclidean one.

    Returns:
        ``(coefficients [2], r_squared [])`` in float64; exact PMD gives (1, 1) and 1.
    """
    x = torch.stack([log_pi, per_pair(eta) * Q], -1).to(torch.float64)
    y = logits.to(torch.float64)
    if weight is None:
        x, y = x - x.mean(-2, keepdim=True), centred(y)
    else:  # H(q) = L L^T with L = (I - q 1^T) diag(sqrt q); project with it and solve as before
        q = weight.to(torch.float64)
        x = q.sqrt()[..., None] * (x - (q[..., None] * x).sum(-2, keepdim=True))
        y = q.sqrt() * (y - (q * y).sum(-1, keepdim=True))
    x, y = x.reshape(-1, 2), y.reshape(-1)
    gram, moment = x.T @ x, x.T @ y
    coefficients = torch.linalg.lstsq(gram, moment[:, None]).solution[:, 0]
    residual = y - x @ coefficients
    return coefficients, 1 - residual.square().sum() / y.square().sum()
