"""A transaction on a record that its claimer already holds under a lease: the record of a task, and its handler's writes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any, cast

import apsw
import psycopg
import pytest

from tests.ledger import ID, LEASE, RETENTION, claim_of, outcome_of, present, same
from tests.ledger.contract import TTL
from tests.servers import TRANSACTIONAL, Store
from wirecall.ledger.base import Claim, Ledger, Record, State, Transaction, Transactional, TryAgain

WAIT = 20.0

transactional = pytest.mark.parametrize("store", TRANSACTIONAL, indirect=True)
only_postgres = pytest.mark.parametrize("store", ["postgres"], indirect=True)
only_sqlite = pytest.mark.parametrize("store", ["sqlite"], indirect=True)


class Effects:
    """A table beside the ledger."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.ask("CREATE TABLE IF NOT EXISTS effects (cents integer)")
        self.ask("DELETE FROM effects")

    async def act(self, transaction: Transaction) -> None:
        inserted = transaction.db.execute("INSERT INTO effects VALUES (5)")
        if self._store.kind == "postgres":
            await inserted

    @property
    def number(self) -> int:
        return cast(int, self.ask("SELECT count(*) FROM effects")[0][0])

    def ask(self, statement: str) -> Any:
        if self._store.kind == "sqlite":
            with closing(apsw.Connection(self._store.url.removeprefix("sqlite:"))) as db:
                return db.execute(statement).fetchall()
        with psycopg.connect(self._store.url, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else None


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
async def test_it_opens_on_the_record_and_completes_it(
    ledger: Ledger, other: Ledger, effects: Effects, claim: Claim, held: Record
) -> None:
    async with transaction(ledger, claim) as opened:
        assert same(opened.record, held)
        await effects.act(opened)
        assert effects.number == 0
        assert (await present(other)).state is State.RUNNING
        await opened.complete(outcome_of(), RETENTION, undo=False)
    done = await present(other)
    assert (done.state, done.outcome, done.token, done.attempts) == (State.DONE, outcome_of(), held.token, 1)
    assert effects.number == 1
    assert (task := await ledger.task("task")) is not None and same(task.now, done)


@transactional
async def test_a_domain_error_undoes_the_writes_and_keeps_the_outcome(
    ledger: Ledger, effects: Effects, claim: Claim, held: Record
) -> None:
    async with transaction(ledger, claim) as opened:
        await effects.act(opened)
        await opened.complete(outcome_of(b"{}", "error"), RETENTION, undo=True)
    assert (await present(ledger)).outcome == outcome_of(b"{}", "error")
    assert effects.number == 0


@transactional
async def test_without_an_outcome_the_writes_are_undone_and_the_record_runs_on(
    ledger: Ledger, effects: Effects, claim: Claim, held: Record
) -> None:
    """The handler asked a question or failed: its holder suspends, lapses or releases the record, or tries again."""

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
async def test_a_caller_that_is_cancelled_leaves_the_record_as_it_was(
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
async def test_it_opens_after_the_lease_too_as_long_as_another_run_has_not_claimed_the_record(
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
async def test_a_record_under_another_claim_is_only_given_back(ledger: Ledger, claim: Claim, held: Record) -> None:
    async with transaction(ledger, claim_of(on_crash="transactional")) as found:
        assert same(found.record, held)
    assert same(await present(ledger), held)


@transactional
@pytest.mark.parametrize("state", [State.WAITING, State.DONE, State.UNKNOWN])
async def test_a_record_that_does_not_run_is_only_given_back(
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
async def test_others_renew_the_lease_meanwhile(
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
async def test_a_record_that_its_claimer_has_lost_undoes_the_writes(
    end: str, ledger: Ledger, other: Ledger, store: Store, effects: Effects, claim: Claim, held: Record
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
async def test_an_outcome_that_has_become_unknown_meanwhile_is_a_late_truth(
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
async def test_the_lock_of_the_file_holds_up_all_others_meanwhile(
    ledger: Ledger, store: Store, effects: Effects, claim: Claim, held: Record
) -> None:
    """So the lease cannot be renewed, but neither can another run claim the record."""
    async with transaction(ledger, claim) as opened:
        await effects.act(opened)
        beat = asyncio.create_task(ledger.heartbeat(held.token, LEASE))
        claimed = asyncio.create_task(ledger.claim(claim_of(ID, on_crash="rerun", fingerprint=held.fingerprint)))
        await opened.complete(outcome_of(), RETENTION, undo=False)
    assert not await beat
    assert (await claimed).state in (State.RUNNING, State.DONE)
    assert (await present(ledger)).outcome == outcome_of()
