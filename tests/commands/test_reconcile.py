"""`on_crash="reconcile"`: the method's own function judges a vanished holder (B2); every ledger."""

import asyncio
from typing import Any

import pytest
from msgspec import structs

from tests.calls import error, result
from tests.commands.charges import ID, World, charge, is_unknown, lose_claim, stands, vanish
from tests.ledger import LEASE
from tests.servers import Store
from wirecall import App, Context
from wirecall.ledger.base import Claim, Ledger, Record, State
from wirecall.server.method import CannotTell, Done, NotDone


@pytest.mark.parametrize("form", ["plain", "async"])
async def test_reconcile_done_is_the_answer(
    form: str, app: App, ledger: Ledger, store: Store, world: World
) -> None:
    """The function gets the params, and the context if it asks for it; the handler does not run."""
    asked: list[Any] = []

    def plain(cents: int, ctx: Context) -> Any:
        asked.append((cents, ctx.idempotency_key, ctx.attempt))
        return Done({"found": cents})

    async def coroutine(cents: int, ctx: Context) -> Any:
        return plain(cents, ctx)

    function: Any = plain if form == "plain" else coroutine
    app.command(name="charge", on_crash="reconcile", reconcile=function)(world.charge)
    await vanish(ledger, store)
    for id in (1, 2):
        assert result(await app.handle(charge(id))) == {"found": 5}
    assert asked == [(5, "k", 2)]
    assert world.effects == []
    assert await stands(ledger) is State.DONE


async def test_reconcile_not_done_runs_it(
    app: App, ledger: Ledger, store: Store, world: World
) -> None:
    app.command(name="charge", on_crash="reconcile", reconcile=lambda cents: NotDone())(
        world.charge
    )
    await vanish(ledger, store)
    for id in (1, 2):
        assert result(await app.handle(charge(id)))["number"] == 1
    assert world.seen[0].attempt == 2


@pytest.mark.parametrize("verdict", [CannotTell(), None, True, Done], ids=repr)
async def test_reconcile_without_a_clear_answer_leaves_an_unknown_outcome(
    verdict: Any, app: App, ledger: Ledger, store: Store, world: World
) -> None:
    """B2: an answer that is not clearly one or the other is unknown."""
    asked: list[int] = []

    def reconcile(cents: int) -> Any:
        asked.append(cents)
        return verdict

    app.command(name="charge", on_crash="reconcile", reconcile=reconcile)(world.charge)
    record = await vanish(ledger, store)
    for id in (1, 2):
        is_unknown(error(await app.handle(charge(id))), structs.replace(record, attempts=2))
    assert asked == [5]
    assert await stands(ledger) is State.UNKNOWN
    assert world.effects == []


async def test_reconcile_that_fails_is_called_again(
    app: App, ledger: Ledger, store: Store, world: World
) -> None:
    verdicts: list[Any] = [Done({"found": 5}), RuntimeError("no connection")]

    def reconcile(cents: int) -> Any:
        verdict = verdicts.pop()
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    app.command(name="charge", on_crash="reconcile", reconcile=reconcile)(world.charge)
    await vanish(ledger, store)
    refused = error(await app.handle(charge()))
    assert (refused["code"], refused["data"]) == (-32603, {"ran": "unknown"})
    assert result(await app.handle(charge())) == {"found": 5}
    assert world.effects == []


async def test_command_that_never_ran_is_not_reconciled(app: App, world: World) -> None:
    def reconcile(cents: int) -> Any:
        raise AssertionError("asked about a first run")

    app.command(name="charge", on_crash="reconcile", reconcile=reconcile)(world.charge)
    assert result(await app.handle(charge()))["number"] == 1


# --- the evidence ---------------------------------------------------------------------------------


class Truth:
    """A world that remembers what happened in it, for reconcile functions that never lie."""

    def __init__(self, app: App, world: World) -> None:
        async def handler(cents: int, ctx: Context) -> Any:
            await ctx.commit_point()
            return await world.charge(cents, ctx)

        def reconcile(cents: int) -> Any:
            return Done({"found": cents}) if world.effects else NotDone()

        app.command(name="charge", on_crash="reconcile", reconcile=reconcile)(handler)


async def test_successor_that_hangs_up_does_not_destroy_the_evidence(
    app: App, ledger: Ledger, store: Store, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B2: the first acted and vanished; the second's caller leaves in its claim; the third must
    still ask.
    """
    Truth(app, world)
    await vanish(ledger, store, on_crash="reconcile")
    world.act(5)
    handle = await app.ledger()
    claim = handle.claim
    claimed = asyncio.Event()
    answered = asyncio.Event()

    async def slow(wanted: Claim) -> Record:
        record = await claim(wanted)
        claimed.set()
        await answered.wait()
        return record

    monkeypatch.setattr(handle, "claim", slow)
    second = asyncio.create_task(app.handle(charge(2)))
    await claimed.wait()
    second.cancel()
    answered.set()
    with pytest.raises(asyncio.CancelledError):
        await second
    await still_stands(ledger)
    store.age(ID, LEASE + 1)
    monkeypatch.undo()
    assert result(await app.handle(charge(3))) == {"found": 5}
    assert world.effects == [5]


async def test_successor_whose_claim_was_not_acknowledged_does_not_destroy_the_evidence(
    app: App, ledger: Ledger, store: Store, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B2: the same, when the answer to the claim is lost."""
    Truth(app, world)
    await vanish(ledger, store, on_crash="reconcile")
    world.act(5)
    await lose_claim(app, monkeypatch)
    assert error(await app.handle(charge(2)))["code"] == 50310
    await still_stands(ledger)
    store.age(ID, LEASE + 1)
    assert result(await app.handle(charge(3))) == {"found": 5}
    assert world.effects == [5]


async def still_stands(ledger: Ledger) -> None:
    """Give the clean-up after a lost claim enough round trips; the record must exist all the time."""
    for _ in range(20):
        await asyncio.sleep(0)
        assert await stands(ledger) is State.RUNNING
