"""2026-07-28: HTTP headers that repeat what the body says, so that proxies need not read bodies. They must agree.

    MCP-Protocol-Version    the version in `_meta`
    Mcp-Method              the method
    Mcp-Name                `params.name`, `params.uri` or `params.taskId`, of the methods that have one
    Mcp-Param-{name}        an argument of a tool whose schema marks it with `x-mcp-header`

A server refuses a header that is missing, doubled or different from the body with -32020 before anything runs (`check`); a
client writes them (`repeated`). Names are compared without case, values with it. A value that a header cannot carry as it is
travels as `=?base64?...?=`: anything but printable ASCII, blanks at its ends, and what looks like that form itself.
"""

import base64
import re
from collections.abc import Iterable, Mapping
from typing import Protocol, TypeAlias

from msgspec import Raw

from wirecall.errors import HeaderMismatch
from wirecall.mcp.types import Params
from wirecall.protocol.messages import JsonObject, decode_any
from wirecall.protocol.params import MARK, TOKEN

VERSION = "mcp-protocol-version"
METHOD = "mcp-method"
NAME = "mcp-name"
PARAM = "mcp-param-"

Marks: TypeAlias = Mapping[tuple[str, ...], str]  # the name of a header, by the path to the property that it repeats

# Which member of the params `Mcp-Name` repeats.
_NAMED = {
    "tools/call": "name",
    "prompts/get": "name",
    "resources/read": "uri",
    **dict.fromkeys(("tasks/get", "tasks/update", "tasks/cancel"), "task_id"),
}

_NUMBER = re.compile(r"-?[0-9]{1,400}(\.[0-9]+)?")
_OPEN, _CLOSE = "=?base64?", "?="
_PLAIN = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")  # fits a header as it is
_SENTINEL = re.compile(r"=\?base64\?.*\?=")
_MARKED_TYPES = ("string", "integer", "boolean")
_DATA = frozenset({MARK, "const", "enum", "default", "examples"})  # members of a schema that hold values, not schemas
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


class Fields(Protocol):
    """The header fields of a request."""

    first: dict[str, str]
    has_doubles: bool

    def get(self, name: str, /) -> str | None: ...
    def all(self, name: str) -> list[str]: ...


def check(fields: Fields, version: str, method: str, params: Params) -> None:
    """Raise `HeaderMismatch` unless the headers of a request repeat its body."""
    named: str | None = getattr(params, _NAMED.get(method, ""), None)
    first = fields.first
    # A header that differs from the body is refused (2026-07-28, basic/transports/streamable-http, "Server Validation").
    # Nearly always they are the same. Only if they differ, blanks and base64 are decoded and compared.
    if (
        fields.has_doubles
        or first.get("mcp-protocol-version") != version
        or first.get("mcp-method") != method
        or (named is not None and first.get("mcp-name") != named)
    ):
        _agree(_only(fields, VERSION), version, VERSION)
        _agree(_only(fields, METHOD), method, METHOD)
        if named is not None:
            _agree(_decoded(_only(fields, NAME), NAME), named, NAME)


def check_notification(fields: Fields, method: str) -> None:
    """Raise `HeaderMismatch` if a notification has a method header that differs from its body."""
    if fields.get(METHOD) is not None:
        _agree(_only(fields, METHOD), method, METHOD)


def check_marked(fields: Fields, arguments: Raw, marked: Marks) -> None:
    """Raise `HeaderMismatch` unless the headers repeat the marked arguments of a tool."""
    given = decode_any(arguments)
    for path, name in marked.items():
        value = _at(given, path)
        header = f"{PARAM}{name.lower()}"
        if value is None:
            if fields.get(header) is not None:
                raise HeaderMismatch(f"{header}: the body does not have this argument", header=header)
            continue
        text = _decoded(_only(fields, header), header)
        if isinstance(value, bool):
            is_same = text == ("true" if value else "false")
        elif isinstance(value, (int, float)):
            # As an integer if it is one: as floats 2**53 and 2**53 + 1 are the same.
            is_same = _NUMBER.fullmatch(text) is not None and (float(text) if "." in text else int(text)) == value
        else:
            is_same = text == value
        if not is_same:
            raise HeaderMismatch(f"{header}: the header differs from the argument in the body", header=header)


