"""An app behind a real server in the loop of a test, for tests of WebSockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from wirecall import App, Context


class Shop:
    """An app whose calls a test holds and lets go."""

    def __init__(self, **options: Any) -> None:
        self.app = App("shop", **options)
        self.begun = asyncio.Queue[int]()
        self.cancelled = asyncio.Queue[int]()
        self.release = asyncio.Event()
        # What `charge` has done.
        self.charged: list[int] = []
        self.app.query(name="add", notification_allowed=True)(lambda a, b: a + b)
        self.app.query(self.wait)
        self.app.command(self.charge)
        self.app.query(self.count)

    async def wait(self, number: int) -> int:
        self.begun.put_nowait(number)
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.put_nowait(number)
            raise
        return number

    async def charge(self, cents: int) -> int:
        self.charged.append(cents)
        self.begun.put_nowait(cents)
        await self.release.wait()
        return cents

    async def count(self, up_to: int, context: Context) -> str:
        for number in range(up_to):
            await context.notify("counted", {"number": number})
        return "done"

    @asynccontextmanager
    async def serving(self, server: str) -> AsyncIterator[str]:
        """Serve the app in this loop; yield the address without its scheme."""
        listening = asyncio.get_running_loop().create_future()
        kind: Any = server
        task = asyncio.create_task(
            self.app.serve(port=0, server=kind, listening=listening.set_result, grace=4.0)
        )
        await asyncio.wait({task, listening}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        self.task = task
        try:
            yield listening.result().removeprefix("http://")
        finally:
            self.release.set()
            task.cancel()
            await asyncio.wait({task})
