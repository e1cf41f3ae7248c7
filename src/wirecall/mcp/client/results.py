"""The results of a server: its lists as a client keeps them, and the answers of its tools, prompts and resources.

1. A list is what all its pages say, and they share the time of one call. A cursor is any text, the empty one too; only its
   absence ends a list. If the server no longer knows a cursor, the list has changed: it is read anew, once.
2. If the server names a time (2026-07-28, `ttlMs`), a list is kept for it; each page has its own clock, and the first that
   runs out ends it for all. A notification of a change ends it at once. Older revisions name no time, so nothing is kept.
3. The contents of a resource are kept in the same way, up to `READS` of them with `READ_BYTES` in all.
4. The hints and marks of tools, which calls need, are at most `KNOWN` seconds old, or as old as the list may be.
5. Members that a struct does not name are dropped, except in schemas: those are kept as they came, keyword by keyword.
   Nothing in them is resolved, and no `$ref` is ever fetched (2026-07-28, JSON Schema usage). An entry of a list that
   cannot be read is left out with a warning; the rest of the list stays.
6. Hints are the server's word about itself. If it says nothing, `Tool.read_only` and its neighbours give the defaults of the
   specification, which are the pessimistic ones. Whether the client believes them, `trust=` says.
"""

import base64
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct

from wirecall.errors import BadAnswer, InvalidParams, RpcError, TimedOut, ToolError
from wirecall.logs import logger
from wirecall.mcp.headers import Marks, fault_of, marked
from wirecall.mcp.types import ERROR_META, REPLAYED_META, Audio, Content, Embedded, Image, ResourceLink, Role, Text
from wirecall.protocol.messages import UNREADABLE, ErrorObject, JsonObject, remote_error
from wirecall.protocol.models import wanted

T = TypeVar("T")
C = TypeVar("C", bound=Content)

PAGES, LIST_BYTES = 1000, 100 << 20  # of one list: more of either is a server that goes in circles
KNOWN = 60.0  # seconds
READS = 100
READ_BYTES = 10 << 20


class ToolHints(Struct, frozen=True, rename="camel"):
    """A tool's annotations, as they came."""

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
        """What to show: the title, that of the annotations, or the name."""
        return self.title or (self.annotations.title if self.annotations else None) or self.name

    @property
    def read_only(self) -> bool:
        return self.annotations is not None and self.annotations.read_only_hint is True

    @property
    def destructive(self) -> bool:
        return not self.read_only and (self.annotations is None or self.annotations.destructive_hint is not False)

    @property
    def idempotent(self) -> bool:
        return self.read_only or (self.annotations is not None and self.annotations.idempotent_hint is True)

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
    """A template of resources: `{names}` in its URI stand for values."""

    uri_template: str
    name: str = ""
    title: str | None = None
    description: str | None = None
    mime_type: str | None = None
    meta: JsonObject | None = msgspec.field(default=None, name="_meta")


def read_entries(entries: Iterable[Raw], kind: type[T]) -> list[T]:
    """Return the entries of a list, without those that cannot be read."""
    found = []
    for entry in entries:
        try:
            found.append(msgspec.json.decode(entry, type=kind))
        except UNREADABLE as error:
            logger.warning("an entry of the server's list is left out: %s", error)
    return found


def safest_first(tools: Iterable[Tool], is_trusted: Callable[[Tool], bool]) -> list[Tool]:
    """Sort tools: read-only, additive, destructive, then those that are not trusted; otherwise in the server's order."""

    def danger(tool: Tool) -> tuple[bool, ...]:
        if not is_trusted(tool):
            return (True,)
        return (False, not tool.read_only, tool.destructive, not tool.idempotent, tool.open_world)

    return sorted(tools, key=danger)


# --- lists -----------------------------------------------------------------------------------------------------------


Offer = TypeVar("Offer", Tool, Prompt, Resource, Template)

# The method of each list, and the member of its result that holds the entries.
_LISTS: dict[type, tuple[str, str]] = {
    Tool: ("tools/list", "tools"),
    Prompt: ("prompts/list", "prompts"),
    Resource: ("resources/list", "resources"),
    Template: ("resources/templates/list", "resourceTemplates"),
}
# The lists that a change is about.
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
    size: int = 0  # bytes of JSON


