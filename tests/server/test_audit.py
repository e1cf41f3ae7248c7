"""The audit trail (T6): a line per command, and no edit that goes unnoticed."""

import asyncio
import fcntl
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.calls import batch, call, error, make_app, result
from tests.mcp.asgi import KEY, R5, speak
from wirecall import App, Context, DomainError, UsageError, jsonrpc
from wirecall.audit import Audit, AuditEntry, verify
from wirecall.files import DescriptorLock, Lock, TransactionLock


@pytest.fixture
def trail(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "audit.jsonl"


def audited(trail: Path) -> App:
    app = make_app(audit=f"file:{trail}")
    app.query(name="look", notification_allowed=True)(lambda: 1)
    app.command(name="put")(lambda value: value)

    @app.command
    def refuse() -> None:
        raise DomainError(4020, "no")

    @app.command
    def crash() -> None:
        raise ValueError

    return app


def lines(trail: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in trail.read_text().splitlines()]


def entry(n: int) -> AuditEntry:
    return AuditEntry(
        time=1.0 * n,
        caller="",
        method="put",
        key=f"k{n}",
        digest="00",
        id=n,
        outcome="ok",
        code=None,
        replayed=False,
        duration_ms=0.5,
    )


both_locks = pytest.mark.parametrize("portable", [False, True])


@contextmanager
def kept(trail: Path, portable: bool) -> Iterator[None]:
    """Another program has the lock on the trail."""
    lock: Lock = TransactionLock(trail) if portable else DescriptorLock()
    with trail.open() as other:
        # A line may be written at this moment.
        assert any(lock.take(other.fileno()) for _ in range(1_000_000))
        yield
        lock.give_back(other.fileno())
        lock.close()


async def test_trail_has_one_line_per_command_and_none_for_queries(trail: Path) -> None:
    async with audited(trail) as app:
        await app.handle(call("look"))
        await app.handle(jsonrpc.make_notification("look"))
        await app.handle(call("put", {"value": "secret"}, id=1, key="a"), caller="ada")
        await app.handle(call("put", {"value": "secret"}, id=2, key="a"), caller="ada")
        await app.handle(call("put", {"value": "other"}, id=3, key="a"), caller="ada")
        await app.handle(
            batch(
                call("refuse", key="b", id=4), call("crash", key="c", id=5), call("put", [7], id=6)
            )
        )
        await app.handle(call("refuse", key="b", id=7))
        await app.handle(jsonrpc.make_notification("put", [1]))
    found = lines(trail)
    assert [
        (
            line["id"],
            line["method"],
            line["key"][:5],
            line["outcome"],
            line["code"],
            line["replayed"],
        )
        for line in found
    ] == [
        (1, "put", "a", "ok", None, False),
        (2, "put", "a", "ok", None, True),
        (3, "put", "a", "error", 42210, False),
        (4, "refuse", "b", "error", 4020, False),
        (5, "crash", "c", "error", -32603, False),
        (6, "put", "auto-", "ok", None, False),
        (7, "refuse", "b", "error", 4020, True),
    ]
    assert [line["caller"] for line in found] == ["ada"] * 3 + [""] * 4
    assert found[0]["digest"] == found[1]["digest"] != found[2]["digest"]
    assert len(found[0]["digest"]) == 64
    assert all(line["duration_ms"] >= 0 and line["time"] > 1.7e9 for line in found)
    assert "secret" not in trail.read_text()
    assert verify(trail).ok
    assert oct(os.stat(trail).st_mode & 0o777) == "0o600"


async def test_duplicates_that_wait_for_the_first_have_their_own_lines(trail: Path) -> None:
    app = make_app(audit=f"file:{trail}")
    begun = asyncio.Event()
    go = asyncio.Event()

    @app.command
    async def put() -> int:
        begun.set()
        await go.wait()
        return 1

    async with app, asyncio.TaskGroup() as group:
        first = group.create_task(app.handle(call("put", key="k", id=1)))
        await begun.wait()
        second = group.create_task(app.handle(call("put", key="k", id=2)))
        await asyncio.sleep(0)
        go.set()
    assert result(first.result()) == result(second.result()) == 1
    assert sorted((line["id"], line["replayed"]) for line in lines(trail)) == [
        (1, False),
        (2, True),
    ]


async def test_command_whose_caller_left_is_noted_when_it_ends(trail: Path) -> None:
    app = make_app(audit=f"file:{trail}")
    begun = asyncio.Event()
    go = asyncio.Event()

    @app.command
    async def put() -> int:
        begun.set()
        await go.wait()
        return 1

    async with app:
        caller = asyncio.create_task(app.handle(call("put", key="k")))
        await begun.wait()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        go.set()
    assert [(line["outcome"], line["replayed"]) for line in lines(trail)] == [("ok", False)]


async def test_command_stopped_before_its_commit_point_is_not_an_error(trail: Path) -> None:
    app = make_app(audit=f"file:{trail}")
    begun = asyncio.Event()

    async def wait(ctx: Context) -> None:
        begun.set()
        await asyncio.Event().wait()
        await ctx.commit_point()

    app.command(name="put")(wait)
    app.command(name="hurry", timeout=0.01)(wait)
    async with app:
        assert error(await app.handle(call("hurry", key="k")))["code"] == 50410
        begun.clear()
        caller = asyncio.create_task(app.handle(call("put", key="k")))
        await begun.wait()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
    assert [(line["outcome"], line["code"]) for line in lines(trail)] == [("cancelled", None)] * 2


async def test_command_that_asks_its_caller_is_not_an_error(trail: Path) -> None:
    app = make_app(audit=f"file:{trail}")

    @app.command
    async def put(ctx: Context) -> str:
        return str((await ctx.elicit("who?", {"type": "object", "properties": {}})).action)

    async with app, speak("http", app, R5, capabilities={"elicitation": {}}) as client:
        asked = await client.tool("put", meta={KEY: "k"})
        assert asked["resultType"] == "input_required"
    assert lines(trail)[0]["method"] == "tools/call:put"
    assert [(line["outcome"], line["code"]) for line in lines(trail)] == [("input required", None)]


async def test_chain_continues_after_a_restart(trail: Path) -> None:
    for n in range(3):
        async with audited(trail) as app:
            await app.handle(call("put", [n], id=n))
    report = verify(trail)
    assert (report.ok, report.lines) == (True, 3)
    assert report.last == lines(trail)[-1]["hash"]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda found: [found[0], found[2]], [(2, "removed")]),
        (
            lambda found: [found[1], found[0], found[2]],
            [(1, "removed"), (2, "removed"), (3, "removed")],
        ),
        (lambda found: [found[0], found[1].replace(b'"k1"', b'"k9"'), found[2]], [(2, "edited")]),
        # Behind the hash, where it is not hashed: readers of JSON take the last of two members.
        (
            lambda found: [found[0], found[1][:-2] + b',"outcome":"error"}\n', found[2]],
            [(2, "edited")],
        ),
        (lambda found: [found[0], found[1][:-1] + b" \n", found[2]], [(2, "edited")]),
        (lambda found: [found[0], b"garbage\n", found[1], found[2]], [(2, "not a line")]),
        (lambda found: [found[0], found[1][:40]], [(2, "torn")]),
        (lambda found: found[1:], [(1, "removed")]),
        (
            lambda found: [found[0], found[1], found[1], found[2]],
            [(3, "removed"), (4, "does not follow")],
        ),
    ],
)
def test_damage_is_found_at_its_line(
    trail: Path, damage: Any, problem: list[tuple[int, str]]
) -> None:
    audit = Audit(str(trail))
    for n in range(3):
        audit.append(entry(n))
    audit.close()
    assert verify(trail).ok
    trail.write_bytes(b"".join(damage(trail.read_bytes().splitlines(keepends=True))))
    found = verify(trail).problems
    assert [number for number, _ in found][: len(problem)] == [number for number, _ in problem][
        : len(found)
    ]
    assert all(word in text for (_, word), (_, text) in zip(problem, found, strict=False))
    assert found


