"""The comparison of schemas, with jsonschema as the judge: a value that was accepted and is refused
is a misfit.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.contract.schemas import NAMES, SCALARS, SIMPLE, schemas
from tests.size import sized
from wirecall.contract.misfits import misfits
from wirecall.protocol.messages import JsonObject

ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=2)
    ),
    max_leaves=4,
)


def parts(schema: Any) -> list[JsonObject]:
    """A schema, and all schemas inside it."""
    if not isinstance(schema, dict):
        return []
    inside = [
        *schema.get("properties", {}).values(),
        schema.get("items"),
        schema.get("additionalProperties"),
    ]
    inside += [
        each for word in ("anyOf", "oneOf", "allOf", "prefixItems") for each in schema.get(word, [])
    ]
    return [schema, *(part for each in inside for part in parts(each))]


@st.composite
def edited(draw: st.DrawFn, *, closed: bool = True) -> tuple[JsonObject, JsonObject]:
    """A schema before and after a small change."""
    old = draw(schemas(closed=closed))
    new = copy.deepcopy(old)
    part = draw(st.sampled_from(parts(new)))
    drops: bool = draw(st.booleans())
    if part and drops:
        del part[draw(st.sampled_from(sorted(part)))]
    else:
        part |= draw(SIMPLE)
    return old, new


def accepts(schema: JsonObject, value: object) -> bool:
    return bool(Draft202012Validator(schema).is_valid(value))


def argument(schema: JsonObject) -> JsonObject:
    """The params of a method with one argument of a type."""
    return {
        "type": "object",
        "properties": {"x": schema},
        "required": ["x"],
        "additionalProperties": False,
    }


def has_open_members(schema: Any) -> bool:
    """Whether an object states members and leaves open whether it has more: rule 1 says that
    callers send none.
    """
    if isinstance(schema, list):
        return any(map(has_open_members, schema))
    if not isinstance(schema, dict):
        return False
    is_open = bool(schema.get("properties")) and "additionalProperties" not in schema
    return is_open or any(map(has_open_members, schema.values()))


@given(schemas())
def test_equal_schemas_fit(schema: JsonObject) -> None:
    assert misfits(argument(schema), argument(schema), is_result=False) == []
    assert misfits(schema, {**schema, "description": "another text"}, is_result=True) == []


@settings(max_examples=sized(small=60, full=600))
@given(edited() | st.tuples(schemas(), schemas()), st.lists(ANYTHING, min_size=5, max_size=15))
def test_params_that_were_accepted_and_are_refused_are_found(
    both: tuple[Any, Any], values: list[Any]
) -> None:
    old, new = both
    if has_open_members(old):
        return
    if any(accepts(old, value) and not accepts(new, value) for value in values):
        assert misfits(argument(old), argument(new), is_result=False)


@settings(max_examples=sized(small=60, full=600))
@given(edited(closed=False), st.lists(ANYTHING, min_size=5, max_size=15))
def test_results_that_the_old_type_does_not_admit_are_found(
    both: tuple[Any, Any], values: list[Any]
) -> None:
    old, new = both
    if has_open_members(new):
        return
    if any(accepts(new, value) and not accepts(old, value) for value in values):
        assert [misfit for misfit in misfits(new, old, is_result=True) if misfit.kind != "new"]


@given(schemas(), schemas())
def test_another_alternative_fits(schema: JsonObject, other: JsonObject) -> None:
    assert misfits(argument(schema), argument({"anyOf": [other, schema]}), is_result=False) == []


WIDER: list[tuple[Any, Any]] = [
    ({"type": "integer"}, {"type": "number"}),
    ({"type": "integer", "minimum": 1}, {"type": "integer", "exclusiveMinimum": 0}),
    ({"type": "integer", "maximum": 4}, {"type": "integer", "maximum": 5}),
    ({"type": "number", "multipleOf": 4}, {"type": "number", "multipleOf": 2}),
    ({"type": "string", "minLength": 2}, {"type": "string"}),
    ({"type": "string", "format": "uuid"}, {"type": "string"}),
    ({"enum": ["a"]}, {"enum": ["a", "b"]}),
    ({"enum": ["a", "b"]}, {"type": "string"}),
    ({"const": 1}, {"type": "integer", "maximum": 1}),
    ({"const": None}, {"type": ["null", "string"]}),
    ({"type": "string"}, {"type": ["null", "string"]}),
    ({"type": "string"}, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
    ({"type": "string"}, {"oneOf": [{"type": "string"}, {"type": "null"}]}),
    ({"type": "string"}, {}),
    ({"type": "string"}, True),
    (
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "number"}},
    ),
    (
        {"type": "array", "prefixItems": [{"const": 1}], "items": False},
        {"type": "array", "items": {"type": "integer"}},
    ),
    (
        {"type": "object", "additionalProperties": {"const": 1}},
        {"type": "object", "additionalProperties": {"type": "integer"}},
    ),
    (argument({"const": 1}), {**argument({"const": 1}), "required": []}),
    (argument({"const": 1}), {"type": "object"}),
    ({"allOf": [{"type": "integer"}, {"minimum": 1}]}, {"type": "integer"}),
]


@pytest.mark.parametrize(("narrow", "wide"), WIDER)
def test_wider_type_of_an_argument_fits_and_a_narrower_one_does_not(narrow: Any, wide: Any) -> None:
    assert misfits(argument(narrow), argument(wide), is_result=False) == []
    assert misfits(argument(wide), argument(narrow), is_result=False)


def test_alternatives_that_exclude_each_other() -> None:
    old = {"oneOf": [{"const": None}, {"const": 1}]}
    assert misfits(
        argument(old), argument({"oneOf": [{"const": None}, {"const": 1}, {}]}), is_result=False
    )


def places(old: JsonObject, new: JsonObject, *, is_result: bool = False) -> list[tuple[str, str]]:
    return [(misfit.place, misfit.kind) for misfit in misfits(old, new, is_result=is_result)]


def test_const_and_enum_beside_it_both_apply() -> None:
    null = {"anyOf": [{"const": None}]}
    assert misfits(argument(null), argument({**null, "enum": [False]}), is_result=False)
    assert misfits(argument(null), argument({"const": None, "enum": [0, False]}), is_result=False)
    assert misfits(argument(null), argument({**null, "enum": [None, 1]}), is_result=False) == []


def test_place_of_a_misfit() -> None:
    def order(**item: Any) -> JsonObject:
        items = {
            "type": "array",
            "items": {"type": "object", "properties": item, "required": list(item)},
        }
        return argument({"type": "object", "properties": {"items": items}})

    assert places(order(sku={"type": "string"}), order(sku={"type": "integer"})) == [
        ("x.items[].sku", "value")
    ]
    assert places(order(), order(sku={})) == [("x.items[].sku", "required")]
    assert places(order(sku={}, size={}), order(sku={})) == [("x.items[].size", "gone")]


def test_members_of_params() -> None:
    one = {"type": "object", "properties": {"a": {"type": "string"}}}
    two = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}}
    assert places(one, two) == []
    assert places(two, one) == [("b", "gone")]
    assert places({"type": "object"}, two) == []


def test_members_of_results() -> None:
    one: JsonObject = {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    two = {**one, "properties": {**one["properties"], "b": {"type": "string"}}}
    assert places(two, one, is_result=True) == [("b", "new")]
    assert places({**one, "required": []}, one, is_result=True) == [("a", "required")]


def test_type_that_refers_to_itself() -> None:
    def tree(leaf: str) -> JsonObject:
        node = {
            "type": "object",
            "properties": {"value": {"type": leaf}, "next": {"$ref": "#/$defs/Node"}},
        }
        return {"$ref": "#/$defs/Node", "$defs": {"Node": node}}

    assert places(tree("integer"), tree("number"), is_result=True) == []
    assert places(tree("number"), tree("integer"), is_result=True) == [
        ("value", "value"),
        ("next.value", "value"),
    ]


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}},
        {"$ref": "https://example.com/other.json"},
        {"$ref": "#/nowhere"},
        {"$ref": 7},
        {"$ref": f"#/anyOf/{'9' * 5000}", "anyOf": [{}]},
        {"type": 7, "properties": [], "required": "a", "enum": {}},
        {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
        {
            "type": "object",
            "properties": {name: {"$ref": "#"} for name in "abcdefgh"},
            "additionalProperties": {"$ref": "#"},
        },
    ],
)
def test_odd_schemas_are_compared_in_bounded_time(schema: JsonObject) -> None:
    assert misfits(schema, dict(schema), is_result=True) == []
    misfits(schema, {**schema, "maxProperties": 1, "minLength": 1}, is_result=False)


def deep(schema: JsonObject) -> JsonObject:
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    return schema


def tagged(values: list[str]) -> JsonObject:
    return {"type": "object", "properties": {"tag": {"enum": values}}, "required": ["tag"]}


MANY = 100_000
NUMBERS = [str(number) for number in range(MANY)]
# Made when they are needed: they are large, and every test process imports this module.
LARGE: dict[str, Callable[[], tuple[JsonObject, JsonObject]]] = {
    "members": lambda: (
        {
            "type": "object",
            "properties": {number: {"type": "string"} for number in NUMBERS},
            "required": NUMBERS,
        },
        {
            "type": "object",
            "properties": {number: {"type": "null"} for number in NUMBERS},
            "required": NUMBERS,
        },
    ),
    "listed values": lambda: ({"enum": NUMBERS}, {"enum": [f"{number} x" for number in NUMBERS]}),
    "alternatives": lambda: (
        {"oneOf": [{"const": number} for number in NUMBERS]},
        {"oneOf": [{"const": None}] * MANY},
    ),
    "parts": lambda: ({}, {"allOf": [{"properties": {number: {}}} for number in NUMBERS]}),
    "tags": lambda: (
        {},
        {"oneOf": [tagged([f"{part} {number}" for number in NUMBERS]) for part in ("a", "b")]},
    ),
    "references": lambda: (
        {
            "$ref": "#/$defs/0",
            "$defs": {str(at): {"anyOf": [{"$ref": f"#/$defs/{at + 1}"}] * 2} for at in range(50)},
        },
        {"type": "null"},
    ),
    "a pattern that takes exponential time": lambda: (
        {"const": "a" * 50 + "!"},
        {"type": "string", "pattern": "^(a+)+$"},
    ),
    "a repetition that cannot be": lambda: (
        {"const": "a"},
        {"type": "string", "pattern": "a{99999999999}"},
    ),
    "multiples of nothing": lambda: (
        {"type": "integer", "multipleOf": 4},
        {"type": "integer", "multipleOf": 0},
    ),
    "depth": lambda: (deep({"type": "string"}), deep({"type": "null"})),
}


@pytest.mark.parametrize("name", LARGE)
def test_schemas_that_cannot_be_compared_do_not_fit(name: str) -> None:
    old, new = LARGE[name]()
    assert misfits(old, new, is_result=True)


def test_long_list_of_values_can_change() -> None:
    old = NUMBERS[:10_000]
    assert [
        misfit.shown for misfit in misfits({"enum": [*old, "new"]}, {"enum": old}, is_result=True)
    ] == ['"new"']
