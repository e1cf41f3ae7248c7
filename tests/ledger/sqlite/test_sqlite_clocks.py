"""Clocks, boots and places of an SQLite ledger: a set clock, a restart or a mount does not decide a
lease.
"""

import os
import stat
from pathlib import Path
from typing import Any

import apsw
import pytest
from msgspec import structs

from tests.ledger import ID, claim_of, granted, outcome_of, present
from tests.ledger.sqlite.clocks import Clock, opened
from wirecall import UsageError
from wirecall.ledger.base import LedgerDown, State, open_ledger
from wirecall.ledger.sqlite import ledger as sqlite
from wirecall.ledger.sqlite.file import LedgerFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.mark.parametrize("jump", [3600.0, -3600.0, 10 * 365 * 86_400.0, -10 * 365 * 86_400.0])
async def test_wall_clock_change_does_not_end_a_lease(jump: float, path: Path) -> None:
    clock = Clock()
    ledger = await opened(path, clock)
    record = await granted(ledger)
    clock.wall_time += jump
    assert (await ledger.claim(claim_of())).nonce == record.nonce
    assert await ledger.sweep() == 0, "the holder is alive"
    assert (await present(ledger)).lease_left > 0
    assert await ledger.commit_point(record.token, 30)
    assert await ledger.complete(record.token, outcome_of(), 1000)
    assert (await ledger.claim(claim_of())).state is State.DONE
    await ledger.aclose()


async def test_lease_expires_even_if_the_wall_clock_stands_still(path: Path) -> None:
    clock = Clock()
    ledger = await opened(path, clock)
    record = await granted(ledger)
    clock.since_boot += 31
    assert not await ledger.commit_point(record.token, 30)
    assert (await ledger.claim(claim_of())).state is State.UNKNOWN
    await ledger.aclose()


@pytest.mark.parametrize("jumps", [[8 * 86_400.0], [-3600.0, 10 * 365 * 86_400.0], [9e4] * 12])
@pytest.mark.parametrize("state", [State.DONE, State.TOMBSTONE, State.WAITING, State.UNKNOWN])
async def test_wall_clock_change_does_not_remove_records(
    state: State, jumps: list[float], path: Path
) -> None:
    """P9: it keeps the answer of a command, the fact that it was done, and an unknown outcome."""
    clock = Clock()
    ledger = await opened(path, clock)
    record = await granted(ledger)
    if state is State.UNKNOWN:
        assert await ledger.abandon(record.token)
    elif state is State.WAITING:
        assert await ledger.suspend(record.token, outcome_of(), 1000)
    else:
        assert await ledger.complete(record.token, outcome_of(), 1000)
    if state is State.TOMBSTONE:
        clock.wall_time += 1001
        clock.since_boot += 1001
        assert await ledger.sweep() == 1
    before = await present(ledger)
    assert before.state is state
    for jump in jumps:
        clock.wall_time += jump
        assert await ledger.sweep() == 0
        assert await ledger.claim(claim_of()) == before
    await ledger.aclose()


