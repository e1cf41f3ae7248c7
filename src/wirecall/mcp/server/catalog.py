"""The catalog of a server: tools, prompts, resources and their templates, completions, and the methods of extensions.

The definitions are `Method`s of the core, so that their calls take the core's steps: middleware, binding, time limits,
threads, and for tools the ledger. This file finds them by name or URI, and describes them to clients, each revision in its
own words. `calls` calls them, and `results` shapes the values of their functions.
"""

import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Raw, Struct

from wirecall.errors import UsageError
from wirecall.mcp.revisions import Revision
from wirecall.mcp.types import Content, Message, ToolResult
from wirecall.protocol.messages import JsonObject, encode
from wirecall.protocol.params import KEY, place_of
from wirecall.server.method import MCP_FAMILIES, MCP_METHODS, Method, Registry

_NAME = re.compile(r"\{(\+?)([A-Za-z_][A-Za-z0-9_]*)(\*?)\}")
_HEADER = re.compile(r"[\x21-\x7e]+")  # what the header `Mcp-Method` can carry
_UNSAFE = re.compile(r"[/\\\x00-\x1f\x7f]")  # separators of both kinds of file systems, and control characters

# Written for the model that fills in the argument (T1: key="ask").
KEY_SCHEMA = {
    "type": "string",
    "minLength": 1,
    "maxLength": 255,
    "description": (
        "A new random value, such as a UUID, for each separate thing you want done. If a call fails or its answer is lost, "
        "send the same value again: it is then done once, not twice. Use another value for another thing."
    ),
}


class PromptEntry(Struct, frozen=True):
    name: str
    method: Method

    def described(self, revision: Revision) -> JsonObject:
        signature = self.method.signature
        schema = signature.schema["properties"]
        arguments: list[JsonObject] = []
        for parameter in signature.parameters:
            if parameter.kind in ("position", "name"):
                given = schema[parameter.name]
                described = {"description": given["description"]} if "description" in given else {}
                arguments.append({"name": parameter.name, **described, "required": parameter.required})
        return {
            "name": self.name,
            **_labels(self.method, revision),
            **({"description": self.method.description} if self.method.description else {}),
            **({"arguments": arguments} if arguments else {}),
        }


class ResourceEntry(Struct, frozen=True):
    """A resource, or a template of resources if its URI has `{names}` in it."""

    uri: str
    name: str
    mime_type: str | None
    method: Method
    pattern: re.Pattern[str] | None = None
    ttl_ms: int = 0  # how long a client may keep the contents (2026-07-28)
    is_public: bool = False  # and whether all callers may share them

    def described(self, revision: Revision) -> JsonObject:
        return {
            "uriTemplate" if self.pattern else "uri": self.uri,
            "name": self.name,
            **_labels(self.method, revision),
            **({"description": self.method.description} if self.method.description else {}),
            **({"mimeType": self.mime_type} if self.mime_type else {}),
        }


class MethodEntry(Struct, frozen=True):
    """A method of an extension: its name is that of the MCP method."""

    method: Method
    extension: str


