"""The table of states: claims, tokens, leases, and records that are UNKNOWN, WAITING, DONE or gone."""

import os
import time
from typing import Any

import pytest
from msgspec import structs

from tests.ledger import (
    ID,
    LEASE,
    OTHER_PRINT,
    PRINT,
    RETENTION,
    claim_of,
    granted,
    in_state,
    outcome_of,
    present,
    same,
)
from tests.ledger.contract import ALLOWED, CHANGES
from tests.ledger.removals import remove_by_release, remove_by_resolve, remove_by_sweep
from tests.servers import Store
from wirecall.ledger.base import (
    MAX_ATTEMPTS,
    TOMBSTONE_FACTOR,
    UNKNOWN_AFTER,
    Ledger,
    Outcome,
    Record,
    State,
    Token,
)

# --- the table of states --------------------------------------------------------------------------


async def test_first_claim_is_granted_with_all_fields_of_the_claim(ledger: Ledger) -> None:
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
async def test_claim_does_not_change_a_record_before_its_lease_or_retention_ends(
    state: State, ledger: Ledger, store: Store
) -> None:
    """P5:

    RUNNING is waited for, DONE is replayed, UNKNOWN and TOMBSTONE are reported; WAITING replays its
    last answer.
    """
    before = await in_state(state, ledger, store)
    for on_crash in ("unknown", "rerun", "reconcile", "transactional"):
        seen = await ledger.claim(claim_of(on_crash=on_crash))
        assert same(seen, before), on_crash
        assert same(await ledger.get(ID), before), on_crash


@pytest.mark.parametrize("state", State)
async def test_claim_with_other_params_changes_nothing_in_any_state_and_at_any_age(
    state: State, ledger: Ledger, store: Store
) -> None:
    """The fingerprint is compared before anything else."""
    before = await in_state(state, ledger, store)
    for seconds in (0, LEASE + 1, RETENTION):
        store.age(ID, seconds)
        before = await present(ledger)
        seen = await ledger.claim(
            claim_of(fingerprint=OTHER_PRINT, on_crash="rerun", continues=True, committed=False)
        )
        assert seen.fingerprint == PRINT
        assert seen.nonce == before.nonce
        assert same(await ledger.get(ID), before)


async def test_repeated_claim_finds_its_record(ledger: Ledger) -> None:
    """A claimer with a lost answer asks again with its nonce: the record is its own, and counts
    once.
    """
    claim = claim_of()
    first = await ledger.claim(claim)
    assert same(await ledger.claim(claim), first)


@pytest.mark.parametrize("on_crash", ["unknown", "rerun", "reconcile", "transactional"])
@pytest.mark.parametrize("committed", [True, False])
async def test_repeated_claim_after_its_lease_finds_its_record_with_a_new_lease(
    committed: bool, on_crash: str, ledger: Ledger, store: Store
) -> None:
    """Its answer was lost for longer than the lease.

    Nothing ran, so this is still the first attempt.
    """
    claim = claim_of(committed=committed, on_crash=on_crash)
    first = await ledger.claim(claim)
    store.age(ID, LEASE + 1)
    aged = await present(ledger)
    again = await ledger.claim(claim)
    assert again == structs.replace(aged, lease_left=again.lease_left)
    assert again.token == first.token and again.lease_left > LEASE / 2
    assert same(await ledger.get(ID), again)
    assert await ledger.complete(again.token, outcome_of(), RETENTION)


async def test_repeated_claim_turns_its_unknown_record_to_running(
    ledger: Ledger, store: Store
) -> None:
    """Another claim has found its lease expired; only the claimer knows that it has not begun."""
    claim = claim_of()
    first = await ledger.claim(claim)
    store.age(ID, LEASE + 1)
    assert (await ledger.claim(claim_of())).state is State.UNKNOWN
    again = await ledger.claim(claim)
    assert (again.state, again.token, again.attempts) == (State.RUNNING, first.token, 1)
    assert again.lease_left > LEASE / 2
    store.age(ID, LEASE + UNKNOWN_AFTER - 1)
    assert await ledger.sweep() == 0, "it is kept as long as any that runs"
    store.age(ID, 2)
    assert await ledger.sweep() == 1
    assert (await present(ledger)).state is State.UNKNOWN


