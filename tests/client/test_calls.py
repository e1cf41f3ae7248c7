"""Calls, notifications and attributes, over HTTP, over a child process and in memory."""

import asyncio
import sys
from typing import Any

import pytest
from msgspec import UNSET, Struct, UnsetType

from tests.client.peers import Peer, answers, http
from tests.client.shops import WAYS, Price, connected, shop
from tests.ports import free_port
from wirecall import App, Context, UsageError, connect, connect_sync
from wirecall.auth import Tokens
from wirecall.client.client import MCP_ONLY, Client
from wirecall.client.sync import SyncClient
from wirecall.errors import BadAnswer, InvalidParams, MethodNotFound, NotSent, RpcError
from wirecall.mcp.client.client import McpClient, SyncMcpClient
from wirecall.testing import client as in_memory


@WAYS
async def test_call_and_its_result(way: str) -> None:
    async with connected(way) as client:
        assert client.revision is None
        assert await client.call("price", {"sku": "tea"}) == {"sku": "tea", "cents": 300}
        assert await client.call("price", ["tea"], type=Price) == Price("tea", 300)
        assert await client.rpc.price(sku="tea") == {"sku": "tea", "cents": 300}
        assert await client.rpc.stock.add(sku="tea", number=3) == 3
        assert await client.rpc.stock.count("tea") == 3
        await client.notify("note", {"text": "hello"})
        assert await client.rpc.stock.count("hello") == 1


@WAYS
async def test_key_makes_two_calls_one_command(way: str) -> None:
    async with connected(way) as client:
        async with client.batch() as batch:
            first = batch.call("stock.add", {"sku": "tea", "number": 3}, key="k-1")
            other = batch.call("stock.add", {"sku": "tea", "number": 3}, key="k-2")
        async with client.batch() as again:
            second = again.call("stock.add", {"sku": "tea", "number": 3}, key="k-1")
        assert (first.result(), other.result(), second.result()) == (3, 6, 3)
        assert not first.replayed
        assert second.replayed or way == "child"  # lines cannot carry the mark of a replay
        assert await client.call("stock.count", ["tea"]) == 6


@WAYS
async def test_error_of_a_server_is_the_exception_of_its_code(way: str) -> None:
    async with connected(way) as client:
        with pytest.raises(MethodNotFound) as caught:
            await client.call("nothing")
        assert caught.value.ran == "no"
        with pytest.raises(InvalidParams):
            await client.call("price", {"sku": 1})
        with pytest.raises(BadAnswer, match="not as expected") as misread:
            await client.call("price", ["tea"], type=int)
        assert misread.value.ran == "yes"


async def test_params_that_cannot_be_sent_fail_before_sending() -> None:
    async with in_memory(shop()) as client:
        with pytest.raises(NotSent, match="cannot be written as JSON"):
            await client.call("price", {"sku": object()})
        with pytest.raises(UsageError, match="params by name"):
            await client.call("stock.add", ["tea", 1], key="k")
        with pytest.raises(UsageError, match="is not a key"):
            await client.call("stock.add", {"sku": "tea", "number": 1}, key="two words")
        with pytest.raises(UsageError, match="by position and by name"):
            client.rpc.price("tea", sku="tea")
        with pytest.raises(UsageError, match="params of type int"):
            await client.call("price", 7)  # type: ignore[call-overload]
        assert await client.call("price", ["tea"], type=Price) == Price("tea", 300)


@pytest.mark.parametrize("key", [None, "k-1", True, False])
async def test_struct_is_sent_in_its_json_form_with_and_without_a_key(
    key: str | bool | None,
) -> None:
    """Its members have their JSON names, its tag is one of them, and UNSET members are omitted."""
    app = App("shop")

    class Order(Struct, rename="camel", tag_field="kind", tag="order"):
        order_id: int
        note: str | UnsetType = UNSET

    @app.command
    def place(kind: str, orderId: int, note: str = "none") -> list[Any]:  # noqa: N803
        return [kind, orderId, note]

    async with connect(app) as client:
        assert await client.call("place", Order(7), key=key) == ["order", 7, "none"]


