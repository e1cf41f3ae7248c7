"""The gateway beside a bare relay, and beside FastMCP's proxy and mcp-proxy, in one run.

    make bench            or   python bench/gateway.py [--quick]
    without the other projects, or some rows only:   --alone, --only "HTTP to stdio"

A bare relay passes bodies on and parses nothing (bench/servers/relay.py). Every server runs as its
users run it: the shop by `wirecall serve`, the gateway by `wirecall gateway run`, the bare relays
by granian with uvloop. One request is in flight, unless a row says otherwise. The rows take turns,
and the best round counts, of several lives of all servers. Processor time is that of the relay and
its threads, without the shop.
"""

import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import psutil  # type: ignore[import-untyped]

from load import NUMBER, free_port, numbers, rate, wait_for
from targets import Target, report

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.environments import environment  # noqa: E402  # the environments of the tests

QUICK = "--quick" in sys.argv
ALONE = "--alone" in sys.argv
ONLY = sys.argv[sys.argv.index("--only") + 1] if "--only" in sys.argv else ""
LIVES = 1 if QUICK else 3
ROUNDS = 8 if QUICK else 25
CALLS = 40  # in each round of a row, one after another
STARTS = 4 if QUICK else 10
SECONDS = 0.4 if QUICK else 0.8  # of a round with several connections
PATIENCE = 60.0

MCP_PROXY = ["mcp-proxy==0.13.0", "mcp==1.30.0"]
NEW = "2026-07-28"
OLD = "2025-06-18"
META = {
    "io.modelcontextprotocol/protocolVersion": NEW,
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": {"name": "bench", "version": "1"},
}
PYTHON = [sys.executable, "-P", "-m"]
# The shop on stdio.
CHILD = [*PYTHON, "wirecall", "serve", "--stdio", "bench/servers/relay.py:shop"]
UPSTREAMS = 10  # whose lists are merged
TOOLS = 10  # of each of them
BARE = [*PYTHON, "granian", "--loop", "uvloop", "--no-ws", "--log-level", "critical"]
BARE += ["--interface", "rsgi", "--host", "127.0.0.1"]


# --- messages -------------------------------------------------------------------------------------


def message(method: str, params: dict[str, Any], revision: str) -> bytes:
    """Return a request of MCP, in the form that the bare relays know."""
    if revision == NEW:
        params = {**params, "_meta": META}
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    return msgspec.json.encode(body)


def post(path: str, method: str, params: dict[str, Any], revision: str = NEW) -> bytes:
    """Return a request over HTTP."""
    body = message(method, params, revision)
    fields = {
        "Host": "127.0.0.1:80",
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        "Content-Length": str(len(body)),
        "MCP-Protocol-Version": revision,
    }
    if revision == NEW:
        fields["Mcp-Method"] = method
        if "name" in params:
            fields["Mcp-Name"] = params["name"]
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def call(path: str, tool: str, revision: str = NEW) -> bytes:
    sku = NUMBER.decode() if tool == "buy" else "0123456789abcdef"
    return post(path, "tools/call", {"name": tool, "arguments": {"sku": sku}}, revision)


