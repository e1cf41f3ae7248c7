"""MCP and plain JSON-RPC on one connection of lines: what `app.run("stdio")` serves.

Who speaks what is told by the message. A message that names a method of MCP, or carries its envelope, is MCP's; any other is
plain JSON-RPC. An array is plain until a revision is negotiated, unless something of MCP is in it; after that it is MCP's,
and the revision decides. So both kinds of client are served with no option, and neither notices the other.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from msgspec import UNSET

from wirecall.errors import InvalidRequest, RpcError
from wirecall.jsonrpc import make_batch
from wirecall.mcp.revisions import HANDSHAKE, NOTIFICATIONS, REQUESTS, STATELESS
from wirecall.mcp.server import gate
from wirecall.mcp.server.asking import Id, Session
from wirecall.mcp.server.gate import Incoming, Response
from wirecall.mcp.server.hub import Listener
from wirecall.mcp.server.requests import described_params, described_session
from wirecall.mcp.server.results import Room, failure, success
from wirecall.mcp.server.server import Server
from wirecall.mcp.server.subscriptions import forward, session_listener
from wirecall.protocol import messages as frames
from wirecall.protocol.limits import Limits
from wirecall.protocol.messages import Envelope, Invalid
from wirecall.server.batch import run_batch
from wirecall.server.policy import ANONYMOUS

Answer = bytes | None
Plain = Callable[[bytes], "bytes | Coroutine[Any, Any, bytes | None] | None"]

_MODERN_ONLY = STATELESS[-1].requests - HANDSHAKE[-1].requests


class Wire:
    """The way back to the client, the same for all that it is told."""

    is_shared = True

    def __init__(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        self.stopping = asyncio.Event()
        self.replayed: list[Id] = []
        self._send = send

    async def send(self, message: bytes) -> None:
        await self._send(message)

    async def hang_up(self, retry: float) -> None:
        """There is nothing to come back to."""

    async def until_left(self, patience: float) -> None:
        await self.stopping.wait()


class Lines:
    """One client at the other end of a pipe."""

    def __init__(
        self, send: Callable[[bytes], Awaitable[None]], server: Server, plain: Plain, methods: Any, limits: Limits
    ) -> None:
        self._server = server
        self._plain = plain
        self._methods = methods  # what plain JSON-RPC serves
        self._limits = limits
        self._wire = Wire(send)
        self._session: Session | None = None
        self._calls: dict[Id, asyncio.Task[Any]] = {}  # of both eras: an id is in use once
        self._told: asyncio.Task[None] | None = None

    def handle(self, line: bytes) -> "bytes | Coroutine[Any, Any, bytes | None] | None":
        message = gate.read(line, self._limits)
        if isinstance(message, list):
            return self._array(line, message)
        if isinstance(message, Response):
            return self._answered(message)
        if self._is_plain(line, message):
            return self._plain(line)
        if isinstance(message, Invalid):
            return failure(message.id, message.error, self._revision)
        return self._one(message)

    def ending(self) -> None:
        """The client will send nothing more: streams end, and questions stay unanswered."""
        self._wire.stopping.set()
        if self._session is not None:
            self._session.abandon()

    async def aclose(self) -> None:
        """The client is gone, or we stop."""
        if self._told is not None:
            self._told.cancel()

    @property
    def _revision(self) -> Any:
        return self._session.revision if self._session else None

    # --- whose is it -------------------------------------------------------------------------------------------------

    def _is_plain(self, line: bytes, message: "Envelope | Invalid") -> bool:
        if isinstance(message, Invalid):  # for MCP; plain JSON-RPC has params by position and ids of other kinds
            read = frames.read(line, True, self._limits.bytes_in, self._limits.depth, self._limits.batch)
            if not isinstance(read, Envelope):
                return self._session is None
            message = read
        if _is_mcp(message):
            return False
        return self._session is None or message.method in self._methods

    # --- one message -------------------------------------------------------------------------------------------------

    async def _one(self, message: Envelope) -> Answer:
        try:
            session = self._session_of(message)
        except RpcError as error:
            return None if message.id is UNSET else failure(message.id, error, self._revision)
        if session is None:
            return self._initialized(message)
        return await self._server.answer(message, session, self._wire, caller=ANONYMOUS)

    def _session_of(self, message: Envelope) -> Session | None:
        """The session a message belongs to; None for an `initialize` that opens one."""
        if gate.has_envelope(message) or (self._session is None and message.method in _MODERN_ONLY):
            if message.id is UNSET:
                return Session(STATELESS[-1], calls=self._calls)
            return described_session(described_params(message), self._calls)
        if message.method == "initialize" and self._session is None:
            return None
        if message.method == "initialize":
            raise InvalidRequest("initialize was sent before, and is sent once")
        if self._session is None and message.method not in ("ping", "notifications/cancelled"):
            raise InvalidRequest("send initialize first, or the envelope of MCP 2026-07-28 in params._meta")
        if message.method == "notifications/initialized":
            self._tell_changes()
        return self._session or Session(HANDSHAKE[-1], calls=self._calls)

    def _initialized(self, message: Envelope) -> bytes:
        try:
            if message.id is UNSET:
                raise InvalidRequest("initialize is a request: it needs an id")
            session, result = self._server.opened(message)
        except RpcError as error:
            return failure(message.id, error, None)
        session.calls = self._calls
        self._session = session
        id: Any = message.id
        return success(id, result)

    def _answered(self, response: Response) -> Answer:
        if self._session is not None:
            self._session.answered(response.id, response.result, response.error)
        return None

    def _tell_changes(self) -> None:
        if self._told is None and self._session is not None:
            listener = session_listener(self._session)
            self._server.hub.add(listener)  # at once: a change in the same moment is one that it hears
            self._told = asyncio.get_running_loop().create_task(self._changes(listener))

    async def _changes(self, listener: Listener) -> None:
        try:
            await forward(listener, self._wire)
        finally:
            self._server.hub.remove(listener)

    # --- an array ----------------------------------------------------------------------------------------------------

    def _array(self, line: bytes, entries: list[Incoming]) -> "bytes | Coroutine[Any, Any, bytes | None] | None":
        if self._session is None and not any(isinstance(entry, Envelope) and _is_mcp(entry) for entry in entries):
            return self._plain(line)
        try:
            gate.check_array(entries, self._revision)
        except RpcError as error:
            return failure(None, error, self._revision)
        return self._several(gate.without_doubles(entries))

    async def _several(self, entries: list[Incoming]) -> Answer:
        assert self._session is not None
        begin = partial(self._entry, self._session, self._server.answers.room(self._session.revision))
        limit = self._limits.concurrency
        answers: list[Answer] = await run_batch(entries, begin, self._server.tools.is_command, concurrency=limit)
        owed = [answer for answer in answers if answer is not None]
        return make_batch(owed) if owed else None

    async def _entry(self, session: Session, room: Room, entry: Incoming, position: int) -> Answer:
        answer = await self._server.answer(entry, session, self._wire, caller=ANONYMOUS, position=position)
        return await room.kept(entry, answer)


def _is_mcp(message: Envelope) -> bool:
    is_named = message.method in REQUESTS or message.method in NOTIFICATIONS or message.method.startswith("notifications/")
    return is_named or gate.has_envelope(message)
