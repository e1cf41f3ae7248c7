"""One run of a command in this process: its states and events as one table, the part that its handler sees, and its end.

1. All processes share the ledger's record of a command (`ledger.base`). A run is one process's attempt at it, from the claim
   to the last write. `TABLE` says where each event leads; an event that the table does not have for a state is a bug,
   and `Run.to` raises. Events from outside may come at any time: `Run.hear` stays where the table has nothing for them.
   docs/commands.md draws the table.
2. A run ends with an outcome: a value becomes bytes once (`outcome_of`), the ledger may keep less of them (`stored`), a
   record returns them or raises the reason why it cannot (`recorded`), and an outcome becomes an answer (`answer`), marked
   when it is a replay.
3. Or it ends without one (`failure_of`): `ran` is "no" only if the command cannot have had an effect.
"""

import asyncio
import enum
import hmac
from collections.abc import Awaitable
from hashlib import sha256
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Raw, Struct

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
from wirecall.ledger.base import (
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
)
from wirecall.logs import failed, logger
from wirecall.protocol.messages import ErrorObject, Sending, encode, failure
from wirecall.server.call import Call, Detachable, InputRequired, Passed, Shape
from wirecall.stepping import is_closing, needs_loop, run_now

if TYPE_CHECKING:
    from wirecall.server.method import Method

Ran: TypeAlias = Literal["no", "unknown"]

# Milliseconds after which a caller may ask again for a command that is in progress.
RETRY_AFTER_MS = 1000

# wirecall's own errors with which a handler refuses a call. They are not outcomes: the handler has done nothing.
REFUSALS = (Busy, InvalidParams, InvalidRequest, KeyInProgress, LedgerUnavailable, MethodNotFound, NotCapable)


class RunState(enum.Enum):
    """A state of a run. The docs show the value."""

    __hash__ = object.__hash__  # the table is asked several times for each command, and an enum's own hash is slow

    CLAIMING = "The run asks the ledger for the record."
    FOLLOWING = "Another run holds the record; this run waits for its outcome."
    LEAVING = "The run was cancelled while another run holds the record."
    GRANTED = "The run holds the record; the handler has not started."
    CANCELLED = "The run was cancelled before the handler started."
    FREE = "The handler runs before its commit point: it can be cancelled, and has done nothing."
    STOPPING = "The handler was cancelled before its commit point and is ending."
    MARKING = "The handler has called commit_point(); the ledger is recording it."
    COMMITTED = "The handler is past its commit point, and the ledger has recorded it."
    ENTERED = "A handler without a commit point runs: it counts as past the commit point from the start."
    OPEN = "The handler runs inside a transaction, which can still be rolled back."
    SPILLED = "The handler runs inside a transaction and has called commit_point(): it also acts outside it."
    ASKING = "The reconcile function finds out what an earlier run did."
    RECORDING = "The handler has ended with an outcome; the ledger is recording it."
    UNDONE = "The handler has ended without an outcome and has done nothing."
    DOUBTFUL = "The handler has ended without an outcome and may have done something."


class RunEvent(enum.Enum):
    """An event of a run."""

    __hash__ = object.__hash__

    FOLLOW = "another run holds the record"
    LEAD = "that run ends without an outcome"
    GRANT = "the ledger grants the record"
    CANCEL = "the caller leaves, the timeout passes, or the server stops"
    BEGIN = "the handler starts"
    ENTER = "a handler without a commit point starts"
    TRANSACT = "the handler starts inside a transaction"
    ASK = "an earlier run left the record unfinished"
    MARK = "the handler calls commit_point()"
    MARKED = "the ledger has recorded the commit point"
    LOSE = "the ledger refuses the commit point"
    PAUSE = "the handler asks its caller for input"
    RETURN = "the handler returns, or raises an error that is its answer"
    REFUSE = "the handler refuses the call"
    RAISE = "the handler fails"
    UNDO = "the store rolls the transaction back"
    DOUBT = "the store cannot tell whether the transaction committed"


_S, _E = RunState, RunEvent

# Every run needs these, and Python 3.11 takes ten times as long to find a member of an enum as a name.
_RUNNING, _CANCELLED, _GRANT, _BEGIN, _ENTER = State.RUNNING, _S.CANCELLED, _E.GRANT, _E.BEGIN, _E.ENTER

