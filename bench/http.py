"""Tool calls and batches over HTTP, beside bare applications and other libraries, in one run.

    make bench            or   python bench/http.py [--quick]
    an hour of clients that connect and leave:   python bench/http.py --churn 60

Every server runs as its users run it: ours by `wirecall serve`, the bare ones by granian's command
with uvloop, the others by their own `run`. 16 connections from this process each send one request
after another, with as little work as possible on this side. Servers take turns within a round, and
the best round counts. They are restarted several times: the memory layout of a process makes a
difference of up to a third for its lifetime.

A command without a key should cost what one with a key costs. They are compared by the server's
processor time, in pairs of short bursts whose order changes, and the median of all pairs counts: a
busy neighbour slows both of a pair.
"""

import asyncio
import contextlib
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from load import CONNECTIONS, NUMBER, family, free_port, rate, spent, wait_for
from targets import Target, report
from wirecall.testing.auth import AuthorizationServer

QUICK = "--quick" in sys.argv
STARTS = 2 if QUICK else 5
ROUNDS = 1 if QUICK else 2
SECONDS = 0.4 if QUICK else 0.6
BATCH = 50
PAIRS = 10  # pairs of bursts, in each life of the servers, for requests that should cost the same
ROOT = Path(__file__).parent.parent
STREAMS = 500  # streams that stay open while memory is measured


def commands(port: int) -> dict[str, list[str]]:
    """The command that starts each server on a port."""
    python = [sys.executable, "-P", "-m"]
    bare = [
        *python,
        "granian",
        "--loop",
        "uvloop",
        "--no-ws",
        "--log-level",
        "critical",
        "--host",
        "127.0.0.1",
    ]
    served = [*python, "wirecall", "serve", "--http", f"127.0.0.1:{port}"]
    return {
        "bare ASGI": [
            *bare,
            "--port",
            str(port),
            "--interface",
            "asginl",
            "bench.servers.prices:bare_asgi",
        ],
        "bare RSGI": [
            *bare,
            "--port",
            str(port),
            "--interface",
            "rsgi",
            "bench.servers.prices:bare_rsgi",
        ],
        "bare WebSocket": [
            *[word for word in bare if word != "--no-ws"],
            "--port",
            str(port),
            "--interface",
            "rsgi",
            "bench.servers.prices:bare_socket",
        ],
        "ours": [*served, "bench/servers/prices.py:ours"],
        "guarded": [*served, "bench/servers/prices.py:guarded"],
        "official": [*python, "bench.servers.prices", "official", str(port)],
        "fastmcp": [*python, "bench.servers.prices", "fastmcp", str(port)],
    }


MODERN = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": {"name": "bench", "version": "1"},
}

TASKS = {
    **MODERN,
    "io.modelcontextprotocol/clientCapabilities": {
        "extensions": {"io.modelcontextprotocol/tasks": {}}
    },
}


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


def call(meta: Any, name: str = "price", sku: str = "tea") -> dict[str, Any]:
    params = {"name": name, "arguments": {"sku": sku}, **({"_meta": meta} if meta else {})}
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}


def plain(id: int) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "method": "price", "params": {"sku": "tea"}}


NEW = request(
    "/mcp",
    call(MODERN),
    MCP_Protocol_Version="2026-07-28",
    Mcp_Method="tools/call",
    Mcp_Name="price",
)
OLD = request("/mcp", call(None), MCP_Protocol_Version="2025-06-18")
RENDER = request(
    "/mcp",
    call(TASKS, "render"),
    MCP_Protocol_Version="2026-07-28",
    Mcp_Method="tools/call",
    Mcp_Name="render",
)
SINGLE = request("/rpc", plain(1))
FOLLOW = request(
    "/mcp",
    call({**MODERN, "progressToken": 1}, "follow"),
    MCP_Protocol_Version="2026-07-28",
    Mcp_Method="tools/call",
    Mcp_Name="follow",
)

