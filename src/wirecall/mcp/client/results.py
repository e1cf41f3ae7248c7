"""The offers and results of a server, as its client sees them.

Members that a struct does not name are dropped, except in schemas: those are kept as they came, keyword by keyword. Nothing
in them is resolved, and no `$ref` is ever fetched (2026-07-28, JSON Schema usage). An entry of a list that cannot be read
is left out with a warning; the rest of the list stays.

Hints are the server's word about itself. Where it says nothing, `Tool.read_only` and its neighbours give the defaults of the
specification, which are the pessimistic ones. Whether the client believes them, `trust=` says.
"""

import base64
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import BadAnswer, RpcError, ToolError
from wirecall.logs import logger
from wirecall.mcp.types import ERROR_META, REPLAYED_META, Audio, Content, Embedded, Image, ResourceLink, Role, Text
from wirecall.protocol.messages import UNREADABLE, ErrorObject, JsonObject, decode_value, remote_error

T = TypeVar("T")


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


# --- results ---------------------------------------------------------------------------------------------------------


class _Answer(Struct, rename="camel"):
    content: list[JsonObject] = []
    structured_content: Raw | UnsetType = UNSET
    is_error: bool | None = None
    meta: JsonObject | None = msgspec.field(default=None, name="_meta")


_decode_answer = msgspec.json.Decoder(_Answer).decode


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


def read_called(raw: Raw | bytes) -> Called:
    try:
        answer = _decode_answer(raw)
        structured = UNSET if answer.structured_content is UNSET else decode_value(answer.structured_content)
    except UNREADABLE as error:
        raise _misfit(error) from None
    return Called([_block(item) for item in answer.content], structured, answer.is_error is True, answer.meta or {})


def as_type(called: Called, wanted: type[T]) -> T:
    """Return a tool's answer as a Python type: its structured content, or else its text, as JSON or as it is.

    Until 2025-11-25 structured content is an object, so that servers put any other value under `result`.
    """
    value = called.structured
    try:
        if value is UNSET:
            return msgspec.convert(called.text, wanted) if wanted is str else msgspec.json.decode(called.text, type=wanted)
        try:
            return msgspec.convert(value, wanted)
        except UNREADABLE:
            if not (isinstance(value, dict) and list(value) == ["result"]):
                raise
            return msgspec.convert(value["result"], wanted)
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
    if not isinstance(item, dict):
        raise BadAnswer(f"content is an object, not {type(item).__name__}")
    kind = item.get("type", "")
    if kind == "text" and len(item) == 2 and isinstance(item.get("text"), str):
        return Text(item["text"])  # nearly all there is
    shared = {"annotations": item.get("annotations"), "meta": item.get("_meta")}
    try:
        read: Content = _BLOCKS[kind](item, shared)
        return read
    except KeyError:
        return Unknown(members=item, **shared)
    except (TypeError, ValueError) as error:
        raise BadAnswer(f"content that cannot be read: {error}") from None


def _embedded(item: Any, shared: JsonObject | None = None) -> Embedded:
    if not (isinstance(item, dict) and isinstance(item.get("uri"), str)):
        raise BadAnswer("a resource without a URI")
    try:
        blob = base64.b64decode(item["blob"]) if isinstance(item.get("blob"), str) else None
    except ValueError as error:
        raise BadAnswer(f"a blob that is not base64: {error}") from None
    return Embedded(item["uri"], item.get("text"), blob, item.get("mimeType"), **(shared or {}))


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
