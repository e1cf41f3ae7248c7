"""The lifespan of an app: an async context manager that is open while the app serves.

Its value is `ctx.state`.

1. It runs in a separate task. The first call may enter it and the end of the app leave it, and a
   `TaskGroup` or a timeout inside it still begins and ends in one task. A call that is cancelled
   while it waits for the start does not stop it.
2. Servers and clients hold it; the last one to release it leaves it. `App.aclose` always leaves it.
   If the event loop ends first, its task is cancelled like any other, so its clean-up runs.
3. It belongs to one event loop at a time, like the commands of the app.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from wirecall.aio import start
from wirecall.errors import OtherLoop, StartFailed, UsageError
from wirecall.logs import logger, outside

# Seconds for the clean-up of a lifespan that was cancelled after the grace time.
LAST_WORDS = 1.0


def manager_of(made: object) -> AbstractAsyncContextManager[object]:
    """Return what a lifespan function has made, if it is an async context manager."""
    if not isinstance(made, AbstractAsyncContextManager):
        raise UsageError(
            f"lifespan must return an async context manager, got {type(made).__name__}.",
            fix="decorate the function with @contextlib.asynccontextmanager",
        )
    return made


class Lifespan:
    """Enters and leaves the context manager of an app.

    `within` returns the seconds that entering it may take.
    """

    def __init__(
        self, make: Callable[[], AbstractAsyncContextManager[object]], within: Callable[[], float]
    ) -> None:
        self.state: object = None
        self.is_entered = False
        self.has_ended = False  # it ended while the app serves
        self._make = make
        self._within = within
        self._holders = 0
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._entered: asyncio.Future[None] | None = None
        self._leaving: asyncio.Event | None = None

    async def enter(self) -> None:
        """Wait until the lifespan is entered; the first caller enters it. Raises `StartFailed`."""
        loop = asyncio.get_running_loop()
        if self.is_entered and self._loop is loop:
            return
        task = self._task
        entered = self._entered
        if task is not None and self._loop is not loop:
            assert self._loop is not None
            if not self._loop.is_closed():
                raise OtherLoop
            task = None
            self._holders = 0
        if task is None or entered is None or task.done():
            entered = self._begin(loop, task)
        await asyncio.shield(entered)

    async def hold(self) -> None:
        """Enter the lifespan, and hold it until `let_go`."""
        self._holders += 1
        try:
            await self.enter()
        except BaseException:
            self._holders -= 1
            if not self._holders and not self.is_entered and self._task is not None:
                self._task.cancel()  # nothing else waits for the start
            raise

    def let_go(self) -> bool:
        """Release a hold; return whether it was the last one.

        Then the caller must leave the lifespan.
        """
        self._holders = max(0, self._holders - 1)  # `leave` has dropped all holds
        return self._holders == 0 and self._task is not None

    async def leave(self, grace: float) -> None:
        """Leave the lifespan, within `grace` seconds."""
        task = self._task
        leaving = self._leaving
        self.is_entered = False
        self.has_ended = False
        self._holders = 0
        self.state = None
        if task is None or leaving is None or task.get_loop() is not asyncio.get_running_loop():
            return
        leaving.set()
        await asyncio.wait({task}, timeout=grace)
        if not task.done():
            logger.error("the lifespan did not end within %g s: it is cancelled", grace)
            task.cancel()
            await asyncio.wait({task}, timeout=LAST_WORDS)
        if self._task is task:
            self._task = None

    def _begin(
        self, loop: asyncio.AbstractEventLoop, before: "asyncio.Task[None] | None"
    ) -> "asyncio.Future[None]":
        entered: asyncio.Future[None] = loop.create_future()
        leaving = asyncio.Event()
        within = self._within()
        self.is_entered = self.has_ended = False

        async def live() -> None:
            try:
                if before is not None:
                    await asyncio.wait({before})  # two lifespans must not overlap
                async with manager_of(self._make()) as state:
                    if not entered.done():  # else it timed out
                        self.state = state
                        self.is_entered = True
                        entered.set_result(None)
                        await leaving.wait()
            except asyncio.CancelledError:
                if not entered.done():
                    entered.set_exception(StartFailed("the start was cancelled"))
                    entered.exception()  # retrieved, as below
                raise
            except BaseException as error:
                if not entered.done():
                    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
                    reason = f"the lifespan failed: {type(error).__name__}: {error}{notes}"
                    entered.set_exception(
                        StartFailed(str(error) if isinstance(error, UsageError) else reason, error)
                    )
                    entered.exception()  # retrieved: the caller that waited may have left
                elif leaving.is_set():
                    logger.error("the lifespan failed at its end", exc_info=error)
                elif self._leaving is leaving:
                    self.has_ended = True
                    logger.error("the lifespan has ended while the app serves", exc_info=error)
                if not isinstance(error, Exception):
                    raise

        def expire() -> None:
            if not entered.done():
                reason = f"the lifespan was not entered within {within:g} s (Limits.start_time)"
                entered.set_exception(StartFailed(reason))
                entered.exception()
                task.cancel()

        task = start(loop, live(), outside())  # it outlives the call that enters it
        timer = loop.call_later(within, expire)
        entered.add_done_callback(lambda _: timer.cancel())
        self._loop = loop
        self._task = task
        self._entered = entered
        self._leaving = leaving
        return entered
