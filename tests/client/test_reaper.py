"""A process that is killed leaves no child behind, and unused connections do not grow old."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.client.peers import PATIENCE, until
from wirecall.transports.child import Child
from wirecall.transports.http_client import HttpClient
from wirecall.transports.reaper import Reaper

STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1] + ".new").write_text(f"{os.getpid()} {other.pid}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""

PARENT = f"""
import asyncio, sys
from wirecall.transports.child import Child
from wirecall.transports.reaper import Reaper

async def main():
    child = Child([sys.executable, "-c", {STUBBORN!r}, sys.argv[1]], reaper=Reaper())
    await child.open(lambda line: None, lambda error: None)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def is_gone(pid: int) -> bool:
    """A process that has ended may wait for the one that adopts it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_reaper_ends_the_children_of_a_killed_process(tmp_path: Path) -> None:
    """Trap 6: the child ignores the end of its stdin and SIGTERM, and has its own child."""
    pids = tmp_path / "pids"
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, str(pids))
    try:
        await until(pids.exists)
        own, other = map(int, pids.read_text().split())
        assert not is_gone(own) and not is_gone(other)
    finally:
        parent.send_signal(signal.SIGKILL)
        await parent.wait()
    await until(lambda: is_gone(own) and is_gone(other))


async def test_reaper_forgets_a_child_that_has_ended() -> None:
    """Its pid may belong to another process by then."""
    reaper = Reaper()
    first = Child([sys.executable, "-c", "pass"], reaper=reaper)
    await first.open(lambda _line: None, lambda _error: None)
    await first.aclose()
    async with asyncio.timeout(PATIENCE):
        await reaper.aclose()
        await reaper.aclose()


async def test_reaper_is_started_again_if_it_was_killed() -> None:
    reaper = Reaper()
    await reaper.open()
    process = reaper._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    reaper.watch(12345)  # nothing is raised: the next child starts another
    await reaper.open()
    assert reaper._process is not process
    await reaper.aclose()


async def test_http_client_closes_a_connection_that_is_not_used() -> None:
    """Trap 18: a server may have closed an old connection when the next call is written on it."""
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await reader.read()
        closed.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = HttpClient(f"http://127.0.0.1:{port}/", idle=0.01)
    await client.open()
    try:
        async with client.request("GET") as answer:
            await answer.read()
        async with asyncio.timeout(PATIENCE):
            await closed.wait()
    finally:
        await client.aclose()
        server.close()
        await server.wait_closed()
