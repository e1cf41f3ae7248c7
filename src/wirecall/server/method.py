"""Methods, and the registry that holds them.

A method is one function and its declaration: its kind (P1), its parameters, and, for a command, its terms. All of it is read
and checked at registration, before the first call. A contradiction is an error that says why, and what to write instead.
"""

import enum
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import msgspec
from msgspec import Struct

from wirecall.errors import UsageError
from wirecall.protocol.messages import JsonObject
from wirecall.protocol.params import Find, Signature, finishing, place_of
from wirecall.server.call import Context
from wirecall.server.identity import ScopeRule, Scopes

if TYPE_CHECKING:
    from wirecall.server.providers import Provided, Providers

Mode: TypeAlias = Literal["development", "production"]
Execution: TypeAlias = Literal["sequential", "parallel"]
OnCrash: TypeAlias = Literal["unknown", "rerun", "reconcile", "transactional"]
Exposed: TypeAlias = Literal["rpc", "mcp"]
# "auto" generates a key, "required" and "ask" want the client's, "off" runs without a record. "optional" is the old name of
# "off". None is "auto", but "required" over JSON-RPC in production (P4).
KeyRule: TypeAlias = Literal["auto", "required", "ask", "off", "optional"]

# For clients that have tasks: True makes a call a task at once, a number after so many seconds, "required" refuses others.
TaskRule: TypeAlias = Literal[True, "required"] | float

EVERYWHERE: tuple[Exposed, ...] = ("rpc", "mcp")

# Every method of every revision of MCP, and the names that later ones would have.
MCP_METHODS = ("initialize", "ping")
MCP_FAMILIES = (
    "completion/",
    "elicitation/",
    "logging/",
    "notifications/",
    "prompts/",
    "resources/",
    "roots/",
    "sampling/",
    "server/",
    "subscriptions/",
    "tasks/",
    "tools/",
)

# MCP allows 128 characters (2025-11-25, server/tools, "Tool Names"), SEP-986 and model APIs allow 64. The lower one counts.
LONGEST_TOOL_NAME = 64
_NAME_MARKS = str.maketrans("_-.", "aaa")


class Kind(enum.Enum):
    """The two kinds of methods: a query reads, a command changes something. There is no default."""

    QUERY = "query"
    COMMAND = "command"


class Terms(Struct, frozen=True, kw_only=True):
    """The rules of a command about its retries; docs/commands.md explains each field."""

    on_crash: OnCrash = "unknown"
    retention: float = 86_400
    lease: float = 30
    wait: float = 25
    loss_window: float = 120
    max_stored_result: int = 262_144
    reconcile: Callable[..., object] | None = None
    commit_point: bool = False  # the handler calls ctx.commit_point() itself


class Done(Struct, frozen=True):
    """A reconcile function's answer: the command took effect, with this result."""

    result: object = None


class NotDone(Struct, frozen=True):
    """A reconcile function's answer: the command did not take effect and may run."""


class CannotTell(Struct, frozen=True):
    """A reconcile function's answer: it does not know; the outcome stays unknown until an operator resolves it."""


