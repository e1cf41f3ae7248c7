"""The types of MCP's messages: kinds of content, results, and the params of its methods.

The classes that users meet (`Text`, `Image`, `ToolResult`, `Message`, ...) are written as people write Python; `on_wire`
gives the JSON members that the specification names. Params are decoded by msgspec straight into the structs below; members
that a struct does not name are tolerated, as the schemas of all revisions do.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.protocol.messages import JsonObject, Whole

Role: TypeAlias = Literal["user", "assistant"]


def _compact(**members: object) -> JsonObject:
    return {name: value for name, value in members.items() if value is not None}


class Content(Struct, Whole, frozen=True, kw_only=True):
    """The members that all kinds of content share: hints on how to show them."""

    annotations: JsonObject | None = None  # audience, priority, lastModified
    meta: JsonObject | None = None

    def on_wire(self) -> JsonObject:
        raise NotImplementedError

    def _wire(self, kind: str, **members: object) -> JsonObject:
        return {"type": kind, **_compact(**members, annotations=self.annotations, _meta=self.meta)}


class Text(Content, frozen=True):
    """A piece of text."""

    text: str

    def on_wire(self) -> JsonObject:
        return self._wire("text", text=self.text)


class Image(Content, frozen=True):
    """A picture: its bytes, not their base64 form."""

    data: bytes
    mime_type: str

    def on_wire(self) -> JsonObject:
        return self._wire("image", data=self.data, mimeType=self.mime_type)


class Audio(Content, frozen=True):
    """A sound: its bytes, not their base64 form."""

    data: bytes
    mime_type: str

    def on_wire(self) -> JsonObject:
        return self._wire("audio", data=self.data, mimeType=self.mime_type)


class ResourceLink(Content, frozen=True):
    """A resource the reader may fetch."""

    uri: str
    name: str
    title: str | None = None
    description: str | None = None
    mime_type: str | None = None
    size: int | None = None

    def on_wire(self) -> JsonObject:
        told = _compact(title=self.title, description=self.description, mimeType=self.mime_type, size=self.size)
        return self._wire("resource_link", uri=self.uri, name=self.name, **told)


class Embedded(Content, frozen=True):
    """A resource with its contents: text, or bytes as `blob`."""

    uri: str
    text: str | None = None
    blob: bytes | None = None
    mime_type: str | None = None

    def contents(self) -> JsonObject:
        body = {"blob": self.blob} if self.blob is not None else {"text": self.text or ""}
        return {"uri": self.uri, **_compact(mimeType=self.mime_type), **body}

    def on_wire(self) -> JsonObject:
        return self._wire("resource", resource=self.contents())


class ToolResult(Struct, Whole, frozen=True, kw_only=True):
    """A tool's whole answer, with every member that MCP has for it."""

    content: Sequence[Content | str] = ()
    structured: Any = UNSET
    is_error: bool = False
    meta: JsonObject | None = None


class Message(Struct, Whole, frozen=True):
    """One message of a prompt, or of a request to sample."""

    role: Role
    content: Content | str

    def on_wire(self) -> JsonObject:
        return {"role": self.role, "content": block(self.content)}


def block(content: Content | str) -> JsonObject:
    return content.on_wire() if isinstance(content, Content) else {"type": "text", "text": content}


# --- what a client answers -------------------------------------------------------------------------------------------


class Elicited(Struct, frozen=True):
    """A person's answer: `content` is there when they accepted."""

    action: Literal["accept", "decline", "cancel"]
    content: Any = None


class Sampled(Struct, frozen=True, rename="camel"):
    """An answer of the client's model."""

    role: Role
    content: Any
    model: str = ""
    stop_reason: str | None = None

    @property
    def text(self) -> str:
        """Return all the text of the answer."""
        blocks = self.content if isinstance(self.content, list) else [self.content]
        return "".join(block.get("text", "") for block in blocks if isinstance(block, dict))


class Root(Struct, frozen=True):
    """A place in the client's file system."""

    uri: str
    name: str | None = None


class Roots(Struct, frozen=True):
    roots: list[Root]


# --- what a client sends ---------------------------------------------------------------------------------------------

