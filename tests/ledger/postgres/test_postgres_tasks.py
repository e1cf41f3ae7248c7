"""Tasks in PostgreSQL: an index finds few open ones among many records; an old schema gets their
table.
"""

import asyncio
from urllib.parse import quote

import psycopg
import pytest
from msgspec import structs

from tests.ledger import ID, LEASE, claim_of, granted, present
from tests.ledger.contract import TTL
from tests.ledger.schema import forget_schema
from tests.servers import Store
from wirecall.ledger.base import Ledger, open_ledger
from wirecall.ledger.postgres.queue import SQL

pytestmark = pytest.mark.parametrize("store", ["postgres"], indirect=True)

MANY = 5000

# Joins that are disabled in the server, so that it has to choose another one.
WAYS = [
    (),
    ("hashjoin",),
    ("hashjoin", "mergejoin"),
    (
        "hashjoin",
        "mergejoin",
        "hashagg",
        "sort",
        "indexscan",
        "indexonlyscan",
        "bitmapscan",
        "material",
    ),
]


def fill(db: "psycopg.Connection[tuple[object, ...]]") -> None:
    """Many records that run, each with a task; of these, one in 500 is open.

    The other records have no tasks.
    """
    db.execute(
        "INSERT INTO wirecall.ledger SELECT '', 'm', n::text, '', 'running', n, '', false, 1, "
        "now(), now(), '1 day', now() "
        "FROM generate_series(1, %s) AS n",
        (2 * MANY,),
    )
    db.execute(
        "INSERT INTO wirecall.tasks (id, caller, method, key, started_at, version, document, "
        "is_ready, is_over, expires_at) "
        "SELECT key, caller, method, key, started_at, 1, '', false, fence %% 500 > 0, now() + '1 day' "
        "FROM wirecall.ledger WHERE fence <= %s ORDER BY fence",
        (MANY,),
    )


@pytest.mark.parametrize("is_analyzed", [False, True])
@pytest.mark.parametrize("name", ["begin_task", "task", "task_of", "change_task", "orphans"])
async def test_open_tasks_are_found_by_an_index(
    name: str, is_analyzed: bool, ledger: Ledger, store: Store
) -> None:
    assert await ledger.orphans() == []
    values = {
        "caller": "",
        "method": "m",
        "key": "1",
        "fence": 1,
        "nonce": b"",
        "id": "1",
        "document": b"",
        "ttl": 1.0,
    }
    values |= {"is_ready": False, "is_over": False, "version": 1, "limit": 100}
    with psycopg.connect(store.url) as db:
        fill(db)
        if is_analyzed:
            db.execute("ANALYZE wirecall.ledger, wirecall.tasks")
        rows = psycopg.ClientCursor(db).execute(f"EXPLAIN {SQL[name]}".encode(), values).fetchall()
        found = psycopg.ClientCursor(db).execute(SQL["orphans"].encode(), values).fetchall()
        db.rollback()
    plan = "\n".join(line for (line,) in rows)
    assert "Scan on ledger" not in plan and "Seq Scan" not in plan
    assert found == [(str(number),) for number in range(500, MANY + 1, 500)]


async def test_begin_task_waits_for_a_take_over_that_is_not_committed_yet(
    ledger: Ledger, store: Store
) -> None:
    """Otherwise it would see the record as it was before, and make a task for a run that has lost
    it.
    """
    record = await granted(ledger)
    with psycopg.connect(store.url) as db, psycopg.connect(store.url, autocommit=True) as observer:
        db.execute("UPDATE wirecall.ledger SET fence = fence + 1, nonce = 'another'")
        beginning = asyncio.create_task(ledger.begin_task(record.token, "task", b"{}", TTL))
        while (
            not beginning.done()
            and not observer.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone()
        ):
            await asyncio.wait({beginning}, timeout=0.01)
        db.commit()
    assert not await beginning
    assert await ledger.task("task") is None


async def test_schema_of_an_older_version_gets_the_table_of_tasks(store: Store) -> None:
    forget_schema(store)
    before = [part for name, part in SQL.items() if name.startswith("schema ")][:4]
    with psycopg.connect(store.url, autocommit=True) as db:
        db.execute(SQL["create schema"].encode())
        for number, part in enumerate(before):
            db.execute(part.encode())
            db.execute(SQL["migrated"].encode(), {"number": number + 1})
    ledger = await open_ledger(store.url, "update")
    record = await granted(ledger)
    assert await ledger.begin_task(record.token, "task", b"{}", TTL)
    store.age(ID, LEASE + 1)
    assert await ledger.orphans() == ["task"]
    assert (await ledger.claim(claim_of(on_crash="rerun"))).attempts == 2
    assert (await present(ledger)).attempts == 2
    await ledger.aclose()


@pytest.mark.parametrize("ways", WAYS, ids=len)
async def test_sweep_keeps_to_its_limit_by_every_plan(ways: tuple[str, ...], store: Store) -> None:
    """A server chooses its joins by its statistics. Here some joins are disabled."""
    closed = " ".join(f"-c enable_{way}=off" for way in ways)
    ledger = await open_ledger(
        f"{store.url}{'&' if '?' in store.url else '?'}options={quote(closed)}"
    )
    try:
        for number in range(8):
            record = await granted(ledger, structs.replace(ID, key=str(number)))
            assert await ledger.begin_task(record.token, f"task-{number}", b"{}", TTL)
            store.age_task(f"task-{number}", TTL + 1)
        assert [await ledger.sweep(limit=3) for _ in range(4)] == [3, 3, 2, 0]
    finally:
        await ledger.aclose()
