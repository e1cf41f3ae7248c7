"""Ports for servers that a test starts, or that no server may listen on.

The kernel's own choice (port 0) is free at that moment, but may become the local end of a
connection of any process before a server takes it or while a server restarts. These ports lie below
those that Linux gives to connections, and a locked file keeps each for the process that asked, as
long as that process lives.
"""

import fcntl
import os
import random
import socket
import tempfile
from contextlib import closing, suppress
from pathlib import Path

FOLDER = Path(tempfile.gettempdir(), "wirecall-ports")
# A node of a Redis cluster listens on a second port, this far above its first one.
COMPANION = 10_000
PORTS = range(10_240, 10_240 + COMPANION)


def free_port() -> int:
    """Return a port of the loopback whose companion is free as well, and which no other test
    process is given.
    """
    FOLDER.mkdir(exist_ok=True)
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        lock = os.open(FOLDER / str(port), os.O_RDWR | os.O_CREAT, 0o666)
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with (
                closing(socket.create_server(("127.0.0.1", port))),
                closing(socket.create_server(("127.0.0.1", port + COMPANION))),
            ):
                return port  # the lock stays open, and so held
        os.close(lock)
    raise RuntimeError(f"all ports from {PORTS.start} to {PORTS.stop - 1} are taken")
