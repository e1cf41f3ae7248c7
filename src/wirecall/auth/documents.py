"""Documents of an authorization server: JSON over HTTP, with limits.

A document has at most 256 KiB and 10 seconds, no redirect is followed, and its address was checked before. A server that
does not answer, or not with JSON, is a `CallFailed`: the token at hand may still be good.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import msgspec

from wirecall.auth.access import check_address
from wirecall.errors import BadAnswer, TimedOut, UsageError
from wirecall.protocol.messages import JsonObject
from wirecall.transports.http_client import HttpClient

MAX_BYTES = 256 << 10
PATIENCE = 10.0


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[HttpClient]:
    """Open connections to one address, for a block."""
    client = HttpClient(url, max_bytes=MAX_BYTES, headers={"accept": "application/json"})
    await client.open()
    try:
        yield client
    finally:
        await client.aclose()


async def ask(
    client: HttpClient, method: str = "GET", body: bytes = b"", headers: Mapping[str, str] | None = None
) -> tuple[int, JsonObject]:
    """Return the status and the JSON object of an answer; `{}` where the status is not 200."""
    try:
        async with asyncio.timeout(PATIENCE), client.request(method, body, headers) as answer:
            if answer.status != 200:
                return answer.status, {}
            found = msgspec.json.decode(await answer.read())
    except TimeoutError:
        raise TimedOut(f"{client.url}: no answer within {PATIENCE:g} s") from None
    except (msgspec.DecodeError, RecursionError):
        raise BadAnswer(f"{client.url}: expected JSON") from None
    if not isinstance(found, dict):
        raise BadAnswer(f"{client.url}: expected a JSON object, got {type(found).__name__}")
    return 200, found


async def fetch(url: str) -> tuple[int, JsonObject]:
    """Return the same of a document at an address."""
    async with connected(url) as client:
        return await ask(client)


async def server_metadata(issuer: str) -> JsonObject:
    """Return the metadata of an authorization server; `CallFailed` if there is none, or it is another issuer's."""
    # RFC 8414 first, then OpenID Connect, in both of its forms where the issuer has a path (2025-11-25, authorization,
    # "Authorization Server Metadata Discovery").
    parts = urlsplit(issuer)
    origin, path = f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/")
    places = [f"{origin}/.well-known/{name}{path}" for name in ("oauth-authorization-server", "openid-configuration")]
    places += [f"{origin}{path}/.well-known/openid-configuration"] if path else []
    statuses = []
    for url in places:
        status, found = await fetch(url)
        if status == 200:
            if found.get("issuer") != issuer:  # RFC 8414, section 3.3
                raise BadAnswer(f"{url}: expected the issuer {issuer}, got {str(found.get('issuer'))[:200]!r}")
            return found
        statuses.append(f"{url}: {status}")
        if status >= 500:  # it may be there later
            break
    raise BadAnswer(f"there is no metadata of {issuer} ({'; '.join(statuses)})")


async def key_set(issuer: str, url: str | None) -> JsonObject:
    """Return the keys of an issuer: those at `url`, or where its metadata says."""
    if url is None:
        found = (await server_metadata(issuer)).get("jwks_uri")
        try:
            url = check_address("jwks_uri", found)
        except UsageError:
            raise BadAnswer(f"the metadata of {issuer} has no jwks_uri that can be trusted") from None
    status, keys = await fetch(url)
    if status != 200 or not isinstance(keys.get("keys"), list):
        raise BadAnswer(f"{url}: expected a set of keys, got status {status}")
    return keys
