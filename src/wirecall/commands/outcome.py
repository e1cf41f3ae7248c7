"""How a command ended: the form that the ledger keeps, and the answer to its caller.

With an outcome: values become bytes once (`outcome_of`); the ledger may keep less of them (`stored`); a record returns them,
or raises the reason why it cannot (`recorded`); and an outcome becomes an answer (`answer`), marked when it is a replay.

Without one (`failure_of`): `ran` is "no" only if the command cannot have had an effect.
"""

import asyncio
from hashlib import sha256
from typing import Literal

import msgspec
from msgspec import UNSET, Raw

from wirecall.commands.run import LostLease, Run, RunEvent, RunState
from wirecall.errors import (
    Busy,
    CannotWait,
    EncodeError,
    InternalError,
    InvalidParams,
    InvalidRequest,
    KeyInProgress,
    LedgerUnavailable,
    MethodNotFound,
    NotCapable,
    OutcomeUnknown,
    ProtocolError,
    ResultNotRetained,
    RpcError,
    UsageError,
)
from wirecall.ledger.base import CommitUnknown, LedgerDown, Locked, NotCommitted, Outcome, Record, RecordId, State
from wirecall.logs import failed, logger
from wirecall.protocol.messages import ErrorObject, encode, failure
from wirecall.server.call import Call, InputRequired, Shape
from wirecall.stepping import is_closing, needs_loop

# Milliseconds after which a caller may ask again for a command that is in progress.
RETRY_AFTER_MS = 1000

# Errors of ours with which a handler refuses a call. They are not outcomes: the handler has done nothing.
REFUSALS = (Busy, InvalidParams, InvalidRequest, KeyInProgress, LedgerUnavailable, MethodNotFound, NotCapable)


# --- with an outcome -------------------------------------------------------------------------------------------------


def outcome_of(kind: Literal["result", "error"], value: object, id: RecordId, shape: Shape | None = None) -> Outcome:
    """Encode an outcome. If JSON cannot carry a result, only the fact is kept, since the effect has happened; if it cannot
    carry an error, its code and message are kept, so that it stays an error, and a transaction is undone."""
    try:
        if isinstance(value, RpcError):
            told = failure(None, value).error
            is_protocol = isinstance(value, ProtocolError)
            payload = encode(_RecordedError(told.code, told.message, told.data, is_protocol) if is_protocol else told)
        else:
            payload = encode(shape(value) if shape else value)
    except EncodeError as error:
        failed(id.method, None, error, caller=id.caller, key=id.key)
        if not isinstance(value, RpcError):
            return Outcome("result", None, b"")
        payload = encode(ErrorObject(value.code, value.message.encode(errors="replace").decode()))
    return Outcome(kind, payload, sha256(payload).digest())


def stored(outcome: Outcome, limit: int) -> Outcome:
    """Return the part that the ledger keeps: of a large result the digest, of a large error its code and a short message."""
    if outcome.payload is None or len(outcome.payload) <= limit:
        return outcome
    if outcome.kind == "result":
        return Outcome(outcome.kind, None, outcome.digest)
    error = _decode_error(outcome.payload)
    return Outcome(outcome.kind, encode(ErrorObject(error.code, error.message[:200])), outcome.digest)


def recorded(record: Record) -> Outcome:
    """Return the outcome that a record holds, or raise the error that says why it holds none."""
    if record.state is State.UNKNOWN:
        raise unknown(record.id, record)
    assert record.outcome is not None
    if record.outcome.payload is None:
        raise ResultNotRetained(ran="yes", digest=record.outcome.digest.hex(), completed_at=record.completed_at)
    return record.outcome


