"""`wirecall.toml`: the settings of a server that an operator changes without touching its code.

    [server]                              [limits]
    app = "app.py:app"                    batch = 200             # any field of `Limits`
    http = "127.0.0.1:8420"
    workers = 4                           [audit]
    server = "granian"                    file = "audit.jsonl"
    grace = 10                            [ledger]
                                          url = "sqlite:.wirecall/ledger.db"
    [auth]
    issuer = "https://auth.example.com"
    resource = "https://api.example.com/mcp"

1. A flag of the command line wins over the environment, the environment over the file, the file over the app's own settings.
2. The variable of a setting is named after its place: WIRECALL_SERVER_HTTP, WIRECALL_LIMITS_BATCH. WIRECALL_CONFIG names
   another file. The default is wirecall.toml in the current folder, which may be missing.
3. A relative path in the file is relative to the file, a relative path in a variable to the current folder.
4. Every mistake is reported with its line or its variable. A file with a mistake is not used at all.
"""

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta, Struct

from wirecall.errors import UsageError
from wirecall.ledger.base import check_url
from wirecall.protocol.messages import Limits

FILE = "wirecall.toml"
FILE_VARIABLE = "WIRECALL_CONFIG"
DEFAULT = "default"


class Problem(Struct, frozen=True):
    """One mistake: where it is, what it is, and how to fix it."""

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
    """A value and its origin: a line of the file, a variable, or "default"."""

    value: Any
    origin: str = DEFAULT


class Config(Struct, frozen=True):
    """Every value by its place, such as "server.http". None means that the app's own setting is used."""

    path: Path | None
    values: dict[str, Value]

    def get(self, place: str) -> Any:
        return self.values[place].value

    def stated(self) -> dict[str, Any]:
        """Return the values that the file or the environment states, without the defaults."""
        return {place: value.value for place, value in self.values.items() if value.origin != DEFAULT}

    def section(self, name: str) -> dict[str, Any]:
        """Return the stated values of one section by their keys."""
        return {place.partition(".")[2]: value for place, value in self.stated().items() if place.startswith(f"{name}.")}

    def limits(self, base: Limits | None = None) -> Limits:
        """Return the limits of an app, changed by the stated ones."""
        return msgspec.structs.replace(base or Limits(), **self.section("limits"))

    @property
    def audit(self) -> str | None:
        """The audit trail, as `App` takes it."""
        file = self.get("audit.file")
        return f"file:{file}" if file else None


# --- the settings ---------------------------------------------------------------------------------------------------

_Text = Annotated[str, Meta(min_length=1)]
_Count = Annotated[int, Meta(ge=1)]
_Seconds = Annotated[float, Meta(gt=0, le=1e9)]  # an upper bound, so that TOML's inf is refused
_Names = Annotated[list[_Text], Meta(min_length=1)]
_Port = r"(\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])"  # 0 to 65535
_Web = Annotated[str, Meta(pattern=r"^(https://|http://(localhost|127\.0\.0\.1|\[::1\])([:/]|$))")]
_Address = Annotated[str, Meta(pattern=f"^.+:{_Port}$")]


class Setting(Struct, frozen=True):
    """One setting: its type for `msgspec.convert`, the same type in words, an example, and its default."""

    type: Any
    expected: str
    example: Any
    default: Any = None
    check: Callable[[str], object] | None = None  # raises UsageError; for rules that no type can express

    def read(self, value: object, *, is_text: bool = False) -> Any:
        """Return the value, converted. From a variable (`is_text`) numbers are texts, and names are separated by commas."""
        if is_text and self.type is _Names:
            value = [name.strip() for name in str(value).split(",")]
        found = msgspec.convert(value, self.type, strict=not is_text)
        if self.check:
            self.check(found)
        return found


