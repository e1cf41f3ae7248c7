"""The same command at once, in one process, in several and in one batch (P5, P10): one takes
effect; every ledger.
"""

import asyncio
from typing import Any

import pytest
from msgspec import structs

from tests.calls import batch, call, error, read, result
from tests.commands.charges import (
    CONFLICT,
    ID,
    PATIENCE,
    PRINT,
    NewApp,
    World,
    charge,
    hold_claims,
    is_in_progress,
    is_unknown,
    watch,
)
from tests.ledger import LEASE, claim_of
from tests.servers import Store
from wirecall import App, DomainError
from wirecall.ledger.base import Ledger

# Seconds that a duplicate waits for a living holder.
WAIT = 0.05

# --- in progress ----------------------------------------------------------------------------------


async def test_duplicate_in_the_same_process_awaits_the_first(app: App, world: World) -> None:
    app.command(name="charge")(world.held_after)
    replayed: list[Any] = []
    tasks = [asyncio.create_task(app.handle(charge(id), replayed=replayed)) for id in range(20)]
    await world.begun.wait()
    world.gate.set()
    replies = [read(await task) for task in tasks]
    assert [reply["id"] for reply in replies] == list(range(20))
    assert all(reply["result"] == {"charged": 5, "number": 1} for reply in replies)
    assert sorted(replayed) == list(range(1, 20))
    assert world.effects == [5]


async def test_duplicate_in_the_same_process_stops_waiting_after_its_wait(
    app: App, world: World
) -> None:
    app.command(name="charge", wait=0.01)(world.held_after)
    first = asyncio.create_task(app.handle(charge()))
    await world.begun.wait()
    is_in_progress(error(await app.handle(charge())))
    world.gate.set()
    assert result(await first)["number"] == 1


async def test_duplicate_in_another_process_gets_in_progress_after_its_wait(
    new_app: NewApp, world: World
) -> None:
    here = new_app()
    there = new_app()
    here.command(name="charge")(world.held_after)
    there.command(name="charge", wait=0.01)(world.charge)
    first = asyncio.create_task(here.handle(charge()))
    await world.begun.wait()
    is_in_progress(error(await there.handle(charge())))
    world.gate.set()
    assert result(await first)["number"] == 1
    assert result(await there.handle(charge()))["number"] == 1
    assert world.effects == [5]


async def test_duplicates_wait_for_a_dead_holder_until_its_lease_ends(
    app: App, world: World, store: Store, ledger: Ledger
) -> None:
    """With a key too, and for every duplicate that waits in one process."""
    app.command(name="charge", wait=WAIT)(world.charge)
    record = await ledger.claim(claim_of(ID, fingerprint=PRINT))
    store.age(ID, LEASE / 2)
    claims = await watch(app, "claim")
    waiting = [asyncio.create_task(app.handle(charge(number))) for number in range(3)]
    for _ in range(6):  # more than their own wait allows
        async with asyncio.timeout(PATIENCE):
            await claims.get()
    store.age(ID, LEASE / 2 + 1)
    for each in waiting:
        is_unknown(
            error(await each), structs.replace(record, started_at=record.started_at - LEASE - 1)
        )
    assert world.effects == []


