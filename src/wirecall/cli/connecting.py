"""How a verb reaches its target: the options that all of them share, and a client that is opened by `async with`.

Plain JSON-RPC is spoken to files and addresses, MCP to addresses that end in /mcp and to commands, as nearly every server on
stdio speaks it; `--as` says otherwise, and so does `--revision`, which only MCP has. One name for one protocol matters: a
key is good for one of them, as the ledger tells `charge` and `tools/call:charge` apart.
"""

import asyncio
import logging
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, redirect_stdout
from functools import wraps
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import click
from msgspec import Struct

from wirecall import App
from wirecall.cli.failures import Exit, Failure, failure_of
from wirecall.cli.targets import Target
from wirecall.errors import BadAnswer, CallFailed, ConnectionLost, NotSent, TimedOut
from wirecall.logs import logger
from wirecall.protocol.replies import Unreadable

_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration(text: str | float) -> float:
    """Seconds, above 0: the `type=` of an option."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|)", str(text).strip())
    if match is None or float(match[1]) == 0:
        raise Failure(f"{text!r} is not a time.", "it must be above 0, with or without a unit", "30s, 500ms, 2m, 24h")
    return float(match[1]) * _UNITS[match[2]]


DURATION = duration


T = TypeVar("T")


class _Now:
    """What Ctrl-C finds."""

    reading = False
    idle = False
    asked = False  # it was pressed before


class Interrupted(Failure):
    """The user pressed Ctrl-C."""

    def __init__(self, why: str = "", next: str = "") -> None:
        super().__init__("Interrupted.", why, next, exit=Exit.INTERRUPTED, type="interrupted")


@contextmanager
def reading() -> Iterator[None]:
    """Around a read that may wait for long, and stops the event loop meanwhile: Ctrl-C ends it at once."""
    import asyncio

    _Now.reading = True
    try:
        if _Now.asked:  # the loop has not had the time to tell us
            raise asyncio.CancelledError
        yield
    finally:
        _Now.reading = False


@contextmanager
def idle() -> Iterator[None]:
    """Around a wait for the user's input, where Ctrl-C cuts nothing that a server is at work on."""
    _Now.idle = True
    try:
        yield
    finally:
        _Now.idle = False


def run(work: Coroutine[Any, Any, T]) -> T:
    """The outcome of a coroutine, which is cancelled by Ctrl-C: calls under way tell their server so."""
    import asyncio

    from wirecall.transports.child import kill_all

    _Now.asked = False

    async def guarded() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def interrupt(*_: object) -> None:
            if _Now.asked:
                kill_all()  # the servers that were started for this call
                os._exit(Exit.INTERRUPTED)
            _Now.asked = True
            if _Now.reading:
                print(file=sys.stderr, flush=True)  # behind the ^C that a terminal shows
                raise asyncio.CancelledError
            print("" if _Now.idle else "\nCancelling; Ctrl-C again stops at once.", file=sys.stderr, flush=True)
            loop.call_soon_threadsafe(task.cancel)

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            return await work
        finally:
            signal.signal(signal.SIGINT, before)

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        raise Interrupted from None


Protocol = Literal["jsonrpc", "mcp"]

GRACE = 10.0  # seconds that an app in this process has to finish what is under way
HURRY = 1.0  # the same after Ctrl-C


class Way(Struct, frozen=True):
    """What the user said about the way to the server."""

    protocol: Protocol | None = None
    revision: str | None = None
    timeout: float = 30.0
    headers: dict[str, str] = {}

    def protocol_to(self, target: Target) -> Protocol:
        if self.protocol or self.revision:
            return self.protocol or "mcp"
        is_mcp = target.kind == "command" or (
            target.kind == "url" and urlsplit(target.text).path.rstrip("/").endswith("/mcp")
        )
        return "mcp" if is_mcp else "jsonrpc"


def way_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """--as, --revision, --timeout and --header, as the parameter `way`."""

    @wraps(function)
    def verb(*, protocol: str | None, revision: str | None, timeout: float, headers: tuple[str, ...], **rest: Any) -> Any:
        kind: Any = {"rpc": "jsonrpc", "mcp": "mcp", None: None}[protocol]
        return function(way=Way(kind, revision, timeout, _headers(headers)), **rest)

    for option in reversed(
        (
            click.option(
                "--as", "protocol", type=click.Choice(["rpc", "mcp"]), help="Speak JSON-RPC or MCP; else the target decides."
            ),
            click.option("--revision", metavar="DATE", help="Revision of MCP, such as 2025-03-26; else the newest of both."),
            click.option(
                "--timeout", type=DURATION, default=30.0, help="Time of a call, its retries included. [default: 30s]"
            ),
            click.option(
                "--header",
                "headers",
                multiple=True,
                metavar="'NAME: VALUE'",
                help="Header of every HTTP request; may be repeated.",
            ),
        )
    ):
        verb = option(verb)
    return verb


