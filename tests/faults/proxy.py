"""A TCP proxy on loopback between a ledger and its server that loses messages on purpose.

It lives in a thread with its own event loop, so it continues while the test waits, and a plain call
from the test arms a fault. A fault applies to the bytes that arrive afterwards, on any connection:

    lose("request", b"COMMIT")    the client has sent it, the server never sees it, and the
                                  connection is gone
    lose("answer", b"COMMIT")     the server has answered, the client never sees that, and the
                                  connection is gone
    lose("hush", b"COMMIT")       the server has answered, the client never sees that, and waits: the
                                  connection stays
    delay(b"COMMIT")              the client has sent it; the server sees it after `flow()`, even if
                                  the client is gone then
    note(b"COMMIT")               nothing happens to it, but it was seen
    cut_after(17, "up")           17 more bytes reach the server, then the connection is gone
                                  ("down": reach the client)
    vanish_after(17)              17 more bytes reach the server, then the client's host is gone: the server
                                  learns nothing, not even that the connection ended

    stall("down")                 no bytes pass in that direction, on any connection, until `flow()`
    cut()                         all connections are gone
    refuse(), admit()             new connections are refused, or accepted again
    away()                        both, for a `with` block
"""

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypeAlias

from tests.ports import free_port

Direction: TypeAlias = Literal["up", "down"]  # to the server, to the client
Target: TypeAlias = tuple[str, int] | str  # host and port, or the path of a Unix socket
Stream: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]

PATIENCE = 60.0
CHUNK = 1 << 16
LONGEST_PATTERN = 200


class Fault:
    """The effect on bytes that arrive; `happened` counts how often it occurred."""

    def __init__(
        self,
        what: Literal["request", "answer", "hush", "delay", "note", "cut", "vanish"],
        *,
        times: int = 1,
    ) -> None:
        self.what = what
        self.times = times
        self.pattern = b""
        self.direction: Direction = "up"
        self.left = 0  # bytes that may still pass
        self.happened = 0
        self._over = threading.Event()

    @property
    def is_over(self) -> bool:
        return self.happened >= self.times

    def strike(self) -> None:
        self.happened += 1
        if self.is_over:
            self._over.set()

    async def wait(self) -> None:
        """Wait until it has occurred as often as requested."""
        assert await asyncio.to_thread(self._over.wait, PATIENCE), (
            f"it did not happen: {self.what} {self.pattern!r}"
        )

    def end(self) -> None:
        """Disarm the fault."""
        self.times = 0


