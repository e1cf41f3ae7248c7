"""The changes between two contracts, and which of them break callers.

| Level | Changes |
| --- | --- |
| breaking | an offer is gone; an argument is gone, newly required or takes less; |
| | a result may be another; effects grow |
| careful | a description (models read it) or a default changed, |
| | an optional member of a result is gone |
| fine | an offer, an optional argument or a member of a result is new; an argument takes more |

A caller of the old contract writes params, and the new server reads them. The new server writes
results, and the callers of the old contract read them. So one function compares both,
`misfits(writer, reader)`: a list of the places where a value of the writer's JSON Schema may not
fit the reader's.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from wirecall.contract.lock import (
    LISTED,
    NAMED,
    SECTIONS,
    SINGLE,
    Contract,
    LockedMethod,
    LockedMode,
    LockedPrompt,
    LockedResource,
    LockedTool,
)
from wirecall.contract.misfits import Kind, misfits, shown
from wirecall.protocol.messages import Json, JsonObject
from wirecall.protocol.params import tool_name_of

Level: TypeAlias = Literal["breaking", "careful", "fine"]
LEVELS: tuple[Level, ...] = ("breaking", "careful", "fine")

# The level and the message of a misfit. "narrower": the old contract's callers meet the new server.
# "wider": the other way round, where a misfit means that the new contract allows more.
_MEANINGS: dict[tuple[str, str], dict[Kind, tuple[Level, str]]] = {
    ("argument", "narrower"): {
        "required": ("breaking", "is required now"),
        "gone": ("breaking", "is no longer accepted"),
        "value": ("breaking", "no longer accepts {}"),
    },
    ("argument", "wider"): {
        "required": ("fine", "is optional now"),
        "gone": ("fine", "is new, and optional"),
        "value": ("fine", "also accepts {}"),
    },
    ("result", "narrower"): {
        "required": ("breaking", "may be missing now"),
        "new": ("fine", "is new"),
        "value": ("breaking", "may be {} now"),
    },
    ("result", "wider"): {
        "required": ("fine", "is always present now"),
        "new": ("careful", "may be gone"),  # the old contract's callers may look for it
        "value": ("fine", "can no longer be {}"),
    },
}


class Difference(Struct, frozen=True, order=True):
    """One difference: how it affects callers, where it is, and what it is."""

    level: Level
    place: str
    text: str


def changes(old: Contract, new: Contract) -> list[Difference]:
    """Return the changes in the sections that both contracts have, the breaking ones first."""
    found: list[Difference] = []
    for section in shared(old, new):
        found += _section(section, old, new)
    if old.honours_keys and new.honours_keys is False:
        found.append(Difference("breaking", "server", "no longer honours idempotency keys"))
    elif old.honours_keys is False and new.honours_keys:
        found.append(Difference("fine", "server", "honours idempotency keys now"))
    found += _modes(old, new)
    for place in old.descriptions.keys() | new.descriptions.keys():
        is_changed = old.descriptions.get(place) != new.descriptions.get(place)
        if is_changed and _both_have(place, old, new):
            found.append(Difference("careful", place, "the text changed"))
    return sorted(
        set(found), key=lambda change: (LEVELS.index(change.level), change.place, change.text)
    )


def _modes(old: Contract, new: Contract) -> Iterator[Difference]:
    """Yield the commands that need a key in one mode, and did not before."""
    # A lock file of an earlier version has the rule of the mode that wrote it.
    if old.modes is None or new.modes is None or old.methods is None:
        return
    for mode, now in new.modes.items():
        before = old.modes.get(mode, LockedMode())
        needed = {name for name, method in old.methods.items() if method.key == "required"}
        needed.update(before.keys)
        for name in now.keys:
            if name in old.methods and name not in needed:
                text = f"an idempotency key is required in {mode} now"
                yield Difference("breaking", f"method {name}", text)


def _section(section: str, old: Contract, new: Contract) -> Iterator[Difference]:
    """Yield the changes in one section: offers that are gone, new, renamed or different."""
    before = getattr(old, section)
    after = getattr(new, section)
    noun = section.removesuffix("s")
    renamed: dict[str, str] = {}
    if section == "tools" and new.honours_keys:
        renamed = _renamed(before, after)
    for name in before.keys() - after.keys() - renamed.keys():
        yield Difference("breaking", f"{noun} {name}", "is gone")
    for name in after.keys() - before.keys() - {*renamed.values()}:
        yield Difference("fine", f"{noun} {name}", "is new")
    for name, now in renamed.items():
        text = f"is listed as {now}; calls by the old name work"
        yield Difference("careful", f"{noun} {name}", text)
        yield from _offer(f"{noun} {name}", before[name], after[now])
    for name in before.keys() & after.keys():
        yield from _offer(f"{noun} {name}", before[name], after[name])


def _both_have(place: str, old: Contract, new: Contract) -> bool:
    """Return whether both contracts have the offer of a description.

    A new offer is not reported twice.
    """
    section, _, rest = place.partition("/")
    if section not in SECTIONS:
        return None not in (old.tools, new.tools)  # the instructions of an MCP server
    name = rest.partition("/")[0].replace("~1", "/").replace("~0", "~")
    return all(name in (getattr(each, section) or {}) for each in (old, new))


def _renamed(before: Mapping[str, object], after: Mapping[str, object]) -> dict[str, str]:
    """Return the tools of a wirecall server that were listed with a dot, and their names now."""
    names = {name: tool_name_of(name) for name in before if name not in after}
    return {name: now for name, now in names.items() if now in after and now not in before}


def shared(old: Contract, new: Contract) -> list[str]:
    """Return the sections that both contracts have."""
    return [
        section
        for section in SECTIONS
        if None not in (getattr(old, section), getattr(new, section))
    ]


def _offer(place: str, old: Any, new: Any) -> Iterator[Difference]:
    if isinstance(old, LockedResource):
        if old.mime_type != new.mime_type:
            level: Level = "fine" if old.mime_type is None else "breaking"
            yield Difference(level, place, f"its type was {old.mime_type} and is {new.mime_type}")
    elif isinstance(old, LockedPrompt):
        yield from _params(place, _prompt_schema(old), _prompt_schema(new))
    elif isinstance(old, LockedTool):
        yield from _params(place, old.input, new.input)
        yield from _result(place, old.output, new.output)
        yield from _effects(place, old, new)
    else:
        yield from _params(place, old.params, new.params)
        yield from _result(place, old.result, new.result)
        yield from _effects(place, old, new)
        yield from _method(place, old, new)


def _prompt_schema(prompt: LockedPrompt) -> JsonObject:
    return {
        "type": "object",
        "properties": {name: {"type": "string"} for name in prompt.arguments},
        "required": [name for name, needed in prompt.arguments.items() if needed],
        "additionalProperties": False,
    }


def _params(place: str, old: Json, new: Json) -> Iterator[Difference]:
    yield from _schema(place, "argument", old, new)
    before = _defaults(old)
    after = _defaults(new)
    for where in before.keys() & after.keys():
        if before[where] != after[where]:
            texts = [shown({"const": each[where]}) for each in (before, after)]
            yield Difference(
                "careful",
                f"{place}, argument {where}",
                f"its default was {texts[0]} and is {texts[1]}",
            )


def _result(place: str, old: Json, new: Json) -> Iterator[Difference]:
    if old is not None and new is not None:
        yield from _schema(place, "result", new, old)
    elif old is not None:
        yield Difference("breaking", f"{place}, result", "its type is no longer stated")
    elif new is not None:
        yield Difference("fine", f"{place}, result", "its type is stated now")


def _schema(place: str, noun: str, writer: Json, reader: Json) -> Iterator[Difference]:
    narrower = misfits(writer, reader, is_result=noun == "result")
    broken = {each.place for each in narrower}  # a place that breaks callers is reported once
    wider = [
        each
        for each in misfits(reader, writer, is_result=noun == "result")
        if each.place not in broken
    ]
    for way, found in (("narrower", narrower), ("wider", wider)):
        for misfit in found:
            level, text = _MEANINGS[noun, way][misfit.kind]
            where = f"{place}, {noun} {misfit.place}".removesuffix(", argument ").rstrip()
            yield Difference(level, where, text.format(misfit.shown))


def _defaults(schema: Json) -> dict[str, Json]:
    """Return the defaults in a schema, by place."""
    found: dict[str, Json] = {}
    open: list[tuple[str, Json]] = [("", schema)]
    while open:
        place, part = open.pop()
        if not isinstance(part, dict):
            continue
        if "default" in part:
            found[place] = part["default"]
        for word, value in part.items():
            if word == "properties" and isinstance(value, dict):
                prefix = f"{place}." if place else ""
                open += [(prefix + name, each) for name, each in value.items()]
            elif word in NAMED and isinstance(value, dict):
                open += [(place, each) for each in value.values()]
            elif word in (*LISTED, "items") and isinstance(value, list):
                open += [(place, each) for each in value]
            elif word in SINGLE:
                open.append((place, value))
    return found


def _effects(
    place: str, old: LockedTool | LockedMethod, new: LockedTool | LockedMethod
) -> Iterator[Difference]:
    for before, after, (level, worse, better) in zip(
        _facts(old), _facts(new), _EFFECTS, strict=True
    ):
        if after and not before:
            yield Difference(level, place, worse)
        elif before and not after:
            yield Difference("fine", place, better)


# Of each fact: its level, what it means that it is new, and that it is gone.
_EFFECTS: tuple[tuple[Level, str, str], ...] = (
    ("breaking", "may change data now", "only reads now"),
    ("breaking", "may destroy data now", "no longer destroys data"),
    ("breaking", "can no longer be repeated", "can be repeated now"),
    ("careful", "reaches beyond the server now", "does not reach beyond the server now"),
)


def _facts(of: LockedTool | LockedMethod) -> tuple[bool, bool, bool, bool]:
    """Return whether a call writes, destroys, cannot be repeated, reaches far.

    The default is the worst.
    """
    reads = of.read_only is True if isinstance(of, LockedTool) else of.kind == "query"
    writes = not reads
    destroys = writes and of.destructive is not False
    repeats = not writes or of.idempotent is True
    return writes, destroys, not repeats, of.open_world is not False


def _method(place: str, old: LockedMethod, new: LockedMethod) -> Iterator[Difference]:
    """Yield the changes that only methods of JSON-RPC have."""
    if old.key != new.key:
        if new.key == "required":
            yield Difference("breaking", place, "an idempotency key is required now")
        elif new.key is None:
            yield Difference("breaking", place, "an idempotency key is no longer accepted")
        else:
            yield Difference("fine", place, "an idempotency key is optional now")
    if old.structure != new.structure:
        level: Level = "fine" if new.structure is None else "breaking"
        before = old.structure or "either"
        after = new.structure or "either"
        yield Difference(level, place, f"the structure of its params was {before} and is {after}")
    is_reordered = new.order[: len(old.order)] != old.order and set(old.order) <= set(new.order)
    if is_reordered and old.structure != "by-name":
        text = f"the order of its params was {', '.join(old.order)} and is {', '.join(new.order)}"
        yield Difference("breaking", place, text)
    if old.notification is True and new.notification is False:
        yield Difference("breaking", place, "can no longer be sent as a notification")
    yield from _errors(place, old.errors, new.errors)


def _errors(place: str, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Difference]:
    for code in old.keys() | new.keys():
        before = old.get(code)
        after = new.get(code)
        if before is None:
            # An empty message counts as no message.
            text = "is new" if after else "is gone"
            yield Difference("careful", place, f"error {code} {text}")
        elif after is None:
            yield Difference("fine", place, f"error {code} is gone")
        elif before != after:
            text = f"error {code} meant {shown(before)} and means {shown(after)}"
            yield Difference("breaking", place, text)
