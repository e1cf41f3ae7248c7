"""`wirecall.toml`: what an operator may say about a server, without touching its code.

    [server]                              [limits]
    app = "app.py:app"                    batch = 200             # any field of `Limits`
    http = "127.0.0.1:8420"
    workers = 4                           [audit]
    server = "granian"                    file = "audit.jsonl"
    grace = 10                            [ledger]
                                          url = "sqlite:.wirecall/ledger.db"

1. A flag of the command line wins over the environment, that over the file, that over what the app says of itself.
2. The variable of a value is named after its place: WIRECALL_SERVER_HTTP, WIRECALL_LIMITS_BATCH. WIRECALL_CONFIG names
   another file; else it is wirecall.toml in the current folder, which need not be there.
3. A relative path in the file is relative to the file, one in a variable to the current folder.
4. Every mistake is told with the line it stands on, or its variable, and nothing of a file with a mistake is used.
"""

import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_type_hints

from msgspec import Struct

from wirecall.errors import UsageError
from wirecall.ledger.base import check_url
from wirecall.protocol.limits import Limits

FILE = "wirecall.toml"
FILE_VARIABLE = "WIRECALL_CONFIG"
DEFAULT = "default"


class Problem(Struct, frozen=True):
    """One mistake: where it is, what it is, and what would be right."""

    where: str  # "wirecall.toml:7", or the name of a variable
    what: str
    fix: str = ""
    line: int | None = None


class ConfigError(UsageError):
    """A configuration that is not used, because of its `problems`."""

    def __init__(self, problems: "list[Problem]") -> None:
        first, more = problems[0], len(problems) - 1
        why = f"it is one of {more + 1} problems; wirecall config check lists them" if more else ""
        super().__init__(f"{first.where}: {first.what}", why, first.fix)
        self.problems = problems


class Value(Struct, frozen=True):
    """A value, and who said so: a line of the file, a variable, or nobody."""

    value: Any
    origin: str = DEFAULT


class Config(Struct, frozen=True):
    """Every value by its place, such as "server.http". None stands for what the app says of itself."""

    path: Path | None
    values: dict[str, Value]

    def get(self, place: str) -> Any:
        return self.values[place].value

    def stated(self) -> dict[str, Any]:
        """Only what somebody said."""
        return {place: value.value for place, value in self.values.items() if value.origin != DEFAULT}

    def limits(self, base: Limits | None = None) -> Limits:
        """The limits of an app, with those that were stated in their place."""
        stated = {place: value for place, value in self.stated().items() if place.startswith("limits.")}
        fields = {name: getattr(base or Limits(), name) for name in Limits.__struct_fields__}
        return Limits(**fields | {place.removeprefix("limits."): value for place, value in stated.items()})


def load_config(path: str | Path | None = None, environment: Mapping[str, str] | None = None) -> Config:
    """The configuration, or a `ConfigError`. A file that was named must be there."""
    config, problems = check_config(path, environment)
    if problems:
        raise ConfigError(problems)
    return config


def check_config(
    path: str | Path | None = None, environment: Mapping[str, str] | None = None
) -> tuple[Config, list[Problem]]:
    """The configuration as far as it can be read, and everything that is wrong with it."""
    environment = os.environ if environment is None else environment
    named = path or environment.get(FILE_VARIABLE) or None
    problems: list[Problem] = []
    values = {place: Value(setting.default) for place, setting in SETTINGS.items()}
    file = _File(Path(named or FILE), is_named=named is not None, problems=problems)
    values |= file.values()
    values |= _from_environment(environment, problems)
    problems += _contradictions(values, file)
    problems.sort(key=lambda each: each.line or 0)
    return Config(file.path if file.exists else None, values), problems


# --- what there is to set -------------------------------------------------------------------------------------------


class Wrong(ValueError):
    """A value that does not fit; the text says what would."""


class Setting(Struct, frozen=True):
    """One place: how its value is read, what one looks like, what it is without one, and where a path in it leads."""

    read: Callable[[Any], Any]
    example: Any
    default: Any = None
    place: Callable[[str, Path], str] | None = None


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise Wrong("a text")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise Wrong("a whole number above 0")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise Wrong("a number of seconds above 0")
    return float(value)


