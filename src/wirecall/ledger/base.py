"""The ledger: the record of commands, so that each takes effect once.

A record holds the facts of one command: its caller, its method, its key, and whether it runs, is done, or is unknown.
This file holds the contract that every store keeps, and the table of states.

The rules of the contract:

1. Every transition is one atomic compare-and-set in the store, on (record id, state, fence, nonce).
2. Only the holder of the current token may touch a record. A token is a fence, which grows with every claim, and a
   random nonce, so that a record that was removed and made again never meets an old token.
3. The lease is a field of the record, never its expiry. A record whose holder vanished stays, as evidence.
4. No process clock decides anything shared: the store's clock measures leases and retention. A record tells how much of
   its lease is left, not when it ends.
5. Outcomes are bytes. Nothing looks at whether a result is true, empty or null.
6. A store that cannot be reached raises `LedgerDown`, and nothing else of its driver's.
7. Only a person forgets that an outcome is unknown: no clock removes an UNKNOWN record. DONE becomes absent only by way of
   TOMBSTONE, whose time begins when it becomes one. So a store's clock that jumps forward, however far, makes a record
   unknown or drops its payload, but it never lets a retry run what may have taken effect.
8. The record of a call without a key also says whether its answer was delivered, and for which claim: its deliverer is the
   nonce of that claim. A call that repeats one whose answer was lost is that call (`recognise`). It takes the answer over in
   the same step, so one lost call serves one repetition.
9. A task is a second row about a record: what the server keeps of a call that goes on after its request. The store reads
   nothing of its document, and a change names the version that it replaces. The task ends by itself; its record stays an
   ordinary one, which claims, leases and `decide` govern. A record that was removed and made again is another record, as
   its `started_at` tells. It may be of other params, so it does not inherit the tasks of the first.

    absent ──claim──► RUNNING ──complete──► DONE ──retention over──► TOMBSTONE ──8 x retention──► absent
                      │  │ ▲ └─release; lease and retention over, not committed─► absent
                      │  │ └──claim by a successor, lease over: not committed, rerun, reconcile; the same claim again
                      │  ├──suspend──► WAITING ──claim that continues──► RUNNING
                      │  │                └──retention over──► absent
                      │  └──lease over, on_crash unknown; abandon──► UNKNOWN ──complete by its holder; resolve──► DONE
                      └──lapse: the lease ends now                          └──resolve: not done──► absent

    delivery, in any state:   pending ──written──► written
                              │  ▲
                   the answer │  │ claim of a repetition
                      is lost ▼  │
                              undelivered ──written: a stream was resumed──► written
"""

import enum
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol, TypeAlias

from msgspec import Struct

from wirecall.errors import UsageError, WirecallError

MAX_ATTEMPTS = 5
TOMBSTONE_FACTOR = 8


class LedgerDown(WirecallError):
    """The store cannot be reached, or refuses to work; the message says which and why."""


class CommitUnknown(LedgerDown):
    """The store went away in the middle of a commit, and could not be asked since whether it took effect."""


class Locked(WirecallError):
    """Another transaction holds the record and did not end within the wait."""


class TryAgain(WirecallError):
    """The store undid the whole transaction in favour of another one; nothing of it is left."""


class NotCommitted(UsageError):
    """A transaction could not be committed because of what its handler did; nothing of it is left."""


# The structs below hold texts, bytes and numbers, so they are in no cycle, and the garbage collector need not look at them
# (gc=False): 2 % of a command, where the ledger is in memory.


class State(enum.Enum):
    """What is known of a command."""

    RUNNING = "running"
    WAITING = "waiting"
    DONE = "done"
    UNKNOWN = "unknown"
    TOMBSTONE = "tombstone"


class RecordId(Struct, frozen=True, order=True, gc=False):
    """Which command: the JSON-RPC id has no part in it (P10)."""

    caller: str
    method: str
    key: str

    def __str__(self) -> str:
        return "/".join(filter(None, (self.caller, self.method, self.key)))


class Token(Struct, frozen=True, gc=False):
    """The right to write to a record, until another run claims it."""

    id: RecordId
    fence: int
    nonce: bytes


class Outcome(Struct, frozen=True, gc=False):
    """How a command ended. A payload of None was too large to keep, or could not be encoded."""

    kind: Literal["result", "error"]
    payload: bytes | None
    digest: bytes


