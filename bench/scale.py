"""What a command costs the database when several processes share it.

    python bench/scale.py [--quick]

64 commands are in flight in total: in one process, or 8 in each of 8. The figure is the processor time of
all processes of PostgreSQL per command. The processes live through all rounds, and the rows take
turns within a round, so a busy neighbour affects all of them; the median of the rounds counts.
"""

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import psutil  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.servers import Postgres  # noqa: E402  # the servers of the tests

from wirecall import App, Context  # noqa: E402

FLIGHTS = 64
PROCESSES = 8
QUICK = "--quick" in sys.argv
ROUNDS = 3 if QUICK else 9
COMMANDS = 3200

ONE = "one process"
MANY = f"{PROCESSES} processes"
WITH = "with a commit point"
WITHOUT = "without a commit point"

# What is compared, and the targets.
MANY_TO_ONE = f"{MANY}, times {ONE}"
ONE_MARKED = f"{WITH}, times {WITHOUT}: {ONE}"
MANY_MARKED = f"{WITH}, times {WITHOUT}: {MANY}"
MOST = {MANY_TO_ONE: 1.6, ONE_MARKED: 1.5, MANY_MARKED: 1.5}


# --- a process ------------------------------------------------------------------------------------


async def serve(url: str, flights: int) -> None:
    """Do what each line of stdin says: a method, and how many commands."""
    app = App("bench", mode="production", ledger=url)

    @app.command
    async def put(value: int) -> int:
        return value

    @app.command
    async def mark(value: int, ctx: Context) -> int:
        await ctx.commit_point()
        return value

    prefix = f"key-{time.time_ns()}-{id(app)}"
    numbers = count()

    async def work(method: str, left: "Sequence[int]") -> None:
        for _ in left:
            n = next(numbers)
            reply = await app.handle(
                b'{"jsonrpc":"2.0","method":"%s","params":{"value":1,"idempotency_key":"%s-%d"},"id":1}'
                % (method.encode(), prefix.encode(), n)
            )
            assert reply == b'{"jsonrpc":"2.0","result":1,"id":1}', reply

    async with app:
        while line := await asyncio.to_thread(sys.stdin.readline):
            method, number = line.split()
            left = iter(range(int(number)))
            async with asyncio.TaskGroup() as group:
                for _ in range(flights):
                    group.create_task(work(method, left))  # type: ignore[arg-type]
            print("done", flush=True)


class Crowd:
    """Processes that share one database, and the commands in flight."""

    def __init__(self, stack: ExitStack, url: str, number: int) -> None:
        command = [sys.executable, __file__, "--serve", url, str(FLIGHTS // number)]
        self._each = [
            stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            for _ in range(number)
        ]

    def run(self, method: str, total: int) -> None:
        for each in self._each:
            assert each.stdin is not None
            print(method, total // len(self._each), file=each.stdin, flush=True)
        for each in self._each:
            assert each.stdout is not None
            assert each.stdout.readline() == "done\n"


# --- the rounds -----------------------------------------------------------------------------------


def processor_time(server: Postgres) -> float:
    """The seconds that all processes of a server have used, also those that have ended."""
    assert server.process is not None
    head = psutil.Process(server.process.pid)
    ended = head.cpu_times()
    used = ended.children_user + ended.children_system
    for process in (head, *head.children(recursive=True)):
        times = process.cpu_times()
        used += times.user + times.system
    return float(used)


def measure(server: Postgres, rounds: int = ROUNDS) -> dict[str, list[float]]:
    """The processor time of the database for a command, in microseconds, of every round."""
    methods = {WITHOUT: "put", WITH: "mark"}
    found: dict[str, list[float]] = {}
    with ExitStack() as stack:
        crowds = {ONE: Crowd(stack, server.url, 1), MANY: Crowd(stack, server.url, PROCESSES)}
        for number in range(rounds + 1):
            for who, crowd in crowds.items():
                for how, method in methods.items():
                    before = processor_time(server)
                    crowd.run(method, COMMANDS)
                    used = (processor_time(server) - before) / COMMANDS * 1e6
                    if number:  # the first one warms up
                        found.setdefault(f"{who} {how}", []).append(used)
    return found


def ratios(found: dict[str, list[float]]) -> dict[str, float]:
    """The medians of the rounds of what is compared."""

    def median(above: str, below: str) -> float:
        pairs = zip(found[above], found[below], strict=True)
        return statistics.median(more / less for more, less in pairs)

    return {
        MANY_TO_ONE: median(f"{MANY} {WITHOUT}", f"{ONE} {WITHOUT}"),
        ONE_MARKED: median(f"{ONE} {WITH}", f"{ONE} {WITHOUT}"),
        MANY_MARKED: median(f"{MANY} {WITH}", f"{MANY} {WITHOUT}"),
    }


def main() -> None:
    server = Postgres()
    server.start()
    try:
        found = measure(server)
    finally:
        server.close()
    for name, used in found.items():
        print(f"  {name:<44} {statistics.median(used):8.1f} µs of the database")
    for name, ratio in ratios(found).items():
        print(f"  {name:<64} {ratio:6.2f}")


if __name__ == "__main__":
    if "--serve" in sys.argv:
        asyncio.run(serve(sys.argv[2], int(sys.argv[3])))
    else:
        main()
