"""Batches through the batch tool of a server, at revisions without arrays (A13).

One call of the tool carries many calls of other tools. Each entry gets from its answer what a
single call would have got: its result or its error, under its own key. References travel as
`{"$ref": "ID#/pointer"}`, and the server resolves them.

An entry is sent in the call of the tool if the tool calls its tool, if it may be repeated, and if
nothing about it needs a separate message: progress, a shorter timeout, members beside the
arguments. A destructive tool is called by the batch tool only after a person has agreed, so it is
sent alone unless this client can ask a person, or the batch tool does not ask. The other entries
are single calls. If entries refer to each other, one that does not fit makes the whole batch waves.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.client.delivery import Delivery, side_by_side
from wirecall.client.exchange import AnyEntry, Entry, EntryLinks, Wire
from wirecall.client.linked import LinkedBatch
from wirecall.errors import (
    BadAnswer,
    ConfirmRequired,
    DependencyFailed,
    InvalidParams,
    RpcError,
)
from wirecall.mcp.client.conversation import Conversation, Extra
from wirecall.mcp.client.results import Tool
from wirecall.mcp.types import BATCH_META, ENTRY_META, ERROR_META, REPLAYED_META
from wirecall.protocol.messages import (
    UNREADABLE,
    ErrorObject,
    JsonObject,
    decode_value,
    encode,
    remote_error,
)
from wirecall.protocol.params import KEY
from wirecall.server.references import LIMITS, LITERAL, REF, ReferenceLimits, read_pointer

# The part of a timeout that finding the tool may take.
LOOKING = 0.5


class _One(Struct):
    """The outcome of one entry in the answer of the tool."""

    id: str
    ok: bool
    result: Raw = Raw(b"null")
    error: ErrorObject | UnsetType = UNSET
    replayed: bool = False


class _Results(Struct):
    results: list[_One]


class _Outer(Struct, rename="camel"):
    """The answer of the tool."""

    content: list[JsonObject] = []
    structured_content: _Results | UnsetType = UNSET
    meta: JsonObject = msgspec.field(default_factory=dict, name="_meta")


_decode_outer = msgspec.json.Decoder(_Outer).decode
_decode_results = msgspec.json.Decoder(_Results).decode


class _HiddenReference(Exception):
    """A reference is inside an object that has to be sent as a literal."""


class ToolBatch(LinkedBatch):
    """Sends the entries of one batch through the batch tool of the server, if it has one."""

    _dialect: Conversation

    def __init__(
        self, delivery: Delivery, conversation: Conversation, entries: list[AnyEntry]
    ) -> None:
        super().__init__(delivery, conversation, entries)
        self._tool: Tool | None = None
        # The tools that the batch tool calls, by their names in lists.
        self._called: set[str] = set()
        self._most = 1

    async def _reference_limits(self, timeout: float) -> ReferenceLimits | None:
        self._tool = await self._dialect.batch_tool(timeout * LOOKING)
        if self._tool is None:
            return None
        self._called = set(_called_by(self._tool.input_schema))
        stated = (self._tool.meta or {}).get(BATCH_META)
        if isinstance(stated, dict) and type(stated.get("calls")) is int:
            self._most = stated["calls"]
        return LIMITS

    async def _send(self, left: list[int], limits: ReferenceLimits | None) -> tuple[Wire, str]:
        is_linked = any(planned.waits_for for planned in self._plan)
        if self._tool is not None and not (is_linked and self._dialect.shows_params):
            if not self._is_prepared:
                await self._prepare(left)
                self._is_prepared = True
            left = self._unblocked(left)
            fitting = [position for position in left if self._fits(position)]
            others = [position for position in left if position not in fitting]
            if is_linked and not others and len(fitting) <= self._most:
                return await self._send_tool([fitting], [])
            if not is_linked and len(fitting) > 1:
                chunks = [
                    fitting[start : start + self._most]
                    for start in range(0, len(fitting), self._most)
                ]
                return await self._send_tool(chunks, others)
        wire = await self._send_waves(left)
        return wire, self._delivery.arrays.reason

    async def _send_tool(self, chunks: list[list[int]], others: list[int]) -> tuple[Wire, str]:
        reason = "the server has a batch tool"
        work = [partial(self._send_chunks, chunks)]
        if others:
            reason += f", and {len(others)} of the entries were sent alone"
            work.append(partial(self._send_alone, others))
        returned = [each for part in await side_by_side(work) for each in part]
        if not returned:
            return "tool", reason
        wire = await self._send_waves(returned)
        if sum(map(len, chunks)) > len(returned):
            return "tool", f"{reason}, which did not run {len(returned)} of the entries"
        return wire, "the server refused the call of its batch tool"

    async def _send_chunks(self, chunks: list[list[int]]) -> list[int]:
        """Send calls of the tool one after another; return the entries that were refused."""
        returned: list[int] = []
        for chunk in chunks:
            returned += await self._send_array(chunk)
        return returned

    async def _send_alone(self, positions: list[int]) -> list[int]:
        await self._send_waves(positions)
        return []

    # --- what fits --------------------------------------------------------------------------------

    def _fits(self, position: int) -> bool:
        """Return whether an entry can be sent in the call of the tool."""
        entry = self._entries[position]
        params = entry.params or {}
        extra: Extra = entry.extra
        is_plain = params.keys() <= {"name", "arguments"} and extra.follower is None
        if entry.method != "tools/call" or not entry.safe or not is_plain:
            return False
        if entry.timeout < max(each.timeout for each in self._entries):
            return False
        tool = self._dialect.lists.known(str(params.get("name")))
        if tool is None or tool.name not in self._called:
            return False
        # A revision without annotations does not say which tools are destructive.
        if tool.annotations is not None and tool.destructive and not self._may_destroy():
            return False
        try:
            links = self._places(position)
            _inline(params.get("arguments") or {}, ("arguments",), links)
        except _HiddenReference:
            return False
        return True

    def _may_destroy(self) -> bool:
        """Return whether the batch tool can call destructive tools."""
        assert self._tool is not None
        hints = self._tool.annotations
        allows = hints is not None and hints.destructive_hint is True
        return allows or self._dialect.can_elicit

    def _places(self, position: int) -> dict[tuple[str, ...], str]:
        """Return the places of references, without the values that they will have."""
        return {ref.place: "" for ref in self._plan[position].links.refs}

    def _is_sent_back(self, entry: AnyEntry) -> bool:
        # The tool asks a person, and this client cannot. A single call needs no consent.
        return isinstance(entry.error, ConfirmRequired) and not self._dialect.can_elicit

    # --- one call of the tool ---------------------------------------------------------------------

    async def _attempt(self, message: list[AnyEntry]) -> bool:
        """Call the tool once, and settle every entry in it.

        Return whether the server refused the call as a whole: nothing of it ran.
        """
        for entry in message:
            entry.is_settled = False
            entry.error = None
            entry.replayed = False
            entry.id = self._delivery.next_id()
        outer = await self._call([self._described(entry) for entry in message])
        for entry in message:
            entry.attempts += outer.attempts
            entry.unclear = entry.unclear or outer.unclear
        if isinstance(outer.error, InvalidParams):
            self._dialect.lists.forget("tools")
            return True
        if outer.error is not None:
            for entry in message:
                # The attempts of the outer call are over, so those of its entries are.
                entry.attempts = self._delivery.options.retry.attempts
                error = copy(outer.error)
                error.__cause__ = outer.error.__cause__
                entry.fail(error)
            return False
        self._settle(message, outer.result())
        return False

    async def _call(self, calls: list[JsonObject]) -> AnyEntry:
        """Return the settled call of the tool. It may be repeated, because each entry may be."""
        assert self._tool is not None
        now = self._delivery.clock.time()
        deadline = max(entry.deadline for entry in self._entries)
        tasks = all(entry.extra.tasks for entry in self._entries)
        extra = Extra(lambda entry: entry.raw, check=False, tasks=tasks)
        outer: AnyEntry = Entry(
            "tools/call",
            {"name": self._tool.name, "arguments": {"calls": calls}},
            self._dialect.read,
            max(deadline - now, 0.001),
            extra=extra,
        )
        outer.safe = True
        outer.deadline = deadline
        await self._delivery.deliver([outer])
        return outer

    def _described(self, entry: AnyEntry) -> JsonObject:
        """Return an entry as the tool takes it."""
        links = entry.links or EntryLinks()
        values = {
            read_pointer(place, "place"): f"{target.id}#{path}"
            for place, target, path in links.refs
        }
        params = entry.params
        described: JsonObject = {
            "id": str(entry.id),
            "tool": params["name"],
            "arguments": _inline(params.get("arguments") or {}, ("arguments",), values),
        }
        if links.after:
            described["after"] = [str(target.id) for target in links.after]
        tool = self._dialect.lists.known(params["name"])
        if entry.key is not None and tool is not None and not tool.read_only:
            described[KEY] = entry.key
        return described

    # --- answers ----------------------------------------------------------------------------------

    def _settle(self, message: list[AnyEntry], raw: Raw) -> None:
        try:
            outer = _decode_outer(raw)
            found = outer.structured_content
            if found is UNSET:
                found = _decode_results(str(outer.content[0]["text"]))
        except (*UNREADABLE, LookupError) as error:
            for entry in message:
                entry.fail(BadAnswer(f"the answer of the batch tool cannot be read: {error}"))
            return
        count = Counter(each.id for each in found.results)
        by_id = {each.id: each for each in found.results if count[each.id] == 1}
        media = [each for each in outer.content if _entry_of(each) is not None]
        for entry in message:
            one = by_id.get(str(entry.id))
            if one is None:
                name = entry.params["name"]
                entry.fail(BadAnswer(f"{name}: the batch tool gave no single answer to this call"))
                continue
            own = [each for each in media if _entry_of(each) == one.id]
            self._settle_one(entry, one, own, outer.meta)
            entry.replayed = one.replayed

    def _settle_one(
        self, entry: AnyEntry, one: _One, media: list[JsonObject], meta: JsonObject
    ) -> None:
        """Give an entry what a single call of its tool would have given."""
        if one.ok:
            tool = self._dialect.lists.known(entry.params["name"])
            assert self._dialect.revision is not None
            structure = self._dialect.revision.structured
            result = _result_of(one, tool, structure, media)
            if meta or one.replayed:
                result["_meta"] = {**meta, **_replay_mark(one)}
            entry.succeed(Raw(encode(result)))
        elif one.error is UNSET:
            entry.fail(BadAnswer("the batch tool gave neither a result nor an error"))
        else:
            self._settle_error(entry, one.error, {**meta, **_replay_mark(one)})

    def _settle_error(self, entry: AnyEntry, error: ErrorObject, meta: JsonObject) -> None:
        """Give an entry the error that a single call would have got: as an error, or in a result."""
        data = error.data
        is_object = isinstance(data, dict)
        if is_object and error.code == DependencyFailed.CODE and str(data.get("id")).isdigit():
            data = {**data, "id": int(data["id"])}
        failure = remote_error(ErrorObject(error.code, error.message, data))
        assert self._dialect.revision is not None
        if not self._dialect.revision.reports_in_result(failure, asks_key=False):
            entry.fail(failure)
            return
        text, details = _reported(failure)
        content = [{"type": "text", "text": text}]
        failed = {"content": content, "isError": True, "_meta": {**meta, ERROR_META: details}}
        entry.succeed(Raw(encode(failed)))


def _reported(error: RpcError) -> tuple[str, JsonObject]:
    """Return the text and the details of an error in the result of a tool."""
    data = error.data
    reason = None
    if isinstance(data, dict):
        reason = data.get("reason")
    # The batch tool adds the reason to the message.
    text = error.message.removesuffix(f": {reason}")
    if isinstance(error, InvalidParams) and isinstance(reason, str):
        text = re.sub(r"(^|; |needs )params\b", r"\1arguments", reason)
        data = {**error.data, "reason": text}
    details: JsonObject = {"code": error.code}
    if data is not None:
        details["data"] = data
    return text, details


def _called_by(schema: JsonObject) -> list[str]:
    """Return the names of the tools that a batch tool calls, from its schema."""
    try:
        names = schema["properties"]["calls"]["items"]["properties"]["tool"]["enum"]
    except (LookupError, TypeError):
        return []
    return [name for name in names if isinstance(name, str)]


def _inline(value: Any, place: tuple[str, ...], refs: Mapping[tuple[str, ...], str]) -> Any:
    """Return arguments with references as values, and other objects with `$ref` as literals."""
    if place in refs:
        return {REF: refs[place]}
    if isinstance(value, Mapping):
        members = {name: _inline(each, (*place, str(name)), refs) for name, each in value.items()}
        for inner in refs:
            if inner[:-1] == place:
                members[inner[-1]] = {REF: refs[inner]}
        if REF in value or value.keys() == {LITERAL}:
            if any(inner[: len(place)] == place for inner in refs):
                raise _HiddenReference
            return {LITERAL: dict(value)}
        return members
    if isinstance(value, (list, tuple)):
        return [_inline(each, (*place, str(index)), refs) for index, each in enumerate(value)]
    return value


def _entry_of(content: JsonObject) -> object:
    """Return the id of the entry that content belongs to, None for that of the batch itself."""
    meta = content.get("_meta")
    if not isinstance(meta, dict):
        return None
    return meta.get(ENTRY_META)


def _result_of(
    one: _One, tool: Tool | None, structure: object, media: Sequence[JsonObject]
) -> JsonObject:
    """Return the result of a tool as a single call has it."""
    schema = None
    if tool is not None:
        schema = tool.output_schema
    value = decode_value(one.result)
    content = [{"type": "text", "text": text} for text in _texts_of(value, one.result, schema)]
    result: JsonObject = {"content": [*content, *map(_without_entry, media)]}
    has_structure = schema is not None or isinstance(value, dict)
    if has_structure and structure == "any":
        result["structuredContent"] = one.result
    elif has_structure and structure == "object":
        is_wrapped = schema is not None and schema.get("required") == ["result"]
        if isinstance(value, dict) and not (is_wrapped and list(value) != ["result"]):
            result["structuredContent"] = one.result
        else:
            result["structuredContent"] = {"result": one.result}
    return result


def _replay_mark(one: _One) -> JsonObject:
    """Return the mark of an answer that came from the server's ledger."""
    if one.replayed:
        return {REPLAYED_META: True}
    return {}


def _texts_of(value: Any, raw: Raw, schema: JsonObject | None) -> list[str]:
    """Return the text blocks of a result. Without structured content they are the result."""
    if isinstance(value, str):
        return [value]
    if schema is None and value is None:
        return []
    is_texts = isinstance(value, list) and all(isinstance(each, str) for each in value)
    if schema is None and is_texts:
        return list(value)
    return [bytes(raw).decode()]


def _without_entry(content: JsonObject) -> JsonObject:
    """Return content without the id of its entry."""
    meta = {name: each for name, each in content["_meta"].items() if name != ENTRY_META}
    rest = {name: each for name, each in content.items() if name != "_meta"}
    if meta:
        rest["_meta"] = meta
    return rest
