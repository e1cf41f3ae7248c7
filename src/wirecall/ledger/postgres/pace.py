"""When the next statement of a queue leaves: a slow server gets fewer and larger statements.

What a statement costs PostgreSQL depends little on how many commands it carries. With many
processes, each has few commands in flight, and those that wait for different statements never meet.
So a queue waits a moment for the commands of this process that are in flight elsewhere: they return,
continue, and join the queue.

The rules of the file:

1. The wait is half of what statements took lately, and at most `LONGEST`. Below `SHORTEST` there is
   none: the server is quick, and an event loop counts in milliseconds.
2. It ends early when no other command is in flight, or enough are in the queue. So a lone call never
   waits, and neither do many.
"""

import asyncio

from wirecall.aio import wake

LONGEST = 0.002
SHORTEST = 0.0005

# With so many in a statement, its own price no longer matters.
ENOUGH = 24

# How much of the average is the time of the last statement.
WEIGHT = 0.1


class Pace:
    """What the queues of an event loop know about each other."""

    def __init__(self) -> None:
        # Items that were sent and not answered.
        self._in_flight = 0
        self._took = 0.0
        self._gathering: set[asyncio.Future[None]] = set()

    async def gather(self) -> None:
        """Wait for items that may join those of a queue."""
        most = min(self._took / 2, LONGEST)
        if most < SHORTEST or not self._in_flight:
            return
        loop = asyncio.get_running_loop()
        gathered: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(most, wake, gathered, None)
        self._gathering.add(gathered)
        try:
            await gathered
        finally:
            timer.cancel()
            self._gathering.discard(gathered)

    def hurry(self) -> None:
        """End the waits: nothing more is worth waiting for."""
        for gathered in self._gathering:
            wake(gathered, None)

    def took_off(self, items: int) -> float:
        """Note that a statement leaves; return the time."""
        self._in_flight += items
        return asyncio.get_running_loop().time()

    def landed(self, items: int, since: float) -> None:
        """Note that a statement is answered, and its callers know."""
        self._in_flight -= items
        took = asyncio.get_running_loop().time() - since
        self._took += WEIGHT * (took - self._took)
        if not self._in_flight:
            self.hurry()
