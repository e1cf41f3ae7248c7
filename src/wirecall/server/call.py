"""One call on its way through the server: `Call` is all that the steps know of it, `Context` the part that a handler sees.

1. A call does not refer to its context, nor a run to its call: a cycle for every call would keep the garbage collector busy.
2. A context works the same in every call: without a command or an MCP client its members have plain defaults, and it sends
   nothing (`Passed`). A member that cannot work at all raises an error that says why.
3. Observers of calls get one `CallEnded` per call, when its work is over: the log is one, the audit trail another. A command
   that goes on after its caller has left ends when its handler does, and is reported then. A command without a key whose
   answer did not reach its caller is reported once more, as undelivered.
"""

import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import Gone, InternalError, NotCapable, RpcError, UsageError
from wirecall.protocol.messages import Id, Json, JsonObject, Sending
from wirecall.server.identity import Identity

if TYPE_CHECKING:
    from wirecall.ledger.base import Record
    from wirecall.mcp.types import Elicited, Level, Message, Root, Sampled
    from wirecall.server.method import Method

ANONYMOUS = ""  # the name of a caller that has none
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})

CorrelationId: TypeAlias = int | str | float | None
Handler: TypeAlias = Callable[[], object]  # calls the function; returns its result, or an awaitable of it
Shape: TypeAlias = Callable[[Json], object]  # makes the result of a call from the value of its function


class HttpHeader(Protocol):
    """The header of an HTTP request."""

    def shown(self) -> Mapping[str, str]:
        """Return the fields that a handler may see."""
        ...


class Frame(Struct, eq=False):
    """The facts that all calls of one message share."""

    caller: str
    alone: bool = False  # without an event loop, so nothing may wait
    in_full: bool = True  # even a plain query takes all the steps, since middleware or the log sees every call
    reported: bool = False  # to the log, or to other observers
    logged: bool = False
    key: str | None = None  # an idempotency key that came beside the message
    replayed: list[Id] | None = None  # collects the ids of replayed answers, if the sender asked for them
    room: int | None = None  # bytes that the results of a batch may still take; None for a single call
    peer: str | None = None  # names an anonymous sender that is the only one of its kind, such as a session or a pipe
    sending: Sending | None = None  # the way of the answers, where a transport watches it
    identity: Identity | None = None  # of the sender, where a token named it
    headers: HttpHeader | None = None  # of the HTTP request that the message came with


class Running(Protocol):
    """The run of a command, as far as a handler's context shows it."""

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
    """The program that calls, in its own words: wirecall does not verify them."""

    name: str | None = None
    version: str | None = None
    extensions: dict[str, JsonObject] = {}  # settings by id, as the client declares them

    def extension(self, id: str) -> JsonObject | None:
        """Return the client's settings of an MCP extension, `{}` if it has none; None if it has not declared it."""
        return self.extensions.get(id)


class Remote(Protocol):
    """The MCP client behind a call."""

    continues: str | None  # the state of the round before; None in the first round
    is_committed: bool

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
    def progress(self, progress: float, total: float | None, message: str | None) -> "Awaitable[None]": ...
    def wants(self, level: str) -> bool: ...
    def log(self, level: str, data: object, logger: str | None) -> "Awaitable[None]": ...
    def hang_up(self, retry: float) -> "Awaitable[None]": ...
    def hand_over(self) -> "Awaitable[None]": ...
    def elicit(self, message: str, schema: object, key: str | None) -> "Awaitable[Elicited]": ...
    def elicit_url(self, message: str, url: str, key: str | None) -> "Awaitable[Elicited]": ...
    def sample(
        self, messages: "str | Sequence[Message]", max_tokens: int, system: str | None, key: str | None, more: JsonObject
    ) -> "Awaitable[Sampled]": ...
    def roots(self, key: str | None) -> "Awaitable[list[Root]]": ...
    def ask(self, questions: "Sequence[Awaitable[object]]") -> "Awaitable[list[Json]]": ...


