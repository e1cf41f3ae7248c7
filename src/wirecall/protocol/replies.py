"""The messages that a client receives: bytes to answers, requests and notifications.

Reading never raises: a text that is not a message becomes an `Unreadable` with the reason. A result stays raw until its type
is known.
"""

from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall import errors
from wirecall.errors import FixedError, RpcError, rebuilt
from wirecall.protocol.messages import ErrorObject, Json, decode_items, decode_value, opens_array


class Arrived(Struct, frozen=True):
    """A message from a server: an answer, or a request or notification (MCP alone has those)."""

    jsonrpc: Literal["2.0"]
    id: int | str | float | UnsetType | None = UNSET
    result: Raw | UnsetType = UNSET
    error: ErrorObject | UnsetType = UNSET
    method: str | UnsetType = UNSET
    params: Raw | UnsetType = UNSET

    @property
    def is_answer(self) -> bool:
        return self.method is UNSET


class Unreadable(Struct, frozen=True):
    """A text that is not a message, and the reason."""

    reason: str
    id: Json = UNSET


Message: TypeAlias = Arrived | Unreadable

# A decoder raises these for data that it cannot read: not JSON, not the type, not UTF-8, too deep.
UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)

_decode = msgspec.json.Decoder(Arrived | list[Arrived]).decode
_decode_one = msgspec.json.Decoder(Arrived).decode


def read_messages(data: bytes) -> tuple[bool, list[Message]]:
    """Return whether a text is an array, and the messages in it."""
    try:
        read = _decode(data)
        if not data.isascii():
            data.decode()  # raw slices are not checked by the decoder
        return (True, [_checked(message) for message in read]) if type(read) is list else (False, [_checked(read)])
    except UNREADABLE:
        pass  # all of it is broken, or single entries are
    try:
        data.decode()
        if not opens_array(data):
            return False, [_salvage(data)]
        return True, [_salvage(bytes(item)) for item in decode_items(data)]
    except UNREADABLE as error:
        return False, [Unreadable(f"not JSON: {str(error) or type(error).__name__}")]


def _checked(message: Arrived) -> Message:
    """Return a message if it is sound. An answer has an id, and either a result or an error (JSON-RPC 2.0, section 5)."""
    if message.method is UNSET and (message.id is UNSET and message.error is UNSET):
        return Unreadable("an answer without an id")
    if message.method is UNSET and (message.result is UNSET) == (message.error is UNSET):
        return Unreadable("an answer has either a result or an error", message.id)
    return message


def _salvage(data: bytes) -> Message:
    try:
        return _checked(_decode_one(data))
    except msgspec.ValidationError as error:
        value = decode_value(data)
        return Unreadable(f"not a JSON-RPC message: {error}", value.get("id", UNSET) if isinstance(value, dict) else UNSET)


# --- errors ---------------------------------------------------------------------------------------------------------

_FIXED: list[type[FixedError]] = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, FixedError) and kind is not FixedError
]
_BY_TYPE = {(kind.CODE, kind.TYPE): kind for kind in _FIXED if kind.TYPE}
_BY_CODE = {kind.CODE: kind for kind in _FIXED if not kind.TYPE}


def remote_error(error: ErrorObject) -> RpcError:
    """Return a server's error as the exception of its code, and of the `data.type` that our servers send along."""
    data = None if error.data is UNSET else error.data
    kind = data.get("type") if isinstance(data, dict) else None
    found: type[RpcError] | None = _BY_TYPE.get((error.code, kind)) if isinstance(kind, str) else None
    return rebuilt(found or _BY_CODE.get(error.code) or RpcError, error.code, error.message, data)
