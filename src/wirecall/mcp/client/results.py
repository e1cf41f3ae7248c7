"""The results of a server: its lists, and the answers of its tools, prompts and resources.

1. A list consists of all its pages, which share the timeout of one call. A cursor is any string,
   even an empty one; only its absence ends a list. If the server no longer knows a cursor, the list
   has changed: the client reads it again, once.
2. If the server sets a time (2026-07-28, `ttlMs`), the client caches a list that long; each page
   has its own time, and the first that expires ends it for all. A notification of a change ends it
   at once. Older revisions set no time, so the client caches nothing.
3. The contents of a resource are cached in the same way, at most `READS` of them with `READ_BYTES`
   in total.
4. The hints and marks of tools, which calls need, are at most `KNOWN` seconds old, or as old as the
   list may be.
5. Members that a struct does not name are dropped, except in schemas, which are kept unchanged. The
   client resolves nothing in them, and never fetches a `$ref` (2026-07-28, JSON Schema usage). An
   unreadable entry of a list is omitted with a warning; the rest of the list stays.
6. Hints are the server's claims about itself. Without them, `Tool.read_only` and its neighbours
   return the specification's defaults, which are the pessimistic ones. `trust=` decides whether the
   client believes hints.
"""

import base64
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import BadAnswer, InvalidParams, RpcError, TimedOut, ToolError
from wirecall.logs import logger
from wirecall.mcp.headers import Marks, fault_of, marked
from wirecall.mcp.revisions import Revision
from wirecall.mcp.types import (
    BATCH_META,
    ERROR_META,
    REPLAYED_META,
    Audio,
    Content,
    Embedded,
    Image,
    ResourceLink,
    Role,
    Text,
)
from wirecall.protocol.keys import marked_path
from wirecall.protocol.messages import UNREADABLE, ErrorObject, JsonObject, remote_error
from wirecall.protocol.models import wanted
from wirecall.protocol.params import tool_name_of

T = TypeVar("T")
C = TypeVar("C", bound=Content)

# Max per list: a server that sends more repeats itself.
PAGES = 1000
LIST_BYTES = 100 << 20
KNOWN = 60.0  # seconds
READS = 100
READ_BYTES = 10 << 20


class ToolHints(Struct, frozen=True, rename="camel"):
    """A tool's annotations, unchanged."""

    title: str | None = None
    read_only_hint: bool | None = None
    destructive_hint: bool | None = None
    idempotent_hint: bool | None = None
    open_world_hint: bool | None = None


class Tool(Struct, frozen=True, rename="camel"):
    """A tool that a server offers."""

    name: str
    input_schema: JsonObject = {}
    title: str | None = None
    description: str | None = None
    output_schema: JsonObject | None = None
    annotations: ToolHints | None = None
    meta: JsonObject | None = msgspec.field(default=None, name="_meta")

    @property
    def label(self) -> str:
        """The label to show: the title, the title in the annotations, or the name."""
        if self.title:
            return self.title
        if self.annotations is not None and self.annotations.title:
            return self.annotations.title
        return self.name

    @property
    def read_only(self) -> bool:
        return self.annotations is not None and self.annotations.read_only_hint is True

    @property
    def destructive(self) -> bool:
        return not self.read_only and (
            self.annotations is None or self.annotations.destructive_hint is not False
        )

    @property
    def idempotent(self) -> bool:
        return self.read_only or (
            self.annotations is not None and self.annotations.idempotent_hint is True
        )

    @property
    def open_world(self) -> bool:
        return self.annotations is None or self.annotations.open_world_hint is not False


class PromptArgument(Struct, frozen=True):
    """An argument of a prompt."""

    name: str
    title: str | None = None
    description: str | None = None
    required: bool = False


class Prompt(Struct, frozen=True):
    """A prompt that a server offers."""

    name: str
    title: str | None = None
    description: str | None = None
    arguments: list[PromptArgument] = []
    meta: JsonObject | None = msgspec.field(default=None, name="_meta")


class Resource(Struct, frozen=True, rename="camel"):
    """A resource that a server offers."""

    uri: str
    name: str = ""
    title: str | None = None
    description: str | None = None
    mime_type: str | None = None
    size: int | None = None
    meta: JsonObject | None = msgspec.field(default=None, name="_meta")


class Template(Struct, frozen=True, rename="camel"):
    """A resource template: `{names}` in its URI stand for values."""

    uri_template: str
    name: str = ""
    title: str | None = None
    description: str | None = None
    mime_type: str | None = None
    meta: JsonObject | None = msgspec.field(default=None, name="_meta")


