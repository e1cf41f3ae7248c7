"""An application around a few endpoints, for servers of ASGI and of RSGI.

It has the rules of HTTP before and after a message. `HttpServer._serve` lists the steps of a
request, `guard` decides which requests are accepted, and `asgi` and `rsgi` carry them.

1. An endpoint ends with an answer or with an exception. `HttpError` is an answer. `Gone` means that
   the client has left and gets no answer. Any other exception is logged and becomes 500 without
   detail, or cuts the stream if one is open.
2. `drain` keeps serving, but sends clients elsewhere: `/readyz` is 503, and each answer closes its
   connection. It comes before `stop`.
3. `stop` sets `HttpRequest.stopping`, and after three quarters of the grace time it cuts the
   remaining streams. In the last quarter the application closes its resources.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from contextvars import Token
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from wirecall.aio import Signal, Timeouts
from wirecall.errors import Gone, StartFailed, Unauthorized, UsageError
from wirecall.limits import Limits
from wirecall.logs import CURRENT, Named, RequestIds, logger, request_id_of, trace_id_of
from wirecall.transports.arrivals import Arrivals
from wirecall.transports.asgi import AsgiRequest, AsgiSocket, Receive, Scope, Send
from wirecall.transports.guard import Guard
from wirecall.transports.headers import Headers
from wirecall.transports.health import PROBES
from wirecall.transports.refusals import REPORTED, Refusals
from wirecall.transports.request import CLOSE, Endpoint, HttpError, HttpRequest, Pairs
from wirecall.transports.rsgi import RsgiRequest, RsgiScope, RsgiSocket
from wirecall.transports.websocket import SocketEndpoint

if TYPE_CHECKING:
    from wirecall.server.identity import Identity

Authenticate: TypeAlias = Callable[[Mapping[str, str]], "Awaitable[str | None] | str | None"]

GRACE = 10.0


class Gate(Protocol):
    """Judges the tokens of requests.

    `wirecall.auth.Access` implements it, in a layer above this one.
    """

    def known(self, headers: Headers) -> "tuple[Identity, str] | None":
        """Return the identity behind a request and the caller's name.

        Returns None if its token was not verified before.
        """
        ...

    def identify(self, headers: Headers) -> "Coroutine[Any, Any, tuple[Identity, str]]":
        """Return the same for any token, or raise HttpError."""
        ...

    def below(self, root: str, headers: Pairs) -> Pairs:
        """Return the headers of a refusal by an app that is mounted at `root`."""
        ...


class HttpServer:
    """The application: routes by exact path, behind the guard.

    `hosts` are names of the server ("example.com", "example.com:8443", "*.example.com"; "*" for
    any), in addition to those of the loopback. `origins` are web pages that may call it and read
    its answers ("https://app.example.com"; "*" for any). `open_routes` need no credentials, and
    pages of every origin may ask them. `sockets` are the paths of WebSockets. `startup` runs before
    the first request, `shutdown` after the last one; it receives the seconds that it may take.
    `entering` runs before each request: an app around this one may not forward the lifespan of
    ASGI, so nothing has run `startup`. `fallback` gets the paths that are not among the routes;
    without it they are refused.
    """

    def __init__(
        self,
        routes: Mapping[str, Endpoint],
        *,
        limits: Limits | None = None,
        authenticate: Authenticate | None = None,
        access: Gate | None = None,
        open_routes: Mapping[str, Endpoint] | None = None,
        sockets: Mapping[str, SocketEndpoint] | None = None,
        hosts: Sequence[str] | None = None,
        origins: Sequence[str] | None = None,
        startup: Callable[[], Awaitable[None]] | None = None,
        shutdown: Callable[[float], Awaitable[None]] | None = None,
        entering: Callable[[], Awaitable[None]] | None = None,
        fallback: Endpoint | None = None,
        refusal_headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        self._fallback = fallback
        # Fields of the answers to requests that no endpoint gets.
        self._refusal_headers = refusal_headers
        self._open = {**(open_routes or {})}
        # Paths that do not need credentials, and do not need a started application.
        self._free = PROBES.union(self._open)
        self.routes = {**routes, **self._open}
        # The endpoints of WebSockets.
        self._sockets: dict[str, Any] = {**(sockets or {})}
        self.limits = limits or Limits()
        self.stopping = Signal()
        # Whether clients are sent elsewhere, and what `/readyz` says about it.
        self._is_draining = False
        self._unready: str | None = None
        # Whether the server is bound to a loopback address; None: look at each request.
        self.is_loopback: bool | None = None
        self.timeouts = Timeouts()
        # The requests whose clients are not watched yet (`HttpRequest.watch_soon`).
        self.watches = Timeouts()
        self.arrivals = Arrivals()
        self._authenticate = authenticate
        self._access = access
        self._asks = access is not None or authenticate is not None
        self._guard = Guard(
            hosts or (),
            origins or (),
            max_bytes=self.limits.header_bytes,
            checks_tokens=access is not None,
        )
        self._startup = startup
        self._shutdown = shutdown
        self._entering = entering
        self._refusals = Refusals()
        self._active: dict[HttpRequest, asyncio.Task[Any] | None] = {}
        # How many streams are open.
        self._streams = 0
        # Streams of each caller; an anonymous caller counts per session.
        self._held: Counter[str] = Counter()
        # Set when no request is active; exists while `aclose` waits for that.
        self._idle: asyncio.Event | None = None
        # The loop times at which the grace time ends, and at which streams are cut.
        self._deadline = 0.0
        self._cut_at = 0.0

    def allow_host(self, host: str) -> None:
        """Add a name of the server: the address that it is bound to."""
        self._guard.allow_host(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        if scope["type"] == "websocket":
            await self._serve(AsgiSocket(self, scope, receive, send))
            return
        await self._serve(AsgiRequest(self, scope, receive, send))

    def __rsgi__(self, scope: RsgiScope, protocol: Any) -> Awaitable[None]:
        if scope.proto == "http":
            return self._serve(RsgiRequest(self, scope, protocol))
        return self._serve(RsgiSocket(self, scope, protocol))

    async def _serve(self, request: HttpRequest) -> None:
        task = self._active[request] = asyncio.current_task()
        if self.arrivals.handed:
            self._note_connection(request)
        ids = None
        fields = request.headers.first
        if "x-request-id" in fields or "traceparent" in fields:
            ids = _set_ids(request)
        try:
            # Steps 1 and 2: the header is acceptable, and the path is an endpoint.
            endpoint = self._admit(request)
            # Step 3: answer a browser's preflight for a page of a listed origin (204). This comes
            # before authentication, because a browser does not send credentials with a preflight
            # (fetch.spec.whatwg.org, "CORS-preflight fetch").
            if request.method == "OPTIONS" and await self._answer_preflight(request):
                return
            if request.path not in self._free:
                # Step 4: a token or `authenticate` names the caller (401).
                if self._asks:
                    headers = request.headers
                    known = None
                    if self._access is not None and not headers.has_doubles:
                        known = self._access.known(headers)
                    request.identity, request.caller = known or await self._identify(headers)
                    request.holder = request.caller
                # Step 5: the application has started (503).
                if self._entering is not None:
                    try:
                        await self._entering()
                    except StartFailed as error:
                        raise _cannot_start(error) from None
            # Step 6: the endpoint reads the body, then responds or streams.
            await endpoint(request)
        except HttpError as refusal:
            if refusal.status in REPORTED:
                self._refusals.note(request, refusal)
            await self._refuse(request, refusal)
        except Gone:
            pass
        except Exception as error:
            logger.error("%s %s failed", request.method, request.path, exc_info=error)
            await request.refuse(HttpError(500, "Internal error"))
        except asyncio.CancelledError:
            if not self._takes_cancel(request, task):
                raise
        finally:
            if ids is not None:
                # The request is closed from outside, perhaps in another context.
                with suppress(ValueError):
                    CURRENT.reset(ids)
            self._release(request)

    async def _refuse(self, request: HttpRequest, refusal: HttpError) -> None:
        """Send a refusal; its challenge names metadata that the client reaches."""
        if request.root and self._access is not None:
            refusal.headers = self._access.below(request.root, refusal.headers)
        request.add_headers(self._refusal_headers)
        await request.refuse(refusal)

    def _note_connection(self, request: HttpRequest) -> None:
        """Note that a request has arrived on a connection, perhaps after a watched answer."""
        client = request.address()
        if client is not None:
            self.arrivals.note_request(client)

    def _admit(self, request: HttpRequest) -> Endpoint:
        """Return the endpoint of a request that is acceptable, or raise HttpError."""
        if self._is_draining:
            request.add_headers([CLOSE])
        headers = request.headers
        # An application may mount this one a second time, at the well-known path of its host.
        if request.root and request.root + request.path in self._open:
            request.path = request.root + request.path
        path = request.path
        guard = self._guard
        # Step 1: the header is not too long (431), has no field twice that decides something (400),
        # and its Host and Origin are allowed (403). Supervisors call probes by address, so these
        # accept any Host.
        is_open = path in self._open
        if guard.is_shared and not is_open:
            request.add_headers(guard.cors(headers))
        guard.check(headers, any_host=path in PROBES, any_origin=is_open)
        # Absolute target (RFC 9112, section 3.2.2): checked like Host.
        if request.authority is not None:
            guard.check_host(request.authority)
        # Step 2: the path is an endpoint (404).
        if request.is_websocket:
            return self._socket_endpoint(request)
        endpoint = self.routes.get(path, self._fallback)
        if endpoint is None:
            raise HttpError(
                404, f"there is no {path[:100]!r}; there are {', '.join(sorted(self.routes))}"
            )
        return endpoint

    def _socket_endpoint(self, request: HttpRequest) -> Endpoint:
        """Return the endpoint of a request for a WebSocket, or raise HttpError."""
        self._guard.check_page(request.headers)
        endpoint: Endpoint | None = self._sockets.get(request.path)
        if endpoint is None:
            known = ", ".join(sorted(self._sockets)) or "none"
            raise HttpError(
                404, f"there is no WebSocket at {request.path[:100]!r}; there are: {known}"
            )
        return endpoint

    async def _answer_preflight(self, request: HttpRequest) -> bool:
        """Answer a preflight of a page of a listed origin; return whether the request is one."""
        if not self._guard.is_shared or request.path in self._open:
            return False
        fields = self._guard.preflight(request.headers)
        if fields is None:
            return False
        await request.respond(204, headers=fields)
        return True

    def _takes_cancel(self, request: HttpRequest, task: "asyncio.Task[Any] | None") -> bool:
        """Take back a cancellation that this class requested; return whether it ends here.

        The server around this class did not request it. While stopping, every cancellation ends
        here, because servers would print a traceback for each.
        """
        if request.is_cut and task is not None and task.uncancel() == 0:
            return True
        return self.stopping.is_set()

    def _release(self, request: HttpRequest) -> None:
        """Forget a request that is over."""
        del self._active[request]
        if request.is_stream:
            self._leave_stream(request)
        request.release()
        if self._idle is not None and not self._active:
            self._idle.set()

    async def _identify(self, headers: Headers) -> "tuple[Identity | None, str]":
        """Return the identity in the caller's token, and the name of the caller."""
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
            raise HttpError(
                401, error.message, [("www-authenticate", error.www_authenticate)]
            ) from None
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

    def report(self, request: HttpRequest, refusal: HttpError) -> None:
        """Log a refusal that an endpoint has answered in its own way."""
        self._refusals.note(request, refusal)

    # --- streams and stopping ---------------------------------------------------------------------

    def enter_stream(self, request: HttpRequest) -> None:
        """Count a stream; HttpError 503 if too many are open."""
        if request.is_stream:
            return
        if self._streams >= self.limits.streams or self.stopping.is_set():
            raise HttpError(503, "no more streams can be opened now", [("retry-after", "1")])
        if request.holder:
            if self._held[request.holder] >= self.limits.streams_per_caller:
                raise HttpError(
                    503, "this caller has too many streams open: close one", [("retry-after", "1")]
                )
            self._held[request.holder] += 1
        request.is_stream = True
        self._streams += 1

    def _leave_stream(self, request: HttpRequest) -> None:
        self._streams -= 1
        if request.holder:
            self._held[request.holder] -= 1
            if not self._held[request.holder]:
                del self._held[request.holder]

    @property
    def leaving(self) -> str | None:
        """Why no more requests should come, as `/readyz` says it; None if they may."""
        return self._unready

    def drain(self, *, is_replaced: bool = False) -> None:
        """Keep serving, but send clients elsewhere.

        If another process has taken over the address (`is_replaced`), `/readyz` is not changed: it
        is about the address.
        """
        self._is_draining = True
        if not is_replaced:
            self._unready = "draining"

    def stop(self, grace: float = GRACE) -> None:
        """Ask every stream to end, and cut the remaining ones at three quarters of `grace`.

        Does not wait.
        """
        if self.stopping.is_set():
            return
        loop = asyncio.get_running_loop()
        self._deadline = loop.time() + grace
        self._cut_at = loop.time() + grace * 0.75
        # If another process has the address, `drain` has been called and has left this None.
        if self._unready is not None or not self._is_draining:
            self._unready = "stopping"
        self.stopping.set()
        loop.call_at(self._cut_at, self._cut_answers)

    def _cut_answers(self) -> None:
        """Cancel every stream, and every answer that its client is slow to read.

        A request that has not begun to answer is a handler at work: `shutdown` decides about it.
        """
        for request in self._active:
            if request.started:
                request.is_cut = True
                self.cancel(request)

    def cancel(self, request: HttpRequest) -> None:
        """Cancel the task of a request."""
        task = self._active[request]
        if task is not None:
            task.cancel()

    async def sockets_closed(self, seconds: float) -> float:
        """Wait until every WebSocket has ended, at most so many seconds; return how many passed."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        tasks = {task for request, task in self._active.items() if request.is_websocket and task}
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        return loop.time() - begun

    def abandon(self) -> None:
        """Cancel every remaining request."""
        for request in self._active:
            self.cancel(request)

    # --- lifespan ---------------------------------------------------------------------------------

    async def open(self) -> None:
        """Start, before the first request."""
        self.stopping.clear()
        self._is_draining = False
        self._unready = None
        if self._startup is not None:
            await self._startup()

    async def aclose(self) -> None:
        """Stop, wait for active requests until streams are cut, then close the application."""
        self.stop()
        self._refusals.close()
        loop = asyncio.get_running_loop()
        if self._active:
            self._idle = asyncio.Event()
            try:
                async with asyncio.timeout_at(max(self._cut_at, loop.time()) + 0.05):
                    await self._idle.wait()
            except TimeoutError:
                logger.warning("stopping with %d requests in flight", len(self._active))
            self._idle = None
        self.arrivals.settle()
        if self._shutdown is not None:
            rest = max(self._deadline - loop.time(), 0.1)
            try:
                async with asyncio.timeout(rest):
                    await self._shutdown(rest * 0.8)
            except TimeoutError:
                logger.error(
                    "the application did not close within %g s: a handler ignores its cancellation",
                    rest,
                )

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


def _set_ids(request: HttpRequest) -> "Token[Named | None]":
    """Let log records of the request carry its ids, and answer with its X-Request-Id."""
    headers = request.headers
    ids = RequestIds(
        request_id_of(headers.get("x-request-id")), trace_id_of(headers.get("traceparent"))
    )
    before = CURRENT.set(ids)
    if ids.request_id is not None:
        request.add_headers([("x-request-id", ids.request_id)])
    return before


def _cannot_start(error: StartFailed) -> HttpError:
    """Log why the application cannot start, and return the refusal."""
    logger.error("%s", error, exc_info=error.__cause__)
    return HttpError(503, "the app cannot start", [("retry-after", "1")])
