"""Changes of lists and resources: listeners, and how a client becomes one.

1. A change goes to every listener that asked for its kind. A listener keeps one copy of each
   message that it has not sent: five changes of one list are one message. So the number of lists
   and resources bounds a slow listener's memory.
2. With a handshake a session gets the changes of every list, and of the resources it subscribed to.
3. At 2026-07-28 a client asks for a stream (`subscriptions/listen`) and names the changes it wants.
   The server first sends those that it honours, then changes, until the client leaves or the server
   stops.
4. A stream of changes ends with the token that it was opened with: its client comes back with
   another one.
5. Subscriptions are bounded: those of a session in number and in characters, those of a caller in
   bytes (`Subscribed`).
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from sys import getsizeof
from typing import TYPE_CHECKING, Any, TypeAlias

from wirecall.aio import wake
from wirecall.errors import Busy, InvalidRequest, NotCapable
from wirecall.mcp.types import LEVELS, PREFIX, TASKS
from wirecall.protocol.messages import JsonObject, encode

if TYPE_CHECKING:
    from wirecall.mcp.server.catalog import Catalog
    from wirecall.mcp.server.peer import Outlet, Peer, Session
    from wirecall.mcp.server.tasks import Tasks
    from wirecall.server.identity import Identity

# Seconds until a token expires, if it does.
Lasts: TypeAlias = "Callable[[Identity | None], float | None]"

# Messages that a listener has not taken.
MAX_PENDING = 1000
# Resources that one session or stream subscribes to.
MAX_SUBSCRIPTIONS = 1000
# Tasks of one listener: the ledger is asked for each, every few seconds.
MAX_TASKS = 100
# Characters of all URIs of a session.
MAX_SUBSCRIBED = 128 << 10


class Listener:
    """A client that asked for changes.

    `wants` takes a kind ("tools", ..., "updated") and a URI.
    """

    def __init__(
        self,
        wants: Callable[[str, str | None], bool],
        meta: JsonObject | None = None,
        session: "Session | None" = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        # The session with a handshake that listens. None: a stream of 2026-07-28.
        self.session = session
        self._wants = wants
        self._meta = meta
        self._pending: dict[bytes, None] = {}
        # `next` awaits it; an event would take 1 KB of each idle stream.
        self._news: asyncio.Future[None] | None = None
        self._closed = False

    def notify(self, kind: str, uri: str | None) -> None:
        """Keep a change for the client, if it wants this kind."""
        if not self._wants(kind, uri) or len(self._pending) >= MAX_PENDING:
            return
        method = f"notifications/{kind}/list_changed"
        if kind == "updated":
            method = "notifications/resources/updated"
        params: JsonObject = {}
        if uri is not None:
            params["uri"] = uri
        if self._meta:
            params["_meta"] = self._meta
        message: JsonObject = {"jsonrpc": "2.0", "method": method}
        if params:
            message["params"] = params
        self.tell(encode(message))

    def tell(self, message: bytes) -> None:
        """Keep a message for the client."""
        if len(self._pending) < MAX_PENDING:
            self._pending[message] = None
            wake(self._news, None)

    def close(self) -> None:
        """Make `next` return None."""
        self._closed = True
        wake(self._news, None)

    async def next(self) -> bytes | None:
        """Wait for the next message, and return it; None when the listener is closed."""
        while not self._pending and not self._closed:
            self._news = self.loop.create_future()
            await self._news
        if self._closed:
            return None
        message = next(iter(self._pending))
        del self._pending[message]
        return message


class Hub:
    """All listeners of this process."""

    def __init__(self) -> None:
        self._listeners: set[Listener] = set()
        # Notifies the other processes.
        self.beyond: Callable[[str, str | None], None] | None = None
        # Called with the id of a task that has changed.
        self.on_task: Callable[[str], None] | None = None

    def add(self, listener: Listener) -> None:
        self._listeners.add(listener)

    def remove(self, listener: Listener) -> None:
        self._listeners.discard(listener)

    def notify(self, kind: str, uri: str | None = None) -> None:
        """Notify every listener, here and in other processes. May be called from any thread."""
        self.notify_here(kind, uri)
        if self.beyond is not None:
            self.beyond(kind, uri)

    def tell(self, message: bytes, wants: "Callable[[Session], bool]") -> int:
        """Send a message to the sessions that want it, in this loop; return their number."""
        count = 0
        for listener in tuple(self._listeners):
            if listener.session is not None and wants(listener.session):
                listener.tell(message)
                count += 1
        return count

    def notify_here(self, kind: str, uri: str | None) -> None:
        if kind == "task" and uri is not None and self.on_task is not None:
            self.on_task(uri)
        # A listener belongs to its own event loop, and this may run in another thread.
        for listener in tuple(self._listeners):
            if not listener.loop.is_closed():
                listener.loop.call_soon_threadsafe(listener.notify, kind, uri)


class Subscribed:
    """Counts the bytes of the URIs that each caller has subscribed to.

    The sessions and streams of a caller count together.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: Counter[str] = Counter()

    def hold(self, caller: str, uris: Collection[str]) -> None:
        """Start counting URIs. Raises `Busy` if they take too many bytes."""
        held = self._held[caller] + sum(map(getsizeof, uris))
        if held > self._most:
            reason = (
                f"all subscriptions of one caller may take {self._most} bytes: "
                "unsubscribe, or end a session"
            )
            raise Busy(reason, ran="no", limit="subscribed_bytes", max=self._most)
        self._held[caller] = held

    def release(self, caller: str, uris: Collection[str]) -> None:
        self._held[caller] -= sum(map(getsizeof, uris))
        if not self._held[caller]:
            del self._held[caller]

    def forget(self, session: "Session") -> None:
        """Release the subscriptions of a session that has ended.

        Those that a request in flight adds do not count.
        """
        if session.caller is not None:
            self.release(session.caller, session.subscriptions)
            session.caller = None


