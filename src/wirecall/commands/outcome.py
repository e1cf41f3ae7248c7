"""How a run ends: with an outcome, or with the reason why it has none.

1. `handled` runs the handler. A value becomes bytes once (`outcome_of`), the ledger may keep less
   of them (`stored`), a record returns them or raises the reason why it cannot (`recorded`), and an
   outcome becomes an answer (`answer`), marked when it is a replay.
2. A run that ends without an outcome has a failure (`failure_of`). `ran` is "no" only if the
   command cannot have had an effect.
"""

import asyncio
from hashlib import sha256
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, Struct

from wirecall.aio import is_closing, needs_loop
from wirecall.commands.run import (
    NOT_BEGUN,
    NOTHING_DONE,
    LostLease,
    Run,
    RunEvent,
    RunState,
)
from wirecall.errors import (
    Busy,
    CannotWait,
    EncodeError,
    FixedError,
    HeaderMismatch,
    InternalError,
    InvalidParams,
    InvalidRequest,
    KeyConflict,
    KeyInProgress,
    LedgerUnavailable,
    MethodNotFound,
    Mistake,
    NotCapable,
    OutcomeUnknown,
    ParseError,
    ProtocolError,
    Ran,
    ResultNotRetained,
    RpcError,
    UnknownVersion,
    UpstreamUnavailable,
    UsageError,
)
from wirecall.ledger.base import (
    DIGEST,
    CommitUnknown,
    Crowded,
    LedgerDown,
    Locked,
    NoDriver,
    NotCommitted,
    Outcome,
    Record,
    RecordId,
    State,
)
from wirecall.logs import failed, logger
from wirecall.protocol.messages import ErrorObject, encode, failure
from wirecall.server.call import Call, Handler, InputRequired, Shape

# Milliseconds after which a caller may ask again for a command that is in progress.
RETRY_AFTER_MS = 1000

# wirecall's own errors with which a handler refuses a call. They are not outcomes: the handler has
# done nothing.
REFUSALS = (
    Busy,
    HeaderMismatch,
    InvalidParams,
    InvalidRequest,
    KeyInProgress,
    LedgerUnavailable,
    MethodNotFound,
    NotCapable,
    ParseError,
    UnknownVersion,
    UpstreamUnavailable,
)

# The answer to repetitions of a call whose outcome is unknown.
UNKNOWN_TO_REPETITIONS = (
    "this call, or an equal one before it, may have taken effect: "
    "find that out before it is sent again; equal calls get this answer for a while, "
    "and one that is meant as a new command needs an idempotency key"
)
# The same, if only one of them gets it.
UNKNOWN_TO_REPETITION = (
    "this call, or an equal one before it, may have taken effect: "
    "find that out before it is sent again; the next equal call runs"
)

# Looked up once, since every run needs them.
_RETURN = RunEvent.RETURN
_MARKING = RunState.MARKING


# --- the handler ----------------------------------------------------------------------------------


class Called(Struct, eq=False):
    """A handler that cannot wait, after its call: its value, or its error, stands for it.

    It is called before its run is led, because it may still return an awaitable. Then the run needs
    its own task.
    """

    value: object = None
    error: BaseException | None = None

    def __call__(self) -> object:
        """Return the value of the handler, or raise its error."""
        if self.error is not None:
            raise self.error
        return self.value


def call_now(run: Run, handler: Handler) -> Called:
    """Call a handler that cannot wait. Nothing interrupts it."""
    run.begin()
    try:
        return Called(handler())
    except BaseException as error:
        return Called(error=error)


async def handled(call: Call, run: Run, handler: Handler) -> Outcome:
    """Run the handler and return its outcome: a result, or its own error.

    Other errors are not outcomes.
    """
    if run.state in NOT_BEGUN:  # else the handler was called already
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
        outcome = outcome_of("error", _with_ran(run, error), run.claim.id)
    if run.state is _MARKING:
        _note_not_awaited(run)
    run.to(_RETURN)
    return outcome


def _with_ran(run: Run, error: RpcError) -> RpcError:
    """Return a handler's error with the `ran` of its run, unless the handler has stated it."""
    ran: Ran = "yes"
    if run.state in NOTHING_DONE:
        ran = "no"
    # Another server, or a client that was asked, reports the `ran` of its part. The answer reports
    # this run's.
    if error.is_remote and error.ran != ran:
        return error.with_ran(ran)
    # The protocol reserves this code for refusals, but the run knows whether it is past its commit
    # point.
    if error.ran != "yes" and not error.states_ran:
        return error.with_ran(ran)
    return error


