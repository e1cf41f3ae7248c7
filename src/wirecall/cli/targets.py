"""The server of a verb, its ledger, and the connection to it. One grammar for all verbs:

    shop.py, shop.py:app     an app in a Python file, in this process
    acme.shop:app            an app in a module, as Python imports it; with --factory the name is
                             that of a function that makes the app
    http://…, https://…      a server's address; without a path it is a wirecall server:
                             /rpc, or /mcp with --as mcp
    ws://…, tcp://…, unix:/… a server on a WebSocket or a socket
    -- command …             a server on the stdin and stdout of a process;
                             all words after `--` are its command line

1. Verbs are made with `cls=TargetCommand` and take the target first, by `target_argument`.
   Without one, it is the app that wirecall.toml names. `app_of` is the app as `wirecall serve`
   would serve it here.
2. The ledger of an app: its option, its driver, and errors that say what is wrong with its store.
3. `way_options` are the options of all verbs that call a server, and `opened` is a client of it.
   Verbs speak plain JSON-RPC to files and addresses, and MCP to addresses that end in /mcp or
   /mcp/NAME and to commands, since nearly every server on stdio speaks it. `--as` overrides that,
   and so does `--revision`, which only MCP has. An idempotency key belongs to one protocol: the
   ledger distinguishes `charge` and `tools/call:charge`.
"""

import asyncio
import logging
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, redirect_stdout, suppress
from datetime import UTC, datetime
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlsplit

import click
from msgspec import Struct
from msgspec.structs import replace

from wirecall.app import SECRET_VARIABLE, App
from wirecall.cli.apps import load_app, no_file
from wirecall.cli.failures import CliError, Exit, NotReached, Unreachable, failure_of, not_named
from wirecall.config import Config, load_config, names_module, seconds_of
from wirecall.errors import (
    BadAnswer,
    CallFailed,
    ConnectionLost,
    NotSent,
    TimedOut,
    UsageError,
    extra_fix,
)
from wirecall.files import login_folder
from wirecall.ledger.base import (
    Ledger,
    LedgerDown,
    OtherTables,
    Tables,
    open_ledger,
    without_password,
)
from wirecall.logs import logger
from wirecall.protocol.addresses import is_of_mcp
from wirecall.protocol.messages import Unreadable

if TYPE_CHECKING:
    from wirecall.auth import Stored
    from wirecall.client.exchange import Exchange, Link
    from wirecall.transports.http_client import HttpClient

# Represents the words after `--`; no argument of a program can contain a null character.
_COMMAND = "\0command"
# Whether `--factory` was given, in the context of a verb.
_FACTORY = "wirecall.factory"

# The beginnings of the addresses of links.
_LINKS = ("ws://", "wss://", "tcp://", "unix:/", "unix:.")

F = TypeVar("F", bound=Callable[..., Any])


class Target(Struct, frozen=True):
    """A server, as the user named it."""

    # A link is a WebSocket, a TCP port or a Unix socket.
    kind: Literal["file", "url", "command", "link"]
    # The path of a file, the address of a server, or the words of a command, for people.
    text: str
    # The name of the app in the file.
    name: str = ""
    # The words of a command.
    command: tuple[str, ...] = ()

    # The text is the name of a module, and not a path.
    is_module: bool = False
    # The name is that of a function that makes the app.
    is_factory: bool = False

    def app(self) -> App:
        """Load the app of the file or module, for verbs that need one."""
        if self.kind != "file":
            raise CliError(
                f"{self.text} is not a file.",
                "this verb needs an app in a Python file",
                "name one: app.py",
            )
        if not self.is_module and not Path(self.text).is_file():
            raise no_file(self.text, self.name)
        return load_app(self.text, self.name, is_module=self.is_module, is_factory=self.is_factory)

    def check_no_link(self, verb: str) -> None:
        """Refuse a link, which this verb does not reach."""
        if self.kind == "link":
            raise CliError(
                f"wirecall {verb} does not reach {self.text}.",
                "it reaches servers by http and https, on stdio, and apps in a file",
                "http://..., app.py, or -- command ...",
                type="target",
            )

    def address(self, path: str, *, keep_root: bool = True) -> str:
        """Return the URL of an endpoint.

        An address without a path is a wirecall server, which has its endpoint at `path`.

        A lone slash is a path, at which another kind of server may answer; without `keep_root` it
        is ignored.
        """
        parts = urlsplit(self.text)
        if parts.path == "" or (parts.path == "/" and not keep_root):
            return parts._replace(path=path).geturl()
        return self.text

    def of(self, path: str) -> str:
        """Return the target with this path to its file."""
        if self.name:
            return f"{path}:{self.name}"
        return path

    def words(self, path: str | None = None) -> list[str]:
        """Return the target as words of a command line, with another path to its file."""
        words = [self.of(self.text if path is None else path)]
        if self.is_factory:
            words.append("--factory")
        return words

    def line(self, verb: str, *words: str) -> str:
        """Return the command line of another verb on this target, for people."""
        parts = [verb, *self.words(), *words]
        if self.kind == "command":
            parts = [verb, *words, "--", self.text]
        return " ".join(["wirecall", *filter(None, parts)])


