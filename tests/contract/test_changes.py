"""What breaks callers: two versions of an app, and the levels of their differences."""

import asyncio
from collections.abc import Callable
from typing import Any, Literal
from unittest.mock import AsyncMock

import msgspec
import pytest

from wirecall import App, connect
from wirecall.contract.changes import changes
from wirecall.contract.lock import Contract, of_app, of_client, sealed
from wirecall.testing import assert_contract

Declare = Callable[[App], object]


def app(declare: Declare) -> App:
    made = App("a")
    declare(made)
    return made


def found(old: Declare, new: Declare) -> set[tuple[str, str, str]]:
    """The changes of the methods."""
    both = [
        msgspec.structs.replace(of_app(app(each)), tools=None, resources=None, templates=None)
        for each in (old, new)
    ]
    return {(change.level, change.place, change.text) for change in changes(*both)}


def query(function: Callable[..., Any], **options: Any) -> Declare:
    function.__name__ = "f"
    return lambda app: app.query(**options)(function)


def command(function: Callable[..., Any], **options: Any) -> Declare:
    function.__name__ = "f"
    return lambda app: app.command(**options)(function)


def plain() -> int:
    return 1


def one(a: int) -> int:
    return a


def two(a: int, b: int) -> int:
    return a + b


def swapped(b: int, a: int) -> int:
    return a + b


def optional(a: int, b: int = 2) -> int:
    return a + b


def default(a: int, b: int = 3) -> int:
    return a + b


def text(a: str) -> int:
    return len(a)


def wider(a: int | str) -> int | str:
    return a


def few(a: Literal["x"]) -> int:
    return len(a)


def many(a: Literal["x", "y"]) -> int:
    return len(a)


class Point(msgspec.Struct):
    x: int


class Space(msgspec.Struct):
    x: int
    y: int


class Maybe(msgspec.Struct):
    x: int = 0


def flat() -> Point:
    return Point(1)


def deep() -> Space:
    return Space(1, 2)


def loose() -> Maybe:
    return Maybe()


@pytest.mark.parametrize(
    ("old", "new", "level", "place", "text"),
    [
        (query(one), lambda app: None, "breaking", "method f", "is gone"),
        (query(one), query(two), "breaking", "method f, argument b", "is required now"),
        (query(two), query(one), "breaking", "method f, argument b", "is no longer accepted"),
        (query(one), query(text), "breaking", "method f, argument a", "no longer accepts integer"),
        (query(wider), query(one), "breaking", "method f, argument a", "no longer accepts string"),
        (query(many), query(few), "breaking", "method f, argument a", 'no longer accepts "y"'),
        (query(one), query(wider), "breaking", "method f, result", "may be string now"),
        (query(flat), query(loose), "breaking", "method f, result x", "may be missing now"),
        (
            query(one),
            command(one, destructive=False),
            "breaking",
            "method f",
            "may change data now",
        ),
        (
            command(one, destructive=False),
            command(one),
            "breaking",
            "method f",
            "may destroy data now",
        ),
        (
            command(one, idempotent=True),
            command(one),
            "breaking",
            "method f",
            "can no longer be repeated",
        ),
        (
            command(one),
            command(one, key="ask"),
            "breaking",
            "method f",
            "an idempotency key is required now",
        ),
        (
            command(one),
            query(one),
            "breaking",
            "method f",
            "an idempotency key is no longer accepted",
        ),
        (
            query(two),
            query(swapped),
            "breaking",
            "method f",
            "the order of its params was a, b and is b, a",
        ),
        (
            query(one, open_world=False),
            query(one),
            "careful",
            "method f",
            "reaches beyond the server now",
        ),
        (
            query(optional),
            query(default),
            "careful",
            "method f, argument b",
            "its default was 2 and is 3",
        ),
        (query(one), query(one, title="T"), "careful", "methods/f/summary", "the text changed"),
        (lambda app: None, query(one), "fine", "method f", "is new"),
        (query(one), query(optional), "fine", "method f, argument b", "is new, and optional"),
        (query(two), query(optional), "fine", "method f, argument b", "is optional now"),
        (query(few), query(many), "fine", "method f, argument a", 'also accepts "y"'),
        (query(flat), query(deep), "fine", "method f, result y", "is new"),
        (query(loose), query(flat), "fine", "method f, result x", "is always present now"),
        (
            command(one, key="ask"),
            command(one),
            "fine",
            "method f",
            "an idempotency key is optional now",
        ),
        (
            command(one),
            command(one, destructive=False),
            "fine",
            "method f",
            "no longer destroys data",
        ),
    ],
)
def test_change_has_a_level(old: Declare, new: Declare, level: str, place: str, text: str) -> None:
    told = found(old, new)
    assert (level, place, text) in told
    if level != "breaking":
        assert not [change for change in told if change[0] == "breaking"]
    assert found(old, old) == found(new, new) == set()


