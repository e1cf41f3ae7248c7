"""Links to a server of plain JSON-RPC: over HTTP, over a pipe of lines, and directly into an app.

A link sends a message and passes every answer to its `Exchange`. It sets `exchange.sent` when the
server may have the message and `exchange.begun` when the answer begins, and raises a `CallFailed`
when it breaks. It does not deal with deadlines, retries or the meaning of an answer.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import UNSET

from wirecall.aio import wake
from wirecall.client.exchange import Exchange, LocalLink, StreamCut
from wirecall.errors import BadAnswer, CallFailed, ConnectionLost, NotSent, Refused
from wirecall.logs import logger
from wirecall.protocol.messages import Arrived, Received, decode_value, read_messages
from wirecall.protocol.receipt import Receipt
from wirecall.transports.http_client import HttpAnswer, HttpClient

if TYPE_CHECKING:
    from wirecall.transports.stdio import Connect, Connection

JSON = "application/json"
_HEADERS = {"Content-Type": JSON, "Accept": JSON}
# Streams of answers as JSON lines. Each of them is final when its line has come.
_LINES = frozenset({"application/jsonl", "application/x-ndjson"})
_STREAM_HEADERS = {"Content-Type": JSON, "Accept": f"application/jsonl, {JSON};q=0.9"}
# The notification at the end of a stream: one that ends without it was cut.
_END = "rpc.end"

# How most servers begin an answer, and a request or notification.
_ANSWER = re.compile(rb'\{"jsonrpc": ?"2\.0", ?"id": ?([0-9]{1,15}),')
_REQUEST = re.compile(rb'\{"jsonrpc": ?"2\.0", ?"(?:id": ?[^,]{1,100}, ?")?method"')


# --- HTTP -----------------------------------------------------------------------------------------


class HttpLink:
    """A POST for each message."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http
        self.open = http.open
        self.aclose = http.aclose

    async def exchange(self, exchange: Exchange) -> None:
        if exchange.wants_stream:
            await self._exchange_streamed(exchange)
            return
        async with self._http.request("POST", exchange.data, _HEADERS, exchange=exchange) as answer:
            exchange.begun = True
            await self._take(exchange, answer)

    async def _exchange_streamed(self, exchange: Exchange) -> None:
        """Ask for a stream of the answers, and take whatever form of them comes."""
        headers = _STREAM_HEADERS
        try:
            async with self._http.request(
                "POST", exchange.data, headers, exchange=exchange
            ) as answer:
                exchange.begun = True
                if answer.status == 200 and answer.media in _LINES:
                    await read_stream(exchange, answer)
                else:
                    await self._take(exchange, answer)
        except ConnectionLost as error:
            if exchange.is_stream and not isinstance(error, StreamCut):
                raise StreamCut(f"the answers were cut before the end record: {error}") from error
            raise

    async def _take(self, exchange: Exchange, answer: HttpAnswer) -> None:
        body = await answer.read()
        mark_replayed(exchange, answer)
        if 200 <= answer.status < 300:
            if body:
                exchange.read(body)
        else:
            refuse_by_status(exchange, answer, body)


async def read_stream(exchange: Exchange, answer: HttpAnswer) -> None:
    """Take the answers of a stream as they come, until its end record.

    Raises `StreamCut` if there is none.
    """
    exchange.is_stream = True
    for entry in exchange.entries:
        entry.was_streamed = True
    async for line in answer.lines():
        exchange.note_part()
        if not line.strip():
            continue  # the server shows that it is alive
        _, messages = read_messages(line)
        for message in messages:
            if isinstance(message, Arrived) and message.method == _END:
                exchange.replayed(_replayed_in(message))
                return
            # The answers are those of an array: an error without an id is about one entry.
            exchange.take(message, in_array=True)
            if isinstance(message, Arrived) and message.replayed is True:
                exchange.replayed([message.id])
    raise StreamCut(f"the answers were cut: the stream ended without its end record ({_END})")


def _replayed_in(end: Arrived) -> list[Any]:
    """Return the ids that an end record lists as replayed; a broken record lists none."""
    if end.params is UNSET:
        return []
    with suppress(ValueError, RecursionError):
        params = decode_value(end.params)
        if isinstance(params, dict) and isinstance(params.get("replayed"), list):
            ids: list[Any] = params["replayed"]
            return ids
    return []


