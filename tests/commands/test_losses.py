"""How an answer to a call without a key is lost: each transport, alone and in arrays (rules 1, 2,
5, 6).

A transport is memory, /rpc, a revision of MCP over HTTP, or lines on a pipe. The ledger is in
memory; test_recognised covers the other ledgers.
"""

import asyncio
import json
import logging
from typing import Any

import pytest

from tests.clock import LoopClock
from tests.commands.charges import PARAMS, NewApp, World, watch
from tests.commands.wires import (
    HTTP,
    PIPES,
    STATELESS,
    WAYS,
    McpWire,
    PipeWire,
    RpcWire,
    Told,
    Wire,
    Wires,
    authenticate,
    known,
)
from tests.mcp.asgi import LEGACY, PATIENCE, R2, R3, R4, R5, over_http
from wirecall import App, Context
from wirecall.commands import receipts
from wirecall.errors import KeyInProgress
from wirecall.ledger.base import Ledger, State

pytestmark = pytest.mark.parametrize("store", ["memory"], indirect=True)

every_way = pytest.mark.parametrize("way", WAYS)
# 2025-03-26 is the one revision that has arrays.
ARRAYS = ("memory", "/rpc", R2, "pipe", f"pipe {R2}")

HANGING_UP = ("memory", R5)  # there, a caller that leaves has cancelled its call
CANCELLING = (*LEGACY, *PIPES[1:])  # there, it says so with notifications/cancelled

FIRST = {"charged": 5, "number": 1}
SECOND = {"charged": 5, "number": 2}


async def soon(event: asyncio.Event) -> None:
    async with asyncio.timeout(PATIENCE):
        await event.wait()


async def next_of(heard: "asyncio.Queue[Any]") -> Any:
    async with asyncio.timeout(PATIENCE):
        return await heard.get()


async def lose(wire: Wire, app: App, world: World, message: Any = None) -> None:
    """Leave while the handler is past its commit point, let it end, and wait for the mark in the
    ledger.
    """
    marks = await watch(app, "deliver")
    sent = wire.send("charge", PARAMS) if message is None else wire.post(message)
    await soon(world.begun)
    await sent.leave()
    if isinstance(wire, PipeWire):  # the server finds a loss when it writes the answer
        world.gate.set()
    await next_of(marks)
    world.gate.set()
    if isinstance(wire, PipeWire):
        await wire.open()


def is_replay(told: Told, way: str) -> bool:
    """MCP marks a recognised call.

    HTTP marks a replay in a header; plain lines have no place for a mark.
    """
    is_mcp = way not in ("memory", "/rpc", "pipe")
    return told == Told(FIRST, is_replayed=way != "pipe", is_recognised=is_mcp)


# --- on every transport ---------------------------------------------------------------------------


@every_way
async def test_lost_call_is_recognised(
    way: str, new_app: NewApp, wires: Wires, world: World
) -> None:
    app = new_app(**known(way))
    app.command(name="charge")(world.held_after)
    wire = await wires(way, app)
    await lose(wire, app, world)
    assert is_replay(await wire.call("charge", PARAMS), way)
    assert (await wire.call("charge", PARAMS)) == Told(SECOND)
    assert world.effects == [5, 5]


@every_way
async def test_call_that_is_answered_is_not_repeated(
    way: str, new_app: NewApp, wires: Wires, world: World
) -> None:
    app = new_app(**known(way))
    app.command(name="charge")(world.charge)
    wire = await wires(way, app)
    for number in range(1, 6):
        assert await wire.call("charge", PARAMS) == Told({"charged": 5, "number": number})
    assert world.effects == [5] * 5


@every_way
async def test_delivery_is_a_fact_of_the_record(
    way: str, new_app: NewApp, wires: Wires, world: World, ledger: Ledger
) -> None:
    """Pending until the server has sent the answer, then undelivered or written."""
    app = new_app(**known(way))
    app.command(name="charge")(world.held_after)
    wire = await wires(way, app)
    marks = await watch(app, "deliver")
    sent = wire.send("charge", PARAMS)
    await soon(world.begun)
    assert [record.delivery for record in await ledger.list()] == ["pending"]
    world.gate.set()
    assert await sent.told() == Told(FIRST)
    await next_of(marks)
    assert [record.delivery for record in await ledger.list()] == ["written"]

    world.gate.clear()
    world.begun.clear()
    await lose(wire, app, world)
    assert sorted(str(record.delivery) for record in await ledger.list()) == [
        "undelivered",
        "written",
    ]


