"""The comparison of two JSON Schemas: where a value of the writer's may not fit the reader's.

It errs on the safe side: two schemas that it cannot compare do not fit, unless they are equal. The
rules about objects follow callers, not logic alone:

1. A caller sends only the members that its contract states, unless the object is free: it states no
   members, or it says `additionalProperties: true`. So an optional argument can be added.
2. A caller ignores members of a result that it does not know. So a result can get more members.
"""

import re
from collections.abc import Collection, Iterator
from itertools import combinations
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from wirecall.contract.lock import TEXTS, listed, members, required, resolved
from wirecall.protocol.messages import Json, JsonObject, encode

Kind: TypeAlias = Literal["required", "gone", "new", "value"]

# Steps of the comparison of two schemas; a server could nest references without limit.
STEPS = 200_000
# Characters of a schema that a message quotes.
SHOWN = 60

TYPES = ("null", "boolean", "number", "string", "array", "object")
# Keywords that do not change the values that a schema admits.
_NOTES = frozenset(
    (
        *TEXTS,
        "default",
        "deprecated",
        "readOnly",
        "writeOnly",
        "discriminator",
        "$defs",
        "definitions",
        "$schema",
        "$id",
    )
)
# The keywords of two schemas that both apply and cannot be merged.
_BOTH = "\0both"
# Keywords that are only compared as a whole: the reader may have one if the writer has the same.
_WHOLE = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains"),
    *("propertyNames", "patternProperties"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
    *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef", _BOTH),
)
# Keywords about the inside of a value.
_STRUCTURE = {
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "minProperties",
        "maxProperties",
    ),
}
# In a pattern.
_REPEATED = re.compile(r"[*+?]|\{\d*,")
_GROUPS = re.compile(r"\)[*+?{]")


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
            # Params are never free: a call sends known ones.
            writer = {"additionalProperties": False, **writer}
        found = _Comparison(writer, reader, is_result).compare(writer, reader, "")
    except (_TooLarge, RecursionError):
        found = [Unfit("", "value", "a type that is too large to compare")]
    return list(dict.fromkeys(found))


def shown(schema: Json) -> str:
    """Return a schema in a few characters."""
    if isinstance(schema, dict):
        schema = {
            name: value for name, value in schema.items() if name not in _NOTES and name != _BOTH
        }
        if not schema:
            return "any value"
        is_structure = schema.get("type") in ("object", "array")
        if list(schema) == ["type"] or (is_structure and len(encode(schema)) > SHOWN):
            return str(schema["type"])
        if list(schema) == ["const"]:
            schema = schema["const"]
    text = encode(schema).decode()
    if len(text) <= SHOWN:
        return text
    return f"{text[: SHOWN - 3]}..."


class _TooLarge(Exception):
    """The comparison takes more than `STEPS`."""


# --- the comparison -------------------------------------------------------------------------------