Delivery: TypeAlias = Literal["pending", "written", "undelivered"]


class Record(Struct, frozen=True, gc=False):
    """One record as the store saw it at the moment of the call. Times are seconds since 1970 by the store's clock."""

    id: RecordId
    fingerprint: bytes
    state: State
    fence: int
    nonce: bytes
    committed: bool
    attempts: int
    lease_left: float
    started_at: float
    completed_at: float | None = None
    outcome: Outcome | None = None
    delivery: Delivery | None = None  # of the answer to a call without a key
    deliverer: bytes = b""  # the nonce of the claim whose caller gets that answer

    @property
    def token(self) -> Token:
        return Token(self.id, self.fence, self.nonce)

    @property
    def is_evidence(self) -> bool:
        """Whether a run before the holder's may have acted. The claim of the holder may have set `committed`; then it counts
        for both."""
        return self.attempts > 1 and self.committed


class Keyless(Struct, frozen=True, gc=False):
    """How the claim of a call without a key is compared with earlier calls."""

    likeness: bytes | None = None  # digests of caller, method and params; None: the caller is not known, so nothing matches
    window: float = 120  # seconds after the loss of an answer in which an equal call counts as its repetition
    beside: frozenset[str] = frozenset()  # keys whose answers are on their way in this process, so they are not lost

    def make_key(self, nonce: bytes) -> str:
        """A new key. It begins with the likeness, so that a store can keep equal calls in one place, and ends with a part of
        the nonce of its first claim, which is random."""
        return f"auto-{self.likeness.hex()}-{nonce[:12].hex()}" if self.likeness else f"auto-{nonce[:12].hex()}"


class Task(Struct, frozen=True, gc=False):
    """A task as the store saw it at the moment of the call."""

    id: str  # made by the server, of printable characters
    record: RecordId
    version: int  # grows by one with every change
    document: bytes
    is_ready: bool  # the record is WAITING, and its next leg can begin
    is_over: bool  # the task has ended for good, whatever becomes of its record
    ttl_left: float  # seconds until the store forgets it
    now: Record | None = None  # the record as it stands; None if it is gone, also where another one has its id


class Delivered(Struct, frozen=True, order=True, gc=False):
    """The end of an answer's way: the transport took its last byte, or its caller was gone. In order, "written" is last."""

    id: RecordId
    deliverer: bytes
    delivery: Literal["written", "undelivered"]


class Claim(Struct, frozen=True, kw_only=True, gc=False):
    """A wish to run a command, and what its method declared."""

    id: RecordId
    fingerprint: bytes
    nonce: bytes
    lease: float
    retention: float
    on_crash: Literal["unknown", "rerun", "reconcile", "transactional"]
    committed: bool = True  # the handler counts as past its commit point from the start
    continues: bool = False  # the next leg of a call that is WAITING
    alone: bool = False  # the caller cannot wait: where a loop runs all the same, it must find that out before anything runs
    keyless: Keyless | None = None  # the key is a generated one


Verdict: TypeAlias = Literal["insert", "renew", "take_over", "to_unknown", "to_tombstone", "leave"]


def decide(record: Record | None, claim: Claim, *, expired: bool) -> Verdict:
    """What a claim does to a record: the table of states. `expired` says that the retention is over."""
    if record is None:
        return "insert"
    if record.fingerprint != claim.fingerprint:
        return "leave"
    # A claim is sent again when its answer was lost, and then nothing has run under it, however long ago that was: its own
    # lease is not judged, also where another claim has judged it meanwhile.
    if record.nonce == claim.nonce and record.state in (State.RUNNING, State.UNKNOWN):
        return "renew"
    if record.state is State.DONE and expired:
        return "to_tombstone"
    if record.state is State.WAITING and claim.continues:
        return "take_over"
    if record.state is not State.RUNNING or record.lease_left > 0:
        return "leave"
    if not record.committed:
        return "take_over"
    if claim.on_crash == "unknown" or record.attempts >= MAX_ATTEMPTS:
        return "to_unknown"
    return "take_over"


