"""Methods, and the registry that holds them.

A method is one function and its declaration: its kind (P1), its parameters, and, for a command, its
terms. All of it is read and checked at registration, before the first call. A contradiction is an
error that says why, and what to write instead.
"""

import enum
import re
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import msgspec
from msgspec import Raw, Struct, UnsetType

from wirecall.errors import InvalidParams, UsageError
from wirecall.protocol.keys import KeyPlace, place_of_key
from wirecall.protocol.messages import JsonObject
from wirecall.protocol.params import (
    Find,
    RawSignature,
    Signature,
    finishing,
    place_of,
    tool_name_of,
)
from wirecall.server.context import Context
from wirecall.server.identity import ScopeRule, Scopes

if TYPE_CHECKING:
    from wirecall.server.home import Home
    from wirecall.server.providers import Provided, Providers

Mode: TypeAlias = Literal["development", "production"]
Execution: TypeAlias = Literal["sequential", "parallel"]
# One error for an oversized batch, or one per id.
BatchRefusal: TypeAlias = Literal["single", "entries"]
OnCrash: TypeAlias = Literal["unknown", "rerun", "reconcile", "transactional"]
Exposed: TypeAlias = Literal["rpc", "mcp"]
# "lenient" also takes the arguments of MCP tools as models send them: "5" for an int.
ArgumentRule: TypeAlias = Literal["strict", "lenient"]
# "auto" generates a key, "required" and "ask" want the client's, "off" runs without a record.
# "optional" is the old name of "off". None is "auto", but "required" over JSON-RPC in production
# (P4).
KeyRule: TypeAlias = Literal["auto", "required", "ask", "off", "optional"]

# For clients with tasks: True makes a call a task at once, a number after so many seconds,
# "required" refuses others.
TaskRule: TypeAlias = Literal[True, "required"] | float

EVERYWHERE: tuple[Exposed, ...] = ("rpc", "mcp")

# Every method of every revision of MCP, and the likely names of later ones.
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

# MCP allows 128 characters (2025-11-25, server/tools, "Tool Names"), SEP-986 and model APIs allow
# 64. The lower one counts.
LONGEST_TOOL_NAME = 64
# The types of defaults that one call could change for all others.
_MUTABLE = (list, dict, set, bytearray)

# MCP allows dots. A generated name does not have one: several model APIs refuse it.
_STATED_TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class Kind(enum.Enum):
    """The two kinds of methods: a query reads, a command changes something. There is no default.

    >>> Kind.COMMAND.value
    'command'
    """

    QUERY = "query"
    COMMAND = "command"


class Terms(Struct, frozen=True, kw_only=True):
    """The rules of a command about its retries; docs/commands.md explains each field."""

    on_crash: OnCrash = "unknown"
    retention: float = 86_400
    lease: float = 30
    wait: float = 25
    loss_window: float = 120
    resend_after: float | Literal["off"] = 2.0
    max_stored_result: int = 262_144
    reconcile: Callable[..., object] | None = None
    # The handler calls ctx.commit_point() itself.
    commit_point: bool = False
    # The ledger keeps the params, without secrets, for operators.
    record_params: bool = False


class Done(Struct, frozen=True):
    """A reconcile function's answer: the command took effect, with this result.

    `result` is what the caller gets, as if the command had returned it.

    >>> Done({"order": "7"}).result
    {'order': '7'}
    """

    result: object = None


class NotDone(Struct, frozen=True):
    """A reconcile function's answer: the command did not take effect and may run.

    >>> why = "the bank has no such payment"
    >>> asyncio.run(App("shop").resolve("charge", "order-7", NotDone(), reason=why))
    False
    """


class CannotTell(Struct, frozen=True):
    """A reconcile function's answer: it does not know.

    The outcome stays unknown until an operator resolves it.

    >>> def ask_the_bank(order: str) -> Done | NotDone | CannotTell:
    ...     return CannotTell()
    >>> @App("shop").command(on_crash="reconcile", reconcile=ask_the_bank)
    ... def charge(order: str) -> str:
    ...     return order
    """


