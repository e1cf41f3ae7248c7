"""Other readings of params that do not fit their types.

A strict decode comes first, and these functions only run after it has failed.

1. JSON Schema says that 5.0 is an integer, so every method takes it for an int.
2. Models send `"5"` for a number, `"[1,2]"` for a list, `"true"` for a bool, an object as the string
   of its JSON, and `null` for an argument that may be omitted. A lenient method takes these too: a
   string is the JSON that it spells where no string is declared, and a null that does not fit is an
   argument that was not given.
3. A value that fits stays as it is.

The readings follow the schema. They may fit the types or not: `Signature` decodes them, and uses
one only if no other fits.
"""

from collections.abc import Iterator, Sequence
from decimal import Decimal, InvalidOperation
from itertools import islice, product
from typing import Any

import msgspec
from msgspec import Raw, Struct

from wirecall.protocol.messages import Json, JsonObject

# Steps of one search, and readings of one value: more are not a clear meaning.
STEPS = 10_000
MOST = 8
# Digits of an integer that is written as a fraction: those that 64 bits hold.
MOST_DIGITS = 18

_OMITTED: Any = object()
_KINDS = {str: "string", bool: "boolean", int: "integer", dict: "object", list: "array"}


def _number(text: str) -> Decimal:
    """Return a number with a fraction or an exponent, with all its digits."""
    try:
        return Decimal(text)
    except InvalidOperation:
        raise ValueError(f"{text[:100]} is not a number") from None


_decode = msgspec.json.Decoder(float_hook=_number).decode
_encode = msgspec.json.Encoder(decimal_format="number").encode
_UNREADABLE = (msgspec.DecodeError, RecursionError, ValueError)


class TooManySteps(Exception):
    """The search for a meaning took too long."""


def of_params(members: dict[str, Raw], schema: JsonObject, *, is_lenient: bool) -> list[Raw]:
    """Return other readings of params by name, as JSON. There are none if no value changes."""
    reader = _Reader(schema.get("$defs", {}), is_lenient)
    names: list[str] = []
    choices: list[list[Any]] = []
    is_changed = False
    try:
        for name, raw in members.items():
            found = [raw]
            declared = schema["properties"].get(name)
            if declared is not None:
                found = reader.of_raw(raw, declared, name in schema["required"])
            is_changed = is_changed or found != [raw]
            names.append(name)
            choices.append(found)
    except (TooManySteps, *_UNREADABLE):
        return []
    if not is_changed:
        return []
    return [Raw(_encode(each)) for each in _objects(names, choices)]


def of_value(raw: Raw, schema: JsonObject, definitions: JsonObject) -> Raw | None:
    """Return a value with 5 for 5.0; None if it has no other reading."""
    found: list[Raw]
    try:
        found = _Reader(definitions, is_lenient=False).of_raw(raw, schema, is_required=True)
    except (TooManySteps, *_UNREADABLE):
        return None
    if len(found) != 1 or found[0] is raw:
        return None
    return found[0]


class _Reader(Struct):
    """Finds the values that JSON may mean, by their schema."""

    definitions: JsonObject
    is_lenient: bool
    steps: int = 0

    def of_raw(self, raw: Raw, schema: Json, is_required: bool) -> list[Any]:
        """Return the readings of a member as JSON."""
        value = _decode(raw)
        found = self.of(value, schema)
        if not found and value is None and self.is_lenient and not is_required:
            return [_OMITTED]
        return [raw if each is value else Raw(_encode(each)) for each in found]

    def of(self, value: Any, schema: Json) -> list[Any]:
        """Return the readings of a value. One that does not change is the value itself."""
        self.steps += 1
        if self.steps > STEPS:
            raise TooManySteps
        if not isinstance(schema, dict):
            return [value]
        reference = schema.get("$ref")
        if isinstance(reference, str):
            return self.of(value, self.definitions.get(reference.removeprefix("#/$defs/"), {}))
        choices = schema.get("anyOf") or schema.get("oneOf")
        if choices:
            return self._of_choices(value, choices)
        kinds = schema.get("type")
        if kinds is None and "enum" not in schema:
            return [value]
        found = list(self._of_kind(value, schema))
        is_string = isinstance(value, str)
        if not found and is_string and self.is_lenient and kinds != "string":
            try:
                spelled = _decode(value)
            except _UNREADABLE:
                return []
            if not isinstance(spelled, str):
                found = list(self._of_kind(spelled, schema))
        return found

    def _of_choices(self, value: Any, choices: Sequence[Json]) -> list[Any]:
        """Return the readings by the choices of a union, each once."""
        found: list[Any] = []
        for choice in choices:
            for each in self.of(value, choice):
                if each is value:
                    return [value]
                if not any(_is_same(each, other) for other in found):
                    found.append(each)
        return found

    def _of_kind(self, value: Any, schema: JsonObject) -> Iterator[Any]:
        """Yield the readings of a value that already has the right kind of JSON."""
        stated = schema.get("type")
        kinds = stated if isinstance(stated, list) else [stated]
        is_integer = "integer" in kinds or (stated is None and "enum" in schema)
        if isinstance(value, Decimal) and _is_whole(value) and is_integer:
            value = int(value)
        if "enum" in schema:
            if any(_is_same(value, each) for each in schema["enum"]):
                yield value
            return
        kind = _kind_of(value)
        if kind not in kinds and not (kind == "integer" and "number" in kinds):
            return
        if kind == "object":
            yield from self._of_object(value, schema)
        elif kind == "array":
            yield from self._of_array(value, schema)
        else:
            yield value

    def _of_object(self, value: JsonObject, schema: JsonObject) -> Iterator[Any]:
        declared = schema.get("properties", {})
        others = schema.get("additionalProperties")
        required = schema.get("required", ())
        names: list[str] = []
        choices: list[list[Any]] = []
        for name, each in value.items():
            found = self.of(each, declared.get(name, others))
            if not found and each is None and self.is_lenient and name not in required:
                found = [_OMITTED]
            names.append(name)
            choices.append(found)
        if _are_same(value.values(), choices):
            yield value
            return
        yield from _objects(names, choices)

    def _of_array(self, value: list[Any], schema: JsonObject) -> Iterator[Any]:
        first: Sequence[Json] = schema.get("prefixItems", ())
        rest = schema.get("items")
        choices = []
        for index, each in enumerate(value):
            declared = first[index] if index < len(first) else rest
            choices.append(self.of(each, declared))
        if _are_same(value, choices):
            yield value
            return
        for entries in islice(product(*choices), MOST):
            yield list(entries)


def _objects(names: Sequence[str], choices: Sequence[list[Any]]) -> Iterator[JsonObject]:
    """Yield the objects that have one of the choices under each name."""
    for values in islice(product(*choices), MOST):
        made = dict(zip(names, values, strict=True))
        yield {name: each for name, each in made.items() if each is not _OMITTED}


def _are_same(values: Any, choices: Sequence[list[Any]]) -> bool:
    """Return whether all values stay as they are."""
    return all(
        len(found) == 1 and found[0] is value for value, found in zip(values, choices, strict=True)
    )


def _is_same(one: Any, two: Any) -> bool:
    """Return whether two values are the same JSON: 1 is not true."""
    return isinstance(one, bool) == isinstance(two, bool) and bool(one == two)


def _is_whole(value: Decimal) -> bool:
    """Return whether a number is an integer of a usual size."""
    return value.adjusted() < MOST_DIGITS and value == value.to_integral_value()


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    return _KINDS.get(type(value), "number")
