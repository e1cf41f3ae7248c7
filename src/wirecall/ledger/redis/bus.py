"""The bus in Redis: a channel of the server, or of the slot of a cluster (`SSUBSCRIBE`).

A cluster sends what is published to all its nodes; a sharded channel stays with the node that holds
its slot. Redis 7 has sharded channels, and older clusters use the plain ones.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.client import PubSub
from redis.exceptions import AskError, RedisError, ResponseError

from wirecall.ledger.base import LedgerDown, Receive
from wirecall.ledger.bus import QUIET, Listening
from wirecall.ledger.redis.connection import Connections, Options

# Seconds in which a server answers PING.
PONG_WITHIN = 5.0


class RedisBus(Listening):
    """One connection that listens."""

    def __init__(
        self,
        options: Options,
        channel: bytes,
        receive: Receive,
        connections: Callable[[], Awaitable[Connections]],
        *,
        is_cluster: bool,
    ) -> None:
        self._options = {**options, "max_connections": None}
        self._channel = channel
        self._connections = connections
        self._is_sharded = is_cluster
        super().__init__("Redis", receive)

    async def send(self, message: str) -> None:
        connections = await self._connections()
        command = "SPUBLISH" if self._is_sharded else "PUBLISH"
        # PUBLISH names no key, and any node of a cluster takes it. We ask the one of the slot.
        try:
            await connections.ask(self._channel, (command, self._channel, message), writes=False)
        except LedgerDown as error:
            if not (self._is_sharded and _is_unknown(error.__cause__)):
                raise
            self._is_sharded = False
            await self.send(message)

    async def _messages(self) -> AsyncGenerator[str | None, None]:
        connections = await self._connections()
        node = await connections.holder(self._channel)
        options = self._options
        if node is not None:
            options = {**options, "host": node.host, "port": node.port}
        pool = ConnectionPool(**options)
        listener = Redis(connection_pool=pool).pubsub()
        try:
            await self._subscribe(listener)
            yield None
            async for message in _received(listener):
                yield message
        except AskError as error:
            connections.seek_news()
            raise LedgerDown(f"the slot of the channel has moved: {error}") from error
        except (RedisError, LedgerDown, OSError):
            # Another node may serve the slot, and no command may be running that would find out.
            connections.seek_news()
            raise
        finally:
            with suppress(RedisError, OSError):
                await listener.aclose()  # type: ignore[no-untyped-call]
            with suppress(RedisError, OSError):
                await pool.disconnect()

    async def _subscribe(self, listener: PubSub) -> None:
        """Subscribe, and wait for the confirmation."""
        try:
            if self._is_sharded:
                await listener.ssubscribe(self._channel)
            else:
                await listener.subscribe(self._channel)
            confirmed = await listener.get_message(timeout=PONG_WITHIN)
        except ResponseError as error:
            if not (self._is_sharded and _is_unknown(error)):
                raise
            self._is_sharded = False
            await self._subscribe(listener)
            return
        if confirmed is None:
            raise LedgerDown("the server does not confirm a subscription")


async def _received(listener: PubSub) -> AsyncGenerator[str, None]:
    """Yield messages; raise if the server is silent, or no longer has the channel."""
    is_asked = False
    while True:
        found: Any = await listener.get_message(timeout=PONG_WITHIN if is_asked else QUIET)
        if found is None:
            if is_asked:
                raise LedgerDown("the server does not answer PING")
            is_asked = True
            await listener.ping()
            continue
        is_asked = False
        if found["type"] in ("unsubscribe", "sunsubscribe"):
            raise LedgerDown("the slot of the channel has moved")
        if found["type"] in ("message", "smessage"):
            yield found["data"].decode()


def _is_unknown(error: BaseException | None) -> bool:
    """Return whether a server does not know a command."""
    return isinstance(error, ResponseError) and "unknown command" in str(error).lower()
