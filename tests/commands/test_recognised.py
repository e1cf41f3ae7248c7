"""A call without a key that repeats one whose answer was lost is that call; over every ledger.

The callers are authenticated ones of /rpc, where a caller that leaves does not end its call. How each transport finds a loss
is in test_losses.
"""

import asyncio
import json
import os
from typing import Any

import pytest

from tests.commands.charges import PARAMS, PRINT, Effects, NewApp, World, transactional, watch
from tests.commands.wires import Told, Wire, Wires, authenticate
from tests.ledger import LEASE, claim_of, outcome_of
from tests.mcp.asgi import PATIENCE
from tests.servers import Store
from wirecall import App, Context, DomainError
from wirecall.commands.delivery import origin_of
from wirecall.errors import Busy
from wirecall.ledger.base import Claim, Keyless, Ledger, Record, RecordId

FIRST = Told({"charged": 5, "number": 1})
SECOND = Told({"charged": 5, "number": 2})
REPLAY = FIRST._replace(is_replayed=True)


@pytest.fixture
def app(new_app: NewApp) -> App:
    return new_app(authenticate=authenticate)


@pytest.fixture
async def alice(app: App, wires: Wires) -> Wire:
    return await wires("/rpc", app)


@pytest.fixture
async def elsewhere(new_app: NewApp, wires: Wires, world: World) -> Wire:
    """The same caller, in another process."""
    other = new_app(authenticate=authenticate)
    other.command(name="charge", wait=PATIENCE)(world.charge)
    return await wires("/rpc", other)


async def next_of(heard: "asyncio.Queue[Any]") -> Any:
    async with asyncio.timeout(PATIENCE):
        return await heard.get()


async def lose(wire: Wire, app: App, world: World) -> None:
    """Send a call whose handler waits, and leave; return when the ledger knows of the loss."""
    marks = await watch(app, "deliver")
    world.gate.clear()
    world.begun.clear()
    lost = wire.send("charge", PARAMS)
    async with asyncio.timeout(PATIENCE):
        await world.begun.wait()
    await lost.leave()
    await next_of(marks)


async def finish(app: App, world: World) -> None:
    """Let the handler come to its end, and wait until the ledger knows of it."""
    ends = await watch(app, "complete")
    world.gate.set()
    assert await next_of(ends)


async def undelivered(ledger: Ledger) -> Record:
    """The one record whose answer was lost."""
    (record,) = [record for record in await ledger.list() if record.delivery == "undelivered"]
    return record


# --- the match ------------------------------------------------------------------------------------------------------


async def test_a_call_whose_answer_was_lost_is_recognised(app: App, alice: Wire, world: World) -> None:
    app.command(name="charge")(world.held_after)
    await lose(alice, app, world)
    await finish(app, world)
    assert await alice.call("charge", PARAMS) == REPLAY
    assert world.effects == [5]


async def test_a_call_whose_answer_was_delivered_is_a_new_one(app: App, alice: Wire, world: World, ledger: Ledger) -> None:
    """Before the ledger knows of the delivery, and afterwards."""
    app.command(name="charge")(world.charge)
    marks = await watch(app, "deliver")
    assert await alice.call("charge", PARAMS) == FIRST
    assert await alice.call("charge", PARAMS) == SECOND
    await next_of(marks)
    assert "written" in [record.delivery for record in await ledger.list()]
    assert (await alice.call("charge", PARAMS)).value["number"] == 3


async def test_a_lost_call_serves_one_repetition(app: App, alice: Wire, world: World) -> None:
    app.command(name="charge")(world.held_after)
    await lose(alice, app, world)
    await finish(app, world)
    assert await alice.call("charge", PARAMS) == REPLAY
    assert await alice.call("charge", PARAMS) == SECOND


async def test_of_two_repetitions_at_once_one_is_recognised(app: App, alice: Wire, world: World) -> None:
    app.command(name="charge")(world.held_after)
    await lose(alice, app, world)
    await finish(app, world)
    told = await asyncio.gather(*(alice.call("charge", PARAMS) for _ in range(2)))
    assert sorted(told, key=str) == [REPLAY, SECOND]
    assert world.effects == [5, 5]


async def test_of_two_repetitions_at_once_in_two_processes_one_is_recognised(
    app: App, alice: Wire, elsewhere: Wire, world: World
) -> None:
    app.command(name="charge", wait=PATIENCE)(world.held_after)
    await lose(alice, app, world)
    await finish(app, world)
    told = await asyncio.gather(*(wire.call("charge", PARAMS) for wire in (alice, elsewhere)))
    assert sorted(told, key=str) == [REPLAY, SECOND]
    assert world.effects == [5, 5]


