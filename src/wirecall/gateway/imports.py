"""Clients' files as upstreams: each entry becomes a section of `wirecall.toml`.

1. A file is only read. One that this module does not understand is named, with the reason.
2. Entries are read as clients write them: `mcpServers`, `servers`, `context_servers`, `mcp`, and
   `mcp_servers` in TOML; `url`, `serverUrl`, `httpUrl`. `npx mcp-remote URL` becomes the address,
   and `wirecall wrap` is taken off.
3. A value that may be a secret goes to the file of secrets, and its place gets a reference. In
   doubt a value is a secret. Reports name values and do not show them.
4. An entry that would not work here is left out, with the reason.
"""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from msgspec import Struct, field

from wirecall.config import is_reference
from wirecall.errors import UsageError
from wirecall.gateway.guesses import is_secret_address, is_secret_word, looks_secret
from wirecall.gateway.jsonc import NotJson, parse
from wirecall.gateway.references import key_of, quoted
from wirecall.gateway.settings import UpstreamSettings
from wirecall.gateway.wraps import PlainServer, plain_name, unwrapped

# Members that hold the entries, and whether clients with this member read comments.
MEMBERS = {"mcpServers": False, "servers": True, "context_servers": True, "mcp": True}
_FIX = "name the file in which the client keeps its MCP servers"


class Imported(Struct):
    """An entry as an upstream."""

    name: str
    # The values of its section in wirecall.toml.
    values: dict[str, Any]
    # Secrets by name; the values refer to them as `secret:UPSTREAM.NAME`.
    secrets: dict[str, str] = field(default_factory=dict)
    # Sentences about what changed on the way here.
    notes: list[str] = field(default_factory=list)

    def settings(self) -> UpstreamSettings:
        """Return the same as settings, or raise `UsageError`."""
        return UpstreamSettings(self.name, **self.values)

    def toml(self) -> str:
        """Return the section of wirecall.toml."""
        lines = [f"{key} = {_toml_value(value)}\n" for key, value in self.values.items()]
        return f"[upstream.{key_of(self.name)}]\n{''.join(lines)}"


class LeftOut(Struct, frozen=True):
    """An entry that was not imported, and why."""

    name: str
    why: str
    # The user wants it so: the client has the entry switched off.
    is_wanted: bool = False


class ClientFile(Struct):
    """The entries of a client's file."""

    imported: list[Imported] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)