TABLE: dict[tuple[RunState, RunEvent], RunState] = {
    # Whose run is it?
    (_S.CLAIMING, _E.FOLLOW): _S.FOLLOWING,
    (_S.FOLLOWING, _E.FOLLOW): _S.FOLLOWING,
    (_S.FOLLOWING, _E.LEAD): _S.CLAIMING,
    (_S.CLAIMING, _E.GRANT): _S.GRANTED,
    (_S.FOLLOWING, _E.GRANT): _S.GRANTED,
    # The handler begins, in one of three ways; a successor asks first what its predecessor did.
    (_S.GRANTED, _E.BEGIN): _S.FREE,
    (_S.GRANTED, _E.ENTER): _S.ENTERED,
    (_S.GRANTED, _E.TRANSACT): _S.OPEN,
    (_S.GRANTED, _E.ASK): _S.ASKING,
    (_S.ASKING, _E.BEGIN): _S.FREE,
    (_S.ASKING, _E.ENTER): _S.ENTERED,
    # Providers make arguments before the handler starts: until then the run has done nothing.
    (_S.FREE, _E.ENTER): _S.ENTERED,
    # The commit point. From the call on the run counts as committed; if the ledger refuses it, the handler goes no further.
    (_S.FREE, _E.MARK): _S.MARKING,
    (_S.MARKING, _E.MARK): _S.MARKING,
    (_S.MARKING, _E.MARKED): _S.COMMITTED,
    (_S.MARKING, _E.LOSE): _S.FREE,
    (_S.FREE, _E.MARKED): _S.COMMITTED,
    (_S.ENTERED, _E.MARK): _S.COMMITTED,
    (_S.COMMITTED, _E.MARK): _S.COMMITTED,
    (_S.OPEN, _E.MARK): _S.SPILLED,
    (_S.SPILLED, _E.MARK): _S.SPILLED,
    (_S.ASKING, _E.MARK): _S.ASKING,
    # A cancel stops a run that has done nothing. In every other state the run goes on, and nothing changes.
    (_S.FOLLOWING, _E.CANCEL): _S.LEAVING,
    (_S.GRANTED, _E.CANCEL): _S.CANCELLED,
    (_S.FREE, _E.CANCEL): _S.STOPPING,
    (_S.OPEN, _E.CANCEL): _S.STOPPING,
    # The handler asks its caller: it has done nothing yet, since it starts from the top with the answer.
    (_S.FREE, _E.PAUSE): _S.UNDONE,
    (_S.ENTERED, _E.PAUSE): _S.UNDONE,
    (_S.STOPPING, _E.PAUSE): _S.UNDONE,
    (_S.OPEN, _E.PAUSE): _S.UNDONE,
    (_S.SPILLED, _E.PAUSE): _S.UNDONE,
    # The handler ends with an outcome.
    (_S.FREE, _E.RETURN): _S.RECORDING,
    (_S.STOPPING, _E.RETURN): _S.RECORDING,
    (_S.MARKING, _E.RETURN): _S.RECORDING,
    (_S.COMMITTED, _E.RETURN): _S.RECORDING,
    (_S.ENTERED, _E.RETURN): _S.RECORDING,
    (_S.OPEN, _E.RETURN): _S.RECORDING,
    (_S.SPILLED, _E.RETURN): _S.RECORDING,
    (_S.ASKING, _E.RETURN): _S.RECORDING,
    # It ends without one. "Not now, not like this" means that nothing was done, unless the handler marked its commit point.
    (_S.GRANTED, _E.REFUSE): _S.UNDONE,
    (_S.CANCELLED, _E.REFUSE): _S.UNDONE,
    (_S.FREE, _E.REFUSE): _S.UNDONE,
    (_S.STOPPING, _E.REFUSE): _S.UNDONE,
    (_S.ENTERED, _E.REFUSE): _S.UNDONE,
    (_S.OPEN, _E.REFUSE): _S.UNDONE,
    (_S.SPILLED, _E.REFUSE): _S.UNDONE,
    (_S.MARKING, _E.REFUSE): _S.DOUBTFUL,
    (_S.COMMITTED, _E.REFUSE): _S.DOUBTFUL,
    (_S.ASKING, _E.REFUSE): _S.DOUBTFUL,
    (_S.FOLLOWING, _E.RAISE): _S.UNDONE,
    (_S.LEAVING, _E.RAISE): _S.DOUBTFUL,
    (_S.GRANTED, _E.RAISE): _S.UNDONE,
    (_S.CANCELLED, _E.RAISE): _S.UNDONE,
    (_S.FREE, _E.RAISE): _S.UNDONE,
    (_S.STOPPING, _E.RAISE): _S.UNDONE,
    (_S.OPEN, _E.RAISE): _S.UNDONE,
    (_S.SPILLED, _E.RAISE): _S.UNDONE,
    (_S.MARKING, _E.RAISE): _S.DOUBTFUL,
    (_S.COMMITTED, _E.RAISE): _S.DOUBTFUL,
    (_S.ENTERED, _E.RAISE): _S.DOUBTFUL,
    (_S.ASKING, _E.RAISE): _S.DOUBTFUL,
    # A transaction: its commit decides, and where the store does not tell, nothing is known.
    (_S.OPEN, _E.UNDO): _S.UNDONE,
    (_S.SPILLED, _E.UNDO): _S.UNDONE,
    (_S.RECORDING, _E.UNDO): _S.UNDONE,
    (_S.RECORDING, _E.RAISE): _S.DOUBTFUL,
    (_S.OPEN, _E.DOUBT): _S.DOUBTFUL,
    (_S.SPILLED, _E.DOUBT): _S.DOUBTFUL,
    (_S.STOPPING, _E.DOUBT): _S.DOUBTFUL,
    (_S.RECORDING, _E.DOUBT): _S.DOUBTFUL,
    (_S.UNDONE, _E.FOLLOW): _S.FOLLOWING,
}

