"""The ledger in PostgreSQL: many hosts, leased records, or a record in one transaction with its handler's own writes.

The rules of the file:

1. A transition is one statement of `postgres.sql`, which commits by itself and reads the server's clock. It needs nothing of
   its session, so a transaction pooler may stand between: timeouts belong to the functions and to the asking side.
2. The claims that wait at the moment go out as one statement, and so do the completions: one round trip and one flush to
   disk serve many (`_Lane`). Within a statement they are in the order of their ids, so that two never wait for each other.
3. Sent again, once, after its connection was lost: a claim, since it finds its own nonce, and a completion, since it finds
   its own token done. Nothing else is.
4. A statement runs in a task of its own, so whoever waits for it may go away at any moment. It is never cancelled: if the
   server does not answer in time, its connection is cut.
5. A connection belongs to an event loop, so each loop has a `_Pool`, which is closed when the loop ends.
6. A transaction whose commit was not confirmed is neither repeated nor reported before the server said what became of it.

Text in PostgreSQL holds no NUL: a record id with one is refused, as the store's limit, with `LedgerDown`.
"""

import asyncio
import re
import socket
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib.resources import files
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar

import psycopg
from msgspec import Struct, json, structs
from psycopg import AsyncConnection, conninfo
from psycopg.pq import PipelineStatus, TransactionStatus

from wirecall.errors import UsageError, WirecallError
from wirecall.ledger.base import (
    MAX_ATTEMPTS,
    TOMBSTONE_FACTOR,
    UNKNOWN_KEPT,
    Claim,
    CommitUnknown,
    LedgerDown,
    Locked,
    Outcome,
    Record,
    RecordId,
    State,
    Token,
    TryAgain,
)
from wirecall.logs import logger

# Connections per event loop; `?pool=` in the URL changes it. An open transaction holds one.
POOL = 10

# Seconds to wait: for a free connection or the answer to one statement, and for news of a commit.
PATIENCE = 5.0
SETTLE = 15.0

# Seconds between attempts to connect, once one has failed.
REST = 0.05

# An open transaction may be silent this long before the server ends it; longer if the lease of its command is longer.
SILENCE = 60.0
DAY = 86_400.0

# Of each kind, statements under way at once, and what one of them carries at most. Two, so that one is made ready while the
# server works on the other; more only make them smaller.
FLIGHTS = 2
BATCH = 64
BATCH_BYTES = 1_000_000

# What the URL does not say. A server that stopped answering is noticed without it, but sockets should not pile up.
DEFAULTS = {
    "application_name": "wirecall",
    "client_encoding": "UTF8",
    "connect_timeout": "4",
    "keepalives": "1",
    "keepalives_idle": "10",
    "keepalives_interval": "3",
    "keepalives_count": "3",
    "target_session_attrs": "read-write",
    "tcp_user_timeout": "10000",
}
OLDEST = 130_000  # pg_xact_status and pg_current_xact_id under these names

UNDONE = ("40001", "40P01")  # serialization failure, deadlock: the server took the transaction back
ENDED = ("3B001", "25P01", "WC001")  # no such savepoint, no transaction, no record
OPEN = (TransactionStatus.INTRANS, TransactionStatus.INERROR)

Params: TypeAlias = dict[str, Any]
Row: TypeAlias = tuple[Any, ...]
Rows: TypeAlias = list[Row]  # inside the class, `list` is a method
Records: TypeAlias = list[Record]
Connection: TypeAlias = AsyncConnection[Row]
T = TypeVar("T")


async def open_url(url: str) -> "PostgresLedger":
    """Connect to `postgresql://` or `postgres://`, and bring the schema `wirecall` up to date.

    `?pool=` is the number of connections. The other parameters are those of libpq.
    """
    ledger = PostgresLedger(*_read(url))
    try:
        await ledger._prepare()
    except BaseException:
        await ledger.aclose()
        raise
    return ledger


