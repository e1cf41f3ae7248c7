"""Whose run it is: a command is ours to run, or another run answers for it.

The rules of the file:

1. Duplicates in this process await the first (`Flight`); duplicates elsewhere are seen through the ledger, by claiming
   again.
2. Nothing runs before the ledger gave back a record with our nonce.
3. A ledger that is lost before the run refuses the command, and the claim that it may have taken is taken back.
4. Every flight lands, with an outcome or without: others wait for it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from wirecall.commands.background import Chores, give_back
from wirecall.commands.endings import stopping, unavailable
from wirecall.commands.outcome import recorded
from wirecall.commands.run import Flight, Run, in_progress
from wirecall.errors import KeyConflict, LedgerUnavailable, UsageError
from wirecall.ledger.base import Ledger, LedgerDown, Outcome, Record, RecordId, State

# How often a duplicate looks whether the first, in another process, is done: at once at first, never rarely.
FIRST_POLL = 0.025
LAST_POLL = 0.5


class Claims:
    """The keys that are taken in this process, and the way to those in the ledger."""

    def __init__(self, ledger: Callable[[], Awaitable[Ledger]], chores: Chores) -> None:
        self._ledger = ledger
        self._chores = chores
        self._flights: dict[RecordId, Flight] = {}

    def under_way(self) -> "list[asyncio.Future[Outcome | None]]":
        return [flight.ended() for flight in list(self._flights.values())]

    async def found(self, run: Run) -> Outcome | None:
        """The outcome of another run of this command; None if it is ours to run."""
        mine = Flight(run.claim.fingerprint)  # one step, since other threads may be at it too
        while (flight := self._flights.setdefault(run.claim.id, mine)) is not mine:
            outcome = await _joined(flight, run)
            if outcome is not None:
                return outcome
        run.others = False
        found: Outcome | None = None
        try:
            ledger = await self.open(run)
            if run.claim.on_crash == "transactional":
                return None
            record = await self._claim(ledger, run)
            if not run.holds(record):
                found = recorded(record)
        except BaseException as error:
            flight.is_refused = isinstance(error, LedgerUnavailable)
            if not run.forsaken:
                self.land(run, None)
            raise
        if found is not None:
            self.land(run, found)
        elif self._chores.closing:
            await self._turn_away(ledger, record, run)
        else:
            flight.is_granted = True
            run.granted(ledger, record)
        return found

    async def open(self, run: Run) -> Ledger:
        if self._chores.closing:
            raise stopping(run)
        try:
            ledger = await self._ledger()
        except (LedgerDown, UsageError) as error:
            raise unavailable(error) from error
        if run.loop is not None:  # else: who works without an event loop sweeps by hand
            self._chores.plan_sweep(ledger, run.loop)
        return ledger

    def land(self, run: Run, outcome: Outcome | None) -> None:
        del run.context  # it knows the run, and the two would have to wait for the garbage collector
        self._flights.pop(run.claim.id).land(outcome)

    async def _claim(self, ledger: Ledger, run: Run) -> Record:
        """Our own record, or one that answers this call; waits for a first run that is under way elsewhere."""
        patience, delay = run.method.terms.wait, FIRST_POLL
        is_tidy = ledger.is_tidy or run.alone  # else: whoever does not hear that it has the record must not keep it
        while True:
            try:
                record = await (ledger.claim(run.claim) if is_tidy else self._claim_apart(ledger, run))
            except LedgerDown as error:
                self._chores.unclaim(ledger, run.claim)
                raise unavailable(error) from error
            if record.fingerprint != run.claim.fingerprint:
                raise KeyConflict(ran="no")
            if record.state is not State.RUNNING or run.holds(record):
                return record
            run.others = True
            if patience <= 0 or run.alone or self._chores.closing:
                raise in_progress()
            await asyncio.sleep(min(delay, patience))
            patience -= delay
            delay = min(2 * delay, LAST_POLL)

    async def _claim_apart(self, ledger: Ledger, run: Run) -> Record:
        """In a task of its own: a claim that is on its way to a server cannot be called back, only undone."""
        task = asyncio.get_running_loop().create_task(ledger.claim(run.claim))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            run.forsaken = True
            self._chores.do(self._forsake(ledger, run, task))
            raise

    async def _forsake(self, ledger: Ledger, run: Run, task: "asyncio.Task[Record]") -> None:
        """The caller left in the middle of its claim: give the record back before anybody in this process asks for it."""
        try:
            record = await task
            if run.holds(record):
                await give_back(ledger, record.token, record.attempts)
        except LedgerDown:
            self._chores.unclaim(ledger, run.claim)
        finally:
            self.land(run, None)

    async def _turn_away(self, ledger: Ledger, record: Record, run: Run) -> None:
        """The claim was granted, but the app has begun to stop."""
        try:
            with suppress(LedgerDown):
                await give_back(ledger, record.token, record.attempts)
        finally:
            self.land(run, None)
        raise stopping(run)


async def _joined(flight: Flight, run: Run) -> Outcome | None:
    """The outcome of the run that came first; None when it ended without one."""
    run.others = True
    if run.alone:
        raise in_progress()
    return await flight.join(run.claim.fingerprint, run.method.terms.wait)
