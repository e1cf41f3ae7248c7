"""The terms of an audit trail (T6): required, on the disk, and in several files."""

import asyncio
import json
import os
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.calls import batch, call, error, make_app, read, result
from tests.cli import invoke
from wirecall import App, Retry, RpcError, UsageError, connect
from wirecall.audit import Audit, AuditEntry, kept_files, verify


@pytest.fixture
def trail(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    def write(_: int, __: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    return monkeypatch


def lines(trail: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in trail.read_text().splitlines()]


def entry(number: int) -> AuditEntry:
    return AuditEntry(
        time=1.0 * number,
        caller="",
        method="put",
        key=f"k{number}",
        digest="00",
        id=number,
        outcome="ok",
        code=None,
        replayed=False,
        duration_ms=1.0,
    )


def app_with(audit: str, effects: list[int]) -> App:
    app = make_app(audit=audit)
    app.command(name="put")(lambda value: effects.append(value))
    app.query(name="look")(lambda: 1)
    return app


# --- required -------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["k", None])
async def test_required_trail_refuses_a_command_whose_line_cannot_be_written(
    trail: Path, full_disk: pytest.MonkeyPatch, key: str | None
) -> None:
    effects: list[int] = []
    async with app_with(f"file:{trail}?required", effects) as app:
        refused = error(await app.handle(call("put", {"value": 1}, key=key)))
        assert (refused["code"], refused["data"]["type"]) == (50311, "audit_unavailable")
        assert (refused["data"]["ran"], effects) == ("no", [])
        assert result(await app.handle(call("look"))) == 1
        full_disk.undo()
        result(await app.handle(call("put", {"value": 1}, key=key)))
    assert effects == [1]
    assert [line["outcome"] for line in lines(trail)] == ["begun", "ok"]
    assert verify(trail).ok


async def test_required_trail_refuses_entries_tools_and_transactions(
    trail: Path, full_disk: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    effects: list[str] = []
    app = make_app(audit=f"file:{trail}?required", ledger=f"sqlite:{tmp_path}/ledger.db")
    app.command(name="entry")(lambda: effects.append("entry"))
    app.command(name="bound", on_crash="transactional")(lambda: effects.append("bound"))
    app.tool(name="tool")(lambda: effects.append("tool"))

    async def ask() -> list[int]:
        entries = batch(call("entry", key="a"), call("entry", id=2))
        codes = [each.get("error", {}).get("code", 0) for each in read(await app.handle(entries))]
        answer = read(await app.handle(call("bound", key="b")))
        codes.append(answer.get("error", {}).get("code", 0))
        async with connect(app, protocol="mcp", retry=Retry(attempts=1)) as client:
            try:
                await client.call_tool("tool", {})
                codes.append(0)
            except RpcError as refused:
                codes.append(refused.code)
        return codes

    async with app:
        assert await ask() == [50311] * 4
        assert effects == []
        full_disk.undo()
        assert await ask() == [0] * 4
    assert effects == ["entry", "entry", "bound", "tool"]


def test_required_trail_refuses_a_command_without_a_loop(
    trail: Path, full_disk: pytest.MonkeyPatch
) -> None:
    effects: list[int] = []
    app = app_with(f"file:{trail}?required", effects)
    assert error(app.handle_sync(call("put", {"value": 1}, key="k")))["code"] == 50311
    full_disk.undo()
    result(app.handle_sync(call("put", {"value": 1}, key="k")))
    assert effects == [1]


async def test_trail_that_is_not_required_lets_the_command_run(
    trail: Path, full_disk: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    effects: list[int] = []
    async with app_with(f"file:{trail}", effects) as app:
        result(await app.handle(call("put", {"value": 1}, key="k")))
    assert effects == [1]
    assert "has no line for put k" in caplog.text


async def test_required_stays_required_if_an_operator_names_another_file(
    trail: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    effects: list[int] = []
    app = app_with("required", effects)
    app.configure(audit=f"file:{trail}")
    async with app:
        result(await app.handle(call("put", {"value": 1}, key="k")))
    assert [line["outcome"] for line in lines(trail)] == ["begun", "ok"]
    assert not (tmp_path / ".wirecall").exists()


@pytest.mark.parametrize("words", ["need", "rotate=", "rotate=0", "rotate=10 MB", "fsync=1"])
def test_options_of_a_trail_that_do_not_exist_are_refused(words: str) -> None:
    with pytest.raises(UsageError, match="not an option of an audit trail"):
        make_app(audit=f"file:audit.jsonl?{words}")


def test_options_of_a_trail_are_settings_of_wirecall_toml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wirecall.config import load_config

    monkeypatch.chdir(tmp_path)
    Path("wirecall.toml").write_text(
        '[audit]\nfile = "a.jsonl"\nrequired = true\nfsync = true\nrotate = "1MB"\n'
    )
    assert load_config().audit == "file:a.jsonl?required&fsync&rotate=1MB"


# --- on the disk ----------------------------------------------------------------------------------


async def test_fsync_puts_every_line_on_the_disk_and_spares_the_loop(
    trail: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = note_syncs(monkeypatch)
    effects: list[int] = []
    async with app_with(f"file:{trail}?required&fsync", effects) as app:
        await asyncio.gather(*(app.handle(call("put", {"value": n}, key=str(n))) for n in range(5)))
    assert [is_folder for _, is_folder in synced].count(False) == len(lines(trail)) == 10
    assert threading.current_thread().name not in {thread for thread, _ in synced}
    assert verify(trail).ok


def note_syncs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Note the thread of each fsync, and whether it is of a folder."""
    synced: list[tuple[str, bool]] = []
    fsync = os.fsync

    def note(file: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(file).st_mode)
        synced.append((threading.current_thread().name, is_folder))
        fsync(file)

    monkeypatch.setattr(os, "fsync", note)
    return synced


@pytest.mark.skipif(sys.platform == "win32", reason="it opens no folders")
def test_fsync_puts_the_names_of_new_files_on_the_disk(
    trail: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a file whose lines are on the disk may have no name after a power failure."""
    synced = note_syncs(monkeypatch)
    audit = Audit(str(trail), fsync=True, rotate=1000)
    for number in range(20):
        audit.append(entry(number))
    audit.close()
    files = [*kept_files(trail), trail]
    assert len(files) > 2
    assert [is_folder for _, is_folder in synced].count(True) == len(files)
    Audit(str(trail), fsync=True).append(entry(20))
    assert [is_folder for _, is_folder in synced].count(True) == len(files)


# --- several files --------------------------------------------------------------------------------


def test_rotation_chains_files_of_many_writers(trail: Path) -> None:
    """Each writer stands for a process: it finds the new file, and continues its chain."""
    audits = [Audit(str(trail), rotate=1000) for _ in range(3)]
    for number in range(60):
        audits[number % 3].append(entry(number))
    for audit in audits:
        audit.close()
    files = [*kept_files(trail), trail]
    assert len(files) > 5
    assert [line["id"] for file in files for line in lines(file)] == [*range(60)]
    reports = [verify(file) for file in files]
    assert all(report.ok for report in reports)
    assert [report.continues for report in reports[1:]] == [report.last for report in reports[:-1]]
    assert trail.stat().st_mode & 0o777 == 0o600


def test_verify_finds_a_file_that_is_missing(trail: Path) -> None:
    audit = Audit(str(trail), rotate=1000)
    for number in range(30):
        audit.append(entry(number))
    audit.close()
    intact = invoke("audit", "verify", str(trail), "--json")
    assert intact.exit_code == 0
    assert json.loads(intact.stdout)["result"]["lines"] == 30
    gone = kept_files(trail)[1]
    last = verify(gone).last
    gone.unlink()
    broken = invoke("audit", "verify", str(trail), "--json")
    assert broken.exit_code == 9
    (problem,) = json.loads(broken.stdout)["result"]["problems"]
    assert problem["file"].endswith(".3")
    assert f"a file that is missing: its last hash is {last}" in problem["what"]
    assert invoke("audit", "verify", str(trail), "--archived", last).exit_code == 0


def test_verify_finds_that_the_newest_file_is_missing(trail: Path) -> None:
    """No file refers to it. A server that starts afterwards begins a new chain."""
    audit = Audit(str(trail), rotate=1000)
    for number in range(10):
        audit.append(entry(number))
    audit.close()
    trail.unlink()
    again = Audit(str(trail), rotate=1000)
    again.append(entry(10))
    again.close()
    broken = invoke("audit", "verify", str(trail), "--json")
    assert broken.exit_code == 9
    (problem,) = json.loads(broken.stdout)["result"]["problems"]
    older = kept_files(trail)[-1]
    assert (problem["file"], problem["line"]) == (str(trail), 1)
    assert f"begins a new chain, although {older.name} is older" in problem["what"]
    last = verify(older).last
    assert problem["what"].endswith(f"--archived {last}")
    assert invoke("audit", "verify", str(trail), "--archived", last).exit_code == 0


def test_file_is_kept_once_if_a_process_was_killed_while_it_rotated(trail: Path) -> None:
    audit = Audit(str(trail), rotate=1)
    audit.append(entry(0))
    os.link(trail, f"{trail}.1")  # it got so far
    audit.append(entry(1))
    audit.append(entry(2))
    audit.close()
    files = [*kept_files(trail), trail]
    assert [line["id"] for file in files for line in lines(file)] == [0, 1, 2]
    assert invoke("audit", "verify", str(trail)).exit_code == 0


def test_trail_that_another_program_moved_is_continued(trail: Path) -> None:
    audit = Audit(str(trail))
    audit.append(entry(0))
    trail.rename(f"{trail}.1")
    audit.append(entry(1))
    audit.close()
    assert verify(trail).continues == verify(f"{trail}.1").last
    assert invoke("audit", "verify", str(trail)).exit_code == 0
    Path(f"{trail}.1").unlink()
    assert invoke("audit", "verify", str(trail)).exit_code == 9


def test_rotation_that_fails_loses_no_line(
    trail: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    audit = Audit(str(trail), rotate=100)
    audit.append(entry(0))
    rename = os.rename

    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "rename", refuse)
    audit.append(entry(1))
    monkeypatch.setattr(os, "rename", rename)
    audit.append(entry(2))
    audit.close()
    assert [line["id"] for file in (*kept_files(trail), trail) for line in lines(file)] == [
        0,
        1,
        2,
    ]
    assert "cannot be rotated: " in caplog.text
    assert invoke("audit", "verify", str(trail)).exit_code == 0


# --- what touched the outside ---------------------------------------------------------------------


async def test_lines_say_what_a_method_may_do_and_where_it_ran(trail: Path) -> None:
    app = make_app(audit=f"file:{trail}")
    app.command(name="charge")(lambda: 1)
    app.command(name="count", destructive=False, open_world=False)(lambda: 1)
    async with app:
        await app.handle(call("charge", key="a"))
        await app.handle(call("count", key="b"))
    assert [(line["destructive"], line["open_world"]) for line in lines(trail)] == [
        (True, True),
        (False, False),
    ]
    assert all(line["pid"] == os.getpid() and line["host"] for line in lines(trail))


def test_audit_list_finds_what_touched_the_outside(trail: Path) -> None:
    async def work() -> None:
        app = make_app(audit=f"file:{trail}?rotate=600")
        app.command(name="charge")(lambda: 1)
        app.command(name="count", destructive=False, open_world=False)(lambda: 1)
        async with app:
            for key in "abcd":
                await app.handle(call("charge", key=key), caller="ada")
                await app.handle(call("count", key=key))

    def found(*words: str) -> list[tuple[str, str]]:
        ended = invoke("audit", "list", str(trail), "--json", *words)
        return [(each["method"], each["key"]) for each in json.loads(ended.stdout)["result"]]

    asyncio.run(work())
    assert len(kept_files(trail)) > 1
    charges = [("charge", key) for key in "abcd"]
    assert found("--open-world", "--since", "1h") == charges
    assert found("--destructive") == found("--caller", "ada") == charges
    assert found("--method", "count") == [("count", key) for key in "abcd"]
    assert found("--until", "1h") == []
    assert len(found()) == 8
    assert "charge  a  ada" in invoke("audit", "list", str(trail)).stdout


def test_audit_list_counts_lines_that_cannot_be_read(trail: Path) -> None:
    """One of them may be about a command that touched the outside."""
    audit = Audit(str(trail))
    audit.append(entry(1))
    audit.close()
    with trail.open("a") as file:
        file.write('{"time": 1.0, "meth\n')
    listed = invoke("audit", "list", str(trail), "--json")
    facts = json.loads(listed.stdout)
    assert (len(facts["result"]), facts["unreadable"]) == (1, 1)
    shown = invoke("audit", "list", str(trail), "--open-world")
    assert "1 line of the trail cannot be read" in shown.output
    line = shown.output.partition("wirecall audit verify ")[2].strip()
    assert invoke("audit", "verify", line).exit_code == 9