def _read(url: str) -> tuple[str, int]:
    base, _, query = url.partition("?")
    fields = [field.partition("=") for field in query.split("&") if field]
    sizes = [value for name, _, value in fields if name == "pool"] or [str(POOL)]
    rest = "&".join(name + equals + value for name, equals, value in fields if name != "pool")
    try:
        given = conninfo.conninfo_to_dict(f"{base}?{rest}")
        return conninfo.make_conninfo("", **{**DEFAULTS, **given}), max(1, int(sizes[-1]))
    except (psycopg.ProgrammingError, ValueError):  # their words may hold a password
        raise UsageError(
            "The URL of the PostgreSQL ledger cannot be read.",
            "a special sign in the user's name or password, or a parameter that is not known",
            'write it like "postgresql://user:p%40ss@host:5432/shop?pool=10", signs like @ : / ? as %40 %3A %2F %3F',
        ) from None


class PostgresLedger:
    """Leased records by statements of their own, and `transaction` for commands whose effects are in the same database."""

    is_tidy = False

    def __init__(self, conninfo: str, size: int) -> None:
        self._conninfo = conninfo
        self._size = size
        self._pools: dict[asyncio.AbstractEventLoop, _Pool] = {}
        self._closed = False

    # --- transitions -------------------------------------------------------------------------------------------------

    async def claim(self, claim: Claim) -> Record:
        pool = await self._here()
        row = await pool.claims.send(claim.id, claim)
        assert row is not None
        return _record(row)

    async def heartbeat(self, token: Token, lease: float) -> bool:
        return bool(await self._ask("heartbeat", **_token(token), lease=lease))

    async def commit_point(self, token: Token, lease: float) -> bool:
        return bool(await self._ask("commit_point", **_token(token), lease=lease))

    async def complete(self, token: Token, outcome: Outcome, retention: float) -> bool:
        pool = await self._here()
        return await pool.completions.send(token.id, _completion(token, outcome, retention)) is not None

    async def suspend(self, token: Token, interim: Outcome, retention: float) -> bool:
        return bool(await self._ask("suspend", **_token(token), **_outcome(interim), retention=retention))

    async def release(self, token: Token) -> bool:
        return bool(await self._ask("release", **_token(token)))

    async def abandon(self, token: Token) -> bool:
        return bool(await self._ask("abandon", **_token(token)))

    async def lapse(self, token: Token) -> bool:
        return bool(await self._ask("lapse", **_token(token)))

    async def resolve(self, id: RecordId, outcome: Outcome | None, retention: float = 86_400) -> bool:
        if outcome is None:
            return bool(await self._ask("resolve not done", **_id(id)))
        return bool(await self._ask("resolve done", **_id(id), **_outcome(outcome), retention=retention))

    # --- reading and housekeeping ------------------------------------------------------------------------------------

    async def get(self, id: RecordId) -> Record | None:
        rows = await self._ask("get", **_id(id))
        return _record(rows[0]) if rows else None

    async def list(self, state: State | None = None, *, limit: int = 100, after: RecordId | None = None) -> Records:
        start = after or RecordId("", "", "")  # comes before all others: no key is empty
        rows = await self._ask("list", **_id(start), state=state and state.value, limit=limit)
        return [_record(row) for row in rows]

    async def counts(self) -> dict[State, int]:
        return {**dict.fromkeys(State, 0), **{State(state): number for state, number in await self._ask("counts")}}

    async def sweep(self, limit: int = 500) -> int:
        ((changed,),) = await self._ask("sweep", limit=limit)
        return int(changed)

    async def aclose(self) -> None:
        self._closed = True
        pools, self._pools = self._pools, {}
        for loop, pool in pools.items():
            if loop is asyncio.get_running_loop():
                await pool.aclose()
            else:
                pool.close()

    # --- one transaction ---------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def transaction(self, claim: Claim) -> "AsyncIterator[PostgresTransaction]":
        """Begin, and insert the record; or find the one that is there. Another transaction with it is waited for."""
        pool = await self._here()
        try:
            connection = await pool.take()
        except psycopg.Error as error:
            raise _down(error) from error
        transaction = PostgresTransaction(pool, connection, claim)
        try:
            await transaction._begin()
            yield transaction
        except Exception as error:
            if told := transaction._told(error):
                raise told from error
            raise
        finally:
            await transaction._end()

    # --- opening -----------------------------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        pool = await self._here()
        try:
            await asyncio.shield(pool.spawn(pool.using(_migrate)))
        except psycopg.Error as error:
            raise _down(error) from error

    async def _ask(self, name: str, **params: Any) -> Rows:
        pool = await self._here()
        try:
            return await asyncio.shield(pool.spawn(pool.ask(_SQL[name], params)))
        except psycopg.Error as error:
            raise _down(error) from error

    async def _here(self) -> "_Pool":
        """The pool of the running loop."""
        loop = _loop()
        return self._pools.get(loop) or await self._enter(loop)

    async def _enter(self, loop: asyncio.AbstractEventLoop) -> "_Pool":
        if self._closed:
            raise LedgerDown("the ledger is closed")
        for known, pool in list(self._pools.items()):
            if known.is_closed():
                self._pools.pop(known, None)
                pool.close()
        pool = self._pools[loop] = _Pool(self._conninfo, self._size)
        await anext(pool.lifetime)
        return pool


