"""An ASGI application around a few endpoints: what HTTP demands before and after a message, and nothing about messages.

    1 measure   the header is not too long (431), and what decides something is in it once (400)
    2 guard     Host and Origin are ours (403): a web page must not reach a server on the reader's machine by a DNS trick
    3 route     a path is an endpoint (404)
    4 identify  `authenticate` says who calls (401)
    5 serve     the endpoint reads `Request.body`, then responds or streams

The rules of the file:

1. The straight way costs no task and no timer. A limit is set (`Waits`) when something really waits: a body that has not
   arrived, a client that does not read. Somebody watches for the client's leaving only while `Request.gone` is awaited.
2. An endpoint is left by an answer or by an exception. `HttpError` is an answer. `Gone` is nobody to answer: silence.
   Anything else is logged and becomes 500 without detail, or cuts the stream if one was open.
3. What is refused here is refused with a JSON-RPC error that has no id, because no message was read
   (MCP 2025-11-25 and later: "a JSON-RPC error response that has no id").
4. Probes (`PROBES`) are asked by address and without a name or a secret: no Host check, no authentication.
5. Stopping is asked for, then enforced: `stop` sets `Request.stopping`, and streams that do not end are cut when three
   quarters of the grace time are over. The last quarter is for what the application closes behind them.
"""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, MutableMapping, Sequence
from inspect import isawaitable
from itertools import chain
from types import CoroutineType, coroutine
from typing import Any, TypeAlias, overload

from wirecall import frames
from wirecall.errors import Gone, InternalError, InvalidRequest, Unauthorized, UsageError, WirecallError
from wirecall.lanes import resume
from wirecall.logs import logger
from wirecall.policy import ANONYMOUS, Limits

Event: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = Event
Receive: TypeAlias = Callable[[], Awaitable[Event]]
Send: TypeAlias = Callable[[Event], Awaitable[None]]
Pairs: TypeAlias = Sequence[tuple[str, str]]
Endpoint: TypeAlias = Callable[["Request"], Awaitable[None]]
Authenticate: TypeAlias = Callable[[Mapping[str, str]], "Awaitable[str | None] | str | None"]

PROBES = frozenset({"/healthz", "/readyz"})
LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
GRACE = 10.0

# A body longer than this is sent in pieces, so that a client that stops reading is noticed in the middle of it.
PIECE = 256 << 10
# What is still taken of a body that was refused as too long.
LINGER_BYTES = 64 << 20
LINGER_TIME = 1.0
# Header values that were found good once. Clients send few different ones; a client that sends many must not fill memory.
KNOWN = 256

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/@\\\[\]]+)(:[0-9]{1,5})?")
_CLOSE = ("connection", "close")


class HttpError(WirecallError):
    """The answer to a request that is refused: a status, a message for the JSON-RPC error in the body, header fields."""

    def __init__(self, status: int, message: str, headers: Pairs = (), *, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message
        self.headers = headers
        self.data = data


class Headers(Mapping[str, str]):
    """The header fields of a request. Names in any case; values without the blanks around them, as RFC 9110 wants it.

    As a mapping it gives one value for each name; where there are several, all of them with commas between them (RFC 9110,
    section 5.3). So nobody who asks for one takes a value that a proxy in front has not judged.
    """

    __slots__ = ("first", "has_doubles", "pairs")

    def __init__(self, pairs: Sequence[tuple[bytes, bytes]]) -> None:
        self.pairs = pairs
        self.first = dict(reversed(pairs))  # of the values of one name the first; made in C, faster than any loop here
        self.has_doubles = len(self.first) != len(pairs)  # a name occurs twice

    @overload
    def get(self, name: str, /) -> str | None: ...
    @overload
    def get(self, name: str, /, default: Any) -> Any: ...
    def get(self, name: str, /, default: Any = None) -> Any:
        """The value, or `default`."""
        if self.has_doubles:
            return ", ".join(self.all(name)) if name in self else default
        value = self.first.get(name.lower().encode("latin-1", "replace"))
        return default if value is None else value.strip(b" \t").decode("latin-1")

    def all(self, name: str) -> list[str]:
        """Every value, in order."""
        wanted = name.lower().encode("latin-1", "replace")
        if wanted not in self.first:
            return []
        return [value.strip(b" \t").decode("latin-1") for key, value in self.pairs if key == wanted]

    def __getitem__(self, name: str) -> str:
        value = self.get(name)
        if value is None:
            raise KeyError(name)
        return value

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower().encode("latin-1", "replace") in self.first

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(key.decode("latin-1") for key, _ in self.pairs))

    def __len__(self) -> int:
        return len(self.first)


