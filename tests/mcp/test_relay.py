"""The workers of one server pass on to each other what their clients must receive."""

import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.calls import make_app
from tests.faults import eventually
from tests.mcp.asgi import (
    PATIENCE,
    R4,
    HttpClient,
    request,
)
from wirecall import UsageError
from wirecall.mcp.server import sessions
from wirecall.mcp.server import workers as others
from wirecall.mcp.server.changes import Hub
from wirecall.mcp.server.sessions import Sealer
from wirecall.mcp.server.workers import EndedSession, Relay


def worker(folder: Path | None, secret: str, heard: list[Any]) -> Relay:
    def take(*told: Any) -> None:
        heard.append(told)

    return Relay(Hub(), Sealer(secret), shared=True, on_end=take, on_message=take, folder=folder)


async def test_relay_refuses_a_folder_that_is_not_ours(tmp_path: Path) -> None:
    open_to_all, elsewhere, link, file = (
        tmp_path / name for name in ("open", "elsewhere", "link", "file")
    )
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    elsewhere.mkdir(0o700)
    link.symlink_to(elsewhere)
    file.touch()
    for folder in (open_to_all, link, file):
        with pytest.raises((UsageError, FileExistsError)):
            await worker(folder, "s", []).open()
    assert list(elsewhere.iterdir()) == []


@asynccontextmanager
async def workers(folder: Path, *secrets: str) -> AsyncIterator[list[tuple[Relay, list[Any]]]]:
    heard: list[list[Any]] = [[] for _ in secrets]
    made = [worker(folder, secret, told) for secret, told in zip(secrets, heard, strict=True)]
    for each in made:
        await each.open()
    try:
        yield list(zip(made, heard, strict=True))
    finally:
        for each in made:
            await each.aclose()


async def test_relay_delivers_messages_whatever_is_in_its_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A socket that a killed worker left behind, one that never answers, garbage, and what another
    secret has sealed.
    """
    folder = tmp_path / "relay"
    async with workers(folder, "one", "one", "two") as [(one, _), (_, heard), (stranger, strange)]:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(folder / f"1-dead{others.SOCKET}"))
        with socket.socket(socket.AF_UNIX) as silent:
            silent.bind(str(folder / f"2-silent{others.SOCKET}"))
            silent.listen(1)
            victim = next(
                path for path in folder.glob(f"{os.getpid()}-*{others.SOCKET}") if path != one._path
            )
            for garbage in (b"", b"\xff\xfe", b"A.B", b"{}", b"x" * 100_000):
                _, writer = await asyncio.open_unix_connection(victim)
                writer.write(garbage)
                writer.close()
            stranger.pass_on("caller", "strange", b"{}")
            one.pass_on("caller", "token", b"{}")

            async def told() -> bool:
                return bool(heard) and not (folder / f"1-dead{others.SOCKET}").exists()

            await eventually(told)
        assert (heard, strange) == ([("caller", "token", b"{}")], [])
    assert all(record.levelname == "WARNING" for record in caplog.records)


async def test_relay_bounds_messages_that_wait_for_other_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(others, "MAX_WAITING", 100_000)
    monkeypatch.setattr(others, "PATIENCE", 0.2)
    async with workers(tmp_path / "relay", "one") as [(one, _)]:
        with socket.socket(socket.AF_UNIX) as stuck:
            stuck.bind(str(tmp_path / "relay" / f"1-stuck{others.SOCKET}"))
            stuck.listen(1)
            for _ in range(100):
                one.pass_on("caller", "token", b"x" * 10_000)
            assert len(one._tasks) < 10
            await asyncio.wait(one._tasks, timeout=PATIENCE)
        assert one._waiting == 0


async def test_marks_are_bounded_and_ended_sessions_stay_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that opens and ends sessions all day does not fill the disk or revive any session."""
    monkeypatch.setattr(others, "MAX_MARKS", 20)
    monkeypatch.setattr(others, "MARKS_ADDED", 10)
    now = int(time.time() * 1000)
    ended = [
        EndedSession("bob", "of-bob", now - 1000),
        *(EndedSession("ann", f"{number:03}", now + number) for number in range(100)),
    ]
    async with workers(tmp_path / "relay", "one", "one") as [(one, _), (other, _)]:
        for each in ended:
            one.announce_end(each)
        assert len(list((tmp_path / "relay" / others.MARKS).iterdir())) <= 30
        assert all(other.know_ended(each) for each in ended)
        assert other.know_ended(EndedSession("ann", "open", now + 50))  # the cost of ending so many
        assert not other.know_ended(EndedSession("ann", "newer", now + 1000))
        assert not other.know_ended(EndedSession("bob", "open", now - 2000))


