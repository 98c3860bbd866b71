"""What a cell learns: its batches, its loss and its audit.  `train` knows nothing of signals, this module nothing of steps.

Batches have a leading run axis: G runs, B examples each.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .contexts import ContextSet, training_contexts, validation_contexts
from .decoder import Decoder
from .learned import LearnedActor, LearnedCritic, actor_inputs, critic_inputs
from .mdp import backup
from .objectives import effective_coordinates, label_loss, prox_loss, reward_loss
from .protocol import CellConfig
from .seeding import rng_for
from .tokens import TokenLayout, Transitions, gauge_fixed, sample_transitions

Batch = dict[str, Tensor]


def single_run(decoder: Decoder, g: int) -> Decoder:
    """Run `g` of a group as a network of its own, on the CPU."""
    one = Decoder(decoder.config, dtype=decoder.head_w.dtype)
    one.load_state_dict({name: t.detach()[g : g + 1].cpu() for name, t in decoder.named_parameters()})
    return one.requires_grad_(False)


class ActorTask:
    """Actors under any of the signals; examples are tokenised once."""

    def __init__(self, config: CellConfig, runs: Sequence[int], device: torch.device) -> None:
        self.config, self.runs, self.device = config, runs, device
        self.layout = TokenLayout(config.n_states, config.environment.n_actions)
        self.raw = config.signal == "policy_attention_raw"
        self.increment = config.signal == "policy_attention_increment"
        sets = [_training_set(config, run) for run in runs]
        self.data = {
            "tokens": self._stack([self._tokens(c) for c in sets]),
            "log_pi": self._stack([c.log_pi for c in sets]),
            "adv": self._stack([gauge_fixed(c.Q) for c in sets]),
            "eta": self._stack([c.eta for c in sets]),
            "target": self._stack([c.target().exp() for c in sets]),
        }
        self.held_out = _validation_set(config)

    def _stack(self, parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).to(torch.float32).to(self.device)  # MPS has no float64

    def _tokens(self, contexts: ContextSet) -> Tensor:
        clamp = self.config.contexts.log_pi_clamp
        return actor_inputs(self.layout, contexts.log_pi, contexts.Q, contexts.eta, clamp=clamp, raw=self.raw)

    def block(self, number: int, steps: int, batch: int) -> Batch:
        """The batches of block `number`, ``[steps, G, B, ...]``, the same whatever happened before."""
        index = torch.stack([_indices(self.config, "actor", run, number, steps, batch) for run in self.runs], 1)
        index = index.to(self.device)
        run = torch.arange(len(self.runs), device=self.device)[None, :, None]
        return {name: x[run, index] for name, x in self.data.items()}

    def loss(self, decoder: Decoder, batch: Batch) -> Tensor:
        """Mean loss of each run, ``[G]``."""
        logits = decoder(batch["tokens"], last=self.config.n_states)
        if self.increment:
            logits = logits + batch["log_pi"]
        if self.config.signal == "pmd_target":
            rows = label_loss(logits, batch["target"])
        elif self.config.signal == "reward_only":
            rows = reward_loss(logits, batch["adv"])
        else:  # <p, adv> and <p, Q> differ by a constant of the row
            rows = prox_loss(logits, batch["log_pi"], batch["adv"], batch["eta"])
        return rows.mean((-2, -1))

    def audit(self, decoder: Decoder) -> dict[str, list]:
        """Mean row-L1 to the exact PMD step and effective coordinates on the validation contexts, one entry a run."""
        c = self.held_out
        measured: dict[str, list] = {"row_l1": [], "coordinates": [], "r_squared": []}
        for g in range(len(self.runs)):
            one = single_run(decoder, g)
            actor = LearnedActor(one, self.layout, self.config.contexts.log_pi_clamp, self.raw, self.increment)
            logits = actor.logits(c.log_pi, c.Q, c.eta)
            q = c.target().exp()
            measured["row_l1"].append((logits.softmax(-1) - q).abs().sum(-1).mean().item())
            coordinates, r_squared = effective_coordinates(logits, c.log_pi, c.Q, c.eta, weight=q)
            measured["coordinates"].append(coordinates.tolist())
            measured["r_squared"].append(r_squared.item())
        return measured


class CriticTask:
    """Critics: the mean reward and the mean next value of the draws in the context, drawn anew for every step."""

    def __init__(self, config: CellConfig, runs: Sequence[int], device: torch.device) -> None:
        assert config.critic is not None
        self.config, self.runs, self.device, self.m = config, runs, device, config.critic.samples_per_pair
        self.layout = TokenLayout(config.n_states, config.environment.n_actions)
        self.sets = [_training_set(config, run) for run in runs]
        self.next_policies = [c.target() for c in self.sets]
        self.held_out = _validation_set(config)

    def _targets(self, Q: Tensor, transitions: Transitions) -> Tensor:
        """Means over a pair's draws of r and of Q(s', a') - mean Q, ``[..., S*A, 2]``."""
        centred = (Q - Q.mean((-2, -1), keepdim=True)).flatten(-2)
        next_value = centred.gather(-1, transitions.s_next * Q.shape[-1] + transitions.a_next)
        pairs = torch.stack([transitions.r, next_value], -1).unflatten(-2, (-1, self.m))
        return pairs.mean(-2)

    def block(self, number: int, steps: int, batch: int) -> Batch:
        """The batches of block `number`, ``[steps, G, B, ...]``."""
        tokens, targets = [], []
        for run, contexts, log_pi_next in zip(self.runs, self.sets, self.next_policies, strict=True):
            index = _indices(self.config, "critic", run, number, steps, batch)
            rng = rng_for("train-draws", self.config.n_states, run, number, root=self.config.root_seed)
            Q = contexts.Q[index]
            draws = sample_transitions(contexts.mdp[index], log_pi_next[index], self.m, rng)
            tokens.append(critic_inputs(self.layout, Q, draws).to(torch.float32))
            targets.append(self._targets(Q, draws).to(torch.float32))
        return {"tokens": torch.stack(tokens, 1).to(self.device), "target": torch.stack(targets, 1).to(self.device)}

    def loss(self, decoder: Decoder, batch: Batch) -> Tensor:
        """Mean squared error of rbar plus that of Qbar, ``[G]``."""
        error = decoder(batch["tokens"], last=batch["target"].shape[-2]) - batch["target"]
        return error.square().sum(-1).mean((-2, -1))

    def audit(self, decoder: Decoder) -> dict[str, list]:
        """Mean absolute error to the exact backup and to the draws' own mean backup on the validation contexts."""
        c = self.held_out
        log_pi_next, gamma = c.target(), c.mdp.gamma
        rng = rng_for("validation-draws", self.config.n_states, root=self.config.root_seed)
        draws = sample_transitions(c.mdp, log_pi_next, self.m, rng)
        exact = backup(c.mdp, log_pi_next.exp(), c.Q)
        r, q = self._targets(c.Q, draws).unflatten(-2, c.Q.shape[-2:]).unbind(-1)
        sampled = r + gamma * (q + c.Q.mean((-2, -1), keepdim=True))
        measured: dict[str, list] = {"mae": [], "mae_to_draws": []}
        for g in range(len(self.runs)):
            r, q = LearnedCritic(single_run(decoder, g), self.layout, self.m).read(c.Q, draws)
            value = r + gamma * (q + c.Q.mean((-2, -1), keepdim=True))
            measured["mae"].append((value - exact).abs().mean().item())
            measured["mae_to_draws"].append((value - sampled).abs().mean().item())
        return measured | {"mae_of_draws": [(sampled - exact).abs().mean().item()] * len(self.runs)}


