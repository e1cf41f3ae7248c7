"""Texts that a client keeps for us and brings back: session ids and the state of calls that take several rounds.

A sealed text is `payload.signature`, both in base64url. An attacker may have written a text that comes back, so `open`
checks the signature first, then the use and the caller that the text was made for, and its age.
The payload is not secret: it holds only values that the caller may see.

Every process that shares the secret can open the texts of the others, so any worker serves any request.
"""

import base64
import hashlib
import hmac
import os
import time
from collections.abc import Callable

import msgspec
from msgspec import Struct


class BrokenSeal(Exception):
    """The text was not sealed here, or not for this use and this caller, or too long ago."""


class _Payload(Struct, array_like=True):
    use: str
    caller: bytes  # a digest: the text does not reveal the caller's name
    until: float
    id: str
    value: msgspec.Raw


_decode = msgspec.json.Decoder(_Payload).decode


class Seals:
    """Seals and opens texts with one secret."""

    def __init__(self, secret: str | bytes, clock: Callable[[], float] = time.time) -> None:
        self._key = hashlib.sha256(secret.encode() if isinstance(secret, str) else secret).digest()
        self.name = hashlib.sha256(b"name" + self._key).hexdigest()[:12]  # does not reveal the secret
        self._clock = clock

    def seal(self, use: str, caller: str, value: object, lifetime: float) -> str:
        """Return a text that `open` accepts for this use and this caller, for `lifetime` seconds."""
        raw, until = msgspec.Raw(msgspec.json.encode(value)), self._clock() + lifetime
        payload = msgspec.json.encode(_Payload(use, _digest(caller), until, os.urandom(12).hex(), raw))
        return f"{_text(payload)}.{_text(hmac.digest(self._key, payload, 'sha256'))}"

    def open(self, use: str, caller: str, sealed: str) -> tuple[str, bytes]:
        """Return the random id of a sealed text, and the JSON of its value. BrokenSeal if it is not good for this."""
        head, _, tail = sealed.partition(".")
        try:
            payload, signature = _bytes(head), _bytes(tail)
        except ValueError:
            raise BrokenSeal from None
        # `compare_digest` takes the same time for every wrong signature, so the time does not help to guess one.
        if not hmac.compare_digest(hmac.digest(self._key, payload, "sha256"), signature):
            raise BrokenSeal
        told = _decode(payload)
        if told.use != use or told.caller != _digest(caller) or told.until < self._clock():
            raise BrokenSeal
        return told.id, bytes(told.value)


def _digest(caller: str) -> bytes:
    return hashlib.sha256(caller.encode()).digest()[:12]


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    """Decode base64url strictly, so that one text has one meaning: Python's decoder skips foreign characters by default."""
    data = base64.b64decode(text.encode() + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if _text(data) != text:
        raise ValueError(text)
    return data