def answer(outcome: Outcome, *, replayed: bool, recorded: bool = True) -> Raw:
    """Return the result, or raise the recorded error, with its marks in `data`."""
    if outcome.payload is None:
        raise InternalError(ran="yes")
    if outcome.kind == "result":
        return Raw(outcome.payload)
    error = _decode_error(outcome.payload)
    data = None if error.data is UNSET else error.data
    marks = {"replayed": True} if replayed else {} if recorded else {"recorded": False}
    if marks:
        data = {**data, **marks} if isinstance(data, dict) else {**marks, **({} if data is None else {"data": data})}
    raise (ProtocolError if error.is_protocol else RpcError)(error.code, error.message, data)


class _RecordedError(ErrorObject, frozen=True, gc=False):
    """An error as the ledger keeps it."""

    is_protocol: bool = False  # raised as a `ProtocolError`


_decode_error = msgspec.json.Decoder(_RecordedError).decode


# --- without an outcome ----------------------------------------------------------------------------------------------


def is_refusal(error: BaseException) -> bool:
    """Return whether a handler refuses the call. The error of a server that the handler called is not its own refusal."""
    return isinstance(error, REFUSALS) and not error.is_remote


def failure_of(call: Call, run: Run, error: BaseException, *, stopped: bool) -> BaseException:
    """Return the error for the caller of a handler that ended without an outcome; `stopped` says that we cancelled it."""
    undone = run.ran == "no"
    # These end more than the call. A cancellation that we did not make is the handler's own failure.
    if is_closing(error) or isinstance(error, KeyboardInterrupt) or (isinstance(error, asyncio.CancelledError) and stopped):
        return error
    # A handler's own refusal is passed on unchanged, unless the handler had passed its commit point.
    if is_refusal(error) and undone:
        return error
    # The same for the answer of a provider: the handler has not started.
    if isinstance(error, RpcError) and not call.reached:
        return error
    if run.loop is None and needs_loop(error):
        return CannotWait()
    if isinstance(error, LostLease):
        return in_progress()
    if isinstance(error, LedgerDown) and undone:  # at the commit point, so the handler went no further
        return unavailable(error)
    # The cause goes to the log, not to the caller (J15).
    id = run.claim.id
    failed(run.method.name, call.correlation_id, error, caller=id.caller, key=id.key)
    return InternalError(ran=run.ran)


def failure_in_transaction(call: Call, run: Run, error: BaseException) -> BaseException:
    """Return the error for the caller of a transaction that was not committed, as far as is known."""
    if isinstance(error, InputRequired):
        return error
    # An answer of ours: a conflict, a refusal, or an outcome of an earlier run.
    if isinstance(error, RpcError) and not isinstance(error, InternalError) and not error.is_remote:
        return error
    if isinstance(error, Locked):
        return in_progress()
    if isinstance(error, CommitUnknown):
        run.hear(RunEvent.DOUBT)  # a caller that has left must not get "no"
        return OutcomeUnknown(str(error), ran="unknown", record=str(run.claim.id))
    if isinstance(error, LedgerDown):
        return unavailable(error)
    stopped = run.state in (RunState.STOPPING, RunState.LEAVING)
    run.hear(RunEvent.UNDO if isinstance(error, NotCommitted) else RunEvent.RAISE)
    return failure_of(call, run, error, stopped=stopped)


def in_progress() -> KeyInProgress:
    """Return the error for a command whose other run is in flight, or was a moment ago."""
    return KeyInProgress(ran="unknown", retry_after_ms=RETRY_AFTER_MS)


def unknown(id: RecordId, record: Record | None) -> OutcomeUnknown:
    """Return the error for an unknown outcome, with the facts of the record that help an operator to find it out."""
    if record is None:
        return OutcomeUnknown(ran="unknown", record=str(id))
    return OutcomeUnknown(ran="unknown", record=str(id), started_at=record.started_at, attempts=record.attempts)


def unavailable(error: LedgerDown | UsageError) -> LedgerUnavailable:
    logger.error("the ledger is unavailable: %s", error)
    return LedgerUnavailable(ran="no")


def stopping(run: Run) -> LedgerUnavailable:
    return LedgerUnavailable("the server is stopping", ran=run.ran)
