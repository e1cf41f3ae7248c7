"""Transactions of calls without a key: an equal call in an open one is waited for, and then repeated, or not."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.ledger import LEASE, RETENTION, outcome_of, present
from tests.ledger.contract.test_delivery import OTHER_LIKENESS, claimed, keyless, lose, write
from tests.ledger.contract.test_transactions import Effects, only_postgres, transactional
from tests.servers import Store
from wirecall.ledger.base import Claim, Delivered, Ledger, Locked, Record, State, Transaction

WAIT = 20.0
# The wait of a call that is to be refused. In SQLite, calls wait for the lock of the whole file in long steps.
BRIEFLY = {"sqlite": 0.0, "postgres": 0.3}


class Shop:
    """A ledger, and a table of effects beside it."""

    def __init__(self, ledger: Ledger, store: Store) -> None:
        self.ledger: Any = ledger
        self.briefly = BRIEFLY[store.kind]
        self._is_locking = store.kind == "postgres"
        self._effects = Effects(store)

    @property
    def effects(self) -> int:
        return self._effects.number

    async def run(self, claim: Claim, wait: float = WAIT) -> Record:
        """Run a command: one effect, if the record is its own."""
        async with self.ledger.transaction(claim, wait) as transaction:
            record: Record = transaction.record
            if record.nonce == claim.nonce:
                await self.act(transaction)
            return record

    async def act(self, transaction: Transaction) -> None:
        await self.begin(transaction)
        await transaction.complete(outcome_of(), RETENTION, undo=False)

    async def begin(self, transaction: Transaction) -> None:
        """Write the effect, and do not complete the command."""
        await self._effects.act(transaction)

    async def waits(self, task: "asyncio.Task[Any]") -> None:
        """Until a call waits for another; in PostgreSQL, until the server holds its session up."""
        await asyncio.sleep(0)
        async with asyncio.timeout(WAIT):
            locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            while self._is_locking and self._effects.ask(locks) == [(0,)]:
                assert not task.done()
                await asyncio.sleep(0.01)


@pytest.fixture
def shop(store: Store, ledger: Ledger) -> Shop:
    return Shop(ledger, store)


@transactional
async def test_a_transaction_without_a_key_has_a_delivery(shop: Shop) -> None:
    """B1."""
    for claim in (keyless(), keyless(None)):
        async with shop.ledger.transaction(claim, WAIT) as transaction:
            record = transaction.record
            assert (record.id, record.state, record.nonce) == (claim.id, State.RUNNING, claim.nonce)
            assert (record.delivery, record.deliverer) == ("pending", claim.nonce)
            await shop.act(transaction)
        done = await present(shop.ledger, claim.id)
        assert (done.state, done.delivery, done.deliverer) == (State.DONE, "pending", claim.nonce)


@only_postgres
async def test_a_record_that_is_not_committed_cannot_be_marked(shop: Shop) -> None:
    claim = keyless()
    async with shop.ledger.transaction(claim, WAIT) as transaction:
        assert LEASE / 2 < transaction.record.lease_left <= LEASE
        await lose(shop.ledger, transaction.record)
        await shop.act(transaction)
    assert (await present(shop.ledger, claim.id)).delivery == "pending"


@transactional
@pytest.mark.parametrize("end", ["undelivered", "written"])
async def test_of_two_at_once_the_second_acts_if_the_first_was_answered(end: Any, shop: Shop) -> None:
    first, second = keyless(), keyless()
    async with shop.ledger.transaction(first, WAIT) as transaction:
        repetition = asyncio.create_task(shop.run(second))
        await shop.waits(repetition)
        await shop.act(transaction)
    # Now it is done. But its answer is on its way, so the second still waits.
    with pytest.raises(Locked):
        await shop.run(keyless(), wait=shop.briefly)
    assert not repetition.done()
    await shop.ledger.deliver([Delivered(first.id, first.nonce, end)])
    async with asyncio.timeout(WAIT):
        record = await repetition
    if end == "undelivered":
        assert (record.id, record.state, record.outcome) == (first.id, State.DONE, outcome_of())
        assert (record.deliverer, record.delivery) == (second.nonce, "pending")
        assert (await present(shop.ledger, first.id)).deliverer == second.nonce
        assert shop.effects == 1
    else:
        assert (record.id, record.nonce) == (second.id, second.nonce)
        assert shop.effects == 2


@transactional
async def test_one_lost_answer_serves_one_of_many_transactions(shop: Shop) -> None:
    first = keyless()
    await lose(shop.ledger, await shop.run(first))
    found = await asyncio.gather(*(shop.run(keyless(), wait=shop.briefly) for _ in range(4)), return_exceptions=True)
    assert sorted(type(each).__name__ for each in found) == ["Locked", "Locked", "Locked", "Record"]
    assert [each.id for each in found if isinstance(each, Record)] == [first.id]
    assert shop.effects == 1


@transactional
async def test_a_transaction_that_was_undone_leaves_the_effect_to_the_next(shop: Shop) -> None:
    second = keyless()
    async with shop.ledger.transaction(keyless(), WAIT) as transaction:
        await shop.begin(transaction)
        task = asyncio.create_task(shop.run(second))
        await shop.waits(task)
    async with asyncio.timeout(WAIT):
        assert (await task).id == second.id
    assert shop.effects == 1


@only_postgres
async def test_a_wait_for_an_open_transaction_ends(shop: Shop) -> None:
    async with shop.ledger.transaction(keyless(), WAIT) as transaction:
        with pytest.raises(Locked):
            await shop.run(keyless(), wait=shop.briefly)
        await shop.act(transaction)
    assert shop.effects == 1


@only_postgres
async def test_others_do_not_wait(shop: Shop) -> None:
    """Another likeness, or a caller that is not known: these may be open at once."""
    async with AsyncExitStack() as stack:
        for likeness in (OTHER_LIKENESS, b"a third", None, None):
            claim = keyless(likeness)
            transaction = await stack.enter_async_context(shop.ledger.transaction(claim, 0))
            assert transaction.record.nonce == claim.nonce
            await shop.begin(transaction)


@transactional
async def test_an_equal_call_of_the_same_process_acts_too(shop: Shop) -> None:
    """Two equal orders are two orders, though the answer to the first is on its way."""
    first = await shop.run(keyless())
    second = keyless(beside=frozenset({first.id.key}))
    assert (await shop.run(second, wait=0)).id == second.id
    assert shop.effects == 2


@transactional
async def test_a_lost_call_that_still_runs_under_a_lease_is_not_taken_over(shop: Shop) -> None:
    """It was declared otherwise when it began. Its answer stays lost, so that a later repetition finds it."""
    record = await claimed(shop.ledger)
    await lose(shop.ledger, record)
    with pytest.raises(Locked):
        await shop.run(keyless(), wait=shop.briefly)
    assert (await present(shop.ledger, record.id)).delivery == "undelivered"
    assert await shop.ledger.complete(record.token, outcome_of(), RETENTION)
    second, third = keyless(), keyless()
    found = await shop.run(second)
    assert (found.id, found.deliverer) == (record.id, second.nonce)
    await write(shop.ledger, found)
    assert (await shop.run(third)).id == third.id
    assert shop.effects == 1
