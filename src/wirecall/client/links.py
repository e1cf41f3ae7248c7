"""Ways to a server of plain JSON-RPC: over HTTP, over a pipe of lines, and straight into an app.

A link sends a message and gives every answer to its `Exchange`. It sets `exchange.sent` when the server may have the message
and `exchange.begun` when the answer begins, and raises a `CallFailed` when it breaks. It knows nothing of deadlines, retries
and what an answer means.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from wirecall.client.exchange import Exchange, LocalLink
from wirecall.errors import BadAnswer, CallFailed, ConnectionLost, NotSent, Refused
from wirecall.logs import logger
from wirecall.protocol.messages import Arrived, Received, Sending, decode_value, read_messages
from wirecall.stepping import wake
from wirecall.transports.http_client import HttpAnswer, HttpClient

if TYPE_CHECKING:
    from wirecall.transports.stdio import Connect, Connection

JSON = "application/json"
_HEADERS = {"Content-Type": JSON, "Accept": JSON}

# How most servers begin an answer, and a message of their own.
_ANSWER = re.compile(rb'\{"jsonrpc": ?"2\.0", ?"id": ?([0-9]{1,15}),')
_REQUEST = re.compile(rb'\{"jsonrpc": ?"2\.0", ?"(?:id": ?[^,]{1,100}, ?")?method"')


# --- HTTP -----------------------------------------------------------------------------------------------------------


class HttpLink:
    """A POST for each message."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http
        self.open = http.open
        self.aclose = http.aclose

    async def exchange(self, exchange: Exchange) -> None:
        async with self._http.request("POST", exchange.data, _HEADERS, exchange=exchange) as answer:
            exchange.begun = True
            body = await answer.read()
            mark_replayed(exchange, answer)
            if 200 <= answer.status < 300:
                if body:
                    exchange.read(body)
            else:
                refuse_by_status(exchange, answer, body)


def refuse_by_status(exchange: Exchange, answer: HttpAnswer, body: bytes) -> None:
    """Take an answer whose status is not 2xx: JSON-RPC errors in its body count, or else the status.

    401 and 403 refuse the caller, so the body does not count.
    """
    if answer.status in (401, 403):
        exchange.refuse(status_error(answer, body))
        return
    _, messages = read_messages(body) if body else (False, [])
    if messages and all(isinstance(message, Arrived) and message.is_answer for message in messages):
        for entry in exchange.entries:
            entry.retry_after = answer.retry_after or 0.0
        exchange.read(body)
    if not exchange.is_done or not exchange.known:
        exchange.refuse(status_error(answer, body))


def status_error(answer: HttpAnswer, body: bytes) -> CallFailed:
    """Return a status as an error. After 3xx and 4xx the request did not run (RFC 9110, section 15); else it may have.

    303 is the exception: it names the place of the answer to a request that was carried out (section 15.4.4).
    """
    text = f"HTTP {answer.status}"
    if 300 <= answer.status < 400:
        text += f", a redirect to {ascii(answer.headers.get('location', 'nowhere')[:200])[1:-1]}, which is not followed"
    elif body and body.lstrip()[:1] != b"<":
        text += f": {body[:200].decode('utf-8', 'replace')}"
    kind = Refused if 300 <= answer.status < 500 and answer.status != 303 else BadAnswer
    return kind(text, status=answer.status, retry_after=answer.retry_after)


def mark_replayed(exchange: Exchange, answer: HttpAnswer) -> None:
    """Mark the calls that `Idempotent-Replayed` lists by their ids; "true" stands for all. A broken header lists none."""
    told = answer.headers.get("idempotent-replayed", "")
    if told.lower() == "true":
        exchange.replayed()
    elif told:
        with suppress(ValueError, RecursionError):
            ids = decode_value(told)
            exchange.replayed(ids if isinstance(ids, list) else ())


# --- lines ----------------------------------------------------------------------------------------------------------


class Pipe(Protocol):
    """Lines both ways: a child process, or an app in memory."""

    async def open(self, on_line: Callable[[bytes], None], on_end: Callable[[CallFailed], None]) -> None: ...
    async def write(self, line: bytes) -> None: ...
    async def aclose(self) -> None: ...


