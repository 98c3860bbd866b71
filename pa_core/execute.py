"""One text notebook through Papermill, in a kernel whose surroundings do not show in the result.

The executed notebook is stripped of everything that differs between two equal runs, so that running
a chapter twice gives the same bytes.
"""

import copy
import logging
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import nbformat

from .chapters import CHECK_CALL, Chapter
from .params import INJECTED
from .sources import PACKAGE_ROOT

CELL_TIMEOUT = 1800  # seconds; no chapter cell may take nearly as long
# Unset in kernels, because each can change results, figures or what is written to stderr.
_UNWANTED = ("MPLBACKEND", "MATPLOTLIBRC", "PYTHONWARNINGS", "PYTHONSTARTUP", "PYTHONPATH")
# Cells that readers can unfold, with the words on the fold.
_FOLDED = {"parameters": "The parameters as code", "injected-parameters": "The values given to this run"}


@dataclass(frozen=True)
class Outcome:
    """What running a chapter gave: the stripped notebook (executed up to the error, if there is one)."""

    notebook: nbformat.NotebookNode
    seconds: float
    error: str = ""


def set_kernel_environment(root: Path, scratch: Path) -> None:
    """Change this process's environment, which kernels inherit, to the one that all notebooks run in.

    One thread, since sums depend on how they are split; a fixed hash seed, since set order does; the
    user's own Jupyter, IPython and matplotlib settings out of sight.
    """
    for name in _UNWANTED:
        os.environ.pop(name, None)
    os.environ.update(
        PYTHONPATH=os.pathsep.join(dict.fromkeys([str(root), str(PACKAGE_ROOT)])),
        OMP_NUM_THREADS="1",
        PYTHONHASHSEED="0",
        TQDM_DISABLE="1",
        IPYTHONDIR=str(scratch / "ipython"),
        JUPYTER_CONFIG_DIR=str(scratch / "jupyter"),
        JUPYTER_RUNTIME_DIR=str(scratch / "runtime"),
        JUPYTER_PREFER_ENV_PATH="1",
        MPLCONFIGDIR=str(prepare_fonts()),
    )


def prepare_fonts() -> Path:
    """matplotlib's own settings folder for the book, with its list of fonts.

    The list is made here once: a kernel that has to make it first says so on stderr, which would be part of a chapter.
    """
    folder = PACKAGE_ROOT / "_build" / "matplotlib"
    if not list(folder.glob("fontlist-*.json")):
        words = [sys.executable, "-c", "import matplotlib.font_manager"]
        subprocess.run(words, env=os.environ | {"MPLCONFIGDIR": str(folder)}, capture_output=True, check=False)
    return folder


def run_chapter(chapter: Chapter, values: dict, *, cell_timeout: int | None = CELL_TIMEOUT) -> Outcome:
    """Execute a chapter with checked parameters `values`, in an empty scratch folder.

    A cell that runs longer than `cell_timeout` seconds fails; None lets it run for ever.
    """
    import papermill
    from papermill.exceptions import PapermillExecutionError

    # Papermill warns of every parameters line with a second "=" (it can't read `{x <= 1}`); ours are checked already.
    logging.getLogger("papermill").setLevel(logging.ERROR)
    start = time.monotonic()
    error = ""
    with tempfile.TemporaryDirectory(prefix="pa_", ignore_cleanup_errors=True) as folder:
        scratch, cwd, written = Path(folder), Path(folder, "work"), Path(folder, "executed.ipynb")
        cwd.mkdir()
        set_kernel_environment(chapter.root, scratch)
        for attempt in (1, 2):
            try:
                papermill.execute_notebook(
                    copy.deepcopy(chapter.notebook),
                    str(written),
                    parameters=values,
                    kernel_name="python3",
                    cwd=str(cwd),
                    progress_bar=False,
                    autosave_cell_every=0,
                    execution_timeout=cell_timeout,
                )
            except PapermillExecutionError as failure:
                error = _describe(chapter, failure)
            except RuntimeError as failure:  # the kernel did not start: two took the same port (papermill issue 511)
                if attempt == 1 and "Kernel died before" in str(failure):
                    continue
                error = f"{chapter.name}: the kernel failed: {failure}"
            except Exception as failure:  # dead kernel, cell timeout: one chapter's failure, never the builder's
                error = f"{chapter.name}: {type(failure).__name__}: {' '.join(str(failure).split())[:500]}"
            break
        notebook = nbformat.read(written, as_version=4) if written.exists() else chapter.notebook
    return Outcome(strip(notebook, chapter.name), time.monotonic() - start, error)


def _describe(chapter: Chapter, failure) -> str:
    """Chapter, cell, source line and error of a failed cell, in one line."""
    where = ""
    for number, cell in enumerate(chapter.code_cells, 1):
        if cell.source == failure.source:
            text = chapter.path.read_text(encoding="utf-8")
            line = text[: max(text.find(cell.source), 0)].count("\n") + 1
            where = f" (cell {number}, from line {line} of {chapter.path.relative_to(chapter.root).as_posix()})"
            break
    message = " ".join(failure.evalue.split())
    return f"{chapter.name}: In [{failure.exec_count}]{where} raised {failure.ename}: {message}"


def strip(notebook: nbformat.NotebookNode, name: str) -> nbformat.NotebookNode:
    """Remove what differs between equal runs (times, paths, random cell ids) and fold what readers don't need."""
    for key in ("papermill", "jupytext"):
        notebook.metadata.pop(key, None)
    cells = [cell for cell in notebook.cells if "papermill-error-cell-tag" not in cell.metadata.get("tags", [])]
    counts = {"code": 0, "markdown": 0, "raw": 0}
    for cell in cells:
        counts[cell.cell_type] += 1  # apart for each type: prose may change without renumbering the code
        cell["id"] = f"{name[:40]}-{cell.cell_type}-{counts[cell.cell_type]}"
        for key in ("papermill", "execution"):
            cell.metadata.pop(key, None)
        tags = cell.metadata.get("tags", [])
        for tag, prompt in _FOLDED.items():
            if tag in tags:
                cell.metadata["tags"] = [*tags, "hide-input"]
                cell.metadata["mystnb"] = {"code_prompt_show": prompt, "code_prompt_hide": prompt}
        if cell.cell_type == "code" and cell.source.endswith(CHECK_CALL):
            cell.metadata["tags"] = [*tags, "remove-input"]
        if cell.cell_type == "code" and cell.source.startswith(INJECTED):
            cell["source"] = cell.source.rstrip()
        if cell.cell_type == "code":
            cell["outputs"] = join_streams(cell.outputs)
    notebook["cells"] = cells
    return notebook


def join_streams(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Neighbouring outputs of one stream as one: a busy kernel may flush a cell's text in several pieces."""
    joined: list[nbformat.NotebookNode] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if last is not None and output.output_type == "stream" == last.output_type and output.name == last.name:
            last["text"] += output.text
        else:
            joined.append(output)
    return joined
