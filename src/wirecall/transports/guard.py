"""Which requests may come in: the size of the header, its Host and its Origin.

1. Host and Origin are names of the loopback, or those the app was told. A web page must not reach a server on the reader's
   machine by a DNS trick.
2. What decides something is in the header once: of two values a proxy in front may have judged the other one.
3. Probes are asked by address, so their Host is not looked at.
4. Web pages of the origins that the app was told may read the answers (CORS): never with cookies, and never pages of other
   origins, such as those of the loopback, whose requests are let in.
"""

import re
from collections.abc import Sequence
from itertools import chain

from wirecall.transports.request import CLOSE, Headers, HttpError

LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
# Header values that were found good once. Clients send few different ones; a client that sends many must not fill memory.
KNOWN = 256

# What a page of another origin may send and read besides the headers that every page may (fetch.spec.whatwg.org, CORS).
METHODS = "POST, GET, DELETE"
SENDABLE = frozenset(
    {"authorization", "content-type", "idempotency-key", "last-event-id", "traceparent", "tracestate", "baggage"}
)
MCP_FIELD = re.compile("mcp-[a-z0-9-]+")  # those of MCP, and those that tools mark parameters with
READABLE = b"Mcp-Session-Id, WWW-Authenticate, Idempotent-Replayed, Retry-After"
PREFLIGHT_AGE = "600"  # seconds that a browser need not ask again

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/@\\\[\]]+)(:[0-9]{1,5})?")


class Guard:
    """Which Host and which Origin a request may have."""

    def __init__(self, hosts: Sequence[str], origins: Sequence[str]) -> None:
        self._hosts = {host.lower() for host in hosts} | LOOPBACK
        self._origins = {origin.lower().rstrip("/") for origin in origins}
        self.is_shared = bool(self._origins)  # pages of other origins may read answers
        self._good_hosts: set[bytes] = set()
        self._good_origins: set[bytes] = set()

    def allow_host(self, host: str) -> None:
        host = host.lower()
        self._hosts.add(f"[{host}]" if ":" in host and not host.startswith("[") else host)

    def check(self, headers: Headers, max_bytes: int, *, any_host: bool) -> None:
        """Size, Host, Origin."""
        pairs = headers.pairs
        if sum(map(len, chain.from_iterable(pairs))) + 4 * len(pairs) > max_bytes:  # ": " and the end of the line
            raise HttpError(431, f"the header is longer than {max_bytes} bytes", [CLOSE])
        if headers.has_doubles:
            self._check_doubles(headers)
        origin = headers.first.get(b"origin")
        if origin is not None and origin not in self._good_origins:
            self._check_origin(origin)
        if not any_host and (host := headers.first.get(b"host", b"")) not in self._good_hosts:
            self.check_host(host)

    def _check_doubles(self, headers: Headers) -> None:
        """RFC 9112, section 3.2, and rule 2."""
        for name in ("Host", "Origin", "Content-Length", "Content-Type", "Authorization"):
            if len(headers.all(name)) > 1:
                raise HttpError(400, f"more than one {name} header", [CLOSE])

    def check_host(self, host: bytes) -> None:
        text = host.strip(b" \t").decode("latin-1").lower()
        if not text:  # granian makes an empty one where there is none
            raise HttpError(400, "the Host header is missing")
        if "*" not in self._hosts and not self._is_ours(text):
            raise HttpError(
                403, f"Host {text[:100]!r} is not a name of this server. If it is, add it to hosts=[...] of the app."
            )
        _remember(self._good_hosts, host)

    def _check_origin(self, origin: bytes) -> None:
        text = origin.strip(b" \t").decode("latin-1").lower()
        host = text.partition("://")[2]
        if not self._origins & {"*", text} and not (host and self._is_ours(host)):
            raise HttpError(
                403, f"Origin {text[:100]!r} may not call this server. If it may, add it to origins=[...] of the app."
            )
        _remember(self._good_origins, origin)

    def cors(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Return the fields that let the page of a request read the answer; at least Vary, for caches."""
        fields = [(b"vary", b"Origin")]
        origin = headers.first.get(b"origin", b"").strip(b" \t")
        if origin and self._origins & {"*", origin.decode("latin-1").lower()}:
            # The origin itself in place of "*", so that there is one way, and pages of other origins learn nothing.
            fields += (b"access-control-allow-origin", origin), (b"access-control-expose-headers", READABLE)
        return fields

    def preflight(self, headers: Headers) -> list[tuple[str, str]] | None:
        """Return the answer to a browser that asks whether a page may send a request; None if this is another question."""
        if b"access-control-request-method" not in headers.first or len(self.cors(headers)) == 1:
            return None
        asked = headers.get("access-control-request-headers", "").lower().replace(" ", "").split(",")
        allowed = [name for name in asked if name in SENDABLE or MCP_FIELD.fullmatch(name)]
        return [
            ("access-control-allow-methods", METHODS),
            ("access-control-allow-headers", ", ".join(allowed)),
            ("access-control-max-age", PREFLIGHT_AGE),
        ]

    def _is_ours(self, authority: str) -> bool:
        parts = _HOST.fullmatch(authority)
        if parts is None:
            return False
        name = parts[1]
        if name in self._hosts or authority in self._hosts:
            return True
        return any(host.startswith("*.") and name.endswith(host[1:]) for host in self._hosts)


def _remember(known: set[bytes], value: bytes) -> None:
    if len(known) >= KNOWN:
        known.clear()
    known.add(value)