PREFIX = "io.modelcontextprotocol/"
KEY_META = "io.wirecall/idempotency-key"
REPLAYED_META = "io.wirecall/replayed"
RECOGNISED_META = "io.wirecall/recognised"  # the call repeats one whose answer was lost, and gets that call's answer
RECORDED_META = "io.wirecall/recorded"  # false: the command has run, and the ledger records it later
ERROR_META = "io.wirecall/error"

TASKS = "io.modelcontextprotocol/tasks"  # the extension

# Under `capabilities.experimental`: the server honours KEY_META. Of the calls of a tool with one key, one runs.
KEYS_CAPABILITY = "io.wirecall/idempotency"

MAX_TOKEN = 1024  # characters of a progress token: every event of the call repeats it
ProgressToken: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TOKEN)] | int


class Meta(Struct, frozen=True, gc=False):
    """`params._meta` of a request: the envelope of 2026-07-28, and what older revisions put there."""

    version: str | UnsetType = msgspec.field(default=UNSET, name=f"{PREFIX}protocolVersion")
    capabilities: JsonObject | UnsetType = msgspec.field(default=UNSET, name=f"{PREFIX}clientCapabilities")
    level: str | UnsetType = msgspec.field(default=UNSET, name=f"{PREFIX}logLevel")
    token: ProgressToken | UnsetType = msgspec.field(default=UNSET, name="progressToken")
    key: Any = msgspec.field(default=UNSET, name=KEY_META)


class Params(Struct, frozen=True, gc=False):
    """The params of any request."""

    meta: Meta | UnsetType = msgspec.field(default=UNSET, name="_meta")


class Resumed(Params, frozen=True, gc=False):
    """The params of a request that may take several rounds."""

    responses: dict[str, JsonObject] | UnsetType = msgspec.field(default=UNSET, name="inputResponses")
    state: str | UnsetType = msgspec.field(default=UNSET, name="requestState")


class CallTool(Resumed, frozen=True, gc=False, kw_only=True):
    name: str
    arguments: Raw | UnsetType = UNSET
    idempotency_key: Any = UNSET
    key: Any = msgspec.field(default=UNSET, name="idempotencyKey")


class GetPrompt(Resumed, frozen=True, gc=False, kw_only=True):
    name: str
    arguments: dict[str, str] | UnsetType = UNSET


class ReadResource(Resumed, frozen=True, gc=False, kw_only=True):
    uri: str


class Subscribe(Params, frozen=True, gc=False, kw_only=True):
    uri: str


class ListPage(Params, frozen=True, gc=False, kw_only=True):
    cursor: str | None = None


class SetLevel(Params, frozen=True, gc=False, kw_only=True):
    level: str


class Initialize(Params, frozen=True, gc=False, kw_only=True):
    version: str = msgspec.field(name="protocolVersion")
    capabilities: JsonObject = {}
    client: JsonObject = msgspec.field(default_factory=dict, name="clientInfo")


class Filter(Struct, frozen=True, rename="camel"):
    """The changes that a listener of 2026-07-28 asks for."""

    tools_list_changed: bool = False
    prompts_list_changed: bool = False
    resources_list_changed: bool = False
    resource_subscriptions: list[str] = []
    task_ids: list[str] = []


class Listen(Params, frozen=True, gc=False, kw_only=True):
    notifications: Filter = Filter()


class TaskParams(Params, frozen=True, gc=False, kw_only=True, rename="camel"):
    task_id: str


class UpdateTask(TaskParams, frozen=True, gc=False, kw_only=True, rename="camel"):
    responses: dict[str, JsonObject] = msgspec.field(name="inputResponses")


class Ref(Struct, frozen=True):
    type: str
    name: str = ""
    uri: str = ""


class Argument(Struct, frozen=True):
    name: str
    value: str


class CompletionContext(Struct, frozen=True):
    arguments: dict[str, str] = {}


class Complete(Params, frozen=True, gc=False, kw_only=True):
    ref: Ref
    argument: Argument
    context: CompletionContext = CompletionContext()


class Cancelled(Struct, frozen=True):
    id: Any = msgspec.field(default=UNSET, name="requestId")


# The levels of RFC 5424, the least severe first.
Level: TypeAlias = Literal["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"]
LEVELS: tuple[str, ...] = get_args(Level)
