"""The ledger: the record of commands, so that each takes effect once.

A record holds the facts of one command: its caller, its method, its key, and whether it runs, is
done, or is unknown. This file holds the contract that every store keeps, and the table of states.

The rules of the contract:

1. Every transition is one atomic compare-and-set in the store, on (record id, state, fence, nonce).
2. Only the holder of the current token may touch a record. A token is a fence, which grows with
   every claim, and a random nonce, so that a record that was removed and made again never meets an
   old token.
3. The lease is a field of the record, never its expiry. A record whose holder vanished stays, as
   evidence.
4. No process clock decides anything shared: the store's clock measures leases and retention. A
   record reports how much of its lease remains, not when it ends.
5. Outcomes are bytes. Nothing looks at whether a result is true, empty or null.
6. A store that cannot be reached raises `LedgerDown`, and no error of its driver.
7. Only a person resolves an unknown outcome: no clock removes an UNKNOWN record. DONE becomes
   absent only through TOMBSTONE, whose time begins when it becomes one. So a store's clock that
   jumps forward, however far, makes a record unknown or drops its payload, but it never lets a
   retry run a command that may have taken effect. A run that is committed, and whose lease is over,
   counts as unknown at once (`Record.standing`); the store records that a minute later, unless a
   retry may run the command again. A run that is not committed has done nothing, however long its
   lease is over.
8. The record of a call without a key also says whether its answer was delivered, and for which
   claim: its deliverer is the nonce of that claim. A call that repeats one whose answer was lost is
   that call (`recognise`). It takes the answer over in the same step, so one lost call serves one
   repetition. An unknown outcome was not delivered to any of its callers: every repetition within
   the loss window gets the same answer, and restarts the window.
9. A task is a second row about a record: what the server keeps of a call that continues after its
   request. The store does not read its document, and a change names the version that it replaces.
   The task has a separate end; its record stays an ordinary one, which claims, leases and `decide`
   govern. A record that was removed and made again is another record, with another `started_at`. It
   may have other params, so it does not inherit the tasks of the first.
10. A mark is a message to all processes that use the ledger, and a bus wakes them. Messages of a bus
   may be lost; marks are not, until they expire. So a process that has missed a message finds it
   among the marks (`Ledger.marks`).

11. A store has an identity, which is made with it (`see`). A process compares it with what it saw
    before (`commands.witness`), so a store that comes back empty or older is not taken for the same.

    absent ──claim──► RUNNING
    RUNNING ──complete──► DONE ──retention over──► TOMBSTONE ──8 x retention──► absent
    RUNNING ──release──► absent
    RUNNING ──lease and retention over, not committed──► absent
    RUNNING ──lease over: claim by a successor, if not committed, rerun or reconcile──► RUNNING
    RUNNING ──the same claim again──► RUNNING
    RUNNING ──lapse: the lease ends now──► RUNNING
    RUNNING ──suspend──► WAITING ──claim that continues──► RUNNING
                         WAITING ──retention over──► absent
    RUNNING ──abandon; lease over, on_crash unknown──► UNKNOWN
                         UNKNOWN ──complete by its holder; resolve──► DONE
                         UNKNOWN ──resolve: not done──► absent

    delivery, in any state:   pending ──written──► written
                              │  ▲
                   the answer │  │ claim of a repetition
                      is lost ▼  │
                              undelivered ──written: a stream was resumed──► written
"""

import enum
import math
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import count
from typing import Any, Literal, Protocol, TypeAlias

from msgspec import Struct

from wirecall.errors import UsageError, WirecallError, extra_fix

MAX_ATTEMPTS = 5
TOMBSTONE_FACTOR = 8

# Bytes of a SHA-256.
DIGEST = 32

# Seconds after the lease of a committed run ends until the sweep records its outcome as unknown.
UNKNOWN_AFTER = 60.0

