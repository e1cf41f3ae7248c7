"""`App`: declare methods once, serve them everywhere. It composes the layers below; nothing below imports it.

1. Declaring is `declarations`' part: the decorators, and what they have registered.
2. Serving begins with the first message, however it comes: `handle`, `asgi` and `run` make the dispatcher when they need it,
   and it opens the ledger with the first command that has a key. So an app is cheap to make, and `import wirecall` is light.
3. `aclose` ends that life. The next message begins another.
"""

import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Literal, get_args

from wirecall.declarations import Declarations
from wirecall.errors import UsageError
from wirecall.ledger.base import check_url, open_ledger
from wirecall.protocol.limits import Limits
from wirecall.protocol.messages import Data, Id
from wirecall.server.method import Done, Execution, Kind, Method, NotDone, Terms
from wirecall.server.policy import ANONYMOUS, Mode, Policy

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Lock, Task
    from contextlib import AbstractAsyncContextManager

    from wirecall.audit import Audit
    from wirecall.ledger.base import Ledger
    from wirecall.mcp.server.catalog import Catalog
    from wirecall.mcp.server.server import Server
    from wirecall.server.dispatch import Dispatcher, Middleware
    from wirecall.transports.asgi import HttpServer
    from wirecall.transports.serve import ServerName

Lists = Literal["tools", "prompts", "resources"]
Authenticate = Callable[[Mapping[str, str]], "Awaitable[str | None] | str | None"]

MODE_VARIABLE = "WIRECALL_MODE"
SECRET_VARIABLE = "WIRECALL_SECRET"
PRODUCTION_LEDGER = "sqlite:.wirecall/ledger.db"

# Seconds: `/readyz` asks the ledger this often at most, and waits for the answer this long.
ASK_EVERY = 1.0
ASK_WITHIN = 2.0


