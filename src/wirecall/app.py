"""`App`: declare methods once, serve them everywhere. It composes the layers below; nothing below imports it.

1. The decorators, and the methods they register, are in `declarations`.
2. Serving begins with the first message, however it comes: `handle`, `asgi` and `run` make the dispatcher when they need it,
   and it opens the ledger with the first command that has a key. So an app is cheap to make, and `import wirecall` is light.
3. `aclose` stops the app. The next message starts it again.
"""

import os
import re
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, cast, get_args

from wirecall.declarations import Declarations, checks_options, milliseconds
from wirecall.errors import UsageError
from wirecall.ledger.base import check_url, open_ledger
from wirecall.protocol.messages import Data, Id, JsonObject, Limits, Sending
from wirecall.server.call import ANONYMOUS, Context, Events, HttpHeader, Middleware
from wirecall.server.identity import Identity
from wirecall.server.method import Done, Execution, Kind, Method, Mode, NotDone, Terms

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Lock, Task
    from contextlib import AbstractAsyncContextManager

    from wirecall.audit import Audit
    from wirecall.auth.access import Access, Verifier, Verify
    from wirecall.ledger.base import Ledger
    from wirecall.mcp.server.catalog import Catalog
    from wirecall.mcp.server.lines import StdioConnection
    from wirecall.mcp.server.server import Server
    from wirecall.mcp.types import Icon
    from wirecall.server.dispatch import Dispatcher
    from wirecall.server.lifespan import Lifespan
    from wirecall.transports.http_server import HttpServer
    from wirecall.transports.serve import ServerName

Lists = Literal["tools", "prompts", "resources"]
Authenticate = Callable[[Mapping[str, str]], "Awaitable[str | None] | str | None"]

MODE_VARIABLE = "WIRECALL_MODE"
SECRET_VARIABLE = "WIRECALL_SECRET"
GRACE = 10.0  # seconds for the calls in flight when an app is closed
LIST_TTL = 60.0  # seconds; a client that listens hears of a change before that
PRODUCTION_LEDGER = "sqlite:.wirecall/ledger.db"

# The names that `hosts` and `origins` take, and an example of each. A page in a sandbox has the origin "null".
HOST = r"(?i)\*|(\*\.)?[^\s/:@,*]+(:\d+)?|\[[0-9a-f:.]+\](:\d+)?", '"api.example.com", "*.example.com" or "*"'
ORIGIN = r"(?i)\*|null|[a-z][a-z0-9+.-]*://[^\s/]+/?", '"https://app.example.com" or "*"'

# Seconds: `/readyz` asks the ledger this often at most, and waits for the answer this long.
ASK_EVERY = 1.0
ASK_WITHIN = 2.0