class Catalog:
    """Finds and describes everything that a server offers."""

    def __init__(self, registry: Registry, extensions: Mapping[str, JsonObject]) -> None:
        self.registry = registry
        self.extensions = extensions  # the settings that the app declares, by id
        self.methods: dict[str, MethodEntry] = {}
        self.on_method: Callable[[MethodEntry], None] = lambda _entry: None  # the server, once there is one, adds it
        self.tools = registry.tools
        self.prompts: dict[str, PromptEntry] = {}
        self.resources: dict[str, ResourceEntry] = {}
        self.templates: dict[str, ResourceEntry] = {}
        self.completions: dict[tuple[str, str], Method] = {}
        # What a kind of offer is found in: the server has something of it if one of them is not empty.
        self.offered: dict[str, Sequence[Mapping[Any, object]]] = {
            "tools": [self.tools],
            "prompts": [self.prompts],
            "resources": [self.resources, self.templates],
            "completions": [self.completions],
        }
        self._described: dict[tuple[str, str], list[Raw]] = {}

    # --- declaring ---------------------------------------------------------------------------------------------------

    def add_prompt(self, method: Method, name: str) -> None:
        _refuse_second(self.prompts, name, "prompt", method)
        self.prompts[name] = PromptEntry(name, method)

    def add_resource(
        self, method: Method, uri: str, name: str, mime_type: str | None, *, ttl_ms: int, is_public: bool
    ) -> None:
        # A URI template as a pattern: `{name}` is one segment, `{name*}` (or RFC 6570's `{+name}`) is one or more.
        pattern, end, names = "", 0, []
        for match in _NAME.finditer(uri):
            plus, field, star = match.groups()
            pattern += re.escape(uri[end : match.start()]) + f"(?P<{field}>{'[^?#]+' if plus or star else '[^/?#]+'})"
            names.append(field)
            end = match.end()
        found = re.compile(pattern + re.escape(uri[end:])) if names else None
        kind = self.templates if names else self.resources
        _refuse_second(kind, uri, "resource", method)
        theirs = [p.name for p in method.signature.parameters]
        if sorted(theirs) != sorted(names):
            raise UsageError(
                f"The function of resource {uri} cannot be called.",
                f"it takes ({', '.join(theirs)}), the URI names ({', '.join(names)})",
                "give it one parameter for every {name} of the URI, of the same name",
            )
        kind[uri] = ResourceEntry(uri, name, mime_type, method, found, ttl_ms, is_public)

    def add_completion(self, method: Method, of: str, argument: str) -> None:
        if (of, argument) in self.completions:
            raise UsageError(f"There is already a completion for {argument!r} of {of}.", "", "keep one of them")
        known: dict[str, PromptEntry | ResourceEntry] = {**self.prompts, **self.templates}
        if of not in known:
            raise UsageError(
                f"{of!r} is neither a prompt nor a resource template.",
                f"these are registered so far: {', '.join(known) or 'none'}",
                "register it before its completion, under the same name or URI",
            )
        arguments = [parameter.name for parameter in known[of].method.signature.parameters]
        if argument not in arguments:
            raise UsageError(
                f"{of} has no argument {argument!r} to complete.",
                f"its arguments are ({', '.join(arguments)})",
                "use the name of one of them",
            )
        self.completions[of, argument] = method

    def add_method(self, method: Method, extension: str) -> None:
        name, declared = method.name, ", ".join(self.extensions) or "none"
        for wrong, why, fix in (
            (
                extension not in self.extensions,
                f"this app declares these extensions: {declared}",
                f'declare it: App(..., extensions={{"{extension}": {{}}}})',
            ),
            (not _HEADER.fullmatch(name), "the header Mcp-Method repeats it", "use printable ASCII without spaces"),
            (
                name in MCP_METHODS or name.startswith((*MCP_FAMILIES, "rpc.")),
                "the name belongs to the protocol",
                "choose another name, such as loyalty/points",
            ),
            # JSON-RPC and MCP share one line on stdio.
            (name in self.registry.methods, "a method of JSON-RPC has the same name", "give one of them another"),
            (name in self.methods, "it is registered already", "give one of them another name"),
        ):
            if wrong:
                raise UsageError(f"{name!r} cannot be a method of the extension {extension}.", why, fix)
        self.methods[name] = entry = MethodEntry(method, extension)
        self.registry.taken.add(name)
        self.on_method(entry)

    # --- finding -----------------------------------------------------------------------------------------------------

    def resource(self, uri: str) -> tuple[ResourceEntry, dict[str, str]] | None:
        """Return the resource at a URI, and the values of the names in its template; None if no resource matches.

        Handlers build paths from these values. So a segment is never empty, `.` or `..`, and the decoded text of a segment
        has no separator in it: `/` ends a segment only where the URI itself says so, and `%2F` never does.
        """
        if uri in self.resources:
            return self.resources[uri], {}
        from urllib.parse import unquote  # late: only templates need it

        for template in self.templates.values():
            match = None if template.pattern is None else template.pattern.fullmatch(uri)
            if match is None:
                continue
            names = {name: value.split("/") for name, value in match.groupdict().items()}
            try:
                names = {name: [unquote(one, errors="strict") for one in given] for name, given in names.items()}
            except UnicodeDecodeError:
                continue
            if not any(one in ("", ".", "..") or _UNSAFE.search(one) for given in names.values() for one in given):
                return template, {name: "/".join(given) for name, given in names.items()}
        return None

    # --- describing --------------------------------------------------------------------------------------------------

    def list(self, kind: str, revision: Revision, may: Callable[[Method], bool] | None = None) -> list[Raw]:
        """Return the entries of a list as JSON, made once for each revision and count; with `may`, those that it allows."""
        tables: dict[str, Mapping[str, Method | PromptEntry | ResourceEntry]] = {
            "tools": self.tools,
            "prompts": self.prompts,
            "resources": self.resources,
            "resourceTemplates": self.templates,
        }
        entries = tables[kind].values()
        known = self._described.get((kind, revision.name))
        if known is None or len(known) != len(entries):
            known = self._described[kind, revision.name] = [
                Raw(encode(describe_tool(entry, revision) if isinstance(entry, Method) else entry.described(revision)))
                for entry in entries
            ]
        if may is None:
            return known
        methods = [entry if isinstance(entry, Method) else entry.method for entry in entries]
        return [told for told, method in zip(known, methods, strict=True) if may(method)]

    def forget(self) -> None:
        """Describe everything anew: the definitions have changed."""
        self._described.clear()


