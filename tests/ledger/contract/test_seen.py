"""What a store says about itself: its identity, its fences, and the server behind it."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.ledger import ID, OTHER_PRINT, PRINT, claim_of, granted, in_state, outcome_of, present
from tests.ledger.contract import durable_only
from tests.servers import Store
from wirecall.ledger.base import (
    IDENTITY,
    IDENTITY_CHANNEL,
    Ledger,
    LedgerDown,
    Mark,
    RecordId,
    State,
)
from wirecall.ledger.identity import (
    Doubt,
    Identity,
    Lost,
    accept,
    all_lost,
    doubts,
    identity_of,
    new_identity,
    put_back,
    report,
)


@pytest.fixture
async def ledger(store: Store) -> AsyncIterator[Ledger]:
    ledger = await store.open()
    yield ledger
    await ledger.aclose()


@pytest.fixture
async def other(store: Store) -> AsyncIterator[Ledger]:
    """A second handle on the same store."""
    ledger = await store.open()
    yield ledger
    await ledger.aclose()


async def test_new_store_has_no_identity_until_one_is_made(ledger: Ledger, other: Ledger) -> None:
    assert (await ledger.see()).identity is None
    assert (await ledger.see(b"first")).identity == b"first"
    assert (await other.see(b"second")).identity == b"first"
    assert (await other.see()).identity == b"first"


async def test_identity_is_made_once_by_processes_that_start_together(
    ledger: Ledger, other: Ledger
) -> None:
    seen = await asyncio.gather(*(each.see(new_identity()) for each in [ledger, other] * 10))
    assert len({each.identity for each in seen}) == 1


async def test_identity_is_a_mark_that_stays_and_can_be_replaced(ledger: Ledger) -> None:
    await ledger.see(b"first")
    await ledger.sweep()
    await in_state_done(ledger)
    assert (await ledger.see()).identity == b"first"
    await ledger.mark(IDENTITY_CHANNEL, Mark(IDENTITY, b"second"), 60)
    assert (await ledger.see(b"third")).identity == b"second"


async def in_state_done(ledger: Ledger) -> None:
    record = await granted(ledger, RecordId("", "m", "done"))
    assert await ledger.complete(record.token, outcome_of(), 60)


@durable_only
async def test_fence_of_the_store_is_never_below_one_that_it_gave(
    ledger: Ledger, other: Ledger
) -> None:
    before = (await ledger.see()).fence
    record = await granted(ledger)
    after = (await other.see()).fence
    assert after == before == 0 or (after >= record.fence and after > before)


@durable_only
async def test_history_is_the_same_for_all_handles(ledger: Ledger, other: Ledger) -> None:
    assert (await ledger.see()).history == (await other.see()).history != ""


@durable_only
async def test_reached_differs_for_every_handle(ledger: Ledger, other: Ledger) -> None:
    await ledger.see()
    await other.see()
    assert ledger.reached != other.reached
    steady = ledger.reached
    await granted(ledger)
    assert ledger.reached == steady


@durable_only
async def test_closed_ledger_cannot_be_seen(store: Store) -> None:
    ledger = await store.open()
    await ledger.aclose()
    with pytest.raises(LedgerDown):
        await ledger.see()


# --- acceptance -----------------------------------------------------------------------------------

LOST = Lost(ID, PRINT)


async def test_lost_command_is_put_back_as_unknown(ledger: Ledger) -> None:
    await put_back(ledger, [LOST])
    record = await present(ledger)
    assert (record.state, record.fingerprint) == (State.UNKNOWN, PRINT)
    assert (await ledger.claim(claim_of())).state is State.UNKNOWN
    assert await ledger.resolve(ID, outcome_of())


@pytest.mark.parametrize("state", [State.RUNNING, State.DONE, State.UNKNOWN])
async def test_record_that_is_there_stays_when_its_command_counts_as_lost(
    ledger: Ledger, store: Store, state: State
) -> None:
    before = await in_state(state, ledger, store)
    await put_back(ledger, [LOST, Lost(ID, OTHER_PRINT)])
    after = await present(ledger)
    assert (after.state, after.nonce, after.fence) == (state, before.nonce, before.fence)


async def test_acceptance_ends_all_doubts_about_a_store(ledger: Ledger, other: Ledger) -> None:
    first = identity_of((await ledger.see(new_identity())).identity)
    assert first is not None and first.epoch == 0
    for name, known in (("one", "gone"), ("two", first.name)):
        doubt = Doubt("lost", "all", "less", known, first.name, 0, (LOST,), f"host process {name}")
        await report(ledger, name, doubt)
    found = await doubts(other, first)
    assert sorted(found) == ["one", "two"]
    assert all_lost(found.values()) == [LOST]
    accepted = await accept(other, found.values(), "ada", "it is right")
    assert accepted.epoch > 0
    assert accepted.replaces == ("gone",)
    assert await doubts(ledger, accepted) == {}
    assert identity_of((await ledger.see()).identity) == accepted
    assert (await present(ledger)).state is State.UNKNOWN
    again = await accept(other, [], "ada", "once more")
    assert again.epoch > accepted.epoch


def test_identity_follows_what_an_operator_has_accepted() -> None:
    known = Identity("a", 5)
    assert Identity("a", 6).follows(known)
    assert not Identity("a", 5).follows(known)
    assert not Identity("a", 4).follows(known)
    assert Identity("b", 1, ("a",)).follows(known)
    assert not Identity("b", 9).follows(known)
