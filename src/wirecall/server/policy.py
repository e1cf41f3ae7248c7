"""What may be called, how, and by which key: the rules between parsing a message and running a method.

`Policy.admit` takes a parsed message and its method and returns a `Call`, or the error that answers the message. An
error raised here is always answered, under id null where the message has none (P2, P6). After admission a notification is
silent, whatever happens to it.

`fingerprint` is the identity of a command's params: two calls with one key must agree on it.
"""

import gc
import hashlib
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import InvalidParams, InvalidRequest, KeyInvalid, KeyRequired
from wirecall.protocol import messages as frames
from wirecall.protocol.limits import Limits
from wirecall.protocol.messages import Message
from wirecall.protocol.params import KEY, META
from wirecall.server.call import Call, Frame
from wirecall.server.method import Method

Mode: TypeAlias = Literal["development", "production"]

ANONYMOUS = ""


class Policy(Struct, frozen=True):
    """The rules of an app."""

    mode: Mode = "development"
    limits: Limits = Limits()

    def admit(self, message: Message, method: Method, frame: Frame, position: int | None) -> Call:
        """Return the call of a message that may run, or raise the error that answers it."""
        frames.check_params_shape(message.params)
        if method.is_command and (message.id is UNSET or message.id is None):  # P2
            raise InvalidRequest(f"{method.name} is a command: it is executed only with an id", method=method.name)
        if message.id is UNSET and not method.notification_allowed:  # P6
            raise InvalidRequest(f"{method.name} does not accept notifications: send an id", method=method.name)
        beside = UNSET if frame.key is None else frame.key
        key = self._key(message.params, method, beside) if method.is_command else None
        return Call(method, frame, id=message.id, params=message.params, position=position, key=key)

    def _key(self, params: Raw | UnsetType, method: Method, beside: Any) -> str | None:
        given = UNSET if params is UNSET else take_key(params, method.signature.key_position)
        key = check_key(given) if beside is UNSET and given is not UNSET else agreed_key(given, beside)
        if key is None and (self.mode == "production" or method.key != "optional"):
            raise KeyRequired(f"a command needs params.{KEY}: one value per intent, the same on every retry", ran="no")
        return key


def take_key(params: Raw, position: int | None = None) -> Any:
    """The key among the params, or UNSET. Given twice with two values it is refused: each would be a command.

    Params by position have one only where the function itself declares it, at `position`.
    """
    text = bytes(params)
    if text.startswith(b"["):
        items = [] if position is None else frames.decode_any(params)
        return items[position] if position is not None and position < len(items) else UNSET
    try:
        key = _decode_keyed(params).idempotency_key
    except msgspec.ValidationError as error:  # the key, or a number behind it, is one that Python cannot hold
        raise KeyInvalid(f"params.{KEY}: {str(error).lower()}", ran="no") from None
    if key is not UNSET and (text.count(_QUOTED_KEY) > 1 or b"\\u" in text):
        import json  # late: the one decoder that shows duplicate members

        # Integers stay texts: Python refuses to read long ones, and what is wrong with those is told by the binding.
        members = json.loads(text, object_pairs_hook=list, parse_int=lambda digits: [digits])
        values = {json.dumps(value) for name, value in members if name == KEY}
        if len(values) > 1:
            raise KeyInvalid(f"params.{KEY}: given twice with different values", ran="no")
    return key


def agreed_key(*given: Any) -> str | None:
    """The one key of a call that may carry it in several places; UNSET says: not here."""
    keys = [key for key in given if key is not UNSET]
    for key in keys:
        check_key(key)
        if key != keys[0]:
            raise KeyInvalid("two idempotency keys with different values in one request", ran="no")
    return keys[0] if keys else None


def check_key(key: Any) -> str:
    """1 to 255 printable ASCII characters without spaces."""
    if not isinstance(key, str):
        raise KeyInvalid(f"params.{KEY}: expected str, got {type(key).__name__}", ran="no")
    if not 1 <= len(key) <= 255:
        raise KeyInvalid(f"params.{KEY}: expected 1 to 255 characters, got {len(key)}", ran="no")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise KeyInvalid(f"params.{KEY}: expected printable ASCII characters without spaces", ran="no")
    return key


class _Keyed(Struct):
    idempotency_key: Any = UNSET


_decode_keyed = msgspec.json.Decoder(_Keyed).decode
_QUOTED_KEY = f'"{KEY}"'.encode()

_NO_PARAMS = Raw(b"{}")

LARGE = 1 << 16  # bytes of params that may hold many objects

# An integer with more zeros at its end is written with an exponent: `1e999999` must not become a million digits.
MOST_ZEROS = 20
_MANY_ZEROS = b"0" * (MOST_ZEROS + 1)
_LONG_INTEGER = rb'("[^"\\]*+(?:\\.[^"\\]*+)*+")|(-?[0-9]{%d,}+)(?![.eE])' % (MOST_ZEROS + 2)

_canonical = msgspec.json.Encoder(order="deterministic").encode


def fingerprint(params: Raw | UnsetType) -> bytes:
    """Return SHA-256 of the params in canonical form: members sorted, numbers by their exact value (1 equals 1.0 and 1e0).

    The key and `_meta` may differ from one attempt to the next, so they do not count.
    """
    given = bytes(_NO_PARAMS if params is UNSET else params)
    if _MANY_ZEROS in given:
        import re  # late: few params come here

        # The decoder shows `_exact` only numbers with a fraction or an exponent, so long integers get an exponent.
        given = re.sub(_LONG_INTEGER, lambda found: found[1] or found[2] + b"e0", given, flags=re.DOTALL)
    if len(given) < LARGE or not gc.isenabled():
        return _digest(given)
    # A megabyte can hold half a million arrays. While they are made, the garbage collector would look through them and
    # through the arguments of the call several times, and find nothing: five times the work.
    gc.disable()
    try:
        return _digest(given)
    finally:
        gc.enable()


def _digest(given: bytes) -> bytes:
    try:
        value = _decode_exact(given)
    except (msgspec.ValidationError, RecursionError):
        frames.decode_any(Raw(given))  # which says what is wrong
        raise InvalidParams("params: number out of range") from None
    if type(value) is dict:
        value.pop(KEY, None)
        value.pop(META, None)
    return hashlib.sha256(_canonical(value)).digest()


def _exact(text: str) -> "int | float | Raw":
    """Return a number with a fraction or an exponent as its canonical form: two forms are equal if the values are.

    15 digits are what every float keeps, so a number that has no more is written as the float. A longer one is written
    with all its digits.
    """
    if len(text) <= 16 and 1e-290 < abs(value := float(text)) < 2**53:
        return int(value) if value.is_integer() else value
    mantissa, _, power = text.lower().partition("e")
    sign = "-" if mantissa.startswith("-") else ""
    whole, _, fraction = mantissa.lstrip("-").partition(".")
    digits = (whole + fraction).lstrip("0")
    if not digits:
        return 0
    significant = digits.rstrip("0")
    exponent = int(power or "0") - len(fraction) + len(digits) - len(significant)
    if 0 <= exponent <= MOST_ZEROS:
        return Raw(f"{sign}{significant}{'0' * exponent}".encode())
    if len(significant) <= 15 and 1e-290 < abs(value := float(f"{sign}{significant}e{exponent}")) < 1e290:
        return value
    return Raw(f"{sign}{significant}e{exponent}".encode())


_decode_exact = msgspec.json.Decoder(float_hook=_exact).decode