class Proxy:
    """The proxy in front of one server, for a `with` block."""

    def __init__(self, target: Target) -> None:
        self.port = free_port()
        self.cuts = 0
        self.passed: Counter[Direction] = Counter()  # bytes
        self._target = target
        self._faults: list[Fault] = []
        self._links: set[_Link] = set()
        # To the server, by clients whose host is gone.
        self.left_open: list[asyncio.StreamWriter] = []
        self._serving: set[asyncio.Task[Any]] = set()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._live()), name="proxy", daemon=True
        )
        self._started = threading.Event()

    # --- for tests --------------------------------------------------------------------------------

    def __enter__(self) -> "Proxy":
        self._thread.start()
        assert self._started.wait(PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(PATIENCE)

    def lose(
        self, what: Literal["request", "answer", "hush"], pattern: bytes, *, times: int = 1
    ) -> Fault:
        return self._arm(Fault(what, times=times), pattern)

    def delay(self, pattern: bytes, *, times: int = 1) -> Fault:
        return self._arm(Fault("delay", times=times), pattern)

    def note(self, pattern: bytes) -> Fault:
        return self._arm(Fault("note"), pattern)

    def cut_after(self, count: int, direction: Direction) -> Fault:
        fault = Fault("cut")
        fault.left = count
        fault.direction = direction
        return self._arm(fault)

    def vanish_after(self, count: int) -> Fault:
        fault = Fault("vanish")
        fault.left = count
        return self._arm(fault)

    def cut(self) -> None:
        """Cut all connections: when this returns, the proxy reads no more bytes of them."""
        self._call(self._cut_now)

    def refuse(self) -> None:
        self._call(self._refuse)

    def admit(self) -> None:
        self._call(self._listen)

    @contextmanager
    def away(self) -> Iterator[None]:
        """The server cannot be reached in this block."""
        self.refuse()
        self.cut()
        try:
            yield
        finally:
            self.admit()

    def stall(self, *directions: Direction) -> None:
        for direction in directions:
            self._call(self._flows[direction].clear)

    def flow(self) -> None:
        for gate in (*self._flows.values(), self._delayed):
            self._call(gate.set)

    def _arm(self, fault: Fault, pattern: bytes = b"") -> Fault:
        fault.pattern = pattern
        if fault.what == "delay":
            self._call(self._delayed.clear)
        self._call(self._faults.append, fault)
        return fault

    def _call(self, work: Callable[..., Any], *args: Any) -> None:
        """Run in the proxy's own thread, and wait for the end."""

        async def call() -> None:
            result = work(*args)
            if asyncio.iscoroutine(result):
                await result

        asyncio.run_coroutine_threadsafe(call(), self._loop).result(PATIENCE)

    # --- in the thread ----------------------------------------------------------------------------

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        self._delayed = asyncio.Event()
        self._flows: dict[Direction, asyncio.Event] = {
            "up": asyncio.Event(),
            "down": asyncio.Event(),
        }
        for gate in self._flows.values():
            gate.set()
        await self._listen()
        self._started.set()
        await self._end.wait()
        self._refuse()
        for writer in self.left_open:
            writer.close()
        while self._serving:
            self._cut()
            await asyncio.wait(self._serving, timeout=0.1)

    async def _listen(self) -> None:
        listening = socket.create_server(("127.0.0.1", self.port))
        self._server = await asyncio.start_server(self._accept, sock=listening)

    def _refuse(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def _cut(self) -> None:
        for link in self._links:
            link.cut()

    async def _cut_now(self) -> None:
        links = list(self._links)
        self._cut()
        for link in links:
            await link.is_closed.wait()

    async def _accept(self, *client: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            link = _Link(self, client, await self._dial())
            self._links.add(link)
            await link.run()
            self._links.discard(link)
        except OSError:  # no server
            client[1].transport.abort()
        finally:
            self._serving.discard(task)

    async def _dial(self) -> Stream:
        if isinstance(self._target, str):
            return await asyncio.open_unix_connection(self._target)
        return await asyncio.open_connection(*self._target)

    # --- for links --------------------------------------------------------------------------------

    def called_up(self, before: bytes, data: bytes) -> Fault | None:
        """The fault that these bytes to the server trigger; its pattern may begin in those before
        them.
        """
        for fault in self._faults:
            if (
                fault.pattern
                and not fault.is_over
                and fault.pattern in before[1 - len(fault.pattern) :] + data
            ):
                return fault
        return None

    def admitted(self, count: int, direction: Direction) -> tuple[int, Fault | None]:
        """How many of so many bytes may pass, and the fault that keeps back the rest."""
        for fault in self._faults:
            if (
                fault.what in ("cut", "vanish")
                and fault.direction == direction
                and not fault.is_over
            ):
                if count > fault.left:
                    return fault.left, fault
                fault.left -= count
        return count, None

    async def wait_for_flow(self, direction: Direction) -> None:
        await self._flows[direction].wait()

    async def wait_for_delivery(self) -> None:
        await self._delayed.wait()


class _Link:
    """One client, and its connection to the server."""

    def __init__(self, proxy: Proxy, client: Any, server: Stream) -> None:
        self._proxy = proxy
        self._client: Stream = client
        self._server = server
        self._swallows: Fault | None = None  # what comes from the server next is lost
        self._is_cut = asyncio.Event()
        # Neither connection is read any more.
        self.is_closed = asyncio.Event()
        self._is_vanished = False

    def cut(self) -> None:
        if not self._is_cut.is_set():
            self._proxy.cuts += 1
            self._is_cut.set()

    async def run(self) -> None:
        parts = [
            asyncio.create_task(part) for part in (self._up(), self._down(), self._is_cut.wait())
        ]
        await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        for part in parts:
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)
        if self._is_vanished:
            self._proxy.left_open.append(self._server[1])
        ended = [
            writer
            for _, writer in (self._client, self._server)
            if writer not in self._proxy.left_open
        ]
        for writer in ended:
            writer.close()
        self.is_closed.set()
        for writer in ended:
            with suppress(OSError):
                await writer.wait_closed()

    async def _up(self) -> bool:
        """To the server; it ends when the link does."""
        before = b""
        while data := await self._read(self._client[0], "up"):
            fault = self._proxy.called_up(before, data)
            before = data[-LONGEST_PATTERN:]
            if fault is not None and not await self._meet(fault):
                return True
            if not await self._pass(self._server[1], data, "up"):
                return True
        return True

    async def _meet(self, fault: Fault) -> bool:
        """Whether the bytes that triggered the fault are passed to the server."""
        if fault.what in ("answer", "hush"):
            self._swallows = fault
            return True
        self._strike(fault)
        if fault.what == "delay":
            await self._proxy.wait_for_delivery()
        return fault.what != "request"

    async def _down(self) -> bool:
        while data := await self._read(self._server[0], "down"):
            if self._swallows is not None:
                if not self._swallows.is_over:
                    self._strike(self._swallows)
                if self._swallows.what == "hush":
                    continue
                return True
            if not await self._pass(self._client[1], data, "down"):
                return True
        return True

    async def _read(self, reader: asyncio.StreamReader, direction: Direction) -> bytes:
        try:
            data = await reader.read(CHUNK)
        except OSError:  # the other side broke off
            return b""
        await self._proxy.wait_for_flow(direction)
        return data

    async def _pass(self, writer: asyncio.StreamWriter, data: bytes, direction: Direction) -> bool:
        """Pass on what may pass; False if that was the end."""
        count, fault = self._proxy.admitted(len(data), direction)
        self._proxy.passed[direction] += count
        writer.write(data[:count])
        with suppress(OSError):
            await writer.drain()
        if fault is not None:
            self._is_vanished = fault.what == "vanish"
            self._strike(fault)
        return fault is None

    def _strike(self, fault: Fault) -> None:
        self._proxy.cuts += fault.what not in ("hush", "delay", "note")
        fault.strike()
