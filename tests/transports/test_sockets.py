"""Sockets and framing, through real processes: a server is started, bytes are written, and what
comes back is read.
"""

import asyncio
import os
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.transports.socket_servers import PATIENCE, Server, command, peer, running
from wirecall import App
from wirecall.errors import UsageError
from wirecall.transports.framing import CONTENT_LENGTH, LINES, Framing, framing_of
from wirecall.transports.sockets import Address, address_of, listen_unix

pytestmark = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="Windows")

KINDS = ["unix lines", "unix content-length", "tcp lines", "tcp content-length"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Server, Framing]]:
    """A server of each kind."""
    transport, name = request.param.split()
    place = f"path={tmp_path}/own/rpc.sock" if transport == "unix" else "port=0"
    with running(tmp_path, transport, place, f"framing={name}") as server:
        yield server, framing_of(name)


@pytest.fixture
def unix(tmp_path: Path) -> Iterator[Server]:
    """A server of lines on a Unix socket."""
    with running(tmp_path, "unix", f"path={tmp_path}/own/rpc.sock") as server:
        yield server


@pytest.fixture
def framed(tmp_path: Path) -> Iterator[Server]:
    """A server of messages with headers on a TCP port."""
    with running(tmp_path, "tcp", "port=0", "framing=content-length") as server:
        yield server


# --- calls ----------------------------------------------------------------------------------------


async def test_socket_answers_calls_arrays_and_notifications(kind: tuple[Server, Framing]) -> None:
    server, framing = kind
    async with peer(server.address, framing) as client:
        assert (await client.call("add", {"a": 2, "b": 3}))["result"] == 5
        assert (await client.call("echo", {"text": "Zoë 👍"}))["result"] == "Zoë 👍"
        client.send("note", {"text": "first"})
        assert (await client.call("noted", id="x"))["result"] == ["first"]
        error = (await client.call("refuse"))["error"]
        assert (error["code"], error["message"]) == (4001, "sold out — leider")
        client.send_bytes(framing.join(b'[{"jsonrpc":"2.0","id":1,"method":"noted"}]'))
        assert await client.receive() == [{"jsonrpc": "2.0", "id": 1, "result": ["first"]}]


async def test_socket_serves_several_clients_at_once(kind: tuple[Server, Framing]) -> None:
    server, framing = kind
    async with peer(server.address, framing) as first, peer(server.address, framing) as second:
        first.send("forever", id=1)
        server.said("waiting")
        assert (await second.call("let_go"))["result"] == "open"
        assert (await first.receive())["result"] == "opened"


async def test_socket_answers_a_client_that_has_finished_sending(
    kind: tuple[Server, Framing],
) -> None:
    server, framing = kind
    async with peer(server.address, framing) as first, peer(server.address, framing) as second:
        first.send("forever", id=1)
        server.said("waiting")
        first.writer.write_eof()
        assert (await second.call("let_go"))["result"] == "open"
        assert (await first.receive())["result"] == "opened"
        assert await first.receive() is None


async def test_socket_refuses_a_message_above_the_limit_and_reads_the_next(
    kind: tuple[Server, Framing],
) -> None:
    server, framing = kind
    async with peer(server.address, framing) as client:
        refused = await client.call("echo", {"text": "x" * 20_000})
        assert refused["error"]["code"] == -32600
        assert refused["error"]["data"]["limit"] == "bytes_in"
        assert (await client.call("add", {"a": 2, "b": 3}))["result"] == 5


async def test_socket_server_answers_calls_in_flight_when_it_stops(
    kind: tuple[Server, Framing],
) -> None:
    server, framing = kind
    async with peer(server.address, framing) as first, peer(server.address, framing) as second:
        first.send("forever", id=1)
        server.said("waiting")
        await second.call("let_go")
        code = await asyncio.to_thread(server.end)
        assert code == 0
        assert (await first.receive())["result"] == "opened"
        assert await first.receive() is None


