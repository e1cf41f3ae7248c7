"""The ledger in PostgreSQL: many hosts, leased records, or a record in one transaction with its
handler's own writes.

The rules of the file:

1. A transition is one statement of `postgres.sql`, which is a whole transaction and reads the
   server's clock. It does not depend on its session, so a transaction pooler may stand between:
   timeouts belong to the functions and to the client.
2. Claims, completions and questions for a record go out with others of their kind (`queue`), the
   rest alone.
3. Connections belong to an event loop, and end with it. A ledger serves one loop at a time, one
   after another.
4. psycopg's errors leave this file as `LedgerDown`, except those that a handler's own statements
   raise.
"""

import asyncio
import math
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeAlias, TypeVar
from urllib.parse import unquote

import psycopg
from psycopg import conninfo

from wirecall.errors import UsageError
from wirecall.ledger.base import (
    ALL,
    IDENTITY,
    IDENTITY_CHANNEL,
    MARKS_WITHIN,
    STORED,
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
    new_reach,
)
from wirecall.ledger.postgres.bus import DEAF, DEAF_FIX, PostgresBus, is_received
from wirecall.ledger.postgres.migration import MOST_PARTITIONS, Migration, look
from wirecall.ledger.postgres.pace import Pace
from wirecall.ledger.postgres.queue import (
    SQL,
    Committing,
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
)
from wirecall.ledger.postgres.transaction import PostgresTransaction, opened, record_of

# Connections per event loop; `?pool=` in the URL changes it. An open transaction holds one.
POOL = 10

# Defaults for the URL. A server that stops answering is noticed without them, but sockets should
# not pile up.
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

# Records that a statement of the sweep may change or only look at, so that it is short; and the most
# statements of each kind per sweep.
PIECE = 50
STEP = 2000
PIECES = 400

T = TypeVar("T")
Records: TypeAlias = list[Record]  # inside the class, `list` is a method
Tasks: TypeAlias = list[Task]


async def open_url(url: str, tables: Tables = "create") -> "PostgresLedger":
    """Connect to `postgresql://` or `postgres://`; make or migrate the schema `wirecall`.

    `tables` may forbid that. `?pool=` is the number of connections, and `?listen=HOST:PORT` is
    where to listen to other processes, if a transaction pooler is at the address of the URL.
    `?partitions=` is the number of parts of the table of commands, if it is made now. The other
    parameters are those of libpq.
    """
    ledger = PostgresLedger(*_read(url, tables))
    try:
        await ledger._prepare(tables)
    except BaseException:
        await ledger.aclose()
        raise
    return ledger


async def schema_of(url: str) -> Schema:
    """Return the version of the schema `wirecall`."""
    ledger = PostgresLedger(*_read(url, "read"))
    try:
        return await ledger._schema()
    finally:
        await ledger.aclose()


async def risks_of(url: str) -> Sequence[Risk]:
    """Return by which settings the server may lose commands."""
    ledger = PostgresLedger(*_read(url, "read"))
    try:
        ((durable, flushed, standbys, replicas),) = await ledger._ask("risks")
        is_deaf = await ledger._is_cut_off()
    finally:
        await ledger.aclose()
    found = []
    if is_deaf:
        found.append(Risk(DEAF, DEAF_FIX))
    if durable == "off":
        found.append(
            Risk(
                "synchronous_commit is off: a crash of PostgreSQL loses the last commands",
                "ALTER SYSTEM SET synchronous_commit = on",
            )
        )
    if standbys and durable in ("local", "off"):
        found.append(
            Risk(
                f"synchronous_commit is {durable}, so PostgreSQL does not wait for the replicas of "
                "synchronous_standby_names: a failover may lose commands",
                "ALTER SYSTEM SET synchronous_commit = on",
            )
        )
    if flushed == "off":
        found.append(
            Risk("fsync is off: a power failure may lose commands", "ALTER SYSTEM SET fsync = on")
        )
    if replicas and not standbys:
        found.append(
            Risk(
                f"PostgreSQL has {replicas} replicas and waits for none of them: a failover may "
                "lose commands, and their retries run again",
                "ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (*)'",
            )
        )
    return found


