"""The MCP servers of a gateway: `/mcp/NAME` is one upstream, `/mcp` is all of them.

Both are servers of `mcp.server`, so sessions, streams, tokens and arrays are its own. Only the
answers come from elsewhere: a request is passed on by a `Relay`, over a conversation that is shared
as the upstream's `share` says. Such a conversation declares nothing, so its server asks nothing.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, Raw, Struct, structs

from wirecall.aio import Signal
from wirecall.errors import (
    BadAnswer,
    CallFailed,
    Gone,
    InvalidParams,
    InvalidRequest,
    NotCapable,
    RpcError,
    UpstreamUnavailable,
)
from wirecall.gateway import tasks
from wirecall.gateway.offers import NAMED, Merged, beginning, merged, there_are
from wirecall.gateway.relay import Flying, Relay, cancel
from wirecall.gateway.rounds import Bridge, ask_client
from wirecall.gateway.session import INITIALIZED, UnreachedSession, UpstreamSession
from wirecall.gateway.translate import envelope
from wirecall.gateway.wire import (
    answer,
    members_of,
    one_line,
    raw_of,
    refuse_doubles,
    with_member,
)
from wirecall.logs import logger
from wirecall.mcp import headers, types
from wirecall.mcp.revisions import STATELESS, offered
from wirecall.mcp.server.catalog import Catalog
from wirecall.mcp.server.changes import MAX_SUBSCRIPTIONS, Hub
from wirecall.mcp.server.messages import ClientAnswer, Id, Incoming, error_object
from wirecall.mcp.server.peer import Outlet, Peer, Session, named_client
from wirecall.mcp.server.server import Server, ServerInfo
from wirecall.protocol.messages import Arrived, Envelope, Invalid, encode
from wirecall.protocol.sender import ANONYMOUS, Sender
from wirecall.server.method import Registry
from wirecall.version import __version__

if TYPE_CHECKING:
    from wirecall.gateway.gateway import Gateway
    from wirecall.gateway.upstream import Upstream
    from wirecall.server.call import Mark

MISSING_META = "io.wirecall/missing"
# Seconds in which the upstreams must give their lists. The others are left out.
LIST_TIME = 5.0
# Seconds between two attempts to reach an upstream that was left out, at first and at most.
BACK_AFTER = 1.0
BACK_AT_MOST = 30.0
MOST_PAGES = 100
# Milliseconds for which a list may be kept: a day. A server may state any number.
LONGEST_TTL = 86_400_000
# Tables of callers that are kept.
MOST_TABLES = 1000
# Sessions whose requests in flight are known.
MOST_SESSIONS = 10_000

_LISTS = {
    "tools/list": "tools",
    "prompts/list": "prompts",
    "resources/list": "resources",
    "resources/templates/list": "resourceTemplates",
}
_ROOTS_CHANGED = "notifications/roots/list_changed"
_SUBSCRIBING = ("resources/subscribe", "resources/unsubscribe")
_METHODS = {kind: method for method, kind in _LISTS.items()}
_CHANGES = {
    "notifications/tools/list_changed": ("tools",),
    "notifications/prompts/list_changed": ("prompts",),
    "notifications/resources/list_changed": ("resources", "resourceTemplates"),
}
_ANYTHING: dict[Any, object] = {"": None}
_decode_initialize = msgspec.json.Decoder(types.Initialize).decode
_decode_listen = msgspec.json.Decoder(types.Listen).decode
_decode_text = msgspec.json.Decoder(str).decode
_decode_entries = msgspec.json.Decoder(list[Raw]).decode
_decode_ttl = msgspec.json.Decoder(int).decode


class Front(Server):
    """A server whose answers come from upstreams."""

    def __init__(self, gateway: "Gateway", name: str) -> None:
        self.gateway = gateway
        catalog = Catalog(Registry(), {})
        for kind in catalog.offered:
            catalog.offered[kind] = [_ANYTHING]
        super().__init__(
            ServerInfo(name, __version__),
            catalog,
            gateway._serving,
            gateway.sealer,
            gateway.ledger,
            list_ttl_ms=0,
            is_public=gateway.access is None,
            limits=gateway.limits,
            access=gateway.access,
        )
        self.in_lane = self._in_lane
        # The requests of each session that are not answered yet.
        self._flying: dict[object, dict[Id, Flying]] = {}
        # The resources that sessions have subscribed to: their upstream, and their URI there.
        self._watched: dict[tuple[object, str], tuple[Upstream, str]] = {}

    def begin_array(self, sender: Sender, size: int) -> "Mark | None":
        return self.gateway._serving().begin_array(sender, size)

    def _in_lane(self, message: tuple[Incoming, Any]) -> bool:
        params = message[1]
        return isinstance(params, types.CallTool) and self.is_command(params.name)

    def is_command(self, tool: str) -> bool:
        """Return whether a tool of an upstream changes something."""
        raise NotImplementedError

    def own_uri(self, upstream: "Upstream", uri: str) -> str:
        """Return the URI of an upstream's resource as clients know it."""
        raise NotImplementedError

    def take(self, message: "Envelope | ClientAnswer", session: Session) -> bool:
        """Take a notification: a cancellation ends a request of the same session."""
        if isinstance(message, ClientAnswer):
            return super().take(message, session)
        if message.method != "notifications/cancelled":
            self.pass_on(message, session)
            return super().take(message, session)
        requests = self._flying.get(_key_of(session))
        if requests is None:
            return False
        self.gateway.start(cancel(requests, message.params))
        return True

    def pass_on(self, message: Envelope, session: Session) -> None:
        """Pass a notification on to the servers that the session owns, if there are any."""

    async def passed_on(self, upstream: "Upstream", message: Envelope, session: Session) -> None:
        """Pass a notification on to a server that the session owns, if both speak one revision."""
        with suppress(RpcError, CallFailed):
            async with self.gateway.conversation(
                upstream, session.caller or ANONYMOUS, session
            ) as conversation:
                conversation.ask_with(partial(self._asked, conversation, session))
                # The gateway has greeted the server by now.
                if message.method != INITIALIZED and conversation.revision is session.revision:
                    await conversation.notify(message.method, message.params)

    def ended(self, session: Session) -> None:
        """End what the session of a client had at the upstreams."""
        self.gateway.start(self.gateway.end_owned(session))
        for uri in session.subscriptions:
            found = self._watched.pop((_key_of(session), uri), None)
            if found is not None:
                upstream, theirs = found
                caller = session.caller or ANONYMOUS
                self.gateway.start(self.gateway.unwatch(upstream, caller, session, theirs))

    # --- subscriptions ----------------------------------------------------------------------------

    async def subscribed_to(
        self, upstream: "Upstream", theirs: str, message: Envelope, session: Session, caller: str
    ) -> None:
        """Subscribe to a resource of an upstream for a session, once, or end that."""
        gateway = self.gateway
        if gateway.has_singles(upstream):
            raise InvalidRequest(
                f'{upstream.name}: share = "call" ends the session after each call, so it has no '
                "subscriptions",
                ran="no",
            )
        uri = _uri_of(message)
        place = (_key_of(session), uri)
        if message.method == "resources/unsubscribe":
            if self._watched.pop(place, None) is not None:
                await gateway.unwatch(upstream, caller, session, theirs)
        elif place not in self._watched:
            async with gateway.conversation(upstream, caller, session) as conversation:
                await self._reached(upstream, conversation.watch(theirs))
            self._watched[place] = upstream, theirs

    async def _reached(self, upstream: "Upstream", work: "Coroutine[Any, Any, None]") -> None:
        try:
            await work
        except CallFailed as error:
            raise upstream.unavailable(str(error)) from error

    async def listened(
        self,
        places: "list[tuple[Upstream, str]]",
        session: Session,
        caller: str,
        listening: "Callable[[], Coroutine[Any, Any, bytes | None]]",
    ) -> bytes | None:
        """Await a stream of changes (2026-07-28), subscribed to the resources that it names."""
        watched: list[tuple[Upstream, str]] = []
        try:
            for upstream, uri in places:
                with suppress(RpcError, CallFailed):
                    async with self.gateway.conversation(upstream, caller, session) as conversation:
                        await conversation.watch(uri)
                    watched.append((upstream, uri))
            return await listening()
        finally:
            for upstream, uri in watched:
                self.gateway.start(self.gateway.unwatch(upstream, caller, session, uri))

    # --- requests that are passed on --------------------------------------------------------------

    async def relayed(
        self,
        upstream: "Upstream",
        message: Envelope,
        session: Session,
        outlet: Outlet,
        sender: Sender,
        key: str | None,
    ) -> bytes | None:
        """Pass a request on to an upstream; return the answer."""
        gateway = self.gateway
        is_owned = gateway.is_owned(upstream, session)
        try:
            conversation = await gateway.borrow(upstream, sender.caller, session)
        except UpstreamUnavailable as reason:
            if message.method != "tools/call":
                raise
            conversation = UnreachedSession(upstream, reason)
            conversation.enter()
        if session.level is not None and not is_owned:
            try:
                await gateway.want_level(upstream, sender.caller, session, session.level)
            except BaseException:
                gateway.give_back(conversation)
                raise
        if len(self._flying) >= MOST_SESSIONS:
            del self._flying[next(iter(self._flying))]
        place = _key_of(session)
        requests = self._flying.setdefault(place, {})
        if is_owned:
            conversation.ask_with(partial(self._asked, conversation, session))
        relay = Relay(
            conversation,
            gateway._serving,
            self.answers,
            outlet.send,
            requests,
            gateway.sealer,
            is_guarded=bool(gateway._middleware) or gateway._tap is not None,
        )
        conversation.hearers[relay.outbox] = session, outlet
        try:
            return await relay.answer(
                message,
                sender,
                key,
                session,
                partial(self._bridge, session, outlet, sender.caller),
            )
        finally:
            del conversation.hearers[relay.outbox]
            gateway.give_back(conversation)
            await relay.outbox.finish()
            if not requests and self._flying.get(place) is requests:
                del self._flying[place]

    def _asked(self, conversation: UpstreamSession, session: Session, message: Arrived) -> None:
        """Pass a question of a server on to its one client."""
        outlet: Outlet = Standing(self.hub, session)
        # A call that waits has a stream. Otherwise the client may have a standing one.
        for hearer, own in conversation.hearers.values():
            if hearer is session:
                outlet = own
        self.gateway.start(self._ask(conversation, session, outlet, message))

    async def _ask(
        self,
        conversation: UpstreamSession,
        session: Session,
        outlet: Outlet,
        message: Arrived,
    ) -> None:
        renewals = conversation.renewals
        try:
            found = await ask_client(
                session, outlet, self._limits, str(message.method), message.params
            )
            ending = b'"result":' + one_line(found)
        except NotCapable:
            conversation.refuse(message)
            return
        except RpcError as error:
            ending = b'"error":' + encode(error_object(error))
        if conversation.renewals != renewals:
            return  # the server that asked has ended, and another may have a question of this id
        theirs = b'{"jsonrpc":"2.0","id":%b,%b}' % (encode(message.id), ending)
        with suppress(CallFailed):
            await conversation.send(theirs)

    def _bridge(self, session: Session, outlet: Outlet, caller: str) -> Bridge:
        """Return what asks the client of a call, for a server of another era."""

        def place(is_in_flight: bool) -> AbstractContextManager[None]:
            return self._questions.place(session, caller, is_in_flight=is_in_flight)

        return Bridge(session, outlet, self._limits, place)


