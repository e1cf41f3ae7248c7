"""Tool calls and batches over HTTP, beside a bare ASGI application and other libraries: one run, one server program.

    make bench            or   python bench/http.py [--quick]

Every server runs in a process of its own under uvicorn; 16 connections each send one request after another, from this
process, with as little work as possible on this side. Servers take turns within a round, and the best round counts. They
are started anew several times: where a process happens to lie in memory makes a difference of up to a third, for its life.
"""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from targets import Target, report
from wirecall.testing.auth import AuthorizationServer

QUICK = "--quick" in sys.argv
STARTS = 2 if QUICK else 5
ROUNDS = 1 if QUICK else 2
SECONDS = 0.4 if QUICK else 0.6
CONNECTIONS = 16
BATCH = 50
SERVERS = Path(__file__).parent / "http_servers.py"

MODERN = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": {"name": "bench", "version": "1"},
}

TASKS = {**MODERN, "io.modelcontextprotocol/clientCapabilities": {"extensions": {"io.modelcontextprotocol/tasks": {}}}}


def request(path: str, body: Any, **headers: str) -> bytes:
    data = msgspec.json.encode(body)
    fields = {
        "Host": "127.0.0.1:80",  # the official SDK wants a port in it
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        "Content-Length": str(len(data)),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data


def call(meta: Any, name: str = "price") -> dict[str, Any]:
    params = {"name": name, "arguments": {"sku": "tea"}, **({"_meta": meta} if meta else {})}
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}


def plain(id: int) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "method": "price", "params": {"sku": "tea"}}


NEW = request("/mcp", call(MODERN), MCP_Protocol_Version="2026-07-28", Mcp_Method="tools/call", Mcp_Name="price")
OLD = request("/mcp", call(None), MCP_Protocol_Version="2025-06-18")
RENDER = request(
    "/mcp", call(TASKS, "render"), MCP_Protocol_Version="2026-07-28", Mcp_Method="tools/call", Mcp_Name="render"
)
SINGLE = request("/rpc", plain(1))

# The same call with a token, which the server verifies once. Its keys go to the child by a variable.
ISSUER, RESOURCE = AuthorizationServer(), "https://api.example.com/mcp"
TOKEN = ISSUER.token("alice", resource=RESOURCE, scopes="prices:read", lifetime=86_400)
KEYS = msgspec.json.encode(ISSUER.jwks).decode()
WITH_TOKEN = request(
    "/mcp",
    call(MODERN),
    MCP_Protocol_Version="2026-07-28",
    Mcp_Method="tools/call",
    Mcp_Name="price",
    Authorization=f"Bearer {TOKEN}",
)
MANY = request("/rpc", [plain(id) for id in range(BATCH)])

# What is measured: the server, the request, how many calls are in it, and what every answer must contain. The request of
# `tasks/get` is made when the server has a task.
ROWS = {
    "bare, tools/call": ("bare", NEW, 1, b'"structuredContent":3'),
    "wirecall 2026-07-28": ("ours", NEW, 1, b'"structuredContent":3'),
    "wirecall tasks/get": ("ours", b"", 1, b'"resultType":"complete"'),
    "wirecall 2026-07-28, with a token": ("guarded", WITH_TOKEN, 1, b'"structuredContent":3'),
    "official SDK 2026-07-28": ("official", NEW, 1, b'"text":"3"'),
    "wirecall 2025-06-18": ("ours", OLD, 1, b'"structuredContent":{"result":3}'),
    "official SDK 2025-06-18": ("official", OLD, 1, b'"text":"3"'),
    "FastMCP 2025-06-18": ("fastmcp", OLD, 1, b'"text":"3"'),
    "wirecall /rpc, one call": ("ours", SINGLE, 1, b'"result":3'),
    f"wirecall /rpc, batch of {BATCH}": ("ours", MANY, BATCH, b'"result":3'),
}