Task = ActorTask | CriticTask


def make_task(config: CellConfig, runs: Sequence[int], device: torch.device) -> Task:
    """The task of a cell for a group of runs."""
    return (CriticTask if config.signal == "critic" else ActorTask)(config, runs, device)


def _training_set(config: CellConfig, run: int) -> ContextSet:
    return training_contexts(config.environment, config.contexts, config.n_states, run, root=config.root_seed)


def _validation_set(config: CellConfig) -> ContextSet:
    size = dict(n_mdps=config.audit.n_mdps, n=config.audit.n_contexts)
    return validation_contexts(config.environment, config.contexts, config.n_states, **size, root=config.root_seed)


def _indices(config: CellConfig, kind: str, run: int, number: int, steps: int, batch: int) -> Tensor:
    """Examples of a block, ``[steps, B]``: every signal sees the same ones in the same order."""
    rng = rng_for("batches", kind, config.n_states, run, number, root=config.root_seed)
    return torch.from_numpy(rng.integers(config.contexts.n_contexts, size=(steps, batch)))


def least_losses(config: CellConfig, run: int, steps: int) -> Tensor:
    """The least possible loss of a run on its own batches, mean over each `steps` steps, ``[budget / steps]`` in float64.

    What a logged loss exceeds it by is KL(p, q) for the signals without labels, KL(q, p) for labels, both to the PMD step q,
    and the shortfall from the best action for reward alone.  For a critic it is 0.
    """
    n = config.budget.steps // steps
    if config.signal == "critic":
        return torch.zeros(n, dtype=torch.float64)
    c = _training_set(config, run)
    log_q, adv = c.target(), gauge_fixed(c.Q)
    if config.signal == "pmd_target":
        rows = label_loss(log_q, log_q.exp())
    elif config.signal == "reward_only":
        rows = -adv.amax(-1)
    else:
        rows = prox_loss(log_q, c.log_pi, adv, c.eta)
    least = rows.mean(-1)  # [n_contexts]
    return torch.stack([least[_indices(config, "actor", run, i, steps, config.budget.batch)].mean() for i in range(n)])
