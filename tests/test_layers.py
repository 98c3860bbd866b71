"""Modules import only from the rows above their own; this list is the map of the package."""

from pathlib import Path

import pytest

from pa_core import sources

PACKAGE = Path(sources.__file__).parent

# A row for each module, the lowest layer first.  A module that does not exist (yet) may be listed.
LAYERS = """
files validated seeding protocol stats
mdp families pmd rates bounds control
tokens decoder construct ledger scaling
objectives coordinates learned contexts tasks runs state train cards
evaluation diagnosis audit online tabular model_based tuning adaptations
claims figures
params sources chapters execute book site references
bench sweep
__main__
""".split()

MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def layer(path: Path) -> str:
    """The row that a file belongs to: its own name, or that of its folder."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path: Path) -> set[str]:
    """Names below `pa_core` that a file imports, lazily or not."""
    package = ".".join(("pa_core", *path.relative_to(PACKAGE).parent.parts))
    names = sources.imported_names(path.read_text(encoding="utf-8"), package)
    return {name.removeprefix("pa_core.") for name in names if name.startswith("pa_core.")}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_modules_import_only_from_rows_above(path):
    own = layer(path)
    assert own in LAYERS, f"{own} has no row in LAYERS: put it above everything that imports it"
    below = LAYERS[LAYERS.index(own) + 1 :]
    wrong = sorted(name for name in imported(path) if name.split(".")[0] in below)
    assert not wrong, f"{own} imports {', '.join(wrong)} from a row below its own"


def test_nothing_imports_the_command_line():
    assert not [path for path in MODULES if "__main__" in imported(path)]


def test_the_construction_does_not_know_what_it_is_compared_with():
    """Its weights come from the architecture alone, so that agreement with PMD is a result and no tautology."""
    names = imported(PACKAGE / "construct.py")
    assert not {name.split(".")[0] for name in names} & {"pmd", "bounds", "control"}
    assert {name for name in names if name.startswith("mdp")} <= {"mdp", "mdp.MDP"}