class Line:
    """A connection with one request in flight."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), PATIENCE)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, data: bytes) -> bytes:
        if NUMBER in data:
            data = data.replace(NUMBER, b"%016d" % next(numbers))
        self._socket.sendall(data)
        found = b""
        while True:
            more = self._socket.recv(1 << 20)
            if not more:
                raise RuntimeError(f"the connection ended after {found!r}")
            found += more
            if is_whole(found):
                return found

    def close(self) -> None:
        self._socket.close()


def is_whole(found: bytes) -> bool:
    """Return whether an answer over HTTP is complete."""
    head, end, body = found.partition(b"\r\n\r\n")
    if not end:
        return False
    _, named, rest = head.lower().partition(b"content-length:")
    if not named:
        return body.endswith(b"0\r\n\r\n")
    return len(body) >= int(rest.split(b"\r\n", 1)[0])


# --- servers --------------------------------------------------------------------------------------


def settings(upstreams: Mapping[str, Mapping[str, Any]]) -> str:
    """Return `wirecall.toml` for a gateway."""
    lines = ["[gateway]", 'ledger = "sqlite:gateway.db"']
    for name, options in upstreams.items():
        lines.append(f"[upstream.{name}]")
        for option, value in options.items():
            if option == "env":
                value = ", ".join(f'{key} = "{text}"' for key, text in value.items())
                lines.append(f"env = {{ {value} }}")
            else:
                lines.append(f"{option} = {msgspec.json.encode(value).decode()}")
    return "\n".join(lines) + "\n"


class Servers:
    """Processes that serve on a port each."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.pids: dict[str, int] = {}
        self.ports: dict[str, int] = {}
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self, name: str, command: Callable[[int], list[str]], cwd: Path = ROOT, **env: str
    ) -> int:
        port = self.ports[name] = free_port()
        path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
        child = subprocess.Popen(
            command(port),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": path, "BENCH_CHILD": json.dumps(CHILD), **env},
        )
        self._children[name] = child
        self.pids[name] = child.pid
        self._stack.callback(self._end, child)
        return port

    def wait(self) -> None:
        for name, child in self._children.items():
            wait_for(self.ports[name], child)

    @staticmethod
    def _end(child: "subprocess.Popen[bytes]") -> None:
        child.terminate()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def serve(app: str) -> Callable[[int], list[str]]:
    return lambda port: [
        *PYTHON,
        "wirecall",
        "serve",
        f"bench/servers/relay.py:{app}",
        "--http",
        f"127.0.0.1:{port}",
    ]


def gateway(port: int) -> list[str]:
    return [*PYTHON, "wirecall", "gateway", "run", "--http", f"127.0.0.1:{port}"]


def bare(app: str) -> Callable[[int], list[str]]:
    return lambda port: [*BARE, "--port", str(port), f"bench.servers.relay:{app}"]


def start_all(servers: Servers, folder: Path, peers: set[str]) -> None:
    """Start the shop, the relays in front of it, and the gateway."""
    shop = servers.start("shop", serve("shop"))
    servers.start("recorded", serve("recorded"), BENCH_LEDGER=f"sqlite:{folder}/own.db")
    servers.start("whole", serve("shelf"), BENCH_SHELF=f"0-{TOOLS * UPSTREAMS}")
    url = f"http://127.0.0.1:{shop}/mcp"
    servers.start("bare to HTTP", bare("to_http"), UPSTREAM=url)
    servers.start("bare to stdio", bare("to_stdio"))
    for name in ("calls", "lists"):
        (folder / name).mkdir()
    child = {"command": CHILD, "cwd": str(ROOT)}
    (folder / "calls" / "wirecall.toml").write_text(
        settings(
            {
                "web": {"url": url},
                "child": child,
                "new": {**child, "revision": NEW},
                "old": {**child, "revision": "2025-11-25"},
            }
        )
    )
    servers.start("gateway", gateway, cwd=folder / "calls")
    shelf = {"command": [*CHILD[:-1], "bench/servers/relay.py:shelf"], "cwd": str(ROOT)}
    (folder / "lists" / "wirecall.toml").write_text(
        settings(
            {
                f"part{nth}": {
                    **shelf,
                    "env": {"BENCH_SHELF": f"{TOOLS * nth}-{TOOLS * nth + TOOLS}"},
                }
                for nth in range(UPSTREAMS)
            }
        )
    )
    servers.start("merged", gateway, cwd=folder / "lists")
    if "FastMCP" in peers:
        own = [*PYTHON, "bench.servers.relay", "fastmcp"]
        servers.start("FastMCP to HTTP", lambda port: [*own, str(port)], UPSTREAM=url)
        servers.start("FastMCP to stdio", lambda port: [*own, str(port)])
    if "mcp-proxy" in peers:
        program = environment("mcp_proxy", MCP_PROXY).with_name("mcp-proxy")
        options = ["--stateless", "--pass-environment", "--log-level", "ERROR"]
        servers.start(
            "mcp-proxy to stdio",
            lambda port: [str(program), "--port", str(port), *options, "--", *CHILD],
        )
    servers.wait()