def _read(url: str, tables: Tables) -> tuple[str, int, str, int]:
    """Return libpq's options, the number of connections, libpq's options to listen, and the number
    of partitions.
    """
    base, _, query = url.partition("?")
    fields = [field.partition("=") for field in query.split("&") if field]
    ours = {"pool": str(POOL), "listen": "", "partitions": "0"}
    ours |= {name: value for name, _, value in fields if name in ours}
    rest = "&".join(name + equals + value for name, equals, value in fields if name not in ours)
    try:
        given = conninfo.conninfo_to_dict(f"{base}?{rest}")
        defaults = DEFAULTS
        if tables == "read":  # a replica will do
            defaults = DEFAULTS | {"target_session_attrs": "any"}
        options = {**defaults, **given}
        direct = dict(options)
        if ours["listen"]:
            host, _, port = unquote(ours["listen"]).rpartition(":")
            direct |= {"host": host.strip("[]"), "port": str(int(port))}
            direct.pop("hostaddr", None)
        elsewhere = conninfo.make_conninfo("", **direct)
        partitions = int(ours["partitions"])
        if not 0 <= partitions <= MOST_PARTITIONS:
            raise ValueError
        size = max(1, int(ours["pool"]))
        return conninfo.make_conninfo("", **options), size, elsewhere, partitions
    except (psycopg.ProgrammingError, ValueError):  # their messages may hold a password
        raise UsageError(
            "The URL of the PostgreSQL ledger cannot be read.",
            "a special sign in the user's name or password, or a parameter that is not known",
            'write it like "postgresql://user:p%40ss@host:5432/shop?pool=10", '
            "signs like @ : / ? as %40 %3A %2F %3F",
        ) from None


