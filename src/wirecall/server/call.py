"""One call in the server: `Call` is its complete state for the steps.

1. A call does not refer to its context, and a run does not refer to its call: a cycle for every
   call would keep the garbage collector busy.
2. Observers of calls, such as the log and the audit trail, get one `CallEnded` per call, when its
   work is over. A command that continues after its caller has left ends when its handler does, and
   is reported then. A command without a key whose answer did not reach its caller is reported a
   second time, as undelivered.
"""

import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import FixedError, Gone, InternalError, Ran, RpcError
from wirecall.protocol.messages import Id, Json, JsonObject, opens_array
from wirecall.protocol.sender import ANONYMOUS, Sender
from wirecall.server.ids import CorrelationId, Ids

if TYPE_CHECKING:
    from wirecall.ledger.base import Record
    from wirecall.mcp.types import Elicited, Message, Root, Sampled
    from wirecall.server.method import Method

# Stands for the method in the log record of a refused message that has none.
INVALID = "(invalid)"
BATCH = "(batch)"
# The sender of all anonymous calls, if they come from one user.
USER = "user"

# The phases of a call are measured by this clock.
clock = time.perf_counter

# Calls the function; returns its result, or an awaitable of it.
Handler: TypeAlias = Callable[[], object]
# Makes the result of a call from the value of its function.
Shape: TypeAlias = Callable[[Json], object]


class Mark(Struct, eq=False, gc=False, array_like=True):
    """The facts about one message that the rows of all its calls share, for a tap."""

    # When the message was complete, by `clock`.
    begun: float
    caller: str = ANONYMOUS
    # Of the whole message.
    bytes: int = 0
    transport: Literal["rpc", "mcp"] = "rpc"
    # The number of the batch in this process; 0 for a single call.
    batch: int = 0
    # Its entries.
    size: int = 1
    # When its reply was complete; 0 before.
    ended: float = 0.0
    # The position of the last entry that began and had to wait.
    reached: int = -1
    revision: str | None = None
    # Each of its entries has its own times.
    is_measured: bool = False
    # The positions of the entries that have a row; the plain queries of a batch get theirs last.
    noted: set[int] | None = None

    def note(self, position: int | None) -> None:
        """Note that an entry has a row."""
        if position is not None:
            if self.noted is None:
                self.noted = set()
            self.noted.add(position)


class Passed(Struct, eq=False, gc=False, array_like=True):
    """The facts about a call that a gateway passed on."""

    upstream: str
    # The revisions of the client and of the upstream, if they are known.
    client_revision: str | None = None
    revision: str | None = None
    # The id of the request to the upstream. None: nothing was sent to it.
    id: int | None = None
    # The client asked for progress. Its token there is the id.
    has_token: bool = False
    # The upstream gets headers that repeat the body.
    has_headers: bool = False
    # One of them has a handshake, and the other has none.
    crosses: bool = False


# The member of a call's values with the function that returns its `Passed`.
PASSED = "passed"


class Frame(Struct, eq=False):
    """The facts that all calls of one message share: its sender, and those about the message."""

    sender: Sender
    # There is no event loop, so nothing may wait.
    alone: bool = False
    # Even a plain query takes all the steps, since middleware or the log sees every call.
    in_full: bool = True
    # The log or other observers receive the calls.
    reported: bool = False
    # The log receives the calls.
    logged: bool = False
    # An idempotency key from outside the message.
    key: str | None = None
    # Collects the ids of replayed answers, if the sender asked for them.
    replayed: list[Id] | None = None
    # Bytes that the results of a batch may still take; None for a single call.
    room: int | None = None
    # Stands for the method in the log record of a message that has none.
    refused: str = INVALID
    # Whether all anonymous calls come from one user. None: those of direct requests over the
    # loopback do.
    single_user: bool | None = False
    # Set if a tap is on, and the frame belongs to one message alone.
    mark: Mark | None = None

    def unique_sender(self) -> str | None:
        """Return a name that no other sender has; None if several senders may share every name."""
        sender = self.sender
        if sender.caller != ANONYMOUS:
            return f"caller {sender.caller}"
        is_user = self.single_user
        if is_user is None:
            is_user = sender.headers is not None and sender.headers.is_direct()
        if is_user:
            return USER
        return sender.link


