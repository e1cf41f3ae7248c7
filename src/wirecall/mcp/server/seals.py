"""Texts that a client keeps for us and brings back: session ids, and the state of calls that take several rounds.

A sealed text is `payload.signature`, both in base64url. An attacker may have written a text that comes back, so `open`
checks the signature first, then the use and the caller that the text was made for, and its age. The payload is not secret:
it holds only values that the caller may see.

Every process that shares the secret can open the texts of the others, so any worker serves any request.
"""

import base64
import hashlib
import hmac
import os
import time
from collections.abc import Callable

import msgspec
from msgspec import Raw, Struct


class _Payload(Struct, array_like=True):
    use: str
    caller: bytes  # a digest: the text does not reveal the caller's name
    until: float
    id: str
    value: Raw


_decode = msgspec.json.Decoder(_Payload).decode


class Seals:
    """Seals and opens texts with one secret."""

    def __init__(self, secret: str | bytes, clock: Callable[[], float] = time.time) -> None:
        self._key = hashlib.sha256(secret.encode() if isinstance(secret, str) else secret).digest()
        self.name = hashlib.sha256(b"name" + self._key).hexdigest()[:12]  # does not reveal the secret
        self._clock = clock

    def seal(self, use: str, caller: str, value: object, lifetime: float) -> str:
        """Return a text that `open` accepts for this use and this caller, for `lifetime` seconds."""
        raw, until = Raw(msgspec.json.encode(value)), self._clock() + lifetime
        payload = msgspec.json.encode(_Payload(use, _digest(caller), until, os.urandom(12).hex(), raw))
        return _written(payload, hmac.digest(self._key, payload, "sha256"))

    def open(self, use: str, caller: str, sealed: str) -> tuple[str, bytes] | None:
        """Return the random id of a sealed text, and the JSON of its value; None if it is not good for this."""
        head, _, tail = sealed.partition(".")
        try:
            payload = base64.b64decode(head + "=" * (-len(head) % 4), b"-_", validate=True)
            signature = base64.b64decode(tail + "=" * (-len(tail) % 4), b"-_", validate=True)
        except ValueError:
            return None
        # One value has one text: base64 has several forms of the same bytes, and another could pass a list of texts.
        if _written(payload, signature) != sealed:
            return None
        # `compare_digest` takes the same time for every wrong signature, so the time does not help to guess one.
        if not hmac.compare_digest(hmac.digest(self._key, payload, "sha256"), signature):
            return None
        told = _decode(payload)
        if told.use != use or told.caller != _digest(caller) or told.until < self._clock():
            return None
        return told.id, bytes(told.value)


def _digest(caller: str) -> bytes:
    return hashlib.sha256(caller.encode()).digest()[:12]


def _written(payload: bytes, signature: bytes) -> str:
    return ".".join([base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in (payload, signature)])