class PostgresLedger:
    """Leased records by single statements; `transaction` for effects in the same database."""

    is_tidy = False
    outlives = True

    def __init__(self, conninfo: str, size: int, listening: str = "", partitions: int = 0) -> None:
        self._conninfo = conninfo
        self._partitions = partitions
        # The same, with an address at which LISTEN works.
        self._listening = listening or conninfo
        self._size = size
        self.reached = new_reach()
        # The server that the last connection led to.
        self._history = ""
        self._place: _LoopState | None = None
        self._closed = False

    # --- transitions ------------------------------------------------------------------------------

    async def claim(self, claim: Claim) -> Record:
        here = await self._here()
        if claim.keyless is None:
            row = await here.claims.send(claim)
            assert row is not None
            return record_of(row)
        row = await here.keyless.send(claim)
        assert row is not None
        # After the id of the claim: the record may be that of an earlier call.
        return record_of(row[3:])

    async def deliver(self, ends: Sequence[Delivered]) -> None:
        # In the order of locks, and each answer once: a written answer stays so.
        once = {(end.id, end.deliverer): end for end in sorted(ends)}
        if once:
            await self._ask("deliver", items=encode(list(once.values())).decode())

    async def begin_task(self, token: Token, id: str, document: bytes, ttl: float) -> bool:
        return bool(
            await self._ask("begin_task", **token_of(token), id=id, document=document, ttl=ttl)
        )

    async def task(self, id: str) -> Task | None:
        if not id.isprintable():  # we make no such id, and PostgreSQL may not take such text
            return None
        return _first_task(await self._ask("task", id=id))

    async def task_of(self, id: RecordId) -> Task | None:
        return _first_task(await self._ask("task_of", **id_of(id)))

    async def change_task(self, task: Task) -> bool:
        changed = {"document": task.document, "is_ready": task.is_ready, "is_over": task.is_over}
        return bool(await self._ask("change_task", id=task.id, version=task.version, **changed))

    async def orphans(self, limit: int = 100) -> Sequence[str]:
        return [id for (id,) in await self._ask("orphans", limit=limit)]

    async def heartbeat(self, token: Token, lease: float) -> bool:
        return bool(await self._ask("heartbeat", **token_of(token), lease=lease))

    async def commit_point(self, token: Token, lease: float) -> bool:
        here = await self._here()
        point = Committing(token.id, token.fence, token.nonce, lease)
        return await here.points.send(point) is not None

    async def complete(self, token: Token, outcome: Outcome, retention: float) -> bool:
        here = await self._here()
        completion = Ending(token.id, token.fence, token.nonce, outcome, retention)
        return await here.completions.send(completion) is not None

    async def suspend(self, token: Token, interim: Outcome, retention: float) -> bool:
        return bool(
            await self._ask(
                "suspend", **token_of(token), **outcome_of(interim), retention=retention
            )
        )

    async def release(self, token: Token) -> bool:
        return bool(await self._ask("release", **token_of(token)))

    async def abandon(self, token: Token) -> bool:
        return bool(await self._ask("abandon", **token_of(token)))

    async def lapse(self, token: Token) -> bool:
        return bool(await self._ask("lapse", **token_of(token)))

    async def resolve(
        self,
        id: RecordId,
        outcome: Outcome | None,
        retention: float = 86_400,
        *,
        fence: int | None = None,
    ) -> bool:
        if outcome is None:
            return bool(await self._ask("resolve not done", **id_of(id), seen=fence))
        return bool(
            await self._ask(
                "resolve done",
                **id_of(id),
                **outcome_of(outcome),
                retention=retention,
                seen=fence,
            )
        )

    # --- reading and housekeeping -----------------------------------------------------------------

    async def get(self, id: RecordId) -> Record | None:
        here = await self._here()
        row = await here.questions.send(id)
        if row is None:
            return None
        return record_of(row)

    async def list(
        self,
        state: State | None = None,
        *,
        limit: int = 100,
        after: Place | None = None,
        only: Only = ALL,
    ) -> Records:
        stored = STORED[state]
        rows = await self._ask(
            "list",
            stored=[each.value for each, _ in stored],
            dead=[is_dead for _, is_dead in stored],
            **_page_of(after, only, limit),
        )
        return [record_of(row) for row in rows]

    async def list_tasks(
        self,
        state: State | None = None,
        *,
        limit: int = 100,
        after: Place | None = None,
        only: Only = ALL,
    ) -> Tasks:
        asked = _page_of(after, only, limit)
        rows = await self._ask("list tasks", state=state and state.value, **asked)
        return [task_of(row) for row in rows]

    async def counts(self) -> dict[State, int]:
        found: Counter[str] = Counter(dict(await self._ask("counts")))
        counts = Counter({state: found[state.value] for state in State})
        # They are too many to be looked at.
        counts[State.DONE] = found["all"] - counts.total()
        counts[State.RUNNING] -= found["dead"]
        counts[State.UNKNOWN] += found["dead"]
        return counts

    async def sweep(self, limit: int = 500) -> int:
        for _ in range(PIECES):
            ((looked,),) = await self._ask("advance", most=STEP)
            if looked < STEP:
                break
        ((changed,),) = await self._ask("lose", limit=limit)
        for _ in range(PIECES):
            if changed >= limit:
                break
            ((swept, postponed),) = await self._ask("sweep", limit=min(limit - changed, PIECE))
            changed += swept
            if not swept + postponed:
                break
        return int(changed)

    async def mark(
        self, channel: str, mark: Mark, ttl: float, listed: float = MARKS_WITHIN
    ) -> None:
        await self._ask("mark", channel=channel, name=mark.name, content=mark.content, ttl=ttl)

    async def marked(self, channel: str, name: str) -> Mark | None:
        found = await self._ask("marked", channel=channel, name=name)
        return Mark(name, found[0][0]) if found else None

    async def marks(self, channel: str, within: float) -> Sequence[Mark]:
        found = await self._ask("marks", channel=channel, within=within)
        return [Mark(name, content) for name, content in found]

    async def see(self, identity: bytes | None = None) -> Seen:
        if identity is not None:
            await self._ask("identify", channel=IDENTITY_CHANNEL, name=IDENTITY, content=identity)
        ((found, fence, history),) = await self._ask("see", channel=IDENTITY_CHANNEL, name=IDENTITY)
        return Seen(found, fence, history)

    def join(self, channel: str, receive: Receive) -> PostgresBus:
        return PostgresBus(self._listening, channel, receive, partial(self._send, channel))

    async def _send(self, channel: str, message: str) -> None:
        await self._ask("send", channel=channel, message=message)

    async def _is_cut_off(self) -> bool:
        """Return whether messages do not arrive. A replica cannot send any, so it is not asked."""
        channel = f"wirecall-{os.urandom(6).hex()}"
        with suppress(LedgerDown, psycopg.Error):
            return not await is_received(self._listening, channel, partial(self._send, channel))
        return False

    async def ping(self) -> None:
        await self._ask("ping", key=os.urandom(16).hex())

    async def aclose(self) -> None:
        """Let the operations in flight end, and close the connections.

        Connections of another loop end with that loop.
        """
        self._closed = True
        here = self._place
        self._place = None
        if here is not None and here.loop is _loop():
            await here.connections.aclose()

    @asynccontextmanager
    async def transaction(self, claim: Claim, wait: float) -> AsyncIterator[PostgresTransaction]:
        """Begin, and insert the record or find the existing one.

        Wait for another transaction that holds it.
        """
        here = await self._here()
        async with opened(here.connections, claim, wait) as transaction:
            yield transaction

    # --- opening ----------------------------------------------------------------------------------

    async def _prepare(self, tables: Tables) -> None:
        """Look at the server and the schema; make or migrate the schema, unless `tables` forbids it.

        Large tables take long. Our timeouts do not end a migration, and neither do those that the
        database has for commands; TCP notices a server that vanishes.
        """

        async def prepare(connection: Connection) -> None:
            schema = await look(connection, warns=True)
            if schema.check(tables):
                await Migration(connection, schema, self._partitions).run()
            if self._partitions > 1:
                ((number,),) = await rows_of(connection, SQL["partitions"])
                if number != self._partitions:
                    raise _other_partitions(number, self._partitions)

        await self._with_connection(prepare)

    async def _schema(self) -> Schema:
        return await self._with_connection(look)

    async def _with_connection(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Return the result of some work on a connection; a caller that leaves does not end it.

        It has no time limit.
        """
        connections = (await self._here()).connections

        async def hold() -> T:
            connection = await connections.take()
            try:
                return await work(connection)
            finally:
                await connections.give(connection)

        try:
            return await asyncio.shield(connections.spawn(hold()))
        except psycopg.errors.InsufficientPrivilege as error:
            raise LedgerDown(
                str(
                    UsageError(
                        "The role of this ledger's URL may not do that.",
                        str(error.diag.message_primary),
                        "make and migrate the tables as their owner: wirecall ledger migrate "
                        "postgresql://OWNER@...; docs/deploy.md lists the rights of the app's role",
                    )
                )
            ) from error
        except psycopg.Error as error:
            raise down(error) from error

    async def _ask(self, name: str, /, **params: Any) -> Rows:
        connections = (await self._here()).connections
        try:
            return await asyncio.shield(connections.spawn(connections.ask(SQL[name], params)))
        except psycopg.Error as error:
            raise down(error) from error

    async def _here(self) -> "_LoopState":
        """Return the queues and connections of the running loop."""
        loop = _loop()
        here = self._place
        if here is None or here.loop is not loop:
            if self._closed:
                raise LedgerDown("the ledger is closed")
            connections = Connections(self._conninfo, self._size, self._reach)
            here = self._place = _LoopState(loop, connections)
            await anext(here.connections.lifetime)
        return here

    def _reach(self, history: str) -> None:
        """Called when a connection was made: another server may answer since."""
        if history == "" or history != self._history:
            self.reached = new_reach()
        self._history = history


class _LoopState:
    """The connections of one event loop, and the queues over them.

    Many questions about claims do not delay a new claim.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, connections: Connections) -> None:
        self.loop = loop
        self.connections = connections
        pace = Pace()
        self.claims = Queue(connections, SQL["claim"], pace)
        # One statement at a time: a call sees the equal ones that this process claimed before it,
        # not after.
        self.keyless = Queue(connections, SQL["claim keyless"], pace, flights=1)
        self.points = Queue(connections, SQL["commit_point"], pace)
        self.completions = Queue(connections, SQL["complete"], pace)
        self.questions = Queue(connections, SQL["get"], Pace())