class TargetCommand(click.Command):
    """A command whose target may be the words after `--`: its first argument, unless `is_last`.

    Without a target, it is the app that wirecall.toml names.
    """

    is_last = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[_COMMAND] = tuple(args[at + 1 :])
            args = args[:at]
            args.insert(at if self.is_last else 0, _COMMAND)
        elif not self._has_target(ctx, args) and (named := configured(load_config())):
            if named.is_factory:
                args = [*args, "--factory"]
            args.insert(len(args) if self.is_last else 0, named.of(named.text))
        try:
            return super().parse_args(ctx, list(args))
        except click.MissingParameter:
            # `show price` lacks the server, and not a second word.
            if self._has_target(ctx, args):
                raise
            fix = "name a file, a module, an address, or -- a command"
            raise not_named("Which server?", f"{fix}; or [server] app in wirecall.toml") from None

    def _has_target(self, ctx: click.Context, args: list[str]) -> bool:
        """Return whether the arguments have a target, or cannot have one."""
        if ctx.resilient_parsing or {"-h", "--help"} & set(args):
            return True
        places = [each for each in self.params if isinstance(each, click.Argument)]
        place = places[-1 if self.is_last else 0]
        if place.type.name != parse.__name__ or not place.required:
            return True
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        word = given.get(place.name or "")
        return isinstance(word, str) and (self.is_last or is_target(word))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("TARGET"):
            formatter.write_dl(
                [
                    ("shop.py, shop.py:app", "an app in a Python file"),
                    (
                        "acme.shop:app",
                        "an app in a module; with --factory a function that makes it",
                    ),
                    ("http://127.0.0.1:8420", "a server; without a path it is a wirecall server"),
                    ("ws://..., tcp://..., unix:/PATH", "a server on a WebSocket or a socket"),
                    ("-- COMMAND ...", "the command line of a server on stdio"),
                ]
            )

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND ...]"]


def parse(text: str) -> Target:
    """Return the target that a string names."""
    # 1. The words after `--`.
    if text == _COMMAND:
        command = click.get_current_context().meta[_COMMAND]
        if not command:
            raise CliError(
                "There is no command after `--`.",
                "it is the command line of a server",
                "-- python server.py",
            )
        return Target("command", " ".join(command), command=command)
    if not text.strip():
        raise CliError(
            "The target is empty.",
            "expected a file or an address",
            "app.py, http://..., or -- command ...",
        )

    # 2. An address that can be split into its parts. The server itself is not contacted yet.
    if text.lower().startswith(("http://", "https://")):
        try:
            split = urlsplit(text)
            # Both may raise.
            host = split.hostname
            _ = split.port
            why = ""
            if any(sign.isspace() for sign in text):
                why = "there is a space in it"
            elif not host:
                why = "it has no host"
        except ValueError as error:
            why = str(error)
        if why:
            raise CliError(
                f"{text!r} is not an address.",
                why,
                "http://127.0.0.1:8420, or .../rpc, .../mcp",
                type="target",
            )
        return Target("url", split._replace(scheme=split.scheme.lower()).geturl())
    if text.lower().startswith(_LINKS):
        if any(sign.isspace() for sign in text):
            raise CliError(f"{text!r} is not an address.", "there is a space in it", "unix:/path")
        return Target("link", text)
    if "://" in text:
        raise CliError(
            f"{text} is not a target.",
            "servers are reached by http and https",
            "http://..., or a file: app.py",
        )

    # 3. A module or a file.
    path, _, name = text.partition(":")
    ctx = click.get_current_context(silent=True)
    return Target(
        "file",
        path,
        name,
        is_module=names_module(text),
        is_factory=ctx is not None and bool(ctx.meta.get(_FACTORY)),
    )


