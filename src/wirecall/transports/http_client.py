"""HTTP for the client, on aiohttp: reused connections, limits, streams of events, three errors.

    NotSent          no byte of the body was sent: no connection, no route, no certificate
    ConnectionLost   sending the body had begun; the connection broke before the end of the answer
    BadAnswer        the answer is not HTTP, or is too large

1. Redirects are not followed: body and headers are meant for the server that the caller named.
2. Cookies are not kept, and environment variables are not read.
3. There are no timeouts: the caller cancels a request, and its connection closes with it.
4. An `Auth` adds its headers to each request, and decides after 401 and 403 whether the request is
   sent again.
5. A client with `public=True` connects only to public addresses. The resolver checks them, so that
   a name cannot change its address between the check and the connection.
"""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import UTC
from functools import cache, partial
from ipaddress import ip_address
from types import TracebackType
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from wirecall.aio import cancel_all
from wirecall.errors import (
    BadAnswer,
    CallFailed,
    ConnectionLost,
    NotSent,
    Refused,
    UsageError,
)
from wirecall.transports.sse import LONGEST_WAIT, Event, Parser

if TYPE_CHECKING:
    from aiohttp import (
        ClientConnectorError,
        ClientResponse,
        ClientSession,
        ClientWebSocketResponse,
        TraceConfig,
        TraceRequestRedirectParams,
    )
    from aiohttp.abc import AbstractResolver, AbstractStreamWriter
    from aiohttp.payload import Payload

# Connections that are open at the same time; a request beyond them waits for a free one.
CONNECTIONS = 100
# Seconds after which an unused connection is closed. A server may close it earlier, and then a
# request on it may be lost. Many servers do so after 5 s.
IDLE = 15.0
# Resends of one request after 401 and 403: a nonce, a refresh, and two new tokens.
RESENDS = 4
# Seconds between two pings of a WebSocket.
PING_EVERY = 20.0
# Max messages of a WebSocket per loop iteration.
TURN = 200
# Seconds that a server has to answer the frame that closes a WebSocket.
CLOSE_TIME = 1.0


class Sent(Protocol):
    """A message whose flag is set when the server may have it."""

    sent: bool

    def paused(self) -> AbstractContextManager[None]:
        """Pause the message's deadline in a block."""


class _Unwatched:
    sent = False

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()


class Auth(Protocol):
    """The credentials of the requests to one server."""

    # Whether a person may have to act before the answer; then the deadlines of calls pause.
    is_interactive: bool

    async def headers(self, method: str, url: str) -> Mapping[str, str]:
        """Return the headers that authorize a request."""

    async def answered(self, answer: "HttpAnswer", sent: Mapping[str, str]) -> bool:
        """Take the answer to a request with these headers.

        Return whether to send the request again.
        """


