"""The rules between parsing a message and running a method.

They decide whether the method may be called, and with which key.

`Policy.admit` takes a parsed message and its method and returns a `Call`, or raises the error that
answers the message. An error raised here is always answered, under id null where the message has
none (P2, P6). After admission a notification is silent, whatever happens to it.

`identify` is the one rule about keys, for JSON-RPC and MCP. `fingerprint` is the identity of a
command's params: two calls with one key must agree on it.
"""

import gc
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import InvalidParams, InvalidRequest, KeyInvalid, KeyRequired
from wirecall.limits import Limits
from wirecall.protocol import messages as frames
from wirecall.protocol.messages import Json, JsonObject, Message
from wirecall.protocol.params import KEY, META
from wirecall.server.call import Call, Frame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wirecall.protocol.keys import KeyPlace
    from wirecall.server.method import Method, Mode


class Policy(Struct, frozen=True):
    """The rules of an app."""

    mode: "Mode" = "development"
    limits: Limits = Limits()
    # All anonymous calls come from one user; None: the mode decides.
    single_user: bool | None = None

    @property
    def has_single_user(self) -> bool | None:
        """Whether all anonymous calls come from one user.

        None: those of direct requests over the loopback do.
        """
        if self.single_user is None and self.mode == "production":
            return False
        return self.single_user

    def admit(self, message: Message, method: "Method", frame: Frame, position: int | None) -> Call:
        """Return the call of a message that may run, or raise the error that answers it."""
        frames.check_params_shape(message.params)
        if method.is_command and (message.id is UNSET or message.id is None):  # P2
            raise InvalidRequest(
                f"{method.name} is a command: it is executed only with an id", method=method.name
            )
        if message.id is UNSET and not method.notification_allowed:  # P6
            raise InvalidRequest(
                f"{method.name} does not accept notifications: send an id", method=method.name
            )
        key = None
        keyless = False
        digest = None
        if method.is_command:
            beside = frame.key if frame.key is not None else UNSET
            key, digest = identify(
                message.params,
                beside,
                position=method.signature.key_position,
                place=method.key_place,
            )
            if key is None:
                if needs_key(method, self.mode):
                    raise KeyRequired(
                        f"a command needs {place_of(method)}: "
                        "one value per intent, the same on every retry",
                        ran="no",
                    )
                keyless = method.key != "off"
        return Call(
            method, frame, message.id, message.params, method.record, position, key, keyless, digest
        )


def needs_key(method: "Method", mode: "Mode") -> bool:
    """Return whether a call over JSON-RPC is refused without a key.

    In production only key="auto" allows it (P4).
    """
    return method.key != "auto" and (mode == "production" or method.key in ("required", "ask"))


def place_of(method: "Method") -> str:
    """Return where a caller puts the key of a command."""
    if method.key_place is not None:
        return method.key_place.shown
    return f"params.{KEY}"


def identify(
    params: Raw | UnsetType,
    *beside: object,
    position: int | None = None,
    place: "KeyPlace | None" = None,
) -> tuple[str | None, bytes | None]:
    """Return the key of a command's call and, if it has one, the fingerprint of its params.

    One decode gives both. The key may be among the params and at other places `beside` them; UNSET
    means that a place has none. All places must agree: two values would be two commands. Params by
    position have a key only if the function declares it, at `position`. `place` is another place among
    params by name.
    """
    text = _written(params)
    # A search in the bytes avoids the decode of most params without a key. An escape (\u) may hide
    # the name. (`in` takes many times as long as `find`: it first tests whether the left side is a
    # number.)
    times_named = text.count(_QUOTED_KEY)
    if place is not None:
        times_named += text.count(place.quoted)
    is_escaped = text.find(b"\\u") >= 0
    if (
        not times_named
        and not is_escaped
        and position is None
        and beside.count(UNSET) == len(beside)
    ):
        return None, None
    value = _decode_exact(text)
    among: object = UNSET
    placed: object = UNSET
    if type(value) is dict:
        value.pop(META, None)
        among = value.pop(KEY, UNSET)
        is_repeated = times_named > 1 or is_escaped
        if among is not UNSET and is_repeated:
            _refuse_two_values(text, (KEY,))
        if place is not None:
            placed = _key_at(place, value, text)
    elif type(value) is list and position is not None and position < len(value):
        among = value[position]
    key: str | None = None
    for given in (*beside, among, placed):
        if given is not UNSET:
            checked = check_key(given)
            if key is not None and checked != key:
                raise KeyInvalid(
                    "two idempotency keys with different values in one request", ran="no"
                )
            key = checked
    if key is None:
        return None, None
    return key, sha256(_encode_sorted(value)).digest()


