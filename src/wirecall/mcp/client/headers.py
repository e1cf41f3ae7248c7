"""2026-07-28: the headers that a client's request repeats its body in (`headers` has the server's side).

    MCP-Protocol-Version, Mcp-Method     of every request
    Mcp-Name                             `params.name` or `params.uri`, of the methods that have one
    Mcp-Param-{name}                     an argument that the tool's schema marks with `x-mcp-header`

A value that a header cannot carry as it is travels as `=?base64?...?=`: anything but printable ASCII, blanks at its ends,
and what looks like that form itself. A tool whose marks break the rules of the specification is not to be called over HTTP.
"""

import base64
import re
from collections.abc import Iterable, Mapping
from typing import Any

from wirecall.logs import logger
from wirecall.mcp.client.results import Tool
from wirecall.mcp.headers import MARK, METHOD, NAME, PARAM, VERSION, marked

Marks = Mapping[tuple[str, ...], str]

_NAMED = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
_PLAIN = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")  # fits a header as it is
_SENTINEL = re.compile(r"=\?base64\?.*\?=")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, section 5.6.2
_MARKED_TYPES = ("string", "integer", "boolean")


def repeated(version: str, method: str, params: Any, marks: Marks) -> dict[str, str]:
    """The headers of one message."""
    told = {VERSION: version, METHOD: method}
    name = named(method, params)
    if name is not None:
        told[NAME] = rendered(name)
    if method == "tools/call" and marks:
        told |= _arguments(params.get("arguments"), marks)
    return told


def named(method: str, params: Any) -> str | None:
    """What a call is about: the name of a tool or a prompt, the URI of a resource."""
    member = _NAMED.get(method)
    name = params.get(member) if member is not None and isinstance(params, dict) else None
    return name if isinstance(name, str) else None


def _arguments(arguments: Any, marks: Marks) -> dict[str, str]:
    found = {f"{PARAM}{name}": _at(arguments, path) for path, name in marks.items()}
    return {name: rendered(value) for name, value in found.items() if _is_told(value)}


def _at(value: Any, path: Iterable[str]) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _is_told(value: Any) -> bool:
    """Null and what is left out have no header, nor has what the schema does not allow there."""
    return isinstance(value, (str, int)) or (isinstance(value, float) and value.is_integer())


def rendered(value: Any) -> str:
    """A value as a header carries it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(int(value))
    if value == "" or (_PLAIN.fullmatch(value) and not _SENTINEL.fullmatch(value)):
        return str(value)
    return f"=?base64?{base64.b64encode(value.encode()).decode()}?="


# --- which tools may be called ---------------------------------------------------------------------------------------


def callable_tools(tools: Iterable[Tool]) -> list[Tool]:
    """The tools whose marks are sound; the others are left out with a warning, as the specification demands."""
    sound = []
    for tool in tools:
        if fault := fault_of(tool.input_schema):
            logger.warning("the tool %r is left out: %s", tool.name, fault)
        else:
            sound.append(tool)
    return sound


def fault_of(schema: Any) -> str | None:
    """What is wrong with the marks of a schema, if anything is."""
    plain = set(_plain_marks(schema))
    everywhere = list(_all_marks(schema))
    if len(everywhere) > len(plain):
        return f"{MARK} stands where it cannot be followed: only plain properties may have it"
    seen: set[str] = set()
    for path in plain:
        declared = _declared(schema, path)
        name = declared[MARK]
        if not (isinstance(name, str) and _TOKEN.fullmatch(name)):
            return f"{MARK}: {name!r} is not a name that a header can have"
        if name.lower() in seen:
            return f"{MARK}: {name!r} is there twice"
        if declared.get("type") not in _MARKED_TYPES:
            return f"{MARK}: {name!r} marks a {declared.get('type')!r}; only {', '.join(_MARKED_TYPES)} may be marked"
        seen.add(name.lower())
    return None


def marks_of(tool: Tool) -> Marks:
    return marked(tool.input_schema)


def _plain_marks(schema: Any, path: tuple[str, ...] = ()) -> Iterable[tuple[str, ...]]:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    for name, inner in properties.items() if isinstance(properties, dict) else ():
        if isinstance(inner, dict):
            if MARK in inner:
                yield (*path, name)
            yield from _plain_marks(inner, (*path, name))


def _all_marks(schema: Any, is_schema: bool = True) -> Iterable[Any]:
    """Every mark, wherever a schema may stand. A property may be called like the mark; that is no mark."""
    if isinstance(schema, list):
        for item in schema:
            yield from _all_marks(item)
    elif isinstance(schema, dict):
        if is_schema and MARK in schema:
            yield schema[MARK]
        for name, inner in schema.items():
            if name not in _DATA or not is_schema:
                yield from _all_marks(inner, is_schema=not (is_schema and name in _NAMED_SCHEMAS))


_DATA = frozenset({MARK, "const", "enum", "default", "examples"})  # members that hold values, not schemas
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def _declared(schema: Any, path: tuple[str, ...]) -> dict[str, Any]:
    for name in path:
        schema = schema["properties"][name]
    found: dict[str, Any] = schema
    return found
