"""What a person sees of the servers behind a gateway: `/status`, and the page Upstreams.

Only `probe` reaches a server, and it only reads: a list of tools.
"""

import asyncio
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw

from wirecall.errors import CallFailed, RpcError
from wirecall.gateway.fronts import offers, read_list
from wirecall.gateway.link import RelayLineLink
from wirecall.mcp.revisions import HANDSHAKE, Revision
from wirecall.mcp.server.peer import Session
from wirecall.protocol.messages import JsonObject

if TYPE_CHECKING:
    from wirecall.gateway.gateway import Gateway
    from wirecall.gateway.session import UpstreamSession
    from wirecall.gateway.upstream import Upstream

# Lines of stderr that are shown.
LINES = 12
# Seconds for a server to answer a probe.
PROBE_TIME = 8.0


def state_of(upstream: "Upstream", conversations: list["UpstreamSession"]) -> JsonObject:
    """Return the state of an upstream: facts in memory, without a question to anything."""
    # One that has ended still has its last words.
    child = upstream.children[-1] if upstream.children else upstream.starts.newest
    is_alive = child is not None and child.is_alive
    return {
        "up": upstream.is_up,
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(upstream.since)),
        "label": upstream.origin.label,
        "transport": _transport(upstream, conversations),
        "revisions": _names(each.link.revision for each in conversations),
        "client_revisions": _names(each.offered for each in conversations),
        "sessions": len(conversations),
        "pids": [each.pid for each in upstream.children if each.pid is not None],
        "age_s": round(time.time() - upstream.starts.at, 1) if is_alive else None,
        "starts": upstream.starts.count,
        "in_flight": upstream.places.taken,
        "limit": upstream.origin.in_flight,
        "queued": upstream.places.waiting,
        "breaker": "open" if upstream.breaker.is_open else "closed",
        "breaker_left_s": round(upstream.breaker.left, 1),
        "reason": upstream.breaker.reason or upstream.starts.reason or None,
        "stderr": [] if child is None else child.said.splitlines()[-LINES:],
    }


def _transport(upstream: "Upstream", conversations: list["UpstreamSession"]) -> str:
    if upstream.origin.command:
        return "stdio"
    if any(isinstance(each.link, RelayLineLink) for each in conversations):
        return "sse"
    return "http"


def _names(revisions: Iterable[Revision | None]) -> list[str]:
    return sorted({each.name for each in revisions if each is not None})


def tool_of(upstream: "Upstream", definition: Raw) -> JsonObject:
    """Return what a person sees of a tool: its hints, and what the gateway does with it."""
    members: JsonObject = msgspec.json.decode(definition)
    name = str(members.get("name"))
    hints = members.get("annotations")
    is_command = upstream.use_of(name) == "once"
    return {
        "name": name,
        "kind": "command" if is_command else "query",
        "recorded": is_command and upstream.origin.keys.get(name, "auto") != "off",
        "annotations": hints if isinstance(hints, dict) else {},
    }


async def probe(gateway: "Gateway", upstream: "Upstream") -> JsonObject:
    """Ask an upstream for its tools, and return how long it took; start it if it does not run."""
    began = time.monotonic()
    count = 0
    try:
        async with asyncio.timeout(PROBE_TIME):
            client = Session(HANDSHAKE[-1])
            async with gateway.conversation(upstream, "", client) as conversation:
                await conversation.ready()
                if offers(conversation.described(), "tools"):
                    count = len((await read_list(conversation, "tools")).entries)
    except TimeoutError:
        return {"ok": False, "error": f"no answer within {PROBE_TIME:g} s", "ms": _ms(began)}
    except (RpcError, CallFailed) as error:
        return {"ok": False, "error": reason_of(error), "ms": _ms(began)}
    return {"ok": True, "tools": count, "ms": _ms(began)}


def reason_of(error: RpcError | CallFailed) -> str:
    """Return why an upstream does not answer, in one sentence."""
    if isinstance(error, RpcError) and isinstance(error.data, dict):
        return str(error.data.get("reason", error))
    return str(error)


def named_reason(name: str, error: RpcError | CallFailed) -> str:
    """Return the name of an upstream, and why it does not answer."""
    reason = reason_of(error).removeprefix(f"{name}: ")
    return f"{name}: {reason}"


def _ms(began: float) -> float:
    return round((time.monotonic() - began) * 1000, 2)
