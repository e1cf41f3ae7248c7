"""The catalog of a server: its tools, prompts, resources, completions and methods of extensions.

The definitions are `Method`s of the core, so that their calls take the core's steps: middleware,
binding, time limits, threads, and for tools the ledger. This file finds them by name or URI, and
describes them to clients as each revision requires. `calls` calls them, and shapes the values of
their functions.
"""

import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Raw, Struct

from wirecall.errors import UsageError
from wirecall.mcp.revisions import Revision
from wirecall.mcp.types import Content, Message, ToolResult
from wirecall.protocol.keys import with_key
from wirecall.protocol.messages import JsonObject, encode
from wirecall.protocol.params import KEY, place_of
from wirecall.server.method import MCP_FAMILIES, MCP_METHODS, Method, Registry

if TYPE_CHECKING:
    from wirecall.mcp.server.batch_tool import BatchMethod

_NAME = re.compile(r"\{(\+?)([A-Za-z_][A-Za-z0-9_]*)(\*?)\}")
# Characters that the header `Mcp-Method` can carry.
_HEADER = re.compile(r"[\x21-\x7e]+")
# Separators of both kinds of file systems, and control characters.
_UNSAFE = re.compile(r"[/\\\x00-\x1f\x7f]")

# Definitions of a batch tool that are kept: callers with different scopes see different tools.
MOST_BATCHES = 100

