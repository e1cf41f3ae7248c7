"""A call without a key that repeats one with a lost answer is that call; over every ledger.

The callers are authenticated ones of /rpc, where a caller that leaves does not end its call.
test_losses covers how each transport finds a loss.
"""

import asyncio
import json
import os
from typing import Any

import pytest

from tests.clock import LoopClock
from tests.commands.charges import PARAMS, PRINT, Effects, NewApp, World, transactional, watch
from tests.commands.wires import Told, Wire, Wires, authenticate
from tests.ledger import LEASE, claim_of, outcome_of
from tests.mcp.asgi import PATIENCE
from tests.servers import Store
from wirecall import App, Context, DomainError
from wirecall.commands.receipts import origin_of
from wirecall.errors import Busy
from wirecall.ledger.base import Claim, Keyless, Ledger, LedgerDown, Record, RecordId

FIRST = Told({"charged": 5, "number": 1})
SECOND = Told({"charged": 5, "number": 2})
REPLAY = FIRST._replace(is_replayed=True)
WINDOW = 120.0  # seconds, the default of commands


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
    """Send a call whose handler waits, and leave; return when the ledger has recorded the loss."""
    marks = await watch(app, "deliver")
    world.gate.clear()
    world.begun.clear()
    lost = wire.send("charge", PARAMS)
    async with asyncio.timeout(PATIENCE):
        await world.begun.wait()
    await lost.leave()
    await next_of(marks)


async def finish(app: App, world: World) -> None:
    """Let the handler end, and wait until the ledger has recorded it."""
    ends = await watch(app, "complete")
    world.gate.set()
    assert await next_of(ends)


async def undelivered(ledger: Ledger) -> Record:
    """The one record whose answer was lost."""
    (record,) = [record for record in await ledger.list() if record.delivery == "undelivered"]
    return record


# --- the match ------------------------------------------------------------------------------------


async def test_call_with_a_lost_answer_is_recognised(app: App, alice: Wire, world: World) -> None:
    app.command(name="charge")(world.held_after)
    await lose(alice, app, world)
    await finish(app, world)
    assert await alice.call("charge", PARAMS) == REPLAY
    assert world.effects == [5]


async def test_call_with_a_delivered_answer_is_not_matched(
    app: App, alice: Wire, world: World, ledger: Ledger
) -> None:
    """Before the ledger has recorded the delivery, and afterwards."""
    app.command(name="charge")(world.charge)
    marks = await watch(app, "deliver")
    assert await alice.call("charge", PARAMS) == FIRST
    assert await alice.call("charge", PARAMS) == SECOND
    await next_of(marks)
    assert "written" in [record.delivery for record in await ledger.list()]
    assert (await alice.call("charge", PARAMS)).value["number"] == 3


async def test_lost_call_matches_one_repetition(app: App, alice: Wire, world: World) -> None:
    app.command(name="charge")(world.held_after)
    await lose(alice, app, world)
    await finish(app, world)
    assert await alice.call("charge", PARAMS) == REPLAY
    assert await alice.call("charge", PARAMS) == SECOND


async def test_repetitions_at_once_match_once(app: App, alice: Wire, world: World) -> None:
    app.command(name="charge")(world.held_after)
    await lose(alice, app, world)
    await finish(app, world)
    told = await asyncio.gather(*(alice.call("charge", PARAMS) for _ in range(2)))
    assert sorted(told, key=str) == [REPLAY, SECOND]
    assert world.effects == [5, 5]


async def test_repetitions_at_once_in_two_processes_match_once(
    app: App, alice: Wire, elsewhere: Wire, world: World
) -> None:
    app.command(name="charge", wait=PATIENCE)(world.held_after)
    await lose(alice, app, world)
    await finish(app, world)
    told = await asyncio.gather(*(wire.call("charge", PARAMS) for wire in (alice, elsewhere)))
    assert sorted(told, key=str) == [REPLAY, SECOND]
    assert world.effects == [5, 5]


async def test_repetition_may_be_lost_too(app: App, alice: Wire, world: World) -> None:
    """All of them wait for the first run, and the last one receives its answer."""
    app.command(name="charge")(world.held_after)
    await lose(alice, app, world)
    for _ in range(3):
        claims = await watch(app, "claim")
        marks = await watch(app, "deliver")
        again = alice.send("charge", PARAMS)
        await next_of(claims)
        await again.leave()
        await next_of(marks)
    last = alice.send("charge", PARAMS)
    await finish(app, world)
    assert await last.told() == REPLAY
    assert world.effects == [5]


