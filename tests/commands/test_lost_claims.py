"""Runs whose claims the store has lost, as a failover does that lacks the last writes."""

import asyncio
from copy import copy
from typing import Any

import pytest

from tests.calls import call, error, make_app, read, result
from tests.clock import LoopClock
from tests.commands.charges import ID, PATIENCE, PRINT, NewApp, World, charge, stands, vanish
from tests.ledger import LEASE, claim_of
from tests.servers import Store
from wirecall import App, Context, Done, NotDone
from wirecall.commands import background
from wirecall.errors import Busy
from wirecall.ledger.base import Ledger, LedgerDown, RecordId, Token
from wirecall.ledger.memory import MemoryLedger

RETENTION = 86_400


async def forget(ledger: Ledger) -> None:
    """Lose the record of a run."""
    record = await ledger.get(ID)
    assert record is not None
    assert await ledger.release(record.token)


async def renewed(app: App) -> None:
    """Wait until the leases that are due are renewed."""
    assert app._commands is not None
    await app._commands._background.catch_up(asyncio.get_running_loop())


async def test_holder_that_stood_still_until_its_command_was_forgotten_stops_at_its_commit_point(
    new_app: NewApp, ledger: Ledger, store: Store, world: World, clock: LoopClock
) -> None:
    """Its successor was done, and the store has forgotten that."""
    here = new_app()
    there = new_app()
    here.command(name="charge")(world.held_before)
    there.command(name="charge")(world.charge)
    first = asyncio.create_task(here.handle(charge()))
    await world.begun.wait()
    store.age(ID, LEASE + 1)
    assert result(await there.handle(charge()))["number"] == 1
    for _ in range(2):
        store.age(ID, 8 * RETENTION + 1)
        await ledger.sweep()
    assert await stands(ledger) is None
    clock.advance(LEASE)
    await renewed(here)
    world.gate.set()
    assert "error" in read(await first)
    assert world.effects == [5]


async def test_evidence_of_an_earlier_run_outlives_the_loss_of_its_record(
    app: App, ledger: Ledger, store: Store, clock: LoopClock
) -> None:
    """The store counts attempts from one again, but the first run may have acted."""

    async def refuses(cents: int) -> None:
        await forget(ledger)
        clock.advance(LEASE)
        await renewed(app)
        raise Busy("not now")

    app.command(name="charge", on_crash="reconcile", reconcile=lambda cents: NotDone())(refuses)
    await vanish(ledger, store)
    assert "error" in read(await app.handle(charge()))
    record = await ledger.get(ID)
    assert record is not None and (record.committed, record.lease_left) == (True, 0)


async def test_run_that_failed_after_its_record_was_lost_is_reconciled(
    app: App, ledger: Ledger, world: World
) -> None:
    async def fails(cents: int, ctx: Context) -> None:
        world.act(cents)
        await forget(ledger)
        raise ConnectionError("it may have been charged")

    app.command(name="charge", on_crash="reconcile", reconcile=lambda cents: Done("found"))(fails)
    assert error(await app.handle(charge()))["data"]["ran"] == "unknown"
    assert result(await app.handle(charge())) == "found"
    assert world.effects == [5]


