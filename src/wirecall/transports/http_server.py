"""An application around a few endpoints, for servers of ASGI and of RSGI: the rules of HTTP before and after a message.

`HttpServer._serve` has the steps of a request; `request` says how ASGI and RSGI carry it. The endpoints of plain
JSON-RPC and of supervisors are at the end.

1. An endpoint ends with an answer or with an exception. `HttpError` is an answer. `Gone` means that the client has left: no
   answer. Any other exception is logged and becomes 500 without detail, or cuts the stream if one is open.
2. `stop` sets `HttpRequest.stopping`, and after three quarters of the grace time it cuts the streams that are left. The last
   quarter is for the application to close its resources.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from inspect import isawaitable
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from wirecall.errors import Gone, InvalidParams, LimitExceeded, StartFailed, Unauthorized, UsageError
from wirecall.logs import logger
from wirecall.protocol import messages as frames
from wirecall.protocol.messages import Data, Id, Limits, Sending
from wirecall.stepping import Signal, Timeouts
from wirecall.transports.request import (
    CLOSE,
    AsgiRequest,
    Endpoint,
    Headers,
    HttpError,
    HttpRequest,
    Pairs,
    Receive,
    RsgiRequest,
    RsgiScope,
    Scope,
    Send,
    replayed_mark,
)

if TYPE_CHECKING:
    from wirecall.server.identity import Identity

Authenticate: TypeAlias = Callable[[Mapping[str, str]], "Awaitable[str | None] | str | None"]

PROBES = frozenset({"/healthz", "/readyz"})
GRACE = 10.0


class Gate(Protocol):
    """Judges the tokens of requests; `wirecall.auth.Access` is one."""

    def known(self, headers: Headers) -> "tuple[Identity, str] | None":
        """Return the identity behind a request and the caller's name, if its token was verified before."""
        ...

    def identify(self, headers: Headers) -> "Coroutine[Any, Any, tuple[Identity, str]]":
        """Return the same for any token, or raise HttpError."""
        ...


