"""The ledger in Redis or Valkey: many hosts, one hash per record, one script per transition.

The rules of the file:

1. A transition is one script of the folder `lua`, which reads the server's clock. It touches one
   record and, for a call without a key, the index of equal calls and the records there; or it
   touches one task. Its keys are in one slot, so a cluster works like a server. Times and durations
   are whole microseconds.
2. A record is never removed because its lease is over: the lease is a field. Only a tombstone's key
   has an expiry.
3. A transition whose answer is lost is `LedgerDown`, and its caller finds out by asking. Only a
   script that the server does not know is sent again, in full, since then nothing has run. If the
   driver sends a script twice, the second finds the trace of the first: a claim finds its own
   nonce, a step with a token the name of its call (except `release`, which leaves nothing), the
   mark of an answer the deliverer, the change of a task the name of that change.
4. An operation over all records asks all primaries, and fails if one of them does not answer: half
   a list looks like a list.
5. A task is a hash in another slot than its record, so its beginning takes three steps: the record
   names it, as its token allows; it is written; and it is added to a set of open tasks, where
   `orphans` looks. If that stops halfway, no caller has received its id yet: either the record
   names a task that does not exist, as if it had none, or the task is not adopted until a retry
   finds it. (In another order there could be tasks that their records refused, or a set could
   forget a task that is not written yet. One script for two of the steps could separate their keys
   while the slot moves.)

`connection` reaches the server that holds a record. The promise is "at most once, unless Redis
loses writes that it acknowledged": so no eviction, an append-only file, and where a replica may
take over, `?replicas=`.
"""

import asyncio
import hashlib
import math
import os
import re
from collections import Counter, deque
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Sequence
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
    ALL,
    IDENTITY,
    IDENTITY_CHANNEL,
    MARKS_WITHIN,
    MAX_ATTEMPTS,
    STORED,
    TOMBSTONE_FACTOR,
    UNKNOWN_AFTER,
    Claim,
    Delivered,
    LedgerDown,
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
    is_orphan,
    new_reach,
    other_tables,
)
from wirecall.ledger.redis.bus import RedisBus
from wirecall.ledger.redis.connection import Connections, Node, check_server, options_of
from wirecall.logs import logger

# The version of the records. A version only adds fields, so processes of the version before can use
# them. The first had no number.
VERSION = 2

# The least version that a process must know to use the records.
LEAST = 1

# What a migration does.
STEPS_OF_MIGRATION = (
    "ZADD for every record and task: the order of time in which verbs read them",
    "HSET meta version 2 least 1",
)

# The order of the newest records: a rank for each state, and microseconds since 2020.
RANKS = {
    State.RUNNING: 0,
    State.WAITING: 1,
    State.UNKNOWN: 2,
    State.DONE: 3,
    State.TOMBSTONE: 4,
}
RANK = 2**50
EPOCH = 1_577_836_800_000_000

# Names among which one step looks for those of a caller, few so that commands go in between.
WALK = 2000

# Settings of a server: the value that keeps every command, and what another one may lose.
SAFE = {
    "appendonly": ("yes", "a crash of Redis loses all commands since its last snapshot"),
    "appendfsync": ("always", "a crash of the machine loses the commands of about a second"),
    "maxmemory-policy": ("noeviction", "Redis removes records when its memory is full"),
}

# Records per page.
PAGE = 100

# Records that the sweep looks at together, few so that commands go in between; and how often a call
# of `sweep` does that: 10,000 records, or 50 ms of the server's time.
PIECE = 4
STEPS = 2500

# The share of names without a record that a sweep leaves in the order of time; and how often it
# looks at a page of a set.
MOST_GONE = 0.1
PRUNINGS = 100

# The number of sets of open tasks. With one set, all tasks of a cluster would depend on one of its
# servers.
SHARDS = 16

# A generated key with digests, as `Keyless` makes it, and the length of its random end.
KEY_END = 24
GENERATED = re.compile(r"(auto-[0-9a-f]+)(-[0-9a-f]{24})")

# How long the key outlives the record: a duplicate that waits elsewhere looks twice a second,
# however short the retention.
GRACE = 60.0

# A lease or retention of "forever" is 100 years, so that every time stays a number that Lua holds
# exactly.
FOREVER = 100 * 365 * 86_400.0

STATES = {state.value.encode(): state for state in State}

Ids: TypeAlias = list[RecordId]  # inside the class, `list` is a method
Records: TypeAlias = list[Record]
Found: TypeAlias = list[Task]
Names: TypeAlias = list[bytes]
# When records began, and their names.
Timed: TypeAlias = list[tuple[int, bytes]]
Tasks: TypeAlias = list[str]
# Sets of newest records, each with the rank of a state.
Sets: TypeAlias = list[tuple[bytes, int]]
# The servers that are not fully scanned, and their cursors.
Walk: TypeAlias = deque[tuple[Node, int]]


