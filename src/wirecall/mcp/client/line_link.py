"""A client's way to a server of MCP at the other end of a pipe: a child process, or an app in memory.

1. A message is a line. Answers find their exchange by id, in whatever order they come; the rest is heard.
2. A pipe that has ended is opened anew by the next message. Where there is a handshake, the new one is greeted first.
3. Who stops waiting says so with `notifications/cancelled`, in every revision.
4. Arrays are taken where 2025-03-26 has them, and nowhere else.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from wirecall.client.exchange import Exchange
from wirecall.client.links import LineLink, Pipe
from wirecall.errors import CallFailed
from wirecall.logs import logger
from wirecall.mcp.client.headers import Marks
from wirecall.mcp.revisions import Revision
from wirecall.protocol.messages import encode
from wirecall.protocol.replies import Arrived, Message, read_messages


class McpLineLink(LineLink):
    """Lines to one server, and lines from it."""

    is_pipe = True
    older = None  # there is no other way

    def __init__(self, pipe: Callable[[], Pipe]) -> None:
        super().__init__(pipe)
        self.revision: Revision | None = None  # None: nothing is agreed yet
        self.heard: Callable[[Arrived], None] = lambda _message: None
        self.renew: Callable[[], Awaitable[None]] | None = None
        self.marks: Callable[[str], Marks] = lambda _tool: {}  # there are no headers to put them in
        self._greeted: Pipe | None = None
        self._greeting = asyncio.Lock()
        self._cancels: set[asyncio.Task[None]] = set()

    async def aclose(self) -> None:
        for task in self._cancels:
            task.cancel()
        await asyncio.gather(*self._cancels, return_exceptions=True)
        await super().aclose()

    async def listen(self) -> None:
        """What the server says on its own comes by the same pipe. The handshake with this one is done."""
        self._greeted = self._pipe

    # --- messages ----------------------------------------------------------------------------------------------------

    async def exchange(self, exchange: Exchange) -> None:
        """One message and its answers, to a server that has been greeted."""
        if self.renew is not None and (self._pipe is None or self._pipe is not self._greeted):
            async with self._greeting:
                if await self._connected() is not self._greeted:
                    await self._greet(self.renew)
        await self.post(exchange)

    async def _greet(self, renew: Callable[[], Awaitable[None]]) -> None:
        try:
            await renew()
        except BaseException:  # half a greeting cannot be gone on with: the next one begins with another pipe
            if self._pipe is not None:
                self._over.append(self._pipe)
                self._pipe = None
            raise

    async def post(self, exchange: Exchange) -> bool:
        """The message as it is. Never True: there are no sessions that could be gone."""
        try:
            await self._send(exchange)
        except asyncio.CancelledError:
            self._cancel(exchange)
            raise
        return False

    async def send(self, message: bytes) -> None:
        """An answer to the server, or another message that is owed nothing."""
        await (await self._connected()).write(message)

    def _cancel(self, exchange: Exchange) -> None:
        """2024-11-05, cancellation: `initialize` must not be cancelled."""
        if self._pipe is None or any(entry.method == "initialize" for entry in exchange.entries):
            return
        for id in exchange.open:
            params = {"requestId": id, "reason": "nobody waits for the answer"}
            message = encode({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params})
            task = asyncio.get_running_loop().create_task(self._try_to_write(self._pipe, message))
            self._cancels.add(task)
            task.add_done_callback(self._cancels.discard)

    async def _try_to_write(self, pipe: Pipe, message: bytes) -> None:
        try:
            await pipe.write(message)
        except CallFailed as error:
            logger.debug("a cancellation was not told: %s", error)

    # --- what comes back --------------------------------------------------------------------------------------------------

    def _line(self, line: bytes) -> None:
        in_array, messages = read_messages(line)
        odd = in_array and not (self.revision and self.revision.has_arrays)
        for message in messages:
            if isinstance(message, Arrived) and not message.is_answer and not self._is_echo(message):
                self.heard(message)
            else:
                self._answer(message, odd)

    def _is_echo(self, message: Arrived) -> bool:
        """A request of ours that comes back. Of what a client asks, a server may ask `ping` alone, under any id."""
        id: Any = message.id
        ours = self._open[id].known.get(id) if id in self._open else None
        return ours is not None and message.method == ours.method != "ping"

    def _answer(self, message: Message, odd: bool) -> None:
        id: Any = message.id
        exchange = self._open.get(id) if id.__class__ in (int, float) else None
        if exchange is None:
            exchange = self._only()
            logger.debug("a line that answers no call: %.200r", message)
        if exchange is None:
            return
        exchange.take(message, odd)
        end = self._ends[exchange]
        if exchange.is_done and not end.done():
            end.set_result(None)

    def _only(self) -> Exchange | None:
        """If one message alone is under way, what answers nobody is meant for it."""
        calls = [exchange for exchange in self._ends if not _is_listening(exchange)]
        return calls[0] if len(calls) == 1 else None


def _is_listening(exchange: Exchange) -> bool:
    return exchange.entries[0].method == "subscriptions/listen"
