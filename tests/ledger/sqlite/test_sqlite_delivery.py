"""Calls without a key in SQLite: clocks and boots, abandoned claims, transactions, older files."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

import apsw
import pytest

from tests.ledger import ID, LEASE, PRINT, RETENTION, claim_of, outcome_of, present
from tests.ledger.keyless import (
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
from tests.ledger.shop import Shop
from tests.ledger.sqlite.clocks import Clock, opened
from tests.ledger.sqlite.writers import turn_of
from tests.servers import Store
from wirecall.ledger.base import LedgerDown, Record, State
from wirecall.ledger.sqlite import file as sqlite_file
from wirecall.ledger.sqlite import ledger as sqlite
from wirecall.ledger.sqlite.ledger import SqliteLedger

Leave: TypeAlias = Callable[[SqliteLedger, Clock, Record], Awaitable[Any]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def ledger(path: Path, clock: Clock) -> AsyncIterator[SqliteLedger]:
    ledger = await opened(path, clock)
    yield ledger
    await ledger.aclose()


# --- clocks and boots -----------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
async def test_wall_clock_change_does_not_move_the_window(
    jump: float, ledger: SqliteLedger, clock: Clock
) -> None:
    record = await claimed(ledger)
    assert await ledger.complete(record.token, outcome_of(), 10 * RETENTION)
    clock.wall_time += jump
    assert await is_waited_for(ledger, keyless(), record)
    await lose(ledger, record)
    clock.wall_time += jump
    assert await is_match(ledger, keyless(), record)
    await lose(ledger, await present(ledger, record.id))
    clock.since_boot += WINDOW + 1
    clock.wall_time -= 2 * jump
    assert await is_new(ledger, keyless())


async def _done(ledger: SqliteLedger, record: Record) -> None:
    assert await ledger.complete(record.token, outcome_of(), 10 * RETENTION)


async def _lost(ledger: SqliteLedger, record: Record) -> None:
    await _done(ledger, record)
    await lose(ledger, record)


async def _running(ledger: SqliteLedger, record: Record) -> None:
    """Its process dies with the machine."""


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("leave", [_done, _lost, _running])
async def test_loss_of_another_boot_counts_from_the_start_of_this_one(
    leave: Callable[[SqliteLedger, Record], Awaitable[None]],
    is_told: bool,
    path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long the machine was off, and whether or not the system has a boot id."""
    boots = (
        [b"first boot......", b"another boot....", b"a third boot...."] if is_told else [b""] * 3
    )
    monkeypatch.setattr(sqlite, "_boot_id", lambda: boots[0])
    before = await opened(path, clock)
    record = await claimed(before)
    await leave(before, record)
    await before.aclose()

    # An answer that was pending may be lost only a lease after the start: the file does not show
    # that its deliverer is gone.
    margin = LEASE if leave is _done else 0.0
    for boot in (1, 2):
        monkeypatch.setattr(sqlite, "_boot_id", lambda boot=boot: boots[boot])
        clock.since_boot = margin + WINDOW + (1 if boot == 1 else -1)
        clock.wall_time = clock.wall_time + 600
        after = await opened(path, clock)
        try:
            claim = keyless()
            assert await (is_new(after, claim) if boot == 1 else is_match(after, claim, record))
            if boot == 1:
                await write(after, await present(after, claim.id))
        finally:
            await after.aclose()