# Characters of a message of a bus. PostgreSQL takes 7999 bytes.
MAX_MESSAGE = 7000
# Seconds after which a mark may be found only by its name.
MARKS_WITHIN = 3600.0


class LedgerDown(WirecallError):
    """The store cannot be reached, or refuses to work; the message says which and why."""


class Crowded(LedgerDown):
    """The store answers, but all connections to it are in use, and none became free in time.

    Nothing was sent.
    """


class OtherTables(LedgerDown):
    """The store has no tables, or those of another version, and this caller may not change them."""

    # The version in the store. 0: there are no tables.
    found = 0
    # The version that this wirecall makes.
    known = 0


class CommitUnknown(LedgerDown):
    """The store went away during a commit, and did not answer whether the commit took effect."""


class Locked(WirecallError):
    """Another transaction holds the record and did not end within the wait."""


class TryAgain(WirecallError):
    """The store rolled back the whole transaction in favour of another one."""


class NotCommitted(UsageError):
    """What its handler did kept a transaction from being committed; nothing of it remains."""


# The structs below hold strings, bytes and numbers, so they cannot form cycles, and the garbage
# collector skips them (gc=False): 2 % of a command if the ledger is in memory.


class State(enum.Enum):
    """What the ledger knows about a command."""

    RUNNING = "running"
    WAITING = "waiting"
    DONE = "done"
    UNKNOWN = "unknown"
    TOMBSTONE = "tombstone"


def _stored_as(standing: State) -> list[tuple[State, bool | None]]:
    """Return in which states the store has records of a standing, and whether they are dead.

    None: that does not matter.
    """
    if standing is State.RUNNING:
        return [(State.RUNNING, False)]
    if standing is State.UNKNOWN:
        return [(State.UNKNOWN, None), (State.RUNNING, True)]
    return [(standing, None)]


# The same for every standing; None stands for all of them.
STORED: dict[State | None, list[tuple[State, bool | None]]] = {
    None: [(state, None) for state in State],
    **{state: _stored_as(state) for state in State},
}


class RecordId(Struct, frozen=True, order=True, gc=False):
    """The identity of a command; the JSON-RPC id is not part of it (P10)."""

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
    # The SHA-256 of the payload. If an operator stated the outcome, the operator's name follows it,
    # so that every store keeps it for as long as the record.
    digest: bytes

    @property
    def resolved_by(self) -> str | None:
        """The operator that stated the outcome; None if the command did."""
        if len(self.digest) <= DIGEST:
            return None
        return self.digest[DIGEST:].decode(errors="replace")

    def stated_by(self, operator: str) -> "Outcome":
        """Return the outcome with the name of the operator who stated it."""
        return Outcome(self.kind, self.payload, self.digest[:DIGEST] + operator.encode())


Delivery: TypeAlias = Literal["pending", "written", "undelivered"]

# The place of a record in the order of time: when it began, and its id where several began
# together.
Place: TypeAlias = tuple[float, RecordId]


class Record(Struct, frozen=True, gc=False):
    """One record as the store saw it at the moment of the call.

    Times are seconds since 1970 by the store's clock.
    """

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
    # Whether the answer was delivered, if the call has no key.
    delivery: Delivery | None = None
    # The nonce of the claim whose caller gets that answer.
    deliverer: bytes = b""
    # The params as JSON and without secrets, if the method records them.
    params: bytes | None = None

    @property
    def standing(self) -> State:
        """The state that counts.

        A committed run whose lease is over is unknown before the store records that.
        """
        if self.state is State.RUNNING and self.committed and self.lease_left <= 0:
            return State.UNKNOWN
        return self.state

    @property
    def resolved_by(self) -> str | None:
        """The operator who stated the outcome; None if there is none, or the command did."""
        if self.outcome is None:
            return None
        return self.outcome.resolved_by

    @property
    def place(self) -> Place:
        return self.started_at, self.id

    @property
    def token(self) -> Token:
        return Token(self.id, self.fence, self.nonce)

    @property
    def is_evidence(self) -> bool:
        """Whether a run before the holder's may have acted.

        The claim of the holder may have set `committed`; then it counts for both.
        """
        return self.attempts > 1 and self.committed


