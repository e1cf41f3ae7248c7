"""MCP and plain JSON-RPC on one connection of lines: `app.run("stdio")` serves it.

The message tells which of the two it is. One that names a method of MCP, or carries its envelope, is MCP's; any other is
plain JSON-RPC. An array is plain until a revision is negotiated, unless something of MCP is in it; after that it is MCP's,
and the revision decides. So both kinds of client are served with no option, and neither notices the other.
"""

import asyncio
from collections.abc import Awaitable, Callable, Container, Coroutine
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import UNSET

from wirecall.errors import InvalidRequest, RpcError
from wirecall.jsonrpc import make_batch
from wirecall.mcp.revisions import HANDSHAKE, STATELESS, Revision
from wirecall.mcp.server import messages
from wirecall.mcp.server.changes import forward, session_listener
from wirecall.mcp.server.messages import ClientAnswer, Id, Incoming
from wirecall.mcp.server.peer import Session, described_session
from wirecall.mcp.types import CallTool, Params
from wirecall.protocol import messages as jsonrpc
from wirecall.protocol.messages import Envelope, Invalid, Limits, Sending
from wirecall.server.call import ANONYMOUS
from wirecall.stepping import Signal

if TYPE_CHECKING:
    from wirecall.mcp.server.server import Server

Answer: TypeAlias = "bytes | Coroutine[Any, Any, bytes | None] | None"
Plain: TypeAlias = Callable[[bytes, Sending], Answer]

PIPE = "pipe"  # the one peer of a pipe

_MODERN_ONLY = STATELESS[-1].requests - HANDSHAKE[-1].requests


class PipeOutlet:
    """Sends all messages to the client, on one pipe."""

    is_shared = True
    is_stream = False  # the answers of an array come as an array
    peer = PIPE

    def __init__(self, send: Callable[[bytes], Awaitable[None]], stopping: Signal, sending: Sending) -> None:
        self.stopping = stopping
        self.sending = sending
        self.replayed: list[Id] = []
        self._send = send

    async def send(self, message: bytes) -> None:
        await self._send(message)

    async def hang_up(self, retry: float) -> None:
        """Do nothing: a pipe cannot be opened again."""

    async def until_left(self, patience: float) -> None:
        await self.stopping.wait()


