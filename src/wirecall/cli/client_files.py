"""The MCP clients, their files, and the entries of servers in them."""

import difflib
import errno
import json
import math
import os
import re
import shutil
import sys
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from msgspec import Struct

from wirecall.cli.failures import CliError
from wirecall.cli.targets import Target
from wirecall.config import FILE, FILE_VARIABLE
from wirecall.files import replace_file
from wirecall.protocol.messages import JsonObject

# Copies of old files, for one server.
MOST = 100
_PASTE = "--print, and paste it"


class ClientProgram(Struct, frozen=True):
    """An MCP client.

    In `home`, a leading `@` means the folder where applications keep their data.
    """

    title: str
    home: str
    project: str | None = None
    member: str = "mcpServers"
    # An entry has "type": "stdio" or "http".
    is_typed: bool = False
    # The member for the address of a server; None if the client only starts commands.
    address: str | None = "url"
    # What the user does after a change.
    restart: str = "restart it"
    # It reads comments in its file.
    has_comments: bool = False

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
        env = _env(variables)
        entry: JsonObject = {}
        if target.kind == "url":
            self._check_address(target, env)
            if self.is_typed:
                entry["type"] = "http"
            return {**entry, str(self.address): target.text}
        command, *args = target.command or ("",)
        if target.kind == "file":
            # All paths are absolute: a client starts the server in another folder.
            path = Path(target.text).resolve()
            words = target.words(str(path))
            if target.is_module:
                # Python finds the module there as it does here.
                path = Path.cwd() / target.text
                words = target.words()
                env = {"PYTHONPATH": str(Path.cwd()), **env}
            command = sys.executable
            args = ["-m", "wirecall", "serve", *words, "--stdio"]
            if path.with_name(FILE).is_file():  # the wirecall.toml beside the app applies there too
                env = {FILE_VARIABLE: str(path.with_name(FILE)), **env}
        if self.is_typed:
            entry["type"] = "stdio"
        entry |= {"command": shutil.which(command) or command, "args": args}
        if env:
            entry["env"] = env
        return entry

    def _check_address(self, target: Target, env: dict[str, str]) -> None:
        """Refuse an address that the client does not take, or one with variables."""
        if self.address is None:
            next_step = "add it in its settings under Connectors, or install the file: app.py"
            raise CliError(
                f"{self.title} takes no addresses from its file.",
                "it only starts commands",
                next_step,
            )
        if env:
            raise CliError(
                "--env is for servers that the client starts.",
                f"{target.text} runs already",
                "drop --env",
            )


def _env(variables: tuple[str, ...]) -> dict[str, str]:
    """Return the variables of `--env`."""
    env: dict[str, str] = {}
    for word in variables:
        name, equals, value = word.partition("=")
        if not equals or not name:
            why = "expected a name, = and a value"
            raise CliError(f"{word!r} is not a variable.", why, "--env NAME=VALUE")
        env[name] = value
    return env


CLIENTS = {
    "claude-desktop": ClientProgram(
        "Claude Desktop", "@/Claude/claude_desktop_config.json", address=None
    ),
    "claude-code": ClientProgram(
        "Claude Code", ".claude.json", ".mcp.json", is_typed=True, restart="start a new session"
    ),
    "cursor": ClientProgram("Cursor", ".cursor/mcp.json", ".cursor/mcp.json"),
    "vscode": ClientProgram(
        "VS Code",
        "@/Code/User/mcp.json",
        ".vscode/mcp.json",
        "servers",
        is_typed=True,
        restart="run MCP: List Servers in it",
        has_comments=True,
    ),
    "windsurf": ClientProgram(
        "Windsurf",
        ".codeium/windsurf/mcp_config.json",
        address="serverUrl",
        restart="refresh its MCP servers",
    ),
}


# --- the file -------------------------------------------------------------------------------------


