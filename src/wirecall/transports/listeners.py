"""Listening sockets: ours, not the servers', so that a taken port is told in words and the kernel cuts dead readers."""

import errno
import os
import socket
import sys

from wirecall.errors import UsageError

BACKLOG = 1024


def bind(host: str, port: int, *, shared: bool = False, listening: bool = True) -> socket.socket:
    """Return a listening socket, or one that only keeps the port. Several that are `shared` can have the same address.

    The kernel deals connections out evenly to shared sockets. From one socket that all workers have, the worker that wakes
    first takes every connection that waits: 64 at once went to one of four.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"Cannot listen on {host}.", str(error), "use an address of this machine") from error
    try:
        if os.name == "posix":  # elsewhere it would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Accepted sockets inherit it. granian does not ask for it, and the second event of a stream waited 40 ms for the
        # client's kernel to acknowledge the first.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
        if listening:
            listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        fix = "use an address of this machine" if error.errno == errno.EADDRNOTAVAIL else "use another port="
        raise UsageError(f"Cannot listen on {host}:{port}.", error.strerror or str(error), fix) from error
    return listener


def cut_dead_readers(listener: socket.socket, seconds: float) -> None:
    """Accepted sockets inherit it: the kernel ends a connection that takes no byte for so long, whoever holds the bytes.

    Measured with a client that never reads: under both servers the connection is gone in time, their buffers with it.
    """
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
