"""The parameters cell of a chapter: its grammar, its checks, and the table that readers see.

A chapter declares its parameters in one code cell tagged `parameters`, a line for each:

    eta: float = 0.5  # step size of the actor [1/reward] {0 < x <= 100}
    seed: int = 0  # spawn key, 0 in the book {x >= 0}

Types are int, float, bool and str.  The unit and the limits may be left out; limits are a chain of
comparisons of x with numbers, or the values that are allowed: {uniform | greedy}.  The grammar is
read with `ast` and `tokenize`; nothing in the cell is executed here.

The next code cell calls `check()`, which finds the declaration in the kernel's own input history.
Plain Papermill and `python -m pa_core run` therefore refuse the same values with the same message.
"""

import ast
import difflib
import html
import io
import math
import re
import tokenize
from dataclasses import dataclass
from itertools import pairwise

INJECTED = "# Parameters"  # first line of the cell that Papermill adds after the parameters cell
# Filled by the builder with a place in the repository: never a reason for the "not the book's numbers" banner.
WIRING = ("claims_file",)

_TYPES = {"int": int, "float": float, "bool": bool, "str": str}
_COMMENT = re.compile(r"#\s*(?P<meaning>[^\[\]{}]+?)\s*(\[(?P<unit>[^\[\]]+)\])?\s*(\{(?P<allowed>[^{}]+)\})?\s*")
_COMPARISON = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


class ParameterError(ValueError):
    """A parameter that a chapter can't be run with, or a parameters cell that can't be read."""

    def _render_traceback_(self):  # asked for by IPython: the one line that matters, without the stack
        return [f"ParameterError: {self}"]


@dataclass(frozen=True)
class Parameter:
    """One line of a parameters cell."""

    name: str
    type: type
    default: object
    meaning: str
    unit: str = ""
    allowed: str = ""  # the text between the braces

    def __post_init__(self):
        self.coerce(self.default)

    @property
    def limits(self) -> str:
        """The allowed values in words that name the parameter: `0 < eta <= 100`, or its type without limits."""
        if not self.allowed:
            return f"any {self.type.__name__}"
        return self.allowed if "|" in self.allowed else re.sub(r"\bx\b", self.name, self.allowed)

    def coerce(self, value):
        """`value` as this parameter's type.

        Text is read as a command line would read it (Papermill's YAML leaves 1e-4 as text); otherwise
        only an int may stand for a float.  Raises ParameterError naming parameter, value and limits.
        """
        typed = _convert(self.type, value)
        if typed is None:
            raise ParameterError(f"{self.name} = {value!r} is not of type {self.type.__name__}; allowed: {self.limits}")
        if self.type is float and not math.isfinite(typed):
            raise ParameterError(f"{self.name} = {typed!r} is not finite; allowed: {self.limits}")
        if self.allowed and not self._admits(typed):
            raise ParameterError(f"{self.name} = {typed!r} is out of range; allowed: {self.limits}")
        return typed

    def _admits(self, value) -> bool:
        if "|" in self.allowed or not re.search("[<>]", self.allowed):
            return value in [_convert(self.type, option.strip()) for option in self.allowed.split("|")]
        parts = re.split(r"\s*(<=|>=|<|>)\s*", self.allowed.strip())
        try:
            numbers = [value if part == "x" else float(part) for part in parts[::2]]
        except ValueError:
            numbers = []
        if len(numbers) not in (2, 3) or "x" not in parts[::2]:
            raise ParameterError(f"{self.name}: can't read the limits {{{self.allowed}}}; write {{lo < x <= hi}}")
        return all(_COMPARISON[sign](*pair) for sign, pair in zip(parts[1::2], pairwise(numbers), strict=True))


def _convert(kind: type, value):
    """`value` as `kind`, or None where that would change its meaning."""
    if isinstance(value, str) and kind is not str:
        text = value.strip()
        if kind is bool:
            return {"true": True, "false": False}.get(text.lower())
        try:
            return kind(text)
        except ValueError:
            return None
    if kind is float and type(value) is int:
        return float(value)
    return value if type(value) is kind else None


