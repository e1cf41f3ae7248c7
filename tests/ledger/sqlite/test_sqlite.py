"""What only the SQLite ledger can meet."""

import asyncio
import gc
import os
import re
import sqlite3
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from tests.calls import call, error, make_app, result
from wirecall import process
from wirecall.errors import CannotWait, UsageError
from wirecall.ledger.base import Claim, LedgerDown, Outcome, RecordId, State
from wirecall.ledger.sqlite import commits as sqlite_commits
from wirecall.ledger.sqlite import file as sqlite_file
from wirecall.ledger.sqlite import ledger as sqlite
from wirecall.ledger.sqlite import rows as sqlite_rows
from wirecall.ledger.sqlite import turns as sqlite_turns
from wirecall.ledger.sqlite import writer as sqlite_writer
from wirecall.ledger.sqlite.commits import Commits
from wirecall.ledger.sqlite.jobs import Job, Kind, nothing, skip
from wirecall.ledger.sqlite.ledger import SqliteLedger
from wirecall.ledger.sqlite.rows import Fences
from wirecall.ledger.sqlite.turns import Turns
from wirecall.process import new_nonce


async def test_another_copy_of_sqlite_that_removes_the_wal_is_noticed(tmp_path: Path) -> None:
    """Python's own sqlite3 drops the locks of apsw in the same process and, closing, takes the WAL with it.

    What is committed after that would be lost, so it is refused instead of acknowledged.
    """
    path = tmp_path / "ledger.db"
    app, effects = make_app(ledger=f"sqlite:{path}"), list[int]()

    @app.command
    def put(value: int) -> int:
        effects.append(value)
        return value

    async with app:
        assert result(await app.handle(call("put", {"value": 1}, key="one"))) == 1
        stranger = sqlite3.connect(path)
        stranger.execute("SELECT count(*) FROM wirecall_commands").fetchall()
        stranger.close()
        assert not Path(f"{path}-wal").exists()
        refused = error(await app.handle(call("put", {"value": 2}, key="two")))
        assert (refused["code"], refused["data"]["ran"]) == (50310, "no")
    assert effects == [1]


# --- transitions are written by the event loop, where nobody has to wait for anything but a quick disk ---


async def test_a_lone_transition_does_not_change_threads(ledger: SqliteLedger, at_once: list[bool]) -> None:
    token = (await ledger.claim(claim("one"))).token
    assert await ledger.complete(token, DONE, 60)
    assert at_once == [True, True]
    record = await ledger.get(token.id)
    assert record is not None and record.state is State.DONE


