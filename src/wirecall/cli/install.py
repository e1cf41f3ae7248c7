"""`wirecall install`: a server in an MCP client's configuration, and out of it again.

1. Only the entry of this server changes; whatever else the file says stays. A file that is not JSON, that may not be
   written, or that somebody else has changed meanwhile, is left alone.
2. The change is shown before it is made, and the file as it was is kept beside it, each time under a name of its own.
3. `--undo` puts back what that entry was before the last time, and nothing else: what changed in the file since then stays.
"""

import difflib
import errno
import json
import math
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import click
from msgspec import Struct

from wirecall.cli.connecting import Interrupted
from wirecall.cli.failures import Failure
from wirecall.cli.output import Output, ask, json_option
from wirecall.cli.targets import Target, TargetCommand, target_argument
from wirecall.config import FILE, FILE_VARIABLE


class McpClient(Struct, frozen=True):
    """One client. In `home`, a leading `@` stands for the folder of applications' data."""

    title: str
    home: str
    project: str | None = None
    member: str = "mcpServers"
    is_typed: bool = False  # an entry says "type": "stdio" or "http"
    address: str | None = "url"
    restart: str = "restart it"

    def path(self, *, in_project: bool) -> Path:
        if not in_project:
            return _data() / self.home[2:] if self.home.startswith("@") else Path.home() / self.home
        if self.project is None:
            raise Failure(f"{self.title} has no file of a project.", "it knows only its own", "drop --project")
        return Path(self.project)

    def entry(self, target: Target, env: dict[str, str]) -> dict[str, Any]:
        """What the client is told about a server."""
        if target.kind == "url":
            return self._remote(target.text, env)
        command, *args = target.command if target.kind == "command" else _serving(target)
        told: dict[str, Any] = {"type": "stdio"} if self.is_typed else {}
        told |= {"command": shutil.which(command) or command, "args": args}
        env = _configured(target) | env
        return {**told, "env": env} if env else told

    def _remote(self, url: str, env: dict[str, str]) -> dict[str, Any]:
        if self.address is None:
            next = "add it in its settings under Connectors, or install the file: app.py"
            raise Failure(f"{self.title} takes no addresses from its file.", "it starts commands only", next)
        if env:
            raise Failure("--env is for servers that the client starts.", f"{url} runs already", "drop --env")
        return {**({"type": "http"} if self.is_typed else {}), self.address: url}


CLIENTS = {
    "claude-desktop": McpClient("Claude Desktop", "@/Claude/claude_desktop_config.json", address=None),
    "claude-code": McpClient("Claude Code", ".claude.json", ".mcp.json", is_typed=True, restart="start a new session"),
    "cursor": McpClient("Cursor", ".cursor/mcp.json", ".cursor/mcp.json"),
    "vscode": McpClient(
        "VS Code",
        "@/Code/User/mcp.json",
        ".vscode/mcp.json",
        "servers",
        is_typed=True,
        restart="run MCP: List Servers in it",
    ),
    "windsurf": McpClient(
        "Windsurf", ".codeium/windsurf/mcp_config.json", address="serverUrl", restart="refresh its MCP servers"
    ),
}


def _data() -> Path:
    """Where applications keep their data."""
    if sys.platform == "win32":
        return Path(os.environ.get("APPDATA") or Path.home() / "AppData" / "Roaming")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support"
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")


def _configured(target: Target) -> dict[str, str]:
    """The wirecall.toml beside a file is in force also where the client starts it."""
    file = Path(target.text).resolve().with_name(FILE)
    return {FILE_VARIABLE: str(file)} if target.kind == "file" and file.is_file() else {}


def _serving(target: Target) -> list[str]:
    """The command line that serves a file. All paths are whole: a client starts it in a folder of its own."""
    path = str(Path(target.text).resolve())
    return [sys.executable, "-m", "wirecall", "serve", f"{path}:{target.name}" if target.name else path, "--stdio"]


_GONE = object()
MOST = 100  # files as they were, of one server


