"""Transactions of calls without a key: an equal call waits for an open one, and then repeats it, or
acts.
"""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.ledger import LEASE, RETENTION, outcome_of, present
from tests.ledger.effects import only_postgres, transactional
from tests.ledger.keyless import OTHER_LIKENESS, claimed, keyless, lose, write
from tests.ledger.shop import WAIT, Shop
from tests.servers import Store
from wirecall.ledger.base import Delivered, Ledger, Locked, Record, State


@pytest.fixture
def shop(store: Store, ledger: Ledger) -> Shop:
    return Shop(ledger, store)


@transactional
async def test_transaction_without_a_key_has_a_delivery(shop: Shop) -> None:
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
async def test_uncommitted_record_cannot_be_marked(shop: Shop) -> None:
    claim = keyless()
    async with shop.ledger.transaction(claim, WAIT) as transaction:
        assert LEASE / 2 < transaction.record.lease_left <= LEASE
        await lose(shop.ledger, transaction.record)
        await shop.act(transaction)
    assert (await present(shop.ledger, claim.id)).delivery == "pending"


@transactional
@pytest.mark.parametrize("end", ["undelivered", "written"])
async def test_second_transaction_acts_if_the_first_was_answered(end: Any, shop: Shop) -> None:
    first = keyless()
    second = keyless()
    async with shop.ledger.transaction(first, WAIT) as transaction:
        repetition = asyncio.create_task(shop.run(second))
        await shop.waits(repetition)
        await shop.act(transaction)
    # Now it is done. But its answer is pending, so the second still waits.
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
async def test_lost_answer_matches_one_of_many_transactions(shop: Shop) -> None:
    first = keyless()
    await lose(shop.ledger, await shop.run(first))
    found = await asyncio.gather(
        *(shop.run(keyless(), wait=shop.briefly) for _ in range(4)), return_exceptions=True
    )
    assert sorted(type(each).__name__ for each in found) == ["Locked", "Locked", "Locked", "Record"]
    assert [each.id for each in found if isinstance(each, Record)] == [first.id]
    assert shop.effects == 1


@transactional
async def test_transaction_that_was_undone_leaves_the_effect_to_the_next(shop: Shop) -> None:
    second = keyless()
    async with shop.ledger.transaction(keyless(), WAIT) as transaction:
        await shop.begin(transaction)
        task = asyncio.create_task(shop.run(second))
        await shop.waits(task)
    async with asyncio.timeout(WAIT):
        assert (await task).id == second.id
    assert shop.effects == 1


@only_postgres
async def test_wait_for_an_open_transaction_ends(shop: Shop) -> None:
    async with shop.ledger.transaction(keyless(), WAIT) as transaction:
        with pytest.raises(Locked):
            await shop.run(keyless(), wait=shop.briefly)
        await shop.act(transaction)
    assert shop.effects == 1


@only_postgres
async def test_transactions_of_other_calls_do_not_wait(shop: Shop) -> None:
    """Another likeness, or an unknown caller: these may be open at once."""
    async with AsyncExitStack() as stack:
        for likeness in (OTHER_LIKENESS, b"a third", None, None):
            claim = keyless(likeness)
            transaction = await stack.enter_async_context(shop.ledger.transaction(claim, 0))
            assert transaction.record.nonce == claim.nonce
            await shop.begin(transaction)


@transactional
async def test_equal_call_of_the_same_process_acts(shop: Shop) -> None:
    """Two equal orders are two orders, although the answer to the first is pending."""
    first = await shop.run(keyless())
    second = keyless(beside=frozenset({first.id.key}))
    assert (await shop.run(second, wait=0)).id == second.id
    assert shop.effects == 2


@transactional
async def test_lost_call_that_still_runs_under_a_lease_is_not_taken_over(shop: Shop) -> None:
    """Its method had another mode when it began. Its answer stays lost, for a later repetition."""
    record = await claimed(shop.ledger)
    await lose(shop.ledger, record)
    with pytest.raises(Locked):
        await shop.run(keyless(), wait=shop.briefly)
    assert (await present(shop.ledger, record.id)).delivery == "undelivered"
    assert await shop.ledger.complete(record.token, outcome_of(), RETENTION)
    second = keyless()
    third = keyless()
    found = await shop.run(second)
    assert (found.id, found.deliverer) == (record.id, second.nonce)
    await write(shop.ledger, found)
    assert (await shop.run(third)).id == third.id
    assert shop.effects == 1
