"""The folder of a project.

`wirecall new` writes a first one, and `wirecall config` checks and shows its wirecall.toml.

The first project is small, and it runs: a query, a command, and a test that loses an answer. Its
files are in the folder `template` beside this file, with `$name` for its name. They end in .txt, so
that tools do not treat them as our sources.
"""

import os
import re
from pathlib import Path
from shlex import quote
from string import Template
from typing import Any

import click
import msgspec

from wirecall.cli.failures import CliError, Exit
from wirecall.cli.terminal import Printer, count_of, json_option
from wirecall.config import (
    FILE,
    Problem,
    Value,
    check_config,
    load_config,
    names_module,
    variable,
    without_secrets,
)

TEMPLATE = Path(__file__).with_name("template")
FILES = ("app.py", "wirecall.toml", "test_app.py", "README.md", ".gitignore")


@click.command("new")
@click.argument("folder", metavar="NAME")
@json_option
def new_command(folder: str, out: Printer) -> None:
    """Create a project in the new folder NAME: a server, a test, a wirecall.toml.

    \b
    wirecall new shop && cd shop && wirecall dev
    """
    if not folder.strip():
        raise CliError("The name is empty.", "it is the folder of the project", "wirecall new shop")
    path = Path(os.path.normpath(folder))  # otherwise `x/..` is looked up before x exists
    name = path.resolve().name
    if not re.fullmatch(r"[A-Za-z0-9][\w .-]*", name):
        raise CliError(
            f"{name!r} is not a name for a project.",
            "use letters, digits, . _ and -",
            "wirecall new shop",
        )
    if path.exists() and not path.is_dir():
        raise CliError(f"{path} is a file.", "a project is a folder", f"wirecall new {path}-app")
    if path.is_dir() and (found := sorted(each.name for each in path.iterdir())):
        why = f"it has {', '.join(found[:3])}"
        if len(found) > 3:
            why += f" and {len(found) - 3} more"
        raise CliError(f"{path} is not empty.", why, "choose a new folder; nothing was written")
    try:
        path.mkdir(parents=True, exist_ok=True)
        for file in FILES:
            text = Template((TEMPLATE / f"{file}.txt").read_text("utf-8")).substitute(name=name)
            (path / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CliError(
            f"{path} cannot be written.", error.strerror or str(error), "choose another folder"
        ) from None
    next_step = f"cd {quote(str(path))} && wirecall dev"
    out.result(
        {"folder": str(path), "files": FILES},
        f"Created {path}: {', '.join(FILES)}\n  next: {next_step}",
    )


# --- wirecall.toml --------------------------------------------------------------------------------

_FILE = click.argument("file", required=False, metavar="[FILE]")


@click.group("config")
def config_command() -> None:
    """Check or show wirecall.toml.

    FILE is wirecall.toml in the current folder by default, or the file that WIRECALL_CONFIG names.
    Flags win over variables, and variables over the file.
    """


@config_command.command("check")
@_FILE
@json_option
def check_file(file: str | None, out: Printer) -> Exit | None:
    """List every mistake, with its line. Exit code 9 if there is one."""
    config, problems = check_config(file)
    if config.has_gateway:
        from wirecall.gateway.settings import gateway_problems  # late: few files describe one

        problems += gateway_problems(config)
    # A missing app would stop the server at its start; report it now.
    app = config.values["server.app"]
    path = Path(str(app.value).partition(":")[0])
    # A module may be installed, so only its import would show whether it is there.
    is_file = app.value is not None and not names_module(app.value)
    if is_file and not path.is_file():
        what = f"server.app: there is no file {path}"
        fix = "name the Python file with the app"
        problems.append(Problem(app.origin, what, fix, _line_of(app)))
    problems.sort(key=lambda each: each.line or 0)

    def show() -> None:
        for each in problems:
            click.echo(f"{each.where}: {each.what}")
            if each.fix:
                click.echo(f"  next: {each.fix}")
        if problems:
            out.note(count_of(len(problems), "problem"), "failed")
        else:
            values = count_of(len(config.stated()), "value")
            out.note(f"{config.path or f'no {FILE}'}: {values} stated", "ok")

    path_shown = str(config.path) if config.path else None
    found = [msgspec.to_builtins(each) for each in problems]
    out.result({"file": path_shown, "problems": found}, show)
    if problems:
        return Exit.FOUND
    return None


def _line_of(value: Value) -> int | None:
    """Return the line of the file that states a value; None if another origin does."""
    number = value.origin.rpartition(":")[2]
    if not number.isdigit():
        return None
    return int(number)


@config_command.command("show")
@_FILE
@json_option
def show_values(file: str | None, out: Printer) -> None:
    """Show every effective value, and its origin."""
    rows = []
    table = []
    config = load_config(file)
    for place, each in config.values.items():
        is_member = place.startswith("upstream.")
        if place.startswith("gateway.") and not config.has_gateway:
            continue
        value = without_secrets(each.value)
        rows.append(
            {
                "name": place,
                "value": value,
                "from": each.origin,
                "variable": None if is_member else variable(place),
            }
        )
        table.append((place, _in_words(place, value), each.origin))
    out.result(rows, lambda: out.table(["NAME", "VALUE", "FROM"], table))


def _in_words(place: str, value: Any) -> str:
    """Return a value for people."""
    if value is not None:
        return str(value)
    if place.startswith("upstream."):
        return "off"
    if place == "gateway.single_user":
        return "on loopback without [auth]"
    if place == "server.app" or place.startswith(("console.", "metrics.")):
        return "-"
    return "the app's own"
