"""A process and its successor: how they wait for each other."""

import os
import resource
import socket
import time
from collections.abc import Iterator

import pytest

from wirecall.transports.succession import wait_for

# `select` takes no file from this number on.
HIGH = 1024


@pytest.fixture
def high() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A pair of sockets. The first one has a number as in a server with many connections."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most <= HIGH:
        pytest.skip("this user may not have so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit, HIGH + 1), most))
    first, second = socket.socketpair()
    with first, second, socket.socket(fileno=os.dup2(first.fileno(), HIGH)) as moved:
        yield moved, second
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


def test_wait_for_waits_with_the_files_of_a_busy_server(
    high: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = high
    began = time.monotonic()
    wait_for([ours], 0.05)
    assert time.monotonic() - began >= 0.05
    theirs.sendall(b"serving")
    wait_for([ours], 60.0)
    assert ours.recv(7) == b"serving"


def test_wait_for_ignores_a_closed_socket() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.close()
        wait_for([ours], 0.0)
