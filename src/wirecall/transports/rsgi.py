"""A request over RSGI, granian's own interface.

1. This module uses only what the specification defines.
2. RSGI cannot wait for a client that is slow to read, and cannot cut an answer: a stream that is
   dropped looks complete. This module does both with the connection's socket (`tcp`).
3. RSGI omits values that are not ASCII. Such a field is kept as unreadable (`headers`).
4. RSGI closes a WebSocket without a code. This module writes the frame with the code to the
   connection's socket.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from wirecall.errors import Gone
from wirecall.transports.headers import UNREADABLE, Headers
from wirecall.transports.request import HttpRequest
from wirecall.transports.tcp import ClientAddress, SendQueue, address_of
from wirecall.transports.websocket import WebSocket, closing_frame

if TYPE_CHECKING:
    from wirecall.transports.http_server import HttpServer

# Bytes of a stream after which its socket must be ready for more. The server itself holds any
# number of them.
AHEAD = 64 << 10


class RsgiHeaders(Protocol):
    """The header fields from RSGI; names are in lower case."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[str]: ...
    def items(self) -> list[tuple[str, str]]: ...


class RsgiScope(Protocol):
    """The request from RSGI."""

    # "http", or "ws".
    proto: str
    method: str
    path: str
    query_string: str
    authority: str | None
    client: str
    server: str

    @property
    def headers(self) -> RsgiHeaders: ...


class RsgiProtocol(Protocol):
    """The body of a request and the methods to answer it, from RSGI."""

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
    # Yields the pieces of a body of unknown length.
    _pieces: AsyncIterator[bytes] | None = None
    # A future of the server that is done when the client has left.
    _left: Any = None
    # The server's stream, while an answer is sent in pieces.
    _stream: Any = None
    # The bytes of the stream since its socket was last ready for more.
    _ahead = 0
    # The bytes of the stream that the kernel has not taken; made when it first matters.
    _queue: SendQueue | None = None

    def __init__(self, server: "HttpServer", scope: RsgiScope, protocol: RsgiProtocol) -> None:
        self.method = scope.method
        self.path = scope.path
        self.authority = scope.authority
        fields = scope.headers
        self.headers = headers = Headers(fields.items())
        if len(fields) != len(headers.first):
            unreadable = [(name, UNREADABLE) for name in fields if name not in headers.first]
            self.headers = Headers([*headers.pairs, *unreadable])
        if server.is_loopback is None:
            self.headers.ends = (scope.server.rpartition(":")[0], scope.client.rpartition(":")[0])
        else:
            self.headers.ends = server.is_loopback
        self._server = server
        self._scope = scope
        self._protocol = protocol

    @property
    def client(self) -> str | None:
        return self._scope.client or None

    @property
    def query(self) -> str:
        return self._scope.query_string

    def address(self) -> ClientAddress | None:
        host, _, port = self._scope.client.rpartition(":")
        with contextlib.suppress(ValueError):  # a path
            return address_of((host, port), int(self._scope.server.rpartition(":")[2]))
        return None

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
            # An empty piece is the end. If another one follows, it stood for trailers or for
            # malformed chunks.
            self._was_read = True
            await anext(self._pieces)
        except StopAsyncIteration:
            return b""
        except RuntimeError:  # granian's errors about a client that has left
            return None
        if "trailer" in self.headers:
            return b""
        return None

    def _leaving(self) -> "asyncio.Future[None]":
        left = self._left or self._protocol.client_disconnect()
        self._left = None
        return asyncio.ensure_future(left)  # it already is a future while the client is there

    def _let_watcher_go(self, watcher: "asyncio.Future[None]") -> bool:
        self._left = watcher
        return False

    def _has_gone(self) -> bool:
        # granian gives the address of the socket itself. A socket that is not found is closed.
        return True

    def _is_gone(self) -> bool:
        # Before the client has left, granian returns a future that completes without being awaited:
        # keep it, and check it again with the next piece. Afterwards it returns an awaitable that
        # does not wait.
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
            # This ends the answer: the server has all of it. Checking the socket now could mistake
            # a client that has read the answer and closed the connection for one that has left.
            self._stream = None
            return
        self._ahead += len(piece)
        if self._queue is not None:
            self._queue.due += len(piece)
        if self._ahead > AHEAD:
            self._ahead = 0
            await self._until_ready()

    async def _until_ready(self) -> None:
        """Wait until the kernel has nearly all bytes of the stream and can take more."""
        if self._queue is None:
            connection = self._connection()
            # Closed, which the next piece reports, or this process cannot find it.
            if connection is None:
                return
            self._queue = SendQueue(connection)
        await self._queue.until_ready(AHEAD)

    def _connection(self) -> socket.socket | None:
        """Return a duplicate of the connection's socket; None if it is closed, or not IP."""
        if self._queue is not None:
            return self._queue.connection
        client = self.address()
        if client is None:
            return None
        return self._server.arrivals.find(client)

    def _let_go(self, *, cut: bool) -> None:
        if cut:
            self._cut()
        if self._queue is not None:
            self._queue.connection.close()
        if self._left is not None:
            if asyncio.isfuture(self._left):
                self._left.cancel()
            # granian's future holds the callback of a watcher, which holds this request. Python's
            # garbage collector does not see this cycle: it would keep the request, its answer and
            # its command.
            self._left = None

    def _cut(self) -> None:
        """Shut the connection down, so that the answer does not look complete."""
        connection = self._connection()
        if connection is not None:
            with connection, contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        # Only now: granian ends the answer when its stream is dropped.
        self._stream = None


# The kinds of messages of a WebSocket: binary, and text.
BINARY = 1
TEXT = 2


class RsgiSocket(RsgiRequest, WebSocket):
    """A WebSocket over RSGI."""

    # The server's object for the messages, once the connection is accepted.
    _transport: Any = None

    def _answer(self, status: int, fields: list[tuple[str, str]], body: bytes) -> None:
        """Refuse the connection; RSGI sends only a status."""
        self._socket.close(status)

    @property
    def _socket(self) -> Any:
        """The server's object for the connection."""
        return self._protocol

    async def _accept(self) -> None:
        self._transport = await self._socket.accept()

    async def receive(self) -> str | bytes | None:
        try:
            message = await self._transport.receive()
        except RuntimeError:  # granian's error about a closed connection
            return None
        if message.kind == TEXT:
            text: str = message.data
            return text
        if message.kind == BINARY:
            binary: bytes = message.data
            return binary
        return None

    async def send(self, text: str) -> None:
        try:
            await self._transport.send_str(text)
        except RuntimeError as error:
            raise Gone("the client has left") from error

    async def _close(self, code: int, reason: str) -> None:
        connection = self._connection()
        if connection is not None:
            with connection, contextlib.suppress(OSError):
                connection.send(closing_frame(code, reason))
        self._socket.close(None)
