"""Arguments of tools as models send them: one other meaning is understood, several are refused."""

import asyncio
import enum
import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pydantic
import pytest
from msgspec import Raw

from tests.calls import call, error, result
from wirecall import App, Context, UsageError, connect, testing
from wirecall.errors import InvalidParams, KeyConflict
from wirecall.protocol import readings
from wirecall.protocol.params import Signature


@dataclass
class Address:
    street: str
    number: int = 1


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 3


class Guest(pydantic.BaseModel):
    name: str
    age: int


class Cat(pydantic.BaseModel):
    lives: int


class Dog(pydantic.BaseModel):
    lives: bool | None = None


def shop(arguments: Literal["strict", "lenient"] = "lenient", **options: Any) -> App:
    app = App("shop", ledger="memory:", arguments=arguments, **options)

    @app.query
    def count(n: int) -> int:
        return n

    @app.query
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    @app.query
    def shout(text: str, loud: bool = False, times: int = 1) -> str:
        return text * times if loud else text.lower()

    @app.query
    def send(to: Address, weight: float | None = None) -> str:
        return f"{to.street} {to.number} {weight}"

    @app.query
    def either(value: int | str) -> str:
        return type(value).__name__

    @app.query
    def invite(guest: Guest, seats: Annotated[int, pydantic.Field(ge=1)] = 1) -> str:
        return f"{guest.name} {guest.age} {seats}"

    @app.query
    def pet(animal: Cat | Dog) -> str:
        return repr(animal)

    @app.query
    async def slow(n: int, ctx: Context) -> int:
        return n

    return app


async def told(app: App, tool: str, arguments: Any) -> Any:
    """Return the answer of a tool, or the reason why it refuses the arguments."""
    async with connect(app, protocol="mcp") as client:
        try:
            called = await client.call_tool(tool, arguments)
        except InvalidParams as refused:
            return str(refused.data["reason"])
    return called.text


@pytest.mark.parametrize(
    ("tool", "arguments", "expected"),
    [
        ("count", {"n": "5"}, "5"),
        ("count", {"n": " 5 "}, "5"),
        ("count", {"n": "5.0"}, "5"),
        ("count", {"n": 5.0}, "5"),
        ("slow", {"n": "5"}, "5"),
        ("total", {"numbers": "[1,2]"}, "3"),
        ("total", {"numbers": ["1", "2"]}, "3"),
        ("total", {"numbers": '["1", 2.0]'}, "3"),
        ("shout", {"text": "Hey", "loud": "true", "times": "2"}, "HeyHey"),
        ("shout", {"text": "5", "loud": None, "times": None}, "5"),
        ("send", {"to": '{"street": "Main", "number": "7"}'}, "Main 7 None"),
        ("send", {"to": {"street": "12"}, "weight": "null"}, "12 1 None"),
        ("send", {"to": {"street": "Main", "number": None}, "weight": "1.5"}, "Main 1 1.5"),
        ("invite", {"guest": '{"name": "Ada", "age": "36"}', "seats": "2"}, "Ada 36 2"),
    ],
)
async def test_lenient_app_takes_arguments_as_models_send_them(
    tool: str, arguments: Any, expected: Any
) -> None:
    assert await told(shop(), tool, arguments) == expected
    if arguments != {"n": 5.0}:
        assert "expected" in await told(shop("strict"), tool, arguments)


@pytest.mark.parametrize(
    ("tool", "arguments", "reason"),
    [
        ("count", {"n": "five"}, "arguments.n: expected int, got str"),
        ("count", {"n": "05"}, "arguments.n: expected int, got str"),
        ("count", {"n": "5.5"}, "arguments.n: expected int, got str"),
        ("count", {"n": 5.5}, "arguments.n: expected int, got float"),
        ("count", {"n": '"5"'}, "arguments.n: expected int, got str"),
        ("count", {"n": "true"}, "arguments.n: expected int, got str"),
        ("count", {"n": None}, "arguments.n: expected int, got null"),
        ("count", {"n": "1e99"}, "arguments.n: expected int, got str"),
        ("count", {"m": "5"}, "arguments.n: missing; arguments.m: unknown name"),
        ("total", {"numbers": "1,2"}, "arguments.numbers: expected array, got str"),
        ("total", {"numbers": "5"}, "arguments.numbers: expected array, got str"),
        ("shout", {"text": 5}, "arguments.text: expected str, got int"),
        ("shout", {"text": "a", "loud": "yes"}, "arguments.loud: expected bool, got str"),
        # Constraints apply to the meaning too.
        ("invite", {"guest": {"name": "Ada", "age": 36}, "seats": "0"}, "arguments.seats: "),
    ],
)
async def test_lenient_app_refuses_arguments_without_a_clear_meaning(
    tool: str, arguments: Any, reason: str
) -> None:
    assert (await told(shop(), tool, arguments)).startswith(reason)


