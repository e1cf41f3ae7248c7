"""Parameters and results of pydantic's types.

The expected values and schemas are what pydantic itself says.
"""

import dataclasses
import datetime
import decimal
import enum
import functools
import inspect
import json
import re
import subprocess
import sys
import uuid
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    TypeVar,
    cast,
    get_type_hints,
)

import annotated_types
import jsonschema
import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, Raw
from pydantic import BaseModel, ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass
from typing_extensions import TypedDict

from tests.calls import call, result
from wirecall import App, Context, Header, RpcError, UsageError, connect
from wirecall.errors import InvalidParams
from wirecall.mcp.types import Text, ToolResult
from wirecall.protocol.params import Signature

T = TypeVar("T")


class Address(BaseModel):
    """Where a person lives."""

    street: str = Field(min_length=1, description="without the number")
    number: int = Field(gt=0)


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(max_length=20)]
    address: Address | None = None
    born: datetime.date | None = None

    @pydantic.field_validator("name")
    @classmethod
    def is_capital(cls, value: str) -> str:
        if value and not value[0].isupper():
            raise ValueError("a name begins with a capital letter")
        return value


class Article(BaseModel):
    sku: str = Field(alias="articleNumber")
    cents: int = Field(450, serialization_alias="priceInCents", validation_alias="price")
    inner: "Article | None" = None

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def euros(self) -> float:
        return self.cents / 100


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(9, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    tricks: list[str] = []


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]


class Period(BaseModel):
    first: datetime.date
    last: datetime.date

    @pydantic.model_validator(mode="after")
    def is_forward(self) -> "Period":
        if self.last < self.first:
            raise ValueError("last is before first")
        return self


class Lax(BaseModel):
    model_config = ConfigDict(strict=False)

    count: int


class Tags(pydantic.RootModel[list[str]]):
    pass


class Page(BaseModel, Generic[T]):
    items: list[T]
    next: str | None = None


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@pydantic_dataclass
class Room:
    beds: int = Field(gt=0, lt=9)
    view: str = Field("none", alias="outlook")


@dataclasses.dataclass
class Trip:
    traveller: Person
    rooms: list[Room] = dataclasses.field(default_factory=list)


class Query(TypedDict):
    text: Annotated[str, Field(min_length=2)]


class Span(NamedTuple):
    first: Annotated[int, Field(ge=0)]
    last: int = 10


Positive = Annotated[int, Field(ge=1)]
Amount = NewType("Amount", Positive)

# --- functions as users of FastMCP write them -----------------------------------------------------


def described(n: Annotated[int, Field(gt=0, description="how many")]) -> int:
    return n


def with_default(n: int = Field(5, ge=1, title="Number", examples=[3])) -> int:
    return n


FIVE = Field(5, le=10)
MADE = Field(default_factory=lambda: [1])
NO_ORDER = Field(None)


def both(n: Annotated[int, Field(ge=1)] = FIVE) -> int:
    return n


def plain_default(n: Annotated[int, Field(ge=1)] = 3) -> int:
    return n


def made_default(n: list[int] = MADE) -> list[int]:
    return n


def required(n: str = Field(..., pattern="^[a-z]+$")) -> str:
    return n


def short(n: pydantic.PositiveInt) -> int:
    return n


def bounded(n: Annotated[float, annotated_types.Interval(gt=0, lt=1)]) -> float:
    return n


def listed(n: Annotated[list[Annotated[int, Field(gt=0)]], Field(min_length=1)]) -> list[int]:
    return n


def keyed(n: dict[str, Address]) -> dict[str, Address]:
    return n


def optional(n: Address | None = None) -> Address | None:
    return n


def either(n: Address | list[Address]) -> Any:
    return n


def model(n: Person) -> Person:
    return n


def tagged(n: Pet) -> Pet:
    return n


def pets(n: list[Pet]) -> list[Pet]:
    return n


def validated(n: Period) -> Period:
    return n


def root(n: Tags) -> Tags:
    return n


def generic(n: Page[Address]) -> Page[Address]:
    return n


def room(n: Room) -> Room:
    return n


def trip(n: Trip) -> Trip:
    return n


def query(n: Query) -> Query:
    return n


