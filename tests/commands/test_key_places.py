"""Keys at a place among the arguments that the app declares: `key_at="meta.idempotency-key"`."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import jsonschema
import pytest
from msgspec import Raw

from tests.calls import call, error, result
from tests.mcp.asgi import R2, over_http, request
from wirecall import App, BatchTool, Router, ToolAnnotations, UsageError, connect, connect_sync
from wirecall.contract.generate import generated
from wirecall.contract.lock import of_app
from wirecall.errors import InvalidParams, KeyConflict, KeyInvalid, KeyRequired
from wirecall.mcp.server.catalog import input_schema
from wirecall.protocol.keys import KeyPlace
from wirecall.server.policy import fingerprint, identify

Meta = TypedDict("Meta", {"idempotency-key": str, "agent": str}, total=False)


def shop(paid: list[int], **options: Any) -> App:
    app = App("shop", ledger="memory:", key_at="meta.idempotency-key", **options)

    @app.command
    def charge(cents: int) -> int:
        paid.append(cents)
        return len(paid)

    @app.command(key="required", key_at="meta.idempotency_key")
    def refund(cents: int) -> int:
        paid.append(-cents)
        return len(paid)

    @app.query
    def balance() -> int:
        return sum(paid)

    return app


async def test_key_place_makes_two_tool_calls_one_command() -> None:
    paid: list[int] = []
    async with connect(shop(paid), protocol="mcp") as client:
        for agent in ("one", "two"):
            arguments = {"cents": 5, "meta": {"idempotency-key": "k-1", "agent": agent}}
            called = await client.call_tool("charge", arguments, key=False)
            assert called.text == "1"
        arguments = {"cents": 5, "meta": {"idempotency-key": "k-2"}}
        assert (await client.call_tool("charge", arguments, key=False)).text == "2"
        with pytest.raises(KeyConflict):
            await client.call_tool(
                "charge", {"cents": 6, "meta": {"idempotency-key": "k-1"}}, key=False
            )
    assert paid == [5, 5]


def add(batch: Any, name: str, arguments: dict[str, Any]) -> Any:
    """Add a call to a batch of either protocol."""
    if hasattr(batch, "call_tool"):
        return batch.call_tool(name, arguments)
    return batch.call(name, arguments)


@pytest.mark.parametrize("protocol", ["rpc", "mcp"])
async def test_key_place_filled_by_the_caller_gets_no_second_key_from_the_client(
    protocol: Literal["rpc", "mcp"],
) -> None:
    paid: list[int] = []
    arguments = {"cents": 5, "meta": {"agent": "one", "idempotency-key": "k-1"}}
    async with connect(shop(paid), protocol=protocol) as client:
        for _ in range(2):
            async with client.batch() as batch:
                sent = add(batch, "charge", arguments)
            assert sent.ok
            assert sent.key == "k-1"
    assert sent.replayed
    assert paid == [5]


@pytest.mark.parametrize("protocol", ["rpc", "mcp"])
async def test_key_in_data_that_a_caller_passes_on_is_not_the_key_of_the_call(
    protocol: Literal["rpc", "mcp"],
) -> None:
    """Two events of a payment have the payment's key in them, and are two calls."""
    app = App("hooks", ledger="memory:")

    @app.command
    def take(event: dict[str, Any]) -> str:
        return str(event["id"])

    async with connect(app, protocol=protocol) as client:
        for id in ("e-1", "e-2"):
            arguments = {"event": {"id": id, "request": {"idempotency_key": "k-1"}}}
            async with client.batch() as batch:
                sent = add(batch, "take", arguments)
            assert sent.ok
            assert sent.key != "k-1"


@pytest.mark.parametrize("protocol", ["rpc", "mcp"])
def test_key_place_of_another_process_is_known_to_the_client(
    protocol: Literal["rpc", "mcp"], tmp_path: Path
) -> None:
    file = tmp_path / "shop.py"
    file.write_text(
        "from wirecall import App\n"
        "app = App('shop', key_at='meta.idempotency-key')\n"
        "paid = []\n"
        "@app.command(destructive=False)\n"
        "def charge(cents: int) -> int:\n"
        "    paid.append(cents)\n"
        "    return len(paid)\n"
    )
    arguments = {"cents": 5, "meta": {"idempotency-key": "k-1"}}
    serve = [sys.executable, "-m", "wirecall", "serve", str(file), "--stdio"]
    with connect_sync(serve, protocol=protocol) as client:
        for _ in range(2):
            with client.batch() as batch:
                sent = add(batch, "charge", arguments)
            assert sent.key == "k-1"
            assert getattr(sent.result(), "structured", sent.result()) == 1