class Keyless(Struct, frozen=True, gc=False):
    """How the claim of a call without a key is compared with earlier calls."""

    # Digests of caller, method and params; None: the caller is not known, so nothing matches.
    likeness: bytes | None = None
    # Seconds after the loss of an answer in which an equal call counts as its repetition.
    window: float = 120
    # Keys whose answers are pending in this process, so not lost.
    beside: frozenset[str] = frozenset()

    def make_key(self, nonce: bytes) -> str:
        """Return a new key.

        It begins with the digests, so that a store can keep equal calls in one place, and ends with
        a part of the nonce of its first claim, which is random.
        """
        if self.likeness:
            return f"auto-{self.likeness.hex()}-{nonce[:12].hex()}"
        return f"auto-{nonce[:12].hex()}"


class Task(Struct, frozen=True, gc=False):
    """A task as the store saw it at the moment of the call."""

    # The server makes it, of printable characters.
    id: str
    record: RecordId
    # It grows by one with every change.
    version: int
    document: bytes
    # The record is WAITING, and its next leg can begin.
    is_ready: bool
    # The task has ended for good, whatever becomes of its record.
    is_over: bool
    # Seconds until the store forgets the task.
    ttl_left: float
    # The current record. None: it was removed, even if another record has its id.
    now: Record | None = None


class Delivered(Struct, frozen=True, order=True, gc=False):
    """The end of a delivery: the transport took the last byte, or the caller was gone.

    "written" sorts last.
    """

    id: RecordId
    deliverer: bytes
    delivery: Literal["written", "undelivered"]


class Claim(Struct, frozen=True, kw_only=True, gc=False):
    """A request to run a command, and what its method declared."""

    id: RecordId
    fingerprint: bytes
    nonce: bytes
    lease: float
    retention: float
    on_crash: Literal["unknown", "rerun", "reconcile", "transactional"]
    # The handler counts as past its commit point from the start.
    committed: bool = True
    # The claim is for the next leg of a call that is WAITING.
    continues: bool = False
    # The caller cannot wait. If a loop runs nevertheless, the caller must find that out before
    # anything runs.
    alone: bool = False
    # How the call is compared with earlier ones, if its key is generated.
    keyless: Keyless | None = None
    # The params that the record shows to operators.
    params: bytes | None = None
    # Seconds that a transaction may wait for a connection, if there is a deadline.
    within: float | None = None

    @property
    def sweeps_after(self) -> float:
        """Seconds after the end of a lease until the sweep looks at the record.

        They are few if only a person can help.
        """
        if self.committed and self.on_crash == "unknown":
            return min(UNKNOWN_AFTER, self.retention)
        return self.retention


Verdict: TypeAlias = Literal["insert", "renew", "take_over", "to_unknown", "to_tombstone", "leave"]


def decide(record: Record | None, claim: Claim, *, expired: bool) -> Verdict:
    """Return what a claim does to a record: the table of states.

    `expired`: the retention is over.
    """
    if record is None:
        return "insert"
    if record.fingerprint != claim.fingerprint:
        return "leave"
    # A claim is sent again when its answer was lost. Then nothing has run under it, however long
    # ago that was: its own lease is not judged, even if another claim has judged it in between.
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
    if record.state is State.RUNNING:
        return record.lease_left == 0
    return record.state is State.WAITING and task.is_ready


Recognition: TypeAlias = Literal["match", "wait", "pass"]


