"""A process and its successor: how they wait for each other."""

import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from wirecall.transports import succession
from wirecall.transports.succession import (
    KEEPER_VARIABLE,
    VARIABLE,
    Handover,
    Plan,
    Succession,
    Successor,
    note_failure,
    read_plan,
    wait_for,
)

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


SERVES = f"""
import os, socket
from wirecall.transports.succession import SERVING
socket.socket(fileno=int(os.environ[{VARIABLE!r}])).sendall(SERVING.pack(b"serving", 61.5))
"""


def test_successor_says_how_long_it_may_take_to_stop() -> None:
    """Its configuration may have another grace time than that of the process before it."""
    successor = Successor(Plan([sys.executable, "-c", SERVES], "/", dict(os.environ), Handover()))
    with successor.word:
        wait_for([successor.word], 60.0)
        assert successor.serves()
        assert successor.patience == 61.5
        successor.process.wait(60.0)


def test_keeper_gets_an_environment_that_is_not_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables are bytes. One variable with all of them could be too long for the system."""
    found: list[dict[str, str]] = []

    def execve(_path: str, _words: list[str], variables: dict[str, str]) -> None:
        found.append(variables)

    monkeypatch.setattr(os, "execve", execve)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    odd = {"NAME": "\udcff", "LONG": "x" * 200_000}
    command = [sys.executable, "-c", "pass"]
    made = Succession(odd)
    made.plan.command = command
    made.plan.folder = "/\udcfe"
    successor = Successor(Plan(command, "/", dict(os.environ), Handover()))
    try:
        made._become_keeper(successor)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        successor.end()
    [variables] = found
    assert max(len(value) for name, value in variables.items() if name != "LONG") < 10_000
    plan = read_plan(variables)
    assert KEEPER_VARIABLE not in variables
    assert (plan.environment, plan.folder) == (odd, "/\udcfe")
    assert plan.process == successor.process.pid


def test_successor_that_failed_and_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of its app may keep it: the server before it must not wait for that."""
    monkeypatch.setattr(succession, "LAST", 0.05)
    script = f"import os, signal; os.close(int(os.environ['{VARIABLE}'])); signal.pause()"
    plan = Plan([sys.executable, "-c", script], "/", dict(os.environ), Handover())
    successor = Successor(plan)
    wait_for([successor.word], 60.0)
    assert successor.serves() is False
    noting = threading.Thread(target=note_failure, args=[successor.process], daemon=True)
    noting.start()
    noting.join(60.0)
    is_noted = not noting.is_alive()
    successor.process.kill()
    successor.word.close()
    assert is_noted
    noting.join()