def test_error_code_that_means_something_else_breaks_callers() -> None:
    contract = of_app(app(query(one)))
    assert contract.methods is not None

    def stating(errors: dict[str, str]) -> Contract:
        methods = (
            {"f": msgspec.structs.replace(contract.methods["f"], errors=errors)}
            if contract.methods
            else {}
        )
        return msgspec.structs.replace(contract, methods=methods)

    before = stating({"1": "no money", "2": "gone"})
    after = stating({"1": "no stock", "3": "late"})
    assert [(change.level, change.text) for change in changes(before, after)] == [
        ("breaking", 'error 1 meant "no money" and means "no stock"'),
        ("careful", "error 3 is new"),
        ("fine", "error 2 is gone"),
    ]


def test_tools_prompts_and_resources_are_part_of_the_contract() -> None:
    def old(app: App) -> None:
        app.tool(name="text")(text)
        app.prompt(name="greet")(lambda name: name)
        app.resource("shop://a", mime_type="text/plain")(lambda: "a")

    def new(app: App) -> None:
        app.tool(name="text")(one)
        app.prompt(name="greet")(lambda name, tone: name)
        app.resource("shop://a", mime_type="text/html")(lambda: "a")

    told = {
        (change.level, change.place, change.text)
        for change in changes(of_app(app(old)), of_app(app(new)))
    }
    assert {
        ("breaking", "tool text, argument a", "no longer accepts string"),
        ("breaking", "prompt greet, argument tone", "is required now"),
        ("breaking", "resource shop://a", "its type was text/plain and is text/html"),
    } <= told


def test_client_reads_the_contract_that_the_app_states() -> None:
    def declare(app: App) -> None:
        app.query(name="flat")(flat)
        app.command(name="deep", key="ask")(deep)
        app.prompt(name="greet")(lambda name: name)
        app.resource("shop://a/{b}")(lambda b: b)

    served = app(declare)

    async def read(protocol: Any) -> Contract | None:
        async with connect(served, protocol=protocol) as client:
            return await of_client(client)

    stated = of_app(served)
    rpc = asyncio.run(read("jsonrpc"))
    mcp = asyncio.run(read("mcp"))
    assert rpc is not None
    assert mcp is not None
    assert rpc.methods == stated.methods
    assert (mcp.tools, mcp.prompts, mcp.templates) == (
        stated.tools,
        stated.prompts,
        stated.templates,
    )
    assert (mcp.methods, rpc.tools) == (None, None)
    assert rpc.descriptions | mcp.descriptions == stated.descriptions


async def test_odd_document_of_a_server_is_read() -> None:
    schema = {"$ref": "#/components/schemas/a", "$defs": [1]}
    odd = {
        "name": "f",
        "params": [7, {"name": 7}, {"name": "x", "schema": {}}],
        "errors": 7,
        "x-kind": [],
        "paramStructure": {},
    }
    document = {
        "info": 7,
        "methods": [None, {**odd, "result": {"schema": schema}}],
        "components": {"schemas": {"a": {"type": "null"}}},
    }
    client: Any = AsyncMock(call=AsyncMock(return_value=document))
    read = await of_client(client)
    assert read is not None
    assert read.methods is not None
    assert read.methods["f"].order == ["x"]
    assert read.methods["f"].result == {"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}


def test_digest_covers_the_offers() -> None:
    titled = of_app(app(query(one, title="T")))
    other = of_app(app(query(two)))
    assert of_app(app(query(one))).digest == titled.digest != other.digest
    assert sealed(titled) == titled
    assert titled.canonical() == of_app(app(query(one, title="T"))).canonical()


def test_order_of_declarations_does_not_count() -> None:
    def first(app: App) -> None:
        app.query(name="x")(one)
        app.query(name="y")(two)

    def second(app: App) -> None:
        app.query(name="y")(two)
        app.query(name="x")(one)

    assert of_app(app(first)).canonical() == of_app(app(second)).canonical()


def test_assert_contract(tmp_path: Any) -> None:
    path = tmp_path / "contract.json"
    path.write_bytes(of_app(app(query(one))).canonical())
    assert_contract(app(query(optional)), path)
    with pytest.raises(
        AssertionError,
        match=r"method f, argument b: is required now(?s:.*)fix: keep the old contract, or",
    ):
        assert_contract(app(query(two)), path)
