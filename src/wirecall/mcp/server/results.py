"""Results: the value of a function as MCP's result, and any result or error as the bytes of an answer.

    a tool       `call_result`      str, content, Struct, dict, ToolResult, ...  ->  content and structuredContent
    a prompt     `prompt_result`    str, Message, or several                     ->  messages
    a resource   `read_result`      str, bytes, Embedded, or several             ->  contents

1. Results are made in the fullest form and encoded once; `project` takes away what an older revision does not know.
   2026-07-28 wants a `resultType` and the server's name in every result; they are put in front of the bytes, so only a
   result with a `_meta` of its own is taken apart again.
2. An id that could not be read is null in the older revisions and left out in the newer ones.
3. An error's message has its reason in it: most clients show nothing else, neither to people nor to models.
4. No reply is longer than `Limits.bytes_out`, be it one answer or an array of them (`Room`): an error takes the place of an
   answer that does not fit, as soon as that is made, so an array keeps no more than one reply may hold.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct

from wirecall.errors import FixedError, InternalError, RpcError
from wirecall.mcp.revisions import Revision
from wirecall.mcp.server.arrays import Incoming
from wirecall.mcp.server.asking import Id
from wirecall.mcp.server.catalog import ResourceEntry, is_object_schema, is_structured, output_schema
from wirecall.mcp.types import PREFIX, Content, Embedded, Message, ToolResult, block
from wirecall.protocol.messages import ErrorObject, JsonObject, encode
from wirecall.server.method import Method

INPUT_REQUIRED = b'{"resultType":"input_required"'  # how a result begins that is a question


class Answers:
    """Makes the answers of one server."""

    def __init__(self, info: dict[str, str], bytes_out: int) -> None:
        self._info = info
        self.bytes_out = bytes_out
        told = encode({f"{PREFIX}serverInfo": info})
        self._stamp = b'"resultType":"complete","_meta":' + told
        self._only_meta = b'"_meta":' + told

    def to(self, id: Id, result: object, revision: Revision) -> bytes:
        """Return the answer to a request, with the members that the revision requires. Raises if it is too long."""
        data = result if isinstance(result, bytes) else encode(result)
        # 2026-07-28: every result has a `resultType`. It is put into the bytes, since decoding a long result only to add a
        # member would cost more than making it.
        if revision.has_result_type:
            if data == b"{}":
                data = b"{" + self._stamp + b"}"
            elif data.startswith(INPUT_REQUIRED):
                data = b"{" + self._only_meta + b"," + data[1:]
            elif b'"_meta"' not in data:
                data = b"{" + self._stamp + b"," + data[1:]
            else:
                members = msgspec.json.decode(data)
                meta = {**members.get("_meta", {}), f"{PREFIX}serverInfo": self._info}
                data = encode({"resultType": "complete", **members, "_meta": meta})
        answer = success(id, data)
        if len(answer) > self.bytes_out:
            raise self.too_long()
        return answer

    def too_long(self) -> RpcError:
        """Return the error in place of an answer that is too long."""
        reason = f"the answer is longer than {self.bytes_out} bytes"
        return InternalError(reason, type="limit_exceeded", limit="bytes_out", max=self.bytes_out, ran="yes")


class Room:
    """The bytes that the answers of one array may still take."""

    def __init__(self, answers: Answers, revision: Revision) -> None:
        self._answers = answers
        self._left = answers.bytes_out
        self._revision = revision

    async def kept(self, entry: Incoming, answer: bytes | None) -> bytes | None:
        """Return the answer to an entry, or an error in place of one that does not fit."""
        if answer is None:
            return None
        if len(answer) > self._left:
            answer = failure(entry.id, self._answers.too_long(), self._revision)
            await asyncio.sleep(0)  # making and encoding a long answer blocks the loop: other calls get their turn
        self._left -= len(answer)
        return answer


def success(id: Id, result: bytes) -> bytes:
    """Return the answer that carries a result."""
    told = b"%d" % id if type(id) is int else encode(id)
    return b'{"jsonrpc":"2.0","id":' + told + b',"result":' + result + b"}"


def failure(id: object, error: RpcError, revision: Revision | None) -> bytes:
    """Return the answer that reports an error. Without a revision, none was negotiated yet."""
    reason = error.data.get("reason") if isinstance(error, FixedError) and isinstance(error.data, dict) else None
    words = f"{error.message}: {reason}" if reason and not error.is_remote else error.message
    body = encode(ErrorObject(error.code, words, UNSET if error.data is None else error.data))
    if id is not None and id is not UNSET:
        return b'{"jsonrpc":"2.0","id":' + encode(id) + b',"error":' + body + b"}"
    # JSON-RPC 2.0, section 5: the id of an unreadable request is null. From 2025-11-25 on MCP's schema has no null there.
    if revision is None or revision.value("id of an unreadable message") == "null":
        return b'{"jsonrpc":"2.0","id":null,"error":' + body + b"}"
    return b'{"jsonrpc":"2.0","error":' + body + b"}"


# --- values of functions ----------------------------------------------------------------------------------------


class CallResult(Struct, omit_defaults=True):
    """The result of `tools/call`, in the fullest form."""

    content: list[JsonObject]
    structured: Any = msgspec.field(default=UNSET, name="structuredContent")
    is_error: bool = msgspec.field(default=False, name="isError")
    meta: Any = msgspec.field(default=UNSET, name="_meta")


_decode_result = msgspec.json.Decoder(CallResult).decode
_PLAIN = frozenset({int, float, bool, dict})


def call_result(method: Method) -> Callable[[Any], CallResult]:
    """Return the function that makes a result of a tool's value."""
    declared = is_structured(method)

    def shape(value: Any) -> CallResult:
        if declared and type(value) in _PLAIN:
            sealed = Raw(encode(value))
            return CallResult([_text(value, sealed)], sealed)
        if isinstance(value, ToolResult):
            structured = UNSET if value.structured is UNSET else Raw(encode(value.structured))
            blocks = [block(item) for item in value.content]
            if structured is not UNSET and not blocks:
                blocks = [_text(value.structured, structured)]
            return CallResult(blocks, structured, value.is_error, UNSET if value.meta is None else value.meta)
        if isinstance(value, Content):
            return CallResult([value.on_wire()])
        if isinstance(value, (list, tuple)) and value and all(isinstance(item, Content) for item in value):
            return CallResult([item.on_wire() for item in value])
        if declared or isinstance(value, dict):
            sealed = Raw(encode(value))
            return CallResult([_text(value, sealed)], sealed)
        return CallResult([] if value is None else [_text(value, None)])

    return shape


