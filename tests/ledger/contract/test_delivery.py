"""Calls without a key: the delivery of their answers, and the repetitions that match a lost one."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.ledger import LEASE, PRINT, RETENTION, claim_of, outcome_of, present
from tests.ledger.contract import durable_only
from tests.ledger.keyless import (
    LIKENESS,
    OTHER_LIKENESS,
    WINDOW,
    claimed,
    is_match,
    is_new,
    is_waited_for,
    keyless,
    lose,
    write,
)
from tests.servers import Store
from wirecall.ledger.base import (
    UNKNOWN_AFTER,
    Delivered,
    Ledger,
    Record,
    RecordId,
    State,
)


@pytest.fixture
async def other(store: Store) -> AsyncIterator[Ledger]:
    """A second handle on the same records."""
    ledger = await store.open()
    yield ledger
    await ledger.aclose()


async def test_generated_key_is_an_ordinary_key(ledger: Ledger) -> None:
    record = await claimed(ledger)
    assert await ledger.get(record.id) is not None
    assert [found.id for found in await ledger.list()] == [record.id]
    assert (await ledger.counts())[State.RUNNING] == 1
    assert await ledger.heartbeat(record.token, LEASE)
    assert await ledger.commit_point(record.token, LEASE)
    assert await ledger.complete(record.token, outcome_of(), RETENTION)
    done = await present(ledger, record.id)
    assert (done.state, done.delivery, done.deliverer, done.outcome) == (
        State.DONE,
        "pending",
        record.nonce,
        outcome_of(),
    )
    # A claim with the key itself, as a poll sends it, is an ordinary duplicate: it does not take an
    # answer.
    again = await ledger.claim(claim_of(record.id, fingerprint=PRINT))
    assert (again.state, again.delivery, again.deliverer) == (State.DONE, "pending", record.nonce)


async def test_record_with_a_key_has_no_delivery(ledger: Ledger) -> None:
    record = await ledger.claim(claim_of())
    await ledger.deliver(
        [
            Delivered(record.id, record.deliverer, "undelivered"),
            Delivered(record.id, record.nonce, "written"),
        ]
    )
    record = await present(ledger)
    assert (record.delivery, record.deliverer) == (None, b"")


@pytest.mark.parametrize("state", [State.RUNNING, State.DONE, State.UNKNOWN, State.WAITING])
async def test_lost_answer_matches_one_repetition(state: State, ledger: Ledger) -> None:
    record = await claimed(ledger)
    await lose(ledger, record)
    await _turn(ledger, record, state)
    first = keyless()
    taken = await ledger.claim(first)
    assert (taken.id, taken.state, taken.deliverer, taken.delivery) == (
        record.id,
        state,
        first.nonce,
        "pending",
    )
    assert taken.nonce == record.nonce, "the earlier run keeps its record"
    assert (taken.outcome is not None) == (state in (State.DONE, State.WAITING))
    if state is not State.UNKNOWN:  # of an unknown outcome, every repetition gets the report
        assert await is_new(ledger, keyless(beside=frozenset({record.id.key})))


@pytest.mark.parametrize("state", [State.RUNNING, State.DONE, State.UNKNOWN, State.WAITING])
async def test_written_answer_matches_nothing(state: State, ledger: Ledger) -> None:
    record = await claimed(ledger)
    await _turn(ledger, record, state)
    await write(ledger, record)
    assert (await present(ledger, record.id)).delivery == "written"
    assert await is_new(ledger, keyless())


async def test_released_call_runs_again(ledger: Ledger) -> None:
    record = await claimed(ledger)
    await lose(ledger, record)
    assert await ledger.release(record.token)
    assert await is_new(ledger, keyless())


async def test_call_with_another_likeness_or_none_matches_nothing(ledger: Ledger) -> None:
    """Another caller, method or params differ in likeness; an unknown caller has none."""
    for likeness in (LIKENESS, None):
        await lose(ledger, await claimed(ledger, likeness=likeness))
    assert await is_new(ledger, keyless(OTHER_LIKENESS))
    assert await is_new(ledger, keyless(None))
    assert not await is_new(ledger, keyless(LIKENESS))


async def test_repetition_of_a_repetition_is_recognised(ledger: Ledger) -> None:
    record = await claimed(ledger)
    assert await ledger.complete(record.token, outcome_of(), RETENTION)
    for _ in range(3):
        await lose(ledger, record)
        claim = keyless()
        record = await ledger.claim(claim)
        assert (record.state, record.deliverer) == (State.DONE, claim.nonce)
    await write(ledger, record)
    assert await is_new(ledger, keyless())


async def test_delivery_is_marked_by_its_deliverer_only(ledger: Ledger) -> None:
    record = await claimed(ledger)
    assert await ledger.complete(record.token, outcome_of(), RETENTION)
    await lose(ledger, record)
    second = await ledger.claim(keyless())
    await lose(ledger, record)
    await write(ledger, record)  # the first attempt is over
    assert (await present(ledger, record.id)).delivery == "pending"
    await lose(ledger, second)
    assert (await present(ledger, record.id)).delivery == "undelivered"
    await write(ledger, second)  # its stream was resumed
    await lose(ledger, second)  # too late
    assert (await present(ledger, record.id)).delivery == "written"


async def test_deliveries_are_marked_many_at_once(ledger: Ledger) -> None:
    records = [
        await claimed(ledger, beside=frozenset({"x"}), likeness=bytes([n] * 16)) for n in range(40)
    ]
    ends = [
        Delivered(each.id, each.deliverer, "undelivered" if n % 2 else "written")
        for n, each in enumerate(records)
    ]
    await ledger.deliver([*ends, Delivered(RecordId("alice", "charge", "none"), b"", "written")])
    await ledger.deliver([])
    found = [(await present(ledger, each.id)).delivery for each in records]
    assert found == ["written", "undelivered"] * 20


@pytest.mark.parametrize("state", [State.DONE, State.UNKNOWN, State.WAITING])
async def test_window_counts_from_the_loss(state: State, ledger: Ledger, store: Store) -> None:
    record = await claimed(ledger)
    await _turn(ledger, record, state)
    store.age(record.id, 300)
    await lose(ledger, record)
    store.age(record.id, WINDOW - 20)
    assert await is_match(ledger, keyless(), record)
    await lose(ledger, await present(ledger, record.id))
    store.age(record.id, WINDOW + 20)
    assert await is_new(ledger, keyless())


async def test_lost_call_that_still_runs_matches_however_long_it_runs(
    ledger: Ledger, store: Store
) -> None:
    record = await claimed(ledger)
    await lose(ledger, record)
    store.age(record.id, 10 * WINDOW)
    assert await ledger.heartbeat(record.token, LEASE)
    assert await is_match(ledger, keyless(), record)


async def test_pending_answer_of_another_process_is_waited_for(
    ledger: Ledger, store: Store
) -> None:
    """A process that dies marks nothing.

    It may be alive until its lease ends; then its answer is lost.
    """
    record = await claimed(ledger)
    assert await is_waited_for(ledger, keyless(), record)
    assert await ledger.complete(record.token, outcome_of(), RETENTION)
    assert await is_waited_for(ledger, keyless(), record)
    store.age(record.id, LEASE - 10)
    assert await is_waited_for(ledger, keyless(), record)
    store.age(record.id, 20)
    assert await is_match(ledger, keyless(), record)
    store.age(record.id, LEASE + WINDOW + 1)
    assert await is_new(ledger, keyless())


async def test_pending_answer_that_a_repetition_took_over_is_waited_for(
    ledger: Ledger, store: Store
) -> None:
    """Regardless of when it was lost: otherwise a new call before the mark would get its answer."""
    record = await claimed(ledger)
    assert await ledger.complete(record.token, outcome_of(), RETENTION)
    store.age(record.id, 2 * LEASE)
    await lose(ledger, record)
    store.age(record.id, 2 * LEASE)
    second = await ledger.claim(keyless())
    assert await is_waited_for(ledger, keyless(), second)
    store.age(record.id, LEASE - 10)
    assert await is_waited_for(ledger, keyless(), second)
    store.age(record.id, 20)
    assert await is_match(ledger, keyless(), record)


async def test_pending_answer_of_this_process_is_not_lost(ledger: Ledger) -> None:
    """Two equal orders at once are two orders."""
    record = await claimed(ledger)
    assert await is_new(ledger, keyless(beside=frozenset({record.id.key})))


@pytest.mark.parametrize(
    ("on_crash", "state"), [("unknown", State.UNKNOWN), ("rerun", State.RUNNING)]
)
async def test_run_of_a_dead_process_is_judged_as_with_a_key(
    on_crash: str, state: State, ledger: Ledger, store: Store
) -> None:
    record = await claimed(ledger, on_crash=on_crash)
    store.age(record.id, LEASE + 1)
    claim = keyless(on_crash=on_crash)
    taken = await ledger.claim(claim)
    assert (taken.id, taken.state, taken.deliverer, taken.delivery) == (
        record.id,
        state,
        claim.nonce,
        "pending",
    )
    assert (taken.nonce == claim.nonce, taken.attempts) == (
        (True, 2) if state is State.RUNNING else (False, 1)
    )


async def test_run_of_a_process_that_died_long_ago_matches_nothing(
    ledger: Ledger, store: Store
) -> None:
    record = await claimed(ledger)
    store.age(record.id, LEASE + WINDOW + 1)
    assert await is_new(ledger, keyless())
    assert (await present(ledger, record.id)).state is State.RUNNING


async def test_unknown_outcome_matches_every_repetition_within_the_window(
    ledger: Ledger, store: Store
) -> None:
    """In any process, whether or not the last repetition has its answer: none of them runs."""
    record = await claimed(ledger)
    store.age(record.id, LEASE + 1)
    beside: frozenset[str] = frozenset()
    for _ in range(4):
        claim = keyless(beside=beside)
        taken = await ledger.claim(claim)
        assert (taken.id, taken.state, taken.deliverer) == (record.id, State.UNKNOWN, claim.nonce)
        beside = frozenset({record.id.key})
        store.age(record.id, WINDOW - 10)
        await lose(ledger, taken)  # each answer begins the window again
        store.age(record.id, WINDOW - 10)
    store.age(record.id, 20)
    assert await is_new(ledger, keyless())


async def test_unknown_outcome_that_was_never_answered_is_matched_within_the_window(
    ledger: Ledger, store: Store
) -> None:
    """The time counts from the end of its lease, before the sweep has seen it and after that."""
    record = await claimed(ledger)
    store.age(record.id, LEASE + UNKNOWN_AFTER + 1)
    assert await ledger.sweep() == 1
    store.age(record.id, WINDOW - UNKNOWN_AFTER - 10)
    assert await is_match(ledger, keyless(), record)
    await lose(ledger, await present(ledger, record.id))
    store.age(record.id, WINDOW + 10)
    assert await is_new(ledger, keyless())


async def test_swept_run_that_was_lost_long_before_its_end_is_matched(
    ledger: Ledger, store: Store
) -> None:
    """Its caller left early, the run lived on, and then its process died."""
    record = await claimed(ledger)
    await lose(ledger, record)
    store.age(record.id, LEASE - 1)
    assert await ledger.heartbeat(record.token, 20 * LEASE)
    store.age(record.id, 20 * LEASE + UNKNOWN_AFTER + 1)
    assert await ledger.sweep() == 1
    assert await is_match(ledger, keyless(), record)


async def test_abandoned_run_is_matched_within_the_window(ledger: Ledger, store: Store) -> None:
    record = await claimed(ledger)
    assert await ledger.abandon(record.token)
    store.age(record.id, WINDOW - 10)
    assert await is_match(ledger, keyless(beside=frozenset({record.id.key})), record)
    store.age(record.id, WINDOW + 10)
    assert await is_new(ledger, keyless())


async def test_unknown_outcome_that_became_known_is_delivered_once(ledger: Ledger) -> None:
    record = await claimed(ledger)
    assert await ledger.abandon(record.token)
    taken = await ledger.claim(keyless())
    await lose(ledger, taken)  # its caller received the report, but not the outcome
    assert await ledger.resolve(record.id, outcome_of())
    claim = keyless()
    known = await ledger.claim(claim)
    assert (known.id, known.state, known.deliverer) == (record.id, State.DONE, claim.nonce)
    await write(ledger, known)
    assert await is_new(ledger, keyless())


async def test_match_prefers_undelivered_then_unknown_then_other_records(ledger: Ledger) -> None:
    mine: frozenset[str] = frozenset()
    records = []
    for _ in range(3):
        records.append(await claimed(ledger, beside=mine))
        mine |= {records[-1].id.key}
    assert await ledger.abandon(records[1].token)
    assert await ledger.complete(records[2].token, outcome_of(), RETENTION)
    await lose(ledger, records[2])
    assert await is_match(ledger, keyless(beside=mine), records[2])
    assert await is_match(ledger, keyless(beside=mine), records[1])
    assert await is_match(ledger, keyless(), records[1])


async def test_repeated_claim_finds_the_record_that_it_took(ledger: Ledger) -> None:
    """The store's reply was lost, not the answer: there is no second record and no second
    repetition.
    """
    claim = keyless()
    first = await ledger.claim(claim)
    second = await ledger.claim(claim)
    assert (first.id, first.nonce) == (second.id, second.nonce) == (claim.id, claim.nonce)
    assert await ledger.complete(first.token, outcome_of(), RETENTION)
    await lose(ledger, first)
    again = keyless()
    assert await is_match(ledger, again, first)
    assert await is_match(ledger, again, first)
    assert len(await ledger.list()) == 1


async def test_repeated_claim_keeps_the_record_that_it_took(ledger: Ledger) -> None:
    """Regardless of later losses: one repetition gets one answer."""
    first = await claimed(ledger)
    second = await claimed(ledger, beside=frozenset({first.id.key}))
    await lose(ledger, second)
    claim = keyless()
    assert await is_match(ledger, claim, second)
    await lose(ledger, first)
    assert await is_match(ledger, claim, second)
    assert (await present(ledger, first.id)).delivery == "undelivered"


async def test_match_prefers_undelivered_records_then_the_oldest(ledger: Ledger) -> None:
    mine: frozenset[str] = frozenset()
    records = []
    for _ in range(3):
        records.append(await claimed(ledger, beside=mine))
        mine |= {records[-1].id.key}
    await lose(ledger, records[2])
    await lose(ledger, records[1])
    assert await is_match(ledger, keyless(), records[1])
    assert await is_match(ledger, keyless(), records[2])
    assert await is_waited_for(ledger, keyless(), records[0])


async def test_tombstone_and_a_swept_record_match_nothing(ledger: Ledger, store: Store) -> None:
    done = await claimed(ledger, likeness=LIKENESS)
    running = await claimed(ledger, likeness=OTHER_LIKENESS)
    assert await ledger.complete(done.token, outcome_of(), RETENTION)
    for record in (done, running):
        await lose(ledger, record)
        store.age(record.id, RETENTION + LEASE + 1)
    assert await ledger.sweep() == 2
    assert (await present(ledger, done.id)).state is State.TOMBSTONE
    assert (await present(ledger, running.id)).state is State.UNKNOWN
    assert await is_new(ledger, keyless(LIKENESS))
    assert await is_new(ledger, keyless(OTHER_LIKENESS))


async def test_repetitions_at_once_take_the_answer_once(
    store: Store, ledger: Ledger, other: Ledger
) -> None:
    """P5, by racing two handles: one replay; the others wait for it, because a process has it."""
    for _ in range(10):
        record = await claimed(ledger)
        assert await ledger.complete(record.token, outcome_of(), RETENTION)
        await lose(ledger, record)
        claims = [keyless() for _ in range(8)]
        found = await asyncio.gather(
            *((ledger, other)[n % 2].claim(claim) for n, claim in enumerate(claims))
        )
        assert {each.id for each in found} == {record.id}
        assert (
            sum(each.deliverer == claim.nonce for each, claim in zip(found, claims, strict=True))
            == 1
        )
        await write(ledger, await present(ledger, record.id))


@durable_only
async def test_delivery_survives_a_restart(store: Store) -> None:
    ledger = await store.open()
    record = await claimed(ledger)
    assert await ledger.complete(record.token, outcome_of(), RETENTION)
    await lose(ledger, record)
    await ledger.aclose()
    ledger = await store.open()
    try:
        assert await is_match(ledger, keyless(), record)
    finally:
        await ledger.aclose()


async def _turn(ledger: Ledger, record: Record, state: State) -> None:
    if state is State.DONE:
        assert await ledger.complete(record.token, outcome_of(), RETENTION)
    elif state is State.UNKNOWN:
        assert await ledger.abandon(record.token)
    elif state is State.WAITING:
        assert await ledger.suspend(record.token, outcome_of(b'"interim"'), RETENTION)