async def open_url(url: str, tables: Tables = "create") -> "RedisLedger":
    """Connect to `redis://`, `rediss://` or `valkey://`; refuse a server that would lose records.

    A node of a cluster stands for the whole of it. `?prefix=` is put before every key; end it with
    a colon. `?replicas=` is how many replicas must hold a write before it counts. The other
    parameters are those of redis-py.
    """
    ledger = RedisLedger(url)
    try:
        await ledger._check(tables)
        with suppress_answers():  # a cluster may need a moment until it serves every slot
            await ledger._prepare(tables)
    except BaseException:
        await ledger.aclose()
        raise
    return ledger


async def risks_of(url: str) -> Sequence[Risk]:
    """Return by which settings the servers may lose commands. Managed ones may forbid CONFIG."""
    ledger = RedisLedger(url)
    found: dict[str, Risk] = {}
    try:
        await ledger._check("read")
        connections = await ledger._here()
        for node in await connections.primaries():
            with suppress_answers():
                for name, (good, what) in SAFE.items():
                    value = await _setting(connections, node, name)
                    if value not in (None, good):
                        found[name] = Risk(
                            f"{name} is {value}: {what}", f"CONFIG SET {name} {good}"
                        )
            with suppress_answers():
                info = await connections.ask_at(node, "INFO", "replication")
                replicas = info.get("connected_slaves", 0)
                if replicas and not ledger._replicas:
                    found["replicas"] = Risk(
                        f"Redis has {replicas} replicas and waits for none of them: a failover may "
                        "lose commands, and their retries run again",
                        "?replicas=1 in the URL of the ledger",
                    )
    finally:
        await ledger.aclose()
    return [*found.values()]


async def _setting(connections: Connections, node: Node, name: str) -> str | None:
    """Return a setting of a server; None if it has none of this name."""
    answer = await connections.ask_at(node, "CONFIG", "GET", name)
    if isinstance(answer, dict):
        answer = [*chain(*answer.items())]
    if len(answer) < 2:
        return None
    value = answer[1]
    return value.decode() if isinstance(value, bytes) else str(value)


async def schema_of(url: str) -> Schema:
    """Return the version of the records."""
    ledger = RedisLedger(url)
    try:
        await ledger._check("read")
        return await ledger._schema()
    finally:
        await ledger.aclose()


