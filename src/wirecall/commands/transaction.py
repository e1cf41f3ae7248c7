"""Transactions: the handler's own writes and the outcome are committed together.

1. A transactional command claims, runs and records in one transaction of the store: all of it is
   committed, or nothing is. A duplicate waits, in the store, for the transaction that holds the
   record.
2. The record of a task exists before its transaction, which then only runs and records. The task
   keeps its lease until that is committed.
3. A transaction that the store rolled back has had no effect, and is tried again. If it is lost
   before its commit, the call is refused, since nothing was done; if it is lost during the commit,
   the outcome is unknown.
"""

import os
from typing import Any

import msgspec

from wirecall.commands.background import Background
from wirecall.commands.outcome import (
    RETRY_AFTER_MS,
    conflict,
    failure_in_transaction,
    handled,
    in_progress,
    recorded,
    stopping,
    stored,
    unavailable,
)
from wirecall.commands.receipts import ReceiptEvent, Receipts, recognised
from wirecall.commands.run import LostLease, Run, RunEvent
from wirecall.commands.witness import Witness
from wirecall.errors import KeyInProgress
from wirecall.ledger.base import (
    Claim,
    LedgerDown,
    Locked,
    NotCommitted,
    Outcome,
    Record,
    State,
    TryAgain,
)
from wirecall.server.call import Call, Handler

# The part of a method's timeout in which a transaction may wait for a connection. The rest is for
# the refusal.
IN_TIME = 0.8

# How often a transaction that the store rolled back is tried; it has had no effect.
TRIES = 5


class _Orphaned(Exception):
    """A transaction found a record whose holder, in another mode, has vanished."""


class Transactions:
    """Runs commands in transactions of the store."""

    def __init__(self, background: Background, receipts: Receipts, witness: Witness) -> None:
        self._background = background
        self._witness = witness
        self._receipts = receipts

    async def transact(
        self, call: Call, run: Run, handler: Handler, *, has_record: bool
    ) -> tuple[Outcome, bool]:
        """Run a handler in a transaction; return its outcome, and whether it is a replay.

        `has_record` says that the run holds its record already, under a lease. Otherwise the
        transaction claims it.
        """
        if self._background.closing and not has_record:
            raise stopping(run)
        ledger: Any = run.ledger
        terms = run.method.terms
        for _ in range(TRIES):
            try:
                run.check_cancelled()  # while the store rolled back the last try
                if has_record:
                    claim = msgspec.structs.replace(run.claim, keyless=None)
                else:
                    claim = await self._prepare(run)
                async with ledger.transaction(claim, terms.wait) as transaction:
                    if has_record:
                        _check_held(run, transaction.record)
                    else:
                        found = self._take(call, run, transaction.record)
                        if found is not None:
                            return found, True
                        if not self._witness.is_sure(ledger, transaction.record):
                            await self._witness.confirm(ledger, transaction.record)
                    run.db = transaction.db
                    run.to(RunEvent.TRANSACT)
                    outcome = await handled(call, run, handler)
                    # From here on the store decides. A recorded error rolls back the handler's
                    # writes, and is kept.
                    kept = stored(outcome, terms.max_stored_result)
                    await transaction.complete(kept, terms.retention, undo=outcome.kind == "error")
                    assert run.token is not None
                    self._witness.note(run.token, run.claim.fingerprint, terms.retention)
                    return outcome, False
            except TryAgain:
                if has_record:
                    _try_task_again(run)
                else:
                    self._try_again(run)
            except _Orphaned:
                await self._release_orphan(run)
            except BaseException as error:
                if not has_record:
                    raise failure_in_transaction(call, run, error) from error
                if isinstance(error, Locked):
                    raise LedgerDown(str(error)) from error
                if isinstance(error, NotCommitted):
                    run.accept(RunEvent.UNDO)
                raise
        if has_record:
            raise LedgerDown("the database kept undoing the transaction")
        raise KeyInProgress(
            "the database kept undoing the transaction", ran="no", retry_after_ms=RETRY_AFTER_MS
        )

    async def _prepare(self, run: Run) -> Claim:
        """Return the claim of a transaction.

        It waits for a connection no longer than its caller waits for the answer.
        """
        run.to(RunEvent.FOLLOW)  # this run may have to wait for another one
        if run.receipt is not None and self._receipts.must_look(run.claim):
            assert run.ledger is not None
            run.claim = await self._receipts.look(run.ledger, run)
        timeout = run.method.timeout
        if timeout is None:
            return run.claim
        return msgspec.structs.replace(run.claim, within=IN_TIME * timeout)

    def _take(self, call: Call, run: Run, record: Record) -> Outcome | None:
        """Take the record that a transaction has claimed; return the outcome of an earlier run."""
        receipt = run.receipt
        if record.fingerprint != run.claim.fingerprint:
            raise conflict(is_keyless=receipt is not None)
        if receipt is not None and not self._receipts.assign(run, receipt, record):
            raise in_progress()
        if run.claim.id.key != call.key:
            recognised(call, run)
        if run.holds(record):
            run.check_cancelled()  # as the transaction began
            run.grant(record)
            return None
        if record.state is not State.RUNNING:
            return recorded(record)
        if record.lease_left == 0:
            raise _Orphaned
        raise in_progress()

    def _try_again(self, run: Run) -> None:
        """Prepare a claim for another try, after the store has rolled the transaction back."""
        run.accept(RunEvent.UNDO)
        if run.receipt is not None:
            run.receipt.to(ReceiptEvent.WITHDRAW)
            if run.receipt.is_lost:  # its repetition may have come first
                raise in_progress() from None
        run.claim = msgspec.structs.replace(run.claim, nonce=os.urandom(16))

    async def _release_orphan(self, run: Run) -> None:
        """Settle a record that no transaction holds.

        It was begun when the method had another `on_crash`, and its holder has vanished. Its
        outcome becomes unknown; if that run had not begun, the record is released.
        """
        run.accept(RunEvent.UNDO)
        ledger = run.ledger
        assert ledger is not None
        claim = msgspec.structs.replace(
            run.claim, on_crash="unknown", nonce=os.urandom(16), keyless=None
        )
        try:
            record = await ledger.claim(claim)
            if record.state is State.RUNNING and record.nonce == claim.nonce:
                await ledger.release(record.token)
        except LedgerDown as error:
            self._background.unclaim(ledger, claim)
            raise unavailable(error) from error


def _check_held(run: Run, record: Record) -> None:
    """Check that a task still holds the record that its transaction found."""
    run.check_cancelled()
    if not run.holds(record):
        raise LostLease(f"{run.claim.id}: another run holds the record")


def _try_task_again(run: Run) -> None:
    """Prepare a task for another try, after the store has rolled the transaction back."""
    if run.accept(RunEvent.UNDO):  # else the handler has not started, or was cancelled
        run.to(RunEvent.FOLLOW)
        run.to(RunEvent.GRANT)
