"""The settings of a gateway, from `wirecall.toml` or from Python.

    settings = load_settings()                                # [gateway], [upstream.*], [auth]
    settings = GatewaySettings([UpstreamSettings("github", command=["npx", "-y", "some-server"])])

1. Both ways have the same rules: the table of values is in `wirecall.config`, the rules between
   values are `_upstream_contradictions` and `_gateway_contradictions`. From a file each mistake has its line.
2. Settings hold references and not secrets (`references`), so they can be shown. The methods that
   take `References` return the values.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Struct

from wirecall.config import (
    FAMILIES,
    SETTINGS,
    Config,
    ConfigError,
    Problem,
    Setting,
    Value,
    check_config,
)
from wirecall.errors import UsageError
from wirecall.gateway.references import SECRETS, References
from wirecall.limits import Limits, NamedOptions
from wirecall.transports.guard import LOOPBACK
from wirecall.transports.headers import is_loopback

if TYPE_CHECKING:
    from wirecall.auth.access import Access, Verifier, Verify

Trust = Literal["none", "hints", "full"]
Share = Literal["all", "caller", "session", "call"]

# Upstreams of one gateway: each may be a process with its own memory.
MAX_UPSTREAMS = 64
# Seconds after the last call of a client until a session that it alone uses ends. A client may
# leave without a word.
OWNED_IDLE = 600.0
# Sessions of one upstream.
MAX_SESSIONS = 16
# Bytes of one message, in and out. A gateway that takes less than the server behind it would break
# calls that worked.
MAX_BYTES = 16 << 20
LIMITS = Limits(bytes_in=MAX_BYTES, bytes_out=MAX_BYTES)

# Headers that the gateway writes from each message.
_OWN_HEADERS = frozenset(
    {
        "accept",
        "connection",
        "content-length",
        "content-type",
        "host",
        "last-event-id",
        "mcp-method",
        "mcp-name",
        "mcp-protocol-version",
        "mcp-session-id",
        "transfer-encoding",
    }
)


class Contradiction(Struct, frozen=True):
    """Values that contradict each other: the key of the one to change, what, and the fix."""

    key: str
    what: str
    fix: str


class ToolSettings(Struct, metaclass=NamedOptions, frozen=True, kw_only=True):
    """The settings of one tool: `[upstream.NAME.tool.TOOL]`.

    `key` is the rule about idempotency keys, as for `@app.command`.

    >>> ToolSettings(kind="command", key="required").kind
    'command'
    """

    # None: its hints decide.
    kind: Literal["query", "command"] | None = None
    key: Literal["auto", "required", "off"] = "auto"

    def __post_init__(self) -> None:
        _convert(self, FAMILIES["upstream"].families["tool"].settings)


class UpstreamSettings(Struct, metaclass=NamedOptions, frozen=True):
    """The settings of one server behind the gateway: `[upstream.NAME]`.

    docs/gateway.md has the meaning of each. Times are seconds, and None is "off".

    `name` is its name here. A server has a `command` with `env` and `cwd`, or a `url` with
    `headers` and `auth`. `revision` pins one of MCP, and `trust` says what its hints count for.
    `timeout` limits one call, `in_flight` the calls at once, `resend_after` decides when a silent
    call was given up, and `idle` ends a server that nothing uses. A server that is `required` must
    start. `allow` and `deny` are patterns of tool names, and `tools` the settings of single tools.

    >>> UpstreamSettings("notes", url="https://notes.example.com/mcp", allow=["read_*"]).trust
    'hints'
    """

    name: str
    command: Sequence[str] = ()
    url: str | None = None
    env: Mapping[str, str] = {}
    cwd: str | None = None
    auth: str = "login"
    headers: Mapping[str, str] = {}
    revision: str = "auto"
    trust: Trust = "hints"
    # None: `GatewaySettings.share_of` decides.
    share: Share | None = None
    timeout: float = 3600.0
    in_flight: int = 32
    resend_after: float | None = 2.0
    idle: float | None = None
    required: bool = False
    allow: Sequence[str] = ("*",)
    deny: Sequence[str] = ()
    tools: Mapping[str, ToolSettings] = {}

    def __post_init__(self) -> None:
        family = FAMILIES["upstream"]
        if not re.fullmatch(family.names, str(self.name)):
            what = f"{self.name!r} is not a name for an upstream."
            raise UsageError(what, f"expected {family.expected}", 'UpstreamSettings("github", ...)')
        _convert(self, family.settings)
        for wrong in _upstream_contradictions(self):
            raise UsageError(f"upstream {self.name}: {wrong.what}.", "", wrong.fix)

    # --- what it is -------------------------------------------------------------------------------

    @property
    def digest(self) -> str:
        """Six digits for the target, which records have in their names.

        A name that points to another target does not get the lost answers of the first.
        """
        target = [self.url or "", self.cwd or "", *self.command]
        return sha256("\0".join(target).encode()).hexdigest()[:6]

    @property
    def shown(self) -> str:
        """The command or the address for people, without what looks like a password."""
        if self.url is not None:
            return re.sub(r"(?<=://)[^/@]*@|\?.*", "", self.url)
        return " ".join(self.command)

    def allows(self, tool: str) -> bool:
        """Return whether clients get a tool."""
        return _fits(tool, self.allow) and not _fits(tool, self.deny)

    def tool(self, name: str) -> ToolSettings:
        """Return the settings of a tool."""
        return self.tools.get(name) or _PLAIN_TOOL

    # --- the values of its references -------------------------------------------------------------

    def words(self, references: References) -> list[str]:
        """Return the command. Only `secret:NAME` is a reference there."""
        return [
            references.value(word) if word.startswith("secret:") else word for word in self.command
        ]

    def variables(self, references: References) -> dict[str, str]:
        """Return the variables that the command gets beside those of this process."""
        return references.values(self.env)

    def address(self, references: References) -> str:
        """Return the address of the server."""
        found = references.value(self.url or "")
        if not found.startswith(("http://", "https://")):
            raise UsageError(
                f"upstream {self.name}: {self.url} is not an address.",
                "expected http:// or https://",
                "correct the value that it refers to",
            )
        return found

    def request_headers(self, references: References) -> dict[str, str]:
        """Return the headers of each request, with its bearer token if there is one."""
        found = references.values(self.headers)
        if self.auth.startswith("bearer:"):
            token = references.value(self.auth.removeprefix("bearer:"))
            found["Authorization"] = f"Bearer {token}"
        for name, value in found.items():
            if re.search(r"[\r\n\0]", value):
                raise UsageError(
                    f"upstream {self.name}: the header {name} has several lines.",
                    "",
                    "correct the value that it refers to",
                )
        return found


class GatewaySettings(Struct, metaclass=NamedOptions, frozen=True):
    """The settings of a gateway: `[gateway]`, and its upstreams.

    `upstreams` are the servers behind it, `http` is the address that it listens on, and `ledger`
    the URL of its ledger. `names` says whether tools get the name of their server as a prefix:
    always ("prefix"), or if two servers share one name ("auto"). `limits` are those of an `App`.

    >>> GatewaySettings([UpstreamSettings("notes", command=["notes-server"])]).http
    '127.0.0.1:8430'
    """

    upstreams: Sequence[UpstreamSettings]
    http: str = "127.0.0.1:8430"
    ledger: str = "sqlite:.wirecall/gateway.db"
    # None: `is_single_user` decides.
    single_user: bool | None = None
    names: Literal["auto", "prefix"] = "auto"
    # What `App(auth=)` takes.
    auth: "Access | Verifier | Verify | Sequence[Verifier | Verify] | None" = None
    limits: Limits = LIMITS
    # The audit trail, as `App` takes it.
    audit: str | None = None
    # The file of the references `secret:NAME`.
    secrets: str = SECRETS

    def __post_init__(self) -> None:
        own = {
            place.removeprefix("gateway."): setting
            for place, setting in SETTINGS.items()
            if place.startswith("gateway.")
        }
        _convert(self, own)
        msgspec.structs.force_setattr(self, "upstreams", tuple(self.upstreams))
        names = [each.name for each in self.upstreams]
        for wrong in _gateway_contradictions(self, names, has_auth=self.auth is not None):
            raise UsageError(f"{wrong.what}.", "", wrong.fix)

    @property
    def is_single_user(self) -> bool:
        """Whether all calls come from one user."""
        if self.single_user is not None:
            return self.single_user
        return self.auth is None and _is_local(self.http)

    def share_of(self, upstream: UpstreamSettings) -> Share:
        """Return which callers share one session of an upstream."""
        if upstream.share is not None:
            return upstream.share
        return "all" if self.is_single_user else "caller"

    def idle_of(self, upstream: UpstreamSettings) -> float | None:
        """Return the seconds after which an unused session of an upstream ends; None: never."""
        if upstream.idle is None and upstream.share == "session":
            return OWNED_IDLE
        return upstream.idle

    def references(self) -> References:
        """Return the values of references."""
        return References(self.secrets)


def _convert(settings: Struct, table: Mapping[str, Setting]) -> None:
    """Check each value, and keep it as the program uses it."""
    called = type(settings).__name__
    for key, setting in table.items():
        value = getattr(settings, key)
        if value in (setting.default, ()):
            continue
        if isinstance(value, tuple):
            value = list(value)
        try:
            found = setting.read(value)
        except (msgspec.ValidationError, UsageError, ValueError):
            raise UsageError(
                f"{called}({key}=...): expected {setting.expected}, got {setting.shown(value)}.",
                "",
                f"in wirecall.toml it would be {setting.line(key)}",
            ) from None
        if isinstance(found, list):
            found = tuple(found)
        msgspec.structs.force_setattr(settings, key, found)


_PLAIN_TOOL = ToolSettings()


def _fits(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a name fits one of the patterns, in which only * is special."""
    return any(
        re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name, re.DOTALL)
        for pattern in patterns
    )