async def test_duplicates_wait_for_a_dead_holder_while_the_first_claim_is_slow(
    app: App, world: World, store: Store, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the ledger answers the first, this process does not know that the holder is dead."""
    app.command(name="charge", wait=WAIT)(world.charge)
    record = await ledger.claim(claim_of(ID, fingerprint=PRINT))
    store.age(ID, LEASE / 2)
    claims = await hold_claims(app, monkeypatch)
    waiting = [asyncio.create_task(app.handle(charge(number))) for number in range(3)]
    first = await claims.get()
    assert not (await asyncio.wait(waiting, timeout=4 * WAIT))[0]
    store.age(ID, LEASE / 2 + 1)
    first.set_result(None)
    for _ in range(2):  # each of the others asks the ledger too, which may be as slow
        later = await claims.get()
        await asyncio.wait(waiting, timeout=4 * WAIT)
        later.set_result(None)
    for each in waiting:
        is_unknown(
            error(await each), structs.replace(record, started_at=record.started_at - LEASE - 1)
        )
    assert world.effects == []


async def test_duplicates_wait_for_a_slow_claim_and_then_get_in_progress(
    new_app: NewApp, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = new_app()
    there = new_app()
    here.command(name="charge")(world.held_after)
    there.command(name="charge", wait=WAIT)(world.charge)
    first = asyncio.create_task(here.handle(charge()))
    await world.begun.wait()
    claims = await hold_claims(there, monkeypatch)
    waiting = [asyncio.create_task(there.handle(charge(number))) for number in range(3)]
    claim = await claims.get()
    assert not (await asyncio.wait(waiting, timeout=4 * WAIT))[0]
    claim.set_result(None)

    async def release() -> None:
        while True:
            (await claims.get()).set_result(None)

    releasing = asyncio.create_task(release())
    for each in waiting:
        is_in_progress(error(await each))
    releasing.cancel()
    world.gate.set()
    assert result(await first)["number"] == 1
    assert world.effects == [5]


async def test_duplicate_in_another_process_waits_for_the_outcome(
    new_app: NewApp, world: World
) -> None:
    here = new_app()
    there = new_app()
    here.command(name="charge")(world.held_after)
    there.command(name="charge")(world.charge)
    first = asyncio.create_task(here.handle(charge(1)))
    await world.begun.wait()
    replayed: list[Any] = []
    claims = await watch(there, "claim")
    second = asyncio.create_task(there.handle(charge(2), replayed=replayed))
    await claims.get()
    world.gate.set()
    assert result(await first) == result(await second) == {"charged": 5, "number": 1}
    assert replayed == [2]


async def test_duplicates_sent_to_many_apps_take_effect_once(new_app: NewApp, world: World) -> None:
    """P5, over what counts as four processes."""
    apps = [new_app() for _ in range(4)]
    for app in apps:
        app.command(world.charge)
    replayed: list[Any] = []
    calls = [apps[n % 4].handle(charge(n), replayed=replayed) for n in range(24)]
    replies = [read(reply) for reply in await asyncio.gather(*calls)]
    assert [reply["id"] for reply in replies] == list(range(24))
    assert all(reply["result"] == {"charged": 5, "number": 1} for reply in replies)
    assert len(replayed) == 23
    assert world.effects == [5]


async def test_duplicate_runs_if_the_first_call_did_nothing(app: App, world: World) -> None:
    """The first is cancelled before its commit point: the duplicate that waited for it runs
    instead.
    """
    app.command(name="charge")(world.held_before)
    first = asyncio.create_task(app.handle(charge(1)))
    await world.begun.wait()
    second = asyncio.create_task(app.handle(charge(2)))
    await asyncio.sleep(0)
    first.cancel()
    world.gate.set()
    assert result(await second)["number"] == 1
    assert world.effects == [5]
    with pytest.raises(asyncio.CancelledError):
        await first


# --- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("execution", ["sequential", "parallel"])
async def test_duplicates_in_one_batch_run_once_and_answer_in_their_places(
    execution: Any, app: App, world: World
) -> None:
    """P5, P10; another fingerprint under the same key fails only its own entry."""
    app.command(name="charge", execution=execution)(world.charge)
    app.query(name="look")(lambda: len(world.effects))
    replayed: list[Any] = []
    entries = [
        charge("a"),
        call("look", id="q"),
        charge("b"),
        charge("c", cents=6),
        charge("d", key="other"),
        charge("e"),
    ]
    answers = read(await app.handle(batch(*entries), replayed=replayed))
    assert [answer["id"] for answer in answers] == ["a", "q", "b", "c", "d", "e"]
    a, _, b, c, d, e = answers
    assert a["result"] == b["result"] == e["result"]
    assert a["result"]["charged"] == 5
    assert (c["error"]["code"], c["error"]["data"]) == (42210, CONFLICT)
    assert d["result"]["number"] != a["result"]["number"]
    assert sorted(replayed) == ["b", "e"]
    assert world.effects == [5, 5]
    again = read(await app.handle(batch(*entries)))
    assert [answer.get("result") for answer in again if answer["id"] != "q"] == [
        answer.get("result") for answer in answers if answer["id"] != "q"
    ]


async def test_duplicates_in_one_batch_share_a_recorded_error(app: App) -> None:
    @app.command(name="charge")
    async def handler(cents: int) -> None:
        raise DomainError(4020, "no", {"cents": cents})

    first, second = read(await app.handle(batch(charge(1), charge(2))))
    assert first["error"]["data"] == {"cents": 5}
    assert second["error"]["data"] == {"cents": 5, "replayed": True}


async def test_batch_that_is_sent_again_one_by_one_is_replayed(app: App, world: World) -> None:
    app.command(world.charge)
    entries = [charge(n, key=str(n)) for n in range(5)]
    together = read(await app.handle(batch(*entries)))
    assert [read(await app.handle(entry)) for entry in entries] == together
    assert len(world.effects) == 5
