"""Fixed tokens, for programs without an authorization server: known by their digests."""

import re
from collections.abc import Mapping
from hashlib import sha256

from wirecall.auth.access import Verifier, check_resource
from wirecall.errors import UsageError
from wirecall.server.identity import Identity

_DIGEST = re.compile("sha256:[0-9a-f]{64}")


def digest(token: str) -> str:
    """Return the digest under which `Tokens` knows a token: what a program or a file may keep of it."""
    return f"sha256:{sha256(token.encode()).hexdigest()}"


class Tokens(Verifier):
    """Accepts fixed tokens: `Tokens({"sha256:...": Identity("ci", scopes=frozenset({"orders:write"}))})`.

    `wirecall.auth.digest` makes the digest of a token. Tokens are compared by digest, so the time of a comparison tells
    nothing about them. A token needs 128 random bits: a digest does not protect a word that can be guessed.
    """

    def __init__(self, identities: Mapping[str, Identity], *, resource: str | None = None) -> None:
        for name, identity in identities.items():
            if not _DIGEST.fullmatch(name) or not isinstance(identity, Identity):
                raise UsageError(
                    "Tokens takes a mapping from digests to identities.",
                    "a token itself does not belong into a program",
                    'use {digest(token): Identity("ci")} once to see the digest, and write that: {"sha256:...": ...}',
                )
        self.resource = None if resource is None else check_resource(resource)
        self._identities = dict(identities)

    async def verify(self, token: str) -> Identity | None:
        return self._identities.get(digest(token))
