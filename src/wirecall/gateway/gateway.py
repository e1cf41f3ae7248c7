"""`Gateway`: an app whose tools are those of other servers.

1. All upstreams share one dispatcher and one ledger. `/mcp/NAME` is one of them, `/mcp` is all.
2. A conversation with an upstream is shared by the callers that its `share` names.
3. An upstream that is down, slow or wrong does not harm the others: it is left out of lists, named
   in `_meta`, and tried again in the background.
"""

import asyncio
import math
import os
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Raw

from wirecall.aio import cancel_all
from wirecall.app import GRACE, SECRET_VARIABLE, App
from wirecall.client.delivery import Clock
from wirecall.errors import CallFailed, NotSent, RpcError, UpstreamUnavailable
from wirecall.files import create_file
from wirecall.gateway.fronts import (
    BACK_AFTER,
    BACK_AT_MOST,
    Front,
    Listing,
    MergedFront,
    UpstreamFront,
    kinds_of,
    level_of,
    offers,
    read_list,
    updated,
    wants_level,
)
from wirecall.gateway.offers import NAMED
from wirecall.gateway.origins import unread_origin
from wirecall.gateway.relay import Send
from wirecall.gateway.session import START_TIME, UpstreamSession, Wishes
from wirecall.gateway.settings import GatewaySettings, UpstreamSettings
from wirecall.gateway.state import named_reason, probe, state_of, tool_of
from wirecall.gateway.upstream import LINK_TIME, REAL, Origin, Places, Upstream
from wirecall.gateway.wire import request
from wirecall.ledger.base import LedgerDown, State
from wirecall.logs import announce, escaped
from wirecall.mcp.revisions import HANDSHAKE, REVISIONS, STATELESS
from wirecall.mcp.server.lines import StdioConnection
from wirecall.mcp.server.peer import Session
from wirecall.mcp.types import LEVELS
from wirecall.protocol.messages import Arrived, encode
from wirecall.protocol.sender import ANONYMOUS
from wirecall.transports.reaper import Reaper
from wirecall.transports.request import HttpError, HttpRequest
from wirecall.version import __version__

if TYPE_CHECKING:
    from wirecall.mcp.server.server import Server
    from wirecall.transports.health import Ready
    from wirecall.transports.http_server import HttpServer
    from wirecall.transports.request import Endpoint

# Records of unknown outcomes that `/status` counts.
MOST_UNKNOWN = 1000
# The beginning of the unit of a conversation that one session owns.
OWN = "session "
# Conversations with one upstream.
MOST_SESSIONS = 16
# The end of the unit of a conversation for clients without a handshake.
NEWEST = " newest"
# Conversations that have ended, and whose log level and subscriptions the next one repeats.
MOST_WISHES = 1000
# Seconds between two comparisons of a list of which its server says that it has changed.
TELL_EVERY = 0.25
# Lists that are kept, and log levels. Most clients do not end their sessions.
MOST_LISTS = 1000
MOST_LEVELS = 10_000


