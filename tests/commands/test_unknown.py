"""`on_crash="unknown"`: a holder that vanished leaves an unknown outcome until it is settled (B2);
every ledger.
"""

import asyncio
from typing import Any

from tests.calls import error, result
from tests.commands.charges import ID, PRINT, NewApp, World, charge, is_unknown, stands, vanish
from tests.ledger import LEASE, claim_of, outcome_of
from tests.servers import Store
from wirecall import App
from wirecall.ledger.base import Ledger, RecordId, State
from wirecall.server.method import Done, NotDone

REASON = "the bank was asked"


async def test_holder_that_vanished_leaves_an_unknown_outcome(
    app: App, ledger: Ledger, store: Store, world: World
) -> None:
    """B2: every retry gets an explicit error, and nothing runs a second time."""
    app.command(world.charge)
    record = await vanish(ledger, store)
    for _ in range(3):
        is_unknown(error(await app.handle(charge())), record)
    assert await stands(ledger) is State.UNKNOWN
    assert world.effects == []


async def test_unknown_outcome_names_its_record_in_full(
    app: App, ledger: Ledger, store: Store, world: World
) -> None:
    app.command(world.charge)
    id = RecordId("alice", "charge", "order/7")
    await ledger.claim(claim_of(id, fingerprint=PRINT))
    store.age(id, LEASE + 1)
    refused = error(await app.handle(charge(key="order/7"), caller="alice"))
    assert refused["data"]["record"] == "alice/charge/order/7"


async def test_holder_that_vanished_before_its_commit_point_did_nothing(
    app: App, ledger: Ledger, store: Store, world: World
) -> None:
    app.command(world.charge)
    await vanish(ledger, store, committed=False)
    assert result(await app.handle(charge()))["number"] == 1


async def test_unknown_outcome_ends_when_its_holder_reports(
    app: App, ledger: Ledger, store: Store, world: World
) -> None:
    """B2: the old holder returns."""
    app.command(world.charge)
    record = await vanish(ledger, store)
    is_unknown(error(await app.handle(charge())), record)
    assert await ledger.complete(record.token, outcome_of(b'{"late":true}'), 1000)
    replayed: list[Any] = []
    assert result(await app.handle(charge(7), replayed=replayed)) == {"late": True}
    assert replayed == [7]
    assert world.effects == []


async def test_unknown_outcome_is_replaced_by_the_answer_of_a_paused_holder(
    new_app: NewApp, ledger: Ledger, store: Store, world: World
) -> None:
    """B2: its caller gets the true answer, the retry in between gets "unknown", the next one gets
    the answer too.
    """
    here = new_app()
    there = new_app()
    here.command(name="charge")(world.held_after)
    there.command(name="charge")(world.charge)
    first = asyncio.create_task(here.handle(charge()))
    await world.begun.wait()
    store.age(ID, LEASE + 1)
    assert error(await there.handle(charge()))["data"]["type"] == "outcome_unknown"
    world.gate.set()
    assert result(await first)["number"] == 1
    assert result(await there.handle(charge()))["number"] == 1
    assert world.effects == [5]


async def test_operator_resolves_a_command_as_done(
    app: App, ledger: Ledger, store: Store, world: World
) -> None:
    app.command(world.charge)
    await vanish(ledger, store)
    await app.handle(charge())
    assert await app.resolve("charge", "k", Done({"charged": 5}), reason=REASON)
    assert result(await app.handle(charge())) == {"charged": 5}
    assert world.effects == []


async def test_operator_resolves_a_command_as_not_done(
    app: App, ledger: Ledger, store: Store, world: World
) -> None:
    app.command(world.charge)
    await vanish(ledger, store)
    await app.handle(charge())
    assert await app.resolve("charge", "k", NotDone(), reason=REASON)
    assert result(await app.handle(charge()))["number"] == 1
