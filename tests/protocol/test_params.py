"""A function's signature as the decoder of its params."""

import dataclasses
import datetime
import decimal
import enum
import functools
import json
import uuid
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    Required,
    TypedDict,
    TypeVar,
)

import annotated_types
import jsonschema
import msgspec
import pydantic
import pytest
from msgspec import UNSET, Raw

from tests.calls import call, result
from wirecall import App, Context, UsageError, connect
from wirecall.errors import InvalidParams
from wirecall.protocol.params import Signature


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Item(TypedDict):
    sku: str
    count: NotRequired[int]


class Line(msgspec.Struct):
    item: Item
    price: decimal.Decimal


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Address(pydantic.BaseModel):
    street: str
    number: int


class Person(pydantic.BaseModel):
    name: str
    address: Address


def bind(function: Any, raw: str | None) -> Any:
    signature = Signature(function, inject=Context, keyed=False)
    args, keywords = signature.bind_all(UNSET if raw is None else Raw(raw), "the context")
    return function(*args, **keywords)


def reason(function: Any, raw: str | None) -> str:
    with pytest.raises(InvalidParams) as caught:
        bind(function, raw)
    assert caught.value.code == -32602
    return str(caught.value.data["reason"])


def pay(order: str, cents: int) -> Any:
    return (order, cents)


def defaults(a: int, b: str = "b", c: list[int] = []) -> Any:  # noqa: B006  # as in Python, one object for all calls
    return (a, b, c)


def rest(*numbers: int) -> Any:
    return numbers


def lead_and_rest(first: str, second: int = 2, *others: float) -> Any:
    return (first, second, others)


def keywords(a: int, *, flag: bool = False, needed: str) -> Any:
    return (a, flag, needed)


def surplus(a: int, **others: int) -> Any:
    return (a, others)


def untyped(anything, more=None):  # type: ignore[no-untyped-def]
    return (anything, more)


def nothing() -> Any:
    return "nothing"


def positional_only(a: int, /, b: int) -> Any:
    return (a, b)


def injected(ctx: Context, a: int) -> Any:
    return (ctx, a)


def injected_by_name(a: int, *, ctx: Context | None = None) -> Any:
    return (a, ctx)


@pytest.mark.parametrize(
    ("function", "raw", "expected"),
    [
        (pay, '["x",5]', ("x", 5)),
        (pay, '{"cents":5,"order":"x"}', ("x", 5)),
        (pay, '{"cents":5,"order":"x","_meta":{"traceparent":"-"}}', ("x", 5)),
        (defaults, "[1]", (1, "b", [])),
        (defaults, '[1,"x",[3]]', (1, "x", [3])),
        (defaults, '{"a":1,"c":[2]}', (1, "b", [2])),
        (rest, "[1,2,3]", (1, 2, 3)),
        (rest, '{"numbers":[1,2]}', (1, 2)),
        (rest, "[]", ()),
        (rest, "{}", ()),
        (rest, None, ()),
        (lead_and_rest, '["a"]', ("a", 2, ())),
        (lead_and_rest, '["a",3,1.5,2]', ("a", 3, (1.5, 2.0))),
        (lead_and_rest, '{"first":"a","others":[1]}', ("a", 2, (1.0,))),
        (keywords, '{"a":1,"needed":"n"}', (1, False, "n")),
        (keywords, '{"a":1,"needed":"n","flag":true}', (1, True, "n")),
        (surplus, '{"a":1,"x":2,"y":3}', (1, {"x": 2, "y": 3})),
        (surplus, "[1]", (1, {})),
        (untyped, '[{"deep":[1,null,"x",1.5,true]}]', ({"deep": [1, None, "x", 1.5, True]}, None)),
        (
            untyped,
            '{"anything":123456789012345678901234567890}',
            (123456789012345678901234567890, None),
        ),
        (nothing, None, "nothing"),
        (nothing, "[]", "nothing"),
        (nothing, "{}", "nothing"),
        (positional_only, "[1,2]", (1, 2)),
        (positional_only, '{"a":1,"b":2}', (1, 2)),
        (injected, "[1]", ("the context", 1)),
        (injected, '{"a":1}', ("the context", 1)),
        (injected_by_name, "[1]", (1, "the context")),
    ],
)
def test_params_by_name_and_by_position(function: Any, raw: str | None, expected: Any) -> None:
    assert bind(function, raw) == expected