class HttpClient:
    """Requests to one address."""

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        max_bytes: int = 10 << 20,
        auth: Auth | None = None,
        public: bool = False,
        is_websocket: bool = False,
        idle: float = IDLE,
    ) -> None:
        host = _host_of(url)
        self.url = url
        self.max_bytes = max_bytes
        self._headers = dict(headers or {})
        self._auth = auth
        self._is_public = public
        self._is_websocket = is_websocket
        self._idle = idle
        self._session: ClientSession | None = None
        # Whether the server's last address is on this machine or in a private network.
        self.is_private = False
        with suppress(ValueError):
            self.is_private = not ip_address(host).is_global

    async def open(self) -> None:
        """Make the pool of connections; the first request opens one."""
        try:
            import aiohttp
        except ImportError:
            raise UsageError(
                "aiohttp is not installed.", "the client needs it for HTTP", "pip install aiohttp"
            ) from None
        if self._is_public and self.is_private:  # the resolver does not check a numeric address
            raise NotSent(f"{urlsplit(self.url).hostname} is not a public address")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=CONNECTIONS,
                resolver=_resolver()(self._resolved),
                keepalive_timeout=self._idle,
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": "wirecall", **self._headers},
            trace_configs=[_without_redirects()] if self._is_websocket else None,
        )

    async def aclose(self) -> None:
        """Close all connections. Requests in flight break."""
        if self._session is not None:
            await self._session.close()

    def request(
        self,
        method: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        exchange: Sent | None = None,
    ) -> "_Request | _Authorized":
        """Return a context manager that yields the answer.

        `exchange.sent` is set when the body is sent.
        """
        sent = exchange or _Unwatched()
        if self._auth is not None:
            send = partial(self._request, method, body, headers, sent)
            return _Authorized(self._auth, sent, send, method, self.url)
        return self._request(method, body, headers, sent)

    def _request(
        self,
        method: str,
        body: bytes,
        headers: Mapping[str, str] | None,
        sent: Sent,
        more: Mapping[str, str] | None = None,
    ) -> "_Request":
        if self._session is None or self._session.closed:
            raise NotSent("the client is closed")
        data = None
        if body:
            data = _body()(body, sent)
        given = headers or more
        if headers and more:
            given = {**headers, **more}
        asked = self._session.request(
            method, self.url, data=data, headers=given, allow_redirects=False
        )
        return _Request(asked, sent, bool(body), self)

    async def upgraded(self) -> "ClientWebSocketResponse":
        """Open a WebSocket at the address.

        NotSent if the server cannot be reached, Refused or BadAnswer with the status if it answers
        with another one than 101.
        """
        try:
            return await self._upgrade()
        except Refused as refusal:
            if self._auth is None or refusal.status not in (401, 403):
                raise
        # An ordinary request lets the `Auth` get another token. The endpoint answers 405 then.
        async with self.request("GET"):
            pass
        return await self._upgrade()

    async def _upgrade(self) -> "ClientWebSocketResponse":
        import aiohttp

        if self._session is None or self._session.closed:
            raise NotSent("the client is closed")
        headers: Mapping[str, str] = {}
        if self._auth is not None:
            headers = await self._auth.headers("GET", self.url)
        try:
            return await self._session.ws_connect(
                self.url, headers=headers, max_msg_size=self.max_bytes, heartbeat=PING_EVERY
            )
        except aiohttp.WSServerHandshakeError as error:
            text = f"the server refused the WebSocket: HTTP {error.status}"
            if 300 <= error.status < 500:
                raise Refused(text, status=error.status) from error
            raise BadAnswer(text, status=error.status) from error
        except aiohttp.ClientConnectorError as error:
            reason = str(error)
            if error.errno:
                reason = _why_not_connected(error)
            raise NotSent(f"the server cannot be reached: {reason}") from error
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise NotSent(f"the server cannot be reached: {error}") from error

    def _resolved(self, host: str, addresses: list[str]) -> None:
        """Accept the addresses of a name, or refuse them.

        One public address makes a server public.
        """
        public = [ip_address(address.partition("%")[0]).is_global for address in addresses]
        self.is_private = not any(public)
        if self._is_public and not all(public):
            raise OSError(None, f"{host} is not at a public address")


def _host_of(url: str) -> str:
    """Return the host of a server's address; UsageError if it is not an address."""
    fault = "it is not http://host/path"
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  # it raises
        if parts.scheme in ("http", "https") and parts.hostname:
            return parts.hostname
    except ValueError as error:
        fault = str(error)
    raise UsageError(f"{url!r} is not an address.", fault, 'use "http://127.0.0.1:8420/rpc"')


def _without_redirects() -> "TraceConfig":
    """Return the hooks that refuse a redirect of a WebSocket, which aiohttp would follow."""
    import aiohttp

    async def refuse(
        _session: "ClientSession", _context: object, params: "TraceRequestRedirectParams"
    ) -> None:
        status = params.response.status
        raise Refused(f"HTTP {status}, a redirect, which is not followed", status=status)

    hooks = aiohttp.TraceConfig()
    hooks.on_request_redirect.append(refuse)
    return hooks


class _Request:
    """A context manager that raises connection errors as one of the three errors.

    It is a class because a generator would cost 12 of the 200 microseconds of a call.
    """

    __slots__ = ("_asked", "_client", "_has_body", "_response", "_sent")

    def __init__(
        self, asked: "Awaitable[ClientResponse]", sent: Sent, has_body: bool, client: HttpClient
    ) -> None:
        self._asked = asked
        self._sent = sent
        self._has_body = has_body
        self._client = client

    async def __aenter__(self) -> "HttpAnswer":
        try:
            self._response = await self._asked
            return HttpAnswer(self._response, self._client.max_bytes, self._client.is_private)
        except Exception as error:
            if failure := self._failure(error):
                raise failure from error
            # Such as a header value with a line break.
            if isinstance(error, ValueError) and not self._sent.sent:
                raise NotSent(f"the request cannot be sent: {error}") from error
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._response.release()
        await self._response.wait_for_close()
        if error is not None and (failure := self._failure(error)):
            raise failure from error

    def _failure(self, error: BaseException) -> CallFailed | None:
        """Return a connection error as one of ours, None for any other.

        TimeoutError is the caller's.
        """
        import aiohttp

        is_lost = isinstance(error, OSError) and not isinstance(error, TimeoutError)
        if not is_lost and not isinstance(error, aiohttp.ClientError):
            return None
        if _is_miscoded(error):
            return BadAnswer(
                "the answer does not match its Content-Encoding, or has one that was not asked for"
            )
        reason = str(error) or type(error).__name__
        if isinstance(error, aiohttp.ClientResponseError):
            if error.message:
                reason = error.message.splitlines()[0]
            return BadAnswer(f"not an HTTP answer: {reason}")
        if self._sent.sent or not self._has_body:
            # aiohttp describes a cut in its own terms.
            if isinstance(error, aiohttp.ClientPayloadError):
                return ConnectionLost("the connection broke before the end of the answer")
            if not self._sent.sent and isinstance(error, aiohttp.ClientConnectorError):
                return ConnectionLost(f"the server cannot be reached: {_why_not_connected(error)}")
            return ConnectionLost(f"the connection broke before the end of the answer: {reason}")
        if isinstance(error, aiohttp.ClientConnectorError) and error.errno:
            reason = _why_not_connected(error)
        return NotSent(f"the server cannot be reached: {reason}")


