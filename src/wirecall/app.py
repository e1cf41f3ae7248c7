"""`App`: declare methods once, serve them everywhere.

It composes the layers below; nothing below imports it.

1. The decorators, and the methods they register, are in `routing`.
2. Serving begins with the first message, on any transport: `handle`, `asgi` and `run` make the
   dispatcher when they need it, and it opens the ledger at the first command that has a key. So an
   app is cheap to make, and `import wirecall` is light.
3. `aclose` stops the app. The next message starts it again.
"""

import os
import re
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, cast, get_args

from wirecall.errors import EncodeError, UsageError
from wirecall.ledger.base import (
    LedgerDown,
    check_url,
    open_ledger,
    schema_of,
    without_password,
)
from wirecall.limits import Limits
from wirecall.protocol.keys import place_of_key
from wirecall.protocol.messages import Data, Id, JsonObject, encode
from wirecall.protocol.sender import ANONYMOUS, ANYONE, Sender
from wirecall.routing import Declarations, checks_options, milliseconds
from wirecall.server.call import Events
from wirecall.server.context import Context, Middleware
from wirecall.server.identity import Identity
from wirecall.server.method import (
    ArgumentRule,
    BatchRefusal,
    Done,
    Execution,
    Kind,
    Method,
    Mode,
    NotDone,
)

if TYPE_CHECKING:
    import socket
    from asyncio import Task
    from contextlib import AbstractAsyncContextManager

    from wirecall.answers import Answers
    from wirecall.audit import Audit
    from wirecall.auth.access import Access, Verifier, Verify
    from wirecall.commands.commands import Commands
    from wirecall.ledger.base import Ledger, Tables
    from wirecall.mcp.server.batch_tool import BatchTool
    from wirecall.mcp.server.catalog import Catalog
    from wirecall.mcp.server.lines import StdioConnection
    from wirecall.mcp.server.server import Server
    from wirecall.mcp.server.sessions import Sealer
    from wirecall.mcp.types import Icon
    from wirecall.mounting import Mounts
    from wirecall.server.dispatch import Dispatcher
    from wirecall.server.home import Enter
    from wirecall.server.lifespan import Lifespan
    from wirecall.server.tapped import DispatcherTap
    from wirecall.transports.framing import Framing, FramingName
    from wirecall.transports.health import Ready
    from wirecall.transports.http_server import HttpServer
    from wirecall.transports.request import Endpoint
    from wirecall.transports.serve import ServerName
    from wirecall.transports.sockets import Accepted, Address
    from wirecall.transports.stdio import Connect
    from wirecall.transports.succession import Succession

# Whether HTTP clients get a stream of answers if they ask for it. "array": and arrays in pieces.
Stream = bool | Literal["array"]
Lists = Literal["tools", "prompts", "resources"]
Authenticate = Callable[[Mapping[str, str]], "Awaitable[str | None] | str | None"]

MODE_VARIABLE = "WIRECALL_MODE"
SECRET_VARIABLE = "WIRECALL_SECRET"
OTHER_SECRET_VARIABLE = "WIRECALL_SECRET_OTHER"
# Seconds for the calls in flight when an app is closed.
GRACE = 10.0
# Seconds; a client that listens is notified of a change earlier.
LIST_TTL = 60.0
Migrate: TypeAlias = Literal["auto", "create", "never"]

# What an app does to the tables of its ledger, by its mode, unless it says so itself.
_MIGRATE: dict[Mode, Migrate] = {"development": "auto", "production": "create"}

# The same in the words of the stores.
_TABLES: "dict[Migrate, Tables]" = {"auto": "update", "create": "create", "never": "leave"}

# The ledger of an app that does not name one, by its mode.
_LEDGERS: dict[Mode, str] = {
    "development": "memory:",
    "production": "sqlite:.wirecall/ledger.db",
}

# The names that `hosts` and `origins` take, and an example of each. A page in a sandbox has the
# origin "null".
HOST = (
    r"(?i)\*|(\*\.)?[^\s/:@,*]+(:\d+)?|\[[0-9a-f:.]+\](:\d+)?",
    '"api.example.com", "*.example.com" or "*"',
)
ORIGIN = r"(?i)\*|null|[a-z][a-z0-9+.-]*://[^\s/]+/?", '"https://app.example.com" or "*"'

# Seconds in which a server is not ready and still serves after SIGTERM. Balancers ask `/readyz` every
# second or two.
DRAIN: dict[Mode, float] = {"development": 0.0, "production": 5.0}

# Seconds: `/readyz` asks the ledger this often at most, and waits for the answer this long.
ASK_EVERY = 1.0
ASK_WITHIN = 2.0


class AppTap(Protocol):
    """Watches the calls of an app; `console.tap.Tap` implements it.

    It is a protocol, since `app` is below `console` and must not import it.
    """

    @property
    def rows(self) -> "DispatcherTap": ...

    async def open(self, app: "App") -> None:
        """Called in each process that serves, before the first call."""
        ...

    def watch_ledger(self, ledger: "Ledger") -> None:
        """Count the round trips to the ledger."""
        ...

    async def aclose(self) -> None: ...