def is_target(word: str) -> bool:
    """Return whether a word is a target, and not the name of a method or the like."""
    path, colon, _ = word.partition(":")
    if word == _COMMAND or word.lower().startswith(("http://", "https://", *_LINKS)):
        return True
    return path.endswith(".py") or (bool(colon) and names_module(word))


def configured(config: Config) -> Target | None:
    """Return the app that wirecall.toml names."""
    named = config.get("server.app")
    if named is None:
        return None
    return replace(parse(named), is_factory=bool(config.get("server.factory")))


def _keep_factory(ctx: click.Context, _option: click.Parameter, is_factory: bool) -> None:
    ctx.meta[_FACTORY] = is_factory


# Eager: the target is read after it.
factory_option = click.option(
    "--factory",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_keep_factory,
    help="The name in TARGET is that of a function that makes the app.",
)


def target_argument(verb: F) -> F:
    """The first argument of a verb, as the parameter `target`."""
    return factory_option(click.argument("target", type=parse, metavar="TARGET")(verb))


# The server of a verb that has nothing to do with apps.
address_argument = click.argument("target", type=parse, metavar="TARGET")


def optional_target_argument(verb: F) -> F:
    """The same for a verb that can work without one."""
    add = click.argument("target", type=parse, required=False, metavar="[TARGET]")
    return factory_option(add(verb))


# --- the app as it is served here -----------------------------------------------------------------


def app_of(target: Target, ledger: str | None = None) -> App | None:
    """Return the app in a file, as `wirecall serve` would serve it here.

    A server elsewhere gives None.
    """
    if target.kind == "file":
        app = target.app()
        config = load_config(flags=flags_of(ledger))
        app.configure(
            ledger=ledger or config.get("ledger.url"),
            audit=config.audit,
            limits=config.limits(app.limits),
        )
        # A verb never changes the tables of servers. It may create a file, as a project's first
        # call does.
        is_file = app.ledger_url.startswith("sqlite:")
        app.configure(tables="create" if is_file else "leave")
        return app
    if ledger is not None:
        raise CliError(
            "--ledger is for an app in a file.",
            f"{target.text} has its own ledger",
            "drop --ledger",
        )
    return None


def flags_of(ledger: str | None) -> tuple[str, ...]:
    """Return the places of wirecall.toml that `--ledger` decides."""
    if ledger is None:
        return ()
    return ("ledger.url",)


# --- its ledger -----------------------------------------------------------------------------------

# By scheme: the package of its driver, and the extra of wirecall that installs it.
DRIVERS = {
    "redis": ("redis", "redis"),
    "rediss": ("redis", "redis"),
    "valkey": ("redis", "redis"),
    "postgresql": ("psycopg", "postgres"),
    "postgres": ("psycopg", "postgres"),
}

# The option `--ledger`, as the parameter `ledger`.
ledger_option = click.option(
    "--ledger",
    metavar="URL",
    help="Ledger of an app in a file: sqlite:PATH, redis://..., postgresql://..., memory:",
)


# The first bytes of every SQLite file (sqlite.org/fileformat.html, section 1.3).
SQLITE_FILE = b"SQLite format 3\0"


def check_ledger(url: str) -> None:
    """Refuse a ledger whose driver is not installed, or whose path is not an SQLite file."""
    scheme, _, path = url.partition(":")
    driver, extra = DRIVERS.get(scheme, ("", ""))
    # Found, not imported: a driver takes longer to import than most verbs take to run.
    if driver and find_spec(driver) is None:
        why = f"ledgers of {scheme}: are reached with the package {driver}"
        raise CliError(f"{driver} is not installed.", why, extra_fix(extra), type="ledger")
    if url.removesuffix("//") == "sqlite:":
        raise CliError(
            f"The ledger {url} has no path.",
            "SQLite keeps it in a file",
            "sqlite:ledger.db",
            type="ledger",
        )
    if scheme == "sqlite":
        _check_sqlite(path)


