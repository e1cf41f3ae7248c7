"""`wirecall install`: a server in an MCP client's configuration, and out of it again.

1. Only the entry of this server changes; the rest of the file stays. A file that is not JSON, that is read-only, or that
   another program has changed meanwhile, is left alone.
2. The change is shown before it is made, and a copy of the old file is kept beside it, each time under a new name.
3. `--undo` restores the entry as it was before the last install, and nothing else: later changes in the file stay.
"""

import difflib
import errno
import json
import math
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import click
from msgspec import Struct

from wirecall.cli.failures import CliError, Interrupted
from wirecall.cli.targets import Target, TargetCommand, optional_target_argument
from wirecall.cli.terminal import Printer, ask, json_option
from wirecall.config import FILE, FILE_VARIABLE
from wirecall.files import replace_file
from wirecall.protocol.messages import JsonObject

MOST = 100  # copies of old files, for one server
_PASTE = "--print, and paste it"


class ClientProgram(Struct, frozen=True):
    """An MCP client. In `home`, a leading `@` stands for the folder where applications keep their data."""

    title: str
    home: str
    project: str | None = None
    member: str = "mcpServers"
    is_typed: bool = False  # an entry has "type": "stdio" or "http"
    address: str | None = "url"
    restart: str = "restart it"

    def path(self, *, in_project: bool) -> Path:
        """Return the path of its configuration file."""
        if in_project:
            if self.project is None:
                what = f"{self.title} does not read a file of a project."
                raise CliError(what, "it reads only the file in your home folder", "drop --project")
            return Path(self.project)
        if not self.home.startswith("@"):
            return Path.home() / self.home
        if sys.platform == "win32":
            data = Path(os.environ.get("APPDATA") or Path.home() / "AppData" / "Roaming")
        elif sys.platform == "darwin":
            data = Path.home() / "Library" / "Application Support"
        else:
            data = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        return data / self.home[2:]

    def entry(self, target: Target, variables: tuple[str, ...]) -> JsonObject:
        """Return the entry for a server."""
        env: dict[str, str] = {}
        for word in variables:
            name, equals, value = word.partition("=")
            if not equals or not name:
                raise CliError(f"{word!r} is not a variable.", "expected a name, = and a value", "--env NAME=VALUE")
            env[name] = value
        if target.kind == "url":
            if self.address is None:
                next_step = "add it in its settings under Connectors, or install the file: app.py"
                raise CliError(f"{self.title} takes no addresses from its file.", "it only starts commands", next_step)
            if env:
                raise CliError("--env is for servers that the client starts.", f"{target.text} runs already", "drop --env")
            return {**({"type": "http"} if self.is_typed else {}), self.address: target.text}
        command, *args = target.command or ("",)
        if target.kind == "file":
            # All paths are absolute: a client starts the server in another folder.
            path = Path(target.text).resolve()
            command = sys.executable
            args = ["-m", "wirecall", "serve", target.of(str(path)), "--stdio"]
            if path.with_name(FILE).is_file():  # the wirecall.toml beside the app applies there too
                env = {FILE_VARIABLE: str(path.with_name(FILE)), **env}
        entry: JsonObject = {"type": "stdio"} if self.is_typed else {}
        entry |= {"command": shutil.which(command) or command, "args": args}
        return {**entry, "env": env} if env else entry


CLIENTS = {
    "claude-desktop": ClientProgram("Claude Desktop", "@/Claude/claude_desktop_config.json", address=None),
    "claude-code": ClientProgram("Claude Code", ".claude.json", ".mcp.json", is_typed=True, restart="start a new session"),
    "cursor": ClientProgram("Cursor", ".cursor/mcp.json", ".cursor/mcp.json"),
    "vscode": ClientProgram(
        "VS Code",
        "@/Code/User/mcp.json",
        ".vscode/mcp.json",
        "servers",
        is_typed=True,
        restart="run MCP: List Servers in it",
    ),
    "windsurf": ClientProgram(
        "Windsurf", ".codeium/windsurf/mcp_config.json", address="serverUrl", restart="refresh its MCP servers"
    ),
}


