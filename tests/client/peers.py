"""Servers for the client's tests: ours, one that misbehaves on purpose, and a proxy that cuts
connections.
"""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Self, TypeAlias

import msgspec

from wirecall import App
from wirecall.transports.serve import bind, serve_until

PATIENCE = 60.0


async def until(condition: Callable[[], Any]) -> None:
    """Wait for a condition without an event, by polling."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def kill_at_once(pid: int) -> None:
    """Kill a child, and wait for its end: the event loop has not seen it yet."""
    os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):  # a thread of the loop was faster
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@asynccontextmanager
async def served(app: App | Callable[[str], App], server: Any = "uvicorn") -> AsyncIterator[str]:
    """Serve an app over HTTP, at an address without a path.

    A function gets that address and makes the app.
    """
    stop = asyncio.Event()
    listening = asyncio.Event()
    with bind("127.0.0.1", 0) as bound:
        host, port = bound.getsockname()
        url = f"http://{host}:{port}"
        made = app if isinstance(app, App) else app(url)
        serving = asyncio.create_task(
            serve_until(
                made.asgi(), bound, server=server, grace=2.0, stop=stop, serving=listening.set
            )
        )
        try:
            await asyncio.wait_for(listening.wait(), PATIENCE)
            yield url
        finally:
            stop.set()
            await asyncio.wait_for(serving, PATIENCE)


Reader: TypeAlias = asyncio.StreamReader
Writer: TypeAlias = asyncio.StreamWriter
Behaviour: TypeAlias = Callable[["Peer", bytes, Writer], Awaitable[None]]


class Listening:
    """A server on a raw socket, for the length of a block: no connection outlives it."""

    PATH = ""

    def __init__(self) -> None:
        self.url = ""
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}{self.PATH}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.wait_for(self._server.wait_closed(), PATIENCE)

    async def _connected(self, reader: Reader, writer: Writer) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            # asyncio's streams of Python 3.11 complain of a connection whose task was cancelled.
            with suppress(asyncio.CancelledError):
                await self._serve(reader, writer)
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: Reader, writer: Writer) -> None:
        raise NotImplementedError


class Peer(Listening):
    """An HTTP server: it reads a request, and then does what the test says."""

    PATH = "/rpc"

    def __init__(self, behave: Behaviour) -> None:
        super().__init__()
        self.heads: list[bytes] = []
        self.bodies: list[Any] = []
        self.connections = 0
        self._behave = behave

    async def _serve(self, reader: Reader, writer: Writer) -> None:
        self.connections += 1
        with suppress(OSError, asyncio.IncompleteReadError):
            while not writer.is_closing():
                await self._request(reader, writer)

    async def _request(self, reader: Reader, writer: Writer) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        lengths = [
            int(line[15:])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length:")
        ]
        body = await reader.readexactly(lengths[0]) if lengths else b""
        self.heads.append(head)
        self.bodies.append(msgspec.json.decode(body) if body else None)
        await self._behave(self, body, writer)

    @property
    def calls(self) -> list[Any]:
        """Return the messages that were sent, without `rpc.discover`."""
        return [
            body
            for body in self.bodies
            if isinstance(body, list) or body["method"] != "rpc.discover"
        ]


def http(body: bytes, status: str = "200 OK", *more: str) -> bytes:
    fields = "".join(
        f"{line}\r\n"
        for line in ("Content-Type: application/json", f"Content-Length: {len(body)}", *more)
    )
    return f"HTTP/1.1 {status}\r\n{fields}\r\n".encode() + body


def answers(make: Callable[[Any], bytes]) -> Behaviour:
    """Answers each request with what `make` makes of the decoded message: a whole HTTP answer."""

    async def behave(_peer: Peer, body: bytes, writer: Writer) -> None:
        writer.write(make(msgspec.json.decode(body)))
        await writer.drain()

    return behave


def ok(id: Any, result: Any = "fine") -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "result": result}


class SlowProxy(Listening):
    """Passes bytes both ways, and the end of a connection, each a little later."""

    def __init__(self, port: int, delay: float) -> None:
        super().__init__()
        self._port = port
        self._delay = delay

    async def _serve(self, reader: Reader, writer: Writer) -> None:
        upstream, out = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            await asyncio.gather(self._pump(reader, out), self._pump(upstream, writer))
        finally:
            out.transport.abort()

    async def _pump(self, reader: Reader, writer: Writer) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                await asyncio.sleep(self._delay)
                writer.write(data)
        await asyncio.sleep(self._delay)
        writer.close()


class CuttingProxy(Listening):
    """Passes bytes both ways, and cuts each connection somewhere: after some bytes, of whichever
    direction.
    """

    def __init__(self, target: str, seed: int, *, longest: int = 3000) -> None:
        super().__init__()
        host, _, port = target.removeprefix("http://").partition(":")
        self._target = (host, int(port))
        self._random = random.Random(seed)
        self._longest = longest
        self.cuts = 0
        self.is_kind = False  # cuts no more

    async def _serve(self, reader: Reader, writer: Writer) -> None:
        upstream, out = await asyncio.open_connection(*self._target)
        left = [self._random.randrange(self._longest)]
        pumps = [
            asyncio.create_task(self._pump(reader, out, left)),
            asyncio.create_task(self._pump(upstream, writer, left)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            out.transport.abort()

    async def _pump(self, reader: Reader, writer: Writer, left: list[int]) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                if not self.is_kind and len(data) > left[0]:
                    writer.write(data[: left[0]])
                    await writer.drain()
                    self.cuts += 1
                    return
                left[0] -= len(data)
                writer.write(data)
                await writer.drain()
