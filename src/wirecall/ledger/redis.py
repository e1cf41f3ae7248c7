"""The ledger in Redis or Valkey: many hosts, one hash per record, one script per transition.

The rules of the file:

1. A transition is one script of the folder `lua`, which touches one key and reads the server's clock.
2. A record never goes because its lease is over: the lease is a field. The key's own expiry only removes what no longer
   matters.
3. Nothing is sent twice. A transition whose answer is lost is `LedgerDown`, and its caller finds out by asking. Only a
   script that the server does not know is sent again, in full, since then nothing has run. (A claim may be repeated with
   its nonce: it finds its own record, RUNNING, and gets it back as its own.)
4. What waits at the moment goes out together: a `_Wire` sends it as one pipeline. A caller that is cancelled only leaves the
   queue; no connection is given up halfway.
5. A connection belongs to an event loop, so each loop gets a `_Wire` of its own, which is closed when the loop ends.

The promise is "at most once, unless Redis loses writes that it acknowledged": so no eviction, and an append-only file.
"""

import asyncio
import hashlib
import re
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import suppress
from importlib.resources import files
from itertools import compress
from typing import Any, TypeAlias
from urllib.parse import quote, unquote

from msgspec import Struct
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeout

from wirecall.errors import UsageError
from wirecall.ledger.base import (
    MAX_ATTEMPTS,
    TOMBSTONE_FACTOR,
    UNKNOWN_KEPT,
    Claim,
    LedgerDown,
    Outcome,
    Record,
    RecordId,
    State,
    Token,
)
from wirecall.logs import logger

PREFIX = "wirecall:"
OLDEST = (6, 2)

# How long the key outlives the record: a duplicate that waits elsewhere looks twice a second, however short the retention.
GRACE = 60.0

# Connections per loop, and the most that goes out at once on one of them: reading that many answers takes about 5 ms, and
# nothing else runs meanwhile. `max_connections` in the URL changes the former.
LANES = 2
BATCH = 100

# Records looked at together, and how often one call of `sweep` does so: 10,000 records, or 50 ms of the server's time.
PAGE = 100
STEPS = 100

# A lease or retention of "forever" is 100 years, so that every time stays a number that Lua holds exactly.
FOREVER = 100 * 365 * 86_400.0

Ids: TypeAlias = list[RecordId]  # inside the class, `list` is a method


async def open_url(url: str) -> "RedisLedger":
    """Connect to `redis://`, `rediss://` or `valkey://`, and refuse a server that would lose records.

    `?prefix=` is put before every key; end it with a colon. The other parameters are those of redis-py.
    """
    ledger = RedisLedger(url)
    try:
        await ledger.check()
    except BaseException:
        await ledger.aclose()
        raise
    return ledger


