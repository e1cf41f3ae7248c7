"""One call on its way through the server: all that the steps know of it. A `Context` shows a handler a part of that.

The call does not refer to its context, nor a run to its call: a cycle for every call would keep the garbage collector busy.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

from msgspec import UNSET, Raw, UnsetType

from wirecall.protocol.messages import Id, Json, JsonObject

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from wirecall.mcp.types import Elicited, Message, Root, Sampled
    from wirecall.server.method import Method


CorrelationId: TypeAlias = int | str | float | None
Handler: TypeAlias = Callable[[], object]  # calls the function; returns its result, or an awaitable of it
Shape: TypeAlias = Callable[[Json], object]  # makes the result of a call from the value of its function


class Frame:
    """The facts that all calls of one message share."""

    __slots__ = ("alone", "caller", "in_full", "key", "logged", "replayed", "room")

    def __init__(
        self,
        caller: str,
        *,
        alone: bool = False,
        in_full: bool = True,
        logged: bool = False,
        key: str | None = None,
        replayed: list[Id] | None = None,
        room: int | None = None,
    ) -> None:
        self.caller = caller
        self.alone = alone  # without an event loop, so nothing may wait
        self.in_full = in_full  # even a plain query takes all the steps, since middleware or the log sees every call
        self.logged = logged
        self.key = key  # an idempotency key that came beside the message
        self.room = room  # bytes that the results of a batch may still take; None for a single call
        self.replayed = replayed  # collects the ids of replayed answers, if the sender asked for them


class Running(Protocol):
    """The run of a command, as far as a handler's context shows it."""

    attempt: int
    fence: int
    db: object

    @property
    def downstream_key(self) -> str: ...

    def commit_point(self) -> "Awaitable[None]": ...


class Remote(Protocol):
    """The MCP client behind a call."""

    continues: str | None  # the state of the round before; None in the first round
    is_committed: bool

    @property
    def revision(self) -> str: ...
    @property
    def capabilities(self) -> JsonObject: ...
    @property
    def meta(self) -> JsonObject: ...
    def progress(self, progress: float, total: float | None, message: str | None) -> "Awaitable[None]": ...
    def log(self, level: str, data: object, logger: str | None) -> "Awaitable[None]": ...
    def hang_up(self, retry: float) -> "Awaitable[None]": ...
    def elicit(self, message: str, schema: object, key: str | None) -> "Awaitable[Elicited]": ...
    def elicit_url(self, message: str, url: str, key: str | None) -> "Awaitable[Elicited]": ...
    def sample(
        self, messages: "str | Sequence[Message]", max_tokens: int, system: str | None, key: str | None, more: JsonObject
    ) -> "Awaitable[Sampled]": ...
    def roots(self, key: str | None) -> "Awaitable[list[Root]]": ...
    def ask(self, questions: "Sequence[Awaitable[object]]") -> "Awaitable[list[Json]]": ...


class Call:
    """One call: its method and params, its caller, and its progress so far."""

    __slots__ = (
        "_correlation",
        "caller",
        "canonical",
        "fingerprint",
        "frame",
        "id",
        "key",
        "method",
        "params",
        "peer",
        "position",
        "reached",
        "record",
        "recorded",
        "replayed",
        "result",
        "run",
        "shape",
        "started",
        "state",
    )

    def __init__(
        self,
        method: "Method",
        frame: Frame,
        *,
        id: Id | UnsetType,
        params: Raw | UnsetType,
        position: int | None = None,
        key: str | None = None,
        record: str | None = None,
        canonical: bytes | None = None,
        peer: Remote | None = None,
        shape: Shape | None = None,
    ) -> None:
        self.method = method
        self.frame = frame
        self.id = id
        self.params = params
        self.caller = frame.caller
        self.position = position  # in a batch, from 0
        self.key = key
        self.canonical = canonical  # the params as the fingerprint takes them, where the key was found among them
        self.record = record or method.name  # the ledger's name for the method
        self.peer = peer  # the MCP client, if the call came that way
        self.shape = shape  # makes the call's result of the function's value, where that is not the value itself
        self.state: dict[str, Json] = {}  # for middleware and handlers
        self.run: Running | None = None  # of a command with a key
        self.fingerprint: bytes | None = None  # of a command's params
        self.reached = False  # the middleware has let the call through
        self.result: object = None
        self.replayed = False  # the answer comes from the ledger
        self.recorded = True  # the ledger knows of the answer
        self.started = time.perf_counter()
        self._correlation: CorrelationId | None = None

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
