"""Fixtures of all tests: real servers, started when the first test asks for one, and an empty
ledger of each kind.
"""

import gc
import signal
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import tests.patience  # noqa: F401 -- it sets up generated tests
from tests.clock import LoopClock
from tests.servers import (
    KINDS,
    MEMORIES,
    Postgres,
    Redis,
    RedisCluster,
    ServerMissing,
    Store,
    make_store,
    open_memory,
)
from wirecall.ledger import memory
from wirecall.ledger.base import Ledger

# A process in the background of a shell ignores Ctrl-C, and so do the processes that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
# `nohup` ignores SIGHUP in the same way.
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Escape lone surrogates in a report: some tests log them, and xdist sends reports between
    processes as UTF-8.
    """

    def escaped(value: Any) -> Any:
        if isinstance(value, str):
            return value.encode("utf-8", "backslashreplace").decode()
        if isinstance(value, dict):
            return {escaped(name): escaped(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(escaped, value))
        return value

    return escaped((yield))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "long: takes seconds of its own, so it begins before the others"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run long tests first: a long test at the end of a run would leave all other processes idle."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Turn garbage collection off while tests are imported and collected: all objects stay alive."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Freeze imported objects, so that a test that collects garbage scans only its own objects."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, Any, Any]:
    """Skip a test whose server cannot be installed here: not every Python has a wheel of each."""
    return (yield from skipping())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    return (yield from skipping())


def skipping() -> Generator[None, Any, Any]:
    try:
        return (yield)
    except ServerMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def no_garbage() -> None:
    """Close what tests of other modules dropped. A collection takes long after many tests."""
    gc.collect()


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In place of pytest's: the path of a Unix socket has at most 107 bytes, and pytest's folders
    are deeper than that.
    """
    with TemporaryDirectory(prefix="wirecall-", ignore_cleanup_errors=True) as folder:
        yield Path(folder).resolve()


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> LoopClock:
    return LoopClock(monkeypatch)


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
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Store]:
    """An empty ledger of each kind; `pytest.mark.parametrize("store", [...], indirect=True)` for
    some of them.
    """
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
