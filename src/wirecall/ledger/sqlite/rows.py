"""The rows of an SQLite ledger, and what the transitions do to them. Who calls them has begun a transaction, or has none:
see `Table`."""

import math
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import apsw

from wirecall.ledger.base import (
    TOMBSTONE_FACTOR,
    Claim,
    Outcome,
    Record,
    RecordId,
    State,
    Token,
    Verdict,
    decide,
)
from wirecall.ledger.sqlite.file import SQL

_STATES = {state.value: state for state in State}

_PUT_NEW = SQL["put_new"]
_PUT_FIRST = SQL["put_first"]
_COMPLETE = SQL["complete"]

# How many fences a process takes from the file at once. What it has not given when it ends is lost, and nobody misses it.
FENCES = 1000


class Row(NamedTuple):
    """A row of wirecall_commands, as `SELECT *` gives it."""

    caller: str
    method: str
    key: str
    fingerprint: bytes
    state: str
    fence: int
    nonce: bytes
    committed: int
    attempts: int
    lease: float
    lease_until: float
    boot: bytes
    due: float
    expires_at: float
    started_at: float
    completed_at: float | None = None
    outcome_kind: Literal["result", "error"] | None = None
    payload: bytes | None = None
    digest: bytes | None = None


class Fences:
    """Numbers that only grow, over all processes: who gives one has the write lock of the file.

    They are taken in blocks, since to take one is to write a page. The rest of a block is good for as long as nobody else
    has taken one after it: that is looked up once in a transaction (`begin`), or by the statement that needs it (`take`). If
    a transaction is undone, so may be the taking of its block, and then another process gets the same numbers: so the rest
    of it is forgotten (`forget`).
    """

    def __init__(self) -> None:
        self._last = self._end = 0
        self._is_checked = False

    def begin(self) -> None:
        self._is_checked = False

    def forget(self) -> None:
        self._last = self._end = 0

    def take(self) -> tuple[int, int] | None:
        """A fence, and what the file must say for it to be good; None where the block is used up."""
        if self._last == self._end:
            return None
        self._last += 1
        return self._last, self._end

    def next(self, db: apsw.Cursor) -> int:
        if not self._is_checked:
            if db.execute(SQL["last_fence"]).get != self._end:
                self.forget()
            self._is_checked = True
        if self._last == self._end:
            self._end = take_fences(db, FENCES)
            self._last = self._end - FENCES
        self._last += 1
        return self._last


def take_fences(db: apsw.Cursor, count: int) -> int:
    """Take `count` fences that nobody has had; the last of them."""
    db.execute(SQL["take_fences"], (count,))
    last: int = db.execute(SQL["last_fence"]).get
    return last