async def test_clock_of_another_boot_is_not_compared_with_this_one(
    path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This boot has lasted a little longer than that one had when the answer was lost."""
    before = await opened(path, clock)
    await _lost(before, await claimed(before))
    await before.aclose()
    monkeypatch.setattr(sqlite, "_boot_id", lambda: b"another boot....")
    clock.since_boot += 1
    after = await opened(path, clock)
    assert await is_new(after, keyless())
    await after.aclose()


async def test_loss_in_a_later_boot_counts_from_that_loss(
    path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is of the first boot, and keeps its retention by the clock of that one."""
    before = await opened(path, clock)
    record = await claimed(before)
    await _lost(before, record)
    await before.aclose()
    monkeypatch.setattr(sqlite, "_boot_id", lambda: b"another boot....")
    clock.since_boot = 10.0
    after = await opened(path, clock)
    assert await is_match(after, keyless(), record)
    clock.since_boot += 3600
    await lose(after, await present(after, record.id))
    clock.since_boot += WINDOW - 1
    assert await is_match(after, keyless(), record)
    assert await after.sweep() == 0, "by the wall clock it was done a moment ago"
    await after.aclose()


async def test_lapsed_lease_counts_from_its_lapse(ledger: SqliteLedger, clock: Clock) -> None:
    """A run that went wrong leaves its record to a successor."""
    record = await claimed(ledger)
    assert await ledger.lapse(record.token)
    clock.since_boot += WINDOW - 1
    assert await is_match(ledger, keyless(), record)


async def test_window_applies_to_any_retention(ledger: SqliteLedger, clock: Clock) -> None:
    for number, retention in enumerate((float("inf"), 2.0**62)):
        likeness = bytes([number]) * 16
        record = await claimed(ledger, likeness=likeness, retention=retention)
        assert await ledger.complete(record.token, outcome_of(), retention)
        assert await is_waited_for(ledger, keyless(likeness), record)
        clock.since_boot += LEASE + 1
        assert await is_match(ledger, keyless(likeness), record)
        await lose(ledger, await present(ledger, record.id))
        assert await is_match(ledger, keyless(likeness), record)


# --- reads and writes -----------------------------------------------------------------------------


async def test_waiting_call_is_answered_by_a_read(ledger: SqliteLedger, path: Path) -> None:
    """While another connection has the lock of the file: a call that polls does not delay the
    others. From the second time on its claim names the equal calls of its process, its own at
    least.
    """
    record = await claimed(ledger)
    first = keyless()
    assert await is_waited_for(ledger, first, record)
    with closing(apsw.Connection(str(path))) as other:
        other.execute("BEGIN IMMEDIATE")
        again = keyless(beside=frozenset({first.id.key}))
        assert await asyncio.wait_for(is_waited_for(ledger, again, record), 4)


async def _written(ledger: SqliteLedger, _: Clock, record: Record) -> None:
    await write(ledger, record)


async def _written_by_a_repetition(ledger: SqliteLedger, _: Clock, record: Record) -> None:
    await lose(ledger, record)
    await write(ledger, await ledger.claim(keyless()))


async def _released(ledger: SqliteLedger, _: Clock, record: Record) -> None:
    assert await ledger.release(record.token)


async def _resolved(ledger: SqliteLedger, _: Clock, record: Record) -> None:
    assert await ledger.abandon(record.token)
    assert await ledger.resolve(record.id, None)


async def _buried(ledger: SqliteLedger, clock: Clock, record: Record) -> None:
    assert await ledger.complete(record.token, outcome_of(), 1)
    _pass(clock, 2)
    assert (await ledger.claim(claim_of(record.id))).state is State.TOMBSTONE


async def _buried_by_a_repetition(ledger: SqliteLedger, clock: Clock, record: Record) -> None:
    assert await ledger.complete(record.token, outcome_of(), 1)
    await lose(ledger, record)
    _pass(clock, 2)
    assert (await ledger.claim(keyless())).state is State.TOMBSTONE


async def _swept_when_done(ledger: SqliteLedger, clock: Clock, record: Record) -> None:
    assert await ledger.complete(record.token, outcome_of(), RETENTION)
    _pass(clock, RETENTION + 1)
    assert await ledger.sweep() == 1


async def _swept_when_running(ledger: SqliteLedger, clock: Clock, record: Record) -> None:
    _pass(clock, LEASE + RETENTION + 1)
    assert await ledger.sweep() == 1
    assert await ledger.resolve(record.id, None)  # until then equal calls match the unknown outcome


def _pass(clock: Clock, seconds: float) -> None:
    clock.since_boot += seconds
    clock.wall_time += seconds


@pytest.mark.parametrize(
    "leave",
    [
        _written,
        _written_by_a_repetition,
        _released,
        _resolved,
        _buried,
        _buried_by_a_repetition,
        _swept_when_done,
        _swept_when_running,
    ],
)
async def test_index_drops_records_that_match_nothing(
    leave: Leave, ledger: SqliteLedger, clock: Clock, path: Path
) -> None:
    """Otherwise the claim of a call that is often repeated would look at all of them."""
    record = await claimed(ledger)
    open = await claimed(ledger, likeness=OTHER_LIKENESS)
    await ledger.heartbeat(open.token, 10 * RETENTION)
    await leave(ledger, clock, record)
    await lose(ledger, record)  # too late: it does not return
    with closing(apsw.Connection(str(path))) as db:
        found = db.execute(
            "SELECT key FROM wirecall_commands WHERE likeness IS NOT NULL"
        ).fetchall()
    assert found == [(open.id.key,)]


# --- abandoned claims -----------------------------------------------------------------------------


async def test_abandoned_claim_leaves_no_record(ledger: SqliteLedger) -> None:
    claim = keyless()
    given_up = ledger.claim(claim)
    given_up.send(None)
    turn_of(ledger)
    assert await ledger.get(claim.id) is not None
    given_up.close()
    turn_of(ledger)
    assert await ledger.get(claim.id) is None


@pytest.mark.parametrize(
    ("on_crash", "is_lapsed"), [("unknown", False), ("unknown", True), ("rerun", True)]
)
@pytest.mark.parametrize("is_written", [False, True])
async def test_abandoned_repetition_leaves_the_answer_to_the_next(
    on_crash: str, is_lapsed: bool, is_written: bool, ledger: SqliteLedger, clock: Clock
) -> None:
    """Of a command that is done, one that becomes unknown, one that is taken over: the window
    restarts.
    """
    record = await claimed(ledger, on_crash=on_crash)
    if is_lapsed:
        clock.since_boot += LEASE + 1
    else:
        await _lost(ledger, record)
    claim = keyless(on_crash=on_crash)
    given_up = ledger.claim(claim)
    given_up.send(None)
    if is_written:
        turn_of(ledger)
        assert (await present(ledger, record.id)).deliverer == claim.nonce
        clock.since_boot += WINDOW - 1
    given_up.close()
    turn_of(ledger)
    left = await present(ledger, record.id)
    assert left.lease_left == 0
    assert left.delivery == ("undelivered" if is_written or not is_lapsed else "pending")
    clock.since_boot += WINDOW - 1 if is_written else 0
    second = keyless(on_crash=on_crash)
    assert await is_match(ledger, second, record)
    if not is_lapsed:
        expected = State.DONE
    elif on_crash == "rerun":
        expected = State.RUNNING
    else:
        expected = State.UNKNOWN
    assert (await present(ledger, record.id)).state is expected


# --- transactions ---------------------------------------------------------------------------------

WAIT = 20.0


@pytest.fixture
async def shop(path: Path) -> AsyncIterator[Shop]:
    ledger = SqliteLedger(path)
    await ledger.open()
    yield Shop(ledger, Store("sqlite", f"sqlite:{path}"))
    await ledger.aclose()


async def test_expired_answer_is_a_tombstone_for_a_transaction(path: Path, clock: Clock) -> None:
    ledger = await opened(path, clock)
    record = await claimed(ledger)
    assert await ledger.complete(record.token, outcome_of(), 1)
    await lose(ledger, record)
    _pass(clock, 2)
    async with ledger.transaction(keyless(), WAIT) as transaction:
        assert (transaction.record.id, transaction.record.state) == (record.id, State.TOMBSTONE)
    await ledger.aclose()


@pytest.mark.parametrize("is_taken", [False, True])
async def test_abandoned_transaction_leaves_the_answer_to_the_next(
    is_taken: bool, shop: Shop
) -> None:
    """Before it has begun, and after it has taken the answer in the file."""
    first = keyless()
    second = keyless()
    third = keyless()
    await lose(shop.ledger, await shop.run(first))
    given_up = shop.ledger.transaction(second, WAIT).__aenter__()
    given_up.send(None)
    if is_taken:
        turn_of(shop.ledger)
        assert (await present(shop.ledger, first.id)).deliverer == second.nonce
    given_up.close()
    turn_of(shop.ledger)
    assert (await present(shop.ledger, first.id)).delivery == "undelivered"
    assert (await shop.run(third, wait=0)).deliverer == third.nonce
    assert shop.effects == 1


# --- files of older versions ----------------------------------------------------------------------


async def test_file_of_an_older_version_is_migrated(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P9: its records are found, and lost answers match from then on.

    An older wirecall refuses it.
    """
    with closing(apsw.Connection(str(path))) as old:
        old.execute(sqlite_file.SQL["schema 1"])
        old.execute(
            "INSERT INTO wirecall_commands"
            " VALUES (?, ?, ?, ?, 'done', 7, x'', 1, 1, 9e9, 9e9, x'', 9e9, 9e9, 1, 2, 'result', '1', x'')",
            (ID.caller, ID.method, ID.key, PRINT),
        )
        old.execute("UPDATE wirecall_meta SET fence = 7")
    ledger = SqliteLedger(path, "update")
    record = await ledger.claim(claim_of())
    assert (record.state, record.fence, record.delivery, record.deliverer) == (
        State.DONE,
        7,
        None,
        b"",
    )
    lost = await claimed(ledger)
    assert lost.fence > 7
    await lose(ledger, lost)
    assert await is_match(ledger, keyless(), lost)
    await ledger.aclose()
    monkeypatch.setattr(sqlite_file, "SCHEMA", sqlite_file.SCHEMA[:1])
    older = SqliteLedger(path)
    with pytest.raises(
        LedgerDown, match=r"version 6, and this wirecall knows version 1(.|\n)*a newer wirecall"
    ):
        await older.open()
    await older.aclose()


async def test_file_of_an_older_version_is_migrated_once_by_many_processes(path: Path) -> None:
    with closing(apsw.Connection(str(path))) as old:
        old.execute(sqlite_file.SQL["schema 1"])
    ledgers = [SqliteLedger(path, "update") for _ in range(8)]
    await asyncio.gather(*(ledger.open() for ledger in ledgers))
    for ledger in ledgers:
        await ledger.aclose()