def _is_local(address: str) -> bool:
    """Return whether only this machine reaches an address."""
    host = address.rpartition(":")[0]
    return host in LOOPBACK or is_loopback(host)


# --- values that contradict each other ------------------------------------------------------------


def _upstream_contradictions(upstream: Any) -> Iterator[Contradiction]:
    """Find what is wrong between the values of one upstream."""
    if not upstream.command and upstream.url is None:
        fix = 'command = ["npx", "-y", "some-server"], or url = "https://api.example.com/mcp"'
        yield Contradiction("", "it has no command and no url", fix)
        return
    if upstream.command and upstream.url is not None:
        yield Contradiction("url", "it has a command and a url", "remove one of them")
        return
    if upstream.command:
        yield from _child_contradictions(upstream)
    else:
        yield from _remote_contradictions(upstream)


def _child_contradictions(upstream: Any) -> Iterator[Contradiction]:
    if not upstream.command[0]:
        yield Contradiction("command", "the first word of command is empty", "name a program first")
    if upstream.share == "call":
        what = 'share = "call" would start a process for each call of a command'
        yield Contradiction("share", what, 'share = "session", or leave it out')
    if upstream.headers:
        what = "headers are for a url, and it has a command"
        yield Contradiction("headers", what, "remove them, or use env for variables of the command")
    if upstream.auth != "login":
        what = "auth is for a url, and it has a command"
        yield Contradiction("auth", what, "remove it, or use env for variables of the command")


