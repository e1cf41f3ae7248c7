"""Background work of an app: failed writes, leases, and old records.

1. `Background` keeps a task until it ends; `aclose` waits for it. Without an event loop there are
   no tasks.
2. A write is retried for up to a week. A pause between two attempts ends when the app stops.
3. Only the run that made a claim takes it back, and only if it has done nothing. The evidence of an
   earlier run stays.
4. Leases are renewed after a third of their time. One timer serves all runs, since few live that
   long. A renewal that was late or failed, because the machine slept or the ledger was away, is made
   before this process lets the ledger judge any lease: its own runs are alive. If another server
   answers for the store, all leases are renewed at once, and a missing record is claimed again.
5. Records that are due are swept about once a minute, in small batches. The store is looked at about
   once a second (`witness`).
"""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from wirecall.aio import has_loop, wake
from wirecall.commands.run import Run, RunState
from wirecall.commands.witness import LOOK_EVERY, Witness
from wirecall.errors import UsageError
from wirecall.ledger.base import Claim, Ledger, LedgerDown, Record, RecordId, State
from wirecall.logs import logger, outside

# Seconds until a failed write is tried again: soon at first, then less often.
FIRST_PAUSE = 0.025
LAST_PAUSE = 5.0

# Seconds that a failed write is retried.
GIVE_UP = 7 * 86_400.0

# A claim whose reply was lost may reach the store after the check whether it did, so the check is
# made twice.
UNCLAIM_AGAIN = 10.0

# Minimum seconds between two renewals of a lease: no event loop keeps a shorter one alive.
LEAST_BEAT = 0.01

SWEEP_EVERY = 60.0
SWEEP_BATCH = 500


# A run that ended without an outcome.
_ENDED = (RunState.UNDONE, RunState.DOUBTFUL)