def recognise(record: Record, claim: Claim, since: float) -> Recognition:
    """Return whether a call without a key repeats an earlier, equal one; "wait": not known yet.

    `since` is how long ago, in seconds, the answer was lost. If no loss is marked, it is how long
    the deliverer has had it: since the record was completed, or taken over after that; or, if it is
    RUNNING, how long ago its lease ended. For an UNKNOWN record, it is the time since the last
    answer, or since the run ended if there was no answer.
    """
    keyless = claim.keyless
    assert keyless is not None
    if record.deliverer == claim.nonce:
        return "match"  # the claim is sent again, because the store's reply was lost
    # The callers of an unknown outcome have only received the error that says so. So equal calls in
    # this process get the same error, even while it is being sent.
    if record.state is State.UNKNOWN:
        return _match_within(keyless.window, since)
    if record.delivery == "undelivered":
        if record.state is State.RUNNING:
            return "match"
        return _match_within(keyless.window, since)
    if record.delivery != "pending" or record.id.key in keyless.beside:
        return "pass"
    # Another process has the answer, or died with it. A living one renews its lease, and marks its
    # answers well within one.
    if record.state is State.RUNNING:
        if record.lease_left > 0:
            return "wait"
        return _match_within(keyless.window, since)
    if record.state is State.DONE:
        if since < claim.lease:
            return "wait"
        return _match_within(claim.lease + keyless.window, since)
    return "pass"  # it is WAITING: nothing is done, so it may run again


def _match_within(window: float, since: float) -> Recognition:
    if since <= window:
        return "match"
    return "pass"


class Only(Struct, frozen=True, gc=False):
    """Which records a list has. None, or an endless time, means all."""

    method: str | None = None
    caller: str | None = None
    # The first moment at which a record may have begun, and the first at which it may not.
    since: float = -math.inf
    until: float = math.inf

    def has(self, record: Record) -> bool:
        """Return whether a record is one of these."""
        return self.names(record.id) and self.since <= record.started_at < self.until

    def names(self, id: RecordId) -> bool:
        """Return whether a record with this id may be one of these."""
        return self.method in (None, id.method) and self.caller in (None, id.caller)


# Every record.
ALL = Only()


class Mark(Struct, frozen=True, gc=False):
    """A message to all processes that use the ledger; the store does not read it."""

    # Of printable characters.
    name: str
    content: bytes


class Seen(Struct, frozen=True, gc=False):
    """What a store says about itself."""

    # The content of its identity mark; None if it has none.
    identity: bytes | None
    # The highest fence that it has given. 0: it does not count them.
    fence: int
    # It names the server, or the file, that answers: it differs after a restart or a failover.
    # Empty if the store does not say.
    history: str


# The mark that identifies a store.
IDENTITY_CHANNEL = "wirecall.ledger"
IDENTITY = "identity"

_reaches = count(1)


def new_reach() -> int:
    """Return a number for `Ledger.reached` that no ledger of this process has had."""
    return next(_reaches)


class Bus(Protocol):
    """One process among those that receive each other through the store."""

    async def send(self, message: str) -> None:
        """Send a message of at most `MAX_MESSAGE` characters of ASCII to the others.

        The sender may receive it, too. It may be lost; `LedgerDown` if it certainly was.
        """
        ...

    async def aclose(self) -> None:
        """Stop listening."""
        ...


# Called with a message; with None after it was possible that some were lost.
Receive: TypeAlias = Callable[[str | None], None]


