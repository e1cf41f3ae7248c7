"""Authorization: the tokens that a server accepts, and how a client gets them.

docs/authorization.md is about servers, docs/authorization-client.md about clients.
"""

from wirecall.auth.access import Access, Verifier
from wirecall.auth.grants import Browser, ClientCredentials, IdJag, Stored, Workload
from wirecall.auth.store import FileStore, KeyringStore, Login, MemoryStore, Store
from wirecall.auth.verifiers import Introspection, Jwt, Tokens, digest
from wirecall.server.identity import Identity

__all__ = [
    "Access",
    "Browser",
    "ClientCredentials",
    "FileStore",
    "IdJag",
    "Identity",
    "Introspection",
    "Jwt",
    "KeyringStore",
    "Login",
    "MemoryStore",
    "Store",
    "Stored",
    "Tokens",
    "Verifier",
    "Workload",
    "digest",
]