class Background:
    """The background work of an app in one event loop."""

    def __init__(self) -> None:
        # The app is stopping and begins nothing new.
        self.closing = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._pauses: set[asyncio.Future[None]] = set()
        # When the lease of a run is due, by the loop's clock. None: it is being renewed.
        self._renewals: dict[Run, float | None] = {}
        # The run of each renewal in flight, and until when it is in time, by the loop's clock.
        self._renewing: dict[asyncio.Task[None], tuple[Run, float]] = {}
        # Runs whose last renewal has failed.
        self._missed: set[Run] = set()
        self._beat: asyncio.TimerHandle | None = None
        # When that timer fires, by the loop's clock.
        self._beat_at = math.inf
        self._sweep: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a background task."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # without an event loop there is no background
            work.close()
            return
        self._keep(loop.create_task(work))

    def _keep(self, task: "asyncio.Task[None]") -> None:
        """Keep a task until it ends."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def tasks(self) -> "list[asyncio.Task[Any]]":
        return list(self._tasks)

    def stop(self) -> None:
        """Begin nothing new, and end every pause."""
        self.closing = True
        if self._sweep is not None:
            self._sweep.cancel()
        if self._look is not None:
            self._look.cancel()
        if self._beat is not None and not self._renewals:
            self._beat.cancel()
        for pause in self._pauses:
            wake(pause, None)

    # --- writes that failed -----------------------------------------------------------------------

    def unclaim(self, ledger: Ledger, claim: Claim) -> None:
        """Take back a claim whose reply was lost.

        The ledger may have it, although its run did nothing.
        """

        async def take_back() -> None:
            record = await ledger.get(claim.id)
            if record is None or record.nonce != claim.nonce:
                return
            # A retry came first, after the lease.
            if record.state is State.UNKNOWN and record.attempts == 1:
                await ledger.resolve(claim.id, None)
            else:
                await give_back(ledger, record)

        async def twice() -> None:
            await self.persist(take_back)
            await self.pause(UNCLAIM_AGAIN)
            await self.persist(take_back)

        self.start(twice())

    async def persist(self, write: Callable[[], Awaitable[object]]) -> None:
        """Retry a write until it succeeds, for up to a week.

        When the app stops, it is retried for as long as the grace allows.
        """
        patience = GIVE_UP
        delay = FIRST_PAUSE
        while patience > 0:
            try:
                await write()
                return
            except LedgerDown:
                if self.closing:
                    await asyncio.sleep(FIRST_PAUSE)
                else:
                    await self.pause(delay)
            patience -= delay
            delay = min(2 * delay, LAST_PAUSE)

    async def pause(self, delay: float) -> None:
        """Sleep, at most until the app stops."""
        if self.closing:
            return
        loop = asyncio.get_running_loop()
        pause: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(delay, wake, pause, None)
        self._pauses.add(pause)
        try:
            await pause
        finally:
            timer.cancel()
            self._pauses.discard(pause)

    # --- leases -----------------------------------------------------------------------------------

    def renew(self, run: Run, begun: float | None = None) -> None:
        """Keep the lease of a run alive until `release`.

        `begun` is the time of its last renewal, if not now.
        """
        assert run.loop is not None
        if begun is None:
            begun = run.loop.time()
        self._renewals[run] = due = begun + max(run.method.terms.lease / 3, LEAST_BEAT)
        if due < self._beat_at:
            if self._beat is not None:
                self._beat.cancel()
            self._beat = run.loop.call_at(due, self._renew_due, run.loop, context=outside())
            self._beat_at = due

    def release(self, run: Run) -> None:
        """Stop renewing.

        The timer stays: the next run is likely to need it, and an idle timer is cheap.
        """
        self._renewals.pop(run, None)
        self._missed.discard(run)

    def renew_all(self) -> None:
        """Renew all leases now: the store may lack the records of these runs.

        Other processes wait for a moment before they run commands (`witness.SETTLE`).
        """
        if not has_loop():
            return
        loop = asyncio.get_running_loop()
        for run in self._renewals:  # also those in flight: another server may have got them
            self._renewals[run] = loop.time()
        if self._beat is not None:
            self._beat.cancel()
        self._renew_due(loop)

    def is_behind(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether a renewal is late, has failed, or takes long: leases of this process may be
        over.
        """
        if not self._renewals:  # no run of this process has a lease
            return False
        now = loop.time()
        if self._beat_at < now or self._missed:
            return True
        return any(due < now for _, due in self._renewing.values())

    async def catch_up(self, loop: asyncio.AbstractEventLoop, judge: Run | None = None) -> None:
        """Renew the leases that are due, and wait until those are renewed that a run may judge.

        Its claim judges records of the same caller and method. None: all leases are judged.
        """
        self._renew_missed(loop)
        judged = [
            task
            for task, (run, _) in self._renewing.items()
            if judge is None or _is_judged(run.claim.id, judge.claim.id)
        ]
        if judged:
            await asyncio.wait(judged)

    def _renew_missed(self, loop: asyncio.AbstractEventLoop) -> None:
        """Renew the leases whose last renewal has failed, and those that are due."""
        if self._beat is not None:
            self._beat.cancel()
        for run in self._missed:
            if self._renewals.get(run) is not None:
                self._renewals[run] = loop.time()
        self._renew_due(loop)

    def _renew_due(self, loop: asyncio.AbstractEventLoop) -> None:
        self._beat = None
        self._beat_at = math.inf
        now = loop.time()
        for run, due in list(self._renewals.items()):
            if due is not None and due <= now:
                self._renewals[run] = None
                renewing = loop.create_task(self._renew(run, now))
                self._keep(renewing)
                self._renewing[renewing] = (run, due + run.method.terms.lease / 3)
                renewing.add_done_callback(self._renewing.pop)
        later = [due for due in self._renewals.values() if due is not None]
        if later:
            self._beat_at = min(later)
            self._beat = loop.call_at(self._beat_at, self._renew_due, loop, context=outside())

    async def _renew(self, run: Run, begun: float) -> None:
        """Renew one lease.

        The next renewal waits for this one: a slow store gets no more requests.
        """
        assert run.ledger is not None and run.token is not None
        try:
            is_held = await run.ledger.heartbeat(run.token, run.method.terms.lease)
            self._missed.discard(run)
            if not is_held and not await _regain_alive(run):
                self.release(run)  # another holder has the record
            elif run.task is not None and run.task.is_handed_over:
                await run.task.look()
        except LedgerDown as error:
            logger.warning("%s: the lease was not renewed: %s", run.claim.id, error)
            if run in self._renewals:
                self._missed.add(run)
        finally:
            if run in self._renewals:
                self.renew(run, begun)  # the store may count the lease from that time

    # --- sweeps -----------------------------------------------------------------------------------

    def plan_sweep(self, ledger: Callable[[], Awaitable[Ledger]]) -> None:
        """Sweep about once a minute, at a random moment: many processes do not sweep together."""
        if self._sweep is not None or self.closing:
            return

        async def sweep() -> None:
            loop = asyncio.get_running_loop()
            try:
                opened = await ledger()
                if self.is_behind(loop):
                    await self.catch_up(loop)
                while not self.closing and await opened.sweep(SWEEP_BATCH) == SWEEP_BATCH:
                    continue
            except (LedgerDown, UsageError) as error:
                logger.warning("the ledger was not swept: %s", error)
            self._sweep = None
            self.plan_sweep(ledger)

        delay = SWEEP_EVERY * random.uniform(0.5, 1.5)
        self._sweep = asyncio.get_running_loop().call_later(
            delay, lambda: self.start(sweep()), context=outside()
        )

    def plan_look(self, witness: Witness, ledger: Ledger) -> None:
        """Look about once a second whether the ledger is still the one that it was."""
        if self._look is not None or self.closing or not ledger.outlives or not has_loop():
            return

        async def look() -> None:
            try:
                with suppress(LedgerDown, UsageError):  # commands find out
                    await witness.look(ledger)
                    if self._missed:  # the store answers again
                        self._renew_missed(asyncio.get_running_loop())
            except Exception:
                logger.exception("the ledger could not be compared with what was known of it")
            # In any case: only this ends a doubt.
            self._look = None
            self.plan_look(witness, ledger)

        delay = LOOK_EVERY * random.uniform(0.8, 1.2)
        self._look = asyncio.get_running_loop().call_later(
            delay, lambda: self.start(look()), context=outside()
        )