class Ledger(Protocol):
    """What every store does. Each call is one transition, or one read."""

    # Whether the store itself removes the record of a claim whose caller is cancelled.
    is_tidy: bool

    # The store outlives its processes, so it may come back as another one.
    outlives: bool

    # It changes when the ledger has connected to its store: another store may answer since.
    reached: int

    async def claim(self, claim: Claim) -> Record:
        """Apply `decide` and return the record.

        The claimer holds the record if it carries the claim's nonce.

        Without a key, first look at the records of equal calls whose answers are not written: those
        that are undelivered first, then those that are UNKNOWN, then the others, each in the order
        of their fences. The first to `match` gets the claim's nonce as its deliverer, its delivery
        is pending again, and `decide` is applied to it. Otherwise, the first that says `wait` is
        returned unchanged; it has another deliverer. Otherwise a record is inserted, with its
        delivery pending.
        """
        ...

    async def deliver(self, ends: Sequence[Delivered]) -> None:
        """Mark answers as written or undelivered.

        An answer is skipped if the record has another deliverer by now, or is written already. The
        loss window starts now. A record that is written, or a tombstone, no longer matches
        anything.
        """
        ...

    async def begin_task(self, token: Token, id: str, document: bytes, ttl: float) -> bool:
        """Make a task of a RUNNING record, with version 1.

        It is not ready and not over, and the store forgets it after `ttl`. If the record already
        has a task with this id, that task stays unchanged: the answer may have been lost. The id of
        another record's task is refused.
        """
        ...

    async def task(self, id: str) -> Task | None:
        """Return the task with this id and its record, read together; None after its `ttl`."""
        ...

    async def task_of(self, id: RecordId) -> Task | None:
        """Return the last task of the record that has this id now.

        None: the record or the task was removed.
        """
        ...

    async def change_task(self, task: Task) -> bool:
        """Write document, `is_ready` and `is_over`, and raise the version by one.

        Refused if the version differs.
        """
        ...

    async def orphans(self, limit: int = 100) -> Sequence[str]:
        """Return ids of tasks that are not over and that no process works on.

        The record is RUNNING and its lease is over, or it is WAITING and the task is ready.
        """
        ...

    async def heartbeat(self, token: Token, lease: float) -> bool:
        """Renew the lease of a RUNNING record."""
        ...

    async def commit_point(self, token: Token, lease: float) -> bool:
        """Mark a RUNNING record as committed and renew its lease; refused if the lease is over."""
        ...

    async def complete(self, token: Token, outcome: Outcome, retention: float) -> bool:
        """RUNNING or UNKNOWN to DONE: a late outcome still counts."""
        ...

    async def suspend(self, token: Token, interim: Outcome, retention: float) -> bool:
        """RUNNING to WAITING: the call needs input from its caller before it can continue.

        A handler that asks has done nothing yet: the record is no longer committed, and attempts
        are counted from zero, since the next leg may be the first to act.
        """
        ...

    async def release(self, token: Token) -> bool:
        """RUNNING to absent: the holder knows that nothing was done."""
        ...

    async def abandon(self, token: Token) -> bool:
        """RUNNING to UNKNOWN: the holder does not know how far it got."""
        ...

    async def lapse(self, token: Token) -> bool:
        """End the lease of a RUNNING record now, so that a retry need not wait for it."""
        ...

    async def resolve(
        self,
        id: RecordId,
        outcome: Outcome | None,
        retention: float = 86_400,
        *,
        fence: int | None = None,
    ) -> bool:
        """UNKNOWN to DONE with an outcome, or to absent with None: an operator found out.

        The standing of a record counts, so a committed run whose lease is over can be resolved at
        once. With a `fence`, the record must still have it: the operator has seen that run.
        """
        ...

    async def get(self, id: RecordId) -> Record | None:
        """Return the current record."""
        ...

    async def list(
        self,
        state: State | None = None,
        *,
        limit: int = 100,
        after: Place | None = None,
        only: Only = ALL,
    ) -> list[Record]:
        """Return a page of records, the newest first; `state` is their standing."""
        ...

    async def list_tasks(
        self,
        state: State | None = None,
        *,
        limit: int = 100,
        after: Place | None = None,
        only: Only = ALL,
    ) -> Sequence[Task]:
        """Return a page of the records that are tasks, in the same order: the last task of each."""
        ...

    async def counts(self) -> dict[State, int]:
        """Return how many records have each standing."""
        ...

    async def sweep(self, limit: int = 500) -> int:
        """Clean up at most `limit` records that are due; return the number of changed ones.

        DONE whose retention is over becomes TOMBSTONE, which is removed after 8 times the retention
        in all. RUNNING that is committed becomes UNKNOWN a minute after the end of its lease, and
        stays so until `resolve` or a late `complete`; if a retry may run it again (`on_crash` of
        its last claim is not "unknown"), after its lease and its retention. RUNNING that is not
        committed, and WAITING, have done nothing: they are removed after their retention. Of the
        swept records, only UNKNOWN ones match a call. Tasks whose `ttl` is over are removed; they
        count like records, unless the store expires them.
        """
        ...

    async def mark(
        self, channel: str, mark: Mark, ttl: float, listed: float = MARKS_WITHIN
    ) -> None:
        """Keep a mark for `ttl` seconds; it replaces one of the same name.

        Channel and name have printable characters. Some marks that have expired are removed.
        `marks` finds the marks of a channel for at least `listed` seconds, which is the same for
        all of them, as long as they are kept.
        """
        ...

    async def marked(self, channel: str, name: str) -> Mark | None:
        """Return the mark of this name."""
        ...

    async def marks(self, channel: str, within: float) -> Sequence[Mark]:
        """Return the marks of the last `within` seconds, the oldest first."""
        ...

    async def see(self, identity: bytes | None = None) -> Seen:
        """Return what the store says about itself; it gets this identity unless it has one.

        An identity is a mark that does not expire.
        """
        ...

    def join(self, channel: str, receive: Receive) -> Bus | None:
        """Listen to a channel, from a moment on that `receive(None)` reports.

        A connection that is lost is made again. None: no other process can use this ledger.
        """
        ...

    async def ping(self) -> None:
        """Write something that no reader sees.

        Raises `LedgerDown` if a command could not be recorded now either.
        """
        ...

    async def aclose(self) -> None:
        """Close the connections or files of the ledger."""
        ...


