"""The messages of one body or one line: a single message, or an array as 2025-03-26 has it.

`read` gives one message or the messages of an array, as JSON-RPC has them; one that is not a message is `Invalid` and knows
its error. `admitted` decides whether an array may pass: only at 2025-03-26, and only in the shapes that revision has. An
array that may not pass is refused whole, before anything of it runs (V2, V3).
"""

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import InvalidRequest
from wirecall.mcp.revisions import Revision
from wirecall.mcp.types import PREFIX
from wirecall.protocol import messages as frames
from wirecall.protocol.messages import Envelope, Invalid, Limits


class ClientAnswer(Struct, frozen=True):
    """A client's answer to a question of the server."""

    jsonrpc: str
    id: int | str
    result: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET


class _Keys(Struct):
    meta: dict[str, Raw] = msgspec.field(default_factory=dict, name="_meta")


Incoming: TypeAlias = Envelope | ClientAnswer | Invalid

_decode_response = msgspec.json.Decoder(ClientAnswer).decode
_decode_items = msgspec.json.Decoder(list[Raw]).decode
_decode_keys = msgspec.json.Decoder(_Keys).decode
_VERSION = b"protocolVersion"


def read(data: bytes, limits: Limits) -> "Incoming | list[Incoming]":
    """Return one message, or the messages of an array."""
    found = frames.read(data, True, limits.bytes_in, limits.depth, limits.batch)
    entries: list[Incoming] = []
    items: Sequence[bytes | Raw] | None = None  # decoded only where an entry is not a request
    for position, entry in enumerate(found if isinstance(found, list) else (found,)):
        if isinstance(entry, Envelope):
            # MCP's own rules (basic, "Requests"): an id is a string or an integer, and params are an object.
            id, params = entry.id, entry.params
            if id is not UNSET and type(id) not in (int, str):
                entries.append(Invalid(InvalidRequest("id: expected a string or an integer")))
            elif params is not UNSET and not bytes(params).startswith(b"{"):
                entries.append(Invalid(InvalidRequest("params: expected an object"), None if id is UNSET else id))
            else:
                entries.append(entry)
            continue
        assert isinstance(entry, Invalid)  # strict reading gives nothing else
        message: Incoming = entry
        if type(entry.error) is InvalidRequest:
            # JSON-RPC does not take it for a request, so it may be the client's answer to a question of the server.
            items = items or (_decode_items(data) if isinstance(found, list) else (data,))
            try:
                response = _decode_response(items[position])
                if response.jsonrpc == "2.0" and (response.result is UNSET) != (response.error is UNSET):
                    message = response
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                pass  # not an answer either
        entries.append(message)
    return entries if isinstance(found, list) else entries[0]


def has_envelope(message: Envelope) -> bool:
    """Return whether a message has the version of an envelope, valid or not, as the messages of 2026-07-28 do."""
    if message.params is UNSET or _VERSION not in bytes(message.params):
        return False
    try:
        return f"{PREFIX}protocolVersion" in _decode_keys(message.params).meta
    except msgspec.ValidationError:  # params by position, or a `_meta` that is not an object
        return False


def admitted(entries: "Sequence[Incoming]", revision: Revision | None) -> "list[Incoming]":
    """Return the entries of an array that may pass; InvalidRequest if it may not. No revision: none was negotiated yet."""
    # Step 1: an array must not hold `initialize` (2025-03-26, lifecycle, "Initialization"), nor an envelope.
    has_requests = has_responses = describes_itself = False
    for entry in entries:
        if isinstance(entry, Envelope):
            if entry.method == "initialize":
                raise InvalidRequest("initialize may not be part of an array: send it alone, and nothing before its answer")
            has_requests = True
            describes_itself = describes_itself or has_envelope(entry)
        elif isinstance(entry, ClientAnswer):
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
    seen: set[object] = set()
    kept: list[Incoming] = []
    for entry in entries:
        id = entry.id if isinstance(entry, Envelope) else UNSET
        doubled = id is not UNSET and id in seen
        seen.add(id)
        kept.append(Invalid(InvalidRequest(f"id: {id!r} was used before in the same array")) if doubled else entry)
    return kept
