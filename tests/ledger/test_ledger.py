"""The contract of `ledger.base`, kept by every store."""

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from msgspec import structs

from tests.ledger import (
    ID,
    LEASE,
    OTHER_PRINT,
    PRINT,
    RETENTION,
    answers_again,
    claim_of,
    granted,
    in_state,
    outcome_of,
    present,
    same,
)
from tests.servers import DURABLE, KINDS, MEMORIES, Server, Store, make_store, open_memory
from wirecall.ledger import memory
from wirecall.ledger.base import (
    MAX_ATTEMPTS,
    TOMBSTONE_FACTOR,
    Ledger,
    LedgerDown,
    Outcome,
    Record,
    RecordId,
    State,
    Token,
)

Change = Callable[[Ledger, Token], Awaitable[bool]]

durable_only = pytest.mark.parametrize("store", [*DURABLE, "cluster"], indirect=True)

# Every transition that a token allows, and the states in which it does.
CHANGES: dict[str, Change] = {
    "heartbeat": lambda ledger, token: ledger.heartbeat(token, LEASE),
    "commit_point": lambda ledger, token: ledger.commit_point(token, LEASE),
    "complete": lambda ledger, token: ledger.complete(token, outcome_of(b'"another"'), RETENTION),
    "suspend": lambda ledger, token: ledger.suspend(token, outcome_of(b'"another"'), RETENTION),
    "release": lambda ledger, token: ledger.release(token),
    "abandon": lambda ledger, token: ledger.abandon(token),
    "lapse": lambda ledger, token: ledger.lapse(token),
}
ALLOWED = {name: {State.RUNNING} for name in CHANGES} | {"complete": {State.RUNNING, State.UNKNOWN}}
REFUSED = [(name, state) for name in CHANGES for state in State if state not in ALLOWED[name]]