async def test_where_nothing_else_is_ready_it_is_written_on_the_spot_but_not_for_ever(
    ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that waits for nothing else needs two commits: its claim and its completion."""
    monkeypatch.setattr(sqlite_turns, "ON_THE_SPOT", 60.0)
    for turn in range(2):
        await asyncio.sleep(0)
        with pytest.raises(StopIteration) as finished:
            ledger.claim(claim(f"first in turn {turn}")).send(None)
        assert finished.value.value.state is State.RUNNING
        with pytest.raises(StopIteration) as completed:
            ledger.complete(finished.value.value.token, DONE, 60).send(None)
        assert completed.value.value is True
    monkeypatch.setattr(sqlite_turns, "ON_THE_SPOT", 0.0)
    third = ledger.claim(claim("third"))
    assert asyncio.isfuture(third.send(None)), "the loop has other things to do as well"
    third.close()


async def test_what_is_ready_beside_it_has_its_turn_first(ledger: SqliteLedger) -> None:
    with pytest.raises(StopIteration):
        ledger.claim(claim("first")).send(None)
    asyncio.get_running_loop().call_soon(lambda: None)
    second = ledger.claim(claim("second"))
    assert asyncio.isfuture(second.send(None))
    second.close()


async def test_a_duplicate_is_answered_by_reading_whoever_writes(ledger: SqliteLedger, path: Path) -> None:
    """Alone and among others, while another connection has the lock of the file."""
    first = await ledger.claim(claim("one"))
    assert await ledger.complete(first.token, DONE, 60)
    await asyncio.sleep(0)
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StopIteration) as finished:
        ledger.claim(claim("one")).send(None)
    assert finished.value.value.outcome == DONE
    await asyncio.sleep(0)
    again = await asyncio.wait_for(asyncio.gather(*(ledger.claim(claim("one")) for _ in range(8))), 4)
    assert [record.outcome for record in again] == [DONE] * 8
    other.close()


async def test_who_cannot_wait_gets_what_reading_finds(path: Path) -> None:
    app = make_app(ledger=f"sqlite:{path}")

    @app.command
    def put(value: int) -> int:
        return value

    async with app:
        assert result(await app.handle(call("put", {"value": 1}, key="one"))) == 1
        assert result(app.handle_sync(call("put", {"value": 1}, key="one", id=2))) == 1


async def test_who_cannot_wait_is_told_before_anything_runs(path: Path) -> None:
    app, effects = make_app(ledger=f"sqlite:{path}"), list[int]()

    @app.command
    def put(value: int) -> int:
        effects.append(value)
        return value

    async with app:
        assert result(await app.handle(call("put", {"value": 1}, key="one"))) == 1
        turns = turns_of(await app.ledger())  # type: ignore[arg-type]
        turns.writer.commits.pace = turns.writer.commits.last = 0.0
        with pytest.raises(CannotWait):  # a loop runs in this thread, and it is not its turn
            app.handle_sync(call("put", {"value": 2}, key="two"))
        assert effects == [1]
        turns._ask_and_wait(Job("nothing", nothing))  # the thread takes the claim back before the loop has its turn,
        with turns.writer.lent:  # and lends its connection again
            pass
        assert result(await asyncio.wait_for(app.handle(call("put", {"value": 2}, key="two")), 10)) == 2
    assert effects == [1, 2]


async def test_a_loop_that_does_not_tell_what_is_ready_may_have_something(ledger: SqliteLedger) -> None:
    assert turns_of(ledger)._is_alone(asyncio.get_running_loop())
    assert not turns_of(ledger)._is_alone(object())  # type: ignore[arg-type]


async def test_a_claim_that_is_given_up_before_it_went_out_leaves_nothing(ledger: SqliteLedger, at_once: list[bool]) -> None:
    """The one that takes it back may be done before the claim has its turn: by then the connection is free again."""
    given_up = ledger.claim(claim("given up"))
    asyncio.get_running_loop().call_soon(lambda: None)
    assert asyncio.isfuture(given_up.send(None)), "it waits for the end of this turn"
    given_up.close()
    turns_of(ledger)._ask_and_wait(Job("nothing", nothing))
    with turns_of(ledger).writer.lent:
        pass
    await asyncio.sleep(0)
    assert at_once == [False]
    assert await ledger.get(RecordId("", "put", "given up")) is None


async def test_trouble_with_a_claim_that_is_given_up_is_nobodys(
    ledger: SqliteLedger, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would stand in the log as an exception that was never retrieved."""
    monkeypatch.setattr(sqlite_file, "PATIENCE", 0.01)
    loop, complaints = asyncio.get_running_loop(), list[Any]()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    given_up = ledger.claim(claim("given up"))
    loop.call_soon(lambda: None)
    given_up.send(None)
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE")
    given_up.close()
    with pytest.raises(LedgerDown, match="locked"):
        await ledger.claim(claim("beside it"))
    other.close()
    turns_of(ledger)._ask_and_wait(Job("nothing", nothing))  # the thread knows its last job until it has another one
    del given_up
    gc.collect()
    assert complaints == []


@pytest.mark.parametrize("next_job", ["write", "sweep"])
async def test_a_claim_that_is_given_up_is_taken_back_when_the_lock_of_another_process_is_gone(
    ledger: SqliteLedger, path: Path, monkeypatch: pytest.MonkeyPatch, next_job: Kind
) -> None:
    """It stands in the file when its caller leaves. Nobody ran it, and nobody must hear that this is unknown."""
    monkeypatch.setattr(sqlite_file, "PATIENCE", 0.01)
    given_up, turns = ledger.claim(claim("given up")), turns_of(ledger)
    asyncio.get_running_loop().call_soon(lambda: None)
    assert asyncio.isfuture(given_up.send(None)), "it waits for the end of this turn"
    await asyncio.sleep(0)
    assert await ledger.get(RecordId("", "put", "given up")) is not None
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE")
    given_up.close()
    turns._ask_and_wait(Job("nothing", nothing))
    other.close()
    turns._ask_and_wait(Job(next_job, skip))
    assert await ledger.get(RecordId("", "put", "given up")) is None


async def test_transitions_that_come_together_share_a_commit(
    ledger: SqliteLedger, at_once: list[bool], sizes: list[int]
) -> None:
    records = await asyncio.gather(*(ledger.claim(claim(f"key-{n}")) for n in range(8)))
    assert all(await asyncio.gather(*(ledger.complete(record.token, DONE, 60) for record in records)))
    assert at_once == [True, True] and sizes == [8, 8]
    assert (await ledger.counts())[State.DONE] == 8


async def test_a_loop_does_not_write_very_many(
    ledger: SqliteLedger, at_once: list[bool], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_turns, "TOGETHER", 7)
    await asyncio.gather(*(ledger.claim(claim(f"key-{n}")) for n in range(8)))
    assert at_once == [False] and sizes == [8]


@pytest.mark.parametrize("count", [1, 4])
async def test_a_loop_does_not_write_very_much(ledger: SqliteLedger, at_once: list[bool], count: int) -> None:
    large = Outcome("result", b"x" * (sqlite_turns.MUCH // count + 1), b"digest")
    records = await asyncio.gather(*(ledger.claim(claim(f"key-{n}")) for n in range(count)))
    at_once.clear()
    assert all(await asyncio.gather(*(ledger.complete(record.token, large, 60) for record in records)))
    assert at_once == [False] and (await ledger.counts())[State.DONE] == count


async def test_a_loop_does_not_write_a_large_question(ledger: SqliteLedger, at_once: list[bool]) -> None:
    token = (await ledger.claim(claim("asks"))).token
    assert await ledger.suspend(token, Outcome("result", b"x" * (sqlite_turns.MUCH + 1), b"digest"), 60)
    assert at_once == [True, False] and (await ledger.counts())[State.WAITING] == 1


async def test_among_others_a_duplicate_hears_of_the_record(ledger: SqliteLedger, at_once: list[bool]) -> None:
    """Of one that was there, and of one that came in the same turn."""
    first = await ledger.claim(claim("one"))
    assert await ledger.complete(first.token, DONE, 60)
    at_once.clear()
    again, new, twice = await asyncio.gather(*(ledger.claim(claim(key)) for key in ("one", "new", "new")))
    assert at_once == [True]
    assert (again.token, again.outcome) == (first.token, DONE)
    assert new.state is State.RUNNING and twice.token == new.token


async def test_a_sweep_is_never_the_loops(ledger: SqliteLedger, at_once: list[bool], sizes: list[int]) -> None:
    await asyncio.gather(ledger.claim(claim("one")), ledger.sweep(), ledger.claim(claim("two")))
    assert at_once == [False] and sizes == [1, 1, 1]


async def test_what_the_disk_refuses_to_one_it_gives_to_the_others(ledger: SqliteLedger, at_once: list[bool]) -> None:
    def refuse(*_: object) -> None:
        raise apsw.FullError("on purpose")

    asked = ledger.claim(claim("one")), turns_of(ledger).ask(Job("write", refuse)), ledger.claim(claim("two"))
    one, refused, two = await asyncio.gather(*asked, return_exceptions=True)
    assert at_once == [False], "the thread finds out whose fault it is"
    assert isinstance(refused, LedgerDown) and "no room" in str(refused)
    assert [getattr(each, "state", None) for each in (one, two)] == [State.RUNNING] * 2
    assert one.fence < two.fence


async def test_a_row_that_cannot_be_read_is_the_trouble_of_one(ledger: SqliteLedger, path: Path) -> None:
    token = (await ledger.claim(claim("damaged"))).token
    assert await ledger.complete(token, DONE, 60)
    other = apsw.Connection(str(path))
    other.execute("PRAGMA ignore_check_constraints = 1")
    other.execute("UPDATE wirecall_commands SET state = 'doubtful' WHERE key = 'damaged'")
    other.close()
    together = (ledger.claim(claim(key)) for key in ("damaged", "the file is open", "new"))
    damaged, old, new = await asyncio.wait_for(asyncio.gather(*together, return_exceptions=True), 10)
    assert isinstance(damaged, LedgerDown) and "doubtful" in str(damaged)
    assert [getattr(each, "state", None) for each in (old, new)] == [State.RUNNING] * 2


@pytest.mark.parametrize(
    ("keys", "where", "quick"),
    [(["one"], "claim_first", 60.0), (["one", "two"], "claim", 60.0), (["one", "two"], "answer", 0.0)],
)
async def test_ctrl_c_in_the_middle_leaves_nobody_waiting(
    ledger: SqliteLedger,
    monkeypatch: pytest.MonkeyPatch,
    stopped: list[BaseException],
    keys: list[str],
    where: str,
    quick: float,
) -> None:
    """Alone, among others, and while reading on a slow disk."""
    undisturbed = getattr(sqlite_rows.Table, where)

    def interrupt(*args: object) -> Any:
        if not stopped:
            raise KeyboardInterrupt
        return undisturbed(*args)

    monkeypatch.setattr(sqlite_commits, "QUICK", quick)
    monkeypatch.setattr(sqlite_rows.Table, where, interrupt)
    tasks = [asyncio.create_task(ledger.claim(claim(key))) for key in keys]
    asyncio.get_running_loop().call_soon(lambda: None)  # so that the first of them is not written on the spot
    records = await asyncio.wait_for(asyncio.gather(*tasks), 10)
    assert [record.state for record in records] == [State.RUNNING] * len(keys) and len(stopped) == 1


@pytest.mark.parametrize(("signal", "count"), [(KeyboardInterrupt, 1), (KeyboardInterrupt, 4), (TimeoutError, 4)])
async def test_ctrl_c_that_is_heard_when_the_disk_is_done_does_nothing_twice(
    ledger: SqliteLedger, stopped: list[BaseException], signal: type[BaseException], count: int
) -> None:
    """It comes while the disk is at work, as a rule. A completion that was done again would be told that it is late."""
    tokens = [(await ledger.claim(claim(f"key-{n}"))).token for n in range(count)]
    commits = turns_of(ledger).writer.commits

    def interrupt(db: apsw.Connection, name: str, pages: int) -> int:
        commits._db.set_wal_hook(commits._count_pages)
        commits._count_pages(db, name, pages)
        raise signal

    commits._db.set_wal_hook(interrupt)
    tasks = [asyncio.create_task(ledger.complete(token, DONE, 60)) for token in tokens]
    asyncio.get_running_loop().call_soon(lambda: None)  # so that the first of them is not written on the spot
    assert await asyncio.wait_for(asyncio.gather(*tasks), 10) == [True] * count
    assert len(stopped) == (signal is KeyboardInterrupt) and (await ledger.counts())[State.DONE] == count


@pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit])
async def test_who_is_interrupted_in_the_middle_of_a_claim_leaves_nothing(
    ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch, signal: type[BaseException]
) -> None:
    """By Ctrl-C, or by a handler of SIGTERM that ends the program: nothing ran."""
    claim_first = sqlite_rows.Table.claim_first

    def interrupt(*args: Any) -> None:
        assert claim_first(*args) is not None
        raise signal

    with monkeypatch.context() as patched:
        patched.setattr(sqlite_rows.Table, "claim_first", interrupt)
        with pytest.raises(signal):
            ledger.claim(claim("interrupted")).send(None)
    turns_of(ledger)._ask_and_wait(Job("nothing", nothing))
    assert await ledger.get(RecordId("", "put", "interrupted")) is None


async def test_ctrl_c_that_is_heard_when_the_connection_is_lent_gives_it_back(
    ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its thread would wait for it for ever, and everybody for the thread."""
    writer = turns_of(ledger).writer
    lent = writer.lent

    class Interrupting:
        release = lent.release

        def acquire(self, blocking: bool = True) -> bool:
            monkeypatch.setattr(writer, "lent", lent)
            lent.acquire(blocking)
            raise KeyboardInterrupt

    def borrow() -> None:
        assert lent.acquire(timeout=1)
        lent.release()

    monkeypatch.setattr(writer, "lent", Interrupting())
    with pytest.raises(KeyboardInterrupt):
        turns_of(ledger)._commit_at_once([Job("write", skip)])
    await asyncio.to_thread(borrow)


async def test_ctrl_c_before_the_end_of_a_turn_is_planned_leaves_nobody_waiting(
    ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those who ask later in the same turn, nor those after it; and they are written on the spot as before."""
    loop = asyncio.get_running_loop()
    call_soon = loop.call_soon

    def interrupt(*_: object) -> None:
        monkeypatch.setattr(loop, "call_soon", call_soon)
        raise KeyboardInterrupt

    for beside in (lambda: None, None):
        await asyncio.sleep(0)
        if beside is not None:
            loop.call_soon(beside)  # so that it waits for the end of this turn
        monkeypatch.setattr(loop, "call_soon", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ledger.claim(claim("interrupted")).send(None)
        assert (await asyncio.wait_for(ledger.claim(claim("next")), 10)).state is State.RUNNING
        await asyncio.sleep(0)
    turns_of(ledger)._ask_and_wait(Job("nothing", nothing))
    assert await ledger.get(RecordId("", "put", "interrupted")) is None
    assert not turns_of(ledger)._collected and not turns_of(ledger)._spent


async def test_a_disk_that_is_slow_keeps_no_loop_waiting(ledger: SqliteLedger, at_once: list[bool]) -> None:
    turns_of(ledger).writer.commits.last = 2.1 * sqlite_commits.QUICK
    await ledger.claim(claim("after a slow one"))
    turns_of(ledger).writer.commits.pace = 1.1 * sqlite_commits.QUICK
    await ledger.claim(claim("where many were slow"))
    assert at_once == [False, False]


@pytest.mark.parametrize("count", [1, 2])
async def test_the_lock_of_another_process_keeps_no_loop_waiting(
    ledger: SqliteLedger, at_once: list[bool], path: Path, count: int
) -> None:
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE")
    claimed = asyncio.gather(*(ledger.claim(claim(f"locked {n}")) for n in range(count)))
    longest, seen = 0.0, time.monotonic()
    for _ in range(100):
        await asyncio.sleep(0.001)
        longest, seen = max(longest, time.monotonic() - seen), time.monotonic()
    assert at_once == [False] and not claimed.done() and longest < sqlite_file.PATIENCE / 5
    other.execute("ROLLBACK")
    assert [record.state for record in await claimed] == [State.RUNNING] * count
    other.close()


async def test_a_lone_transition_does_not_overtake(ledger: SqliteLedger, at_once: list[bool]) -> None:
    async with ledger.transaction(claim("held"), wait=25) as transaction:
        waiting = asyncio.create_task(ledger.claim(claim("waiting")))
        await asyncio.sleep(0.02)
        assert at_once == [False] and not waiting.done()
        await transaction.complete(DONE, 60, undo=False)
    assert (await waiting).state is State.RUNNING
    turns_of(ledger).writer._asked.append(Job("write", skip))  # it is not on its way yet, since no bell was rung
    assert (await ledger.claim(claim("later"))).state is State.RUNNING
    assert at_once == [False, False]


async def test_a_lone_transition_that_the_disk_refuses_leaves_nothing(ledger: SqliteLedger, at_once: list[bool]) -> None:
    def refuse(_db: apsw.Connection, _fences: object) -> None:
        raise apsw.FullError("on purpose")

    with pytest.raises(LedgerDown, match="no room"):
        await turns_of(ledger).ask(Job("write", refuse))
    assert (await ledger.claim(claim("next"))).state is State.RUNNING
    assert at_once == [True, True] and sum((await ledger.counts()).values()) == 2


async def test_the_wal_is_folded_into_the_file(ledger: SqliteLedger, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_commits, "PAGES_IN_WAL", 20)
    for n in range(100):
        await ledger.claim(claim(f"key-{n}"))
    assert Path(f"{path}-wal").stat().st_size < 60 * 4096, "it begins anew where it was folded"


# --- what a transition writes ---


async def test_an_outcome_is_one_page(ledger: SqliteLedger) -> None:
    token = (await ledger.claim(claim("one"))).token
    before = turns_of(ledger).writer.commits.pages
    assert await ledger.complete(token, DONE, 60)
    assert turns_of(ledger).writer.commits.pages - before == 1, "no index has changed"


async def test_an_outcome_with_another_retention_is_kept_for_that(path: Path) -> None:
    now = 1000.0
    ledger = SqliteLedger(path, clock=lambda: now, wall=lambda: now)
    token = (await ledger.claim(claim("one"))).token
    assert await ledger.complete(token, DONE, 5)
    now += 4
    assert await ledger.sweep() == 0
    now += 2
    assert await ledger.sweep() == 1, "it was claimed for longer"
    await ledger.aclose()


PLANS = {
    "due": "PRIMARY KEY (due<?)",
    "page": "wirecall_commands_id ((caller,method,key)>(?,?,?))",
    "page_of_few": "wirecall_commands_open (state=?)",
    "page_of_many": "wirecall_commands_id ((caller,method,key)>(?,?,?))",
    "counts": "SCAN",
}
OF_RECORDS = [name for name, text in sqlite_file.SQL.items() if re.search("(FROM|UPDATE) wirecall_commands\\b", text)]


@pytest.mark.parametrize("name", OF_RECORDS)
@pytest.mark.parametrize("is_analyzed", [False, True])
def test_few_among_many_are_found_by_an_index(name: str, is_analyzed: bool) -> None:
    """Whether or not the user has had SQLite look at the tables in the file."""
    db = apsw.Connection(":memory:")
    db.execute(sqlite_file.SQL["schema"])
    if is_analyzed:
        table = sqlite_rows.Table(time.monotonic, time.time)
        for number in range(1000):
            table.insert(claim(f"key-{number}"), db.cursor(), number)
        db.execute("ANALYZE")
    statement = "\n".join(line for line in sqlite_file.SQL[name].splitlines() if not line.startswith("--"))
    nobody = (None,) * statement.count("?") or defaultdict[str, None](lambda: None)
    plan = str(db.execute(f"EXPLAIN QUERY PLAN {statement}", nobody).fetchall())
    assert PLANS.get(name, "wirecall_commands_id (caller=? AND method=? AND key=?)") in plan
    assert "SCAN" not in plan or name == "counts"


# --- fences ---


async def test_fences_grow_whoever_gives_them(ledger: SqliteLedger, path: Path) -> None:
    """Two processes take turns, a record is removed and made again, and one of them starts anew."""
    other, fences = SqliteLedger(path), []
    for number in range(12):
        which = (ledger, other, other)[number % 3]
        record = await which.claim(claim("one"))
        fences.append(record.fence)
        assert await which.release(record.token)
        if number == 6:
            await other.aclose()
            other = SqliteLedger(path)
    assert fences == sorted(set(fences))
    await other.aclose()


async def test_fences_are_taken_from_the_file_now_and_then(ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_rows, "FENCES", 3)
    turns_of(ledger).writer.commits.fences.forget()
    fences = [(await ledger.claim(claim(f"key-{n}"))).fence for n in range(8)]
    assert fences == list(range(fences[0], fences[0] + 8))


async def test_fences_of_a_transaction_that_was_undone_are_another_process_s(ledger: SqliteLedger, path: Path) -> None:
    """The undone one had taken a block; the next process takes the same numbers, and ours must not be among them."""

    def take_and_fail(db: apsw.Cursor, fences: Fences) -> None:
        fences.forget()
        fences.next(db)
        raise apsw.FullError("on purpose")

    with pytest.raises(LedgerDown, match="no room"):
        await turns_of(ledger).ask(Job("sweep", take_and_fail))  # always in a transaction, even if it comes alone
    other = SqliteLedger(path)
    theirs = [(await other.claim(claim(f"theirs {n}"))).fence for n in range(5)]
    ours = (await ledger.claim(claim("ours"))).fence
    assert ours > max(theirs)
    await other.aclose()


async def test_a_lone_claim_takes_no_fence_of_a_block_that_is_behind(ledger: SqliteLedger, path: Path) -> None:
    """It is one statement, which looks for itself whether another process has taken fences since."""
    other = SqliteLedger(path)
    for turn in range(3):
        ours = (await ledger.claim(claim(f"ours {turn}"))).fence
        theirs = (await other.claim(claim(f"theirs {turn}"))).fence
        assert ours < theirs < (await ledger.claim(claim(f"ours again {turn}"))).fence
    await other.aclose()


@pytest.mark.parametrize("fence", ["good", "of a block that is used up", "of a block that is behind"])
@pytest.mark.parametrize("is_done", [False, True])
async def test_a_lone_claim_changes_no_record_that_is_there(
    ledger: SqliteLedger, path: Path, at_once: list[bool], is_done: bool, fence: str
) -> None:
    """Whoever made it, and whether its holder is still at work: a duplicate hears of it."""
    other = SqliteLedger(path)
    token = (await other.claim(claim("one"))).token
    assert not is_done or await other.complete(token, DONE, 60)
    if fence == "good":
        await ledger.claim(claim("another"))  # takes a block
    elif fence == "of a block that is used up":
        turns_of(ledger).writer.commits.fences.forget()
    before = await other.get(token.id)
    await asyncio.sleep(0.01)  # what woke the loop up is over,
    with turns_of(ledger).writer.lent:  # and the thread has lent its connection
        at_once.clear()
    again = await ledger.claim(claim("one"))
    assert at_once == [False], "it was tried, and found to be no first claim"
    assert (again.token, again.outcome) == (token, DONE if is_done else None)
    after = await other.get(token.id)
    assert before is not None and after is not None and after.token == before.token and after.state is before.state
    await other.aclose()


# --- its beginning and its end ---


async def test_a_file_with_other_columns_is_refused_and_left_alone(path: Path) -> None:
    """Such as one from before the first release."""
    old = apsw.Connection(str(path))
    old.execute(sqlite_file.SQL["schema"].replace("due", "kept_until"))
    ledger = SqliteLedger(path)
    with pytest.raises(UsageError, match=r"not those of this wirecall(.|\n)*boot, kept_until,(.|\n)*boot, due,"):
        await ledger.open()
    await ledger.aclose()
    assert old.execute("SELECT count(*) FROM wirecall_commands").get == 0
    old.close()


def test_a_ledger_that_is_closed_while_another_thread_opens_it_stays_closed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else there would be a writer that nobody ends."""
    begun, go_on, made = threading.Event(), threading.Event(), list[Turns]()

    def make(*args: Any, **kwargs: Any) -> Turns:
        begun.set()
        assert go_on.wait(10)
        made.append(Turns(*args, **kwargs))
        return made[0]

    def close() -> None:
        closing.set()
        asyncio.run(ledger.aclose())

    monkeypatch.setattr(sqlite, "Turns", make)
    ledger, closing = SqliteLedger(path), threading.Event()
    threads = [threading.Thread(target=ledger._running), threading.Thread(target=close)]
    threads[0].start()
    assert begun.wait(10)
    threads[1].start()
    assert closing.wait(10)
    threads[1].join(0.05)  # where it waits for nobody, it is over by now
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert ledger._turns is None
    made[0].writer._thread.join(10)
    assert not made[0].writer._thread.is_alive()


@pytest.mark.parametrize("how", ["used", "closed", "forgotten"])
async def test_a_fork_does_not_close_the_connections_of_its_parent(
    path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """SQLite would believe that it is the last one, and remove a WAL that is another's by then."""
    ledger = SqliteLedger(path)
    await ledger.claim(claim("one"))
    parents = weakref.ref(turns_of(ledger).writer)
    with monkeypatch.context() as child:
        child.setattr(process, "pid", process.pid + 1)
        if how == "used":
            await ledger.claim(claim("two"))
        if how != "forgotten":
            await ledger.aclose()
        del ledger
        gc.collect()
    writer = parents()
    assert writer is not None
    sqlite_writer.from_before_fork.remove(writer)
    writer._stop()
    assert not writer._thread.is_alive()


# --- whether the path still names the file ---


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked for by name."""
    names: list[str] = []
    identity = sqlite_file.identity

    def watched(name: str | bytes) -> tuple[int, ...] | None:
        names.append(Path(os.fsdecode(name)).name)
        return identity(name)

    monkeypatch.setattr(sqlite_file, "identity", watched)
    return names


@pytest.fixture
def place(path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[sqlite_file.Place]:
    """A place whose folder has not changed for a while."""
    monkeypatch.setattr(sqlite_file.Place, "SETTLED", 0.05)
    path.write_bytes(b"")
    place = sqlite_file.Place(str(path))
    while time.time_ns() < path.parent.stat().st_ctime_ns + 60_000_000:
        time.sleep(0.01)  # the kernel's clock, which nobody can pass
    place.check()
    asked.clear()
    yield place
    place.close()


def test_while_its_folder_stands_still_nothing_is_asked_by_name(place: sqlite_file.Place, asked: list[str]) -> None:
    for _ in range(5):
        place.check()
    assert asked == []


def test_a_folder_that_has_just_changed_is_not_relied_on(place: sqlite_file.Place, asked: list[str], path: Path) -> None:
    path.with_name("another").write_bytes(b"")
    for _ in range(2):
        place.check()
    assert asked == ["ledger.db", "ledger.db-wal"] * 2


@pytest.mark.parametrize("how", ["removed", "replaced", "renamed"])
def test_what_happens_to_the_file_is_noticed_at_once(place: sqlite_file.Place, path: Path, how: str) -> None:
    if how == "removed":
        path.unlink()
    elif how == "renamed":
        path.rename(path.with_name("moved"))
    else:
        path.with_name("new").write_bytes(b"")
        path.with_name("new").rename(path)
    for _ in range(2):
        with pytest.raises(LedgerDown, match="removed or replaced"):
            place.check()


def test_what_happens_further_up_is_noticed_when_the_names_are_due(
    tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file.Place, "SETTLED", -60.0)  # any time of a folder will do
    path = tmp_path / "above" / "folder" / "ledger.db"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    place = sqlite_file.Place(str(path))
    place.check()
    (tmp_path / "above").rename(tmp_path / "gone")
    place._ask_at = time.monotonic()  # a second has passed
    with pytest.raises(LedgerDown, match="removed or replaced"):
        place.check()
    place.close()


@pytest.mark.parametrize("what", ["file", "wal", "link"])
async def test_where_the_path_is_a_link_its_file_and_wal_are_watched_where_they_are(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite follows the link, and puts the WAL beside the file. The folder of the link knows nothing of either."""
    monkeypatch.setattr(sqlite_file.Place, "SETTLED", -60.0)  # any time of a folder would do
    link, file = tmp_path / "ledger.db", tmp_path / "elsewhere" / "file.db"
    file.parent.mkdir()
    link.symlink_to(file)
    ledger = SqliteLedger(link)
    for key in ("one", "two"):
        await ledger.claim(claim(key))
    gone = {"file": file, "wal": Path(f"{file}-wal"), "link": link}[what]
    moved = gone.rename(gone.with_name("moved"))
    with pytest.raises(LedgerDown, match="removed or replaced"):
        await ledger.claim(claim("three"))
    moved.rename(gone)
    assert (await ledger.claim(claim("three"))).state is State.RUNNING, "it was brought back"
    await ledger.aclose()


def test_a_folder_that_does_not_answer_any_more_is_not_relied_on(
    place: sqlite_file.Place, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> os.stat_result:
        raise OSError("on purpose")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", refuse)
        place.check()
    assert asked == ["ledger.db", "ledger.db-wal"]


def test_a_file_that_is_gone_before_it_was_looked_at_is_not_taken_for_one_that_is_there(path: Path) -> None:
    place = sqlite_file.Place(str(path))
    with pytest.raises(LedgerDown, match="removed or replaced"):
        place.check()
    place.close()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="a system that does not list what is open")
async def test_nothing_stays_open_when_a_ledger_is_closed_or_cannot_be_opened(path: Path) -> None:
    path.with_name("unfit").write_bytes(b"not SQLite " * 100)
    ledger, unfit = SqliteLedger(path), SqliteLedger(path.with_name("unfit"))
    await ledger.claim(claim("one"))
    with pytest.raises(LedgerDown):
        await unfit.open()
    await ledger.aclose()
    await unfit.aclose()
    numbers = (Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
    opened = [number.readlink() for number in numbers if number.is_symlink()]
    assert not [name for name in opened if name.is_relative_to(path.parent)]


def test_where_folders_cannot_be_opened_the_names_are_asked_for(
    path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    path.write_bytes(b"")
    place = sqlite_file.Place(str(path))
    asked.clear()
    place.check()
    place.check()
    assert asked == ["ledger.db", "ledger.db-wal"] * 2


def test_a_file_is_the_same_however_the_kernel_is_asked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(b"")
    known = sqlite_file.identity(str(path))
    assert known == (path.stat().st_ino, path.stat().st_dev) and sqlite_file.identity(f"{path}-none") is None
    monkeypatch.setattr(sqlite_file, "_statx", None)
    assert sqlite_file.identity(str(path)) == known and sqlite_file.identity(f"{path}-none") is None


DONE = Outcome("result", b"1", b"digest")


def claim(key: str) -> Claim:
    return Claim(
        id=RecordId("", "put", key), fingerprint=b"f", nonce=new_nonce(), lease=30, retention=60, on_crash="unknown"
    )


def turns_of(ledger: SqliteLedger) -> Turns:
    assert ledger._turns is not None
    return ledger._turns


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
async def ledger(path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SqliteLedger]:
    monkeypatch.setattr(sqlite_commits, "QUICK", 60.0)  # however slow the disk of the test is
    ledger = SqliteLedger(path)
    await ledger.claim(claim("the file is open"))
    with turns_of(ledger).writer.lent:  # the thread answers first, and lends its connection then
        pass
    yield ledger
    await ledger.aclose()


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """What has stopped the loop at the end of a turn: here it goes on, as a loop does that is run again."""
    seen: list[BaseException] = []
    send_collected = Turns._send_collected

    def watched(turns: Turns, loop: asyncio.AbstractEventLoop) -> None:
        try:
            send_collected(turns, loop)
        except KeyboardInterrupt as error:
            seen.append(error)

    monkeypatch.setattr(Turns, "_send_collected", watched)
    return seen


@pytest.fixture
def sizes(ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many jobs were in each transaction, in their order."""
    seen: list[int] = []
    together = Commits.together

    def watched(commits: Commits, jobs: list[Job]) -> None:
        together(commits, jobs)
        seen.append(len(jobs))

    monkeypatch.setattr(Commits, "together", watched)
    return seen


@pytest.fixture
def at_once(ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether what came, alone or together, was written at once, in their order."""
    written: list[bool] = []
    commit_at_once = Turns._commit_at_once

    def watched(turns: Turns, jobs: list[Job]) -> bool:
        is_written = commit_at_once(turns, jobs)
        if any(job.kind == "write" for job in jobs):
            written.append(is_written)
        return is_written

    monkeypatch.setattr(Turns, "_commit_at_once", watched)
    return written