class HttpServer:
    """The application: routes by exact path, behind the guard.

    `hosts` are names of the server ("example.com", "example.com:8443", "*.example.com"; "*" for any), besides those of the
    loopback. `origins` are web pages that may call it and read its answers ("https://app.example.com"; "*" for any).
    `open_routes` need no credentials, and pages of every origin may ask them.
    `startup` runs before the first request, `shutdown` after the last one: it gets the seconds that it may take. `entering`
    runs before each request: an app around this one may not forward the lifespan of ASGI, so nothing has run `startup`.
    """

    def __init__(
        self,
        routes: Mapping[str, Endpoint],
        *,
        limits: Limits | None = None,
        authenticate: Authenticate | None = None,
        access: Gate | None = None,
        open_routes: Mapping[str, Endpoint] | None = None,
        hosts: Sequence[str] | None = None,
        origins: Sequence[str] | None = None,
        startup: Callable[[], Awaitable[None]] | None = None,
        shutdown: Callable[[float], Awaitable[None]] | None = None,
        entering: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._open = {**(open_routes or {})}
        self.routes = {**routes, **self._open}
        self.limits = limits or Limits()
        self.stopping = Signal()
        self.timeouts = Timeouts()
        self._authenticate = authenticate
        self._access = access
        self._asks = access is not None or authenticate is not None
        # Where tokens are judged, two Authorization fields are a bad token (401), as any other is, and so is one too long.
        self._guard = Guard(hosts or (), origins or (), SINGLE if access is None else SINGLE[:-1])
        self._startup = startup
        self._shutdown = shutdown
        self._entering = entering
        self._active: dict[HttpRequest, asyncio.Task[Any] | None] = {}
        self._streams = 0  # that are open
        self._held: Counter[str] = Counter()  # streams of each caller, or of each session of an anonymous one
        self._idle: asyncio.Event | None = None  # set when no request is active
        self._deadline = self._cut_at = 0.0

    def allow_host(self, host: str) -> None:
        """Add a name of the server: the address that it is bound to."""
        self._guard.allow_host(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] != "http":  # a websocket
            await send({"type": "websocket.close", "code": 1000})
            return
        await self._serve(AsgiRequest(self, scope, receive, send))

    def __rsgi__(self, scope: RsgiScope, protocol: Any) -> Awaitable[None]:
        if scope.proto == "http":
            return self._serve(RsgiRequest(self, scope, protocol))
        protocol.close(None)  # a websocket
        return asyncio.sleep(0)

    async def _serve(self, request: HttpRequest) -> None:
        path, guard, headers = request.path, self._guard, request.headers
        task = self._active[request] = asyncio.current_task()
        try:
            # Step 1: the header is not too long (431), has no field twice that decides something (400), and its Host and
            # Origin are allowed (403). Supervisors ask probes by address, so any Host will do for those.
            is_open = path in self._open
            if guard.is_shared and not is_open:
                request.add_headers(guard.cors(headers))
            guard.check(headers, self.limits.header_bytes, any_host=path in PROBES, any_origin=is_open)
            if request.authority is not None:  # of an absolute target (RFC 9112, section 3.2.2): it counts as Host does
                guard.check_host(request.authority)
            # Step 2: the path is an endpoint (404).
            endpoint = self.routes.get(path)
            if endpoint is None:
                raise HttpError(404, f"there is no {path[:100]!r}; there are {', '.join(sorted(self.routes))}")
            # Step 3: a browser that asks for a page of a listed origin is answered (204). This comes before authentication,
            # because a browser sends no secret with this question (fetch.spec.whatwg.org, "CORS-preflight fetch").
            if (
                guard.is_shared
                and not is_open
                and request.method == "OPTIONS"
                and (answer := guard.preflight(headers)) is not None
            ):
                await request.respond(204, headers=answer)
                return
            # Step 4: a token or `authenticate` names the caller (401). Probes come without a secret.
            if self._asks and path not in PROBES and not is_open:
                known = None if self._access is None or headers.has_doubles else self._access.known(headers)
                request.identity, request.caller = known or await self._identify(headers)
                request.holder = request.caller
            # Step 5: the application has started (503). Probes do not wait for it.
            if self._entering is not None and path not in PROBES and not is_open:
                try:
                    await self._entering()
                except StartFailed as error:
                    logger.error("%s", error, exc_info=error.__cause__)
                    raise HttpError(503, "the app cannot start", [("retry-after", "1")]) from None
            # Step 6: the endpoint reads the body, then responds or streams.
            await endpoint(request)
        except HttpError as refusal:
            await request.refuse(refusal)
        except Gone:
            pass
        except Exception as error:
            logger.error("%s %s failed", request.method, path, exc_info=error)
            await request.refuse(HttpError(500, "Internal error"))
        except asyncio.CancelledError:
            # A cancellation that was made here ends here: the server around did not ask for it. While stopping, no
            # cancellation is a failure: servers would print a traceback for each.
            cut = request.is_cut and task is not None and task.uncancel() == 0
            if not cut and not self.stopping.is_set():
                raise
        finally:
            del self._active[request]
            if request.is_stream:
                self._streams -= 1
                if request.holder:
                    self._held[request.holder] -= 1
                    if not self._held[request.holder]:
                        del self._held[request.holder]
            request.release()
            if self._idle is not None and not self._active:
                self._idle.set()

    async def _identify(self, headers: Headers) -> "tuple[Identity | None, str]":
        """Return the name of the caller, and the identity that its token has."""
        identity: Identity | None = None
        caller: object = None
        try:
            if self._access is not None:
                with self.timeouts.within(self.limits.body_time):
                    identity, caller = await self._access.identify(headers)
            elif self._authenticate is not None:
                caller = self._authenticate(headers)
                if isawaitable(caller):
                    with self.timeouts.within(self.limits.body_time):
                        caller = await caller
        except Unauthorized as error:
            raise HttpError(401, error.message, [("www-authenticate", error.www_authenticate)]) from None
        except TimeoutError:
            logger.error("authenticate() took longer than %g s", self.limits.body_time)
            raise HttpError(503, "authentication timed out", [("retry-after", "1")]) from None
        if caller is None or caller == "":  # "" is the anonymous caller
            raise HttpError(401, "not authenticated", [("www-authenticate", "Bearer")])
        if not isinstance(caller, str):
            raise UsageError(
                f"authenticate() must return str or None, got {type(caller).__name__}.",
                fix="return the name of the caller, or None to refuse",
            )
        return identity, caller

    # --- streams and stopping ----------------------------------------------------------------------------------------

    def enter_stream(self, request: HttpRequest) -> None:
        """Count a stream; HttpError 503 if too many are open."""
        if request.is_stream:
            return
        if self._streams >= self.limits.streams or self.stopping.is_set():
            raise HttpError(503, "no further stream can be opened now", [("retry-after", "1")])
        if request.holder:
            if self._held[request.holder] >= self.limits.streams_per_caller:
                raise HttpError(503, "this caller has too many streams open: close one", [("retry-after", "1")])
            self._held[request.holder] += 1
        request.is_stream = True
        self._streams += 1

    def stop(self, grace: float = GRACE) -> None:
        """Ask every stream to end, and cut those that are left at three quarters of `grace`. Does not wait."""
        if self.stopping.is_set():
            return
        loop = asyncio.get_running_loop()
        self._deadline = loop.time() + grace
        self._cut_at = loop.time() + grace * 0.75
        self.stopping.set()
        loop.call_at(self._cut_at, self._cut_answers)

    def _cut_answers(self) -> None:
        """Cancel every stream, and every answer that its client is slow to read. A request that has not begun to answer is
        a handler at work: `shutdown` decides about it."""
        for request in self._active:
            if request.started:
                request.is_cut = True
                self.cancel(request)

    def cancel(self, request: HttpRequest) -> None:
        """Cancel the task of a request."""
        task = self._active[request]
        if task is not None:
            task.cancel()

    def abandon(self) -> None:
        """Cancel every request that is left."""
        for request in self._active:
            self.cancel(request)

    # --- lifespan ----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Start, before the first request."""
        self.stopping.clear()
        if self._startup is not None:
            await self._startup()

    async def aclose(self) -> None:
        """Stop, wait for the active requests until streams are cut, and close the application in the time that is left."""
        self.stop()
        loop = asyncio.get_running_loop()
        if self._active:
            self._idle = asyncio.Event()
            try:
                async with asyncio.timeout_at(max(self._cut_at, loop.time()) + 0.05):
                    await self._idle.wait()
            except TimeoutError:
                logger.warning("stopping with %d requests in flight", len(self._active))
            self._idle = None
        if self._shutdown is not None:
            rest = max(self._deadline - loop.time(), 0.1)
            try:
                async with asyncio.timeout(rest):
                    await self._shutdown(rest * 0.8)
            except TimeoutError:
                logger.error("the application did not close within %g s: a handler ignores its cancellation", rest)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        for name, step in (("startup", self.open), ("shutdown", self.aclose)):
            await receive()
            try:
                await step()
            except Exception as error:
                logger.error("%s failed", name, exc_info=error)
                await send({"type": f"lifespan.{name}.failed", "message": str(error)})
                return
            await send({"type": f"lifespan.{name}.complete"})


# --- which requests may come in --------------------------------------------------------------------------------------

LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
# Header values that have passed. Clients send few different ones; a client that sends many must not fill the memory.
KNOWN = 256
# Of two values of these fields, a proxy in front may have judged the other one (Host: RFC 9112, section 3.2).
SINGLE = ("Host", "Origin", "Content-Length", "Content-Type", "Authorization")

# The fields that a page of another origin may send and read, besides those of every page (fetch.spec.whatwg.org, CORS).
METHODS = "POST, GET, DELETE"
SENDABLE = frozenset(
    {"authorization", "content-type", "idempotency-key", "last-event-id", "traceparent", "tracestate", "baggage"}
)
MCP_FIELD = re.compile("mcp-[a-z0-9-]+")  # those of MCP, and those that tools mark parameters with
READABLE = "Mcp-Session-Id, WWW-Authenticate, Idempotent-Replayed, Retry-After"
PREFLIGHT_AGE = "600"  # seconds for which a browser keeps the answer

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/@\\\[\]]+)(:[0-9]{1,5})?")