# The same call with a token, which the server verifies once. The child gets its keys in a variable.
ISSUER = AuthorizationServer()
RESOURCE = "https://api.example.com/mcp"
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
STREAMED = request("/rpc", [plain(id) for id in range(BATCH)], Accept="application/jsonl")


def order(meta: dict[str, Any], sku: str) -> bytes:
    """A command of a known caller."""
    versioned = {
        "MCP_Protocol_Version": "2026-07-28",
        "Mcp_Method": "tools/call",
        "Mcp_Name": "buy",
    }
    return request(
        "/mcp", call({**MODERN, **meta}, "buy", sku), **versioned, Authorization=f"Bearer {TOKEN}"
    )


# Both have another number each time, so that neither repeats an earlier command.
KEYED = order({"io.wirecall/idempotency-key": NUMBER.decode()}, "tea-and-biscuits")
KEYLESS = order({}, NUMBER.decode())

# The rows: the server, the request, how many calls are in it, and what every answer must contain.
# The request of `tasks/get` is made when the server has a task.
ROWS = {
    "bare ASGI": ("bare ASGI", NEW, 1, b'"structuredContent":3'),
    "bare RSGI": ("bare RSGI", NEW, 1, b'"structuredContent":3'),
    "wirecall 2026-07-28": ("ours", NEW, 1, b'"structuredContent":3'),
    "wirecall with a progress event": ("ours", FOLLOW, 1, b'"structuredContent":3'),
    "wirecall tasks/get": ("ours", b"", 1, b'"resultType":"complete"'),
    "wirecall 2026-07-28, with a token": ("guarded", WITH_TOKEN, 1, b'"structuredContent":3'),
    "official SDK 2026-07-28": ("official", NEW, 1, b'"text":"3"'),
    "wirecall 2025-06-18": ("ours", OLD, 1, b'"structuredContent":{"result":3}'),
    "official SDK 2025-06-18": ("official", OLD, 1, b'"text":"3"'),
    "FastMCP 2025-06-18": ("fastmcp", OLD, 1, b'"text":"3"'),
    "wirecall /rpc, one call": ("ours", SINGLE, 1, b'"result":3'),
    f"wirecall /rpc, batch of {BATCH}": ("ours", MANY, BATCH, b'"result":3'),
    f"wirecall /rpc, stream of {BATCH}": ("ours", STREAMED, BATCH, b'"method":"rpc.end"'),
    "wirecall command with a key": ("guarded", KEYED, 1, b'"structuredContent":16'),
    "wirecall command without a key": ("guarded", KEYLESS, 1, b'"structuredContent":16'),
}


