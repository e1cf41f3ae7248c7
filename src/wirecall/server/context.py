"""The context of a call: what a handler, or a middleware, may know about it, and what it may tell and ask its caller.

1. It works the same in every call: where there is no command or no MCP client, what they would give is a plain default, and
   what they would be told (`Passed`) goes nowhere. What cannot be had at all is an error that says why.
2. It knows of the layers above only what they put into it: `commands` a command, MCP a peer.
"""

from collections.abc import Awaitable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import NotCapable, UsageError
from wirecall.protocol.messages import Id

if TYPE_CHECKING:
    from wirecall.mcp.types import Elicited, Level, Message, Root, Sampled
    from wirecall.server.method import Method


class Context:
    """What a handler, or a middleware, may know about the call it serves."""

    __slots__ = (
        "_command",
        "_correlation",
        "_frame",
        "_method",
        "_peer",
        "_reached",
        "_result",
        "_shape",
        "caller",
        "id",
        "idempotency_key",
        "kind",
        "method",
        "params",
        "position",
        "record",
        "recorded",
        "replayed",
        "state",
    )

    def __init__(
        self,
        method: "Method",
        *,
        id: Id | UnsetType,
        params: Raw | UnsetType,
        caller: str,
        position: int | None,
        idempotency_key: str | None,
        record: str | None = None,
    ) -> None:
        self._method = method
        self.method = method.name
        self.record = record or method.name  # the ledger's name for the method
        self.kind = method.kind
        self.id = id
        self.params = params
        self.caller = caller
        self.position = position
        self.idempotency_key = idempotency_key
        self.replayed = False  # the answer comes from the ledger
        self.recorded = True  # the ledger knows of the answer
        self.state: dict[str, Any] = {}
        self._correlation: Any = None
        self._command: Any = None
        self._frame: Any = None
        self._reached = False  # the middleware has let the call through
        self._result: Any = None
        self._peer: Any = None  # the MCP side of the call, if it came that way
        self._shape: Any = None  # what makes the function's value the call's result, if that is not the value itself

    @property
    def is_notification(self) -> bool:
        return self.id is UNSET

    @property
    def correlation_id(self) -> Any:
        """The request's id, in every log record of the call; for a notification one is made, for logs only (P8)."""
        if self._correlation is None:
            self._correlation = correlation_of(self.id)
        return self._correlation

    @property
    def meta(self) -> dict[str, Any]:
        """The `_meta` object beside the params, or an empty one."""
        if self._peer is not None:
            told: dict[str, Any] = self._peer.meta
            return told
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
        """Which run of this command this is, counted from 1."""
        return self._command.attempt if self._command else 1

    @property
    def fence(self) -> int:
        """A number that grows with every run of this command, for conditional writes in the handler's own tables."""
        return self._command.fence if self._command else 0

    @property
    def downstream_key(self) -> str | None:
        """A key for calls to other services: the same on every attempt of this command, and different for any other."""
        return self._command.downstream_key if self._command else None

    @property
    def db(self) -> Any:
        """The open transaction of a `transactional` command."""
        if self._command is None or self._command.db is None:
            raise UsageError(
                "ctx.db is there for transactional commands only.",
                "the record and the handler's writes share one transaction",
                'declare the command with on_crash="transactional", and use a ledger that has transactions',
            )
        return self._command.db

    def commit_point(self) -> Awaitable[None]:
        """Mark the first effect that cannot be repeated. Until here a crash, cancel or timeout means: nothing done.

        A coroutine function awaits it. In a plain function it blocks, which is why such a command runs in a thread.
        """
        passed: Awaitable[None] = self._command.commit_point() if self._command else Passed()
        return passed

    # --- what an MCP client can be told and asked --------------------------------------------------------------------

    @property
    def revision(self) -> str | None:
        """The revision of MCP that the caller speaks; None for plain JSON-RPC."""
        return self._peer.revision if self._peer else None

    @property
    def client_capabilities(self) -> dict[str, Any]:
        """What the client has declared that it can do, `{}` for plain JSON-RPC."""
        return self._peer.capabilities if self._peer else {}

    def progress(self, progress: float, total: float | None = None, message: str | None = None) -> Awaitable[None]:
        """Tell how far the call has come, if its caller wants to know. The number must grow."""
        told: Awaitable[None] = self._peer.progress(progress, total, message) if self._peer else Passed()
        return told

    def log(self, level: "Level", data: Any, logger: str | None = None) -> Awaitable[None]:
        """Send a log message to the client, if it wants to see this level."""
        told: Awaitable[None] = self._peer.log(level, data, logger) if self._peer else Passed()
        return told

    def elicit(self, message: str, schema: Any, *, key: str | None = None) -> "Awaitable[Elicited]":
        """Ask the person at the client. `schema` is a JSON Schema of a flat object, or a Struct to decode the answer to.

        At 2026-07-28 the client asks and then calls again: the function starts from the top, with the answer at hand. So
        nothing may be done before the last question. `key` names the question; by default questions are numbered.
        """
        asked: Awaitable[Elicited] = self._asked().elicit(message, schema, key)
        return asked

    def elicit_url(self, message: str, url: str, *, key: str | None = None) -> "Awaitable[Elicited]":
        """Ask the person at the client to open a page, from 2025-11-25 on."""
        asked: Awaitable[Elicited] = self._asked().elicit_url(message, url, key)
        return asked

    def sample(
        self,
        messages: "str | Sequence[Message]",
        *,
        max_tokens: int = 1000,
        system: str | None = None,
        key: str | None = None,
        **more: Any,
    ) -> "Awaitable[Sampled]":
        """Ask the client's model. Further members of the request are given as they stand: `temperature=0.2`."""
        asked: Awaitable[Sampled] = self._asked().sample(messages, max_tokens, system, key, more)
        return asked

    def roots(self, *, key: str | None = None) -> "Awaitable[list[Root]]":
        """The places of its file system that the client shows."""
        asked: Awaitable[list[Root]] = self._asked().roots(key)
        return asked

    def ask(self, *questions: Awaitable[Any]) -> Awaitable[list[Any]]:
        """Several of the above at once: `name, places = await ctx.ask(ctx.elicit(...), ctx.roots())`."""
        answers: Awaitable[list[Any]] = self._asked().ask(questions)
        return answers

    def hang_up(self, retry: float) -> Awaitable[None]:
        """End the HTTP connection and go on: the client collects the answer after `retry` seconds (2025-11-25)."""
        done: Awaitable[None] = self._peer.hang_up(retry) if self._peer else Passed()
        return done

    def _asked(self) -> Any:
        if self._peer is None:
            raise NotCapable("the call came over plain JSON-RPC, where a client cannot be asked", ran="no")
        return self._peer


def correlation_of(id: Any) -> Any:
    """The id itself where it is plain, its text where only the bytes are exact, a made-up one for a notification."""
    if id is UNSET:
        import secrets  # late: `import wirecall` stays light

        return f"n-{secrets.token_hex(8)}"
    return bytes(id).decode() if isinstance(id, Raw) else id


class InputRequired(BaseException):
    """A handler cannot go on before its caller has answered: the call ends here and begins anew with the answer.

    No `Exception`, so that a handler's own `except Exception` lets it pass.
    """

    def __init__(self, interim: bytes) -> None:
        super().__init__("the call needs input from its caller")
        self.interim = interim  # what the caller is answered meanwhile


class Passed:
    """Awaited or not, it does nothing."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


class _Meta(Struct):
    meta: dict[str, Any] | UnsetType = msgspec.field(default=UNSET, name="_meta")


_decode_meta = msgspec.json.Decoder(_Meta).decode