async def test_run_that_failed_while_the_ledger_was_away_is_unknown_although_its_record_is_lost(
    new_app: NewApp, ledger: Ledger, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = new_app()
    there = new_app()

    @here.command(name="charge")
    async def fails(cents: int, ctx: Context) -> None:
        world.act(cents)
        await forget(ledger)
        raise ConnectionError("it may have been charged")

    there.command(name="charge")(world.charge)
    opened = await here.ledger()
    abandon = opened.abandon
    failures = [LedgerDown("away")]

    async def flaky(token: Token) -> bool:
        if failures:
            raise failures.pop()
        return await abandon(token)

    monkeypatch.setattr(opened, "abandon", flaky)
    assert error(await here.handle(charge()))["data"]["ran"] == "unknown"
    await here.aclose()
    assert failures == []
    assert error(await there.handle(charge()))["code"] == 50910
    assert world.effects == [5]


# --- renewals -------------------------------------------------------------------------------------


async def test_renewal_that_had_begun_when_another_server_answered_is_made_again(
    clock: LoopClock, world: World
) -> None:
    """The old server may have got it. The next one would be due after a third of the lease."""
    app = make_app()
    ledger = await app.ledger()
    renew = ledger.heartbeat
    asked = asyncio.Semaphore(0)
    answers = asyncio.Event()

    async def late(*terms: Any) -> bool:
        asked.release()
        await answers.wait()
        return await renew(*terms)

    vars(ledger)["heartbeat"] = late
    app.command(name="charge")(world.held_after)
    first = asyncio.create_task(app.handle(charge()))
    await world.begun.wait()
    async with asyncio.timeout(PATIENCE):
        clock.advance(LEASE / 3 + 1)
        await asked.acquire()
        assert app._commands is not None
        app._commands.witness.moved()
        await asked.acquire()
    answers.set()
    world.gate.set()
    assert result(await first)["number"] == 1
    await app.aclose()


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
async def test_renewal_that_has_failed_is_made_again_as_soon_as_the_store_answers(
    app: App, clock: LoopClock, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "LOOK_EVERY", 0.001)
    ledger = await app.ledger()
    renew = ledger.heartbeat
    failures = [LedgerDown("it is still a replica")]
    renewed = asyncio.Event()

    async def flaky(*terms: Any) -> bool:
        if failures:
            raise failures.pop()
        renewed.set()
        return await renew(*terms)

    monkeypatch.setattr(ledger, "heartbeat", flaky)
    app.command(name="charge", lease=30_000)(world.held_after)
    first = asyncio.create_task(app.handle(charge()))
    await world.begun.wait()
    clock.advance(10_001)
    async with asyncio.timeout(PATIENCE):
        await renewed.wait()
    world.gate.set()
    assert result(await first)["number"] == 1


async def test_renewal_that_takes_long_delays_no_command_of_another_method(
    clock: LoopClock, world: World
) -> None:
    """In a cluster, the server of one record may be silent while the others answer."""
    app = make_app()
    ledger = await app.ledger()
    asked = asyncio.Event()
    answers = asyncio.Event()

    async def silent(*_: Any) -> bool:
        asked.set()
        await answers.wait()
        raise LedgerDown("silent")

    vars(ledger)["heartbeat"] = silent
    app.command(name="charge")(world.held_after)
    app.command(name="note")(lambda: "noted")
    first = asyncio.create_task(app.handle(charge()))
    await world.begun.wait()
    async with asyncio.timeout(PATIENCE):
        clock.advance(LEASE / 3 + 1)
        await asked.wait()
        clock.advance(LEASE)
        assert result(await app.handle(call("note", key="other"))) == "noted"
    answers.set()
    world.gate.set()
    assert result(await first)["number"] == 1
    await app.aclose()


# --- records from before the claim ----------------------------------------------------------------


class Past:
    """A store that can lose what happened to a record since a moment."""

    def __init__(self, ledger: MemoryLedger, id: RecordId) -> None:
        self._rows = ledger._rows
        self._id = id
        self._row = copy(self._rows[id])

    def restore(self) -> None:
        self._rows[self._id] = self._row


async def test_run_whose_record_is_the_one_of_its_predecessor_is_recorded(
    world: World,
) -> None:
    """The store has lost that a run took over from one that had done nothing."""
    app = make_app()
    ledger = await app.ledger()
    assert isinstance(ledger, MemoryLedger)
    claim = claim_of(ID, fingerprint=PRINT, committed=False, lease=0.0)
    await ledger.claim(claim)
    past = Past(ledger, ID)

    @app.command(name="charge")
    async def handler(cents: int, ctx: Context) -> Any:
        await ctx.commit_point()
        answer = world.act(cents)
        past.restore()
        return answer

    for _ in range(2):
        assert result(await app.handle(charge()))["number"] == 1
    assert world.effects == [5]
    await app.aclose()