@pytest.mark.parametrize("on_crash", ["unknown", "rerun", "reconcile", "transactional"])
async def test_expired_lease_before_the_commit_point_is_taken_over(
    on_crash: str, ledger: Ledger, store: Store
) -> None:
    """Nothing was done, so even an `unknown` command may run."""
    first = await granted(ledger, committed=False)
    store.age(ID, LEASE + 1)
    second = await granted(ledger, committed=False, on_crash=on_crash)
    assert second.fence > first.fence
    assert second.attempts == 2
    assert not second.committed


async def test_expired_lease_after_the_commit_point_turns_to_unknown(
    ledger: Ledger, store: Store
) -> None:
    """B2: the outcome is unknown, and the command does not run again.

    The holder's fence still counts.
    """
    first = await granted(ledger)
    store.age(ID, LEASE + 1)
    aged = await present(ledger)
    assert aged.lease_left == 0
    second = await ledger.claim(claim_of())
    assert same(second, structs.replace(aged, state=State.UNKNOWN))
    assert second.token == first.token
    assert same(await ledger.claim(claim_of(on_crash="rerun")), second)


@pytest.mark.parametrize("on_crash", ["rerun", "reconcile"])
async def test_expired_lease_is_taken_over_by_a_claim_that_may_run_it_again(
    on_crash: str, ledger: Ledger, store: Store
) -> None:
    first = await granted(ledger)
    store.age(ID, LEASE + 1)
    aged = await present(ledger)
    second = await granted(ledger, on_crash=on_crash, lease=50.0)
    assert second.fence > first.fence
    assert (second.attempts, second.committed, second.started_at) == (2, True, aged.started_at)
    # The difference of two times may be rounded up.
    assert 40 < second.lease_left <= 50 + 1e-9
    assert same(await ledger.get(ID), second)


async def test_record_stays_committed_when_it_is_taken_over(ledger: Ledger, store: Store) -> None:
    """The commit point of an earlier run is a fact about the command, not about the run."""
    first = await granted(ledger, committed=False)
    assert await ledger.commit_point(first.token, LEASE)
    store.age(ID, LEASE + 1)
    second = await granted(ledger, committed=False, on_crash="rerun")
    assert second.committed
    store.age(ID, LEASE + 1)
    assert (await ledger.claim(claim_of(committed=False))).state is State.UNKNOWN


async def test_taken_over_record_is_committed_if_its_new_holder_is(
    ledger: Ledger, store: Store
) -> None:
    await granted(ledger, committed=False)
    store.age(ID, LEASE + 1)
    assert (await granted(ledger, committed=True)).committed


async def test_command_is_not_run_more_than_five_times(ledger: Ledger, store: Store) -> None:
    fences = []
    for attempt in range(1, MAX_ATTEMPTS + 1):
        record = await granted(ledger, on_crash="rerun")
        assert record.attempts == attempt
        fences.append(record.fence)
        store.age(ID, LEASE + 1)
    last = await ledger.claim(claim_of(on_crash="rerun"))
    assert (last.state, last.attempts, last.fence) == (State.UNKNOWN, 5, fences[-1])
    assert fences == sorted(set(fences))


async def test_runs_that_did_nothing_do_not_count_against_the_five(
    ledger: Ledger, store: Store
) -> None:
    for attempt in range(1, MAX_ATTEMPTS + 3):
        assert (await granted(ledger, committed=False)).attempts == attempt
        store.age(ID, LEASE + 1)


