"""Handles that race, are closed, or lose their server."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec import structs

from tests.ledger import (
    ID,
    LEASE,
    RETENTION,
    answers_again,
    claim_of,
    granted,
    in_state,
    outcome_of,
    present,
    same,
)
from tests.ledger.contract import CHANGES, close_at_once, durable_only
from tests.ledger.schema import forget_schema
from tests.servers import Server, Store
from wirecall.ledger.base import (
    Ledger,
    LedgerDown,
    Record,
    RecordId,
    State,
    Task,
    Token,
)

# --- races ----------------------------------------------------------------------------------------


async def handles(store: Store, number: int) -> list[Ledger]:
    """Several handles on one ledger, as several processes would have them."""
    return [await store.open() for _ in range(number)]


async def close(opened: list[Ledger]) -> None:
    for handle in opened:
        await handle.aclose()


async def test_claims_at_once_are_granted_exactly_once(store: Store) -> None:
    """P5, and every loser sees the winner's record."""
    opened = await handles(store, 3)
    claims = [claim_of() for _ in range(60)]
    records = await asyncio.gather(*(opened[n % 3].claim(claim) for n, claim in enumerate(claims)))
    winners = [
        claim for claim, record in zip(claims, records, strict=True) if record.nonce == claim.nonce
    ]
    assert len(winners) == 1
    assert {record.token for record in records} == {(await present(opened[0])).token}
    assert all(record.state is State.RUNNING and record.attempts == 1 for record in records)
    await close(opened)


async def test_take_overs_at_once_are_granted_exactly_once(store: Store) -> None:
    opened = await handles(store, 3)
    await granted(opened[0])
    store.age(ID, LEASE + 1)
    claims = [claim_of(on_crash="rerun") for _ in range(60)]
    records = await asyncio.gather(*(opened[n % 3].claim(claim) for n, claim in enumerate(claims)))
    assert (
        sum(record.nonce == claim.nonce for claim, record in zip(claims, records, strict=True)) == 1
    )
    assert {record.attempts for record in records} == {2}
    assert len({record.token for record in records}) == 1
    await close(opened)


async def test_continuations_at_once_are_granted_exactly_once(store: Store) -> None:
    opened = await handles(store, 3)
    await in_state(State.WAITING, opened[0], store)
    claims = [claim_of(continues=True) for _ in range(30)]
    records = await asyncio.gather(*(opened[n % 3].claim(claim) for n, claim in enumerate(claims)))
    assert (
        sum(record.nonce == claim.nonce for claim, record in zip(claims, records, strict=True)) == 1
    )
    await close(opened)


@pytest.mark.parametrize("change", ["complete", "suspend", "release", "abandon"])
async def test_transitions_that_are_equal_and_at_once_are_accepted_exactly_once(
    change: str, store: Store
) -> None:
    opened = await handles(store, 3)
    record = await granted(opened[0])
    accepted = await asyncio.gather(
        *(CHANGES[change](opened[n % 3], record.token) for n in range(12))
    )
    assert sum(accepted) == 1
    await close(opened)


async def test_completion_and_removal_at_once_are_accepted_exactly_once(store: Store) -> None:
    opened = await handles(store, 2)
    for number in range(10):
        id = structs.replace(ID, key=str(number))
        token = (await granted(opened[0], id)).token
        first, second = (opened[0], opened[1]) if number % 2 else (opened[1], opened[0])
        completed, released = await asyncio.gather(
            first.complete(token, outcome_of(), RETENTION), second.release(token)
        )
        assert completed is not released
        left = await opened[0].get(id)
        assert (left is not None and left.state is State.DONE) if completed else left is None
    await close(opened)


async def test_late_completion_and_an_operator_at_once_leave_one_outcome(store: Store) -> None:
    opened = await handles(store, 2)
    for number in range(10):
        id = structs.replace(ID, key=str(number))
        token = (await in_state(State.UNKNOWN, opened[0], store, id)).token
        completed, resolved = await asyncio.gather(
            opened[number % 2].complete(token, outcome_of(b'"late"'), RETENTION),
            opened[1 - number % 2].resolve(id, outcome_of(b'"found"')),
        )
        assert completed is not resolved
        assert (await present(opened[0], id)).outcome == outcome_of(
            b'"late"' if completed else b'"found"'
        )
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
def test_claims_from_many_threads_are_granted_once_per_key(store: Store) -> None:
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


@durable_only
@pytest.mark.parametrize("time", range(5))
async def test_new_store_is_opened_by_many_at_once(time: int, store: Store) -> None:
    forget_schema(store)
    opened = await asyncio.gather(*(store.open() for _ in range(6)))
    fences = [
        (await granted(each, structs.replace(ID, key=str(n)))).fence
        for n, each in enumerate(opened)
    ]
    assert fences == sorted(set(fences))
    assert (await opened[0].counts())[State.RUNNING] == 6
    await close(opened)


