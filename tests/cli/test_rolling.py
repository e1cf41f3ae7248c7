"""Servers that are replaced one after another behind a load balancer that asks `/readyz`.

Every call has exactly one effect, and is answered: no error, whatever the speed.
"""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from tests.balancer import PATIENCE, Balancer, Connection, connect
from tests.calls import call, read
from tests.ports import free_port
from tests.servers import Store
from tests.size import sized
from wirecall import connect as connect_client
from wirecall.mcp.client.inbox import Change

APP = """
import asyncio
import os
from wirecall import App

app = App("effects")

@app.command(key="auto")
async def take(order: str) -> str:
    fd = os.open("effects", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{order}\\n".encode())  # one line, one write: whole, whoever else writes
    os.close(fd)
    await asyncio.sleep(0.005)
    return order
"""
# Clients that call at the same time, and how often each server is replaced.
CLIENTS = 8
ROUNDS = sized(small=1, full=4)
CASES = [
    ("granian", 2, "postgres"),
    ("uvicorn", 1, "sqlite"),
    ("granian", 1, "redis"),
    ("uvicorn", 2, "cluster"),
    ("granian-asgi", 2, "postgres"),
]
STORES = sized(small=["sqlite"], full=["sqlite", "redis", "cluster", "postgres"])
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


async def client(number: int, balancer: Balancer, stop: asyncio.Event) -> list[str]:
    """Call until the end, half of the time with a key; return the orders."""
    orders: list[str] = []
    while not stop.is_set():
        order = f"{number}-{len(orders)}"
        key = f"key-{order}" if len(orders) % 2 else None
        answer = await balancer.post(call("take", {"order": order}), key)
        assert (answer.status, read(answer.body).get("result")) == (200, order), answer
        orders.append(order)
    return orders


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


@pytest.mark.parametrize(
    ("kind", "workers", "store"), sized(small=CASES[:2], full=CASES), indirect=["store"]
)
async def test_servers_are_replaced_without_an_error(
    kind: str, workers: int, store: Store, tmp_path: Path
) -> None:
    words = ["--server", kind, "--workers", str(workers), "--drain", "1s"]
    async with servers(tmp_path, 2, *words, ledger=store.url) as both:
        balancer = Balancer([each.port for each in both])
        stop = asyncio.Event()
        async with balancer.watching(), asyncio.TaskGroup() as group:
            for each in both:
                await balancer.until(each.port, is_ready=True)
            clients = [
                group.create_task(client(number, balancer, stop)) for number in range(CLIENTS)
            ]
            for _ in range(ROUNDS):
                for each in both:
                    await replace(each, balancer)
            stop.set()
        orders = [order for each in clients for order in each.result()]
    assert effects(tmp_path) == dict.fromkeys(orders, 1)
    assert all(balancer.counts[each.port] for each in both)


# --- the drain of one server ----------------------------------------------------------------------

READY = b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def until_ready(server: Server) -> Connection:
    balancer = Balancer([server.port])
    async with balancer.watching():
        await balancer.until(server.port, is_ready=True)
    return await connect(server.port)


@pytest.mark.parametrize("kind", ["granian", "uvicorn", "granian-asgi"])
async def test_drain_keeps_serving_but_is_not_ready_and_closes_connections(
    kind: str, tmp_path: Path
) -> None:
    """It ends when a second SIGTERM says so, long before its time."""
    async with servers(tmp_path, 1, "--server", kind, "--drain", "1h") as (server,):
        kept = await until_ready(server)
        assert (await kept.ask(READY)).status == 200
        server.send(signal.SIGTERM)
        balancer = Balancer([server.port])
        balancer.ready[server.port].set()
        async with balancer.watching():
            await balancer.until(server.port, is_ready=False)
        answer = await kept.ask(READY)
        assert (answer.status, read(answer.body)["reason"]) == (503, "draining")
        assert answer.headers["connection"] == "close"
        assert await kept.reader.read() == b""
        kept.close()
        new = await connect(server.port)
        body = call("take", {"order": "late"})
        head = f"POST /rpc HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        taken = await new.ask(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        assert read(taken.body)["result"] == "late"
        new.close()
        server.send(signal.SIGTERM)
        assert await server.ended() == 0


async def test_drain_of_0_does_not_delay_the_end(tmp_path: Path) -> None:
    async with servers(tmp_path, 1, "--drain", "0") as (server,):
        (await until_ready(server)).close()
        server.send(signal.SIGTERM)
        assert await server.ended() == 0


async def signals_wait(process: psutil.Process, *, are_there: bool) -> None:
    """Wait until SIGTERM waits in the kernel for a process, or does not."""
    async with asyncio.timeout(PATIENCE):
        while True:
            status = Path(f"/proc/{process.pid}/status").read_text()
            waiting = int(status.partition("ShdPnd:")[2].split()[0], 16)
            if bool(waiting & 1 << (signal.SIGTERM - 1)) is are_there:
                return
            await asyncio.sleep(0)