async def test_take_over_sets_the_lease_and_retention(ledger: Ledger, store: Store) -> None:
    await granted(ledger, retention=RETENTION)
    store.age(ID, LEASE + 1)
    await granted(ledger, on_crash="rerun", lease=50.0, retention=20.0)
    store.age(ID, 69)
    assert await ledger.sweep() == 0
    store.age(ID, 2)
    assert await ledger.sweep() == 1
    assert (await present(ledger)).state is State.UNKNOWN


# --- tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", CHANGES)
async def test_token_with_one_wrong_part_changes_nothing(change: str, ledger: Ledger) -> None:
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


@pytest.mark.parametrize("state", [state for state in State if state is not State.RUNNING])
async def test_transition_is_refused_in_every_other_state(
    state: State, ledger: Ledger, store: Store
) -> None:
    """The token is the right one: a DONE record stays as it was recorded, and evidence is not
    removed.
    """
    record = await in_state(state, ledger, store)
    for change in (name for name in CHANGES if state not in ALLOWED[name]):
        assert await CHANGES[change](ledger, record.token) is False, change
        assert same(await ledger.get(ID), record), change


@pytest.mark.parametrize("change", CHANGES)
async def test_transition_of_an_absent_record_is_refused(change: str, ledger: Ledger) -> None:
    assert await CHANGES[change](ledger, Token(ID, 1, os.urandom(16))) is False
    assert await ledger.get(ID) is None


@pytest.mark.parametrize("remove", [remove_by_release, remove_by_resolve, remove_by_sweep])
@pytest.mark.parametrize("reused", [False, True], ids=["another nonce", "the same nonce"])
async def test_token_of_a_removed_record_does_not_fit_its_next_one(
    remove: Any, reused: bool, ledger: Ledger, store: Store
) -> None:
    """ABA: the fence continues to grow over the removal, so that a reused nonce does not help."""
    first = await granted(ledger)
    await remove(ledger, store, first)
    assert await ledger.get(ID) is None
    second = await granted(ledger, nonce=first.nonce if reused else os.urandom(16))
    assert second.fence > first.fence
    assert second.attempts == 1
    for change in CHANGES.values():
        assert await change(ledger, first.token) is False
    assert same(await ledger.get(ID), second)


async def test_holder_that_lost_its_lease_is_refused_every_transition(
    ledger: Ledger, store: Store
) -> None:
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


# --- leases ---------------------------------------------------------------------------------------


async def test_heartbeat_renews_the_lease(ledger: Ledger, store: Store) -> None:
    record = await granted(ledger)
    store.age(ID, 20)
    assert (await present(ledger)).lease_left <= 10
    assert await ledger.heartbeat(record.token, 40.0)
    beaten = await present(ledger)
    assert 30 < beaten.lease_left <= 40
    assert (beaten.token, beaten.state, beaten.attempts) == (record.token, State.RUNNING, 1)
    store.age(ID, 35)
    assert (await ledger.claim(claim_of(on_crash="rerun"))).token == record.token


async def test_heartbeat_revives_a_lease_that_was_not_taken_over(
    ledger: Ledger, store: Store
) -> None:
    record = await granted(ledger)
    store.age(ID, LEASE + 1)
    assert await ledger.heartbeat(record.token, LEASE)
    assert (await ledger.claim(claim_of(on_crash="rerun"))).token == record.token


async def test_commit_point_is_marked_and_renews_the_lease(ledger: Ledger, store: Store) -> None:
    record = await granted(ledger, committed=False)
    store.age(ID, 20)
    assert await ledger.commit_point(record.token, 40.0)
    marked = await present(ledger)
    assert marked.committed
    assert 30 < marked.lease_left <= 40
    assert await ledger.commit_point(record.token, LEASE)


async def test_commit_point_is_refused_once_the_lease_is_over(ledger: Ledger, store: Store) -> None:
    """Another run may be about to take over: a late holder must stop before the effect."""
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


async def test_lapsed_lease_of_an_unknown_command_turns_to_unknown(ledger: Ledger) -> None:
    first = await granted(ledger)
    assert await ledger.lapse(first.token)
    assert (await ledger.claim(claim_of())).state is State.UNKNOWN


