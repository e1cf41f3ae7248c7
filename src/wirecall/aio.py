"""Coroutines driven by hand, and time limits of many tasks: the only place that does either.

1. `run_now` runs a coroutine to its end without an event loop; `first_step` begins one and `resume`
   continues it in the running task, so that a coroutine that does not wait costs no task.
2. `start` makes a task that begins in a later iteration of the loop. With
   `asyncio.eager_task_factory` (Python 3.12) a task runs until its first wait before `create_task`
   returns; code that keeps its tasks in a table relies on the usual order.
3. `Timeouts` are for blocks that nearly always end in time. A timer for each (`asyncio.timeout`)
   would be a third of the client's work for a call, and 6 µs of every HTTP request.
4. `Signal` is an event with callbacks: a task that only waits for an event takes 1 KB. `wake` sets
   a result.
5. `clock_from_boot` is for what must agree with a store, whatever happens to this machine.
"""

import asyncio
import math
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextvars import Context
from functools import partial
from typing import Any, Protocol, Self, TypeVar, cast

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
def beside(
    coroutine: Coroutine[Any, Any, T], on_wait: Callable[[], None]
) -> Generator[Any, Any, T]:
    """Await a coroutine in the running task; call `on_wait` when it first waits, if it does."""
    try:
        awaited = coroutine.send(None)
    except StopIteration as finished:
        result: T = finished.value
        return result
    on_wait()
    return (yield from resume(coroutine, awaited))


@types.coroutine
def resume(coroutine: Coroutine[Any, Any, T], awaited: Any) -> Generator[Any, Any, T]:
    """Await a coroutine that began in the running task and has asked to wait for `awaited`."""
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


async def timed(coroutine: Coroutine[Any, Any, T], note: Callable[[float], None]) -> T:
    """Await a coroutine in the running task.

    `note` gets the seconds for which each step blocked the loop.
    """
    return await _steps(coroutine, note)


@types.coroutine
def _steps(
    coroutine: Coroutine[Any, Any, T], note: Callable[[float], None]
) -> Generator[Any, Any, T]:
    step = partial(coroutine.send, None)
    while True:
        began = time.perf_counter()
        try:
            awaited = step()
        except StopIteration as finished:
            result: T = finished.value
            return result
        finally:
            note(time.perf_counter() - began)
        try:
            step = partial(coroutine.send, (yield awaited))
        except GeneratorExit:
            coroutine.close()
            raise
        except BaseException as error:
            step = partial(coroutine.throw, error)


def first_step(awaitable: Awaitable[Any]) -> tuple[bool, Any]:
    """Take the first step of an awaitable.

    Return True and its value, or False and the rest if it waits.
    """
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
    """Call a blocking function in a thread beside the loop."""

    def guarded() -> T:
        try:
            return call()
        # A future refuses one, the other closes its awaiter.
        except (StopIteration, GeneratorExit) as error:
            raise RuntimeError(f"the function raised {type(error).__name__}") from error

    return asyncio.to_thread(guarded)


def start(
    loop: asyncio.AbstractEventLoop,
    work: Coroutine[Any, Any, T],
    context: Context | None = None,
    name: str | None = None,
) -> "asyncio.Task[T]":
    """Make a task that begins in a later iteration.

    A user's factory may make the loop's tasks: it begins no earlier then.
    """
    if loop.get_task_factory() is None:
        return loop.create_task(work, name=name, context=context)

    async def in_a_later_turn() -> T:
        await asyncio.sleep(0)
        return await work

    task = loop.create_task(in_a_later_turn(), name=name, context=context)
    # If the task was cancelled before that turn, `work` was never awaited.
    task.add_done_callback(lambda _: work.close())
    return task


def wake(future: "asyncio.Future[T] | None", result: T) -> None:
    """Set a future's result, unless it is done or cancelled.

    None stands for a future that was not made.
    """
    if future is not None and not future.done():
        future.set_result(result)


async def cancel_all(*tasks: "asyncio.Task[Any] | None") -> None:
    """Cancel tasks, and wait until they have ended; None stands for a task that was not begun."""
    begun = [task for task in tasks if task is not None]
    for task in begun:
        task.cancel()
    await asyncio.gather(*begun, return_exceptions=True)


