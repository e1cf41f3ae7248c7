"""The gate between bytes and messages: what one line or one body may hold.

`read` gives one message or the messages of an array, as JSON-RPC has them; a message that is none is `Invalid` and knows its
error. `check_array` decides whether an array may pass: only at 2025-03-26, and only in the shapes that revision has. An
array that may not pass is refused whole, before anything of it runs (V2, V3).
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import InvalidRequest
from wirecall.mcp.revisions import Revision
from wirecall.mcp.types import PREFIX, Params
from wirecall.protocol import messages as frames
from wirecall.protocol.limits import Limits
from wirecall.protocol.messages import Envelope, Invalid


class Response(Struct, frozen=True):
    """A client's answer to a question of ours."""

    jsonrpc: str
    id: int | str
    result: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET


Incoming: TypeAlias = Envelope | Response | Invalid

_decode_response = msgspec.json.Decoder(Response).decode
_decode_items = msgspec.json.Decoder(list[Raw]).decode
_decode_params = msgspec.json.Decoder(Params).decode


class _Keys(Struct):
    meta: dict[str, Raw] = msgspec.field(default_factory=dict, name="_meta")


_decode_keys = msgspec.json.Decoder(_Keys).decode
_VERSION = b"protocolVersion"


def read(data: bytes, limits: Limits) -> "Incoming | list[Incoming]":
    """One message, or the messages of an array."""
    found = frames.read(data, True, limits.bytes_in, limits.depth, limits.batch)
    if type(found) is Envelope:
        return _checked(found)
    if isinstance(found, list):
        return _read_array(data, found)
    if isinstance(found, Invalid) and type(found.error) is InvalidRequest:  # no request, but perhaps an answer
        return _response(data) or found
    return _checked(found)


def _read_array(data: bytes, found: Sequence[Any]) -> "list[Incoming]":
    if not any(isinstance(entry, Invalid) for entry in found):
        return [_checked(entry) for entry in found]
    items = _decode_items(data)
    pairs = zip(found, items, strict=True)
    return [_checked(entry if isinstance(entry, Envelope) else _response(item) or entry) for entry, item in pairs]


def _response(data: bytes | Raw) -> Response | None:
    try:
        response = _decode_response(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    is_one = response.jsonrpc == "2.0" and (response.result is UNSET) != (response.error is UNSET)
    return response if is_one else None


def _checked(message: Any) -> Incoming:
    """MCP's own rules: an id is a string or an integer, never null and never a fraction; params are an object."""
    checked: Incoming = message
    if type(message) is not Envelope:
        return checked
    id, params = message.id, message.params
    if id is not UNSET and type(id) not in (int, str):
        return Invalid(InvalidRequest("id: expected a string or an integer"))
    if params is not UNSET and not bytes(params).startswith(b"{"):
        return Invalid(InvalidRequest("params: expected an object"), None if id is UNSET else id)
    return checked


def meta_of(message: Envelope) -> Params:
    """The `_meta` of a message's params; a misfit in it is told as such."""
    return Params() if message.params is UNSET else _decode_params(message.params)


def check_array(entries: "Sequence[Incoming]", revision: Revision | None) -> None:
    """Raises if an array may not pass. No revision: nothing was negotiated yet."""
    if any(isinstance(entry, Envelope) and entry.method == "initialize" for entry in entries):
        raise InvalidRequest("initialize may not be part of an array: send it alone, and nothing before its answer")
    if any(isinstance(entry, Envelope) and has_envelope(entry) for entry in entries):
        raise InvalidRequest("MCP 2026-07-28 has no arrays: send each message alone")
    if revision is None:
        raise InvalidRequest("no revision is negotiated yet, so an array is not allowed: send initialize first, alone")
    if not revision.has_arrays:
        raise InvalidRequest(f"MCP {revision.name} has no arrays: send each message alone", revision=revision.name)
    kinds = {type(entry) for entry in entries} - {Invalid}
    if kinds == {Envelope, Response}:
        raise InvalidRequest("an array holds requests and notifications, or responses, not both")


def has_envelope(message: Envelope) -> bool:
    """Whether a message describes itself, as those of 2026-07-28 do: rightly or wrongly, by the presence of the key."""
    if message.params is UNSET or _VERSION not in bytes(message.params):
        return False
    try:
        return f"{PREFIX}protocolVersion" in _decode_keys(message.params).meta
    except msgspec.ValidationError:  # params by position, or a `_meta` that is none
        return False


def without_doubles(entries: "Sequence[Incoming]") -> "list[Incoming]":
    """The second message with an id of the same array breaks the rule of ids; its answer could be taken for the first's."""
    seen: set[Any] = set()
    kept: list[Incoming] = []
    for entry in entries:
        id = entry.id if isinstance(entry, Envelope) else UNSET
        doubled = id is not UNSET and id in seen
        seen.add(id)
        kept.append(Invalid(InvalidRequest(f"id: {id!r} was used before in the same array")) if doubled else entry)
    return kept
