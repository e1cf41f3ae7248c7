"""The server of a verb, its ledger, and the way to it. One grammar for all verbs:

    shop.py, shop.py:app     an app in a Python file, in this process
    http://…, https://…      a server's address; without a path it is a wirecall server: /rpc, or /mcp with --as mcp
    -- command …             a server on the stdin and stdout of a process; all words after `--` are its command line

1. Verbs are made with `cls=TargetCommand` and take the target first, by `target_argument`. Everything that the user's file
   prints goes to stderr: stdout belongs to the verb. `app_of` is the app as `wirecall serve` would serve it here.
2. The ledger of an app: its option, its driver, and errors that say what is wrong with its store.
3. `way_options` are the options of all verbs that call a server, and `opened` is a client of it. Plain JSON-RPC is spoken to
   files and addresses, MCP to addresses that end in /mcp and to commands, as nearly every server on stdio speaks it. `--as`
   chooses otherwise, and so does `--revision`, which only MCP has. An idempotency key belongs to one protocol: the ledger
   keeps `charge` and `tools/call:charge` apart.
"""

import asyncio
import logging
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, redirect_stdout, suppress
from functools import wraps
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import click
from msgspec import Struct
from msgspec.structs import replace

from wirecall.app import App
from wirecall.cli.failures import CliError, Exit, NotReached, Unreachable, failure_of, nearest
from wirecall.config import load_config
from wirecall.errors import BadAnswer, CallFailed, ConnectionLost, NotSent, TimedOut, UsageError
from wirecall.files import login_folder
from wirecall.ledger.base import Ledger, LedgerDown, open_ledger
from wirecall.logs import logger
from wirecall.protocol.messages import Unreadable

if TYPE_CHECKING:
    from wirecall.auth import Stored
    from wirecall.client.exchange import Exchange, Link
    from wirecall.transports.http_client import HttpClient

# Stands for the words after `--`; no argument of a program can contain a null character.
_COMMAND = "\0command"


class Target(Struct, frozen=True):
    """A server, as the user named it."""

    kind: Literal["file", "url", "command"]
    text: str  # of a file: the path; of a command: its words, for people
    name: str = ""  # of the app in the file
    command: tuple[str, ...] = ()

    def app(self) -> App:
        """Load the app that the file defines, for verbs that need one."""
        if self.kind != "file":
            raise CliError(f"{self.text} is not a file.", "this verb needs an app in a Python file", "name one: app.py")
        path, name = self.text, self.name
        if not Path(path).is_file():
            raise _no_file(path, name)
        module = _load(path)
        apps = {key: value for key, value in vars(module).items() if isinstance(value, App)}
        if name in apps:
            return apps[name]
        first = next(iter(apps), "")
        if name:
            found = getattr(module, name, None)
            why = "there is no such name in the file" if found is None else f"it is of type {type(found).__name__}"
            next_step = f"name {path}:{first}" if apps else "name a wirecall.App defined in that file"
            raise CliError(f"{path}:{name} is not an app.", why, next_step, type="target")
        if not apps:
            why, next_step = "no wirecall.App is defined at its top level", 'add: app = App("name")'
            raise CliError(f"{path} has no app.", why, next_step, type="target")
        if len(apps) > 1:
            why = f"{path} has {len(apps)} apps: {', '.join(apps)}"
            raise CliError("Which app?", why, f"name one: {path}:{first}", type="target")
        return apps[first]

    def address(self, path: str, *, keep_root: bool = True) -> str:
        """Return the URL of an endpoint. An address without a path is a wirecall server, which has its endpoint at `path`.

        A lone slash is a path, where a server of another kind may answer; without `keep_root` it is none.
        """
        parts = urlsplit(self.text)
        return parts._replace(path=path).geturl() if parts.path in ("", "" if keep_root else "/") else self.text

    def of(self, path: str) -> str:
        """Return the target with this path to its file."""
        return f"{path}:{self.name}" if self.name else path

    def line(self, verb: str, *words: str) -> str:
        """Return the command line of another verb on this target, for people."""
        parts = [verb, *words, "--", self.text] if self.kind == "command" else [verb, self.of(self.text), *words]
        return " ".join(["wirecall", *filter(None, parts)])


