"""The life of a command: claim it, run it under a lease or in a transaction, record its outcome, and stop.

`Commands.execute` is steps 5 and 6 of a call. The states of a run are the table in `run`.

1. Nothing runs before the ledger gave back a record with this run's nonce. Duplicates in this process await the first
   (`Flight`); duplicates elsewhere are seen through the ledger, by claiming again.
2. A handler that can wait runs in a task of its own. Its caller may leave or run out of time: before the commit point that
   cancels the handler and releases the record; after it the handler finishes, and its outcome is recorded.
3. A handler that cannot wait runs in its caller's task: nothing can interrupt it.
4. If the ledger is down before the run, the command is refused. If it goes down after it, the caller still gets the true
   outcome, and recording it is retried.
5. An app that stops claims nothing more, and gives handlers past their commit point time to finish.
6. An app belongs to one event loop at a time. When that loop is closed, the next one takes over.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import Any, TypeAlias

import msgspec
from msgspec import Raw, Struct

from wirecall.commands.background import Background, give_back
from wirecall.commands.delivery import Deliveries, origin_of
from wirecall.commands.run import (
    NOT_BEGUN,
    NOTHING_DONE,
    RETRY_AFTER_MS,
    LostLease,
    Run,
    RunEvent,
    RunState,
    answer,
    failure_in_transaction,
    failure_of,
    in_progress,
    is_refusal,
    outcome_of,
    recorded,
    stopping,
    stored,
    unavailable,
    unknown,
)
from wirecall.errors import (
    FixedError,
    Gone,
    KeyConflict,
    KeyInProgress,
    LedgerUnavailable,
    OtherLoop,
    Ran,
    RpcError,
    UsageError,
)
from wirecall.ledger.base import (
    Claim,
    Delivered,
    Keyless,
    Ledger,
    LedgerDown,
    Locked,
    NotCommitted,
    Outcome,
    Record,
    RecordId,
    State,
    TryAgain,
)
from wirecall.logs import logger
from wirecall.server.call import Call, Context, Handler, InputRequired
from wirecall.server.method import CannotTell, Done, NotDone
from wirecall.stepping import settled, start, wake

# Seconds that a stop waits for handlers that do not heed their cancellation.
LAST_WORDS = 1.0

# Seconds between two claims of a duplicate whose first run is in another process.
FIRST_POLL = 0.025
LAST_POLL = 0.5

# How often a transaction that the store undid is tried again; nothing of it has escaped.
TRIES = 5

_RETURN = RunEvent.RETURN  # found once, since every run needs it

Report: TypeAlias = Callable[[Call, BaseException | None], None]


class Commands:
    """The commands of an app that are in flight in this process."""

    def __init__(self, ledger: Callable[[], Awaitable[Ledger]], report: Report) -> None:
        self.left = 0  # commands that go on although their callers have left
        self._ledger = ledger
        self._report = report
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flights: dict[RecordId, Flight] = {}
        self._tasks: dict[Run, asyncio.Task[Raw | BaseException]] = {}
        self._background = Background()
        self._deliveries = Deliveries(self._background)

    def execute(self, call: Call, handler: Handler) -> Coroutine[Any, Any, Raw]:
        """Run the command, or answer with the outcome of an earlier run."""
        method, frame, terms, peer = call.method, call.frame, call.method.terms, call.peer
        assert call.fingerprint is not None
        loop: asyncio.AbstractEventLoop | None = None
        if not frame.alone:
            loop = asyncio.get_running_loop()
            if loop is not self._loop:
                self._bind(loop)
        keyless: Keyless | None = None
        nonce = os.urandom(16)
        if call.key is None:
            # The likeness is short, since the key holds it too. If 8 bytes do not tell two params apart, their fingerprints
            # do: the call is refused with a conflict, and never gets the other answer.
            origin = origin_of(frame.caller, frame.peer, call.record)
            keyless = Keyless(None if origin is None else origin + call.fingerprint[:8], terms.loss_window)
            call.key = keyless.make_key(nonce)
            if peer is not None:
                peer.named(call.key)
        follows = None if peer is None else peer.continues
        claim = Claim(
            id=RecordId(frame.caller, call.record, call.key),
            fingerprint=call.fingerprint,
            nonce=nonce,
            lease=terms.lease,
            retention=terms.retention,
            on_crash=terms.on_crash,
            # A task counts as past its commit point when its handler starts: until then any process may take it over.
            committed=not terms.commit_point and not (call.task is not None and call.task.at_once),
            continues=follows is not None,
            alone=frame.alone,
            keyless=None if loop is None else keyless,  # without a loop there is no transport that could lose the answer
        )
        run = call.run = Run(method, claim, loop, follows, call.task, frame.sending)
        return self._run(call, run, handler)

    def _sent(self, run: Run, call: Call, written: bool) -> None:
        """Called when the answer to a call without a key is written or lost. A resumed stream may write what was lost."""
        if run.is_left if written else run.is_lost:
            return
        if call.frame.reported and not written:
            self._report(call, Gone("the answer did not reach its caller"))
        run.is_lost = not written
        if run.answers:
            (self._deliveries.note_written if written else self._deliveries.note_lost)(run)
        elif run.is_lost and not run.is_left:
            self._deliveries.doubt(run.claim)

    async def _run(self, call: Call, run: Run, handler: Handler) -> Raw:
        """Run the command of a claim, or answer with the outcome of an earlier run."""
        # Step 1: without a key, the answer is on its way from here on, before its claim is: equal calls that come meanwhile
        # are new ones, and need not wait for its record.
        claim, deliveries = run.claim, self._deliveries
        if claim.keyless is not None:
            run.has_equals = deliveries.begin(claim, run.sending)
            if run.sending is not None:
                run.sending.listen(partial(self._sent, run, call))
        try:
            # Step 2: whose run is it? Another run answers for this call, or the ledger has granted the record.
            try:
                if run.has_equals:
                    await deliveries.notice(claim, run.sending)
                    if run.is_lost:  # a repetition has overtaken it, or will come
                        raise in_progress()
                found = await self._claim(run)
                if run.claim.id.key != call.key:
                    _recognised(call, run)
                if found is not None:
                    call.replayed = True
                    result = answer(found, replayed=True)
            except BaseException as error:
                # A recorded error is a replay too, and so is the task that an earlier call has become.
                call.replayed = call.replayed or isinstance(error, InputRequired)
                if call.frame.reported:
                    self._report(call, error)
                raise
            if found is not None:
                if call.frame.reported:
                    self._report(call, None)
                return result

            # Step 3: a function that cannot wait is called here and now: nothing interrupts it. It may still return an
            # awaitable.
            method, loop = run.method, run.loop
            waits = method.can_wait
            if not waits:
                run.begin()
                value: object = None
                raised: BaseException | None = None
                try:
                    value = handler()
                    waits = hasattr(value, "__await__")
                except BaseException as error:
                    raised = error

                def called() -> object:
                    if raised is not None:
                        raise raised
                    return value

                handler = called
            if loop is None or not waits:
                ending = await self._lead(call, run, handler)
                if isinstance(ending, BaseException):
                    raise ending
                return ending

            # Step 4: the handler gets a task of its own, which wakes this one: awaiting the task costs a turn of the
            # loop more. A cancel of this wait is a cancel of the command only if nothing is done yet.
            run.ended = loop.create_future()
            task = self._tasks[run] = start(loop, self._lead(call, run, handler), name=method.name)
            try:
                return await run.ended
            except asyncio.CancelledError:
                if run.stops and not task.done():
                    run.cancel(task)
                    await asyncio.wait([task], timeout=LAST_WORDS)
                if not task.done():
                    self.left += 1

                    def back(_: "asyncio.Task[Raw | BaseException]") -> None:
                        self.left -= 1

                    task.add_done_callback(back)
                raise
        except (asyncio.CancelledError, KeyInProgress, LedgerUnavailable):
            # A caller that cancels, whose time is over, or that shall come again has not got the outcome, whatever is sent
            # to it afterwards.
            if claim.keyless is not None:
                self._sent(run, call, False)
                run.is_left = True
            raise
        finally:
            if claim.keyless is not None:
                if not run.answers:  # whatever its caller is sent now is not the outcome of a record
                    run.is_left = True
                    deliveries.forget(run.claim)
                elif run.sending is None and not run.is_left:  # where no transport watches the answer, it arrives now
                    deliveries.note_written(run)
                if run.is_lost:
                    deliveries.settle(run.claim)

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Belong to the running loop. The runs of a loop that is closed never end, so they are forgotten."""
        if self._loop is loop:
            return
        if self._loop is not None:
            if not self._loop.is_closed():
                raise OtherLoop
            closing = self._background.closing
            self.left, self._flights, self._tasks, self._background = 0, {}, {}, Background()
            self._background.closing = closing
            self._deliveries = Deliveries(self._background)
        self._loop = loop
        self._background.plan_sweep(self._ledger)

    async def _lead(self, call: Call, run: Run, handler: Handler) -> Raw | BaseException:
        """Lead the run to its end, and wake all that wait for it: the duplicates, and its caller if it has its own task."""
        outcome: Outcome | None = None
        try:
            # The record of a task is there before its transaction, so the transaction is one under a lease.
            lead = self._transact if run.claim.on_crash == "transactional" and call.task is None else self._hold
            outcome, call.replayed = await lead(call, run, handler)
            ending: Raw | BaseException = answer(outcome, replayed=call.replayed, recorded=call.recorded)
        except BaseException as error:
            ending = error
        if run.is_open:
            run.is_open = False
            if run.is_lost and run.answers:
                self._deliveries.note_lost(run)
        self._land(run, outcome)
        if call.frame.reported:
            self._report(call, None if isinstance(ending, Raw) else ending)
        if run.ended is None:
            return ending
        self._tasks.pop(run, None)
        if not run.ended.done():  # else the caller has left
            if isinstance(ending, Raw):
                run.ended.set_result(ending)
                return ending
            if not isinstance(ending, GeneratorExit):  # else the loop is closed
                run.ended.set_exception(stopping(run) if isinstance(ending, asyncio.CancelledError) else ending)
        if isinstance(ending, (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)):
            raise ending
        return ending

    # --- whose run it is ---------------------------------------------------------------------------------------------

    async def _claim(self, run: Run) -> Outcome | None:
        """Return the outcome of another run of this command; None if the ledger grants the command to this run."""
        # Step 1: duplicates in this process wait for the first.
        fingerprint, is_keyless = run.claim.fingerprint, run.claim.keyless is not None
        mine = Flight(fingerprint)
        # `setdefault` is one step: threads without an event loop may come at the same moment.
        while (first := self._flights.setdefault(run.claim.id, mine)) is not mine:
            run.to(RunEvent.FOLLOW)
            if run.loop is None:
                raise in_progress()
            outcome = await first.join(fingerprint, run.method.terms.wait)
            # The first may have followed a task in its turn. Then the answer is the task, which the ledger knows.
            if outcome is not None and run.task is None:
                return outcome
            run.hear(RunEvent.LEAD)
        run.flight = run.claim.id
        try:
            if self._background.closing:
                raise stopping(run)
            try:
                ledger = run.ledger = await self._ledger()
            except (LedgerDown, UsageError) as error:
                raise unavailable(error) from error
            if run.claim.on_crash == "transactional" and run.task is None:
                return None  # the transaction claims

            # One state, one next leg: a leg whose state the record no longer waits with was taken, and gets what it gave.
            if run.follows is not None:
                try:
                    waiting = await ledger.get(run.claim.id)
                except LedgerDown as error:
                    raise unavailable(error) from error
                payload = waiting.outcome.payload if waiting and waiting.state is State.WAITING and waiting.outcome else None
                if payload is not None and run.follows.encode() not in payload:
                    run.claim = msgspec.structs.replace(run.claim, continues=False)

            # Step 2: claim the record. While a run in another process has it, claim again.
            patience, delay = run.method.terms.wait, FIRST_POLL
            while True:
                try:
                    if is_keyless and (run.has_equals or self._deliveries.lost or self._deliveries.doubtful):
                        run.claim = await self._deliveries.look(ledger, run.claim, lambda: run.is_lost)
                    if ledger.is_tidy or run.loop is None:
                        record = await ledger.claim(run.claim)
                    else:
                        # In a task of its own: a claim on its way to a server cannot be called back, only undone. The task
                        # wakes this one, since `asyncio.shield` would take a turn of the loop more.
                        asked: asyncio.Future[Record | Exception] = run.loop.create_future()
                        claiming = run.loop.create_task(_ask(ledger, run.claim, asked))
                        try:
                            answered = await asked
                        except asyncio.CancelledError:
                            mine.is_forsaken = True
                            self._background.start(self._forsake(ledger, run, claiming))
                            raise
                        if isinstance(answered, Exception):
                            raise answered
                        record = answered
                except LedgerDown as error:
                    self._background.unclaim(ledger, run.claim)
                    raise unavailable(error) from error
                if record.fingerprint != fingerprint:
                    raise KeyConflict(ran="no")
                if not is_keyless or self._answers(run, record):
                    if run.flight != run.claim.id:  # the call has taken the key of an earlier one
                        self._land(run, None)
                        run.hear(RunEvent.LEAD)
                        return await self._claim(run)
                    if is_mine := run.holds(record):
                        break
                    if run.task is not None:
                        await run.task.found(record)
                    if record.state is not State.RUNNING:
                        break
                run.to(RunEvent.FOLLOW)
                # A caller that has left is not waited for: its repetition may come before the other run ends.
                if patience <= 0 or run.loop is None or run.is_lost or self._background.closing:
                    raise in_progress()
                run.has_equals = is_keyless  # here or in another process
                await asyncio.sleep(min(delay, patience))
                patience -= delay
                delay = min(2 * delay, LAST_POLL)

            # Step 3: the record has an outcome, or this run holds it. An app that stops gives it back.
            found = None if is_mine else recorded(record)
            if is_mine and self._background.closing:
                with suppress(LedgerDown):
                    await give_back(ledger, record)
                raise stopping(run)
        except BaseException as error:
            mine.is_refused = isinstance(error, LedgerUnavailable)
            if not mine.is_forsaken:
                self._land(run, None)
            raise
        if found is not None:
            self._land(run, found)
        else:
            mine.is_granted = True
            run.grant(record)
        return found

    async def _forsake(self, ledger: Ledger, run: Run, claiming: "asyncio.Task[Record | Exception]") -> None:
        """Give back a record whose caller left while it was being claimed, before a duplicate here asks for it."""
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
            self._land(run, None)

    def _answers(self, run: Run, record: Record) -> bool:
        """Return whether this run, which has no key, is to give the answer of a record: only its deliverer does.

        If the call repeats one whose answer was lost, it has the key of that call from here on.
        """
        claim = run.claim
        run.answers = record.deliverer == claim.nonce
        if run.answers:
            if record.id != claim.id:
                run.claim = msgspec.structs.replace(claim, id=record.id)
                self._deliveries.begin(run.claim, run.sending)
                self._deliveries.forget(claim)
            if run.is_lost:  # while the claim was on its way
                self._deliveries.note_lost(run)
                self._deliveries.settle(claim)
        return run.answers

    def _land(self, run: Run, outcome: Outcome | None) -> None:
        """Wake the duplicates. A run may end in a thread without an event loop, so their loop is woken the safe way."""
        if run.flight is None:
            return  # they were woken when the run became a task
        # A call that repeats an earlier one has the id of that by now.
        flight, run.flight = self._flights.pop(run.flight), None
        flight.landed = (outcome,)  # before the list is read: a duplicate that comes later sees it
        for future in flight.waiting:
            with suppress(RuntimeError):  # its loop is closed
                future.get_loop().call_soon_threadsafe(wake, future, outcome)

    # --- under a lease -----------------------------------------------------------------------------------------------

    async def _hold(self, call: Call, run: Run, handler: Handler) -> tuple[Outcome, bool]:
        """Run the handler while the lease is renewed, and record its outcome."""
        ledger, token = run.ledger, run.token
        assert ledger is not None and token is not None
        if run.ended is not None:  # else the handler is over already
            self._background.renew(run)
        terms, is_transaction = run.method.terms, run.claim.on_crash == "transactional"
        try:
            if run.task is not None:
                has_place = await run.task.begin(run)
                if run.task.is_handed_over:
                    self._land(run, None)  # also for a task that was adopted: duplicates get the task, and do not wait
                if not has_place:
                    raise _Queued
            outcome = await _reconciled(call, run) if run.attempt > 1 and terms.reconcile else None
            if run.task is not None and outcome is None and run.task.at_once and not (terms.commit_point or is_transaction):
                if not await ledger.commit_point(token, terms.lease):
                    raise LostLease(f"{run.claim.id}: the lease was over before the handler started")
                run.claim = msgspec.structs.replace(run.claim, committed=True)
            if is_transaction:
                return await self._transact_task(call, run, handler), False
            outcome = outcome or await _handled(call, run, handler)
        except _Queued:
            # The task waits for a process that has a place for it: nothing was done, and the lease is over.
            with suppress(LedgerDown):
                await ledger.lapse(token)
            raise in_progress() from None
        except InputRequired as pause:
            # The handler asks its caller: the record waits for the round that brings the answer.
            if not run.hear(RunEvent.PAUSE):
                late = UsageError(
                    "The handler asked its caller after its commit point.", "it would be run again from the top"
                )
                raise await self._failed(call, run, late) from pause
            interim = Outcome("result", pause.interim, sha256(pause.interim).digest())
            task = run.task if run.task is not None and run.task.is_handed_over else None
            retention = terms.retention if task is None else max(terms.retention, run.method.task_ttl)
            wait = partial(ledger.suspend, token, interim, retention)

            async def suspend() -> None:
                if task is not None:
                    await task.pause()
                await wait()

            try:
                await suspend()
            except LedgerDown as error:
                if task is None:
                    self._background.unclaim(ledger, run.claim)
                    raise unavailable(error) from pause
                self._background.start(self._background.persist(suspend))  # the client has the task, and waits
            raise
        except BaseException as error:
            raise await self._failed(call, run, error) from error
        finally:
            if run.ended is not None:
                self._background.release(run)

        kept = stored(outcome, terms.max_stored_result)
        try:
            if await ledger.complete(token, kept, terms.retention):
                return outcome, False
            # Another holder has the record. Its outcome counts; where it has none, this one is the truth about this run.
            logger.warning("lost lease: %s was taken over while it ran", run.claim.id)
            record = await ledger.get(run.claim.id)
            if record is not None and record.state is State.DONE:
                return recorded(record), True
        except (LedgerDown, asyncio.CancelledError) as error:
            write = partial(ledger.complete, token, kept, terms.retention)
            self._background.start(self._background.persist(write))
            if isinstance(error, LedgerDown):
                logger.error("%s is done but not recorded yet: %s", run.claim.id, error)
                call.recorded = False
            elif run.ended is None or self._background.closing:
                raise
            # Else the task is the run's own, and we did not cancel it: the handler's own timeout came in its last moment.
        return outcome, False

    async def _failed(self, call: Call, run: Run, error: BaseException) -> BaseException:
        """Report to the ledger that the handler ended without an outcome, and return the error for the caller."""
        assert run.ledger is not None and run.token is not None and run.record is not None
        stopped = run.state in (RunState.CANCELLED, RunState.STOPPING)
        if run.state is not RunState.UNDONE:  # else the store has undone its transaction
            run.to(RunEvent.REFUSE if is_refusal(error) else RunEvent.RAISE)
        undecided, record = isinstance(error, Undecided), None
        failure = None if undecided else failure_of(call, run, error, stopped=stopped)
        try:
            if run.task is not None:
                await run.task.settle()
            if run.state is RunState.UNDONE and run.task is not None and run.task.is_handed_over:
                if self._background.closing or isinstance(error, (LedgerDown, LedgerUnavailable)):
                    await run.ledger.lapse(run.token)  # the next process that looks for tasks takes it over
                elif await run.ledger.heartbeat(run.token, run.claim.lease):  # else another process has adopted it
                    await run.task.end(failure)  # first, since nothing tells how it ended when the record is gone
                    await give_back(run.ledger, run.record)
            elif run.state is RunState.UNDONE:
                await give_back(run.ledger, run.record)
            elif run.claim.on_crash == "unknown" or undecided:
                await run.ledger.abandon(run.token)
            else:
                await run.ledger.lapse(run.token)
            record = await run.ledger.get(run.claim.id) if undecided else None
        except LedgerDown as down:
            logger.error("%s: the end of the run was not written to the ledger: %s", run.claim.id, down)
            if run.state is RunState.UNDONE and not (run.task is not None and run.task.is_handed_over):
                self._background.unclaim(run.ledger, run.claim)
        return failure or unknown(run.claim.id, record)

    # --- in a transaction --------------------------------------------------------------------------------------------

    async def _transact(self, call: Call, run: Run, handler: Handler) -> tuple[Outcome, bool]:
        """Claim, run and record in one transaction of the store: all of it is committed together, or nothing is.

        A duplicate waits, in the store, for the transaction that holds the record. A transaction that the store undid is
        tried again. One that was lost before its commit is refused, since nothing was done; one that was lost during it is
        unknown.
        """
        if self._background.closing:
            raise stopping(run)
        ledger: Any = run.ledger
        terms, is_keyless = run.method.terms, run.claim.keyless is not None
        for _ in range(TRIES):
            try:
                _check_cancelled(run)  # while the store undid the last try
                run.to(RunEvent.FOLLOW)  # another run may have to be waited for
                if is_keyless and (run.has_equals or self._deliveries.lost or self._deliveries.doubtful):
                    run.claim = await self._deliveries.look(ledger, run.claim, lambda: run.is_lost)
                async with ledger.transaction(run.claim, terms.wait) as transaction:
                    record, run.is_open = transaction.record, True
                    if record.fingerprint != run.claim.fingerprint:
                        raise KeyConflict(ran="no")
                    if is_keyless and not self._answers(run, record):
                        raise in_progress()
                    if run.claim.id.key != call.key:
                        _recognised(call, run)
                    if not run.holds(record):
                        if record.state is not State.RUNNING:
                            return recorded(record), True
                        raise _Orphaned if record.lease_left == 0 else in_progress()
                    _check_cancelled(run)  # in the moment in which the transaction began
                    run.grant(record)
                    run.db = transaction.db
                    run.to(RunEvent.TRANSACT)
                    outcome = await _handled(call, run, handler)
                    # From here on only the store knows. A recorded error undoes the handler's writes, and is kept.
                    kept = stored(outcome, terms.max_stored_result)
                    await transaction.complete(kept, terms.retention, undo=outcome.kind == "error")
                    return outcome, False
            except TryAgain:
                run.hear(RunEvent.UNDO)
                run.answers = False
                if run.is_lost:  # its repetition may have come first
                    raise in_progress() from None
                run.claim = msgspec.structs.replace(run.claim, nonce=os.urandom(16))
            except _Orphaned:
                run.hear(RunEvent.UNDO)
                # No transaction holds the record: it was begun when the method was declared otherwise, and its holder has
                # vanished. Its outcome becomes unknown; a run that had not begun makes way.
                claim = msgspec.structs.replace(run.claim, on_crash="unknown", nonce=os.urandom(16), keyless=None)
                try:
                    record = await ledger.claim(claim)
                    if record.state is State.RUNNING and record.nonce == claim.nonce:
                        await ledger.release(record.token)
                except LedgerDown as error:
                    self._background.unclaim(ledger, claim)
                    raise unavailable(error) from error
            except BaseException as error:
                raise failure_in_transaction(call, run, error) from error
        raise KeyInProgress("the database kept undoing the transaction", ran="no", retry_after_ms=RETRY_AFTER_MS)

    # --- tasks -------------------------------------------------------------------------------------------------------

    async def _transact_task(self, call: Call, run: Run, handler: Handler) -> Outcome:
        """Run the handler of a task in a transaction that records its outcome. The record is there already."""
        ledger: Any = run.ledger
        terms, claim = run.method.terms, msgspec.structs.replace(run.claim, keyless=None)
        for _ in range(TRIES):
            try:
                _check_cancelled(run)  # before the handler started, or while the store undid the last try
                async with ledger.transaction(claim, terms.wait) as transaction:
                    _check_cancelled(run)
                    if not run.holds(transaction.record):
                        raise LostLease(f"{run.claim.id}: another run holds the record")
                    run.db = transaction.db
                    run.to(RunEvent.TRANSACT)
                    outcome = await _handled(call, run, handler)
                    kept = stored(outcome, terms.max_stored_result)
                    await transaction.complete(kept, terms.retention, undo=outcome.kind == "error")
                    return outcome
            except TryAgain:
                if run.hear(RunEvent.UNDO):  # else the handler has not started, or was cancelled
                    run.to(RunEvent.FOLLOW)
                    run.to(RunEvent.GRANT)
            except NotCommitted:
                run.hear(RunEvent.UNDO)
                raise
            except Locked as error:
                raise LedgerDown(str(error)) from error
        raise LedgerDown("the database kept undoing the transaction")

    async def hand_over(self, run: Run, id: str, document: bytes, ttl: float) -> bool:
        """Make a task of a run; False if it has ended, or has lost its record. Duplicates ask the ledger from now on."""
        assert run.ledger is not None
        if run.token is None or not await run.ledger.begin_task(run.token, id, document, ttl):
            return False
        self._land(run, None)
        return True

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as background work, which `aclose` waits for."""
        self._bind(asyncio.get_running_loop())
        self._background.start(work)

    def cancel(self, id: RecordId) -> None:
        """Cancel the run of a record in this process, if it has done nothing yet."""
        for run, task in self._tasks.items():
            if run.claim.id == id and run.stops:
                run.cancel(task)

    # --- the end -----------------------------------------------------------------------------------------------------

    async def aclose(self, grace: float) -> None:
        """Stop claiming, end runs that have done nothing yet, let handlers past their commit point finish within `grace`."""
        self._bind(asyncio.get_running_loop())
        self._deliveries.flush()
        self._background.stop()
        for run, task in list(self._tasks.items()):
            if run.stops:
                run.cancel(task)
        in_flight = [*self._background.tasks, *(flight.ended() for flight in self._flights.values())]
        if in_flight:
            await asyncio.wait(in_flight, timeout=grace)
        runs = dict(self._tasks)
        left = [*runs.values(), *self._background.tasks]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=LAST_WORDS)
        for run, task in runs.items():
            if task.done():  # a task that was cancelled before it began could not wake its caller
                self._tasks.pop(run, None)
                if run.ended is not None and not run.ended.done():
                    run.ended.set_exception(stopping(run))


class Flight(Struct, eq=False):
    """The one run of a command in this process, and the duplicates that wait for it."""

    fingerprint: bytes
    is_granted: bool = False
    is_refused: bool = False  # the ledger is down: the duplicates need not find out one after another
    is_forsaken: bool = False  # its caller left while the claim was on its way: the record is being given back
    waiting: list[asyncio.Future[Outcome | None]] = []
    landed: tuple[Outcome | None] | None = None

    async def join(self, fingerprint: bytes, wait: float) -> Outcome | None:
        """Return the outcome, or None when the run ended without one."""
        if fingerprint != self.fingerprint and self.is_granted:
            raise KeyConflict(ran="no")
        future = self.ended()
        try:
            async with asyncio.timeout(wait):
                outcome = await future
        except TimeoutError:
            raise in_progress() from None
        if self.is_refused:
            raise LedgerUnavailable(ran="no")
        # Until the ledger has granted the record, either params may be the right ones: the duplicate claims for itself.
        return outcome if fingerprint == self.fingerprint else None

    def ended(self) -> "asyncio.Future[Outcome | None]":
        future: asyncio.Future[Outcome | None] = asyncio.get_running_loop().create_future()
        self.waiting.append(future)
        if self.landed is not None:  # in another thread, a moment ago
            future.set_result(*self.landed)
        return future


class _Queued(Exception):
    """No place is free for a task."""


class Undecided(Exception):
    """A reconcile function does not know how the earlier run ended."""


class _Orphaned(Exception):
    """A transaction found a record whose holder, in another mode, has vanished."""


async def _ask(ledger: Ledger, claim: Claim, asked: "asyncio.Future[Record | Exception]") -> Record | Exception:
    """Claim a record and wake the run that waits for it. An error is an answer, which a run that has left need not hear."""
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


def _recognised(call: Call, run: Run) -> None:
    """Give a call the key of the earlier call that it repeats."""
    call.key, call.recognised = run.claim.id.key, True
    if call.peer is not None:
        call.peer.named(call.key)


def _check_cancelled(run: Run) -> None:
    """Raise `CancelledError` in a run that was cancelled while it could not be interrupted."""
    if run.state in (RunState.CANCELLED, RunState.STOPPING, RunState.LEAVING):
        raise asyncio.CancelledError


async def _handled(call: Call, run: Run, handler: Handler) -> Outcome:
    """Run the handler and return its outcome: its result, or an error of its own. Other exceptions are not outcomes."""
    if run.state in NOT_BEGUN:  # else it was called before it got here
        run.begin()
    try:
        result: Any = handler()
        while hasattr(result, "__await__"):
            result = await result
        outcome = outcome_of("result", result, run.claim.id, call.shape)
    except FixedError:
        raise
    except RpcError as error:
        if not call.reached:  # a provider raised it, so the handler did not start
            raise
        ran: Ran = "no" if run.state in NOTHING_DONE else "yes"
        if error.is_remote and error.ran != ran:
            # Another server, or a client that was asked, reports `ran` of its own part. The answer reports that of this run.
            error = error.telling(ran)
        outcome = outcome_of("error", error, run.claim.id)
    run.to(_RETURN)
    return outcome


async def _reconciled(call: Call, run: Run) -> Outcome | None:
    """Ask the method's reconcile function about the run of a holder that vanished; None: that run did nothing."""
    method = run.method
    if run.state is RunState.CANCELLED:
        raise asyncio.CancelledError
    run.to(RunEvent.ASK)
    in_a_thread = method.blocking and run.loop is not None
    verdict = await settled(method.reconcile(Context(call), in_a_thread=in_a_thread))
    if isinstance(verdict, Done):
        outcome = outcome_of("result", method.written(verdict.result), run.claim.id, call.shape)
        run.to(RunEvent.RETURN)
        return outcome
    if isinstance(verdict, NotDone):
        return None
    if not isinstance(verdict, CannotTell):
        logger.error("%s: reconcile returned %r, expected Done, NotDone or CannotTell", method.name, verdict)
    raise Undecided