class _Comparison:
    """Two documents, and the pairs of their schemas that are being compared."""

    def __init__(self, writer: Json, reader: Json, is_result: bool) -> None:
        self._writer = writer
        self._reader = reader
        self._is_result = is_result
        self._steps = 0
        # Whether a reference means the same in both.
        self._shares_names = _definitions(writer) == _definitions(reader)
        # A pair that recurs inside itself fits if the rest fits: the types refer to themselves.
        self._open: set[tuple[int, int]] = set()

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > STEPS:
            raise _TooLarge

    def compare(self, writer: Json, reader: Json, place: str) -> list[Unfit]:
        """Return the misfits of two schemas at a place."""
        if reader is True or reader == {}:
            return []
        pair = (id(writer), id(reader))
        if pair in self._open or (self._shares_names and _bare(writer) == _bare(reader)):
            return []
        self._open.add(pair)
        try:
            if self._has_alternative(writer, reader, place):
                return []
            return self._compare_cases(writer, reader, place)
        finally:
            self._open.discard(pair)

    def _has_alternative(self, writer: Json, reader: Json, place: str) -> bool:
        """Return whether one alternative of the reader accepts the writer's schema as a whole.

        It may do so even if its cases cannot be compared.
        """
        if not isinstance(reader, dict) or reader.keys() - _NOTES != {"anyOf"}:
            return False
        parts = reader["anyOf"]
        return isinstance(parts, list) and any(
            not self.compare(writer, part, place) for part in parts
        )

    def _compare_cases(self, writer: Json, reader: Json, place: str) -> list[Unfit]:
        """Return the misfits of the writer's cases, each of which needs one case of the reader."""
        found: list[Unfit] = []
        admitted = list(self._cases(reader, self._reader, is_reader=True))
        # There may be very many.
        constants = {encode(each) for each in admitted if each.keys() == {"const"}}
        for case in self._cases(writer, self._writer, is_reader=False):
            if "const" in case and encode(case) in constants:
                continue
            tried = [self._pair(case, each, place) for each in admitted]
            if [] in tried:
                continue
            # The reasons help only if a single alternative has the type of the value.
            near = [
                misfit
                for misfit, each in zip(tried, admitted, strict=True)
                if "const" not in each and each.get("type") == case.get("type")
            ]
            if len(near) == 1 and near[0]:
                found += near[0]
            else:
                found.append(Unfit(place, "value", shown(case)))
        return found

    def _pair(self, writer: JsonObject, reader: JsonObject, place: str) -> list[Unfit] | None:
        """Compare two schemas of one type each; None if the value as a whole does not fit."""
        self._count(1)
        kind = writer.get("type")
        if "const" in writer:
            fits = bool(admits(writer["const"], reader))
        elif "const" in reader:
            fits = kind == "null" and bool(admits(None, reader))
        elif not _is_kind_of(kind, reader["type"]) or self._has_other(writer, reader):
            fits = False
        elif kind == "array":
            return self._arrays(writer, reader, place)
        elif kind == "object":
            return self._objects(writer, reader, place)
        elif kind in ("number", "integer"):
            fits = _fits_number(writer, reader)
        elif kind == "string":
            fits = _fits_string(writer, reader)
        else:
            fits = True
        return [] if fits else None

    def _has_other(self, writer: JsonObject, reader: JsonObject) -> bool:
        """Return whether the reader has a keyword of `_WHOLE` that the writer has not equally."""
        for word in _WHOLE:
            if word not in reader:
                continue
            if _whole(writer, word, self._writer) != _whole(reader, word, self._reader):
                return True
        return False

    def _arrays(self, writer: JsonObject, reader: JsonObject, place: str) -> list[Unfit] | None:
        ours, rest = _entries(writer)
        theirs, other = _entries(reader)
        if reader.get("uniqueItems") and not writer.get("uniqueItems"):
            return None
        if not _within(writer, reader, "minItems", "maxItems"):
            return None
        if theirs and len(ours) != len(theirs):
            return None
        pairs = [*zip(ours, theirs or [other] * len(ours), strict=True), (rest, other)]
        return [misfit for one, two in pairs for misfit in self.compare(one, two, f"{place}[]")]

    def _objects(self, writer: JsonObject, reader: JsonObject, place: str) -> list[Unfit] | None:
        if not _within(writer, reader, "minProperties", "maxProperties"):
            return None
        has_patterns = "patternProperties" in writer and "patternProperties" not in reader
        if has_patterns and reader.get("additionalProperties") is not None:
            return None
        ours = members(writer)
        theirs = members(reader)
        # Schema or bool: the writer's unstated members.
        free = writer.get("additionalProperties", not ours)
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

    # --- the cases of a schema --------------------------------------------------------------------

    def _cases(
        self, schema: Json, root: Json, *, is_reader: bool, followed: tuple[str, ...] = ()
    ) -> Iterator[JsonObject]:
        """Yield the alternatives of a schema: each has a `const`, or one `type`.

        Together they admit what the schema admits. If this cannot be expressed, the cases of a
        writer admit more, and those of a reader less.
        """
        self._count(1)
        if schema is False:
            return
        own = _bare(schema) if isinstance(schema, dict) else {}
        # 1. All parts that apply together: a reference and its neighbours, and the parts of allOf.
        if "$ref" in own:
            yield from self._cases_of_reference(own, root, is_reader, followed)
            return
        if isinstance(own.get("allOf"), list):
            joined = _without(own, ("allOf",))
            for part in own["allOf"]:
                joined = self._joined(joined, part)
            yield from self._cases(joined, root, is_reader=is_reader, followed=followed)
            return
        # 2. Alternatives.
        for word in ("anyOf", "oneOf"):
            if isinstance(own.get(word), list):
                yield from self._cases_of_parts(own, word, root, is_reader, followed)
                return
        # 3. Values that are listed.
        if (values := _listed_values(own)) is not None:
            self._count(len(values))
            rest = _without(own, ("const", "enum"))
            for value in values:
                fits = admits(value, rest)
                if fits or (fits is None and not is_reader):
                    yield {"const": value}
            return
        # 4. Types.
        kinds = _kinds(own)
        for kind in kinds:
            if kind in TYPES or (kind == "integer" and "number" not in kinds):
                yield {**own, "type": kind}

    def _cases_of_reference(
        self, own: JsonObject, root: Json, is_reader: bool, followed: tuple[str, ...]
    ) -> Iterator[JsonObject]:
        """Yield the cases of a reference, together with the keywords beside it."""
        target = resolved(own, root)
        name = str(own["$ref"])
        rest = _without(own, ("$ref",))
        if target is None:
            rest[_BOTH] = [rest.get(_BOTH), name]
            yield from self._cases(rest, root, is_reader=is_reader, followed=followed)
        elif name not in followed:  # else it is its own alternative, and adds nothing
            joined = self._joined(rest, target)
            more = (*followed, name)
            yield from self._cases(joined, root, is_reader=is_reader, followed=more)

    def _cases_of_parts(
        self, own: JsonObject, word: str, root: Json, is_reader: bool, followed: tuple[str, ...]
    ) -> Iterator[JsonObject]:
        """Yield the cases of all parts of `anyOf` or `oneOf`."""
        rest = _without(own, (word,))
        parts = []
        for part in own[word]:
            joined = self._joined(rest, part)
            parts.append(list(self._cases(joined, root, is_reader=is_reader, followed=followed)))
        # The reader's oneOf refuses values that fit two of its parts.
        overlaps = word == "oneOf" and is_reader and self._overlap(parts)
        for case in (case for part in parts for case in part):
            if overlaps:
                yield {**case, _BOTH: [case.get(_BOTH), own[word]]}
            else:
                yield case

    def _overlap(self, parts: list[list[JsonObject]]) -> bool:
        """Return whether a value may fit two of the parts."""
        for these, those in combinations(parts, 2):
            for one in these:
                if not all(self._disjoint(one, two) for two in those):
                    return True
        return False

    def _joined(self, one: JsonObject, two: Json) -> JsonObject:
        """Return a schema that admits the values that both admit."""
        if two is False:
            return {"enum": []}
        if not isinstance(two, dict):
            return one
        self._count(1 + len(members(one)))
        joined: JsonObject = _bare(one)
        for word, value in two.items():
            if word in _NOTES or (word in joined and joined[word] == value):
                continue
            if word not in joined:
                joined[word] = value
            elif word == "required" and isinstance(value, list) and isinstance(joined[word], list):
                joined[word] = [*joined[word], *value]
            elif (
                word == "properties" and isinstance(value, dict) and isinstance(joined[word], dict)
            ):
                if joined[word].keys() & value.keys():
                    joined[_BOTH] = [joined.get(_BOTH), joined[word], value]
                joined[word] = {**joined[word], **value}
            else:
                joined[_BOTH] = [joined.get(_BOTH), word, joined[word], value]
        have_members = isinstance(one.get("properties"), dict) and "properties" in two
        if have_members and "additionalProperties" in joined:
            # Each closes its own members, not those of both.
            joined[_BOTH] = [joined.get(_BOTH), one, two]
        return joined

    def _disjoint(self, one: JsonObject, two: JsonObject) -> bool:
        """Return whether it is certain that no value fits both cases."""
        self._count(1)
        if "const" in one:
            return admits(one["const"], two) is False
        if "const" in two:
            return admits(two["const"], one) is False
        if one["type"] != two["type"]:
            return {one["type"], two["type"]} != {"number", "integer"}
        if one["type"] != "object":
            return False
        for name in required(one) & required(two):  # a tag
            first = listed(members(one).get(name)) or []
            second = listed(members(two).get(name)) or []
            self._count(1 + len(first) * len(second))
            if first and second and not any(_same(tag, other) for tag in first for other in second):
                return True
        return False


