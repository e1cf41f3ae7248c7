"""`ws://HOST/rpc`: plain JSON-RPC over a WebSocket. Each frame of text is one message or one array.

1. The upgrade is a request: the guard, the credentials and the limits of HTTP decide about it. One
   rule is stricter. A page can read what a WebSocket sends it, so only a page of the server's own
   origin, or of a listed one, may connect (`Guard.check_page`).
2. Messages begin in the order of arrival, and do not block each other. As on stdio, one task leads:
   a call that waits keeps the task that it began in, and a new task leads.
3. The leader reads when a place is free and when the client reads the answers, so a client that
   sends more than it reads has to wait.
4. A connection ends in one of these ways:

       the client leaves       calls in flight are cancelled, and their answers are lost
       1001 going away         the server stops; calls in flight are answered first
       1003 unsupported data   a binary frame
       1008 policy violation   the token of the caller has expired
       1009 too big            a message beyond `Limits.bytes_in`
"""

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from msgspec import UNSET

from wirecall.aio import beside, start, wake
from wirecall.errors import Gone, InternalError, InvalidRequest, RpcError
from wirecall.limits import Limits
from wirecall.logs import logger
from wirecall.protocol import messages as frames
from wirecall.protocol.messages import Invalid
from wirecall.protocol.receipt import Receipt
from wirecall.protocol.sender import Sender
from wirecall.transports.arrivals import WatchedAnswer
from wirecall.transports.request import HttpError, HttpRequest

if TYPE_CHECKING:
    from wirecall.server.identity import Identity
    from wirecall.transports.rpc_endpoint import Handle

SocketEndpoint: TypeAlias = Callable[["WebSocket"], Coroutine[Any, Any, None]]
# Returns the seconds for which the token of a caller is still accepted; None: it does not expire.
Lasts: TypeAlias = Callable[["Identity"], float | None]

GOING_AWAY = 1001
UNSUPPORTED = 1003
POLICY = 1008
TOO_BIG = 1009

# Seconds between two pings of a server that sends them.
PING_EVERY = 20.0
# Seconds for the frame that closes a connection.
CLOSE_TIME = 1.0


class WebSocket(HttpRequest):
    """A request for a WebSocket, and the connection that it becomes.

    ASGI and RSGI implement the methods, each in its own way.
    """

    is_websocket = True

    @abstractmethod
    async def _accept(self) -> None:
        """Answer the request: from now on it is a WebSocket."""

    @abstractmethod
    async def receive(self) -> str | bytes | None:
        """Return the next message: a string, or the bytes of a binary frame.

        Return None if the connection has ended.
        """

    @abstractmethod
    async def send(self, text: str) -> None:
        """Send a message, and wait while the client does not read; Gone if it has left."""

    @abstractmethod
    async def _close(self, code: int, reason: str) -> None:
        """Send the frame that ends the connection."""

    async def accept(self) -> None:
        """Accept the connection; HttpError 503 if too many are open."""
        self.enter_stream()
        self.started = True
        await self._accept()

    async def close(self, code: int, reason: str) -> None:
        """End the connection with a code."""
        with contextlib.suppress(Gone, OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_TIME):
                await self._close(code, reason)
            self._has_ended = True

    def has_closed(self) -> None:
        """Note that the client has ended the connection: nothing has to be cut."""
        self._has_ended = True

    @property
    def limits(self) -> Limits:
        return self._server.limits

    def watched(self, receipt: Receipt) -> WatchedAnswer | None:
        """Watch the connection for the answer to one message, if the system reports arrivals."""
        client = self.address()
        if client is None:
            return None
        return self._server.arrivals.attend(
            client, receipt, is_forwarded=self.headers.is_forwarded()
        )


def rpc_socket(handle: "Handle", lasts: Lasts | None = None) -> SocketEndpoint:
    """Return the endpoint that passes each message of a WebSocket to `handle`."""

    async def rpc(socket: WebSocket) -> None:
        await socket.accept()
        await _Session(socket, handle).serve(lasts)

    return rpc