_COUNT, _SECONDS = "a whole number above 0", "a number of seconds above 0"
SETTINGS: dict[str, Setting] = {
    "server.app": Setting(_Text, "a text", "app.py"),
    "server.http": Setting(_Address, "a host and a port", "127.0.0.1:8420", "127.0.0.1:8420"),
    "server.workers": Setting(_Count, _COUNT, 4, 1),
    "server.server": Setting(
        Literal["granian", "granian-asgi", "uvicorn"], '"granian", "granian-asgi" or "uvicorn"', "granian", "granian"
    ),
    "server.grace": Setting(_Seconds, _SECONDS, 10, 10.0),
    "server.hosts": Setting(_Names, "an array of names", ["api.example.com"]),
    "server.origins": Setting(_Names, "an array of names", ["https://app.example.com"]),
    "server.single_user": Setting(bool, "true or false", True),
    "ledger.url": Setting(_Text, "the URL of a ledger", "sqlite:.wirecall/ledger.db", check=check_url),
    **{
        f"limits.{name}": Setting(
            _Count if kind is int else _Seconds, _COUNT if kind is int else _SECONDS, getattr(Limits(), name)
        )
        for name, kind in get_type_hints(Limits).items()
        if name in Limits.__struct_fields__
    },
    "audit.file": Setting(_Text, "a text", "audit.jsonl"),
    "auth.issuer": Setting(_Web, "the https address of an authorization server", "https://auth.example.com"),
    "auth.resource": Setting(_Web, "the https address of this server", "https://api.example.com/mcp"),
    "auth.audience": Setting(_Text, "a text", "shop"),
    "auth.scopes": Setting(_Names, "an array of names", ["mcp:use"]),
}
SECTIONS = tuple(dict.fromkeys(place.partition(".")[0] for place in SETTINGS))


def variable(place: str) -> str:
    """Return the name of a setting's environment variable."""
    return f"WIRECALL_{place.replace('.', '_').upper()}"


# --- reading --------------------------------------------------------------------------------------------------------


def load_config(path: str | Path | None = None, environment: Mapping[str, str] | None = None) -> Config:
    """Return the configuration, or raise `ConfigError`. A file that is named must exist."""
    config, problems = check_config(path, environment)
    if problems:
        raise ConfigError(problems)
    return config


