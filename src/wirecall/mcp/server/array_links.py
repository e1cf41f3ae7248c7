"""References between the requests of an array of MCP 2025-03-26 (R13).

A request has its references in `params._meta`: `io.wirecall/refs` is an object as the `refs` of
JSON-RPC, with places in `params` ("/arguments/order"), and `io.wirecall/after` is a list of ids. A
path starts in the result of the target: "/structuredContent/orders/0/id". It may use structured
content, which this revision itself does not send.
"""

from collections.abc import Awaitable, Callable, Sequence

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import ReferenceInvalid, ReferencesOff, RpcError, ToolError
from wirecall.mcp.server.catalog import Catalog
from wirecall.mcp.server.messages import Incoming
from wirecall.mcp.server.peer import Linked
from wirecall.mcp.types import AFTER_META, ERROR_META, REFS_META, CallTool
from wirecall.protocol.keys import KeyPlace
from wirecall.protocol.messages import Envelope, Id, Json, JsonObject
from wirecall.server.linking import Outcomes, scope_fault
from wirecall.server.policy import fingerprint, identify
from wirecall.server.references import (
    LIMITS,
    NO_LINKS,
    Links,
    Room,
    blocked,
    call_digest,
    fill,
    make_plan,
    read_references,
    reference_digest,
)

# Answers a request that has the values of its references.
Respond = Callable[[Incoming, Linked], Awaitable[bytes | None]]


class _Meta(Struct):
    refs: Json = msgspec.field(default=UNSET, name=REFS_META)
    after: Json = msgspec.field(default=UNSET, name=AFTER_META)


class _Params(Struct):
    meta: _Meta = msgspec.field(default_factory=_Meta, name="_meta")


class _Answer(Struct):
    result: Raw | UnsetType = UNSET
    error: JsonObject | UnsetType = UNSET


class _ToolResult(Struct):
    content: list[JsonObject] = []
    is_error: bool = msgspec.field(default=False, name="isError")
    meta: JsonObject = msgspec.field(default_factory=dict, name="_meta")


_decode_params = msgspec.json.Decoder(_Params).decode
_decode_call = msgspec.json.Decoder(CallTool).decode
_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_tool_result = msgspec.json.Decoder(_ToolResult).decode


def _has_links(entry: Incoming) -> bool:
    """Return whether a request of an array may have references."""
    if not isinstance(entry, Envelope) or entry.params is UNSET:
        return False
    params = bytes(entry.params)
    return params.find(REFS_META.encode()) >= 0 or params.find(AFTER_META.encode()) >= 0