def span(n: Span) -> Span:
    return n


def amount(n: list[Amount]) -> list[Amount]:
    return n


def lax(n: Lax) -> Lax:
    return n


def lax_field(n: Annotated[int, Field(strict=False)]) -> int:
    return n


def lax_default(n: int = Field(strict=False)) -> int:
    return n


def moment(n: Annotated[datetime.datetime, Field(description="when")]) -> datetime.datetime:
    return n


def money(n: Annotated[decimal.Decimal, Field(ge=0, decimal_places=2)]) -> decimal.Decimal:
    return n


def colour(n: Annotated[Colour, Field(description="which")]) -> Colour:
    return n


def identity(n: pydantic.UUID4) -> uuid.UUID:
    return n


def link(n: pydantic.HttpUrl) -> pydantic.HttpUrl:
    return n


ADDRESS = {"street": "Main", "number": 1}
VALUES: list[Any] = [
    *[
        None,
        True,
        False,
        0,
        1,
        5,
        7,
        11,
        -1,
        0.5,
        1.0,
        1e30,
        10**30,
        "",
        "a",
        "A",
        "5",
        "red",
        "true",
        [],
        [1],
        [0],
        ["a"],
    ],
    *[
        ["5"],
        [1, 2],
        {},
        {"a": 1},
        {"count": 5},
        {"count": "5"},
        ADDRESS,
        [ADDRESS],
        {"x": ADDRESS},
    ],
    *[
        {**ADDRESS, "number": "1"},
        {**ADDRESS, "number": 0},
        {"street": "", "number": 1},
        {**ADDRESS, "more": 1},
    ],
    *[
        {"name": "Ada"},
        {"name": "ada"},
        {"name": "Ada", "address": ADDRESS},
        {"name": "Ada", "more": 1},
    ],
    *[{"name": "Ada", "born": "1815-12-10"}, {"name": "Ada", "born": 5}, {"name": "A" * 21}],
    *[
        {"kind": "cat"},
        {"kind": "cat", "lives": 10},
        {"kind": "dog", "tricks": ["sit"]},
        {"kind": "cow"},
        [{"kind": "dog"}],
    ],
    *[{"first": "2026-01-01", "last": "2026-02-01"}, {"first": "2026-02-01", "last": "2026-01-01"}],
    *[
        {"items": [ADDRESS]},
        {"items": [{}]},
        {"beds": 2, "outlook": "sea"},
        {"beds": 2, "view": "sea"},
        {"beds": 9},
    ],
    *[
        {"traveller": {"name": "Ada"}},
        {"traveller": {"name": "Ada"}, "rooms": [{"beds": 1}]},
        {"text": "ab"},
        {"text": "a"},
    ],
    *[
        "2026-07-28T12:00:00Z",
        "4.50",
        "4.505",
        "-1",
        "12345678-1234-4678-9234-567812345678",
        "https://example.org/x",
    ],
]
FUNCTIONS = [
    *[
        described,
        with_default,
        both,
        plain_default,
        made_default,
        required,
        short,
        bounded,
        listed,
        keyed,
        optional,
        either,
    ],
    *[
        model,
        tagged,
        pets,
        validated,
        root,
        generic,
        room,
        trip,
        query,
        span,
        amount,
        lax,
        lax_field,
        lax_default,
        moment,
    ],
    *[money, colour, identity, link],
]
DECLARE_A_MODE = [lax, lax_field, lax_default]


def by_pydantic(function: Any) -> Any:
    """Return pydantic's own model of a function's only parameter."""
    [declared] = inspect.signature(function).parameters.values()
    default = ... if declared.default is declared.empty else declared.default
    fields: Any = {"n": (get_type_hints(function, include_extras=True)["n"], default)}
    return pydantic.create_model("Params", **fields)


@functools.cache
def signature_of(function: Any) -> Signature:
    return Signature(function, inject=Context)


def taken(function: Any, raw: str) -> Any:
    [value] = signature_of(function).bind(Raw(raw))
    return value


def reason(function: Any, params: Any) -> str:
    with pytest.raises(InvalidParams) as caught:
        signature_of(function).bind_all(Raw(json.dumps(params)), "the context")
    return str(caught.value.data["reason"])


