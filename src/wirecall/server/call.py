"""One call on its way through the server: everything that the steps know of it and its handler does not see.

A `Context` shows a handler the part that is its business. The call refers to no context, and a run to no call: a cycle for
every call would keep the garbage collector busy.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import UNSET, Raw, UnsetType

from wirecall.protocol.messages import Id

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from wirecall.server.method import Method


class Frame:
    """What the calls of one message share."""

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
        self.alone = alone  # there is no event loop: nothing may wait
        self.in_full = in_full  # even a plain query takes all the steps, since middleware or the log sees every call
        self.logged = logged
        self.key = key  # an idempotency key that came beside the message
        self.room = room  # bytes that the results of a batch may still take; None for a single call
        self.replayed = replayed  # collects the ids of replayed answers, if the sender asked for them


class Running(Protocol):
    """The run of a command, as far as a handler's context shows it."""

    attempt: int
    fence: int
    db: Any

    @property
    def downstream_key(self) -> str: ...

    def commit_point(self) -> "Awaitable[None]": ...


class Call:
    """One call: what was asked, by whom, and how far it has come."""

    __slots__ = (
        "_correlation",
        "caller",
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
        peer: Any = None,
        shape: Callable[[Any], Any] | None = None,
    ) -> None:
        self.method = method
        self.frame = frame
        self.id = id
        self.params = params
        self.caller = frame.caller
        self.position = position  # in a batch, from 0
        self.key = key
        self.record = record or method.name  # the ledger's name for the method
        self.peer = peer  # the MCP client, if the call came that way
        self.shape = shape  # makes the call's result of the function's value, where that is not the value itself
        self.state: dict[str, Any] = {}  # for middleware and handlers
        self.run: Running | None = None  # of a command with a key
        self.fingerprint: bytes | None = None  # of a command's params
        self.reached = False  # the middleware has let the call through
        self.result: Any = None
        self.replayed = False  # the answer comes from the ledger
        self.recorded = True  # the ledger knows of the answer
        self.started = time.perf_counter()
        self._correlation: Any = None

    @property
    def correlation_id(self) -> Any:
        """The request's id, in every log record of the call; for a notification one is made, for logs only (P8)."""
        if self._correlation is None:
            self._correlation = correlation_of(self.id)
        return self._correlation


def correlation_of(id: Any) -> Any:
    """Return the id itself where it is plain, its text where only the bytes are exact, a made-up one for a notification."""
    if id is UNSET:
        import secrets  # late: `import wirecall` stays light

        return f"n-{secrets.token_hex(8)}"
    return bytes(id).decode() if isinstance(id, Raw) else id