def _headers(lines: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise Failure(f"{line!r} is not a header.", "there is no name and colon", "--header 'Authorization: Bearer ...'")
        found[name.strip()] = value.strip()
    return found


@asynccontextmanager
async def opened(target: Target, way: Way, *, app: App | None = None, **more: Any) -> AsyncIterator[Any]:
    """A client of the target. `app` is the target's own, if the verb has loaded it already."""
    from wirecall.client.connect import connect

    protocol = way.protocol_to(target)
    where: Any = address(target, protocol) if target.kind == "url" else list(target.command)
    if target.kind == "file":
        where = app or target.app()
    if protocol == "mcp":
        more["revision"] = way.revision
    client = connect(where, protocol=protocol, timeout=way.timeout, headers=way.headers, **more)
    noise = _Noise(target.kind == "command")
    with redirect_stdout(sys.stderr), noise:  # what handlers print in this process
        try:
            await client.__aenter__()
        except CallFailed as error:
            raise _unopened(error, target, noise) from error
        grace = GRACE
        try:
            yield client
        except asyncio.CancelledError:  # Ctrl-C: whoever pressed it does not want to wait, nor to read how calls were cut
            grace, noise.muted = HURRY, True
            raise
        finally:
            await client.aclose()
            if isinstance(where, App):
                await where.aclose(grace)


def address(target: Target, protocol: Protocol) -> str:
    """The URL of an endpoint. An address without a path is one of our servers."""
    parts = urlsplit(target.text)
    if parts.path or not parts.netloc:
        return target.text
    return parts._replace(path="/mcp" if protocol == "mcp" else "/rpc").geturl()


class _Noise(logging.Filter):
    """Remembers that the server said something which is no message: the client tells that to its log. And keeps from the
    log what the verb itself tells."""

    def __init__(self, listens: bool) -> None:
        super().__init__()
        self.seen = self.muted = False
        self._listens = listens

    def filter(self, record: logging.LogRecord) -> bool:
        self.seen = self.seen or any(isinstance(each, Unreadable) for each in record.args or ())
        # That a call was cut is what the verb tells, and where it was cut is nobody's fault.
        is_cut = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
        return record.levelno >= self._level and not self.muted and not is_cut

    def __enter__(self) -> None:
        self._level = logger.getEffectiveLevel()
        logger.addFilter(self)
        if self._listens:  # to an app in this process it would cost a record per call
            logger.setLevel(logging.DEBUG)

    def __exit__(self, *_: object) -> None:
        logger.setLevel(self._level)
        logger.removeFilter(self)


_ASKED = {"url": "is this its address", "command": "does it serve on stdio", "file": "is this its file"}


def _unopened(error: CallFailed, target: Target, noise: _Noise) -> Failure:
    """What fails before the first call has certainly not run."""
    failure = failure_of(error)
    if target.kind == "command" and noise.seen:
        return Failure(
            "The server prints what is no message.",
            f"on its stdout; {error}",
            "a server on stdio prints messages only: everything else belongs on stderr",
            exit=Exit.PROTOCOL,
            type="noise",
            ran="no",
        )
    if target.kind == "command" and isinstance(error, NotSent | ConnectionLost):
        what = "The server process did not start, or ended before it answered."
        failure = Failure(
            what, str(error), "run the command by itself to see more", type="unreachable", exit=Exit.UNREACHABLE
        )
    elif isinstance(error, ConnectionLost | TimedOut):
        failure = Failure("The server does not answer.", str(error), failure.next, type="unreachable", exit=Exit.UNREACHABLE)
        failure.next = f"{_ASKED[target.kind]}, and does it speak this protocol? (--as rpc|mcp)"
    elif failure.exit_code == Exit.UNKNOWN:  # what answers is no greeting
        failure = failure_of(BadAnswer(str(error)))
    failure.facts["ran"] = "no"
    return failure
