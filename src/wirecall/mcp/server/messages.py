"""MCP's messages: those of a client as they are read, and the answers to them as bytes.

1. A body or a line is one message, or an array of them as 2025-03-26 has it. `read` takes JSON-RPC's reader and adds MCP's
   own rules; a message that breaks one is `Invalid` and knows its error. `admitted` decides whether an array may pass: only
   at 2025-03-26, and only in the shapes that revision has. An array that may not is refused whole, before anything of it
   runs (V2, V3).
2. 2026-07-28 wants a `resultType` and the server's name in every result. `Answers` puts them in front of the bytes, so only
   a result with a `_meta` of its own is taken apart again.
3. An error's message has its reason in it: most clients show nothing else, neither to people nor to models.
4. No answer is longer than `Limits.bytes_out`, whether a result or an error: an error takes the place of one that is.
"""

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import EncodeError, FixedError, InternalError, InvalidParams, InvalidRequest, RpcError
from wirecall.logs import failed
from wirecall.mcp.revisions import Revision
from wirecall.mcp.types import ERROR_META, PREFIX
from wirecall.protocol import messages as jsonrpc
from wirecall.protocol.messages import Envelope, ErrorObject, Invalid, Limits, encode

Id = int | str

# How a result begins that is a question, and one that is a task.
INPUT_REQUIRED, A_TASK = b'{"resultType":"input_required"', b'{"resultType":"task"'
_TYPED = b'{"resultType":'  # how a result begins that says itself of which type it is


class ClientAnswer(Struct, frozen=True):
    """A client's answer to a question of the server."""

    jsonrpc: str
    id: Id
    result: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET


class BadEnvelope(InvalidParams):
    """The envelope of a request lacks a member that it must have."""


class _Keys(Struct):
    meta: dict[str, Raw] = msgspec.field(default_factory=dict, name="_meta")


Incoming: TypeAlias = Envelope | ClientAnswer | Invalid

_decode_answer = msgspec.json.Decoder(ClientAnswer).decode
_decode_items = msgspec.json.Decoder(list[Raw]).decode
_decode_keys = msgspec.json.Decoder(_Keys).decode


def read(data: bytes, limits: Limits) -> "Incoming | list[Incoming]":
    """Return one message, or the messages of an array."""
    found = jsonrpc.read(data, limits)
    if isinstance(found, list):
        items = None if all(isinstance(entry, Envelope) for entry in found) else _decode_items(data)
        return [_checked(entry, b"" if items is None else items[position]) for position, entry in enumerate(found)]
    return _checked(found, data)


def _checked(entry: "jsonrpc.Message | Invalid", data: bytes | Raw) -> Incoming:
    """Return a message by MCP's own rules (basic, "Requests"): an id is a string or an integer, and params are an object."""
    if isinstance(entry, Envelope):
        id, params = entry.id, entry.params
        if id is not UNSET and type(id) is not int and type(id) is not str:
            return Invalid(InvalidRequest("id: expected a string or an integer"))
        if params is not UNSET and not bytes(params).startswith(b"{"):
            return Invalid(InvalidRequest("params: expected an object"), None if id is UNSET else id)
        return entry
    assert isinstance(entry, Invalid)  # strict reading gives nothing else
    if type(entry.error) is InvalidRequest:
        # JSON-RPC does not take it for a request, so it may be the client's answer to a question of the server.
        try:
            answer = _decode_answer(data)
            if answer.jsonrpc == "2.0" and (answer.result is UNSET) != (answer.error is UNSET):
                return answer
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            pass  # not an answer either
    return entry


def has_envelope(message: Envelope) -> bool:
    """Return whether a message has the version of an envelope, valid or not, as the messages of 2026-07-28 do."""
    if message.params is UNSET or bytes(message.params).find(b"protocolVersion") < 0:
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
    # Step 2: a revision that has arrays, and the shapes that it has (2025-03-26, transports, "Sending Messages to the
    # Server").
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


