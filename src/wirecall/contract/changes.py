"""The changes between two contracts, and which of them break callers.

| Level | Changes |
| --- | --- |
| breaking | an offer is gone; an argument is gone, newly required or takes less; a result may be another; effects grow |
| careful | a text changed (models read it), a default changed, an optional member of a result is gone |
| fine | an offer, an optional argument or a member of a result is new; an argument takes more |

A caller of the old contract writes params, and the new server reads them. The new server writes results, and the callers of
the old contract read them. So one function compares both, `misfits(writer, reader)`: a list of the places where a value of
the writer's JSON Schema may not fit the reader's. It errs on the safe side: two schemas that it cannot compare do not fit,
unless they are equal. The rules about objects follow callers, not logic alone:

1. A caller sends only the members that its contract states, unless the object is free: it states no members, or it says
   `additionalProperties: true`. So an optional argument can be added.
2. A caller ignores members of a result that it does not know. So a result can get more members.
"""

import re
from collections.abc import Collection, Iterator
from itertools import combinations
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from wirecall.contract.lock import (
    LISTED,
    NAMED,
    SECTIONS,
    SINGLE,
    TEXTS,
    Contract,
    LockedMethod,
    LockedPrompt,
    LockedResource,
    LockedTool,
    listed,
    members,
    required,
    resolved,
)
from wirecall.protocol.messages import Json, JsonObject, encode

Level: TypeAlias = Literal["breaking", "careful", "fine"]
LEVELS: tuple[Level, ...] = ("breaking", "careful", "fine")
Kind: TypeAlias = Literal["required", "gone", "new", "value"]

STEPS = 200_000  # of the comparison of two schemas; a server could nest references without an end
SHOWN = 60  # characters of a schema that a text quotes

# The level and the text of a misfit. "narrower": the old contract's callers meet the new server. "wider": the other way
# round, where a misfit means that the new contract allows more.
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

TYPES = ("null", "boolean", "number", "string", "array", "object")
_NOTES = frozenset(
    (*TEXTS, "default", "deprecated", "readOnly", "writeOnly", "discriminator", "$defs", "definitions", "$schema", "$id")
)
_BOTH = "\0both"  # stands for keywords of two schemas that hold at once and cannot be put into one
# Keywords that are only compared as a whole: the reader may have one if the writer has the same.
_WHOLE = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames", "patternProperties"),
    *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties"),
    *("$dynamicRef", "$recursiveRef", _BOTH),
)
_REPEATED, _GROUPS = re.compile(r"[*+?]|\{\d*,"), re.compile(r"\)[*+?{]")  # in a pattern


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
        found.append(Difference("breaking", "server", "no longer honours idempotency keys"))
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
        yield from _effects(place, old, new)
    else:
        yield from _params(place, old.params, new.params)
        yield from _result(place, old.result, new.result)
        yield from _effects(place, old, new)
        yield from _method(place, old, new)


def _params(place: str, old: Json, new: Json) -> Iterator[Difference]:
    yield from _schema(place, "argument", old, new)
    before, after = _defaults(old), _defaults(new)
    for where in before.keys() & after.keys():
        if before[where] != after[where]:
            texts = [shown({"const": each[where]}) for each in (before, after)]
            yield Difference("careful", f"{place}, argument {where}", f"its default was {texts[0]} and is {texts[1]}")


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
    wider = [each for each in misfits(reader, writer, is_result=noun == "result") if each.place not in broken]
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
                open += [(f"{place}.{name}" if place else name, each) for name, each in value.items()]
            elif word in NAMED and isinstance(value, dict):
                open += [(place, each) for each in value.values()]
            elif word in (*LISTED, "items") and isinstance(value, list):
                open += [(place, each) for each in value]
            elif word in SINGLE:
                open.append((place, value))
    return found


