"""The client beside a bare aiohttp loop and beside the official SDK's and FastMCP's clients, in one
run.

    make bench            or   python bench/client.py [--quick]

Over HTTP, all of them call one server of a few lines in a separate process, 16 calls in flight. It
does the minimum that JSON-RPC and MCP require, so that the client is measured. In memory, each
client calls a server of the same library. The clients of each library run in a separate process, as
in the programs of their users: FastMCP imports OpenTelemetry, and in a process that has imported it
every call of wirecall's MCP client begins a span. The rows take turns, and the best of several
rounds counts. The measure is the processor time of their process. Read the ratios; the calls per
second depend on the machine.
"""

import asyncio
import json
import logging
import subprocess
import sys
import time
import warnings
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from typing import Any, Self

import msgspec

from targets import Target, report
from wirecall import App, connect

QUICK = "--quick" in sys.argv
ROUNDS = 2 if QUICK else 5
SECONDS = 0.3 if QUICK else 1.0  # seconds that a row may take in a round
IN_FLIGHT = 16

Call = Callable[[], Awaitable[Any]]

BARE = """
import asyncio, sys
import msgspec

decode = msgspec.json.Decoder().decode
encode = msgspec.json.Encoder().encode
SCHEMA = {"type": "object", "properties": {"sku": {"type": "string"}}}
DECLARED = {"capabilities": {"tools": {}}, "serverInfo": {"name": "bare", "version": "1"}}
HEAD = b"HTTP/1.1 200 OK\\r\\ncontent-type: application/json\\r\\ncontent-length: %d\\r\\n\\r\\n"
RESULTS = {
    "rpc.discover": {},
    "initialize": {"protocolVersion": "2025-11-25", **DECLARED},
    "server/discover": {"supportedVersions": ["2026-07-28"], **DECLARED},
    "tools/list": {"tools": [{"name": "price", "inputSchema": SCHEMA}]},
    "tools/call": {"content": [{"type": "text", "text": "3"}]},
    "price": 3,
}
for result in RESULTS.values():
    if isinstance(result, dict):
        result.update(resultType="complete", ttlMs=0, cacheScope="private")


class Bare(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
        self.buffer = b""

    def data_received(self, data):
        self.buffer += data
        while (end := self.buffer.find(b"\\r\\n\\r\\n")) >= 0:
            head = self.buffer[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15:].split(b"\\r\\n", 1)[0]) if at >= 0 else 0
            if len(self.buffer) < end + 4 + length:
                return
            body, self.buffer = self.buffer[end + 4 : end + 4 + length], self.buffer[end + 4 + length :]
            self.answer(head, body)

    def answer(self, head, body):
        message = decode(body) if head.startswith(b"post") else {}
        if "id" not in message:
            status = b"202 Accepted" if message else b"405 Method Not Allowed"
            self.transport.write(b"HTTP/1.1 " + status + b"\\r\\ncontent-length: 0\\r\\n\\r\\n")
            return
        answer = encode({"jsonrpc": "2.0", "id": message["id"], "result": RESULTS[message["method"]]})
        self.transport.write(HEAD % len(answer) + answer)


async def main():
    server = await asyncio.get_running_loop().create_server(Bare, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


asyncio.run(main())
"""


def main() -> int:
    speeds: dict[str, float] = {}
    with ExitStack() as stack:
        server = stack.enter_context(Child("-c", BARE))
        url = f"http://127.0.0.1:{server.read().strip()}"
        clients = [
            stack.enter_context(Child(__file__, *sys.argv[1:], "--library", name, url))
            for name in LIBRARIES
        ]
        rows = [(client, name) for client in clients for name in json.loads(client.read())]
        for client, name in rows * ROUNDS:
            client.write(name)
            speeds[name] = max(speeds.get(name, 0.0), float(client.read()))
    return tell(speeds)


class Child:
    """A Python process that reads and writes lines. It ends with its input."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input = self._process.stdin
        self._output = self._process.stdout

    def write(self, line: str) -> None:
        print(line, file=self._input, flush=True)

    def read(self) -> str:
        return self._output.readline()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._input.close()
        self._process.wait(10)


async def measure(library: str, url: str) -> None:
    """Print the names of a library's rows; then, for each name read, print its speed."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    async with AsyncExitStack() as stack:
        rows = await LIBRARIES[library](stack, url)
        print(json.dumps(list(rows)), flush=True)
        while name := (await asyncio.to_thread(sys.stdin.readline)).strip():
            print(await speed(*rows[name]), flush=True)