# --- rows -----------------------------------------------------------------------------------------

# The name of a row: the server, the request, and what each answer contains.
PRICE = b'"text":"16"'
ROWS: dict[str, tuple[str, bytes, bytes]] = {
    "direct to HTTP": ("shop", call("/mcp", "price"), PRICE),
    "bare relay, HTTP to HTTP": ("bare to HTTP", call("/mcp", "price"), PRICE),
    "gateway, HTTP to HTTP": ("gateway", call("/mcp/web", "price"), PRICE),
    "bare relay, HTTP to stdio": ("bare to stdio", call("/mcp", "price"), PRICE),
    "gateway, HTTP to stdio": ("gateway", call("/mcp/child", "price"), PRICE),
    "gateway, /mcp to stdio": ("gateway", call("/mcp", "child__price"), PRICE),
    "gateway, new client and new server": ("gateway", call("/mcp/new", "price"), PRICE),
    "gateway, new client and old server": ("gateway", call("/mcp/old", "price"), PRICE),
    "gateway, old client and new server": ("gateway", call("/mcp/new", "price", OLD), PRICE),
    "gateway, old client and old server": ("gateway", call("/mcp/old", "price", OLD), PRICE),
    "gateway, recorded command": ("gateway", call("/mcp/web", "buy"), PRICE),
    "own query": ("recorded", call("/mcp", "price"), PRICE),
    "own recorded command": ("recorded", call("/mcp", "buy"), PRICE),
    "own list": ("whole", post("/mcp", "tools/list", {}), b'"price_99"'),
    "merged list": ("merged", post("/mcp", "tools/list", {}), b'"price_99"'),
    "FastMCP's proxy, HTTP to HTTP": ("FastMCP to HTTP", call("/mcp", "price", OLD), PRICE),
    "FastMCP's proxy, HTTP to stdio": ("FastMCP to stdio", call("/mcp", "price", OLD), PRICE),
    "mcp-proxy, HTTP to stdio": ("mcp-proxy to stdio", call("/mcp", "price", OLD), PRICE),
}
# Rows with so many connections at once. The query of our own server shows what the front takes.
LOADED = (
    "own query",
    "bare relay, HTTP to HTTP",
    "gateway, HTTP to HTTP",
    "bare relay, HTTP to stdio",
    "gateway, HTTP to stdio",
)


def spent(pid: int) -> float:
    """The processor time of a relay in seconds: its threads, and the worker of granian's command."""
    found = 0.0
    process = psutil.Process(pid)
    for one in (process, *process.children()):
        if one.pid != pid and "wirecall" in one.cmdline():
            continue  # the shop, as a child of its relay
        for file in Path(f"/proc/{one.pid}/task").glob("*/schedstat"):
            found += int(file.read_text().split()[0]) / 1e9
    return found


