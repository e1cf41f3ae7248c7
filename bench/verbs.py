"""The operator's verbs over a ledger with a million records, on every store.

    python bench/verbs.py [--records 1000000] [--stores sqlite,postgres,redis]

Each store is filled in its own way, which takes seconds and not the hour of as many commands: one
transaction, `generate_series`, a script in Lua. Of every ten records, one is done and the others are
tombstones, as after a week with a retention of a day; a few run, wait or are unknown. One method and
one caller in a thousand are rare. One record in twenty is a task. Each verb runs three times, on a
ledger that was opened before, and the worst counts.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import apsw
import psycopg
import redis

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.servers import Postgres, Redis  # noqa: E402  # the servers of the tests

from wirecall.ledger.base import (  # noqa: E402
    Ledger,
    Only,
    RecordId,
    State,
    open_ledger,
)

RETENTION = 86_400.0
# Seconds between two records.
STEP = 0.5

# In seconds, for the first page; None: it has no limit.
STATS = 1.0
LIST = 0.5


def state_of(number: int, total: int) -> str:
    """Return the state of the nth oldest record."""
    if number % 10_000 == 7:
        return ("running", "waiting", "unknown")[number // 10_000 % 3]
    if number > total * 9 // 10:
        return "done"
    return "tombstone"


def method_of(number: int) -> str:
    if number % 1000 == 1:
        return "tools/call:rare"
    return f"tools/call:tool{number % 8}"


def caller_of(number: int) -> str:
    if number % 1000 == 2:
        return "seldom"
    return f"user{number % 100}"


# --- filling --------------------------------------------------------------------------------------


def fill_sqlite(url: str, total: int) -> None:
    now = time.time()
    with_outcome = ("done", "tombstone", "waiting")
    db = apsw.Connection(url.removeprefix("sqlite:"))
    db.pragma("synchronous", "off")

    def rows() -> Any:
        for number in range(total):
            began = now - (total - number) * STEP
            state = state_of(number, total)
            kind = "result" if state in with_outcome else None
            digest = b"d" * 32 if state in with_outcome else None
            completed = began + 1 if state in ("done", "tombstone") else None
            lasts = {"tombstone": 8 * RETENTION, "unknown": 9e999}.get(state, RETENTION)
            yield (
                caller_of(number), method_of(number), f"key-{number:09}", b"f" * 32, state,
                number + 1, b"n" * 16, 1, 1, 30.0, 9e12, b"", began + lasts, began + lasts, began,
                completed, kind, b'{"paid":500}' if state == "done" else None, digest,
            )  # fmt: skip

    db.execute("BEGIN")
    names = (
        "caller, method, key, fingerprint, state, fence, nonce, committed, attempts, lease, "
        "lease_until, boot, due, expires_at, started_at, completed_at, outcome_kind, payload, digest"
    )
    db.executemany(
        f"INSERT INTO wirecall_commands ({names}) VALUES ({', '.join('?' * 19)})", rows()
    )
    db.execute(
        "INSERT INTO wirecall_tasks (id, caller, method, key, started_at, version, document, "
        "is_ready, is_over, ttl, until, boot, expires_at) SELECT 'task-' || fence, caller, method, "
        "key, started_at, 1, '{}', 0, 1, 1e9, 9e12, x'', 9e12 FROM wirecall_commands "
        "WHERE fence % 20 = 0"
    )
    db.execute("UPDATE wirecall_meta SET fence = ?", (total + 1,))
    db.execute("COMMIT")
    db.close()


def fill_postgres(url: str, total: int) -> None:
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(
            """
            INSERT INTO wirecall.ledger (
                caller, method, key, fingerprint, state, fence, nonce, committed, attempts,
                started_at, lease_until, retention, expires_at, completed_at, kind, payload,
                digest, due, buried
            )
            SELECT
                CASE WHEN n %% 1000 = 2 THEN 'seldom' ELSE 'user' || n %% 100 END,
                CASE WHEN n %% 1000 = 1 THEN 'tools/call:rare' ELSE 'tools/call:tool' || n %% 8 END,
                'key-' || lpad(n::text, 9, '0'), '\\x66', state, n + 1, '\\x6e', true, 1, began,
                CASE WHEN state = 'running' THEN clock_timestamp() + '1 day' ELSE began END,
                '1 day', clock_timestamp() + '8 days',
                CASE WHEN state IN ('done', 'tombstone') THEN began END,
                CASE WHEN state IN ('done', 'tombstone', 'waiting') THEN 'result' END,
                CASE WHEN state = 'done' THEN '\\x7b7d'::bytea END,
                CASE WHEN state IN ('done', 'tombstone', 'waiting') THEN '\\x64'::bytea END,
                clock_timestamp() + '8 days', state = 'tombstone'
            FROM generate_series(0, %(total)s - 1) AS n, LATERAL (
                SELECT CASE
                    WHEN n %% 10000 = 7 THEN (ARRAY['running', 'waiting', 'unknown'])[n / 10000 %% 3 + 1]
                    WHEN n > %(total)s * 9 / 10 THEN 'done'
                    ELSE 'tombstone'
                END AS state,
                clock_timestamp() - make_interval(secs => (%(total)s - n) * 0.5) AS began
            ) AS s
            """,
            {"total": total},
        )
        db.execute(
            """
            INSERT INTO wirecall.tasks (
                id, caller, method, key, started_at, version, document, is_ready, is_over, expires_at
            )
            SELECT 'task-' || fence, caller, method, key, started_at, 1, '{}', false, true,
                clock_timestamp() + '8 days'
            FROM wirecall.ledger WHERE fence % 20 = 0
            """
        )
        db.execute("VACUUM ANALYZE wirecall.ledger, wirecall.tasks")


FILL = """
local first, last, total, now = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local prefix = ARGV[5]
local few = {'running', 'waiting', 'unknown'}
local function whole(number) return string.format('%.0f', number) end
for n = first, last do
  local caller = n % 1000 == 2 and 'seldom' or 'user' .. n % 100
  local method = n % 1000 == 1 and 'tools/call%3Arare' or 'tools/call%3Atool' .. n % 8
  local state = n > total * 9 / 10 and 'done' or 'tombstone'
  if n % 10000 == 7 then state = few[math.floor(n / 10000) % 3 + 1] end
  local began = now - (total - n) * 500000
  local name = prefix .. caller .. ':' .. method .. string.format(':key-%09d', n)
  redis.call('HSET', name, 'state', state, 'fence', n + 1, 'nonce', 'n', 'fingerprint', 'f', 'committed', '1',
    'attempts', '1', 'lease_until', whole(now + 9e10), 'started_at', whole(began),
    'expires', whole(now + 7e11), 'retention', '86400000000', 'v', '2')
  if state == 'done' or state == 'tombstone' then
    redis.call('HSET', name, 'completed_at', whole(began), 'kind', 'result', 'digest', 'd')
  elseif state == 'waiting' then
    redis.call('HSET', name, 'kind', 'result', 'digest', 'd')
  end
  if (n + 1) % 20 == 0 then
    local task = 'task-' .. (n + 1)
    redis.call('HSET', name, 'task', task)
    redis.call('HSET', prefix .. 'task:' .. task, 'record', name, 'started_at', whole(began),
      'version', '1', 'document', '{}', 'is_ready', '0', 'is_over', '1')
    redis.call('PEXPIRE', prefix .. 'task:' .. task, 700000000)
  end
