"""Methods, the registry that holds them, and the context a handler may ask for.

Every method has a kind (P1): a query reads, a command changes something. The kind decides what a missing id, a
notification, a retry and a batch mean, so there is no third state and no default. What a method declares is checked
when it is registered; nothing is left to be found out by the first caller.
"""

import enum
import types
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import NotCapable, UsageError
from wirecall.frames import Id
from wirecall.params import KEY, Signature

if TYPE_CHECKING:
    from wirecall.mcp.types import Elicited, Level, Message, Root, Sampled

Execution: TypeAlias = Literal["sequential", "parallel"]
OnCrash: TypeAlias = Literal["unknown", "rerun", "reconcile", "transactional"]
Exposed: TypeAlias = Literal["rpc", "mcp"]
KeyRule: TypeAlias = Literal["optional", "required", "ask"]

EVERYWHERE: tuple[Exposed, ...] = ("rpc", "mcp")

# Members of the params that may change between an attempt and its retry, besides the key and `_meta`.
UNCOUNTED = ("idempotencyKey", "inputResponses", "requestState")

_IS_COROUTINE = 0x80  # inspect.CO_COROUTINE


class Kind(enum.Enum):
    """What a method does to the world."""

    QUERY = "query"
    COMMAND = "command"


class Done(Struct, frozen=True):
    """A reconcile function's answer: the command took effect, with this result."""

    result: Any = None


class NotDone(Struct, frozen=True):
    """A reconcile function's answer: the command did not take effect and may run."""


class CannotTell(Struct, frozen=True):
    """A reconcile function's answer: nobody knows; the outcome stays unknown until an operator resolves it."""


