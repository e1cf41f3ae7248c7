"""Claims: whose run is it?

1. Nothing runs before the ledger has returned a record with this run's nonce.
2. Duplicates in this process await the first (`Flight`). Duplicates elsewhere are found through the
   ledger, by claiming again until the other run has ended.
3. A call without a key may find the record of an earlier call that it repeats (`receipts`). Then it
   takes that key, and is a duplicate of that call.
4. If the ledger is down, or the app stops, the command is refused; and so it is while the ledger is
   not the one that this process knew (`witness`).
"""

import asyncio
import enum
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NoReturn

import msgspec
from msgspec import Struct

from wirecall.aio import wake
from wirecall.commands.background import Background, give_back
from wirecall.commands.outcome import (
    conflict,
    in_progress,
    recorded,
    stopping,
    unavailable,
    without_driver,
)
from wirecall.commands.receipts import Receipts
from wirecall.commands.run import Run, RunEvent
from wirecall.commands.witness import Witness
from wirecall.errors import BadInput, KeyConflict, LedgerUnavailable, OutcomeUnknown, UsageError
from wirecall.ledger.base import (
    Claim,
    Delivered,
    Ledger,
    LedgerDown,
    NoDriver,
    Outcome,
    Record,
    RecordId,
    State,
)

# Seconds between two claims of a duplicate whose first run is in another process.
FIRST_POLL = 0.025
LAST_POLL = 0.5

# A holder with less than this part of its lease remaining counts as silent: it has missed the
# renewal after a third.
SILENT = 0.6


class FlightState(enum.Enum):
    """A state of a flight."""

    ASKING = "The ledger has not answered the claim yet, so the holder may be dead."
    FOLLOWING = "Another run that is alive holds the record, or the store's transaction decides."
    OVERDUE = "The run waits for the end of a lease whose holder is silent."
    GRANTED = "The ledger has granted the record to the run."
    INHERITED = "The ledger has granted the record to the run after a silent holder."
    REFUSED = "The run has ended, because the ledger is down."
    LANDED = "The run has ended, with an outcome or without one."


# Looked up once, since every run needs them.
_ASKING = FlightState.ASKING
_FOLLOWING = FlightState.FOLLOWING
_OVERDUE = FlightState.OVERDUE
_GRANTED = FlightState.GRANTED
_INHERITED = FlightState.INHERITED
_LANDED = FlightState.LANDED
_RUNNING = State.RUNNING


class Flight(Struct, eq=False):
    """The one run of a command in this process, and the duplicates that wait for it."""

    fingerprint: bytes
    state: FlightState = _ASKING
    # The outcome of a flight that has landed. None: it ended without one.
    outcome: Outcome | None = None
    waiting: list[asyncio.Future[Outcome | None]] = []

    async def join(self, fingerprint: bytes, wait: float) -> Outcome | None:
        """Return the outcome, or None when the run ended without one.

        Raise `KeyInProgress` after `wait`, but not while the holder of the record may be dead: then
        the lease ends, and the duplicate gets a definite answer.
        """
        if fingerprint != self.fingerprint and self.state in (_GRANTED, _INHERITED):
            raise KeyConflict(ran="no")
        future = self.ended()
        delay = FIRST_POLL
        await asyncio.wait([future], timeout=wait)
        while not future.done():
            if self.state in (_FOLLOWING, _GRANTED):
                raise in_progress()
            await asyncio.wait([future], timeout=delay)
            delay = min(2 * delay, LAST_POLL)
        if self.state is FlightState.REFUSED:
            # The duplicates need not try the ledger one after another.
            raise LedgerUnavailable(ran="no")
        # Until the ledger has granted the record, either params may be the right ones: the
        # duplicate claims for itself.
        if fingerprint != self.fingerprint:
            return None
        return future.result()

    def ended(self) -> "asyncio.Future[Outcome | None]":
        """Return a future that has the outcome when the run has ended."""
        future: asyncio.Future[Outcome | None] = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        if self.state in (FlightState.REFUSED, _LANDED):  # in another thread, a moment ago
            future.set_result(self.outcome)
        return future


