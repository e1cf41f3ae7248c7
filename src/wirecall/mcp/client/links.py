"""A client's ways to a server of MCP: Streamable HTTP, a pipe of lines, and the HTTP with SSE of 2024-11-05.

`McpHttpLink`:

1. Every message is a POST. Its answer is JSON, or a stream of events that ends with the answer; both are taken everywhere.
2. Where there are sessions, the link sends the one it was given. A 404 for it says that the session is gone: `renew` makes
   another, and the message is sent again, because nothing of it ran.
3. A stream that ends before the answer is resumed: by GET with `Last-Event-ID`, not before the time that the server's
   `retry` asks for. That needs an event with an id; without one, and at 2026-07-28, the connection is lost.
4. Where there are sessions, a standing GET receives what the server sends on its own, if the server allows it.
5. A caller that stops waiting is announced: with `notifications/cancelled`, or at 2026-07-28 by closing the stream.

`McpLineLink`:

1. A message is a line. Answers find their exchange by id, in any order.
2. A pipe that has ended is opened anew by the next message. Where there is a handshake, the new one is greeted first.
3. A caller that stops waiting is announced with `notifications/cancelled`, in every revision.

`McpMemoryLink` hands a message to an app of this process, and takes the answer from it.

All take arrays only at 2025-03-26, which has them. Requests and notifications of the server go to `on_message`.
"""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urljoin, urlsplit

from msgspec import UNSET

from wirecall.client.delivery import DOUBLINGS, Clock
from wirecall.client.exchange import AnyEntry, Exchange, Link, LocalLink
from wirecall.client.links import LineLink, Pipe, Step, mark_replayed, refuse_by_status, status_error
from wirecall.errors import BadAnswer, CallFailed, ConnectionLost, InvalidRequest, NotSent, Refused, WirecallError
from wirecall.logs import logger
from wirecall.mcp.headers import VERSION, Marks, named, repeated
from wirecall.mcp.revisions import Revision
from wirecall.protocol.messages import Arrived, Received, Sending, encode, read_messages
from wirecall.stepping import cancel_all
from wirecall.transports.http_client import HttpAnswer, HttpClient
from wirecall.transports.sse import UNFIT, Event, Parser

if TYPE_CHECKING:
    from wirecall.transports.stdio import Connect, Connection

JSON, EVENTS = "application/json", "text/event-stream"
SESSION, LAST_EVENT = "mcp-session-id", "last-event-id"

COME_BACK = 0.2  # seconds before a stream that broke is asked for again, where the server names no time
SOONEST = 0.05  # and the least, for a server that asks for less
FURTHEST = 30.0  # and that time at most, doubled after every try that brought nothing
TRIES = 5  # without a single event, after which a stream is given up
MOMENT = 2.0  # seconds for the standing stream to begin
FAREWELL = 2.0  # seconds for the end of a session to be sent
OPENING = 10.0  # seconds for the address of HTTP with SSE to be named
KNOWN = 1000  # sets of headers that are kept

# A client must accept both, because the server chooses (2025-03-26, sending messages).
_BOTH = {"Content-Type": JSON, "Accept": f"{JSON}, {EVENTS}"}


class McpLink(Link):
    """A link that speaks MCP."""

    is_pipe: bool
    url: str | None = None  # of HTTP
    older: "Callable[[], McpLink] | None" = None  # the way of 2024-11-05 to the same address

    def __init__(self) -> None:
        self.revision: Revision | None = None  # None: nothing is agreed yet
        self.on_message: Callable[[Arrived], None] = lambda _message: None  # a request or notification of the server
        self.renew: Callable[[], Awaitable[None]] | None = None  # begins another session
        self.marks: Callable[[str], Marks] = lambda _tool: {}  # the arguments of a tool that headers repeat
        self._cancels: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def post(self, exchange: Exchange) -> bool:
        """Send a message as it is. Return True if the session is gone, and so nothing was done."""

    @abstractmethod
    async def send(self, message: bytes) -> None:
        """Send an answer to the server, or another message that is not answered."""

    @abstractmethod
    async def listen(self) -> None:
        """Receive what the server sends on its own."""

    def _read(self, text: bytes, exchange: Exchange | None) -> None:
        """Give answers to the exchange, and requests and notifications to `on_message`."""
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
        """Tell the server that the caller stopped waiting, in tasks of their own: the caller's task is being cancelled."""

        async def tell(id: int) -> None:
            params = {"requestId": id, "reason": "the caller stopped waiting for the answer"}
            with suppress(CallFailed, TimeoutError):
                async with asyncio.timeout(FAREWELL):
                    await send(encode({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}))

        for id in exchange.open:
            task = asyncio.get_running_loop().create_task(tell(id))
            self._cancels.add(task)
            task.add_done_callback(self._cancels.discard)