def needs_loop(error: BaseException) -> bool:
    """Return whether a handler failed because it needs an event loop and none is running."""
    return isinstance(error, RuntimeError) and str(error) == "no running event loop"


def is_closing(error: BaseException) -> bool:
    """Return whether the coroutine that caught an exception is being closed.

    A handler may also raise GeneratorExit itself. Python first closes the awaited coroutine, and
    then raises a new GeneratorExit in the one that awaits it. So that exception does not have a
    traceback from a frame below; a handler's own has one.
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


class Expiring(Protocol):
    """Something that a time limit ends."""

    def expire(self) -> None: ...


class Signal(asyncio.Event):
    """An event that calls functions when it is set."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: set[Callable[[], None]] = set()

    def listen(self, call: Callable[[], None]) -> None:
        """Call a function when the event is set; at once if it is set already."""
        if self.is_set():
            call()
        else:
            self._calls.add(call)

    def forget(self, call: Callable[[], None]) -> None:
        self._calls.discard(call)

    def set(self) -> None:
        super().set()
        for call in tuple(self._calls):
            call()


class Timeouts:
    """Time limits with one timer for all blocks.

    `with timeouts.within(30)` is like `async with asyncio.timeout(30)`.
    """

    def __init__(self) -> None:
        self._open: dict[Expiring, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        # Set for the earliest limit, or before it.
        self._timer: asyncio.TimerHandle | None = None
        # The loop time at which the timer fires.
        self._rings = math.inf

    def within(self, seconds: float) -> "Timeout":
        """Return a block that raises TimeoutError if it takes longer."""
        loop = asyncio.get_running_loop()
        return Timeout(self, loop, loop.time() + seconds)

    def watch(self, work: Expiring, when: float, loop: asyncio.AbstractEventLoop) -> None:
        """Let work expire at a time of the running loop, unless `forget` is called first."""
        self._open[work] = when
        if when < self._rings or self._loop is not loop:
            self.aclose()
            self._loop = loop
            self._timer = loop.call_at(when, self._ring)
            self._rings = when

    def forget(self, work: Expiring) -> None:
        """Stop watching.

        The timer remains: the next block probably needs it, and firing is cheap.
        """
        self._open.pop(work, None)

    def aclose(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._rings = math.inf

    def _ring(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._timer = None
        self._rings = math.inf
        for work in [work for work, when in self._open.items() if when <= now]:
            del self._open[work]
            work.expire()
        if self._open:
            self.watch(*min(self._open.items(), key=lambda each: each[1]), loop)


class Timeout:
    """The time limit of one block.

    It stores its loop: before Python 3.12, looking it up is a syscall.
    """

    __slots__ = ("_all", "_before", "_is_over", "_task", "loop", "when")

    def __init__(self, all: Timeouts, loop: asyncio.AbstractEventLoop, when: float) -> None:
        self.loop = loop
        # The loop time of the limit. None: it is suspended.
        self.when: float | None = when
        self._all = all
        self._is_over = False

    def __enter__(self) -> Self:
        task = asyncio.current_task(self.loop)
        assert task is not None and self.when is not None
        self._task = task
        self._before = task.cancelling()
        self._all.watch(self, self.when, self.loop)
        return self

    def move(self, when: float | None) -> None:
        """Set another time; None suspends the limit."""
        self.when = when
        self._all.forget(self)
        if when is not None:
            self._all.watch(self, when, self.loop)

    def expire(self) -> None:
        """End the block now."""
        if not self._is_over:
            self._is_over = True
            self._task.cancel()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._all.forget(self)
        # A task that was also cancelled by others stays cancelled.
        if (
            self._is_over
            and self._task.uncancel() <= self._before
            and kind is asyncio.CancelledError
        ):
            raise TimeoutError from error


def clock_from_boot() -> Callable[[], float]:
    """Return a clock that people cannot set, and that counts the time in which the machine sleeps.

    A system without one has a clock that stands still then.
    """
    number = getattr(time, "CLOCK_BOOTTIME", None)
    if number is None:
        return time.monotonic
    return partial(time.clock_gettime, number)
