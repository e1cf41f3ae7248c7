"""2026-07-28: HTTP headers that repeat what the body says, so that proxies need not read bodies. They must agree.

    MCP-Protocol-Version    the version in `_meta`
    Mcp-Method              the method
    Mcp-Name                `params.name` or `params.uri`, of the methods that have one
    Mcp-Param-{name}        an argument of a tool whose schema marks it with `x-mcp-header`

A header that is missing, doubled or says something else is refused with -32020 before anything runs. Names are compared
without case, values with it. A value that a header cannot carry as it is comes as `=?base64?...?=`.
"""

import base64
import re
from collections.abc import Mapping
from typing import Any, Protocol

from msgspec import UNSET, Raw

from wirecall.errors import HeaderMismatch
from wirecall.mcp.types import Params
from wirecall.protocol.messages import decode_any

VERSION = "mcp-protocol-version"
METHOD = "mcp-method"
NAME = "mcp-name"
PARAM = "mcp-param-"
MARK = "x-mcp-header"

# Which member of the params `Mcp-Name` repeats.
_NAMED = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}

_NUMBER = re.compile(r"-?[0-9]{1,400}(\.[0-9]+)?")
_OPEN, _CLOSE = "=?base64?", "?="


class Fields(Protocol):
    """The header fields of a request."""

    first: dict[bytes, bytes]
    has_doubles: bool

    def get(self, name: str, /) -> str | None: ...
    def all(self, name: str) -> list[str]: ...


def is_doubled(fields: Fields, name: str) -> bool:
    """Whether a header is there more than once; which of its values a proxy has judged is not known then."""
    return fields.has_doubles and len(fields.all(name)) > 1


def names(fields: Fields, version: str) -> bool:
    """Whether the version header is there once, and is this one to the letter."""
    return not fields.has_doubles and fields.first.get(b"mcp-protocol-version") == version.encode()


def check(fields: Fields, method: str, params: Params) -> None:
    """The headers that every request has."""
    assert params.meta is not UNSET and params.meta.version is not UNSET
    named: str | None = getattr(params, _NAMED.get(method, ""), None)
    first = fields.first
    # Nearly always the bytes are the same; only if they are not, blanks and base64 have to be looked through.
    if (
        fields.has_doubles
        or first.get(b"mcp-protocol-version") != params.meta.version.encode()
        or first.get(b"mcp-method") != method.encode()
        or (named is not None and first.get(b"mcp-name") != named.encode())
    ):
        _agree(_only(fields, VERSION), params.meta.version, VERSION)
        _agree(_only(fields, METHOD), method, METHOD)
        if named is not None:
            _agree(_decoded(_only(fields, NAME), NAME), named, NAME)


def check_notification(fields: Fields, method: str) -> None:
    """A notification needs no headers; those it has must be right."""
    if fields.get(METHOD) is not None:
        _agree(_only(fields, METHOD), method, METHOD)


def check_marked(fields: Fields, arguments: Raw, marked: Mapping[tuple[str, ...], str]) -> None:
    """The arguments that a tool's schema wants repeated."""
    given = decode_any(arguments)
    for path, name in marked.items():
        value = _at(given, path)
        header = f"{PARAM}{name.lower()}"
        if value is None:
            if fields.get(header) is not None:
                raise HeaderMismatch(f"{header}: there is no such argument in the body", header=header)
        elif not _is_same(_decoded(_only(fields, header), header), value):
            raise HeaderMismatch(f"{header}: it differs from the argument in the body", header=header)


def marked(schema: Mapping[str, Any]) -> dict[tuple[str, ...], str]:
    """The properties of a schema that are marked, by the way to them. Only plain `properties` are followed."""
    found: dict[tuple[str, ...], str] = {}
    for name, inner in schema.get("properties", {}).items():
        if isinstance(inner, dict):
            if isinstance(inner.get(MARK), str):
                found[name,] = inner[MARK]
            found |= {(name, *path): header for path, header in marked(inner).items()}
    return found


def _only(fields: Fields, name: str) -> str:
    value = fields.get(name)
    if value is None or is_doubled(fields, name):
        raise HeaderMismatch(f"{name}: {'missing' if value is None else 'given more than once'}", header=name)
    return value


def _agree(value: str, told: str, name: str) -> None:
    if value != told:
        raise HeaderMismatch(f"{name}: the header says {value[:100]!r}, the body {told[:100]!r}", header=name)


def _decoded(value: str, name: str) -> str:
    if not (value.startswith(_OPEN) and value.endswith(_CLOSE) and len(value) >= len(_OPEN + _CLOSE)):
        return value
    try:
        return base64.b64decode(value[len(_OPEN) : -len(_CLOSE)], validate=True).decode()
    except ValueError:
        raise HeaderMismatch(f"{name}: its base64 cannot be read", header=name) from None


def _at(value: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _is_same(text: str, value: Any) -> bool:
    if isinstance(value, bool):
        return text == ("true" if value else "false")
    if isinstance(value, (int, float)):
        # As an integer if it is one: as floats 2**53 and 2**53 + 1 are the same.
        return _NUMBER.fullmatch(text) is not None and (float(text) if "." in text else int(text)) == value
    return bool(text == value)
