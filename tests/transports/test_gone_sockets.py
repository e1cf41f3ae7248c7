"""Arrivals: a client may have left, and its socket may be closed, before its command begins."""

import asyncio
import contextlib
import socket
import sys

import pytest

from wirecall.protocol.receipt import Arrival, Receipt
from wirecall.transports.arrivals import Arrivals
from wirecall.transports.tcp import ClientAddress, address_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other kernels report too little")


def connected(listener: socket.socket) -> tuple[socket.socket, socket.socket, ClientAddress]:
    """Return both ends of a new connection, and the client's address."""
    client = socket.create_connection(listener.getsockname())
    accepted, _ = listener.accept()
    return client, accepted, address_of(client.getsockname()[:2])


@pytest.fixture
def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def gone_client(listener: socket.socket) -> ClientAddress:
    """Return the address of a client whose connection both sides have closed."""
    client, accepted, address = connected(listener)
    client.close()
    accepted.close()
    return address


async def seen_arrivals(listener: socket.socket) -> Arrivals:
    """Return arrivals that have found the socket of one client."""
    arrivals = Arrivals()
    client, accepted, address = connected(listener)
    with client, accepted:
        arrival = arrivals.attend(address, Receipt())
        assert arrival is not None
        arrival.close()
    return arrivals


async def test_arrivals_count_an_answer_as_lost_if_its_socket_is_closed(
    listener: socket.socket,
) -> None:
    with listener:
        arrivals = await seen_arrivals(listener)
        receipt = Receipt()
        assert arrivals.attend(gone_client(listener), receipt) is None
    assert receipt.arrival is Arrival.LOST


@pytest.mark.parametrize("is_first", [True, False])
async def test_arrivals_tell_connections_of_one_client_port_to_two_servers_apart(
    listener: socket.socket, is_first: bool
) -> None:
    """This process has both servers, and the client has left the other one."""
    other = socket.create_server(("127.0.0.1", 0))
    servers = [listener, other] if is_first else [other, listener]
    port = 0
    ends = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(listener)
        stack.enter_context(other)
        for server in servers:
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            client.bind(("127.0.0.1", port))
            port = client.getsockname()[1]
            client.connect(server.getsockname())
            ends[server] = client, stack.enter_context(server.accept()[0])
        ends[other][0].close()
        arrivals = Arrivals()
        receipt = Receipt()
        pair = ("127.0.0.1", port)
        arrival = arrivals.attend(address_of(pair, listener.getsockname()[1]), receipt)
        assert arrival is not None and receipt.arrival is Arrival.PENDING
        arrival.close()
        for end in ends[listener]:
            end.close()
        lost = Receipt()
        assert arrivals.attend(address_of(pair, listener.getsockname()[1]), lost) is None
        assert lost.arrival is Arrival.LOST


async def test_arrivals_do_not_judge_a_forwarded_request_without_a_socket(
    listener: socket.socket,
) -> None:
    """A proxy may have replaced the address: the socket is the proxy's."""
    with listener:
        arrivals = await seen_arrivals(listener)
        receipt = Receipt()
        assert arrivals.attend(gone_client(listener), receipt, is_forwarded=True) is None
    assert receipt.arrival is Arrival.PENDING


async def test_arrivals_do_not_judge_before_they_have_found_a_socket(
    listener: socket.socket,
) -> None:
    """The server may hold its sockets in another process."""
    with listener:
        receipt = Receipt()
        assert Arrivals().attend(gone_client(listener), receipt) is None
    assert receipt.arrival is Arrival.PENDING


async def test_arrivals_count_an_answer_as_lost_if_the_server_closes_before_it_writes(
    listener: socket.socket,
) -> None:
    """uvicorn closes its socket when the client ends its side, and drops the answer.

    The client ends its side after the server has checked, and before it hands the answer over.
    """
    with listener:
        arrivals = Arrivals()
        client, accepted, address = connected(listener)
        receipt = Receipt()
        lost = asyncio.Event()
        receipt.listen(lambda is_written: None if is_written else lost.set())
        arrival = arrivals.attend(address, receipt)
        assert arrival is not None and receipt.arrival is Arrival.PENDING
        arrival.due += 100
        arrivals.hand_over(arrival, is_stream=False, patience=3600.0)
        client.close()
        accepted.close()
        async with asyncio.timeout(60):
            await lost.wait()