class Claims:
    """The commands that runs of this process have claimed, or are claiming."""

    def __init__(
        self,
        ledger: Callable[[], Awaitable[Ledger]],
        background: Background,
        receipts: Receipts,
        witness: Witness,
    ) -> None:
        self.witness = witness
        self._ledger = ledger
        self._background = background
        self._receipts = receipts
        self._flights: dict[RecordId, Flight] = {}

    def flights(self) -> "list[asyncio.Future[Outcome | None]]":
        """Return a future for the end of every flight."""
        return [flight.ended() for flight in self._flights.values()]

    async def claim(self, run: Run) -> Outcome | None:
        """Return the outcome of another run; None if the ledger grants the command to this one.

        The transaction of a transactional command claims it later.
        """
        # Step 1: duplicates in this process wait for the first. `setdefault` is one step: threads
        # without an event loop may arrive at the same moment.
        fingerprint = run.claim.fingerprint
        flight = Flight(fingerprint)
        while (first := self._flights.setdefault(run.claim.id, flight)) is not flight:
            run.to(RunEvent.FOLLOW)
            if run.loop is None:
                raise in_progress()
            outcome = await first.join(fingerprint, run.method.terms.wait)
            # The first may itself have followed a task. Then the answer is the task, which the
            # ledger has.
            if outcome is not None and run.task is None:
                return outcome
            run.accept(RunEvent.LEAD)
        run.flight = run.claim.id

        # Step 2: ask the ledger.
        try:
            if self._background.closing:
                raise stopping(run)
            try:
                ledger = run.ledger = await self._ledger()
                if self.witness.reached != ledger.reached:
                    await self.witness.admit(ledger, run.claim.id)
                    self._background.plan_look(self.witness, ledger)
            except NoDriver as error:
                raise without_driver(run, error) from error
            except (LedgerDown, UsageError) as error:
                raise unavailable(error) from error
            if run.claims_in_transaction:
                # A transaction ends with its process, so there is no lease to wait for.
                flight.state = _FOLLOWING
                return None
            if run.follows is not None:
                await _check_leg(run, ledger, run.follows)
            found = await self._find(run, flight, ledger)
        except BaseException as error:
            if isinstance(error, LedgerUnavailable):
                self.land(run, None, FlightState.REFUSED)
            else:
                self.land(run, None)
            raise
        if found is not None:
            self.land(run, found)
        return found

    async def _find(self, run: Run, flight: Flight, ledger: Ledger) -> Outcome | None:
        """Claim the record, again and again while a run in another process holds it.

        Return its outcome; None if this run holds it.
        """
        receipt = run.receipt
        patience = run.method.terms.wait
        delay = FIRST_POLL
        while True:
            if run.loop is not None and self._background.is_behind(run.loop):
                await self._background.catch_up(run.loop, run)
            try:
                if receipt is not None and self._receipts.must_look(run.claim):
                    run.claim = await self._receipts.look(ledger, run)
                if ledger.is_tidy or run.loop is None:
                    record = await ledger.claim(run.claim)
                else:
                    record = await self._ask(run, ledger, run.loop)
            except LedgerDown as error:
                self._background.unclaim(ledger, run.claim)
                raise unavailable(error) from error
            if record.fingerprint != run.claim.fingerprint:
                raise conflict(is_keyless=receipt is not None)
            if receipt is None or self._receipts.assign(run, receipt, record):
                if run.flight != run.claim.id:  # the call has taken the key of an earlier one
                    self.land(run, None)
                    run.accept(RunEvent.LEAD)
                    return await self.claim(run)
                if run.holds(record):
                    if self._background.closing:
                        await _give_back(run, ledger, record)
                    if not self.witness.is_sure(ledger, record):
                        await self._confirm(run, ledger, record)
                    if flight.state is _OVERDUE:
                        flight.state = _INHERITED
                    else:
                        flight.state = _GRANTED
                    run.grant(record)
                    return None
                if run.task is not None:
                    await run.task.found(record)
                if record.state is not _RUNNING:
                    return recorded(record, repeats_unknown=run.method.repeats_unknown)
            self._follow(run, flight, record, patience)
            pause = delay
            if patience > 0:
                pause = min(delay, patience)
            await asyncio.sleep(pause)
            patience -= delay
            delay = min(2 * delay, LAST_POLL)

    async def _confirm(self, run: Run, ledger: Ledger, record: Record) -> None:
        """Check that the store may grant a record; give it back if not."""
        try:
            await self.witness.confirm(ledger, record)
        except (LedgerUnavailable, OutcomeUnknown):
            with suppress(LedgerDown):
                await give_back(ledger, record)
            raise
        except BaseException as error:
            self._background.unclaim(ledger, run.claim)
            if isinstance(error, LedgerDown):
                raise unavailable(error) from error
            raise

    def _follow(self, run: Run, flight: Flight, record: Record, patience: float) -> None:
        """Wait for the other run of a record; raise `KeyInProgress` if the wait is over."""
        run.to(RunEvent.FOLLOW)
        if run.loop is None or self._background.closing:
            raise in_progress()
        # A call whose caller has left does not wait: its repetition may arrive before the other run
        # ends.
        if run.receipt is not None and run.receipt.is_lost:
            raise in_progress()
        if _is_silent(record, run.claim.lease, run.method.terms.wait):
            flight.state = _OVERDUE
        elif patience <= 0:
            raise in_progress()
        else:
            flight.state = _FOLLOWING

    async def _ask(self, run: Run, ledger: Ledger, loop: asyncio.AbstractEventLoop) -> Record:
        """Claim a record in a task.

        A claim that was sent to a server cannot be recalled, only undone. The task wakes this one,
        since `asyncio.shield` would take one more iteration of the loop.
        """
        asked: asyncio.Future[Record | Exception] = loop.create_future()
        claiming = loop.create_task(_claim_and_wake(ledger, run.claim, asked))
        try:
            answered = await asked
        except asyncio.CancelledError:
            # The flight lands when the record is given back, before a duplicate asks for it.
            flight = run.flight
            run.flight = None
            self._background.start(self._undo(run, ledger, claiming, flight))
            raise
        if isinstance(answered, Exception):
            raise answered
        return answered

    async def _undo(
        self,
        run: Run,
        ledger: Ledger,
        claiming: "asyncio.Task[Record | Exception]",
        flight: RecordId | None,
    ) -> None:
        """Give back a record whose caller left while it was being claimed, then land its flight."""
        try:
            record = await claiming
            if isinstance(record, Exception):
                raise record
            if run.holds(record):
                await give_back(ledger, record)
            if record.id != run.claim.id and record.deliverer == run.claim.nonce:
                await ledger.deliver([Delivered(record.id, record.deliverer, "undelivered")])
        except LedgerDown:
            self._background.unclaim(ledger, run.claim)
        finally:
            run.flight = flight
            self.land(run, None)

    def land(self, run: Run, outcome: Outcome | None, state: FlightState = _LANDED) -> None:
        """Wake the duplicates, thread-safely: a run may end in a thread without an event loop."""
        if run.flight is None:
            return  # they were woken when the run became a task
        # A call that repeats an earlier one has the id of that one by now.
        flight = self._flights.pop(run.flight)
        run.flight = None
        # Before the list is read: a later duplicate sees it.
        flight.outcome = outcome
        flight.state = state
        for future in flight.waiting:
            with suppress(RuntimeError):  # its loop is closed
                future.get_loop().call_soon_threadsafe(wake, future, outcome)