def check_config(
    path: str | Path | None = None, environment: Mapping[str, str] | None = None
) -> tuple[Config, list[Problem]]:
    """Return the configuration without its wrong values, and every problem in it."""
    environment = os.environ if environment is None else environment
    named = path or environment.get(FILE_VARIABLE) or None
    file = Path(named or FILE)
    values = {place: Value(setting.default) for place, setting in SETTINGS.items()}
    problems: list[Problem] = []
    lines: dict[str, int] = {}

    # Step 1: the file. A file that is named must exist.
    text, tree = None, {}
    try:
        text = file.read_text("utf-8")
        tree = tomllib.loads(text)
        lines.update(_lines(text))
    except FileNotFoundError:
        fix = f"write it, or name another file, here or in {FILE_VARIABLE}"
        problems += [Problem(str(file), "there is no such file", fix)] if named else []
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        problems.append(Problem(f"{file}:{line}", "it is not UTF-8", "save it as UTF-8", line))
    except OSError as error:
        problems.append(Problem(str(file), f"it cannot be read: {error.strerror}", "name a file that this user can read"))
    except tomllib.TOMLDecodeError as error:
        assert text is not None
        what, _, position = str(error).rpartition(" (at ")
        found = re.search(r"line (\d+)", position)
        line = int(found[1]) if found else text.count("\n") + 1
        problems.append(Problem(f"{file}:{line}", f"it is not TOML: {what}", "see https://toml.io", line))

    # Step 2: its values.
    def located(place: str) -> tuple[str, int | None]:
        line = lines.get(place) or lines.get(place.partition(".")[0])
        return (f"{file}:{line}" if line else str(file)), line

    def wrong(place: str, what: str, fix: str) -> None:
        where, line = located(place)
        problems.append(Problem(where, what, fix, line))

    settings: dict[str, Any] = {}
    for section, members in tree.items():
        if section not in SECTIONS:
            wrong(section, f"there is no section {section}", _suggestion(section, SECTIONS))
        elif not isinstance(members, dict):
            wrong(section, f"{section} must be a section, got {members!r}", f"[{section}] on a line of its own")
        else:
            settings |= {f"{section}.{key}": value for key, value in members.items()}
    for place, value in settings.items():
        section, _, key = place.partition(".")
        if place not in SETTINGS:
            known = [name for name in SETTINGS if name.startswith(f"{section}.")]
            wrong(place, f"there is no key {place}", _suggestion(place, known, f"{section}."))
            continue
        setting = SETTINGS[place]
        try:
            value = setting.read(value)
        except (msgspec.ValidationError, UsageError):
            example = setting.example
            shown = f'"{example}"' if isinstance(example, str) else f"{example:g}" if type(example) is float else example
            wrong(place, f"{place} must be {setting.expected}, got {_shown(value)}", f"{key} = {shown}")
            continue
        # A relative path is relative to the file. If the file is in the current folder, the path stays as it is.
        is_ledger_file = place == "ledger.url" and value.startswith("sqlite:")
        if (is_ledger_file or place in ("server.app", "audit.file")) and file.parent.resolve() != Path.cwd():
            scheme, relative = ("sqlite:", value[7:]) if is_ledger_file else ("", value)
            value = f"{scheme}{file.parent / relative}" if relative and relative[0] != "/" else value
        values[place] = Value(value, located(place)[0])

    # Step 3: the environment goes over the file. An empty variable counts as not set: supervisors can only empty one.
    variables = {variable(place): place for place in SETTINGS}
    prefixes = tuple(f"WIRECALL_{section.upper()}_" for section in SECTIONS)
    for name in sorted(name for name, text in environment.items() if name.startswith(prefixes) and text):
        if name not in variables:
            prefix = next(each for each in prefixes if name.startswith(each))
            problems.append(Problem(name, "there is no such variable", _suggestion(name, variables, prefix)))
            continue
        setting = SETTINGS[variables[name]]
        try:
            values[variables[name]] = Value(setting.read(environment[name], is_text=True), name)
        except (msgspec.ValidationError, UsageError):
            what = f"it must be {setting.expected}, got {_shown(environment[name])}"
            problems.append(Problem(name, what, f"{name}={setting.example}"))

    # Step 4: settings that contradict each other.
    workers, ledger = values["server.workers"], values["ledger.url"]
    if workers.value > 1 and str(ledger.value).startswith("memory:"):
        fix = 'use a ledger that processes share: "sqlite:PATH", "redis://...", "postgresql://..."'
        at = lines.get("server.workers") if workers.origin == located("server.workers")[0] else None
        problems.append(Problem(workers.origin, f"{workers.value} workers cannot share a ledger in memory", fix, at))
    stated = [place for place, value in values.items() if place.startswith("auth.") and value.value is not None]
    missing = [place for place in ("auth.issuer", "auth.resource") if stated and values[place].value is None]
    for place in missing:
        origin = values[stated[0]].origin
        at = lines.get(stated[0]) if origin == located(stated[0])[0] else None
        fix = f'{place.partition(".")[2]} = "{SETTINGS[place].example}"'
        problems.append(Problem(origin, f"{stated[0]} needs {place}", fix, at))
    problems.sort(key=lambda each: each.line or 0)
    return Config(file if text is not None else None, values), problems


_HEADER = re.compile(r"\s*\[+\s*([^\]]+?)\s*\]+")
_KEY = re.compile(r"""\s*((?:[\w.-]|"[^"]*"|'[^']*')+)\s*=""")


def _lines(text: str) -> Iterator[tuple[str, int]]:
    """Yield the sections and keys of a valid TOML text with their line numbers, which tomllib does not report."""
    section, quote = "", ""
    for number, line in enumerate(text.splitlines(), start=1):
        is_inside = bool(quote)
        for mark in re.findall(r'"""|' + "'''", line):  # a text over several lines begins or ends
            quote = mark if not quote else "" if mark == quote else quote
        if is_inside:
            continue
        if header := _HEADER.match(line):
            section = header[1].strip("\"'") + "."
            yield section[:-1], number
        elif key := _KEY.match(line):
            yield section + re.sub("[\"']", "", key[1]), number


def _shown(value: object) -> str:
    """Return a value for an error text, without the password that a URL may hold."""
    return re.sub(r"(://[^:/@]*:)[^@]*@", r"\1***@", repr(value))


def _suggestion(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return the fix for an unknown name. The prefix is not compared: it would make all names look alike."""
    near = get_close_matches(name.removeprefix(prefix), [each.removeprefix(prefix) for each in known], 1, 0.6)
    return f"did you mean {prefix}{near[0]}?" if near else f"use one of {', '.join(known)}"
