"""Notifications of a server to a client of plain JSON-RPC, and the functions that receive them.

1. Notifications are handled one after another, in the order of arrival. A function that waits delays
   the notifications after it, and no call.
2. An exception in a function is logged, and the next notification is handled.
3. At most `MOST` notifications wait. Further ones are dropped, and the log says so.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any, TypeAlias

from msgspec import Raw

from wirecall.aio import cancel_all
from wirecall.errors import UsageError
from wirecall.logs import logger
from wirecall.protocol.messages import Arrived, decode_value

# Receives the params of a notification; None if it has none.
Listener: TypeAlias = Callable[[Any], object]

# Notifications that wait for a slow function.
MOST = 10_000


class Pushes:
    """The functions of one client that receive notifications, and those that wait for them."""

    def __init__(self) -> None:
        self._listeners: dict[str, list[Listener]] = {}
        self._waiting: deque[tuple[str, Listener, Any]] = deque()
        # Handles the waiting notifications, after a function that waits.
        self._task: asyncio.Task[None] | None = None
        self._is_dropping = False

    def on(self, method: object, listener: Listener) -> None:
        """Call a function with the params of each notification of this name."""
        if not isinstance(method, str) or not method:
            raise UsageError(
                f"on({method!r}, ...): expected the name of a notification, got {method!r}.",
                fix='use client.on("price.changed", show)',
            )
        if not callable(listener):
            raise UsageError(
                f"on({method!r}, ...): expected a function, got {type(listener).__name__}.",
                fix=f"use client.on({method!r}, show)",
            )
        self._listeners.setdefault(method, []).append(listener)

    def take(self, message: Arrived) -> bool:
        """Handle a notification; return whether a function receives it."""
        listeners = self._listeners.get(str(message.method))
        if not listeners:
            return False
        params: Any = None
        if isinstance(message.params, Raw):
            params = decode_value(message.params)
        for listener in listeners:
            if len(self._waiting) >= MOST:
                self._drop()
            else:
                self._waiting.append((str(message.method), listener, params))
        if self._task is None:
            self._run()
        return True

    async def aclose(self) -> None:
        """Handle no more notifications."""
        self._waiting.clear()
        task = self._task
        if task is not None and task is not asyncio.current_task():
            await cancel_all(task)

    def _run(self) -> None:
        """Handle what waits, until a function waits itself: a task continues there."""
        while self._waiting:
            self._is_dropping = False
            method, listener, params = self._waiting.popleft()
            try:
                coming = listener(params)
            except Exception as error:
                _log(method, error)
                continue
            if isawaitable(coming):
                self._task = asyncio.get_running_loop().create_task(self._continue(method, coming))
                return

    async def _continue(self, method: str, coming: Awaitable[object]) -> None:
        try:
            await coming
        except Exception as error:
            _log(method, error)
        finally:
            self._task = None
        self._run()

    def _drop(self) -> None:
        if not self._is_dropping:
            self._is_dropping = True
            logger.error("%d notifications wait for a slow function; more are dropped", MOST)


def _log(method: str, error: Exception) -> None:
    logger.error("the function for notifications %r failed", method, exc_info=error)