class TargetCommand(click.Command):
    """A command whose target may be the words after `--`: its first argument, unless `is_last`."""

    is_last = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[_COMMAND] = tuple(args[at + 1 :])
            args = [*args[:at], _COMMAND] if self.is_last else [_COMMAND, *args[:at]]
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("TARGET"):
            formatter.write_dl(
                [
                    ("shop.py, shop.py:app", "an app in a Python file"),
                    ("http://127.0.0.1:8420", "a server; without a path it is a wirecall server"),
                    ("-- COMMAND ...", "the command line of a server on stdio"),
                ]
            )

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND ...]"]


def parse(text: str) -> Target:
    """Return the target that a text names."""
    # 1. The words after `--`.
    if text == _COMMAND:
        command = click.get_current_context().meta[_COMMAND]
        if not command:
            raise CliError("There is no command after `--`.", "it is the command line of a server", "-- python server.py")
        return Target("command", " ".join(command), command=command)
    if not text.strip():
        raise CliError("The target is empty.", "expected a file or an address", "app.py, http://..., or -- command ...")

    # 2. An address that can be split into its parts. Whether a server is there shows later.
    if text.lower().startswith(("http://", "https://")):
        try:
            split = urlsplit(text)
            host, _ = split.hostname, split.port  # both may raise
            why = "" if host else "it has no host"
            why = "there is a space in it" if any(sign.isspace() for sign in text) else why
        except ValueError as error:
            why = str(error)
        if why:
            raise CliError(f"{text!r} is not an address.", why, "http://127.0.0.1:8420, or .../rpc, .../mcp", type="target")
        return Target("url", split._replace(scheme=split.scheme.lower()).geturl())
    if "://" in text:
        raise CliError(f"{text} is not a target.", "servers are reached by http and https", "http://..., or a file: app.py")

    # 3. A file.
    path, _, name = text.partition(":")
    return Target("file", path, name)


# The first argument of a verb, required or not.
target_argument = click.argument("target", type=parse, metavar="TARGET")
optional_target_argument = click.argument("target", type=parse, required=False, metavar="[TARGET]")


# --- files ----------------------------------------------------------------------------------------------------------

_GIVE = "give the path of a Python file"


def _no_file(path: str, name: str) -> CliError:
    if Path(path).exists():
        what = f"{path} is a folder." if Path(path).is_dir() else f"{path} is not a file."
        return CliError(what, "an app is in a Python file", f"{_GIVE}: app.py", type="target")
    what = f"There is no file {path}."
    if name.partition("/")[0].isdecimal():
        return CliError(what, f"{path}:{name} looks like an address", f"http://{path}:{name}", type="target")
    folder = Path(path).parent
    beside = [str(folder / each.name) for each in folder.glob("*.py")] if folder.is_dir() else []
    near = nearest(str(Path(path)), beside)
    why = f"the nearest is {near}" if near else f"looked in {Path.cwd()}"
    return CliError(what, why, f"{_GIVE}: {near or 'app.py'}", type="target")


def _load(path: str) -> ModuleType:
    """Run the user's file as a module; an error in it names the line of that file."""
    spec = spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise CliError(f"{path} is not a Python file.", "its name does not end in .py", _GIVE, type="target")
    module = module_from_spec(spec)
    # As `python FILE` would: the file's neighbours can be imported, and pickling finds the module by its name.
    sys.modules[spec.name] = module
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        with redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        line, trace = None, error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename in (path, str(Path(path).resolve())):
                line = trace.tb_lineno
            trace = trace.tb_next
        why, next_step = f"{type(error).__name__}: {error}", "correct the file and try again"
        if isinstance(error, SyntaxError):
            shown = (error.text or "").strip() if "codec" not in error.msg else ""
            line, why = error.lineno, f"{error.msg}\n{shown}".strip()
        elif isinstance(error, ModuleNotFoundError) and error.name:
            next_step = f"install {error.name.partition('.')[0]} for {sys.executable}, or correct the import"
        elif isinstance(error, PermissionError):
            next_step = "let this user read it"
        elif isinstance(error, SystemExit):
            next_step = 'put the code that ends the program under: if __name__ == "__main__":'
        elif isinstance(error, UsageError):
            next_step = "correct it as the text says"
        why = f"line {line}: {why}" if line else why
        raise CliError(f"{path} cannot be loaded.", why, next_step, type="target") from error
    return module


