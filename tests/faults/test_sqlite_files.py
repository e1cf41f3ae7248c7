"""SQLite files that cannot be used, and disks that fail."""

import asyncio
import os
import pwd
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest

from tests.calls import call, result
from tests.faults import Caller, Effect, Effects, check, child, eventually, make_shop
from tests.faults.fronts import Pause, is_done, reads_until
from tests.servers import Store
from wirecall import Context
from wirecall.ledger.sqlite import file as sqlite_file

# --- SQLite files that cannot be used -------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def url_of(path: Path) -> str:
    return f"sqlite:{path}"


def the_file_is_not_a_database(path: Path) -> Callable[[], None]:
    path.write_bytes(b"Dear diary, " * 500)
    return path.unlink


def the_file_is_a_folder(path: Path) -> Callable[[], None]:
    path.mkdir()
    return path.rmdir


def the_folder_is_a_file(path: Path) -> Callable[[], None]:
    path.parent.write_text("no folder")
    return path.parent.unlink


def the_file_is_another_program_s(path: Path) -> Callable[[], None]:
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA application_id = 252006673")
        db.execute("CREATE TABLE configuration (name TEXT)")
    return path.unlink


def the_file_is_from_the_future(path: Path) -> Callable[[], None]:
    with closing(sqlite3.connect(path)) as db:
        db.execute(
            "CREATE TABLE wirecall_meta (only INTEGER PRIMARY KEY, version INTEGER, fence INTEGER)"
        )
        db.execute("CREATE TABLE wirecall_commands (caller TEXT, method TEXT, key TEXT)")
        db.execute("INSERT INTO wirecall_meta VALUES (1, 999, 0)")
        db.commit()
    return path.unlink


@pytest.mark.parametrize(
    "spoil",
    [
        the_file_is_not_a_database,
        the_file_is_a_folder,
        the_folder_is_a_file,
        the_file_is_another_program_s,
        the_file_is_from_the_future,
    ],
)
async def test_file_that_cannot_be_a_ledger_is_refused(
    spoil: Callable[[Path], Callable[[], None]], tmp_path: Path, effects: Effects, caller: Caller
) -> None:
    path = tmp_path / "folder" / "ledger.db"
    if spoil is not the_folder_is_a_file:
        path.parent.mkdir()
    repair = spoil(path)
    async with make_shop(url_of(path), effects) as app:
        for _ in range(2):
            refused = await caller.call(app, "charge", "key")
            assert refused.is_refused
            assert result(await app.handle(call("read"))) == 1
        repair()
        assert (await caller.call(app, "charge", "key")).error is None
    assert len(effects.all()) == 1


@pytest.mark.parametrize("what", ["file", "folder"])
async def test_read_only_file_or_folder_refuses_commands(what: str) -> None:
    with folder_of_a_mere_user() as (folder, user):
        path = folder / "kept" / "ledger.db"
        effects = Effects(folder / "effects")
        async with child(url_of(path), effects) as before:
            await before.ask("become", *user)
            known = await before.call("charge", "known")
        closed = path if what == "file" else path.parent
        mode = closed.stat().st_mode
        async with child(url_of(path), effects) as one:
            await one.ask("become", *user)
            closed.chmod(mode & ~0o222)
            for _ in range(2):
                refused = await one.call("charge", "key")
                assert refused.is_refused
                assert await one.ask("read") == 1
            closed.chmod(mode)
            answers = [
                known,
                refused,
                await one.call("charge", "key"),
                await one.call("charge", "known"),
            ]
        assert [answer.is_replayed for answer in answers] == [False, False, False, True]
        check(answers, effects.all())


@contextmanager
def folder_of_a_mere_user() -> Iterator[tuple[Path, tuple[int, int]]]:
    """A folder, and a user that its permissions bind: another user if the tests run as root."""
    folder = Path(tempfile.mkdtemp(prefix="wirecall-"))
    nobody = pwd.getpwnam("nobody")
    user = (nobody.pw_uid, nobody.pw_gid) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    try:
        (folder / "kept").mkdir()
        for one in (folder, folder / "kept"):
            os.chown(one, *user)
        yield folder, user
    finally:
        shutil.rmtree(folder)


async def test_file_that_is_moved_away_and_back_while_it_is_open(
    path: Path, effects: Effects, caller: Caller
) -> None:
    away = path.with_name("away")
    async with make_shop(url_of(path), effects) as app:
        known = await caller.call(app, "charge", "known")
        path.rename(away)
        refused = await caller.call(app, "charge", "key")
        assert refused.is_refused
        assert (await caller.call(app, "charge", "known")).result == known.result
        assert result(await app.handle(call("read"))) == 1
        away.rename(path)
        assert (await caller.call(app, "charge", "key")).error is None
    assert len(effects.all()) == 2


async def test_removed_and_recreated_file_does_not_split_the_ledger(
    path: Path, effects: Effects, caller: Caller
) -> None:
    async with make_shop(url_of(path), effects) as app:
        await caller.call(app, "charge", "known")
        for name in path.parent.glob("ledger.db*"):
            name.unlink()
        async with make_shop(url_of(path), effects) as other:
            assert (await caller.call(other, "charge", "key")).error is None
            refused = await Caller().call(app, "charge", "key")
            assert refused.is_refused, "its own file does not have this key"
    assert len(effects.of("key")) == 1


