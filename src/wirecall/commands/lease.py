"""A run under a lease: run the handler while the lease is renewed, and record its outcome.

1. A task is handed over before its handler starts, or while it runs. Its record exists before that,
   so even a transactional task runs under a lease.
2. A successor first asks the method's reconcile function what its predecessor did.
3. If the ledger goes down after the run, the caller still gets the true outcome, and recording it
   is retried.
4. A handler that ends without an outcome gives its record back if it has done nothing. Otherwise
   the outcome is unknown, or a successor may run.
"""

import asyncio
from contextlib import suppress
from functools import partial
from hashlib import sha256

import msgspec

from wirecall.aio import settled
from wirecall.commands.background import Background, give_back, regain
from wirecall.commands.claim import Claims
from wirecall.commands.outcome import (
    failure_of,
    handled,
    in_progress,
    is_refusal,
    outcome_of,
    recorded,
    stored,
    unavailable,
    unknown,
)
from wirecall.commands.run import LostLease, Run, RunEvent, RunState
from wirecall.commands.transaction import Transactions
from wirecall.errors import LedgerUnavailable, UsageError
from wirecall.ledger.base import LedgerDown, Outcome, Record, State
from wirecall.logs import logger
from wirecall.server.call import Call, Detachable, Handler, InputRequired
from wirecall.server.home import context_of
from wirecall.server.method import CannotTell, Done, NotDone


class _Queued(Exception):
    """No place is free for a task."""


class Undecided(Exception):
    """A reconcile function does not know how the earlier run ended."""


class Leases:
    """Runs commands under leases."""

    def __init__(self, background: Background, claims: Claims, transactions: Transactions) -> None:
        self._background = background
        self._claims = claims
        self._transactions = transactions

    async def hold(self, call: Call, run: Run, handler: Handler) -> tuple[Outcome, bool]:
        """Run the handler while the lease is renewed, and record its outcome.

        Return the outcome, and whether it is a replay of another run's.
        """
        ledger = run.ledger
        token = run.token
        assert ledger is not None and token is not None
        is_apart = run.ended is not None  # else the handler has ended already
        if is_apart:
            self._background.renew(run)
        terms = run.method.terms
        try:
            task = run.task
            if task is not None:
                await self._begin_task(run, task)
                if run.claim.on_crash == "transactional":
                    return await self._transactions.transact(call, run, handler, has_record=True)
            outcome = None
            if run.attempt > 1 and terms.reconcile:
                outcome = await _reconciled(call, run)
            if outcome is None:
                if task is not None:
                    await _commit_task(run, task)
                outcome = await handled(call, run, handler)
        except _Queued:
            # The task waits for a process that has a place for it: nothing was done, and the lease
            # is over.
            with suppress(LedgerDown):
                await ledger.lapse(token)
            raise in_progress() from None
        except InputRequired as pause:
            await self._suspend(call, run, pause)
            raise
        except BaseException as error:
            raise await self._failed(call, run, error) from error
        finally:
            if is_apart:
                self._background.release(run)

        kept = stored(outcome, terms.max_stored_result)
        try:
            if await self._complete(run, kept):
                return outcome, False
            return await _superseded(run, outcome)
        except LedgerDown as error:
            self._complete_later(run, kept)
            logger.error("%s is done but not recorded yet: %s", run.claim.id, error)
            call.recorded = False
        except asyncio.CancelledError:
            self._complete_later(run, kept)
            # If the run has its own task, and we did not cancel it, the handler's own timeout
            # expired as it ended.
            if not is_apart or self._background.closing:
                raise
        return outcome, False

    async def _begin_task(self, run: Run, task: Detachable) -> None:
        """Hand a call over that becomes a task before its handler starts."""
        has_place = await task.begin(run)
        if task.is_handed_over:
            # Also for an adopted task: duplicates get the task and do not wait.
            self._claims.land(run, None)
        if not has_place:
            raise _Queued

    async def _suspend(self, call: Call, run: Run, pause: InputRequired) -> None:
        """Let the record wait for the round that brings the answer: the handler asks its caller."""
        ledger = run.ledger
        token = run.token
        assert ledger is not None and token is not None
        if not run.accept(RunEvent.PAUSE):
            late = UsageError(
                "The handler asked its caller after its commit point.",
                "it would be run again from the top",
            )
            raise await self._failed(call, run, late) from pause
        retention = run.method.terms.retention
        task = run.task
        if task is not None and task.is_handed_over:
            retention = max(retention, run.method.task_ttl)
        else:
            task = None  # the request asks
        interim = Outcome("result", pause.interim, sha256(pause.interim).digest())

        async def suspend() -> None:
            if task is not None:
                await task.pause()
            await ledger.suspend(token, interim, retention)

        try:
            await suspend()
        except LedgerDown as error:
            if task is None:
                self._background.unclaim(ledger, run.claim)
                raise unavailable(error) from pause
            # The client has the task, and waits.
            self._background.start(self._background.persist(suspend))

    def _complete_later(self, run: Run, outcome: Outcome) -> None:
        """Record an outcome in the background, as soon as the ledger takes it."""
        write = partial(self._complete, run, outcome)
        self._background.start(self._background.persist(write))

    async def _complete(self, run: Run, outcome: Outcome) -> bool:
        """Record an outcome; return whether the ledger has it, also if it has lost the claim."""
        ledger = run.ledger
        retention = run.method.terms.retention
        assert ledger is not None and run.token is not None
        is_done = await ledger.complete(run.token, outcome, retention)
        if not is_done and await regain(run):
            is_done = await ledger.complete(run.token, outcome, retention)
        if is_done:
            self._claims.witness.note(run.token, run.claim.fingerprint, retention)
        return is_done

    # --- failures ---------------------------------------------------------------------------------

    async def _failed(self, call: Call, run: Run, error: BaseException) -> BaseException:
        """Report to the ledger that the handler ended without an outcome.

        Return the error for the caller.
        """
        assert run.ledger is not None
        stopped = run.state in (RunState.CANCELLED, RunState.STOPPING)
        if run.state is not RunState.UNDONE:  # else the store has undone its transaction
            event = RunEvent.RAISE
            if is_refusal(error):
                event = RunEvent.REFUSE
            run.to(event)
        failure: BaseException | None = None
        if not isinstance(error, Undecided):
            failure = failure_of(call, run, error, stopped=stopped)
        record: Record | None = None
        try:
            if run.task is not None:
                await run.task.settle()
            if run.state is not RunState.UNDONE:
                await _leave_in_doubt(run, is_undecided=failure is None)
            elif run.task is not None and run.task.is_handed_over:
                await self._end_task(run, run.task, error, failure)
            else:
                assert run.record is not None
                await give_back(run.ledger, run.record)
            if failure is None:
                record = await run.ledger.get(run.claim.id)
        except LedgerDown as down:
            logger.error(
                "%s: the end of the run was not written to the ledger: %s", run.claim.id, down
            )
            if run.state is RunState.UNDONE and not run.is_handed_over:
                self._background.unclaim(run.ledger, run.claim)
            elif run.state is not RunState.UNDONE and run.task is None:
                leave = partial(_leave_in_doubt, run, is_undecided=failure is None)
                self._background.start(self._background.persist(leave))
        if failure is None:
            return unknown(run.claim.id, record)
        return failure

    async def _end_task(
        self, run: Run, task: Detachable, error: BaseException, failure: BaseException | None
    ) -> None:
        """End a task that has done nothing, or leave it to another process."""
        assert run.ledger is not None and run.token is not None and run.record is not None
        if self._background.closing or isinstance(error, (LedgerDown, LedgerUnavailable)):
            # The next process that looks for tasks takes it over.
            await run.ledger.lapse(run.token)
        # Else another process has adopted it.
        elif await run.ledger.heartbeat(run.token, run.claim.lease):
            # First: without the record, nothing shows how it ended.
            await task.end(failure)
            await give_back(run.ledger, run.record)


