"""The ledger in an SQLite file: one host, many processes, nothing to install.

The default in production.

The rules of the file:

1. One thread of the process writes (`writer`). All pending transitions go into one transaction and
   one fsync, and no caller is answered before that. Every request for the write lock of the file
   goes through its queue, which sets the order. An event loop never commits.
2. Readers do not wait (WAL): a claim that changes nothing is answered by a read in the calling
   thread. A claim without a key usually makes a new record, so the writer's own look is enough.
   Only one with equal calls (`beside`) reads first: it may have to wait for them, and asks
   repeatedly.
3. Leases are measured by the clock that counts from boot, which cannot be set, and a record names
   its boot: a lease of another boot is over. The same clock measures the time since an answer was
   lost; a loss of another boot counts from the start of this one, as no caller could repeat its
   call while the machine was off, and only the wall clock shows how long that was. Retention is
   over when the wall clock says so and, within one boot, that clock too. The times that people read
   are wall time.
4. The file may be the user's own, with the tables that `transactional` handlers write to. So its
   `user_version` is not changed, its `application_id` is set only in a file that we made, and the
   version of our tables is in one of them. In the same process use apsw for it: Python's sqlite3 is
   a second copy of SQLite, and two copies release each other's locks.
5. SQLite's errors leave this file only as `LedgerDown`. It never means that the writer is broken:
   when the disk has room again, or the lock is free, the next call works.

Without a running event loop the methods wait in the calling thread, so that `handle_sync` can use
this ledger.
"""

import asyncio
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import apsw
from msgspec import Struct

from wirecall.aio import clock_from_boot
from wirecall.errors import UsageError
from wirecall.ledger.base import (
    ALL,
    MARKS_WITHIN,
    STORED,
    TOMBSTONE_FACTOR,
    UNKNOWN_AFTER,
    Claim,
    Delivered,
    LedgerDown,
    Locked,
    Mark,
    Only,
    Outcome,
    Place,
    Receive,
    Recognition,
    Record,
    RecordId,
    Risk,
    Schema,
    Seen,
    State,
    Tables,
    Task,
    Token,
    Verdict,
    decide,
    new_reach,
    recognise,
)
from wirecall.ledger.sqlite import file, seeing
from wirecall.ledger.sqlite.bus import FolderBus
from wirecall.ledger.sqlite.file import SQL, Replaced, Row, as_down
from wirecall.ledger.sqlite.transaction import HandlerTransaction
from wirecall.ledger.sqlite.writer import Job, Writer, nothing, take_fences

# A caller with more records than these is looked for in the order of time.
FEW = 2000

# Records that one job of the sweep changes. The commands that arrive go in between.
PIECE = 15

T = TypeVar("T")
Q = TypeVar("Q")
Names: TypeAlias = list[str]  # inside the class, `list` is a method
Records: TypeAlias = list[Record]
Tasks: TypeAlias = list[Task]
_STATES = {state.value: state for state in State}


class _Asked(Struct):
    """The page of a list that is asked for."""

    state: State | None
    limit: int
    after: Place | None
    only: Only

    @property
    def values(self) -> dict[str, Any]:
        """What the statements of a page have in common."""
        at, first = self.after or (math.inf, RecordId("", "", ""))
        return {
            "at": at,
            "caller": first.caller,
            "of": first.method,
            "key": first.key,
            "limit": self.limit,
            "since": self.only.since,
            "until": self.only.until,
            "only_caller": self.only.caller,
        }


async def open_url(url: str, tables: Tables = "create") -> "SqliteLedger":
    """Open the ledger in the file of `sqlite:PATH`; its folder is made if needed, with mode 0700.

    With "leave" and "read", no file is made either.
    """
    ledger = SqliteLedger(_path_of(url), tables)
    await ledger.open()
    return ledger


async def risks_of(_: str) -> Sequence[Risk]:
    """There are none that a setting could remove."""
    return ()