# --- parts of a schema ----------------------------------------------------------------------------


def _definitions(root: Json) -> list[Json]:
    """Return what references in a document may mean."""
    if not isinstance(root, dict):
        return []
    return [root.get("$defs"), root.get("definitions")]


def _whole(schema: JsonObject, word: str, root: Json) -> bytes | None:
    """Return the JSON of a keyword, with the definitions that it may refer to."""
    if word not in schema:
        return None
    text = encode(schema[word])
    if b'"$ref"' in text and root:
        text += encode(_definitions(root))
    return text


def _bare(schema: Json) -> Json:
    """Return a schema without the keywords that do not change the values it admits."""
    if not isinstance(schema, dict):
        return schema
    return _without(schema, _NOTES)


def _without(schema: JsonObject, words: Collection[str]) -> JsonObject:
    return {word: value for word, value in schema.items() if word not in words}


def _kinds(schema: JsonObject) -> list[Json]:
    """Return the types that a schema admits."""
    named = schema.get("type")
    if isinstance(named, str):
        return [named]
    if isinstance(named, list):
        return named
    return list(TYPES)


def _listed_values(schema: JsonObject) -> list[Json] | None:
    """Return the values that `const` and `enum` list; both apply if a schema has both."""
    values = listed(schema)
    enum = schema.get("enum")
    if values is None or "const" not in schema or not isinstance(enum, list):
        return values
    return [value for value in values if any(_same(value, other) for other in enum)]


