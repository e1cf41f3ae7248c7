"""The `wirecall` command beside a bare interpreter and beside `fastmcp call`, in one run.

    python bench/cli.py [--quick]

Every row is the best of several rounds, and the rows take turns within a round, so that a noisy
neighbour affects all.

The cost of lines beyond start-up is not measured as the difference of two processes: each takes
about 200 ms and varies by more than the lines cost, and such differences were anywhere from below 0
to 6 times the cost in process. One process runs the command with one line, with all lines, and with
one line again; the last is subtracted from the second.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from targets import Target, report

ROOT = Path(__file__).parents[1]
ROUNDS = 3 if "--quick" in sys.argv else 9
LINES = 1000
SHOP = str(ROOT / "examples" / "shop.py")
BIN = Path(sys.executable).parent
# `fastmcp call` starts `fastmcp run`.
ENVIRONMENT = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}

FASTMCP = '''from fastmcp import FastMCP
mcp = FastMCP("shop")
@mcp.tool
def price(sku: str) -> int:
    """What an article costs, in cents."""
    return {"tea": 450, "coffee": 700}[sku]
'''

# The work of `wirecall batch` without the command: the same calls by the client, on the same app.
IN_PROCESS = """
import asyncio, sys, time
sys.path.insert(0, sys.argv[1])
from shop import app
from wirecall import connect
async def main():
    async with connect(app) as client:
        async with client.batch() as warm:
            warm.call("price", {"sku": "tea"})
        begun = time.perf_counter()
        async with client.batch() as batch:
            entries = [batch.call("price", {"sku": "tea"}) for _ in range(int(sys.argv[2]))]
        assert all(entry.result() == 450 for entry in entries)
        print(time.perf_counter() - begun)
asyncio.run(main())
"""

BEYOND = """
import os, sys, time
from wirecall.cli import main
def batch(path):
    begun = time.perf_counter()
    try:
        main(["batch", sys.argv[1], path])
    except SystemExit as ended:
        assert ended.code == 0
    return time.perf_counter() - begun
answer, sys.stdout = sys.stdout, open(os.devnull, "w")
batch(sys.argv[2])
print(batch(sys.argv[3]) - batch(sys.argv[2]), file=answer)
"""


def seconds(command: list[str], stdin: bytes = b"") -> float:
    begun = time.perf_counter()
    subprocess.run(command, input=stdin, check=True, cwd=ROOT, env=ENVIRONMENT, capture_output=True)
    return time.perf_counter() - begun


def told(script: str, *words: str) -> float:
    """The seconds that a script prints."""
    return float(
        subprocess.run(
            [sys.executable, "-c", script, *words], capture_output=True, check=True, text=True
        ).stdout
    )


def rows(folder: Path) -> dict[str, Callable[[], float]]:
    wirecall = str(BIN / "wirecall")
    lines = b'{"method":"price","params":{"sku":"tea"}}\n'
    (folder / "server.py").write_text(FASTMCP)
    one = folder / "one"
    many = folder / "many"
    one.write_bytes(lines)
    many.write_bytes(lines * LINES)
    fastmcp = [
        str(BIN / "fastmcp"),
        "call",
        str(folder / "server.py"),
        "price",
        "sku=tea",
        "--json",
    ]
    measured: dict[str, Callable[[], float]] = {
        "python -c pass": lambda: seconds([sys.executable, "-c", "pass"]),
        "wirecall --help": lambda: seconds([wirecall, "--help"]),
        "wirecall --version": lambda: seconds([wirecall, "--version"]),
        "wirecall call": lambda: seconds([wirecall, "call", SHOP, "price", "sku=tea", "--json"]),
        "wirecall call --as mcp": lambda: seconds(
            [wirecall, "call", SHOP, "price", "sku=tea", "--json", "--as", "mcp"]
        ),
        "wirecall batch, 1 line": lambda: seconds([wirecall, "batch", SHOP], lines),
        f"wirecall batch, {LINES} lines": lambda: seconds([wirecall, "batch", SHOP], lines * LINES),
        f"{LINES} lines beyond start-up": lambda: told(BEYOND, SHOP, str(one), str(many)),
        f"{LINES} calls in process": lambda: told(IN_PROCESS, str(ROOT / "examples"), str(LINES)),
    }
    if find_spec("fastmcp"):
        measured["fastmcp call"] = lambda: seconds(fastmcp)
    return measured


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        measured = rows(Path(folder))
        best = dict.fromkeys(measured, float("inf"))
        for number in range(ROUNDS):
            for name, measure in measured.items():
                if name != "fastmcp call" or number < 3:  # it takes seconds
                    best[name] = min(best[name], measure())
    for name, value in best.items():
        print(f"  {name:<28} {value * 1000:9.1f} ms")
    figures = {name: 1000 * value for name, value in best.items()}
    return report("cli", targets(figures), figures)


def targets(best: dict[str, float]) -> list[Target]:
    bare = best["python -c pass"]
    beyond = best[f"{LINES} lines beyond start-up"]
    within = best[f"{LINES} calls in process"]
    found = [
        Target(
            "wirecall --help, in bare interpreters",
            "ms",
            best["wirecall --help"],
            "<=",
            8,
            bare=bare,
        ),
        Target(
            "wirecall --version, in bare interpreters",
            "ms",
            best["wirecall --version"],
            "<=",
            8,
            bare=bare,
        ),
        Target(f"{LINES} lines beyond start-up, in process", "ms", beyond, "<=", 3, own=within),
    ]
    if "fastmcp call" in best:
        peer = best["fastmcp call"]
        ours = best["wirecall call"]
        by_mcp = best["wirecall call --as mcp"]
        found += [
            Target("fastmcp call, in wirecall calls", "ms", ours, ">=", 8, peer=peer, inverse=True),
            Target(
                "fastmcp call, in wirecall calls by MCP",
                "ms",
                by_mcp,
                ">=",
                8,
                peer=peer,
                inverse=True,
            ),
        ]
    return found


if __name__ == "__main__":
    sys.exit(main())
