"""Changes of lists and resources: listeners, and how a client becomes one.

1. Every listener that asked for its kind gets a change. A listener keeps each message that it has not sent once: five
   changes of one list are one message. So the memory of a slow listener is bounded by the number of lists and resources.
2. With a handshake a session hears of every list that changes, and of the resources it subscribed to.
3. At 2026-07-28 a client asks for a stream (`subscriptions/listen`) and names the changes it wants. The server first sends
   those that it honours, then changes, until the client leaves or the server stops.
4. A stream of changes ends with the token that it was opened with: its client comes back with another one.
5. Subscriptions are bounded: those of a session in number and in characters, those of a caller in bytes (`Subscribed`).
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from sys import getsizeof
from typing import TYPE_CHECKING, TypeAlias

from wirecall.errors import Busy, InvalidRequest, NotCapable
from wirecall.mcp.types import PREFIX, TASKS
from wirecall.protocol.messages import JsonObject, encode
from wirecall.stepping import wake

if TYPE_CHECKING:
    from wirecall.mcp.server.catalog import Catalog
    from wirecall.mcp.server.peer import Outlet, Peer, Session
    from wirecall.mcp.server.tasks import Tasks
    from wirecall.server.identity import Identity

Lasts: TypeAlias = "Callable[[Identity | None], float | None]"  # the seconds that a token has left; None: no end

MAX_PENDING = 1000  # messages that a listener has not taken
MAX_SUBSCRIPTIONS = 1000
MAX_TASKS = 100  # of one listener: the ledger is asked for each, every few seconds
MAX_SUBSCRIBED = 128 << 10  # characters of all URIs of a session


class Listener:
    """A client that wants to hear of changes. `wants` takes a kind ("tools", ..., "updated") and a URI."""

    def __init__(self, wants: Callable[[str, str | None], bool], meta: JsonObject | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self._wants = wants
        self._meta = meta
        self._pending: dict[bytes, None] = {}
        self._news: asyncio.Future[None] | None = None  # `next` awaits it; an event would take 1 KB of each idle stream
        self._closed = False

    def hear(self, kind: str, uri: str | None) -> None:
        """Keep a change for the client, if it wants to hear of it."""
        if not self._wants(kind, uri) or len(self._pending) >= MAX_PENDING:
            return
        method = "notifications/resources/updated" if kind == "updated" else f"notifications/{kind}/list_changed"
        params = {**({"uri": uri} if uri is not None else {}), **({"_meta": self._meta} if self._meta else {})}
        message = encode({"jsonrpc": "2.0", "method": method, **({"params": params} if params else {})})
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
        self.beyond: Callable[[str, str | None], None] | None = None  # tells the other workers
        self.on_task: Callable[[str], None] | None = None  # hears of tasks that have changed

    def add(self, listener: Listener) -> None:
        self._listeners.add(listener)

    def remove(self, listener: Listener) -> None:
        self._listeners.discard(listener)

    def tell(self, kind: str, uri: str | None = None) -> None:
        """Tell every listener, here and in other workers. May be called from any thread."""
        self.tell_here(kind, uri)
        if self.beyond is not None:
            self.beyond(kind, uri)

    def tell_here(self, kind: str, uri: str | None) -> None:
        if kind == "task" and uri is not None and self.on_task is not None:
            self.on_task(uri)
        # A listener belongs to its own event loop, and this may run in another thread.
        for listener in tuple(self._listeners):
            if not listener.loop.is_closed():
                listener.loop.call_soon_threadsafe(listener.hear, kind, uri)


class Subscribed:
    """Counts the bytes of the URIs that each caller has subscribed to, over all its sessions and streams."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: Counter[str] = Counter()

    def hold(self, caller: str, uris: Collection[str]) -> None:
        """Count URIs from now on. Raises `Busy` if they are too many."""
        held = self._held[caller] + sum(map(getsizeof, uris))
        if held > self._most:
            reason = f"all subscriptions of one caller may take {self._most} bytes: unsubscribe, or end a session"
            raise Busy(reason, ran="no", limit="subscribed_bytes", max=self._most)
        self._held[caller] = held

    def release(self, caller: str, uris: Collection[str]) -> None:
        self._held[caller] -= sum(map(getsizeof, uris))
        if not self._held[caller]:
            del self._held[caller]

    def forget(self, session: "Session") -> None:
        """Release the subscriptions of a session that has ended. Those that a request in flight adds do not count."""
        if session.caller is not None:
            self.release(session.caller, session.subscriptions)
            session.caller = None