async def test_file_that_another_process_locks_for_long_refuses_commands(
    path: Path, effects: Effects, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file, "PATIENCE", 0.3)
    pause = Pause()
    async with (
        child(url_of(path), effects) as locker,
        make_shop(url_of(path), effects, pause=pause) as app,
    ):
        known = await caller.call(app, "charge", "known")
        begun = asyncio.create_task(caller.call(app, "hold", "begun"))
        await pause.entered()
        await locker.ask("lock", str(path))
        refused = asyncio.create_task(caller.call(app, "charge", "key"))
        pause.go.set()
        queries = await reads_until(app, refused, begun)
        assert (await refused).is_refused and queries > 10
        assert (await caller.call(app, "charge", "known")).result == known.result, (
            "to read it, no lock is needed"
        )
        await locker.ask("unlock")
        await eventually(lambda: is_done(Store("sqlite", url_of(path)), "hold", "begun"))
        assert (await caller.insist(app, "charge", "key")).error is None
        again = await locker.call("hold", "begun")
        assert again.repeats(await begun)
    assert len(effects.all()) == 3


# --- SQLite on a disk that fails ------------------------------------------------------------------


async def test_file_size_limit_refuses_commands(path: Path, effects: Effects) -> None:
    """The kernel's own refusal:

    RLIMIT_FSIZE, which is for a process what a full disk is for all of them.
    """
    async with child(url_of(path), effects) as one, child(url_of(path), effects) as other:
        answers = [await one.call("charge", "first")]
        await one.begin("hold", "begun")
        await one.ask("limit", 0)
        await one.send("go")
        begun = await one.answer()
        assert begun.error is None, "it has happened, whatever becomes of its record"
        answers.append(await one.call("charge", "key"))
        assert answers[-1].is_refused
        assert await one.ask("read") == 1
        await one.ask("limit", -1)
        await eventually(lambda: is_done(Store("sqlite", url_of(path)), "hold", "begun"))
        answers += [
            begun,
            await other.call("hold", "begun"),
            await one.call("charge", "key"),
            await other.call("charge", "key"),
        ]
    assert [answer.is_replayed for answer in answers] == [False, False, False, True, False, True]
    check(answers, effects.all())
    assert len(effects.all()) == 3


class Disk(apsw.VFS):
    """The disk below all SQLite connections that are opened while it is installed.

    It can fail on purpose.
    """

    def __init__(self) -> None:
        self.base = apsw.vfs_names()[0]
        self.writes = 0
        self.fails_from = 0  # the first write or flush that fails; 0 for none
        self.trouble: type[apsw.Error] = apsw.FullError
        super().__init__("failing", self.base, makedefault=True)

    def xOpen(self, name: Any, flags: Any) -> "DiskFile":  # noqa: N802
        return DiskFile(self, name, flags)

    def fail_after(self, writes: int, trouble: type[apsw.Error]) -> None:
        self.trouble = trouble
        self.fails_from = self.writes + writes + 1

    def heal(self) -> None:
        self.fails_from = 0

    def count(self) -> None:
        self.writes += 1
        if self.fails_from and self.writes >= self.fails_from:
            raise self.trouble("on purpose")


class DiskFile(apsw.VFSFile):
    def __init__(self, disk: Disk, name: Any, flags: Any) -> None:
        self._disk = disk
        super().__init__(disk.base, name, flags)

    def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802
        self._disk.count()
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:  # noqa: N802
        self._disk.count()
        super().xSync(flags)


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    yield disk
    disk.unregister()


@pytest.mark.parametrize("trouble", [apsw.FullError, apsw.IOError])
@pytest.mark.parametrize("method", ["charge", "book"])
async def test_disk_may_fail_at_any_write(
    disk: Disk, trouble: type[apsw.Error], method: str, path: Path, effects: Effects
) -> None:
    """A leased command, and one in a transaction with its effect.

    First every write fails, then all but one, and so on.
    """
    app = make_shop(url_of(path), effects)
    caller = Caller()

    @app.command(on_crash="transactional")
    async def book(order: int, context: Context) -> str:
        context.db.execute("CREATE TABLE IF NOT EXISTS bookings (key, attempt, run)")
        row = (context.idempotency_key, context.meta["attempt"], f"run-{context.meta['attempt']}")
        context.db.execute("INSERT INTO bookings VALUES (?, ?, ?)", row)
        return row[2]

    async with app:
        await caller.call(app, method, "first")
        before = disk.writes
        await caller.call(app, method, "second")
        writes = disk.writes - before
        assert writes > 2
        for number in range(writes + 1):
            disk.fail_after(number, trouble)
            answer = await caller.call(app, method, f"key-{number}")
            assert answer.error is None or answer.code in (50310, 50910), answer
            disk.heal()
            assert (await caller.insist(app, method, f"key-{number}", seconds=5)).error is None
    done = [Effect(*row) for row in rows(path)] if method == "book" else effects.all()
    assert len(done) == writes + 3
    check(caller.history, done)


def rows(path: Path) -> list[Any]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute("SELECT * FROM bookings").fetchall()
