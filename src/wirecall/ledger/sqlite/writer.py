"""The thread that writes an SQLite ledger: all pending jobs go into one transaction and one fsync.

An event loop never waits for the disk: it hands its jobs over and is woken when they are committed.
While a handler has the write lock of the file, the thread does what that handler asks; all other
jobs wait for it, but not indefinitely.

One group is in flight at a time. With two, the commit of one overlaps with the loop's work on the
other, but the thread needs the GIL again after each statement, while the loop holds it: 64 commands
in flight took a sixth longer.
"""

import asyncio
import concurrent.futures
import copy
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Literal, Protocol

import apsw
from msgspec import Struct

from wirecall.errors import WirecallError
from wirecall.ledger.base import LedgerDown, Locked, Tables
from wirecall.ledger.sqlite.file import PATIENCE, SQL, LedgerFile, as_down
from wirecall.logs import logger

_writers: "weakref.WeakSet[Writer]" = weakref.WeakSet()
_from_before_fork: list["Writer"] = []


def _forked() -> None:
    """In a child, do not use or close the connections of its parent.

    SQLite would take them for its own.
    """
    for writer in list(_writers):
        writer.failure = LedgerDown(f"The ledger {writer.path} was opened before a fork.")
        _from_before_fork.append(writer)  # so they are not collected either


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class Job(Struct, eq=False):
    """Work for the thread, and the future of its caller.

    A "write" is called with a cursor inside a transaction, and with a fence if it `claims`. An
    "unclaim" is a write that no caller waits for; it is tried until it succeeds. "begin" and
    "complete" belong to a handler's own transaction; "nothing" waits for its turn, and needs no
    lock.
    """

    work: Callable[..., Any]
    kind: Literal["write", "unclaim", "begin", "complete", "nothing", "stop"] = "write"
    claims: bool = False
    asked_at: float = 0.0
    loop: asyncio.AbstractEventLoop | None = None
    future: asyncio.Future[Any] | concurrent.futures.Future[Any] | None = None
    result: Any = None
    error: Exception | None = None


def nothing(*_: object) -> None:
    """The work of a job that only waits for its turn."""


class Holder(Protocol):
    """A transaction that holds the write lock of the file for a handler."""

    is_dropped: bool

    def end(self) -> None: ...