async def forward(listener: Listener, outlet: "Outlet", seconds: float | None = None) -> None:
    """Send the messages of a listener until it is closed.

    It is closed when `seconds` have passed or the server stops.
    """
    outlet.stopping.listen(listener.close)
    over: asyncio.TimerHandle | None = None
    if seconds is not None:
        over = listener.loop.call_later(seconds, listener.close)
    try:
        while (message := await listener.next()) is not None:
            await outlet.send(message)
    finally:
        outlet.stopping.forget(listener.close)
        if over is not None:
            over.cancel()


# --- with a handshake -----------------------------------------------------------------------------


def session_listener(session: "Session") -> Listener:
    """Return a listener for a session with a handshake.

    It gets the changes of all lists, and of the resources that the session subscribes to.
    """

    def wants(kind: str, uri: str | None) -> bool:
        if kind == "updated":
            return uri in session.subscriptions
        return kind != "task"

    return Listener(wants, session=session)


async def subscribe(subscribed: Subscribed, peer: "Peer") -> object:
    """Answer `resources/subscribe`."""
    subscriptions = peer.session.subscriptions
    caller = peer.session.caller
    if peer.params.uri in subscriptions:
        return b"{}"
    if len(subscriptions) >= MAX_SUBSCRIPTIONS:
        raise InvalidRequest(
            f"a session may subscribe to at most {MAX_SUBSCRIPTIONS} resources: "
            "unsubscribe from one",
            limit="subscriptions",
        )
    if len(peer.params.uri) + sum(map(len, subscriptions)) > MAX_SUBSCRIBED:
        reason = (
            "the URIs of all subscriptions of a session may have "
            f"at most {MAX_SUBSCRIBED} characters"
        )
        raise InvalidRequest(reason, limit="subscriptions")
    if caller is not None:
        subscribed.hold(caller, [peer.params.uri])
    subscriptions.add(peer.params.uri)
    return b"{}"


async def unsubscribe(subscribed: Subscribed, peer: "Peer") -> object:
    """Answer `resources/unsubscribe`."""
    subscriptions = peer.session.subscriptions
    caller = peer.session.caller
    if peer.params.uri in subscriptions:
        subscriptions.remove(peer.params.uri)
        if caller is not None:
            subscribed.release(caller, [peer.params.uri])
    return b"{}"


