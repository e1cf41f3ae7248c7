"""One HTTP request as an endpoint sees it, and how to answer it: what ASGI and RSGI share.

1. The fast path creates no task and no timer. A time limit is set only when something waits: for a
   body that has not arrived, or for a client that does not read. A client's leaving is watched only
   after `HttpRequest.watch`, or for a call that waits long enough (`watch_soon`).
2. An endpoint ends with an answer or with an exception. `HttpError` is an answer; `Gone` means that
   the client has left.
3. A body that is too long is refused before it is read, if its length is known. For a moment the
   server reads and drops the rest of it, so that the client reads the refusal.
"""

import asyncio
import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from wirecall.aio import Signal, first_step
from wirecall.errors import Gone, InternalError, InvalidRequest, WirecallError
from wirecall.protocol import messages as frames
from wirecall.protocol import receipt
from wirecall.protocol.messages import Id
from wirecall.protocol.receipt import Receipt
from wirecall.protocol.sender import ANONYMOUS, Sender
from wirecall.transports.arrivals import WatchedAnswer
from wirecall.transports.headers import SECRET, Headers
from wirecall.transports.tcp import ClientAddress

if TYPE_CHECKING:
    from wirecall.server.identity import Identity
    from wirecall.transports.http_server import HttpServer

Pairs: TypeAlias = Sequence[tuple[str, str]]
Endpoint: TypeAlias = Callable[["HttpRequest"], Awaitable[None]]

# Seconds after which `watch_soon` begins to watch. Most calls end before, and a watcher is a task of
# the server: granian's takes 40 µs.
WATCH_AFTER = 0.01
# A longer body is sent in pieces, so that the server notices a client that stops reading in the
# middle of it.
PIECE = 256 << 10
# How much of a refused body is still read, and for how long.
LINGER_BYTES = 64 << 20
LINGER_TIME = 1.0

JSON = "application/json"
# The path of plain JSON-RPC.
RPC_PATH = "/rpc"
KEY = "idempotency-key"
# Words in the fields that carry credentials that may be shown.
SCHEMES = frozenset({"basic", "bearer", "digest", "negotiate"})
# Marks an answer from the ledger.
REPLAYED = "idempotent-replayed"
# Characters of its value; many clients and proxies refuse an answer with a field of 8 KiB.
LONGEST_MARK = 4096
CLOSE = ("connection", "close")
# The end of uvloop's RuntimeError about a write to a connection that is closed. uvicorn passes it
# on.
UVLOOP_CLOSED = "the handler is closed"
EVENT_STREAM = "text/event-stream"
STREAM_FIELDS = (
    ("cache-control", "no-store"),
    ("x-accel-buffering", "no"),  # MCP 2026-07-28: proxies must not hold events back
)


def replayed_mark(ids: Sequence[Id], *, is_array: bool) -> Pairs:
    """Return the field that marks answers from the ledger.

    Its value is `true`, or for an array their ids as JSON. A list that is too long is omitted: with
    it, many clients could not read the answers at all.
    """
    if not is_array:
        return [(REPLAYED, "true")]
    value = re.sub("[^ -~]", _escaped, frames.encode(ids).decode())
    if len(value) > LONGEST_MARK:
        return ()
    return [(REPLAYED, value)]


def _escaped(sign: re.Match[str]) -> str:
    """Return a character as JSON escapes it: a header carries only ASCII."""
    return re.sub("(....)", r"\\u\1", sign[0].encode("utf-16-be").hex())


