"""Tokens that are signed JSON Web Tokens (RFC 9068), verified with the keys of their issuer.

The order: issuer, algorithm, `crit`, `typ`, key, signature, audience, time. A token of another issuer is unknown here, and
so is a text that is not a JWT at all: another verifier may know it. PyJWT reads tokens and verifies signatures.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from wirecall.auth.access import Verifier, check_address, check_resource
from wirecall.auth.keys import ALGORITHMS, Keys
from wirecall.errors import Unauthorized, UsageError
from wirecall.server.identity import Identity, scope_names

KEPT = 300.0  # seconds for which a verified token is not verified again: the longest that a revoked one stays good

# A header without `typ`, the old name, and the name of access tokens (RFC 9068, section 2.1). An ID token has none of its
# own, but its audience is a client.
_TYPES = frozenset({"", "jwt", "at+jwt", "application/at+jwt"})


class Jwt(Verifier):
    """Accepts the tokens that an issuer has signed for this server.

    `resource` is the address of the server, as its clients write it: "https://api.example.com/mcp". A token must have it in
    `aud`, or `audience` where the issuer uses another name. `jwks` is the address of the keys, or a set of them; without it
    the metadata of the issuer names the address. Every token needs `scopes`. `leeway` are seconds between two clocks.
    """

    keeps = KEPT

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
        try:
            import jwt  # late: an extra, and it takes a tenth of a second
        except ImportError:
            raise UsageError("PyJWT is not installed.", "Jwt verifies with it", 'pip install "wirecall[auth]"') from None
        self.issuer: str = check_address("issuer", issuer)
        self.resource = check_resource(resource)
        self.audience = audiences(resource, audience)
        self.scopes = scope_names("scopes of Jwt", scopes)
        # A secret that client and server share would let every holder of it make tokens.
        wrong = [name for name in algorithms if name not in ALGORITHMS]
        if wrong or isinstance(algorithms, str) or not algorithms:
            raise UsageError(
                f"algorithms={algorithms!r} cannot verify a token.",
                "the public key of an issuer verifies its signatures, so the algorithms are asymmetric",
                f"use some of {', '.join(ALGORITHMS)}",
            )
        self.algorithms = tuple(algorithms)
        if isinstance(jwks, str):
            check_address("jwks", jwks)
        self.keys = Keys(issuer, jwks, clock)
        self.leeway = leeway
        self._clock = clock
        self._jwt = jwt

    async def verify(self, token: str) -> Identity | None:
        jwt = self._jwt
        # Step 1: which token is it? This part is not verified yet, and can only lead to a refusal.
        try:
            parts = jwt.decode_complete(token, options={"verify_signature": False})
        except (jwt.InvalidTokenError, RecursionError):
            return None
        header, claims = parts["header"], parts["payload"]
        if claims.get("iss") != self.issuer:
            return None
        algorithm, kid, kind = header.get("alg"), header.get("kid"), header.get("typ", "")
        if algorithm not in self.algorithms:
            raise Unauthorized("the token is signed with an algorithm that is not allowed")
        if "crit" in header:  # RFC 7515, section 4.1.11: members that must be understood, and none are known here
            raise Unauthorized("the token has members that are not understood")
        if not isinstance(kind, str) or kind.lower() not in _TYPES:
            raise Unauthorized("the token is not an access token")
        # Step 2: its signature. A token without the name of a key is tried with all that fit.
        for key in await self.keys.find(algorithm, kid):
            try:
                claims = jwt.decode(
                    token,
                    key,
                    [algorithm],
                    {"verify_exp": False, "verify_nbf": False, "verify_iat": False, "require": ["iss", "aud", "exp"]},
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
        now, expires, begins = self._clock(), claims["exp"], claims.get("nbf", 0)
        if not (_is_time(expires) and _is_time(begins)):
            raise Unauthorized("the token is not valid")
        if now >= expires + self.leeway:
            raise Unauthorized("the token has expired")
        if now < begins - self.leeway:
            raise Unauthorized("the token is not valid yet")
        return Identity.of_claims(claims, self.issuer)

    async def check(self) -> str:
        await self.keys.fetch()
        if self.keys.failure is not None:
            raise self.keys.failure
        return f"{self.issuer} has {self.keys.count} keys"


def audiences(resource: str, audience: str | Sequence[str] | None) -> list[str]:
    """Return the names of this server in `aud`, one of which a token must have. The check cannot be left out."""
    names = [resource] if audience is None else [audience] if isinstance(audience, str) else list(audience)
    if not all(names) or not names:
        raise UsageError(
            f"audience={audience!r} is not a name.",
            "a token for another server must not be good here, so its audience is always checked",
            "leave it out to use resource=, or use the name that the issuer writes into aud",
        )
    return names


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