def read_entries(entries: Iterable[Raw], kind: type[T]) -> list[T]:
    """Return the entries of a list that can be read."""
    found = []
    for entry in entries:
        try:
            found.append(msgspec.json.decode(entry, type=kind))
        except UNREADABLE as error:
            logger.warning("an entry of the server's list is left out: %s", error)
    return found


def safest_first(tools: Iterable[Tool], is_trusted: Callable[[Tool], bool]) -> list[Tool]:
    """Sort tools: read-only ones, additive, destructive, then untrusted ones.

    Otherwise they stay in the server's order.
    """

    def danger(tool: Tool) -> tuple[bool, ...]:
        if not is_trusted(tool):
            return (True,)
        return (False, not tool.read_only, tool.destructive, not tool.idempotent, tool.open_world)

    return sorted(tools, key=danger)


# --- lists ----------------------------------------------------------------------------------------


Offer = TypeVar("Offer", Tool, Prompt, Resource, Template)

# The method of each list, and the member of its result that holds the entries.
_LISTS: dict[type, tuple[str, str]] = {
    Tool: ("tools/list", "tools"),
    Prompt: ("prompts/list", "prompts"),
    Resource: ("resources/list", "resources"),
    Template: ("resources/templates/list", "resourceTemplates"),
}
# The lists that a change affects.
_CHANGED: dict[str, tuple[type, ...]] = {
    "tools": (Tool,),
    "prompts": (Prompt,),
    "resources": (Resource, Template),
    "updated": (),
}


_Ask: TypeAlias = Callable[[str, JsonObject | None, Callable[[Raw], Raw], float], Awaitable[Raw]]


class _Kept(Struct):
    entries: list[Any]
    until: float
    # Bytes of JSON.
    size: int = 0