def _key_of(session: Session) -> object:
    """Return what a session is known by. On a pipe all requests share the calls in flight."""
    return session.id or id(session.calls)


class Standing:
    """Sends messages to a session on its standing stream, outside of its calls."""

    is_shared = True
    is_stream = False

    def __init__(self, hub: Hub, session: Session) -> None:
        self.stopping = Signal()
        self.replayed: list[Id] = []
        self._hub = hub
        self._session = session

    async def send(self, message: bytes) -> None:
        """Send a message. Raises `Gone` if the session has no standing stream."""
        if not self._hub.tell(message, lambda session: session is self._session):
            raise Gone("the client has no standing stream")

    async def hang_up(self, retry: float) -> None:
        """Do nothing: a client opens a standing stream as it likes."""

    async def until_left(self, patience: float) -> None:
        """Wait: a client may open its stream again."""
        await self.stopping.wait()


class UpstreamFront(Front):
    """Serves one upstream, exactly as it is."""

    waits_to_open = True

    def __init__(self, gateway: "Gateway", upstream: "Upstream") -> None:
        super().__init__(gateway, upstream.name)
        self._upstream = upstream
        # Methods of extensions are the upstream's.
        for name in [name for name, row in self.methods.items() if row.extension is not None]:
            del self.methods[name]

    def is_request(self, name: str) -> bool:
        return not name.startswith("notifications/")

    def is_command(self, tool: str) -> bool:
        return self._upstream.use_of(tool) == "once"

    def described(self, message: Envelope, fields: headers.Fields | None = None) -> types.Params:
        params = super().described(message, fields)
        if (
            fields is not None
            and message.method not in self.methods
            and message.params is not UNSET
        ):
            headers.check_name(fields, message.method, msgspec.json.decode(message.params))
        return params

    def marks(self, tool: str) -> headers.Marks:
        return self._upstream.marks(tool)

    async def open_session(self, message: Envelope, caller: str) -> tuple[Session, bytes]:
        """Open a session: what the server says of itself is the upstream's."""
        assert isinstance(message.id, (int, str))
        try:
            params = _decode_initialize(b"{}" if message.params is UNSET else message.params)
        except msgspec.DecodeError as error:
            raise InvalidParams(f"params: {error}") from None
        revision = offered(params.version)
        session = Session(revision, params.capabilities, client=named_client(params.client))
        async with self.gateway.conversation(self._upstream, caller, session) as conversation:
            introduction = {"protocolVersion": revision.name, **conversation.described()}
        return session, answer(message.id, encode(introduction))

    async def respond(
        self, message: Incoming, session: Session, outlet: Outlet, sender: Sender, **options: Any
    ) -> bytes | None:
        if isinstance(message, Invalid):
            raise message.error
        if isinstance(message, ClientAnswer) or message.id is UNSET:
            self.take(message, session)
            return None
        upstream = self._upstream
        method = message.method
        # Awaited only if the gateway answers without an upstream.
        own = partial(super().respond, message, session, outlet, sender, **options)
        if method == "subscriptions/listen":
            places = [(upstream, uri) for uri in _listened(message)]
            return await self.listened(places, session, sender.caller, own)
        if method == "ping":
            return await own()
        if method in _SUBSCRIBING and not await self._is_direct(session, sender.caller):
            await self.subscribed_to(upstream, _uri_of(message), message, session, sender.caller)
            return await own()
        if method == "logging/setLevel" and await self._levels(session, sender.caller):
            answered = await own()
            if session.level is not None:
                await self.gateway.want_level(upstream, sender.caller, session, session.level)
            return answered
        if method == "server/discover":
            async with self.gateway.conversation(upstream, sender.caller, session) as conversation:
                if conversation.revision not in STATELESS:
                    return self._discovered(message, conversation)
        answered = await self.relayed(
            upstream, message, session, outlet, sender, options.get("key")
        )
        if method in _SUBSCRIBING and answered and b'"result"' in answered:
            await own()  # the account of the session, with its limits
        return answered

    async def _levels(self, session: Session, caller: str) -> bool:
        """Return whether the gateway keeps the log levels of the clients of a server."""
        if await self._is_direct(session, caller):
            return False
        async with self.gateway.conversation(self._upstream, caller, session) as conversation:
            return "logging" in conversation.described()["capabilities"]

    async def _is_direct(self, session: Session, caller: str) -> bool:
        """Return whether the server takes levels and subscriptions from its one client itself."""
        if not self.gateway.is_owned(self._upstream, session):
            return False
        async with self.gateway.conversation(self._upstream, caller, session) as conversation:
            return conversation.revision not in STATELESS

    def own_uri(self, upstream: "Upstream", uri: str) -> str:
        return uri

    def pass_on(self, message: Envelope, session: Session) -> None:
        if self.gateway.is_owned(self._upstream, session):
            self.gateway.start(self.passed_on(self._upstream, message, session))

    def _discovered(self, message: Envelope, conversation: UpstreamSession) -> bytes:
        """Return the answer to `server/discover` for an upstream that does not have it."""
        described = conversation.described()
        result: dict[str, Any] = {
            "resultType": "complete",
            "supportedVersions": [each.name for each in STATELESS],
            "capabilities": described["capabilities"],
            "ttlMs": 0,
            "cacheScope": "private",
            "_meta": {f"{types.PREFIX}serverInfo": described["serverInfo"]},
        }
        if "instructions" in described:
            result["instructions"] = described["instructions"]
        assert isinstance(message.id, (int, str))
        return answer(message.id, encode(result))


