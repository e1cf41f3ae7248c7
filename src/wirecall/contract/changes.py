"""The changes between two contracts, and which of them break callers.

| Level | Changes |
| --- | --- |
| breaking | an offer is gone; an argument is gone, newly required or takes less; a result may be another; effects grow |
| careful | a text changed (models read it), a default changed, an optional member of a result is gone |
| fine | an offer, an optional argument or a member of a result is new; an argument takes more |
"""

from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from wirecall.contract.lock import SECTIONS, Contract, LockedMethod, LockedPrompt, LockedResource, LockedTool
from wirecall.contract.schemas import inner, misfits, shown
from wirecall.protocol.messages import Json

Level: TypeAlias = Literal["breaking", "careful", "fine"]
LEVELS: tuple[Level, ...] = ("breaking", "careful", "fine")

# The texts of a misfit. Forward: the old contract's caller meets the new server. Backward: the other way round, where a
# misfit means that the new contract allows more.
_TEXTS = {
    ("params", "forward"): {
        "required": "is required now",
        "gone": "is not taken any more",
        "value": "{} is not accepted any more",
    },
    ("params", "backward"): {"required": "is optional now", "gone": "is new, and optional", "value": "{} is accepted too"},
    ("result", "forward"): {"required": "may be missing now", "new": "is new", "value": "may be {} now"},
    ("result", "backward"): {"required": "is always there now", "gone": "may be gone", "value": "is never {} any more"},
}


class Difference(Struct, frozen=True, order=True):
    """One difference: how it affects callers, where it is, and what it is."""

    level: Level
    place: str
    text: str


def changes(old: Contract, new: Contract) -> list[Difference]:
    """Return the changes in the sections that both contracts have, the breaking ones first."""
    found = []
    for section in shared(old, new):
        before, after = getattr(old, section), getattr(new, section)
        noun = section.removesuffix("s")
        found += [Difference("breaking", f"{noun} {name}", "is gone") for name in before.keys() - after.keys()]
        found += [Difference("fine", f"{noun} {name}", "is new") for name in after.keys() - before.keys()]
        for name in before.keys() & after.keys():
            found += _offer(f"{noun} {name}", before[name], after[name])
    if old.honours_keys and new.honours_keys is False:
        found.append(Difference("breaking", "server", "does not honour idempotency keys any more"))
    elif old.honours_keys is False and new.honours_keys:
        found.append(Difference("fine", "server", "honours idempotency keys now"))

    def told(place: str) -> bool:
        """Whether the offer of a text is in both contracts: a new one is not reported twice."""
        section, _, rest = place.partition("/")
        if section not in SECTIONS:
            return None not in (old.tools, new.tools)  # the instructions of an MCP server
        name = rest.partition("/")[0].replace("~1", "/").replace("~0", "~")
        return all(name in (getattr(each, section) or {}) for each in (old, new))

    for place in old.descriptions.keys() | new.descriptions.keys():
        if old.descriptions.get(place) != new.descriptions.get(place) and told(place):
            found.append(Difference("careful", place, "the text changed"))
    return sorted(set(found), key=lambda change: (LEVELS.index(change.level), change.place, change.text))


def shared(old: Contract, new: Contract) -> list[str]:
    """Return the sections that both contracts have."""
    return [section for section in SECTIONS if None not in (getattr(old, section), getattr(new, section))]


def _offer(place: str, old: Any, new: Any) -> Iterator[Difference]:
    if isinstance(old, LockedResource):
        if old.mime_type != new.mime_type:
            level: Level = "fine" if old.mime_type is None else "breaking"
            yield Difference(level, place, f"its type was {old.mime_type} and is {new.mime_type}")
    elif isinstance(old, LockedPrompt):
        schemas = [
            {
                "type": "object",
                "properties": {name: {"type": "string"} for name in each.arguments},
                "required": [name for name, needed in each.arguments.items() if needed],
                "additionalProperties": False,
            }
            for each in (old, new)
        ]
        yield from _params(place, *schemas)
    elif isinstance(old, LockedTool):
        yield from _params(place, old.input, new.input)
        yield from _result(place, old.output, new.output)
        yield from _effects(place, _tool_effects(old), _tool_effects(new))
    else:
        yield from _params(place, old.params, new.params)
        yield from _result(place, old.result, new.result)
        yield from _effects(place, _method_effects(old), _method_effects(new))
        yield from _method(place, old, new)