# --- the app as it is served here -----------------------------------------------------------------------------------


def app_of(target: Target, ledger: str | None = None) -> App | None:
    """Return the app in a file, as `wirecall serve` would serve it here; None for a server elsewhere."""
    if target.kind == "file":
        app, config = target.app(), load_config()
        app.configure(ledger=ledger or config.get("ledger.url"), audit=config.audit, limits=config.limits(app.limits))
        return app
    if ledger is not None:
        raise CliError("--ledger is for an app in a file.", f"{target.text} has a ledger of its own", "drop --ledger")
    return None


# --- its ledger -----------------------------------------------------------------------------------------------------

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
    "--ledger", metavar="URL", help="Ledger of an app in a file: sqlite:PATH, redis://..., postgresql://..., memory:"
)


SQLITE_FILE = b"SQLite format 3\0"  # the first bytes of every SQLite file (sqlite.org/fileformat.html, section 1.3)


def check_ledger(url: str) -> None:
    """Refuse a ledger whose driver is not installed, or whose path is a folder or a file of another kind."""
    scheme, _, path = url.partition(":")
    driver, extra = DRIVERS.get(scheme, ("", ""))
    # Found, not imported: a driver takes longer to import than most verbs take to run.
    if driver and find_spec(driver) is None:
        why = f"ledgers of {scheme}: are reached with the package {driver}"
        raise CliError(f"{driver} is not installed.", why, f'pip install "wirecall[{extra}]"', type="ledger")
    if url.removesuffix("//") == "sqlite:":
        raise CliError(f"The ledger {url} has no path.", "SQLite keeps it in a file", "sqlite:ledger.db", type="ledger")
    if scheme == "sqlite":
        file, begin = Path(path.removeprefix("//")), b""
        if file.is_dir():
            raise CliError(
                f"The ledger {path} is a folder.", "SQLite keeps it in a file", "name a file in it", type="ledger"
            )
        with suppress(OSError), file.open("rb") as opened:  # a new ledger has no file yet
            begin = opened.read(len(SQLITE_FILE))
        if begin and begin != SQLITE_FILE:
            what, why = f"The ledger {path} is not an SQLite file.", "a server would refuse every command"
            raise CliError(what, why, "name another file", exit=Exit.UNREACHABLE, type="ledger_unavailable")


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """Explain why a ledger cannot be used. A store that cannot be reached is exit 4."""
    check_ledger(url)
    try:
        yield
    except LedgerDown as error:
        failure = failure_of(UsageError(str(error)))
        if not failure.why and not failure.next:  # otherwise the error has a why and a fix of its own
            failure = CliError(f"The ledger {without_password(url)} cannot be used.", " ".join(failure.what.split()))
        next_step = failure.next or "is it running, and is this its URL?"
        what, why, kind = failure.what, failure.why, "ledger_unavailable"
        raise CliError(what, why, next_step, exit=Exit.UNREACHABLE, type=kind) from error


@asynccontextmanager
async def opened_ledger(url: str) -> AsyncIterator[Ledger]:
    """Open a ledger that exists."""
    with reaching(url):
        ledger = await open_ledger(url)
        try:
            yield ledger
        finally:
            await ledger.aclose()


