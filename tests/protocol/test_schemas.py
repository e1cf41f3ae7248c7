"""The schemas of types: msgspec's and pydantic's say the same, in the order of the declaration."""

import datetime
import enum
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Annotated, Any, Literal, NamedTuple, NewType, Optional, TypedDict

import jsonschema
import msgspec
import pydantic
import pytest

from tests.calls import call, result
from wirecall import App, Context
from wirecall.contract.generate import generated
from wirecall.contract.lock import Contract, of_app
from wirecall.mcp.revisions import REVISIONS
from wirecall.mcp.server.forms import form_of
from wirecall.protocol.params import Signature
from wirecall.protocol.schemas import DECIMAL

# The formats that ajv, the validator of the official TypeScript SDK and of Inspector, knows.
KNOWN = {"date-time", "date", "time", "duration", "uuid", "byte", "binary"}


class Size(enum.Enum):
    SMALL = "small"
    MEDIUM = "medium"
    LARGE = "large"


class Level(enum.IntEnum):
    HIGH = 3
    LOW = 1


class Word(enum.StrEnum):
    ZEBRA = "zebra"
    ANT = "ant"


class Single(enum.Enum):
    ONLY = "only"


class Aliased(enum.Enum):
    SMALL = "small"
    LITTLE = "small"  # noqa: PIE796 - an alias is what is tested
    LARGE = "large"


class Documented(enum.Enum):
    """How urgent it is."""

    NOW = "now"
    LATER = "later"


@dataclass
class Box:
    """A box."""

    width: int
    size: Size = Size.MEDIUM
    since: datetime.datetime | None = None
    colour: Literal["red", "blue"] = "red"
    labels: list[str] = field(default_factory=list)


@dataclass
class Shelf:
    boxes: list[Box]
    above: Optional["Shelf"] = None


Name = NewType("Name", str)
Choice = Literal["z", "m", "a"]

# One table of types for both libraries.
TYPES: dict[str, Any] = {
    "None": None,
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "Any": Any,
    "datetime": datetime.datetime,
    "date": datetime.date,
    "time": datetime.time,
    "timedelta": datetime.timedelta,
    "UUID": uuid.UUID,
    "Decimal": Decimal,
    "enum": Size,
    "enum of ints": Level,
    "enum of strings": Word,
    "enum of one": Single,
    "enum with a docstring": Documented,
    "enum with an alias": Aliased,
    "literal": Choice,
    "literal of ints": Literal[3, 1, 2],
    "literal of one": Literal["only"],
    "literal of one int": Literal[7],
    "literal of a string, an int and None": Literal["z", 1, None],
    "new type": Name,
    "list": list[int],
    "list of anything": list[Any],
    "list of enums": list[Size],
    "list of literals": list[Choice],
    "list of dates": list[datetime.date],
    "list of lists": list[list[uuid.UUID]],
    "sequence": Sequence[Decimal],
    "set": set[int],
    "frozenset": frozenset[str],
    "set of enums": set[Size],
    "tuple": tuple[int, str],
    "tuple of literals": tuple[Literal["b", "a"], Literal["a", "b"]],
    "long tuple": tuple[float, ...],
    "dict": dict[str, int],
    "dict of anything": dict[str, Any],
    "mapping": Mapping[str, bool],
    "dict of dates": dict[str, datetime.date],
    "dict of enums": dict[str, Size],
    "dict by enums": dict[Size, int],
    "dict by literals": dict[Choice, int],
    "dict by UUIDs": dict[uuid.UUID, str],
    "dict by dates": dict[datetime.date, str],
    "dict by ints": dict[int, str],
    "dict of dicts": dict[str, dict[str, Decimal]],
    "optional int": int | None,
    "optional date": datetime.date | None,
    "optional datetime": datetime.datetime | None,
    "optional Decimal": Decimal | None,
    "optional enum": Size | None,
    "optional literal": Choice | None,
    "optional list": list[int] | None,
    "optional dict": dict[str, float] | None,
    "union": int | str,
    "union with None between": str | None | int,
    "union of a list and a string": list[str] | str,
    "union of an enum and an int": Size | int,
    "union of a UUID and an int": uuid.UUID | int,
    "dataclass": Box,
    "optional dataclass": Box | None,
    "list of dataclasses": list[Box],
    "dict of dataclasses": dict[str, Box],
    "dataclass of itself": Shelf,
}


