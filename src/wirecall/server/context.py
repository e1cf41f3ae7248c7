"""The call as its handler and the middleware see it.

A context works the same in every call. Without a command or an MCP client its members have plain
defaults, and it sends nothing (`NoOp`). A member that cannot work at all raises an error that says
why.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, overload

from msgspec import UNSET

from wirecall.errors import NotCapable, UsageError
from wirecall.protocol.messages import Json, JsonObject, notification
from wirecall.server.call import Call, ClientInfo, NoOp, Remote, ran_if_interrupted
from wirecall.server.identity import Identity
from wirecall.server.ids import CorrelationId

if TYPE_CHECKING:
    from wirecall.mcp.types import Elicited, Level, Message, Root, Sampled

_NO_HEADERS: Mapping[str, str] = MappingProxyType({})

T = TypeVar("T")


class Context:
    """The call, as its handler and the middleware see it.

    A handler gets it if it has a parameter with this annotation. Middleware gets it as its first
    argument.

    >>> app = App("shop")
    >>> @app.query
    ... def whoami(ctx: Context) -> list[str]:
    ...     return [ctx.method, ctx.kind.value, ctx.caller]
    >>> app.handle_sync(b'{"jsonrpc":"2.0","method":"whoami","id":1}')
    b'{"jsonrpc":"2.0","result":["whoami","query",""],"id":1}'
    """

    __slots__ = ("_call", "caller", "id", "kind", "method", "params", "position", "record")

    def __init__(self, call: Call) -> None:
        self._call = call
        self.method = call.method.name
        self.record = call.record  # the ledger's name for the method
        self.kind = call.method.kind
        self.id = call.id
        self.params = call.params
        self.caller = call.frame.sender.caller
        self.position = call.position

    @property
    def identity(self) -> Identity | None:
        """The sender as its token describes it; None without `App(auth=...)`.

        It has a subject, a client, an issuer, scopes and claims.
        """
        return self._call.frame.sender.identity

    @property
    def headers(self) -> Mapping[str, str]:
        """The HTTP headers of the request, without those that carry credentials.

        They are empty without a request. Names are in lower case, and a lookup takes them in any
        case. A task has none, since it outlives its request.
        """
        headers = self._call.frame.sender.headers
        if headers is None:
            return _NO_HEADERS
        return headers.shown()

    @property
    def idempotency_key(self) -> str | None:
        """The key of a command: its caller's, or a generated one.

        None for a command that runs without a record.
        """
        return self._call.key

    @property
    def is_notification(self) -> bool:
        """Whether the message has no id, so it gets no answer."""
        return self._call.id is UNSET

    @property
    def correlation_id(self) -> CorrelationId:
        """The request's id, as in every log record of the call.

        A notification gets a made-up one, for logs only (P8).
        """
        return self._call.correlation_id

    @property
    def call_id(self) -> str:
        """A unique name for this call, as in its log records, its span and its audit entry."""
        return self._call.ids.call_id

    @property
    def trace_id(self) -> str | None:
        """The id of the trace that the call belongs to; None if there is none."""
        return self._call.ids.trace_id

    @property
    def request_id(self) -> str | None:
        """The X-Request-Id of the HTTP request; None without one in printable ASCII."""
        return self._call.ids.request_id

    @property
    def replayed(self) -> bool:
        """Whether the answer comes from the ledger."""
        return self._call.replayed

    @property
    def recorded(self) -> bool:
        """Whether the ledger has the answer."""
        return self._call.recorded

    @property
    def state(self) -> Any:
        """The value that the app's lifespan yields, the same in every call.

        Without a lifespan it is `values`.
        """
        if self._call.state is UNSET:
            return self._call.values
        return self._call.state

    @property
    def values(self) -> dict[str, Json]:
        """Values of this call that middleware sets for the handler."""
        return self._call.values

    @property
    def meta(self) -> JsonObject:
        """The `_meta` object beside the params, or an empty one."""
        if self._call.peer is None:
            return self._call.ids.meta
        return self._call.peer.meta

    @property
    def traceparent(self) -> str | None:
        """The W3C trace context that the caller sent (P11).

        It is `_meta.traceparent`, or a field of its HTTP request.
        """
        return self._call.ids.traceparent

    @property
    def attempt(self) -> int:
        """The number of this run of the command, counted from 1."""
        if self._call.run is None:
            return 1
        return self._call.run.attempt

    @property
    def fence(self) -> int:
        """A number that grows with every run of this command.

        It is for conditional writes in the handler's own tables.
        """
        if self._call.run is None:
            return 0
        return self._call.run.fence

    @property
    def downstream_key(self) -> str | None:
        """A key for calls to other services.

        It is the same on every attempt of this command, and different for any other.
        """
        if self._call.run is None:
            return None
        return self._call.run.downstream_key

    @property
    def db(self) -> Any:
        """The open transaction of a `transactional` command."""
        if self._call.run is None or self._call.run.db is None:
            raise UsageError(
                "ctx.db exists in transactional commands only.",
                "the record and the handler's writes share one transaction",
                'declare the command with on_crash="transactional", '
                "and use a ledger that has transactions",
            )
        return self._call.run.db

    def commit_point(self) -> Awaitable[None]:
        """Mark the first effect that cannot be repeated.

        Until here a crash, cancel or timeout means: nothing done.

        A coroutine function awaits it. In a plain function it blocks, which is why such a command
        runs in a thread.
        """
        if self._call.peer is not None:
            self._call.peer.is_committed = True
        if self._call.run is None:
            return NoOp()
        return self._call.run.commit_point()

    # --- notifications to a client of plain JSON-RPC ----------------------------------------------

    @property
    def can_notify(self) -> bool:
        """Whether `notify` reaches the caller: it is connected by ws://, stdio or a socket."""
        return self._call.peer is None and self._call.frame.sender.push is not None

    def notify(
        self, method: str, params: "Mapping[str, Any] | Sequence[Any] | None" = None
    ) -> Awaitable[None]:
        """Send a notification to the caller, before the answer or after it.

        It waits while the client does not read. A client that has left gets nothing.
        """
        push = self._call.frame.sender.push
        if push is None or self._call.peer is not None:
            raise NotCapable(self._cannot_push(), ran=ran_if_interrupted(self._call))
        return push(notification(method, params))

    def _cannot_push(self) -> str:
        if self._call.peer is not None:
            return (
                "ctx.notify: expected a call of plain JSON-RPC, got one of MCP;"
                " use ctx.progress or ctx.log"
            )
        got = "one that only answers"
        if self._call.frame.sender.headers is not None:
            got = "HTTP"
        return (
            f"ctx.notify: expected a link that can push, got {got};"
            " connect over ws://, tcp://, unix: or stdio"
        )

    # --- messages and questions to an MCP client --------------------------------------------------

    @property
    def revision(self) -> str | None:
        """The revision of MCP that the caller speaks; None for plain JSON-RPC."""
        if self._call.peer is None:
            return None
        return self._call.peer.revision

    @property
    def client(self) -> ClientInfo:
        """The client's name and version, and its extensions.

        An extension's settings: `ctx.client.extension("com.example/loyalty")`.
        """
        if self._call.peer is None:
            return ClientInfo()
        return self._call.peer.client

    @property
    def client_capabilities(self) -> JsonObject:
        """The capabilities that the client has declared, `{}` for plain JSON-RPC."""
        if self._call.peer is None:
            return {}
        return self._call.peer.capabilities

    def progress(
        self, progress: float, total: float | None = None, message: str | None = None
    ) -> Awaitable[None]:
        """Send the progress of the call, if its caller asked for it. The number must grow."""
        if self._call.peer is None:
            return NoOp()
        return self._call.peer.progress(progress, total, message)

    def log(self, level: "Level", data: object, logger: str | None = None) -> Awaitable[None]:
        """Send a log message to the client if it wants this level, else to the server's log."""
        from wirecall.logs import SEVERITIES, noted  # late: `import wirecall` stays light

        if level not in SEVERITIES:
            raise UsageError(
                f"{level!r} is not a log level.", "", f"use one of {', '.join(SEVERITIES)}"
            )
        peer = self._call.peer
        if peer is not None and peer.wants(level):
            return peer.log(level, data, logger)
        noted(
            level,
            data,
            logger,
            method=self.record,
            caller=self.caller or None,
            **self._call.ids.facts(),
        )
        return NoOp()

    @overload
    def elicit(
        self, message: str, schema: type[T], *, key: str | None = None
    ) -> "Awaitable[Elicited[T]]": ...
    @overload
    def elicit(
        self, message: str, schema: object, *, key: str | None = None
    ) -> "Awaitable[Elicited[Any]]": ...
    def elicit(
        self, message: str, schema: object, *, key: str | None = None
    ) -> "Awaitable[Elicited[Any]]":
        """Ask the person at the client with a form.

        `schema` is a flat type (Struct, dataclass, TypedDict, pydantic model, or a single `bool`,
        `Literal`, ...), and the answer's content is one; or it is the JSON Schema of a flat object.
        Answers that do not fit are refused.

        At 2026-07-28 the client asks and then calls again: the function starts from the top, and
        `elicit` returns the answer. So it must not have an effect before the last question. `key`
        names the question; by default questions are numbered.
        """
        return self._asked().elicit(message, schema, key)

    def elicit_url(
        self, message: str, url: str, *, key: str | None = None
    ) -> "Awaitable[Elicited[None]]":
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
        """Ask the client's model.

        Further members of the request are sent unchanged: `temperature=0.2`.
        """
        return self._asked().sample(messages, max_tokens, system, key, more)

    def roots(self, *, key: str | None = None) -> "Awaitable[list[Root]]":
        """Ask the client for its roots: the folders of its file system that it exposes."""
        return self._asked().roots(key)

    def ask(self, *questions: Awaitable[object]) -> Awaitable[list[Json]]:
        """Ask several of the above at once.

        `name, places = await ctx.ask(ctx.elicit(...), ctx.roots())`.
        """
        return self._asked().ask(questions)

    def hang_up(self, retry: float) -> Awaitable[None]:
        """End the HTTP connection and continue (2025-11-25).

        The client gets the answer after `retry` seconds.
        """
        if self._call.peer is None:
            return NoOp()
        return self._call.peer.hang_up(retry)

    def hand_over(self) -> Awaitable[None]:
        """Answer the request with a task and continue as that task.

        For clients without tasks, just continue. A function declared with `task=` that does not
        name `hand_over` becomes a task before it starts.
        """
        if self._call.peer is None:
            return NoOp()
        return self._call.peer.hand_over()

    def _asked(self) -> Remote:
        if self._call.peer is None:
            raise NotCapable(
                "the call came over plain JSON-RPC, where a client cannot be asked", ran="no"
            )
        return self._call.peer


# The call behind a context, for the steps of the server.
call_of: Callable[[Context], Call] = attrgetter("_call")

# The rest of the steps, as a layer of middleware sees them.
Next: TypeAlias = Callable[[Context], Awaitable[Any]]
Middleware: TypeAlias = Callable[[Context, Next], Awaitable[Any]]
