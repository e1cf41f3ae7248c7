"""Servers that are replaced one after another behind a load balancer that asks `/readyz`.

Every call has exactly one effect, and is answered: no error, whatever the speed.
"""

import asyncio
import signal
import sys
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from tests.balancer import PATIENCE, Balancer, Connection, connect
from tests.calls import call, read
from tests.cli.rolling import (
    APP,
    CLIENTS,
    LEASE_OF_KILLED,
    ROUNDS,
    Server,
    are_true,
    effects,
    kill,
    persistent,
    replace,
    servers,
)
from tests.servers import Store
from tests.size import sized
from wirecall import connect as connect_client
from wirecall.mcp.client.inbox import Change

CASES = [
    ("granian", 2, "postgres"),
    ("uvicorn", 1, "sqlite"),
    ("granian", 1, "redis"),
    ("uvicorn", 2, "cluster"),
    ("granian-asgi", 2, "postgres"),
]
STORES = sized(small=["sqlite"], full=["sqlite", "redis", "cluster", "postgres"])


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