async def test_marks_of_many_callers_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(others, "MAX_MARKS", 20)
    monkeypatch.setattr(others, "MARKS_ADDED", 10)
    now = int(time.time() * 1000)
    ended = [EndedSession(f"caller{number}", "id", now + number) for number in range(100)]
    async with workers(tmp_path / "relay", "one") as [(one, _)]:
        for each in ended:
            one.announce_end(each)
        assert len(list((tmp_path / "relay" / others.MARKS).iterdir())) <= 30
        assert all(one.know_ended(each) for each in ended)
        assert not one.know_ended(EndedSession("caller1", "id", now + 1000))


@pytest.mark.parametrize("shared", [False, True])
async def test_session_stays_ended_however_many_end_after_it(
    shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_ENDED", 10)
    monkeypatch.setattr(others, "MAX_MARKS", 10)
    monkeypatch.setattr(others, "MARKS_ADDED", 5)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    more: Any = {"secret": "s3cret"} if shared else {}
    app = make_app(authenticate=lambda headers: headers.get("authorization"), **more)
    asgi = app.asgi()
    await asgi.open()

    async def session(caller: str) -> HttpClient:
        client = HttpClient(asgi, R4, headers={"authorization": caller})
        await client.open()
        return client

    async def status(client: HttpClient) -> int:
        return (await client.post(request("ping")).started()).status

    bob = await session("bob")
    used = await session("ann")
    ended = [await session("ann") for _ in range(40)]
    for client in ended:
        assert (await client.exchange("DELETE").started()).status == 204
        await client.close()
    assert {await status(client) for client in ended} == {404}
    # One of another caller, and one in use here.
    assert (await status(bob), await status(used)) == (200, 200)
    assert await status(await session("ann")) == 200
    for client in (bob, used):
        await client.close()
    await asgi.aclose()


async def test_folders_of_workers_that_were_killed_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those without a living worker and without a mark that still matters; similar folders stay
    untouched.
    """
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = """
import asyncio, os, signal, sys, time
from wirecall.mcp.server.changes import Hub
from wirecall.mcp.server.sessions import Sealer
from wirecall.mcp.server.workers import EndedSession, Relay

async def main():
    one = Relay(Hub(), Sealer(sys.argv[1]), shared=True, on_end=print, on_message=print)
    await one.open()
    if sys.argv[2] != "none":
        one.announce_end(EndedSession("ann", "id", int((time.time() - float(sys.argv[2])) * 1000)))
    print(one._folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    left = {}
    for name, mark in (("young", "60"), ("old", str(3 * 86_400)), ("killed", "none")):
        killed = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code, name, mark),
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdout=asyncio.subprocess.PIPE,
        )
        told, _ = await killed.communicate()
        left[name] = Path(told.decode().strip())
    assert left["killed"].exists()  # the last one that was killed
    strange = tmp_path / "wirecall-1-strange"
    strange.mkdir()
    alive = worker(None, "alive", [])
    fresh = worker(None, "fresh", [])
    await alive.open()
    await fresh.open()
    assert [name for name, path in left.items() if path.exists()] == ["young"]
    assert strange.exists() and alive._folder.exists()
    await alive.aclose()
    await fresh.aclose()
    assert sorted(tmp_path.iterdir()) == sorted([strange, left["young"]])


async def test_session_ends_although_no_mark_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    app = make_app(secret="s3cret")
    asgi = app.asgi()
    await asgi.open()
    client = HttpClient(asgi, R4)
    await client.open()
    (folder,) = tmp_path.iterdir()
    (folder / others.MARKS).rmdir()  # another process tidies up
    assert (await client.exchange("DELETE").started()).status == 204
    assert (await client.post(request("ping")).started()).status == 404
    await client.close()
    await asgi.aclose()
