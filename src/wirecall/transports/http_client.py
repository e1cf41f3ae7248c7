"""HTTP for the client, on aiohttp: connections that are reused, limits, streams of events, three errors.

    NotSent          nothing of the body has left: no connection, no route, no certificate
    ConnectionLost   the body was on its way; the connection broke before the end of the answer
    BadAnswer        the answer is not HTTP, or is larger than it may be

1. No redirect is followed: body and headers are meant for the server that was named.
2. No cookie is kept, no environment variable is read.
3. There are no timeouts: the caller cancels a request, and its connection closes with it.
4. An `Auth` adds its headers to each request, and decides after 401 and 403 whether the request is sent again.
5. A client with `public=True` connects to public addresses alone. The resolver checks them, so that a name cannot change
   its address between the check and the connection.
"""

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

from wirecall.errors import BadAnswer, CallFailed, ConnectionLost, NotSent, UsageError
from wirecall.transports.sse import LONGEST_WAIT, Event, Parser

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession
    from aiohttp.abc import AbstractResolver, AbstractStreamWriter
    from aiohttp.payload import Payload

CONNECTIONS = 100  # side by side; a request beyond waits for a free one
RESENDS = 4  # of one request after 401 and 403: a nonce, a refresh, and two new tokens


class Sent(Protocol):
    """A message whose flag is set when the server may have it."""

    sent: bool

    def paused(self) -> AbstractContextManager[None]:
        """Let the message's deadline stand still in a block."""


class _Unwatched:
    sent = False

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()


class Auth(Protocol):
    """The credentials of the requests to one server."""

    is_interactive: bool  # a person may have to act before an answer is known: the deadlines of calls stand still

    async def headers(self, method: str, url: str) -> Mapping[str, str]:
        """Return the headers that authorize a request."""

    async def answered(self, answer: "HttpAnswer", sent: Mapping[str, str]) -> bool:
        """Take the answer to a request with these headers; return whether to send the request again."""


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
    ) -> None:
        try:
            parts = urlsplit(url)
            fault = "" if parts.scheme in ("http", "https") and parts.hostname else "it is not http://host/path"
            parts.port  # noqa: B018  # it raises
        except ValueError as error:
            fault = str(error)
        if fault:
            raise UsageError(f"{url!r} is not an address.", fault, 'use "http://127.0.0.1:8420/rpc"')
        self.url = url
        self.max_bytes = max_bytes
        self._headers = dict(headers or {})
        self._auth = auth
        self._is_public = public
        self._session: ClientSession | None = None
        self.is_private = False  # the server's last address is on this machine or in a private network
        with suppress(ValueError):
            self.is_private = not ip_address(parts.hostname or "").is_global

    async def open(self) -> None:
        """Make the pool of connections; the first request opens one."""
        try:
            import aiohttp
        except ImportError:
            raise UsageError("aiohttp is not installed.", "the client needs it for HTTP", "pip install aiohttp") from None
        if self._is_public and self.is_private:  # an address in numbers does not meet the resolver
            raise NotSent(f"{urlsplit(self.url).hostname} is not a public address")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=CONNECTIONS, resolver=_resolver()(self._resolved)),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": "wirecall", **self._headers},
        )

    async def aclose(self) -> None:
        """Close all connections. Requests in flight break."""
        if self._session is not None:
            await self._session.close()

    def request(
        self, method: str, body: bytes = b"", headers: Mapping[str, str] | None = None, *, exchange: Sent | None = None
    ) -> "_Request | _Authorized":
        """Return a request as a block that gives the answer with its header. `exchange.sent` is set when the body leaves."""
        sent = exchange or _Unwatched()
        if self._auth is not None:
            send = partial(self._request, method, body, headers, sent)
            return _Authorized(self._auth, sent, send, method, self.url)
        return self._request(method, body, headers, sent)

    def _request(
        self, method: str, body: bytes, headers: Mapping[str, str] | None, sent: Sent, more: Mapping[str, str] | None = None
    ) -> "_Request":
        if self._session is None or self._session.closed:
            raise NotSent("the client is closed")
        data = _body()(body, sent) if body else None
        given = {**headers, **more} if headers and more else headers or more
        asked = self._session.request(method, self.url, data=data, headers=given, allow_redirects=False)
        return _Request(asked, sent, bool(body), self)

    def _resolved(self, host: str, addresses: list[str]) -> None:
        """Take the addresses of a name, or refuse them. One public address makes a server public."""
        public = [ip_address(address.partition("%")[0]).is_global for address in addresses]
        self.is_private = not any(public)
        if self._is_public and not all(public):
            raise OSError(None, f"{host} is not at a public address")


