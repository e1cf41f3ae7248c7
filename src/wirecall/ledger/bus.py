"""What the buses of all stores share: a task that listens, and listens again after a failure."""

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from wirecall.aio import start
from wirecall.ledger.base import Receive
from wirecall.logs import logger

# Seconds before a connection that was lost is made again, at first and at most.
SHORTEST = 0.1
LONGEST = 5.0
# Seconds without a message after which the server is asked whether it is there.
QUIET = 15.0


class Listening:
    """Listens in a task until it is closed.

    A store says how in `_messages`: it yields None as soon as every message will arrive,
    then each message, and raises when the connection is lost.
    """

    def __init__(self, where: str, receive: Receive) -> None:
        self._where = where
        self._receive = receive
        self._task = start(asyncio.get_running_loop(), self._listen())

    async def aclose(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    def _messages(self) -> AsyncGenerator[str | None, None]:
        raise NotImplementedError

    async def _listen(self) -> None:
        pause = SHORTEST
        is_reported = False
        while True:
            try:
                async with aclosing(self._messages()) as messages:
                    async for message in messages:
                        pause = SHORTEST
                        is_reported = False
                        self._receive(message)
            except Exception as error:  # drivers raise more than their own errors
                if not is_reported:
                    logger.warning(
                        "messages of other processes do not arrive from %s: %s",
                        self._where,
                        " ".join(str(error).split()) or type(error).__name__,
                    )
                is_reported = True
            # Many processes must not come back to a server at the same moment.
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, LONGEST)
