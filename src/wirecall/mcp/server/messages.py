"""MCP's messages: reading those of a client, and making the answers to them as bytes.

1. A body or a line is one message, or an array of them as 2025-03-26 has it. `read` uses JSON-RPC's
   reader and adds MCP's own rules; a message that breaks one is `Invalid` and carries its error.
   `admitted` decides whether to accept an array: only at 2025-03-26, and only in the shapes that
   this revision has. Any other array is refused whole, before any of its entries runs (V2, V3).
2. 2026-07-28 requires a `resultType` and the server's name in every result. `Answers` puts them in
   front of the bytes, so it decodes only a result that already has a `_meta`.
3. An error's message contains its reason: most clients show nothing else to people or models.
4. An answer, whether a result or an error, has at most `Limits.bytes_out`: an error replaces a
   longer one.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import (
    EncodeError,
    FixedError,
    InternalError,
    InvalidParams,
    InvalidRequest,
    RpcError,
)
from wirecall.limits import Limits
from wirecall.logs import failed
from wirecall.mcp.revisions import Revision
from wirecall.mcp.types import ERROR_META, PREFIX
from wirecall.protocol import messages as jsonrpc
from wirecall.protocol.messages import Envelope, ErrorObject, Invalid, encode

Id = int | str

# The first bytes of a result that is a question, and of one that is a task.
INPUT_REQUIRED = b'{"resultType":"input_required"'
A_TASK = b'{"resultType":"task"'
# The first bytes of a result that states its type.
_TYPED = b'{"resultType":'


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
_decode_members: Callable[[Any], dict[str, Raw]] = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_keys = msgspec.json.Decoder(_Keys).decode


def read(data: bytes, limits: Limits) -> "Incoming | list[Incoming]":
    """Return one message, or the messages of an array."""
    found = jsonrpc.read(data, limits)
    if isinstance(found, list):
        # Only a message that is not a request needs its bytes: it may be an answer.
        items: Sequence[bytes | Raw] = [b""] * len(found)
        if not all(isinstance(entry, Envelope) for entry in found):
            items = _decode_items(data)
        return [_checked(entry, item) for entry, item in zip(found, items, strict=True)]
    return _checked(found, data)


def _checked(entry: "jsonrpc.Message | Invalid", data: bytes | Raw) -> Incoming:
    """Return a message by MCP's own rules (basic, "Requests").

    An id is a string or an integer, and params are an object.
    """
    if isinstance(entry, Envelope):
        id = entry.id
        params = entry.params
        if id is not UNSET and type(id) is not int and type(id) is not str:
            return Invalid(InvalidRequest("id: expected a string or an integer"))
        if params is not UNSET and not bytes(params).startswith(b"{"):
            refusal = InvalidRequest("params: expected an object")
            return Invalid(refusal) if id is UNSET else Invalid(refusal, id)
        return entry
    assert isinstance(entry, Invalid)  # strict reading gives nothing else
    if type(entry.error) is InvalidRequest:
        # JSON-RPC does not take it for a request, so it may be the client's answer to a question of
        # the server.
        try:
            answer = _decode_answer(data)
            if answer.jsonrpc == "2.0" and (answer.result is UNSET) != (answer.error is UNSET):
                return answer
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            pass  # not an answer either
    return entry


def has_envelope(message: Envelope) -> bool:
    """Return whether a message has the version of an envelope, valid or not.

    The messages of 2026-07-28 have one.
    """
    if message.params is UNSET or bytes(message.params).find(b"protocolVersion") < 0:
        return False
    try:
        return f"{PREFIX}protocolVersion" in _decode_keys(message.params).meta
    except msgspec.ValidationError:  # params by position, or a `_meta` that is not an object
        return False


def admitted(entries: "Sequence[Incoming]", revision: Revision | None) -> "list[Incoming]":
    """Return the entries of an array, or raise InvalidRequest.

    `revision` is None before negotiation.
    """
    # Step 1: an array must not hold `initialize` (2025-03-26, lifecycle, "Initialization") or an
    # envelope.
    has_requests = has_responses = describes_itself = False
    for entry in entries:
        if isinstance(entry, Envelope):
            if entry.method == "initialize":
                raise InvalidRequest(
                    "initialize may not be part of an array: "
                    "send it alone, and nothing before its answer"
                )
            has_requests = True
            describes_itself = describes_itself or has_envelope(entry)
        elif isinstance(entry, ClientAnswer):
            has_responses = True
    if describes_itself:
        raise InvalidRequest("MCP 2026-07-28 has no arrays: send each message alone")
    # Step 2: a revision that has arrays, and the shapes that it has (2025-03-26, transports,
    # "Receipt Messages to the Server").
    if revision is None:
        raise InvalidRequest(
            "no revision is negotiated yet, so an array is not allowed: "
            "send initialize first, alone"
        )
    if not revision.has_arrays:
        raise InvalidRequest(
            f"MCP {revision.name} has no arrays: send each message alone", revision=revision.name
        )
    if has_requests and has_responses:
        raise InvalidRequest("an array holds requests and notifications, or responses, not both")
    # Step 3: ids. The second entry with an id is refused: a client could confuse its answer with
    # the first.
    seen: set[object] = set()
    kept: list[Incoming] = []
    for entry in entries:
        if not isinstance(entry, Envelope) or entry.id is UNSET:
            kept.append(entry)
        elif entry.id in seen:
            reason = f"id: {entry.id!r} was used before in the same array"
            kept.append(Invalid(InvalidRequest(reason)))
        else:
            seen.add(entry.id)
            kept.append(entry)
    return kept


# --- answers --------------------------------------------------------------------------------------


class Answers:
    """Makes the answers of one server."""

    def __init__(self, info: dict[str, str], bytes_out: int) -> None:
        self._info = info
        self.bytes_out = bytes_out
        meta = encode({f"{PREFIX}serverInfo": info})
        self._stamp = b'{"resultType":"complete","_meta":' + meta + b","
        self._only_meta = b'{"_meta":' + meta + b","

    def to(self, id: Id, result: object, revision: Revision) -> bytes:
        """Return the answer to a request, with the members that the revision requires.

        Raises if it is too long.
        """
        data = result if isinstance(result, bytes) else encode(result)
        # 2026-07-28: every result has a `resultType`. It is inserted into the bytes: decoding a
        # long result only to add a member would cost more than making the result.
        if revision.has_result_type:
            if data == b"{}":
                data = self._stamp[:-1] + b"}"
            elif data.find(b'"_meta"') < 0:
                data = (self._only_meta if data.startswith(_TYPED) else self._stamp) + data[1:]
            else:
                data = self._with_info(data)
        written_id = b"%d" % id if type(id) is int else encode(id)
        answer = b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (written_id, data)
        if len(answer) > self.bytes_out:
            raise self.too_long(answer)
        return answer

    def _with_info(self, data: bytes) -> bytes:
        """Return a result that has a `_meta` with this server's name in it.

        The other members keep their bytes.
        """
        members: dict[str, object] = {**_decode_members(data)}
        meta: dict[str, object] = {}
        if "_meta" in members:
            meta = {**_decode_members(members["_meta"])}
        info = meta.get(f"{PREFIX}serverInfo")
        # `server/discover` describes this server in full.
        if info is None or not self._is_described(info):
            meta[f"{PREFIX}serverInfo"] = self._info
        return encode({"resultType": "complete", **members, "_meta": meta})

    def _is_described(self, info: Any) -> bool:
        """Return whether a description of a server has this server's name and version."""
        described = msgspec.json.decode(info)
        return isinstance(described, dict) and self._info.items() <= described.items()

    def failure(self, id: object, error: RpcError, revision: Revision | None) -> bytes:
        """Return the answer that reports an error. `revision` is None before negotiation."""
        answer = _failure(id, error, revision)
        if len(answer) > self.bytes_out:
            return _failure(id, self.too_long(answer), revision)
        return answer

    def too_long(self, answer: bytes) -> RpcError:
        """Return the error that replaces an answer that is too long.

        It keeps the `ran` of that answer.
        """
        members = msgspec.json.decode(answer)
        result = members.get("result", {})
        error = members.get("error") or result.get("_meta", {}).get(ERROR_META)
        if isinstance(error, dict) and type(error.get("code")) is int:
            ran = RpcError(error["code"], "", error.get("data")).ran
        elif result.get("resultType") == "input_required":
            ran = "unknown"
        else:
            ran = "yes"
        reason = f"the answer is longer than {self.bytes_out} bytes"
        return InternalError(
            reason, type="limit_exceeded", limit="bytes_out", max=self.bytes_out, ran=ran
        )