class EntryFile:
    """A client's file, and the entry of one server in it."""

    def __init__(
        self, path: Path, client: ClientProgram, name: str, label: str | None = None
    ) -> None:
        try:
            # A link to itself fails here; `resolve` raises for it only until Python 3.12.
            path.stat()
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise CliError(
                    f"{path} cannot be read.", "it is a link to itself", _PASTE
                ) from None
        # A link stays, and its target changes.
        self.path = path.resolve()
        self.client = client
        self.name = name
        # A part of the names of the copies.
        self._label = label or plain(name)
        self.text = _read(self.path)
        # The number of the last copy; 0 if there is none.
        self._kept = max(
            [number for number in range(1, MOST + 1) if self._backup(number).exists()], default=0
        )

    def backups(self) -> Iterator[tuple[Path, str]]:
        """Yield the copies and their content, the newest first."""
        for number in range(self._kept, 0, -1):
            path = self._backup(number)
            if path.exists():
                yield path, _read(path)

    @property
    def backup(self) -> Path | None:
        """The last copy."""
        if not self._kept:
            return None
        return self._backup(self._kept)

    def _backup(self, number: int) -> Path:
        nth = ""
        if number > 1:
            nth = f".{number}"
        return self.path.with_name(f"{self.path.name}.before-{self._label}{nth}.bak")

    def with_entry(self, entry: JsonObject) -> str:
        """Return the content with the server in it."""
        try:
            tree = self._tree(self.text, self.path)
        except CliError as failure:
            lines = f"{json.dumps(self.name)}: {json.dumps(entry, indent=2, ensure_ascii=False)}"
            failure.next += f", or add this by hand, to the object {self.client.member!r}:\n{lines}"
            failure.facts["entry"] = {self.client.member: {self.name: entry}}
            raise
        if tree.get(self.client.member, {}).get(self.name) == entry:
            return self.text
        tree.setdefault(self.client.member, {})[self.name] = entry
        return self._written(tree)

    def restored(self) -> str:
        """Return the content with the entry as it was before, or without it if there was none."""
        last = self.backup
        if last is None:
            why = f"there is no {self._backup(1).name} in {self.path.parent}"
            raise CliError(
                f"There is nothing to undo for {self.name}.",
                why,
                "was it installed under another --name?",
            )
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
        """Replace the file in one step, with its permissions.

        `keep`: keep a copy of the old one.
        """
        try:
            # A rename would replace a read-only file too, so permission is checked here. A client
            # may have written the file while the user was asked, so the content is compared again.
            if self.path.exists() and not (
                self.path.stat().st_mode & 0o222 and os.access(self.path, os.W_OK)
            ):
                raise CliError(f"{self.path} cannot be written.", "it is read-only", _PASTE)
            if _read(self.path) != self.text:
                why = "another program wrote it while this command ran"
                raise CliError(f"{self.path} has just been changed.", why, "repeat the command")
            if keep and self._kept == MOST:
                what = f"There are {MOST} files such as {self.backup} already."
                raise CliError(
                    what, "each install keeps one more", "remove those that you do not need"
                )
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if keep:
                replace_file(
                    self._backup(self._kept + 1), (self.text or "{}\n").encode(), like=self.path
                )
                self._kept += 1
            mark = _mark(self.path)
            replace_file(self.path, mark + text.encode(), like=self.path)
        except OSError as error:
            raise CliError(
                f"{self.path} cannot be written.", error.strerror or str(error), _PASTE
            ) from None

    def drop_backup(self) -> None:
        """Delete the copy that was restored."""
        self._backup(self._kept).unlink(missing_ok=True)
        self._kept = 0

    def diff(self, after: str) -> str:
        lines = difflib.unified_diff(
            self.text.splitlines(keepends=True),
            after.splitlines(keepends=True),
            str(self.path),
            f"{self.path} (new)",
        )
        return "".join(line.removesuffix("\n") + "\n" for line in lines)

    def _tree(self, text: str, path: Path) -> JsonObject:
        """Parse the file. Content that writing it again would lose is an error."""

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

        hooks: Any = {
            "object_pairs_hook": unique,
            "parse_float": number,
            "parse_constant": constant,
        }
        try:
            tree = json.loads(text, **hooks) if text.strip() else {}
        except json.JSONDecodeError as error:
            place = f"line {error.lineno}, column {error.colno}: {error.msg}"
            if text[error.pos :].lstrip().startswith(("//", "/*", "#")):
                place = (
                    f"line {error.lineno} has a comment: "
                    "JSON has no comments, and wirecall would drop it"
                )
            raise CliError(f"{path} is not JSON.", place, "correct it", type="not_json") from None
        except (ValueError, RecursionError) as error:
            why = "it is nested too deeply"
            if isinstance(error, ValueError):
                why = str(error)
            raise CliError(
                f"{path} cannot be rewritten safely.", why, "correct it", type="not_json"
            ) from None
        expected = ""
        if not isinstance(tree, dict):
            expected = "an object"
        elif not isinstance(tree.get(self.client.member, {}), dict):
            expected = f"an object under {self.client.member!r}"
        if expected:
            what = f"{path} does not look like a file of {self.client.title}."
            raise CliError(what, f"expected {expected}", "is it the right file? Then correct it")
        found: JsonObject = tree
        return found

    def _written(self, tree: JsonObject) -> str:
        """Return the file as text, with its own indentation and line ends."""
        match = re.search(r"^([ \t]+)\S", self.text, re.MULTILINE)
        indent = match[1] if match else 2
        text = json.dumps(tree, indent=indent, ensure_ascii=False) + "\n"
        try:
            text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair can only be written as an escape
            text = json.dumps(tree, indent=indent) + "\n"
        if "\r\n" in self.text:
            return text.replace("\n", "\r\n")
        return text


def _mark(path: Path) -> bytes:
    """Return the byte order mark of a file, if it begins with one."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        if file.read(len(BOM_UTF8)) == BOM_UTF8:
            return BOM_UTF8
    return b""


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")  # bytes, so that the line ends stay
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError:
        raise CliError(
            f"{path} is not JSON.", "it is not UTF-8", "save it as UTF-8", type="not_json"
        ) from None
    except OSError as error:
        raise CliError(f"{path} cannot be read.", error.strerror or str(error), _PASTE) from None


def plain(name: str) -> str:
    """Return a name with the characters that every client takes."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "server"