async def test_a_repetition_may_be_lost_too(app: App, alice: Wire, world: World) -> None:
    """All of them wait for the first run, and the last one hears of it."""
    app.command(name="charge")(world.held_after)
    await lose(alice, app, world)
    for _ in range(3):
        claims, marks = await watch(app, "claim"), await watch(app, "deliver")
        again = alice.send("charge", PARAMS)
        await next_of(claims)
        await again.leave()
        await next_of(marks)
    last = alice.send("charge", PARAMS)
    await finish(app, world)
    assert await last.told() == REPLAY
    assert world.effects == [5]


async def test_another_caller_is_not_recognised(app: App, alice: Wire, wires: Wires, world: World) -> None:
    app.command(name="charge")(world.held_after)
    await lose(alice, app, world)
    await finish(app, world)
    bob = await wires("/rpc", app, "bob")
    assert await bob.call("charge", PARAMS) == SECOND
    assert await alice.call("charge", PARAMS) == REPLAY


async def test_other_params_and_other_methods_are_other_calls(app: App, alice: Wire, world: World) -> None:
    app.command(name="charge")(world.held_after)
    app.command(name="refund")(world.charge)
    await lose(alice, app, world)
    await finish(app, world)
    assert not (await alice.call("charge", {"cents": 6})).is_replayed
    assert not (await alice.call("refund", PARAMS)).is_replayed
    # As for a key, `_meta` has no part in the params.
    assert await alice.call("charge", {**PARAMS, "_meta": {"traceparent": "x"}}) == REPLAY


async def test_the_window_counts_from_the_loss(app: App, alice: Wire, world: World, store: Store, ledger: Ledger) -> None:
    app.command(name="charge", loss_window=60)(world.held_after)
    await lose(alice, app, world)
    await finish(app, world)
    store.age((await undelivered(ledger)).id, 50)
    assert await alice.call("charge", PARAMS) == REPLAY
    await lose(alice, app, world)
    await finish(app, world)
    store.age((await undelivered(ledger)).id, 61)
    assert (await alice.call("charge", PARAMS)).value["number"] == 3


async def test_a_call_that_still_runs_is_recognised_however_long_it_runs(
    app: App, alice: Wire, world: World, store: Store, ledger: Ledger
) -> None:
    app.command(name="charge", loss_window=60, lease=1000)(world.held_after)
    await lose(alice, app, world)
    store.age((await undelivered(ledger)).id, 500)
    claims = await watch(app, "claim")
    again = alice.send("charge", PARAMS)
    await next_of(claims)
    await finish(app, world)
    assert await again.told() == REPLAY