class Running(Protocol):
    """The part of a command's run that a handler's context shows.

    `commands.run.Run` implements it. It is a protocol, since `server` is below `commands` and must
    not import it.
    """

    attempt: int
    fence: int
    db: object

    @property
    def ran(self) -> Literal["no", "unknown"]: ...
    @property
    def downstream_key(self) -> str: ...

    def commit_point(self) -> "Awaitable[None]": ...
    def enter(self) -> None: ...


class ClientInfo(Struct, frozen=True):
    """The calling program, in its own words: wirecall does not verify them."""

    name: str | None = None
    version: str | None = None
    # The settings of the client's extensions by id, as it declares them.
    extensions: dict[str, JsonObject] = {}

    def extension(self, id: str) -> JsonObject | None:
        """Return the client's settings of an MCP extension; None if it has not declared it."""
        return self.extensions.get(id)


class Remote(Protocol):
    """The MCP client behind a call.

    `mcp.server.peer.Peer` implements it. It is a protocol, since `server` is below `mcp.server` and
    must not import it.
    """

    # The state of the previous round; None in the first round.
    continues: str | None
    is_committed: bool
    # The params of the request, as received.
    raw: Raw | UnsetType

    def named(self, key: str) -> None: ...
    @property
    def revision(self) -> str: ...
    @property
    def transport(self) -> Literal["pipe", "tcp"]: ...
    @property
    def session_id(self) -> str | None: ...
    @property
    def uri(self) -> str | None: ...
    @property
    def capabilities(self) -> JsonObject: ...
    @property
    def client(self) -> ClientInfo: ...
    @property
    def meta(self) -> JsonObject: ...
    def progress(
        self, progress: float, total: float | None, message: str | None
    ) -> "Awaitable[None]": ...
    def wants(self, level: str) -> bool: ...
    def log(self, level: str, data: object, logger: str | None) -> "Awaitable[None]": ...
    def hang_up(self, retry: float) -> "Awaitable[None]": ...
    def hand_over(self) -> "Awaitable[None]": ...
    def elicit(self, message: str, schema: object, key: str | None) -> "Awaitable[Elicited]": ...
    def elicit_url(self, message: str, url: str, key: str | None) -> "Awaitable[Elicited]": ...
    def sample(
        self,
        messages: "str | Sequence[Message]",
        max_tokens: int,
        system: str | None,
        key: str | None,
        more: JsonObject,
    ) -> "Awaitable[Sampled]": ...
    def roots(self, key: str | None) -> "Awaitable[list[Root]]": ...
    def ask(self, questions: "Sequence[Awaitable[object]]") -> "Awaitable[list[Json]]": ...


class Detachable(Protocol):
    """A call that can become a task: from then on it continues without its request.

    `mcp.server.tasks.Work` implements it. It is a protocol, since `server` and `commands` are below
    `mcp.server` and must not import it.
    """

    # The call becomes a task before its handler starts.
    at_once: bool
    is_handed_over: bool

    async def found(self, record: "Record") -> None:
        """Raise `InputRequired` with the task if the record of another run is a task's."""
        ...

    async def begin(self, run: "Running") -> bool:
        """Called before the handler starts; return False if the run has to wait for a place."""
        ...

    async def pause(self) -> None:
        """Write the questions with which a leg ends, before its record waits for the answers."""
        ...

    async def settle(self) -> None:
        """Wait until it is known whether the call is a task.

        The ledger may be writing the task now.
        """
        ...

    async def end(self, error: BaseException | None) -> None:
        """Write how the task ended, before its record is released because nothing was done."""
        ...

    async def look(self) -> None:
        """Check whether the client has cancelled the task.

        Another process may have received its request.
        """
        ...


