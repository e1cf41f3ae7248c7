"""The decorators of an app: its methods, and for MCP clients its prompts, resources, completions and methods of extensions.

1. A decorator registers the function it is given and returns it unchanged; `query`, `command`, `tool` and `prompt` work bare
   and with arguments. The overloads name every argument with its default, for people, for type checkers, and for
   `check_options`, which refuses all others. The arguments arrive as one dict; `Method` and `Terms` check their values.
2. A query reads, a command changes something. The annotations of a tool say which of them it is.
3. A command that shares the ledger's transactions can be declared only if the ledger has transactions.
4. A `Router` has the same decorators. It keeps the declarations until an app includes it, and the app's own decorators take
   them then: every option, and every error about one, is the app's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeAlias, TypeVar, get_args, get_overloads, overload

from msgspec import Struct

from wirecall.errors import UsageError
from wirecall.protocol.messages import JsonObject
from wirecall.protocol.params import Find, place_of
from wirecall.server.identity import ScopeRule, scope_names, with_scopes
from wirecall.server.method import (
    EVERYWHERE,
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

# Options that are texts, of decorators, apps and routers alike.
TEXTS = frozenset(
    {"audit", "description", "instructions", "ledger", "mime_type", "name", "prefix", "title", "version", "website"}
)
# Options of one decorator that `Method` refuses of another, with its reason.
EXPLAINED = ("key", "notification_allowed")

LONGEST_TTL = 2**31  # seconds (RFC 9111, section 1.2.2)
TRANSACTIONAL = ("sqlite", "postgresql", "postgres")


def checks_options(function: Callable[P, R]) -> Callable[P, R]:
    """Make a wrong option of a function a `UsageError` that names the right one. Python's `TypeError` does not name it."""

    @wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        check_options(function, args, options)
        return function(*args, **options)

    return checked


def check_options(function: Any, args: Sequence[object], options: Mapping[str, object]) -> None:
    """Raise `UsageError` for an option that a function does not have, that has no name, or that must be a text."""
    known, code = _options(function), function.__code__
    called = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    if len(args) > code.co_argcount and known:
        first = next(name for name in known if name not in code.co_varnames[: code.co_argcount])
        raise UsageError(f"{called}() takes its options by name.", fix=f"use {first}={args[code.co_argcount]!r:.100}")
    for name, value in options.items():
        if name in TEXTS and name in known and not (value is None or isinstance(value, str)):
            raise UsageError(f"{called}(): {name} must be a text, got {type(value).__name__}.", fix=f'use {name}="..."')
        if name in known or (name in EXPLAINED and called in NAMED):
            continue
        from difflib import get_close_matches  # late: mistakes are rare

        why = fix = ""
        others = [verb for verb in NAMED if called in GUARDED and name in _options(getattr(Declarations, verb).__wrapped__)]
        if name in code.co_varnames[: code.co_posonlyargcount]:
            fix = "pass it first, without its name"
        elif others:
            why, fix = f"only {' and '.join(others)} can have it", f"drop it, or use @app.{others[0]}"
        elif meant := get_close_matches(name, known, 1):
            fix = f"use {meant[0]}="
        raise UsageError(f"{called}() has no option {name!r}.", why, fix)


def _options(function: Any) -> Sequence[str]:
    """Return the names by which arguments of a function can be passed; those of its last overload, if it has any."""
    code = (get_overloads(function) or [function])[-1].__code__
    names: Sequence[str] = code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]
    return names