def marked(schema: JsonObject) -> dict[tuple[str, ...], str]:
    """Return the marked properties of a schema, by the path to them. Only plain `properties` are followed."""
    return {path: declared[MARK] for path, declared in _plain_marks(schema) if isinstance(declared[MARK], str)}


def _only(fields: Fields, name: str) -> str:
    values = fields.all(name)
    if len(values) != 1:
        raise HeaderMismatch(f"{name}: {'given more than once' if values else 'missing'}", header=name)
    return values[0]


def _agree(value: str, told: str, name: str) -> None:
    if value != told:
        raise HeaderMismatch(f"{name}: the header says {value[:100]!r}, the body {told[:100]!r}", header=name)


def _decoded(value: str, name: str) -> str:
    if not (value.startswith(_OPEN) and value.endswith(_CLOSE) and len(value) >= len(_OPEN + _CLOSE)):
        return value
    try:
        return base64.b64decode(value[len(_OPEN) : -len(_CLOSE)], validate=True).decode()
    except ValueError:
        raise HeaderMismatch(f"{name}: the base64 of its value is not valid", header=name) from None


def _at(value: object, path: tuple[str, ...]) -> object:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


# --- the client's side -----------------------------------------------------------------------------------------------


def repeated(version: str, method: str, params: object, marks: Marks) -> dict[str, str]:
    """Return the headers of one message."""
    told = {VERSION: version, METHOD: method}
    name = named(method, params)
    if name is not None:
        told[NAME] = rendered(name)
    if method == "tools/call":
        for path, header in marks.items():
            value = _at(params, ("arguments", *path))
            # A value that is null, missing or of a type that the schema does not allow has no header.
            if isinstance(value, (str, int)) or (isinstance(value, float) and value.is_integer()):
                told[f"{PARAM}{header}"] = rendered(value)
    return told


def named(method: str, params: object) -> str | None:
    """Return the name of the tool or prompt, the URI of the resource, or the id of the task, that a call is for."""
    member = _NAMED.get(method)
    member = "taskId" if member == "task_id" else member  # as it travels
    name = params.get(member) if member is not None and isinstance(params, dict) else None
    return name if isinstance(name, str) else None


def rendered(value: object) -> str:
    """Return a value as a header carries it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(int(value))
    text = str(value)
    if text == "" or (_PLAIN.fullmatch(text) and not _SENTINEL.fullmatch(text)):
        return text
    return f"{_OPEN}{base64.b64encode(text.encode()).decode()}{_CLOSE}"


def fault_of(schema: object) -> str | None:
    """Return the reason why the marks of a tool's schema are invalid, or None. Such a tool must not be called over HTTP."""
    plain = [declared for _, declared in _plain_marks(schema)]
    if len(list(_all_marks(schema))) > len(plain):
        return f"{MARK} is allowed on plain properties only"
    seen: set[str] = set()
    for declared in plain:
        name = declared[MARK]
        if not (isinstance(name, str) and TOKEN.fullmatch(name)):
            return f"{MARK}: {name!r} is not a valid header name"
        if name.lower() in seen:
            return f"{MARK}: {name!r} occurs twice"
        if declared.get("type") not in _MARKED_TYPES:
            return f"{MARK}: {name!r} marks a {declared.get('type')!r}; only {', '.join(_MARKED_TYPES)} may be marked"
        seen.add(name.lower())
    return None


def _plain_marks(schema: object, path: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], JsonObject]]:
    """Find the marked properties that can be followed from the top, and the path to each."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    for name, inner in properties.items() if isinstance(properties, dict) else ():
        if isinstance(inner, dict):
            if MARK in inner:
                yield (*path, name), inner
            yield from _plain_marks(inner, (*path, name))


def _all_marks(schema: object, is_schema: bool = True) -> Iterable[object]:
    """Find every mark, wherever a schema may stand. A property may have the name of the mark, and is not a mark then."""
    if isinstance(schema, list):
        for item in schema:
            yield from _all_marks(item)
    elif isinstance(schema, dict):
        if is_schema and MARK in schema:
            yield schema[MARK]
        for name, inner in schema.items():
            if name not in _DATA or not is_schema:
                yield from _all_marks(inner, is_schema=not (is_schema and name in _NAMED_SCHEMAS))
