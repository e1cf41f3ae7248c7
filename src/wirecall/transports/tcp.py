"""The connections of this process, as its kernel reports them.

A server's interface takes the bytes of an answer and reports nothing more about them. But its
sockets are files of this process. So this module finds the connection of a request by the client's
address, duplicates it and queries it (`TCP_INFO`, on Linux).
"""

import asyncio
import contextlib
import ctypes
import ipaddress
import os
import select
import socket
import struct
import sys
from collections.abc import Iterator
from stat import S_ISSOCK
from typing import NamedTuple

# Lists the open files of this process; Windows does not have it.
FILES = "/dev/fd" if os.path.isdir("/dev/fd") else ""
# Whether the kernel reports which bytes have arrived.
HAS_TCP_INFO = sys.platform == "linux" and bool(FILES)

# States of a connection in linux/tcp_states.h. In these the peer has ended its side: TIME_WAIT,
# CLOSE_WAIT, LAST_ACK, CLOSING.
PEER_ENDED = frozenset({6, 8, 9, 11})
ESTABLISHED = 1
CLOSED = 7
CLOSE_WAIT = 8
LISTEN = 10

# struct tcp_info of linux/tcp.h has these bytes since Linux 4.19.
INFO_BYTES = 216


# Of asm-generic/socket.h; Python has no name for it.
SO_ATTACH_FILTER = 26
# A program of the kernel's packet filter, over a TCP header: drop a packet with SYN and without ACK.
# An instruction has a code, two jumps and a number (linux/filter.h).
NO_HANDSHAKES = (
    (0x30, 0, 0, 13),  # load the byte with the flags
    (0x54, 0, 0, 0x12),  # of them, SYN and ACK
    (0x15, 0, 1, 0x02),  # skip one instruction unless it is SYN alone
    (0x06, 0, 0, 0),  # take nothing of the packet
    (0x06, 0, 0, 0xFFFFFFFF),  # take all of it
)


class ClientAddress(NamedTuple):
    """The client of a connection.

    The port of the server belongs to it: a system gives one port of a client to connections to
    several servers, and this process may have more sockets than those of one server.
    """

    # IP address and port of the client.
    host: object
    port: int
    # None: the server does not report its port.
    server: int | None = None


class TcpState(NamedTuple):
    """The kernel's report about a connection."""

    state: int
    # The bytes that the kernel has taken from the server since the connection began.
    taken: int
    # Of those, the bytes that the client's kernel has acknowledged.
    acknowledged: int
    # The bytes from the client.
    received: int
    # Whether the connection did not close cleanly.
    is_reset: bool

    @property
    def has_peer_ended(self) -> bool:
        """Whether the client has ended its side, or the connection is closed."""
        return self.state == CLOSED or self.state in PEER_ENDED


def tcp_state(connection: socket.socket) -> TcpState | None:
    """Return the kernel's report about a connection; None if it contains too little."""
    if not HAS_TCP_INFO:
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
    except OSError:
        return None
    if len(info) < INFO_BYTES:
        return None
    state = info[0]
    confirmed, received = struct.unpack_from("=QQ", info, 120)
    (waiting,) = struct.unpack_from("=I", info, 144)
    sent, again = struct.unpack_from("=QQ", info, 200)
    taken = waiting + sent - again
    is_reset = False
    if state == CLOSED:
        # A connection that closed cleanly has acknowledged the end of our side too, which counts as
        # a byte. If the server ended its side first, a reset may follow: then only this duplicate
        # holds the socket, and its error.
        has_end = confirmed > taken
        is_reset = not has_end or connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
    return TcpState(state, taken, min(confirmed, taken), received, is_reset)


def is_awaited(connection: socket.socket) -> bool:
    """Return whether a server that stops now would lose a request of this socket.

    Its connections are not accepted yet, or its bytes are not read yet, or it is a new connection,
    whose first bytes are on the wire. Only Linux reports it.
    """
    now = tcp_state(connection)
    if now is None:
        return False
    if now.state == LISTEN:
        return _queued(connection) > 0
    if now.state == ESTABLISHED and now.received == 0:
        return True
    return now.state in (ESTABLISHED, CLOSE_WAIT) and _unread(connection) > 0


def _queued(listening: socket.socket) -> int:
    """Return how many connections of a listening socket are not accepted."""
    info = listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
    # Of a listening socket, tcpi_unacked counts them.
    (queued,) = struct.unpack_from("=I", info, 24)
    return int(queued)


def _unread(connection: socket.socket) -> int:
    """Return how many bytes of a connection the process has not read."""
    from fcntl import ioctl  # Windows has neither
    from termios import FIONREAD

    (unread,) = struct.unpack("i", ioctl(connection, FIONREAD, bytes(4)))
    return int(unread)