def _refuse_second(table: Mapping[str, PromptEntry | ResourceEntry], name: str, kind: str, method: Method) -> None:
    if name in table:
        places = f"{place_of(table[name].method.function)} and {place_of(method.function)}"
        raise UsageError(
            f"The {kind} {name!r} exists already.", f"a client finds it by its name: {places}", "give one of them another"
        )


# --- tools -----------------------------------------------------------------------------------------------------------


def describe_tool(method: Method, revision: Revision) -> JsonObject:
    """Return the definition of a tool in the words of a revision."""
    described: JsonObject = {"name": method.name, **_labels(method, revision)}
    if method.description:
        described["description"] = method.description
    described["inputSchema"] = input_schema(method)
    output = output_schema(method)
    if output is not None and revision.has("tool outputSchema"):
        if revision.value("structured") != "any":
            # Until 2025-11-25 structured content is an object: any other value is put under `result`.
            output = _resolved(output)
            if not is_object_schema(output):
                shared = {"$defs": output["$defs"]} if "$defs" in output else {}
                own = {name: value for name, value in output.items() if name != "$defs"}
                output = {"type": "object", "properties": {"result": own}, "required": ["result"], **shared}
        described["outputSchema"] = output
    if revision.has("tool annotations"):
        described["annotations"] = annotations(method)
    return described


def annotations(method: Method) -> JsonObject:
    """Return all five hints, so that a client needs no defaults. They follow from the kind of the method (T2)."""
    reads = not method.is_command
    return {
        **({"title": method.title} if method.title else {}),
        "readOnlyHint": reads,
        "destructiveHint": not reads and method.destructive is not False,
        "idempotentHint": reads or bool(method.idempotent),
        "openWorldHint": method.open_world is not False,
    }


def input_schema(method: Method) -> JsonObject:
    if method.input_schema is not None:
        return method.input_schema
    schema = dict(method.signature.schema)
    properties = {name: value for name, value in schema["properties"].items() if name != KEY}
    required = [name for name in schema["required"] if name != KEY]
    if method.key in ("required", "ask"):
        properties[KEY] = KEY_SCHEMA
        required = [*required, KEY]
    return {**schema, "properties": properties, "required": required}


def output_schema(method: Method) -> JsonObject | None:
    """Return the schema of a tool's value; None if that is text or content, or if its type is not declared."""
    if method.output_schema is not None:
        return method.output_schema
    return method.signature.result_schema if is_structured(method) else None


def is_structured(method: Method) -> bool:
    """Return whether a declared return type is data: anything but text, content or None."""
    if method.output_schema is not None:
        return True
    parts = list(_parts(method.signature.returns))
    return bool(method.signature.result_schema) and not all(
        part in (str, None, type(None)) or _is_content(part) for part in parts
    )


def _parts(hint: Any) -> Iterable[Any]:
    """Yield the members of a union, and of a list of content."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType, list, typing.Annotated):
        for part in typing.get_args(hint)[: 1 if origin is typing.Annotated else None]:
            inner = list(_parts(part))
            yield from inner if origin is not list or all(_is_content(one) for one in inner) else [hint]
    else:
        yield hint


def _is_content(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, (Content, ToolResult, Message))


def is_object_schema(schema: JsonObject) -> bool:
    return _resolved(schema).get("type") == "object"


def _resolved(schema: JsonObject) -> JsonObject:
    """Return a schema in place of a reference to its own `$defs`: older revisions need the type at the top."""
    reference = schema.get("$ref", "")
    if not reference.startswith("#/$defs/"):
        return schema
    found = schema.get("$defs", {}).get(reference.removeprefix("#/$defs/"), {})
    return {**found, "$defs": schema["$defs"]} if "$ref" not in found else schema


def _labels(method: Method, revision: Revision) -> JsonObject:
    """Return the members that tools, prompts and resources share, as far as a revision has them."""
    return {
        **({"title": method.title} if method.title and revision.has("title") else {}),
        **({"icons": method.icons} if method.icons and revision.has("icons") else {}),
        **({"_meta": method.meta} if method.meta and revision.has("definition meta") else {}),
    }
