"""Methods, the registry that holds them, and the context a handler may ask for.

Every method has a kind (P1): a query reads, a command changes something. The kind decides what a missing id, a
notification, a retry and a batch mean, so there is no third state and no default. What a method declares is checked
when it is registered; nothing is left to be found out by the first caller.
"""

import enum
import types
from collections.abc import Awaitable, Callable, Generator, Iterator
from typing import Any, Literal, TypeAlias, get_args

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import UsageError
from wirecall.frames import Id
from wirecall.params import KEY, Signature

Execution: TypeAlias = Literal["sequential", "parallel"]
OnCrash: TypeAlias = Literal["unknown", "rerun", "reconcile", "transactional"]


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
        "_result",
        "caller",
        "id",
        "idempotency_key",
        "kind",
        "method",
        "params",
        "position",
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
    ) -> None:
        self.method = method.name
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
        reserved: bool = False,
    ) -> None:
        self.function = function
        self.kind = kind
        self.name = name or str(getattr(function, "__name__", ""))
        self.title = title
        self.description = (getattr(function, "__doc__", None) or "").strip()
        self.notification_allowed = notification_allowed
        self.timeout = timeout
        self.execution = execution
        self.destructive = destructive
        self.idempotent = idempotent
        self.open_world = open_world
        self.is_async = _is_async(function)
        self.signature = Signature(function, inject=Context, keyed=self.is_command)
        self.terms = _settled(terms or Terms(), function, self.signature)
        # In a plain function ctx.commit_point() blocks, so it must not run on the loop.
        self.blocking = blocking or (self.is_command and self.terms.commit_point and not self.is_async)
        _check(self, reserved)
        self._reconciler = _reconciler(self)
        self.bind = self.signature.bind
        # The dispatcher runs a plain method without building a context; what makes a method plain never changes.
        self.plain = (
            not self.is_command and self.signature.simple and not blocking and timeout is None and execution != "sequential"
        )

    @property
    def is_command(self) -> bool:
        return self.kind is Kind.COMMAND

    def reconcile(self, context: Context) -> Any:
        """What the declared reconcile function says about an earlier run of the same command, or something to await."""
        assert self._reconciler is not None
        args, keywords = self._reconciler.bind_all(context.params, context)
        return self._reconciler.function(*args, **keywords)

    def __repr__(self) -> str:
        return f"<{self.kind.value} {self.name}>"


class Registry:
    """The methods of an app, by name, in the order of their registration."""

    def __init__(self) -> None:
        self.methods: dict[str, Method] = {}

    def add(self, method: Method) -> None:
        if method.name in self.methods:
            raise UsageError(
                f"There is already a method called {method.name!r}.",
                f"{self.methods[method.name]!r} was registered first",
                'give one of them another name: @app.query(name="...")',
            )
        self.methods[method.name] = method

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
            method.blocking and method.is_async,
            "a coroutine function runs on the event loop, blocking=True is for plain functions",
            "drop blocking=True, or make the function a plain one",
        ),
        (method.timeout is not None and not method.timeout > 0, "a timeout is a number of seconds above 0", "timeout=5"),
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
        *(
            (not getattr(method.terms, field) > 0, f"{field} must be above 0", f"{field}={getattr(Terms(), field)}")
            for field in ("retention", "lease", "wait", "max_stored_result")
        ),
    )
    for wrong, why, fix in faults:
        if wrong:
            raise UsageError(f"{method.name or method.function!r} cannot be registered.", why, fix)


def _is_async(function: Callable[..., Any]) -> bool:
    import inspect  # late: `import wirecall` stays light

    target = getattr(function, "func", function)  # functools.partial
    return inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(type(target).__call__)


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
