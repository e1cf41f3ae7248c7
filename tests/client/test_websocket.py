"""The client over a WebSocket, against real servers; and notifications, over stdio too."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from tests.sockets import Shop
from wirecall import App, Context
from wirecall.client.connect import connect
from wirecall.client.delivery import Retry
from wirecall.errors import ConnectionLost, NotSent, Refused, TimedOut, UsageError
from wirecall.testing import FakeClock

SERVERS = ["granian", "granian-asgi", "uvicorn"]


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


# --- calls ----------------------------------------------------------------------------------------


async def test_client_calls_over_a_socket(server: str) -> None:
    async with (
        Shop().serving(server) as address,
        connect(f"ws://{address}/rpc") as client,
    ):
        assert await client.call("add", [1, 2]) == 3
        async with client.batch() as batch:
            one = batch.call("add", [1, 1])
            two = batch.call("add", [2, 2])
        assert (one.result(), two.result(), batch.wire) == (2, 4, "array")
        answers = await asyncio.gather(*(client.call("add", [n, n]) for n in range(50)))
        assert answers == [2 * number for number in range(50)]


async def test_client_takes_answers_by_id() -> None:
    shop = Shop()
    async with (
        shop.serving("granian") as address,
        connect(f"ws://{address}/rpc", discover=False) as client,
    ):
        slow = asyncio.create_task(client.call("wait", [5], query=True))
        assert await shop.begun.get() == 5
        assert await client.call("add", [1, 2]) == 3
        shop.release.set()
        assert await slow == 5


async def test_client_deadline_ends_only_its_call() -> None:
    shop = Shop()
    async with (
        shop.serving("granian") as address,
        connect(f"ws://{address}/rpc", discover=False) as client,
    ):
        with pytest.raises(TimedOut):
            await client.call("wait", [1], timeout=0.05)
        assert await client.call("add", [1, 2]) == 3


async def test_client_names_a_refused_connection() -> None:
    """401 and 404 refuse the caller; a port without a server was not reached."""
    async with Shop(authenticate=lambda _headers: None).serving("granian") as address:
        with pytest.raises(Refused, match="HTTP 401"):
            async with connect(f"ws://{address}/rpc"):
                pass
    with pytest.raises(NotSent, match="cannot be reached"):
        async with connect(f"ws://{address}/rpc"):
            pass


async def test_client_sends_its_token_with_the_upgrade() -> None:
    def authenticate(headers: Any) -> str | None:
        return {"Bearer good": "ada"}.get(headers.get("authorization", ""))

    async with (
        Shop(authenticate=authenticate).serving("granian") as address,
        connect(f"ws://{address}/rpc", auth="good") as client,
    ):
        assert await client.call("add", [1, 2]) == 3


@pytest.mark.parametrize("target", ["ws://", "ws://localhost:x/rpc"])
def test_client_refuses_bad_addresses(target: str) -> None:
    with pytest.raises(UsageError, match="not an address"):
        connect(target)


def test_client_refuses_mcp_over_a_socket() -> None:
    with pytest.raises(UsageError, match="MCP over a WebSocket"):
        connect("ws://localhost/mcp")


# --- connections that break -----------------------------------------------------------------------


class Peer:
    """A server that reads messages and answers, or breaks the connection."""

    def __init__(self, answer: Callable[["Peer", web.WebSocketResponse, Any], Awaitable[None]]):
        self.answer = answer
        self.received: list[Any] = []
        self.connections = 0

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        self.connections += 1
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            if message.type != WSMsgType.TEXT:
                break
            read = message.json()
            self.received.append(read)
            await self.answer(self, socket, read)
        return socket

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/rpc", self._serve)
        app.router.add_get("/moved", self._moved)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            yield f"ws://127.0.0.1:{port}"
        finally:
            await runner.cleanup()

    async def _moved(self, _request: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": "/rpc"})


async def break_first(peer: Peer, socket: web.WebSocketResponse, message: Any) -> None:
    if len(peer.received) == 1:
        await socket.close(code=1011)
        return
    await socket.send_json({"jsonrpc": "2.0", "id": message["id"], "result": "done"})


async def test_client_repeats_queries_and_keyed_calls_on_another_connection() -> None:
    for options in ({"query": True}, {"key": "order-7"}):
        peer = Peer(break_first)
        async with (
            peer.serving() as address,
            connect(f"{address}/rpc", discover=False, clock=FakeClock()) as client,
        ):
            more: Any = options
            assert await client.call("charge", {"cents": 450}, **more) == "done"
            assert peer.connections == 2
            first, second = peer.received
            assert first["params"] == second["params"]


async def test_client_does_not_repeat_other_calls() -> None:
    """The call may have run, so its outcome is unknown."""
    peer = Peer(break_first)
    async with (
        peer.serving() as address,
        connect(f"{address}/rpc", discover=False) as client,
    ):
        with pytest.raises(ConnectionLost, match="code 1011") as raised:
            await client.call("charge", {"cents": 450}, key=False)
        assert raised.value.ran == "unknown"
        assert len(peer.received) == 1
        assert await client.call("charge", {"cents": 450}, key=False) == "done"


async def test_client_ends_a_connection_with_a_binary_frame() -> None:
    async def binary(_peer: Peer, socket: web.WebSocketResponse, _message: Any) -> None:
        await socket.send_bytes(b"{}")

    async with (
        Peer(binary).serving() as address,
        connect(f"{address}/rpc", discover=False, retry=Retry(attempts=1)) as client,
    ):
        with pytest.raises(ConnectionLost, match="binary frame"):
            await client.call("charge")


async def test_client_does_not_read_an_answer_that_is_too_long() -> None:
    async def long(_peer: Peer, socket: web.WebSocketResponse, message: Any) -> None:
        await socket.send_json({"jsonrpc": "2.0", "id": message["id"], "result": "x" * 2000})

    async with (
        Peer(long).serving() as address,
        connect(f"{address}/rpc", discover=False, max_bytes=1000) as client,
    ):
        with pytest.raises(ConnectionLost, match="1009"):
            await client.call("charge", key=False)


async def test_client_does_not_follow_a_redirect() -> None:
    peer = Peer(break_first)
    async with peer.serving() as address:
        with pytest.raises(Refused, match="redirect"):
            async with connect(f"{address}/moved"):
                pass
    assert peer.connections == 0


# --- notifications --------------------------------------------------------------------------------


async def test_client_receives_notifications_in_order(server: str) -> None:
    seen: list[int] = []

    async def slowly(params: Any) -> None:
        await asyncio.sleep(0)
        seen.append(params["number"])

    async with (
        Shop().serving(server) as address,
        connect(f"ws://{address}/rpc") as client,
    ):
        client.on("counted", slowly)
        assert await client.call("count", [20]) == "done"
        last = asyncio.Event()
        client.on("counted", lambda _params: last.set())
        assert await client.call("count", [1]) == "done"
        await last.wait()
    assert seen == [*range(20), 0]


async def test_client_runs_sync_functions_before_the_call_returns() -> None:
    seen: list[Any] = []
    async with (
        Shop().serving("granian") as address,
        connect(f"ws://{address}/rpc") as client,
    ):
        client.on("counted", seen.append)
        client.on("counted", seen.append)
        await client.call("count", [2])
        assert seen == [{"number": number} for number in (0, 0, 1, 1)]


async def test_client_logs_an_exception_of_a_function(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []

    def fail(_params: Any) -> None:
        raise ValueError("as planned")

    async with (
        Shop().serving("granian") as address,
        connect(f"ws://{address}/rpc") as client,
    ):
        client.on("counted", fail)
        client.on("counted", seen.append)
        with caplog.at_level(logging.ERROR):
            assert await client.call("count", [2]) == "done"
    assert len(seen) == 2
    assert caplog.text.count("ValueError: as planned") == 2


async def test_client_function_may_call_the_server() -> None:
    done = asyncio.get_running_loop().create_future()
    async with (
        Shop().serving("granian") as address,
        connect(f"ws://{address}/rpc") as client,
    ):

        async def ask(params: Any) -> None:
            done.set_result(await client.call("add", [params["number"], 5]))

        client.on("counted", ask)
        await client.call("count", [1])
        assert await done == 5


SERVER = """
from wirecall import App, Context
app = App("shop")