def is_orphan(task: Task) -> bool:
    """Return whether no process works on a task that has not ended."""
    record = task.now
    if record is None or task.is_over:
        return False
    return record.lease_left == 0 if record.state is State.RUNNING else record.state is State.WAITING and task.is_ready


Recognition: TypeAlias = Literal["match", "wait", "pass"]


def recognise(record: Record, claim: Claim, since: float) -> Recognition:
    """Say whether a call without a key repeats an earlier one of the same likeness; "wait" says that it is not known yet.

    `since` is how long ago, in seconds, the answer was lost. Where that is not marked, it is how long the deliverer has had
    it: since the record was completed, or taken over after that; or, if it is RUNNING, how long ago its lease ended.
    """
    keyless = claim.keyless
    assert keyless is not None
    if record.deliverer == claim.nonce:
        return "match"  # the claim is sent again, because the store's reply was lost
    if record.delivery == "undelivered":
        return "match" if record.state is State.RUNNING or since <= keyless.window else "pass"
    if record.delivery != "pending" or record.id.key in keyless.beside:
        return "pass"
    # Another process has the answer, or died with it. A living one renews its lease, and marks its answers well within one.
    if record.state is State.RUNNING:
        return "wait" if record.lease_left > 0 else "match" if since <= keyless.window else "pass"
    if record.state is State.DONE:
        return "wait" if since < claim.lease else "match" if since <= claim.lease + keyless.window else "pass"
    # Nothing is done under a WAITING record, so it may be run anew. Whether UNKNOWN may be is for a person to say.
    return "match" if record.state is State.UNKNOWN else "pass"


class Ledger(Protocol):
    """What every store does. Each call is one transition, or one read."""

    is_tidy: bool  # a claim whose caller is cancelled leaves no record: the store sees to it

    async def claim(self, claim: Claim) -> Record:
        """Apply `decide` and give the record back; it is the claimer's if it carries the claim's nonce.

        Without a key, first look at the records of the same likeness whose answers are not written, those that are
        undelivered first, in the order of their fences: the first to `match` gets the claim's nonce as its deliverer, its
        delivery is pending again, and `decide` is applied to it. Otherwise, the first that says `wait` is given back as it
        stands; its deliverer is another. Otherwise a record is inserted, with its delivery pending.
        """
        ...

    async def deliver(self, ends: Sequence[Delivered]) -> None:
        """Mark answers as written or undelivered, where the record still has this deliverer and is not written yet.

        Undelivered counts from now. A record that is written, or a tombstone, matches nothing any more.
        """
        ...

    async def begin_task(self, token: Token, id: str, document: bytes, ttl: float) -> bool:
        """Make a task of a RUNNING record, with version 1; it is neither ready nor over, and forgotten after `ttl`.

        A task that the record has already under this id is that task, and stays as it is: the answer may have been lost. An
        id that is another record's is refused.
        """
        ...

    async def task(self, id: str) -> Task | None:
        """The task with this id, and its record, as they stand at one moment; None after its `ttl`."""
        ...

    async def task_of(self, id: RecordId) -> Task | None:
        """The task that was begun last with the record that has this id now; None where that, or the task, is gone."""
        ...

    async def change_task(self, task: Task) -> bool:
        """Write document, `is_ready` and `is_over`, and raise the version by one; refused if the version is another."""
        ...

    async def orphans(self, limit: int = 100) -> Sequence[str]:
        """Ids of tasks that are not over and that no process works on: the record is RUNNING and its lease is over, or it is
        WAITING and the task is ready."""
        ...

    async def heartbeat(self, token: Token, lease: float) -> bool:
        """Renew the lease of a RUNNING record."""
        ...

    async def commit_point(self, token: Token, lease: float) -> bool:
        """Mark a RUNNING record as committed and renew its lease; refused once the lease is over."""
        ...

    async def complete(self, token: Token, outcome: Outcome, retention: float) -> bool:
        """RUNNING or UNKNOWN to DONE: a late truth is welcome."""
        ...

    async def suspend(self, token: Token, interim: Outcome, retention: float) -> bool:
        """RUNNING to WAITING: the call needs input from its caller before it can go on.

        A handler that asks has done nothing yet: the record is not committed any more, and attempts are counted anew, since
        the next leg may be the first to act.
        """
        ...

    async def release(self, token: Token) -> bool:
        """RUNNING to absent: the holder knows that nothing was done."""
        ...

    async def abandon(self, token: Token) -> bool:
        """RUNNING to UNKNOWN: the holder does not know how far it came."""
        ...

    async def lapse(self, token: Token) -> bool:
        """End the lease of a RUNNING record now, so that a retry need not wait for it."""
        ...

    async def resolve(self, id: RecordId, outcome: Outcome | None, retention: float = 86_400) -> bool:
        """UNKNOWN to DONE with an outcome, or to absent with None: an operator found out."""
        ...

    async def get(self, id: RecordId) -> Record | None:
        """The record as it stands."""
        ...

    async def list(self, state: State | None = None, *, limit: int = 100, after: RecordId | None = None) -> list[Record]:
        """Records in the order of their ids, a page at a time."""
        ...

    async def counts(self) -> dict[State, int]:
        """How many records there are in each state."""
        ...

    async def sweep(self, limit: int = 500) -> int:
        """Housekeeping on at most `limit` records that are due; gives the number it changed.

        DONE whose retention is over becomes TOMBSTONE, which is removed after 8 times the retention in all. RUNNING whose
        lease and retention are over becomes UNKNOWN if it is committed, and stays so until `resolve` or a late `complete`.
        RUNNING that is not committed, and WAITING, have done nothing: they are removed. No swept record matches a call.
        Tasks whose `ttl` is over are removed; they count like records, but not where the store removes them by itself.
        """
        ...

    async def ping(self) -> None:
        """Write something that no reader sees; raises `LedgerDown` if a command could not be recorded now either."""
        ...

    async def aclose(self) -> None:
        """Give back what was opened."""
        ...