class Declarations:
    """The decorators of an app, and the registry they fill."""

    def __init__(self, ledger_scheme: str, *, checks_results: bool) -> None:
        self.registry = Registry()
        self.providers: Providers | None = None
        self._checks_results = checks_results
        self._ledger_scheme = ledger_scheme
        self._declared: list[Method] = []

    @overload
    def query(self, function: F, /) -> F: ...
    @overload
    def query(
        self,
        /,
        *,
        name: str | None = None,
        title: str | None = None,
        description: str | None = None,
        expose: Sequence[Exposed] = EVERYWHERE,
        notification_allowed: bool = False,
        timeout: float | None = None,
        blocking: bool = False,
        execution: Execution | None = None,
        task: TaskRule | None = None,
        task_ttl: float = 3600,
        scopes: ScopeRule | None = None,
        check_result: bool | None = None,
        icons: "Sequence[Icon]" = (),
        meta: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        destructive: bool | None = None,
        idempotent: bool | None = None,
        open_world: bool | None = None,
    ) -> Callable[[F], F]: ...
    @checks_options
    def query(self, function: F | None = None, /, **declared: Any) -> F | Callable[[F], F]:
        """Register a function that reads. Works bare and with arguments; the function stays as it is."""
        _check_use("query", function)
        return self._register(Kind.QUERY, function, declared)

    @overload
    def command(self, function: F, /) -> F: ...
    @overload
    def command(
        self,
        /,
        *,
        on_crash: OnCrash = "unknown",
        retention: float = 86_400,
        lease: float = 30,
        wait: float = 25,
        loss_window: float = 120,
        max_stored_result: int = 262_144,
        reconcile: Callable[..., object] | None = None,
        commit_point: bool = False,
        name: str | None = None,
        title: str | None = None,
        description: str | None = None,
        expose: Sequence[Exposed] = EVERYWHERE,
        key: KeyRule | None = None,
        timeout: float | None = None,
        blocking: bool = False,
        execution: Execution | None = None,
        task: TaskRule | None = None,
        task_ttl: float = 3600,
        scopes: ScopeRule | None = None,
        check_result: bool | None = None,
        icons: "Sequence[Icon]" = (),
        meta: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        destructive: bool | None = None,
        idempotent: bool | None = None,
        open_world: bool | None = None,
    ) -> Callable[[F], F]: ...
    @checks_options
    def command(self, function: F | None = None, /, **declared: Any) -> F | Callable[[F], F]:
        """Register a function that changes something: it needs an id, and takes effect once per idempotency key.

        `key` says what becomes of a call without one: "auto" generates a key, so that a repetition of a lost call is
        recognised; "required" refuses the call; "ask" makes the key an argument that the model fills in; "off" runs the
        call unprotected. By default it is "auto", and "required" over JSON-RPC in production.
        """
        _check_use("command", function)
        terms = self._terms(declared)
        return self._register(Kind.COMMAND, function, {**declared, "terms": terms})

    @overload
    def tool(self, function: F, /) -> F: ...
    @overload
    def tool(
        self,
        /,
        *,
        annotations: ToolAnnotations = ...,
        name: str | None = None,
        title: str | None = None,
        description: str | None = None,
        input_schema: JsonObject | None = None,
        output_schema: JsonObject | None = None,
        key: KeyRule | None = None,
        on_crash: OnCrash = "unknown",
        retention: float = 86_400,
        lease: float = 30,
        wait: float = 25,
        loss_window: float = 120,
        max_stored_result: int = 262_144,
        reconcile: Callable[..., object] | None = None,
        commit_point: bool = False,
        timeout: float | None = None,
        blocking: bool = False,
        execution: Execution | None = None,
        task: TaskRule | None = None,
        task_ttl: float = 3600,
        scopes: ScopeRule | None = None,
        check_result: bool | None = None,
        icons: "Sequence[Icon]" = (),
        meta: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
    ) -> Callable[[F], F]: ...
    @checks_options
    def tool(
        self, function: F | None = None, /, *, annotations: ToolAnnotations | None = None, **declared: Any
    ) -> F | Callable[[F], F]:
        """Register a tool for MCP alone. Its kind follows from its annotations: a read-only tool is a query."""
        _check_use("tool", function)
        stated = annotations or ToolAnnotations()
        if not isinstance(stated, ToolAnnotations):
            raise UsageError(
                f"annotations must be ToolAnnotations, got {type(stated).__name__}.",
                fix="use annotations=ToolAnnotations(readOnlyHint=True)",
            )
        # A tool whose hints contradict each other is refused (T2).
        retries = [field for field in Terms.__struct_fields__ if field in declared]
        for wrong, why, fix in (
            (stated.destructiveHint, "a tool that only reads cannot be destructive", "drop one of the hints"),
            (stated.idempotentHint is False, "a tool that only reads can be repeated", "drop idempotentHint"),
            (retries, f"{', '.join(retries)}: only for a tool that changes something", "drop it"),
        ):
            if stated.readOnlyHint and wrong:
                raise UsageError(f"{stated!r} contradicts itself.", why, fix)
        declared["title"] = declared.get("title") or stated.title
        hints = {
            "destructive": stated.destructiveHint,
            "idempotent": stated.idempotentHint,
            "open_world": stated.openWorldHint,
        }
        declared = {**declared, **hints, "expose": ("mcp",)}
        if stated.readOnlyHint:
            return self._register(Kind.QUERY, function, declared)
        terms = self._terms(declared)
        return self._register(Kind.COMMAND, function, {**declared, "terms": terms})

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
        """Register a function that returns the resource at a URI. A `{name}` in the URI is a parameter of the function.

        `ttl` are the seconds for which a client may keep the contents (2026-07-28). With `scope="public"` caches may share
        them among all callers, unless the app has `auth` or `authenticate`. `scopes` are those that a reader's token needs,
        or a function of the names in the URI that returns them.
        """
        _check_use("resource", uri)
        kept = milliseconds(f"ttl of {uri}", ttl)
        if scope not in get_args(Scope):
            raise UsageError(f"scope of {uri} must be one of {', '.join(get_args(Scope))}, got {scope!r}.")

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
            self.catalog().add_resource(method, uri, name or function.__name__, mime_type, ttl_ms=kept, is_public=is_public)
            return function

        return register

    @overload
    def prompt(self, function: F, /) -> F: ...
    @overload
    def prompt(
        self,
        /,
        *,
        name: str | None = None,
        title: str | None = None,
        description: str | None = None,
        scopes: ScopeRule | None = None,
        timeout: float | None = None,
        blocking: bool = False,
        icons: "Sequence[Icon]" = (),
        meta: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
    ) -> Callable[[F], F]: ...
    @checks_options
    def prompt(self, function: F | None = None, /, *, name: str | None = None, **declared: Any) -> F | Callable[[F], F]:
        """Register a prompt: a function from texts to a text, a `Message`, or several."""
        _check_use("prompt", function)

        def register(function: F) -> F:
            called = name or function.__name__
            self.catalog().add_prompt(
                self._query(function, f"prompts/get:{called}", declared | _labels(called, declared)), called
            )
            return function

        return register if function is None else register(function)

    @checks_options
    def completion(self, of: str, argument: str, /) -> Callable[[F], F]:
        """Register a function that completes an argument of a registered prompt, or of the URI of a registered resource.

        The function takes the text typed so far and, if it has a second parameter, the arguments that are known already.
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
        """Register a function as a method of an MCP extension, for the clients that declare the extension.

        The params of the request are the function's parameters, and its result is an object: a dict, a Struct, a dataclass.
        `App(extensions=...)` declares the extension. Keys and the ledger are for commands: a function that changes something
        runs once for each request, as often as that is sent.
        """

        def register(function: F) -> F:
            method = self._query(function, name, {"timeout": timeout, "blocking": blocking, "scopes": scopes})
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
    def provide(self, function: F | None = None, /, *, blocking: bool = False) -> F | Callable[[F], F]:
        """Register a function that makes values of its return type, for the handlers that take a parameter of that type.

        It may be a coroutine function, or a generator of one value whose rest is the clean-up. It may take a `Context` and
        other provided types. It makes one value per call. `blocking=True` runs a plain function in a thread.
        """

        def register(function: F) -> F:
            from wirecall.server.providers import Provider, Providers  # late: few apps have providers

            provider = Provider(function, blocking=blocking)
            self.providers = self.providers or Providers()
            self.providers.add(provider)
            # A parameter that was read as the caller's before would stay the caller's.
            for method in self._declared:
                for parameter in method.signature.parameters:
                    if self.providers.find(parameter.type) is not None:
                        raise UsageError(
                            f"The provider {provider} comes too late.",
                            f"{method.name} at {place_of(method.function)} has a parameter {parameter.name} of its type, "
                            "which callers can fill",
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

        `prefix` comes before the router's own; `tags` and `scopes` are added to those of each declaration.
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
        """Return the prompts, resources and completions; `App`, which knows MCP's server, makes them."""
        raise NotImplementedError

    # --- registering -------------------------------------------------------------------------------------------------

    def _register(self, kind: Kind, function: F | None, declared: JsonObject) -> F | Callable[[F], F]:
        # A result that does not fit its declared type is found where it is made: in development always, else on request.
        stated = declared.pop("check_result", None)
        if stated not in (None, True, False):
            raise UsageError(f"check_result must be True or False, got {stated!r}.")
        check_result = self._checks_results if stated is None else stated
        if isinstance(expose := declared.get("expose"), str):
            raise UsageError(f"expose must be a tuple, got {expose!r}.", fix=f"use expose=({expose!r},)")

        def register(function: F) -> F:
            labels = _labels(str(declared.get("name") or getattr(function, "__name__", "")), declared)
            method = Method(function, kind, check_result=check_result, find=self._find, **declared | labels)
            self.registry.add(method)
            self._declare(method)
            return function

        return register if function is None else register(function)

    def _query(self, function: Callable[..., object], name: str, declared: JsonObject) -> Method:
        method = Method(function, Kind.QUERY, name=name, expose=("mcp",), reserved=True, find=self._find, **declared)
        self._declare(method)
        return method

    @property
    def _find(self) -> Find | None:
        return None if self.providers is None else self.providers.find

    def _declare(self, method: Method) -> None:
        """Keep a method for the providers: a later one looks at it, and the start of the app prepares it."""
        self._declared.append(method)
        if self._is_serving and self.providers is not None:
            method.prepare(self.providers)

    def _prepare(self) -> None:
        """Find out how the provided arguments of all methods are made, before the first call."""
        if self.providers is not None:
            self.providers.check()
            for method in self._declared:
                method.prepare(self.providers)

    @property
    def _is_serving(self) -> bool:
        return False

    def _terms(self, declared: JsonObject) -> Terms:
        """Take the terms of a command out of its declaration."""
        terms = Terms(**{field: declared.pop(field) for field in Terms.__struct_fields__ if field in declared})
        _check_transactional(terms, self._ledger_scheme)
        return terms

    def _use_ledger(self, scheme: str) -> None:
        """Replace the ledger, and check that all declared commands suit it."""
        # They were checked against the app's own ledger; `wirecall serve --ledger` may name another.
        for method in (*self.registry.methods.values(), *self.registry.tools.values()):
            _check_transactional(method.terms, scheme)
        self._ledger_scheme = scheme