def _is_miscoded(error: BaseException) -> bool:
    """Return whether an error is about the encoding of a body, or of its header."""
    from aiohttp.http_exceptions import ContentEncodingError

    cause = error.__cause__
    if isinstance(cause, ContentEncodingError):
        return True
    return cause is not None and isinstance(cause.__cause__, ContentEncodingError)


def _why_not_connected(error: "ClientConnectorError") -> str:
    """Return the address and the system's message: aiohttp's own message also lists its options.

    Unknown names and TLS failures have separate error numbers.
    """
    tls = getattr(getattr(error, "os_error", None), "reason", None)
    if tls:
        why = f"it does not agree to TLS (https): {tls.replace('_', ' ').lower()}"
    elif error.errno is not None and error.errno > 0:
        why = os.strerror(error.errno)
    else:
        why = str(error.strerror)
    return f"{error.host}:{error.port}: {why}"


class _Authorized:
    """A request that is sent again while its `Auth` asks for it.

    401 and 403 mean that no handler ran.
    """

    def __init__(
        self,
        auth: Auth,
        sent: Sent,
        send: Callable[[Mapping[str, str]], _Request],
        method: str,
        url: str,
    ) -> None:
        self._auth = auth
        self._sent = sent
        self._send = send
        self._method = method
        self._url = url
        self._request: _Request | None = None

    async def __aenter__(self) -> "HttpAnswer":
        for left in range(RESENDS, -1, -1):
            headers = await self._auth.headers(self._method, self._url)
            request = self._send(headers)
            answer = await request.__aenter__()
            try:
                pause: AbstractContextManager[None] = nullcontext()
                if answer.status in (401, 403):
                    self._sent.sent = False
                    if self._auth.is_interactive:
                        pause = self._sent.paused()
                with pause:
                    is_over = not await self._auth.answered(answer, headers)
            except BaseException as error:
                await request.__aexit__(type(error), error, error.__traceback__)
                raise
            if is_over or not left:
                break
            await request.__aexit__(None, None, None)
        self._request = request
        return answer

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._request is not None
        await self._request.__aexit__(kind, error, trace)


class HttpAnswer:
    """The answer to a request: its header, and its body as a whole or as events."""

    def __init__(self, response: "ClientResponse", max_bytes: int, is_private: bool) -> None:
        self._response = response
        self._max_bytes = max_bytes
        # Whether the server is on this machine or in a private network.
        self.is_private = is_private
        self.status = response.status
        # Names are case-insensitive.
        self.headers: Mapping[str, str] = response.headers

    def values(self, name: str) -> list[str]:
        """Return all values of a header that may be repeated."""
        return self._response.headers.getall(name, [])

    @property
    def media(self) -> str:
        """The media type, in lower case and without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def retry_after(self) -> float | None:
        """The seconds to wait, from `Retry-After`; None without one.

        Its value is a number or a date (RFC 9110, section 10.2.3).
        """
        value = self.headers.get("retry-after", "").strip()
        if value.isascii() and value.isdigit():
            return min(float(value), LONGEST_WAIT)
        until = _moment(value)
        if until is None:
            return None
        # The date is by the server's clock, so its own `Date` is the best "now".
        now = _moment(self.headers.get("date", ""))
        if now is None:
            now = time.time()
        return min(max(until - now, 0.0), LONGEST_WAIT)

    async def read(self) -> bytes:
        """Return the whole body."""
        expected = self._response.content_length
        if expected is not None and expected > self._max_bytes:
            raise BadAnswer(f"an answer of {expected} bytes; {self._max_bytes} are allowed")
        if expected is not None and "content-encoding" not in self.headers:
            return await self._response.read()
        body = bytearray()
        async for chunk in self._response.content.iter_any():
            body += chunk
            if len(body) > self._max_bytes:
                raise BadAnswer(f"an answer of more than {self._max_bytes} bytes")
        return bytes(body)

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the lines of the body as they come. A line without its end is not one."""
        begun = b""
        count = 0
        async for chunk in self._response.content.iter_any():
            count += len(chunk)
            if count > self._max_bytes:
                raise BadAnswer(f"an answer of more than {self._max_bytes} bytes")
            *whole, begun = (begun + chunk).split(b"\n")
            for line in whole:
                yield line

    async def events(self, parser: Parser | None = None) -> AsyncIterator[Event]:
        """Yield the events of the body. A parser passed in records where to resume, and when."""
        parser = parser or Parser(self._max_bytes)
        async for chunk in self._response.content.iter_any():
            for event in parser.feed(chunk):
                yield event