@pytest.fixture(params=[*KINDS, "cluster"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Here, Redis counts twice: a server alone, and a cluster of three."""
    monkeypatch.setattr(memory, "open_url", open_memory)
    yield make_store(request.param, tmp_path, request.getfixturevalue)
    MEMORIES.clear()


# --- the table of states ---------------------------------------------------------------------------------------------


async def test_the_first_claim_is_granted_with_everything_the_claim_said(ledger: Ledger) -> None:
    claim = claim_of(committed=False)
    record = await ledger.claim(claim)
    expected = Record(
        id=ID,
        fingerprint=PRINT,
        state=State.RUNNING,
        fence=record.fence,
        nonce=claim.nonce,
        committed=False,
        attempts=1,
        lease_left=LEASE,
        started_at=record.started_at,
    )
    assert same(record, expected)
    assert LEASE - 10 < record.lease_left <= LEASE
    assert abs(record.started_at - time.time()) < 60
    assert same(await ledger.get(ID), record)
    assert record.fence > 0


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("on_crash", ["unknown", "rerun", "reconcile", "transactional"])
async def test_a_claim_leaves_a_record_whose_lease_or_retention_is_not_over(
    state: State, on_crash: str, ledger: Ledger, store: Store
) -> None:
    """P5: RUNNING is waited for, DONE is replayed, UNKNOWN and TOMBSTONE are told; WAITING replays what it said so far."""
    before = await in_state(state, ledger, store)
    seen = await ledger.claim(claim_of(on_crash=on_crash))
    assert same(seen, before)
    assert same(await ledger.get(ID), before)


@pytest.mark.parametrize("state", State)
async def test_other_params_change_nothing_in_any_state_and_at_any_age(state: State, ledger: Ledger, store: Store) -> None:
    """The fingerprint is compared before anything else."""
    before = await in_state(state, ledger, store)
    for seconds in (0, LEASE + 1, RETENTION):
        store.age(ID, seconds)
        before = await present(ledger)
        seen = await ledger.claim(claim_of(fingerprint=OTHER_PRINT, on_crash="rerun", continues=True, committed=False))
        assert seen.fingerprint == PRINT
        assert seen.nonce == before.nonce
        assert same(await ledger.get(ID), before)


async def test_a_claim_that_is_repeated_finds_itself(ledger: Ledger) -> None:
    """A claimer whose answer was lost asks again with its nonce: the record is its own, and nothing was counted twice."""
    claim = claim_of()
    first = await ledger.claim(claim)
    assert same(await ledger.claim(claim), first)


@pytest.mark.parametrize("on_crash", ["unknown", "rerun", "reconcile", "transactional"])
@pytest.mark.parametrize("committed", [True, False])
async def test_a_claim_that_is_repeated_after_its_lease_finds_itself_with_a_new_lease(
    committed: bool, on_crash: str, ledger: Ledger, store: Store
) -> None:
    """Its answer was lost for longer than the lease. Nothing ran under it, so it is neither unknown nor a second attempt."""
    claim = claim_of(committed=committed, on_crash=on_crash)
    first = await ledger.claim(claim)
    store.age(ID, LEASE + 1)
    aged = await present(ledger)
    again = await ledger.claim(claim)
    assert again == structs.replace(aged, lease_left=again.lease_left)
    assert again.token == first.token and again.lease_left > LEASE / 2
    assert same(await ledger.get(ID), again)
    assert await ledger.complete(again.token, outcome_of(), RETENTION)


async def test_a_claim_that_is_repeated_takes_itself_back_from_unknown(ledger: Ledger, store: Store) -> None:
    """Another claim has found its lease over; only the claimer knows that it has not begun."""
    claim = claim_of()
    first = await ledger.claim(claim)
    store.age(ID, LEASE + 1)
    assert (await ledger.claim(claim_of())).state is State.UNKNOWN
    again = await ledger.claim(claim)
    assert (again.state, again.token, again.attempts) == (State.RUNNING, first.token, 1)
    assert again.lease_left > LEASE / 2
    store.age(ID, LEASE + RETENTION - 1)
    assert await ledger.sweep() == 0, "it is kept as long as any that runs"
    store.age(ID, 2)
    assert await ledger.sweep() == 1
    assert (await present(ledger)).state is State.UNKNOWN


@pytest.mark.parametrize("on_crash", ["unknown", "rerun", "reconcile", "transactional"])
async def test_a_lease_that_is_over_before_the_commit_point_is_taken_over(
    on_crash: str, ledger: Ledger, store: Store
) -> None:
    """Nothing was done, so even an `unknown` command may run."""
    first = await granted(ledger, committed=False)
    store.age(ID, LEASE + 1)
    second = await granted(ledger, committed=False, on_crash=on_crash)
    assert second.fence > first.fence
    assert second.attempts == 2
    assert not second.committed


async def test_a_lease_that_is_over_after_the_commit_point_turns_to_unknown(ledger: Ledger, store: Store) -> None:
    """B2: nobody knows whether it was done, and nobody runs it again. The fence stays: its holder may still tell."""
    first = await granted(ledger)
    store.age(ID, LEASE + 1)
    aged = await present(ledger)
    assert aged.lease_left == 0
    second = await ledger.claim(claim_of())
    assert same(second, structs.replace(aged, state=State.UNKNOWN))
    assert second.token == first.token
    assert same(await ledger.claim(claim_of(on_crash="rerun")), second)


@pytest.mark.parametrize("on_crash", ["rerun", "reconcile"])
async def test_a_lease_that_is_over_is_taken_over_by_whoever_may_run_it_again(
    on_crash: str, ledger: Ledger, store: Store
) -> None:
    first = await granted(ledger)
    store.age(ID, LEASE + 1)
    aged = await present(ledger)
    second = await granted(ledger, on_crash=on_crash, lease=50.0)
    assert second.fence > first.fence
    assert (second.attempts, second.committed, second.started_at) == (2, True, aged.started_at)
    assert 40 < second.lease_left <= 50
    assert same(await ledger.get(ID), second)


async def test_a_record_stays_committed_when_it_is_taken_over(ledger: Ledger, store: Store) -> None:
    """The commit point of an earlier run is a fact about the command, not about the run."""
    first = await granted(ledger, committed=False)
    assert await ledger.commit_point(first.token, LEASE)
    store.age(ID, LEASE + 1)
    second = await granted(ledger, committed=False, on_crash="rerun")
    assert second.committed
    store.age(ID, LEASE + 1)
    assert (await ledger.claim(claim_of(committed=False))).state is State.UNKNOWN


async def test_a_taken_over_record_is_committed_if_its_new_holder_is(ledger: Ledger, store: Store) -> None:
    await granted(ledger, committed=False)
    store.age(ID, LEASE + 1)
    assert (await granted(ledger, committed=True)).committed


async def test_a_command_is_not_run_more_than_five_times(ledger: Ledger, store: Store) -> None:
    fences = []
    for attempt in range(1, MAX_ATTEMPTS + 1):
        record = await granted(ledger, on_crash="rerun")
        assert record.attempts == attempt
        fences.append(record.fence)
        store.age(ID, LEASE + 1)
    last = await ledger.claim(claim_of(on_crash="rerun"))
    assert (last.state, last.attempts, last.fence) == (State.UNKNOWN, 5, fences[-1])
    assert fences == sorted(set(fences))


async def test_runs_that_did_nothing_do_not_count_against_the_five(ledger: Ledger, store: Store) -> None:
    for attempt in range(1, MAX_ATTEMPTS + 3):
        assert (await granted(ledger, committed=False)).attempts == attempt
        store.age(ID, LEASE + 1)


async def test_the_terms_of_a_take_over_count_from_then_on(ledger: Ledger, store: Store) -> None:
    await granted(ledger, retention=RETENTION)
    store.age(ID, LEASE + 1)
    await granted(ledger, on_crash="rerun", lease=50.0, retention=20.0)
    store.age(ID, 69)
    assert await ledger.sweep() == 0
    store.age(ID, 2)
    assert await ledger.sweep() == 1
    assert (await present(ledger)).state is State.UNKNOWN


# --- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", CHANGES)
async def test_a_token_with_one_wrong_part_changes_nothing(change: str, ledger: Ledger) -> None:
    record = await granted(ledger, committed=False)
    token = record.token
    strangers = [
        structs.replace(token, fence=token.fence + 1),
        structs.replace(token, fence=token.fence - 1),
        structs.replace(token, fence=0),
        structs.replace(token, nonce=os.urandom(16)),
        structs.replace(token, nonce=b""),
        structs.replace(token, nonce=token.nonce[:-1]),
        structs.replace(token, id=structs.replace(ID, key="key-2")),
        structs.replace(token, id=structs.replace(ID, caller="bob")),
        structs.replace(token, id=structs.replace(ID, method="refund")),
    ]
    for stranger in strangers:
        assert await CHANGES[change](ledger, stranger) is False
        assert same(await ledger.get(ID), record), stranger
    assert sum((await ledger.counts()).values()) == 1
    assert await CHANGES[change](ledger, token) is True


@pytest.mark.parametrize(("change", "state"), REFUSED)
async def test_a_transition_is_refused_in_every_other_state(change: str, state: State, ledger: Ledger, store: Store) -> None:
    """The token is the right one: what was DONE stays as it was recorded, and evidence is not removed."""
    record = await in_state(state, ledger, store)
    assert await CHANGES[change](ledger, record.token) is False
    assert same(await ledger.get(ID), record)


@pytest.mark.parametrize("change", CHANGES)
async def test_a_transition_of_a_record_that_is_not_there_is_refused(change: str, ledger: Ledger) -> None:
    assert await CHANGES[change](ledger, Token(ID, 1, os.urandom(16))) is False
    assert await ledger.get(ID) is None


async def remove_by_release(ledger: Ledger, store: Store, record: Record) -> None:
    assert await ledger.release(record.token)


async def remove_by_resolve(ledger: Ledger, store: Store, record: Record) -> None:
    assert await ledger.abandon(record.token)
    assert await ledger.resolve(ID, None)


async def remove_by_sweep(ledger: Ledger, store: Store, record: Record) -> None:
    assert await ledger.complete(record.token, outcome_of(), RETENTION)
    for retentions in (1, TOMBSTONE_FACTOR - 1):
        store.age(ID, retentions * RETENTION + 1)
        assert await ledger.sweep() == 1


@pytest.mark.parametrize("remove", [remove_by_release, remove_by_resolve, remove_by_sweep])
@pytest.mark.parametrize("reused", [False, True], ids=["another nonce", "the same nonce"])
async def test_a_record_that_is_made_again_never_meets_an_old_token(
    remove: Any, reused: bool, ledger: Ledger, store: Store
) -> None:
    """ABA: the fence goes on growing over the removal, so not even a nonce that is used twice helps."""
    first = await granted(ledger)
    await remove(ledger, store, first)
    assert await ledger.get(ID) is None
    second = await granted(ledger, nonce=first.nonce if reused else os.urandom(16))
    assert second.fence > first.fence
    assert second.attempts == 1
    for change in CHANGES.values():
        assert await change(ledger, first.token) is False
    assert same(await ledger.get(ID), second)


async def test_a_holder_that_was_taken_over_is_refused_everything(ledger: Ledger, store: Store) -> None:
    first = await granted(ledger, committed=False)
    store.age(ID, LEASE + 1)
    second = await granted(ledger, committed=False)
    for change in CHANGES.values():
        assert await change(ledger, first.token) is False
    assert same(await ledger.get(ID), second)
    assert await ledger.complete(second.token, outcome_of(), RETENTION)
    assert await ledger.complete(first.token, outcome_of(b'"stale"'), RETENTION) is False
    assert (await present(ledger)).outcome == outcome_of()


async def test_fences_grow_over_all_records_and_handles(ledger: Ledger, store: Store) -> None:
    other = await store.open()
    fences = []
    for number, handle in enumerate((ledger, other, ledger, other)):
        record = await granted(handle, structs.replace(ID, key=str(number % 3)))
        assert await handle.release(record.token)
        fences.append(record.fence)
    await other.aclose()
    assert fences == sorted(set(fences))


# --- leases ----------------------------------------------------------------------------------------------------------


async def test_a_heartbeat_renews_the_lease(ledger: Ledger, store: Store) -> None:
    record = await granted(ledger)
    store.age(ID, 20)
    assert (await present(ledger)).lease_left <= 10
    assert await ledger.heartbeat(record.token, 40.0)
    beaten = await present(ledger)
    assert 30 < beaten.lease_left <= 40
    assert (beaten.token, beaten.state, beaten.attempts) == (record.token, State.RUNNING, 1)
    store.age(ID, 35)
    assert (await ledger.claim(claim_of(on_crash="rerun"))).token == record.token


async def test_a_heartbeat_revives_a_lease_that_nobody_took(ledger: Ledger, store: Store) -> None:
    record = await granted(ledger)
    store.age(ID, LEASE + 1)
    assert await ledger.heartbeat(record.token, LEASE)
    assert (await ledger.claim(claim_of(on_crash="rerun"))).token == record.token


async def test_the_commit_point_is_marked_and_renews_the_lease(ledger: Ledger, store: Store) -> None:
    record = await granted(ledger, committed=False)
    store.age(ID, 20)
    assert await ledger.commit_point(record.token, 40.0)
    marked = await present(ledger)
    assert marked.committed
    assert 30 < marked.lease_left <= 40
    assert await ledger.commit_point(record.token, LEASE)


async def test_the_commit_point_is_refused_once_the_lease_is_over(ledger: Ledger, store: Store) -> None:
    """Another may be about to take over: who comes late must stop before the effect."""
    record = await granted(ledger, committed=False)
    store.age(ID, LEASE + 1)
    aged = await present(ledger)
    assert await ledger.commit_point(record.token, LEASE) is False
    assert same(await ledger.get(ID), aged)
    assert not aged.committed


async def test_lapse_ends_the_lease_at_once(ledger: Ledger) -> None:
    first = await granted(ledger)
    assert await ledger.lapse(first.token)
    lapsed = await present(ledger)
    assert same(lapsed, structs.replace(first, lease_left=0))
    assert (await granted(ledger, on_crash="rerun")).attempts == 2


async def test_a_lapsed_lease_of_an_unknown_command_turns_to_unknown(ledger: Ledger) -> None:
    first = await granted(ledger)
    assert await ledger.lapse(first.token)
    assert (await ledger.claim(claim_of())).state is State.UNKNOWN


@pytest.mark.parametrize("state", [state for state in State if state is not State.RUNNING])
async def test_only_a_running_record_has_a_lease(state: State, ledger: Ledger, store: Store) -> None:
    assert (await in_state(state, ledger, store)).lease_left == 0


# --- UNKNOWN ---------------------------------------------------------------------------------------------------------


async def test_a_late_completion_turns_unknown_to_done(ledger: Ledger, store: Store) -> None:
    """B2: a late truth is welcome."""
    first = await granted(ledger)
    store.age(ID, LEASE + 1)
    assert (await ledger.claim(claim_of())).state is State.UNKNOWN
    assert await ledger.complete(first.token, outcome_of(b'"late"'), RETENTION)
    done = await ledger.claim(claim_of())
    assert (done.state, done.outcome) == (State.DONE, outcome_of(b'"late"'))


async def test_an_abandoned_record_is_unknown_and_its_holder_may_still_complete_it(ledger: Ledger) -> None:
    first = await granted(ledger)
    assert await ledger.abandon(first.token)
    unknown = await present(ledger)
    assert same(unknown, structs.replace(first, state=State.UNKNOWN, lease_left=0))
    assert await ledger.complete(first.token, outcome_of(), RETENTION)
    assert (await present(ledger)).state is State.DONE


async def test_an_operator_resolves_unknown_as_done(ledger: Ledger, store: Store) -> None:
    first = await in_state(State.UNKNOWN, ledger, store)
    assert await ledger.resolve(ID, outcome_of(b'"found"'), RETENTION)
    done = await present(ledger)
    assert (done.state, done.outcome, done.attempts, done.fence) == (State.DONE, outcome_of(b'"found"'), 1, first.fence)
    assert done.completed_at is not None
    assert await ledger.complete(first.token, outcome_of(b'"stale"'), RETENTION) is False
    assert same(await ledger.claim(claim_of()), done)


async def test_an_operator_resolves_unknown_as_not_done(ledger: Ledger, store: Store) -> None:
    first = await in_state(State.UNKNOWN, ledger, store)
    assert await ledger.resolve(ID, None)
    assert await ledger.get(ID) is None
    assert await ledger.complete(first.token, outcome_of(b'"stale"'), RETENTION) is False
    assert await ledger.get(ID) is None
    assert (await granted(ledger)).attempts == 1


@pytest.mark.parametrize("state", [state for state in State if state is not State.UNKNOWN])
@pytest.mark.parametrize("outcome", [None, outcome_of(b'"found"')], ids=["not done", "done"])
async def test_nothing_but_unknown_is_resolved(state: State, outcome: Any, ledger: Ledger, store: Store) -> None:
    before = await in_state(state, ledger, store)
    assert await ledger.resolve(ID, outcome) is False
    assert same(await ledger.get(ID), before)


@pytest.mark.parametrize("outcome", [None, outcome_of(b'"found"')], ids=["not done", "done"])
async def test_a_record_that_is_not_there_is_not_resolved(outcome: Any, ledger: Ledger) -> None:
    assert await ledger.resolve(ID, outcome) is False
    assert await ledger.get(ID) is None


async def test_a_resolved_record_is_kept_for_a_day_by_default(ledger: Ledger, store: Store) -> None:
    await in_state(State.UNKNOWN, ledger, store, retention=1.0)
    assert await ledger.resolve(ID, outcome_of())
    store.age(ID, 86_400 - 60)
    assert (await ledger.claim(claim_of())).state is State.DONE
    store.age(ID, 120)
    assert (await ledger.claim(claim_of())).state is State.TOMBSTONE


# --- WAITING ---------------------------------------------------------------------------------------------------------


async def test_a_suspended_record_waits_with_what_it_said_and_goes_on_under_a_new_token(ledger: Ledger) -> None:
    first = await granted(ledger)
    assert await ledger.suspend(first.token, outcome_of(b'"which account?"'), RETENTION)
    waiting = await ledger.claim(claim_of())
    assert (waiting.state, waiting.outcome) == (State.WAITING, outcome_of(b'"which account?"'))
    assert waiting.completed_at is None
    second = await granted(ledger, continues=True)
    assert second.fence > first.fence
    assert second.attempts == 1  # the first has done nothing: it asked
    assert second.outcome is None
    assert second.lease_left > 0
    assert await ledger.complete(first.token, outcome_of(b'"stale"'), RETENTION) is False
    assert await ledger.complete(second.token, outcome_of(), RETENTION)
    assert (await present(ledger)).outcome == outcome_of()


async def test_a_call_may_wait_more_often_than_it_may_crash(ledger: Ledger) -> None:
    record = await granted(ledger)
    for leg in range(MAX_ATTEMPTS + 2):
        assert await ledger.suspend(record.token, outcome_of(b"%d" % leg), RETENTION)
        record = await granted(ledger, continues=True)


async def test_a_claim_that_continues_has_no_special_right_elsewhere(ledger: Ledger, store: Store) -> None:
    for state in (State.RUNNING, State.DONE, State.UNKNOWN, State.TOMBSTONE):
        id = structs.replace(ID, key=state.value)
        before = await in_state(state, ledger, store, id)
        assert same(await ledger.claim(claim_of(id, continues=True)), before)
    assert (await granted(ledger, structs.replace(ID, key="absent"), continues=True)).attempts == 1


# --- DONE, TOMBSTONE, gone (P9) --------------------------------------------------------------------------------------


async def test_an_outcome_is_replayed_until_its_retention_is_over(ledger: Ledger, store: Store) -> None:
    """P9: the retention given at completion counts, and from then on."""
    record = await granted(ledger, retention=5.0)
    assert await ledger.complete(record.token, outcome_of(), RETENTION)
    completed = await present(ledger)
    assert completed.completed_at is not None
    assert abs(completed.completed_at - time.time()) < 60
    assert completed.completed_at >= completed.started_at
    store.age(ID, RETENTION - 60)
    done = await ledger.claim(claim_of())
    assert (done.state, done.outcome) == (State.DONE, outcome_of())


async def test_after_its_retention_a_claim_finds_a_tombstone_that_knows_it_was_done(ledger: Ledger, store: Store) -> None:
    record = await granted(ledger)
    outcome = outcome_of(b'{"balance":5}', "error")
    assert await ledger.complete(record.token, outcome, RETENTION)
    store.age(ID, RETENTION + 1)
    aged = await present(ledger)
    buried = await ledger.claim(claim_of(on_crash="rerun"))
    assert buried.state is State.TOMBSTONE
    assert buried.outcome == Outcome("error", None, outcome.digest)
    assert (buried.completed_at, buried.token, buried.attempts) == (aged.completed_at, record.token, 1)
    assert same(await ledger.claim(claim_of()), buried)
    assert same(await ledger.get(ID), buried)


async def test_until_a_claim_or_the_sweep_buries_it_a_reader_sees_what_was_done(ledger: Ledger, store: Store) -> None:
    """Reading changes nothing, and every store shows the same."""
    done = await in_state(State.DONE, ledger, store)
    store.age(ID, RETENTION + 1)
    seen = await present(ledger)
    assert (seen.state, seen.outcome, seen.token) == (State.DONE, outcome_of(), done.token)
    assert (await ledger.list(), await ledger.list(State.DONE), await ledger.list(State.TOMBSTONE)) == ([seen], [seen], [])
    assert await ledger.counts() == {**dict.fromkeys(State, 0), State.DONE: 1}
    assert (await ledger.claim(claim_of())).state is State.TOMBSTONE
    assert (await ledger.counts())[State.TOMBSTONE] == 1


async def test_the_sweep_buries_and_after_eight_retentions_forgets(ledger: Ledger, store: Store) -> None:
    """P9: DONE, TOMBSTONE, absent."""
    await in_state(State.DONE, ledger, store)
    store.age(ID, RETENTION - 60)
    assert await ledger.sweep() == 0
    store.age(ID, 61)
    assert await ledger.sweep() == 1
    tombstone = await present(ledger)
    assert (tombstone.state, tombstone.outcome) == (State.TOMBSTONE, Outcome("result", None, outcome_of().digest))
    store.age(ID, (TOMBSTONE_FACTOR - 1) * RETENTION - 60)
    assert await ledger.sweep() == 0
    assert (await ledger.claim(claim_of())).state is State.TOMBSTONE
    store.age(ID, 61)
    assert await ledger.sweep() == 1
    assert await ledger.get(ID) is None
    assert (await granted(ledger)).attempts == 1


@pytest.mark.parametrize("turn", ["claim", "sweep", "abandon"])
async def test_unknown_is_kept_until_a_person_resolves_it(turn: str, ledger: Ledger, store: Store) -> None:
    """P9: whatever made it unknown, however short its retention, and however far the store's clock jumps."""
    record = await granted(ledger, retention=1.0)
    if turn == "abandon":
        assert await ledger.abandon(record.token)
    else:
        store.age(ID, LEASE + 2)
        await (ledger.claim(claim_of()) if turn == "claim" else ledger.sweep())
    for days in (8, 3650):
        store.age(ID, days * 86_400)
        assert await ledger.sweep() == 0
        assert (await ledger.claim(claim_of(on_crash="rerun"))).state is State.UNKNOWN
    assert await ledger.resolve(ID, None)
    assert await ledger.get(ID) is None


async def test_a_clock_that_jumps_forward_does_not_let_a_command_run_again_that_was_done(
    ledger: Ledger, store: Store
) -> None:
    """P9: the jump costs the payload at most, since the time of a tombstone begins when it becomes one."""
    done = await in_state(State.DONE, ledger, store)
    store.age(ID, 100 * RETENTION)
    assert (await ledger.sweep(), await ledger.sweep()) == (1, 0)
    again = await ledger.claim(claim_of(on_crash="rerun"))
    assert (again.state, again.token) == (State.TOMBSTONE, done.token)


@pytest.mark.parametrize("state", [State.RUNNING, State.WAITING])
async def test_the_sweep_removes_what_did_nothing(state: State, ledger: Ledger, store: Store) -> None:
    """A run that never reached its commit point, and a call whose caller never answered, leave nothing to look into."""
    record = await granted(ledger, committed=state is State.WAITING)
    assert state is State.RUNNING or await ledger.suspend(record.token, outcome_of(), RETENTION)
    store.age(ID, RETENTION - 60)
    assert await ledger.sweep() == 0
    store.age(ID, LEASE + 61)
    assert await ledger.sweep() == 1
    assert await ledger.get(ID) is None
    assert not await ledger.commit_point(record.token, LEASE)
    assert (await granted(ledger, continues=state is State.WAITING)).attempts == 1


async def test_the_sweep_leaves_the_evidence_of_a_vanished_holder_for_the_whole_retention(
    ledger: Ledger, store: Store
) -> None:
    """The lease is a field of the record, never its expiry."""
    record = await granted(ledger)
    store.age(ID, LEASE + RETENTION - 60)
    assert await ledger.sweep() == 0
    assert (await present(ledger)).state is State.RUNNING
    store.age(ID, 61)
    assert await ledger.sweep() == 1
    unknown = await present(ledger)
    assert (unknown.state, unknown.token) == (State.UNKNOWN, record.token)
    assert await ledger.complete(record.token, outcome_of(), RETENTION)


async def test_the_sweep_never_touches_a_live_lease(ledger: Ledger, store: Store) -> None:
    """A holder that beats lives as long as it likes, however short the retention."""
    record = await granted(ledger, retention=1.0)
    for _ in range(3):
        store.age(ID, LEASE - 5)
        assert await ledger.sweep() == 0
        assert await ledger.heartbeat(record.token, LEASE)
    alive = await present(ledger)
    assert (alive.state, alive.token) == (State.RUNNING, record.token)


async def test_a_heartbeat_in_time_keeps_the_sweep_away(ledger: Ledger, store: Store) -> None:
    record = await granted(ledger, retention=1.0)
    store.age(ID, LEASE + 2)
    assert await ledger.heartbeat(record.token, LEASE)
    assert await ledger.sweep() == 0


async def test_the_sweep_changes_no_more_than_its_limit_and_gets_there_in_the_end(ledger: Ledger, store: Store) -> None:
    ids = [structs.replace(ID, key=f"key-{number}") for number in range(7)]
    for id in ids[:5]:
        await in_state(State.DONE, ledger, store, id)
        store.age(id, RETENTION + 1)
    for id in ids[5:]:
        await in_state(State.DONE, ledger, store, id)
    changed = [await ledger.sweep(2) for _ in range(8)]
    assert max(changed) <= 2
    assert sum(changed) == 5
    assert await ledger.counts() == {**dict.fromkeys(State, 0), State.TOMBSTONE: 5, State.DONE: 2}
    assert await ledger.sweep() == 0


async def test_the_sweep_of_every_state_at_once(ledger: Ledger, store: Store) -> None:
    for state in State:
        id = structs.replace(ID, key=state.value)
        await in_state(state, ledger, store, id)
        store.age(id, (TOMBSTONE_FACTOR - 1) * RETENTION + 1)
    assert await ledger.sweep() == 4
    assert await ledger.counts() == {**dict.fromkeys(State, 0), State.TOMBSTONE: 1, State.UNKNOWN: 2}
    assert await ledger.sweep() == 0


# --- bytes and names -------------------------------------------------------------------------------------------------

PAYLOADS: dict[str, bytes | None] = {
    "null": b"null",
    "false": b"false",
    "zero": b"0",
    "empty string": b'""',
    "empty object": b"{}",
    "empty array": b"[]",
    "nothing at all": b"",
    "too large to keep": None,
    "the word None": b"None",
    "all bytes": bytes(range(256)),
    "line ends": b"\r\n$-1\r\n:0\r\n\n\n",
    "SQL": b"'); DROP TABLE x; -- %s %(a)s $1 ? \\x00 \\\\",
    "half a character": b'"\xff\xfe\xed\xa0\x80"',
    "digits and spaces": b"-1 12 3\n",
    "a megabyte": os.urandom(1 << 20),
    "a megabyte of JSON": b'"' + "ä€😀\\u0000".encode() * 80_000 + b'"',
}


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("kind", ["result", "error"])
async def test_an_outcome_comes_back_byte_for_byte(payload: str, kind: str, ledger: Ledger) -> None:
    """Outcomes are bytes: nothing looks at whether a result is true, empty or null."""
    outcome = outcome_of(PAYLOADS[payload], kind)
    record = await granted(ledger)
    assert await ledger.complete(record.token, outcome, RETENTION)
    assert (await present(ledger)).outcome == outcome
    assert (await ledger.claim(claim_of())).outcome == outcome
    assert [each.outcome for each in await ledger.list()] == [outcome]


@pytest.mark.parametrize("payload", PAYLOADS)
async def test_an_interim_outcome_and_a_resolved_one_come_back_byte_for_byte(payload: str, ledger: Ledger) -> None:
    outcome = outcome_of(PAYLOADS[payload])
    record = await granted(ledger)
    assert await ledger.suspend(record.token, outcome, RETENTION)
    assert (await ledger.claim(claim_of())).outcome == outcome
    record = await granted(ledger, continues=True)
    assert await ledger.abandon(record.token)
    assert await ledger.resolve(ID, outcome)
    assert (await ledger.claim(claim_of())).outcome == outcome


@pytest.mark.parametrize("digest", [b"", b"\0", bytes(range(32)), os.urandom(64)], ids=["none", "NUL", "plain", "long"])
async def test_a_digest_without_a_payload_is_kept_also_in_the_tombstone(digest: bytes, ledger: Ledger, store: Store) -> None:
    record = await granted(ledger)
    outcome = Outcome("result", None, digest)
    assert await ledger.complete(record.token, outcome, RETENTION)
    assert (await ledger.claim(claim_of())).outcome == outcome
    store.age(ID, RETENTION + 1)
    buried = await ledger.claim(claim_of())
    assert (buried.state, buried.outcome) == (State.TOMBSTONE, outcome)


async def test_a_payload_does_not_outlive_what_follows_it(ledger: Ledger) -> None:
    """A result without a payload after an interim one with it: nothing of the older may show."""
    record = await granted(ledger)
    assert await ledger.suspend(record.token, outcome_of(b'"interim"', "error"), RETENTION)
    record = await granted(ledger, continues=True)
    assert (await present(ledger)).outcome is None
    outcome = Outcome("result", None, b"digest")
    assert await ledger.complete(record.token, outcome, RETENTION)
    assert (await present(ledger)).outcome == outcome


@pytest.mark.parametrize("raw", [b"", b"\0" * 16, bytes(range(240, 256)), b"' OR 1=1 --", b"\n\r:\xff"])
async def test_fingerprints_and_nonces_are_any_bytes(raw: bytes, ledger: Ledger) -> None:
    record = await granted(ledger, fingerprint=raw, nonce=raw)
    assert (await ledger.claim(claim_of(fingerprint=raw + b"\0"))).nonce == raw
    assert await ledger.complete(structs.replace(record.token, nonce=raw + b"\0"), outcome_of(), RETENTION) is False
    assert await ledger.complete(record.token, outcome_of(), RETENTION)
    assert (await ledger.claim(claim_of(fingerprint=raw))).state is State.DONE


PRINTABLE = "".join(map(chr, range(33, 127)))

ODD = [
    RecordId("", "m", "k"),
    RecordId("", "", "k"),
    RecordId("a", "b:c", "k"),
    RecordId("a:b", "c", "k"),
    RecordId("a:b:c", "", "k"),
    RecordId("a%3Ab", "c", "k"),
    RecordId("a/b", "c", "k"),
    RecordId("a", "b/c", "k"),
    RecordId("a", "b", "c/k"),
    RecordId("a", "b", "c:k"),
    RecordId("a", "b", "c%3Ak"),
    RecordId("a ", "b", "k"),
    RecordId("a", " b", "k"),
    RecordId("A", "b", "k"),
    RecordId("a", "b", "K"),
    RecordId("a", "b", "k"),
    RecordId("a", "tools/call search", "k"),
    RecordId("line\r\nend\t", "m", "k"),
    RecordId("{tag}*?[x]\\", "m*", "*"),
    RecordId("'\"`;--", "$1 %s %(x)s", "?"),
    RecordId("ünï", "größe", "k"),
    RecordId("u\u0308ni\u0308", "größe", "k"),
    RecordId("\uffff", "m", "k"),
    RecordId("\U00010000", "m", "k"),
    RecordId("😀", "メソッド", "k"),
    RecordId("x" * 1000, "y" * 500, "z"),
    RecordId("null", "None", "0"),
    RecordId("a", "b", PRINTABLE),
    RecordId("a", "b", "x" * 255),
    RecordId("a", "b", "x" * 254 + "y"),
    RecordId("a", "b", "!"),
]


async def test_callers_methods_and_keys_of_any_shape_are_told_apart(ledger: Ledger) -> None:
    """P5: what belongs to one caller, method and key is never found under another."""
    assert len(set(ODD)) == len(ODD)
    for number, id in enumerate(ODD):
        record = await granted(ledger, id)
        assert await ledger.complete(record.token, outcome_of(b"%d" % number), RETENTION)
    for number, id in enumerate(ODD):
        record = await ledger.claim(claim_of(id))
        assert (record.id, record.outcome) == (id, outcome_of(b"%d" % number))
        assert same(await ledger.get(id), record)
    assert [record.id for record in await ledger.list()] == sorted(ODD)
    assert (await ledger.counts())[State.DONE] == len(ODD)


@pytest.mark.parametrize("id", ODD, ids=range(len(ODD)))
async def test_every_transition_finds_a_record_of_any_name(id: RecordId, ledger: Ledger, store: Store) -> None:
    record = await granted(ledger, id, committed=False)
    assert await ledger.heartbeat(record.token, LEASE)
    assert await ledger.commit_point(record.token, LEASE)
    assert await ledger.suspend(record.token, outcome_of(), RETENTION)
    record = await granted(ledger, id, continues=True)
    assert await ledger.lapse(record.token)
    record = await granted(ledger, id, on_crash="rerun")
    assert await ledger.abandon(record.token)
    assert await ledger.resolve(id, None)
    record = await granted(ledger, id)
    assert await ledger.release(record.token)
    record = await granted(ledger, id)
    assert await ledger.complete(record.token, outcome_of(), RETENTION)
    store.age(id, RETENTION + 1)
    assert await ledger.sweep() == 1
    assert (await present(ledger, id)).state is State.TOMBSTONE


@pytest.mark.parametrize("caller", ["nul\0", "half \ud83d", "\udcff"], ids=["NUL", "surrogate", "escaped byte"])
async def test_a_caller_that_a_store_cannot_write_is_refused_without_harm(caller: str, ledger: Ledger) -> None:
    """Kept exactly or refused with the ledger's own error; never mangled, and nobody else suffers."""
    strange = structs.replace(ID, caller=caller)
    others = [structs.replace(ID, key=f"key-{number}") for number in range(5)]
    results = await asyncio.gather(*(ledger.claim(claim_of(id)) for id in (*others, strange, ID)), return_exceptions=True)
    *fine, answer, last = results
    assert all(isinstance(record, Record) and record.state is State.RUNNING for record in (*fine, last))
    assert isinstance(answer, LedgerDown) or (isinstance(answer, Record) and answer.id == strange)
    if isinstance(answer, Record):
        assert same(await ledger.get(strange), answer)
    else:
        for change in CHANGES.values():
            with pytest.raises(LedgerDown):
                await change(ledger, Token(strange, 1, b"n"))
        for look in (ledger.get, lambda id: ledger.list(after=id), lambda id: ledger.resolve(id, None)):
            with pytest.raises(LedgerDown):
                await look(strange)
    assert (await present(ledger)).state is State.RUNNING


async def test_long_terms_are_kept_and_short_ones_are_over_at_once(ledger: Ledger, store: Store) -> None:
    century = 100 * 365 * 86_400.0
    record = await granted(ledger, lease=century, retention=century)
    assert record.lease_left > century / 2
    assert await ledger.complete(record.token, outcome_of(), century)
    store.age(ID, century / 2)
    assert (await ledger.claim(claim_of())).state is State.DONE
    other = structs.replace(ID, key="short")
    record = await granted(ledger, other, lease=1e-6, retention=1e-6, committed=False)
    store.age(other, 1)
    assert await ledger.commit_point(record.token, 1.0) is False
    assert await ledger.complete(record.token, outcome_of(), 0.5)
    store.age(other, 1)
    assert (await ledger.claim(claim_of(other))).state is State.TOMBSTONE


# --- looking ---------------------------------------------------------------------------------------------------------


async def test_records_are_listed_in_the_order_of_their_ids_a_page_at_a_time(ledger: Ledger) -> None:
    ids = [RecordId(caller, method, key) for caller in ("", "b", "a") for method in ("y", "x") for key in ("3", "20", "1")]
    for id in ids:
        await granted(ledger, id)
    ordered = sorted(ids)
    assert [record.id for record in await ledger.list()] == ordered
    assert [record.id for record in await ledger.list(limit=4)] == ordered[:4]
    pages: list[RecordId] = []
    while page := await ledger.list(limit=4, after=pages[-1] if pages else None):
        assert len(page) <= 4
        pages += [record.id for record in page]
    assert pages == ordered
    between = RecordId("a", "x", "2")
    assert [record.id for record in await ledger.list(after=between)] == [id for id in ordered if id > between]
    assert await ledger.list(after=ordered[-1]) == []
    assert await ledger.list(limit=0) == []


async def test_a_listed_record_is_what_get_gives(ledger: Ledger, store: Store) -> None:
    for state in State:
        await in_state(state, ledger, store, structs.replace(ID, key=state.value))
    listed = await ledger.list()
    assert [record.id.key for record in listed] == sorted(state.value for state in State)
    for record in listed:
        assert same(record, await ledger.get(record.id))


async def test_records_are_listed_by_state(ledger: Ledger, store: Store) -> None:
    for number in range(3):
        for state in State:
            await in_state(state, ledger, store, RecordId("", state.value, str(number)))
    for state in State:
        expected = [RecordId("", state.value, str(number)) for number in range(3)]
        assert [record.id for record in await ledger.list(state)] == expected
        assert [record.id for record in await ledger.list(state, limit=2)] == expected[:2]
        assert [record.id for record in await ledger.list(state, limit=2, after=expected[1])] == expected[2:]
    assert len(await ledger.list(limit=100)) == 15


async def test_more_records_than_a_page_of_any_store(ledger: Ledger) -> None:
    ids = [RecordId("caller", "method", f"{number:04}") for number in range(1050)]
    await asyncio.gather(*(ledger.claim(claim_of(id)) for id in ids))
    assert [record.id for record in await ledger.list(limit=2000)] == ids
    assert [record.id for record in await ledger.list(limit=300, after=ids[699])] == ids[700:1000]
    assert len(await ledger.list()) == 100
    assert (await ledger.counts())[State.RUNNING] == 1050
    assert await ledger.sweep() == 0


async def test_records_are_counted_by_state(ledger: Ledger, store: Store) -> None:
    assert await ledger.counts() == dict.fromkeys(State, 0)
    for number, state in enumerate(State):
        for key in range(number):
            await in_state(state, ledger, store, RecordId("", state.value, str(key)))
    assert await ledger.counts() == {state: number for number, state in enumerate(State)}


async def test_an_empty_ledger_has_nothing(ledger: Ledger) -> None:
    assert await ledger.get(ID) is None
    assert await ledger.list() == []
    assert await ledger.list(State.UNKNOWN) == []
    assert await ledger.sweep() == 0


# --- races -----------------------------------------------------------------------------------------------------------


async def handles(store: Store, number: int) -> list[Ledger]:
    """Several handles on one ledger, as several processes would have them."""
    return [await store.open() for _ in range(number)]


async def close(opened: list[Ledger]) -> None:
    for handle in opened:
        await handle.aclose()


async def test_of_many_claims_at_once_exactly_one_is_granted(store: Store) -> None:
    """P5, and what every loser sees is the winner's record."""
    opened = await handles(store, 3)
    claims = [claim_of() for _ in range(60)]
    records = await asyncio.gather(*(opened[n % 3].claim(claim) for n, claim in enumerate(claims)))
    winners = [claim for claim, record in zip(claims, records, strict=True) if record.nonce == claim.nonce]
    assert len(winners) == 1
    assert {record.token for record in records} == {(await present(opened[0])).token}
    assert all(record.state is State.RUNNING and record.attempts == 1 for record in records)
    await close(opened)


async def test_of_many_take_overs_at_once_exactly_one_is_granted(store: Store) -> None:
    opened = await handles(store, 3)
    await granted(opened[0])
    store.age(ID, LEASE + 1)
    claims = [claim_of(on_crash="rerun") for _ in range(60)]
    records = await asyncio.gather(*(opened[n % 3].claim(claim) for n, claim in enumerate(claims)))
    assert sum(record.nonce == claim.nonce for claim, record in zip(claims, records, strict=True)) == 1
    assert {record.attempts for record in records} == {2}
    assert len({record.token for record in records}) == 1
    await close(opened)


async def test_of_many_continuations_at_once_exactly_one_is_granted(store: Store) -> None:
    opened = await handles(store, 3)
    await in_state(State.WAITING, opened[0], store)
    claims = [claim_of(continues=True) for _ in range(30)]
    records = await asyncio.gather(*(opened[n % 3].claim(claim) for n, claim in enumerate(claims)))
    assert sum(record.nonce == claim.nonce for claim, record in zip(claims, records, strict=True)) == 1
    await close(opened)


@pytest.mark.parametrize("change", ["complete", "suspend", "release", "abandon"])
async def test_of_many_equal_transitions_at_once_exactly_one_is_accepted(change: str, store: Store) -> None:
    opened = await handles(store, 3)
    record = await granted(opened[0])
    accepted = await asyncio.gather(*(CHANGES[change](opened[n % 3], record.token) for n in range(12)))
    assert sum(accepted) == 1
    await close(opened)


async def test_of_an_ending_and_a_removal_at_once_exactly_one_is_accepted(store: Store) -> None:
    opened = await handles(store, 2)
    for number in range(10):
        id = structs.replace(ID, key=str(number))
        token = (await granted(opened[0], id)).token
        first, second = (opened[0], opened[1]) if number % 2 else (opened[1], opened[0])
        completed, released = await asyncio.gather(first.complete(token, outcome_of(), RETENTION), second.release(token))
        assert completed is not released
        left = await opened[0].get(id)
        assert (left is not None and left.state is State.DONE) if completed else left is None
    await close(opened)


async def test_a_late_completion_and_an_operator_at_once_leave_one_outcome(store: Store) -> None:
    opened = await handles(store, 2)
    for number in range(10):
        id = structs.replace(ID, key=str(number))
        token = (await in_state(State.UNKNOWN, opened[0], store, id)).token
        completed, resolved = await asyncio.gather(
            opened[number % 2].complete(token, outcome_of(b'"late"'), RETENTION),
            opened[1 - number % 2].resolve(id, outcome_of(b'"found"')),
        )
        assert completed is not resolved
        assert (await present(opened[0], id)).outcome == outcome_of(b'"late"' if completed else b'"found"')
    await close(opened)


async def test_sweeps_at_once_change_every_record_once(store: Store) -> None:
    opened = await handles(store, 2)
    for number in range(20):
        id = structs.replace(ID, key=str(number))
        await in_state(State.DONE, opened[0], store, id)
        store.age(id, RETENTION + 1)
    changed = await asyncio.gather(*(handle.sweep() for handle in opened))
    changed += [await opened[0].sweep()]
    assert sum(changed) == 20
    assert (await opened[1].counts())[State.TOMBSTONE] == 20
    await close(opened)


@durable_only
def test_of_claims_from_many_threads_exactly_one_per_key_is_granted(store: Store) -> None:
    asyncio.run(close_at_once(store))
    ids = [structs.replace(ID, key=str(number)) for number in range(20)]
    tokens: list[Token] = []
    failures: list[BaseException] = []
    together = threading.Barrier(4)

    async def work() -> None:
        ledger = await store.open()
        together.wait()
        for id in ids:
            claim = claim_of(id)
            record = await ledger.claim(claim)
            if record.nonce == claim.nonce:
                tokens.append(record.token)
                assert await ledger.complete(record.token, outcome_of(), RETENTION)
        await ledger.aclose()

    def run() -> None:
        try:
            asyncio.run(work())
        except BaseException as error:
            failures.append(error)
            together.abort()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(token.id for token in tokens) == sorted(ids)
    assert len({token.fence for token in tokens}) == 20


def forget_schema(store: Store) -> None:
    """SQLite's file and the keys in Redis are new for every test; in PostgreSQL only the rows are."""
    if store.kind == "postgres":
        with psycopg.connect(store.url, autocommit=True) as db:
            db.execute("DROP SCHEMA IF EXISTS wirecall CASCADE")


async def close_at_once(store: Store) -> None:
    ledger = await store.open()
    await ledger.aclose()


@durable_only
@pytest.mark.parametrize("time", range(5))
async def test_a_new_store_is_opened_by_many_at_once(time: int, store: Store) -> None:
    forget_schema(store)
    opened = await asyncio.gather(*(store.open() for _ in range(6)))
    fences = [(await granted(each, structs.replace(ID, key=str(n)))).fence for n, each in enumerate(opened)]
    assert fences == sorted(set(fences))
    assert (await opened[0].counts())[State.RUNNING] == 6
    await close(opened)


# --- lives of a handle -----------------------------------------------------------------------------------------------


LOOKS: dict[str, Callable[[Ledger, RecordId], Awaitable[Any]]] = {
    "claim": lambda ledger, id: ledger.claim(claim_of(id, on_crash="rerun")),
    "get": lambda ledger, id: ledger.get(id),
    "list": lambda ledger, _: ledger.list(),
    "counts": lambda ledger, _: ledger.counts(),
    "sweep": lambda ledger, _: ledger.sweep(),
}


@pytest.mark.parametrize("action", [*LOOKS, *CHANGES])
async def test_a_caller_that_goes_away_leaves_the_ledger_usable(action: str, ledger: Ledger) -> None:
    """Cancelled at every step of the wait; the record is then untouched or changed, never anything between."""
    for steps in range(8):
        id = structs.replace(ID, key=f"{action}-{steps}")
        record = await granted(ledger, id)
        wait = CHANGES[action](ledger, record.token) if action in CHANGES else LOOKS[action](ledger, id)
        task = asyncio.ensure_future(wait)
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        after = await ledger.get(id)
        assert after is None or after.token == record.token
        fresh = structs.replace(ID, key=f"{action}-{steps}-fresh")
        assert (await granted(ledger, fresh)).attempts == 1
    await ledger.counts()


async def test_a_cancelled_first_claim_is_taken_back_or_still_held_by_its_nonce(ledger: Ledger) -> None:
    """The claimer ran nothing: whatever is left is a record with its nonce, or nothing."""
    for steps in range(8):
        id = structs.replace(ID, key=str(steps))
        claim = claim_of(id)
        task = asyncio.ensure_future(ledger.claim(claim))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        again = claim_of(id)
        record = await ledger.claim(again)
        assert record.nonce in (claim.nonce, again.nonce)
        assert (record.state, record.attempts) == (State.RUNNING, 1)


async def test_closing_twice_is_closing_once(store: Store) -> None:
    ledger = await store.open()
    await granted(ledger)
    await ledger.aclose()
    await ledger.aclose()


async def test_closing_what_was_never_used(store: Store) -> None:
    await close_at_once(store)


async def test_a_closed_handle_does_not_close_another(store: Store, ledger: Ledger) -> None:
    record = await granted(ledger)
    other = await store.open()
    assert await other.heartbeat(record.token, LEASE)
    await other.aclose()
    assert await ledger.complete(record.token, outcome_of(), RETENTION)


async def test_two_handles_see_the_same_records(store: Store, ledger: Ledger) -> None:
    other = await store.open()
    record = await granted(ledger)
    assert same(await other.get(ID), record)
    assert await other.complete(record.token, outcome_of(), RETENTION)
    assert (await present(ledger)).state is State.DONE
    await other.aclose()


async def test_records_are_kept_when_the_ledger_is_closed_and_opened_again(store: Store) -> None:
    """P9: what was acknowledged is there after a restart, in every state, and the fences go on."""
    ledger = await store.open()
    before = {state: await in_state(state, ledger, store, structs.replace(ID, key=state.value)) for state in State}
    await ledger.aclose()
    ledger = await store.open()
    for record in before.values():
        assert same(await ledger.get(record.id), record)
    assert await ledger.complete(before[State.RUNNING].token, outcome_of(), RETENTION)
    assert (await granted(ledger)).fence > max(record.fence for record in before.values())
    await ledger.aclose()


def test_one_handle_serves_two_event_loops_one_after_another(store: Store) -> None:
    async def begin() -> tuple[Ledger, Record]:
        ledger = await store.open()
        return ledger, await granted(ledger)

    async def end(ledger: Ledger, record: Record) -> None:
        assert same(await ledger.get(ID), record)
        assert await ledger.complete(record.token, outcome_of(), RETENTION)
        assert (await ledger.claim(claim_of())).state is State.DONE
        await ledger.aclose()

    asyncio.run(end(*asyncio.run(begin())))


async def test_a_ping_leaves_nothing_behind(ledger: Ledger, store: Store) -> None:
    record = await granted(ledger)
    await asyncio.gather(*(ledger.ping() for _ in range(8)))
    assert [found.id for found in await ledger.list()] == [ID]
    assert sum((await ledger.counts()).values()) == 1
    assert same(await ledger.get(ID), record)


# --- a server that goes away -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["redis", "cluster", "postgres"], indirect=True)
@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_server_that_is_gone_is_ledger_down_and_comes_back_with_its_records(
    how: str, store: Store, request: pytest.FixtureRequest
) -> None:
    """P9: nothing that was acknowledged is lost; and of the driver's errors none reaches the caller."""
    server: Server = request.getfixturevalue(f"{store.kind}_server")
    ledger = await store.open()
    before = {state: await in_state(state, ledger, store, structs.replace(ID, key=state.value)) for state in State}
    token = before[State.RUNNING].token
    getattr(server, how)()
    try:
        actions: list[Awaitable[Any]] = [change(ledger, token) for change in CHANGES.values()]
        actions += [ledger.claim(claim_of()), ledger.get(ID), ledger.list(), ledger.counts(), ledger.sweep()]
        actions.append(ledger.ping())
        actions += [ledger.resolve(ID, None), store.open()]
        results = await asyncio.gather(*actions, return_exceptions=True)
        assert [type(result) for result in results] == [LedgerDown] * len(actions)
    finally:
        server.start()
    await answers_again(ledger)
    for record in before.values():
        assert same(await ledger.get(record.id), record)
    assert await ledger.complete(token, outcome_of(), RETENTION)
    assert (await granted(ledger)).fence > max(record.fence for record in before.values())
    await ledger.aclose()