async def test_wrong_wall_clock_after_a_boot_does_not_forget_that_a_command_was_done(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the wall clock counts while the machine is off, so an outcome may become old by mistake."""
    clock = Clock()
    before = await opened(path, clock)
    record = await granted(before)
    assert await before.complete(record.token, outcome_of(), 1000)
    await before.aclose()
    monkeypatch.setattr(sqlite, "_boot_id", lambda: b"another boot....")
    clock.since_boot = 10.0
    clock.wall_time = clock.wall_time + 8 * 86_400
    after = await opened(path, clock)
    assert await after.sweep() == 1
    for _ in range(2):
        clock.wall_time += 8 * 86_400
        assert await after.sweep() == 0
        assert (await after.claim(claim_of())).state is State.TOMBSTONE
    clock.since_boot += 7001
    assert await after.sweep() == 1
    await after.aclose()


@pytest.mark.parametrize("since_boot", [10.0, 5000.0, 1e6])
async def test_holder_of_another_boot_is_gone(
    since_boot: float, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock restarted, so its value does not matter: after a reboot no process holds a lease."""
    clock = Clock()
    before = await opened(path, clock)
    record = await granted(before)
    await before.aclose()
    monkeypatch.setattr(sqlite, "_boot_id", lambda: b"another boot....")
    clock.since_boot = since_boot
    after = await opened(path, clock)
    assert (await present(after)).lease_left == 0
    assert not await after.commit_point(record.token, 30)
    assert (await after.claim(claim_of())).state is State.UNKNOWN
    await after.aclose()


async def test_boot_without_an_id_is_found_by_a_clock_that_restarted(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "_boot_id", lambda: b"")
    clock = Clock()
    before = await opened(path, clock)
    await granted(before)
    await before.aclose()
    clock.since_boot = 10
    after = await opened(path, clock)
    assert (await after.claim(claim_of())).state is State.UNKNOWN
    await after.aclose()


@pytest.mark.parametrize("jump", [10 * 365 * 86_400.0, -10 * 365 * 86_400.0])
async def test_wall_clock_change_does_not_remove_a_task(jump: float, path: Path) -> None:
    clock = Clock()
    ledger = await opened(path, clock)
    record = await granted(ledger)
    assert await ledger.begin_task(record.token, "task", b"{}", 1000)
    assert await ledger.suspend(record.token, outcome_of(), 1e6)
    clock.wall_time += jump
    clock.since_boot += 990
    assert await ledger.sweep() == 0
    assert (task := await ledger.task("task")) is not None and task.ttl_left >= 10
    assert await ledger.change_task(structs.replace(task, is_ready=True))
    assert await ledger.orphans() == ["task"]
    clock.wall_time += 11
    clock.since_boot += 11
    is_forgotten = jump > 0  # otherwise the wall clock has yet to get there
    assert (await ledger.task("task") is None) is (await ledger.orphans() == []) is is_forgotten
    assert await ledger.sweep() == is_forgotten
    await ledger.aclose()


async def test_task_age_after_a_boot_follows_the_wall_clock(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    before = await opened(path, clock)
    record = await granted(before)
    assert await before.begin_task(record.token, "task", b"{}", 1000)
    await before.aclose()
    monkeypatch.setattr(sqlite, "_boot_id", lambda: b"another boot....")
    clock.since_boot = 4000.0
    clock.wall_time = clock.wall_time + 990
    after = await opened(path, clock)
    assert (task := await after.task("task")) is not None and task.ttl_left == 10
    assert await after.orphans() == ["task"], "its holder is gone"
    clock.wall_time += 11
    assert await after.task("task") is None
    assert not await after.change_task(task)
    assert await after.orphans() == []
    assert await after.sweep() == 2, "the task, and the run that a boot has ended"
    await after.aclose()


# --- places ---------------------------------------------------------------------------------------


async def test_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    ledger = await open_ledger(f"sqlite:{tmp_path}/a/ledger.db")
    assert stat.S_IMODE(os.stat(tmp_path / "a").st_mode) == 0o700
    await ledger.aclose()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
async def test_files_of_a_new_ledger_are_for_their_owner_alone(path: Path, umask: int) -> None:
    """The WAL and its index too, as long as they are there."""
    before = os.umask(umask)
    try:
        ledger = await open_ledger(f"sqlite:{path}")
        await granted(ledger)
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
        await ledger.aclose()
    finally:
        os.umask(before)
    assert modes == {"ledger.db": 0o600, "ledger.db-wal": 0o600, "ledger.db-shm": 0o600}


async def test_file_that_exists_keeps_its_mode(path: Path) -> None:
    """It may be the user's own, with tables that other programs read."""
    path.touch()
    path.chmod(0o640)
    ledger = await open_ledger(f"sqlite:{path}")
    await granted(ledger)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    await ledger.aclose()


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o720])
@pytest.mark.parametrize("link", ["file", "folder", "link behind a link"])
async def test_link_in_a_folder_that_others_can_write_is_not_followed(
    tmp_path: Path, mode: int, link: str
) -> None:
    open_to_all = tmp_path / "open"
    elsewhere = tmp_path / "elsewhere"
    for folder in (open_to_all, elsewhere):
        folder.mkdir()
    path = open_to_all / "ledger.db"
    if link == "file":
        path.symlink_to(elsewhere / "theirs.db")
    else:
        (open_to_all / "folder").symlink_to(elsewhere)
        path = open_to_all / "folder" / "deep" / "ledger.db"
    if link == "link behind a link":
        path = tmp_path / "ours.db"
        path.symlink_to(open_to_all / "folder" / "ledger.db")
    open_to_all.chmod(mode)
    with pytest.raises(UsageError, match="symbolic link that other users can replace") as caught:
        await open_ledger(f"sqlite:{path}")
    assert f"(mode {mode:o})" in str(caught.value) and "fix: name the file itself" in str(
        caught.value
    )
    assert not list(elsewhere.iterdir())


