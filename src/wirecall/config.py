"""`wirecall.toml`: the settings of a server that an operator changes without touching its code.

    [server]                                  [limits]
    app = "app.py:app"                        batch = 200           # any field of `Limits`
    http = "127.0.0.1:8420"
    workers = 4                               [audit]
    server = "granian"                        file = "audit.jsonl"
    grace = 10
                                              [gateway]
    [ledger]                                  http = "127.0.0.1:8430"
    url = "sqlite:.wirecall/ledger.db"
                                              [upstream.github]     # a family: any name
    [auth]                                    command = ["npx", "-y", "some-server"]
    issuer = "https://auth.example.com"       env = { TOKEN = "env:TOKEN" }
    resource = "https://api.example.com/mcp"

1. A command-line flag overrides the environment, the environment the file, and the file the app's
   own settings. The ledger is the exception: a file and a variable that name two ledgers are a
   mistake. If two hosts read one file and only one has the variable, they would keep separate
   records, and a retry on the other host would run again.
2. The variable of a setting is named after its place: WIRECALL_SERVER_HTTP, WIRECALL_LIMITS_BATCH.
   WIRECALL_CONFIG names another file. The default is wirecall.toml in the current folder, if it
   exists.
3. A relative path in the file is relative to the file, a relative path in a variable to the current
   folder.
4. Every mistake is reported with its line or its variable. A file with a mistake is not used at
   all.
5. A family has a section for each of its members, such as [upstream.github]. A member has no
   variables.
6. A value that must stay secret is a reference: `env:NAME` is a variable, `file:PATH` the first line
   of a file, and `secret:NAME` an entry of `.wirecall/secrets.toml` beside this file.
"""

import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_type_hints

import msgspec
from msgspec import Meta, Struct

from wirecall.errors import UsageError
from wirecall.ledger.base import check_url, without_password
from wirecall.limits import Limits
from wirecall.mcp.revisions import NAMES as REVISIONS

FILE = "wirecall.toml"
FILE_VARIABLE = "WIRECALL_CONFIG"
DEFAULT = "default"


class Problem(Struct, frozen=True):
    """One mistake: where it is, what it is, and how to fix it."""

    # "wirecall.toml:7", or the name of a variable.
    where: str
    what: str
    fix: str = ""
    line: int | None = None


class ConfigError(UsageError):
    """A configuration that is rejected because of its `problems`."""

    def __init__(self, problems: "list[Problem]") -> None:
        first = problems[0]
        why = ""
        if len(problems) > 1:
            why = f"it is one of {len(problems)} problems; wirecall config check lists them"
        super().__init__(f"{first.where}: {first.what}", why, first.fix)
        self.problems = problems


class Value(Struct, frozen=True):
    """A value and its origin: a line of the file, a variable, or "default"."""

    value: Any
    origin: str = DEFAULT


class Config(Struct, frozen=True):
    """Every value by its place, such as "server.http".

    None means that the app's own setting is used.
    """

    path: Path | None
    values: dict[str, Value]
    # The members of each family, and the lines of their sections: {"upstream": {"github": ...}}.
    members: dict[str, dict[str, str]] = {}
    # The places in the file that have problems.
    wrong: frozenset[str] = frozenset()

    @property
    def has_gateway(self) -> bool:
        """Whether the file or the environment describes a gateway."""
        return bool(self.members.get("upstream")) or bool(self.section("gateway"))

    def origin(self, place: str) -> str:
        """Return where a value is stated; else where its section is; else the file."""
        if place in self.values and self.values[place].origin != DEFAULT:
            return self.values[place].origin
        family, _, rest = place.partition(".")
        member = rest.partition(".")[0]
        return self.members.get(family, {}).get(member) or str(self.path or FILE)

    def get(self, place: str) -> Any:
        return self.values[place].value

    def stated(self) -> dict[str, Any]:
        """Return the values that the file or the environment states, without the defaults."""
        return {
            place: value.value for place, value in self.values.items() if value.origin != DEFAULT
        }

    def section(self, name: str) -> dict[str, Any]:
        """Return the stated values of one section by their keys."""
        return {
            place.removeprefix(f"{name}."): value
            for place, value in self.stated().items()
            if place.startswith(f"{name}.")
        }

    def limits(self, base: Limits | None = None) -> Limits:
        """Return the limits of an app, changed by the stated ones."""
        return msgspec.structs.replace(base or Limits(), **self.section("limits"))

    @property
    def audit(self) -> str | None:
        """The audit trail, as `App` takes it."""
        file = self.get("audit.file")
        if not file:
            return None
        words = [name for name in ("required", "fsync") if self.get(f"audit.{name}")]
        if rotate := self.get("audit.rotate"):
            words.append(f"rotate={rotate}")
        if not words:
            return f"file:{file}"
        return f"file:{file}?{'&'.join(words)}"