class Transactional(Protocol):
    """A ledger that can put a record and its handler's own writes into one transaction."""

    def transaction(self, claim: Claim, wait: float) -> "AbstractAsyncContextManager[Transaction]":
        """Begin, and look for the record; leaving the block without `complete` undoes everything.

        If another transaction holds the record, wait for it for `wait` seconds, then raise
        `Locked`. An existing record is returned without a `db`, with one exception: it is RUNNING
        with the nonce of the claim, which names its id and is not `keyless`. So a record under a
        lease, the record of a task, gets the transaction of its handler. It is not touched before
        `complete`, so others can renew the lease until then, and it is RUNNING after a block
        without `complete`. If another run has claimed it by then, `complete` raises `TryAgain`.
        """
        ...


class Transaction(Protocol):
    """An open transaction that holds a record, or found one."""

    record: Record
    db: Any

    async def complete(self, outcome: Outcome, retention: float, *, undo: bool) -> None:
        """Record the outcome and commit.

        `undo` drops the handler's writes (a domain error) but keeps the record.

        `NotCommitted` says that the commit is impossible, and that nothing was done; an error that
        does not say so leaves that open.
        """
        ...


# What to do if the tables of a store are missing, or of an older version. "update" makes them and
# brings them up to date, "create" only makes them, and "leave" does neither. "read" also writes
# nothing else, so the store may be a replica.
Tables: TypeAlias = Literal["update", "create", "leave", "read"]

# The module of each scheme.
_MODULES = {
    "memory": "memory",
    "sqlite": "sqlite.ledger",
    "redis": "redis.ledger",
    "rediss": "redis.ledger",
    "valkey": "redis.ledger",
    "postgresql": "postgres.ledger",
    "postgres": "postgres.ledger",
}


def check_url(url: str) -> str:
    """Return the scheme of a ledger's URL, or raise an error that names the known ones."""
    scheme, colon, _ = url.partition(":")
    if not colon or scheme not in _MODULES:
        shown = url
        if "@" in url:  # the part before it may be a password
            shown = f"{scheme}:..."
        raise UsageError(
            f"{shown!r} is not the URL of a ledger.",
            f"it must begin with one of: {', '.join(name + ':' for name in _MODULES)}",
            'for example "memory:", "sqlite:ledger.db", "redis://localhost:6379/0", '
            '"postgresql://localhost/shop"',
        )
    return scheme


