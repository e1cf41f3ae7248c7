"""A result is true to the declared type of its function."""

import dataclasses
import datetime
import enum
import json
import logging
from typing import Annotated, Any, Literal, TypedDict, cast

import msgspec
import pydantic
import pytest
from msgspec import Raw
from pydantic import BaseModel, Field

from tests.calls import call, error, make_app, result
from wirecall import App, Done, UsageError, connect
from wirecall.mcp.types import Text, ToolResult
from wirecall.protocol.messages import Sound


class Price(BaseModel):
    cents: int = Field(serialization_alias="priceInCents")


class Receipt(msgspec.Struct):
    number: int
    lines: list[str] = []


class Basket(msgspec.Struct):
    price: Price


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Item(TypedDict):
    sku: str


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


def changed_price() -> Price:
    price = Price(cents=1)
    vars(price)["cents"] = "1"
    return price


def app_returning(
    declared: Any, value: Any, mode: Literal["development", "production"], **declaration: Any
) -> App:
    app = App("test", mode=mode, ledger="memory:")

    def f() -> Any:
        return value

    f.__annotations__["return"] = declared
    app.query(**declaration)(f)
    return app


def reason(app: App) -> str:
    reply = json.loads(app.handle_sync(call("f")) or b"")
    assert reply["error"]["code"] == -32603
    return str(reply["error"]["data"]["reason"])


MISFITS = [
    (int, "5", "f must return int: result: expected int, got str"),
    (None, 5, "f must return None: result: expected null, got int"),
    (
        Receipt,
        {"number": "x", "lines": [1]},
        "f must return Receipt: result.number: expected int, got str; result.lines[0]: expected str, got int",
    ),
    (Receipt, {}, "f must return Receipt: result.number: missing"),
    (Point, Point(cast(int, "1")), "f must return Point: result.x: expected int, got str"),
    (Item, {"sku": 5}, "f must return Item: result.sku: expected str, got int"),
    (
        list[Receipt],
        [Receipt(cast(int, "x"))],
        "f must return list[tests.server.test_results.Receipt]: result[0].number: expected int, got str",
    ),
    (
        Colour,
        "green",
        "f must return Colour: result: invalid enum value 'green', expected one of red, blue",
    ),
    (Annotated[int, msgspec.Meta(gt=0)], 0, "f must return int: result: expected int >= 1"),
    (Annotated[int, Field(gt=0)], 0, "f must return int: result: expected a value greater than 0"),
    (Price, {"cents": 1}, "f must return Price: result: expected Price, got dict"),
    (Price, changed_price(), "f must return Price: result.cents: expected int, got str"),
    (
        list[Price],
        [5],
        "f must return list[tests.server.test_results.Price]: "
        "result[0]: expected a valid dictionary or instance of Price, got int",
    ),
]
FITS = [
    (int, 5, 5),
    (float, 5, 5),
    (None, None, None),
    (Receipt, Receipt(1), {"number": 1, "lines": []}),
    (Receipt, {"number": 1}, {"number": 1}),
    (Point, Point(1), {"x": 1, "y": 0}),
    (list[int], (1, 2), [1, 2]),
    (set[int], {1}, [1]),
    (dict[int, str], {1: "x"}, {"1": "x"}),
    (Colour, Colour.RED, "red"),
    (datetime.date, datetime.date(2026, 7, 28), "2026-07-28"),
    (Receipt | None, None, None),
    (Price, Price(cents=1), {"priceInCents": 1}),
    (Basket, Basket(Price(cents=1)), {"price": {"priceInCents": 1}}),
]


@pytest.mark.parametrize(("declared", "value", "expected"), MISFITS)
def test_development_refuses_a_result_of_another_type(
    declared: Any, value: Any, expected: str
) -> None:
    assert reason(app_returning(declared, value, "development")) == expected
    assert reason(app_returning(declared, value, "production", check_result=True)) == expected


@pytest.mark.parametrize(("declared", "value", "expected"), MISFITS)
def test_production_sends_what_the_function_returns(
    declared: Any, value: Any, expected: str
) -> None:
    for app in (
        app_returning(declared, value, "production"),
        app_returning(declared, value, "development", check_result=False),
    ):
        assert "result" in json.loads(app.handle_sync(call("f")) or b"")


@pytest.mark.parametrize(("declared", "value", "expected"), FITS)
def test_result_of_its_type_is_sent(declared: Any, value: Any, expected: Any) -> None:
    assert result(app_returning(declared, value, "development").handle_sync(call("f"))) == expected


async def test_result_of_a_verdict_is_written_like_that_of_the_function() -> None:
    app = App("test", ledger="memory:")

    @app.command(on_crash="reconcile", reconcile=lambda: Done(Price(cents=1)))
    async def pay() -> Price:
        return Price(cents=1)

    told = result(await app.handle(call("pay", {}, key="k")))
    assert app.registry.methods["pay"].written(Price(cents=1)) == told == {"priceInCents": 1}
    await app.aclose()


