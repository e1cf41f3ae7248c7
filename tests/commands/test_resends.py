"""A caller that gives up silently, and sends the call again on the same session or pipe:
`resend_after`.

Such a client does not cancel its call and does not close a connection (the official Python SDK
1.x), so nothing shows the loss. The clock is the loop's, which the tests advance.
"""

import asyncio
from typing import Any

import pytest

from tests.calls import make_app
from tests.clock import LoopClock
from tests.commands.charges import PARAMS, Effects, NewApp, World, transactional, watch
from tests.commands.wires import (
    HTTP,
    PIPES,
    STATELESS,
    PipeWire,
    Sent,
    Told,
    Wire,
    Wires,
    authenticate,
    known,
)
from tests.mcp.asgi import LEGACY, PATIENCE, R2, R4
from wirecall import App, Context, DomainError
from wirecall.errors import UsageError
from wirecall.ledger.base import Ledger, Record

SESSIONS = tuple(way for way in LEGACY if way in HTTP)
IN_MEMORY = pytest.mark.parametrize("store", ["memory"], indirect=True)

FIRST = {"charged": 5, "number": 1}
SECOND = {"charged": 5, "number": 2}
NEW = Told(FIRST)
REPLAY = Told(FIRST, is_replayed=True, is_recognised=True)


def replay_on(way: str) -> Told:
    """Plain lines have no place for the marks."""
    return NEW if way == "pipe" else REPLAY


async def soon(event: asyncio.Event) -> None:
    async with asyncio.timeout(PATIENCE):
        await event.wait()


async def next_of(heard: "asyncio.Queue[Any]") -> Any:
    async with asyncio.timeout(PATIENCE):
        return await heard.get()


class Resender:
    """One caller that sends equal calls, and never leaves."""

    def __init__(self, app: App, wire: Wire, world: World, clock: LoopClock) -> None:
        self._app = app
        self._wire = wire
        self._world = world
        self._clock = clock
        self.sent: list[Sent] = []

    async def first(self) -> None:
        self.sent.append(self._wire.send("charge", PARAMS))
        await soon(self._world.begun)
        self._world.begun.clear()

    async def again(self, seconds: float) -> None:
        """Send the call again so many seconds later; return when the server has recognised it."""
        marks = await watch(self._app, "deliver")
        self._clock.advance(seconds)
        self.sent.append(self._wire.send("charge", PARAMS))
        await next_of(marks)

    async def told(self) -> list[Told]:
        self._world.gate.set()
        return [await each.told() for each in self.sent]


# --- on every session and pipe --------------------------------------------------------------------


@IN_MEMORY
@pytest.mark.parametrize("way", [*SESSIONS, *PIPES])
async def test_resend_on_the_same_session_is_the_first_call(
    way: str, new_app: NewApp, wires: Wires, world: World, clock: LoopClock
) -> None:
    app = new_app()
    app.command(name="charge")(world.held_after)
    wire = await wires(way, app)
    caller = Resender(app, wire, world, clock)
    await caller.first()
    await caller.again(2.5)
    assert await caller.told() == [NEW, replay_on(way)]
    assert world.effects == [5]
    # Both answers were written, so this is intended.
    assert (await wire.call("charge", PARAMS)) == Told(SECOND)


async def test_resend_is_the_first_call_on_every_ledger(
    new_app: NewApp, wires: Wires, world: World, clock: LoopClock, ledger: Ledger
) -> None:
    app = new_app()
    app.command(name="charge")(world.held_after)
    wire = await wires(R4, app)
    caller = Resender(app, wire, world, clock)
    await caller.first()
    await caller.again(2.5)
    await caller.again(2.5)
    assert await caller.told() == [NEW, REPLAY, REPLAY]
    assert (await wire.call("charge", PARAMS)) == Told(SECOND)
    assert len(await ledger.list()) == 2


@IN_MEMORY
@pytest.mark.parametrize("way", [R4, f"pipe {R4}"])
async def test_resend_counts_from_the_first_call(
    way: str, new_app: NewApp, wires: Wires, world: World, clock: LoopClock
) -> None:
    """The third call arrives soon after the second, and long after the first, which still runs."""
    app = new_app()
    app.command(name="charge")(world.held_after)
    caller = Resender(app, await wires(way, app), world, clock)
    await caller.first()
    await caller.again(2.5)
    await caller.again(0.1)
    assert await caller.told() == [NEW, REPLAY, REPLAY]
    assert world.effects == [5]


