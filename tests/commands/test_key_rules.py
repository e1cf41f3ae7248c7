"""`key=` on a command: calls without one, over JSON-RPC and MCP, in development and in production."""

import asyncio
import warnings
from typing import Any

import pytest

from tests.calls import call, error, make_app, result
from tests.commands.charges import PARAMS, Effects, NewApp, World, transactional, watch
from tests.commands.wires import Told, Wire, Wires, authenticate
from tests.mcp.asgi import KEY, PATIENCE, REVISIONS, over_http
from wirecall import App, Context, UsageError, connect
from wirecall.ledger.base import Ledger
from wirecall.server.method import KeyRule, Mode

MODES: list[Mode] = ["development", "production"]

every_mode = pytest.mark.parametrize("mode", MODES)
in_memory = pytest.mark.parametrize("store", ["memory"], indirect=True)


async def refused(app: App) -> Any:
    """The error of a call without a key over JSON-RPC."""
    return error(await app.handle(call("charge", PARAMS)))


def is_refusal(told: Any) -> bool:
    return (told["code"], told["data"]["type"], told["data"]["ran"]) == (
        -32602,
        "idempotency_key_required",
        "no",
    )


async def lose(wire: Wire, app: App, world: World, params: Any) -> None:
    """Send a call, leave while its handler waits, and let it end."""
    ends = await watch(app, "complete")
    lost = wire.send("charge", params)
    async with asyncio.timeout(PATIENCE):
        await world.begun.wait()
        await lost.leave()
        world.gate.set()
        await ends.get()


# --- auto -----------------------------------------------------------------------------------------


@every_mode
@in_memory
async def test_auto_generates_a_key(
    mode: Mode, new_app: NewApp, world: World, ledger: Ledger
) -> None:
    """Over JSON-RPC and over MCP, declared so.

    It is an ordinary key: the handler and the ledger see it.
    """
    app = new_app(mode=mode)
    app.command(name="charge", key="auto")(world.charge)
    assert result(await app.handle(call("charge", PARAMS)))["number"] == 1
    async with over_http(app) as client:
        await client.tool("charge", PARAMS)
    keys = [context.idempotency_key for context in world.seen]
    assert len(set(keys)) == 2 and all(key is not None and key.startswith("auto-") for key in keys)
    assert sorted(record.id.key for record in await ledger.list()) == sorted(filter(None, keys))


@every_mode
@pytest.mark.parametrize("revision", REVISIONS)
async def test_auto_is_the_default_of_mcp(mode: Mode, revision: str, world: World) -> None:
    app = make_app(mode=mode)
    app.command(name="charge")(world.charge)
    async with over_http(app, revision) as client:
        await client.tool("charge", PARAMS)
        (tool,) = (await client.result("tools/list"))["tools"]
        assert list(tool["inputSchema"]["properties"]) == ["cents"]
    (context,) = world.seen
    assert (context.idempotency_key or "").startswith("auto-")


async def test_json_rpc_has_auto_in_development_and_required_in_production(world: World) -> None:
    """P4."""
    for mode in MODES:
        async with make_app(mode=mode) as app:
            app.command(name="charge")(world.charge)
            if mode == "production":
                assert is_refusal(await refused(app))
            else:
                assert result(await app.handle(call("charge", PARAMS)))["number"] == 1
    assert world.effects == [5]


async def test_generated_key_does_everything_that_a_key_does(
    app: App, world: World, ledger: Ledger
) -> None:
    """A commit point, attempts, a key for other systems, a record."""

    @app.command(name="charge", key="auto", commit_point=True)
    async def handler(cents: int, ctx: Context) -> Any:
        (record,) = await ledger.list()
        assert (record.committed, record.id.key) == (False, ctx.idempotency_key)
        await ctx.commit_point()
        (record,) = await ledger.list()
        assert record.committed
        return [ctx.attempt, len(ctx.downstream_key or "")]

    assert result(await app.handle(call("charge", PARAMS), caller="alice")) == [1, 32]


@transactional
async def test_transaction_needs_no_key(app: App, effects: Effects) -> None:
    @app.command(name="charge", key="auto", on_crash="transactional")
    async def handler(cents: int, ctx: Context) -> int:
        return await effects.add(ctx, cents)

    async with over_http(app) as client:
        assert (await client.tool("charge", PARAMS))["content"][0]["text"] == "1"
    assert effects.all == [5]


# --- required and ask -----------------------------------------------------------------------------


@every_mode
@in_memory
@pytest.mark.parametrize("key", ["required", "ask"])
async def test_required_and_ask_refuse_a_call_without_a_key(
    mode: Mode, key: KeyRule, new_app: NewApp, world: World, ledger: Ledger
) -> None:
    app = new_app(mode=mode)
    app.command(name="charge", key=key)(world.charge)
    assert is_refusal(await refused(app))
    async with over_http(app) as client:
        if key == "ask":  # a model reads the result, and can send the key
            told = await client.tool("charge", PARAMS)
            assert told["isError"] is True and is_refusal(told["_meta"]["io.wirecall/error"])
        else:
            assert is_refusal(await client.tool_error("charge", PARAMS))
        assert (world.effects, await ledger.list()) == ([], [])
        await client.tool("charge", PARAMS, meta={KEY: "beside"})
        await client.tool("charge", {**PARAMS, "idempotency_key": "among"})
    assert [context.idempotency_key for context in world.seen] == ["beside", "among"]


