"""`wirecall config`: whether wirecall.toml is valid, and which values are in force."""

from pathlib import Path

import click
import msgspec

from wirecall.cli.failures import Exit
from wirecall.cli.output import Printer, count_of, json_option
from wirecall.cli.stores import shown
from wirecall.config import FILE, Problem, check_config, load_config, variable

_FILE = click.argument("file", required=False, metavar="[FILE]")


@click.group("config")
def command() -> None:
    """Check or show wirecall.toml.

    FILE is wirecall.toml in the current folder by default, or the file that WIRECALL_CONFIG names. Flags win over
    variables, and variables over the file.
    """


@command.command("check")
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


@command.command("show")
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