async def _leave_in_doubt(run: Run, *, is_undecided: bool) -> None:
    """Give up a record whose run may have acted: its outcome is unknown, or a successor may run."""
    assert run.ledger is not None and run.token is not None
    give_up = run.ledger.lapse
    if run.claim.on_crash == "unknown" or is_undecided:
        give_up = run.ledger.abandon
    if not await give_up(run.token) and await regain(run):
        await give_up(run.token)


async def _commit_task(run: Run, task: Detachable) -> None:
    """Mark the commit point of a task whose handler has none: it counts from its start on.

    Until then any process may take the task over.
    """
    terms = run.method.terms
    if not task.at_once or terms.commit_point:
        return
    assert run.ledger is not None and run.token is not None
    if not await run.ledger.commit_point(run.token, terms.lease):
        raise LostLease(f"{run.claim.id}: the lease was over before the handler started")
    run.claim = msgspec.structs.replace(run.claim, committed=True)


async def _superseded(run: Run, outcome: Outcome) -> tuple[Outcome, bool]:
    """Return the outcome of the holder that has taken the record over.

    If it has none, this run returns its own.
    """
    assert run.ledger is not None
    logger.warning("lost lease: %s was taken over while it ran", run.claim.id)
    record = await run.ledger.get(run.claim.id)
    if record is not None and record.state is State.DONE:
        return recorded(record), True
    return outcome, False


async def _reconciled(call: Call, run: Run) -> Outcome | None:
    """Ask the method's reconcile function about the run of a holder that vanished.

    None: that run did nothing.
    """
    method = run.method
    if run.state is RunState.CANCELLED:
        raise asyncio.CancelledError
    run.to(RunEvent.ASK)
    in_a_thread = method.blocking and run.loop is not None
    verdict = await settled(method.reconcile(context_of(call), in_a_thread=in_a_thread))
    if isinstance(verdict, Done):
        outcome = outcome_of("result", method.written(verdict.result), run.claim.id, call.shape)
        run.to(RunEvent.RETURN)
        return outcome
    if isinstance(verdict, NotDone):
        return None
    if not isinstance(verdict, CannotTell):
        logger.error(
            "%s: reconcile returned %r, expected Done, NotDone or CannotTell", method.name, verdict
        )
    raise Undecided
