"""Discovery: the documents about authorization that servers publish, and how to fetch them.

    challenge of a 401 or 403 (RFC 6750)        names the scopes, and the next document's address
    protected resource metadata (RFC 9728)      names the resource and its authorization servers
        the address in the challenge, else the two well-known ones, that of the path first
    authorization server metadata (RFC 8414)    names the endpoints and the keys
        three well-known addresses for an issuer with a path, two for one without

A server without the second document is one of 2025-03-26: its own origin is the issuer, and if
there is no metadata either, the endpoints have fixed paths.

A server that is not trusted chooses these addresses, so each request follows the same rules:

1. HTTPS, except to this machine. The address has a host and consists of the characters of addresses
   (RFC 3986).
2. If the MCP server is public, each address must be public too. The check happens when connecting.
3. Redirects are not followed. An answer has at most 256 KiB, and must come within 10 seconds.
"""

import asyncio
import re
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from typing import TypeVar
from urllib.parse import urlencode, urlsplit

import msgspec
from msgspec import Struct

from wirecall.errors import BadAnswer, CallFailed, NotAuthorized, TimedOut
from wirecall.protocol.messages import UNREADABLE
from wirecall.transports.http_client import HttpClient

T = TypeVar("T")

MAX_BYTES = 256 << 10
TIMEOUT = 10.0  # seconds
SHOWN = 200  # characters of an address or an error that are quoted
TRIED = 3  # authorization servers of one resource
FORM = "application/x-www-form-urlencoded"
WELL_KNOWN = "/.well-known/oauth-protected-resource"  # RFC 9728, section 3

_OAUTH = "/.well-known/oauth-authorization-server"
_OPENID = "/.well-known/openid-configuration"
_ADDRESS = re.compile(r"https?://[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]+")


# --- addresses and requests -----------------------------------------------------------------------


def address_fault(url: object) -> str:
    """Return why keys and tokens must not be sent to an address.

    "" if it is HTTPS or on this machine.
    """
    if not isinstance(url, str) or not _ADDRESS.fullmatch(url):
        return "it is not https://host/path"
    try:
        parts = urlsplit(url)
        # Both may raise.
        host = parts.hostname
        _ = parts.port
    except ValueError as error:
        return str(error)
    if not host or parts.username is not None:
        return "it is not https://host/path"
    try:
        is_local = ip_address(host).is_loopback
    except ValueError:
        is_local = host == "localhost" or host.endswith(".localhost")
    if parts.scheme == "https" or is_local:
        return ""
    return "plain HTTP is for this machine alone"


def require_address(url: str, what: str) -> None:
    """Refuse an address that a server has named, unless it is HTTPS or on this machine."""
    if fault := address_fault(url):
        raise NotAuthorized(f"{what} cannot be used: {url[:SHOWN]!a}: {fault}")


def origin(url: str) -> str:
    """Return the scheme, host and port of an address."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


class Answer(Struct, frozen=True):
    """A complete answer."""

    status: int
    # Names are found in any case.
    headers: Mapping[str, str]
    body: bytes

    def document(self, kind: type[T]) -> T | None:
        """Return the body as a JSON object of this kind; None if it is something else."""
        try:
            return msgspec.json.decode(self.body, type=kind)
        except UNREADABLE:
            return None


async def ask(
    http: HttpClient, method: str, body: bytes, headers: Mapping[str, str], timeout: float = TIMEOUT
) -> Answer:
    """Send a request over open connections; return the answer, or raise `CallFailed`."""
    try:
        async with asyncio.timeout(timeout), http.request(method, body, headers) as answer:
            if 300 <= answer.status < 400:
                raise BadAnswer("it is a redirect, which is not followed")
            return Answer(answer.status, answer.headers, await answer.read())
    except TimeoutError:
        raise TimedOut(
            f"{urlsplit(http.url).hostname} did not answer within {timeout:g} s"
        ) from None


class Network:
    """Requests on behalf of one MCP server.

    `private` allows addresses of this machine and of private networks.
    """

    def __init__(self, *, private: bool, timeout: float = TIMEOUT) -> None:
        self.private = private
        self._timeout = timeout

    async def get(self, url: str, what: str) -> Answer:
        """Fetch a document."""
        return await self._ask("GET", url, what, b"", {})

    async def post(
        self, url: str, what: str, form: Mapping[str, str], headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send a form."""
        return await self._ask(
            "POST", url, what, urlencode(form).encode(), {"Content-Type": FORM, **(headers or {})}
        )

    async def post_json(self, url: str, what: str, document: object) -> Answer:
        return await self._ask(
            "POST", url, what, msgspec.json.encode(document), {"Content-Type": "application/json"}
        )

    async def _ask(
        self, method: str, url: str, what: str, body: bytes, headers: Mapping[str, str]
    ) -> Answer:
        require_address(url, what)
        http = HttpClient(url, max_bytes=MAX_BYTES, public=not self.private)
        try:
            await http.open()
            return await ask(
                http, method, body, {"Accept": "application/json", **headers}, self._timeout
            )
        except CallFailed as error:
            raise NotAuthorized(f"{what} ({url[:SHOWN]}): {error}") from None
        finally:
            await http.aclose()