@pytest.mark.parametrize("state", [state for state in State if state is not State.RUNNING])
async def test_only_a_running_record_has_a_lease(
    state: State, ledger: Ledger, store: Store
) -> None:
    assert (await in_state(state, ledger, store)).lease_left == 0


# --- UNKNOWN --------------------------------------------------------------------------------------


async def test_late_completion_turns_unknown_to_done(ledger: Ledger, store: Store) -> None:
    """B2: the ledger accepts a late report."""
    first = await granted(ledger)
    store.age(ID, LEASE + 1)
    assert (await ledger.claim(claim_of())).state is State.UNKNOWN
    assert await ledger.complete(first.token, outcome_of(b'"late"'), RETENTION)
    done = await ledger.claim(claim_of())
    assert (done.state, done.outcome) == (State.DONE, outcome_of(b'"late"'))


async def test_abandoned_record_is_unknown_and_its_holder_may_still_complete_it(
    ledger: Ledger,
) -> None:
    first = await granted(ledger)
    assert await ledger.abandon(first.token)
    unknown = await present(ledger)
    assert same(unknown, structs.replace(first, state=State.UNKNOWN, lease_left=0))
    assert await ledger.complete(first.token, outcome_of(), RETENTION)
    assert (await present(ledger)).state is State.DONE


async def test_operator_resolves_unknown_as_done(ledger: Ledger, store: Store) -> None:
    first = await in_state(State.UNKNOWN, ledger, store)
    assert await ledger.resolve(ID, outcome_of(b'"found"'), RETENTION)
    done = await present(ledger)
    assert (done.state, done.outcome, done.attempts, done.fence) == (
        State.DONE,
        outcome_of(b'"found"'),
        1,
        first.fence,
    )
    assert done.completed_at is not None
    assert await ledger.complete(first.token, outcome_of(b'"stale"'), RETENTION) is False
    assert same(await ledger.claim(claim_of()), done)


async def test_operator_resolves_unknown_as_not_done(ledger: Ledger, store: Store) -> None:
    first = await in_state(State.UNKNOWN, ledger, store)
    assert await ledger.resolve(ID, None)
    assert await ledger.get(ID) is None
    assert await ledger.complete(first.token, outcome_of(b'"stale"'), RETENTION) is False
    assert await ledger.get(ID) is None
    assert (await granted(ledger)).attempts == 1


@pytest.mark.parametrize("state", [state for state in State if state is not State.UNKNOWN])
@pytest.mark.parametrize("outcome", [None, outcome_of(b'"found"')], ids=["not done", "done"])
async def test_only_unknown_records_are_resolved(
    state: State, outcome: Any, ledger: Ledger, store: Store
) -> None:
    before = await in_state(state, ledger, store)
    assert await ledger.resolve(ID, outcome) is False
    assert same(await ledger.get(ID), before)


@pytest.mark.parametrize("outcome", [None, outcome_of(b'"found"')], ids=["not done", "done"])
async def test_absent_record_is_not_resolved(outcome: Any, ledger: Ledger) -> None:
    assert await ledger.resolve(ID, outcome) is False
    assert await ledger.get(ID) is None


async def test_resolved_record_is_kept_for_a_day_by_default(ledger: Ledger, store: Store) -> None:
    await in_state(State.UNKNOWN, ledger, store, retention=1.0)
    assert await ledger.resolve(ID, outcome_of())
    store.age(ID, 86_400 - 60)
    assert (await ledger.claim(claim_of())).state is State.DONE
    store.age(ID, 120)
    assert (await ledger.claim(claim_of())).state is State.TOMBSTONE


# --- WAITING --------------------------------------------------------------------------------------


async def test_suspended_record_keeps_its_answer_and_resumes_with_a_new_token(
    ledger: Ledger,
) -> None:
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


