"""From the text notebooks to the staging tree `_build/PROFILE/book`, running only what changed.

The staging tree is a copy of the book in which each chapter is its executed notebook.  A notebook
carries the fingerprint of what it was made from and is replaced as a whole, so a build that is killed
at any moment leaves only notebooks that are right or will run again.
"""

import contextlib
import fcntl
import json
import os
import shutil
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import nbformat

from . import params
from .chapters import Book, BookError, Chapter
from .execute import prepare_fonts, run_chapter
from .files import write_atomically

PROFILES = ("full", "smoke")
CLAIM = "application/vnd.pa-core.claim+json"
_STATIC = ("_config.yml", "_toc.yml", "references.bib", "_static")  # copied as they are


@contextlib.contextmanager
def build_lock(root: Path):
    """Hold the only right to write in `_build`.  Raises BookError while another process has it.

    The system releases the lock when its holder dies, however it dies.
    """
    (root / "_build").mkdir(exist_ok=True)
    with open(root / "_build" / ".lock", "w") as handle:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BookError(f"another build is writing to {root / '_build'}; wait until it has finished") from None
        yield


def staging(root: Path, profile: str) -> Path:
    return root / "_build" / profile / "book"


def staged_path(chapter: Chapter, profile: str) -> Path:
    return staging(chapter.root, profile) / f"{chapter.page}.ipynb"


def execute_book(book: Book, profile: str, *, workers: int = 2, force: bool = False) -> list[str]:
    """Run every chapter whose fingerprint changed and bring the staging tree up to date.

    Returns one line for each chapter that failed; its previous notebook is kept.
    """
    times = _read_times(book.root, profile)
    first = {c: c.values(profile) for c in book.chapters if not c.after_all}
    errors = _execute(first, profile, times, workers, force)
    claims = collect_claims([staged_path(chapter, profile) for chapter in first]) if not errors else []
    last = [chapter for chapter in book.chapters if chapter.after_all]
    if errors:
        errors += [f"{chapter.name}: not run, because it reads the results of all others" for chapter in last]
    else:
        path = claims_path(book.root, profile)
        text = json.dumps(claims, indent=1, sort_keys=True) + "\n"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_atomically(path, text)
        wired = {"claims_file": path.relative_to(book.root).as_posix()}
        errors = _execute({c: c.values(profile) | wired for c in last}, profile, times, workers, force, text.encode())
    _stage_static(book, profile)
    return errors


def claims_path(root: Path, profile: str) -> Path:
    return root / "_build" / profile / "claims.json"


def collect_claims(notebooks: list[Path]) -> list[dict]:
    """The claims recorded in executed notebooks, each with the chapter and the id of the cell that recorded it.

    Raises BookError when one id is recorded twice.
    """
    claims: dict[str, dict] = {}
    for path in notebooks:
        for cell in nbformat.read(path, as_version=4).cells:
            for output in cell.get("outputs", []):
                claim = output.get("data", {}).get(CLAIM)
                if claim is None:
                    continue
                if claim["id"] in claims:
                    before = claims[claim["id"]]["chapter"]
                    raise BookError(f"claim {claim['id']} is recorded twice, in {before} and {path.stem}")
                claims[claim["id"]] = {**claim, "chapter": path.stem, "cell": cell["id"]}
    return list(claims.values())


def execution_times(root: Path) -> dict[str, dict[str, float]]:
    """Seconds that each chapter took when it last ran: {profile: {chapter: seconds}}."""
    return {profile: _read_times(root, profile) for profile in PROFILES}


