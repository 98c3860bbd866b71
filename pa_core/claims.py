"""The ledger of the paper's claims: what each says, how it is judged, and how a chapter records what it measured.

``claims.yaml`` holds the paper's side alone and never a value of ours.  `record` leaves a machine-readable output in the
executed notebook, from which the builder collects them.
"""

import difflib
import math
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from .stats import Estimate
from .validated import Frozen, read_model

PATH = Path(__file__).with_name("claims.yaml")
MIME = "application/vnd.pa-core.claim+json"
VERDICTS = ("reproduced", "better", "weaker", "differs", "not comparable")

Sign = Annotated[int, Field(ge=-1, le=1)]


class ClaimError(ValueError):
    """An unknown claim, or a value that cannot be recorded for it."""


class Claim(Frozen):
    """One number of the paper.

    Attributes:
        estimand: what is measured, in our words.
        paper: the paper's value; None where it states a direction only.
        paper_ci: its 95% interval, where it has one.
        paper_sign: -1, 0 or 1: on which side of `null` the paper places the quantity (0: it cannot tell).  For rule `sign`.
        where: table, figure or section of the paper.
        unit: unit of the value.
        better: the side on which a value is better; ``nearer`` means nearer to `target`.
        target: see `better`.
        null: the value that rule `sign` compares with.
        rule: how the verdict is reached, see `verdict`.
        note: what a reader must know to judge the comparison.
    """

    estimand: str = Field(min_length=1)
    paper: float | None = None
    paper_ci: list[float] | None = Field(default=None, min_length=2, max_length=2)
    paper_sign: Sign | None = None
    where: str = Field(min_length=1)
    unit: str = Field(min_length=1)
    better: Literal["lower", "higher", "nearer"]
    target: float | None = None
    null: float = 0.0
    rule: Literal["interval", "sign", "scale"]
    note: str = ""

    @model_validator(mode="after")
    def _complete(self) -> "Claim":
        if (self.better == "nearer") != (self.target is not None):
            raise ValueError("`target` goes with `better: nearer`, and only with it")
        if (self.rule == "sign") != (self.paper_sign is not None):
            raise ValueError("`paper_sign` goes with `rule: sign`, and only with it")
        if self.rule == "sign" and self.better == "nearer":
            raise ValueError("`rule: sign` needs `better: lower` or `better: higher`")
        if self.rule != "sign" and self.paper is None:
            raise ValueError(f"`rule: {self.rule}` needs the value `paper`")
        if self.paper_ci is not None and not self.paper_ci[0] <= self.paper_ci[1]:
            raise ValueError("`paper_ci` must be in order")
        return self


class Ledger(Frozen):
    """All claims by id."""

    claims: dict[str, Claim]


def read_claims(path: Path) -> dict[str, Claim]:
    """Read and validate a ledger.

    Raises:
        ValueError: one line a problem, each naming the file and the key.
    """
    return read_model(path, lambda raw: Ledger.model_validate({"claims": raw}), "claims by id", skip=1).claims


@cache
def load_claims() -> dict[str, Claim]:
    """The project's own ledger, ``pa_core/claims.yaml``."""
    return read_claims(PATH)


def _side(low: float, high: float, null: float) -> int:
    """-1, 0 or 1: the interval lies below, around or above `null`."""
    return 1 if low > null else -1 if high < null else 0


def verdict(claim: Claim, value: float, ci: tuple[float, float] | None = None) -> str:
    """The registered verdict on our `value` with its 95% interval (a value without one is its own interval).

    - ``interval``: *reproduced* if the paper's value lies inside our interval, else *better* or *weaker*; ``nearer``
      compares the distances to the target.
    - ``sign``: *reproduced* if our interval lies on the paper's side of `null` (or, like the paper's, around it), *differs*
      if it lies on the opposite side, else *better* or *weaker* by the direction in which it moved.
    - ``scale``: *not comparable*, whatever was measured: the quantity needs something that the paper does not tell.
    """
    low, high = ci or (value, value)
    if claim.rule == "scale":
        return "not comparable"
    if claim.rule == "sign":
        assert claim.paper_sign is not None
        moved = _side(low, high, claim.null) - claim.paper_sign
        if moved == 0:
            return "reproduced"
        if abs(moved) == 2:
            return "differs"
    else:
        assert claim.paper is not None
        if low <= claim.paper <= high:
            return "reproduced"
        if claim.better == "nearer":
            assert claim.target is not None
            return "better" if abs(value - claim.target) < abs(claim.paper - claim.target) else "weaker"
        moved = value - claim.paper
    return "better" if (moved < 0) == (claim.better == "lower") else "weaker"