def _effects(place: str, old: LockedTool | LockedMethod, new: LockedTool | LockedMethod) -> Iterator[Difference]:
    def effects(of: LockedTool | LockedMethod) -> tuple[bool, bool, bool, bool]:
        """Return whether a call writes, destroys, cannot be repeated and reaches far. Unstated is the worst, as in MCP."""
        writes = of.read_only is not True if isinstance(of, LockedTool) else of.kind != "query"
        destroys, repeats = writes and of.destructive is not False, not writes or of.idempotent is True
        return writes, destroys, not repeats, of.open_world is not False

    texts: tuple[tuple[Level, str, str], ...] = (
        ("breaking", "may change data now", "only reads now"),
        ("breaking", "may destroy data now", "no longer destroys data"),
        ("breaking", "can no longer be repeated", "can be repeated now"),
        ("careful", "reaches beyond the server now", "does not reach beyond the server now"),
    )
    for before, after, (level, worse, better) in zip(effects(old), effects(new), texts, strict=True):
        if before != after:
            yield Difference(level if after else "fine", place, worse if after else better)


def _method(place: str, old: LockedMethod, new: LockedMethod) -> Iterator[Difference]:
    """Yield the changes that only methods of JSON-RPC have."""
    if old.key != new.key and new.key == "required":
        yield Difference("breaking", place, "an idempotency key is required now")
    elif old.key != new.key and new.key is None:
        yield Difference("breaking", place, "an idempotency key is no longer accepted")
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
        yield Difference("breaking", place, "can no longer be sent as a notification")
    for code in old.errors.keys() | new.errors.keys():
        before, after = old.errors.get(code), new.errors.get(code)
        if before is None or after is None:
            yield Difference(
                "careful" if before is None else "fine", place, f"error {code} {'is new' if after else 'is gone'}"
            )
        elif before != after:
            yield Difference("breaking", place, f"error {code} meant {shown(before)} and means {shown(after)}")


# --- schemas ----------------------------------------------------------------------------------------------------------


class Unfit(Struct, frozen=True):
    """A place where a value may not fit. `kind` says why; `shown` is the value that does not."""

    place: str
    kind: Kind
    shown: str = ""


def misfits(writer: Json, reader: Json, *, is_result: bool) -> list[Unfit]:
    """Return the places where a value of the writer's schema may not fit the reader's."""
    try:
        if writer == reader:
            return []
        if not is_result and isinstance(writer, dict):
            writer = {"additionalProperties": False, **writer}  # params are never free: a call sends what it knows
        found = _Comparison(writer, reader, is_result).compare(writer, reader, "")
    except (_TooLarge, RecursionError):
        found = [Unfit("", "value", "a type that is too large to compare")]
    return list(dict.fromkeys(found))


def shown(schema: Json) -> str:
    """Return a schema in a few characters."""
    if isinstance(schema, dict):
        told = {name: value for name, value in schema.items() if name not in _NOTES and name != _BOTH}
        if list(told) == ["const"]:
            schema = told["const"]
        elif list(told) == ["type"] or (told.get("type") in ("object", "array") and len(encode(told)) > SHOWN):
            return str(told["type"])
        elif not told:
            return "any value"
        else:
            schema = told
    text = encode(schema).decode()
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


class _TooLarge(Exception):
    """The comparison takes more than `STEPS`."""


