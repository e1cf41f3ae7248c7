"""A client's links to a server of MCP: Streamable HTTP, a pipe of lines, and HTTP with SSE.

HTTP with SSE is the transport of 2024-11-05.

`McpHttpLink`:

1. Every message is a POST. Its answer is JSON, or a stream of events that ends with the answer; the
   link always accepts both.
2. If there are sessions, the link sends the id that it received. A 404 for it means that the
   session is gone: `renew` makes another, and the message is sent again, because nothing in it ran.
3. A stream that ends before the answer is resumed with a GET and `Last-Event-ID`, not before the
   time in the server's `retry`. That needs an event with an id; without one, and at 2026-07-28, the
   connection is lost.
4. If there are sessions, a standing GET receives the server's own messages, if the server allows
   it.
5. The link reports a caller that stops waiting: with `notifications/cancelled`, or at 2026-07-28 by
   closing the stream.

`McpLineLink`:

1. A message is a line. Answers are matched to their exchange by id, in any order.
2. The next message reopens a pipe that has ended. If the revision has a handshake, it comes first.
3. The link reports a caller that stops waiting with `notifications/cancelled`, in every revision.

`McpMemoryLink` passes a message to an app of this process, and takes the answer from it.

All accept arrays only at 2025-03-26, which has them. Requests and notifications of the server go to
`on_message`.
"""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urljoin, urlsplit

from msgspec import UNSET

from wirecall.aio import cancel_all
from wirecall.client.delivery import DOUBLINGS, Clock
from wirecall.client.exchange import Exchange, Link, LocalLink
from wirecall.client.links import (
    LineLink,
    Pipe,
    Step,
    mark_replayed,
    refuse_by_status,
    status_error,
)
from wirecall.errors import (
    BadAnswer,
    CallFailed,
    ConnectionLost,
    InvalidRequest,
    NotSent,
    Refused,
    WirecallError,
)
from wirecall.logs import logger
from wirecall.mcp.headers import VERSION, Marks, named, repeated
from wirecall.mcp.revisions import Revision
from wirecall.protocol.messages import Arrived, Received, encode, read_messages
from wirecall.protocol.receipt import Receipt
from wirecall.transports.http_client import HttpAnswer, HttpClient
from wirecall.transports.sse import UNFIT, Event, Parser

if TYPE_CHECKING:
    from wirecall.transports.stdio import Connect, Connection

JSON = "application/json"
EVENTS = "text/event-stream"
SESSION = "mcp-session-id"
LAST_EVENT = "last-event-id"

COME_BACK = 0.2  # seconds before a broken stream is requested again, if the server sets no time
SOONEST = 0.05  # min delay, for a server that asks for less
# Statuses of a proxy that does not reach its server now.
REPLACED = frozenset({502, 503, 504})
FURTHEST = 30.0  # max delay; it doubles after every attempt without an event
TRIES = 5  # attempts without an event before the link gives up a stream
MOMENT = 2.0  # seconds for the standing stream to begin
FAREWELL = 2.0  # seconds to send the end of a session
OPENING = 10.0  # seconds for a server of HTTP with SSE to name its address
KNOWN = 1000  # max cached sets of headers
# The reason of a cancellation. A gateway does not stop a command for one that speaks of time: this
# client does not know whether a person or a deadline has ended the call.
GAVE_UP = "the caller stopped waiting, or its time was over"

# A client must accept both, because the server chooses (2025-03-26, sending messages).
_BOTH = {"Content-Type": JSON, "Accept": f"{JSON}, {EVENTS}"}
# For an array whose answers are wanted as they complete: a server may send each as an event.
_EVENTS_FIRST = f"{EVENTS}, {JSON};q=0.9"