def _moment(date: str) -> float | None:
    """Return an HTTP date as Unix time, or None if the string is not a date."""
    from email.utils import parsedate_to_datetime

    try:
        moment = parsedate_to_datetime(date)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return moment.timestamp()
    except (ValueError, OverflowError):
        return None


@cache
def _body() -> "Callable[[bytes, Sent], Payload]":
    """Return a body class that sets `sent` when it is written.

    aiohttp buffers the header until then.
    """
    from aiohttp.payload import Payload

    class Body(Payload):
        def __init__(self, value: bytes, sent: Sent) -> None:
            super().__init__(value, content_type="application/json")
            self._size = len(value)
            self._sent = sent

        def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
            text: str = self._value.decode(encoding, errors)
            return text

        async def write(self, writer: "AbstractStreamWriter") -> None:
            self._sent.sent = True
            await writer.write(self._value)

        async def write_with_length(
            self, writer: "AbstractStreamWriter", content_length: int | None
        ) -> None:
            await self.write(writer)

    return Body


@cache
def _resolver() -> "Callable[[Callable[[str, list[str]], None]], AbstractResolver]":
    """Return a resolver class that reports the addresses of a name before they are used."""
    import aiohttp
    from aiohttp.abc import ResolveResult

    class Resolver(aiohttp.ThreadedResolver):
        def __init__(self, resolved: Callable[[str, list[str]], None]) -> None:
            super().__init__()
            self._resolved = resolved

        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
        ) -> list[ResolveResult]:
            found = await super().resolve(host, port, family)
            self._resolved(host, [each["host"] for each in found])
            return found

    return Resolver


# --- WebSockets -----------------------------------------------------------------------------------


class WebSocketPipe:
    """One WebSocket: messages both ways, as a pipe has lines.

    A message is one frame of text. A server that does not answer a ping within 10 seconds is lost.
    `on_line` receives each message; `on_end` is called once, at the end.
    """

    def __init__(self, http: HttpClient) -> None:
        self._http = http
        self._socket: ClientWebSocketResponse | None = None
        self._reader: asyncio.Task[None] | None = None

    async def open(
        self, on_line: Callable[[bytes], None], on_end: Callable[[CallFailed], None]
    ) -> None:
        try:
            await self._http.open()
            self._socket = await self._http.upgraded()
        except BaseException:
            await self._http.aclose()
            raise
        self._reader = asyncio.get_running_loop().create_task(
            self._read(self._socket, on_line, on_end)
        )

    async def write(self, line: bytes) -> None:
        if self._socket is None or self._socket.closed:
            raise NotSent("the WebSocket is closed")
        try:
            await self._socket.send_str(line.decode())
        except OSError as error:
            raise ConnectionLost(f"the connection broke: {error}") from error

    async def aclose(self) -> None:
        try:
            if self._reader is not None:
                await cancel_all(self._reader)
            if self._socket is not None:
                async with asyncio.timeout(CLOSE_TIME):
                    await self._socket.close()
        except TimeoutError:
            pass  # closing the client ends the connection
        finally:
            await self._http.aclose()

    async def _read(
        self,
        socket: "ClientWebSocketResponse",
        on_line: Callable[[bytes], None],
        on_end: Callable[[CallFailed], None],
    ) -> None:
        from aiohttp import WSMsgType

        count = 0
        while True:
            message = await socket.receive()
            if message.type != WSMsgType.TEXT:
                break
            on_line(message.data.encode())
            count += 1
            if count % TURN == 0:
                await asyncio.sleep(0)
        on_end(ConnectionLost(_why(socket, message.type == WSMsgType.BINARY, message.extra)))


def _why(socket: "ClientWebSocketResponse", is_binary: bool, reason: object) -> str:
    """Return why a connection has ended."""
    if is_binary:
        return "the server sent a binary frame; expected text"
    if socket.close_code is None or socket.close_code == 1006:
        return "the connection broke"
    text = f"the server closed the WebSocket with code {socket.close_code}"
    if reason:
        return f"{text}: {ascii(str(reason)[:200])[1:-1]}"
    return text
