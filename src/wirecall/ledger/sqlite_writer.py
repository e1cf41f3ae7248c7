"""The thread that writes an SQLite ledger: all that waits at a moment goes into one transaction and one fsync.

While it has nothing to do, it lends its connection: what comes alone is written where it was asked for (`_commit_at_once`).
"""

import asyncio
import concurrent.futures
import copy
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Literal, TypeAlias

import apsw

from wirecall import process
from wirecall.errors import WirecallError
from wirecall.ledger.base import (
    Claim,
    CommitUnknown,
    LedgerDown,
    Locked,
    NotCommitted,
    Outcome,
    Record,
)
from wirecall.ledger.sqlite_file import PATIENCE, SQL, Place, as_down, connect, open_file
from wirecall.ledger.sqlite_rows import Fences, Row, Table, take_fences
from wirecall.logs import logger

Kind: TypeAlias = Literal["write", "sweep", "begin", "complete", "nothing", "stop"]

# Seconds: commits that take no longer, on the average, an event loop may wait for: to hand one to the thread and back costs
# as much. One that took twice as long may be the first of a disk that has become slow.
QUICK = 0.0005
ON_THE_SPOT = 0.002  # seconds of a turn: when a loop has waited for the disk for so long, others have their turn first
PAGES_IN_WAL = 1000  # from here on it is folded into the file, as SQLite itself would do it


class Job:
    """Something for the writer to do, and the future of who waits for it, if anybody does.

    `work` is called inside a transaction; or, if it is a "write" that comes alone, outside of one, and each of its
    statements is one. A claim would not be right then, so it has a `try_first`, which may find that it cannot do it. It also
    has a `look`, which may find the answer by reading: then nobody waits for who writes.
    """

    __slots__ = ("asked_at", "error", "future", "kind", "look", "loop", "result", "try_first", "work")

    def __init__(
        self,
        kind: Kind,
        work: Callable[..., Any],
        try_first: Callable[..., Any] | None = None,
        look: Callable[[apsw.Cursor], Any] | None = None,
    ) -> None:
        self.kind = kind
        self.work = work
        self.try_first = try_first
        self.look = look
        self.future: asyncio.Future[Any] | concurrent.futures.Future[Any] | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.asked_at = time.monotonic()
        self.result: Any = None
        self.error: Exception | None = None

    @property
    def is_over(self) -> bool:
        return self.result is not None or self.error is not None

    def cancel(self) -> None:
        """Nobody wants it any more. What is done is done; what is still on its way, or not even sent, does nothing."""
        self.work, self.try_first, self.look = skip, None, None

    def answer(self) -> Any:
        """What came of it, for who has waited in person."""
        if self.error is not None:
            raise self.error
        return self.result

    def settle(self) -> None:
        if self.future is None or self.future.done():  # cancelled: what was done is done
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


def nothing() -> None:
    pass


def skip(_db: apsw.Cursor, _fences: Fences) -> None:
    pass