class App(Declarations):
    """A set of methods and the rules they are served by.

    `mode` defaults to the environment variable WIRECALL_MODE, else to "development". `ledger` is a URL; it is opened when
    the first command with a key arrives, and closed by `aclose`.

    For HTTP: `authenticate` takes the headers of a request and gives the caller's name, or None to refuse. `hosts` and
    `origins` are the names that the server and the web pages that may call it have, besides the loopback's. `secret` seals
    what clients keep for the server; processes that share it serve each other's sessions (or WIRECALL_SECRET).
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
        instructions: str | None = None,
        authenticate: Authenticate | None = None,
        hosts: Sequence[str] = (),
        origins: Sequence[str] = (),
        secret: str | None = None,
    ) -> None:
        self.name = name
        self.version = version
        self.mode = _mode(mode)
        self.limits = _limits(limits) or Limits()
        self.ledger_url = ledger or (PRODUCTION_LEDGER if self.mode == "production" else "memory:")
        super().__init__(check_url(self.ledger_url))
        self._middleware = list(middleware)
        self._execution = _execution(execution)
        self._strict = strict
        self.instructions = instructions
        self._authenticate = authenticate
        self._hosts: Sequence[str] = _names("hosts", hosts)
        self._origins: Sequence[str] = _names("origins", origins)
        # Made here and not where it is used: workers are copies of this process, and must have the same one.
        known = secret or os.environ.get(SECRET_VARIABLE)
        self._is_shared = known is not None  # there may be other processes that serve the same sessions
        self._secret: str | bytes = known or os.urandom(32)
        self._mcp: Server | None = None
        self._audit_path = _audit_path(audit)
        self._audit: Audit | None = None
        self._dispatcher: Dispatcher | None = None
        self._ledger: Ledger | None = None
        self._locked: tuple[AbstractEventLoop, Lock] | None = None
        self._question: tuple[float, Task[str | None]] | None = None  # to the ledger, by `/readyz`, and when it was asked
        self._add_discover()

    def configure(
        self,
        *,
        ledger: str | None = None,
        audit: str | None = None,
        limits: Limits | None = None,
        hosts: Sequence[str] = (),
        origins: Sequence[str] = (),
    ) -> None:
        """Replace what the constructor was told, before the first call: for who serves an app that others have written.

        `hosts` and `origins` are added to those of the app.
        """
        if self._dispatcher is not None:
            raise UsageError("The app is serving already.", "calls under way have the old rules", "configure it before")
        if ledger is not None:
            self._use_ledger(check_url(ledger))
            self.ledger_url = ledger
        self._audit_path = _audit_path(audit) if audit is not None else self._audit_path
        self.limits = _limits(limits) or self.limits
        self._hosts = [*self._hosts, *_names("hosts", hosts)]
        self._origins = [*self._origins, *_names("origins", origins)]

    def middleware(self, layer: "Middleware") -> "Middleware":
        """Add a callable `(context, next)` around every call; the first one added is the outermost."""
        if self._dispatcher is not None:
            raise UsageError("The app is serving already.", "calls under way would miss the new layer", "add it before")
        self._middleware.append(layer)
        return layer

    def _add_discover(self) -> None:
        def discover() -> dict[str, Any]:
            """The methods of this server, as an OpenRPC document."""
            from wirecall.server.openrpc import document

            return document(self.name, self.version, self.registry, self.mode)

        self.registry.add(Method(discover, Kind.QUERY, name="rpc.discover", reserved=True))

    # --- serving -----------------------------------------------------------------------------------------------------

    async def handle(
        self, data: Data, *, caller: str = ANONYMOUS, replayed: list[Id] | None = None, key: str | None = None
    ) -> bytes | None:
        """Answer one message of plain JSON-RPC: bytes in, bytes or nothing out.

        `caller` is who sent it, as far as known; commands are told apart by caller. A list given as `replayed` receives the
        ids of the answers that came from the ledger. `key` is the idempotency key of a single call, if it came beside it;
        for an array it is a `UsageError`, and nothing runs.
        """
        reply: Any = (self._dispatcher or self._build()).handle(data, caller, False, replayed, key)
        answer: bytes | None = await reply if type(reply) is CoroutineType else reply
        return answer

    def handle_sync(self, data: Data, *, caller: str = ANONYMOUS, replayed: list[Id] | None = None) -> bytes | None:
        """The same without an event loop, for handlers that do not wait; one that tries to is an error."""
        reply: Any = (self._dispatcher or self._build()).handle(data, caller, True, replayed)
        if type(reply) is CoroutineType:
            from wirecall.stepping import run_now

            reply = run_now(reply)
        answer: bytes | None = reply
        return answer

    def asgi(self) -> "HttpServer":
        """An ASGI application: `/rpc` for JSON-RPC, `/mcp` for MCP, `/healthz` and `/readyz` for supervisors."""
        from wirecall.mcp.server.http import McpEndpoint
        from wirecall.transports.asgi import HttpServer
        from wirecall.transports.rpc import health_endpoints, rpc_endpoint

        endpoint = McpEndpoint(self.mcp(), self.limits, shared=self._is_shared)

        async def shutdown(grace: float) -> None:
            await endpoint.aclose(grace / 4)
            await self.aclose(grace * 3 / 4)

        return HttpServer(
            {"/rpc": rpc_endpoint(self.handle), "/mcp": endpoint, **health_endpoints(self._not_ready)},
            limits=self.limits,
            authenticate=self._authenticate,
            hosts=self._hosts,
            origins=self._origins,
            startup=endpoint.open,
            shutdown=shutdown,
        )

    def run(
        self,
        transport: Literal["stdio", "http"] = "stdio",
        *,
        host: str = "127.0.0.1",
        port: int = 8420,
        server: "ServerName" = "granian",
        workers: int = 1,
        grace: float = 10.0,
    ) -> None:
        """Serve until told to stop: MCP and plain JSON-RPC on stdin and stdout, or everything of `asgi` over HTTP."""
        if transport == "stdio":
            from wirecall.transports import stdio

            self._warn_of_memory()
            stdio.serve(self._connect, grace=grace, cleanup=self.aclose, limits=self.limits)
        elif transport == "http":
            from wirecall.transports import serve as run_http

            self._check_workers(workers)
            self._warn_of_memory()
            self._is_shared = self._is_shared or workers > 1
            run_http.serve(self.asgi, host, port, server=server, workers=workers, grace=grace)
        else:
            raise UsageError(f"{transport!r} is not a transport.", "", 'use "stdio" or "http"')

    def _connect(self, send: Callable[[bytes], Awaitable[None]]) -> Any:
        from wirecall.mcp.server.lines import Lines

        def plain(line: bytes) -> Any:
            return self._serving().handle(line)

        return Lines(send, self.mcp(), plain, self.registry.methods, self.limits)

    def _check_workers(self, workers: int) -> None:
        if workers > 1 and self._ledger_scheme == "memory":
            raise UsageError(
                f"{workers} workers cannot share a ledger in memory.",
                "each would know only its own commands, and a retry that meets another worker would run again",
                'use ledger="sqlite:PATH", "redis://..." or "postgresql://..."',
            )

    def _warn_of_memory(self) -> None:
        """A client that loses its server sends commands again to the next one, as it should: that one must know of them."""
        from wirecall.logs import logger

        if self._ledger_scheme == "memory" and any(method.is_command for method in self.registry):
            logger.warning(
                "the ledger is in memory: a command that is sent again after a restart runs again; "
                'where that matters, use ledger="sqlite:PATH"'
            )

    async def _not_ready(self) -> str | None:
        """The reason why commands would be refused now, or None. Probes that come together share one question."""
        import asyncio

        from wirecall.ledger.base import LedgerDown
        from wirecall.logs import logger

        async def ask() -> str | None:
            try:
                await (await self.ledger()).ping()
            except (LedgerDown, UsageError) as error:
                logger.error("not ready: the ledger: %s", error)  # its address and its words are not for every prober
                return "the ledger cannot be reached, or takes no writes"
            return None

        loop = asyncio.get_running_loop()
        last = self._question
        if not last or last[1].get_loop() is not loop or (last[1].done() and loop.time() >= last[0] + ASK_EVERY):
            last = self._question = loop.time(), loop.create_task(ask())
        asked_at, question = last
        # A question that is not answered in time stays the only one: each would hold a connection, or a place in a queue.
        await asyncio.wait({question}, timeout=max(0.0, asked_at + ASK_WITHIN - loop.time()))
        if not question.done():
            return f"the ledger did not answer within {ASK_WITHIN:g} s"
        return question.result()

    # --- MCP ---------------------------------------------------------------------------------------------------------

    def mcp(self) -> "Server":
        """What answers MCP's own methods."""
        return self._mcp or self._build_mcp()

    def _build_mcp(self) -> "Server":
        """One for all threads: who listens to one of two would not be told what the other is told."""
        catalog = self.catalog()
        with self._building:
            if self._mcp is None:
                self._mcp = self._new_mcp(catalog)
            return self._mcp

    def _new_mcp(self, catalog: "Catalog") -> "Server":
        from wirecall.mcp.server.sealed import Seals
        from wirecall.mcp.server.server import Identity, Server

        return Server(
            Identity(self.name, self.version, self.instructions),
            catalog,
            self._serving,
            Seals(self._secret),
            is_public=self._authenticate is None,
            limits=self.limits,
        )

    def changed(self, what: Lists) -> None:
        """Tell the MCP clients that listen: this list has changed. From any thread, and without waiting."""
        if what not in get_args(Lists):
            raise UsageError(f"{what!r} is not a list that can change.", "", f"use one of {', '.join(get_args(Lists))}")
        self.catalog().forget()
        self.mcp().hub.tell(what)

    def updated(self, uri: str) -> None:
        """Tell the MCP clients that have subscribed to a resource: it has changed."""
        self.mcp().hub.tell("updated", uri)

    # --- from the first message to the last --------------------------------------------------------------------------

    def _serving(self) -> "Dispatcher":
        return self._dispatcher or self._build()

    def _build(self) -> "Dispatcher":
        """One for all threads: two dispatchers would not know of each other's commands under way."""
        with self._building:
            if self._dispatcher is None:
                self._dispatcher = self._new_dispatcher()
            return self._dispatcher

    def _new_dispatcher(self) -> "Dispatcher":
        # Late: an app is made in many programs that never serve a call, and `import wirecall` stays light.
        from wirecall.audit import Audit
        from wirecall.commands.execute import Commands
        from wirecall.server.dispatch import Dispatcher
        from wirecall.server.events import Events

        self._audit = Audit(self._audit_path) if self._audit_path else None
        events = Events([self._audit.note] if self._audit else [])
        return Dispatcher(
            self.registry,
            Policy(self.mode, self.limits),
            Commands(self.ledger, events.call_ended),
            events,
            middleware=self._middleware,
            execution=self._execution,
            strict=self._strict,
        )

    async def aclose(self, grace: float = 10.0) -> None:
        """Finish what is under way, within `grace` seconds, and close the ledger."""
        ends_at = time.monotonic() + grace
        dispatcher = self._dispatcher
        if dispatcher is not None:
            await dispatcher.aclose(grace)  # from here on it refuses commands, and queries go on
        if self._dispatcher is not dispatcher:
            return  # another `aclose` was faster: what is open now belongs to the calls after it
        ledger, self._ledger = self._ledger, None
        audit, self._audit = self._audit, None
        if ledger is not None:
            await ledger.aclose()
        if audit is not None:
            await audit.aclose(max(0.0, ends_at - time.monotonic()))
        if self._dispatcher is dispatcher:
            self._dispatcher = None  # the next call begins anew

    async def __aenter__(self) -> "App":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # --- the ledger --------------------------------------------------------------------------------------------------

    async def ledger(self) -> "Ledger":
        """The app's ledger, opened on first use."""
        ledger = self._ledger
        if ledger is None:
            async with self._opening():
                ledger = self._ledger or await self._kept(await open_ledger(self.ledger_url))
        return ledger

    async def _kept(self, opened: "Ledger") -> "Ledger":
        """All loops share one ledger: who opened another in its own thread, at the same moment, closes that."""
        kept = self._ledger
        if kept is None:
            self._ledger = opened
            return opened
        await opened.aclose()
        return kept

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

    async def resolve(self, method: str, key: str, verdict: Done | NotDone, *, caller: str = ANONYMOUS) -> bool:
        """Settle a command whose outcome is unknown: an operator found out. False if there is no such record."""
        from wirecall.commands.outcome import outcome_of
        from wirecall.ledger.base import RecordId

        if not isinstance(verdict, (Done, NotDone)):
            raise UsageError(
                f"{verdict!r} is no verdict about a command.",
                "to take it for one of the two would replay a result that nobody gave, or run the command again",
                "Done(result) if it took effect, NotDone() if it did not",
            )
        id = RecordId(caller, method, key)
        declared = self.registry.get(method) or self.registry.tools.get(method.removeprefix("tools/call:"))
        outcome = None
        if isinstance(verdict, Done):
            outcome = outcome_of("result", self._as_kept(method, declared, verdict.result), id)
            if outcome.payload is None:
                raise UsageError(
                    f"{verdict!r} cannot be replayed.", "its result cannot be written as JSON", "give one that can"
                )
        retention = (declared.terms if declared else Terms()).retention
        return await (await self.ledger()).resolve(id, outcome, retention)

    def _as_kept(self, method: str, declared: Method | None, result: Any) -> Any:
        """The record of a tool's call holds what MCP clients get, with the value inside."""
        if declared is None or not method.startswith("tools/call:"):
            return result
        from wirecall.mcp.server.results import call_result

        return call_result(declared)(result)


