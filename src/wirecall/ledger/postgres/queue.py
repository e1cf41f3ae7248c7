"""Access to PostgreSQL: the connections of one event loop, and queues of statements that are sent
together.

The rules of the file:

1. All SQL is in `postgres.sql`, in named parts; `SQL` has them by name.
2. A group is sent as one message of the simple protocol, which arrives as a whole or not at all. If
   it were sent in pieces, a host that vanishes between them would leave a session that waits for
   the next piece while it holds the record: the server does not count that as idle, and no timeout
   before PostgreSQL 17 ends it.
3. A statement runs in its own task (`spawn`), so its caller may be cancelled at any moment. The
   task is not cancelled: if the server does not answer in time, its connection is cut (`watched`).
4. Claims with a key, claims without one, completions, and questions for a record have a queue each:
   one round trip and one flush to disk serve all that are pending. Within a statement each id
   occurs once, and the ids are in order, so that two statements never wait for each other.
5. A statement of a queue is sent again, once, after its connection was lost, or if the server
   rolled it back: a claim finds its own nonce, a completion its own token done, a question changes
   nothing. Nothing else is sent twice.
"""

import asyncio
import re
import socket
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from importlib.resources import files
from typing import Any, TypeAlias, TypeVar
from weakref import WeakSet

import psycopg
from msgspec import Struct, json
from psycopg import AsyncConnection
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg_pool import AsyncConnectionPool, PoolClosed

from wirecall.aio import start, wake
from wirecall.ledger.base import (
    MAX_ATTEMPTS,
    TOMBSTONE_FACTOR,
    UNKNOWN_AFTER,
    Claim,
    Crowded,
    LedgerDown,
    Outcome,
    RecordId,
)
from wirecall.ledger.postgres.pace import ENOUGH, Pace
from wirecall.logs import logger

# Seconds to wait for the answer to one statement, and for a free connection.
PATIENCE = 5.0
FREE_WITHIN = 5.0

# Transactions do not take the last connections of a larger pool. Claims, leases and the check of
# `/readyz` need one for a moment, and a handler may hold one for as long as it runs.
RESERVED = 2
LEAST_POOL = 5

# A transaction pooler gives each transaction another session of the server, but prepares a
# statement in only one.
OPTIONS: dict[str, Any] = {"autocommit": True, "prepare_threshold": None}

# Seconds between a failed attempt to connect and the second one; after that, connections are made
# on demand.
REST = 0.05

# Per queue: statements in flight at once, and the most that one of them carries. Two, so that one
# is prepared while the server works on the other; more only make them smaller.
FLIGHTS = 2
BATCH = 64
BATCH_BYTES = 1_000_000

# Serialization failure, deadlock: the server rolled the transaction back.
UNDONE = ("40001", "40P01")

Connection: TypeAlias = AsyncConnection[tuple[Any, ...]]
Params: TypeAlias = dict[str, Any]
Row: TypeAlias = tuple[Any, ...]
Rows: TypeAlias = list[Row]
T = TypeVar("T")

encode = json.Encoder().encode

# Which server answers, and since when. Another timeline follows a failover.
HISTORY = (
    "CASE WHEN pg_is_in_recovery() THEN '' "
    "ELSE substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8) END "
    "|| ' ' || extract(epoch FROM pg_postmaster_start_time())::text"
)

_CONSTANTS = {
    "history": HISTORY,
    "max_attempts": MAX_ATTEMPTS,
    "forever": 1e10,
    "burial": TOMBSTONE_FACTOR - 1,
    "unknown_after": UNKNOWN_AFTER,
}
_, *_PARTS = re.split(
    r"^-- name: (.+)\n",
    re.sub(
        r"\{(\w+)\}",
        lambda name: str(_CONSTANTS[name[1]]),
        files("wirecall.ledger.postgres").joinpath("postgres.sql").read_text("utf-8"),
    ),
    flags=re.MULTILINE,
)
SQL = {name: part.strip() for name, part in zip(_PARTS[::2], _PARTS[1::2], strict=True)}


class Ending(Struct, frozen=True):
    """The end of a command, as `wirecall.complete` reads it."""

    id: RecordId
    fence: int
    nonce: bytes
    outcome: Outcome
    retention: float