class App(Declarations):
    """A set of methods and the rules they are served by.

    `mode` defaults to the environment variable WIRECALL_MODE, else to "development". `ledger` is a
    URL; it is opened when the first command arrives, and closed by `aclose`. `migrate` says what
    happens to its tables: "auto" makes them and brings them up to date (the default in
    development), "create" makes them in an empty store and refuses those of an older version (the
    default in production), and "never" also refuses an empty store. `single_user` says
    that all anonymous calls come from one user: then a call that repeats a lost one is recognised
    without authentication. By default that holds in development, on the loopback, for requests that
    no proxy has forwarded.

    `strict=False` serves clients that JSON-RPC 2.0 would refuse: `"params": null`, single requests
    of JSON-RPC 1.0, and notifications that get no answer even if they are refused.
    `batch_refusal="entries"` answers a batch above the limit with one error for each id, instead of
    one error for all of it. `references=True` lets the entries of an array use the results of
    earlier ones (`refs` and `after`); otherwise such an entry is refused. `stream=False` answers
    every array with an array, even if an HTTP client asks for a stream; with `stream="array"`, an
    array is also sent in pieces, in input order. `batch_tool` gives MCP clients a tool that calls
    other tools: "queries" only those that read, "all", or a `BatchTool`.

    `arguments="lenient"` takes the arguments of MCP tools as models send them: `"5"` for an int,
    `"[1,2]"` for a list, `null` for one that may be omitted. It applies to arguments that do not fit
    and have exactly one other meaning. `arguments=` of a decorator decides for one tool.

    `key_at="meta.idempotency-key"` is a further place of the keys of commands: a path of names in
    their params. `key_at=` of a router or a command decides for its commands.

    `title`, `website` and `icons` show the app to users of MCP clients, in the revisions that have
    them.

    `extensions` are the MCP extensions that the app declares to clients: settings by id.
    `@app.extension_method` adds methods. `list_ttl` is how many seconds an MCP client may cache the
    lists of tools, prompts and resources (2026-07-28).

    `audit` is the file of the audit trail, with its options after a question mark:
    "file:audit.jsonl?required&fsync&rotate=100MB". `required` refuses a command whose line cannot be
    written, `fsync` puts every line on the disk, `rotate` begins a new file at a size. "required"
    alone is the file .wirecall/audit.jsonl, or the one that wirecall.toml names.

    For HTTP: `auth` verifies the tokens of requests (`wirecall.auth`); `authenticate` verifies
    anything else: it takes the headers of a request and returns the caller's name, or None to
    refuse. `hosts` and `origins` are the names of the server and of the web pages that may call it,
    besides the loopback's. `secret` seals the state that clients keep for the server; processes
    that share it serve each other's sessions (or WIRECALL_SECRET). Of several secrets, the first
    seals, and all of them open (or WIRECALL_SECRET_OTHER).

    `lifespan` takes the app and returns an async context manager. Every process enters it before
    the first call and leaves it after the last one; its value is `ctx.state`.

    `name` and `version` are the app's, as clients see them, and `instructions` are words for the
    models that use it. `limits` are its `Limits`. `middleware` are layers `(context, next)` around
    every call; the first is the outermost. `execution` says how the entries of an array run:
    "parallel" or "sequential"; by default commands run one after another, and queries beside them.

    Raises `UsageError` for an option that contradicts another one, or that cannot work.

    >>> app = App("shop", version="1.0", limits=Limits(batch=100))
    >>> @app.query
    ... def price(sku: str) -> int:
    ...     return {"tea": 450}[sku]
    >>> app.handle_sync(b'{"jsonrpc":"2.0","method":"price","params":["tea"],"id":1}')
    b'{"jsonrpc":"2.0","result":450,"id":1}'
    """

    # Why an app of this class cannot be mounted.
    _unmountable: str | None = None

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
        migrate: Migrate | None = None,
        audit: str | None = None,
        limits: Limits | None = None,
        middleware: Sequence[Middleware] = (),
        execution: Execution | None = None,
        strict: bool = True,
        batch_refusal: BatchRefusal = "single",
        references: bool = False,
        stream: Stream = True,
        batch_tool: "Literal['queries', 'all'] | BatchTool | None" = None,
        arguments: ArgumentRule = "strict",
        key_at: str | None = None,
        instructions: str | None = None,
        extensions: Mapping[str, JsonObject] | None = None,
        list_ttl: float = LIST_TTL,
        auth: "Access | Verifier | Verify | Sequence[Verifier | Verify] | None" = None,
        authenticate: Authenticate | None = None,
        hosts: Sequence[str] = (),
        origins: Sequence[str] = (),
        secret: str | Sequence[str] | None = None,
        single_user: bool | None = None,
        lifespan: "Callable[[App], AbstractAsyncContextManager[object]] | None" = None,
    ) -> None:
        _check_name(name)
        _check_website(website)
        self.name = name
        self.version = version
        self.title = title
        self.website = website
        self._icons: list[JsonObject] = []
        if icons:
            from wirecall.mcp.types import checked_icons  # late: `import wirecall` stays light

            self._icons = checked_icons(f"the app {name}", icons)
        self.mode = _chosen_mode(mode)
        _check_words(execution, batch_refusal, arguments)
        _check_stream(stream)
        if key_at is not None:
            place_of_key(key_at)
        _check_functions(authenticate=authenticate, lifespan=lifespan)
        _check_secrets(secret)
        _check_layers(middleware)
        self.limits = _limits(limits) or Limits()
        self.ledger_url = ledger or _LEDGERS[self.mode]
        self._names_ledger = ledger is not None
        super().__init__(
            check_url(self.ledger_url),
            checks_results=self.mode == "development",
            arguments=arguments,
            key_at=key_at,
        )
        # The apps that are mounted in this one, and those in which this one is mounted.
        self._mounts: Mounts | None = None
        self._outer: list[App] = []
        self._middleware = list(middleware)
        self._execution = execution
        self._strict = strict
        self._batch_refusal = batch_refusal
        self._references = references
        self._stream: Stream = stream
        self._batch_tool: BatchTool | None = None
        if batch_tool is not None:
            self._use_batch_tool(batch_tool)
        self._single_user = single_user
        self._is_dev = False
        # Wirecall's own server announces whether anonymous callers are one user.
        self._is_announced = False
        self.instructions = instructions
        self._list_ttl_ms = milliseconds("list_ttl", list_ttl)
        self._extensions: dict[str, JsonObject] = {}
        if extensions is not None:
            from wirecall.mcp.types import checked_extensions  # late: `import wirecall` stays light

            self._extensions = checked_extensions(extensions)
        self._authenticate = authenticate
        # The rules about tokens.
        self.access: Access | None = None
        self._hosts: Sequence[str] = _names("hosts", hosts, *HOST)
        self._origins: Sequence[str] = _names("origins", origins, *ORIGIN)
        # Made here and not where it is used: workers are copies of this process, and all need the
        # same secret.
        self._secret: str | bytes = os.urandom(32)
        # They only open what other processes have signed.
        self._other_secrets: Sequence[str] = ()
        # Other processes may serve the same sessions.
        self._is_shared = False
        if known := secret or _secrets_of_environment():
            self._use_secrets(known)
        # Guards the parts that are made on first use and shared by threads.
        self._building = threading.Lock()
        self._catalog: Catalog | None = None
        self._mcp: Server | None = None
        if auth is not None:
            self._protect(auth)
        self._lifespan: Lifespan | None = None
        # Enters the app's own lifespan.
        self._enter_own: Enter | None = None
        if lifespan is not None:
            self._enter_own = partial(lifespan, self)
            self._live_in(self._enter_own)
        self._tap: AppTap | None = None
        self._succession: Succession | None = None
        self._trail = _trail(audit)
        self._audit: Audit | None = None
        self._dispatcher: Dispatcher | None = None
        self._commands: Commands | None = None
        # The same, if no lifespan must be checked before each message.
        self._ready: Dispatcher | None = None
        self._ledger: Ledger | None = None
        # The log says that tasks end with the process.
        self._is_warned = False
        self._tables: Tables = _tables(migrate or _MIGRATE[self.mode])
        self._opening: Task[Ledger] | None = None
        # The last check by `/readyz`, and when it began.
        self._question: tuple[float, Task[str | None]] | None = None

        def discover(context: Context) -> JsonObject:
            """Return the methods of this server as an OpenRPC document."""
            from wirecall.server.openrpc import document

            shown = [method for method in self.registry if self._shows(method, context.identity)]
            described = document(self.name, self.version, shown, self.mode)
            described["x-limits"] = {"batch": self.limits.batch}
            announced = self._announced()
            if announced is not None:
                described["x-wirecall"] = announced
            return described

        self.registry.add(Method(discover, Kind.QUERY, name="rpc.discover", reserved=True))

    @checks_options
    def configure(
        self,
        *,
        ledger: str | None = None,
        migrate: Migrate | None = None,
        audit: str | None = None,
        limits: Limits | None = None,
        hosts: Sequence[str] = (),
        origins: Sequence[str] = (),
        single_user: bool | None = None,
        auth: "Access | Verifier | Verify | Sequence[Verifier | Verify] | None" = None,
        stream: "Stream | None" = None,
        batch_tool: "Literal['queries', 'all'] | BatchTool | None" = None,
        secret: str | Sequence[str] | None = None,
        dev: bool = False,
        tables: "Tables | None" = None,
        tap: AppTap | None = None,
        succession: "Succession | None" = None,
    ) -> None:
        """Replace arguments of the constructor before the first call.

        The command line does so to serve another's app. `hosts` and `origins` are added to those of
        the app. `dev` warns if a function blocks the event loop. `tables` is for programs that use
        the app of a server: it stands above `migrate`, and a ledger whose tables would have to
        change is unavailable. `tap` watches the calls. `succession` lets SIGHUP replace the process of
        an HTTP server.
        """
        if self._dispatcher is not None:
            raise UsageError(
                "The app is serving already.",
                "calls in flight have the old rules",
                "configure it before",
            )
        self._is_dev = self._is_dev or dev
        if migrate is not None:
            self._tables = _tables(migrate)
        self._tables = tables or self._tables
        self._tap = tap or self._tap
        self._succession = succession or self._succession
        if single_user is not None:
            self._single_user = single_user
        if auth is not None:
            self._protect(auth)
        if stream is not None:
            _check_stream(stream)
            self._stream = stream
        if secret:
            _check_secrets(secret)
            self._use_secrets(secret)
        if batch_tool is not None:
            self._use_batch_tool(batch_tool)
        if ledger is not None:
            self._use_ledger(check_url(ledger))
            self.ledger_url = ledger
            self._names_ledger = True
        if audit is not None:
            self._trail = _trail(audit, self._trail)
        self.limits = _limits(limits) or self.limits
        self._hosts = [*self._hosts, *_names("hosts", hosts, *HOST)]
        self._origins = [*self._origins, *_names("origins", origins, *ORIGIN)]

    def middleware(self, layer: Middleware) -> Middleware:
        """Add a callable `(context, next)` around every call; the first is the outermost."""
        if self._dispatcher is not None:
            raise UsageError(
                "The app is serving already.",
                "calls in flight would miss the new layer",
                "add it before",
            )
        self._check_open()
        _check_layer(layer)
        self._middleware.append(layer)
        return layer

    def mount(self, name: str, app: "App", /) -> None:
        """Serve the methods of another app under a name.

        `app.mount("stays", stays)` makes the method `search` of `stays` the method `stays.search`,
        and the tool `stays_search`. The mounted app keeps its middleware, its lifespan, its
        providers, its scopes and the rules of its commands; its methods use the ledger of this
        app. Declare everything in it before. It can still be served alone.

        Raises `UsageError` if a name is taken, if the app already serves, if the two have different
        ledgers, or if this app does not verify the tokens that the mounted one asks for.
        """
        given: object = app
        if not isinstance(given, App):
            raise UsageError(
                f"mount() takes an App, got {type(given).__name__}.",
                fix='use app.mount("stays", stays) for an App, and app.include(router) for a Router',
            )
        from wirecall.mounting import Mounts  # late: few apps need it

        if self._mounts is None:
            self._mounts = Mounts(self)
        self._mounts.add(name, app)
        enter = self._mounts.living(self._enter_own)
        if enter is not None:
            self._live_in(enter)

    def _check_open(self) -> None:
        if self._outer:
            raise UsageError(
                f"The app {self.name!r} is mounted in {self._outer[0].name!r} already.",
                "the outer app would not see a later declaration",
                "mount it afterwards",
            )

    def remove(self, name: str) -> None:
        """Remove a method or tool, even while serving.

        Calls in flight continue; MCP clients are notified.
        """
        if name.startswith("rpc."):
            raise UsageError(f"{name!r} cannot be removed.", "it belongs to the protocol")
        self._check_open()
        method = self.registry.remove(name)
        if method is None:
            known = ", ".join({**self.registry.methods, **self.registry.tools}) or "none"
            raise UsageError(f"There is no method {name!r}.", f"these are registered: {known}")
        if method in self._declared:  # else a mounted app has declared it
            self._declared.remove(method)
        if "mcp" in method.expose and self._mcp is not None:
            self.changed("tools")

    def _use_secrets(self, secret: str | Sequence[str]) -> None:
        """Sign with the first secret, and open what any of them has signed."""
        secrets = [secret] if isinstance(secret, str) else list(secret)
        self._secret = secrets[0]
        self._other_secrets = secrets[1:]
        self._is_shared = True

    def _sealer(self) -> "Sealer":
        """Return what seals the state that clients keep."""
        from wirecall.mcp.server.sessions import Sealer  # late: `import wirecall` stays light

        return Sealer(self._secret, others=self._other_secrets)

    def _live_in(self, enter: "Enter") -> None:
        """Enter a lifespan before the first call."""
        from wirecall.server.lifespan import Lifespan  # late: `import wirecall` stays light

        self._lifespan = Lifespan(enter, lambda: self.limits.start_time)

    def _use_batch_tool(self, batch_tool: object) -> None:
        from wirecall.mcp.server.batch_tool import declared_batch_tool  # late: few apps need it

        self._batch_tool = declared_batch_tool(batch_tool)

    # --- authorization ----------------------------------------------------------------------------

    def _protect(self, auth: "Access | Verifier | Verify | Sequence[Verifier | Verify]") -> None:
        """Verify the tokens of requests from now on."""
        from wirecall.auth.access import Access  # late: `import wirecall` stays light

        if self._mcp is not None:
            raise UsageError(
                "The app is serving already.",
                "its MCP server does not apply auth=",
                "configure it before",
            )
        if self._authenticate is not None:
            raise UsageError(
                "auth= and authenticate= contradict each other.",
                "each of them names the caller of a request",
                "keep auth= for tokens, or authenticate= for anything else",
            )
        self.access = Access.of(auth)
        if self._mounts is not None:
            self._mounts.check_callers()

    def _scoped(self) -> "list[Method]":
        """Return everything that asks for scopes."""
        catalog = self.catalog()
        methods = {*self.registry, *self.registry.tools.values()}
        for table in (catalog.prompts, catalog.resources, catalog.templates, catalog.methods):
            methods |= {entry.method for entry in table.values()}
        return [method for method in methods if method.scopes is not None]

    def _declared_scopes(self) -> list[str]:
        """Return the scopes that methods name. Scopes that depend on arguments are unknown."""
        return sorted(
            {scope for method in self._scoped() if method.scopes for scope in method.scopes.always}
        )

    def _check_scopes(self) -> None:
        """Raise `UsageError` if methods ask for scopes but tokens cannot have any.

        All callers would pass.
        """
        if self.access is None and (scoped := self._scoped()):
            raise UsageError(
                f"{scoped[0].name} asks for scopes, and the app has no auth=.",
                "scopes are those of a token, so over HTTP they could not be checked",
                'App(..., auth=Jwt(issuer="https://auth.example.com", '
                'resource="https://api.example.com/mcp"))',
            )

    def _announced(self) -> JsonObject | None:
        """Return what the app announces beyond OpenRPC, None for nothing (R12)."""
        if not self._references:
            return None
        from wirecall.server.references import announcement

        return announcement()

    def _shows(self, method: Method, identity: Identity | None) -> bool:
        """Return whether lists show a method to a caller."""
        return (
            method.scopes is None
            or self.access is None
            or self.access.may(identity, method.scopes.always)
        )

    # --- serving ----------------------------------------------------------------------------------

    async def handle(
        self,
        data: Data,
        *,
        caller: str = ANONYMOUS,
        replayed: list[Id] | None = None,
        key: str | None = None,
    ) -> bytes | None:
        """Answer one message of plain JSON-RPC: bytes in, bytes or nothing out.

        `caller` names the sender; commands of two callers are never the same command. A list given
        as `replayed` receives the ids of the answers that came from the ledger. `key` is the
        idempotency key of a single call, if the transport carried it outside the message; with an
        array it raises `UsageError`, and nothing runs.
        """
        sender = ANYONE
        if caller != ANONYMOUS:
            sender = Sender(caller)
        reply = (self._ready or await self._start()).handle(data, sender, False, replayed, key)
        return reply if reply is None or isinstance(reply, bytes) else await reply

    def _answer(
        self, data: Data, sender: Sender, replayed: list[Id] | None, key: str | None
    ) -> "bytes | Awaitable[bytes | None] | None":
        """Answer a message that came over HTTP: at once, or by the awaitable that is returned."""
        if self._ready is not None:
            return self._ready.handle(data, sender, False, replayed, key)

        async def later() -> bytes | None:
            reply = (await self._start()).handle(data, sender, False, replayed, key)
            return reply if reply is None or isinstance(reply, bytes) else await reply

        return later()

    async def _begin_stream(
        self, data: Data, sender: Sender, answers: "Answers"
    ) -> "bytes | Coroutine[Any, Any, bytes | None] | None":
        """Begin a batch over HTTP whose answers are sent as they come."""
        dispatcher = self._ready or await self._start()
        return dispatcher.handle(data, sender, answers=answers)

    async def _start(self) -> "Dispatcher":
        if self._lifespan is not None:
            await self._lifespan.enter()
        return self._serving()

    def handle_sync(
        self, data: Data, *, caller: str = ANONYMOUS, replayed: list[Id] | None = None
    ) -> bytes | None:
        """Answer one message without an event loop.

        Raises `CannotWait` if a handler tries to wait.
        """
        dispatcher = self._ready
        if dispatcher is None:
            if self._lifespan is not None and not self._lifespan.is_entered:
                raise UsageError(
                    "handle_sync cannot start the app.",
                    "its lifespan needs an event loop",
                    "use `await app.handle(...)`, or call handle_sync inside `async with app`",
                )
            dispatcher = self._serving()
        sender = ANYONE
        if caller != ANONYMOUS:
            sender = Sender(caller)
        reply = dispatcher.handle(data, sender, True, replayed)
        # Without a loop, a dispatcher does not return a coroutine.
        assert reply is None or type(reply) is bytes
        return reply

    def asgi(
        self,
        *,
        routes: "Mapping[str, Endpoint] | None" = None,
        ready: "Ready | None" = None,
    ) -> "HttpServer":
        """Return an ASGI application.

        It has `/rpc` for JSON-RPC, over HTTP and WebSocket, `/mcp` for MCP, and `/healthz` and
        `/readyz` for supervisors. `routes` are further endpoints by path, behind the same guard.
        `ready` is asked by `/readyz` after the ledger: it returns why the server is not ready, or
        None.
        """
        from wirecall.mcp.server.http import McpEndpoint
        from wirecall.mcp.server.others import Relay
        from wirecall.transports.health import health_endpoints
        from wirecall.transports.http_server import HttpServer
        from wirecall.transports.request import RPC_PATH
        from wirecall.transports.rpc_endpoint import rpc_endpoint
        from wirecall.transports.websocket import rpc_socket

        self._check_scopes()
        others = None
        if self._is_shared and self._ledger_scheme != "memory":
            others = self.ledger
        relay = Relay(self._sealer(), others)
        endpoints = {
            path: McpEndpoint(server, self.limits, relay, path)
            for path, server in self._mcp_servers().items()
        }

        async def shutdown(grace: float) -> None:
            if self.access is not None:
                await self.access.aclose()
            for endpoint in endpoints.values():
                await endpoint.aclose(grace / 4 / len(endpoints))
            await relay.aclose()
            await self.aclose(grace * 3 / 4)

        async def not_ready() -> str | None:
            reason = await self._not_ready()
            if reason is None and ready is not None:
                reason = await ready()
            return reason

        async def startup() -> None:
            self._check_scopes()
            if not self._is_announced:  # only the server around this app knows its address
                self._warn_of_strangers(on_loopback=self.mode == "development")
            await self._enter()
            await relay.open()
            self._adopt_tasks()
            if self._ledger_scheme != "memory" and any(
                each.is_command for each in self.registry.methods.values()
            ):
                await self.check_tables()
                self._serving().commands.open()
            # Last: a failure in a later step would leave connections open.
            if self.access is not None:
                await self.access.open()

        return HttpServer(
            {
                RPC_PATH: rpc_endpoint(
                    self._answer,
                    strict=self._strict,
                    begin=self._begin_stream if self._stream else None,
                    chunks_arrays=self._stream == "array",
                    announced=self._announced(),
                ),
                **endpoints,
                **health_endpoints(not_ready),
                **(routes or {}),
            },
            sockets={
                RPC_PATH: rpc_socket(
                    self._answer, None if self.access is None else self.access.lasts
                )
            },
            limits=self.limits,
            authenticate=self._authenticate,
            access=self.access,
            open_routes=None
            if self.access is None
            else self.access.endpoints(self._declared_scopes),
            hosts=self._hosts,
            origins=self._origins,
            startup=startup,
            entering=None if self._lifespan is None else self._lifespan.enter,
            shutdown=shutdown,
        )

    @checks_options
    def run(
        self,
        transport: Literal["stdio", "http", "tcp", "unix"] = "stdio",
        *,
        host: str = "127.0.0.1",
        port: int = 8420,
        path: str = "",
        framing: "FramingName" = "lines",
        allow_remote: bool = False,
        server: "ServerName" = "granian",
        workers: int = 1,
        grace: float = 10.0,
        drain: float | None = None,
        certificate: "tuple[str, str] | None" = None,
    ) -> None:
        """Serve until a signal stops it.

        It serves MCP and plain JSON-RPC on stdin and stdout, over TCP, or on the Unix socket at
        `path`; over HTTP it serves everything of `asgi`. `framing="content-length"` has a header
        before each message, as language servers have it; HTTP does not need it. `allow_remote` lets
        TCP serve other machines, whose callers are anonymous. `drain` is for HTTP: so many seconds
        after SIGTERM the server is not ready and still serves, so that load balancers send requests
        elsewhere. By default 5 in production, and 0 in development. `certificate` names the files
        of a certificate and its key, in PEM, for HTTPS.
        """
        if transport not in ("stdio", "http", "tcp", "unix"):
            raise UsageError(
                f"{transport!r} is not a transport.", "", 'use "stdio", "http", "tcp" or "unix"'
            )
        from wirecall.aio import has_loop  # late: `import wirecall` stays light

        if has_loop():
            raise UsageError(
                "app.run() cannot be called inside a running event loop.",
                "it starts its own loop",
                "use `await app.serve()` or app.asgi() for HTTP, "
                "or call app.run() outside of asyncio.run()",
            )
        if transport == "http" and workers > 1 and self._ledger_scheme == "memory":
            raise UsageError(
                f"{workers} workers cannot share a ledger in memory.",
                "each would know only its own commands, "
                "and a retry that reaches another worker would run again",
                'use ledger="sqlite:PATH", "redis://..." or "postgresql://..."',
            )
        from wirecall.transports.framing import framing_of

        self._check_middleware()  # before there are workers
        self._warn_of_memory()
        if transport == "stdio":
            from wirecall.transports import stdio
            from wirecall.transports.pipe_name import pipe_name

            connect = self._connect
            if self._ledger_scheme != "memory":  # other servers may share the ledger
                connect = partial(self._connect, peer=pipe_name(0, self.name, self.ledger_url))
            self._announce_ledger()
            stdio.serve(
                connect,
                grace=grace,
                startup=self._enter,
                cleanup=self.aclose,
                limits=self.limits,
                framing=framing_of(framing),
            )
        elif transport == "unix":
            self._run_unix(path, framing_of(framing), grace)
        elif transport == "tcp":
            self._run_tcp(host, port, framing_of(framing), grace, allow_remote=allow_remote)
        else:
            from wirecall.transports import serve as run_http

            self._is_shared = self._is_shared or workers > 1
            announce = self._announcement(run_http.print_address)
            if drain is None:
                drain = DRAIN[self.mode]
            if drain < 0:
                raise UsageError(f"drain must be 0 or more, got {drain!r}.", fix="use drain=5")
            run_http.serve(
                self.asgi,
                host,
                port,
                server=server,
                workers=workers,
                grace=grace,
                drain=drain,
                certificate=None if certificate is None else run_http.Certificate(*certificate),
                listening=announce,
                succession=self._joined_succession(),
            )

    def _joined_succession(self) -> "Succession | None":
        """Return the succession of this process, which has one secret for all processes."""
        succession = self._succession
        if succession is None or isinstance(self._secret, str):
            return succession
        predecessor = succession.predecessor
        if predecessor is not None and predecessor.handover.secret:
            self._secret = bytes.fromhex(predecessor.handover.secret)
        succession.plan.handover.secret = self._secret.hex()
        return succession

    def _run_unix(self, path: str, framing: "Framing", grace: float) -> None:
        """Serve a Unix socket. The user at the other end is the caller."""
        from wirecall.transports import sockets

        if not path:
            raise UsageError(
                'app.run("unix") needs the path of its socket.',
                "",
                'use app.run("unix", path="/run/user/1000/shop/rpc.sock")',
            )

        def accepted(connection: "socket.socket") -> "Connect":
            return partial(self._connect, caller=sockets.user_of(connection))

        with sockets.listen_unix(path) as listener:
            address = sockets.Address(path=os.path.abspath(path))
            self._serve_socket(listener, accepted, address, framing, grace)

    def _run_tcp(
        self, host: str, port: int, framing: "Framing", grace: float, *, allow_remote: bool
    ) -> None:
        """Serve a TCP port, whose callers are anonymous."""
        from itertools import count

        from wirecall.transports import sockets
        from wirecall.transports.pipe_name import this_process
        from wirecall.transports.serve import bind

        if self._authenticate is not None or self.access is not None:
            raise UsageError(
                "This app authenticates its callers, and TCP has no header for a token.",
                "every caller would be anonymous",
                'use app.run("http"), or app.run("unix"), whose callers the kernel names',
            )
        sockets.check_tcp(host, allow_remote=allow_remote)
        numbers = count(1)

        def accepted(_connection: "socket.socket") -> "Connect":
            # A connection has one client. Another connection may have another one.
            peer = f"tcp connection {next(numbers)} of {this_process()}"
            return partial(self._connect, peer=peer)

        with bind(host, port) as listener:
            listener.listen(sockets.BACKLOG)
            name, number = listener.getsockname()[:2]
            address = sockets.Address(host=name, port=number)
            self._serve_socket(listener, accepted, address, framing, grace)

    def _serve_socket(
        self,
        listener: "socket.socket",
        accepted: "Accepted",
        address: "Address",
        framing: "Framing",
        grace: float,
    ) -> None:
        from wirecall.logs import announce, escaped
        from wirecall.transports import sockets

        def listening() -> None:
            announce(escaped(f"Serving messages as {framing.name}. Listening on {address}"))
            self._announce_ledger()

        sockets.serve(
            listener,
            accepted,
            framing=framing,
            grace=grace,
            startup=self._enter,
            cleanup=self.aclose,
            limits=self.limits,
            listening=listening,
        )

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
        """Serve everything of `asgi` over HTTP inside a running event loop.

        When its task is cancelled, the server stops as `run` does, within `grace` seconds, and the
        cancellation propagates. The caller handles signals. `listening` receives the address when
        connections are accepted; without it, a line on stderr names the address.
        """
        # Late: `import wirecall` stays light.
        from wirecall.transports.serve import print_address, serve_here

        self._warn_of_memory()
        announce = self._announcement(print_address)
        if listening is not None:
            announce = self._announcement(lambda address, _: listening(address), names_ledger=False)
        await serve_here(self.asgi(), host, port, server=server, grace=grace, listening=announce)

    def _announcement(
        self, announce: Callable[[str, str], None], *, names_ledger: bool = True
    ) -> Callable[[str, str], None]:
        """Return a function that announces the address of a server.

        It also says whether anonymous callers are one user.
        """
        from urllib.parse import urlsplit

        from wirecall.transports.headers import is_loopback

        self._is_announced = True

        def announced(address: str, how: str) -> None:
            on_loopback = is_loopback(urlsplit(address).hostname or "")
            if self._is_one_user(on_loopback=on_loopback):
                how = f"{how}, anonymous callers are one user"
            announce(address, how)
            if names_ledger:
                self._announce_ledger()
            self._warn_of_strangers(on_loopback=on_loopback)

        return announced

    def _announce_ledger(self) -> None:
        """Name the ledger in use.

        Two hosts with two ledgers would each run the other's commands again.
        """
        from wirecall.logs import announce, escaped  # late: `import wirecall` stays light

        announce(escaped(f"The ledger is {without_password(self.ledger_url)}"))

    def _is_one_user(self, *, on_loopback: bool) -> bool:
        """Return whether all anonymous callers over HTTP are one user."""
        if self._authenticate is not None or self.access is not None:
            return False  # there are no anonymous callers
        if self._single_user is None:
            return on_loopback and self.mode == "development"
        return self._single_user

    def _warn_of_strangers(self, *, on_loopback: bool) -> None:
        """Warn if indistinguishable callers may send commands without a key."""
        is_named = self._authenticate is not None or self.access is not None
        if is_named or self._single_user is not None or self._is_one_user(on_loopback=on_loopback):
            return
        methods = {*self.registry, *self.registry.tools.values()}
        if any(method.is_command and method.key in (None, "auto") for method in methods):
            from wirecall.logs import logger

            logger.warning(
                "anonymous callers cannot be distinguished: "
                "a call without a key that is sent again after its answer was lost runs again; "
                "name the callers with auth=, or, if all of them are one user, "
                "use single_user=True (wirecall serve --single-user)"
            )

    def _warn_of_memory(self) -> None:
        # A client that loses its server sends its commands again to the next one, which needs their
        # records.
        if self._ledger_scheme == "memory" and any(method.is_command for method in self.registry):
            from wirecall.logs import logger

            logger.warning(
                "the ledger is in memory: a command that is sent again after a restart runs again; "
                'where that matters, use ledger="sqlite:PATH"'
            )

    def _connect(
        self,
        send: Callable[[bytes], Awaitable[None]],
        *,
        caller: str = ANONYMOUS,
        peer: str | None = None,
    ) -> "StdioConnection":
        """Return a line connection, as on stdio.

        `client.connect` and the command line open one in memory. `peer` names the client at the
        other end. Without it the client is in this process.
        """
        from wirecall.mcp.server.lines import StdioConnection
        from wirecall.transports.pipe_name import this_process

        self._adopt_tasks()
        name = peer or this_process()
        return StdioConnection(
            send,
            self.mcp(),
            lambda line, sender: self._serving().handle(line, sender),
            self.registry.methods,
            self.limits,
            name,
            caller,
        )

    async def _not_ready(self) -> str | None:
        """Return the reason why commands would be refused now, or None.

        Concurrent probes share one check.
        """
        import asyncio

        from wirecall.logs import logger

        async def ask() -> str | None:
            try:
                await (await self.ledger()).ping()
                self._serving()
                commands = self._commands
                return None if commands is None else await commands.doubt()
            except (LedgerDown, UsageError) as error:
                # The address and the details stay in the log.
                logger.error("not ready: the ledger: %s", error)
                return "the ledger cannot be reached, or does not accept writes"

        if self._lifespan is not None and self._lifespan.has_ended:
            return "the lifespan of the app has ended"
        loop = asyncio.get_running_loop()
        last = self._question
        if (
            not last
            or last[1].get_loop() is not loop
            or (last[1].done() and loop.time() >= last[0] + ASK_EVERY)
        ):
            last = self._question = loop.time(), loop.create_task(ask())
        asked_at, question = last
        # While a check waits for the ledger, no other begins: each would hold a connection or a
        # queue slot.
        await asyncio.wait({question}, timeout=max(0.0, asked_at + ASK_WITHIN - loop.time()))
        if not question.done():
            return f"the ledger did not answer within {ASK_WITHIN:g} s"
        return question.result()

    # --- MCP --------------------------------------------------------------------------------------

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

        catalog = self.catalog()
        with self._building:
            if self._mcp is None:
                server = Server(
                    ServerInfo(
                        self.name,
                        self.version,
                        self.instructions,
                        self.title,
                        self.website,
                        self._icons,
                    ),
                    catalog,
                    self._serving,
                    self._sealer(),
                    self.ledger,
                    list_ttl_ms=self._list_ttl_ms,
                    is_public=self._authenticate is None and self.access is None,
                    limits=self.limits,
                    access=self.access,
                    references=self._references,
                )
                if self._batch_tool is not None:
                    from wirecall.mcp.server.batch_run import add_batch_tool

                    add_batch_tool(self._batch_tool, server, self.name, self.limits.batch)
                self._mcp = server
            return self._mcp

    def _mcp_servers(self) -> "dict[str, Server]":
        """Return the MCP servers of this app by path."""
        return {"/mcp": self.mcp()}

    def changed(self, what: Lists) -> None:
        """Notify listening MCP clients that a list has changed.

        Works from any thread, and does not wait.
        """
        if what not in get_args(Lists):
            raise UsageError(
                f"{what!r} is not a list that can change.",
                "",
                f"use one of {', '.join(get_args(Lists))}",
            )
        self.catalog().forget()
        for outer in self._outer:
            outer.changed(what)
        if self._mcp is not None or not self._outer:
            self.mcp().hub.notify(what)

    def updated(self, uri: str) -> None:
        """Notify the MCP clients that subscribed to a resource that it has changed."""
        for outer in self._outer:
            outer.updated(uri)
        if self._mcp is not None or not self._outer:
            self.mcp().hub.notify("updated", uri)

    # --- from the first message to the last -------------------------------------------------------

    def _serving(self) -> "Dispatcher":
        """Return the dispatcher.

        All threads share one: two would not see each other's commands in flight.
        """
        if self._dispatcher is not None:
            return self._dispatcher
        # Late: many programs make an app and never serve a call, and `import wirecall` stays light.
        from wirecall.audit import Audit
        from wirecall.commands.commands import Commands
        from wirecall.server.dispatch import Dispatcher
        from wirecall.server.policy import Policy

        kind: Callable[..., Dispatcher] = Dispatcher
        if not self._strict:
            from wirecall.server.lax import LaxDispatcher

            kind = LaxDispatcher
        rows = None
        if self._tap is not None:
            rows = self._tap.rows
            kind = self._tapped(rows)
        with self._building:
            if self._dispatcher is None:
                self._prepare()
                events = Events(tap=rows)
                if self._trail is not None:
                    trail = self._audit = Audit(**self._trail)
                    events = Events([trail.note], trail.begin if trail.required else None, rows)
                self._commands = Commands(self.ledger, events.call_ended)
                self._dispatcher = kind(
                    self.registry,
                    Policy(self.mode, self.limits, self._single_user),
                    self._commands,
                    events,
                    middleware=self._middleware,
                    execution=self._execution,
                    batch_refusal=self._batch_refusal,
                    references=self._references,
                    permit=None if self.access is None else self.access.permit,
                    lifespan=self._lifespan,
                    warns_blocking=self._is_dev,
                    in_development=self.mode == "development",
                    shows=self._shows,
                )
                self._ready = self._dispatcher if self._lifespan is None else None
            return self._dispatcher

    @property
    def in_flight(self) -> int:
        """The number of calls that wait for something now."""
        if self._dispatcher is None:
            return 0
        return self._dispatcher.in_flight

    @property
    def trail(self) -> "Audit | None":
        """The open audit trail, if the app has one and serves."""
        return self._audit

    @property
    def trail_options(self) -> dict[str, Any] | None:
        """The arguments of `Audit` for a further trail on the app's file; None: it has none."""
        return None if self._trail is None else dict(self._trail)

    def new_trail(self) -> "Audit | None":
        """Return a further audit trail on the app's file, for a program that does not serve."""
        if self._trail is None:
            return None
        from wirecall.audit import Audit

        return Audit(**self._trail)

    def _tapped(self, rows: "DispatcherTap") -> "Callable[..., Dispatcher]":
        """Return the dispatcher that writes a row about each call."""
        from wirecall.server.tapped import TappedDispatcher, TappedLaxDispatcher

        if self._strict:
            return partial(TappedDispatcher, rows)
        return partial(TappedLaxDispatcher, rows)

    @property
    def _is_serving(self) -> bool:
        return self._dispatcher is not None

    @property
    def _has_begun(self) -> bool:
        is_entered = self._lifespan is not None and self._lifespan.is_entered
        return is_entered or self._is_serving

    def _adopt_tasks(self) -> None:
        """Look for tasks that other processes have abandoned, from now on."""
        if self._batch_tool is not None:
            self.mcp()  # adds the batch tool, which may be a task
        if not any(method.task is not None for method in self.registry.tools.values()):
            return
        if self.mode == "production" and self._ledger_scheme == "memory" and not self._is_warned:
            from wirecall.logs import logger

            self._is_warned = True
            logger.warning(
                "the ledger is in memory: tasks end with this process; "
                'to keep them, use ledger="sqlite:PATH"'
            )
        self.mcp().task_runner.open()

    async def aclose(self, grace: float = GRACE) -> None:
        """Finish the calls in flight, within `grace` seconds; close the ledger and the lifespan."""
        import asyncio

        if self._mcp is not None:
            self._mcp.task_runner.close()
        ends_at = time.monotonic() + grace
        dispatcher = self._dispatcher
        if dispatcher is not None:
            await dispatcher.aclose(grace)  # from here on it refuses commands; queries continue
        if self._tap is not None:
            await self._tap.aclose()
        if self._dispatcher is not dispatcher:
            return  # another `aclose` was faster, and later calls have opened everything again
        opening = self._opening
        self._opening = None
        if opening is not None and opening.get_loop() is asyncio.get_running_loop():
            opening.cancel()
            await asyncio.wait({opening})
        ledger = self._ledger
        self._ledger = None
        audit = self._audit
        self._audit = None
        if ledger is not None:
            await ledger.aclose()
        if audit is not None:
            await audit.aclose(max(0.0, ends_at - time.monotonic()))
        if self._dispatcher is dispatcher:  # the next call makes another
            self._dispatcher = None
            self._ready = None
        if self._lifespan is not None:
            await self._left(dispatcher, ends_at)

    def _prepare(self) -> None:
        super()._prepare()
        if self._mounts is not None:
            self._mounts.prepare()
        self._check_middleware()

    def _check_middleware(self) -> None:
        """Raise `UsageError` if wirecall's own middleware cannot use the ledger.

        It would fail every call.
        """
        layers = self._middleware
        if self._mounts is not None:
            layers = [*layers, *self._mounts.layers()]
        if not layers:
            return
        from wirecall.ratelimit import RateLimit  # late: `import wirecall` stays light

        for layer in layers:
            if isinstance(layer, RateLimit):
                layer.check()

    async def _enter(self) -> None:
        """Check the providers and enter the lifespan, before the first call."""
        self._prepare()
        if self._lifespan is not None:
            await self._lifespan.hold()
        if self._tap is not None:
            await self._tap.open(self)

    async def _leave(self) -> None:
        """Called when a client closes.

        The last one leaves the lifespan, unless a server or `async with` holds it.
        """
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

    # --- the ledger -------------------------------------------------------------------------------

    async def ledger(self) -> "Ledger":
        """Return the app's ledger, opened on first use."""
        if self._ledger is not None:
            return self._ledger
        if self._outer and not self._is_serving:  # a mounted app has the ledger of the outer one
            return await self._outer[0].ledger()
        import asyncio

        from wirecall.aio import start

        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # handle_sync: there is only this call
            return await self._open_ledger()
        # Nothing to wait for: `handle_sync` inside a loop cannot wait.
        if self._ledger_scheme == "memory":
            return await self._open_ledger()
        # All calls wait for one task. It continues after they time out: migrating large tables
        # takes longer.
        opening = self._opening
        if opening is None or opening.done() or opening.get_loop() is not loop:
            opening = self._opening = start(loop, self._open_ledger())
            # The last call may have left.
            opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.wait({opening})
        if opening.cancelled():
            raise LedgerDown("the app was closed while its ledger was opened")
        return opening.result()

    async def check_tables(self) -> None:
        """Raise an error if the ledger has tables that this app may not migrate, or cannot use.

        A ledger that cannot be reached is not an error here: `/readyz` reports it.
        """
        import asyncio

        if self._tables == "update" or self._ledger_scheme == "memory":
            return
        try:
            async with asyncio.timeout(ASK_WITHIN):
                schema = await schema_of(self.ledger_url)
        except (LedgerDown, UsageError, TimeoutError):
            return
        schema.check(self._tables)

    async def _open_ledger(self) -> "Ledger":
        opened = await open_ledger(self.ledger_url, self._tables)
        # Another thread may have opened one at the same moment. All threads share the first.
        if self._ledger is None:
            self._ledger = opened
            if self._tap is not None:
                self._tap.watch_ledger(opened)
        else:
            await opened.aclose()
        return self._ledger

    async def resolve(
        self,
        method: str,
        key: str,
        verdict: Done | NotDone,
        *,
        reason: str,
        caller: str = ANONYMOUS,
        operator: str | None = None,
        fence: int | None = None,
    ) -> bool:
        """Settle a command of unknown outcome by an operator's verdict (`wirecall.resolve`).

        The `reason` and the name of the `operator` go into the audit trail, and the record keeps
        the name; by default it is the user of this process. `fence` is that of the record as the
        operator has seen it. Returns False if nothing was changed: there is no such record, its
        outcome is known, or another person was faster.
        """
        from wirecall import resolve as rules
        from wirecall.ledger.base import RecordId

        if not isinstance(verdict, (Done, NotDone)):
            raise UsageError(
                f"The verdict about a command must be Done(result) or NotDone(), got {verdict!r}.",
                "a wrong guess would replay a result that the command did not have, "
                "or run it again",
                "Done(result) if it took effect, NotDone() if it did not",
            )
        id = RecordId(caller, method, key)
        declared = self.registry.get(method) or self.registry.tools.get(
            method.removeprefix("tools/call:")
        )
        record = await (await self.ledger()).get(id)
        if record is None:
            return False
        resolution = rules.Resolution(
            fence=record.fence if fence is None else fence,
            state=record.standing.value,
            verdict="happened" if isinstance(verdict, Done) else "not_happened",
            reason=reason,
            tail=id.key[-rules.TAIL :],
            result=_result_text(verdict, declared, is_tool=method.startswith("tools/call:")),
        )
        # An app that does not serve opens the trail for this line alone.
        trail = self.trail or self.new_trail()
        try:
            await rules.settle(
                await self.ledger(),
                id,
                resolution,
                declared=declared,
                actor=operator or rules.operator(),
                note=None if trail is None else trail.append,
            )
        except rules.NotSettled as error:
            if error.was_late:
                return False
            raise UsageError(str(error), "", error.hint) from error
        finally:
            if trail is not None and trail is not self.trail:
                trail.close()
        return True