class ToolAnnotations(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tool's hints in MCP's words; a hint that is left out has the specification's default (T1)."""

    title: str | None = None
    readOnlyHint: bool = False  # noqa: N815
    destructiveHint: bool | None = None  # noqa: N815
    idempotentHint: bool | None = None  # noqa: N815
    openWorldHint: bool | None = None  # noqa: N815


class Method:
    """One registered function and its declaration."""

    def __init__(
        self,
        function: Callable[..., object],
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
        key: KeyRule | None = None,
        description: str | None = None,
        input_schema: JsonObject | None = None,
        output_schema: JsonObject | None = None,
        task: "TaskRule | None" = None,
        task_ttl: float = 3600,
        scopes: "ScopeRule | None" = None,
        check_result: bool = False,
        icons: Sequence[JsonObject] = (),
        meta: JsonObject | None = None,
        tags: Sequence[str] = (),
        reserved: bool = False,
        find: Find | None = None,
    ) -> None:
        import inspect  # late: `import wirecall` stays light

        self.kind = kind
        self.is_command = kind is Kind.COMMAND  # asked several times in every call
        self.name = name or str(getattr(function, "__name__", ""))
        self.title = title
        self.icons, self.meta, self.tags = list(icons), meta or {}, list(tags)  # as MCP sends them
        self.description = description or inspect.cleandoc(getattr(function, "__doc__", None) or "")
        self.expose = tuple(expose)
        if key == "optional":
            import warnings  # late: `import wirecall` stays light

            warnings.warn('key="optional" is now called key="off"; key="auto" protects such calls', DeprecationWarning, 3)
            key = "off"
        self.key = key
        self.input_schema = input_schema
        self.output_schema = output_schema
        self.notification_allowed = notification_allowed
        self.timeout = timeout
        self.execution = execution
        self.destructive = destructive
        self.idempotent = idempotent
        self.open_world = open_world
        target = getattr(function, "func", function)  # functools.partial
        self.is_async = any(map(inspect.iscoroutinefunction, (target, type(target).__call__)))
        self.is_generator = any(
            inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each) for each in (target, type(target).__call__)
        )
        self.signature = Signature(function, inject=Context, keyed=self.is_command, find=find)
        self.provided: Provided | None = None  # from the start of the app on, if providers make some of its arguments
        # A query that becomes a task has a record as well. It changes nothing, so it may always run again.
        self.terms = terms or (Terms() if task is None else Terms(on_crash="rerun", commit_point=True))
        self.task = task if task is None or isinstance(task, (bool, str)) else float(task)
        self.task_ttl = task_ttl
        # A handler that takes a context and names `commit_point` calls it; any other has passed it on entry.
        code = getattr(function, "__code__", None)
        if not self.terms.commit_point and self.signature.injected and isinstance(code, types.CodeType):
            self.terms = msgspec.structs.replace(self.terms, commit_point=_mentions(code, "commit_point"))
        # Likewise one that names `hand_over` becomes a task there; any other before it starts.
        self.hands_over = self.signature.injected and isinstance(code, types.CodeType) and _mentions(code, "hand_over")
        # In a plain function ctx.commit_point() blocks, so it must not run on the loop. Nor may a task, which takes long.
        waits = (self.is_command and self.terms.commit_point) or task is not None
        self.blocking = blocking or (waits and not self.is_async)
        self.can_wait = self.blocking or self.terms.on_crash in ("reconcile", "transactional") or self.is_async
        self.can_wait |= bool(self.signature.provided)
        self._reconciler: Signature | None = None
        self._reconciler_provided: Provided | None = None
        if self.terms.reconcile is not None:  # it is asked with the params of its command
            self._reconciler = Signature(self.terms.reconcile, inject=Context, keyed=True, find=find)
            theirs, ours = ([p.name for p in s.parameters] for s in (self._reconciler, self.signature))
            if theirs != ours:
                raise UsageError(
                    f"The reconcile function of {self.name} cannot be asked.",
                    f"it takes ({', '.join(theirs)}), the command takes ({', '.join(ours)})",
                    "give it the command's own parameters",
                )
        for why, fix in _faults(self, reserved):
            raise UsageError(f"{self.name or function!r} cannot be registered.", why, fix)
        self._write = self.signature.finisher(self.name, is_checked=False)
        finish = self.signature.finisher(self.name, is_checked=True) if check_result else self._write
        self.function = function if finish is None else finishing(function, finish, is_async=self.is_async)
        self.call = self.signature.caller(self.function)  # decodes the params of a plain method, and calls the function
        self.scopes = None if scopes is None else Scopes(scopes, function, self.signature, self.name)
        # The dispatcher runs a plain method without a context. This is decided once, since a declaration never changes.
        self._is_quick = not (self.is_command or self.blocking or task) and timeout is None and execution != "sequential"
        self.plain = self._is_quick and self.signature.simple

    def prepare(self, providers: "Providers") -> None:
        """Find out how the provided arguments are made, when the app starts."""
        if self.signature.provided:
            self.provided = providers.of(self.signature, self.function)
            if self.provided.call_directly is not None:
                self.call = self.signature.caller(self.provided.call_directly)
            self.plain = self._is_quick and self.provided.call_directly is not None
        if self._reconciler is not None and self._reconciler.provided:
            self._reconciler_provided = providers.of(self._reconciler, self._reconciler.function)

    def written(self, value: object) -> object:
        """Return a value that stands for that of the function, such as that of `Done`, in the form of a result."""
        return value if self._write is None else self._write(value)

    def reconcile(self, context: Context, *, in_a_thread: bool) -> object:
        """Ask the declared reconcile function about an earlier run of the same command; may return an awaitable."""
        assert self._reconciler is not None
        args, keywords = self._reconciler.bind_all(context.params, context)
        if self._reconciler_provided is not None:
            return self._reconciler_provided.call(context, args, keywords, in_a_thread=in_a_thread)
        ask = partial(self._reconciler.function, *args, **keywords)
        if not in_a_thread:
            return ask()
        from wirecall.stepping import in_thread  # late: `import wirecall` stays light

        return in_thread(ask)

    def __repr__(self) -> str:
        return f"<{self.kind.value} {self.name}>"


