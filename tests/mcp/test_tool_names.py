"""The names of tools: model APIs take A-Z, a-z, 0-9, _ and - only, and JSON-RPC's names stay as
they are.
"""

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import pytest

from tests.calls import call, error, make_app, result
from tests.cli import invoke
from tests.mcp.asgi import EVERY_WAY, KEY, R5, REPLAYED, over_http, speak
from wirecall import App, Header, Router, UsageError, connect
from wirecall.contract.changes import changes
from wirecall.contract.lock import of_app

PATIENCE = 60


def shop(**options: Any) -> tuple[App, list[str]]:
    """An app with a router, as in README, and the orders that its command has placed."""
    app = make_app(**options)
    placed = list[str]()
    router = Router(prefix="orders.")

    @router.query
    def count() -> int:
        return len(placed)

    @router.command
    async def place(sku: str) -> int:
        placed.append(sku)
        return len(placed)

    app.include(router, prefix="v1.")
    return app, placed


@pytest.mark.parametrize(("transport", "revision"), EVERY_WAY)
async def test_tool_is_listed_without_dots_and_called_by_both_names(
    transport: str, revision: str
) -> None:
    app, placed = shop()
    async with asyncio.timeout(PATIENCE), speak(transport, app, revision) as client:
        listed = (await client.result("tools/list"))["tools"]
        assert [tool["name"] for tool in listed] == ["v1_orders_count", "v1_orders_place"]
        for name in ("v1_orders_place", "v1.orders.place"):
            assert not (await client.tool(name, {"sku": "tea"})).get("isError")
        assert (await client.tool("v1.orders.count"))["content"][0]["text"] == "2"
    assert placed == ["tea", "tea"]
    assert result(await app.handle(call("v1.orders.count"))) == 2
    assert error(await app.handle(call("v1_orders_count")))["code"] == -32601


@pytest.mark.parametrize(("transport", "revision"), EVERY_WAY)
async def test_command_called_by_both_names_with_one_key_runs_once(
    transport: str, revision: str, tmp_path: Path
) -> None:
    app, placed = shop(ledger=f"sqlite:{tmp_path}/ledger.db", audit=f"file:{tmp_path}/audit.jsonl")
    async with asyncio.timeout(PATIENCE), app, speak(transport, app, revision) as client:
        first = await client.tool("v1_orders_place", {"sku": "tea"}, meta={KEY: "k"})
        second = await client.tool("v1.orders.place", {"sku": "tea"}, meta={KEY: "k"})
        assert second["content"] == first["content"]
        assert second["_meta"][REPLAYED] is True
        records = [record.id.method for record in await (await app.ledger()).list()]
    assert placed == ["tea"]
    assert records == ["tools/call:v1.orders.place"]
    entries = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert {entry["method"] for entry in entries} == {"tools/call:v1.orders.place"}


async def test_mcp_name_header_repeats_the_name_in_the_body() -> None:
    app, _ = shop()
    async with asyncio.timeout(PATIENCE), over_http(app, R5) as client:
        for name in ("v1_orders_count", "v1.orders.count"):
            assert (await client.call("tools/call", {"name": name}))["result"]
        other = {"mcp-name": "v1_orders_count"}
        refused = await client.error("tools/call", {"name": "v1.orders.count"}, headers=other)
        assert refused["code"] == -32020


@pytest.mark.parametrize("trust", [True, False])
async def test_client_repeats_marked_arguments_for_both_names(trust: bool) -> None:
    from tests.client.peers import served

    app = make_app()

    @app.query(name="stock.count")
    def count(region: Annotated[str, Header("Region")]) -> str:
        return region

    async with (
        asyncio.timeout(PATIENCE),
        served(app) as url,
        connect(f"{url}/mcp", protocol="mcp", trust=trust) as client,
    ):
        for name in ("stock_count", "stock.count"):
            assert (await client.call_tool(name, {"region": "eu"})).text == "eu"