def _check_sqlite(path: str) -> None:
    file = Path(path.removeprefix("//"))
    begin = b""
    if file.is_dir():
        raise CliError(
            f"The ledger {path} is a folder.",
            "SQLite keeps it in a file",
            "name a file in it",
            type="ledger",
        )
    with suppress(OSError), file.open("rb") as opened:  # a new ledger has no file yet
        begin = opened.read(len(SQLITE_FILE))
    if begin and begin != SQLITE_FILE:
        what = f"The ledger {path} is not an SQLite file."
        why = "a server would refuse every command"
        raise CliError(
            what, why, "name another file", exit=Exit.UNREACHABLE, type="ledger_unavailable"
        )


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """Explain why a ledger cannot be used. A store that cannot be reached is exit 4."""
    check_ledger(url)
    try:
        with _quiet("psycopg.pool"):
            yield
    except LedgerDown as error:
        failure = failure_of(UsageError(str(error)))
        if not failure.why and not failure.next:  # otherwise the error has its own why and fix
            failure = CliError(
                f"The ledger {without_password(url)} cannot be used.",
                " ".join(failure.what.split()),
            )
        failure.next = failure.next or "is it running, and is this its URL?"
        failure.exit = Exit.UNREACHABLE
        failure.type = "ledger_unavailable"
        if isinstance(error, OtherTables):
            failure.type = "ledger_tables"
        raise failure from error


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Silence the warnings of a driver in this block: the error that follows says the same."""
    driver = logging.getLogger(name)
    level = driver.level
    driver.setLevel(logging.ERROR)
    try:
        yield
    finally:
        driver.setLevel(level)


def check_tables(app: App) -> None:
    """Refuse to serve an app that may not migrate the tables of its ledger, or cannot use them."""
    with reaching(app.ledger_url):
        asyncio.run(app.check_tables())


@asynccontextmanager
async def opened_ledger(url: str, *, writes: bool = False) -> AsyncIterator[Ledger]:
    """Open a ledger that exists. Its tables are not changed.

    Unless the caller `writes`, the ledger may be a replica.
    """
    tables: Tables = "read"
    if writes:
        tables = "leave"
    with reaching(url):
        ledger = await open_ledger(url, tables)
        try:
            yield ledger
        finally:
            await ledger.aclose()


async def ready(app: App) -> None:
    """Open the ledger of an app in this process before a command needs it.

    An error can be explained here.
    """
    with reaching(app.ledger_url):
        await app.ledger()


# --- the way to it --------------------------------------------------------------------------------

Protocol = Literal["rpc", "mcp"]


def secrets_of(config: Config) -> list[str]:
    """Return the secrets that wirecall.toml names, unless the environment has one.

    The first signs.
    """
    from wirecall.gateway.references import References  # late: few servers need it

    places = ("server.secret", "server.other_secret")
    stated = [config.get(place) for place in places if config.get(place)]
    if os.environ.get(SECRET_VARIABLE):
        return []
    references = References()
    return [references.value(each) for each in stated]


def duration(text: str | float) -> float:
    """Convert a time above 0 to seconds: the `type=` of an option."""
    try:
        return seconds_of(text)
    except ValueError:
        raise CliError(
            f"{text!r} is not a time.",
            "it must be above 0, with or without a unit",
            "30s, 500ms, 2m, 24h",
        ) from None


def pause(text: str | float) -> float:
    """Convert a time to seconds, which may be 0: the `type=` of an option."""
    if re.fullmatch(r"0+(\.0+)?(ms|s|m|h|d|)", str(text).strip()):
        return 0.0
    try:
        return seconds_of(text)
    except ValueError:
        raise CliError(
            f"{text!r} is not a time.",
            "it must be 0 or more, with or without a unit",
            "5s, 500ms, 2m, 0",
        ) from None


def moment(text: str | float) -> float:
    """Convert a time in the past to seconds since 1970: the `type=` of an option.

    It is a duration before now, or a date with or without a time, in UTC unless it names a zone.
    """
    words = str(text).strip()
    if re.fullmatch(r"\d+(\.\d+)?(ms|s|m|h|d)", words):
        return time.time() - duration(words)
    try:
        found = datetime.fromisoformat(words)
    except ValueError:
        raise CliError(
            f"{text!r} is not a moment.",
            "it must be a time before now, or a date",
            "1h, 7d, 2026-11-18, 2026-11-18T09:30",
        ) from None
    if found.tzinfo is None:
        found = found.replace(tzinfo=UTC)
    return found.timestamp()


class Way(Struct, frozen=True):
    """The user's choices about the connection to the server."""

    protocol: Protocol | None
    revision: str | None = None
    timeout: float = 30.0
    headers: dict[str, str] = {}

    def protocol_to(self, target: Target) -> Protocol:
        if self.protocol or self.revision:
            return self.protocol or "mcp"
        if target.kind == "command":
            return "mcp"
        if target.kind == "url" and is_of_mcp(target.text):
            return "mcp"
        return "rpc"

    def to_tasks(self) -> "Way":
        """Return the same choices with MCP, the only protocol that has tasks."""
        if self.protocol == "rpc":
            raise CliError("JSON-RPC does not have tasks.", "only MCP has them", "drop --as rpc")
        return replace(self, protocol="mcp")

    def address(self, target: Target) -> str:
        """Return the URL of the endpoint that speaks the protocol."""
        return target.address(f"/{self.protocol_to(target)}")