async def test_struct_that_is_sent_as_an_array_cannot_carry_a_key() -> None:
    class Pair(Struct, array_like=True):
        sku: str
        number: int

    async with connect(shop()) as client:
        assert await client.call("stock.add", Pair("tea", 3)) == 3
        with pytest.raises(UsageError, match="a key needs params by name"):
            await client.call("stock.add", Pair("tea", 3), key="k-1")


async def test_client_that_is_closed_says_so() -> None:
    client = connect(shop())
    with pytest.raises(UsageError, match="not open"):
        await client.call("price", ["tea"])
    async with client:
        pass
    with pytest.raises(NotSent, match="the client is closed"):
        await client.call("price", ["tea"])


async def test_server_that_is_not_reachable() -> None:
    async with connect(f"http://127.0.0.1:{free_port()}/rpc", discover=False) as client:
        with pytest.raises(NotSent, match="cannot be reached") as caught:
            await client.call("price", ["tea"])
        assert caught.value.ran == "no"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("ftp://host/", "is not an address"),
        ("http://host:nine/", "is not an address"),
        ("server.py", r'as a list: \["python", "server.py"\]'),
        ("127.0.0.1:8420", "http://HOST:PORT/rpc"),
        ([], "is not a command line"),
        (5, "nothing to connect to"),
    ],
)
async def test_target_that_is_invalid(target: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        connect(target)


@pytest.mark.parametrize("how", [connect, connect_sync])
def test_options_of_a_wrong_type_are_refused(how: Any) -> None:
    with pytest.raises(UsageError, match=r"'MCP' is not a protocol[\s\S]*protocol=\"mcp\""):
        how(shop(), protocol="MCP")
    with pytest.raises(UsageError, match="retry must be a Retry object, got int"):
        how(shop(), retry=5)


def test_method_of_mcp_on_a_client_of_jsonrpc_names_the_option_that_selects_mcp() -> None:
    with connect_sync(shop()) as client:
        clients: list[Any] = [client, connect(shop())]
        for each in clients:
            with pytest.raises(
                AttributeError,
                match=r"no attribute 'call_tool'; .* use connect\(..., protocol=\"mcp\"\)",
            ):
                each.call_tool("price", {"sku": "tea"})
            with pytest.raises(AttributeError, match=r"no attribute 'prize'$"):
                _ = each.prize


def test_methods_of_mcp_name_the_option_that_selects_mcp() -> None:
    own = {
        name
        for name in {*dir(McpClient), *dir(SyncMcpClient)} - {*dir(Client), *dir(SyncClient)}
        if name[0] != "_"
    }
    assert own == MCP_ONLY


async def test_params_that_are_not_json_are_named_without_our_own_types() -> None:
    async with connect(shop()) as client:
        with pytest.raises(
            NotSent, match=r"price: the params cannot be written as JSON: object cannot"
        ):
            await client.call("price", {"sku": object()})


async def test_options_of_mcp_are_refused_for_jsonrpc() -> None:
    with pytest.raises(UsageError, match="revision: not for JSON-RPC"):
        connect(shop(), revision="2025-11-25")


async def test_foreign_server_gets_one_rpc_discover_and_no_key() -> None:
    def foreign(message: Any) -> bytes:
        if message["method"] == "rpc.discover":
            return http(
                b'{"jsonrpc":"2.0","id":%d,"error":{"code":-32601,"message":"?"}}' % message["id"]
            )
        return http(b'{"jsonrpc":"2.0","id":%d,"result":null}' % message["id"])

    async with Peer(answers(foreign)) as peer, connect(peer.url) as client:
        await asyncio.gather(*(client.call("order", {"sku": "tea"}) for _ in range(5)))
        assert [body["method"] for body in peer.bodies].count("rpc.discover") == 1
        assert all(body["params"] == {"sku": "tea"} for body in peer.calls)


async def test_connections_are_reused() -> None:
    async with Peer(
        answers(lambda m: http(b'{"jsonrpc":"2.0","id":%d,"result":1}' % m["id"]))
    ) as peer:
        async with connect(peer.url, discover=False, headers={"X-Team": "blue"}) as client:
            for _ in range(10):
                await client.call("x")
        assert peer.connections == 1


@pytest.mark.parametrize(
    ("status", "ran"),
    [("302 Found", "no"), ("303 See Other", "unknown"), ("307 Temporary Redirect", "no")],
)
async def test_redirects_are_not_followed(status: str, ran: str) -> None:
    """303 is how a server answers a POST that it has carried out."""
    async with (
        Peer(answers(lambda _m: http(b"", status, "Location: http://elsewhere/"))) as peer,
        connect(peer.url, discover=False) as client,
    ):
        with pytest.raises(
            Exception, match="a redirect to http://elsewhere/, which is not followed"
        ) as caught:
            await client.call("x")
        assert caught.value.ran == ran  # type: ignore[attr-defined]


async def test_error_of_a_server_says_whether_it_ran() -> None:
    for data, expected in (
        ({"ran": "no"}, "no"),
        ({"ran": "unknown"}, "unknown"),
        ("text", "yes"),
        (None, "yes"),
    ):
        assert RpcError(40000, "no tea", data).ran == expected
    assert RpcError(-32601, "?").ran == "no"
    assert RpcError(-32603, "?").ran == "unknown"


async def test_client_in_memory_calls_as_the_caller_that_is_named() -> None:
    app = App("shop", ledger="memory:")
    ran = []

    @app.command
    def take(ctx: Context) -> str:
        ran.append(ctx.caller)
        return ctx.caller

    async with (
        in_memory(app) as anonymous,
        in_memory(app, caller="ada") as ada,
        in_memory(app, caller="bob") as bob,
    ):
        assert [await client.call("take", key="one") for client in (anonymous, ada, bob, ada)] == [
            "",
            "ada",
            "bob",
            "ada",
        ]
    assert ran == ["", "ada", "bob"]  # two names are two callers, and the last call is a retry


@pytest.mark.parametrize("revision", ["2025-03-26", "2026-07-28"])
async def test_mcp_client_in_memory_calls_as_the_caller_that_is_named(revision: str) -> None:
    app = App("shop", ledger="memory:")

    @app.command
    def take(ctx: Context) -> str:
        return ctx.caller

    @app.query
    def look(ctx: Context) -> str:
        return ctx.caller

    async with (
        in_memory(app, protocol="mcp", revision=revision) as anonymous,
        in_memory(app, protocol="mcp", revision=revision, caller="ada") as ada,
    ):
        for name in ("take", "look"):
            assert (await anonymous.call_tool(name)).text == ""
            assert (await ada.call_tool(name)).text == "ada"
        async with ada.batch() as batch:  # an array at 2025-03-26
            calls = [batch.call("tools/call", {"name": name}) for name in ("take", "look")]
        assert [called.result()["content"][0]["text"] for called in calls] == ["ada", "ada"]


@pytest.mark.parametrize("target", ["http://127.0.0.1:1/rpc", [sys.executable]])
def test_caller_can_be_named_only_for_an_app_in_memory(target: str | list[str]) -> None:
    with pytest.raises(UsageError, match="caller= is for an app in memory"):
        connect(target, caller="ada")


def test_caller_cannot_be_named_for_an_app_with_tokens() -> None:
    app = App("shop", auth=Tokens({}))
    with pytest.raises(UsageError, match=r"wirecall\.testing\.auth\.AuthorizationServer"):
        in_memory(app, caller="ada")