@pytest.mark.parametrize("revision", REVISIONS)
@pytest.mark.parametrize("key", ["required", "ask"])
async def test_ask_makes_the_key_an_argument_that_a_model_fills_in(
    revision: str, key: KeyRule, world: World
) -> None:
    app = make_app()
    app.command(name="charge", key=key)(world.charge)
    async with over_http(app, revision) as client:
        (tool,) = (await client.result("tools/list"))["tools"]
    schema = tool["inputSchema"]
    assert schema["required"] == ["cents", "idempotency_key"]
    described = schema["properties"]["idempotency_key"]
    assert described["type"] == "string"
    for word in ("for each separate thing", "send the same value again"):
        assert word in described["description"], described


# --- off ------------------------------------------------------------------------------------------


async def test_off_runs_without_a_record(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger is not even opened."""

    async def refuse(url: str, tables: str) -> Any:
        raise AssertionError("the ledger was opened")

    monkeypatch.setattr("wirecall.app.open_ledger", refuse)
    app = make_app()
    app.command(name="charge", key="off")(world.charge)
    for number in (1, 2):
        assert result(await app.handle(call("charge", PARAMS), caller="alice"))["number"] == number
    async with over_http(app) as client:
        await client.tool("charge", PARAMS)
    assert [context.idempotency_key for context in world.seen] == [None] * 3


@in_memory
async def test_off_recognises_nothing(new_app: NewApp, wires: Wires, world: World) -> None:
    app = new_app(authenticate=authenticate)
    app.command(name="charge", key="off")(world.held_after)
    wire = await wires("/rpc", app)
    lost = wire.send("charge", PARAMS)
    async with asyncio.timeout(PATIENCE):
        await world.begun.wait()
        await lost.leave()
        world.gate.set()
        await world.ended.wait()
    assert await wire.call("charge", PARAMS) == Told({"charged": 5, "number": 2})


@in_memory
async def test_off_accepts_a_key(new_app: NewApp, world: World) -> None:
    app = new_app()
    app.command(name="charge", key="off")(world.charge)
    for _ in range(2):
        assert result(await app.handle(call("charge", PARAMS, key="k")))["number"] == 1


async def test_optional_is_the_old_name_of_off(world: World) -> None:
    app = make_app()
    with pytest.warns(DeprecationWarning, match='key="off"') as told:
        app.command(name="charge", key="optional")(world.charge)
    assert [warning.filename for warning in told] == [__file__]
    assert result(await app.handle(call("charge", PARAMS)))["number"] == 1
    assert [context.idempotency_key for context in world.seen] == [None]


def test_key_options_with_current_names_do_not_warn(world: World) -> None:
    names: list[KeyRule] = ["auto", "required", "ask", "off"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for key in names:
            make_app().command(name="charge", key=key)(world.charge)


def test_off_is_refused_for_a_transaction(world: World) -> None:
    with pytest.raises(UsageError, match='key="off"'):
        make_app(ledger="sqlite:").command(name="charge", key="off", on_crash="transactional")(
            world.charge
        )


# --- an explicit key ------------------------------------------------------------------------------


@in_memory
@pytest.mark.parametrize("key", ["auto", None])
async def test_key_of_the_client_wins(
    key: KeyRule | None, new_app: NewApp, wires: Wires, world: World
) -> None:
    """It switches recognition off: the call does not match a lost one, and no other call matches
    it.
    """
    app = new_app(authenticate=authenticate)
    app.command(name="charge", key=key)(world.held_after)
    wire = await wires("/rpc", app)
    keyed = {**PARAMS, "idempotency_key": "k"}
    await lose(wire, app, world, PARAMS)
    assert (await wire.call("charge", keyed)).value["number"] == 2
    assert await wire.call("charge", keyed) == Told({"charged": 5, "number": 2}, is_replayed=True)
    assert await wire.call("charge", PARAMS) == Told({"charged": 5, "number": 1}, is_replayed=True)
    world.gate.clear()
    world.begun.clear()
    await lose(wire, app, world, {**PARAMS, "idempotency_key": "l"})
    assert (await wire.call("charge", PARAMS)).value["number"] == 4


@in_memory
async def test_client_of_wirecall_sends_keys(new_app: NewApp, world: World, ledger: Ledger) -> None:
    app = new_app()
    app.command(name="charge")(world.charge)
    async with connect(app) as client:
        await client.call("charge", PARAMS)
        async with client.batch() as many:
            for _ in range(2):
                many.call("charge", PARAMS)
    async with connect(app, protocol="mcp") as tools:
        await tools.call_tool("charge", PARAMS)
    records = await ledger.list()
    assert len(records) == 4
    assert [record.delivery for record in records] == [None] * 4
    assert not any(record.id.key.startswith("auto-") for record in records)
