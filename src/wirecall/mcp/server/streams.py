"""Server-sent events: messages before an answer, and the answer after them.

`Direct` serves 2026-07-28: events go straight to the client; when it leaves, the call is over.
`Channel` serves the older revisions, where a client may lose its connection and come back: events
are numbered and kept for a while, the call continues, and any connection of the client is only a
reader (`Channel.follow`).

An answer begins as plain JSON. It becomes a stream when the first event is sent. If no stream is
free at that moment, the server drops the events and sends the plain answer.
"""

import asyncio
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from wirecall.aio import Signal
from wirecall.errors import Gone
from wirecall.limits import Limits
from wirecall.protocol.receipt import Arrival, Receipt
from wirecall.transports.request import HttpError, HttpRequest

# Seconds; proxies close connections that are silent for longer.
KEEP_ALIVE = 15.0
# Bytes of one channel's events that a reader has seen, or that have no reader.
MAX_BYTES = 4 << 20
# Bytes that an event takes besides its content.
EVENT = 200
# Bytes that a channel takes besides its events.
CHANNEL = 4096

_START = os.urandom(4).hex()

_COMMENT = b": keep-alive\n\n"


def name_of_process() -> str:
    """Return how the ids of our streams begin: a client may come back to another process.

    Workers are copies of one process.
    """
    return f"{_START}{os.getpid():x}-"


def event(message: bytes, id: str | None = None) -> bytes:
    """Return one message as an event, on one `data:` line."""
    # Encoded JSON contains no line breaks here, so one `data:` line carries any message.
    written = b"event: message\ndata: " + message + b"\n\n"
    if id is None:
        return written
    return f"id: {id}\n".encode() + written


class NoOutlet:
    """The outlet of messages that get no answer."""

    is_shared = is_stream = False

    def __init__(self) -> None:
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

    def __init__(self, request: HttpRequest) -> None:
        self.receipt = request.receipt = Receipt(request.attend)
        self.stopping = request.stopping
        self.replayed: list[int | str] = []
        self.is_stream = False
        self.is_cut = False
        self.on_cut: Callable[[], object] | None = None
        # The reason why no stream was opened.
        self.refusal: HttpError | None = None
        self._request = request
        self._beat: asyncio.TimerHandle | None = None
        self._beating: asyncio.Task[None] | None = None
        self._lock: asyncio.Lock | None = None

    async def open(self) -> None:
        """Begin the stream before the first event.

        Raises `HttpError` if the stream limit is reached.
        """
        self.is_stream = True
        await self._request.open_stream()
        await self.send(None)  # so that the client sees that the stream is open

    async def send(self, message: bytes | None) -> None:
        """Send one message; None: a comment, which only keeps the connection alive.

        Raises `Gone` if no stream is open.
        """
        # Several tasks of one call may send at once. The lock keeps the opening of the stream and
        # each event in order.
        self._lock = self._lock or asyncio.Lock()
        async with self._lock:
            if self.is_cut or self.refusal is not None:
                raise Gone("no stream is open")
            try:
                if not self.is_stream:
                    await self._request.open_stream()
                    self.is_stream = True
                await self._request.write(_COMMENT if message is None else event(message))
            # The stream limit is reached: events are dropped, and the plain answer is sent.
            except HttpError as error:
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
        """Wait until the server stops.

        A client that leaves has cancelled, and its call is over anyway.
        """
        await self.stopping.wait()

    def cut(self) -> None:
        """Cancel the call: the client has left, or does not read."""
        # Closing the stream is the cancellation (2026-07-28, basic/transports/streamable-http,
        # "Cancellation").
        self.is_cut = True
        self.receipt.lost()
        if self.on_cut is not None:  # once: a write that fails and the watcher may both notice
            on_cut = self.on_cut
            self.on_cut = None
            on_cut()

    def close(self) -> None:
        """Stop sending events: the answer is ready."""
        self.is_cut = True
        if self._beat is not None:
            self._beat.cancel()

    def _keep_alive(self) -> None:
        async def comment() -> None:
            # The client has left, which the next event or the watcher reports.
            with suppress(Exception):
                await self.send(None)

        if not self.is_cut:
            self._beating = asyncio.get_running_loop().create_task(comment())