def _read_times(root: Path, profile: str) -> dict[str, float]:
    try:
        return json.loads((root / "_build" / profile / "times.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # only an estimate: a missing or broken one costs nothing
        return {}


def _execute(jobs: dict, profile: str, times: dict, workers: int, force: bool, *inputs: bytes) -> list[str]:
    """Run those of `jobs` (chapter -> values) that are not fresh, the longest first.  Returns the failures."""
    errors, waiting = [], []
    for chapter, values in jobs.items():
        try:
            fingerprint = chapter.fingerprint(values, *inputs)
        except BookError as error:
            errors.append(str(error))
            continue
        if force or _fingerprint_of(staged_path(chapter, profile)) != fingerprint:
            waiting.append((chapter, values, fingerprint))
    waiting.sort(key=lambda job: -times.get(job[0].name, 0))
    if not waiting:
        return errors
    prepare_fonts()  # before the workers, which would each do it
    shown = _Progress(len(waiting))
    shown.line(f"{profile}: {len(waiting)} of {len(jobs)} chapters to run")
    log = waiting[0][0].root / "_build" / profile / "kernels.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    started = (os.getpid(), log)
    with ProcessPoolExecutor(min(workers, len(waiting)), get_context("spawn"), _start_worker, started) as pool:
        futures = {pool.submit(_execute_one, *job, profile): job[0] for job in waiting}
        for future in as_completed(futures):
            chapter = futures[future]
            try:
                seconds, error = future.result()
            except BrokenProcessPool:
                seconds, error = 0.0, f"{chapter.name}: a worker process was killed (out of memory?); see {log}"
            if error:
                errors.append(error)
            else:
                times[chapter.name] = round(seconds, 1)
                write_atomically(chapter.root / "_build" / profile / "times.json", json.dumps(times, sort_keys=True))
            shown.done(f"{chapter.name} {'FAILED' if error else 'done'} ({seconds:.0f} s)")
    shown.close()
    return errors


def _execute_one(chapter: Chapter, values: dict, fingerprint: str, profile: str) -> tuple[float, str]:
    """In a worker: run a chapter and put its notebook in place, or beside the book when it failed."""
    outcome = run_chapter(chapter, values)
    path = staged_path(chapter, profile)
    failed = chapter.root / "_build" / profile / "failed" / path.name
    note = params.banner(chapter.parameters, values)
    if note:
        insert_banner(outcome.notebook, note)
    outcome.notebook.metadata["pa"] = {"fingerprint": fingerprint}
    text = nbformat.writes(outcome.notebook) + "\n"
    if outcome.error:
        write_atomically(failed, text)
        return outcome.seconds, f"{outcome.error} [executed so far: {failed.relative_to(chapter.root)}]"
    write_atomically(path, text)
    failed.unlink(missing_ok=True)
    return outcome.seconds, ""


def insert_banner(notebook, note: str) -> None:
    """Put `note` under the notebook's title, so that these results are never taken for the book's."""
    for cell in notebook.cells:
        lines = cell.source.split("\n")
        for index, line in enumerate(lines):
            if cell.cell_type == "markdown" and line.startswith("# "):
                lines.insert(index + 1, f"\n:::{{warning}}\n{note}.\n:::\n")
                cell["source"] = "\n".join(lines)
                return


def _fingerprint_of(path: Path) -> str | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))["metadata"]["pa"]["fingerprint"]
    except (OSError, ValueError, KeyError):
        return None


def _stage_static(book: Book, profile: str) -> None:
    """Copy what is not executed, and remove what the book no longer has."""
    target = staging(book.root, profile)
    wanted = {staged_path(chapter, profile) for chapter in book.chapters}
    notebooks = {chapter.path for chapter in book.chapters}
    sources = [page for page in book.pages if page not in notebooks]
    for name in _STATIC:
        path = book.root / name
        sources += sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path] * path.exists()
    for page in book.pages:  # pictures beside the pages
        sources += [p for p in page.parent.iterdir() if p.suffix in (".svg", ".png") and p not in sources]
    for path in sources:
        copy = target / path.relative_to(book.root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not copy.exists() or copy.read_bytes() != path.read_bytes():
            shutil.copyfile(path, copy)
        wanted.add(copy)
    for path in sorted(target.rglob("*"), reverse=True):
        if path.is_file() and path not in wanted:
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def _start_worker(parent: int, log: Path) -> None:
    """In a worker: end it, and with it its kernel, when the builder is gone, so that no orphan goes on writing.

    What kernels say outside of cells goes to `log`: ipykernel calls its own shutdown an ERROR now and then.
    """
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), sys.stderr.fileno())

    def watch():
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class _Progress:
    """A bar on a terminal; one line for each chapter everywhere."""

    def __init__(self, total: int):
        from tqdm import tqdm

        shape = "{desc}: {bar} {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"
        self._bar = tqdm(total=total, desc="chapters", bar_format=shape, disable=not sys.stderr.isatty(), leave=False)

    def line(self, text: str) -> None:
        self._bar.write(text)
        sys.stdout.flush()

    def done(self, text: str) -> None:
        self._bar.update()
        self.line(f"  {text}")

    def close(self) -> None:
        self._bar.close()