class Writer:
    """The connections of one process to one file, and the thread that owns all but the one for reading.

    While it has nothing to do, the thread lends the connection that writes (`_lent`). A job that is the only one of its
    turn, on a disk that is quick, is committed by the event loop: the same commit, without two changes of threads, which
    cost more than it. Where nothing else is ready to run, it is the only one for certain, and is committed on the spot: two
    turns of the loop less, 25 us each, since a commit leaves the caches cold. Where the connection is not free, or another
    process has the lock of the file, the job goes to the thread: a loop waits for its own commits, 2 ms in a turn,
    and for nobody else.
    """

    def __init__(self, path: str, table: Table, *, owner: object) -> None:
        self.pid = process.pid
        self.failure: WirecallError | None = None  # set: the thread takes no more jobs, and this is why
        self.reading = threading.Lock()
        self._path = path
        self.table = table
        self._asked: deque[Job] = deque()  # the queue; it is safe to add to it anywhere, even while garbage is collected
        self._bell: SimpleQueue[None] = SimpleQueue()  # rung for the thread whenever there is something to see
        self._collected: dict[asyncio.AbstractEventLoop, list[Job]] = {}  # each touched by the thread of its loop only
        self._spent: dict[asyncio.AbstractEventLoop, float] = {}  # seconds in this turn, likewise; unless it is over
        self._waiting: deque[Job] = deque()  # taken from the queue, not done yet
        self._lent = threading.Lock()  # free while the thread has nothing to do; who holds it may use the connection
        self._lent.acquire()
        self._pace, self._last = 0.001, 1.0  # seconds that a commit took of late, and the last one; slow until shown quick
        self._pages = 0  # in the WAL
        self._fences = Fences()
        self._open: HandlerTransaction | None = None  # a handler's transaction, which has the write lock
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

    async def ask(self, job: Job, *, on_the_spot: bool = True) -> Any:
        """Have something done, and wait until it is on the disk; `on_the_spot` allows that nobody notices the waiting.

        What can be answered by reading is answered without waiting in any case.
        """
        try:
            loop = process.running_loop()
        except RuntimeError:
            return self._ask_and_wait(job)
        if not on_the_spot and not self._unanswered([job]):
            return job.answer()
        is_alone = on_the_spot and job.kind == "write" and self._is_alone(loop)
        if is_alone and self._commit_at_once(job):
            self._spent[loop] += self._last
            return job.answer()
        if is_alone and not self._unanswered([job]):
            return job.answer()
        job.loop, job.future = loop, loop.create_future()
        if is_alone:
            self.send([job])
        else:
            self._collect(loop, job)
        return await job.future

    def _is_alone(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether nobody else will ask in this turn of the loop, and it has not waited for the disk too often in it."""
        spent = self._spent.get(loop)
        if loop in self._collected or not is_last(loop, ours=0 if spent is None else 1):
            return False
        if spent is None:
            self._spent[loop] = 0.0
            loop.call_soon(self._spent.pop, loop)
        return spent is None or spent < ON_THE_SPOT

    def _collect(self, loop: asyncio.AbstractEventLoop, job: Job) -> None:
        """What the tasks ask for in one turn of the loop goes out together: 8 tasks need 1 commit, not 2."""
        if loop not in self._collected:
            self._collected[loop] = []
            loop.call_soon(self._send_collected, loop)
        self._collected[loop].append(job)

    def _ask_and_wait(self, job: Job) -> Any:
        if not self._unanswered([job]):
            return job.answer()
        written = job.future = concurrent.futures.Future[Any]()
        self.send([job])
        return written.result()

    def _unanswered(self, jobs: list[Job]) -> list[Job]:
        """Read what jobs look for, all in one snapshot of the file; those that are left have to be written."""
        looking = [job for job in jobs if job.look is not None]
        if not looking:
            return jobs
        try:
            reader = self.reader
            with self.reading, reader.connection if len(looking) > 1 else nullcontext():
                for job in looking:
                    self._look(job, reader)
        except (apsw.Error, WirecallError) as error:
            for job in looking:
                job.error = copy.copy(error) if isinstance(error, WirecallError) else as_down(self._path, error)
        for job in looking:
            if job.is_over:
                job.settle()
        return [job for job in jobs if not job.is_over]

    def _look(self, job: Job, reader: apsw.Cursor) -> None:
        assert job.look is not None
        try:
            job.result = job.look(reader)
        except Exception as error:  # such as a damaged row: the trouble of this one, and of nobody else
            job.error = as_down(self._path, error)

    def _send_collected(self, loop: asyncio.AbstractEventLoop) -> None:
        collected = self._collected.pop(loop)
        try:
            jobs = self._unanswered(collected)
        except BaseException:  # Ctrl-C; the loop may go on after it, and nobody must wait in vain
            self.send(collected)
            raise
        if len(jobs) == 1 and jobs[0].kind == "write" and self._commit_at_once(jobs[0]):
            jobs[0].settle()
        elif jobs:
            self.send(jobs)

    def send(self, jobs: list[Job]) -> None:
        self._asked.extend(jobs)
        self._bell.put(None)
        if self.failure is not None:  # the thread may have ended before it could see them
            self._refuse([])

    def drop(self, transaction: "HandlerTransaction") -> None:
        """Undo a transaction, unless it is over. Nothing waits here: the caller may be a coroutine that is being closed."""
        transaction.is_dropped = True
        self._bell.put(None)

    def _commit_at_once(self, job: Job) -> bool:
        """Commit a job in the calling thread, if nobody has to wait for anything but the disk; whether it is done."""
        if self._pace > QUICK or self._last > 2 * QUICK or not self._lent.acquire(blocking=False):
            return False
        try:
            if self._asked or self._waiting or self.pid != process.pid:  # they came first; it is the parent's, after a fork
                return False
            self._patience.is_over = True
            return self._try_alone(job)
        finally:
            self._patience.is_over = False
            self._lent.release()

    def _try_alone(self, job: Job) -> bool:
        try:
            self._place.check()
            began = time.perf_counter()
            job.result = (job.try_first or job.work)(self._cursor, self._fences)
            self._committed(began)
        except apsw.BusyError:  # another process is writing; the thread can wait for it
            return False
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C in the thread of the loop, which may go on after it
                self.send([job])
                raise
            job.error = as_down(self._path, error)
        return job.is_over

    async def aclose(self) -> None:
        if self.pid == process.pid and self.failure is None:
            await self.ask(Job("stop", nothing))
            self._thread.join()

    def _stop(self) -> None:
        if self.pid == process.pid and self.failure is None:
            if self._open is not None:  # nobody is left to complete it
                self._open.is_dropped = True
            self._asked.append(Job("stop", nothing))
            self._bell.put(None)
            if threading.current_thread() is not self._thread:  # the garbage collector runs anywhere
                self._thread.join(2 * PATIENCE)

    # --- in the thread ---

    def _run(self) -> None:
        try:
            self._db, reader, self._patience = open_file(self._path, Row._fields)
            self._db.set_wal_hook(self._count_pages)
            self._cursor = self._db.cursor()
            self._place = Place(self._path)
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
            if job.kind == "write":
                self._commit(self._take_writes())
            elif job.kind == "sweep":
                self._commit([self._waiting.popleft()])
            else:
                self._do(self._waiting.popleft())
            while self._open is not None:
                self._stand_by(self._open)

    def _gather(self) -> None:
        while not self._waiting and not self._asked:
            self._lent.release()
            self._bell.get()
            self._lent.acquire()
        while self._asked:
            self._waiting.append(self._asked.popleft())

    def _take_writes(self) -> list[Job]:
        writes = []
        while self._waiting and self._waiting[0].kind == "write":
            writes.append(self._waiting.popleft())
        return writes

    def _commit(self, jobs: list[Job]) -> None:
        """Group commit: one transaction, one fsync, then the answers."""
        try:
            self._write(jobs)
        except Exception as error:
            self._roll_back()
            self._commit_each(jobs, error)
        else:
            self._deliver(jobs)

    def _write(self, jobs: list[Job]) -> None:
        self._place.check()
        self._cursor.execute(SQL["begin"])
        self._fences.begin()
        for job in jobs:
            self._attempt(job)
        began = time.perf_counter()
        self._cursor.execute(SQL["commit"])
        self._committed(began)

    def _committed(self, began: float) -> None:
        self._last = time.perf_counter() - began
        self._pace += (self._last - self._pace) / 8
        if self._pages >= PAGES_IN_WAL:
            self._pages = 0
            self.send([Job("nothing", self._fold)])

    def _count_pages(self, _db: apsw.Connection, _name: str, pages: int) -> int:
        self._pages = pages
        return apsw.SQLITE_OK

    def _fold(self) -> None:
        """Here and not in a commit, as SQLite would: it takes many times as long, and nobody need wait for it."""
        with suppress(apsw.Error):  # the next commit sees to it again
            self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    def _commit_each(self, jobs: list[Job], error: Exception) -> None:
        """One of them may be too large for what is left of the disk: that must not be the trouble of the others."""
        if len(jobs) > 1 and not isinstance(error, apsw.BusyError):
            for job in jobs:
                self._commit([job])
            return
        for job in jobs:
            job.error = as_down(self._path, error)
        self._deliver(jobs)

    def _attempt(self, job: Job) -> None:
        job.error = None
        try:
            job.result = job.work(self._cursor, self._fences)
        except (apsw.ConstraintError, UnicodeEncodeError) as error:  # it undid its own statement, and nothing else
            job.error = as_down(self._path, error)
        except apsw.Error:
            raise
        except Exception as error:
            job.error = error

    def _roll_back(self) -> None:
        self._fences.forget()
        with suppress(apsw.Error):
            if self._db.in_transaction:
                self._db.execute(SQL["rollback"])

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
                _settle(theirs)
            else:
                with suppress(RuntimeError):  # the loop is closed: its callers are gone
                    loop.call_soon_threadsafe(_settle, theirs)

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
            self._db.close()
            self._place.close()

    # --- a handler's transaction, also in the thread ---

    def begin(self, transaction: "HandlerTransaction", claim: Claim) -> None:
        if transaction.is_dropped:
            return
        self._place.check()
        db = connect(self._path)
        try:
            db.pragma("foreign_keys", True)  # the handler could not: inside a transaction it has no effect
            db.execute(SQL["begin"])
            self._begin_on(db, transaction, claim)
        except apsw.BusyError:
            raise self._locked() from None
        finally:
            if self._open is None:
                db.close()

    def _begin_on(self, db: apsw.Connection, transaction: "HandlerTransaction", claim: Claim) -> None:
        cursor = db.cursor()
        row = self.table.find(cursor, claim.id)
        if row is not None:
            transaction.record = self.table.seen(row, claim)
            return
        transaction.record = self.table.insert(claim, cursor, take_fences(cursor, 1))
        db.execute(SQL["before_handler"])
        db.set_commit_hook(lambda: not transaction.may_commit)
        transaction.db = db
        self._open = transaction

    def complete(self, transaction: "HandlerTransaction", complete: Callable[..., bool], undo: bool) -> None:
        db = transaction.db
        try:
            if undo and db.in_transaction:
                db.execute(SQL["undo_handler"])
            if not db.in_transaction or not complete(db.cursor(), self._fences):
                raise NotCommitted(  # for certain: until now, the hook has refused every commit
                    "The transaction ended inside the handler, so all of it was undone.",
                    "the handler ended it, or went on after SQLite had to, for example because the disk was full",
                    "leave BEGIN, COMMIT and ROLLBACK to wirecall, and let SQLite's errors pass; savepoints are free to use",
                )
            self._commit_handler(transaction)
        finally:
            transaction.is_dropped = True
            self._end(transaction)

    def _commit_handler(self, transaction: "HandlerTransaction") -> None:
        transaction.may_commit = True
        try:
            transaction.db.execute(SQL["commit"])
        except apsw.IOError as error:  # its frames may be in the WAL, and a crash before the next commit would find them
            raise CommitUnknown(f"The ledger {self._path} failed in the middle of a commit: {error}") from error
        except (apsw.ConstraintError, apsw.BusyError) as error:  # a deferred foreign key; a blob that was left open
            raise NotCommitted("What the handler did cannot be committed, so all of it was undone.", str(error)) from error
        finally:
            transaction.may_commit = False

    def _stand_by(self, transaction: "HandlerTransaction") -> None:
        """The write lock is the handler's: do what it asks, and let the others wait, but not for ever."""
        if transaction.is_dropped:
            self._end(transaction)
        if self._open is None:
            return
        with suppress(Empty):
            self._bell.get(timeout=0.002 if transaction.is_dropped else self._until_late())
        while self._asked:
            job = self._asked.popleft()
            if job.kind == "complete":
                self._do(job)
            else:
                self._waiting.append(job)
        while self._until_late() == 0 and not transaction.is_dropped:
            self._give_up(transaction)

    def _until_late(self) -> float | None:
        return max(0.0, self._waiting[0].asked_at + PATIENCE - time.monotonic()) if self._waiting else None

    def _give_up(self, transaction: "HandlerTransaction") -> None:
        """The first that waits has waited long enough."""
        if self._waiting[0].kind == "stop":
            transaction.is_dropped = True
            return
        job = self._waiting.popleft()
        job.error = self._locked() if job.kind == "begin" else as_down(self._path, apsw.BusyError())
        self._deliver([job])

    def _end(self, transaction: "HandlerTransaction") -> None:
        """Close the connection, which undoes what was not committed."""
        try:
            transaction.db.close(True)  # with whatever cursor the handler left open
            self._open = None
        except apsw.ThreadingViolationError:  # a handler that nobody waits for any more is in the middle of a statement
            transaction.db.interrupt()

    def _locked(self) -> Locked:
        return Locked(f"The ledger {self._path} was locked for more than {PATIENCE:g} s.")


class HandlerTransaction(AbstractAsyncContextManager["HandlerTransaction"]):
    """A transaction on a connection of its own; or, if there was a record already, nothing but that."""

    record: Record
    db: Any = None

    def __init__(self, writer: Writer, claim: Claim, found: Record | None, wait: float) -> None:
        self._writer = writer
        self._claim = claim
        self._found = found
        self._wait = 0.0 if claim.alone else wait
        self.may_commit = False
        self.is_dropped = False

    async def __aenter__(self) -> "HandlerTransaction":
        if self._found is not None:
            self.record = self._found
            return self
        try:
            await self._begin(time.monotonic() + self._wait)
        except BaseException:
            self._writer.drop(self)
            raise
        return self

    async def _begin(self, until: float) -> None:
        """In turns of PATIENCE, and one at least: the lock is the file's, so it may be another command that we wait for."""
        while True:
            try:
                await self._writer.ask(Job("begin", partial(self._writer.begin, self, self._claim)))
                return
            except Locked:
                if time.monotonic() >= until:
                    raise

    async def __aexit__(self, *_: object) -> None:
        if self.db is not None:
            self._writer.drop(self)

    async def complete(self, outcome: Outcome, retention: float, *, undo: bool) -> None:
        if self.db is None or self.is_dropped:
            raise NotCommitted("There is no transaction to complete.", "the record was there already, or it is over")
        complete = partial(self._writer.table.complete, self.record.token, outcome, retention)
        await self._writer.ask(Job("complete", partial(self._writer.complete, self, complete, undo)))


def is_last(loop: asyncio.AbstractEventLoop, ours: int = 0) -> bool:
    """Whether nothing but `ours` is ready to run in this turn of the loop. Loops that do not tell may have something."""
    ready = getattr(loop, "_ready", None)
    return ready is not None and len(ready) == ours


def _settle(jobs: list[Job]) -> None:
    for job in jobs:
        job.settle()