class Registry:
    """The methods of an app, by name, in the order of their registration: those for JSON-RPC, and the tools of MCP."""

    def __init__(self) -> None:
        self.methods: dict[str, Method] = {}
        self.tools: dict[str, Method] = {}
        self.taken: set[str] = set()  # by methods of MCP's extensions: on stdio they share one line with JSON-RPC

    def add(self, method: Method) -> None:
        first = self.methods.get(method.name) or self.tools.get(method.name)
        if first is not None:
            raise UsageError(
                f"There is already a method called {method.name!r}.",
                f"{first!r} at {place_of(first.function)} was registered first, then {place_of(method.function)}",
                'give one of them another name: @app.query(name="...")',
            )
        if "rpc" in method.expose and method.name in self.taken:
            raise UsageError(
                f"{method.name!r} cannot be registered.",
                "a method of an MCP extension has the same name, and both are served on one line",
                'give one of them another name, or serve it as a tool alone: expose=("mcp",)',
            )
        if "rpc" in method.expose:
            self.methods[method.name] = method
        if "mcp" in method.expose and not method.name.startswith("rpc."):
            self.tools[method.name] = method

    def remove(self, name: str) -> Method | None:
        """Remove a method, and return it if there was one."""
        method, tool = self.methods.pop(name, None), self.tools.pop(name, None)
        return method or tool

    def get(self, name: str) -> Method | None:
        return self.methods.get(name)

    def __iter__(self) -> Iterator[Method]:
        return iter(self.methods.values())

    def __len__(self) -> int:
        return len(self.methods)