async def suspend(process: psutil.Process) -> None:
    """Stop a process: from here on, every signal waits."""
    process.suspend()
    async with asyncio.timeout(PATIENCE):
        while True:
            if process.status() == psutil.STATUS_STOPPED:
                return
            await asyncio.sleep(0)


@pytest.mark.skipif(sys.platform != "linux", reason="it reads which signals wait in /proc")
async def test_drain_of_workers_that_are_busy_ends_at_the_second_sigterm(tmp_path: Path) -> None:
    """Two signals of the same number that wait for a process are one."""
    async with servers(tmp_path, 1, "--drain", "1h", "--workers", "2") as (server,):
        (await until_ready(server)).close()
        parent = psutil.Process(server.pid)
        workers = parent.children()
        assert len(workers) == 2
        try:
            for each in workers:
                await suspend(each)
            server.send(signal.SIGTERM)
            for each in workers:
                await signals_wait(each, are_there=True)
            server.send(signal.SIGTERM)
            await signals_wait(parent, are_there=False)
        finally:
            for each in workers:
                each.resume()
        assert await server.ended() == 0


# --- servers that are killed while others are upgraded --------------------------------------------

# Of a server that is killed, a command in flight has an unknown outcome; its lease ends soon.
LEASE_OF_KILLED = '@app.command(key="auto")', '@app.command(key="auto", lease=1)'


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
        told = read(answer.body)
        if "result" in told:
            assert told["result"] == order
            return "yes"
        ran: str = told["error"]["data"]["ran"]
        if ran == "unknown" and told["error"]["code"] == 50910:
            return ran


@pytest.mark.parametrize("store", STORES, indirect=True)
async def test_servers_are_killed_and_replaced_without_a_doubled_effect(
    store: Store, tmp_path: Path
) -> None:
    """Every answer tells the truth: `yes` is one effect, and `unknown` at most one."""
    words = ["--workers", "1", "--drain", "1s"]
    app = APP.replace(*LEASE_OF_KILLED)
    async with servers(tmp_path, 2, *words, app=app, ledger=store.url) as both:
        balancer = Balancer([each.port for each in both])
        stop = asyncio.Event()
        async with balancer.watching(), asyncio.TaskGroup() as group:
            for each in both:
                await balancer.until(each.port, is_ready=True)
            clients = [
                group.create_task(persistent(number, balancer, stop)) for number in range(CLIENTS)
            ]
            for _ in range(ROUNDS):
                first, second = both
                await kill(first, balancer)
                await replace(second, balancer)
            stop.set()
        said = {order: ran for each in clients for order, ran in each.result().items()}
    are_true(said, effects(tmp_path), kills=ROUNDS)


def are_true(said: dict[str, str], found: Counter[str], kills: int) -> None:
    """Check what the answers said about each call against its effects."""
    assert found.keys() <= said.keys()
    assert max(found.values()) == 1
    assert [order for order, ran in said.items() if ran == "yes" and found[order] != 1] == []
    unknown = [order for order, ran in said.items() if ran == "unknown"]
    assert len(unknown) <= CLIENTS * kills, "each kill meets one call of each client"


# --- a client that listens ------------------------------------------------------------------------

NOTES = """
from wirecall import App, Context

app = App("notes")

@app.resource("test://note")
def note() -> str:
    return "it"

@app.tool
def touch() -> None:
    app.updated("test://note")

@app.tool
async def chatter(ctx: Context) -> None:
    for level in ("info", "error"):
        await ctx.log(level, f"an {level}")
"""


async def test_client_in_a_session_gets_changes_and_its_log_level_after_a_restart(
    tmp_path: Path,
) -> None:
    """The process that starts does not know what the session has asked for."""
    said: list[str] = []
    async with servers(tmp_path, 1, "--drain", "0", app=NOTES) as (server,):
        (await until_ready(server)).close()
        url = f"http://127.0.0.1:{server.port}/mcp"
        note = Change("updated", "test://note")
        async with connect_client(
            url, protocol="mcp", revision="2025-11-25", on_log=lambda log: said.append(log.level)
        ) as client:
            await client.set_log_level("error")
            async with asyncio.timeout(PATIENCE), client.listen(uris=["test://note"]) as changes:
                server.send(signal.SIGTERM)
                assert await server.ended() == 0
                await server.start()
                # It may have changed while no client listened.
                assert await anext(changes) == note
                await client.call_tool("touch")
                assert await anext(changes) == note
            await client.call_tool("chatter")
            assert said == ["error"]
        server.send(signal.SIGTERM)
        assert await server.ended() == 0