class ToolAnnotations(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tool's hints in MCP's words; an omitted hint has the specification's default (T1).

    `title` is the name for people. `readOnlyHint`: the tool only reads, so it is a query.
    `destructiveHint`: it may destroy data. `idempotentHint`: a repeated call changes nothing more.
    `openWorldHint`: it reaches beyond the server.

    >>> @App("shop").tool(annotations=ToolAnnotations(title="Price", readOnlyHint=True))
    ... def price(sku: str) -> int:
    ...     return 450
    """

    title: str | None = None
    readOnlyHint: bool = False  # noqa: N815
    destructiveHint: bool | None = None  # noqa: N815
    idempotentHint: bool | None = None  # noqa: N815
    openWorldHint: bool | None = None  # noqa: N815


class Method:
    """One registered function and its declaration."""

    # It is a batch tool, whose calls call other tools.
    is_batch = False
    # The mounted app that brought it, and the same method there.
    home: "Home | None" = None
    original: "Method | None" = None

    # complexity: a flat list of options in four steps; each has its default or one rule.
    def __init__(
        self,
        function: Callable[..., object],
        kind: Kind,
        *,
        name: str | None = None,
        tool_name: str | None = None,
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
        in_development: bool = False,
        icons: Sequence[JsonObject] = (),
        meta: JsonObject | None = None,
        tags: Sequence[str] = (),
        arguments: ArgumentRule = "strict",
        key_at: str | None = None,
        reserved: bool = False,
        repeats_unknown: bool = True,
        find: Find | None = None,
        raw: bool = False,
        record: str | None = None,
    ) -> None:
        import inspect  # late: `import wirecall` stays light

        if isinstance(function, type):
            raise UsageError(
                f"The class {function.__name__} cannot be registered.",
                "each call would make an object, and a result is data",
                "register a function, or the method of an object: app.query(shop.price)",
            )
        # Step 1: the declaration.
        self.kind = kind
        self.is_command = kind is Kind.COMMAND  # read several times in every call
        self.name = name or str(getattr(function, "__name__", ""))
        # Its name in MCP's lists. Records, tasks, logs and the audit trail have `name`, so both
        # names mean one command.
        self.tool_name = tool_name if tool_name is not None else tool_name_of(self.name)
        # Its name in records and in the audit trail.
        self.record = record or self.name
        self.title = title
        # As MCP sends them.
        self.icons = list(icons)
        self.meta = meta or {}
        self.tags = list(tags)
        self.description = description or inspect.cleandoc(getattr(function, "__doc__", None) or "")
        self.expose = tuple(expose)
        # Mistakes found during a call are errors of the call.
        self.in_development = in_development
        self.key = _current_name(key)
        self.input_schema = input_schema
        self.output_schema = output_schema
        self.notification_allowed = notification_allowed
        self.timeout = timeout
        self.execution = execution
        self.destructive = destructive
        self.idempotent = idempotent
        self.open_world = open_world
        self.task = task
        if task is not None and not isinstance(task, (bool, str)):
            self.task = float(task)
        self.task_ttl = task_ttl
        self.arguments = arguments
        # Step 2: the function.
        target = getattr(function, "func", function)  # functools.partial
        self.is_async = any(map(inspect.iscoroutinefunction, (target, type(target).__call__)))
        self.is_generator = any(
            inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each)
            for each in (target, type(target).__call__)
        )
        # Where callers put the key, besides the usual places.
        self.key_place: KeyPlace | None = None
        if key_at is not None:
            self.key_place = place_of_key(key_at)
        kind_of_signature: type[Signature] = RawSignature if raw else Signature
        self.signature = kind_of_signature(
            function, inject=Context, keyed=self.is_command, key_at=self.key_place, find=find
        )
        if self.key_place is not None:
            names = [parameter.name for parameter in self.signature.parameters]
            is_declared = self.key_place.path[0] in names
            self.key_place = KeyPlace(self.key_place.path, is_declared)
        # Set when the app starts, if providers make some arguments.
        self.provided: Provided | None = None
        # A handler that takes a context and names `commit_point` calls it; any other has passed it
        # on entry. In the same way, one that names `hand_over` becomes a task there; any other
        # before it starts.
        named = frozenset[str]()
        code = getattr(function, "__code__", None)
        if self.signature.injected and isinstance(code, types.CodeType):
            named = _names_in(code)
        self.hands_over = "hand_over" in named
        # Step 3: the terms of a record. A query that becomes a task also has one. It changes
        # nothing, so it may always run again.
        self.terms = terms or Terms()
        # Equal calls without a key get "unknown" for as long as `loss_window`. Else the first
        # caller that receives it has the answer, and the next equal call is a new one.
        self.repeats_unknown = repeats_unknown
        if terms is None and task is not None:
            self.terms = Terms(on_crash="rerun", commit_point=True)
        if not self.terms.commit_point and "commit_point" in named:
            self.terms = msgspec.structs.replace(self.terms, commit_point=True)
        # In a plain function ctx.commit_point() blocks, so it must not run on the loop. A task
        # takes long, so it must not either.
        waits = (self.is_command and self.terms.commit_point) or task is not None
        self.blocking = blocking or (waits and not self.is_async)
        self.can_wait = (
            self.blocking
            or self.is_async
            or self.terms.on_crash in ("reconcile", "transactional")
            or bool(self.signature.provided)
        )
        # Makes the form of the params that the ledger shows.
        self.shown: Callable[[Raw | UnsetType], bytes] | None = None
        if self.terms.record_params:
            from wirecall.protocol.secrets import Redactor  # late: few methods need it

            self.shown = Redactor(self.signature, self.terms.max_stored_result)
        self._reconciler: Signature | None = None
        self._reconciler_provided: Provided | None = None
        if self.terms.reconcile is not None:
            self._reconciler = self._signature_of_reconciler(self.terms.reconcile, find)
        for why, fix in _faults(self, reserved, tool_name):
            raise UsageError(f"{self.name or function!r} cannot be registered.", why, fix)
        # Step 4: how it is called.
        self._write = self.signature.finisher(self.name, is_checked=False)
        finish = self._write
        if check_result:
            finish = self.signature.finisher(self.name, is_checked=True)
        self.function = function
        if finish is not None:
            self.function = finishing(function, finish, is_async=self.is_async)
        # Decodes the params of a plain method, and calls the function.
        self.call = self.signature.caller(self.function)
        self.scopes: Scopes | None = None
        if scopes is not None:
            self.scopes = Scopes(scopes, function, self.signature, self.name)
            self.scopes.is_lenient = arguments == "lenient"
        # The dispatcher runs a plain method without a context. This is decided once, since a
        # declaration never changes.
        self._is_quick = (
            not (self.is_command or self.blocking or task)
            and timeout is None
            and execution != "sequential"
        )
        self.plain = self._is_quick and self.signature.simple

    def _signature_of_reconciler(
        self, reconcile: Callable[..., object], find: Find | None
    ) -> Signature:
        """Return the signature of the reconcile function, which gets the params of its command."""
        signature = Signature(
            reconcile, inject=Context, keyed=True, key_at=self.key_place, find=find
        )
        theirs = [parameter.name for parameter in signature.parameters]
        ours = [parameter.name for parameter in self.signature.parameters]
        if theirs != ours:
            raise UsageError(
                f"The reconcile function of {self.name} cannot be asked.",
                f"it takes ({', '.join(theirs)}), the command takes ({', '.join(ours)})",
                "give it the command's own parameters",
            )
        return signature

    def prepare(self, providers: "Providers") -> None:
        """Plan how the provided arguments are made, when the app starts."""
        if self.signature.provided:
            self.provided = providers.of(self.signature, self.function)
            if self.provided.call_directly is not None:
                self.call = self.signature.caller(self.provided.call_directly)
            self.plain = self._is_quick and self.provided.call_directly is not None
        if self._reconciler is not None and self._reconciler.provided:
            self._reconciler_provided = providers.of(self._reconciler, self._reconciler.function)

    def under(
        self, name: str, home: "Home", execution: Execution | None, *, is_reserved: bool
    ) -> "Method":
        """Return the same method for an app in which its app is mounted.

        `execution` is that of its app. `is_reserved`: it is not called by its name.
        """
        from copy import copy  # late: `import wirecall` stays light

        moved = copy(self)
        moved.original = self
        moved.home = home
        moved.name = name
        moved.record = name
        is_stated = self.tool_name != tool_name_of(self.name)
        if not is_stated:
            moved.tool_name = tool_name_of(name)
        moved.execution = self.execution or execution
        moved._is_quick = self._is_quick and not home.has_layers and moved.execution != "sequential"
        moved.plain = self.plain and moved._is_quick
        for why, fix in _faults(moved, is_reserved, self.tool_name if is_stated else None):
            raise UsageError(f"{name!r} cannot be registered.", why, fix)
        return moved

    def understood(self, params: Raw | UnsetType, misfit: InvalidParams) -> Raw:
        """Return the only other meaning of a tool's arguments; raise the misfit if there is none.

        The arguments do not fit their types, so nothing has run.
        """
        found = None
        if self.arguments == "lenient":
            found = self.signature.understood(params)
        if found is None:
            raise misfit
        return found

    def written(self, value: object) -> object:
        """Return a value that replaces the function's, such as that of `Done`, as a result."""
        if self._write is None:
            return value
        return self._write(value)

    def reconcile(self, context: Context, *, in_a_thread: bool) -> object:
        """Call the reconcile function about an earlier run of the same command.

        It may return an awaitable.
        """
        assert self._reconciler is not None
        args, keywords = self._reconciler.bind_all(context.params, context)
        if self._reconciler_provided is not None:
            return self._reconciler_provided.call(context, args, keywords, in_a_thread=in_a_thread)
        ask = partial(self._reconciler.function, *args, **keywords)
        if not in_a_thread:
            return ask()
        from wirecall.aio import in_thread  # late: `import wirecall` stays light

        return in_thread(ask)

    def __repr__(self) -> str:
        return f"<{self.kind.value} {self.name}>"


class Registry:
    """The methods of an app for JSON-RPC, and its tools for MCP.

    Both are by name, in the order of their registration. A tool has two names: that of its method,
    and the one that MCP clients see. `called` finds it by both.
    """

    def __init__(self) -> None:
        self.methods: dict[str, Method] = {}
        self.tools: dict[str, Method] = {}
        self.called: dict[str, Method] = {}
        # Names of extension methods: on stdio they share one line with JSON-RPC.
        self.taken: set[str] = set()

    def add(self, method: Method) -> None:
        first = self.methods.get(method.name) or self.tools.get(method.name)
        if first is not None:
            raise UsageError(
                f"There is already a method called {method.name!r}.",
                f"{first!r} at {place_of(first.function)} was registered first, "
                f"then {place_of(method.function)}",
                'give one of them another name: @app.query(name="...")',
            )
        if "rpc" in method.expose and method.name in self.taken:
            raise UsageError(
                f"{method.name!r} cannot be registered.",
                "a method of an MCP extension has the same name, and both are served on one line",
                'give one of them another name, or serve it as a tool alone: expose=("mcp",)',
            )
        is_tool = "mcp" in method.expose and not method.name.startswith("rpc.")
        if is_tool:
            self._check_tool(method)
            self.tools[method.name] = method
            self.called[method.name] = method
            self.called[method.tool_name] = method
        if "rpc" in method.expose:
            self.methods[method.name] = method

    def _check_tool(self, method: Method) -> None:
        """Raise `UsageError` if a call by one of a tool's names would mean another tool."""
        for name in (method.tool_name, method.name):
            first = self.called.get(name)
            if first is not None:
                raise UsageError(
                    f"Two tools would be called {name!r}: {first.name!r} and {method.name!r}.",
                    "an MCP client calls a tool by its MCP name "
                    f"({first.tool_name!r}, {method.tool_name!r}) or by the name "
                    f"of its method: {place_of(first.function)} and {place_of(method.function)}",
                    'give one of them another MCP name: tool_name="..."',
                )

    def remove(self, name: str) -> Method | None:
        """Remove a method, and return it if there was one."""
        tool = self.tools.pop(name, None)
        if tool is not None:
            self.called = {each: other for each, other in self.called.items() if other is not tool}
        return self.methods.pop(name, None) or tool

    def get(self, name: str) -> Method | None:
        return self.methods.get(name)

    def __iter__(self) -> Iterator[Method]:
        return iter(self.methods.values())

    def __len__(self) -> int:
        return len(self.methods)


def _current_name(key: KeyRule | None) -> KeyRule | None:
    """Return a rule about keys by its present name; warn about an old name."""
    if key != "optional":
        return key
    import warnings  # late: `import wirecall` stays light

    # The warning is about the line that registers the method.
    warnings.warn(
        'key="optional" is now called key="off"; key="auto" protects such calls',
        DeprecationWarning,
        4,
    )
    return "off"


def _names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names that are read in the code, and in the functions inside it."""
    names = frozenset(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= _names_in(const)
    return names


# --- faults of a declaration ----------------------------------------------------------------------

Fault: TypeAlias = tuple[str, str]  # the reason, and what to write instead


def _faults(method: Method, reserved: bool, tool_name: object) -> Iterator[Fault]:
    """Yield every fault of a declaration. The protocol's own methods are `reserved`."""
    yield from _name_faults(method, reserved)
    yield from _kind_faults(method)
    yield from _function_faults(method)
    yield from _terms_faults(method)
    yield from _word_faults(method)
    yield from _number_faults(method)
    if method.input_schema is not None and method.signature.has_headers:
        yield (
            "input_schema takes the place of the function's own schema, and with it of Header",
            "write x-mcp-header there",
        )
    yield from _task_faults(method)
    yield from _place_faults(method, reserved, tool_name)


def _name_faults(method: Method, reserved: bool) -> Iterator[Fault]:
    if not method.name:
        yield "a method needs a name", 'name="..."'
    if reserved:
        return
    # JSON-RPC 2.0, section 4.1: names that begin with "rpc." are reserved for the protocol and its
    # extensions.
    if method.name.startswith("rpc."):
        yield 'names that begin with "rpc." belong to the protocol', "choose another name"
    # JSON-RPC and MCP share one line on stdio, so their methods must not have the same names.
    is_of_mcp = method.name in MCP_METHODS or method.name.startswith(MCP_FAMILIES)
    if "rpc" in method.expose and is_of_mcp:
        yield (
            "the name is that of a method of MCP",
            'choose another name, or serve it as a tool alone: expose=("mcp",)',
        )


def _kind_faults(method: Method) -> Iterator[Fault]:
    """Yield the faults of a query that is declared like a command, and the reverse."""
    if method.is_command:
        if method.notification_allowed:
            yield (
                "a command without an id is never executed, so it cannot be a notification",
                "make it a query, or drop notification_allowed",
            )
        return
    if method.destructive:
        yield "a query reads, so it cannot be destructive", "register it with @app.command"
    if method.idempotent is False:
        yield (
            "a query reads, so it can be repeated",
            "drop idempotent=False, or register it with @app.command",
        )


def _function_faults(method: Method) -> Iterator[Fault]:
    """Yield the faults of the function, and of how it runs."""
    if isinstance(method.signature, RawSignature):
        takes = ", ".join(parameter.name for parameter in method.signature.parameters)
        if takes or not (method.signature.injected or method.signature.provided):
            yield (
                f"with raw=True the params are read from the context, got a function of ({takes})",
                "give it one parameter: def f(ctx: Context)",
            )
    if method.is_generator:
        yield (
            "a generator function gives a generator and not a result",
            "return a list, or report progress with ctx.progress",
        )
    if any(parameter.name == "self" for parameter in method.signature.parameters):
        yield (
            "a caller would have to send `self`",
            "register the method of an object: app.query(shop.price)",
        )
    for parameter in method.signature.parameters:
        if (
            parameter.keyword == "ctx"
            and parameter.type is Any
            and not _is_annotated(method.signature.function, "ctx")
        ):
            yield (
                "the parameter ctx has no annotation, so a caller would have to send it",
                "annotate it: ctx: Context, or give the caller's parameter another name",
            )
        if isinstance(parameter.default, _MUTABLE):
            kind = type(parameter.default).__name__
            yield (
                f"the default of {parameter.keyword} is a {kind}: all callers would share it, "
                "and what one puts into it",
                f"{parameter.keyword}=None, or a default that cannot change: a tuple, a frozenset",
            )
    if method.blocking and method.is_async:
        yield (
            "a coroutine function runs on the event loop, blocking=True is for plain functions",
            "drop blocking=True, or make the function a plain one",
        )
    if method.timeout is None:
        return
    if not _is_amount(method.timeout):
        yield f"timeout must be a number of seconds above 0, got {method.timeout!r}", "timeout=5"
    if not (method.is_async or method.blocking):
        yield "a plain function cannot be interrupted", "make it async, or declare blocking=True"


def _terms_faults(method: Method) -> Iterator[Fault]:
    has_reconciler = method.terms.reconcile is not None
    if method.terms.on_crash == "reconcile" and not has_reconciler:
        yield (
            'on_crash="reconcile" needs a function that tells what happened',
            "reconcile=a function that takes the command's params "
            "and returns Done(result), NotDone() or CannotTell()",
        )
    if method.terms.on_crash != "reconcile" and has_reconciler:
        yield (
            'a reconcile function is asked only with on_crash="reconcile"',
            'declare on_crash="reconcile", or drop the function',
        )


def _word_faults(method: Method) -> Iterator[Fault]:
    """Yield the options whose words are unknown, or do not fit the kind of the method."""
    on_crash = method.terms.on_crash
    for option, value, words in (
        ("on_crash", on_crash, get_args(OnCrash)),
        ("key", method.key, (None, *get_args(KeyRule)[:-1])),
        ("execution", method.execution, (None, *get_args(Execution))),
        ("arguments", method.arguments, get_args(ArgumentRule)),
    ):
        if value not in words:
            known = [word for word in words if word is not None]
            yield (
                f"{option} must be one of {', '.join(known)}, got {value!r}",
                f'{option}="{known[0]}"',
            )
    if method.arguments == "lenient" and "mcp" not in method.expose:
        yield (
            'arguments="lenient" is for MCP tools, and the method is not served there',
            'drop arguments=, or expose=("rpc", "mcp")',
        )
    if on_crash == "transactional" and method.key == "off":
        yield 'a transactional command needs a record, and key="off" runs without one', 'key="auto"'
    if not method.is_command and method.key is not None:
        yield (
            "only a command has an idempotency key",
            f'drop key="{method.key}", or make it a command',
        )
    if not method.is_command and method.key_place is not None:
        yield "only a command has an idempotency key", "drop key_at=, or make it a command"


def _number_faults(method: Method) -> Iterator[Fault]:
    for field in ("retention", "lease", "wait", "loss_window", "max_stored_result"):
        if not _is_amount(getattr(method.terms, field)):
            yield f"{field} must be a number above 0", f"{field}={getattr(Terms(), field)}"
    resend_after = method.terms.resend_after
    if resend_after != "off" and not _is_amount(resend_after):
        yield (
            f'resend_after must be a number of seconds above 0 or "off", got {resend_after!r}',
            "resend_after=2.0",
        )


def _task_faults(method: Method) -> Iterator[Fault]:
    """Yield the faults of the task that a call may become."""
    if method.task not in (None, True, "required") and not _is_amount(method.task):
        yield (
            f'task must be True, "required" or a number of seconds above 0, got {method.task!r}',
            "task=True",
        )
    if not _is_amount(method.task_ttl):
        yield (
            f"task_ttl must be a number of seconds above 0, got {method.task_ttl!r}",
            "task_ttl=3600",
        )
    if method.task is None:
        if method.hands_over:
            yield "its handler calls ctx.hand_over(), which needs a task", "task=True"
        return
    if "mcp" not in method.expose:
        yield (
            "only MCP has tasks, and the method is not served there",
            'drop task=, or expose=("rpc", "mcp")',
        )
    # Other processes see the row of a task before its handler continues, so not in an open
    # transaction.
    if method.terms.on_crash != "transactional":
        return
    if method.hands_over:
        yield (
            "its handler calls ctx.hand_over() inside its transaction, "
            "and a transaction is of the task as a whole",
            "drop ctx.hand_over(): with task=True the function becomes a task before it starts",
        )
    elif type(method.task) is float:
        yield (
            f"a transaction cannot become a task after {method.task:g} seconds, in its middle",
            "task=True",
        )


def _place_faults(method: Method, reserved: bool, tool_name: object) -> Iterator[Fault]:
    """Yield the faults of the places where a method is served, and of its name there."""
    if not method.expose or not {*method.expose} <= {*EVERYWHERE}:
        places = " and ".join(EVERYWHERE)
        yield (
            f"{method.expose!r}: a method is served as {places}, or as one of them",
            'expose=("rpc",)',
        )
    if "mcp" in method.expose and not reserved:
        yield from _tool_name_faults(method.tool_name, is_stated=tool_name is not None)
    if tool_name is not None and "mcp" not in method.expose:
        yield (
            "tool_name is a name for MCP clients, and the method is not served to them",
            "drop tool_name",
        )


def _tool_name_faults(name: object, *, is_stated: bool) -> Iterator[Fault]:
    fix = 'choose another: tool_name="..."'
    if not isinstance(name, str):
        yield f"tool_name must be a string, got {type(name).__name__}", 'tool_name="..."'
    elif len(name) > LONGEST_TOOL_NAME:
        yield (
            f"its MCP name {name!r} has {len(name)} characters, "
            f"and a tool's may have {LONGEST_TOOL_NAME}",
            fix,
        )
    elif is_stated and not _STATED_TOOL_NAME.fullmatch(name):
        yield (
            f"tool_name has 1 to {LONGEST_TOOL_NAME} of the characters A-Z, a-z, 0-9, _, - and ., "
            f"got {name!r}",
            fix,
        )


def _is_annotated(function: object, name: str) -> bool:
    while isinstance(function, partial):
        function = function.func
    return name in getattr(function, "__annotations__", {})


def _is_amount(value: object) -> bool:
    """Return whether a value is a number above 0 that every store can hold."""
    return (type(value) is int and 0 < value < 2**63) or (type(value) is float and value > 0)
