"""Requests over HTTP with as little work as possible on this side, and what servers spend on them."""

import asyncio
import contextlib
import socket
import subprocess
import time
from itertools import count
from pathlib import Path
from typing import Any

CONNECTIONS = 16
NUMBER = b"0000000000000000"  # stands for another number in each request
numbers = count(time.time_ns() // 1000)


class Connection(asyncio.Protocol):
    """Repeats a request, with a new number if it has one, when the answer to the last one is
    complete.
    """

    def __init__(self, request: bytes, wanted: bytes) -> None:
        self.done = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._wanted = wanted
        self._is_numbered = NUMBER in request
        self._buffer = b""
        self._length = 0
        self._stop = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send()

    def _send(self) -> None:
        numbered = (
            self._request.replace(NUMBER, b"%016d" % next(numbers))
            if self._is_numbered
            else self._request
        )
        self._transport.write(numbered)

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        if not self._length:
            self._length = self._whole()
        if not self._length or len(self._buffer) < self._length:
            return
        if self._wanted not in self._buffer:
            self.ended.set_exception(RuntimeError(f"not the answer: {self._buffer!r}"))
            self._transport.close()
            return
        self.done += 1
        self._buffer = b""
        self._length = 0
        if self._stop:
            self._transport.close()
        else:
            self._send()

    def _whole(self) -> int:
        """The length of head and body, once it is known: a stream is long enough when its last
        chunk is here.
        """
        head, found, _ = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return 0
        lower = head.lower()
        if b"content-length:" not in lower:
            return len(self._buffer) if self._buffer.endswith(b"\r\n0\r\n\r\n") else 0
        start = lower.index(b"content-length:") + 15
        return len(head) + 4 + int(lower[start:].split(b"\r\n", 1)[0])

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def stop(self) -> None:
        self._stop = True


async def rate(port: int, request: bytes, wanted: bytes, seconds: float) -> float:
    """Requests answered a second."""
    loop = asyncio.get_running_loop()
    pairs = [
        await loop.create_connection(lambda: Connection(request, wanted), "127.0.0.1", port)
        for _ in range(CONNECTIONS)
    ]
    connections = [connection for _, connection in pairs]
    before = sum(c.done for c in connections)
    started = time.perf_counter()
    await asyncio.wait(
        [c.ended for c in connections], timeout=seconds, return_when=asyncio.FIRST_EXCEPTION
    )
    found = (sum(c.done for c in connections) - before) / (time.perf_counter() - started)
    for connection in connections:
        connection.stop()
    async with asyncio.timeout(30):
        await asyncio.gather(*(c.ended for c in connections))
    return found


def family(pid: int) -> list[int]:
    """A process and its children: granian's command serves in one of those."""
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def spent(pid: int) -> float:
    """The processor time of a server's threads in seconds."""
    threads = [
        file for one in family(pid) for file in Path(f"/proc/{one}/task").glob("*/schedstat")
    ]
    return sum(int(file.read_text().split()[0]) for file in threads) / 1e9


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as kept:
        port: int = kept.getsockname()[1]
        return port


def wait_for(port: int, child: "subprocess.Popen[bytes]") -> None:
    """Return when the server answers connections."""
    for _ in range(600):
        if child.poll() is not None:
            raise RuntimeError(f"{child.args!r} ended with {child.returncode}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"{child.args!r} does not listen")
