"""The ledger in Redis or Valkey: many hosts, one hash per record, one script per transition.

The rules of the file:

1. A transition is one script of the folder `lua`, which reads the server's clock. It touches one record, and where that is
   of a call without a key, the index of its likeness and the records there; or it touches one task. Its keys are in one
   slot, so a cluster is as good as a server. Times and durations are whole microseconds.
2. A record never goes because its lease is over: the lease is a field. Only a tombstone's key has an expiry of its own.
3. A transition whose answer is lost is `LedgerDown`, and its caller finds out by asking. Only a script that the server does
   not know is sent again, in full, since then nothing has run. Should the driver send a script twice, the second finds what
   the first did: a claim its own nonce, what a token allows the name of its call (but for `release`, which leaves nothing),
   the end of an answer the deliverer, the change of a task the name of that change.
4. An operation over all records asks all primaries, and fails if one of them does not answer: half a list looks like a list.
5. A task is a hash in another slot than its record, so its beginning takes three steps: the record names it, as its token
   allows; it is written; and it goes to a set of open tasks, where `orphans` looks. If that ends halfway, no caller has
   heard of it yet: either the record names a task that is not there, as if it had none, or the task is not adopted until a
   retry finds it. (In another order there could be tasks that their records refused, or a set that forgets one which is
   still to be written. One script for two of the steps could part their keys while the slot moves.)

Beside it is `connection`, the way to the server that holds a record. The promise is "at most once, unless Redis loses writes
that it acknowledged": so no eviction, an append-only file, and where a replica may take over, `?replicas=`.
"""

import asyncio
import hashlib
import os
import re
from collections import Counter, deque
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib.resources import files
from itertools import chain, compress, count
from typing import Any, TypeAlias
from urllib.parse import quote, unquote
from zlib import crc32

from redis.exceptions import NoScriptError, RedisClusterException, ResponseError

from wirecall.errors import UsageError
from wirecall.ledger.base import (
    MAX_ATTEMPTS,
    TOMBSTONE_FACTOR,
    Claim,
    Delivered,
    LedgerDown,
    Outcome,
    Record,
    RecordId,
    State,
    Task,
    Token,
    is_orphan,
)
from wirecall.ledger.redis.connection import Connections, Node, check_server, options_of

# Records looked at together, and how often one call of `sweep` does so: 10,000 records, or 50 ms of the server's time.
PAGE = 100
STEPS = 100

# The open tasks are in so many sets. In one set, all tasks of a cluster would depend on one of its servers.
SHARDS = 16

# A generated key with a likeness, as `Keyless` makes it, and how long its random end is.
KEY_END = 24
GENERATED = re.compile(r"(auto-[0-9a-f]+)(-[0-9a-f]{24})")

# How long the key outlives the record: a duplicate that waits elsewhere looks twice a second, however short the retention.
GRACE = 60.0

# A lease or retention of "forever" is 100 years, so that every time stays a number that Lua holds exactly.
FOREVER = 100 * 365 * 86_400.0

STATES = {state.value.encode(): state for state in State}

Ids: TypeAlias = list[RecordId]  # inside the class, `list` is a method
Tasks: TypeAlias = list[str]
Walk: TypeAlias = deque[tuple[Node, int]]  # the servers whose keys are still to be looked at, and from which cursor on


async def open_url(url: str) -> "RedisLedger":
    """Connect to `redis://`, `rediss://` or `valkey://`, and refuse a server that would lose records.

    A node of a cluster stands for the whole of it. `?prefix=` is put before every key; end it with a colon. `?replicas=` is
    how many of them have to hold a write before it counts. The other parameters are those of redis-py.
    """
    ledger = RedisLedger(url)
    try:
        await ledger._check()
    except BaseException:
        await ledger.aclose()
        raise
    return ledger


