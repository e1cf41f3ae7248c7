"""One HTTP request as an endpoint sees it, and the way to answer it. ASGI or RSGI, granian's own interface, carries it.

1. The straight path has no task and no timer. A limit is set when something really waits: for a body that has not arrived,
   or for a client that does not read. A client's leaving is watched only while `HttpRequest.gone` is awaited.
2. An endpoint ends with an answer or with an exception. `HttpError` is an answer; `Gone` means that the client has left.
3. A body is refused as too long before it is read, if its length is known. For a moment the server takes and drops the
   rest of it, so that the client reads the refusal.
4. Where a header has a field twice, a lookup returns both values.
5. Only what the specifications of the two interfaces name is used. RSGI has no way to wait for a client that is slow to
   read, and none to cut an answer: a stream that is let go of looks as if it had come to its end. Both are done with the
   connection's socket, which is a file of this process.
6. RSGI leaves out values that are not ASCII. A request without one of its fields may mean something else, so such a field is
   kept, with a value that no check accepts.
"""

import asyncio
import contextlib
import ipaddress
import os
import re
import select
import socket
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from stat import S_ISSOCK
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, overload

from wirecall.errors import Gone, InternalError, InvalidRequest, WirecallError
from wirecall.protocol import messages as frames
from wirecall.protocol.messages import Id, Limits, Sending
from wirecall.stepping import Signal, Timeouts, first_step

if TYPE_CHECKING:
    from wirecall.server.identity import Identity

Pairs: TypeAlias = Sequence[tuple[str, str]]
Endpoint: TypeAlias = Callable[["HttpRequest"], Awaitable[None]]

# A longer body is sent in pieces, so that the server notices a client that stops reading in the middle of it.
PIECE = 256 << 10
# How much of a body that was refused as too long is still taken, and for how long.
LINGER_BYTES = 64 << 20
LINGER_TIME = 1.0

FILES = "/dev/fd" if os.path.isdir("/dev/fd") else ""  # lists the open files of this process; Windows does not have it
# Bytes of a stream after which its socket must be ready for more. The server itself holds any number of them.
AHEAD = 64 << 10
UNREADABLE = "\ufffd"

JSON = "application/json"
KEY = "idempotency-key"
SECRET = frozenset({"authorization", "proxy-authorization", "cookie", "mcp-session-id"})
REPLAYED = "idempotent-replayed"  # marks an answer from the ledger
LONGEST_MARK = 4096  # characters of its value; many clients and proxies refuse an answer with a field of 8 KiB
CLOSE = ("connection", "close")
_STREAM_FIELDS = (
    ("content-type", "text/event-stream"),
    ("cache-control", "no-store"),
    ("x-accel-buffering", "no"),  # MCP 2026-07-28: proxies must not hold events back
)


def replayed_mark(ids: Sequence[Id], *, is_array: bool) -> Pairs:
    """Return the field that marks answers from the ledger: `true`, or of an array the ids of those answers, as JSON.

    A list that is too long is left out: with it, many clients could not read the answers at all.
    """
    told = frames.encode(ids).decode() if is_array else "true"
    # A header carries ASCII alone: other characters are escaped as JSON does it.
    told = re.sub("[^ -~]", lambda sign: re.sub("(....)", r"\\u\1", sign[0].encode("utf-16-be").hex()), told)
    return [(REPLAYED, told)] if len(told) <= LONGEST_MARK else ()