class Transactional(Protocol):
    """A ledger that can put a record and its handler's own writes into one transaction."""

    def transaction(self, claim: Claim, wait: float) -> "AbstractAsyncContextManager[Transaction]":
        """Begin, and look for the record; leaving the block without `complete` undoes everything.

        Another transaction that holds the record is waited for, `wait` seconds; then it is `Locked`. A record that is there
        is given back, without a `db`, with one exception: it is RUNNING with the nonce of the claim, which names its id and
        is not `keyless`. So a record under a lease, the record of a task, gets the transaction of its handler. It is not
        touched before `complete`, so others can renew the lease meanwhile, and it is RUNNING after a block without
        `complete`. If another run has claimed it by then, `complete` raises `TryAgain`.
        """
        ...


class Transaction(Protocol):
    """An open transaction that holds a record, or found one."""

    record: Record
    db: Any

    async def complete(self, outcome: Outcome, retention: float, *, undo: bool) -> None:
        """Record the outcome and commit; `undo` drops the handler's writes (a domain error) but keeps the record.

        `NotCommitted` says that this cannot be, and that nothing was done; an error that says nothing leaves that open.
        """
        ...


_SCHEMES = ("memory", "sqlite", "redis", "rediss", "valkey", "postgresql", "postgres")


def check_url(url: str) -> str:
    """The scheme of a ledger's URL, or an error that names the ones there are."""
    scheme, colon, _ = url.partition(":")
    if not colon or scheme not in _SCHEMES:
        shown = f"{scheme}:..." if "@" in url else url  # what stands before an @ may be a password
        raise UsageError(
            f"{shown!r} is not the URL of a ledger.",
            f"it must begin with one of: {', '.join(name + ':' for name in _SCHEMES)}",
            'for example "memory:", "sqlite:ledger.db", "redis://localhost:6379/0", "postgresql://localhost/shop"',
        )
    return scheme


async def open_ledger(url: str) -> Ledger:
    """The ledger behind a URL; its driver is imported now, not before."""
    from importlib import import_module

    scheme = check_url(url)
    module = {"rediss": "redis", "valkey": "redis", "postgresql": "postgres"}.get(scheme, scheme)
    try:
        store = import_module(f"wirecall.ledger.{module}" if module == "memory" else f"wirecall.ledger.{module}.ledger")
    except ModuleNotFoundError as error:
        raise UsageError(
            f"A ledger of {scheme}: needs a driver.", f"there is no {error.name}", f'pip install "wirecall[{module}]"'
        ) from error
    opened: Ledger = await store.open_url(url)
    return opened