def read_by_pydantic(oracle: Any, raw: str, *, strict: bool | None) -> Any:
    """Return what pydantic reads. JSON Schema says that 5.0 is an integer, as wirecall does."""
    try:
        return oracle.model_validate_json(raw, strict=strict)
    except pydantic.ValidationError:
        if not strict:
            raise
        whole = re.sub(r"(?<=[0-9])\.0\b(?!e)", "", raw)
        return oracle.model_validate_json(whole, strict=strict)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_values_are_accepted_as_by_pydantic(function: Any) -> None:
    oracle = by_pydantic(function)
    strict = None if function in DECLARE_A_MODE else True
    fits = 0
    for value in VALUES:
        raw = json.dumps({"n": value})
        try:
            expected = read_by_pydantic(oracle, raw, strict=strict).n
        except pydantic.ValidationError:
            assert reason(function, {"n": value}).startswith("params.n"), value
            assert reason(function, [value]).startswith("params.n"), value
            continue
        fits += 1
        assert taken(function, raw) == expected
        assert taken(function, json.dumps([value])) == expected
        assert type(taken(function, raw)) is type(expected)
    assert fits


def with_enum(schema: Any) -> Any:
    """Return a schema with `enum` for `const`, which several model APIs do not know."""
    if isinstance(schema, list):
        return [with_enum(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {word: with_enum(each) for word, each in schema.items() if word != "const"}
    if "const" in schema:
        made["enum"] = [schema["const"]]
    return made


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_schemas_are_those_of_pydantic(function: Any) -> None:
    signature = Signature(function, inject=Context)
    expected = with_enum(by_pydantic(function).model_json_schema())
    assert signature.schema["properties"] == expected["properties"]
    assert signature.schema["required"] == expected.get("required", [])
    assert signature.schema.get("$defs", {}) == expected.get("$defs", {})
    jsonschema.Draft202012Validator.check_schema(signature.schema)
    if signature.result is not None:
        hint = get_type_hints(function, include_extras=True)["return"]
        written = pydantic.TypeAdapter(hint).json_schema(mode="serialization")
        assert signature.result_schema == with_enum(written)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
async def test_result_is_what_pydantic_writes_and_fits_its_schema(function: Any) -> None:
    app = App("test", ledger="memory:")
    app.query(function)
    signature = app.registry.methods[function.__name__].signature
    adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(
        get_type_hints(function, include_extras=True)["return"]
    )
    async with connect(app, protocol="mcp") as client:
        for value in VALUES:
            try:
                expected = taken(function, json.dumps([value]))
            except InvalidParams:
                continue
            told = result(await app.handle(call(function.__name__, [value])))
            if function is not either:
                assert told == adapter.dump_python(expected, mode="json", by_alias=True)
            jsonschema.Draft202012Validator(signature.result_schema).validate(told)
            called = await client.call_tool(function.__name__, {"n": value})
            if called.structured is not UNSET:
                assert called.structured == told
            else:
                assert called.text == (
                    told if isinstance(told, str) else json.dumps(told, separators=(",", ":"))
                )


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["name", "address", "street", "x"]), inner)
        ),
    )
)
def test_any_json_is_accepted_or_refused_as_by_pydantic(value: Any) -> None:
    oracle = by_pydantic(model)
    try:
        expected = oracle.model_validate_json(json.dumps({"n": value}), strict=True).n
    except pydantic.ValidationError:
        assert reason(model, [value]).startswith("params.n")
    else:
        assert taken(model, json.dumps([value])) == expected


# --- names, places and kinds of parameters --------------------------------------------------------


def bound(function: Any, params: Any) -> Any:
    args, keywords = Signature(function, inject=Context).bind_all(
        Raw(json.dumps(params)), "the context"
    )
    return function(*args, **keywords)


def aliased(
    ctx: Context,
    first: int = Field(alias="erste"),
    *,
    second: Annotated[str, Field(alias="zweite")] = "z",
) -> Any:
    return (first, second)


