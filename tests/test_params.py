"""The parameters cell: grammar, conversions, one clear error; the same error in a notebook and on the command line."""

import jupytext
import papermill
import pytest
import toybook
from papermill.exceptions import PapermillExecutionError

from pa_core import params
from pa_core.__main__ import main

CELL = """\
eta: float = 0.5  # step size of the actor [1/reward] {0 < x <= 100}
n: int = 4  # number, of states {1 <= x <= 64}
width: int = 4  # width {4 | 8}
start: str = "uniform"  # first policy {uniform | greedy}
exact: bool = True  # use the exact critic
gamma: float = 0.9  # discount {0 <= x < 1}
tau: float = 1e-3  # any

seed: int = 0  # spawn key, 0 in the book {x >= 0}
"""


def test_a_line_gives_type_default_meaning_unit_and_limits():
    declared = params.parse(CELL)
    assert list(declared) == ["eta", "n", "width", "start", "exact", "gamma", "tau", "seed"]
    eta = declared["eta"]
    assert (eta.type, eta.default, eta.meaning, eta.unit) == (float, 0.5, "step size of the actor", "1/reward")
    assert [p.limits for p in declared.values()] == [
        "0 < eta <= 100", "1 <= n <= 64", "4 | 8", "uniform | greedy", "any bool", "0 <= gamma < 1", "any float", "seed >= 0"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        "n = 4  # no type {x > 0}",
        "n: int = 4",
        "n: int = 4  # unbalanced {x > 0",
        "n: list = [4]  # type that is not allowed",
        "n: int = 2 * 2  # not a literal",
        "n: int = 4.5  # other type than declared",
        "n: int = 4  # outside its limits {x > 9}",
        "n: int = 4  # limits without the parameter {1 < 2}",
        "n: int = 4  # limits with another name {n > 1}",
        "print(4)  # not a parameter",
        "n: int = (  # not Python",
    ],
)
def test_a_line_outside_the_grammar_is_refused(line):
    with pytest.raises(params.ParameterError, match=r"parameters cell|\bn\b"):
        params.parse(f"{line}\nseed: int = 0  # spawn key\n")


def test_seed_is_required():
    with pytest.raises(params.ParameterError, match="seed"):
        params.parse("n: int = 4  # number")


@pytest.mark.parametrize(
    "name, given, typed",
    [
        ("eta", "1e-4", 1e-4),  # YAML 1.1 reads 1e-4 as text
        ("eta", 1, 1.0),
        ("n", "6", 6),
        ("exact", "False", False),
        ("start", "greedy", "greedy"),
        ("width", 8, 8),
        ("gamma", 0, 0.0),
    ],
)
def test_values_are_converted(name, given, typed):
    value = params.validate(params.parse(CELL), {name: given})[name]
    assert value == typed and type(value) is type(typed)


@pytest.mark.parametrize(
    "name, value, told",
    [
        ("gamma", 1, "gamma = 1.0 is out of range; allowed: 0 <= gamma < 1"),
        ("eta", 0, "eta = 0.0 is out of range; allowed: 0 < eta <= 100"),
        ("eta", "-1e-4", "eta = -0.0001 is out of range"),
        ("eta", "nan", "eta = nan is not finite; allowed: 0 < eta <= 100"),
        ("tau", float("inf"), "tau = inf is not finite"),
        ("n", 0, "n = 0 is out of range; allowed: 1 <= n <= 64"),
        ("n", 2.0, "n = 2.0 is not of type int; allowed: 1 <= n <= 64"),
        ("n", "2.5", "n = '2.5' is not of type int"),
        ("n", True, "n = True is not of type int"),
        ("n", None, "n = None is not of type int"),
        ("eta", [1.0], "eta = [1.0] is not of type float"),
        ("exact", 1, "exact = 1 is not of type bool"),
        ("start", "best", "start = 'best' is out of range; allowed: uniform | greedy"),
        ("start", 3, "start = 3 is not of type str"),
        ("width", 6, "width = 6 is out of range; allowed: 4 | 8"),
        ("etta", 1, "unknown parameter etta = 1; did you mean eta?"),
        ("zzz", 1, "unknown parameter zzz = 1; there are: eta, n, width"),
    ],
)
def test_an_impossible_value_is_named_with_its_limits(name, value, told):
    with pytest.raises(params.ParameterError) as caught:
        params.validate(params.parse(CELL), {name: value})
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_the_banner_names_only_what_differs():
    declared = params.parse(CELL + 'claims_file: str = ""  # claims\n')
    assert params.banner(declared, {"eta": 0.5, "claims_file": "x"}) == ""
    assert params.banner(declared, {"eta": 1.0, "n": 6}) == "Run with eta = 1.0, n = 6: not the book's numbers"


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    """Kernels start elsewhere and find the package also where it isn't installed."""
    monkeypatch.setenv("PYTHONPATH", str(toybook.REPOSITORY))


def run_plain(tmp_path, values):
    """The route without this project's command line."""
    source = tmp_path / "a.md"
    source.write_text(toybook.chapter("A", "print(repr(eta), repr(n))", parameters=CELL.rsplit("\n", 2)[0]))
    return papermill.execute_notebook(
        jupytext.read(source), None, parameters=values, kernel_name="python3", progress_bar=False, cwd=str(tmp_path)
    )


def test_plain_papermill_gets_types_and_a_table(tmp_path):
    cells = run_plain(tmp_path, {"eta": "1e-4", "n": 6}).cells
    assert cells[-1].outputs[0].text == "0.0001 6\n"
    shown = next(cell for cell in cells if cell.source.endswith("check()")).outputs[0].data
    assert "Run with eta = 0.0001, n = 6: not the book" in shown["text/html"]
    assert "0 &lt; eta &lt;= 100" in shown["text/html"] and "n = 6" in shown["text/plain"]


@pytest.mark.parametrize("name, value", [("n", 0), ("etta", 1), ("eta", "fast")])
def test_plain_papermill_and_the_command_line_tell_the_same(tmp_path, capsys, name, value):
    with pytest.raises(PapermillExecutionError) as caught:
        run_plain(tmp_path, {name: value})
    assert len(caught.value.traceback) == 1  # one line, no stack
    root = toybook.write(tmp_path / "book")
    text = toybook.chapter("A", "1", parameters=CELL.rsplit("\n", 2)[0])
    (root / "chapters" / "02_plain.md").write_text(text)
    out = tmp_path / "out"
    assert main(["--root", str(root), "run", "2", "-p", name, str(value), "--out", str(out)]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and not out.exists()
    # Papermill's -p gives text too where it isn't a number, so only quotes may differ.
    assert caught.value.evalue.replace("'", "") in told.replace("'", "")
