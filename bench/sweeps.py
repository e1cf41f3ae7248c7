"""How long commands take while the sweep works, beside a ledger that has nothing to sweep.

    python bench/sweeps.py [--stores sqlite,postgres,redis]

8 commands are in flight. Many records are due; the sweep begins, and while it runs, each command is
timed. The rounds with a sweep and without one take turns, and the median of their 99th percentiles
counts.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.ledger import claim_of, outcome_of  # noqa: E402
from tests.servers import Postgres, Redis  # noqa: E402  # the servers of the tests

from wirecall.ledger.base import Ledger, RecordId, open_ledger  # noqa: E402

DUE = 6000
FLIGHTS = 8
ROUNDS = 5
SECONDS = 1.0
MOST = 1.5

numbers = count()


async def command(ledger: Ledger, retention: float) -> None:
    id = RecordId("bench", "put", f"{time.time_ns()}-{next(numbers)}")
    record = await ledger.claim(claim_of(id, retention=retention))
    assert await ledger.complete(record.token, outcome_of(), retention)


async def fill(ledger: Ledger) -> None:
    """Records whose retention is over at once."""
    for _ in range(DUE // 200):
        await asyncio.gather(*(command(ledger, 0.001) for _ in range(200)))


async def timed(ledger: Ledger, *, sweeps: bool) -> tuple[float, int]:
    """The 99th percentile in seconds, and how many records were swept."""
    took: list[float] = []
    swept = 0
    end = time.perf_counter() + SECONDS

    async def work() -> None:
        while time.perf_counter() < end:
            began = time.perf_counter()
            await command(ledger, 1000)
            took.append(time.perf_counter() - began)

    async def sweep() -> None:
        nonlocal swept
        while sweeps and time.perf_counter() < end:
            changed = await ledger.sweep()
            swept += changed
            if not changed:
                break

    async with asyncio.TaskGroup() as group:
        for _ in range(FLIGHTS):
            group.create_task(work())
        group.create_task(sweep())
    return sorted(took)[len(took) * 99 // 100], swept


async def measure(url: str) -> tuple[float, float, int]:
    """The percentiles without a sweep and with one, and how many records the sweeps changed."""
    ledger = await open_ledger(url)
    found: dict[bool, list[float]] = {False: [], True: []}
    total = 0
    for _ in range(ROUNDS):
        await fill(ledger)
        for sweeps in (False, True):
            p99, swept = await timed(ledger, sweeps=sweeps)
            found[sweeps].append(p99)
            total += swept
    await ledger.aclose()
    return statistics.median(found[False]), statistics.median(found[True]), total


def run(kind: str, url: str) -> bool:
    without, beside, swept = asyncio.run(measure(url))
    ratio = beside / without
    print(
        f"  {'ok  ' if ratio <= MOST else 'MISS'} {ratio:5.2f}  <= {MOST}  {kind}: "
        f"p99 {without * 1e3:.1f} ms, while {swept:,} records were swept {beside * 1e3:.1f} ms"
    )
    return ratio <= MOST


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stores", default="sqlite,postgres,redis")
    is_met = True
    for kind in parser.parse_args().stores.split(","):
        if kind == "sqlite":
            with tempfile.TemporaryDirectory() as folder:
                is_met &= run(kind, f"sqlite:{folder}/ledger.db")
            continue
        server = Postgres() if kind == "postgres" else Redis(appendonly="no")
        server.start()
        try:
            is_met &= run(kind, server.url)
        finally:
            server.close()
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
