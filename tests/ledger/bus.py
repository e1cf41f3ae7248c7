"""Processes that listen to the bus of a ledger."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from wirecall.ledger.base import Bus, Ledger

PATIENCE = 30.0


class Heard:
    """The messages that one process receives."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        # How many times it began to listen.
        self.beginnings = 0
        self._news = asyncio.Event()

    def __call__(self, message: str | None) -> None:
        if message is None:
            self.beginnings += 1
        else:
            self.messages.append(message)
        self._news.set()

    async def until(self, fact: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not fact():
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def listening(ledger: Ledger, channel: str) -> AsyncIterator[tuple[Bus, Heard]]:
    heard = Heard()
    bus = ledger.join(channel, heard)
    assert bus is not None
    try:
        await heard.until(lambda: heard.beginnings > 0)
        yield bus, heard
    finally:
        await bus.aclose()


def channel_of() -> str:
    """One database serves all tests."""
    return f"test-{os.urandom(6).hex()}"