def _check_use(verb: str, first: object) -> None:
    """Check the first argument of a decorator: a resource has a URI there, all others the function or nothing."""
    if verb == "resource" and not isinstance(first, str):
        raise UsageError("@resource needs a URI.", fix='use @app.resource("shop://articles/{sku}")')
    if verb in NAMED and first is not None and not callable(first):
        why = "the options of a decorator are passed by name"
        raise UsageError(f"@{verb}({first!r}): expected a function.", why, f"use @app.{verb}(name=...)")


def _labels(what: str, declared: JsonObject) -> JsonObject:
    """Return the icons, tags and `_meta` of a declaration as MCP sends them, checked."""
    icons, meta, tags = declared.get("icons", ()), declared.get("meta"), declared.get("tags", ())
    if not icons and not meta and not tags:
        return {"icons": (), "meta": None, "tags": ()}
    from wirecall.mcp.types import TAGS_META, checked_icons, checked_meta  # late: `import wirecall` stays light

    whole = checked_meta(what, meta, tags)
    return {"icons": checked_icons(what, icons), "meta": whole, "tags": whole.get(TAGS_META, ())}


# The decorators: those with a name that a prefix changes, those that take tags, and those that take scopes.
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

    def declarations(self, prefix: str = "", tags: Sequence[str] = (), scopes: Sequence[str] = ()) -> Iterator[Declaration]:
        """Yield every declaration of the router; the arguments are those of the inclusions around this one."""
        return self.router.declarations(prefix + self.prefix, (*tags, *self.tags), (*scopes, *self.scopes))