@transactional
async def test_resend_of_a_transaction_is_the_first_call(
    new_app: NewApp, wires: Wires, world: World, clock: LoopClock, effects: Effects
) -> None:
    app = new_app()

    @app.command(name="charge", on_crash="transactional", wait=PATIENCE)
    async def handler(cents: int, ctx: Context) -> Any:
        number = await effects.add(ctx, cents)
        world.begun.set()
        await world.gate.wait()
        return {"charged": cents, "number": number}

    wire = await wires(f"pipe {R4}", app)
    first = wire.send("charge", PARAMS)
    await soon(world.begun)
    clock.advance(2.5)
    again = wire.send("charge", PARAMS)
    assert "tools" in str(await list_tools(wire))  # the line before has been read
    world.gate.set()
    assert [await first.told(), await again.told()] == [NEW, REPLAY]
    assert await wire.call("charge", PARAMS) == Told(SECOND)
    assert effects.all == [5, 5]


async def list_tools(wire: Wire) -> Any:
    assert isinstance(wire, PipeWire)
    message = {"jsonrpc": "2.0", "id": next(wire.ids), "method": "tools/list", "params": {}}
    async with asyncio.timeout(PATIENCE):
        return await wire._exchange(message)


# --- what is not a resend -------------------------------------------------------------------------


async def two_runs(first: Sent, wire: Wire, world: World) -> list[Told]:
    """An equal call starts its own run."""
    second = wire.send("charge", PARAMS)
    await soon(world.begun)
    world.gate.set()
    return [await first.told(), await second.told()]


@IN_MEMORY
@pytest.mark.parametrize("way", [R4, f"pipe {R4}", "pipe"])
@pytest.mark.parametrize(("resend_after", "seconds"), [(2.0, 1.0), (10.0, 5.0), ("off", 500.0)])
async def test_resend_before_its_time_is_a_new_call(
    way: str,
    resend_after: Any,
    seconds: float,
    new_app: NewApp,
    wires: Wires,
    world: World,
    clock: LoopClock,
) -> None:
    app = new_app()
    app.command(name="charge", resend_after=resend_after)(world.held_after)
    wire = await wires(way, app)
    first = wire.send("charge", PARAMS)
    await soon(world.begun)
    world.begun.clear()
    clock.advance(seconds)
    assert await two_runs(first, wire, world) == [NEW, Told(SECOND)]


@IN_MEMORY
@pytest.mark.parametrize("way", STATELESS)
@pytest.mark.parametrize(
    ("options", "caller"), [({"authenticate": authenticate}, "alice"), ({"single_user": True}, "")]
)
async def test_resend_without_a_session_is_a_new_call(
    way: str,
    options: Any,
    caller: str,
    new_app: NewApp,
    wires: Wires,
    world: World,
    clock: LoopClock,
) -> None:
    """For an authenticated caller, and for the single user: requests of stateless HTTP have no
    session.
    """
    app = new_app(**options)
    app.command(name="charge")(world.held_after)
    wire = await wires(way, app, caller)
    first = wire.send("charge", PARAMS)
    await soon(world.begun)
    world.begun.clear()
    clock.advance(5)
    assert await two_runs(first, wire, world) == [NEW, Told(SECOND)]


@IN_MEMORY
@pytest.mark.parametrize("way", SESSIONS)
async def test_resend_on_another_session_is_a_new_call(
    way: str, new_app: NewApp, wires: Wires, world: World, clock: LoopClock
) -> None:
    """Also where the caller of both is known to be one."""
    app = new_app(authenticate=authenticate)
    app.command(name="charge")(world.held_after)
    one, other = [await wires(way, app) for _ in range(2)]
    first = one.send("charge", PARAMS)
    await soon(world.begun)
    world.begun.clear()
    clock.advance(5)
    assert await two_runs(first, other, world) == [NEW, Told(SECOND)]


@IN_MEMORY
@pytest.mark.parametrize("way", [R2, "pipe", f"pipe {R2}"])
async def test_resend_is_not_another_entry_of_the_same_array(
    way: str, new_app: NewApp, wires: Wires, world: World, clock: LoopClock
) -> None:
    """Even if the server starts it late."""
    app = new_app(**known(way))

    @app.command(name="charge", execution="parallel")
    async def handler(cents: int, ctx: Context) -> Any:
        clock.advance(5)
        return world.act(cents)

    wire = await wires(way, app)
    told = await wire.post([wire.message("charge", PARAMS, id) for id in (101, 102, 103)]).told()
    assert sorted(each.value["number"] for each in told) == [1, 2, 3]


@IN_MEMORY
async def test_resend_after_the_answer_is_a_new_call(
    new_app: NewApp, wires: Wires, world: World, clock: LoopClock
) -> None:
    app = new_app()
    app.command(name="charge")(world.charge)
    wire = await wires(R4, app)
    for number in range(1, 4):
        assert (await wire.call("charge", PARAMS)).value["number"] == number
        clock.advance(5)


# --- several calls, and losses --------------------------------------------------------------------


