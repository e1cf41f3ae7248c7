"""A transaction on a record under a lease: the record of a task, and its handler's writes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from tests.ledger import ID, LEASE, RETENTION, claim_of, outcome_of, present, same
from tests.ledger.contract import TTL
from tests.ledger.effects import Effects, only_postgres, transactional
from tests.servers import Store
from wirecall.ledger.base import Claim, Ledger, Record, State, Transactional, TryAgain

WAIT = 20.0

only_sqlite = pytest.mark.parametrize("store", ["sqlite"], indirect=True)


@pytest.fixture
def effects(store: Store, ledger: Ledger) -> Effects:
    return Effects(store)


@pytest.fixture
async def other(store: Store) -> AsyncIterator[Ledger]:
    """A second handle on the same records."""
    ledger = await store.open()
    yield ledger
    await ledger.aclose()


@pytest.fixture
def claim() -> Claim:
    return claim_of(on_crash="transactional")


@pytest.fixture
async def held(ledger: Ledger, claim: Claim) -> Record:
    """The record of a task."""
    record = await ledger.claim(claim)
    assert await ledger.begin_task(record.token, "task", b"{}", TTL)
    return record


def transaction(ledger: Ledger, claim: Claim) -> Any:
    return cast(Transactional, ledger).transaction(claim, WAIT)


@transactional
async def test_transaction_opens_on_its_record_and_completes_it(
    ledger: Ledger, other: Ledger, effects: Effects, claim: Claim, held: Record
) -> None:
    async with transaction(ledger, claim) as opened:
        assert same(opened.record, held)
        await effects.act(opened)
        assert effects.number == 0
        assert (await present(other)).state is State.RUNNING
        await opened.complete(outcome_of(), RETENTION, undo=False)
    done = await present(other)
    assert (done.state, done.outcome, done.token, done.attempts) == (
        State.DONE,
        outcome_of(),
        held.token,
        1,
    )
    assert effects.number == 1
    assert (task := await ledger.task("task")) is not None and same(task.now, done)


@transactional
async def test_domain_error_undoes_the_writes_and_keeps_the_outcome(
    ledger: Ledger, effects: Effects, claim: Claim, held: Record
) -> None:
    async with transaction(ledger, claim) as opened:
        await effects.act(opened)
        await opened.complete(outcome_of(b"{}", "error"), RETENTION, undo=True)
    assert (await present(ledger)).outcome == outcome_of(b"{}", "error")
    assert effects.number == 0


@transactional
async def test_transaction_without_an_outcome_undoes_its_writes_and_keeps_the_record(
    ledger: Ledger, effects: Effects, claim: Claim, held: Record
) -> None:
    """The handler asked a question or failed: its holder suspends, lapses or releases the record,
    or tries again.
    """

    async def fail() -> None:
        async with transaction(ledger, claim) as opened:
            await effects.act(opened)
            raise ZeroDivisionError

    async with transaction(ledger, claim) as opened:
        await effects.act(opened)
    with pytest.raises(ZeroDivisionError):
        await fail()
    assert same(await present(ledger), held)
    assert effects.number == 0
    async with transaction(ledger, claim) as opened:
        await effects.act(opened)
        await opened.complete(outcome_of(), RETENTION, undo=False)
    assert effects.number == 1


@transactional
@pytest.mark.parametrize("steps", range(4))
async def test_caller_that_is_cancelled_leaves_the_record_as_it_was(
    steps: int, ledger: Ledger, effects: Effects, claim: Claim, held: Record
) -> None:
    async def handle() -> None:
        async with transaction(ledger, claim) as opened:
            await effects.act(opened)
            await asyncio.Event().wait()

    task = asyncio.create_task(handle())
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert await ledger.heartbeat(held.token, LEASE)
    assert same(await present(ledger), held)
    assert effects.number == 0


@transactional
async def test_transaction_opens_after_the_lease_until_another_run_claims_the_record(
    ledger: Ledger, store: Store, effects: Effects, claim: Claim, held: Record
) -> None:
    store.age(ID, LEASE + 1)
    async with transaction(ledger, claim) as opened:
        assert opened.record.token == held.token
        await effects.act(opened)
        await opened.complete(outcome_of(), RETENTION, undo=False)
    assert (await present(ledger)).state is State.DONE
    assert effects.number == 1


@transactional
async def test_transaction_on_a_record_under_another_claim_only_returns_the_record(
    ledger: Ledger, claim: Claim, held: Record
) -> None:
    async with transaction(ledger, claim_of(on_crash="transactional")) as found:
        assert same(found.record, held)
    assert same(await present(ledger), held)


@transactional
@pytest.mark.parametrize("state", [State.WAITING, State.DONE, State.UNKNOWN])
async def test_transaction_on_a_record_that_does_not_run_only_returns_the_record(
    state: State, ledger: Ledger, claim: Claim, held: Record
) -> None:
    if state is State.WAITING:
        assert await ledger.suspend(held.token, outcome_of(), RETENTION)
    elif state is State.DONE:
        assert await ledger.complete(held.token, outcome_of(), RETENTION)
    else:
        assert await ledger.abandon(held.token)
    before = await present(ledger)
    async with transaction(ledger, claim) as found:
        assert same(found.record, before)
    assert same(await present(ledger), before)


@only_postgres
async def test_lease_can_be_renewed_during_a_transaction(
    ledger: Ledger, other: Ledger, store: Store, effects: Effects, claim: Claim, held: Record
) -> None:
    async with transaction(ledger, claim) as opened:
        await effects.act(opened)
        store.age(ID, LEASE - 5)
        for handle in (ledger, other):
            assert await handle.heartbeat(held.token, LEASE)
        assert (await present(other)).lease_left > LEASE / 2
        assert (await other.claim(claim_of(on_crash="rerun"))).token == held.token
        assert not await other.orphans()
        await opened.complete(outcome_of(), RETENTION, undo=False)
    assert (await present(ledger)).state is State.DONE
    assert effects.number == 1


@only_postgres
@pytest.mark.parametrize("end", ["taken over", "removed", "done"])
async def test_transaction_undoes_its_writes_if_its_claimer_has_lost_the_record(
    end: str,
    ledger: Ledger,
    other: Ledger,
    store: Store,
    effects: Effects,
    claim: Claim,
    held: Record,
) -> None:
    async with transaction(ledger, claim) as opened:
        await effects.act(opened)
        if end == "taken over":
            store.age(ID, LEASE + 1)
            assert (await other.claim(claim_of(on_crash="transactional"))).attempts == 2
        elif end == "removed":
            assert await other.release(held.token)
        else:
            assert await other.complete(held.token, outcome_of(b'"by another way"'), RETENTION)
        before = await other.get(ID)
        with pytest.raises(TryAgain):
            await opened.complete(outcome_of(), RETENTION, undo=False)
    assert same(await ledger.get(ID), before)
    assert effects.number == 0


@only_postgres
async def test_transaction_completes_a_record_that_became_unknown(
    ledger: Ledger, other: Ledger, store: Store, effects: Effects, claim: Claim, held: Record
) -> None:
    async with transaction(ledger, claim) as opened:
        await effects.act(opened)
        store.age(ID, LEASE + 1)
        assert (await other.claim(claim_of(on_crash="unknown"))).state is State.UNKNOWN
        await opened.complete(outcome_of(), RETENTION, undo=False)
    assert (await present(ledger)).outcome == outcome_of()
    assert effects.number == 1


@only_sqlite
async def test_transaction_in_sqlite_blocks_all_other_writers(
    ledger: Ledger, store: Store, effects: Effects, claim: Claim, held: Record
) -> None:
    """So the lease cannot be renewed, but another run cannot claim the record either."""
    async with transaction(ledger, claim) as opened:
        await effects.act(opened)
        beat = asyncio.create_task(ledger.heartbeat(held.token, LEASE))
        claimed = asyncio.create_task(
            ledger.claim(claim_of(ID, on_crash="rerun", fingerprint=held.fingerprint))
        )
        await opened.complete(outcome_of(), RETENTION, undo=False)
    assert not await beat
    assert (await claimed).state in (State.RUNNING, State.DONE)
    assert (await present(ledger)).outcome == outcome_of()