class _End(NamedTuple):
    """Why a connection ends: the code and the reason that the client gets."""

    code: int
    reason: str
    # Whether calls in flight are answered first.
    drains: bool = False


# The client has ended the connection.
_LEFT = _End(0, "")


class _Answer:
    """The delivery of the answer to one message."""

    __slots__ = ("arrival", "receipt", "session")

    def __init__(self, session: "_Session") -> None:
        self.session = session
        self.arrival: WatchedAnswer | None = None
        self.receipt = Receipt(self._watch, session=session)

    def _watch(self) -> None:
        """Watch the connection: a call needs to know whether its answer arrives."""
        self.arrival = self.session.socket.watched(self.receipt)

    def written(self) -> None:
        """Note that the server has the answer. If the system reports arrivals, wait for that."""
        if self.arrival is None:
            self.receipt.written()
            return
        self.session.handed.add(self.arrival)
        self.arrival.hand_over(is_stream=False, patience=self.session.socket.limits.write_time)

    def lost(self) -> None:
        """Note that the client does not get the answer."""
        if self.arrival is not None:
            self.arrival.close()
            self.arrival = None
        self.receipt.lost()


class _Session:
    """One connection: the task that leads, and the calls in flight."""

    def __init__(self, socket: WebSocket, handle: "Handle") -> None:
        self.socket = socket
        # The answers that the server has, and that may not have arrived.
        self.handed: set[WatchedAnswer] = set()
        self._handle = handle
        self._loop = asyncio.get_running_loop()
        # Half of the calls that may be in flight: batches count for many.
        self._places = max(1, socket.limits.in_flight // 2)
        self._calls: set[asyncio.Task[None]] = set()
        # Done when no more messages begin.
        self._over: asyncio.Future[_End] = self._loop.create_future()
        # Done when a call has ended, while something waits for that.
        self._freed: asyncio.Future[None] | None = None
        # Whether the leader waits for the next message.
        self._is_reading = False
        self._is_closed = False
        self._context = copy_context()
        self._leader = self._lead_on()

    async def serve(self, lasts: Lasts | None) -> None:
        """Serve until the client leaves, breaks a rule, or the server stops."""
        socket = self.socket
        timer: asyncio.TimerHandle | None = None
        if lasts is not None and socket.identity is not None:
            seconds = lasts(socket.identity)
            if seconds is not None:
                timer = self._loop.call_later(seconds, self._expire)
        socket.stopping.listen(self._stop)
        end = _End(GOING_AWAY, "the server stops")
        try:
            end = await self._over
            if end.drains:
                await self._drain()
        finally:
            socket.stopping.forget(self._stop)
            if timer is not None:
                timer.cancel()
            self._is_closed = True
            for task in (self._leader, *self._calls):
                task.cancel()
            if end is _LEFT:
                socket.has_closed()
            else:
                await socket.close(end.code, end.reason)

    async def push(self, message: bytes) -> None:
        """Send a notification. A client that has left gets none, and the handler continues."""
        if not self._is_closed:
            with contextlib.suppress(Gone):
                await self.socket.send(message.decode())

    # --- the end ----------------------------------------------------------------------------------

    def _end(self, end: _End) -> None:
        wake(self._over, end)

    def _stop(self) -> None:
        self._end(_End(GOING_AWAY, "the server stops", drains=True))

    def _expire(self) -> None:
        self._end(_End(POLICY, "the token has expired: connect with another one"))

    async def _drain(self) -> None:
        """Wait until every message that has begun is answered."""
        if self._is_reading:
            self._leader.cancel()
        await asyncio.wait({self._leader})
        while self._calls:
            await self._until_freed()

    async def _until_freed(self) -> None:
        self._freed = self._loop.create_future()
        await self._freed

    # --- messages ---------------------------------------------------------------------------------

    def _lead_on(self) -> "asyncio.Task[None]":
        # Each leader begins with the context variables of the connection.
        leader = start(self._loop, self._lead(), self._context.copy())
        leader.add_done_callback(self._left)
        return leader

    def _left(self, task: "asyncio.Task[None]") -> None:
        self._calls.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a message of a WebSocket could not be answered", exc_info=error)
            self._end(_End(1011, "internal error"))
        wake(self._freed, None)

    def _lead_another(self) -> None:
        """Let a new task lead: the call of the leader waits."""
        self._calls.add(self._leader)
        self._leader = self._lead_on()

    async def _lead(self) -> None:
        """Begin message after message, until one of them waits: that call keeps this task."""
        task = asyncio.current_task()
        assert task is not None
        fresh = copy_context()
        while not self._over.done():
            while len(self._calls) >= self._places:
                await self._until_freed()
            if self._over.done():  # the connection ended while it had no place
                return
            data = await self._next()
            if data is None:
                return
            await self._serve(data)
            if self._leader is not task:
                return
            # A handler changed the context.
            if task.cancelling() or copy_context() != fresh:
                self._leader = self._lead_on()
                return

    async def _next(self) -> bytes | None:
        """Return the next message; None if the connection ends."""
        self._is_reading = True
        try:
            message = await self.socket.receive()
        finally:
            self._is_reading = False
        if message is None:
            self._end(_LEFT)
            return None
        if isinstance(message, bytes):
            self._end(_End(UNSUPPORTED, "expected text, got a binary frame"))
            return None
        data = message.encode()
        limit = self.socket.limits.bytes_in
        if len(data) > limit:
            self._end(_End(TOO_BIG, f"the message is longer than {limit} bytes"))
            return None
        if self.handed:
            self._note_message()
        return data

    def _note_message(self) -> None:
        """Note that the client has sent something after the answers that it got."""
        for arrival in tuple(self.handed):
            if arrival.is_over:
                self.handed.discard(arrival)
            else:
                arrival.note_request()

    async def _serve(self, data: bytes) -> None:
        """Answer one message."""
        socket = self.socket
        answer = _Answer(self)
        sender = Sender(
            socket.caller, socket.identity, None, socket.headers, answer.receipt, self.push
        )
        try:
            reply: Any = self._handle(data, sender, None, None)
            if reply is not None and not isinstance(reply, bytes):
                reply = await beside(reply, self._lead_another)
        except HttpError as refusal:  # too little scope
            reply = _refusal(data, socket.limits, refusal)
        except Exception as error:
            logger.error("a message of a WebSocket could not be answered", exc_info=error)
            reply = _failed(data, socket.limits, InternalError())
        except BaseException:
            answer.lost()
            raise
        if reply is None:
            answer.lost()
            return
        try:
            await socket.send(reply.decode())
        except Gone:
            answer.lost()
        except BaseException:
            answer.lost()
            raise
        else:
            answer.written()


def _refusal(data: bytes, limits: Limits, refusal: HttpError) -> bytes | None:
    """Return the answer to a message that its caller may not send."""
    return _failed(data, limits, InvalidRequest(refusal.message, **(refusal.data or {})))


def _failed(data: bytes, limits: Limits, error: RpcError) -> bytes | None:
    """Return the answer to a message of which nothing runs: the same error for each id."""
    read: Any = frames.read(data, limits)
    is_batch = isinstance(read, list)
    entries = read if is_batch else [read]
    answers = []
    for entry in entries:
        if entry.id is UNSET:
            continue
        own = error
        if isinstance(entry, Invalid):
            own = entry.error
        answers.append(frames.encode(frames.failure(entry.id, own)))
    return frames.make_reply(answers, is_batch)


def closing_frame(code: int, reason: str) -> bytes:
    """Return the frame that closes a WebSocket (RFC 6455, section 5.5.1)."""
    payload = code.to_bytes(2, "big") + reason.encode()[:123]
    return bytes((0x88, len(payload))) + payload
