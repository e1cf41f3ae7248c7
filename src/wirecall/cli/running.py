"""Running a verb's coroutine: Ctrl-C cancels it politely, and the second one stops the program at once."""

import os
import signal
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from wirecall.cli.exits import Exit
from wirecall.cli.failures import Failure

T = TypeVar("T")


class _Now:
    """What Ctrl-C finds."""

    reading = False
    idle = False
    asked = False  # it was pressed before


class Interrupted(Failure):
    """The user pressed Ctrl-C."""

    def __init__(self, why: str = "", next: str = "") -> None:
        super().__init__("Interrupted.", why, next, exit=Exit.INTERRUPTED, type="interrupted")


@contextmanager
def reading() -> Iterator[None]:
    """Around a read that may wait for long, and stops the event loop meanwhile: Ctrl-C ends it at once."""
    import asyncio

    _Now.reading = True
    try:
        if _Now.asked:  # the loop has not had the time to tell us
            raise asyncio.CancelledError
        yield
    finally:
        _Now.reading = False


@contextmanager
def idle() -> Iterator[None]:
    """Around a wait for the user's input, where Ctrl-C cuts nothing that a server is at work on."""
    _Now.idle = True
    try:
        yield
    finally:
        _Now.idle = False


def run(work: Coroutine[Any, Any, T]) -> T:
    """The outcome of a coroutine, which is cancelled by Ctrl-C: calls under way tell their server so."""
    import asyncio

    from wirecall.transports.child import kill_all

    _Now.asked = False

    async def guarded() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def interrupt(*_: object) -> None:
            if _Now.asked:
                kill_all()  # the servers that were started for this call
                os._exit(Exit.INTERRUPTED)
            _Now.asked = True
            if _Now.reading:
                print(file=sys.stderr, flush=True)  # behind the ^C that a terminal shows
                raise asyncio.CancelledError
            print("" if _Now.idle else "\nCancelling; Ctrl-C again stops at once.", file=sys.stderr, flush=True)
            loop.call_soon_threadsafe(task.cancel)

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            return await work
        finally:
            signal.signal(signal.SIGINT, before)

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        raise Interrupted from None
