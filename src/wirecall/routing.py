"""The decorators of an app.

They declare methods, and for MCP prompts, resources, completions and methods of extensions.

1. A decorator registers the function it is given and returns it unchanged; `query`, `command`,
   `tool` and `prompt` work bare and with options. `QueryOptions`, `CommandOptions`, `ToolOptions`
   and `PromptOptions` list these options for people, for type checkers, and for `options.check`,
   which refuses all others. `Method` and `Terms` check the values.
2. A query reads, a command changes something. The annotations of a tool say which of them it is.
3. A command that shares the ledger's transactions can be declared only if the ledger has
   transactions.
4. A `Router` has the same decorators. It stores the declarations until an app includes it. Then the
   app's own decorators apply them, so options and errors are the app's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    ParamSpec,
    TypeAlias,
    TypedDict,
    TypeVar,
    Unpack,
    get_args,
    overload,
)

from msgspec import Struct

from wirecall.errors import UsageError
from wirecall.options import ACCEPTED, Explained, check, names
from wirecall.options import checks_options as checks
from wirecall.protocol.keys import place_of_key
from wirecall.protocol.messages import JsonObject
from wirecall.protocol.params import Find, place_of
from wirecall.server.identity import ScopeRule, scope_names, with_scopes
from wirecall.server.method import (
    EVERYWHERE,
    ArgumentRule,
    Execution,
    Exposed,
    KeyRule,
    Kind,
    Method,
    OnCrash,
    Registry,
    TaskRule,
    Terms,
    ToolAnnotations,
)

if TYPE_CHECKING:
    from wirecall.mcp.server.catalog import Catalog
    from wirecall.mcp.types import Icon
    from wirecall.server.providers import Providers

F = TypeVar("F", bound=Callable[..., object])
P = ParamSpec("P")
R = TypeVar("R")
Scope: TypeAlias = Literal["public", "private"]

# Options of decorators, apps and routers that must be strings.
TEXTS = frozenset(
    {
        "audit",
        "description",
        "instructions",
        "ledger",
        "mime_type",
        "name",
        "prefix",
        "title",
        "tool_name",
        "version",
        "website",
    }
)
# Options of one decorator that `Method` refuses for another, with a reason.
EXPLAINED = ("key", "key_at", "notification_allowed")

# Seconds (RFC 9111, section 1.2.2).
LONGEST_TTL = 2**31
TRANSACTIONAL = ("sqlite", "postgresql", "postgres")


def checks_options(function: Callable[P, R]) -> Callable[P, R]:
    """Raise a `UsageError` that names the right option for a wrong one of a decorator or an app."""
    return checks(function, _explained, TEXTS)


def _explained(called: str, name: str) -> Explained | None:
    """Return why a decorator lacks another one's option, and what to do.

    `Method` refuses some itself.
    """
    if name in EXPLAINED and called in NAMED:
        return ACCEPTED
    others = [
        verb
        for verb in NAMED
        if called in GUARDED and name in names(getattr(Declarations, verb).__wrapped__)
    ]
    if not others:
        return None
    return f"only {' and '.join(others)} can have it", f"drop it, or use @app.{others[0]}"


# --- the options of decorators --------------------------------------------------------------------


class PromptOptions(TypedDict, total=False):
    """The options of `@app.prompt`, which queries, commands and tools have too."""

    # The name for callers. The default is the name of the function.
    name: str | None
    # The name for people.
    title: str | None
    # The text about the function that models read. The default is the docstring.
    description: str | None
    # The scopes that a caller's token needs, or a function of the arguments that returns them.
    scopes: ScopeRule | None
    # Seconds for one call. By default there is no limit.
    timeout: float | None
    # True runs a plain function in a thread.
    blocking: bool
    # Pictures for people.
    icons: "Sequence[Icon]"
    # The `_meta` of the definition.
    meta: Mapping[str, Any] | None
    # Words to select by.
    tags: Sequence[str]


class CallOptions(PromptOptions, total=False):
    """The options that queries, commands and tools share."""

    # The name for MCP clients. The default is `name` with `_` for each character that is unsafe.
    tool_name: str | None
    # "sequential" or "parallel" execution in a batch. The default is that of the app.
    execution: Execution | None
    # Whether and when a call becomes a task: see `TaskRule`.
    task: TaskRule | None
    # Seconds that a task may run or wait for an answer. The default is 3600.
    task_ttl: float
    # Whether results are compared with their declared type. The default is: in development.
    check_result: bool | None
    # "lenient" takes arguments as models send them: "5" for an int. The default is that of the app.
    arguments: ArgumentRule | None


class HintOptions(TypedDict, total=False):
    """Where a method is offered, and the effects that it states."""

    # The protocols that offer it. The default is both, ("rpc", "mcp").
    expose: Sequence[Exposed]
    # Whether a call may destroy data.
    destructive: bool | None
    # Whether a repeated call has no additional effect.
    idempotent: bool | None
    # Whether a call reaches beyond the server.
    open_world: bool | None


class RetryOptions(TypedDict, total=False):
    """The rules of a command about its retries.

    `Terms` has the same fields with their defaults; docs/commands.md explains each.
    """

    on_crash: OnCrash
    retention: float
    lease: float
    wait: float
    loss_window: float
    resend_after: float | Literal["off"]
    max_stored_result: int
    reconcile: Callable[..., object] | None
    commit_point: bool
    record_params: bool


class QueryOptions(CallOptions, HintOptions, total=False):
    """The options of `@app.query`."""

    # True allows callers to send it without an id. The default is False.
    notification_allowed: bool


class CommandOptions(RetryOptions, CallOptions, HintOptions, total=False):
    """The options of `@app.command`."""

    # What happens to a call without an idempotency key: see `KeyRule`.
    key: KeyRule | None
    # A further place of the key among the params: "meta.idempotency-key". The default is the app's.
    key_at: str | None


class ToolOptions(CallOptions, RetryOptions, total=False):
    """The options of `@app.tool` besides its annotations."""

    # The JSON Schema of the arguments. The default is made from the signature.
    input_schema: JsonObject | None
    # The JSON Schema of the result. The default is made from the signature.
    output_schema: JsonObject | None
    # What happens to a call without an idempotency key: see `KeyRule`.
    key: KeyRule | None
    # A further place of the key among the arguments: "meta.idempotency-key". The default is the
    # app's.
    key_at: str | None


# --- the decorators -------------------------------------------------------------------------------


class Declarations:
    """The decorators of an app, and the registry they fill."""

    def __init__(
        self,
        ledger_scheme: str,
        *,
        checks_results: bool,
        arguments: ArgumentRule,
        key_at: str | None,
    ) -> None:
        self.registry = Registry()
        self._arguments = arguments
        self._key_at = key_at
        self.providers: Providers | None = None
        self._checks_results = checks_results
        self._ledger_scheme = ledger_scheme
        self._declared: list[Method] = []

    @overload
    def query(self, function: F, /) -> F: ...
    @overload
    def query(self, /, **options: Unpack[QueryOptions]) -> Callable[[F], F]: ...
    @checks_options
    def query(
        self, function: F | None = None, /, **options: Unpack[QueryOptions]
    ) -> F | Callable[[F], F]:
        """Register a function that reads.

        Works bare and with arguments; returns the function unchanged.
        """
        _check_use("query", function)
        return self._register(Kind.QUERY, function, {**options})

    @overload
    def command(self, function: F, /) -> F: ...
    @overload
    def command(self, /, **options: Unpack[CommandOptions]) -> Callable[[F], F]: ...
    @checks_options
    def command(
        self, function: F | None = None, /, **options: Unpack[CommandOptions]
    ) -> F | Callable[[F], F]:
        """Register a function that changes something, once per idempotency key.

        A call needs an id: a command cannot be sent as a notification.

        `key` decides about a call without one: "auto" generates a key, so that a repetition of a
        lost call is recognised; "required" refuses the call; "ask" makes the key an argument that
        the model fills in; "off" runs the call unprotected. The default is "auto", and "required"
        over JSON-RPC in production.

        With `record_params`, the ledger keeps the params of each call for operators, without those
        that are `Secret`.
        """
        _check_use("command", function)
        return self._register_command(function, {**options})

    @overload
    def tool(self, function: F, /) -> F: ...
    @overload
    def tool(
        self, /, *, annotations: ToolAnnotations = ..., **options: Unpack[ToolOptions]
    ) -> Callable[[F], F]: ...
    @checks_options
    def tool(
        self,
        function: F | None = None,
        /,
        *,
        annotations: ToolAnnotations | None = None,
        **options: Unpack[ToolOptions],
    ) -> F | Callable[[F], F]:
        """Register a tool for MCP alone.

        Its kind follows from its annotations: a read-only tool is a query.
        """
        _check_use("tool", function)
        stated = annotations or ToolAnnotations()
        if not isinstance(stated, ToolAnnotations):
            raise UsageError(
                f"annotations must be ToolAnnotations, got {type(stated).__name__}.",
                fix="use annotations=ToolAnnotations(readOnlyHint=True)",
            )
        declared = {
            **options,
            "title": options.get("title") or stated.title,
            "destructive": stated.destructiveHint,
            "idempotent": stated.idempotentHint,
            "open_world": stated.openWorldHint,
            "expose": ("mcp",),
        }
        if stated.readOnlyHint:
            _check_reader(stated, declared)
            return self._register(Kind.QUERY, function, declared)
        return self._register_command(function, declared)

    @checks_options
    def resource(
        self,
        uri: str,
        /,
        *,
        name: str | None = None,
        title: str | None = None,
        description: str | None = None,
        mime_type: str | None = None,
        ttl: float = 0,
        scope: Scope = "private",
        scopes: ScopeRule | None = None,
        timeout: float | None = None,
        blocking: bool = False,
        icons: "Sequence[Icon]" = (),
        meta: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
    ) -> Callable[[F], F]:
        """Register a function that returns the resource at a URI.

        A `{name}` in the URI is a parameter of the function.

        `ttl` is how many seconds a client may cache the contents (2026-07-28). With
        `scope="public"` caches may share them among all callers, unless the app has `auth` or
        `authenticate`. `scopes` are those that a reader's token needs, or a function of the names
        in the URI that returns them.
        """
        _check_use("resource", uri)
        kept = milliseconds(f"ttl of {uri}", ttl)
        if scope not in get_args(Scope):
            raise UsageError(
                f"scope of {uri} must be one of {', '.join(get_args(Scope))}, got {scope!r}."
            )

        def register(function: F) -> F:
            declared = {
                "title": title,
                "description": description,
                "timeout": timeout,
                "blocking": blocking,
                "scopes": scopes,
                **_labels(uri, {"icons": icons, "meta": meta, "tags": tags}),
            }
            method = self._query(function, f"resources/read:{uri}", declared)
            is_public = scope == "public"
            self.catalog().add_resource(
                method, uri, name or function.__name__, mime_type, ttl_ms=kept, is_public=is_public
            )
            return function

        return register

    @overload
    def prompt(self, function: F, /) -> F: ...
    @overload
    def prompt(self, /, **options: Unpack[PromptOptions]) -> Callable[[F], F]: ...
    @checks_options
    def prompt(
        self, function: F | None = None, /, **options: Unpack[PromptOptions]
    ) -> F | Callable[[F], F]:
        """Register a prompt: a function from strings to a string, a `Message`, or several."""
        _check_use("prompt", function)
        declared: JsonObject = {**options}
        name = declared.pop("name", None)

        def register(function: F) -> F:
            called = name or function.__name__
            described = declared | _labels(called, declared)
            method = self._query(function, f"prompts/get:{called}", described)
            self.catalog().add_prompt(method, called)
            return function

        return register if function is None else register(function)

    @checks_options
    def completion(self, of: str, argument: str, /) -> Callable[[F], F]:
        """Register a function that completes an argument.

        The argument is one of a registered prompt, or of the URI of a registered resource.

        The function takes the text typed so far and, as an optional second parameter, the known
        arguments.
        """

        def register(function: F) -> F:
            method = self._query(function, f"completion/complete:{of}:{argument}", {})
            self.catalog().add_completion(method, of, argument)
            return function

        return register

    @checks_options
    def extension_method(
        self,
        name: str,
        /,
        *,
        extension: str,
        scopes: ScopeRule | None = None,
        timeout: float | None = None,
        blocking: bool = False,
    ) -> Callable[[F], F]:
        """Register a function as a method of an MCP extension.

        The method is for the clients that declare the extension. The params of the request are the
        function's parameters, and its result is an object: a dict, a Struct, a dataclass.
        `App(extensions=...)` declares the extension. Keys and the ledger are for commands: a
        function that changes something runs each time its request is sent.
        """

        def register(function: F) -> F:
            method = self._query(
                function, name, {"timeout": timeout, "blocking": blocking, "scopes": scopes}
            )
            kind = method.signature.result_schema.get("type", "object")
            if kind not in ("object", "null"):
                raise UsageError(
                    f"{name!r} returns {kind}, not an object.",
                    "every result of MCP is an object",
                    "return a dict or a Struct",
                )
            self.catalog().add_method(method, extension)
            return function

        return register

    @overload
    def provide(self, function: F, /) -> F: ...
    @overload
    def provide(self, /, *, blocking: bool = False) -> Callable[[F], F]: ...
    @checks_options
    def provide(
        self, function: F | None = None, /, *, blocking: bool = False
    ) -> F | Callable[[F], F]:
        """Register a function that makes values of its return type.

        They are for the handlers that take a parameter of that type. The function may be a
        coroutine function, or a generator that yields one value and then cleans up. It may take a
        `Context` and other provided types. It makes one value per call. `blocking=True` runs a
        plain function in a thread.
        """

        def register(function: F) -> F:
            self._check_open()
            # Late: few apps have providers.
            from wirecall.server.providers import Provider, Providers

            provider = Provider(function, blocking=blocking)
            self.providers = self.providers or Providers()
            self.providers.add(provider)
            # A parameter that was already read as the caller's would stay the caller's.
            for method in self._declared:
                for parameter in method.signature.parameters:
                    if self.providers.find(parameter.type) is not None:
                        raise UsageError(
                            f"The provider {provider} comes too late.",
                            f"{method.name} at {place_of(method.function)} has a parameter "
                            f"{parameter.name} of its type, which callers can fill",
                            "register the provider before the methods that use it",
                        )
            return function

        return register if function is None else register(function)

    @checks_options
    def include(
        self,
        router: "Router",
        /,
        *,
        prefix: str = "",
        tags: Sequence[str] = (),
        scopes: str | Sequence[str] = (),
    ) -> None:
        """Declare everything that a router has.

        `prefix` comes before the router's own; `tags` and `scopes` are added to those of each
        declaration.
        """
        if not isinstance(router, Router):
            raise UsageError(
                f"include() takes a Router, got {type(router).__name__}.",
                fix="declare the part with router = Router(), and use app.include(router)",
            )
        self._include(Inclusion(router, prefix, tags, scope_names("scopes of include", scopes)))

    def _include(self, inclusion: "Inclusion") -> None:
        for each in inclusion.declarations():
            getattr(self, each.verb)(*each.args, **each.options)(each.function)

    def catalog(self) -> "Catalog":
        """Return the prompts, resources and completions.

        `App`, which knows MCP's server, makes them.
        """
        raise NotImplementedError

    # --- registering ------------------------------------------------------------------------------

    def _register(
        self, kind: Kind, function: F | None, declared: JsonObject
    ) -> F | Callable[[F], F]:
        # Results are compared with their declared type: always in development, else on request.
        stated = declared.pop("check_result", None)
        if stated not in (None, True, False):
            raise UsageError(f"check_result must be True or False, got {stated!r}.")
        check_result = self._checks_results if stated is None else stated
        if isinstance(expose := declared.get("expose"), str):
            raise UsageError(
                f"expose must be a tuple, got {expose!r}.", fix=f"use expose=({expose!r},)"
            )

        # Only tools have lenient arguments, and the app may have other methods.
        if declared.get("arguments") is None:
            declared["arguments"] = "strict"
            if "mcp" in declared.get("expose", EVERYWHERE):
                declared["arguments"] = self._arguments

        def register(function: F) -> F:
            self._check_open()
            labels = _labels(
                str(declared.get("name") or getattr(function, "__name__", "")), declared
            )
            options = (
                declared
                | labels
                | {"check_result": check_result, "in_development": self._checks_results}
            )
            method = Method(function, kind, find=self._find, **options)
            self.registry.add(method)
            self._declare(method)
            return function

        return register if function is None else register(function)

    def _register_command(self, function: F | None, declared: JsonObject) -> F | Callable[[F], F]:
        """Register a command; the terms are taken out of its declaration."""
        terms = Terms(
            **{field: declared.pop(field) for field in Terms.__struct_fields__ if field in declared}
        )
        check_transactional(terms, self._ledger_scheme)
        if declared.get("key_at") is None:
            declared["key_at"] = self._key_at
        return self._register(Kind.COMMAND, function, {**declared, "terms": terms})

    def _query(self, function: Callable[..., object], name: str, declared: JsonObject) -> Method:
        self._check_open()
        method = Method(
            function,
            Kind.QUERY,
            name=name,
            expose=("mcp",),
            reserved=True,
            find=self._find,
            **declared,
        )
        self._declare(method)
        return method

    def _check_open(self) -> None:
        """Raise `UsageError` if a declaration comes too late."""

    @property
    def _find(self) -> Find | None:
        return None if self.providers is None else self.providers.find

    def _declare(self, method: Method) -> None:
        """Store a method for the providers.

        Later providers check it, and the app prepares it at start.
        """
        self._declared.append(method)
        if self._is_serving and self.providers is not None:
            method.prepare(self.providers)

    def _prepare(self) -> None:
        """Plan how the provided arguments of all methods are made, before the first call."""
        if self.providers is not None:
            self.providers.check()
            for method in self._declared:
                method.prepare(self.providers)

    @property
    def _is_serving(self) -> bool:
        return False

    def _use_ledger(self, scheme: str) -> None:
        """Replace the ledger, and check that all declared commands suit it."""
        # They were checked against the app's own ledger; `wirecall serve --ledger` may name
        # another.
        for method in (*self.registry.methods.values(), *self.registry.tools.values()):
            check_transactional(method.terms, scheme)
        self._ledger_scheme = scheme


def _check_use(verb: str, first: object) -> None:
    """Check the first argument of a decorator.

    A resource has a URI there, all others the function or nothing.
    """
    if verb == "resource" and not isinstance(first, str):
        raise UsageError("@resource needs a URI.", fix='use @app.resource("shop://articles/{sku}")')
    if verb in NAMED and first is not None and not callable(first):
        why = "the options of a decorator are passed by name"
        raise UsageError(
            f"@{verb}({first!r}): expected a function.", why, f"use @app.{verb}(name=...)"
        )


def _check_reader(stated: ToolAnnotations, declared: JsonObject) -> None:
    """Refuse a read-only tool whose hints or options contradict that (T2)."""
    retries = [field for field in Terms.__struct_fields__ if field in declared]
    if stated.destructiveHint:
        why = "a tool that only reads cannot be destructive"
        fix = "drop one of the hints"
    elif stated.idempotentHint is False:
        why = "a tool that only reads can be repeated"
        fix = "drop idempotentHint"
    elif retries:
        why = f"{', '.join(retries)}: only for a tool that changes something"
        fix = "drop it"
    else:
        return
    raise UsageError(f"{stated!r} contradicts itself.", why, fix)


def _labels(what: str, declared: JsonObject) -> JsonObject:
    """Check the icons, tags and `_meta` of a declaration, and return them as MCP sends them."""
    icons = declared.get("icons", ())
    meta = declared.get("meta")
    tags = declared.get("tags", ())
    if not icons and not meta and not tags:
        return {"icons": (), "meta": None, "tags": ()}
    # Late: `import wirecall` stays light.
    from wirecall.mcp.types import TAGS_META, checked_icons, checked_meta

    whole = checked_meta(what, meta, tags)
    return {"icons": checked_icons(what, icons), "meta": whole, "tags": whole.get(TAGS_META, ())}


# The decorators whose name takes a prefix, those that take tags, and those that take scopes.
NAMED = ("query", "command", "tool", "prompt")
TAGGED = (*NAMED, "resource")
GUARDED = (*TAGGED, "extension_method")


class Declaration(Struct, frozen=True):
    """A function and the decorator that declares it."""

    verb: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    function: Callable[..., object]

    @property
    def name(self) -> str:
        return self.options.get("name") or str(getattr(self.function, "__name__", ""))


class Inclusion(Struct, frozen=True):
    """A router inside an app or another router."""

    router: "Router"
    prefix: str
    tags: Sequence[str]
    scopes: Sequence[str]

    def declarations(
        self, prefix: str = "", tags: Sequence[str] = (), scopes: Sequence[str] = ()
    ) -> Iterator[Declaration]:
        """Yield every declaration of the router.

        The arguments are those of the inclusions around this one.
        """
        return self.router.declarations(
            prefix + self.prefix, (*tags, *self.tags), (*scopes, *self.scopes)
        )


def _kept(verb: str) -> Callable[..., Any]:
    """Return a decorator of a router, which stores a declaration with the verb."""

    declare = getattr(Declarations, verb).__wrapped__

    def decorate(self: "Router", *args: Any, **options: Any) -> Any:
        check(declare, (self, *args), options, _explained, TEXTS)
        _check_use(verb, args[0] if args else None)

        def keep(function: F) -> F:
            self._keep(Declaration(verb, args, options, function))
            return function

        if args and callable(args[0]):  # used bare; the arguments of other decorators are strings
            function = args[0]
            args = ()
            return keep(function)
        return keep

    return decorate


class Router(Declarations):
    """Methods, tools, resources, prompts and providers of one part of an app.

    `app.include(router)` declares them. `prefix` comes before the names of methods, tools and
    prompts: `Router(prefix="orders.")`. URIs stay as they are. `key_at` is a further place of the
    keys of its commands.

    >>> orders = Router(prefix="orders.")
    >>> @orders.query
    ... def count(customer: str) -> int:
    ...     return len(customer)
    >>> app = App("shop")
    >>> app.include(orders)
    >>> app.handle_sync(b'{"jsonrpc":"2.0","method":"orders.count","params":["ada"],"id":1}')
    b'{"jsonrpc":"2.0","result":3,"id":1}'
    """

    @checks_options
    def __init__(self, *, prefix: str = "", key_at: str | None = None) -> None:
        # Not `super().__init__`: a router has no registry.
        self.prefix = prefix
        if key_at is not None:
            place_of_key(key_at)
        self.key_at = key_at
        self._content: list[Declaration | Inclusion] = []
        self._is_included = False

    if not TYPE_CHECKING:  # the signatures are those of the app's decorators
        query = _kept("query")
        command = _kept("command")
        tool = _kept("tool")
        prompt = _kept("prompt")
        resource = _kept("resource")
        extension_method = _kept("extension_method")
        completion = _kept("completion")
        provide = _kept("provide")

    def declarations(
        self, prefix: str = "", tags: Sequence[str] = (), scopes: Sequence[str] = ()
    ) -> Iterator[Declaration]:
        """Yield every declaration, including those of nested routers, as an app takes it."""
        self._is_included = True
        prefix += self.prefix
        prompts = {
            each.name
            for each in self._content
            if isinstance(each, Declaration) and each.verb == "prompt"
        }
        for each in self._content:
            if isinstance(each, Inclusion):
                for inner in each.declarations(prefix, tags, scopes):
                    yield self._with_key_place(inner)
                continue
            args = each.args
            options = dict(each.options)
            if prefix and each.verb in NAMED:
                options["name"] = prefix + each.name
            if each.verb == "completion" and args[0] in prompts:
                args = (prefix + args[0], *args[1:])
            if tags and each.verb in TAGGED:
                options["tags"] = [*tags, *options.get("tags", ())]
            if scopes and each.verb in GUARDED:
                options["scopes"] = with_scopes(options.get("scopes"), scopes)
            yield self._with_key_place(Declaration(each.verb, args, options, each.function))

    def _with_key_place(self, declaration: Declaration) -> Declaration:
        """Return a declaration with the place of keys of this router, if it has none."""
        options = declaration.options
        stated = options.get("annotations")
        is_command = declaration.verb == "command" or (
            declaration.verb == "tool" and not (stated and stated.readOnlyHint)
        )
        if self.key_at is None or not is_command or options.get("key_at") is not None:
            return declaration
        placed = {**options, "key_at": self.key_at}
        return Declaration(declaration.verb, declaration.args, placed, declaration.function)

    def _include(self, inclusion: Inclusion) -> None:
        if inclusion.router is self or inclusion.router._contains(self):
            raise UsageError(
                "A router cannot include itself.",
                "directly or through another one",
                "drop one of the includes",
            )
        self._keep(inclusion)

    def _contains(self, router: "Router") -> bool:
        inner = [each.router for each in self._content if isinstance(each, Inclusion)]
        return any(each is router or each._contains(router) for each in inner)

    def _keep(self, content: Declaration | Inclusion) -> None:
        if self._is_included:
            raise UsageError(
                "The router is included already.",
                "the app would not see a later declaration",
                "include it afterwards",
            )
        self._content.append(content)


def milliseconds(option: str, seconds: object) -> int:
    """Return a cache time as MCP writes it. Raises `UsageError` if it is not a time."""
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, (int, float))
        or not 0 <= seconds <= LONGEST_TTL
    ):
        raise UsageError(
            f"{option} must be a number of seconds from 0 to {LONGEST_TTL}, got {seconds!r}.",
            fix="use 0 if clients must not keep it",
        )
    return round(seconds * 1000)


def check_transactional(terms: Terms, scheme: str) -> None:
    if terms.on_crash == "transactional" and scheme not in TRANSACTIONAL:
        raise UsageError(
            'on_crash="transactional" needs a ledger that shares transactions.',
            f"this app's ledger is {scheme}:",
            'use ledger="sqlite:PATH" or ledger="postgresql://..."',
        )
