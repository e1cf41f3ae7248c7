"""Tasks that begin in a later turn of the event loop, whatever kind of task the loop makes.

With `asyncio.eager_task_factory` (Python 3.12) a task runs until its first wait before its maker knows it, and may be over
by then. Who keeps its tasks in a table, or makes the next one from within, relies on the order that all other loops keep.
"""

import asyncio
from collections.abc import Coroutine
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")


def start(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], context: Context | None = None
) -> "asyncio.Task[T]":
    """A task in the running loop. If the user has set a factory, it makes this one too: it may watch all tasks."""
    if loop.get_task_factory() is None:
        return loop.create_task(work, context=context)
    task = loop.create_task(_in_a_later_turn(work), context=context)
    task.add_done_callback(lambda _: work.close())  # if the task was cancelled before that turn, nobody has awaited it
    return task


async def _in_a_later_turn(work: Coroutine[Any, Any, T]) -> T:
    await asyncio.sleep(0)
    return await work
