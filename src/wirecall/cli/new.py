"""`wirecall new`: a small project that runs: a query, a command, and a test that loses an answer.

Its files are in the folder `project` beside this one, with `$name` for its name. They end in .txt, so that no tool takes
them for ours.
"""

import os
import re
from pathlib import Path
from shlex import quote
from string import Template

import click

from wirecall.cli.failures import CliError
from wirecall.cli.output import Printer, json_option

PROJECT = Path(__file__).with_name("project")
FILES = ("app.py", "wirecall.toml", "test_app.py", "README.md", ".gitignore")


@click.command("new")
@click.argument("folder", metavar="NAME")
@json_option
def command(folder: str, out: Printer) -> None:
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
            text = Template((PROJECT / f"{file}.txt").read_text("utf-8")).substitute(name=name)
            (path / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CliError(f"{path} cannot be written.", error.strerror or str(error), "choose another folder") from None
    next_step = f"cd {quote(str(path))} && wirecall dev"
    out.result({"folder": str(path), "files": FILES}, f"Made {path}: {', '.join(FILES)}\n  next: {next_step}")