def _result_text(verdict: Done | NotDone, declared: "Method | None", *, is_tool: bool) -> str:
    """Return the result that an operator states as JSON, as callers will get it."""
    if isinstance(verdict, NotDone):
        return "null"
    result = verdict.result
    if declared is not None:
        result = declared.written(result)
    if declared is not None and is_tool:
        # The record of a tool's call holds the result as MCP clients get it, with the value inside.
        from wirecall.mcp.server.calls import call_result

        result = call_result(declared)(result)
    try:
        return encode(result).decode()
    except (EncodeError, RecursionError) as error:
        raise UsageError(
            f"{verdict!r} cannot be replayed.",
            f"its result cannot be written as JSON: {error}",
            "give one that can",
        ) from error


# --- checks of options ----------------------------------------------------------------------------


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise UsageError(
            f"The name of an app must be a string, got {type(name).__name__}.",
            fix='use App("shop")',
        )


def _check_website(website: str | None) -> None:
    if website is not None and not website.startswith(("https://", "http://")):
        raise UsageError(f"website must be an http: or https: address, got {website!r}.")


def _tables(migrate: Migrate) -> "Tables":
    """Return what stores do to tables, from what an app says."""
    if migrate not in _TABLES:
        raise UsageError(
            f"{migrate!r} is not a way to migrate the tables of a ledger.",
            fix='use "auto", "create" or "never"',
        )
    return _TABLES[migrate]