class Gateway(App):
    """Other MCP servers as one: each command takes effect once, and each server may fail alone.

    `settings` are its upstreams and its own settings; `clock` is for tests. `origins` says how each
    upstream is reached, in place of the settings. With `has_one_client`, as on a pipe, every
    conversation is the client's own.

    >>> notes = UpstreamSettings("notes", command=["notes-server"])
    >>> gateway = Gateway(GatewaySettings([notes], ledger="memory:"))
    """

    _unmountable = "it is a gateway, whose tools are those of other servers"

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        clock: Clock = REAL,
        origins: Mapping[str, Origin] | None = None,
        has_one_client: bool = False,
    ) -> None:
        super().__init__(
            "gateway",
            version=__version__,
            mode="production",
            ledger=settings.ledger,
            audit=settings.audit,
            limits=settings.limits,
            auth=settings.auth,
            single_user=settings.is_single_user,
            secret=_secret_beside(settings.ledger),
        )
        self.settings = settings
        self._clock = clock
        self.sealer = self._sealer()
        self._reaper = Reaper()
        self.has_one_client = has_one_client
        # The session of the one client. None: it has not opened it, or there are several.
        self.owner: Session | None = None
        if origins is None:
            origins = _origins_of(settings)
        self.upstreams: dict[str, Upstream] = {}
        self._stated: dict[str, UpstreamSettings] = {}
        # The upstreams over HTTP that do not speak the newest revision.
        self._older: set[str] = set()
        self._shares = {each.name: settings.share_of(each) for each in settings.upstreams}
        for each in settings.upstreams:
            self.upstreams[each.name] = Upstream(
                origins[each.name], reaper=self._reaper, clock=clock
            )
            self._stated[each.name] = each
        # By upstream and unit of sharing.
        self._conversations: dict[tuple[str, str], asyncio.Task[UpstreamSession]] = {}
        # Conversations for one call each, and the places for them.
        self._singles: set[UpstreamSession] = set()
        self._single_places = {name: Places(MOST_SESSIONS) for name in self.upstreams}
        # Of conversations that have ended, for the next ones.
        self._wishes: dict[tuple[str, str], Wishes] = {}
        # The least log level that clients have asked for, by upstream and unit of sharing.
        self._levels: dict[tuple[str, str], str] = {}
        # The lists of upstreams: those that are valid, and the last that were seen.
        self._lists: dict[tuple[str, str, str], Listing] = {}
        self.seen: dict[tuple[str, str], list[Raw]] = {}
        # Lists that clients have got, and that have changed since, as their servers say.
        self._before: dict[tuple[str, str, str], Listing] = {}
        # Those that are compared with what they are now.
        self._comparing: set[tuple[str, str, str]] = set()
        # How often upstreams have said that a list has changed.
        self._changes: Counter[tuple[str, str]] = Counter()
        self._fronts: dict[str, Front] = {}
        self._background: set[asyncio.Task[Any]] = set()
        # The lists, by upstream and kind, that are read in the background until they are there.
        self._awaited: set[tuple[str, str]] = set()
        # Those of them that did not come in time. A further list does not wait for them, until the
        # server has answered or an attempt in the background has failed.
        self._late: set[tuple[str, str]] = set()

    # --- conversations ----------------------------------------------------------------------------

    async def borrow(self, upstream: Upstream, caller: str, session: Session) -> UpstreamSession:
        """Return the conversation with an upstream that this client may use.

        `give_back` must follow.
        """
        key = (upstream.name, self._unit(upstream, caller, session))
        if self.has_singles(upstream):
            return await self._borrow_single(upstream, key, session)
        known = self._conversations.get(key)
        if known is not None and known.done() and not _has_failed(known):
            conversation = known.result()
            conversation.enter()
            return conversation
        while True:
            key = (upstream.name, self._unit(upstream, caller, session))
            try:
                if not self._is_opened(key):
                    await self._room(upstream)
                opening = self._opened_once(upstream, key, session)
                # Not the task itself: other callers wait for it.
                await asyncio.wait([opening])
                if opening.cancelled():
                    raise NotSent("its session was ended while it was opened")
                conversation = opening.result()
            except CallFailed as error:
                raise upstream.unavailable(str(error)) from error
            if key[1].endswith(NEWEST) and upstream.name in self._older:
                # Clients of both eras share one conversation with a server that has one era.
                if self._conversations.pop(key, None) is not None:
                    self.start(conversation.aclose())
                continue
            # It may have ended before this task ran.
            if self._conversations.get(key) is opening:
                conversation.enter()
                return conversation

    def give_back(self, conversation: UpstreamSession) -> None:
        """End the use of a conversation that was borrowed."""
        conversation.leave()
        if conversation in self._singles:
            self.start(self._end_single(conversation))

    async def _borrow_single(
        self, upstream: Upstream, key: tuple[str, str], session: Session
    ) -> UpstreamSession:
        """Open a conversation for one call."""
        places = self._single_places[upstream.name]
        try:
            await places.take()
            try:
                conversation = await self._opened(upstream, key, session)
            except BaseException:
                places.give_back()
                raise
        except CallFailed as error:
            raise upstream.unavailable(str(error)) from error
        self._singles.add(conversation)
        conversation.enter()
        return conversation

    async def _end_single(self, conversation: UpstreamSession) -> None:
        """End a conversation after its call. A command may still run, although its caller left."""
        await conversation.quiet()
        self._singles.discard(conversation)
        try:
            await conversation.aclose()
        finally:
            self._single_places[conversation.upstream.name].give_back()

    @asynccontextmanager
    async def conversation(
        self, upstream: Upstream, caller: str, session: Session
    ) -> AsyncIterator[UpstreamSession]:
        """Borrow a conversation with an upstream in the block."""
        conversation = await self.borrow(upstream, caller, session)
        try:
            yield conversation
        finally:
            self.give_back(conversation)

    def _opened_once(
        self, upstream: Upstream, key: tuple[str, str], session: Session
    ) -> "asyncio.Task[UpstreamSession]":
        """Return the task that opens a conversation, or has opened it."""
        if self._is_opened(key):
            return self._conversations[key]
        opening = asyncio.create_task(self._opened(upstream, key, session))
        self._conversations[key] = opening
        idle = self.settings.idle_of(self._stated[upstream.name])
        if idle is not None:
            self.start(self._end_idle(key, opening, idle))
        return opening

    def _is_opened(self, key: tuple[str, str]) -> bool:
        """Return whether a conversation is open, or being opened."""
        opening = self._conversations.get(key)
        return opening is not None and not (opening.done() and _has_failed(opening))

    async def _end_idle(
        self, key: tuple[str, str], opening: "asyncio.Task[UpstreamSession]", idle: float
    ) -> None:
        """End a conversation that was not used for a time. The next call opens another."""
        await asyncio.wait([opening])
        if _has_failed(opening):
            return
        conversation = opening.result()
        while self._conversations.get(key) is opening:
            await conversation.quiet()
            rest = idle - conversation.unused
            if rest > 0:
                await self._clock.sleep(rest)
                continue
            del self._conversations[key]
            self._remember(key, conversation.wishes)
            await conversation.aclose()
            conversation.upstream.starts.forgive()
            conversation.upstream.tools = None

    def _remember(self, key: tuple[str, str], wishes: Wishes) -> None:
        """Keep what a conversation that ends has asked for."""
        if not wishes:
            return
        self._wishes[key] = wishes
        _limit(self._wishes, MOST_WISHES)

    def _unit(self, upstream: Upstream, caller: str, session: Session) -> str:
        """Return the name of the clients that share a conversation.

        A server over HTTP may speak both eras. Then each era has a conversation, and nothing is
        translated. A child is one process, so it has one conversation.
        """
        share = self._shares[upstream.name]
        unit = ""
        if self.has_one_client and share != "call":
            unit = OWN
        elif share in ("caller", "call"):
            unit = f"caller {caller}"
        elif share == "session":
            unit = f"{OWN}{session.id or caller}"
        if session.revision.is_stateless and upstream.origin.url:
            is_free = self._stated[upstream.name].revision == "auto"
            if is_free and upstream.name not in self._older:
                unit += NEWEST
        return unit

    def has_singles(self, upstream: Upstream) -> bool:
        """Return whether each call has a conversation with an upstream for itself."""
        return self._shares[upstream.name] == "call"

    def is_owned(self, upstream: Upstream, session: Session) -> bool:
        """Return whether one session of a client has a conversation with an upstream for itself."""
        share = self._shares[upstream.name]
        if self.has_one_client:
            return share != "call"
        return session.id is not None and share == "session"

    async def _opened(
        self, upstream: Upstream, key: tuple[str, str], client: Session
    ) -> UpstreamSession:
        unit = key[1]
        conversation = UpstreamSession(upstream)
        conversation.on_notification = partial(self._notified, conversation, unit)
        conversation.on_renewed = partial(self._renewed, conversation, unit)
        capabilities: dict[str, Any] = {}
        name: dict[str, str] | None = None
        # A client without a handshake declares in each request, and an older server has none.
        if self.is_owned(upstream, client) and not client.revision.is_stateless:
            capabilities = client.capabilities
            name = client.client
            conversation.on_request = conversation.hold
        try:
            stated = REVISIONS.get(self._stated[upstream.name].revision)  # None: "auto"
            await conversation.open(
                stated or client.revision, capabilities, name, is_stated=stated is not None
            )
            if key in self._wishes:
                await conversation.repeat(self._wishes[key])
                self._wishes.pop(key, None)  # its session may have ended in between
            if key in self._levels:
                await conversation.want_level(self._levels[key])
            if not self.has_singles(upstream):
                conversation.follow()
        except BaseException as error:
            await conversation.aclose()
            if isinstance(error, UpstreamUnavailable):
                raise  # `reach` has noted it
            # A server that refuses one client may serve others.
            if isinstance(error, CallFailed) or (
                isinstance(error, RpcError) and not upstream.is_up
            ):
                upstream.fell(str(error))
            raise
        upstream.rose()
        self._late = {each for each in self._late if each[0] != upstream.name}
        if unit.endswith(NEWEST) and conversation.revision not in STATELESS:
            self._older.add(upstream.name)
        upstream.starts.welcome()
        declared = conversation.described()["capabilities"].get("extensions")
        upstream.extensions = frozenset(declared or ())
        # The lists of an earlier server do not count.
        for kind in NAMED:
            self._lists.pop((*key, kind), None)
        return conversation

    async def _room(self, upstream: Upstream) -> None:
        """Make room for another conversation with an upstream.

        The one that was unused for longest ends. If all are in use, this waits for one; it raises
        `NotSent` if that takes too long for a call.
        """
        deadline = asyncio.get_running_loop().time() + LINK_TIME
        while True:
            keys = [key for key in self._conversations if key[0] == upstream.name]
            openings = [self._conversations[key] for key in keys if self._is_opened(key)]
            if len(openings) < MOST_SESSIONS or self._end_unused(keys):
                return
            left = deadline - asyncio.get_running_loop().time()
            waiting = [asyncio.create_task(_quiet(opening)) for opening in openings]
            try:
                done, _ = await asyncio.wait(
                    waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                await cancel_all(*waiting)
            if not done:
                raise NotSent(f"it has {MOST_SESSIONS} sessions, and all of them are in use")

    def _end_unused(self, keys: list[tuple[str, str]]) -> bool:
        """End the conversation that was unused for longest; return whether there is one."""
        unused: dict[tuple[str, str], float] = {}
        for key in keys:
            conversation = self._open_one(key)
            if conversation is not None and not conversation.is_busy:
                unused[key] = conversation.unused
        if not unused:
            return False
        oldest = max(unused, key=lambda key: unused[key])
        opening = self._conversations.pop(oldest)
        self._remember(oldest, opening.result().wishes)
        self.start(_closed(opening))
        return True

    def _notified(self, conversation: UpstreamSession, unit: str, message: Arrived) -> None:
        """Take a notification of an upstream: a change, a log message, or one for its owner."""
        upstream = conversation.upstream
        kinds = kinds_of(message)
        for kind in kinds:
            self._list_changed(conversation, unit, kind)
        fronts = self._fronts_of(upstream)
        if kinds:
            return
        if message.method == "notifications/resources/updated":
            for front in fronts:
                updated(front, upstream, message)
            return
        level: str | None = None
        if message.method == "notifications/message":
            level = level_of(message)
        elif not unit.startswith(OWN):
            return  # no client has asked for it
        wants = partial(self._wants, upstream, unit, level)
        line = request(None, str(message.method), message.params)
        served: set[int] = set()
        for outbox, (session, _) in conversation.hearers.items():
            if id(session) not in served and wants(session):
                served.add(id(session))
                outbox.put(line)
        for front in fronts:
            front.hub.tell(line, lambda session: id(session) not in served and wants(session))

    def _wants(self, upstream: Upstream, unit: str, level: str | None, session: Session) -> bool:
        """Return whether a session gets a message of a conversation."""
        if level is not None and not wants_level(session, level):
            return False
        return self._unit(upstream, session.caller or ANONYMOUS, session) == unit

    def _fronts_of(self, upstream: Upstream) -> list[Front]:
        paths = ("/mcp", f"/mcp/{upstream.name}")
        return [self._fronts[path] for path in paths if path in self._fronts]

    def _list_changed(self, conversation: UpstreamSession, unit: str, kind: str) -> None:
        """Note that a list is not valid any more, and find out what has changed."""
        upstream = conversation.upstream
        self._changes[upstream.name, kind] += 1
        for key in [key for key in self._lists if (key[0], key[2]) == (upstream.name, kind)]:
            self._before[key] = self._lists.pop(key)
            _limit(self._before, MOST_LISTS)
        if kind == "tools":
            upstream.tools = None
        place = (upstream.name, unit, kind)
        if place not in self._comparing:
            self._comparing.add(place)
            self.start(self._compare_all(conversation, place))

    async def _compare_all(
        self, conversation: UpstreamSession, place: tuple[str, str, str]
    ) -> None:
        """Tell clients that a list has changed, if it has: once for changes that come together."""
        name, _, kind = place
        try:
            known = -1
            while known != self._changes[name, kind]:
                known = self._changes[name, kind]
                before = self._before.pop(place, None)
                is_read = before is not None and await self._compare(conversation, place, before)
                # Each change of resources is one of templates too.
                if not is_read and kind != "resourceTemplates":
                    self._tell_change(conversation.upstream, kind)
                await self._clock.sleep(TELL_EVERY)
        finally:
            self._comparing.discard(place)

    def _tell_change(self, upstream: Upstream, kind: str) -> None:
        """Tell clients that a list of an upstream has changed."""
        for front in self._fronts_of(upstream):
            front.hub.notify("resources" if kind == "resourceTemplates" else kind)

    def _renewed(self, conversation: UpstreamSession, unit: str) -> None:
        """Read the lists again: another server has taken the place of the first."""
        name = conversation.upstream.name
        for kind in NAMED:
            place = (name, unit, kind)
            before = self._lists.pop(place, None)
            if before is not None:
                self.start(self._compare(conversation, place, before))

    async def _compare(
        self, conversation: UpstreamSession, place: tuple[str, str, str], before: Listing
    ) -> bool:
        """Read a list, and tell clients if it has changed; return False if it cannot be read."""
        name, unit, kind = place
        is_open = self._open_one((name, unit)) is conversation
        if not is_open or not conversation.link_is_there:
            return False
        try:
            now = await self._read(conversation, place)
        except (RpcError, CallFailed):
            return False  # the next client that asks reads it
        if [bytes(each) for each in now.entries] != [bytes(each) for each in before.entries]:
            self._tell_change(conversation.upstream, kind)
        return True

    async def _read(self, conversation: UpstreamSession, place: tuple[str, str, str]) -> Listing:
        """Read a list of an upstream, and keep it."""
        name, _, kind = place
        upstream = conversation.upstream
        changes = self._changes[name, kind]
        listing = Listing([])
        began = self._clock.time()
        if offers(conversation.described(), kind):
            listing = await _read_in_time(conversation, kind)
        if kind == "tools":
            listing.entries = upstream.allowed(listing.entries)
        if listing.ttl is not None:
            listing.until = began + listing.ttl / 1000
        self.seen[name, kind] = listing.entries
        # Else it has changed while it was read.
        if self._changes[name, kind] == changes:
            self._lists[place] = listing
            _limit(self._lists, MOST_LISTS)
        return listing

    async def want_level(
        self, upstream: Upstream, caller: str, session: Session, level: str
    ) -> None:
        """Ask an upstream for log messages from this level on, now or when it is reached."""
        key = (upstream.name, self._unit(upstream, caller, session))
        known = self._levels.get(key)
        if known is not None and LEVELS.index(known) <= LEVELS.index(level):
            return
        self._levels[key] = level
        _limit(self._levels, MOST_LEVELS)
        conversation = self._open_one(key)
        if conversation is not None:
            await conversation.want_level(level)

    def _open_one(self, key: tuple[str, str]) -> UpstreamSession | None:
        """Return a conversation that is open."""
        opening = self._conversations.get(key)
        if opening is None or not opening.done() or _has_failed(opening):
            return None
        return opening.result()

    async def unwatch(self, upstream: Upstream, caller: str, session: Session, uri: str) -> None:
        """End a subscription of a client. No upstream is reached for that."""
        key = (upstream.name, self._unit(upstream, caller, session))
        conversation = self._open_one(key)
        if conversation is not None:
            await conversation.unwatch(uri)
        elif key in self._wishes:
            self._wishes[key].forget(uri)

    async def end_owned(self, session: Session) -> None:
        """End the conversations that a session owns: its client has ended it."""
        unit = f"{OWN}{session.id}"
        owned = [key for key in self._conversations if key[1] == unit]
        openings = [self._conversations.pop(key) for key in owned]
        for known in (self._lists, self._before, self._levels, self._wishes):
            _forget(known, unit)
        await asyncio.gather(*(_closed_when_quiet(opening) for opening in openings))

    def known_entries(
        self, upstream: Upstream, kind: str, caller: str, session: Session
    ) -> list[Raw] | None:
        """Return a list of an upstream that is known and has not changed; None without one."""
        # Without a conversation that stays, a change of the list is not noticed.
        if not upstream.is_up or self.has_singles(upstream):
            return None
        listing = self._lists.get((upstream.name, self._unit(upstream, caller, session), kind))
        # After that time it is read again: the server may have changed it without a notification.
        if listing is None or listing.until <= self._clock.time():
            return None
        return listing.entries

    def kept_for(self, kind: str, caller: str, session: Session) -> dict[str, Any]:
        """Return for how long a client may keep a merged list: as long as each of its parts."""
        until = math.inf
        is_public = self.access is None
        for name, upstream in self.upstreams.items():
            listing = self._lists.get((name, self._unit(upstream, caller, session), kind))
            if listing is None or listing.ttl is None:
                return {"ttlMs": 0, "cacheScope": "private"}
            until = min(until, listing.until)
            is_public = is_public and listing.is_public and self._shares[name] == "all"
        left = max(0, int(1000 * (until - self._clock.time())))
        return {"ttlMs": left, "cacheScope": "public" if is_public else "private"}

    async def entries(
        self, upstream: Upstream, kind: str, caller: str, session: Session
    ) -> list[Raw]:
        """Return a list of an upstream, without the tools that are denied."""
        known = self.known_entries(upstream, kind, caller, session)
        if known is not None:
            return known
        place = (upstream.name, self._unit(upstream, caller, session), kind)
        async with self.conversation(upstream, caller, session) as conversation:
            return (await self._read(conversation, place)).entries

    # --- in the background ------------------------------------------------------------------------

    def start(self, work: Coroutine[Any, Any, object]) -> None:
        """Run work that nothing waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def await_back(self, name: str, kind: str, *, is_late: bool = False) -> None:
        """Read a list that was left out until it is there, and tell clients then."""
        if is_late:
            self._late.add((name, kind))
        if (name, kind) not in self._awaited:
            self._awaited.add((name, kind))
            self.start(self._back(self.upstreams[name], kind))

    def is_late(self, name: str, kind: str) -> bool:
        """Return whether a list did not come in time, and is awaited in the background."""
        return (name, kind) in self._late

    async def _back(self, upstream: Upstream, kind: str) -> None:
        pause = BACK_AFTER
        try:
            while True:
                await asyncio.sleep(pause)
                pause = min(2 * pause, BACK_AT_MOST)
                try:
                    await self.entries(upstream, kind, "", self._someone())
                except (RpcError, CallFailed):
                    # The session of another client may be better: its next list waits again.
                    self._late.discard((upstream.name, kind))
                    continue
                break
        finally:
            self._awaited.discard((upstream.name, kind))
            self._late.discard((upstream.name, kind))
        front = self._fronts.get("/mcp")
        if front is not None:
            front.hub.notify("resources" if kind == "resourceTemplates" else kind)

    async def reach_all(self) -> None:
        """Reach every upstream, and print a line for each."""
        await asyncio.gather(*(self._reach(upstream) for upstream in self.upstreams.values()))

    async def _reach(self, upstream: Upstream) -> None:
        try:
            tools = await self.entries(upstream, "tools", "", self._someone())
            announce(escaped(f"{upstream.name}: ready, {len(tools)} tools"))
        except (RpcError, CallFailed) as error:
            announce(escaped(named_reason(upstream.name, error)))

    def _someone(self) -> Session:
        """Return the client whose session reaches upstreams without a request."""
        return self.owner or Session(HANDSHAKE[-1])

    # --- serving ----------------------------------------------------------------------------------

    def run(
        self, transport: Literal["stdio", "http", "tcp", "unix"] = "stdio", **options: Any
    ) -> None:
        """Serve until a signal stops it, as `App.run` does. On stdin and stdout is one client."""
        self.has_one_client = self.has_one_client or transport == "stdio"
        super().run(transport, **options)

    def connection_to(self, name: str, send: Send, link: str) -> StdioConnection:
        """Return the connection of the one client, to one upstream as it is."""
        return StdioConnection(
            send,
            self._mcp_servers()[f"/mcp/{name}"],
            lambda line, sender: self._serving().handle(line, sender),
            {},
            self.limits,
            link,
        )

    def _mcp_servers(self) -> "dict[str, Server]":
        self._fronts = {"/mcp": MergedFront(self)}
        for name, upstream in self.upstreams.items():
            self._fronts[f"/mcp/{name}"] = UpstreamFront(self, upstream)
        return dict(self._fronts)

    def mcp(self) -> "Server":
        """Return the server of all upstreams."""
        if "/mcp" not in self._fronts:
            self._mcp_servers()
        return self._fronts["/mcp"]

    def asgi(
        self,
        *,
        routes: "Mapping[str, Endpoint] | None" = None,
        ready: "Ready | None" = None,
    ) -> "HttpServer":
        """Return an ASGI application with `/mcp`, `/mcp/NAME` and `/status`."""

        async def status(request: HttpRequest) -> None:
            if request.method != "GET":
                raise HttpError(405, "ask with GET", [("allow", "GET")])
            await request.respond(200, encode(await self.status()))

        return super().asgi(
            routes={"/status": status, **(routes or {})}, ready=ready or self._required
        )

    async def _required(self) -> str | None:
        """Return which upstream that is required is down, or None.

        It is tried again: while the gateway is not ready, no call may come that would do so.
        """
        for name, stated in self._stated.items():
            if stated.required and not self.upstreams[name].is_up:
                self.await_back(name, "tools")
                return f"the upstream {name} is down"
        return None

    async def _enter(self) -> None:
        await super()._enter()
        if not self.has_one_client:
            announce("All servers are at /mcp, and each of them is at /mcp/NAME")
            self.start(self.reach_all())

    async def status(self) -> dict[str, Any]:
        """Return the state of each upstream, with the number of its unknown records."""
        unknown = await self._unknown()
        found = self.states()
        for name, upstream in self.upstreams.items():
            # `/status` asks for no login on loopback, and a server may print anything.
            del found[name]["stderr"]
            place = f":{upstream.origin.label}/"
            found[name]["unknown"] = sum(place in method for method in unknown)
        return {"single_user": self.settings.is_single_user, "upstreams": found}

    def states(self) -> dict[str, Any]:
        """Return the state of each upstream. Nothing is asked for it."""
        return {name: state_of(each, self._talks(each)) for name, each in self.upstreams.items()}

    def _talks(self, upstream: Upstream) -> list[UpstreamSession]:
        """Return the conversations with an upstream that are open."""
        shared = [self._open_one(key) for key in self._conversations if key[0] == upstream.name]
        single = [each for each in self._singles if each.upstream is upstream]
        return [each for each in shared if each is not None] + single

    def tools_of(self, name: str) -> list[dict[str, Any]]:
        """Return the tools of an upstream that clients get, as they were last seen."""
        upstream = self.upstreams[name]
        return [tool_of(upstream, each) for each in self.seen.get((name, "tools"), [])]

    async def probe(self, name: str) -> dict[str, Any]:
        """Ask an upstream for its tools; return how long it took, or why it failed."""
        return await probe(self, self.upstreams[name])

    async def _unknown(self) -> list[str]:
        """Return the methods of the records whose outcome is unknown."""
        try:
            records = await (await self.ledger()).list(state=State.UNKNOWN, limit=MOST_UNKNOWN)
        except LedgerDown:
            return []
        return [record.id.method for record in records]

    async def aclose(self, grace: float = GRACE) -> None:
        """Finish the commands that run, and end all upstreams."""
        try:
            await super().aclose(grace)
        finally:
            for task in list(self._background):
                task.cancel()
            if self._background:
                await asyncio.wait(self._background)
            openings = list(self._conversations.values())
            self._conversations.clear()
            await asyncio.gather(
                *(_closed(opening) for opening in openings),
                *(single.aclose() for single in self._singles),
            )
            self._singles.clear()
            await self._reaper.aclose()


def _origins_of(settings: GatewaySettings) -> dict[str, Origin]:
    """Return how each upstream of the settings is reached."""
    references = settings.references()
    return {each.name: unread_origin(each, references) for each in settings.upstreams}


def _has_failed(opening: "asyncio.Task[UpstreamSession]") -> bool:
    return opening.cancelled() or opening.exception() is not None


async def _read_in_time(conversation: UpstreamSession, kind: str) -> Listing:
    """Return a list of an upstream; raise `UpstreamUnavailable` if it takes too long."""
    try:
        async with asyncio.timeout(START_TIME):
            await conversation.ready()
            return await read_list(conversation, kind)
    except TimeoutError:
        reason = f"it did not give its list of {kind} within {START_TIME:g} s"
        raise conversation.upstream.unavailable(reason) from None


async def _closed(opening: "asyncio.Task[UpstreamSession]") -> None:
    """End a conversation, also one that is being opened."""
    if not opening.done():
        opening.cancel()
        await asyncio.wait([opening])
    if not _has_failed(opening):
        await opening.result().aclose()


def _limit(known: dict[Any, Any], most: int) -> None:
    """Forget the oldest entry if there are too many."""
    if len(known) > most:
        del known[next(iter(known))]


def _forget(known: dict[Any, Any], unit: str) -> None:
    """Forget what is known of the conversations of one unit, whose name is second in each key."""
    for key in [key for key in known if key[1] == unit]:
        del known[key]


async def _quiet(opening: "asyncio.Task[UpstreamSession]") -> None:
    """Wait until a conversation is open and not in use, or could not be opened."""
    await asyncio.wait([opening])
    if not _has_failed(opening):
        await opening.result().quiet()


async def _closed_when_quiet(opening: "asyncio.Task[UpstreamSession]") -> None:
    """End a conversation after the commands that run, although their callers have left."""
    await _quiet(opening)
    await _closed(opening)


def _secret_beside(ledger: str) -> str | None:
    """Return the secret of the sessions, which is kept in a file beside the ledger.

    Sessions of clients continue after a restart. Of several gateways that start at the same time,
    one makes the secret. A secret of the environment comes first: gateways without a file share it.
    """
    if os.environ.get(SECRET_VARIABLE):
        return None
    scheme, _, path = ledger.partition(":")
    if scheme != "sqlite" or not path:
        return None
    file = Path(path.partition("?")[0] + ".secret")
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        create_file(file, os.urandom(32).hex().encode())
    return file.read_text().strip()