# --- the challenge --------------------------------------------------------------------------------

_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_GAP = re.compile(r"[ \t,]*")
_PARAM = re.compile(rf'({_TOKEN})[ \t]*=[ \t]*(?:({_TOKEN})|"((?:[^"\\]|\\.)*)")')
# Perhaps with credentials.
_SCHEME = re.compile(rf"({_TOKEN})(?:[ \t]+[A-Za-z0-9._~+/-]+=*(?=[ \t]*(?:,|$)))?")


class Challenge(Struct, frozen=True):
    """Why a server refuses a request: a scheme, and its parameters by name.

    Both are in lower case.
    """

    scheme: str
    params: dict[str, str]

    @property
    def scopes(self) -> frozenset[str]:
        return frozenset(self.params.get("scope", "").split())


def challenges(headers: Iterable[str]) -> list[Challenge]:
    """Return the challenges of all `WWW-Authenticate` headers (RFC 9110, section 11.6.1).

    A header may hold several, and is read up to its first mistake. Parameters are parsed and not
    searched for: `x-scope="…"`, or `scope=` inside a quoted string, is not the scope.
    """
    found: list[Challenge] = []
    for text in headers:
        place = 0
        current = None
        while (gap := _GAP.match(text, place)) and (place := gap.end()) < len(text):
            if current is not None and (param := _PARAM.match(text, place)):
                name, plain, quoted = param.groups()
                # The first of a repeated parameter counts.
                current.params.setdefault(
                    name.lower(), plain or re.sub(r"\\(.)", r"\1", quoted or "")
                )
                place = param.end()
            elif scheme := _SCHEME.match(text, place):
                current = Challenge(scheme[1].lower(), {})
                found.append(current)
                place = scheme.end()
            else:
                break
    return found


def asked(headers: Iterable[str]) -> Challenge | None:
    """Return the challenge that asks for a token, if there is one."""
    return next((each for each in challenges(headers) if each.scheme in ("bearer", "dpop")), None)


# --- the documents --------------------------------------------------------------------------------


class ProtectedResource(Struct, frozen=True):
    """The metadata of a protected resource (RFC 9728, section 2)."""

    resource: str
    authorization_servers: list[str] = []
    scopes_supported: list[str] | None = None


class Issuer(Struct, frozen=True):
    """The metadata of an authorization server (RFC 8414, section 2)."""

    issuer: str
    token_endpoint: str | None = None
    authorization_endpoint: str | None = None
    registration_endpoint: str | None = None
    revocation_endpoint: str | None = None
    jwks_uri: str | None = None
    scopes_supported: list[str] | None = None
    token_endpoint_auth_methods_supported: list[str] | None = None
    code_challenge_methods_supported: list[str] | None = None
    client_id_metadata_document_supported: bool = False
    authorization_response_iss_parameter_supported: bool = False


def resource_places(url: str, named: str | None) -> list[str]:
    """Return the addresses of the metadata of the server at `url`.

    They are the one in its challenge, or else the well-known ones.
    """
    if named:
        return [named]
    path = urlsplit(url).path.rstrip("/")
    return list(dict.fromkeys((f"{origin(url)}{WELL_KNOWN}{path}", origin(url) + WELL_KNOWN)))


