"""The bus in PostgreSQL: `NOTIFY` on a connection of the pool, `LISTEN` on a separate one.

A pooler in transaction mode takes `LISTEN` without an error, and delivers nothing. So a process
sends itself a message after each `LISTEN`, and reports if it does not come. `?listen=HOST:PORT` in
the URL is the address of the server itself.
"""

import os
from collections.abc import AsyncGenerator, Awaitable, Callable

import psycopg
from psycopg import sql

from wirecall.ledger.base import Receive
from wirecall.ledger.bus import QUIET, Listening
from wirecall.ledger.postgres.queue import Connection, rows_of
from wirecall.logs import logger

# Seconds in which a message to ourselves must come.
ECHO_WITHIN = 5.0

# Messages of other callers of `send` contain no space.
ECHO = "echo "

Send = Callable[[str], Awaitable[None]]

DEAF = "PostgreSQL takes LISTEN, and no message arrives: a pooler in transaction mode may stand between"
DEAF_FIX = "add the address of the server itself to the ledger's URL: ?listen=HOST:PORT"


class PostgresBus(Listening):
    """One connection that listens."""

    def __init__(self, conninfo: str, channel: str, receive: Receive, send: Send) -> None:
        self._conninfo = conninfo
        self._channel = channel
        self.send = send
        super().__init__("PostgreSQL", receive)

    async def _messages(self) -> AsyncGenerator[str | None, None]:
        connection = await listen(self._conninfo, self._channel)
        async with connection:
            yield None
            echo = f"{ECHO}{os.urandom(8).hex()}"
            await self.send(echo)
            patience = ECHO_WITHIN
            while True:
                async for notify in connection.notifies(timeout=patience):
                    if not notify.payload.startswith(ECHO):
                        yield notify.payload
                    elif notify.payload == echo:
                        echo = ""
                if echo and patience == ECHO_WITHIN:
                    logger.warning("%s\n  fix: %s", DEAF, DEAF_FIX)
                patience = QUIET
                await rows_of(connection, "SELECT 1")  # it fails if the server has vanished


async def listen(conninfo: str, channel: str) -> Connection:
    """Return a new connection that listens to a channel."""
    connection: Connection = await psycopg.AsyncConnection.connect(
        conninfo, autocommit=True, prepare_threshold=None
    )
    try:
        listen = sql.SQL("LISTEN {}").format(sql.Identifier(channel))
        await rows_of(connection, listen.as_string(connection))
    except BaseException:
        await connection.close()
        raise
    return connection


async def is_received(conninfo: str, channel: str, send: Send) -> bool:
    """Return whether a message arrives at a connection that listens."""
    async with await listen(conninfo, channel) as connection:
        await send(ECHO)
        received = connection.notifies(timeout=ECHO_WITHIN, stop_after=1)
        return [notify async for notify in received] != []