@IN_MEMORY
@pytest.mark.parametrize("way", [R4, f"pipe {R4}"])
async def test_resend_of_two_intended_calls_repeats_each_once(
    way: str, new_app: NewApp, wires: Wires, world: World, clock: LoopClock
) -> None:
    app = new_app()
    app.command(name="charge")(world.held_after)
    caller = Resender(app, await wires(way, app), world, clock)
    await caller.first()
    await caller.first()
    await caller.again(5)
    await caller.again(0.1)
    told = await caller.told()
    assert told == [NEW, Told(SECOND), REPLAY, Told(SECOND, is_replayed=True, is_recognised=True)]


@IN_MEMORY
@pytest.mark.parametrize("way", SESSIONS)
async def test_resend_that_is_lost_is_recognised_by_its_loss(
    way: str, new_app: NewApp, wires: Wires, world: World, clock: LoopClock
) -> None:
    """The caller ignores the answer to its first call, so only the last one counts."""
    app = new_app()
    app.command(name="charge")(world.held_after)
    wire = await wires(way, app)
    caller = Resender(app, wire, world, clock)
    await caller.first()
    await caller.again(2.5)
    marks = await watch(app, "deliver")
    await caller.sent.pop().leave()
    await next_of(marks)
    assert await caller.told() == [NEW]
    assert await wire.call("charge", PARAMS) == REPLAY
    assert await wire.call("charge", PARAMS) == Told(SECOND)


@pytest.mark.parametrize("way", [R4, f"pipe {R4}"])
async def test_resend_runs_if_the_first_call_did_nothing(
    way: str, new_app: NewApp, wires: Wires, world: World, clock: LoopClock
) -> None:
    """The first call is cancelled before its commit point, after its repetition has arrived."""
    app = new_app()
    app.command(name="charge")(world.held_before)
    wire = await wires(way, app)
    wire.send("charge", PARAMS, id=77)
    await soon(world.begun)
    world.begun.clear()
    marks = await watch(app, "deliver")
    clock.advance(2.5)
    again = wire.send("charge", PARAMS)
    await next_of(marks)
    await wire.cancel(77)
    await soon(world.begun)
    world.gate.set()
    assert (await again.told()).value == FIRST
    assert world.effects == [5]


@pytest.mark.parametrize("way", [R4, f"pipe {R4}"])
async def test_resend_gets_the_error_of_the_first_call(
    way: str, new_app: NewApp, wires: Wires, world: World, clock: LoopClock
) -> None:
    app = new_app()

    @app.command(name="charge")
    async def handler(cents: int, ctx: Context) -> Any:
        await world.held_after(cents, ctx)
        raise DomainError(4020, "not enough money")

    caller = Resender(app, await wires(way, app), world, clock)
    await caller.first()
    await caller.again(2.5)
    told = await caller.told()
    assert [each.error["code"] for each in told] == [4020, 4020]
    assert [each.is_recognised for each in told] == [False, True]
    assert world.effects == [5]


@pytest.mark.parametrize("resends", [1, 2, 3])
async def test_resend_before_the_first_claim_is_answered_waits_for_it(
    resends: int,
    new_app: NewApp,
    wires: Wires,
    world: World,
    clock: LoopClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the ledger saw the repetition first, it would grant both."""
    app = new_app()
    app.command(name="charge", wait=PATIENCE)(world.charge)
    wire = await wires(f"pipe {R4}", app)
    handle = await app.ledger()
    claim = handle.claim
    asked = asyncio.Event()
    gate = asyncio.Event()

    async def late(wanted: Any) -> Record:
        monkeypatch.setattr(handle, "claim", claim)
        asked.set()
        await gate.wait()
        return await claim(wanted)

    monkeypatch.setattr(handle, "claim", late)
    sent = [wire.send("charge", PARAMS)]
    await soon(asked)
    for _ in range(resends):
        clock.advance(2.5)
        sent.append(wire.send("charge", PARAMS))
        await list_tools(wire)  # the line before has been read
    gate.set()
    told = [await each.told() for each in sent]
    assert world.effects == [5]
    assert told[-1] == REPLAY


@IN_MEMORY
async def test_resends_at_once_are_all_the_first_call(
    new_app: NewApp, wires: Wires, world: World, clock: LoopClock
) -> None:
    app = new_app()
    app.command(name="charge", wait=PATIENCE)(world.held_after)
    wire = await wires(f"pipe {R4}", app)
    first = wire.send("charge", PARAMS)
    await soon(world.begun)
    clock.advance(2.5)
    sent = [wire.send("charge", PARAMS) for _ in range(10)]
    await list_tools(wire)
    world.gate.set()
    assert await first.told() == NEW
    assert [await each.told() for each in sent] == [REPLAY] * 10
    assert world.effects == [5]


# --- the option -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0, -1, "never", None, True])
def test_resend_after_is_checked(wrong: Any) -> None:
    app = make_app()
    with pytest.raises(
        UsageError, match='resend_after must be a number of seconds above 0 or "off"'
    ):
        app.command(name="charge", resend_after=wrong)(lambda cents: cents)