class Committing(Struct, frozen=True):
    """A commit point, as `wirecall.commit_points` reads it."""

    id: RecordId
    fence: int
    nonce: bytes
    lease: float


def id_of(id: RecordId) -> Params:
    """Return the parameters that name a record.

    PostgreSQL cannot store a NUL, so an id with one is refused.
    """
    with suppress(UnicodeEncodeError):
        if b"\0" not in f"{id.caller}{id.method}{id.key}".encode():
            return {"caller": id.caller, "method": id.method, "key": id.key}
    raise LedgerDown(
        f"PostgreSQL cannot store a record id with a NUL, or with half a character: {str(id)!a}"
    )


# --- errors ---------------------------------------------------------------------------------------


def is_lost(error: psycopg.Error) -> bool:
    """Return whether the connection failed or could not be made: the server did not refuse."""
    return isinstance(error, psycopg.OperationalError) and (error.sqlstate or "08000").startswith(
        ("08", "57P")
    )


def down(error: psycopg.Error) -> LedgerDown:
    what = "refused"
    if is_lost(error):
        what = "cannot be reached"
    return LedgerDown(
        f"PostgreSQL {what}: {error.diag.message_primary or ' '.join(str(error).split())}"
    )


# --- one connection -------------------------------------------------------------------------------


async def rows_of(connection: Connection, statements: str, params: Params | None = None) -> Rows:
    """Send statements as one message, and return the rows of the last one that has rows."""
    with watched(connection):
        # It puts the values into the statement: one message is enough.
        cursor = psycopg.AsyncClientCursor(connection)
        await cursor.execute(statements, params)
        rows: Rows = []
        while True:
            if cursor.description is not None:
                rows = await cursor.fetchall()
            if not cursor.nextset():
                return rows


@contextmanager
def watched(connection: Connection, turns: int = 1) -> Iterator[None]:
    """End the connection if this block takes too long.

    psycopg would ask the same server to cancel, and wait for it.
    """

    def cut() -> None:
        logger.warning("PostgreSQL did not answer in time: the connection is cut")
        with suppress(OSError, psycopg.Error):
            wire = socket.socket(fileno=connection.pgconn.socket)
            try:
                wire.shutdown(socket.SHUT_RDWR)
            finally:
                wire.detach()

    timer = asyncio.get_running_loop().call_later(turns * PATIENCE, cut)
    try:
        yield
    finally:
        timer.cancel()


def is_alive(connection: Connection) -> bool:
    """Check without a round trip.

    A server that ended the session has sent its last error, then an end of stream.
    """
    if not connection.lock.locked():  # else a task is waiting for these bytes, and will find out
        with suppress(psycopg.Error):
            connection.pgconn.consume_input()
            connection.pgconn.consume_input()
    return not connection.closed


# --- the connections of an event loop -------------------------------------------------------------


