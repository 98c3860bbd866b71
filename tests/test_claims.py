"""The ledger: every key is checked, verdicts follow the registered rules, records are refused by name."""

import json

import numpy as np
import pytest

from pa_core import book, claims
from pa_core.claims import Claim, ClaimError, assess, line, load_claims, read_claims, record, record_estimate, verdict
from pa_core.stats import Estimate

BASE = {"estimand": "a ratio", "where": "Table 1", "unit": "ratio"}


def make(**change) -> Claim:
    return Claim(**BASE, **{"paper": 1.0, "better": "lower", "rule": "interval", **change})


def test_the_projects_ledger_is_valid_and_holds_no_value_of_ours():
    ledger = load_claims()
    assert len(ledger) >= 19
    assert not {"value", "ours", "ci"} & set(Claim.model_fields)
    for name, claim in ledger.items():
        assert name.partition(".")[2], f"{name}: ids are <chapter's subject>.<quantity>"
        assert claim.paper_ci is None or claim.paper_ci[0] <= claim.paper <= claim.paper_ci[1]


@pytest.mark.parametrize(
    "text, message",
    [
        ("x.y: {estimand: a, where: b, unit: c, better: lower, rule: interval, paper: 1.0, ours: 2.0}", r"x\.y\.ours"),
        ("x.y: {estimand: a, where: b, unit: c, better: lower, rule: interval}", "x.y.*needs the value"),
        ("x.y: {estimand: a, where: b, unit: c, better: nearer, rule: interval, paper: 1.0}", "target"),
        ("x.y: {estimand: a, where: b, unit: c, better: lower, rule: sign, paper: 1.0}", "paper_sign"),
        ("x.y: {estimand: a, where: b, unit: c, better: down, rule: scale, paper: 1.0}", r"x\.y\.better"),
        ("x.y: {estimand: a, where: b, unit: c, better: lower, rule: scale, paper: '1'}", r"x\.y\.paper"),
        ("- 1", "mapping"),
        ("a: [", "YAML"),
    ],
)
def test_a_bad_ledger_is_refused_with_file_and_key(text, message, tmp_path):
    path = tmp_path / "claims.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read_claims(path)
    assert all(part.startswith(str(path)) for part in str(error.value).split("\n"))


@pytest.mark.parametrize(
    "change, value, ci, expected",
    [
        ({}, 0.95, (0.9, 1.1), "reproduced"),
        ({}, 0.95, (0.9, 0.99), "better"),
        ({}, 1.2, (1.1, 1.3), "weaker"),
        ({"better": "higher"}, 1.2, (1.1, 1.3), "better"),
        ({"better": "higher"}, 0.9, (0.8, 0.99), "weaker"),
        ({}, 1.0, None, "reproduced"),
        ({}, 1.01, None, "weaker"),
        ({"better": "nearer", "target": 1.5}, 1.4, (1.3, 1.45), "better"),
        ({"better": "nearer", "target": 1.5}, 2.2, (2.1, 2.3), "weaker"),
        ({"rule": "scale"}, 1.0, (0.9, 1.1), "not comparable"),
        ({"rule": "sign", "paper_sign": 1}, 0.2, (0.1, 0.3), "reproduced"),
        ({"rule": "sign", "paper_sign": 1}, 0.2, (-0.1, 0.3), "better"),
        ({"rule": "sign", "paper_sign": 1, "better": "higher"}, 0.2, (-0.1, 0.3), "weaker"),
        ({"rule": "sign", "paper_sign": 1}, -0.2, (-0.3, -0.1), "differs"),
        ({"rule": "sign", "paper_sign": 0}, 0.2, (-0.1, 0.3), "reproduced"),
        ({"rule": "sign", "paper_sign": 0}, 0.2, (0.1, 0.3), "weaker"),
        ({"rule": "sign", "paper_sign": 0}, -0.2, (-0.3, -0.1), "better"),
        ({"rule": "sign", "paper_sign": -1, "paper": None, "null": 1.0}, 0.8, (0.7, 0.9), "reproduced"),
    ],
)
def test_verdicts(change, value, ci, expected):
    assert verdict(make(**change), value, ci) == expected
    assert expected in claims.VERDICTS


def test_unknown_ids_and_broken_values_are_refused():
    with pytest.raises(ClaimError, match="did you mean control.ratio_t20"):
        assess("control.ratio_t2", 1.0)
    with pytest.raises(ClaimError, match="control.ratio_t20: the value is nan"):
        assess("control.ratio_t20", float("nan"))
    for ci in ((1.0, 0.9), (float("nan"), 1.0)):
        with pytest.raises(ClaimError, match="not in order"):
            assess("control.ratio_t20", 1.0, ci)


def test_a_record_is_plain_json_that_the_builder_collects(monkeypatch, tmp_path):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    record("control.ratio_t20", np.float64(1.01), (0.99, 1.06), n="5 runs x 64 MDPs", note="why")
    record_estimate("control.worst_run_t20", Estimate(1.1, (1.05, 1.2), (1.1,), 1, 64, 0.95))
    assert claims.MIME == book.CLAIM
    payload = [json.loads(json.dumps(data[book.CLAIM], allow_nan=False)) for data in shown]
    assert payload[0] | {"verdict": "reproduced", "value": 1.01, "ci": [0.99, 1.06], "note": "why"} == payload[0]
    assert payload[1]["n"] == "1 run x 64 MDPs" and payload[1]["verdict"] == "better"
    assert shown[0]["text/plain"] == (
        "control.ratio_t20: paper 1.052 | ours 1.01 [0.99, 1.06] (5 runs x 64 MDPs) | reproduced; why"
    )


def test_a_line_speaks_of_a_direction_where_the_paper_gives_no_number():
    made = assess("boundaries.reward_only_difference_t20", -0.01, (-0.02, -0.001))
    assert line(made).startswith("boundaries.reward_only_difference_t20: paper below 0 | ours -0.01 [-0.02, -0.001] |")
