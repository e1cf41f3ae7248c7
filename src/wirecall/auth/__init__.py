"""Authorization: the ways by which a client gets its tokens, and the stores that keep them."""

from wirecall.auth.store import FileStore, KeyringStore, Login, MemoryStore, Store
from wirecall.auth.ways import Browser, ClientCredentials, IdJag, Stored, Workload

__all__ = [
    "Browser",
    "ClientCredentials",
    "FileStore",
    "IdJag",
    "KeyringStore",
    "Login",
    "MemoryStore",
    "Store",
    "Stored",
    "Workload",
]