def _text(value: object, sealed: Raw | None) -> JsonObject:
    """Return the text beside structured content, for clients that read only text (server/tools, "Structured Content")."""
    text = value if isinstance(value, str) else bytes(sealed if sealed is not None else encode(value)).decode()
    return {"type": "text", "text": text}


def project(result: bytes, method: Method, revision: Revision) -> CallResult:
    """Return a tool's result in the words of a revision: unknown members are left out, unknown content becomes text."""
    told = _decode_result(result)
    told.content = [revision.known(item) for item in told.content]
    shape = revision.value("structured")
    if shape is None:
        told.structured = UNSET
    elif shape == "object" and told.structured is not UNSET:
        schema = output_schema(method)
        if not isinstance(told.structured, dict) or (schema is not None and not is_object_schema(schema)):
            told.structured = {"result": told.structured} if schema is not None else UNSET
    return told


def prompt_result(method: Method) -> Callable[[Any], JsonObject]:
    """Return the function that makes a result of a prompt's value."""
    described = {"description": method.description} if method.description else {}

    def shape(value: Any) -> JsonObject:
        items = value if isinstance(value, (list, tuple)) else [value]
        messages = [item if isinstance(item, Message) else Message("user", item) for item in items]
        return {**described, "messages": [message.on_wire() for message in messages]}

    return shape


def read_result(resource: ResourceEntry, uri: str) -> Callable[[Any], JsonObject]:
    """Return the function that makes a result of a resource's value: text, bytes, or anything else as JSON."""

    def shape(value: Any) -> JsonObject:
        contents, mime_type = [], resource.mime_type
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, Embedded):
                found = item
            elif isinstance(item, bytes):
                found = Embedded(uri, blob=item, mime_type=mime_type or "application/octet-stream")
            elif isinstance(item, str):
                found = Embedded(uri, text=item, mime_type=mime_type or "text/plain")
            else:
                found = Embedded(uri, text=encode(item).decode(), mime_type=mime_type or "application/json")
            contents.append(found.contents())
        return {"contents": contents}

    return shape


def completed(value: Iterable[object]) -> JsonObject:
    """Return the result of a completion: at most 100 values travel, the rest is only counted."""
    values = [str(item) for item in value]
    return {"completion": {"values": values[:100], "total": len(values), "hasMore": len(values) > 100}}
