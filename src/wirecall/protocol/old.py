"""JSON-RPC 1.0 beside 2.0: a single request of 1.0, and the answer in its form.

1.0 differs (its specification, section 1): a request lacks `jsonrpc`; a notification has the id
null; an answer has both `result` and `error`, one of them null. Arrays of requests came with 2.0,
so they are not read here.
"""

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.protocol.messages import UNREADABLE, JsonObject, encode, opens_array

# Values of `jsonrpc` by which clients mean 1.0. Any other comes from a 2.0 client that spells it
# differently.
_VERSIONS = frozenset({b'"1.0"', b'"1.1"', b"1.0", b"1.1", b"1"})
_NULL = Raw(b"null")


class OldRequest(Struct):
    """A single request or notification of JSON-RPC 1.0."""

    method: str
    params: Raw | UnsetType = UNSET
    id: Raw | UnsetType = UNSET
    jsonrpc: Raw | UnsetType = UNSET

    @property
    def has_null_id(self) -> bool:
        return self.id is not UNSET and bytes(self.id) == b"null"


class _NewAnswer(Struct):
    id: Raw
    result: Raw = _NULL
    error: Raw = _NULL


class _OldAnswer(Struct):
    result: Raw
    error: Raw
    id: Raw


_decode_request = msgspec.json.Decoder(OldRequest).decode
_decode_answer = msgspec.json.Decoder(_NewAnswer).decode


def read_old(data: bytes) -> OldRequest | None:
    """Return a request of JSON-RPC 1.0; None for any other message, even an unreadable one."""
    if opens_array(data):
        return None
    try:
        request = _decode_request(data)
    except UNREADABLE:
        return None
    if request.jsonrpc is not UNSET and bytes(request.jsonrpc) not in _VERSIONS:
        return None
    return request


def as_notification(request: OldRequest) -> bytes:
    """Return a request without its id, as a notification of 2.0."""
    members: JsonObject = {"jsonrpc": "2.0", "method": request.method}
    if request.params is not UNSET:
        members["params"] = request.params
    return encode(members)


def as_old_answer(answer: bytes) -> bytes:
    """Return an answer of 2.0 in the form of 1.0."""
    new = _decode_answer(answer)
    return encode(_OldAnswer(new.result, new.error, new.id))