def _kept(verb: str) -> Callable[..., Any]:
    """Return a decorator of a router: it keeps a declaration with the verb."""

    declare = getattr(Declarations, verb).__wrapped__

    def decorate(self: "Router", *args: Any, **options: Any) -> Any:
        check_options(declare, (self, *args), options)
        _check_use(verb, args[0] if args else None)

        def keep(function: F) -> F:
            self._keep(Declaration(verb, args, options, function))
            return function

        if args and callable(args[0]):  # used bare; the arguments of other decorators are texts
            function, args = args[0], ()
            return keep(function)
        return keep

    return decorate


class Router(Declarations):
    """Methods, tools, resources, prompts and providers of one part of an app: `app.include(router)` declares them.

    `prefix` comes before the names of methods, tools and prompts: `Router(prefix="orders.")`. URIs stay as they are.
    """

    @checks_options
    def __init__(self, *, prefix: str = "") -> None:
        # Not `super().__init__`: a router has no registry.
        self.prefix = prefix
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

    def declarations(self, prefix: str = "", tags: Sequence[str] = (), scopes: Sequence[str] = ()) -> Iterator[Declaration]:
        """Yield every declaration, those of routers inside this one too, as an app takes it."""
        self._is_included = True
        prefix += self.prefix
        prompts = {each.name for each in self._content if isinstance(each, Declaration) and each.verb == "prompt"}
        for each in self._content:
            if isinstance(each, Inclusion):
                yield from each.declarations(prefix, tags, scopes)
                continue
            args, options = each.args, dict(each.options)
            if prefix and each.verb in NAMED:
                options["name"] = prefix + each.name
            if each.verb == "completion" and args[0] in prompts:
                args = (prefix + args[0], *args[1:])
            if tags and each.verb in TAGGED:
                options["tags"] = [*tags, *options.get("tags", ())]
            if scopes and each.verb in GUARDED:
                options["scopes"] = with_scopes(options.get("scopes"), scopes)
            yield Declaration(each.verb, args, options, each.function)

    def _include(self, inclusion: Inclusion) -> None:
        if inclusion.router is self or inclusion.router._contains(self):
            raise UsageError(
                "A router cannot include itself.", "directly or through another one", "drop one of the includes"
            )
        self._keep(inclusion)

    def _contains(self, router: "Router") -> bool:
        inner = [each.router for each in self._content if isinstance(each, Inclusion)]
        return any(each is router or each._contains(router) for each in inner)

    def _keep(self, content: Declaration | Inclusion) -> None:
        if self._is_included:
            raise UsageError(
                "The router is included already.", "the app would not hear of a later declaration", "include it afterwards"
            )
        self._content.append(content)


def milliseconds(option: str, seconds: object) -> int:
    """Return a time for which a client may keep something, as MCP writes it. Raises `UsageError` if it is not a time."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds <= LONGEST_TTL:
        raise UsageError(
            f"{option} must be a number of seconds from 0 to {LONGEST_TTL}, got {seconds!r}.",
            fix="use 0 if clients must not keep it",
        )
    return round(seconds * 1000)


def _check_transactional(terms: Terms, scheme: str) -> None:
    if terms.on_crash == "transactional" and scheme not in TRANSACTIONAL:
        raise UsageError(
            'on_crash="transactional" needs a ledger that shares transactions.',
            f"this app's ledger is {scheme}:",
            'use ledger="sqlite:PATH" or ledger="postgresql://..."',
        )