async def schema_of(url: str) -> Schema:
    """Return the version of the tables in the file of `sqlite:PATH`."""
    return await asyncio.to_thread(file.schema_of, _path_of(url))


def _path_of(url: str) -> str:
    path = url.removeprefix("sqlite:")
    if not path.strip("/") or path.endswith(("/", ":memory:")):
        raise UsageError(
            f"{url!r} names no file.",
            "a ledger in SQLite is there to survive the process",
            'use "sqlite:ledger.db", or "memory:" for a test',
        )
    if path.startswith("//") and not path.startswith("///"):
        raise UsageError(
            f"{url!r} names a host.",
            "an SQLite file is on this one",
            f'"sqlite:{path[2:]}" is a relative path, "sqlite:/{path[1:]}" an absolute one',
        )
    return path.removeprefix("//")


class SqliteLedger:
    """A ledger in a file, for any number of event loops, threads and processes."""

    is_tidy = True
    outlives = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        tables: Tables = "create",
        /,
        *,
        clock: Callable[[], float] | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._path = os.path.abspath(path)  # the working directory may change later
        self._clock = clock or clock_from_boot()
        self._wall = wall
        self._tables = tables
        self.reached = new_reach()
        self._boot = _boot_id()
        self._writer: Writer | None = None
        self._starting = threading.Lock()
        self._is_closed = False

    async def open(self) -> None:
        """Open the file now; a call would do it too."""
        await self._running().ask(Job(nothing, "nothing"))

    async def claim(self, claim: Claim) -> Record:
        if claim.keyless is None:
            found = await self._read(self._judged, claim)
            if found is not None and found[2] == "leave":
                return found[1]
        elif claim.keyless.beside:
            earlier = await self._read(self._earlier, claim)
            if earlier is not None and earlier[0] == "wait":
                return self._record(earlier[1])
        writer = self._running()
        job = Job(partial(self._claim, claim), claims=True)
        try:
            granted: Record = await writer.ask(job)
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
            # Nothing ran. A claim that is not written yet is dropped, and one that is written is
            # undone.
            job.work = nothing
            writer.send(Job(partial(self._unclaim, claim), "unclaim"))
            raise
        return granted

    async def deliver(self, ends: Sequence[Delivered]) -> None:
        if ends:
            await self._running().ask(Job(partial(self._deliver, ends)))

    async def begin_task(self, token: Token, id: str, document: bytes, ttl: float) -> bool:
        return await self._change("begin_task", token, id=id, document=document, ttl=ttl)

    async def task(self, id: str) -> Task | None:
        if not id.isprintable():  # we make no such id, and SQLite may not take such text
            return None
        return await self._read(self._find_task, id)

    async def task_of(self, id: RecordId) -> Task | None:
        return await self._read(self._find_task, id)

    async def change_task(self, task: Task) -> bool:
        changed: bool = await self._running().ask(Job(partial(self._change_task, task)))
        return changed

    async def orphans(self, limit: int = 100) -> Sequence[str]:
        return await self._read(self._orphans, limit)

    async def heartbeat(self, token: Token, lease: float) -> bool:
        return await self._change("heartbeat", token, lease=lease)

    async def commit_point(self, token: Token, lease: float) -> bool:
        return await self._change("commit_point", token, lease=lease)

    async def complete(self, token: Token, outcome: Outcome, retention: float) -> bool:
        completed: bool = await self._running().ask(
            Job(partial(self._complete, token, outcome, retention))
        )
        return completed

    async def suspend(self, token: Token, interim: Outcome, retention: float) -> bool:
        return await self._change("suspend", token, retention=retention, **_parts(interim))

    async def release(self, token: Token) -> bool:
        return await self._change("release", token)

    async def abandon(self, token: Token) -> bool:
        return await self._change("abandon", token)

    async def lapse(self, token: Token) -> bool:
        return await self._change("lapse", token)

    async def resolve(
        self,
        id: RecordId,
        outcome: Outcome | None,
        retention: float = 86_400,
        *,
        fence: int | None = None,
    ) -> bool:
        anyone = Token(id, 0, b"")  # these two statements ask for no token
        if outcome is None:
            return await self._change("resolve_absent", anyone, seen=fence)
        return await self._change(
            "resolve_done", anyone, seen=fence, retention=retention, **_parts(outcome)
        )

    async def get(self, id: RecordId) -> Record | None:
        return await self._read(self._get, id)

    async def list(
        self,
        state: State | None = None,
        *,
        limit: int = 100,
        after: Place | None = None,
        only: Only = ALL,
    ) -> Records:
        return await self._read(self._page, _Asked(state, limit, after, only))

    async def list_tasks(
        self,
        state: State | None = None,
        *,
        limit: int = 100,
        after: Place | None = None,
        only: Only = ALL,
    ) -> Tasks:
        return await self._read(self._page_of_tasks, _Asked(state, limit, after, only))

    async def counts(self) -> dict[State, int]:
        return await self._read(self._counts, None)

    async def sweep(self, limit: int = 500) -> int:
        changed = 0
        while changed < limit:
            piece = min(PIECE, limit - changed)
            swept: int = await self._running().ask(Job(partial(self._sweep, piece)))
            changed += swept
            if swept < piece:
                break
        return changed

    async def mark(
        self, channel: str, mark: Mark, ttl: float, listed: float = MARKS_WITHIN
    ) -> None:
        await self._running().ask(Job(partial(self._mark, channel, mark, ttl)))

    def _mark(self, channel: str, mark: Mark, ttl: float, db: apsw.Cursor, _: int) -> None:
        wall = self._wall()
        db.execute(SQL["forget_marks"], {"wall": wall})
        made = {"channel": channel, "name": mark.name, "content": mark.content}
        db.execute(SQL["mark"], {**made, "wall": wall, "ttl": ttl})

    async def marked(self, channel: str, name: str) -> Mark | None:
        def look(_: None, db: apsw.Cursor) -> Mark | None:
            asked = {"channel": channel, "name": name, "wall": self._wall()}
            content = db.execute(SQL["marked"], asked).get
            return None if content is None else Mark(name, content)

        return await self._read(look, None)

    async def marks(self, channel: str, within: float) -> Sequence[Mark]:
        def look(_: None, db: apsw.Cursor) -> Sequence[Mark]:
            asked = {"channel": channel, "within": within, "wall": self._wall()}
            return [Mark(*row) for row in db.execute(SQL["marks"], asked)]

        return await self._read(look, None)

    async def see(self, identity: bytes | None = None) -> Seen:
        """As in every ledger. A file that has replaced the open one is opened."""
        if identity is not None:
            await self._running().ask(Job(partial(seeing.identify, identity)))
        try:
            return await self._read(self._see, None)
        except Replaced:
            await self._reopen()
            return await self._read(self._see, None)

    def _see(self, _: None, db: apsw.Cursor) -> Seen:
        return seeing.see(self._running().file, db)

    async def _reopen(self) -> None:
        """Leave the open file. Its path names another one, or none: that is not made."""
        with self._starting:
            writer = self._writer
            self._writer = None
            self._tables = "leave"
            self.reached = new_reach()
        if writer is not None:
            await writer.aclose()

    def join(self, channel: str, receive: Receive) -> FolderBus:
        return FolderBus(os.path.realpath(self._path) + "-bus", channel, receive)

    async def ping(self) -> None:
        # Taking a fence is a write that no reader sees.
        await self._running().ask(Job(nothing, claims=True))

    def transaction(self, claim: Claim, wait: float) -> HandlerTransaction:
        """Take the write lock of the file until the end of the block: all other writes wait for it,
        so be short.

        `db` is an apsw connection. The handler may use savepoints on it, but cannot commit: if it
        ends the transaction, everything is undone.
        """
        return HandlerTransaction(
            self._running(), claim, wait, self._look, self._enter, self._complete, self._unclaim
        )

    async def aclose(self) -> None:
        """Write pending changes and close the file; the last process to close it folds the WAL into
        it.
        """
        with self._starting:
            self._is_closed = True
            writer = self._writer
            self._writer = None
        if writer is not None:
            await writer.aclose()

    def _running(self) -> Writer:
        """Return the writer; a new one after a failure, and after a fork."""
        writer = self._writer
        if writer is not None and writer.failure is None:
            return writer
        with self._starting:
            writer = self._writer
            if self._is_closed:
                raise LedgerDown(f"The ledger {self._path} is closed.")
            if writer is None or writer.failure is not None:  # else another thread was faster
                writer = self._writer = Writer(self._path, owner=self, tables=self._tables)
            return writer

    # --- reading, in the calling thread -----------------------------------------------------------

    async def _read(self, look: Callable[[Q, apsw.Cursor], T], question: Q) -> T:
        writer = self._running()
        if writer.reader is None:  # the file is being opened
            await writer.ask(Job(nothing, "nothing"))
        try:
            with writer.reading:  # apsw refuses a connection that two threads use at once
                if writer.reader is None:
                    raise LedgerDown(f"The ledger {self._path} is closed.")
                return look(question, writer.reader)
        except Locked:
            raise
        except Exception as error:  # from SQLite, or over a damaged row
            raise as_down(self._path, error) from error

    def _get(self, id: RecordId, db: apsw.Cursor) -> Record | None:
        row = db.execute(SQL["find"], (id.caller, id.method, id.key)).get
        return row and self._record(Row(*row))

    def _page(self, asked: "_Asked", db: apsw.Cursor) -> Records:
        """Merge the newest records of each state and method that is asked for."""
        found = self._of_caller(asked, db)
        if found is not None:
            return found[: asked.limit]
        found = []
        with db.connection:  # one moment: a record may change its state in between
            for state, is_dead in STORED[asked.state]:
                found += self._newest(state, is_dead, asked, db)
        found.sort(key=lambda record: record.place, reverse=True)
        return found[: asked.limit]

    def _of_caller(self, asked: "_Asked", db: apsw.Cursor) -> Records | None:
        """Return the records of a caller that has few, or None.

        In the order of time they may be anywhere.
        """
        if asked.only.caller is None:
            return None
        rows: Any = db.execute(SQL["of_caller"], {**asked.values, "most": FEW + 1}).fetchall()
        if len(rows) > FEW:
            return None
        records = [self._record(Row(*row)) for row in rows]
        found = [
            record
            for record in records
            if asked.state in (None, record.standing)
            and (asked.after is None or record.place < asked.after)
            and asked.only.has(record)
        ]
        return sorted(found, key=lambda record: record.place, reverse=True)

    def _newest(
        self, state: State, is_dead: bool | None, asked: "_Asked", db: apsw.Cursor
    ) -> Records:
        name = "page" if is_dead is None else "page_running"
        values = {**asked.values, **self._now(), "state": state.value, "is_dead": is_dead}
        methods: Names = [] if asked.only.method is None else [asked.only.method]
        if not methods:
            methods = [method for (method,) in db.execute(SQL["methods"], values)]
        found: Records = []
        for method in methods:
            rows = db.execute(SQL[name], {**values, "method": method})
            found += [self._record(Row(*row)) for row in rows]
        return found

    def _page_of_tasks(self, asked: "_Asked", db: apsw.Cursor) -> Tasks:
        values = {**asked.values, "only_method": asked.only.method}
        found: Tasks = []
        for row in db.execute(SQL["page_of_tasks"], values):
            task = self._task(row)
            if task is None or task.now is None:
                continue
            if asked.state in (None, task.now.standing):
                found.append(task)
            if len(found) == asked.limit:
                break
        return found

    def _counts(self, _: None, db: apsw.Cursor) -> dict[State, int]:
        counts = dict.fromkeys(State, 0)
        for state, number in db.execute(SQL["counts"]):
            counts[State(state)] = number
        dead: int = db.execute(SQL["count_dead"], self._now()).get
        counts[State.RUNNING] -= dead
        counts[State.UNKNOWN] += dead
        return counts

    def _find_task(self, id: str | RecordId, db: apsw.Cursor) -> Task | None:
        """Find the task with this id, or the last one of the record with this id."""
        if isinstance(id, RecordId):
            found = db.execute(SQL["task_of"], (id.caller, id.method, id.key)).get
        else:
            found = db.execute(SQL["task"], (id,)).get
        if found is None:
            return None
        return self._task(found)

    def _task(self, found: Any) -> Task | None:
        """Return the task of a row, with its record; None after its ttl."""
        name, caller, method, key, version, document, is_ready, is_over, *ending = found[
            : -len(Row._fields)
        ]
        left = self._ttl_left(*ending)
        if left <= 0:
            return None
        row = found[-len(Row._fields) :]
        now = None
        if row[0] is not None:
            now = self._record(Row(*row))
        return Task(
            name,
            RecordId(caller, method, key),
            version,
            document,
            bool(is_ready),
            bool(is_over),
            left,
            now,
        )

    def _orphans(self, limit: int, db: apsw.Cursor) -> Names:
        found: Names = []
        rows: Any = db.execute(SQL["open_tasks"]).fetchall()
        for id, ttl, until, boot, expires_at, state, *lease in rows:
            is_free = state == "waiting" or not self._time_left(*lease)
            if is_free and self._ttl_left(ttl, until, boot, expires_at) > 0:
                found.append(id)
        return found[:limit]

    async def _look(self, claim: Claim) -> Record | None:
        return await self._read(self._seen, claim)

    def _seen(self, claim: Claim, db: apsw.Cursor) -> Record | None:
        """Return the record for a handler's transaction.

        None: that needs a write, or the claim holds it.
        """
        if self._repeated(claim, db) is not None:
            return None
        found = self._judged(claim, db)
        if found is None or _holds(claim, found[1]):
            return None
        return self._shown(*found)

    def _shown(self, row: Row, record: Record, verdict: Verdict) -> Record:
        """Return the record as a handler's transaction sees it.

        A record that is due for burial is already a tombstone.
        """
        if verdict == "to_tombstone":
            return self._record(self._buried(row))
        return record

    def _repeated(self, claim: Claim, db: apsw.Cursor) -> Row | None:
        """Find the record whose call this one repeats: the transaction delivers its answer.

        A run under a lease, and an answer that is pending elsewhere, delay it as another
        transaction would.
        """
        earlier = self._earlier(claim, db)
        if earlier is None:
            return None
        recognition, row = earlier
        if recognition == "wait" or (
            row.state == "running" and self._time_left(row.lease_until, row.lease, row.boot)
        ):
            raise Locked(f"{claim.id}: an equal call is in progress.")
        return row

    def _earlier(self, claim: Claim, db: apsw.Cursor) -> tuple[Recognition, Row] | None:
        """Find the record that a call without a key repeats ("match").

        Without one, find the record that the call has to wait for.
        """
        keyless = claim.keyless
        if keyless is None or keyless.likeness is None:
            return None
        alike = [Row(*found) for found in db.execute(SQL["alike"], (keyless.likeness,))]
        if not alike:  # the usual case
            return None
        # In the order of the contract, but first the one that an earlier try of this claim took.
        alike.sort(key=partial(_turn_to_match, claim.nonce))
        waited_for = None
        for row in alike:
            # There may be many equal calls at once: most of those of this process are skipped
            # without a closer look.
            is_beside = (
                row.key in keyless.beside and row.delivery == "pending" and row.state != "unknown"
            )
            if is_beside and row.deliverer != claim.nonce:
                continue
            recognition = recognise(self._record(row), claim, self._since(row))
            if recognition == "match":
                return recognition, row
            if recognition == "wait" and waited_for is None:
                waited_for = recognition, row
        return waited_for

    def _judged(self, claim: Claim, db: apsw.Cursor) -> tuple[Row, Record, Verdict] | None:
        """Find the record of a claim, and decide what the claim does to it.

        None: there is no record.
        """
        id = claim.id
        found = db.execute(SQL["find"], (id.caller, id.method, id.key)).get
        if found is None:
            return None
        return self._judge(claim, Row(*found))

    def _judge(self, claim: Claim, row: Row) -> tuple[Row, Record, Verdict]:
        record = self._record(row)
        is_expired = row.expires_at <= self._wall() and not self._time_left(
            row.lease_until, row.lease, row.boot
        )
        return row, record, decide(record, claim, expired=is_expired)

    # --- writing, in the writer's thread and inside a transaction ---------------------------------

    async def _change(self, name: str, token: Token, **values: Any) -> bool:
        """Make a transition that is one statement; return whether it applied."""
        changed: bool = await self._running().ask(Job(partial(self._execute, name, token, values)))
        return changed

    def _execute(
        self, name: str, token: Token, values: dict[str, Any], db: apsw.Cursor, _: int = 0
    ) -> bool:
        id = token.id
        names = {
            "caller": id.caller,
            "method": id.method,
            "key": id.key,
            "fence": token.fence,
            "nonce": token.nonce,
        }
        db.execute(SQL[name], {**names, **values, **self._now()})
        return db.connection.changes() > 0

    def _claim(self, claim: Claim, db: apsw.Cursor, fence: int) -> Record:
        earlier = self._earlier(claim, db)
        if earlier is None:
            # Usually there is no record, so look for one only if the insert meets it.
            record = self._insert(claim, db, fence)
            if db.connection.changes():
                return record
            found = self._judged(claim, db)
            assert found is not None  # this is one transaction
        elif earlier[0] == "wait":
            return self._record(earlier[1])
        else:
            found = self._judge(claim, self._taken(claim, earlier[1]))
        row, record, verdict = found
        if verdict == "leave" and earlier is None:
            return record
        if verdict == "to_unknown":
            row = self._unknown(row)
        elif verdict == "to_tombstone":
            row = self._buried(row)
        elif verdict != "leave":
            if verdict != "renew":
                row = row._replace(
                    fence=fence,
                    committed=row.committed or claim.committed,
                    attempts=row.attempts + 1,
                )
            may_rerun = None
            if claim.on_crash != "unknown":
                may_rerun = 1
            row = row._replace(
                state="running",
                nonce=claim.nonce,
                lease=claim.lease,
                lease_until=self._clock() + claim.lease,
                boot=self._boot,
                due=row.started_at + claim.retention,
                expires_at=self._wall() + claim.lease + claim.retention,
                may_rerun=may_rerun,
                outcome_kind=None,
                payload=None,
                digest=None,
            )
        db.execute(SQL["put"], row)
        return self._record(row)

    def _insert(self, claim: Claim, db: apsw.Cursor, fence: int) -> Record:
        """Insert the record of a first claim, unless there is one already.

        Every command does this, so it is quick: values are in the order of `Row` and `Record`, as
        by their names it would take three times as long.
        """
        id = claim.id
        print = claim.fingerprint
        nonce = claim.nonce
        committed = claim.committed
        lease = claim.lease
        wall = self._wall()
        ends = self._clock() + lease
        due = wall + claim.retention
        keyless = claim.keyless
        answer: tuple[Any, ...] = (None,) * 5
        if keyless is not None:
            answer = ("pending", nonce, None, None, keyless.likeness)
        may_rerun = None
        if claim.on_crash != "unknown":
            may_rerun = 1
        # fmt: off
        db.execute(SQL["put_new"], (
            id.caller, id.method, id.key, print, "running", fence, nonce, committed, 1,
            lease, ends, self._boot, due, due + lease, wall, None, None, None, None, *answer,
            claim.params, may_rerun,
        ))
        # fmt: on
        facts = (id, print, State.RUNNING, fence, nonce, committed, 1, lease, wall, None, None)
        if keyless is None:
            return Record(*facts, params=claim.params)
        return Record(*facts, "pending", nonce, claim.params)

    def _enter(self, claim: Claim, db: apsw.Cursor) -> tuple[Record, bool]:
        """Find the record for a handler's transaction, or insert it.

        Return whether this claim holds it.
        """
        repeated = self._repeated(claim, db)
        if repeated is not None:
            row = self._taken(claim, repeated)
            db.execute(SQL["put"], row)
            return self._shown(*self._judge(claim, row)), False
        found = self._judged(claim, db)
        if found is not None:
            return self._shown(*found), _holds(claim, found[1])
        return self._insert(claim, db, take_fences(db, 1) + 1), True

    def _complete(
        self, token: Token, outcome: Outcome, retention: float, db: apsw.Cursor, _: int = 0
    ) -> bool:
        # The common case, with values in the order in which the statement names them.
        id = token.id
        times = (retention, self._clock(), self._boot, self._wall())
        ended = (outcome.kind, outcome.payload, outcome.digest)
        db.execute(
            SQL["complete"],
            (*times, *ended, id.caller, id.method, id.key, token.fence, token.nonce),
        )
        if db.connection.changes():
            return True
        return self._execute(
            "complete_late", token, {"retention": retention, **_parts(outcome)}, db
        )

    def _unclaim(self, claim: Claim, db: apsw.Cursor, _: int) -> None:
        ids = {claim.id}
        if claim.keyless is not None:  # it may have taken over an earlier call, or its answer alone
            alike = [Row(*found) for found in db.execute(SQL["alike"], (claim.keyless.likeness,))]
            ids |= {RecordId(*row[:3]) for row in alike if row.deliverer == claim.nonce}
        for id in ids:
            for name in ("unclaim_first", "unclaim_later"):
                self._execute(name, Token(id, 0, claim.nonce), {}, db)
            self._deliver([Delivered(id, claim.nonce, "undelivered")], db)

    def _deliver(self, ends: Sequence[Delivered], db: apsw.Cursor, _: int = 0) -> None:
        now = self._clock(), self._boot  # values are in the order in which the statement names them
        rows = [
            (end.delivery, *now, end.id.caller, end.id.method, end.id.key, end.deliverer)
            for end in ends
        ]
        db.executemany(SQL["deliver"], rows)

    def _change_task(self, task: Task, db: apsw.Cursor, _: int) -> bool:
        if self._find_task(task.id, db) is None:
            return False
        db.execute(
            SQL["change_task"], (task.document, task.is_ready, task.is_over, task.id, task.version)
        )
        return db.connection.changes() > 0

    def _sweep(self, limit: int, db: apsw.Cursor, _: int) -> int:
        now = self._now()
        dead = [
            Row(*row)
            for row in db.execute(SQL["dead"], {**now, "limit": limit, "after": UNKNOWN_AFTER})
        ]
        for row in dead:
            db.execute(SQL["put"], self._unknown(row))
        limit -= len(dead)
        due = [Row(*row) for row in db.execute(SQL["due"], {**now, "limit": limit})]
        for row in due:
            if row.state == "done":
                db.execute(SQL["put"], self._buried(row))
            elif row.state == "running" and row.committed:
                db.execute(SQL["put"], self._unknown(row))
            else:  # it is a tombstone, or nothing was done
                db.execute(SQL["remove"], row[:3])
        db.execute(SQL["forget_tasks"], {**now, "limit": limit - len(due)})
        return len(dead) + len(due) + db.connection.changes()

    # --- rows -------------------------------------------------------------------------------------

    def _record(self, row: Row) -> Record:
        """Return the record of a row; values are in the order of `Row` and `Record`."""
        # fmt: off
        (
            caller, method, key, print, state, fence, nonce, committed, attempts, lease,
            lease_until, boot, _, _, started_at, completed_at, kind, payload, digest, delivery,
            deliverer, _, _, _, params, _,
        ) = row
        # fmt: on
        left = 0.0
        if state == "running":
            left = self._time_left(lease_until, lease, boot)
        outcome = None
        if kind is not None and digest is not None:
            outcome = Outcome(kind, payload, digest)
        return Record(
            RecordId(caller, method, key),
            print,
            _STATES[state],
            fence,
            nonce,
            bool(committed),
            attempts,
            left,
            started_at,
            completed_at,
            outcome,
            delivery,
            deliverer or b"",
            params,
        )

    def _now(self) -> dict[str, Any]:
        return {"wall": self._wall(), "clock": self._clock(), "boot": self._boot}

    def _time_left(self, until: float, whole: float, boot: bytes) -> float:
        """Return how much of a lease, retention or ttl remains by the boot clock.

        Nothing remains if it began in another boot. If the system does not report the boot, a rest
        that is longer than the whole shows that the clock restarted.
        """
        left = until - self._clock()
        if left <= 0 or self._is_other_boot(boot) or left > whole + 1:
            return 0.0
        return left

    def _ttl_left(self, ttl: float, until: float, boot: bytes, expires_at: float) -> float:
        """Return how much of the ttl of a task remains. It is over when both clocks say so."""
        return max(expires_at - self._wall(), self._time_left(until, ttl, boot))

    def _since(self, row: Row) -> float:
        """Return the seconds since the answer was lost, as `recognise` counts them."""
        at = row.answer_at or 0.0
        boot = row.answer_boot
        if row.state == "running":
            at = row.lease_until
            boot = row.boot
        now = self._clock()
        if at > now or self._is_other_boot(boot):
            return now
        return now - at

    def _is_other_boot(self, boot: bytes | None) -> bool:
        return bool(boot != self._boot and boot and self._boot)

    def _taken(self, claim: Claim, row: Row) -> Row:
        """Return the row after a repetition took its answer over."""
        return row._replace(
            delivery="pending",
            deliverer=claim.nonce,
            answer_at=self._clock(),
            answer_boot=self._boot,
        )

    def _unknown(self, row: Row) -> Row:
        """Return the row with an unknown outcome.

        Without an answer, a loss counts from the end of the run.
        """
        unknown = row._replace(state="unknown", lease_until=0.0, due=math.inf, expires_at=math.inf)
        is_answered = row.answer_at is not None and row.answer_boot == self._boot
        is_later = self._is_other_boot(row.boot) or (row.answer_at or 0.0) >= row.lease_until
        if row.delivery is None or (is_answered and is_later):
            return unknown
        return unknown._replace(answer_at=row.lease_until, answer_boot=row.boot)

    def _buried(self, row: Row) -> Row:
        retention = row.due - row.started_at
        left = (TOMBSTONE_FACTOR - 1) * retention
        return row._replace(
            state="tombstone",
            lease=left,
            lease_until=self._clock() + left,
            boot=self._boot,
            due=row.started_at + TOMBSTONE_FACTOR * retention,
            expires_at=self._wall() + left,
            payload=None,
            likeness=None,
            params=None,
        )


def _turn_to_match(nonce: bytes, row: Row) -> tuple[bool, bool, bool, int]:
    return row.deliverer != nonce, row.delivery != "undelivered", row.state != "unknown", row.fence


def _holds(claim: Claim, record: Record) -> bool:
    return record.state is State.RUNNING and record.nonce == claim.nonce


def _parts(outcome: Outcome) -> dict[str, Any]:
    return {"kind": outcome.kind, "payload": outcome.payload, "digest": outcome.digest}


def _boot_id() -> bytes:
    """Return the id of this boot of the machine, or nothing if the system does not report it."""
    try:
        return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    except (OSError, ValueError):
        return b""