class _Request:
    """`async with`: an error of the connection, before or in the block, is raised as one of the three errors.

    A class, as a generator here would cost 12 of 200 microseconds of a call.
    """

    __slots__ = ("_asked", "_client", "_has_body", "_response", "_sent")

    def __init__(self, asked: "Awaitable[ClientResponse]", sent: Sent, has_body: bool, client: HttpClient) -> None:
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
            if isinstance(error, ValueError) and not self._sent.sent:  # such as a header value with a line break
                raise NotSent(f"the request cannot be sent: {error}") from error
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._response.release()
        await self._response.wait_for_close()
        if error is not None and (failure := self._failure(error)):
            raise failure from error

    def _failure(self, error: BaseException) -> CallFailed | None:
        """Return an error of the connection as one of ours, or None for any other. (TimeoutError is the caller's.)"""
        import aiohttp
        from aiohttp.http_exceptions import ContentEncodingError

        is_lost = isinstance(error, OSError) and not isinstance(error, TimeoutError)
        if not is_lost and not isinstance(error, aiohttp.ClientError):
            return None
        causes = error.__cause__, error.__cause__ and error.__cause__.__cause__  # of the body, or of the header
        if any(isinstance(cause, ContentEncodingError) for cause in causes):
            return BadAnswer("the answer does not match its Content-Encoding, or has one that was not asked for")
        text = str(error) or type(error).__name__
        if isinstance(error, aiohttp.ClientResponseError):
            return BadAnswer(f"not an HTTP answer: {error.message.splitlines()[0] if error.message else text}")
        is_cut = isinstance(error, aiohttp.ClientPayloadError)
        if self._sent.sent or not self._has_body:
            more = "" if is_cut else f": {text}"  # aiohttp says the same of a cut, in its own terms
            return ConnectionLost(f"the connection broke before the end of the answer{more}")
        if isinstance(error, aiohttp.ClientConnectorError) and error.errno:
            # The address and what the system says, as aiohttp's own text is also about its options. Names that are unknown
            # have numbers of their own, and so has TLS.
            reason = getattr(getattr(error, "os_error", None), "reason", None)
            text = os.strerror(error.errno) if error.errno > 0 else str(error.strerror)
            if reason:
                text = f"it does not agree to TLS (https): {reason.replace('_', ' ').lower()}"
            text = f"{error.host}:{error.port}: {text}"
        return NotSent(f"the server cannot be reached: {text}")


class _Authorized:
    """A request that is sent again for as long as its `Auth` asks for that. 401 and 403 mean that nothing ran."""

    def __init__(self, auth: Auth, sent: Sent, send: Callable[[Mapping[str, str]], _Request], method: str, url: str) -> None:
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
                is_refused = answer.status in (401, 403)
                if is_refused:
                    self._sent.sent = False
                with self._sent.paused() if is_refused and self._auth.is_interactive else nullcontext():
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
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._request is not None
        await self._request.__aexit__(kind, error, trace)


class HttpAnswer:
    """The answer to a request: its header, and its body as a whole or as events."""

    def __init__(self, response: "ClientResponse", max_bytes: int, is_private: bool) -> None:
        self._response = response
        self._max_bytes = max_bytes
        self.is_private = is_private  # the server is on this machine or in a private network
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers  # names in any case

    def values(self, name: str) -> list[str]:
        """Return all values of a header that may be repeated."""
        return self._response.headers.getall(name, [])

    @property
    def media(self) -> str:
        """The media type, in lower case and without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def retry_after(self) -> float | None:
        """The seconds that `Retry-After` asks to wait, as a number or as a date (RFC 9110, section 10.2.3), or None."""
        told = self.headers.get("retry-after", "").strip()
        if told.isascii() and told.isdigit():
            return min(float(told), LONGEST_WAIT)
        until = _moment(told)
        if until is None:
            return None
        # The date is by the server's clock, so its own `Date` is the best "now".
        now = _moment(self.headers.get("date", ""))
        return min(max(until - (time.time() if now is None else now), 0.0), LONGEST_WAIT)

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

    async def events(self, parser: Parser | None = None) -> AsyncIterator[Event]:
        """Give the body as a stream of events. A parser that is given knows afterwards where to come back, and when."""
        parser = parser or Parser(self._max_bytes)
        async for chunk in self._response.content.iter_any():
            for event in parser.feed(chunk):
                yield event


def _moment(date: str) -> float | None:
    """Return an HTTP date as Unix time, or None for a text that is not a date."""
    from email.utils import parsedate_to_datetime

    try:
        moment = parsedate_to_datetime(date)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


@cache
def _body() -> "Callable[[bytes, Sent], Payload]":
    """Return aiohttp's kind of body, which marks the moment when it leaves. The header waits for it in aiohttp's buffer."""
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

        async def write_with_length(self, writer: "AbstractStreamWriter", content_length: int | None) -> None:
            await self.write(writer)

    return Body


@cache
def _resolver() -> "Callable[[Callable[[str, list[str]], None]], AbstractResolver]":
    """Return aiohttp's resolver, which shows the addresses of a name before it gives them to the connection."""
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