def _params(place: str, old: Json, new: Json) -> Iterator[Difference]:
    broken = misfits(old, new, is_result=False)
    for misfit in broken:
        text = _TEXTS["params", "forward"][misfit.kind].format(misfit.shown)
        yield Difference("breaking", f"{place}, argument {misfit.place}".removesuffix(", argument "), text)
    for misfit in misfits(new, old, is_result=False):
        if misfit.place in {each.place for each in broken}:
            continue  # a place that breaks callers is reported once
        text = _TEXTS["params", "backward"][misfit.kind].format(misfit.shown)
        yield Difference("fine", f"{place}, argument {misfit.place}".removesuffix(", argument "), text)
    before, after = dict(_defaults(old)), dict(_defaults(new))
    for where in before.keys() & after.keys():
        texts = [shown({"const": each[where]}) for each in (before, after)]
        if before[where] != after[where]:
            yield Difference("careful", f"{place}, argument {where}", f"its default was {texts[0]} and is {texts[1]}")


def _result(place: str, old: Json, new: Json) -> Iterator[Difference]:
    if old is None or new is None:
        if old != new:
            level: Level = "fine" if old is None else "breaking"
            yield Difference(
                level, f"{place}, result", f"its type is {'stated now' if old is None else 'not stated any more'}"
            )
        return
    broken = misfits(new, old, is_result=True)
    for misfit in broken:
        text = _TEXTS["result", "forward"][misfit.kind].format(misfit.shown)
        yield Difference("fine" if misfit.kind == "new" else "breaking", f"{place}, result {misfit.place}".rstrip(), text)
    for misfit in misfits(old, new, is_result=True):
        if misfit.place in {each.place for each in broken}:
            continue
        # A member that the old contract states and the new one does not: its callers may look for it.
        kind = "gone" if misfit.kind == "new" else misfit.kind
        text = _TEXTS["result", "backward"][kind].format(misfit.shown)
        yield Difference("careful" if kind == "gone" else "fine", f"{place}, result {misfit.place}".rstrip(), text)


class _Effects(Struct, frozen=True):
    """The effects of a call; an unstated one is the worst, as in MCP."""

    writes: bool
    destructive: bool
    repeatable: bool
    open_world: bool


def _tool_effects(tool: LockedTool) -> _Effects:
    writes = tool.read_only is not True
    destructive = writes and tool.destructive is not False
    return _Effects(writes, destructive, not writes or tool.idempotent is True, tool.open_world is not False)


def _method_effects(method: LockedMethod) -> _Effects:
    writes = method.kind != "query"
    destructive = writes and method.destructive is not False
    return _Effects(writes, destructive, not writes or method.idempotent is True, method.open_world is not False)


def _effects(place: str, old: _Effects, new: _Effects) -> Iterator[Difference]:
    rows: tuple[tuple[bool, bool, Level, str, str], ...] = (
        (old.writes, new.writes, "breaking", "may change data now", "only reads now"),
        (old.destructive, new.destructive, "breaking", "may destroy data now", "does not destroy data any more"),
        (not old.repeatable, not new.repeatable, "breaking", "cannot be repeated any more", "can be repeated now"),
        (old.open_world, new.open_world, "careful", "reaches beyond the server now", "does not reach beyond the server now"),
    )
    for before, after, level, worse, better in rows:
        if before != after:
            yield Difference(level if after else "fine", place, worse if after else better)


def _method(place: str, old: LockedMethod, new: LockedMethod) -> Iterator[Difference]:
    """Yield the changes that only methods of JSON-RPC have."""
    if old.key != new.key and new.key == "required":
        yield Difference("breaking", place, "an idempotency key is required now")
    elif old.key != new.key and new.key is None:
        yield Difference("breaking", place, "an idempotency key is not taken any more")
    elif old.key != new.key:
        yield Difference("fine", place, "an idempotency key is optional now")
    if old.structure != new.structure:
        level: Level = "fine" if new.structure is None else "breaking"
        shapes = [each.structure or "either" for each in (old, new)]
        yield Difference(level, place, f"the structure of its params was {shapes[0]} and is {shapes[1]}")
    if old.structure != "by-name" and new.order[: len(old.order)] != old.order and set(old.order) <= set(new.order):
        yield Difference(
            "breaking", place, f"the order of its params was {', '.join(old.order)} and is {', '.join(new.order)}"
        )
    if old.notification is True and new.notification is False:
        yield Difference("breaking", place, "cannot be sent as a notification any more")
    for code in old.errors.keys() | new.errors.keys():
        before, after = old.errors.get(code), new.errors.get(code)
        if before is None or after is None:
            yield Difference(
                "careful" if before is None else "fine", place, f"error {code} {'is new' if after else 'is gone'}"
            )
        elif before != after:
            yield Difference("breaking", place, f"error {code} meant {shown(before)} and means {shown(after)}")


def _defaults(schema: Json, place: str = "") -> Iterator[tuple[str, Json]]:
    """Yield the defaults in a schema, by place."""
    if isinstance(schema, dict):
        if "default" in schema:
            yield place, schema["default"]
        for (word, *names), part in inner(schema):
            step = f"{place}.{names[0]}" if place and word == "properties" else names[0] if word == "properties" else place
            yield from _defaults(part, step)
