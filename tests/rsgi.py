"""RSGI in this process: translates the ASGI events of a test's driver into granian's own interface.

The specification of RSGI is silent about the end of a body. In granian it is an empty piece; an
error in the body is one, too, and another one follows it. A connection has no socket here, so tests
that fill or cut one run over ASGI, and with real servers.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

INTERFACES = ("asgi", "rsgi")
# The interface that `drive` uses; a fixture sets it for tests that run over both.
interface = "asgi"


async def drive(server: Any, scope: Any, receive: Any, send: Any) -> None:
    """Call an application by the interface of the test."""
    if interface == "asgi" or scope["type"] != "http":
        await server(scope, receive, send)
        return
    length = dict(scope["headers"]).get(b"content-length")
    protocol = Protocol(receive, send, None if length is None else int(length))
    try:
        await server.__rsgi__(Scope(scope), protocol)
    finally:
        await protocol.end()


class Fields:
    """Leaves out values that are not ASCII, as granian does."""

    def __init__(self, pairs: list[tuple[bytes, bytes]]) -> None:
        self._pairs = pairs

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name.decode() for name, _ in self._pairs))

    def items(self) -> list[tuple[str, str]]:
        return [
            (name.decode(), value.strip(b" \t").decode())
            for name, value in self._pairs
            if value.isascii()
        ]


class Scope:
    def __init__(self, scope: Any) -> None:
        self.proto = "http"
        self.method: str = scope["method"]
        target: str = scope["path"]
        _, sign, rest = target.partition("://")
        authority, slash, path = rest.partition("/")
        self.authority = authority if sign else None
        self.path = slash + path if sign else target.removeprefix(scope.get("root_path") or "")
        self.query_string = (scope.get("query_string") or b"").decode("latin-1")
        self.client = "127.0.0.1:1"
        self.server = ":".join(map(str, scope.get("server") or ("", 0)))
        self.headers = Fields(list(scope["headers"]))


class Protocol:
    def __init__(
        self,
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
        length: int | None,
    ) -> None:
        self._receive = receive
        self._length = length
        self._send = send
        self._left: asyncio.Future[None] | None = None
        self._ending = 0  # empty pieces that are still to come
        self._is_read = False
        self._is_open = False
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._writing = asyncio.ensure_future(self._write())

    # --- the body ---------------------------------------------------------------------------------

    async def __call__(self) -> bytes:
        whole = b""
        more = True
        while more and len(whole) != self._length:
            event = await self._receive()
            if event["type"] != "http.request":
                raise RuntimeError("the stream is broken")
            whole = whole + event.get("body", b"")
            more = event.get("more_body", False)
        return whole

    def __aiter__(self) -> "Protocol":
        return self

    async def __anext__(self) -> bytes:
        if self._is_read:
            if not self._ending:
                raise StopAsyncIteration
            self._ending -= 1
            return b""
        event = await self._receive()
        if event["type"] != "http.request":
            self._is_read = True
            self._ending = 1
            return b""
        self._is_read = not event.get("more_body", False)
        self._ending = 1
        body: bytes = event.get("body", b"")
        return body or await self.__anext__()

    def client_disconnect(self) -> Awaitable[None]:
        if self._left is None or self._left.cancelled():
            self._left = asyncio.ensure_future(self._watch())
        return self._left

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # --- the answer -------------------------------------------------------------------------------

    def response_empty(self, status: int, headers: list[tuple[str, str]]) -> None:
        self.response_bytes(status, headers, b"")

    def response_bytes(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.response_stream(status, headers)
        self._put(body, more=False)

    def response_stream(self, status: int, headers: list[tuple[str, str]]) -> "Protocol":
        fields = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
        self._events.put_nowait(
            {"type": "http.response.start", "status": status, "headers": fields}
        )
        self._is_open = True
        return self

    async def send_bytes(self, data: bytes) -> None:
        if self._writing.done():
            raise RuntimeError("the client has left")
        self._put(data, more=True)

    def _put(self, body: bytes, *, more: bool) -> None:
        self._is_open = more
        self._events.put_nowait({"type": "http.response.body", "body": body, "more_body": more})

    async def _write(self) -> None:
        while (event := await self._events.get()) is not None:
            await self._send(event)

    async def end(self) -> None:
        if self._is_open:
            self._put(b"", more=False)  # an answer that the application drops looks complete
        self._events.put_nowait(None)
        if self._left is not None:
            self._left.cancel()
        await self._writing
