"""How a person logs in: the browser shows a page of the authorization server, and comes back to a port of this machine.

1. The address of the page comes from a server: it is checked, and opened by `webbrowser`, never by a shell.
2. The port is on the loopback address and open for one login. It takes a GET of `/callback` with its own Host.
3. The page that the browser shows at the end is the same each time, and repeats nothing of the request.
"""

import asyncio
import webbrowser
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.parse import parse_qs, urlsplit

from wirecall.errors import NotAuthorized

PATH = "/callback"
PATIENCE = 300.0  # seconds for a person to log in
READING = 10.0  # seconds for the browser to send its request
MAX_BYTES = 16 << 10

_PAGE = (
    b"<!doctype html><html lang=en><meta charset=utf-8><title>wirecall</title>"
    b"<p>You can close this page and go back to your program."
)
_HEAD = (
    b"HTTP/1.1 %s\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: %d\r\nConnection: close\r\n"
    b"Cache-Control: no-store\r\nReferrer-Policy: no-referrer\r\nX-Content-Type-Options: nosniff\r\n"
    b"Content-Security-Policy: default-src 'none'; frame-ancestors 'none'\r\n\r\n"
)


class Callback:
    """The address that the browser comes back to, and the answer that it brings."""

    def __init__(self, port: int) -> None:
        self.uri = f"http://127.0.0.1:{port}{PATH}"
        self._host = f"127.0.0.1:{port}"
        self.state = ""  # of the login that is waited for
        self.answering: asyncio.Task[None] | None = None  # shows its page to the browser that brought the answer
        self._came: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()

    async def answer(self) -> dict[str, str]:
        """Wait for the browser, and return the parameters that it brings."""
        return await self._came

    def take(self, redirected: str) -> bool:
        """Take the address that the browser came back to; return whether it belongs to this login."""
        found = parse_qs(urlsplit(redirected).query, keep_blank_values=True)
        # Another login's answer, or one that a page has made up, has another state (RFC 6749, section 10.12). A parameter
        # that is repeated is invalid (section 3.1).
        if any(len(values) > 1 for values in found.values()) or found.get("state") != [self.state] or self._came.done():
            return False
        self._came.set_result({name: values[0] for name, values in found.items()})
        return True

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection of a browser."""
        status = b"400 Bad Request"
        try:
            async with asyncio.timeout(READING):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("ascii")
            first, *lines = head.split("\r\n")
            method, target, _ = first.split(" ")
            hosts = [value.strip() for name, _, value in (line.partition(":") for line in lines) if name.lower() == "host"]
            if method == "GET" and hosts == [self._host] and urlsplit(target).path == PATH and self.take(target):
                status, self.answering = b"200 OK", asyncio.current_task()
        except (ValueError, TimeoutError, OSError, EOFError, asyncio.LimitOverrunError):
            pass
        try:
            writer.write(_HEAD % (status, len(_PAGE)) + _PAGE)
            async with asyncio.timeout(READING):
                await writer.drain()
        except (TimeoutError, OSError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def listening(port: int, *, may_change: bool) -> AsyncIterator[Callback]:
    """Listen on a port of this machine in a block. 0 takes a free one, and so does a port in use that may change."""
    serving: set[asyncio.Task[None]] = set()
    made: Callback | None = None

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert made is not None
        task = asyncio.get_running_loop().create_task(made.connected(reader, writer))
        serving.add(task)
        task.add_done_callback(serving.discard)

    try:
        server = await asyncio.start_server(connected, "127.0.0.1", port, limit=MAX_BYTES)
    except OSError as error:
        if not may_change:
            raise NotAuthorized(f"the browser cannot come back to port {port}: {error.strerror}") from None
        server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=MAX_BYTES)
    made = Callback(server.sockets[0].getsockname()[1])
    try:
        yield made
    finally:
        server.close()
        answered = made.answering  # the page of the browser that brought the answer
        for task in serving - {answered}:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


async def open_page(url: str, show: Callable[[str], object]) -> None:
    """Open a page in the user's browser; show its address if there is no browser."""
    if not await asyncio.to_thread(webbrowser.open, url):
        show(url)


async def within(patience: float, callback: Callback) -> dict[str, str]:
    """Return what the browser brings back within so many seconds."""
    try:
        async with asyncio.timeout(patience):
            return await callback.answer()
    except TimeoutError:
        raise NotAuthorized(f"the login was not completed within {patience:g} s") from None
