"""What a fork changes, kept until there is one: the number of the process, the running loop, random bytes.

To find any of them out is a system call, 0.3 to 4 us here, and a command would make a dozen. Python tells of every fork.
"""

import asyncio
import os
import sys
import threading
from collections import deque

pid = os.getpid()

_NONCE = 16
_nonces: deque[bytes] = deque()  # its methods are atomic: any thread may take from it


class _Here(threading.local):
    loop: asyncio.AbstractEventLoop | None = None  # the one that was found running in this thread last


_here = _Here()


def new_nonce() -> bytes:
    """128 random bits, that nobody else was given."""
    try:
        return _nonces.pop()
    except IndexError:
        many = os.urandom(64 * _NONCE)
        _nonces.extend(many[start : start + _NONCE] for start in range(_NONCE, len(many), _NONCE))
        return many[:_NONCE]


def running_loop() -> asyncio.AbstractEventLoop:
    """As `asyncio.get_running_loop`, which asks for the process's number every time until Python 3.12."""
    loop = _here.loop
    if getattr(loop, "_thread_id", None) == threading.get_ident():  # known while it runs; not every kind of loop tells
        assert loop is not None
        return loop
    _here.loop = loop = asyncio.get_running_loop()
    return loop


if sys.version_info >= (3, 12):
    running_loop = asyncio.get_running_loop


def loop_if_any() -> asyncio.AbstractEventLoop | None:
    """The running loop; None in a thread without one."""
    try:
        return running_loop()
    except RuntimeError:
        return None


def _forked() -> None:
    global pid
    pid = os.getpid()
    _nonces.clear()
    _here.loop = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
