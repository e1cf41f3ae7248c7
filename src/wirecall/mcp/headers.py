"""2026-07-28: HTTP headers that repeat parts of the body, so that proxies need not read it.

Both must agree.

    MCP-Protocol-Version    the version in `_meta`
    Mcp-Method              the method
    Mcp-Name                `params.name`, `params.uri` or `params.taskId`, for methods that have one
    Mcp-Param-{name}        an argument of a tool whose schema marks it with `x-mcp-header`

A server refuses a header that is missing, doubled or different from the body with -32020 before
anything runs (`check`); a client writes them (`repeated`). Names are compared without case, values
with it. A value that does not fit a header is sent as `=?base64?...?=`: anything but printable
ASCII, blanks at its ends, and values that look like this form.
"""

import base64
import re
from collections.abc import Iterable, Mapping
from typing import Protocol, TypeAlias

from msgspec import UNSET, Raw, UnsetType

from wirecall.errors import HeaderMismatch
from wirecall.mcp.types import Params
from wirecall.protocol.messages import JsonObject, decode_any
from wirecall.protocol.params import MARK, TOKEN

VERSION = "mcp-protocol-version"
METHOD = "mcp-method"
NAME = "mcp-name"
PARAM = "mcp-param-"

# Header name by the path to the property that it repeats.
Marks: TypeAlias = Mapping[tuple[str, ...], str]

# Which member of the params `Mcp-Name` repeats.
_NAMED = {
    "tools/call": "name",
    "prompts/get": "name",
    "resources/read": "uri",
    **dict.fromkeys(("tasks/get", "tasks/update", "tasks/cancel"), "task_id"),
}

_NUMBER = re.compile(r"-?[0-9]{1,400}(\.[0-9]+)?")
_OPEN = "=?base64?"
_CLOSE = "?="
# A value that fits a header unchanged.
_PLAIN = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")
_SENTINEL = re.compile(r"=\?base64\?.*\?=")
_MARKED_TYPES = ("string", "integer", "boolean")
# Members of a schema that hold values, not schemas.
_DATA = frozenset({MARK, "const", "enum", "default", "examples"})
_NAMED_SCHEMAS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)


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
    # A header that differs from the body is refused (2026-07-28, basic/transports/streamable-http,
    # "Server Validation"). They are nearly always equal. Only if they differ, strip blanks and
    # decode base64, then compare.
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


def check_name(fields: Fields, method: str, params: object) -> None:
    """Raise `HeaderMismatch` unless `Mcp-Name` repeats the name in params that have no type here."""
    name = named(method, params)
    if name is not None:
        _agree(_decoded(_only(fields, NAME), NAME), name, NAME)


def check_notification(fields: Fields, method: str) -> None:
    """Raise `HeaderMismatch` if a notification has a method header that differs from its body."""
    if fields.get(METHOD) is not None:
        _agree(_only(fields, METHOD), method, METHOD)


def check_marked(fields: Fields, arguments: Raw | UnsetType, marked: Marks) -> None:
    """Raise `HeaderMismatch` unless the headers repeat the marked arguments of a tool."""
    given = {} if arguments is UNSET else decode_any(arguments)
    for path, name in marked.items():
        value = _at(given, path)
        header = f"{PARAM}{name.lower()}"
        if value is None:
            if fields.get(header) is not None:
                raise HeaderMismatch(
                    f"{header}: the body does not have this argument", header=header
                )
            continue
        if not _is_same(_decoded(_only(fields, header), header), value):
            raise HeaderMismatch(
                f"{header}: the header differs from the argument in the body", header=header
            )


def _is_same(text: str, value: object) -> bool:
    """Return whether the value of a header is that of an argument."""
    if isinstance(value, bool):
        return text == rendered(value)
    if not isinstance(value, (int, float)):
        return text == value
    if not _NUMBER.fullmatch(text):
        return False
    # Compare integers as integers: as floats, 2**53 and 2**53 + 1 are equal.
    if "." in text:
        return float(text) == value
    return int(text) == value


