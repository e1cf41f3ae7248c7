"""Who is told of changes: the subscriptions of a session, and streams that listen.

1. With a handshake a session hears of every list that changes, and of the resources it subscribed to.
2. At 2026-07-28 a client asks for a stream (`subscriptions/listen`) and names what it wants to hear. It is told first which
   of its wishes can happen here, then of changes, until it leaves or the server stops.
3. What a client may ask for is bounded: in number, and in characters of all URIs.
"""

import asyncio
from typing import Any

from wirecall.errors import InvalidRequest
from wirecall.mcp.revisions import STATELESS
from wirecall.mcp.server.asking import Outlet, Session
from wirecall.mcp.server.catalog import Catalog
from wirecall.mcp.server.hub import Hub, Listener
from wirecall.mcp.server.requests import Request
from wirecall.mcp.types import PREFIX
from wirecall.protocol.messages import encode

MAX_SUBSCRIPTIONS = 1000
MAX_SUBSCRIBED = 128 << 10  # characters of all URIs of a session


# --- with a handshake ------------------------------------------------------------------------------------------------


async def subscribe(request: Request) -> Any:
    subscriptions = request.session.subscriptions
    if request.params.uri in subscriptions:
        return b"{}"
    if len(subscriptions) >= MAX_SUBSCRIPTIONS:
        raise InvalidRequest(f"a session may subscribe to {MAX_SUBSCRIPTIONS} resources", limit="subscriptions")
    if len(request.params.uri) + sum(map(len, subscriptions)) > MAX_SUBSCRIBED:
        reason = f"the URIs that a session subscribes to may have {MAX_SUBSCRIBED} characters in all"
        raise InvalidRequest(reason, limit="subscriptions")
    subscriptions.add(request.params.uri)
    return b"{}"


async def unsubscribe(request: Request) -> Any:
    request.session.subscriptions.discard(request.params.uri)
    return b"{}"


def session_listener(session: Session) -> Listener:
    """Hears what a session with a handshake is told."""
    return Listener(lambda kind, uri: kind != "updated" or uri in session.subscriptions)


async def forward(listener: Listener, outlet: Outlet) -> None:
    """Send what a listener hears, until it is closed or the server stops."""
    stopped = asyncio.get_running_loop().create_task(outlet.stopping.wait())
    stopped.add_done_callback(lambda _: listener.close())
    try:
        while (message := await listener.next()) is not None:
            await outlet.send(message)
    finally:
        stopped.cancel()


# --- without one (2026-07-28) ----------------------------------------------------------------------------------------


async def listen(hub: Hub, catalog: Catalog, request: Request) -> Any:
    """Tell of changes until the client leaves or the server stops."""
    honoured, meta = _honoured(request.params.notifications, catalog), {f"{PREFIX}subscriptionId": request.id}
    listener = _stream_listener(honoured, meta)
    hub.add(listener)
    try:
        acknowledged = {"_meta": meta, "notifications": honoured}
        await request.outlet.send(_notification("notifications/subscriptions/acknowledged", acknowledged))
        await forward(listener, request.outlet)
    finally:
        hub.remove(listener)
    if request.outlet.is_shared:  # on a pipe the end of a stream is told by a message
        cancelled = {"requestId": request.id, "_meta": meta}
        await request.outlet.send(_notification("notifications/cancelled", cancelled))
    return {"_meta": meta}


def _honoured(wanted: Any, catalog: Catalog) -> dict[str, Any]:
    """Of what a listener asks for, what can happen here."""
    has = catalog.capabilities(STATELESS[-1])
    kinds = {
        "tools": wanted.tools_list_changed,
        "prompts": wanted.prompts_list_changed,
        "resources": wanted.resources_list_changed,
    }
    honoured: dict[str, Any] = {f"{kind}ListChanged": True for kind, asked in kinds.items() if asked and kind in has}
    if wanted.resource_subscriptions and "resources" in has:
        honoured["resourceSubscriptions"] = wanted.resource_subscriptions[:MAX_SUBSCRIPTIONS]
    return honoured


def _stream_listener(honoured: dict[str, Any], meta: dict[str, Any]) -> Listener:
    uris = frozenset(honoured.get("resourceSubscriptions", ()))
    return Listener(lambda kind, uri: uri in uris if kind == "updated" else f"{kind}ListChanged" in honoured, meta)


def _notification(method: str, params: dict[str, Any]) -> bytes:
    return encode({"jsonrpc": "2.0", "method": method, "params": params})
