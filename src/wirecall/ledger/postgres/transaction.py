"""One transaction that holds a record, its handler's writes and its outcome: all take effect, or
nothing does.

The rules of the file:

1. The record is inserted first, so a duplicate anywhere waits for this transaction to end, and then
   finds it. It waits as long as its method says, but in turns: a duplicate that waits holds a
   connection, and others may be waiting for that. Calls without a key have other ids: there their
   digest is locked first, so equal calls run one after another. A record that its claimer already
   holds under a lease is not touched before its end, since others renew that lease. If one of them
   claims it, the end detects that, and everything is rolled back. (A database whose own default is
   a stricter level than READ COMMITTED also rolls it back after a renewal.)
2. The handler works in a savepoint, through `Db`, which cannot end the transaction: its writes can
   be undone, and the record of its error kept.
3. A transaction that is lost before we sent its COMMIT has done nothing, whatever happened to the
   server. It is not repeated either: its handler may have been too slow, and may have done
   something elsewhere.
4. If the commit was sent and not confirmed, the transaction is not repeated or reported before the
   server says whether it took effect.
5. A handler may end the transaction in SQL, and begin another. Before a failure counts as nothing
   done, the server confirms that it rolls back the transaction that we began.
6. The connection is returned when nothing runs on it any more, even if the caller has left.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn

import psycopg
from msgspec import structs
from psycopg.pq import TransactionStatus

from wirecall.errors import UsageError, WirecallError
from wirecall.ledger.base import (
    Claim,
    CommitUnknown,
    LedgerDown,
    Locked,
    NotCommitted,
    Outcome,
    Record,
    RecordId,
    State,
    TryAgain,
)
from wirecall.ledger.postgres.queue import (
    SQL,
    UNDONE,
    Connection,
    Connections,
    Ending,
    Row,
    down,
    encode,
    id_of,
    is_alive,
    is_lost,
    rows_of,
)
from wirecall.logs import logger

# Maximum and minimum seconds of one turn of waiting for another transaction. In less time, a busy
# server would be taken for a duplicate.
TURN = 1.0
LEAST_TURN = 0.05

# Seconds to find out whether a commit took effect.
SETTLE = 15.0

# An open transaction may be silent this long before the server ends it; longer if the lease of its
# command is longer.
SILENCE = 60.0
DAY = 86_400.0

OPEN = (TransactionStatus.INTRANS, TransactionStatus.INERROR)

# The server's codes for a transaction that an earlier error stopped; for one without its record;
# and for one that its handler ended: no such savepoint, no transaction, or again no record.
FAILED = "25P02"
GONE = "WC001"
ENDED = ("3B001", "25P01", GONE)


@asynccontextmanager
async def opened(
    connections: Connections, claim: Claim, wait: float
) -> "AsyncIterator[PostgresTransaction]":
    """Begin, and insert the record or find it.

    A call without a key may find the record of the call that it repeats. Wait for another
    transaction that holds the record, and for a pending answer of an equal call.
    """
    clock = asyncio.get_running_loop().time
    until = clock() + wait
    enter_until = until
    if claim.within is not None:
        enter_until = clock() + claim.within
    while True:
        connection = await connections.enter(max(LEAST_TURN, min(until, enter_until) - clock()))
        transaction = PostgresTransaction(connections, connection, claim)
        began = clock()
        try:
            await transaction._begin(max(LEAST_TURN, min(until - began, TURN)))
            break
        except BaseException as error:
            await transaction._end()
            if not isinstance(error, Locked) or clock() >= until:
                raise
            # A lock waits its turn in the server. An answer that is pending elsewhere is checked
            # again after a moment.
            await asyncio.sleep(began + LEAST_TURN - clock())
    try:
        yield transaction
    except (Exception, asyncio.CancelledError) as error:
        refusal = await transaction._refusal_after(error)
        if refusal is not None:
            raise refusal from error
        raise
    finally:
        await transaction._end()


class PostgresTransaction:
    """An open transaction that holds a record, or found one.

    Its handler works in a savepoint, so that it can be undone.
    """

    record: Record
    db: "Db"

    def __init__(self, connections: Connections, connection: Connection, claim: Claim) -> None:
        self._connections = connections
        self._connection = connection
        self._claim = claim
        self._xid = ""
        self._pid = 0
        # Whether the record existed before, under a lease of this claim.
        self._is_leased = False
        # The last statement on the connection. It may outlive its caller.
        self._work: asyncio.Task[Any] | None = None
        self._settled = False
        self.db = Db(connection)

    async def complete(self, outcome: Outcome, retention: float, *, undo: bool) -> None:
        """Record the outcome and commit; the caller may be cancelled, the commit is not."""
        self.db._connection = None
        self._settled = True  # from here on, a cancellation has no effect
        token = self.record.token
        completion = Ending(token.id, token.fence, token.nonce, outcome, retention)
        self._work = self._connections.spawn(self._finish(completion, undo))
        await asyncio.shield(self._work)

    async def _begin(self, turn: float) -> None:
        self._work = self._connections.spawn(self._enter(turn))
        try:
            self.record = await asyncio.shield(self._work)
        except psycopg.errors.LockNotAvailable as error:
            raise Locked(
                f"{self._claim.id} or an equal call is in another transaction that did not end"
            ) from error
        except psycopg.Error as error:
            raise undone(error) or down(error) from error

    async def _enter(self, turn: float) -> Record:
        claim = self._claim
        id = id_of(self._claim.id)
        timeouts = {
            "turn": f"{turn * 1000:.0f}ms",
            "silence": f"{min(max(claim.lease, SILENCE), DAY):.0f}s",
        }
        if claim.keyless is not None:
            items = {"items": f"[{encode(claim).decode()}]"}
            rows = await rows_of(
                self._connection, SQL["begin"] + SQL["enter keyless"], items | timeouts
            )
            xid, pid, _, is_new, expired, *row = rows[0]
            if is_new:
                self._xid = xid
                self._pid = pid
                return record_of(tuple(row))
            # This caller now gets the answer of that record.
            await rows_of(self._connection, "COMMIT")
        else:
            rows = await rows_of(
                self._connection, SQL["begin"] + SQL["enter"], structs.asdict(claim) | id | timeouts
            )
            if rows:
                fence, started_at, self._xid, self._pid, _ = rows[0]
                print = claim.fingerprint
                nonce = claim.nonce
                committed = claim.committed
                facts = (
                    claim.id,
                    print,
                    State.RUNNING,
                    fence,
                    nonce,
                    committed,
                    1,
                    claim.lease,
                    started_at,
                )
                return Record(*facts, params=claim.params)
            rows = await rows_of(self._connection, SQL["found"], id)
            if (
                rows
                and (found := record_of(rows[0][1:])).state is State.RUNNING
                and found.nonce == claim.nonce
            ):
                self._is_leased = True
                ((self._xid, self._pid, _),) = await rows_of(self._connection, SQL["stay"])
                return found
            await rows_of(self._connection, "ROLLBACK")
            if not rows:
                raise TryAgain(f"{claim.id} was removed while it was looked for")
            expired, *row = rows[0]
        record = record_of(tuple(row))
        if record.state is State.DONE and expired:
            assert record.outcome is not None
            bare = structs.replace(record.outcome, payload=None)
            return structs.replace(record, state=State.TOMBSTONE, outcome=bare)
        return record

    async def _finish(self, completion: Ending, undo: bool) -> None:
        connection = self._connection
        id = self._claim.id
        if not is_alive(connection):
            # COMMIT was not sent, so nothing was done. We still ask once: a session that has not
            # noticed its end would hold the record.
            with suppress(LedgerDown, psycopg.Error):
                await self._status()
            raise LedgerDown(
                "PostgreSQL cannot be reached: the server ended the session while the handler ran"
            )
        back = "RELEASE SAVEPOINT wirecall;"
        if undo:
            back = "ROLLBACK TO SAVEPOINT wirecall;"
        try:
            await rows_of(
                connection, back + SQL["finish"], {"items": f"[{encode(completion).decode()}]"}
            )
        except psycopg.Error as error:
            is_taken = self._is_leased and error.sqlstate == GONE
            if error.sqlstate in ENDED and not is_taken:
                raise misused(id) from error
            if is_lost(error):
                await self._settle(error)
                return
            # The server refused. So nothing was done, unless the handler had tried to commit as
            # well.
            if error.sqlstate == FAILED:
                is_undone = await self._undo(TransactionStatus.INERROR)
            else:  # the savepoint was released, and so the handler had left the transaction open
                if connection.pgconn.transaction_status in OPEN:
                    await rows_of(connection, "ROLLBACK")
                is_undone = await rows_of(connection, SQL["fate"], {"xid": self._xid}) == [
                    ("aborted",)
                ]
            if not is_undone:
                raise CommitUnknown(str(misused(id))) from error
            if is_taken:
                raise TryAgain(
                    f"another run has claimed {id} while its handler was in a transaction"
                ) from error
            why = str(error.diag.message_primary)
            if error.sqlstate == FAILED:
                why = "a statement of it had failed"
            raise undone(error) or NotCommitted(
                "What the handler did cannot be committed, so all of it was undone.",
                why,
                "let PostgreSQL's errors pass; `async with ctx.db.transaction()` is a part that "
                "may fail",
            ) from error

    async def _settle(self, error: Exception) -> None:
        """Ask until the server reports whether the transaction took effect."""
        id = self._claim.id
        logger.warning("%s: the commit was not confirmed: %s", id, error)
        before: str | None = ""
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE):
                while True:
                    with suppress(psycopg.Error):
                        status, recorded, _ = await self._status()
                        if recorded:
                            return
                        if status == "aborted":
                            raise TryAgain(
                                f"{id}: the transaction was lost before its commit"
                            ) from error
                        if status == before and status != "in progress":
                            # Twice the same: at first the row may have been too new to be seen.
                            break
                        before = status
                    await asyncio.sleep(0.1)
        raise CommitUnknown(
            f"the server cannot tell whether the transaction of {id} took effect"
        ) from error

    async def _status(self) -> Row:
        params = id_of(self._claim.id) | {
            "nonce": self._claim.nonce,
            "xid": self._xid,
            "pid": self._pid,
        }
        return await self._connections.aside(SQL["settle"], params)

    async def _refusal_after(self, error: BaseException) -> WirecallError | None:
        """Return the error for an exception that undid everything.

        None: the exception is the handler's, or came too late.
        """
        if self._settled:
            return None
        connection = self._connection
        if self._xid and is_alive(connection):  # for a dead session, see rule 3
            status = connection.pgconn.transaction_status
            is_ours = status != TransactionStatus.IDLE
            if status in OPEN:
                self._work = self._connections.spawn(self._undo(status))
                is_ours = await asyncio.shield(self._work)
            if not is_ours:
                return CommitUnknown(str(misused(self._claim.id)))  # perhaps by COMMIT
        if isinstance(error, WirecallError | asyncio.CancelledError):
            return None
        if isinstance(error, psycopg.Error) and not is_alive(connection):
            return down(error)
        return undone(error)

    async def _undo(self, status: int) -> bool:
        """Roll back, and return whether the open transaction is the one that we began."""
        back = ""
        if status == TransactionStatus.INERROR:  # until then the server answers nothing
            back = "ROLLBACK TO SAVEPOINT wirecall;"
        try:
            ((is_ours,),) = await rows_of(
                self._connection, back + SQL["is ours"], {"xid": self._xid}
            )
            return bool(is_ours)
        except psycopg.Error:
            return not is_alive(self._connection)

    async def _end(self) -> None:
        """Roll back an open transaction, and return the connection when nothing runs on it."""
        self.db._connection = None
        connection = self._connection
        work = self._work
        assert work is not None

        async def end() -> None:
            await asyncio.wait([work])
            if connection.pgconn.transaction_status in OPEN and not connection.lock.locked():
                with suppress(psycopg.Error):
                    await rows_of(connection, "ROLLBACK")
            await self._connections.leave(connection)

        ending = self._connections.spawn(end())
        if work.done():
            await asyncio.shield(ending)


def record_of(row: Row) -> Record:
    (
        caller,
        method,
        key,
        fingerprint,
        state,
        fence,
        nonce,
        committed,
        attempts,
        left,
        started,
        completed,
        *rest,
    ) = row
    # A newer wirecall may have added more.
    kind, payload, digest, delivery, deliverer, params, *_ = rest
    id = RecordId(caller, method, key)
    kept = None
    if kind is not None:
        kept = Outcome(kind, payload, digest)
    facts = (
        id,
        fingerprint,
        State(state),
        fence,
        nonce,
        committed,
        attempts,
        left,
        started,
        completed,
        kept,
    )
    return Record(*facts, delivery, deliverer or b"", params)


def undone(error: BaseException | None) -> TryAgain | None:
    """Return `TryAgain` if an exception, or its cause, says that the server rolled back."""
    for _ in range(10):
        if getattr(error, "sqlstate", None) in UNDONE:
            return TryAgain("PostgreSQL undid the transaction in favour of another one")
        error = error and (error.__cause__ or error.__context__)
    return None


def misused(id: RecordId) -> UsageError:
    return UsageError(
        f"The handler of {id} ended its transaction itself.",
        "a COMMIT or ROLLBACK in SQL takes the writes and the record of the command apart",
        "leave both out; `async with ctx.db.transaction()` is a part that can be undone",
    )


class Db:
    """The open transaction as its handler uses it.

    It has psycopg's methods, except those that would end it.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection: Connection | None = connection

    async def execute(
        self, query: Any, params: Any = None, **options: Any
    ) -> "psycopg.AsyncCursor[Row]":
        """Execute one statement, and return its cursor."""
        return await self._open.execute(query, params, **options)

    def cursor(self, *args: Any, **options: Any) -> Any:
        """Return a cursor on this transaction."""
        return self._open.cursor(*args, **options)

    def transaction(self, *args: Any, **options: Any) -> Any:
        """Return a transaction within this one: a savepoint, rolled back if the block raises."""
        return self._open.transaction(*args, **options)

    def commit(self) -> NoReturn:
        """Refused, as `rollback` and `close` are."""
        raise UsageError(
            "A handler tried to end the transaction that holds its command.",
            "its writes and the record of the command take effect together, or not at all",
            "return, or raise DomainError to undo your writes; "
            "`async with ctx.db.transaction()` is a part to undo",
        )

    rollback = close = commit

    @property
    def _open(self) -> Connection:
        if self._connection is None:
            raise UsageError(
                "ctx.db was used after its command.",
                "the transaction is over",
                "use it inside the handler",
            )
        return self._connection