def without_secrets(value: Any) -> Any:
    """Return a value without passwords. Plain variables and headers may be secret too."""
    if isinstance(value, str):
        return without_password(value)
    if isinstance(value, dict):
        return {name: text if is_reference(text) else "***" for name, text in value.items()}
    return value


# --- the settings ---------------------------------------------------------------------------------

_Text = Annotated[str, Meta(min_length=1)]
_Count = Annotated[int, Meta(ge=1)]
_Seconds = Annotated[float, Meta(gt=0, le=1e9)]  # an upper bound, so that TOML's inf is refused
_Pause = Annotated[float, Meta(ge=0, le=1e9)]
_Names = Annotated[list[_Text], Meta(min_length=1)]
_Port = r"(\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])"  # 0 to 65535
_Number = Annotated[int, Meta(ge=0, le=65535)]
_Web = Annotated[str, Meta(pattern=r"^(https://|http://(localhost|127\.0\.0\.1|\[::1\])([:/]|$))")]
_Address = Annotated[str, Meta(pattern=f"^.+:{_Port}$")]
_REFERENCE = r"(env:[^=\0]+|file:.+|secret:.+)"
_Token = Annotated[str, Meta(pattern=r"^(env:[^=\0]+|file:.+)$")]
_Target = Annotated[str, Meta(pattern=r"^(https?://[^\s]+|env:[^=\0]+|secret:.+)$")]
_Credentials = Annotated[str, Meta(pattern=f"^(login|none|bearer:{_REFERENCE})$")]
_Reference = Annotated[str, Meta(pattern=r"^(env:[^=\0]+|file:.+)$")]
_Variable = Annotated[str, Meta(pattern=r"^[^=\0]+$")]
_Header = Annotated[str, Meta(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")]
_OneLine = Annotated[str, Meta(pattern=r"^[^\r\n\0]*$")]
_Words = Annotated[list[Annotated[str, Meta(pattern=r"^[^\0]*$")]], Meta(min_length=1)]

# How a setting changes its paths: it gets the value, and a function for one path.
Relative: TypeAlias = Callable[[Any, Callable[[str], str]], Any]


def is_reference(text: str) -> bool:
    """Return whether a value is a reference and not a plain string."""
    return text.startswith(("env:", "file:", "secret:"))


def _relative_path(value: str, under: Callable[[str], str]) -> str:
    return under(value)


def names_module(text: str) -> bool:
    """Return whether a string names an app by its module: `acme.shop:app`, `acme.shop`.

    The path of a file ends in .py, and one word alone may be anything.
    """
    path, _, name = text.partition(":")
    if path.endswith(".py") or not all(part.isidentifier() for part in path.split(".")):
        return False
    return ("." in path or name.isidentifier()) and not Path(path).is_file()


def _relative_app(text: str, under: Callable[[str], str]) -> str:
    """Return the place of an app. A module is found from the folder of the file, too."""
    if not names_module(text):
        return under(text)
    module, colon, name = text.partition(":")
    path = module.replace(".", "/")
    found = under(path)
    if found == path:
        return text
    for each in (f"{found}.py", f"{found}/__init__.py"):
        if Path(each).is_file():
            return f"{each}{colon}{name}"
    return text


def _relative_ledger(url: str, under: Callable[[str], str]) -> str:
    """Return the URL of a ledger. Only that of SQLite is a path."""
    if not url.startswith("sqlite:"):
        return url
    return f"sqlite:{under(url.removeprefix('sqlite:'))}"


def _relative_reference(text: str, under: Callable[[str], str]) -> str:
    """Return a reference. Only `file:PATH` has a path, also as a bearer token."""
    start = re.match("(bearer:)?file:", text)
    if start is None:
        return text
    return f"{start[0]}{under(text.removeprefix(start[0]))}"


def _relative_references(values: dict[str, str], under: Callable[[str], str]) -> dict[str, str]:
    return {name: _relative_reference(text, under) for name, text in values.items()}


_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds_of(text: str | float) -> float:
    """Convert a duration above 0, such as "90s" or 90, to seconds; `ValueError` if it is not one."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|)", str(text).strip())
    if match is None or not 0 < float(match[1]) <= 1e9:
        raise ValueError(f"{text!r} is not a duration")
    return float(match[1]) * _UNITS[match[2]]


def _seconds_or_off(text: str | float | None) -> float | None:
    """Convert a duration; None if it is off."""
    if text in ("off", None):
        return None
    return seconds_of(text or 0)


class Setting(Struct, frozen=True):
    """One setting."""

    # Its type, for `msgspec.convert`.
    type: Any
    # The same type in words.
    expected: str
    example: Any
    default: Any = None
    # Raises UsageError; for rules that no type can express.
    check: Callable[[str], object] | None = None
    # Returns the value that the program uses; raises ValueError.
    parse: Callable[[Any], Any] | None = None
    # Makes the paths in the value relative to the file.
    relative: Relative | None = None
    # What it means, for its table in the docs.
    about: str = ""
    # Errors do not show its value, which may be a secret in the wrong place.
    is_secret: bool = False

    def read(self, value: object, *, is_text: bool = False) -> Any:
        """Return the converted value.

        A variable (`is_text`) has numbers as strings, and commas in lists.
        """
        if is_text and self.type is _Names:
            value = [name.strip() for name in str(value).split(",")]
        found = msgspec.convert(value, self.type, strict=not is_text)
        if self.check:
            self.check(found)
        if self.parse:
            return self.parse(found)
        return found

    def shown(self, value: object) -> str:
        """Return a wrong value for an error message."""
        if self.is_secret:
            return _KINDS.get(type(value), "something else")
        return _shown(value)

    def line(self, key: str) -> str:
        """Return an example of a line in the file."""
        if isinstance(self.example, str):
            return f'{key} = "{self.example}"'
        if isinstance(self.example, bool):
            return f"{key} = {str(self.example).lower()}"
        if isinstance(self.example, dict):
            pairs = ", ".join(f'{name} = "{text}"' for name, text in self.example.items())
            return f"{key} = {{ {pairs} }}"
        if type(self.example) is float:
            return f"{key} = {self.example:g}"
        return f"{key} = {self.example}"


# Values by their types, in words.
_KINDS: dict[type, str] = {
    str: "another string",
    dict: "another table",
    list: "another array",
    bool: "true or false",
    int: "a number",
    float: "a number",
}
_COUNT = "a whole number above 0"
_SECONDS = "a number of seconds above 0"


def _limit_settings() -> "dict[str, Setting]":
    """Return a setting for every field of `Limits`."""
    settings = {}
    for name, kind in get_type_hints(Limits).items():
        if name not in Limits.__struct_fields__:
            continue
        setting = Setting(_Seconds, _SECONDS, getattr(Limits(), name))
        if kind is int:
            setting = Setting(_Count, _COUNT, getattr(Limits(), name))
        settings[f"limits.{name}"] = setting
    return settings


SETTINGS: dict[str, Setting] = {
    "server.app": Setting(_Text, "a string", "app.py", relative=_relative_app),
    "server.http": Setting(_Address, "a host and a port", "127.0.0.1:8420", "127.0.0.1:8420"),
    "server.workers": Setting(_Count, _COUNT, 4, 1),
    "server.server": Setting(
        Literal["granian", "granian-asgi", "uvicorn"],
        '"granian", "granian-asgi" or "uvicorn"',
        "granian",
        "granian",
    ),
    "server.grace": Setting(_Seconds, _SECONDS, 10, 10.0),
    "server.drain": Setting(_Pause, "a number of seconds, 0 or more", 5),
    "server.certificate": Setting(_Text, "a string", "tls/server.pem", relative=_relative_path),
    "server.key": Setting(_Text, "a string", "tls/server.key", relative=_relative_path),
    "server.secret": Setting(
        _Reference,
        "env:NAME or file:PATH",
        "file:/run/secrets/wirecall",
        relative=_relative_reference,
        is_secret=True,
    ),
    "server.other_secret": Setting(
        _Reference,
        "env:NAME or file:PATH",
        "file:/run/secrets/wirecall-other",
        relative=_relative_reference,
        is_secret=True,
    ),
    "server.hosts": Setting(_Names, "an array of names", ["api.example.com"]),
    "server.origins": Setting(_Names, "an array of names", ["https://app.example.com"]),
    "server.single_user": Setting(bool, "true or false", True),
    "server.stream": Setting(bool | Literal["array"], 'true, false or "array"', True),
    "server.batch_tool": Setting(Literal["queries", "all"], '"queries" or "all"', "queries"),
    "server.factory": Setting(bool, "true or false", True),
    "ledger.url": Setting(
        _Text,
        "the URL of a ledger",
        "sqlite:.wirecall/ledger.db",
        check=check_url,
        relative=_relative_ledger,
    ),
    "ledger.migrate": Setting(
        Literal["auto", "create", "never"], '"auto", "create" or "never"', "auto"
    ),
    **_limit_settings(),
    "audit.file": Setting(_Text, "a string", "audit.jsonl", relative=_relative_path),
    "audit.required": Setting(bool, "true or false", True),
    "audit.fsync": Setting(bool, "true or false", True),
    "audit.rotate": Setting(_Text, "a size", "100MB"),
    "auth.issuer": Setting(
        _Web, "the https address of an authorization server", "https://auth.example.com"
    ),
    "auth.resource": Setting(
        _Web, "the https address of this server", "https://api.example.com/mcp"
    ),
    "auth.audience": Setting(_Text, "a string", "shop"),
    "auth.scopes": Setting(_Names, "an array of names", ["mcp:use"]),
    "console.enabled": Setting(bool, "true or false", True, False),
    "console.port": Setting(_Number, "a port, or 0 for a free one", 8421),
    "console.readonly": Setting(bool, "true or false", True, False),
    "console.capture": Setting(
        Literal["facts", "bodies"], '"facts" or "bodies"', "bodies", "facts"
    ),
    "metrics.http": Setting(_Address, "a host and a port", "127.0.0.1:9464"),
    "metrics.token": Setting(
        _Token,
        "env:NAME or file:PATH",
        "env:METRICS_TOKEN",
        relative=_relative_reference,
        is_secret=True,
    ),
    "gateway.http": Setting(
        _Address,
        "a host and a port",
        "127.0.0.1:8430",
        "127.0.0.1:8430",
        about="The address. One that is not loopback needs the section `[auth]`.",
    ),
    "gateway.ledger": Setting(
        _Text,
        "the URL of a ledger",
        "sqlite:.wirecall/gateway.db",
        "sqlite:.wirecall/gateway.db",
        check=check_url,
        relative=_relative_ledger,
        about="Where the gateway records commands.",
    ),
    "gateway.single_user": Setting(
        bool,
        "true or false",
        True,
        about="All calls come from one user. By default true on loopback without `[auth]`; with "
        "`[auth]` it is refused.",
    ),
    "gateway.names": Setting(
        Literal["auto", "prefix"],
        '"auto" or "prefix"',
        "auto",
        "auto",
        about="Names of tools where all upstreams are one server. `auto`: a name that two upstreams "
        "have gets a prefix. `prefix`: every name gets one.",
    ),
}


class Family(Struct, frozen=True):
    """Sections of one kind, each with a name that the user chooses."""

    # One member in words.
    member: str
    # A pattern for the names, and the same in words.
    names: str
    expected: str
    settings: dict[str, Setting]
    # The families inside each member, by their keys.
    families: "dict[str, Family]" = {}


_DURATION = "a duration such as 90s, 15m or 1h"
_DURATION_OR_OFF = f'{_DURATION}, or "off"'
_PATTERNS = "an array of names, in which * stands for any characters"

_TOOL = Family(
    "tool",
    r"[^\0]+",
    "the name of a tool",
    {
        "kind": Setting(
            Literal["query", "command"],
            '"query" or "command"',
            "command",
            about="What the tool is, whatever its hints say.",
        ),
        "key": Setting(
            Literal["auto", "required", "off"],
            '"auto", "required" or "off"',
            "auto",
            "auto",
            about="`auto`: a repeated command is recognised if its answer was lost. `required`: "
            "each call needs an idempotency key. `off`: the command is not recorded.",
        ),
    },
)
_UPSTREAM = Family(
    "upstream",
    r"[A-Za-z0-9][A-Za-z0-9_-]{0,47}",
    "1 to 48 letters, digits, _ and -, without a dot",
    {
        "command": Setting(
            _Words,
            "an array of words",
            ["npx", "-y", "some-server"],
            is_secret=True,
            about="The command that starts the server. It, or `url`. A word may be `secret:NAME`.",
        ),
        "url": Setting(
            _Target,
            "an http address, env:NAME or secret:NAME",
            "https://api.example.com/mcp",
            is_secret=True,
            about="The address of the server. A reference keeps an address with a key in it out "
            "of this file.",
        ),
        "env": Setting(
            dict[_Variable, Annotated[str, Meta(pattern=r"^[^\0]*$")]],
            "a table of strings",
            {"API_TOKEN": "env:API_TOKEN"},
            {},
            relative=_relative_references,
            is_secret=True,
            about="Variables for the command, added to those of the gateway. A value is a "
            "reference or a plain string.",
        ),
        "cwd": Setting(
            _Text, "a folder", ".", relative=_relative_path, about="The folder of the command."
        ),
        "auth": Setting(
            _Credentials,
            '"login", "none" or "bearer:" before env:NAME, file:PATH or secret:NAME',
            "bearer:env:API_TOKEN",
            "login",
            relative=_relative_reference,
            is_secret=True,
            about="How the gateway logs in at `url`. `login`: with the login that `wirecall login` "
            "stored, if there is one. The token of a client is never passed on.",
        ),
        "headers": Setting(
            dict[_Header, _OneLine],
            "a table of HTTP headers, each on one line",
            {"X-Team": "env:TEAM"},
            {},
            relative=_relative_references,
            is_secret=True,
            about="Headers of each request to `url`. A value is a reference or a plain string.",
        ),
        "revision": Setting(
            Literal["auto", *REVISIONS],
            f"auto or a revision of MCP: {', '.join(REVISIONS)}",
            "auto",
            "auto",
            about="The revision that the gateway speaks to the server. `auto`: that of the client "
            "that opens the session, or another one that the server has.",
        ),
        "trust": Setting(
            Literal["none", "hints", "full"],
            '"none", "hints" or "full"',
            "hints",
            "hints",
            about="`none`: every tool is a command. `hints`: a tool with `readOnlyHint` is a query. "
            "`full`: a tool with `idempotentHint` may also be sent twice.",
        ),
        "share": Setting(
            Literal["all", "caller", "session", "call"],
            '"all", "caller", "session" or "call"',
            "caller",
            about="Which callers share one session of the server. By default `all` with "
            "`single_user`, else `caller`. `call`: each call has its own, which ends after it; it is "
            "refused for a command.",
        ),
        "timeout": Setting(
            str | float,
            _DURATION,
            "1h",
            3600.0,
            parse=seconds_of,
            about="Time for one call, also after its caller has left.",
        ),
        "in_flight": Setting(
            _Count, _COUNT, 32, 32, about="Calls that the server gets at the same time."
        ),
        "resend_after": Setting(
            str | float | None,
            _DURATION_OR_OFF,
            "2s",
            2.0,
            parse=_seconds_or_off,
            about="An equal call in the same session is a repetition if the first still runs after "
            "this time.",
        ),
        "idle": Setting(
            str | float | None,
            _DURATION_OR_OFF,
            "off",
            parse=_seconds_or_off,
            about="The gateway ends a session or a process that was not used for this time. A call in "
            'flight is use. The next call starts it again. With `share = "session"`, `off` is 10 '
            "minutes.",
        ),
        "required": Setting(
            bool, "true or false", True, False, about="`/readyz` answers 503 without it."
        ),
        "allow": Setting(list[_Text], _PATTERNS, ["*"], ["*"], about="Tools that clients get."),
        "deny": Setting(
            list[_Text],
            _PATTERNS,
            ["delete_*"],
            [],
            about="Tools that clients do not get, although `allow` has them.",
        ),
    },
    {"tool": _TOOL},
)
FAMILIES = {"upstream": _UPSTREAM}
# The settings that name a ledger.
_LEDGERS = ("ledger.url", "gateway.ledger")
SECTIONS = tuple(dict.fromkeys(place.partition(".")[0] for place in SETTINGS))


def variable(place: str) -> str:
    """Return the name of a setting's environment variable."""
    return f"WIRECALL_{place.replace('.', '_').upper()}"


# --- reading --------------------------------------------------------------------------------------


def load_config(
    path: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    flags: Collection[str] = (),
) -> Config:
    """Return the configuration, or raise `ConfigError`. A file that is named must exist.

    `flags` are the places that the command line sets, such as "ledger.url": there other sources may
    differ.

    `path` is the file, by default `wirecall.toml`, and `environment` are the variables, by default
    those of the process.

    >>> load_config(environment={"WIRECALL_SERVER_WORKERS": "4"}).get("server.workers")
    4
    """
    config, problems = check_config(path, environment, flags=flags)
    if problems:
        raise ConfigError(problems)
    return config


def check_config(
    path: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    flags: Collection[str] = (),
) -> tuple[Config, list[Problem]]:
    """Return the configuration without its wrong values, and every problem in it.

    `path`, `environment` and `flags` are those of `load_config`.

    >>> config, problems = check_config(environment={"WIRECALL_SERVER_WORKERS": "x"})
    >>> len(problems)
    1
    """
    environment = os.environ if environment is None else environment
    named = path or environment.get(FILE_VARIABLE) or None
    reading = _Reading(Path(named or FILE))
    reading.take_tree(reading.read_file(is_named=named is not None))
    stated_ledgers = {place: reading.values[place] for place in _LEDGERS if place not in flags}
    reading.take_environment(environment)
    for place, stated in stated_ledgers.items():
        reading.check_ledgers(place, stated)
    reading.check_workers()
    reading.check_auth()
    reading.check_secrets()
    reading.check_certificate()
    reading.problems.sort(key=lambda each: each.line or 0)
    config = Config(reading.found, reading.values, reading.members, frozenset(reading.wrong))
    return config, reading.problems


class _Reading:
    """A configuration as it is read: its values, and the problems that were found so far."""

    def __init__(self, file: Path) -> None:
        self.values = {place: Value(setting.default) for place, setting in SETTINGS.items()}
        self.members: dict[str, dict[str, str]] = {}
        self.problems: list[Problem] = []
        self.wrong: set[str] = set()
        # The file, once it has been read.
        self.found: Path | None = None
        self._file = file
        # The lines of sections and keys.
        self._lines: dict[str, int] = {}

    # --- the file ---------------------------------------------------------------------------------

    def read_file(self, *, is_named: bool) -> dict[str, Any]:
        """Return the tables of the file. A file that is named must exist."""
        file = self._file
        try:
            text = file.read_text("utf-8")
        except FileNotFoundError:
            if is_named:
                fix = f"write it, or name another file, here or in {FILE_VARIABLE}"
                self.problems.append(Problem(str(file), "there is no such file", fix))
            return {}
        except UnicodeDecodeError as error:
            line = error.object[: error.start].count(b"\n") + 1
            problem = Problem(f"{file}:{line}", "it is not UTF-8", "save it as UTF-8", line)
            self.problems.append(problem)
            return {}
        except OSError as error:
            what = f"it cannot be read: {error.strerror}"
            fix = "name a file that this user can read"
            self.problems.append(Problem(str(file), what, fix))
            return {}
        self.found = file
        try:
            tree = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            what, _, position = str(error).rpartition(" (at ")
            at = re.search(r"line (\d+)", position)
            line = int(at[1]) if at else text.count("\n") + 1
            what = f"it is not TOML: {what}"
            fix = "see https://toml.io"
            if doubled := _doubled(text, line):
                what = f"there are two sections {doubled}"
                fix = "remove one of them, or give it another name"
            self.problems.append(Problem(f"{file}:{line}", what, fix, line))
            return {}
        self._lines.update(_lines(text))
        return tree

    def take_tree(self, tree: dict[str, Any]) -> None:
        """Take the values of the file."""
        known = (*SECTIONS, *FAMILIES)
        for section, members in tree.items():
            if section not in known:
                self._wrong(section, f"there is no section {section}", _suggestion(section, known))
            elif not isinstance(members, dict):
                line = f"[{section}]"
                if section in FAMILIES:
                    line = f"[{section}.NAME]"
                what = f"{section} must be a section, got {members!r}"
                self._wrong(section, what, f"{line} on its own line")
        for section, members in tree.items():
            if not isinstance(members, dict):
                continue
            if section in FAMILIES:
                self._take_family(section, FAMILIES[section], members)
            elif section in SECTIONS:
                known_keys = {
                    place.partition(".")[2]: setting
                    for place, setting in SETTINGS.items()
                    if place.startswith(f"{section}.")
                }
                self._take_section(section, known_keys, members)

    def _take_section(
        self, section: str, settings: Mapping[str, Setting], members: dict[str, Any]
    ) -> None:
        """Take the values of one section."""
        for key, value in members.items():
            place = f"{section}.{key}"
            setting = settings.get(key)
            if setting is None:
                known = [f"{section}.{name}" for name in settings]
                fix = _suggestion(place, known, f"{section}.")
                self._wrong(place, f"there is no key {place}", fix)
                continue
            try:
                found = setting.read(value)
            except (msgspec.ValidationError, UsageError, ValueError):
                what = f"{place} must be {setting.expected}, got {setting.shown(value)}"
                self._wrong(place, what, setting.line(key))
                continue
            if setting.relative is not None and found is not None:
                found = setting.relative(found, self._relative)
            where, _ = self._located(place)
            self.values[place] = Value(found, where)

    def _take_family(self, section: str, family: Family, members: dict[str, Any]) -> None:
        """Take the sections of a family, and of the families in it."""
        found = self.members.setdefault(section, {})
        for name, values in members.items():
            place = f"{section}.{name}"
            if not re.fullmatch(family.names, name):
                what = f"{name!r} is not a name for {section}: expected {family.expected}"
                self._wrong(place, what, f"[{section}.{family.member}-1]")
                continue
            if not isinstance(values, dict):
                what = f"{place} must be a section, got {_shown(values)}"
                self._wrong(place, what, f"[{place}] on its own line")
                continue
            found[name], _ = self._located(place)
            inner = {key: value for key, value in values.items() if key in family.families}
            plain = {key: value for key, value in values.items() if key not in inner}
            self._take_section(place, family.settings, plain)
            for key, value in inner.items():
                if not isinstance(value, dict):
                    what = f"{place}.{key} must be a section, got {_shown(value)}"
                    self._wrong(f"{place}.{key}", what, f"[{place}.{key}.NAME] on its own line")
                    continue
                self._take_family(f"{place}.{key}", family.families[key], value)

    def _relative(self, path: str) -> str:
        """Return a path of the file as this process can use it.

        If the file is in the current folder, the path stays as it is.
        """
        folder = self._file.parent
        if not path or path.startswith(("/", "~")) or folder.resolve() == Path.cwd():
            return path
        return str(folder / path)

    def _located(self, place: str) -> tuple[str, int | None]:
        """Return where the file states a value or its section, and the number of that line."""
        line = self._lines.get(place)
        parent = place
        while line is None and "." in parent:
            parent = parent.rpartition(".")[0]
            line = self._lines.get(parent)
        if line:
            return f"{self._file}:{line}", line
        return str(self._file), line

    def _wrong(self, place: str, what: str, fix: str) -> None:
        where, line = self._located(place)
        self.wrong.add(place)
        self.problems.append(Problem(where, what, fix, line))

    # --- the environment --------------------------------------------------------------------------

    def take_environment(self, environment: Mapping[str, str]) -> None:
        """Take the variables, which override the file.

        An empty variable is unset: supervisors can only empty one.
        """
        variables = {variable(place): place for place in SETTINGS}
        prefixes = tuple(f"WIRECALL_{section.upper()}_" for section in SECTIONS)
        for name, text in sorted(environment.items()):
            if not name.startswith(prefixes) or not text:
                continue
            if name not in variables:
                prefix = next(each for each in prefixes if name.startswith(each))
                fix = _suggestion(name, variables, prefix)
                self.problems.append(Problem(name, "there is no such variable", fix))
                continue
            setting = SETTINGS[variables[name]]
            try:
                self.values[variables[name]] = Value(setting.read(text, is_text=True), name)
            except (msgspec.ValidationError, UsageError):
                what = f"it must be {setting.expected}, got {setting.shown(text)}"
                self.problems.append(Problem(name, what, f"{name}={setting.example}"))

    # --- settings that contradict each other ------------------------------------------------------

    def check_ledgers(self, place: str, stated: Value) -> None:
        """Report a file and an environment that name two ledgers."""
        effective = self.values[place]
        if stated.origin != DEFAULT and _is_another_ledger(stated, effective):
            line = self._lines.get(place)
            self.problems.append(_two_ledgers(place, stated, effective, line))

    def check_workers(self) -> None:
        """Report processes that cannot share their ledger."""
        workers = self.values["server.workers"]
        if workers.value == 1 or not str(self.values["ledger.url"].value).startswith("memory:"):
            return
        what = f"{workers.value} workers cannot share a ledger in memory"
        fix = 'use a ledger that processes share: "sqlite:PATH", "redis://...", "postgresql://..."'
        line = self._line_of("server.workers")
        self.problems.append(Problem(workers.origin, what, fix, line))

    def check_certificate(self) -> None:
        """Report a certificate without its key, or a key without its certificate."""
        for place, other in (
            ("server.certificate", "server.key"),
            ("server.key", "server.certificate"),
        ):
            if self.values[place].value is None or self.values[other].value is not None:
                continue
            fix = SETTINGS[other].line(other.partition(".")[2])
            line = self._line_of(place)
            problem = Problem(self.values[place].origin, f"{place} needs {other}", fix, line)
            self.problems.append(problem)

    def check_secrets(self) -> None:
        """Report a secret that only opens, beside none that seals."""
        other = self.values["server.other_secret"]
        if other.value is None or self.values["server.secret"].value is not None:
            return
        what = "server.other_secret needs server.secret, which signs"
        fix = SETTINGS["server.secret"].line("secret")
        line = self._line_of("server.other_secret")
        self.problems.append(Problem(other.origin, what, fix, line))

    def check_auth(self) -> None:
        """Report a section [auth] that lacks what all the others need."""
        stated = [
            place
            for place, value in self.values.items()
            if place.startswith("auth.") and value.value is not None
        ]
        if not stated:
            return
        first = stated[0]
        for place in ("auth.issuer", "auth.resource"):
            if self.values[place].value is None:
                what = f"{first} needs {place}"
                fix = f'{place.partition(".")[2]} = "{SETTINGS[place].example}"'
                problem = Problem(self.values[first].origin, what, fix, self._line_of(first))
                self.problems.append(problem)

    def _line_of(self, place: str) -> int | None:
        """Return the line of a value; None if the environment states it."""
        where, _ = self._located(place)
        if self.values[place].origin != where:
            return None
        return self._lines.get(place)


def _is_another_ledger(stated: Value, effective: Value) -> bool:
    """Return whether the file and the environment name two ledgers. Passwords are not compared."""
    if stated.value is None or effective.value is None:
        return False
    return ledger_itself(stated.value) != ledger_itself(effective.value)


def ledger_itself(url: str) -> str:
    """Return one string for all URLs of a ledger.

    It has no password, and the absolute path of a file.
    """
    scheme, _, rest = url.partition(":")
    if scheme == "sqlite":
        return f"sqlite:{os.path.abspath(rest.removeprefix('//'))}"
    bare = re.sub(r":\*\*\*(?=@)|[?&]password=\*\*\*", "", without_password(url))
    return re.sub("^postgres:", "postgresql:", bare)


def _two_ledgers(place: str, stated: Value, effective: Value, line: int | None) -> Problem:
    file = without_password(stated.value)
    name = without_password(effective.value)
    what = f"{place} is {file}, and {effective.origin} is {name}: these are two ledgers"
    fix = (
        "remove one of them: the line in the file, "
        f"or {effective.origin} where the server is started"
    )
    return Problem(stated.origin, what, fix, line)


_HEADER = re.compile(r"\s*\[+\s*([^\]]+?)\s*\]+")
_KEY = re.compile(r"""\s*((?:[\w.-]|"[^"]*"|'[^']*')+)\s*=""")


def _lines(text: str) -> Iterator[tuple[str, int]]:
    """Yield the sections and keys of valid TOML with their lines, which tomllib does not report."""
    section = ""
    quote = ""
    for number, line in enumerate(text.splitlines(), start=1):
        is_inside = bool(quote)
        for mark in re.findall(r'"""|' + "'''", line):  # a multi-line string begins or ends
            if not quote:
                quote = mark
            elif quote == mark:
                quote = ""
        if is_inside:
            continue
        if header := _HEADER.match(line):
            bare = re.sub(r"\s*\.\s*", ".", header[1])
            section = re.sub("[\"']", "", bare) + "."
            yield section[:-1], number
        elif key := _KEY.match(line):
            yield section + re.sub("[\"']", "", key[1]), number


def _doubled(text: str, line: int) -> str | None:
    """Return the section that begins in a line, if one of the same name begins before."""
    found = ""
    before = []
    for place, number in _lines(text):
        if number == line:
            found = place
        elif number < line:
            before.append(place)
    if not found or found not in before or not _HEADER.match(text.splitlines()[line - 1]):
        return None
    return f"[{found}]"


def _shown(value: object) -> str:
    """Return a value for an error message, without the password that a URL may hold."""
    if isinstance(value, str):
        return repr(without_password(value))
    return without_password(repr(value))


def _suggestion(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return the fix for an unknown name.

    The prefix is not compared: it would make all names look alike.
    """
    near = get_close_matches(
        name.removeprefix(prefix), [each.removeprefix(prefix) for each in known], 1, 0.6
    )
    if near:
        return f"did you mean {prefix}{near[0]}?"
    return f"use one of {', '.join(known)}"