# --- Streamable HTTP -------------------------------------------------------------------------------------------------


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
        """End the session, what is in flight, and all connections."""
        await cancel_all(self._standing, *self._cancels)
        if self.session is not None:
            # A client that leaves ends its session; a server may refuse with 405 (2025-03-26, session management).
            with suppress(CallFailed, TimeoutError):
                async with asyncio.timeout(FAREWELL), self._http.request("DELETE", headers=self._shared()):
                    pass
        await self._http.aclose()

    # --- messages ----------------------------------------------------------------------------------------------------

    async def exchange(self, exchange: Exchange) -> None:
        """Send one message and take its answers, in a session that lives."""
        if self._renewing.locked():  # no message goes while a session is made
            async with self._renewing:
                pass
        gone = self.session
        if not await self.post(exchange):
            return
        async with self._renewing:
            if self.session == gone and self.renew is not None:  # else another message has renewed it
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
        headers = self._headers(exchange.entries[0])
        stream: Parser | None = None  # the one that the answer is, if it is one
        try:
            try:
                async with self._http.request("POST", exchange.data, headers, exchange=exchange) as answer:
                    # 404 under a session id: the session is over, nothing ran (2025-03-26, session management).
                    if answer.status == 404 and SESSION in headers:
                        return True
                    exchange.begun = True
                    is_good = 200 <= answer.status < 300
                    if exchange.entries[0].method == "initialize" and answer.status == 200:
                        session = answer.headers.get(SESSION, "")
                        if UNFIT.search(session):
                            raise BadAnswer(f"the session id must be text without control characters, got {session[:100]!a}")
                        self.session = session or None
                    mark_replayed(exchange, answer)
                    if is_good and answer.media == EVENTS:
                        stream = Parser(self._http.max_bytes)
                        await self._read_stream(answer, stream, exchange)
                    else:
                        body = await answer.read()
                        if not is_good:
                            refuse_by_status(exchange, answer, body)
                        elif body and exchange.known:  # some servers answer a notification, which is owed nothing
                            self._read(body, exchange)
            except ConnectionLost:
                if stream is None or not self._can_resume(stream):
                    raise
            if stream is not None and not exchange.is_done:
                await self._resume(exchange, stream)
        except asyncio.CancelledError:
            # From 2026-07-28 on the closed stream says that the caller stopped waiting.
            if self.revision is not None and exchange.sent and not self.revision.has("http disconnect cancels"):
                self._announce(exchange, self.send)
            raise
        return False

    async def send(self, message: bytes) -> None:
        async with self._http.request("POST", message, {**_BOTH, **self._shared()}) as answer:
            if answer.status >= 400:
                logger.warning("the server did not take an answer: HTTP %d", answer.status)

    def _headers(self, entry: AnyEntry) -> dict[str, str]:
        revision = self.revision
        if revision is None or not revision.has("http headers repeat the body"):
            return {**_BOTH, **self._shared()}
        name = named(entry.method, entry.params)
        marks = self.marks(name) if name is not None and entry.method == "tools/call" else None
        if marks:
            return {**_BOTH, **repeated(revision.name, entry.method, entry.params, marks)}
        known = (revision.name, entry.method, name)
        headers = self._known.get(known)
        if headers is None:  # made once: the same few calls come again and again
            if len(self._known) >= KNOWN:
                self._known.clear()
            headers = self._known[known] = {**_BOTH, **repeated(revision.name, entry.method, entry.params, {})}
        return headers

    def _shared(self) -> dict[str, str]:
        """Return the headers of every request of a session."""
        session = {SESSION: self.session} if self.session is not None else {}
        revision = self.revision
        # The version that was agreed goes with every request after the handshake (2025-06-18, protocol version header).
        return {**session, VERSION: revision.name} if revision and revision.has("http version header") else session

    # --- streams -----------------------------------------------------------------------------------------------------

    async def _read_stream(self, answer: HttpAnswer, parser: Parser, exchange: Exchange | None) -> int:
        """Read the messages of a stream until it ends or all calls are answered; return how many there were."""
        count = 0
        async with aclosing(cast(AsyncGenerator[Event, None], answer.events(parser))) as events:
            async for event in events:
                if event.data and event.name == "message":  # an event without data only says where to come back
                    self._read(event.data.encode(), exchange)
                    count += 1
                if exchange is not None and exchange.is_done:
                    break
        return count

    def _can_resume(self, parser: Parser) -> bool:
        return bool(parser.last_id) and self.revision is not None and self.revision.has("http resume")

    async def _resume(self, exchange: Exchange, parser: Parser) -> None:
        """Take the rest of a stream that ended before the answer."""
        fruitless, granted = 0, self._can_resume(parser)
        while granted and fruitless < TRIES and not exchange.is_done:
            place = parser.last_id
            await self._clock.sleep(_pause(parser, fruitless))
            try:
                async with self._get(parser) as answer:
                    granted = answer.status == 200 and answer.media == EVENTS
                    if granted:
                        await self._read_stream(answer, parser, exchange)
            except ConnectionLost:
                pass  # the next try may reach the server
            except (NotSent, Refused) as error:  # said of the question for the rest; the call itself may well have run
                reason = f"the stream ended before the answer, and cannot be resumed: {error}"
                raise ConnectionLost(reason, status=error.status) from error
            fruitless = fruitless + 1 if parser.last_id == place else 0
        if not exchange.is_done:
            reason = f"the stream ended before the answer, and cannot be resumed{exchange.instead}"
            raise ConnectionLost(reason, retry_after=parser.retry)

    def _get(self, parser: Parser) -> AbstractAsyncContextManager[HttpAnswer]:
        """Ask for a stream that continues after the last event of the parser."""
        parser.restart()
        # Last-Event-ID asks for what came after that event (HTML standard, section 9.2; MCP 2025-03-26, resumability).
        place = {LAST_EVENT: parser.last_id} if parser.last_id else {}
        return self._http.request("GET", headers={"Accept": EVENTS, **self._shared(), **place})

    async def listen(self) -> None:
        """Open the stream of the server's own messages, and wait a moment for it: some servers drop messages without it."""
        if self._standing is not None:
            self._standing.cancel()
        stands = asyncio.Event()
        self._standing = asyncio.get_running_loop().create_task(self._stand(stands))
        self._standing.add_done_callback(lambda _: stands.set())
        with suppress(TimeoutError):
            async with asyncio.timeout(MOMENT):
                await stands.wait()

    async def _stand(self, stands: asyncio.Event) -> None:
        parser, fruitless = Parser(self._http.max_bytes), 0
        while True:
            try:
                async with self._get(parser) as answer:
                    if answer.status != 200 or answer.media != EVENTS:
                        return  # 405: it has none. 404: the session is gone, and the next call makes another
                    stands.set()
                    fruitless = 0 if await self._read_stream(answer, parser, None) else fruitless + 1
            except ConnectionLost:
                fruitless += 1
            except WirecallError as error:
                logger.warning("the stream of the server's own messages is given up: %s", error)
                return
            await self._clock.sleep(_pause(parser, fruitless))