async def test_suspended_record_is_not_committed(ledger: Ledger, store: Store) -> None:
    """Its handler has done nothing, so another run may take over the next leg until that commits."""
    first = await granted(ledger)
    assert first.committed
    assert await ledger.suspend(first.token, outcome_of(b'"which account?"'), RETENTION)
    assert not (await present(ledger)).committed
    second = await granted(ledger, continues=True, committed=False)
    assert not second.committed
    store.age(ID, LEASE + 1)
    assert (await granted(ledger, committed=False)).attempts == 2


async def test_suspended_record_may_wait_more_often_than_it_may_crash(ledger: Ledger) -> None:
    record = await granted(ledger)
    for leg in range(MAX_ATTEMPTS + 2):
        assert await ledger.suspend(record.token, outcome_of(b"%d" % leg), RETENTION)
        record = await granted(ledger, continues=True)


async def test_continuing_claim_has_no_special_right_in_other_states(
    ledger: Ledger, store: Store
) -> None:
    for state in (State.RUNNING, State.DONE, State.UNKNOWN, State.TOMBSTONE):
        id = structs.replace(ID, key=state.value)
        before = await in_state(state, ledger, store, id)
        assert same(await ledger.claim(claim_of(id, continues=True)), before)
    assert (await granted(ledger, structs.replace(ID, key="absent"), continues=True)).attempts == 1


# --- DONE, TOMBSTONE, gone (P9) -------------------------------------------------------------------


async def test_outcome_is_replayed_until_its_retention_is_over(
    ledger: Ledger, store: Store
) -> None:
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


async def test_tombstone_after_the_retention_says_that_the_command_was_done(
    ledger: Ledger, store: Store
) -> None:
    record = await granted(ledger)
    outcome = outcome_of(b'{"balance":5}', "error")
    assert await ledger.complete(record.token, outcome, RETENTION)
    store.age(ID, RETENTION + 1)
    aged = await present(ledger)
    buried = await ledger.claim(claim_of(on_crash="rerun"))
    assert buried.state is State.TOMBSTONE
    assert buried.outcome == Outcome("error", None, outcome.digest)
    assert (buried.completed_at, buried.token, buried.attempts) == (
        aged.completed_at,
        record.token,
        1,
    )
    assert same(await ledger.claim(claim_of()), buried)
    assert same(await ledger.get(ID), buried)


async def test_reader_sees_the_outcome_until_a_claim_or_the_sweep_makes_a_tombstone(
    ledger: Ledger, store: Store
) -> None:
    """Reading changes nothing, and every store shows the same."""
    done = await in_state(State.DONE, ledger, store)
    store.age(ID, RETENTION + 1)
    seen = await present(ledger)
    assert (seen.state, seen.outcome, seen.token) == (State.DONE, outcome_of(), done.token)
    assert (
        await ledger.list(),
        await ledger.list(State.DONE),
        await ledger.list(State.TOMBSTONE),
    ) == ([seen], [seen], [])
    assert await ledger.counts() == {**dict.fromkeys(State, 0), State.DONE: 1}
    assert (await ledger.claim(claim_of())).state is State.TOMBSTONE
    assert (await ledger.counts())[State.TOMBSTONE] == 1


async def test_sweep_makes_a_tombstone_and_removes_it_after_eight_retentions(
    ledger: Ledger, store: Store
) -> None:
    """P9: DONE, TOMBSTONE, absent."""
    await in_state(State.DONE, ledger, store)
    store.age(ID, RETENTION - 60)
    assert await ledger.sweep() == 0
    store.age(ID, 61)
    assert await ledger.sweep() == 1
    tombstone = await present(ledger)
    assert (tombstone.state, tombstone.outcome) == (
        State.TOMBSTONE,
        Outcome("result", None, outcome_of().digest),
    )
    store.age(ID, (TOMBSTONE_FACTOR - 1) * RETENTION - 60)
    assert await ledger.sweep() == 0
    assert (await ledger.claim(claim_of())).state is State.TOMBSTONE
    store.age(ID, 61)
    assert await ledger.sweep() == 1
    assert await ledger.get(ID) is None
    assert (await granted(ledger)).attempts == 1