@pytest.mark.parametrize(
    ("function", "raw", "expected"),
    [
        (pay, '{"order":"x","cents":"5"}', "params.cents: expected int, got str"),
        (pay, '["x","5"]', "params.cents: expected int, got str"),
        (pay, '{"order":"x","cents":1.5}', "params.cents: expected int, got float"),
        (pay, '{"order":"x","cents":true}', "params.cents: expected int, got bool"),
        (pay, '{"order":"x"}', "params.cents: missing"),
        (pay, '{"order":"x","cents":1,"tip":2}', "params.tip: unknown name"),
        (pay, '["x"]', "params: expected 2 arguments (order, cents), got 1"),
        (pay, '["x",1,2]', "params: expected 2 arguments (order, cents), got 3"),
        (pay, None, "params: expected 2 arguments (order, cents), got 0"),
        (pay, "{}", "params.order: missing; params.cents: missing"),
        (
            pay,
            '{"order":1,"cents":"x","a":1,"b":2}',
            "params.order: expected str, got int; params.cents: expected int, got str; params.a: "
            "unknown name",
        ),
        (defaults, "[]", "params: expected 1 to 3 arguments (a, b, c), got 0"),
        (defaults, '[1,"x",[1],2]', "params: expected 1 to 3 arguments (a, b, c), got 4"),
        (defaults, '[1,"x",[1,"y"]]', "params.c[1]: expected int, got str"),
        (rest, '[1,"x"]', "params[1]: expected int, got str"),
        (rest, '{"numbers":["x"]}', "params.numbers[0]: expected int, got str"),
        (lead_and_rest, "[]", "params: expected at least 1 argument (first, second), got 0"),
        (lead_and_rest, '["a",1,"x"]', "params[2]: expected float, got str"),
        (keywords, "[1]", "params.needed: missing; it can only be given by name"),
        (keywords, '{"a":1}', "params.needed: missing"),
        (surplus, '{"a":1,"x":"y"}', "params.x: expected int, got str"),
        (nothing, "[1]", "params: expected 0 arguments, got 1"),
        (nothing, '{"a":1}', "params.a: unknown name"),
        (pay, '{"order":"x","cents":1e400}', "params.cents: number out of range"),
    ],
)
def test_mismatches_name_the_path_and_the_type(
    function: Any, raw: str | None, expected: str
) -> None:
    assert reason(function, raw) == expected


def test_misfit_does_not_echo_the_megabyte_of_its_caller() -> None:
    assert len(reason(pay, json.dumps({"order": "x", "cents": 1, "y" * 100_000: 1}))) < 200


def rich(
    point: Point,
    item: Item,
    line: Line,
    colour: Colour,
    when: datetime.datetime,
    id: uuid.UUID,
    amount: decimal.Decimal,
    either: int | str,
    level: Literal["low", "high"],
    age: Annotated[int, msgspec.Meta(ge=0, le=150, description="in years")],
    maybe: Point | None = None,
) -> Line:
    return (point, item, line, colour, when, id, amount, either, level, age, maybe)  # type: ignore[return-value]


RICH = {
    "point": {"x": 1},
    "item": {"sku": "tea"},
    "line": {"item": {"sku": "tea", "count": 2}, "price": "4.50"},
    "colour": "red",
    "when": "2026-07-28T12:00:00Z",
    "id": "12345678-1234-5678-1234-567812345678",
    "amount": "10.10",
    "either": "x",
    "level": "low",
    "age": 30,
}


def test_params_of_common_types() -> None:
    point, item, line, colour, when, id, amount, either, level, age, maybe = bind(
        rich, json.dumps(RICH)
    )
    assert point == Point(1, 0)
    assert item == {"sku": "tea"}
    assert line == Line({"sku": "tea", "count": 2}, decimal.Decimal("4.50"))
    assert colour is Colour.RED
    assert when == datetime.datetime(2026, 7, 28, 12, tzinfo=datetime.UTC)
    assert id == uuid.UUID("12345678-1234-5678-1234-567812345678")
    assert amount == decimal.Decimal("10.10")
    assert (either, level, age, maybe) == ("x", "low", 30, None)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("point", {"x": "1"}, "params.point.x: expected int, got str"),
        ("item", {}, "params.item.sku: missing"),
        ("line", {"item": {"sku": 1}, "price": "1"}, "params.line.item.sku: expected str, got int"),
        ("colour", "green", "params.colour: invalid enum value 'green', expected one of red, blue"),
        ("when", "soon", "params.when: invalid RFC3339 encoded datetime"),
        ("id", "x", "params.id: invalid UUID"),
        ("amount", "x", "params.amount: invalid decimal string"),
        ("either", [], "params.either: expected int | str, got array"),
        ("level", "middle", "params.level: invalid enum value 'middle', expected one of low, high"),
        ("age", 151, "params.age: expected int <= 150"),
    ],
)
def test_misfits_inside_rich_types(field: str, value: Any, expected: str) -> None:
    assert reason(rich, json.dumps({**RICH, field: value})) == expected