def test_alias_is_the_name_of_a_parameter() -> None:
    assert bound(aliased, {"erste": 1, "zweite": "x"}) == (1, "x")
    assert bound(aliased, {"erste": 1}) == bound(aliased, [1]) == (1, "z")
    assert reason(aliased, {"first": 1}) == "params.erste: missing; params.first: unknown name"
    assert reason(aliased, {"zweite": "x"}) == "params.erste: missing"
    assert reason(aliased, {"erste": "x"}) == "params.erste: expected a valid integer, got str"
    schema = Signature(aliased, inject=Context).schema
    assert (list(schema["properties"]), schema["required"]) == (["erste", "zweite"], ["erste"])


def many(*numbers: Annotated[int, Field(gt=0)]) -> Any:
    return numbers


def lead(
    first: Address, second: Annotated[int, Field(gt=0)] = 2, *others: Annotated[int, Field(gt=0)]
) -> Any:
    return (first.number, second, others)


def surplus(first: int, **others: Annotated[int, Field(gt=0)]) -> Any:
    return (first, others)


def mixed(
    plain: int,
    address: Address,
    trips: list[datetime.date],
    *,
    size: Annotated[int, Field(gt=0)] = 1,
) -> Any:
    return (plain, address.number, trips, size)


def test_parameters_of_every_kind() -> None:
    assert bound(many, [1, 2]) == bound(many, {"numbers": [1, 2]}) == (1, 2)
    assert bound(many, []) == bound(many, {}) == ()
    assert (
        reason(many, [1, 0])
        == reason(many, {"numbers": [1, 0]})
        == "params.numbers[1]: expected a value greater than 0"
    )
    assert bound(lead, [ADDRESS]) == (1, 2, ())
    assert (
        bound(lead, [ADDRESS, 3, 4, 5])
        == bound(lead, {"first": ADDRESS, "second": 3, "others": [4, 5]})
        == (1, 3, (4, 5))
    )
    assert (
        reason(lead, [ADDRESS, 3, 4, "5"]) == "params.others[1]: expected a valid integer, got str"
    )
    assert bound(surplus, {"first": 1, "x": 2}) == (1, {"x": 2})
    assert reason(surplus, {"first": 1, "x": 0}) == "params.x: expected a value greater than 0"
    params = {"plain": 1, "address": ADDRESS, "trips": ["2026-07-28"], "size": 2}
    assert bound(mixed, params) == (1, 1, [datetime.date(2026, 7, 28)], 2)
    assert reason(mixed, {**params, "plain": "1"}) == "params.plain: expected int, got str"


def test_default_is_made_for_every_call() -> None:
    first = taken(made_default, "{}")
    second = taken(made_default, "[]")
    assert first == second == [1]
    assert first is not second


# --- strings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "value", "expected"),
    [
        (described, "5", "params.n: expected a valid integer, got str"),
        (described, None, "params.n: expected a valid integer, got null"),
        (described, 0, "params.n: expected a value greater than 0"),
        (model, [], "params.n: expected an object, got array"),
        (model, {}, "params.n.name: missing"),
        (model, {"name": "Ada", "x": 1}, "params.n.x: unknown name"),
        (model, {"name": "ada"}, "params.n.name: a name begins with a capital letter"),
        (keyed, {"x": {"street": "Main"}}, "params.n.x.number: missing"),
        (listed, [1, 2, 0], "params.n[2]: expected a value greater than 0"),
        (colour, "green", "params.n: expected 'red' or 'blue'"),
        (described, 1e400, "params.n: number out of range"),
        (
            model,
            {"name": 5, "address": {"street": "", "number": "1"}, "born": "x", "more": 1},
            "params.n.name: expected a valid string, got int; params.n.address.street: "
            "string should have at least 1 "
            "character; params.n.address.number: expected a valid integer, got str",
        ),
    ],
)
def test_misfit_says_what_and_where(function: Any, value: Any, expected: str) -> None:
    raw = json.dumps({"n": value}).replace("Infinity", "1e400")
    with pytest.raises(InvalidParams) as caught:
        taken(function, raw)
    assert caught.value.data["reason"] == expected


def test_problems_of_several_parameters_are_reported_together() -> None:
    def book(
        name: Annotated[str, Field(min_length=1)], nights: Annotated[int, Field(gt=0)]
    ) -> None: ...

    expected = (
        "params.name: string should have at least 1 character; params.nights: "
        "expected a value greater than 0"
    )
    assert reason(book, {"name": "", "nights": 0}) == expected