# --- lives of a handle ----------------------------------------------------------------------------


LOOKS: dict[str, Callable[[Ledger, RecordId], Awaitable[Any]]] = {
    "claim": lambda ledger, id: ledger.claim(claim_of(id, on_crash="rerun")),
    "get": lambda ledger, id: ledger.get(id),
    "list": lambda ledger, _: ledger.list(),
    "counts": lambda ledger, _: ledger.counts(),
    "sweep": lambda ledger, _: ledger.sweep(),
}


@pytest.mark.parametrize("action", [*LOOKS, *CHANGES])
async def test_caller_that_leaves_keeps_the_ledger_usable(action: str, ledger: Ledger) -> None:
    """Cancelled at every step of the wait; the record is then untouched or changed as a whole."""
    for steps in range(8):
        id = structs.replace(ID, key=f"{action}-{steps}")
        record = await granted(ledger, id)
        wait = (
            CHANGES[action](ledger, record.token)
            if action in CHANGES
            else LOOKS[action](ledger, id)
        )
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


async def test_cancelled_first_claim_is_released_or_still_held_by_its_nonce(ledger: Ledger) -> None:
    """The claimer ran nothing: the ledger holds a record with its nonce, or nothing."""
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


async def test_handle_may_be_closed_twice(store: Store) -> None:
    ledger = await store.open()
    await granted(ledger)
    await ledger.aclose()
    await ledger.aclose()


async def test_handle_may_be_closed_unused(store: Store) -> None:
    await close_at_once(store)


async def test_closed_handle_does_not_close_another(store: Store, ledger: Ledger) -> None:
    record = await granted(ledger)
    other = await store.open()
    assert await other.heartbeat(record.token, LEASE)
    await other.aclose()
    assert await ledger.complete(record.token, outcome_of(), RETENTION)


async def test_handles_see_the_same_records(store: Store, ledger: Ledger) -> None:
    other = await store.open()
    record = await granted(ledger)
    assert same(await other.get(ID), record)
    assert await other.complete(record.token, outcome_of(), RETENTION)
    assert (await present(ledger)).state is State.DONE
    await other.aclose()


async def test_records_are_kept_when_the_ledger_is_closed_and_opened_again(store: Store) -> None:
    """P9: acknowledged records survive a restart, in every state, and the fences continue to grow."""
    ledger = await store.open()
    before = {
        state: await in_state(state, ledger, store, structs.replace(ID, key=state.value))
        for state in State
    }
    await ledger.aclose()
    ledger = await store.open()
    for record in before.values():
        assert same(await ledger.get(record.id), record)
    assert await ledger.complete(before[State.RUNNING].token, outcome_of(), RETENTION)
    assert (await granted(ledger)).fence > max(record.fence for record in before.values())
    await ledger.aclose()


def test_handle_serves_two_event_loops_one_after_another(store: Store) -> None:
    async def begin() -> tuple[Ledger, Record]:
        ledger = await store.open()
        return ledger, await granted(ledger)

    async def end(ledger: Ledger, record: Record) -> None:
        assert same(await ledger.get(ID), record)
        assert await ledger.complete(record.token, outcome_of(), RETENTION)
        assert (await ledger.claim(claim_of())).state is State.DONE
        await ledger.aclose()

    asyncio.run(end(*asyncio.run(begin())))


async def test_ping_leaves_nothing_behind(ledger: Ledger, store: Store) -> None:
    record = await granted(ledger)
    await asyncio.gather(*(ledger.ping() for _ in range(8)))
    assert [found.id for found in await ledger.list()] == [ID]
    assert sum((await ledger.counts()).values()) == 1
    assert same(await ledger.get(ID), record)


# --- a server that goes away ----------------------------------------------------------------------


@pytest.mark.parametrize("store", ["redis", "cluster", "postgres"], indirect=True)
@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_server_that_is_gone_is_ledger_down_and_returns_with_its_records(
    how: str, store: Store, request: pytest.FixtureRequest
) -> None:
    """P9: no acknowledged record is lost, and the driver's errors do not reach the caller."""
    server: Server = request.getfixturevalue(f"{store.kind}_server")
    ledger = await store.open()
    before = {
        state: await in_state(state, ledger, store, structs.replace(ID, key=state.value))
        for state in State
    }
    token = before[State.RUNNING].token
    getattr(server, how)()
    try:
        actions: list[Awaitable[Any]] = [change(ledger, token) for change in CHANGES.values()]
        actions += [
            ledger.claim(claim_of()),
            ledger.get(ID),
            ledger.list(),
            ledger.counts(),
            ledger.sweep(),
        ]
        actions.append(ledger.ping())
        actions += [ledger.resolve(ID, None), store.open()]
        actions += [ledger.task("task"), ledger.task_of(ID), ledger.orphans()]
        actions.append(ledger.change_task(Task("task", ID, 1, b"", False, False, 1)))
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