Rows = dict[str, tuple[Call, int]]  # how each client calls, and how many calls at once


async def wirecall_rows(stack: AsyncExitStack, url: str) -> Rows:
    import aiohttp

    session = await stack.enter_async_context(aiohttp.ClientSession())
    plain = await stack.enter_async_context(connect(f"{url}/rpc"))
    modern = await stack.enter_async_context(connect(f"{url}/mcp", protocol="mcp"))
    memory = await stack.enter_async_context(connect(wirecall_shop()))
    memory_mcp = await stack.enter_async_context(connect(wirecall_shop(), protocol="mcp"))
    request = {"jsonrpc": "2.0", "method": "price", "params": {"sku": "tea"}, "id": 1}

    async def bare() -> Any:
        async with session.post(f"{url}/rpc", data=msgspec.json.encode(request)) as response:
            return msgspec.json.decode(await response.read())["result"]

    return {
        "bare aiohttp": (bare, IN_FLIGHT),
        "wirecall, JSON-RPC": (lambda: plain.call("price", {"sku": "tea"}), IN_FLIGHT),
        "wirecall, MCP": (lambda: modern.call_tool("price", {"sku": "tea"}), IN_FLIGHT),
        "wirecall in memory, JSON-RPC": (lambda: memory.call("price", {"sku": "tea"}), 1),
        "wirecall in memory, MCP": (lambda: memory_mcp.call_tool("price", {"sku": "tea"}), 1),
    }


async def official_rows(stack: AsyncExitStack, url: str) -> Rows:
    import mcp

    client = await stack.enter_async_context(mcp.Client(f"{url}/mcp"))
    return {"official SDK, MCP": (lambda: client.call_tool("price", {"sku": "tea"}), IN_FLIGHT)}


async def fastmcp_rows(stack: AsyncExitStack, _url: str) -> Rows:
    import fastmcp

    client = await stack.enter_async_context(fastmcp.Client(fastmcp_shop()))
    return {"FastMCP in memory": (lambda: client.call_tool("price", {"sku": "tea"}), 1)}


LIBRARIES = {"wirecall": wirecall_rows, "official": official_rows, "fastmcp": fastmcp_rows}


def wirecall_shop() -> App:
    app = App("shop", mode="production", ledger="memory:")

    @app.query
    def price(sku: str) -> int:
        return len(sku)

    return app


def fastmcp_shop() -> Any:
    from fastmcp import FastMCP

    server = FastMCP("shop")

    @server.tool
    def price(sku: str) -> int:
        return len(sku)

    return server


async def speed(call: Call, at_once: int) -> float:
    """Calls per second of processor time, with `at_once` of them in flight."""
    await call()
    began = time.perf_counter()
    cpu = time.process_time()
    end = began + SECONDS
    done = 0

    async def caller() -> None:
        nonlocal done
        while time.perf_counter() < end:
            await call()
            done += 1

    await asyncio.gather(*(caller() for _ in range(at_once)))
    return done / (time.process_time() - cpu)


def tell(speeds: dict[str, float]) -> int:
    for name, value in speeds.items():
        print(f"  {value:9.0f} calls/s  {name}")
    bare = speeds["bare aiohttp"]
    official = speeds["official SDK, MCP"]
    fast = speeds["FastMCP in memory"]
    plain = speeds["wirecall, JSON-RPC"]
    modern = speeds["wirecall, MCP"]
    memory = speeds["wirecall in memory, MCP"]
    targets = [
        Target(
            "JSON-RPC over HTTP, of a bare aiohttp loop", "calls/s", plain, ">=", 0.8, bare=bare
        ),
        Target("MCP over HTTP, of a bare aiohttp loop", "calls/s", modern, ">=", 0.8, bare=bare),
        Target(
            "MCP over HTTP, times the official SDK's client",
            "calls/s",
            modern,
            ">=",
            5,
            peer=official,
        ),
        Target("MCP in memory, times FastMCP's client", "calls/s", memory, ">=", 40, peer=fast),
    ]
    return report("client", targets, speeds)


if __name__ == "__main__":
    if "--library" in sys.argv:
        asyncio.run(measure(*sys.argv[-2:]))
    else:
        sys.exit(main())