async def test_lenient_app_leaves_a_value_that_fits() -> None:
    assert await told(shop(), "either", {"value": "5"}) == "str"
    # Another argument does not fit: this one still stays as it is.
    assert await told(shop(), "shout", {"text": "5", "loud": "true", "times": "2"}) == "55"


async def test_lenient_app_refuses_two_meanings() -> None:
    """A model with an int and one with a bool take the same string in different ways."""

    def meant(text: str) -> Raw | None:
        def choose(value: list[int] | list[bool]) -> None:
            pass

        choose.__annotations__["value"] = Annotated[list[int] | list[bool], pydantic.Field()]
        return Signature(choose, inject=Context).understood(Raw(text.encode()))

    assert meant('{"value": ["5"]}') == Raw(b'{"value":[5]}')
    assert meant('{"value": "[]"}') == Raw(b'{"value":[]}')
    assert meant('{"value": ["1", "true"]}') is None
    found = readings.of_params(
        {"value": Raw(b'["5", {"n": "1"}]')},
        {
            "properties": {
                "value": {
                    "anyOf": [
                        {"type": "array", "prefixItems": [{"type": "integer"}, {}]},
                        {
                            "type": "array",
                            "items": {
                                "anyOf": [
                                    {"type": "string"},
                                    {"type": "object", "properties": {"n": {"type": "integer"}}},
                                ]
                            },
                        },
                    ]
                }
            },
            "required": [],
        },
        is_lenient=True,
    )
    assert [json.loads(bytes(each))["value"] for each in found] == [
        [5, {"n": "1"}],
        ["5", {"n": 1}],
    ]


async def test_lenient_fingerprint_counts_the_value_that_was_understood() -> None:
    """One command: a retry in another spelling has the same key and replays."""
    app = App("shop", ledger="memory:", arguments="lenient")
    paid: list[int] = []

    @app.command
    def charge(cents: int) -> int:
        paid.append(cents)
        return cents

    async with connect(app, protocol="mcp") as client:
        for cents in ("500", 500, 500.0, "500.0"):
            called = await client.call_tool("charge", {"cents": cents}, key="k-1")
            assert called.text == "500"
        with pytest.raises(KeyConflict):
            await client.call_tool("charge", {"cents": "501"}, key="k-1")
    assert paid == [500]


async def test_lenient_is_decided_by_the_tool() -> None:
    app = App("shop", ledger="memory:", arguments="lenient")

    @app.query(arguments="strict")
    def exact(n: int) -> int:
        return n

    @app.query(expose=("rpc",))
    def only_rpc(n: int) -> int:
        return n

    assert await told(app, "exact", {"n": "5"}) == "arguments.n: expected int, got str"
    plain = App("shop", ledger="memory:")

    @plain.tool(arguments="lenient")
    def loose(n: int) -> int:
        return n

    assert await told(plain, "loose", {"n": "5"}) == "5"


async def test_lenient_does_not_apply_to_json_rpc() -> None:
    reply = error(await shop().handle(call("count", {"n": "5"})))
    assert reply["data"]["reason"] == "params.n: expected int, got str"


async def test_lenient_tool_with_middleware_runs_once() -> None:
    seen: list[str] = []
    app = shop(middleware=[])

    @app.middleware
    async def watch(context: Context, next: Any) -> Any:
        seen.append(context.method)
        return await next(context)

    assert await told(app, "count", {"n": "5"}) == "5"
    assert await told(app, "slow", {"n": "5"}) == "5"
    assert seen == ["count", "slow"]


async def test_lenient_tool_that_refuses_its_arguments_itself_runs_once() -> None:
    ran: list[str] = []
    app = App("shop", ledger="memory:", arguments="lenient")

    @app.query
    def picky(text: str) -> None:
        ran.append(text)
        raise InvalidParams("no such text")

    assert "no such text" in await told(app, "picky", {"text": "5"})
    assert ran == ["5"]