def refuse_by_status(exchange: Exchange, answer: HttpAnswer, body: bytes) -> None:
    """Handle an answer whose status is not 2xx.

    JSON-RPC errors in its body count, or else the status does. 401 and 403 refuse the caller, so
    the body does not count.
    """
    if answer.status in (401, 403):
        exchange.refuse(status_error(answer, body))
        return
    messages: list[Received] = []
    if body:
        _, messages = read_messages(body)
    if messages and all(isinstance(message, Arrived) and message.is_answer for message in messages):
        for entry in exchange.entries:
            entry.retry_after = answer.retry_after or 0.0
        exchange.read(body)
    if not exchange.is_done or not exchange.known:
        exchange.refuse(status_error(answer, body))


def status_error(answer: HttpAnswer, body: bytes) -> CallFailed:
    """Return a status as an error.

    After 3xx and 4xx the request did not run (RFC 9110, section 15); else it may have.

    303 is the exception: it points to the answer to a request that ran (section 15.4.4).
    """
    text = f"HTTP {answer.status}"
    if 300 <= answer.status < 400:
        place = ascii(answer.headers.get("location", "nowhere")[:200])[1:-1]
        text += f", a redirect to {place}, which is not followed"
    elif body and body.lstrip()[:1] != b"<":
        text += f": {body[:200].decode('utf-8', 'replace')}"
    kind: type[CallFailed] = BadAnswer
    if 300 <= answer.status < 500 and answer.status != 303:
        kind = Refused
    return kind(text, status=answer.status, retry_after=answer.retry_after)


def mark_replayed(exchange: Exchange, answer: HttpAnswer) -> None:
    """Mark the calls that `Idempotent-Replayed` lists by their ids; "true" stands for all.

    A broken header lists none.
    """
    header = answer.headers.get("idempotent-replayed", "")
    if header.lower() == "true":
        exchange.replayed()
    elif header:
        with suppress(ValueError, RecursionError):
            ids = decode_value(header)
            if isinstance(ids, list):
                exchange.replayed(ids)


# --- lines ----------------------------------------------------------------------------------------


class Pipe(Protocol):
    """Lines both ways: a child process, a WebSocket, or an app in memory.

    If `open` fails or is cancelled, nothing remains that `aclose` would have to close.
    """

    async def open(
        self, on_line: Callable[[bytes], None], on_end: Callable[[CallFailed], None]
    ) -> None: ...
    async def write(self, line: bytes) -> None: ...
    async def aclose(self) -> None: ...


