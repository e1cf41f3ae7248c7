"""What event loops ask of an SQLite ledger, in their turns; and who commits it.

What the tasks of a loop ask for in one turn goes out together. On a disk that is quick, the loop commits it itself while
the writer's thread has nothing to do: the same commit, without two changes of threads. They cost more than it, and all but
the fsync would keep the loop from running anyway, as one thread of Python runs at a time. Where the thread is at work, or
another process has the lock of the file, or there is much to write, the thread does it: a loop waits for its own commits,
for about 5 ms in a turn, and for nobody else.
"""

import asyncio
import concurrent.futures
import copy
from contextlib import nullcontext, suppress
from typing import Any

import apsw

from wirecall import process
from wirecall.errors import WirecallError
from wirecall.ledger.sqlite.file import as_down
from wirecall.ledger.sqlite.jobs import Job, nothing, settle
from wirecall.ledger.sqlite.rows import Table
from wirecall.ledger.sqlite.writer import Writer

ON_THE_SPOT = 0.005  # seconds of a turn: when a loop has waited for the disk for so long, others have their turn first
TOGETHER = 128  # jobs that a loop commits in one go, at most; each takes about 10 us
MUCH = 256 * 1024  # bytes that it writes in one go, at most


class Turns:
    """A writer, and what the loops of this process have collected for it in their present turns."""

    def __init__(self, path: str, table: Table, *, owner: object) -> None:
        self.writer = Writer(path, table, owner=owner)
        self.path = path
        self.table = table
        self._collected: dict[asyncio.AbstractEventLoop, list[Job]] = {}  # each touched by the thread of its loop only
        self._spent: dict[asyncio.AbstractEventLoop, float] = {}  # seconds in this turn, likewise; unless it is over

    async def ask(self, job: Job, *, on_the_spot: bool = True) -> Any:
        """Have something done, and wait until it is on the disk; `on_the_spot` allows that nobody notices the waiting.

        A job is committed on the spot where nothing else is ready to run, since it is the only one of its turn for certain:
        two turns of the loop less, 25 us each, as a commit leaves the caches cold.
        """
        try:
            loop = process.running_loop()
        except RuntimeError:
            return self._ask_and_wait(job)
        if not on_the_spot and not self._unanswered([job]):
            return job.answer()
        is_alone = on_the_spot and self._is_alone(loop)
        if is_alone and (self._commit_on_the_spot(loop, job) or not self._unanswered([job])):
            return job.answer()
        job.loop, job.future = loop, loop.create_future()
        if is_alone:
            self.writer.send([job])
        else:
            self._collect(loop, job)
        return await job.future

    async def aclose(self) -> None:
        if self.writer.pid == process.pid and self.writer.failure is None:
            await self.ask(Job("stop", nothing))
            self.writer.join()

    def _is_alone(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether nobody else will ask in this turn of the loop, and it has not waited for the disk too often in it.

        What ends the turn is ready to run in any case. Loops that do not tell what else is may have something.
        """
        spent, ready = self._spent.get(loop), getattr(loop, "_ready", None)
        if loop in self._collected or ready is None or len(ready) != (spent is not None):
            return False
        if spent is None:
            loop.call_soon(self._spent.pop, loop, None)
            self._spent[loop] = 0.0
        return spent is None or spent < ON_THE_SPOT

    def _commit_on_the_spot(self, loop: asyncio.AbstractEventLoop, job: Job) -> bool:
        try:
            is_over = self._commit_at_once([job])
        except BaseException:  # Ctrl-C: who asked hears of it, and what it asked for is done all the same
            self.writer.send([job])
            raise
        if is_over:
            self._spent[loop] += self.writer.commits.last
        return is_over

    def _collect(self, loop: asyncio.AbstractEventLoop, job: Job) -> None:
        jobs = self._collected.get(loop)
        if jobs is None:
            loop.call_soon(self._send_collected, loop)  # first: after Ctrl-C in between, others would wait for it in vain
            jobs = self._collected[loop] = []
        jobs.append(job)

    def _send_collected(self, loop: asyncio.AbstractEventLoop) -> None:
        jobs = self._collected.pop(loop, [])
        try:
            if self._commit_at_once(jobs):
                settle(jobs)
                return
            left = self._unanswered(jobs)
        except BaseException:  # Ctrl-C; the loop may go on after it, and nobody must wait in vain
            settle(job for job in jobs if job.is_over)
            self.writer.send([job for job in jobs if not job.is_over])
            raise
        if left:
            self.writer.send(left)

    def _ask_and_wait(self, job: Job) -> Any:
        if not self._unanswered([job]):
            return job.answer()
        written = job.future = concurrent.futures.Future[Any]()
        self.writer.send([job])
        return written.result()

    def _unanswered(self, jobs: list[Job]) -> list[Job]:
        """Read the records that answer claims, all in one snapshot of the file; the jobs that are left must be written."""
        looking = [job for job in jobs if job.claim is not None]
        if not looking:
            return jobs
        try:
            reader = self.writer.reader
            with self.writer.reading, reader.connection if len(looking) > 1 else nullcontext():
                for job in looking:
                    self._look(job, reader)
        except (apsw.Error, WirecallError) as error:
            for job in looking:
                job.error = copy.copy(error) if isinstance(error, WirecallError) else as_down(self.path, error)
        settle(job for job in looking if job.is_over)
        return [job for job in jobs if not job.is_over]

    def _look(self, job: Job, reader: apsw.Cursor) -> None:
        assert job.claim is not None
        try:
            job.result = self.table.answer(job.claim, reader)
        except Exception as error:  # such as a damaged row: the trouble of this one, and of nobody else
            job.error = as_down(self.path, error)

    def _commit_at_once(self, jobs: list[Job]) -> bool:
        """Commit jobs in the calling thread, if nobody has to wait for anything but the disk; whether they are over."""
        writer = self.writer
        if not _are_light(jobs):
            return False
        try:
            if not writer.lent.acquire(blocking=False):
                return False
            if writer.has_work or writer.pid != process.pid:  # they came first; after a fork, the connection is the parent's
                return False
            return writer.commits.at_once(jobs)
        finally:  # Ctrl-C may be heard when we have it and do not know it yet: the thread would wait for it for ever
            with suppress(RuntimeError):  # it was not ours
                writer.lent.release()


def _are_light(jobs: list[Job]) -> bool:
    """Whether a loop may wait for them, as far as they tell."""
    if len(jobs) > TOGETHER:
        return False
    size = 0
    for job in jobs:
        if job.kind != "write":
            return False
        size += job.size
    return size <= MUCH