class RedisLedger:
    """Every method is one command, except those that go through all records."""

    is_tidy = False

    def __init__(self, url: str) -> None:
        self._options = _options(url)
        self._prefix: bytes = self._options.pop("prefix").encode()
        self._where = "redis://{host}:{port}/{db}".format_map({"host": "localhost", "port": 6379, "db": 0, **self._options})
        self._wires: dict[asyncio.AbstractEventLoop, _Wire] = {}
        self._closed = False
        self._cursor = 0  # where the sweep is in its round
        self._unswept: list[RecordId] = []

    # --- transitions -------------------------------------------------------------------------------------------------

    async def claim(self, claim: Claim) -> Record:
        times = _micros(claim.lease), _micros(claim.retention)
        flags = int(claim.committed), int(claim.continues)
        seen = await self._run(CLAIM, claim.id, claim.fingerprint, claim.nonce, *times, claim.on_crash, *flags)
        return _record(claim.id, seen)

    async def heartbeat(self, token: Token, lease: float) -> bool:
        return await self._change(HEARTBEAT, token, _micros(lease))

    async def commit_point(self, token: Token, lease: float) -> bool:
        return await self._change(COMMIT_POINT, token, _micros(lease))

    async def complete(self, token: Token, outcome: Outcome, retention: float) -> bool:
        return await self._change(COMPLETE, token, _micros(retention), *_fields(outcome))

    async def suspend(self, token: Token, interim: Outcome, retention: float) -> bool:
        return await self._change(SUSPEND, token, _micros(retention), *_fields(interim))

    async def release(self, token: Token) -> bool:
        return await self._change(RELEASE, token)

    async def abandon(self, token: Token) -> bool:
        return await self._change(ABANDON, token)

    async def lapse(self, token: Token) -> bool:
        return await self._change(LAPSE, token)

    async def resolve(self, id: RecordId, outcome: Outcome | None, retention: float = 86_400) -> bool:
        found = () if outcome is None else _fields(outcome)
        return bool(await self._run(RESOLVE, id, _micros(retention), *found))

    async def _change(self, script: "_Script", token: Token, *args: Any) -> bool:
        return bool(await self._run(script, token.id, token.fence, token.nonce, *args))

    # --- reading and housekeeping ------------------------------------------------------------------------------------

    async def get(self, id: RecordId) -> Record | None:
        seen = await self._run(GET, id)
        return seen and _record(id, seen)

    async def list(self, state: State | None = None, *, limit: int = 100, after: RecordId | None = None) -> list[Record]:
        """As in every ledger; but Redis keeps no order, so each page reads the names of all keys and sorts them here."""
        wanted = () if state is None else (state.value,)
        found: list[Record] = []
        for page in _pages(sorted(id for id in await self._ids() if after is None or id > after)):
            views = await self._run_all(GET, page, *wanted)
            found += [_record(id, seen) for id, seen in zip(page, views, strict=True) if seen]
            if len(found) >= limit:
                break
        return found[:limit]

    async def counts(self) -> dict[State, int]:
        found: Counter[bytes | None] = Counter()
        for page in _pages(list(await self._ids())):
            found.update(await self._run_all(STATE, page))
        return {state: found[state.value.encode()] for state in State}

    async def sweep(self, limit: int = 500) -> int:
        """As in every ledger, on as many records as a call may look at; the next call goes on from there."""
        changed, rounds = 0, 1 if self._at_end else 2  # who begins in the middle looks at the beginning too
        for _ in range(STEPS):
            changed += await self._sweep_page(limit - changed)
            rounds -= self._at_end
            if changed >= limit or not rounds:
                break
        return changed

    @property
    def _at_end(self) -> bool:
        return self._cursor == 0 and not self._unswept

    async def _sweep_page(self, limit: int) -> int:
        if not self._unswept:
            self._cursor, self._unswept = await self._scan(self._cursor)
        page, self._unswept = self._unswept[:PAGE], self._unswept[PAGE:]
        due = list(compress(page, await self._run_all(DUE, page)))
        self._unswept = due[limit:] + self._unswept
        return sum(await self._run_all(SWEEP, due[:limit]))

    async def _ids(self) -> set[RecordId]:
        cursor, ids = await self._scan(0)
        found = set(ids)
        while cursor:
            cursor, ids = await self._scan(cursor)
            found.update(ids)
        return found

    async def _scan(self, cursor: int) -> tuple[int, Ids]:
        pattern = re.sub(rb"([*?\[\]\\])", rb"\\\1", self._prefix) + b"*"
        cursor, names = await self._ask("SCAN", cursor, "MATCH", pattern, "COUNT", 5 * PAGE, "TYPE", "hash")
        return cursor, [id for name in names if (id := self._id(name))]

    # --- names -------------------------------------------------------------------------------------------------------

    def _name(self, id: RecordId) -> bytes:
        """The three parts, percent-encoded, so that a colon only ever parts them."""
        return self._prefix + ":".join([_quoted(id.caller), _quoted(id.method), _quoted(id.key)]).encode()

    def _id(self, name: bytes) -> RecordId | None:
        """The record behind a key; None for another program's key that begins like ours."""
        with suppress(TypeError, UnicodeError):
            parts = name[len(self._prefix) :].decode("ascii").split(":")
            return RecordId(*(unquote(part, errors="surrogatepass") for part in parts))
        return None

    # --- the server --------------------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Refuse a server that cannot keep the contract; warn of one that might not."""
        try:
            info = await self._ask("INFO")
        except LedgerDown as error:
            if not isinstance(error.__cause__, ResponseError):
                raise
            info = {}  # it answers, but not this: managed servers forbid what they like
        for wrong, why, fix in _faults(info):
            if wrong:
                raise LedgerDown(f"{self._where} cannot be a ledger.\n  why: {why}\n  fix: {fix}")
        for doubtful, why in _doubts(info):
            if doubtful:
                logger.warning("the ledger at %s: %s", self._where, why)

    async def aclose(self) -> None:
        """Let what is under way end, and close the connections of this loop; another loop closes its own."""
        self._closed = True
        wire = self._wires.pop(_loop(), None)
        self._wires.clear()
        if wire is not None:
            await wire.aclose()

    async def _run(self, script: "_Script", id: RecordId, *args: Any) -> Any:
        name = self._name(id)
        try:
            return await self._ask("EVALSHA", script.sha, 1, name, *args)
        except LedgerDown as error:
            if not isinstance(error.__cause__, NoScriptError):
                raise
        return await self._ask("EVAL", script.source, 1, name, *args)

    async def _run_all(self, script: "_Script", ids: Ids, *args: Any) -> Sequence[Any]:
        return await asyncio.gather(*(self._run(script, id, *args) for id in ids))

    async def _ask(self, *command: Any) -> Any:
        loop = _loop()
        wire = self._wires.get(loop) or await self._connected(loop)
        answer = await wire.ask(command)
        if isinstance(answer, Exception):
            raise LedgerDown(f"{self._where}: {answer}") from answer
        return answer

    async def _connected(self, loop: asyncio.AbstractEventLoop) -> "_Wire":
        if self._closed:
            raise LedgerDown(f"{self._where}: the ledger is closed")
        for ended in [known for known in list(self._wires) if known.is_closed()]:
            self._wires.pop(ended, None)
        wire = self._wires[loop] = _Wire(self._options)
        await wire.open()
        return wire


