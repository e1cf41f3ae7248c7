"""The price of taking effect once: commands through the ledger beside the bare engine doing the
same writes, in one run.

    make bench            or   python bench/ledger.py [--quick]

A command is bytes in to bytes out: parse, admit, bind, claim, run, record, answer. Bare is the
driver alone: one insert and one update, each committed with the same durability, at the same
concurrency. Rows take turns within a round, and the best round counts, over several starts: the
memory layout of a process changes its speed by a fifth.

Rows that should cost the same are compared by the processor time of this process, which a neighbour
affects least: a command without a key beside one with a key, and a command of an app with tasks
beside one without. Their rounds are short and in pairs, the order changes from pair to pair, and
the median of the pairs counts: a busy neighbour slows both of a pair. Reads and replays do not
wait, so they are compared by processor time too. What several processes cost PostgreSQL is measured
by `scale.py`.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any

import apsw

import scale
from targets import Target, report

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.servers import Postgres, Redis  # noqa: E402  # the servers of the tests

from wirecall import App  # noqa: E402

QUICK = "--quick" in sys.argv
STARTS = 1 if QUICK else 4
ROUNDS = 2 if QUICK else 3
COMMANDS = 300 if QUICK else 1500
FLIGHTS = 64

# A read takes microseconds, and a neighbour's disturbance milliseconds: reads have more and shorter
# rounds.
READS = ["sqlite bare read", "sqlite replay", "query, memory", "query, sqlite open"]

# For rows that should cost the same: the number of pairs of rounds, and of commands in each.
PAIRS = 60
PAIRED = 10 * FLIGHTS

numbers = count(time.time_ns())  # a server has the records of earlier starts
Work = Callable[[], Awaitable[Any]]


async def rate(
    work: Work, flights: int, total: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """How many times a second `work` is done, `flights` at once."""
    left = iter(range(total))

    async def worker() -> None:
        for _ in left:
            await work()

    started = clock()
    async with asyncio.TaskGroup() as group:
        for _ in range(flights):
            group.create_task(worker())
    return total / (clock() - started)


async def best(rows: dict[str, tuple[Work, int, int]]) -> dict[str, float]:
    """The best rate of every row over all rounds, after one that only warms up."""
    for work, flights, total in rows.values():
        await rate(work, flights, max(1, total // 10))
    found = dict.fromkeys(rows, 0.0)
    for name in [*rows, *READS * 5] * ROUNDS:
        clock = time.process_time if name in READS else time.perf_counter
        found[name] = max(found[name], await rate(*rows[name], clock))
    return found


async def pairs(plain: Work, others: dict[str, Work]) -> dict[str, list[float]]:
    """How many times the processor time of a plain command each of the others takes, for every pair
    of rounds.
    """
    for work in (plain, *others.values()):
        await rate(work, FLIGHTS, PAIRED)
    found: dict[str, list[float]] = {name: [] for name in others}
    for number in range(PAIRS):
        for name, other in others.items():
            took: dict[Work, float] = {}
            for work in (plain, other) if number % 2 else (other, plain):
                started = time.process_time()
                await rate(work, FLIGHTS, PAIRED)
                # Written answers are marked by then, and a sleep takes no processor time.
                await asyncio.sleep(0.03)
                took[work] = time.process_time() - started
            found[name].append(took[other] / took[plain])
    return found


# --- wirecall -------------------------------------------------------------------------------------


def make_app(ledger: str, *, has_tasks: bool = False) -> App:
    app = App("bench", mode="production", ledger=ledger)

    @app.command(key="auto")
    async def put(value: int) -> int:
        return value

    if has_tasks:

        @app.command(task=True)
        async def render(value: int) -> int:
            return value

    @app.query
    def look(value: int) -> int:
        return value

    return app


def command(app: App) -> Work:
    async def work() -> None:
        n = next(numbers)
        reply = await app.handle(
            b'{"jsonrpc":"2.0","method":"put","params":{"value":1,"idempotency_key":"key-%d"},"id":%d}'
            % (n, n)
        )
        assert reply is not None and b'"result":1' in reply, reply

    return work


def order(app: App, *, has_key: bool) -> Work:
    """A command of a known caller, so that one without a key can be recognised.

    Keys are random, as generated ones are.
    """

    async def work() -> None:
        n = next(numbers)
        key = b',"idempotency_key":"%s"' % os.urandom(16).hex().encode() if has_key else b""
        message = b'{"jsonrpc":"2.0","method":"put","params":{"value":%d%s},"id":1}' % (n, key)
        reply = await app.handle(message, caller="bench")
        assert reply == b'{"jsonrpc":"2.0","result":%d,"id":1}' % n, reply

    return work


def replay(app: App) -> Work:
    async def work() -> None:
        ids: list[Any] = []
        reply = await app.handle(
            b'{"jsonrpc":"2.0","method":"put","params":{"value":1,"idempotency_key":"replayed"},"id":2}',
            replayed=ids,
        )
        assert reply == b'{"jsonrpc":"2.0","result":1,"id":2}', reply

    return work


def query(app: App) -> Work:
    message = b'{"jsonrpc":"2.0","method":"look","params":{"value":1},"id":1}'

    async def work() -> None:
        await app.handle(message)

    return work


# --- bare -----------------------------------------------------------------------------------------

ROW = (b"f" * 32, b"n" * 16, b"1", b"d" * 32)


class BareSqlite:
    def __init__(self, path: Path) -> None:
        self.db = apsw.Connection(str(path))
        self.db.pragma("journal_mode", "wal")
        self.db.pragma("synchronous", "full")
        self.db.execute(
            "CREATE TABLE t (k TEXT PRIMARY KEY, state INT, f BLOB, n BLOB, p BLOB, d BLOB) WITHOUT ROWID"
        )
        self.db.execute("INSERT INTO t VALUES ('replayed', 1, ?, ?, ?, ?)", ROW)

    async def write(self) -> None:
        key = f"bare-{next(numbers)}"
        self.db.execute("INSERT INTO t VALUES (?, 0, ?, ?, NULL, NULL)", (key, *ROW[:2]))
        self.db.execute(
            "UPDATE t SET state = 1, p = ?, d = ? WHERE k = ? AND state = 0 AND n = ?",
            (*ROW[2:], key, ROW[1]),
        )

    async def read(self) -> None:
        assert self.db.execute("SELECT state, f, n, p, d FROM t WHERE k = ?", ("replayed",)).get


async def bare_redis(url: str) -> Work:
    from redis.asyncio import Redis as Client

    client = Client.from_url(url)

    async def work() -> None:
        key = f"bare-{next(numbers)}"
        await client.hset(key, mapping={"state": 0, "f": ROW[0], "n": ROW[1]})
        await client.hset(key, mapping={"state": 1, "p": ROW[2], "d": ROW[3]})

    return work


async def bare_postgres(url: str) -> Work:
    from psycopg_pool import AsyncConnectionPool

    pool = AsyncConnectionPool(
        url, min_size=10, max_size=10, open=False, kwargs={"autocommit": True}
    )
    await pool.open(wait=True)
    async with pool.connection() as db:
        await db.execute(
            "CREATE TABLE IF NOT EXISTS bare (k TEXT PRIMARY KEY, state INT, f BYTEA, n BYTEA, "
            "p BYTEA, d BYTEA)"
        )

    async def work() -> None:
        key = f"bare-{next(numbers)}"
        async with pool.connection() as db:
            await db.execute("INSERT INTO bare VALUES (%s, 0, %s, %s)", (key, *ROW[:2]))
        async with pool.connection() as db:
            await db.execute(
                "UPDATE bare SET state = 1, p = %s, d = %s WHERE k = %s", (*ROW[2:], key)
            )

    return work


# --- the table ------------------------------------------------------------------------------------


async def measure(
    folder: Path, redis: str, postgres: str
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The rates of all rows, and the cost of those that should equal a plain command, in multiples
    of it.
    """
    urls = {
        "sqlite": f"sqlite:{folder / 'ledger.db'}",
        "memory": "memory:",
        "redis": redis,
        "postgres": postgres,
    }
    apps = {name: make_app(url) for name, url in urls.items()}
    with_tasks = {name: make_app(url, has_tasks=True) for name, url in urls.items()}
    bare = BareSqlite(folder / "bare.db")
    await replay(apps["sqlite"])()
    rows = {
        "sqlite bare": (bare.write, 1, COMMANDS),
        "sqlite one at a time": (command(apps["sqlite"]), 1, COMMANDS),
        "sqlite 64 in flight": (command(apps["sqlite"]), FLIGHTS, 4 * COMMANDS),
        "sqlite bare read": (bare.read, 1, 4 * COMMANDS),
        "sqlite replay": (replay(apps["sqlite"]), 1, COMMANDS),
        "redis bare": (await bare_redis(redis), FLIGHTS, 2 * COMMANDS),
        "redis 64 in flight": (command(apps["redis"]), FLIGHTS, 2 * COMMANDS),
        "postgres bare": (await bare_postgres(postgres), FLIGHTS, COMMANDS),
        "postgres 64 in flight": (command(apps["postgres"]), FLIGHTS, COMMANDS),
        "memory 64 in flight": (command(apps["memory"]), FLIGHTS, 4 * COMMANDS),
        "query, memory": (query(apps["memory"]), 1, 4 * COMMANDS),
        "query, sqlite open": (query(apps["sqlite"]), 1, 4 * COMMANDS),
    }
    found = await best(rows)
    alike = dict[str, list[float]]()
    for name, app in apps.items():
        others = {
            f"{name}: a command without a key": order(app, has_key=False),
            f"{name}: a command of an app with tasks": order(with_tasks[name], has_key=True),
        }
        alike |= await pairs(order(app, has_key=True), others)
    for app in [*apps.values(), *with_tasks.values()]:
        await app.aclose()
    return found, alike


