"""The connection that writes to an SQLite ledger, and how jobs are committed on it: alone, or many together.

It belongs to the writer's thread, which lends it while it has nothing to do; one thread at a time uses it.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import apsw

from wirecall.ledger.base import LedgerDown
from wirecall.ledger.sqlite.file import SQL, Patience, Place, as_down
from wirecall.ledger.sqlite.jobs import Job
from wirecall.ledger.sqlite.rows import Fences, Table

# Seconds: commits that take no longer, on the average, an event loop may wait for: to hand one to the thread and back costs
# as much. One that took twice as long may be the first of a disk that has become slow.
QUICK = 0.0005
PAGES_IN_WAL = 1000  # from here on it is folded into the file, as SQLite itself would do it

_BEGIN, _COMMIT = SQL["begin"], SQL["commit"]


class Commits:
    """Every commit is preceded by a look at whether the path still names the file, and is timed."""

    def __init__(self, path: str, table: Table, db: apsw.Connection, patience: Patience, long: Callable[[], None]) -> None:
        self._patience = patience
        self.place = Place(path)
        self.fences = Fences()
        self.pace, self.last = 0.001, 1.0  # seconds that a commit took of late, and the last one; slow until shown quick
        self.pages = 0  # in the WAL
        self._is_committed = False  # the last one that was tried: Ctrl-C is heard when the disk is done
        self._path = path
        self._table = table
        self._db = db
        self._db.set_wal_hook(self._count_pages)
        self._cursor = db.cursor()
        self._long = long  # called when the WAL has become long

    def at_once(self, jobs: list[Job]) -> bool:
        """Commit jobs if nobody has to wait for anything but a quick disk; whether they are over."""
        if self.pace > QUICK or self.last > 2 * QUICK:
            return False
        self._patience.is_over = True
        try:
            if len(jobs) == 1:
                self._alone(jobs[0])
                return jobs[0].is_over
            self.together(jobs)
            return True
        except Exception:  # another process is writing, or the disk is full; the thread can wait, and try them one by one
            return self._is_committed
        finally:
            self._patience.is_over = False

    def together(self, jobs: list[Job]) -> None:
        """Group commit: one transaction, one fsync. Where it fails, nothing of it has happened, and no job is over."""
        self._is_committed = False
        try:
            self.place.check()
            self._cursor.execute(_BEGIN)
            self.fences.begin()
            ends = [self._attempt(job) for job in jobs]
            began = time.perf_counter()
            self._cursor.execute(_COMMIT)
        except BaseException:
            if self._is_committed:
                _end(jobs, ends)
            else:
                self._undo()
            raise
        _end(jobs, ends)
        self._committed(began)

    def fold(self) -> None:
        """Here and not in a commit, as SQLite would: it takes many times as long, and nobody need wait for it."""
        with suppress(apsw.Error):  # the next commit sees to it again
            self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    def close(self) -> None:
        self._db.close()
        self.place.close()

    def _alone(self, job: Job) -> None:
        """Outside of any transaction. It is not over afterwards if it needs one, or if another process is writing."""
        self._is_committed = False
        try:
            self.place.check()
            began = time.perf_counter()
            if job.claim is not None:
                job.result = self._table.claim_first(job.claim, self._cursor, self.fences)
            else:
                job.result = job.work(self._cursor, self.fences)
            self._committed(began)
        except apsw.BusyError:
            pass
        except Exception as error:
            job.error = as_down(self._path, error)
        except BaseException:
            if self._is_committed and job.claim is None:  # else nothing was changed, or it can be claimed again
                job.result = True
            raise

    def _attempt(self, job: Job) -> tuple[Any, LedgerDown | None]:
        """What comes of it, once it is committed."""
        try:
            return job.work(self._cursor, self.fences), None
        except apsw.ConstraintError as error:  # it undid its own statement, and nothing else
            return None, as_down(self._path, error)
        except apsw.Error:
            raise
        except Exception as error:  # such as a damaged row: the trouble of this one
            return None, as_down(self._path, error)

    def _undo(self) -> None:
        self.fences.forget()
        with suppress(apsw.Error):
            if self._db.in_transaction:
                self._db.execute(SQL["rollback"])

    def _committed(self, began: float) -> None:
        self.last = time.perf_counter() - began
        self.pace += (self.last - self.pace) / 8
        if self.pages >= PAGES_IN_WAL:
            self.pages = 0
            self._long()

    def _count_pages(self, _db: apsw.Connection, _name: str, pages: int) -> int:
        self.pages = pages
        self._is_committed = True
        return apsw.SQLITE_OK


def _end(jobs: list[Job], ends: list[tuple[Any, LedgerDown | None]]) -> None:
    for job, (result, error) in zip(jobs, ends, strict=True):
        job.result, job.error = result, error
