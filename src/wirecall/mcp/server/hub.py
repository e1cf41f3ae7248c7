"""Who wants to hear of changes: listeners, and what reaches them.

A change is told to every listener that asked for its kind. What a listener has not taken yet is kept once: five changes of
one list are one message. So the memory of a slow listener is bounded by what there is to change.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from wirecall.protocol.messages import encode

CHANGES = ("tools", "prompts", "resources")
MAX_PENDING = 1000


class Listener:
    """One client's wish to hear of changes."""

    def __init__(self, wants: Callable[[str, str | None], bool], meta: dict[str, Any] | None = None) -> None:
        self.wants = wants  # kind ("tools", ..., "updated") and URI
        self._meta = meta
        self._pending: dict[bytes, None] = {}
        self._news = asyncio.Event()
        self._closed = False
        self.loop = asyncio.get_running_loop()

    def hear(self, kind: str, uri: str | None) -> None:
        if self.wants(kind, uri) and len(self._pending) < MAX_PENDING:
            self._pending[self._message(kind, uri)] = None
            self._news.set()

    def close(self) -> None:
        """Nobody listens any more."""
        self._closed = True
        self._news.set()

    async def next(self) -> bytes | None:
        """The next message; waits for one. None when it is closed."""
        while not self._pending and not self._closed:
            self._news.clear()
            await self._news.wait()
        if self._closed:
            return None
        message = next(iter(self._pending))
        del self._pending[message]
        return message

    def _message(self, kind: str, uri: str | None) -> bytes:
        method = "notifications/resources/updated" if kind == "updated" else f"notifications/{kind}/list_changed"
        params = {**({"uri": uri} if uri is not None else {}), **({"_meta": self._meta} if self._meta else {})}
        return encode({"jsonrpc": "2.0", "method": method, **({"params": params} if params else {})})


class Hub:
    """All listeners of this process."""

    def __init__(self) -> None:
        self._listeners: set[Listener] = set()
        self.beyond: Callable[[str, str | None], None] | None = None  # tells the other workers

    def add(self, listener: Listener) -> None:
        self._listeners.add(listener)

    def remove(self, listener: Listener) -> None:
        self._listeners.discard(listener)

    def tell(self, kind: str, uri: str | None = None) -> None:
        """Tell everybody, here and in other workers. May be called from any thread."""
        self.tell_here(kind, uri)
        if self.beyond is not None:
            self.beyond(kind, uri)

    def tell_here(self, kind: str, uri: str | None) -> None:
        for listener in tuple(self._listeners):
            if not listener.loop.is_closed():
                listener.loop.call_soon_threadsafe(listener.hear, kind, uri)