# --- streams that cannot be read ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (b"Content-Length: -5\r\n\r\n", "0 or more, got '-5'"),
        (b"Content-Length: ten\r\n\r\n", "expected a number as Content-Length, got 'ten'"),
        (b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n", "expected one Content-Length, got 2"),
        (b"X: " + b"x" * 20_000, "expected a header of at most 16384 bytes"),
        (b'{"jsonrpc":"2.0"}\r\n\r\n', "expected a field of a header"),
        (b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", "got 'POST / HTTP/1.1'"),
    ],
)
async def test_framed_socket_answers_a_wrong_header_and_closes(
    framed: Server, stream: bytes, expected: str
) -> None:
    async with peer(framed.address, CONTENT_LENGTH) as client:
        client.send("add", {"a": 2, "b": 3}, 1)
        client.send_bytes(stream)
        assert (await client.receive())["result"] == 5
        refused = await client.receive()
        assert (refused["id"], refused["error"]["code"]) == (None, -32700)
        assert expected in refused["error"]["data"]["reason"]
        assert await client.receive() is None


async def test_framed_socket_says_that_a_length_counts_characters(framed: Server) -> None:
    text = '{"jsonrpc":"2.0","id":1,"method":"echo","params":{"text":"Zoë"}}'
    frame = f"Content-Length: {len(text)}\r\n\r\n{text}".encode()
    async with peer(framed.address, CONTENT_LENGTH) as client:
        client.send_bytes(frame + frame)
        assert (await client.receive())["error"]["code"] == -32700
        refused = await client.receive()
        assert "count its bytes, not characters" in refused["error"]["data"]["reason"]
        assert await client.receive() is None


async def test_framed_socket_reports_a_length_that_is_too_long(framed: Server) -> None:
    async with peer(framed.address, CONTENT_LENGTH) as client:
        client.send_bytes(b"Content-Length: 50\r\n\r\n{}")
        client.writer.write_eof()
        refused = await client.receive()
        assert "ended after 2 bytes" in refused["error"]["data"]["reason"]
        assert await client.receive() is None


async def test_line_socket_does_not_run_the_body_of_an_http_request(tmp_path: Path) -> None:
    body = b'{"jsonrpc":"2.0","method":"note","params":{"text":"stolen"}}\n'
    with running(tmp_path, "tcp", "port=0") as server:
        async with peer(server.address, LINES) as client:
            client.send_bytes(b"POST / HTTP/1.1\r\nContent-Type: text/plain\r\n\r\n" + body)
            refused = await client.receive()
            assert "not a server of HTTP" in refused["error"]["data"]["reason"]
            assert await client.receive() is None
        async with peer(server.address, LINES) as client:
            assert (await client.call("noted"))["result"] == []


def test_framed_stdio_answers_and_ends_at_a_wrong_header(tmp_path: Path) -> None:
    call = b'{"jsonrpc":"2.0","id":1,"method":"add","params":{"a":2,"b":3}}'
    done = subprocess.run(
        command(tmp_path, "stdio", "framing=content-length"),
        input=CONTENT_LENGTH.join(call) + b"Content-Length: x\r\n\r\n" + CONTENT_LENGTH.join(call),
        capture_output=True,
        timeout=PATIENCE,
    )
    messages = CONTENT_LENGTH.splitter(10_000).feed(done.stdout)
    assert msgspec.json.decode(messages[0]) == {"jsonrpc": "2.0", "id": 1, "result": 5}
    assert len(messages) == 2
    assert b"expected a number as Content-Length, got 'x'" in messages[1]
    assert b"cannot be read: expected a number as Content-Length" in done.stderr


# --- cancelling -----------------------------------------------------------------------------------


@pytest.mark.parametrize("id", [7, "seven"])
async def test_cancel_request_ends_a_query_with_an_error(
    kind: tuple[Server, Framing], id: int | str
) -> None:
    server, framing = kind
    async with peer(server.address, framing) as client:
        client.send("forever", id=id)
        server.said("waiting")
        client.send("$/cancelRequest", {"id": id})
        answer = await client.receive()
        assert (answer["id"], answer["error"]["code"]) == (id, -32800)
        assert answer["error"]["data"] == {"type": "cancelled", "ran": "no"}
        assert (await client.call("add", {"a": 2, "b": 3}))["result"] == 5


async def test_cancel_request_of_a_command_does_not_say_that_nothing_ran(unix: Server) -> None:
    async with peer(unix.address, LINES) as client:
        client.send("put", {"text": "x"}, id=7)
        unix.said("putting")
        client.send("$/cancelRequest", {"id": 7})
        answer = await client.receive()
        assert answer["error"]["data"] == {"type": "cancelled", "ran": "unknown"}
        await client.call("let_go", id=8)