class StdioConnection:
    """One client at the other end of a pipe."""

    def __init__(
        self,
        send: Callable[[bytes], Awaitable[None]],
        server: "Server",
        plain: Plain,
        methods: Container[str],
        limits: Limits,
        caller: str = ANONYMOUS,
    ) -> None:
        self._server = server
        self._caller = caller
        self._failure = server.answers.failure
        self._plain = plain
        self._methods = methods  # what plain JSON-RPC serves
        self._limits = limits
        self._send = send
        self._stopping = Signal()
        self._session: Session | None = None
        self._calls: dict[Id, asyncio.Task[object]] = {}  # of both eras: an id is in use once
        self._told: asyncio.Task[None] | None = None

    def handle(self, line: bytes, sending: Sending) -> Answer:
        """Return the answer to one line, or a coroutine that returns it. `sending` is the way of that answer."""
        message = messages.read(line, self._limits)
        if isinstance(message, Envelope) and self._server.is_request(message.method):
            return self._answer(message, sending)
        revision = None if self._session is None else self._session.revision
        if isinstance(message, list):
            if self._session is None and not any(isinstance(entry, Envelope) and self._is_mcp(entry) for entry in message):
                return self._plain(line, sending)
            try:
                entries = messages.admitted(message, revision)
            except RpcError as error:
                return self._failure(None, error, revision)
            return self._answer_array(entries, sending)
        if isinstance(message, ClientAnswer):
            if self._session is not None:
                self._session.answered(message.id, message.result, message.error)
            return None
        # What MCP refuses may be plain JSON-RPC, which has params by position and ids of other kinds.
        read: object = message
        if isinstance(message, Invalid):
            read = jsonrpc.read(line, self._limits)
        is_plain = self._session is None
        if isinstance(read, Envelope):
            is_plain = not self._is_mcp(read) and (is_plain or read.method in self._methods)
        if is_plain:
            return self._plain(line, sending)
        if isinstance(message, Invalid):
            return self._failure(message.id, message.error, revision)
        return self._answer(message, sending)

    def ending(self) -> None:
        """End streams and open questions: the client will not send anything more."""
        self._stopping.set()
        if self._session is not None:
            self._session.abandon()

    async def aclose(self) -> None:
        """Stop sending changes: the client has left, or the server stops."""
        if self._told is not None:
            self._told.cancel()

    def _answer(self, message: Envelope, sending: Sending) -> Answer:
        params: Params | None = None
        try:
            # A message that describes itself has a session of its own (2026-07-28).
            if message.id is not UNSET and (params := self._described(message)) is not None:
                session = described_session(params, self._calls)
            elif message.id is UNSET and (self._is_newer(message) or messages.has_envelope(message)):
                session = Session(STATELESS[-1], calls=self._calls)
            # Any other belongs to the session of the connection, which `initialize` opens.
            elif message.method == "initialize":
                if self._session is not None:
                    raise InvalidRequest("initialize was sent before: send it once")
                if message.id is UNSET:
                    return self._failure(None, InvalidRequest("initialize is a request: it needs an id"), None)
                self._session, answer = self._server.opened(message)
                self._session.calls = self._calls
                return answer
            elif self._session is not None:
                session, params = self._session, self._server.params_of(message)
            elif message.method in ("ping", "notifications/cancelled"):
                session = Session(HANDSHAKE[-1], calls=self._calls)
            else:
                raise InvalidRequest("send initialize first, or the envelope of MCP 2026-07-28 in params._meta")
        except RpcError as error:
            revision = None if self._session is None else self._session.revision
            return None if message.id is UNSET else self._failure(message.id, error, revision)
        if message.method == "notifications/initialized" and session is self._session and self._told is None:
            listener = session_listener(session)
            self._server.hub.add(listener)  # at once: the client hears of a change in the same moment

            async def tell() -> None:
                try:
                    await forward(listener, PipeOutlet(self._send, self._stopping, Sending()))
                finally:
                    self._server.hub.remove(listener)

            self._told = asyncio.get_running_loop().create_task(tell())
        # A plain function that reads gives its answer at once; anything else may wait, and may send something before it.
        id, revision = message.id, session.revision
        if isinstance(params, CallTool) and isinstance(id, (int, str)):
            try:
                ready = self._server.calls.at_once(id, params, revision)
            except RpcError as error:
                return self._failure(id, error, revision)
            if ready is not None:
                return ready if isinstance(ready, bytes) else self._or_error(ready, id, revision)
        outlet = PipeOutlet(self._send, self._stopping, sending)
        return self._server.answer(message, session, outlet, caller=self._caller, params=params)

    def _described(self, message: Envelope) -> Params | None:
        """Return the params of a request that describes itself (2026-07-28); None if it does not."""
        must = self._is_newer(message)
        if not must and (message.params is UNSET or bytes(message.params).find(b"protocolVersion") < 0):
            return None
        try:
            return self._server.described(message)
        except RpcError:
            # Asked second, since it decodes the params once more: nearly all envelopes are right.
            if must or messages.has_envelope(message):
                raise
            return None

    def _is_newer(self, message: Envelope) -> bool:
        """Return whether a message has to describe itself: its method is one of 2026-07-28 alone."""
        return self._session is None and message.method in _MODERN_ONLY

    async def _answer_array(self, entries: list[Incoming], sending: Sending) -> bytes | None:
        assert self._session is not None
        outlet = PipeOutlet(self._send, self._stopping, sending)
        answers = await self._server.answer_array(entries, self._session, outlet, caller=self._caller)
        return make_batch(answers) if answers else None

    def _is_mcp(self, message: Envelope) -> bool:
        is_named = self._server.is_request(message.method) or message.method.startswith("notifications/")
        return is_named or messages.has_envelope(message)

    async def _or_error(self, coming: Awaitable[bytes], id: Id, revision: Revision) -> bytes:
        try:
            return await coming
        except RpcError as error:
            return self._failure(id, error, revision)
