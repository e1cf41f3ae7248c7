"""The ledger in a dict, gone with its process.

For development and tests; the contract in its shortest form.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import TypeAlias

import msgspec

from wirecall.ledger.base import (
    ALL,
    IDENTITY,
    IDENTITY_CHANNEL,
    MARKS_WITHIN,
    TOMBSTONE_FACTOR,
    UNKNOWN_AFTER,
    Claim,
    Delivered,
    Delivery,
    Mark,
    Only,
    Outcome,
    Place,
    Receive,
    Record,
    RecordId,
    Risk,
    Schema,
    Seen,
    State,
    Tables,
    Task,
    Token,
    decide,
    is_orphan,
    new_reach,
    recognise,
)

# The oldest marks that are looked at when one is made.
REMOVED = 10

Records: TypeAlias = list[Record]  # inside the class, `list` is a method
Tasks: TypeAlias = list[Task]


class MemoryLedger:
    """Nothing here awaits, so every method is atomic."""

    is_tidy = True
    outlives = False

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        # Measures leases and retention: a clock that people cannot set.
        self._clock = clock
        self.reached = new_reach()
        # The times that people read.
        self._wall = wall
        self._rows: dict[RecordId, _Row] = {}
        # Rows of calls without a key whose answers are not written.
        self._likes: dict[bytes, list[_Row]] = {}
        self._fences = count(1)
        # Each task with its expiry and its record, in the order in which they began.
        self._tasks: dict[str, tuple[Task, float, _Row]] = {}
        # Each mark with the times when it was made and when it expires, the oldest first.
        self._marks: dict[tuple[str, str], tuple[Mark, float, float]] = {}

    async def claim(self, claim: Claim) -> Record:
        now = self._clock()
        keyless = claim.keyless
        row = self._rows.get(claim.id)
        likeness = None
        likes = None
        if keyless is not None and keyless.likeness is not None:
            likeness = keyless.likeness
            likes = self._likes.get(likeness)
        if likes is not None:
            found: dict[str, _Row] = {}
            for like in sorted(likes, key=partial(_Row.turn_to_match, nonce=claim.nonce)):
                found.setdefault(recognise(like.view(now), claim, like.since(now)), like)
            if "match" in found:
                row = found["match"]
                row.delivery = "pending"
                row.deliverer = claim.nonce
                row.answer_at = now
            elif "wait" in found:
                return found["wait"].view(now)
        # `decide` says "insert"; values are in the order of the fields of `_Row` and `Record`.
        if row is None:
            id = claim.id
            print = claim.fingerprint
            nonce = claim.nonce
            committed = claim.committed
            lease = claim.lease
            fence = next(self._fences)
            wall = self._wall()
            until = now + lease
            kept = claim.retention
            row = self._rows[id] = _Row(
                id, print, fence, nonce, committed, 1, wall, until, kept, until + claim.sweeps_after
            )
            row.may_rerun = claim.on_crash != "unknown"
            if claim.params is not None:
                row.params = claim.params
            if keyless is None:
                return Record(
                    id,
                    print,
                    State.RUNNING,
                    fence,
                    nonce,
                    committed,
                    1,
                    lease,
                    wall,
                    params=claim.params,
                )
            row.delivery = "pending"
            row.deliverer = nonce
            row.likeness = likeness
            if likes is not None:
                likes.append(row)
            elif likeness is not None:
                self._likes[likeness] = [row]
            facts = (id, print, State.RUNNING, fence, nonce, committed, 1, lease, wall, None, None)
            return Record(*facts, "pending", nonce, claim.params)
        verdict = decide(row.view(now), claim, expired=row.expires <= now)
        if verdict == "renew":
            row.state = State.RUNNING
            row.hold(now, claim.lease)
        elif verdict == "take_over":
            row.state = State.RUNNING
            row.fence = next(self._fences)
            row.nonce = claim.nonce
            row.outcome = None
            row.committed = row.committed or claim.committed
            row.attempts += 1
            row.retention = claim.retention
            row.may_rerun = claim.on_crash != "unknown"
            row.hold(now, claim.lease)
        elif verdict == "to_unknown":
            row.turn_unknown(row.lease_until)
        elif verdict == "to_tombstone":
            self._bury(row)
        return row.view(now)

    async def deliver(self, ends: Sequence[Delivered]) -> None:
        now = self._clock()
        for end in ends:
            row = self._rows.get(end.id)
            if (
                row
                and row.deliverer == end.deliverer
                and row.delivery in ("pending", "undelivered")
            ):
                row.delivery = end.delivery
                row.answer_at = now
                if end.delivery == "written":
                    self._match_no_more(row)

    async def begin_task(self, token: Token, id: str, document: bytes, ttl: float) -> bool:
        row = self._held(token, State.RUNNING)
        if row is None:
            return False
        begun = Task(id, token.id, 1, document, False, False, ttl), self._clock() + ttl, row
        return self._tasks.setdefault(id, begun)[2] is row

    async def task(self, id: str) -> Task | None:
        if id not in self._tasks:
            return None
        task, until, row = self._tasks[id]
        left = until - self._clock()
        if left <= 0:
            return None
        now = None
        if self._rows.get(task.record) is row:
            now = row.view(self._clock())
        return msgspec.structs.replace(task, ttl_left=left, now=now)

    async def task_of(self, id: RecordId) -> Task | None:
        row = self._rows.get(id)
        ids = [task.id for task, _, its in self._tasks.values() if its is row]
        if not ids:
            return None
        return await self.task(ids[-1])

    async def change_task(self, task: Task) -> bool:
        found = await self.task(task.id)
        if found is None or found.version != task.version:
            return False
        changed = msgspec.structs.replace(
            found,
            version=task.version + 1,
            document=task.document,
            is_ready=task.is_ready,
            is_over=task.is_over,
        )
        self._tasks[task.id] = changed, *self._tasks[task.id][1:]
        return True

    async def orphans(self, limit: int = 100) -> Sequence[str]:
        found = [await self.task(id) for id in list(self._tasks)]
        return [task.id for task in found if task is not None and is_orphan(task)][:limit]

    async def heartbeat(self, token: Token, lease: float) -> bool:
        row = self._held(token, State.RUNNING)
        if row:
            row.hold(self._clock(), lease)
        return row is not None

    async def commit_point(self, token: Token, lease: float) -> bool:
        row = self._held(token, State.RUNNING)
        if row is None or row.lease_until <= self._clock():
            return False
        row.committed = True
        row.hold(self._clock(), lease)
        return True

    async def complete(self, token: Token, outcome: Outcome, retention: float) -> bool:
        row = self._held(token, State.RUNNING, State.UNKNOWN)
        if row:
            row.finish(outcome, self._wall(), retention, self._clock())
        return row is not None

    async def suspend(self, token: Token, interim: Outcome, retention: float) -> bool:
        row = self._held(token, State.RUNNING)
        if row:
            row.turn(State.WAITING, expires=self._clock() + retention)
            row.outcome = interim
            row.attempts = 0
            row.committed = False
        return row is not None

    async def release(self, token: Token) -> bool:
        row = self._held(token, State.RUNNING)
        if row:
            self._remove(row)
        return row is not None

    async def abandon(self, token: Token) -> bool:
        row = self._held(token, State.RUNNING)
        if row:
            row.turn_unknown(self._clock())
        return row is not None

    async def lapse(self, token: Token) -> bool:
        row = self._held(token, State.RUNNING)
        if row:
            row.hold(self._clock(), 0)
        return row is not None

    async def resolve(
        self,
        id: RecordId,
        outcome: Outcome | None,
        retention: float = 86_400,
        *,
        fence: int | None = None,
    ) -> bool:
        row = self._rows.get(id)
        if row is None:
            return False
        record = row.view(self._clock())
        if record.standing is not State.UNKNOWN or fence not in (None, record.fence):
            return False
        if outcome is None:
            self._remove(row)
        else:
            row.finish(outcome, self._wall(), retention, self._clock())
        return True

    async def get(self, id: RecordId) -> Record | None:
        row = self._rows.get(id)
        if row is None:
            return None
        return row.view(self._clock())

    async def list(
        self,
        state: State | None = None,
        *,
        limit: int = 100,
        after: Place | None = None,
        only: Only = ALL,
    ) -> Records:
        now = self._clock()
        views = [row.view(now) for row in self._rows.values()]
        wanted = [
            view
            for view in views
            if state in (None, view.standing)
            and (after is None or view.place < after)
            and only.has(view)
        ]
        return sorted(wanted, key=lambda view: view.place, reverse=True)[:limit]

    async def list_tasks(
        self,
        state: State | None = None,
        *,
        limit: int = 100,
        after: Place | None = None,
        only: Only = ALL,
    ) -> Tasks:
        records = await self.list(state, limit=len(self._rows), after=after, only=only)
        tasks = [await self.task_of(record.id) for record in records]
        return [task for task in tasks if task is not None][:limit]

    async def counts(self) -> dict[State, int]:
        now = self._clock()
        found = [row.view(now).standing for row in self._rows.values()]
        return {state: found.count(state) for state in State}

    async def sweep(self, limit: int = 500) -> int:
        due = [row for row in self._rows.values() if row.expires <= self._clock()][:limit]
        for row in due:
            if row.state is State.DONE:
                self._bury(row)
            elif row.state is State.RUNNING and row.committed:
                row.turn_unknown(row.lease_until)
            else:  # it is a tombstone, or nothing was done
                self._remove(row)
        over = [id for id, (_, until, _) in self._tasks.items() if until <= self._clock()][
            : limit - len(due)
        ]
        for id in over:
            del self._tasks[id]
        return len(due) + len(over)

    async def mark(
        self, channel: str, mark: Mark, ttl: float, listed: float = MARKS_WITHIN
    ) -> None:
        now = self._clock()
        for place, (_, _, until) in list(self._marks.items())[:REMOVED]:
            if until <= now:
                del self._marks[place]
        self._marks.pop((channel, mark.name), None)
        self._marks[channel, mark.name] = mark, now, now + ttl

    async def marked(self, channel: str, name: str) -> Mark | None:
        mark, _, until = self._marks.get((channel, name), (None, 0.0, 0.0))
        return mark if until > self._clock() else None

    async def marks(self, channel: str, within: float) -> Sequence[Mark]:
        now = self._clock()
        since = now - within
        return [
            mark
            for (of, _), (mark, made, until) in self._marks.items()
            if of == channel and made > since and until > now
        ]

    async def see(self, identity: bytes | None = None) -> Seen:
        place = IDENTITY_CHANNEL, IDENTITY
        if identity is not None and place not in self._marks:
            self._marks[place] = Mark(IDENTITY, identity), self._clock(), math.inf
        mark = await self.marked(*place)
        return Seen(None if mark is None else mark.content, 0, "")

    def join(self, channel: str, receive: Receive) -> None:
        """There is no other process."""

    async def ping(self) -> None:
        """A dict takes every write."""

    async def aclose(self) -> None:
        """Nothing to close; the records stay for the life of the object."""

    def _remove(self, row: "_Row") -> None:
        del self._rows[row.id]
        self._match_no_more(row)

    def _bury(self, row: "_Row") -> None:
        row.bury(self._clock())
        self._match_no_more(row)

    def _match_no_more(self, row: "_Row") -> None:
        if row.likeness is not None:
            likes = self._likes[row.likeness]
            likes.remove(row)
            if not likes:
                del self._likes[row.likeness]
            row.likeness = None

    def _held(self, token: Token, *states: State) -> "_Row | None":
        row = self._rows.get(token.id)
        if row is None or row.fence != token.fence or row.nonce != token.nonce:
            return None
        if row.state not in states:
            return None
        return row


class _Row(msgspec.Struct, eq=False, gc=False):
    """A record, and the times that the store keeps about it.

    It changes in place: a new `Record` for every step is slow.
    """

    id: RecordId
    fingerprint: bytes
    fence: int
    nonce: bytes
    committed: bool
    attempts: int
    started_at: float
    lease_until: float
    retention: float
    # When the sweep looks at it next.
    expires: float
    state: State = State.RUNNING
    completed_at: float | None = None
    outcome: Outcome | None = None
    delivery: Delivery | None = None
    deliverer: bytes = b""
    # Set while the answer to a call without a key is not written.
    likeness: bytes | None = None
    # When that answer was lost or, while it is pending, when its deliverer got it.
    answer_at: float = 0.0
    # A retry may run the command again after the end of its lease.
    may_rerun: bool = False
    params: bytes | None = None

    def view(self, now: float) -> Record:
        """Return the current record; the values are in the order of its fields."""
        left = self.lease_until - now
        if left < 0:
            left = 0.0
        return Record(
            self.id,
            self.fingerprint,
            self.state,
            self.fence,
            self.nonce,
            self.committed,
            self.attempts,
            left,
            self.started_at,
            self.completed_at,
            self.outcome,
            self.delivery,
            self.deliverer,
            self.params,
        )

    def hold(self, now: float, lease: float) -> None:
        self.lease_until = now + lease
        sweeps_after = self.retention
        if self.committed and not self.may_rerun:
            sweeps_after = min(UNKNOWN_AFTER, self.retention)
        self.expires = self.lease_until + sweeps_after

    def turn(self, state: State, *, expires: float) -> None:
        self.state = state
        self.lease_until = 0.0
        self.expires = expires

    def turn_unknown(self, ended: float) -> None:
        """Make the outcome unknown. Without an answer, a loss counts from the end of the run."""
        self.answer_at = max(self.answer_at, ended)
        self.turn(State.UNKNOWN, expires=math.inf)

    def turn_to_match(self, nonce: bytes) -> tuple[bool, bool, bool, int]:
        """Return the sort key among rows of equal calls.

        The one that an earlier try of this claim took comes first.
        """
        return (
            self.deliverer != nonce,
            self.delivery != "undelivered",
            self.state is not State.UNKNOWN,
            self.fence,
        )

    def since(self, now: float) -> float:
        """Return the seconds since the answer was lost, as `recognise` counts them."""
        if self.state is State.RUNNING:
            return now - self.lease_until
        return now - self.answer_at

    def finish(self, outcome: Outcome, completed_at: float, retention: float, now: float) -> None:
        self.outcome = outcome
        self.completed_at = completed_at
        self.retention = retention
        self.state = State.DONE
        self.lease_until = 0.0
        self.expires = now + retention
        if self.delivery == "pending":
            self.answer_at = now

    def bury(self, now: float) -> None:
        self.turn(State.TOMBSTONE, expires=now + (TOMBSTONE_FACTOR - 1) * self.retention)
        self.params = None
        if self.outcome is not None:
            self.outcome = Outcome(self.outcome.kind, None, self.outcome.digest)


async def open_url(_: str, __: Tables = "create") -> MemoryLedger:
    """Return a new ledger for every app; the URL has no parameters, and there are no tables."""
    return MemoryLedger()


async def risks_of(_: str) -> Sequence[Risk]:
    """There are none that a setting could remove."""
    return ()


async def schema_of(_: str) -> Schema:
    """A dict has no tables, so it has nothing to migrate."""
    return Schema("The ledger in memory", 1, 1)
