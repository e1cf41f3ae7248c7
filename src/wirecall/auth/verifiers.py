"""How to verify a token.

| Verifier | Tokens |
| --- | --- |
| `Jwt` | signed JSON Web Tokens (RFC 9068), verified with the keys of their issuer |
| `Introspection` | tokens that only their authorization server can read (RFC 7662) |
| `Tokens` | fixed tokens, for programs without an authorization server: known by their digests |
"""

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from msgspec import Struct

from wirecall.auth.access import Verifier, check_address, check_resource
from wirecall.auth.discovery import FORM, MAX_BYTES, Network, ask, find_issuer
from wirecall.auth.grants import basic, pyjwt
from wirecall.errors import BadAnswer, CallFailed, ConnectionLost, Unauthorized, UsageError
from wirecall.logs import logger
from wirecall.protocol.messages import JsonObject
from wirecall.server.identity import Identity, scope_names
from wirecall.transports.http_client import HttpClient

if TYPE_CHECKING:
    from jwt import PyJWK

# Seconds until a token is verified again: a revoked one is accepted for at most this long.
JWT_KEPT = 300.0
ASKED_KEPT = 60.0  # the same for introspection
KEYS_KEPT = 3600.0  # seconds
AGAIN = 30.0  # seconds between two fetches of keys
AFTER_FAILURE = 1.0  # the same, as long as there are no keys at all
LAST = 1e15  # Unix time
SMALLEST_RSA = 2048  # bits (RFC 7518, section 3.3)

# The type of key that an algorithm needs, and its curve (RFC 7518, section 3.1; RFC 8037).
ALGORITHMS: Mapping[str, tuple[str, str | None]] = {
    **dict.fromkeys(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), ("RSA", None)),
    "ES256": ("EC", "P-256"),
    "ES384": ("EC", "P-384"),
    "ES512": ("EC", "P-521"),
    "EdDSA": ("OKP", "Ed25519"),
}
# A header without `typ`, the old name, and the name of access tokens (RFC 9068, section 2.1). ID
# tokens have no separate type, but their audience is a client.
_TYPES = frozenset({"", "jwt", "at+jwt", "application/at+jwt"})
_DIGEST = re.compile("sha256:[0-9a-f]{64}")


# --- signed tokens --------------------------------------------------------------------------------


