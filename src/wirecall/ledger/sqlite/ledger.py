"""The ledger in an SQLite file: one host, many processes, nothing to install. The default in production.

The rules of the file:

1. One thread of the process writes (`writer`). All transitions that wait at the moment go into one transaction and one
   fsync, and no caller is answered before that. Every wish for the write lock of the file goes through its queue, which is
   the order. An event loop never commits.
2. Readers do not wait (WAL): a claim that changes nothing is answered by a read in the calling thread. A claim without a key
   makes a new record, as a rule, so the writer's own look is enough. Only one that knows of equal calls (`beside`) reads
   first: it may have to wait for them, and asks again and again.
3. Leases are measured by the clock that counts from boot, which cannot be set, and a record tells which boot it means: a
   lease of another boot is over. So is the time since an answer was lost; a loss of another boot counts from the start of
   this one, as no caller could repeat its call while the machine was off, and only the wall clock tells how long that was.
   Retention is over when the wall clock says so and, within one boot, that clock too. The times that people read are wall
   time.
4. The file may be the user's own, with the tables that `transactional` handlers write to. So its `user_version` is left
   alone, its `application_id` is set only in a file that we made, and the version of our tables is in one of them. In the
   same process use apsw for it: Python's sqlite3 is a second copy of SQLite, and two copies release each other's locks.
5. Of SQLite's errors only `LedgerDown` leaves this file. It never means that the writer is broken: when the disk has room
   again, or the lock is free, the next call works.

Without a running event loop the methods wait in the calling thread, so that `handle_sync` can use this ledger.
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

from wirecall.errors import UsageError
from wirecall.ledger.base import (
    TOMBSTONE_FACTOR,
    Claim,
    Delivered,
    LedgerDown,
    Locked,
    Outcome,
    Recognition,
    Record,
    RecordId,
    State,
    Task,
    Token,
    Verdict,
    decide,
    recognise,
)
from wirecall.ledger.sqlite.file import SQL, Row, as_down
from wirecall.ledger.sqlite.transaction import HandlerTransaction
from wirecall.ledger.sqlite.writer import Job, Writer, nothing, take_fences

T = TypeVar("T")
Q = TypeVar("Q")
Names: TypeAlias = list[str]  # inside the class, `list` is a method
_STATES = {state.value: state for state in State}


async def open_url(url: str) -> "SqliteLedger":
    """Open the ledger in the file of `sqlite:PATH`; its folder is made if need be, with mode 0700."""
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
    ledger = SqliteLedger(path.removeprefix("//"))
    await ledger.open()
    return ledger


class SqliteLedger:
    """A ledger in a file, for any number of event loops, threads and processes."""

    is_tidy = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        clock: Callable[[], float] | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._path = os.path.abspath(path)  # the working directory may change later
        self._clock = clock or clock_from_boot()
        self._wall = wall
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
        writer, job = self._running(), Job(partial(self._claim, claim), claims=True)
        try:
            granted: Record = await writer.ask(job)
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
            # Nothing ran. A claim that is not written yet is dropped, and one that is written is undone.
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
        completed: bool = await self._running().ask(Job(partial(self._complete, token, outcome, retention)))
        return completed

    async def suspend(self, token: Token, interim: Outcome, retention: float) -> bool:
        return await self._change("suspend", token, retention=retention, **_parts(interim))

    async def release(self, token: Token) -> bool:
        return await self._change("release", token)

    async def abandon(self, token: Token) -> bool:
        return await self._change("abandon", token)

    async def lapse(self, token: Token) -> bool:
        return await self._change("lapse", token)

    async def resolve(self, id: RecordId, outcome: Outcome | None, retention: float = 86_400) -> bool:
        anyone = Token(id, 0, b"")  # these two statements ask for no token
        if outcome is None:
            return await self._change("resolve_absent", anyone)
        return await self._change("resolve_done", anyone, retention=retention, **_parts(outcome))

    async def get(self, id: RecordId) -> Record | None:
        return await self._read(self._get, id)

    async def list(self, state: State | None = None, *, limit: int = 100, after: RecordId | None = None) -> list[Record]:
        first = after or RecordId("", "", "")
        values: dict[str, Any] = {"caller": first.caller, "method": first.method, "key": first.key, "limit": limit}
        if state is None:
            name = "page"
        else:
            name = "page_of_few" if state in (State.UNKNOWN, State.WAITING) else "page_of_many"
            values["state"] = state.value
        return await self._read(lambda name, db: [self._record(Row(*row)) for row in db.execute(SQL[name], values)], name)

    async def counts(self) -> dict[State, int]:
        found = await self._read(lambda name, db: {row[0]: row[1] for row in db.execute(SQL[name])}, "counts")
        return {state: found.get(state.value, 0) for state in State}

    async def sweep(self, limit: int = 500) -> int:
        changed: int = await self._running().ask(Job(partial(self._sweep, limit)))
        return changed

    async def ping(self) -> None:
        await self._running().ask(Job(nothing, claims=True))  # to take a fence is a write that no reader sees

    def transaction(self, claim: Claim, wait: float) -> HandlerTransaction:
        """Take the write lock of the file until the end of the block: all other writes wait for it, so be short.

        `db` is an apsw connection. The handler may use savepoints on it, but cannot commit: if it ends the transaction,
        everything is undone.
        """
        return HandlerTransaction(self._running(), claim, wait, self._look, self._enter, self._complete, self._unclaim)

    async def aclose(self) -> None:
        """Write what waits and close the file; the last process to close it folds the WAL into it."""
        with self._starting:
            self._is_closed = True
            writer, self._writer = self._writer, None
        if writer is not None:
            await writer.aclose()

    def _running(self) -> Writer:
        """The writer; a new one after a failure, and after a fork."""
        writer = self._writer
        if writer is not None and writer.failure is None:
            return writer
        with self._starting:
            writer = self._writer
            if self._is_closed:
                raise LedgerDown(f"The ledger {self._path} is closed.")
            if writer is None or writer.failure is not None:  # else another thread was faster
                writer = self._writer = Writer(self._path, owner=self)
            return writer

    # --- reading, in the calling thread ------------------------------------------------------------------------------

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
        except Exception as error:  # of SQLite; or a damaged row
            raise as_down(self._path, error) from error

    def _get(self, id: RecordId, db: apsw.Cursor) -> Record | None:
        row = db.execute(SQL["find"], (id.caller, id.method, id.key)).get
        return row and self._record(Row(*row))

    def _find_task(self, id: str | RecordId, db: apsw.Cursor) -> Task | None:
        """Find the task with this id, or the last one of the record with this id."""
        if isinstance(id, RecordId):
            found = db.execute(SQL["task_of"], (id.caller, id.method, id.key)).get
        else:
            found = db.execute(SQL["task"], (id,)).get
        if found is None:
            return None
        name, caller, method, key, version, document, is_ready, is_over, *ending = found[: -len(Row._fields)]
        left, row = self._ttl_left(*ending), found[-len(Row._fields) :]
        now = None if row[0] is None else self._record(Row(*row))
        task = Task(name, RecordId(caller, method, key), version, document, bool(is_ready), bool(is_over), left, now)
        return task if left > 0 else None

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
        """Return the record for a handler's transaction, unless that needs a write, or opens on the record."""
        found = self._judged(claim, db) if self._repeated(claim, db) is None else None
        return None if found is None or _holds(claim, found[1]) else self._shown(*found)

    def _shown(self, row: Row, record: Record, verdict: Verdict) -> Record:
        """The record as a handler's transaction sees it: one that is due to become a tombstone looks like one already."""
        return self._record(self._buried(row)) if verdict == "to_tombstone" else record

    def _repeated(self, claim: Claim, db: apsw.Cursor) -> Row | None:
        """Find the record whose answer a handler's transaction gives, because its call repeats that one.

        A run under a lease, and an answer that is on its way elsewhere, hold it up as another transaction would.
        """
        earlier = self._earlier(claim, db)
        if earlier is None:
            return None
        recognition, row = earlier
        if recognition == "wait" or (row.state == "running" and self._time_left(row.lease_until, row.lease, row.boot)):
            raise Locked(f"{claim.id}: an equal call is in progress.")
        return row

    def _earlier(self, claim: Claim, db: apsw.Cursor) -> tuple[Recognition, Row] | None:
        """Find the record that a call without a key repeats ("match"), or else the one that it has to wait for."""
        keyless = claim.keyless
        if keyless is None or keyless.likeness is None:
            return None
        alike = [Row(*found) for found in db.execute(SQL["alike"], (keyless.likeness,))]
        if not alike:  # as a rule
            return None
        # In the order of the contract, but first the one that an earlier try of this claim took.
        alike.sort(key=lambda row: (row.deliverer != claim.nonce, row.delivery != "undelivered", row.fence))
        waited_for = None
        for row in alike:
            # Equal calls at once may be many: most of those of this process are passed over without a closer look.
            if row.key in keyless.beside and row.delivery == "pending" and row.deliverer != claim.nonce:
                continue
            recognition = recognise(self._record(row), claim, self._since(row))
            if recognition == "match":
                return recognition, row
            if recognition == "wait" and waited_for is None:
                waited_for = recognition, row
        return waited_for

    def _judged(self, claim: Claim, db: apsw.Cursor) -> tuple[Row, Record, Verdict] | None:
        """Find the record of a claim, and decide what the claim does to it; None if there is no record."""
        id = claim.id
        found = db.execute(SQL["find"], (id.caller, id.method, id.key)).get
        return None if found is None else self._judge(claim, Row(*found))

    def _judge(self, claim: Claim, row: Row) -> tuple[Row, Record, Verdict]:
        record = self._record(row)
        is_expired = row.expires_at <= self._wall() and not self._time_left(row.lease_until, row.lease, row.boot)
        return row, record, decide(record, claim, expired=is_expired)

    # --- writing, in the writer's thread and inside a transaction ----------------------------------------------------

    async def _change(self, name: str, token: Token, **values: Any) -> bool:
        """Make a transition that is one statement of its own; returns whether it applied."""
        changed: bool = await self._running().ask(Job(partial(self._execute, name, token, values)))
        return changed

    def _execute(self, name: str, token: Token, values: dict[str, Any], db: apsw.Cursor, _: int = 0) -> bool:
        id = token.id
        names = {"caller": id.caller, "method": id.method, "key": id.key, "fence": token.fence, "nonce": token.nonce}
        db.execute(SQL[name], {**names, **values, "clock": self._clock(), "wall": self._wall(), "boot": self._boot})
        return db.connection.changes() > 0

    def _claim(self, claim: Claim, db: apsw.Cursor, fence: int) -> Record:
        earlier = self._earlier(claim, db)
        if earlier is None:
            # As a rule there is no record, so it is looked for only if the insert meets one.
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
            row = row._replace(state="unknown", lease_until=0.0, due=math.inf, expires_at=math.inf)
        elif verdict == "to_tombstone":
            row = self._buried(row)
        elif verdict != "leave":
            is_same = verdict == "renew"
            row = row._replace(
                state="running",
                fence=row.fence if is_same else fence,
                nonce=claim.nonce,
                committed=row.committed or (claim.committed and not is_same),
                attempts=row.attempts if is_same else row.attempts + 1,
                lease=claim.lease,
                lease_until=self._clock() + claim.lease,
                boot=self._boot,
                due=row.started_at + claim.retention,
                expires_at=self._wall() + claim.lease + claim.retention,
                outcome_kind=None,
                payload=None,
                digest=None,
            )
        db.execute(SQL["put"], row)
        return self._record(row)

    def _insert(self, claim: Claim, db: apsw.Cursor, fence: int) -> Record:
        """Insert the record of a first claim, unless there is one already; every command does this, so it is quick:
        values are in the order of `Row` and `Record`, as by their names it would take three times as long."""
        id, print, nonce, committed, lease = claim.id, claim.fingerprint, claim.nonce, claim.committed, claim.lease
        wall, ends = self._wall(), self._clock() + lease
        due = wall + claim.retention
        keyless = claim.keyless
        answer = (None,) * 5 if keyless is None else ("pending", nonce, None, None, keyless.likeness)
        # fmt: off
        db.execute(SQL["put_new"], (
            id.caller, id.method, id.key, print, "running", fence, nonce, committed, 1,
            lease, ends, self._boot, due, due + lease, wall, None, None, None, None, *answer,
        ))
        # fmt: on
        if keyless is None:
            return Record(id, print, State.RUNNING, fence, nonce, committed, 1, lease, wall)
        return Record(id, print, State.RUNNING, fence, nonce, committed, 1, lease, wall, None, None, "pending", nonce)

    def _enter(self, claim: Claim, db: apsw.Cursor) -> tuple[Record, bool]:
        """Find the record for a handler's transaction, or insert it; returns whether this claim holds it."""
        repeated = self._repeated(claim, db)
        if repeated is not None:
            row = self._taken(claim, repeated)
            db.execute(SQL["put"], row)
            return self._shown(*self._judge(claim, row)), False
        found = self._judged(claim, db)
        if found is not None:
            return self._shown(*found), _holds(claim, found[1])
        return self._insert(claim, db, take_fences(db, 1) + 1), True

    def _complete(self, token: Token, outcome: Outcome, retention: float, db: apsw.Cursor, _: int = 0) -> bool:
        # The common case, with values in the order in which the statement names them.
        id = token.id
        times = (retention, self._clock(), self._boot, self._wall())
        ended = (outcome.kind, outcome.payload, outcome.digest)
        db.execute(SQL["complete"], (*times, *ended, id.caller, id.method, id.key, token.fence, token.nonce))
        if db.connection.changes():
            return True
        return self._execute("complete_late", token, {"retention": retention, **_parts(outcome)}, db)

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
        rows = [(end.delivery, *now, end.id.caller, end.id.method, end.id.key, end.deliverer) for end in ends]
        db.executemany(SQL["deliver"], rows)

    def _change_task(self, task: Task, db: apsw.Cursor, _: int) -> bool:
        if self._find_task(task.id, db) is None:
            return False
        db.execute(SQL["change_task"], (task.document, task.is_ready, task.is_over, task.id, task.version))
        return db.connection.changes() > 0

    def _sweep(self, limit: int, db: apsw.Cursor, _: int) -> int:
        now = {"wall": self._wall(), "clock": self._clock(), "boot": self._boot}
        due = [Row(*row) for row in db.execute(SQL["due"], {**now, "limit": limit})]
        for row in due:
            if row.state == "done":
                db.execute(SQL["put"], self._buried(row))
            elif row.state == "running" and row.committed:
                lost = row._replace(state="unknown", lease_until=0.0, due=math.inf, expires_at=math.inf, likeness=None)
                db.execute(SQL["put"], lost)
            else:  # it is a tombstone, or nothing was done
                db.execute(SQL["remove"], row[:3])
        db.execute(SQL["forget_tasks"], {**now, "limit": limit - len(due)})
        return len(due) + db.connection.changes()

    # --- rows --------------------------------------------------------------------------------------------------------

    def _record(self, row: Row) -> Record:
        """Return the record of a row; values are in the order of `Row` and `Record`."""
        # fmt: off
        (
            caller, method, key, print, state, fence, nonce, committed, attempts, lease, lease_until, boot, _, _,
            started_at, completed_at, kind, payload, digest, delivery, deliverer, _, _, _,
        ) = row
        # fmt: on
        return Record(
            RecordId(caller, method, key),
            print,
            _STATES[state],
            fence,
            nonce,
            bool(committed),
            attempts,
            self._time_left(lease_until, lease, boot) if state == "running" else 0.0,
            started_at,
            completed_at,
            None if kind is None or digest is None else Outcome(kind, payload, digest),
            delivery,
            deliverer or b"",
        )

    def _time_left(self, until: float, whole: float, boot: bytes) -> float:
        """How much of a lease, retention or ttl is left by the clock that counts from boot; 0 if it began in another boot.

        Where the system does not tell the boot, a rest that is longer than the whole shows that the clock began anew.
        """
        left = until - self._clock()
        return 0.0 if left <= 0 or self._is_other_boot(boot) or left > whole + 1 else left

    def _ttl_left(self, ttl: float, until: float, boot: bytes, expires_at: float) -> float:
        """How much of the ttl of a task is left. It is over when both clocks say so."""
        return max(expires_at - self._wall(), self._time_left(until, ttl, boot))

    def _since(self, row: Row) -> float:
        """Seconds since the answer was lost, as `recognise` counts them."""
        at, boot = (row.lease_until, row.boot) if row.state == "running" else (row.answer_at or 0.0, row.answer_boot)
        now = self._clock()
        return now if at > now or self._is_other_boot(boot) else now - at

    def _is_other_boot(self, boot: bytes | None) -> bool:
        return bool(boot != self._boot and boot and self._boot)

    def _taken(self, claim: Claim, row: Row) -> Row:
        """The row after a repetition took its answer over."""
        return row._replace(delivery="pending", deliverer=claim.nonce, answer_at=self._clock(), answer_boot=self._boot)

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
        )


def _holds(claim: Claim, record: Record) -> bool:
    return record.state is State.RUNNING and record.nonce == claim.nonce


def _parts(outcome: Outcome) -> dict[str, Any]:
    return {"kind": outcome.kind, "payload": outcome.payload, "digest": outcome.digest}


def clock_from_boot() -> Callable[[], float]:
    number = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic if number is None else partial(time.clock_gettime, number)


def _boot_id() -> bytes:
    """Which boot of the machine this is, or nothing where the system does not tell."""
    try:
        return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    except (OSError, ValueError):
        return b""
