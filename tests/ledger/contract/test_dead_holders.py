"""A run whose process died: it counts as unknown at once, and the sweep writes that down after a
minute; every ledger.
"""

import pytest

from tests.ledger import ID, LEASE, RETENTION, claim_of, granted, in_state, outcome_of, present
from tests.ledger.contract import durable_only
from tests.servers import Store
from wirecall.ledger.base import UNKNOWN_AFTER, Ledger, RecordId, State

OTHER = RecordId("alice", "charge", "key-2")


async def test_ledger_counts_expired_lease_as_unknown(ledger: Ledger, store: Store) -> None:
    await granted(ledger)
    await granted(ledger, OTHER)
    store.age(ID, LEASE + 1)
    found = await ledger.counts()
    assert (found[State.UNKNOWN], found[State.RUNNING]) == (1, 1)
    record = await present(ledger)
    assert (record.state, record.standing) == (State.RUNNING, State.UNKNOWN)
    assert (await present(ledger, OTHER)).standing is State.RUNNING


async def test_ledger_lists_expired_lease_as_unknown(ledger: Ledger, store: Store) -> None:
    await granted(ledger)
    await granted(ledger, OTHER)
    store.age(ID, LEASE + 1)
    assert [record.id for record in await ledger.list(State.UNKNOWN)] == [ID]
    assert [record.id for record in await ledger.list(State.RUNNING)] == [OTHER]


async def test_ledger_lists_stored_unknown_beside_expired_lease(
    ledger: Ledger, store: Store
) -> None:
    await granted(ledger)
    store.age(ID, LEASE + 1)
    await in_state(State.UNKNOWN, ledger, store, OTHER)
    assert {record.id for record in await ledger.list(State.UNKNOWN)} == {ID, OTHER}
    assert (await ledger.counts())[State.UNKNOWN] == 2


async def test_ledger_counts_run_before_commit_point_as_running(
    ledger: Ledger, store: Store
) -> None:
    """It did nothing, so a retry runs; an operator has nothing to find out."""
    await granted(ledger, committed=False)
    store.age(ID, LEASE + 1)
    found = await ledger.counts()
    assert (found[State.UNKNOWN], found[State.RUNNING]) == (0, 1)
    assert await ledger.list(State.UNKNOWN) == []
    assert not await ledger.resolve(ID, outcome_of())
    assert not await ledger.resolve(ID, None)
    assert (await ledger.claim(claim_of())).attempts == 2


async def test_ledger_resolves_expired_lease_as_done(ledger: Ledger, store: Store) -> None:
    record = await granted(ledger)
    assert not await ledger.resolve(ID, outcome_of()), "its holder is alive"
    store.age(ID, LEASE + 1)
    assert await ledger.resolve(ID, outcome_of(b'"found"'))
    found = await present(ledger)
    assert found.state is State.DONE
    assert found.outcome == outcome_of(b'"found"')
    assert not await ledger.complete(record.token, outcome_of(b'"late"'), RETENTION)


async def test_ledger_resolves_expired_lease_as_not_done(ledger: Ledger, store: Store) -> None:
    await granted(ledger)
    store.age(ID, LEASE + 1)
    assert await ledger.resolve(ID, None)
    assert await ledger.get(ID) is None


async def test_sweep_stores_unknown_a_minute_after_the_lease(ledger: Ledger, store: Store) -> None:
    record = await granted(ledger)
    store.age(ID, LEASE + 1)
    assert await ledger.sweep() == 0
    store.age(ID, UNKNOWN_AFTER)
    assert await ledger.sweep() == 1
    assert (await present(ledger)).state is State.UNKNOWN
    assert await ledger.sweep() == 0
    assert await ledger.complete(record.token, outcome_of(), RETENTION), "a late truth is welcome"


async def test_sweep_counts_the_minute_from_the_last_heartbeat(
    ledger: Ledger, store: Store
) -> None:
    record = await granted(ledger)
    store.age(ID, LEASE - 1)
    assert await ledger.heartbeat(record.token, LEASE)
    store.age(ID, LEASE + 1)
    assert await ledger.sweep() == 0
    store.age(ID, UNKNOWN_AFTER)
    assert await ledger.sweep() == 1
    assert (await present(ledger)).state is State.UNKNOWN


async def test_sweep_stores_unknown_after_a_commit_point(ledger: Ledger, store: Store) -> None:
    record = await granted(ledger, committed=False)
    assert await ledger.commit_point(record.token, LEASE)
    store.age(ID, LEASE + UNKNOWN_AFTER + 1)
    assert await ledger.sweep() == 1
    assert (await present(ledger)).state is State.UNKNOWN


async def test_sweep_leaves_a_run_before_its_commit_point(ledger: Ledger, store: Store) -> None:
    await granted(ledger, committed=False)
    store.age(ID, LEASE + UNKNOWN_AFTER + 1)
    assert await ledger.sweep() == 0
    store.age(ID, RETENTION)
    assert await ledger.sweep() == 1
    assert await ledger.get(ID) is None


@pytest.mark.parametrize("on_crash", ["rerun", "reconcile"])
async def test_sweep_leaves_commands_that_a_retry_may_run_again(
    on_crash: str, ledger: Ledger, store: Store
) -> None:
    """An operator sees it as unknown, but the next retry runs or reconciles it, as its method
    declares.
    """
    await granted(ledger, on_crash=on_crash)
    store.age(ID, LEASE + UNKNOWN_AFTER + 1)
    assert await ledger.sweep() == 0
    assert (await ledger.counts())[State.UNKNOWN] == 1
    record = await ledger.claim(claim_of(on_crash=on_crash))
    assert (record.state, record.attempts) == (State.RUNNING, 2)
    store.age(ID, LEASE + RETENTION + 1)
    assert await ledger.sweep() == 1
    assert (await present(ledger)).state is State.UNKNOWN


async def test_sweep_follows_the_last_claim_of_a_method_whose_mode_changed(
    ledger: Ledger, store: Store
) -> None:
    await granted(ledger, on_crash="rerun")
    store.age(ID, LEASE + 1)
    assert (await ledger.claim(claim_of(on_crash="reconcile"))).attempts == 2
    store.age(ID, LEASE + UNKNOWN_AFTER + 1)
    assert await ledger.sweep() == 0
    assert (await ledger.claim(claim_of(on_crash="unknown"))).state is State.UNKNOWN


@durable_only
async def test_ledger_shows_a_dead_holder_to_another_process(store: Store) -> None:
    first = await store.open()
    await granted(first)
    await first.aclose()
    store.age(ID, LEASE + UNKNOWN_AFTER + 1)
    second = await store.open()
    try:
        assert (await second.counts())[State.UNKNOWN] == 1
        assert await second.sweep() == 1
        assert (await present(second)).state is State.UNKNOWN
    finally:
        await second.aclose()