class Writer:
    """The connections of one process to one file, and the thread that writes.

    The thread owns all of them but the one for reading.
    """

    file: LedgerFile

    def __init__(self, path: str, *, owner: object, tables: Tables) -> None:
        self.path = path
        self._tables: Tables = tables
        # Why the thread takes no more jobs; None: it does.
        self.failure: WirecallError | None = None
        # For the thread that has `reading`.
        self.reader: apsw.Cursor | None = None
        self.reading = threading.Lock()
        # The transaction of a handler that has the write lock.
        self.holder: Holder | None = None
        # A deque and a SimpleQueue: a job may be sent anywhere, even while garbage is collected.
        self._asked: deque[Job] = deque()
        self._bell: SimpleQueue[None] = SimpleQueue()
        # A loop that will ring at the end of its iteration.
        self._ringing: asyncio.AbstractEventLoop | None = None
        # Jobs that are taken from `_asked`, and not done yet.
        self._waiting: deque[Job] = deque()
        # Claims that could not be taken back; tried again with the next job.
        self._owed: deque[Job] = deque()
        # A daemon, so that a program that forgets to close can end; then, or when it forgets the
        # whole ledger, `_stop` lets the thread finish what it has begun.
        self._finalizer = weakref.finalize(owner, self._stop)
        self._thread = threading.Thread(
            target=self._run, name=f"wirecall ledger {path}", daemon=True
        )
        self._thread.start()
        _writers.add(self)

    async def ask(self, job: Job) -> Any:
        """Have a job done, and wait until it is on the disk.

        Without a running event loop, wait in the calling thread.
        """
        try:
            loop = job.loop = asyncio.get_running_loop()
        except RuntimeError:
            waiting = job.future = concurrent.futures.Future[Any]()
            self.send(job)
            return waiting.result()
        future = job.future = loop.create_future()
        self.send(job)
        try:
            return await future
        finally:
            job.future = None  # if the caller was closed, no error is set that is never retrieved

    def send(self, job: Job) -> None:
        """Have a job done, without waiting for it."""
        job.asked_at = time.monotonic()
        self._asked.append(job)
        if self.failure is not None:  # the thread may have ended before it could see the job
            self._refuse()
        elif job.loop is None:
            self._ring()
        # The thread wakes at the end of this loop iteration: by then, all tasks that are ready have
        # sent their jobs.
        elif self._ringing is not job.loop:
            job.loop.call_soon(self._ring)
            self._ringing = job.loop

    def drop(self, holder: Holder) -> None:
        """Undo a handler's transaction, unless it is over.

        This does not wait: a coroutine that is being closed cannot.
        """
        holder.is_dropped = True
        self._bell.put(None)

    async def aclose(self) -> None:
        """Do what was asked, and close the file."""
        if self.failure is None:
            await self.ask(Job(nothing, "stop"))

    def _ring(self) -> None:
        self._ringing = None
        if self._bell.empty():
            self._bell.put(None)

    def _stop(self) -> None:
        """The ledger was forgotten, or the program ends."""
        if self.failure is not None:
            return
        if self.holder is not None:  # no handler remains to complete it
            self.holder.is_dropped = True
        self.send(Job(nothing, "stop"))
        if threading.current_thread() is not self._thread:  # the garbage collector runs anywhere
            self._thread.join(2 * PATIENCE)

    # --- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.file = LedgerFile(self.path, self._tables)
            # Used again and again: a new one costs as much as a short statement.
            self._cursor = self.file.db.cursor()
            self.reader = self.file.reader.cursor()
            while self._serve():
                pass
            self.failure = LedgerDown(f"The ledger {self.path} is closed.")
        except WirecallError as error:
            self.failure = error
        except Exception as error:  # a mistake of ours; the next call starts another writer
            logger.error("the writer of %s ended", self.path, exc_info=error)
            self.failure = LedgerDown(f"The writer of the ledger {self.path} ended: {error!r}")
        # AttributeError: it was never opened.
        with self.reading, suppress(AttributeError, apsw.Error):
            self.reader = None
            self.file.close()
        self._refuse()
        self._finalizer.detach()

    def _serve(self) -> bool:
        """Do the next job, or group of writes; return False when the ledger is closed."""
        if not self._waiting:
            self._bell.get()  # even if there is a job: the others of its loop iteration follow
        self._take()
        if not self._waiting:
            return True
        kind = self._waiting[0].kind
        if kind == "stop":
            return False
        if kind in ("begin", "complete", "nothing"):
            self._do(self._waiting.popleft())
            self._stand_by()
            return True
        jobs = []
        while self._waiting and self._waiting[0].kind in ("write", "unclaim"):
            jobs.append(self._waiting.popleft())
        self._commit(jobs)
        return True

    def _take(self) -> None:
        while self._asked and self._owed:
            self._waiting.append(self._owed.popleft())
        while self._asked:
            self._waiting.append(self._asked.popleft())

    def _commit(self, jobs: list[Job]) -> None:
        """Group commit: one transaction, one fsync, then the callers are woken.

        If it fails, nothing has happened.
        """
        db = self._cursor
        try:
            self.file.check()
            db.execute(SQL["begin"])
            fence = take_fences(db, sum(job.claims for job in jobs))
            for job in jobs:
                fence += job.claims
                job.error = None
                try:
                    job.result = job.work(db, fence)
                except Exception as error:
                    # The job fails alone over a constraint, which undoes its own statement, or over
                    # a damaged row.
                    if isinstance(error, apsw.Error) and not isinstance(
                        error, apsw.ConstraintError
                    ):
                        raise
                    job.error = as_down(self.path, error)
            db.execute(SQL["commit"])
        except Exception as error:
            with suppress(apsw.Error):
                if self.file.db.in_transaction:
                    db.execute(SQL["rollback"])
            # One of them may be too large for the rest of the disk: it must not fail the others.
            if len(jobs) > 1 and not isinstance(error, (apsw.BusyError, LedgerDown)):
                for job in jobs:
                    self._commit([job])
                return
            for job in jobs:
                job.error = as_down(self.path, error)
        self._owed.extend(job for job in jobs if job.kind == "unclaim" and job.error is not None)
        self._deliver(jobs)

    def _stand_by(self) -> None:
        """While a handler has the lock, do what it asks.

        Jobs that have waited too long for it fail.
        """
        while (holder := self.holder) is not None:
            timeout = 0.1
            if holder.is_dropped:
                timeout = 0.002
            with suppress(Empty):
                self._bell.get(timeout=timeout)
            self._take()
            for job in [job for job in self._waiting if job.kind == "complete"]:
                self._waiting.remove(job)
                self._do(job)
            if holder.is_dropped and self.holder is not None:
                holder.end()
            while (
                self._waiting
                and self._waiting[0].asked_at < time.monotonic() - PATIENCE
                and not holder.is_dropped
            ):
                if self._waiting[0].kind == "stop":
                    holder.is_dropped = True
                    break
                job = self._waiting.popleft()
                if job.kind == "begin":
                    job.error = too_late(self.path)
                else:
                    job.error = as_down(self.path, apsw.BusyError())
                if job.kind == "unclaim":
                    self._owed.append(job)
                self._deliver([job])

    def _do(self, job: Job) -> None:
        try:
            job.result = job.work()
        except apsw.Error as error:
            job.error = as_down(self.path, error)
        except Exception as error:
            job.error = error
        self._deliver([job])

    def _deliver(self, jobs: list[Job]) -> None:
        """Answer the callers: one wake-up for each event loop, not for each job."""
        for loop in {job.loop for job in jobs}:
            theirs = [job for job in jobs if job.loop is loop]
            if loop is None:
                settle(theirs)
            else:
                with suppress(RuntimeError):  # the loop is closed: its callers are gone
                    loop.call_soon_threadsafe(settle, theirs)

    def _refuse(self) -> None:
        """Answer the jobs that came too late.

        The thread calls it when it ends, and callers do after that.
        """
        late: list[Job] = []
        with suppress(IndexError):
            while True:
                late.append((self._waiting or self._asked).popleft())
        for job in late:
            job.error = None
            if job.kind != "stop":
                job.error = copy.copy(self.failure)
        self._deliver(late)


def settle(jobs: list[Job]) -> None:
    """Give the callers of jobs their results, in the thread of their event loop."""
    for job in jobs:
        future = job.future
        if future is None or future.done():  # no caller waits, or it was cancelled
            continue
        if job.error is not None:
            future.set_exception(job.error)
        else:
            future.set_result(job.result)


def take_fences(db: apsw.Cursor, number: int) -> int:
    """Take `number` fences from the file; return the last one that was taken before."""
    if not number:
        return 0
    last: int = db.execute(SQL["take_fences"], (number,)).get
    return last - number


def too_late(path: str) -> Locked:
    return Locked(f"The ledger {path} was locked for more than {PATIENCE:g} s.")
