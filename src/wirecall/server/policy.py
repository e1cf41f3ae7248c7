"""The rules between parsing a message and running a method: may it be called, and by which key.

`Policy.admit` takes a parsed message and its method and returns a `Call`, or raises the error that answers the message. An
error raised here is always answered, under id null where the message has none (P2, P6). After admission a notification is
silent, whatever happens to it.

`identify` is the one rule about keys, for JSON-RPC and MCP. `fingerprint` is the identity of a command's params: two calls
with one key must agree on it.
"""

import gc
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import InvalidParams, InvalidRequest, KeyInvalid, KeyRequired
from wirecall.protocol import messages as frames
from wirecall.protocol.messages import Json, Limits, Message
from wirecall.protocol.params import KEY, META
from wirecall.server.call import Call, Frame

if TYPE_CHECKING:
    from wirecall.server.method import Method, Mode


class Policy(Struct, frozen=True):
    """The rules of an app."""

    mode: "Mode" = "development"
    limits: Limits = Limits()
    single_user: bool = False  # all anonymous calls come from one user

    def admit(self, message: Message, method: "Method", frame: Frame, position: int | None) -> Call:
        """Return the call of a message that may run, or raise the error that answers it."""
        frames.check_params_shape(message.params)
        if method.is_command and (message.id is UNSET or message.id is None):  # P2
            raise InvalidRequest(f"{method.name} is a command: it is executed only with an id", method=method.name)
        if message.id is UNSET and not method.notification_allowed:  # P6
            raise InvalidRequest(f"{method.name} does not accept notifications: send an id", method=method.name)
        key, keyless, identity = None, False, None
        if method.is_command:
            beside = UNSET if frame.key is None else frame.key
            key, identity = identify(message.params, beside, position=method.signature.key_position)
            if key is None:
                if needs_key(method, self.mode):
                    reason = f"a command needs params.{KEY}: one value per intent, the same on every retry"
                    raise KeyRequired(reason, ran="no")
                keyless = method.key != "off"
        return Call(method, frame, message.id, message.params, method.name, position, key, keyless, identity)


def needs_key(method: "Method", mode: "Mode") -> bool:
    """Return whether a call over JSON-RPC is refused without a key. In production only key="auto" allows it (P4)."""
    return method.key != "auto" and (mode == "production" or method.key in ("required", "ask"))


def identify(params: Raw | UnsetType, *beside: object, position: int | None = None) -> tuple[str | None, bytes | None]:
    """Return the key of a command's call and, if it has one, the fingerprint of its params: one decode gives both.

    The key may be among the params and at other places `beside` them; UNSET says that a place has none. All places must
    agree: two values would be two commands. Params by position have a key only where the function declares it, at
    `position`.
    """
    text = b"{}" if params is UNSET else bytes(params)
    # A look at the bytes spares most params without a key the decode. An escape (\u) may hide the name. (`in` would take
    # many times as long as `find`: it tries whether the left side is a number.)
    times_named, is_escaped = text.count(_QUOTED_KEY), text.find(b"\\u") >= 0
    if not times_named and not is_escaped and position is None and beside.count(UNSET) == len(beside):
        return None, None
    value = _decode_exact(text)
    among: object = UNSET
    if type(value) is dict:
        value.pop(META, None)
        among = value.pop(KEY, UNSET)
        if among is not UNSET and (times_named > 1 or is_escaped):
            import json  # late: the one decoder that shows duplicate members

            # Integers stay texts: Python refuses to read long ones.
            members = json.loads(text, object_pairs_hook=list, parse_int=lambda digits: [digits])
            if len({json.dumps(each) for name, each in members if name == KEY}) > 1:
                raise KeyInvalid(f"params.{KEY}: given twice with different values", ran="no")
    elif type(value) is list and position is not None and position < len(value):
        among = value[position]
    key: str | None = None
    for given in (*beside, among):
        if given is not UNSET:
            checked = check_key(given)
            if key is not None and checked != key:
                raise KeyInvalid("two idempotency keys with different values in one request", ran="no")
            key = checked
    return (None, None) if key is None else (key, sha256(_encode_sorted(value)).digest())


def check_key(key: object) -> str:
    """Return a key that has 1 to 255 printable ASCII characters without spaces; raise `KeyInvalid` for any other."""
    if not isinstance(key, str):
        got = "float" if isinstance(key, Raw) else type(key).__name__  # `Raw` is a float with many digits
        raise KeyInvalid(f"params.{KEY}: expected str, got {got}", ran="no")
    if not 1 <= len(key) <= 255:
        raise KeyInvalid(f"params.{KEY}: expected 1 to 255 characters, got {len(key)}", ran="no")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise KeyInvalid(f"params.{KEY}: expected printable ASCII characters without spaces", ran="no")
    return key


# --- the identity of params -------------------------------------------------------------------------------------------

_QUOTED_KEY = f'"{KEY}"'.encode()

LARGE = 1 << 16  # bytes of params that may hold many objects

# An integer with more zeros at its end is written with an exponent: `1e999999` must not become a million digits.
MOST_ZEROS = 20
_MANY_ZEROS = b"0" * (MOST_ZEROS + 1)
_LONG_INTEGER = rb'("[^"\\]*+(?:\\.[^"\\]*+)*+")|(-?[0-9]{%d,}+)(?![.eE])' % (MOST_ZEROS + 2)


def fingerprint(params: Raw | UnsetType) -> bytes:
    """Return SHA-256 of the params in canonical form: members sorted, numbers by their exact value (1 equals 1.0 and 1e0).

    The key and `_meta` may differ from one attempt to the next, so they do not count.
    """
    value = _decode_exact(b"{}" if params is UNSET else bytes(params))
    if type(value) is dict:
        value.pop(KEY, None)
        value.pop(META, None)
    return sha256(_encode_sorted(value)).digest()


def _decode_exact(text: bytes) -> Json:
    """Return params as plain values, in which every number has its exact value."""
    if text.find(_MANY_ZEROS) >= 0:
        import re  # late: few params come here

        # The decoder shows `_exact` only numbers with a fraction or an exponent, so long integers get an exponent.
        text = re.sub(_LONG_INTEGER, lambda found: found[1] or found[2] + b"e0", text, flags=re.DOTALL)
    # While many objects are made, the garbage collector would look through all of them several times and find nothing:
    # five times the work.
    pauses = len(text) >= LARGE and gc.isenabled()
    if pauses:
        gc.disable()
    try:
        return _decode_numbers(text)
    except (msgspec.ValidationError, RecursionError):
        frames.decode_any(Raw(text))  # raises the error that gives the reason
        raise InvalidParams("params: number out of range") from None
    finally:
        if pauses:
            gc.enable()


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


_decode_numbers = msgspec.json.Decoder(float_hook=_exact).decode
_encode_sorted = msgspec.json.Encoder(order="deterministic").encode