async def ready(app: App) -> None:
    """Open the ledger of an app in this process before a command needs it, so that an error can be explained here."""
    with reaching(app.ledger_url):
        await app.ledger()


def without_password(url: str) -> str:
    password = urlsplit(url).password if "://" in url else None
    return url.replace(f":{password}@", ":***@") if password else url


# --- the way to it --------------------------------------------------------------------------------------------------

_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

Protocol = Literal["jsonrpc", "mcp"]


def duration(text: str | float) -> float:
    """Convert a time above 0 to seconds: the `type=` of an option."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|)", str(text).strip())
    if match is None or float(match[1]) == 0:
        raise CliError(f"{text!r} is not a time.", "it must be above 0, with or without a unit", "30s, 500ms, 2m, 24h")
    return float(match[1]) * _UNITS[match[2]]


class Way(Struct, frozen=True):
    """The user's choices about the way to the server."""

    protocol: Protocol | None
    revision: str | None = None
    timeout: float = 30.0
    headers: dict[str, str] = {}

    def protocol_to(self, target: Target) -> Protocol:
        if self.protocol or self.revision:
            return self.protocol or "mcp"
        is_endpoint = target.kind == "url" and urlsplit(target.text).path.rstrip("/").endswith("/mcp")
        return "mcp" if target.kind == "command" or is_endpoint else "jsonrpc"

    def to_tasks(self) -> "Way":
        """Return the same way over MCP, which alone has tasks."""
        if self.protocol == "jsonrpc":
            raise CliError("JSON-RPC does not have tasks.", "only MCP has them", "drop --as rpc")
        return replace(self, protocol="mcp")

    def address(self, target: Target) -> str:
        """Return the URL of the endpoint that speaks the protocol."""
        return target.address("/mcp" if self.protocol_to(target) == "mcp" else "/rpc")


