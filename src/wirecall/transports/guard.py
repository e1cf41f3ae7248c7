"""Which requests are accepted: the size of the header, Host, Origin and CORS."""

import re
from collections.abc import Sequence
from itertools import chain

from wirecall.transports.headers import Headers
from wirecall.transports.request import CLOSE, HttpError, Pairs

LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
# Max remembered header values that passed. Clients send few different ones; one that sends many
# must not fill the memory.
KNOWN = 256
# If one of these fields occurs twice, a proxy may have checked the other value (Host: RFC 9112,
# section 3.2).
SINGLE = ("Host", "Origin", "Content-Length", "Content-Type")

# The fields that a page of another origin may send and read, in addition to the safelisted ones
# (fetch.spec.whatwg.org).
METHODS = "POST, GET, DELETE"
SENDABLE = frozenset(
    {
        *("authorization", "content-type", "idempotency-key", "last-event-id"),
        *("traceparent", "tracestate", "baggage", "x-request-id"),
    }
)
# MCP's own fields, and those that tools declare for parameters.
MCP_FIELD = re.compile("mcp-[a-z0-9-]+")
READABLE = "Mcp-Session-Id, WWW-Authenticate, Idempotent-Replayed, Retry-After, X-Request-Id"
# Seconds for which a browser keeps the answer to a preflight.
PREFLIGHT_AGE = "600"

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\s:/@\\\[\]]+)(:[0-9]{1,5})?")


class Guard:
    """Judges the size of a header, its Host and its Origin.

    1. Host and Origin are names of the loopback, or names that the app lists. A web page must not
       reach a server on its reader's machine by DNS rebinding.
    2. Only pages of the listed origins can read the answers (CORS), and never with cookies. A
       request from a page of the loopback is accepted, but the page cannot read the answer unless
       its origin is listed.
    3. If `checks_tokens`, the server verifies tokens. Then two Authorization fields count as a bad
       token (401), and so does a token that is too long.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        origins: Sequence[str],
        *,
        max_bytes: int,
        checks_tokens: bool,
    ) -> None:
        self._max_bytes = max_bytes
        self._checks_tokens = checks_tokens
        self._single: tuple[str, ...] = SINGLE
        if not checks_tokens:
            self._single = (*SINGLE, "Authorization")
        self._hosts = {host.lower() for host in hosts} | LOOPBACK
        self._origins = {origin.lower().rstrip("/") for origin in origins}
        # Whether pages of other origins can read answers.
        self.is_shared = bool(self._origins)
        self._good_hosts: set[str] = set()
        self._good_origins: set[str] = set()

    def allow_host(self, host: str) -> None:
        """Add a name of the server."""
        host = host.lower()
        if ":" in host and not host.startswith("["):
            host = f"[{host}]"
        self._hosts.add(host)

    def check(self, headers: Headers, *, any_host: bool, any_origin: bool) -> None:
        """Raise HttpError unless the request is acceptable."""
        pairs = headers.pairs
        # ": " and the end of the line.
        size = sum(map(len, chain.from_iterable(pairs))) + 4 * len(pairs)
        if size > self._max_bytes:
            self._check_long(headers, size)
        if headers.has_doubles:
            self._check_doubles(headers)
        origin = headers.first.get("origin")
        if origin is not None and not any_origin and origin not in self._good_origins:
            self._check_origin(origin)
        if not any_host and (value := headers.first.get("host", "")) not in self._good_hosts:
            self.check_host(value)

    def _check_long(self, headers: Headers, size: int) -> None:
        """Raise HttpError unless only a token makes the header too long."""
        if self._checks_tokens:
            size -= sum(map(len, headers.all("Authorization")))
        if size > self._max_bytes:
            raise HttpError(431, f"the header is longer than {self._max_bytes} bytes", [CLOSE])

    def _check_doubles(self, headers: Headers) -> None:
        for name in self._single:
            if len(headers.all(name)) > 1:
                raise HttpError(400, f"more than one {name} header", [CLOSE])

    def _check_origin(self, origin: str) -> None:
        """Raise HttpError unless pages of this origin may call the server."""
        wanted = origin.strip(" \t").lower()
        host = wanted.partition("://")[2]
        if not self._origins & {"*", wanted} and not (host and self._is_ours(host)):
            raise HttpError(
                403,
                f"Origin {wanted[:100]!r} may not call this server."
                " If it may, add it to origins=[...] of the app.",
            )
        _remember(self._good_origins, origin)

    def check_host(self, host: str) -> None:
        """Raise HttpError unless this is a name of the server."""
        wanted = host.strip(" \t").lower()
        if not wanted:  # granian adds an empty Host to a request without one
            raise HttpError(400, "the Host header is missing")
        if "*" not in self._hosts and not self._is_ours(wanted):
            raise HttpError(
                403,
                f"Host {wanted[:100]!r} is not a name of this server."
                " If it is, use App(hosts=[...]) or --allow-host.",
            )
        _remember(self._good_hosts, host)

    def check_page(self, headers: Headers) -> None:
        """Raise HttpError if a page of another origin asks for a WebSocket.

        Browsers do not apply CORS to WebSockets: a page that connects reads everything. So a page
        of the loopback at another port, which `check` accepts, must be listed here.
        """
        origin = headers.first.get("origin")
        if origin is None:  # not a browser
            return
        wanted = origin.strip(" \t").lower()
        own = headers.first.get("host", "").strip(" \t").lower()
        if self._origins & {"*", wanted} or wanted.partition("://")[2] == own:
            return
        raise HttpError(
            403,
            f"Origin {wanted[:100]!r} may not open a WebSocket to this server."
            " If it may, add it to origins=[...] of the app.",
        )

    def _is_ours(self, authority: str) -> bool:
        parts = _HOST.fullmatch(authority)
        if parts is None:
            return False
        name = parts[1]
        if name in self._hosts or authority in self._hosts:
            return True
        return any(host.startswith("*.") and name.endswith(host[1:]) for host in self._hosts)

    def cors(self, headers: Headers) -> list[tuple[str, str]]:
        """Return the fields that let the page of a request read the answer.

        There is always Vary, for caches.
        """
        fields = [("vary", "Origin")]
        origin = headers.first.get("origin", "").strip(" \t")
        if origin and self._origins & {"*", origin.lower()}:
            # Return the origin itself instead of "*": one rule for both cases, and pages of other
            # origins learn nothing.
            fields += (
                ("access-control-allow-origin", origin),
                ("access-control-expose-headers", READABLE),
            )
        return fields

    def preflight(self, headers: Headers) -> Pairs | None:
        """Return the fields of the answer to a browser's preflight; None if it is not allowed."""
        if "access-control-request-method" not in headers.first or len(self.cors(headers)) == 1:
            return None
        asked = (
            headers.get("access-control-request-headers", "").lower().replace(" ", "").split(",")
        )
        allowed = [name for name in asked if name in SENDABLE or MCP_FIELD.fullmatch(name)]
        return [
            ("access-control-allow-methods", METHODS),
            ("access-control-allow-headers", ", ".join(allowed)),
            ("access-control-max-age", PREFLIGHT_AGE),
        ]


def _remember(known: set[str], value: str) -> None:
    if len(known) >= KNOWN:
        known.clear()
    known.add(value)
