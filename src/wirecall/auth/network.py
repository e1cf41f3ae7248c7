"""Requests to addresses that a server has named: its metadata, and the endpoints of authorization servers.

A server that is not trusted chooses these addresses, so each request follows the same rules:

1. HTTPS, except to this machine. The address has a host and consists of the characters of addresses (RFC 3986).
2. If the MCP server is public, so is each address. The check is made where the connection is made.
3. No redirect is followed. An answer has at most 256 KiB, and comes within 10 seconds.
"""

import asyncio
import re
from collections.abc import Mapping
from ipaddress import ip_address
from typing import TypeVar
from urllib.parse import urlencode, urlsplit

import msgspec
from msgspec import Struct

from wirecall.errors import CallFailed, NotAuthorized
from wirecall.protocol.messages import UNREADABLE
from wirecall.transports.http_client import HttpClient

T = TypeVar("T")

MAX_BYTES = 256 << 10
TIMEOUT = 10.0  # seconds
SHOWN = 200  # characters of an address or an error that are quoted

_ADDRESS = re.compile(r"https?://[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]+")


class Answer(Struct, frozen=True):
    """An answer as a whole."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def document(self, kind: type[T]) -> T | None:
        """Return the body as a JSON object of this kind; None if it is something else."""
        try:
            return msgspec.json.decode(self.body, type=kind)
        except UNREADABLE:
            return None


def check_address(url: str, what: str) -> None:
    """Refuse an address that is not HTTPS, or that is not an address at all."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port  # both may raise
        fault = "" if _ADDRESS.fullmatch(url) and host and not parts.username else "it is not https://host/path"
    except ValueError as error:
        host, fault = None, str(error)
    if not fault and parts.scheme != "https" and not is_loopback(host or ""):
        fault = "plain HTTP is for this machine alone"
    if fault:
        raise NotAuthorized(f"{what} cannot be used: {url[:SHOWN]!a}: {fault}")


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine by its name or address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class Network:
    """Requests on behalf of one MCP server; `private` allows addresses of this machine and of private networks."""

    def __init__(self, *, private: bool, timeout: float = TIMEOUT) -> None:
        self.private = private
        self._timeout = timeout

    async def get(self, url: str, what: str) -> Answer:
        """Fetch a document."""
        return await self._ask("GET", url, what, b"", {"Accept": "application/json"})

    async def post(self, url: str, what: str, form: Mapping[str, str], headers: Mapping[str, str] | None = None) -> Answer:
        """Send a form."""
        kind = {"Content-Type": "application/x-www-form-urlencoded", "Accept": "application/json"}
        return await self._ask("POST", url, what, urlencode(form).encode(), {**kind, **(headers or {})})

    async def post_json(self, url: str, what: str, document: object) -> Answer:
        kind = {"Content-Type": "application/json", "Accept": "application/json"}
        return await self._ask("POST", url, what, msgspec.json.encode(document), kind)

    async def _ask(self, method: str, url: str, what: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        check_address(url, what)
        http = HttpClient(url, max_bytes=MAX_BYTES, public=not self.private)
        try:
            async with asyncio.timeout(self._timeout):
                await http.open()
                async with http.request(method, body, headers) as answer:
                    if 300 <= answer.status < 400:
                        raise NotAuthorized(f"{what} ({url[:SHOWN]}) is a redirect, which is not followed")
                    return Answer(answer.status, dict(answer.headers), await answer.read())
        except TimeoutError:
            raise NotAuthorized(f"{what} ({url[:SHOWN]}) did not answer within {self._timeout:g} s") from None
        except CallFailed as error:
            if isinstance(error, NotAuthorized):
                raise
            raise NotAuthorized(f"{what} ({url[:SHOWN]}): {error}") from None
        finally:
            await http.aclose()
