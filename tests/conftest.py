"""nbval with numeric tolerance, in the environment that the book's chapters run in.

Reaches only `tests/reference/*.ipynb`; the tolerances and their reasons stand in `pa_core/references.py`.
"""

import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class Tolerant(str):
    """An output that equals another when their texts agree and their numbers agree within `rtol`."""

    rtol: float

    def __eq__(self, other):
        from pa_core.references import differences

        return not differences(str(self), str(other), self.rtol)

    def __ne__(self, other):
        return not self == other

    __hash__ = str.__hash__


def pytest_configure(config):
    """Where nbval runs, compare with tolerance and give its kernels, which inherit it, the chapters' environment."""
    if not (config.option.nbval or config.option.nbval_lax):
        return
    from nbval.kernel import RunningKernel
    from nbval.plugin import IPyNbCell, IPyNbFile

    from pa_core.execute import set_kernel_environment

    collect = IPyNbFile.collect
    IPyNbFile.collect = lambda reference: _collect(reference, collect)
    IPyNbCell.sanitize = _sanitize
    RunningKernel.execute_cell_input = _execute_cell
    scratch = tempfile.TemporaryDirectory(prefix="pa_", ignore_cleanup_errors=True)
    config.add_cleanup(scratch.cleanup)
    set_kernel_environment(ROOT, Path(scratch.name))


def _sanitize(cell, output):
    """nbval calls this on each output value before it compares; JSON outputs arrive as dicts."""
    from pa_core.references import as_text, tolerance

    text = Tolerant(as_text(output))
    text.rtol = tolerance(cell.cell)
    return text


def _execute_cell(kernel, source, allow_stdin=None):
    """As nbval does it, but with a history, as in every other front end: params.check() reads the cells in it."""
    return kernel.kc.execute(source, allow_stdin=allow_stdin, stop_on_error=False)


def _collect(reference, collect):
    """Collect a reference unless it would check nothing, or not what its chapter computes now."""
    from pa_core import chapters, references

    named = {chapter.name: chapter for chapter in chapters.read_book(ROOT).chapters}
    found = references.problems(references.read_reference(reference.path), named.get(reference.path.stem))
    if found:
        raise reference.CollectError(
            f"{reference.path.name}: {'; '.join(found)}. Run `make accept` and read what it prints."
        )
    yield from collect(reference)