def setting_of(method: str, params: Any, session: "Session") -> tuple[str, str, bool] | None:
    """Return what a request sets for its session: its name, the request, and whether it is to last.

    Returns None if the request will be refused.
    """
    if params is None:
        return None
    setting: JsonObject = {}
    is_kept = True
    if method == "logging/setLevel":
        if params.level not in LEVELS:
            return None
        name = "level"
        setting["level"] = params.level
    else:
        if method == "resources/unsubscribe":
            is_kept = False
        elif len(session.subscriptions) >= MAX_SUBSCRIPTIONS:
            return None
        name = f"uri-{hashlib.sha256(params.uri.encode(errors='replace')).hexdigest()[:32]}"
        setting["uri"] = params.uri
    request = {"jsonrpc": "2.0", "id": 0, "method": method, "params": setting}
    return name, encode(request).decode(), is_kept


# --- without one (2026-07-28) ---------------------------------------------------------------------


async def listen(
    hub: Hub,
    subscribed: Subscribed,
    catalog: "Catalog",
    tasks: "Tasks",
    lasts: "Lasts",
    peer: "Peer",
) -> object:
    """Answer `subscriptions/listen`: send changes.

    It ends when the client leaves, its token ends, or the server stops.
    """
    honoured = await _honoured(catalog, tasks, peer)
    uris = frozenset(honoured.get("resourceSubscriptions", ()))
    meta = {f"{PREFIX}subscriptionId": peer.id}

    def wants(kind: str, uri: str | None) -> bool:
        if kind == "updated":
            return uri in uris
        return f"{kind}ListChanged" in honoured

    async def send(method: str, params: JsonObject) -> None:
        await peer.outlet.send(
            encode({"jsonrpc": "2.0", "method": method, "params": {"_meta": meta, **params}})
        )

    listener = Listener(wants, meta)
    followed: asyncio.Task[None] | None = None
    subscribed.hold(peer.caller, uris)
    hub.add(listener)
    try:
        await send("notifications/subscriptions/acknowledged", {"notifications": honoured})
        if honoured.get("taskIds"):
            following = tasks.listen(
                frozenset(honoured["taskIds"]), peer.caller, partial(send, "notifications/tasks")
            )
            followed = asyncio.get_running_loop().create_task(following)
            followed.add_done_callback(lambda _: listener.close())  # the client has left
        await forward(listener, peer.outlet, lasts(peer.identity))
    finally:
        hub.remove(listener)
        subscribed.release(peer.caller, uris)
        if followed is not None:
            followed.cancel()
            await asyncio.wait({followed})
    if peer.outlet.is_shared:  # on a pipe a message marks the end of a stream
        await send("notifications/cancelled", {"requestId": peer.id})
    # The answer shows the client that the server ended the stream, and not a broken connection
    # ("Graceful Closure").
    return {"_meta": meta}


async def _honoured(catalog: "Catalog", tasks: "Tasks", peer: "Peer") -> JsonObject:
    """Return the changes that the server will send, of those that a client asked for.

    The server honours only kinds of changes that can happen here. The acknowledgement lists them,
    and is sent before any change (2026-07-28, basic/patterns/subscriptions, "Acknowledgment").
    """
    asked = peer.params.notifications
    has = catalog.offered
    kinds = {
        "tools": asked.tools_list_changed,
        "prompts": asked.prompts_list_changed,
        "resources": asked.resources_list_changed,
    }
    honoured: JsonObject = {
        f"{kind}ListChanged": True for kind, wanted in kinds.items() if wanted and any(has[kind])
    }
    if asked.resource_subscriptions and any(has["resources"]):
        honoured["resourceSubscriptions"] = asked.resource_subscriptions[:MAX_SUBSCRIPTIONS]
    if asked.task_ids:
        if TASKS not in peer.session.extensions:
            needed: JsonObject = {"extensions": {TASKS: {}}}
            raise NotCapable(
                f"taskIds: the client has not declared {TASKS}", requiredCapabilities=needed
            )
        honoured["taskIds"] = await tasks.known(asked.task_ids[:MAX_TASKS], peer)
    return honoured
