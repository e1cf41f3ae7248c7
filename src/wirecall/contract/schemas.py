"""JSON Schemas of two versions: may a value that one of them writes be refused by the one that reads it?

A caller of the old contract writes params, and the new server reads them. The new server writes results, and the callers of
the old contract read them. So one function compares both, `misfits(writer, reader)`: a list of the places where a value of
the writer may not fit the reader. It errs on the safe side: two schemas that it cannot compare do not fit, unless they are
equal. The rules about objects follow callers, not logic alone:

1. A caller sends only the members that its contract states, unless the object is free: it states no members, or it says
   `additionalProperties: true`. So an optional argument can be added.
2. A caller ignores members of a result that it does not know. So a result can get more members.
"""

import re
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from wirecall.protocol.messages import Json, JsonObject, encode

STEPS = 20_000  # comparisons of two schemas; a server could nest references without an end
SHOWN = 60  # characters of a schema that a text quotes

TYPES = ("null", "boolean", "number", "string", "array", "object")
# The keywords whose values are schemas: by name, in a list, or one.
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = (
    "items",
    "additionalItems",
    "additionalProperties",
    "contains",
    "not",
    "if",
    "then",
    "else",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
# Keywords for people and models. They do not change the values that a schema admits.
TEXTS = ("title", "description", "summary", "$comment", "examples", "example", "markdownDescription")
_NOTES = frozenset(
    (*TEXTS, "default", "deprecated", "readOnly", "writeOnly", "discriminator", "$defs", "definitions", "$schema", "$id")
)
# Keywords that are only compared as a whole: the reader may have one if the writer has the same.
_WHOLE = (
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "propertyNames",
    "patternProperties",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
    "\0both",
)
_BOTH = "\0both"  # stands for keywords of two schemas that hold at once and cannot be put into one

Kind: TypeAlias = Literal["required", "gone", "new", "value"]


class Unfit(Struct, frozen=True):
    """A place where a value may not fit. `kind` says why; `shown` is the value that does not."""

    place: str
    kind: Kind
    shown: str = ""


def misfits(writer: Json, reader: Json, *, is_result: bool) -> list[Unfit]:
    """Return the places where a value of the writer's schema may not fit the reader's."""
    if writer == reader:
        return []
    if not is_result and isinstance(writer, dict):
        writer = {"additionalProperties": False, **writer}  # params are never free: a call sends the arguments that it knows
    try:
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


def resolved(schema: Json, root: Json) -> Json:
    """Follow one reference inside the same document; None if it leads nowhere, or elsewhere."""
    reference = schema["$ref"]
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found = root
    for step in reference[2:].split("/") if reference != "#" else ():
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def inner(schema: JsonObject) -> Iterator[tuple[tuple[str, ...], Json]]:
    """Yield the schemas directly inside a schema, with their places."""
    for word, value in schema.items():
        if word in NAMED and isinstance(value, dict):
            yield from (((word, name), each) for name, each in value.items())
        elif word in (*LISTED, "items") and isinstance(value, list):
            yield from (((word, str(at)), each) for at, each in enumerate(value))
        elif word in SINGLE:
            yield (word,), value


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
            for case in self._cases(writer, self._writer, is_reader=False):
                tried = [self._pair(case, each, place) for each in admitted]
                if [] in tried:
                    continue
                # The reasons are of use where one alternative alone has the type of the value.
                near = [
                    misfit
                    for misfit, each in zip(tried, admitted, strict=True)
                    if "const" not in each and each.get("type") == case.get("type")
                ]
                found += near[0] if len(near) == 1 else [Unfit(place, "value", shown(case))]
            return found
        finally:
            self._open.discard(pair)

    def _pair(self, writer: JsonObject, reader: JsonObject, place: str) -> list[Unfit]:
        """Compare two schemas of one type each."""
        refused = [Unfit(place, "value", shown(writer))]
        if "const" in writer:
            return [] if admits(writer["const"], reader) else refused
        kind = writer["type"]
        if "const" in reader or (kind != reader["type"] and (kind, reader["type"]) != ("integer", "number")):
            return [] if kind == "null" and admits(None, reader) and "const" in reader else refused
        for word in _WHOLE:
            if word in reader and self._whole(writer, word, self._writer) != self._whole(reader, word, self._reader):
                return refused
        if kind in ("number", "integer"):
            step, wanted = writer.get("multipleOf"), reader.get("multipleOf")
            is_multiple = wanted in (None, step) or (type(step) is int and type(wanted) is int and step % wanted == 0)
            fits = _low(writer) >= _low(reader) and _high(writer) <= _high(reader) and is_multiple
            return [] if fits else refused
        if kind == "string":
            fits = _within(writer, reader, "minLength", "maxLength")
            words = ("pattern", "format", "contentEncoding", "contentMediaType")
            return [] if fits and all(reader.get(word) in (None, writer.get(word)) for word in words) else refused
        if kind == "array":
            is_set = not reader.get("uniqueItems") or bool(writer.get("uniqueItems"))
            if not _within(writer, reader, "minItems", "maxItems") or not is_set:
                return refused
            (ours, rest), (theirs, other) = _entries(writer), _entries(reader)
            if theirs and len(ours) != len(theirs):
                return refused
            pairs = [*zip(ours, theirs or [other] * len(ours), strict=True), (rest, other)]
            return [misfit for one, two in pairs for misfit in self.compare(one, two, f"{place}[]")]
        return self._objects(writer, reader, place, refused) if kind == "object" else []

    def _objects(self, writer: JsonObject, reader: JsonObject, place: str, refused: list[Unfit]) -> list[Unfit]:
        if not _within(writer, reader, "minProperties", "maxProperties"):
            return refused
        if (
            "patternProperties" in writer
            and "patternProperties" not in reader
            and reader.get("additionalProperties") is not None
        ):
            return refused
        ours, theirs = members(writer), members(reader)
        free = writer.get("additionalProperties", not ours)  # what the writer may send beside the members that it states
        rest = reader.get("additionalProperties", True)
        prefix = f"{place}." if place else ""
        found = [Unfit(prefix + name, "required") for name in required(reader) if name not in required(writer)]
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
        self._steps += 1
        if self._steps > STEPS:
            raise _TooLarge
        if not isinstance(schema, dict):
            schema = {} if schema is not False else {"enum": []}
        own = _bare(schema)
        # 1. Everything that holds at once: a reference and its neighbours, and the parts of allOf.
        if "$ref" in own:
            target, name = resolved(own, root), str(own["$ref"])
            rest = {word: value for word, value in own.items() if word != "$ref"}
            if target is None:
                rest[_BOTH] = [rest.get(_BOTH), name]
                yield from self._cases(rest, root, is_reader=is_reader, followed=followed)
            elif name not in followed:  # else it is its own alternative, and adds nothing
                more = (*followed, name)
                yield from self._cases(_joined(rest, target), root, is_reader=is_reader, followed=more)
            return
        if isinstance(own.get("allOf"), list):
            joined: JsonObject = {word: value for word, value in own.items() if word != "allOf"}
            for part in own["allOf"]:
                joined = _joined(joined, part)
            yield from self._cases(joined, root, is_reader=is_reader, followed=followed)
            return
        # 2. Alternatives. The reader's oneOf refuses values that fit two of its parts.
        for word in ("anyOf", "oneOf"):
            if isinstance(own.get(word), list):
                rest = {name: value for name, value in own.items() if name != word}
                parts = [
                    list(self._cases(_joined(rest, part), root, is_reader=is_reader, followed=followed))
                    for part in own[word]
                ]
                overlaps = (
                    word == "oneOf"
                    and is_reader
                    and any(
                        not _disjoint(one, two)
                        for at, these in enumerate(parts)
                        for those in parts[at + 1 :]
                        for one in these
                        for two in those
                    )
                )
                for case in (case for part in parts for case in part):
                    yield {**case, _BOTH: [case.get(_BOTH), own[word]]} if overlaps else case
                return
        # 3. Values that are listed.
        if (listed := _listed(own)) is not None:
            rest = {word: value for word, value in own.items() if word not in ("const", "enum")}
            for value in listed:
                if admits(value, rest) or (not is_reader and admits(value, rest) is None):
                    yield {"const": value}
            return
        # 4. Types.
        named = own.get("type", list(TYPES))
        kinds = [named] if isinstance(named, str) else named if isinstance(named, list) else list(TYPES)
        for kind in kinds:
            if kind in (*TYPES, "integer") and not (kind == "integer" and "number" in kinds):
                yield {**own, "type": kind}

    @staticmethod
    def _whole(schema: JsonObject, word: str, root: Json) -> bytes | None:
        """Return the text of a keyword, with the definitions that it may refer to."""
        if word not in schema:
            return None
        text = encode(schema[word])
        return text + encode([root.get("$defs"), root.get("definitions")]) if b'"$ref"' in text and root else text


def _joined(one: JsonObject, two: Json) -> JsonObject:
    """Return a schema that holds where both hold."""
    if not isinstance(two, dict):
        return one if two is not False else {"enum": []}
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
    if isinstance(one.get("properties"), dict) and "properties" in two and ("additionalProperties" in joined):
        joined[_BOTH] = [joined.get(_BOTH), one, two]  # each closes its own members, not those of both
    return joined


def _disjoint(one: JsonObject, two: JsonObject) -> bool:
    """Return whether surely no value fits both cases."""
    if "const" in one or "const" in two:
        value, other = (one["const"], two) if "const" in one else (two["const"], one)
        return admits(value, other) is False
    if one["type"] != two["type"]:
        return {one["type"], two["type"]} != {"number", "integer"}
    if one["type"] != "object":
        return False
    for name in required(one) & required(two):  # a tag
        first, second = (_listed(members(each).get(name)) for each in (one, two))
        if first and second and not any(_same(tag, other) for tag in first for other in second):
            return True
    return False


def _bare(schema: Json) -> Json:
    """Return a schema without the words that do not change what it admits."""
    return {word: value for word, value in schema.items() if word not in _NOTES} if isinstance(schema, dict) else schema


def _listed(schema: Json) -> list[Json] | None:
    """Return the values that a schema lists, or None."""
    listed = ([schema["const"]] if "const" in schema else schema.get("enum")) if isinstance(schema, dict) else None
    return listed if isinstance(listed, list) else None


def admits(value: Json, schema: JsonObject) -> bool | None:
    """Return whether a case, or a schema without references, admits a value; None if it cannot be said."""
    if "const" in schema:
        return False if not _same(value, schema["const"]) else None if _BOTH in schema else True
    named = schema.get("type", list(TYPES))
    kinds = [named] if isinstance(named, str) else named if isinstance(named, list) else list(TYPES)
    kind = _kind(value)
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
        try:
            return re.search(schema["pattern"], value) is not None if "pattern" in schema else True
        except (re.error, TypeError):
            return None
    structured = {
        "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
        "object": (
            "properties",
            "required",
            "additionalProperties",
            "minProperties",
            "maxProperties",
        ),
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


def members(schema: JsonObject) -> dict[str, Json]:
    """The members that a schema of an object states."""
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def required(schema: JsonObject) -> set[str]:
    """The members that a schema of an object requires."""
    found = schema.get("required")
    return {name for name in found if isinstance(name, str)} if isinstance(found, list) else set()
