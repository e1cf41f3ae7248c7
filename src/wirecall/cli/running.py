"""Running a verb's coroutine: Ctrl-C cancels it politely, and the second one stops the program at once."""

import os
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from wirecall.cli.exits import Exit
from wirecall.cli.failures import Failure

T = TypeVar("T")


class Interrupted(Failure):
    """The user pressed Ctrl-C."""

    def __init__(self, why: str = "", next: str = "") -> None:
        super().__init__("Interrupted.", why, next, exit=Exit.INTERRUPTED, type="interrupted")


def run(work: Coroutine[Any, Any, T]) -> T:
    """The outcome of a coroutine, which is cancelled by Ctrl-C: calls under way tell their server so."""
    import asyncio

    asked = False

    async def guarded() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def interrupt(*_: object) -> None:
            nonlocal asked
            if asked:
                os._exit(Exit.INTERRUPTED)
            asked = True
            print("\nCancelling; Ctrl-C again stops at once.", file=sys.stderr, flush=True)
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