async def task_request(port: int) -> bytes:
    """A `tasks/get` for a new task of the server, which is over soon."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(RENDER)
    id = (
        (await reader.readuntil(b'","status"'))
        .rpartition(b'"taskId":"')[2]
        .removesuffix(b'","status"')
        .decode()
    )
    writer.close()
    body = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tasks/get",
        "params": {"taskId": id, "_meta": TASKS},
    }
    return request(
        "/mcp", body, MCP_Protocol_Version="2026-07-28", Mcp_Method="tasks/get", Mcp_Name=id
    )


async def times(port: int, pid: int, plain: bytes, other: bytes, wanted: bytes) -> list[float]:
    """How many times the processor time of a plain request another one takes, for every pair of
    bursts.
    """
    found = []
    for number in range(PAIRS):
        took: dict[bytes, float] = {}
        for data in (plain, other) if number % 2 else (other, plain):
            before = spent(pid)
            started = time.perf_counter()
            done = await rate(port, data, wanted, SECONDS / 2) * (time.perf_counter() - started)
            took[data] = (spent(pid) - before) / done
        found.append(took[other] / took[plain])
    return found


async def delays(port: int, data: bytes, calls: float) -> tuple[float, float]:
    """The median and the 99th percentile of the time to an answer, in milliseconds, at `calls` a
    second.
    """
    found: list[float] = []
    pause = CONNECTIONS / calls

    async def one(nth: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        due = time.perf_counter() + pause * nth / CONNECTIONS
        until = due + 3 * SECONDS
        while due < until:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            began = time.perf_counter()
            writer.write(data)
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(
                int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            )
            found.append(time.perf_counter() - began)
            due += pause
        writer.close()

    await asyncio.gather(*(one(nth) for nth in range(CONNECTIONS)))
    found.sort()
    return 1e3 * found[len(found) // 2], 1e3 * found[len(found) * 99 // 100]


async def trips(port: int) -> tuple[float, float]:
    """The best median of a round trip in microseconds: over HTTP, and over a WebSocket."""
    http = await asyncio.open_connection("127.0.0.1", port)
    web = await asyncio.open_connection("127.0.0.1", port)
    web[1].write(
        b"GET /rpc HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    await web[0].readuntil(b"\r\n\r\n")
    data = msgspec.json.encode(plain(1))
    # A frame of text whose mask is 0, so its bytes are those of the message.
    frame = bytes([0x81, 0x80 | len(data)]) + bytes(4) + data

    async def by_http() -> None:
        http[1].write(SINGLE)
        head = await http[0].readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0]
        await http[0].readexactly(int(length))

    async def by_frame() -> None:
        web[1].write(frame)
        _, size = await web[0].readexactly(2)
        await web[0].readexactly(size)

    found: dict[str, list[float]] = {"http": [], "web": []}
    for _ in range(4 if QUICK else 10):
        for name, send in (("http", by_http), ("web", by_frame)):
            took = []
            for _ in range(300):
                began = time.perf_counter()
                await send()
                took.append(time.perf_counter() - began)
            found[name].append(1e6 * statistics.median(took))
    http[1].close()
    web[1].close()
    return min(found["http"]), min(found["web"])


def held(pid: int) -> int:
    """The kilobytes of memory that a server does not share."""
    text = "".join(Path(f"/proc/{one}/smaps_rollup").read_text() for one in family(pid))
    return sum(
        int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_Dirty:")
    )


async def stream(port: int) -> asyncio.StreamWriter:
    """A connection with the standing stream of a new session."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    hello = {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "bench", "version": "1"},
    }
    writer.write(
        request("/mcp", {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello})
    )
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(
        int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
    )
    start = head.lower().index(b"mcp-session-id: ") + 16
    session = head[start:].split(b"\r\n", 1)[0].decode()
    more = (
        "GET /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n"
        f"Mcp-Session-Id: {session}\r\n\r\n"
    )
    writer.write(more.encode())
    await reader.readuntil(b": keep-alive\n\n")
    return writer


async def memory(port: int, pid: int) -> float:
    """The kilobytes that a session with an open stream takes."""
    early = [await stream(port) for _ in range(50)]
    before = held(pid)
    late = [await stream(port) for _ in range(STREAMS)]
    grown = held(pid) - before
    for writer in early + late:
        writer.close()
    return grown / STREAMS


async def churn(port: int, pid: int, minutes: float) -> float:
    """A server's memory in the last quarter divided by that in the second, as clients connect and
    leave.
    """
    found: list[int] = []

    async def visit() -> None:
        """One client: it opens a stream, or calls, and every third caller leaves before its answer."""
        kind = random.randrange(4)
        if kind == 0:
            (await stream(port)).close()
            return
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write((NEW, OLD, FOLLOW)[kind - 1])
        if random.randrange(3):
            await reader.readuntil(b"structuredContent")
        writer.close()

    began = time.perf_counter()
    visits = 0
    while (passed := time.perf_counter() - began) < 60 * minutes:
        await asyncio.gather(*(visit() for _ in range(8)))
        visits += 8
        await asyncio.sleep(0.05)  # do not saturate the machine: this measures memory
        if passed >= len(found) * 0.6 * minutes:  # a hundred times
            found.append(held(pid))
    quarter = len(found) // 4
    early, late = (
        sum(part) / len(part) for part in (found[quarter : 2 * quarter], found[3 * quarter :])
    )
    print(
        f"{visits:,} clients in {minutes:g} minutes: "
        f"{early:,.0f} KB in the second quarter, {late:,.0f} KB in the last"
    )
    return late / early


