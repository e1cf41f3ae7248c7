"""`await app.serve()`: a server inside an event loop that belongs to the user's program."""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from tests.faults import eventually
from tests.transports import PATIENCE
from wirecall import App, UsageError, connect

every_server = pytest.mark.parametrize("server", ["granian", "granian-asgi", "uvicorn"])


@asynccontextmanager
async def served(app: App, **options: Any) -> AsyncIterator[tuple[str, "asyncio.Task[None]"]]:
    """Serve an app at a free port, until the block ends; give its address and the task that serves
    it.
    """
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task: asyncio.Task[Any] = asyncio.create_task(
        app.serve(port=0, listening=address.set_result, **options)
    )
    async with asyncio.timeout(PATIENCE):
        started: list[asyncio.Future[Any]] = [task, address]
        await asyncio.wait(started, return_when=asyncio.FIRST_COMPLETED)
        try:
            yield await address if address.done() else "", task
        finally:
            task.cancel()
            await asyncio.wait({task})


async def refuses(address: str) -> None:
    """Wait until the server accepts no more connections."""
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
        except ConnectionRefusedError:
            return
        except ConnectionResetError:  # it was still waiting when the server closed its socket
            continue
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@every_server
async def test_serve_runs_two_apps_in_one_loop(server: Any) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    shop = App("shop")
    bank = App("bank")
    shop.query(name="price")(lambda sku: {"tea": 450}[sku])
    bank.query(name="balance")(lambda: 7)
    async with served(shop, server=server) as (one, _), served(bank, server=server) as (two, task):
        async with connect(f"{one}/rpc") as client, connect(f"{two}/mcp", protocol="mcp") as agent:
            assert await client.call("price", {"sku": "tea"}) == 450
            assert await agent.call_tool("balance", type=int) == 7
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
        # The end of one is not the end of the other.
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        async with connect(f"{one}/rpc") as client:
            assert await client.call("price", {"sku": "tea"}) == 450
    for address in (one, two):
        await refuses(address)


@every_server
async def test_cancel_lets_calls_in_flight_end_and_leaves_the_lifespan(server: Any) -> None:
    life: list[str] = []
    entered = asyncio.Event()
    gate = asyncio.Event()

    @asynccontextmanager
    async def lifespan(_: App) -> AsyncIterator[None]:
        life.append("open")
        yield
        life.append("closed")

    app = App("shop", lifespan=lifespan)

    @app.command
    async def pay() -> str:
        entered.set()
        await gate.wait()
        life.append("paid")
        return "paid"

    async with (
        served(app, server=server, grace=PATIENCE) as (address, task),
        connect(f"{address}/rpc") as client,
    ):
        paying = asyncio.create_task(client.call("pay"))
        await entered.wait()
        task.cancel()
        await refuses(address)
        assert not task.done()
        gate.set()
        assert await paying == "paid"
        await asyncio.wait({task})
        assert task.cancelled()
    assert life == ["open", "paid", "closed"]


@every_server
async def test_calls_that_do_not_end_are_abandoned_after_the_grace_time(server: Any) -> None:
    app = App("shop")
    entered = asyncio.Event()
    ended = asyncio.Event()

    @app.query
    async def wait() -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with (
        served(app, server=server, grace=0.5) as (address, task),
        connect(f"{address}/rpc") as client,
    ):
        waiting = asyncio.create_task(client.call("wait", timeout=PATIENCE))
        await entered.wait()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        await ended.wait()
        waiting.cancel()


@every_server
async def test_second_cancel_aborts_the_shutdown(server: Any) -> None:
    app = App("shop")
    entered = asyncio.Event()
    ended = asyncio.Event()

    @app.query
    async def wait() -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with (
        served(app, server=server, grace=2 * PATIENCE) as (address, task),
        connect(f"{address}/rpc") as client,
    ):
        waiting = asyncio.create_task(client.call("wait", timeout=PATIENCE))
        await entered.wait()
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        await ended.wait()
        waiting.cancel()


async def test_mistakes_are_named() -> None:
    app: Any = App("shop")
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(UsageError, match="use another port="),
    ):
        await app.serve(port=taken.getsockname()[1])
    with pytest.raises(
        UsageError, match="server must be one of granian, granian-asgi, uvicorn, got 'apache'"
    ):
        await app.serve(server="apache")
    with pytest.raises(UsageError, match=r"serve\(\) has no option 'prot'[\s\S]*use port="):
        await app.serve(prot=80)
    with pytest.raises(
        UsageError, match=r"serve\(\) takes its options by name[\s\S]*use host='127.0.0.1'"
    ):
        await app.serve("127.0.0.1")


async def test_start_that_fails_is_raised() -> None:
    @asynccontextmanager
    async def lifespan(_: App) -> AsyncIterator[None]:
        raise ValueError("no database")
        yield

    async with served(App("shop", lifespan=lifespan)) as (_, task):
        with pytest.raises(Exception, match="no database"):
            await task


async def test_serve_prints_the_address_on_stderr_by_default(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def is_printed() -> bool:
        return "Listening on http://127.0.0.1:" in capfd.readouterr().err  # one write

    task = asyncio.create_task(App("shop").serve(port=0))
    await eventually(is_printed)
    task.cancel()
    await asyncio.wait({task})
