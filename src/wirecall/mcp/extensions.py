"""Extensions of MCP (SEP-2133): the form of their ids, and the declarations of both sides.

    "capabilities": {"extensions": {"com.example/loyalty": {"tiers": ["gold"]}}}

A key is the id of an extension, a value the settings of the side that declares it: `{}` if it has none. An extension is in
use only if both sides declare it. If one side lacks it, the other falls back to the core protocol, or refuses the request
(2026-07-28, basic/versioning, "Extension Negotiation").
"""

import re
from collections.abc import Mapping

import msgspec

from wirecall.errors import EncodeError, UsageError
from wirecall.mcp.revisions import Revision
from wirecall.protocol.messages import JsonObject, encode

# The grammar of `_meta` keys (2026-07-28, basic, "`_meta`"), with a prefix, and with a name that is not empty.
_LABEL = r"[A-Za-z](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_ID = re.compile(rf"{_LABEL}(?:\.{_LABEL})*/[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")


def checked(extensions: Mapping[str, JsonObject]) -> dict[str, JsonObject]:
    """Return a copy of the extensions that a user declares: settings by id. Raises `UsageError` if one is malformed."""
    if not isinstance(extensions, Mapping):
        got = type(extensions).__name__
        raise UsageError(f"extensions must be a dict, got {got}.", fix='use extensions={"com.example/loyalty": {}}')
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
            raise UsageError(f"The settings of {id} must be an object, got {got}.", fix="use {} if there are none")
        try:
            copies[id] = msgspec.json.decode(encode(dict(settings)))
        except EncodeError as error:
            raise UsageError(
                f"The settings of {id} cannot be written as JSON.", str(error), "use strings, numbers, lists and dicts"
            ) from None
    return copies


def declared(capabilities: JsonObject, revision: Revision) -> dict[str, JsonObject]:
    """Return the extensions among the capabilities of the other side: settings by id. Malformed ones are left out."""
    told = capabilities.get("extensions") if revision.has("capability extensions") else None
    if not isinstance(told, dict):
        return {}
    return {id: settings for id, settings in told.items() if isinstance(settings, dict)}
