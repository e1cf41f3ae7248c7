"""`wirecall install`: add a server to an MCP client's configuration, and remove it again.

1. Only the entry of this server changes; the rest of the file stays. A file that is not JSON, that
   is read-only, or that another program has changed since it was read, stays unchanged.
2. The change is shown before it is made, and a copy of the old file is kept beside it, each time
   under a new name.
3. `--undo` restores the entry as it was before the last install, and nothing else: later changes in
   the file stay.
"""

import json
from pathlib import Path
from urllib.parse import urlsplit

import click

from wirecall.cli.client_files import CLIENTS, EntryFile, plain
from wirecall.cli.failures import CliError, Interrupted, not_named
from wirecall.cli.targets import Target, TargetCommand, configured, optional_target_argument
from wirecall.cli.terminal import Printer, ask, json_option
from wirecall.cli.wrapping import Wrapping
from wirecall.config import load_config
from wirecall.protocol.messages import JsonObject


@click.command("install", cls=TargetCommand)
@optional_target_argument
@click.option(
    "--client", required=True, type=click.Choice(list(CLIENTS)), help="The MCP client to configure."
)
@click.option(
    "--project", is_flag=True, help="Write the configuration of the project in this folder."
)
@click.option(
    "--name", help="Name of the server there. [default: the app's, the host's or the command's]"
)
@click.option(
    "--env",
    "variables",
    multiple=True,
    metavar="NAME=VALUE",
    help="Variable for the server; may be repeated.",
)
@click.option("--print", "only_print", is_flag=True, help="Print the JSON, write nothing.")
@click.option("--dry-run", is_flag=True, help="Show the change, write nothing.")
@click.option(
    "--undo", is_flag=True, help="Remove the server again, or restore the entry that it replaced."
)
@click.option(
    "--wrap",
    "wraps",
    multiple=True,
    metavar="NAME",
    help="Put `wirecall wrap` before the command of the entry NAME; may be repeated.",
)
@click.option("--wrap-all", is_flag=True, help="The same for every entry of the file.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def install_command(
    target: Target | None,
    client: str,
    project: bool,
    name: str | None,
    variables: tuple[str, ...],
    only_print: bool,
    dry_run: bool,
    undo: bool,
    wraps: tuple[str, ...],
    wrap_all: bool,
    yes: bool,
    out: Printer,
) -> None:
    """Add the server TARGET to an MCP client's configuration.

    TARGET is a file with an app, an address, or a command.

    \b
    wirecall install shop.py --client claude-code
    wirecall install http://127.0.0.1:8420/mcp --client cursor --project
    wirecall install --client vscode --name files -- npx -y some-server
    wirecall install shop.py --client claude-code --undo
    wirecall install --client cursor --wrap github
    wirecall install --client cursor --wrap-all --undo
    """
    program = CLIENTS[client]
    if wraps or wrap_all:
        has_new = target is not None or bool(name or variables) or only_print
        _check_wraps(wraps, wrap_all=wrap_all, has_new=has_new)
        wrapping = Wrapping(program, program.path(in_project=project), wraps, undo=undo)
        wrapping.run(out, dry_run=dry_run, yes=yes)
        return

    # 1. The server, its name and its entry.
    # Undo needs no entry: the variables and the command line of the server may have changed since.
    is_removal = undo and not only_print
    entry: JsonObject = {}
    if target is None and not (is_removal and name):
        target = configured(load_config())
    if target is not None:
        target.check_no_link("install")
        if target.kind == "url":
            target = Target("url", target.address("/mcp", keep_root=False))
        name = name or plain(_name_of(target))
        if not is_removal:
            entry = program.entry(target, variables)
    elif not name or not is_removal:
        fix = "name a file, an address, or -- a command"
        if undo:
            fix = "name the server; for one that was wrapped: --wrap NAME --undo, or --wrap-all --undo"
        raise not_named("Which server?", fix)

    # 2. The change.
    if only_print:
        printed = {program.member: {name: entry}}
        out.result(printed, json.dumps(printed, indent=2, ensure_ascii=False))
        return
    file = EntryFile(program.path(in_project=project), program, name)
    _change(file, entry, out, undo=undo, dry_run=dry_run, yes=yes)


def _change(
    file: EntryFile, entry: JsonObject, out: Printer, *, undo: bool, dry_run: bool, yes: bool
) -> None:
    """Show the change, make it if the user agrees, and report it."""
    after = file.restored() if undo else file.with_entry(entry)
    diff = file.diff(after)
    if not out.as_json:
        click.echo(diff or f"{file.path} has this entry already.", err=True, nl=not diff)
    write = bool(diff) and not dry_run
    if write:
        _write(file, after, undo=undo, yes=yes)
    if undo and not dry_run:
        file.drop_backup()
    done = _done(wrote=write, undo=undo, dry_run=dry_run)
    out.result(_document(file, wrote=write, diff=diff), f"{file.path}: {done} {file.name}")
    if write and not out.as_json:
        if not undo:
            out.note(f"Backup: {file.backup}")
        out.note(f"Now in {file.client.title}: {file.client.restart}.", "ok")


def _check_wraps(wraps: tuple[str, ...], *, wrap_all: bool, has_new: bool) -> None:
    """Refuse options that contradict `--wrap`."""
    if has_new:
        raise CliError(
            "--wrap changes entries that are there.",
            "a target, --name, --env and --print are for a new entry",
            "wirecall install --client cursor --wrap github",
        )
    if wraps and wrap_all:
        raise CliError("--wrap-all has all names.", "--wrap names some", "drop one of them")


def _write(file: EntryFile, text: str, *, undo: bool, yes: bool) -> None:
    """Write the file, unless the user says no. An install keeps a copy of the old one."""
    if not yes and ask(f"Write {file.path}?") is False:
        raise Interrupted("nothing was written")
    file.write(text, keep=not undo)


def _document(file: EntryFile, *, wrote: bool, diff: str) -> JsonObject:
    """Return the report for programs."""
    return {
        "client": file.client.title,
        "file": str(file.path),
        "name": file.name,
        "changed": wrote,
        "backup": str(file.backup) if file.backup else None,
        "diff": diff,
    }


def _name_of(target: Target) -> str:
    """Return the name of a server. Clients put it before the names of its tools."""
    if target.kind == "file":
        return target.app().name  # an app that cannot be served fails here, not in the client
    if target.kind == "url":
        parts = urlsplit(target.text)
        _, gateway, server = parts.path.rstrip("/").rpartition("/mcp/")
        if gateway and "/" not in server:
            return server  # of a gateway, under its old name
        return (parts.hostname or "server").replace(".", "-")
    return Path(target.command[0]).stem


def _done(*, wrote: bool, undo: bool, dry_run: bool) -> str:
    """Return what the command has done to the file, in words."""
    if wrote:
        return "reverted" if undo else "wrote"
    if dry_run:
        return "would change"
    return "did not change"