class _Comparison:
    """Two documents, and the pairs of their schemas that are being compared."""

    def __init__(self, writer: Json, reader: Json, is_result: bool) -> None:
        self._writer = writer
        self._reader = reader
        self._is_result = is_result
        self._steps = 0
        names = [[root.get("$defs"), root.get("definitions")] if isinstance(root, dict) else [] for root in (writer, reader)]
        self._shares_names = names[0] == names[1]  # a reference means the same in both
        # A pair that comes up again inside itself fits if the rest fits: the types refer to themselves.
        self._open: set[tuple[int, int]] = set()

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > STEPS:
            raise _TooLarge

    def compare(self, writer: Json, reader: Json, place: str) -> list[Unfit]:
        pair = (id(writer), id(reader))
        if reader is True or reader == {} or pair in self._open or (self._shares_names and _bare(writer) == _bare(reader)):
            return []
        self._open.add(pair)
        try:
            # One alternative may take the writer's schema as a whole, even if its cases cannot be compared.
            parts = reader.get("anyOf") if isinstance(reader, dict) and reader.keys() - _NOTES == {"anyOf"} else None
            if isinstance(parts, list) and any(not self.compare(writer, part, place) for part in parts):
                return []
            found = []
            admitted = list(self._cases(reader, self._reader, is_reader=True))
            constants = {encode(each) for each in admitted if each.keys() == {"const"}}  # there may be very many
            for case in self._cases(writer, self._writer, is_reader=False):
                if "const" in case and encode(case) in constants:
                    continue
                tried = [self._pair(case, each, place) for each in admitted]
                if [] in tried:
                    continue
                # The reasons are of use where one alternative alone has the type of the value.
                near = [
                    misfit
                    for misfit, each in zip(tried, admitted, strict=True)
                    if "const" not in each and each.get("type") == case.get("type")
                ]
                found += (near[0] if len(near) == 1 else None) or [Unfit(place, "value", shown(case))]
            return found
        finally:
            self._open.discard(pair)

    def _pair(self, writer: JsonObject, reader: JsonObject, place: str) -> list[Unfit] | None:
        """Compare two schemas of one type each; None if the value as a whole does not fit."""
        self._count(1)
        if "const" in writer:
            return [] if admits(writer["const"], reader) else None
        kind = writer["type"]
        if "const" in reader or (kind != reader["type"] and (kind, reader["type"]) != ("integer", "number")):
            return [] if kind == "null" and "const" in reader and admits(None, reader) else None
        for word in _WHOLE:
            if word in reader and _whole(writer, word, self._writer) != _whole(reader, word, self._reader):
                return None
        if kind in ("number", "integer"):
            step, wanted = writer.get("multipleOf"), reader.get("multipleOf")
            is_multiple = wanted in (None, step) or (
                type(step) is int and type(wanted) is int and wanted > 0 and step % wanted == 0
            )
            return [] if _low(writer) >= _low(reader) and _high(writer) <= _high(reader) and is_multiple else None
        if kind == "string":
            words = ("pattern", "format", "contentEncoding", "contentMediaType")
            is_alike = all(reader.get(word) in (None, writer.get(word)) for word in words)
            return [] if is_alike and _within(writer, reader, "minLength", "maxLength") else None
        if kind == "array":
            is_set = not reader.get("uniqueItems") or bool(writer.get("uniqueItems"))
            (ours, rest), (theirs, other) = _entries(writer), _entries(reader)
            if not is_set or not _within(writer, reader, "minItems", "maxItems") or (theirs and len(ours) != len(theirs)):
                return None
            pairs = [*zip(ours, theirs or [other] * len(ours), strict=True), (rest, other)]
            return [misfit for one, two in pairs for misfit in self.compare(one, two, f"{place}[]")]
        return self._objects(writer, reader, place) if kind == "object" else []

    def _objects(self, writer: JsonObject, reader: JsonObject, place: str) -> list[Unfit] | None:
        has_patterns = "patternProperties" in writer and "patternProperties" not in reader
        is_open = reader.get("additionalProperties") is None
        if not _within(writer, reader, "minProperties", "maxProperties") or (has_patterns and not is_open):
            return None
        ours, theirs = members(writer), members(reader)
        free = writer.get("additionalProperties", not ours)  # what the writer may send beside the members that it states
        rest = reader.get("additionalProperties", True)
        prefix = f"{place}." if place else ""
        found = [Unfit(prefix + name, "required") for name in required(reader) - required(writer)]
        for name, schema in ours.items():
            if name in theirs:
                found += self.compare(schema, theirs[name], prefix + name)
            elif self._is_result and not isinstance(rest, dict):
                found.append(Unfit(prefix + name, "new"))
            elif rest is False or (theirs and "additionalProperties" not in reader):
                found.append(Unfit(prefix + name, "gone"))
            else:
                found += self.compare(schema, rest, prefix + name)
        if free is not False:
            for name in theirs.keys() - ours.keys():
                found += self.compare(free, theirs[name], prefix + name)
            if rest is False and not self._is_result:
                found.append(Unfit(prefix + "*", "gone"))
            elif rest is not False:
                found += self.compare(free, rest, prefix + "*")
        return found

    def _cases(self, schema: Json, root: Json, *, is_reader: bool, followed: tuple[str, ...] = ()) -> Iterator[JsonObject]:
        """Yield the alternatives of a schema: each has a `const`, or one `type`.

        Together they admit what the schema admits. Where this cannot be expressed, the cases of a writer admit more, and
        those of a reader less.
        """
        self._count(1)
        if not isinstance(schema, dict):
            schema = {} if schema is not False else {"enum": []}
        own = _bare(schema)
        # 1. Everything that holds at once: a reference and its neighbours, and the parts of allOf.
        if "$ref" in own:
            target, name = resolved(own, root), str(own["$ref"])
            rest = _without(own, ("$ref",))
            if target is None:
                rest[_BOTH] = [rest.get(_BOTH), name]
                yield from self._cases(rest, root, is_reader=is_reader, followed=followed)
            elif name not in followed:  # else it is its own alternative, and adds nothing
                more = (*followed, name)
                yield from self._cases(self._joined(rest, target), root, is_reader=is_reader, followed=more)
            return
        if isinstance(own.get("allOf"), list):
            joined = _without(own, ("allOf",))
            for part in own["allOf"]:
                joined = self._joined(joined, part)
            yield from self._cases(joined, root, is_reader=is_reader, followed=followed)
            return
        # 2. Alternatives. The reader's oneOf refuses values that fit two of its parts.
        for word in ("anyOf", "oneOf"):
            if isinstance(own.get(word), list):
                rest = _without(own, (word,))
                parts = [
                    list(self._cases(self._joined(rest, part), root, is_reader=is_reader, followed=followed))
                    for part in own[word]
                ]
                pairs = ((one, two) for these, those in combinations(parts, 2) for one in these for two in those)
                overlaps = word == "oneOf" and is_reader and not all(self._disjoint(*pair) for pair in pairs)
                for case in (case for part in parts for case in part):
                    yield {**case, _BOTH: [case.get(_BOTH), own[word]]} if overlaps else case
                return
        # 3. Values that are listed.
        if (values := listed(own)) is not None:
            self._count(len(values))
            rest = _without(own, ("const", "enum"))
            for value in values:
                if admits(value, rest) or (not is_reader and admits(value, rest) is None):
                    yield {"const": value}
            return
        # 4. Types.
        kinds = _kinds(own)
        for kind in kinds:
            if kind in (*TYPES, "integer") and not (kind == "integer" and "number" in kinds):
                yield {**own, "type": kind}

    def _joined(self, one: JsonObject, two: Json) -> JsonObject:
        """Return a schema that holds where both hold."""
        if not isinstance(two, dict):
            return one if two is not False else {"enum": []}
        self._count(1 + len(members(one)))
        joined: JsonObject = _bare(one)
        for word, value in two.items():
            if word in _NOTES or (word in joined and joined[word] == value):
                continue
            if word not in joined:
                joined[word] = value
            elif word == "required" and isinstance(value, list) and isinstance(joined[word], list):
                joined[word] = [*joined[word], *value]
            elif word == "properties" and isinstance(value, dict) and isinstance(joined[word], dict):
                if joined[word].keys() & value.keys():
                    joined[_BOTH] = [joined.get(_BOTH), joined[word], value]
                joined[word] = {**joined[word], **value}
            else:
                joined[_BOTH] = [joined.get(_BOTH), word, joined[word], value]
        if isinstance(one.get("properties"), dict) and "properties" in two and "additionalProperties" in joined:
            joined[_BOTH] = [joined.get(_BOTH), one, two]  # each closes its own members, not those of both
        return joined

    def _disjoint(self, one: JsonObject, two: JsonObject) -> bool:
        """Return whether surely no value fits both cases."""
        self._count(1)
        if "const" in one or "const" in two:
            value, other = (one["const"], two) if "const" in one else (two["const"], one)
            return admits(value, other) is False
        if one["type"] != two["type"]:
            return {one["type"], two["type"]} != {"number", "integer"}
        if one["type"] != "object":
            return False
        for name in required(one) & required(two):  # a tag
            first, second = (listed(members(each).get(name)) or [] for each in (one, two))
            self._count(1 + len(first) * len(second))
            if first and second and not any(_same(tag, other) for tag in first for other in second):
                return True
        return False