def described(hint: Any) -> tuple[Any, Any]:
    """Return the schemas of a type as a parameter and as a result."""

    def echo(value: Any) -> Any:
        return value

    echo.__annotations__ = {"value": hint, "return": hint}
    signature = Signature(echo, inject=Context)
    schema = signature.schema
    taken = schema["properties"]["value"]
    return meant(taken, schema.get("$defs", {})), meant(
        signature.result_schema, signature.result_schema.get("$defs", {})
    )


def meant(schema: Any, definitions: dict[str, Any]) -> Any:
    """Return a schema and all its definitions, without the titles of fields.

    Pydantic makes titles of names, and describes a class that is used once at its place.
    """
    whole = {name: untitled(each) for name, each in definitions.items()}
    schema = {word: each for word, each in schema.items() if word != "$defs"}
    name = schema.get("$ref", "").removeprefix("#/$defs/")
    if name and len(schema) == 1:
        schema = definitions[name]
        if json.dumps(whole).count(f'"#/$defs/{name}"') == 0:
            del whole[name]
    return untitled(schema), whole


def untitled(schema: Any) -> Any:
    if isinstance(schema, list):
        return [untitled(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {word: untitled(each) for word, each in schema.items() if word != "title"}


def test_schema_table_has_at_least_60_types() -> None:
    assert len(TYPES) >= 60


@pytest.mark.parametrize("hint", TYPES.values(), ids=TYPES)
def test_schema_of_a_type_is_the_same_by_msgspec_and_by_pydantic(hint: Any) -> None:
    plain = described(hint)
    modelled = described(Annotated[hint, pydantic.Field()])
    assert plain == modelled
    for schema, definitions in plain:
        jsonschema.Draft202012Validator.check_schema({**schema, "$defs": definitions})
        formats = re.findall(r'"format": "([^"]+)"', json.dumps([schema, definitions]))
        assert set(formats) <= KNOWN


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (Choice, {"type": "string", "enum": ["z", "m", "a"]}),
        (datetime.datetime, {"type": "string", "format": "date-time"}),
        (datetime.date, {"type": "string", "format": "date"}),
        (datetime.time, {"type": "string", "format": "time"}),
        (datetime.timedelta, {"type": "string", "format": "duration"}),
        (uuid.UUID, {"type": "string", "format": "uuid"}),
        (Decimal, {"type": "string", "pattern": DECIMAL}),
        (bytes, {"type": "string", "format": "byte", "contentEncoding": "base64"}),
        (
            Annotated[bytes, msgspec.Meta(max_length=4)],
            {"type": "string", "format": "byte", "contentEncoding": "base64", "maxLength": 8},
        ),
        (
            Annotated[bytes, pydantic.Field(max_length=4)],
            {"type": "string", "format": "byte", "contentEncoding": "base64", "maxLength": 8},
        ),
        # A type without a time zone has no format: those of JSON Schema have one.
        (Annotated[datetime.datetime, msgspec.Meta(tz=False)], {"type": "string"}),
        (
            Annotated[int, msgspec.Meta(ge=1, lt=9, description="A few.")],
            {"type": "integer", "minimum": 1, "exclusiveMaximum": 9, "description": "A few."},
        ),
        (
            Annotated[list[int], msgspec.Meta(max_length=3)],
            {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        ),
    ],
    ids=str,
)
def test_schema_of_a_parameter(hint: Any, expected: Any) -> None:
    (taken, _), _ = described(hint)
    assert taken == expected


def test_schema_of_a_decimal_admits_what_python_writes() -> None:
    for text in ("0", "9.99", "-3", "+1", ".5", "5.", "1E+5", "1e-7", str(Decimal("1e30"))):
        assert re.search(DECIMAL, text), text
        assert Decimal(text).is_finite()
    for text in ("", ".", "nine", "1,5", "0x10", "1e", "--1"):
        assert not re.search(DECIMAL, text), text


class Parcel(TypedDict):
    weight: int
    size: Literal["xl", "s"]
    at: datetime.time


class Pair(NamedTuple):
    first: Literal["b", "a"]
    second: Literal["a", "b"]


class Cat(msgspec.Struct, tag="cat"):
    lives: int = 9
    mood: Literal["sleepy", "awake"] = "sleepy"


class Dog(msgspec.Struct, tag="dog", forbid_unknown_fields=True):
    tricks: list[str] = []


class Point(msgspec.Struct, array_like=True):
    x: float
    y: float = 0


def test_schema_of_classes_keeps_the_order_of_members_and_values() -> None:
    (_, parcel), _ = described(list[Parcel])
    assert list(parcel["Parcel"]["properties"]) == ["weight", "size", "at"]
    assert parcel["Parcel"]["properties"]["size"]["enum"] == ["xl", "s"]
    (pair, _), _ = described(Pair)
    assert [each["enum"] for each in pair["prefixItems"]] == [["b", "a"], ["a", "b"]]
    (point, _), _ = described(Point)
    assert point["minItems"] == 1
    (pets, classes), _ = described(Cat | Dog | None)
    assert pets["anyOf"][0]["discriminator"]["mapping"] == {
        "cat": "#/$defs/Cat",
        "dog": "#/$defs/Dog",
    }
    assert classes["Cat"]["properties"]["mood"]["enum"] == ["sleepy", "awake"]
    assert classes["Dog"]["additionalProperties"] is False


def choosing() -> App:
    app = App("shop", ledger="memory:")

    @app.query
    def choose(size: Size, colour: Literal["red", "blue"] = "red") -> list[Size]:
        return [size]

    return app


async def test_schema_values_have_the_declared_order_everywhere() -> None:
    app = choosing()
    newest = list(REVISIONS.values())[-1]
    [tool] = [json.loads(bytes(each)) for each in app.catalog().list("tools", newest)]
    sizes = ["small", "medium", "large"]
    assert tool["inputSchema"]["$defs"]["Size"]["enum"] == sizes
    assert tool["inputSchema"]["properties"]["colour"]["enum"] == ["red", "blue"]
    document = result(await app.handle(call("rpc.discover")))
    assert document["components"]["schemas"]["choose.Size"]["enum"] == sizes
    assert form_of(Size).fields["value"]["enum"] == sizes
    contract = of_app(app)
    assert contract.tools is not None
    assert contract.tools["choose"].input["$defs"]["Size"]["enum"] == sizes
    assert 'Literal["red", "blue"]' in generated(contract, "rpc")


def test_contract_does_not_depend_on_the_order_of_values() -> None:
    def locked(hint: Any) -> Contract:
        app = App("shop", ledger="memory:")

        def choose(size: Any) -> None:
            pass

        choose.__annotations__["size"] = hint
        app.query(choose)
        return of_app(app)

    first = locked(Literal["b", "a"])
    assert first.digest == locked(Literal["a", "b"]).digest
    assert first.digest != locked(Literal["a", "c"]).digest


async def test_schema_bytes_of_a_parameter_with_a_field_are_base64() -> None:
    app = App("files", ledger="memory:")

    @app.query
    def size(data: Annotated[bytes, pydantic.Field(max_length=4)]) -> int:
        return len(data)

    assert result(await app.handle(call("size", {"data": "AAE/"}))) == 3
    # The alphabet of URLs is read too.
    assert result(await app.handle(call("size", {"data": "AAE_"}))) == 3
