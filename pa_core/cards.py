"""Model cards: what a cell's networks are, written from the records of its runs and from nothing else."""

from pathlib import Path
from typing import Any

import pandas as pd

from .decoder import Decoder
from .files import write_atomically
from .protocol import CellConfig, load_protocol
from .runs import ARTIFACTS, decoder_config, finished_runs, read_record

# What is minimised, and how the output is read; `{m}` is the number of draws a pair.
TARGETS = {
    "policy_attention": ("KL(p, pi) - eta <p, Q>, without labels", "softmax of the output"),
    "pmd_target": ("cross-entropy to exact PMD labels", "softmax of the output"),
    "reward_only": ("-<p, Q>, the value alone", "softmax of the output"),
    "policy_attention_increment": ("KL(p, pi) - eta <p, Q>, without labels", "softmax of log pi + output"),
    "policy_attention_raw": ("KL(p, pi) - eta <p, Q>, without labels", "softmax of the output"),
    "critic": ("squared errors to the means of r and of Q(s', a') over the {m} draws in the context", "r + gamma Q"),
}
LIMITS = """\
- Trained on random MDPs of one size (Dirichlet transitions, uniform rewards) at one discount, around rounds 0 to {last} of
  the loop. Other sizes need another network, since states are one-hot. What happens on other families, discounts and
  horizons is measured in the book's chapters 09 to 11; beyond what is measured there, expect nothing.
- These are small research networks for tabular problems; they are of no use for decisions that matter to anyone."""


def card(cell: str, root: Path = ARTIFACTS) -> str:
    """The text of a cell's card, in Markdown.

    Raises:
        ValueError: if the cell has no finished run under `root`; RunError if a record is damaged.
    """
    numbers = finished_runs(cell, root)
    if not numbers:
        raise ValueError(f"{cell} has no finished run in {root}, hence no card")
    records = [read_record(cell, run, root) for run in numbers]
    config = load_protocol().cell(cell)
    parts = [f"# {cell}", _summary(config, records), "## Runs", _markdown(_run_table(config, records))]
    parts += [_measures(config), "## How it was trained", _markdown(_size_table(config, records))]
    parts += ["## Load", _loading(config), "## Limits", LIMITS.format(last=config.contexts.rounds - 1)]
    parts += ["## Licence", "MIT, as the rest of the repository."]
    note = "Written by `python -m pa_core cards` from the records beside it; do not edit."
    return "\n\n".join([*parts, note]) + "\n"


def write_card(cell: str, root: Path = ARTIFACTS) -> Path:
    """Write ``<root>/<cell>/README.md``; returns the file."""
    path = root / cell / "README.md"
    write_atomically(path, card(cell, root))
    return path


def write_cards(root: Path = ARTIFACTS) -> list[Path]:
    """Write the card of every cell of the protocol that has a finished run under `root`; returns the files."""
    return [write_card(cell, root) for cell in load_protocol().cells if finished_runs(cell, root)]


def cell_table(root: Path = ARTIFACTS) -> pd.DataFrame:
    """One row a registered cell: runs finished and missing under `root`, budget and parameters."""
    protocol, rows = load_protocol(), []
    for name, registered in protocol.cells.items():
        config, finished = protocol.cell(name), finished_runs(name, root)
        rows.append(
            {
                "cell": name,
                "finished": f"{len(finished)} of {registered}",
                "missing": ",".join(str(run) for run in range(registered) if run not in finished) or "-",
                "steps": config.budget.steps,
                "batch": config.budget.batch,
                "parameters": Decoder(decoder_config(config)).n_parameters,
            }
        )
    return pd.DataFrame(rows)


def _summary(config: CellConfig, records: list[dict[str, Any]]) -> str:
    kind = "A critic" if config.signal == "critic" else "An actor"
    registered = load_protocol().cells[config.name]
    return (
        f"{kind} for MDPs with {config.n_states} states and {config.environment.n_actions} actions: a causal softmax "
        f"Transformer with {records[0]['n_parameters']:,} parameters, trained from scratch. {len(records)} of "
        f"{registered} registered runs. Weights are in `<run>.safetensors`, everything else about a run in `<run>.json`."
    )


