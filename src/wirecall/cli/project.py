"""The folder of a project: `wirecall new` writes a first one, and `wirecall config` checks and shows its wirecall.toml.

The first project is small, and it runs: a query, a command, and a test that loses an answer. Its files are in the folder
`template` beside this one, with `$name` for its name. They end in .txt, so that no tool takes them for ours.
"""

import os
import re
from pathlib import Path
from shlex import quote
from string import Template

import click
import msgspec

from wirecall.cli.failures import CliError, Exit
from wirecall.cli.ledger import shown
from wirecall.cli.output import Printer, count_of, json_option
from wirecall.config import FILE, Problem, check_config, load_config, variable

TEMPLATE = Path(__file__).with_name("template")
FILES = ("app.py", "wirecall.toml", "test_app.py", "README.md", ".gitignore")


@click.command("new")
@click.argument("folder", metavar="NAME")
@json_option
def new_command(folder: str, out: Printer) -> None:
    """Write a first project into the new folder NAME: a server, a test, a wirecall.toml.

    \b
    wirecall new shop && cd shop && wirecall dev
    """
    if not folder.strip():
        raise CliError("The name is empty.", "it is the folder of the project", "wirecall new shop")
    path = Path(os.path.normpath(folder))  # otherwise `x/..` is looked up before x exists
    name = path.resolve().name
    if not re.fullmatch(r"[A-Za-z0-9][\w .-]*", name):
        raise CliError(f"{name!r} is not a name for a project.", "use letters, digits, . _ and -", "wirecall new shop")
    if path.exists() and not path.is_dir():
        raise CliError(f"{path} is a file.", "a project is a folder", f"wirecall new {path}-app")
    if path.is_dir() and (found := sorted(each.name for each in path.iterdir())):
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        why = f"it has {', '.join(found[:3])}{more}"
        raise CliError(f"{path} is not empty.", why, "choose a new folder; nothing was written")
    try:
        path.mkdir(parents=True, exist_ok=True)
        for file in FILES:
            text = Template((TEMPLATE / f"{file}.txt").read_text("utf-8")).substitute(name=name)
            (path / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CliError(f"{path} cannot be written.", error.strerror or str(error), "choose another folder") from None
    next_step = f"cd {quote(str(path))} && wirecall dev"
    out.result({"folder": str(path), "files": FILES}, f"Made {path}: {', '.join(FILES)}\n  next: {next_step}")


# --- wirecall.toml --------------------------------------------------------------------------------------------------

_FILE = click.argument("file", required=False, metavar="[FILE]")


@click.group("config")
def config_command() -> None:
    """Check or show wirecall.toml.

    FILE is wirecall.toml in the current folder by default, or the file that WIRECALL_CONFIG names. Flags win over
    variables, and variables over the file.
    """


@config_command.command("check")
@_FILE
@json_option
def check_file(file: str | None, out: Printer) -> Exit | None:
    """List every mistake, with its line. Exit code 9 if there is one."""
    config, problems = check_config(file)
    # A missing app would stop the server at its start; report it now.
    app = config.values["server.app"]
    path = Path(str(app.value).partition(":")[0])
    if app.value is not None and not path.is_file():
        line = int(app.origin.rpartition(":")[2]) if app.origin[-1:].isdigit() else None
        what = f"server.app: there is no file {path}"
        problems.append(Problem(app.origin, what, "name the Python file with the app", line))
    problems.sort(key=lambda each: each.line or 0)

    def show() -> None:
        for each in problems:
            click.echo(f"{each.where}: {each.what}")
            click.echo(f"  next: {each.fix}" if each.fix else "", nl=bool(each.fix))
        sound = f"{config.path or f'no {FILE}'}: {count_of(len(config.stated()), 'value')} stated"
        out.note(count_of(len(problems), "problem") if problems else sound, "failed" if problems else "ok")

    found = [msgspec.to_builtins(each) for each in problems]
    out.result({"file": str(config.path) if config.path else None, "problems": found}, show)
    return Exit.FOUND if problems else None


@config_command.command("show")
@_FILE
@json_option
def show_values(file: str | None, out: Printer) -> None:
    """Show every value that is in force, and its origin."""
    values = load_config(file).values
    safe = {place: shown(each.value) if isinstance(each.value, str) else each.value for place, each in values.items()}
    rows = [
        {"name": place, "value": safe[place], "from": each.origin, "variable": variable(place)}
        for place, each in values.items()
    ]
    table = []
    for place, each in values.items():
        absent = "-" if place == "server.app" else "the app's own"
        table.append((place, absent if each.value is None else str(safe[place]), each.origin))
    out.result(rows, lambda: out.table(["NAME", "VALUE", "FROM"], table))