@click.command("install", cls=TargetCommand)
@target_argument(required=False)
@click.option("--client", required=True, type=click.Choice(list(CLIENTS)), help="Whose configuration.")
@click.option("--project", is_flag=True, help="Write the file of the project in this folder, not your own.")
@click.option("--name", help="Name of the server there. [default: the app's, the host's or the command's]")
@click.option("--env", "variables", multiple=True, metavar="NAME=VALUE", help="Variable for the server; may be repeated.")
@click.option("--print", "only_print", is_flag=True, help="Print the JSON, write nothing.")
@click.option("--dry-run", is_flag=True, help="Show the change, write nothing.")
@click.option("--undo", is_flag=True, help="Take the server out again, or put back what it replaced.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def command(
    target: Target | None,
    client: str,
    project: bool,
    name: str | None,
    variables: tuple[str, ...],
    only_print: bool,
    dry_run: bool,
    undo: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Write the server TARGET into an MCP client's configuration: a file with an app, an address, or a command.

    \b
    wirecall install shop.py --client claude-code
    wirecall install http://127.0.0.1:8420/mcp --client cursor --project
    wirecall install --client vscode --name files -- npx -y some-server
    wirecall install shop.py --client claude-code --undo
    """
    out, whose = Output(as_json), CLIENTS[client]
    if target is None and not (undo and name):
        raise Failure("Which server?", "no target was given", "name a file, an address, or -- a command")
    target = _with_path(target)
    name = name or _name_of(target)
    if only_print:
        document = {whose.member: {name: whose.entry(_known(target), _env(variables))}}
        out.result(document, json.dumps(document, indent=2, ensure_ascii=False))
        return
    file = _File(whose.path(in_project=project), whose, name)
    after = file.restored() if undo else file.with_entry(whose.entry(_known(target), _env(variables)))
    _change(out, file, after, dry_run=dry_run, yes=yes, undo=undo)


def _change(out: Output, file: "_File", after: str, *, dry_run: bool, yes: bool, undo: bool) -> None:
    changed = after != file.text
    if not out.as_json:
        click.echo(file.diff(after) if changed else f"{file.path} says so already.", err=True, nl=not changed)
    write = changed and not dry_run
    if write and not yes and ask(f"Write {file.path}?") is False:
        raise Interrupted("nothing was written")
    if write:
        file.write(after, keep=not undo)
    if undo and not dry_run:
        file.drop_backup()
    told = {
        "client": file.client.title,
        "file": str(file.path),
        "name": file.name,
        "changed": write,
        "backup": str(file.backup) if file.backup else None,
        "diff": file.diff(after),
    }
    out.result(told, f"{file.path}: {_verb(write, undo, dry_run)} {file.name}")
    if write and not undo and not out.as_json:
        out.note(f"As it was: {file.backup}")
    if write and not out.as_json:
        out.note(f"Now in {file.client.title}: {file.client.restart}.", "ok")


def _verb(write: bool, undo: bool, dry_run: bool) -> str:
    if not write:
        return "would change" if dry_run else "unchanged,"
    return "took back" if undo else "wrote"


# --- the target -----------------------------------------------------------------------------------------------------


def _with_path(target: Target | None) -> Target | None:
    """The address of a wirecall server without a path is that of its MCP endpoint."""
    if target is None or target.kind != "url" or "/" in target.text.partition("://")[2].rstrip("/"):
        return target
    return Target("url", f"{target.text.rstrip('/')}/mcp")


def _known(target: Target | None) -> Target:
    if target is None:
        raise Failure("Which server?", "no target was given", "name a file, an address, or -- a command")
    return target


def _name_of(target: Target | None) -> str:
    target = _known(target)
    if target.kind == "file":
        name = target.app().name  # and so a file that cannot be served is told now, not by the client
    elif target.kind == "url":
        from urllib.parse import urlsplit

        name = urlsplit(target.text).hostname or "server"
    else:
        name = Path(target.command[0]).stem
    return _plain(name)


def _plain(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "server"


def _env(words: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise Failure(f"{word!r} is not a variable.", "there is no name and =", "--env NAME=VALUE")
        found[name] = value
    return found


# --- the file -------------------------------------------------------------------------------------------------------


class _File:
    """A client's file, and the place of one server in it."""

    def __init__(self, path: Path, client: McpClient, name: str) -> None:
        self.path = _resolved(path)
        self.client = client
        self.name = name
        self.text = _read(self.path)
        self._kept = max([number for number in range(1, MOST + 1) if self._backup(number).exists()], default=0)

    @property
    def backup(self) -> Path | None:
        """The last one."""
        return self._backup(self._kept) if self._kept else None

    def _backup(self, number: int) -> Path:
        nth = f".{number}" if number > 1 else ""
        return self.path.with_name(f"{self.path.name}.before-{_plain(self.name)}{nth}.bak")

    def with_entry(self, entry: dict[str, Any]) -> str:
        """The text with the server in it."""
        try:
            tree = self._tree(self.text, self.path)
        except Failure as failure:
            lines = f"{json.dumps(self.name)}: {json.dumps(entry, indent=2, ensure_ascii=False)}"
            failure.next = f"{failure.next}, or add this by hand, to the object {self.client.member!r}:\n{lines}"
            failure.facts["entry"] = {self.client.member: {self.name: entry}}
            raise
        if tree.get(self.client.member, {}).get(self.name) == entry:
            return self.text
        tree.setdefault(self.client.member, {})[self.name] = entry
        return self._written(tree)

    def restored(self) -> str:
        """The text with what the server's entry was before, if it was there."""
        last = self.backup
        if last is None:
            why = f"there is no {self._backup(1).name} in {self.path.parent}"
            raise Failure(f"There is nothing to undo for {self.name}.", why, "was it installed under another --name?")
        before = self._tree(_read(last), last).get(self.client.member, {}).get(self.name, _GONE)
        tree = self._tree(self.text, self.path)
        servers = tree.setdefault(self.client.member, {})
        if before is not _GONE:
            servers[self.name] = before
        elif self.name in servers:
            del servers[self.name]
        else:
            return self.text
        return self._written(tree)

    def write(self, text: str, *, keep: bool) -> None:
        """Replace the file in one step, with the rights it had. `keep`: the one before is kept beside it."""
        try:
            self._check()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if keep:
                _put(self._backup(self._kept + 1), self.text or "{}\n", like=self.path)
                self._kept += 1
            _put(self.path, text, like=self.path)
        except OSError as error:
            raise Failure(f"{self.path} cannot be written.", error.strerror or str(error), "--print, and paste it") from None

    def _check(self) -> None:
        """That it may be written: replacing a file asks nobody. And that it is still the one that was read: clients write
        their files themselves, and a person may have taken their time to say yes."""
        if self.path.exists() and not (self.path.stat().st_mode & 0o222 and os.access(self.path, os.W_OK)):
            raise Failure(f"{self.path} cannot be written.", "it is read-only", "--print, and paste it")
        if _read(self.path) != self.text:
            raise Failure(f"{self.path} has just been changed.", "by somebody else, while this ran", "repeat the command")
        if self._kept == MOST:
            what = f"There are {MOST} files such as {self.backup} already."
            raise Failure(what, "one more is kept each time", "remove those that you do not need")

    def drop_backup(self) -> None:
        """Of what has been undone."""
        self._backup(self._kept).unlink(missing_ok=True)
        self._kept = 0

    def diff(self, after: str) -> str:
        lines = self.text.splitlines(keepends=True), after.splitlines(keepends=True)
        names = str(self.path), f"{self.path} (new)"
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in difflib.unified_diff(*lines, *names))

    def _tree(self, text: str, path: Path) -> dict[str, Any]:
        try:
            tree = json.loads(text, object_pairs_hook=_unique, **_FAITHFUL) if text.strip() else {}
        except json.JSONDecodeError as error:
            place = f"line {error.lineno}, column {error.colno}: {error.msg}"
            if text[error.pos :].lstrip().startswith(("//", "/*", "#")):
                place = f"line {error.lineno} has a comment: JSON has none, and what wirecall writes would be without it"
            raise Failure(f"{path} is not JSON.", place, "correct it", type="not_json") from None
        except (ValueError, RecursionError) as error:
            why = str(error) if isinstance(error, ValueError) else "it is nested too deeply"
            raise Failure(f"{path} is not clear.", why, "correct it", type="not_json") from None
        servers = tree.get(self.client.member, {}) if isinstance(tree, dict) else None
        if not isinstance(servers, dict):
            what = "an object" if not isinstance(tree, dict) else f"an object under {self.client.member!r}"
            next = "is it the right file? Then correct it"
            raise Failure(f"{path} does not look like a file of {self.client.title}'s.", f"it does not hold {what}", next)
        return tree

    def _written(self, tree: dict[str, Any]) -> str:
        indent = re.search(r"^([ \t]+)\S", self.text, re.MULTILINE)
        text = json.dumps(tree, indent=indent[1] if indent else 2, ensure_ascii=False) + "\n"
        if not _is_unicode(text):
            text = json.dumps(tree, indent=indent[1] if indent else 2) + "\n"
        return text.replace("\n", "\r\n") if "\r\n" in self.text else text


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")  # as it is, with the ends of its lines
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError:
        raise Failure(f"{path} is not JSON.", "it is not UTF-8", "save it as UTF-8", type="not_json") from None
    except OSError as error:
        raise Failure(f"{path} cannot be read.", error.strerror or str(error), "--print, and paste it") from None


def _resolved(path: Path) -> Path:
    """Who keeps the file elsewhere, behind a link, keeps it there."""
    try:
        path.stat()  # to resolve a link to itself is an error until Python 3.12, and none since
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Failure(f"{path} cannot be read.", "it is a link to itself", "--print, and paste it") from None
    return path.resolve()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A member that stands twice would be lost by writing the file."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} stands in it twice in one object")
    return dict(pairs)


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"it has the number {text}, which would be lost")
    return value


def _constant(text: str) -> NoReturn:
    raise ValueError(f"it has {text}, which is not JSON")


_FAITHFUL: dict[str, Any] = {"parse_float": _number, "parse_constant": _constant}


def _is_unicode(text: str) -> bool:
    """Whether it can be written: halves of a pair of surrogates can be, only as escapes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _put(path: Path, text: str, *, like: Path) -> None:
    handle, made = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(handle)
        if like.exists():
            shutil.copymode(like, made)
        os.replace(made, path)
    except BaseException:
        Path(made).unlink(missing_ok=True)
        raise