def _is_kind_of(kind: Json, other: Json) -> bool:
    """Return whether every value of a type is also one of another type."""
    return kind == other or (kind, other) == ("integer", "number")


def _entries(schema: JsonObject) -> tuple[list[Json], Json]:
    """Return the schemas of a list's first entries, and that of all others.

    Before 2020-12 both were called `items`.
    """
    items = schema.get("items", True)
    if isinstance(items, list):
        return items, schema.get("additionalItems", True)
    first = schema.get("prefixItems")
    if isinstance(first, list):
        return first, items
    return [], items


# --- values and bounds ----------------------------------------------------------------------------


def admits(value: Json, schema: JsonObject) -> bool | None:
    """Return whether a case, or a schema without references, admits a value.

    None if that is not clear.
    """
    if "const" in schema:
        if not _same(value, schema["const"]):
            return False
        return None if _BOTH in schema else True
    kinds = _kinds(schema)
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
        return _admits_string(value, schema)
    if any(word in schema for word in _STRUCTURE.get(kind, ())):
        return None
    return True


def _admits_string(value: str, schema: JsonObject) -> bool | None:
    """Return whether the keywords about strings admit a string; None if that is not clear."""
    least = _number(schema.get("minLength"), 0)
    most = _number(schema.get("maxLength"), float("inf"))
    if not least <= len(value) <= most:
        return False
    if any(word in schema for word in ("format", "contentEncoding", "contentMediaType")):
        return None
    pattern = schema.get("pattern", "")
    # A server wrote the pattern, so the search must end soon: one repetition at most, and not of a
    # group.
    if not isinstance(pattern, str) or _GROUPS.search(pattern):
        return None
    if len(_REPEATED.findall(pattern)) > 1:
        return None
    try:
        return re.search(pattern, value) is not None
    except (re.error, OverflowError):
        return None


def _fits_number(writer: JsonObject, reader: JsonObject) -> bool:
    if _low(writer) < _low(reader) or _high(writer) > _high(reader):
        return False
    step = writer.get("multipleOf")
    wanted = reader.get("multipleOf")
    if wanted in (None, step):
        return True
    return type(step) is int and type(wanted) is int and wanted > 0 and step % wanted == 0


def _fits_string(writer: JsonObject, reader: JsonObject) -> bool:
    for word in ("pattern", "format", "contentEncoding", "contentMediaType"):
        if reader.get(word) not in (None, writer.get(word)):
            return False
    return _within(writer, reader, "minLength", "maxLength")


def _same(one: Json, two: Json) -> bool:
    """Return whether two values of JSON are equal: 1 is 1.0, and is not true."""
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
    if isinstance(value, bool) or not isinstance(value, int | float):
        return default
    return value


def _low(schema: JsonObject) -> tuple[Any, bool]:
    """Return the lower bound of a number, and whether the bound itself is excluded."""
    # A bool: draft 4.
    bounds = (_number(schema.get("minimum"), -float("inf")), schema.get("exclusiveMinimum") is True)
    return max(bounds, (_number(schema.get("exclusiveMinimum"), -float("inf")), True))


def _high(schema: JsonObject) -> tuple[Any, bool]:
    """Return the upper bound of a number, and whether the bound itself is included.

    Of two bounds, the lesser admits less.
    """
    maximum = _number(schema.get("maximum"), float("inf"))
    bounds = (maximum, schema.get("exclusiveMaximum") is not True)
    return min(bounds, (_number(schema.get("exclusiveMaximum"), float("inf")), False))


def _within(writer: JsonObject, reader: JsonObject, least: str, most: str) -> bool:
    """Return whether the writer's bounds of a length are inside the reader's."""
    inf = float("inf")
    return _number(writer.get(least), 0) >= _number(reader.get(least), 0) and _number(
        writer.get(most), inf
    ) <= _number(reader.get(most), inf)