class App(Declarations):
    """A set of methods and the rules they are served by.

    `mode` defaults to the environment variable WIRECALL_MODE, else to "development". `ledger` is a URL; it is opened when
    the first command arrives, and closed by `aclose`. `single_user` says that all anonymous calls come from one user: then
    a call that repeats a lost one is recognised without authentication.

    `title`, `website` and `icons` show the app to users of MCP clients, from the revisions on that have them.

    `extensions` are those of MCP that the app declares to clients: settings by id. `@app.extension_method` adds methods.
    `list_ttl` are the seconds for which an MCP client may keep the lists of tools, prompts and resources (2026-07-28).

    For HTTP: `auth` judges the tokens of requests (`wirecall.auth`); `authenticate` does so for anything else: it takes the
    headers of a request and returns the caller's name, or None to refuse. `hosts` and
    `origins` are the names of the server and of the web pages that may call it, besides the loopback's. `secret` seals
    the state that clients keep for the server; processes that share it serve each other's sessions (or WIRECALL_SECRET).

    `lifespan` takes the app and returns an async context manager. Every process enters it before the first call and leaves
    it after the last one; its value is `ctx.state`.
    """

    @checks_options
    def __init__(
        self,
        name: str,
        *,
        version: str = "0.0.0",
        title: str | None = None,
        website: str | None = None,
        icons: "Sequence[Icon]" = (),
        mode: Mode | None = None,
        ledger: str | None = None,
        audit: str | None = None,
        limits: Limits | None = None,
        middleware: Sequence[Middleware] = (),
        execution: Execution | None = None,
        strict: bool = True,
        instructions: str | None = None,
        extensions: Mapping[str, JsonObject] | None = None,
        list_ttl: float = LIST_TTL,
        auth: "Access | Verifier | Verify | Sequence[Verifier | Verify] | None" = None,
        authenticate: Authenticate | None = None,
        hosts: Sequence[str] = (),
        origins: Sequence[str] = (),
        secret: str | None = None,
        single_user: bool = False,
        lifespan: "Callable[[App], AbstractAsyncContextManager[object]] | None" = None,
    ) -> None:
        if not isinstance(name, str):
            raise UsageError(f"The name of an app must be a text, got {type(name).__name__}.", fix='use App("shop")')
        self.name = name
        self.version = version
        self.title = title
        self.website = website
        if website is not None and not website.startswith(("https://", "http://")):
            raise UsageError(f"website must be an http: or https: address, got {website!r}.")
        self._icons: list[JsonObject] = []
        if icons:
            from wirecall.mcp.types import checked_icons  # late: `import wirecall` stays light

            self._icons = checked_icons(f"the app {name}", icons)
        chosen = mode or os.environ.get(MODE_VARIABLE) or "development"
        if chosen not in ("development", "production"):
            source = "mode=" if mode else MODE_VARIABLE
            raise UsageError(f"{chosen!r} is not a mode.", f"{source} has this value", 'use "development" or "production"')
        # A mistyped word would mean "parallel", and commands in an array would run out of order.
        if execution not in (None, *get_args(Execution)):
            raise UsageError(f"{execution!r} is not a way to run a batch.", fix='use execution="sequential" or "parallel"')
        for option, value in (("authenticate", authenticate), ("lifespan", lifespan)):
            if value is not None and not callable(value):
                raise UsageError(f"{option} must be a function, got {type(value).__name__}.")
        if secret is not None and not isinstance(secret, str):
            raise UsageError(f"secret must be a text, got {type(secret).__name__}.", fix="use a long random text")
        if callable(middleware) or isinstance(middleware, str):
            raise UsageError("middleware must be a list.", fix="use middleware=[RateLimit(100, per=60)]")
        for layer in middleware:
            if not callable(layer):
                raise UsageError(f"middleware: expected a function (context, next), got {type(layer).__name__}.")
        self.mode = cast(Mode, chosen)
        self.limits = _limits(limits) or Limits()
        self.ledger_url = ledger or (PRODUCTION_LEDGER if self.mode == "production" else "memory:")
        super().__init__(check_url(self.ledger_url), checks_results=self.mode == "development")
        self._middleware = list(middleware)
        self._execution = execution
        self._strict = strict
        self._single_user = single_user
        self._is_dev = False
        self.instructions = instructions
        self._list_ttl_ms = milliseconds("list_ttl", list_ttl)
        self._extensions: dict[str, JsonObject] = {}
        if extensions is not None:
            from wirecall.mcp.types import checked_extensions  # late: `import wirecall` stays light

            self._extensions = checked_extensions(extensions)
        self._authenticate = authenticate
        self.access: Access | None = None  # the rules about tokens
        self._hosts: Sequence[str] = _names("hosts", hosts, *HOST)
        self._origins: Sequence[str] = _names("origins", origins, *ORIGIN)
        # Made here and not where it is used: workers are copies of this process, and all need the same secret.
        known = secret or os.environ.get(SECRET_VARIABLE)
        self._is_shared = known is not None  # other processes may serve the same sessions
        self._secret: str | bytes = known or os.urandom(32)
        self._building = threading.Lock()  # for the parts that are made on first use, so that all threads get the same ones
        self._catalog: Catalog | None = None
        self._mcp: Server | None = None
        if auth is not None:
            self._protect(auth)
        self._lifespan: Lifespan | None = None
        if lifespan is not None:
            from wirecall.server import lifespan as lifespans  # late: `import wirecall` stays light

            self._lifespan = lifespans.Lifespan(partial(lifespan, self), lambda: self.limits.start_time)
        self._audit_path = _audit_path(audit)
        self._audit: Audit | None = None
        self._dispatcher: Dispatcher | None = None
        self._ready: Dispatcher | None = None  # the same, where no lifespan has to be looked at before each message
        self._ledger: Ledger | None = None
        self._is_warned = False  # that tasks end with the process
        self._locked: tuple[AbstractEventLoop, Lock] | None = None
        self._question: tuple[float, Task[str | None]] | None = None  # the last check by `/readyz`, and when it began

        def discover(context: Context) -> JsonObject:
            """Return the methods of this server as an OpenRPC document."""
            from wirecall.server.openrpc import document

            shown = [method for method in self.registry if self._shows(method, context.identity)]
            return document(self.name, self.version, shown, self.mode)

        self.registry.add(Method(discover, Kind.QUERY, name="rpc.discover", reserved=True))

    @checks_options
    def configure(
        self,
        *,
        ledger: str | None = None,
        audit: str | None = None,
        limits: Limits | None = None,
        hosts: Sequence[str] = (),
        origins: Sequence[str] = (),
        single_user: bool | None = None,
        auth: "Access | Verifier | Verify | Sequence[Verifier | Verify] | None" = None,
        dev: bool = False,
    ) -> None:
        """Replace arguments of the constructor before the first call, for example in a program that serves another's app.

        `hosts` and `origins` are added to those of the app. `dev` warns of plain functions that block the event loop.
        """
        if self._dispatcher is not None:
            raise UsageError("The app is serving already.", "calls in flight have the old rules", "configure it before")
        self._is_dev = self._is_dev or dev
        if single_user is not None:
            self._single_user = single_user
        if auth is not None:
            self._protect(auth)
        if ledger is not None:
            self._use_ledger(check_url(ledger))
            self.ledger_url = ledger
        self._audit_path = _audit_path(audit) if audit is not None else self._audit_path
        self.limits = _limits(limits) or self.limits
        self._hosts = [*self._hosts, *_names("hosts", hosts, *HOST)]
        self._origins = [*self._origins, *_names("origins", origins, *ORIGIN)]

    def middleware(self, layer: Middleware) -> Middleware:
        """Add a callable `(context, next)` around every call; the first one added is the outermost."""
        if self._dispatcher is not None:
            raise UsageError("The app is serving already.", "calls in flight would miss the new layer", "add it before")
        self._middleware.append(layer)
        return layer

    def remove(self, name: str) -> None:
        """Remove a method or a tool, also while the app serves. Calls in flight go on; MCP clients hear of the change."""
        if name.startswith("rpc."):
            raise UsageError(f"{name!r} cannot be removed.", "it belongs to the protocol")
        method = self.registry.remove(name)
        if method is None:
            known = ", ".join({**self.registry.methods, **self.registry.tools}) or "none"
            raise UsageError(f"There is no method {name!r}.", f"these are registered: {known}")
        self._declared.remove(method)
        if "mcp" in method.expose and self._mcp is not None:
            self.changed("tools")

    # --- authorization -----------------------------------------------------------------------------------------------

    def _protect(self, auth: "Access | Verifier | Verify | Sequence[Verifier | Verify]") -> None:
        """Judge the tokens of requests from now on."""
        from wirecall.auth.access import Access  # late: `import wirecall` stays light

        if self._mcp is not None:
            raise UsageError("The app is serving already.", "its MCP server does not know of auth=", "configure it before")
        if self._authenticate is not None:
            raise UsageError(
                "auth= and authenticate= contradict each other.",
                "each of them names the caller of a request",
                "keep auth= for tokens, or authenticate= for anything else",
            )
        self.access = Access.of(auth)

    def _scoped(self) -> "list[Method]":
        """Return everything that asks for scopes."""
        catalog = self.catalog()
        methods = {*self.registry, *self.registry.tools.values()}
        for table in (catalog.prompts, catalog.resources, catalog.templates, catalog.methods):
            methods |= {entry.method for entry in table.values()}
        return [method for method in methods if method.scopes is not None]

    def _declared_scopes(self) -> list[str]:
        """Return the scopes that methods name; those that depend on arguments are not known."""
        return sorted({scope for method in self._scoped() if method.scopes for scope in method.scopes.always})

    def _check_scopes(self) -> None:
        """Raise `UsageError` if methods ask for scopes and no token can have any: every caller would be let in."""
        if self.access is None and (scoped := self._scoped()):
            raise UsageError(
                f"{scoped[0].name} asks for scopes, and the app has no auth=.",
                "scopes are those of a token, so over HTTP they could not be checked",
                'App(..., auth=Jwt(issuer="https://auth.example.com", resource="https://api.example.com/mcp"))',
            )

    def _shows(self, method: Method, identity: Identity | None) -> bool:
        """Return whether lists show a method to a caller."""
        return method.scopes is None or self.access is None or self.access.may(identity, method.scopes.always)

    # --- serving -----------------------------------------------------------------------------------------------------

    async def handle(
        self, data: Data, *, caller: str = ANONYMOUS, replayed: list[Id] | None = None, key: str | None = None
    ) -> bytes | None:
        """Answer one message of plain JSON-RPC: bytes in, bytes or nothing out.

        `caller` names the sender; commands of two callers are never the same command. A list given as `replayed` receives
        the ids of the answers that came from the ledger. `key` is the idempotency key of a single call, if it came beside
        the message; with an array it raises `UsageError`, and nothing runs.
        """
        reply = (self._ready or await self._start()).handle(data, caller, False, replayed, key)
        return reply if reply is None or isinstance(reply, bytes) else await reply

    def _answer(
        self,
        data: Data,
        *,
        caller: str,
        replayed: list[Id] | None,
        key: str | None,
        sending: Sending,
        identity: Identity | None,
        headers: HttpHeader,
    ) -> "bytes | Awaitable[bytes | None] | None":
        """Answer a message that came over HTTP: at once, or by the awaitable that is returned."""
        if self._ready is not None:
            return self._ready.handle(data, caller, False, replayed, key, sending, None, identity, headers)

        async def later() -> bytes | None:
            reply = (await self._start()).handle(data, caller, False, replayed, key, sending, None, identity, headers)
            return reply if reply is None or isinstance(reply, bytes) else await reply

        return later()

    async def _start(self) -> "Dispatcher":
        if self._lifespan is not None:
            await self._lifespan.enter()
        return self._serving()

    def handle_sync(self, data: Data, *, caller: str = ANONYMOUS, replayed: list[Id] | None = None) -> bytes | None:
        """Answer one message without an event loop; raises `CannotWait` if a handler tries to wait."""
        dispatcher = self._ready
        if dispatcher is None:
            if self._lifespan is not None and not self._lifespan.is_entered:
                raise UsageError(
                    "handle_sync cannot start the app.",
                    "its lifespan needs an event loop",
                    "use `await app.handle(...)`, or call handle_sync inside `async with app`",
                )
            dispatcher = self._serving()
        reply = dispatcher.handle(data, caller, True, replayed)
        assert reply is None or type(reply) is bytes  # without a loop, a dispatcher does not return a coroutine
        return reply

    def asgi(self) -> "HttpServer":
        """Return an ASGI application: `/rpc` for JSON-RPC, `/mcp` for MCP, `/healthz` and `/readyz` for supervisors."""
        from wirecall.mcp.server.http import McpEndpoint
        from wirecall.transports.http_server import HttpServer, health_endpoints, rpc_endpoint

        self._check_scopes()
        endpoint = McpEndpoint(self.mcp(), self.limits, shared=self._is_shared)

        async def shutdown(grace: float) -> None:
            if self.access is not None:
                await self.access.aclose()
            await endpoint.aclose(grace / 4)
            await self.aclose(grace * 3 / 4)

        async def startup() -> None:
            self._check_scopes()
            await self._enter()
            await endpoint.open()
            self._adopt_tasks()
            if self.access is not None:  # the last step: what failed before it would leave connections open
                await self.access.open()

        return HttpServer(
            {
                "/rpc": rpc_endpoint(self._answer),
                "/mcp": endpoint,
                **health_endpoints(self._not_ready),
            },
            limits=self.limits,
            authenticate=self._authenticate,
            access=self.access,
            open_routes=None if self.access is None else self.access.endpoints(self._declared_scopes),
            hosts=self._hosts,
            origins=self._origins,
            startup=startup,
            entering=None if self._lifespan is None else self._lifespan.enter,
            shutdown=shutdown,
        )

    @checks_options
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
        """Serve until a signal stops it: MCP and plain JSON-RPC on stdin and stdout, or everything of `asgi` over HTTP."""
        if transport not in ("stdio", "http"):
            raise UsageError(f"{transport!r} is not a transport.", "", 'use "stdio" or "http"')
        from wirecall.stepping import has_loop  # late: `import wirecall` stays light

        if has_loop():
            raise UsageError(
                "app.run() cannot be called inside a running event loop.",
                "it starts a loop of its own",
                "use `await app.serve()` or app.asgi() for HTTP, or call app.run() outside of asyncio.run()",
            )
        if transport == "http" and workers > 1 and self._ledger_scheme == "memory":
            raise UsageError(
                f"{workers} workers cannot share a ledger in memory.",
                "each would know only its own commands, and a retry that reaches another worker would run again",
                'use ledger="sqlite:PATH", "redis://..." or "postgresql://..."',
            )
        self._warn_of_memory()
        if transport == "stdio":
            from wirecall.transports import stdio

            stdio.serve(self._connect, grace=grace, startup=self._enter, cleanup=self.aclose, limits=self.limits)
        else:
            from wirecall.transports import serve as run_http

            self._is_shared = self._is_shared or workers > 1
            run_http.serve(self.asgi, host, port, server=server, workers=workers, grace=grace)

    @checks_options
    async def serve(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 8420,
        server: "ServerName" = "granian",
        grace: float = 10.0,
        listening: Callable[[str], None] | None = None,
    ) -> None:
        """Serve everything of `asgi` over HTTP inside a running event loop, until the task is cancelled.

        Then the server stops as `run` does, within `grace` seconds, and the cancellation goes on. Signals are the caller's.
        `listening` gets the address when connections are accepted; without it, a line on stderr names the address.
        """
        from wirecall.transports.serve import serve_here  # late: `import wirecall` stays light

        self._warn_of_memory()
        told = {} if listening is None else {"listening": lambda address, _: listening(address)}
        await serve_here(self.asgi(), host, port, server=server, grace=grace, **told)

    def _warn_of_memory(self) -> None:
        # A client that loses its server sends its commands again to the next one, and that one has to know of them.
        if self._ledger_scheme == "memory" and any(method.is_command for method in self.registry):
            from wirecall.logs import logger

            logger.warning(
                "the ledger is in memory: a command that is sent again after a restart runs again; "
                'where that matters, use ledger="sqlite:PATH"'
            )

    def _connect(self, send: Callable[[bytes], Awaitable[None]], *, caller: str = ANONYMOUS) -> "StdioConnection":
        """Return a connection of lines, as on stdio; `client.connect` and the command line open one in memory."""
        from wirecall.mcp.server.lines import PIPE, StdioConnection

        self._adopt_tasks()
        return StdioConnection(
            send,
            self.mcp(),
            lambda line, sending: self._serving().handle(line, caller, sending=sending, peer=PIPE),
            self.registry.methods,
            self.limits,
            caller,
        )

    async def _not_ready(self) -> str | None:
        """Return the reason why commands would be refused now, or None. Probes that come together share one check."""
        import asyncio

        from wirecall.ledger.base import LedgerDown
        from wirecall.logs import logger

        async def ask() -> str | None:
            try:
                await (await self.ledger()).ping()
            except (LedgerDown, UsageError) as error:
                logger.error("not ready: the ledger: %s", error)  # the address and the details stay in the log
                return "the ledger cannot be reached, or does not accept writes"
            return None

        if self._lifespan is not None and self._lifespan.has_ended:
            return "the lifespan of the app has ended"
        loop = asyncio.get_running_loop()
        last = self._question
        if not last or last[1].get_loop() is not loop or (last[1].done() and loop.time() >= last[0] + ASK_EVERY):
            last = self._question = loop.time(), loop.create_task(ask())
        asked_at, question = last
        # While a check waits for the ledger no other begins: each would hold a connection, or a place in a queue.
        await asyncio.wait({question}, timeout=max(0.0, asked_at + ASK_WITHIN - loop.time()))
        if not question.done():
            return f"the ledger did not answer within {ASK_WITHIN:g} s"
        return question.result()

    # --- MCP ---------------------------------------------------------------------------------------------------------

    def catalog(self) -> "Catalog":
        """Return the prompts, resources and completions that MCP clients get beside the methods."""
        if self._catalog is not None:
            return self._catalog
        from wirecall.mcp.server.catalog import Catalog

        with self._building:
            if self._catalog is None:
                self._catalog = Catalog(self.registry, self._extensions)
            return self._catalog

    def mcp(self) -> "Server":
        """Return the object that answers MCP's own methods."""
        if self._mcp is not None:
            return self._mcp
        from wirecall.mcp.server.server import Server, ServerInfo
        from wirecall.mcp.server.sessions import Seals

        catalog = self.catalog()
        with self._building:
            if self._mcp is None:
                self._mcp = Server(
                    ServerInfo(self.name, self.version, self.instructions, self.title, self.website, self._icons),
                    catalog,
                    self._serving,
                    Seals(self._secret),
                    self.ledger,
                    list_ttl_ms=self._list_ttl_ms,
                    is_public=self._authenticate is None and self.access is None,
                    limits=self.limits,
                    access=self.access,
                )
            return self._mcp

    def changed(self, what: Lists) -> None:
        """Notify the MCP clients that listen that a list has changed. Works from any thread, and does not wait."""
        if what not in get_args(Lists):
            raise UsageError(f"{what!r} is not a list that can change.", "", f"use one of {', '.join(get_args(Lists))}")
        self.catalog().forget()
        self.mcp().hub.tell(what)

    def updated(self, uri: str) -> None:
        """Notify the MCP clients that have subscribed to a resource that it has changed."""
        self.mcp().hub.tell("updated", uri)

    # --- from the first message to the last --------------------------------------------------------------------------

    def _serving(self) -> "Dispatcher":
        """Return the dispatcher. All threads share one: two would not know of each other's commands in flight."""
        if self._dispatcher is not None:
            return self._dispatcher
        # Late: an app is made in many programs that never serve a call, and `import wirecall` stays light.
        from wirecall.audit import Audit
        from wirecall.commands.execute import Commands
        from wirecall.server.dispatch import Dispatcher
        from wirecall.server.policy import Policy

        with self._building:
            if self._dispatcher is None:
                self._prepare()
                self._audit = Audit(self._audit_path) if self._audit_path else None
                events = Events([self._audit.note] if self._audit else [])
                self._dispatcher = Dispatcher(
                    self.registry,
                    Policy(self.mode, self.limits, self._single_user),
                    Commands(self.ledger, events.call_ended),
                    events,
                    middleware=self._middleware,
                    execution=self._execution,
                    strict=self._strict,
                    permit=None if self.access is None else self.access.permit,
                    lifespan=self._lifespan,
                    tells_blocking=self._is_dev,
                )
                self._ready = self._dispatcher if self._lifespan is None else None
            return self._dispatcher

    @property
    def _is_serving(self) -> bool:
        return self._dispatcher is not None

    def _adopt_tasks(self) -> None:
        """Look for tasks that other processes have left, from now on."""
        if not any(method.task is not None for method in self.registry.tools.values()):
            return
        if self.mode == "production" and self._ledger_scheme == "memory" and not self._is_warned:
            from wirecall.logs import logger

            self._is_warned = True
            logger.warning('the ledger is in memory: tasks end with this process; to keep them, use ledger="sqlite:PATH"')
        self.mcp().tasks.open()

    async def aclose(self, grace: float = GRACE) -> None:
        """Finish the calls in flight, within `grace` seconds, close the ledger, and leave the lifespan."""
        if self._mcp is not None:
            self._mcp.tasks.close()
        ends_at = time.monotonic() + grace
        dispatcher = self._dispatcher
        if dispatcher is not None:
            await dispatcher.aclose(grace)  # from here on it refuses commands, and queries go on
        if self._dispatcher is not dispatcher:
            return  # another `aclose` was faster, and calls after it have opened things anew
        ledger, self._ledger = self._ledger, None
        audit, self._audit = self._audit, None
        if ledger is not None:
            await ledger.aclose()
        if audit is not None:
            await audit.aclose(max(0.0, ends_at - time.monotonic()))
        if self._dispatcher is dispatcher:
            self._dispatcher = self._ready = None  # the next call makes another
        if self._lifespan is not None:
            await self._left(dispatcher, ends_at)

    async def _enter(self) -> None:
        """Check the providers and enter the lifespan, before a client or a server sends the first call."""
        self._prepare()
        if self._lifespan is not None:
            await self._lifespan.hold()

    async def _leave(self) -> None:
        """Called when a client has closed. The last leaves the lifespan, unless a server or `async with app` holds it."""
        if self._lifespan is not None and self._lifespan.let_go():
            await self._left(self._dispatcher, time.monotonic() + GRACE)

    async def _left(self, dispatcher: "Dispatcher | None", ends_at: float) -> None:
        assert self._lifespan is not None
        if dispatcher is not None:
            await dispatcher.drain(max(0.0, ends_at - time.monotonic()))
        await self._lifespan.leave(max(0.0, ends_at - time.monotonic()))

    async def __aenter__(self) -> "App":
        await self._enter()
        self._adopt_tasks()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # --- the ledger --------------------------------------------------------------------------------------------------

    async def ledger(self) -> "Ledger":
        """Return the app's ledger, opened on first use."""
        if self._ledger is not None:
            return self._ledger
        import asyncio
        from contextlib import nullcontext

        # One call opens the ledger, and the others of its event loop wait for it.
        lock: AbstractAsyncContextManager[None]
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # handle_sync: there is only this call
            lock = nullcontext()
        else:
            if self._locked is None or self._locked[0] is not loop:
                self._locked = (loop, asyncio.Lock())
            lock = self._locked[1]
        async with lock:
            if self._ledger is None:
                opened = await open_ledger(self.ledger_url)
                # Another thread may have opened one at the same moment. All threads share the first.
                if self._ledger is None:
                    self._ledger = opened
                else:
                    await opened.aclose()
            return self._ledger

    async def resolve(self, method: str, key: str, verdict: Done | NotDone, *, caller: str = ANONYMOUS) -> bool:
        """Settle a command whose outcome is unknown, with the verdict of an operator; return False if it has no record."""
        from wirecall.commands.run import outcome_of
        from wirecall.ledger.base import RecordId

        if not isinstance(verdict, (Done, NotDone)):
            raise UsageError(
                f"The verdict about a command must be Done(result) or NotDone(), got {verdict!r}.",
                "a wrong guess would replay a result that the command did not have, or run it again",
                "Done(result) if it took effect, NotDone() if it did not",
            )
        id = RecordId(caller, method, key)
        declared = self.registry.get(method) or self.registry.tools.get(method.removeprefix("tools/call:"))
        outcome = None
        if isinstance(verdict, Done):
            result = verdict.result if declared is None else declared.written(verdict.result)
            if declared is not None and method.startswith("tools/call:"):
                # The record of a tool's call holds the result as MCP clients get it, with the value inside.
                from wirecall.mcp.server.calls import call_result

                result = call_result(declared)(result)
            outcome = outcome_of("result", result, id)
            if outcome.payload is None:
                raise UsageError(
                    f"{verdict!r} cannot be replayed.", "its result cannot be written as JSON", "give one that can"
                )
        retention = (declared.terms if declared else Terms()).retention
        return await (await self.ledger()).resolve(id, outcome, retention)


def _limits(limits: Limits | None) -> Limits | None:
    if limits is not None and not isinstance(limits, Limits):
        got = type(limits).__name__
        raise UsageError(f"limits must be a Limits object, got {got}.", fix="use limits=Limits(batch=100)")
    return limits


def _names(option: str, names: Sequence[str], pattern: str, examples: str) -> Sequence[str]:
    """Return names of hosts or of origins. One that no request can have would allow nothing, and no error would tell why."""
    if isinstance(names, str):
        raise UsageError(f"{option} must be a list of names, got a string.", fix=f"use {option}=[{names!r}]")
    for name in cast("Sequence[object]", names):
        if not isinstance(name, str) or re.fullmatch(pattern, name) is None:
            what = "the name of a host" if option == "hosts" else "an origin"
            raise UsageError(f"{option}: expected {what}, got {name!r}.", "no request would fit it", f"use {examples}")
    return names


def _audit_path(url: str | None) -> str | None:
    if url is None:
        return None
    scheme, _, path = url.partition(":")
    if scheme != "file" or not path:
        raise UsageError(f"{url!r} is not an audit trail.", "an audit trail is a file", 'use audit="file:audit.jsonl"')
    return path