@every_way
async def test_sync_handler_is_answered_at_once(
    way: str, new_app: NewApp, wires: Wires, world: World, ledger: Ledger
) -> None:
    app = new_app(**known(way))
    app.command(name="charge")(world.act)
    wire = await wires(way, app)
    marks = await watch(app, "deliver")
    assert await wire.call("charge", PARAMS) == Told(FIRST)
    await next_of(marks)
    assert [record.delivery for record in await ledger.list()] == ["written"]


@every_way
@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_repetition_may_come_before_the_server_notices_the_loss(
    way: str, is_cancelled: bool, new_app: NewApp, wires: Wires, world: World
) -> None:
    """At the same moment: the caller leaves or cancels, and calls again."""
    app = new_app(**known(way))
    app.command(name="charge")(world.held_after)
    wire = await wires(way, app)
    marks = await watch(app, "deliver")
    lost = wire.send("charge", PARAMS, id=7)
    await soon(world.begun)
    if is_cancelled and way in CANCELLING:
        await wire.cancel(7)
    else:
        await lost.leave()
        if isinstance(wire, PipeWire):  # the server finds a loss when it writes the answer
            world.gate.set()
            await wire.open()
    again = wire.send("charge", PARAMS)
    await next_of(marks)
    world.gate.set()
    assert is_replay(await again.told(), way)
    assert world.effects == [5]


@every_way
async def test_equal_call_of_a_caller_that_waits_is_a_new_call(
    way: str, new_app: NewApp, wires: Wires, world: World
) -> None:
    """Two coffees at once are two coffees."""
    app = new_app(**known(way))
    app.command(name="charge")(world.held_after)
    wire = await wires(way, app)
    sent = []
    for _ in range(2):
        sent.append(wire.send("charge", PARAMS))
        await soon(world.begun)
        world.begun.clear()
    world.gate.set()
    assert [await each.told() for each in sent] == [Told(FIRST), Told(SECOND)]
    assert world.effects == [5, 5]


# --- in the middle of an answer -------------------------------------------------------------------

LONG = {"text": "x" * (4 << 20)}  # more than one piece, and more than a pipe holds


@pytest.mark.parametrize("way", [*HTTP, *PIPES])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_answer_is_lost_if_the_caller_leaves_in_the_middle_of_it(
    way: str, is_stream: bool, new_app: NewApp, wires: Wires, world: World, ledger: Ledger
) -> None:
    """Plain, and as the last event of a stream."""
    app = new_app(**known(way))

    @app.command(max_stored_result=1 << 24)
    async def render(ctx: Context) -> dict[str, str]:
        await ctx.progress(1)
        await world.held_after(5, ctx)
        return LONG

    wire = await wires(way, app)
    marks = await watch(app, "deliver")
    ends = await watch(app, "complete")
    message = wire.message("render", {}, 99)
    if is_stream:
        message["params"].setdefault("_meta", {})["progressToken"] = "p"
    sent = wire.post(message)
    await soon(world.begun)
    sent.pause()
    world.gate.set()
    await next_of(ends)
    await sent.is_full()
    assert [record.delivery for record in await ledger.list()] == ["pending"]
    await sent.leave()
    await next_of(marks)
    assert [record.delivery for record in await ledger.list()] == ["undelivered"]
    if isinstance(wire, PipeWire):
        await wire.open()
    told = await wire.call("render")
    assert (told.value, world.effects) == (LONG, [5])