def _mode(mode: str | None) -> Any:
    chosen = mode or os.environ.get(MODE_VARIABLE) or "development"
    if chosen not in ("development", "production"):
        raise UsageError(
            f"{chosen!r} is not a mode.",
            f"it was given as {'mode=' if mode else MODE_VARIABLE}",
            'use "development" or "production"',
        )
    return chosen


def _execution(execution: Execution | None) -> Execution | None:
    """A word that is mistyped would be "parallel", and commands in an array would run out of order."""
    if execution not in (None, *get_args(Execution)):
        raise UsageError(f"{execution!r} is not a way to run a batch.", fix='use execution="sequential" or "parallel"')
    return execution


def _limits(limits: Limits | None) -> Limits | None:
    if limits is not None and not isinstance(limits, Limits):
        raise UsageError(f"{limits!r} are no limits.", "their names and values are checked", "use limits=Limits(batch=100)")
    return limits


def _names(option: str, names: Sequence[str]) -> Sequence[str]:
    if isinstance(names, str):
        raise UsageError(f"{option} is a text.", "each of its letters would be a name", f"use {option}=[{names!r}]")
    return names


def _audit_path(url: str | None) -> str | None:
    if url is None:
        return None
    scheme, _, path = url.partition(":")
    if scheme != "file" or not path:
        raise UsageError(f"{url!r} is not an audit trail.", "it must be a file", 'use audit="file:audit.jsonl"')
    return path
