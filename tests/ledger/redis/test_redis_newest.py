"""The order of time in Redis, in which verbs read records: it is kept, mended and cleaned."""

import asyncio
import os

import pytest
from msgspec import structs

from tests.ledger import ID, LEASE, RETENTION, granted, outcome_of
from tests.servers import Redis, Store, redis_key
from wirecall.ledger.base import Ledger, Only, RecordId, State, open_ledger
from wirecall.ledger.redis import ledger as redis_ledger

pytestmark = pytest.mark.parametrize("store", ["redis"], indirect=True)

IDS = [RecordId("alice", "charge", f"key-{number}") for number in range(5)]


def prefix_of(store: Store) -> str:
    return store.url.partition("?prefix=")[2]


def noted(store: Store, server: Redis) -> set[bytes]:
    found: list[bytes] = server.ask("ZRANGE", f"{prefix_of(store)}newest:charge", 0, -1)
    return set(found)


async def test_sweep_notes_records_of_the_version_before(
    store: Store, ledger: Ledger, redis_server: Redis
) -> None:
    """They are not in the list until then, or in another state."""
    records = [await granted(ledger, id) for id in IDS]
    redis_server.ask("DEL", f"{prefix_of(store)}newest:charge")
    assert await ledger.list() == []
    redis_server.ask("HSET", f"{prefix_of(store)}alice:charge:key-0", "state", "unknown")
    await ledger.sweep()
    assert {record.id for record in await ledger.list()} == set(IDS)
    assert [record.id for record in await ledger.list(State.UNKNOWN)] == [records[0].id]


async def test_names_of_removed_records_are_forgotten(
    store: Store, ledger: Ledger, redis_server: Redis
) -> None:
    """By a release; by the next burial and by the sweep if Redis itself removed them."""
    tokens = [(await granted(ledger, id)).token for id in IDS]
    assert await ledger.release(tokens[0])
    assert len(noted(store, redis_server)) == 4
    for id, token in zip(IDS[1:], tokens[1:], strict=True):
        assert await ledger.complete(token, outcome_of(), RETENTION)
        store.age(id, RETENTION + 1)
    assert await ledger.sweep(limit=3) == 3
    buried = [record.id for record in await ledger.list(State.TOMBSTONE)]
    for id in buried:
        redis_server.ask("DEL", f"{prefix_of(store)}alice:charge:{id.key}")
    assert await ledger.list(State.TOMBSTONE) == []
    assert await ledger.sweep() == 1
    assert len(noted(store, redis_server)) == 1
    assert (await ledger.counts())[State.TOMBSTONE] == 1


async def test_names_are_forgotten_behind_records_that_are_kept_longer(
    store: Store, ledger: Ledger, redis_server: Redis
) -> None:
    """As after a deployment with a shorter retention: the oldest tombstones are the last to go."""
    kept = [structs.replace(ID, key=f"kept-{number}") for number in range(redis_ledger.PAGE + 1)]
    records = await asyncio.gather(*(granted(ledger, id) for id in kept))
    place = redis_ledger.RANKS[State.TOMBSTONE] * redis_ledger.RANK
    newest = f"{prefix_of(store)}newest:charge"
    for record in records:
        name = f"{prefix_of(store)}alice:charge:{record.id.key}"
        redis_server.ask("HSET", name, "state", "tombstone")
        redis_server.ask("ZADD", newest, place, name)
    gone = [str(word) for number in range(1000) for word in (place + 1 + number, f"gone-{number}")]
    redis_server.ask("ZADD", newest, *gone)
    await ledger.sweep()
    names = noted(store, redis_server)
    assert len([name for name in names if b":kept-" in name]) == len(kept)
    assert len(names) < 2 * len(kept)


async def test_caller_with_few_records_is_found_among_many(
    store: Store, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server looks at a few names at a time."""
    monkeypatch.setattr(redis_ledger, "WALK", 2)
    rare = [RecordId("se*ldom", "charge", f"key-{number}") for number in range(3)]
    for id in rare:
        await granted(ledger, id)
        store.age(id, 100)
    await asyncio.gather(*(granted(ledger, id) for id in IDS))
    others = [RecordId("b", "charge", f"key-{number}") for number in range(20)]
    await asyncio.gather(*(granted(ledger, id) for id in others))
    of_rare = Only(caller="se*ldom")
    found = await ledger.list(only=of_rare)
    assert {record.id for record in found} == set(rare)
    pages = [(await ledger.list(limit=1, only=of_rare))[0]]
    for _ in rare[1:]:
        pages += await ledger.list(limit=1, only=of_rare, after=pages[-1].place)
    assert pages == found
    assert await ledger.list(only=of_rare, after=pages[-1].place) == []
    assert await ledger.list(only=Only(caller="nobody")) == []


async def test_caller_whose_records_began_together_is_found_once(
    store: Store, ledger: Ledger, redis_server: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step may end among names of one moment."""
    monkeypatch.setattr(redis_ledger, "WALK", 2)
    for id in IDS:
        await granted(ledger, id)
    moment = int((await ledger.list())[0].started_at * 1e6)
    for name in noted(store, redis_server):
        redis_server.ask("HSET", name.decode(), "started_at", moment)
        place = moment - redis_ledger.EPOCH
        redis_server.ask("ZADD", f"{prefix_of(store)}newest:charge", place, name.decode())
    found = await ledger.list(only=Only(caller="alice"))
    assert sorted(record.id for record in found) == IDS


async def test_ledger_that_is_not_migrated_lists_all_records(
    store: Store, ledger: Ledger, redis_server: Redis
) -> None:
    for id in IDS:
        record = await granted(ledger, id)
        assert await ledger.begin_task(record.token, f"task-{id.key}", b"{}", 100)
        store.age(id, LEASE + 1)
    for name in ("meta", "methods", "newest:charge", "tasks-newest"):
        redis_server.ask("DEL", f"{prefix_of(store)}{name}")
    older = await open_ledger(store.url, "read")
    migrated = await open_ledger(store.url, "update")
    for each in (older, migrated):
        assert {record.id for record in await each.list(State.UNKNOWN)} == set(IDS)
        assert {task.record for task in await each.list_tasks()} == set(IDS)
        assert (await each.counts())[State.UNKNOWN] == len(IDS)
        await each.aclose()


async def test_tombstone_gives_the_memory_of_a_long_payload_back(
    redis_server: Redis, ledger: Ledger, store: Store
) -> None:
    """Redis keeps a hash in another form once a field of it was long."""
    sizes: list[int] = []
    for payload in (b"1", os.urandom(100_000)):
        id = structs.replace(ID, key=str(len(payload)))
        record = await granted(ledger, id)
        assert await ledger.complete(record.token, outcome_of(payload), RETENTION)
        store.age(id, RETENTION + 1)
        assert await ledger.sweep() == 1
        with redis_key(store.url, f"alice:charge:{id.key}") as (client, name):
            size = client.memory_usage(name)
            assert isinstance(size, int)
            sizes.append(size)
    short, long = sizes
    assert abs(short - long) < 32
    assert short < 450