# Written for the model that fills in the argument (T1: key="ask").
KEY_SCHEMA = {
    "type": "string",
    "minLength": 1,
    "maxLength": 255,
    "description": (
        "A new random value, such as a UUID, for each separate thing you want done. "
        "If a call fails or its answer is lost, send the same value again: "
        "it is then done once, not twice. Use another value for another thing."
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
            if parameter.kind not in ("position", "name"):
                continue
            argument: JsonObject = {"name": parameter.name}
            if "description" in schema[parameter.name]:
                argument["description"] = schema[parameter.name]["description"]
            argument["required"] = parameter.required
            arguments.append(argument)
        described = {"name": self.name, **_labels(self.method, revision)}
        if self.method.description:
            described["description"] = self.method.description
        if arguments:
            described["arguments"] = arguments
        return described


class ResourceEntry(Struct, frozen=True):
    """A resource, or a template of resources if its URI has `{names}` in it."""

    uri: str
    name: str
    mime_type: str | None
    method: Method
    pattern: re.Pattern[str] | None = None
    # How long a client may keep the contents (2026-07-28).
    ttl_ms: int = 0
    # Whether all callers may share the contents.
    is_public: bool = False

    def described(self, revision: Revision) -> JsonObject:
        member = "uriTemplate" if self.pattern else "uri"
        described = {member: self.uri, "name": self.name, **_labels(self.method, revision)}
        if self.method.description:
            described["description"] = self.method.description
        if self.mime_type:
            described["mimeType"] = self.mime_type
        return described


class MethodEntry(Struct, frozen=True):
    """A method of an extension: its name is that of the MCP method."""

    method: Method
    extension: str


class Catalog:
    """Finds and describes everything that a server offers."""

    def __init__(self, registry: Registry, extensions: Mapping[str, JsonObject]) -> None:
        self.registry = registry
        # The settings that the app declares, by the id of the extension.
        self.extensions = extensions
        self.methods: dict[str, MethodEntry] = {}
        # The server sets it, and learns of methods that are added later.
        self.on_method: Callable[[MethodEntry], None] = lambda _entry: None
        self.tools = registry.tools
        self.prompts: dict[str, PromptEntry] = {}
        self.resources: dict[str, ResourceEntry] = {}
        self.templates: dict[str, ResourceEntry] = {}
        self.completions: dict[tuple[str, str], Method] = {}
        # The tables of each kind of offer: the server has this kind if one of them is not empty.
        self.offered: dict[str, Sequence[Mapping[Any, object]]] = {
            "tools": [self.tools],
            "prompts": [self.prompts],
            "resources": [self.resources, self.templates],
            "completions": [self.completions],
        }
        self._described: dict[tuple[str, str], list[Raw]] = {}
        # The batch tool, if the app has one, and its definitions by revision and visible tools.
        self.batch: BatchMethod | None = None
        self._batches: dict[tuple[str, tuple[str, ...]], Raw | None] = {}

    # --- declaring --------------------------------------------------------------------------------

    def add_prompt(self, method: Method, name: str) -> None:
        _refuse_second(self.prompts, name, "prompt", method)
        self.prompts[name] = PromptEntry(name, method)

    def add_resource(
        self,
        method: Method,
        uri: str,
        name: str,
        mime_type: str | None,
        *,
        ttl_ms: int,
        is_public: bool,
    ) -> None:
        names, pattern = _template(uri)
        kind = self.templates if names else self.resources
        _refuse_second(kind, uri, "resource", method)
        theirs = [p.name for p in method.signature.parameters]
        if sorted(theirs) != sorted(names):
            raise UsageError(
                f"The function of resource {uri} cannot be called.",
                f"it takes ({', '.join(theirs)}), the URI names ({', '.join(names)})",
                "give it one parameter for every {name} of the URI, of the same name",
            )
        kind[uri] = ResourceEntry(uri, name, mime_type, method, pattern, ttl_ms, is_public)

    def add_completion(self, method: Method, of: str, argument: str) -> None:
        if (of, argument) in self.completions:
            raise UsageError(
                f"There is already a completion for {argument!r} of {of}.", "", "keep one of them"
            )
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
        name = method.name
        declared = ", ".join(self.extensions) or "none"
        for wrong, why, fix in (
            (
                extension not in self.extensions,
                f"this app declares these extensions: {declared}",
                f'declare it: App(..., extensions={{"{extension}": {{}}}})',
            ),
            (
                not _HEADER.fullmatch(name),
                "the header Mcp-Method repeats it",
                "use printable ASCII without spaces",
            ),
            (
                name in MCP_METHODS or name.startswith((*MCP_FAMILIES, "rpc.")),
                "the name belongs to the protocol",
                "choose another name, such as loyalty/points",
            ),
            # JSON-RPC and MCP share one line on stdio.
            (
                name in self.registry.methods,
                "a method of JSON-RPC has the same name",
                "give one of them another",
            ),
            (name in self.methods, "it is registered already", "give one of them another name"),
        ):
            if wrong:
                raise UsageError(
                    f"{name!r} cannot be a method of the extension {extension}.", why, fix
                )
        self.methods[name] = entry = MethodEntry(method, extension)
        self.registry.taken.add(name)
        self.on_method(entry)

    def take(self, other: "Catalog", prefix: str, moved: Callable[[Method, str], Method]) -> None:
        """Add the entries of a mounted app: `moved` returns a method of its under another name."""
        names = {name: prefix + name for name in other.prompts}
        for name, prompt in other.prompts.items():
            called = names[name]
            self.add_prompt(moved(prompt.method, f"prompts/get:{called}"), called)
        for entry in (*other.resources.values(), *other.templates.values()):
            self.add_resource(
                moved(entry.method, entry.method.name),
                entry.uri,
                entry.name,
                entry.mime_type,
                ttl_ms=entry.ttl_ms,
                is_public=entry.is_public,
            )
        for (of, argument), method in other.completions.items():
            called = names.get(of, of)
            completer = moved(method, f"completion/complete:{called}:{argument}")
            self.add_completion(completer, called, argument)
        for name, added in other.methods.items():
            self.add_method(moved(added.method, name), added.extension)

    # --- finding ----------------------------------------------------------------------------------

    def resource(self, uri: str) -> tuple[ResourceEntry, dict[str, str]] | None:
        """Return the resource at a URI, and the values of the names in its template.

        Returns None if no resource matches. Handlers build paths from these values. So a segment is
        never empty, `.` or `..`, and the decoded text of a segment has no separator in it: `/` ends
        a segment only where the URI itself says so, and `%2F` never does.
        """
        if uri in self.resources:
            return self.resources[uri], {}
        from urllib.parse import unquote  # late: only templates need it

        for template in self.templates.values():
            assert template.pattern is not None
            match = template.pattern.fullmatch(uri)
            if match is None:
                continue
            names = {name: value.split("/") for name, value in match.groupdict().items()}
            try:
                names = {
                    name: [unquote(one, errors="strict") for one in given]
                    for name, given in names.items()
                }
            except UnicodeDecodeError:
                continue
            if not any(
                one in ("", ".", "..") or _UNSAFE.search(one)
                for given in names.values()
                for one in given
            ):
                return template, {name: "/".join(given) for name, given in names.items()}
        return None

    # --- describing -------------------------------------------------------------------------------

    def _tools(
        self,
        known: list[Raw],
        revision: Revision,
        may: Callable[[Method], bool] | None,
        may_call: Callable[[Method], bool] | None,
    ) -> list[Raw]:
        """Return the tools that a caller sees, and the batch tool for those that it may call."""
        assert self.batch is not None
        shown: list[Raw] = []
        callable_tools: list[Method] = []
        for described, tool in zip(known, self.tools.values(), strict=True):
            if tool is self.batch or not (may is None or may(tool)):
                continue
            shown.append(described)
            if may_call is None or may_call(tool):
                callable_tools.append(tool)
        key = revision.name, tuple(tool.name for tool in callable_tools)
        if key not in self._batches:
            if len(self._batches) >= MOST_BATCHES:
                self._batches.clear()
            definition = self.batch.describe(callable_tools, revision)
            self._batches[key] = None if definition is None else Raw(encode(definition))
        batch = self._batches[key]
        return shown if batch is None else [*shown, batch]

    def list(
        self,
        kind: str,
        revision: Revision,
        may: Callable[[Method], bool] | None = None,
        may_call: Callable[[Method], bool] | None = None,
    ) -> list[Raw]:
        """Return the entries of a list as JSON; with `may`, those that it allows.

        A batch tool offers those that `may_call` allows. The JSON is made once for each revision
        and count of entries.
        """
        tables: dict[str, Mapping[str, Method | PromptEntry | ResourceEntry]] = {
            "tools": self.tools,
            "prompts": self.prompts,
            "resources": self.resources,
            "resourceTemplates": self.templates,
        }
        entries = tables[kind].values()
        known = self._described.get((kind, revision.name))
        if known is None or len(known) != len(entries):
            known = [Raw(encode(_described(entry, revision))) for entry in entries]
            self._described[kind, revision.name] = known
        if kind == "tools" and self.batch is not None:
            return self._tools(known, revision, may, may_call)
        if may is None:
            return known
        return [
            described
            for described, entry in zip(known, entries, strict=True)
            if may(_method_of(entry))
        ]

    def forget(self) -> None:
        """Forget the descriptions: the definitions have changed."""
        self._described.clear()
        self._batches.clear()


def _described(entry: "Method | PromptEntry | ResourceEntry", revision: Revision) -> JsonObject:
    if isinstance(entry, Method):
        return describe_tool(entry, revision)
    return entry.described(revision)


def _method_of(entry: "Method | PromptEntry | ResourceEntry") -> Method:
    if isinstance(entry, Method):
        return entry
    return entry.method


def _template(uri: str) -> tuple[list[str], re.Pattern[str] | None]:
    """Return the names in a URI template, and its pattern; None if it has no names.

    `{name}` is one segment, `{name*}` (or RFC 6570's `{+name}`) is one or more.
    """
    pattern = ""
    end = 0
    names = []
    for match in _NAME.finditer(uri):
        plus, name, star = match.groups()
        value = "[^?#]+" if plus or star else "[^/?#]+"
        pattern += re.escape(uri[end : match.start()]) + f"(?P<{name}>{value})"
        names.append(name)
        end = match.end()
    if not names:
        return [], None
    return names, re.compile(pattern + re.escape(uri[end:]))


def _refuse_second(
    table: Mapping[str, PromptEntry | ResourceEntry], name: str, kind: str, method: Method
) -> None:
    if name in table:
        places = f"{place_of(table[name].method.function)} and {place_of(method.function)}"
        raise UsageError(
            f"The {kind} {name!r} exists already.",
            f"a client finds it by its name: {places}",
            "give one of them another",
        )


# --- tools ----------------------------------------------------------------------------------------


def describe_tool(method: Method, revision: Revision) -> JsonObject:
    """Return the definition of a tool as a revision has it."""
    described: JsonObject = {"name": method.tool_name, **_labels(method, revision)}
    if method.description:
        described["description"] = method.description
    described["inputSchema"] = input_schema(method)
    output = output_schema(method)
    if output is not None and revision.has("tool outputSchema"):
        if revision.value("structured") != "any":
            # Until 2025-11-25 structured content is an object: any other value is put under
            # `result`.
            output = _with_used_definitions(_resolved(output))
            if not is_object_schema(output):
                output = _under_result(output)
        described["outputSchema"] = output
    if revision.has("tool annotations"):
        described["annotations"] = annotations(method)
    return described


def _under_result(schema: JsonObject) -> JsonObject:
    """Return the schema of an object that has the described value as its only member."""
    own = {name: value for name, value in schema.items() if name != "$defs"}
    wrapped: JsonObject = {
        "type": "object",
        "properties": {"result": own},
        "required": ["result"],
    }
    if "$defs" in schema:
        wrapped["$defs"] = schema["$defs"]
    return wrapped


def annotations(method: Method) -> JsonObject:
    """Return all five hints, so that a client needs no defaults.

    They follow from the kind of the method (T2).
    """
    reads = not method.is_command
    hints: JsonObject = {}
    if method.title:
        hints["title"] = method.title
    hints["readOnlyHint"] = reads
    hints["destructiveHint"] = not reads and method.destructive is not False
    hints["idempotentHint"] = reads or bool(method.idempotent)
    hints["openWorldHint"] = method.open_world is not False
    return hints


def input_schema(method: Method) -> JsonObject:
    if method.input_schema is not None:
        return method.input_schema
    schema = dict(method.signature.schema)
    properties = {name: value for name, value in schema["properties"].items() if name != KEY}
    required = [name for name in schema["required"] if name != KEY]
    is_asked = method.key in ("required", "ask")
    if method.key_place is not None:
        whole = {**schema, "properties": properties, "required": required}
        return with_key(whole, method.key_place, KEY_SCHEMA, required=is_asked)
    if is_asked:
        properties[KEY] = KEY_SCHEMA
        required = [*required, KEY]
    return {**schema, "properties": properties, "required": required}


def output_schema(method: Method) -> JsonObject | None:
    """Return the schema of a tool's value.

    Returns None if the value is text or content, or if its type is not declared.
    """
    if method.output_schema is not None:
        return method.output_schema
    if not is_structured(method):
        return None
    return method.signature.result_schema


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
    if origin is typing.Annotated:
        yield from _parts(typing.get_args(hint)[0])
    elif origin in (typing.Union, types.UnionType):
        for part in typing.get_args(hint):
            yield from _parts(part)
    elif origin is list:
        inner = [one for part in typing.get_args(hint) for one in _parts(part)]
        if all(_is_content(part) for part in inner):
            yield from inner
        else:
            yield hint
    else:
        yield hint


def _is_content(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, (Content, ToolResult, Message))


def is_object_schema(schema: JsonObject) -> bool:
    return _resolved(schema).get("type") == "object"


def _resolved(schema: JsonObject) -> JsonObject:
    """Return a schema in place of a reference to its own `$defs`.

    Older revisions need the type at the top.
    """
    reference = schema.get("$ref", "")
    if not reference.startswith("#/$defs/"):
        return schema
    found = schema.get("$defs", {}).get(reference.removeprefix("#/$defs/"), {})
    if "$ref" in found:
        return schema
    return {**found, "$defs": schema["$defs"]}


def _with_used_definitions(schema: JsonObject) -> JsonObject:
    """Return a schema without the definitions that nothing in it refers to.

    Clients compile or show all of them.
    """
    definitions = schema.get("$defs")
    if not isinstance(definitions, dict):
        return schema
    body = {name: value for name, value in schema.items() if name != "$defs"}
    used: set[str] = set()
    found = [*_references(body)]
    while found:
        name = found.pop()
        if name in definitions and name not in used:
            used.add(name)
            found += _references(definitions[name])
    kept = {name: value for name, value in definitions.items() if name in used}
    if not kept:
        return body
    return {**body, "$defs": kept}


def _references(schema: object) -> Iterable[str]:
    """Yield the names of the definitions that a schema refers to."""
    if isinstance(schema, dict):
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/$defs/"):
            yield reference.removeprefix("#/$defs/").partition("/")[0]
        # A discriminator refers to definitions by plain strings.
        mapping = schema.get("mapping")
        if isinstance(mapping, dict):
            for target in mapping.values():
                yield from _references({"$ref": target})
    inner: Iterable[object] = ()
    if isinstance(schema, dict):
        inner = schema.values()
    elif isinstance(schema, list):
        inner = schema
    for each in inner:
        yield from _references(each)


def _labels(method: Method, revision: Revision) -> JsonObject:
    """Return the members that tools, prompts and resources share, as far as a revision has them."""
    labels: JsonObject = {}
    if method.title and revision.has("title"):
        labels["title"] = method.title
    if method.icons and revision.has("icons"):
        labels["icons"] = method.icons
    if method.meta and revision.has("definition meta"):
        labels["_meta"] = method.meta
    return labels