# In these states the handler has not started.
NOT_BEGUN = frozenset({_S.GRANTED, _S.CANCELLED, _S.ASKING})

# A cancel interrupts what waits in these states. CANCELLED is not among them: its task has not begun, and has to release the
# record when it does. Nor are the last three: a write to the ledger that is cut leaves the record in doubt.
INTERRUPTIBLE = frozenset({_S.FOLLOWING, _S.LEAVING, _S.FREE, _S.STOPPING, _S.OPEN})

# A run in these states stops when it is cancelled. Any other finishes, although its caller has left.
STOPS = INTERRUPTIBLE | {_S.CLAIMING, _S.GRANTED, _S.CANCELLED, _S.UNDONE}

# In these states nothing was done, and a caller that leaves gets ran: "no".
NOTHING_DONE = frozenset({_S.CLAIMING, _S.GRANTED, _S.CANCELLED, _S.FREE, _S.STOPPING, _S.OPEN, _S.UNDONE})


# --- the run ---------------------------------------------------------------------------------------------------------


class LostLease(Exception):
    """The run may not pass its commit point: it was cancelled, or another holder has taken the record over."""


class Run(Struct, eq=False):
    """One run of a command."""

    method: "Method"
    claim: Claim
    loop: asyncio.AbstractEventLoop | None  # None: without an event loop, so nothing may wait
    follows: str | None  # the state of the leg before, in a call of several rounds
    task: Detachable | None  # where the call can become a task
    sending: Sending | None  # the way of the answer; None: no transport watches it
    state: RunState = RunState.CLAIMING
    ledger: Ledger | None = None
    record: Record | None = None  # as the ledger granted it
    token: Token | None = None
    attempt: int = 1
    fence: int = 0
    db: object = None
    has_equals: bool = False  # without a client's key: answers to equal calls are on their way
    answers: bool = False  # and the answer of its record is this run's to give
    is_lost: bool = False  # and its caller has not got the answer
    is_open: bool = False  # and the ledger cannot mark it yet: the record is in an open transaction
    is_left: bool = False  # nor will get it: whatever its caller is sent now is not the outcome
    flight: RecordId | None = None  # under which its duplicates in this process wait for it
    ended: asyncio.Future[Raw] | None = None  # the caller awaits it, while the run has a task of its own

    def to(self, event: RunEvent) -> None:
        """Move to the state that the table has for an event."""
        self.state = TABLE[self.state, event]

    def hear(self, event: RunEvent) -> bool:
        """Move if the table has the event for this state; return whether it does."""
        state = TABLE.get((self.state, event))
        self.state = state or self.state
        return state is not None

    @property
    def stops(self) -> bool:
        """Return whether a cancel ends the run; otherwise it finishes although its caller has left."""
        return self.state in STOPS

    @property
    def is_over(self) -> bool:
        """Return whether the handler has ended."""
        return self.state in (RunState.RECORDING, RunState.UNDONE, RunState.DOUBTFUL)

    @property
    def ran(self) -> Ran:
        """The word for a caller that does not get the outcome. A run before this one may have acted: `rerun` allows that."""
        had_run = self.record is not None and self.record.is_evidence and self.claim.on_crash == "rerun"
        return "no" if self.state in NOTHING_DONE and not had_run else "unknown"

    @property
    def downstream_key(self) -> str:
        id = self.claim.id
        text = "\0".join((id.caller, id.method, id.key)).encode()
        return hmac.new(b"wirecall downstream key", text, sha256).hexdigest()[:32]

    def holds(self, record: Record) -> bool:
        """Return whether the ledger granted the record to this run."""
        return record.state is _RUNNING and record.nonce == self.claim.nonce

    def grant(self, record: Record) -> None:
        """Take the record that the ledger gave to this run."""
        self.state = TABLE[self.state, _GRANT]
        self.record, self.attempt, self.fence = record, record.attempts, record.fence
        self.token = Token(record.id, record.fence, record.nonce)

    def begin(self) -> None:
        """Begin the handler, unless the run was cancelled before."""
        if self.state is _CANCELLED:
            raise asyncio.CancelledError
        is_ready = self.method.provided is None  # else `enter` follows when the providers have made its arguments
        self.state = TABLE[self.state, _ENTER if self.claim.committed and is_ready else _BEGIN]

    def enter(self) -> None:
        """Called when the arguments are made; raise `CancelledError` if the run was cancelled meanwhile."""
        if self.state is RunState.STOPPING:
            raise asyncio.CancelledError
        if self.state is RunState.FREE and self.claim.committed:
            self.to(RunEvent.ENTER)

    def cancel(self, task: "asyncio.Task[Raw | BaseException]") -> None:
        """Stop the run if it has done nothing yet, at once where it waits."""
        self.hear(RunEvent.CANCEL)
        if self.state in INTERRUPTIBLE:
            task.cancel()

    def commit_point(self) -> Awaitable[None]:
        """Mark the commit point; the awaitable writes it to the ledger.

        Called again, it writes again until the ledger has it: a handler that tries once more must not slip past.
        """
        if self.loop is None:
            run_now(self._mark())
            return Passed()
        try:
            asyncio.get_running_loop()
        except RuntimeError:  # the handler runs in a thread beside the loop, and blocks
            asyncio.run_coroutine_threadsafe(self._mark(), self.loop).result()
            return Passed()
        self.hear(RunEvent.MARK)  # now, and not when the coroutine is awaited: the handler may act in between
        return Passed() if self.state is RunState.COMMITTED else self._mark()

    async def _mark(self) -> None:
        """Write the commit point. Unless the ledger has it, the handler goes no further, so nothing was done."""
        if not self.hear(RunEvent.MARK):
            raise LostLease(f"{self.claim.id}: the run was cancelled before its commit point, or is over")
        if self.state is not RunState.MARKING:  # the ledger knows already, or the store's transaction takes its place
            return
        assert self.ledger is not None and self.token is not None
        try:
            marked = await self.ledger.commit_point(self.token, self.method.terms.lease)
        except LedgerDown:
            self.hear(RunEvent.LOSE)
            raise
        self.hear(RunEvent.MARKED if marked else RunEvent.LOSE)
        if not marked:
            raise LostLease(f"{self.claim.id}: the lease was over before the commit point")


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
    undone = run.state in NOTHING_DONE
    # These end more than the call. A cancellation that we did not make is the handler's own failure.
    if is_closing(error) or isinstance(error, KeyboardInterrupt) or (isinstance(error, asyncio.CancelledError) and stopped):
        return error
    # A handler's own refusal is passed on, unless the handler had passed its commit point.
    if isinstance(error, REFUSALS) and not error.is_remote and undone:
        return error if error.ran == run.ran else error.telling(run.ran)
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
    # The server's own answer: a conflict, a refusal, or an outcome of an earlier run.
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