def _note_not_awaited(run: Run) -> None:
    """Report a commit point that the handler has not awaited: an error in development."""
    mistake = Mistake(
        f"{run.method.name} called ctx.commit_point() without await.",
        "the ledger did not record it, "
        "so after a crash at this place the command would count as not run",
        "await ctx.commit_point()",
    )
    if run.method.in_development:
        raise mistake
    logger.error("%s", mistake)


# --- with an outcome ------------------------------------------------------------------------------


def outcome_of(
    kind: Literal["result", "error"], value: object, id: RecordId, shape: Shape | None = None
) -> Outcome:
    """Encode an outcome.

    If JSON cannot carry a result, only the fact is kept, since the effect has happened; if it
    cannot carry an error, its code and message are kept, so that it stays an error, and a
    transaction is undone.
    """
    try:
        if isinstance(value, RpcError):
            payload = _encode_error(value)
        elif shape is not None:
            payload = encode(shape(value))
        else:
            payload = encode(value)
    except EncodeError as error:
        failed(id.method, None, error, caller=id.caller, key=id.key)
        if not isinstance(value, RpcError):
            return Outcome("result", None, b"")
        payload = encode(ErrorObject(value.code, value.message.encode(errors="replace").decode()))
    return Outcome(kind, payload, sha256(payload).digest())


def stored(outcome: Outcome, limit: int) -> Outcome:
    """Return the part that the ledger keeps.

    Of a large result that is the digest, of a large error its code and a short message.
    """
    if outcome.payload is None or len(outcome.payload) <= limit:
        return outcome
    if outcome.kind == "result":
        return Outcome(outcome.kind, None, outcome.digest)
    error = _decode_error(outcome.payload)
    return Outcome(
        outcome.kind, encode(ErrorObject(error.code, error.message[:200])), outcome.digest
    )


def recorded(record: Record, *, repeats_unknown: bool = True) -> Outcome:
    """Return the outcome that a record holds, or raise the error that says why it holds none."""
    if record.state is State.UNKNOWN:
        raise unknown(record.id, record, repeats=repeats_unknown)
    assert record.outcome is not None
    if record.outcome.payload is None:
        raise ResultNotRetained(
            ran="yes", digest=record.outcome.digest[:DIGEST].hex(), completed_at=record.completed_at
        )
    return record.outcome


def answer(outcome: Outcome, *, replayed: bool, recorded: bool = True) -> Raw:
    """Return the result, or raise the recorded error, with its marks in `data`."""
    if outcome.payload is None:
        raise InternalError(ran="yes")
    if outcome.kind == "result":
        return Raw(outcome.payload)
    error = _decode_error(outcome.payload)
    data: object = None
    if error.data is not UNSET:
        data = error.data
    if replayed:
        data = _marked(data, "replayed", True)
    elif not recorded:
        data = _marked(data, "recorded", False)
    if error.is_protocol:
        raise ProtocolError(error.code, error.message, data)
    raise RpcError(error.code, error.message, data)


def _marked(data: object, mark: str, value: bool) -> object:
    """Return the `data` of an error with a mark."""
    if isinstance(data, dict):
        return {**data, mark: value}
    if data is None:
        return {mark: value}
    return {mark: value, "data": data}


class _RecordedError(ErrorObject, frozen=True, gc=False):
    """An error as the ledger keeps it."""

    # The error is raised as a `ProtocolError`.
    is_protocol: bool = False


_decode_error = msgspec.json.Decoder(_RecordedError).decode


def _encode_error(error: RpcError) -> bytes:
    sent = failure(None, error).error
    if not isinstance(error, ProtocolError):
        return encode(sent)
    return encode(_RecordedError(sent.code, sent.message, sent.data, True))


# --- without an outcome ---------------------------------------------------------------------------


def is_refusal(error: BaseException) -> bool:
    """Return whether a handler refuses the call.

    The error of a server that the handler called is not its own refusal.
    """
    return isinstance(error, REFUSALS) and not error.is_remote