async def test_key_among_the_params_of_a_caller_is_sent_as_it_is() -> None:
    paid: list[int] = []
    async with connect(shop(paid)) as client:
        for _ in range(2):
            assert await client.call("charge", {"cents": 5, "idempotency_key": "k-1"}) == 1
    assert paid == [5]


async def test_key_place_and_usual_places_are_one_key() -> None:
    paid: list[int] = []
    app = shop(paid)
    meta = {"idempotency-key": "k-1"}
    assert result(await app.handle(call("charge", {"cents": 5, "meta": meta}))) == 1
    assert result(await app.handle(call("charge", {"cents": 5}, key="k-1"))) == 1
    assert result(await app.handle(call("charge", {"cents": 5, "meta": meta}, key="k-1"))) == 1
    reply = error(await app.handle(call("charge", {"cents": 5, "meta": meta}, key="k-2")))
    assert "two idempotency keys" in reply["data"]["reason"]
    assert paid == [5]


async def test_key_place_of_a_command_overrides_that_of_its_app() -> None:
    app = shop([])
    named = {"cents": 5, "meta": {"idempotency_key": "k-1"}}
    assert result(await app.handle(call("refund", named))) == 1
    reply = error(await app.handle(call("refund", {"cents": 5})))
    assert reply["data"]["type"] == "idempotency_key_required"
    assert "params.meta.idempotency_key" in reply["data"]["reason"]


async def test_key_place_is_named_in_the_error_of_a_tool() -> None:
    async with connect(shop([]), protocol="mcp") as client:
        with pytest.raises(KeyRequired) as refused:
            await client.call_tool("refund", {"cents": 5}, key=False)
    assert "meta.idempotency_key" in refused.value.data["reason"]


def test_key_place_is_in_the_published_schema() -> None:
    app = shop([])
    schema = input_schema(app.registry.tools["charge"])
    key = schema["properties"]["meta"]["properties"]["idempotency-key"]
    assert key["type"] == "string"
    assert schema["required"] == ["cents"]
    needed = input_schema(app.registry.tools["refund"])
    assert needed["required"] == ["cents", "meta"]
    assert needed["properties"]["meta"]["required"] == ["idempotency_key"]
    assert "idempotency_key" not in needed["properties"]
    validator = jsonschema.Draft202012Validator(needed)
    validator.validate({"cents": 5, "meta": {"idempotency_key": "k-1", "agent": "one"}})
    assert not validator.is_valid({"cents": 5})


async def test_key_place_is_in_the_openrpc_document() -> None:
    document = result(await shop([]).handle(call("rpc.discover")))
    [refund] = [each for each in document["methods"] if each["name"] == "refund"]
    params = {each["name"]: each for each in refund["params"]}
    assert params["meta"]["required"] is True
    assert "idempotency_key" in params["meta"]["schema"]["properties"]
    assert params["idempotency_key"]["required"] is False


@dataclass
class Agent:
    name: str


def test_key_place_inside_a_declared_parameter() -> None:
    """The function gets its parameter as sent; only the key does not count."""
    app = App("shop", ledger="memory:", key_at="meta.idempotency-key")
    seen: list[Any] = []

    @app.command
    def charge(cents: int, meta: dict[str, str]) -> None:
        seen.append(meta)

    @app.command
    def typed(cents: int, meta: Meta) -> None:
        pass

    @app.command(key="ask")
    def referred(meta: Agent) -> None:
        pass

    place = app.registry.tools["charge"].key_place
    assert place == KeyPlace(("meta", "idempotency-key"), is_declared=True)

    def identity(meta: str) -> bytes | None:
        key, digest = identify(Raw(b'{"cents":5,"meta":%b}' % meta.encode()), place=place)
        assert key == "k"
        return digest

    one = identity('{"idempotency-key":"k","agent":"one"}')
    assert one != identity('{"idempotency-key":"k","agent":"two"}')
    assert one == fingerprint(Raw(b'{"cents":5,"meta":{"agent":"one"}}'))
    schema = input_schema(app.registry.tools["charge"])["properties"]["meta"]
    assert schema["additionalProperties"] == {"type": "string"}
    assert "idempotency-key" in schema["properties"]
    combined = input_schema(app.registry.tools["referred"])
    jsonschema.Draft202012Validator(combined).validate(
        {"meta": {"name": "one", "idempotency-key": "k"}}
    )
    assert not jsonschema.Draft202012Validator(combined).is_valid({"meta": {"name": "one"}})


