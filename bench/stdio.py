"""A server on stdin and stdout, beside FastMCP: start to first answer, and one call after another,
in one run.

make bench            or   python bench/stdio.py [--quick]
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from targets import Target, report

QUICK = "--quick" in sys.argv
STARTS = 2 if QUICK else 5
CALLS = 100 if QUICK else 500

SERVERS = {
    "wirecall": """
from wirecall import App
app = App("shop", version="1.0", mode="production", ledger="memory:")
@app.query
def price(sku: str) -> int:
    return len(sku)
app.run("stdio")
""",
    "FastMCP": """
import logging
from fastmcp import FastMCP
logging.disable(logging.CRITICAL)
server = FastMCP("shop")
@server.tool
def price(sku: str) -> int:
    return len(sku)
server.run(show_banner=False)
""",
}


class Server:
    def __init__(self, script: Path) -> None:
        self.started = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        client = {"name": "bench", "version": "1"}
        self.ask(
            0,
            "initialize",
            {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client},
        )
        self.first = time.perf_counter() - self.started
        self._send({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def ask(self, id: int, method: str, params: Any) -> Any:
        self._send({"jsonrpc": "2.0", "id": id, "method": method, "params": params})
        assert self._process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            line += self._process.stdout.read(65536)
        answer = msgspec.json.decode(line)
        assert answer["id"] == id and "result" in answer, answer
        return answer["result"]

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(message) + b"\n")

    def round_trip(self) -> float:
        """The median of many calls, in seconds."""
        times = []
        for id in range(1, CALLS + 1):
            started = time.perf_counter()
            self.ask(id, "tools/call", {"name": "price", "arguments": {"sku": "tea"}})
            times.append(time.perf_counter() - started)
        return sorted(times)[CALLS // 2]

    def end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def main() -> int:
    first = dict.fromkeys(SERVERS, 1e9)
    trip = dict.fromkeys(SERVERS, 1e9)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(STARTS):
            for name, text in SERVERS.items():
                script = Path(folder) / f"{name.lower()}_server.py"
                script.write_text(text)
                server = Server(script)
                first[name] = min(first[name], server.first)
                trip[name] = min(trip[name], server.round_trip())
                server.end()
    for name in SERVERS:
        print(
            f"  {name:10} first answer {first[name] * 1000:8.1f} ms   round trip {trip[name] * 1000:7.3f} ms"
        )
    figures = {f"{name}, first answer": 1000 * value for name, value in first.items()}
    figures |= {f"{name}, round trip": 1000 * value for name, value in trip.items()}
    start = figures["wirecall, first answer"]
    other_start = figures["FastMCP, first answer"]
    ours = figures["wirecall, round trip"]
    other = figures["FastMCP, round trip"]
    targets = [
        Target("start to first answer, times FastMCP's", "ms", start, "<=", 0.25, peer=other_start),
        Target("round trip, times FastMCP's", "ms", ours, "<=", 0.1, peer=other),
    ]
    return report("stdio", targets, figures)


if __name__ == "__main__":
    sys.exit(main())
