"""How a verb reaches its target: the options that all of them share, and a client that is opened by `async with`.

Plain JSON-RPC is spoken to files and addresses, MCP to addresses that end in /mcp and to commands, as nearly every server on
stdio speaks it. `--as` chooses otherwise, and so does `--revision`, which only MCP has. An idempotency key belongs to one
protocol: the ledger keeps `charge` and `tools/call:charge` apart.
"""

import asyncio
import logging
import re
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, redirect_stdout
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import click
from msgspec import Struct
from msgspec.structs import replace

from wirecall.app import App
from wirecall.cli.failures import CliError, Exit, NotReached, Unreachable, failure_of
from wirecall.errors import BadAnswer, CallFailed, ConnectionLost, NotSent, TimedOut
from wirecall.files import login_folder
from wirecall.logs import logger
from wirecall.protocol.messages import Unreadable

if TYPE_CHECKING:
    from wirecall.auth import Stored
    from wirecall.cli.targets import Target
    from wirecall.client.exchange import Exchange, Link
    from wirecall.transports.http_client import HttpClient

_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
GRACE = 10.0  # seconds for the calls in flight of an app in this process when the verb ends
HURRY = 1.0  # the same after Ctrl-C

Protocol = Literal["jsonrpc", "mcp"]


def duration(text: str | float) -> float:
    """Convert a time above 0 to seconds: the `type=` of an option."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|)", str(text).strip())
    if match is None or float(match[1]) == 0:
        raise CliError(f"{text!r} is not a time.", "it must be above 0, with or without a unit", "30s, 500ms, 2m, 24h")
    return float(match[1]) * _UNITS[match[2]]


# --- the options ----------------------------------------------------------------------------------------------------


class Way(Struct, frozen=True):
    """The user's choices about the way to the server."""

    protocol: Protocol | None
    revision: str | None
    timeout: float
    headers: dict[str, str]

    def protocol_to(self, target: "Target") -> Protocol:
        if self.protocol or self.revision:
            return self.protocol or "mcp"
        is_endpoint = target.kind == "url" and urlsplit(target.text).path.rstrip("/").endswith("/mcp")
        return "mcp" if target.kind == "command" or is_endpoint else "jsonrpc"

    def to_tasks(self) -> "Way":
        """Return the same way over MCP, which alone has tasks."""
        if self.protocol == "jsonrpc":
            raise CliError("JSON-RPC does not have tasks.", "only MCP has them", "drop --as rpc")
        return replace(self, protocol="mcp")

    def address(self, target: "Target") -> str:
        """Return the URL of the endpoint that speaks the protocol."""
        return target.address("/mcp" if self.protocol_to(target) == "mcp" else "/rpc")


_OPTIONS = (
    click.option("--as", "protocol", type=click.Choice(["rpc", "mcp"]), help="Protocol. [default: the target decides]"),
    click.option("--revision", metavar="DATE", help="MCP revision: 2025-03-26. [default: the newest that both speak]"),
    click.option("--timeout", type=duration, default=30.0, help="Time for a call, including its retries. [default: 30s]"),
    click.option("--header", "headers", multiple=True, metavar="'NAME: VALUE'", help="HTTP header; may be repeated."),
)


def way_options(function: Callable[..., object]) -> Callable[..., object]:
    """Add --as, --revision, --timeout and --header, as the parameter `way`."""

    @wraps(function)
    def verb(
        *, protocol: str | None, revision: str | None, timeout: float, headers: tuple[str, ...], **rest: object
    ) -> object:
        found = {}
        for line in headers:
            name, colon, value = line.partition(":")
            if not colon or not name.strip():
                next_step = "--header 'Authorization: Bearer ...'"
                raise CliError(f"{line!r} is not a header.", "expected a name, a colon and a value", next_step)
            found[name.strip()] = value.strip()
        kind: Protocol | None = "mcp" if protocol == "mcp" else "jsonrpc" if protocol else None
        return function(way=Way(kind, revision, timeout, found), **rest)

    for option in reversed(_OPTIONS):
        verb = option(verb)
    return verb


# --- the client -----------------------------------------------------------------------------------------------------


async def stored_auth(url: str, headers: Mapping[str, str]) -> "Stored | None":
    """Return the login that is kept for an address; None if there is none, or if a header authorizes the requests."""
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
    target: "Target", way: Way, *, app: App | None = None, handlers: Mapping[str, Any] | None = None
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
    """A link whose first message is sent once. When the server was reached, the client retries as usual."""

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


def _unopened(error: CallFailed, target: "Target", noise: _Noise) -> CliError:
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
