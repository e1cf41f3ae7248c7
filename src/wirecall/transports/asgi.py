"""ASGI as one side of a request: events of `receive` and `send`."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from types import CoroutineType
from typing import Any, TypeAlias

from wirecall.stepping import first_step
from wirecall.transports.request import Headers, Pairs

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
        await self.begin(status, fields)
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
