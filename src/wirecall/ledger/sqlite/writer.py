"""The thread that writes an SQLite ledger: all that waits at a moment goes into one transaction and one fsync.

While it has nothing to do, it lends its connection (`lent`): see `sqlite_turns` for who borrows it. While a handler has the
write lock of the file, it stands by: it does what the handler asks, and all others wait, but not for ever.
"""

import copy
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

import apsw

from wirecall import process
from wirecall.errors import WirecallError
from wirecall.ledger.base import Claim, LedgerDown
from wirecall.ledger.sqlite.commits import Commits
from wirecall.ledger.sqlite.file import PATIENCE, as_down, open_file
from wirecall.ledger.sqlite.jobs import Job, Kind, nothing, settle
from wirecall.ledger.sqlite.lock import HandlerLock
from wirecall.ledger.sqlite.rows import Row, Table
from wirecall.logs import logger

WRITES: tuple[Kind, ...] = ("write", "unclaim")  # what goes into one transaction

# After a fork the child must neither use nor close the parent's connections; kept here, they are not collected.
from_before_fork: list["Writer"] = []


class Writer:
    """The connections of one process to one file, and the thread that owns all but the one for reading."""

    commits: Commits  # for who has `lent`

    def __init__(self, path: str, table: Table, *, owner: object) -> None:
        self.pid = process.pid
        self.failure: WirecallError | None = None  # set: the thread takes no more jobs, and this is why
        self.reading = threading.Lock()
        self.lent = threading.RLock()  # free while the thread has nothing to do; who holds it may use the connection
        self._path = path
        self._table = table
        self._asked: deque[Job] = deque()  # the queue; it is safe to add to it anywhere, even while garbage is collected
        self._bell: SimpleQueue[None] = SimpleQueue()  # rung for the thread whenever there is something to see
        # Taken from the queue, not done yet. There is something from the start, so that nobody is lent what is not open.
        self._waiting: deque[Job] = deque([Job("nothing", nothing)])
        self._owed: deque[Job] = deque()  # claims that could not be taken back; tried again before what is asked next
        self._held: HandlerLock | None = None  # a handler has the write lock
        self._is_ready = threading.Event()
        self._reader: apsw.Cursor | None = None
        # A daemon, so that a program that forgets to close can end; then, or when it forgets the whole ledger, `_stop` lets
        # the thread finish what it has begun.
        self._finalizer = weakref.finalize(owner, self._stop)
        self._thread = threading.Thread(target=self._run, name=f"wirecall ledger {path}", daemon=True)
        self._thread.start()

    @property
    def reader(self) -> apsw.Cursor:
        if self._reader is None:
            self._is_ready.wait()
        if self.failure is not None or self._reader is None:
            raise copy.copy(self.failure or LedgerDown(f"The ledger {self._path} is closed."))
        return self._reader

    @property
    def has_work(self) -> bool:
        return bool(self._asked or self._waiting)

    def send(self, jobs: list[Job]) -> None:
        now = time.monotonic()
        for job in jobs:
            job.asked_at = now
        self._asked.extend(jobs)
        self._bell.put(None)
        if self.failure is not None:  # the thread may have ended before it could see them
            self._refuse([])

    def drop(self, lock: HandlerLock) -> None:
        """Undo a transaction, unless it is over. Nothing waits here: the caller may be a coroutine that is being closed."""
        lock.is_dropped = True
        self._bell.put(None)

    def join(self) -> None:
        self._thread.join()

    def _stop(self) -> None:
        if self.pid != process.pid:
            from_before_fork.append(self)
        elif self.failure is None:
            if self._held is not None:  # nobody is left to complete it
                self._held.is_dropped = True
            self.send([Job("stop", nothing)])
            if threading.current_thread() is not self._thread:  # the garbage collector runs anywhere
                self._thread.join(2 * PATIENCE)

    # --- in the thread ---

    def _run(self) -> None:
        self.lent.acquire()
        try:
            db, reader, patience = open_file(self._path, Row._fields)
            self.commits = Commits(self._path, self._table, db, patience, self._ask_to_fold)
            self._reader = reader.cursor()
            self._is_ready.set()
            self._serve()
        except WirecallError as error:
            self.failure = error
        except Exception as error:  # a mistake of ours; the next call starts another writer
            logger.error("the writer of %s ended", self._path, exc_info=error)
            self.failure = LedgerDown(f"The writer of the ledger {self._path} ended: {error!r}")
        self._close()
        self._is_ready.set()
        self._refuse(list(self._waiting))
        self._finalizer.detach()

    def _serve(self) -> None:
        while True:
            self._gather()
            job = self._waiting[0]
            if job.kind == "stop":
                raise LedgerDown(f"The ledger {self._path} is closed.")
            if job.kind in WRITES:
                self._commit(self._take_writes())
            elif job.kind == "sweep":
                self._commit([self._waiting.popleft()])
            else:
                self._do(self._waiting.popleft())
            while self._held is not None:
                self._stand_by(self._held)

    def _gather(self) -> None:
        while not self.has_work:
            self.lent.release()
            self._bell.get()
            self.lent.acquire()
        while self._asked and self._owed:
            self._waiting.append(self._owed.popleft())
        while self._asked:
            self._waiting.append(self._asked.popleft())

    def _take_writes(self) -> list[Job]:
        writes = []
        while self._waiting and self._waiting[0].kind in WRITES:
            writes.append(self._waiting.popleft())
        return writes

    def _commit(self, jobs: list[Job]) -> None:
        try:
            self.commits.together(jobs)
        except Exception as error:
            self._commit_each(jobs, error)
        else:
            self._deliver(jobs)

    def _commit_each(self, jobs: list[Job], error: Exception) -> None:
        """One of them may be too large for what is left of the disk: that must not be the trouble of the others."""
        if len(jobs) > 1 and not isinstance(error, apsw.BusyError):
            for job in jobs:
                self._commit([job])
            return
        for job in jobs:
            self._fail(job, as_down(self._path, error))
        self._deliver(jobs)

    def _fail(self, job: Job, error: Exception) -> None:
        job.error = error
        if job.kind == "unclaim":
            self._owed.append(job)

    def _ask_to_fold(self) -> None:
        self.send([Job("nothing", self.commits.fold)])

    def _do(self, job: Job) -> None:
        try:
            job.result = job.work()
        except apsw.Error as error:
            job.error = as_down(self._path, error)
        except Exception as error:
            job.error = error
        self._deliver([job])

    def _deliver(self, jobs: list[Job]) -> None:
        """One wake-up for each event loop, not for each job."""
        for loop in {job.loop for job in jobs}:
            theirs = [job for job in jobs if job.loop is loop]
            if loop is None:
                settle(theirs)
            else:
                with suppress(RuntimeError):  # the loop is closed: its callers are gone
                    loop.call_soon_threadsafe(settle, theirs)

    def _refuse(self, waiting: list[Job]) -> None:
        """Answer the jobs that came too late; it is called by the thread when it ends, and by who comes after that."""
        with suppress(IndexError):
            while True:
                waiting.append(self._asked.popleft())
        for job in waiting:
            job.error = None if job.kind == "stop" else copy.copy(self.failure)
        self._deliver(waiting)

    def _close(self) -> None:
        with self.reading, suppress(AttributeError, apsw.Error):  # AttributeError: they were never opened
            if self._reader is not None:
                self._reader.connection.close()
            self.commits.close()

    # --- while a handler has the lock, also in the thread ---

    def begin(self, lock: HandlerLock, claim: Claim) -> None:
        if not lock.is_dropped:
            self.commits.place.check()
            lock.take(claim)
            self._held = lock if lock.is_held else None

    def complete(self, lock: HandlerLock, complete: Callable[..., bool], undo: bool) -> None:
        try:
            lock.complete(complete, undo)
        finally:
            self._end(lock)

    def _stand_by(self, lock: HandlerLock) -> None:
        if lock.is_dropped:
            self._end(lock)
        if self._held is None:
            return
        with suppress(Empty):
            self._bell.get(timeout=0.002 if lock.is_dropped else self._until_late())
        while self._asked:
            job = self._asked.popleft()
            if job.kind == "complete":
                self._do(job)
            else:
                self._waiting.append(job)
        while self._until_late() == 0 and not lock.is_dropped:
            self._give_up(lock)

    def _until_late(self) -> float | None:
        return max(0.0, self._waiting[0].asked_at + PATIENCE - time.monotonic()) if self._waiting else None

    def _give_up(self, lock: HandlerLock) -> None:
        """The first that waits has waited long enough."""
        if self._waiting[0].kind == "stop":
            lock.is_dropped = True
            return
        job = self._waiting.popleft()
        self._fail(job, lock.too_late() if job.kind == "begin" else as_down(self._path, apsw.BusyError()))
        self._deliver([job])

    def _end(self, lock: HandlerLock) -> None:
        lock.end()
        if not lock.is_held:
            self._held = None
