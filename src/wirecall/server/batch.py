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
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import CoroutineType
from typing import Any, Generic, TypeVar

from msgspec import Struct, field

from wirecall.stepping import beside, cancels, start

T = TypeVar("T")
E = TypeVar("E")
F = TypeVar("F")


async def run_batch(
    frame: F,
    entries: Sequence[E],
    begin: Callable[[F, E, int], "T | Coroutine[Any, Any, T]"],
    in_lane: Callable[[E], bool],
    *,
    concurrency: int,
) -> list[T]:
    """Return the outcome of every entry, in input order. `begin` returns the outcome, or a coroutine of it.

    `frame` is what the entries share; `begin` gets it with each.
    """
    outcomes: list[Any] = [None] * len(entries)
    context = contextvars.copy_context()
    batch: _Batch[F, E, T] = _Batch(frame, enumerate(entries), outcomes, begin, in_lane, concurrency, cancels(), context)
    workers = batch.workers
    try:
        await batch.work()
        while workers:
            await asyncio.wait(workers)
        for worker in batch.made:
            worker.result()  # an outcome is never an exception: one that is raised here ends the whole batch
        return outcomes
    except BaseException as error:
        # Begin no further entry, cancel those in flight, and leave no task and no coroutine behind.
        deque(batch.rest, maxlen=0)
        while batch.aside:
            batch.aside.popleft()[1].close()
        for worker in workers:
            if not worker.get_loop().is_closed():
                worker.cancel()
        while workers and not isinstance(error, GeneratorExit):  # closed from outside, it cannot wait any more
            await asyncio.wait(workers)
        raise


class _Batch(Struct, Generic[F, E, T], eq=False):
    # A class and not closures: two functions that refer to each other would be a cycle for the garbage collector.

    frame: F
    rest: Iterator[tuple[int, E]]
    outcomes: list[Any]
    begin: Callable[[F, E, int], "T | Coroutine[Any, Any, T]"]
    in_lane: Callable[[E], bool]
    concurrency: int
    calm: int  # cancels of the sender's task that came before
    context: contextvars.Context  # of the sender, for every worker that joins
    aside: deque[tuple[int, Coroutine[Any, Any, T]]] = field(default_factory=deque)
    made: list[asyncio.Task[None]] = []  # every worker beside the first one
    workers: set[asyncio.Task[None]] = set()  # those of them that have not ended
    lane_taken: bool = False

    async def work(self) -> None:
        """Take entries until none are left."""
        frame, outcomes, begin, aside = self.frame, self.outcomes, self.begin, self.aside
        for position, entry in self.rest:
            outcome = begin(frame, entry, position)
            if type(outcome) is not CoroutineType:
                outcomes[position] = outcome
                continue
            in_lane = self.in_lane(entry)
            if in_lane and self.lane_taken:
                aside.append((position, outcome))
                continue
            self.lane_taken |= in_lane
            outcomes[position] = await beside(outcome, self._join)
            while True:
                # A handler may turn its cancellation into an answer: the entries behind it are cancelled all the same.
                if cancels() > self.calm:
                    raise asyncio.CancelledError
                if not in_lane or not aside:
                    break
                position, outcome = aside.popleft()
                outcomes[position] = await outcome
            if in_lane:
                self.lane_taken = False

    def _join(self) -> None:
        """Let another worker go on with the rest, while the entry at hand waits."""
        if len(self.workers) + 1 < self.concurrency:
            worker = start(asyncio.get_running_loop(), self.work(), self.context.copy())
            self.made.append(worker)
            self.workers.add(worker)
            worker.add_done_callback(self.workers.discard)