class NoDriver(UsageError):
    """The driver of a ledger is not installed.

    No retry helps; every other fault may be fixed while the process runs.
    """


def without_password(url: str) -> str:
    """Return a URL that people may read. Everything up to the last @ may belong to the password."""
    shown = re.sub(r"(://[^:/@]*:).*@", r"\1***@", url)
    return re.sub(r"([?&]password=)[^&]*", r"\1***", shown)


async def open_ledger(url: str, tables: Tables = "create") -> Ledger:
    """Open the ledger of a URL; its driver is imported only now.

    `OtherTables`: `tables` forbids that.
    """
    opened: Ledger = await _store_of(url).open_url(url, tables)
    return opened


async def schema_of(url: str) -> "Schema":
    """Return the version of the tables of a ledger. Nothing is changed, and no file is made."""
    schema: Schema = await _store_of(url).schema_of(url)
    return schema


class Risk(Struct, frozen=True):
    """A setting by which a store may lose commands that it has acknowledged, or messages."""

    what: str
    fix: str


async def risks_of(url: str) -> Sequence[Risk]:
    """Return the risks that a store reports about itself. One that forbids the question has none."""
    found: Sequence[Risk] = await _store_of(url).risks_of(url)
    return found


def _store_of(url: str) -> Any:
    """Return the module of a store; its driver is imported only now."""
    from importlib import import_module

    scheme = check_url(url)
    module = _MODULES[scheme]
    try:
        return import_module(f"wirecall.ledger.{module}")
    except ModuleNotFoundError as error:
        raise NoDriver(
            f"A ledger of {scheme}: needs a driver.",
            f"there is no {error.name}",
            extra_fix(module.partition(".")[0]),
        ) from error


class Schema(Struct, frozen=True):
    """The version of the tables in a store, beside the one that this wirecall makes.

    A migration adds: columns at the end, tables, indexes, functions. So processes of the version
    before can use the tables, too, and servers can be replaced one by one. A change that they
    could not bear is made in two versions, and the second one raises `least`.
    """

    # What has these tables, for an error.
    where: str
    # The version in the store. 0: there are no tables.
    found: int
    # The version that this wirecall makes.
    known: int
    # The least version that a process must know to use the tables.
    least: int = 0
    # What a migration would execute, in order.
    steps: tuple[str, ...] = ()

    @property
    def is_behind(self) -> bool:
        """Whether a migration has something to do."""
        return self.found < self.known

    @property
    def is_too_new(self) -> bool:
        return self.found > self.known and self.least > self.known

    def check(self, tables: Tables) -> bool:
        """Return whether the tables have to be migrated now; refuse what `tables` forbids."""
        if self.is_too_new:
            raise other_tables(self)
        if not self.is_behind:
            return False
        if tables in ("leave", "read") or (tables == "create" and self.found):
            raise other_tables(self)
        return True


def other_tables(schema: Schema) -> OtherTables:
    """Return the error about tables that this caller may not change, or cannot use."""
    what = (
        f"{schema.where} has tables of version {schema.found}, "
        f"and this wirecall knows version {schema.known}."
    )
    if schema.found == 0:
        what = f"{schema.where} has no tables of wirecall."
        why = "only a server makes them, when it starts, or an operator"
        fix = (
            "is this the server's ledger? Start the server once: wirecall serve; "
            "or make them: wirecall ledger migrate"
        )
    elif schema.is_behind:
        why = (
            'only an operator brings them up to date, or an app with migrate="auto", which is the '
            "default in development"
        )
        fix = "wirecall ledger migrate; servers of the version before continue to work"
    else:
        why = f"a newer wirecall made them, and they need one that knows version {schema.least}"
        fix = "upgrade this one"
    error = OtherTables(str(UsageError(what, why, fix)))
    error.found = schema.found
    error.known = schema.known
    return error