def _chosen_mode(mode: Mode | None) -> Mode:
    """Return the mode of the constructor, or that of the environment."""
    chosen = mode or os.environ.get(MODE_VARIABLE) or "development"
    if chosen not in get_args(Mode):
        source = "mode=" if mode else MODE_VARIABLE
        raise UsageError(
            f"{chosen!r} is not a mode.",
            f"{source} has this value",
            'use "development" or "production"',
        )
    return cast(Mode, chosen)


def _check_words(
    execution: Execution | None, batch_refusal: BatchRefusal, arguments: ArgumentRule
) -> None:
    # A mistyped word would mean "parallel", and commands in an array would run out of order.
    if execution not in (None, *get_args(Execution)):
        raise UsageError(
            f"{execution!r} is not a way to run a batch.",
            fix='use execution="sequential" or "parallel"',
        )
    if batch_refusal not in get_args(BatchRefusal):
        raise UsageError(
            f"batch_refusal={batch_refusal!r} is not a way to refuse a batch.",
            fix='use batch_refusal="single" (one error for the whole batch) '
            'or "entries" (one error for each id)',
        )
    if arguments not in get_args(ArgumentRule):
        raise UsageError(
            f"arguments={arguments!r} is not a way to read arguments.",
            fix='use arguments="strict" (they must fit their types) '
            'or "lenient" (as models send them: "5" for an int)',
        )


