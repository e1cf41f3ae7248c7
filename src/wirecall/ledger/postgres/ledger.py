"""The ledger in PostgreSQL: many hosts, leased records, or a record in one transaction with its handler's own writes.

The rules of the file:

1. A transition is one statement of `postgres.sql`, which commits by itself and reads the server's clock. It needs nothing of
   its session, so a transaction pooler may stand between: timeouts belong to the functions and to the asking side.
2. Claims, completions and questions for a record go out with others of their kind (`queue`), the rest alone.
3. Connections belong to an event loop, and end with it. A ledger serves one loop at a time, one after another.
4. Of psycopg's errors only `LedgerDown` leaves this file, but those that a handler's own statements raise.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import psycopg
from psycopg import conninfo

from wirecall.errors import UsageError
from wirecall.ledger.base import Claim, Delivered, LedgerDown, Outcome, Record, RecordId, State, Task, Token
from wirecall.ledger.postgres.queue import (
    SQL,
    Connection,
    Connections,
    Ending,
    Params,
    Queue,
    Row,
    Rows,
    down,
    encode,
    id_of,
    rows_of,
    watched,
)
from wirecall.ledger.postgres.transaction import PostgresTransaction, opened, record_of
from wirecall.logs import logger

OLDEST = 130_000  # pg_xact_status and pg_current_xact_id under these names

# Connections per event loop; `?pool=` in the URL changes it. An open transaction holds one.
POOL = 10

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

Records: TypeAlias = list[Record]  # inside the class, `list` is a method


async def open_url(url: str) -> "PostgresLedger":
    """Connect to `postgresql://` or `postgres://`, and bring the schema `wirecall` up to date.

    `?pool=` is the number of connections. The other parameters are those of libpq.
    """
    ledger = PostgresLedger(*_read(url))
    try:
        await ledger._migrate()
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
        self._place: _Place | None = None
        self._closed = False

    # --- transitions -------------------------------------------------------------------------------------------------

    async def claim(self, claim: Claim) -> Record:
        here = await self._here()
        if claim.keyless is None:
            row = await here.claims.send(claim)
            assert row is not None
            return record_of(row)
        row = await here.keyless.send(claim)
        assert row is not None
        return record_of(row[3:])  # behind the id of the claim, since it may be the record of an earlier call

    async def deliver(self, ends: Sequence[Delivered]) -> None:
        # In the order of locks, and each answer once: what is written stays so.
        once = {(end.id, end.deliverer): end for end in sorted(ends)}
        if once:
            await self._ask("deliver", items=encode(list(once.values())).decode())

    async def begin_task(self, token: Token, id: str, document: bytes, ttl: float) -> bool:
        return bool(await self._ask("begin_task", **token_of(token), id=id, document=document, ttl=ttl))

    async def task(self, id: str) -> Task | None:
        if not id.isprintable():  # we make no such id, and PostgreSQL may not take such text
            return None
        rows = await self._ask("task", id=id)
        return task_of(rows[0]) if rows else None

    async def task_of(self, id: RecordId) -> Task | None:
        rows = await self._ask("task_of", **id_of(id))
        return task_of(rows[0]) if rows else None

    async def change_task(self, task: Task) -> bool:
        changed = {"document": task.document, "is_ready": task.is_ready, "is_over": task.is_over}
        return bool(await self._ask("change_task", id=task.id, version=task.version, **changed))

    async def orphans(self, limit: int = 100) -> Sequence[str]:
        return [id for (id,) in await self._ask("orphans", limit=limit)]

    async def heartbeat(self, token: Token, lease: float) -> bool:
        return bool(await self._ask("heartbeat", **token_of(token), lease=lease))

    async def commit_point(self, token: Token, lease: float) -> bool:
        return bool(await self._ask("commit_point", **token_of(token), lease=lease))

    async def complete(self, token: Token, outcome: Outcome, retention: float) -> bool:
        here = await self._here()
        completion = Ending(token.id, token.fence, token.nonce, outcome, retention)
        return await here.completions.send(completion) is not None

    async def suspend(self, token: Token, interim: Outcome, retention: float) -> bool:
        return bool(await self._ask("suspend", **token_of(token), **outcome_of(interim), retention=retention))

    async def release(self, token: Token) -> bool:
        return bool(await self._ask("release", **token_of(token)))

    async def abandon(self, token: Token) -> bool:
        return bool(await self._ask("abandon", **token_of(token)))

    async def lapse(self, token: Token) -> bool:
        return bool(await self._ask("lapse", **token_of(token)))

    async def resolve(self, id: RecordId, outcome: Outcome | None, retention: float = 86_400) -> bool:
        if outcome is None:
            return bool(await self._ask("resolve not done", **id_of(id)))
        return bool(await self._ask("resolve done", **id_of(id), **outcome_of(outcome), retention=retention))

    # --- reading and housekeeping ------------------------------------------------------------------------------------

    async def get(self, id: RecordId) -> Record | None:
        here = await self._here()
        row = await here.questions.send(id)
        return record_of(row) if row else None

    async def list(self, state: State | None = None, *, limit: int = 100, after: RecordId | None = None) -> Records:
        start = after or RecordId("", "", "")  # comes before all others: no key is empty
        rows = await self._ask("list", **id_of(start), state=state and state.value, limit=limit)
        return [record_of(row) for row in rows]

    async def counts(self) -> dict[State, int]:
        return {**dict.fromkeys(State, 0), **{State(state): number for state, number in await self._ask("counts")}}

    async def sweep(self, limit: int = 500) -> int:
        ((changed,),) = await self._ask("sweep", limit=limit)
        return int(changed)

    async def ping(self) -> None:
        await self._ask("ping", key=os.urandom(16).hex())

    async def aclose(self) -> None:
        """Let the operations in flight end, and close the connections; those of another loop end with it."""
        self._closed = True
        here, self._place = self._place, None
        if here is not None and here.loop is _loop():
            await here.connections.aclose()

    @asynccontextmanager
    async def transaction(self, claim: Claim, wait: float) -> AsyncIterator[PostgresTransaction]:
        """Begin, and insert the record; or find the one that is there. Another transaction with it is waited for."""
        here = await self._here()
        async with opened(here.connections, claim, wait) as transaction:
            yield transaction

    # --- opening -----------------------------------------------------------------------------------------------------

    async def _migrate(self) -> None:
        """Run the parts of the schema that this database does not have; of many processes that start together, one does."""
        connections = (await self._here()).connections
        parts = [part for name, part in SQL.items() if name.startswith("schema ")]

        async def version(connection: Connection) -> int:
            ((number,),) = await rows_of(connection, SQL["version"])
            if number > len(parts):
                raise LedgerDown(
                    f"the schema `wirecall` of this database has version {number}, this wirecall knows {len(parts)}: "
                    "a newer wirecall was here; upgrade this one"
                )
            return int(number)

        async def migrate() -> None:
            connection = await connections.take()
            try:
                if connection.info.server_version < OLDEST:
                    raise LedgerDown(
                        f"PostgreSQL 13 or newer is needed; the server is {connection.info.server_version / 10_000:.1f}"
                    )
                ((durable, flushed, exists),) = await rows_of(connection, SQL["opened"])
                if durable == "off" or flushed == "off":
                    logger.warning("PostgreSQL may forget commands: synchronous_commit is %s, fsync is %s", durable, flushed)
                if exists and await version(connection) == len(parts):
                    return
                with watched(connection, turns=3):  # the others wait for the one
                    async with connection.transaction():
                        await connection.execute(SQL["lock schema"])
                        await connection.execute(SQL["create schema"])
                        for number in range(await version(connection), len(parts)):
                            await connection.execute(parts[number], prepare=False)
                            await connection.execute(SQL["migrated"], {"number": number + 1})
            finally:
                await connections.give(connection)

        try:
            await asyncio.shield(connections.spawn(migrate()))
        except psycopg.Error as error:
            raise down(error) from error

    async def _ask(self, name: str, **params: Any) -> Rows:
        connections = (await self._here()).connections
        try:
            return await asyncio.shield(connections.spawn(connections.ask(SQL[name], params)))
        except psycopg.Error as error:
            raise down(error) from error

    async def _here(self) -> "_Place":
        """The queues and connections of the running loop."""
        loop = _loop()
        here = self._place
        if here is None or here.loop is not loop:
            if self._closed:
                raise LedgerDown("the ledger is closed")
            here = self._place = _Place(loop, Connections(self._conninfo, self._size))
            await anext(here.connections.lifetime)
        return here


class _Place:
    """The connections of one event loop, and the queues over them: however many ask what became of a claim, a new one
    goes out."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connections: Connections) -> None:
        self.loop = loop
        self.connections = connections
        self.claims = Queue(connections, SQL["claim"])
        # One statement at a time: a call knows of the equal ones that this process claimed before it, not after.
        self.keyless = Queue(connections, SQL["claim keyless"], flights=1)
        self.completions = Queue(connections, SQL["complete"])
        self.questions = Queue(connections, SQL["get"])


def token_of(token: Token) -> Params:
    return {**id_of(token.id), "fence": token.fence, "nonce": token.nonce}


def task_of(row: Row) -> Task:
    id, caller, method, key, version, document, is_ready, is_over, left, *now = row
    record = record_of(tuple(now)) if now[0] is not None else None
    return Task(id, RecordId(caller, method, key), version, document, is_ready, is_over, left, record)


def outcome_of(outcome: Outcome) -> Params:
    return {"kind": outcome.kind, "payload": outcome.payload, "digest": outcome.digest}


def _loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise UsageError(
            "A command with a key was called without an event loop.",
            "the ledger is in PostgreSQL, and its answer has to be waited for",
            "use `await app.handle(...)`",
        ) from None