def parse(source: str) -> dict[str, Parameter]:
    """The parameters that the source of a parameters cell declares, in order.

    Raises ParameterError naming the line that does not follow the grammar, or a missing `seed`.
    """
    comments = {}
    try:
        statements = ast.parse(source).body
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                comments[token.start[0]] = token.string
    except (SyntaxError, tokenize.TokenError) as error:
        raise ParameterError(f"the parameters cell is not Python: {error}") from None
    declared = {}
    for statement in statements:
        text = ast.get_source_segment(source, statement)
        parameter = _parse_line(statement, text, comments.get(statement.end_lineno, ""))
        declared[parameter.name] = parameter
    if "seed" not in declared or declared["seed"].type is not int:
        raise ParameterError("the parameters cell needs `seed: int = 0  # spawn key, 0 in the book {x >= 0}`")
    return declared


def _parse_line(statement: ast.stmt, text: str, comment: str) -> Parameter:
    wanted = "`name: type = value  # meaning [unit] {lo < x <= hi}`"
    simple = isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value
    kind = _TYPES.get(ast.unparse(statement.annotation)) if simple else None
    match = _COMMENT.fullmatch(comment)
    if kind is None or match is None:
        raise ParameterError(f"parameters cell: `{text}  {comment}` is not of the form {wanted}")
    try:
        default = ast.literal_eval(statement.value)
    except ValueError:
        raise ParameterError(f"parameters cell: the value in `{text}` must be a literal") from None
    if _convert(kind, default) is None or isinstance(default, str) and kind is not str:
        raise ParameterError(f"parameters cell: the value in `{text}` is not of type {kind.__name__}")
    fields = {key: (value or "").strip() for key, value in match.groupdict().items()}
    return Parameter(statement.target.id, kind, _convert(kind, default), **fields)


def validate(declared: dict[str, Parameter], given: dict) -> dict:
    """`given` with every value checked and typed.  Raises ParameterError, for an unknown name as well."""
    for name, value in given.items():
        if name not in declared:
            close = difflib.get_close_matches(name, declared, 1)
            hint = f"did you mean {close[0]}?" if close else "there are: " + ", ".join(declared)
            raise ParameterError(f"unknown parameter {name} = {value!r}; {hint}")
    return {name: declared[name].coerce(value) for name, value in given.items()}


def banner(declared: dict[str, Parameter], values: dict) -> str:
    """The sentence that marks results of other parameters, empty for the book's own."""
    changed = [
        f"{name} = {value}"
        for name, value in values.items()
        if name not in WIRING and value != declared[name].default
    ]
    return f"Run with {', '.join(changed)}: not the book's numbers" if changed else ""


def check() -> None:
    """Check this notebook's parameters, give each its declared type, and show them as a table.

    Call it alone in the code cell that follows the parameters cell.  Raises ParameterError.
    """
    from IPython import get_ipython  # a notebook has it; importing this module elsewhere does not need it
    from IPython.display import display

    shell = get_ipython()
    if shell is None:
        raise ParameterError("params.check() reads the cells of a running notebook: there is none here")
    declared, injected = _find_cells(shell.user_ns["In"][1:-1])
    validate(declared, {name: shell.user_ns[name] for name in injected})
    values = validate(declared, {name: shell.user_ns[name] for name in declared})
    shell.user_ns.update(values)
    note = banner(declared, values)
    plain = "\n".join([note] * bool(note) + [f"{name} = {value!r}" for name, value in values.items()])
    display({"text/html": _table(declared, values, note), "text/plain": plain}, raw=True)


def _find_cells(cells: list[str]) -> tuple[dict[str, Parameter], list[str]]:
    """The declaration among executed `cells`, and the names that the cell injected after it assigns."""
    for index in range(len(cells) - 1, -1, -1):
        if re.search(r"^seed\s*:\s*int\s*=", cells[index], re.MULTILINE):
            after = cells[index + 1] if index + 1 < len(cells) else ""
            names = []
            if after.startswith(INJECTED):
                names = [s.targets[0].id for s in ast.parse(after).body if isinstance(s, ast.Assign)]
            return parse(cells[index]), names
    raise ParameterError("no parameters cell was run before params.check()")


def _table(declared: dict[str, Parameter], values: dict, note: str) -> str:
    rows = []
    for name, p in declared.items():
        value = html.escape(str(values[name])) + (f" {html.escape(p.unit)}" if p.unit else "")
        rows.append(
            f"<tr><td><code>{name}</code></td><td>{value}</td>"
            f"<td>{html.escape(p.limits)}</td><td>{html.escape(p.meaning)}</td></tr>"
        )
    head = "<tr><th>parameter</th><th>value</th><th>allowed</th><th>meaning</th></tr>"
    strong = f'<p class="pa-rerun"><strong>{html.escape(note)}</strong></p>' if note else ""
    return f'{strong}<table class="dataframe pa-parameters"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table>'
