"""What an app declares: its methods, and what it offers to MCP clients beside them.

1. A decorator registers the function it is given and returns it as it is; `query`, `command`, `tool` and `prompt` work bare
   and with arguments. The overloads are for people and type checkers: they name every argument with its default. What was
   written arrives as one dict, and `Method` and `Terms` check it.
2. A query reads, a command changes something. Which of them a tool is follows from its annotations.
3. A command that shares the ledger's transactions is declared only where the ledger has some.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from wirecall.errors import UsageError
from wirecall.server.method import (
    EVERYWHERE,
    Execution,
    Exposed,
    KeyRule,
    Kind,
    Method,
    OnCrash,
    Registry,
    Terms,
    ToolAnnotations,
)

if TYPE_CHECKING:
    from wirecall.mcp.server.catalog import Catalog

F = TypeVar("F", bound=Callable[..., Any])

TRANSACTIONAL = ("sqlite", "postgresql", "postgres")


class Declarations:
    """The decorators of an app, and what they have registered."""

    def __init__(self, ledger_scheme: str) -> None:
        self.registry = Registry()
        self._ledger_scheme = ledger_scheme

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
        destructive: bool | None = None,
        idempotent: bool | None = None,
        open_world: bool | None = None,
    ) -> Callable[[F], F]: ...
    def query(self, function: Any = None, /, **declared: Any) -> Any:
        """Register a function that reads. Works bare and with arguments; the function stays as it is."""
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
        max_stored_result: int = 262_144,
        reconcile: Callable[..., Any] | None = None,
        commit_point: bool = False,
        name: str | None = None,
        title: str | None = None,
        description: str | None = None,
        expose: Sequence[Exposed] = EVERYWHERE,
        key: KeyRule = "optional",
        timeout: float | None = None,
        blocking: bool = False,
        execution: Execution | None = None,
        destructive: bool | None = None,
        idempotent: bool | None = None,
        open_world: bool | None = None,
    ) -> Callable[[F], F]: ...
    def command(self, function: Any = None, /, **declared: Any) -> Any:
        """Register a function that changes something: it needs an id, and takes effect once per idempotency key.

        `key` is about MCP, where a key is optional: "required" refuses calls without one, "ask" makes it an argument that
        the model fills in.
        """
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
        input_schema: dict[str, Any] | None = None,
        output_schema: dict[str, Any] | None = None,
        key: KeyRule = "optional",
        on_crash: OnCrash = "unknown",
        retention: float = 86_400,
        lease: float = 30,
        wait: float = 25,
        max_stored_result: int = 262_144,
        reconcile: Callable[..., Any] | None = None,
        commit_point: bool = False,
        timeout: float | None = None,
        blocking: bool = False,
        execution: Execution | None = None,
    ) -> Callable[[F], F]: ...
    def tool(self, function: Any = None, /, *, annotations: ToolAnnotations | None = None, **declared: Any) -> Any:
        """Register a tool for MCP alone. Its kind follows from its annotations: what is read-only is a query."""
        stated = annotations or ToolAnnotations()
        _check_annotations(stated, declared)
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

    def resource(
        self,
        uri: str,
        /,
        *,
        name: str | None = None,
        title: str | None = None,
        description: str | None = None,
        mime_type: str | None = None,
        timeout: float | None = None,
        blocking: bool = False,
    ) -> Callable[[F], F]:
        """Register what is read at a URI. A `{name}` in the URI is a parameter of the function."""

        def register(function: F) -> F:
            declared = {"title": title, "description": description, "timeout": timeout, "blocking": blocking}
            method = self._query(function, f"resources/read:{uri}", declared)
            self.catalog().add_resource(method, uri, name or function.__name__, mime_type)
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
        timeout: float | None = None,
        blocking: bool = False,
    ) -> Callable[[F], F]: ...
    def prompt(self, function: Any = None, /, *, name: str | None = None, **declared: Any) -> Any:
        """Register a prompt: a function from texts to a text, a `Message`, or several."""

        def register(function: F) -> F:
            called = name or function.__name__
            self.catalog().add_prompt(self._query(function, f"prompts/get:{called}", declared), called)
            return function

        return register if function is None else register(function)

    def completion(self, of: str, argument: str, /) -> Callable[[F], F]:
        """Register what completes an argument of a prompt, or of the URI of a resource, that is registered already.

        The function takes what was typed and, if it has a second parameter, the arguments that are known already.
        """

        def register(function: F) -> F:
            method = self._query(function, f"completion/complete:{of}:{argument}", {})
            self.catalog().add_completion(method, of, argument)
            return function

        return register

    def catalog(self) -> "Catalog":
        """Return the prompts, resources and completions; `App`, which knows MCP's server, makes them."""
        raise NotImplementedError

    # --- registering -------------------------------------------------------------------------------------------------

    def _register(self, kind: Kind, function: Any, declared: dict[str, Any]) -> Any:
        def register(function: F) -> F:
            self.registry.add(Method(function, kind, **declared))
            return function

        return register if function is None else register(function)

    def _query(self, function: Callable[..., Any], name: str, declared: dict[str, Any]) -> Method:
        return Method(function, Kind.QUERY, name=name, expose=("mcp",), reserved=True, **declared)

    def _terms(self, declared: dict[str, Any]) -> Terms:
        """Takes what is about retries out of what was declared."""
        terms = Terms(**{field: declared.pop(field) for field in Terms.__struct_fields__ if field in declared})
        _check_transactional(terms, self._ledger_scheme)
        return terms

    def _use_ledger(self, scheme: str) -> None:
        """The ledger is another one: what was declared has to suit it as well."""
        for method in (*self.registry.methods.values(), *self.registry.tools.values()):
            _check_transactional(method.terms, scheme)
        self._ledger_scheme = scheme


def _check_transactional(terms: Terms, scheme: str) -> None:
    if terms.on_crash == "transactional" and scheme not in TRANSACTIONAL:
        raise UsageError(
            'on_crash="transactional" needs a ledger that shares transactions.',
            f"this app's ledger is {scheme}:",
            'use ledger="sqlite:PATH" or ledger="postgresql://..."',
        )


def _check_annotations(stated: ToolAnnotations, declared: dict[str, Any]) -> None:
    """A tool that says two things about itself says nothing (T2)."""
    retries = [field for field in Terms.__struct_fields__ if field in declared]
    faults = (
        (stated.readOnlyHint and bool(stated.destructiveHint), "what only reads destroys nothing", "drop one of the hints"),
        (stated.readOnlyHint and stated.idempotentHint is False, "what only reads can be repeated", "drop idempotentHint"),
        (stated.readOnlyHint and bool(retries), f"{', '.join(retries)}: only what changes something has it", "drop it"),
    )
    for wrong, why, fix in faults:
        if wrong:
            raise UsageError(f"{stated!r} contradicts itself.", why, fix)
