"""The entries of one batch, run concurrently or one after another (J13).

`run_batch` starts the entries in array order. An entry that does not wait finishes before the next
one begins, and costs no task. The first entry that waits keeps the task it began in, and a new
worker continues with the entries after it. So every handler stays in one task from its first line
to its last, as `asyncio.timeout` and `TaskGroup` require, and tasks are made only for entries that
really run concurrently.

Entries in the lane (commands, by default) run one at a time and in array order: while one of them
waits, the next ones are put aside, and the worker of the waiting one runs them.
"""

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import CoroutineType
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct, field

from wirecall.aio import beside, cancels, start

T = TypeVar("T")
E = TypeVar("E")
F = TypeVar("F")


class Outcomes(Protocol):
    """Takes the outcome of each entry by its position: a list, or a stream of answers."""

    def __setitem__(self, position: int, outcome: Any, /) -> None: ...


async def run_batch(
    frame: F,
    entries: Sequence[E],
    begin: Callable[[F, E, int], "T | Coroutine[Any, Any, T]"],
    in_lane: Callable[[E], bool],
    *,
    concurrency: int,
    into: Outcomes | None = None,
) -> list[T]:
    """Return the outcome of every entry, in input order, or put each into `into` when it is known.

    `begin` returns the outcome, or a coroutine of it.

    `frame` holds the facts that the entries share; `begin` receives it with each.
    """
    outcomes: list[Any] = [None] * len(entries)
    context = contextvars.copy_context()
    batch: _Batch[F, E, T] = _Batch(
        frame, enumerate(entries), into or outcomes, begin, in_lane, concurrency, cancels(), context
    )
    workers = batch.workers
    try:
        await batch.work()
        while workers:
            await asyncio.wait(workers)
        for worker in batch.made:
            worker.result()  # an outcome is never an exception: one raised here ends the batch
        return outcomes
    except BaseException as error:
        # Begin no more entries, cancel those in flight, and leave no task and no coroutine behind.
        deque(batch.rest, maxlen=0)
        while batch.aside:
            batch.aside.popleft()[1].close()
        for worker in workers:
            if not worker.get_loop().is_closed():
                worker.cancel()
        # A closed coroutine can no longer wait.
        while workers and not isinstance(error, GeneratorExit):
            await asyncio.wait(workers)
        raise


class _Batch(Struct, Generic[F, E, T], eq=False):
    # A class instead of closures: two functions that refer to each other would be a
    # garbage-collector cycle.

    frame: F
    rest: Iterator[tuple[int, E]]
    outcomes: Outcomes
    begin: Callable[[F, E, int], "T | Coroutine[Any, Any, T]"]
    in_lane: Callable[[E], bool]
    concurrency: int
    calm: int  # earlier cancellations of the sender's task
    context: contextvars.Context  # the sender's, for every worker that joins
    aside: deque[tuple[int, Coroutine[Any, Any, T]]] = field(default_factory=deque)
    made: list[asyncio.Task[None]] = []  # every worker except the first
    workers: set[asyncio.Task[None]] = set()  # those that have not ended
    lane_taken: bool = False

    async def work(self) -> None:
        """Run entries until none remain."""
        frame = self.frame
        outcomes = self.outcomes
        begin = self.begin
        aside = self.aside
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
                # A handler may turn its cancellation into an answer: later entries are cancelled
                # anyway.
                if cancels() > self.calm:
                    raise asyncio.CancelledError
                if not in_lane or not aside:
                    break
                position, outcome = aside.popleft()
                outcomes[position] = await outcome
            if in_lane:
                self.lane_taken = False

    def _join(self) -> None:
        """Let another worker continue with the rest while the current entry waits."""
        if len(self.workers) + 1 < self.concurrency:
            worker = start(asyncio.get_running_loop(), self.work(), self.context.copy())
            self.made.append(worker)
            self.workers.add(worker)
            worker.add_done_callback(self.workers.discard)