def failure_of(call: Call, run: Run, error: BaseException, *, stopped: bool) -> BaseException:
    """Return the error for the caller of a handler that ended without an outcome.

    `stopped` says that we cancelled it.
    """
    # These end more than the call. A cancellation that we did not make is the handler's own
    # failure.
    if is_closing(error) or isinstance(error, KeyboardInterrupt):
        return error
    if isinstance(error, asyncio.CancelledError) and stopped:
        return error
    undone = run.state in NOTHING_DONE
    # A handler's own refusal is passed on, unless the handler had passed its commit point.
    if isinstance(error, REFUSALS) and not error.is_remote and undone:
        if error.ran == run.ran:
            return error
        return error.with_ran(run.ran)
    # The same for the answer of a provider: the handler has not started.
    if isinstance(error, RpcError) and not call.reached:
        return error
    if run.loop is None and needs_loop(error):
        return CannotWait()
    if isinstance(error, LostLease):
        return in_progress()
    # A handler that called another server may know why the outcome is unknown.
    if isinstance(error, OutcomeUnknown) and not error.is_remote and not undone:
        return _with_record(error, run.claim.id)
    # At the commit point, so the handler did not continue.
    if isinstance(error, LedgerDown) and undone:
        return unavailable(error)
    # The cause goes to the log, not to the caller (J15).
    id = run.claim.id
    failed(
        run.method.name,
        call.correlation_id,
        error,
        caller=id.caller,
        key=id.key,
        ids=call.ids.facts(),
    )
    if isinstance(error, Mistake):
        return InternalError(str(error), ran=run.ran)
    return InternalError(ran=run.ran)


def _with_record(error: OutcomeUnknown, id: RecordId) -> OutcomeUnknown:
    """Return a handler's own "unknown", with the name of the record for an operator."""
    return OutcomeUnknown(**{**error.data, "ran": "unknown", "record": str(id)})


def failure_in_transaction(call: Call, run: Run, error: BaseException) -> BaseException:
    """Return the error for the caller of a transaction that, as far as is known, was undone."""
    if isinstance(error, InputRequired):
        return error
    # The server's own answer: a conflict, a refusal, or an outcome of an earlier run.
    if isinstance(error, RpcError) and not isinstance(error, InternalError) and not error.is_remote:
        return error
    if isinstance(error, Locked):
        return in_progress()
    if isinstance(error, CommitUnknown):
        run.accept(RunEvent.DOUBT)  # a caller that has left must not get "no"
        return OutcomeUnknown(str(error), ran="unknown", record=str(run.claim.id))
    if isinstance(error, LedgerDown):
        return unavailable(error)
    stopped = run.state in (RunState.STOPPING, RunState.LEAVING)
    if isinstance(error, NotCommitted):
        run.accept(RunEvent.UNDO)
    else:
        run.accept(RunEvent.RAISE)
    return failure_of(call, run, error, stopped=stopped)


def in_progress() -> KeyInProgress:
    """Return the error for a command whose other run is in flight, or was a moment ago."""
    return KeyInProgress(ran="unknown", retry_after_ms=RETRY_AFTER_MS)


def unknown(id: RecordId, record: Record | None, *, repeats: bool = True) -> OutcomeUnknown:
    """Return the error for an unknown outcome.

    The facts of the record help an operator to find the outcome out. `repeats` says whether further
    equal calls get the error, too.
    """
    if record is None:
        return OutcomeUnknown(ran="unknown", record=str(id))
    reason = ""
    if record.delivery is not None:
        reason = UNKNOWN_TO_REPETITIONS if repeats else UNKNOWN_TO_REPETITION
    return OutcomeUnknown(
        reason,
        ran="unknown",
        record=str(id),
        started_at=record.started_at,
        attempts=record.attempts,
    )


def conflict(*, is_keyless: bool) -> RpcError:
    """Return the error for a record of other params.

    Without a key, two digests collide, which is rare.
    """
    error = KeyConflict(ran="no")
    if not is_keyless:
        return error
    return RpcError(
        error.code,
        "This call cannot be distinguished from another one: send it with an idempotency key",
        error.data,
    )


def unavailable(error: LedgerDown | UsageError) -> LedgerUnavailable | Busy:
    """Return the error for a command that the ledger could not take: nothing ran."""
    if isinstance(error, Crowded):
        logger.warning("the ledger is busy: %s", error)
        return Busy(
            "all connections to the ledger are in use", ran="no", retry_after_ms=RETRY_AFTER_MS
        )
    logger.error("the ledger is unavailable: %s", error)
    return LedgerUnavailable(ran="no")


def without_driver(run: Run, error: NoDriver) -> InternalError:
    """Return the error for a ledger that no retry can open."""
    logger.error("the ledger cannot be used: %s", error)
    reason = "the ledger cannot be used; the server's log has the reason"
    if run.method.in_development:
        reason = str(error)
    return InternalError(reason, ran="no")


def stopping(run: Run) -> LedgerUnavailable:
    """Return the error for a command that a stopping server does not run."""
    return LedgerUnavailable("the server is stopping", ran=run.ran)
