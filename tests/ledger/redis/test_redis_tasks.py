"""Tasks in Redis: their slots are not those of their records; the sets of open tasks are only a
hint.
"""

from contextlib import suppress
from typing import Any

import pytest
from msgspec import structs

from tests.ledger import ID, RETENTION, granted, outcome_of
from tests.ledger.contract import TTL
from tests.servers import Store, redis_key
from wirecall.ledger.base import Ledger, State
from wirecall.ledger.redis import ledger as redis_ledger
from wirecall.ledger.redis.connection import Connections
from wirecall.ledger.redis.ledger import SCRIPTS

pytestmark = pytest.mark.parametrize("store", ["redis", "cluster"], indirect=True)


def open_tasks(store: Store) -> int:
    """The number of members of all sets of open tasks."""
    number = 0
    for shard in range(16):
        with suppress(AssertionError), redis_key(store.url, f"tasks-{shard}") as (client, name):
            number += int(client.zcard(name))
    return number


async def test_sets_of_open_tasks_drop_tasks_that_ended_or_expired(
    ledger: Ledger, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each set takes more than one look."""
    monkeypatch.setattr(redis_ledger, "PAGE", 5)
    names = [f"task {number}" for number in range(200)]
    for number, name in enumerate(names):
        record = await granted(ledger, structs.replace(ID, key=name))
        assert await ledger.begin_task(record.token, name, b"{}", TTL)
        assert await ledger.lapse(record.token)
        if number % 4 == 0:
            task = await ledger.task(name)
            assert task is not None and await ledger.change_task(
                structs.replace(task, is_over=True)
            )
        elif number % 4 == 1:
            store.age_task(name, TTL + 1)
    assert open_tasks(store) == len(names)
    left = [name for number, name in enumerate(names) if number % 4 > 1]
    assert sorted(await ledger.orphans(limit=1000)) == sorted(left)
    assert open_tasks(store) == len(left)


async def test_task_and_its_record_are_read_consistently(
    ledger: Ledger, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process ends both between the reads, the task first: it never was DONE with the old
    document.
    """
    record = await granted(ledger)
    assert await ledger.begin_task(record.token, "task", b"works", TTL)
    task = await ledger.task("task")
    assert task is not None
    other = await store.open()
    ask = Connections.ask
    looks = 0

    async def ask_late(self: Connections, name: bytes, command: Any, *, writes: bool) -> Any:
        nonlocal looks
        if SCRIPTS["get"][1] in command:
            looks += 1
            if looks == 1:
                assert await other.change_task(structs.replace(task, document=b"done"))
                assert await other.complete(record.token, outcome_of(), RETENTION)
        return await ask(self, name, command, writes=writes)

    monkeypatch.setattr(Connections, "ask", ask_late)
    seen = await ledger.task("task")
    monkeypatch.undo()
    assert seen is not None and seen.now is not None
    assert (seen.document, seen.now.state, looks) == (b"done", State.DONE, 2)
    await other.aclose()


async def test_task_that_expires_before_its_record_is_read_is_not_found(
    ledger: Ledger, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ttl ends between the reads, its record continues:

    DONE with a working task never existed.
    """
    record = await granted(ledger)
    assert await ledger.begin_task(record.token, "task", b"works", TTL)
    other = await store.open()
    ask = Connections.ask

    async def ask_late(self: Connections, name: bytes, command: Any, *, writes: bool) -> Any:
        if SCRIPTS["get"][1] in command:
            store.age_task("task", TTL + 1)
            assert await other.complete(record.token, outcome_of(), RETENTION)
        return await ask(self, name, command, writes=writes)

    monkeypatch.setattr(Connections, "ask", ask_late)
    assert await ledger.task("task") is None
    monkeypatch.undo()
    await other.aclose()


async def test_record_that_names_an_unwritten_task_has_no_task(
    ledger: Ledger, store: Store
) -> None:
    """Its holder ended in the middle of `begin_task`, and no caller has received that task."""
    record = await granted(ledger)
    assert await ledger.begin_task(record.token, "task", b"{}", TTL)
    with redis_key(store.url, "task:task") as (client, name):
        client.delete(name)
    assert await ledger.task_of(ID) is None
    assert await ledger.task("task") is None
    assert await ledger.begin_task(record.token, "task", b"again", TTL)
    assert (task := await ledger.task_of(ID)) is not None and task.document == b"again"
