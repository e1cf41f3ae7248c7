"""The way to PostgreSQL: the connections of one event loop, and queues of statements that go out together.

The rules of the file:

1. All SQL is in `postgres.sql`, in named parts; `SQL` has them by their names.
2. A group is sent as one message of the simple protocol, which arrives as a whole or not at all. In pieces, a host that
   vanishes between them leaves a session that waits for the next piece while it holds the record: the server does not count
   that as idle, and no timeout before PostgreSQL 17 ends it.
3. A statement runs in a task of its own (`spawn`), so its caller may be cancelled at any moment. The task is not cancelled:
   if the server does not answer in time, its connection is cut (`watched`).
4. Claims with a key, claims without one, completions, and questions for a record have a queue each: one round trip and one
   flush to disk serve all that wait at the moment. Within a statement each id is there once, and they are in order, so that
   two statements never wait for each other.
5. A statement of a queue is sent again, once, after its connection was lost, or where the server undid it: a claim finds
   its own nonce, a completion its own token done, a question changes nothing. Nothing else is sent twice.
"""

import asyncio
import re
import socket
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import contextmanager, suppress
from importlib.resources import files
from typing import Any, TypeAlias, TypeVar
from weakref import WeakSet

import psycopg
from msgspec import Struct, json
from psycopg import AsyncConnection
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg_pool import AsyncConnectionPool, PoolClosed

from wirecall.ledger.base import MAX_ATTEMPTS, TOMBSTONE_FACTOR, Claim, LedgerDown, Outcome, RecordId
from wirecall.logs import logger
from wirecall.stepping import start, wake

# Seconds to wait for the answer to one statement, and for a free connection.
PATIENCE = 5.0
FREE_WITHIN = 5.0

# Seconds until a second attempt to connect, after one that failed; then a connection is made when one is asked for.
REST = 0.05

# Of each queue, statements in flight at once, and the most that one of them carries. Two, so that one is made ready while
# the server works on the other; more only make them smaller.
FLIGHTS = 2
BATCH = 64
BATCH_BYTES = 1_000_000

UNDONE = ("40001", "40P01")  # serialization failure, deadlock: the server took the transaction back

Connection: TypeAlias = AsyncConnection[tuple[Any, ...]]
Params: TypeAlias = dict[str, Any]
Row: TypeAlias = tuple[Any, ...]
Rows: TypeAlias = list[Row]
T = TypeVar("T")

encode = json.Encoder().encode

_CONSTANTS = {"max_attempts": MAX_ATTEMPTS, "forever": 1e10, "burial": TOMBSTONE_FACTOR - 1}
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


def id_of(id: RecordId) -> Params:
    """The parameters that name a record; text in PostgreSQL holds no NUL, so an id with one is refused."""
    with suppress(UnicodeEncodeError):
        if b"\0" not in f"{id.caller}{id.method}{id.key}".encode():
            return {"caller": id.caller, "method": id.method, "key": id.key}
    raise LedgerDown(f"PostgreSQL cannot store a record id with a NUL, or with half a character: {str(id)!a}")


# --- errors ----------------------------------------------------------------------------------------------------------


def is_lost(error: psycopg.Error) -> bool:
    """Whether the connection failed, or could not be made, in contrast to a server that said no."""
    return isinstance(error, psycopg.OperationalError) and (error.sqlstate or "08000").startswith(("08", "57P"))


def down(error: psycopg.Error) -> LedgerDown:
    what = "cannot be reached" if is_lost(error) else "refused"
    return LedgerDown(f"PostgreSQL {what}: {error.diag.message_primary or ' '.join(str(error).split())}")


# --- one connection --------------------------------------------------------------------------------------------------


async def rows_of(connection: Connection, statements: str, params: Params | None = None) -> Rows:
    """Send statements as one message, and return the rows of the last one that has rows."""
    with watched(connection):
        cursor = psycopg.AsyncClientCursor(connection)  # it puts the values into the text, so one message is enough
        await cursor.execute(statements, params)
        rows: Rows = []
        while True:
            if cursor.description is not None:
                rows = await cursor.fetchall()
            if not cursor.nextset():
                return rows


@contextmanager
def watched(connection: Connection, turns: int = 1) -> Iterator[None]:
    """End the connection if this block takes too long. psycopg would ask the same server to cancel, and wait for it."""

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
    """Without a round trip: a server that ended the session has sent the end of the stream, after its last words."""
    if not connection.lock.locked():  # else a task is waiting for these bytes, and will find out
        with suppress(psycopg.Error):
            connection.pgconn.consume_input()
            connection.pgconn.consume_input()
    return not connection.closed


# --- the connections of an event loop --------------------------------------------------------------------------------


