"""Access: which tokens a server accepts, and what each allows.

It checks every request of an app with `auth=`.

    no token, or another scheme    401  Bearer scope, resource_metadata
                                        (without `error`: RFC 6750, section 3.1)
    a header that is not a token   400  Bearer error="invalid_request", ...
    a token that is not valid      401  Bearer error="invalid_token", error_description, ...
    too little scope               403  Bearer error="insufficient_scope", scope, ...
    its verifier is unreachable    503  Retry-After, because the token may be valid

1. A verifier returns the identity of a token, None for a token that it does not know, or raises
   `Unauthorized` with the reason. The first verifier that knows a token decides.
2. A verified token is remembered by its digest, for as long as its verifier says and never beyond
   its expiry. Requests that bring the same new token at once share one verification.
3. All addresses are built from the configuration, never from Host: a forged header would advertise
   a foreign document.
4. No token, and no part of one, is written anywhere.
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
from wirecall.transports.headers import Headers
from wirecall.transports.request import Endpoint, HttpError, HttpRequest

LONGEST = 16 << 10  # bytes of a token
KEPT = 10_000  # tokens
# Of these, headers that are found without a digest, which takes half the time of the check.
RECENT = 64
RETRY_AFTER = "2"
METADATA_AGE = "public, max-age=300"

_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # a b64token of RFC 6750, section 2.1


class Verifier:
    """Verifies tokens. Its members are for the challenges and the metadata of a server.

    >>> class Team(Verifier):
    ...     async def verify(self, token: str) -> Identity | None:
    ...         return Identity("ada") if token == "b7c9e2f04d1a4e86" else None
    >>> app = App("shop", auth=Team())
    """

    # The identifier of this server.
    resource: str | None = None
    # The authorization server.
    issuer: str | None = None
    # Every call needs these scopes.
    scopes: tuple[str, ...] = ()
    # A verified token is not verified again for so many seconds.
    keeps: float = 0.0
    # A token is accepted for so many seconds after its expiry, because clocks differ.
    leeway: float = 0.0

    async def verify(self, token: str) -> Identity | None:
        """Return the identity of a token, None for an unknown token.

        Raise `Unauthorized` to refuse the token.
        """
        raise NotImplementedError

    async def open(self) -> None:
        """Open the resources that all tokens share. Called when a server starts."""

    async def aclose(self) -> None:
        """Close what `open` has opened. `verify` also works before and after."""

    async def check(self) -> str:
        """Try what verification needs, and return the finding, for `wirecall doctor`.

        Raise `CallFailed` if a token could not be verified.
        """
        return type(self).__name__


Verify: TypeAlias = Callable[[str], "Awaitable[Identity | str | None] | Identity | str | None"]
Hierarchy: TypeAlias = Mapping[str, Iterable[str]] | Callable[[frozenset[str]], Iterable[str]]


class Access:
    """The token rules of an app: `App(auth=Access(Jwt(...), hierarchy={...}, hide=True))`.

    `hierarchy` says which scopes a broader one includes: `{"orders:write": ["orders:read"]}`, or a
    function from the scopes of a token to all that they include. `hide` omits entries from lists
    that the caller may not use. `name` makes the caller's name from an identity; by default it is
    issuer and subject. Records in the ledger belong to that name. A token for which it is None or
    "" is refused.

    `verifiers` are tried in order, and the first one that knows a token decides. `resource`,
    `issuers` and `scopes` (of every call) are added to what the verifiers say. `title` and
    `documentation` are for readers of the metadata. `clock` is for tests.

    >>> verifier = Tokens({digest("b7c9e2f04d1a4e86"): Identity("ci")})
    >>> app = App("shop", auth=Access(verifier, hierarchy={"orders:write": ["orders:read"]}))
    """

    def __init__(
        self,
        *verifiers: "Verifier | Verify",
        resource: str | None = None,
        issuers: Sequence[str] = (),
        scopes: str | Sequence[str] = (),
        hierarchy: Hierarchy | None = None,
        hide: bool = False,
        name: Callable[[Identity], str | None] | None = None,
        title: str | None = None,
        documentation: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        for verifier in verifiers:
            if not isinstance(verifier, Verifier) and not callable(verifier):
                raise UsageError(
                    f"{type(verifier).__name__} cannot verify a token.",
                    "auth= takes a verifier, a list of them, "
                    "or a function from a token to an Identity or None",
                    'use auth=Jwt(issuer="https://auth.example.com", '
                    'resource="https://api.example.com/mcp")',
                )
        if not verifiers:
            raise UsageError(
                "auth= has no verifier.",
                "no token could be accepted",
                "add Jwt, Introspection or Tokens",
            )
        self._verifiers = verifiers
        known = [verifier for verifier in verifiers if isinstance(verifier, Verifier)]
        resources = {
            each
            for each in (resource, *(verifier.resource for verifier in known))
            if each is not None
        }
        if len(resources) > 1:
            raise UsageError(
                f"The verifiers are for different resources: {', '.join(sorted(resources))}.",
                "a server is one resource, and its clients ask for tokens with that name",
                "give all of them the same resource=",
            )
        self.resource: str | None = None
        if resources:
            self.resource = check_resource(resources.pop())
        self.issuers = list(
            dict.fromkeys([*issuers, *(each.issuer for each in known if each.issuer)])
        )
        base = [scope for verifier in known for scope in verifier.scopes]
        self.scopes = tuple(dict.fromkeys([*scope_names("scopes of auth=", scopes), *base]))
        self.hides = hide
        self.verifiers: Sequence[Verifier] = known
        self._leeway = max((verifier.leeway for verifier in known), default=0.0)
        self._hierarchy = hierarchy
        self._states_name = name is not None
        self._name = name or (lambda identity: identity.name)
        self._description = {"resource_name": title, "resource_documentation": documentation}
        self._clock = clock
        # Identity, caller and the end of their validity, by the digest of the header.
        self._known: dict[bytes, tuple[tuple[Identity, str], float]] = {}
        # A few of `_known`, by the header itself.
        self._recent: dict[str, tuple[tuple[Identity, str], float]] = {}
        self._pending: dict[bytes, asyncio.Task[tuple[Identity, str]]] = {}
        # The address of the metadata: the well-known path goes between the host and the path (RFC
        # 9728, section 3.1).
        self._metadata_url = self._metadata_path = None
        if self.resource is not None and self.issuers:
            parts = urlsplit(self.resource)
            self._metadata_path = WELL_KNOWN + parts.path
            self._metadata_url = f"{parts.scheme}://{parts.netloc}{self._metadata_path}"
        self._has_warned_of_mount = False

    @classmethod
    def of(cls, auth: "Access | Verifier | Verify | Sequence[Verifier | Verify]") -> "Access":
        """Return the rules for the value of `App(auth=...)`."""
        if isinstance(auth, Access):
            return auth
        if isinstance(auth, Sequence):
            return cls(*auth)
        return cls(auth)

    def misfit(self, inner: "Access") -> str | None:
        """Return why these rules cannot guard the methods of a mounted app with rules `inner`.

        A token is verified once, before its call is known, so both must accept the same tokens and
        name the same callers.
        """
        if inner is self:
            return None
        if set(map(id, inner._verifiers)) != set(map(id, self._verifiers)):
            return f"it verifies tokens with {inner._named()}, the outer app with {self._named()}"
        if inner._hierarchy is not None and inner._hierarchy != self._hierarchy:
            return "it has a hierarchy= of scopes that the outer app does not have"
        if inner._states_name and inner._name is not self._name:
            return "it names callers with name=, and the outer app names them in another way"
        if inner.hides and not self.hides:
            return "it hides entries from callers (hide=True), and the outer app shows them"
        return None

    def _named(self) -> str:
        """Return the verifiers for a person."""
        names = []
        for verifier in self._verifiers:
            kind = getattr(verifier, "__name__", type(verifier).__name__)
            issuer = getattr(verifier, "issuer", None)
            names.append(f"{kind}(issuer={issuer!r})" if issuer else f"{kind}(...)")
        return ", ".join(names)

    # --- tokens -----------------------------------------------------------------------------------

    def known(self, headers: Headers) -> tuple[Identity, str] | None:
        """Return the identity and the caller's name for a token that was verified before."""
        given = headers.first.get("authorization", "")
        found = self._recent.get(given)
        if (
            found is None
            and (found := self._known.get(sha256(given.encode("latin-1")).digest())) is not None
        ):
            if len(self._recent) >= RECENT:
                self._recent.clear()
            self._recent[given] = found
        if found is not None and found[1] > self._clock():
            return found[0]
        self._recent.pop(given, None)
        return None

    async def identify(self, headers: Headers) -> tuple[Identity, str]:
        """Return the same as `known` for any token; HttpError 400, 401 or 503."""
        given = headers.first.get("authorization", "")
        # RFC 6750, section 3.1: without credentials, or with those of another scheme, the challenge
        # has no `error`.
        scheme, _, token = given.strip(" \t").partition(" ")
        if scheme.lower() != "bearer":
            raise HttpError(
                401, "expected Authorization: Bearer TOKEN", self._challenge(scopes=self.scopes)
            )
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
                    # Retrieved, since all requests that waited for it may have left.
                    ended.exception()

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
                    found = verifier(token)
                    if isawaitable(found):
                        found = await found
            except Unauthorized as refusal:
                raise self._refused(refusal.message) from None
            except (CallFailed, TimeoutError) as error:
                logger.error("a token cannot be verified: %s", error)
                is_down = True
                continue
            if found is None:
                continue
            identity = self._identity(found)
            caller = self._caller(identity)
            if isinstance(verifier, Verifier):
                self._remember(digest, identity, caller, verifier.keeps)
            return identity, caller
        if is_down:
            message = "the token cannot be verified now: the authorization server does not answer"
            raise HttpError(503, message, [("retry-after", RETRY_AFTER)])
        raise self._refused("the token is not for this server")

    def _identity(self, found: object) -> Identity:
        """Return the identity that a verifier found, with all scopes that its scopes include."""
        if isinstance(found, str):
            found = Identity(found)
        if not isinstance(found, Identity):
            raise UsageError(
                f"A verifier must return an Identity, a name or None, got {type(found).__name__}.",
                fix="return Identity(subject, scopes=frozenset({...}))",
            )
        return msgspec.structs.replace(found, scopes=self._implied(found.scopes))

    def _caller(self, identity: Identity) -> str:
        """Return the name of the caller, to which records in the ledger belong."""
        caller = self._name(identity)
        if caller is None or caller == "":  # "" is the anonymous caller
            raise self._refused("the token does not name its caller")
        if not isinstance(caller, str):
            raise UsageError(
                "Access(name=...) must return the name of a caller as str, or None, "
                f"got {type(caller).__name__}.",
                "records in the ledger belong to that name",
                "return identity.subject, or another text of the identity",
            )
        return caller

    def _remember(self, digest: bytes, identity: Identity, caller: str, seconds: float) -> None:
        """Accept a verified token for so many seconds, but not beyond its expiry."""
        now = self._clock()
        until = now + seconds
        if identity.expires is not None:
            until = min(until, identity.expires)
        if until > now:
            if len(self._known) >= KEPT:
                del self._known[next(iter(self._known))]  # the oldest
            self._known[digest] = (identity, caller), until

    async def open(self) -> None:
        """Open the verifiers: a server starts."""
        for verifier in self.verifiers:
            await verifier.open()

    async def aclose(self) -> None:
        """Close the verifiers: the server has stopped."""
        for verifier in self.verifiers:
            await verifier.aclose()

    def _implied(self, scopes: frozenset[str]) -> frozenset[str]:
        """Return the scopes of a token and all narrower ones that they include (2026-07-28)."""
        if self._hierarchy is None:
            return scopes
        if not isinstance(self._hierarchy, Mapping):
            return scopes | frozenset(self._hierarchy(scopes))
        found = set(scopes)
        new = set(scopes)
        while new:
            new = {narrower for scope in new for narrower in self._hierarchy.get(scope, ())} - found
            found |= new
        return frozenset(found)

    def permit(self, identity: Identity, scopes: Collection[str]) -> None:
        """HttpError 403 unless the identity has all the scopes that an operation asks for."""
        if not (identity.scopes.issuperset(scopes) and identity.scopes.issuperset(self.scopes)):
            # All scopes of the operation, also those that the token has: a client must be able to
            # get them at once (2026-07-28, authorization, "Runtime Insufficient Scope Errors").
            asked = dict.fromkeys((*self.scopes, *scopes))
            # One by argument may be any string.
            names = [scope for scope in asked if re.fullmatch(SCOPE, scope)]
            message = f"the token has too little scope: expected {' '.join(names)}"
            fields = self._challenge("insufficient_scope", "the token has too little scope", names)
            raise HttpError(403, message, fields, data={"scopes": names})

    def may(self, identity: Identity | None, scopes: Iterable[str]) -> bool:
        """Return whether lists show an entry that asks for these scopes."""
        return not self.hides or identity is None or identity.scopes.issuperset(scopes)

    def has(self, identity: Identity | None, scopes: Iterable[str]) -> bool:
        """Return whether a caller has these scopes. Without a token nothing is asked for."""
        return identity is None or identity.scopes.issuperset(scopes)

    def lasts(self, identity: Identity) -> float | None:
        """Return the seconds for which a token is still accepted; None: it does not expire."""
        if identity.expires is None:
            return None
        return max(identity.expires + self._leeway - self._clock(), 0.0)

    # --- challenges and metadata ------------------------------------------------------------------

    def _refused(self, reason: str) -> HttpError:
        return HttpError(401, reason, self._challenge("invalid_token", reason, self.scopes))

    def _challenge(
        self, error: str | None = None, description: str | None = None, scopes: Iterable[str] = ()
    ) -> list[tuple[str, str]]:
        # `offline_access` is between a client and its authorization server (2026-07-28,
        # authorization, "Refresh Tokens").
        members = {
            "error": error,
            "error_description": description
            and re.sub(r"[^\x20\x21\x23-\x5b\x5d-\x7e]", "?", description),
            "scope": " ".join(scope for scope in scopes if scope != "offline_access"),
            "resource_metadata": self._metadata_url,
        }
        parameters = ", ".join(f'{name}="{value}"' for name, value in members.items() if value)
        if not parameters:
            return [("www-authenticate", "Bearer")]
        return [("www-authenticate", f"Bearer {parameters}")]

    def below(self, root: str, headers: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
        """Return the headers of a refusal by an app that another application has mounted at `root`.

        Only paths below it reach this app, so the challenge names the metadata there. A client
        reads the address from the challenge (RFC 9728, section 5.1).
        """
        if self._metadata_url is None or self.resource is None:
            return headers
        named = f'resource_metadata="{self._metadata_url}"'
        if not any(named in value for _, value in headers):
            return headers
        parts = urlsplit(self.resource)
        if parts.path != root and not parts.path.startswith(f"{root}/"):
            self._warn_of_mount(root, f"{parts.scheme}://{parts.netloc}{root}{parts.path}")
            return headers
        moved = f"{parts.scheme}://{parts.netloc}{root}{self._metadata_path}"
        return [
            (name, value.replace(named, f'resource_metadata="{moved}"')) for name, value in headers
        ]

    def _warn_of_mount(self, root: str, fitting: str) -> None:
        """Warn once that clients look for the metadata outside the path of the mount.

        A proxy may map the address of the resource to that path, so this is not an error.
        """
        if self._has_warned_of_mount:
            return
        self._has_warned_of_mount = True
        logger.warning(
            "the app is mounted at %s, and resource=%r is not below it: "
            "unless a proxy leads there, clients cannot read %s; use resource=%r",
            root,
            self.resource,
            self._metadata_url,
            fitting,
        )

    def endpoints(self, declared: Callable[[], Iterable[str]]) -> dict[str, Endpoint]:
        """Return the endpoints of the metadata (RFC 9728).

        `declared` gives the scopes of the app's methods.
        """
        if self._metadata_path is None:
            return {}

        async def metadata(request: HttpRequest) -> None:
            # Pages of every origin read it: a client in a browser begins here.
            shared = [("access-control-allow-origin", "*")]
            if request.method == "OPTIONS":
                fields = [
                    ("access-control-allow-methods", "GET"),
                    ("access-control-allow-headers", "*"),
                ]
                await request.respond(204, headers=[*shared, *fields])
                return
            if request.method not in ("GET", "HEAD"):
                raise HttpError(405, "ask with GET", [("allow", "GET, HEAD"), *shared])
            await request.respond(
                200,
                encode(self.metadata(declared())),
                headers=[*shared, ("cache-control", METADATA_AGE)],
            )

        return dict.fromkeys((self._metadata_path, WELL_KNOWN), metadata)

    def metadata(self, declared: Iterable[str]) -> dict[str, object]:
        """Return the metadata of the protected resource (RFC 9728, section 2)."""
        scopes = [
            scope for scope in dict.fromkeys((*self.scopes, *declared)) if scope != "offline_access"
        ]
        members: dict[str, object] = {
            "resource": self.resource,
            "authorization_servers": self.issuers,
            "scopes_supported": scopes,
            "bearer_methods_supported": ["header"],
            **self._description,
        }
        return {name: value for name, value in members.items() if value}


def check_resource(resource: str) -> str:
    """Return the identifier of a server; `UsageError` unless it is one that clients can compare."""
    parts = urlsplit(check_address("resource", resource))
    if parts.query or parts.fragment or parts.path == "/":
        raise UsageError(
            f"resource={resource!r} is not the identifier of a server.",
            "clients compare it exactly, and it has neither a query nor a fragment "
            "nor a slash after a bare host",
            'use the address of the server, such as "https://api.example.com/mcp" '
            'or "https://api.example.com"',
        )
    return resource


def check_address(option: str, url: object) -> str:
    """Return an address; `UsageError` unless it is https, or http on the loopback."""
    if address_fault(url):
        raise UsageError(
            f"{option}={url!r} is not an address that can be trusted.",
            "expected https://HOST/PATH; "
            "http only on the loopback, since keys and tokens travel there",
            f'use {option}="https://auth.example.com"',
        )
    return str(url)