class RedisLedger:
    """Every method is one command, except those that go through all records."""

    is_tidy = False
    outlives = True

    def __init__(self, url: str) -> None:
        self._options, prefix, self._replicas = options_of(url)
        self._prefix: bytes = prefix.encode()
        self.reached = new_reach()
        # The version of the records, in a hash; without a colon, so it is not a record.
        self._meta = self._prefix + b"meta"
        # For verbs: the methods that have a set of their newest records, and the newest tasks.
        self._all_methods = self._prefix + b"methods"
        self._newest_tasks = self._prefix + b"tasks-newest"
        # Names of these sets, by method.
        self._sets: dict[str, bytes] = {}
        # Those that this process has added.
        self._methods: set[str] = set()
        # The sets have all records.
        self._is_indexed = False
        self._open_tasks = [self._prefix + b"tasks-%d" % shard for shard in range(SHARDS)]
        self._is_cluster = False
        self._place: tuple[asyncio.AbstractEventLoop, Connections] | None = None
        self._closed = False
        # What the sweep has not scanned yet, and what it has scanned and not swept.
        self._round: Walk = deque()
        self._unswept: list[RecordId] = []

    # --- transitions ------------------------------------------------------------------------------

    async def claim(self, claim: Claim) -> Record:
        if claim.id.method in self._methods:
            return await self._claim(claim)
        # Both are sent at once: the first claim of a method takes one round trip, like all others.
        _, record = await asyncio.gather(self._add_method(claim.id.method), self._claim(claim))
        return record

    async def _claim(self, claim: Claim) -> Record:
        keyless = claim.keyless
        window = ""
        if keyless is not None:
            window = str(micros(keyless.window))
        recorded: tuple[bytes, ...] = ()
        if claim.params is not None:
            recorded = (claim.params,)
        flags = (
            f"{claim.committed:d}{claim.continues:d}{self._replicas > 0:d}"
            f"{keyless is not None:d}{len(recorded)}{window}"
        )
        terms = f"{micros(claim.lease)} {micros(claim.retention)} {claim.on_crash} {flags}"
        if keyless is None or keyless.likeness is None:
            seen = await self._run(
                "claim", claim.id, claim.fingerprint, claim.nonce, terms, *recorded
            )
            return record_of(claim.id, seen)
        # The script is sent to the index of equal calls. It knows the records there by the ends of
        # their keys.
        like = claim.id.key[:-KEY_END]
        own = claim.id.key[-KEY_END:]
        index = self._name(claim.id)[: -KEY_END - 1]
        beside = [key[-KEY_END:] for key in keyless.beside if key.startswith(like)]
        while True:
            facts = claim.fingerprint, claim.nonce, f"{terms} {own}", *recorded
            names = [index, *self._noted("claim", claim.id)]
            seen = await self._run_on("claim", names, *facts, *beside)
            if isinstance(seen, bytes):
                end = seen[:KEY_END].decode()
                id = claim.id
                if end != own:
                    id = RecordId(claim.id.caller, claim.id.method, like + end)
                return record_of(id, seen[KEY_END:])
            # There are members without a record, each the end of a key and a deliverer, and no
            # other record to match.
            ids = [
                RecordId(claim.id.caller, claim.id.method, like + member[:KEY_END].decode())
                for member in seen
            ]
            if any(await self._run_all("state", ids)):
                raise LedgerDown(
                    f"{index.decode()}: the cluster moves this slot, and the index has moved "
                    "before its records"
                )
            await self._ask("ZREM", index, *seen, writes=True)

    async def deliver(self, ends: Sequence[Delivered]) -> None:
        # A single server takes many records in one script. In a cluster they are in different
        # slots.
        size = PAGE
        if self._is_cluster:
            size = 1
        scripts = []
        for start in range(0, len(ends), size):
            page = ends[start : start + size]
            marks = [end.delivery.encode() + b" " + end.deliverer for end in page]
            scripts.append(self._run_on("deliver", [self._name(end.id) for end in page], *marks))
        await asyncio.gather(*scripts)

    async def begin_task(self, token: Token, id: str, document: bytes, ttl: float) -> bool:
        started_at = await self._run(
            "begin_task", token.id, token.fence, token.nonce, os.urandom(16), id
        )
        if started_at is None:
            return False
        terms = self._name(token.id), started_at, document, micros(ttl)
        begun_at = await self._run_on("write_task", [self._task_name(id)], *terms)
        if not begun_at:
            return False
        shard = crc32(id.encode()) % SHARDS
        await self._ask("ZADD", self._open_tasks[shard], begun_at, id, writes=True)
        if not self._is_cluster:
            name = self._task_name(id)
            await self._ask("ZADD", self._newest_tasks, started_at, name, writes=True)
        return True

    async def task(self, id: str) -> Task | None:
        name = self._task_name(id)
        while seen := await self._run_on("task", [name]):
            record_name, started_at, version, document, is_ready, is_over, left = cut(seen)
            record = self._id(record_name)
            assert record is not None
            now = await self.get(record)
            # If the task is unchanged after its record was read, both existed at the moment of that
            # read.
            if await self._ask("HGET", name, "version") == version:
                # Another record may have its id by now.
                if now is not None and now.started_at != int(started_at) / 1e6:
                    now = None
                facts = int(version), document, is_ready == b"1", is_over == b"1", int(left) / 1e3
                return Task(id, record, *facts, now)
        return None

    async def task_of(self, id: RecordId) -> Task | None:
        last = await self._ask("HGET", self._name(id), "task")
        if not last:
            return None
        task = await self.task(last.decode())
        if task is None or task.record != id or task.now is None:
            return None
        return task

    async def change_task(self, task: Task) -> bool:
        flags = int(task.is_ready), int(task.is_over)
        change = task.version, os.urandom(16), task.document, *flags
        return bool(await self._run_on("change_task", [self._task_name(task.id)], *change))

    async def orphans(self, limit: int = 100) -> Sequence[str]:
        async def look(names: bytes) -> Tasks:
            found = Tasks()
            start = 0
            while len(found) < limit and (
                page := await self._ask("ZRANGE", names, start, start + PAGE - 1)
            ):
                tasks = await asyncio.gather(*(self.task(id.decode()) for id in page))
                found += [task.id for task in tasks if task is not None and is_orphan(task)]
                over = [
                    id for id, task in zip(page, tasks, strict=True) if task is None or task.is_over
                ]
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

    async def resolve(
        self,
        id: RecordId,
        outcome: Outcome | None,
        retention: float = 86_400,
        *,
        fence: int | None = None,
    ) -> bool:
        found: tuple[Any, ...] = ()
        if outcome is not None:
            found = fields_of(outcome)
        seen = "" if fence is None else fence
        return bool(await self._run("resolve", id, micros(retention), seen, *found))

    async def _change(self, script: str, token: Token, *args: Any) -> bool:
        return bool(
            await self._run(script, token.id, token.fence, token.nonce, os.urandom(16), *args)
        )

    # --- reading and housekeeping -----------------------------------------------------------------

    async def get(self, id: RecordId) -> Record | None:
        seen = await self._run("get", id)
        return seen and record_of(id, seen)

    async def list(
        self,
        state: State | None = None,
        *,
        limit: int = 100,
        after: Place | None = None,
        only: Only = ALL,
    ) -> Records:
        if not self._is_indexed:
            return await self._list_all(state, limit, after, only)
        sets, least, most = await self._range_of(state, after, only)
        if only.caller is None:
            names = self._names_by_time(sets, least, most, max(1, limit))
        else:
            names = self._names_of_caller(only.caller, sets, least, most)
        found: Records = []
        async for page in names:
            found += await self._views(page, state, after, only)
            if len(found) >= limit:
                break
        await names.aclose()
        return found[:limit]

    async def _views(
        self, names: Sequence[bytes], state: State | None, after: Place | None, only: Only
    ) -> Records:
        """Return the records of these names that are asked for, in the order of time."""
        wanted = () if state is None else (state.value,)
        ids = [id for name in names if (id := self._id(name)) and only.names(id)]
        views = await self._run_all("get", ids, *wanted)
        records = [record_of(id, seen) for id, seen in zip(ids, views, strict=True) if seen]
        found = [
            record
            for record in records
            if only.has(record) and (after is None or record.place < after)
        ]
        return sorted(found, key=lambda record: record.place, reverse=True)

    async def _range_of(
        self, state: State | None, after: Place | None, only: Only
    ) -> tuple[Sets, int, int]:
        """Return where a page is: sets and states in them, and the first and last moment."""
        methods = [only.method] if only.method is not None else await self._known_methods()
        ranks = {RANKS[stored] for stored, _ in STORED[state]}
        sets = [(self._newest(method), rank) for method in methods for rank in ranks]
        least = _since_2020(only.since)
        most = _since_2020(min(only.until, after[0] if after else math.inf))
        return sets, least, most

    async def _names_by_time(
        self, sets: Sets, least: int, most: int, size: int
    ) -> AsyncGenerator[Names, None]:
        """Yield names of records, the newest first, in pages.

        A record may have changed since its name was noted.
        """
        while True:
            chunks = await asyncio.gather(*(self._chunk(*each, least, most, size) for each in sets))
            # Below the last of a full chunk, there may be others that are newer than the rest.
            full = [chunk[-1][0] for chunk in chunks if len(chunk) >= size]
            least_sure = max(full, default=least)
            merged = sorted(chain(*chunks), reverse=True)
            yield [name for at, name in merged if at >= least_sure]
            if not full:
                return
            most = least_sure - 1

    async def _chunk(self, newest: bytes, rank: int, least: int, most: int, size: int) -> Timed:
        """Return the newest names of a state in a set, and when each began."""
        pairs = await self._ask(
            "ZREVRANGEBYSCORE",
            newest,
            rank * RANK + most,
            rank * RANK + least,
            "WITHSCORES",
            "LIMIT",
            0,
            size,
        )
        found = [
            (int(float(score)) - rank * RANK, name)
            for name, score in zip(pairs[::2], pairs[1::2], strict=True)
        ]
        if len(found) < size:
            return found
        # Others may have begun at the same moment as the last one.
        last = found[-1][0]
        bounds = rank * RANK + last, rank * RANK + last
        equals = await self._ask("ZRANGEBYSCORE", newest, *bounds)
        return [*dict.fromkeys([*found, *((last, name) for name in equals)])]

    async def _names_of_caller(
        self, caller: str, sets: Sets, least: int, most: int
    ) -> AsyncGenerator[Names, None]:
        """Yield the same of one caller. The server compares the names, some of each set at once."""
        beginning = self._prefix + _quoted(caller).encode() + b":"
        # The sets that are not searched to their end, and the moment at which each step begins.
        left = dict.fromkeys(sets, most)
        found: set[tuple[int, bytes]] = set()
        while left:
            steps = (self._step(*each, least, at, beginning) for each, at in left.items())
            following: dict[tuple[bytes, int], int] = {}
            for each, (names, at) in zip(left, await asyncio.gather(*steps), strict=True):
                found.update(names)
                if at >= least:
                    following[each] = at
            left = following
            # At that moment and before it, a set may have others.
            unsure = max(left.values(), default=-1)
            sure = sorted((place for place in found if place[0] > unsure), reverse=True)
            found.difference_update(sure)
            yield [name for _, name in sure]

    async def _step(
        self, newest: bytes, rank: int, least: int, most: int, beginning: bytes
    ) -> tuple[Timed, int]:
        """Return names in a set that begin like that, and the moment at which the next step begins."""
        terms = rank * RANK + most, rank * RANK + least, WALK, beginning
        following, *pairs = await self._run_on("of_caller", [newest], *terms)
        names = [
            (int(float(score)) - rank * RANK, name)
            for score, name in zip(pairs[::2], pairs[1::2], strict=True)
        ]
        return names, int(following) - rank * RANK

    async def _note(self, ids: Ids) -> None:
        """Note the places of records in the order of time."""
        if ids:
            names = [(self._name(id), self._newest(id.method)) for id in ids]
            await self._run_on("note", [*chain(*names)])

    async def _known_methods(self) -> Tasks:
        names = await self._ask("SMEMBERS", self._all_methods)
        return [unquote(name.decode(), errors="surrogatepass") for name in names]

    async def _list_all(
        self, state: State | None, limit: int, after: Place | None, only: Only
    ) -> Records:
        """Return a page of a ledger without the sets: a cluster, or one that is not migrated.

        Redis does not sort, so each page reads when each record began, and sorts here.
        """
        wanted: tuple[str, ...] = ()
        if state is not None:
            wanted = (state.value,)
        places: list[Place] = []
        for page in _pages([id for id in await self._ids() if only.names(id)]):
            begun = await self._run_all("began", page, *wanted)
            places += [(int(at) / 1e6, id) for id, at in zip(page, begun, strict=True) if at]
        ids = [
            place[1]
            for place in sorted(places, reverse=True)
            if (after is None or place < after) and only.since <= place[0] < only.until
        ]
        found: Records = []
        for page in _pages(ids):
            views = await self._run_all("get", page, *wanted)
            found += [record_of(id, seen) for id, seen in zip(page, views, strict=True) if seen]
            if len(found) >= limit:
                break
        return found[:limit]

    async def list_tasks(
        self,
        state: State | None = None,
        *,
        limit: int = 100,
        after: Place | None = None,
        only: Only = ALL,
    ) -> Sequence[Task]:
        found: Found = []
        if not self._is_indexed:
            while len(found) < limit and (
                page := await self.list(state, limit=PAGE, after=after, only=only)
            ):
                found += await self._tasks_of(record.id for record in page)
                after = page[-1].place
            return found[:limit]
        most = min(only.until, after[0] if after else math.inf)
        bounds = _score(most), _score(only.since)
        start = 0
        while len(found) < limit:
            terms = "LIMIT", start, limit
            names = await self._ask("ZREVRANGEBYSCORE", self._newest_tasks, *bounds, *terms)
            if not names:
                break
            start += len(names)
            records = await asyncio.gather(*(self._ask("HGET", name, "record") for name in names))
            ids = dict.fromkeys(self._id(name) for name in records if name)
            tasks = await self._tasks_of(id for id in ids if id is not None and only.names(id))
            for task in tasks:
                assert task.now is not None
                is_wanted = state in (None, task.now.standing) and only.has(task.now)
                if is_wanted and (after is None or task.now.place < after):
                    found.append(task)
        return found[:limit]

    async def _tasks_of(self, ids: Iterable[RecordId]) -> Found:
        tasks = await asyncio.gather(*(self.task_of(id) for id in ids))
        return [task for task in tasks if task is not None]

    async def counts(self) -> dict[State, int]:
        if not self._is_indexed:
            found: Counter[bytes | None] = Counter()
            for page in _pages(list(await self._ids())):
                found.update(await self._run_all("state", page))
            return {state: found[state.value.encode()] for state in State}
        counts = dict.fromkeys(State, 0)
        for method in await self._known_methods():
            newest = self._newest(method)
            for state, rank in RANKS.items():
                bounds = rank * RANK, f"({(rank + 1) * RANK}"
                if state is State.RUNNING:  # few, and some of them count as unknown
                    names = await self._ask("ZRANGEBYSCORE", newest, *bounds)
                    ids = [id for name in names if (id := self._id(name))]
                    standings = await self._run_all("state", ids)
                    for standing in filter(None, standings):
                        counts[STATES[standing]] += 1
                else:
                    counts[state] += await self._ask("ZCOUNT", newest, *bounds)
        return counts

    async def sweep(self, limit: int = 500) -> int:
        """As in every ledger, on as many records as a call may look at.

        The next call continues from there.
        """
        changed = 0
        rounds = 1
        if not self._at_end:  # a sweep that begins in the middle looks at the beginning too
            rounds = 2
        for _ in range(STEPS):
            changed += await self._sweep_page(limit - changed)
            rounds -= self._at_end
            if changed >= limit or not rounds:
                break
        if not self._is_cluster:
            await self._prune()
        return changed

    async def _prune(self) -> None:
        """Forget the names of tombstones and tasks that Redis has removed since."""
        for method in self._methods:
            await self._add_method(method)  # a server that has lost its memory gets them again
        least = RANKS[State.TOMBSTONE] * RANK
        for method in await self._known_methods():
            await self._prune_set(self._newest(method), least)
        await self._prune_set(self._newest_tasks, 0)

    async def _prune_set(self, names: bytes, least: int) -> None:
        """Take names out whose keys are gone, until few of them can be left."""
        for _ in range(PRUNINGS):
            gone = await self._run_on("prune", [names], least, PAGE)
            if gone < PAGE * MOST_GONE:
                return

    async def spend(self, name: str, cost: float, burst: float) -> float:
        """Spend from a limit of calls, which all processes share.

        Return 0, or the seconds until a retry may pass. `cost` and `burst` are seconds
        of the limit's rate.
        """
        key = self._prefix + b"rate:" + quote(name, errors="surrogatepass").encode()
        return float(await self._run_on("spend", [key], micros(cost), micros(burst))) / 1e6

    async def mark(
        self, channel: str, mark: Mark, ttl: float, listed: float = MARKS_WITHIN
    ) -> None:
        names = [self._marks(channel), self._mark_name(channel, mark.name)]
        terms = mark.name, mark.content, micros(ttl), micros(listed)
        await self._run_on("mark", names, *terms)

    async def marked(self, channel: str, name: str) -> Mark | None:
        content = await self._ask("GET", self._mark_name(channel, name))
        return None if content is None else Mark(name, content)

    async def marks(self, channel: str, within: float) -> Sequence[Mark]:
        found = await self._run_on("marks", [self._marks(channel)], micros(within))
        names = [name.decode() for name in found]
        if not names:
            return []
        contents = await self._ask("MGET", *(self._mark_name(channel, name) for name in names))
        return [
            Mark(name, content)
            for name, content in zip(names, contents, strict=True)
            if content is not None
        ]

    async def see(self, identity: bytes | None = None) -> Seen:
        """As in every ledger. The fence is the clock, so it does not show an older store."""
        name = self._mark_name(IDENTITY_CHANNEL, IDENTITY)
        if identity is not None:
            await self._ask("SET", name, identity, "NX", writes=True)
        found = await self._ask("GET", name)
        connections = await self._here()
        servers = []
        for node in await connections.primaries():
            with suppress_answers():  # managed servers may forbid it
                info = await connections.ask_at(node, "INFO")
                servers.append(f"{info.get('run_id')}:{info.get('master_replid')}")
        return Seen(found, 0, " ".join(sorted(servers)))

    def join(self, channel: str, receive: Receive) -> RedisBus:
        return RedisBus(
            self._options, self._marks(channel), receive, self._here, is_cluster=self._is_cluster
        )

    async def ping(self) -> None:
        """As in every ledger.

        In a cluster, every primary is asked, and one that takes a write is enough: as long as some
        commands can be recorded, the others are refused one by one.
        """
        connections = await self._here()
        left = set(await connections.primaries())
        names = list[bytes]()
        # A key for each primary; without a colon, so it cannot be taken for a record's.
        for number in count():
            if not left:
                break
            name = self._prefix + b"ping-%d" % number
            if (holder := await connections.holder(name)) in left:
                left.remove(holder)
                names.append(name)
        answers = await asyncio.gather(
            *(self._run_on("ping", [name]) for name in names), return_exceptions=True
        )
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
        page = self._unswept[:PIECE]
        self._unswept = self._unswept[PIECE:]
        marks = await self._run_all("due", page)
        due = list(compress(page, (mark & 1 for mark in marks)))
        await self._note(list(compress(page, (mark & 2 for mark in marks))))
        self._unswept = due[limit:] + self._unswept
        return sum(await self._run_all("sweep", due[:limit]))

    async def _ids(self) -> set[RecordId]:
        """Return all ids.

        One whose slot moves during the scan may be missed, or found twice: hence a set.
        """
        walk = await self._walk()
        found = set[RecordId]()
        while walk:
            found.update(await self._scan(walk))
        return found

    async def _walk(self) -> Walk:
        return deque((node, 0) for node in await (await self._here()).primaries())

    async def _scan(self, walk: Walk) -> Ids:
        pattern = _literally(self._prefix) + b"*"
        # So after a server that does not answer, the next call continues with others.
        node, cursor = walk.popleft()
        command = "SCAN", cursor, "MATCH", pattern, "COUNT", 5 * PAGE, "TYPE", "hash"
        cursor, names = await (await self._here()).ask_at(node, *command)
        if cursor:
            walk.appendleft((node, cursor))
        return [id for name in names if (id := self._id(name))]

    # --- names ------------------------------------------------------------------------------------

    def _name(self, id: RecordId) -> bytes:
        """Return the three parts, percent-encoded, so that a colon only ever separates them.

        That leaves no braces, so those around the digests in a generated key are a hash tag: they
        put the records of equal calls, and their index, which is named like them up to the brace,
        into one slot. (Braces in the prefix do so too.)
        """
        return self._prefix + _name_of(id)

    def _task_name(self, id: str) -> bytes:
        """Two parts, so it is not the name of a record."""
        return self._prefix + b"task:" + quote(id, errors="surrogatepass").encode()

    def _marks(self, channel: str) -> bytes:
        """Return the name of a channel and of the set of its marks, which are in the same slot."""
        return self._prefix + b"{marks-" + quote(channel).encode() + b"}"

    def _mark_name(self, channel: str, name: str) -> bytes:
        return self._marks(channel) + b"-" + quote(name).encode()

    def _id(self, name: bytes) -> RecordId | None:
        """Return the record id of a key; None for another program's key that begins like ours."""
        with suppress(ValueError):  # also that of `decode`
            caller, method, key = name[len(self._prefix) :].decode("ascii").split(":")
            if key.startswith("{auto-"):
                key = key.replace("{", "", 1).replace("}", "", 1)
            return RecordId(
                *(unquote(part, errors="surrogatepass") for part in (caller, method, key))
            )
        return None

    # --- the servers ------------------------------------------------------------------------------

    async def _schema(self) -> Schema:
        """Return the version of the records. Without a number, it is 1, or 0 without a record."""
        found, least = await self._ask("HMGET", self._meta, "version", "least")
        if found is None:
            found = 0
            walk = await self._walk()
            while walk and not found:
                found = min(1, len(await self._scan(walk)))
        return Schema("This Redis", int(found), VERSION, int(least or 0), STEPS_OF_MIGRATION)

    async def _prepare(self, tables: Tables) -> None:
        """Note the version of the records, unless `tables` forbids it.

        Records of an older version stay as they are: every record has its own version.
        """
        schema = await self._schema()
        if schema.is_too_new:
            raise other_tables(schema)
        self._is_indexed = schema.found >= VERSION and not self._is_cluster
        if not schema.is_behind or tables in ("leave", "read"):
            return
        if schema.found and tables == "create":
            logger.warning(
                "the ledger's records have version %s, and this wirecall knows version %s: "
                "wirecall ledger migrate makes its verbs fast",
                schema.found,
                schema.known,
            )
            return
        if schema.found and not self._is_cluster:
            await self._index()
        await self._ask("HSET", self._meta, "version", VERSION, "least", LEAST, writes=True)
        self._is_indexed = not self._is_cluster

    async def _index(self) -> None:
        """Note the place of every record and task in the order of time."""
        pattern = _literally(self._prefix)
        cursor: bytes | int = 0
        while True:
            terms = self._prefix, pattern, cursor, 5 * PAGE
            cursor = await self._run_on("index", [self._all_methods], *terms)
            if not int(cursor):
                break

    async def _check(self, tables: Tables) -> None:
        """Find out whether this is a cluster, and check its servers.

        Refuse servers that cannot keep the contract, and warn about doubtful ones.
        """
        connections = await self._here()
        # A single server refuses; INFO would do too, but managed servers forbid it.
        with suppress_answers():
            await connections.ask_at(None, "CLUSTER", "SLOTS")
            await connections.aclose()
            self._is_cluster = True
            self._place = None
            connections = await self._here()
        for node in await connections.primaries():
            info: dict[str, Any] = {}
            with suppress_answers():
                info = await connections.ask_at(node, "INFO")
            if not info:  # it may forbid INFO; PING finds other faults, like a missing database
                await connections.ask_at(node, "PING")
            if tables != "read":  # a replica will do
                check_server(connections.where(node), info, self._replicas)

    async def aclose(self) -> None:
        """Let the operations in flight end, and close the connections.

        Connections of another loop end with that loop.
        """
        self._closed = True
        place = self._place
        self._place = None
        if place is not None and place[0] is _loop():
            await place[1].aclose()

    async def _here(self) -> Connections:
        """Return the connections of the running loop.

        A ledger serves one loop at a time, one after another.
        """
        loop = _loop()
        place = self._place
        if place is None or place[0] is not loop:
            if self._closed:
                raise LedgerDown("the ledger is closed")
            try:
                place = self._place = (
                    loop,
                    Connections(self._options, self._replicas, self._is_cluster, self._reach),
                )
            except (TypeError, RedisClusterException) as error:
                raise LedgerDown(f"redis-py has no client for this cluster: {error}") from error
            await anext(place[1].lifetime)
        return place[1]

    def _reach(self) -> None:
        """Called when a connection was made, or was lost."""
        self.reached = new_reach()

    async def _ask(self, command: str, name: bytes, *args: Any, writes: bool = False) -> Any:
        return await (await self._here()).ask(name, (command, name, *args), writes=writes)

    def _run(self, script: str, id: RecordId, *args: Any) -> Coroutine[Any, Any, Any]:
        return self._run_on(script, [self._name(id), *self._noted(script, id)], *args)

    def _noted(self, script: str, id: RecordId) -> tuple[bytes, ...]:
        """Return the set of newest records that a script also needs, if it needs one."""
        if self._is_cluster or script not in NOTING:
            return ()
        return (self._newest(id.method),)

    def _newest(self, method: str) -> bytes:
        """Two parts, so it is not the name of a record."""
        name = self._sets.get(method)
        if name is None:
            name = self._sets[method] = self._prefix + b"newest:" + _quoted(method).encode()
        return name

    async def _add_method(self, method: str) -> None:
        if not self._is_cluster:
            await self._ask("SADD", self._all_methods, _quoted(method), writes=True)
        self._methods.add(method)

    async def _run_on(self, script: str, names: Sequence[bytes], *args: Any) -> Any:
        connections = await self._here()
        given = (len(names), *names, *args)
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