class Guard:
    """Judges the size of a header, its Host and its Origin.

    1. Host and Origin are names of the loopback, or those that the app lists. A web page must not reach a server on its
       reader's machine by a DNS trick.
    2. Only pages of the listed origins can read the answers (CORS), and never with cookies. A request from a page of the
       loopback comes in, but the page cannot read the answer unless its origin is listed.
    """

    def __init__(self, hosts: Sequence[str], origins: Sequence[str], single: Sequence[str]) -> None:
        self._single = single
        self._hosts = {host.lower() for host in hosts} | LOOPBACK
        self._origins = {origin.lower().rstrip("/") for origin in origins}
        self.is_shared = bool(self._origins)  # pages of other origins can read answers
        self._good_hosts: set[str] = set()
        self._good_origins: set[str] = set()

    def allow_host(self, host: str) -> None:
        """Add a name of the server."""
        host = host.lower()
        self._hosts.add(f"[{host}]" if ":" in host and not host.startswith("[") else host)

    def check(self, headers: Headers, max_bytes: int, *, any_host: bool, any_origin: bool = False) -> None:
        """Raise HttpError unless the request may come in."""
        pairs = headers.pairs
        size = sum(map(len, chain.from_iterable(pairs))) + 4 * len(pairs)  # ": " and the end of the line
        if size > max_bytes:
            # Where tokens are judged, a token has a limit of its own: one that is too long is a bad token (401).
            judged = 0 if "Authorization" in self._single else sum(map(len, headers.all("Authorization")))
            if size - judged > max_bytes:
                raise HttpError(431, f"the header is longer than {max_bytes} bytes", [CLOSE])
        if headers.has_doubles:
            for name in self._single:
                if len(headers.all(name)) > 1:
                    raise HttpError(400, f"more than one {name} header", [CLOSE])
        origin = headers.first.get("origin")
        if origin is not None and not any_origin and origin not in self._good_origins:
            text = origin.strip(" \t").lower()
            host = text.partition("://")[2]
            if not self._origins & {"*", text} and not (host and self._is_ours(host)):
                raise HttpError(
                    403, f"Origin {text[:100]!r} may not call this server. If it may, add it to origins=[...] of the app."
                )
            _remember(self._good_origins, origin)
        if not any_host and (value := headers.first.get("host", "")) not in self._good_hosts:
            self.check_host(value)

    def check_host(self, host: str) -> None:
        """Raise HttpError unless this is a name of the server."""
        text = host.strip(" \t").lower()
        if not text:  # granian adds an empty Host to a request without one
            raise HttpError(400, "the Host header is missing")
        if "*" not in self._hosts and not self._is_ours(text):
            raise HttpError(
                403, f"Host {text[:100]!r} is not a name of this server. If it is, use App(hosts=[...]) or --allow-host."
            )
        _remember(self._good_hosts, host)

    def _is_ours(self, authority: str) -> bool:
        parts = _HOST.fullmatch(authority)
        if parts is None:
            return False
        name = parts[1]
        if name in self._hosts or authority in self._hosts:
            return True
        return any(host.startswith("*.") and name.endswith(host[1:]) for host in self._hosts)

    def cors(self, headers: Headers) -> list[tuple[str, str]]:
        """Return the fields that let the page of a request read the answer; at least Vary, for caches."""
        fields = [("vary", "Origin")]
        origin = headers.first.get("origin", "").strip(" \t")
        if origin and self._origins & {"*", origin.lower()}:
            # The origin itself in place of "*", so that there is one way, and pages of other origins learn nothing.
            fields += ("access-control-allow-origin", origin), ("access-control-expose-headers", READABLE)
        return fields

    def preflight(self, headers: Headers) -> Pairs | None:
        """Return the answer to a browser that asks whether a page may send a request; None if this is another question."""
        if "access-control-request-method" not in headers.first or len(self.cors(headers)) == 1:
            return None
        asked = headers.get("access-control-request-headers", "").lower().replace(" ", "").split(",")
        allowed = [name for name in asked if name in SENDABLE or MCP_FIELD.fullmatch(name)]
        return [
            ("access-control-allow-methods", METHODS),
            ("access-control-allow-headers", ", ".join(allowed)),
            ("access-control-max-age", PREFLIGHT_AGE),
        ]