class Lists:
    """The lists of one server."""

    def __init__(self, ask: _Ask, now: Callable[[], float], timeout: float) -> None:
        # Headers repeat the arguments of tools, so marks must be valid.
        self.has_headers = False
        # The arguments that headers repeat, by tool.
        self.marks: dict[str, Marks] = {}
        # Tools with invalid marks.
        self.left_out: set[str] = set()
        # The number of calls of `forget`. A result requested before such a call may be outdated.
        self.changes = 0
        # Calls a method of MCP.
        self._ask = ask
        self._now = now
        self._timeout = timeout
        self._kept: dict[type, _Kept] = {}
        # The contents of resources by URI, the oldest first.
        self._read: dict[str, _Kept] = {}
        self._tools: dict[str, Tool] = {}
        # By tool: the place of its key that the schema marks.
        self.key_paths: dict[str, tuple[str, ...]] = {}
        self._known_until = 0.0

    async def read(self, kind: type[Offer], timeout: float | None = None) -> list[Offer]:
        """Return all entries of a list."""
        kept = self._kept.get(kind)
        if kept is None or self._now() >= kept.until:
            before = self.changes
            kept = self._kept[kind] = await self._pages(
                kind, self._timeout if timeout is None else timeout
            )
            if self.changes != before:
                kept.until = 0.0
            if kind is Tool:
                self._learn_tools(kept)
        return list(kept.entries)

    def _learn_tools(self, kept: _Kept) -> None:
        """Keep what calls need to know about tools.

        A tool with invalid marks is omitted, as the specification requires.
        """
        tools: list[Tool] = kept.entries
        self.left_out = set()
        self.marks = {}
        if self.has_headers:
            faults = {tool.name: fault_of(tool.input_schema) for tool in tools}
            self.left_out = {name for name, fault in faults.items() if fault}
            for name in sorted(self.left_out):
                logger.warning("the tool %r is left out: %s", name, faults[name])
            tools = [tool for tool in tools if tool.name not in self.left_out]
            marks = {tool.name: marked(tool.input_schema) for tool in tools}
            self.marks = {name: found for name, found in marks.items() if found}
        kept.entries = tools
        paths = {tool.name: marked_path(tool.input_schema) for tool in tools}
        self.key_paths = {name: path for name, path in paths.items() if path}
        self._tools = {tool.name: tool for tool in tools}
        self._known_until = max(kept.until, self._now() + KNOWN)

    async def tool(self, name: str, timeout: float) -> Tool | None:
        """Return the server's description of a tool; None if it lists no tool with that name.

        A wirecall server lists `orders.count` as `orders_count`, and accepts calls by both names.
        """
        if self._listed(name) is None or self._now() >= self._known_until:
            await self.read(Tool, timeout)
        return self._listed(name)

    @property
    def are_known(self) -> bool:
        """Whether the tools were listed, and the list is not too old."""
        return self._now() < self._known_until

    def known(self, name: str) -> Tool | None:
        """Return a tool of the last list."""
        return self._listed(name)

    def batch_tool(self) -> Tool | None:
        """Return the tool of the last list that calls other tools (A13)."""
        for tool in self._tools.values():
            if tool.meta is not None and BATCH_META in tool.meta:
                return tool
        return None

    def marks_of(self, name: str) -> Marks:
        """Return the arguments of a tool that headers repeat."""
        return self.marks.get(name) or self.marks.get(tool_name_of(name), {})

    def key_path_of(self, name: str) -> tuple[str, ...]:
        """Return the place of the key among the arguments of a tool, besides the usual one."""
        return self.key_paths.get(name) or self.key_paths.get(tool_name_of(name), ())

    def _listed(self, name: str) -> Tool | None:
        return self._tools.get(name) or self._tools.get(tool_name_of(name))

    def contents(self, uri: str) -> list[Embedded] | None:
        """Return the cached contents of a resource, or None."""
        kept = self._read.get(uri)
        if kept is None or self._now() >= kept.until:
            return None
        return list(kept.entries)

    def keep(self, uri: str, raw: Raw, before: int) -> list[Embedded]:
        """Return the contents in a result, and cache them for the time that it sets.

        `before` is `changes` before the request: if it has grown since, the result may be outdated.
        """
        contents = read_contents(raw)
        size = memoryview(raw).nbytes
        self._read.pop(uri, None)
        ttl = _ttl(msgspec.json.decode(raw, type=dict[str, Raw]))
        if ttl > 0 and size <= READ_BYTES and self.changes == before:
            self._read[uri] = _Kept(contents, self._now() + ttl, size)
            while (
                len(self._read) > READS
                or sum(kept.size for kept in self._read.values()) > READ_BYTES
            ):
                del self._read[next(iter(self._read))]
        return list(contents)

    def forget(self, changed: str | None = None, uri: str | None = None) -> None:
        """Drop the lists or the resource that changed; None: everything may have changed."""
        self.changes += 1
        if changed == "updated":
            self._read.pop(uri or "", None)
        elif changed in (None, "resources"):
            self._read.clear()
        kinds: Iterable[type] = _LISTS
        if changed is not None:
            kinds = _CHANGED[changed]
        for kind in kinds:
            self._kept.pop(kind, None)
            if kind is Tool:
                self._known_until = 0.0

    async def _pages(self, kind: type[Any], seconds: float) -> _Kept:
        method, member = _LISTS[kind]
        too_late = f"{method}: the list did not end within {seconds:g} s"
        left = seconds
        deadline = self._now() + seconds
        is_again = False
        kept = _Kept([], float("inf"))
        seen = set[str]()
        cursor: str | None = None
        while len(seen) <= PAGES and kept.size <= LIST_BYTES:
            try:
                params = None if cursor is None else {"cursor": cursor}
                raw = await self._ask(method, params, lambda raw: raw, left)
            except TimedOut:
                if not seen:
                    raise
                raise TimedOut(too_late) from None
            except InvalidParams as error:
                # A server answers a cursor that it does not know with -32602 (2025-03-26,
                # pagination).
                if cursor is None:
                    raise
                if is_again:
                    reason = f"the server's list changes faster than it can be read: {error}"
                    raise RpcError(error.code, reason) from None
                is_again = True
                kept = _Kept([], float("inf"))
                seen = set()
                cursor = None
            else:
                try:
                    page = msgspec.json.decode(raw, type=dict[str, Raw])
                    if member not in page:
                        raise BadAnswer(f"{method}: the result has no {member!r}", ran="yes")
                    kept.entries += read_entries(
                        msgspec.json.decode(page[member], type=list[Raw]), kind
                    )
                    cursor = msgspec.json.decode(
                        page.get("nextCursor", Raw(b"null")), type=str | None
                    )
                except UNREADABLE as error:
                    raise BadAnswer(f"a list that cannot be read: {error}", ran="yes") from None
                kept.size += memoryview(raw).nbytes
                kept.until = min(kept.until, self._now() + _ttl(page))
                if cursor is None:
                    return kept
                if cursor in seen:
                    break
                seen.add(cursor)
            left = deadline - self._now()
            if left <= 0:
                raise TimedOut(too_late)
        raise BadAnswer(f"{method}: the list has no end", ran="yes")