async def test_link_that_replaces_a_folder_later_is_not_followed(path: Path) -> None:
    """The check has found it to be a folder by then; SQLite itself looks again."""
    folder = path.parent / "folder"
    file = LedgerFile(str(folder / "ledger.db"))
    folder.rename(path.parent / "elsewhere")
    folder.symlink_to(path.parent / "elsewhere")
    with pytest.raises(apsw.CantOpenError):
        file.connect()
    file.close()


async def test_link_that_only_we_can_write_is_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "ledger.db").symlink_to("elsewhere/../elsewhere/ledger.db")
    ledger = await open_ledger(f"sqlite:{tmp_path}/ledger.db")
    await granted(ledger)
    assert stat.S_IMODE((tmp_path / "elsewhere" / "ledger.db").stat().st_mode) == 0o600
    await ledger.aclose()


async def test_link_to_itself_is_reported(path: Path) -> None:
    path.symlink_to(path)
    with pytest.raises(LedgerDown, match="Too many levels of symbolic links"):
        await open_ledger(f"sqlite:{path}")


async def test_relative_path_means_the_folder_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    ledger = await open_ledger("sqlite:ledger.db")
    monkeypatch.chdir(tmp_path / "elsewhere")
    await granted(ledger)
    await ledger.aclose()
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["ledger.db"]
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("sqlite:", "names no file"),
        ("sqlite:/", "names no file"),
        ("sqlite::memory:", "names no file"),
        ("sqlite:folder/", "names no file"),
        ("sqlite://host/ledger.db", "names a host"),
    ],
)
async def test_url_without_a_file_is_reported(url: str, what: str) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        await open_ledger(url)
    assert "fix:" in str(caught.value)


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs"])
async def test_network_file_system_is_refused(
    kind: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mounts(self: Path, *args: Any, **options: Any) -> str:
        assert str(self) == "/proc/self/mounts"
        return f"/dev/root / ext4 rw 0 0\nserver:/share {path.parent} {kind} rw 0 0\n"

    monkeypatch.setattr(Path, "read_text", mounts)
    with pytest.raises(LedgerDown, match=f"network file system .{kind}."):
        LedgerFile(str(path))
    monkeypatch.undo()
    assert not path.exists()


@pytest.mark.parametrize("part", ["caller", "method", "key"])
async def test_records_of_one_moment_have_their_own_tasks(part: str, path: Path) -> None:
    ledger = await opened(path, Clock())
    first = await granted(ledger)
    second = await granted(ledger, structs.replace(ID, **{part: "another"}))
    assert first.started_at == second.started_at
    assert await ledger.begin_task(first.token, "task", b"{}", 1000)
    assert not await ledger.begin_task(second.token, "task", b"{}", 1000)
    assert await ledger.task_of(second.id) is None
    assert (
        (task := await ledger.task("task")) is not None
        and task.now is not None
        and task.now.id == first.id
    )
    await ledger.aclose()
