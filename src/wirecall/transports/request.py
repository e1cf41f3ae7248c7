"""One HTTP request as an endpoint sees it, and the way to answer it.

1. The straight path has no task and no timer. A limit is set when something really waits: for a body that has not arrived,
   or for a client that does not read. A client's leaving is watched only while `HttpRequest.gone` is awaited.
2. An endpoint ends with an answer or with an exception. `HttpError` is an answer; `Gone` means that the client has left.
3. A body is refused as too long before it is read, if its length is known. For a moment the server takes and drops the
   rest of it, so that the client reads the refusal.
4. Where a header has a field twice, a lookup returns both values.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from wirecall.errors import Gone, InternalError, InvalidRequest, WirecallError
from wirecall.protocol import messages as frames
from wirecall.protocol.messages import Limits, Sending
from wirecall.stepping import Timeouts, first_step
from wirecall.transports.exchange import HttpExchange, Pairs

if TYPE_CHECKING:
    from wirecall.server.identity import Identity

Endpoint: TypeAlias = Callable[["HttpRequest"], Awaitable[None]]

# A longer body is sent in pieces, so that the server notices a client that stops reading in the middle of it.
PIECE = 256 << 10
# How much of a body that was refused as too long is still taken, and for how long.
LINGER_BYTES = 64 << 20
LINGER_TIME = 1.0

JSON = "application/json"
CLOSE = ("connection", "close")
_STREAM_FIELDS = (
    ("content-type", "text/event-stream"),
    ("cache-control", "no-store"),
    ("x-accel-buffering", "no"),  # MCP 2026-07-28: proxies must not hold events back
)


class HttpError(WirecallError):
    """A refusal of a request: a status, a message for the JSON-RPC error in the body, and header fields."""

    def __init__(self, status: int, message: str, headers: Pairs = (), *, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message
        self.headers = headers
        self.data = data


class Around(Protocol):
    """The server around a request, as the request sees it."""

    limits: Limits
    timeouts: Timeouts
    stopping: asyncio.Event

    def enter_stream(self, request: "HttpRequest") -> None:
        """HttpError 503 if too many streams are open."""


class HttpRequest:
    """One HTTP request as an endpoint sees it, and the way to answer it."""

    __slots__ = (
        *("_body", "_exchange", "_has_ended", "_more", "_server", "_unbroken", "_watched", "_watcher"),
        *("caller", "has_left", "headers", "holder", "identity", "method", "path", "sending", "started"),
    )

    def __init__(self, server: Around, exchange: HttpExchange) -> None:
        self.method = exchange.method
        self.path = exchange.path
        self.headers = exchange.headers
        self.caller = ""  # anonymous, until authenticated
        self.identity: Identity | None = None  # of the caller, where a token named it
        self.holder = ""  # whose share an open stream counts against; "": there is none
        self.started = False  # a response has begun
        self.sending: Sending | None = None  # the way of the answers, where the endpoint has calls that want to know it
        self.has_left = False  # the client, as far as it was watched
        self._server = server
        self._exchange = exchange
        self._body: bytes | None = None
        self._more: Pairs = ()  # fields that every answer gets
        self._has_ended = False  # the response is complete
        self._watched = False
        self._watcher: asyncio.Task[None] | None = None
        self._unbroken = 0  # bytes of the stream since the loop had its last turn

    @property
    def stopping(self) -> asyncio.Event:
        """Set when the server is about to stop: a stream has to end now."""
        return self._server.stopping

    # --- reading -----------------------------------------------------------------------------------------------------

    def check_json(self) -> None:
        """Raise HttpError 415 unless the body is announced as JSON in UTF-8."""
        if self.headers.first.get("content-type") == JSON:  # nearly always
            return
        media = self.headers.get("content-type") or "none"
        kind, *parameters = media.lower().split(";")
        if kind.strip() != JSON:
            raise HttpError(415, f"Content-Type: expected {JSON}, got {media[:100]}", [("accept", JSON)])
        for parameter in parameters:
            name, _, value = parameter.partition("=")
            if name.strip() == "charset" and value.strip().strip('"') not in ("utf-8", "utf8"):
                raise HttpError(415, f"Content-Type: expected charset=utf-8, got {media[:100]}", [("accept", JSON)])

    async def body(self) -> bytes:
        """Return the whole body; HttpError 413 if it is too long, 408 if it is late, 400 if it is cut or malformed."""
        if self._body is not None:
            return self._body
        fields, timeouts, limit = self.headers.first, self._server.timeouts, self._server.limits.bytes_in
        patience, until = self._server.limits.body_time, 0.0
        body: bytes | bytearray = b""
        is_whole = True
        try:
            # Step 1: the header. A body that is going to be too long, or is encoded, is refused before it is read.
            if "content-encoding" in fields:
                coding = self.headers["content-encoding"]
                if not {"", "identity"}.issuperset(coding.lower().replace(" ", "").split(",")):
                    message = f"Content-Encoding: expected identity, got {coding[:100]!r}: send the body as it is"
                    raise HttpError(415, message, [("accept-encoding", "identity")])
            length = fields.get("content-length")
            if length is None:
                coding = self.headers.get("transfer-encoding") or "chunked"
                if coding.lower() != "chunked":  # RFC 9112, section 6.1
                    raise HttpError(501, f"Transfer-Encoding: expected chunked, got {coding[:100]!r}", [CLOSE])
                expected = None
            else:
                if not (length.isascii() and length.isdigit()):
                    raise HttpError(400, "Content-Length is not a number", [CLOSE])
                if "transfer-encoding" in fields:  # RFC 9112, section 6.3: perhaps an attempt at request smuggling
                    raise HttpError(400, "Content-Length and Transfer-Encoding contradict each other", [CLOSE])
                expected = int(length) if len(length) <= 18 else limit + 1
            # Step 2: the pieces, nearly always one. All of them together have the time of the body.
            while True:
                if max(expected or 0, len(body)) > limit:
                    data = {"type": "limit_exceeded", "limit": "bytes_in", "max": limit}
                    raise HttpError(413, f"the body is longer than {limit} bytes", [CLOSE], data=data)
                done, piece = first_step(self._exchange.read(expected))
                if not done:
                    now = asyncio.get_running_loop().time()
                    until = until or now + patience
                    with timeouts.within(until - now):
                        piece = await piece
                if not piece:
                    is_whole = piece is not None
                    break
                if body:
                    body = bytearray(body) if type(body) is bytes else body
                    body += piece
                else:
                    body = piece
                if len(body) == expected:
                    break
        except TimeoutError:
            raise HttpError(408, f"the body did not arrive within {patience:g} s", [CLOSE]) from None
        except HttpError:
            # Most clients read the answer after they have sent everything, and a connection that is closed with unread
            # bytes is reset: they would see an error and no answer. So the rest is taken, for a moment. A client that has
            # asked first ("Expect: 100-continue", RFC 9110, section 10.1.1) waits for the answer.
            if "expect" not in fields:
                with contextlib.suppress(TimeoutError), timeouts.within(LINGER_TIME):
                    await self._skip(LINGER_BYTES)
            raise
        if not is_whole:
            # The client left, or sends something else than chunks: granian reports both in the same way. A client that left
            # does not read the answer.
            raise HttpError(400, "the body is malformed, or ended too early", [CLOSE])
        self._body = bytes(body)
        return self._body

    async def _skip(self, most: int) -> None:
        """Take and drop the rest of the body."""
        while most > 0 and (piece := await self._exchange.read(None)):
            most -= len(piece)

    async def gone(self) -> None:
        """Return when the client has disconnected. To be awaited after the body, once at a time; safe to cancel."""
        self._watched = True
        try:
            await self._exchange.left()
        finally:
            self._watched = False

    def watch(self, left: Callable[[], object] | None = None) -> None:
        """Look from now on whether the client leaves before its answer is written, and tell `sending`, and call `left`."""

        async def look() -> None:
            with contextlib.suppress(Exception):  # a transport that fails counts as a client that has left
                await self.gone()
            self.has_left = True
            if self.sending is not None:
                self.sending.lost()
            if left is not None:
                left()

        self._watcher = asyncio.get_running_loop().create_task(look())

    def _check_there(self) -> None:
        """Raise Gone if the client has left, without waiting: servers do not report a write to a client that has left."""
        if not self._watched and not self.has_left:
            self.has_left = self._exchange.has_left()
        if self.has_left:
            raise Gone("the client has left")

    async def _check_reader(self) -> None:
        """Raise Gone if the client has left, where a call wants to know whether its answer is written."""
        if self.sending is not None and self.sending.is_heard:
            if self._watcher is not None:
                self._watcher.cancel()
            if self._watched:
                await asyncio.sleep(0)  # a watcher that is cancelled lets go of the server's events
            self._check_there()

    # --- answering ---------------------------------------------------------------------------------------------------

    def add_headers(self, fields: Pairs) -> None:
        """Add header fields to the answer, whatever it will be."""
        self._more = [*self._more, *fields]

    async def respond(self, status: int, body: bytes = b"", media: str = JSON, headers: Pairs = ()) -> None:
        """Send the whole answer. `media` is left out where there is no body."""
        fields = [] if status == 204 else [("content-length", str(len(body)))]  # RFC 9110, section 8.6
        if body:
            fields.append(("content-type", media))
        fields += headers
        fields += self._more
        if len(body) > PIECE:
            self.started = True
            await self._tell(self._exchange.begin(status, fields))
            await self.close_stream(body)
        else:
            if self.sending is not None:
                await self._check_reader()
            self.started = True
            await self._tell(self._exchange.respond(status, fields, body))
            self._has_ended = True
        if self.sending is not None:
            self.sending.written()

    async def refuse(self, error: HttpError) -> None:
        """Answer with a JSON-RPC error without an id. An answer that has begun is cut by the server instead."""
        # Without an id, because no message was read (MCP 2025-11-25 and later, basic/transports: "a JSON-RPC error response
        # that has no id").
        if self.sending is not None:
            self.sending.lost()  # this is not the answer
            self.sending = None
        if not self.started:
            code = (InternalError if error.status == 500 else InvalidRequest).CODE
            told: dict[str, Any] = {"code": code, "message": error.message}
            if error.data is not None:
                told["data"] = error.data
            with contextlib.suppress(Gone):
                await self.respond(error.status, frames.encode({"jsonrpc": "2.0", "error": told}), headers=error.headers)

    def enter_stream(self) -> None:
        """Take the place of a stream that is opened later; HttpError 503 if too many are open."""
        self._server.enter_stream(self)

    async def open_stream(self, headers: Pairs = ()) -> None:
        """Begin a stream of server-sent events; HttpError 503 if too many are open."""
        self._server.enter_stream(self)
        self.started = True
        fields = [*_STREAM_FIELDS, *headers, *self._more]
        await self._tell(self._exchange.begin(200, fields))

    async def write(self, chunk: bytes) -> None:
        """Send bytes of the open answer; Gone if the client has left or does not read."""
        for start in range(0, len(chunk), PIECE):
            self._check_there()
            piece = chunk[start : start + PIECE]
            await self._tell(self._exchange.send(piece))
            # A server drops the bytes for a client that has left, and so never waits. The loop needs a turn to notice.
            self._unbroken += len(piece)
            if self._unbroken > PIECE or len(chunk) > PIECE:
                self._unbroken = 0
                await asyncio.sleep(0)

    async def close_stream(self, last: bytes = b"") -> None:
        """End the open answer with its last bytes; Gone if the client has left or does not read."""
        # The last piece is kept back: a server that has all bytes says of every client that it has left.
        kept = max(len(last) - 1, 0) // PIECE * PIECE
        await self.write(last[:kept])
        await self._check_reader()
        await self._tell(self._exchange.send(last[kept:], is_last=True))
        self._has_ended = True

    async def _tell(self, sending: Coroutine[Any, Any, None]) -> None:
        """Await a write; Gone if the client has left or does not read."""
        try:
            done, rest = first_step(sending)
            if not done:
                with self._server.timeouts.within(self._server.limits.write_time):
                    await rest
        except TimeoutError:
            raise Gone(f"the client did not read for {self._server.limits.write_time:g} s") from None
        except OSError as error:
            raise Gone("the client has left") from error

    def release(self) -> None:
        """Cancel what still looks for the client: the request is over. An answer that is not written is lost."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self.sending is not None:
            self.sending.lost()
        self._exchange.release(cut=self.started and not self._has_ended)