@pytest.mark.parametrize("way", [R2, R3, R4])
async def test_resumed_stream_delivers_the_lost_answer(
    way: str, new_app: NewApp, wires: Wires, world: World, ledger: Ledger
) -> None:
    app = new_app()

    @app.command(name="charge")
    async def handler(cents: int, ctx: Context) -> Any:
        await ctx.progress(1)
        return await world.held_after(cents, ctx)

    wire = await wires(way, app)
    assert isinstance(wire, McpWire)
    marks = await watch(app, "deliver")
    message = wire.message("charge", PARAMS, 99)
    message["params"]["_meta"] = {"progressToken": "p"}
    exchange = await wire.client.post(message).started()
    # 2025-11-25 begins with an empty one.
    events = [await exchange.event() for _ in range(2 if way == R4 else 1)]
    await soon(world.begun)
    exchange.leave()
    await next_of(marks)
    assert [record.delivery for record in await ledger.list()] == ["undelivered"]
    assert events[-1] is not None
    resumed = wire.client.listen(events[-1].id)
    world.gate.set()
    (answer,) = await resumed.messages()
    assert json.loads(answer["result"]["content"][0]["text"]) == FIRST
    await next_of(marks)
    assert [record.delivery for record in await ledger.list()] == ["written"]
    assert await wire.call("charge", PARAMS) == Told(SECOND)


@pytest.mark.parametrize("way", [R2, R3, R4])
@pytest.mark.parametrize("hangs_up", [False, True])
async def test_resumed_stream_is_read_so_the_next_call_is_new(
    way: str, hangs_up: bool, new_app: NewApp, wires: Wires, world: World, ledger: Ledger
) -> None:
    """The caller has read the answer: it may end the stream, or not, and orders again at once."""
    app = new_app()

    @app.command(name="charge")
    async def handler(cents: int, ctx: Context) -> Any:
        await ctx.progress(1)
        return await world.held_after(cents, ctx)

    wire = await wires(way, app)
    assert isinstance(wire, McpWire)
    marks = await watch(app, "deliver")
    for number in range(1, 31):
        world.begun.clear()
        world.gate.clear()
        message = wire.message("charge", PARAMS, 1000 + number)
        message["params"]["_meta"] = {"progressToken": number}
        exchange = await wire.client.post(message).started()
        # 2025-11-25 begins with an empty one.
        events = [await exchange.event() for _ in range(2 if way == R4 else 1)]
        assert events[-1] is not None, f"call {number} is a replay"
        await soon(world.begun)
        exchange.leave()
        while not any(record.delivery == "undelivered" for record in await ledger.list()):
            await next_of(marks)
        resumed = await wire.client.listen(events[-1].id).started()
        world.gate.set()
        answer = await resumed.event()
        assert answer is not None and answer.data is not None
        assert (
            json.loads(json.loads(answer.data)["result"]["content"][0]["text"])["number"] == number
        )
        if hangs_up:
            resumed.leave()


# --- whose call it is -----------------------------------------------------------------------------


@pytest.mark.parametrize("way", STATELESS)
async def test_anonymous_call_of_stateless_http_is_never_matched(
    way: str, new_app: NewApp, wires: Wires, world: World, ledger: Ledger
) -> None:
    """It has a record, but two people may send the same call."""
    app = new_app()
    app.command(name="charge")(world.held_after)
    wire = await wires(way, app, "")
    await lose(wire, app, world)
    assert [record.delivery for record in await ledger.list()] == ["undelivered"]
    assert await wire.call("charge", PARAMS) == Told(SECOND)


async def test_call_without_a_session_is_never_matched(new_app: NewApp, world: World) -> None:
    """Older revisions serve a request that names no session."""
    app = new_app()
    app.command(name="charge")(world.held_after)
    async with over_http(app, R4) as client:
        client.session = None
        marks = await watch(app, "deliver")
        lost = client.post(client.message("tools/call", {"name": "charge", "arguments": PARAMS}))
        await soon(world.begun)
        lost.leave()
        await next_of(marks)
        world.gate.set()
        again = await client.tool("charge", PARAMS)
    assert json.loads(again["content"][0]["text"]) == SECOND


@pytest.mark.parametrize("way", STATELESS)
async def test_anonymous_calls_of_a_single_user_are_matched(
    way: str, new_app: NewApp, wires: Wires, world: World
) -> None:
    app = new_app(single_user=True)
    app.command(name="charge")(world.held_after)
    wire = await wires(way, app, "")
    await lose(wire, app, world)
    assert is_replay(await wire.call("charge", PARAMS), way)