class Figures:
    """The best of all rounds: microseconds of a request, its processor time, requests a second."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}
        self.costs: dict[str, float] = {}
        self.rates: dict[str, float] = {}

    def note(self, name: str, took: float, cost: float) -> None:
        self.times[name] = min(took, self.times.get(name, took))
        self.costs[name] = min(cost, self.costs.get(name, cost))


def one_life(figures: Figures, peers: set[str]) -> None:
    """Start all servers, and measure each row."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = Servers(stack)
        start_all(servers, folder, peers)
        rows = {name: row for name, row in ROWS.items() if row[0] in servers.ports and ONLY in name}
        lines = {name: Line(servers.ports[row[0]]) for name, row in rows.items()}
        for name, (_, data, wanted) in rows.items():
            warm_up(lines[name], name, data, wanted)
        for number in range(ROUNDS):
            for name, (server, data, _) in rows.items():
                is_peer = not name.startswith(("gateway", "bare", "own", "direct", "merged"))
                if is_peer and number % 5:
                    continue  # slow, and the best round hardly differs
                figures.note(name, *measured(lines[name], data, servers.pids[server], is_peer))
        for line in lines.values():
            line.close()
        for _ in range(max(2, ROUNDS // 8)):
            for name in LOADED:
                if name in rows:
                    server, data, wanted = rows[name]
                    found = asyncio.run(rate(servers.ports[server], data, wanted, SECONDS))
                    figures.rates[name] = max(found, figures.rates.get(name, 0.0))


def warm_up(line: Line, name: str, data: bytes, wanted: bytes) -> None:
    """Ask until the answer is right: some servers start their children with the first request."""
    deadline = time.monotonic() + PATIENCE
    while wanted not in (found := line.ask(data)):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{name}: expected {wanted!r}, got {found!r}")
        time.sleep(0.2)
    for _ in range(3):
        line.ask(data)


def measured(line: Line, data: bytes, pid: int, is_peer: bool) -> tuple[float, float]:
    """The median time of a request, and its processor time, in microseconds."""
    number = CALLS // 8 if is_peer else CALLS
    took = []
    before = spent(pid)
    for _ in range(number):
        began = time.perf_counter()
        line.ask(data)
        took.append(time.perf_counter() - began)
    return 1e6 * statistics.median(took), 1e6 * (spent(pid) - before) / number


# --- wrap -----------------------------------------------------------------------------------------


class Piped:
    """A server on stdin and stdout."""

    def __init__(self, command: list[str]) -> None:
        began = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd=ROOT,
        )
        client = {"name": "bench", "version": "1"}
        hello = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client}
        self.ask(message("initialize", hello, OLD))
        self.first = time.perf_counter() - began
        self._write(b'{"jsonrpc":"2.0","method":"notifications/initialized"}')

    def _write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + b"\n")

    def ask(self, line: bytes) -> bytes:
        self._write(line)
        assert self._process.stdout is not None
        found = b""
        while not found.endswith(b"\n"):
            more = self._process.stdout.read(65536)
            if not more:
                raise RuntimeError(f"the server ended after {found!r}")
            found += more
        return found

    def time(self) -> float:
        """The median time of a query in microseconds."""
        line = message("tools/call", {"name": "price", "arguments": {"sku": "tea"}}, OLD)
        took = []
        for _ in range(CALLS):
            began = time.perf_counter()
            found = self.ask(line)
            took.append(time.perf_counter() - began)
            assert b'"text":"3"' in found, found
        return 1e6 * statistics.median(took)

    def memory(self) -> float:
        """The megabytes that it holds for itself, without the server that it wraps."""
        process = psutil.Process(self._process.pid)
        own = [process] + [
            child for child in process.children() if "--stdio" not in child.cmdline()
        ]
        return sum(float(one.memory_full_info().uss) for one in own) / (1 << 20)

    def end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


@contextlib.contextmanager
def piped(command: list[str]) -> Iterator[Piped]:
    server = Piped(command)
    try:
        yield server
    finally:
        server.end()


def measure_wrap() -> dict[str, float]:
    """The best figures of a server on stdio: direct, and behind `wrap`."""
    best: dict[str, float] = {}

    def note(name: str, value: float) -> None:
        best[name] = min(value, best.get(name, value))

    with tempfile.TemporaryDirectory() as folder:
        ledger = f"sqlite:{folder}/wrap.db"
        wrap = [*PYTHON, "wirecall", "wrap", "--ledger", ledger, "--", *CHILD]
        told = ["env", f"PYTHONPATH={ROOT}", f"BENCH_CHILD={json.dumps(CHILD)}"]
        bare = [*told, *PYTHON, "bench.servers.relay", "pipe"]
        ways = {"direct": CHILD, "wrap": wrap}
        for _ in range(STARTS):
            for name, command in ways.items():
                with piped(command) as server:
                    note(f"{name}, first answer, ms", 1e3 * server.first)
                    server.time()
                    note(f"{name}, memory, MB", server.memory())
        for _ in range(LIVES):
            with piped(CHILD) as direct, piped(wrap) as wrapped, piped(bare) as relayed:
                for _ in range(ROUNDS + 1):
                    note("direct, query, µs", direct.time())
                    note("bare relay on a pipe, query, µs", relayed.time())
                    note("wrap, query, µs", wrapped.time())
    return best