def _remote_contradictions(upstream: Any) -> Iterator[Contradiction]:
    for key in ("env", "cwd"):
        if getattr(upstream, key):
            what = f"{key} is for a command, and it has a url"
            yield Contradiction(key, what, f"remove {key}")
    if upstream.share == "call" and upstream.idle is not None:
        what = 'share = "call" ends a session after its call, so idle has no effect'
        yield Contradiction("idle", what, "remove idle")
    names = {name.lower() for name in upstream.headers}
    for name in sorted(names & _OWN_HEADERS):
        yield Contradiction("headers", f"the gateway writes the header {name} itself", "remove it")
    if "authorization" in names and upstream.auth not in ("login", "none"):
        what = "the header Authorization and auth contradict each other"
        yield Contradiction("headers", what, "remove one of them")


def _gateway_contradictions(
    gateway: Any, names: Sequence[str], *, has_auth: bool
) -> Iterator[Contradiction]:
    """Find what is wrong between the values of a gateway."""
    if doubled := next((name for name in names if names.count(name) > 1), None):
        what = f"there are two upstreams {doubled}"
        yield Contradiction("upstreams", what, "give one of them another name")
    if not names:
        what = "a gateway needs an upstream, and there is none"
        yield Contradiction("", what, "add [upstream.NAME], or run wirecall gateway import")
    if len(names) > MAX_UPSTREAMS:
        what = f"there are {len(names)} upstreams, and a gateway takes {MAX_UPSTREAMS}"
        yield Contradiction("", what, "use two gateways")
    if not _is_local(gateway.http) and not has_auth:
        what = f"other machines reach {gateway.http}, and there is no section [auth]"
        fix = 'http = "127.0.0.1:8430", or add [auth] with issuer and resource'
        yield Contradiction("http", what, fix)
    if gateway.single_user and has_auth:
        what = "single_user takes all callers for one, and [auth] tells them apart"
        yield Contradiction("single_user", what, "remove single_user, or the section [auth]")