@pytest.mark.parametrize(
    ("server", "client", "mode", "is_one_user"),
    [
        (("127.0.0.1", 80), ("127.0.0.1", 5), "development", True),
        (("127.0.0.1", "80"), ("127.0.0.3", "5"), "development", True),
        (("::1", 80), ("::1", 5), "development", True),
        (("::ffff:127.0.0.1", 80), ("::ffff:127.0.0.1", 5), "development", True),
        (("127.0.0.1", 80), ("127.0.0.1", 5), "production", False),
        (("192.0.2.1", 80), ("192.0.2.1", 5), "development", False),
        (("127.0.0.1", 80), ("192.0.2.7", 5), "development", False),
        # A name, so not the address of a connection.
        (("localhost", 80), ("127.0.0.1", 5), "development", False),
        (("/run/shop.sock", None), None, "development", False),
        (None, None, "development", False),
    ],
)
async def test_policy_takes_callers_on_the_loopback_for_one_user_under_any_server(
    server: Any,
    client: Any,
    mode: str,
    is_one_user: bool,
    new_app: NewApp,
    wires: Wires,
    world: World,
) -> None:
    """A server that we did not start names the two addresses of a connection in each request."""
    app = new_app(mode=mode)
    app.command(name="charge", key="auto")(world.held_after)
    wire = await wires("/rpc", app, "")
    assert isinstance(wire, RpcWire)
    inner = wire.asgi

    async def asgi(scope: Any, receive: Any, send: Any) -> None:
        await inner({**scope, "server": server, "client": client}, receive, send)

    wire.asgi = asgi
    await lose(wire, app, world)
    assert (await wire.call("charge", PARAMS)).is_replayed is is_one_user


