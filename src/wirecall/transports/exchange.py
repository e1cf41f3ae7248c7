"""One HTTP request and its answer, as the interface of a server carries them: ASGI, or RSGI, granian's own.

Only what their specifications name is used. ASGI has events of `receive` and `send`. RSGI has less:

1. RSGI has no way to wait for a client that is slow to read, and none to cut an answer: a stream that is let go of looks as
   if it had come to its end. Both are done with the connection's socket, which is a file of this process.
2. RSGI leaves out values that are not ASCII. A request without one of its fields may mean something else, so such a field is
   kept, with a value that no check accepts.
"""

import asyncio
import contextlib
import ipaddress
import os
import select
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, MutableMapping, Sequence
from stat import S_ISSOCK
from types import CoroutineType
from typing import Any, Protocol, TypeAlias, overload

from wirecall.stepping import first_step

Pairs: TypeAlias = Sequence[tuple[str, str]]

FILES = "/dev/fd" if os.path.isdir("/dev/fd") else ""  # lists the open files of this process; Windows does not have it
# Bytes of a stream after which its socket must be ready for more. The server itself holds any number of them.
AHEAD = 64 << 10
UNREADABLE = "\ufffd"


class Headers(Mapping[str, str]):
    """The header fields of a request. Names in any case; values without the blanks around them, as RFC 9110 demands.

    As a mapping it has one value for each name; where there are several, all of them with commas between them (RFC 9110,
    section 5.3). So a lookup never returns one value while a proxy in front has judged the other.
    """

    __slots__ = ("first", "has_doubles", "pairs")

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self.pairs = pairs  # names in lower case
        self.first = dict(reversed(pairs))  # the first value of each name; made in C, faster than any loop here
        self.has_doubles = len(self.first) != len(pairs)  # a name occurs twice

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

    def __getitem__(self, name: str) -> str:
        value = self.get(name)
        if value is None:
            raise KeyError(name)
        return value

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self.first

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(key for key, _ in self.pairs))

    def __len__(self) -> int:
        return len(self.first)


class HttpExchange(Protocol):
    """One request and its answer, as the interface of a server carries them: `asgi` and `rsgi` are the two."""

    method: str
    path: str
    authority: str | None  # of a target in absolute form
    headers: Headers

    def read(self, length: int | None) -> Coroutine[Any, Any, bytes | None]:
        """Return the next piece of the body, b"" after the last one, or None if the client left or sends something else.

        A server may return the whole body at once if the caller knows its length and is ready to take all of it.
        """
        ...

    def left(self) -> Coroutine[Any, Any, None]:
        """Return when the client has left. To be awaited after the body, once at a time; safe to cancel."""
        ...

    def has_left(self) -> bool:
        """Return whether the client is known to have left. Not to be called while `left` is awaited."""
        ...

    # Each of these may wait while the client does not read, and raises OSError if the client is known to have left.

    def respond(self, status: int, fields: Pairs, body: bytes) -> Coroutine[Any, Any, None]:
        """Send a whole answer."""
        ...

    def begin(self, status: int, fields: Pairs) -> Coroutine[Any, Any, None]:
        """Begin an answer that comes in pieces."""
        ...

    def send(self, piece: bytes, *, is_last: bool = False) -> Coroutine[Any, Any, None]:
        """Send a piece of that answer."""
        ...

    def release(self, *, cut: bool) -> None:
        """Let go of what this exchange holds. `cut`: the answer has begun and will not end, and must not look complete."""
        ...


# --- ASGI ------------------------------------------------------------------------------------------------------------

Event: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = Event
Receive: TypeAlias = Callable[[], Awaitable[Event]]
Send: TypeAlias = Callable[[Event], Awaitable[None]]