@click.command("install", cls=TargetCommand)
@optional_target_argument
@click.option("--client", required=True, type=click.Choice(list(CLIENTS)), help="The MCP client to configure.")
@click.option("--project", is_flag=True, help="Write the configuration of the project in this folder.")
@click.option("--name", help="Name of the server there. [default: the app's, the host's or the command's]")
@click.option("--env", "variables", multiple=True, metavar="NAME=VALUE", help="Variable for the server; may be repeated.")
@click.option("--print", "only_print", is_flag=True, help="Print the JSON, write nothing.")
@click.option("--dry-run", is_flag=True, help="Show the change, write nothing.")
@click.option("--undo", is_flag=True, help="Remove the server again, or restore the entry that it replaced.")
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
    yes: bool,
    out: Printer,
) -> None:
    """Add the server TARGET to an MCP client's configuration: a file with an app, an address, or a command.

    \b
    wirecall install shop.py --client claude-code
    wirecall install http://127.0.0.1:8420/mcp --client cursor --project
    wirecall install --client vscode --name files -- npx -y some-server
    wirecall install shop.py --client claude-code --undo
    """
    program = CLIENTS[client]

    # 1. The server and its name.
    if target is None and not (undo and name and not only_print):
        raise CliError("Which server?", "no target was given", "name a file, an address, or -- a command")
    if target is not None and target.kind == "url":
        target = Target("url", target.address("/mcp", keep_root=False))
    if target is not None and not name:
        if target.kind == "file":
            name = target.app().name  # an app that cannot be served fails here, not in the client
        elif target.kind == "url":
            name = urlsplit(target.text).hostname or "server"
        else:
            name = Path(target.command[0]).stem
        name = _plain(name)
    assert name is not None

    # 2. The new text of the file.
    # Undo needs no entry: the variables and the command line of the server may have changed since.
    entry = program.entry(target, variables) if target is not None and (only_print or not undo) else {}
    if only_print:
        document = {program.member: {name: entry}}
        out.result(document, json.dumps(document, indent=2, ensure_ascii=False))
        return
    file = _File(program.path(in_project=project), program, name)
    after = file.restored() if undo else file.with_entry(entry)

    # 3. The change, if the user agrees.
    diff = file.diff(after)
    if not out.as_json:
        click.echo(diff or f"{file.path} has this entry already.", err=True, nl=not diff)
    write = bool(diff) and not dry_run
    if write and not yes and ask(f"Write {file.path}?") is False:
        raise Interrupted("nothing was written")
    if write:
        file.write(after, keep=not undo)
    if undo and not dry_run:
        file.drop_backup()

    # 4. The report.
    backup = str(file.backup) if file.backup else None
    names = {"client": program.title, "file": str(file.path), "name": name}
    verb = ("reverted" if undo else "wrote") if write else "would change" if dry_run else "did not change"
    out.result({**names, "changed": write, "backup": backup, "diff": diff}, f"{file.path}: {verb} {name}")
    if write and not out.as_json:
        if not undo:
            out.note(f"Backup: {file.backup}")
        out.note(f"Now in {program.title}: {program.restart}.", "ok")