class ToolAnnotations(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a tool says about itself, in MCP's words; what is not said has the specification's default (T1)."""

    title: str | None = None
    readOnlyHint: bool = False  # noqa: N815
    destructiveHint: bool | None = None  # noqa: N815
    idempotentHint: bool | None = None  # noqa: N815
    openWorldHint: bool | None = None  # noqa: N815


class Terms(Struct, frozen=True, kw_only=True):
    """What a command declares about its own retries; docs/commands.md tells what each field means."""

    on_crash: OnCrash = "unknown"
    retention: float = 86_400
    lease: float = 30
    wait: float = 25
    max_stored_result: int = 262_144
    reconcile: Callable[..., Any] | None = None
    commit_point: bool = False  # the handler calls ctx.commit_point() itself


class Context:
    """What a handler, or a middleware, may know about the call it serves."""

    __slots__ = (
        "_command",
        "_correlation",
        "_frame",
        "_method",
        "_peer",
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
                'declare the command with on_crash="transactional", use a ledger that has it, and send a key',
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


class Method:
    """One registered function and what was declared about it."""

    def __init__(
        self,
        function: Callable[..., Any],
        kind: Kind,
        *,
        name: str | None = None,
        title: str | None = None,
        notification_allowed: bool = False,
        timeout: float | None = None,
        blocking: bool = False,
        execution: Execution | None = None,
        destructive: bool | None = None,
        idempotent: bool | None = None,
        open_world: bool | None = None,
        terms: Terms | None = None,
        expose: Sequence[Exposed] = EVERYWHERE,
        key: KeyRule = "optional",
        description: str | None = None,
        input_schema: dict[str, Any] | None = None,
        output_schema: dict[str, Any] | None = None,
        reserved: bool = False,
    ) -> None:
        self.function = function
        self.kind = kind
        self.is_command = kind is Kind.COMMAND  # asked several times in every call
        self.name = name or str(getattr(function, "__name__", ""))
        self.title = title
        self.description = description or _documented(function)
        self.expose = tuple(expose)
        self.key = key
        self.input_schema = input_schema
        self.output_schema = output_schema
        self.notification_allowed = notification_allowed
        self.timeout = timeout
        self.execution = execution
        self.destructive = destructive
        self.idempotent = idempotent
        self.open_world = open_world
        self.is_async = _is_async(function)
        self.straight = _straight(function)
        self.signature = Signature(function, inject=Context, keyed=self.is_command)
        self.terms = _settled(terms or Terms(), function, self.signature)
        # In a plain function ctx.commit_point() blocks, so it must not run on the loop.
        self.blocking = blocking or (self.is_command and self.terms.commit_point and not self.is_async)
        self.can_wait = (
            self.blocking or self.terms.on_crash in ("reconcile", "transactional") or (self.is_async and not self.straight)
        )
        _check(self, reserved)
        self._reconciler = _reconciler(self)
        self.bind = self.signature.bind
        # The dispatcher runs a plain method without building a context; what makes a method plain never changes.
        self.plain = (
            not self.is_command and self.signature.simple and not blocking and timeout is None and execution != "sequential"
        )

    def reconcile(self, context: Context) -> Any:
        """What the declared reconcile function says about an earlier run of the same command, or something to await."""
        assert self._reconciler is not None
        args, keywords = self._reconciler.bind_all(context.params, context)
        return self._reconciler.function(*args, **keywords)

    def __repr__(self) -> str:
        return f"<{self.kind.value} {self.name}>"


class Registry:
    """The methods of an app, by name, in the order of their registration: those for JSON-RPC, and the tools of MCP."""

    def __init__(self) -> None:
        self.methods: dict[str, Method] = {}
        self.tools: dict[str, Method] = {}

    def add(self, method: Method) -> None:
        first = self.methods.get(method.name) or self.tools.get(method.name)
        if first is not None:
            raise UsageError(
                f"There is already a method called {method.name!r}.",
                f"{first!r} was registered first",
                'give one of them another name: @app.query(name="...")',
            )
        if "rpc" in method.expose:
            self.methods[method.name] = method
        if "mcp" in method.expose and not method.name.startswith("rpc."):
            self.tools[method.name] = method

    def get(self, name: str) -> Method | None:
        return self.methods.get(name)

    def __iter__(self) -> Iterator[Method]:
        return iter(self.methods.values())

    def __len__(self) -> int:
        return len(self.methods)


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


def _check(method: Method, reserved: bool) -> None:
    """Contradictions are errors at registration."""
    faults = (
        (not method.name, "a method needs a name", 'name="..."'),
        # JSON-RPC 2.0, section 4.1: names that begin with "rpc." are reserved for the protocol and its extensions.
        (
            method.name.startswith("rpc.") and not reserved,
            'names that begin with "rpc." belong to the protocol',
            "choose another name",
        ),
        (
            method.is_command and method.notification_allowed,
            "a command without an id is never executed, so it cannot be a notification",
            "make it a query, or drop notification_allowed",
        ),
        (
            not method.is_command and bool(method.destructive),
            "a query reads, so it cannot be destructive",
            "register it with @app.command",
        ),
        (
            not method.is_command and method.idempotent is False,
            "a query reads, so it can be repeated",
            "drop idempotent=False, or register it with @app.command",
        ),
        (
            method.blocking and method.is_async,
            "a coroutine function runs on the event loop, blocking=True is for plain functions",
            "drop blocking=True, or make the function a plain one",
        ),
        (
            method.timeout is not None and not _is_amount(method.timeout),
            "a timeout is a number of seconds above 0",
            "timeout=5",
        ),
        (
            method.timeout is not None and not (method.is_async or method.blocking),
            "a plain function cannot be interrupted",
            "make it async, or declare blocking=True",
        ),
        (
            method.terms.on_crash == "reconcile" and method.terms.reconcile is None,
            'on_crash="reconcile" needs a function that tells what happened',
            "reconcile=a function that takes the command's params and returns Done(result), NotDone() or CannotTell()",
        ),
        (
            method.terms.on_crash != "reconcile" and method.terms.reconcile is not None,
            'a reconcile function is asked only with on_crash="reconcile"',
            'declare on_crash="reconcile", or drop the function',
        ),
        (
            method.terms.on_crash not in get_args(OnCrash),
            f"{method.terms.on_crash!r} is none of {', '.join(get_args(OnCrash))}",
            'on_crash="unknown"',
        ),
        (
            method.execution not in (None, *get_args(Execution)),
            f"{method.execution!r} is none of {', '.join(get_args(Execution))}",
            'execution="sequential"',
        ),
        (
            not method.expose or not {*method.expose} <= {*EVERYWHERE},
            f"{method.expose!r}: a method is served as {' and '.join(EVERYWHERE)}, or as one of them",
            'expose=("rpc",)',
        ),
        (
            method.is_command and any(parameter.name in UNCOUNTED for parameter in method.signature.parameters),
            f"{', '.join(UNCOUNTED)} may change from retry to retry, so two commands that differ in them would count as one",
            "give the parameter another name",
        ),
        (method.key not in get_args(KeyRule), f"{method.key!r} is none of {', '.join(get_args(KeyRule))}", 'key="optional"'),
        (
            not method.is_command and method.key != "optional",
            "only a command has an idempotency key",
            f'drop key="{method.key}", or make it a command',
        ),
        *(
            (
                not _is_amount(getattr(method.terms, field)),
                f"{field} must be a number above 0",
                f"{field}={getattr(Terms(), field)}",
            )
            for field in ("retention", "lease", "wait", "max_stored_result")
        ),
    )
    for wrong, why, fix in faults:
        if wrong:
            raise UsageError(f"{method.name or method.function!r} cannot be registered.", why, fix)


def _is_amount(value: Any) -> bool:
    """A number above 0 that a store can hold: what is none must not be found out by the first command."""
    try:
        return type(value) in (int, float) and float(value) > 0
    except OverflowError:
        return False


def _documented(function: Callable[..., Any]) -> str:
    """The docstring, as a reader who sees only it would like it."""
    import inspect  # late: `import wirecall` stays light

    return inspect.cleandoc(getattr(function, "__doc__", None) or "")


def _is_async(function: Callable[..., Any]) -> bool:
    import inspect  # late: `import wirecall` stays light

    target = getattr(function, "func", function)  # functools.partial
    return inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(type(target).__call__)


def _straight(function: Callable[..., Any]) -> types.CodeType | None:
    """The code of a coroutine function without an `await`: like a plain function, it is never interrupted, and needs no task
    of its own unless it asks for one."""
    from opcode import opmap  # late, as above

    code = getattr(function, "__code__", None)
    if not isinstance(code, types.CodeType) or not code.co_flags & _IS_COROUTINE or _mentions(code, "current_task"):
        return None
    instructions = code.co_code[::2]  # what stands between them is their arguments
    return None if opmap.get("SEND", 0) in instructions else code  # every kind of waiting is one that sends


def _settled(terms: Terms, function: Callable[..., Any], signature: Signature) -> Terms:
    """A handler that takes a context and names `commit_point` calls it; any other has passed it on entry."""
    code = getattr(function, "__code__", None)
    if terms.commit_point or not signature.injected or not isinstance(code, types.CodeType):
        return terms
    return msgspec.structs.replace(terms, commit_point=_mentions(code, "commit_point"))


def _reconciler(method: Method) -> Signature | None:
    if method.terms.reconcile is None:
        return None
    signature = Signature(method.terms.reconcile, inject=Context, keyed=True)
    theirs, ours = ([p.name for p in s.parameters] for s in (signature, method.signature))
    if theirs != ours:
        raise UsageError(
            f"The reconcile function of {method.name} cannot be asked.",
            f"it takes ({', '.join(theirs)}), the command takes ({', '.join(ours)})",
            "give it the command's own parameters",
        )
    return signature


def _mentions(code: types.CodeType, name: str) -> bool:
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return name in code.co_names or any(_mentions(const, name) for const in inner)


__all__ = ["KEY", "Context", "Execution", "Kind", "Method", "OnCrash", "Registry", "Terms", "correlation_of"]
