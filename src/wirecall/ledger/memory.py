"""The ledger in a dict: one process, gone with it. For development and tests, and the shortest telling of the contract."""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import msgspec

from wirecall.ledger.base import (
    TOMBSTONE_FACTOR,
    Claim,
    Delivered,
    Delivery,
    Outcome,
    Record,
    RecordId,
    State,
    Task,
    Token,
    decide,
    is_orphan,
    recognise,
)


class MemoryLedger:
    """Nothing here awaits, so every method is atomic."""

    is_tidy = True

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time) -> None:
        self._clock = clock  # leases and retention: a clock that people cannot set
        self._wall = wall  # what people read
        self._rows: dict[RecordId, _Row] = {}
        self._likes: dict[bytes, list[_Row]] = {}  # rows of calls without a key whose answers are not written
        self._fences = count(1)
        self._tasks: dict[str, tuple[Task, float, _Row]] = {}  # as begun: when it is forgotten, and its record

    async def claim(self, claim: Claim) -> Record:
        now, keyless, row = self._clock(), claim.keyless, self._rows.get(claim.id)
        likeness = None if keyless is None else keyless.likeness
        likes = None if likeness is None else self._likes.get(likeness)
        if likes is not None:
            found: dict[str, _Row] = {}
            for like in sorted(likes, key=partial(_Row.turn_to_match, nonce=claim.nonce)):
                found.setdefault(recognise(like.view(now), claim, like.since(now)), like)
            if "match" in found:
                row = found["match"]
                row.delivery, row.deliverer, row.answer_at = "pending", claim.nonce, now
            elif "wait" in found:
                return found["wait"].view(now)
        if row is None:  # `decide` says "insert"; values are in the order of the fields of `_Row` and `Record`
            id, print, nonce, committed, lease = claim.id, claim.fingerprint, claim.nonce, claim.committed, claim.lease
            fence, wall, until, kept = next(self._fences), self._wall(), now + lease, claim.retention
            row = self._rows[id] = _Row(id, print, fence, nonce, committed, 1, wall, until, kept, until + kept)
            if keyless is None:
                return Record(id, print, State.RUNNING, fence, nonce, committed, 1, lease, wall)
            row.delivery, row.deliverer, row.likeness = "pending", nonce, likeness
            if likes is not None:
                likes.append(row)
            elif likeness is not None:
                self._likes[likeness] = [row]
            return Record(id, print, State.RUNNING, fence, nonce, committed, 1, lease, wall, None, None, "pending", nonce)
        verdict = decide(row.view(now), claim, expired=row.expires <= now)
        if verdict == "renew":
            row.state = State.RUNNING
            row.hold(now, claim.lease)
        elif verdict == "take_over":
            row.state, row.fence, row.nonce, row.outcome = State.RUNNING, next(self._fences), claim.nonce, None
            row.committed = row.committed or claim.committed
            row.attempts += 1
            row.retention = claim.retention
            row.hold(now, claim.lease)
        elif verdict == "to_unknown":
            row.turn(State.UNKNOWN, expires=math.inf)
        elif verdict == "to_tombstone":
            self._bury(row)
        return row.view(now)

    async def deliver(self, ends: Sequence[Delivered]) -> None:
        now = self._clock()
        for end in ends:
            row = self._rows.get(end.id)
            if row and row.deliverer == end.deliverer and row.delivery in ("pending", "undelivered"):
                row.delivery, row.answer_at = end.delivery, now
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
        now = row.view(self._clock()) if self._rows.get(task.record) is row else None
        return msgspec.structs.replace(task, ttl_left=left, now=now) if left > 0 else None

    async def task_of(self, id: RecordId) -> Task | None:
        row = self._rows.get(id)
        ids = [task.id for task, _, its in self._tasks.values() if its is row]
        return await self.task(ids[-1]) if ids else None

    async def change_task(self, task: Task) -> bool:
        found = await self.task(task.id)
        if found is None or found.version != task.version:
            return False
        changed = msgspec.structs.replace(
            found, version=task.version + 1, document=task.document, is_ready=task.is_ready, is_over=task.is_over
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
            row.outcome, row.attempts, row.committed = interim, 0, False
        return row is not None

    async def release(self, token: Token) -> bool:
        row = self._held(token, State.RUNNING)
        if row:
            self._remove(row)
        return row is not None

    async def abandon(self, token: Token) -> bool:
        row = self._held(token, State.RUNNING)
        if row:
            row.turn(State.UNKNOWN, expires=math.inf)
        return row is not None

    async def lapse(self, token: Token) -> bool:
        row = self._held(token, State.RUNNING)
        if row:
            row.hold(self._clock(), 0)
        return row is not None

    async def resolve(self, id: RecordId, outcome: Outcome | None, retention: float = 86_400) -> bool:
        row = self._rows.get(id)
        if row is None or row.state is not State.UNKNOWN:
            return False
        if outcome is None:
            self._remove(row)
        else:
            row.finish(outcome, self._wall(), retention, self._clock())
        return True

    async def get(self, id: RecordId) -> Record | None:
        row = self._rows.get(id)
        return row.view(self._clock()) if row else None

    async def list(self, state: State | None = None, *, limit: int = 100, after: RecordId | None = None) -> list[Record]:
        ids = sorted(id for id in self._rows if after is None or id > after)
        views = (self._rows[id].view(self._clock()) for id in ids)
        return [view for view in views if state in (None, view.state)][:limit]

    async def counts(self) -> dict[State, int]:
        found = [row.state for row in self._rows.values()]
        return {state: found.count(state) for state in State}

    async def sweep(self, limit: int = 500) -> int:
        due = [row for row in self._rows.values() if row.expires <= self._clock()][:limit]
        for row in due:
            if row.state is State.DONE:
                self._bury(row)
            elif row.state is State.RUNNING and row.committed:
                row.turn(State.UNKNOWN, expires=math.inf)
                self._match_no_more(row)
            else:  # it is a tombstone, or nothing was done
                self._remove(row)
        over = [id for id, (_, until, _) in self._tasks.items() if until <= self._clock()][: limit - len(due)]
        for id in over:
            del self._tasks[id]
        return len(due) + len(over)

    async def ping(self) -> None:
        """A dict takes every write."""

    async def aclose(self) -> None:
        """Nothing to give back; the records stay for the life of the object."""

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
        return row if row.state in states else None


class _Row(msgspec.Struct, eq=False, gc=False):
    """A record, and the times that the store keeps about it. It changes in place: a new `Record` for every step is slow."""

    id: RecordId
    fingerprint: bytes
    fence: int
    nonce: bytes
    committed: bool
    attempts: int
    started_at: float
    lease_until: float
    retention: float
    expires: float  # when the sweep looks at it next
    state: State = State.RUNNING
    completed_at: float | None = None
    outcome: Outcome | None = None
    delivery: Delivery | None = None
    deliverer: bytes = b""
    likeness: bytes | None = None  # of a call without a key whose answer is not written
    answer_at: float = 0.0  # when that was lost or, while it is pending, since when its deliverer has it

    def view(self, now: float) -> Record:
        """The record as it stands; the values are in the order of its fields."""
        left = self.lease_until - now
        # fmt: off
        return Record(
            self.id, self.fingerprint, self.state, self.fence, self.nonce, self.committed, self.attempts,
            left if left > 0 else 0.0, self.started_at, self.completed_at, self.outcome, self.delivery, self.deliverer,
        )
        # fmt: on

    def hold(self, now: float, lease: float) -> None:
        self.lease_until = now + lease
        self.expires = self.lease_until + self.retention

    def turn(self, state: State, *, expires: float) -> None:
        self.state, self.lease_until, self.expires = state, 0.0, expires

    def turn_to_match(self, nonce: bytes) -> tuple[bool, bool, int]:
        """The place of a row among those of its likeness: first the one that an earlier try of this claim took."""
        return self.deliverer != nonce, self.delivery != "undelivered", self.fence

    def since(self, now: float) -> float:
        """Seconds since the answer was lost, as `recognise` counts them."""
        return now - (self.lease_until if self.state is State.RUNNING else self.answer_at)

    def finish(self, outcome: Outcome, completed_at: float, retention: float, now: float) -> None:
        self.outcome, self.completed_at, self.retention = outcome, completed_at, retention
        self.state, self.lease_until, self.expires = State.DONE, 0.0, now + retention
        if self.delivery == "pending":
            self.answer_at = now

    def bury(self, now: float) -> None:
        self.turn(State.TOMBSTONE, expires=now + (TOMBSTONE_FACTOR - 1) * self.retention)
        if self.outcome is not None:
            self.outcome = Outcome(self.outcome.kind, None, self.outcome.digest)


async def open_url(_: str) -> MemoryLedger:
    """A new one for every app; the URL has nothing to say."""
    return MemoryLedger()