class Detachable(Protocol):
    """A call that can become a task: from then on it goes on without its request."""

    at_once: bool  # it becomes one before its handler starts
    is_handed_over: bool

    async def found(self, record: "Record") -> None:
        """Raise `InputRequired` with the answer if the record of another run is a task's: the call gets that task."""
        ...

    async def begin(self, run: "Running") -> bool:
        """Called before the handler starts; return False if the run has to wait for a place."""
        ...

    async def pause(self) -> None:
        """Write the questions with which a leg ends, before its record waits for the answers."""
        ...

    async def settle(self) -> None:
        """Wait until it is known whether the call is a task: the ledger may be making one of it in this moment."""
        ...

    async def end(self, error: BaseException | None) -> None:
        """Write how the task ended, before its record is given back because nothing was done."""
        ...

    async def look(self) -> None:
        """Look whether the client has cancelled the task: another process may have taken its request."""
        ...


class Call(Struct, eq=False):
    """One call: its method and params, its caller, and its progress so far."""

    method: "Method"
    frame: Frame
    id: Id | UnsetType
    params: Raw | UnsetType
    record: str  # the ledger's name for the method
    position: int | None = None  # in a batch, from 0
    key: str | None = None
    keyless: bool = False  # a command without a key, which gets a generated one when it is executed
    identity: bytes | None = None  # the fingerprint of the params, where the key was found among them
    peer: Remote | None = None  # the MCP client, if the call came that way
    task: Detachable | None = None  # where the call can become a task
    shape: Shape | None = None  # makes the call's result of the function's value, where that is not the value itself
    values: JsonObject = {}  # that middleware leaves for the handler
    state: object = UNSET  # of the app's lifespan, if it has one
    run: Running | None = None  # of a command with a key
    fingerprint: bytes | None = None  # of a command whose params fit
    reached: bool = False  # the middleware and the providers have let the call through
    result: object = None
    replayed: bool = False  # the answer comes from the ledger
    recognised: bool = False  # the call repeats one whose answer was lost
    recorded: bool = True  # the ledger knows of the answer
    started: float = msgspec.field(default_factory=time.perf_counter)
    _correlation: CorrelationId = None

    def begin(self) -> None:
        """Called when the values of all providers are made, before the handler starts."""
        self.reached = True
        if self.run is not None:
            self.run.enter()

    @property
    def correlation_id(self) -> CorrelationId:
        """The request's id, in every log record of the call; for a notification one is made, for logs only (P8)."""
        if self._correlation is None:
            self._correlation = correlation_of(self.id)
        return self._correlation


def correlation_of(id: Id | UnsetType) -> CorrelationId:
    """Return the id itself where it is plain, its text where only the bytes are exact, a made-up one for a notification."""
    if id is UNSET:
        import secrets  # late: `import wirecall` stays light

        return f"n-{secrets.token_hex(8)}"
    return bytes(id).decode() if isinstance(id, Raw) else id