class Connections:
    """A pool for one event loop, and the tasks that use it. It is closed when the loop ends."""

    def __init__(self, conninfo: str, size: int, reached: Callable[[str], None]) -> None:
        """`reached` is called for each new connection, with the server at its other end."""
        self.lifetime = self._live()
        self._conninfo = conninfo
        self._made: WeakSet[Connection] = WeakSet()
        self._tasks: set[asyncio.Task[Any]] = set()
        # The timeouts of tasks that wait for a connection.
        self._waiting: set[asyncio.Timeout] = set()
        self._in_use = 0
        self._size = size
        # The connections that transactions may hold at the same time.
        places = size
        if size >= LEAST_POOL:
            places -= RESERVED
        self._places = asyncio.Semaphore(places)
        # Why the last attempt to connect failed, if it did.
        self._trouble: LedgerDown | None = None
        connections = self

        class Pooled(AsyncConnection[Row]):
            """A pool waits for a server that is down.

            So a failed attempt itself reports to all that wait.
            """

            @classmethod
            async def connect(cls, conninfo: str = "", **options: Any) -> "Pooled":
                try:
                    connection = await super().connect(conninfo, **options)
                except psycopg.Error as error:
                    connections._trouble = down(error)
                    if not connections._in_use:  # else one of those may be returned
                        for waiting in connections._waiting:
                            waiting.reschedule(0)
                    raise
                # The loop ends; the pool's worker would swallow that and hang.
                except asyncio.CancelledError:
                    connections.spawn(connections._pool.close())
                    raise
                connections._trouble = None
                connections._made.add(connection)
                try:
                    ((history,),) = await rows_of(connection, SQL["history"])
                except psycopg.Error:
                    history = ""  # the server ended it already
                reached(history)
                return connection

        # One worker, since a crowd of attempts keeps a server down.
        self._pool: AsyncConnectionPool[Connection] = AsyncConnectionPool(
            conninfo,
            connection_class=Pooled,
            kwargs=OPTIONS,
            min_size=0,
            max_size=size,
            open=False,
            reconnect_timeout=REST,
            num_workers=1,
        )

    async def _live(self) -> AsyncGenerator[None, None]:
        """Stay suspended for as long as the loop lives.

        A loop closes its asynchronous generators before it ends.
        """
        await self._pool.open()
        try:
            yield
        finally:
            try:
                await self._pool.close()
            # When a loop ends, the pool's workers are cancelled by now, and leave connections open.
            finally:
                for connection in self._made:
                    await connection.close()

    async def aclose(self) -> None:
        """Let the operations in flight end, but do not wait indefinitely."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=PATIENCE)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.lifetime.aclose()

    @property
    def is_away(self) -> bool:
        """Whether no task has a connection, and none can be made: a wait for one is useless."""
        return self._trouble is not None and not self._in_use

    def spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = start(asyncio.get_running_loop(), work)
        self._tasks.add(task)

        def forget(task: "asyncio.Task[Any]") -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                task.exception()  # its caller may be gone

        task.add_done_callback(forget)
        return task

    async def take(self) -> Connection:
        """Return a connection that is not known to be dead; the caller returns it with `give`."""
        try:
            async with asyncio.timeout(FREE_WITHIN) as waiting:
                self._waiting.add(waiting)
                try:
                    while not is_alive(connection := await self._pool.getconn()):
                        await self._pool.putconn(connection)
                        # The server ended it, so the others are probably dead as well.
                        await self._pool.drain()
                finally:
                    self._waiting.discard(waiting)
        except TimeoutError:
            if self._trouble is not None:
                raise LedgerDown(str(self._trouble)) from None
            raise self._crowded(FREE_WITHIN) from None
        except PoolClosed:
            raise LedgerDown("the ledger is closed") from None
        self._in_use += 1
        return connection

    async def enter(self, within: float) -> Connection:
        """Return a connection for a transaction, once there is a place.

        The caller returns it with `leave`.
        """
        try:
            async with asyncio.timeout(within):
                await self._places.acquire()
        except TimeoutError:
            raise self._crowded(within) from None
        try:
            return await self.take()
        except BaseException:
            self._places.release()
            raise

    async def leave(self, connection: Connection) -> None:
        try:
            await self.give(connection)
        finally:
            self._places.release()

    def _crowded(self, within: float) -> Crowded:
        return Crowded(
            f"none of {self._size} connections became free within {within:g} s; "
            "`?pool=` sets their number"
        )

    async def give(self, connection: Connection) -> None:
        """Take a connection back.

        One that is not idle is closed, which also rolls back its transaction.
        """
        wire = connection.pgconn
        is_idle = (
            wire.transaction_status == TransactionStatus.IDLE
            and wire.pipeline_status == PipelineStatus.OFF
        )
        if connection.lock.locked() or not is_idle:
            async with connection.lock:  # a task that its handler did not await may be using it
                await connection.close()
        self._in_use -= 1
        await self._pool.putconn(connection)

    async def ask(self, statement: str, params: Params) -> Rows:
        connection = await self.take()
        try:
            return await rows_of(connection, statement, params)
        finally:
            await self.give(connection)

    async def aside(self, statement: str, params: Params) -> Row:
        """Return the only row of a statement, on a connection that is made for it."""
        async with await AsyncConnection.connect(self._conninfo, **OPTIONS) as connection:
            return (await rows_of(connection, statement, params))[0]


# --- queues ---------------------------------------------------------------------------------------


class _Waiting(Struct):
    id: RecordId
    # The order of locks; equal calls without a key lock one thing, in the order of their arrival.
    turn: tuple[str, str, str]
    item: bytes
    answer: "asyncio.Future[Row | None]"

    def refuse(self, error: LedgerDown) -> None:
        if not self.answer.done():
            # One each: raising changes an exception.
            self.answer.set_exception(type(error)(*error.args))


class Queue:
    """Statements of one kind.

    Pending items are sent together, as a JSON list, and return rows with their ids.
    """

    def __init__(
        self, connections: Connections, statement: str, pace: Pace, flights: int = FLIGHTS
    ) -> None:
        self._connections = connections
        self._statement = statement
        self._pace = pace
        self._waiting: deque[_Waiting] = deque()
        self._free = flights
        # A flight is about to take what waits.
        self._gathers = False

    async def send(self, item: Claim | Committing | Ending | RecordId) -> Row | None:
        if isinstance(item, RecordId):
            id = item
        else:
            id = item.id
        id_of(id)
        locked = id.key
        if isinstance(item, Claim) and item.keyless is not None:
            locked = (item.keyless.likeness or b"").hex()
        turn = (id.caller, id.method, locked)
        answer: asyncio.Future[Row | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(id, turn, encode(item), answer))
        if self._gathers:
            if len(self._waiting) >= ENOUGH:
                self._pace.hurry()
        elif self._free:
            self._free -= 1
            self._gathers = True
            self._connections.spawn(self._fly())
        return await answer

    async def _fly(self) -> None:
        """Send the pending items, one at a time for each id, without those that were cancelled."""
        gathers = True
        try:
            while self._waiting:
                if len(self._waiting) < ENOUGH:
                    await self._pace.gather()
                batch = self._take()
                gathers = self._gathers = False
                if batch:
                    await self._deliver(sorted(batch.values(), key=lambda waiting: waiting.turn))
                if self._gathers:  # another flight takes the rest
                    return
                gathers = self._gathers = True
        except BaseException:  # the ledger stops: no other flight takes the rest
            while self._waiting:
                self._waiting.popleft().refuse(LedgerDown("the ledger was stopped"))
            raise
        finally:
            self._free += 1
            if gathers:
                self._gathers = False

    def _take(self) -> dict[RecordId, _Waiting]:
        batch: dict[RecordId, _Waiting] = {}
        size = 0
        while (
            self._waiting
            and len(batch) < BATCH
            and size < BATCH_BYTES
            and self._waiting[0].id not in batch
        ):
            waiting = self._waiting.popleft()
            if not waiting.answer.done():
                batch[waiting.id] = waiting
                size += len(waiting.item)
        return batch

    async def _deliver(self, batch: list[_Waiting]) -> None:
        since = self._pace.took_off(len(batch))
        try:
            await self._send_all(batch)
        finally:
            self._pace.landed(len(batch), since)

    async def _send_all(self, batch: list[_Waiting]) -> None:
        items = f"[{b','.join(waiting.item for waiting in batch).decode()}]"
        try:
            try:
                rows = await self._connections.ask(
                    self._statement, {"items": items, "again": False}
                )
            except psycopg.Error as error:
                if not is_lost(error) and error.sqlstate not in UNDONE:
                    raise
                rows = await self._connections.ask(self._statement, {"items": items, "again": True})
        except psycopg.Error as error:
            if len(batch) == 1 or is_lost(error):
                self._refuse(batch, down(error))
            # One item fails, or has to wait for another transaction: it must not fail the others.
            else:
                await asyncio.gather(*(self._send_all([waiting]) for waiting in batch))
        except LedgerDown as error:
            self._refuse(batch, error)
        except BaseException:
            self._refuse(batch, LedgerDown("the ledger was stopped"))
            raise
        else:
            found = {row[:3]: row for row in rows}
            for waiting in batch:
                wake(
                    waiting.answer,
                    found.get((waiting.id.caller, waiting.id.method, waiting.id.key)),
                )

    def _refuse(self, batch: list[_Waiting], error: LedgerDown) -> None:
        for waiting in batch:
            waiting.refuse(error)
        while self._waiting and self._connections.is_away:  # they would fail as well
            self._waiting.popleft().refuse(error)
