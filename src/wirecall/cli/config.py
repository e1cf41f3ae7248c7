"""`wirecall config`: whether wirecall.toml is sound, and what is in force."""

from pathlib import Path
from typing import Any

import click
import msgspec

from wirecall.cli.failures import Exit
from wirecall.cli.ledgers import shown
from wirecall.cli.output import Output, count_of, json_option
from wirecall.config import FILE, Config, Problem, Value, check_config, load_config, variable

_FILE = click.argument("file", required=False, metavar="[FILE]")


@click.group("config")
def command() -> None:
    """Check or show wirecall.toml.

    FILE is wirecall.toml in the current folder, or what WIRECALL_CONFIG names. Flags win over
    variables, and those over the file.
    """


@command.command("check")
@_FILE
@json_option
def check_file(file: str | None, as_json: bool) -> Exit | None:
    """Tell everything that is wrong, with its line. Exit code 9 if there is something."""
    config, problems = check_config(file)
    problems = sorted(problems + _missing(config), key=lambda each: each.line or 0)
    out = Output(as_json)
    told = {"file": str(config.path) if config.path else None, "problems": [msgspec.to_builtins(each) for each in problems]}
    out.result(told, lambda: _show_problems(out, config, problems))
    return Exit.FOUND if problems else None


def _missing(config: Config) -> list[Problem]:
    """A file that is named must be there when the server starts; better to hear of it now."""
    app = config.values["server.app"]
    path = Path(str(app.value).partition(":")[0])
    if app.value is None or path.is_file():
        return []
    line = int(app.origin.rpartition(":")[2]) if app.origin[-1:].isdigit() else None
    return [Problem(app.origin, f"server.app: there is no file {path}", "name the Python file with the app", line)]


def _show_problems(out: Output, config: Config, problems: list[Problem]) -> None:
    for each in problems:
        click.echo(f"{each.where}: {each.what}")
        click.echo(f"  next: {each.fix}" if each.fix else "", nl=bool(each.fix))
    where = str(config.path) if config.path else f"no {FILE}"
    sound = f"{where}: {count_of(len(config.stated()), 'value')} stated"
    out.note(count_of(len(problems), "problem") if problems else sound, "failed" if problems else "ok")


@command.command("show")
@_FILE
@json_option
def show_values(file: str | None, as_json: bool) -> None:
    """Every value that is in force, and where it comes from."""
    config = load_config(file)
    out = Output(as_json)
    rows = [
        {"name": place, "value": _safe(value), "from": value.origin, "variable": variable(place)}
        for place, value in config.values.items()
    ]
    table = [
        (each["name"], _cell(place, each["value"]), each["from"]) for place, each in zip(config.values, rows, strict=True)
    ]
    out.result(rows, lambda: out.table(["NAME", "VALUE", "FROM"], table))


def _safe(value: Value) -> Any:
    return shown(value.value) if isinstance(value.value, str) else value.value


def _cell(place: str, value: Any) -> str:
    if value is not None:
        return str(value)
    return "-" if place == "server.app" else "the app's own"
