"""The price of being watched: calls without a tap, with one, and with three watchers.

    python bench/console.py [--quick]

In process, the rows take turns within a round and the median of their ratios counts, because the
machine may be busy. Over HTTP, the servers take turns too. Memory is what the calls of a full ring
leave behind in an app with a tap, less what they leave in one without; it is measured first, since
later apps use the memory that earlier ones have freed.
"""

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event, Thread

import msgspec
import psutil  # type: ignore[import-untyped]
from msgspec import Struct

from targets import Target, report
from wirecall import App
from wirecall.console.ring import SIZE
from wirecall.console.tap import Tap

IS_QUICK = "--quick" in sys.argv
ROUNDS = 15 if IS_QUICK else 61
# Many short rounds: another program that runs for a second spoils few of them.
HTTP_ROUNDS = 7 if IS_QUICK else 61
SECONDS = 0.3
CONNECTIONS = 16
# Seconds for the watchers to start.
LONGEST = 60.0

APP = """
from wirecall import App

app = App("bench", mode="production", ledger="sqlite:ledger.db")


@app.query
def add(a: int, b: int) -> int:
    return a + b
"""


def make_app(tap: Tap | None) -> App:
    app = App("bench", mode="production", ledger="memory:")

    @app.query
    def add(a: int, b: int) -> int:
        return a + b

    @app.command(destructive=False)
    async def pay(order: str, cents: int) -> int:
        return cents + len(order)

    if tap is not None:
        app.configure(tap=tap)
    return app


def message(count: int) -> bytes:
    entries = [
        {"jsonrpc": "2.0", "method": "add", "params": {"a": each, "b": 2}, "id": each}
        for each in range(count)
    ]
    return msgspec.json.encode(entries if count > 1 else entries[0])


async def seconds_of(app: App, data: bytes, times: int) -> float:
    began = time.process_time()
    for _ in range(times):
        await app.handle(data)
    # The reader of the ring runs too, as it does in a server.
    await asyncio.sleep(0)
    return time.process_time() - began


