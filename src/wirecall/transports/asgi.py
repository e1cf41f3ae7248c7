"""An ASGI application around a few endpoints: what HTTP demands before and after a message, and nothing about messages.

    1 guard     the header is not too long (431), says nothing twice (400), and its Host and Origin are ours (403)
    2 route     a path is an endpoint (404)
    3 identify  `authenticate` says who calls (401)
    4 serve     the endpoint reads `Request.body`, then responds or streams

The rules of the file:

1. An endpoint is left by an answer or by an exception. `HttpError` is an answer. `Gone` is nobody to answer: silence.
   Anything else is logged and becomes 500 without detail, or cuts the stream if one was open.
2. What is refused here is refused with a JSON-RPC error that has no id, because no message was read
   (MCP 2025-11-25 and later: "a JSON-RPC error response that has no id").
3. Probes (`PROBES`) are asked by address and without a name or a secret: no Host check, no authentication.
4. Stopping is asked for, then enforced: `stop` sets `Request.stopping`, and streams that do not end are cut when three
   quarters of the grace time are over. The last quarter is for what the application closes behind them.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from inspect import isawaitable
from typing import Any, TypeAlias

from wirecall.errors import Gone, Unauthorized, UsageError
from wirecall.logs import logger
from wirecall.protocol.limits import Limits
from wirecall.transports.guard import Guard
from wirecall.transports.request import Endpoint, Headers, HttpError, Receive, Request, Scope, Send, error_body
from wirecall.transports.waiting import Waits

Authenticate: TypeAlias = Callable[[Mapping[str, str]], "Awaitable[str | None] | str | None"]

PROBES = frozenset({"/healthz", "/readyz"})
GRACE = 10.0


class HttpServer:
    """The ASGI application: routes by exact path, behind the guards.

    `hosts` are names the server is called by ("example.com", "example.com:8443", "*.example.com"; "*" for any), besides
    those of the loopback. `origins` are web pages that may call it ("https://app.example.com"; "*" for any), besides those
    of the loopback and of `hosts`. `startup` is called before the first request, `shutdown` with the seconds it may take.
    """

    def __init__(
        self,
        routes: Mapping[str, Endpoint],
        *,
        limits: Limits | None = None,
        authenticate: Authenticate | None = None,
        hosts: Sequence[str] | None = None,
        origins: Sequence[str] | None = None,
        startup: Callable[[], Awaitable[None]] | None = None,
        shutdown: Callable[[float], Awaitable[None]] | None = None,
    ) -> None:
        self.routes = dict(routes)
        self.limits = limits or Limits()
        self.stopping = asyncio.Event()
        self.waits = Waits()
        self._authenticate = authenticate
        self._guard = Guard(hosts or (), origins or ())
        self._startup = startup
        self._shutdown = shutdown
        self._active: dict[Request, asyncio.Task[Any] | None] = {}
        self._streams: set[Request] = set()
        self._held: Counter[str] = Counter()  # streams of each caller, or of each session of an anonymous one
        self._cut: set[Request] = set()
        self._idle: asyncio.Event | None = None
        self._deadline = self._cut_at = 0.0

    def allow_host(self, host: str) -> None:
        """A further name the server is called by: the address it is bound to."""
        self._guard.allow_host(host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._other(scope, receive, send)
            return
        path: str = scope["path"]
        root: str = scope.get("root_path") or ""
        if root and path.startswith(root):
            path = path[len(root) :]
        request = Request(self, scope, path, receive, send)
        self._active[request] = asyncio.current_task()
        try:
            if self._guard.is_shared:
                request.add_headers(self._guard.cors(request.headers))
            endpoint = self._admitted(request)
            if self._guard.is_shared:
                answer = self._guard.preflight(request.headers) if request.method == "OPTIONS" else None
                if answer is not None:  # before authentication: a browser sends no secret with this question
                    await request.respond(204, headers=answer)
                    return
            if self._authenticate is not None and request.path not in PROBES:
                request.caller = request.holder = await self._identify(self._authenticate, request.headers)
            await endpoint(request)
        except HttpError as refusal:
            await self._refuse(request, refusal)
        except Gone:
            pass
        except Exception as error:
            logger.error("%s %s failed", request.method, path, exc_info=error)
            await self._refuse(request, HttpError(500, "Internal error"))
        except asyncio.CancelledError:
            # While it stops, a handler that is ended is no failure: servers would print a traceback for each.
            if not self._was_cut(request) and not self.stopping.is_set():
                raise
        finally:
            self._leave(request)

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        else:
            await send({"type": "websocket.close", "code": 1000})

    def _admitted(self, request: Request) -> Endpoint:
        """The endpoint of a request that has passed the guards."""
        self._guard.check(request.headers, self.limits.header_bytes, any_host=request.path in PROBES)
        endpoint = self.routes.get(request.path)
        if endpoint is None and "://" in request.path:
            # The absolute form (RFC 9112, section 3.2.2): its host counts as Host does. uvicorn shows it, granian does not.
            authority, slash, path = request.path.partition("://")[2].partition("/")
            self._guard.check_host(authority.encode("latin-1", "replace"))
            request.path = slash + path
            endpoint = self.routes.get(request.path)
        if endpoint is None:
            raise HttpError(404, f"there is no {request.path[:100]!r}; there are {', '.join(sorted(self.routes))}")
        return endpoint

    async def _identify(self, authenticate: Authenticate, headers: Headers) -> str:
        try:
            answer = authenticate(headers)
            caller = await self.waits.within(answer, self.limits.body_time) if isawaitable(answer) else answer
        except Unauthorized as error:
            raise HttpError(401, error.message, [("www-authenticate", error.www_authenticate)]) from None
        except TimeoutError:
            logger.error("authenticate() took too long")
            raise HttpError(503, "authentication timed out", [("retry-after", "1")]) from None
        if caller is None or caller == "":  # "" is the anonymous caller
            raise HttpError(401, "not authenticated", [("www-authenticate", "Bearer")])
        if not isinstance(caller, str):
            raise UsageError(
                f"authenticate() returned {type(caller).__name__}.", "a caller is a text", "return str, or None to refuse"
            )
        return caller

    async def _refuse(self, request: Request, error: HttpError) -> None:
        if request.started:
            return  # the server cuts a response that is not complete
        with contextlib.suppress(Gone):
            await request.respond(error.status, error_body(error), headers=error.headers)

    # --- streams and stopping ----------------------------------------------------------------------------------------

    def enter_stream(self, request: Request) -> None:
        if request in self._streams:
            return
        if len(self._streams) >= self.limits.streams or self.stopping.is_set():
            raise HttpError(503, "no further stream can be opened now", [("retry-after", "1")])
        if request.holder:
            if self._held[request.holder] >= self.limits.streams_per_caller:
                raise HttpError(503, "this caller has too many streams open: close one", [("retry-after", "1")])
            self._held[request.holder] += 1
        self._streams.add(request)

    def _leave(self, request: Request) -> None:
        del self._active[request]
        if request in self._streams:
            self._streams.discard(request)
            if request.holder:
                self._held[request.holder] -= 1
                if not self._held[request.holder]:
                    del self._held[request.holder]
        request.release()
        if not self._active and self._idle is not None:
            self._idle.set()

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
        """End every stream, and every answer that somebody is slow to read. What has not begun to answer is a handler at
        work: its end is for `shutdown` to decide."""
        for request, task in self._active.items():
            if request.started and task is not None:
                self._cut.add(request)
                task.cancel()

    def _was_cut(self, request: Request) -> bool:
        """Whether the cancellation is our own; it ends here then, for the server around us did not ask for it."""
        task = self._active[request]
        if request not in self._cut or task is None:
            return False
        self._cut.discard(request)
        return task.uncancel() == 0

    async def _drain(self) -> None:
        """Wait for the requests under way, no longer than until the streams are cut."""
        if not self._active:
            return
        self._idle = asyncio.Event()
        rest = self._cut_at - asyncio.get_running_loop().time()
        try:
            await asyncio.wait_for(self._idle.wait(), max(rest, 0.0) + 0.05)
        except TimeoutError:
            logger.warning("stopping with %d requests under way", len(self._active))
        self._idle = None

    # --- lifespan ----------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Before the first request."""
        self.stopping.clear()
        if self._startup is not None:
            await self._startup()

    async def aclose(self) -> None:
        """After the last one: `stop`, unless that was done, and what the application closes, in the time that is left."""
        self.stop()
        await self._drain()
        if self._shutdown is not None:
            rest = max(self._deadline - asyncio.get_running_loop().time(), 0.1)
            try:
                async with asyncio.timeout(rest):
                    await self._shutdown(rest * 0.8)
            except TimeoutError:
                logger.error("the application could not be closed within %g s: a handler does not heed its end", rest)

    async def _live(self, receive: Receive, send: Send) -> None:
        for name, step in (("startup", self.open), ("shutdown", self.aclose)):
            await receive()
            try:
                await step()
            except Exception as error:
                logger.error("%s failed", name, exc_info=error)
                await send({"type": f"lifespan.{name}.failed", "message": str(error)})
                return
            await send({"type": f"lifespan.{name}.complete"})
