"""Requests and results between the two eras, member by member.

A client and a server of one era are passed on to each other as they are. Between eras only these
members change:

    to a server with a handshake   the envelope is taken out of `_meta`
    to a server without one        an envelope is put into `_meta`: what the client has declared
    to a client without one        `resultType` and the name of the server are added, and to what
                                   it may keep, that it must not (`ttlMs`, `cacheScope`)
    to a client with a handshake   `resultType`, `ttlMs` and `cacheScope` are taken out

A resource that is missing has an error code for each era.
"""

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from wirecall.errors import RpcError, rebuilt
from wirecall.gateway.wire import META, members_of, raw_of
from wirecall.mcp.revisions import HANDSHAKE, STATELESS, Revision
from wirecall.mcp.types import PREFIX, TASKS
from wirecall.protocol.messages import encode
from wirecall.version import __version__

if TYPE_CHECKING:
    from wirecall.gateway.session import UpstreamSession
    from wirecall.mcp.server.peer import Session

# How the gateway describes itself to servers.
ME: dict[str, Any] = {"name": "wirecall-gateway", "version": __version__}
# Members of a result that only the newest revision has.
_NEWER = ("resultType", "ttlMs", "cacheScope")
# Results that say for how long a client may keep them (2026-07-28, server/utilities/caching).
_KEPT = frozenset(
    {
        "tools/list",
        "prompts/list",
        "resources/list",
        "resources/templates/list",
        "resources/read",
    }
)

_ENVELOPE: dict[str, Any] = {
    f"{PREFIX}protocolVersion": STATELESS[-1].name,
    f"{PREFIX}clientCapabilities": {},
    f"{PREFIX}clientInfo": ME,
}


def envelope() -> Raw:
    """Return the params of a request of the gateway to a server without a handshake."""
    return raw_of({META: _ENVELOPE})


def envelope_of(client: "Session") -> dict[str, Any]:
    """Return the envelope for a client with a handshake: what it declared, and its log level."""
    capabilities: dict[str, Any] = {**client.capabilities}
    extensions = {
        id: settings
        for id, settings in client.extensions.items()
        if id != TASKS  # a client with a handshake cannot ask for the task
    }
    capabilities.pop("extensions", None)
    if extensions:
        capabilities["extensions"] = extensions
    members = {
        **_ENVELOPE,
        f"{PREFIX}clientCapabilities": capabilities,
        f"{PREFIX}clientInfo": client.client or ME,
    }
    if client.level is not None:
        members[f"{PREFIX}logLevel"] = client.level
    return members


def _crosses(client: "Session | None", server: Revision | None) -> bool:
    """Return whether client and server are of two eras."""
    if client is None or server is None:
        return False
    return client.revision.is_stateless is not server.is_stateless


def is_older(client: "Session | None", server: Revision | None) -> bool:
    """Return whether the client has a handshake, and the server has none."""
    return _crosses(client, server) and server in STATELESS


def params_for(
    params: Raw | UnsetType, client: "Session | None", server: Revision | None
) -> Raw | UnsetType:
    """Return the params of a client for a server."""
    if client is None or server is None or not _crosses(client, server):
        return params
    members: dict[str, Any] = {**members_of(params)}
    meta: dict[str, Any] = {
        name: value
        for name, value in members_of(members.get(META, UNSET)).items()
        if not name.startswith(PREFIX)
    }
    if server.is_stateless:
        meta |= envelope_of(client)
    members.pop(META, None)
    if meta:
        members[META] = raw_of(meta)
    return raw_of(members)


def result_for(
    result: bytes,
    client: "Session | None",
    server: Revision | None,
    session: "UpstreamSession",
    method: str,
) -> bytes:
    """Return the result of a server for a client."""
    if client is not None and server is None:
        # It is recorded, and the server cannot be reached.
        is_new = "resultType" in members_of(Raw(result))
        server = STATELESS[-1] if is_new else HANDSHAKE[-1]
    if client is None or not _crosses(client, server):
        return result
    members: dict[str, Any] = {**members_of(Raw(result))}
    if not client.revision.is_stateless:
        for name in _NEWER:
            members.pop(name, None)
        return encode(members)
    meta: dict[str, Any] = {**members_of(members.pop(META, UNSET))}
    meta.setdefault(f"{PREFIX}serverInfo", session.described()["serverInfo"])
    members.pop("resultType", None)
    whole = {"resultType": "complete", **members, META: meta}
    if method in _KEPT:
        whole |= {"ttlMs": 0, "cacheScope": "private"}
    return encode(whole)


def error_for(
    error: RpcError, method: str, client: "Session | None", server: Revision | None
) -> RpcError:
    """Return the error of a server for a client: a resource that is missing has two codes."""
    if client is None or server is None or not _crosses(client, server):
        return error
    missing = "resource not found"
    if method != "resources/read" or str(error.code) != server.value(missing):
        return error
    return rebuilt(RpcError, int(client.revision.value(missing) or 0), error.message, error.data)


def introduced(result: Raw) -> dict[str, Any]:
    """Return what a server says of itself in `initialize` or `server/discover`."""
    members: dict[str, Any] = msgspec.json.decode(result)
    info = members.get("serverInfo")
    if info is None:
        info = members.get(META, {}).get(f"{PREFIX}serverInfo", {"name": "", "version": ""})
    found: dict[str, Any] = {"capabilities": members.get("capabilities", {}), "serverInfo": info}
    if "instructions" in members:
        found["instructions"] = members["instructions"]
    return found
