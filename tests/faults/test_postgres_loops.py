"""The connections to PostgreSQL live as long as their event loop, for every kind of end."""

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.faults import PATIENCE
from tests.faults.proxy import Proxy
from tests.servers import Postgres, Store, make_store


@pytest.fixture
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Store:
    return make_store("postgres", tmp_path, request.getfixturevalue)


@pytest.fixture
def proxy(postgres_server: Postgres) -> Iterator[Proxy]:
    with Proxy(f"{postgres_server.folder}/.s.PGSQL.5432") as proxy:
        yield proxy


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run as a program does, but with a time limit."""
    loop = threading.Thread(target=asyncio.run, args=[work], daemon=True)
    loop.start()
    loop.join(PATIENCE)
    assert not loop.is_alive(), "the loop does not end"


def url_of(proxy: Proxy, name: str) -> str:
    options = f"sslmode=disable&gssencmode=disable&connect_timeout=2&application_name={name}"
    return f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres?{options}"


def test_loop_that_ends_closes_the_connections_of_an_open_ledger(
    store: Store, proxy: Proxy
) -> None:
    async def leave_open() -> None:
        ledger = await Store("postgres", url_of(proxy, "left-open") + "&pool=1").open()
        await ledger.counts()
        assert sessions() > 0

    def sessions() -> int:
        question = "SELECT FROM pg_stat_activity WHERE application_name = 'left-open'"
        with psycopg.connect(store.url) as db:
            return db.execute(question).rowcount

    run(leave_open())
    ends_at = time.monotonic() + PATIENCE
    while sessions():
        assert time.monotonic() < ends_at, "sessions remain"
        time.sleep(0.01)


@pytest.mark.parametrize("when", ["opening", "later"])
def test_loop_may_end_while_a_connection_is_being_made(
    when: str, store: Store, proxy: Proxy
) -> None:
    """psycopg_pool's worker takes a cancellation for a failed attempt, and would wait for a task
    forever.
    """

    async def leave() -> None:
        stalled = Store("postgres", url_of(proxy, "stalled"))
        if when == "opening":
            proxy.stall("up")
            await asyncio.wait([asyncio.create_task(stalled.open())], timeout=0.1)
            return
        ledger = await stalled.open()
        proxy.stall("up")
        proxy.cut()
        over: set[asyncio.Task[Any]] = {asyncio.create_task(ledger.counts())}
        while over:  # at first it may not know that the connection was cut
            over, _ = await asyncio.wait([asyncio.create_task(ledger.counts())], timeout=0.1)

    run(leave())
