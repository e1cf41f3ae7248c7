"""Tasks: begun in a later turn of the event loop, whatever kind of task the loop makes; and those of other threads' loops.

With `asyncio.eager_task_factory` (Python 3.12) a task runs until its first wait before its maker knows it, and may be over
by then. Who keeps its tasks in a table, or makes the next one from within, relies on the order that all other loops keep.

A loop sleeps until somebody of its own thread, or `call_soon_threadsafe`, wakes it. So what is done to a task of another
loop is done there.
"""

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import suppress
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


def is_alive(future: "asyncio.Future[Any]") -> bool:
    """Whether anything can become of it: a loop that was closed in the middle of its work will do no more."""
    return not future.get_loop().is_closed()


def at_home(future: "asyncio.Future[Any]", action: Callable[..., object], *args: Any) -> None:
    """Do something to a future in the loop that it belongs to."""
    loop = future.get_loop()
    if loop is asyncio.get_running_loop():
        action(*args)
        return
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(action, *args)


async def wait_for_all(tasks: "Sequence[asyncio.Future[Any]]", timeout: float) -> None:
    """Wait until they are over, whatever loops they are in; no longer than `timeout` seconds."""
    here = asyncio.get_running_loop()
    over = [here.create_future() for _ in tasks]
    for task, ended in zip(tasks, over, strict=True):
        at_home(task, task.add_done_callback, lambda _, ended=ended: at_home(ended, end, ended))
    if over:
        await asyncio.wait(over, timeout=timeout)


def end(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


@types.coroutine
def resume(coroutine: Coroutine[Any, Any, Any], awaited: Any) -> Generator[Any, Any, Any]:
    """Await a coroutine that was begun in the running task and has asked to wait for `awaited`."""
    while True:
        try:
            try:
                sent = yield awaited
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as error:
                awaited = coroutine.throw(error)
            else:
                awaited = coroutine.send(sent)
        except StopIteration as finished:
            return finished.value