async def in_process(count: int) -> tuple[float, float, float]:
    """Return the microseconds per entry without a tap, and two ratios: off to off, on to off."""
    off = make_app(None)
    same = make_app(None)
    on = make_app(Tap())
    data = message(count)
    times = max(20, 20_000 // count)
    costs: list[float] = []
    idle: list[float] = []
    tapped: list[float] = []
    async with off, same, on:
        for app in (off, same, on):
            await seconds_of(app, data, times)
        for _ in range(ROUNDS):
            first = await seconds_of(off, data, times)
            costs.append(first / times / count * 1e6)
            idle.append(await seconds_of(same, data, times) / first)
            tapped.append(await seconds_of(on, data, times) / first)
            await asyncio.sleep(0.01)
    return min(costs), statistics.median(idle), statistics.median(tapped)


# --- memory ---------------------------------------------------------------------------------------


def query(number: int) -> bytes:
    """Return one message with one plain query."""
    params = {"a": number, "b": 2}
    return msgspec.json.encode(
        {"jsonrpc": "2.0", "method": "add", "params": params, "id": number + 1000}
    )


def command(number: int) -> bytes:
    """Return one message with one command, which has the longest row."""
    params = {"order": f"order-{number}", "cents": 5, "idempotency_key": f"order-{number}"}
    return msgspec.json.encode(
        {"jsonrpc": "2.0", "method": "pay", "params": params, "id": number + 1000}
    )


async def left_behind(tap: Tap | None, make: Callable[[int], bytes]) -> int:
    """Return the bytes that the calls of a full ring leave behind in an app."""
    async with make_app(tap) as app:
        await app.handle(make(0))
        tracemalloc.start()
        for number in range(1, SIZE + 1):
            await app.handle(make(number))
        if tap is not None:
            # The reader of the ring makes the rows of messages that wait.
            tap.totals.count()
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return taken


async def megabytes(make: Callable[[int], bytes]) -> float:
    """Return the megabytes of a full ring."""
    return (await left_behind(Tap(), make) - await left_behind(None, make)) / 1e6


# --- over HTTP ------------------------------------------------------------------------------------


class Server(Struct):
    """One server, and the work that it has done in the rounds."""

    port: int
    process: psutil.Process
    calls: float = 0.0
    # Without the processes of the watchers and of the console.
    cpu_seconds: float = 0.0
    rates: list[float] = []

    async def measure(self) -> None:
        """Take part in one round."""
        before = sum(self.process.cpu_times()[:2])
        rate = await rate_of(self.port)
        self.cpu_seconds += sum(self.process.cpu_times()[:2]) - before
        self.calls += rate * SECONDS
        self.rates.append(rate)

    @property
    def microseconds(self) -> float:
        """The time of the processor for one call."""
        return self.cpu_seconds / self.calls * 1e6


async def rate_of(port: int) -> float:
    """Return the calls per second of one server."""
    body = message(1)
    head = (
        f"POST /rpc HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    data = head.encode() + body
    ends_at = time.perf_counter() + SECONDS

    async def one() -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        done = 0
        while time.perf_counter() < ends_at:
            writer.write(data)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            done += 1
        writer.close()
        return done

    began = time.perf_counter()
    calls = sum(await asyncio.gather(*(one() for _ in range(CONNECTIONS))))
    return calls / (time.perf_counter() - began)


def serve(stack: ExitStack, folder: Path, *options: str) -> Server:
    """Start a server."""
    command = [sys.executable, "-m", "wirecall", "serve", "app.py", "--http", "127.0.0.1:0"]
    process = stack.enter_context(
        subprocess.Popen([*command, *options], cwd=folder, stderr=subprocess.PIPE)
    )
    stack.callback(process.terminate)
    assert process.stderr is not None
    while True:
        line = process.stderr.readline().decode()
        if not line:
            raise SystemExit("the server did not start")
        if "Listening on" in line:
            return Server(int(line.strip().rpartition(":")[2]), psutil.Process(process.pid))


def watch(stack: ExitStack, pid: int) -> Event:
    """Start a watcher of a server; return the event that it has shown a call."""
    command = [sys.executable, "-m", "wirecall", "watch", str(pid), "--json"]
    watcher = stack.enter_context(
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    )
    stack.callback(watcher.terminate)
    seen = Event()

    def drain() -> None:
        assert watcher.stdout is not None
        with suppress(OSError, ValueError):  # it is closed at the end
            while os.read(watcher.stdout.fileno(), 1 << 20):
                seen.set()

    Thread(target=drain, daemon=True).start()
    return seen


async def over_http() -> dict[str, float]:
    """Return the median ratios of the calls per second to those of a server without a tap.

    And what a call costs each server: other programs disturb that less.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "app.py").write_text(APP)
        plain = serve(stack, folder)
        tapped = serve(stack, folder, "--metrics", "127.0.0.1:0")
        watched = serve(stack, folder, "--metrics", "127.0.0.1:0")
        watchers = [watch(stack, watched.process.pid) for _ in range(3)]
        ends_at = time.perf_counter() + LONGEST
        while not all(seen.is_set() for seen in watchers):
            if time.perf_counter() > ends_at:
                raise SystemExit(f"the watchers showed no call within {LONGEST:.0f} s")
            await rate_of(watched.port)
        servers = [plain, tapped, watched]
        for server in servers:
            await rate_of(server.port)
        for _ in range(HTTP_ROUNDS):
            for server in servers:
                await server.measure()
            # The first of a round has no advantage.
            servers.append(servers.pop(0))

    def ratio(server: Server) -> float:
        pairs = zip(server.rates, plain.rates, strict=True)
        return statistics.median(rate / first for rate, first in pairs)

    return {
        "unwatched": ratio(tapped),
        "watched": ratio(watched),
        "plain_us": plain.microseconds,
        "unwatched_us": tapped.microseconds,
        "watched_us": watched.microseconds,
    }


def main() -> int:
    queries = asyncio.run(megabytes(query))
    commands = asyncio.run(megabytes(command))
    cost, idle, tapped = asyncio.run(in_process(50))
    print(f"  {cost:.2f} us per entry of a batch of 50, without a tap")
    single, _, tapped_single = asyncio.run(in_process(1))
    print(f"  {single:.2f} us per single call, {tapped_single:.2f} of it with a tap")
    http = asyncio.run(over_http())
    print(
        f"  {http['plain_us']:.1f} us of the server per call over HTTP without a tap, "
        f"{http['unwatched_us']:.1f} with one, {http['watched_us']:.1f} with three watchers"
    )
    figures = {
        "entry_us": cost,
        "off": idle,
        "on": tapped,
        "single_us": single,
        "single_on": tapped_single,
        "ring_queries_mb": queries,
        "ring_commands_mb": commands,
        **{f"http_{name}": ratio for name, ratio in http.items()},
    }
    targets = [
        Target("an entry, console off", "ratio", idle, "<=", 1.01, own=1.0),
        Target("an entry, console on and unwatched", "ratio", tapped, "<=", 1.15, own=1.0),
        Target("calls/s over HTTP, unwatched", "ratio", http["unwatched"], ">=", 0.99, own=1.0),
        Target("calls/s over HTTP, three watchers", "ratio", http["watched"], ">=", 0.95, own=1.0),
        Target("a ring full of queries", "MB", queries, "<=", 2.0, own=1.0),
        Target("a ring full of commands", "MB", commands, "<=", 2.0, own=1.0),
    ]
    return report("console", targets, figures)


if __name__ == "__main__":
    sys.exit(main())
