"""The contract of a server: its methods, tools, resources and prompts in one canonical form, which a lock file keeps.

An app states its contract itself (`of_app`), any other server by `rpc.discover` or MCP's lists (`of_client`). Both give the
same bytes for the same offers: members and required names are sorted, each schema has its definitions with it, and the
texts for people and models are in a section of their own, so that a changed word is not a changed type. The digest is that
of the offers, without the texts, the server's name and the revision of MCP.
"""

import hashlib
import re
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

from wirecall.errors import BadAnswer, MethodNotFound, UsageError
from wirecall.protocol.messages import UNREADABLE, Json, JsonObject, encode
from wirecall.protocol.params import KEY

if TYPE_CHECKING:
    from wirecall.app import App
    from wirecall.client.client import Client

VERSION = 1
SECTIONS = ("methods", "tools", "resources", "templates", "prompts")
_COMPONENTS = "#/components/schemas/"

# The keywords of JSON Schema whose values are schemas: by name, in a list, or one.
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = (
    *("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
# Keywords for people and models. They do not change the values that a schema admits.
TEXTS = ("title", "description", "summary", "$comment", "examples", "example", "markdownDescription")

# A number. It becomes code in a generated client, so a lock file with anything else is refused.
Code: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"\A-?(0|[1-9][0-9]*)\Z")]