def _ttl(result: dict[str, Raw]) -> float:
    """Return the seconds to cache a result: 0 if its `ttlMs` is missing or invalid."""
    try:
        return max(0.0, msgspec.json.decode(result.get("ttlMs", Raw(b"0")), type=float) / 1000)
    except UNREADABLE:
        return 0.0


# --- results --------------------------------------------------------------------------------------


class _Answer(Struct, rename="camel"):
    content: list[JsonObject] = []
    structured_content: Any = UNSET
    is_error: bool | None = None
    meta: JsonObject | None = msgspec.field(default=None, name="_meta")


class TypedAnswer(_Answer, rename="camel"):
    """The unchanged result of a tool, with its type."""

    # Older servers omit it (2026-07-28, basic).
    result_type: str = "complete"


_decode_answer = msgspec.json.Decoder(_Answer).decode
decode_typed = msgspec.json.Decoder(TypedAnswer).decode


class Called(Struct, frozen=True):
    """The result of a tool. `structured` is UNSET if it has no structured content."""

    content: list[Content]
    structured: Any
    is_error: bool
    meta: JsonObject

    @property
    def text(self) -> str:
        """All the text in it."""
        return "\n".join(item.text for item in self.content if isinstance(item, Text))

    @property
    def replayed(self) -> bool:
        """Whether it is the recorded answer of an earlier attempt."""
        return self.meta.get(REPLAYED_META) is True

    def error(self) -> RpcError | None:
        """Return the error as an exception.

        It is the one that a wirecall server names, or a `ToolError` with the text. Other servers
        report invalid arguments in the same way as a failed tool, so `ran` is "unknown" for them.
        """
        if not self.is_error:
            return None
        named = self.meta.get(ERROR_META)
        if not isinstance(named, dict):
            error = ToolError(self.text)
            error.ran = "unknown"
            return error
        code = named.get("code")
        if isinstance(code, int) and code != ToolError("").code:
            return remote_error(ErrorObject(code, self.text, named.get("data", UNSET)))
        return ToolError(self.text, named.get("data"))


def read_called(raw: Raw | bytes, answer: _Answer | None = None) -> Called:
    """Return the result of a tool; `answer` is the result if it is already decoded."""
    try:
        answer = answer or _decode_answer(raw)
    except UNREADABLE as error:
        raise _misfit(error) from None
    content = list(map(_block, answer.content))
    return Called(content, answer.structured_content, answer.is_error is True, answer.meta or {})


def as_type(called: Called, type: Any) -> Any:
    """Return a tool's answer as a Python type.

    The answer is its structured content, or its text, as JSON or unchanged. Until 2025-11-25 structured
    content is an object, so servers put any other value under `result`.
    """
    value = called.structured
    reader = wanted(type)
    try:
        if value is UNSET and type is str:
            return called.text
        if value is UNSET:
            return reader.read(called.text.encode())
        try:
            return reader.convert(value)
        except UNREADABLE:
            if not (isinstance(value, dict) and list(value) == ["result"]):
                raise
            return reader.convert(value["result"])
    except UNREADABLE as error:
        raise _misfit(error) from None


class _Parts(Struct, rename="camel"):
    """The parts of a tool's result that a reference may name."""

    content: list[JsonObject] = []
    structured_content: Raw | UnsetType = UNSET


_decode_parts = msgspec.json.Decoder(_Parts).decode


def referred_value(raw: Raw, path: Sequence[str], revision: Revision) -> bytes:
    """Return the value of a tool's result that a reference points into, as JSON (A2).

    It is the structured content, or else the text as a string. Until 2025-11-25 structured content
    is an object, so servers put any other value under `result`. Revisions without structured
    content have the JSON of the value as text.
    """
    try:
        parts = _decode_parts(raw)
    except UNREADABLE as error:
        raise _misfit(error) from None
    structured = parts.structured_content
    if structured is not UNSET:
        is_object = bytes(structured).startswith(b"{")
        if revision.structured == "any" or path[:1] == ("result",) or not is_object:
            return bytes(structured)
        members = _decoded(structured, dict[str, Raw])
        if list(members) == ["result"]:
            return bytes(members["result"])
        return bytes(structured)
    texts = [str(each.get("text")) for each in parts.content if each.get("type") == "text"]
    if len(texts) != 1:
        return msgspec.json.encode(texts or None)
    if revision.structured is None:
        with suppress(*UNREADABLE):
            return bytes(msgspec.json.decode(texts[0].encode(), type=Raw))
    return msgspec.json.encode(texts[0])