def test_lenient_scopes_are_those_of_the_meaning() -> None:
    """A call that is understood must not run without the scopes of its arguments."""
    app = App("shop", ledger="memory:", arguments="lenient")

    def scopes(n: int) -> str:
        return f"level:{n}"

    @app.query(scopes=scopes)
    def level(n: int) -> int:
        return n

    found = app.registry.tools["level"].scopes
    assert found is not None
    assert found.of(Raw(b'{"n":"5"}')) == ("level:5",)
    assert found.of(Raw(b'{"n":"x"}')) == ()


async def test_lenient_app_whose_arguments_fit_searches_no_readings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("no reading is needed")

    monkeypatch.setattr(readings, "of_params", refuse)
    monkeypatch.setattr(readings, "of_value", refuse)
    app = shop()
    assert await told(app, "count", {"n": 5}) == "5"
    assert await told(app, "slow", {"n": 5}) == "5"
    assert await told(app, "invite", {"guest": {"name": "Ada", "age": 36}}) == "Ada 36 1"


def test_lenient_search_is_bounded() -> None:
    """Each level of a type may double the readings of a value."""
    either: dict[str, Any] = {"type": "array", "items": {"$ref": "#/$defs/Tree"}}
    schema = {
        "properties": {"tree": {"$ref": "#/$defs/Tree"}},
        "required": ["tree"],
        "$defs": {"Tree": {"anyOf": [either, either, either, {"type": "integer"}]}},
    }
    deep = Raw(b"[" * 40 + b'"x"' + b"]" * 40)
    assert readings.of_params({"tree": deep}, schema, is_lenient=True) == []


@pytest.mark.parametrize("params", [{"n": 5.0}, [5.0]])
async def test_integer_with_a_fraction_of_zero_is_an_int(params: Any) -> None:
    """JSON Schema: 5.0 is an integer. Params by name and by position, msgspec and pydantic."""
    app = App("shop", ledger="memory:")

    @app.query
    def plain(n: int) -> int:
        return n

    @app.query
    def modelled(n: Annotated[int, pydantic.Field(ge=1)]) -> int:
        return n

    @app.query
    def named(n: int, *, more: int = 0, ctx: Context) -> int:
        return n + more

    @app.query
    def several(*n: int) -> int:
        return sum(n)

    for name in ("plain", "modelled", "named"):
        assert result(await app.handle(call(name, params))) == 5
    if isinstance(params, list):
        assert result(await app.handle(call("several", params))) == 5


async def test_integer_with_a_fraction_of_zero_is_a_literal_and_a_member_of_an_enum() -> None:
    app = App("shop", ledger="memory:")

    @app.query
    def picked(mixed: Literal[1, "many"], only: Literal[1, 2], level: Level) -> list[Any]:
        return [mixed, only, level]

    async with testing.client(app) as client:
        params = {"mixed": 1.0, "only": 2.0, "level": 3.0}
        assert await client.call("picked", params) == [1, 2, 3]


async def test_integer_with_digits_behind_the_point_is_refused() -> None:
    reply = error(await shop("strict").handle(call("count", {"n": 5.5})))
    assert reply["data"]["reason"] == "params.n: expected int, got float"
    # A float could not hold it, and it has no fraction.
    long = b'{"jsonrpc":"2.0","method":"count","params":{"n":9007199254740993.0},"id":1}'
    assert result(await shop("strict").handle(long)) == 9007199254740993


def test_lenient_word_is_checked() -> None:
    with pytest.raises(UsageError, match='use arguments="strict"'):
        App("shop", arguments="loose")  # type: ignore[arg-type]
    app = App("shop", ledger="memory:")
    with pytest.raises(UsageError, match="arguments must be one of strict, lenient"):
        app.query(arguments="loose")(lambda: None)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="is for MCP tools"):

        @app.query(expose=("rpc",), arguments="lenient")
        def only_rpc(n: int) -> int:
            return n


def test_lenient_task_gets_the_meaning() -> None:
    app = App("shop", ledger="memory:", arguments="lenient")

    @app.command(task=True)
    async def pack(n: int) -> int:
        return n

    async def run() -> object:
        async with connect(app, protocol="mcp") as client:
            return (await client.call_tool("pack", {"n": "5"})).text

    assert asyncio.run(run()) == "5"
