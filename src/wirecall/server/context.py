"""The context of a call: what a handler, or a middleware, may know about it, and what it may tell and ask its caller.

It works the same in every call: without a command or an MCP client its members have plain defaults, and what it would send
goes nowhere (`Passed`). A member that cannot work at all raises an error that says why.
"""

from collections.abc import Awaitable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from wirecall.errors import NotCapable, UsageError
from wirecall.server.call import Call

if TYPE_CHECKING:
    from wirecall.mcp.types import Elicited, Level, Message, Root, Sampled


class Context:
    """What a handler, or a middleware, may know about the call it serves."""

    __slots__ = ("_call", "caller", "id", "idempotency_key", "kind", "method", "params", "position", "record")

    def __init__(self, call: Call) -> None:
        self._call = call
        self.method = call.method.name
        self.record = call.record  # the ledger's name for the method
        self.kind = call.method.kind
        self.id = call.id
        self.params = call.params
        self.caller = call.caller
        self.position = call.position
        self.idempotency_key = call.key

    @property
    def is_notification(self) -> bool:
        return self._call.id is UNSET

    @property
    def correlation_id(self) -> Any:
        """The request's id, in every log record of the call; for a notification one is made, for logs only (P8)."""
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
    def state(self) -> dict[str, Any]:
        """A place for middleware to leave values for the handler."""
        return self._call.state

    @property
    def meta(self) -> dict[str, Any]:
        """The `_meta` object beside the params, or an empty one."""
        if self._call.peer is not None:
            told: dict[str, Any] = self._call.peer.meta
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
                "ctx.db is there for transactional commands only.",
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
        passed: Awaitable[None] = self._call.run.commit_point() if self._call.run else Passed()
        return passed

    # --- what an MCP client can be told and asked --------------------------------------------------------------------

    @property
    def revision(self) -> str | None:
        """The revision of MCP that the caller speaks; None for plain JSON-RPC."""
        return self._call.peer.revision if self._call.peer else None

    @property
    def client_capabilities(self) -> dict[str, Any]:
        """What the client has declared that it can do, `{}` for plain JSON-RPC."""
        return self._call.peer.capabilities if self._call.peer else {}

    def progress(self, progress: float, total: float | None = None, message: str | None = None) -> Awaitable[None]:
        """Tell how far the call has come, if its caller wants to know. The number must grow."""
        told: Awaitable[None] = self._call.peer.progress(progress, total, message) if self._call.peer else Passed()
        return told

    def log(self, level: "Level", data: Any, logger: str | None = None) -> Awaitable[None]:
        """Send a log message to the client, if it wants to see this level."""
        told: Awaitable[None] = self._call.peer.log(level, data, logger) if self._call.peer else Passed()
        return told

    def elicit(self, message: str, schema: Any, *, key: str | None = None) -> "Awaitable[Elicited]":
        """Ask the person at the client with a form.

        `schema` is a flat type (Struct, dataclass, TypedDict, pydantic model, or a single `bool`, `Literal`, ...), and the
        answer's content is one; or it is the JSON Schema of a flat object. Answers that do not fit are refused.

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
        done: Awaitable[None] = self._call.peer.hang_up(retry) if self._call.peer else Passed()
        return done

    def _asked(self) -> Any:
        if self._call.peer is None:
            raise NotCapable("the call came over plain JSON-RPC, where a client cannot be asked", ran="no")
        return self._call.peer


def call_of(context: Context) -> Call:
    """Return the call behind a context, for the steps of the server."""
    return context._call


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
