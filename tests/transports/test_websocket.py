"""JSON-RPC over a WebSocket, with real servers of each kind. The client is aiohttp, which sends raw
frames.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import pytest

from tests.sockets import Shop
from wirecall import Context, Limits
from wirecall.auth import Access, Identity
from wirecall.transports import websocket

SERVERS = ["granian", "granian-asgi", "uvicorn"]
PATIENCE = 30.0


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@asynccontextmanager
async def opened(
    address: str, path: str = "/rpc", **options: Any
) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    async with (
        asyncio.timeout(PATIENCE),
        aiohttp.ClientSession() as session,
        session.ws_connect(f"ws://{address}{path}", **options) as socket,
    ):
        yield socket


def call(id: int, method: str, *params: Any) -> str:
    return json.dumps({"jsonrpc": "2.0", "id": id, "method": method, "params": list(params)})


def numbers(*params: int) -> str:
    return call(1, "add", *params)


async def refused(address: str, path: str = "/rpc", **headers: str) -> int:
    """The status that refuses a connection."""
    with pytest.raises(aiohttp.WSServerHandshakeError) as raised:
        async with opened(address, path, headers=headers):
            pass
    return raised.value.status


# --- messages -------------------------------------------------------------------------------------


async def test_socket_answers_a_message_and_an_array(server: str) -> None:
    async with Shop().serving(server) as address, opened(address) as socket:
        await socket.send_str(numbers(1, 2))
        assert await socket.receive_json() == {"jsonrpc": "2.0", "id": 1, "result": 3}
        await socket.send_str(f"[{call(2, 'add', 2, 2)},{call(3, 'nothing')}]")
        two, three = await socket.receive_json()
        assert two == {"jsonrpc": "2.0", "id": 2, "result": 4}
        assert three["error"]["code"] == -32601


async def test_socket_answers_calls_as_they_end(server: str) -> None:
    """Several calls are in flight, and a call that waits does not delay the next one."""
    shop = Shop()
    async with shop.serving(server) as address, opened(address) as socket:
        for number in range(1, 6):
            await socket.send_str(call(number, "wait", number))
            assert await shop.begun.get() == number
        await socket.send_str(call(6, "add", 3, 4))
        assert await socket.receive_json() == {"jsonrpc": "2.0", "id": 6, "result": 7}
        shop.release.set()
        answers = [await socket.receive_json() for _ in range(5)]
        assert {answer["id"]: answer["result"] for answer in answers} == {
            number: number for number in range(1, 6)
        }


async def test_socket_reads_no_more_calls_than_may_be_in_flight(server: str) -> None:
    """Half of Limits.in_flight for each connection: batches count for many."""
    shop = Shop(limits=Limits(in_flight=4))
    async with shop.serving(server) as address, opened(address) as socket:
        for number in range(1, 6):
            await socket.send_str(call(number, "wait", number))
        assert [await shop.begun.get() for _ in range(2)] == [1, 2]
        async with opened(address) as other:
            await other.send_str(numbers(1, 1))
            assert (await other.receive_json())["result"] == 2
        assert shop.begun.empty()
        shop.release.set()
        assert {(await socket.receive_json())["result"] for _ in range(5)} == {1, 2, 3, 4, 5}


async def test_socket_answers_broken_json_and_continues(server: str) -> None:
    async with Shop().serving(server) as address, opened(address) as socket:
        for text in ("{", "", "\ud7ff"):
            await socket.send_str(text)
            answer = await socket.receive_json()
            assert (answer["id"], answer["error"]["code"]) == (None, -32700)
        await socket.send_str(numbers(1, 2))
        assert (await socket.receive_json())["result"] == 3


async def test_socket_refuses_a_long_array(server: str) -> None:
    shop = Shop(limits=Limits(batch=2))
    async with shop.serving(server) as address, opened(address) as socket:
        await socket.send_str(f"[{numbers(1, 2)},{numbers(1, 2)},{numbers(1, 2)}]")
        answer = await socket.receive_json()
        assert answer["error"]["data"]["limit"] == "batch"
        await socket.send_str("[]")
        assert (await socket.receive_json())["error"]["code"] == -32600


async def test_socket_does_not_answer_notifications(server: str) -> None:
    async with Shop().serving(server) as address, opened(address) as socket:
        await socket.send_str('{"jsonrpc": "2.0", "method": "add", "params": [1, 2]}')
        await socket.send_str(call(2, "add", 2, 2))
        assert (await socket.receive_json())["id"] == 2


# --- bad frames -----------------------------------------------------------------------------------


async def closed_with(socket: aiohttp.ClientWebSocketResponse) -> int:
    message = await socket.receive()
    assert message.type == aiohttp.WSMsgType.CLOSE, message
    code: int = message.data
    return code


async def test_socket_closes_after_a_binary_frame(server: str) -> None:
    async with Shop().serving(server) as address, opened(address) as socket:
        await socket.send_bytes(numbers(1, 2).encode())
        assert await closed_with(socket) == 1003


async def test_socket_closes_after_a_message_that_is_too_long(server: str) -> None:
    """The limit counts bytes, and a message as long as the limit is answered."""
    shop = Shop(limits=Limits(bytes_in=100))
    async with shop.serving(server) as address:
        async with opened(address) as socket:
            await socket.send_str(numbers(1, 2).ljust(100))
            assert (await socket.receive_json())["result"] == 3
            await socket.send_str("\u00e9" * 51)
            assert await closed_with(socket) == 1009
        async with opened(address) as socket:
            await socket.send_str(numbers(1, 2).ljust(101))
            assert await closed_with(socket) == 1009


def frame(opcode: int, data: bytes, *, is_last: bool) -> bytes:
    """A frame of a client, masked with zeros (RFC 6455, section 5.2)."""
    first = opcode | (0x80 if is_last else 0)
    return bytes((first, 0x80 | 127)) + len(data).to_bytes(8, "big") + b"\0" * 4 + data


UPGRADE = (
    b"GET /rpc HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
)


async def test_socket_ends_a_message_whose_fragments_do_not_end(server: str) -> None:
    """granian itself ends a message beyond 64 MiB, uvicorn one beyond Limits.bytes_in."""
    async with asyncio.timeout(PATIENCE), Shop().serving(server) as address:
        host, _, port = address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(UPGRADE)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        piece = b" " * (1 << 20)
        opcode = 1
        sent = 0
        with suppress(ConnectionError):
            while sent < 200:
                writer.write(frame(opcode, piece, is_last=False))
                await writer.drain()
                opcode = 0
                sent += 1
        assert sent < 100  # MB
        writer.close()


# --- permission to connect ------------------------------------------------------------------------------


async def test_socket_refuses_pages_of_other_origins(server: str) -> None:
    """Browsers do not apply CORS to WebSockets, so a page of the loopback must be listed, too."""
    shop = Shop(origins=["https://app.example.com"])
    async with shop.serving(server) as address:
        for origin in ("https://evil.example", "http://localhost:3000", "null"):
            assert await refused(address, Origin=origin) == 403
        for origin in (f"http://{address}", "https://app.example.com"):
            async with opened(address, headers={"Origin": origin}) as socket:
                await socket.send_str(numbers(1, 2))
                assert (await socket.receive_json())["result"] == 3


async def test_socket_refuses_foreign_hosts_and_other_paths(server: str) -> None:
    async with Shop().serving(server) as address:
        assert await refused(address, Host="evil.example") == 403
        assert await refused(address, "/mcp") == 404
        assert await refused(address, "/nothing") == 404


async def test_socket_needs_the_credentials_of_http(server: str) -> None:
    def authenticate(headers: Any) -> str | None:
        return {"Bearer a": "ada"}.get(headers.get("authorization", ""))

    shop = Shop(authenticate=authenticate)
    shop.app.query(name="me")(_caller)
    async with shop.serving(server) as address:
        assert await refused(address) == 401
        assert await refused(address, Authorization="Bearer b") == 401
        async with opened(address, headers={"Authorization": "Bearer a"}) as socket:
            await socket.send_str(call(1, "me"))
            assert (await socket.receive_json())["result"] == "ada"


def _caller(context: Context) -> str:
    return context.caller


def identified(**facts: Any) -> Access:
    """Accept every token as that of one person."""
    return Access(lambda _token: Identity("ada", **facts), resource="http://127.0.0.1/rpc")


async def test_socket_checks_scopes_for_each_message(server: str) -> None:
    """A message without the scope is answered with an error for its id, and nothing of it runs."""
    shop = Shop(auth=identified())
    shop.app.query(name="secret", scopes="shop:read")(lambda: "tea")
    header = {"Authorization": "Bearer a"}
    async with shop.serving(server) as address:
        assert await refused(address) == 401
        async with opened(address, headers=header) as socket:
            await socket.send_str(call(7, "secret"))
            answer = await socket.receive_json()
            assert (answer["id"], answer["error"]["code"]) == (7, -32600)
            assert answer["error"]["data"]["scopes"] == ["shop:read"]
            await socket.send_str(f"[{call(1, 'secret')},{call(2, 'add', 1, 2)}]")
            assert [each["id"] for each in await socket.receive_json()] == [1, 2]
            await socket.send_str(numbers(1, 2))
            assert (await socket.receive_json())["result"] == 3


async def test_socket_closes_when_the_token_expires(server: str) -> None:
    shop = Shop(auth=identified(expires=time.time() + 0.5))
    header = {"Authorization": "Bearer a"}
    async with shop.serving(server) as address, opened(address, headers=header) as socket:
        assert await closed_with(socket) == 1008


async def test_socket_counts_as_a_stream(server: str) -> None:
    async with Shop(limits=Limits(streams=1)).serving(server) as address, opened(address):
        assert await refused(address) == 503


# --- the end --------------------------------------------------------------------------------------


async def test_socket_that_the_client_closes_cancels_its_queries(server: str) -> None:
    shop = Shop()
    async with shop.serving(server) as address:
        async with opened(address) as socket:
            await socket.send_str(call(1, "wait", 1))
            assert await shop.begun.get() == 1
        assert await shop.cancelled.get() == 1


async def test_socket_that_breaks_loses_the_answer_and_a_retry_gets_it(server: str) -> None:
    """A keyless command of a single user runs once: the retry gets the answer that was lost."""
    shop = Shop(single_user=True)
    async with shop.serving(server) as address:
        async with opened(address) as socket:
            await socket.send_str(call(1, "charge", 450))
            assert await shop.begun.get() == 450
        shop.release.set()
        async with opened(address) as socket:
            await socket.send_str(call(9, "charge", 450))
            assert await socket.receive_json() == {"jsonrpc": "2.0", "id": 9, "result": 450}
            assert shop.charged == [450]
            # That answer was delivered, so an equal call is a new one.
            await socket.send_str(call(10, "charge", 450))
            assert (await socket.receive_json())["result"] == 450
            assert shop.charged == [450, 450]


async def test_socket_server_answers_before_it_goes_away(server: str) -> None:
    """Calls in flight are answered, then the connection closes with 1001."""
    shop = Shop()
    async with shop.serving(server) as address, opened(address) as socket:
        await socket.send_str(call(1, "wait", 1))
        assert await shop.begun.get() == 1
        shop.task.cancel()
        await asyncio.sleep(0)
        shop.release.set()
        assert await socket.receive_json() == {"jsonrpc": "2.0", "id": 1, "result": 1}
        assert await closed_with(socket) == 1001


async def test_socket_that_was_full_begins_nothing_after_the_stop(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for another message either."""
    stopped = asyncio.Event()
    stop = websocket._Session._stop

    def noted(session: websocket._Session) -> None:
        stop(session)
        stopped.set()

    monkeypatch.setattr(websocket._Session, "_stop", noted)
    shop = Shop(limits=Limits(in_flight=2))
    async with shop.serving(server) as address, opened(address) as socket:
        await socket.send_str(call(1, "wait", 1))
        assert await shop.begun.get() == 1
        await socket.send_str(call(2, "charge", 7))
        shop.task.cancel()
        await stopped.wait()
        shop.release.set()
        assert await socket.receive_json() == {"jsonrpc": "2.0", "id": 1, "result": 1}
        assert await closed_with(socket) == 1001
    assert shop.charged == []


# --- notifications --------------------------------------------------------------------------------


async def test_socket_sends_notifications_before_the_answer(server: str) -> None:
    async with Shop().serving(server) as address, opened(address) as socket:
        await socket.send_str(call(1, "count", 3))
        for number in range(3):
            assert await socket.receive_json() == {
                "jsonrpc": "2.0",
                "method": "counted",
                "params": {"number": number},
            }
        assert await socket.receive_json() == {"jsonrpc": "2.0", "id": 1, "result": "done"}


async def test_notify_over_http_is_refused(server: str) -> None:
    shop = Shop()
    async with shop.serving(server) as address, aiohttp.ClientSession() as session:
        async with session.post(
            f"http://{address}/rpc", json=json.loads(call(1, "count", 1))
        ) as got:
            answer = await got.json()
        assert answer["error"]["code"] == -32021
        assert answer["error"]["data"]["reason"] == (
            "ctx.notify: expected a link that can push, got HTTP;"
            " connect over ws://, tcp://, unix: or stdio"
        )
