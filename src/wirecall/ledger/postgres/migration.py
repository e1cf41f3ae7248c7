"""The version of the schema in PostgreSQL, and how it is brought up to date.

The rules of the file:

1. The parts "schema N" of `postgres.sql` run in one transaction. A lock lets one of many processes
   that start together do it, and the others wait for it.
2. The parts "index N NAME" build indexes, which takes long on large tables. If the ledger is in use,
   commands must not wait for that: the server builds them `CONCURRENTLY`, which no transaction may
   contain. A process that dies leaves an invalid index; the next migration drops it. The parts
   "unused N NAME" then drop indexes in the same way.
3. A new ledger may have partitions: part 1 has a place for that. They are not added later. The
   server cannot build an index of a table with partitions while commands run, so there they wait.
4. A version is recorded after its last step, so a migration that was interrupted is repeated. A
   part with indexes can therefore be executed twice.
"""

import asyncio
import random
import re

import psycopg

from wirecall.ledger.base import LedgerDown, Schema
from wirecall.ledger.postgres.queue import SQL, Connection, rows_of
from wirecall.logs import logger

# It has pg_xact_status and pg_current_xact_id under these names.
OLDEST = 130_000

# The first version whose parts only add.
ADDS = 7

# The most partitions, and the place in part 1 that says that there are some.
MOST_PARTITIONS = 256
PARTITIONED = "-- partitioned\n"

# Seconds between two looks at an index that another process builds.
AGAIN = 0.2


def parts() -> list[str]:
    """Return the parts of the schema; each makes a version."""
    return [part for name, part in SQL.items() if name.startswith("schema ")]


def indexes(number: int) -> dict[str, str]:
    """Return the statements that build the indexes of a version, by the names of the indexes."""
    begin = f"index {number} "
    return {
        name.removeprefix(begin): _statement(part).strip()
        for name, part in SQL.items()
        if name.startswith(begin)
    }


def unused(number: int) -> list[str]:
    """Return the statements that drop the indexes that a version does not use."""
    begin = f"unused {number} "
    return [_statement(part).strip() for name, part in SQL.items() if name.startswith(begin)]


def _statement(part: str) -> str:
    """Return a part without its comments."""
    return re.sub(r"^--.*\n", "", part, flags=re.MULTILINE)


async def look(connection: Connection, *, warns: bool = False) -> Schema:
    """Check the server, and return the version of its schema.

    A process that will use the ledger is warned if the server may forget commands.
    """
    if connection.info.server_version < OLDEST:
        version_shown = f"{connection.info.server_version / 10_000:.1f}"
        raise LedgerDown(f"PostgreSQL 13 or newer is needed; the server is {version_shown}")
    ((durable, flushed, exists),) = await rows_of(connection, SQL["opened"])
    if warns and "off" in (durable, flushed):
        logger.warning(
            "PostgreSQL may forget commands: synchronous_commit is %s, fsync is %s",
            durable,
            flushed,
        )
    found = 0
    least = 0
    if exists:
        ((found, least),) = await rows_of(connection, SQL["version"])
    steps: list[str] = []
    for number, part in enumerate(parts()[found:], start=found + 1):
        steps.append(part)
        steps += indexes(number).values()
        steps += unused(number)
    where = "The schema `wirecall` of this database"
    return Schema(where, found, len(parts()), least, tuple(steps))


class Migration:
    """One migration of a schema that is behind."""

    def __init__(self, connection: Connection, schema: Schema, partitions: int) -> None:
        self._connection = connection
        self._schema = schema
        # Of a new ledger; 0 or 1: none.
        self._partitions = partitions

    async def run(self) -> None:
        """Bring the schema up to date."""
        waiting = await self._execute_parts()
        if not waiting:
            return
        ((number_of_partitions,),) = await rows_of(self._connection, SQL["partitions"])
        concurrently = "" if number_of_partitions else "CONCURRENTLY "
        # For the statements below, which have no transaction.
        await self._connection.execute(SQL["no timeouts"], {"is_local": False})
        try:
            for number in waiting:
                for name, statement in indexes(number).items():
                    await self._build(f"wirecall.{name}", statement, concurrently)
                for statement in unused(number):
                    begin = "DROP INDEX "
                    await self._try(f"{begin}{concurrently}{statement.removeprefix(begin)}")
                await self._record(number)
        finally:
            if not self._connection.closed:
                await self._connection.execute("RESET ALL")

    async def _execute_parts(self) -> list[int]:
        """Execute the parts that are missing; return the versions whose indexes are missing."""
        known = self._schema.known
        waiting: list[int] = []
        async with self._connection.transaction():
            await self._connection.execute(SQL["no timeouts"], {"is_local": True})
            await self._connection.execute(SQL["lock schema"])  # other processes wait for this one
            await self._connection.execute(SQL["create schema"])
            ((found, _),) = await rows_of(self._connection, SQL["version"])
            if 0 < found < known:
                logger.warning(
                    "the ledger's tables are brought from version %s to %s", found, known
                )
            for number in range(found + 1, known + 1):
                await self._execute_part(number)
                if found == 0:  # no process uses the tables yet
                    for statement in (*indexes(number).values(), *unused(number)):
                        await self._connection.execute(statement)
                elif waiting or indexes(number):
                    waiting.append(number)
                if not waiting:
                    await self._record(number)
        return waiting

    async def _execute_part(self, number: int) -> None:
        part = parts()[number - 1]
        is_parted = number == 1 and self._partitions > 1
        if is_parted:
            part = part.replace(PARTITIONED, "PARTITION BY HASH (caller, method, key)\n")
        await self._connection.execute(part, prepare=False)
        if is_parted:
            for nth in range(self._partitions):
                values = {"nth": nth, "of": self._partitions}
                await self._connection.execute(SQL["partition"] % values, prepare=False)

    async def _record(self, number: int) -> None:
        if number >= ADDS:
            number = -number
        await self._connection.execute(SQL["migrated"], {"number": number})

    async def _build(self, name: str, statement: str, concurrently: str) -> None:
        """Build an index, while commands run if possible; wait if another process builds it."""
        while True:
            cursor = await self._connection.execute(SQL["is valid"], {"name": name})
            found = await cursor.fetchone()
            if found is None:
                begin = "CREATE INDEX "
                await self._try(f"{begin}{concurrently}{statement.removeprefix(begin)}")
                continue
            is_valid, is_built = found
            if is_valid:
                return
            if is_built:
                await asyncio.sleep(AGAIN)
            else:  # its builder died
                await self._try(f"DROP INDEX {concurrently}IF EXISTS {name}")

    async def _try(self, statement: str) -> None:
        """Execute a statement, unless another process does the same at this moment."""
        try:
            await self._connection.execute(statement.encode())
        except (
            psycopg.errors.DeadlockDetected,
            psycopg.errors.DuplicateTable,
            psycopg.errors.UniqueViolation,
        ):
            await asyncio.sleep(random.uniform(AGAIN, 2 * AGAIN))