def _size_table(config: CellConfig, records: list[dict[str, Any]]) -> pd.DataFrame:
    c, m, o = config.contexts, config.model, config.optimiser
    env, draws = config.environment, config.critic.samples_per_pair if config.critic else 0
    target, read_out = TARGETS[config.signal]
    eta, noise = "{} to {}".format(*c.eta_range), f"Gaussian noise of sd {c.noise_sd} on Q in {c.noise_probability:.0%}"
    rows = {
        "minimised": target.format(m=draws),
        "read-out": read_out,
        "network": f"{m.n_layer} pre-LN blocks, {m.n_head} heads of size {m.d_head}, width {m.d_model}, "
        f"feed-forward {m.d_ffn}",
        "environments": f"{c.n_mdps} random MDPs a run, gamma {env.gamma}, Dirichlet({env.concentration:g}) transitions, "
        "rewards uniform on [{:g}, {:g}]".format(*env.reward_range),
        "examples": f"{c.n_contexts:,} a run: rounds 0 to {c.rounds - 1} of Q-TD-PMD, eta {eta}, {noise}",
        "budget": f"{config.budget.steps:,} steps of batch {config.budget.batch}",
        "optimiser": f"AdamW, rate {o.lr:g}, {o.warmup_steps} warm-up steps, cosine to {o.final_fraction:.0%}, "
        f"weight decay {o.weight_decay:g}",
        "seeds": f"named streams of root {config.root_seed}; the run's number names its stream",
        "configuration (SHA-256)": f"`{config.hash}`",
    }
    return pd.DataFrame({"": rows.keys(), "value": rows.values()})


def _run_table(config: CellConfig, records: list[dict[str, Any]]) -> pd.DataFrame:
    def row(record: dict[str, Any]) -> dict[str, Any]:
        last, start = record["log"][-1], record["provenance"][0]
        if config.signal == "critic":
            measured = {"MAE": f"{last['mae']:.4f}", "MAE of the draws": f"{last['mae_of_draws']:.4f}"}
        else:
            measured = {"row-L1": f"{last['row_l1']:.5f}"}
            measured["coordinates"] = ", ".join(f"{x:.4f}" for x in last["coordinates"])
        commits = ", ".join(dict.fromkeys(f"`{str(p['source_commit'])[:10]}`" for p in record["provenance"]))
        return {
            "run": record["run"],
            **measured,
            "group": ", ".join(map(str, record["grouping"]["runs"])),
            "seconds of the group": f"{record['wall_seconds_of_group']:.0f}",
            "device": start["device"],
            "torch": start["versions"]["torch"],
            "source": commits,
            "protocol": f"`{str(start['protocol_commit'])[:10]}`",
            "weights (SHA-256)": f"`{record['weights_sha256'][:16]}`",
        }

    return pd.DataFrame([row(record) for record in records])


def _measures(config: CellConfig) -> str:
    where = f"on {config.audit.n_contexts} validation contexts, at the last step; nothing was selected by it"
    if config.signal == "critic":
        return (
            f"MAE: mean absolute error to the exact one-step backup, {where}. The draws in the context, averaged without "
            "any network, have the error beside it, which no critic that sees only them can be expected to beat by much."
        )
    return (
        f"Row-L1: mean L1 distance between the returned row and the exact PMD step, {where}. Coordinates: coefficients "
        "of log pi and eta Q in the logits, in the Fisher metric; exact PMD has 1, 1 (chapter 06)."
    )


def _loading(config: CellConfig) -> str:
    if config.signal == "critic":
        name, call = "load_critic", "critic(mdp, log_pi_next, Q, rng)  # Q_next, float64 [*batch, S, A]"
    else:
        name, call = "load_actor", "actor(log_pi, Q, eta)  # log of the next policy, float64 [*batch, S, A]"
    lines = [f"from pa_core.runs import {name}", f'{name.split("_")[1]} = {name}("{config.name}", 0)', call]
    return "\n".join(["```python", *lines, "```", "", "Loading refuses a file whose checksum or configuration differs."])


def _markdown(table: pd.DataFrame) -> str:
    rows = [list(map(str, table.columns)), ["---"] * table.shape[1], *table.astype(str).values.tolist()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