# --- requests to a server, and its answers --------------------------------------------------------


def micros(seconds: float) -> int:
    return int(min(seconds, FOREVER) * 1e6)


def _scripts() -> Iterator[tuple[str, tuple[bytes, str]]]:
    """Yield all scripts by name: the source, and the digest by which a server knows it."""
    parts = {
        path.name.removesuffix(".lua"): path.read_bytes()
        for path in files(__package__).joinpath("lua").iterdir()
    }
    numbers = f"{MAX_ATTEMPTS}, {TOMBSTONE_FACTOR}, {micros(UNKNOWN_AFTER)}, {micros(GRACE)}"
    limits = (
        "local MAX_ATTEMPTS, TOMBSTONE_FACTOR, UNKNOWN_AFTER, GRACE, VERSION = "
        f"{numbers}, {VERSION}\n"
    )
    common = limits.encode() + parts.pop("common")
    for name, part in parts.items():
        yield name, (common + part, hashlib.sha1(common + part, usedforsecurity=False).hexdigest())


SCRIPTS = dict(_scripts())
# The scripts that write nothing.
READS = {"began", "due", "get", "marks", "of_caller", "state", "task"}
# The scripts that read or write the place of a record among the newest of its method.
NOTING = {"abandon", "claim", "complete", "due", "release", "resolve", "suspend", "sweep"}


