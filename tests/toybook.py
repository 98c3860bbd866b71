"""A book of four tiny chapters in a temporary folder, for the tests of the book tool."""

import shutil
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent

HEAD = """\
---
kernelspec:
  display_name: Python 3
  language: python
  name: python3
pa: {pa}
---

# {title}

```{{code-cell}} ipython3
:tags: [parameters]

{parameters}
seed: int = 0  # spawn key, 0 in the book {{x >= 0}}
```

```{{code-cell}} ipython3
from pa_core import params

params.check()
```

"""
CELL = "```{{code-cell}} ipython3\n:tags: [{tags}]\n\n{code}\n```\n"
CLAIM = """\
from IPython.display import display

print(f"{factor * toy.constant():.6f}")
display({"application/vnd.pa-core.claim+json": {"id": "toy.one", "value": factor}}, raw=True)"""


def chapter(title: str, *code: str, parameters: str = "", pa: str = "{}") -> str:
    """A text notebook; its last cell is checked by nbval."""
    cells = [CELL.format(tags="nbval-check-output" if c is code[-1] else "", code=c) for c in code]
    return HEAD.format(title=title, parameters=parameters, pa=pa) + "\n".join(cells)


def write(root: Path) -> Path:
    """Write the book: a page that needs all others, one with parameters and a module, a plain one, one with a file."""
    (root / "chapters").mkdir(parents=True)
    shutil.copytree(REPOSITORY / "_static", root / "_static")
    config = (REPOSITORY / "_config.yml").read_text().replace("bibtex_bibfiles:\n  - references.bib\n", "")
    config = config.replace("    bibtex_reference_style: author_year\n", "")
    files = {
        "_config.yml": config,
        "_toc.yml": "format: jb-book\nroot: chapters/00_start\nchapters:\n"
        + "".join(f"  - file: chapters/{name}\n" for name in ("01_toy", "02_plain", "03_file")),
        "requirements.txt": "one==1\n",
        "toy.py": "import helper\n\n\ndef constant():\n    return helper.VALUE\n",
        "helper.py": "VALUE = 3.0\nSETTINGS = 'settings.yaml'\n",
        "settings.yaml": "a: 1\n",
        "unused.py": "VALUE = 1\n",
        "data/numbers.txt": "7\n",
        "chapters/00_start.md": chapter(
            "Start",
            "import json, pathlib, toy",
            "path = pathlib.Path(toy.__file__).parent / claims_file\n"
            "print([claim['id'] for claim in json.loads(path.read_text())])",
            parameters='claims_file: str = ""  # claims of the other chapters',
            pa="{after: all}",
        ),
        "chapters/01_toy.md": chapter(
            "Toy",
            "import toy",
            CLAIM,
            parameters="factor: float = 2.0  # what multiplies [m] {0 < x <= 10}",
            pa="{smoke: {factor: 1.5}}",
        ),
        "chapters/02_plain.md": chapter("Plain\n\nAfter [the toy](01_toy.md).", "print({'b', 'a', 'c'}, 1.5)"),
        "chapters/03_file.md": chapter("File", "print(7)", pa='{artifacts: ["data/*.txt"]}'),
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