def test_pydantic_models_in_and_out() -> None:
    app = App("people", mode="development")

    @app.query
    def greet(person: Person, others: list[Person] | None = None) -> Person:
        return person

    ada = {"name": "Ada", "address": {"street": "Main", "number": 1}}
    data = json.dumps({"jsonrpc": "2.0", "method": "greet", "params": {"person": ada}, "id": 1})
    assert json.loads(app.handle_sync(data) or b"")["result"] == ada
    wrong = json.dumps({"person": {"name": "Ada", "address": {"street": "Main", "number": "one"}}})
    assert reason(greet, wrong) == "params.person.address.number: expected a valid integer, got str"
    schema = Signature(greet, inject=Context).schema
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate({"person": ada}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"person": {"name": "Ada", "address": {}}}, schema)


class Article(pydantic.BaseModel):
    sku: str = pydantic.Field(alias="articleNumber")
    cents: int = pydantic.Field(default=450, serialization_alias="priceInCents")
    inner: "Article | None" = None

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def euros(self) -> float:
        return self.cents / 100


async def test_pydantic_result_has_the_names_of_its_schema() -> None:
    """Aliases and computed fields, over JSON-RPC and MCP; input has a separate schema."""
    app = App("shop", mode="development", ledger="memory:")

    @app.query
    def echo(article: Article) -> Article:
        return article

    @app.query
    def many(article: Article) -> list[Article]:
        return [article]

    sent = {"articleNumber": "tea", "inner": {"articleNumber": "bag", "cents": 5}}
    signature = app.registry.methods["echo"].signature
    jsonschema.validate({"article": sent}, signature.schema)
    document = result(await app.handle(call("rpc.discover")))
    described = {method["name"]: method for method in document["methods"]}
    async with connect(app, protocol="mcp") as client:
        tools = {tool.name: tool for tool in await client.list_tools()}
        for name in ("echo", "many"):
            answer = result(await app.handle(call(name, {"article": sent})))
            (one,) = answer if name == "many" else [answer]
            assert (
                one["articleNumber"] == "tea" and one["priceInCents"] == 450 and one["euros"] == 4.5
            )
            assert one["inner"]["priceInCents"] == 5
            assert (await client.call_tool(name, {"article": sent})).structured == answer
            output = tools[name].output_schema
            assert output is not None
            schema = {**described[name]["result"]["schema"], "components": document["components"]}
            for checked in (output, schema):
                jsonschema.validate(answer, checked)
                with pytest.raises(jsonschema.ValidationError):
                    jsonschema.validate(
                        [{"sku": "tea"}] if name == "many" else {"sku": "tea"}, checked
                    )
            taken = {**described[name]["params"][0]["schema"], "components": document["components"]}
            jsonschema.validate(sent, taken)


@dataclasses.dataclass
class Size:
    known: ClassVar[int] = 3
    unit: str = "cm"
    height: int = 0
    width: int = dataclasses.field(default=1, kw_only=True)
    tags: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Box:
    size: Size
    lid: Size | None = None
    others: tuple[Size, ...] = ()


class Pallet(msgspec.Struct):
    boxes: dict[str, Box]


@dataclasses.dataclass(slots=True)
class Slim:
    depth: int = 7


WHOLE = {"unit": "cm", "height": 5, "width": 1, "tags": []}


