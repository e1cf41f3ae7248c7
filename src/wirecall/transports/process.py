"""What belongs to the whole process: its signals, and its stdin and stdout.

1. SIGTERM and SIGINT ask the server to end; the second one, to end at once. If it cannot, the process goes `LAST` seconds
   later.
2. Nothing but the protocol is on stdout. The two descriptors of the protocol are moved out of everybody's reach: what
   handlers, C libraries and child processes print goes to stderr, and what they read is empty.
3. All is put back at the end, for whoever goes on in this process.
"""

import _thread
import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from wirecall.errors import UsageError

LAST = 2.0  # seconds for what was cancelled to end, and for everything after the second signal


class Stop:
    """Called once, it asks the server to end; called twice, to end at once. Made to be called by a signal."""

    def __init__(self) -> None:
        self._asked = 0
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tell: Callable[[], None] | None = None

    def __call__(self, number: int = 0, _frame: FrameType | None = None) -> None:
        self._asked += 1
        if self._asked == 2:
            # Not a `threading.Thread`: the signal may have come while this very thread holds one of that module's locks.
            _thread.start_new_thread(self._watch, (number,))
        if self._tell is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._tell)

    def attach(self, tell: Callable[[], None]) -> None:
        self._loop, self._tell = asyncio.get_running_loop(), tell
        for _ in range(self._asked):  # before there was a loop
            self._loop.call_soon(tell)

    def detach(self) -> None:
        self._tell = None

    def close(self) -> None:
        self._closed = True

    def _watch(self, number: int) -> None:
        """Nobody can end a thread, or a handler that never gives the loop back: the process goes, and they go with it."""
        time.sleep(LAST)
        if not self._closed:
            os._exit(128 + number)


@contextlib.contextmanager
def signals(stop: Stop) -> Iterator[None]:
    """SIGTERM and SIGINT call `stop`, so that no KeyboardInterrupt is raised anywhere."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread has signals
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        stop.close()
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextlib.contextmanager
def woken_by_signals() -> Iterator[None]:
    """A signal may be taken by any thread, and its handler runs in the main one, which sleeps in the loop: wake it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    woken, waking = socket.socketpair()
    with woken, waking:
        woken.setblocking(False)
        waking.setblocking(False)
        loop.add_reader(woken, woken.recv, 64)
        before = signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            loop.remove_reader(woken)


@contextlib.contextmanager
def protocol_streams() -> Iterator[tuple[int, int]]:
    """The descriptors of the protocol, which no handler, C library or child process can reach (rule 2)."""
    reader, writer = _moved(0, "stdin"), _moved(1, "stdout")
    stdout = sys.stdout
    _flush(stdout)
    _replace(0, os.open(os.devnull, os.O_RDONLY))
    try:
        os.dup2(2, 1)
    except OSError:  # there is no stderr
        _replace(1, os.open(os.devnull, os.O_WRONLY))
    sys.stdout = sys.stderr
    try:
        yield reader, writer
    finally:
        _flush(stdout)
        _flush_c()
        sys.stdout = stdout
        _replace(0, reader)
        _replace(1, writer)


def _moved(fd: int, name: str) -> int:
    """A duplicate above the three standard descriptors, which children do not inherit."""
    import fcntl

    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    except OSError:
        raise UsageError(f"{name} is closed.", "the protocol needs stdin and stdout", "start the server with both") from None


def _replace(fd: int, by: int) -> None:
    os.dup2(by, fd)
    os.close(by)


def _flush(stream: Any) -> None:
    """What was printed before the change must not come out after it."""
    with contextlib.suppress(AttributeError, ValueError, OSError):  # there is none, it is closed, nobody reads it
        stream.flush()


def _flush_c() -> None:
    """The same for C's stdout, which has a buffer of its own."""
    try:
        import ctypes  # late: only at the end

        ctypes.CDLL(None).fflush(None)
    except (ImportError, OSError, AttributeError, TypeError):
        pass
