"""Methods, and the registry that holds them.

A method is one function and what was declared about it. All of it is read and checked when it is registered
(`contradictions`); nothing is left to be found out by the first caller.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from wirecall.errors import UsageError
from wirecall.protocol.params import Signature
from wirecall.server.context import Context
from wirecall.server.contradictions import check, check_reconciler
from wirecall.server.functions import code_of, documented, is_async, mentions
from wirecall.server.terms import EVERYWHERE, Execution, Exposed, KeyRule, Kind, Terms


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
        self.description = description or documented(function)
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
        self.is_async = is_async(function)
        self.signature = Signature(function, inject=Context, keyed=self.is_command)
        self.terms = _settled(terms or Terms(), function, self.signature)
        # In a plain function ctx.commit_point() blocks, so it must not run on the loop.
        self.blocking = blocking or (self.is_command and self.terms.commit_point and not self.is_async)
        self.can_wait = self.blocking or self.terms.on_crash in ("reconcile", "transactional") or self.is_async
        check(self, reserved)
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


def _settled(terms: Terms, function: Callable[..., Any], signature: Signature) -> Terms:
    """A handler that takes a context and names `commit_point` calls it; any other has passed it on entry."""
    code = code_of(function)
    if terms.commit_point or not signature.injected or code is None:
        return terms
    return msgspec.structs.replace(terms, commit_point=mentions(code, "commit_point"))


def _reconciler(method: Method) -> Signature | None:
    if method.terms.reconcile is None:
        return None
    signature = Signature(method.terms.reconcile, inject=Context, keyed=True)
    check_reconciler(method, signature)
    return signature