async def _migrate(connection: Connection) -> None:
    """Run the parts of the schema that this database does not have; of many processes that start together, one does."""
    if connection.info.server_version < OLDEST:
        raise LedgerDown(f"PostgreSQL 13 or newer is needed; the server is {connection.info.server_version / 10_000:.1f}")
    ((durable, flushed, exists),) = await _rows(connection, _SQL["opened"])
    if durable == "off" or flushed == "off":
        logger.warning("PostgreSQL may forget commands: synchronous_commit is %s, fsync is %s", durable, flushed)
    if exists and await _version(connection) == len(_SCHEMA):
        return
    with _watched(connection, 3 * PATIENCE):  # the others wait for the one
        async with connection.transaction():
            await connection.execute(_SQL["lock schema"])
            await connection.execute(_SQL["create schema"])
            for number in range(await _version(connection), len(_SCHEMA)):
                await connection.execute(_SCHEMA[number], prepare=False)
                await connection.execute(_SQL["migrated"], {"number": number + 1})


async def _version(connection: Connection) -> int:
    ((version,),) = await _rows(connection, _SQL["version"])
    if version > len(_SCHEMA):
        raise LedgerDown(
            f"the schema `wirecall` of this database has version {version}, this wirecall knows {len(_SCHEMA)}: "
            "a newer wirecall was here; upgrade this one"
        )
    return int(version)


async def _rows(connection: Connection, statement: str, params: Params | None = None) -> Rows:
    # Not prepared: a pooler may not know how, a list of many is one statement, and the functions keep their plans anyway.
    with _watched(connection):
        cursor = await connection.execute(statement, params, prepare=False, binary=True)
        return await cursor.fetchall()


@contextmanager
def _watched(connection: Connection, patience: float = PATIENCE) -> Iterator[None]:
    timer = asyncio.get_running_loop().call_later(patience, _cut, connection)
    try:
        yield
    finally:
        timer.cancel()


def _cut(connection: Connection) -> None:
    """End a connection whose server is silent. To cancel would be to ask the same server, and to wait for 10 s."""
    logger.warning("PostgreSQL did not answer in time: the connection is cut")
    with suppress(OSError, psycopg.Error):
        wire = socket.socket(fileno=connection.pgconn.socket)
        try:
            wire.shutdown(socket.SHUT_RDWR)
        finally:
            wire.detach()