def _headers(_context: click.Context, _option: click.Parameter, lines: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip() or any(sign in line for sign in "\r\n\0"):
            why, next_step = "expected a name, a colon and a value on one line", "--header 'Authorization: Bearer ...'"
            raise CliError(f"{line!r} is not a header.", why, next_step)
        found[name.strip()] = value.strip()
    return found


# The option `--as`, as the parameter `protocol`.
as_option = click.option(
    "--as",
    "protocol",
    type=click.Choice(["rpc", "mcp"]),
    callback=lambda _context, _option, name: "jsonrpc" if name == "rpc" else name,
    help="Protocol. [default: the target decides]",
)
_OPTIONS = (
    as_option,
    click.option("--revision", metavar="DATE", help="MCP revision: 2025-03-26. [default: the newest that both speak]"),
    click.option("--timeout", type=duration, default=30.0, help="Time for a call, including its retries. [default: 30s]"),
    click.option(
        "--header",
        "headers",
        multiple=True,
        callback=_headers,
        metavar="'NAME: VALUE'",
        help="HTTP header; may be repeated.",
    ),
)


def way_options(function: Callable[..., object]) -> Callable[..., object]:
    """Add --as, --revision, --timeout and --header, as the parameter `way`."""

    @wraps(function)
    def verb(
        *, protocol: Protocol | None, revision: str | None, timeout: float, headers: dict[str, str], **rest: object
    ) -> object:
        if protocol == "jsonrpc" and revision is not None:
            raise CliError("JSON-RPC has no revisions.", "--revision is for MCP", "drop --revision, or --as rpc")
        return function(way=Way(protocol, revision, timeout, headers), **rest)

    for option in reversed(_OPTIONS):
        verb = option(verb)
    return verb


# --- a client of it -------------------------------------------------------------------------------------------------

GRACE = 10.0  # seconds for the calls in flight of an app in this process when the verb ends
HURRY = 1.0  # the same after Ctrl-C


async def stored_auth(url: str, headers: Mapping[str, str]) -> "Stored | None":
    """Return the stored login of an address, or None if it is missing or a header authorizes the requests."""
    if not login_folder().is_dir() or any(name.lower() == "authorization" for name in headers):
        return None
    from wirecall.auth import Stored  # late: few targets need it

    stored = Stored()
    assert stored.store is not None
    return stored if await stored.store.logins(url) else None


async def http_client(url: str, headers: Mapping[str, str]) -> "HttpClient":
    """Return a client for raw messages, which sends the login that is kept for the address."""
    from wirecall.transports.http_client import HttpClient

    stored = await stored_auth(url, headers)
    if stored is None:
        return HttpClient(url, headers=headers)
    from wirecall.auth.client import authorization

    return HttpClient(url, headers=headers, auth=authorization(stored, url))


@asynccontextmanager
async def opened(
    target: Target, way: Way, *, app: App | None = None, handlers: Mapping[str, Any] | None = None
) -> AsyncIterator[Any]:
    """Open a client of the target. `app` is the target's app, if the verb has loaded it already.

    `handlers` answer what an MCP server asks; they are options of `connect`.
    """
    from wirecall.client.connect import connect

    protocol = way.protocol_to(target)
    where: Any = way.address(target) if target.kind == "url" else list(target.command)
    if target.kind == "file":
        where = app or target.app()
    more: Any = {"revision": way.revision, **(handlers or {})} if protocol == "mcp" else {}
    if target.kind == "url":
        more["wrap"] = FirstContact
        more["auth"] = await stored_auth(where, way.headers)
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
        except asyncio.CancelledError:  # Ctrl-C: end soon, and do not log the calls that were cut
            grace, noise.muted = HURRY, True
            raise
        finally:
            await client.aclose()
            if isinstance(where, App):
                await where.aclose(grace)


class FirstContact:
    """A link whose first message is sent once. Once the server was reached, the client retries as usual."""

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
    """Notes whether the server printed text that is not a message, which the client logs. Hides what the verb reports."""

    def __init__(self, listens: bool) -> None:
        super().__init__()
        self.seen = self.muted = False
        self._listens = listens

    def filter(self, record: logging.LogRecord) -> bool:
        self.seen = self.seen or any(isinstance(each, Unreadable) for each in record.args or ())
        # The verb reports a cancelled call itself, and its traceback shows no mistake.
        is_cut = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
        return record.levelno >= self._level and not self.muted and not is_cut

    def __enter__(self) -> None:
        self._level = logger.getEffectiveLevel()
        logger.addFilter(self)
        if self._listens:  # for an app in this process it would cost a record per call
            logger.setLevel(logging.DEBUG)

    def __exit__(self, *_: object) -> None:
        logger.setLevel(self._level)
        logger.removeFilter(self)


_ASKED = {"url": "is this its address", "command": "does it serve on stdio", "file": "is this its file"}


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
        failure = Unreachable(what, error, "run the command by itself to see more")
    elif isinstance(error, ConnectionLost | TimedOut):
        next_step = f"{_ASKED[target.kind]}, and does it speak this protocol? (--as rpc|mcp)"
        failure = Unreachable("The server does not answer.", error, next_step)
    elif failure.exit == Exit.UNKNOWN:  # the answer does not fit the opening of the protocol
        failure = failure_of(BadAnswer(str(error)))
    failure.facts["ran"] = "no"
    return failure


@contextmanager
def asking() -> Iterator[None]:
    """Ask a server only for what it offers. Nothing is called, so no outcome is unknown if it does not answer."""
    try:
        yield
    except (ConnectionLost, TimedOut) as error:
        what, next_step = "The server does not answer.", "does it speak this protocol? (--as rpc|mcp, --timeout)"
        raise Unreachable(what, error, next_step, ran="no") from error


def unlisted(target: Target) -> CliError:
    """Return the error about a server of JSON-RPC that does not list its methods."""
    return CliError(
        "The server does not list its methods.",
        "it has no rpc.discover, the method of OpenRPC for that",
        f"{target.line('call', 'METHOD')} works all the same; for MCP: --as mcp",
        exit=Exit.REMOTE,
        type="no_discovery",
    )