def _pause(parser: Parser, fruitless: int) -> float:
    """Return the seconds before a stream is asked for again: what the server wishes, and more if that brought nothing."""
    own = min(FURTHEST, COME_BACK * 2.0 ** min(fruitless, DOUBLINGS))
    if parser.retry is None:
        return own
    return max(parser.retry, own if fruitless else SOONEST)


# --- lines -----------------------------------------------------------------------------------------------------------


class McpLineLink(LineLink, McpLink):
    """Lines to one server, and lines from it: a child process, or HTTP with SSE."""

    is_pipe = True

    def __init__(self, pipe: Callable[[], Pipe], max_bytes: int) -> None:
        LineLink.__init__(self, pipe, max_bytes)
        McpLink.__init__(self)
        self._greeted: Pipe | None = None
        self._greeting = asyncio.Lock()

    async def aclose(self) -> None:
        await cancel_all(*self._cancels)
        await super().aclose()

    async def listen(self) -> None:
        """Note that the handshake with this pipe is done. The server's own messages come by the same pipe."""
        self._greeted = self._pipe

    def exchange(self, exchange: Exchange) -> Coroutine[Any, Any, None]:
        """Send one message and take its answers, to a server that has been greeted."""
        is_new = self.renew is not None and (self._pipe is None or self._pipe is not self._greeted)
        return self._greet_first(exchange) if is_new else super().exchange(exchange)

    async def _greet_first(self, exchange: Exchange) -> None:
        async with self._greeting:
            if await self._connected() is not self._greeted and self.renew is not None:
                try:
                    await self.renew()
                except BaseException:  # half a greeting cannot be continued: the next one begins with another pipe
                    if self._pipe is not None:
                        self._over.append(self._pipe)
                        self._pipe = None
                    raise
        await super().exchange(exchange)

    async def post(self, exchange: Exchange) -> bool:
        """Send a message as it is. Return False: there are no sessions that could be gone."""
        await super().exchange(exchange)
        return False

    def _abandoned(self, exchange: Exchange) -> None:
        # `initialize` must not be cancelled (2024-11-05, cancellation).
        if self._pipe is not None and all(entry.method != "initialize" for entry in exchange.entries):
            self._announce(exchange, self._pipe.write)

    async def send(self, message: bytes) -> None:
        await (await self._connected()).write(message)

    def _take(self, message: Received, in_array: bool) -> None:
        if isinstance(message, Arrived) and not message.is_answer:
            # A request of ours that comes back is a bad answer. Of what a client asks, a server may ask `ping` alone.
            id: Any = message.id
            ours = self._open[id].known.get(id) if id in self._open else None
            if ours is None or message.method != ours.method or ours.method == "ping":
                self.on_message(message)
                return
        super()._take(message, in_array and not (self.revision and self.revision.has_arrays))


