"""Server-sent events: what goes out before an answer, and the answer after it.

`Direct` serves 2026-07-28: events go straight to the one who asked; when he leaves, the call is over. `Channel` serves the
older revisions, where a client may lose its connection and come back: events are numbered and kept for a while, the call
goes on, and whoever reads is only a reader (`Channel.follow`).

An answer begins as plain JSON. It becomes a stream when the first event is sent, and not before.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from wirecall.errors import Gone
from wirecall.transports.request import HttpError, Request

KEEP_ALIVE = 15.0  # seconds; proxies cut what is silent for longer
MAX_EVENTS = 1000  # of one channel, kept for a reader who comes back
MAX_BYTES = 4 << 20  # of those that a reader has seen, or that nobody reads
MAX_KEPT = 64 << 20  # bytes of all channels that are finished
BEHIND = 100  # events that a reader may be behind before who sends waits for it

_COMMENT = b": keep-alive\n\n"


def event(message: bytes, id: str | None = None) -> bytes:
    """One message, on one `data:` line."""
    head = f"id: {id}\n".encode() if id is not None else b""
    return head + b"event: message\ndata: " + message + b"\n\n"


class Nowhere:
    """For messages that are owed no answer, and so have nothing to say before it."""

    is_shared = False

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self.replayed: list[int | str] = []

    async def send(self, message: bytes) -> None:
        raise Gone("nobody waits for an answer")

    async def hang_up(self, retry: float) -> None:
        """There is no connection."""


class Direct:
    """Events to the client at the other end of this request. Once it is cut, nothing goes out any more."""

    is_shared = False

    def __init__(self, request: Request) -> None:
        self.stopping = request.stopping
        self.replayed: list[int | str] = []
        self.is_open = False
        self.is_cut = False
        self.on_cut: Callable[[], object] | None = None
        self.refusal: HttpError | None = None  # why there is no stream
        self._request = request
        self._beat: asyncio.TimerHandle | None = None
        self._beating: asyncio.Task[None] | None = None
        self._lock: asyncio.Lock | None = None

    async def open(self) -> None:
        """Begin the stream, although there is nothing to send yet."""
        self.is_open = True
        await self._request.open_stream()
        await self._write(_COMMENT)  # so that the client sees that it stands

    async def send(self, message: bytes) -> None:
        await self._write(event(message))

    async def hang_up(self, retry: float) -> None:
        """There is nothing to come back to."""

    async def finish(self, message: bytes | None) -> None:
        if message is not None:
            await self._request.write(event(message))
        await self._request.close_stream()

    def cut(self) -> None:
        """The client has left, or does not read: that is a cancellation (2026-07-28)."""
        self.is_cut = True
        if self.on_cut is not None:  # once: a write that fails and the one who watches may both notice
            on_cut, self.on_cut = self.on_cut, None
            on_cut()

    def close(self) -> None:
        """The answer is made: nothing goes out before it any more."""
        self.is_cut = True
        if self._beat is not None:
            self._beat.cancel()

    async def _write(self, chunk: bytes) -> None:
        self._lock = self._lock or asyncio.Lock()
        async with self._lock:
            if self.is_cut or self.refusal is not None:
                raise Gone("no stream is open")
            try:
                if not self.is_open:
                    await self._request.open_stream()
                    self.is_open = True
                await self._request.write(chunk)
            except HttpError as error:  # the stream limit is reached: events are dropped, and the plain answer is sent
                self.refusal = error
                raise Gone("no stream is free") from error
            except Exception:
                self.cut()
                raise
        if self._beat is not None:
            self._beat.cancel()
        self._beat = asyncio.get_running_loop().call_later(KEEP_ALIVE, self._keep_alive)

    def _keep_alive(self) -> None:
        if not self.is_cut:
            self._beating = asyncio.get_running_loop().create_task(self._comment())

    async def _comment(self) -> None:
        with suppress(Exception):  # the client has left, which the next event or the watcher reports
            await self._write(_COMMENT)


class Channel:
    """The events of one request of an older revision, and what became of them."""

    is_shared = False

    def __init__(self, request: Request, *, numbered: bool, primed: bool) -> None:
        self.id = os.urandom(6).hex()
        self.stopping = request.stopping
        self._enter = request.enter_stream
        self._is_refused = False  # there is no place for a stream, so the answer comes alone
        self.replayed: list[int | str] = []
        self.started = asyncio.Event()  # there is something to send before the answer
        self.finished = False
        self._numbered = numbered
        self._primed = primed
        self._events: deque[tuple[int, bytes]] = deque()
        self.size = 0  # bytes of the events that are kept
        self._count = 0
        self._read = -1  # the last event that a reader was given
        self._readers = 0
        self._news = asyncio.Event()
        self._caught_up = asyncio.Event()
        self._hung_up = False
        self.is_used = False  # something was sent before the answer
        if primed:
            self._put(b"id: " + self._name(0).encode() + b"\ndata: \n\n")

    async def send(self, message: bytes) -> None:
        """Keep an event for the reader, and wait while the reader is too far behind. Gone if there is no stream."""
        self._begin()
        self.put(message)
        while self._readers and self._count - self._read > BEHIND:
            self._caught_up.clear()
            await self._caught_up.wait()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """As long as somebody reads, or is about to."""
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1
            self._caught_up.set()

    async def hang_up(self, retry: float) -> None:
        """End the reader's connection after telling it when to come back; only 2025-11-25 allows that."""
        if self._primed:
            self._begin()
            self._put(f"retry: {int(retry * 1000)}\nid: {self._name(self._count)}\ndata: \n\n".encode())
            self._hung_up = True

    def put(self, message: bytes) -> None:
        self._put(event(message, self._name(self._count) if self._numbered else None))

    def finish(self) -> None:
        """Nothing will be added."""
        self.finished = True
        self._news.set()

    def has_all_after(self, number: int) -> bool:
        """Whether a reader that has seen this event can be given every one that came behind it."""
        return number < self._count and (not self._events or self._events[0][0] <= number + 1)

    async def follow(self, request: Request, after: int = -1) -> None:
        """Write the events behind `after` to a reader, and those to come, until the end or until it leaves."""
        self._hung_up = self._hung_up and after < 0
        await request.open_stream()
        while True:
            for number, chunk in [pair for pair in self._events if pair[0] > after]:
                await request.write(chunk)
                after = number
                self._read = max(self._read, number)
            self._caught_up.set()
            if self._count - 1 <= after and (self.finished or self._hung_up):  # more may have come while one was written
                break
            await self._wait(request, after)
        await request.close_stream()

    async def _wait(self, request: Request, after: int) -> None:
        self._news.clear()
        if self._count - 1 > after or self.finished or self._hung_up:
            return
        try:
            async with asyncio.timeout(KEEP_ALIVE):
                await self._news.wait()
        except TimeoutError:
            await request.write(_COMMENT)

    def _begin(self) -> None:
        """Make the answer a stream with its first event. The stream takes its place now: once an event is kept, the answer
        cannot be plain JSON any more, and a refusal afterwards would deny a command that has taken effect."""
        if self.is_used:
            return
        if self._is_refused:
            raise Gone("no stream is free: the answer is sent without events")
        if self._readers:
            try:
                self._enter()
            except HttpError as error:
                self._is_refused = True
                raise Gone("no stream is free: the answer is sent without events") from error
        self.is_used = True
        self.started.set()

    def _put(self, chunk: bytes) -> None:
        self._events.append((self._count, chunk))
        self._count += 1
        self.size += len(chunk)
        while len(self._events) > MAX_EVENTS or (self.size > MAX_BYTES and self._may_forget()):
            self.size -= len(self._events.popleft()[1])
        self._news.set()

    def _may_forget(self) -> bool:
        return len(self._events) > 1 and (not self._readers or self._events[0][0] <= self._read)

    def _name(self, number: int) -> str:
        return f"{self.id}.{number}"


class Shelf:
    """The channels that are finished, for readers who come back. When they hold too much, the oldest are given up."""

    OWN = 4096  # bytes of a channel without its events, as measured

    def __init__(self) -> None:
        self._kept: deque[tuple[dict[str, Channel], Channel, int]] = deque()
        self.size = 0

    def put(self, owner: dict[str, Channel], channel: Channel) -> None:
        """`owner` is where the channel is looked for, by its id."""
        size = channel.size + self.OWN
        self._kept.append((owner, channel, size))
        self.size += size
        while self.size > MAX_KEPT:
            owner, channel, size = self._kept.popleft()
            owner.pop(channel.id, None)
            self.size -= size