class MergedFront(Front):
    """Serves all upstreams."""

    def __init__(self, gateway: "Gateway") -> None:
        super().__init__(gateway, "gateway")
        for method, kind in _LISTS.items():
            self.add(method, partial(self._merged_list, kind), types.ListPage)
        self.offer(types.TASKS, {}, revisions=STATELESS, is_needed=self._has_tasks)
        # The last tables that clients have seen, by kind and caller.
        self._tables: dict[tuple[str, str], Merged] = {}

    def opened(self, message: Envelope) -> tuple[Session, bytes]:
        session, answer = super().opened(message)
        if self.gateway.has_one_client:
            self.gateway.owner = session
            self.gateway.start(self.gateway.reach_all())
        return session, answer

    def is_command(self, tool: str) -> bool:
        places = [
            table.places[tool]
            for (kind, _), table in self._tables.items()
            if kind == "tools" and tool in table.places
        ]
        return not places or any(
            self.gateway.upstreams[place.server].use_of(place.name) == "once" for place in places
        )

    def pass_on(self, message: Envelope, session: Session) -> None:
        is_first = message.method == INITIALIZED and self.gateway.has_one_client
        if not is_first and message.method != _ROOTS_CHANGED:
            return
        for upstream in self.gateway.upstreams.values():
            if self.gateway.is_owned(upstream, session):
                self.gateway.start(self.passed_on(upstream, message, session))

    def _has_tasks(self) -> bool:
        upstreams = self.gateway.upstreams.values()
        return any(types.TASKS in upstream.extensions for upstream in upstreams)

    # --- lists ------------------------------------------------------------------------------------

    async def _merged_list(self, kind: str, peer: Peer) -> object:
        table, missing = await self._table(kind, peer.sender.caller, peer.session)
        page: dict[str, Any] = {kind: Raw(table.encoded)}
        if peer.session.revision.has("caching"):
            page |= self.gateway.kept_for(kind, peer.sender.caller, peer.session)
        if missing:
            page["_meta"] = {MISSING_META: missing}
            for name in missing:
                self.gateway.await_back(name, kind)
        return encode(page)

    async def _table(self, kind: str, caller: str, session: Session) -> tuple[Merged, list[str]]:
        """Return the merged list of a kind, and the names of the upstreams that are left out."""
        gateway = self.gateway
        upstreams = gateway.upstreams.values()
        known = {
            upstream.name: gateway.known_entries(upstream, kind, caller, session)
            for upstream in upstreams
        }
        unknown = [
            upstream
            for upstream in upstreams
            if known[upstream.name] is None and not gateway.is_late(upstream.name, kind)
        ]
        known |= await self._read_entries(unknown, kind, caller, session)
        missing = [name for name, found in known.items() if found is None]
        # A tool that was seen before stays listed.
        known |= {name: gateway.seen.get((name, kind)) for name in missing}
        lists = {name: found for name, found in known.items() if found is not None}
        table = self._tables.get((kind, caller))
        if table is None or not table.is_of(lists):
            table = merged(kind, lists, prefixes=gateway.settings.names == "prefix")
            self._tables[kind, caller] = table
            if len(self._tables) > MOST_TABLES:
                del self._tables[next(iter(self._tables))]
        return table, missing

    async def _read_entries(
        self, upstreams: "list[Upstream]", kind: str, caller: str, session: Session
    ) -> dict[str, list[Raw] | None]:
        """Return the lists of these upstreams; None for one that does not give it in time."""
        if not upstreams:
            return {}
        reading = [
            asyncio.create_task(self._entries(upstream, kind, caller, session))
            for upstream in upstreams
        ]
        try:
            done, _ = await asyncio.wait(reading, timeout=LIST_TIME)
        finally:
            for task in reading:
                task.cancel()
        found: dict[str, list[Raw] | None] = {}
        for upstream, task in zip(upstreams, reading, strict=True):
            found[upstream.name] = None
            if task in done:
                found[upstream.name] = _read_now(task)
            else:
                self.gateway.await_back(upstream.name, kind, is_late=True)
        return found

    async def _entries(
        self, upstream: "Upstream", kind: str, caller: str, session: Session
    ) -> list[Raw] | None:
        """Return the list of one upstream; None if it does not give it."""
        try:
            return await self.gateway.entries(upstream, kind, caller, session)
        except (RpcError, CallFailed) as error:
            logger.debug("%s is left out of %s: %s", upstream.name, kind, error)
            return None

    # --- calls ------------------------------------------------------------------------------------

    async def respond(
        self, message: Incoming, session: Session, outlet: Outlet, sender: Sender, **options: Any
    ) -> bytes | None:
        # Awaited only if the gateway answers without an upstream.
        own = partial(super().respond, message, session, outlet, sender, **options)
        if not isinstance(message, Envelope) or message.id is UNSET:
            return await own()
        if message.method == "subscriptions/listen":
            places = await self._places_of(_listened(message), session, sender)
            return await self.listened(places, session, sender.caller, own)
        found = await self._route(message, session, sender)
        if found is None:
            answered = await own()
            if message.method == "logging/setLevel" and session.level is not None:
                for upstream in self.gateway.upstreams.values():
                    await self.gateway.want_level(upstream, sender.caller, session, session.level)
            return answered
        upstream, theirs = found
        if message.method in _SUBSCRIBING:
            await self.subscribed_to(upstream, _uri_of(theirs), message, session, sender.caller)
            return await own()
        try:
            return await self.relayed(upstream, theirs, session, outlet, sender, options.get("key"))
        except RpcError as error:
            raise error.with_members(upstream=upstream.name) from None

    async def _places_of(
        self, uris: list[str], session: Session, sender: Sender
    ) -> "list[tuple[Upstream, str]]":
        """Return where some resources are. Those that are nowhere are left out."""
        found: list[tuple[Upstream, str]] = []
        for uri in uris:
            with suppress(RpcError):
                place = await self._place("resources", Raw(encode(uri)), session, sender)
                found.append((self.gateway.upstreams[place.server], place.name))
        return found

    def own_uri(self, upstream: "Upstream", uri: str) -> str:
        for (kind, _), table in self._tables.items():
            if kind == "resources":
                for own, place in table.places.items():
                    if place.server == upstream.name and place.name == uri:
                        return own
        return uri

    async def _route(
        self, message: Envelope, session: Session, sender: Sender
    ) -> "tuple[Upstream, Envelope] | None":
        """Return the upstream of a request, and the request with the name there."""
        if message.method in tasks.METHODS:
            label = tasks.named(self.gateway.sealer, sender.caller, message.params).label
            for upstream in self.gateway.upstreams.values():
                if upstream.origin.label == label:
                    return upstream, message
            raise InvalidParams("taskId: its server is no longer here", ran="no")
        members = members_of(message.params)
        if message.method == "completion/complete":
            ref = members_of(members.get("ref", UNSET))
            kind = "prompts" if "name" in ref else "resourceTemplates"
            member = "name" if "name" in ref else "uri"
            place = await self._place(kind, ref.get(member), session, sender)
            own = raw_of({**ref, member: Raw(encode(place.name))})
            return self.gateway.upstreams[place.server], _with(message, "ref", own)
        known = {
            "tools/call": ("tools", "name"),
            "prompts/get": ("prompts", "name"),
            "resources/read": ("resources", "uri"),
            "resources/subscribe": ("resources", "uri"),
            "resources/unsubscribe": ("resources", "uri"),
        }.get(message.method)
        if known is None:
            return None
        kind, member = known
        place = await self._place(kind, members.get(member), session, sender)
        upstream = self.gateway.upstreams[place.server]
        if kind == "tools" and upstream.use_of(place.name) == "once":
            refuse_doubles(message.params)  # before a name that occurs twice is written once
        return upstream, _with(message, member, Raw(encode(place.name)))

    async def _place(self, kind: str, stated: Raw | None, session: Session, sender: Sender) -> Any:
        """Return the place of a name, by the table that clients of this caller have seen."""
        try:
            name = _decode_text(stated or b"null")
        except msgspec.DecodeError:
            raise InvalidParams("params: expected the name or the URI as a string") from None
        table = self._tables.get((kind, sender.caller))
        if table is None or name not in table.places:
            table, missing = await self._table(kind, sender.caller, session)
            if kind == "tools" and name not in table.places and name not in table.shared:
                self._refuse_denied(name, table.places)
                if missing:
                    self._refuse_missing(name, missing)
        if kind == "resources" and name not in table.places:
            place = await self._by_template(name, session, sender)
            if place is not None:
                return place
        return table.find(name)

    def _refuse_missing(self, name: str, missing: list[str]) -> None:
        """Raise `UpstreamUnavailable` if a tool may be that of an upstream that is down."""
        server = name.partition("__")[0]
        if server in missing:
            upstream = self.gateway.upstreams[server]
            raise upstream.unavailable(upstream.breaker.reason or "it has not answered yet")
        down = ", ".join(missing)
        raise UpstreamUnavailable(
            f"no server that is up has the tool {name[:100]!r}, and these are down: {down}",
            upstream=missing[0],
            ran="no",
        )

    def _refuse_denied(self, name: str, names: Iterable[str]) -> None:
        for upstream in self.gateway.upstreams.values():
            denied = upstream.denied
            if name in denied or name.removeprefix(f"{upstream.name}__") in denied:
                raise InvalidParams(
                    f"the tool {name[:100]!r} of {upstream.name} is denied here; {there_are(names)}",
                    ran="no",
                )

    async def _by_template(self, uri: str, session: Session, sender: Sender) -> Any:
        """Return the upstream whose template has the longest literal beginning that fits."""
        table, _ = await self._table("resourceTemplates", sender.caller, session)
        fitting = [
            (len(beginning(place.name)), place)
            for place in table.places.values()
            if beginning(place.name) and uri.startswith(beginning(place.name))
        ]
        if not fitting:
            return None
        best = max(fitting, key=lambda each: each[0])[1]
        return structs.replace(best, name=uri)


