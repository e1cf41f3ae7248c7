"""Cases that only the SQLite ledger can meet."""

import asyncio
import gc
import os
import re
import sqlite3
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from tests.calls import call, error, make_app, result
from tests.ledger.sqlite.writers import claim, turn_of, writer_of
from wirecall.errors import CannotWait, UsageError
from wirecall.ledger.base import Delivered, LedgerDown, Outcome, RecordId, State
from wirecall.ledger.sqlite import file as sqlite_file
from wirecall.ledger.sqlite import ledger as sqlite
from wirecall.ledger.sqlite.file import LedgerFile
from wirecall.ledger.sqlite.ledger import SqliteLedger
from wirecall.ledger.sqlite.writer import Job, Writer


async def test_wal_that_another_copy_of_sqlite_removes_is_noticed(tmp_path: Path) -> None:
    """Python's own sqlite3 drops the locks of apsw in the same process and, closing, takes the WAL
    with it.

    Commits after that would be lost, so the ledger refuses them instead of acknowledging them.
    """
    path = tmp_path / "ledger.db"
    app = make_app(ledger=f"sqlite:{path}")
    effects = list[int]()

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


# --- one thread writes, and groups the jobs that wait ---


async def test_event_loop_never_commits(path: Path, commits: list[str]) -> None:
    """It does not commit its tasks' transitions, a handler's transaction, or the rest at its end."""
    ledger = SqliteLedger(path)
    token = (await ledger.claim(claim("one"))).token
    assert await ledger.complete(token, DONE, 60)
    async with ledger.transaction(claim("two"), wait=5) as transaction:
        await transaction.complete(DONE, 60, undo=False)
    assert await ledger.sweep() == 0
    await ledger.aclose()
    assert set(commits) == {f"wirecall ledger {path}"} and len(commits) >= 4


async def test_transitions_at_once_share_a_commit(ledger: SqliteLedger, commits: list[str]) -> None:
    records = await asyncio.gather(*(ledger.claim(claim(f"key-{n}")) for n in range(64)))
    assert len(commits) == 1
    assert all(
        await asyncio.gather(*(ledger.complete(record.token, DONE, 60) for record in records))
    )
    assert len(commits) == 2 and (await ledger.counts())[State.DONE] == 64
    await ledger.deliver([Delivered(record.id, record.nonce, "written") for record in records])
    assert len(commits) == 3
    await ledger.deliver([])
    assert len(commits) == 3


async def test_duplicate_is_answered_by_a_read_during_any_write(
    ledger: SqliteLedger, path: Path
) -> None:
    """While another connection has the lock of the file."""
    first = await ledger.claim(claim("one"))
    assert await ledger.complete(first.token, DONE, 60)
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE")
    again = await asyncio.wait_for(
        asyncio.gather(*(ledger.claim(claim("one")) for _ in range(8))), 4
    )
    assert [record.outcome for record in again] == [DONE] * 8
    other.close()


async def test_caller_that_cannot_wait_gets_the_result_of_a_read(path: Path) -> None:
    app = make_app(ledger=f"sqlite:{path}")

    @app.command
    def put(value: int) -> int:
        return value

    async with app:
        assert result(await app.handle(call("put", {"value": 1}, key="one"))) == 1
        assert result(app.handle_sync(call("put", {"value": 1}, key="one", id=2))) == 1


async def test_caller_that_cannot_wait_gets_an_error_before_anything_runs(path: Path) -> None:
    app = make_app(ledger=f"sqlite:{path}")
    effects = list[int]()

    @app.command
    def put(value: int) -> int:
        effects.append(value)
        return value

    async with app:
        assert result(await app.handle(call("put", {"value": 1}, key="one"))) == 1
        with pytest.raises(CannotWait):  # a loop runs in this thread
            app.handle_sync(call("put", {"value": 2}, key="two"))
        assert effects == [1]
        assert (
            result(await asyncio.wait_for(app.handle(call("put", {"value": 2}, key="two")), 10))
            == 2
        )
    assert effects == [1, 2]


