"""HTTP: the rules by a driver in this process (`ask`), the rest by real servers in separate
processes (`serving`).
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.calls import make_app
from tests.rsgi import drive
from wirecall import Limits
from wirecall.mcp.server.http import McpEndpoint
from wirecall.mcp.server.others import Relay
from wirecall.protocol.messages import Data, Id
from wirecall.protocol.receipt import Receipt
from wirecall.protocol.sender import Sender
from wirecall.transports import request
from wirecall.transports.health import health_endpoints
from wirecall.transports.http_server import HttpServer
from wirecall.transports.request import Endpoint, HttpRequest
from wirecall.transports.rpc_endpoint import rpc_endpoint
from wirecall.transports.serve import serve

PATIENCE = 60.0

# Bytes of an answer that the buffers between a server and a client that does not read cannot hold.
LONG = 8 << 20

Pairs = Sequence[tuple[str, str]]
LOCAL = (("host", "localhost:8420"),)


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes
    is_complete: bool

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def message(self) -> str:
        return str(self.json["error"]["message"])


class Client:
    """An ASGI client that sends given messages, and disconnects at the end if asked to."""

    def __init__(self, *events: Any, leaves: bool = False) -> None:
        self.events = list(events)
        self.sent: list[Any] = []
        self.answered = asyncio.Event()
        self.left = asyncio.Event()
        self.reading = asyncio.Event()
        self.reading.set()
        if leaves:
            self.left.set()

    async def receive(self) -> Any:
        if self.events:
            event = self.events.pop(0)
            return await event if asyncio.iscoroutine(event) else event
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, event: Any) -> None:
        await self.reading.wait()
        self.sent.append(event)
        self.answered.set()

    @property
    def reply(self) -> Reply:
        start, *rest = self.sent
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        is_complete = bool(rest) and not rest[-1].get("more_body", False)
        return Reply(
            start["status"], headers, b"".join(event["body"] for event in rest), is_complete
        )


async def until_left(request: HttpRequest) -> None:
    left = asyncio.Event()
    request.watch(left.set)
    await left.wait()


def piece(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def scope_of(method: str, path: str, headers: Pairs) -> dict[str, Any]:
    pairs = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    return {"type": "http", "method": method, "path": path, "headers": pairs, "root_path": ""}


async def ask(
    server: HttpServer,
    path: str = "/rpc",
    body: bytes = b"",
    *,
    method: str = "POST",
    headers: Pairs = (),
    host: Pairs = LOCAL,
    client: Client | None = None,
) -> Reply:
    """Send one request; by default JSON, from this machine."""
    client = client or Client(piece(body))
    pairs = [*host, *headers]
    if not any(name.lower() == "content-type" for name, _ in pairs):
        pairs.append(("content-type", "application/json"))
    async with asyncio.timeout(PATIENCE):
        await drive(server, scope_of(method, path, pairs), client.receive, client.send)
    return client.reply if client.sent else Reply(0, {}, b"", False)


# --- real servers ---------------------------------------------------------------------------------


def make_server(limits: Limits, **options: Any) -> HttpServer:
    """/rpc, probes, and streams that end when asked, that never end, and that never stop writing."""
    app = make_app(limits=limits)
    app.query(name="add")(lambda a, b: a + b)

    @app.query(blocking=True)
    def nap(seconds: float) -> None:
        print(json.dumps(["napping", seconds]), flush=True)
        time.sleep(seconds)

    @app.query
    def crash() -> None:
        os.abort()

    async def handle(
        data: Data, sender: Sender, replayed: list[Id] | None, key: str | None
    ) -> bytes | None:
        return await app.handle(data, caller=sender.caller, replayed=replayed)

    async def polite(request: HttpRequest) -> None:
        await request.body()
        await request.open_stream()
        await request.write(b"data: hello\n\n")
        await request.stopping.wait()
        await request.write(b"data: bye\n\n")
        await request.close_stream()

    async def stubborn(request: HttpRequest) -> None:
        await request.body()
        await request.open_stream()
        await request.write(b"data: hello\n\n")
        await until_left(request)

    async def flood(request: HttpRequest) -> None:
        await request.body()
        await request.open_stream()
        while True:
            await request.write(b"x" * 65536)

    async def broken(request: HttpRequest) -> None:
        await request.body()
        await request.open_stream()
        await request.write(b"data: hello\n\n")
        raise ValueError("as planned")

    async def headers(request: HttpRequest) -> None:
        names = {name: request.headers.all(name) for name in request.headers}
        await request.respond(200, json.dumps(names).encode())

    async def large(request: HttpRequest) -> None:
        await request.body()
        await request.respond(200, b"x" * (8 << 20), "text/plain")

    async def medium(request: HttpRequest) -> None:
        await request.respond(200, b"x" * (200 << 10), "text/plain")

    async def watched(request: HttpRequest, *, is_stream: bool) -> None:
        """A long answer, and a line about its end."""
        await request.body()
        receipt = request.receipt = Receipt(request.watch)
        receipt.listen(
            lambda written: print(
                json.dumps(["answer", "written" if written else "lost"]), flush=True
            )
        )
        # As the handler of a call does, so that the client is watched when the answer begins.
        await asyncio.sleep(0)
        if not is_stream:
            await request.respond(200, b"x" * LONG, "text/plain")
            return
        await request.open_stream()
        await request.write(b"data: " + b"x" * LONG + b"\n\n")
        await request.close_stream()
        receipt.written()

    async def shutdown(seconds: float) -> None:
        await app.aclose(seconds)
        print(json.dumps(["closed", round(seconds, 3)]), flush=True)

    own: dict[str, Endpoint] = {
        "/polite": polite,
        "/stubborn": stubborn,
        "/flood": flood,
        "/broken": broken,
        "/headers": headers,
        "/large": large,
        "/medium": medium,
        "/watched": partial(watched, is_stream=False),
        "/watched-stream": partial(watched, is_stream=True),
    }
    routes: dict[str, Endpoint] = {
        "/rpc": rpc_endpoint(handle),
        "/mcp": McpEndpoint(app.mcp(), limits, Relay(app.mcp().sealer, None), "/mcp"),
        **own,
        **health_endpoints(),
    }
    return HttpServer(routes, limits=limits, shutdown=shutdown, **options)


def main() -> None:
    """The child's side: serve, and report the address in a line on stdout."""
    options = json.loads(sys.argv[1])
    limits = Limits(**options.pop("limits"))

    def report(address: str, how: str) -> None:
        print(json.dumps(["listening", [address, how]]), flush=True)

    # A package that is not installed, as far as the server can see.
    if without := options.pop("without"):
        sys.modules[without] = None  # type: ignore[assignment]
    origins = options.pop("origins")
    request.LINGER_TIME = options.pop("linger")
    serve(lambda: make_server(limits, origins=origins), port=0, listening=report, **options)
    print(json.dumps(["returned", os.getpid()]), flush=True)