# --- both libraries in one function ---------------------------------------------------------------


class Order(msgspec.Struct):
    buyer: Person
    articles: list[Article] = []
    note: Annotated[str, msgspec.Meta(max_length=5)] = ""


def order(n: Order) -> Order:
    return n


def test_models_inside_a_struct() -> None:
    sent = {"buyer": {"name": "Ada"}, "articles": [{"articleNumber": "tea", "price": 5}]}
    article = Article.model_validate({"articleNumber": "tea", "price": 5})
    assert taken(order, json.dumps([sent])) == Order(Person(name="Ada"), [article])
    for wrong, expected in (
        ({"buyer": {"name": "ada"}}, "params.n.buyer.name: a name begins with a capital letter"),
        ({"buyer": {"name": 5}}, "params.n.buyer.name: expected a valid string, got int"),
        ({**sent, "articles": [{}]}, "params.n.articles[0].articleNumber: missing"),
        ({**sent, "note": "too long"}, "params.n.note: expected str of length <= 5"),
    ):
        assert reason(order, [wrong]) == expected
    signature = Signature(order, inject=Context)
    jsonschema.validate({"n": sent}, signature.schema)
    assert "price" in signature.schema["$defs"]["Article"]["properties"]
    assert "priceInCents" in signature.result_schema["$defs"]["Article"]["properties"]


class StructWithField(msgspec.Struct):
    count: Annotated[int, Field(gt=0)]


class StructWithDataclass(msgspec.Struct):
    room: Room


class ModelWithMeta(BaseModel):
    count: Annotated[int, msgspec.Meta(gt=0)]


class ModelWithSocket(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    context: Context


class Other:
    class Address(msgspec.Struct):
        town: str


def field_in_struct(n: list[StructWithField]) -> None: ...


def dataclass_in_struct(n: StructWithDataclass) -> None: ...


def meta_and_field(n: Annotated[int, msgspec.Meta(gt=0), Field(lt=9)]) -> None: ...


def struct_and_field(n: dict[str, Order], default: Order | None = NO_ORDER) -> None: ...


def meta_in_model(n: ModelWithMeta) -> None: ...


def not_json(n: ModelWithSocket) -> None: ...


def two_names(n: int = Field(validation_alias=pydantic.AliasChoices("a", "b"))) -> None: ...


def same_names(n: int, m: int = Field(alias="n")) -> None: ...


def inner_alias(n: list[Annotated[int, Field(alias="m")]]) -> None: ...


def dependent(n: int, m: int = Field(default_factory=lambda data: data["n"])) -> None: ...


def two_types(n: Address, m: Other.Address) -> None: ...


def bad_result() -> ModelWithSocket:
    raise NotImplementedError


def ignored_in_result() -> StructWithField:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (
            field_in_struct,
            "The parameter n of field_in_struct has FieldInfo.* which would be ignored",
        ),
        (
            dataclass_in_struct,
            "The parameter n of dataclass_in_struct has .*Room.* which would be ignored",
        ),
        (
            meta_and_field,
            "The parameter n of meta_and_field has FieldInfo.* which would be ignored",
        ),
        (
            struct_and_field,
            "The parameter default of struct_and_field has FieldInfo.* which would be ignored",
        ),
        (
            meta_in_model,
            "The parameter n of meta_in_model has .*Meta.* in a pydantic model, which would be ignored",
        ),
        (not_json, "The parameters of not_json has a type that pydantic cannot"),
        (two_names, "The parameter n of two_names has AliasChoices.* as its name"),
        (same_names, "Two parameters of same_names have the same name"),
        (inner_alias, "The parameter n of inner_alias has a type that pydantic cannot"),
        (dependent, "The parameter m of dependent has a default_factory that takes other values"),
        (two_types, "Two types of the parameters of two_types are called Address"),
        (bad_result, "The result of bad_result has a type that pydantic cannot"),
        (
            ignored_in_result,
            "The result of ignored_in_result has FieldInfo.* which would be ignored",
        ),
    ],
)
def test_type_that_cannot_be_honoured_is_refused(function: Any, expected: str) -> None:
    with pytest.raises(UsageError, match=rf"{expected}[\s\S]*fix: "):
        App("test").query(function)