@pytest.mark.parametrize("is_written", [False, True])
async def test_abandoned_claim_leaves_nothing(ledger: SqliteLedger, is_written: bool) -> None:
    """Before it is sent to the thread, and after it is in the file."""
    given_up = ledger.claim(claim("given up"))
    assert asyncio.isfuture(given_up.send(None))
    if is_written:
        turn_of(ledger)
        assert await ledger.get(RecordId("", "put", "given up")) is not None
    given_up.close()
    turn_of(ledger)
    assert await ledger.get(RecordId("", "put", "given up")) is None


async def test_abandoned_claim_does_not_report_its_error(
    ledger: SqliteLedger, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log would show it as an exception that was never retrieved."""
    monkeypatch.setattr(sqlite_file, "PATIENCE", 0.01)
    complaints = list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    given_up = ledger.claim(claim("given up"))
    given_up.send(None)
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE")
    given_up.close()
    with pytest.raises(LedgerDown, match="locked"):
        await ledger.claim(claim("beside it"))
    other.close()
    turn_of(ledger)
    del given_up
    gc.collect()
    assert complaints == []


async def test_abandoned_claim_is_released_when_the_lock_of_another_process_ends(
    ledger: SqliteLedger, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the file when its caller leaves.

    It ran nothing, so a retry must not receive "unknown".
    """
    monkeypatch.setattr(sqlite_file, "PATIENCE", 0.01)
    given_up = ledger.claim(claim("given up"))
    given_up.send(None)
    turn_of(ledger)
    assert await ledger.get(RecordId("", "put", "given up")) is not None
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE")
    given_up.close()
    turn_of(ledger)
    other.close()
    assert (await ledger.claim(claim("next"))).state is State.RUNNING
    assert await ledger.get(RecordId("", "put", "given up")) is None


async def test_duplicate_in_a_group_commit_sees_the_record(ledger: SqliteLedger) -> None:
    """Of an existing record, and of one that was made in the same turn."""
    first = await ledger.claim(claim("one"))
    assert await ledger.complete(first.token, DONE, 60)
    again, new, twice = await asyncio.gather(
        *(ledger.claim(claim(key)) for key in ("one", "new", "new"))
    )
    assert (again.token, again.outcome) == (first.token, DONE)
    assert new.state is State.RUNNING and twice.token == new.token


async def test_write_that_the_disk_refuses_does_not_fail_the_others(ledger: SqliteLedger) -> None:
    def refuse(*_: object) -> None:
        raise apsw.FullError("on purpose")

    asked = (
        ledger.claim(claim("one")),
        writer_of(ledger).ask(Job(refuse)),
        ledger.claim(claim("two")),
    )
    one, refused, two = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(refused, LedgerDown) and "no room" in str(refused)
    assert [getattr(each, "state", None) for each in (one, two)] == [State.RUNNING] * 2
    assert sum((await ledger.counts()).values()) == 3


async def test_unreadable_row_fails_only_its_own_call(ledger: SqliteLedger, path: Path) -> None:
    token = (await ledger.claim(claim("damaged"))).token
    assert await ledger.complete(token, DONE, 60)
    other = apsw.Connection(str(path))
    other.execute("PRAGMA ignore_check_constraints = 1")
    other.execute("UPDATE wirecall_commands SET state = 'doubtful' WHERE key = 'damaged'")
    other.close()
    together = (ledger.claim(claim(key)) for key in ("damaged", "the file is open", "new"))
    damaged, old, new = await asyncio.wait_for(
        asyncio.gather(*together, return_exceptions=True), 10
    )
    assert isinstance(damaged, LedgerDown) and "doubtful" in str(damaged)
    assert [getattr(each, "state", None) for each in (old, new)] == [State.RUNNING] * 2


@pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit])
async def test_caller_that_is_interrupted_in_the_middle_of_a_claim_leaves_nothing(
    ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch, signal: type[BaseException]
) -> None:
    """By Ctrl-C, or by a SIGTERM handler that exits: nothing ran. The next caller need not wait."""
    loop = asyncio.get_running_loop()
    for place in ("call_soon", "create_future"):
        with monkeypatch.context() as patched:
            patched.setattr(loop, place, lambda *_: raised(signal))
            with pytest.raises(signal):
                ledger.claim(claim("interrupted")).send(None)
        interrupted = ledger.claim(claim("interrupted"))
        assert asyncio.isfuture(interrupted.send(None))
        with pytest.raises(signal):
            interrupted.throw(signal)
        assert (
            await asyncio.wait_for(ledger.claim(claim(f"after {place}")), 10)
        ).state is State.RUNNING
        assert await ledger.get(RecordId("", "put", "interrupted")) is None


