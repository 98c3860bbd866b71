"""Reference notebooks for nbval: what is kept of a smoke run, and how its printed numbers are compared.

The numeric tolerance of every notebook check is decided here, for nbval (through tests/conftest.py)
and for `python -m pa_core accept`.
"""

import json
import math
import re
from pathlib import Path

import nbformat

from . import book
from .chapters import CHECKED_TAG, Book, BookError, Chapter
from .files import write_atomically
from .params import INJECTED

# Float64 work: other CPUs and BLAS builds change the last digits of a double (about 1e-16 relative), and
# linear solves amplify that by their condition number; 1e-6 leaves room for this and still shows any change
# of a method or constant.
RTOL = 1e-6
# Results of a float32 network (cells tagged `float32`): one rounding is 6e-8, and sums over layers and rounds
# in another order reach 1e-4.
RTOL_FLOAT32 = 1e-3
ATOL = 1e-12  # below this a float64 result is zero
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w])|[-+]?\b(?:nan|inf)\b")


def reference_folder(root: Path) -> Path:
    return root / "tests" / "reference"


def tolerance(cell) -> float:
    """The relative tolerance of a cell: its metadata `tolerance`, else by its tags."""
    default = RTOL_FLOAT32 if "float32" in cell.metadata.get("tags", []) else RTOL
    return float(cell.metadata.get("tolerance", default))


def as_text(output) -> str:
    """An output value as comparable text: Jupyter gives JSON outputs as dicts, all others as str."""
    return output if isinstance(output, str) else json.dumps(output, sort_keys=True)


def differences(old: str, new: str, rtol: float) -> list[str]:
    """Where two texts differ: `old -> new (relative difference)` for numbers beyond `rtol`, or the text itself.

    The text around the numbers must be equal, but for the width of blanks and dashes, which aligned
    tables adapt to their numbers.
    """
    if _frame(old) != _frame(new):
        return [f"{old.strip()!r} -> {new.strip()!r}"]
    found = []
    for a, b in zip(_NUMBER.findall(old), _NUMBER.findall(new), strict=True):
        x, y = float(a), float(b)
        if x == y or math.isnan(x) and math.isnan(y):
            continue
        if not math.isclose(x, y, rel_tol=rtol, abs_tol=ATOL):
            found.append(f"{a} -> {b} ({abs(y - x) / max(abs(x), ATOL):.1e})")
    return found


def _frame(text: str) -> str:
    return re.sub(r"[ \t]+", " ", re.sub(r"-{2,}", "--", _NUMBER.sub("#", text)))


def make_reference(executed: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The code cells of an executed notebook, with outputs where nbval compares them, without pictures."""
    cells = [cell for cell in executed.cells if cell.cell_type == "code"]
    for cell in cells:
        checked = CHECKED_TAG in cell.metadata.get("tags", [])
        cell["outputs"] = cell.outputs if checked else []
        for output in cell.outputs:
            for mime in [m for m in output.get("data", {}) if m.startswith("image/")]:
                del output["data"][mime]
        cell.metadata.pop("mystnb", None)
    executed["cells"] = cells
    executed.metadata.pop("pa", None)
    return executed


def problems(reference: nbformat.NotebookNode, chapter: Chapter | None) -> list[str]:
    """Why nbval must not trust a reference: it checks nothing, or it is not made from the chapter as it is now."""
    if chapter is None:
        return ["no chapter of this name is in _toc.yml"]
    found = []
    code = [cell for cell in reference.cells if cell.cell_type == "code"]
    if not any(CHECKED_TAG in cell.metadata.get("tags", []) and cell.outputs for cell in code):
        found.append(f"no cell tagged {CHECKED_TAG} has an output")
    if any(cell.execution_count is None for cell in code):
        found.append("has cells that were not executed, which nbval does not compare")
    own = [cell.source for cell in code if not cell.source.startswith(INJECTED)]
    if own != [cell.source for cell in chapter.code_cells]:
        found.append("was made from other code than the chapter has")
    injected = {cell.source for cell in code} - set(own)
    if any(f"{name} = " not in "".join(injected) for name in chapter.smoke):
        found.append("was made with other smoke parameters")
    tags = [[t for t in c.metadata.get("tags", []) if t in (CHECKED_TAG, "float32")] for c in code if c.source in own]
    if tags != [[t for t in c.metadata.get("tags", []) if t in (CHECKED_TAG, "float32")] for c in chapter.code_cells]:
        found.append("has other checked cells than the chapter")
    return found


def accept(content: Book, wanted: list[Chapter], *, workers: int = 2) -> list[str]:
    """Write the references of `wanted` chapters from a smoke run.  Returns the failures; prints what changed."""
    errors = book.execute_book(content, "smoke", workers=workers)
    folder = reference_folder(content.root)
    claims = book.claims_path(content.root, "smoke")
    if not errors:
        write_atomically(folder / "claims.json", claims.read_text(encoding="utf-8"))
    for chapter in wanted:
        path = folder / f"{chapter.name}.ipynb"
        if chapter.unchecked or any(error.startswith(f"{chapter.name}:") for error in errors):
            continue
        made = make_reference(nbformat.read(book.staged_path(chapter, "smoke"), as_version=4))
        for cell in made.cells:  # references read the claims that are committed beside them
            if cell.source.startswith(INJECTED):
                staged, committed = (p.relative_to(content.root).as_posix() for p in (claims, folder / "claims.json"))
                cell["source"] = cell.source.replace(staged, committed)
        wrong = problems(made, chapter)
        if wrong:
            errors.append(f"{chapter.name}: its reference would check nothing: {'; '.join(wrong)}")
            continue
        _report(path, made)
        write_atomically(path, nbformat.writes(made) + "\n")
    known = {chapter.name for chapter in content.chapters if not chapter.unchecked}
    for path in sorted(folder.glob("*.ipynb")):
        if path.stem not in known:
            print(f"{path.stem}: removed, no such chapter is checked")
            path.unlink()
    return errors


def _report(path: Path, made: nbformat.NotebookNode) -> None:
    """Print which numbers a new reference changes."""
    if not path.exists():
        print(f"{path.stem}: new")
        return
    old = _checked_texts(nbformat.read(path, as_version=4))
    new = _checked_texts(made)
    print(f"{path.stem}: {'unchanged' if old == new else 'changed'}")
    if len(old) != len(new):
        print(f"  {len(old)} -> {len(new)} checked outputs")
    for (label, before), (_, after) in zip(old, new, strict=False):
        for change in differences(before, after, 0.0):
            print(f"  {label}: {change}")


def _checked_texts(notebook: nbformat.NotebookNode) -> list[tuple[str, str]]:
    texts = []
    for cell in notebook.cells:
        for output in cell.outputs:
            for value in [output.text] if output.output_type == "stream" else output.get("data", {}).values():
                texts.append((f"In [{cell.execution_count}]", as_text(value)))
    return texts


def compare_cell(cell, old, new) -> list[str]:
    """`differences` of two output values under the tolerance of their cell."""
    return differences(as_text(old), as_text(new), tolerance(cell))


def read_reference(path: Path) -> nbformat.NotebookNode:
    """A committed reference.  Raises BookError when it is not a notebook."""
    try:
        return nbformat.read(path, as_version=4)
    except Exception as error:
        raise BookError(f"{path.name}: not a notebook: {error}") from None
