"""Fixtures of the tests of faults: effects, the answers to callers, and ledgers behind proxies."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.faults import Caller, Effects, check
from tests.faults.fronts import Front, Two, target
from tests.faults.proxy import Proxy
from tests.servers import make_store


@pytest.fixture
def effects(tmp_path: Path) -> Effects:
    return Effects(tmp_path / "effects")


@pytest.fixture
def caller(effects: Effects) -> Iterator[Caller]:
    """At the end of the test, the fixture compares its answers with the effects."""
    caller = Caller()
    yield caller
    check(caller.history, effects.all(), most=caller.most)


@pytest.fixture(params=["redis", "postgres"])
def front(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Front]:
    store = make_store(request.param, tmp_path, request.getfixturevalue)
    with Proxy(target(store)) as proxy:
        yield Front(request.param, store, proxy)


@pytest.fixture
async def two(front: Front, effects: Effects, caller: Caller) -> AsyncIterator[Two]:
    two = Two(front, effects)
    async with two.cut, two.safe:
        for app in (two.cut, two.safe):  # scripts are loaded, connections are open
            for method in ("charge", "careful"):
                assert (await caller.call(app, method, f"{method}-{id(app)}")).error is None
        yield two