class LineLink:
    """Messages as lines. A pipe that has ended is opened anew by the next message."""

    def __init__(self, pipe: Callable[[], Pipe], max_bytes: int = 10 << 20) -> None:
        self._make = pipe
        self._max_bytes = max_bytes  # a pipe cuts a longer line one byte beyond it
        self._pipe: Pipe | None = None
        self._over: list[Pipe] = []  # ended by themselves, and not cleaned up yet
        self._opening = asyncio.Lock()
        self._open: dict[int, Exchange] = {}  # by the ids that are not answered yet
        self._ends: dict[Exchange, asyncio.Future[None]] = {}

    async def open(self) -> None:
        await self._connected()

    async def exchange(self, exchange: Exchange) -> None:
        """Write a message, and wait until it is answered."""
        pipe = self._pipe or await self._connected()
        end = self._ends[exchange] = asyncio.get_running_loop().create_future()
        for id in exchange.open:
            self._open[id] = exchange
        try:
            exchange.sent = True
            await pipe.write(exchange.data)
            if exchange.open:
                await end
        except asyncio.CancelledError:
            self._abandoned(exchange)
            raise
        finally:
            del self._ends[exchange]
            if end.done() and not end.cancelled():
                end.exception()  # retrieved, as the write may have failed first
            for entry in exchange.entries:
                self._open.pop(entry.id, None)

    def _abandoned(self, exchange: Exchange) -> None:
        """Called when the caller of a message has stopped waiting. Plain JSON-RPC cannot report that to the server."""

    async def aclose(self) -> None:
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            self._lost(pipe, NotSent("the client was closed"))
            await pipe.aclose()
        await self._clean_up()

    async def _clean_up(self) -> None:
        while self._over:
            await self._over.pop().aclose()

    async def _connected(self) -> Pipe:
        async with self._opening:
            if self._pipe is None:
                await self._clean_up()
                pipe = self._make()
                await pipe.open(self._line, lambda error: self._lost(pipe, error))
                self._pipe = pipe
            return self._pipe

    def _lost(self, pipe: Pipe, error: CallFailed) -> None:
        if self._pipe is pipe:
            self._pipe = None
            self._over.append(pipe)
        for end in self._ends.values():
            if not end.done():
                end.set_exception(ConnectionLost(str(error)))

    def _line(self, line: bytes) -> None:
        if len(line) > self._max_bytes:
            self._fail_long(line)
            return
        in_array, messages = read_messages(line)
        for message in messages:
            self._take(message, in_array)

    def _fail_long(self, line: bytes) -> None:
        """Fail the message that a line above the limit answers: by the id at its beginning, or if it is alone in flight."""
        reason = f"the server sent a line of more than {self._max_bytes} bytes; connect(max_bytes=...) allows longer ones"
        logger.warning("%s", reason)
        exchange = self._open.get(int(found[1])) if (found := _ANSWER.match(line)) else None
        if exchange is None and not _REQUEST.match(line):
            alone = [one for one in self._ends if not one.is_standing]
            exchange = alone[0] if len(alone) == 1 else None
        if exchange is not None and not self._ends[exchange].done():
            self._ends[exchange].set_exception(BadAnswer(reason))

    def _take(self, message: Received, in_array: bool) -> None:
        """Give a message to the exchange that it answers."""
        id: Any = message.id
        exchange = self._open.get(id) if type(id) in (int, float) else None
        if exchange is None:
            logger.debug("a line that answers no call: %.200r", message)
            # If one message alone is in flight, the line is meant for it.
            alone = [one for one in self._ends if not one.is_standing]
            if len(alone) != 1:
                return
            exchange = alone[0]
        exchange.take(message, in_array)
        end = self._ends[exchange]
        if not exchange.open:
            wake(end, None)


# --- memory ---------------------------------------------------------------------------------------------------------


Step = Callable[[], Awaitable[None]]  # enters the lifespan of an app, or leaves it


class _Handle(Protocol):
    """`App.handle`."""

    def __call__(self, data: bytes, *, replayed: list[Any] | None) -> Awaitable[bytes | None]: ...


class MemoryLink(LocalLink):
    """Straight into an app of this process."""

    def __init__(self, handle: _Handle, enter: Step, leave: Step) -> None:
        self._handle = handle
        self._enter = enter
        self._leave = leave
        self._is_open = False

    async def open(self) -> None:
        if not self._is_open:
            await self._enter()
            self._is_open = True

    async def exchange(self, exchange: Exchange) -> None:
        exchange.sent = True
        replayed: list[Any] = []
        reply = await self._handle(exchange.data, replayed=replayed)
        if replayed:
            exchange.replayed(replayed)
        if reply is not None:
            exchange.read(reply)

    async def aclose(self) -> None:
        if self._is_open:
            self._is_open = False
            await self._leave()


class MemoryPipe:
    """The pipe of a child process without the process, for `wirecall probe`.

    `connect` takes the way back and returns the app's connection.

    The task that writes a line serves it: a task per line would cost as much as the rest of the way. So `write` returns
    when the line is answered, cancelling it cancels the call, and closing leaves calls in flight to their deadlines.
    """

    def __init__(self, connect: "Connect", enter: Step, leave: Step) -> None:
        self._connect = connect
        self._enter = enter
        self._leave = leave
        self._connection: Connection | None = None
        self._on_line: Callable[[bytes], None] = lambda _line: None

    async def open(self, on_line: Callable[[bytes], None], on_end: Callable[[CallFailed], None]) -> None:
        # An app does not end by itself, so `on_end` is not needed.
        self._on_line = on_line
        await self._enter()
        self._connection = self._connect(self._send)

    async def write(self, line: bytes) -> None:
        if self._connection is None:
            raise NotSent("the client is closed")
        sending = Sending()
        try:
            answer = self._connection.handle(line, sending)
            if answer is not None and not isinstance(answer, bytes):
                answer = await answer
            if answer is not None:
                self._on_line(answer)
            sending.written()
        finally:
            sending.lost()

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.aclose()
            await self._leave()

    async def _send(self, line: bytes) -> None:
        self._on_line(line)