async def forward(listener: Listener, outlet: "Outlet", seconds: float | None = None) -> None:
    """Send the messages of a listener, until it is closed, or its seconds are over, or the server stops."""
    outlet.stopping.listen(listener.close)
    over = None if seconds is None else listener.loop.call_later(seconds, listener.close)
    try:
        while (message := await listener.next()) is not None:
            await outlet.send(message)
    finally:
        outlet.stopping.forget(listener.close)
        if over is not None:
            over.cancel()


# --- with a handshake ------------------------------------------------------------------------------------------------


def session_listener(session: "Session") -> Listener:
    """Return a listener for all lists, and for the resources that a session with a handshake subscribes to."""
    return Listener(lambda kind, uri: uri in session.subscriptions if kind == "updated" else kind != "task")


async def subscribe(subscribed: Subscribed, peer: "Peer") -> object:
    """Answer `resources/subscribe`."""
    subscriptions, caller = peer.session.subscriptions, peer.session.caller
    if peer.params.uri in subscriptions:
        return b"{}"
    if len(subscriptions) >= MAX_SUBSCRIPTIONS:
        raise InvalidRequest(
            f"a session may subscribe to at most {MAX_SUBSCRIPTIONS} resources: unsubscribe from one", limit="subscriptions"
        )
    if len(peer.params.uri) + sum(map(len, subscriptions)) > MAX_SUBSCRIBED:
        reason = f"the URIs of all subscriptions of a session may have at most {MAX_SUBSCRIBED} characters"
        raise InvalidRequest(reason, limit="subscriptions")
    if caller is not None:
        subscribed.hold(caller, [peer.params.uri])
    subscriptions.add(peer.params.uri)
    return b"{}"


async def unsubscribe(subscribed: Subscribed, peer: "Peer") -> object:
    """Answer `resources/unsubscribe`."""
    subscriptions, caller = peer.session.subscriptions, peer.session.caller
    if peer.params.uri in subscriptions:
        subscriptions.remove(peer.params.uri)
        if caller is not None:
            subscribed.release(caller, [peer.params.uri])
    return b"{}"


# --- without one (2026-07-28) ----------------------------------------------------------------------------------------


async def listen(
    hub: Hub, subscribed: Subscribed, catalog: "Catalog", tasks: "Tasks", lasts: "Lasts", peer: "Peer"
) -> object:
    """Answer `subscriptions/listen`: send changes until the client leaves, its token ends, or the server stops."""
    # Of what the client asks for, only what can happen here is honoured. The acknowledgement says which, and comes before
    # any change (2026-07-28, basic/patterns/subscriptions, "Acknowledgment").
    asked, has = peer.params.notifications, catalog.offered
    kinds = {
        "tools": asked.tools_list_changed,
        "prompts": asked.prompts_list_changed,
        "resources": asked.resources_list_changed,
    }
    honoured: JsonObject = {f"{kind}ListChanged": True for kind, wanted in kinds.items() if wanted and any(has[kind])}
    if asked.resource_subscriptions and any(has["resources"]):
        honoured["resourceSubscriptions"] = asked.resource_subscriptions[:MAX_SUBSCRIPTIONS]
    if asked.task_ids:
        if TASKS not in peer.session.extensions:
            needed: JsonObject = {"extensions": {TASKS: {}}}
            raise NotCapable(f"taskIds: the client has not declared {TASKS}", requiredCapabilities=needed)
        honoured["taskIds"] = await tasks.known(asked.task_ids[:MAX_TASKS], peer)
    uris = frozenset(honoured.get("resourceSubscriptions", ()))
    meta = {f"{PREFIX}subscriptionId": peer.id}
    listener = Listener(lambda kind, uri: uri in uris if kind == "updated" else f"{kind}ListChanged" in honoured, meta)

    async def send(method: str, params: JsonObject) -> None:
        await peer.outlet.send(encode({"jsonrpc": "2.0", "method": method, "params": {"_meta": meta, **params}}))

    followed: asyncio.Task[None] | None = None
    subscribed.hold(peer.caller, uris)
    hub.add(listener)
    try:
        await send("notifications/subscriptions/acknowledged", {"notifications": honoured})
        if honoured.get("taskIds"):
            following = tasks.listen(frozenset(honoured["taskIds"]), peer.caller, partial(send, "notifications/tasks"))
            followed = asyncio.get_running_loop().create_task(following)
            followed.add_done_callback(lambda _: listener.close())  # the client has left
        await forward(listener, peer.outlet, lasts(peer.identity))
    finally:
        hub.remove(listener)
        subscribed.release(peer.caller, uris)
        if followed is not None:
            followed.cancel()
            await asyncio.wait({followed})
    if peer.outlet.is_shared:  # on a pipe a message tells the end of a stream
        await send("notifications/cancelled", {"requestId": peer.id})
    # The answer tells the client that the server has ended the stream, and no network has cut it ("Graceful Closure").
    return {"_meta": meta}