class ArrayLinks:
    """Answers the requests of one array, those with references after their targets."""

    def __init__(self, entries: Sequence[Incoming], catalog: Catalog, *, allowed: bool) -> None:
        self._entries = entries
        self._catalog = catalog
        self._allowed = allowed
        ids = [_target_id(entry) for entry in entries]
        self._plan = make_plan(ids, [self._links(entry) for entry in entries]).entries
        self._ended: Outcomes[bytes | RpcError] = Outcomes(self._plan)
        self._room = Room()

    def _links(self, entry: Incoming) -> Links | RpcError:
        """Return the references of a request, or the error that answers it."""
        if not _has_links(entry):
            return NO_LINKS
        assert isinstance(entry, Envelope) and entry.params is not UNSET
        try:
            meta = _decode_params(entry.params).meta
            if meta.refs is UNSET and meta.after is UNSET:
                return NO_LINKS
            if not self._allowed:
                raise ReferencesOff(
                    "this server does not allow references: send the calls one by one", ran="no"
                )
            links = read_references(meta.refs, meta.after, entry.params)
            if links.refs:
                self._check_tool(entry)
        except msgspec.ValidationError:  # `_meta` is not an object: the request is refused for it
            return NO_LINKS
        except RpcError as error:
            return error
        return links

    def _check_tool(self, entry: Envelope) -> None:
        """Raise if a request cannot take references: its scopes may depend on its params."""
        if entry.method != "tools/call":
            raise ReferenceInvalid("only tools/call takes references", ran="no")
        assert entry.params is not UNSET
        tool = self._catalog.registry.called.get(_decode_call(entry.params).name)
        if tool is not None and (fault := scope_fault(tool)) is not None:
            raise fault

    async def answer(self, position: int, respond: Respond) -> bytes | None:
        """Return the answer to a request, when its targets have ended."""
        linked = Linked()
        try:
            message = await self._filled(position, linked)
            answer = await respond(message, linked)
        except RpcError as error:
            self._ended.note(position, error)
            raise
        except BaseException:
            self._ended.note(position, RpcError(-32603, "cancelled"))
            raise
        if position in self._ended.targets:
            self._ended.note(position, _outcome(answer, linked))
        return answer

    async def _filled(self, position: int, linked: Linked) -> Incoming:
        """Return a request with the values of its references."""
        entry = self._entries[position]
        planned = self._plan[position]
        if planned.error is not None:
            raise planned.error
        if not planned.waits_for:
            return entry
        assert isinstance(entry, Envelope) and entry.params is not UNSET
        await self._ended.wait(planned)
        for target in planned.waits_for:
            ended = self._ended[target]
            if isinstance(ended, RpcError):
                raise blocked(_shown_id(self._entries[target]), ended)
        if not planned.links.refs:
            return entry
        results = [self._ended[source] for source in planned.sources]
        values = [result for result in results if isinstance(result, bytes)]
        filled = fill(bytes(entry.params), planned.links.refs, values, LIMITS, self._room)
        linked.digest = self._digest(position)
        return msgspec.structs.replace(entry, params=Raw(filled))

    def _digest(self, position: int) -> bytes:
        """Return the fingerprint of a request, as R9 defines it."""
        entry = self._entries[position]
        assert isinstance(entry, Envelope)
        sent = entry.params
        place: KeyPlace | None = None
        if entry.method == "tools/call" and sent is not UNSET:
            call = _decode_call(sent)
            sent = call.arguments
            place = self._key_place(call)
        planned = self._plan[position]
        targets = [self._call_digest(source) for source in planned.sources]
        return reference_digest(fingerprint(sent, place), planned.links.refs, targets)

    def _key_place(self, call: CallTool) -> KeyPlace | None:
        """Return where the tool of a call has its key, besides the usual places."""
        tool = self._catalog.registry.called.get(call.name)
        if tool is None:
            return None
        return tool.key_place

    def _call_digest(self, position: int) -> bytes:
        entry = self._entries[position]
        assert isinstance(entry, Envelope)
        name = entry.method
        key: str | None = None
        if name == "tools/call" and entry.params is not UNSET:
            call = _decode_call(entry.params)
            name = f"tools/call:{call.name}"
            meta = UNSET if call.meta is UNSET else call.meta.key
            place = self._key_place(call)
            key, _ = identify(call.arguments, meta, call.idempotency_key, call.key, place=place)
        return call_digest(name, key, self._digest(position))


def _target_id(entry: Incoming) -> Id | UnsetType:
    if not isinstance(entry, Envelope) or entry.id is None:
        return UNSET
    return entry.id


def _shown_id(entry: Incoming) -> Id:
    assert isinstance(entry, Envelope)
    return None if entry.id is UNSET else entry.id


def _outcome(answer: bytes | None, linked: Linked) -> bytes | RpcError:
    """Return the result of a target, or its error. A tool may report one in its result."""
    if linked.result is not None:
        return _tool_outcome(linked.result)
    if answer is None:
        return RpcError(-32603, "cancelled")
    read = _decode_answer(answer)
    if read.error is not UNSET:
        return RpcError(read.error["code"], read.error["message"], read.error.get("data"))
    assert read.result is not UNSET
    return bytes(read.result)


def _tool_outcome(result: bytes) -> bytes | RpcError:
    read = _decode_tool_result(result)
    if not read.is_error:
        return result
    text = "\n".join(str(each.get("text", "")) for each in read.content)
    reported = read.meta.get(ERROR_META)
    if reported is None:
        return ToolError(text)
    return RpcError(reported["code"], text, reported.get("data"))
