"""SHA-256, for what a command was given and what came of it.

`hashlib` has OpenSSL's, which is made for long texts: whenever it is asked, it looks up its own code first. Where that is
not in the processor's caches, as after every commit, this costs 5 us, and a command needs two. Python has a plain one
besides, under a name that has changed once; where there is none, OpenSSL's will do.
"""

from importlib import import_module
from typing import Any

SHORT = 1024  # bytes: from here on OpenSSL's is faster


def sha256(data: bytes) -> bytes:
    if len(data) < SHORT and _plain is not None:
        digest: bytes = _plain(data).digest()
        return digest
    import hashlib  # late: `import wirecall` stays light

    return hashlib.sha256(data).digest()


def _find() -> Any:
    for name in ("_sha2", "_sha256"):  # since Python 3.12, and until then
        try:
            return import_module(name).sha256
        except (ImportError, AttributeError):
            continue
    return None


_plain = _find()
