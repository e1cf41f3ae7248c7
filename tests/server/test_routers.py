"""Routers: the parts of an app, declared apart and included; and methods that are removed."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tests.calls import batch, call, error, make_app, read, result
from wirecall import App, Context, Router, UsageError, connect
from wirecall.protocol.params import place_of
from wirecall.routing import Declarations

PATIENCE = 60.0

METHODS = {
    name
    for name, value in vars(Declarations).items()
    if inspect.isfunction(value) and not name.startswith("_")
}
DECORATORS = METHODS - {"include", "catalog"}


class Db:
    name = "db"


def orders() -> Router:
    router = Router(prefix="orders.")

    @router.provide
    def db() -> Db:
        return Db()

    @router.query
    def count(db: Db) -> str:
        """Count the orders."""
        return db.name

    @router.command(name="place", key="required")
    async def put(sku: str) -> str:
        return sku

    @router.tool(title="A tool")
    def pack() -> str:
        return "packed"

    @router.resource("orders://{id}")
    def order(id: str) -> str:
        return f"order {id}"

    @router.prompt
    def greet(name: str) -> str:
        return f"greet {name}"

    @router.completion("greet", "name")
    def names(typed: str) -> list[str]:
        return [f"{typed}da"]

    return router


async def test_app_serves_everything_of_a_router_under_its_prefix() -> None:
    app = make_app()
    app.include(orders())
    assert result(await app.handle(call("orders.count"))) == "db"
    assert result(await app.handle(call("orders.place", {"sku": "tea"}, key="k"))) == "tea"
    assert (
        error(await app.handle(call("orders.place", {"sku": "tea"})))["data"]["type"]
        == "idempotency_key_required"
    )
    assert error(await app.handle(call("count")))["code"] == -32601
    async with connect(app, protocol="mcp") as client:
        tools = {tool.name: tool for tool in await client.list_tools()}
        assert set(tools) == {"orders_count", "orders_place", "orders_pack"}
        assert (tools["orders_count"].description, tools["orders_pack"].title) == (
            "Count the orders.",
            "A tool",
        )
        assert (await client.call_tool("orders.pack")).text == "packed"
        assert "order 7" in str(await client.read_resource("orders://7"))
        assert "greet ada" in str(await client.get_prompt("orders.greet", {"name": "ada"}))


async def test_prefixes_of_routers_in_routers_are_put_together() -> None:
    inner = Router(prefix="items.")
    outer = Router(prefix="shop.")
    app = make_app()
    inner.query(name="price")(lambda: 450)
    outer.include(inner, prefix="v1.")
    app.include(outer, prefix="eu.")
    app.include(outer)  # twice, under two prefixes
    assert result(await app.handle(call("eu.shop.v1.items.price"))) == 450
    assert result(await app.handle(call("shop.v1.items.price"))) == 450


def first() -> int:
    return 1


def second() -> int:
    return 2


def test_names_that_collide_are_an_error_with_both_places() -> None:
    app = make_app()
    router = Router(prefix="a.")
    app.query(name="a.one")(first)
    router.query(name="one")(second)
    with pytest.raises(UsageError) as collision:
        app.include(router)
    assert all(f"{place_of(each)}" in str(collision.value) for each in (first, second))
    assert f"{__file__}:{first.__code__.co_firstlineno}" in str(collision.value)


def test_prompts_and_resources_that_collide_name_both_places() -> None:
    app = make_app()
    app.resource("shop://tea")(first)
    app.prompt(name="ask")(first)
    for declare in (app.resource("shop://tea"), app.prompt(name="ask")):
        with pytest.raises(UsageError) as collision:
            declare(second)
        assert place_of(first) in str(collision.value)
        assert place_of(second) in str(collision.value)


def test_router_cannot_include_itself() -> None:
    a = Router()
    b = Router()
    c = Router()
    with pytest.raises(UsageError, match="cannot include itself"):
        a.include(a)
    a.include(b)
    b.include(c)
    with pytest.raises(UsageError, match="cannot include itself"):
        c.include(a)


def test_declaration_after_the_include_would_be_lost_and_is_refused() -> None:
    inner = Router()
    outer = Router()
    outer.include(inner)
    make_app().include(outer)
    for router in (inner, outer):
        with pytest.raises(UsageError, match="included already"):
            router.query(first)


def test_mistakes_in_a_declaration_are_found_at_the_include() -> None:
    router = Router(prefix="rpc.")
    router.query(first)
    with pytest.raises(UsageError, match="belong to the protocol"):
        make_app().include(router)


def test_tags_and_scopes_are_added_to_those_of_each_declaration() -> None:
    seen: dict[str, Any] = {}

    class Recording(App):
        def __getattribute__(self, name: str) -> Any:
            if name not in DECORATORS:
                return super().__getattribute__(name)

            def decorate(*_: object, **options: Any) -> Callable[[Any], Any]:
                return lambda function: seen.setdefault(f"{name} {function.__name__}", options)

            return decorate

    router = orders()
    outer = Router()
    own: dict[str, Any] = {"scopes": ["own"]}
    router.query(name="late", **own)(first)
    outer.include(router, scopes=["inner"])
    Recording("x").include(outer, tags=["eu"], scopes=["outer"])
    assert seen["query count"] == {
        "name": "orders.count",
        "tags": ["eu"],
        "scopes": ["outer", "inner"],
    }
    assert seen["query first"] == {
        "name": "orders.late",
        "tags": ["eu"],
        "scopes": ["outer", "inner", "own"],
    }
    assert seen["resource order"] == {"tags": ["eu"], "scopes": ["outer", "inner"]}
    assert seen["provide db"] == seen["completion names"] == {}
    seen.clear()
    Recording("x").include(orders())
    assert seen["query count"] == {"name": "orders.count"}
    assert seen["resource order"] == {}


def test_router_has_every_decorator_of_an_app() -> None:
    assert vars(Router).keys() >= DECORATORS


# --- removing -------------------------------------------------------------------------------------


async def test_removed_method_is_gone_and_its_calls_in_flight_continue() -> None:
    app = make_app()
    begun = asyncio.Event()
    go = asyncio.Event()

    @app.query
    async def slow() -> str:
        begun.set()
        await go.wait()
        return "done"

    @app.query
    async def leave() -> str:
        app.remove("leave")
        await asyncio.sleep(0)
        return "left"

    async with asyncio.timeout(PATIENCE):
        answering = asyncio.create_task(app.handle(call("slow")))
        await begun.wait()
        app.remove("slow")
        assert error(await app.handle(call("slow")))["code"] == -32601
        go.set()
        assert result(await answering) == "done"
        told = read(await app.handle(batch(call("leave", id=1), call("leave", id=2))))
        assert told[0]["result"] == "left"
        assert told[1]["error"]["code"] == -32601
    app.query(name="slow")(first)
    assert result(await app.handle(call("slow"))) == 1


@pytest.mark.parametrize("revision", ["2025-11-25", "2026-07-28"])
async def test_removed_tool_is_announced_to_mcp_clients(revision: str) -> None:
    app = make_app()
    heard = asyncio.Event()
    app.query(name="one")(first)
    app.tool(name="two")(second)
    async with (
        asyncio.timeout(PATIENCE),
        connect(app, protocol="mcp", revision=revision) as client,
        client.listen(tools=True) as changes,
    ):
        assert {tool.name for tool in await client.list_tools()} == {"one", "two"}
        app.remove("two")
        async for _ in changes:
            heard.set()
            break
        assert {tool.name for tool in await client.list_tools()} == {"one"}
    assert heard.is_set()


def test_remove_refuses_unknown_and_reserved_names() -> None:
    app = make_app()
    app.query(name="one")(first)
    with pytest.raises(UsageError, match=r"There is no method 'two'[\s\S]*one"):
        app.remove("two")
    with pytest.raises(UsageError, match="belongs to the protocol"):
        app.remove("rpc.discover")


def context_of(ctx: Context) -> str:
    return ctx.method


async def test_context_has_the_full_name() -> None:
    app = make_app()
    router = Router(prefix="a.")
    router.query(name="b")(context_of)
    app.include(router)
    assert result(await app.handle(call("a.b"))) == "a.b"