def _address(value: Any) -> str:
    host, colon, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise Wrong("a host and a port")
    return str(value)


def _server(value: Any) -> str:
    if value not in ("granian", "uvicorn"):
        raise Wrong('"granian" or "uvicorn"')
    return str(value)


def _names(value: Any) -> list[str]:
    """An array in the file; in a variable the names stand between commas."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise Wrong("an array of names")
    return names


def _ledger(value: Any) -> str:
    try:
        check_url(_text(value))
    except (UsageError, Wrong):
        raise Wrong("the URL of a ledger") from None
    return str(value)


def _beside(path: str, folder: Path) -> str:
    """A path of the file's, from here."""
    is_here = folder.resolve() == Path.cwd()
    return path if is_here or Path(path).is_absolute() else str(folder / path)


def _ledger_beside(url: str, folder: Path) -> str:
    scheme, _, path = url.partition(":")
    return f"sqlite:{_beside(path, folder)}" if scheme == "sqlite" and path and not path.startswith("//") else url


SETTINGS: dict[str, Setting] = {
    "server.app": Setting(_text, "app.py", place=_beside),
    "server.http": Setting(_address, "127.0.0.1:8420", "127.0.0.1:8420"),
    "server.workers": Setting(_whole, 4, 1),
    "server.server": Setting(_server, "granian", "granian"),
    "server.grace": Setting(_seconds, 10, 10.0),
    "server.hosts": Setting(_names, ["api.example.com"]),
    "server.origins": Setting(_names, ["https://app.example.com"]),
    "ledger.url": Setting(_ledger, "sqlite:.wirecall/ledger.db", place=_ledger_beside),
    **{
        f"limits.{name}": Setting(_whole if kind is int else _seconds, getattr(Limits(), name))
        for name, kind in get_type_hints(Limits).items()
        if name in Limits.__struct_fields__
    },
    "audit.file": Setting(_text, "audit.jsonl", place=_beside),
}
SECTIONS = tuple(dict.fromkeys(place.partition(".")[0] for place in SETTINGS))


def variable(place: str) -> str:
    """The environment variable of a place."""
    return f"WIRECALL_{place.replace('.', '_').upper()}"


# --- the file -------------------------------------------------------------------------------------------------------


class _File:
    """The file, read as TOML and once more for its lines, which TOML's reader does not tell."""

    def __init__(self, path: Path, *, is_named: bool, problems: list[Problem]) -> None:
        self.path = path
        self._problems = problems
        self.lines: dict[str, int] = {}
        text = self._text(is_named)
        self.exists = text is not None
        self._tree = self._parsed(text or "")

    def values(self) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for section, members in self._tree.items():
            if section not in SECTIONS:
                self._unknown(section, SECTIONS, "section")
            elif not isinstance(members, dict):
                self._wrong(section, f"{section} must be a section, not {members!r}", f"[{section}] on a line of its own")
            else:
                found |= self._section(section, members)
        return found

    def _section(self, section: str, members: dict[str, Any]) -> dict[str, Value]:
        found = {}
        for key, value in members.items():
            place = f"{section}.{key}"
            if place not in SETTINGS:
                self._unknown(place, [known for known in SETTINGS if known.startswith(f"{section}.")], "key")
                continue
            setting = SETTINGS[place]
            try:
                read = setting.read(value)
            except Wrong as error:
                self._wrong(place, f"{place} must be {error}, not {_shown(value)}", f"{key} = {_toml(setting.example)}")
                continue
            read = setting.place(read, self.path.parent) if setting.place else read
            found[place] = Value(read, self.where(place))
        return found

    def _text(self, is_named: bool) -> str | None:
        try:
            return self.path.read_text("utf-8")
        except FileNotFoundError:
            if is_named:
                fix = f"write it, or name another one, here or in {FILE_VARIABLE}"
                self._problems.append(Problem(str(self.path), "there is no such file", fix))
        except UnicodeDecodeError as error:
            line = error.object[: error.start].count(b"\n") + 1
            self._problems.append(Problem(f"{self.path}:{line}", "it is not UTF-8", "save it as UTF-8", line))
        except OSError as error:
            self._problems.append(Problem(str(self.path), f"it cannot be read: {error.strerror}", "give the path of a file"))
        return None

    def _parsed(self, text: str) -> dict[str, Any]:
        try:
            tree = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            what, _, position = str(error).rpartition(" (at ")
            found = re.search(r"line (\d+)", position)
            line = int(found[1]) if found else text.count("\n") + 1
            self._problems.append(Problem(f"{self.path}:{line}", f"it is not TOML: {what}", "see https://toml.io", line))
            return {}
        self.lines = dict(_places(text))
        return tree

    def where(self, place: str) -> str:
        line = self._line(place)
        return f"{self.path}:{line}" if line else str(self.path)

    def _line(self, place: str) -> int | None:
        return self.lines.get(place) or self.lines.get(place.partition(".")[0])

    def _wrong(self, place: str, what: str, fix: str) -> None:
        self._problems.append(Problem(self.where(place), what, fix, self._line(place)))

    def _unknown(self, place: str, known: Sequence[str], kind: str) -> None:
        self._wrong(place, f"there is no {kind} {place}", _suggestion(place, known))