class PostgresTransaction:
    """An open transaction that holds a record, or found one. Its handler works in a savepoint, so that it can be undone."""

    record: Record
    db: "Db"

    def __init__(self, pool: "_Pool", connection: Connection, claim: Claim) -> None:
        self._pool = pool
        self._connection = connection
        self._claim = claim
        self._xid, self._pid = "", 0
        self._work: asyncio.Task[Any] | None = None  # what is under way on the connection, wanted or not
        self._settled = False
        self.db = Db(connection)

    async def complete(self, outcome: Outcome, retention: float, *, undo: bool) -> None:
        """Record the outcome and commit; whoever waits may be cancelled, the commit is not."""
        self.db._connection = None
        self._work = self._pool.spawn(self._finish(_completion(self.record.token, outcome, retention), undo))
        await asyncio.shield(self._work)

    async def _begin(self) -> None:
        self._work = self._pool.spawn(self._enter())
        try:
            self.record = await asyncio.shield(self._work)
        except psycopg.errors.LockNotAvailable as error:
            raise Locked(f"{self._claim.id} is in another transaction that did not end") from error
        except psycopg.Error as error:
            raise _undone(error) or _down(error) from error

    async def _enter(self) -> Record:
        claim, connection = self._claim, self._connection
        silence = {"silence": f"{min(max(claim.lease, SILENCE), DAY):.0f}s"}
        with _watched(connection):
            async with connection.pipeline():
                await connection.execute("BEGIN", prepare=False)
                await connection.execute(_SQL["timeouts"], silence, prepare=False)
                cursor = await connection.execute(_SQL["enter"], structs.asdict(claim) | _id(claim.id), prepare=False)
                await connection.execute("SAVEPOINT wirecall", prepare=False)
        row = await cursor.fetchone()
        if row is None:
            return await self._found()
        fence, started_at, self._xid, self._pid = row
        return _running(claim, fence, started_at)

    async def _found(self) -> Record:
        rows = await _rows(self._connection, _SQL["found"], _id(self._claim.id))
        await self._rollback()
        if not rows:
            raise TryAgain(f"{self._claim.id} was removed while it was looked for")
        *row, expired = rows[0]
        record = _record(tuple(row))
        if record.state is State.DONE and expired:
            assert record.outcome is not None
            bare = structs.replace(record.outcome, payload=None)
            return structs.replace(record, state=State.TOMBSTONE, outcome=bare)
        return record

    async def _finish(self, completion: "_Completion", undo: bool) -> None:
        self._settled = True
        try:
            await self._commit(completion, undo)
        except psycopg.Error as error:
            if error.sqlstate in ENDED:
                raise _misused(self._claim.id) from error
            if not _is_lost(error):
                self._settled = False
                raise
            await self._settle(error)

    async def _commit(self, completion: "_Completion", undo: bool) -> None:
        connection = self._connection
        params = {"items": _array([_encode(completion)])}
        with _watched(connection):
            async with connection.pipeline():
                await connection.execute(f"{'ROLLBACK TO' if undo else 'RELEASE'} SAVEPOINT wirecall", prepare=False)
                await connection.execute(_SQL["finish"], params, prepare=False)
                await connection.execute("COMMIT", prepare=False)

    async def _settle(self, error: Exception) -> None:
        """Ask until the server knows what became of the transaction."""
        logger.warning("%s: the commit was not confirmed: %s", self._claim.id, error)
        verdict = ""
        with suppress(TimeoutError, LedgerDown):
            async with asyncio.timeout(SETTLE):
                verdict = await self._verdict()
        if verdict == "aborted":
            raise TryAgain(f"{self._claim.id}: the transaction was lost before its commit") from error
        if verdict != "committed":
            raise CommitUnknown(f"the server cannot tell whether the transaction of {self._claim.id} took effect") from error

    async def _verdict(self) -> Literal["committed", "aborted", "lost"]:
        params = _id(self._claim.id) | {"nonce": self._claim.nonce, "xid": self._xid, "pid": self._pid}
        before: str | None = ""
        while True:
            with suppress(psycopg.Error):
                status, recorded, _ = await self._pool.aside(_SQL["settle"], params)
                if recorded:
                    return "committed"
                if status == "aborted":
                    return "aborted"
                if status == before and status != "in progress":  # twice: at first the row may have been too new to be seen
                    return "lost"
                before = status
            await asyncio.sleep(0.1)

    def _told(self, error: Exception) -> WirecallError | None:
        """What to say of an exception that undid everything; None if it is its handler's own affair, or came too late."""
        if not self._settled and self._xid and self._connection.pgconn.transaction_status == TransactionStatus.IDLE:
            return CommitUnknown(str(_misused(self._claim.id)))  # by COMMIT, perhaps
        if self._settled or isinstance(error, WirecallError):
            return None
        if isinstance(error, psycopg.Error) and self._connection.closed:
            return _down(error)
        return _undone(error)

    async def _end(self) -> None:
        self.db._connection = None
        assert self._work is not None
        try:
            if self._work.done() and self._connection.pgconn.transaction_status in OPEN:
                self._work = self._pool.spawn(self._rollback())
                with suppress(psycopg.Error):
                    await asyncio.shield(self._work)
        finally:
            self._pool.give_after(self._work, self._connection)

    async def _rollback(self) -> None:
        with _watched(self._connection):
            await self._connection.execute("ROLLBACK", prepare=False)


