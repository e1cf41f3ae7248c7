"""The transport of 2024-11-05, HTTP with SSE, as a pipe of lines: what goes in is POSTed, what comes out are events.

A GET opens a stream whose first event, `endpoint`, names the address to POST to; every answer comes as an event of the
stream, never as one to a POST. With the stream the session ends. The address must be of the same origin as the stream: what
we send there is meant for the server that was named, and so are our headers.
"""

import asyncio
from collections.abc import Callable, Mapping
from urllib.parse import urljoin, urlsplit

from wirecall.client.links import status_error
from wirecall.errors import BadAnswer, CallFailed, ConnectionLost, NotSent, WirecallError
from wirecall.transports.http_client import HttpClient

JSON, EVENTS = "application/json", "text/event-stream"
OPENING = 10.0  # seconds for the address to be named


class SsePipe:
    """One connection."""

    def __init__(self, url: str, *, headers: Mapping[str, str], max_bytes: int) -> None:
        self._url = url
        self._make: Callable[[str], HttpClient] = lambda url: HttpClient(url, headers=headers, max_bytes=max_bytes)
        self._stream = self._make(url)
        self._posts: HttpClient | None = None
        self._reader: asyncio.Task[None] | None = None

    async def open(self, on_line: Callable[[bytes], None], on_end: Callable[[CallFailed], None]) -> None:
        """Wait for the address to be named. Raises if the server does not speak so."""
        named: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        await self._stream.open()
        self._reader = asyncio.get_running_loop().create_task(self._read(named, on_line, on_end))
        try:
            async with asyncio.timeout(OPENING):
                self._posts = self._make(await named)
            await self._posts.open()
        except TimeoutError:
            await self.aclose()
            raise NotSent("the server did not name an address to send to") from None
        except BaseException:
            await self.aclose()
            raise

    async def write(self, line: bytes) -> None:
        """One message in."""
        if self._posts is None:
            raise NotSent("the connection is closed")
        async with self._posts.request("POST", line, {"Content-Type": JSON}) as answer:
            if answer.status >= 400:
                raise status_error(answer, await answer.read())

    async def aclose(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        for http in (self._stream, self._posts):
            if http is not None:
                await http.aclose()
        self._posts = None

    async def _read(
        self, named: "asyncio.Future[str]", on_line: Callable[[bytes], None], on_end: Callable[[CallFailed], None]
    ) -> None:
        try:
            async with self._stream.request("GET", headers={"Accept": EVENTS}) as answer:
                if answer.status != 200 or answer.media != EVENTS:
                    raise NotSent(f"there is no stream of events: HTTP {answer.status}")
                async for event in answer.events():
                    if event.name == "endpoint" and not named.done():
                        named.set_result(self._address(event.data))
                    elif event.name == "message" and named.done():
                        on_line(event.data.encode())
            raise ConnectionLost("the server has closed the stream")
        except WirecallError as error:
            failure = error if isinstance(error, CallFailed) else ConnectionLost(str(error))
            if named.done():
                on_end(failure)
            else:
                named.set_exception(failure)

    def _address(self, told: str) -> str:
        try:
            address = urljoin(self._url, told)
            is_here = urlsplit(address)[:2] == urlsplit(self._url)[:2]
        except ValueError:
            is_here = False
        if not is_here:
            raise BadAnswer(f"the server must name an address at its own origin, got {told[:200]!a}")
        return address
