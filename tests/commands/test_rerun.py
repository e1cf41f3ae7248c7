"""`on_crash="rerun"`: a command whose holder vanished or failed runs again, and its handler can see
that (B2).
"""

import asyncio
from typing import Any

import pytest

from tests.calls import error, result
from tests.commands.charges import ID, NewApp, World, charge, is_unknown, vanish
from tests.ledger import LEASE
from tests.servers import Store
from wirecall import App, Context, DomainError
from wirecall.errors import Busy
from wirecall.ledger.base import Ledger, State


class Price:
    """A value that a provider makes."""


async def test_rerun_runs_again_and_counts_attempts(
    app: App, ledger: Ledger, store: Store, world: World
) -> None:
    app.command(name="charge", on_crash="rerun")(world.charge)
    record = await vanish(ledger, store, on_crash="rerun")
    replayed: list[Any] = []
    assert result(await app.handle(charge(), replayed=replayed))["number"] == 1
    assert replayed == []
    (ctx,) = world.seen
    assert (ctx.attempt, ctx.idempotency_key) == (2, "k")
    assert ctx.fence > record.fence
    assert result(await app.handle(charge()))["number"] == 1


async def test_downstream_key_is_the_same_on_every_attempt_and_unique_to_its_command(
    app: App, world: World
) -> None:
    @app.command(name="charge", on_crash="rerun")
    async def handler(cents: int, ctx: Context) -> Any:
        await world.charge(cents, ctx)
        raise RuntimeError("after the effect")

    for key in ("k", "k", "other"):
        await app.handle(charge(key=key))
    await app.handle(charge(), caller="alice")
    first, again, other, alice = (ctx.downstream_key for ctx in world.seen)
    assert first == again
    assert len({first, other, alice}) == 3
    assert [ctx.attempt for ctx in world.seen] == [1, 2, 1, 1]


async def test_rerun_gives_up_after_five_attempts(
    app: App, ledger: Ledger, store: Store, world: World
) -> None:
    app.command(name="charge", on_crash="rerun")(world.charge)
    for _ in range(5):
        record = await vanish(ledger, store, on_crash="rerun")
    assert record.attempts == 5
    is_unknown(error(await app.handle(charge())), record)
    assert world.effects == []


async def test_holder_that_lost_its_lease_answers_with_its_successor_s_outcome(
    new_app: NewApp, store: Store, world: World
) -> None:
    here = new_app()
    there = new_app()
    here.command(name="charge", on_crash="rerun")(world.held_after)
    there.command(name="charge", on_crash="rerun")(world.charge)
    first = asyncio.create_task(here.handle(charge(1)))
    await world.begun.wait()
    store.age(ID, LEASE + 1)
    assert result(await there.handle(charge(2)))["number"] == 2
    world.gate.set()
    assert result(await first)["number"] == 2
    assert result(await here.handle(charge(3)))["number"] == 2


async def test_rerun_that_stops_before_its_commit_point_keeps_evidence_of_the_run_before(
    app: App, ledger: Ledger, store: Store, world: World
) -> None:
    """This run did nothing, which says nothing about the vanished one: the attempts continue to
    count.
    """

    @app.command(name="charge", on_crash="rerun")
    async def handler(cents: int, ctx: Context) -> Any:
        if ctx.attempt == 2:
            raise RuntimeError("before the commit point")
        await ctx.commit_point()
        return await world.charge(cents, ctx)

    before = await vanish(ledger, store, on_crash="rerun")
    assert error(await app.handle(charge()))["code"] == -32603
    left = await ledger.get(ID)
    assert left is not None
    assert (left.state, left.committed, left.attempts) == (State.RUNNING, True, 2)
    assert left.started_at == pytest.approx(before.started_at, abs=1e-3)
    assert result(await app.handle(charge()))["number"] == 1
    assert world.seen[0].attempt == 3


@pytest.mark.parametrize(
    "raised", [RuntimeError("a fault"), Busy(ran="no"), DomainError(4020, "not enough")], ids=repr
)
@pytest.mark.parametrize("place", ["handler", "provider"])
async def test_rerun_that_does_nothing_does_not_speak_for_the_run_before(
    app: App, ledger: Ledger, store: Store, place: str, raised: Exception
) -> None:
    """`ran: "no"` would be false if the run that vanished has acted."""
    if place == "handler" and isinstance(raised, DomainError):
        pytest.skip("an error of the handler is an outcome, which is recorded")

    @app.provide
    def price() -> Price:
        if place == "provider":
            raise raised
        return Price()

    @app.command(name="charge", on_crash="rerun")
    async def handler(cents: int, price: Price, ctx: Context) -> Any:
        if place == "handler":
            raise raised
        await ctx.commit_point()

    await vanish(ledger, store, on_crash="rerun")
    assert error(await app.handle(charge()))["data"]["ran"] == "unknown"
    # A first run that does nothing speaks for itself.
    assert error(await app.handle(charge(key="another")))["data"]["ran"] == "no"


async def test_rerun_after_an_exception_starts_with_the_next_call(app: App, world: World) -> None:
    @app.command(name="charge", on_crash="rerun")
    async def handler(cents: int, ctx: Context) -> Any:
        await world.charge(cents, ctx)
        if ctx.attempt < 3:
            raise RuntimeError("secret")
        return ctx.attempt

    for _ in range(2):
        refused = error(await app.handle(charge()))
        assert (refused["code"], refused["data"]) == (-32603, {"ran": "unknown"})
    assert result(await app.handle(charge())) == 3
    assert result(await app.handle(charge())) == 3
    fences = [ctx.fence for ctx in world.seen]
    assert len(fences) == 3
    assert fences == sorted(set(fences))
