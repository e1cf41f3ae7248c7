"""Deadlines, callers that hang up, and an app that stops, around the commit point (P5); every
ledger.
"""

import asyncio
from typing import Any

import pytest
from msgspec import structs

from tests.calls import batch, call, error, result
from tests.clock import LoopClock
from tests.commands.charges import ID, PARAMS, PATIENCE, NewApp, World, charge, late, stands, watch
from wirecall import App
from wirecall.ledger.base import Ledger, State

# --- deadlines ------------------------------------------------------------------------------------


async def test_deadline_before_the_commit_point_did_nothing(
    app: App, ledger: Ledger, world: World, clock: LoopClock
) -> None:
    app.command(name="charge", timeout=PATIENCE)(world.held_before)
    first = asyncio.create_task(app.handle(charge()))
    await world.begun.wait()
    clock.advance(PATIENCE)
    refused = error(await first)
    assert refused == late("no", PATIENCE)
    assert await ledger.get(ID) is None
    world.gate.set()
    assert result(await app.handle(charge()))["number"] == 1


@pytest.mark.parametrize("handler", ["held_between", "held_after"])
async def test_deadline_after_the_commit_point_lets_the_handler_finish(
    handler: str, app: App, ledger: Ledger, world: World, clock: LoopClock
) -> None:
    """The caller gets `ran: "unknown"`; the outcome is recorded, and a retry gets it."""
    app.command(name="charge", timeout=PATIENCE)(getattr(world, handler))
    first = asyncio.create_task(app.handle(charge(1)))
    await world.begun.wait()
    clock.advance(PATIENCE)
    refused = error(await first)
    assert refused == late("unknown", PATIENCE)
    assert await stands(ledger) is State.RUNNING
    replayed: list[Any] = []
    retry = asyncio.create_task(app.handle(charge(2), replayed=replayed))
    await asyncio.sleep(0)
    world.gate.set()
    assert result(await retry)["number"] == 1
    assert replayed == [2]
    assert await stands(ledger) is State.DONE
    assert world.effects == [5]


async def test_deadline_of_a_duplicate_says_nothing_about_the_first(
    new_app: NewApp, world: World, clock: LoopClock
) -> None:
    """The first runs elsewhere: "no" would invite its caller to send it under another key."""
    here = new_app()
    there = new_app()
    here.command(name="charge")(world.held_after)
    there.command(name="charge", timeout=20)(world.charge)
    first = asyncio.create_task(here.handle(charge()))
    await world.begun.wait()
    claims = await watch(there, "claim")
    second = asyncio.create_task(there.handle(charge()))
    await claims.get()
    clock.advance(20)  # a duplicate waits for 25 s at most
    refused = error(await second)
    assert refused == late("unknown", 20)
    world.gate.set()
    assert result(await first)["number"] == 1


async def test_deadline_of_a_duplicate_in_the_same_process_counts(
    app: App, world: World, clock: LoopClock
) -> None:
    app.command(name="charge", timeout=PATIENCE)(world.held_after)
    for _ in range(2):
        calling = asyncio.create_task(app.handle(charge()))
        await asyncio.sleep(0)
        await world.begun.wait()
        clock.advance(PATIENCE)
        refused = error(await calling)
        assert refused == late("unknown", PATIENCE)
    world.gate.set()
    assert result(await app.handle(charge()))["number"] == 1


# --- callers that hang up -------------------------------------------------------------------------


async def test_caller_that_hangs_up_before_the_commit_point_stops_the_handler(
    app: App, ledger: Ledger, world: World
) -> None:
    app.command(name="charge")(world.held_before)
    first = asyncio.create_task(app.handle(charge()))
    await world.begun.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await ledger.get(ID) is None
    world.gate.set()
    assert result(await app.handle(charge()))["number"] == 1
    assert world.effects == [5]


@pytest.mark.parametrize("handler", ["held_between", "held_after"])
async def test_caller_that_hangs_up_after_the_commit_point_loses_nothing(
    handler: str, app: App, ledger: Ledger, world: World
) -> None:
    """P5: the handler is shielded, finishes, and its outcome is recorded."""
    app.command(name="charge")(getattr(world, handler))
    first = asyncio.create_task(app.handle(charge(1)))
    await world.begun.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not world.ended.is_set()
    world.gate.set()
    replayed: list[Any] = []
    assert result(await app.handle(charge(2), replayed=replayed))["number"] == 1
    assert replayed == [2]
    assert await stands(ledger) is State.DONE
    assert world.effects == [5]


async def test_caller_that_hangs_up_on_a_batch_cancels_its_next_entries(
    app: App, ledger: Ledger, world: World
) -> None:
    """The entry past its commit point is finished, the one behind it in the lane never begins."""
    app.command(name="charge")(world.held_after)
    task = asyncio.create_task(app.handle(batch(charge(1), charge(2, key="next"))))
    await world.begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    world.gate.set()
    assert result(await app.handle(charge(3)))["number"] == 1
    assert await ledger.get(structs.replace(ID, key="next")) is None
    assert world.effects == [5]


async def test_caller_that_hangs_up_at_any_step_leaves_one_effect(
    app: App, ledger: Ledger, world: World
) -> None:
    """P5: cut at every turn of the event loop, then sent again; the retry need not wait for the cut
    run.
    """
    app.command(name="charge", wait=1)(world.held_between)
    world.gate.set()
    for steps in range(25):
        key = f"k{steps}"
        before = len(world.effects)
        task = asyncio.create_task(app.handle(charge(key=key)))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert result(await app.handle(charge(key=key)))["charged"] == 5
        assert len(world.effects) == before + 1
        assert await stands(ledger, structs.replace(ID, key=key)) is State.DONE


# --- an app that stops ----------------------------------------------------------------------------


async def test_aclose_finishes_commands_past_their_commit_point_and_releases_the_others(
    new_app: NewApp, ledger: Ledger, world: World
) -> None:
    app = new_app()
    other = World()
    app.command(name="charge")(world.held_after)
    app.command(name="refund")(other.held_before)
    committed = asyncio.create_task(app.handle(charge()))
    uncommitted = asyncio.create_task(app.handle(call("refund", PARAMS, key="k")))
    await asyncio.gather(world.begun.wait(), other.begun.wait())
    closing = asyncio.create_task(app.aclose())
    refused = error(await uncommitted)
    assert (refused["code"], refused["data"]["type"], refused["data"]["ran"]) == (
        50310,
        "ledger_unavailable",
        "no",
    )
    assert not closing.done()
    world.gate.set()
    assert result(await committed)["number"] == 1
    await closing
    assert await stands(ledger) is State.DONE
    assert await stands(ledger, structs.replace(ID, method="refund")) is None
