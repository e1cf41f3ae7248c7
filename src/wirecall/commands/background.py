"""What nobody waits for, but `aclose`: what a lost ledger left undone is made good, and what is over is swept away.

The rules of the file:

1. A chore is a task of its own, and is known until it ends. Without an event loop it cannot be done.
2. A ledger that is away is asked again, for up to a week. Who only waits to ask again is woken
   when the app stops.
3. What is taken back has done nothing in its run. What an earlier run may have done stays on record.
4. Records that are due are swept about once a minute, in small batches.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from wirecall.ledger.base import Claim, Ledger, LedgerDown, State, Token
from wirecall.logs import logger
from wirecall.tasks import at_home, end, is_alive

# Seconds until a ledger that is away is asked again: at once at first, and never rarely.
FIRST_PAUSE = 0.025
LAST_PAUSE = 5.0

GIVE_UP = 7 * 86_400.0  # seconds that a failed write is tried again

# A claim whose answer was lost may reach the store later than the question whether it did; so we ask twice.
UNCLAIM_AGAIN = 10.0

SWEEP_EVERY = 60.0
SWEEP_BATCH = 500


class Chores:
    """The chores of an app in this process."""

    def __init__(self) -> None:
        self.closing = False  # the app stops: nothing new is begun
        self._tasks: set[asyncio.Task[Any]] = set()
        self._naps: set[asyncio.Future[None]] = set()
        self._sweeps: dict[asyncio.AbstractEventLoop, asyncio.TimerHandle] = {}

    def do(self, chore: Any) -> None:
        """Begin a coroutine that nobody waits for."""
        try:
            task = asyncio.get_running_loop().create_task(chore)
        except RuntimeError:  # no event loop: it cannot be done
            chore.close()
            return
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def under_way(self) -> "list[asyncio.Task[Any]]":
        return list(filter(is_alive, list(self._tasks)))  # other threads may add to them

    def stop(self) -> None:
        self.closing = True
        for timer in list(self._sweeps.values()):
            timer.cancel()  # it only marks it, in whatever loop it is

    def wake(self) -> None:
        """Whoever sleeps goes on at once."""
        for nap in list(self._naps):
            at_home(nap, end, nap)

    # --- what a lost ledger left undone ------------------------------------------------------------------------------

    def unclaim(self, ledger: Ledger, claim: Claim) -> None:
        """A claim whose answer was lost may stand in the ledger; nothing ran, so it is taken back."""
        self.do(self._unclaim(ledger, claim))

    async def _unclaim(self, ledger: Ledger, claim: Claim) -> None:
        async def take_back() -> None:
            record = await ledger.get(claim.id)
            if record is None or record.nonce != claim.nonce:
                return
            if record.state is State.UNKNOWN and record.attempts == 1:  # a retry came before us, after the lease
                await ledger.resolve(claim.id, None)
            else:
                await give_back(ledger, record.token, record.attempts)

        await self._persist(take_back)
        await self._nap(UNCLAIM_AGAIN)
        await self._persist(take_back)

    def persist(self, action: Callable[[], Awaitable[Any]]) -> None:
        """Retry a write until it succeeds, for up to a week; when the app stops, for as long as its grace allows."""
        self.do(self._persist(action))

    async def _persist(self, action: Callable[[], Awaitable[Any]]) -> None:
        patience, delay = GIVE_UP, FIRST_PAUSE
        while patience > 0:
            try:
                await action()
                return
            except LedgerDown:
                await (asyncio.sleep(FIRST_PAUSE) if self.closing else self._nap(delay))
            patience -= delay
            delay = min(2 * delay, LAST_PAUSE)

    async def _nap(self, delay: float) -> None:
        """Sleep, but not while the app stops."""
        loop = asyncio.get_running_loop()
        nap: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(0 if self.closing else delay, end, nap)
        self._naps.add(nap)
        try:
            await nap
        finally:
            timer.cancel()
            self._naps.discard(nap)

    # --- sweeps ------------------------------------------------------------------------------------------------------

    def plan_sweep(self, ledger: Ledger, loop: asyncio.AbstractEventLoop) -> None:
        """Sweep about once a minute, at a random moment, so that many processes do not sweep together.

        Every loop plans its own, since nobody knows which of them will go on running.
        """
        if loop not in self._sweeps and not self.closing:
            self._forget_closed()
            delay = SWEEP_EVERY * random.uniform(0.5, 1.5)
            self._sweeps[loop] = loop.call_later(delay, lambda: self.do(self._sweep(ledger, loop)))

    def _forget_closed(self) -> None:
        for loop in [loop for loop in list(self._sweeps) if loop.is_closed()]:
            self._sweeps.pop(loop, None)

    async def _sweep(self, ledger: Ledger, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while not self.closing and await ledger.sweep(SWEEP_BATCH) == SWEEP_BATCH:
                continue
        except LedgerDown as error:
            logger.warning("the ledger was not swept: %s", error)
        self._sweeps.pop(loop, None)
        self.plan_sweep(ledger, loop)


def give_back(ledger: Ledger, token: Token, attempt: int) -> Awaitable[bool]:
    """Nothing was done in this run. If an earlier one may have done something, the record is its evidence and stays."""
    return ledger.release(token) if attempt == 1 else ledger.lapse(token)