async def _check_leg(run: Run, ledger: Ledger, follows: str) -> None:
    """Check that a record waits for this leg of a call of several rounds.

    Each state has one next leg. If the record waits with another state, that leg was taken, and
    this call gets what it gave.
    """
    try:
        record = await ledger.get(run.claim.id)
    except LedgerDown as error:
        raise unavailable(error) from error
    if record is None and run.must_exist:
        raise BadInput("requestState: the call is gone", ran="no")
    if record is None or record.state is not State.WAITING or record.outcome is None:
        return
    payload = record.outcome.payload
    if payload is not None and follows.encode() not in payload:
        run.claim = msgspec.structs.replace(run.claim, continues=False)


async def _give_back(run: Run, ledger: Ledger, record: Record) -> NoReturn:
    """Give back a record that the ledger has granted to an app that stops."""
    with suppress(LedgerDown):
        await give_back(ledger, record)
    raise stopping(run)


def _is_silent(record: Record, lease: float, wait: float) -> bool:
    """Return whether the holder of an awaited record seems to be dead.

    Then the wait ends with its lease.

    A holder renews its lease after a third of it. If the record is done, the mark of its answer is
    missing. A living process writes that at once.
    """
    if record.state is _RUNNING:
        return record.lease_left < SILENT * lease
    return wait > (1 - SILENT) * lease


async def _claim_and_wake(
    ledger: Ledger, claim: Claim, asked: "asyncio.Future[Record | Exception]"
) -> Record | Exception:
    """Claim a record and wake the waiting run.

    Errors are returned: a run that has left ignores them.
    """
    answered: Record | Exception
    try:
        answered = await ledger.claim(claim)
    except Exception as error:
        answered = error
    except BaseException:  # the loop ends
        asked.cancel()
        raise
    wake(asked, answered)
    return answered
