"""Tasks: the second row about a record, its versions and its end, and the tasks that have no
process.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from msgspec import structs

from tests.ledger import (
    ID,
    LEASE,
    RETENTION,
    claim_of,
    granted,
    in_state,
    outcome_of,
    present,
    same,
)
from tests.ledger.contract import TTL, durable_only
from tests.ledger.removals import remove_by_release, remove_by_resolve, remove_by_sweep
from tests.servers import Store
from wirecall.ledger.base import Ledger, LedgerDown, Record, RecordId, State, Task

DOCUMENT = b'{"arguments": {}}\0\xff'  # the store does not read it

# Every task operation of a store, on a handle that cannot do it.
METHODS: dict[str, Callable[[Ledger, Record], Awaitable[Any]]] = {
    "begin_task": lambda ledger, record: ledger.begin_task(record.token, "task", DOCUMENT, TTL),
    "task": lambda ledger, _: ledger.task("task"),
    "task_of": lambda ledger, record: ledger.task_of(record.id),
    "change_task": lambda ledger, record: ledger.change_task(
        Task("task", record.id, 1, DOCUMENT, False, False, TTL)
    ),
    "orphans": lambda ledger, _: ledger.orphans(),
}


@pytest.fixture
async def other(store: Store) -> AsyncIterator[Ledger]:
    """A second handle on the same tasks."""
    ledger = await store.open()
    yield ledger
    await ledger.aclose()


async def begun(
    ledger: Ledger, id: str = "task", record_id: RecordId = ID, **fields: Any
) -> Record:
    """A running new record, and its task."""
    record = await granted(ledger, record_id, **fields)
    assert await ledger.begin_task(record.token, id, DOCUMENT, TTL)
    return record


async def found(ledger: Ledger, id: str = "task") -> Task:
    task = await ledger.task(id)
    assert task is not None, id
    return task


async def change(ledger: Ledger, id: str = "task", **fields: Any) -> None:
    assert await ledger.change_task(structs.replace(await found(ledger, id), **fields))


# --- a task and its record ------------------------------------------------------------------------


async def test_task_has_what_it_was_begun_with_and_its_record(
    ledger: Ledger, other: Ledger
) -> None:
    record = await begun(ledger)
    for handle in (ledger, other):
        for task in (await handle.task("task"), await handle.task_of(ID)):
            assert task is not None
            assert (task.id, task.record, task.version, task.document) == ("task", ID, 1, DOCUMENT)
            assert (task.is_ready, task.is_over) == (False, False)
            assert TTL - 60 < task.ttl_left <= TTL
            assert same(task.now, record)
    assert same(await present(ledger), record), "the record is as it was"
    assert [each.id for each in await ledger.list()] == [ID]
    assert sum((await ledger.counts()).values()) == 1


@pytest.mark.parametrize("id", ["", "none", "nul\0", "half \ud83d", "a:b/*?", "x" * 10_000])
async def test_task_that_was_not_begun_does_not_exist(id: str, ledger: Ledger) -> None:
    """For every string that a caller takes for an id."""
    await granted(ledger)
    assert await ledger.task(id) is None
    assert await ledger.task_of(ID) is None
    assert await ledger.task_of(structs.replace(ID, key="none")) is None


@pytest.mark.parametrize("id", ["a:b", "{a}b", "*?[x]", "größer", "task:", "x" * 200])
async def test_every_printable_id_is_an_id(id: str, ledger: Ledger) -> None:
    await begun(ledger, id)
    await change(ledger, id, document=b"second")
    assert (await found(ledger, id)).document == b"second"
    assert (found_of := await ledger.task_of(ID)) is not None and found_of.id == id
    assert [each.id for each in await ledger.list()] == [ID]


@pytest.mark.parametrize(
    "document", [b"", bytes(range(256)), b"x" * 1_000_000], ids=["empty", "all bytes", "large"]
)
async def test_document_is_kept_byte_for_byte(document: bytes, ledger: Ledger) -> None:
    record = await granted(ledger)
    assert await ledger.begin_task(record.token, "task", document, TTL)
    assert (await found(ledger)).document == document
    await change(ledger, document=document + b"!")
    assert (await found(ledger)).document == document + b"!"


async def test_task_is_refused_without_a_valid_token(ledger: Ledger, store: Store) -> None:
    """The table of tokens is in test_states; here, a refusal leaves no task, and does not change
    one.
    """
    first = await granted(ledger, committed=False)
    store.age(ID, LEASE + 1)
    second = await granted(ledger, committed=False)
    assert not await ledger.begin_task(first.token, "task", DOCUMENT, TTL)
    assert await ledger.task("task") is None
    assert await ledger.task_of(ID) is None
    assert await ledger.begin_task(second.token, "other", DOCUMENT, TTL)
    assert not await ledger.begin_task(first.token, "task", DOCUMENT, TTL)
    assert not await ledger.begin_task(first.token, "other", b"another", TTL)
    assert (await found(ledger, "other")).document == DOCUMENT
    assert await ledger.orphans() == []


async def test_record_in_every_state_takes_a_task_only_while_it_runs(
    ledger: Ledger, store: Store
) -> None:
    for state in State:
        id = structs.replace(ID, key=state.value)
        record = await in_state(state, ledger, store, id)
        assert await ledger.begin_task(record.token, state.value, DOCUMENT, TTL) is (
            state is State.RUNNING
        )
        assert (await ledger.task(state.value) is None) is (state is not State.RUNNING)


async def test_begin_task_during_a_take_over_comes_first_or_is_refused(
    ledger: Ledger, other: Ledger, store: Store
) -> None:
    for number in range(10):
        id = structs.replace(ID, key=str(number))
        record = await granted(ledger, id, committed=False)
        store.age(id, LEASE + 1)
        first, second = (ledger, other) if number % 2 else (other, ledger)
        is_begun, taken = await asyncio.gather(
            first.begin_task(record.token, id.key, DOCUMENT, TTL),
            second.claim(claim_of(id, committed=False)),
        )
        assert taken.attempts == 2
        assert (await ledger.task(id.key) is not None) is is_begun
        assert await second.begin_task(taken.token, f"second-{number}", DOCUMENT, TTL)
        assert (task := await ledger.task_of(id)) is not None and task.id == f"second-{number}"


async def test_task_that_is_begun_again_is_one_task(ledger: Ledger, other: Ledger) -> None:
    """The answer was lost, so its holder asks again. A later change stays."""
    record = await begun(ledger)
    await change(ledger, document=b"second")
    for handle in (other, ledger):
        assert await handle.begin_task(record.token, "task", DOCUMENT, TTL)
    task = await found(ledger)
    assert (task.version, task.document) == (2, b"second")


async def test_task_id_of_another_record_is_refused(ledger: Ledger) -> None:
    """Also if that task has the same id, but was removed since.

    The record that asked for it has no task.
    """
    first = await begun(ledger)
    second = await granted(ledger, structs.replace(ID, key="key-2"))
    assert not await ledger.begin_task(second.token, "task", b"another", TTL)
    assert await ledger.task_of(second.id) is None
    assert await ledger.release(first.token)
    third = await granted(ledger)
    assert not await ledger.begin_task(third.token, "task", b"another", TTL)
    assert await ledger.task_of(ID) is None
    task = await found(ledger)
    assert (task.record, task.document, task.now) == (ID, DOCUMENT, None)


@pytest.mark.parametrize("state", State)
async def test_task_shows_its_record_in_every_state(
    state: State, ledger: Ledger, store: Store
) -> None:
    record = await begun(ledger)
    if state is State.WAITING:
        assert await ledger.suspend(record.token, outcome_of(b'"interim"'), RETENTION)
    elif state is State.UNKNOWN:
        assert await ledger.abandon(record.token)
    elif state in (State.DONE, State.TOMBSTONE):
        assert await ledger.complete(record.token, outcome_of(), RETENTION)
    if state is State.TOMBSTONE:
        store.age(ID, RETENTION + 1)
        assert await ledger.sweep() == 1
    stands = await present(ledger)
    assert stands.state is state
    assert same((await found(ledger)).now, stands)
    assert (task := await ledger.task_of(ID)) is not None and same(task.now, stands)
    assert (await found(ledger)).version == 1


async def test_task_stays_with_a_record_that_another_run_takes_over(
    ledger: Ledger, store: Store
) -> None:
    await begun(ledger, committed=False)
    store.age(ID, LEASE + 1)
    second = await granted(ledger, committed=False)
    assert (task := await ledger.task_of(ID)) is not None and task.id == "task"
    assert same(task.now, second)
    assert await ledger.complete(second.token, outcome_of(), RETENTION)
    assert (now := (await found(ledger)).now) is not None and now.outcome == outcome_of()


@pytest.mark.parametrize("remove", [remove_by_release, remove_by_resolve, remove_by_sweep])
async def test_task_outlives_its_record(remove: Any, ledger: Ledger, store: Store) -> None:
    """It is found by its own id.

    A new record under the old one is another record, maybe with other params.
    """
    await remove(ledger, store, await begun(ledger))
    assert (await found(ledger)).now is None
    assert await ledger.task_of(ID) is None
    await change(ledger, is_over=True, document=b"the end")

    second = await granted(ledger)
    assert (await found(ledger)).now is None
    assert await ledger.task_of(ID) is None
    assert await ledger.begin_task(second.token, "second", DOCUMENT, TTL)
    assert (task := await ledger.task_of(ID)) is not None and task.id == "second"
    assert same(task.now, second)
    first = await found(ledger)
    assert (first.now, first.document, first.is_over) == (None, b"the end", True)


async def test_record_has_its_last_task(ledger: Ledger, other: Ledger) -> None:
    record = await begun(ledger, "z")
    for id, handle in (("m", other), ("a", ledger), ("x", other)):
        assert await handle.begin_task(record.token, id, DOCUMENT, TTL)
        assert (task := await ledger.task_of(ID)) is not None and task.id == id
    for id in "zmax":
        assert same((await found(ledger, id)).now, record)


# --- versions -------------------------------------------------------------------------------------


async def test_change_writes_its_fields_and_raises_the_version(
    ledger: Ledger, other: Ledger
) -> None:
    record = await begun(ledger)
    task = await found(ledger)
    strange = {"record": structs.replace(ID, key="key-2"), "ttl_left": 1.0, "now": None}
    assert await ledger.change_task(
        structs.replace(task, document=b"second", is_ready=True, is_over=True, **strange)
    )
    for handle in (ledger, other):
        second = await found(handle)
        assert (second.version, second.document, second.is_ready, second.is_over) == (
            2,
            b"second",
            True,
            True,
        )
        assert (second.record, second.ttl_left > TTL - 60) == (ID, True)
        assert same(second.now, record)


async def test_change_of_another_version_is_refused(ledger: Ledger, other: Ledger) -> None:
    await begun(ledger)
    first = await found(ledger)
    await change(other, document=b"second")
    for version in (0, 1, 3):
        assert not await ledger.change_task(
            structs.replace(first, version=version, document=b"lost", is_over=True)
        )
    assert not await ledger.change_task(structs.replace(first, id="none"))
    assert await ledger.task("none") is None
    second = await found(ledger)
    assert (second.version, second.document, second.is_over) == (2, b"second", False)


async def test_changes_of_one_version_at_once_are_accepted_exactly_once(
    ledger: Ledger, other: Ledger
) -> None:
    """Also for equal changes: each is a separate change."""
    await begun(ledger)
    for version in range(1, 6):
        task = await found(ledger)
        assert task.version == version
        changes = [structs.replace(task, document=b"%d" % (number // 2)) for number in range(12)]
        accepted = await asyncio.gather(
            *((ledger, other)[n % 2].change_task(each) for n, each in enumerate(changes))
        )
        assert sum(accepted) == 1
        assert (await found(other)).document == changes[accepted.index(True)].document


async def test_change_needs_no_token(ledger: Ledger) -> None:
    """The process that receives an answer, or a request to cancel, is not the one that runs the
    task.
    """
    record = await begun(ledger)
    await change(ledger, document=b"cancel")
    assert await ledger.complete(record.token, outcome_of(), RETENTION)
    await change(ledger, document=b"final", is_over=True)
    assert (await found(ledger)).version == 3


# --- orphans --------------------------------------------------------------------------------------


async def test_running_task_is_an_orphan_when_its_lease_is_over(
    ledger: Ledger, other: Ledger, store: Store
) -> None:
    record = await begun(ledger)
    assert await ledger.orphans() == []
    store.age(ID, LEASE + 1)
    for handle in (ledger, other):
        assert await handle.orphans() == ["task"]
    assert await ledger.heartbeat(record.token, LEASE)
    assert await ledger.orphans() == []
    assert await ledger.lapse(record.token)
    assert await ledger.orphans() == ["task"]
    await granted(other, on_crash="rerun")
    assert await ledger.orphans() == []


async def test_waiting_task_is_an_orphan_when_it_is_ready(ledger: Ledger, other: Ledger) -> None:
    record = await begun(ledger)
    await change(ledger, is_ready=True)
    assert await ledger.orphans() == [], "it runs"
    await change(ledger, is_ready=False)
    assert await ledger.suspend(record.token, outcome_of(), RETENTION)
    assert await other.orphans() == []
    await change(other, is_ready=True)
    assert await ledger.orphans() == await other.orphans() == ["task"]
    await granted(ledger, continues=True)
    assert await other.orphans() == []


@pytest.mark.parametrize("state", [State.DONE, State.UNKNOWN, State.TOMBSTONE])
async def test_task_whose_record_has_ended_is_not_an_orphan(
    state: State, ledger: Ledger, store: Store
) -> None:
    record = await begun(ledger)
    await change(ledger, is_ready=True)
    if state is State.UNKNOWN:
        assert await ledger.abandon(record.token)
    else:
        assert await ledger.complete(record.token, outcome_of(), RETENTION)
    if state is State.TOMBSTONE:
        store.age(ID, RETENTION + 1)
        await ledger.claim(claim_of())
    assert (await present(ledger)).state is state
    assert await ledger.orphans() == []


async def test_task_that_is_over_is_not_an_orphan(ledger: Ledger, store: Store) -> None:
    await begun(ledger)
    store.age(ID, LEASE + 1)
    assert await ledger.orphans() == ["task"]
    await change(ledger, is_over=True)
    assert await ledger.orphans() == await ledger.orphans() == []


@pytest.mark.parametrize("remove", [remove_by_release, remove_by_resolve, remove_by_sweep])
async def test_task_without_its_record_is_not_an_orphan(
    remove: Any, ledger: Ledger, store: Store
) -> None:
    """It is not an orphan of the next record either."""
    await remove(ledger, store, await begun(ledger))
    await granted(ledger)
    store.age(ID, LEASE + 1)
    assert await ledger.orphans() == []


async def test_orphan_without_a_task_is_not_found(ledger: Ledger, store: Store) -> None:
    await granted(ledger)
    store.age(ID, LEASE + 1)
    assert await ledger.orphans() == []


async def test_orphans_are_found_among_many_others(ledger: Ledger, store: Store) -> None:
    expected = []
    for number in range(30):
        id = structs.replace(ID, key=str(number))
        name = f"task-{number}"
        record = await begun(ledger, name, id)
        if number % 3 == 0:
            assert await ledger.lapse(record.token)
            expected.append(name)
        elif number % 3 == 1:
            await change(ledger, name, is_over=True)
            assert await ledger.lapse(record.token)
    assert sorted(await ledger.orphans()) == sorted(expected)
    few = await ledger.orphans(limit=4)
    assert len(set(few)) == 4 and set(few) < set(expected)
    assert await ledger.orphans(limit=0) == []


# --- the end --------------------------------------------------------------------------------------


async def test_task_is_forgotten_after_its_ttl_and_its_record_is_not(
    ledger: Ledger, store: Store
) -> None:
    record = await begun(ledger)
    assert await ledger.lapse(record.token)
    store.age_task("task", TTL - 60)
    task = await found(ledger)
    assert 0 < task.ttl_left <= 60
    assert await ledger.sweep() == 0
    assert await ledger.orphans() == ["task"]
    store.age_task("task", 61)
    for _ in range(2):
        assert await ledger.task("task") is None
        assert await ledger.task_of(ID) is None
        assert await ledger.orphans() == []
        assert not await ledger.change_task(task)
        assert await ledger.sweep() in (0, 1)
    assert (await present(ledger)).token == record.token


async def test_change_does_not_lengthen_the_ttl(ledger: Ledger, store: Store) -> None:
    await begun(ledger)
    store.age_task("task", TTL - 60)
    await change(ledger, document=b"second")
    assert (await found(ledger)).ttl_left <= 60


@pytest.mark.parametrize("ttl", [1e9, 1e300, float("inf")])
async def test_ttl_may_have_any_length(ttl: float, ledger: Ledger) -> None:
    record = await granted(ledger)
    assert await ledger.begin_task(record.token, "task", DOCUMENT, ttl)
    assert (await found(ledger)).ttl_left > 0.9e9


async def test_sweep_removes_tasks_within_its_limit(ledger: Ledger, store: Store) -> None:
    """Due records come first. Redis removes tasks without a sweep, as soon as a ttl ends."""
    for number in range(5):
        id = structs.replace(ID, key=str(number))
        record = await begun(ledger, f"task-{number}", id)
        if number == 0:
            assert await ledger.complete(record.token, outcome_of(), RETENTION)
            store.age(id, RETENTION + 1)
        store.age_task(f"task-{number}", TTL + 1)
    await begun(ledger)
    forgets = store.kind in ("redis", "cluster")
    assert [await ledger.sweep(limit=3) for _ in range(3)] == ([1, 0, 0] if forgets else [3, 3, 0])
    assert sum((await ledger.counts()).values()) == 6
    assert (await found(ledger)).version == 1


# --- lives of a handle ----------------------------------------------------------------------------


@durable_only
async def test_tasks_are_kept_when_the_ledger_is_closed_and_opened_again(store: Store) -> None:
    ledger = await store.open()
    await begun(ledger)
    await change(ledger, document=b"second", is_ready=True)
    await begun(ledger, "orphan", structs.replace(ID, key="key-2"))
    store.age(structs.replace(ID, key="key-2"), LEASE + 1)
    before = await found(ledger)
    await ledger.aclose()
    ledger = await store.open()
    after = await found(ledger)
    assert structs.replace(after, ttl_left=0, now=None) == structs.replace(
        before, ttl_left=0, now=None
    )
    assert same(after.now, before.now)
    assert await ledger.orphans() == ["orphan"]
    third = await granted(ledger, structs.replace(ID, key="key-3"))
    assert await ledger.begin_task(third.token, "third", DOCUMENT, TTL)
    await change(ledger, is_over=True)
    await ledger.aclose()


@durable_only
@pytest.mark.parametrize("method", METHODS)
async def test_closed_ledger_is_down_for_tasks(method: str, store: Store) -> None:
    ledger = await store.open()
    record = await begun(ledger)
    await ledger.aclose()
    with pytest.raises(LedgerDown):
        await METHODS[method](ledger, record)


@pytest.mark.parametrize("method", METHODS)
async def test_caller_that_leaves_does_not_tear_a_task(method: str, ledger: Ledger) -> None:
    """Cancelled at every step of the wait: the task is then as it was, or changed as a whole."""
    for steps in range(8):
        id = structs.replace(ID, key=f"{method}-{steps}")
        record = await begun(ledger, "other", id) if steps == 0 else await granted(ledger, id)
        task = asyncio.ensure_future(METHODS[method](ledger, record))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        left = await ledger.task("task")
        assert left is None or left.document == DOCUMENT
        assert await ledger.begin_task(record.token, f"{method}-{steps}", DOCUMENT, TTL)
        assert (
            task_of := await ledger.task_of(id)
        ) is not None and task_of.id == f"{method}-{steps}"