class Context:
    """The call, as its handler and the middleware see it."""

    __slots__ = ("_call", "caller", "id", "kind", "method", "params", "position", "record")

    def __init__(self, call: Call) -> None:
        self._call = call
        self.method = call.method.name
        self.record = call.record  # the ledger's name for the method
        self.kind = call.method.kind
        self.id = call.id
        self.params = call.params
        self.caller = call.frame.caller
        self.position = call.position

    @property
    def identity(self) -> Identity | None:
        """The sender as its token describes it: subject, client, issuer, scopes, claims; None without `App(auth=...)`."""
        return self._call.frame.identity

    @property
    def headers(self) -> Mapping[str, str]:
        """The HTTP headers of the request, without those that carry credentials; empty where the call has no request.

        Names are in lower case, and a lookup takes them in any case. A task has none, since it outlives its request.
        """
        headers = self._call.frame.headers
        return _NO_HEADERS if headers is None else headers.shown()

    @property
    def idempotency_key(self) -> str | None:
        """The key of a command: its caller's, or a generated one; None for a command that runs without a record."""
        return self._call.key

    @property
    def is_notification(self) -> bool:
        return self._call.id is UNSET

    @property
    def correlation_id(self) -> CorrelationId:
        """The request's id, as in every log record of the call; a notification gets a made-up one, for logs only (P8)."""
        return self._call.correlation_id

    @property
    def replayed(self) -> bool:
        """Whether the answer comes from the ledger."""
        return self._call.replayed

    @property
    def recorded(self) -> bool:
        """Whether the ledger knows of the answer."""
        return self._call.recorded

    @property
    def state(self) -> Any:
        """The value that the app's lifespan yields, the same in every call. Without a lifespan it is `values`."""
        return self._call.values if self._call.state is UNSET else self._call.state

    @property
    def values(self) -> dict[str, Json]:
        """Values of this call, which middleware leaves for the handler."""
        return self._call.values

    @property
    def meta(self) -> JsonObject:
        """The `_meta` object beside the params, or an empty one."""
        if self._call.peer is not None:
            return self._call.peer.meta
        try:
            meta = UNSET if self.params is UNSET else _decode_meta(self.params).meta
        except msgspec.ValidationError:  # params by position, or `_meta` that is not an object
            return {}
        return {} if meta is UNSET else meta

    @property
    def traceparent(self) -> str | None:
        """The W3C trace context the caller sent as `_meta.traceparent` (P11)."""
        value = self.meta.get("traceparent")
        return value if isinstance(value, str) else None

    @property
    def attempt(self) -> int:
        """The number of this run of the command, counted from 1."""
        return self._call.run.attempt if self._call.run else 1

    @property
    def fence(self) -> int:
        """A number that grows with every run of this command, for conditional writes in the handler's own tables."""
        return self._call.run.fence if self._call.run else 0

    @property
    def downstream_key(self) -> str | None:
        """A key for calls to other services: the same on every attempt of this command, and different for any other."""
        return self._call.run.downstream_key if self._call.run else None

    @property
    def db(self) -> Any:
        """The open transaction of a `transactional` command."""
        if self._call.run is None or self._call.run.db is None:
            raise UsageError(
                "ctx.db exists in transactional commands only.",
                "the record and the handler's writes share one transaction",
                'declare the command with on_crash="transactional", and use a ledger that has transactions',
            )
        return self._call.run.db

    def commit_point(self) -> Awaitable[None]:
        """Mark the first effect that cannot be repeated. Until here a crash, cancel or timeout means: nothing done.

        A coroutine function awaits it. In a plain function it blocks, which is why such a command runs in a thread.
        """
        if self._call.peer is not None:
            self._call.peer.is_committed = True
        return self._call.run.commit_point() if self._call.run else Passed()

    # --- messages and questions to an MCP client ---------------------------------------------------------------------

    @property
    def revision(self) -> str | None:
        """The revision of MCP that the caller speaks; None for plain JSON-RPC."""
        return self._call.peer.revision if self._call.peer else None

    @property
    def client(self) -> ClientInfo:
        """The client's name and version, and its extensions: `ctx.client.extension("com.example/loyalty")`."""
        return self._call.peer.client if self._call.peer else ClientInfo()

    @property
    def client_capabilities(self) -> JsonObject:
        """The capabilities that the client has declared, `{}` for plain JSON-RPC."""
        return self._call.peer.capabilities if self._call.peer else {}

    def progress(self, progress: float, total: float | None = None, message: str | None = None) -> Awaitable[None]:
        """Send the progress of the call, if its caller asked for it. The number must grow."""
        return self._call.peer.progress(progress, total, message) if self._call.peer else Passed()

    def log(self, level: "Level", data: object, logger: str | None = None) -> Awaitable[None]:
        """Send a log message to the client if it wants to see this level, else to the server's log."""
        from wirecall.logs import SEVERITIES, noted  # late: `import wirecall` stays light

        if level not in SEVERITIES:
            raise UsageError(f"{level!r} is not a log level.", "", f"use one of {', '.join(SEVERITIES)}")
        peer = self._call.peer
        if peer is not None and peer.wants(level):
            return peer.log(level, data, logger)
        noted(level, data, logger, method=self.record, correlation_id=self.correlation_id, caller=self.caller or None)
        return Passed()

    def elicit(self, message: str, schema: object, *, key: str | None = None) -> "Awaitable[Elicited]":
        """Ask the person at the client with a form.

        `schema` is a flat type (Struct, dataclass, TypedDict, pydantic model, or a single `bool`, `Literal`, ...), and the
        answer's content is one; or it is the JSON Schema of a flat object. Answers that do not fit are refused.

        At 2026-07-28 the client asks and then calls again: the function starts from the top, with the answer at hand. So
        it must not have an effect before the last question. `key` names the question; by default questions are numbered.
        """
        return self._asked().elicit(message, schema, key)

    def elicit_url(self, message: str, url: str, *, key: str | None = None) -> "Awaitable[Elicited]":
        """Ask the person at the client to open a page, from 2025-11-25 on."""
        return self._asked().elicit_url(message, url, key)

    def sample(
        self,
        messages: "str | Sequence[Message]",
        *,
        max_tokens: int = 1000,
        system: str | None = None,
        key: str | None = None,
        **more: Json,
    ) -> "Awaitable[Sampled]":
        """Ask the client's model. Further members of the request are passed on unchanged: `temperature=0.2`."""
        return self._asked().sample(messages, max_tokens, system, key, more)

    def roots(self, *, key: str | None = None) -> "Awaitable[list[Root]]":
        """Ask the client for its roots: the places of its file system that it shows."""
        return self._asked().roots(key)

    def ask(self, *questions: Awaitable[object]) -> Awaitable[list[Json]]:
        """Ask several of the above at once: `name, places = await ctx.ask(ctx.elicit(...), ctx.roots())`."""
        return self._asked().ask(questions)

    def hang_up(self, retry: float) -> Awaitable[None]:
        """End the HTTP connection and go on: the client collects the answer after `retry` seconds (2025-11-25)."""
        return self._call.peer.hang_up(retry) if self._call.peer else Passed()

    def hand_over(self) -> Awaitable[None]:
        """Answer the request with a task here, and go on as that task; for clients without tasks, just go on.

        A function declared with `task=` that does not name `hand_over` becomes a task before it starts.
        """
        return self._call.peer.hand_over() if self._call.peer else Passed()

    def _asked(self) -> Remote:
        if self._call.peer is None:
            raise NotCapable("the call came over plain JSON-RPC, where a client cannot be asked", ran="no")
        return self._call.peer


