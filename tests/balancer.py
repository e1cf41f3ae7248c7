"""A load balancer in the test's own process: it asks `/readyz`, and keeps connections open."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

PATIENCE = 60.0
# Seconds between two probes of a server.
EVERY = 0.02

PROBE = b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Connection:
    """A connection to a server, for one request after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, request: bytes) -> Answer:
        self.writer.write(request)
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return Answer(int(first.split()[1]), headers, body)

    def close(self) -> None:
        self.writer.close()


async def connect(port: int) -> Connection:
    return Connection(*await asyncio.open_connection("127.0.0.1", port))


class Balancer:
    """Sends each request to one of the servers that are ready, in turn."""

    def __init__(self, ports: list[int]) -> None:
        self.ready: dict[int, asyncio.Event] = {port: asyncio.Event() for port in ports}
        # How many requests each server has had, and how many answers closed their connection.
        self.counts: Counter[int] = Counter()
        self.closed = 0
        self._idle: defaultdict[int, list[Connection]] = defaultdict(list)
        self._changed = asyncio.Condition()
        self._turn = 0

    @asynccontextmanager
    async def watching(self) -> AsyncIterator["Balancer"]:
        """Ask the servers whether they are ready, in this block."""
        async with asyncio.TaskGroup() as group:
            probes = [group.create_task(self._watch(port)) for port in self.ready]
            try:
                yield self
            finally:
                for probe in probes:
                    probe.cancel()
        for port in self.ready:
            self._drop(port)

    async def _watch(self, port: int) -> None:
        while True:
            is_ready = False
            with suppress(OSError, asyncio.IncompleteReadError):
                probe = await connect(port)
                try:
                    is_ready = (await probe.ask(PROBE)).status == 200
                finally:
                    probe.close()
            if is_ready:
                self.ready[port].set()
            else:
                self.ready[port].clear()
                self._drop(port)
            async with self._changed:
                self._changed.notify_all()
            await asyncio.sleep(EVERY)

    def _drop(self, port: int) -> None:
        for each in self._idle.pop(port, []):
            each.close()

    async def _next(self) -> int:
        """Return the port of a server that is ready."""
        async with self._changed:
            await self._changed.wait_for(lambda: any(each.is_set() for each in self.ready.values()))
        ports = [port for port, is_ready in self.ready.items() if is_ready.is_set()]
        self._turn += 1
        return ports[self._turn % len(ports)]

    async def post(self, body: bytes, key: str | None = None) -> Answer:
        """Send a message, once; raises if its connection breaks."""
        port = await self._next()
        self.counts[port] += 1
        connection = None
        while self._idle[port] and connection is None:
            connection = self._idle[port].pop()
            if connection.reader.at_eof():
                connection.close()
                connection = None
        connection = connection or await connect(port)
        lines = ["POST /rpc HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        lines.append(f"Content-Length: {len(body)}")
        if key is not None:
            lines.append(f"Idempotency-Key: {key}")
        async with asyncio.timeout(PATIENCE):
            try:
                answer = await connection.ask("\r\n".join([*lines, "", ""]).encode() + body)
            except BaseException:
                connection.close()
                raise
        if answer.headers.get("connection") == "close":
            self.closed += 1
            connection.close()
        elif self.ready[port].is_set():
            self._idle[port].append(connection)
        else:
            connection.close()
        return answer

    async def until(self, port: int, *, is_ready: bool) -> None:
        """Wait until a server is ready, or is not."""
        async with asyncio.timeout(PATIENCE), self._changed:
            await self._changed.wait_for(lambda: self.ready[port].is_set() is is_ready)
