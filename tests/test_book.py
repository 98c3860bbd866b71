"""The book tool on a book of four tiny chapters: what runs again, what a failure leaves, what readers get."""

import json
import os
import signal
import subprocess
import sys
import time

import nbformat
import pytest
import toybook

from pa_core import book, chapters, claims, references, site
from pa_core.__main__ import main

NAMES = ["00_start", "01_toy", "02_plain", "03_file"]


@pytest.fixture
def root(tmp_path):
    return toybook.write(tmp_path / "book")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A book that was executed once; tests that share it change nothing."""
    root = toybook.write(tmp_path_factory.mktemp("shared") / "book")
    assert book.execute_book(chapters.read_book(root), "full") == []
    return root


def command(root, *words):
    """A command line for a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(toybook.REPOSITORY)}
    words = [sys.executable, "-m", "pa_core", "--root", str(root), *words]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def staged(root, profile="full"):
    """The executed chapters: {name: bytes}."""
    folder = book.staging(root, profile) / "chapters"
    return {path.stem: path.read_bytes() for path in sorted(folder.glob("*.ipynb"))}


def fingerprints(root):
    return {c.name: c.fingerprint(c.values("full")) for c in chapters.read_book(root).chapters}


@pytest.mark.parametrize(
    "path, old, new, rerun",
    [
        ("unused.py", "1", "2", []),
        ("toy.py", "return", "return 1 *", ["00_start", "01_toy"]),
        ("helper.py", "3.0", "4.0", ["00_start", "01_toy"]),
        ("settings.yaml", "1", "2", ["00_start", "01_toy"]),
        ("data/numbers.txt", "7", "8", ["03_file"]),
        ("chapters/02_plain.md", "Plain", "Plainer", ["02_plain"]),
        ("requirements.txt", "1", "2", NAMES),
    ],
)
def test_what_a_change_runs_again(root, path, old, new, rerun):
    before = fingerprints(root)
    toybook.edit(root / path, old, new)
    after = fingerprints(root)
    assert [name for name in NAMES if before[name] != after[name]] == rerun


def test_other_parameters_run_again(root):
    chapter = chapters.read_book(root).find("01")
    assert chapter.fingerprint({"factor": 1.0}) != chapter.fingerprint({"factor": 2.0})


def test_running_twice_gives_the_same_bytes(built, tmp_path):
    again = toybook.write(tmp_path / "elsewhere")
    assert book.execute_book(chapters.read_book(again), "full", workers=1) == []
    assert list(staged(built)) == NAMES
    assert staged(again) == staged(built)


def test_claims_are_collected_and_reach_the_chapters_that_run_last(built):
    claims = json.loads((built / "_build" / "full" / "claims.json").read_text())
    assert claims == [{"id": "toy.one", "value": 2.0, "chapter": "01_toy", "cell": "01_toy-code-4"}]
    assert "['toy.one']" in staged(built)["00_start"].decode()


def test_a_claim_may_be_recorded_once(built, tmp_path):
    one = built / "_build" / "full" / "book" / "chapters" / "01_toy.ipynb"
    two = tmp_path / "04_copy.ipynb"
    two.write_bytes(one.read_bytes())
    with pytest.raises(chapters.BookError, match="toy.one is recorded twice, in 01_toy and 04_copy"):
        book.collect_claims([one, two])


def test_build_changes_only_what_it_must_and_a_failure_leaves_the_pages(root, capsys):
    def build(*more):
        code = main(["--root", str(root), "build", *more])
        return code, capsys.readouterr()

    code, said = build("--strict")
    page = root / "_build" / "html" / "chapters" / "01_toy.html"
    assert code == 0 and "built" in said.out and "6.000000" in page.read_text()
    assert (root / "_build" / "html" / "index.html").is_file()
    assert 'href="01_toy.html"' in (root / "_build" / "html" / "chapters" / "02_plain.html").read_text().split("<article")[1]
    before = {path: path.stat().st_ino for path in [page, *book.staging(root, "full").rglob("*.ipynb")]}

    code, said = build("--strict")
    assert code == 0 and "up to date" in said.out
    assert before == {path: path.stat().st_ino for path in before}

    toybook.edit(root / "chapters" / "02_plain.md", "1.5)", "1 / 0)")
    toybook.edit(root / "helper.py", "3.0", "4.0")
    code, said = build()
    assert code == 1 and "6.000000" in page.read_text()
    assert "02_plain: In [3] (cell 3, from line 29 of chapters/02_plain.md) raised ZeroDivisionError" in said.err
    assert "8.000000" in staged(root)["01_toy"].decode()  # the others still ran
    assert "ZeroDivisionError" in (root / "_build" / "full" / "failed" / "02_plain.ipynb").read_text()
    assert len(said.err.splitlines()) == 3  # chapter, the one that needs all others, what stays

    toybook.edit(root / "chapters" / "02_plain.md", "1 / 0)", "2)")
    toybook.edit(root / "chapters" / "02_plain.md", "# Plain", "# Plain\n\n{ref}`nowhere`")
    code, said = build("--strict")
    assert code == 1 and "nowhere" in said.out and "6.000000" in page.read_text()

    toybook.edit(root / "chapters" / "02_plain.md", "{ref}`nowhere`", "")
    code, said = build("--strict")
    assert code == 0 and "8.000000" in page.read_text()

    toybook.edit(root / "chapters" / "02_plain.md", "print(", "import sys; sys.stderr.write('a warning'); print(")
    code, said = build("--strict")
    assert code == 1 and "02_plain: In [3] wrote to stderr: a warning" in said.err
    assert not list((root / "_build" / "full").glob("failed/*"))


