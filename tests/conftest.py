"""Fixtures of all tests: real servers, started when the first test asks for one, and an empty ledger of each kind."""

import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.servers import KINDS, MEMORIES, Postgres, Redis, RedisCluster, Store, make_store, open_memory
from wirecall.ledger import memory
from wirecall.ledger.base import Ledger

# Who is started in the background of a shell ignores Ctrl-C, and so do the processes that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Redis]:
    server = Redis()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def cluster_server() -> Iterator[RedisCluster]:
    cluster = RedisCluster(dead_after=3000)  # a busy machine is not a dead one
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    server = Postgres()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An empty ledger of each kind; `pytest.mark.parametrize("store", [...], indirect=True)` for some of them."""
    monkeypatch.setattr(memory, "open_url", open_memory)
    yield make_store(request.param, tmp_path, request.getfixturevalue)
    MEMORIES.clear()


@pytest.fixture
def ledger_url(store: Store) -> str:
    return store.url


@pytest.fixture
async def ledger(store: Store) -> AsyncIterator[Ledger]:
    opened = await store.open()
    yield opened
    await opened.aclose()