# --- memory ----------------------------------------------------------------------------------------------------------


class McpMemoryLink(McpLink, LocalLink):
    """Straight into an app of this process: `connect` takes the way back and returns the app's connection.

    The task that sends a message serves it: a task per message would cost as much as the rest of the way. So cancelling it
    cancels the call, and closing leaves calls in flight to their deadlines.
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
            self._closed = asyncio.Event()  # of the loop that runs now
            self._connection = self._connect(self._receive)

    async def aclose(self) -> None:
        self._closed.set()
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.aclose()
            await self._leave()

    async def exchange(self, exchange: Exchange) -> None:
        if self._connection is None:
            raise NotSent("the client is closed")
        exchange.sent, sending = True, Sending()
        try:
            answer = self._connection.handle(exchange.data, sending)
            if answer is not None and not isinstance(answer, bytes):
                answer = await answer
            if answer is not None:
                self._read(answer, exchange)
        except BaseException:
            sending.lost()
            raise
        sending.written()
        if exchange.open:  # the server does not answer a call that was cancelled
            await self._closed.wait()
            raise ConnectionLost("the client was closed")

    async def post(self, exchange: Exchange) -> bool:
        """Send a message as it is. Return False: there are no sessions that could be gone."""
        await self.exchange(exchange)
        return False

    async def send(self, message: bytes) -> None:
        await self.exchange(Exchange(message, [], False))

    async def listen(self) -> None:
        """Do nothing: the server's own messages come by `_receive`."""

    async def _receive(self, message: bytes) -> None:
        self._read(message, None)


# --- HTTP with SSE ---------------------------------------------------------------------------------------------------


class SsePipe:
    """The transport of 2024-11-05 as a pipe of lines: what goes in is POSTed, what comes out are events.

    A GET opens a stream whose first event, `endpoint`, names the address to POST to; every answer comes as an event of the
    stream, never as one to a POST. With the stream the session ends. The address must be of the same origin as the stream:
    messages and headers are meant for the server that was named.
    """

    def __init__(self, url: str, http: Callable[[str], HttpClient]) -> None:
        self._url = url
        self._make = http
        self._stream = http(url)
        self._posts: HttpClient | None = None
        self._reader: asyncio.Task[None] | None = None

    async def open(self, on_line: Callable[[bytes], None], on_end: Callable[[CallFailed], None]) -> None:
        """Wait for the address to be named. Raises if the server does not speak so."""
        named: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        await self._stream.open()
        self._reader = asyncio.get_running_loop().create_task(self._listen(named, on_line, on_end))
        try:
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
        await cancel_all(self._reader)
        for http in (self._stream, self._posts):
            if http is not None:
                await http.aclose()
        self._posts = None

    async def _listen(
        self, named: "asyncio.Future[str]", on_line: Callable[[bytes], None], on_end: Callable[[CallFailed], None]
    ) -> None:
        try:
            async with self._stream.request("GET", headers={"Accept": EVENTS}) as answer:
                if answer.status != 200 or answer.media != EVENTS:
                    raise NotSent(f"there is no stream of events: HTTP {answer.status}")
                async for event in answer.events():
                    if event.name == "endpoint" and not named.done():
                        try:
                            address = urljoin(self._url, event.data)
                            is_here = urlsplit(address)[:2] == urlsplit(self._url)[:2]
                        except ValueError:
                            is_here = False
                        if not is_here:
                            raise BadAnswer(f"the server must name an address at its own origin, got {event.data[:200]!a}")
                        named.set_result(address)
                    elif event.name == "message" and named.done():
                        on_line(event.data.encode())
            raise ConnectionLost("the server has closed the stream")
        except WirecallError as error:
            failure = error if isinstance(error, CallFailed) else ConnectionLost(str(error))
            if named.done():
                on_end(failure)
            else:
                named.set_exception(failure)