def ignore_handshakes(listening: socket.socket) -> None:
    """Let a listening socket complete its handshakes, and begin no new ones.

    The kernel drops their first packet. The client sends it again after a second. If the socket is
    closed by then, another socket of the same address gets it.
    """
    if sys.platform != "linux":
        return
    program = b"".join(struct.pack("HBBI", *each) for each in NO_HANDSHAKES)
    kept = ctypes.create_string_buffer(program)
    value = struct.pack("HP", len(NO_HANDSHAKES), ctypes.addressof(kept))
    with contextlib.suppress(OSError):  # it is closed
        listening.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, value)


# --- finding a socket -----------------------------------------------------------------------------


def _descriptors() -> list[int]:
    """Return the open files of this process, if the system lists them."""
    if not FILES:
        return []
    return [int(name) for name in os.listdir(FILES)]


def open_sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of every socket of this process, open until the next one."""
    for file in _descriptors():
        with contextlib.suppress(OSError):
            # Only a socket may be duplicated: closing the duplicate of a SQLite file would drop its
            # locks (fcntl).
            if S_ISSOCK(os.fstat(file).st_mode):
                with socket.socket(fileno=os.dup(file)) as each:
                    yield each


def address_of(pair: "tuple[str, int | str]", server: int | None = None) -> ClientAddress:
    """Return a client's address as servers and sockets have it; ValueError if it is not IP.

    `server` is the port of the server.
    """
    host, port = pair
    # Rust and Python write the zone of an address differently, so it is omitted.
    plain = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    return ClientAddress(plain, int(port), server)


class Sockets:
    """Finds the socket of a client's connection.

    It caches sockets, because a search lists all files.
    """

    def __init__(self) -> None:
        # Inode and client of each file.
        self._files: dict[int, tuple[int, ClientAddress | None]] = {}
        self._by_client: dict[ClientAddress, int] = {}
        # Whether a search was successful. Without that, the addresses of clients may not be those
        # of sockets of this process.
        self.has_found = False

    def find(self, client: ClientAddress) -> tuple[socket.socket, int] | None:
        """Return a duplicate of the socket, and the server's descriptor; None if there is none."""
        found = self._cached(client)
        if found is None:
            self._search()
            found = self._cached(client)
        if found is not None:
            self.has_found = True
        return found

    def _cached(self, client: ClientAddress) -> tuple[socket.socket, int] | None:
        file = self._by_client.get(client)
        if file is None:
            return None
        duplicate = _duplicate(file, client)
        if duplicate is None:
            return None
        return duplicate, file

    def _search(self) -> None:
        before = self._files
        self._files = {}
        self._by_client = {}
        for file in _descriptors():
            with contextlib.suppress(OSError):
                status = os.fstat(file)
                if not S_ISSOCK(status.st_mode):
                    continue
                known = before.get(file)
                if known is None or known[0] != status.st_ino:
                    known = status.st_ino, _client_of(file)
                self._files[file] = known
                client = known[1]
                if client is not None:
                    self._by_client[client] = file
                    self._by_client[client._replace(server=None)] = file


def _duplicate(file: int, client: ClientAddress) -> socket.socket | None:
    """Return a duplicate of a file if it is the socket of a client's connection."""
    with contextlib.suppress(OSError, ValueError):
        if S_ISSOCK(os.fstat(file).st_mode):
            found = socket.socket(fileno=os.dup(file))
            with contextlib.suppress(OSError, ValueError):
                ends = _ends(found)
                if client in (ends, ends._replace(server=None)):
                    return found
            found.close()
    return None


def _client_of(file: int) -> ClientAddress | None:
    """Return the client of a socket; None if it is not connected, or not IP."""
    with contextlib.suppress(OSError, ValueError), socket.socket(fileno=os.dup(file)) as found:
        return _ends(found)
    return None


def _ends(connection: socket.socket) -> ClientAddress:
    """Return the client of a connection if this process is the server."""
    client = address_of(connection.getpeername()[:2])
    return client._replace(server=connection.getsockname()[1])


# --- waiting for a slow reader --------------------------------------------------------------------


class SendQueue:
    """The bytes of a stream that the server has and the kernel has not taken.

    `due` counts the bytes that the kernel must take. Counting begins in the middle of the stream:
    the server may still hold earlier bytes.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.due = self._taken() or 0

    async def until_ready(self, most: int) -> None:
        """Wait until the kernel can take bytes and at most `most` are due; OSError if it closed."""
        ready = asyncio.Event()
        state = select.poll()
        state.register(self.connection, select.POLLOUT)
        loop = asyncio.get_running_loop()
        while True:
            loop.add_writer(self.connection, ready.set)
            try:
                await ready.wait()
            finally:
                loop.remove_writer(self.connection)
            # A failed connection is ready, too, and granian takes bytes for it until its own thread
            # has noticed.
            if any(event & (select.POLLERR | select.POLLHUP) for _, event in state.poll(0)):
                raise ConnectionError("the client has left")
            taken = self._taken()
            if taken is None or taken >= self.due - most:
                return
            ready.clear()
            await asyncio.sleep(0.001)  # granian's own thread has not written yet

    def _taken(self) -> int | None:
        """Return the bytes that the kernel has taken; None if it does not report them."""
        now = tcp_state(self.connection)
        if now is None:
            return None
        return now.taken