async def test_another_caller_is_not_recognised(
    app: App, alice: Wire, wires: Wires, world: World
) -> None:
    app.command(name="charge")(world.held_after)
    await lose(alice, app, world)
    await finish(app, world)
    bob = await wires("/rpc", app, "bob")
    assert await bob.call("charge", PARAMS) == SECOND
    assert await alice.call("charge", PARAMS) == REPLAY


async def test_other_params_and_other_methods_are_other_calls(
    app: App, alice: Wire, world: World
) -> None:
    app.command(name="charge")(world.held_after)
    app.command(name="refund")(world.charge)
    await lose(alice, app, world)
    await finish(app, world)
    assert not (await alice.call("charge", {"cents": 6})).is_replayed
    assert not (await alice.call("refund", PARAMS)).is_replayed
    # As with a key, `_meta` is not part of the params.
    assert await alice.call("charge", {**PARAMS, "_meta": {"traceparent": "x"}}) == REPLAY


async def test_window_counts_from_the_loss(
    app: App, alice: Wire, world: World, store: Store, ledger: Ledger
) -> None:
    app.command(name="charge", loss_window=60)(world.held_after)
    await lose(alice, app, world)
    await finish(app, world)
    store.age((await undelivered(ledger)).id, 50)
    assert await alice.call("charge", PARAMS) == REPLAY
    await lose(alice, app, world)
    await finish(app, world)
    store.age((await undelivered(ledger)).id, 61)
    assert (await alice.call("charge", PARAMS)).value["number"] == 3