class Call(Struct, eq=False):
    """One call: its method and params, its caller, and its progress so far."""

    method: "Method"
    frame: Frame
    id: Id | UnsetType
    params: Raw | UnsetType
    # The ledger's name for the method.
    record: str
    # The position in a batch, from 0.
    position: int | None = None
    key: str | None = None
    # A command without a key, which gets a generated one when it is executed.
    keyless: bool = False
    # The fingerprint of the params, if admission has computed it together with the key.
    digest: bytes | None = None
    # The MCP client, if it made the call.
    peer: Remote | None = None
    # The state of the previous round of a call that is passed on. Its record must exist.
    follows: str | None = None
    # Set if the call can become a task.
    task: Detachable | None = None
    # Makes the call's result from the function's value, if they differ.
    shape: Shape | None = None
    # Values from middleware for the handler.
    values: JsonObject = {}
    # The value of the app's lifespan, if it has one.
    state: object = UNSET
    # The run of a command with a key.
    run: Running | None = None
    # Set for a command whose params fit.
    fingerprint: bytes | None = None
    # The middleware and the providers have let the call through.
    reached: bool = False
    result: object = None
    # The answer comes from the ledger.
    replayed: bool = False
    # The call repeats one whose answer was lost.
    recognised: bool = False
    # The ledger has the answer.
    recorded: bool = True
    started: float = msgspec.field(default_factory=clock)
    # The call id of the batch tool's call that this call is an entry of.
    batch: str | None = None
    # Values of earlier results are in its params.
    has_references: bool = False
    # When its function began and ended, by `clock`; 0 if it did not, or if no tap asks.
    entered: float = 0.0
    left: float = 0.0
    # The names of the call in logs, spans and the audit trail.
    _ids: Ids | None = None

    def begin(self) -> None:
        """Note that all providers have made their values, before the handler starts."""
        self.reached = True
        if self.run is not None:
            self.run.enter()

    @property
    def ids(self) -> Ids:
        """The ids of the call in logs, spans and the audit trail."""
        if self._ids is None:
            params = self.params
            if self.peer is not None:
                params = self.peer.raw
            self._ids = Ids(self.id, params, self.frame.sender.headers)
        return self._ids

    @property
    def correlation_id(self) -> CorrelationId:
        """The request's id, in every log record of the call.

        If it has none, it is one made for logs only (P8).
        """
        return self.ids.correlation_id


# --- whether a call has run -----------------------------------------------------------------------


def ran_if_interrupted(call: Call) -> Ran:
    """Return the `ran` of a call that was interrupted at an unknown point."""
    if call.run is not None:
        return call.run.ran
    if call.method.is_command:  # it has no record of its progress
        return "unknown"
    return "no"  # a query changes nothing


def with_true_ran(call: Call, raised: RpcError) -> RpcError:
    """Return the error that the caller gets: a copy if the call has not run as `raised` says."""
    if not call.reached:
        # Middleware or a provider refused the call, so it has not run, whatever the code of the
        # error says. An earlier run may have acted.
        ran: Ran = "no"
        if call.run is not None:
            ran = call.run.ran
        if raised.ran == ran:
            return raised
        return raised.with_ran(ran)
    if not call.method.is_command:
        return raised
    if raised.is_remote and raised.ran == "no" and call.run is None:
        # Another server, or a questioned client, reports the `ran` of its part. This command's is
        # unknown.
        return raised.with_ran("unknown")
    was_undone = call.run is not None and call.run.ran == "no"
    if _has_misleading_code(raised) and not was_undone:
        # Middleware raised it after the run, or the function of an unrecorded command did.
        return raised.with_ran("yes")
    return raised


def _has_misleading_code(error: RpcError) -> bool:
    """Return whether only the code of an error implies that the call did not run.

    The app has raised it. The protocol reserves such codes for refusals. wirecall's own refusals
    are instances of `FixedError`.
    """
    if isinstance(error, FixedError):
        return False
    return error.ran != "yes" and not error.states_ran


class InputRequired(BaseException):
    """A handler needs an answer from its caller.

    The call ends here and starts again with the answer. It is not an `Exception`, so that a
    handler's own `except Exception` does not catch it.
    """

    def __init__(self, interim: bytes) -> None:
        super().__init__("the call needs input from its caller")
        # The interim answer to the caller.
        self.interim = interim