def _check_stream(stream: object) -> None:
    if not isinstance(stream, bool) and stream != "array":
        raise UsageError(
            f"stream={stream!r} is not a way to stream answers.",
            fix='use stream=True (for clients that ask for it), stream="array" (other clients '
            "get their arrays in pieces) or stream=False",
        )


def _check_functions(**options: object) -> None:
    for option, value in options.items():
        if value is not None and not callable(value):
            raise UsageError(f"{option} must be a function, got {type(value).__name__}.")


def _check_secrets(secret: object) -> None:
    if secret is None or isinstance(secret, str):
        return
    if not isinstance(secret, (list, tuple)):
        raise UsageError(
            f"secret must be a string, got {type(secret).__name__}.", fix="use a long random string"
        )
    if not secret or not all(isinstance(each, str) and each for each in secret):
        raise UsageError(
            f"secret must have one or more strings, got {len(secret)} values.",
            "the first signs, and all of them verify",
            "use secret=[NEW, OLD]",
        )


def _secrets_of_environment() -> list[str]:
    """Return the secrets of the environment: the one that signs first."""
    first = os.environ.get(SECRET_VARIABLE)
    other = os.environ.get(OTHER_SECRET_VARIABLE)
    if other and not first:
        raise UsageError(
            f"{OTHER_SECRET_VARIABLE} is set, and {SECRET_VARIABLE} is not.",
            "there is no secret that signs",
            f"set {SECRET_VARIABLE}",
        )
    return [each for each in (first, other) if each]