def test_raw_json_inside_of_a_result_does_not_break_the_line() -> None:
    """A message over stdio is one line, and so is an event of a stream."""
    app = App("test")

    @app.query
    def found(text: str) -> Any:
        return {"found": [msgspec.Raw(text.encode())]}

    for text in ('{\n  "a": 1\n}', '{\r\n"a": 1}', '{"a":\r1}'):
        answer = app.handle_sync(call("found", {"text": text}))
        assert answer == b'{"jsonrpc":"2.0","result":{"found":[{"a":1}]},"id":1}'
    assert error(app.handle_sync(call("found", {"text": "{\n"}))) == {
        "code": -32603,
        "message": "Internal error",
    }


def test_check_result_is_a_bool() -> None:
    with pytest.raises(UsageError, match="check_result must be True or False, got 'yes'"):
        app_returning(int, 5, "production", check_result="yes")


async def test_command_whose_result_cannot_be_written_has_run() -> None:
    class Odd(BaseModel):
        @pydantic.computed_field  # type: ignore[prop-decorator]
        @property
        def broken(self) -> int:
            raise RuntimeError("secret")

    app = App("test", mode="development", ledger="memory:")
    runs = []

    async def pay() -> Any:
        runs.append(1)
        return Odd()

    pay.__annotations__["return"] = Odd
    app.command(pay)
    first = json.loads(await app.handle(call("pay", {}, key="k")) or b"")
    assert first["error"] == {"code": -32603, "message": "Internal error", "data": {"ran": "yes"}}
    again = json.loads(await app.handle(call("pay", {}, key="k")) or b"")
    assert again["error"]["data"]["type"] == "result_not_retained"
    assert runs == [1]
    await app.aclose()


async def test_command_with_a_wrong_result_has_run(caplog: pytest.LogCaptureFixture) -> None:
    app = App("test", mode="development", ledger="memory:")
    runs = []

    @app.command
    async def pay(cents: int) -> int:
        runs.append(cents)
        return cast(int, "paid")

    with caplog.at_level(logging.ERROR):
        first = json.loads(await app.handle(call("pay", {"cents": 5}, key="k")) or b"")
    assert first["error"]["code"] == -32603 and first["error"]["data"]["ran"] == "yes"
    assert "pay must return int: result: expected int, got str" in caplog.text
    again = json.loads(await app.handle(call("pay", {"cents": 5}, key="k")) or b"")
    assert again["error"]["data"]["type"] == "result_not_retained"
    assert runs == [5]
    await app.aclose()


async def test_tool_reports_a_wrong_result_and_may_always_return_content() -> None:
    app = App("test", mode="development", ledger="memory:")

    @app.query
    def wrong() -> Receipt:
        return cast(Receipt, Point(1))

    @app.query
    def content() -> Receipt:
        return cast(Receipt, [Text(text="hello")])

    @app.query
    def whole() -> Price:
        return cast(Price, ToolResult(content=["hello"]))

    async with connect(app, protocol="mcp") as client:
        assert (await client.call_tool("wrong", check=False)).is_error
        assert (
            (await client.call_tool("content")).text
            == (await client.call_tool("whole")).text
            == "hello"
        )


def test_value_that_pydantic_cannot_write_is_a_failure_of_the_function() -> None:
    class Odd(BaseModel):
        @pydantic.computed_field  # type: ignore[prop-decorator]
        @property
        def broken(self) -> int:
            raise RuntimeError("secret")

    modes: list[Literal["development", "production"]] = ["development", "production"]
    for mode in modes:
        reply = json.loads(app_returning(Odd, Odd(), mode).handle_sync(call("f")) or b"")
        assert reply["error"] == {"code": -32603, "message": "Internal error"}


async def test_raw_result_keeps_its_bytes() -> None:
    """JSON that a handler passes on is written as it came: digits, order and spaces stay."""
    app = make_app()
    text = b'{"b":0.10, "a":1e2, "t":"\\u00e9", "n":null}'

    @app.query
    def whole() -> Any:
        return Raw(text)

    @app.query
    def sound() -> Any:
        return Sound(text)

    @app.query
    def part() -> Any:
        return {"inner": Sound(text)}

    for name, expected in (("whole", text), ("sound", text), ("part", b'{"inner":%b}' % text)):
        reply = await app.handle(call(name))
        assert reply is not None
        assert b'"result":%b' % expected in reply


async def test_raw_result_on_two_lines_is_written_on_one() -> None:
    """A message on stdio is one line."""
    app = make_app()

    @app.query
    def lines() -> Any:
        return Raw(b'{"a":\n1}')

    reply = await app.handle(call("lines"))
    assert reply is not None and b"\n" not in reply
    assert result(reply) == {"a": 1}
