"""The price of being watched: calls without a tap, with one, and with three watchers.

    python bench/console.py [--quick]

In process, the rows take turns within a round and the median of their ratios counts, because the
machine may be busy. Over HTTP, each round measures the servers one after another.
"""

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec

from targets import Target, report
from wirecall import App
from wirecall.console.tap import Tap

IS_QUICK = "--quick" in sys.argv
ROUNDS = 15 if IS_QUICK else 61
HTTP_ROUNDS = 3 if IS_QUICK else 9
SECONDS = 0.5 if IS_QUICK else 1.5
CONNECTIONS = 16

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


# --- over HTTP ------------------------------------------------------------------------------------


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


def serve(stack: ExitStack, folder: Path, *options: str) -> tuple[int, int]:
    """Start a server; return its port and its process id."""
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
            return int(line.strip().rpartition(":")[2]), process.pid


def watch(stack: ExitStack, pid: int) -> None:
    """Start a watcher of a server."""
    command = [sys.executable, "-m", "wirecall", "watch", str(pid), "--json"]
    watcher = stack.enter_context(
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    )
    stack.callback(watcher.terminate)


async def over_http() -> dict[str, float]:
    """Return the median ratios of the calls per second to those of a server without a tap."""
    ratios: dict[str, list[float]] = {"unwatched": [], "watched": []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "app.py").write_text(APP)
        plain, _ = serve(stack, folder)
        tapped, _ = serve(stack, folder, "--metrics", "127.0.0.1:0")
        watched, pid = serve(stack, folder, "--metrics", "127.0.0.1:0")
        for _ in range(3):
            watch(stack, pid)
        await asyncio.sleep(5)  # the watchers start
        for port in (plain, tapped, watched):
            await rate_of(port)
        for _ in range(HTTP_ROUNDS):
            first = await rate_of(plain)
            ratios["unwatched"].append(await rate_of(tapped) / first)
            ratios["watched"].append(await rate_of(watched) / first)
    return {name: statistics.median(each) for name, each in ratios.items()}


def main() -> int:
    cost, idle, tapped = asyncio.run(in_process(50))
    print(f"  {cost:.2f} us per entry of a batch of 50, without a tap")
    single, _, tapped_single = asyncio.run(in_process(1))
    print(f"  {single:.2f} us per single call, {tapped_single:.2f} of it with a tap")
    http = asyncio.run(over_http())
    figures = {
        "entry_us": cost,
        "off": idle,
        "on": tapped,
        "single_us": single,
        "single_on": tapped_single,
        **{f"http_{name}": ratio for name, ratio in http.items()},
    }
    targets = [
        Target("an entry, console off", "ratio", idle, "<=", 1.01, own=1.0),
        Target("an entry, console on and unwatched", "ratio", tapped, "<=", 1.15, own=1.0),
        Target("calls/s over HTTP, unwatched", "ratio", http["unwatched"], ">=", 0.99, own=1.0),
        Target("calls/s over HTTP, three watchers", "ratio", http["watched"], ">=", 0.95, own=1.0),
    ]
    return report("console", targets, figures)


if __name__ == "__main__":
    sys.exit(main())
