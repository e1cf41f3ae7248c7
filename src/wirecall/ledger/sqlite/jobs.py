"""What is asked of the writer of an SQLite ledger, and who waits for it."""

import asyncio
import concurrent.futures
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias

from wirecall.ledger.base import Claim

Kind: TypeAlias = Literal["write", "unclaim", "sweep", "begin", "complete", "nothing", "stop"]


class Job:
    """Something to be done, and the future of who waits for it, if anybody does.

    `work` is called inside a transaction; or, if it is a "write" that comes alone, outside of one, and each of its
    statements is one. What makes a `claim` has two shorter ways: a record that answers it is read, and then nobody waits for
    who writes; and the first claim of a record that comes alone is one statement. Both may find that it is not so.
    An "unclaim" is a write too; nobody waits for it, and it is tried until it is done.
    """

    __slots__ = ("asked_at", "claim", "error", "future", "kind", "loop", "result", "size", "work")

    def __init__(self, kind: Kind, work: Callable[..., Any], claim: Claim | None = None, size: int = 0) -> None:
        self.kind = kind
        self.work = work
        self.claim = claim
        self.size = size  # of what it writes, in bytes, where that can be much
        self.future: asyncio.Future[Any] | concurrent.futures.Future[Any] | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.asked_at = 0.0  # when it was sent to the thread, by `time.monotonic`
        self.result: Any = None
        self.error: Exception | None = None

    @property
    def is_over(self) -> bool:
        return self.result is not None or self.error is not None

    def cancel(self) -> None:
        """Nobody wants it any more. What is done is done; what is still on its way, or not even sent, does nothing."""
        self.work, self.claim, self.future = skip, None, None

    def answer(self) -> Any:
        """What came of it, for who has waited in person."""
        if self.error is not None:
            raise self.error
        return self.result


def settle(jobs: Iterable[Job]) -> None:
    """Tell those who wait; in the thread of their loop."""
    for job in jobs:
        future = job.future
        if future is None or future.done():  # cancelled: what was done is done
            continue
        if job.error is not None:
            future.set_exception(job.error)
        else:
            future.set_result(job.result)


def nothing() -> None:
    pass


def skip(*_: object) -> None:
    pass
