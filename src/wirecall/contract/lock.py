"""The contract of a server, in one canonical form, which a lock file keeps.

It consists of the server's methods, tools, resources and prompts. An app states its contract itself
(`of_app`), any other server by `rpc.discover` or MCP's lists (`of_client`). Both give the same
bytes for the same offers: members and required names are sorted, each schema includes its
definitions, and the descriptions for people and models are in a separate section, so that a changed
word is not a changed type. The digest covers the offers, without the descriptions, the server's
name, the revision of MCP and the order of the values of an `enum`.
"""

import hashlib
import re
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args

import msgspec
from msgspec import Struct

from wirecall.errors import BadAnswer, MethodNotFound, RpcError, UsageError
from wirecall.protocol.keys import ONLY_FOR_KEY, with_optional_key
from wirecall.protocol.messages import UNREADABLE, Json, JsonObject, encode
from wirecall.protocol.params import KEY
from wirecall.server.method import Mode

if TYPE_CHECKING:
    from wirecall.app import App
    from wirecall.client.client import Client
    from wirecall.mcp.client.client import McpClient

VERSION = 1
SECTIONS = ("methods", "tools", "resources", "templates", "prompts")
_COMPONENTS = "#/components/schemas/"

# The keywords of JSON Schema whose values are schemas: by name, in a list, or one.
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = (
    *(
        "items",
        "additionalItems",
        "additionalProperties",
        "contains",
        "propertyNames",
        "not",
        "if",
        "then",
        "else",
    ),
    *("unevaluatedItems", "unevaluatedProperties"),
)
# Keywords for people and models. They do not change the values that a schema admits.
TEXTS = (
    "title",
    "description",
    "summary",
    "$comment",
    "examples",
    "example",
    "markdownDescription",
)

# A number. It becomes code in a generated client, so any other value in a lock file is refused.
Code: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A-?(0|[1-9][0-9]*)\Z")]