def _check_layers(middleware: object) -> None:
    if callable(middleware) or isinstance(middleware, str):
        raise UsageError(
            "middleware must be a list.", fix="use middleware=[RateLimit(100, per=60)]"
        )
    for layer in cast("Sequence[object]", middleware):
        _check_layer(layer)


def _check_layer(layer: object) -> None:
    if isinstance(layer, type):
        fix = f"make an object of it: middleware=[{layer.__name__}(...)]"
        raise UsageError(
            f"middleware: expected a function (context, next), got the class {layer.__name__}.",
            fix=fix,
        )
    if not callable(layer):
        raise UsageError(
            f"middleware: expected a function (context, next), got {type(layer).__name__}."
        )


def _limits(limits: Limits | None) -> Limits | None:
    if limits is not None and not isinstance(limits, Limits):
        got = type(limits).__name__
        raise UsageError(
            f"limits must be a Limits object, got {got}.", fix="use limits=Limits(batch=100)"
        )
    return limits


def _names(option: str, names: Sequence[str], pattern: str, examples: str) -> Sequence[str]:
    """Return checked names of hosts or origins.

    One that no request can have would silently allow nothing.
    """
    if isinstance(names, str):
        raise UsageError(
            f"{option} must be a list of names, got a string.", fix=f"use {option}=[{names!r}]"
        )
    for name in cast("Sequence[object]", names):
        if not isinstance(name, str) or re.fullmatch(pattern, name) is None:
            what = "the name of a host" if option == "hosts" else "an origin"
            raise UsageError(
                f"{option}: expected {what}, got {name!r}.",
                "no request would fit it",
                f"use {examples}",
            )
    return names