# --- answers ---------------------------------------------------------------------------------------------------------


class Answers:
    """Makes the answers of one server."""

    def __init__(self, info: dict[str, str], bytes_out: int) -> None:
        self._info = info
        self.bytes_out = bytes_out
        told = encode({f"{PREFIX}serverInfo": info})
        self._stamp = b'{"resultType":"complete","_meta":' + told + b","
        self._only_meta = b'{"_meta":' + told + b","

    def to(self, id: Id, result: object, revision: Revision) -> bytes:
        """Return the answer to a request, with the members that the revision requires. Raises if it is too long."""
        data = result if isinstance(result, bytes) else encode(result)
        # 2026-07-28: every result has a `resultType`. It is put into the bytes, since decoding a long result only to add a
        # member would cost more than making it.
        if revision.has_result_type:
            if data == b"{}":
                data = self._stamp[:-1] + b"}"
            elif data.find(b'"_meta"') < 0:
                data = (self._only_meta if data.startswith(_TYPED) else self._stamp) + data[1:]
            else:
                members = msgspec.json.decode(data)
                meta = {**members.get("_meta", {})}
                told_info = meta.get(f"{PREFIX}serverInfo")
                if not isinstance(told_info, dict) or not self._info.items() <= told_info.items():
                    meta[f"{PREFIX}serverInfo"] = self._info  # else it is this server, described in full
                data = encode({"resultType": "complete", **members, "_meta": meta})
        told = b"%d" % id if type(id) is int else encode(id)
        answer = b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (told, data)
        if len(answer) > self.bytes_out:
            raise self.too_long(answer)
        return answer

    def failure(self, id: object, error: RpcError, revision: Revision | None) -> bytes:
        """Return the answer that reports an error. Without a revision, none was negotiated yet."""
        answer = _failure(id, error, revision)
        return answer if len(answer) <= self.bytes_out else _failure(id, self.too_long(answer), revision)

    def too_long(self, answer: bytes) -> RpcError:
        """Return the error in place of an answer that is too long. It tells of the call what the answer told: `ran`."""
        told = msgspec.json.decode(answer)
        result = told.get("result", {})
        error = told.get("error") or result.get("_meta", {}).get(ERROR_META)
        ran = "unknown" if result.get("resultType") == "input_required" else "yes"
        if isinstance(error, dict) and type(error.get("code")) is int:
            ran = RpcError(error["code"], "", error.get("data")).ran
        reason = f"the answer is longer than {self.bytes_out} bytes"
        return InternalError(reason, type="limit_exceeded", limit="bytes_out", max=self.bytes_out, ran=ran)


def error_object(error: RpcError) -> ErrorObject:
    """Return the `error` member that reports an error."""
    reason = error.data.get("reason") if isinstance(error, FixedError) and isinstance(error.data, dict) else None
    words = f"{error.message}: {reason}" if reason and not error.is_remote else error.message
    return ErrorObject(error.code, words, UNSET if error.data is None else error.data)


def _failure(id: object, error: RpcError, revision: Revision | None) -> bytes:
    """Return the answer that reports an error, however long it is."""
    try:
        body = encode(error_object(error))
    except EncodeError as reason:  # the message and the data are the handler's own
        failed("an error", id, reason)
        body = encode(error_object(InternalError()))
    if id is not None and id is not UNSET:
        told = bytes(id) if isinstance(id, Raw) else encode(id)  # a number that Python would write with other digits
        return b'{"jsonrpc":"2.0","id":' + told + b',"error":' + body + b"}"
    # JSON-RPC 2.0, section 5: the id of an unreadable request is null. From 2025-11-25 on MCP's schema has no null there.
    if revision is None or revision.value("id of an unreadable message") == "null":
        return b'{"jsonrpc":"2.0","id":null,"error":' + body + b"}"
    return b'{"jsonrpc":"2.0","error":' + body + b"}"
