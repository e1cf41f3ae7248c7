"""A client's way to a server of MCP over Streamable HTTP, in all its revisions.

1. Every message is a POST. Its answer is JSON, or a stream of events that ends with the answer; both are taken everywhere.
2. Where there are sessions, the link sends the one it was given. A 404 for it says that the session is gone: `renew` makes
   another, and the message is sent again, because nothing of it ran.
3. A stream that ends before the answer is gone on with: by GET with `Last-Event-ID`, not before the time that the server's
   `retry` asks for. That needs an event with an id; without one, and at 2026-07-28, the connection is lost.
4. Where there are sessions, a standing GET hears what the server says on its own, for as long as the server grants one.
5. Who stops waiting says so: with `notifications/cancelled`, or at 2026-07-28 by closing the stream.
6. What is no answer (`heard`) is not the link's business. Arrays are taken wherever 2025-03-26 has them, and nowhere else.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, cast

from wirecall.client.exchange import Entry, Exchange
from wirecall.client.links import REPLAYED, refuse_by_status, replayed_ids
from wirecall.client.retries import DOUBLINGS, Clock
from wirecall.errors import BadAnswer, CallFailed, ConnectionLost, InvalidRequest, NotSent, WirecallError
from wirecall.logs import logger
from wirecall.mcp.client.headers import Marks, named, repeated
from wirecall.mcp.client.line_link import McpLineLink
from wirecall.mcp.headers import VERSION
from wirecall.mcp.revisions import Revision
from wirecall.protocol.messages import encode
from wirecall.protocol.replies import Arrived, read_messages
from wirecall.transports.http_client import HttpAnswer, HttpClient
from wirecall.transports.sse import UNFIT, Event, Parser

JSON, EVENTS = "application/json", "text/event-stream"
SESSION, LAST_EVENT = "mcp-session-id", "last-event-id"

COME_BACK = 0.2  # seconds before a stream that broke is asked for again, where the server names no time
SOONEST = 0.05  # and the least, for a server that asks for less
FURTHEST = 30.0  # and that time at most, doubled after every try that brought nothing
TRIES = 5  # without a single event, after which a stream is given up
MOMENT = 2.0  # seconds for the standing stream to begin
FAREWELL = 2.0  # seconds for the end of a session to be told

KNOWN = 1000  # sets of headers

_BOTH = {"Content-Type": JSON, "Accept": f"{JSON}, {EVENTS}"}

Heard = Callable[[Arrived], None]


class McpHttpLink:
    """POSTs, streams and the session at one address."""

    is_pipe = False

    def __init__(self, http: HttpClient, older: "Callable[[], McpLineLink] | None", clock: Clock) -> None:
        self.older = older  # the way of 2024-11-05 to the same address
        self.revision: Revision | None = None  # None: nothing is agreed yet
        self.session: str | None = None
        self.heard: Heard = lambda _message: None
        self.renew: Callable[[], Awaitable[None]] | None = None
        self.marks: Callable[[str], Marks] = lambda _tool: {}
        self._http = http
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._standing: asyncio.Task[None] | None = None
        self._renewing = asyncio.Lock()
        self._known: dict[tuple[str, str, str | None], dict[str, str]] = {}

    async def open(self) -> None:
        await self._http.open()

    async def aclose(self) -> None:
        """End the session, what is under way, and all connections."""
        for task in (self._standing, *self._tasks):
            if task is not None:
                task.cancel()
        await asyncio.gather(*(task for task in (self._standing, *self._tasks) if task), return_exceptions=True)
        if self.session is not None:
            with suppress(CallFailed, TimeoutError):
                async with asyncio.timeout(FAREWELL), self._http.request("DELETE", headers=self._shared()):
                    pass
        await self._http.aclose()

    # --- messages ----------------------------------------------------------------------------------------------------

    async def exchange(self, exchange: Exchange) -> None:
        """One message and its answers, in a session that lives."""
        if self._renewing.locked():  # nobody speaks while a session is made
            async with self._renewing:
                pass
        session = self.session
        if await self.post(exchange):
            await self._renew(session)
            if exchange.array and not (self.revision and self.revision.has_arrays):
                exchange.refuse(InvalidRequest("the server's new session has no arrays"))
            elif await self.post(exchange):
                raise NotSent("the server forgets its sessions at once")

    async def _renew(self, gone: str | None) -> None:
        async with self._renewing:
            if self.session != gone or self.renew is None:
                return  # somebody else was here before
            self.session = None
            try:
                await self.renew()
            except BaseException:
                self.session = gone  # so that the next one tries again
                raise

    async def post(self, exchange: Exchange) -> bool:
        """The message as it is. True: the session is gone, and nothing was done."""
        headers = self._headers(exchange.entries[0])
        streams: list[Parser] = []  # the one that the answer is, if it is one
        try:
            async with self._http.request("POST", exchange.data, headers, exchange=exchange) as answer:
                if answer.status == 404 and SESSION in headers:
                    return True
                exchange.begun = True
                self._take_session(exchange, answer)
                await self._answered(exchange, answer, streams)
        except ConnectionLost:
            if not (streams and self._can_resume(streams[0])):
                raise
        except asyncio.CancelledError:
            self._cancel(exchange)
            raise
        if streams and not exchange.is_done:
            await self._come_back(exchange, streams[0])
        return False

    async def send(self, message: bytes) -> None:
        """An answer to the server, or another message that is owed nothing."""
        async with self._http.request("POST", message, {**_BOTH, **self._shared()}) as answer:
            if answer.status >= 400:
                logger.warning("the server did not take an answer: HTTP %d", answer.status)

    def _headers(self, entry: Entry) -> dict[str, str]:
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
        """What every request of a session says."""
        session = {SESSION: self.session} if self.session is not None else {}
        revision = self.revision
        return {**session, VERSION: revision.name} if revision and revision.has("http version header") else session

    def _take_session(self, exchange: Exchange, answer: HttpAnswer) -> None:
        if exchange.entries[0].method == "initialize" and answer.status == 200:
            session = answer.headers.get(SESSION, "")
            if UNFIT.search(session):
                raise BadAnswer(f"the session id must be text without control characters, got {session[:100]!a}")
            self.session = session or None

    def _cancel(self, exchange: Exchange) -> None:
        """Nobody waits for these any more (2024-11-05 to 2025-11-25; later the closed stream says so)."""
        revision = self.revision
        if revision is None or revision.has("http disconnect cancels") or not exchange.sent:
            return
        for id in exchange.open:
            params = {"requestId": id, "reason": "nobody waits for the answer"}
            message = encode({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params})
            self._spawn(self._try_to_send(message))

    async def _try_to_send(self, message: bytes) -> None:
        with suppress(CallFailed, TimeoutError):
            async with asyncio.timeout(FAREWELL):
                await self.send(message)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- answers -----------------------------------------------------------------------------------------------------

    async def _answered(self, exchange: Exchange, answer: HttpAnswer, streams: list[Parser]) -> None:
        """Take the answer. If it is a stream, `streams` has the one who knows where it broke off."""
        if told := answer.headers.get(REPLAYED):
            exchange.replayed(replayed_ids(told))
        is_good = 200 <= answer.status < 300
        if is_good and answer.media == EVENTS:
            streams.append(Parser(self._http.max_bytes))
            await self._drink(answer, streams[0], exchange)
            return
        body = await answer.read()
        if not is_good:
            refuse_by_status(exchange, answer, body)
        elif body and exchange.known:  # some answer a notification, which is owed nothing
            self._read(body, exchange)

    async def _drink(self, answer: HttpAnswer, parser: Parser, exchange: Exchange | None) -> int:
        """Take the messages of a stream until it ends or all is answered; how many there were."""
        count = 0
        async with aclosing(cast(AsyncGenerator[Event, None], answer.events(parser))) as events:
            async for event in events:
                if event.data and event.name == "message":  # an event without data only says where to come back
                    self._read(event.data.encode(), exchange)
                    count += 1
                if exchange is not None and exchange.is_done:
                    break
        return count

    def _read(self, text: bytes, exchange: Exchange | None) -> None:
        """Answers go to the exchange; requests and notifications are heard."""
        in_array, messages = read_messages(text)
        odd = in_array and not (self.revision and self.revision.has_arrays)
        if in_array and not messages and exchange is not None:
            exchange.strays.append("an empty array")
        for message in messages:
            if isinstance(message, Arrived) and not message.is_answer:
                self.heard(message)
            elif exchange is not None:
                exchange.take(message, odd)
            else:
                logger.debug("an answer that nobody waits for: %.200r", message)

    # --- streams that break ------------------------------------------------------------------------------------------

    def _can_resume(self, parser: Parser) -> bool:
        return bool(parser.last_id) and self.revision is not None and self.revision.has("http resume")

    async def _come_back(self, exchange: Exchange, parser: Parser) -> None:
        """The rest of a stream that ended before the answer."""
        try:
            await self._follow(exchange, parser)
        except asyncio.CancelledError:
            self._cancel(exchange)
            raise

    async def _follow(self, exchange: Exchange, parser: Parser) -> None:
        fruitless, granted = 0, self._can_resume(parser)
        while granted and fruitless < TRIES and not exchange.is_done:
            place = parser.last_id
            await self._clock.sleep(_pause(parser, fruitless))
            parser = self._continued(parser)
            with suppress(ConnectionLost):
                granted = await self._resume(exchange, parser)
            fruitless = fruitless + 1 if parser.last_id == place else 0
        if not exchange.is_done:
            raise ConnectionLost("the stream ended before the answer, and cannot be resumed", retry_after=parser.retry)

    async def _resume(self, exchange: Exchange, parser: Parser) -> bool:
        """Follow the stream from where it broke; False if the server does not let us."""
        headers = {"Accept": EVENTS, **self._shared(), LAST_EVENT: parser.last_id}
        async with self._http.request("GET", headers=headers) as answer:
            granted = answer.status == 200 and answer.media == EVENTS
            if granted:
                await self._drink(answer, parser, exchange)
            return granted

    def _continued(self, parser: Parser) -> Parser:
        """A parser for the next connection: the place and the pause are kept, half an event is not."""
        fresh = Parser(self._http.max_bytes)
        fresh.last_id, fresh.retry = parser.last_id, parser.retry
        return fresh

    # --- the standing stream -----------------------------------------------------------------------------------------

    async def listen(self) -> None:
        """Hear what the server says on its own. It is given a moment: some servers drop what nobody hears."""
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
                parser = self._continued(parser)
                headers = {"Accept": EVENTS, **self._shared()}
                if parser.last_id:
                    headers[LAST_EVENT] = parser.last_id
                async with self._http.request("GET", headers=headers) as answer:
                    if answer.status != 200 or answer.media != EVENTS:
                        return  # 405: it has none. 404: the session is gone, and the next call makes another
                    stands.set()
                    fruitless = 0 if await self._drink(answer, parser, None) else fruitless + 1
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
