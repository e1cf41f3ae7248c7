"""A pipe to a server behind the gateway.

A client of a pipe ignores a line that answers no call, since some servers print text there. In
front of a server that may have acted, an answer under an id that was never asked ends the only call
that waits for one: its own answer will not come.
"""

from collections.abc import Callable
from typing import Any

from wirecall.client.exchange import Exchange
from wirecall.client.links import Pipe
from wirecall.errors import BadAnswer
from wirecall.mcp.client.links import McpLineLink
from wirecall.protocol.messages import Arrived, Received


class RelayLineLink(McpLineLink):
    """Lines to one server, and lines from it."""

    def __init__(self, pipe: Callable[[], Pipe], max_bytes: int) -> None:
        super().__init__(pipe, max_bytes)
        # The highest id that was sent. Ids are counted.
        self.last_id = 0
        # The last line that cannot be a message: some programs print text there.
        self.printed = b""

    @property
    def is_open(self) -> bool:
        """Whether there is a pipe."""
        return self._pipe is not None

    @property
    def is_ready(self) -> bool:
        """Whether the next message needs neither another pipe nor a handshake."""
        pipe = self._pipe
        return pipe is not None and (self.renew is None or pipe is self._greeted)

    def _line(self, line: bytes) -> None:
        if line[:1] not in b"{[":
            self.printed = line
        super()._line(line)

    def _take(self, message: Received, in_array: bool) -> None:
        id: Any = message.id
        if isinstance(message, Arrived) and message.is_answer and not self._was_asked(id):
            self._fail_only(f"the server answered id {id!r:.100}, which was not asked")
            return
        super()._take(message, in_array)

    def _was_asked(self, id: object) -> bool:
        """Return whether a request with this id was sent, answered or not.

        An error without an id answers the message that could not be read.
        """
        if not isinstance(id, (int, float)):
            return not isinstance(id, str)
        return 0 < id <= self.last_id

    def _fail_only(self, reason: str) -> None:
        exchange: Exchange | None = self._only_exchange()
        if exchange is None:
            return
        end = self._ends[exchange]
        if not end.done():
            end.set_exception(BadAnswer(reason))