async def test_strangers_are_logged_once_for_each_lost_answer(
    new_app: NewApp, wires: Wires, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    app = new_app()
    app.command(name="charge")(world.held_after)
    wire = await wires(R5, app, "")
    await lose(wire, app, world)
    assert await wire.call("charge", {"cents": 6}) == Told({"charged": 6, "number": 2})
    assert caplog.messages == []
    for _ in range(2):
        await wire.call("charge", PARAMS)
    (logged,) = caplog.messages
    assert logged.startswith("charge: not recognised: anonymous caller")


async def test_strangers_are_not_logged_after_a_call_that_did_nothing(
    new_app: NewApp, wires: Wires, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """At 2026-07-28 a caller that leaves before the commit point has cancelled its call."""
    app = new_app()
    app.command(name="charge")(world.held_before)
    wire = await wires(R5, app, "")
    releases = await watch(app, "release")
    lost = wire.send("charge", PARAMS)
    await soon(world.begun)
    await lost.leave()
    await next_of(releases)
    world.gate.set()
    assert await wire.call("charge", PARAMS) == Told(FIRST)
    assert caplog.messages == []


@pytest.mark.parametrize("way", LEGACY)
async def test_session_is_one_caller(way: str, new_app: NewApp, wires: Wires, world: World) -> None:
    app = new_app()
    app.command(name="charge")(world.held_after)
    one = await wires(way, app, "")
    other = await wires(way, app, "")
    await lose(one, app, world)
    assert await other.call("charge", PARAMS) == Told(SECOND)
    assert is_replay(await one.call("charge", PARAMS), way)


@pytest.mark.parametrize("way", LEGACY)
async def test_single_user_may_open_another_session(
    way: str, new_app: NewApp, wires: Wires, world: World
) -> None:
    app = new_app(single_user=True)
    app.command(name="charge")(world.held_after)
    one = await wires(way, app, "")
    other = await wires(way, app, "")
    await lose(one, app, world)
    assert is_replay(await other.call("charge", PARAMS), way)


@pytest.mark.parametrize("way", HTTP)
async def test_authenticated_caller_is_one_wherever_it_calls_from(
    way: str, new_app: NewApp, wires: Wires, world: World
) -> None:
    """In another session too. Another caller is another, whatever it sends."""
    app = new_app(authenticate=authenticate)
    app.command(name="charge")(world.held_after)
    await lose(await wires(way, app, "alice"), app, world)
    assert await (await wires(way, app, "bob")).call("charge", PARAMS) == Told(SECOND)
    assert is_replay(await (await wires(way, app, "alice")).call("charge", PARAMS), way)


@pytest.mark.parametrize("first", HTTP[1:])
async def test_caller_may_repeat_a_tool_call_at_another_revision(
    first: str, new_app: NewApp, wires: Wires, world: World
) -> None:
    app = new_app(authenticate=authenticate)
    app.command(name="charge")(world.held_after)
    await lose(await wires(first, app), app, world)
    assert is_replay(await (await wires(R5, app)).call("charge", PARAMS), R5)


# --- cancelled ------------------------------------------------------------------------------------


async def cancelled(wire: Wire, app: App, way: str, world: World) -> None:
    sent = wire.send("charge", PARAMS, id=7)
    await soon(world.begun)
    await (sent.leave() if way in HANGING_UP else wire.cancel(7))


@pytest.mark.parametrize("way", [*HANGING_UP, *CANCELLING])
async def test_cancelled_call_before_its_commit_point_is_released(
    way: str, new_app: NewApp, wires: Wires, world: World, ledger: Ledger
) -> None:
    app = new_app(**known(way))
    app.command(name="charge", commit_point=True)(world.held_before)
    wire = await wires(way, app)
    released = await watch(app, "release")
    await cancelled(wire, app, way, world)
    assert await next_of(released)
    assert (world.effects, await ledger.list()) == ([], [])
    world.gate.set()
    assert await wire.call("charge", PARAMS) == Told(FIRST)


@pytest.mark.parametrize("way", [*HANGING_UP, *CANCELLING])
async def test_cancelled_call_after_its_commit_point_finishes_and_is_undelivered(
    way: str, new_app: NewApp, wires: Wires, world: World, ledger: Ledger
) -> None:
    app = new_app(**known(way))
    app.command(name="charge", commit_point=True)(world.held_between)
    wire = await wires(way, app)
    marks = await watch(app, "deliver")
    ends = await watch(app, "complete")
    await cancelled(wire, app, way, world)
    await next_of(marks)
    world.gate.set()
    assert await next_of(ends)
    (record,) = await ledger.list()
    assert (record.state, record.delivery) == (State.DONE, "undelivered")
    assert is_replay(await wire.call("charge", PARAMS), way)
    assert world.effects == [5]


@every_way
async def test_timeout_error_does_not_deliver_the_outcome(
    way: str, new_app: NewApp, wires: Wires, world: World, clock: LoopClock
) -> None:
    app = new_app(**known(way))
    app.command(name="charge", timeout=PATIENCE / 2)(world.held_after)
    wire = await wires(way, app)
    ends = await watch(app, "complete")
    calling = asyncio.create_task(wire.call("charge", PARAMS))
    await world.begun.wait()
    clock.advance(PATIENCE / 2)
    late = await calling
    assert late.error["code"] == 50410
    world.gate.set()
    assert await next_of(ends)
    assert is_replay(await wire.call("charge", PARAMS), way)
    assert world.effects == [5]


# --- arrays ---------------------------------------------------------------------------------------


def array(wire: Wire, *methods: str) -> list[Any]:
    return [
        wire.message(method, {"cents": 5 + place}, next(wire.ids))
        for place, method in enumerate(methods)
    ]


@pytest.mark.parametrize("way", ARRAYS)
async def test_array_that_is_lost_has_each_entry_recognised(
    way: str, new_app: NewApp, wires: Wires, world: World
) -> None:
    """The second entry begins after the caller has left."""
    app = new_app(**known(way))
    app.command(name="charge")(world.held_after)
    wire = await wires(way, app)
    ends = await watch(app, "complete")
    await lose(wire, app, world, array(wire, "charge", "charge", "charge"))
    for _ in range(1 if way == "memory" else 3):
        await next_of(ends)
    told = await wire.post(array(wire, "charge", "charge", "charge")).told()
    assert [each.value for each in told] == [
        {"charged": 4 + number, "number": number} for number in (1, 2, 3)
    ]
    if way != "pipe":
        # `App.handle` that is cancelled does not begin another entry.
        assert [each.is_replayed for each in told] == [True, way != "memory", way != "memory"]
    assert world.effects == [5, 6, 7]


@pytest.mark.parametrize("way", ARRAYS)
async def test_array_entry_may_be_repeated_alone_after_a_loss(
    way: str, new_app: NewApp, wires: Wires, world: World
) -> None:
    app = new_app(**known(way))
    app.command(name="charge")(world.held_after)
    wire = await wires(way, app)
    await lose(wire, app, world, array(wire, "charge"))
    assert is_replay(await wire.call("charge", PARAMS), way)


@pytest.mark.parametrize("way", ARRAYS)
async def test_array_entry_is_delivered_with_its_array(
    way: str, new_app: NewApp, wires: Wires, world: World, ledger: Ledger
) -> None:
    """The first entry is answered while the second runs; the array is delivered with both."""
    app = new_app(**known(way))
    app.command(name="pay")(world.charge)
    app.command(name="charge")(world.held_after)
    wire = await wires(way, app)
    marks = await watch(app, "deliver")
    sent = wire.post(array(wire, "pay", "charge"))
    await soon(world.begun)
    assert {record.delivery for record in await ledger.list()} == {"pending"}
    world.gate.set()
    assert [each.value["number"] for each in await sent.told()] == [1, 2]
    await next_of(marks)
    assert {record.delivery for record in await ledger.list()} == {"written"}

    world.gate.clear()
    world.begun.clear()
    await lose(wire, app, world, array(wire, "pay", "charge"))
    told = await wire.post(array(wire, "pay", "charge")).told()
    assert [each.value["number"] for each in told] == [3, 4]
    assert world.effects == [5, 6, 5, 6]


async def test_array_is_lost_with_its_pipe(new_app: NewApp, wires: Wires, world: World) -> None:
    """The answer to another call finds that the peer is gone.

    So the array is cancelled, answers included.
    """
    app = new_app()
    app.command(name="pay")(world.charge)
    app.command(name="charge")(world.held_after)
    app.query(name="look")(lambda: 1)
    wire = PipeWire(app, "")
    await wire.open()
    marks = await watch(app, "deliver")
    wire.post(array(wire, "pay", "charge"))
    await soon(world.begun)
    wire.stop_reading()
    wire.send("look")
    await next_of(marks)
    await wire.leave()
    world.gate.set()
    await wire.open()
    told = await wire.post(array(wire, "pay", "charge")).told()
    await wire.close()
    assert [each.value["number"] for each in told] == [1, 2]
    assert world.effects == [5, 6]


@pytest.mark.parametrize("way", ARRAYS)
async def test_array_entries_that_are_equal_are_separate_calls(
    way: str, new_app: NewApp, wires: Wires, world: World
) -> None:
    app = new_app(**known(way))
    app.command(name="charge")(world.charge)
    wire = await wires(way, app)
    told = await wire.post([wire.message("charge", PARAMS, id) for id in (101, 102, 103)]).told()
    assert [each.value["number"] for each in told] == [1, 2, 3]


@pytest.mark.parametrize("way", ARRAYS)
async def test_array_entries_do_not_wait_for_each_other(
    way: str, new_app: NewApp, wires: Wires, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All entries have one caller, so it has not left."""
    monkeypatch.setattr(receipts, "NOTICED_AFTER", 3600.0)
    app = new_app(**known(way))
    app.command(name="charge")(world.charge)
    wire = await wires(way, app)
    told = await wire.post([wire.message("charge", PARAMS, id) for id in (101, 102)]).told()
    assert [each.value["number"] for each in told] == [1, 2]


@pytest.mark.parametrize("way", ["/rpc", *LEGACY])
async def test_call_does_not_run_if_its_repetition_overtook_it(
    way: str,
    new_app: NewApp,
    wires: Wires,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A new connection may be slower than an old one.

    There, a caller that leaves has not cancelled its call.
    """
    monkeypatch.setattr(receipts, "NOTICED_AFTER", 3600.0)
    refused = asyncio.Event()

    class Refusals(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if getattr(record, "code", None) == KeyInProgress.CODE:
                refused.set()

    app = new_app(**known(way))
    app.command(name="charge")(world.held_after)
    wire = await wires(way, app)
    log = logging.getLogger("wirecall")
    handler = Refusals()
    caplog.set_level(logging.INFO, "wirecall")
    log.addHandler(handler)
    try:
        repetition = wire.send("charge", PARAMS)
        await soon(world.begun)
        overtaken = wire.send("charge", PARAMS)
        await overtaken.leave()
        await soon(refused)
    finally:
        log.removeHandler(handler)
    world.gate.set()
    assert (await repetition.told()).value == FIRST
    # The repetition was delivered, so this is a new call.
    assert (await wire.call("charge", PARAMS)).value == SECOND
