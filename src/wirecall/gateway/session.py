"""One conversation with a server behind the gateway.

1. A request gets an id of this conversation, and its progress token is that id. The ids and tokens
   of clients stay at the front.
2. Everything else is passed on as it came: params, results, and messages that are not known here.
3. The conversation remembers how its client has greeted the server. A server that was started again
   is greeted in the same way: `initialize`, `notifications/initialized`, the log level, and the
   subscriptions.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.client.exchange import AnyEntry, Entry, Exchange
from wirecall.errors import (
    BadAnswer,
    CallFailed,
    ConnectionLost,
    NotSent,
    Refused,
    RpcError,
    UpstreamUnavailable,
)
from wirecall.gateway import translate
from wirecall.gateway.changes import Changes
from wirecall.gateway.link import RelayLineLink
from wirecall.gateway.wire import members_of, one_line, raw_of, request, with_token
from wirecall.mcp.client.links import McpLink
from wirecall.mcp.client.negotiate import PROBE
from wirecall.mcp.revisions import HANDSHAKE, REVISIONS, STATELESS, Revision
from wirecall.mcp.types import LEVELS
from wirecall.protocol.messages import UNREADABLE, Arrived, JsonObject, encode

if TYPE_CHECKING:
    from wirecall.gateway.relay import Outbox
    from wirecall.gateway.upstream import Upstream
    from wirecall.mcp.server.peer import Outlet, Session

DISCOVER = "server/discover"
INITIALIZED = "notifications/initialized"
LEVEL = "logging/setLevel"
SUBSCRIBE = "resources/subscribe"
UNSUBSCRIBE = "resources/unsubscribe"
# Seconds that a server may take to answer `initialize`: it may have to load its modules first.
START_TIME = 60.0
# Bytes of a line that an error quotes.
SHOWN = 100
# Requests of a server that are kept until its client can be asked.
MOST_HELD = 100
# How a server of 2024-11-05 answers a POST to its stream.
_OLD = (400, 404, 405)
# Seconds: the entry of a request needs a number, and the gateway has its own limits.
_ENDLESS = 1e9

Report = Callable[[Raw | UnsetType], None]


class _Introduced(Struct, rename="camel"):
    """The member of the result of `initialize` that matters here."""

    protocol_version: str


class _Discovered(Struct, rename="camel"):
    """The member of the result of `server/discover` that matters here."""

    supported_versions: list[str]


class _Uri(Struct):
    uri: str


class _Named(Struct, rename="camel"):
    """The members of params that headers name."""

    name: Any = None
    uri: Any = None
    task_id: Any = None


class _Level(Struct):
    level: str = ""


class _Token(Struct, rename="camel"):
    progress_token: Any = UNSET


_decode_introduced = msgspec.json.Decoder(_Introduced).decode
_decode_discovered = msgspec.json.Decoder(_Discovered).decode
_decode_named = msgspec.json.Decoder(_Named).decode
_decode_uri = msgspec.json.Decoder(_Uri).decode
_decode_level = msgspec.json.Decoder(_Level).decode
_decode_token = msgspec.json.Decoder(_Token).decode


class Sent(Struct, eq=False):
    """One request that waits for its answer."""

    id: int
    exchange: Exchange
    # Takes the params of a progress notification. None: the client has not asked for progress.
    report: Report | None


class Wishes(Struct, eq=False):
    """What the next server is asked for too: a log level, and subscriptions by URI."""

    level: Raw | UnsetType | None = None
    subscriptions: dict[str, Raw | UnsetType] = {}
    # How many clients have subscribed to each URI.
    watched: Counter[str] = msgspec.field(default_factory=Counter)

    def __bool__(self) -> bool:
        return self.level is not None or bool(self.subscriptions)

    def forget(self, uri: str) -> bool:
        """Count a subscription off; return whether it was the last one."""
        if not self.watched[uri]:
            return False
        self.watched[uri] -= 1
        if self.watched[uri]:
            return False
        del self.watched[uri]
        self.subscriptions.pop(uri, None)
        return True


class UpstreamSession:
    """One conversation with a server."""

    def __init__(self, upstream: "Upstream") -> None:
        self.upstream = upstream
        self._use(upstream.link())
        self.link.marks = upstream.marks
        # The revision that `initialize` has agreed on. None: there was no `initialize`.
        self.revision: Revision | None = None
        # The revision of the client that opened it.
        self.offered: Revision | None = None
        # Called with each request and notification of the server.
        self.on_request: Callable[[Arrived], None] = self.refuse
        self.on_notification: Callable[[Arrived], None] = lambda _message: None
        # Its requests that came before the client could be asked.
        self._held: list[Arrived] = []
        # The answers to questions of the server that are refused.
        self._refusals: set[asyncio.Task[None]] = set()
        self._ids = count(1)
        self._waiting: dict[int, Sent] = {}
        # The connections over HTTP are made for an event loop.
        self._has_pool = False
        # What the server has said of itself, as it came and decoded.
        self._introduced = Raw(b"{}")
        self._described_by: tuple[Raw, dict[str, Any]] | None = None
        # The greeting of the client.
        self._introduction: Raw | UnsetType = UNSET
        self._is_initialized = False
        # The server has not answered `initialize` in time.
        self.is_mute = False
        # The gateway greets the server now. A link alone does not show that it serves, and an
        # answer may be a refusal.
        self._is_opening = False
        self.wishes = Wishes()
        # The clients whose calls are in flight, and what sends them messages.
        self.hearers: dict[Outbox, tuple[Session, Outlet]] = {}
        # How often another server has taken the place of the one before.
        self.renewals = 0
        # Called when another server has taken the place of the first: its lists may differ.
        self.on_renewed: Callable[[], None] = lambda: None
        # The stream on which a server of 2026-07-28 tells its changes. None: there is none.
        self._changes: Changes | None = None
        # The callers that have it now. `leave` must follow `enter`.
        self._users = 0
        # Set when a caller or a request ends.
        self._news = asyncio.Event()
        self._last_used = upstream.clock.time()

    def _use(self, link: McpLink) -> None:
        """Send and receive over this link."""
        self.link = link
        # The same link, if it is a pipe.
        self._line = link if isinstance(link, RelayLineLink) else None
        link.on_message = self._receive

    async def aclose(self) -> None:
        """End the conversation, and with it the child."""
        if self._changes is not None:
            await self._changes.aclose()
        await self.link.aclose()

    # --- requests ---------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Make the link, and greet the server if it was greeted before.

        A request over HTTP makes its own connection. After one that could not be sent, the server
        must answer a question first: a command must not try whether it is back.
        """
        if self._line is not None:
            if not self._line.is_ready:
                await self.upstream.reach(self.link.ready, is_greeted=not self._is_opening)
            return
        if not self._has_pool:
            self._has_pool = True
            await self.link.open()
        if self.upstream.is_up:
            return
        if self.upstream.is_cut:
            await self.upstream.reach(self._knock, is_greeted=not self._is_opening)
        else:
            self.upstream.check()

    async def _knock(self) -> None:
        """Ask a server over HTTP for a sign of life. Raises `NotSent` if it cannot be reached."""
        try:
            await self._ask("ping", UNSET)
        except NotSent:
            raise
        except (RpcError, CallFailed):
            return  # it is there, and may not know `ping`

    async def ready_again(self) -> None:
        """Make another link: nothing of a request could be sent over the one before."""
        if self._line is None:
            self.upstream.cut()
        await self.ready()

    async def ask(
        self,
        method: str,
        params: Raw | UnsetType,
        *,
        report: Report | None = None,
        on_sent: Callable[[Sent], None] | None = None,
    ) -> Raw:
        """Send a request, and return its result.

        A server that ended before anything was sent to it is started again, once, or tried again
        over HTTP. Raises an `RpcError` that the server has sent, or a `CallFailed`.
        """
        try:
            return await self._ask(method, params, report, on_sent)
        except NotSent:
            await self.ready_again()
            return await self._ask(method, params, report, on_sent)

    async def _ask(
        self,
        method: str,
        params: Raw | UnsetType,
        report: Report | None = None,
        on_sent: Callable[[Sent], None] | None = None,
    ) -> Raw:
        sent = self._sending(method, params, report)
        if on_sent is not None:
            on_sent(sent)
        return await self._settled(sent, self.link.exchange(sent.exchange))

    def _sending(self, method: str, params: Raw | UnsetType, report: Report | None) -> Sent:
        id = next(self._ids)
        if self._line is not None:
            self._line.last_id = id
        if report is not None:
            params = with_token(params, id)
        entry: AnyEntry = Entry(method, self._named(method, params), _nothing, _ENDLESS, id=id)
        exchange = Exchange(request(id, method, params), [entry], False)
        sent = self._waiting[id] = Sent(id, exchange, report)
        return sent

    async def _settled(self, sent: Sent, sending: Awaitable[object]) -> Raw:
        """Wait for the answer to a request; return its result."""
        entry = sent.exchange.entries[0]
        try:
            await sending
            sent.exchange.end_of_answers()
        finally:
            self._waiting.pop(sent.id, None)
            self._note_use()
        if not self.upstream.is_up and not self._is_opening:
            self.upstream.rose()
        if self._changes is not None and self._changes.is_over:
            self._changes.begin(self.wishes.subscriptions)
        if entry.error is not None:
            raise entry.error
        return Raw(one_line(entry.raw))

    @property
    def repeats_the_body(self) -> bool:
        """Whether headers repeat what the body says. On a pipe there are none."""
        revision = self.link.revision
        if self._line is not None or revision is None:
            return False
        return revision.has("http headers repeat the body")

    def _named(self, method: str, params: Raw | UnsetType) -> object:
        """Return what headers repeat of the params. On a pipe there are none.

        Arguments may be large. They are decoded only for a tool that has marked some of them.
        """
        if params is UNSET or not self.repeats_the_body:
            return None
        try:
            named = _decode_named(params)
        except msgspec.ValidationError:
            return None
        is_call = method == "tools/call" and isinstance(named.name, str)
        if is_call and self.upstream.marks(named.name):
            return msgspec.json.decode(params)
        return {"name": named.name, "uri": named.uri, "taskId": named.task_id}

    async def cancel(self, sent: Sent, params: Raw | UnsetType) -> None:
        """Pass a cancellation on, with the id of this conversation."""
        members = members_of(params)
        members["requestId"] = Raw(b"%d" % sent.id)
        await self.notify("notifications/cancelled", raw_of(members))

    def give_up(self, sent: Sent) -> None:
        """Stop waiting for an answer without a word to the server."""
        sent.exchange.open.clear()

    # --- messages without an answer ---------------------------------------------------------------

    async def notify(self, method: str, params: Raw | UnsetType) -> None:
        """Pass a notification on, if there is a server to take it."""
        if method == INITIALIZED:
            self._is_initialized = True
        await self.send(request(None, method, params))
        if method == INITIALIZED:
            await self.link.listen()

    async def send(self, message: bytes) -> None:
        """Send a message that has no answer. A server that has ended is not started for it."""
        if not self.link_is_there:
            return
        await self.link.send(message)

    def _receive(self, message: Arrived) -> None:
        """Take a request or a notification of the server."""
        if message.id is not UNSET:
            self.on_request(message)
            return
        if message.method != "notifications/progress":
            self.on_notification(message)
            return
        # A report for a token that is not known is dropped.
        try:
            token = _decode_token(raw_of({}) if message.params is UNSET else message.params)
        except msgspec.DecodeError:
            return
        sent = None
        if type(token.progress_token) is int:
            sent = self._waiting.get(token.progress_token)
        if sent is not None and sent.report is not None:
            sent.report(message.params)

    def hold(self, message: Arrived) -> None:
        """Keep a request of the server until its client can be asked."""
        if len(self._held) < MOST_HELD:
            self._held.append(message)
        else:
            self.refuse(message)

    def ask_with(self, ask: Callable[[Arrived], None]) -> None:
        """Pass the requests of the server on, also those that were kept."""
        self.on_request = ask
        while self._held:
            ask(self._held.pop(0))

    def refuse(self, message: Arrived) -> None:
        """Refuse a question: nothing was declared, so a server should not ask. A ping is answered."""
        ending = b'"error":{"code":-32601,"message":"Method not found"}'
        if message.method == "ping":
            ending = b'"result":{}'
        answer = b'{"jsonrpc":"2.0","id":%b,%b}' % (encode(message.id), ending)
        task = asyncio.get_running_loop().create_task(self._send_quietly(answer))
        self._refusals.add(task)
        task.add_done_callback(self._refusals.discard)

    async def _send_quietly(self, message: bytes) -> None:
        with suppress(CallFailed):
            await self.send(message)

    # --- the greeting -----------------------------------------------------------------------------

    async def initialize(self, params: Raw | UnsetType) -> Raw:
        """Pass the client's `initialize` on, and remember it; return its result."""
        try:
            async with asyncio.timeout(START_TIME):
                result = await self._initialized(params)
        except TimeoutError:
            self.is_mute = True
            reason = f"it did not answer initialize within {START_TIME:g} s{self._instead()}"
            child = self.upstream.starts.newest
            if child is not None and child.said:
                reason += f"; its last words: {child.said}"
            raise NotSent(reason) from None
        except ConnectionLost as error:
            raise ConnectionLost(f"{error}{self._instead()}") from error
        self._introduction = params
        self.link.renew = self._renew
        return result

    async def _initialized(self, params: Raw | UnsetType) -> Raw:
        try:
            return await self._greeted(params)
        except NotSent:
            if self._line is not None:
                raise  # `ready` has started the process several times
            await self.ready_again()
            return await self._greeted(params)

    async def _greeted(self, params: Raw | UnsetType) -> Raw:
        try:
            return await self._introduce(params)
        except (Refused, RpcError) as refusal:
            return await self._introduce_older(params, refusal)

    def _instead(self) -> str:
        """Return the end of an error message: what the program has printed instead of an answer."""
        if self._line is None or not self._line.printed.strip():
            return ""
        text = self._line.printed[:SHOWN].decode("utf-8", "replace").strip()
        return f"; it printed {text!r}, which is not a message of MCP"

    async def _introduce(self, params: Raw | UnsetType) -> Raw:
        sent = self._sending("initialize", params, None)
        result = await self._settled(sent, self.link.post(sent.exchange))
        try:
            version = _decode_introduced(result).protocol_version
        except msgspec.DecodeError as error:
            raise BadAnswer(f"what answers initialize is not its result: {error}") from None
        self.revision = self.link.revision = REVISIONS.get(version)
        self._introduced = result
        return result

    async def open(
        self,
        revision: Revision,
        capabilities: JsonObject | None = None,
        client: Mapping[str, str] | None = None,
        *,
        is_stated: bool = False,
    ) -> None:
        """Greet the server for the gateway itself, which declares nothing, or for its one client.

        The revision of its first client is offered. A server that does not have it decides, unless
        the settings state the revision.
        """
        self.offered = revision
        self._is_opening = True
        try:
            await self.ready()
            await self._open(revision, capabilities, client)
        except (RpcError, Refused) as error:
            if is_stated and not is_away(error):
                raise self._does_not_have(revision, str(error)) from error
            raise
        finally:
            self._is_opening = False
        if is_stated and self.revision is not revision:
            name = "another one" if self.revision is None else self.revision.name
            raise self._does_not_have(revision, f"it speaks {name}")

    def _does_not_have(self, revision: Revision, reason: str) -> NotSent:
        """Return the error for a server that does not speak the revision of the settings."""
        return NotSent(
            f'revision = "{revision.name}" is set for it, and the server refuses that: {reason}; '
            'remove the setting, or use "auto"'
        )

    async def _open(
        self,
        revision: Revision,
        capabilities: JsonObject | None,
        client: Mapping[str, str] | None,
    ) -> None:
        if revision.is_stateless and await self._discover():
            return
        offer = revision
        if revision.is_stateless:
            offer = HANDSHAKE[-1]
        params = {
            "protocolVersion": offer.name,
            "capabilities": capabilities or {},
            "clientInfo": client or translate.ME,
        }
        try:
            await self.initialize(raw_of(params))
        except (RpcError, Refused) as error:
            if is_away(error) or revision.is_stateless or not await self._discover():
                raise
            return
        try:
            async with asyncio.timeout(START_TIME):
                await self.notify(INITIALIZED, UNSET)
        except TimeoutError:
            raise NotSent(f"it did not take {INITIALIZED} within {START_TIME:g} s") from None

    async def discovers(self) -> bool:
        """Return whether the server speaks 2026-07-28. Nothing is agreed on."""
        await self.ready()
        try:
            await self._described(START_TIME)
        except (RpcError, Refused, BadAnswer, TimeoutError) as error:
            if is_away(error):
                raise
            return False
        return True

    async def _discover(self) -> bool:
        """Ask the server for what it is at 2026-07-28; return whether it speaks that revision."""
        try:
            self._introduced = await self._described(PROBE)
        except (RpcError, CallFailed, TimeoutError) as error:
            if is_away(error):
                raise  # further attempts have failed already
            return False
        self.revision = STATELESS[-1]
        return True

    async def _described(self, patience: float) -> Raw:
        """Return what the server says of itself at 2026-07-28."""
        self.link.revision = STATELESS[-1]
        try:
            async with asyncio.timeout(patience):
                found = await self.ask(DISCOVER, translate.envelope())
            if not is_newest(found):
                raise BadAnswer(f"what answers {DISCOVER} is not its result")
            return found
        except (RpcError, CallFailed, TimeoutError):
            self.link.revision = None
            raise

    def described(self) -> dict[str, Any]:
        """Return what the server says of itself. It is decoded once: each call may need it."""
        known = self._described_by
        if known is None or known[0] is not self._introduced:
            known = self._introduced, translate.introduced(self._introduced)
            self._described_by = known
        return known[1]

    async def _introduce_older(self, params: Raw | UnsetType, refusal: Refused | RpcError) -> Raw:
        """Try the transport of 2024-11-05 at the same address, or raise the refusal."""
        link = self.link
        if link.older is None or not isinstance(refusal, Refused) or refusal.status not in _OLD:
            raise refusal
        older = link.older()
        try:
            await older.open()
        except CallFailed:
            raise refusal from None
        self._use(older)
        await link.aclose()
        return await self._introduce(params)

    async def _renew(self) -> None:
        """Greet a server that was started again as its client greeted the first.

        Raises `NotSent` if that fails: a refused greeting does not answer the call behind it.
        """
        try:
            await self._greet_again()
        except NotSent:
            raise
        except RpcError as error:
            raise NotSent(
                f"the server that was started again refuses initialize: {error}"
            ) from error
        except CallFailed as error:
            raise NotSent(str(error)) from error

    async def _greet_again(self) -> None:
        before = self.revision
        self.renewals += 1
        self.link.revision = None
        try:
            async with asyncio.timeout(START_TIME):
                await self._introduce(self._introduction)
        except TimeoutError:
            raise NotSent(f"it did not answer initialize within {START_TIME:g} s") from None
        if self.revision is not before:
            self.revision = before
            raise NotSent("the server that was started again speaks another revision")
        self.upstream.tools = None
        self.on_renewed()
        if not self._is_initialized:
            return
        await self.link.send(request(None, INITIALIZED, UNSET))
        await self.link.listen()
        await self.repeat(self.wishes)

    async def repeat(self, wishes: Wishes) -> None:
        """Ask the server for what an earlier one was asked for, as far as it answers in time."""
        self.wishes = wishes
        with suppress(TimeoutError):
            async with asyncio.timeout(START_TIME):
                if wishes.level is not None:
                    await self._repeat(LEVEL, wishes.level)
                # A copy: clients may subscribe and unsubscribe in between.
                for params in list(wishes.subscriptions.values()):
                    await self._repeat(SUBSCRIBE, params)

    async def _repeat(self, method: str, params: Raw | UnsetType) -> None:
        """Repeat a request of the client. Whether the server takes it does not matter."""
        sent = self._sending(method, params, None)
        try:
            await self._settled(sent, self.link.post(sent.exchange))
        except RpcError:
            return

    def note(self, method: str, params: Raw | UnsetType) -> None:
        """Remember a request that the server has taken, for the next server."""
        if method == LEVEL:
            self.wishes.level = params
        if method not in (SUBSCRIBE, UNSUBSCRIBE) or params is UNSET:
            return
        try:
            uri = _decode_uri(params).uri
        except msgspec.DecodeError:
            return
        if method == SUBSCRIBE:
            self.wishes.subscriptions[uri] = params
        else:
            self.wishes.subscriptions.pop(uri, None)

    # --- what it tells ----------------------------------------------------------------------------

    def follow(self) -> None:
        """Ask a server of 2026-07-28 to tell its changes."""
        if self.revision in STATELESS:
            self._changes = Changes(self)
            self._changes.begin(self.wishes.subscriptions)

    async def stand(self, method: str, params: Raw) -> None:
        """Send a request whose answer ends a stream, and wait for that end."""
        id = next(self._ids)
        if self._line is not None:
            self._line.last_id = id
        entry: AnyEntry = Entry(method, self._named(method, params), _nothing, _ENDLESS, id=id)
        exchange = Exchange(request(id, method, params), [entry], False)
        exchange.is_standing = True
        await self.link.post(exchange)
        if entry.error is not None:
            raise entry.error

    async def watch(self, uri: str) -> None:
        """Subscribe to a resource for a client. Raises if the server refuses."""
        self.wishes.watched[uri] += 1
        # Else the server has not taken it yet: it may refuse the other client, and this one.
        if uri in self.wishes.subscriptions:
            return
        params = raw_of({"uri": uri})
        try:
            if self.revision not in STATELESS:
                await self.ready()
                await self.ask(SUBSCRIBE, params)
        except BaseException:
            self.wishes.forget(uri)
            raise
        self.wishes.subscriptions[uri] = params
        if self._changes is not None:
            self._changes.begin(self.wishes.subscriptions)

    async def unwatch(self, uri: str) -> None:
        """End a subscription of a client. The last one is reported to the server."""
        if not self.wishes.forget(uri):
            return
        if self._changes is not None:
            self._changes.begin(self.wishes.subscriptions)
        elif self.revision not in STATELESS and self.link_is_there:
            with suppress(RpcError, CallFailed):
                await self.ask(UNSUBSCRIBE, raw_of({"uri": uri}))

    @property
    def link_is_there(self) -> bool:
        """Whether a message needs no other child."""
        return self._line is None or self._line.is_open

    async def want_level(self, level: str) -> None:
        """Ask for log messages from this level on, unless others ask for more."""
        if self.revision in STATELESS or "logging" not in self.described()["capabilities"]:
            return
        known = self.wishes.level
        if isinstance(known, Raw):
            stated = _decode_level(known).level
            if stated in LEVELS and LEVELS.index(stated) <= LEVELS.index(level):
                return
        params = raw_of({"level": level})
        with suppress(RpcError, CallFailed, TimeoutError):
            async with asyncio.timeout(START_TIME):
                await self.ask(LEVEL, params)
            self.wishes.level = params

    # --- its use ----------------------------------------------------------------------------------

    def enter(self) -> None:
        """Count a caller that is about to send requests."""
        self._users += 1

    def leave(self) -> None:
        """Count a caller off. A command that it began may still wait for its answer."""
        self._users -= 1
        self._note_use()

    def _note_use(self) -> None:
        self._last_used = self.upstream.clock.time()
        self._news.set()

    @property
    def is_busy(self) -> bool:
        """Whether a caller has it, or a request waits for its answer."""
        return self._users > 0 or bool(self._waiting)

    @property
    def unused(self) -> float:
        """The seconds since its last use."""
        return self.upstream.clock.time() - self._last_used

    async def quiet(self) -> None:
        """Wait until it is not busy."""
        while self.is_busy:
            self._news.clear()
            await self._news.wait()


class UnreachedSession(UpstreamSession):
    """Stands for a conversation with a server that cannot be reached: nothing is sent to it.

    A recorded answer needs no server.
    """

    def __init__(self, upstream: "Upstream", reason: UpstreamUnavailable) -> None:
        super().__init__(upstream)
        self._reason = reason

    async def ready(self) -> None:
        raise self._reason


def _nothing(_entry: AnyEntry) -> None:
    """The result stays raw."""


def is_away(error: Exception) -> bool:
    """Return whether a server could not be reached. Another gateway may report that too."""
    return isinstance(error, UpstreamUnavailable) and not error.is_remote


def is_newest(found: Raw) -> bool:
    """Return whether what answers `server/discover` comes from a server of 2026-07-28.

    Some older servers answer any request.
    """
    try:
        return STATELESS[-1].name in _decode_discovered(found).supported_versions
    except UNREADABLE:
        return False