@pytest.mark.parametrize("params", [None, {"id": 99}, {"id": None}, {}, [7], {"id": {"a": 1}}])
async def test_cancel_request_without_its_call_has_no_effect(unix: Server, params: Any) -> None:
    async with peer(unix.address, LINES) as client:
        client.send("forever", id=7)
        unix.said("waiting")
        client.send("$/cancelRequest", params)
        assert (await client.call("let_go", id=8))["id"] == 8
        assert (await client.receive())["result"] == "opened"


# --- the user at the other end --------------------------------------------------------------------


async def test_unix_socket_names_the_user_as_caller(unix: Server) -> None:
    async with peer(unix.address, LINES) as client:
        assert (await client.call("who"))["result"] == f"uid:{os.getuid()}"


async def test_tcp_caller_is_anonymous(framed: Server) -> None:
    async with peer(framed.address, CONTENT_LENGTH) as client:
        assert (await client.call("who"))["result"] == ""


async def test_unix_socket_recognises_a_lost_command_on_another_connection(unix: Server) -> None:
    async with peer(unix.address, LINES) as first:
        first.send("put", {"text": "x"}, id=1)
        unix.said("putting")
    async with peer(unix.address, LINES) as second:
        second.send("put", {"text": "x"}, id=2)
        second.send("let_go", id=3)
        answers = {
            answer["id"]: answer["result"] for answer in [await second.receive() for _ in "ab"]
        }
        assert answers == {2: 1, 3: "open"}
        assert (await second.call("noted"))["result"] == ["x"]


# --- the file of a Unix socket --------------------------------------------------------------------


def test_unix_socket_makes_a_directory_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "own" / "rpc.sock"
    with listen_unix(str(path)):
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


def test_unix_socket_refuses_a_directory_of_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(UsageError, match=r"with mode 755\n  fix: .*chmod 700"):
        listen_unix(str(tmp_path / "rpc.sock")).__enter__()
    assert not (tmp_path / "rpc.sock").exists()


def test_unix_socket_replaces_the_file_of_a_server_that_has_ended(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = str(tmp_path / "rpc.sock")
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(path)
        ended.listen()
    with listen_unix(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(path)


def test_unix_socket_refuses_the_path_of_a_living_server(tmp_path: Path) -> None:
    path = str(tmp_path / "own" / "rpc.sock")
    with listen_unix(path):
        with pytest.raises(UsageError, match="Another server listens on unix:"):
            listen_unix(path).__enter__()
        assert os.path.exists(path)


def test_unix_socket_refuses_to_replace_another_file(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / "rpc.sock"
    path.write_text("precious")
    with pytest.raises(UsageError, match="is not a socket"):
        listen_unix(str(path)).__enter__()
    assert path.read_text() == "precious"


def test_unix_socket_refuses_a_path_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected at most 103 bytes"):
        listen_unix(str(tmp_path / ("x" * 104))).__enter__()


# --- options --------------------------------------------------------------------------------------


def test_app_run_tcp_serves_only_the_loopback_without_permission() -> None:
    with pytest.raises(UsageError, match=r"0\.0\.0\.0 is not the loopback.*\n.*\n.*allow_remote"):
        App("shop").run("tcp", host="0.0.0.0", port=0)


def test_app_run_tcp_refuses_an_app_that_authenticates() -> None:
    with pytest.raises(UsageError, match="TCP has no header for a token"):
        App("shop", authenticate=lambda _header: "ada").run("tcp", port=0)


def test_app_run_unix_needs_a_path() -> None:
    with pytest.raises(UsageError, match="needs the path of its socket"):
        App("shop").run("unix")


def test_app_run_refuses_an_unknown_framing() -> None:
    options: Any = {"framing": "chunks"}
    with pytest.raises(UsageError, match="'chunks' is not a framing"):
        App("shop").run("stdio", **options)


def test_address_of_reads_both_forms() -> None:
    assert address_of("unix:/run/shop.sock") == Address(path="/run/shop.sock")
    assert address_of("unix:///run/shop.sock") == Address(path="/run/shop.sock")
    assert address_of("tcp://[::1]:8421") == Address(host="::1", port=8421)
    assert str(Address(host="::1", port=8421)) == "tcp://[::1]:8421"


@pytest.mark.parametrize(
    "text", ["unix:shop.sock", "unix:", "tcp://", "tcp://host", "tcp://host:x", "tcp://a:1/rpc"]
)
def test_address_of_refuses_other_forms(text: str) -> None:
    with pytest.raises(UsageError, match="is not the address of"):
        address_of(text)
