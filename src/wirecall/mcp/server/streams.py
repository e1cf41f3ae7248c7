"""Server-sent events: messages before an answer, and the answer after them.

`Direct` serves 2026-07-28: events go straight to the client; when it leaves, the call is over. `Channel` serves the older
revisions, where a client may lose its connection and come back: events are numbered and kept for a while, the call goes on,
and any connection of the client is only a reader (`Channel.follow`).

An answer begins as plain JSON. It becomes a stream when the first event is sent, and not before. If no stream is free then,
events are dropped and the plain answer is sent.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from wirecall.errors import Gone
from wirecall.protocol.messages import Sending
from wirecall.stepping import Signal
from wirecall.transports.request import HttpError, HttpRequest

KEEP_ALIVE = 15.0  # seconds; proxies close connections that are silent for longer
MAX_BYTES = 4 << 20  # of one channel's events that a reader has seen, or that have no reader
MAX_KEPT = 64 << 20  # bytes of all channels
EVENT = 200  # bytes that an event takes besides its text
CHANNEL = 4096  # bytes that a channel takes besides its events

_COMMENT = b": keep-alive\n\n"


def event(message: bytes, id: str | None = None) -> bytes:
    """Return one message as an event, on one `data:` line."""
    # JSON text has no line breaks of its own here, so one `data:` line carries any message.
    head = f"id: {id}\n".encode() if id is not None else b""
    return head + b"event: message\ndata: " + message + b"\n\n"


class Nowhere:
    """The outlet of messages that are owed no answer."""

    is_shared = is_stream = False
    peer = None

    def __init__(self) -> None:
        self.sending = Sending()
        self.stopping = Signal()
        self.replayed: list[int | str] = []

    async def send(self, message: bytes) -> None:
        raise Gone("no client waits for an answer")

    async def hang_up(self, retry: float) -> None:
        """Do nothing: the message has no connection."""

    async def until_left(self, patience: float) -> None:
        """Return at once: the message has no connection."""


class Direct:
    """Sends events to the client of this request, until it is cut."""

    is_shared = False
    peer = None  # requests of 2026-07-28 have no session

    def __init__(self, request: HttpRequest) -> None:
        self.sending = request.sending = Sending()
        self.stopping = request.stopping
        self.replayed: list[int | str] = []
        self.is_stream = False
        self.is_cut = False
        self.on_cut: Callable[[], object] | None = None
        self.refusal: HttpError | None = None  # the reason why no stream was opened
        self._request = request
        self._beat: asyncio.TimerHandle | None = None
        self._beating: asyncio.Task[None] | None = None
        self._lock: asyncio.Lock | None = None

    async def open(self) -> None:
        """Begin the stream before the first event. Raises `HttpError` if the stream limit is reached."""
        self.is_stream = True
        await self._request.open_stream()
        await self.send(None)  # so that the client sees that the stream is open

    async def send(self, message: bytes | None) -> None:
        """Send one message; None: a comment, which only keeps the connection alive. Raises `Gone` if no stream is open."""
        # Several tasks of one call may send at once. The lock keeps the opening of the stream and each event in order.
        self._lock = self._lock or asyncio.Lock()
        async with self._lock:
            if self.is_cut or self.refusal is not None:
                raise Gone("no stream is open")
            try:
                if not self.is_stream:
                    await self._request.open_stream()
                    self.is_stream = True
                await self._request.write(_COMMENT if message is None else event(message))
            except HttpError as error:  # the stream limit is reached: events are dropped, and the plain answer is sent
                self.refusal = error
                raise Gone("no stream is free") from error
            except Exception:
                self.cut()
                raise
        if self._beat is not None:
            self._beat.cancel()
        self._beat = asyncio.get_running_loop().call_later(KEEP_ALIVE, self._keep_alive)

    async def hang_up(self, retry: float) -> None:
        """Do nothing: a stream of 2026-07-28 cannot be resumed."""

    async def until_left(self, patience: float) -> None:
        """Wait for the end of the server: a client that leaves has cancelled, and its call is over anyway."""
        await self.stopping.wait()

    def cut(self) -> None:
        """Cancel the call: the client has left, or does not read."""
        # Closing the stream is the cancellation (2026-07-28, basic/transports/streamable-http, "Cancellation").
        self.is_cut = True
        self.sending.lost()
        if self.on_cut is not None:  # once: a write that fails and the watcher may both notice
            on_cut, self.on_cut = self.on_cut, None
            on_cut()

    def close(self) -> None:
        """Send no more events: the answer is made."""
        self.is_cut = True
        if self._beat is not None:
            self._beat.cancel()

    def _keep_alive(self) -> None:
        async def comment() -> None:
            with suppress(Exception):  # the client has left, which the next event or the watcher reports
                await self.send(None)

        if not self.is_cut:
            self._beating = asyncio.get_running_loop().create_task(comment())


class Channel:
    """The events of one request of an older revision, kept for a reader that comes back."""

    is_shared = False

    def __init__(
        self, request: HttpRequest, shelf: "Shelf", unread: int, *, peer: str | None, numbered: bool, primed: bool
    ) -> None:
        self.id = os.urandom(6).hex()
        self.stopping = request.stopping
        self.sending = request.sending = Sending(request.watch)
        self.peer = peer
        self.replayed: list[int | str] = []
        self.started = asyncio.Event()  # there is something to send before the answer
        self.finished = False
        self.is_stream = False  # something was sent before the answer
        self.size = 0  # bytes of the events that are kept
        self._enter: Callable[[], None] | None = None  # takes the place of a stream; HttpError if none is free
        self._is_refused = False  # the stream limit is reached, so the answer comes alone
        self._shelf = shelf
        self._max_unread = unread
        self._numbered = numbered
        self._primed = primed
        self._events: deque[bytes] = deque()
        self._first = 0  # the number of the oldest event that is kept
        self._count = 0
        self._read = -1  # the last event that a reader was given
        self._unread = 0  # bytes of the events behind it
        self._readers = 0
        self._came_or_left = asyncio.Event()
        self._news = asyncio.Event()
        self._caught_up = asyncio.Event()
        self._hung_up = False

    async def send(self, message: bytes) -> None:
        """Keep an event for the reader, and wait while the reader is too far behind. Raises `Gone` if no stream is free."""
        self._begin()
        self.put(message)
        while self._readers and self._unread > self._max_unread:
            self._caught_up.clear()
            await self._caught_up.wait()

    @contextmanager
    def reading(self, enter: Callable[[], None] | None = None) -> Iterator[None]:
        """Count a reader, from before its connection is open until it has left.

        `enter` takes the place of a stream whose reader does not know yet whether there will be one. It holds the request,
        so the channel keeps it no longer than the reader is there.
        """
        self._readers += 1
        self._enter = enter
        self._came_or_left.set()
        try:
            yield
        finally:
            self._readers -= 1
            self._enter = None
            self._came_or_left.set()
            self._caught_up.set()
            self._forget()

    async def until_left(self, patience: float) -> None:
        """Return when no reader has been there for `patience` seconds."""
        while True:
            self._came_or_left.clear()
            try:
                async with asyncio.timeout(None if self._readers else patience):
                    await self._came_or_left.wait()
            except TimeoutError:
                return

    async def hang_up(self, retry: float) -> None:
        """End the reader's connection after telling it when to come back; only 2025-11-25 allows that."""
        # 2025-11-25, transports: before it closes a stream, a server sends an event with an id, and with `retry` the time
        # after which the client opens the stream again.
        if self._primed:
            self._begin()
            self._put(f"retry: {int(retry * 1000)}\nid: {self._name(self._count)}\ndata: \n\n".encode())
            self._hung_up = True

    def put(self, message: bytes) -> None:
        """Keep an event for the reader, however far behind it is."""
        self._put(event(message, self._name(self._count) if self._numbered else None))

    def finish(self) -> None:
        """Let readers end: no event will be added."""
        self.finished = True
        self._news.set()

    def has_all_after(self, number: int) -> bool:
        """Return whether every event behind this one is still kept."""
        return self._first - 1 <= number < self._count

    async def follow(self, request: HttpRequest, after: int = -1) -> None:
        """Write the events behind `after` to a reader, and those to come, until the end or until it leaves."""
        # A reader that comes back with the id of an event goes on after `hang_up`.
        self._hung_up = self._hung_up and after < 0
        await request.open_stream()
        while True:
            while after + 1 < self._count:  # more may come while one is written
                after = max(after + 1, self._first)
                chunk = self._events[after - self._first]
                await request.write(chunk)
                if after > self._read:
                    self._read = after
                    self._unread -= len(chunk) + EVENT
                self._caught_up.set()
            if self.finished or self._hung_up:
                break
            self._news.clear()
            try:
                async with asyncio.timeout(KEEP_ALIVE):
                    await self._news.wait()
            except TimeoutError:
                await request.write(_COMMENT)
        await request.close_stream()
        if self.finished and not request.has_left:
            self.sending.written()

    def _begin(self) -> None:
        """Make the answer a stream with its first event. The stream takes its place now: once an event is kept, the answer
        cannot be plain JSON any more, and a refusal afterwards would deny a command that has taken effect."""
        if self.is_stream:
            return
        if self._is_refused:
            raise Gone("no stream is free: the answer is sent without events")
        if self._enter is not None:
            try:
                self._enter()
            except HttpError as error:
                self._is_refused = True
                raise Gone("no stream is free: the answer is sent without events") from error
        self.is_stream = True
        self.started.set()
        # 2025-11-25, transports: the first event has an id and no data, so that a client can resume from the beginning.
        if self._primed:
            self._put(b"id: " + self._name(0).encode() + b"\ndata: \n\n")

    def _put(self, chunk: bytes) -> None:
        size = len(chunk) + EVENT
        self._events.append(chunk)
        self._count += 1
        self.size += size
        self._unread += size
        self._shelf.size += size
        # Finished channels give up their events first. Only then the channel drops its own.
        self._shelf.make_room()
        self._forget()
        self._news.set()

    def _forget(self) -> None:
        """Drop the oldest events of a channel that holds too much: never the newest, and none that a reader waits for."""
        while (self.size > MAX_BYTES or self._shelf.size > MAX_KEPT) and len(self._events) > 1:
            if self._first > self._read:
                if self._readers:
                    break
                self._read = self._first
                self._unread -= len(self._events[0]) + EVENT
            size = len(self._events.popleft()) + EVENT
            self._first += 1
            self.size -= size
            self._shelf.size -= size

    def _name(self, number: int) -> str:
        return f"{self.id}.{number}"


class Shelf:
    """Counts the bytes of all channels, and keeps those that are finished for readers that come back."""

    def __init__(self) -> None:
        self._finished: deque[tuple[dict[str, Channel], Channel]] = deque()
        self.size = 0

    def put(self, owner: dict[str, Channel], channel: Channel) -> None:
        """Keep a channel that is finished; `owner` is where readers look for it, by its id."""
        if channel.is_stream:
            self._finished.append((owner, channel))
            self.size += CHANNEL
            self.make_room()

    def make_room(self) -> None:
        """Give up the oldest of the channels that are finished, while all of them hold too much."""
        while self.size > MAX_KEPT and self._finished:
            owner, channel = self._finished.popleft()
            owner.pop(channel.id, None)
            self.size -= channel.size + CHANNEL
