"""The schema `wirecall` in PostgreSQL, brought up to date when a ledger is opened. The migrations are in `postgres.sql`."""

from wirecall.ledger.base import LedgerDown
from wirecall.ledger.postgres.pool import PATIENCE, Connection, rows_of, watched
from wirecall.ledger.postgres.rows import SCHEMA, SQL
from wirecall.logs import logger

OLDEST = 130_000  # pg_xact_status and pg_current_xact_id under these names


async def migrate(connection: Connection) -> None:
    """Run the parts of the schema that this database does not have; of many processes that start together, one does."""
    if connection.info.server_version < OLDEST:
        raise LedgerDown(f"PostgreSQL 13 or newer is needed; the server is {connection.info.server_version / 10_000:.1f}")
    ((durable, flushed, exists),) = await rows_of(connection, SQL["opened"])
    if durable == "off" or flushed == "off":
        logger.warning("PostgreSQL may forget commands: synchronous_commit is %s, fsync is %s", durable, flushed)
    if exists and await _version(connection) == len(SCHEMA):
        return
    with watched(connection, 3 * PATIENCE):  # the others wait for the one
        async with connection.transaction():
            await connection.execute(SQL["lock schema"])
            await connection.execute(SQL["create schema"])
            for number in range(await _version(connection), len(SCHEMA)):
                await connection.execute(SCHEMA[number], prepare=False)
                await connection.execute(SQL["migrated"], {"number": number + 1})


async def _version(connection: Connection) -> int:
    ((version,),) = await rows_of(connection, SQL["version"])
    if version > len(SCHEMA):
        raise LedgerDown(
            f"the schema `wirecall` of this database has version {version}, this wirecall knows {len(SCHEMA)}: "
            "a newer wirecall was here; upgrade this one"
        )
    return int(version)