class Lists:
    """The lists of one server."""

    def __init__(self, ask: _Ask, now: Callable[[], float], timeout: float) -> None:
        self.has_headers = False  # headers repeat the arguments of tools, so their marks have to be sound
        self.marks: dict[str, Marks] = {}
        self.left_out: set[str] = set()  # tools whose marks are not
        self._ask = ask  # calls a method of MCP's own
        self._now = now
        self._timeout = timeout
        self._kept: dict[type, _Kept] = {}
        self._read: dict[str, _Kept] = {}  # contents of resources, by URI, the oldest first
        self._tools: dict[str, Tool] = {}
        self._known_until = 0.0
        self.changes = 0  # counts what was forgotten: something that was read meanwhile may be old already

    async def read(self, kind: type[Offer], timeout: float | None = None) -> list[Offer]:
        """Return all entries of a list."""
        kept = self._kept.get(kind)
        if kept is None or self._now() >= kept.until:
            before = self.changes
            kept = self._kept[kind] = await self._pages(kind, self._timeout if timeout is None else timeout)
            kept.until = kept.until if self.changes == before else 0.0
            if kind is Tool:
                # What calls have to know of tools. One whose marks are not sound is left out, as the specification demands.
                tools: list[Tool] = kept.entries
                faults = {tool.name: fault_of(tool.input_schema) if self.has_headers else None for tool in tools}
                self.left_out = {name for name, fault in faults.items() if fault}
                for name in sorted(self.left_out):
                    logger.warning("the tool %r is left out: %s", name, faults[name])
                kept.entries = tools = [tool for tool in tools if tool.name not in self.left_out]
                self._tools = {tool.name: tool for tool in tools}
                marks = {tool.name: marked(tool.input_schema) for tool in tools} if self.has_headers else {}
                self.marks = {name: found for name, found in marks.items() if found}
                self._known_until = max(kept.until, self._now() + KNOWN)
        return list(kept.entries)

    async def tool(self, name: str, timeout: float) -> Tool | None:
        """Return what the server says of a tool; None if it lists none of that name."""
        if name not in self._tools or self._now() >= self._known_until:
            await self.read(Tool, timeout)
        return self._tools.get(name)

    def contents(self, uri: str) -> list[Embedded] | None:
        """Return the contents of a resource that are kept, or None."""
        kept = self._read.get(uri)
        return None if kept is None or self._now() >= kept.until else list(kept.entries)

    def keep(self, uri: str, raw: Raw, before: int) -> list[Embedded]:
        """Return the contents in a result, and keep them for the time that it names.

        `before` are the changes before the result was asked for: if there were more since, it may be old already.
        """
        contents, size = read_contents(raw), memoryview(raw).nbytes
        self._read.pop(uri, None)
        ttl = _ttl(msgspec.json.decode(raw, type=dict[str, Raw]))
        if ttl > 0 and size <= READ_BYTES and self.changes == before:
            self._read[uri] = _Kept(contents, self._now() + ttl, size)
            while len(self._read) > READS or sum(kept.size for kept in self._read.values()) > READ_BYTES:
                del self._read[next(iter(self._read))]
        return list(contents)

    def forget(self, changed: str | None = None, uri: str | None = None) -> None:
        """Forget what has changed, and the contents of the resource if it is one; None: all may have changed."""
        self.changes += 1
        if changed == "updated":
            self._read.pop(uri or "", None)
        elif changed in (None, "resources"):
            self._read.clear()
        for kind in _LISTS if changed is None else _CHANGED[changed]:
            self._kept.pop(kind, None)
            if kind is Tool:
                self._known_until = 0.0

    async def _pages(self, kind: type[Any], seconds: float) -> _Kept:
        method, member = _LISTS[kind]
        too_late = f"{method}: the list did not end within {seconds:g} s"
        left, deadline, is_again = seconds, self._now() + seconds, False
        kept, seen = _Kept([], float("inf")), set[str]()
        cursor: str | None = None
        while len(seen) <= PAGES and kept.size <= LIST_BYTES:
            try:
                raw = await self._ask(method, None if cursor is None else {"cursor": cursor}, lambda raw: raw, left)
            except TimedOut:
                if not seen:
                    raise
                raise TimedOut(too_late) from None
            except InvalidParams as error:
                # A server answers a cursor that it does not know with -32602 (2025-03-26, pagination).
                if cursor is None:
                    raise
                if is_again:
                    reason = f"the server's list changes faster than it can be read: {error}"
                    raise RpcError(error.code, reason) from None
                is_again, kept, seen, cursor = True, _Kept([], float("inf")), set(), None
            else:
                try:
                    page = msgspec.json.decode(raw, type=dict[str, Raw])
                    if member not in page:
                        raise BadAnswer(f"{method}: the result has no {member!r}", ran="yes")
                    kept.entries += read_entries(msgspec.json.decode(page[member], type=list[Raw]), kind)
                    cursor = msgspec.json.decode(page.get("nextCursor", Raw(b"null")), type=str | None)
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
    """Return the seconds for which a result may be kept: 0 if its `ttlMs` is left out, negative or not a number."""
    try:
        return max(0.0, msgspec.json.decode(result.get("ttlMs", Raw(b"0")), type=float) / 1000)
    except UNREADABLE:
        return 0.0


# --- results ---------------------------------------------------------------------------------------------------------