class Db:
    """The open transaction in its handler's hands: psycopg's own words, but those that would end it."""

    def __init__(self, connection: Connection) -> None:
        self._connection: Connection | None = connection

    async def execute(self, query: Any, params: Any = None, **options: Any) -> "psycopg.AsyncCursor[Row]":
        """Execute one statement, and give its cursor."""
        return await self._open.execute(query, params, **options)

    def cursor(self, *args: Any, **options: Any) -> Any:
        """A cursor on this transaction."""
        return self._open.cursor(*args, **options)

    def transaction(self, *args: Any, **options: Any) -> Any:
        """A transaction within this one: a savepoint, undone if the block raises."""
        return self._open.transaction(*args, **options)

    def commit(self) -> NoReturn:
        """Refused, as `rollback` and `close` are."""
        raise UsageError(
            "A handler tried to end the transaction that holds its command.",
            "its writes and the record of the command take effect together, or not at all",
            "return, or raise DomainError to undo your writes; `async with ctx.db.transaction()` is a part to undo",
        )

    rollback = close = commit

    @property
    def _open(self) -> Connection:
        if self._connection is None:
            raise UsageError("ctx.db was used after its command.", "the transaction is over", "use it inside the handler")
        return self._connection


class _Pool:
    """The connections of one event loop, and what is under way on them."""

    def __init__(self, conninfo: str, size: int) -> None:
        self.claims = _Lane(self, _SQL["claim"])
        self.completions = _Lane(self, _SQL["complete"])
        self.lifetime = self._live()
        self._conninfo = conninfo
        self._idle: list[Connection] = []
        self._slots = asyncio.Semaphore(size)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._in_trouble = False
        self._probe: asyncio.Task[None] | None = None
        self._closed = False

    async def _live(self) -> AsyncGenerator[None, None]:
        """Suspended for as long as the loop lives: a loop closes its asynchronous generators before it ends."""
        try:
            yield
        finally:
            self.close()

    def close(self) -> None:
        self._closed = True
        self._drop_idle()

    async def aclose(self) -> None:
        self._closed = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=PATIENCE)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.lifetime.aclose()

    # --- connections -------------------------------------------------------------------------------------------------

    async def take(self) -> Connection:
        """A connection that is not known to be dead; it must come back through `give`."""
        try:
            async with asyncio.timeout(PATIENCE if self._slots.locked() else None):
                await self._slots.acquire()
        except TimeoutError:
            raise LedgerDown(f"no connection became free within {PATIENCE} s; `?pool=` sets their number") from None
        try:
            while self._idle:
                if _is_alive(connection := self._idle.pop()):
                    return connection
            return await self._connect()
        except BaseException:
            self._slots.release()
            raise

    def give(self, connection: Connection) -> None:
        """Take a connection back; one that is not at rest is closed, which also undoes what was open on it."""
        if connection.lock.locked():  # in use by a task that its handler did not wait for
            self.spawn(self._scrap(connection))
        elif _is_at_rest(connection) and not self._closed:
            self._idle.append(connection)
            self._slots.release()
        else:
            self._discard(connection)

    def give_after(self, work: "asyncio.Task[Any]", connection: Connection) -> None:
        if work.done():
            self.give(connection)
        else:
            work.add_done_callback(lambda _: self.give(connection))

    def _discard(self, connection: Connection) -> None:
        if connection.closed:  # by the server, so the others are probably dead as well
            self._drop_idle()
        connection.pgconn.finish()
        self._slots.release()

    async def _scrap(self, connection: Connection) -> None:
        try:
            async with connection.lock:
                pass
        finally:
            self._discard(connection)

    async def _connect(self) -> Connection:
        """A new connection. After a failure, one attempt at a time stands for all: a crowd keeps a server down."""
        if self._in_trouble:
            if self._probe is None or self._probe.done():
                self._probe = self.spawn(self._recover())
            await asyncio.shield(self._probe)
        try:
            return self._idle.pop() if self._idle else await self._dial()
        except psycopg.Error:
            self._in_trouble = True
            raise

    async def _recover(self) -> None:
        await asyncio.sleep(REST)
        connection = await self._dial()
        self._in_trouble = False
        if self._closed:
            connection.pgconn.finish()
        else:
            self._idle.append(connection)

    async def _dial(self) -> Connection:
        if self._closed:
            raise LedgerDown("the ledger is closed")
        return await AsyncConnection.connect(self._conninfo, autocommit=True)

    def _drop_idle(self) -> None:
        for connection in self._idle:
            connection.pgconn.finish()
        self._idle.clear()

    # --- statements --------------------------------------------------------------------------------------------------

    async def ask(self, statement: str, params: Params) -> Rows:
        return await self.using(lambda connection: _rows(connection, statement, params))

    async def aside(self, statement: str, params: Params) -> Row:
        """The one row a statement gives, on a connection that is made for it."""
        connection = await self._dial()
        try:
            return (await _rows(connection, statement, params))[0]
        finally:
            connection.pgconn.finish()

    async def using(self, work: Callable[[Connection], Coroutine[Any, Any, T]]) -> T:
        connection = await self.take()
        try:
            return await work(connection)
        finally:
            self.give(connection)

    def spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited may be gone