@pytest.mark.parametrize(
    ("type", "sent", "returned"),
    [
        (Size, {"height": 5}, WHOLE),
        (Box, {"size": {"height": 5}}, {"size": WHOLE, "lid": None, "others": []}),
        (list[Size] | None, [{"height": 5}], [WHOLE]),
        (
            Pallet,
            {"boxes": {"a": {"size": {"height": 5}, "others": [{"height": 5}]}}},
            {"boxes": {"a": {"size": WHOLE, "lid": None, "others": [WHOLE]}}},
        ),
        (Slim, {}, {"depth": 7}),
    ],
)
def test_dataclass_is_returned_with_its_defaults(type: Any, sent: Any, returned: Any) -> None:
    app = App("test", ledger="memory:")

    def echo(value: Any) -> Any:
        return value

    def keyed(value: Any, ctx: Context) -> Any:
        return value

    echo.__annotations__["value"] = keyed.__annotations__["value"] = type
    app.query(echo)
    app.command(keyed)
    assert result(app.handle_sync(call("echo", {"value": sent}))) == returned
    assert result(app.handle_sync(call("echo", [sent]))) == returned
    assert result(app.handle_sync(call("keyed", {"value": sent}, key="k"))) == returned


Positive = Annotated[int, pydantic.Field(gt=0)]
T = TypeVar("T")


@dataclasses.dataclass
class Counted:
    count: Positive = 1


class CountedStruct(msgspec.Struct):
    counts: list[Annotated[int, annotated_types.Gt(0)]]


class CountedDict(TypedDict):
    inner: "dict[str, CountedStruct | None]"


def described(n: Annotated[int, pydantic.Field(description="how many")]) -> int:
    return n


def with_default(n: int = pydantic.Field(5, ge=1)) -> int:
    return n


def listed(n: list[Positive] | None = None) -> Any:
    return n


def bounded(n: Annotated[int, annotated_types.Ge(1)]) -> int:
    return n


def in_dataclass(n: Counted) -> Any:
    return n


def in_dict(*n: CountedDict) -> Any:
    return n


class CountedTuple(NamedTuple):
    first: Positive


class Page(msgspec.Struct, Generic[T]):
    items: list[T]
    number: Positive


CountedType = NewType("CountedType", Positive)


def in_tuple(n: CountedTuple) -> Any:
    return n


def in_generic(n: Page[str]) -> Any:
    return n


def in_new_type(n: list[CountedType]) -> Any:
    return n


@pytest.mark.parametrize("function", [in_dict, in_generic])
def test_constraint_that_would_be_ignored_is_refused(function: Any) -> None:
    with pytest.raises(
        UsageError, match=r"The parameter n of [a-z_]+ has [\s\S]*fix: use msgspec.Meta"
    ):
        App("test").query(function)


@pytest.mark.parametrize(
    ("function", "fits", "wrong"),
    [
        (described, 1, "1"),
        (with_default, 1, 0),
        (listed, [1], [0]),
        (bounded, 1, 0),
        (in_dataclass, {"count": 1}, {"count": 0}),
        (in_tuple, [1], [0]),
        (in_new_type, [1], [0]),
    ],
)
def test_constraint_of_pydantic_holds(function: Any, fits: Any, wrong: Any) -> None:
    app = App("test")
    app.query(function)
    assert result(app.handle_sync(call(function.__name__, [fits]))) == fits
    with pytest.raises(InvalidParams):
        bind(function, json.dumps([wrong]))


def test_schemas_describe_the_accepted_params() -> None:
    signature = Signature(rich, inject=Context)
    jsonschema.Draft202012Validator.check_schema(signature.schema)
    jsonschema.validate(RICH, signature.schema)
    for broken in (
        {**RICH, "age": 151},
        {**RICH, "x": 1},
        {k: v for k, v in RICH.items() if k != "point"},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, signature.schema)
    assert signature.schema["properties"]["age"]["description"] == "in years"
    jsonschema.Draft202012Validator.check_schema(signature.result_schema)
    assert signature.result_schema["$ref"] == "#/$defs/Line"
    assert Signature(defaults, inject=Context).schema["properties"]["b"] == {
        "type": "string",
        "default": "b",
    }
    assert Signature(injected, inject=Context).schema["properties"].keys() == {"a"}
    assert Signature(untyped, inject=Context).schema["properties"]["anything"] == {}
    assert Signature(untyped, inject=Context).result_schema == {}


def test_callables_of_every_kind() -> None:
    class Adder:
        def __init__(self, base: int) -> None:
            self.base = base

        def add(self, a: int) -> int:
            return self.base + a

        def __call__(self, a: int) -> int:
            return self.base + a

    assert bind(Adder(1).add, "[2]") == 3
    assert bind(Adder(1), "[2]") == 3
    assert bind(functools.partial(pay, "x"), "[5]") == ("x", 5)
    assert bind(len, '["abc"]') == 3


