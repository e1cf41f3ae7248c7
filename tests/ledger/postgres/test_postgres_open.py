"""Records of PostgreSQL that run, wait or are unknown: they are found without an index of states."""

from typing import Any

import psycopg
import pytest
from msgspec import structs

from tests.ledger import ID, LEASE, RETENTION, granted, in_state, outcome_of, present
from tests.servers import Store
from wirecall.ledger.base import Ledger, Only, State
from wirecall.ledger.postgres import ledger as postgres_ledger

pytestmark = pytest.mark.parametrize("store", ["postgres"], indirect=True)

DAY = 86_400.0
OPEN = (State.RUNNING, State.WAITING, State.UNKNOWN)


def ask(store: Store, statement: str) -> Any:
    with psycopg.connect(store.url, autocommit=True) as db:
        cursor = db.execute(statement.encode())
        return cursor.fetchall() if cursor.description else None


@pytest.mark.parametrize("is_swept", [False, True])
async def test_open_records_are_found_before_and_behind_the_front(
    is_swept: bool, ledger: Ledger, store: Store
) -> None:
    ids = {state: structs.replace(ID, key=state.value) for state in OPEN}
    for state, id in ids.items():
        await in_state(state, ledger, store, id, lease=DAY, retention=DAY)
    done = structs.replace(ID, key="done")
    await in_state(State.DONE, ledger, store, done)
    for id in (*ids.values(), done):
        store.age(id, 100)
    if is_swept:
        assert await ledger.sweep() == 0
        assert ask(store, "SELECT count(*) FROM wirecall.open") == [(3,)]
    for state, id in ids.items():
        assert [record.id for record in await ledger.list(state)] == [id]
        seldom = await ledger.list(state, only=Only(caller="alice", method="charge"))
        assert [record.id for record in seldom] == [id]
        assert (await ledger.counts())[state] == 1
    assert len(await ledger.list()) == 4


async def test_sweep_forgets_open_records_that_have_ended(ledger: Ledger, store: Store) -> None:
    record = await granted(ledger, lease=DAY)
    store.age(ID, 100)
    assert await ledger.sweep() == 0
    assert ask(store, "SELECT key FROM wirecall.open") == [("key-1",)]
    assert await ledger.complete(record.token, outcome_of(), RETENTION)
    assert await ledger.list(State.RUNNING) == []
    assert (await ledger.counts())[State.DONE] == 1
    assert await ledger.sweep() == 0
    assert ask(store, "SELECT key FROM wirecall.open") == []


async def test_key_that_is_used_again_is_counted_once(ledger: Ledger, store: Store) -> None:
    """Its old name stands behind the front."""
    record = await granted(ledger, lease=DAY)
    store.age(ID, 100)
    assert await ledger.sweep() == 0
    assert await ledger.release(record.token)
    await granted(ledger)
    assert len(await ledger.list(State.RUNNING)) == 1
    assert (await ledger.counts())[State.RUNNING] == 1


async def test_run_whose_holder_died_behind_the_front_becomes_unknown(
    ledger: Ledger, store: Store
) -> None:
    await granted(ledger, lease=DAY)
    store.age(ID, 100)
    assert await ledger.sweep() == 0
    ask(
        store,
        "UPDATE wirecall.ledger SET lease_until = clock_timestamp() - interval '61 s', "
        "expires_at = clock_timestamp() - interval '1 s'",
    )
    assert await ledger.sweep() == 1
    assert (await present(ledger)).state is State.UNKNOWN


async def test_record_that_the_version_before_wrote_is_swept_in_its_time(
    ledger: Ledger, store: Store
) -> None:
    """That version does not write when a record is due, or that it is buried."""
    await in_state(State.DONE, ledger, store)
    ask(store, "UPDATE wirecall.ledger SET due = DEFAULT")
    assert await ledger.sweep() == 0
    assert ask(store, "SELECT due = expires_at, buried FROM wirecall.ledger") == [(True, False)]
    ask(
        store,
        "UPDATE wirecall.ledger SET state = 'tombstone', payload = NULL, due = DEFAULT, "
        "expires_at = clock_timestamp() + interval '1 day'",
    )
    assert await ledger.sweep() == 0
    assert (await ledger.counts())[State.TOMBSTONE] == 1
    store.age(ID, DAY + 1)
    assert await ledger.sweep() == 1
    assert await ledger.get(ID) is None


async def test_front_passes_many_records_in_one_sweep(
    ledger: Ledger, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_ledger, "STEP", 3)
    for number in range(10):
        await granted(ledger, structs.replace(ID, key=str(number)), lease=LEASE * 100)
    ask(store, "UPDATE wirecall.ledger SET started_at = now() - interval '2 minutes'")
    assert await ledger.sweep() == 0
    assert ask(store, "SELECT count(*) FROM wirecall.open") == [(10,)]


async def test_open_records_are_found_after_the_clock_went_back(
    ledger: Ledger, store: Store
) -> None:
    """As after a failover to a host whose clock is behind: they begin before the fronts."""
    await granted(ledger, lease=DAY)
    store.age(ID, 100)
    assert await ledger.sweep() == 0
    ask(store, "UPDATE wirecall.fronts SET reached = clock_timestamp() + interval '1 hour'")
    later = structs.replace(ID, key="later")
    await granted(ledger, later, lease=DAY)
    assert await ledger.sweep() == 0
    assert {record.id for record in await ledger.list(State.RUNNING)} == {ID, later}
    assert (await ledger.counts())[State.RUNNING] == 2
    ask(
        store,
        "UPDATE wirecall.ledger SET lease_until = clock_timestamp() - interval '61 s', "
        "expires_at = clock_timestamp() - interval '1 s'",
    )
    assert await ledger.sweep() == 2
    assert (await ledger.counts())[State.UNKNOWN] == 2


@pytest.mark.parametrize("state", OPEN)
async def test_sweep_notes_an_open_record_that_the_front_has_missed(
    state: State, ledger: Ledger, store: Store
) -> None:
    """Its commit took longer than the front waits, because a replica had to confirm it."""
    await in_state(state, ledger, store, lease=DAY, retention=DAY)
    store.age(ID, 100)
    assert await ledger.sweep() == 0
    ask(store, "DELETE FROM wirecall.open")
    assert await ledger.list(state) == []
    ask(store, "UPDATE wirecall.ledger SET due = clock_timestamp()")
    assert await ledger.sweep() == 0
    assert [record.id for record in await ledger.list(state)] == [ID]
    assert (await ledger.counts())[state] == 1


async def test_sweep_notes_a_run_that_becomes_unknown_when_it_is_due(
    ledger: Ledger, store: Store
) -> None:
    await granted(ledger)
    store.age(ID, 100)
    assert await ledger.sweep() == 1
    assert (await present(ledger)).state is State.UNKNOWN
    ask(store, "DELETE FROM wirecall.open")
    ask(
        store,
        "UPDATE wirecall.ledger SET state = 'running', due = clock_timestamp(), "
        "expires_at = clock_timestamp()",
    )
    assert await ledger.sweep() == 1
    assert (await ledger.counts())[State.UNKNOWN] == 1