def test_key_place_does_not_count_in_the_fingerprint() -> None:
    place = KeyPlace(("meta", "idempotency-key"))
    bare = fingerprint(Raw(b'{"cents":5}'))
    for meta in ('{"idempotency-key":"k"}', '{"idempotency-key":"k","agent":"one"}', "{}"):
        params = Raw(b'{"cents":5,"meta":%b}' % meta.encode())
        assert fingerprint(params, place) == bare
        assert fingerprint(params) != bare


@pytest.mark.parametrize(
    ("meta", "reason"),
    [
        ('{"idempotency-key": 5}', "params.meta.idempotency-key: expected str, got int"),
        ('{"idempotency-key": ""}', "params.meta.idempotency-key: expected 1 to 255 characters"),
        (
            '{"idempotency-key": "a", "idempotency-key": "b"}',
            "params.meta.idempotency-key: given twice with different values",
        ),
    ],
)
def test_key_place_with_a_wrong_key_is_refused(meta: str, reason: str) -> None:
    place = KeyPlace(("meta", "idempotency-key"))
    with pytest.raises(KeyInvalid) as refused:
        identify(Raw(b'{"meta":%b}' % meta.encode()), place=place)
    assert refused.value.data["reason"].startswith(reason)


async def test_key_place_that_is_not_an_object_is_refused() -> None:
    paid: list[int] = []
    named = {"cents": 5, "meta": 'the "idempotency-key"'}
    reply = error(await shop(paid).handle(call("charge", named, key="k-1")))
    assert reply["data"]["reason"] == "params.meta: expected object, got str"
    reply = error(await shop(paid).handle(call("charge", {"cents": 5, "meta": None})))
    assert reply["data"]["reason"] == "params.meta: expected object, got null"
    assert paid == []
    with pytest.raises(InvalidParams):
        fingerprint(Raw(b'{"meta":5}'), KeyPlace(("meta", "key")))


async def test_key_place_of_a_router_is_that_of_its_commands() -> None:
    paid: list[int] = []
    inner = Router(prefix="inner.")

    @inner.command
    def charge(cents: int) -> int:
        paid.append(cents)
        return len(paid)

    @inner.query
    def balance() -> int:
        return sum(paid)

    @inner.tool(annotations=ToolAnnotations(readOnlyHint=True))
    def look() -> int:
        return sum(paid)

    outer = Router(key_at="order.key")
    outer.include(inner)
    app = App("shop", ledger="memory:")
    app.include(outer)
    named = {"cents": 5, "order": {"key": "k-1"}}
    for _ in range(2):
        assert result(await app.handle(call("inner.charge", named))) == 1
    assert app.registry.tools["inner.look"].key_place is None


def test_key_place_must_be_a_path() -> None:
    for wrong in ("", "meta..key", "meta key", 5, "_meta.key", "idempotency_key"):
        with pytest.raises(UsageError, match="key_at"):
            App("shop", key_at=wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="key_at"):
        Router(key_at="meta..key")
    app = App("shop", ledger="memory:")
    with pytest.raises(UsageError, match="only a command has an idempotency key"):
        app.query(key_at="meta.key")(lambda: None)  # type: ignore[call-overload]


def test_key_place_is_not_an_argument_of_a_generated_client() -> None:
    """The client sends the keys itself."""
    for protocol in ("rpc", "mcp"):
        module = generated(of_app(shop([])), protocol)
        assert "meta" not in module
        assert "key: str | bool | None = None" in module


