"""`wirecall.testing.ledger(url)`: an empty ledger for one test on every store, removed at the end."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis

from wirecall import App, UsageError, connect, testing


def counted(url: str, paid: list[int]) -> int:
    """Return how many effects a command had after it was sent twice with one key."""
    app = App("shop", ledger=url)

    @app.command
    def charge(cents: int) -> None:
        paid.append(cents)

    async def run() -> None:
        async with connect(app) as client:
            for _ in range(2):
                await client.call("charge", {"cents": 5}, key="k-1")
        await app.aclose()

    asyncio.run(run())
    return len(paid)


STORES = pytest.mark.parametrize("store", ["sqlite", "redis", "postgres"], indirect=True)


def test_ledger_for_a_test_in_memory_belongs_to_its_app() -> None:
    paid: list[int] = []
    for count in (1, 2):
        with testing.ledger() as url:
            assert counted(url, paid) == count


@STORES
def test_ledger_for_a_test_is_fresh_each_time(store: Any) -> None:
    """The same key is a new command in each ledger."""
    paid: list[int] = []
    with testing.ledger(store.url) as first, testing.ledger(store.url) as second:
        assert counted(first, paid) == 1
        assert counted(second, paid) == 2
    with testing.ledger(store.url) as third:
        assert counted(third, paid) == 3
    # The ledger of the URL itself has no record of it.
    assert counted(store.url, paid) == 4


def left(kind: str) -> Callable[[str], list[Any]]:
    """Return the function that lists the remains of a ledger at a URL."""

    def of_sqlite(url: str) -> list[Any]:
        path = Path(url.removeprefix("sqlite:"))
        return [path.parent] if path.parent.exists() else []

    def of_redis(url: str) -> list[Any]:
        base, _, query = url.partition("?")
        prefix = query.rpartition("prefix=")[2]
        with redis.Redis.from_url(base) as client:
            return list(client.scan_iter(match=f"{prefix}*"))

    def of_postgres(url: str) -> list[Any]:
        place, _, query = url.partition("?")
        host, _, name = place.rpartition("/")
        with psycopg.connect(f"{host}/postgres?{query}") as connection:
            found = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [name])
            return found.fetchall()

    return {"sqlite": of_sqlite, "redis": of_redis, "postgres": of_postgres}[kind]


@STORES
def test_ledger_for_a_test_is_removed_at_the_end(store: Any) -> None:
    """Also if the test fails."""
    rest = left(store.kind)
    made: list[str] = []

    def fail() -> None:
        with testing.ledger(store.url) as url:
            made.append(url)
            counted(url, [])
            assert rest(url) != []
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert rest(made[0]) == []


def test_ledger_for_a_test_without_a_server_says_how_to_fix_it() -> None:
    for url, fix in (
        ("redis://127.0.0.1:1/0", "start the server"),
        ("postgresql://127.0.0.1:1/shop?connect_timeout=2", "may create databases"),
        ("file:ledger", "must begin with one of"),
    ):
        with pytest.raises(UsageError, match=fix), testing.ledger(url):
            pass


def test_ledger_for_a_test_needs_a_string() -> None:
    number: Any = 5
    with pytest.raises(UsageError, match="url must be a string, got int"), testing.ledger(number):
        pass
