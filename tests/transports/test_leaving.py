"""A server that leaves: which requests it still takes."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from typing import Any

import pytest

from tests.calls import call
from tests.transports import PATIENCE, make_server, post
from wirecall import Limits
from wirecall.transports import serve
from wirecall.transports.leaving import REPLACED, Signals, time_to_stop
from wirecall.transports.serve import FRONTS, bind
from wirecall.transports.tcp import is_awaited
from wirecall.transports.workers import Leave, Orders

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux reports what is not read")

ADD = post("/rpc", call("add", {"a": 1, "b": 2}))


@contextmanager
def listening() -> Iterator[socket.socket]:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server


def test_listener_is_awaited_while_a_connection_is_not_accepted() -> None:
    with listening() as server:
        assert not is_awaited(server)
        with closing(socket.create_connection(server.getsockname())):
            assert is_awaited(server)
            with closing(server.accept()[0]):
                assert not is_awaited(server)


def test_connection_is_awaited_until_its_first_bytes_are_read() -> None:
    with listening() as server, closing(socket.create_connection(server.getsockname())) as client:
        connection, _ = server.accept()
        with closing(connection):
            assert is_awaited(connection)
            client.sendall(b"GET")
            connection.recv(3, socket.MSG_PEEK)
            assert is_awaited(connection)
            connection.recv(3)
            assert not is_awaited(connection)
            client.sendall(b" /")
            connection.recv(2, socket.MSG_PEEK)
            assert is_awaited(connection)


def test_connection_whose_client_has_left_is_not_awaited() -> None:
    with listening() as server:
        socket.create_connection(server.getsockname()).close()
        connection, _ = server.accept()
        with closing(connection):
            assert connection.recv(1) == b""
            assert not is_awaited(connection)


@asynccontextmanager
async def leaving(kind: str, asked: asyncio.Event) -> AsyncIterator[int]:
    """Serve; when `asked`, drain and stop. Yield the port."""
    app = make_server(Limits())
    serving = asyncio.Event()
    with bind("127.0.0.1", 0) as bound:
        front = FRONTS[kind](app, bound, None)
        await app.open()
        running = asyncio.create_task(front.serve(serving.set))
        signals = Signals(asyncio.Event())
        signals.leave = Leave.DRAIN

        async def leave() -> None:
            await asked.wait()
            await serve._drain(app, front, running, signals, 0.001)
            await serve._stop_in_time(app, front, running, PATIENCE)
            await app.aclose()

        await serving.wait()
        left = asyncio.create_task(leave())
        try:
            yield bound.getsockname()[1]
        finally:
            async with asyncio.timeout(PATIENCE):
                await left


@pytest.mark.parametrize("kind", FRONTS)
async def test_server_that_leaves_answers_a_connection_that_has_sent_nothing_yet(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine may deliver a request seconds after its handshake."""
    found = 0
    is_waited_for = asyncio.Event()

    def counted(each: socket.socket) -> Any:
        nonlocal found
        if is_awaited(each):
            found += 1
        if found >= 3:
            is_waited_for.set()
        return is_awaited(each)

    monkeypatch.setattr(serve, "is_awaited", counted)
    monkeypatch.setattr(serve, "SETTLE", 0)
    monkeypatch.setattr(serve, "LATEST", PATIENCE)
    asked = asyncio.Event()
    async with asyncio.timeout(PATIENCE), leaving(kind, asked) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        asked.set()
        await is_waited_for.wait()
        writer.write(ADD)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


@pytest.mark.parametrize("kind", FRONTS)
async def test_server_that_leaves_does_not_wait_forever_for_a_silent_connection(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "SETTLE", 0)
    monkeypatch.setattr(serve, "LATEST", 0.001)
    asked = asyncio.Event()
    async with asyncio.timeout(PATIENCE), leaving(kind, asked) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        asked.set()
        assert await reader.read() == b""
        writer.close()


async def test_worker_leaves_sighup_to_its_parent() -> None:
    """It may be sent to all processes, and the successor may fail to start."""
    files = [*os.pipe(), *os.pipe()]
    replaced, replace, hurry, _ = files
    stop = asyncio.Event()
    signals = Signals(stop, Orders(replaced, hurry))
    signals.catch()
    try:
        signals._ask(signal.SIGHUP)
        assert not stop.is_set()
        os.write(replace, b"!")
        await asyncio.wait_for(stop.wait(), PATIENCE)
        assert signals.leave is Leave.REPLACED
    finally:
        asyncio.get_running_loop().remove_reader(hurry)
        signals.release()
        for file in files:
            os.close(file)


def test_time_to_stop_has_room_for_a_server_that_is_replaced() -> None:
    """Such a server drains for a second, even where the drain after SIGTERM is shorter."""
    assert time_to_stop(0, 1) > 1 + REPLACED
    assert time_to_stop(60, 1) > 61