def test_a_second_build_at_the_same_time_is_refused(root, capsys):
    toybook.edit(root / "chapters" / "02_plain.md", "1.5)", "__import__('time').sleep(60))")
    first = command(root, "build", "-j", "1")
    assert "chapters to run" in first.stdout.readline()
    assert main(["--root", str(root), "build"]) == 2
    assert "another build is writing" in capsys.readouterr().err
    first.kill()
    first.wait()
    with book.build_lock(root):  # the lock dies with its holder
        pass


@pytest.mark.parametrize("delay", [0.3, 2.0])
def test_a_killed_build_is_finished_by_the_next(root, built, delay):
    first = command(root, "build")
    time.sleep(delay)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    for content in staged(root).values():
        nbformat.reads(content.decode(), as_version=4)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:  # workers and kernels notice within a second
        if str(root) not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout:
            break
        time.sleep(0.2)
    assert book.execute_book(chapters.read_book(root), "full") == []
    assert staged(root) == staged(built)


def test_run_leaves_a_notebook_and_pages_that_are_marked(root, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["--root", str(root), "run", "01", "-p", "factor", "1.25", "--out", str(out)]) == 0
    page = (out / "html" / "01_toy.html").read_text()
    assert "Run with factor = 1.25: not the book" in page and "3.750000" in page
    assert (out / "html" / "index.html").is_file()
    assert "Run with factor = 1.25" in nbformat.read(out / "01_toy.ipynb", 4).cells[0].source
    assert sorted(path.name for path in out.iterdir()) == ["01_toy.ipynb", "html"]
    assert not (root / "_build" / "full").exists()  # the book itself is not touched


