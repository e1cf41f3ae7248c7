"""The keys of an issuer, and when they are fetched.

1. A set of keys is good for an hour. A token with a key that the set does not have is a reason to fetch it anew, at most
   every 30 seconds: an issuer changes its keys, but a sender can invent the name of one.
2. One fetch serves everything that waits for it.
3. If a fetch fails, the old keys stay in use. Without a key for the token at hand the failure is raised.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from wirecall.auth.documents import key_set
from wirecall.errors import CallFailed, UsageError
from wirecall.logs import logger
from wirecall.protocol.messages import JsonObject

if TYPE_CHECKING:
    from jwt import PyJWK

FRESH = 3600.0
AGAIN = 30.0  # seconds between two fetches
AFTER_FAILURE = 1.0  # the same, where there are no keys at all
SMALLEST_RSA = 2048  # bits (RFC 7518, section 3.3)

# The type of key that an algorithm needs, and its curve (RFC 7518, section 3.1; RFC 8037).
_RSA = dict.fromkeys(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), ("RSA", None))
ALGORITHMS: Mapping[str, tuple[str, str | None]] = {
    **_RSA,
    "ES256": ("EC", "P-256"),
    "ES384": ("EC", "P-384"),
    "ES512": ("EC", "P-521"),
    "EdDSA": ("OKP", "Ed25519"),
}


class Keys:
    """The keys of one issuer: found by its metadata, at an address, or given as a set."""

    def __init__(self, issuer: str, source: "str | Mapping[str, Any] | None", clock: Callable[[], float]) -> None:
        self._issuer = issuer
        self._url = source if isinstance(source, str) else None
        self._clock = clock
        self._set: list[JsonObject] | None = None
        self._built: dict[tuple[int, str], PyJWK | None] = {}
        self._fresh_until = self._next_fetch = 0.0
        self._failure: CallFailed | None = None
        self._fetching: asyncio.Task[None] | None = None
        if isinstance(source, Mapping):
            if not isinstance(source.get("keys"), list):
                raise UsageError("jwks= is not a set of keys.", 'expected {"keys": [...]} (RFC 7517, section 5)', "")
            self._use(source["keys"])
            self._fresh_until = self._next_fetch = float("inf")

    async def find(self, algorithm: str, kid: object) -> "list[PyJWK]":
        """Return the keys that may have signed a token, nearly always one; `CallFailed` if they cannot be fetched."""
        if self._set is None or self._clock() >= self._fresh_until:
            await self.fetch()
        found = self._fitting(algorithm, kid)
        if not found and self._clock() >= self._next_fetch:
            await self.fetch()
            found = self._fitting(algorithm, kid)
        if not found and self._failure is not None:
            raise self._failure
        return found

    async def fetch(self) -> None:
        """Fetch the keys, unless it was tried a moment ago. A failure is kept in mind, and the old keys as well."""
        task = self._fetching
        if task is None or task.get_loop() is not asyncio.get_running_loop():
            if self._clock() < self._next_fetch:
                return
            task = self._fetching = asyncio.get_running_loop().create_task(self._fetch())
        await asyncio.shield(task)

    async def _fetch(self) -> None:
        try:
            self._use((await key_set(self._issuer, self._url))["keys"])
            self._failure = None
            self._fresh_until, self._next_fetch = self._clock() + FRESH, self._clock() + AGAIN
        except CallFailed as error:
            logger.error("the keys of %s cannot be fetched: %s", self._issuer, error)
            self._failure = error
            wait = AFTER_FAILURE if self._set is None else AGAIN
            self._fresh_until = self._next_fetch = self._clock() + wait
        finally:
            self._fetching = None

    def _use(self, keys: list[Any]) -> None:
        self._set = [key for key in keys if isinstance(key, dict)]
        self._built = {}

    def _fitting(self, algorithm: str, kid: object) -> "list[PyJWK]":
        from jwt import PyJWK, PyJWTError

        found = []
        kind, curve = ALGORITHMS[algorithm]
        for number, key in enumerate(self._set or ()):
            # The key decides what it is good for, and not the token: an RSA key never becomes the secret of an HMAC.
            if key.get("kty") != kind or key.get("crv") != curve or key.get("use") not in (None, "sig"):
                continue
            if key.get("alg") not in (None, algorithm) or (kid is not None and key.get("kid") != kid):
                continue
            if (number, algorithm) not in self._built:
                built: PyJWK | None = None
                try:
                    built = PyJWK(key, algorithm=algorithm)
                    if kind == "RSA" and built.key.key_size < SMALLEST_RSA:
                        built = None
                except PyJWTError:
                    pass  # a key that cannot be read is one that no token is signed with
                if built is None:
                    logger.warning("a key of %s is not used: it is too short, or cannot be read", self._issuer)
                self._built[number, algorithm] = built
            usable = self._built[number, algorithm]
            if usable is not None:
                found.append(usable)
        return found

    @property
    def count(self) -> int:
        """The number of keys at hand."""
        return len(self._set or ())

    @property
    def failure(self) -> CallFailed | None:
        """The reason why the last fetch failed, or None."""
        return self._failure
