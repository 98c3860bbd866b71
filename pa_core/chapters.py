"""The chapters of the book as written: text notebooks, their front matter and parameters, their fingerprint."""

import hashlib
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from . import params, sources

_FRONT_MATTER = {"smoke": dict, "artifacts": list, "after": str, "unchecked": str}
_PINS = ("requirements.txt", "constraints.txt")  # they decide what a chapter's imports mean
_EXECUTOR = Path(__file__).with_name("execute.py")  # decides how it is run
CHECK_CALL = "params.check()"
CHECKED_TAG = "nbval-check-output"


class BookError(ValueError):
    """A book, chapter or request that can't be built, in one line for the terminal."""


@dataclass(frozen=True, eq=False)  # a chapter is itself, and a key of dicts
class Chapter:
    """One text notebook of the book."""

    root: Path
    path: Path
    notebook: object  # nbformat.NotebookNode, not executed
    parameters: dict[str, params.Parameter]
    smoke: dict  # checked values of the profile smoke
    artifacts: tuple[str, ...]
    after_all: bool
    unchecked: str

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def page(self) -> str:
        """Its entry in _toc.yml."""
        return self.path.relative_to(self.root).with_suffix("").as_posix()

    @property
    def title(self) -> str:
        return heading(self.path.read_text(encoding="utf-8")) or self.name

    @property
    def code_cells(self) -> list:
        return [cell for cell in self.notebook.cells if cell.cell_type == "code"]

    def values(self, profile: str) -> dict:
        """The parameters to inject for a profile."""
        return dict(self.smoke) if profile == "smoke" else {}

    def validate(self, given: dict) -> dict:
        """Checked and typed parameters.  Raises BookError naming chapter, parameter, value and allowed range."""
        try:
            return params.validate(self.parameters, given)
        except params.ParameterError as error:
            raise BookError(f"{self.name}: {error}") from None

    def artifact_files(self) -> list[Path]:
        """Files named by the front matter's globs.  Raises BookError for a glob that matches none."""
        files = []
        for pattern in self.artifacts:
            matches = sorted(p for p in self.root.glob(pattern) if p.is_file())
            if not matches:
                raise BookError(f"{self.name}: its front matter names artifacts {pattern!r}, and no file matches")
            files += matches
        return files

    def fingerprint(self, values: dict, *inputs: bytes) -> str:
        """Hash of everything that decides the result: source, parameters, reachable code, pins, artefacts, `inputs`."""
        code = "\n".join(re.sub(r"(?m)^\s*[%!].*$", "", cell.source) for cell in self.code_cells)
        try:
            reachable = sources.reachable_files(code, (self.root, sources.PACKAGE_ROOT))
        except SyntaxError as error:
            raise BookError(f"{self.name}: its code or a module it imports is not Python: {error}") from None
        pins = [self.root / name for name in _PINS if (self.root / name).is_file()]
        files = [self.path, *reachable, *self.artifact_files(), *pins, _EXECUTOR]
        digest = hashlib.sha256(f"{sys.version_info[:2]} {json.dumps(values, sort_keys=True)}".encode())
        for path in files:
            place = path.relative_to(self.root if path.is_relative_to(self.root) else sources.PACKAGE_ROOT)
            digest.update(f"\n{place.as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
        for extra in inputs:
            digest.update(hashlib.sha256(extra).digest())
        return digest.hexdigest()


@dataclass(frozen=True)
class Book:
    """The pages of `_toc.yml`, in order."""

    root: Path
    pages: tuple[Path, ...]
    chapters: tuple[Chapter, ...]

    def find(self, wanted: str) -> Chapter:
        """The chapter with this number (`2`, `02`) or name.  Raises BookError listing what there is."""
        wanted = Path(wanted).stem
        number = wanted.zfill(2) + "_"
        for chapter in self.chapters:
            if chapter.name == wanted or wanted.isdigit() and chapter.name.startswith(number):
                return chapter
        raise BookError(f"no chapter {wanted!r}; there are: " + ", ".join(c.name for c in self.chapters))


def heading(text: str) -> str:
    """The first heading of MyST text, without its marks."""
    match = re.search(r"(?m)^#\s+(.+?)\s*$", text)
    return match[1] if match else ""


def read_book(root: Path) -> Book:
    """Read `_toc.yml` and every page it lists.  Raises BookError."""
    try:
        toc = yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BookError(f"{root} has no _toc.yml: run this from the top of the repository, or pass --root") from None
    except yaml.YAMLError as error:
        raise BookError(f"_toc.yml is not YAML: {' '.join(str(error).split())}") from None
    pages = []
    for entry in toc_files(toc):
        path = root / f"{entry}.md"
        if not path.is_file():
            raise BookError(f"_toc.yml lists {entry}, but {entry}.md does not exist")
        pages.append(path)
    chapters = tuple(read_chapter(root, path) for path in pages if _is_notebook(path))
    return Book(root, tuple(pages), chapters)


def toc_files(node) -> list[str]:
    """Every page of a jb-book table of contents, depth first."""
    if isinstance(node, list):
        return [name for item in node for name in toc_files(item)]
    if not isinstance(node, dict):
        return []
    own = [node[key] for key in ("root", "file") if key in node]
    return own + [name for key in ("parts", "chapters", "sections") for name in toc_files(node.get(key))]


def _is_notebook(path: Path) -> bool:
    return re.match(r"---\n(.*\n)*?kernelspec:", path.read_text(encoding="utf-8")) is not None


def read_chapter(root: Path, path: Path) -> Chapter:
    """Read one text notebook and check its conventions (CONTRIBUTING.md).  Raises BookError."""
    import jupytext

    where = path.relative_to(root).as_posix()
    try:
        notebook = jupytext.read(path, fmt="md:myst")
    except Exception as error:  # jupytext lets errors of its YAML and Markdown readers through
        raise BookError(f"{where}: can't be read as a text notebook: {' '.join(str(error).split())}") from None
    front = notebook.metadata.get("pa", {})
    for key, value in front.items():
        if not isinstance(value, _FRONT_MATTER.get(key, ())):
            known = ", ".join(f"{name} ({kind.__name__})" for name, kind in _FRONT_MATTER.items())
            raise BookError(f"{where}: front matter pa.{key} = {value!r}; allowed: {known}")
    if front.get("after", "all") != "all":
        raise BookError(f"{where}: front matter pa.after = {front['after']!r}; allowed: all")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    tagged = [i for i, cell in enumerate(code) if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        raise BookError(f"{where}: has {len(tagged)} code cells tagged `parameters`; needs exactly one")
    if not any(CHECK_CALL in cell.source for cell in code[tagged[0] + 1 : tagged[0] + 2]):
        raise BookError(f"{where}: the code cell after the parameters cell must call {CHECK_CALL}")
    try:
        declared = params.parse(code[tagged[0]].source)
        smoke = params.validate(declared, front.get("smoke", {}))
    except params.ParameterError as error:
        raise BookError(f"{where}: {error}") from None
    if front.get("after") and "claims_file" not in declared:
        raise BookError(f'{where}: runs after all others and needs the parameter `claims_file: str = ""`')
    if not front.get("unchecked") and not any(CHECKED_TAG in cell.metadata.get("tags", []) for cell in code):
        raise BookError(f"{where}: no cell is tagged {CHECKED_TAG}; tag one, or give the reason in pa.unchecked")
    artifacts = tuple(front.get("artifacts", ()))
    return Chapter(root, path, notebook, declared, smoke, artifacts, "after" in front, front.get("unchecked", ""))