def _headers(
    _context: click.Context, _option: click.Parameter, lines: tuple[str, ...]
) -> dict[str, str]:
    found = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip() or any(sign in line for sign in "\r\n\0"):
            why = "expected a name, a colon and a value on one line"
            next_step = "--header 'Authorization: Bearer ...'"
            raise CliError(f"{line!r} is not a header.", why, next_step)
        found[name.strip()] = value.strip()
    return found


class _Dialect(click.Choice[str]):
    """`rpc` or `mcp`. `jsonrpc` is an alias of `rpc`."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value == "jsonrpc":
            value = "rpc"
        return super().convert(value, param, ctx)


# The option `--as`, as the parameter `protocol`.
as_option = click.option(
    "--as",
    "protocol",
    type=_Dialect(["rpc", "mcp"]),
    help="Protocol. [default: the target decides]",
)
# The option `--header`, as the parameter `headers`.
header_option = click.option(
    "--header",
    "headers",
    multiple=True,
    callback=_headers,
    metavar="'NAME: VALUE'",
    help="HTTP header; may be repeated.",
)
_OPTIONS = (
    as_option,
    click.option(
        "--revision",
        metavar="DATE",
        help="MCP revision: 2025-03-26. [default: the newest that both speak]",
    ),
    click.option(
        "--timeout",
        type=duration,
        default=30.0,
        help="Time for a call, including its retries. [default: 30s]",
    ),
    header_option,
)


def way_options(function: Callable[..., object]) -> Callable[..., object]:
    """Add --as, --revision, --timeout and --header, as the parameter `way`."""

    @wraps(function)
    def verb(
        *,
        protocol: Protocol | None,
        revision: str | None,
        timeout: float,
        headers: dict[str, str],
        **rest: object,
    ) -> object:
        if protocol == "rpc" and revision is not None:
            raise CliError(
                "JSON-RPC has no revisions.",
                "--revision is for MCP",
                "drop --revision, or --as rpc",
            )
        return function(way=Way(protocol, revision, timeout, headers), **rest)

    for option in reversed(_OPTIONS):
        verb = option(verb)
    return verb


# --- a client of it -------------------------------------------------------------------------------

# Seconds for the calls in flight of an app in this process when the verb ends.
GRACE = 10.0
# The same after Ctrl-C.
HURRY = 1.0


async def stored_auth(url: str, headers: Mapping[str, str]) -> "Stored | None":
    """Return the stored login of an address, or None.

    There is none if a header authorizes the requests.
    """
    if not login_folder().is_dir() or any(name.lower() == "authorization" for name in headers):
        return None
    from wirecall.auth import Stored  # late: few targets need it

    stored = Stored()
    assert stored.store is not None
    if not await stored.store.logins(url):
        return None
    return stored


async def http_client(
    url: str, headers: Mapping[str, str], *, login: str | None = None
) -> "HttpClient":
    """Return a client for raw messages, which sends the stored login of the address.

    `login` is the address of the login, if it is another one.
    """
    from wirecall.transports.http_client import HttpClient

    place = login or url
    stored = await stored_auth(place, headers)
    if stored is None:
        return HttpClient(url, headers=headers)
    from wirecall.auth.client import authorization

    return HttpClient(url, headers=headers, auth=authorization(stored, place))


@asynccontextmanager
async def opened(
    target: Target, way: Way, *, app: App | None = None, handlers: Mapping[str, Any] | None = None
) -> AsyncIterator[Any]:
    """Open a client of the target. `app` is the target's app, if the verb has loaded it already.

    `handlers` answer what an MCP server asks; they are options of `connect`.
    """
    from wirecall.client.connect import connect

    protocol = way.protocol_to(target)
    where: Any = list(target.command)
    more: Any = {}
    if protocol == "mcp":
        more = {"revision": way.revision, **(handlers or {})}
    if target.kind == "file":
        where = app or target.app()
    elif target.kind == "url":
        where = way.address(target)
        more["wrap"] = FirstContact
        more["auth"] = await stored_auth(where, way.headers)
    elif target.kind == "link":
        where = target.text
        more["wrap"] = FirstContact
    client = connect(where, protocol=protocol, timeout=way.timeout, headers=way.headers, **more)
    noise = _Noise(target.kind == "command")
    with redirect_stdout(sys.stderr), noise:  # handlers in this process may print
        try:
            await client.__aenter__()
        except CallFailed as error:
            raise _unopened(error, target, noise) from error
        grace = GRACE
        try:
            yield client
        except asyncio.CancelledError:  # Ctrl-C: end soon, and do not log the interrupted calls
            grace = HURRY
            noise.muted = True
            raise
        finally:
            await client.aclose()
            if isinstance(where, App):
                await where.aclose(grace)


class FirstContact:
    """A link whose first message is sent once.

    Once the server was reached, the client retries as usual.
    """

    def __init__(self, link: "Link") -> None:
        self._link = link
        self._is_reached = False
        self.open = link.open
        self.aclose = link.aclose

    async def exchange(self, exchange: "Exchange") -> None:
        try:
            await self._link.exchange(exchange)
        except NotSent as error:
            if self._is_reached or error.status is not None:
                raise
            raise NotReached(str(error)) from error
        self._is_reached = True


class _Noise(logging.Filter):
    """Notes whether the client logs output that is not a message.

    Hides records that the verb reports.
    """

    def __init__(self, listens: bool) -> None:
        super().__init__()
        self.seen = self.muted = False
        self._listens = listens

    def filter(self, record: logging.LogRecord) -> bool:
        self.seen = self.seen or any(isinstance(each, Unreadable) for each in record.args or ())
        if self.muted or record.levelno < self._level:
            return False
        # The verb reports a cancelled call itself, and its traceback shows no mistake.
        error = record.exc_info[1] if record.exc_info is not None else None
        return not isinstance(error, asyncio.CancelledError)

    def __enter__(self) -> None:
        self._level = logger.getEffectiveLevel()
        logger.addFilter(self)
        if self._listens:  # for an app in this process it would cost a record per call
            logger.setLevel(logging.DEBUG)

    def __exit__(self, *_: object) -> None:
        logger.setLevel(self._level)
        logger.removeFilter(self)


_ASKED = {
    "url": "is this its address",
    "link": "is this its address",
    "command": "does it serve on stdio",
    "file": "is this its file",
}


def _unopened(error: CallFailed, target: Target, noise: _Noise) -> CliError:
    """Return the error of a client that could not be opened: no call has run."""
    failure = failure_of(error)
    if target.kind == "command" and noise.seen:
        failure = CliError(
            "The server prints text that is not a message.",
            f"on its stdout; {error}",
            "a server on stdio prints only messages on stdout: print everything else on stderr",
            exit=Exit.PROTOCOL,
            type="noise",
        )
    elif target.kind == "command" and isinstance(error, NotSent | ConnectionLost):
        what = "The server process did not start, or ended before it answered."
        failure = Unreachable(what, error, "run the command alone to see more")
    elif isinstance(error, ConnectionLost | TimedOut):
        next_step = f"{_ASKED[target.kind]}, and does it speak this protocol? (--as rpc|mcp)"
        failure = Unreachable("The server does not answer.", error, next_step)
    elif failure.exit == Exit.UNKNOWN:  # the answer does not fit the opening of the protocol
        failure = failure_of(BadAnswer(str(error)))
    failure.facts["ran"] = "no"
    return failure


@contextmanager
def asking() -> Iterator[None]:
    """Ask a server only for its offers.

    Nothing is called, so no outcome is unknown if it does not answer.
    """
    try:
        yield
    except (ConnectionLost, TimedOut) as error:
        what = "The server does not answer."
        next_step = "does it speak this protocol? (--as rpc|mcp, --timeout)"
        raise Unreachable(what, error, next_step, ran="no") from error


def unlisted(target: Target) -> CliError:
    """Return the error about a server of JSON-RPC that does not list its methods."""
    return CliError(
        "The server does not list its methods.",
        "it has no rpc.discover, the method of OpenRPC for that",
        f"{target.line('call', 'METHOD')} still works; for MCP: --as mcp",
        exit=Exit.REMOTE,
        type="no_discovery",
    )