async def test_call_that_still_runs_is_recognised_however_long_it_runs(
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
async def test_repetition_waits_for_the_answer_to_the_first_claim(
    losses: int, app: App, alice: Wire, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the ledger saw the repetition first, it would grant both.

    A lost one does not wait for itself.
    """
    app.command(name="charge")(world.charge)
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
    for _ in range(losses):
        lost = alice.send("charge", PARAMS)
        async with asyncio.timeout(PATIENCE):
            await asked.wait()
        # Until it is there.
        await app.handle(b'{"jsonrpc":"2.0","method":"charge","params":{"cents":1},"id":1}')
        await lost.leave()
    again = alice.send("charge", PARAMS)
    # It would overtake.
    await app.handle(b'{"jsonrpc":"2.0","method":"charge","params":{"cents":1},"id":1}')
    gate.set()
    assert (await again.told()).is_replayed
    assert sorted(world.effects) == [*[1] * (losses + 1), 5]


# --- the answer of a repetition -------------------------------------------------------------------


async def test_repetition_waits_for_the_first_run(app: App, alice: Wire, world: World) -> None:
    app.command(name="charge")(world.held_after)
    await lose(alice, app, world)
    claims = await watch(app, "claim")
    again = alice.send("charge", PARAMS)
    await next_of(claims)
    await finish(app, world)
    assert await again.told() == REPLAY
    assert world.effects == [5]


async def test_repetition_waits_for_the_first_run_in_another_process(
    app: App, alice: Wire, elsewhere: Wire, world: World
) -> None:
    app.command(name="charge")(world.held_after)
    await lose(alice, app, world)
    again = elsewhere.send("charge", PARAMS)
    await finish(app, world)
    assert await again.told() == REPLAY
    assert world.effects == [5]


async def test_repetition_that_gets_in_progress_has_not_received_the_answer(
    app: App, alice: Wire, world: World
) -> None:
    """The first run takes longer than a repetition waits.

    The server still recognises the next repetition.
    """
    app.command(name="charge", wait=0.01)(world.held_after)
    await lose(alice, app, world)
    for _ in range(2):
        refused = await alice.call("charge", PARAMS)
        assert (refused.error["code"], refused.error["data"]["ran"]) == (40910, "unknown")
    await finish(app, world)
    assert await alice.call("charge", PARAMS) == REPLAY
    assert world.effects == [5]


async def test_lost_error_of_a_call_without_a_record_does_not_delay_others(
    app: App, alice: Wire, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger has not answered the claim, and will not: a repetition must not wait for it."""
    app.command(name="charge")(world.charge)
    # In one message with it, so that the caller can leave in the middle.
    app.query(name="text")(lambda: "a" * 1_000_000)
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


async def test_recorded_error_is_repeated(app: App, alice: Wire, world: World) -> None:
    @app.command(name="charge")
    async def handler(cents: int, ctx: Context) -> Any:
        await world.held_after(cents, ctx)
        raise DomainError(40001, "no money")

    await lose(alice, app, world)
    await finish(app, world)
    error = {"code": 40001, "message": "no money", "data": {"replayed": True}}
    assert await alice.call("charge", PARAMS) == Told(error=error, is_replayed=True)
    assert world.effects == [5]


async def test_unknown_outcome_is_an_error(app: App, alice: Wire, world: World) -> None:
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


async def test_repetition_of_a_released_call_runs(
    app: App, alice: Wire, world: World, ledger: Ledger
) -> None:
    """The first run refuses the call: nothing was done. A repetition has nothing to match."""

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


async def test_repetition_that_runs_in_place_of_the_first_is_recognised_if_it_is_lost(
    app: App, alice: Wire, world: World
) -> None:
    """It waits for the first run, which refuses the call.

    So it runs itself, and its own answer is lost.
    """
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
    claims = await watch(app, "claim")
    marks = await watch(app, "deliver")
    ends = await watch(app, "complete")
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


# --- a process that dies --------------------------------------------------------------------------


async def die(ledger: Ledger, store: Store, *, ago: float, done: bool, **fields: Any) -> Record:
    """A call of another process, which died while its handler ran, or before it wrote the answer."""
    origin = origin_of("caller alice", "charge")
    assert origin is not None
    keyless = Keyless(origin + PRINT[:8], 120)
    id = RecordId("alice", "charge", keyless.make_key(os.urandom(16)))
    record = await ledger.claim(claim_of(id, fingerprint=PRINT, keyless=keyless, **fields))
    if done:
        assert await ledger.complete(record.token, outcome_of(b'{"charged":5,"number":1}'), 1000)
    store.age(id, ago)
    return record


async def test_answer_of_a_dead_process_is_undelivered(
    app: App, alice: Wire, world: World, store: Store, ledger: Ledger
) -> None:
    app.command(name="charge")(world.charge)
    await die(ledger, store, ago=LEASE + 1, done=True)
    assert await alice.call("charge", PARAMS) == REPLAY
    assert world.effects == []


async def test_answer_of_a_process_that_may_live_is_waited_for(
    app: App, alice: Wire, world: World, store: Store, ledger: Ledger
) -> None:
    app.command(name="charge", wait=0.01)(world.charge)
    record = await die(ledger, store, ago=1, done=True)
    assert (await alice.call("charge", PARAMS)).error["code"] == 40910
    store.age(record.id, LEASE)
    assert await alice.call("charge", PARAMS) == REPLAY
    assert world.effects == []


async def test_run_that_died_past_its_commit_point_has_an_unknown_outcome(
    app: App, alice: Wire, world: World, store: Store, ledger: Ledger
) -> None:
    app.command(name="charge")(world.charge)
    await die(ledger, store, ago=LEASE + 1, done=False)
    assert (await alice.call("charge", PARAMS)).error["code"] == 50910
    assert world.effects == []


async def test_unknown_outcome_answers_every_repetition(
    app: App, alice: Wire, elsewhere: Wire, world: World, store: Store, ledger: Ledger
) -> None:
    """In this process and in another one, one after another and together; each answer begins the
    window again.
    """
    app.command(name="charge")(world.charge)
    record = await die(ledger, store, ago=LEASE + 1, done=False)
    for wire in (alice, elsewhere, alice, alice, elsewhere):
        store.age(record.id, WINDOW - 20)
        assert (await wire.call("charge", PARAMS)).error["code"] == 50910
        await marked(ledger, record)
    assert world.effects == []
    store.age(record.id, WINDOW + 1)
    assert await alice.call("charge", PARAMS) == FIRST, (
        "long after its last answer, an equal call is a new one"
    )


async def test_unknown_outcome_answers_repetitions_at_once(
    app: App, alice: Wire, elsewhere: Wire, world: World, store: Store, ledger: Ledger
) -> None:
    app.command(name="charge")(world.charge)
    await die(ledger, store, ago=LEASE + 1, done=False)
    sent = [wire.send("charge", PARAMS) for wire in (alice, alice, elsewhere, alice, elsewhere)]
    assert [(await each.told()).error["code"] for each in sent] == [50910] * 5
    assert world.effects == []


async def test_unknown_outcome_is_for_its_caller_alone(
    app: App, alice: Wire, wires: Wires, world: World, store: Store, ledger: Ledger
) -> None:
    app.command(name="charge")(world.charge)
    await die(ledger, store, ago=LEASE + 1, done=False)
    assert (await alice.call("charge", PARAMS)).error["code"] == 50910
    bob = await wires("/rpc", app, "bob")
    assert await bob.call("charge", PARAMS) == FIRST
    assert (await alice.call("charge", {"cents": 6})).value == {"charged": 6, "number": 2}


async def test_unknown_outcome_that_is_resolved_answers_one_repetition(
    app: App, alice: Wire, world: World, store: Store, ledger: Ledger
) -> None:
    app.command(name="charge")(world.charge)
    record = await die(ledger, store, ago=LEASE + 1, done=False)
    for _ in range(2):
        assert (await alice.call("charge", PARAMS)).error["code"] == 50910
    await marked(ledger, record)
    assert await ledger.resolve(record.id, outcome_of(b'{"charged":5,"number":1}'))
    assert await alice.call("charge", PARAMS) == REPLAY
    assert world.effects == []
    assert await alice.call("charge", PARAMS) == FIRST


async def test_unknown_outcome_of_a_handler_that_failed_answers_every_repetition(
    app: App, alice: Wire, world: World
) -> None:
    """It may have acted before it failed, and its caller does not know more than after a crash."""

    @app.command(name="charge")
    async def fail(cents: int) -> None:
        world.act(cents)
        raise ValueError(cents)

    assert (await alice.call("charge", PARAMS)).error == {
        "code": -32603,
        "message": "Internal error",
        "data": {"ran": "unknown"},
    }
    for _ in range(3):
        assert (await alice.call("charge", PARAMS)).error["code"] == 50910
    assert world.effects == [5]


async def marked(ledger: Ledger, record: Record) -> None:
    """Wait until the ledger has recorded that the last answer was not the outcome."""
    async with asyncio.timeout(PATIENCE):
        while True:
            found = await ledger.get(record.id)
            assert found is not None
            if found.delivery == "undelivered":
                return
            await asyncio.sleep(0.01)


async def test_wait_for_a_dead_holder_ends_with_its_lease(
    app: App, alice: Wire, world: World, store: Store, ledger: Ledger
) -> None:
    """It has renewed nothing for half of its lease, so its caller waits for the rest, and gets an
    answer.
    """
    app.command(name="charge", wait=0.05)(world.charge)
    record = await die(ledger, store, ago=LEASE / 2, done=False)
    claims = await watch(app, "claim")
    again = alice.send("charge", PARAMS)
    for _ in range(6):  # more than its own wait allows
        await next_of(claims)
    store.age(record.id, LEASE / 2 + 1)
    assert (await again.told()).error["code"] == 50910
    assert world.effects == []


async def test_run_of_a_process_that_stood_still_is_not_given_up(
    app: App, alice: Wire, world: World, store: Store, ledger: Ledger, clock: LoopClock
) -> None:
    """A machine that sleeps longer than a lease: the process renews its leases before it judges."""
    app.command(name="charge")(world.held_after)
    await lose(alice, app, world)
    lost = await undelivered(ledger)
    again = alice.send("charge", PARAMS)
    store.age(lost.id, LEASE + 1)
    clock.advance(LEASE + 1)
    beats = await watch(app, "heartbeat")
    assert await next_of(beats)
    world.gate.set()
    assert await again.told() == REPLAY
    assert world.effects == [5]


async def test_run_whose_lease_could_not_be_renewed_is_not_given_up(
    app: App, alice: Wire, world: World, store: Store, clock: LoopClock
) -> None:
    """The store was away when the renewal was due. It is renewed when the next claim comes."""
    app.command(name="charge")(world.held_after)
    await lose(alice, app, world)
    ledger = await app.ledger()
    lost = await undelivered(ledger)
    renew = ledger.heartbeat
    failed = asyncio.Event()

    async def fail(*_: Any) -> bool:
        failed.set()
        raise LedgerDown("away")

    vars(ledger)["heartbeat"] = fail
    clock.advance(LEASE / 3 + 1)
    async with asyncio.timeout(PATIENCE):
        await failed.wait()
    vars(ledger)["heartbeat"] = renew
    beats = await watch(app, "heartbeat")
    store.age(lost.id, LEASE + 1)
    again = alice.send("charge", PARAMS)
    assert await next_of(beats)
    world.gate.set()
    assert await again.told() == REPLAY
    assert world.effects == [5]


async def test_run_whose_renewal_takes_long_is_not_given_up(
    app: App, alice: Wire, world: World, store: Store, clock: LoopClock
) -> None:
    """The store is slow to renew, and quick to judge: the claim waits for the renewal."""
    app.command(name="charge")(world.held_after)
    await lose(alice, app, world)
    ledger = await app.ledger()
    lost = await undelivered(ledger)
    renew = ledger.heartbeat
    asked = asyncio.Event()
    answers = asyncio.Event()

    async def slow(*terms: Any) -> bool:
        asked.set()
        await answers.wait()
        return await renew(*terms)

    vars(ledger)["heartbeat"] = slow
    clock.advance(LEASE / 3 + 1)
    async with asyncio.timeout(PATIENCE):
        await asked.wait()
    store.age(lost.id, LEASE + 1)
    clock.advance(LEASE)
    assert app._commands is not None
    background = app._commands._background
    waits = asyncio.Event()
    catch_up = background.catch_up

    async def catches_up(*terms: Any) -> None:
        waits.set()
        await catch_up(*terms)

    vars(background)["catch_up"] = catches_up
    claims = await watch(app, "claim")
    again = alice.send("charge", PARAMS)
    claimed = asyncio.create_task(next_of(claims))
    waiting = asyncio.create_task(waits.wait())
    await asyncio.wait((claimed, waiting), return_when=asyncio.FIRST_COMPLETED)
    assert not claimed.done()
    answers.set()
    await claimed
    world.gate.set()
    assert await again.told() == REPLAY
    assert world.effects == [5]


async def test_wait_for_a_holder_that_renews_its_lease_ends_as_declared(
    app: App, alice: Wire, world: World, store: Store, ledger: Ledger
) -> None:
    app.command(name="charge", wait=0.05)(world.charge)
    record = await die(ledger, store, ago=LEASE / 2, done=False)
    claims = await watch(app, "claim")
    again = alice.send("charge", PARAMS)
    for _ in range(6):
        await next_of(claims)
    assert await ledger.heartbeat(record.token, LEASE)
    refused = (await again.told()).error
    assert refused["code"] == 40910
    assert "key" not in refused["message"], "its caller has sent none"


@pytest.mark.parametrize("terms", [{"on_crash": "rerun"}, {"commit_point": True}], ids=repr)
async def test_run_that_died_is_run_again_if_that_is_safe(
    app: App, alice: Wire, world: World, store: Store, ledger: Ledger, terms: Any
) -> None:
    """It is the same call, with the same key: `ctx.attempt` shows that to the handler."""
    app.command(name="charge", **terms)(world.charge)
    claimed = {
        "committed": "commit_point" not in terms,
        "on_crash": terms.get("on_crash", "unknown"),
    }
    died = await die(ledger, store, ago=LEASE + 1, done=False, **claimed)
    assert await alice.call("charge", PARAMS) == FIRST
    (context,) = world.seen
    assert (context.attempt, context.idempotency_key) == (2, died.id.key)


async def test_run_that_died_long_ago_matches_nothing(
    app: App, alice: Wire, world: World, store: Store, ledger: Ledger
) -> None:
    app.command(name="charge")(world.charge)
    await die(ledger, store, ago=LEASE + 121, done=False)
    assert await alice.call("charge", PARAMS) == FIRST


# --- transactions ---------------------------------------------------------------------------------


@transactional
async def test_transaction_without_a_key_is_recognised(
    app: App, alice: Wire, world: World, effects: Effects
) -> None:
    """Its answer is lost while it is open, before there is a record to mark."""

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
async def test_transaction_that_was_undone_runs_again(
    app: App, alice: Wire, world: World, effects: Effects
) -> None:
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
