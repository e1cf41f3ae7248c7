"""A ledger in PostgreSQL whose table of commands has partitions."""

import asyncio
import json
from collections.abc import Iterator
from itertools import count

import psycopg
import pytest
from msgspec import structs

from tests.calls import call, make_app, result
from tests.cli import invoke
from tests.ledger import ID, LEASE, RETENTION, granted, in_state, outcome_of, present
from tests.servers import Postgres, Store
from wirecall import Context
from wirecall.errors import UsageError
from wirecall.ledger.base import LedgerDown, State, open_ledger, schema_of
from wirecall.ledger.postgres import migration, queue

_numbers = count(1)


@pytest.fixture
def url(postgres_server: Postgres) -> Iterator[str]:
    """The URL of an empty database, with 4 partitions."""
    name = f"partitions{next(_numbers)}"
    postgres_server.run(f"CREATE DATABASE {name}")
    yield f"{postgres_server.url_of(name)}&partitions=4"
    postgres_server.run(f"DROP DATABASE {name} WITH (FORCE)")


def plain(url: str) -> str:
    return url.removesuffix("&partitions=4")


async def test_commands_of_any_kind_are_in_partitions(url: str) -> None:
    app = make_app(ledger=url)
    app.command(name="put")(lambda value: value)
    app.command(name="auto", key="auto")(lambda value: value)

    @app.command
    async def mark(value: int, ctx: Context) -> int:
        await ctx.commit_point()
        return value

    @app.command(on_crash="transactional")
    async def pay(value: int, ctx: Context) -> int:
        await ctx.db.execute("SELECT 1")
        return value

    async with app:
        for method in ("put", "auto", "mark", "pay"):
            for number in range(8):
                key = None if method == "auto" else f"key-{number}"
                for _ in range(2):
                    answer = await app.handle(call(method, {"value": number}, key=key))
                    assert result(answer) == number
        ledger = await app.ledger()
        assert len(await ledger.list(State.DONE)) == 4 * 8 + 8
    with psycopg.connect(plain(url)) as db:
        parts = db.execute("SELECT DISTINCT tableoid::regclass::text FROM wirecall.ledger")
        assert {part for (part,) in parts} == {f"wirecall.ledger_{nth}" for nth in range(4)}


async def test_every_state_is_listed_and_swept_in_partitions(url: str) -> None:
    store = Store("postgres", plain(url))
    ledger = await open_ledger(url)
    for state in State:
        for number in range(3):
            await in_state(state, ledger, store, structs.replace(ID, key=f"{state}-{number}"))
    assert set((await ledger.counts()).values()) == {3}
    assert [len(await ledger.list(state)) for state in State] == [3] * len(State)
    for state in State:
        for number in range(3):
            store.age(structs.replace(ID, key=f"{state}-{number}"), LEASE + 20 * RETENTION)
    assert await ledger.sweep() == 12, "all but what is unknown"
    assert (await ledger.counts())[State.UNKNOWN] == 6
    await ledger.aclose()


async def test_partitions_are_made_with_the_tables_and_not_later(url: str) -> None:
    await (await open_ledger(plain(url))).aclose()
    with pytest.raises(LedgerDown, match=r"partitions=4, and this ledger has 0(.|\n)*leave it out"):
        await open_ledger(url)


async def test_later_version_migrates_partitions(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = await open_ledger(url)
    record = await granted(ledger)
    number = len(migration.parts()) + 1
    added = {
        f"schema {number}": "ALTER TABLE wirecall.ledger ADD COLUMN newer integer",
        f"index {number} newer_index": "CREATE INDEX newer_index ON wirecall.ledger (newer)",
        f"unused {number} ledger_buried": "DROP INDEX IF EXISTS wirecall.ledger_buried",
    }
    for name, part in added.items():
        monkeypatch.setitem(queue.SQL, name, part)
    assert (await schema_of(url)).is_behind
    await (await open_ledger(url, "update")).aclose()
    assert not (await schema_of(url)).is_behind
    assert await ledger.complete(record.token, outcome_of(), RETENTION)
    assert (await present(ledger)).state is State.DONE
    await ledger.aclose()


def test_migrate_verb_makes_partitions(url: str) -> None:
    ended = invoke("ledger", "migrate", url, "--json")
    assert json.loads(ended.stdout)["result"]["migrated"] is True
    with psycopg.connect(plain(url)) as db:
        rows = db.execute(
            "SELECT c.reloptions FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid "
            "WHERE i.inhparent = 'wirecall.ledger'::regclass"
        ).fetchall()
    assert rows == [(["fillfactor=60"],)] * 4
    asyncio.run(use(url))


async def use(url: str) -> None:
    await (await open_ledger(url, "leave")).aclose()


@pytest.mark.parametrize("number", ["-1", "257", "many"])
async def test_number_of_partitions_is_checked(number: str) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        await open_ledger(f"postgresql://localhost/shop?partitions={number}")
