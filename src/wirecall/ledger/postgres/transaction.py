"""One transaction that holds a record, its handler's own writes and its outcome: nothing of it takes effect, or everything.

The rules of the file:

1. The record is inserted first, so a duplicate anywhere waits for this transaction to end, and then finds it. It waits as
   long as its method says, but in turns: whoever waits holds a connection, and others may be waiting for that.
2. The handler works in a savepoint, through `Db`, which has no words to end the transaction: its writes can be undone, and
   the record of its error kept.
3. A transaction that is lost before we sent its COMMIT has done nothing, whatever became of the server. It is not repeated
   either: its handler may have been too slow, and may have done something elsewhere.
4. One whose commit was sent and not confirmed is neither repeated nor reported before the server said what became of it.
5. A handler may end the transaction in SQL, and begin another. Before a failure counts as nothing done, the server says that
   what it undoes is the transaction that we began.
6. The connection is given back when nothing is under way on it any more, wanted or not.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal, NoReturn

import psycopg
from msgspec import structs
from psycopg.pq import TransactionStatus

from wirecall.errors import UsageError, WirecallError
from wirecall.ledger.base import Claim, CommitUnknown, LedgerDown, Locked, Outcome, Record, State, TryAgain
from wirecall.ledger.postgres.errors import ENDED, FAILED, down, is_lost, misused, refused, undone
from wirecall.ledger.postgres.pool import Connection, Pool, is_alive, rows_of
from wirecall.ledger.postgres.rows import SQL, Completion, Row, array, completion_of, encode, id_of, record_of, running
from wirecall.logs import logger

# Seconds: a turn of waiting for another transaction, at most and at least. Less than that, and a server that has a lot to do
# would be taken for a duplicate.
TURN = 1.0
LEAST_TURN = 0.05

# Seconds to wait for news of a commit.
SETTLE = 15.0

# An open transaction may be silent this long before the server ends it; longer if the lease of its command is longer.
SILENCE = 60.0
DAY = 86_400.0

OPEN = (TransactionStatus.INTRANS, TransactionStatus.INERROR)


@asynccontextmanager
async def opened(pool: Pool, claim: Claim, wait: float) -> "AsyncIterator[PostgresTransaction]":
    """Begin, and insert the record; or find the one that is there. Another transaction with it is waited for."""
    transaction = await _begun(pool, claim, wait)
    try:
        yield transaction
    except (Exception, asyncio.CancelledError) as error:
        if told := await transaction._told(error):
            raise told from error
        raise
    finally:
        await transaction._end()


async def _begun(pool: Pool, claim: Claim, wait: float) -> "PostgresTransaction":
    clock = asyncio.get_running_loop().time
    until = clock() + wait
    while True:
        try:
            connection = await pool.take()
        except psycopg.Error as error:
            raise down(error) from error
        transaction = PostgresTransaction(pool, connection, claim)
        left = until - clock()
        try:
            await transaction._begin(max(LEAST_TURN, min(left, TURN)))
            return transaction
        except BaseException as error:
            await transaction._end()
            if not isinstance(error, Locked) or left <= TURN:
                raise


class PostgresTransaction:
    """An open transaction that holds a record, or found one. Its handler works in a savepoint, so that it can be undone."""

    record: Record
    db: "Db"

    def __init__(self, pool: Pool, connection: Connection, claim: Claim) -> None:
        self._pool = pool
        self._connection = connection
        self._claim = claim
        self._xid, self._pid = "", 0
        self._work: asyncio.Task[Any] | None = None  # what is under way on the connection, wanted or not
        self._settled = False
        self._is_sent = False  # the commit: from here on, only the server knows
        self.db = Db(connection)

    async def complete(self, outcome: Outcome, retention: float, *, undo: bool) -> None:
        """Record the outcome and commit; whoever waits may be cancelled, the commit is not."""
        self.db._connection = None
        self._settled = True  # from here on, a cancellation has no say
        self._work = self._pool.spawn(self._finish(completion_of(self.record.token, outcome, retention), undo))
        await asyncio.shield(self._work)

    async def _begin(self, turn: float) -> None:
        self._work = self._pool.spawn(self._enter(turn))
        try:
            self.record = await asyncio.shield(self._work)
        except psycopg.errors.LockNotAvailable as error:
            raise Locked(f"{self._claim.id} is in another transaction that did not end") from error
        except psycopg.Error as error:
            raise undone(error) or down(error) from error

    async def _enter(self, turn: float) -> Record:
        claim, connection = self._claim, self._connection
        timeouts = {"turn": f"{turn * 1000:.0f}ms", "silence": f"{min(max(claim.lease, SILENCE), DAY):.0f}s"}
        rows = await rows_of(connection, SQL["enter"], structs.asdict(claim) | id_of(claim.id) | timeouts)
        if not rows:
            return await self._found()
        fence, started_at, self._xid, self._pid, _ = rows[0]
        return running(claim, fence, started_at)

    async def _found(self) -> Record:
        rows = await rows_of(self._connection, SQL["found"], id_of(self._claim.id))
        await self._rollback()
        if not rows:
            raise TryAgain(f"{self._claim.id} was removed while it was looked for")
        *row, expired = rows[0]
        record = record_of(tuple(row))
        if record.state is State.DONE and expired:
            assert record.outcome is not None
            bare = structs.replace(record.outcome, payload=None)
            return structs.replace(record, state=State.TOMBSTONE, outcome=bare)
        return record

    async def _finish(self, completion: Completion, undo: bool) -> None:
        try:
            await self._commit(completion, undo)
        except psycopg.Error as error:
            if error.sqlstate in ENDED:
                raise misused(self._claim.id) from error
            if not is_lost(error):
                raise (await self._refused(error)) from error
            await (self._settle(error) if self._is_sent else self._give_up(error))

    async def _commit(self, completion: Completion, undo: bool) -> None:
        connection = self._connection
        back = f"{'ROLLBACK TO' if undo else 'RELEASE'} SAVEPOINT wirecall;"
        if not is_alive(connection):
            raise psycopg.OperationalError("the server ended the session while the handler ran")
        self._is_sent = True
        await rows_of(connection, back + SQL["finish"], {"items": array([encode(completion)])})

    async def _refused(self, error: psycopg.Error) -> WirecallError:
        """The server said no. So nothing was done, if nobody but us had tried to commit."""
        is_undone = await (self._undo(TransactionStatus.INERROR) if error.sqlstate == FAILED else self._is_aborted())
        return refused(error) if is_undone else CommitUnknown(str(misused(self._claim.id)))

    async def _is_aborted(self) -> bool:
        """Asked once the savepoint was released, and so the handler had left the transaction open."""
        if self._connection.pgconn.transaction_status in OPEN:
            await self._rollback()
        rows = await rows_of(self._connection, SQL["fate"], {"xid": self._xid})
        return rows == [("aborted",)]

    async def _give_up(self, error: psycopg.Error) -> NoReturn:
        """Nothing was committed. We ask all the same, once: a session that has not noticed its end would hold the record."""
        with suppress(LedgerDown, psycopg.Error):
            await self._status()
        raise down(error) from error

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
        before: str | None = ""
        while True:
            with suppress(psycopg.Error):
                status, recorded, _ = await self._status()
                if recorded:
                    return "committed"
                if status == "aborted":
                    return "aborted"
                if status == before and status != "in progress":  # twice: at first the row may have been too new to be seen
                    return "lost"
                before = status
            await asyncio.sleep(0.1)

    async def _status(self) -> Row:
        params = id_of(self._claim.id) | {"nonce": self._claim.nonce, "xid": self._xid, "pid": self._pid}
        return await self._pool.aside(SQL["settle"], params)

    async def _told(self, error: BaseException) -> WirecallError | None:
        """What to say of an exception that undid everything; None if it is its handler's own affair, or came too late."""
        if self._settled:
            return None
        if self._xid and not await self._is_ours():
            return CommitUnknown(str(misused(self._claim.id)))  # by COMMIT, perhaps
        if isinstance(error, WirecallError | asyncio.CancelledError):
            return None
        if isinstance(error, psycopg.Error) and not is_alive(self._connection):
            return down(error)
        return undone(error)

    async def _is_ours(self) -> bool:
        """Whether what is open is the transaction that we began; it is undone by that. Of a dead session: rule 3."""
        if not is_alive(self._connection):
            return True
        status = self._connection.pgconn.transaction_status
        if status not in OPEN:
            return status != TransactionStatus.IDLE
        self._work = self._pool.spawn(self._undo(status))
        return await asyncio.shield(self._work)

    async def _undo(self, status: int) -> bool:
        connection = self._connection
        back = "ROLLBACK TO SAVEPOINT wirecall;" if status == TransactionStatus.INERROR else ""  # it answers nothing before
        try:
            ((is_ours,),) = await rows_of(connection, back + SQL["is ours"], {"xid": self._xid})
            return bool(is_ours)
        except psycopg.Error:
            return not is_alive(connection)

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
        await rows_of(self._connection, "ROLLBACK")


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
