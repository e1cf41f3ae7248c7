"""One run of a command in this process: its states and events as one table.

There are two state machines in `commands`: the run of a command (`TABLE` here), and the receipt of
a call without a key (`receipts.TABLE`). docs/commands.md draws both tables. No other field of a run
is a state.

1. All processes share the ledger's record of a command (`ledger.base`). A run is one process's
   attempt at it, from the claim to the last write.
2. `TABLE` says where each event leads. An event that the table does not have for a state is a bug,
   and `Run.to` raises. Events from outside may arrive at any time: `Run.accept` ignores those that
   the table lacks.
3. A handler sees a part of its run (`server.call.Running`): the attempt, the fence, `db` and the
   commit point.
"""

import asyncio
import enum
import hmac
from collections.abc import Awaitable
from hashlib import sha256
from typing import TYPE_CHECKING, Literal, TypeAlias

from msgspec import Raw, Struct
from msgspec.structs import replace

from wirecall.aio import run_now
from wirecall.ledger.base import Claim, Ledger, LedgerDown, Record, RecordId, State, Token
from wirecall.server.call import Detachable, NoOp

if TYPE_CHECKING:
    from wirecall.commands.receipts import KeylessReceipt
    from wirecall.server.method import Method

Ran: TypeAlias = Literal["no", "unknown"]


class RunState(enum.Enum):
    """A state of a run. The docs show the value."""

    # The table is asked several times for each command, and an enum's own hash is slow.
    __hash__ = object.__hash__

    CLAIMING = "The run asks the ledger for the record."
    FOLLOWING = "Another run holds the record; this run waits for its outcome."
    LEAVING = "The run was cancelled while another run holds the record."
    GRANTED = "The run holds the record; the handler has not started."
    CANCELLED = "The run was cancelled before the handler started."
    FREE = "The handler runs before its commit point: it can be cancelled, and has done nothing."
    STOPPING = "The handler was cancelled before its commit point and is ending."
    MARKING = "The handler has called commit_point(); the ledger is recording it."
    COMMITTED = "The handler is past its commit point, and the ledger has recorded it."
    ENTERED = (
        "A handler without a commit point runs: it counts as past the commit point from the start."
    )
    OPEN = "The handler runs inside a transaction, which can still be rolled back."
    SPILLED = (
        "The handler runs inside a transaction and has called commit_point(): "
        "it also acts outside it."
    )
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


_S = RunState
_E = RunEvent

# Every run needs these, and Python 3.11 takes ten times as long to find a member of an enum as a
# name.
_RUNNING = State.RUNNING
_CANCELLED = _S.CANCELLED
_GRANT = _E.GRANT
_BEGIN = _E.BEGIN
_ENTER = _E.ENTER

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
    # The commit point. From the call on the run counts as committed; if the ledger refuses it, the
    # handler stops there.
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
    # A cancel stops a run that has done nothing. In every other state the run continues, and
    # nothing changes.
    (_S.FOLLOWING, _E.CANCEL): _S.LEAVING,
    (_S.GRANTED, _E.CANCEL): _S.CANCELLED,
    (_S.FREE, _E.CANCEL): _S.STOPPING,
    (_S.OPEN, _E.CANCEL): _S.STOPPING,
    # The handler asks its caller: it has done nothing yet, since it starts from the top with the
    # answer.
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
    # It ends without one. A refusal means that nothing was done, unless the handler marked its
    # commit point.
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
    # A transaction: its commit decides. If the store cannot confirm the commit, the outcome is
    # unknown.
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

# A cancel interrupts a run that waits in these states. CANCELLED is not among them: its task has
# not begun, and must release the record when it does. The last three are not either: an interrupted
# write leaves the record in doubt.
INTERRUPTIBLE = frozenset({_S.FOLLOWING, _S.LEAVING, _S.FREE, _S.STOPPING, _S.OPEN})

# A run in these states stops when it is cancelled. Any other finishes, although its caller has
# left.
STOPS = INTERRUPTIBLE | {_S.CLAIMING, _S.GRANTED, _S.CANCELLED, _S.UNDONE}

# In these states nothing was done, and a caller that leaves gets ran: "no".
NOTHING_DONE = frozenset(
    {_S.CLAIMING, _S.GRANTED, _S.CANCELLED, _S.FREE, _S.STOPPING, _S.OPEN, _S.UNDONE}
)

# In these states the handler may have done something.
MAY_HAVE_ACTED = frozenset({_S.COMMITTED, _S.ENTERED, _S.RECORDING, _S.DOUBTFUL})


# --- the run --------------------------------------------------------------------------------------


class LostLease(Exception):
    """The run may not pass its commit point.

    It was cancelled, or another holder has taken the record over.
    """


