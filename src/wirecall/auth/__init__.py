"""Authorization: which tokens a server accepts, and what their holders may do. docs/authorization.md explains it."""

from wirecall.auth.access import Access, Verifier
from wirecall.auth.introspection import Introspection
from wirecall.auth.jwt import Jwt
from wirecall.auth.tokens import Tokens, digest
from wirecall.server.identity import Identity

__all__ = ["Access", "Identity", "Introspection", "Jwt", "Tokens", "Verifier", "digest"]