async def test_tool_name_states_the_mcp_name() -> None:
    app = make_app()
    app.query(name="orders.count", tool_name="count_orders")(lambda: 1)
    app.command(name="orders.place", tool_name="place-order")(lambda: 2)
    app.tool(name="orders.pack", tool_name="pack.order")(lambda: "3")
    router = Router(prefix="v2.")
    router.query(name="stock", tool_name="stock_now")(lambda: 4)
    app.include(router)
    async with asyncio.timeout(PATIENCE), connect(app, protocol="mcp") as client:
        assert [tool.name for tool in await client.list_tools()] == [
            "count_orders",
            "place-order",
            "pack.order",
            "stock_now",
        ]
        for name in ("orders.count", "count_orders"):
            assert (await client.call_tool(name)).text == "1"
        for name in ("v2.stock", "stock_now"):
            assert (await client.call_tool(name)).text == "4"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"name": "a.b"}, {"name": "a_b"}),
        ({"name": "a.b"}, {"name": "a/b"}),
        ({"name": "a", "tool_name": "x"}, {"name": "b", "tool_name": "x"}),
        ({"name": "a", "tool_name": "b"}, {"name": "b", "tool_name": "c"}),
        ({"name": "a", "tool_name": "c"}, {"name": "b", "tool_name": "a"}),
    ],
)
def test_tools_of_the_same_name_are_refused_at_registration(first: Any, second: Any) -> None:
    app = make_app()
    app.query(**first)(lambda: 1)
    with pytest.raises(UsageError) as refused:
        app.query(**second)(lambda: 2)
    text = str(refused.value)
    assert repr(first["name"]) in text
    assert repr(second["name"]) in text
    assert "tool_name=" in text
    # The refused tool is not half registered, and a name that MCP does not see cannot collide.
    assert app.handle_sync(call(second["name"])) is not None
    assert "-32601" in str(app.handle_sync(call(second["name"])))
    app.query(name=second["name"], expose=("rpc",))(lambda: 2)


@pytest.mark.parametrize("revision", ["2025-11-25", R5])
async def test_removed_tool_is_gone_by_both_names_and_its_name_is_free(revision: str) -> None:
    app, _ = shop()
    async with (
        asyncio.timeout(PATIENCE),
        connect(app, protocol="mcp", revision=revision) as client,
        client.listen(tools=True) as told,
    ):
        assert len(await client.list_tools()) == 2
        app.remove("v1.orders.count")
        async for _ in told:
            break
        assert [tool.name for tool in await client.list_tools()] == ["v1_orders_place"]
        for name in ("v1.orders.count", "v1_orders_count"):
            with pytest.raises(Exception, match="there is no tool"):
                await client.call_tool(name)
        app.query(name="v1_orders_count")(lambda: 5)
        assert (await client.call_tool("v1_orders_count")).text == "5"


async def test_task_of_a_tool_is_started_by_both_names() -> None:
    from tests.mcp.task_talk import DECLARED, OVER, until

    app = make_app()

    @app.command(name="orders.pack", task=True)
    async def pack() -> str:
        return "packed"

    async with (
        asyncio.timeout(PATIENCE),
        app,
        speak("http", app, R5, capabilities=DECLARED) as client,
    ):
        tasks = []
        for name in ("orders_pack", "orders.pack"):
            started = await client.tool(name, {}, meta={KEY: "k"})
            tasks.append(started["taskId"])
            ended = await until(client, started, *OVER)
            assert ended["result"]["content"][0]["text"] == "packed"
        assert tasks[0] == tasks[1]


def test_cli_lists_shows_and_calls_by_both_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = 'from wirecall import App\napp = App("shop")\n'
    source += '@app.query(name="orders.count")\ndef count() -> int:\n    return 3\n'
    Path("shop.py").write_text(source)
    listed = json.loads(invoke("list", "shop.py", "--as", "mcp", "--json").output)["result"]
    assert [each["name"] for each in listed] == ["orders_count"]
    both = json.loads(invoke("list", "shop.py", "--json").output)["result"]
    assert [(each["name"], each["tool_name"]) for each in both] == [
        ("orders.count", "orders_count")
    ]
    for name in ("orders.count", "orders_count"):
        assert "MCP name: orders_count" in invoke("show", "shop.py", name).output
        assert json.loads(invoke("call", "shop.py", name, "--json").output)["result"] == 3
        assert (
            json.loads(invoke("call", "shop.py", name, "--as", "mcp", "--json").output)["result"]
            == 3
        )


def test_contract_has_the_mcp_name_and_a_renamed_tool_is_not_gone() -> None:
    old, _ = shop()
    dotted = make_app()
    for name, method in old.registry.tools.items():
        verb = dotted.command if method.is_command else dotted.query
        verb(name=name, tool_name=name)(method.function)
    assert set(of_app(old).tools or {}) == {"v1_orders_count", "v1_orders_place"}
    assert set(of_app(old).methods or {}) == {"v1.orders.count", "v1.orders.place"}
    found = changes(of_app(dotted), of_app(old))
    assert {(each.level, each.place) for each in found} == {
        ("careful", "tool v1.orders.count"),
        ("careful", "tool v1.orders.place"),
    }