class RedisLedger:
    """Every method is one command, except those that go through all records."""

    is_tidy = False

    def __init__(self, url: str) -> None:
        self._options, prefix, self._replicas = options_of(url)
        self._prefix: bytes = prefix.encode()
        self._open_tasks = [self._prefix + b"tasks-%d" % shard for shard in range(SHARDS)]
        self._is_cluster = False
        self._place: tuple[asyncio.AbstractEventLoop, Connections] | None = None
        self._closed = False
        self._round: Walk = deque()  # what the sweep has still to look at
        self._unswept: list[RecordId] = []

    # --- transitions -------------------------------------------------------------------------------------------------

    async def claim(self, claim: Claim) -> Record:
        keyless = claim.keyless
        window = f"1{micros(keyless.window)}" if keyless else "0"
        flags = f"{claim.committed:d}{claim.continues:d}{self._replicas > 0:d}{window}"
        terms = f"{micros(claim.lease)} {micros(claim.retention)} {claim.on_crash} {flags}"
        if keyless is None or keyless.likeness is None:
            return record_of(claim.id, await self._run("claim", claim.id, claim.fingerprint, claim.nonce, terms))
        # The script is sent to the index of the likeness. It knows the records there by the ends of their keys.
        like, own = claim.id.key[:-KEY_END], claim.id.key[-KEY_END:]
        index = self._name(claim.id)[: -KEY_END - 1]
        beside = [key[-KEY_END:] for key in keyless.beside if key.startswith(like)]
        while True:
            seen = await self._run_on("claim", [index], claim.fingerprint, claim.nonce, f"{terms} {own}", *beside)
            if isinstance(seen, bytes):
                end = seen[:KEY_END].decode()
                id = claim.id if end == own else RecordId(claim.id.caller, claim.id.method, like + end)
                return record_of(id, seen[KEY_END:])
            # There are members without a record, each the end of a key and a deliverer, and no other record to match.
            ids = [RecordId(claim.id.caller, claim.id.method, like + member[:KEY_END].decode()) for member in seen]
            if any(await self._run_all("state", ids)):
                raise LedgerDown(
                    f"{index.decode()}: the cluster moves this slot, and the index has moved before its records"
                )
            await self._ask("ZREM", index, *seen, writes=True)

    async def deliver(self, ends: Sequence[Delivered]) -> None:
        # A server alone takes many records in one script. In a cluster they are in different slots.
        size, scripts = 1 if self._is_cluster else PAGE, []
        for start in range(0, len(ends), size):
            page = ends[start : start + size]
            told = [end.delivery.encode() + b" " + end.deliverer for end in page]
            scripts.append(self._run_on("deliver", [self._name(end.id) for end in page], *told))
        await asyncio.gather(*scripts)

    async def begin_task(self, token: Token, id: str, document: bytes, ttl: float) -> bool:
        started_at = await self._run("begin_task", token.id, token.fence, token.nonce, os.urandom(16), id)
        if started_at is None:
            return False
        terms = self._name(token.id), started_at, document, micros(ttl)
        begun_at = await self._run_on("write_task", [self._task_name(id)], *terms)
        if not begun_at:
            return False
        shard = crc32(id.encode()) % SHARDS
        await self._ask("ZADD", self._open_tasks[shard], begun_at, id, writes=True)
        return True

    async def task(self, id: str) -> Task | None:
        name = self._task_name(id)
        while seen := await self._run_on("task", [name]):
            record_name, started_at, version, document, is_ready, is_over, left = cut(seen)
            record = self._id(record_name)
            assert record is not None
            now = await self.get(record)
            # If the task is still the same after the look at its record, both were there at the moment of that look.
            if await self._ask("HGET", name, "version") == version:
                is_its_own = now is not None and now.started_at == int(started_at) / 1e6
                facts = int(version), document, is_ready == b"1", is_over == b"1", int(left) / 1e3
                return Task(id, record, *facts, now if is_its_own else None)
        return None

    async def task_of(self, id: RecordId) -> Task | None:
        last = await self._ask("HGET", self._name(id), "task")
        task = await self.task(last.decode()) if last else None
        return task if task is not None and task.record == id and task.now is not None else None

    async def change_task(self, task: Task) -> bool:
        flags = int(task.is_ready), int(task.is_over)
        change = task.version, os.urandom(16), task.document, *flags
        return bool(await self._run_on("change_task", [self._task_name(task.id)], *change))

    async def orphans(self, limit: int = 100) -> Sequence[str]:
        async def look(names: bytes) -> Tasks:
            found, start = Tasks(), 0
            while len(found) < limit and (page := await self._ask("ZRANGE", names, start, start + PAGE - 1)):
                tasks = await asyncio.gather(*(self.task(id.decode()) for id in page))
                found += [task.id for task in tasks if task is not None and is_orphan(task)]
                over = [id for id, task in zip(page, tasks, strict=True) if task is None or task.is_over]
                if over:
                    await self._ask("ZREM", names, *over, writes=True)
                start += len(page) - len(over)
            return found

        return [*chain(*await asyncio.gather(*map(look, self._open_tasks)))][:limit]

    async def heartbeat(self, token: Token, lease: float) -> bool:
        return await self._change("heartbeat", token, micros(lease))

    async def commit_point(self, token: Token, lease: float) -> bool:
        return await self._change("commit_point", token, micros(lease))

    async def complete(self, token: Token, outcome: Outcome, retention: float) -> bool:
        return await self._change("complete", token, micros(retention), *fields_of(outcome))

    async def suspend(self, token: Token, interim: Outcome, retention: float) -> bool:
        return await self._change("suspend", token, micros(retention), *fields_of(interim))

    async def release(self, token: Token) -> bool:
        return await self._change("release", token)

    async def abandon(self, token: Token) -> bool:
        return await self._change("abandon", token)

    async def lapse(self, token: Token) -> bool:
        return await self._change("lapse", token)

    async def resolve(self, id: RecordId, outcome: Outcome | None, retention: float = 86_400) -> bool:
        found = () if outcome is None else fields_of(outcome)
        return bool(await self._run("resolve", id, micros(retention), *found))

    async def _change(self, script: str, token: Token, *args: Any) -> bool:
        return bool(await self._run(script, token.id, token.fence, token.nonce, os.urandom(16), *args))

    # --- reading and housekeeping ------------------------------------------------------------------------------------

    async def get(self, id: RecordId) -> Record | None:
        seen = await self._run("get", id)
        return seen and record_of(id, seen)

    async def list(self, state: State | None = None, *, limit: int = 100, after: RecordId | None = None) -> list[Record]:
        """As in every ledger; but Redis keeps no order, so each page reads the names of all keys and sorts them here."""
        wanted = () if state is None else (state.value,)
        found: list[Record] = []
        for page in _pages(sorted(id for id in await self._ids() if after is None or id > after)):
            views = await self._run_all("get", page, *wanted)
            found += [record_of(id, seen) for id, seen in zip(page, views, strict=True) if seen]
            if len(found) >= limit:
                break
        return found[:limit]

    async def counts(self) -> dict[State, int]:
        found: Counter[bytes | None] = Counter()
        for page in _pages(list(await self._ids())):
            found.update(await self._run_all("state", page))
        return {state: found[state.value.encode()] for state in State}

    async def sweep(self, limit: int = 500) -> int:
        """As in every ledger, on as many records as a call may look at; the next call goes on from there."""
        changed, rounds = 0, 1 if self._at_end else 2  # a sweep that begins in the middle looks at the beginning too
        for _ in range(STEPS):
            changed += await self._sweep_page(limit - changed)
            rounds -= self._at_end
            if changed >= limit or not rounds:
                break
        return changed

    async def spend(self, name: str, cost: float, burst: float) -> float:
        """Spend from a limit of calls, which all processes share: return 0, or the seconds until the call may come again.

        `cost` and `burst` are seconds of the limit's rate.
        """
        key = self._prefix + b"rate:" + quote(name, errors="surrogatepass").encode()
        return float(await self._run_on("spend", [key], micros(cost), micros(burst))) / 1e6

    async def ping(self) -> None:
        """As in every ledger. In a cluster, every primary is asked, and one that takes a write is enough: as long as
        some commands can be recorded, the others are refused one by one."""
        connections = await self._here()
        left, names = set(await connections.primaries()), list[bytes]()
        for number in count():  # a key for each primary; without a colon, so it cannot be taken for a record's
            if not left:
                break
            name = self._prefix + b"ping-%d" % number
            if (holder := await connections.holder(name)) in left:
                left.remove(holder)
                names.append(name)
        answers = await asyncio.gather(*(self._run_on("ping", [name]) for name in names), return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if len(errors) == len(answers):
            raise errors[0]

    @property
    def _at_end(self) -> bool:
        return not self._round and not self._unswept

    async def _sweep_page(self, limit: int) -> int:
        if not self._unswept:
            if not self._round:
                self._round = await self._walk()
            self._unswept = await self._scan(self._round)
        page, self._unswept = self._unswept[:PAGE], self._unswept[PAGE:]
        due = list(compress(page, await self._run_all("due", page)))
        self._unswept = due[limit:] + self._unswept
        return sum(await self._run_all("sweep", due[:limit]))

    async def _ids(self) -> set[RecordId]:
        """All there are. One whose slot moves to another server meanwhile may be missed, or be met twice: hence a set."""
        walk, found = await self._walk(), set[RecordId]()
        while walk:
            found.update(await self._scan(walk))
        return found

    async def _walk(self) -> Walk:
        return deque((node, 0) for node in await (await self._here()).primaries())

    async def _scan(self, walk: Walk) -> Ids:
        pattern = re.sub(rb"([*?\[\]\\])", rb"\\\1", self._prefix) + b"*"
        node, cursor = walk.popleft()  # so the next call after a server that does not answer goes on with the others
        command = "SCAN", cursor, "MATCH", pattern, "COUNT", 5 * PAGE, "TYPE", "hash"
        cursor, names = await (await self._here()).ask_at(node, *command)
        if cursor:
            walk.appendleft((node, cursor))
        return [id for name in names if (id := self._id(name))]

    # --- names -------------------------------------------------------------------------------------------------------

    def _name(self, id: RecordId) -> bytes:
        """The three parts, percent-encoded, so that a colon only ever parts them.

        That leaves no braces, so those around the likeness of a generated key are a hash tag: they put the records of that
        likeness, and its index, which is named like them up to the brace, into one slot. (Braces in the prefix do so too.)
        """
        return self._prefix + _name_of(id)

    def _task_name(self, id: str) -> bytes:
        """Two parts, so it is not the name of a record."""
        return self._prefix + b"task:" + quote(id, errors="surrogatepass").encode()

    def _id(self, name: bytes) -> RecordId | None:
        """The record behind a key; None for another program's key that begins like ours."""
        with suppress(ValueError):  # also that of `decode`
            caller, method, key = name[len(self._prefix) :].decode("ascii").split(":")
            if key.startswith("{auto-"):
                key = key.replace("{", "", 1).replace("}", "", 1)
            return RecordId(*(unquote(part, errors="surrogatepass") for part in (caller, method, key)))
        return None

    # --- the servers -------------------------------------------------------------------------------------------------

    async def _check(self) -> None:
        """Find out whether this is a cluster; refuse servers that cannot keep the contract, warn of those that might not."""
        connections = await self._here()
        with suppress_answers():  # a server that is alone says no; INFO would tell too, but managed servers forbid it
            await connections.ask_at(None, "CLUSTER", "SLOTS")
            await connections.aclose()
            self._is_cluster, self._place = True, None
            connections = await self._here()
        for node in await connections.primaries():
            info: dict[str, Any] = {}
            with suppress_answers():
                info = await connections.ask_at(node, "INFO")
            if not info:  # it may forbid that; but not everything: a database that it does not have, for example
                await connections.ask_at(node, "PING")
            check_server(connections.where(node), info, self._replicas)

    async def aclose(self) -> None:
        """Let the operations in flight end, and close the connections; those of another loop end with it."""
        self._closed = True
        place, self._place = self._place, None
        if place is not None and place[0] is _loop():
            await place[1].aclose()

    async def _here(self) -> Connections:
        """The connections of the running loop. A ledger serves one loop at a time, one after another."""
        loop = _loop()
        place = self._place
        if place is None or place[0] is not loop:
            if self._closed:
                raise LedgerDown("the ledger is closed")
            try:
                place = self._place = loop, Connections(self._options, self._replicas, self._is_cluster)
            except (TypeError, RedisClusterException) as error:
                raise LedgerDown(f"redis-py has no client for this cluster: {error}") from error
            await anext(place[1].lifetime)
        return place[1]

    async def _ask(self, command: str, name: bytes, *args: Any, writes: bool = False) -> Any:
        return await (await self._here()).ask(name, (command, name, *args), writes=writes)

    def _run(self, script: str, id: RecordId, *args: Any) -> Coroutine[Any, Any, Any]:
        return self._run_on(script, [self._name(id)], *args)

    async def _run_on(self, script: str, names: Sequence[bytes], *args: Any) -> Any:
        connections, given = await self._here(), (len(names), *names, *args)
        source, digest = SCRIPTS[script]
        writes = script not in READS
        try:
            return await connections.ask(names[0], ("EVALSHA", digest, *given), writes=writes)
        except LedgerDown as error:
            if not isinstance(error.__cause__, NoScriptError):
                raise
        return await connections.ask(names[0], ("EVAL", source, *given), writes=writes)

    async def _run_all(self, script: str, ids: Ids, *args: Any) -> Sequence[Any]:
        return await asyncio.gather(*(self._run(script, id, *args) for id in ids))


# --- what is said to a server, and what it answers --------------------------------------------------------------------


def micros(seconds: float) -> int:
    return int(min(seconds, FOREVER) * 1e6)


def _scripts() -> Iterator[tuple[str, tuple[bytes, str]]]:
    """All scripts by their names: the text, and the digest under which a server knows it once it has seen it."""
    parts = {path.name.removesuffix(".lua"): path.read_bytes() for path in files(__package__).joinpath("lua").iterdir()}
    limits = f"local MAX_ATTEMPTS, TOMBSTONE_FACTOR, GRACE = {MAX_ATTEMPTS}, {TOMBSTONE_FACTOR}, {micros(GRACE)}\n"
    common = limits.encode() + parts.pop("common")
    for name, part in parts.items():
        yield name, (common + part, hashlib.sha1(common + part, usedforsecurity=False).hexdigest())


SCRIPTS = dict(_scripts())
READS = {"due", "get", "state", "task"}  # those that write nothing


def fields_of(outcome: Outcome) -> tuple[Any, ...]:
    bare = outcome.kind, outcome.digest
    return bare if outcome.payload is None else (*bare, outcome.payload)


def record_of(id: RecordId, seen: bytes) -> Record:
    """A record from what `view` in common.lua returns."""
    state, fence, nonce, fingerprint, committed, attempts, left, started, completed, *rest = cut(seen)
    kind, digest, payload, delivery, deliverer = rest
    return Record(
        id,
        fingerprint,
        STATES[state],
        int(fence),
        nonce,
        committed == b"1",
        int(attempts),
        int(left) / 1e6,
        int(started) / 1e6,
        None if completed is None else int(completed) / 1e6,
        None if kind is None else Outcome(kind.decode(), payload, digest),
        None if delivery is None else delivery.decode(),
        deliverer or b"",
    )


def cut(seen: bytes) -> Iterator[Any]:
    """The fields that `joined` in common.lua puts together: first their lengths, -1 for none, then all of them."""
    lengths, _, fields = seen.partition(b"\n")
    start = 0
    for length in map(int, lengths.split()):
        if length < 0:
            yield None
        else:
            yield fields[start : (start := start + length)]


@contextmanager
def suppress_answers() -> Iterator[None]:
    """Pass over a server that answers with an error, in contrast to one that does not answer."""
    try:
        yield
    except LedgerDown as error:
        if not isinstance(error.__cause__, ResponseError):
            raise


def _loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise UsageError(
            "A command with a key was called without an event loop.",
            "its ledger is a server, and waiting for it needs a loop",
            "use `await app.handle(...)`",
        ) from None


@lru_cache
def _quoted(part: str) -> str:
    return quote(part, errors="surrogatepass")


@lru_cache(maxsize=1024)  # two or three transitions in a short time name the same record
def _name_of(id: RecordId) -> bytes:
    generated = GENERATED.fullmatch(id.key)
    key = f"{{{generated[1]}}}{generated[2]}" if generated else quote(id.key, errors="surrogatepass")
    return f"{_quoted(id.caller)}:{_quoted(id.method)}:{key}".encode()


def _pages(ids: list[RecordId]) -> Iterator[list[RecordId]]:
    for start in range(0, len(ids), PAGE):
        yield ids[start : start + PAGE]