def _plain(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "server"


# --- the file -------------------------------------------------------------------------------------------------------


class _File:
    """A client's file, and the entry of one server in it."""

    def __init__(self, path: Path, client: ClientProgram, name: str) -> None:
        try:
            path.stat()  # a link to itself fails here; `resolve` raises for it only until Python 3.12
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise CliError(f"{path} cannot be read.", "it is a link to itself", _PASTE) from None
        self.path = path.resolve()  # a link stays, and its target is written
        self.client = client
        self.name = name
        self.text = _read(self.path)
        self._kept = max([number for number in range(1, MOST + 1) if self._backup(number).exists()], default=0)

    @property
    def backup(self) -> Path | None:
        """The last copy."""
        return self._backup(self._kept) if self._kept else None

    def _backup(self, number: int) -> Path:
        nth = f".{number}" if number > 1 else ""
        return self.path.with_name(f"{self.path.name}.before-{_plain(self.name)}{nth}.bak")

    def with_entry(self, entry: JsonObject) -> str:
        """Return the text with the server in it."""
        try:
            tree = self._tree(self.text, self.path)
        except CliError as failure:
            lines = f"{json.dumps(self.name)}: {json.dumps(entry, indent=2, ensure_ascii=False)}"
            failure.next = f"{failure.next}, or add this by hand, to the object {self.client.member!r}:\n{lines}"
            failure.facts["entry"] = {self.client.member: {self.name: entry}}
            raise
        if tree.get(self.client.member, {}).get(self.name) == entry:
            return self.text
        tree.setdefault(self.client.member, {})[self.name] = entry
        return self._written(tree)

    def restored(self) -> str:
        """Return the text with the entry as it was before, or without it if it was not there."""
        last = self.backup
        if last is None:
            why = f"there is no {self._backup(1).name} in {self.path.parent}"
            raise CliError(f"There is nothing to undo for {self.name}.", why, "was it installed under another --name?")
        before = self._tree(_read(last), last).get(self.client.member, {})
        tree = self._tree(self.text, self.path)
        servers = tree.setdefault(self.client.member, {})
        if self.name in before:
            servers[self.name] = before[self.name]
        elif self.name in servers:
            del servers[self.name]
        else:
            return self.text
        return self._written(tree)

    def write(self, text: str, *, keep: bool) -> None:
        """Replace the file in one step, with its permissions. `keep`: keep a copy of the old one."""
        try:
            # A rename would replace a read-only file too, so permission is checked here. A client may have written the
            # file while the user was asked, so the text is compared again.
            if self.path.exists() and not (self.path.stat().st_mode & 0o222 and os.access(self.path, os.W_OK)):
                raise CliError(f"{self.path} cannot be written.", "it is read-only", _PASTE)
            if _read(self.path) != self.text:
                why = "another program wrote it while this command ran"
                raise CliError(f"{self.path} has just been changed.", why, "repeat the command")
            if keep and self._kept == MOST:
                what = f"There are {MOST} files such as {self.backup} already."
                raise CliError(what, "each install keeps one more", "remove those that you do not need")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if keep:
                replace_file(self._backup(self._kept + 1), (self.text or "{}\n").encode(), like=self.path)
                self._kept += 1
            replace_file(self.path, text.encode(), like=self.path)
        except OSError as error:
            raise CliError(f"{self.path} cannot be written.", error.strerror or str(error), _PASTE) from None

    def drop_backup(self) -> None:
        """Delete the copy that was restored."""
        self._backup(self._kept).unlink(missing_ok=True)
        self._kept = 0

    def diff(self, after: str) -> str:
        lines = self.text.splitlines(keepends=True), after.splitlines(keepends=True)
        names = str(self.path), f"{self.path} (new)"
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in difflib.unified_diff(*lines, *names))

    def _tree(self, text: str, path: Path) -> JsonObject:
        """Parse the file. Everything that writing it again would lose is an error."""

        def unique(pairs: list[tuple[str, Any]]) -> JsonObject:
            names = [name for name, _ in pairs]
            if doubled := next((name for name in names if names.count(name) > 1), None):
                raise ValueError(f"{doubled!r} is in one object twice")
            return dict(pairs)

        def number(digits: str) -> float:
            if math.isinf(value := float(digits)):
                raise ValueError(f"it has the number {digits}, which would be lost")
            return value

        def constant(word: str) -> NoReturn:
            raise ValueError(f"it has {word}, which is not JSON")

        hooks: Any = {"object_pairs_hook": unique, "parse_float": number, "parse_constant": constant}
        try:
            tree = json.loads(text, **hooks) if text.strip() else {}
        except json.JSONDecodeError as error:
            place = f"line {error.lineno}, column {error.colno}: {error.msg}"
            if text[error.pos :].lstrip().startswith(("//", "/*", "#")):
                place = f"line {error.lineno} has a comment: JSON has no comments, and wirecall would drop it"
            raise CliError(f"{path} is not JSON.", place, "correct it", type="not_json") from None
        except (ValueError, RecursionError) as error:
            why = str(error) if isinstance(error, ValueError) else "it is nested too deeply"
            raise CliError(f"{path} cannot be rewritten safely.", why, "correct it", type="not_json") from None
        servers = tree.get(self.client.member, {}) if isinstance(tree, dict) else None
        if not isinstance(servers, dict):
            expected = "an object" if not isinstance(tree, dict) else f"an object under {self.client.member!r}"
            what = f"{path} does not look like a file of {self.client.title}."
            raise CliError(what, f"expected {expected}", "is it the right file? Then correct it")
        return tree

    def _written(self, tree: JsonObject) -> str:
        """Return the file as text, with its own indentation and line ends."""
        match = re.search(r"^([ \t]+)\S", self.text, re.MULTILINE)
        indent = match[1] if match else 2
        text = json.dumps(tree, indent=indent, ensure_ascii=False) + "\n"
        try:
            text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair can only be written as an escape
            text = json.dumps(tree, indent=indent) + "\n"
        return text.replace("\n", "\r\n") if "\r\n" in self.text else text


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")  # bytes, so that the line ends stay
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError:
        raise CliError(f"{path} is not JSON.", "it is not UTF-8", "save it as UTF-8", type="not_json") from None
    except OSError as error:
        raise CliError(f"{path} cannot be read.", error.strerror or str(error), _PASTE) from None
