"""The entries of one batch, run side by side or one after another (J13).

`run_batch` starts the entries in array order. An entry that does not wait is finished before the next one begins, and
costs no task. The first entry that does wait keeps the task it began in, and a new worker goes on with the entries behind
it; so every handler lives in one task from its first line to its last, as `asyncio.timeout` and `TaskGroup` inside it
require, and tasks are made only for what really runs side by side.

Entries in the lane (commands, by default) run one at a time and in array order: while one of them waits, the next ones are
put aside, and the worker of the waiting one takes them up.
"""

import asyncio
import contextvars
import types
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Generic, TypeVar

from wirecall.stepping import beside, cancels, start

T = TypeVar("T")
E = TypeVar("E")


async def run_batch(
    entries: Sequence[E],
    begin: Callable[[E, int], "T | Coroutine[Any, Any, T]"],
    in_lane: Callable[[E], bool],
    *,
    concurrency: int,
) -> list[T]:
    """Return the outcome of every entry, in input order. `begin` returns the outcome, or a coroutine of it."""
    run = _Batch(entries, begin, in_lane, concurrency)
    try:
        await run.work()
        while run.workers:
            await asyncio.wait(run.workers)
    except GeneratorExit:  # closed from outside: it cannot wait any more
        run.cut()
        raise
    except BaseException:
        await run.stop()
        raise
    if run.aside:
        await run.stop()
    for worker in run.ended:
        worker.result()  # an outcome is never an exception: one that is raised here ends the whole batch
    return run.outcomes


class _Batch(Generic[E, T]):
    def __init__(
        self,
        entries: Sequence[E],
        begin: Callable[[E, int], "T | Coroutine[Any, Any, T]"],
        in_lane: Callable[[E], bool],
        concurrency: int,
    ) -> None:
        self.outcomes: list[Any] = [None] * len(entries)
        self.workers: set[asyncio.Task[None]] = set()
        self.ended: list[asyncio.Task[None]] = []
        self.aside: deque[tuple[int, Coroutine[Any, Any, T]]] = deque()
        self._rest: Iterator[tuple[int, E]] = enumerate(entries)
        self._begin = begin
        self._in_lane = in_lane
        self._free = concurrency - 1  # workers that may still join the first one
        self._lane_taken = False
        self._calm = cancels()  # the task of the sender may be cancelled already
        self._context = contextvars.copy_context()  # of the sender, for every worker that joins

    async def work(self) -> None:
        """Take entries until none are left."""
        outcomes, begin = self.outcomes, self._begin
        for position, entry in self._rest:
            outcome = begin(entry, position)
            if type(outcome) is not types.CoroutineType:
                outcomes[position] = outcome
            elif not self._in_lane(entry):
                outcomes[position] = await beside(outcome, self._join)
                self._check()
            elif self._lane_taken:
                self.aside.append((position, outcome))
            else:
                self._lane_taken = True
                outcomes[position] = await beside(outcome, self._join)
                self._check()
                while self.aside:
                    position, outcome = self.aside.popleft()
                    outcomes[position] = await outcome
                    self._check()
                self._lane_taken = False

    def _check(self) -> None:
        """Cancel the entries behind a handler that turned its cancellation into an answer."""
        if cancels() > self._calm:
            raise asyncio.CancelledError

    def _join(self) -> None:
        """Let another worker go on with the rest, while the entry at hand waits."""
        if self._free > 0:
            self._free -= 1
            worker = start(asyncio.get_running_loop(), self.work(), self._context.copy())
            self.workers.add(worker)
            worker.add_done_callback(self._leave)

    def _leave(self, worker: "asyncio.Task[None]") -> None:
        self._free += 1
        self.workers.discard(worker)
        self.ended.append(worker)

    def cut(self) -> None:
        """Begin no further entry, and cancel those in flight."""
        self._free = 0
        deque(self._rest, maxlen=0)
        while self.aside:
            self.aside.popleft()[1].close()
        for worker in self.workers:
            if not worker.get_loop().is_closed():
                worker.cancel()

    async def stop(self) -> None:
        """End a batch that is cancelled, without leaving a task or a coroutine behind."""
        self.cut()
        while self.workers:
            await asyncio.wait(self.workers)
