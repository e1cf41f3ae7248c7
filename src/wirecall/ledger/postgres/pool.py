"""The connections of one event loop to PostgreSQL, and what is under way on them.

The rules of the file:

1. A connection belongs to an event loop, so each loop has a `Pool`, which is closed when the loop ends.
2. A statement runs in a task of its own (`spawn`), so whoever waits for it may go away at any moment. It is never cancelled:
   if the server does not answer in time, its connection is cut (`watched`).
3. Whoever takes a connection gives it back. One that is not at rest then is closed, which undoes what was open on it.
4. After a failure, one attempt to connect at a time stands for all. Where no connection is left either, one that fails
   answers all who wait for a connection, wherever they stand.
"""

import asyncio
import socket
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias, TypeVar

import psycopg
from psycopg import AsyncConnection
from psycopg.pq import PipelineStatus, TransactionStatus

from wirecall.ledger.base import LedgerDown
from wirecall.ledger.postgres.errors import down
from wirecall.ledger.postgres.rows import Params, Row, Rows
from wirecall.logs import logger

# Seconds to wait for a free connection, or for the answer to one statement.
PATIENCE = 5.0

# Seconds between attempts to connect, once one has failed.
REST = 0.05

Connection: TypeAlias = AsyncConnection[Row]
T = TypeVar("T")


class Pool:
    """The connections of one event loop, and what is under way on them."""

    def __init__(self, conninfo: str, size: int) -> None:
        self.lifetime = self._live()
        self._conninfo = conninfo
        self._idle: list[Connection] = []
        self._slots = Slots(size)
        self._in_use = 0  # connections that somebody has taken
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
        await self._slots.take()
        try:
            connection = self._pop() or await self._connect()
        except BaseException:
            self._slots.give()
            raise
        self._in_use += 1
        return connection

    def _pop(self) -> Connection | None:
        while self._idle:
            if is_alive(connection := self._idle.pop()):
                return connection
        return None

    def give(self, connection: Connection) -> None:
        """Take a connection back; one that is not at rest is closed, which also undoes what was open on it."""
        if connection.lock.locked():  # in use by a task that its handler did not wait for
            self.spawn(self._scrap(connection))
        elif _is_at_rest(connection) and not self._closed:
            self._idle.append(connection)
            self._free()
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
        self._free()

    def _free(self) -> None:
        self._in_use -= 1
        self._slots.give()

    async def _scrap(self, connection: Connection) -> None:
        try:
            async with connection.lock:
                pass
        finally:
            self._discard(connection)

    async def _connect(self) -> Connection:
        """A new connection. After a failure, one attempt at a time stands for all: a crowd keeps a server down."""
        try:
            if self._in_trouble:
                if self._probe is None or self._probe.done():
                    self._probe = self.spawn(self._recover())
                await asyncio.shield(self._probe)
            return self._idle.pop() if self._idle else await self._dial()
        except psycopg.Error as error:
            self._in_trouble = True
            if self.is_away:
                self._slots.refuse(down(error))
            raise

    @property
    def is_away(self) -> bool:
        """Whether nobody has a connection, and none can be made: then to wait for one is to wait for nothing."""
        return self._in_trouble and not self._in_use and not self._idle

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
        return await self.using(lambda connection: rows_of(connection, statement, params))

    async def aside(self, statement: str, params: Params) -> Row:
        """The one row a statement gives, on a connection that is made for it."""
        connection = await self._dial()
        try:
            return (await rows_of(connection, statement, params))[0]
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


class Slots:
    """As many as there may be connections, and the queue of those who have to wait for one."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._queue: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        timer = asyncio.get_running_loop().call_later(
            PATIENCE, refuse, turn, LedgerDown(f"no connection became free within {PATIENCE} s; `?pool=` sets their number")
        )
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.exception() is None:  # it was our turn at the same moment
                self.give()
            raise
        finally:
            timer.cancel()

    def give(self) -> None:
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def refuse(self, error: LedgerDown) -> None:
        """Answer all who wait."""
        queue, self._queue = self._queue, deque()
        for turn in queue:
            refuse(turn, error)


def refuse(answer: "asyncio.Future[Any]", error: LedgerDown) -> None:
    if not answer.done():
        answer.set_exception(LedgerDown(*error.args))  # each their own: raising writes into an exception


# --- one connection --------------------------------------------------------------------------------------------------


async def rows_of(connection: Connection, statements: str, params: Params | None = None) -> Rows:
    """Send statements as one message, and return the rows of the last one that has rows.

    One message (hence AsyncClientCursor, which uses the simple protocol) arrives as a whole or not at all. In pieces, a
    host that vanishes between them leaves a session that waits for the next piece, while it holds the record: the server
    does not count that as idle, and no timeout before PostgreSQL 17 ends it.
    """
    with watched(connection):
        cursor = psycopg.AsyncClientCursor(connection)
        await cursor.execute(statements, params)
        rows: Rows = []
        while True:
            if cursor.description is not None:
                rows = await cursor.fetchall()
            if not cursor.nextset():
                return rows


@contextmanager
def watched(connection: Connection, patience: float = PATIENCE) -> Iterator[None]:
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


def _is_at_rest(connection: Connection) -> bool:
    wire = connection.pgconn
    return wire.transaction_status == TransactionStatus.IDLE and wire.pipeline_status == PipelineStatus.OFF


def is_alive(connection: Connection) -> bool:
    """Without a round trip: a server that ended the session has sent the end of the stream, after its last words."""
    if not connection.lock.locked():  # else somebody is waiting for these bytes, and will find out
        with suppress(psycopg.Error):
            connection.pgconn.consume_input()
            connection.pgconn.consume_input()
    return not connection.closed