def _is_judged(id: RecordId, by: RecordId) -> bool:
    """Return whether a claim of one record, with or without a key, may judge the lease of another."""
    return id.method == by.method and id.caller == by.caller


async def regain(run: Run) -> bool:
    """Claim the record of a run again if the store has lost the claim.

    A failover may lose the last writes. Return whether this run holds the record. A run that is not
    committed does not claim again: nothing is done, and the ledger stops it at its commit point. If
    it has stood still for long, the record of its successor may be gone, too.
    """
    ledger = run.ledger
    assert ledger is not None
    if run.task is not None:  # a task has a second record, which is lost as well
        return False
    record = await ledger.get(run.claim.id)
    if run.is_committed and _is_lost(run, record):
        # Only a record that was looked at may continue: it waits for this leg.
        continues = record is not None
        claim = replace(run.claim, committed=True, continues=continues, keyless=None)
        record = await ledger.claim(claim)
        logger.error("the ledger lost the record of %s while it ran", run.claim.id)
    if record is None or not run.holds(record):
        return False
    run.regain(record)
    return True


def _is_lost(run: Run, record: Record | None) -> bool:
    """Return whether the store has lost the claim of a run: its record is absent, or older."""
    if record is None:
        return True
    if record.fence >= run.fence:
        return False
    if record.state is not State.WAITING:
        return record.state is State.RUNNING
    # It waits for this leg of a call of several rounds, and not for a later one.
    if run.follows is None or record.outcome is None or record.outcome.payload is None:
        return False
    return run.follows.encode() in record.outcome.payload


async def _regain_alive(run: Run) -> bool:
    """Claim the lost record of a run again, unless the run has ended and does not need it."""
    if run.state in _ENDED:
        return False
    if not await regain(run):
        return False
    if run.state in _ENDED:  # since then: it wrote to the record that was lost
        assert run.ledger is not None and run.token is not None and run.record is not None
        if run.state is RunState.UNDONE:
            await give_back(run.ledger, run.record)
        elif run.claim.on_crash == "unknown":
            await run.ledger.abandon(run.token)
        else:
            await run.ledger.lapse(run.token)
    return True


def give_back(ledger: Ledger, record: Record) -> Awaitable[bool]:
    """Release a record whose run did nothing.

    If an earlier run may have acted, the record stays as evidence.
    """
    if record.is_evidence:
        return ledger.lapse(record.token)
    return ledger.release(record.token)
