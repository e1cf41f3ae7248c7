"""What a server tells of its changes, the same for all revisions.

    async with client.listen(tools=True, uris=["file:///notes"]) as changes:
        async for change in changes: ...

With a handshake the server tells of its lists by itself, and of resources that were subscribed to. At 2026-07-28 it tells
those who listen (`subscriptions/listen`), on a stream that may break: then it is asked for anew, and since anything may
have changed in between, everything that is listened to counts as changed.

A change that waits to be read is not told twice.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from wirecall.errors import WirecallError

Kind: TypeAlias = Literal["tools", "prompts", "resources", "updated"]

# The notification of each kind.
KINDS: dict[str, Kind] = {
    "notifications/tools/list_changed": "tools",
    "notifications/prompts/list_changed": "prompts",
    "notifications/resources/list_changed": "resources",
    "notifications/resources/updated": "updated",
}


class Change(Struct, frozen=True):
    """A list of the server's has changed, or a resource was updated."""

    kind: Kind
    uri: str | None = None


class Changes:
    """The changes that somebody listens to, one after another."""

    def __init__(
        self,
        lists: Iterable[Kind],
        uris: Iterable[str],
        *,
        begin: Callable[["Changes"], Awaitable[None]],
        end: Callable[["Changes"], Awaitable[None]],
    ) -> None:
        self.lists = frozenset(lists)
        self.uris = frozenset(uris)
        self.honoured: dict[str, Any] | None = None  # 2026-07-28: what the server says it will tell of
        self._begin = begin
        self._end = end
        self._pending: dict[Change, None] = {}
        self._news = asyncio.Event()
        self._over: WirecallError | bool = False

    async def __aenter__(self) -> "Changes":
        await self._begin(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end(self)
        self.finish()

    def __aiter__(self) -> "Changes":
        return self

    async def __anext__(self) -> Change:
        while not self._pending:
            if isinstance(self._over, WirecallError):
                raise self._over
            if self._over:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        change = next(iter(self._pending))
        del self._pending[change]
        return change

    def wants(self, change: Change) -> bool:
        return change.uri in self.uris if change.kind == "updated" else change.kind in self.lists

    def tell(self, change: Change) -> None:
        if self.wants(change):
            self._pending[change] = None
            self._news.set()

    def everything(self) -> list[Change]:
        """What may have happened while nobody could hear it."""
        return [*(Change(kind) for kind in sorted(self.lists)), *(Change("updated", uri) for uri in sorted(self.uris))]

    def finish(self, error: WirecallError | None = None) -> None:
        """Nothing more will come."""
        self._over = self._over or error or True
        self._news.set()

    def filter(self) -> dict[str, Any]:
        """What `subscriptions/listen` asks for."""
        wanted: dict[str, Any] = {f"{kind}ListChanged": True for kind in sorted(self.lists)}
        return {**wanted, "resourceSubscriptions": sorted(self.uris)} if self.uris else wanted