@pytest.mark.parametrize("turn", ["claim", "sweep", "abandon"])
async def test_unknown_is_kept_until_a_person_resolves_it(
    turn: str, ledger: Ledger, store: Store
) -> None:
    """P9: for every cause, for the shortest retention, and for any jump of the store's clock."""
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


async def test_clock_that_jumps_forward_does_not_let_a_done_command_run_again(
    ledger: Ledger, store: Store
) -> None:
    """P9: the jump costs the payload at most, since the time of a tombstone begins when it becomes
    one.
    """
    done = await in_state(State.DONE, ledger, store)
    store.age(ID, 100 * RETENTION)
    assert (await ledger.sweep(), await ledger.sweep()) == (1, 0)
    again = await ledger.claim(claim_of(on_crash="rerun"))
    assert (again.state, again.token) == (State.TOMBSTONE, done.token)


@pytest.mark.parametrize("state", [State.RUNNING, State.WAITING])
async def test_sweep_removes_records_of_runs_that_did_nothing(
    state: State, ledger: Ledger, store: Store
) -> None:
    """A run that never reached its commit point, and a call whose caller never answered, leave
    nothing to look into.
    """
    record = await granted(ledger, committed=state is State.WAITING)
    assert state is State.RUNNING or await ledger.suspend(record.token, outcome_of(), RETENTION)
    store.age(ID, RETENTION - 60)
    assert await ledger.sweep() == 0
    store.age(ID, LEASE + 61)
    assert await ledger.sweep() == 1
    assert await ledger.get(ID) is None
    assert not await ledger.commit_point(record.token, LEASE)
    assert (await granted(ledger, continues=state is State.WAITING)).attempts == 1


async def test_sweep_leaves_the_evidence_of_a_vanished_holder(ledger: Ledger, store: Store) -> None:
    """The lease is a field of the record, never its expiry."""
    record = await granted(ledger)
    store.age(ID, LEASE + UNKNOWN_AFTER + 1)
    assert await ledger.sweep() == 1
    store.age(ID, 10 * RETENTION)
    assert await ledger.sweep() == 0
    unknown = await present(ledger)
    assert (unknown.state, unknown.token) == (State.UNKNOWN, record.token)
    assert await ledger.complete(record.token, outcome_of(), RETENTION)


async def test_sweep_never_touches_a_live_lease(ledger: Ledger, store: Store) -> None:
    """A holder that renews its lease keeps its record, for the shortest retention too."""
    record = await granted(ledger, retention=1.0)
    for _ in range(3):
        store.age(ID, LEASE - 5)
        assert await ledger.sweep() == 0
        assert await ledger.heartbeat(record.token, LEASE)
    alive = await present(ledger)
    assert (alive.state, alive.token) == (State.RUNNING, record.token)


async def test_heartbeat_in_time_protects_a_record_from_the_sweep(
    ledger: Ledger, store: Store
) -> None:
    record = await granted(ledger, retention=1.0)
    store.age(ID, LEASE + 2)
    assert await ledger.heartbeat(record.token, LEASE)
    assert await ledger.sweep() == 0


async def test_sweep_keeps_to_its_limit_and_finishes_in_several_rounds(
    ledger: Ledger, store: Store
) -> None:
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


async def test_sweep_handles_every_state_at_once(ledger: Ledger, store: Store) -> None:
    for state in State:
        id = structs.replace(ID, key=state.value)
        await in_state(state, ledger, store, id)
        store.age(id, (TOMBSTONE_FACTOR - 1) * RETENTION + 1)
    assert await ledger.sweep() == 4
    assert await ledger.counts() == {
        **dict.fromkeys(State, 0),
        State.TOMBSTONE: 1,
        State.UNKNOWN: 2,
    }
    assert await ledger.sweep() == 0