async def measure(servers: dict[str, tuple[int, int]]) -> tuple[dict[str, float], dict[str, float]]:
    """The best rate of every row, and the least processor time of the server for one call, in
    microseconds.
    """
    rates = dict.fromkeys(ROWS, 0.0)
    costs = dict.fromkeys(ROWS, float("inf"))
    get = await task_request(servers["ours"][0])
    for number in range(ROUNDS + 1):
        for name, (server, data, calls, wanted) in ROWS.items():
            port, pid = servers[server]
            before = spent(pid)
            started = time.perf_counter()
            measured = calls * await rate(
                port, data or get, wanted, SECONDS if number else SECONDS / 4
            )
            if number:
                done = measured * (time.perf_counter() - started)
                rates[name] = max(rates[name], measured)
                costs[name] = min(costs[name], 1e6 * (spent(pid) - before) / done)
    return rates, costs


@contextlib.contextmanager
def serving(names: Iterable[str]) -> Iterator[dict[str, tuple[int, int]]]:
    """Servers that run in the block: the port and the process id of each."""
    keys = {"BENCH_ISSUER": ISSUER.issuer, "BENCH_RESOURCE": RESOURCE, "BENCH_KEYS": KEYS}
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    nowhere = subprocess.DEVNULL
    children: dict[str, tuple[int, subprocess.Popen[bytes]]] = {}
    try:
        for name in names:
            port = free_port()
            env = {**os.environ, **keys, "PYTHONPATH": path}
            child = subprocess.Popen(
                commands(port)[name],
                stdin=nowhere,
                stdout=nowhere,
                stderr=nowhere,
                cwd=ROOT,
                env=env,
            )
            children[name] = port, child
        for port, child in children.values():
            wait_for(port, child)
        yield {name: (port, child.pid) for name, (port, child) in children.items()}
    finally:
        for _, child in children.values():
            child.terminate()
        for _, child in children.values():
            child.wait(20)


class Life(NamedTuple):
    """The figures of one life of all servers."""

    rates: dict[str, float]
    costs: dict[str, float]
    alike: list[float]  # the cost of a command without a key, divided by that of one with a key
    # Milliseconds of calls at half load: the median, the 99th percentile.
    delays: tuple[float, float]
    memory: float  # kilobytes of a session with an open stream
    # Microseconds of a round trip: over HTTP, over a WebSocket.
    trips: tuple[float, float]
    # The same of a bare application.
    bare_trips: tuple[float, float]


def one_life() -> Life:
    names = [*dict.fromkeys(server for server, *_ in ROWS.values()), "bare WebSocket"]
    with serving(names) as servers:
        rates, costs = asyncio.run(measure(servers))
        alike = asyncio.run(times(*servers["guarded"], KEYED, KEYLESS, b'"structuredContent":16'))
        port, pid = servers["ours"]
        waits = asyncio.run(delays(port, NEW, rates["wirecall 2026-07-28"] / 2))
        stream_size = asyncio.run(memory(port, pid))
        own = asyncio.run(trips(port))
        bare = asyncio.run(trips(servers["bare WebSocket"][0]))
        return Life(rates, costs, alike, waits, stream_size, own, bare)


