"""Real servers: stopping, dead and slow peers, unusual headers."""

import asyncio
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, cast

import pytest

from tests.calls import call
from tests.faults import eventually
from tests.rsgi import Fields
from tests.size import sized
from tests.transports import LONG, PATIENCE, Listening, Served, command, make_server, post, serving
from wirecall import Limits, UsageError
from wirecall.protocol.receipt import Receipt
from wirecall.transports.http_server import HttpServer
from wirecall.transports.request import HttpRequest
from wirecall.transports.serve import Uvicorn, bind, serve, serve_until

SERVERS = ["granian", "uvicorn", "granian-asgi", "uvicorn without httptools"]
every_server = pytest.mark.parametrize("server", SERVERS)
both = pytest.mark.parametrize("server", SERVERS[:2])

ADD = call("add", {"a": 1, "b": 2})


@pytest.fixture(scope="module", params=SERVERS)
def shared(request: pytest.FixtureRequest) -> Iterator[Listening]:
    """A server of each kind for all tests that leave it as it is."""
    line = command(request.param, origins=["https://app.example"], bytes_in=1000, header_bytes=8192)
    with subprocess.Popen(line, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        try:
            _, (address, _) = json.loads(process.stdout.readline())
            yield Listening(int(address.rpartition(":")[2]))
        finally:
            process.kill()


async def ends(served: Served, number: signal.Signals = signal.SIGTERM) -> float:
    """Seconds from the signal to the end, which must be a good one, within PATIENCE: cleanup done,
    exit code 0.
    """
    began = time.monotonic()
    served.process.send_signal(number)
    await served.next_value("closed")
    await served.next_value("returned")
    async with asyncio.timeout(PATIENCE):
        assert await served.process.wait() == 0
    return time.monotonic() - began


async def test_call_is_answered(shared: Listening) -> None:
    head, body = await shared.post("/rpc", ADD)
    assert head.startswith(b"http/1.1 200")
    assert json.loads(body)["result"] == 3
    head, body = await shared.post("/rpc", b'{"jsonrpc":"2.0","method":"unknown"}')
    assert head.startswith(b"http/1.1 204")
    assert body == b""


@pytest.mark.parametrize(
    ("server", "how"),
    [
        ("granian", "granian (RSGI, uvloop)"),
        ("granian without uvloop", "granian (RSGI, asyncio)"),
        ("granian-asgi", "granian (ASGI, uvloop)"),
        ("uvicorn", "uvicorn (ASGI, uvloop)"),
        ("uvicorn without uvloop", "uvicorn (ASGI, asyncio)"),
    ],
)
async def test_first_line_says_how_it_serves(server: str, how: str) -> None:
    async with serving(server) as served:
        assert served.how == how
        assert b'"result":3' in (await served.post("/rpc", ADD))[1]
        assert await ends(served) < PATIENCE


async def test_header_value_that_is_not_ascii_is_not_lost(shared: Listening) -> None:
    assert (await shared.post("/rpc", ADD, b"X-Name: J\xf6rg"))[0].split(b" ")[1] == b"200"
    head, body = await shared.post("/rpc", ADD, b"Idempotency-Key: schl\xfcssel")
    assert (head.split(b" ")[1], b"expected ASCII" in body) == (b"400", True)


async def test_stream_whose_endpoint_fails_does_not_look_complete(shared: Listening) -> None:
    for _ in range(5):
        assert not (await shared.raw(post("/broken"))).endswith(b"0\r\n\r\n")
    assert b'"result":3' in (await shared.post("/rpc", ADD))[1]


async def test_many_calls_on_one_connection(shared: Listening) -> None:
    reader, writer = await shared.connect()
    async with asyncio.timeout(PATIENCE):
        for _ in range(50):
            writer.write(post("/rpc", ADD))
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            size = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            assert json.loads(await reader.readexactly(size))["result"] == 3
    writer.close()


async def test_body_in_single_bytes_is_put_together(shared: Listening) -> None:
    reader, writer = await shared.connect()
    head = post("/rpc", b"", b"Transfer-Encoding: chunked", b"Connection: close")
    writer.write(head)
    for byte in ADD:
        writer.write(b"1\r\n" + bytes([byte]) + b"\r\n")
        await writer.drain()
    writer.write(b"0\r\n\r\n")
    async with asyncio.timeout(PATIENCE):
        assert b'"result":3' in await reader.read()
    writer.close()


@pytest.mark.parametrize("path", ["/rpc", "/mcp"])
async def test_malformed_chunks_are_400(shared: Listening, path: str) -> None:
    for chunks in (
        b"zz\r\nhello\r\n",
        b"3\r\nhello\r\n",
        b"-1\r\n{\r\n",
        b"1\r\n{\r\nzz\r\n",
        b"1\r\n{\r\n0\r\nno field\r\n\r\n",
    ):
        head = await shared.raw(
            post(path, chunks, b"Transfer-Encoding: chunked", b"Connection: close")
        )
        assert head.split(b" ")[1] == b"400", (chunks, head)
    assert (await shared.post("/rpc", ADD))[0].startswith(b"http/1.1 200")


# Over ASGI, granian does not show the host of a target to an application.
@pytest.mark.parametrize(
    "shared", [each for each in SERVERS if each != "granian-asgi"], indirect=True
)
async def test_absolute_target_must_name_an_own_host(shared: Listening) -> None:
    for target, status in {
        "http://evil.example/rpc": b"403",
        "http://localhost@evil.example/rpc?x": b"403",
        "http://localhost:1/rpc?x=http://evil.example": b"200",
    }.items():
        assert (await shared.post(target, ADD))[0].split(b" ")[1] == status, target


async def test_header_values_are_stripped_and_duplicates_are_seen(shared: Listening) -> None:
    _, body = await shared.post("/headers", b"", b"X-A:  one  ", b"X-A: two\t", b"X-Empty:")
    seen = json.loads(body)
    assert seen["x-a"] == ["one", "two"]
    assert seen["x-empty"] == [""]


async def test_host_and_origin_are_checked(shared: Listening) -> None:
    for head, status in {
        b"": b"400",
        b"Host: localhost\r\nHost: localhost\r\n": b"400",
        b"Host: evil.example\r\n": b"403",
        b"Host: localhost\r\nOrigin: http://evil.example\r\n": b"403",
        b"Host: 127.0.0.1:1\r\nOrigin: http://localhost:5173\r\n": b"200",
    }.items():
        data = b"GET /headers HTTP/1.1\r\n" + head + b"Connection: close\r\n\r\n"
        assert (await shared.raw(data)).split(b" ")[1] == status, head


async def test_browser_asks_and_reads(shared: Listening) -> None:
    page = b"Origin: https://app.example"
    for path in ("/rpc", "/mcp"):
        asked = post(
            *(path, b"", page, b"Access-Control-Request-Method: POST", b"Connection: close"),
            b"Access-Control-Request-Headers: content-type, mcp-method",
            method=b"OPTIONS",
        )
        head = (await shared.raw(asked)).lower()
        assert head.startswith(b"http/1.1 204")
        assert b"access-control-allow-headers: content-type, mcp-method\r\n" in head
        head, body = await shared.post(path, b"{", page)
        assert b"access-control-allow-origin: https://app.example\r\n" in head
        assert json.loads(body)["error"]["code"] == -32700


async def test_body_over_the_limit_is_refused_before_it_is_sent(shared: Listening) -> None:
    head = await shared.raw(post("/rpc", b"", b"Content-Length: 1001"))
    assert b" 413 " in head
    assert b'"limit":"bytes_in"' in head
    chunked = post("/rpc", b"400\r\n" + b" " * 0x400 + b"\r\n", b"Transfer-Encoding: chunked")
    assert b" 413 " in await shared.raw(chunked)


@every_server
async def test_client_that_sends_everything_before_it_reads_gets_the_reason(server: str) -> None:
    def upload() -> int:
        connection = HTTPConnection("127.0.0.1", served.port, timeout=PATIENCE)
        with closing(connection):
            connection.request(
                "POST", "/rpc", b" " * (16 << 20), {"Content-Type": "application/json"}
            )
            return connection.getresponse().status

    async with serving(server, linger=PATIENCE) as served:
        assert await asyncio.to_thread(upload) == 413


async def test_header_over_the_limit_is_refused(shared: Listening) -> None:
    assert b" 431 " in (await shared.raw(post("/rpc", ADD, b"X-Long: " + b"x" * 9000)))[:20]


async def test_header_without_an_end_is_refused(shared: Listening) -> None:
    reader, writer = await shared.connect()
    writer.write(b"POST /rpc HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
    async with asyncio.timeout(PATIENCE):
        reading = asyncio.create_task(reader.read())
        try:
            while not reading.done():
                writer.write(b"x" * 4096)
                await writer.drain()
        except ConnectionError:
            pass
        await asyncio.wait({reading})
    _ = reading.exception()
    writer.close()
    assert (await shared.post("/rpc", ADD))[0].startswith(b"http/1.1 200")


@every_server
async def test_request_that_does_not_arrive_times_out(server: str) -> None:
    async with serving(server, body_time=1.0) as served:
        slow = [b"", b"POST /rpc HT", post("/rpc", b"", b"Content-Length: 10") + b"{"]
        answers = await asyncio.gather(*map(served.raw, slow))
        assert b" 408 " in answers[2]
        assert not any(b" 200 " in answer for answer in answers)


# --- stopping -------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_signal_ends_the_server_with_0_after_cleanup(
    server: str, number: signal.Signals
) -> None:
    async with serving(server, grace=2 * PATIENCE) as served:
        _, idle = await served.connect()
        assert (await served.post("/rpc", ADD))[0].startswith(b"http/1.1 200")
        await ends(served, number)
        idle.close()


async def opened(served: Served, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await served.connect()
    writer.write(post(path))
    async with asyncio.timeout(PATIENCE):
        await reader.readuntil(b"hello")
    return reader, writer


@every_server
async def test_streams_are_asked_to_end(server: str) -> None:
    async with serving(server, grace=2 * PATIENCE) as served:
        streams = [await opened(served, "/polite") for _ in range(20)]
        await ends(served)
        for reader, writer in streams:
            assert b"bye" in await reader.read()
            writer.close()


@every_server
async def test_streams_that_do_not_end_are_cut_in_time(server: str) -> None:
    async with serving(server, grace=4.0) as served:
        streams = [await opened(served, "/stubborn") for _ in range(20)]
        assert await ends(served) > 2.5, "three seconds are the streams'"
        for reader, writer in streams:
            assert b"0\r\n\r\n" not in await reader.read(), (
                "the stream looks as if it were complete"
            )
            writer.close()


@every_server
async def test_dead_peers_do_not_delay_the_end(server: str) -> None:
    async with serving(server, grace=4.0) as served:
        half = post("/rpc", b"", b"Content-Length: 10")
        with ExitStack() as stack:
            for data in (b"", half[:20], half, post("/flood"), post("/large")):
                stack.enter_context(peers(served, 5, data))
            assert (await served.post("/rpc", ADD))[0].startswith(b"http/1.1 200")
            await ends(served)


@both
async def test_thread_that_does_not_end_delays_nothing(server: str) -> None:
    """A thread cannot be ended.

    The application is still closed, and the process still ends in time.
    """
    async with serving(server, grace=2.0) as served:
        _, writer = await served.connect()
        writer.write(post("/rpc", call("nap", {"seconds": 2 * PATIENCE})))
        await served.next_value("napping")
        served.process.send_signal(signal.SIGTERM)
        await served.next_value("closed")
        async with asyncio.timeout(PATIENCE):
            assert await served.process.wait() == 0
        writer.close()


@both
async def test_clients_that_leave_at_the_end_do_not_disturb_the_server(server: str) -> None:
    for _ in range(sized(small=1, full=3)):
        async with serving(server, grace=4.0) as served:
            streams = [await opened(served, "/polite") for _ in range(30)]
            served.process.send_signal(signal.SIGTERM)
            for _, writer in streams:
                writer.close()
            async with asyncio.timeout(PATIENCE):
                assert await served.process.wait() == 0


@both
async def test_workers_serve_and_stop_together(server: str) -> None:
    async with serving(server, workers=2, grace=5.0) as served:
        for _ in range(10):
            assert (await served.post("/rpc", ADD))[0].startswith(b"http/1.1 200")
        _, writer = await opened(served, "/stubborn")
        served.process.send_signal(signal.SIGTERM)
        await served.next_value("closed")
        await served.next_value("closed")
        await served.next_value("returned")
        assert await served.process.wait() == 0
        writer.close()


@both
async def test_query_that_crashes_its_worker_does_not_end_the_server(server: str) -> None:
    """Workers restart, however often it is called."""
    async with serving(server, workers=2, grace=5.0) as served:

        async def answer(message: bytes) -> bytes:
            try:
                return await served.raw(post("/rpc", message, b"Connection: close"))
            except ConnectionError:  # no worker is there, or it has just ended
                return b""

        for _ in range(8):
            assert await answer(call("crash")) == b""

        async def answers() -> bool:
            return b'"result":3' in await answer(ADD)

        await eventually(answers)
        served.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE):
            assert await served.process.wait() == 0


@both
async def test_sockets_send_without_delay_and_the_kernel_ends_dead_readers(server: Any) -> None:
    """Small pieces of a stream leave at once, and a client that takes no byte for `write_time` is
    cut.
    """
    stop = asyncio.Event()
    listening = asyncio.Event()
    with bind("127.0.0.1", 0) as bound:
        app = make_server(Limits(write_time=7.0))
        running = asyncio.create_task(
            serve_until(app, bound, server=server, stop=stop, serving=listening.set)
        )
        async with asyncio.timeout(PATIENCE):
            await listening.wait()
            reader, writer = await asyncio.open_connection(*bound.getsockname())
            writer.write(post("/polite"))
            await reader.readuntil(b"hello")
            accepted = []
            for name in os.listdir("/dev/fd"):
                with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as each:
                    if each.getpeername() == writer.get_extra_info("sockname"):
                        accepted.append(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
                        if sys.platform == "linux":
                            accepted.append(
                                each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                            )
            assert accepted == ([1, 7000] if sys.platform == "linux" else [1])
            stop.set()
            await running
        writer.close()


def test_port_in_use_has_a_readable_error() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(UsageError, match="use another port="),
    ):
        bind("127.0.0.1", taken.getsockname()[1])
    with bind("127.0.0.1", 0) as ours:
        ours.listen()
        with pytest.raises(UsageError, match="use another port="):
            bind("127.0.0.1", ours.getsockname()[1])  # workers share a port, servers do not
    for port in (-1, 65_536):  # the system would take it modulo 65536
        with pytest.raises(UsageError, match=f"port must be a number from 0 to 65535, got {port}"):
            bind("127.0.0.1", port)
    with pytest.raises(
        UsageError, match="server must be one of granian, granian-asgi, uvicorn, got 'apache'"
    ):
        serve(lambda: None, server="apache")  # type: ignore[arg-type, return-value]


# --- slow and dead peers --------------------------------------------------------------------------


@contextmanager
def peers(
    served: Served, count: int, data: bytes, buffer: int = 4096
) -> Iterator[list[socket.socket]]:
    """Yield clients that send this, and then do not read, write or leave."""
    with ExitStack() as stack:
        opened = []
        for _ in range(count):
            peer = stack.enter_context(socket.socket())
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            peer.settimeout(PATIENCE)
            peer.connect(("127.0.0.1", served.port))
            peer.sendall(data)
            opened.append(peer)
        yield opened


@pytest.mark.skipif(
    sys.platform != "linux",
    reason="counts the files of the server, and TCP_USER_TIMEOUT is Linux's",
)
@every_server
async def test_client_that_does_not_read_is_cut(server: str) -> None:
    async with serving(server, write_time=1.0) as served:
        files = Path(f"/proc/{served.process.pid}/fd")
        assert (await served.post("/rpc", ADD))[0].startswith(b"http/1.1 200")
        before = len(list(files.iterdir()))

        async def are_cut() -> bool:
            return len(list(files.iterdir())) <= before + 5

        for path in ("/flood", "/large", "/medium"):
            with peers(served, 40, post(path)) as silent:
                assert (await served.post("/rpc", ADD))[0].startswith(b"http/1.1 200")
                await eventually(are_cut)
                assert (await served.post("/rpc", ADD))[0].startswith(b"http/1.1 200")
                assert all(peer.recv(12) == b"HTTP/1.1 200" for peer in silent), (
                    f"a peer was not served: {path}"
                )


@every_server
@pytest.mark.parametrize("path", ["/watched", "/watched-stream"])
async def test_answer_whose_client_leaves_in_the_middle_is_lost(server: str, path: str) -> None:
    """Also if the server takes all pieces at once, because the client has left.

    An answer that is read is written.
    """
    async with serving(server) as served:
        for nth in range(sized(small=4, full=10)):
            with peers(served, 1, post(path)) as (peer,):
                assert len(await asyncio.to_thread(peer.recv, 100)) == 100
                # Every other time the server has time to write all that it can.
                for _ in range(nth % 2 * 5):
                    await served.post("/rpc", ADD)
            assert await served.next_value("answer") == "lost"
            _, body = await served.post(path)
            assert body.count(b"x") == LONG
            assert await served.next_value("answer") == "written"


class ClosedAtOnce:
    """RSGI over a real connection, which client and server have closed by the time the server has
    taken the last piece.
    """

    proto = "http"
    method = "POST"
    path = "/"
    authority = None
    headers = Fields([(b"host", b"localhost"), (b"content-length", b"0")])

    def __init__(self, length: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.reader = socket.create_connection(listener.getsockname())
            self.writer, _ = listener.accept()
        self.client = ":".join(map(str, self.reader.getsockname()))
        self.server = "127.0.0.1:0"
        self.left = length
        for end in (self.reader, self.writer):
            end.setblocking(False)

    async def __call__(self) -> bytes:
        return b""

    def client_disconnect(self) -> "asyncio.Future[None]":
        return asyncio.get_running_loop().create_future()

    def response_stream(self, status: int, headers: Any) -> "ClosedAtOnce":
        return self

    async def send_bytes(self, piece: bytes) -> None:
        async def read() -> None:
            unread = len(piece)
            while unread:
                unread -= len(await loop.sock_recv(self.reader, unread))

        loop = asyncio.get_running_loop()
        await asyncio.gather(loop.sock_sendall(self.writer, piece), read())
        self.left -= len(piece)
        if not self.left:
            self.reader.close()
            self.writer.shutdown(socket.SHUT_RDWR)  # and the process still has the file


@pytest.mark.skipif(
    sys.platform != "linux", reason="finds the socket among the files of the process"
)
async def test_answer_that_was_read_is_written_however_soon_its_connection_closes() -> None:
    written: list[bool] = []

    async def endpoint(request: HttpRequest) -> None:
        request.receipt = Receipt(request.watch)
        request.receipt.listen(written.append)
        await request.respond(200, b"x" * length)

    length = 1 << 20
    connection = ClosedAtOnce(length)
    async with asyncio.timeout(PATIENCE):
        await HttpServer({"/": endpoint}).__rsgi__(cast(Any, connection), connection)
    connection.writer.close()
    assert (connection.left, written) == (0, [True])


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@contextmanager
def held(served: Served) -> Iterator[None]:
    """Stop the server for the block: it sees all events of that time at once."""
    served.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        served.process.send_signal(signal.SIGCONT)


@pytest.mark.skipif(sys.platform != "linux", reason="counts the files of the server")
@every_server
async def test_connection_that_is_reset_before_it_is_accepted_leaves_nothing_behind(
    server: str,
) -> None:
    async with serving(server) as served:
        await served.post("/rpc", ADD)
        folder = f"/proc/{served.process.pid}/fd"
        before = len(os.listdir(folder))

        async def are_closed() -> bool:
            return len(os.listdir(folder)) <= before

        with held(served):
            for number in range(20):
                connection = socket.create_connection(("127.0.0.1", served.port))
                connection.sendall(post("/rpc", ADD)[: 10 * number])
                reset(connection)
        assert (await served.post("/rpc", ADD))[0].startswith(b"http/1.1 200")
        await eventually(are_closed)
        await ends(served)


class FromOnePort(asyncio.Transport):
    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 50_000) if name in ("peername", "sockname") else default

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...


async def test_client_may_reconnect_from_the_port_of_a_connection_that_it_has_reset() -> None:
    """The server may see the new connection before the end of the old one: about once in 300 times."""
    with bind("127.0.0.1", 0) as bound:
        front = Uvicorn(make_server(Limits()), bound)
        config: Any = front._server.config
        state = front._server.server_state
        first, second = [
            config.http_protocol_class(config=config, server_state=state, app_state={})
            for _ in range(2)
        ]
        first.connection_made(FromOnePort())
        second.connection_made(FromOnePort())
        first.connection_lost(None)
        assert list(front._connections.values()) == [second.connection]
        second.connection_lost(None)
        assert not front._connections


@both
async def test_dead_peers_do_not_delay_other_clients(server: str) -> None:
    count = min(500, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200) // 2)
    share = count // 4
    drip = post("/rpc", b"", b"Content-Length: 100")
    async with serving(server, write_time=2 * PATIENCE) as served:
        with (
            peers(served, share, b""),
            peers(served, share, b"POST /rpc HTTP/1.1\r\nHost:"),
            peers(served, share, post("/flood")),
            peers(served, share, drip) as dripping,
        ):
            for _ in range(5):
                for peer in dripping:
                    peer.send(b" ")
                async with asyncio.timeout(PATIENCE):
                    head, body = await served.post("/rpc", ADD)
                assert head.startswith(b"http/1.1 200"), head
                assert json.loads(body)["result"] == 3