def _shown(value: Any) -> str:
    """A value in an error, without the password that a URL may hold."""
    return re.sub(r"(://[^:/@]*:)[^@]*@", r"\1***@", repr(value))


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


_HEADER = re.compile(r"\s*\[+\s*([^\]]+?)\s*\]+")
_KEY = re.compile(r"""\s*((?:[\w.-]|"[^"]*"|'[^']*')+)\s*=""")


def _places(text: str) -> Iterator[tuple[str, int]]:
    """The lines of sections and keys of a file that is sound TOML. Lines inside of long texts are passed over."""
    section, quote = "", ""
    for number, line in enumerate(text.splitlines(), start=1):
        is_inside, quote = bool(quote), _open_quote(line, quote)
        if is_inside:
            continue
        if header := _HEADER.match(line):
            section = header[1].strip("\"'") + "."
            yield section[:-1], number
        elif key := _KEY.match(line):
            yield section + re.sub("[\"']", "", key[1]), number


def _open_quote(line: str, quote: str) -> str:
    """Which triple quote is open at the end of a line."""
    for mark in re.findall(r'"""|' + "'''", line):
        quote = mark if not quote else "" if mark == quote else quote
    return quote


# --- the environment, and all of it together ------------------------------------------------------------------------


def _from_environment(environment: Mapping[str, str], problems: list[Problem]) -> dict[str, Value]:
    places = {variable(place): place for place in SETTINGS}
    found = {}
    for name in sorted(environment):
        if not name.startswith(tuple(f"WIRECALL_{section.upper()}_" for section in SECTIONS)) or not environment[name]:
            continue  # not ours, or empty, which is how a supervisor says: not set
        if name not in places:
            problems.append(Problem(name, "there is no such variable", _suggestion(name, tuple(places))))
            continue
        try:
            found[places[name]] = Value(_read_text(SETTINGS[places[name]], environment[name]), name)
        except Wrong as error:
            given, example = environment[name], SETTINGS[places[name]].example
            problems.append(Problem(name, f"it must be {error}, not {_shown(given)}", f"{name}={example}"))
    return found


def _read_text(setting: Setting, text: str) -> Any:
    """A value from a variable, where numbers are texts too."""
    if setting.read in (_whole, _seconds):
        with suppress(ValueError):
            return setting.read(float(text) if setting.read is _seconds else int(text))
    return setting.read(text)


def _contradictions(values: dict[str, Value], file: _File) -> list[Problem]:
    workers, ledger = values["server.workers"], values["ledger.url"]
    if workers.value > 1 and ledger.value is not None and ledger.value.startswith("memory:"):
        fix = 'use a ledger that processes share: "sqlite:PATH", "redis://...", "postgresql://..."'
        line = file.lines.get("server.workers") if workers.origin == file.where("server.workers") else None
        return [Problem(workers.origin, f"{workers.value} workers cannot share a ledger in memory", fix, line)]
    return []


def _suggestion(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, 1, 0.6)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