class Listening:
    """The address of a server, and requests to it."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(PATIENCE):
            return await asyncio.open_connection("127.0.0.1", self.port)

    async def raw(self, data: bytes) -> bytes:
        """Return all bytes until the server closes the connection."""
        reader, writer = await self.connect()
        try:
            writer.write(data)
            async with asyncio.timeout(PATIENCE):
                return await reader.read()
        finally:
            writer.close()

    async def post(self, path: str, body: bytes = b"", *lines: bytes) -> tuple[bytes, bytes]:
        """Send one request on a separate connection; return the head and the body of its answer."""
        data = await self.raw(post(path, body, b"Connection: close", *lines))
        head, _, rest = data.partition(b"\r\n\r\n")
        return head.lower(), rest


class Served(Listening):
    """A server in another process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        super().__init__(0)
        self.process = process
        self.how = ""  # the names of server, interface and loop

    async def next_value(self, word: str) -> Any:
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            line = await self.process.stdout.readline()
        assert line, f"the server ended before it said {word!r}"
        said, value = json.loads(line)
        assert said == word, line
        return value


def post(path: str, body: bytes = b"", *lines: bytes, method: bytes = b"POST") -> bytes:
    head = [
        method + b" " + path.encode() + b" HTTP/1.1",
        b"Host: localhost",
        b"Content-Type: application/json",
        *lines,
    ]
    if not any(
        line.lower().startswith((b"content-length", b"transfer-encoding")) for line in lines
    ):
        head.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def command(
    server: str,
    *,
    workers: int = 1,
    grace: float = 10.0,
    origins: Sequence[str] = (),
    linger: float = request.LINGER_TIME,
    **limits: Any,
) -> list[str]:
    """The command line of a server; `uvicorn without httptools` is one that does not see that
    package.
    """
    kind, _, without = server.partition(" without ")
    options = {
        "server": kind,
        "workers": workers,
        "grace": grace,
        "limits": limits,
        "without": without,
    }
    options |= {"origins": origins, "linger": linger}
    return [
        sys.executable,
        "-W",
        "error",
        "-c",
        "from tests.transports import main; main()",
        json.dumps(options),
    ]


@asynccontextmanager
async def serving(server: str, **options: Any) -> AsyncIterator[Served]:
    """A server that is gone at the end of the block, with the options of `command`."""
    process = await asyncio.create_subprocess_exec(
        *command(server, **options), stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    try:
        served = Served(process)
        address, served.how = await served.next_value("listening")
        served.port = int(address.rpartition(":")[2])
        yield served
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        process._transport.close()  # type: ignore[attr-defined]  # else it warns that it was not closed