end
"""


def fill_redis(url: str, total: int) -> None:
    with redis.Redis.from_url(url) as client:
        now = int(time.time() * 1e6)
        step = 10_000
        for first in range(0, total, step):
            last = min(first + step, total) - 1
            client.eval(FILL, 0, first, last, total, now, "wirecall:")
        client.delete("wirecall:meta")


FILLS: dict[str, Callable[[str, int], None]] = {
    "sqlite": fill_sqlite,
    "postgres": fill_postgres,
    "redis": fill_redis,
}


# --- measuring ------------------------------------------------------------------------------------


def verbs(
    ledger: Ledger, total: int
) -> dict[str, tuple[float | None, Callable[[], Awaitable[Any]]]]:
    """The questions behind the verbs: a limit in seconds, and the question."""
    day_ago = time.time() - 86_400
    middle = time.time() - total * STEP / 2
    rare = RecordId(caller_of(1), method_of(1), "key-000000001")
    found: dict[str, tuple[float | None, Callable[[], Awaitable[Any]]]] = {
        "stats": (STATS, ledger.counts),
        "list": (LIST, lambda: ledger.list(limit=51)),
    }
    for state in State:
        found[f"list --state {state.value}"] = (LIST, lambda s=state: ledger.list(s, limit=51))  # type: ignore[misc]
    filters = {
        "--method tools/call:tool1": Only(method="tools/call:tool1"),
        "--method tools/call:rare": Only(method="tools/call:rare"),
        "--caller user7": Only(caller="user7"),
        "--caller seldom": Only(caller="seldom"),
        "--caller stranger": Only(caller="stranger"),
        "--since 1d": Only(since=day_ago),
        "--until 3d": Only(until=middle),
    }
    for name, only in filters.items():
        found[f"list {name}"] = (LIST, lambda o=only: ledger.list(limit=51, only=o))  # type: ignore[misc]
    found["list --tasks"] = (LIST, lambda: ledger.list_tasks(limit=51))
    found["show"] = (None, lambda: ledger.get(rare))
    return found


async def measure(url: str, total: int) -> dict[str, tuple[float | None, float]]:
    server = await open_ledger(url)
    for _ in range(5):
        await server.sweep()  # as every server does each minute
    await server.aclose()
    ledger = await open_ledger(url, "read")
    found = {}
    for name, (limit, ask) in verbs(ledger, total).items():
        worst = 0.0
        for _ in range(3):
            began = time.perf_counter()
            await ask()
            worst = max(worst, time.perf_counter() - began)
            if worst > 20:
                break
        found[name] = (limit, worst)
        print(
            f"  {name:<36} {worst:9.3f} s{'' if limit is None or worst <= limit else '  over ' + str(limit)}"
        )
    await ledger.aclose()
    return found


async def run(kind: str, url: str, total: int) -> bool:
    await (await open_ledger(url)).aclose()
    began = time.perf_counter()
    await asyncio.to_thread(FILLS[kind], url, total)
    filled = time.perf_counter() - began
    began = time.perf_counter()
    await (await open_ledger(url, "update")).aclose()
    migrated = time.perf_counter() - began
    print(
        f"{kind}: {total:,} records, filled in {filled:.0f} s, migrated in {migrated:.1f} s",
        flush=True,
    )
    found = await measure(url, total)
    return all(limit is None or took <= limit for limit, took in found.values())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--stores", default="sqlite,postgres,redis")
    given = parser.parse_args()
    is_met = True
    for kind in given.stores.split(","):
        if kind == "sqlite":
            with tempfile.TemporaryDirectory() as folder:
                is_met &= asyncio.run(run(kind, f"sqlite:{folder}/ledger.db", given.records))
            continue
        server = Postgres() if kind == "postgres" else Redis(appendonly="no")
        server.start()
        try:
            is_met &= asyncio.run(run(kind, server.url, given.records))
        finally:
            server.close()
    return 0 if is_met else 1


if __name__ == "__main__":
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    sys.exit(main())
