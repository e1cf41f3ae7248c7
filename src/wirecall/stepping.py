"""Coroutines driven by hand: the only place that does it.

1. `run_now` runs a coroutine to its end without an event loop; `first_step` and `resume` begin one and go on with it in the
   running task, so that a coroutine that does not wait costs no task.
2. `start` makes a task that begins in a later turn of the loop. With `asyncio.eager_task_factory` (Python 3.12) a task runs
   until its first wait before its maker knows it; a maker that keeps its tasks in a table relies on the common order.
"""

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextvars import Context
from typing import Any, TypeVar, cast

from wirecall.errors import CannotWait

T = TypeVar("T")


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that does not wait; raise `CannotWait` for one that does."""
    try:
        coroutine.send(None)
    except StopIteration as finished:
        result: T = finished.value
        return result
    coroutine.close()
    raise CannotWait


@types.coroutine
def beside(coroutine: Coroutine[Any, Any, T], on_wait: Callable[[], None]) -> Generator[Any, Any, T]:
    """Await a coroutine in the running task; call `on_wait` when it waits for the first time, if it ever does."""
    try:
        awaited = coroutine.send(None)
    except StopIteration as finished:
        result: T = finished.value
        return result
    on_wait()
    return (yield from resume(coroutine, awaited))


@types.coroutine
def resume(coroutine: Coroutine[Any, Any, T], awaited: Any) -> Generator[Any, Any, T]:
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
            result: T = finished.value
            return result


def first_step(awaitable: Awaitable[Any]) -> tuple[bool, Any]:
    """Take the first step of an awaitable: return True and its value if it did not wait, else False and the rest of it."""
    if type(awaitable) is types.CoroutineType:
        try:
            return False, resume(awaitable, awaitable.send(None))
        except StopIteration as finished:
            return True, finished.value
    steps: Any = awaitable.__await__()
    try:
        return False, _rest(steps, next(steps))
    except StopIteration as finished:
        return True, finished.value


@types.coroutine
def _rest(steps: Iterator[Any], awaited: Any) -> Generator[Any, Any, Any]:
    yield awaited
    return (yield from steps)


async def settled(result: object) -> object:
    """Return the result of a function, awaited as long as it is an awaitable."""
    while hasattr(result, "__await__"):
        result = await cast(Awaitable[object], result)
    return result


def in_thread(call: Callable[[], T]) -> Awaitable[T]:
    """Call a function that blocks in a thread beside the loop."""

    def guarded() -> T:
        try:
            return call()
        except (StopIteration, GeneratorExit) as error:  # a future refuses the one, and the other closes its awaiter
            raise RuntimeError(f"the function raised {type(error).__name__}") from error

    return asyncio.to_thread(guarded)


def start(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], context: Context | None = None, name: str | None = None
) -> "asyncio.Task[T]":
    """Make a task that begins in a later turn, also where a factory of the user makes the loop's tasks."""
    if loop.get_task_factory() is None:
        return loop.create_task(work, name=name, context=context)

    async def in_a_later_turn() -> T:
        await asyncio.sleep(0)
        return await work

    task = loop.create_task(in_a_later_turn(), name=name, context=context)
    task.add_done_callback(lambda _: work.close())  # if the task was cancelled before that turn, `work` was never awaited
    return task


def needs_loop(error: BaseException) -> bool:
    """Return whether a handler failed because it needs an event loop and none is running."""
    return isinstance(error, RuntimeError) and str(error) == "no running event loop"


def is_closing(error: BaseException) -> bool:
    """Return whether the coroutine that caught an exception is being closed; a handler may also raise GeneratorExit itself.

    Python closes the coroutine that is awaited first, and then raises a new GeneratorExit in the one that awaits it. So that
    exception has no traceback from a frame below; a handler's own has.
    """
    trace = error.__traceback__
    return isinstance(error, GeneratorExit) and (trace is None or trace.tb_next is None)


def has_loop() -> bool:
    """Return whether an event loop is running in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def cancels() -> int:
    """Return how often the running task was cancelled; 0 without an event loop."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop
        return 0
    return task.cancelling() if task else 0