class HttpError(WirecallError):
    """A refusal of a request: a status, a message for the JSON-RPC error in the body, and header fields."""

    def __init__(self, status: int, message: str, headers: Pairs = (), *, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message
        self.headers = headers
        self.data = data


class Headers(Mapping[str, str]):
    """The header fields of a request. Names in any case; values without the blanks around them, as RFC 9110 demands.

    As a mapping it has one value for each name; where there are several, all of them with commas between them (RFC 9110,
    section 5.3). So a lookup never returns one value while a proxy in front has judged the other.
    """

    __slots__ = ("first", "has_doubles", "pairs")

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self.first = dict(reversed(pairs))  # the first value of each name; made in C, faster than any loop here
        self.has_doubles = len(self.first) != len(pairs)  # a name occurs twice
        # All fields, names in lower case, values of one name in their order. A stream that stays open should not keep its
        # fields twice.
        self.pairs: Collection[tuple[str, str]] = pairs if self.has_doubles else self.first.items()

    @overload
    def get(self, name: str, /) -> str | None: ...
    @overload
    def get(self, name: str, /, default: Any) -> Any: ...
    def get(self, name: str, /, default: Any = None) -> Any:
        """Return the value, or `default`."""
        if self.has_doubles:
            return ", ".join(self.all(name)) if name in self else default
        value = self.first.get(name.lower())
        return default if value is None else value.strip(" \t")

    def all(self, name: str) -> list[str]:
        """Return every value, in order."""
        wanted = name.lower()
        if wanted not in self.first:
            return []
        return [value.strip(" \t") for key, value in self.pairs if key == wanted]

    def shown(self) -> "Headers":
        """Return the fields that handlers may see. The others carry credentials, which would end up in logs."""
        return Headers([field for field in self.pairs if field[0] not in SECRET and field[1] != UNREADABLE])

    def __getitem__(self, name: str) -> str:
        value = self.get(name)
        if value is None:
            raise KeyError(name)
        return value

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self.first

    def __iter__(self) -> Iterator[str]:
        return reversed(self.first)

    def __len__(self) -> int:
        return len(self.first)


class Around(Protocol):
    """The server around a request, as the request sees it."""

    limits: Limits
    timeouts: Timeouts
    stopping: Signal

    def enter_stream(self, request: "HttpRequest") -> None:
        """HttpError 503 if too many streams are open."""

    def cancel(self, request: "HttpRequest") -> None:
        """Cancel the task of a request."""


class HttpRequest(ABC):
    """One HTTP request as an endpoint sees it, and the way to answer it.

    The methods at the end of the class are those that ASGI and RSGI have in ways of their own.
    """

    method: str
    path: str
    authority: str | None  # of a target in absolute form
    headers: Headers
    caller = ""  # anonymous, until authenticated
    identity: "Identity | None" = None  # of the caller, where a token named it
    holder = ""  # whose share an open stream counts against; "": there is none
    is_stream = False  # it counts as an open stream
    is_cut = False  # the server has cancelled it
    started = False  # a response has begun
    sending: Sending | None = None  # the way of the answers, where the endpoint has calls that want to know it
    has_left = False  # the client, as far as it was watched
    _server: Around
    _always_waits = False  # for its body, so a first step tells nothing
    _body: bytes | None = None
    _is_late = False  # the body did not arrive in time
    _more: Pairs = ()  # fields that every answer gets
    _has_ended = False  # the response is complete
    _watcher: "asyncio.Future[None] | None" = None  # done when the client has left
    _unbroken = 0  # bytes of the stream since the loop had its last turn

    @property
    def stopping(self) -> Signal:
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

    def key(self) -> str | None:
        """Return the idempotency key in the header of a single call; HttpError 400 if it is there twice, or not ASCII."""
        if KEY not in self.headers.first:
            return None
        key, *others = self.headers.all(KEY)
        if others:
            raise HttpError(400, "more than one Idempotency-Key header")
        if not key.isascii():
            raise HttpError(400, "Idempotency-Key: expected ASCII characters only")
        return key

    async def body(self) -> bytes:
        """Return the whole body; HttpError 413 if it is too long, 408 if it is late, 400 if it is cut or malformed."""
        if self._body is not None:
            return self._body
        fields, timeouts, limits = self.headers.first, self._server.timeouts, self._server.limits
        limit, expected = limits.bytes_in, None
        body: bytes | bytearray = b""
        is_watched = False
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
            else:
                if not (length.isascii() and length.isdigit()):
                    raise HttpError(400, "Content-Length is not a number", [CLOSE])
                if "transfer-encoding" in fields:  # RFC 9112, section 6.3: perhaps an attempt at request smuggling
                    raise HttpError(400, "Content-Length and Transfer-Encoding contradict each other", [CLOSE])
                expected = int(length) if len(length) <= 18 else limit + 1
            # Step 2: the pieces, nearly always one. All of them together have the time of the body.
            size = expected or 0
            while True:
                if size > limit:
                    data = {"type": "limit_exceeded", "limit": "bytes_in", "max": limit}
                    raise HttpError(413, f"the body is longer than {limit} bytes", [CLOSE], data=data)
                piece: Any = self._read(expected)
                done = False
                if not self._always_waits:
                    done, piece = first_step(piece)
                if not done:
                    if not is_watched:
                        loop, is_watched = asyncio.get_running_loop(), True
                        timeouts.watch(self, loop.time() + limits.body_time, loop)
                    piece = await piece
                if not piece:
                    break
                if body:
                    body = bytearray(body) if type(body) is bytes else body
                    body += piece
                else:
                    body = piece
                if len(body) == expected:
                    break
                size = max(size, len(body))
        except HttpError:
            # Most clients read the answer after they have sent everything, and a connection that is closed with unread
            # bytes is reset: they would see an error and no answer. So the rest is taken, for a moment. A client that has
            # asked first ("Expect: 100-continue", RFC 9110, section 10.1.1) waits for the answer.
            timeouts.forget(self)  # the rest has a time of its own
            if "expect" not in fields:
                most = LINGER_BYTES
                with contextlib.suppress(TimeoutError), timeouts.within(LINGER_TIME):
                    while most > 0 and (piece := await self._read(None)):
                        most -= len(piece)
            raise
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if not self._is_late or (this is not None and this.uncancel() > 0):
                raise
            raise HttpError(408, f"the body did not arrive within {limits.body_time:g} s", [CLOSE]) from None
        finally:
            if is_watched:
                timeouts.forget(self)
        if piece is None:
            # The client left, or sends something else than chunks: granian reports both in the same way. A client that left
            # does not read the answer.
            raise HttpError(400, "the body is malformed, or ended too early", [CLOSE])
        self._body = bytes(body)
        return self._body

    def expire(self) -> None:
        """End the reading of the body: its time is over."""
        self._is_late = True
        self._server.cancel(self)

    def watch(self, left: Callable[[], object] | None = None) -> None:
        """Look from now on whether the client leaves before its answer is written, and tell `sending`, and call `left`.

        To be called after the body is read.
        """

        def tell(_: "asyncio.Future[None]") -> None:
            if self._watcher is None:
                return
            self.has_left = True
            if self.sending is not None:
                self.sending.lost()
            if left is not None:
                left()

        self._watcher = watcher = self._leaving()
        watcher.add_done_callback(tell)

    def _check_there(self) -> None:
        """Raise Gone if the client has left, without waiting: servers do not report a write to a client that has left."""
        if self._watcher is None and not self.has_left:
            self.has_left = self._is_gone()
        if self.has_left:
            raise Gone("the client has left")

    async def _check_reader(self) -> None:
        """Raise Gone if the client has left: a call wants to know whether its answer is written."""
        if self._watcher is not None:
            watcher, self._watcher = self._watcher, None
            if self._let_watcher_go(watcher):
                await asyncio.sleep(0)
        self._check_there()

    # --- answering ---------------------------------------------------------------------------------------------------

    def add_headers(self, fields: Pairs) -> None:
        """Add header fields to the answer, whatever it will be."""
        self._more = [*self._more, *fields]

    async def respond(self, status: int, body: bytes = b"", media: str = JSON, headers: Pairs = ()) -> None:
        """Send the whole answer. `media` is left out where there is no body."""
        if body:
            fields = [("content-length", str(len(body))), ("content-type", media), *headers, *self._more]
        else:
            fields = [*headers, *self._more]
            if status != 204:  # RFC 9110, section 8.6
                fields.append(("content-length", "0"))
        if len(body) > PIECE:
            self.started = True
            await self._tell(self._begin(status, fields))
            await self.close_stream(body)
        else:
            if self.sending is not None and self.sending.listeners:
                await self._check_reader()
            self.started = True
            rest = self._answer(status, fields, body)
            if rest is not None:
                await self._tell(rest)
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
        await self._tell(self._begin(200, [*_STREAM_FIELDS, *headers, *self._more]))

    async def write(self, chunk: bytes) -> None:
        """Send bytes of the open answer; Gone if the client has left or does not read."""
        for start in range(0, len(chunk), PIECE):
            self._check_there()
            piece = chunk[start : start + PIECE]
            await self._tell(self._send_piece(piece))
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
        if self.sending is not None and self.sending.listeners:
            await self._check_reader()
        await self._tell(self._send_piece(last[kept:], is_last=True))
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
            watcher, self._watcher = self._watcher, None
            self._let_watcher_go(watcher)
        if self.sending is not None and not self.sending.is_written:
            self.sending.lost()
        self._let_go(cut=self.started and not self._has_ended)

    # --- the interface of a server -----------------------------------------------------------------------------------

    @abstractmethod
    async def _read(self, length: int | None) -> bytes | None:
        """Return the next piece of the body, b"" after the last one, or None if the client left or sends something else.

        A server may return the whole body at once if the caller knows its length and is ready to take all of it.
        """

    @abstractmethod
    def _leaving(self) -> "asyncio.Future[None]":
        """Return a future that is done when the client has left: a watcher, one at a time."""

    @abstractmethod
    def _let_watcher_go(self, watcher: "asyncio.Future[None]") -> bool:
        """Stop watching. Return whether the loop has to have a turn before `_is_gone` may be called."""

    @abstractmethod
    def _is_gone(self) -> bool:
        """Return whether the client is known to have left. Not to be called while there is a watcher."""

    # Each of these may wait while the client does not read, and raises OSError if the client is known to have left.

    @abstractmethod
    def _answer(self, status: int, fields: list[tuple[str, str]], body: bytes) -> Coroutine[Any, Any, None] | None:
        """Send a whole answer, at once or by the coroutine that is returned."""

    @abstractmethod
    async def _begin(self, status: int, fields: list[tuple[str, str]]) -> None:
        """Begin an answer that comes in pieces."""

    @abstractmethod
    async def _send_piece(self, piece: bytes, *, is_last: bool = False) -> None:
        """Send a piece of that answer."""

    @abstractmethod
    def _let_go(self, *, cut: bool) -> None:
        """Let go of what the interface holds. `cut`: the answer has begun and will not end, and must not look complete."""


# --- ASGI ------------------------------------------------------------------------------------------------------------

Event: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = Event
Receive: TypeAlias = Callable[[], Awaitable[Event]]
Send: TypeAlias = Callable[[Event], Awaitable[None]]


class AsgiRequest(HttpRequest):
    """A request over ASGI."""

    authority = None
    _has_body = True
    _coming: Any = None  # a future of the server that will be the next event

    def __init__(self, server: Around, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        root: str = scope.get("root_path") or ""
        if root and path.startswith(root):
            path = path[len(root) :]
        # uvicorn shows a target in absolute form as it came; granian leaves its authority out.
        if not path.startswith("/") and "://" in path:
            self.authority, slash, path = path.partition("://")[2].partition("/")
            path = slash + path
        self.path = path
        self.method = scope["method"]
        self.headers = Headers([(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]])
        self._server = server
        self._receive = receive
        self._send = send

    async def _read(self, length: int | None) -> bytes | None:
        while self._has_body:
            event = await self._receive()
            if event["type"] != "http.request":  # granian reports a client that left and malformed chunks in the same way
                self._has_body = False
                return None
            self._has_body = bool(event.get("more_body"))
            piece: bytes = event.get("body") or b""
            if piece:
                return piece
        return b""

    def _leaving(self) -> "asyncio.Future[None]":
        async def until_left() -> None:
            try:
                with contextlib.suppress(Exception):  # a transport that fails counts as a client that has left
                    while True:
                        coming = self._coming
                        event: Event = await (self._receive() if coming is None else coming)
                        if event["type"] == "http.disconnect":
                            return
                        self._coming = None
            finally:
                self._coming = None  # a future that was awaited is done now, or cancelled

        return asyncio.get_running_loop().create_task(until_left())

    def _let_watcher_go(self, watcher: "asyncio.Future[None]") -> bool:
        return watcher.cancel()  # in its turn it lets go of the server's events

    def _is_gone(self) -> bool:
        # ASGI promises an awaitable and no more. A future (granian, while the client is there) goes on by itself: it is
        # kept, and looked at again with the next piece. Of anything else one step tells: a coroutine (uvicorn), or an
        # object that holds its event already (granian, after the client has left).
        coming = self._coming or self._receive()
        if asyncio.isfuture(coming):
            done, self._coming = coming.done(), None if coming.done() else coming
            event: Event = coming.result() if done else {}
        else:
            done, event = first_step(coming)
            if not done and type(coming) is CoroutineType:
                coming.close()
        return done and event["type"] == "http.disconnect"

    async def _answer(self, status: int, fields: list[tuple[str, str]], body: bytes) -> None:
        await self._begin(status, fields)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _begin(self, status: int, fields: list[tuple[str, str]]) -> None:
        headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in fields]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _send_piece(self, piece: bytes, *, is_last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": not is_last})

    def _let_go(self, *, cut: bool) -> None:
        # An answer without its last event is cut by the server itself (ASGI's HTTP specification leaves that to servers).
        if self._coming is not None:
            self._coming.cancel()


# --- RSGI ------------------------------------------------------------------------------------------------------------


class RsgiHeaders(Protocol):
    """The header fields that RSGI gives; names in lower case."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[str]: ...
    def items(self) -> list[tuple[str, str]]: ...


class RsgiScope(Protocol):
    """The request that RSGI gives."""

    proto: str  # "http", or "ws"
    method: str
    path: str
    authority: str | None
    client: str

    @property
    def headers(self) -> RsgiHeaders: ...


class RsgiProtocol(Protocol):
    """The body of a request and the way to answer it, as RSGI gives them."""

    def __call__(self) -> Awaitable[bytes]: ...
    def __aiter__(self) -> AsyncIterator[bytes]: ...
    def client_disconnect(self) -> Awaitable[None]: ...
    def response_empty(self, status: int, headers: list[tuple[str, str]]) -> None: ...
    def response_bytes(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None: ...
    def response_stream(self, status: int, headers: list[tuple[str, str]]) -> Any: ...


class RsgiRequest(HttpRequest):
    """A request over RSGI."""

    _always_waits = True
    _was_read = False
    _pieces: AsyncIterator[bytes] | None = None
    _left: Any = None  # a future that is done when the client has left
    _stream: Any = None
    _ahead = 0  # bytes of the stream since its socket was ready for more
    _socket: socket.socket | None = None
    _due = 0  # bytes of the connection that the kernel is to take, as far as they were counted

    def __init__(self, server: Around, scope: RsgiScope, protocol: RsgiProtocol) -> None:
        self.method = scope.method
        self.path = scope.path
        self.authority = scope.authority
        fields = scope.headers
        self.headers = headers = Headers(fields.items())
        if len(fields) != len(headers.first):
            unreadable = [(name, UNREADABLE) for name in fields if name not in headers.first]
            self.headers = Headers([*headers.pairs, *unreadable])
        self._server = server
        self._scope = scope
        self._protocol = protocol

    async def _read(self, length: int | None) -> bytes | None:
        if self._was_read:
            return b""
        try:
            if length is not None:
                self._was_read = True
                return await self._protocol()
            if self._pieces is None:
                self._pieces = aiter(self._protocol)
            if piece := await anext(self._pieces):
                return piece
            # An empty piece is the end. With another one behind it, it stood for trailers or for malformed chunks.
            self._was_read = True
            await anext(self._pieces)
            return b"" if "trailer" in self.headers else None
        except StopAsyncIteration:
            return b""
        except RuntimeError:  # granian's errors about a client that has left
            return None

    def _leaving(self) -> "asyncio.Future[None]":
        left, self._left = self._left or self._protocol.client_disconnect(), None
        return asyncio.ensure_future(left)  # it is one already, while the client is there

    def _let_watcher_go(self, watcher: "asyncio.Future[None]") -> bool:
        self._left = watcher
        return False

    def _is_gone(self) -> bool:
        # Before the client has left, granian returns a future that goes on by itself: it is kept, and looked at again with
        # the next piece. Afterwards it returns an awaitable without a wait.
        left = self._left = self._left or self._protocol.client_disconnect()
        return not asyncio.isfuture(left) or left.done()

    def _answer(self, status: int, fields: list[tuple[str, str]], body: bytes) -> None:
        if body:
            self._protocol.response_bytes(status, fields, body)
        else:
            self._protocol.response_empty(status, fields)

    async def _begin(self, status: int, fields: list[tuple[str, str]]) -> None:
        self._stream = self._protocol.response_stream(status, fields)

    async def _send_piece(self, piece: bytes, *, is_last: bool = False) -> None:
        if piece:
            try:
                await self._stream.send_bytes(piece)
            except RuntimeError as error:
                raise ConnectionError("the client has left") from error
        if is_last:
            # This ends the answer: the server has all of it. To look at the socket now could take a client that has read
            # the answer and closed the connection for one that has left.
            self._stream = None
            return
        self._ahead += len(piece)
        self._due += len(piece)
        if self._ahead > AHEAD:
            self._ahead = 0
            await self._until_ready()

    async def _until_ready(self) -> None:
        """Wait until the kernel has nearly all bytes of the stream and takes more of them."""
        if self._socket is None:
            self._socket = self._connection()
            if self._socket is None:  # closed, which the next piece reports, or not one that the process can find
                return
            # The count begins here, in the middle of the stream: the bytes so far are the lead that granian may keep.
            self._due = _taken(self._socket) or 0
        ready, state = asyncio.Event(), select.poll()
        state.register(self._socket, select.POLLOUT)
        loop = asyncio.get_running_loop()
        while True:
            loop.add_writer(self._socket, ready.set)
            try:
                await ready.wait()
            finally:
                loop.remove_writer(self._socket)
            # A connection that has failed is ready, too, and granian takes bytes for it until its own thread has noticed.
            if any(event & (select.POLLERR | select.POLLHUP) for _, event in state.poll(0)):
                raise ConnectionError("the client has left")
            taken = _taken(self._socket)
            if taken is None or taken >= self._due - AHEAD:
                return
            ready.clear()
            await asyncio.sleep(0.001)  # granian's own thread has still to write

    def _connection(self) -> socket.socket | None:
        """Return a duplicate of the connection's socket, or None if it is closed or is not a socket of IP."""

        def address(pair: Any) -> tuple[object, int]:
            host, port = pair  # ValueError for the name of a socket that is not one of IP
            # Rust and Python write the zone of an address in two ways, so it is left out.
            return ipaddress.ip_address(host.strip("[]").partition("%")[0]), int(port)

        with contextlib.suppress(ValueError):  # a path
            client = address(self._scope.client.rpartition(":")[::2])
            for each in open_sockets():
                with contextlib.suppress(OSError, ValueError):  # it is not connected, or is not a socket of IP
                    if address(each.getpeername()[:2]) == client:
                        return socket.socket(fileno=os.dup(each.fileno()))  # `each.dup()` would make it block
        return None

    def _let_go(self, *, cut: bool) -> None:
        if cut and (connection := self._socket or self._connection()) is not None:
            with connection, contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        elif self._socket is not None:
            self._socket.close()
        self._stream = None
        if self._left is not None and asyncio.isfuture(self._left):
            self._left.cancel()


def open_sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of every socket of this process, open until the next one."""
    for name in os.listdir(FILES) if FILES else ():
        with contextlib.suppress(OSError):
            # Only a socket may be duplicated: to close the duplicate of a SQLite file would drop its locks (fcntl).
            if S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as each:
                    yield each


def _taken(connection: socket.socket) -> int | None:
    """Return the bytes that the kernel has taken for a connection since it began; None if the kernel does not tell."""
    if sys.platform != "linux":
        return None
    # struct tcp_info of linux/tcp.h, since Linux 4.19: bytes that wait, bytes that were sent, those of them sent again.
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216)
    if len(info) < 216:
        return None
    waiting: int = struct.unpack_from("=I", info, 144)[0]
    sent, again = struct.unpack_from("=QQ", info, 200)
    return waiting + int(sent) - int(again)
