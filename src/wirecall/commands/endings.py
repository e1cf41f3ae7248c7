"""What a caller hears of a command that ended without an outcome.

The rules of the file:

1. `ran` is "no" only where nothing can have happened; past the commit point it is "unknown".
2. A handler's own "not now, not like this" is passed on as it is, unless the handler had marked its commit point before.
3. What the handler failed of stays here, in the log.
"""

import asyncio

from wirecall.commands.run import LostLease, Run, in_progress, is_closing, is_waiting
from wirecall.errors import (
    Busy,
    CannotWait,
    InternalError,
    InvalidParams,
    InvalidRequest,
    KeyInProgress,
    LedgerUnavailable,
    MethodNotFound,
    NotCapable,
    UsageError,
)
from wirecall.ledger.base import LedgerDown
from wirecall.logs import failed, logger

# Errors of ours that a handler may raise to say: not now, not like this. They are no outcome, and nothing was done.
REFUSALS = (Busy, InvalidParams, InvalidRequest, KeyInProgress, LedgerUnavailable, MethodNotFound, NotCapable)


def is_refusal(error: BaseException) -> bool:
    """Whether a handler says that it did nothing. An error of a server that it called says so about that server alone."""
    return isinstance(error, REFUSALS) and not error.is_remote


def told(error: BaseException, run: Run) -> BaseException:
    """What a caller hears of a handler that ended without an outcome."""
    if is_closing(error) or (isinstance(error, asyncio.CancelledError) and run.cancelled):
        return error  # we stopped it, in contrast to a handler that raised such a thing by itself
    if isinstance(error, KeyboardInterrupt) or (is_refusal(error) and not run.committed):
        return error
    if run.alone and is_waiting(error):
        return CannotWait()
    if isinstance(error, LostLease):
        return in_progress()
    if isinstance(error, LedgerDown) and not run.committed:  # at the commit point, so the handler went no further
        return unavailable(error)
    id = run.claim.id
    failed(run.method.name, run.context.correlation_id, error, caller=id.caller, key=id.key)
    return InternalError(ran="unknown" if run.committed else "no")


def unavailable(error: LedgerDown | UsageError) -> LedgerUnavailable:
    logger.error("the ledger is unavailable: %s", error)
    return LedgerUnavailable(ran="no")


def stopping(run: Run) -> LedgerUnavailable:
    return LedgerUnavailable("the server is stopping", ran="unknown" if run.committed else "no")