@pytest.mark.parametrize("losses", [1, 2, 3])
async def test_a_repetition_that_comes_before_the_first_claim_is_answered_waits_for_it(
    losses: int, app: App, alice: Wire, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the ledger saw the repetition first, it would grant both. One that is lost as well does not wait for itself."""
    app.command(name="charge")(world.charge)
    handle = await app.ledger()
    claim, asked, gate = handle.claim, asyncio.Event(), asyncio.Event()

    async def late(wanted: Any) -> Record:
        monkeypatch.setattr(handle, "claim", claim)
        asked.set()
        await gate.wait()
        return await claim(wanted)

    monkeypatch.setattr(handle, "claim", late)
    for _ in range(losses):
        lost = alice.send("charge", PARAMS)
        async with asyncio.timeout(PATIENCE):
            await asked.wait()
        await app.handle(b'{"jsonrpc":"2.0","method":"charge","params":{"cents":1},"id":1}')  # a moment to get there
        await lost.leave()
    again = alice.send("charge", PARAMS)
    await app.handle(b'{"jsonrpc":"2.0","method":"charge","params":{"cents":1},"id":1}')  # it would overtake
    gate.set()
    assert (await again.told()).is_replayed
    assert sorted(world.effects) == [*[1] * (losses + 1), 5]


# --- the answer of a repetition -------------------------------------------------------------------------------------


async def test_a_repetition_waits_for_the_first_run(app: App, alice: Wire, world: World) -> None:
    app.command(name="charge")(world.held_after)
    await lose(alice, app, world)
    claims = await watch(app, "claim")
    again = alice.send("charge", PARAMS)
    await next_of(claims)
    await finish(app, world)
    assert await again.told() == REPLAY
    assert world.effects == [5]


async def test_a_repetition_waits_for_the_first_run_in_another_process(
    app: App, alice: Wire, elsewhere: Wire, world: World
) -> None:
    app.command(name="charge")(world.held_after)
    await lose(alice, app, world)
    again = elsewhere.send("charge", PARAMS)
    await finish(app, world)
    assert await again.told() == REPLAY
    assert world.effects == [5]


async def test_a_repetition_that_shall_come_again_has_not_got_the_answer(app: App, alice: Wire, world: World) -> None:
    """The first run takes longer than a repetition waits. The next repetition is recognised all the same."""
    app.command(name="charge", wait=0.01)(world.held_after)
    await lose(alice, app, world)
    for _ in range(2):
        refused = await alice.call("charge", PARAMS)
        assert (refused.error["code"], refused.error["data"]["ran"]) == (40910, "unknown")
    await finish(app, world)
    assert await alice.call("charge", PARAMS) == REPLAY
    assert world.effects == [5]


async def test_a_lost_error_of_a_call_that_has_no_record_holds_up_no_other(
    app: App, alice: Wire, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger has not answered the claim, and will not: a repetition must not wait for that."""
    app.command(name="charge")(world.charge)
    app.query(name="text")(lambda: "a" * 1_000_000)  # in one message with it, so that the caller can leave in the middle
    ledger = await app.ledger()

    async def broken(claim: Claim) -> Record:
        raise ValueError("a fault of the store")

    with monkeypatch.context() as patch:
        patch.setattr(ledger, "claim", broken)
        lost = alice.post([alice.message("charge", PARAMS, 1), alice.message("text", {}, 2)])
        lost.pause()
        await lost.is_full()
        await lost.leave()
        with pytest.raises(json.JSONDecodeError):
            await lost.told()
    assert await alice.call("charge", PARAMS) == FIRST


async def test_a_recorded_error_is_repeated(app: App, alice: Wire, world: World) -> None:
    @app.command(name="charge")
    async def handler(cents: int, ctx: Context) -> Any:
        await world.held_after(cents, ctx)
        raise DomainError(40001, "no money")

    await lose(alice, app, world)
    await finish(app, world)
    error = {"code": 40001, "message": "no money", "data": {"replayed": True}}
    assert await alice.call("charge", PARAMS) == Told(error=error, is_replayed=True)
    assert world.effects == [5]


async def test_an_unknown_outcome_is_an_error(app: App, alice: Wire, world: World) -> None:
    @app.command(name="charge")
    async def handler(cents: int, ctx: Context) -> Any:
        await world.held_after(cents, ctx)
        raise ValueError("in the middle")

    await lose(alice, app, world)
    ends = await watch(app, "abandon")
    world.gate.set()
    assert await next_of(ends)
    told = await alice.call("charge", PARAMS)
    assert (told.error["code"], told.error["data"]["type"]) == (50910, "outcome_unknown")
    assert world.effects == [5]


async def test_what_was_released_runs(app: App, alice: Wire, world: World, ledger: Ledger) -> None:
    """The first run refuses the call: nothing was done. There is nothing left that a repetition could be."""

    @app.command(name="charge")
    async def handler(cents: int, ctx: Context) -> Any:
        if not world.begun.is_set():
            world.begun.set()
            await world.gate.wait()
            raise Busy
        return await world.charge(cents, ctx)

    await lose(alice, app, world)
    ends = await watch(app, "release")
    world.gate.set()
    assert await next_of(ends)
    assert await ledger.list() == []
    assert await alice.call("charge", PARAMS) == FIRST


async def test_a_repetition_that_runs_in_place_of_the_first_is_recognised_if_it_is_lost(
    app: App, alice: Wire, world: World
) -> None:
    """It waits for the first run, which refuses the call. So it runs itself, and its own answer is lost."""
    second = asyncio.Event()

    @app.command(name="charge")
    async def handler(cents: int, ctx: Context) -> Any:
        if not world.begun.is_set():
            world.begun.set()
            await world.gate.wait()
            raise Busy
        second.set()
        await held.wait()
        return await world.charge(cents, ctx)

    held = asyncio.Event()
    await lose(alice, app, world)
    claims, marks, ends = await watch(app, "claim"), await watch(app, "deliver"), await watch(app, "complete")
    again = alice.send("charge", PARAMS)
    await next_of(claims)
    world.gate.set()
    async with asyncio.timeout(PATIENCE):
        await second.wait()
    await again.leave()
    await next_of(marks)
    held.set()
    await next_of(ends)
    assert await alice.call("charge", PARAMS) == REPLAY
    assert world.effects == [5]


# --- a process that dies --------------------------------------------------------------------------------------------


async def die(ledger: Ledger, store: Store, *, ago: float, done: bool, **fields: Any) -> Record:
    """A call of another process, which died when its handler ran, or before its answer was written."""
    origin = origin_of("alice", None, "charge")
    assert origin is not None
    keyless = Keyless(origin + PRINT[:8], 120)
    id = RecordId("alice", "charge", keyless.make_key(os.urandom(16)))
    record = await ledger.claim(claim_of(id, fingerprint=PRINT, keyless=keyless, **fields))
    if done:
        assert await ledger.complete(record.token, outcome_of(b'{"charged":5,"number":1}'), 1000)
    store.age(id, ago)
    return record


async def test_an_answer_that_died_with_its_process_is_undelivered(
    app: App, alice: Wire, world: World, store: Store, ledger: Ledger
) -> None:
    app.command(name="charge")(world.charge)
    await die(ledger, store, ago=LEASE + 1, done=True)
    assert await alice.call("charge", PARAMS) == REPLAY
    assert world.effects == []


async def test_an_answer_is_waited_for_while_its_process_may_live(
    app: App, alice: Wire, world: World, store: Store, ledger: Ledger
) -> None:
    app.command(name="charge", wait=0.01)(world.charge)
    record = await die(ledger, store, ago=1, done=True)
    assert (await alice.call("charge", PARAMS)).error["code"] == 40910
    store.age(record.id, LEASE)
    assert await alice.call("charge", PARAMS) == REPLAY
    assert world.effects == []


async def test_a_run_that_died_past_its_commit_point_is_unknown(
    app: App, alice: Wire, world: World, store: Store, ledger: Ledger
) -> None:
    app.command(name="charge")(world.charge)
    await die(ledger, store, ago=LEASE + 1, done=False)
    assert (await alice.call("charge", PARAMS)).error["code"] == 50910
    assert world.effects == []


@pytest.mark.parametrize("terms", [{"on_crash": "rerun"}, {"commit_point": True}], ids=repr)
async def test_a_run_that_died_is_run_again_if_that_is_safe(
    app: App, alice: Wire, world: World, store: Store, ledger: Ledger, terms: Any
) -> None:
    """It is the same call, with the same key: so says `ctx.attempt` to the handler."""
    app.command(name="charge", **terms)(world.charge)
    claimed = {"committed": "commit_point" not in terms, "on_crash": terms.get("on_crash", "unknown")}
    died = await die(ledger, store, ago=LEASE + 1, done=False, **claimed)
    assert await alice.call("charge", PARAMS) == FIRST
    (context,) = world.seen
    assert (context.attempt, context.idempotency_key) == (2, died.id.key)


async def test_a_run_that_died_long_ago_matches_nothing(
    app: App, alice: Wire, world: World, store: Store, ledger: Ledger
) -> None:
    app.command(name="charge")(world.charge)
    await die(ledger, store, ago=LEASE + 121, done=False)
    assert await alice.call("charge", PARAMS) == FIRST


# --- transactions ---------------------------------------------------------------------------------------------------


@transactional
async def test_a_transaction_without_a_key_is_recognised(app: App, alice: Wire, world: World, effects: Effects) -> None:
    """Its answer is lost while it is open, when there is no record yet that could be marked."""

    @app.command(name="charge", on_crash="transactional")
    async def handler(cents: int, ctx: Context) -> Any:
        number = await effects.add(ctx, cents)
        world.begun.set()
        await world.gate.wait()
        return {"charged": cents, "number": number}

    lost = alice.send("charge", PARAMS)
    async with asyncio.timeout(PATIENCE):
        await world.begun.wait()
    await lost.leave()
    marks = await watch(app, "deliver")
    again = alice.send("charge", PARAMS)  # its request is read after the first one's end
    assert marks.empty()
    world.gate.set()
    assert await again.told() == REPLAY
    assert await alice.call("charge", PARAMS) == SECOND
    assert effects.all == [5, 5]


@transactional
async def test_a_transaction_that_was_undone_runs_again(app: App, alice: Wire, world: World, effects: Effects) -> None:
    @app.command(name="charge", on_crash="transactional")
    async def handler(cents: int, ctx: Context) -> Any:
        number = await effects.add(ctx, cents)
        world.begun.set()
        await world.gate.wait()
        world.act(cents)
        if len(world.effects) == 1:
            raise ValueError("undone")
        return {"charged": cents, "number": number}

    lost = alice.send("charge", PARAMS)
    async with asyncio.timeout(PATIENCE):
        await world.begun.wait()
    await lost.leave()
    again = alice.send("charge", PARAMS)
    world.gate.set()
    assert await again.told() == FIRST
    assert (effects.all, world.effects) == ([5], [5, 5])