class Connections:
    """A pool for one event loop, and the tasks that use it. It is closed when the loop ends."""

    def __init__(self, conninfo: str, size: int) -> None:
        self.lifetime = self._live()
        self._conninfo = conninfo
        self._made: WeakSet[Connection] = WeakSet()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._waiting: set[asyncio.Timeout] = set()  # for a connection
        self._in_use = 0
        self._trouble: LedgerDown | None = None  # the last attempt to connect has failed, and why
        connections = self

        class Pooled(AsyncConnection[Row]):
            """A pool waits for a server that is away. So the attempt itself says that it failed, to all that wait."""

            @classmethod
            async def connect(cls, conninfo: str = "", **options: Any) -> "Pooled":
                try:
                    made = await super().connect(conninfo, **options)
                except psycopg.Error as error:
                    connections._trouble = down(error)
                    if not connections._in_use:  # else one of those may come back
                        for waiting in connections._waiting:
                            waiting.reschedule(0)
                    raise
                except asyncio.CancelledError:  # the loop ends; the pool's worker would swallow that, and wait for ever
                    connections.spawn(connections._pool.close())
                    raise
                connections._trouble = None
                connections._made.add(made)
                return made

        # One worker, since a crowd of attempts keeps a server down.
        self._pool: AsyncConnectionPool[Connection] = AsyncConnectionPool(
            conninfo,
            connection_class=Pooled,
            kwargs={"autocommit": True},
            min_size=0,
            max_size=size,
            open=False,
            reconnect_timeout=REST,
            num_workers=1,
        )

    async def _live(self) -> AsyncGenerator[None, None]:
        """Suspended for as long as the loop lives: a loop closes its asynchronous generators before it ends."""
        await self._pool.open()
        try:
            yield
        finally:
            try:
                await self._pool.close()
            finally:  # at the end of the loop its workers are cancelled by now, and it leaves its connections open
                for connection in self._made:
                    await connection.close()

    async def aclose(self) -> None:
        """Let the operations in flight end, but do not wait for ever."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=PATIENCE)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.lifetime.aclose()

    @property
    def is_away(self) -> bool:
        """Whether no task has a connection, and none can be made: then to wait for one is to wait for nothing."""
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
        """A connection that is not known to be dead; it must come back through `give`."""
        try:
            async with asyncio.timeout(FREE_WITHIN) as waiting:
                self._waiting.add(waiting)
                try:
                    while not is_alive(connection := await self._pool.getconn()):
                        await self._pool.putconn(connection)
                        await self._pool.drain()  # the server ended it, so the others are probably dead as well
                finally:
                    self._waiting.discard(waiting)
        except TimeoutError:
            trouble = self._trouble or f"no connection became free within {FREE_WITHIN} s; `?pool=` sets their number"
            raise LedgerDown(str(trouble)) from None
        except PoolClosed:
            raise LedgerDown("the ledger is closed") from None
        self._in_use += 1
        return connection

    async def give(self, connection: Connection) -> None:
        """Take a connection back; one that is not at rest is closed, which also undoes what was open on it."""
        wire = connection.pgconn
        is_idle = wire.transaction_status == TransactionStatus.IDLE and wire.pipeline_status == PipelineStatus.OFF
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
        """The one row a statement gives, on a connection that is made for it."""
        async with await AsyncConnection.connect(self._conninfo, autocommit=True) as connection:
            return (await rows_of(connection, statement, params))[0]


# --- queues ----------------------------------------------------------------------------------------------------------


class _Waiting(Struct):
    id: RecordId
    turn: tuple[str, str, str]  # the order of locks; equal calls without a key lock one thing, in the order of their arrival
    item: bytes
    answer: "asyncio.Future[Row | None]"

    def refuse(self, error: LedgerDown) -> None:
        if not self.answer.done():
            self.answer.set_exception(LedgerDown(*error.args))  # each their own: raising writes into an exception


class Queue:
    """Statements of one kind. What waits goes out together, as a list in JSON, and rows with their ids come back."""

    def __init__(self, connections: Connections, statement: str, flights: int = FLIGHTS) -> None:
        self._connections = connections
        self._statement = statement
        self._waiting: deque[_Waiting] = deque()
        self._free = flights

    async def send(self, item: Claim | Ending | RecordId) -> Row | None:
        id = item if isinstance(item, RecordId) else item.id
        id_of(id)
        keyless = item.keyless if isinstance(item, Claim) else None
        turn = (id.caller, id.method, id.key if keyless is None else (keyless.likeness or b"").hex())
        answer: asyncio.Future[Row | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(id, turn, encode(item), answer))
        if self._free:
            self._free -= 1
            self._connections.spawn(self._fly())
        return await answer

    async def _fly(self) -> None:
        """Send what waits, of each id one at a time; what was cancelled by now does not go at all."""
        try:
            while self._waiting:
                batch: dict[RecordId, _Waiting] = {}
                size = 0
                while self._waiting and len(batch) < BATCH and size < BATCH_BYTES and self._waiting[0].id not in batch:
                    waiting = self._waiting.popleft()
                    if not waiting.answer.done():
                        batch[waiting.id] = waiting
                        size += len(waiting.item)
                if batch:
                    await self._deliver(sorted(batch.values(), key=lambda waiting: waiting.turn))
        finally:
            self._free += 1

    async def _deliver(self, batch: list[_Waiting]) -> None:
        items = f"[{b','.join(waiting.item for waiting in batch).decode()}]"
        try:
            try:
                rows = await self._connections.ask(self._statement, {"items": items, "again": False})
            except psycopg.Error as error:
                if not is_lost(error) and error.sqlstate not in UNDONE:
                    raise
                rows = await self._connections.ask(self._statement, {"items": items, "again": True})
        except psycopg.Error as error:
            if len(batch) == 1 or is_lost(error):
                self._refuse(batch, down(error))
            else:  # one of them is at fault, or has to wait for another transaction: the others need not suffer for it
                await asyncio.gather(*(self._deliver([waiting]) for waiting in batch))
        except LedgerDown as error:
            self._refuse(batch, error)
        except BaseException:
            self._refuse(batch, LedgerDown("the ledger was stopped"))
            raise
        else:
            found = {row[:3]: row for row in rows}
            for waiting in batch:
                wake(waiting.answer, found.get((waiting.id.caller, waiting.id.method, waiting.id.key)))

    def _refuse(self, batch: list[_Waiting], error: LedgerDown) -> None:
        for waiting in batch:
            waiting.refuse(error)
        while self._waiting and self._connections.is_away:  # they would fare no better
            self._waiting.popleft().refuse(error)