class Jwt(Verifier):
    """Accepts the tokens that an issuer has signed for this server.

    `resource` is the address of the server, as its clients write it: "https://api.example.com/mcp".
    A token must have it in `aud`, or `audience` if the issuer uses another name. `jwks` is the
    address of the keys, or a set of them; without it the metadata of the issuer names the address.
    Every token needs `scopes`. Clocks may differ by `leeway` seconds.

    `issuer` is the address of the authorization server. `algorithms` are those that it may sign
    with. `clock` is for tests.

    >>> Jwt("https://auth.example.com", resource="https://api.example.com/mcp").issuer
    'https://auth.example.com'
    """

    keeps = JWT_KEPT

    def __init__(
        self,
        issuer: str,
        *,
        resource: str,
        audience: str | Sequence[str] | None = None,
        jwks: str | Mapping[str, Any] | None = None,
        algorithms: Sequence[str] = ("RS256", "ES256", "EdDSA", "PS256"),
        scopes: str | Sequence[str] = (),
        leeway: float = 30.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._jwt = pyjwt("Jwt verifies with it")
        self.issuer: str = check_address("issuer", issuer)
        self.resource = check_resource(resource)
        self.audience = _audiences(resource, audience)
        self.scopes = scope_names("scopes of Jwt", scopes)
        # With a shared secret, every holder of it could make tokens.
        wrong = [name for name in algorithms if name not in ALGORITHMS]
        if wrong or isinstance(algorithms, str) or not algorithms:
            raise UsageError(
                f"algorithms={algorithms!r} cannot verify a token.",
                "the public key of an issuer verifies its signatures, "
                "so the algorithms are asymmetric",
                f"use some of {', '.join(ALGORITHMS)}",
            )
        self.algorithms = tuple(algorithms)
        if isinstance(jwks, str):
            check_address("jwks", jwks)
        self.keys = Keys(issuer, jwks, clock)
        self.leeway = leeway
        self._clock = clock

    async def verify(self, token: str) -> Identity | None:
        jwt = self._jwt
        # Step 1: which token is it? This part is not verified yet, and can only lead to a refusal.
        # A token of another issuer is unknown here, and so is a string that is not a JWT at all:
        # another verifier may know it.
        try:
            parts = jwt.decode_complete(token, options={"verify_signature": False})
        except (jwt.InvalidTokenError, RecursionError):
            return None
        header = parts["header"]
        claims = parts["payload"]
        if claims.get("iss") != self.issuer:
            return None
        algorithm = header.get("alg")
        kid = header.get("kid")
        kind = header.get("typ", "")
        if algorithm not in self.algorithms:
            raise Unauthorized("the token is signed with an algorithm that is not allowed")
        if "crit" in header:  # RFC 7515, section 4.1.11: members that must be understood; none are
            raise Unauthorized("the token has members that are not understood")
        if not isinstance(kind, str) or kind.lower() not in _TYPES:
            raise Unauthorized("the token is not an access token")
        # Step 2: its signature. If the token does not name a key, all keys that fit are tried.
        for key in await self.keys.find(algorithm, kid):
            try:
                claims = jwt.decode(
                    token,
                    key,
                    [algorithm],
                    {
                        "verify_exp": False,
                        "verify_nbf": False,
                        "verify_iat": False,
                        "require": ["iss", "aud", "exp"],
                    },
                    issuer=self.issuer,
                    audience=self.audience,
                )
                break
            except jwt.InvalidSignatureError:
                continue
            except jwt.InvalidAudienceError:
                raise Unauthorized("the token is for another audience") from None
            except jwt.MissingRequiredClaimError as error:
                raise Unauthorized(f"the token has no {error.claim}") from None
            except jwt.InvalidTokenError:
                raise Unauthorized("the token is not valid") from None
        else:
            raise Unauthorized("the signature of the token is not valid, or its key is unknown")
        # Step 3: its time, by the clock of this server.
        if not _is_number(claims["exp"]) or not _is_number(claims.get("nbf", 0)):
            raise Unauthorized("the token is not valid")
        _check_time(claims, self._clock(), self.leeway)
        return Identity.of_claims(claims, self.issuer)

    async def check(self) -> str:
        await self.keys.fetch()
        if self.keys.failure is not None:
            raise self.keys.failure
        return f"{self.issuer} has {len(self.keys.set or ())} keys"


def _audiences(resource: str, audience: str | Sequence[str] | None) -> list[str]:
    """Return the names of this server in `aud`, of which a token must have one.

    The check is not optional.
    """
    if audience is None:
        names = [resource]
    elif isinstance(audience, str):
        names = [audience]
    else:
        names = list(audience)
    if not all(names) or not names:
        raise UsageError(
            f"audience={audience!r} is not a name.",
            "a token for another server must not work here, so its audience is always checked",
            "leave it out to use resource=, or use the name that the issuer writes into aud",
        )
    return names


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(claims: JsonObject, name: str) -> float | None:
    """Return a claim that is a number, None if it is missing or not a number."""
    value: Any = claims.get(name)
    if not _is_number(value):
        return None
    number: float = value
    return number


def _check_time(claims: JsonObject, now: float, leeway: float = 0.0) -> None:
    """Refuse a token that has expired, that is not valid yet, or whose times no clock can show."""
    expires = _number(claims, "exp")
    begins = _number(claims, "nbf")
    if not all(time is None or abs(time) < LAST for time in (expires, begins)):  # also refuses NaN
        raise Unauthorized("the token is not valid")
    if expires is not None and now >= expires + leeway:
        raise Unauthorized("the token has expired")
    if begins is not None and now < begins - leeway:
        raise Unauthorized("the token is not valid yet")


class _KeySet(Struct):
    """A set of keys (RFC 7517, section 5)."""

    keys: list[Any]


class Keys:
    """The keys of one issuer: found by its metadata, at an address, or given as a set.

    1. A set is used for an hour. If it lacks the key of a token, it is fetched again, at most every
       30 seconds: an issuer changes its keys, but a sender can invent the name of one.
    2. One fetch serves all tokens that wait for it.
    3. If a fetch fails, the old keys stay in use. If none of them fits the token, the failure is
       raised.
    """

    def __init__(
        self, issuer: str, source: "str | Mapping[str, Any] | None", clock: Callable[[], float]
    ) -> None:
        self.set: list[JsonObject] | None = None
        # The failure of the last fetch.
        self.failure: CallFailed | None = None
        self._issuer = issuer
        self._url: str | None = None
        self._clock = clock
        self._built: dict[tuple[int, str], PyJWK | None] = {}
        self._fresh_until = self._next_fetch = 0.0
        self._fetching: asyncio.Task[None] | None = None
        if isinstance(source, str):
            self._url = source
        elif isinstance(source, Mapping):
            if not isinstance(source.get("keys"), list):
                raise UsageError(
                    "jwks= is not a set of keys.",
                    'expected {"keys": [...]} (RFC 7517, section 5)',
                    "",
                )
            self._use(source["keys"])
            self._fresh_until = self._next_fetch = float("inf")

    async def find(self, algorithm: str, kid: object) -> "list[PyJWK]":
        """Return the keys that may have signed a token, nearly always one.

        Raise `CallFailed` if they cannot be fetched.
        """
        if self.set is None or self._clock() >= self._fresh_until:
            await self.fetch()
        found = self._fitting(algorithm, kid)
        if not found and self._clock() >= self._next_fetch:
            await self.fetch()
            found = self._fitting(algorithm, kid)
        if not found and self.failure is not None:
            raise self.failure
        return found

    async def fetch(self) -> None:
        """Fetch the keys, unless it was tried a moment ago.

        After a failure, `failure` is set and the old keys stay.
        """
        task = self._fetching
        if task is None or task.get_loop() is not asyncio.get_running_loop():
            if self._clock() < self._next_fetch:
                return
            task = self._fetching = asyncio.get_running_loop().create_task(self._fetch())
        await asyncio.shield(task)

    async def _fetch(self) -> None:
        network = Network(private=True)  # the operator has chosen the issuer
        try:
            url = self._url or (await find_issuer(network, self._issuer)).jwks_uri
            if url is None:
                raise BadAnswer(f"the metadata of {self._issuer} has no jwks_uri")
            answer = await network.get(url, "the keys")
            found = None
            if answer.status == 200:
                found = answer.document(_KeySet)
            if found is None:
                raise BadAnswer(f"{url}: expected a set of keys, got status {answer.status}")
            self._use(found.keys)
            self.failure = None
            self._fresh_until = self._clock() + KEYS_KEPT
            self._next_fetch = self._clock() + AGAIN
        except CallFailed as error:
            logger.error("the keys of %s cannot be fetched: %s", self._issuer, error)
            self.failure = error
            pause = AGAIN
            if self.set is None:
                pause = AFTER_FAILURE
            self._fresh_until = self._next_fetch = self._clock() + pause
        finally:
            self._fetching = None

    def _use(self, keys: list[Any]) -> None:
        self.set = [key for key in keys if isinstance(key, dict)]
        self._built = {}

    def _fitting(self, algorithm: str, kid: object) -> "list[PyJWK]":
        from jwt import PyJWK, PyJWTError

        found = []
        kind, curve = ALGORITHMS[algorithm]
        for number, key in enumerate(self.set or ()):
            # The key, not the token, decides its algorithm: an RSA key never becomes an HMAC
            # secret.
            if (
                key.get("kty") != kind
                or key.get("crv") != curve
                or key.get("use") not in (None, "sig")
            ):
                continue
            if key.get("alg") not in (None, algorithm) or (
                kid is not None and key.get("kid") != kid
            ):
                continue
            if (number, algorithm) not in self._built:
                built: PyJWK | None = None
                try:
                    built = PyJWK(key, algorithm=algorithm)
                    if kind == "RSA" and built.key.key_size < SMALLEST_RSA:
                        built = None
                except PyJWTError:
                    pass  # no accepted token can be signed with a key that is not readable
                if built is None:
                    logger.warning(
                        "a key of %s is not used: it is too short, or cannot be read", self._issuer
                    )
                self._built[number, algorithm] = built
            if (usable := self._built[number, algorithm]) is not None:
                found.append(usable)
        return found


# --- tokens that their issuer checks --------------------------------------------------------------


class Introspection(Verifier):
    """Accepts the tokens that an authorization server reports as active and issued for this server.

    `url` is its introspection endpoint, `client_id` and `secret` are the credentials of this server
    there. The answer must have the server in `aud`: its `resource`, or `audience` if the
    authorization server uses another name. A token stays accepted for `keeps` seconds, at most 60,
    and not beyond its expiry.

    `issuer` is the address of the authorization server. Every token needs `scopes`. `clock` is for
    tests.

    >>> verifier = Introspection(
    ...     "https://auth.example.com/introspect",
    ...     "shop",
    ...     "a secret",
    ...     issuer="https://auth.example.com",
    ...     resource="https://api.example.com/mcp",
    ... )
    """

    def __init__(
        self,
        url: str,
        client_id: str,
        secret: str,
        *,
        issuer: str,
        resource: str,
        audience: str | Sequence[str] | None = None,
        scopes: str | Sequence[str] = (),
        keeps: float = ASKED_KEPT,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not 0 <= keeps <= ASKED_KEPT:
            why = "a revoked token is accepted for that long"
            raise UsageError(f"keeps must be 0 to {ASKED_KEPT:g} seconds, got {keeps!r}.", why)
        self.url = check_address("url", url)
        self.issuer: str = check_address("issuer", issuer)
        self.resource = check_resource(resource)
        self.audience = _audiences(resource, audience)
        self.scopes = scope_names("scopes of Introspection", scopes)
        self.keeps = keeps
        self._clock = clock
        # Connections that stay open while a server is open.
        self._http: HttpClient | None = None
        self._headers = {"Authorization": basic(client_id, secret), "Content-Type": FORM}

    async def verify(self, token: str) -> Identity | None:
        form = {"token": token, "token_type_hint": "access_token"}
        answer = None
        if self._http is not None:
            with suppress(ConnectionLost):  # the endpoint has closed a connection that was idle
                answer = await ask(self._http, "POST", urlencode(form).encode(), self._headers)
        if answer is None:
            answer = await Network(private=True).post(
                self.url, "the introspection endpoint", form, self._headers
            )
        if answer.status != 200:
            raise BadAnswer(
                f"{self.url}: expected 200, got {answer.status}; check client_id and secret"
            )
        claims = answer.document(dict)
        if claims is None:
            raise BadAnswer(f"{self.url}: expected a JSON object")
        if claims.get("active") is not True or claims.get("iss", self.issuer) != self.issuer:
            return None
        audience = claims.get("aud")
        if not isinstance(audience, list):
            audience = [audience]
        if not any(name in self.audience for name in audience):
            raise Unauthorized("the token is for another audience")
        _check_time(claims, self._clock())
        return Identity.of_claims(claims, self.issuer)

    async def open(self) -> None:
        if self._http is None:
            self._http = HttpClient(self.url, max_bytes=MAX_BYTES)
            await self._http.open()

    async def aclose(self) -> None:
        http = self._http
        self._http = None
        if http is not None:
            await http.aclose()

    async def check(self) -> str:
        await self.verify("wirecall-doctor")  # a token that is not active anywhere
        return f"{self.url} answers"


# --- fixed tokens ---------------------------------------------------------------------------------


def digest(token: str) -> str:
    """Return the digest by which `Tokens` knows a token. A program or a file may contain it.

    `token` is the token itself.

    >>> digest("b7c9e2f04d1a4e86")[:7]
    'sha256:'
    """
    return f"sha256:{sha256(token.encode()).hexdigest()}"


class Tokens(Verifier):
    """Accepts fixed tokens.

    `Tokens({"sha256:...": Identity("ci", scopes=frozenset({"orders:write"}))})`

    `wirecall.auth.digest` makes the digest of a token. Tokens are compared by digest, so the time
    of a comparison reveals nothing about them. A token needs 128 random bits: a digest does not
    protect a word that can be guessed.

    `identities` are the callers by the digest of their tokens, and `resource` is the address of
    this server.

    >>> verifier = Tokens({digest("b7c9e2f04d1a4e86"): Identity("ci")})
    """

    def __init__(self, identities: Mapping[str, Identity], *, resource: str | None = None) -> None:
        for name, identity in identities.items():
            if not _DIGEST.fullmatch(name) or not isinstance(identity, Identity):
                raise UsageError(
                    "Tokens takes a mapping from digests to identities.",
                    "a token itself does not belong into a program",
                    'use {digest(token): Identity("ci")} once to see the digest, '
                    'and write that: {"sha256:...": ...}',
                )
        if resource is not None:
            self.resource = check_resource(resource)
        self._identities = dict(identities)

    async def verify(self, token: str) -> Identity | None:
        return self._identities.get(digest(token))
