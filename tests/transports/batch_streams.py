"""A shop whose calls a test holds, behind a real server; and a client that reads raw bytes."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from wirecall import App
from wirecall.errors import DomainError, OtherLoop

FRONTS = ("granian", "granian-asgi", "uvicorn")
PATIENCE = 60.0
JSONL = "application/jsonl"


class Shop:
    """An app whose calls a test holds and lets go by their numbers."""

    def __init__(self, **options: Any) -> None:
        self.app = App("shop", single_user=True, **options)
        self.begun = asyncio.Queue[int]()
        self.cancelled = asyncio.Queue[int]()
        self.charged: list[int] = []
        self.done = asyncio.Queue[int]()
        self.gates: dict[int, asyncio.Event] = {}
        self.app.query(name="add")(lambda a, b: a + b)
        self.app.query(self.wait)
        self.app.query(self.order)
        self.app.query(self.big)
        self.app.query(self.refuse)
        self.app.query(self.break_all)
        self.app.query(name="note", notification_allowed=True)(self.wait)
        self.app.command(key="auto")(self.charge)
        self.app.command(name="pay", key="off")(self.charge)

    def gate(self, number: int) -> asyncio.Event:
        return self.gates.setdefault(number, asyncio.Event())

    async def wait(self, number: int) -> int:
        self.begun.put_nowait(number)
        try:
            await self.gate(number).wait()
        except asyncio.CancelledError:
            self.cancelled.put_nowait(number)
            raise
        return number

    async def order(self, number: int) -> dict[str, int]:
        return {"number": await self.wait(number)}

    async def big(self, size: int) -> str:
        self.begun.put_nowait(size)
        return "x" * size

    def refuse(self) -> None:
        raise DomainError(4001, "sold out")

    async def break_all(self) -> None:
        """Fail in a way that ends the whole batch."""
        await self.gate(0).wait()
        raise OtherLoop

    async def charge(self, number: int) -> int:
        """Take effect at once; end when the test says so. Numbers from 100 end at once."""
        self.charged.append(number)
        self.begun.put_nowait(number)
        if number < 100:
            await self.gate(number).wait()
        self.done.put_nowait(number)
        return number

    async def has_begun(self, *numbers: int) -> None:
        """Wait until these calls have begun, in any order, and no other one before."""
        async with asyncio.timeout(PATIENCE):
            assert sorted([await self.begun.get() for _ in numbers]) == sorted(numbers)

    @asynccontextmanager
    async def serving(self, front: str) -> "AsyncIterator[int]":
        """Serve the app in this loop; yield the port."""
        listening = asyncio.get_running_loop().create_future()
        kind: Any = front
        task = asyncio.create_task(
            self.app.serve(port=0, server=kind, listening=listening.set_result, grace=4.0)
        )
        await asyncio.wait({task, listening}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        self.task = task
        try:
            yield int(listening.result().rpartition(":")[2])
        finally:
            for gate in self.gates.values():
                gate.set()
            task.cancel()
            await asyncio.wait({task})


def call(id: int | None, method: str, *params: Any, **members: Any) -> dict[str, Any]:
    """Return a request, or a notification if it has no id."""
    message: dict[str, Any] = {"jsonrpc": "2.0", "method": method, "params": list(params)}
    if id is not None:
        message["id"] = id
    return message | members


def charge(id: int, number: int, key: str | None = None) -> dict[str, Any]:
    params: dict[str, Any] = {"number": number}
    if key is not None:
        params["idempotency_key"] = key
    return call(id, "charge", params=params)


class Reading:
    """One HTTP exchange: raw bytes out, and the answer as it comes."""

    status = 0

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.headers: dict[str, str] = {}
        # Bytes of the body that no record has taken.
        self._body = bytearray()
        self._length: int | None = None

    async def head(self) -> "Reading":
        """Read the status and the header."""
        async with asyncio.timeout(PATIENCE):
            first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        self.status = int(first.split(" ")[1])
        for line in filter(None, lines):
            name, _, value = line.partition(": ")
            self.headers[name.lower()] = value
        if "content-length" in self.headers:
            self._length = int(self.headers["content-length"])
        return self

    async def piece(self) -> bytes:
        """Return the next bytes of the body; b"" at its end. OSError if it is cut."""
        if not self.status:
            await self.head()
        async with asyncio.timeout(PATIENCE):
            if self._length is not None:
                whole = await self.reader.readexactly(self._length)
                self._length = 0
                return whole
            if self.headers.get("transfer-encoding") != "chunked":
                return b""
            size = int(await self._line(), 16)
            data = await self.reader.readexactly(size + 2)
            return data[:-2]

    async def _line(self) -> bytes:
        line = await self.reader.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionError("the answer was cut")
        return line

    async def until(self, mark: bytes) -> bytes:
        """Return the bytes of the body up to a mark."""
        while mark not in self._body:
            piece = await self.piece()
            if not piece:
                raise ConnectionError("the answer has ended")
            self._body += piece
        end = self._body.index(mark) + len(mark)
        found = bytes(self._body[:end])
        del self._body[:end]
        return found

    async def record(self) -> Any:
        """Return the next line as JSON."""
        return json.loads(await self.until(b"\n"))

    async def rest(self) -> bytes:
        """Return the rest of the body."""
        while piece := await self.piece():
            self._body += piece
        rest = bytes(self._body)
        self._body.clear()
        return rest

    async def records(self) -> list[Any]:
        return [json.loads(line) for line in (await self.rest()).splitlines()]

    def cut(self) -> None:
        """End the connection at once, as a client that is killed does."""
        self.writer.transport.abort()

    async def close(self) -> None:
        """Close the connection cleanly."""
        self.writer.close()


async def post(
    port: int,
    body: Any,
    accept: str | None = JSONL,
    *,
    buffer: int | None = None,
    more: str = "",
    path: str = "/rpc",
) -> Reading:
    """Send a body. `buffer`: the client's kernel takes few bytes, so that it is soon full."""
    connection = socket.socket()
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    limit = 1 << 16 if buffer is None else buffer
    reader, writer = await asyncio.open_connection(sock=connection, limit=limit)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    accepts = "" if accept is None else f"accept: {accept}\r\n"
    writer.write(
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\n".encode()
        + f"content-type: application/json\r\n{accepts}{more}content-length: {len(data)}\r\n\r\n".encode()
        + data
    )
    await writer.drain()
    return Reading(reader, writer)


def end(answered: int, *replayed: int) -> dict[str, Any]:
    params = {"answered": answered, "replayed": [*replayed]}
    return {"jsonrpc": "2.0", "method": "rpc.end", "params": params}


def result(id: int, value: Any, *, replayed: bool = False) -> dict[str, Any]:
    answer = {"jsonrpc": "2.0", "result": value, "id": id}
    if replayed:
        answer["replayed"] = True
    return answer
