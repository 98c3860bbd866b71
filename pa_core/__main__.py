"""The command line: `python -m pa_core COMMAND`.  Each command imports what it needs, so that help is instant."""

import argparse
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DESCRIPTION = "PolicyAttention, reproduced: build the book, run one chapter with parameters."


def main(argv: list[str] | None = None) -> int:
    """Run one command.  Exit codes: 0 done, 1 a chapter, check or page failed, 2 the request can't be carried out."""
    from .chapters import BookError

    arguments = _parser().parse_args(_join_parameters(sys.argv[1:] if argv is None else argv))
    arguments.root = arguments.root.resolve()
    try:
        return arguments.command(arguments)
    except BookError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was finished is kept", file=sys.stderr)
        return 130


def _join_parameters(argv: list[str]) -> list[str]:
    """`-p NAME VALUE` as one `-pNAME=VALUE`: argparse would take a negative VALUE for an option."""
    joined, rest = [], list(argv)
    while rest:
        word = rest.pop(0)
        if word in ("-p", "--parameter") and rest:
            name = rest.pop(0)
            if "=" not in name and rest and not rest[0].startswith("--"):
                name += f"={rest.pop(0)}"
            word = f"-p{name}"
        joined.append(word)
    return joined


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pa_core", description=DESCRIPTION)
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of the book (default: this repository)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    build = commands.add_parser("build", help="execute what changed and build the HTML")
    build.add_argument("--profile", choices=("full", "smoke"), default="full", help="full: _build/html (default); "
                       "smoke: small sizes, _build/smoke/html")
    build.add_argument("--strict", action="store_true", help="warnings and unresolved references are errors")
    build.add_argument("--force", action="store_true", help="execute every chapter, changed or not")
    build.add_argument("-j", "--workers", type=int, default=2, help="chapters at a time (default 2)")
    build.set_defaults(command=build_command)

    check = commands.add_parser("check", help="assert that every page of the built book exists and shows no traceback")
    check.set_defaults(command=check_command)

    run = commands.add_parser("run", help="execute one chapter with parameters", description="Execute one chapter; "
                              "leaves the executed notebook and a small HTML book of it in DIR, away from the book.")
    run.add_argument("chapter", help="number or name: 02, 02_closed_loop")
    run.add_argument("-p", "--parameter", action="append", default=[], metavar="NAME VALUE",
                     help="set a parameter; repeat for more (see the command `chapters`)")
    run.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the results")
    run.add_argument("--profile", choices=("full", "smoke"), default="full", help="values of the other parameters")
    run.set_defaults(command=run_command)

    chapters = commands.add_parser("chapters", help="list chapters, their parameters and last execution times")
    chapters.set_defaults(command=chapters_command)

    accept = commands.add_parser("accept", help="make the reference notebooks of the tests again")
    accept.add_argument("chapters", nargs="*", help="numbers or names; all without")
    accept.add_argument("-j", "--workers", type=int, default=2, help="chapters at a time (default 2)")
    accept.set_defaults(command=accept_command)

    train = commands.add_parser("train", help="train the missing runs of a cell", description="Train the missing runs of "
                                "a registered cell.  A killed call goes on where it was when it is called again; a finished "
                                "run is never trained again.")
    train.add_argument("cell", nargs="?", help="name of a cell, e.g. policy_attention_s4 (see --list)")
    train.add_argument("--list", action="store_true", help="list the cells, their budgets, finished and missing runs")
    train.add_argument("--runs", help="run numbers, e.g. 0-4 or 0,2 (default: all that the protocol registers)")
    train.add_argument("--device", default="auto", help="auto (default: a GPU if there is one), cpu, cuda or mps")
    train.add_argument("--compiled", action="store_true", help="compile the loss: slower start, faster steps")
    train.add_argument("--out", type=Path, metavar="DIR", help="folder for the runs (default: artifacts)")
    train.set_defaults(command=train_command)

    cards = commands.add_parser("cards", help="write the model card of every cell with a finished run")
    cards.add_argument("--out", type=Path, metavar="DIR", help="folder of the runs (default: artifacts)")
    cards.set_defaults(command=cards_command)
    return parser


def build_command(arguments) -> int:
    from . import book, chapters, site

    with book.build_lock(arguments.root):
        content = chapters.read_book(arguments.root)
        errors = book.execute_book(
            content, arguments.profile, workers=arguments.workers, force=arguments.force
        )
        if errors:
            return _fail(errors, "the previous pages stay")
        build = arguments.root / "_build"
        target = build / "html" if arguments.profile == "full" else build / arguments.profile / "html"
        try:
            made = site.build_html(book.staging(arguments.root, arguments.profile), target, strict=arguments.strict)
        except chapters.BookError as error:
            return _fail([str(error)], "")
    print(f"{'built' if made else 'up to date:'} {target / 'index.html'}")
    return 0