class _Wire:
    """The connections of one event loop, and the commands that wait for one of them."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._lanes = options.get("max_connections") or LANES
        self._pool = ConnectionPool(**options)
        self._client = Redis(connection_pool=self._pool)
        self._waiting: deque[_Ask] = deque()
        self._senders: set[asyncio.Task[None]] = set()
        self._lifetime = _lifetime(self._pool)

    async def open(self) -> None:
        await anext(self._lifetime)

    async def aclose(self) -> None:
        if self._senders:
            await asyncio.wait(self._senders)
        await self._lifetime.aclose()

    def ask(self, command: tuple[Any, ...]) -> "asyncio.Future[Any]":
        """The answer to come; an error is an answer."""
        loop = asyncio.get_running_loop()
        waiting = _Ask(command, loop.create_future())
        self._waiting.append(waiting)
        if len(self._senders) < self._lanes:
            sender = loop.create_task(self._send())
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)  # one that was cancelled before it began
        return waiting.answer

    async def _send(self) -> None:
        while self._waiting:
            batch = self._take(BATCH)
            answers: list[Any] = [LedgerDown("the event loop ended")] * len(batch)
            try:
                answers = await self._exchange(batch)
            except Exception as error:  # garbage from the server is a ValueError of the driver's
                if isinstance(error, RedisTimeout):  # the server is silent: one timeout is enough for all who wait
                    batch += self._take(len(self._waiting))
                answers = [error] * len(batch)
            finally:
                for waiting, answer in zip(batch, answers, strict=True):
                    if not waiting.answer.done():
                        waiting.answer.set_result(answer)
        self._senders.discard(asyncio.current_task())  # now, not when the loop gets to it: who asks next must start another

    def _take(self, most: int) -> "list[_Ask]":
        taken = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
        return [waiting for waiting in taken if not waiting.answer.done()]

    async def _exchange(self, batch: "list[_Ask]") -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for waiting in batch:
            pipeline.execute_command(*waiting.command)
        answers = await pipeline.execute(raise_on_error=False)
        if any(isinstance(answer, ResponseError) and "READONLY" in str(answer) for answer in answers):
            # A primary that was demoted keeps its connections; a new one may lead to its successor.
            await self._pool.disconnect(inuse_connections=False)
        return answers


class _Ask(Struct, eq=False):
    """A command, and who waits for its answer."""

    command: tuple[Any, ...]
    answer: "asyncio.Future[Any]"


async def _lifetime(pool: ConnectionPool) -> AsyncGenerator[None, None]:
    """Suspended until the loop ends, or the ledger is forgotten: a loop closes the asynchronous generators it has begun."""
    try:
        yield
    finally:
        with suppress(RedisError, OSError):
            await pool.disconnect()


def _loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise UsageError(
            "A command with a key was called without an event loop.",
            "its ledger is a server, and waiting for it needs a loop",
            "use `await app.handle(...)`",
        ) from None


def _options(url: str) -> dict[str, Any]:
    """What redis-py makes of the URL, between our defaults and what must not be changed."""
    defaults = {"prefix": PREFIX, "socket_connect_timeout": 2.0, "socket_timeout": 5.0, "protocol": 2}
    fixed = {"decode_responses": False, "retry": Retry(NoBackoff(), 0)}
    try:
        options: dict[str, Any] = {**defaults, **parse_url(re.sub("^valkey:", "redis:", url)), **fixed}
        pool: Any = ConnectionPool(**{name: value for name, value in options.items() if name != "prefix"})
        pool.make_connection()  # this does not connect: it looks at the options
    except (ValueError, TypeError, RedisError) as error:
        raise UsageError(
            "The URL of the ledger is not one that redis-py takes.",
            str(error),
            "for example redis://localhost:6379/0?prefix=shop:",
        ) from error
    return options


# --- is this server fit? ---------------------------------------------------------------------------------------------


def _faults(info: dict[str, Any]) -> Iterator[tuple[bool, str, str]]:
    version = str(info.get("redis_version", "7.0"))
    yield (
        tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST,
        f"it is version {version}",
        f"use {OLDEST[0]}.{OLDEST[1]} or newer",
    )
    yield info.get("role") == "slave", "it is a replica, and takes no writes", "name the primary"
    yield (
        info.get("redis_mode") == "cluster",
        "it is a node of a cluster, and holds only a part of the keys",
        "use a server that is not part of one",
    )
    yield (
        _evicts(info) and info.get("maxmemory", 0) > 0,
        f"it drops records when memory runs out: maxmemory-policy is {info.get('maxmemory_policy')}",
        "CONFIG SET maxmemory-policy noeviction",
    )


def _doubts(info: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    unknown = {"redis_version", "role", "maxmemory", "maxmemory_policy", "aof_enabled"} - info.keys()
    yield bool(unknown), f"could not check whether it keeps what it is told: INFO does not tell {', '.join(sorted(unknown))}"
    yield _evicts(info), f"maxmemory-policy is {info.get('maxmemory_policy')}: set noeviction before you set maxmemory"
    yield info.get("aof_enabled") == 0, "appendonly is no; after a crash of the server, commands may run a second time"


def _evicts(info: dict[str, Any]) -> bool:
    return bool(info.get("maxmemory_policy", "noeviction") != "noeviction")


# --- bytes -----------------------------------------------------------------------------------------------------------


def _record(id: RecordId, seen: bytes) -> Record:
    """A record from what `view` in common.lua returns."""
    state, fence, nonce, fingerprint, committed, attempts, lease_left, started_at, completed_at, kind, digest, payload = (
        _cut(seen)
    )
    return Record(
        id=id,
        fingerprint=fingerprint,
        state=STATES[state],
        fence=int(fence),
        nonce=nonce,
        committed=committed == b"1",
        attempts=int(attempts),
        lease_left=int(lease_left) / 1e6,
        started_at=int(started_at) / 1e6,
        completed_at=None if completed_at is None else int(completed_at) / 1e6,
        outcome=None if kind is None else Outcome(kind.decode(), payload, digest),
    )


def _cut(seen: bytes) -> Iterator[Any]:
    """The fields of a view: first their lengths, -1 for one that is not there, then all of them."""
    lengths, _, fields = seen.partition(b"\n")
    start = 0
    for length in map(int, lengths.split()):
        yield None if length < 0 else fields[start : start + length]
        start += max(length, 0)


def _fields(outcome: Outcome) -> tuple[Any, ...]:
    bare = outcome.kind, outcome.digest
    return bare if outcome.payload is None else (*bare, outcome.payload)


def _micros(seconds: float) -> int:
    return int(min(seconds, FOREVER) * 1e6)


def _quoted(part: str) -> str:
    return quote(part, errors="surrogatepass")


def _pages(ids: list[RecordId]) -> Iterator[list[RecordId]]:
    for start in range(0, len(ids), PAGE):
        yield ids[start : start + PAGE]


# --- scripts ---------------------------------------------------------------------------------------------------------


class _Script(Struct, frozen=True):
    """A script, and the name under which the server knows it once it has seen it."""

    source: bytes
    sha: str


def _script(name: str) -> _Script:
    constants = f"""
    local MAX_ATTEMPTS, TOMBSTONE_FACTOR = {MAX_ATTEMPTS}, {TOMBSTONE_FACTOR}
    local UNKNOWN_KEPT, GRACE = {_micros(UNKNOWN_KEPT)}, {_micros(GRACE)}
    """
    folder = files("wirecall.ledger") / "lua"
    source = constants.encode() + (folder / "common.lua").read_bytes() + (folder / f"{name}.lua").read_bytes()
    return _Script(source, hashlib.sha1(source, usedforsecurity=False).hexdigest())


STATES = {state.value.encode(): state for state in State}

CLAIM = _script("claim")
HEARTBEAT = _script("heartbeat")
COMMIT_POINT = _script("commit_point")
COMPLETE = _script("complete")
SUSPEND = _script("suspend")
RELEASE = _script("release")
ABANDON = _script("abandon")
LAPSE = _script("lapse")
RESOLVE = _script("resolve")
DUE = _script("due")
SWEEP = _script("sweep")
GET = _script("get")
STATE = _script("state")
