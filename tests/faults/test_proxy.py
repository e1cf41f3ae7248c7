"""The proxy of these tests loses what it says that it loses."""

import socket
import time
from contextlib import closing

import pytest

from tests.faults.proxy import PATIENCE, Proxy
from wirecall.transports.tcp import HAS_TCP_INFO, tcp_state


@pytest.mark.skipif(not HAS_TCP_INFO, reason="the kernel does not report resets")
def test_proxy_that_has_cut_reads_no_answer() -> None:
    """Else the server would see an answer that was read, although its client never gets it."""
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as server,
        Proxy(server.getsockname()) as proxy,
    ):
        for _ in range(100):
            with socket.create_connection(("127.0.0.1", proxy.port), PATIENCE) as client:
                client.sendall(b"request")
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(PATIENCE)
                    assert connection.recv(100) == b"request"
                    proxy.cut()
                    connection.sendall(b"answer")
                    wait_for_reset(connection)


def wait_for_reset(connection: socket.socket) -> None:
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends:
        now = tcp_state(connection)
        if now is None or now.is_reset:
            return
        time.sleep(0.001)
    raise AssertionError("the answer was read")
