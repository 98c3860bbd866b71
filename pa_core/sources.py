"""What a piece of Python depends on inside this repository, read from its import statements.

Used to run a chapter again when, and only when, code that it can reach has changed.
"""

import ast
import re
from pathlib import Path

PACKAGE_ROOT = Path(__file__).resolve().parent.parent


def imported_names(source: str, package: str = "") -> set[str]:
    """Dotted names that `source` may import, lazy imports included; relative ones are resolved in `package`.

    `from a import b` gives both `a` and `a.b`: only the file system knows which of them is a module.
    """
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names.update([base, *(f"{base}.{alias.name}" for alias in node.names)])
    return {".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 2)}


def find_module(name: str, roots: tuple[Path, ...]) -> Path | None:
    """The file of module `name` below the first of `roots` that has it; None for installed packages."""
    for root in roots:
        stem = root.joinpath(*name.split("."))
        for path in (stem / "__init__.py", stem.with_suffix(".py")):
            if path.is_file():
                return path
    return None


def reachable_files(source: str, roots: tuple[Path, ...]) -> list[Path]:
    """Modules below `roots` that `source` imports, directly or not, and the data files they name.

    A data file is one that stands beside a module and whose name is a string constant in it.
    """
    found: set[Path] = set()
    waiting = [(source, "")]
    while waiting:
        text, package = waiting.pop()
        for name in imported_names(text, package):
            path = find_module(name, roots)
            if path is None or path in found:
                continue
            found.add(path)
            module = path.read_text(encoding="utf-8")
            found.update(_data_files(module, path.parent))
            waiting.append((module, name if path.name == "__init__.py" else name.rpartition(".")[0]))
    return sorted(found)


def _data_files(source: str, folder: Path) -> set[Path]:
    constants = {n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant) and type(n.value) is str}
    named = {text for text in constants if re.fullmatch(r"[\w.-]+\.(yaml|yml|json|csv|npz)", text)}
    return {folder / name for name in named if (folder / name).is_file()}