def assess(
    claim_id: str, value: float, ci: tuple[float, float] | None = None, n: str | None = None, note: str = ""
) -> dict[str, Any]:
    """The record of a measured claim as plain JSON.

    Raises:
        ClaimError: for an id that the ledger lacks, a value that is not finite, or an interval without order.
    """
    claims = load_claims()
    if claim_id not in claims:
        close = difflib.get_close_matches(claim_id, claims, 1)
        hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(claims)}"
        raise ClaimError(f"no claim {claim_id!r} in {PATH.name}; {hint}")
    value = float(value)
    if not math.isfinite(value):
        raise ClaimError(f"claim {claim_id}: the value is {value}")
    if ci is not None:
        ci = (float(ci[0]), float(ci[1]))
        if not ci[0] <= ci[1]:  # also refuses nan
            raise ClaimError(f"claim {claim_id}: the interval {ci} is not in order")
    claim = claims[claim_id]
    return {
        "id": claim_id,
        "value": value,
        "ci": None if ci is None else list(ci),
        "n": n,
        "note": note,
        "paper": claim.paper,
        "paper_ci": claim.paper_ci,
        "verdict": verdict(claim, value, ci),
    }


_WORDS = {-1: "below {}", 0: "not told from {}", 1: "above {}"}


def line(record: dict[str, Any], spec: str = ".4g") -> str:
    """A record in one line of text."""
    claim = load_claims()[record["id"]]

    def interval(ci) -> str:
        return "" if ci is None else f" [{ci[0]:{spec}}, {ci[1]:{spec}}]"

    sign = _WORDS[claim.paper_sign or 0].format(f"{claim.null:g}")
    paper = sign if claim.paper is None else f"{claim.paper:{spec}}{interval(claim.paper_ci)}"
    n = f" ({record['n']})" if record["n"] else ""
    note = f"; {record['note']}" if record["note"] else ""
    ours = f"{record['value']:{spec}}{interval(record['ci'])}"
    return f"{record['id']}: paper {paper} | ours {ours}{n} | {record['verdict']}{note}"


def record(
    claim_id: str, value: float, ci: tuple[float, float] | None = None, n: str | None = None, note: str = ""
) -> None:
    """Record what a chapter measured for a claim of the ledger, and show the verdict.

    Args:
        claim_id: its id in ``claims.yaml``.
        value: our value of its estimand.
        ci: our 95% interval.
        n: the sample, e.g. ``"5 runs x 64 MDPs"``.
        note: what this run of the chapter adds.

    Raises:
        ClaimError: see `assess`.
    """
    from IPython.display import display  # a notebook has it; importing this module elsewhere does not need it

    made = assess(claim_id, value, ci, n, note)
    display({MIME: made, "text/plain": line(made)}, raw=True)


def record_row(claim_id: str, row: Any, note: str = "", *, task: str = "MDPs") -> None:
    """`record` for a row of a comparison table: its value, low, high, n_runs and n_tasks."""
    word = "run" if row["n_runs"] == 1 else "runs"
    record(claim_id, row["value"], (row["low"], row["high"]), f"{row['n_runs']} {word} x {row['n_tasks']} {task}", note)


def record_estimate(claim_id: str, estimate: Estimate, note: str = "", *, task: str = "MDPs") -> None:
    """`record` for an `Estimate`: value, interval and sample come from it."""
    low, high = estimate.ci
    row = {"value": estimate.value, "low": low, "high": high, "n_runs": estimate.n_runs, "n_tasks": estimate.n_tasks}
    record_row(claim_id, row, note, task=task)
