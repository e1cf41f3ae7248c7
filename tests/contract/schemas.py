"""Random JSON Schemas."""

from typing import Any

from hypothesis import strategies as st

from wirecall.protocol.messages import JsonObject

NAMES = ("a", "b", "c")


SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-4, 4),
    st.sampled_from([0.5, 1.0, -2.5]),
    st.sampled_from(["", "x", "xy", "123"]),
)


SMALL = st.integers(0, 3)


def some_of(kind: str, **words: st.SearchStrategy[Any]) -> st.SearchStrategy[JsonObject]:
    """A type with some of these keywords."""
    return st.fixed_dictionaries({"type": st.just(kind)}, optional=words)


SIMPLE: st.SearchStrategy[JsonObject] = st.one_of(
    st.sampled_from([{}, {"type": "null"}, {"type": "boolean"}, {"type": ["string", "null"]}]),
    some_of(
        "integer",
        minimum=SMALL,
        maximum=SMALL,
        exclusiveMinimum=SMALL,
        multipleOf=st.sampled_from([1, 2]),
    ),
    some_of("number", minimum=SMALL, maximum=SMALL, exclusiveMaximum=SMALL),
    some_of("string", minLength=SMALL, maxLength=SMALL, pattern=st.sampled_from(["x", "^1"])),
    st.lists(SCALARS, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    SCALARS.map(lambda value: {"const": value}),
)


def schemas(*, closed: bool = True) -> st.SearchStrategy[JsonObject]:
    """Schemas with references, alternatives, lists and objects; `closed` ones may refuse further
    members.
    """

    def deeper(inner: st.SearchStrategy[JsonObject]) -> st.SearchStrategy[JsonObject]:
        ends: list[Any] = [True] if not closed else [True, False]
        objects = some_of(
            "object",
            properties=st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
            required=st.lists(st.sampled_from(NAMES), unique=True, max_size=2),
            additionalProperties=st.sampled_from(ends) | inner,
            minProperties=SMALL,
        )
        arrays = some_of(
            "array",
            items=inner,
            minItems=SMALL,
            maxItems=SMALL,
            uniqueItems=st.booleans(),
            prefixItems=st.lists(inner, min_size=1, max_size=2),
        )
        joined = st.sampled_from(["anyOf", "oneOf", "allOf"])
        several = st.tuples(joined, st.lists(inner, min_size=1, max_size=3)).map(
            lambda pair: {pair[0]: pair[1]}
        )
        both = st.tuples(inner, several).map(lambda pair: {**pair[0], **pair[1]})
        return objects | arrays | several | both | inner.map(lambda each: {"not": each})

    return st.recursive(SIMPLE, deeper, max_leaves=5)