def _read_now(task: "asyncio.Task[list[Raw] | None]") -> list[Raw] | None:
    """Return the result of a task that has ended; None if it failed."""
    if task.cancelled() or task.exception() is not None:
        return None
    return task.result()


def updated(front: Front, upstream: "Upstream", message: Arrived) -> None:
    """Tell the clients of a front that a resource of an upstream has changed."""
    try:
        uri = _decode_text(members_of(message.params).get("uri", b"null"))
    except msgspec.DecodeError:
        return  # it names nothing
    front.hub.notify("updated", front.own_uri(upstream, uri))


def level_of(message: Arrived) -> str:
    """Return the level of a log message."""
    stated = members_of(message.params).get("level", b"null")
    try:
        level = _decode_text(stated)
    except msgspec.DecodeError:
        return "info"
    return level if level in types.LEVELS else "info"


def wants_level(session: Session, level: str) -> bool:
    """Return whether a client gets log messages of a level.

    Without a level, it gets them from `info` on, and none at 2026-07-28.
    """
    least = session.level
    if least is None:
        if session.revision.is_stateless:
            return False
        least = "info"
    return types.LEVELS.index(level) >= types.LEVELS.index(least)


class Listing(Struct):
    """A list of an upstream, and for how long it may be kept (2026-07-28)."""

    entries: list[Raw]
    # Milliseconds. None: the server does not say, and notifies of each change.
    ttl: int | None = None
    # Every caller gets the same list.
    is_public: bool = True
    # The time until which it is good.
    until: float = math.inf

    def take(self, page: dict[str, Raw], kind: str) -> None:
        """Take a page of the list."""
        try:
            self.entries += _decode_entries(page.get(kind, b"[]"))
        except msgspec.DecodeError as error:
            raise BadAnswer(f"the list of {kind} cannot be read: {error}") from None
        scope = bytes(page.get("cacheScope", b""))
        self.is_public = self.is_public and scope == b'"public"'
        stated = page.get("ttlMs")
        if stated is None:
            return
        try:
            ttl = min(max(0, _decode_ttl(stated)), LONGEST_TTL)
        except msgspec.DecodeError:
            ttl = 0
        self.ttl = ttl if self.ttl is None else min(ttl, self.ttl)


