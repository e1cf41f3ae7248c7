"""Listening to a server's changes in the way of its revision (`changes` says what that looks like from outside)."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from wirecall.client.retries import asked_pause
from wirecall.errors import CallFailed, RpcError, TimedOut, WirecallError
from wirecall.logs import logger
from wirecall.mcp.client.changes import Change, Changes

FIRST, FURTHEST = 0.5, 30.0  # seconds before a stream that broke is asked for again

Call = Callable[..., Awaitable[Any]]
Listen = Callable[[dict[str, Any], Callable[[int], None]], Awaitable[None]]


class Listening:
    """Everybody who listens on one client."""

    def __init__(self, call: Call, listen: Listen, timeout: float) -> None:
        self.is_stateless = False
        self._timeout = timeout
        self._call = call
        self._listen = listen  # one `subscriptions/listen`, until it ends
        self._all: list[Changes] = []
        self._uris: Counter[str] = Counter()  # how many want to hear of a resource
        self._streams: dict[Changes, asyncio.Task[None]] = {}
        self._ids: dict[Any, Changes] = {}
        self._acknowledged: dict[Changes, asyncio.Event] = {}

    def tell(self, change: Change, subscription: Any) -> None:
        """A change was heard: of one stream if it says so, else by all."""
        only = self._ids.get(subscription) if subscription is not None else None
        for changes in [only] if only is not None else self._all:
            changes.tell(change)

    async def begin(self, changes: Changes) -> None:
        self._all.append(changes)
        try:
            await (self._begin_stream(changes) if self.is_stateless else self._subscribe(changes))
        except BaseException:
            await self.end(changes)
            raise

    async def end(self, changes: Changes) -> None:
        if changes not in self._all:
            return
        self._all.remove(changes)
        stream = self._streams.pop(changes, None)
        if stream is not None:
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)
            return
        gone = [uri for uri in changes.uris if self._uris[uri] == 1]
        self._uris.subtract(changes.uris)
        for uri in gone:
            with suppress(WirecallError):
                await self._call("resources/unsubscribe", {"uri": uri})

    async def aclose(self) -> None:
        for changes in list(self._all):
            changes.finish()
        for task in self._streams.values():
            task.cancel()
        await asyncio.gather(*self._streams.values(), return_exceptions=True)

    def uris(self) -> list[str]:
        """The resources that somebody wants to hear of."""
        return sorted(uri for uri, count in self._uris.items() if count > 0)

    def missed(self, listeners: "list[Changes] | None" = None) -> None:
        """Nobody could hear for a while: all may have changed."""
        for changes in self._all if listeners is None else listeners:
            for change in changes.everything():
                changes.tell(change)

    # --- with a handshake --------------------------------------------------------------------------------------------

    async def _subscribe(self, changes: Changes) -> None:
        for uri in sorted(changes.uris):
            if not self._uris[uri]:
                await self._call("resources/subscribe", {"uri": uri})
        self._uris.update(changes.uris)

    # --- 2026-07-28 --------------------------------------------------------------------------------------------------

    async def _begin_stream(self, changes: Changes) -> None:
        acknowledged = self._acknowledged[changes] = asyncio.Event()
        stream = asyncio.get_running_loop().create_task(self._follow(changes))
        self._streams[changes] = stream
        waiting = asyncio.get_running_loop().create_task(acknowledged.wait())
        try:
            await asyncio.wait([stream, waiting], timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if stream.done():
            stream.result()
        elif not acknowledged.is_set():
            raise TimedOut(f"the server did not say within {self._timeout:g} s what it will tell of")

    async def _follow(self, changes: Changes) -> None:
        """Ask, hear until the stream ends, and ask again. What is refused the first time is raised."""
        pause = FIRST
        while True:
            ids: list[int] = []
            try:
                await self._listen({"notifications": changes.filter()}, partial(self._expect, changes, ids))
                pause = FIRST
            except (RpcError, CallFailed) as error:
                if changes.honoured is None:
                    raise
                if isinstance(error, RpcError):
                    changes.finish(error)
                    return
                logger.debug("a stream of changes broke: %s", error)
                pause = max(pause, asked_pause(error))
            finally:
                for id in ids:
                    self._ids.pop(id, None)
            await asyncio.sleep(pause)
            pause = min(FURTHEST, pause * 2)

    def _expect(self, changes: Changes, ids: list[int], id: int) -> None:
        self._ids[id] = changes
        ids.append(id)

    def acknowledged(self, id: Any, honoured: dict[str, Any]) -> None:
        changes = self._ids.get(id)
        if changes is None:
            return
        if changes.honoured is not None:
            self.missed([changes])  # it is not the first stream
        changes.honoured = honoured
        self._acknowledged[changes].set()