def declaring_app() -> App:
    """Return an app whose commands declare the parameter that also has the key."""
    app = App("shop", ledger="memory:", key_at="meta.idempotency-key")

    @app.command
    def plain(meta: dict[str, str]) -> None:
        pass

    @app.command
    def any_members(meta: dict[str, Any]) -> None:
        pass

    @app.command
    def optional(meta: dict[str, str] | None = None) -> None:
        pass

    @app.command
    def typed(meta: Agent) -> None:
        pass

    return app


@pytest.mark.parametrize("protocol", ["rpc", "mcp"])
def test_key_place_keeps_a_declared_parameter_in_a_generated_client(protocol: str) -> None:
    module = generated(of_app(declaring_app()), protocol)
    shown = re.findall(r"async def (\w+)\([^)]*? meta: (.*),\n", module)
    assert dict(shown) == {
        "plain": "dict[str, str]",
        "any_members": "dict[str, Any]",
        "optional": "dict[str, str] | None | UnsetType = UNSET",
        "typed": "Agent",
    }
    assert "idempotency-key" not in module


@pytest.mark.parametrize("meta", [{}, {"agent": "one"}])
async def test_key_place_may_be_empty_in_a_declared_parameter(meta: dict[str, str]) -> None:
    app = declaring_app()
    assert result(await app.handle(call("plain", {"meta": meta}, key="k-1"))) is None


async def tool_batch(app: App, *calls: dict[str, Any]) -> list[dict[str, Any]]:
    """Call the batch tool, and return the answers of its entries."""
    async with connect(app, protocol="mcp") as client:
        answer = await client.call_tool("batch", {"calls": list(calls)}, key=False)
        found: list[dict[str, Any]] = answer.structured["results"]
        return found


async def test_key_place_makes_two_entries_of_the_batch_tool_one_command() -> None:
    paid: list[int] = []
    app = shop(paid, batch_tool=BatchTool(tools="all", destructive="allow"))
    for agent in ("one", "two"):
        meta = {"idempotency-key": "k-1", "agent": agent}
        [found] = await tool_batch(app, {"tool": "charge", "arguments": {"cents": 5, "meta": meta}})
        assert found["result"] == 1
    assert found["replayed"]
    async with connect(app, protocol="mcp") as client:
        alone = {"cents": 5, "meta": {"idempotency-key": "k-1"}}
        assert (await client.call_tool("charge", alone, key=False)).text == "1"
    assert paid == [5]


async def test_key_place_of_an_entry_with_references_does_not_count_in_its_fingerprint() -> None:
    paid: list[int] = []
    app = shop(paid, batch_tool=BatchTool(tools="all", destructive="allow"))
    for agent in ("one", "two"):
        meta = {"idempotency-key": "k-1", "agent": agent}
        _, found = await tool_batch(
            app,
            {"id": "sum", "tool": "balance"},
            {"tool": "charge", "arguments": {"cents": {"$ref": "sum#"}, "meta": meta}},
        )
        assert found["ok"], found
    assert found["replayed"]
    assert paid == [0]


async def test_key_place_is_named_in_the_error_of_an_entry() -> None:
    app = shop([], batch_tool=BatchTool(tools="all", destructive="allow"))
    keyed = {"cents": 5, "meta": {"idempotency_key": "k-1"}}
    refused, done = await tool_batch(
        app,
        {"tool": "refund", "arguments": {"cents": 5}},
        {"tool": "refund", "arguments": keyed},
    )
    assert refused["error"]["data"]["type"] == "idempotency_key_required"
    assert "meta.idempotency_key" in refused["error"]["data"]["reason"]
    assert done["ok"]


async def test_key_place_of_an_array_entry_with_references_does_not_count() -> None:
    """In the arrays of MCP 2025-03-26, as in those of JSON-RPC."""
    paid: list[int] = []
    app = shop(paid, references=True)
    async with over_http(app, R2) as client:
        for agent in ("one", "two"):
            meta = {"idempotency-key": "k-1", "agent": agent}
            refs = {"/arguments/cents": {"id": 1, "path": "/structuredContent"}}
            params = {
                "name": "charge",
                "arguments": {"meta": meta},
                "_meta": {"io.wirecall/refs": refs},
            }
            balance = request("tools/call", {"name": "balance"}, 1)
            sent = await client.post([balance, request("tools/call", params, 2)]).started()
            _, found = await sent.json()
            assert not found["result"].get("isError"), found
    assert paid == [0]