def _mentions(code: types.CodeType, name: str) -> bool:
    """Return whether a name is read in the code, or in a function inside it."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return name in code.co_names or any(_mentions(const, name) for const in inner)


def _faults(method: Method, reserved: bool) -> Iterator[tuple[str, str]]:
    """Yield everything that is wrong with a declaration, as (why, fix). A method of the protocol's own is `reserved`."""
    # The name.
    if not method.name:
        yield "a method needs a name", 'name="..."'
    if not reserved:
        # JSON-RPC 2.0, section 4.1: names that begin with "rpc." are reserved for the protocol and its extensions.
        if method.name.startswith("rpc."):
            yield 'names that begin with "rpc." belong to the protocol', "choose another name"
        # JSON-RPC and MCP share one line on stdio, so a method of the one must not have the name of a method of the other.
        if "rpc" in method.expose and (method.name in MCP_METHODS or method.name.startswith(MCP_FAMILIES)):
            yield "the name is that of a method of MCP", 'choose another name, or serve it as a tool alone: expose=("mcp",)'

    # Query or command.
    if method.is_command and method.notification_allowed:
        why = "a command without an id is never executed, so it cannot be a notification"
        yield why, "make it a query, or drop notification_allowed"
    if not method.is_command and method.destructive:
        yield "a query reads, so it cannot be destructive", "register it with @app.command"
    if not method.is_command and method.idempotent is False:
        yield "a query reads, so it can be repeated", "drop idempotent=False, or register it with @app.command"

    # The function, and how it runs.
    if method.is_generator:
        why = "a generator function gives a generator and not a result"
        yield why, "return a list, or report progress with ctx.progress"
    if any(parameter.name == "self" for parameter in method.signature.parameters):
        yield "a caller would have to send `self`", "register the method of an object: app.query(shop.price)"
    if method.blocking and method.is_async:
        why = "a coroutine function runs on the event loop, blocking=True is for plain functions"
        yield why, "drop blocking=True, or make the function a plain one"
    if method.timeout is not None and not _is_amount(method.timeout):
        yield f"timeout must be a number of seconds above 0, got {method.timeout!r}", "timeout=5"
    if method.timeout is not None and not (method.is_async or method.blocking):
        yield "a plain function cannot be interrupted", "make it async, or declare blocking=True"

    # The terms of a command.
    on_crash, reconcile = method.terms.on_crash, method.terms.reconcile
    if on_crash == "reconcile" and reconcile is None:
        fix = "reconcile=a function that takes the command's params and returns Done(result), NotDone() or CannotTell()"
        yield 'on_crash="reconcile" needs a function that tells what happened', fix
    if on_crash != "reconcile" and reconcile is not None:
        why = 'a reconcile function is asked only with on_crash="reconcile"'
        yield why, 'declare on_crash="reconcile", or drop the function'
    for option, value, words in (
        ("on_crash", on_crash, get_args(OnCrash)),
        ("key", method.key, (None, *get_args(KeyRule)[:-1])),
        ("execution", method.execution, (None, *get_args(Execution))),
    ):
        if value not in words:
            known = [word for word in words if word is not None]
            yield f"{option} must be one of {', '.join(known)}, got {value!r}", f'{option}="{known[0]}"'
    if on_crash == "transactional" and method.key == "off":
        yield 'a transactional command needs a record, and key="off" runs without one', 'key="auto"'
    if not method.is_command and method.key is not None:
        yield "only a command has an idempotency key", f'drop key="{method.key}", or make it a command'
    for field in ("retention", "lease", "wait", "loss_window", "max_stored_result"):
        if not _is_amount(getattr(method.terms, field)):
            yield f"{field} must be a number above 0", f"{field}={getattr(Terms(), field)}"

    if method.input_schema is not None and method.signature.has_headers:
        yield "input_schema takes the place of the function's own schema, and with it of Header", "write x-mcp-header there"

    # The task that it may become.
    if method.task not in (None, True, "required") and not _is_amount(method.task):
        yield f'task must be True, "required" or a number of seconds above 0, got {method.task!r}', "task=True"
    if not _is_amount(method.task_ttl):
        yield f"task_ttl must be a number of seconds above 0, got {method.task_ttl!r}", "task_ttl=3600"
    if method.task is not None and "mcp" not in method.expose:
        yield "only MCP has tasks, and the method is not served there", 'drop task=, or expose=("rpc", "mcp")'
    if method.hands_over and method.task is None:
        yield "its handler calls ctx.hand_over(), which needs a task", "task=True"
    # The row of a task is written and seen by other processes before its handler goes on, so not in an open transaction.
    if on_crash == "transactional" and method.task is not None:
        if method.hands_over:
            why = "its handler calls ctx.hand_over() inside its transaction, and a transaction is of the task as a whole"
            yield why, "drop ctx.hand_over(): with task=True the function becomes a task before it starts"
        elif type(method.task) is float:
            yield f"a transaction cannot become a task after {method.task:g} seconds, in its middle", "task=True"

    # Where it is served.
    if not method.expose or not {*method.expose} <= {*EVERYWHERE}:
        why = f"{method.expose!r}: a method is served as {' and '.join(EVERYWHERE)}, or as one of them"
        yield why, 'expose=("rpc",)'
    if "mcp" in method.expose and not reserved:
        plain = method.name.translate(_NAME_MARKS)
        if not (plain.isascii() and plain.isalnum() and len(plain) <= LONGEST_TOOL_NAME):
            why = f"the name of a tool has 1 to {LONGEST_TOOL_NAME} of the characters A-Z, a-z, 0-9, _, - and ."
            yield why, 'choose another name, or serve it over JSON-RPC alone: expose=("rpc",)'


def _is_amount(value: object) -> bool:
    """Return whether a value is a number above 0 that every store can hold."""
    return (type(value) is int and 0 < value < 2**63) or (type(value) is float and value > 0)