class _Completion(Struct, frozen=True):
    id: RecordId
    fence: int
    nonce: bytes
    outcome: Outcome
    retention: float


def _completion(token: Token, outcome: Outcome, retention: float) -> _Completion:
    return _Completion(token.id, token.fence, token.nonce, outcome, retention)


class _Waiting(Struct):
    id: RecordId
    item: bytes
    answer: "asyncio.Future[Row | None]"


class _Lane:
    """Transitions of one kind. Those that wait at the moment go out together, and rows with their ids come back."""

    def __init__(self, pool: _Pool, statement: str) -> None:
        self._pool = pool
        self._statement = statement
        self._waiting: deque[_Waiting] = deque()
        self._flights = 0

    async def send(self, id: RecordId, item: Claim | _Completion) -> Row | None:
        _check(id)
        answer: asyncio.Future[Row | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(id, _encode(item), answer))
        self._start()
        return await answer

    def _start(self) -> None:
        if self._waiting and self._flights < FLIGHTS:
            self._flights += 1
            self._pool.spawn(self._fly())

    async def _fly(self) -> None:
        try:
            if batch := self._batch():
                await self._deliver(batch)
        finally:
            self._flights -= 1
        self._start()

    def _batch(self) -> list[_Waiting]:
        """What goes out together: of each id one. Whoever was cancelled by now does not go at all."""
        batch: dict[RecordId, _Waiting] = {}
        size = 0
        while self._waiting and len(batch) < BATCH and size < BATCH_BYTES and self._waiting[0].id not in batch:
            waiting = self._waiting.popleft()
            if not waiting.answer.done():
                batch[waiting.id] = waiting
                size += len(waiting.item)
        return [batch[id] for id in sorted(batch)]

    async def _deliver(self, batch: list[_Waiting]) -> None:
        try:
            rows = await self._sent(batch)
        except psycopg.Error as error:
            if len(batch) == 1 or _is_lost(error):
                return _fail(batch, _down(error))
            # One of them is at fault, or has to wait for someone: the others need not suffer.
            await asyncio.gather(*(self._deliver([waiting]) for waiting in batch))
        except LedgerDown as error:
            _fail(batch, error)
        except BaseException:
            _fail(batch, LedgerDown("the ledger was stopped"))
            raise
        else:
            found = {row[:3]: row for row in rows}
            for waiting in batch:
                if not waiting.answer.done():
                    waiting.answer.set_result(found.get((waiting.id.caller, waiting.id.method, waiting.id.key)))

    async def _sent(self, batch: list[_Waiting]) -> Rows:
        items = _array([waiting.item for waiting in batch])
        try:
            return await self._pool.ask(self._statement, {"items": items, "again": False})
        except psycopg.Error as error:
            if not _is_lost(error) and error.sqlstate not in UNDONE:
                raise
        return await self._pool.ask(self._statement, {"items": items, "again": True})


def _fail(batch: list[_Waiting], error: LedgerDown) -> None:
    for waiting in batch:
        if not waiting.answer.done():
            waiting.answer.set_exception(LedgerDown(*error.args))  # each their own: raising writes into an exception


# --- values and errors -----------------------------------------------------------------------------------------------