class Channel:
    """The events of one request of an older revision, kept for a reader that comes back."""

    is_shared = False

    def __init__(
        self,
        request: HttpRequest,
        store: "StreamStore",
        unread: int,
        *,
        link: str | None,
        numbered: bool,
        primed: bool,
    ) -> None:
        self.id = name_of_process() + os.urandom(6).hex()
        self.caller = request.caller
        self.stopping = request.stopping
        self.receipt = request.receipt = Receipt(request.follow, session=link)
        self.replayed: list[int | str] = []
        # Whether each answer to an array is an event, sent when it is ready.
        self.is_eager = False
        # Set when there is something to send before the answer.
        self.started = asyncio.Event()
        # No event will be added.
        self.finished = False
        # Something was sent before the answer.
        self.is_stream = False
        # Bytes of the events that are kept.
        self.size = 0
        # Counts a stream; `HttpError` if none is free.
        self._enter: Callable[[], None] | None = None
        # The stream limit is reached, so the answer is sent without events.
        self._is_refused = False
        self._store = store
        self._max_unread = unread
        self._numbered = numbered
        self._primed = primed
        self._events: deque[bytes] = deque()
        # The deliveries of answers that are events, by the number of the event.
        self._receipts: dict[int, Receipt] = {}
        # The number of the oldest event that is kept.
        self._first = 0
        # How many events were added.
        self._count = 0
        # The number of the last event that was written to a reader.
        self._read = -1
        # Bytes of the events after it.
        self._unread = 0
        self._readers = 0
        # Readers that have come back.
        self._resuming = 0
        self._resumed = asyncio.Event()
        self._came_or_left = asyncio.Event()
        self._news = asyncio.Event()
        self._caught_up = asyncio.Event()
        self._hung_up = False

    async def send(self, message: bytes, receipt: Receipt | None = None) -> None:
        """Keep an event for the reader, and wait while the reader is too far behind.

        Raises `Gone` if no stream is free. `receipt` is the delivery of the answer in the event.
        """
        self._begin()
        if receipt is not None:
            self._receipts[self._count] = receipt
        self.put(message)
        while self._readers and self._unread > self._max_unread:
            self._caught_up.clear()
            await self._caught_up.wait()

    @contextmanager
    def resuming(self) -> Iterator[None]:
        """Count a reader that has come back.

        It counts until it has received the events that it missed, or has left again.
        """
        self._resuming += 1
        self._resumed.clear()
        try:
            with self.reading():
                yield
        finally:
            self._resuming -= 1
            if not self._resuming:
                self._resumed.set()

    @property
    def is_delivering(self) -> bool:
        """Whether the answer is ready, and is being written to a reader that has come back."""
        is_written = self.receipt.arrival is Arrival.WRITTEN
        return self.finished and self._resuming > 0 and not is_written

    async def delivered(self) -> None:
        """Wait until the readers that have come back have received the answer, or have left."""
        await self._resumed.wait()

    @contextmanager
    def reading(self, enter: Callable[[], None] | None = None) -> Iterator[None]:
        """Count a reader, from before its connection is open until it has left.

        `enter` counts a stream towards the limit, once the answer becomes one. It holds the
        request, so the channel drops it when the reader leaves.
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
            self._store.make_room(self.caller)
            self._forget()

    async def until_left(self, patience: float) -> None:
        """Return when the channel has had no reader for `patience` seconds."""
        while True:
            self._came_or_left.clear()
            wait = None if self._readers else patience
            try:
                async with asyncio.timeout(wait):
                    await self._came_or_left.wait()
            except TimeoutError:
                return

    async def hang_up(self, retry: float) -> None:
        """End the reader's connection, after an event that says when to come back.

        Only 2025-11-25 allows that.
        """
        # 2025-11-25, transports: before it closes a stream, a server sends an event with an id, and
        # with `retry` the time after which the client opens the stream again.
        if self._primed:
            self._begin()
            self._put(
                f"retry: {int(retry * 1000)}\nid: {self._name(self._count)}\ndata: \n\n".encode()
            )
            self._hung_up = True

    def put(self, message: bytes) -> None:
        """Keep an event for the reader, however far behind it is."""
        id = None
        if self._numbered:
            id = self._name(self._count)
        self._put(event(message, id))

    def finish(self) -> None:
        """Let readers end: no event will be added."""
        self.finished = True
        self._news.set()

    def end(self, answers: Iterable[bytes]) -> None:
        """Add the last events. A reader that has written them ends the stream."""
        for answer in answers:
            self.put(answer)
        self.finish()

    def has_all_after(self, number: int) -> bool:
        """Return whether every event after this one is still kept."""
        return self._first - 1 <= number < self._count

    async def follow(self, request: HttpRequest, after: int = -1) -> None:
        """Write the events after `after` to a reader, also future ones.

        It ends with the last event, or when the reader leaves.
        """
        # A reader that comes back with the id of an event continues after `hang_up`.
        self._hung_up = self._hung_up and after < 0
        await request.open_stream()
        while True:
            while after + 1 < self._count:  # more may come while one is written
                after = max(after + 1, self._first)
                chunk = self._events[after - self._first]
                is_last = self.finished and after + 1 == self._count
                # The end of the stream is sent with the last event, after which a client may leave
                # at once.
                if is_last:
                    await request.close_stream(chunk)
                else:
                    await request.write(chunk)
                if after > self._read:
                    self._read = after
                    self._unread -= len(chunk) + EVENT
                self._caught_up.set()
                if is_last:
                    request.written()
                    return
                receipt = self._receipts.pop(after, None)
                if receipt is not None:
                    request.written_record(receipt)
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
            request.written()

    def _begin(self) -> None:
        """Make the answer a stream with its first event.

        The stream counts towards the limit now: once an event is kept, the answer can no longer be
        plain JSON, and a later refusal would deny a command that has taken effect.
        """
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
        # 2025-11-25, transports: the first event has an id and no data, so that a client can resume
        # from the beginning.
        if self._primed:
            self._put(b"id: " + self._name(0).encode() + b"\ndata: \n\n")

    def _put(self, chunk: bytes) -> None:
        size = len(chunk) + EVENT
        self._events.append(chunk)
        self._count += 1
        self.size += size
        self._unread += size
        self._store.add(self.caller, size)
        # Finished channels drop their events first. Only then does this channel drop its own.
        self._store.make_room(self.caller)
        self._forget()
        self._news.set()

    def _forget(self) -> None:
        """Drop the oldest events of a channel that holds too much.

        It never drops the newest event, or one that a reader waits for.
        """
        while (self.size > MAX_BYTES or self._store.is_full(self.caller)) and len(self._events) > 1:
            if self._first > self._read:
                if self._readers:
                    break
                self._read = self._first
                self._unread -= len(self._events[0]) + EVENT
            size = len(self._events.popleft()) + EVENT
            self._first += 1
            self.size -= size
            self._store.add(self.caller, -size)

    @property
    def has_reader(self) -> bool:
        return self._readers > 0

    def clear(self) -> None:
        """Drop all events: the stream cannot be resumed any more."""
        self._store.add(self.caller, -self.size)
        self.size = 0
        self._first = self._count
        self._events.clear()

    def _name(self, number: int) -> str:
        return f"{self.id}.{number}"


class StreamStore:
    """Counts the bytes of all channels, and keeps finished ones for readers that come back.

    A finished channel is dropped when its time is over. It is dropped earlier, the oldest first, if
    the channels of its caller, or all of them together, hold too many bytes; but not while it has a
    reader.
    """

    def __init__(self, limits: Limits) -> None:
        self.size = 0
        # Bytes of each caller's channels.
        self.held: Counter[str] = Counter()
        self._limits = limits
        # Finished channels, each with its owner and the time when it is dropped.
        self._finished: dict[Channel, tuple[dict[str, Channel], float]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, caller: str, size: int) -> None:
        """Add `size`, which may be negative, to the bytes of a caller and of all."""
        self.size += size
        self.held[caller] += size
        if not self.held[caller]:
            del self.held[caller]

    def is_full(self, caller: str) -> bool:
        """Return whether all channels together, or those of this caller, hold too many bytes."""
        return (
            self.size > self._limits.resume_bytes
            or self.held[caller] > self._limits.resume_bytes_per_caller
        )

    def put(self, owner: dict[str, Channel], channel: Channel) -> None:
        """Keep a channel that is finished; `owner` is where readers look for it, by its id."""
        if not channel.is_stream:
            return
        until = asyncio.get_running_loop().time() + self._limits.resume_time
        self._finished[channel] = owner, until
        self.add(channel.caller, CHANNEL)
        self.make_room(channel.caller)
        self._plan()

    def make_room(self, caller: str) -> None:
        """Drop the oldest finished channels while the channels hold too many bytes."""
        if self.held[caller] > self._limits.resume_bytes_per_caller:
            self._give_up_oldest(caller)
        if self.size > self._limits.resume_bytes:
            self._give_up_oldest(None)

    def _give_up_oldest(self, caller: str | None) -> None:
        for channel in list(self._finished):
            is_meant = caller is None or channel.caller == caller
            if is_meant and not channel.has_reader:
                self._give_up(channel)
            if caller is not None and self.held[caller] <= self._limits.resume_bytes_per_caller:
                return
            if caller is None and self.size <= self._limits.resume_bytes:
                return

    def _give_up(self, channel: Channel) -> None:
        owner, _ = self._finished.pop(channel)
        owner.pop(channel.id, None)
        channel.clear()
        self.add(channel.caller, -CHANNEL)

    def _plan(self) -> None:
        """Set the timer for the channel that expires first."""
        if self._timer is not None or not self._finished:
            return
        _, until = next(iter(self._finished.values()))
        self._timer = asyncio.get_running_loop().call_at(until, self._expire)

    def _expire(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        for channel, (owner, until) in list(self._finished.items()):
            if until > loop.time():
                break
            if not channel.has_reader:
                self._give_up(channel)
                continue
            # A slow reader keeps the channel for another period.
            del self._finished[channel]
            self._finished[channel] = owner, loop.time() + self._limits.resume_time
        self._plan()
