"""Servers that tests replace and kill one after another, and clients that call them."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.balancer import PATIENCE, Balancer
from tests.calls import call, read
from tests.ports import free_port
from tests.size import sized

APP = """
import asyncio
import os
from wirecall import App

app = App("effects")

@app.command(key="auto")
async def take(order: str) -> str:
    fd = os.open("effects", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{order}\\n".encode())  # one line, one write: whole, even if others write
    os.close(fd)
    await asyncio.sleep(0.005)
    return order
"""
# Clients that call at the same time, and how often each server is replaced.
CLIENTS = 8
ROUNDS = sized(small=1, full=4)
# Of a server that is killed, a command in flight has an unknown outcome; its lease ends soon.
LEASE_OF_KILLED = '@app.command(key="auto")', '@app.command(key="auto", lease=1)'
PRODUCTION = {"WIRECALL_MODE": "production", "WIRECALL_SECRET": "0123456789abcdef" * 4}


class Server:
    """`wirecall serve` on one port, and its successors there."""

    def __init__(self, folder: Path, port: int, *words: str, ledger: str) -> None:
        self.port = port
        # What runs `wirecall`.
        self.program = ["-m", "wirecall"]
        self._folder = folder
        self._ledger = ledger
        self._words = words
        self._process: Process | None = None

    async def start(self) -> None:
        words = [*self.program, "serve", "effects.py", "--http", f"127.0.0.1:{self.port}"]
        words += ["--ledger", self._ledger, "--grace", "20s", *self._words]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, *words, cwd=self._folder, env={**os.environ, **PRODUCTION}
        )

    def send(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def ended(self) -> int:
        assert self._process is not None
        async with asyncio.timeout(PATIENCE):
            return await self._process.wait()

    async def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def servers(
    folder: Path, count: int, *words: str, app: str = APP, ledger: str = "sqlite:ledger.db"
) -> AsyncIterator[list[Server]]:
    (folder / "effects.py").write_text(app)
    started = [Server(folder, free_port(), *words, ledger=ledger) for _ in range(count)]
    try:
        for each in started:
            await each.start()
        yield started
    finally:
        for each in started:
            await each.close()


def effects(folder: Path) -> Counter[str]:
    return Counter((folder / "effects").read_text().split())


async def replace(server: Server, balancer: Balancer) -> None:
    server.send(signal.SIGTERM)
    await balancer.until(server.port, is_ready=False)
    assert await server.ended() == 0
    await server.start()
    await balancer.until(server.port, is_ready=True)


async def kill(server: Server, balancer: Balancer) -> None:
    """Kill a server, and start another in its place."""
    server.send(signal.SIGKILL)
    await server.ended()
    await balancer.until(server.port, is_ready=False)
    await server.start()
    await balancer.until(server.port, is_ready=True)


async def persistent(number: int, balancer: Balancer, stop: asyncio.Event) -> dict[str, str]:
    """Repeat each call with its key until an answer says whether it ran; return what it said."""
    said: dict[str, str] = {}
    while not stop.is_set():
        order = f"{number}-{len(said)}"
        said[order] = await insist(balancer, order)
    return said


async def insist(balancer: Balancer, order: str) -> str:
    while True:
        try:
            answer = await balancer.post(call("take", {"order": order}), f"key-{order}")
        except (OSError, asyncio.IncompleteReadError):
            continue  # its server was killed
        answered = read(answer.body)
        if "result" in answered:
            assert answered["result"] == order
            return "yes"
        ran: str = answered["error"]["data"]["ran"]
        if ran == "unknown" and answered["error"]["code"] == 50910:
            return ran


def are_true(said: dict[str, str], found: Counter[str], kills: int) -> None:
    """Check what the answers said about each call against its effects."""
    assert found.keys() <= said.keys()
    assert max(found.values()) == 1
    assert [order for order, ran in said.items() if ran == "yes" and found[order] != 1] == []
    unknown = [order for order, ran in said.items() if ran == "unknown"]
    assert len(unknown) <= CLIENTS * kills, "each kill meets one call of each client"