_encode = json.Encoder().encode


def _check(id: RecordId) -> None:
    try:
        if b"\0" not in f"{id.caller}{id.method}{id.key}".encode():
            return
    except UnicodeEncodeError:
        pass
    raise LedgerDown(f"PostgreSQL cannot store a record id with a NUL, or with half a character: {str(id)!a}")


def _array(items: list[bytes]) -> str:
    return f"[{b','.join(items).decode()}]"


def _id(id: RecordId) -> Params:
    _check(id)
    return {"caller": id.caller, "method": id.method, "key": id.key}


def _token(token: Token) -> Params:
    return {**_id(token.id), "fence": token.fence, "nonce": token.nonce}


def _outcome(outcome: Outcome) -> Params:
    return {"kind": outcome.kind, "payload": outcome.payload, "digest": outcome.digest}


def _running(claim: Claim, fence: int, started_at: float) -> Record:
    return Record(
        id=claim.id,
        fingerprint=claim.fingerprint,
        state=State.RUNNING,
        fence=fence,
        nonce=claim.nonce,
        committed=claim.committed,
        attempts=1,
        lease_left=claim.lease,
        started_at=started_at,
    )


def _record(row: Row) -> Record:
    caller, method, key, fingerprint, state, fence, nonce, committed, attempts, left, started, completed, *outcome = row
    kept = None if outcome[0] is None else Outcome(*outcome)
    id = RecordId(caller, method, key)
    return Record(id, fingerprint, State(state), fence, nonce, committed, attempts, left, started, completed, kept)


def _is_at_rest(connection: Connection) -> bool:
    wire = connection.pgconn
    return wire.transaction_status == TransactionStatus.IDLE and wire.pipeline_status == PipelineStatus.OFF


def _is_alive(connection: Connection) -> bool:
    """Without a round trip: a server that ended the session has sent the end of the stream."""
    with suppress(psycopg.Error):
        connection.pgconn.consume_input()
    return not connection.closed


def _is_lost(error: psycopg.Error) -> bool:
    """Whether the connection failed, or could not be made, in contrast to a server that said no."""
    return isinstance(error, psycopg.OperationalError) and (error.sqlstate or "08000").startswith(("08", "57P"))


def _down(error: psycopg.Error) -> LedgerDown:
    what = "cannot be reached" if _is_lost(error) else "refused"
    return LedgerDown(f"PostgreSQL {what}: {error.diag.message_primary or ' '.join(str(error).split())}")


def _undone(error: Exception) -> TryAgain | None:
    """Whether an exception, or what led to it, says that the server took the transaction back."""
    if _sqlstates(error).isdisjoint(UNDONE):
        return None
    return TryAgain("PostgreSQL undid the transaction in favour of another one")


def _sqlstates(error: BaseException | None) -> set[str]:
    found: set[str] = set()
    for _ in range(10):
        found.add(getattr(error, "sqlstate", None) or "")
        error = error and (error.__cause__ or error.__context__)
    return found


def _misused(id: RecordId) -> UsageError:
    return UsageError(
        f"The handler of {id} ended its transaction itself.",
        "a COMMIT or ROLLBACK in SQL takes the writes and the record of the command apart",
        "leave both out; `async with ctx.db.transaction()` is a part that can be undone",
    )


def _loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise UsageError(
            "A command with a key was called without an event loop.",
            "the ledger is in PostgreSQL, and its answer has to be waited for",
            "use `await app.handle(...)`",
        ) from None


def _parts() -> dict[str, str]:
    """The named parts of the SQL file, their constants filled in."""
    text = files("wirecall.ledger").joinpath("postgres.sql").read_text("utf-8")
    constants = {"max_attempts": MAX_ATTEMPTS, "unknown_kept": UNKNOWN_KEPT, "burial": TOMBSTONE_FACTOR - 1}
    filled = re.sub(r"\{(\w+)\}", lambda name: str(constants[name[1]]), text)
    _, *parts = re.split(r"^-- name: (.+)\n", filled, flags=re.MULTILINE)
    return {name: part.strip() for name, part in zip(parts[::2], parts[1::2], strict=True)}


_SQL = _parts()
_SCHEMA = [part for name, part in _SQL.items() if name.startswith("schema ")]