def fields_of(outcome: Outcome) -> tuple[Any, ...]:
    bare = outcome.kind, outcome.digest
    if outcome.payload is None:
        return bare
    return (*bare, outcome.payload)


def record_of(id: RecordId, seen: bytes) -> Record:
    """Return the record that `view` in common.lua has encoded."""
    state, fence, nonce, fingerprint, committed, attempts, left, started, completed, *rest = cut(
        seen
    )
    kind, digest, payload, delivery, deliverer, params = rest
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
        params,
    )


def cut(seen: bytes) -> Iterator[Any]:
    """Yield the fields that `joined` in common.lua joins.

    First come their lengths, -1 for none, and then all of them.
    """
    lengths, _, fields = seen.partition(b"\n")
    start = 0
    for length in map(int, lengths.split()):
        if length < 0:
            yield None
        else:
            yield fields[start : (start := start + length)]


@contextmanager
def suppress_answers() -> Iterator[None]:
    """Ignore a server that answers with an error, in contrast to one that does not answer."""
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
    if generated:
        key = f"{{{generated[1]}}}{generated[2]}"
    else:
        key = quote(id.key, errors="surrogatepass")
    return f"{_quoted(id.caller)}:{_quoted(id.method)}:{key}".encode()


def _literally(text: bytes) -> bytes:
    """Return a pattern that stands for these bytes."""
    return re.sub(rb"([*?\[\]\\])", rb"\\\1", text)


def _score(moment: float) -> str:
    """Return a moment as the set of newest tasks has it."""
    if math.isinf(moment):
        return f"{moment:+}"
    return str(round(moment * 1e6))


def _since_2020(moment: float) -> int:
    """Return a moment as the sets of newest records have it."""
    if math.isinf(moment):
        return 0 if moment < 0 else RANK - 1
    return min(max(0, round(moment * 1e6) - EPOCH), RANK - 1)


def _pages(ids: list[RecordId]) -> Iterator[list[RecordId]]:
    for start in range(0, len(ids), PAGE):
        yield ids[start : start + PAGE]