@pytest.mark.parametrize(
    "words, told",
    [
        (["run", "01", "-p", "factor", "-1"], "01_toy: factor = -1.0 is out of range; allowed: 0 < factor <= 10"),
        (["run", "01", "-p", "factor", "-1e-3"], "factor = -0.001 is out of range"),
        (["run", "01", "-p", "factr=1"], "unknown parameter factr = '1'; did you mean factor?"),
        (["run", "01", "-p", "factor"], "-p factor has no value"),
        (["run", "17"], "no chapter '17'; there are: 00_start, 01_toy"),
        (["run", "01_toys"], "no chapter '01_toys'"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_runs(root, tmp_path, capsys, words, told):
    out = tmp_path / "out"
    assert main(["--root", str(root), *words, "--out", str(out)]) == 2
    said = capsys.readouterr()
    assert told in said.err and said.err.count("\n") == 1 and not said.out and not out.exists()


@pytest.mark.parametrize(
    "path, old, new, told",
    [
        ("chapters/02_plain.md", "pa: {}", "pa: {smok: {}}", "front matter pa.smok"),
        ("chapters/02_plain.md", "pa: {}", "pa: {after: 01_toy}", "pa.after = '01_toy'; allowed: all"),
        ("chapters/02_plain.md", "pa: {}", "pa: {after: all}", "claims_file"),
        ("chapters/02_plain.md", "pa: {}", "pa: [", "can't be read as a text notebook"),
        ("chapters/01_toy.md", "{factor: 1.5}", "{factor: 0}", "factor = 0.0 is out of range"),
        ("chapters/01_toy.md", "{factor: 1.5}", "{n: 0}", "unknown parameter n = 0"),
        ("chapters/02_plain.md", "[parameters]", "[params]", "0 code cells tagged `parameters`"),
        ("chapters/02_plain.md", "params.check()", "pass", "must call params.check()"),
        ("chapters/02_plain.md", "[nbval-check-output]", "[]", "no cell is tagged nbval-check-output"),
        ("_toc.yml", "02_plain", "02_plane", "lists chapters/02_plane"),
        ("_toc.yml", "root:", "root: [", "_toc.yml is not YAML"),
    ],
)
def test_a_chapter_outside_the_conventions_is_named(root, capsys, path, old, new, told):
    toybook.edit(root / path, old, new)
    assert main(["--root", str(root), "build"]) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1


def test_an_artifact_that_is_missing_fails_its_chapter_alone(root):
    (root / "data" / "numbers.txt").unlink()
    errors = book.execute_book(chapters.read_book(root), "full")
    assert "03_file: its front matter names artifacts 'data/*.txt', and no file matches" in errors[0]
    assert list(staged(root)) == ["01_toy", "02_plain"]


def test_chapters_lists_parameters_with_ranges(built, capsys):
    assert main(["--root", str(built), "chapters"]) == 0
    said = capsys.readouterr().out
    assert "factor: float = 2.0, smoke 1.5  what multiplies [m]; 0 < factor <= 10" in said
    assert "01_toy: Toy [" in said and "s in full]" in said


def test_pages_are_checked(tmp_path):
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: a\nchapters:\n- file: b\n- file: c\n- file: d\n")
    (tmp_path / "a.html").write_text('<img src="x.png"><a href="https://example.org">a link is no request</a>')
    (tmp_path / "b.html").write_text("<span>Traceback</span> (most recent call last)")
    (tmp_path / "c.html").write_text('<script async src="https://example.org/x.js"></script>')
    found = site.check_pages(tmp_path, tmp_path)
    assert [text[:11] for text in found] == ["page b.html", "page c.html", "page d.html"]


@pytest.mark.parametrize(
    "old, new, rtol, same",
    [
        ("loss 1.520886", "loss 1.5208861", 1e-6, True),
        ("loss 1.520886", "loss 1.52090", 1e-6, False),
        ("loss 1.520886", "loss 1.52090", 1e-3, True),
        ("-0.0", "0", 1e-6, True),
        ("1e-17", "0.0", 1e-6, True),
        ("nan", "nan", 1e-6, True),
        ("nan", "1.0", 1e-6, False),
        ("inf", "-inf", 1e-6, False),
        ("below: True", "below: False", 1e-6, False),
        ("3 states", "3  states", 1e-6, True),
        ("3 states", "3 actions", 1e-6, False),
        ("[1, 2]", "[1, 2, 3]", 1e-6, False),
        ("S4", "S5", 1e-6, False),
    ],
)
def test_numbers_are_compared_with_tolerance_and_text_exactly(old, new, rtol, same):
    assert (references.differences(old, new, rtol) == []) == same


def test_references_catch_a_changed_constant_and_refuse_to_check_nothing(root, capsys):
    folder = root / "tests" / "reference"
    folder.mkdir(parents=True)
    (root / "tests" / "conftest.py").write_text((toybook.REPOSITORY / "tests" / "conftest.py").read_text())
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")

    def nbval(*names):
        words = [sys.executable, "-m", "pytest", "-q", "--nbval-lax", "--nbval-current-env", "--color=no"]
        words += ["-p", "no:cacheprovider", *names]
        environment = os.environ | {"PYTHONPATH": str(toybook.REPOSITORY)}
        return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True).stdout

    assert main(["--root", str(root), "accept"]) == 0
    assert sorted(path.stem for path in folder.glob("*.ipynb")) == NAMES
    assert "01_toy: new" in capsys.readouterr().out
    assert "5 passed" in nbval("01_toy.ipynb")

    toybook.edit(root / "helper.py", "3.0", "3.00001")
    said = nbval("01_toy.ipynb")
    assert "4.500015" in said and "1 failed, 4 passed" in said
    assert main(["--root", str(root), "accept", "1"]) == 0
    assert "01_toy: changed\n  In [5]: 4.500000 -> 4.500015 (3.3e-06)\n" in capsys.readouterr().out

    path = folder / "02_plain.ipynb"
    notebook = nbformat.read(path, 4)
    for cell in notebook.cells:
        cell["execution_count"] = None
    nbformat.write(notebook, path)
    toybook.edit(root / "chapters" / "03_file.md", "print(7)", "print(8)")
    said = nbval("02_plain.ipynb", "03_file.ipynb")
    assert "02_plain.ipynb: has cells that were not executed" in said
    assert "03_file.ipynb: was made from other code than the chapter has" in said


def test_the_builder_reads_what_the_ledger_writes():
    assert book.CLAIM == claims.MIME  # apart, so that the builder need not import the ledger and what it needs


def test_text_flushed_in_pieces_is_one_output():
    from nbformat.v4 import new_output

    from pa_core.execute import join_streams

    pieces = [("stdout", "a\n"), ("stdout", "b\n"), ("stderr", "c\n"), ("stdout", "d\n")]
    joined = join_streams([new_output("stream", name=name, text=text) for name, text in pieces])
    assert [(o.name, o.text) for o in joined] == [("stdout", "a\nb\n"), ("stderr", "c\n"), ("stdout", "d\n")]