class McpLink(Link):
    """A link that speaks MCP."""

    is_pipe: bool
    # The address, if the link uses HTTP.
    url: str | None = None
    # Makes the link of 2024-11-05 to the same address.
    older: "Callable[[], McpLink] | None" = None

    def __init__(self) -> None:
        # None: not negotiated yet.
        self.revision: Revision | None = None
        # Called with each request and notification of the server.
        self.on_message: Callable[[Arrived], None] = lambda _message: None
        # Begins another session.
        self.renew: Callable[[], Awaitable[None]] | None = None
        # Repeats what the process of a session knows: it may be another one.
        self.restore: Callable[[], Awaitable[None]] | None = None
        # Returns the arguments of a tool that headers repeat.
        self.marks: Callable[[str], Marks] = lambda _tool: {}
        self._cancels: set[asyncio.Task[None]] = set()

    async def ready(self) -> None:
        """Make what the next message needs: on a pipe, the pipe itself and its handshake.

        Nothing of a message is sent before this returns. A request over HTTP makes its own
        connection.
        """

    @abstractmethod
    async def post(self, exchange: Exchange) -> bool:
        """Send a message unchanged. Return True if the session is gone, so nothing ran."""

    @abstractmethod
    async def send(self, message: bytes) -> None:
        """Send an answer to the server, or another message without an answer."""

    @abstractmethod
    async def listen(self) -> None:
        """Receive the server's own messages."""

    def _read(self, text: bytes, exchange: Exchange | None) -> None:
        """Pass answers to the exchange, and requests and notifications to `on_message`."""
        in_array, messages = read_messages(text)
        odd = in_array and not (self.revision and self.revision.has_arrays)
        if in_array and not messages and exchange is not None:
            exchange.stray = exchange.stray or "an empty array"
        for message in messages:
            if isinstance(message, Arrived) and message.method is not UNSET:
                self.on_message(message)
            elif exchange is not None:
                exchange.take(message, odd)
            else:
                logger.debug("an answer to no request: %.200r", message)

    def _announce(self, exchange: Exchange, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Report that the caller stopped waiting.

        Separate tasks do that, because the caller's own task is being cancelled.
        """

        async def report(id: int) -> None:
            params = {"requestId": id, "reason": GAVE_UP}
            message = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}
            with suppress(CallFailed, TimeoutError):
                async with asyncio.timeout(FAREWELL):
                    await send(encode(message))

        for id in exchange.open:
            task = asyncio.get_running_loop().create_task(report(id))
            self._cancels.add(task)
            task.add_done_callback(self._cancels.discard)


# --- Streamable HTTP ------------------------------------------------------------------------------


class McpHttpLink(McpLink):
    """POSTs, streams and the session at one address."""

    is_pipe = False

    def __init__(self, http: HttpClient, older: Callable[[], McpLink] | None, clock: Clock) -> None:
        super().__init__()
        self.url = http.url
        self.older = older
        self.session: str | None = None
        self._http = http
        self._clock = clock
        self._standing: asyncio.Task[None] | None = None
        self._renewing = asyncio.Lock()
        self._known: dict[tuple[str, str, str | None], dict[str, str]] = {}

    async def open(self) -> None:
        await self._http.open()

    async def aclose(self) -> None:
        """End the session, the tasks in flight, and all connections."""
        try:
            await cancel_all(self._standing, *self._cancels)
            if self.session is not None:
                # A client that leaves ends its session; a server may refuse with 405 (2025-03-26,
                # session management).
                with suppress(CallFailed, TimeoutError):
                    async with (
                        asyncio.timeout(FAREWELL),
                        self._http.request("DELETE", headers=self._shared()),
                    ):
                        pass
        finally:
            await self._http.aclose()

    # --- messages ---------------------------------------------------------------------------------

    async def exchange(self, exchange: Exchange) -> None:
        """Send one message and take its answers, in a live session."""
        if self._renewing.locked():  # no message is sent while a session is being made
            async with self._renewing:
                pass
        gone = self.session
        if not await self.post(exchange):
            return
        async with self._renewing:
            # Else another message has renewed it.
            if self.session == gone and self.renew is not None:
                self.session = None
                try:
                    await self.renew()
                except BaseException:
                    self.session = gone  # so that the next message tries again
                    raise
        if exchange.array and not (self.revision and self.revision.has_arrays):
            exchange.refuse(InvalidRequest("the server's new session has no arrays"))
        elif await self.post(exchange):
            raise NotSent("the server forgets its sessions at once")

    async def post(self, exchange: Exchange) -> bool:
        headers = self._headers(exchange)
        stream: Parser | None = None  # the answer, if it is a stream
        try:
            try:
                async with self._http.request(
                    "POST", exchange.data, headers, exchange=exchange
                ) as answer:
                    # 404 under a session id: the session is over, nothing ran (2025-03-26, session
                    # management).
                    if answer.status == 404 and SESSION in headers:
                        return True
                    exchange.begun = True
                    is_good = 200 <= answer.status < 300
                    if exchange.entries[0].method == "initialize" and answer.status == 200:
                        self._begin_session(answer.headers.get(SESSION, ""))
                    mark_replayed(exchange, answer)
                    if is_good and answer.media == EVENTS:
                        stream = Parser(self._http.max_bytes)
                        await self._read_stream(answer, stream, exchange)
                    else:
                        body = await answer.read()
                        if not is_good:
                            refuse_by_status(exchange, answer, body)
                        elif body and exchange.known:  # some servers wrongly answer a notification
                            self._read(body, exchange)
            except ConnectionLost:
                if stream is None or not self._can_resume(stream):
                    raise
            if stream is not None and not exchange.is_done:
                await self._resume(exchange, stream)
        except asyncio.CancelledError:
            # From 2026-07-28 on, closing the stream reports that the caller stopped waiting.
            if (
                self.revision is not None
                and exchange.sent
                and not self.revision.has("http disconnect cancels")
            ):
                self._announce(exchange, self.send)
            raise
        return False

    def _begin_session(self, id: str) -> None:
        if UNFIT.search(id):
            raise BadAnswer(
                f"the session id must be text without control characters, got {id[:100]!a}"
            )
        self.session = id or None

    async def send(self, message: bytes) -> None:
        async with self._http.request("POST", message, {**_BOTH, **self._shared()}) as answer:
            if answer.status >= 400:
                logger.warning("the server did not take an answer: HTTP %d", answer.status)

    def _headers(self, exchange: Exchange) -> dict[str, str]:
        revision = self.revision
        if revision is None or not revision.has("http headers repeat the body"):
            headers = {**_BOTH, **self._shared()}
            if exchange.wants_stream:
                headers["Accept"] = _EVENTS_FIRST
            return headers
        entry = exchange.entries[0]
        name = named(entry.method, entry.params)
        if name is not None and entry.method == "tools/call" and (marks := self.marks(name)):
            return {**_BOTH, **repeated(revision.name, entry.method, entry.params, marks)}
        known = (revision.name, entry.method, name)
        if known not in self._known:  # made once: clients repeat the same few calls
            if len(self._known) >= KNOWN:
                self._known.clear()
            self._known[known] = {
                **_BOTH,
                **repeated(revision.name, entry.method, entry.params, {}),
            }
        return self._known[known]

    def _shared(self) -> dict[str, str]:
        """Return the headers for every request of a session."""
        headers: dict[str, str] = {}
        if self.session is not None:
            headers[SESSION] = self.session
        # Every request after the handshake carries the negotiated version (2025-06-18, protocol
        # version header).
        if self.revision is not None and self.revision.has("http version header"):
            headers[VERSION] = self.revision.name
        return headers

    # --- streams ----------------------------------------------------------------------------------

    async def _read_stream(
        self, answer: HttpAnswer, parser: Parser, exchange: Exchange | None
    ) -> int:
        """Read the messages of a stream, and return their number.

        This ends with the stream, or when all calls are answered.
        """
        count = 0
        if exchange is not None and exchange.wants_stream:
            for entry in exchange.entries:
                entry.was_streamed = True
        async with aclosing(cast(AsyncGenerator[Event, None], answer.events(parser))) as events:
            async for event in events:
                # An event without data only sets where to resume.
                if event.data and event.name == "message":
                    self._read(event.data.encode(), exchange)
                    count += 1
                if exchange is not None and exchange.is_done:
                    break
        return count

    def _can_resume(self, parser: Parser) -> bool:
        return (
            bool(parser.last_id) and self.revision is not None and self.revision.has("http resume")
        )

    async def _resume(self, exchange: Exchange, parser: Parser) -> None:
        """Take the rest of a stream that ended before the answer."""
        fruitless = 0
        granted = self._can_resume(parser)
        while granted and fruitless < TRIES and not exchange.is_done:
            place = parser.last_id
            await self._clock.sleep(_pause(parser, fruitless))
            try:
                async with self._get(parser) as answer:
                    granted = answer.status == 200 and answer.media == EVENTS
                    if granted:
                        await self._read_stream(answer, parser, exchange)
            except ConnectionLost:
                pass  # the next attempt may reach the server
            except (NotSent, Refused) as error:  # the GET failed; the call itself may have run
                reason = f"the stream ended before the answer, and cannot be resumed: {error}"
                raise ConnectionLost(reason, status=error.status) from error
            fruitless += 1
            if parser.last_id != place:
                fruitless = 0
        if not exchange.is_done:
            reason = f"the stream ended before the answer, and cannot be resumed{exchange.instead}"
            raise ConnectionLost(reason, retry_after=parser.retry)

    def _get(self, parser: Parser) -> AbstractAsyncContextManager[HttpAnswer]:
        """Request a stream that continues after the last event of the parser."""
        parser.restart()
        # Last-Event-ID requests the messages after that event (HTML standard, section 9.2; MCP
        # 2025-03-26, resumability).
        headers = {"Accept": EVENTS, **self._shared()}
        if parser.last_id:
            headers[LAST_EVENT] = parser.last_id
        return self._http.request("GET", headers=headers)

    async def listen(self) -> None:
        """Open the stream of the server's own messages, and wait until it is open.

        Some servers drop messages before that.
        """
        if self._standing is not None:
            self._standing.cancel()
        stands = asyncio.Event()
        self._standing = asyncio.get_running_loop().create_task(self._stand(stands))
        self._standing.add_done_callback(lambda _: stands.set())
        with suppress(TimeoutError):
            async with asyncio.timeout(MOMENT):
                await stands.wait()

    async def _stand(self, stands: asyncio.Event) -> None:
        parser = Parser(self._http.max_bytes)
        fruitless = 0
        while True:
            try:
                async with self._get(parser) as answer:
                    if stands.is_set() and answer.status in REPLACED:
                        raise ConnectionLost("the server behind a proxy is being replaced")
                    if answer.status != 200 or answer.media != EVENTS:
                        # 405: not supported. 404: the session is gone; the next call makes another.
                        return
                    # A stream without ids of events is not resumed: what it has missed is lost, and
                    # the process that serves it may have started since.
                    if stands.is_set() and self.restore is not None and not parser.last_id:
                        await self.restore()
                    stands.set()
                    count = await self._read_stream(answer, parser, None)
                    fruitless += 1
                    if count:
                        fruitless = 0
            except (ConnectionLost, NotSent):  # the server restarts
                fruitless += 1
            except WirecallError as error:
                logger.warning("the stream of the server's own messages is given up: %s", error)
                return
            await self._clock.sleep(_pause(parser, fruitless))


def _pause(parser: Parser, fruitless: int) -> float:
    """Return the seconds before the next request for a stream.

    They are the server's `retry`, and more after failures.
    """
    own = min(FURTHEST, COME_BACK * 2.0 ** min(fruitless, DOUBLINGS))
    if parser.retry is None:
        return own
    if not fruitless:
        return max(parser.retry, SOONEST)
    return max(parser.retry, own)


# --- lines ----------------------------------------------------------------------------------------


class McpLineLink(LineLink, McpLink):
    """Lines to one server, and lines from it: a child process, or HTTP with SSE."""

    is_pipe = True

    def __init__(self, pipe: Callable[[], Pipe], max_bytes: int) -> None:
        LineLink.__init__(self, pipe, max_bytes)
        McpLink.__init__(self)
        self._greeted: Pipe | None = None
        self._greeting = asyncio.Lock()

    async def aclose(self) -> None:
        try:
            await cancel_all(*self._cancels)
        finally:
            await super().aclose()

    async def listen(self) -> None:
        """Note that the handshake with this pipe is done.

        The server's own messages use the same pipe.
        """
        self._greeted = self._pipe

    def exchange(self, exchange: Exchange) -> Coroutine[Any, Any, None]:
        """Send one message and take its answers, after the handshake."""
        if self.renew is not None and (self._pipe is None or self._pipe is not self._greeted):
            return self._greet_first(exchange)
        return super().exchange(exchange)

    async def _greet_first(self, exchange: Exchange) -> None:
        await self.ready()
        await super().exchange(exchange)

    async def ready(self) -> None:
        async with self._greeting:
            if await self._connected() is not self._greeted and self.renew is not None:
                try:
                    await self.renew()
                # A failed handshake cannot continue: the next one opens another pipe.
                except BaseException:
                    if self._pipe is not None:
                        self._over.append(self._pipe)
                        self._pipe = None
                    raise

    async def post(self, exchange: Exchange) -> bool:
        """Send a message unchanged. Return False: there is no session that could be gone."""
        await super().exchange(exchange)
        return False

    def _abandoned(self, exchange: Exchange) -> None:
        # `initialize` must not be cancelled (2024-11-05, cancellation).
        if self._pipe is not None and all(
            entry.method != "initialize" for entry in exchange.entries
        ):
            self._announce(exchange, self._pipe.write)

    async def send(self, message: bytes) -> None:
        await (await self._connected()).write(message)

    def _take(self, message: Received, in_array: bool) -> None:
        if isinstance(message, Arrived) and not message.is_answer:
            # Our own request sent back is a bad answer. `ping` is the only request that both sides
            # may send.
            id: Any = message.id
            ours = None
            if id in self._open:
                ours = self._open[id].known.get(id)
            if ours is None or message.method != ours.method or ours.method == "ping":
                self.on_message(message)
                return
        super()._take(message, in_array and not (self.revision and self.revision.has_arrays))


# --- memory ---------------------------------------------------------------------------------------


class McpMemoryLink(McpLink, LocalLink):
    """A link into an app of this process.

    `connect` takes the function that receives the app's messages, and returns the app's connection.

    The task that sends a message serves it: a task per message would cost as much as everything
    else. So cancelling it cancels the call, and after closing, calls in flight last until their
    deadlines.
    """

    is_pipe = True

    def __init__(self, connect: "Connect", enter: Step, leave: Step) -> None:
        super().__init__()
        self._connect = connect
        self._enter = enter
        self._leave = leave
        self._connection: Connection | None = None
        self._closed = asyncio.Event()

    async def open(self) -> None:
        if self._connection is None:
            await self._enter()
            self._closed = asyncio.Event()  # for the current loop
            self._connection = self._connect(self._receive)

    async def aclose(self) -> None:
        self._closed.set()
        connection = self._connection
        self._connection = None
        if connection is not None:
            await connection.aclose()
            await self._leave()

    async def exchange(self, exchange: Exchange) -> None:
        if self._connection is None:
            raise NotSent("the client is closed")
        exchange.sent = True
        receipt = Receipt()
        try:
            answer = self._connection.handle(exchange.data, receipt)
            if answer is not None and not isinstance(answer, bytes):
                answer = await answer
            if answer is not None:
                self._read(answer, exchange)
        except BaseException:
            receipt.lost()
            raise
        receipt.written()
        if exchange.open:  # the server does not answer a cancelled call
            await self._closed.wait()
            raise ConnectionLost("the client was closed")

    async def post(self, exchange: Exchange) -> bool:
        """Send a message unchanged. Return False: there is no session that could be gone."""
        await self.exchange(exchange)
        return False

    async def send(self, message: bytes) -> None:
        await self.exchange(Exchange(message, [], False))

    async def listen(self) -> None:
        """Do nothing: `_receive` takes the server's own messages."""

    async def _receive(self, message: bytes) -> None:
        self._read(message, None)


# --- HTTP with SSE --------------------------------------------------------------------------------


class SsePipe:
    """The transport of 2024-11-05 as a pipe of lines: it POSTs lines, and receives events.

    A GET opens a stream whose first event, `endpoint`, names the address to POST to; every answer
    is an event of the stream, never the answer to a POST. The session ends with the stream. The
    address must have the same origin as the stream: messages and headers are meant for the server
    that the caller named.
    """

    def __init__(self, url: str, http: Callable[[str], HttpClient]) -> None:
        self._url = url
        self._make = http
        self._stream = http(url)
        self._posts: HttpClient | None = None
        self._reader: asyncio.Task[None] | None = None

    async def open(
        self, on_line: Callable[[bytes], None], on_end: Callable[[CallFailed], None]
    ) -> None:
        """Wait for the address. Raises if the server does not speak this transport."""
        named: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        try:
            await self._stream.open()
            self._reader = asyncio.get_running_loop().create_task(
                self._listen(named, on_line, on_end)
            )
            async with asyncio.timeout(OPENING):
                self._posts = self._make(await named)
            await self._posts.open()
        except TimeoutError:
            await self.aclose()
            raise NotSent("the server did not name an address to send to") from None
        except BaseException:
            await self.aclose()
            raise

    async def write(self, line: bytes) -> None:
        """Send one message."""
        if self._posts is None:
            raise NotSent("the connection is closed")
        async with self._posts.request("POST", line, {"Content-Type": JSON}) as answer:
            if answer.status >= 400:
                raise status_error(answer, await answer.read())

    async def aclose(self) -> None:
        posts = self._posts
        self._posts = None
        try:
            await cancel_all(self._reader)
        finally:
            try:
                await self._stream.aclose()
            finally:
                if posts is not None:
                    await posts.aclose()

    async def _listen(
        self,
        named: "asyncio.Future[str]",
        on_line: Callable[[bytes], None],
        on_end: Callable[[CallFailed], None],
    ) -> None:
        try:
            async with self._stream.request("GET", headers={"Accept": EVENTS}) as answer:
                if answer.status != 200 or answer.media != EVENTS:
                    raise NotSent(f"there is no stream of events: HTTP {answer.status}")
                async for event in answer.events():
                    if event.name == "endpoint" and not named.done():
                        named.set_result(self._address(event.data))
                    elif event.name == "message" and named.done():
                        on_line(event.data.encode())
            raise ConnectionLost("the server has closed the stream")
        except WirecallError as error:
            failure: WirecallError = error
            if not isinstance(failure, CallFailed):
                failure = ConnectionLost(str(error))
            if named.done():
                on_end(failure)
            else:
                named.set_exception(failure)

    def _address(self, name: str) -> str:
        """Return the address that the server names; raise BadAnswer for one of another origin."""
        try:
            address = urljoin(self._url, name)
            if urlsplit(address)[:2] == urlsplit(self._url)[:2]:
                return address
        except ValueError:
            pass
        raise BadAnswer(f"the server must name an address at its own origin, got {name[:200]!a}")
