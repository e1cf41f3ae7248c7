"""Calls of one moment in one message (B4).

A call that may be repeated waits up to `window` seconds for company; then all that wait leave together. Each caller is woken
by its own answer, not by the last one. When a caller gives up, the others go on.
"""

import asyncio
from collections.abc import Awaitable, Callable

from wirecall.client.exchange import Entry
from wirecall.errors import ConnectionLost, UsageError


class Coalescer:
    """Collects entries, and gives them to `send` together."""

    def __init__(self, window: float, send: Callable[[list[Entry]], Awaitable[None]]) -> None:
        if not 0 <= window <= 1:
            raise UsageError(
                f"coalesce={window!r} is no window.", "every call waits that long", "use seconds, such as 0.002"
            )
        self._window = window
        self._send = send
        self._waiting: list[Entry] = []
        self._timer: asyncio.TimerHandle | None = None
        self._sending: set[asyncio.Task[None]] = set()

    async def add(self, entry: Entry, most: int) -> None:
        """Send an entry in company, and return when it is settled. `most` entries are as many as may go together."""
        loop = asyncio.get_running_loop()
        entry.waiter = loop.create_future()
        self._waiting.append(entry)
        if len(self._waiting) >= most:
            self._leave()
        elif self._timer is None:
            self._timer = loop.call_later(self._window, self._leave)
        await entry.waiter

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        entries, self._waiting = self._waiting, []
        task = asyncio.get_running_loop().create_task(self._carry(entries))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _carry(self, entries: list[Entry]) -> None:
        try:
            await self._send(entries)
        finally:  # whatever happened: nobody is left waiting
            for entry in entries:
                if not entry.is_settled:
                    entry.fail(ConnectionLost("the client was closed"))
                if entry.waiter is not None and not entry.waiter.done():
                    entry.waiter.set_result(None)

    async def aclose(self) -> None:
        """Send what waits; it will find the client closed. Wait for what is under way to notice."""
        if self._waiting:
            self._leave()
        for task in self._sending:
            task.cancel()
        if self._sending:
            await asyncio.wait(self._sending)
