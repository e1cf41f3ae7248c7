"""How a client finds the authorization server of an MCP server (2026-07-28, authorization server discovery).

    protected resource metadata (RFC 9728)         names the resource and its authorization servers
        the address in the challenge, else the two well-known ones, that of the path first
    authorization server metadata (RFC 8414)       names the endpoints
        three well-known addresses for an issuer with a path, two for one without

A server without the first document is one of 2025-03-26: its own origin is the issuer, and if there is no metadata either,
the endpoints have fixed paths.
"""

from urllib.parse import urlsplit

from msgspec import Struct

from wirecall.auth.challenge import Challenge
from wirecall.auth.network import SHOWN, Network
from wirecall.errors import NotAuthorized

TRIED = 3  # authorization servers of one resource

_PROTECTED = "/.well-known/oauth-protected-resource"
_OAUTH, _OPENID = "/.well-known/oauth-authorization-server", "/.well-known/openid-configuration"


class ProtectedResource(Struct, frozen=True):
    """What a server says of itself as a protected resource."""

    resource: str
    authorization_servers: list[str] = []
    scopes_supported: list[str] | None = None


class Issuer(Struct, frozen=True):
    """What an authorization server says of itself."""

    issuer: str
    token_endpoint: str | None = None
    authorization_endpoint: str | None = None
    registration_endpoint: str | None = None
    revocation_endpoint: str | None = None
    scopes_supported: list[str] | None = None
    token_endpoint_auth_methods_supported: list[str] | None = None
    code_challenge_methods_supported: list[str] | None = None
    client_id_metadata_document_supported: bool = False
    authorization_response_iss_parameter_supported: bool = False


def origin(url: str) -> str:
    """Return the scheme, host and port of an address."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


async def find_resource(network: Network, url: str, challenge: Challenge | None) -> ProtectedResource | None:
    """Return the metadata of the server at `url`; None if it has none."""
    path = urlsplit(url).path.rstrip("/")
    named = challenge.params.get("resource_metadata") if challenge else None
    inserted = [f"{origin(url)}{_PROTECTED}{path}"] if path else []
    for place in [named] if named else [*inserted, origin(url) + _PROTECTED]:
        answer = await network.get(place, "the metadata of the server")
        if answer.status >= 500 or answer.status == 429:  # it may have some, so 2025-03-26 is not assumed
            raise NotAuthorized(f"the metadata of the server ({place[:SHOWN]}): HTTP {answer.status}")
        if answer.status != 200:
            continue
        found = answer.document(ProtectedResource)
        if found is None or not found.authorization_servers:
            raise NotAuthorized(f"the metadata of the server ({place[:SHOWN]}) does not name an authorization server")
        # The document must be about this server (RFC 9728, section 3.3), or about a part of its origin that holds it.
        theirs, ours = urlsplit(found.resource), urlsplit(url)
        is_inside = f"{ours.path.rstrip('/')}/".startswith(f"{theirs.path.rstrip('/')}/")
        if theirs[:2] != ours[:2] or not is_inside or theirs.query not in ("", ours.query):
            raise NotAuthorized(f"the metadata of {url} is about another server, {found.resource[:SHOWN]!a}")
        return found
    if named:
        raise NotAuthorized(f"the server names metadata that cannot be read: {named[:SHOWN]!a}")
    return None


async def find_issuer(network: Network, issuer: str) -> Issuer:
    """Return the metadata of an authorization server."""
    parts = urlsplit(issuer)
    base, path = origin(issuer), parts.path.rstrip("/")
    places = [base + _OAUTH, base + _OPENID]
    if path:
        places = [f"{base}{_OAUTH}{path}", f"{base}{_OPENID}{path}", f"{base}{path}{_OPENID}"]
    fault = "it has no metadata"
    for place in places:
        answer = await network.get(place, "the metadata of the authorization server")
        found = answer.document(Issuer) if answer.status == 200 else None
        if found is None:
            continue
        # As texts, without any normalisation (RFC 8414, section 3.3).
        if found.issuer != issuer:
            fault = f"its metadata is that of another one, {found.issuer[:SHOWN]!a}"
            continue
        return found
    raise NotAuthorized(f"the authorization server {issuer[:SHOWN]!a} cannot be used: {fault}")


async def assume_issuer(network: Network, url: str) -> Issuer:
    """Return the authorization server that a server of 2025-03-26 is itself."""
    here = origin(url)
    answer = await network.get(here + _OAUTH, "the metadata of the authorization server")
    if answer.status >= 500 or answer.status == 429:
        raise NotAuthorized(f"the metadata of the authorization server: HTTP {answer.status}")
    found = answer.document(Issuer) if answer.status == 200 else None
    if found is None:
        endpoints = (f"{here}/token", f"{here}/authorize", f"{here}/register")
        return Issuer(here, *endpoints, code_challenge_methods_supported=["S256"])
    if found.issuer not in (here, f"{here}/"):  # both are found at this address
        raise NotAuthorized(f"the authorization server {here} names itself {found.issuer[:SHOWN]!a}")
    return found