async def task_request(port: int) -> bytes:
    """A `tasks/get` for a new task of the server, which is over soon."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(RENDER)
    id = (await reader.readuntil(b'","status"')).rpartition(b'"taskId":"')[2].removesuffix(b'","status"').decode()
    writer.close()
    body = {"jsonrpc": "2.0", "id": 1, "method": "tasks/get", "params": {"taskId": id, "_meta": TASKS}}
    return request("/mcp", body, MCP_Protocol_Version="2026-07-28", Mcp_Method="tasks/get", Mcp_Name=id)


class Connection(asyncio.Protocol):
    """Sends the same request again and again, the next when the answer to the last is complete."""

    def __init__(self, request: bytes, wanted: bytes) -> None:
        self.done = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request, self._wanted = request, wanted
        self._buffer = b""
        self._length = 0
        self._stop = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._request)

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
        self._buffer, self._length = b"", 0
        if self._stop:
            self._transport.close()
        else:
            self._transport.write(self._request)

    def _whole(self) -> int:
        """The length of head and body, once the head is here."""
        head, found, _ = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return 0
        lower = head.lower()
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
        await loop.create_connection(lambda: Connection(request, wanted), "127.0.0.1", port) for _ in range(CONNECTIONS)
    ]
    connections = [connection for _, connection in pairs]
    before, started = sum(c.done for c in connections), time.perf_counter()
    await asyncio.wait([c.ended for c in connections], timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    found = (sum(c.done for c in connections) - before) / (time.perf_counter() - started)
    for connection in connections:
        connection.stop()
    await asyncio.wait_for(asyncio.gather(*(c.ended for c in connections)), 30)
    return found


def spent(pid: int) -> float:
    """The processor time of a process in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(servers: dict[str, tuple[int, int]]) -> tuple[dict[str, float], dict[str, float]]:
    """The best rate of every row, and the least processor time of the server for one call, in microseconds."""
    rates, costs = dict.fromkeys(ROWS, 0.0), dict.fromkeys(ROWS, float("inf"))
    get = await task_request(servers["ours"][0])
    for number in range(ROUNDS + 1):
        for name, (server, data, calls, wanted) in ROWS.items():
            port, pid = servers[server]
            before, started = spent(pid), time.perf_counter()
            measured = calls * await rate(port, data or get, wanted, SECONDS if number else SECONDS / 4)
            if number:
                done = measured * (time.perf_counter() - started)
                rates[name] = max(rates[name], measured)
                costs[name] = min(costs[name], 1e6 * (spent(pid) - before) / done)
    return rates, costs


def started() -> tuple[dict[str, float], dict[str, float]]:
    """One life of all servers."""
    children = {
        name: subprocess.Popen(
            [sys.executable, "-P", str(SERVERS), name],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "BENCH_ISSUER": ISSUER.issuer, "BENCH_RESOURCE": RESOURCE, "BENCH_KEYS": KEYS},
        )
        for name in dict.fromkeys(server for server, *_ in ROWS.values())
    }
    try:
        ports = {name: (int((child.stdout or sys.stdin).readline()), child.pid) for name, child in children.items()}
        return asyncio.run(measure(ports))
    finally:
        for child in children.values():
            child.terminate()
            child.wait(10)


def main() -> int:
    lives = [started() for _ in range(STARTS)]
    found = {name: max(rates[name] for rates, _ in lives) for name in ROWS}
    costs = {name: min(costs[name] for _, costs in lives) for name in ROWS}
    print("calls a second, 16 connections; microseconds of the server's processor time for one")
    for name, value in found.items():
        print(f"  {name:32} {value:9,.0f} {costs[name]:9.1f}")
    new, batch = found["wirecall 2026-07-28"], found[f"wirecall /rpc, batch of {BATCH}"]
    bare, official, one = found["bare, tools/call"], found["official SDK 2026-07-28"], found["wirecall /rpc, one call"]
    targets = [
        Target("tools/call at 2026-07-28, times a bare ASGI application", "calls/s", new, ">=", 0.6, bare=bare),
        Target("tools/call at 2026-07-28, times the official SDK", "calls/s", new, ">=", 5, peer=official),
        Target(
            "tools/call with a verified token, times the same without",
            "calls/s",
            found["wirecall 2026-07-28, with a token"],
            ">=",
            0.9,
            own=new,
        ),
        Target("tasks/get, times tools/call of a query", "calls/s", found["wirecall tasks/get"], ">=", 0.5, own=new),
        Target(f"calls in batches of {BATCH} on /rpc, times single ones", "calls/s", batch, ">=", 10, own=one),
    ]
    return report("http", targets, found)


if __name__ == "__main__":
    sys.exit(main())
