"""The staging tree as HTML: built aside, checked, then put in place of the previous pages."""

import hashlib
import html
import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import yaml

from .book import CLAIM
from .chapters import BookError, toc_files

# One file with all TeX extensions; the smaller tex-svg.js fetches missing ones and then renders nothing.
_MATHJAX = "mathjax/static/mathjax/es5/tex-svg-full.js"
_STAMP = ".made-from.json"


def build_html(staging: Path, target: Path, *, strict: bool = False, alone: bool = False) -> bool:
    """Build `target` from `staging` unless it was already made from the same files.  True if it was built.

    With `strict`, warnings and unresolved references are errors.  `alone` is for one chapter without its book: what leads
    to the others becomes text, without a warning.  Raises BookError; `target` is then as before.
    """
    previous = target.with_name(f".{target.name}.previous")
    if previous.exists() and not target.exists():
        previous.rename(target)  # a build was killed between the two renames below
    noisy = _chapters_with_stderr(staging) if strict else []
    if noisy:
        raise BookError("; ".join(noisy) + "; the previous pages stay")
    content = _tree_hash(staging)
    if _is_made_from(target, content, strict):
        return False
    scratch = staging.parent / ".site"
    shutil.rmtree(scratch, ignore_errors=True)
    source = scratch / "book"
    shutil.copytree(staging, source)
    _adapt(source, alone)
    mathjax = source / "_vendor" / Path(_MATHJAX).name  # outside _static: everything there is loaded by every page
    mathjax.parent.mkdir()
    shutil.copyfile(distribution("django-static-mathjax").locate_file(_MATHJAX), mathjax)
    # A fresh output folder each time: Sphinx repeats no warning, and no stale reference, of an earlier build.
    command = [sys.executable, "-P", "-c", "from jupyter_book.cli.main import main; main()"]  # has no __main__
    command += ["build", str(source), "--path-output", str(scratch), "-q"]
    command += ["-W", "-n", "--keep-going"] if strict else []
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    warnings = _relevant(result.stdout.replace(f"{source}/", ""))
    if warnings and not (alone and result.returncode == 0):
        print(warnings, flush=True)
    made = scratch / "_build" / "html"
    if result.returncode or not made.is_dir():
        raise BookError(f"jupyter-book ended with exit code {result.returncode}; the previous pages stay")
    problems = check_pages(staging, made)
    if problems:
        raise BookError("; ".join(problems) + "; the previous pages stay")
    (made / _STAMP).write_text(json.dumps({"content": content, "strict": strict}), encoding="utf-8")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(previous, ignore_errors=True)
    if target.exists():
        target.rename(previous)
    made.rename(target)
    shutil.rmtree(previous, ignore_errors=True)
    shutil.rmtree(scratch, ignore_errors=True)
    return True


def check_pages(staging: Path, made: Path) -> list[str]:
    """What is wrong with the pages in `made`: missing, showing a traceback, or asking the network for something."""
    problems = []
    try:
        toc = yaml.safe_load((staging / "_toc.yml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BookError(f"there is no book in {staging}: build it first") from None
    for page in toc_files(toc):
        path = made / f"{page}.html"
        if not path.is_file():
            problems.append(f"page {page}.html is missing")
            continue
        text = path.read_text(encoding="utf-8")
        if "Traceback (most recent call last)" in html.unescape(re.sub(r"<[^>]+>", "", text)):
            problems.append(f"page {page}.html shows a traceback")
        for tag in re.findall(r"<(?:script|link|img|iframe|source|object)\b[^>]*>", text):
            address = re.search(r"""\b(?:src|href|data)=["'](?:https?:)?//[^"']+""", tag)
            if address and 'rel="canonical"' not in tag:
                problems.append(f"page {page}.html loads {address[0]} from the network")
    return problems


def build_one_page(notebook: Path, book_root: Path, target: Path) -> None:
    """A book of one chapter in `target`, with `index.html`, from an executed notebook.  Raises BookError."""
    aside = target.with_name(f".{target.name}.staging")
    shutil.rmtree(aside, ignore_errors=True)
    page = aside / "book" / notebook.name
    page.parent.mkdir(parents=True)
    content = json.loads(notebook.read_text(encoding="utf-8"))
    if any("{cite" in "".join(cell["source"]) for cell in content["cells"]):
        text = "## References\n\n```{bibliography}\n:filter: docname in docnames\n```"
        content["cells"].append({"cell_type": "markdown", "id": "references", "metadata": {}, "source": text})
    page.write_text(json.dumps(content), encoding="utf-8")
    for name in ("_config.yml", "references.bib"):
        if (book_root / name).exists():
            shutil.copyfile(book_root / name, page.with_name(name))
    if (book_root / "_static").exists():
        shutil.copytree(book_root / "_static", page.with_name("_static"))
    (page.parent / "_toc.yml").write_text(f"format: jb-book\nroot: {notebook.stem}\n", encoding="utf-8")
    try:
        build_html(page.parent, target, alone=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _chapters_with_stderr(folder: Path) -> list[str]:
    """Chapters that wrote to stderr (warnings, mostly), each with the cell and the first line."""
    found = []
    for path in sorted(folder.rglob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            for output in cell.get("outputs", []):
                if output.get("name") == "stderr":
                    line = "".join(output["text"]).strip().partition("\n")[0]
                    found.append(f"{path.stem}: In [{cell['execution_count']}] wrote to stderr: {line}")
    return found


def _relevant(output: str) -> str:
    """The warnings and errors in the log of jupyter-book, without colours and its farewell in a box."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", output).split("=====")[0].splitlines()
    usual = r"\s*$|Running Jupyter-Book|(Source|Config|Output) (Folder|Path):"
    return "\n".join(line for line in lines if not re.match(usual, line))


def _adapt(folder: Path, alone: bool) -> None:
    """Change the copy of a staging tree in `folder` into what Sphinx reads without complaint.

    Notebooks lose the outputs that are for the builder alone, and links between chapters, written `NAME.md`, follow them
    to the executed notebook, or become text where the chapter stands `alone`.
    """
    for path in folder.rglob("*.ipynb"):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = _relink("".join(cell["source"]), path.parent, alone)
            for output in cell.get("outputs", []):
                output.get("data", {}).pop(CLAIM, None)
            if "outputs" in cell:
                cell["outputs"] = [output for output in cell["outputs"] if output.get("data", True)]
        path.write_text(json.dumps(notebook), encoding="utf-8")
    for path in folder.rglob("*.md"):
        path.write_text(_relink(path.read_text(encoding="utf-8"), path.parent, alone), encoding="utf-8")


def _relink(text: str, folder: Path, alone: bool) -> str:
    def target(match: re.Match) -> str:
        label, name, anchor = match.groups("")
        if (folder / f"{name}.ipynb").exists():
            return f"[{label}]({name}.ipynb{anchor})"
        return label if alone else match[0]

    return re.sub(r"\[([^\[\]]+)\]\(([\w./-]+)\.md(#[\w-]+)?\)", target, text)


def _is_made_from(target: Path, content: str, strict: bool) -> bool:
    try:
        stamp = json.loads((target / _STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return stamp["content"] == content and (stamp["strict"] or not strict)


def _tree_hash(folder: Path) -> str:
    """Hash of every file that goes into the pages, the versions of the tools and this module."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for tool in ("jupyter-book", "sphinx", "myst-nb", "sphinx-book-theme", "sphinxcontrib-bibtex"):
        digest.update(f"{tool} {distribution(tool).version}\n".encode())
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return digest.hexdigest()