class LockedMethod(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A method of JSON-RPC. A hint that the server does not state is None."""

    params: JsonObject
    # The order of the params, for callers by position.
    order: list[str] = []
    # How params may be passed; None means either.
    structure: Literal["by-name", "by-position"] | None = None
    result: Json = None
    kind: Literal["query", "command"] | None = None
    key: Literal["optional", "required"] | None = None
    destructive: bool | None = None
    idempotent: bool | None = None
    open_world: bool | None = None
    notification: bool | None = None
    # The messages of errors by code.
    errors: dict[Code, str] = {}


class LockedTool(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tool of MCP. A hint that the server does not state is None."""

    input: JsonObject
    output: Json = None
    read_only: bool | None = None
    destructive: bool | None = None
    idempotent: bool | None = None
    open_world: bool | None = None


class LockedResource(Struct, frozen=True, omit_defaults=True):
    """A resource of MCP, or a template of resources."""

    mime_type: str | None = None


class LockedPrompt(Struct, frozen=True, omit_defaults=True):
    """A prompt of MCP: whether each of its arguments is required."""

    arguments: dict[str, bool] = {}


class LockedMode(Struct, frozen=True, omit_defaults=True):
    """What a mode of the server requires besides the rest of the contract."""

    # The commands of JSON-RPC that are refused without a key only in this mode.
    keys: list[str] = []


class Contract(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that callers of a server rely on. A section that was not read is None."""

    version: int = msgspec.field(name="wirecall-contract")
    name: str = ""
    # The revision of MCP.
    revision: str | None = None
    # Whether the MCP server runs only one of the calls with the same key.
    honours_keys: bool | None = None
    methods: dict[str, LockedMethod] | None = None
    tools: dict[str, LockedTool] | None = None
    resources: dict[str, LockedResource] | None = None
    templates: dict[str, LockedResource] | None = None
    prompts: dict[str, LockedPrompt] | None = None
    # What a mode requires, by its name: the rest of the contract is the same in all modes.
    modes: dict[str, LockedMode] | None = None
    # Descriptions by place: methods/price/params/properties/sku/description.
    descriptions: dict[str, str] = {}
    digest: str = ""

    def canonical(self) -> bytes:
        """Return the bytes of the lock file."""
        return msgspec.json.format(_sorted(self), indent=2) + b"\n"

    def spoken(self, protocol: str) -> "Contract":
        """Return the part of the contract that callers by one protocol see."""
        others = {
            name: None
            for name in (*SECTIONS, "honours_keys", "revision", "modes")
            if (name in ("methods", "modes")) == (protocol == "mcp")
        }
        return sealed(msgspec.structs.replace(self, **others))


def _sorted(value: object) -> bytes:
    return msgspec.json.encode(value, order="sorted")


def sealed(contract: Contract) -> Contract:
    """Return a contract with its digest."""
    bare = msgspec.structs.replace(contract, digest="", name="", revision=None, descriptions={})
    offers = _with_sorted_values(msgspec.to_builtins(bare))
    return msgspec.structs.replace(
        contract, digest=f"sha256:{hashlib.sha256(_sorted(offers)).hexdigest()}"
    )


def _with_sorted_values(value: Any) -> Any:
    """Return the offers of a contract, in which the values of every `enum` are sorted.

    Their order is for people: another order is the same contract.
    """
    if isinstance(value, list):
        return [_with_sorted_values(each) for each in value]
    if not isinstance(value, dict):
        return value
    made = {word: _with_sorted_values(each) for word, each in value.items()}
    if isinstance(made.get("enum"), list):
        made["enum"] = sorted(made["enum"], key=encode)
    return made


# --- a server's own words -------------------------------------------------------------------------


def of_app(app: "App") -> Contract:
    """Return the contract of an app.

    It has its methods, and its offers to MCP clients of the newest revision.
    """
    from wirecall.mcp.client.results import Prompt, Resource, Template, Tool, read_entries
    from wirecall.mcp.revisions import REVISIONS
    from wirecall.server.openrpc import document

    newest = list(REVISIONS.values())[-1]
    lists = {
        member: read_entries(app.catalog().list(member, newest), kind)
        for member, kind in (
            ("tools", Tool),
            ("resources", Resource),
            ("resourceTemplates", Template),
            ("prompts", Prompt),
        )
    }
    texts: dict[str, str] = {}
    described = document(app.name, app.version, app.registry, app.mode)
    offers = _offers(lists, texts, app.instructions)
    return _contract(
        texts,
        name=app.name,
        revision=newest.name,
        honours_keys=True,
        methods=_methods(described, texts),
        modes=_modes(described),
        **offers,
    )


async def of_client(client: "Client") -> Contract | None:
    """Return the contract of an open client's server.

    It is None if the server states none: it has no `rpc.discover`.
    """
    from wirecall.mcp.client.client import McpClient

    if isinstance(client, McpClient):
        return await _of_mcp(client)
    try:
        document = await client.call("rpc.discover", query=True)
    except RpcError:  # servers that lack it answer with many codes
        return None
    if not isinstance(document, dict) or not isinstance(document.get("methods"), list):
        raise BadAnswer("rpc.discover: expected an OpenRPC document with methods", ran="yes")
    texts: dict[str, str] = {}
    info = document.get("info")
    name = info.get("title") if isinstance(info, dict) else None
    methods = _methods(document, texts)
    return _contract(texts, name=name, methods=methods, modes=_modes(document))


async def _of_mcp(client: "McpClient") -> Contract:
    """Return the contract that a server of MCP states in its lists."""
    texts: dict[str, str] = {}
    has = client.capabilities
    lists: dict[str, list[Any]] = {
        "tools": [],
        "resources": [],
        "resourceTemplates": [],
        "prompts": [],
    }
    if "tools" in has:
        lists["tools"] = await client.list_tools()
    if "resources" in has:
        lists["resources"] = await client.list_resources()
    if "prompts" in has:
        lists["prompts"] = await client.list_prompts()
    if "resources" in has:
        with suppress(MethodNotFound):  # many servers have resources without templates
            lists["resourceTemplates"] = await client.list_resource_templates()
    offers = _offers(lists, texts, client.instructions)
    name = client.server.get("name")
    keys = client.honours_keys
    return _contract(texts, name=name, revision=client.revision, honours_keys=keys, **offers)


def _contract(texts: dict[str, str], name: object, **sections: Any) -> Contract:
    given = name if isinstance(name, str) else ""
    return sealed(Contract(version=VERSION, name=given, descriptions=texts, **sections))


def _methods(document: JsonObject, texts: dict[str, str]) -> dict[str, LockedMethod]:
    """Return the methods of an OpenRPC document, which any server may have written."""
    methods = {}
    for entry in document["methods"]:
        method = _followed(entry, document)
        name = method.get("name")
        if isinstance(name, str) and not name.startswith("rpc."):
            methods[name] = _method(name, method, document, texts)
    return methods


def _modes(document: JsonObject) -> dict[str, LockedMode] | None:
    """Return what the modes of a server require, if it states that."""
    needed: dict[str, list[str]] = {mode: [] for mode in get_args(Mode)}
    is_stated = False
    for entry in document["methods"]:
        method = _followed(entry, document)
        is_stated = is_stated or "x-key-required" in method
        modes = _modes_with_key(method)
        # A key that all modes require is part of the method.
        if len(modes) == 1 and isinstance(method.get("name"), str):
            needed[modes[0]].append(method["name"])
    if not is_stated:
        return None
    return {mode: LockedMode(sorted(names)) for mode, names in needed.items()}


def _modes_with_key(method: JsonObject) -> list[str]:
    """Return the modes in which a server of wirecall refuses a command without a key."""
    stated = method.get("x-key-required")
    if not isinstance(stated, list):
        return []
    return [mode for mode in get_args(Mode) if mode in stated]


def _method(
    name: str, method: JsonObject, document: JsonObject, texts: dict[str, str]
) -> LockedMethod:
    place = f"methods/{step_of(name)}"
    _take(method, place, texts)
    kind = _one_of(method.get("x-kind"), "query", "command")
    params = [
        param
        for param in _followed_all(method.get("params"), document)
        if isinstance(param.get("name"), str)
    ]
    key = None
    if kind == "command":
        key = _key_rule(params)
        if key is not None and "x-key-required" in method:
            # Otherwise the rule of the mode in which the server runs would be the contract's.
            is_always = len(_modes_with_key(method)) == len(get_args(Mode))
            key = "required" if is_always else "optional"
        params = [param for param in params if param["name"] != KEY]
    for param in params:
        _take(param, f"{place}/params/properties/{step_of(param['name'])}", texts)
    needed = [param["name"] for param in params if param.get("required") is True]
    properties = {param["name"]: param.get("schema", {}) for param in params}
    if key == "optional":
        # The same for the place that `key_at` declares.
        only_for_key = {param["name"] for param in params if param.get(ONLY_FOR_KEY)}
        needed = [name for name in needed if name not in only_for_key]
        properties = with_optional_key({"properties": properties})["properties"]
    schema = {
        "type": "object",
        "properties": properties,
        "required": needed,
        "additionalProperties": False,
    }
    result = _followed(method.get("result"), document)
    returns: Json = None
    locked = _gathered(schema, document, f"{place}/params", texts)
    if "schema" in result:
        returns = _gathered(result["schema"], document, f"{place}/result", texts)
    return LockedMethod(
        params=locked,
        order=[param["name"] for param in params],
        structure=_one_of(method.get("paramStructure"), "by-name", "by-position"),
        result=returns,
        kind=kind,
        key=key,
        notification=_stated(method.get("x-notification-allowed")),
        errors=_errors(method, document),
        destructive=_stated(method.get("x-destructive")),
        idempotent=_stated(method.get("x-idempotent")),
        open_world=_stated(method.get("x-open-world")),
    )


def _key_rule(params: list[JsonObject]) -> Literal["optional", "required"] | None:
    """Return whether a command takes a key, by its first param of that name."""
    for param in params:
        if param["name"] == KEY:
            return "required" if param.get("required") is True else "optional"
    return None


def _errors(method: JsonObject, document: JsonObject) -> dict[str, str]:
    """Return the messages of the errors that a method states, by code."""
    return {
        str(each["code"]): str(each.get("message", ""))
        for each in _followed_all(method.get("errors"), document)
        if isinstance(each.get("code"), int) and not isinstance(each["code"], bool)
    }


def _followed(value: Json, document: JsonObject) -> JsonObject:
    """Return an object of a document, which may be a reference to it; {} if it is none."""
    if isinstance(value, dict) and "$ref" in value:
        value = resolved(value, document)
    if not isinstance(value, dict):
        return {}
    return value


def _followed_all(values: Json, document: JsonObject) -> list[JsonObject]:
    if not isinstance(values, list):
        return []
    return [_followed(each, document) for each in values]


def _one_of(value: Json, *allowed: str) -> Any:
    """Return a word that is allowed, or None."""
    if value in allowed:
        return value
    return None


def _stated(value: Json) -> bool | None:
    """Return a hint that is true or false, or None."""
    if isinstance(value, bool):
        return value
    return None


def _offers(
    lists: dict[str, list[Any]], texts: dict[str, str], instructions: str | None
) -> dict[str, Any]:
    """Return the sections of MCP, from the entries of its lists."""
    if instructions:
        texts["instructions"] = instructions
    tools = {tool.name: _tool(tool, texts) for tool in lists["tools"]}
    prompts = {}
    for prompt in lists["prompts"]:
        place = f"prompts/{step_of(prompt.name)}"
        _take_texts(prompt, place, texts)
        for argument in prompt.arguments:
            _take_texts(argument, f"{place}/arguments/{step_of(argument.name)}", texts)
        prompts[prompt.name] = LockedPrompt(
            {argument.name: argument.required for argument in prompt.arguments}
        )
    resources = {}
    for entry in lists["resources"]:
        _take_texts(entry, f"resources/{step_of(entry.uri)}", texts)
        resources[entry.uri] = LockedResource(entry.mime_type)
    templates = {}
    for entry in lists["resourceTemplates"]:
        _take_texts(entry, f"templates/{step_of(entry.uri_template)}", texts)
        templates[entry.uri_template] = LockedResource(entry.mime_type)
    return {"tools": tools, "prompts": prompts, "resources": resources, "templates": templates}


def _tool(tool: Any, texts: dict[str, str]) -> LockedTool:
    place = f"tools/{step_of(tool.name)}"
    title = tool.title
    hints: dict[str, bool | None] = {}
    if stated := tool.annotations:
        title = title or stated.title
        hints = {
            "read_only": stated.read_only_hint,
            "destructive": stated.destructive_hint,
            "idempotent": stated.idempotent_hint,
            "open_world": stated.open_world_hint,
        }
    _take({"title": title, "description": tool.description}, place, texts)
    schema = tool.input_schema
    locked = _gathered(schema, schema, f"{place}/input", texts)
    output = tool.output_schema
    if output is not None:
        output = _gathered(output, output, f"{place}/output", texts)
    return LockedTool(input=locked, output=output, **hints)


# --- schemas --------------------------------------------------------------------------------------


def resolved(schema: Json, root: Json) -> Json:
    """Follow one reference inside the same document.

    None if it is broken, or leads to another document.
    """
    reference = schema["$ref"]
    if reference == "#":
        return root
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found = root
    for step in reference[2:].split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict):
            found = found.get(name)
        elif isinstance(found, list) and re.fullmatch("[0-9]{1,9}", name):
            found = found[int(name)] if int(name) < len(found) else None
        else:
            return None
    return found


def members(schema: JsonObject) -> dict[str, Json]:
    """Return the members that a schema of an object states."""
    found = schema.get("properties")
    if not isinstance(found, dict):
        return {}
    return found


def required(schema: JsonObject) -> set[str]:
    """Return the members that a schema of an object requires."""
    found = schema.get("required")
    if not isinstance(found, list):
        return set()
    return {name for name in found if isinstance(name, str)}


def listed(schema: Json) -> list[Json] | None:
    """Return the values that a schema lists, or None."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    found = schema.get("enum")
    if not isinstance(found, list):
        return None
    return found


def step_of(name: str) -> str:
    """Return a name as a step of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def _take(entry: JsonObject, place: str, texts: dict[str, str]) -> None:
    """Move the descriptions of an entry to their own section."""
    for word in TEXTS:
        if isinstance(entry.get(word), str) and entry[word]:
            texts[f"{place}/{word}"] = entry[word]


def _take_texts(entry: Any, place: str, texts: dict[str, str]) -> None:
    """Take the title and the description of an entry of MCP's lists."""
    _take({"title": entry.title, "description": entry.description}, place, texts)


def _gathered(schema: Json, document: JsonObject, place: str, texts: dict[str, str]) -> Json:
    """Return a schema in its canonical form.

    It includes the OpenRPC components that it refers to, as `$defs`.
    """
    wanted: list[str] = []
    try:
        whole = _canonical(schema, place, texts, wanted)
        components: dict[str, Json] = {}
        for name in wanted:  # grows: a component refers to others
            if name not in components:
                found = resolved({"$ref": _COMPONENTS + name}, document)
                components[name] = {}
                if found is not None:
                    inside = f"{place}/$defs/{name}"
                    components[name] = _canonical(found, inside, texts, wanted)
    except RecursionError:
        raise UsageError(
            f"The schema at {place} cannot be kept.", "it is nested too deep", "flatten the type"
        ) from None
    if components:
        own = whole.get("$defs")
        whole["$defs"] = {**(own if isinstance(own, dict) else {}), **components}
    return whole


def _canonical(schema: Json, place: str, texts: dict[str, str], wanted: list[str]) -> Json:
    """Return a schema without its descriptions, and with sorted lists of names.

    It moves the descriptions to their section, and adds the components it refers to to `wanted`.
    """
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        return {}
    _take(schema, place, texts)
    made: JsonObject = {}
    for word, value in schema.items():
        if word in TEXTS:
            continue
        inside = f"{place}/{word}"
        made[word] = value
        if word in NAMED and isinstance(value, dict):
            made[word] = {
                name: _canonical(each, f"{inside}/{step_of(name)}", texts, wanted)
                for name, each in value.items()
            }
        elif (word in LISTED or word == "items") and isinstance(value, list):
            made[word] = [
                _canonical(each, f"{inside}/{at}", texts, wanted) for at, each in enumerate(value)
            ]
        elif word in SINGLE:
            made[word] = _canonical(value, inside, texts, wanted)
        elif word in ("required", "type") and isinstance(value, list):
            made[word] = sorted(value, key=encode)  # sets, written as lists
        elif word == "$ref" and isinstance(value, str) and value.startswith(_COMPONENTS):
            name = value.removeprefix(_COMPONENTS)
            wanted.append(name)
            made[word] = f"#/$defs/{name}"
    return made


# --- the file -------------------------------------------------------------------------------------


class NotALock(UsageError):
    """A file that cannot be used as a lock file.

    It `is_foreign` unless it is a lock file that is too old.
    """

    def __init__(
        self, what: str, why: str = "", fix: str = "", *, is_foreign: bool = False
    ) -> None:
        super().__init__(what, why, fix)
        self.is_foreign = is_foreign


def read_lock(path: "str | PathLike[str]") -> Contract:
    """Return the contract in a lock file."""
    again = f"write it again: wirecall lock TARGET -o {path}"
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise NotALock(
            f"There is no lock file {path}.", "", f"write it: wirecall lock TARGET -o {path}"
        ) from None
    except OSError as error:
        raise NotALock(
            f"The lock file {path} cannot be read.",
            error.strerror or str(error),
            "check the path",
            is_foreign=True,
        ) from None
    try:
        marked = msgspec.json.decode(data)
    except UNREADABLE as error:
        raise NotALock(
            f"{path} is not a lock file.", f"expected JSON: {error}", again, is_foreign=True
        ) from None
    version = marked.get("wirecall-contract") if isinstance(marked, dict) else None
    if version is None:
        raise NotALock(
            f"{path} is not a lock file.",
            'it has no member "wirecall-contract"',
            again,
            is_foreign=True,
        )
    if version != VERSION:
        why = f"expected version {VERSION}, got {encode(version).decode()}"
        raise NotALock(
            f"The lock file {path} has another version.",
            why,
            f"use that version of wirecall, or {again}",
        )
    try:
        contract = msgspec.json.decode(data, type=Contract)
    except UNREADABLE as error:
        raise NotALock(f"The lock file {path} is damaged.", str(error), again) from None
    if sealed(contract).digest != contract.digest:
        raise NotALock(
            f"The lock file {path} was edited.", "its digest is not that of its offers", again
        )
    return contract
