"""The types of MCP's messages: content, results, params, and declarations of extensions.

The public classes (`Text`, `Image`, `ToolResult`, `Message`, ...) use Python names; `on_wire`
returns the JSON members of the specification. msgspec decodes params directly into the structs
below and ignores members that a struct does not name, as the schemas of all revisions allow.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Literal,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
)

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import EncodeError, UsageError
from wirecall.mcp.revisions import Revision
from wirecall.protocol.messages import CompleteResult, JsonObject, encode

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    # A bare `Elicited` has any content.
    T = TypeVarWithDefault("T", default=Any)
else:
    T = TypeVar("T")
Role: TypeAlias = Literal["user", "assistant"]


def _compact(**members: object) -> JsonObject:
    return {name: value for name, value in members.items() if value is not None}


class Content(Struct, CompleteResult, frozen=True, kw_only=True):
    """The members that all kinds of content share: hints on how to show them."""

    # Its members are audience, priority and lastModified.
    annotations: JsonObject | None = None
    meta: JsonObject | None = None

    def on_wire(self) -> JsonObject:
        raise NotImplementedError

    def _wire(self, kind: str, **members: object) -> JsonObject:
        return {"type": kind, **_compact(**members, annotations=self.annotations, _meta=self.meta)}


class Text(Content, frozen=True):
    """A piece of text.

    `text` is what the reader sees, and `meta` the `_meta` of the block.

    >>> Text("hello").text
    'hello'
    """

    text: str

    def on_wire(self) -> JsonObject:
        return self._wire("text", text=self.text)


class Image(Content, frozen=True):
    """A picture: its bytes, not their base64 form.

    `data` are the bytes, `mime_type` is their type, and `meta` the `_meta` of the block.

    >>> Image(b"GIF89a", "image/gif").mime_type
    'image/gif'
    """

    data: bytes
    mime_type: str

    def on_wire(self) -> JsonObject:
        return self._wire("image", data=self.data, mimeType=self.mime_type)


class Audio(Content, frozen=True):
    """A sound: its bytes, not their base64 form.

    `data` are the bytes, `mime_type` is their type, and `meta` the `_meta` of the block.

    >>> Audio(b"RIFF", "audio/wav").mime_type
    'audio/wav'
    """

    data: bytes
    mime_type: str

    def on_wire(self) -> JsonObject:
        return self._wire("audio", data=self.data, mimeType=self.mime_type)


class ResourceLink(Content, frozen=True):
    """A resource the reader may fetch.

    `uri` is its address. `name`, `title`, `description`, `mime_type` and `size` (in bytes) describe
    it, and `meta` is the `_meta` of the block.

    >>> ResourceLink("shop://tea", "tea").uri
    'shop://tea'
    """

    uri: str
    name: str
    title: str | None = None
    description: str | None = None
    mime_type: str | None = None
    size: int | None = None

    def on_wire(self) -> JsonObject:
        return self._wire(
            "resource_link",
            uri=self.uri,
            name=self.name,
            title=self.title,
            description=self.description,
            mimeType=self.mime_type,
            size=self.size,
        )


class Embedded(Content, frozen=True):
    """A resource with its contents: text, or bytes as `blob`.

    `uri` is its address, `text` its contents, `mime_type` their type, and `meta` the `_meta` of the
    block.

    >>> Embedded("shop://tea", text="green").text
    'green'
    """

    uri: str
    text: str | None = None
    blob: bytes | None = None
    mime_type: str | None = None

    def contents(self) -> JsonObject:
        body = {"blob": self.blob} if self.blob is not None else {"text": self.text or ""}
        return {"uri": self.uri, **_compact(mimeType=self.mime_type), **body}

    def on_wire(self) -> JsonObject:
        return self._wire("resource", resource=self.contents())


Theme: TypeAlias = Literal["light", "dark"]


class Icon(Struct, frozen=True):
    """A picture that stands for a server, a tool, a prompt or a resource (from 2025-11-25 on).

    `src` is an https: address, or the picture itself as a data: URI. `sizes` are strings such as
    "48x48", or "any".

    `mime_type` is the type of the picture, and `theme` the scheme that it is for: "light" or
    "dark".

    >>> Icon("https://example.com/tea.png", "image/png", ["48x48"]).src
    'https://example.com/tea.png'
    """

    src: str
    mime_type: str | None = None
    sizes: Sequence[str] = ()
    theme: Theme | None = None

    def on_wire(self) -> JsonObject:
        sizes = list(self.sizes) or None
        return {"src": self.src, **_compact(mimeType=self.mime_type, sizes=sizes, theme=self.theme)}


def checked_icons(what: str, icons: object) -> list[JsonObject]:
    """Return icons as they are sent. Raises `UsageError` if a client would refuse one."""
    if isinstance(icons, (str, Icon)) or not isinstance(icons, Sequence):
        raise UsageError(
            f"icons of {what} must be a list of Icon, got {type(icons).__name__}.",
            fix="use icons=[Icon(...)]",
        )
    for icon in icons:
        if not isinstance(icon, Icon):
            got = type(icon).__name__
            raise UsageError(
                f"icons of {what} must be a list of Icon, got {got} in it.",
                fix="use icons=[Icon(...)]",
            )
        # Python makes a Struct with values of any type.
        src = cast(object, icon.src)
        mime_type = cast(object, icon.mime_type)
        sizes = cast(object, icon.sizes)
        # Clients must not load icons by other schemes (2025-11-25, basic, "Icons").
        is_source = isinstance(src, str) and re.match(
            r"https://[^\s/]\S*$|data:image/[\w.+-]+[;,]\S*$", src
        )
        is_typed = mime_type is None or (
            isinstance(mime_type, str) and re.fullmatch(r"image/[\w.+-]+", mime_type)
        )
        is_sized = isinstance(sizes, (list, tuple)) and all(
            isinstance(size, str) and re.fullmatch(r"any|[1-9][0-9]*x[1-9][0-9]*", size)
            for size in sizes
        )
        for is_right, member, expected in (
            (is_source, "src", "an https: address or a data:image/ URI"),
            (is_typed, "mime_type", "a type of images, such as image/png"),
            (is_sized, "sizes", 'a list of strings such as "48x48" or "any"'),
            (icon.theme in (None, *get_args(Theme)), "theme", '"light" or "dark"'),
        ):
            if not is_right:
                got = repr(getattr(icon, member))[:100]
                raise UsageError(f"An icon of {what}: {member} must be {expected}, got {got}.")
    return [icon.on_wire() for icon in icons]


def checked_meta(what: str, meta: object, tags: object) -> JsonObject:
    """Return the `_meta` of a definition, with its tags.

    Raises `UsageError` if it cannot be sent.
    """
    if isinstance(tags, str) or not isinstance(tags, Collection):
        raise UsageError(
            f"tags of {what} must be a list of strings, got {type(tags).__name__}.",
            fix='use tags=["..."]',
        )
    if any(not isinstance(tag, str) or not tag for tag in tags):
        raise UsageError(
            f"tags of {what} must be strings that are not empty, got {list(tags)!r}.",
            fix='use tags=["..."]',
        )
    if meta is not None and (
        not isinstance(meta, Mapping) or any(not isinstance(name, str) for name in meta)
    ):
        raise UsageError(
            f"meta of {what} must be a dict with strings as its keys, got {meta!r}.",
            fix='use meta={"a.org/b": 1}',
        )
    for name in meta or ():
        if name == TAGS_META:
            fix = "use tags="
        elif _is_reserved(name):
            fix = "use a prefix of your own, such as example.com/"
        else:
            continue
        raise UsageError(
            f"meta of {what} cannot have the key {name!r}.", "the key is reserved", fix
        )
    whole: JsonObject = {**(meta or {})}
    if tags:
        whole[TAGS_META] = sorted({*tags})
    try:
        encode(whole)
    except EncodeError as error:
        raise UsageError(
            f"meta of {what} cannot be written as JSON.", str(error), "use JSON values"
        ) from error
    return whole


def _is_reserved(name: str) -> bool:
    """Return whether the prefix of a `_meta` key belongs to MCP (basic, "_meta")."""
    prefix, slash, _ = name.rpartition("/")
    owners = r"(?:^|\.)(?:modelcontextprotocol|mcp)(?:\.|$)"
    return bool(slash) and re.search(owners, prefix) is not None


class ToolResult(Struct, CompleteResult, frozen=True, kw_only=True):
    """A tool's whole answer, with every member that MCP has for it.

    `content` are the blocks, a string among them is a `Text`. `structured` is the data for
    programs. `is_error` says that the tool failed, and `meta` is the `_meta` of the result.

    >>> ToolResult(content=["450 cents"], structured={"cents": 450}).structured
    {'cents': 450}
    """

    content: Sequence[Content | str] = ()
    structured: Any = UNSET
    is_error: bool = False
    meta: JsonObject | None = None


class Message(Struct, CompleteResult, frozen=True):
    """One message of a prompt, or of a request to sample.

    `role` is "user" or "assistant", and `content` a block, or a string for a `Text`.

    >>> Message("user", "What does tea cost?").role
    'user'
    """

    role: Role
    content: Content | str

    def on_wire(self) -> JsonObject:
        return {"role": self.role, "content": block(self.content)}


def block(content: Content | str) -> JsonObject:
    if isinstance(content, Content):
        return content.on_wire()
    return {"type": "text", "text": content}


# --- what a client answers ------------------------------------------------------------------------


class Elicited(Struct, Generic[T], frozen=True):
    """A person's answer; it has `content` if they accepted, else that is None.

    `action` is "accept", "decline" or "cancel".

    >>> Elicited("accept", {"size": 3}).content
    {'size': 3}
    """

    action: Literal["accept", "decline", "cancel"]
    content: T = cast(T, None)


class Sampled(Struct, frozen=True, rename="camel"):
    """An answer of the client's model.

    `role` and `content` are those of its message, `model` is the model's name, and `stop_reason`
    says why it ended.

    >>> Sampled("assistant", Text("green tea"), "a-model").model
    'a-model'
    """

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
    """A place in the client's file system.

    `uri` is its address, `name` its name for people.

    >>> Root("file:///home/ada/shop", "shop").name
    'shop'
    """

    uri: str
    name: str | None = None


class Roots(Struct, frozen=True):
    roots: list[Root]


# --- what a client sends --------------------------------------------------------------------------

PREFIX = "io.modelcontextprotocol/"
KEY_META = "io.wirecall/idempotency-key"
REPLAYED_META = "io.wirecall/replayed"
# The call repeats one whose answer was lost, and gets it.
RECOGNISED_META = "io.wirecall/recognised"
# The operator who stated the result, after its outcome had been unknown.
RESOLVED_META = "io.wirecall/resolved-by"
# False: the command has run, and the ledger records it later.
RECORDED_META = "io.wirecall/recorded"
ERROR_META = "io.wirecall/error"
# Of a definition: a list of strings.
TAGS_META = "io.wirecall/tags"

# Of a request in an array (2025-03-26): the values that it takes from earlier results, and the ids
# of the requests that must have succeeded.
REFS_META = "io.wirecall/refs"
AFTER_META = "io.wirecall/after"
# Of a tool's definition: it is a batch tool, with this version of its form.
BATCH_META = "io.wirecall/batch"
# Of an image, an audio or a resource in the result of a batch tool: the id of its entry.
ENTRY_META = "io.wirecall/entry"

# The extension that has tasks.
TASKS = "io.modelcontextprotocol/tasks"

# Under `capabilities.experimental`: the server honours KEY_META, and runs a tool once per key.
KEYS_CAPABILITY = "io.wirecall/idempotency"
# The same: requests of an array may have REFS_META and AFTER_META.
REFS_CAPABILITY = "io.wirecall/references"

# Characters of a progress token: every event of the call repeats it.
MAX_TOKEN = 1024
ProgressToken: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TOKEN)] | int


class Meta(Struct, frozen=True, gc=False):
    """`params._meta` of a request.

    It has the envelope of 2026-07-28, and the members of older revisions.
    """

    version: str | UnsetType = msgspec.field(default=UNSET, name=f"{PREFIX}protocolVersion")
    capabilities: JsonObject | UnsetType = msgspec.field(
        default=UNSET, name=f"{PREFIX}clientCapabilities"
    )
    level: str | UnsetType = msgspec.field(default=UNSET, name=f"{PREFIX}logLevel")
    token: ProgressToken | UnsetType = msgspec.field(default=UNSET, name="progressToken")
    key: Any = msgspec.field(default=UNSET, name=KEY_META)
    # Only of a request in an array, which has its own decoder.
    refs: Any = msgspec.field(default=UNSET, name=REFS_META)
    after: Any = msgspec.field(default=UNSET, name=AFTER_META)


class Params(Struct, frozen=True, gc=False):
    """The params of any request."""

    meta: Meta | UnsetType = msgspec.field(default=UNSET, name="_meta")


class Resumed(Params, frozen=True, gc=False):
    """The params of a request that may take several rounds."""

    responses: dict[str, JsonObject] | UnsetType = msgspec.field(
        default=UNSET, name="inputResponses"
    )
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
Level: TypeAlias = Literal[
    "debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"
]
LEVELS: tuple[str, ...] = get_args(Level)


# --- extensions (SEP-2133) ------------------------------------------------------------------------
#
#     "capabilities": {"extensions": {"com.example/loyalty": {"tiers": ["gold"]}}}
#
# A key is the id of an extension, a value the settings of the side that declares it: `{}` if it has
# none. An extension is active only if both sides declare it. If one side lacks it, the other falls
# back to the core protocol, or refuses the request (2026-07-28, basic/versioning, "Extension
# Negotiation").

# The grammar of `_meta` keys (2026-07-28, basic, "`_meta`"), with a prefix, and with a name that is
# not empty.
_LABEL = r"[A-Za-z](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_ID = re.compile(rf"{_LABEL}(?:\.{_LABEL})*/[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


def checked_extensions(extensions: Mapping[str, JsonObject]) -> dict[str, JsonObject]:
    """Return a copy of the extensions that a user declares: settings by id.

    Raises `UsageError` if one is malformed.
    """
    if not isinstance(extensions, Mapping):
        got = type(extensions).__name__
        raise UsageError(
            f"extensions must be a dict, got {got}.",
            fix='use extensions={"com.example/loyalty": {}}',
        )
    copies: dict[str, JsonObject] = {}
    for id, settings in extensions.items():
        if not _ID.fullmatch(str(id)):
            raise UsageError(
                f"{id!r} is not the id of an extension.",
                "an id has a prefix of labels with dots between them, a slash, and a name",
                "use a domain of yours in reverse order: com.example/loyalty",
            )
        if not isinstance(settings, Mapping):
            got = type(settings).__name__
            raise UsageError(
                f"The settings of {id} must be an object, got {got}.",
                fix="use {} if there are none",
            )
        try:
            copies[id] = msgspec.json.decode(encode(dict(settings)))
        except EncodeError as error:
            raise UsageError(
                f"The settings of {id} cannot be written as JSON.",
                str(error),
                "use strings, numbers, lists and dicts",
            ) from None
    return copies


def declared_extensions(capabilities: JsonObject, revision: Revision) -> dict[str, JsonObject]:
    """Return the extensions in the peer's capabilities: settings by id.

    Malformed ones are omitted.
    """
    if not revision.has("capability extensions"):
        return {}
    declared = capabilities.get("extensions")
    if not isinstance(declared, dict):
        return {}
    return {id: settings for id, settings in declared.items() if isinstance(settings, dict)}