class NoOp:
    """An awaitable that does nothing."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


# --- the end of a call ----------------------------------------------------------------------------

Word: TypeAlias = Literal["begun", "ok", "error", "cancelled", "input required", "undelivered"]


class CallEnded(Struct, frozen=True, kw_only=True):
    """One call that has ended, served or refused; or a command that is about to run ("begun")."""

    ids: Ids
    # The method, as in the ledger: a tool's is tools/call:NAME.
    method: str
    # None for an unknown method.
    kind: str | None = None
    # The position in a batch, from 0.
    position: int | None = None
    # The call id of the batch tool's call that this call was an entry of.
    batch: str | None = None
    caller: str = ""
    key: str | None = None
    # Set for a command whose params fit.
    fingerprint: bytes | None = None
    # The params of a call with references, with their values in them.
    filled: Raw | UnsetType = UNSET
    outcome: Word
    code: int | None = None
    # Why a message was refused.
    reason: str | None = None
    replayed: bool = False
    # The call came without a key, and repeats one whose answer was lost.
    recognised: bool = False
    duration_ms: float = 0.0
    # What the method was declared to do to the world; without a declaration, True.
    destructive: bool = False
    open_world: bool = False


Observer: TypeAlias = Callable[[CallEnded], None]


Gate: TypeAlias = Callable[[CallEnded], Awaitable[None]]


def _event(call: Call, outcome: Word, code: int | None = None) -> CallEnded:
    method = call.method
    filled: Raw | UnsetType = UNSET
    if call.has_references:
        filled = call.params
    return CallEnded(
        ids=call.ids,
        method=call.record,
        kind=method.kind.value,
        position=call.position,
        batch=call.batch,
        caller=call.frame.sender.caller,
        key=call.key,
        fingerprint=call.fingerprint,
        filled=filled,
        outcome=outcome,
        code=code,
        replayed=call.replayed,
        recognised=call.recognised,
        duration_ms=(time.perf_counter() - call.started) * 1000,
        destructive=method.is_command and method.destructive is not False,
        open_world=method.open_world is not False,
    )


class CallTap(Protocol):
    """Takes the calls that have ended as they are, without an event for each.

    `console.tap.Tap` implements it. It is a protocol, since `server` is below `console` and must
    not import it.
    """

    def ended(
        self, call: Call, outcome: Word, code: int | None, error: BaseException | None
    ) -> None: ...


class Events:
    """Reports every call to the observers of an app, to its tap, and to the log."""

    def __init__(
        self,
        observers: Sequence[Observer] = (),
        gate: "Gate | None" = None,
        tap: CallTap | None = None,
    ) -> None:
        self._observers = observers
        # Refuses a command before it runs.
        self.gate = gate
        self._tap = tap
        # Observers need the fingerprint of every command.
        self.has_observers = bool(observers)
        # Not only the log observes calls.
        self.observed = self.has_observers or tap is not None

    async def call_begins(self, call: Call) -> None:
        """Report a command that is about to run; the gate may refuse it."""
        assert self.gate is not None
        await self.gate(_event(call, "begun"))

    def call_ended(self, call: Call, error: BaseException | None = None) -> None:
        """Report a call that was admitted."""
        import asyncio  # late: `import wirecall` stays light

        outcome: Word = "ok"
        code = None
        if isinstance(error, InputRequired):
            outcome = "input required"
        elif isinstance(error, asyncio.CancelledError):
            outcome = "cancelled"
        elif isinstance(error, Gone):
            outcome = "undelivered"
        elif error is not None:
            outcome = "error"
            code = InternalError.CODE
            if isinstance(error, RpcError):
                code = error.code
        if self._tap is not None:
            self._tap.ended(call, outcome, code, error)
        if not call.frame.logged and not self._observers:
            return
        ended = _event(call, outcome, code)
        if call.frame.logged:
            log(ended)
        for observer in self._observers:
            observer(ended)


def log(ended: CallEnded) -> None:
    """Write the log record of a call."""
    from wirecall.logs import called  # late: `import wirecall` stays light

    outcome: str = ended.outcome
    if ended.replayed and outcome != "undelivered":
        outcome = "replayed"
    facts = ended.ids.facts()
    if ended.batch is not None:
        facts["batch"] = ended.batch
    called(
        **facts,
        method=ended.method,
        kind=ended.kind,
        position=ended.position,
        duration_ms=ended.duration_ms,
        outcome=outcome,
        code=ended.code,
        reason=ended.reason,
        caller=ended.caller or None,
        idempotency_key=ended.key,
    )


def log_refusal(
    ids: Ids,
    method: str,
    error: RpcError,
    *,
    kind: str | None = None,
    position: int | None = None,
    batch: str | None = None,
    caller: str = ANONYMOUS,
) -> None:
    """Write the log record of a message that was not admitted."""
    reason = error.message
    if isinstance(error.data, dict) and isinstance(error.data.get("reason"), str):
        reason = error.data["reason"]
    log(
        CallEnded(
            ids=ids,
            method=method[:100],
            kind=kind,
            position=position,
            batch=batch,
            caller=caller,
            outcome="error",
            code=error.code,
            reason=reason,
        )
    )


def shape_of(data: bytes) -> str:
    """Return the log's replacement for the method of an unreadable message."""
    if opens_array(data):
        return BATCH
    return INVALID