def is_resource_of(resource: str, url: str) -> bool:
    """Return whether a resource is the server at `url` (RFC 9728, section 3.3), or contains it."""
    if address_fault(resource):
        return False
    theirs = urlsplit(resource)
    ours = urlsplit(url)
    is_inside = f"{ours.path.rstrip('/')}/".startswith(f"{theirs.path.rstrip('/')}/")
    return theirs[:2] == ours[:2] and is_inside and theirs.query in ("", ours.query)


async def find_resource(
    network: Network, url: str, challenge: Challenge | None
) -> ProtectedResource | None:
    """Return the metadata of the server at `url`; None if it has none."""
    named = None
    if challenge is not None:
        named = challenge.params.get("resource_metadata")
    for place in resource_places(url, named):
        answer = await network.get(place, "the metadata of the server")
        # It may have some, so 2025-03-26 is not assumed.
        if answer.status >= 500 or answer.status == 429:
            raise NotAuthorized(
                f"the metadata of the server ({place[:SHOWN]}): HTTP {answer.status}"
            )
        if answer.status != 200:
            continue
        found = answer.document(ProtectedResource)
        if found is None or not found.authorization_servers:
            raise NotAuthorized(
                f"the metadata of the server ({place[:SHOWN]}) "
                "does not name an authorization server"
            )
        if not is_resource_of(found.resource, url):
            raise NotAuthorized(
                f"the metadata of {url} is about another server, {found.resource[:SHOWN]!a}"
            )
        return found
    if named:
        raise NotAuthorized(f"the server names metadata that cannot be read: {named[:SHOWN]!a}")
    return None


async def find_issuer(network: Network, issuer: str) -> Issuer:
    """Return the metadata of an authorization server."""
    require_address(issuer, "the authorization server")
    base = origin(issuer)
    path = urlsplit(issuer).path.rstrip("/")
    faults = []
    for place in dict.fromkeys(
        (f"{base}{_OAUTH}{path}", f"{base}{_OPENID}{path}", f"{base}{path}{_OPENID}")
    ):
        answer = await network.get(place, "the metadata of the authorization server")
        if answer.status != 200:
            faults.append(f"{place[:SHOWN]}: HTTP {answer.status}")
            continue
        try:
            found = msgspec.json.decode(answer.body, type=Issuer)
        except UNREADABLE as error:
            faults.append(f"{place[:SHOWN]} cannot be read: {error}")
            continue
        if found.issuer == issuer:  # as strings, without any normalisation (RFC 8414, section 3.3)
            return found
        faults.append(f"{place[:SHOWN]} is that of another one, {found.issuer[:SHOWN]!a}")
    raise NotAuthorized(
        f"there is no metadata of the authorization server {issuer[:SHOWN]!a} ({'; '.join(faults)})"
    )


async def choose_issuer(
    network: Network, url: str, resource: ProtectedResource | None, own: str | None
) -> Issuer:
    """Return the authorization server to ask for a token.

    It is the client's own, or one that the server names, or the server itself.
    """
    require_address(url, "the address of the server")
    if own is not None:
        if resource is not None and own not in resource.authorization_servers:
            others = ", ".join(each[:SHOWN] for each in resource.authorization_servers[:TRIED])
            raise NotAuthorized(
                f"the credentials are those of {own}, and the server names {ascii(others)[1:-1]}"
            )
        return await find_issuer(network, own)
    if resource is not None:
        faults = []
        for name in resource.authorization_servers[:TRIED]:
            try:
                return await find_issuer(network, name)
            except NotAuthorized as error:
                faults.append(str(error))
        raise NotAuthorized("; ".join(faults))
    # A server of 2025-03-26 is its own authorization server.
    here = origin(url)
    what = "the metadata of the authorization server"
    answer = await network.get(here + _OAUTH, what)
    if answer.status >= 500 or answer.status == 429:
        raise NotAuthorized(f"{what}: HTTP {answer.status}")
    found = None
    if answer.status == 200:
        found = answer.document(Issuer)
    if found is None:
        endpoints = (f"{here}/token", f"{here}/authorize", f"{here}/register")
        return Issuer(here, *endpoints, code_challenge_methods_supported=["S256"])
    if found.issuer not in (here, f"{here}/"):  # both are found at this address
        raise NotAuthorized(
            f"the authorization server {here} names itself {found.issuer[:SHOWN]!a}"
        )
    return found
