"""Waiting with a limit, at no cost while nobody waits.

1. `first_step` tells whether something has to be waited for at all. Most things have not: the body has arrived with the
   header, the client reads. Then there is no task and no timer.
2. `Waits` has one timer for all who do wait. A limit may be exceeded by `Waits.TICK` seconds.
"""

import asyncio
from collections.abc import Awaitable, Generator, Iterator
from types import CoroutineType, coroutine
from typing import Any

from wirecall.stepping import resume


def first_step(awaitable: Awaitable[Any]) -> tuple[bool, Any]:
    """The first step of an awaitable: True and its value if it did not wait, else False and the rest of it to await."""
    if type(awaitable) is CoroutineType:
        try:
            return False, resume(awaitable, awaitable.send(None))
        except StopIteration as finished:
            return True, finished.value
    steps: Any = awaitable.__await__()
    try:
        return False, _rest(steps, next(steps))
    except StopIteration as finished:
        return True, finished.value


@coroutine
def _rest(steps: Iterator[Any], awaited: Any) -> Generator[Any, Any, Any]:
    yield awaited
    return (yield from steps)


class Waits:
    """Time limits for those who wait, by one timer for all: under granian every body is waited for, and a timer of its own
    (asyncio.timeout) would cost each request 6 µs more."""

    TICK = 0.25  # seconds that a limit may be exceeded by

    def __init__(self) -> None:
        self._until: dict[asyncio.Task[Any], float] = {}
        self._late: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def within(self, awaitable: Awaitable[Any], seconds: float) -> Any:
        """Await, or TimeoutError."""
        task = asyncio.current_task()
        assert task is not None
        loop = task.get_loop()
        self._until[task] = loop.time() + seconds
        if self._timer is None or self._loop is not loop:
            self._loop, self._timer = loop, loop.call_later(self.TICK, self._look)
        try:
            return await awaitable
        except asyncio.CancelledError:
            if task in self._late and task.uncancel() == 0:  # else somebody else has cancelled it too
                raise TimeoutError from None
            raise
        finally:
            del self._until[task]
            self._late.discard(task)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for task, until in self._until.items():
            if until <= now and task not in self._late:
                self._late.add(task)
                task.cancel()
        self._timer = loop.call_later(self.TICK, self._look) if self._until else None