async def read_list(session: UpstreamSession, kind: str) -> Listing:
    """Return a list of an upstream, with the entries of all pages."""
    listing = Listing([])
    members: dict[str, Any] = {}
    if session.revision in STATELESS:
        members = {**members_of(envelope())}
    for _ in range(MOST_PAGES):
        page = await session.ask(_METHODS[kind], raw_of(members))
        found = members_of(page)
        if kind == "tools":
            session.upstream.learn(page, is_first="cursor" not in members)
        listing.take(found, kind)
        if "nextCursor" not in found:
            break
        members["cursor"] = found["nextCursor"]
    return listing


def kinds_of(message: Arrived) -> tuple[str, ...]:
    """Return the kinds of lists that a notification of an upstream is about."""
    return _CHANGES.get(str(message.method), ())


def offers(described: dict[str, Any], kind: str) -> bool:
    """Return whether an upstream has a kind of list."""
    capability = "resources" if kind == "resourceTemplates" else kind
    return capability in described["capabilities"] and kind in NAMED


def _with(message: Envelope, member: str, value: Raw) -> Envelope:
    return structs.replace(message, params=with_member(message.params, member, value))


def _listened(message: Envelope) -> list[str]:
    """Return the resources that a stream of changes asks for."""
    try:
        params = _decode_listen(b"{}" if message.params is UNSET else message.params)
    except msgspec.DecodeError:
        return []  # the request is refused for its params
    return params.notifications.resource_subscriptions[:MAX_SUBSCRIPTIONS]


def _uri_of(message: Envelope) -> str:
    return str(_decode_text(members_of(message.params).get("uri", b'""')))
