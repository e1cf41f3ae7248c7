"""`App`: declare methods once, serve them everywhere. It composes the layers below; nothing below imports it."""

import os
from collections.abc import Callable, Sequence
from types import CoroutineType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from wirecall.errors import CannotWait, UsageError
from wirecall.frames import Data, Id
from wirecall.ledger.base import check_url, open_ledger
from wirecall.methods import Done, Execution, Kind, Method, NotDone, OnCrash, Registry, Terms
from wirecall.policy import ANONYMOUS, Limits, Mode, Policy

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Lock
    from contextlib import AbstractAsyncContextManager

    from wirecall.audit import Audit
    from wirecall.dispatch import Dispatcher, Middleware
    from wirecall.ledger.base import Ledger

F = TypeVar("F", bound=Callable[..., Any])

MODE_VARIABLE = "WIRECALL_MODE"
PRODUCTION_LEDGER = "sqlite:.wirecall/ledger.db"
TRANSACTIONAL = ("sqlite", "postgresql", "postgres")


class App:
    """A set of methods and the rules they are served by.

    `mode` defaults to the environment variable WIRECALL_MODE, else to "development". `ledger` is a URL; it is opened when
    the first command with a key arrives, and closed by `aclose`.
    """

    def __init__(
        self,
        name: str,
        *,
        version: str = "0.0.0",
        mode: Mode | None = None,
        ledger: str | None = None,
        audit: str | None = None,
        limits: Limits | None = None,
        middleware: "Sequence[Middleware]" = (),
        execution: Execution | None = None,
        strict: bool = True,
    ) -> None:
        self.name = name
        self.version = version
        self.mode = _mode(mode)
        self.limits = limits or Limits()
        self.registry = Registry()
        self.ledger_url = ledger or (PRODUCTION_LEDGER if self.mode == "production" else "memory:")
        self._ledger_scheme = check_url(self.ledger_url)
        self._middleware = list(middleware)
        self._execution = execution
        self._strict = strict
        self._audit_path = _audit_path(audit)
        self._audit: Audit | None = None
        self._dispatcher: Dispatcher | None = None
        self._ledger: Ledger | None = None
        self._locked: tuple[AbstractEventLoop, Lock] | None = None
        self._add_discover()

    # --- declaring ---------------------------------------------------------------------------------------------------

    @overload
    def query(self, function: F, /) -> F: ...
    @overload
    def query(
        self,
        /,
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
        timeout: float | None = None,
        blocking: bool = False,
        execution: Execution | None = None,
        destructive: bool | None = None,
        idempotent: bool | None = None,
        open_world: bool | None = None,
    ) -> Callable[[F], F]: ...
    def command(self, function: Any = None, /, **declared: Any) -> Any:
        """Register a function that changes something: it needs an id, and takes effect once per idempotency key."""
        terms = Terms(**{field: declared.pop(field) for field in Terms.__struct_fields__ if field in declared})
        if terms.on_crash == "transactional" and self._ledger_scheme not in TRANSACTIONAL:
            raise UsageError(
                'on_crash="transactional" needs a ledger that shares transactions.',
                f"this app's ledger is {self._ledger_scheme}:",
                'use ledger="sqlite:PATH" or ledger="postgresql://..."',
            )
        return self._register(Kind.COMMAND, function, {**declared, "terms": terms})

    def middleware(self, layer: "Middleware") -> "Middleware":
        """Add a callable `(context, next)` around every call; the first one added is the outermost."""
        if self._dispatcher is not None:
            raise UsageError("The app is serving already.", "calls under way would miss the new layer", "add it before")
        self._middleware.append(layer)
        return layer

    def _register(self, kind: Kind, function: Any, declared: dict[str, Any]) -> Any:
        def register(function: F) -> F:
            self.registry.add(Method(function, kind, **declared))
            return function

        return register if function is None else register(function)

    def _add_discover(self) -> None:
        def discover() -> dict[str, Any]:
            """The methods of this server, as an OpenRPC document."""
            from wirecall.openrpc import document

            return document(self.name, self.version, self.registry, self.mode)

        self.registry.add(Method(discover, Kind.QUERY, name="rpc.discover", reserved=True))

    # --- serving -----------------------------------------------------------------------------------------------------

    async def handle(self, data: Data, *, caller: str = ANONYMOUS, replayed: list[Id] | None = None) -> bytes | None:
        """Answer one message of plain JSON-RPC: bytes in, bytes or nothing out.

        `caller` is who sent it, as far as known; commands are told apart by caller. A list given as `replayed` receives the
        ids of the answers that came from the ledger.
        """
        reply: Any = (self._dispatcher or self._build()).handle(data, caller, False, replayed)
        answer: bytes | None = await reply if type(reply) is CoroutineType else reply
        return answer

    def handle_sync(self, data: Data, *, caller: str = ANONYMOUS, replayed: list[Id] | None = None) -> bytes | None:
        """The same without an event loop, for handlers that do not wait; one that tries to is an error."""
        answer: Any = (self._dispatcher or self._build()).handle(data, caller, True, replayed)
        return self._step(answer) if type(answer) is CoroutineType else answer

    def _step(self, pending: "CoroutineType[Any, Any, bytes | None]") -> bytes | None:
        try:
            pending.send(None)
        except StopIteration as finished:
            answer: bytes | None = finished.value
            return answer
        pending.close()
        raise CannotWait

    async def aclose(self, grace: float = 10.0) -> None:
        """Finish what is under way, within `grace` seconds, and close the ledger."""
        dispatcher = self._dispatcher
        if dispatcher is not None:
            await dispatcher.aclose(grace)  # from here on it refuses commands, and queries go on
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            await ledger.aclose()
        audit, self._audit = self._audit, None
        if audit is not None:
            audit.close()
        if self._dispatcher is dispatcher:
            self._dispatcher = None  # the next call begins anew

    async def __aenter__(self) -> "App":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _build(self) -> "Dispatcher":
        # Late: an app is made in many programs that never serve a call, and `import wirecall` stays light.
        from wirecall.audit import Audit
        from wirecall.commands import Commands
        from wirecall.dispatch import Dispatcher

        self._audit = Audit(self._audit_path) if self._audit_path else None
        note = self._audit.note if self._audit else None
        self._dispatcher = Dispatcher(
            self.registry,
            Policy(self.mode, self.limits),
            Commands(self.ledger, note),
            note=note,
            middleware=self._middleware,
            execution=self._execution,
            strict=self._strict,
        )
        return self._dispatcher

    async def resolve(self, method: str, key: str, verdict: Done | NotDone, *, caller: str = ANONYMOUS) -> bool:
        """Settle a command whose outcome is unknown: an operator found out. False if there is no such record."""
        from wirecall.ledger.base import RecordId
        from wirecall.outcomes import outcome_of

        id = RecordId(caller, method, key)
        outcome = outcome_of("result", verdict.result, id) if isinstance(verdict, Done) else None
        declared = self.registry.get(method)
        retention = (declared.terms if declared else Terms()).retention
        return await (await self.ledger()).resolve(id, outcome, retention)

    async def ledger(self) -> "Ledger":
        """The app's ledger, opened on first use."""
        if self._ledger is None:
            async with self._opening():
                if self._ledger is None:
                    self._ledger = await open_ledger(self.ledger_url)
        return self._ledger

    def _opening(self) -> "AbstractAsyncContextManager[None]":
        """One call opens the ledger, and the others of its event loop wait for it."""
        import asyncio
        from contextlib import nullcontext

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # handle_sync: there is nobody else
            return nullcontext()
        if self._locked is None or self._locked[0] is not loop:
            self._locked = (loop, asyncio.Lock())
        return self._locked[1]


def _mode(mode: str | None) -> Any:
    chosen = mode or os.environ.get(MODE_VARIABLE) or "development"
    if chosen not in ("development", "production"):
        raise UsageError(
            f"{chosen!r} is not a mode.",
            f"it was given as {'mode=' if mode else MODE_VARIABLE}",
            'use "development" or "production"',
        )
    return chosen


def _audit_path(url: str | None) -> str | None:
    if url is None:
        return None
    scheme, _, path = url.partition(":")
    if scheme != "file" or not path:
        raise UsageError(f"{url!r} is not an audit trail.", "it must be a file", 'use audit="file:audit.jsonl"')
    return path
