"""A request over ASGI.

The server cuts an answer that has no last event: ASGI's HTTP specification leaves that to servers.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, MutableMapping
from types import CoroutineType
from typing import TYPE_CHECKING, Any, TypeAlias

from wirecall.aio import first_step
from wirecall.errors import Gone
from wirecall.transports.headers import Headers
from wirecall.transports.request import HttpRequest
from wirecall.transports.tcp import ClientAddress, address_of
from wirecall.transports.websocket import WebSocket

if TYPE_CHECKING:
    from wirecall.transports.http_server import HttpServer

Event: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = Event
Receive: TypeAlias = Callable[[], Awaitable[Event]]
Send: TypeAlias = Callable[[Event], Awaitable[None]]


def _host(end: Any) -> str:
    """Return the host of one end of a connection; "" if the server does not know it."""
    if not end:
        return ""
    return str(end[0])


class AsgiRequest(HttpRequest):
    """A request over ASGI."""

    authority = None
    _has_body = True
    # The server's future for the next event, while it is not done.
    _coming: Any = None

    def __init__(self, server: "HttpServer", scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        root: str = scope.get("root_path") or ""
        if root and path.startswith(root):
            path = path[len(root) :]
            self.root = root
        # uvicorn shows a target in absolute form unchanged; granian omits its authority.
        if not path.startswith("/") and "://" in path:
            self.authority, slash, path = path.partition("://")[2].partition("/")
            path = slash + path
        self.path = path
        # A WebSocket has none: it begins with GET.
        self.method = scope.get("method", "GET")
        self.headers = Headers(
            [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        )
        if server.is_loopback is None:
            self.headers.ends = (_host(scope.get("server")), _host(scope.get("client")))
        else:
            self.headers.ends = server.is_loopback
        self._server = server
        self._scope = scope
        self._receive = receive
        self._send = send

    @property
    def client(self) -> str | None:
        client = self._scope.get("client")
        if client is None:
            return None
        return f"{client[0]}:{client[1]}"

    @property
    def query(self) -> str:
        text: bytes = self._scope.get("query_string") or b""
        return text.decode("latin-1")

    def address(self) -> ClientAddress | None:
        client = self._scope.get("client")
        if client is None:
            return None
        server = self._scope.get("server")
        own = None
        with contextlib.suppress(ValueError, TypeError):
            if server is not None and server[1] is not None:
                own = int(server[1])  # granian has it as a string
            return address_of((client[0], client[1]), own)
        return None

    async def _read(self, length: int | None) -> bytes | None:
        while self._has_body:
            event = await self._receive()
            # Granian reports a client that left and malformed chunks in the same way.
            if event["type"] != "http.request":
                self._has_body = False
                return None
            self._has_body = bool(event.get("more_body"))
            piece: bytes = event.get("body") or b""
            if piece:
                return piece
        return b""

    def _leaving(self) -> "asyncio.Future[None]":
        return asyncio.get_running_loop().create_task(self._until_left())

    async def _until_left(self) -> None:
        try:
            # A transport that fails counts as a client that has left.
            with contextlib.suppress(Exception):
                while True:
                    coming = self._coming
                    if coming is None:
                        coming = self._receive()
                    event: Event = await coming
                    if event["type"] == "http.disconnect":
                        return
                    self._coming = None
        finally:
            self._coming = None  # a future that was awaited is done now, or cancelled

    def _let_watcher_go(self, watcher: "asyncio.Future[None]") -> bool:
        return watcher.cancel()  # the cancelled task drops the server's events

    def _is_gone(self) -> bool:
        # ASGI promises only an awaitable. A future (granian, while the client is there) completes
        # without being awaited: keep it, and check it again with the next piece. For anything else
        # one step is enough: a coroutine (uvicorn), or an object that already holds its event
        # (granian, after the client has left).
        coming = self._coming or self._receive()
        if asyncio.isfuture(coming):
            if not coming.done():
                self._coming = coming
                return False
            self._coming = None
            return _is_disconnect(coming.result())
        is_done, event = first_step(coming)
        if is_done:
            return _is_disconnect(event)
        if type(coming) is CoroutineType:
            coming.close()
        return False

    async def _answer(self, status: int, fields: list[tuple[str, str]], body: bytes) -> None:
        await self._begin(status, fields)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _begin(self, status: int, fields: list[tuple[str, str]]) -> None:
        headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in fields
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _send_piece(self, piece: bytes, *, is_last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": not is_last})

    def _let_go(self, *, cut: bool) -> None:
        # The server itself cuts an answer without its last event.
        if self._coming is not None:
            self._coming.cancel()
            self._coming = None


class AsgiSocket(AsgiRequest, WebSocket):
    """A WebSocket over ASGI."""

    async def _answer(self, status: int, fields: list[tuple[str, str]], body: bytes) -> None:
        """Refuse the connection."""
        if "websocket.http.response" not in (self._scope.get("extensions") or {}):
            await self._send({"type": "websocket.close", "code": 1008})  # the server answers 403
            return
        headers = [
            (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in fields
        ]
        kind = "websocket.http.response"
        await self._send({"type": f"{kind}.start", "status": status, "headers": headers})
        await self._send({"type": f"{kind}.body", "body": body, "more_body": False})

    async def _accept(self) -> None:
        await self._receive()  # websocket.connect
        await self._send({"type": "websocket.accept"})

    async def receive(self) -> str | bytes | None:
        event = await self._receive()
        if event["type"] != "websocket.receive":
            return None
        text: str | None = event.get("text")
        if text is not None:
            return text
        binary: bytes = event["bytes"]
        return binary

    async def send(self, text: str) -> None:
        await self._sent({"type": "websocket.send", "text": text})

    async def _close(self, code: int, reason: str) -> None:
        await self._sent({"type": "websocket.close", "code": code, "reason": reason})
        # A server that stops may drop the frame when this request ends: wait for the client's.
        while await self.receive() is not None:
            pass

    async def _sent(self, event: Event) -> None:
        try:
            await self._send(event)
        # Servers have errors of different kinds about a client that has left.
        except Exception as error:
            raise Gone("the client has left") from error


def _is_disconnect(event: Event) -> bool:
    return bool(event["type"] == "http.disconnect")
