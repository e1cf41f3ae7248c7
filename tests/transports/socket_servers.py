"""Servers on sockets and on stdio, in processes, for tests of sockets and framing."""

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec

from wirecall.transports.framing import Framing
from wirecall.transports.sockets import address_of

PATIENCE = 60.0

SERVER = """
import asyncio, os, sys
import wirecall
from wirecall import App, Context, Limits

opened = asyncio.Event()
runs = []

app = App("shop", limits=Limits(bytes_in=20_000), ledger=os.environ.get("LEDGER", "memory:"))

def say(text):
    print(text, file=sys.stderr, flush=True)

@app.query
def add(a: int, b: int) -> int:
    return a + b

@app.query
def echo(text: str) -> str:
    return text

@app.query
def who(ctx: Context) -> str:
    return ctx.caller

@app.query(notification_allowed=True)
def note(text: str) -> None:
    runs.append(text)
    say("noted " + text)

@app.query
def noted() -> list[str]:
    return runs

@app.query
def refuse() -> None:
    raise wirecall.DomainError(4001, "sold out — leider", {"left": 0})

@app.query
async def forever() -> str:
    say("waiting")
    await opened.wait()
    return "opened"

@app.query
def let_go() -> str:
    opened.set()
    return "open"

@app.query
async def count(n: int, ctx: Context) -> bool:
    for number in range(n):
        await ctx.notify("counted", {"number": number})
    return ctx.can_notify

@app.command(key="auto")
async def put(text: str) -> int:
    runs.append(text)
    say("putting")
    await opened.wait()
    return len(runs)

options = {}
for word in sys.argv[2:]:
    name, _, value = word.partition("=")
    options[name] = int(value) if value.isdigit() else value
app.run(sys.argv[1], **options)
"""


class Server:
    """A server in a process, and the lines of its stderr."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        self.address = ""
        self.lines: list[str] = []
        self._arrived = threading.Condition()
        self._is_over = False
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._arrived:
                self.lines.append(line.decode().rstrip())
                self._arrived.notify_all()
        with self._arrived:
            self._is_over = True
            self._arrived.notify_all()

    def said(self, text: str) -> str:
        """Wait for a line of stderr that contains these words, and return it."""
        found = list[str]()

        def is_said() -> bool:
            found[:] = [line for line in self.lines if text in line]
            return bool(found) or self._is_over

        with self._arrived:
            assert self._arrived.wait_for(is_said, PATIENCE), self.lines
        assert found, self.lines
        return found[0]

    def end(self) -> int:
        """Stop the server with SIGTERM, and return its exit code."""
        self.process.terminate()
        code = self.process.wait(PATIENCE)
        self._reading.join(PATIENCE)
        return code


def command(tmp_path: Path, *words: str) -> list[str]:
    """Return the command line of a server: a transport, and options of `App.run`."""
    script = tmp_path / "shop_server.py"
    script.write_text(SERVER)
    return [sys.executable, str(script), *words]


@contextlib.contextmanager
def running(tmp_path: Path, *words: str, **environment: str) -> Iterator[Server]:
    """Run a server on a socket until the end of the block."""
    process = subprocess.Popen(
        command(tmp_path, *words), stderr=subprocess.PIPE, env={**os.environ, **environment}
    )
    server = Server(process)
    try:
        server.address = server.said("Listening on ").rpartition(" ")[2]
        yield server
    finally:
        server.end()
        assert process.stderr is not None
        process.stderr.close()


class Peer:
    """A client that sends and receives bytes."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, framing: Framing
    ) -> None:
        self._reader = reader
        self._framing = framing
        self._splitter = framing.splitter(1 << 20)
        self._messages: list[bytes] = []
        self.writer = writer

    def send_bytes(self, data: bytes) -> None:
        self.writer.write(data)

    def send(self, method: str, params: Any = None, id: Any = None) -> None:
        message: dict[str, Any] = {"jsonrpc": "2.0", "method": method}
        if params is not None:
            message["params"] = params
        if id is not None:
            message["id"] = id
        self.send_bytes(self._framing.join(msgspec.json.encode(message)))

    async def receive(self) -> Any:
        """Return the next message; None at the end of the stream."""
        async with asyncio.timeout(PATIENCE):
            while not self._messages:
                data = await self._reader.read(1 << 16)
                if not data:
                    return None
                self._messages += self._splitter.feed(data)
        return msgspec.json.decode(self._messages.pop(0))

    async def call(self, method: str, params: Any = None, id: Any = 1) -> Any:
        """Send a request, and return the next message."""
        self.send(method, params, id)
        return await self.receive()


@contextlib.asynccontextmanager
async def peer(address: str, framing: Framing) -> AsyncIterator[Peer]:
    """Connect to a server on a socket."""
    place = address_of(address)
    if place.path:
        reader, writer = await asyncio.open_unix_connection(place.path)
    else:
        reader, writer = await asyncio.open_connection(place.host, place.port)
    try:
        yield Peer(reader, writer, framing)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
