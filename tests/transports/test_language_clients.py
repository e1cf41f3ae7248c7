"""Clients of language servers, each as it is published: python-lsp-jsonrpc, and vscode-jsonrpc.

Both send headers with `Content-Length`, and cancel with `$/cancelRequest`.
"""

import json
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, InvalidStateError
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from pylsp_jsonrpc.dispatchers import MethodDispatcher
from pylsp_jsonrpc.endpoint import Endpoint
from pylsp_jsonrpc.exceptions import JsonRpcException
from pylsp_jsonrpc.streams import JsonRpcStreamReader, JsonRpcStreamWriter

from tests.mcp.node import installed, node
from tests.transports.socket_servers import Server, command, running
from wirecall.transports.sockets import address_of

SCRIPT = Path(__file__).with_name("vscode_client.mjs")
# Seconds that an answer may take.
WAIT = 30.0
VSCODE = "vscode-jsonrpc@8.2.1"


# --- python-lsp-jsonrpc ---------------------------------------------------------------------------


class Counter(MethodDispatcher):  # type: ignore[misc]
    """Keeps the notifications of the server."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def m_counted(self, number: int) -> None:
        self.numbers.append(number)


@contextmanager
def pylsp(incoming: BinaryIO, outgoing: BinaryIO) -> Iterator[tuple[Any, list[Any]]]:
    """Yield an endpoint of python-lsp-jsonrpc, and the messages that it has received."""
    writer = JsonRpcStreamWriter(outgoing, ensure_ascii=False)
    counter = Counter()
    endpoint = Endpoint(counter, writer.write)
    received: list[Any] = []

    def take(message: Any) -> None:
        received.append(message)
        # It does not expect the answer to a call that it has cancelled.
        with suppress(InvalidStateError):
            endpoint.consume(message)

    reader = JsonRpcStreamReader(incoming)
    listening = threading.Thread(target=reader.listen, args=(take,), daemon=True)
    listening.start()
    try:
        yield endpoint, received
        assert counter.numbers == [0, 1, 2]
    finally:
        endpoint.shutdown()
        writer.close()
        listening.join(WAIT)
        reader.close()


def check(endpoint: Any, server: Server) -> None:
    """Make calls, a notification, a call that fails, a call that is cancelled, and a call during
    which the server sends notifications.
    """
    assert endpoint.request("add", {"a": 2, "b": 3}).result(WAIT) == 5
    assert endpoint.request("echo", {"text": "Zoë 👍"}).result(WAIT) == "Zoë 👍"
    endpoint.notify("note", {"text": "ü"})
    assert endpoint.request("noted").result(WAIT) == ["ü"]
    with pytest.raises(JsonRpcException, match="sold out — leider") as refused:
        endpoint.request("refuse").result(WAIT)
    assert (refused.value.code, refused.value.data) == (4001, {"left": 0})
    assert endpoint.request("count", {"n": 3}).result(WAIT) is True
    waiting = endpoint.request("forever")
    server.said("waiting")
    waiting.cancel()
    with pytest.raises(CancelledError):
        waiting.result(WAIT)
    assert endpoint.request("add", {"a": 1, "b": 1}).result(WAIT) == 2


def test_pylsp_jsonrpc_calls_a_server_on_stdio(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path, "stdio", "framing=content-length"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    server = Server(process)
    with process.stderr, pylsp(process.stdout, process.stdin) as (endpoint, received):  # type: ignore[arg-type]
        check(endpoint, server)
    assert server.end() == 0
    codes = [message["error"]["code"] for message in received if "error" in message]
    assert codes == [4001, -32800]


def test_pylsp_jsonrpc_calls_a_server_on_a_unix_socket(tmp_path: Path) -> None:
    words = ("unix", f"path={tmp_path}/own/rpc.sock", "framing=content-length")
    with running(tmp_path, *words) as server, socket.socket(socket.AF_UNIX) as client:
        client.connect(address_of(server.address).path)
        incoming = client.makefile("rb")
        outgoing = client.makefile("wb")
        with pylsp(incoming, outgoing) as (endpoint, received):
            check(endpoint, server)
            client.shutdown(socket.SHUT_WR)
    codes = [message["error"]["code"] for message in received if "error" in message]
    assert codes == [4001, -32800]


# --- vscode-jsonrpc -------------------------------------------------------------------------------


def vscode(*words: str) -> dict[str, Any]:
    """Return what vscode-jsonrpc gets from a server."""
    done = subprocess.run(
        [str(node()), str(SCRIPT), str(installed(VSCODE)), *words],
        stdout=subprocess.PIPE,
        timeout=WAIT,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


EXPECTED = {
    "sum": 5,
    "text": "Zoë 👍 日本",
    "noted": ["ü"],
    "counted": [0, 1, 2],
    "refused": {"code": 4001, "message": "sold out — leider", "data": {"left": 0}},
    "cancelled": {
        "code": -32800,
        "message": "Request cancelled",
        "data": {"type": "cancelled", "ran": "no"},
    },
}


def test_vscode_jsonrpc_calls_a_server_on_stdio(tmp_path: Path) -> None:
    found = vscode("stdio", *command(tmp_path, "stdio", "framing=content-length"))
    assert found.pop("unknown")["code"] == -32601
    assert found == EXPECTED


def test_vscode_jsonrpc_calls_a_server_over_tcp(tmp_path: Path) -> None:
    with running(tmp_path, "tcp", "port=0", "framing=content-length") as server:
        found = vscode("tcp", str(address_of(server.address).port))
    assert found.pop("unknown")["code"] == -32601
    assert found == EXPECTED