# --- from the file --------------------------------------------------------------------------------


def load_settings(
    path: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    *,
    flags: Mapping[str, Any] | None = None,
) -> GatewaySettings:
    """Return the settings of wirecall.toml, or raise `ConfigError`.

    `flags` are values of the command line by their places, such as "gateway.http".
    """
    config, problems = check_config(path, environment, flags=flags or ())
    values = dict(config.values)
    for place, value in (flags or {}).items():
        values[place] = Value(value, f"--{place.rpartition('.')[2]}")
    config = msgspec.structs.replace(config, values=values)
    # A file without upstreams may lack them because of its problems.
    if config.members.get("upstream") or not problems:
        problems += gateway_problems(config)
    if problems:
        raise ConfigError(sorted(problems, key=lambda each: each.line or 0))
    return _settings_of(config)


def gateway_problems(config: Config) -> list[Problem]:
    """Return what is wrong between the values of a file that have the right types."""
    found = []
    names = list(config.members.get("upstream", {}))
    for name in names:
        if any(place.startswith(f"upstream.{name}.") for place in config.wrong):
            continue  # its values are not complete
        upstream = _Stated(FAMILIES["upstream"].settings, config.section(f"upstream.{name}"))
        for wrong in _upstream_contradictions(upstream):
            place = f"upstream.{name}.{wrong.key}"
            found.append(_problem(config, place, f"upstream {name}: {wrong.what}", wrong.fix))
    settings = {
        place.removeprefix("gateway."): setting
        for place, setting in SETTINGS.items()
        if place.startswith("gateway.")
    }
    gateway = _Stated(settings, config.section("gateway"))
    has_auth = bool(config.section("auth")) or any(
        place.startswith("auth.") for place in config.wrong
    )
    found += [
        _problem(config, f"gateway.{wrong.key}", wrong.what, wrong.fix)
        for wrong in _gateway_contradictions(gateway, names, has_auth=has_auth)
    ]
    return found


class _Stated:
    """The stated values of a section as attributes, with the defaults of the others."""

    def __init__(self, settings: Mapping[str, Setting], stated: Mapping[str, Any]) -> None:
        for key, setting in settings.items():
            setattr(self, key, stated.get(key, setting.default))


def _problem(config: Config, place: str, what: str, fix: str) -> Problem:
    where = config.origin(place)
    number = where.rpartition(":")[2]
    return Problem(where, what, fix, int(number) if number.isdigit() else None)


def _settings_of(config: Config) -> GatewaySettings:
    """Return the settings of a configuration without problems."""
    auth = None
    if stated := config.section("auth"):
        from wirecall.auth import Jwt  # late: few gateways need it

        auth = Jwt(**stated)
    folder = Path() if config.path is None else config.path.parent
    return GatewaySettings(
        [upstream_of(config, name) for name in config.members.get("upstream", {})],
        **config.section("gateway"),
        auth=auth,
        limits=config.limits(LIMITS),
        audit=config.audit,
        secrets=str(folder / SECRETS),
    )


def upstream_of(config: Config, name: str) -> UpstreamSettings:
    """Return the settings of one upstream."""
    values: dict[str, Any] = {}
    tools: dict[str, dict[str, Any]] = {}
    for key, value in config.section(f"upstream.{name}").items():
        if not key.startswith("tool."):
            values[key] = value
            continue
        # The name of a tool may have dots; the key after it has none.
        tool, _, member = key.removeprefix("tool.").rpartition(".")
        tools.setdefault(tool, {})[member] = value
    found = {tool: ToolSettings(**members) for tool, members in tools.items()}
    return UpstreamSettings(name, **values, tools=found)