class Table:
    """What the transitions do to the rows.

    `claim`, `unclaim` and `sweep` are right inside a transaction only. `claim_first`, `change` and `complete` may come
    outside of one: each of their statements is a compare-and-set by itself, and at most one of them changes anything.

    `db` is a cursor that is used again and again: a new one for every statement costs as much as a short statement itself.
    """

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock = clock
        self._wall = wall
        self._boot = _boot_id()

    def find(self, db: apsw.Cursor, id: RecordId) -> Row | None:
        row = db.execute(SQL["find"], (id.caller, id.method, id.key)).get
        return row and Row(*row)

    def record(self, row: Row) -> Record:
        kind, digest = row.outcome_kind, row.digest
        return Record(
            id=RecordId(row.caller, row.method, row.key),
            fingerprint=row.fingerprint,
            state=_STATES[row.state],
            fence=row.fence,
            nonce=row.nonce,
            committed=bool(row.committed),
            attempts=row.attempts,
            lease_left=self._time_left(row) if row.state == "running" else 0.0,
            started_at=row.started_at,
            completed_at=row.completed_at,
            outcome=None if kind is None or digest is None else Outcome(kind, row.payload, digest),
        )

    def _time_left(self, row: Row) -> float:
        """How much of the lease or retention is left by the clock that counts from boot; 0 if it began in another boot.

        Where the system does not tell the boot, a rest that is longer than the whole shows that the clock began anew.
        """
        left = row.lease_until - self._clock()
        is_other_boot = row.boot != self._boot and row.boot and self._boot
        return 0.0 if left <= 0 or is_other_boot or left > row.lease + 1 else left

    def judge(self, row: Row, claim: Claim) -> tuple[Record, Verdict]:
        record = self.record(row)
        return record, decide(record, claim, expired=row.expires_at <= self._wall() and not self._time_left(row))

    def answer(self, claim: Claim, db: apsw.Cursor) -> Record | None:
        """The record that answers a claim as it stands; None where the claim has to be written."""
        row = self.find(db, claim.id)
        if row is None:
            return None
        record, verdict = self.judge(row, claim)
        return record if verdict == "leave" else None

    def seen(self, row: Row, claim: Claim) -> Record:
        """The record that a transaction found. What a claim would turn into a tombstone looks like one already."""
        record, verdict = self.judge(row, claim)
        return self.record(self._buried(row)) if verdict == "to_tombstone" else record

    def claim(self, claim: Claim, db: apsw.Cursor, fences: Fences) -> Record:
        """There is no record, as a rule; so it is looked for only where the insert meets one."""
        fence = fences.next(db)
        record = self.insert(claim, db, fence)
        if db.connection.changes():
            return record
        row = self.find(db, claim.id)
        assert row is not None  # this is one transaction
        return self._claim_from(row, claim, db, fence)

    def claim_first(self, claim: Claim, db: apsw.Cursor, fences: Fences) -> Record | None:
        """A claim in one statement, outside of any transaction; None if it has to be made in a longer way."""
        taken = fences.take()
        if taken is None:
            return None
        fence, end = taken
        row, record = self._first(claim, fence)
        db.execute(_PUT_FIRST, (*row, end))
        return record if db.connection.changes() else None

    def _claim_from(self, row: Row, claim: Claim, db: apsw.Cursor, fence: int) -> Record:
        record, verdict = self.judge(row, claim)
        if verdict == "leave":
            return record
        if verdict == "renew":
            row = self._taken_over(claim, row.fence, row)._replace(committed=row.committed, attempts=row.attempts)
        elif verdict == "take_over":
            row = self._taken_over(claim, fence, row)
        else:
            row = self._unknown(row) if verdict == "to_unknown" else self._buried(row)
        db.execute(SQL["put"], row)
        return self.record(row)

    def insert(self, claim: Claim, db: apsw.Cursor, fence: int) -> Record:
        """The record of a first claim; it stands in the file unless there was one already."""
        row, record = self._first(claim, fence)
        db.execute(_PUT_NEW, row)
        return record

    def _first(self, claim: Claim, fence: int) -> tuple[tuple[Any, ...], Record]:
        """The first claim, in the order of `Row` and `Record`: by their names it would take three times as long."""
        id, print, nonce, committed, lease = claim.id, claim.fingerprint, claim.nonce, claim.committed, claim.lease
        wall, ends = self._wall(), self._clock() + lease
        due = wall + claim.retention
        # fmt: off
        row = (
            id.caller, id.method, id.key, print, "running", fence, nonce, committed, 1,
            lease, ends, self._boot, due, due + lease, wall, None, None, None, None,
        )
        # fmt: on
        return row, Record(id, print, State.RUNNING, fence, nonce, committed, 1, lease, wall)

    def _taken_over(self, claim: Claim, fence: int, before: Row) -> Row:
        return Row(
            caller=claim.id.caller,
            method=claim.id.method,
            key=claim.id.key,
            fingerprint=claim.fingerprint,
            state="running",
            fence=fence,
            nonce=claim.nonce,
            committed=claim.committed or bool(before.committed),
            attempts=before.attempts + 1,
            lease=claim.lease,
            lease_until=self._clock() + claim.lease,
            boot=self._boot,
            due=before.started_at + claim.retention,
            expires_at=self._wall() + claim.lease + claim.retention,
            started_at=before.started_at,
        )

    def _unknown(self, row: Row) -> Row:
        return row._replace(state="unknown", lease_until=0.0, due=math.inf, expires_at=math.inf)

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
        )

    def change(self, name: str, values: dict[str, Any], db: apsw.Cursor, _: Fences) -> bool:
        """A transition that is one statement of its own; whether it applied."""
        values.update(clock=self._clock(), wall=self._wall(), boot=self._boot)
        db.execute(SQL[name], values)
        return db.connection.changes() > 0

    def complete(self, token: Token, outcome: Outcome, retention: float, db: apsw.Cursor, fences: Fences) -> bool:
        """As `change`, for the one that every command needs: values in the order in which the statement names them."""
        id = token.id
        times = (retention, self._clock(), self._boot, self._wall())
        db.execute(
            _COMPLETE,
            (*times, outcome.kind, outcome.payload, outcome.digest, id.caller, id.method, id.key, token.fence, token.nonce),
        )
        if db.connection.changes():
            return True
        return self.change("complete_late", with_token(token, {"retention": retention, **parts(outcome)}), db, fences)

    def unclaim(self, claim: Claim, db: apsw.Cursor, fences: Fences) -> None:
        values = with_token(Token(claim.id, 0, claim.nonce), {})
        self.change("unclaim_first", values, db, fences)
        self.change("unclaim_later", values, db, fences)

    def ping(self, db: apsw.Cursor, fences: Fences) -> None:
        """Write a row and remove it: pages go to the disk, and no reader sees the row."""
        id = RecordId("", "wirecall.ping", uuid.uuid4().hex)
        claim = Claim(id=id, fingerprint=b"", nonce=b"", lease=0, retention=0, on_crash="unknown")
        self.insert(claim, db, fences.next(db))
        db.execute(SQL["remove"], (id.caller, id.method, id.key))

    def sweep(self, limit: int, db: apsw.Cursor, _: Fences) -> int:
        now = {"wall": self._wall(), "clock": self._clock(), "boot": self._boot}
        due = [Row(*row) for row in db.execute(SQL["due"], {**now, "limit": limit})]
        for row in due:
            if row.state == "done":
                db.execute(SQL["put"], self._buried(row))
            elif row.state == "running" and row.committed:
                db.execute(SQL["put"], self._unknown(row))
            else:  # it is a tombstone, or nothing was done
                db.execute(SQL["remove"], row[:3])
        return len(due)


def with_token(token: Token, values: dict[str, Any]) -> dict[str, Any]:
    id = token.id
    return {"caller": id.caller, "method": id.method, "key": id.key, "fence": token.fence, "nonce": token.nonce, **values}


def parts(outcome: Outcome) -> dict[str, Any]:
    return {"kind": outcome.kind, "payload": outcome.payload, "digest": outcome.digest}


def all_rows(db: apsw.Cursor, name: str, values: Any) -> list[Any]:
    return db.execute(SQL[name], values).fetchall()


def clock_from_boot() -> Callable[[], float]:
    number = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic if number is None else partial(time.clock_gettime, number)


def _boot_id() -> bytes:
    """Which boot of the machine this is, or nothing where the system does not tell."""
    try:
        return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    except (OSError, ValueError):
        return b""