def _other_partitions(number: int, asked: int) -> LedgerDown:
    """Return the error about a ledger that was made with other partitions."""
    given = UsageError(
        f"The URL says partitions={asked}, and this ledger has {number}.",
        "the table of commands gets its partitions when it is made",
        f"write ?partitions={number} or leave it out (0: none); or make a ledger in a new database",
    )
    return LedgerDown(str(given))


def _page_of(after: Place | None, only: Only, limit: int) -> Params:
    """Return the parameters of a page. A time without an end is none."""
    at, start = after or (None, RecordId("", "", ""))
    times = {
        name: time if math.isfinite(time) else None
        for name, time in (("since", only.since), ("until", only.until))
    }
    names = {"of_method": only.method, "of_caller": only.caller}
    return {**id_of(start), **names, **times, "at": at, "limit": limit}


def token_of(token: Token) -> Params:
    return {**id_of(token.id), "fence": token.fence, "nonce": token.nonce}


def task_of(row: Row) -> Task:
    id, caller, method, key, version, document, is_ready, is_over, left, *now = row
    record = None
    if now[0] is not None:
        record = record_of(tuple(now))
    return Task(
        id, RecordId(caller, method, key), version, document, is_ready, is_over, left, record
    )


def _first_task(rows: Rows) -> Task | None:
    if not rows:
        return None
    return task_of(rows[0])


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