def _remember(known: set[str], value: str) -> None:
    if len(known) >= KNOWN:
        known.clear()
    known.add(value)


# --- endpoints -------------------------------------------------------------------------------------------------------


class Handle(Protocol):
    """Answers a message, at once or by the awaitable that it returns: `App.handle` with the way of the answer."""

    def __call__(
        self,
        data: Data,
        *,
        caller: str,
        replayed: list[Id] | None,
        key: str | None,
        sending: Sending,
        identity: "Identity | None",
        headers: Headers,
    ) -> "bytes | Awaitable[bytes | None] | None": ...


def rpc_endpoint(handle: Handle) -> Endpoint:
    """Return `POST /rpc`, plain JSON-RPC: the endpoint that passes message by message to `handle`.

        200   any JSON-RPC answer, errors included
        204   notifications alone: no answer is due (J7)
        405   another method; 415 another media type; 413 a body that is too long, with the JSON-RPC error that says so

    `Idempotency-Key` is the key of a single call, for clients that keep it out of the params. It does not fit the entries of
    an array, so it is refused there. `Idempotent-Replayed: true` marks an answer that came from the ledger; for an array it
    is the JSON array of the ids of those answers, unless that is too long for a header.
    """

    async def rpc(request: HttpRequest) -> None:
        if request.method != "POST":
            raise HttpError(405, "send a JSON-RPC message with POST", [("allow", "POST")])
        request.check_json()
        try:
            body = await request.body()
        except HttpError as error:
            if error.status != 413 or not error.data:
                raise
            # JSON-RPC 2.0, section 5: the answer to a message that was not read has the id null.
            refusal = LimitExceeded(error.message, limit=error.data["limit"], maximum=error.data["max"])
            await request.respond(413, frames.encode(frames.failure(None, refusal)), headers=error.headers)
            return
        key = request.key()
        if key is not None and frames.opens_array(body):
            misplaced = InvalidParams("Idempotency-Key is for a single call: use params.idempotency_key")
            await request.respond(200, frames.encode(frames.failure(None, misplaced)))
            return
        replayed: list[Id] = []
        sending = request.sending = Sending(request.watch)
        caller, identity, headers = request.caller, request.identity, request.headers
        answer = handle(body, caller=caller, replayed=replayed, key=key, sending=sending, identity=identity, headers=headers)
        if answer is not None and not isinstance(answer, bytes):
            answer = await answer
        if answer is None:
            await request.respond(204)
            return
        marks = replayed_mark(replayed, is_array=frames.opens_array(body)) if replayed else ()
        await request.respond(200, answer, headers=marks)

    return rpc


def health_endpoints(ready: Callable[[], Awaitable[str | None]] | None = None) -> dict[str, Endpoint]:
    """Return `/healthz`, which answers while the process does, and `/readyz`: `ready` gives the reason why not, or None."""

    async def healthz(request: HttpRequest) -> None:
        _check_read(request)
        await request.respond(200, b'{"status":"ok"}')

    async def readyz(request: HttpRequest) -> None:
        _check_read(request)
        reason = "stopping" if request.stopping.is_set() else await ready() if ready else None
        if reason is None:
            await request.respond(200, b'{"status":"ready"}')
        else:
            await request.respond(503, frames.encode({"status": "not ready", "reason": reason}))

    return {"/healthz": healthz, "/readyz": readyz}


def _check_read(request: HttpRequest) -> None:
    if request.method not in ("GET", "HEAD"):
        raise HttpError(405, "ask with GET", [("allow", "GET, HEAD")])
