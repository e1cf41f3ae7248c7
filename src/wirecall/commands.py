"""The life of one command with a key: claim, run, record, or answer from the record.

`Commands.execute` is step 5 and 6 of a call. The states and their transitions are in `ledger.base`; this file decides who
waits, who runs, what an interruption means, and what is said to the caller.

The rules of the file:

1. A command runs in a task of its own. The caller may go away or run out of time; before the commit point that cancels the
   command and releases its record, after it the handler finishes and its outcome is recorded.
2. Duplicates in this process await the first (`Flight`); duplicates elsewhere are seen through the ledger, by claiming
   again.
3. Nothing runs before the ledger gave back a record with our nonce.
4. An outcome is encoded once; the same bytes are recorded and sent.
5. A ledger that is lost before the run refuses the command; one that is lost after it costs the caller nothing: the true
   outcome is answered, and recording it is tried until it succeeds.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from wirecall.errors import (
    DeadlineExceeded,
    InternalError,
    KeyConflict,
    KeyInProgress,
    LedgerUnavailable,
    OutcomeUnknown,
    RpcError,
)
from wirecall.ledger.base import (
    Claim,
    CommitUnknown,
    Ledger,
    LedgerDown,
    Locked,
    Outcome,
    Record,
    RecordId,
    State,
    Transaction,
    TryAgain,
    new_nonce,
)
from wirecall.logs import failed, logger
from wirecall.methods import CannotTell, Context, Done, Method, NotDone
from wirecall.outcomes import Sealed, answer, outcome_of, recorded, stored, unknown
from wirecall.runs import RETRY_AFTER_MS, Flight, Heartbeat, Note, Noted, Run, unnoted

# How often a duplicate looks whether the first, in another process, is done: at once at first, never rarely.
FIRST_POLL = 0.025
LAST_POLL = 0.5

# A transaction that the store undid is tried again; nothing of it has escaped.
TRANSACTION_TRIES = 5

SWEEP_EVERY = 60.0
SWEEP_BATCH = 500

Call = Callable[[], Awaitable[Any]]


class Commands:
    """The commands of an app that are under way in this process."""

    def __init__(self, ledger: Callable[[], Awaitable[Ledger]], note: Note | None = None) -> None:
        self.ledger = ledger
        self.closing = False
        self._note = note or unnoted
        self._sweeps: tuple[asyncio.AbstractEventLoop, asyncio.TimerHandle] | None = None
        self._flights: dict[RecordId, Flight] = {}
        self._runs: dict[Run, asyncio.Task[Sealed]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def execute(self, context: Context, method: Method, fingerprint: bytes, call: Call, *, alone: bool) -> Sealed:
        """Run the command, or answer from the run there was. `alone` means: no event loop, so nothing may wait."""
        key = context.idempotency_key
        assert key is not None
        id = RecordId(context.caller, method.name, key)
        while flight := self._flights.get(id):
            with Noted(self._note, context, fingerprint) as noted:
                outcome = await flight.join(fingerprint, method.terms.wait)
                if outcome is not None:
                    noted.replayed = True
                    return answer(outcome, replayed=True)
                noted.kept = False
        claim = Claim(
            id=id,
            fingerprint=fingerprint,
            nonce=new_nonce(),
            lease=method.terms.lease,
            retention=method.terms.retention,
            on_crash=method.terms.on_crash,
            committed=not method.terms.commit_point,
        )
        run = context._command = Run(method, claim, context.correlation_id, self.ledger)
        performance = self._perform(run, context, call, self._flights.setdefault(id, Flight(fingerprint)))
        if alone:
            return await performance
        run.loop = asyncio.get_running_loop()
        task = self._runs[run] = self._spawn(performance)
        task.add_done_callback(lambda _: self._runs.pop(run))
        return await self._watch(task, run)

    async def aclose(self, grace: float) -> None:
        """Stop claiming, release what has done nothing yet, let handlers past their commit point finish within `grace`."""
        self.closing = True
        if self._sweeps is not None:
            self._sweeps[1].cancel()
        for run, task in self._runs.items():
            if not run.committed:
                self._cancel(task, run)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- the caller's side -------------------------------------------------------------------------------------------

    async def _watch(self, task: "asyncio.Task[Sealed]", run: Run) -> Sealed:
        deadline = asyncio.timeout(run.method.timeout)
        try:
            async with deadline:
                return await asyncio.shield(task)
        except (TimeoutError, asyncio.CancelledError):
            if task.done():
                return self._ended(task, run)
            stopped = await self._interrupt(task, run)
            if deadline.expired():
                raise DeadlineExceeded(ran="no" if stopped else "unknown") from None
            raise

    def _ended(self, task: "asyncio.Task[Sealed]", run: Run) -> Sealed:
        if task.cancelled():  # by aclose
            raise LedgerUnavailable("the server is stopping", ran="unknown" if run.committed else "no")
        return task.result()

    async def _interrupt(self, task: "asyncio.Task[Sealed]", run: Run) -> bool:
        """End a command that has done nothing yet; leave one that may have."""
        if run.committed:
            return False
        self._cancel(task, run)
        await asyncio.wait([task])
        return not run.committed

    def _cancel(self, task: "asyncio.Task[Sealed]", run: Run) -> None:
        """Between two transitions a cancel would leave the record in doubt, so there the run only sees the wish."""
        run.cancelled = True
        if run.interruptible:
            task.cancel()

    def _spawn(self, coroutine: Any) -> "asyncio.Task[Any]":
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the caller may be gone; what happened is in the ledger and in the log

    # --- the command's side ------------------------------------------------------------------------------------------

    async def _perform(self, run: Run, context: Context, call: Call, flight: Flight) -> Sealed:
        outcome: Outcome | None = None
        try:
            with Noted(self._note, context, run.claim.fingerprint) as noted:
                ledger = await self._open()
                transactional = run.claim.on_crash == "transactional"
                lead = self._in_transaction if transactional else self._leased
                outcome, noted.replayed = await lead(ledger, run, context, call)
                return answer(outcome, replayed=noted.replayed)
        finally:
            self._flights.pop(run.claim.id, None)
            flight.land(outcome)

    async def _open(self) -> Ledger:
        if self.closing:
            raise LedgerUnavailable("the server is stopping", ran="no")
        try:
            ledger = await self.ledger()
        except LedgerDown as error:
            raise self._unavailable(error) from error
        self._plan_sweep(ledger)
        return ledger

    async def _leased(self, ledger: Ledger, run: Run, context: Context, call: Call) -> tuple[Outcome, bool]:
        record = await self._claim(ledger, run)
        if record.nonce != run.claim.nonce:
            return recorded(record), True
        run.granted(record)
        if run.cancelled:
            await self._give_up(ledger.release(record.token), run)
            raise asyncio.CancelledError
        try:
            with Heartbeat(ledger, run, self._spawn):
                outcome = await self._reconciled(run, context) or await self._handled(run, call)
        except BaseException as error:
            raise await self._stopped(ledger, run, error) from error
        if await self._completed(ledger, run, outcome):
            return outcome, False
        return await self._superseded(ledger, run, outcome)

    async def _claim(self, ledger: Ledger, run: Run) -> Record:
        """Our own record, or one that answers this call; waits for a first run that is under way elsewhere."""
        patience, delay = run.method.terms.wait, FIRST_POLL
        while True:
            try:
                record = await ledger.claim(run.claim)
            except LedgerDown as error:
                self._spawn_if_possible(self._unclaim(run.claim))
                raise self._unavailable(error) from error
            if record.fingerprint != run.claim.fingerprint:
                raise KeyConflict(ran="no")
            if record.nonce == run.claim.nonce or record.state is not State.RUNNING:
                return record
            if patience <= 0 or run.cancelled:
                raise KeyInProgress(ran="unknown", retry_after_ms=RETRY_AFTER_MS)
            await self._nap(run, min(delay, patience))
            patience -= delay
            delay = min(2 * delay, LAST_POLL)

    async def _nap(self, run: Run, delay: float) -> None:
        run.interruptible = True
        await asyncio.sleep(delay)
        run.interruptible = False

    async def _handled(self, run: Run, call: Call) -> Outcome:
        """Run the handler. Its result and its own errors are outcomes; anything else it raises is not."""
        run.interruptible = True
        try:
            result = await call()
        except RpcError as error:
            return outcome_of("error", error, run.claim.id)
        finally:
            run.interruptible = False
        run.committed = True
        return outcome_of("result", result, run.claim.id)

    async def _reconciled(self, run: Run, context: Context) -> Outcome | None:
        if run.claim.on_crash != "reconcile" or run.attempt == 1:
            return None
        run.committed = True
        verdict = await run.method.reconcile(context)
        if isinstance(verdict, Done):
            return outcome_of("result", verdict.result, run.claim.id)
        if isinstance(verdict, NotDone):
            run.committed = run.claim.committed
            return None
        if not isinstance(verdict, CannotTell):
            logger.error("%s: reconcile returned %r, not Done, NotDone or CannotTell", run.method.name, verdict)
        raise _CannotTell

    async def _stopped(self, ledger: Ledger, run: Run, error: BaseException) -> BaseException:
        """The handler ended without an outcome: what that leaves in the ledger, and what the caller is told."""
        assert run.token is not None
        if not run.committed:
            await self._give_up(ledger.release(run.token), run)
            return error if _is_ours(error, run) else _internal(error, run, "no")
        if isinstance(error, _CannotTell) or run.claim.on_crash == "unknown":
            await self._give_up(ledger.abandon(run.token), run)
        else:
            await self._give_up(ledger.lapse(run.token), run)
        if isinstance(error, _CannotTell):
            return unknown(run.claim.id, await ledger.get(run.claim.id))
        return error if isinstance(error, GeneratorExit) else _internal(error, run, "unknown")

    async def _completed(self, ledger: Ledger, run: Run, outcome: Outcome) -> bool:
        assert run.token is not None
        try:
            return await ledger.complete(
                run.token, stored(outcome, run.method.terms.max_stored_result), run.method.terms.retention
            )
        except LedgerDown as error:
            logger.error("%s is done but not recorded yet: %s", run.claim.id, error)
            self._spawn_if_possible(self._record_late(ledger, run, outcome))
            return True

    async def _superseded(self, ledger: Ledger, run: Run, outcome: Outcome) -> tuple[Outcome, bool]:
        """Another holder has the record: its outcome counts, and where it has none, ours is the truth about this run."""
        logger.warning("lost lease: %s was taken over while it ran", run.claim.id)
        record = await ledger.get(run.claim.id)
        if record is not None and record.state is State.DONE:
            return recorded(record), True
        return outcome, False

    def _again(self, run: Run) -> Run:
        claim = msgspec.structs.replace(run.claim, nonce=new_nonce())
        return Run(run.method, claim, run.correlation_id, self.ledger)

    # --- one transaction ---------------------------------------------------------------------------------------------

    async def _in_transaction(self, ledger: Any, run: Run, context: Context, call: Call) -> tuple[Outcome, bool]:
        for _ in range(TRANSACTION_TRIES):
            try:
                async with ledger.transaction(run.claim) as transaction:
                    return await self._transact(transaction, run, call)
            except TryAgain:
                context._command = run = self._again(run)
            except Locked:
                raise KeyInProgress(ran="unknown", retry_after_ms=RETRY_AFTER_MS) from None
            except CommitUnknown as error:
                raise OutcomeUnknown(str(error), ran="unknown", record=str(run.claim.id)) from error
            except LedgerDown as error:
                raise self._unavailable(error) from error
            except RpcError:
                raise
            except BaseException as error:
                if _is_ours(error, run):
                    raise
                raise _internal(error, run, "no") from error
        raise KeyInProgress("the database kept undoing the transaction", ran="no", retry_after_ms=RETRY_AFTER_MS)

    async def _transact(self, transaction: Transaction, run: Run, call: Call) -> tuple[Outcome, bool]:
        record = transaction.record
        if record.fingerprint != run.claim.fingerprint:
            raise KeyConflict(ran="no")
        if record.nonce != run.claim.nonce:
            return recorded(record), True
        run.granted(record)
        run.committed = False  # until the commit, everything can be undone
        run.db = transaction.db
        outcome = await self._handled(run, call)
        kept = stored(outcome, run.method.terms.max_stored_result)
        await transaction.complete(kept, run.method.terms.retention, undo=outcome.kind == "error")
        run.committed = True
        return outcome, False

    # --- housekeeping ------------------------------------------------------------------------------------------------

    def _plan_sweep(self, ledger: Ledger) -> None:
        """Sweep about once a minute, at a random moment, so that many processes do not sweep together."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no event loop: who works like this sweeps by hand
            return
        if self._sweeps is None or self._sweeps[0] is not loop:
            delay = SWEEP_EVERY * random.uniform(0.5, 1.5)
            self._sweeps = (loop, loop.call_later(delay, lambda: self._spawn(self._sweep(ledger))))

    async def _sweep(self, ledger: Ledger) -> None:
        try:
            while not self.closing and await ledger.sweep(SWEEP_BATCH) == SWEEP_BATCH:
                continue
        except LedgerDown as error:
            logger.warning("the ledger was not swept: %s", error)
        self._sweeps = None
        self._plan_sweep(ledger)

    # --- the ledger is away ------------------------------------------------------------------------------------------

    def _unavailable(self, error: LedgerDown) -> LedgerUnavailable:
        logger.error("the ledger is unavailable: %s", error)
        return LedgerUnavailable(ran="no")

    async def _give_up(self, transition: Awaitable[bool], run: Run) -> None:
        try:
            await transition
        except LedgerDown as error:
            logger.error("%s: the ledger could not be told how the run ended: %s", run.claim.id, error)

    def _spawn_if_possible(self, coroutine: Any) -> None:
        try:
            self._spawn(coroutine)
        except RuntimeError:  # no event loop: nobody could wait for it
            coroutine.close()

    async def _unclaim(self, claim: Claim) -> None:
        """A claim whose answer was lost may stand in the ledger; nothing ran, so it is taken back."""

        async def take_back() -> None:
            ledger = await self.ledger()
            record = await ledger.get(claim.id)
            if record is not None and record.nonce == claim.nonce:
                await ledger.release(record.token)

        await self._persist(take_back, claim.lease)

    async def _record_late(self, ledger: Ledger, run: Run, outcome: Outcome) -> None:
        token = run.token
        assert token is not None
        kept, retention = stored(outcome, run.method.terms.max_stored_result), run.method.terms.retention
        await self._persist(lambda: ledger.complete(token, kept, retention), retention)

    async def _persist(self, action: Callable[[], Awaitable[Any]], patience: float) -> None:
        delay = FIRST_POLL
        while patience > 0 and not self.closing:
            try:
                await action()
                return
            except LedgerDown:
                await asyncio.sleep(delay)
                patience -= delay
                delay = min(2 * delay, 5.0)


class _CannotTell(Exception):
    """A reconcile function does not know."""


def _is_ours(error: BaseException, run: Run) -> bool:
    """Whether we stopped the handler, in contrast to a handler that raised such a thing by itself."""
    return isinstance(error, GeneratorExit) or (isinstance(error, asyncio.CancelledError) and run.cancelled)


def _internal(error: BaseException, run: Run, ran: str) -> InternalError:
    failed(run.method.name, run.correlation_id, error)
    return InternalError(ran=ran)
