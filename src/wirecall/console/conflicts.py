"""Which members differ between the params of a record and those of a call with the same key."""

from typing import Any

import msgspec

from wirecall.errors import KeyConflict
from wirecall.protocol.messages import Json, JsonObject

CODE = KeyConflict.CODE
NO_RECORD = "The record has no params: its method is declared without `record_params=True`."
NO_BODY = "The params of that call were not captured: start the server with `--capture bodies`."
OLD_BODY = "The params of that call are not kept any more."
TOO_LONG = "The params are too long to be compared here."
SECRET = "They differ in a member that is secret, or only in their form."


def conflict_of(call: Json, recorded: str | None, body: JsonObject) -> JsonObject:
    """Return how a call differs from a record: the names of the members, or why there are none.

    `recorded` are the params of the record as JSON. `body` is the worker's answer about the call.
    """
    sent = None
    if body["body"] is not None:
        sent = body["body"]["params"]
    if recorded is None:
        return _unknown(call, NO_RECORD)
    if sent is None:
        return _unknown(call, OLD_BODY if body["capture"] == "bodies" else NO_BODY)
    first = _members(recorded)
    second = _members(sent)
    if first is None or second is None:
        return _unknown(call, TOO_LONG)
    missing = object()
    names = [
        name
        for name in dict.fromkeys([*first, *second])
        if first.get(name, missing) != second.get(name, missing)
    ]
    if not names:
        return _unknown(call, SECRET)
    return {"call": call, "differs": names, "why": None}


def _unknown(call: Json, why: str) -> JsonObject:
    return {"call": call, "differs": [], "why": why}


def _members(text: str) -> dict[str, Any] | None:
    """Return the members of params, those without names by their positions; None if it cannot."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None
    if isinstance(value, list):
        return {f"#{position}": each for position, each in enumerate(value, start=1)}
    if isinstance(value, dict):
        return value
    return None