def test_trail_continues_after_a_torn_line_and_reports_it(trail: Path) -> None:
    audit = Audit(str(trail))
    audit.append(entry(0))
    whole = trail.read_bytes()
    trail.write_bytes(whole + whole[:30])
    audit.append(entry(1))
    audit.close()
    report = verify(trail)
    assert [number for number, _ in report.problems] == [2]
    assert [
        json.loads(line)["id"] for line in trail.read_bytes().splitlines() if line.endswith(b"}")
    ] == [0, 1]


@pytest.mark.parametrize("written", [0, 20])
def test_chain_continues_after_a_full_disk(
    trail: Path, written: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The lines that could not be written are missing, and the log says so; the other lines form a
    chain.
    """
    write = os.write

    def full(file: int, data: bytes) -> int:
        if written:
            return write(file, data[:written])
        raise OSError(28, "No space left on device")

    audit = Audit(str(trail))
    audit.append(entry(0))
    monkeypatch.setattr(os, "write", full)
    audit.append(entry(1))
    monkeypatch.undo()
    audit.append(entry(2))
    audit.append(entry(3))
    audit.close()
    assert "has no line for put k1" in caplog.text
    assert [text for _, text in verify(trail).problems] == [
        "not a line of an audit trail, or torn"
    ] * bool(written)
    assert [
        json.loads(line)["id"] for line in trail.read_bytes().splitlines() if line.endswith(b"}")
    ] == [0, 2, 3]


@pytest.mark.parametrize("is_moved", [True, False])
def test_trail_that_is_moved_away_is_followed_by_a_new_one(
    trail: Path, is_moved: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the lines would go to a deleted file."""
    audit = Audit(str(trail))
    old = trail.with_suffix(".1")
    audit.append(entry(0))
    trail.rename(old) if is_moved else trail.unlink()
    audit.append(entry(1))
    audit.append(entry(2))
    audit.close()
    assert [line["id"] for line in lines(trail)] == [1, 2]
    assert verify(trail).ok
    assert not is_moved or verify(old).lines == 1
    assert "was moved or removed" in caplog.text


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_trail_that_was_cut_shows_the_gap(
    trail: Path, kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    audit = Audit(str(trail))
    for n in range(3):
        audit.append(entry(n))
    os.truncate(trail, len(b"".join(trail.read_bytes().splitlines(keepends=True)[:kept])))
    audit.append(entry(3))
    audit.append(entry(4))
    audit.close()
    report = verify(trail)
    assert [number for number, text in report.problems if "removed" in text] == [kept + 1]
    assert len(report.problems) == 1
    assert "was cut" in caplog.text


def test_end_of_a_trail_is_found_behind_a_line_of_any_length(trail: Path) -> None:
    for n in range(3):
        audit = Audit(str(trail))
        audit.append(structs.replace(entry(n), caller="x" * 1_000_000 * n))
        audit.close()
    assert verify(trail).ok


@both_locks
def test_lock_that_another_program_keeps_costs_a_line_and_not_the_server(
    trail: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, portable: bool
) -> None:
    monkeypatch.setattr("wirecall.audit.PATIENCE", 0.05)
    audit = Audit(str(trail), portable=portable)
    audit.append(entry(0))
    with kept(trail, portable):
        audit.append(entry(1))
    audit.append(entry(2))
    audit.close()
    assert "has no line for put k1: another process has had its lock" in caplog.text
    assert [line["id"] for line in lines(trail)] == [0, 2]
    assert verify(trail).ok


async def test_event_loop_does_not_wait_for_a_lock_that_another_program_keeps(
    trail: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The commands are answered while the lock is held, and their lines follow in order when it is
    free.
    """
    monkeypatch.setattr("wirecall.audit.PATIENCE", 30.0)
    async with audited(trail) as app:
        await app.handle(call("put", [0], id=0))
        with trail.open() as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            async with asyncio.timeout(10):  # a loop that waits would lose a line after 30 s
                for n in range(1, 6):
                    assert result(await app.handle(call("put", [n], id=n))) == n
            assert [line["id"] for line in lines(trail)] == [0]
        await app.handle(call("put", [6], id=6))
    assert [line["id"] for line in lines(trail)] == list(range(7))
    assert verify(trail).ok
    assert not caplog.records


async def test_lines_still_waiting_for_a_lock_after_the_grace_are_lost_and_logged(
    trail: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("wirecall.audit.PATIENCE", 30.0)
    app = audited(trail)
    await app.handle(call("put", [0], id=0))
    with trail.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        await app.handle(call("put", {"value": 1}, id=1, key="a"))
        await app.handle(call("put", {"value": 2}, id=2, key="b"))
        await asyncio.wait_for(app.aclose(0.05), 10)
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition("has no line for ")[2] for text in told] == [
        f"put {key}: another process has had its lock for too long" for key in "ab"
    ]
    async with app:
        await app.handle(call("put", [3], id=3))
    assert [line["id"] for line in lines(trail)] == [0, 3]
    assert verify(trail).ok


@both_locks
async def test_lines_that_wait_are_not_overtaken(
    trail: Path, monkeypatch: pytest.MonkeyPatch, portable: bool
) -> None:
    """The lock comes and goes while lines are added, with a loop and without."""
    monkeypatch.setattr("wirecall.audit.PATIENCE", 30.0)
    audit = Audit(str(trail), portable=portable)
    audit.append(entry(0))
    for n in range(1, 200, 4):
        with kept(trail, portable):
            audit.append(entry(n))
            # Earlier lines wait: it does not wait itself.
            await asyncio.to_thread(audit.append, entry(n + 1))
        audit.append(entry(n + 2))
        await asyncio.to_thread(audit.append, entry(n + 3))
    await audit.aclose(30)
    assert [line["id"] for line in lines(trail)] == list(range(201))
    assert verify(trail).ok


@both_locks
def test_many_threads_write_one_chain(trail: Path, portable: bool) -> None:
    """A lock on the file keeps processes apart, not threads."""
    audit = Audit(str(trail), portable=portable)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(audit.append, map(entry, range(400))))
    finally:
        sys.setswitchinterval(interval)
    audit.close()
    report = verify(trail)
    assert (report.problems, report.lines) == ([], 400)


def append_many(path: str, first: int, portable: bool) -> None:
    audit = Audit(path, portable=portable)
    for n in range(first, first + 50):
        audit.append(entry(n))
    audit.close()


@both_locks
def test_many_processes_write_one_chain(trail: Path, portable: bool) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=append_many, args=(str(trail), n * 50, portable)) for n in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    report = verify(trail)
    assert (report.ok, report.lines) == (True, 200)
    assert sorted(line["id"] for line in lines(trail)) == list(range(200))


# Python 3.12 and later warn of a fork while other threads run. The copies here take no lock of theirs.
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_forked_process_writes_to_the_same_chain(trail: Path) -> None:
    """After a fork both have the same open file, and with it the same lock."""
    audit = Audit(str(trail))
    audit.append(entry(0))
    context = multiprocessing.get_context("fork")

    def append_more() -> None:
        for n in range(1, 101):
            audit.append(entry(n))

    copies = [context.Process(target=append_more) for _ in range(3)]
    for copy in copies:
        copy.start()
    append_more()
    for copy in copies:
        copy.join(60)
    audit.close()
    report = verify(trail)
    assert (report.problems, report.lines) == ([], 401)


async def test_trail_that_cannot_be_written_costs_a_log_line_not_the_command(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    async with audited(tmp_path / "file" / "audit.jsonl") as app:
        assert result(await app.handle(call("put", {"value": 1}, key="k"))) == 1
    assert "has no line for put k" in caplog.text


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_link_in_a_folder_that_others_can_write_is_not_followed(tmp_path: Path, mode: int) -> None:
    """Applies when the app starts, and when a link replaces the trail while it runs."""
    theirs = tmp_path / "theirs"
    theirs.touch()
    (tmp_path / "open").mkdir()
    trail = tmp_path / "open" / "audit.jsonl"
    moved = Audit(str(trail))
    moved.append(entry(1))
    (tmp_path / "open").chmod(mode)
    trail.rename(tmp_path / "moved")
    trail.symlink_to(theirs)
    with pytest.raises(UsageError, match="symbolic link that other users can replace"):
        audited(trail).handle_sync(call("put", {"value": 1}, key="one"))
    moved.append(entry(2))
    moved.close()
    assert theirs.read_bytes() == b""


@pytest.mark.parametrize("url", ["audit.jsonl", "file:", "syslog:x"])
def test_invalid_audit_url_is_reported_at_once(url: str) -> None:
    with pytest.raises(UsageError, match="is not an audit trail"):
        make_app(audit=url)