# --- in the rest of wirecall ----------------------------------------------------------------------


async def test_commands_replay_what_pydantic_writes() -> None:
    app = App("test", ledger="memory:")

    @app.command
    async def buy(article: Article, count: int = Field(1, ge=1)) -> Article:
        return article

    sent = {"article": {"articleNumber": "tea"}, "count": 2}
    first = result(await app.handle(call("buy", sent, key="k")))
    assert first == {"articleNumber": "tea", "priceInCents": 450, "inner": None, "euros": 4.5}
    assert result(await app.handle(call("buy", sent, key="k"))) == first
    await app.aclose()


async def test_tools_prompts_and_resources() -> None:
    app = App("test", ledger="memory:")

    @app.tool
    def find(
        region: Annotated[str, Header("Region"), Field(pattern="^eu")],
        page: int = Field(1, ge=1, alias="seite"),
    ) -> Pet:
        return Cat(kind="cat", lives=page)

    @app.tool
    def fail(n: Annotated[int, Field(gt=0)]) -> Cat:
        return cast(Cat, ToolResult(content=["no cat"], is_error=True))

    @app.prompt
    def count(
        n: Annotated[int, Field(gt=0, description="how many")], who: Address | None = None
    ) -> str:
        return f"{n} {who.street if who else ''}"

    @app.resource("shop://{n}")
    def shop(n: Annotated[int, Field(gt=0)]) -> str:
        return str(n + 1)

    async with connect(app, protocol="mcp") as client:
        tools = {tool.name: tool for tool in await client.list_tools()}
        assert tools["find"].input_schema["properties"]["region"]["x-mcp-header"] == "Region"
        called = await client.call_tool("find", {"region": "eu-1", "seite": 3})
        assert called.structured == {"kind": "cat", "lives": 3}
        with pytest.raises(
            RpcError, match=r"arguments.seite: expected a value greater than or equal to 1"
        ):
            await client.call_tool("find", {"region": "eu-1", "seite": 0})
        assert (await client.call_tool("fail", {"n": 1}, check=False)).text == "no cat"
        [prompt] = await client.list_prompts()
        assert [(each.name, each.description, each.required) for each in prompt.arguments] == [
            ("n", "how many", True),
            ("who", None, False),
        ]
        [told] = (await client.get_prompt("count", {"n": "5", "who": json.dumps(ADDRESS)})).messages
        assert isinstance(told.content, Text) and told.content.text == "5 Main"
        with pytest.raises(RpcError, match=r"params.n: expected a value greater than 0"):
            await client.get_prompt("count", {"n": "0"})
        [read] = await client.read_resource("shop://4")
        assert read.text == "5"


async def test_references_of_discriminators_point_into_the_openrpc_document() -> None:
    app = App("test")
    app.query(pets)
    document = result(await app.handle(call("rpc.discover")))

    def references(part: Any) -> Any:
        if isinstance(part, str) and part.startswith("#/"):
            yield part
        if isinstance(part, dict):
            part = list(part.values())
        if isinstance(part, list):
            for inner in part:
                yield from references(inner)

    found = list(references(document))
    assert any(place.endswith("Cat") for place in found)
    for place in found:
        target = document
        for step in place.removeprefix("#/").split("/"):
            target = target[step]


def test_app_without_types_of_pydantic_does_not_load_it() -> None:
    script = """
import sys, dataclasses, msgspec, typing, wirecall
app = wirecall.App("test")
@dataclasses.dataclass
class Point:
    x: int
@app.query
def f(a: Point, b: typing.Annotated[int, msgspec.Meta(gt=0)] = 1) -> Point:
    return a
reply = app.handle_sync('{"jsonrpc":"2.0","method":"f","params":[{"x":1}],"id":1}')
assert b'"result":{"x":1}' in reply
foreign = ("pydantic", "pydantic_core", "annotated_types")
print([name for name in sys.modules if name.partition(".")[0] in foreign])
"""
    printed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() == "[]"