class Run(Struct, eq=False):
    """One run of a command."""

    method: "Method"
    claim: Claim
    # None: there is no event loop, so nothing may wait.
    loop: asyncio.AbstractEventLoop | None
    # The state of the leg before, in a call of several rounds.
    follows: str | None
    # None: the call cannot become a task.
    task: Detachable | None
    # A further round without a record is refused: it may have run, and was forgotten.
    must_exist: bool = False
    state: RunState = RunState.CLAIMING
    ledger: Ledger | None = None
    # The record as the ledger granted it.
    record: Record | None = None
    token: Token | None = None
    attempt: int = 1
    fence: int = 0
    db: object = None
    # The receipt of a call without a key. None: a client has named the command by a key.
    receipt: "KeylessReceipt | None" = None
    # The id under which duplicates in this process wait for this run.
    flight: RecordId | None = None
    # The caller awaits this while the run has its own task.
    ended: asyncio.Future[Raw] | None = None

    def to(self, event: RunEvent) -> None:
        """Move to the state that the table has for an event."""
        self.state = TABLE[self.state, event]

    def accept(self, event: RunEvent) -> bool:
        """Move if the table has the event for this state; return whether it has it."""
        state = TABLE.get((self.state, event))
        if state is None:
            return False
        self.state = state
        return True

    @property
    def stops(self) -> bool:
        """Return whether a cancel ends the run; otherwise it finishes without its caller."""
        return self.state in STOPS

    @property
    def is_over(self) -> bool:
        """Return whether the handler has ended."""
        return self.state in (RunState.RECORDING, RunState.UNDONE, RunState.DOUBTFUL)

    @property
    def is_committed(self) -> bool:
        """Return whether the run counts as past its commit point."""
        return self.claim.committed or self.state in MAY_HAVE_ACTED

    @property
    def stays_unknown(self) -> bool:
        """Return whether the run has failed, and a retry gets the answer "unknown"."""
        return self.state is RunState.DOUBTFUL and self.claim.on_crash == "unknown"

    @property
    def claims_in_transaction(self) -> bool:
        """Return whether the run claims, acts and records in one transaction of the store.

        The record of a task exists before its transaction, so a task has a lease.
        """
        return self.claim.on_crash == "transactional" and self.task is None

    @property
    def has_open_record(self) -> bool:
        """Return whether the record is in an open transaction: no other write reaches it.

        Such a run lands when its transaction is over.
        """
        return self.flight is not None and self.claims_in_transaction

    @property
    def is_handed_over(self) -> bool:
        """Return whether the call has become a task."""
        return self.task is not None and self.task.is_handed_over

    @property
    def ran(self) -> Ran:
        """Return `ran` for a caller without the outcome.

        With `rerun`, an earlier run may have acted.
        """
        if self.state not in NOTHING_DONE:
            return "unknown"
        record = self.record
        if record is not None and record.is_evidence and self.claim.on_crash == "rerun":
            return "unknown"
        return "no"

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
        self.record = record
        self.attempt = record.attempts
        self.fence = record.fence
        self.token = Token(record.id, record.fence, record.nonce)

    def regain(self, record: Record) -> None:
        """Take the record that the ledger gave to this run after it had lost the first one."""
        # The store may count from one again; an earlier run may have acted nevertheless.
        self.record = replace(record, attempts=max(record.attempts, self.attempt))
        self.fence = record.fence
        self.token = Token(record.id, record.fence, record.nonce)

    def begin(self) -> None:
        """Begin the handler, unless the run was cancelled before."""
        if self.state is _CANCELLED:
            raise asyncio.CancelledError
        if self.claim.committed and self.method.provided is None:
            self.state = TABLE[self.state, _ENTER]
        else:
            # If the run is committed, `enter` follows when the providers have made its arguments.
            self.state = TABLE[self.state, _BEGIN]

    def enter(self) -> None:
        """Called when the arguments are made.

        Raises `CancelledError` if the run was cancelled by then.
        """
        if self.state is RunState.STOPPING:
            raise asyncio.CancelledError
        if self.state is RunState.FREE and self.claim.committed:
            self.to(RunEvent.ENTER)

    def check_cancelled(self) -> None:
        """Raise `CancelledError` if the run was cancelled while it could not be interrupted."""
        if self.state in (RunState.CANCELLED, RunState.STOPPING, RunState.LEAVING):
            raise asyncio.CancelledError

    def cancel(self, task: "asyncio.Task[Raw | BaseException]") -> None:
        """Stop the run if it has done nothing yet, at once where it waits."""
        self.accept(RunEvent.CANCEL)
        if self.state in INTERRUPTIBLE:
            task.cancel()

    def commit_point(self) -> Awaitable[None]:
        """Mark the commit point; the awaitable writes it to the ledger.

        Called again, it writes again until the ledger has it: a handler that tries again must not
        slip past.
        """
        if self.loop is None:
            run_now(self._mark())
            return NoOp()
        try:
            asyncio.get_running_loop()
        except RuntimeError:  # the handler runs in a thread beside the loop, and blocks
            asyncio.run_coroutine_threadsafe(self._mark(), self.loop).result()
            return NoOp()
        # Now, and not when the coroutine is awaited: the handler may act in between.
        self.accept(RunEvent.MARK)
        if self.state is RunState.COMMITTED:
            return NoOp()
        return self._mark()

    async def _mark(self) -> None:
        """Write the commit point.

        Unless the ledger has it, the handler stops there, so nothing was done.
        """
        if not self.accept(RunEvent.MARK):
            raise LostLease(
                f"{self.claim.id}: the run was cancelled before its commit point, or is over"
            )
        # The ledger has it, or the store's transaction replaces it.
        if self.state is not RunState.MARKING:
            return
        assert self.ledger is not None and self.token is not None
        try:
            marked = await self.ledger.commit_point(self.token, self.method.terms.lease)
        except LedgerDown:
            self.accept(RunEvent.LOSE)
            raise
        if not marked:
            self.accept(RunEvent.LOSE)
            raise LostLease(f"{self.claim.id}: the lease was over before the commit point")
        self.accept(RunEvent.MARKED)