class LineLink:
    """Messages as lines. The next message reopens a pipe that has ended."""

    def __init__(
        self,
        pipe: Callable[[], Pipe],
        max_bytes: int = 10 << 20,
        push: Callable[[Arrived], bool] | None = None,
    ) -> None:
        self._make = pipe
        # Takes a notification of the server; returns whether a function receives it.
        self._push = push
        # The largest line. A pipe cuts a longer one, one byte beyond this.
        self._max_bytes = max_bytes
        self._pipe: Pipe | None = None
        # Pipes that ended, and that are not closed yet.
        self._over: list[Pipe] = []
        # A call that still waits for a pipe of a closed link opens none.
        self._is_closed = False
        self._opening = asyncio.Lock()
        # The time limit of a pipe that is being opened. Only `aclose` sets a time.
        self._limit: asyncio.Timeout | None = None
        # The exchange of each id that is not answered yet.
        self._open: dict[int, Exchange] = {}
        self._ends: dict[Exchange, asyncio.Future[None]] = {}

    async def open(self) -> None:
        self._is_closed = False
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
                end.exception()  # mark it as retrieved: the write may have failed first
            for entry in exchange.entries:
                self._open.pop(entry.id, None)

    def _abandoned(self, exchange: Exchange) -> None:
        """Called when the caller of a message has stopped waiting.

        Plain JSON-RPC cannot report that to the server.
        """

    async def aclose(self) -> None:
        """Close every pipe, also one that is being opened, and even if this is cancelled."""
        self._is_closed = True
        limit = self._limit
        self._limit = None
        if limit is not None:
            limit.reschedule(asyncio.get_running_loop().time())
        if self._pipe is not None:
            self._lost(self._pipe, NotSent("the client was closed"))
        try:
            async with self._opening:
                pass
        finally:
            await _close_each(self._over)

    async def _connected(self) -> Pipe:
        async with self._opening:
            if self._pipe is None:
                while self._over:
                    await self._over.pop().aclose()
                self._pipe = await self._opened()
            return self._pipe

    async def _opened(self) -> Pipe:
        """Open another pipe, unless the link is closed before it is open."""
        if self._is_closed:
            raise NotSent("the client is closed")
        pipe = self._make()
        try:
            async with asyncio.timeout(None) as self._limit:
                await pipe.open(self._line, lambda error: self._lost(pipe, error))
        except TimeoutError:
            if self._is_closed:
                raise NotSent("the client is closed") from None
            raise
        finally:
            self._limit = None
        if self._is_closed:
            await pipe.aclose()
            raise NotSent("the client is closed")
        return pipe

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
        """Fail the message that an overlong line answers.

        The id at the start of the line names it, or it is the only one.
        """
        reason = (
            f"the server sent a line of more than {self._max_bytes} bytes; "
            "connect(max_bytes=...) allows longer ones"
        )
        logger.warning("%s", reason)
        exchange = None
        if found := _ANSWER.match(line):
            exchange = self._open.get(int(found[1]))
        if exchange is None and not _REQUEST.match(line):
            exchange = self._only_exchange()
        if exchange is not None and not self._ends[exchange].done():
            self._ends[exchange].set_exception(BadAnswer(reason))

    def _only_exchange(self) -> Exchange | None:
        """Return the only message in flight: a line that names no message is meant for it."""
        alone = [one for one in self._ends if not one.is_standing]
        if len(alone) != 1:
            return None
        return alone[0]

    def _take(self, message: Received, in_array: bool) -> None:
        """Pass a message to the exchange that it answers, or to those who receive notifications."""
        id: Any = message.id
        if (
            id is UNSET
            and self._push is not None
            and isinstance(message, Arrived)
            and not message.is_answer
            and self._push(message)
        ):
            return
        exchange = self._open.get(id) if type(id) in (int, float) else None
        if exchange is None:
            logger.debug("a line that answers no call: %.200r", message)
            exchange = self._only_exchange()
            if exchange is None:
                return
        exchange.take(message, in_array)
        end = self._ends[exchange]
        if not exchange.open:
            wake(end, None)


async def _close_each(pipes: list[Pipe]) -> None:
    """Close pipes: each of them, even if this is cancelled while one of them closes."""
    while pipes:
        try:
            await pipes.pop().aclose()
        except BaseException:
            await _close_each(pipes)
            raise


# --- memory ---------------------------------------------------------------------------------------


Step = Callable[[], Awaitable[None]]  # enters the lifespan of an app, or leaves it


class _Handle(Protocol):
    """`App.handle`."""

    def __call__(self, data: bytes, *, replayed: list[Any] | None) -> Awaitable[bytes | None]: ...


class MemoryLink(LocalLink):
    """A link directly into an app of this process."""

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

    `connect` takes the function that receives the app's lines, and returns the app's connection.

    The task that writes a line serves it: a task per line would cost as much as everything else. So
    `write` returns when the line is answered, cancelling it cancels the call, and after closing,
    calls in flight last until their deadlines.
    """

    def __init__(self, connect: "Connect", enter: Step, leave: Step) -> None:
        self._connect = connect
        self._enter = enter
        self._leave = leave
        self._connection: Connection | None = None
        self._on_line: Callable[[bytes], None] = lambda _line: None

    async def open(
        self, on_line: Callable[[bytes], None], on_end: Callable[[CallFailed], None]
    ) -> None:
        # An app does not end on its own, so `on_end` is not needed.
        self._on_line = on_line
        await self._enter()
        self._connection = self._connect(self._send)

    async def write(self, line: bytes) -> None:
        if self._connection is None:
            raise NotSent("the client is closed")
        receipt = Receipt()
        try:
            answer = self._connection.handle(line, receipt)
            if answer is not None and not isinstance(answer, bytes):
                answer = await answer
            if answer is not None:
                self._on_line(answer)
            receipt.written()
        finally:
            receipt.lost()

    async def aclose(self) -> None:
        connection = self._connection
        self._connection = None
        if connection is not None:
            await connection.aclose()
            await self._leave()

    async def _send(self, line: bytes) -> None:
        self._on_line(line)