class HttpError(WirecallError):
    """A refusal of a request.

    It has a status, a message for the JSON-RPC error in the body, and header fields.
    """

    def __init__(
        self,
        status: int,
        message: str,
        headers: Pairs = (),
        *,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message
        self.headers = headers
        self.data = data


class _Due:
    """A request whose client is watched when this expires."""

    __slots__ = ("_request",)

    def __init__(self, request: "HttpRequest") -> None:
        self._request = request

    def expire(self) -> None:
        self._request._begin_watch()


class HttpRequest(ABC):
    """One HTTP request as an endpoint sees it, and how to answer it.

    ASGI and RSGI implement the methods at the end of the class, each in its own way.
    """

    method: str
    path: str
    # The path at which another application has mounted this one.
    root = ""
    # The host and port of a target in absolute form.
    authority: str | None
    headers: Headers
    # The name of the caller.
    caller = ANONYMOUS
    # The identity of the caller, where a token named it.
    identity: "Identity | None" = None
    # The caller or session that an open stream counts against; "" for none.
    holder = ""
    # Whether it asks for a WebSocket.
    is_websocket = False
    # Whether it counts as an open stream.
    is_stream = False
    # Whether the server has cancelled it.
    is_cut = False
    # Whether a response has begun.
    started = False
    # Answer delivery, if the endpoint has calls that need to know about it.
    receipt: Receipt | None = None
    # Whether the client has left, as far as it was watched.
    has_left = False
    # The server that the request came to.
    _server: "HttpServer"
    # Whether reading the body always waits, so that a first step shows nothing.
    _always_waits = False
    _body: bytes | None = None
    # Whether the body did not arrive in time.
    _is_late = False
    # The fields that every answer gets.
    _more: Pairs = ()
    # Whether the response is complete.
    _has_ended = False
    # A future that is done when the client has left, while it is watched.
    _watcher: "asyncio.Future[None] | None" = None
    # Begins to watch. None: `watch_soon` was not called, or it watches.
    _due: "_Due | None" = None
    # Called when the client has left.
    _on_leaving: Callable[[], object] | None = None
    # The bytes of the stream since the loop last had a turn.
    _unbroken = 0
    # Watches the answer, if a call needs it and the system reports it.
    _arrival: WatchedAnswer | None = None
    # Whether the answer has a length, and so is not chunked.
    _has_length = False

    @property
    def stopping(self) -> Signal:
        """Set when the server is about to stop: a stream has to end now."""
        return self._server.stopping

    @property
    def leaving(self) -> str | None:
        """Why no more requests should come to this server, or None."""
        return self._server.leaving

    @property
    @abstractmethod
    def client(self) -> str | None:
        """The address of the other end of the connection; None if the server does not know it."""

    @property
    @abstractmethod
    def query(self) -> str:
        """The part of the target after `?`, as it was sent; "" without one."""

    def sender(self, link: str | None = None) -> Sender:
        """Return the sender of the message. `link` is the name of its session, if it has one."""
        return Sender(self.caller, self.identity, link, self.headers, self.receipt)

    def report(self, refusal: HttpError) -> None:
        """Log a refusal that is not raised."""
        self._server.report(self, refusal)

    def without_secrets(self, text: str) -> str:
        """Return a string for the log without tokens, which the user's verifier may have quoted."""
        for name in SECRET:
            for value in self.headers.all(name):
                words = re.split(r"[\s;,=]+", value)
                for secret in (value, *words):
                    if secret and secret.lower() not in SCHEMES:
                        text = text.replace(secret, "[removed]")
        return text

    # --- reading ----------------------------------------------------------------------------------

    def check_json(self) -> None:
        """Raise HttpError 415 unless the media type is JSON in UTF-8."""
        if self.headers.first.get("content-type") == JSON:  # nearly always
            return
        media = self.headers.get("content-type") or "none"
        kind, _, _ = media.lower().partition(";")
        if kind.strip() != JSON:
            raise HttpError(
                415, f"Content-Type: expected {JSON}, got {media[:100]}", [("accept", JSON)]
            )
        self.check_charset()

    def check_charset(self) -> None:
        """Raise HttpError 415 if the media type names a charset other than UTF-8."""
        media = self.headers.get("content-type", "")
        _, *parameters = media.lower().split(";")
        for parameter in parameters:
            name, _, value = parameter.partition("=")
            if name.strip() == "charset" and value.strip().strip('"') not in ("utf-8", "utf8"):
                raise HttpError(
                    415,
                    f"Content-Type: expected charset=utf-8, got {media[:100]}",
                    [("accept", JSON)],
                )

    def key(self) -> str | None:
        """Return the idempotency key in the header.

        HttpError 400 if there are two, or it is not ASCII.
        """
        if KEY not in self.headers.first:
            return None
        key, *others = self.headers.all(KEY)
        if others:
            raise HttpError(400, "more than one Idempotency-Key header")
        if not key.isascii():
            raise HttpError(400, "Idempotency-Key: expected ASCII characters only")
        return key

    async def body(self) -> bytes:
        """Return the whole body.

        HttpError 413 if it is too long, 408 if it is late, 400 if it is cut or malformed.
        """
        if self._body is not None:
            return self._body
        timeouts = self._server.timeouts
        limits = self._server.limits
        limit = limits.bytes_in
        body: bytes | bytearray = b""
        is_watched = False
        try:
            # Step 1: the header. A body that will be too long, or is encoded, is refused before it
            # is read.
            expected = announced_length(self.headers, limit)
            # Step 2: the pieces, nearly always one. The time limit of the body covers all of them.
            size = expected or 0
            while True:
                if size > limit:
                    raise _too_long(limit)
                piece: Any = self._read(expected)
                if self._always_waits:
                    is_read = False
                else:
                    is_read, piece = first_step(piece)
                if not is_read:
                    if not is_watched:
                        loop = asyncio.get_running_loop()
                        is_watched = True
                        timeouts.watch(self, loop.time() + limits.body_time, loop)
                    piece = await piece
                if not piece:
                    break
                body = _joined(body, piece) if body else piece
                if len(body) == expected:
                    break
                size = max(size, len(body))
        except HttpError:
            timeouts.forget(self)  # the rest has a separate time limit
            await self._drop_rest()
            raise
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if not self._is_late or (this is not None and this.uncancel() > 0):
                raise
            raise HttpError(
                408, f"the body did not arrive within {limits.body_time:g} s", [CLOSE]
            ) from None
        finally:
            if is_watched:
                timeouts.forget(self)
        if piece is None:
            # The client left, or its chunks are malformed: granian reports both in the same way. A
            # client that left does not read the answer.
            raise HttpError(400, "the body is malformed, or ended too early", [CLOSE])
        whole = self._body = bytes(body)
        return whole

    async def _drop_rest(self) -> None:
        """Read the rest of a refused body, for a moment.

        Most clients read the answer after they have sent everything, and a connection that is
        closed with unread bytes is reset: they would see an error and no answer. A client that has
        asked first ("Expect: 100-continue", RFC 9110, section 10.1.1) waits for the answer.
        """
        if "expect" in self.headers.first:
            return
        most = LINGER_BYTES
        with contextlib.suppress(TimeoutError), self._server.timeouts.within(LINGER_TIME):
            while most > 0 and (piece := await self._read(None)):
                most -= len(piece)

    def expire(self) -> None:
        """Stop reading the body: its time limit has passed."""
        self._is_late = True
        self._server.cancel(self)

    # --- whether the answer arrives ---------------------------------------------------------------

    def watch(self, left: Callable[[], object] | None = None) -> None:
        """Watch whether the client leaves before its answer is written.

        Then `receipt` is notified, and `left` is called. Call this after the body is read.
        """
        self._on_leaving = left
        self._begin_watch()

    def watch_soon(self, left: Callable[[], object]) -> None:
        """Watch like `watch`, but from `WATCH_AFTER` seconds on.

        If a call needs to know whether its answer arrives, the client is watched at once.
        """
        self._on_leaving = left
        if self.receipt is not None and self.receipt.listeners:
            self._begin_watch()
            return
        loop = asyncio.get_running_loop()
        self._due = due = _Due(self)
        self._server.watches.watch(due, loop.time() + WATCH_AFTER, loop)

    def _begin_watch(self) -> None:
        if self._due is not None:
            self._cancel_due(self._due)
        self._watcher = watcher = self._leaving()
        watcher.add_done_callback(self._note_leaving)

    def _note_leaving(self, _: "asyncio.Future[None]") -> None:
        if self._watcher is None:
            return
        self.has_left = True
        if self.receipt is not None:
            self.receipt.lost()
        if self._on_leaving is not None:
            self._on_leaving()

    def _cancel_due(self, due: _Due) -> None:
        self._server.watches.forget(due)
        self._due = None

    def attend(self) -> None:
        """Watch the connection from now on: a call needs to know whether its answer arrives."""
        if self.receipt is None or self._arrival is not None:
            return
        client = self.address()
        if client is not None:
            self._arrival = self._server.arrivals.attend(
                client, self.receipt, is_forwarded=self.headers.is_forwarded()
            )
            if self.receipt.arrival is receipt.Arrival.LOST:
                # Without its socket, only the server can tell.
                self.receipt.has_left_before = self._arrival is not None or self._has_gone()
        if self._due is not None:
            self._begin_watch()

    def _has_gone(self) -> bool:
        """Return whether the server reports that the client has left."""
        if self._watcher is not None:
            return self._watcher.done()
        return self._is_gone()

    def follow(self) -> None:
        """Watch the client and the connection."""
        self.attend()
        self.watch()

    def written(self) -> None:
        """Note that the server has the whole answer.

        If the system reports arrivals, wait for that.
        """
        if self.receipt is None:
            return
        if self._arrival is None:
            self.receipt.written()
            return
        patience = self._server.limits.write_time
        self._server.arrivals.hand_over(
            self._arrival, is_stream=not self._has_length, patience=patience
        )

    def written_record(self, receipt: Receipt) -> None:
        """Note that the server has one record of a stream, with the receipt of its answer."""
        if self._arrival is None:
            receipt.written()
        else:
            self._arrival.note_record(receipt)

    def _count(self, size: int) -> None:
        """Count bytes that the client has to acknowledge."""
        if self._arrival is not None:
            self._arrival.due += size

    def _check_there(self) -> None:
        """Raise Gone if the client has left, without waiting.

        Servers do not report a write to a client that has left.
        """
        if self._watcher is None and not self.has_left:
            self.has_left = self._is_gone()
        if self.has_left:
            raise Gone("the client has left")

    async def _check_reader(self) -> None:
        """Raise Gone if the client has left: a call needs to know whether its answer is written."""
        if self._watcher is not None:
            watcher = self._watcher
            self._watcher = None
            if self._let_watcher_go(watcher):
                await asyncio.sleep(0)
        self._check_there()

    # --- answering --------------------------------------------------------------------------------

    def add_headers(self, fields: Pairs) -> None:
        """Add header fields to the answer, whatever it will be."""
        self._more = [*self._more, *fields]

    async def respond(
        self, status: int, body: bytes = b"", media: str = JSON, headers: Pairs = ()
    ) -> None:
        """Send the whole answer. `media` is ignored if there is no body."""
        if body:
            fields = [
                ("content-length", str(len(body))),
                ("content-type", media),
                *headers,
                *self._more,
            ]
        else:
            fields = [*headers, *self._more]
            if status != 204:  # RFC 9110, section 8.6
                fields.append(("content-length", "0"))
        self._has_length = True
        if len(body) > PIECE:
            self.started = True
            self._count(_head_bytes(fields))
            await self._finish_write(self._begin(status, fields))
            await self.close_stream(body)
        else:
            if self.receipt is not None and self.receipt.listeners:
                await self._check_reader()
            self.started = True
            if self._arrival is not None:
                self._count(_head_bytes(fields) + len(body))
            write = self._answer(status, fields, body)
            if write is not None:
                await self._finish_write(write)
            self._has_ended = True
        self.written()

    async def refuse(self, error: HttpError) -> None:
        """Answer with a JSON-RPC error. The server cuts an answer that has begun instead."""
        if self.receipt is not None:
            if self._arrival is not None:
                self._arrival.close()
                self._arrival = None
            self.receipt.lost()  # this is not the answer
            self.receipt = None
        if not self.started:
            with contextlib.suppress(Gone):
                await self.respond(error.status, self._refusal_of(error), headers=error.headers)

    def _refusal_of(self, error: HttpError) -> bytes:
        """Return the JSON-RPC error that a refusal carries."""
        code = InvalidRequest.CODE
        if error.status == 500:
            code = InternalError.CODE
        member: dict[str, Any] = {"code": code, "message": error.message}
        if error.data is not None:
            member["data"] = error.data
        answer: dict[str, Any] = {"jsonrpc": "2.0", "error": member}
        # No message was read. Then the id is null in JSON-RPC (2.0, section 5), and missing in MCP
        # (2025-11-25 and later, basic/transports: "a JSON-RPC error response that has no id").
        if self.path == RPC_PATH:
            answer["id"] = None
        return frames.encode(answer)

    def enter_stream(self) -> None:
        """Reserve a place for a stream that opens later; HttpError 503 if too many are open."""
        self._server.enter_stream(self)

    async def open_stream(self, headers: Pairs = (), media: str = EVENT_STREAM) -> None:
        """Begin a stream, of server-sent events by default; HttpError 503 if too many are open."""
        self._server.enter_stream(self)
        self.started = True
        fields = [("content-type", media), *STREAM_FIELDS, *headers, *self._more]
        if self._arrival is not None:
            self._count(_head_bytes(fields))
        await self._finish_write(self._begin(200, fields))

    async def write(self, chunk: bytes) -> None:
        """Send bytes of the open answer; Gone if the client has left or does not read."""
        for start in range(0, len(chunk), PIECE):
            self._check_there()
            piece = chunk[start : start + PIECE]
            self._count(self._length_of(piece))
            await self._finish_write(self._send_piece(piece))
            # A server drops the bytes for a client that has left, so it never waits. The loop needs
            # a turn to notice.
            self._unbroken += len(piece)
            if self._unbroken > PIECE or len(chunk) > PIECE:
                self._unbroken = 0
                await asyncio.sleep(0)

    async def close_stream(self, last: bytes = b"") -> None:
        """End the open answer with its last bytes; Gone if the client has left or does not read."""
        # Hold the last piece back: a server that has all bytes reports every client as gone.
        kept = max(len(last) - 1, 0) // PIECE * PIECE
        await self.write(last[:kept])
        if self.receipt is not None and self.receipt.listeners:
            await self._check_reader()
        self._count(self._length_of(last[kept:]))
        await self._finish_write(self._send_piece(last[kept:], is_last=True))
        self._has_ended = True

    def _length_of(self, piece: bytes) -> int:
        """Return the bytes that a piece takes on the connection.

        A chunk has its length in front, and line ends.
        """
        if self._has_length or not piece:
            return len(piece)
        return len(piece) + len(f"{len(piece):x}") + 4

    async def _finish_write(self, write: Coroutine[Any, Any, None]) -> None:
        """Await a write; Gone if the client has left or does not read."""
        try:
            is_done, rest = first_step(write)
            if not is_done:
                with self._server.timeouts.within(self._server.limits.write_time):
                    await rest
        except TimeoutError:
            raise Gone(
                f"the client did not read for {self._server.limits.write_time:g} s"
            ) from None
        except OSError as error:
            raise Gone("the client has left") from error
        except RuntimeError as error:
            if UVLOOP_CLOSED not in str(error):
                raise
            raise Gone("the client has left") from error

    def release(self) -> None:
        """Stop watching the client: the request is over. An answer that is not written is lost."""
        if self._due is not None:
            self._cancel_due(self._due)
        self._on_leaving = None
        if self._watcher is not None:
            watcher = self._watcher
            self._watcher = None
            self._let_watcher_go(watcher)
        if self._arrival is not None and not self._arrival.is_handed:
            self._arrival.look()
            self._arrival.close()
            self._arrival = None
        if self.receipt is not None and self._arrival is None:
            self.receipt.lost()
        self._let_go(cut=self.started and not self._has_ended)

    # --- the interface of a server ----------------------------------------------------------------

    @abstractmethod
    def address(self) -> ClientAddress | None:
        """Return the address of the client; None if it is unknown, or not an IP address."""

    @abstractmethod
    async def _read(self, length: int | None) -> bytes | None:
        """Return the next piece of the body, b"" after the last one.

        Return None if the client left, or the body is malformed. A server may return the whole body
        at once if the caller knows its length and can take all of it.
        """

    @abstractmethod
    def _leaving(self) -> "asyncio.Future[None]":
        """Return a watcher: a future that is done when the client has left.

        At most one exists at a time.
        """

    @abstractmethod
    def _let_watcher_go(self, watcher: "asyncio.Future[None]") -> bool:
        """Stop watching. Return whether the loop needs a turn before `_is_gone` may be called."""

    @abstractmethod
    def _is_gone(self) -> bool:
        """Return whether the client is known to have left.

        Must not be called while there is a watcher.
        """

    # Each of these may wait while the client does not read, and raises OSError if the client is
    # known to have left.

    @abstractmethod
    def _answer(
        self, status: int, fields: list[tuple[str, str]], body: bytes
    ) -> Coroutine[Any, Any, None] | None:
        """Send a whole answer, at once or with the coroutine that it returns."""

    @abstractmethod
    async def _begin(self, status: int, fields: list[tuple[str, str]]) -> None:
        """Begin an answer that is sent in pieces."""

    @abstractmethod
    async def _send_piece(self, piece: bytes, *, is_last: bool = False) -> None:
        """Send a piece of that answer."""

    @abstractmethod
    def _let_go(self, *, cut: bool) -> None:
        """Release the interface's resources.

        `cut`: the answer has begun and must not look complete.
        """


def announced_length(headers: Headers, limit: int) -> int | None:
    """Return the length of a body that its header announces; None if the body is chunked.

    HttpError if the header contradicts itself, or the body is encoded. A number with many digits is
    not converted: it counts as one above the limit.
    """
    fields = headers.first
    if "content-encoding" in fields:
        coding = headers["content-encoding"]
        if not {"", "identity"}.issuperset(coding.lower().replace(" ", "").split(",")):
            raise HttpError(
                415,
                f"Content-Encoding: expected identity, got {coding[:100]!r}:"
                " send the body as it is",
                [("accept-encoding", "identity")],
            )
    announced = fields.get("content-length")
    if announced is None:
        coding = headers.get("transfer-encoding") or "chunked"
        if coding.lower() != "chunked":  # RFC 9112, section 6.1
            raise HttpError(
                501, f"Transfer-Encoding: expected chunked, got {coding[:100]!r}", [CLOSE]
            )
        return None
    # uvicorn keeps the blanks around a value.
    length = announced.strip(" \t")
    if not (length.isascii() and length.isdigit()):
        raise HttpError(400, "Content-Length is not a number", [CLOSE])
    # RFC 9112, section 6.3: perhaps an attempt at request smuggling.
    if "transfer-encoding" in fields:
        raise HttpError(400, "Content-Length and Transfer-Encoding contradict each other", [CLOSE])
    if len(length) > 18:
        return limit + 1
    return int(length)


def _too_long(limit: int) -> HttpError:
    data = {"type": "limit_exceeded", "limit": "bytes_in", "max": limit}
    return HttpError(413, f"the body is longer than {limit} bytes", [CLOSE], data=data)


def _joined(body: bytes | bytearray, piece: bytes) -> bytearray:
    """Return a body with its next piece. Only the second piece makes a copy."""
    if isinstance(body, bytearray):
        body += piece
        return body
    return bytearray(body) + piece


def _head_bytes(fields: Pairs) -> int:
    """Return the bytes of an answer's head, as far as they are known; servers add fields."""
    return len("HTTP/1.1 200 \r\n\r\n") + sum(len(name) + len(value) + 4 for name, value in fields)