class AsgiExchange:
    """An `HttpExchange` over ASGI."""

    __slots__ = ("_coming", "_has_body", "_receive", "_send", "authority", "headers", "method", "path")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        root: str = scope.get("root_path") or ""
        if root and path.startswith(root):
            path = path[len(root) :]
        # uvicorn shows a target in absolute form as it came; granian leaves its authority out.
        self.authority: str | None = None
        if not path.startswith("/") and "://" in path:
            self.authority, slash, path = path.partition("://")[2].partition("/")
            path = slash + path
        self.path = path
        self.method: str = scope["method"]
        self.headers = Headers([(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]])
        self._receive = receive
        self._send = send
        self._has_body = True
        self._coming: Any = None  # a future of the server that will be the next event

    async def read(self, length: int | None) -> bytes | None:
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

    async def left(self) -> None:
        try:
            while True:
                coming = self._coming
                event: Event = await (self._receive() if coming is None else coming)
                if event["type"] == "http.disconnect":
                    return
                self._coming = None
        finally:
            self._coming = None  # a future that was awaited is done now, or cancelled

    def has_left(self) -> bool:
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

    async def respond(self, status: int, fields: Pairs, body: bytes) -> None:
        headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in fields]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def begin(self, status: int, fields: Pairs) -> None:
        headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in fields]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, piece: bytes, *, is_last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": not is_last})

    def release(self, *, cut: bool) -> None:
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


class RsgiSocket(Protocol):
    """A websocket, as RSGI gives it."""

    def close(self, status: int | None, /) -> object: ...


class RsgiExchange:
    """An `HttpExchange` over RSGI."""

    __slots__ = (
        *("_ahead", "_due", "_leaving", "_pieces", "_protocol", "_scope", "_socket", "_stream", "_was_read"),
        *("authority", "headers", "method", "path"),
    )

    def __init__(self, scope: RsgiScope, protocol: RsgiProtocol) -> None:
        self.method = scope.method
        self.path = scope.path
        self.authority = scope.authority
        fields = scope.headers
        self.headers = Headers(fields.items())
        if len(fields) != len(self.headers.first):
            unreadable = [(name, UNREADABLE) for name in fields if name not in self.headers.first]
            self.headers = Headers([*self.headers.pairs, *unreadable])
        self._scope = scope
        self._protocol = protocol
        self._was_read = False
        self._pieces: AsyncIterator[bytes] | None = None
        self._leaving: Any = None  # a future that is done when the client has left
        self._stream: Any = None
        self._ahead = 0  # bytes of the stream since its socket was ready for more
        self._socket: socket.socket | None = None
        self._due = 0  # bytes of the connection that the kernel is to take, as far as they were counted

    async def read(self, length: int | None) -> bytes | None:
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

    async def left(self) -> None:
        leaving = self._leaving or self._protocol.client_disconnect()
        self._leaving = None
        await leaving

    def has_left(self) -> bool:
        # Before the client has left, granian returns a future that goes on by itself: it is kept, and looked at again with
        # the next piece. Afterwards it returns an awaitable without a wait.
        leaving = self._leaving = self._leaving or self._protocol.client_disconnect()
        return not asyncio.isfuture(leaving) or leaving.done()

    async def respond(self, status: int, fields: Pairs, body: bytes) -> None:
        if body:
            self._protocol.response_bytes(status, list(fields), body)
        else:
            self._protocol.response_empty(status, list(fields))

    async def begin(self, status: int, fields: Pairs) -> None:
        self._stream = self._protocol.response_stream(status, list(fields))

    async def send(self, piece: bytes, *, is_last: bool = False) -> None:
        if piece:
            try:
                await self._stream.send_bytes(piece)
            except RuntimeError as error:
                raise ConnectionError("the client has left") from error
        self._ahead += len(piece)
        self._due += len(piece)
        if self._ahead > AHEAD:
            self._ahead = 0
            await self._until_ready()
        if is_last:
            self._stream = None  # this ends the answer

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

    def release(self, *, cut: bool) -> None:
        if cut and (connection := self._socket or self._connection()) is not None:
            with connection, contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        elif self._socket is not None:
            self._socket.close()
        self._stream = None
        if self._leaving is not None and asyncio.isfuture(self._leaving):
            self._leaving.cancel()


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