def _decoded(raw: Raw | bytes, wanted: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=wanted)
    except UNREADABLE as error:
        raise _misfit(error) from None


def _misfit(error: Exception) -> BadAnswer:
    return BadAnswer(
        f"the result is not of the wanted type: {str(error)[:1].lower()}{str(error)[1:]}", ran="yes"
    )


class Prompted(Struct, frozen=True):
    """The result of a prompt."""

    messages: "list[Said]"
    description: str | None = None


class Said(Struct, frozen=True):
    """One message of a prompt."""

    role: Role
    content: Content

    @property
    def text(self) -> str:
        if isinstance(self.content, Text):
            return self.content.text
        return ""


class _Prompted(Struct):
    messages: list[JsonObject] = []
    description: str | None = None


def read_prompted(raw: Raw | bytes) -> Prompted:
    answer = _decoded(raw, _Prompted)
    said = [
        Said(message.get("role", "user"), _block(message.get("content")))
        for message in answer.messages
    ]
    return Prompted(said, answer.description)


class _Contents(Struct):
    contents: list[JsonObject] = []


def read_contents(raw: Raw | bytes) -> list[Embedded]:
    return [_embedded(item) for item in _decoded(raw, _Contents).contents]


class Completion(Struct, frozen=True, rename="camel"):
    """Values that complete the user's input."""

    values: list[str] = []
    total: int | None = None
    has_more: bool | None = None


class _Completed(Struct):
    completion: Completion


def read_completion(raw: Raw | bytes) -> Completion:
    return _decoded(raw, _Completed).completion


# --- content --------------------------------------------------------------------------------------


class Unknown(Content, frozen=True):
    """Content of a kind that this library does not know, with its members."""

    members: JsonObject

    def on_wire(self) -> JsonObject:
        return self.members


def _block(item: Any) -> Content:
    kind = None
    if isinstance(item, dict):
        kind = item.get("type", "")
    if not isinstance(kind, str):
        raise BadAnswer(
            f"content: expected an object with a type, got {str(item)[:100]!a}", ran="yes"
        )
    if kind == "text" and len(item) == 2 and isinstance(item.get("text"), str):
        return Text(item["text"])  # nearly all content
    shared = {"annotations": item.get("annotations"), "meta": item.get("_meta")}
    try:
        read: Content = _BLOCKS[kind](item, shared)
        return _fitting(read)
    except KeyError:
        return Unknown(members=item, **shared)
    except (TypeError, ValueError) as error:
        raise BadAnswer(f"content that cannot be read: {error}", ran="yes") from None


def _embedded(item: Any, shared: JsonObject | None = None) -> Embedded:
    if not (isinstance(item, dict) and isinstance(item.get("uri"), str)):
        raise BadAnswer("a resource without a URI", ran="yes")
    try:
        blob = None
        if isinstance(item.get("blob"), str):
            blob = base64.b64decode(item["blob"])
    except ValueError as error:
        raise BadAnswer(f"a blob that is not base64: {error}", ran="yes") from None
    return _fitting(
        Embedded(item["uri"], item.get("text"), blob, item.get("mimeType"), **(shared or {}))
    )


def _fitting(content: C) -> C:
    """Return content if its members have the right types: a server may send any."""
    try:
        return msgspec.convert(msgspec.structs.asdict(content), type(content))
    except msgspec.ValidationError as error:
        raise BadAnswer(f"content that cannot be read: {error}", ran="yes") from None


_BLOCKS: JsonObject = {
    "text": lambda item, shared: Text(item["text"], **shared),
    "image": lambda item, shared: Image(base64.b64decode(item["data"]), item["mimeType"], **shared),
    "audio": lambda item, shared: Audio(base64.b64decode(item["data"]), item["mimeType"], **shared),
    "resource_link": lambda item, shared: ResourceLink(
        item["uri"],
        item.get("name", ""),
        title=item.get("title"),
        description=item.get("description"),
        mime_type=item.get("mimeType"),
        size=item.get("size"),
        **shared,
    ),
    "resource": lambda item, shared: _embedded(item["resource"], shared),
}