def test_string_in_an_annotation_is_the_description() -> None:
    def ship(
        cents: Annotated[int, "in cents"],
        person: Annotated[Person, "to whom"],
        note: Annotated[Any, "anything", "ignored"] = None,
        grams: Annotated[int, "short", msgspec.Meta(gt=0, description="in grams")] = 1,
        stars: Annotated[int, "short", pydantic.Field(gt=0, description="of five")] = 1,
    ) -> None: ...

    described = Signature(ship, inject=Context).schema["properties"]
    assert [each.get("description") for each in described.values()] == [
        "in cents",
        "to whom",
        "anything",
        "in grams",
        "of five",
    ]
    assert reason(
        ship,
        '{"cents": "1", "person": {"name": "a", "address": {"street": "x", "number": 1}}, "stars": 0}',
    ) == ("params.cents: expected int, got str; params.stars: expected a value greater than 0")


class Parcel(TypedDict):
    to: str
    grams: NotRequired[int]
    stamps: Required[list[int]]


@dataclasses.dataclass
class Crate:
    grams: int
    count: ClassVar[int] = 0


def test_members_that_are_not_fields_of_the_type_are_not_decoded_to_explain_an_error() -> None:
    def send(parcel: Parcel) -> None: ...
    def load(crate: Crate) -> None: ...

    found = reason(send, '{"parcel": {"to": 1, "grams": "x", "stamps": 2}}')
    assert found == (
        "params.parcel.to: expected str, got int; params.parcel.grams: expected int, got str; "
        "params.parcel.stamps: expected array, got int"
    )
    assert reason(send, '{"parcel": {"grams": 1, "to": "x"}}') == "params.parcel.stamps: missing"
    assert (
        reason(load, '{"crate": {"grams": "x", "count": "y"}}')
        == "params.crate.grams: expected int, got str"
    )


def test_type_that_cannot_be_decoded_is_an_error_at_registration() -> None:
    class Socket:
        pass

    def opaque(host: str, socket: Socket, port: int = 80) -> None: ...

    with pytest.raises(
        UsageError,
        match=r"The parameter socket of .*opaque cannot be decoded[\s\S]*Socket[\s\S]*fix:",
    ):
        Signature(opaque, inject=Context)

    def unresolved(x: "Nowhere") -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(UsageError, match=r"cannot be resolved[\s\S]*fix:"):
        Signature(unresolved, inject=Context)
    with pytest.raises(UsageError, match="signature"):
        Signature(type, inject=Context)


def test_callable_object_keeps_its_types_and_its_context() -> None:
    @dataclasses.dataclass
    class Handler:
        tag: str

        def __call__(self, order: int, ctx: Context) -> Any:
            return (self.tag, order, ctx)

    assert bind(Handler("t"), "[7]") == ("t", 7, "the context")
    assert reason(Handler("t"), '["x"]') == "params.order: expected int, got str"


def test_union_with_the_context_is_the_context() -> None:
    def annotated(ctx: Annotated[Context | None, "x"], a: int) -> Any:
        return (ctx, a)

    def nested(contexts: dict[str, Context]) -> Any: ...

    assert bind(annotated, "[1]") == ("the context", 1)
    with pytest.raises(UsageError):
        Signature(nested, inject=Context)


def test_surplus_names_never_collide_with_those_of_the_function() -> None:
    class Shop:
        def put(self, **others: int) -> Any:
            return others

    def with_context(ctx: Context, **others: int) -> Any:
        return others

    assert bind(Shop().put, '{"a":1}') == {"a": 1}
    assert reason(Shop().put, '{"self":1}') == "params.self: unknown name"
    assert reason(with_context, '{"ctx":1}') == "params.ctx: unknown name"
    assert reason(functools.partial(surplus, 1), '{"a":1}') == "params.a: unknown name"


def test_default_that_is_not_json_is_omitted_from_the_schema() -> None:
    def limited(most: float = float("inf")) -> None: ...

    assert Signature(limited, inject=Context).schema["properties"]["most"] == {"type": "number"}


def test_error_survives_pickling_and_needs_a_number_and_a_string() -> None:
    import pickle

    from wirecall import DomainError

    copied = pickle.loads(pickle.dumps(InvalidParams("x", extra=1)))
    assert (type(copied), copied.code, copied.data) == (
        InvalidParams,
        -32602,
        {"reason": "x", "extra": 1},
    )
    with pytest.raises(TypeError):
        DomainError("code", 5)  # type: ignore[arg-type]