def main() -> int:
    if "--churn" in sys.argv:
        with serving(["ours"]) as servers:
            grown = asyncio.run(
                churn(*servers["ours"], float(sys.argv[sys.argv.index("--churn") + 1]))
            )
        target = Target(
            "memory at the end of the churn, times that of its second quarter",
            "KB",
            grown,
            "<=",
            1.02,
            own=1,
        )
        return report("churn", [target], {})
    lives = [one_life() for _ in range(STARTS)]
    found = {name: max(life.rates[name] for life in lives) for name in ROWS}
    costs = {name: min(life.costs[name] for life in lives) for name in ROWS}
    median, late = min((life.delays for life in lives), key=lambda delays: delays[1] / delays[0])
    stream_size = min(life.memory for life in lives)
    by_http = min(life.trips[0] for life in lives)
    by_socket = min(life.trips[1] for life in lives)
    print("calls a second, 16 connections; microseconds of the server's processor time for one")
    for name, value in found.items():
        print(f"  {name:32} {value:9,.0f} {costs[name]:9.1f}")
    print(
        f"at half load: p50 {median:.2f} ms, p99 {late:.2f} ms; {stream_size:.1f} KB for a stream"
    )
    bare_http = min(life.bare_trips[0] for life in lives)
    bare_socket = min(life.bare_trips[1] for life in lives)
    print(f"a round trip on /rpc: HTTP {by_http:.0f} µs, WebSocket {by_socket:.0f} µs")
    print(f"of a bare application: HTTP {bare_http:.0f} µs, WebSocket {bare_socket:.0f} µs")
    new = found["wirecall 2026-07-28"]
    one = found["wirecall /rpc, one call"]
    asgi = found["bare ASGI"]
    official = found["official SDK 2026-07-28"]
    token = found["wirecall 2026-07-28, with a token"]
    events, old, batch = (
        found[f"wirecall {name}"]
        for name in ("with a progress event", "2025-06-18", f"/rpc, batch of {BATCH}")
    )
    keyless = statistics.median(pair for life in lives for pair in life.alike)
    targets = [
        Target(
            "tools/call at 2026-07-28, times a bare ASGI application",
            "calls/s",
            new,
            ">=",
            1.0,
            bare=asgi,
        ),
        Target(
            "tools/call at 2026-07-28, times a bare RSGI application",
            "calls/s",
            new,
            ">=",
            0.65,
            bare=found["bare RSGI"],
        ),
        Target(
            "tools/call at 2026-07-28, times the official SDK",
            "calls/s",
            new,
            ">=",
            10,
            peer=official,
        ),
        Target(
            "tools/call at 2025-06-18, times the same at 2026-07-28",
            "calls/s",
            old,
            ">=",
            0.75,
            own=new,
        ),
        Target(
            "tools/call with a verified token, times the same without",
            "calls/s",
            token,
            ">=",
            0.9,
            own=new,
        ),
        Target(
            "tools/call with a progress event, times the same without",
            "calls/s",
            events,
            ">=",
            0.5,
            own=new,
        ),
        Target(
            "tasks/get, times tools/call of a query",
            "calls/s",
            found["wirecall tasks/get"],
            ">=",
            0.5,
            own=new,
        ),
        Target(
            "a command without a key, times one with a key",
            "processor time",
            keyless,
            "<=",
            1.1,
            own=1,
        ),
        Target(
            "one call on /rpc, times a bare ASGI application", "calls/s", one, ">=", 1.0, bare=asgi
        ),
        Target(
            f"calls in batches of {BATCH} on /rpc, times single ones",
            "calls/s",
            batch,
            ">=",
            10,
            own=one,
        ),
        Target(
            f"calls in streams of {BATCH} on /rpc, times those in arrays",
            "calls/s",
            found[f"wirecall /rpc, stream of {BATCH}"],
            ">=",
            0.7,
            own=batch,
        ),
        Target(
            "a round trip over a WebSocket, times one over HTTP",
            "µs",
            by_socket,
            "<=",
            0.7,
            own=by_http,
        ),
        Target(
            "a round trip over a WebSocket, times that of a bare RSGI application",
            "µs",
            by_socket,
            "<=",
            1.25,
            bare=bare_socket,
        ),
        Target("p99 at half load, times p50", "ms", late, "<=", 3, own=median),
        Target(
            "memory of an idle session with a stream, times 25 KB",
            "KB",
            stream_size,
            "<=",
            1,
            own=25,
        ),
    ]
    return report("http", targets, found)


if __name__ == "__main__":
    sys.exit(main())