async def test_caller_that_is_interrupted_in_a_transition_does_not_block_the_thread(
    ledger: SqliteLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = (await ledger.claim(claim("one"))).token
    with monkeypatch.context() as patched:
        patched.setattr(
            asyncio.get_running_loop(), "call_soon", lambda *_: raised(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            await ledger.heartbeat(token, 30)
    assert await asyncio.wait_for(ledger.heartbeat(token, 30), 10)


@pytest.mark.parametrize("count", [1, 2])
async def test_lock_of_another_process_does_not_block_the_event_loop(
    ledger: SqliteLedger, path: Path, count: int
) -> None:
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE")
    claimed = asyncio.gather(*(ledger.claim(claim(f"locked {n}")) for n in range(count)))
    for _ in range(100):
        await asyncio.sleep(0.001)
    assert not claimed.done()
    other.execute("ROLLBACK")
    assert [record.state for record in await claimed] == [State.RUNNING] * count
    other.close()


async def test_transition_does_not_overtake_a_handlers_transaction(ledger: SqliteLedger) -> None:
    async with ledger.transaction(claim("held"), wait=25) as transaction:
        waiting = asyncio.create_task(ledger.claim(claim("waiting")))
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not waiting.done()
        await transaction.complete(DONE, 60, undo=False)
    assert (await waiting).state is State.RUNNING


async def test_transition_that_the_disk_refuses_leaves_nothing(ledger: SqliteLedger) -> None:
    def write_and_refuse(db: apsw.Cursor, _: int) -> None:
        db.execute("DELETE FROM wirecall_commands")
        raise apsw.FullError("on purpose")

    with pytest.raises(LedgerDown, match="no room"):
        await writer_of(ledger).ask(Job(write_and_refuse))
    assert (await ledger.claim(claim("next"))).state is State.RUNNING
    assert sum((await ledger.counts()).values()) == 2


async def test_wal_is_folded_into_the_file(ledger: SqliteLedger, path: Path) -> None:
    for turn in range(20):
        await asyncio.gather(*(ledger.claim(claim(f"{turn}-{n}-{'x' * 200}")) for n in range(100)))
    assert Path(f"{path}-wal").stat().st_size < 2000 * 4096, (
        "it starts from the beginning after a checkpoint"
    )


# --- pages that a transition writes ---


async def test_outcome_is_one_page(ledger: SqliteLedger) -> None:
    token = (await ledger.claim(claim("one"))).token
    pages: list[int] = []

    def count_pages(_db: apsw.Connection, _name: str, number: int) -> int:
        pages.append(number)
        return apsw.SQLITE_OK

    writer_of(ledger).file.db.set_wal_hook(count_pages)
    assert await ledger.heartbeat(token, 30)
    assert await ledger.complete(token, DONE, 60)
    assert pages[1] - pages[0] == 2, "its own page, and the one of the few open commands"


async def test_outcome_with_another_retention_is_kept_that_long(path: Path) -> None:
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
    "alike": "wirecall_commands_likeness (likeness=?)",
    "dead": "wirecall_commands_open (state=?)",
    "methods": "wirecall_commands_open (state=? AND method>?)",
    "page": "wirecall_commands_open (state=? AND method=? AND started_at>? AND started_at<?)",
    "page_running": "wirecall_commands_open (state=? AND method=? AND started_at>? AND started_at<?)",
    "page_of_tasks": "wirecall_tasks_started_at (started_at>? AND started_at<?)",
    "counts": "SCAN wirecall_commands USING COVERING INDEX wirecall_commands_open",
    "count_dead": "wirecall_commands_open (state=?)",
    "of_caller": "wirecall_commands_id (caller=?)",
    "change_task": "INDEX sqlite_autoindex_wirecall_tasks_1 (id=?)",
    "forget_tasks": "wirecall_tasks_expires_at (expires_at<?)",
}
OF_TABLES = [
    name
    for name, text in sqlite_file.SQL.items()
    if re.search("(FROM|UPDATE|JOIN) wirecall_(commands|tasks)\\b", text)
    and not name.startswith("schema")
]


@pytest.mark.parametrize("name", OF_TABLES)
@pytest.mark.parametrize("is_analyzed", [False, True])
def test_queries_use_an_index(name: str, is_analyzed: bool) -> None:
    """Whether or not the user has run ANALYZE on the file."""
    db = apsw.Connection(":memory:")
    db.execute("".join(sqlite_file.SCHEMA))
    if is_analyzed:
        ledger = SqliteLedger("not opened")
        for number in range(1000):
            ledger._insert(claim(f"key-{number}"), db.cursor(), number)
        db.execute("ANALYZE")
    statement = "\n".join(
        line for line in sqlite_file.SQL[name].splitlines() if not line.startswith("--")
    )
    nobody = (None,) * statement.count("?") or defaultdict[str, None](lambda: None)
    plan = str(db.execute(f"EXPLAIN QUERY PLAN {statement}", nobody).fetchall())
    assert PLANS.get(name, "wirecall_commands_id (caller=? AND method=? AND key=?)") in plan
    scanned = set(re.findall(r"SCAN (\w+)(?! USING COVERING INDEX)\b", plan))
    assert scanned <= {"found", "page"}, "only what a statement has found itself"


# --- fences ---


async def test_fences_grow_across_processes(ledger: SqliteLedger, path: Path) -> None:
    """Two processes alternate, a record is removed and made again, and one of the processes
    restarts.
    """
    other = SqliteLedger(path)
    fences = []
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


async def test_fences_of_an_undone_transaction_are_reused(ledger: SqliteLedger, path: Path) -> None:
    """By another process, which is first; ours are greater then."""

    def fail(*_: object) -> None:
        raise apsw.FullError("on purpose")

    with pytest.raises(LedgerDown, match="no room"):
        await writer_of(ledger).ask(Job(fail, claims=True))
    other = SqliteLedger(path)
    theirs = [(await other.claim(claim(f"theirs {n}"))).fence for n in range(5)]
    ours = (await ledger.claim(claim("ours"))).fence
    assert ours > max(theirs)
    await other.aclose()


async def test_fences_of_claims_at_once_differ(ledger: SqliteLedger) -> None:
    records = await asyncio.gather(*(ledger.claim(claim(f"key-{n}")) for n in range(8)))
    fences = [record.fence for record in records]
    assert fences == sorted(set(fences))


# --- its beginning and its end ---


@pytest.mark.parametrize(("name", "other"), [("due", "kept_until"), ("state", "status")])
async def test_file_with_other_columns_is_refused_and_left_alone(
    name: str, other: str, path: Path
) -> None:
    """For example, one from before the first release; whether or not columns could be added to it."""
    old = apsw.Connection(str(path))
    old.execute(sqlite_file.SQL["schema 1"].replace(name, other))
    before = old.execute("SELECT sql FROM sqlite_master").fetchall()
    ledger = SqliteLedger(path, "update")
    with pytest.raises(
        UsageError, match=rf"not those of this wirecall(.|\n)*, {other},(.|\n)*, {name},"
    ):
        await ledger.open()
    await ledger.aclose()
    assert old.execute("SELECT sql FROM sqlite_master").fetchall() == before
    old.close()


async def test_file_with_a_table_of_the_same_name_is_refused_and_left_alone(path: Path) -> None:
    """For example, the user's own file, with a ledger from before there were tasks."""
    old = apsw.Connection(str(path))
    old.execute(sqlite_file.SQL["schema 1"] + sqlite_file.SQL["schema 2"])
    old.execute("CREATE TABLE wirecall_tasks (mine)")
    ledger = SqliteLedger(path, "update")
    with pytest.raises(
        UsageError, match=r"not those of this wirecall(.|\n)*table wirecall_tasks already exists"
    ):
        await ledger.open()
    await ledger.aclose()
    assert old.execute("SELECT version FROM wirecall_meta").get == 2
    old.close()


def test_ledger_that_is_closed_while_another_thread_opens_it_stays_closed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise there would be a writer that never ends."""
    begun = threading.Event()
    go_on = threading.Event()
    made = list[Writer]()

    def make(*args: Any, **kwargs: Any) -> Writer:
        begun.set()
        assert go_on.wait(10)
        made.append(Writer(*args, **kwargs))
        return made[0]

    def close() -> None:
        closing.set()
        asyncio.run(ledger.aclose())

    monkeypatch.setattr(sqlite, "Writer", make)
    ledger = SqliteLedger(path)
    closing = threading.Event()
    threads = [threading.Thread(target=ledger._running), threading.Thread(target=close)]
    threads[0].start()
    assert begun.wait(10)
    threads[1].start()
    assert closing.wait(10)
    threads[1].join(0.05)  # if it did not wait, it would have ended by now
    go_on.set()
    for thread in threads:
        thread.join(10)
    made[0]._thread.join(10)
    assert not made[0]._thread.is_alive()


FORKED = """
import asyncio, gc, os, sys
from tests.ledger.sqlite.writers import claim
from wirecall.ledger.base import State
from wirecall.ledger.sqlite.ledger import SqliteLedger

path, how = sys.argv[1:]
ledger = SqliteLedger(path)
asyncio.run(ledger.claim(claim("one")))
parents = ledger._writer.file
child = os.fork()
if child == 0:
    if how == "used":
        assert asyncio.run(ledger.claim(claim("two"))).state is State.RUNNING
    if how != "forgotten":
        asyncio.run(ledger.aclose())
    del ledger
    gc.collect()
    assert parents.db.db_filename("main") and parents.reader.db_filename("main"), "they are closed"
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert asyncio.run(ledger.claim(claim("three"))).state is State.RUNNING
print(sorted(record.id.key for record in asyncio.run(ledger.list())))
asyncio.run(ledger.aclose())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
@pytest.mark.parametrize("how", ["used", "closed", "forgotten"])
def test_fork_does_not_close_the_connections_of_its_parent(path: Path, how: str) -> None:
    """SQLite would believe that it is the last one, and remove a WAL that another process uses."""
    words = [sys.executable, "-W", "ignore", "-c", FORKED, str(path), how]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str(["one", "three", *["two"] * (how == "used")]), done.stderr


# --- whether the path still names the file ---


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that were looked up."""
    names: list[str] = []
    stat = os.stat

    def watched(name: Any, *args: Any, **options: Any) -> os.stat_result:
        if isinstance(name, str):
            names.append(Path(name).name)
        return stat(name, *args, **options)

    monkeypatch.setattr(os, "stat", watched)
    return names


@pytest.fixture
def file(path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[LedgerFile]:
    """A file whose folder has not changed for a while."""
    monkeypatch.setattr(sqlite_file, "SETTLED", 0.05)
    file = LedgerFile(str(path))
    file.db.execute("CREATE TABLE makes_the_wal (n)")
    while time.time_ns() < path.parent.stat().st_ctime_ns + 60_000_000:
        time.sleep(0.01)  # the kernel's clock, which cannot be passed
    file.check()
    asked.clear()
    yield file
    file.close()


def test_names_are_not_looked_up_while_the_folder_is_unchanged(
    file: LedgerFile, asked: list[str]
) -> None:
    for _ in range(5):
        file.check()
    assert asked == []


def test_folder_that_has_just_changed_is_not_relied_on(
    file: LedgerFile, asked: list[str], path: Path
) -> None:
    path.with_name("another").write_bytes(b"")
    for _ in range(2):
        file.check()
    assert asked == ["ledger.db", "ledger.db-wal"] * 2


@pytest.mark.parametrize("how", ["removed", "replaced", "renamed"])
def test_changes_of_the_file_are_noticed_at_once(file: LedgerFile, path: Path, how: str) -> None:
    if how == "removed":
        path.unlink()
    elif how == "renamed":
        path.rename(path.with_name("moved"))
    else:
        path.with_name("new").write_bytes(b"")
        path.with_name("new").rename(path)
    for _ in range(2):
        with pytest.raises(LedgerDown, match="removed or replaced"):
            file.check()


def test_changes_of_parent_folders_are_noticed_within_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file, "SETTLED", -60.0)  # any time of a folder will do
    monkeypatch.setattr(sqlite_file, "AGAIN", 0.0)  # it has passed
    (tmp_path / "above").mkdir(mode=0o700)
    file = LedgerFile(str(tmp_path / "above" / "folder" / "ledger.db"))
    file.check()
    (tmp_path / "above").rename(tmp_path / "gone")
    with pytest.raises(LedgerDown, match="removed or replaced"):
        file.check()
    file.close()


@pytest.mark.parametrize("what", ["file", "wal", "link"])
async def test_link_has_its_file_and_wal_watched_in_their_own_folder(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite follows the link, and puts the WAL beside the file.

    The folder of the link has neither.
    """
    monkeypatch.setattr(sqlite_file, "SETTLED", -60.0)  # any time of a folder would do
    link = tmp_path / "ledger.db"
    file = tmp_path / "elsewhere" / "file.db"
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


@pytest.mark.parametrize("refused", ["fstat", "open"])
def test_folder_that_does_not_answer_is_not_relied_on(
    tmp_path: Path, path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    monkeypatch.setattr(sqlite_file, "SETTLED", -60.0)
    path.write_bytes(b"")
    if refused == "open":
        opened = os.open
        monkeypatch.setattr(
            os,
            "open",
            lambda name, *args: raised(OSError) if name == str(tmp_path) else opened(name, *args),
        )
    file = LedgerFile(str(path))
    if refused == "fstat":
        monkeypatch.setattr(os, "fstat", lambda *_: raised(OSError))
    asked.clear()
    for _ in range(2):
        file.check()
    assert asked == ["ledger.db", "ledger.db-wal"] * 2
    monkeypatch.undo()
    file.close()


@pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="a system that does not list what is open"
)
async def test_connections_are_closed_when_a_ledger_is_closed_or_cannot_be_opened(
    path: Path,
) -> None:
    path.with_name("unfit").write_bytes(b"not SQLite " * 100)
    ledger = SqliteLedger(path)
    unfit = SqliteLedger(path.with_name("unfit"))
    await ledger.claim(claim("one"))
    with pytest.raises(LedgerDown):
        await unfit.open()
    await ledger.aclose()
    await unfit.aclose()
    numbers = (Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
    opened = [number.readlink() for number in numbers if number.is_symlink()]
    assert not [name for name in opened if name.is_relative_to(path.parent)]


DONE = Outcome("result", b"1", b"digest")


def raised(error: type[BaseException]) -> Any:
    raise error


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
async def ledger(path: Path) -> AsyncIterator[SqliteLedger]:
    ledger = SqliteLedger(path)
    await ledger.claim(claim("the file is open"))
    yield ledger
    await ledger.aclose()


@pytest.fixture
def commits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads that have committed, or were about to, in their order."""
    if "ledger" in request.fixturenames:
        request.getfixturevalue("ledger")
    seen: list[str] = []
    check = LedgerFile.check

    def watched(file: LedgerFile) -> None:
        seen.append(threading.current_thread().name)
        check(file)

    monkeypatch.setattr(LedgerFile, "check", watched)
    return seen
