"""The life of one command with a key: claim, run, record, or answer from the record.

`Commands.execute` is step 5 and 6 of a call. The states and their transitions are in `ledger.base`; this file decides who
waits, who runs, what an interruption means, and what is said to the caller.

The rules of the file:

1. Duplicates in this process await the first (`Flight`); duplicates elsewhere are seen through the ledger, by claiming
   again.
2. Nothing runs before the ledger gave back a record with our nonce.
3. A handler that can wait runs in a task of its own. Its caller may go away or run out of time; before the commit point
   that cancels the handler and releases the record, after it the handler finishes and its outcome is recorded.
4. An outcome is encoded once; the same bytes are recorded and sent.
5. A ledger that is lost before the run refuses the command; one that is lost after it costs the caller nothing: the true
   outcome is answered, and recording it is tried until it succeeds.
"""

import asyncio
import hashlib
import random
import types
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from wirecall.context import Context, InputRequired
from wirecall.errors import (
    Busy,
    CannotWait,
    DeadlineExceeded,
    FixedError,
    InternalError,
    InvalidParams,
    InvalidRequest,
    KeyConflict,
    KeyInProgress,
    LedgerUnavailable,
    MethodNotFound,
    NotCapable,
    OutcomeUnknown,
    RpcError,
    UsageError,
)
from wirecall.ledger.base import (
    UNKNOWN_KEPT,
    Claim,
    CommitUnknown,
    Ledger,
    LedgerDown,
    Locked,
    NotCommitted,
    Outcome,
    Record,
    RecordId,
    State,
    Token,
    Transaction,
    TryAgain,
)
from wirecall.logs import failed, logger
from wirecall.methods import Method
from wirecall.outcomes import Sealed, answer, outcome_of, recorded, stored, unknown
from wirecall.process import new_nonce
from wirecall.runs import (
    RETRY_AFTER_MS,
    Call,
    Flight,
    Heartbeats,
    LostLease,
    Note,
    Noted,
    Run,
    in_thread,
    is_closing,
    is_waiting,
    not_noted,
    settled,
)
from wirecall.tasks import start
from wirecall.terms import CannotTell, Done, NotDone

# How often a duplicate looks whether the first, in another process, is done: at once at first, never rarely.
FIRST_POLL = 0.025
LAST_POLL = 0.5

# A claim whose answer was lost may reach the store later than the question whether it did; so we ask twice.
UNCLAIM_AGAIN = 10.0

# A transaction that the store undid is tried again; nothing of it has escaped.
TRANSACTION_TRIES = 5

SWEEP_EVERY = 60.0
SWEEP_BATCH = 500

# How long we wait for handlers that do not heed their cancellation.
LAST_WORDS = 1.0

# Errors of ours that a handler may raise to say: not now, not like this. They are no outcome, and nothing was done.
REFUSALS = (Busy, InvalidParams, InvalidRequest, KeyInProgress, LedgerUnavailable, MethodNotFound, NotCapable)

Ended = tuple[Outcome, bool]  # an outcome, and whether another run left it