# --- all of it ------------------------------------------------------------------------------------


def known_peers() -> set[str]:
    """The other projects that can be installed here."""
    if ALONE:
        return set()
    found = {"FastMCP"}
    try:
        environment("mcp_proxy", MCP_PROXY)
        found.add("mcp-proxy")
    except subprocess.SubprocessError as error:
        print(f"  without mcp-proxy, which could not be installed: {error}")
    return found


def main() -> int:
    peers = known_peers()
    figures = Figures()
    for _ in range(LIVES):
        one_life(figures, peers)
    wrap = {} if ONLY else measure_wrap()
    print("one request in flight: µs, and µs of the relay's processor time")
    for name, took in figures.times.items():
        print(f"  {name:40} {took:9.0f} {figures.costs[name]:9.0f}")
    print("16 connections: requests a second")
    for name, found in figures.rates.items():
        print(f"  {name:40} {found:9,.0f}")
    for name, found in wrap.items():
        print(f"  {name:40} {found:9.1f}")
    if ONLY:
        return 0
    kept = {f"{name}, µs": value for name, value in figures.times.items()}
    kept |= {f"{name}, processor µs": value for name, value in figures.costs.items()}
    kept |= {f"{name}, requests/s": value for name, value in figures.rates.items()}
    return report("gateway", targets(figures, wrap), {**kept, **wrap})


def targets(figures: Figures, wrap: dict[str, float]) -> list[Target]:
    times = figures.times
    costs = figures.costs
    rates = figures.rates
    found = []
    for way in ("HTTP to HTTP", "HTTP to stdio"):
        one = f"gateway, {way}"
        other = f"bare relay, {way}"
        peer = times.get(f"FastMCP's proxy, {way}")
        text = f"query, {way}, times a bare relay"
        found.append(Target(text, "µs", times[one], "<=", 1.35, bare=times[other], peer=peer))
        text = f"the same, processor time of the relay, {way}"
        found.append(Target(text, "µs", costs[one], "<=", 1.35, bare=costs[other]))
        text = f"16 connections, {way}, times a bare relay"
        found.append(Target(text, "calls/s", rates[one], ">=", 0.75, bare=rates[other]))
    added = times["own recorded command"] - times["own query"]
    parts = times["gateway, HTTP to HTTP"] + added
    crossed = times["gateway, new client and old server"]
    crossed += times["gateway, old client and new server"]
    same = times["gateway, new client and new server"]
    same += times["gateway, old client and old server"]
    return [
        *found,
        Target(
            "query through wrap, times direct stdio",
            "µs",
            wrap["wrap, query, µs"],
            "<=",
            2.5,
            own=wrap["direct, query, µs"],
        ),
        Target(
            "first answer through wrap, times serve --stdio",
            "ms",
            wrap["wrap, first answer, ms"],
            "<=",
            2.0,
            own=wrap["direct, first answer, ms"],
        ),
        Target(
            "memory of wrap, times serve --stdio",
            "MB",
            wrap["wrap, memory, MB"],
            "<=",
            2.0,
            own=wrap["direct, memory, MB"],
        ),
        Target(
            "recorded command on SQLite, times the sum of its parts",
            "µs",
            times["gateway, recorded command"],
            "<=",
            1.2,
            own=parts,
        ),
        Target(
            f"merged list of {UPSTREAMS} upstreams, times our own of {UPSTREAMS * TOOLS} tools",
            "µs",
            times["merged list"],
            "<=",
            1.5,
            own=times["own list"],
        ),
        Target(
            "translation between eras, times the same pairs without it",
            "µs",
            crossed,
            "<=",
            1.10,
            own=same,
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
