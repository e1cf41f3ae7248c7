"""Requests and results between the two eras, member by member.

A client and a server of one era are passed on to each other as they are. Between eras only these
members change:

    to a server with a handshake   the envelope is taken out of `_meta`
    to a server without one        an envelope of the gateway is put into `_meta`
    to a client without one        `resultType` and the name of the server are added
    to a client with a handshake   `resultType`, `ttlMs` and `cacheScope` are taken out
"""

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from wirecall.gateway.wire import META, members_of, raw_of
from wirecall.mcp.revisions import STATELESS, Revision
from wirecall.mcp.types import PREFIX
from wirecall.protocol.messages import encode
from wirecall.version import __version__

if TYPE_CHECKING:
    from wirecall.gateway.session import UpstreamSession

# How the gateway describes itself to servers.
ME: dict[str, Any] = {"name": "wirecall-gateway", "version": __version__}
# Members of a result that only the newest revision has.
_NEWER = ("resultType", "ttlMs", "cacheScope")

_ENVELOPE: dict[str, Any] = {
    f"{PREFIX}protocolVersion": STATELESS[-1].name,
    f"{PREFIX}clientCapabilities": {},
    f"{PREFIX}clientInfo": ME,
}


def envelope() -> Raw:
    """Return the params of a request of the gateway to a server without a handshake."""
    return raw_of({META: _ENVELOPE})


def _crosses(client: Revision | None, server: Revision | None) -> bool:
    """Return whether client and server are of two eras."""
    if client is None or server is None:
        return False
    return client.is_stateless is not server.is_stateless


def params_for(
    params: Raw | UnsetType, client: Revision | None, server: Revision | None
) -> Raw | UnsetType:
    """Return the params of a client for a server."""
    if not _crosses(client, server):
        return params
    assert server is not None
    members: dict[str, Any] = {**members_of(params)}
    meta: dict[str, Any] = {
        name: value
        for name, value in members_of(members.get(META, UNSET)).items()
        if not name.startswith(PREFIX)
    }
    if server.is_stateless:
        meta |= _ENVELOPE
    members.pop(META, None)
    if meta:
        members[META] = raw_of(meta)
    return raw_of(members)


def result_for(
    result: bytes,
    client: Revision | None,
    server: Revision | None,
    session: "UpstreamSession",
) -> bytes:
    """Return the result of a server for a client."""
    if not _crosses(client, server):
        return result
    assert client is not None
    members: dict[str, Any] = {**members_of(Raw(result))}
    if not client.is_stateless:
        for name in _NEWER:
            members.pop(name, None)
        return encode(members)
    meta: dict[str, Any] = {**members_of(members.pop(META, UNSET))}
    meta.setdefault(f"{PREFIX}serverInfo", session.described()["serverInfo"])
    members.pop("resultType", None)
    return encode({"resultType": "complete", **members, META: meta})


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
