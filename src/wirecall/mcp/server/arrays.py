"""What one body or one line may hold: a message, or the array of messages that 2025-03-26 has.

`read` gives one message or the messages of an array, as JSON-RPC has them; one that is not a message is `Invalid` and knows
its error. `admitted` decides whether an array may pass: only at 2025-03-26, and only in the shapes that revision has. An
array that may not pass is refused whole, before anything of it runs (V2, V3).
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import InvalidRequest
from wirecall.mcp.revisions import Revision
from wirecall.mcp.types import PREFIX
from wirecall.protocol import messages as frames
from wirecall.protocol.limits import Limits
from wirecall.protocol.messages import Envelope, Invalid


class Response(Struct, frozen=True):
    """A client's answer to a question of ours."""

    jsonrpc: str
    id: int | str
    result: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET


class _Keys(Struct):
    meta: dict[str, Raw] = msgspec.field(default_factory=dict, name="_meta")


Incoming: TypeAlias = Envelope | Response | Invalid

_decode_response = msgspec.json.Decoder(Response).decode
_decode_items = msgspec.json.Decoder(list[Raw]).decode
_decode_keys = msgspec.json.Decoder(_Keys).decode
_VERSION = b"protocolVersion"


def read(data: bytes, limits: Limits) -> "Incoming | list[Incoming]":
    """Return one message, or the messages of an array."""
    found = frames.read(data, True, limits.bytes_in, limits.depth, limits.batch)
    if not isinstance(found, list):
        return _judged(found, data)
    entries: list[Incoming] = []
    items: list[Raw] | None = None  # needed only where an entry is not a request
    for position, entry in enumerate(found):
        if type(entry) is not Envelope and items is None:
            items = _decode_items(data)
        entries.append(_judged(entry, b"" if items is None else items[position]))
    return entries


def _judged(message: Any, data: Any) -> Incoming:
    """Return a message by MCP's own rules: an id is a string or an integer, and params are an object. What JSON-RPC does not
    take for a request may be a client's answer to a question of ours."""
    if type(message) is Envelope:
        id, params = message.id, message.params
        if id is not UNSET and type(id) not in (int, str):
            return Invalid(InvalidRequest("id: expected a string or an integer"))
        if params is not UNSET and not bytes(params).startswith(b"{"):
            return Invalid(InvalidRequest("params: expected an object"), None if id is UNSET else id)
        return message
    invalid: Invalid = message
    if type(invalid.error) is InvalidRequest:
        try:
            response = _decode_response(data)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return invalid
        if response.jsonrpc == "2.0" and (response.result is UNSET) != (response.error is UNSET):
            return response
    return invalid


def has_envelope(message: Envelope) -> bool:
    """Return whether a message describes itself, as those of 2026-07-28 do: rightly or wrongly, the key is there."""
    if message.params is UNSET or _VERSION not in bytes(message.params):
        return False
    try:
        return f"{PREFIX}protocolVersion" in _decode_keys(message.params).meta
    except msgspec.ValidationError:  # params by position, or a `_meta` that is not an object
        return False


def admitted(entries: "Sequence[Incoming]", revision: Revision | None) -> "list[Incoming]":
    """Return the entries of an array that may pass; InvalidRequest if it may not. No revision: none was negotiated yet."""
    # Step 1: nothing in it that arrays must not hold.
    has_requests = has_responses = describes_itself = False
    for entry in entries:
        if isinstance(entry, Envelope):
            if entry.method == "initialize":
                raise InvalidRequest("initialize may not be part of an array: send it alone, and nothing before its answer")
            has_requests = True
            describes_itself = describes_itself or has_envelope(entry)
        elif isinstance(entry, Response):
            has_responses = True
    if describes_itself:
        raise InvalidRequest("MCP 2026-07-28 has no arrays: send each message alone")
    # Step 2: a revision that has arrays, and the shapes that it has.
    if revision is None:
        raise InvalidRequest("no revision is negotiated yet, so an array is not allowed: send initialize first, alone")
    if not revision.has_arrays:
        raise InvalidRequest(f"MCP {revision.name} has no arrays: send each message alone", revision=revision.name)
    if has_requests and has_responses:
        raise InvalidRequest("an array holds requests and notifications, or responses, not both")
    # Step 3: ids. The second entry with an id is refused: its answer could be taken for that of the first.
    seen: set[Any] = set()
    kept: list[Incoming] = []
    for entry in entries:
        id = entry.id if isinstance(entry, Envelope) else UNSET
        doubled = id is not UNSET and id in seen
        seen.add(id)
        kept.append(Invalid(InvalidRequest(f"id: {id!r} was used before in the same array")) if doubled else entry)
    return kept
