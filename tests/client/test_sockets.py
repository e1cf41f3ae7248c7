"""The client on sockets, and with headers before its messages: what it sends and reads, and what a
call gets when the connection breaks.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.transports.socket_servers import Server, command, running
from wirecall import Retry, connect, connect_sync
from wirecall.errors import ConnectionLost, NotSent, UsageError
from wirecall.transports.framing import CONTENT_LENGTH, FramingName

ONCE = Retry(attempts=1)
Behaviour = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(params=["unix lines", "unix content-length", "tcp lines", "tcp content-length"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Server, FramingName]]:
    """A server of each kind."""
    transport, name = request.param.split()
    place = f"path={tmp_path}/own/rpc.sock" if transport == "unix" else "port=0"
    with running(tmp_path, transport, place, f"framing={name}") as server:
        yield server, name


@asynccontextmanager
async def behaving(behaviour: Behaviour) -> AsyncIterator[str]:
    """Serve a TCP port with a function for each connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await behaviour(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"tcp://127.0.0.1:{port}"


async def test_client_calls_over_a_socket(kind: tuple[Server, FramingName]) -> None:
    server, framing = kind
    async with connect(server.address, framing=framing) as client:
        assert await client.call("add", {"a": 2, "b": 3}) == 5
        assert await client.call("echo", {"text": "Zoë 👍"}) == "Zoë 👍"
        await client.notify("note", {"text": "first"})
        async with client.batch() as batch:
            noted = batch.call("noted")
            added = batch.call("add", {"a": 1, "b": 1})
        assert (noted.result(), added.result()) == (["first"], 2)


async def test_mcp_client_calls_over_a_socket(kind: tuple[Server, FramingName]) -> None:
    server, framing = kind
    async with connect(server.address, framing=framing, protocol="mcp") as client:
        assert "add" in str(await client.call("tools/list"))


async def test_client_receives_notifications_over_a_socket(
    kind: tuple[Server, FramingName],
) -> None:
    server, framing = kind
    counted: list[Any] = []
    async with connect(server.address, framing=framing) as client:
        client.on("counted", counted.append)
        assert await client.call("count", {"n": 3}) is True
        assert counted == [{"number": 0}, {"number": 1}, {"number": 2}]


def test_sync_client_calls_over_a_socket(kind: tuple[Server, FramingName]) -> None:
    server, framing = kind
    with connect_sync(server.address, framing=framing) as client:
        assert client.call("add", {"a": 2, "b": 3}) == 5


async def test_client_calls_a_child_with_headers(tmp_path: Path) -> None:
    words = command(tmp_path, "stdio", "framing=content-length")
    async with connect(words, framing="content-length", stderr="keep") as client:
        assert await client.call("echo", {"text": "Zoë 👍"}) == "Zoë 👍"


# --- connections that break -----------------------------------------------------------------------


async def test_client_does_not_send_without_a_server(tmp_path: Path) -> None:
    client = connect(f"unix:{tmp_path}/rpc.sock", retry=ONCE)
    with pytest.raises(NotSent, match=r"rpc\.sock cannot be reached") as failed:
        await client.open()
    assert failed.value.ran == "no"


async def test_client_connects_again_to_a_server_that_has_restarted(tmp_path: Path) -> None:
    words = ("unix", f"path={tmp_path}/own/rpc.sock")
    with running(tmp_path, *words) as server:
        client = connect(server.address)
        await client.open()
        assert await client.call("add", {"a": 2, "b": 3}) == 5
        server.end()
    with running(tmp_path, *words):
        assert await client.call("add", {"a": 2, "b": 4}) == 6
    await client.aclose()


async def test_client_does_not_know_the_outcome_of_a_call_whose_connection_broke() -> None:
    async def leave(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.readline()

    async with behaving(leave) as address:
        client = connect(address, retry=ONCE, discover=False)
        await client.open()
        with pytest.raises(ConnectionLost, match="closed the connection") as failed:
            await client.call("put", {"text": "x"})
        assert failed.value.ran == "unknown"
        await client.aclose()


async def test_client_repeats_a_query_whose_connection_broke() -> None:
    connections = list[int]()

    async def leave_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        await reader.readline()
        if len(connections) == 2:
            writer.write(b'{"jsonrpc":"2.0","id":2,"result":5}\n')
            await writer.drain()
            await reader.read()

    async with behaving(leave_first) as address:
        client = connect(address, discover=False)
        await client.open()
        assert await client.call("add", query=True) == 5
        await client.aclose()
    assert len(connections) == 2


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"Content-Length: -1\r\n\r\n", "0 or more, got '-1'"),
        (b'{"jsonrpc":"2.0","id":1,"result":5}\r\n\r\n', "before the first message"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "expected a field of a header"),
        (b"Content-Length: 90\r\n\r\n{}", "the stream ended after 2 bytes"),
    ],
)
async def test_client_loses_a_connection_with_a_wrong_header(answer: bytes, expected: str) -> None:
    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(answer)
        await writer.drain()

    async with behaving(lie) as address:
        client = connect(address, framing="content-length", retry=ONCE, discover=False)
        await client.open()
        with pytest.raises(ConnectionLost, match="sent bytes that cannot be read") as failed:
            await client.call("add")
        assert expected in str(failed.value)
        await client.aclose()


async def test_client_fails_a_call_whose_answer_is_too_long() -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        long = b'{"jsonrpc":"2.0","id":1,"result":"%b"}' % (b"x" * 2000)
        writer.write(CONTENT_LENGTH.join(long))
        await reader.readuntil(b"}")
        writer.write(CONTENT_LENGTH.join(b'{"jsonrpc":"2.0","id":2,"result":5}'))
        await writer.drain()
        await reader.read()

    async with behaving(flood) as address:
        client = connect(
            address, framing="content-length", retry=ONCE, discover=False, max_bytes=1000
        )
        await client.open()
        with pytest.raises(Exception, match="more than 1000 bytes"):
            await client.call("add")
        assert await client.call("add") == 5
        await client.aclose()


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "options", "expected"),
    [
        (
            "http://127.0.0.1:1/rpc",
            {"framing": "content-length"},
            "framing= is for a child process",
        ),
        ("tcp://127.0.0.1:1", {"framing": "chunks"}, "'chunks' is not a framing"),
        ("tcp://127.0.0.1:1", {"auth": "token"}, "auth= is for HTTP"),
        ("tcp://127.0.0.1", {}, "expected a host and a port"),
        ("unix:rpc.sock", {}, "expected unix: and an absolute path"),
        ("127.0.0.1:1", {}, "unix:/PATH or tcp://HOST:PORT"),
    ],
)
def test_connect_refuses_a_wrong_socket(target: str, options: Any, expected: str) -> None:
    with pytest.raises(UsageError) as failed:
        connect(target, **options)
    assert expected in str(failed.value)