class Request:
    """One HTTP request as an endpoint sees it, and the way to answer it."""

    __slots__ = (
        *("_body", "_coming", "_receive", "_send", "_server", "_watched"),
        *("caller", "headers", "method", "path", "started"),
    )

    def __init__(self, server: "HttpServer", scope: Scope, path: str, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path = path
        self.headers = Headers(scope["headers"])
        self.caller = ANONYMOUS
        self.started = False  # a response has begun
        self._server = server
        self._receive = receive
        self._send = send
        self._body: bytes | None = None
        self._coming: Any = None  # a future of the server's that will be the next event
        self._watched = False

    @property
    def stopping(self) -> asyncio.Event:
        """Set when the server is about to stop: a stream has to end now."""
        return self._server.stopping

    # --- reading -----------------------------------------------------------------------------------------------------

    async def body(self) -> bytes:
        """The whole body; HttpError 413 if it is too long, 408 if it takes too long, Gone if the client left."""
        if self._body is None:
            limits = self._server.limits
            try:
                expected = self._expected(limits.bytes_in)
                done, first = _step(self._receive())
                self._body = _whole(first, expected, limits.bytes_in) if done else None
                if self._body is None:
                    rest = self._collect(done, first, expected, limits.bytes_in)
                    self._body = await self._server.waits.within(rest, limits.body_time)
            except TimeoutError:
                raise HttpError(408, f"the body did not arrive within {limits.body_time:g} s", [_CLOSE]) from None
            except HttpError:
                await self._linger()
                raise
        return self._body

    def _expected(self, limit: int) -> int:
        """Content-Length, or -1. A body that is going to be too long is refused before it is read."""
        length = self.headers.first.get(b"content-length")
        if length is None:
            return -1
        if not length.isdigit():
            raise HttpError(400, "Content-Length is not a number", [_CLOSE])
        if b"transfer-encoding" in self.headers.first:  # RFC 9112, section 6.3: perhaps an attempt at request smuggling
            raise HttpError(400, "Content-Length and Transfer-Encoding contradict each other", [_CLOSE])
        if len(length) > 18 or int(length) > limit:
            raise _too_long(limit)
        return int(length)

    async def _collect(self, done: bool, first: Any, expected: int, limit: int) -> bytes:
        message: Event = first if done else await first
        whole = _whole(message, expected, limit)
        if whole is not None:
            return whole
        body = bytearray()
        while message["type"] == "http.request":
            body += message.get("body") or b""
            if len(body) > limit:
                raise _too_long(limit)
            if not message.get("more_body"):
                return bytes(body)
            message = await self._receive()
        raise Gone("the client left in the middle of the body")

    async def _linger(self) -> None:
        """Take what the client of a refused body is still sending, for a moment, and keep none of it. Most clients read the
        answer after they have sent all, and a connection that is closed with bytes unread is reset: they would see an error
        and no answer. A client that asked first ("Expect: 100-continue") waits for the answer."""
        if b"expect" not in self.headers.first:
            with contextlib.suppress(TimeoutError):
                await self._server.waits.within(self._skip(), LINGER_TIME)

    async def _skip(self) -> None:
        skipped = 0
        while skipped < LINGER_BYTES:
            message = await self._receive()
            skipped += len(message.get("body") or b"")
            if not message.get("more_body"):
                return

    async def gone(self) -> None:
        """Return when the client has disconnected. To be asked after the body; one at a time; safe to cancel."""
        self._watched = True
        try:
            while (await self._next())["type"] != "http.disconnect":
                self._coming = None
        finally:
            self._coming, self._watched = None, False  # a future that was awaited is done now, or cancelled

    async def _next(self) -> Event:
        coming = self._coming
        return await (self._receive() if coming is None else coming)

    # --- answering ---------------------------------------------------------------------------------------------------

    async def respond(self, status: int, body: bytes = b"", media: str = "application/json", headers: Pairs = ()) -> None:
        """The whole answer. `media` is left out where there is no body."""
        fields = [(b"content-length", b"%d" % len(body))] if status != 204 else []
        if body:
            fields.append((b"content-type", b"application/json" if media == "application/json" else media.encode("latin-1")))
        await self._start(status, fields, headers)
        if len(body) > PIECE:
            last = (len(body) - 1) // PIECE * PIECE
            for start in range(0, last, PIECE):
                await self._put(body[start : start + PIECE], True)
            body = body[last:]
        await self._put(body, False)

    async def open_stream(self, headers: Pairs = ()) -> None:
        """Begin a stream of server-sent events; HttpError 503 if too many are open."""
        self._server._enter_stream(self)
        await self._start(200, list(_STREAM_FIELDS), headers)

    async def write(self, chunk: bytes) -> None:
        """Bytes of the open stream. Gone if the client has left or does not read."""
        if not self._watched and self._has_left():
            raise Gone("the client has left")
        await self._put(chunk, True)

    async def close_stream(self) -> None:
        """End the open stream."""
        await self._put(b"", False)

    # These two are plain functions that give something to await: a coroutine less on the way of every answer.

    def _start(self, status: int, fields: list[tuple[bytes, bytes]], headers: Pairs) -> Awaitable[None]:
        if headers:
            fields += [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        self.started = True
        return self._tell({"type": "http.response.start", "status": status, "headers": fields})

    def _put(self, body: bytes, more: bool) -> Awaitable[None]:
        return self._tell({"type": "http.response.body", "body": body, "more_body": more})

    async def _tell(self, message: Event) -> None:
        try:
            done, sending = _step(self._send(message))
            if not done:
                await self._server.waits.within(sending, self._server.limits.write_time)
        except TimeoutError:
            raise Gone(f"the client did not read for {self._server.limits.write_time:g} s") from None
        except OSError as error:  # ASGI 2.4: sending to a client that left
            raise Gone("the client has left") from error

    def _has_left(self) -> bool:
        """A look without waiting: servers say nothing to those who send to nobody.

        uvicorn's `receive` is a coroutine: one step tells. granian's is a future, which goes on by itself: it is kept, and
        looked at again with the next chunk.
        """
        coming = self._coming or self._receive()
        if type(coming) is not CoroutineType:
            self._coming = coming
            return self._is_over(coming)
        try:
            coming.send(None)
        except StopIteration as finished:
            return bool(finished.value["type"] == "http.disconnect")
        coming.close()
        return False

    def _is_over(self, coming: Any) -> bool:
        if not coming.done():
            return False
        if coming.result()["type"] == "http.disconnect":
            return True
        self._coming = None  # the end of the body, which nobody asked for
        return False


_STREAM_FIELDS = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # MCP 2026-07-28: proxies must not hold events back
)


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
            endpoint = self._admitted(request)
            if self._authenticate is not None and path not in PROBES:
                request.caller = await self._identify(self._authenticate, request.headers)
            await endpoint(request)
        except HttpError as refusal:
            await self._refuse(request, refusal)
        except Gone:
            pass
        except Exception as error:
            logger.error("%s %s failed", request.method, path, exc_info=error)
            await self._refuse(request, HttpError(500, "Internal error"))
        except asyncio.CancelledError:
            if not self._was_cut(request):
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
            raise HttpError(503, "who calls could not be found out in time", [("retry-after", "1")]) from None
        if caller is None or caller == ANONYMOUS:  # "" is everybody whom nobody asked for a name
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

    def _enter_stream(self, request: Request) -> None:
        if len(self._streams) >= self.limits.streams or self.stopping.is_set():
            raise HttpError(503, "no further stream can be opened now", [("retry-after", "1")])
        self._streams.add(request)

    def _leave(self, request: Request) -> None:
        del self._active[request]
        self._streams.discard(request)
        if request._coming is not None:
            request._coming.cancel()
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


class Guard:
    """Which Host and which Origin a request may have."""

    def __init__(self, hosts: Sequence[str], origins: Sequence[str]) -> None:
        self._hosts = {host.lower() for host in hosts} | LOOPBACK
        self._origins = {origin.lower().rstrip("/") for origin in origins}
        self._good_hosts: set[bytes] = set()
        self._good_origins: set[bytes] = set()

    def allow_host(self, host: str) -> None:
        host = host.lower()
        self._hosts.add(f"[{host}]" if ":" in host and not host.startswith("[") else host)

    def check(self, headers: Headers, max_bytes: int, *, any_host: bool) -> None:
        """Size, Host, Origin."""
        pairs = headers.pairs
        if sum(map(len, chain.from_iterable(pairs))) + 4 * len(pairs) > max_bytes:  # ": " and the end of the line
            raise HttpError(431, f"the header is longer than {max_bytes} bytes", [_CLOSE])
        if headers.has_doubles:
            self._check_doubles(headers)
        origin = headers.first.get(b"origin")
        if origin is not None and origin not in self._good_origins:
            self._check_origin(origin)
        if not any_host and (host := headers.first.get(b"host", b"")) not in self._good_hosts:
            self._check_host(host)

    def _check_doubles(self, headers: Headers) -> None:
        """RFC 9112, section 3.2. Of two values a proxy in front may have judged the other one."""
        for name in ("Host", "Origin", "Content-Length", "Content-Type", "Authorization"):
            if len(headers.all(name)) > 1:
                raise HttpError(400, f"more than one {name} header", [_CLOSE])

    def _check_host(self, host: bytes) -> None:
        text = host.strip(b" \t").decode("latin-1").lower()
        if not text:  # granian makes an empty one where there is none
            raise HttpError(400, "the Host header is missing")
        if "*" not in self._hosts and not self._is_ours(text):
            raise HttpError(
                403, f"Host {text[:100]!r} is not a name of this server. If it is, add it to hosts=[...] of the app."
            )
        _remember(self._good_hosts, host)

    def _check_origin(self, origin: bytes) -> None:
        text = origin.strip(b" \t").decode("latin-1").lower()
        host = text.partition("://")[2]
        if not self._origins & {"*", text} and not (host and self._is_ours(host)):
            raise HttpError(
                403, f"Origin {text[:100]!r} may not call this server. If it may, add it to origins=[...] of the app."
            )
        _remember(self._good_origins, origin)

    def _is_ours(self, authority: str) -> bool:
        parts = _HOST.fullmatch(authority)
        if parts is None:
            return False
        name = parts[1]
        if name in self._hosts or authority in self._hosts:
            return True
        return any(host.startswith("*.") and name.endswith(host[1:]) for host in self._hosts)


def _remember(known: set[bytes], value: bytes) -> None:
    if len(known) >= KNOWN:
        known.clear()
    known.add(value)


def error_body(error: HttpError) -> bytes:
    """The JSON-RPC error of a refusal, without an id."""
    code = (InternalError if error.status == 500 else InvalidRequest).CODE
    told: dict[str, Any] = {"code": code, "message": error.message}
    if error.data is not None:
        told["data"] = error.data
    return frames.encode({"jsonrpc": "2.0", "error": told})


def _whole(message: Event, expected: int, limit: int) -> bytes | None:
    """The body, if this is all of it. granian says "more" after the last byte; Content-Length saves the further question."""
    if message["type"] != "http.request":
        return None
    body = bytes(message.get("body") or b"")
    if message.get("more_body") and len(body) != expected:
        return None
    if len(body) > limit:
        raise _too_long(limit)
    return body


def _too_long(limit: int) -> HttpError:
    data = {"type": "limit_exceeded", "limit": "bytes_in", "max": limit}
    return HttpError(413, f"the body is longer than {limit} bytes", [_CLOSE], data=data)


def _step(awaitable: Awaitable[Any]) -> tuple[bool, Any]:
    """The first step of an awaitable: True and its value if it did not wait, else False and the rest of it to await."""
    if type(awaitable) is CoroutineType:
        try:
            return False, resume(awaitable, awaitable.send(None))
        except StopIteration as finished:
            return True, finished.value
    steps: Any = awaitable.__await__()
    try:
        return False, _rest(steps, next(steps))
    except StopIteration as finished:
        return True, finished.value


@coroutine
def _rest(steps: Iterator[Any], awaited: Any) -> Generator[Any, Any, Any]:
    yield awaited
    return (yield from steps)


class Waits:
    """Time limits for those who wait, by one timer for all: under granian every body is waited for, and a timer of its own
    (asyncio.timeout) would cost each request 6 µs more."""

    TICK = 0.25  # seconds that a limit may be exceeded by

    def __init__(self) -> None:
        self._until: dict[asyncio.Task[Any], float] = {}
        self._late: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def within(self, awaitable: Awaitable[Any], seconds: float) -> Any:
        """Await, or TimeoutError."""
        task = asyncio.current_task()
        assert task is not None
        loop = task.get_loop()
        self._until[task] = loop.time() + seconds
        if self._timer is None or self._loop is not loop:
            self._loop, self._timer = loop, loop.call_later(self.TICK, self._look)
        try:
            return await awaitable
        except asyncio.CancelledError:
            if task in self._late and task.uncancel() == 0:  # else somebody else has cancelled it too
                raise TimeoutError from None
            raise
        finally:
            del self._until[task]
            self._late.discard(task)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for task, until in self._until.items():
            if until <= now and task not in self._late:
                self._late.add(task)
                task.cancel()
        self._timer = loop.call_later(self.TICK, self._look) if self._until else None
