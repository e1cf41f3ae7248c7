"""MCP and plain JSON-RPC on one connection of lines: `app.run("stdio")` serves it.

The message shows which of the two it is. One that names a method of MCP, or carries its envelope,
is MCP; any other is plain JSON-RPC. An array is plain until a revision is negotiated, unless it
contains an MCP message; after that it is MCP, and the revision decides. So the server needs no
option to serve both kinds of client, and neither notices the other.

A client of plain JSON-RPC cancels a call with the notification `$/cancelRequest`, as in the Language
Server Protocol. The call is answered with an error of code -32800.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from msgspec import UNSET, Struct

from wirecall.aio import Signal
from wirecall.errors import Gone, InvalidRequest, RpcError
from wirecall.jsonrpc import make_batch
from wirecall.limits import Limits
from wirecall.mcp.revisions import HANDSHAKE, STATELESS, Revision
from wirecall.mcp.server import messages
from wirecall.mcp.server.changes import Listener, forward, session_listener
from wirecall.mcp.server.messages import ClientAnswer, Id, Incoming
from wirecall.mcp.server.peer import Session, described_session
from wirecall.mcp.types import CallTool, Params
from wirecall.protocol import messages as jsonrpc
from wirecall.protocol.messages import Envelope, Invalid, encode, failure
from wirecall.protocol.receipt import Receipt
from wirecall.protocol.sender import ANONYMOUS, Sender
from wirecall.server.call import BATCH, shape_of
from wirecall.server.method import Method

if TYPE_CHECKING:
    from wirecall.mcp.server.server import Server

Answer: TypeAlias = "bytes | Coroutine[Any, Any, bytes | None] | None"
Plain: TypeAlias = Callable[[bytes, Sender], Answer]

# The notification that cancels a call of plain JSON-RPC, and the code of its answer (Language Server
# Protocol 3.17, "Cancellation Support").
CANCEL = "$/cancelRequest"
CANCELLED = -32800

_MODERN_ONLY = STATELESS[-1].requests - HANDSHAKE[-1].requests


class _Cancel(Struct):
    """The params of `$/cancelRequest`."""

    id: int | str


_decode_cancel = msgspec.json.Decoder(_Cancel).decode


class PipeOutlet:
    """Sends all messages to the client, on one pipe."""

    is_shared = True
    # The answers of an array come as an array.
    is_stream = False

    def __init__(
        self,
        send: Callable[[bytes], Awaitable[None]],
        stopping: Signal,
    ) -> None:
        self.stopping = stopping
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
        methods: Mapping[str, Method],
        limits: Limits,
        link: str,
        caller: str = ANONYMOUS,
    ) -> None:
        self._server = server
        # The name of the client at the other end of the pipe.
        self._link = link
        self._caller = caller
        self._failure = server.answers.failure
        self._plain = plain
        # The methods that plain JSON-RPC serves, by name.
        self._methods = methods
        self._limits = limits
        self._send = send
        self._stopping = Signal()
        self._session: Session | None = None
        # Calls of both eras: an id is in use once.
        self._calls: dict[Id, asyncio.Task[object]] = {}
        # Calls of plain JSON-RPC that wait, and those of them that the client has cancelled.
        self._waiting: dict[object, asyncio.Task[object]] = {}
        self._cancelled: set[object] = set()
        # Sends changes to the client, once it has said that it is initialized.
        self._changes: asyncio.Task[None] | None = None

    def handle(self, line: bytes, receipt: Receipt) -> Answer:
        """Return the answer to one line, or a coroutine that returns it.

        `receipt` tracks its delivery.
        """
        sender = Sender(self._caller, link=self._link, receipt=receipt, push=self._push)
        message = messages.read(line, self._limits)
        if isinstance(message, Envelope) and self._server.is_request(message.method):
            return self._answer(message, sender)
        if isinstance(message, list):
            if self._session is None and not any(
                isinstance(entry, Envelope) and self._is_mcp(entry) for entry in message
            ):
                return self._plain(line, sender)
            try:
                entries = messages.admitted(message, self._revision)
            except RpcError as error:
                self._server.note_refusal(BATCH, None, error, sender)
                return self._failure(None, error, self._revision)
            return self._answer_array(entries, sender)
        if isinstance(message, ClientAnswer):
            if self._session is not None:
                self._session.answered(message.id, message.result, message.error)
            return None
        # A message that MCP refuses may be plain JSON-RPC, which has params by position and other
        # ids.
        read: object = message
        if isinstance(message, Invalid):
            read = jsonrpc.read(line, self._limits)
        is_plain = self._session is None
        if isinstance(read, Envelope):
            is_plain = not self._is_mcp(read) and (is_plain or read.method in self._methods)
        if is_plain:
            return self._answer_plain(line, sender, read)
        if isinstance(message, Invalid):
            self._server.note_refusal(shape_of(line), message.id, message.error, sender)
            return self._failure(message.id, message.error, self._revision)
        return self._answer(message, sender)

    async def _push(self, message: bytes) -> None:
        """Send a notification of plain JSON-RPC. A client that has left gets none."""
        with suppress(Gone):
            await self._send(message)

    def _answer_plain(self, line: bytes, sender: Sender, read: object) -> Answer:
        """Return the answer to a single message of plain JSON-RPC."""
        if not isinstance(read, Envelope):
            return self._plain(line, sender)
        if read.method == CANCEL and read.id is UNSET and CANCEL not in self._methods:
            self._cancel(read)
            return None
        answer = self._plain(line, sender)
        if answer is None or isinstance(answer, bytes) or read.id is UNSET:
            return answer
        return self._cancellable(answer, read)

    def _cancel(self, message: Envelope) -> None:
        """Cancel a call that waits. A wrong or late notification has no effect."""
        if message.params is UNSET:
            return
        try:
            id = _decode_cancel(message.params).id
        except (msgspec.DecodeError, RecursionError):
            return
        task = self._waiting.get(id)
        if task is not None and id not in self._cancelled:
            self._cancelled.add(id)
            task.cancel()

    async def _cancellable(
        self, coming: Coroutine[Any, Any, bytes | None], message: Envelope
    ) -> bytes | None:
        """Await a call that the client may cancel by its id."""
        id = message.id
        assert id is not UNSET
        task = asyncio.current_task()
        # Of two calls with one id, the first can be cancelled.
        if task is None or id in self._waiting:
            return await coming
        self._waiting[id] = task
        try:
            return await coming
        except asyncio.CancelledError:
            # The connection may end the call as well.
            if id not in self._cancelled or task.cancelling() > 1:
                raise
        finally:
            del self._waiting[id]
            if id in self._cancelled:
                self._cancelled.discard(id)
                task.uncancel()
        return encode(failure(id, self._cancelled_error(message.method)))

    def _cancelled_error(self, name: str) -> RpcError:
        """Return the answer to a call that its client has cancelled."""
        ran = "no"
        method = self._methods.get(name)
        if method is not None and method.is_command:
            ran = "unknown"
        return RpcError(CANCELLED, "Request cancelled", {"type": "cancelled", "ran": ran})

    def ending(self) -> None:
        """End streams and open questions: the client will not send anything more."""
        self._stopping.set()
        if self._session is not None:
            self._session.abandon()

    async def aclose(self) -> None:
        """Stop sending changes: the client has left, or the server stops."""
        if self._changes is not None:
            self._changes.cancel()

    @property
    def _revision(self) -> Revision | None:
        """The negotiated revision; None before `initialize`."""
        return None if self._session is None else self._session.revision

    def _answer(self, message: Envelope, sender: Sender) -> Answer:
        params: Params | None = None
        try:
            # A message that describes itself has its own session (2026-07-28).
            if message.id is not UNSET:
                params = self._described(message)
            if params is not None:
                session = described_session(params, self._calls)
            elif message.id is UNSET and self._is_described(message):
                session = Session(STATELESS[-1], calls=self._calls)
            # Any other belongs to the session of the connection, which `initialize` opens.
            elif message.method == "initialize":
                return self._initialize(message)
            else:
                session = self._known_session(message)
                if session is self._session:
                    params = self._server.params_of(message)
        except RpcError as error:
            if message.id is UNSET:
                return None
            return self._failure(message.id, error, self._revision)
        if message.method == "notifications/initialized" and session is self._session:
            self._send_changes(session)
        # A plain function that reads answers at once; anything else may wait, and send messages
        # before it.
        id = message.id
        revision = session.revision
        if isinstance(params, CallTool) and isinstance(id, (int, str)):
            try:
                ready = self._server.calls.at_once(id, params, revision)
            except RpcError as error:
                return self._failure(id, error, revision)
            if isinstance(ready, bytes):
                return ready
            if ready is not None:
                return self._or_error(ready, id, revision)
        outlet = PipeOutlet(self._send, self._stopping)
        return self._server.answer(message, session, outlet, sender, params=params)

    def _initialize(self, message: Envelope) -> Answer:
        """Open the session of the connection."""
        if self._session is not None:
            raise InvalidRequest("initialize was sent before: send it once")
        if message.id is UNSET:
            refusal = InvalidRequest("initialize is a request: it needs an id")
            return self._failure(None, refusal, None)
        if self._server.waits_to_open:
            return self._open_later(message)
        self._session, answer = self._server.opened(message)
        self._session.calls = self._calls
        return answer

    async def _open_later(self, message: Envelope) -> bytes:
        """Open the session of the connection after the words of another server."""
        try:
            self._session, answer = await self._server.open_session(message, self._caller)
        except RpcError as error:
            return self._failure(message.id, error, None)
        self._session.calls = self._calls
        return answer

    def _known_session(self, message: Envelope) -> Session:
        """Return the session of the connection; `InvalidRequest` if the message needs one first."""
        if self._session is not None:
            return self._session
        if message.method in ("ping", "notifications/cancelled"):
            return Session(HANDSHAKE[-1], calls=self._calls)
        raise InvalidRequest(
            "send initialize first, or the envelope of MCP 2026-07-28 in params._meta"
        )

    def _send_changes(self, session: Session) -> None:
        """Send changes to the client, until it leaves or the server stops."""
        if self._changes is not None:
            return
        listener = session_listener(session)
        self._server.hub.add(listener)  # at once, so that the client does not miss a change
        self._changes = asyncio.get_running_loop().create_task(self._forward(listener))

    async def _forward(self, listener: Listener) -> None:
        try:
            await forward(listener, PipeOutlet(self._send, self._stopping))
        finally:
            self._server.hub.remove(listener)

    def _described(self, message: Envelope) -> Params | None:
        """Return the params of a request that describes itself (2026-07-28).

        Returns None if it does not.
        """
        must = self._is_newer(message)
        if not must and (
            message.params is UNSET or bytes(message.params).find(b"protocolVersion") < 0
        ):
            return None
        try:
            return self._server.described(message)
        except RpcError:
            # Checked last, since it decodes the params again and nearly all envelopes are right.
            if must or messages.has_envelope(message):
                raise
            return None

    def _is_described(self, message: Envelope) -> bool:
        """Return whether a notification belongs to 2026-07-28."""
        return self._is_newer(message) or messages.has_envelope(message)

    def _is_newer(self, message: Envelope) -> bool:
        """Return whether a message must describe itself: only 2026-07-28 has its method."""
        return self._session is None and message.method in _MODERN_ONLY

    async def _answer_array(self, entries: list[Incoming], sender: Sender) -> bytes | None:
        assert self._session is not None
        outlet = PipeOutlet(self._send, self._stopping)
        answers = await self._server.answer_array(entries, self._session, outlet, sender)
        if not answers:
            return None
        return make_batch(answers)

    def _is_mcp(self, message: Envelope) -> bool:
        is_named = self._server.is_request(message.method) or message.method.startswith(
            "notifications/"
        )
        return is_named or messages.has_envelope(message)

    async def _or_error(self, coming: Awaitable[bytes], id: Id, revision: Revision) -> bytes:
        try:
            return await coming
        except RpcError as error:
            return self._failure(id, error, revision)
