"""The pipe of a child process without the process: lines straight into an app, and its lines back.

The task that writes a line serves it: a task per line would cost as much as the rest of the way. So `write` returns when the
line is answered, cancelling it cancels the call, and closing leaves calls in flight to the deadlines they have.
"""

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING

from wirecall.errors import CallFailed, NotSent

if TYPE_CHECKING:
    from wirecall.transports.stdio import Connect, Connection


class MemoryPipe:
    """Lines both ways; `connect` is given the way back and returns the connection that serves them."""

    def __init__(self, connect: "Connect") -> None:
        self._connect = connect
        self._connection: Connection | None = None
        self._on_line: Callable[[bytes], None] = lambda _line: None

    async def open(self, on_line: Callable[[bytes], None], on_end: Callable[[CallFailed], None]) -> None:
        """Connect. An app does not end by itself, so `on_end` is not needed."""
        self._on_line = on_line
        self._connection = self._connect(self._send)

    async def write(self, line: bytes) -> None:
        """Write one line. Its answer comes by `on_line` before this returns."""
        if self._connection is None:
            raise NotSent("the client is closed")
        answer = self._connection.handle(line)
        if isinstance(answer, Coroutine):
            answer = await answer
        if answer is not None:
            self._on_line(answer)

    async def aclose(self) -> None:
        """Ask what is in flight to end."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.aclose()

    async def _send(self, line: bytes) -> None:
        self._on_line(line)