def check_command(arguments) -> int:
    from . import book, site

    found = site.check_pages(book.staging(arguments.root, "full"), arguments.root / "_build" / "html")
    if found:
        return _fail(found, "")
    print("every page of the book is there, shows no traceback and loads nothing from the network")
    return 0


def run_command(arguments) -> int:
    import nbformat

    from . import book, chapters, execute, files, params, site

    chapter = chapters.read_book(arguments.root).find(arguments.chapter)
    given = {}
    for text in arguments.parameter:
        name, equals, value = text.partition("=")
        if not equals:
            raise chapters.BookError(f"-p {name} has no value; write -p {name} VALUE")
        given[name] = value
    values = chapter.values(arguments.profile) | chapter.validate(given)
    claims = book.claims_path(arguments.root, arguments.profile)
    if chapter.after_all and "claims_file" not in given and claims.exists():
        values["claims_file"] = claims.relative_to(arguments.root).as_posix()
    out = arguments.out.resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise chapters.BookError(f"can't write to {out}: {error.strerror}") from None
    print(f"running {chapter.name}", flush=True)
    outcome = execute.run_chapter(chapter, values, cell_timeout=None)  # retraining takes hours
    note = params.banner(chapter.parameters, values)
    if note:
        book.insert_banner(outcome.notebook, note)
    notebook = out / f"{chapter.name}.ipynb"
    files.write_atomically(notebook, nbformat.writes(outcome.notebook) + "\n")
    if outcome.error:
        return _fail([outcome.error], f"executed so far: {notebook}")
    site.build_one_page(notebook, arguments.root, out / "html")
    print(f"{notebook} ({outcome.seconds:.0f} s)\n{out / 'html' / 'index.html'}")
    return 0


def chapters_command(arguments) -> int:
    from . import book, chapters

    times = book.execution_times(arguments.root)
    for chapter in chapters.read_book(arguments.root).chapters:
        taken = ", ".join(f"{times[p][chapter.name]:.0f} s in {p}" for p in times if chapter.name in times[p])
        print(f"{chapter.name}: {chapter.title}" + (f" [{taken}]" if taken else ""))
        for name, p in chapter.parameters.items():
            unit = f" [{p.unit}]" if p.unit else ""
            smoke = f", smoke {chapter.smoke[name]}" if name in chapter.smoke else ""
            print(f"    {name}: {p.type.__name__} = {p.default}{smoke}  {p.meaning}{unit}; {p.limits}")
    width = shutil.get_terminal_size().columns
    print("-" * min(width, 79) + "\npython -m pa_core run NUMBER -p NAME VALUE --out DIR")
    return 0


def accept_command(arguments) -> int:
    from . import book, chapters, references

    with book.build_lock(arguments.root):
        content = chapters.read_book(arguments.root)
        named = {content.find(name) for name in arguments.chapters} or set(content.chapters)
        wanted = [chapter for chapter in content.chapters if chapter in named]
        errors = references.accept(content, wanted, workers=arguments.workers)
    return _fail(errors, "their references stay") if errors else 0


def train_command(arguments) -> int:
    from . import cards, chapters, train

    out, state = arguments.root / "artifacts", arguments.root / "_state"
    if arguments.out:  # apart from the book's own runs, so that a resumed state is never theirs
        out = arguments.out.resolve()
        state = out / "_state"
    if arguments.list:
        print(cards.cell_table(out).to_string(index=False))
        return 0
    if not arguments.cell:
        raise chapters.BookError("which cell? name one, or see them with --list")
    try:
        runs = train.parse_runs(arguments.runs) if arguments.runs else None
        train.check_request(arguments.cell, runs, arguments.device)
        (state / arguments.cell).mkdir(parents=True, exist_ok=True)  # a folder that can't be written is known at once
        options = dict(device=arguments.device, compiled=arguments.compiled, out=out, state=state)
        trained = train.train_cell(arguments.cell, runs, **options)
        if trained:
            cards.write_card(arguments.cell, out)
    except (KeyError, ValueError) as error:
        raise chapters.BookError(error.args[0]) from None
    except OSError as error:
        raise chapters.BookError(f"can't write to {error.filename or out}: {error.strerror}") from None
    folder = out / arguments.cell
    print(f"trained runs {', '.join(map(str, trained))}: {folder}" if trained else f"nothing is missing in {folder}")
    return 0


def cards_command(arguments) -> int:
    from . import cards, chapters

    out = (arguments.out or arguments.root / "artifacts").resolve()
    try:
        written = cards.write_cards(out)
    except ValueError as error:
        raise chapters.BookError(str(error)) from None
    print("\n".join(map(str, written)) or f"no finished run in {out}")
    return 0


def _fail(errors: list[str], note: str) -> int:
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    if note:
        print(note, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