class Commands:
    """The commands of an app that are under way in this process."""

    def __init__(self, ledger: Callable[[], Awaitable[Ledger]], note: Note | None = None) -> None:
        self.closing = False
        self._ledger = ledger
        self._note = note
        self._flights: dict[RecordId, Flight] = {}
        self._runs: dict[Run, asyncio.Task[None]] = {}
        self._chores: set[asyncio.Task[Any]] = set()
        self._heartbeats = Heartbeats(self._do)
        self._naps: set[asyncio.Future[None]] = set()
        self.left = 0  # commands that go on although their callers have left
        self._sweeps: tuple[asyncio.AbstractEventLoop, asyncio.TimerHandle] | None = None

    def execute(
        self, context: Context, method: Method, fingerprint: bytes, call: Call, *, alone: bool
    ) -> Coroutine[Any, Any, Sealed]:
        """Run the command, or answer from the run there was. `alone` means: no event loop, so nothing may wait."""
        claim = Claim(
            id=RecordId(context.caller, context.record, context.idempotency_key or ""),
            fingerprint=fingerprint,
            nonce=new_nonce(),
            lease=method.terms.lease,
            retention=method.terms.retention,
            on_crash=method.terms.on_crash,
            committed=not method.terms.commit_point,
            continues=context._peer is not None and context._peer.continues,
            alone=alone,
        )
        run = context._command = Run(method, context, claim, alone)
        return self._serve(run, call) if method.timeout is None or alone else self._serve_in_time(run, call)

    async def _serve_in_time(self, run: Run, call: Call) -> Sealed:
        deadline = asyncio.timeout(run.method.timeout)
        try:
            async with deadline:
                return await self._serve(run, call)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DeadlineExceeded(ran="unknown" if run.committed or run.others else "no") from None

    async def aclose(self, grace: float) -> None:
        """Stop claiming, release what has done nothing yet, let handlers past their commit point finish within `grace`."""
        self.closing = True
        if self._sweeps is not None:
            self._sweeps[1].cancel()
        self._heartbeats.rest()
        for run, task in self._runs.items():
            if not run.committed and _is_alive(task):
                self._cancel(task, run)
        for nap in filter(_is_alive, self._naps):
            _wake(nap)
        under_way = [*filter(_is_alive, self._chores), *(flight.ended() for flight in self._flights.values())]
        if under_way:
            await asyncio.wait(under_way, timeout=grace)
        runs = dict(self._runs)
        left = list(filter(_is_alive, [*runs.values(), *self._chores]))
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=LAST_WORDS)
        for run, task in runs.items():
            if task.done():  # one that was cancelled before it began could not tell its caller
                self._ended(run, error=_stopping(run))

    # --- the caller's side -------------------------------------------------------------------------------------------

    async def _serve(self, run: Run, call: Call) -> Sealed:
        context = run.context
        noted = Noted(self._note, context, run.claim.fingerprint) if self._note else not_noted
        try:
            found = await self._found(run)
            if found is not None:
                context.replayed = True
                sealed = answer(found, replayed=True)
                noted()
                return sealed
        except BaseException as error:
            noted(error)
            raise
        can_wait = run.method.can_wait
        if not can_wait:
            call, can_wait = _called(call, run.method.straight)
        if can_wait and not run.alone:
            return await self._watch(run, call, noted)
        return await self._body(run, call, noted)

    async def _found(self, run: Run) -> Outcome | None:
        """The outcome of another run of this command; None if it is ours to run."""
        mine = Flight(run.claim.fingerprint)  # one step, since other threads may be at it too
        while (flight := self._flights.setdefault(run.claim.id, mine)) is not mine:
            run.others = True
            if run.alone:
                raise KeyInProgress(ran="unknown", retry_after_ms=RETRY_AFTER_MS)
            outcome = await flight.join(run.claim.fingerprint, run.method.terms.wait)
            if outcome is not None:
                return outcome
        run.others = False
        found: Outcome | None = None
        try:
            ledger = await self._open(run)
            if run.claim.on_crash == "transactional":
                return None
            record = await self._claim(ledger, run)
            if not _is_granted(record, run):
                found = recorded(record)
        except BaseException as error:
            flight.is_refused = isinstance(error, LedgerUnavailable)
            if not run.forsaken:
                self._land(run, None)
            raise
        if found is not None:
            self._land(run, found)
        elif self.closing:
            await self._turn_away(ledger, record, run)
        else:
            flight.is_granted = True
            run.granted(ledger, record)
        return found

    async def _turn_away(self, ledger: Ledger, record: Record, run: Run) -> None:
        """The claim was granted, but the app has begun to stop."""
        try:
            with suppress(LedgerDown):
                await _give_back(ledger, record.token, record.attempts)
        finally:
            self._land(run, None)
        raise LedgerUnavailable("the server is stopping", ran="no")

    async def _watch(self, run: Run, call: Call, noted: Callable[..., None]) -> Sealed:
        """Wait for the task of a command; what interrupts the wait interrupts the command only if it has done nothing."""
        assert run.loop is not None
        run.ended = run.loop.create_future()
        task = self._runs[run] = start(run.loop, self._apart(run, call, noted))
        try:
            sealed: Sealed = await run.ended
            return sealed
        except asyncio.CancelledError:
            if not run.committed and not task.done():
                self._cancel(task, run)
                await asyncio.wait([task], timeout=LAST_WORDS)
            if not task.done():
                self.left += 1
                task.add_done_callback(self._back)
            raise

    async def _apart(self, run: Run, call: Call, noted: Callable[..., None]) -> None:
        """The task of a command. Its caller, if it is still there, is told from within: to ask the task when it is done
        takes a turn of the loop more, and a callback that forgets the task another one."""
        try:
            self._ended(run, await self._body(run, call, noted))
        except asyncio.CancelledError:
            self._ended(run, error=_stopping(run))
            raise
        except GeneratorExit:  # there is no loop any more
            raise
        except BaseException as error:
            self._ended(run, error=error)
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise

    def _ended(self, run: Run, sealed: Sealed | None = None, error: BaseException | None = None) -> None:
        self._runs.pop(run, None)
        if run.ended is None or run.ended.done():  # the caller is gone; what happened is in the ledger and in the log
            return
        if error is None:
            run.ended.set_result(sealed)
        else:
            run.ended.set_exception(error)

    def _back(self, _: "asyncio.Task[None]") -> None:
        self.left -= 1

    def _cancel(self, task: "asyncio.Task[None]", run: Run) -> None:
        """Between two transitions a cancel would leave the record in doubt, so there the run only sees the wish."""
        run.cancelled = True
        if run.interruptible:
            task.cancel()

    # --- the ledger's answer -----------------------------------------------------------------------------------------

    async def _open(self, run: Run) -> Ledger:
        if self.closing:
            raise LedgerUnavailable("the server is stopping", ran="no")
        try:
            ledger = await self._ledger()
        except (LedgerDown, UsageError) as error:
            raise _unavailable(error) from error
        if run.loop is not None:  # else: who works without an event loop sweeps by hand
            self._plan_sweep(ledger, run.loop)
        return ledger

    async def _claim(self, ledger: Ledger, run: Run) -> Record:
        """Our own record, or one that answers this call; waits for a first run that is under way elsewhere."""
        patience, delay = run.method.terms.wait, FIRST_POLL
        is_tidy = ledger.is_tidy or run.alone  # else: whoever does not hear that it has the record must not keep it
        while True:
            try:
                record = await (ledger.claim(run.claim) if is_tidy else self._claim_apart(ledger, run))
            except LedgerDown as error:
                self._do(self._unclaim(ledger, run.claim))
                raise _unavailable(error) from error
            if record.fingerprint != run.claim.fingerprint:
                raise KeyConflict(ran="no")
            if record.state is not State.RUNNING or _is_granted(record, run):
                return record
            run.others = True
            if patience <= 0 or run.alone or self.closing:
                raise KeyInProgress(ran="unknown", retry_after_ms=RETRY_AFTER_MS)
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
            self._do(self._forsake(ledger, run, task))
            raise

    async def _forsake(self, ledger: Ledger, run: Run, task: "asyncio.Task[Record]") -> None:
        """The caller left in the middle of its claim: give the record back before anybody in this process asks for it."""
        try:
            record = await task
            if _is_granted(record, run):
                await _give_back(ledger, record.token, record.attempts)
        except LedgerDown:
            self._do(self._unclaim(ledger, run.claim))
        finally:
            self._land(run, None)

    # --- the command's side ------------------------------------------------------------------------------------------

    async def _body(self, run: Run, call: Call, noted: Callable[..., None]) -> Sealed:
        outcome: Outcome | None = None
        try:
            lead = self._transacted if run.claim.on_crash == "transactional" else self._leased
            outcome, run.context.replayed = await lead(run, call)
            sealed = answer(outcome, replayed=run.context.replayed, recorded=run.context.recorded)
        except BaseException as error:
            noted(error)
            raise
        finally:
            self._land(run, outcome)
        noted()
        return sealed

    async def _leased(self, run: Run, call: Call) -> Ended:
        try:
            if run.cancelled and not run.committed:
                raise asyncio.CancelledError
            if run.ended is not None:  # else: what is in no task of its own never waits, and is over already
                self._heartbeats.start(run)
            known = await self._reconciled(run) if run.claim.on_crash == "reconcile" else None
            outcome = known or await self._handled(run, call)
        except InputRequired as pause:
            raise await self._suspended(run, pause) from pause
        except BaseException as error:
            raise await self._stopped(run, error) from error
        finally:
            if run.ended is not None:
                self._heartbeats.stop(run)
        return await self._completed(run, outcome)

    async def _handled(self, run: Run, call: Call) -> Outcome:
        """Run the handler. Its result and its own errors are outcomes; anything else it raises is not."""
        run.interruptible = True
        try:
            result = call()
            if hasattr(result, "__await__"):
                result = await settled(result)
        except FixedError:
            raise
        except RpcError as error:
            return outcome_of("error", error, run.claim.id)
        finally:
            run.interruptible = False
        run.committed = True
        return outcome_of("result", result, run.claim.id)

    async def _reconciled(self, run: Run) -> Outcome | None:
        """What the method's own reconcile function knows about the run of a holder that vanished."""
        if run.attempt == 1:
            return None
        run.committed = True
        verdict = await settled(self._asked(run))
        if isinstance(verdict, Done):
            return outcome_of("result", verdict.result, run.claim.id)
        if isinstance(verdict, NotDone):
            run.committed = run.claim.committed
            return None
        if not isinstance(verdict, CannotTell):
            logger.error("%s: reconcile returned %r, not Done, NotDone or CannotTell", run.method.name, verdict)
        raise _Undecided

    def _asked(self, run: Run) -> Any:
        if run.method.blocking and not run.alone:
            return in_thread(partial(run.method.reconcile, run.context))
        return run.method.reconcile(run.context)

    async def _suspended(self, run: Run, pause: InputRequired) -> BaseException:
        """The handler asks its caller something: the record waits for the leg that brings the answer.

        A handler that has passed its commit point on entry has done nothing yet: it asks before it acts, since it is run
        from the top again. One that has marked the point itself has acted, and may not ask any more.
        """
        if run.marked:
            late = UsageError("The handler asked its caller after its commit point.", "it would be run again from the top")
            return await self._stopped(run, late)
        assert run.ledger is not None and run.token is not None
        interim = Outcome("result", pause.interim, hashlib.sha256(pause.interim).digest())
        try:
            await run.ledger.suspend(run.token, interim, run.method.terms.retention)
        except LedgerDown as error:
            self._do(self._unclaim(run.ledger, run.claim))
            return _unavailable(error)
        return pause

    async def _stopped(self, run: Run, error: BaseException) -> BaseException:
        """The handler ended without an outcome: what that leaves in the ledger, and what the caller is told."""
        assert run.ledger is not None and run.token is not None
        if _is_refusal(error) and not run.marked:
            run.committed = False
        if not run.committed:
            transition = _give_back(run.ledger, run.token, run.attempt)
        elif run.claim.on_crash == "unknown" or isinstance(error, _Undecided):
            transition = run.ledger.abandon(run.token)
        else:
            transition = run.ledger.lapse(run.token)
        try:
            await transition
            record = await run.ledger.get(run.claim.id) if isinstance(error, _Undecided) else None
        except LedgerDown as down:
            logger.error("%s: the ledger could not be told how the run ended: %s", run.claim.id, down)
            record = None
            if not run.committed:
                self._do(self._unclaim(run.ledger, run.claim))
        if isinstance(error, _Undecided):
            return unknown(run.claim.id, record)
        return _told(error, run)

    async def _completed(self, run: Run, outcome: Outcome) -> Ended:
        assert run.ledger is not None and run.token is not None
        terms = run.method.terms
        kept = stored(outcome, terms.max_stored_result)
        try:
            if await run.ledger.complete(run.token, kept, terms.retention):
                return outcome, False
            return await self._superseded(run, outcome)
        except LedgerDown as error:
            logger.error("%s is done but not recorded yet: %s", run.claim.id, error)
            run.context.recorded = False
            self._do(self._record_late(run, kept))
        except asyncio.CancelledError:
            self._do(self._record_late(run, kept))
            if run.ended is None or self.closing:
                raise
            # In a task of its own, and not by us: the handler's own timeout came in its last moment. It has an outcome.
        return outcome, False

    async def _superseded(self, run: Run, outcome: Outcome) -> Ended:
        """Another holder has the record: its outcome counts, and where it has none, ours is the truth about this run."""
        assert run.ledger is not None
        logger.warning("lost lease: %s was taken over while it ran", run.claim.id)
        record = await run.ledger.get(run.claim.id)
        if record is not None and record.state is State.DONE:
            return recorded(record), True
        return outcome, False

    def _land(self, run: Run, outcome: Outcome | None) -> None:
        del run.context  # it knows the run, and the two would have to wait for the garbage collector
        self._flights.pop(run.claim.id).land(outcome)

    # --- one transaction ---------------------------------------------------------------------------------------------

    async def _transacted(self, run: Run, call: Call) -> Ended:
        ledger: Any = await self._open(run)
        for _ in range(TRANSACTION_TRIES):
            run.others = run.interruptible = True  # another run may have to be waited for; nothing of ours is done meanwhile
            try:
                async with ledger.transaction(run.claim, run.method.terms.wait) as transaction:
                    run.others = run.interruptible = False
                    return await self._transact(ledger, transaction, run, call)
            except TryAgain:
                run.claim = msgspec.structs.replace(run.claim, nonce=new_nonce())
            except _Orphaned:
                await self._bury_holder(ledger, run)
            except BaseException as error:
                raise _undone(error, run) from error
        raise KeyInProgress("the database kept undoing the transaction", ran="no", retry_after_ms=RETRY_AFTER_MS)

    async def _transact(self, ledger: Ledger, transaction: Transaction, run: Run, call: Call) -> Ended:
        record = transaction.record
        if record.fingerprint != run.claim.fingerprint:
            raise KeyConflict(ran="no")
        if not _is_granted(record, run):
            if record.state is State.RUNNING and record.lease_left == 0:
                raise _Orphaned
            if record.state is State.RUNNING:
                raise KeyInProgress(ran="unknown", retry_after_ms=RETRY_AFTER_MS)
            return recorded(record), True
        run.granted(ledger, record)
        run.committed = False  # until the commit, everything can be undone
        run.db = transaction.db
        if run.cancelled:
            raise asyncio.CancelledError
        outcome = await self._handled(run, call)
        terms = run.method.terms
        run.committed = True  # from here on, only the store knows
        await transaction.complete(stored(outcome, terms.max_stored_result), terms.retention, undo=outcome.kind == "error")
        return outcome, False

    async def _bury_holder(self, ledger: Ledger, run: Run) -> None:
        """A record that no transaction holds was begun when the method was declared otherwise, and its holder vanished. What
        may have happened is unknown; what had not begun makes way."""
        claim = msgspec.structs.replace(run.claim, on_crash="unknown", nonce=new_nonce())
        try:
            record = await ledger.claim(claim)
            if record.state is State.RUNNING and record.nonce == claim.nonce:
                await ledger.release(record.token)
        except LedgerDown as error:
            self._do(self._unclaim(ledger, claim))
            raise _unavailable(error) from error

    # --- chores ------------------------------------------------------------------------------------------------------

    def _do(self, chore: Any) -> None:
        """What nobody waits for, but `aclose`."""
        try:
            task = asyncio.get_running_loop().create_task(chore)
        except RuntimeError:  # no event loop: it cannot be done
            chore.close()
            return
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    async def _unclaim(self, ledger: Ledger, claim: Claim) -> None:
        """A claim whose answer was lost may stand in the ledger; nothing ran, so it is taken back."""

        async def take_back() -> None:
            record = await ledger.get(claim.id)
            if record is None or record.nonce != claim.nonce:
                return
            if record.state is State.UNKNOWN and record.attempts == 1:  # a retry came before us, after the lease
                await ledger.resolve(claim.id, None)
            else:
                await _give_back(ledger, record.token, record.attempts)

        await self._persist(take_back)
        await self._nap(UNCLAIM_AGAIN)
        await self._persist(take_back)

    async def _record_late(self, run: Run, kept: Outcome) -> None:
        ledger, token, retention = run.ledger, run.token, run.method.terms.retention
        assert ledger is not None and token is not None
        await self._persist(lambda: ledger.complete(token, kept, retention))

    async def _persist(self, action: Callable[[], Awaitable[Any]]) -> None:
        """Try until it works, for as long as the record may still be there; when the app stops, as long as it is given."""
        patience, delay = UNKNOWN_KEPT, FIRST_POLL
        while patience > 0:
            try:
                await action()
                return
            except LedgerDown:
                await (asyncio.sleep(FIRST_POLL) if self.closing else self._nap(delay))
            patience -= delay
            delay = min(2 * delay, 5.0)

    async def _nap(self, delay: float) -> None:
        """Sleep, but not while the app stops."""
        loop = asyncio.get_running_loop()
        nap: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(0 if self.closing else delay, _wake, nap)
        self._naps.add(nap)
        try:
            await nap
        finally:
            timer.cancel()
            self._naps.discard(nap)

    def _plan_sweep(self, ledger: Ledger, loop: asyncio.AbstractEventLoop) -> None:
        """Sweep about once a minute, at a random moment, so that many processes do not sweep together."""
        if not self.closing and (self._sweeps is None or self._sweeps[0] is not loop):
            delay = SWEEP_EVERY * random.uniform(0.5, 1.5)
            self._sweeps = (loop, loop.call_later(delay, lambda: self._do(self._sweep(ledger, loop))))

    async def _sweep(self, ledger: Ledger, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while not self.closing and await ledger.sweep(SWEEP_BATCH) == SWEEP_BATCH:
                continue
        except LedgerDown as error:
            logger.warning("the ledger was not swept: %s", error)
        self._sweeps = None
        self._plan_sweep(ledger, loop)


def _give_back(ledger: Ledger, token: Token, attempt: int) -> Awaitable[bool]:
    """Nothing was done in this run. If an earlier one may have done something, the record is its evidence and stays."""
    return ledger.release(token) if attempt == 1 else ledger.lapse(token)


def _called(call: Call, straight: types.CodeType | None) -> tuple[Call, bool]:
    """A function that never waits is called at once: nothing can interrupt it. It may still return something to await."""
    try:
        result = call()
        if straight is not None and getattr(result, "cr_code", None) is straight:
            result = _run_through(result)
    except BaseException as error:
        return partial(_raise, error), False
    return lambda: result, hasattr(result, "__await__")


def _run_through(coroutine: "types.CoroutineType[Any, Any, Any]") -> Any:
    try:
        coroutine.send(None)
    except StopIteration as finished:
        return finished.value
    raise AssertionError("it has nowhere to wait")


def _raise(error: BaseException) -> None:
    raise error


def _wake(sleeper: "asyncio.Future[None] | None") -> None:
    if sleeper is not None and not sleeper.done():
        sleeper.set_result(None)


def _is_alive(future: "asyncio.Future[Any]") -> bool:
    """Whether anything can become of it: a loop that was closed in the middle of its work will do no more."""
    return not future.get_loop().is_closed()


class _Orphaned(Exception):
    """A transaction found a record whose holder, in another mode, has vanished."""


class _Undecided(Exception):
    """A reconcile function does not know."""


def _is_granted(record: Record, run: Run) -> bool:
    return record.state is State.RUNNING and record.nonce == run.claim.nonce


def _is_refusal(error: BaseException) -> bool:
    """Whether a handler says that it did nothing. An error of a server that it called says so about that server alone."""
    return isinstance(error, REFUSALS) and not error.is_remote


def _unavailable(error: LedgerDown | UsageError) -> LedgerUnavailable:
    logger.error("the ledger is unavailable: %s", error)
    return LedgerUnavailable(ran="no")


def _stopping(run: Run) -> LedgerUnavailable:
    return LedgerUnavailable("the server is stopping", ran="unknown" if run.committed else "no")


def _told(error: BaseException, run: Run) -> BaseException:
    """What a caller hears of a handler that ended without an outcome."""
    if is_closing(error) or (isinstance(error, asyncio.CancelledError) and run.cancelled):
        return error  # we stopped it, in contrast to a handler that raised such a thing by itself
    if isinstance(error, KeyboardInterrupt) or (_is_refusal(error) and not run.committed):
        return error
    if run.alone and is_waiting(error):
        return CannotWait()
    if isinstance(error, LostLease):
        return KeyInProgress(ran="unknown", retry_after_ms=RETRY_AFTER_MS)
    if isinstance(error, LedgerDown) and not run.committed:  # at the commit point, so the handler went no further
        return _unavailable(error)
    failed(run.method.name, run.context.correlation_id, error)
    return InternalError(ran="unknown" if run.committed else "no")


def _undone(error: BaseException, run: Run) -> BaseException:
    """What a caller hears of a transaction that was not committed, as far as anybody knows."""
    is_ours = isinstance(error, RpcError) and not isinstance(error, InternalError) and not error.is_remote
    if isinstance(error, InputRequired) or is_ours:
        return error
    if isinstance(error, Locked):
        return KeyInProgress(ran="unknown", retry_after_ms=RETRY_AFTER_MS)
    if isinstance(error, CommitUnknown):
        run.committed = True  # whoever waits no longer must not be told "no"
        return OutcomeUnknown(str(error), ran="unknown", record=str(run.claim.id))
    if isinstance(error, LedgerDown):
        return _unavailable(error)
    if isinstance(error, NotCommitted):
        run.committed = False
    return _told(error, run)