class LockedMethod(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A method of JSON-RPC. A hint that the server does not state is None."""

    params: JsonObject
    order: list[str] = []  # of the params, for callers by position
    structure: Literal["by-name", "by-position"] | None = None  # None: either
    result: Json = None
    kind: Literal["query", "command"] | None = None
    key: Literal["optional", "required"] | None = None
    destructive: bool | None = None
    idempotent: bool | None = None
    open_world: bool | None = None
    notification: bool | None = None
    errors: dict[Code, str] = {}  # messages by code


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


class Contract(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that callers of a server rely on. A section that was not read is None."""

    version: int = msgspec.field(name="wirecall-contract")
    name: str = ""
    revision: str | None = None  # of MCP
    honours_keys: bool | None = None  # the MCP server runs one of the calls with one key
    methods: dict[str, LockedMethod] | None = None
    tools: dict[str, LockedTool] | None = None
    resources: dict[str, LockedResource] | None = None
    templates: dict[str, LockedResource] | None = None
    prompts: dict[str, LockedPrompt] | None = None
    descriptions: dict[str, str] = {}  # by place: methods/price/params/properties/sku/description
    digest: str = ""

    def canonical(self) -> bytes:
        """Return the bytes of the lock file."""
        return msgspec.json.format(_sorted(self), indent=2) + b"\n"

    def spoken(self, protocol: str) -> "Contract":
        """Return the part of the contract that callers by one protocol see."""
        others = {
            name: None for name in (*SECTIONS, "honours_keys", "revision") if (name == "methods") == (protocol == "mcp")
        }
        return sealed(msgspec.structs.replace(self, **others))


def _sorted(value: object) -> bytes:
    return msgspec.json.encode(value, order="sorted")


def sealed(contract: Contract) -> Contract:
    """Return a contract with its digest."""
    bare = msgspec.structs.replace(contract, digest="", name="", revision=None, descriptions={})
    return msgspec.structs.replace(contract, digest=f"sha256:{hashlib.sha256(_sorted(bare)).hexdigest()}")


# --- a server's own words ---------------------------------------------------------------------------------------------


def of_app(app: "App") -> Contract:
    """Return the contract of an app: its methods, and what it offers to MCP clients of the newest revision."""
    from wirecall.mcp.client.results import Prompt, Resource, Template, Tool, read_entries
    from wirecall.mcp.revisions import REVISIONS
    from wirecall.server.openrpc import document

    newest = list(REVISIONS.values())[-1]
    lists = {
        member: read_entries(app.catalog().list(member, newest), kind)
        for member, kind in (("tools", Tool), ("resources", Resource), ("resourceTemplates", Template), ("prompts", Prompt))
    }
    texts: dict[str, str] = {}
    methods = _methods(document(app.name, app.version, app.registry, app.mode), texts)
    offers = _offers(lists, texts, app.instructions)
    return _contract(texts, name=app.name, revision=newest.name, honours_keys=True, methods=methods, **offers)


async def of_client(client: "Client") -> Contract | None:
    """Return the contract of the server of an open client; None if it does not state one: it has no `rpc.discover`."""
    from wirecall.mcp.client.client import McpClient

    texts: dict[str, str] = {}
    if not isinstance(client, McpClient):
        try:
            document = await client.call("rpc.discover", query=True)
        except MethodNotFound:
            return None
        if not isinstance(document, dict) or not isinstance(document.get("methods"), list):
            raise BadAnswer("rpc.discover: expected an OpenRPC document with methods", ran="yes")
        info = document.get("info")
        name = info.get("title") if isinstance(info, dict) else None
        return _contract(texts, name=name, methods=_methods(document, texts))
    has = client.capabilities
    lists: dict[str, list[Any]] = {
        "tools": await client.list_tools() if "tools" in has else [],
        "resources": await client.list_resources() if "resources" in has else [],
        "resourceTemplates": [],
        "prompts": await client.list_prompts() if "prompts" in has else [],
    }
    if "resources" in has:
        with suppress(MethodNotFound):  # many servers have resources, and no templates of them
            lists["resourceTemplates"] = await client.list_resource_templates()
    offers = _offers(lists, texts, client.instructions)
    name, keys = client.server.get("name"), client.honours_keys
    return _contract(texts, name=name, revision=client.revision, honours_keys=keys, **offers)


def _contract(texts: dict[str, str], name: object, **sections: Any) -> Contract:
    given = name if isinstance(name, str) else ""
    return sealed(Contract(version=VERSION, name=given, descriptions=texts, **sections))


def _methods(document: JsonObject, texts: dict[str, str]) -> dict[str, LockedMethod]:
    def followed(value: Json) -> JsonObject:
        found = resolved(value, document) if isinstance(value, dict) and "$ref" in value else value
        return found if isinstance(found, dict) else {}

    methods = {}
    for method in map(followed, document["methods"]):
        name = method.get("name")
        if not isinstance(name, str) or name.startswith("rpc."):
            continue
        place = f"methods/{step_of(name)}"
        _take(method, place, texts)
        params = method.get("params")
        params = [followed(each) for each in params] if isinstance(params, list) else []
        params = [each for each in params if isinstance(each.get("name"), str)]
        kind = method["x-kind"] if method.get("x-kind") in ("query", "command") else None
        keys = [each for each in params if each["name"] == KEY and kind == "command"]
        params = [each for each in params if each["name"] != KEY or kind != "command"]
        for param in params:
            _take(param, f"{place}/params/properties/{step_of(param['name'])}", texts)
        schema = {
            "type": "object",
            "properties": {param["name"]: param.get("schema", {}) for param in params},
            "required": [param["name"] for param in params if param.get("required") is True],
            "additionalProperties": False,
        }
        result, errors = followed(method.get("result")), method.get("errors")
        stated = [followed(each) for each in errors] if isinstance(errors, list) else []
        hints = {hint: method.get(f"x-{hint.replace('_', '-')}") for hint in ("destructive", "idempotent", "open_world")}
        notification, structure = method.get("x-notification-allowed"), method.get("paramStructure")
        methods[name] = LockedMethod(
            params=_gathered(schema, document, f"{place}/params", texts),
            order=[param["name"] for param in params],
            structure=structure if structure in ("by-name", "by-position") else None,
            result=_gathered(result["schema"], document, f"{place}/result", texts) if "schema" in result else None,
            kind=kind,
            key=None if not keys else "required" if keys[0].get("required") is True else "optional",
            notification=notification if isinstance(notification, bool) else None,
            errors={
                str(each["code"]): str(each.get("message", ""))
                for each in stated
                if isinstance(each.get("code"), int) and not isinstance(each["code"], bool)
            },
            **{hint: value if isinstance(value, bool) else None for hint, value in hints.items()},
        )
    return methods


def _offers(lists: dict[str, list[Any]], texts: dict[str, str], instructions: str | None) -> dict[str, Any]:
    """Return the sections of MCP, from the entries of its lists."""
    if instructions:
        texts["instructions"] = instructions
    tools, prompts = {}, {}
    for tool in lists["tools"]:
        place, hints = f"tools/{step_of(tool.name)}", tool.annotations
        _take({"title": tool.title or (hints.title if hints else None), "description": tool.description}, place, texts)
        output = tool.output_schema
        tools[tool.name] = LockedTool(
            input=_gathered(tool.input_schema, tool.input_schema, f"{place}/input", texts),
            output=None if output is None else _gathered(output, output, f"{place}/output", texts),
            read_only=hints.read_only_hint if hints else None,
            destructive=hints.destructive_hint if hints else None,
            idempotent=hints.idempotent_hint if hints else None,
            open_world=hints.open_world_hint if hints else None,
        )
    for prompt in lists["prompts"]:
        place = f"prompts/{step_of(prompt.name)}"
        _take({"title": prompt.title, "description": prompt.description}, place, texts)
        for argument in prompt.arguments:
            told = {"title": argument.title, "description": argument.description}
            _take(told, f"{place}/arguments/{step_of(argument.name)}", texts)
        prompts[prompt.name] = LockedPrompt({argument.name: argument.required for argument in prompt.arguments})
    found: dict[str, dict[str, LockedResource]] = {"resources": {}, "templates": {}}
    for section, entries in (("resources", lists["resources"]), ("templates", lists["resourceTemplates"])):
        for entry in entries:
            uri = entry.uri if section == "resources" else entry.uri_template
            _take({"title": entry.title, "description": entry.description}, f"{section}/{step_of(uri)}", texts)
            found[section][uri] = LockedResource(entry.mime_type)
    return {"tools": tools, "prompts": prompts, **found}


# --- schemas ----------------------------------------------------------------------------------------------------------


def resolved(schema: Json, root: Json) -> Json:
    """Follow one reference inside the same document; None if it leads nowhere, or elsewhere."""
    reference = schema["$ref"]
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found = root
    for step in reference[2:].split("/") if reference != "#" else ():
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and re.fullmatch("[0-9]{1,9}", name) and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def members(schema: JsonObject) -> dict[str, Json]:
    """The members that a schema of an object states."""
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def required(schema: JsonObject) -> set[str]:
    """The members that a schema of an object requires."""
    found = schema.get("required")
    return {name for name in found if isinstance(name, str)} if isinstance(found, list) else set()


def listed(schema: Json) -> list[Json] | None:
    """Return the values that a schema lists, or None."""
    found = ([schema["const"]] if "const" in schema else schema.get("enum")) if isinstance(schema, dict) else None
    return found if isinstance(found, list) else None


def step_of(name: str) -> str:
    """Return a name as a step of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def _take(entry: JsonObject, place: str, texts: dict[str, str]) -> None:
    """Move the texts of an entry to their own section."""
    for word in TEXTS:
        if isinstance(entry.get(word), str) and entry[word]:
            texts[f"{place}/{word}"] = entry[word]


def _gathered(schema: Json, document: JsonObject, place: str, texts: dict[str, str]) -> Json:
    """Return a schema in its canonical form. It has the components of OpenRPC with it that it refers to, as `$defs`."""
    wanted: list[str] = []

    def canonical(schema: Json, place: str) -> Json:
        if not isinstance(schema, dict):
            return schema if isinstance(schema, bool) else {}
        _take(schema, place, texts)
        made: JsonObject = {}
        for word, value in schema.items():
            if word in TEXTS:
                continue
            if word in NAMED and isinstance(value, dict):
                made[word] = {name: canonical(each, f"{place}/{word}/{step_of(name)}") for name, each in value.items()}
            elif (word in LISTED or word == "items") and isinstance(value, list):
                made[word] = [canonical(each, f"{place}/{word}/{at}") for at, each in enumerate(value)]
            elif word in SINGLE:
                made[word] = canonical(value, f"{place}/{word}")
            elif word in ("required", "enum", "type") and isinstance(value, list):
                made[word] = sorted(value, key=encode)  # sets, written as lists
            elif word == "$ref" and isinstance(value, str) and value.startswith(_COMPONENTS):
                name = value.removeprefix(_COMPONENTS)
                wanted.append(name)
                made[word] = f"#/$defs/{name}"
            else:
                made[word] = value
        return made

    try:
        whole = canonical(schema, place)
        components: dict[str, Json] = {}
        for name in wanted:  # grows: a component refers to others
            if name not in components:
                found = resolved({"$ref": _COMPONENTS + name}, document)
                components[name] = {} if found is None else canonical(found, f"{place}/$defs/{name}")
    except RecursionError:
        raise UsageError(f"The schema at {place} cannot be kept.", "it is nested too deep", "flatten the type") from None
    if components:
        own = whole.get("$defs")
        whole["$defs"] = {**(own if isinstance(own, dict) else {}), **components}
    return whole


# --- the file ---------------------------------------------------------------------------------------------------------


class NotALock(UsageError):
    """A file that cannot be used as a lock file; `is_foreign` if it is another file, and not a lock file that is too old."""

    def __init__(self, what: str, why: str = "", fix: str = "", *, is_foreign: bool = False) -> None:
        super().__init__(what, why, fix)
        self.is_foreign = is_foreign


def read_lock(path: "str | PathLike[str]") -> Contract:
    """Return the contract in a lock file."""
    again = f"write it again: wirecall lock TARGET -o {path}"
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise NotALock(f"There is no lock file {path}.", "", f"write it: wirecall lock TARGET -o {path}") from None
    except OSError as error:
        raise NotALock(
            f"The lock file {path} cannot be read.", error.strerror or str(error), "check the path", is_foreign=True
        ) from None
    try:
        marked = msgspec.json.decode(data)
    except UNREADABLE as error:
        raise NotALock(f"{path} is not a lock file.", f"expected JSON: {error}", again, is_foreign=True) from None
    version = marked.get("wirecall-contract") if isinstance(marked, dict) else None
    if version is None:
        raise NotALock(f"{path} is not a lock file.", 'it has no member "wirecall-contract"', again, is_foreign=True)
    if version != VERSION:
        why = f"expected version {VERSION}, got {encode(version).decode()}"
        raise NotALock(f"The lock file {path} has another version.", why, f"use that version of wirecall, or {again}")
    try:
        contract = msgspec.json.decode(data, type=Contract)
    except UNREADABLE as error:
        raise NotALock(f"The lock file {path} is damaged.", str(error), again) from None
    if sealed(contract).digest != contract.digest:
        raise NotALock(f"The lock file {path} was edited.", "its digest is not that of its offers", again)
    return contract