@app.query
async def count(up_to: int, context: Context) -> str:
    for number in range(up_to):
        await context.notify("counted", [number])
    return "done"

app.run()
"""


async def test_client_receives_notifications_over_stdio(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    seen: list[Any] = []
    async with connect([sys.executable, str(tmp_path / "server.py")]) as client:
        client.on("counted", seen.append)
        assert await client.call("count", {"up_to": 3}) == "done"
    assert seen == [[0], [1], [2]]


async def test_client_on_needs_a_link_that_can_push() -> None:
    with pytest.raises(UsageError, match="link that can push"):
        connect("http://127.0.0.1:1/rpc").on("counted", print)
    client = connect("ws://127.0.0.1:1/rpc")
    wrong: Any = None
    with pytest.raises(UsageError, match="expected a function, got NoneType"):
        client.on("counted", wrong)
    with pytest.raises(UsageError, match="name of a notification"):
        client.on("", print)


async def test_notify_checks_what_it_sends() -> None:
    """A bad notification is the handler's mistake, before anything is sent."""
    app = App("shop")
    errors: list[str] = []
    wrong: Any = "tea"

    @app.query
    async def announce(context: Context) -> bool:
        for method, params in (("rpc.end", None), ("", None), ("sold", wrong)):
            try:
                await context.notify(method, params)
            except UsageError as error:
                errors.append(str(error))
        return context.can_notify

    shop = Shop()
    shop.app = app
    async with shop.serving("granian") as address, connect(f"ws://{address}/rpc") as client:
        assert await client.call("announce") is True
    assert len(errors) == 3
    assert "params of type str" in errors[2]


async def test_notify_in_memory_is_refused() -> None:
    shop = Shop()
    async with connect(shop.app) as client:
        with pytest.raises(Exception, match="expected a link that can push"):
            await client.call("count", [1])