def error_object(error: RpcError) -> ErrorObject:
    """Return the `error` member that reports an error."""
    message = error.message
    if isinstance(error, FixedError) and isinstance(error.data, dict) and not error.is_remote:
        reason = error.data.get("reason")
        if reason:
            message = f"{message}: {reason}"
    return ErrorObject(error.code, message, UNSET if error.data is None else error.data)


def _failure(id: object, error: RpcError, revision: Revision | None) -> bytes:
    """Return the answer that reports an error, however long it is."""
    try:
        body = encode(error_object(error))
    except EncodeError as reason:  # the handler wrote the message and the data
        failed("an error", id, reason)
        body = encode(error_object(InternalError()))
    if id is not None and id is not UNSET:
        # Raw keeps the digits of a number.
        written_id = bytes(id) if isinstance(id, Raw) else encode(id)
        return b'{"jsonrpc":"2.0","id":' + written_id + b',"error":' + body + b"}"
    # JSON-RPC 2.0, section 5: the id of an unreadable request is null. From 2025-11-25 on MCP's
    # schema has no null there.
    if revision is None or revision.value("id of an unreadable message") == "null":
        return b'{"jsonrpc":"2.0","id":null,"error":' + body + b"}"
    return b'{"jsonrpc":"2.0","error":' + body + b"}"