def marked(schema: JsonObject) -> dict[tuple[str, ...], str]:
    """Return the marked properties of a schema, by the path to them.

    Only plain `properties` are followed.
    """
    return {
        path: declared[MARK]
        for path, declared in _plain_marks(schema)
        if isinstance(declared[MARK], str)
    }


def _only(fields: Fields, name: str) -> str:
    values = fields.all(name)
    if not values:
        raise HeaderMismatch(f"{name}: missing", header=name)
    if len(values) > 1:
        raise HeaderMismatch(f"{name}: given more than once", header=name)
    return values[0]


def _agree(value: str, body: str, name: str) -> None:
    if value != body:
        raise HeaderMismatch(
            f"{name}: the header says {value[:100]!r}, the body {body[:100]!r}", header=name
        )


def _decoded(value: str, name: str) -> str:
    if not (
        value.startswith(_OPEN) and value.endswith(_CLOSE) and len(value) >= len(_OPEN + _CLOSE)
    ):
        return value
    try:
        return base64.b64decode(value[len(_OPEN) : -len(_CLOSE)], validate=True).decode()
    except ValueError:
        raise HeaderMismatch(f"{name}: the base64 of its value is not valid", header=name) from None


def _at(value: object, path: tuple[str, ...]) -> object:
    for name in path:
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value


# --- the client's side ----------------------------------------------------------------------------


def repeated(version: str, method: str, params: object, marks: Marks) -> dict[str, str]:
    """Return the headers of one message."""
    fields = {VERSION: version, METHOD: method}
    name = named(method, params)
    if name is not None:
        fields[NAME] = rendered(name)
    if method == "tools/call":
        for path, header in marks.items():
            value = _at(params, ("arguments", *path))
            # A value that is null, missing or of a type that the schema does not allow has no
            # header.
            if isinstance(value, (str, int)) or (isinstance(value, float) and value.is_integer()):
                fields[f"{PARAM}{header}"] = rendered(value)
    return fields


def named(method: str, params: object) -> str | None:
    """Return the name of the tool or prompt that a call is for, or its URI, or its task id."""
    member = _NAMED.get(method)
    if member is None or not isinstance(params, dict):
        return None
    if member == "task_id":
        member = "taskId"  # its name on the wire
    name = params.get(member)
    return name if isinstance(name, str) else None


def rendered(value: object) -> str:
    """Return a value in the form for a header."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(int(value))
    text = str(value)
    if text == "" or (_PLAIN.fullmatch(text) and not _SENTINEL.fullmatch(text)):
        return text
    return f"{_OPEN}{base64.b64encode(text.encode()).decode()}{_CLOSE}"


def fault_of(schema: object) -> str | None:
    """Return the reason why the marks of a tool's schema are invalid, or None.

    Such a tool must not be called over HTTP.
    """
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
            allowed = ", ".join(_MARKED_TYPES)
            return (
                f"{MARK}: {name!r} marks a {declared.get('type')!r}; only {allowed} may be marked"
            )
        seen.add(name.lower())
    return None


def _plain_marks(
    schema: object, path: tuple[str, ...] = ()
) -> Iterable[tuple[tuple[str, ...], JsonObject]]:
    """Yield the marked properties that plain `properties` reach from the top, with their paths."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return
    for name, inner in properties.items():
        if isinstance(inner, dict):
            if MARK in inner:
                yield (*path, name), inner
            yield from _plain_marks(inner, (*path, name))


def _all_marks(schema: object, is_schema: bool = True) -> Iterable[object]:
    """Find every mark in any nested schema. A property with the name of the mark is not a mark."""
    if isinstance(schema, list):
        for item in schema:
            yield from _all_marks(item)
    elif isinstance(schema, dict):
        if is_schema and MARK in schema:
            yield schema[MARK]
        for name, inner in schema.items():
            if name not in _DATA or not is_schema:
                yield from _all_marks(inner, is_schema=not (is_schema and name in _NAMED_SCHEMAS))
