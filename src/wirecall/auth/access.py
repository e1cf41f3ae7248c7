"""Access: which tokens a server accepts, and what each of them may do. It checks every request of an app with `auth=`.

    no token, or another scheme    401  Bearer scope, resource_metadata              RFC 6750, section 3.1: without `error`
    a header that is not a token   400  Bearer error="invalid_request", ...
    a token that is not valid      401  Bearer error="invalid_token", error_description, ...
    too little scope               403  Bearer error="insufficient_scope", scope, ...
    its verifier is unreachable    503  Retry-After: the token may be valid, so the client must keep it

1. A verifier returns the identity of a token, None for a token that it does not know, or raises `Unauthorized` with the
   reason. The first verifier that knows a token decides.
2. A verified token is remembered by its digest, as long as its verifier says and never beyond its expiry. Requests that
   bring the same new token at once share one verification.
3. All addresses are built from the configuration, never from Host: a forged header would advertise a foreign document.
4. A token is not written anywhere, and neither is a part of it.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from inspect import isawaitable
from typing import TypeAlias
from urllib.parse import urlsplit

import msgspec

from wirecall.auth.discovery import WELL_KNOWN, address_fault
from wirecall.errors import CallFailed, Unauthorized, UsageError
from wirecall.logs import logger
from wirecall.protocol.messages import encode
from wirecall.server.identity import SCOPE, Identity, scope_names
from wirecall.transports.request import Endpoint, Headers, HttpError, HttpRequest

LONGEST = 16 << 10  # bytes of a token
KEPT = 10_000  # tokens
RECENT = 64  # of these, headers that are found without their digest: it takes half the time of the check
RETRY_AFTER = "2"
METADATA_AGE = "public, max-age=300"

_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # a b64token of RFC 6750, section 2.1


class Verifier:
    """Verifies tokens. Its members are for the challenges and the metadata of a server."""

    resource: str | None = None  # the identifier of this server
    issuer: str | None = None  # the authorization server
    scopes: tuple[str, ...] = ()  # that every call needs
    keeps: float = 0.0  # seconds for which a verified token is not verified again
    leeway: float = 0.0  # seconds between two clocks: a token is accepted for so long after its expiry

    async def verify(self, token: str) -> Identity | None:
        """Return the identity of a token, None if the token is unknown here; raise `Unauthorized` to refuse it."""
        raise NotImplementedError

    async def open(self) -> None:
        """Open what all tokens share. Called when a server starts."""

    async def aclose(self) -> None:
        """Close what `open` has opened. `verify` works before and after, too."""

    async def check(self) -> str:
        """Try what tokens will need, for `wirecall doctor`; return the finding, or raise `CallFailed`."""
        return type(self).__name__


Verify: TypeAlias = Callable[[str], "Awaitable[Identity | str | None] | Identity | str | None"]
Hierarchy: TypeAlias = Mapping[str, Iterable[str]] | Callable[[frozenset[str]], Iterable[str]]


class Access:
    """The rules of an app about tokens: `App(auth=Access(Jwt(...), hierarchy={...}, hide=True))`.

    `hierarchy` says which scopes a broader one stands for: `{"orders:write": ["orders:read"]}`, or a function from the
    scopes of a token to all that they stand for. `hide` leaves out of lists what the caller may not use. `name` makes the
    caller's name of an identity; by default it is issuer and subject. Records in the ledger belong to that name.
    """

    def __init__(
        self,
        *verifiers: "Verifier | Verify",
        resource: str | None = None,
        issuers: Sequence[str] = (),
        scopes: str | Sequence[str] = (),
        hierarchy: Hierarchy | None = None,
        hide: bool = False,
        name: Callable[[Identity], str] | None = None,
        title: str | None = None,
        documentation: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        for verifier in verifiers:
            if not isinstance(verifier, Verifier) and not callable(verifier):
                raise UsageError(
                    f"{type(verifier).__name__} cannot verify a token.",
                    "auth= takes a verifier, a list of them, or a function from a token to an Identity or None",
                    'use auth=Jwt(issuer="https://auth.example.com", resource="https://api.example.com/mcp")',
                )
        if not verifiers:
            raise UsageError("auth= has no verifier.", "no token could be accepted", "add Jwt, Introspection or Tokens")
        self._verifiers = verifiers
        known = [verifier for verifier in verifiers if isinstance(verifier, Verifier)]
        resources = {each for each in (resource, *(verifier.resource for verifier in known)) if each is not None}
        if len(resources) > 1:
            raise UsageError(
                f"The verifiers are for different resources: {', '.join(sorted(resources))}.",
                "a server is one resource, and its clients ask for tokens with that name",
                "give all of them the same resource=",
            )
        self.resource = check_resource(resources.pop()) if resources else None
        self.issuers = list(dict.fromkeys([*issuers, *(each.issuer for each in known if each.issuer)]))
        base = [scope for verifier in known for scope in verifier.scopes]
        self.scopes = tuple(dict.fromkeys([*scope_names("scopes of auth=", scopes), *base]))
        self.hides = hide
        self.verifiers: Sequence[Verifier] = known
        self._leeway = max((verifier.leeway for verifier in known), default=0.0)
        self._hierarchy = hierarchy
        self._name = name or (lambda identity: identity.name)
        self._told = {"resource_name": title, "resource_documentation": documentation}
        self._clock = clock
        self._known: dict[bytes, tuple[tuple[Identity, str], float]] = {}  # and until when; by the digest of a header
        self._recent: dict[str, tuple[tuple[Identity, str], float]] = {}  # a few of them by the header itself
        self._pending: dict[bytes, asyncio.Task[tuple[Identity, str]]] = {}
        # The address of the metadata: the well-known path goes between the host and the path (RFC 9728, section 3.1).
        self._metadata_url = self._metadata_path = None
        if self.resource is not None and self.issuers:
            parts = urlsplit(self.resource)
            self._metadata_path = WELL_KNOWN + parts.path
            self._metadata_url = f"{parts.scheme}://{parts.netloc}{self._metadata_path}"

    @classmethod
    def of(cls, auth: "Access | Verifier | Verify | Sequence[Verifier | Verify]") -> "Access":
        """Return the rules that `App(auth=...)` means."""
        if isinstance(auth, Access):
            return auth
        return cls(*auth) if isinstance(auth, Sequence) else cls(auth)

    # --- tokens ------------------------------------------------------------------------------------------------------

    def known(self, headers: Headers) -> tuple[Identity, str] | None:
        """Return the identity behind a request, and the caller's name, if its token was verified before."""
        given = headers.first.get("authorization", "")
        found = self._recent.get(given)
        if found is None and (found := self._known.get(sha256(given.encode("latin-1")).digest())) is not None:
            if len(self._recent) >= RECENT:
                self._recent.clear()
            self._recent[given] = found
        if found is not None and found[1] > self._clock():
            return found[0]
        self._recent.pop(given, None)
        return None

    async def identify(self, headers: Headers) -> tuple[Identity, str]:
        """Return the same for any token; HttpError 400, 401 or 503."""
        given = headers.first.get("authorization", "")
        # RFC 6750, section 3.1: without credentials, or with those of another scheme, the challenge has no `error`.
        scheme, _, token = given.strip(" \t").partition(" ")
        if scheme.lower() != "bearer":
            raise HttpError(401, "expected Authorization: Bearer TOKEN", self._challenge(scopes=self.scopes))
        if len(headers.all("authorization")) > 1:  # a proxy in front may have checked the other one
            raise self._refused("more than one Authorization header")
        token = token.strip(" ")
        if len(token) > LONGEST:
            raise self._refused(f"the token is longer than {LONGEST} bytes")
        if not _TOKEN.fullmatch(token):
            message = "the Authorization header is not Bearer and one token"
            raise HttpError(400, message, self._challenge("invalid_request", message, self.scopes))
        digest = sha256(given.encode("latin-1")).digest()
        pending = self._pending.get(digest)
        if pending is None:
            pending = asyncio.get_running_loop().create_task(self._verify(token, digest))
            self._pending[digest] = pending

            def over(ended: "asyncio.Task[tuple[Identity, str]]") -> None:
                del self._pending[digest]
                if not ended.cancelled():
                    ended.exception()  # retrieved: all that waited for it may have left

            pending.add_done_callback(over)
        return await asyncio.shield(pending)

    async def _verify(self, token: str, digest: bytes) -> tuple[Identity, str]:
        """Ask the verifiers, and remember the answer."""
        is_down = False
        for verifier in self._verifiers:
            try:
                if isinstance(verifier, Verifier):
                    found: object = await verifier.verify(token)
                else:
                    answer = verifier(token)
                    found = await answer if isawaitable(answer) else answer
            except Unauthorized as refusal:
                raise self._refused(refusal.message) from None
            except (CallFailed, TimeoutError) as error:
                logger.error("a token cannot be verified: %s", error)
                is_down = True
                continue
            if found is None:
                continue
            identity = Identity(found) if isinstance(found, str) else found
            if not isinstance(identity, Identity):
                raise UsageError(
                    f"A verifier must return an Identity, a name or None, got {type(found).__name__}.",
                    fix="return Identity(subject, scopes=frozenset({...}))",
                )
            identity = msgspec.structs.replace(identity, scopes=self._implied(identity.scopes))
            caller = self._name(identity)
            if not caller or not isinstance(caller, str):
                raise UsageError("A caller needs a name.", 'records in the ledger belong to it, and "" is anonymous', "")
            now = self._clock()
            until = now + (verifier.keeps if isinstance(verifier, Verifier) else 0.0)
            until = until if identity.expires is None else min(until, identity.expires)
            if until > now:
                if len(self._known) >= KEPT:
                    del self._known[next(iter(self._known))]  # the oldest
                self._known[digest] = (identity, caller), until
            return identity, caller
        if is_down:
            message = "the token cannot be verified now: the authorization server does not answer"
            raise HttpError(503, message, [("retry-after", RETRY_AFTER)])
        raise self._refused("the token is not for this server")

    async def open(self) -> None:
        """Tell the verifiers that a server starts."""
        for verifier in self.verifiers:
            await verifier.open()

    async def aclose(self) -> None:
        """Tell the verifiers that it has stopped."""
        for verifier in self.verifiers:
            await verifier.aclose()

    def _implied(self, scopes: frozenset[str]) -> frozenset[str]:
        """Return the scopes of a token and all that they stand for (2026-07-28: a broader scope includes a narrower one)."""
        if self._hierarchy is None:
            return scopes
        if not isinstance(self._hierarchy, Mapping):
            return scopes | frozenset(self._hierarchy(scopes))
        found, new = set(scopes), set(scopes)
        while new:
            new = {narrower for scope in new for narrower in self._hierarchy.get(scope, ())} - found
            found |= new
        return frozenset(found)

    def permit(self, identity: Identity, scopes: Collection[str]) -> None:
        """HttpError 403 unless the identity has all the scopes that an operation asks for."""
        if not (identity.scopes.issuperset(scopes) and identity.scopes.issuperset(self.scopes)):
            # All scopes of the operation, also those that the token has: a client must be able to get them at once
            # (2026-07-28, authorization, "Runtime Insufficient Scope Errors").
            asked = dict.fromkeys((*self.scopes, *scopes))
            names = [scope for scope in asked if re.fullmatch(SCOPE, scope)]  # a scope by argument may be any text
            message = f"the token has too little scope: expected {' '.join(names)}"
            fields = self._challenge("insufficient_scope", "the token has too little scope", names)
            raise HttpError(403, message, fields, data={"scopes": names})

    def may(self, identity: Identity | None, scopes: Iterable[str]) -> bool:
        """Return whether lists show what asks for these scopes."""
        return not self.hides or identity is None or identity.scopes.issuperset(scopes)

    def lasts(self, identity: Identity) -> float | None:
        """Return the seconds for which a token is accepted from now on; None: it does not expire."""
        return None if identity.expires is None else max(identity.expires + self._leeway - self._clock(), 0.0)

    # --- challenges and metadata -------------------------------------------------------------------------------------

    def _refused(self, reason: str) -> HttpError:
        return HttpError(401, reason, self._challenge("invalid_token", reason, self.scopes))

    def _challenge(
        self, error: str | None = None, description: str | None = None, scopes: Iterable[str] = ()
    ) -> list[tuple[str, str]]:
        # `offline_access` is between a client and its authorization server (2026-07-28, authorization, "Refresh Tokens").
        told = {
            "error": error,
            "error_description": description and re.sub(r"[^\x20\x21\x23-\x5b\x5d-\x7e]", "?", description),
            "scope": " ".join(scope for scope in scopes if scope != "offline_access"),
            "resource_metadata": self._metadata_url,
        }
        parameters = ", ".join(f'{name}="{value}"' for name, value in told.items() if value)
        return [("www-authenticate", f"Bearer {parameters}" if parameters else "Bearer")]

    def endpoints(self, declared: Callable[[], Iterable[str]]) -> dict[str, Endpoint]:
        """Return the endpoints of the metadata (RFC 9728); `declared` gives the scopes of the app's methods."""
        if self._metadata_path is None:
            return {}

        async def metadata(request: HttpRequest) -> None:
            # Pages of every origin read it: a client in a browser begins here.
            shared = [("access-control-allow-origin", "*")]
            if request.method == "OPTIONS":
                fields = [("access-control-allow-methods", "GET"), ("access-control-allow-headers", "*")]
                await request.respond(204, headers=[*shared, *fields])
                return
            if request.method not in ("GET", "HEAD"):
                raise HttpError(405, "ask with GET", [("allow", "GET, HEAD"), *shared])
            await request.respond(200, encode(self.metadata(declared())), headers=[*shared, ("cache-control", METADATA_AGE)])

        return dict.fromkeys((self._metadata_path, WELL_KNOWN), metadata)

    def metadata(self, declared: Iterable[str]) -> dict[str, object]:
        """Return the metadata of the protected resource (RFC 9728, section 2)."""
        scopes = [scope for scope in dict.fromkeys((*self.scopes, *declared)) if scope != "offline_access"]
        told: dict[str, object] = {
            "resource": self.resource,
            "authorization_servers": self.issuers,
            "scopes_supported": scopes,
            "bearer_methods_supported": ["header"],
            **self._told,
        }
        return {name: value for name, value in told.items() if value}


def check_resource(resource: str) -> str:
    """Return the identifier of a server; `UsageError` unless it is one that clients can compare."""
    parts = urlsplit(check_address("resource", resource))
    if parts.query or parts.fragment or parts.path == "/":
        raise UsageError(
            f"resource={resource!r} is not the identifier of a server.",
            "clients compare it exactly, and it has neither a query nor a fragment nor a slash after a bare host",
            'use the address of the server, such as "https://api.example.com/mcp" or "https://api.example.com"',
        )
    return resource


def check_address(option: str, url: object) -> str:
    """Return an address; `UsageError` unless it is https, or http on the loopback."""
    if address_fault(url):
        raise UsageError(
            f"{option}={url!r} is not an address that can be trusted.",
            "expected https://HOST/PATH; http only on the loopback, since keys and tokens travel there",
            f'use {option}="https://auth.example.com"',
        )
    return str(url)
