"""The ledger in PostgreSQL: many hosts, leased records, or a record in one transaction with its handler's own writes.

The rules of the file:

1. A transition is one statement of `postgres.sql`, which commits by itself and reads the server's clock. It needs nothing of
   its session, so a transaction pooler may stand between: timeouts belong to the functions and to the asking side.
2. Claims, completions and questions for a record go out with others of their kind (`postgres_lanes`), the rest alone.
3. Each event loop has connections of its own (`postgres_pool`), made when the loop first asks.
4. Of psycopg's errors only `LedgerDown` leaves this file, but those that a handler's own statements raise.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import psycopg
from psycopg import conninfo

from wirecall.errors import UsageError
from wirecall.ledger.base import Claim, LedgerDown, Outcome, Record, RecordId, State, Token
from wirecall.ledger.postgres.errors import down
from wirecall.ledger.postgres.lanes import Lanes
from wirecall.ledger.postgres.pool import Pool
from wirecall.ledger.postgres.rows import SQL, Rows, completion_of, id_of, outcome_of, record_of, token_of
from wirecall.ledger.postgres.schema import migrate
from wirecall.ledger.postgres.transaction import PostgresTransaction, opened
from wirecall.process import new_nonce

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
        self._places: dict[asyncio.AbstractEventLoop, Lanes] = {}
        self._closed = False

    # --- transitions -------------------------------------------------------------------------------------------------

    async def claim(self, claim: Claim) -> Record:
        here = await self._here()
        row = await here.claims.send(claim.id, claim)
        assert row is not None
        return record_of(row)

    async def heartbeat(self, token: Token, lease: float) -> bool:
        return bool(await self._ask("heartbeat", **token_of(token), lease=lease))

    async def commit_point(self, token: Token, lease: float) -> bool:
        return bool(await self._ask("commit_point", **token_of(token), lease=lease))

    async def complete(self, token: Token, outcome: Outcome, retention: float) -> bool:
        here = await self._here()
        return await here.completions.send(token.id, completion_of(token, outcome, retention)) is not None

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
        row = await here.questions.send(id, id)
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
        await self._ask("ping", key=new_nonce().hex())

    async def aclose(self) -> None:
        self._closed = True
        places, self._places = self._places, {}
        for loop, place in places.items():
            if loop is asyncio.get_running_loop():
                await place.pool.aclose()
            else:
                place.pool.close()

    @asynccontextmanager
    async def transaction(self, claim: Claim, wait: float) -> AsyncIterator[PostgresTransaction]:
        """Begin, and insert the record; or find the one that is there. Another transaction with it is waited for."""
        here = await self._here()
        async with opened(here.pool, claim, wait) as transaction:
            yield transaction

    # --- opening -----------------------------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        pool = (await self._here()).pool
        try:
            await asyncio.shield(pool.spawn(pool.using(migrate)))
        except psycopg.Error as error:
            raise down(error) from error

    async def _ask(self, name: str, **params: Any) -> Rows:
        pool = (await self._here()).pool
        try:
            return await asyncio.shield(pool.spawn(pool.ask(SQL[name], params)))
        except psycopg.Error as error:
            raise down(error) from error

    async def _here(self) -> Lanes:
        """The queues and connections of the running loop."""
        loop = _loop()
        return self._places.get(loop) or await self._enter(loop)

    async def _enter(self, loop: asyncio.AbstractEventLoop) -> Lanes:
        if self._closed:
            raise LedgerDown("the ledger is closed")
        for known, place in list(self._places.items()):
            if known.is_closed():
                self._places.pop(known, None)
                place.pool.close()
        here = self._places[loop] = Lanes(Pool(self._conninfo, self._size))
        await anext(here.pool.lifetime)
        return here


def _loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise UsageError(
            "A command with a key was called without an event loop.",
            "the ledger is in PostgreSQL, and its answer has to be waited for",
            "use `await app.handle(...)`",
        ) from None
