"""The transactional mode: the handler's effect and the record of it are one transaction of the store.

The rules of the file:

1. Claim, effect and outcome are committed together, or nothing of them is. So there is no lease and no commit point of ours.
2. A duplicate waits, in the store, for the transaction that holds the record; whoever waits can be interrupted.
3. A transaction that the store undid is tried again. One that was lost before its commit is refused, since nothing was
   done; one that was lost during it is unknown.
4. A recorded error undoes the effect, and is kept.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from wirecall.commands.background import Chores
from wirecall.commands.endings import told, unavailable
from wirecall.commands.handlers import handled
from wirecall.commands.outcome import Ended, recorded, stored
from wirecall.commands.run import RETRY_AFTER_MS, Call, Run, in_progress
from wirecall.errors import InternalError, KeyConflict, KeyInProgress, OutcomeUnknown, RpcError
from wirecall.ledger.base import (
    CommitUnknown,
    Ledger,
    LedgerDown,
    Locked,
    NotCommitted,
    Outcome,
    Record,
    State,
    Transaction,
    TryAgain,
)
from wirecall.process import new_nonce
from wirecall.server.context import InputRequired

# A transaction that the store undid is tried again; nothing of it has escaped.
TRIES = 5


class Transactions:
    """The runs inside a transaction in this process."""

    def __init__(self, open: Callable[[Run], Awaitable[Ledger]], chores: Chores) -> None:
        self._open = open
        self._chores = chores

    async def lead(self, run: Run, call: Call) -> Ended:
        """Claim the command, run it and record its outcome; or give the outcome of another run."""
        ledger: Any = await self._open(run)
        for _ in range(TRIES):
            run.others = run.interruptible = True  # another run may have to be waited for; nothing of ours is done meanwhile
            try:
                async with ledger.transaction(run.claim, run.method.terms.wait) as transaction:
                    run.others = run.interruptible = False
                    return await _transact(ledger, transaction, run, call)
            except TryAgain:
                run.claim = msgspec.structs.replace(run.claim, nonce=new_nonce())
            except _Orphaned:
                await self._bury_holder(ledger, run)
            except BaseException as error:
                raise _undone(error, run) from error
        raise KeyInProgress("the database kept undoing the transaction", ran="no", retry_after_ms=RETRY_AFTER_MS)

    async def _bury_holder(self, ledger: Ledger, run: Run) -> None:
        """A record that no transaction holds was begun when the method was declared otherwise, and its holder vanished. What
        may have happened is unknown; what had not begun makes way."""
        claim = msgspec.structs.replace(run.claim, on_crash="unknown", nonce=new_nonce())
        try:
            record = await ledger.claim(claim)
            if record.state is State.RUNNING and record.nonce == claim.nonce:
                await ledger.release(record.token)
        except LedgerDown as error:
            self._chores.unclaim(ledger, claim)
            raise unavailable(error) from error


class _Orphaned(Exception):
    """A transaction found a record whose holder, in another mode, has vanished."""


async def _transact(ledger: Ledger, transaction: Transaction, run: Run, call: Call) -> Ended:
    record = transaction.record
    if record.fingerprint != run.claim.fingerprint:
        raise KeyConflict(ran="no")
    if not run.holds(record):
        return _of_another(record), True
    run.granted(ledger, record)
    run.committed = False  # until the commit, everything can be undone
    run.db = transaction.db
    if run.cancelled:
        raise asyncio.CancelledError
    outcome = await handled(run, call)
    terms = run.method.terms
    run.committed = True  # from here on, only the store knows
    await transaction.complete(stored(outcome, terms.max_stored_result), terms.retention, undo=outcome.kind == "error")
    return outcome, False


def _of_another(record: Record) -> Outcome:
    """The outcome of the run that holds the record, if it has one."""
    if record.state is not State.RUNNING:
        return recorded(record)
    if record.lease_left == 0:
        raise _Orphaned
    raise in_progress()


def _undone(error: BaseException, run: Run) -> BaseException:
    """What a caller hears of a transaction that was not committed, as far as anybody knows."""
    is_ours = isinstance(error, RpcError) and not isinstance(error, InternalError) and not error.is_remote
    if isinstance(error, InputRequired) or is_ours:
        return error
    if isinstance(error, Locked):
        return in_progress()
    if isinstance(error, CommitUnknown):
        run.committed = True  # whoever waits no longer must not be told "no"
        return OutcomeUnknown(str(error), ran="unknown", record=str(run.claim.id))
    if isinstance(error, LedgerDown):
        return unavailable(error)
    if isinstance(error, NotCommitted):
        run.committed = False
    return told(error, run)