# The trail of an app that requires one and does not name it.
_TRAIL = ".wirecall/audit.jsonl"

_SIZES = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _trail(url: str | None, before: "dict[str, Any] | None" = None) -> "dict[str, Any] | None":
    """Return the arguments of `Audit`.

    What an app requires stays required, wherever the trail is.
    """
    if url is None:
        return None
    scheme, _, rest = url.partition(":")
    path, _, words = rest.partition("?")
    if url == "required":
        path = _TRAIL
        words = "required"
        if before is not None:
            path = before["path"]
    elif scheme != "file" or not path:
        raise UsageError(
            f"{url!r} is not an audit trail.",
            "an audit trail is a file",
            'use audit="file:audit.jsonl"',
        )
    found: dict[str, Any] = {"path": path}
    for word in filter(None, words.split("&")):
        name, _, value = word.partition("=")
        if word in ("required", "fsync"):
            found[word] = True
        elif name == "rotate" and (size := _size(value)):
            found["rotate"] = size
        else:
            raise UsageError(
                f"{word!r} is not an option of an audit trail.",
                "there are required, fsync and rotate=SIZE",
                'use audit="file:audit.jsonl?required&fsync&rotate=100MB"',
            )
    if before is not None and before.get("required"):
        found["required"] = True
    return found


def _size(text: str) -> int | None:
    """Return a number of bytes above 0, or None."""
    match = re.fullmatch(r"(\d+)([KMG]i?B|)", text)
    if match is None:
        return None
    return int(match[1]) * _SIZES[match[2]] or None
