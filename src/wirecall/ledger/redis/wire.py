"""The connections of one event loop to one server of Redis.

1. What waits at the moment goes out together, as one pipeline. A caller that is cancelled only leaves the queue; no
   connection is given up halfway.
2. Nothing is sent twice: a lost answer is an error, and the caller finds out by asking.
3. A connection belongs to an event loop, and is closed when the loop ends.
4. With `replicas`, one WAIT follows what goes out together: the server counts the replicas that hold all which this
   connection has written. If they are too few, none of these writes counts.
"""

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any, TypeAlias

from msgspec import Struct
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeout

from wirecall.errors import UsageError
from wirecall.ledger.base import LedgerDown
from wirecall.stepping import start

PREFIX = "wirecall:"

# Connections per loop and server, and the most that goes out at once on one of them: reading that many answers takes about
# 5 ms, and nothing else runs meanwhile. `max_connections` in the URL changes the former.
LANES = 2
BATCH = 100

# Seconds that the replicas have to say that they hold a write; half of the socket's timeout, where that is shorter.
REPLICATED_WITHIN = 1.0

Command: TypeAlias = tuple[Any, ...]
Options: TypeAlias = dict[str, Any]


class Wire:
    """Two connections, and the commands that wait for one of them."""

    def __init__(self, options: Options, replicas: int) -> None:
        self._lanes = options.get("max_connections") or LANES
        self._pool = ConnectionPool(**options)
        self._client = Redis(connection_pool=self._pool)
        self._waiting: deque[_Ask] = deque()
        self._senders: set[asyncio.Task[None]] = set()
        self._lifetime = _lifetime(self._pool)
        self._replicas = replicas
        self._patience = int(1000 * min(REPLICATED_WITHIN, options["socket_timeout"] / 2))

    async def open(self) -> None:
        await anext(self._lifetime)

    async def aclose(self) -> None:
        if self._senders:
            await asyncio.wait(self._senders)
        await self._lifetime.aclose()

    def ask(self, *commands: Command, writes: bool = False) -> "asyncio.Future[Any]":
        """The answer to come to the last of these commands, which go out side by side; an error is an answer."""
        loop = asyncio.get_running_loop()
        waiting = _Ask(commands, writes, loop.create_future())
        self._waiting.append(waiting)
        if len(self._senders) < self._lanes:
            sender = start(loop, self._send())
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)  # one that was cancelled before it began
        return waiting.answer

    async def _send(self) -> None:
        while self._waiting:
            batch = self._take(BATCH)
            answers: list[Any] = [LedgerDown("the event loop ended")] * len(batch)
            try:
                answers = await self._exchange(batch)
            except Exception as error:  # garbage from the server is a ValueError of the driver's
                if isinstance(error, RedisTimeout):  # the server is silent: one timeout is enough for all who wait
                    batch += self._take(len(self._waiting))
                answers = [error] * len(batch)
            finally:
                for waiting, answer in zip(batch, answers, strict=True):
                    if not waiting.answer.done():
                        waiting.answer.set_result(answer)
        self._senders.discard(asyncio.current_task())  # now, not when the loop gets to it: who asks next must start another

    def _take(self, most: int) -> "list[_Ask]":
        taken = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
        return [waiting for waiting in taken if not waiting.answer.done()]

    async def _exchange(self, batch: "list[_Ask]") -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for waiting in batch:
            for command in waiting.commands:
                pipeline.execute_command(*command)
        is_to_last = self._replicas and any(waiting.writes for waiting in batch)
        if is_to_last:
            pipeline.execute_command("WAIT", self._replicas, self._patience)
        answers = await pipeline.execute(raise_on_error=False)
        if any(isinstance(answer, ResponseError) and "READONLY" in str(answer) for answer in answers):
            # A primary that was demoted keeps its connections; a new one may lead to its successor.
            await self._pool.disconnect(inuse_connections=False)
        held = answers.pop() if is_to_last else self._replicas
        each = iter(answers)
        last = [[next(each) for _ in waiting.commands][-1] for waiting in batch]
        return last if isinstance(held, int) and held >= self._replicas else self._doubted(batch, last, held)

    def _doubted(self, batch: "list[_Ask]", answers: list[Any], held: Any) -> list[Any]:
        """What was written counts as failed: its caller takes it back, or says that it is not recorded."""
        lost = RedisError(f"replicas={self._replicas} have to hold a write, and this one is held by: {held}")
        return [
            lost if waiting.writes and not isinstance(answer, Exception) else answer
            for waiting, answer in zip(batch, answers, strict=True)
        ]


class _Ask(Struct, eq=False):
    """Commands, and who waits for the answer to the last."""

    commands: tuple[Command, ...]
    writes: bool
    answer: "asyncio.Future[Any]"


async def _lifetime(pool: ConnectionPool) -> AsyncGenerator[None, None]:
    """Suspended until the loop ends, or the ledger is forgotten: a loop closes the asynchronous generators it has begun."""
    try:
        yield
    finally:
        with suppress(RedisError, OSError):
            await pool.disconnect()


# --- the URL ---------------------------------------------------------------------------------------------------------


def options_of(url: str) -> tuple[Options, str, int]:
    """What redis-py makes of the URL, between our defaults and what must not be changed; and `prefix` and `replicas`."""
    defaults = {
        "host": "localhost",
        "port": 6379,
        "db": 0,
        "socket_connect_timeout": 2.0,
        "socket_timeout": 5.0,
        "protocol": 2,
    }
    fixed = {"decode_responses": False, "retry": Retry(NoBackoff(), 0)}
    try:
        options: Options = {**defaults, **parse_url(re.sub("^valkey:", "redis:", url)), **fixed}
        prefix, replicas = options.pop("prefix", PREFIX), int(options.pop("replicas", 0))
        if replicas < 0:
            raise ValueError(f"replicas is {replicas}")
        pool: Any = ConnectionPool(**options)
        pool.make_connection()  # this does not connect: it looks at the options
    except (ValueError, TypeError, RedisError) as error:
        raise UsageError(
            "The URL of the ledger is not one that redis-py takes.",
            str(error),
            "for example redis://localhost:6379/0?prefix=shop:",
        ) from error
    return options, prefix, replicas