def read_client_file(path: Path, *, folder: Path | None = None) -> ClientFile:
    """Return the entries of a client's file, or raise `UsageError` that names the file.

    `folder` is the project whose entries Claude Code keeps in its own file; by default this folder.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{path} stays as it is.", "it is not UTF-8", "save it as UTF-8") from None
    except OSError as error:
        why = error.strerror or str(error)
        raise UsageError(f"{path} cannot be read.", why, _FIX) from None
    entries = _entries(path, text, str(folder or Path.cwd()))
    if not entries:
        raise UsageError(f"{path} stays as it is.", "it has no servers", _FIX)
    found = ClientFile()
    names: set[str] = set()
    for name, entry in entries:
        try:
            imported = _Reading(name, entry).imported()
            if imported.name in names:
                raise _Unusable(f"another entry has the name {imported.name}")
            imported.settings()
        except _Unusable as unusable:
            found.left_out.append(LeftOut(name, str(unusable), is_wanted=unusable.is_wanted))
        except UsageError as error:
            found.left_out.append(LeftOut(name, str(error).splitlines()[0].rstrip(".")))
        else:
            names.add(imported.name)
            found.imported.append(imported)
    return found


# --- the entries of a file ------------------------------------------------------------------------


def _entries(path: Path, text: str, folder: str) -> list[tuple[str, Any]]:
    """Return the entries of a file by their names."""
    if path.suffix == ".toml":
        try:
            tree = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"{path} stays as it is.", f"it is not TOML: {error}", _FIX) from None
        return list(_object(path, tree, "mcp_servers").items())
    tree = _json(path, text)
    if "mcp" in tree and not tree.keys() & {"mcpServers", "servers", "context_servers"}:
        inner = _object(path, tree, "mcp")
        if _is_table(inner.get("servers")):  # VS Code before it had mcp.json
            return list(inner["servers"].items())
        return [(name, entry) for name, entry in inner.items() if isinstance(entry, dict)]
    found: list[tuple[str, Any]] = []
    has_member = False
    for member in ("mcpServers", "servers", "context_servers"):
        if member in tree:
            has_member = True
            found += _object(path, tree, member).items()
    # Claude Code has the entries of a project in the file of its user.
    project = tree.get("projects")
    if isinstance(project, dict) and isinstance(project.get(folder), dict):
        has_member = True
        found += _object(path, project[folder], "mcpServers").items()
    if not has_member and "projects" not in tree:
        why = f"expected one of {', '.join(MEMBERS)} in it"
        raise UsageError(f"{path} stays as it is.", why, _FIX)
    return found


def _json(path: Path, text: str) -> dict[str, Any]:
    """Parse a file. Comments are allowed where the clients with its member read them."""
    try:
        try:
            tree = parse(text, comments=False).plain()
        except NotJson as problem:
            tree = parse(text, comments=True).plain()
            members = [member for member in MEMBERS if isinstance(tree, dict) and member in tree]
            if not any(MEMBERS[member] for member in members):
                raise problem from None
    except NotJson as problem:
        fix = "correct it"
        if problem.is_comment:
            fix = "remove its comments: its client cannot read them either"
        why = f"it is not JSON, line {problem.line}: {problem.what}"
        raise UsageError(f"{path} stays as it is.", why, fix) from None
    if not isinstance(tree, dict):
        raise UsageError(f"{path} stays as it is.", "expected an object", _FIX)
    return tree


def _object(path: Path, tree: Mapping[str, Any], member: str) -> dict[str, Any]:
    found = tree.get(member, {})
    if not isinstance(found, dict):
        why = f"expected an object under {member!r}"
        raise UsageError(f"{path} stays as it is.", why, _FIX)
    return found


def _is_table(value: object) -> bool:
    """Return whether a value is a table of entries and not an entry."""
    return isinstance(value, dict) and all(isinstance(each, dict) for each in value.values())


# --- one entry ------------------------------------------------------------------------------------


class _Unusable(Exception):
    """An entry that cannot become an upstream."""

    def __init__(self, why: str, *, is_wanted: bool = False) -> None:
        super().__init__(why)
        self.is_wanted = is_wanted


# A value that a client replaces: ${NAME}, ${env:NAME}, ${NAME:-default}, {env:NAME}, $NAME.
_WHOLE = re.compile(
    r"\$\{(?:env:)?(\w+)(:-.*)?\}|\{env:(\w+)\}|\$([A-Za-z_]\w*)",
)
_PART = re.compile(r"\$\{[^}]*\}|\{env:\w+\}")
_HOME = re.compile(r"\$\{(?:userHome|HOME|env:HOME)\}")
_LISTS = {
    "allow": ("enabled_tools", "includeTools"),
    "deny": ("disabled_tools", "disabledTools", "excludeTools"),
}
# Members that change how a server is reached, and that have no place here.
_LOST = ("envFile", "env_file", "oauth", "auth", "headersHelper", "tls")


class _Reading:
    """One entry while it is read."""

    def __init__(self, name: str, entry: object) -> None:
        if not isinstance(entry, dict):
            raise _Unusable("expected an object")
        inner = entry.get("transport")
        # Some programs put the address into a separate object.
        self.entry: dict[str, Any] = {**entry, **inner} if isinstance(inner, dict) else entry
        self.result = Imported(plain_name(name), {})
        if self.result.name != name:
            self.result.notes.append(f"{name} is called {self.result.name} here")

    def imported(self) -> Imported:
        """Return the entry as an upstream."""
        if self.entry.get("disabled") is True or self.entry.get("enabled") is False:
            raise _Unusable("it is switched off in the client", is_wanted=True)
        server = self._server()
        if server.url is None:
            self._take_command(server)
        else:
            self._take_address(server)
        for key, names in _LISTS.items():
            for name in names:
                if isinstance(self.entry.get(name), list) and self.entry[name]:
                    self.result.values[key] = self._strings(name, self.entry[name])
        self.result.notes += [
            f"{name} was not imported: wirecall does not have it"
            for name in _LOST
            if self.entry.get(name)
        ]
        return self.result

    # --- what the entry starts or reaches ---------------------------------------------------------

    def _server(self) -> PlainServer:
        """Return the server of the entry, without programs in front of it."""
        env = self._table("env") | self._table("environment")
        command = self.entry.get("command")
        if isinstance(command, dict):  # an older form of Zed
            env |= self._table("env", command)
            words = [command.get("path"), *command.get("args", [])]
        elif isinstance(command, list):
            words = command
        elif command:
            words = [command, *(self.entry.get("args") or [])]
        else:
            return self._remote()
        server = PlainServer(command=tuple(self._strings("command", words)), env=env)
        return _without_programs(server)

    def _remote(self) -> PlainServer:
        addresses = (self.entry.get(name) for name in ("httpUrl", "serverUrl", "url"))
        url = next((each for each in addresses if isinstance(each, str) and each), None)
        if url is None:
            source = self.entry.get("source")
            if source == "extension" or "settings" in self.entry:
                raise _Unusable("an extension of the client starts it")
            raise _Unusable("it has no command and no address")
        if str(self.entry.get("type")).lower() == "sse":
            raise _Unusable(
                "it speaks HTTP with SSE of 2024-11-05, and wirecall speaks Streamable HTTP; "
                "its address for that is often /mcp"
            )
        headers = self._table("headers") | self._table("http_headers")
        headers |= {
            name: f"${{{variable}}}" for name, variable in self._table("env_http_headers").items()
        }
        if token := self.entry.get("bearer_token_env_var"):
            headers["Authorization"] = f"Bearer ${{{token}}}"
        return PlainServer(url=url, headers=headers)

    def _table(self, name: str, entry: Mapping[str, Any] | None = None) -> dict[str, str]:
        found = (self.entry if entry is None else entry).get(name) or {}
        if not isinstance(found, dict):
            raise _Unusable(f"expected an object under {name}")
        return {key: _string(name, value) for key, value in found.items()}

    def _strings(self, name: str, values: Sequence[Any]) -> list[str]:
        return [_string(name, value) for value in values]

    # --- its values -------------------------------------------------------------------------------

    def _take_command(self, server: PlainServer) -> None:
        words = []
        before = ""
        for number, word in enumerate(server.command):
            shown = _HOME.sub(str(Path.home()).replace("\\", "/"), word)
            if _PART.search(shown):
                name = _PART.findall(shown)[0]
                raise _Unusable(f"its command has {name}, which only the client replaces")
            is_secret = number > 0 and is_secret_word(before, shown)
            if is_secret or shown.startswith("secret:"):
                words.append(self._secret(f"arg{number}", shown))
            else:
                words.append(shown)
            before = word
        self.result.values["command"] = words
        if server.env:
            self.result.values["env"] = {
                name: self._value(name, value) for name, value in server.env.items()
            }
        cwd = self.entry.get("cwd")
        if isinstance(cwd, str) and cwd:
            cwd = _HOME.sub(str(Path.home()), cwd)
            if _PART.search(cwd):
                raise _Unusable(f"its cwd is {cwd}, which only the client replaces")
            self.result.values["cwd"] = os.path.expanduser(cwd)

    def _take_address(self, server: PlainServer) -> None:
        url = server.url or ""
        if _PART.search(url) or not url.startswith(("http://", "https://")):
            whole = _WHOLE.fullmatch(url)
            if whole is None:
                raise _Unusable("its address is not http:// or https://")
            self.result.values["url"] = f"env:{_variable_of(whole)}"
        elif is_secret_address(url):
            self.result.values["url"] = self._secret("url", url)
        else:
            self.result.values["url"] = url
        headers = {}
        for name, value in server.headers.items():
            scheme, _, token = value.partition(" ")
            if name.lower() == "authorization" and scheme.lower() == "bearer" and token.strip():
                reference = self._value("bearer", token.strip(), is_secret=True)
                self.result.values["auth"] = f"bearer:{reference}"
            else:
                headers[name] = self._value(name, value)
        if headers:
            self.result.values["headers"] = headers

    def _value(self, name: str, value: str, *, is_secret: bool = False) -> str:
        """Return a value of `env` or `headers`: a reference unless it is harmless."""
        whole = _WHOLE.fullmatch(value)
        if whole is not None:
            if whole[2]:
                note = f"{name} had a default in the client, which {_variable_of(whole)} lacks here"
                self.result.notes.append(note)
            return f"env:{_variable_of(whole)}"
        if _PART.search(value):
            reference = f"secret:{self.result.name}.{name}"
            self.result.notes.append(
                f"{name} has a part that only the client replaces: add {reference} to the secrets"
            )
            return reference
        if is_secret or is_reference(value) or looks_secret(name, value):
            return self._secret(name, value)
        return value

    def _secret(self, name: str, value: str) -> str:
        self.result.secrets[name] = value
        return f"secret:{self.result.name}.{name}"


def _string(name: str, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if not isinstance(value, str):
        raise _Unusable(f"expected strings under {name}")
    return value


def _variable_of(match: re.Match[str]) -> str:
    return match[1] or match[3] or match[4]


# --- programs in front of a server ----------------------------------------------------------------

# Programs that start a package by its name.
_RUNNERS = frozenset({"npx", "bunx", "pnpx"})
# Options of mcp-remote without a meaning here, and the number of words after each.
_REMOTE_OPTIONS = {
    "--allow-http": 0,
    "--debug": 0,
    "--silent": 0,
    "--transport": 1,
    "--protocol": 1,
    "--host": 1,
    "--auth-timeout": 1,
}


def _without_programs(server: PlainServer) -> PlainServer:
    """Take off `wirecall wrap`, `cmd /c` where it does not exist, and `npx mcp-remote`."""
    inner = unwrapped(server.command, server.env)
    if inner is not None and (inner.url is not None or inner.command):
        server = inner
    if server.url is not None:
        return server
    words = _without_shell(server.command)
    remote = _remote_of(words, server.env)
    if remote is not None:
        return remote
    if os.name == "nt":
        return server  # there `cmd /c` finds programs such as npx
    return PlainServer(command=words, env=server.env)


def _without_shell(words: tuple[str, ...]) -> tuple[str, ...]:
    first = PurePath(words[0].replace("\\", "/")).name.lower() if words else ""
    if first in ("cmd", "cmd.exe") and len(words) > 2 and words[1].lower() == "/c":
        return words[2:]
    return words


def _remote_of(words: Sequence[str], env: Mapping[str, str]) -> PlainServer | None:
    """Return the address behind mcp-remote; None if the command is another."""
    if not words:
        return None
    rest = list(words)
    program = PurePath(rest.pop(0).replace("\\", "/")).name.lower()
    program = program.removesuffix(".cmd").removesuffix(".exe")
    if program in _RUNNERS:
        while rest and rest[0].startswith("-"):
            rest.pop(0)
        program = rest.pop(0) if rest else ""
    if not re.fullmatch(r"mcp-remote(@.*)?", program):
        return None
    url = None
    headers: dict[str, str] = {}
    while rest:
        word = rest.pop(0)
        if word == "--header" and rest:
            name, _, value = rest.pop(0).partition(":")
            headers[name.strip()] = _filled(value.strip(), env)
        elif word in _REMOTE_OPTIONS:
            del rest[: _REMOTE_OPTIONS[word]]
        elif url is None and not word.startswith("-"):
            url = word
        elif not word.isdigit():  # the port to which its browser returns
            return None
    if url is None:
        return None
    return PlainServer(url=_filled(url, env), headers=headers)


def _filled(text: str, env: Mapping[str, str]) -> str:
    """Replace ${NAME} by the variable of the entry, if it has one."""
    return re.sub(r"\$\{(\w+)\}", lambda match: env.get(match[1], match[0]), text)


# --- TOML -----------------------------------------------------------------------------------------


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        pairs = ", ".join(f"{key_of(name)} = {quoted(text)}" for name, text in value.items())
        return f"{{ {pairs} }}"
    if isinstance(value, list):
        return f"[{', '.join(quoted(each) for each in value)}]"
    return quoted(value)