def _key_at(place: "KeyPlace", params: JsonObject, text: bytes) -> object:
    """Take the key from its place among params, and check it; UNSET if there is none."""
    key = place.take(params)
    place.forget(params)
    if key is UNSET:
        return UNSET
    _refuse_two_values(text, place.path)
    return check_key(key, place.shown)


def _refuse_two_values(text: bytes, path: "Sequence[str]") -> None:
    """Raise `KeyInvalid` if a member at a path is given twice with different values."""
    import json  # late: the one decoder that shows duplicate members

    # Integers stay strings: Python refuses to read long ones.
    found = [json.loads(text, object_pairs_hook=list, parse_int=lambda digits: [digits])]
    for name in path:
        found = [
            pair[1]
            for members in found
            if isinstance(members, list)
            for pair in members
            if isinstance(pair, tuple) and pair[0] == name
        ]
    if len({json.dumps(each) for each in found}) > 1:
        where = ".".join(("params", *path))
        raise KeyInvalid(f"{where}: given twice with different values", ran="no")


def check_key(key: object, where: str = f"params.{KEY}") -> str:
    """Return a key that has 1 to 255 printable ASCII characters without spaces.

    Raises `KeyInvalid` for any other.
    """
    if not isinstance(key, str):
        got = type(key).__name__
        if isinstance(key, Raw):  # a float with many digits
            got = "float"
        raise KeyInvalid(f"{where}: expected str, got {got}", ran="no")
    if not 1 <= len(key) <= 255:
        raise KeyInvalid(f"{where}: expected 1 to 255 characters, got {len(key)}", ran="no")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise KeyInvalid(f"{where}: expected printable ASCII characters without spaces", ran="no")
    return key


# --- the identity of params -----------------------------------------------------------------------

_QUOTED_KEY = f'"{KEY}"'.encode()

# Bytes. Larger params may hold many objects.
LARGE = 1 << 16

# An integer with more zeros at its end is written with an exponent: `1e999999` must not become a
# million digits.
MOST_ZEROS = 20
_MANY_ZEROS = b"0" * (MOST_ZEROS + 1)
_LONG_INTEGER = rb'("[^"\\]*+(?:\\.[^"\\]*+)*+")|(-?[0-9]{%d,}+)(?![.eE])' % (MOST_ZEROS + 2)


def fingerprint(params: Raw | UnsetType, place: "KeyPlace | None" = None) -> bytes:
    """Return SHA-256 of the params in canonical form.

    Members are sorted, and numbers have their exact value: 1 equals 1.0 and 1e0. The key and
    `_meta` may differ from one attempt to the next, so they do not count.
    """
    value = _decode_exact(_written(params))
    if type(value) is dict:
        value.pop(KEY, None)
        value.pop(META, None)
        if place is not None:
            place.take(value)
            place.forget(value)
    return sha256(_encode_sorted(value)).digest()


def _written(params: Raw | UnsetType) -> bytes:
    if params is UNSET:
        return b"{}"
    return bytes(params)


def _decode_exact(text: bytes) -> Json:
    """Return params as plain values, in which every number has its exact value."""
    if text.find(_MANY_ZEROS) >= 0:
        import re  # late: few params come here

        # The decoder passes only fractions and exponents to `_exact`, so long integers get an
        # exponent.
        text = re.sub(
            _LONG_INTEGER, lambda found: found[1] or found[2] + b"e0", text, flags=re.DOTALL
        )
    # While many objects are made, the garbage collector would scan all of them several times and
    # find nothing: five times the work.
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
    """Return a number with a fraction or an exponent as its canonical form.

    Two forms are equal if the values are. 15 digits are what every float keeps, so a number that
    has no more is written as the float. A longer one is written with all its digits.
    """
    if len(text) <= 16 and 1e-290 < abs(value := float(text)) < 2**53:
        if value.is_integer():
            return int(value)
        return value
    mantissa, _, power = text.lower().partition("e")
    sign = ""
    if mantissa.startswith("-"):
        sign = "-"
    whole, _, fraction = mantissa.lstrip("-").partition(".")
    digits = (whole + fraction).lstrip("0")
    if not digits:
        return 0
    significant = digits.rstrip("0")
    exponent = int(power or "0") - len(fraction) + len(digits) - len(significant)
    if 0 <= exponent <= MOST_ZEROS:
        return Raw(f"{sign}{significant}{'0' * exponent}".encode())
    if (
        len(significant) <= 15
        and 1e-290 < abs(value := float(f"{sign}{significant}e{exponent}")) < 1e290
    ):
        return value
    return Raw(f"{sign}{significant}e{exponent}".encode())


_decode_numbers = msgspec.json.Decoder(float_hook=_exact).decode
_encode_sorted = msgspec.json.Encoder(order="deterministic").encode
