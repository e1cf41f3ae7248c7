"""The part of a systemd unit that `wirecall doctor --unit` needs.

It has the environment, folder and flags of a server, from these lines of [Service] in a unit and
its drop-ins (`shop.service.d/*.conf`): Environment=, EnvironmentFile=, WorkingDirectory=,
ExecStart=, and those that say where the server may write. Variables of files override those of the
unit, as in systemd. Variables of the user's shell do not count.
"""

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from wirecall.cli.failures import CliError
from wirecall.cli.serve import serve_command
from wirecall.config import Problem
from wirecall.errors import WirecallError

PREFIX = "WIRECALL_"
ALWAYS_WRITABLE = ("/dev", "/proc", "/sys", "/tmp", "/var/tmp")

# The flags of `wirecall serve`, with their places in wirecall.toml.
_PLACES = {
    "http": "server.http",
    "workers": "server.workers",
    "server": "server.server",
    "hosts": "server.hosts",
    "single_user": "server.single_user",
    "batch_tool": "server.batch_tool",
    "ledger": "ledger.url",
}


class Unit(Struct, frozen=True):
    """The settings that a unit gives to its server."""

    path: Path
    environment: dict[str, str]
    folder: Path | None
    # The flags of `wirecall serve`, by their places in wirecall.toml.
    flags: dict[str, object]
    # The folders that it may write to; None means all that its user may write to.
    writable: tuple[str, ...] | None
    problems: list[Problem]

    def may_write(self, path: Path) -> bool:
        """Return whether the unit lets its server write to a path.

        Its user may still not have the right.
        """
        return self.writable is None or any(path.is_relative_to(each) for each in self.writable)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Work in the folder of the unit, with its environment."""
        before = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
        here = Path.cwd()
        for name in before:
            del os.environ[name]
        os.environ.update(
            {name: value for name, value in self.environment.items() if name.startswith(PREFIX)}
        )
        try:
            if self.folder is not None and self.folder.is_dir():
                os.chdir(self.folder)
            yield
        finally:
            os.chdir(here)
            for name in [name for name in os.environ if name.startswith(PREFIX)]:
                del os.environ[name]
            os.environ.update(before)


def read_unit(text: str) -> Unit:
    """Read a unit and its drop-ins; raises `CliError` if it cannot be read."""
    path = Path(text)
    try:
        files = [path, *sorted(Path(f"{path}.d").glob("*.conf"))]
        lines = [line for file in files for line in _service_lines(file.read_text("utf-8"))]
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise CliError(
            f"The unit {path} cannot be read.",
            why,
            "name its file: /etc/systemd/system/shop.service",
        ) from None
    if not lines:
        raise CliError(
            f"{path} is not a unit of a service.",
            "it has no section [Service]",
            "name a .service file",
        )
    problems: list[Problem] = []
    environment: dict[str, str] = {}
    for value in _values(lines, "Environment"):
        environment.update(_assignments(value, path, problems))
    for value in _values(lines, "EnvironmentFile"):
        environment.update(_variables(value, problems))
    folder = _last(lines, "WorkingDirectory")
    return Unit(
        path,
        environment,
        Path(folder.removeprefix("-")) if folder else None,
        _flags(_last(lines, "ExecStart"), path, problems),
        _writable(lines),
        problems,
    )


# --- lines ----------------------------------------------------------------------------------------


def _service_lines(text: str) -> Iterator[tuple[str, str]]:
    """Yield the names and values of the section [Service].

    A backslash at the end continues a line.
    """
    section = ""
    for line in text.replace("\\\n", " ").splitlines():
        line = line.strip()
        if not line or line.startswith(("#", ";")):
            continue
        if line.startswith("["):
            section = line
        elif section == "[Service]":
            name, _, value = line.partition("=")
            yield name.strip(), value.strip().replace("%%", "%")


def _values(lines: list[tuple[str, str]], name: str) -> list[str]:
    """Return all values of a name. An empty one removes those before it."""
    found: list[str] = []
    for each, value in lines:
        if each != name:
            continue
        if value:
            found.append(value)
        else:
            found.clear()
    return found


def _last(lines: list[tuple[str, str]], name: str) -> str:
    values = _values(lines, name)
    return values[-1] if values else ""


# --- values ---------------------------------------------------------------------------------------


def _words(value: str, name: str, path: Path, problems: list[Problem]) -> list[str]:
    try:
        return shlex.split(value)
    except ValueError as error:
        problems.append(Problem(str(path), f"{name}= cannot be read: {error}", "close its quotes"))
        return []


def _assignments(value: str, path: Path, problems: list[Problem]) -> dict[str, str]:
    """Return the variables of one line: NAME=VALUE "NAME=VALUE with spaces"."""
    words = _words(value, "Environment", path, problems)
    return {word.partition("=")[0]: word.partition("=")[2] for word in words if "=" in word}


def _variables(value: str, problems: list[Problem]) -> dict[str, str]:
    """Return the variables of a file. A path that begins with - may be missing."""
    path = Path(value.removeprefix("-"))
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        if not value.startswith("-"):
            problems.append(
                Problem(
                    str(path),
                    "there is no such EnvironmentFile",
                    "write it: the unit does not start",
                )
            )
        return {}
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        problems.append(
            Problem(str(path), f"its variables are not checked: {why}", "run doctor as root")
        )
        return {}
    found: dict[str, str] = {}
    for line in text.replace("\\\n", "").splitlines():
        name, equals, rest = line.strip().partition("=")
        if equals and not name.startswith(("#", ";")):
            quoted = re.fullmatch(r"""(["'])(.*)\1""", rest.strip())
            found[name.strip()] = quoted[2] if quoted else rest.strip()
    return found


def _flags(value: str, path: Path, problems: list[Problem]) -> dict[str, object]:
    """Return the flags of `wirecall serve`, by their place in wirecall.toml."""
    words = _words(value.lstrip("-@:+!|"), "ExecStart", path, problems)
    if "serve" not in words:
        return {}
    try:
        context = serve_command.make_context(
            "serve", words[words.index("serve") + 1 :], resilient_parsing=True
        )
    except WirecallError:
        return {}
    given = {place: context.params.get(name) for name, place in _PLACES.items()}
    target = context.params.get("target")
    if target is not None:
        given["server.app"] = target.of(target.text)
        given["server.factory"] = target.is_factory
    return {
        place: list(each) if isinstance(each, tuple) else each
        for place, each in given.items()
        if each
    }


def _writable(lines: list[tuple[str, str]]) -> tuple[str, ...] | None:
    """Return the folders that the server may write to, under ProtectSystem=strict."""
    if _last(lines, "ProtectSystem") != "strict":
        return None
    folders = list(ALWAYS_WRITABLE)
    for name, root in (
        ("StateDirectory", "/var/lib"),
        ("CacheDirectory", "/var/cache"),
        ("LogsDirectory", "/var/log"),
    ):
        folders += [f"{root}/{each}" for value in _values(lines, name) for each in value.split()]
    for value in _values(lines, "ReadWritePaths"):
        folders += [each.lstrip("-+") for each in value.split()]
    return tuple(folders)