class _Answer(Struct, rename="camel"):
    content: list[JsonObject] = []
    structured_content: Any = UNSET
    is_error: bool | None = None
    meta: JsonObject | None = msgspec.field(default=None, name="_meta")


class TypedAnswer(_Answer, rename="camel"):
    """The result of a tool as it came, with its type, which older servers leave out (2026-07-28, basic)."""

    result_type: str = "complete"


_decode_answer = msgspec.json.Decoder(_Answer).decode
decode_typed = msgspec.json.Decoder(TypedAnswer).decode


class Called(Struct, frozen=True):
    """What a tool gave. `structured` is UNSET if it gave no structured content."""

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
        """Return the error as an exception: the one that a server of ours names, else a `ToolError` with the text.

        Other servers report arguments that do not fit in the same way as a tool that failed, so `ran` is "unknown" there.
        """
        if not self.is_error:
            return None
        told = self.meta.get(ERROR_META)
        if isinstance(told, dict) and isinstance(told.get("code"), int) and told["code"] != ToolError("").code:
            return remote_error(ErrorObject(told["code"], self.text, told.get("data", UNSET)))
        error = ToolError(self.text, told.get("data") if isinstance(told, dict) else None)
        if not isinstance(told, dict):
            error.ran = "unknown"
        return error


def read_called(raw: Raw | bytes, answer: _Answer | None = None) -> Called:
    """Return the result of a tool; `answer` is the result if it is decoded already."""
    try:
        answer = answer or _decode_answer(raw)
    except UNREADABLE as error:
        raise _misfit(error) from None
    content = list(map(_block, answer.content))
    return Called(content, answer.structured_content, answer.is_error is True, answer.meta or {})


def as_type(called: Called, type: Any) -> Any:
    """Return a tool's answer as a Python type: its structured content, or else its text, as JSON or as it is.

    Until 2025-11-25 structured content is an object, so that servers put any other value under `result`.
    """
    value, reader = called.structured, wanted(type)
    try:
        if value is UNSET:
            return called.text if type is str else reader.read(called.text.encode())
        try:
            return reader.convert(value)
        except UNREADABLE:
            if not (isinstance(value, dict) and list(value) == ["result"]):
                raise
            return reader.convert(value["result"])
    except UNREADABLE as error:
        raise _misfit(error) from None


def _decoded(raw: Raw | bytes, wanted: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=wanted)
    except UNREADABLE as error:
        raise _misfit(error) from None


def _misfit(error: Exception) -> BadAnswer:
    return BadAnswer(f"the result is not of the wanted type: {str(error)[:1].lower()}{str(error)[1:]}", ran="yes")


class Prompted(Struct, frozen=True):
    """What a prompt gave."""

    messages: "list[Said]"
    description: str | None = None


class Said(Struct, frozen=True):
    """One message of a prompt."""

    role: Role
    content: Content

    @property
    def text(self) -> str:
        return self.content.text if isinstance(self.content, Text) else ""


class _Prompted(Struct):
    messages: list[JsonObject] = []
    description: str | None = None


def read_prompted(raw: Raw | bytes) -> Prompted:
    answer = _decoded(raw, _Prompted)
    said = [Said(message.get("role", "user"), _block(message.get("content"))) for message in answer.messages]
    return Prompted(said, answer.description)


class _Contents(Struct):
    contents: list[JsonObject] = []


def read_contents(raw: Raw | bytes) -> list[Embedded]:
    return [_embedded(item) for item in _decoded(raw, _Contents).contents]


class Completion(Struct, frozen=True, rename="camel"):
    """Values that may be meant by what was typed so far."""

    values: list[str] = []
    total: int | None = None
    has_more: bool | None = None


class _Completed(Struct):
    completion: Completion


def read_completion(raw: Raw | bytes) -> Completion:
    return _decoded(raw, _Completed).completion


# --- content ---------------------------------------------------------------------------------------------------------


class Unknown(Content, frozen=True):
    """Content of a kind that came after this library: the members it came with."""

    members: JsonObject

    def on_wire(self) -> JsonObject:
        return self.members


def _block(item: Any) -> Content:
    kind = item.get("type", "") if isinstance(item, dict) else None
    if not isinstance(kind, str):
        raise BadAnswer(f"content: expected an object with a type, got {str(item)[:100]!a}", ran="yes")
    if kind == "text" and len(item) == 2 and isinstance(item.get("text"), str):
        return Text(item["text"])  # nearly all there is
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
        blob = base64.b64decode(item["blob"]) if isinstance(item.get("blob"), str) else None
    except ValueError as error:
        raise BadAnswer(f"a blob that is not base64: {error}", ran="yes") from None
    return _fitting(Embedded(item["uri"], item.get("text"), blob, item.get("mimeType"), **(shared or {})))


def _fitting(content: C) -> C:
    """Return content if its members are of their types: a server may have sent any."""
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