call_of: Callable[[Context], Call] = attrgetter("_call")  # the call behind a context, for the steps of the server

Next: TypeAlias = Callable[[Context], Awaitable[Any]]  # the rest of the steps, as a layer of middleware sees them
Middleware: TypeAlias = Callable[[Context, Next], Awaitable[Any]]


class InputRequired(BaseException):
    """A handler cannot go on before its caller has answered: the call ends here and begins anew with the answer.

    It is not an `Exception`, so that a handler's own `except Exception` does not catch it.
    """

    def __init__(self, interim: bytes) -> None:
        super().__init__("the call needs input from its caller")
        self.interim = interim  # the answer to the caller meanwhile


class Passed:
    """An awaitable that does nothing."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


class _Meta(Struct):
    meta: JsonObject | UnsetType = msgspec.field(default=UNSET, name="_meta")


_decode_meta = msgspec.json.Decoder(_Meta).decode


# --- the end of a call -----------------------------------------------------------------------------------------------

Word: TypeAlias = Literal["ok", "error", "cancelled", "input required", "undelivered"]


class CallEnded(Struct, frozen=True, kw_only=True):
    """One call that has ended, served or refused."""

    correlation_id: CorrelationId
    method: str  # as in the ledger: a tool's is tools/call:NAME
    kind: str | None = None  # None for an unknown method
    position: int | None = None  # in a batch, from 0
    caller: str = ""
    key: str | None = None
    fingerprint: bytes | None = None  # of a command whose params fit
    outcome: Word
    code: int | None = None
    replayed: bool = False
    recognised: bool = False  # the call came without a key, and repeats one whose answer was lost
    duration_ms: float = 0.0


Observer: TypeAlias = Callable[[CallEnded], None]


class Events:
    """Reports every call to the observers of an app, and to the log."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = observers
        self.observed = bool(observers)  # by more than the log

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
            outcome, code = "error", error.code if isinstance(error, RpcError) else InternalError.CODE
        ended = CallEnded(
            correlation_id=call.correlation_id,
            method=call.record,
            kind=call.method.kind.value,
            position=call.position,
            caller=call.frame.caller,
            key=call.key,
            fingerprint=call.fingerprint,
            outcome=outcome,
            code=code,
            replayed=call.replayed,
            recognised=call.recognised,
            duration_ms=(time.perf_counter() - call.started) * 1000,
        )
        if call.frame.logged:
            log(ended)
        for observer in self._observers:
            observer(ended)


def log(ended: CallEnded) -> None:
    """Write the log record of a call."""
    from wirecall.logs import called  # late: `import wirecall` stays light

    called(
        correlation_id=ended.correlation_id,
        method=ended.method,
        kind=ended.kind,
        position=ended.position,
        duration_ms=ended.duration_ms,
        outcome="replayed" if ended.replayed and ended.outcome != "undelivered" else ended.outcome,
        code=ended.code,
        caller=ended.caller or None,
        idempotency_key=ended.key,
    )