def _whole(schema: JsonObject, word: str, root: Json) -> bytes | None:
    """Return the text of a keyword, with the definitions that it may refer to."""
    if word not in schema:
        return None
    text = encode(schema[word])
    return text + encode([root.get("$defs"), root.get("definitions")]) if b'"$ref"' in text and root else text


def _bare(schema: Json) -> Json:
    """Return a schema without the words that do not change what it admits."""
    return _without(schema, _NOTES) if isinstance(schema, dict) else schema


def _without(schema: JsonObject, words: Collection[str]) -> JsonObject:
    return {word: value for word, value in schema.items() if word not in words}


def _kinds(schema: JsonObject) -> list[Json]:
    """Return the types that a schema admits."""
    named = schema.get("type")
    return [named] if isinstance(named, str) else named if isinstance(named, list) else list(TYPES)


def admits(value: Json, schema: JsonObject) -> bool | None:
    """Return whether a case, or a schema without references, admits a value; None if it cannot be said."""
    if "const" in schema:
        return False if not _same(value, schema["const"]) else None if _BOTH in schema else True
    kinds, kind = _kinds(schema), _kind(value)
    if kind not in kinds and not (kind == "integer" and "number" in kinds):
        return False
    if any(word in schema for word in (*_WHOLE, "$ref", "allOf", "anyOf", "oneOf", "enum")):
        return None
    if kind in ("number", "integer"):
        if not _low(schema) <= (value, False) or not (value, True) <= _high(schema):
            return False
        return None if "multipleOf" in schema else True
    if kind == "string":
        if not _number(schema.get("minLength"), 0) <= len(value) <= _number(schema.get("maxLength"), float("inf")):
            return False
        if any(word in schema for word in ("format", "contentEncoding", "contentMediaType")):
            return None
        pattern = schema.get("pattern", "")
        # A server has written the pattern: the search must end soon, so it has one repetition, and not that of a group.
        if not isinstance(pattern, str) or _GROUPS.search(pattern) or len(_REPEATED.findall(pattern)) > 1:
            return None
        try:
            return re.search(pattern, value) is not None
        except (re.error, OverflowError):
            return None
    structured = {
        "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
        "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    }
    return None if any(word in schema for word in structured.get(kind, ())) else True


def _same(one: Json, two: Json) -> bool:
    """JSON's equality: 1 is 1.0, and is not true."""
    if isinstance(one, bool) or isinstance(two, bool):
        return one is two
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(_same, one, two))
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_same(one[name], two[name]) for name in one)
    return bool(one == two)