def one_start(redis: str, postgres: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measure(Path(folder), redis, postgres))))


def all_starts(redis: str, postgres: str) -> tuple[dict[str, float], dict[str, float]]:
    """The best rates of all starts, and the medians of all their pairs."""
    command = [sys.executable, *sys.argv, "--of", redis, postgres]
    printed = [
        subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout for _ in range(STARTS)
    ]
    rates, alike = zip(*(json.loads(each) for each in printed), strict=True)
    found = {name: max(start[name] for start in rates) for name in rates[0]}
    return found, {
        name: statistics.median(ratio for start in alike for ratio in start[name])
        for name in alike[0]
    }


def main() -> int:
    if "--of" in sys.argv:
        one_start(*sys.argv[-2:])
        return 0
    redis = Redis()
    postgres = Postgres()
    redis.start()
    postgres.start()
    try:
        found, alike = all_starts(redis.url, postgres.url)
        scaled = scale.ratios(scale.measure(postgres))
    finally:
        redis.close()
        postgres.close()
    print("\nper second; reads, replays and queries per second of processor time")
    for name, value in found.items():
        print(f"  {name:<22} {value:12,.0f}")
    bare = found["sqlite bare"]
    many = "64 in flight, times bare"
    opened = found["query, sqlite open"]
    read = found["sqlite bare read"]
    targets = [
        Target(f"SQLite, {many}", "commands/s", found["sqlite 64 in flight"], ">=", 4.0, bare=bare),
        Target(
            "SQLite, one at a time, times bare",
            "commands/s",
            found["sqlite one at a time"],
            ">=",
            0.45,
            bare=bare,
        ),
        Target(
            f"Redis, {many}",
            "commands/s",
            found["redis 64 in flight"],
            ">=",
            1.0,
            bare=found["redis bare"],
        ),
        Target(
            f"PostgreSQL, {many}",
            "commands/s",
            found["postgres 64 in flight"],
            ">=",
            1.0,
            bare=found["postgres bare"],
        ),
        Target(
            "bare reads, times replays from SQLite",
            "replays/s",
            found["sqlite replay"],
            "<=",
            10.0,
            bare=read,
            inverse=True,
        ),
        Target(
            "queries, times those with a ledger open",
            "queries/s",
            opened,
            "<=",
            1.1,
            own=found["query, memory"],
            inverse=True,
        ),
    ]
    for name, times in alike.items():
        most = 1.1 if "without a key" in name else 1.03
        targets.append(
            Target(f"{name}, times a plain one", "processor time", times, "<=", most, own=1.0)
        )
    for name, times in scaled.items():
        targets.append(
            Target(
                f"PostgreSQL's processor time, {name}",
                "processor time",
                times,
                "<=",
                scale.MOST[name],
                own=1.0,
            )
        )
    return report("ledger", targets, found | alike | scaled)


if __name__ == "__main__":
    raise SystemExit(main())