def _kind(value: Json) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    return {float: "number", str: "string", list: "array"}.get(type(value), "object")


def _number(value: Json, default: float) -> float:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else default


def _low(schema: JsonObject) -> tuple[Any, bool]:
    """The lower bound of a number, and whether the bound itself is excluded."""
    bounds = (_number(schema.get("minimum"), -float("inf")), schema.get("exclusiveMinimum") is True)  # a bool: draft 4
    return max(bounds, (_number(schema.get("exclusiveMinimum"), -float("inf")), True))


def _high(schema: JsonObject) -> tuple[Any, bool]:
    """The upper bound of a number, and whether the bound itself is included: of two bounds, the lesser admits less."""
    bounds = (_number(schema.get("maximum"), float("inf")), schema.get("exclusiveMaximum") is not True)
    return min(bounds, (_number(schema.get("exclusiveMaximum"), float("inf")), False))


def _within(writer: JsonObject, reader: JsonObject, least: str, most: str) -> bool:
    inf = float("inf")
    lows, highs = [(_number(each.get(least), 0), _number(each.get(most), inf)) for each in (writer, reader)]
    return lows[0] >= highs[0] and lows[1] <= highs[1]


def _entries(schema: JsonObject) -> tuple[list[Json], Json]:
    """The schemas of a list's first entries, and that of all others. Before 2020-12 both were called `items`."""
    items = schema.get("items", True)
    if isinstance(items, list):
        return items, schema.get("additionalItems", True)
    first = schema.get("prefixItems")
    return first if isinstance(first, list) else [], items
