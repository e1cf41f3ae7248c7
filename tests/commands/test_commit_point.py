"""Before its commit point a handler has done nothing, after it that is unknown (B2); every ledger."""

import asyncio
from typing import Any

import pytest

from tests.calls import error, read, result
from tests.commands.charges import ID, NewApp, World, charge, is_unknown, stands, watch
from tests.ledger import LEASE
from tests.servers import Store
from wirecall import App, Context, DomainError
from wirecall.ledger.base import Ledger, State

# --- failures -------------------------------------------------------------------------------------


async def test_exception_before_the_commit_point_did_nothing(
    app: App, ledger: Ledger, world: World
) -> None:
    @app.command(name="charge")
    async def handler(cents: int, ctx: Context) -> Any:
        if not world.seen:
            world.seen.append(ctx)
            raise RuntimeError("secret")
        await ctx.commit_point()
        return world.act(cents)

    refused = error(await app.handle(charge()))
    assert (refused["code"], refused["data"]) == (-32603, {"ran": "no"})
    assert await ledger.get(ID) is None
    assert result(await app.handle(charge()))["number"] == 1
    assert result(await app.handle(charge()))["number"] == 1


@pytest.mark.parametrize("named", [True, False], ids=["after it", "without one"])
async def test_exception_after_the_commit_point_leaves_an_unknown_outcome(
    named: bool, app: App, ledger: Ledger, world: World
) -> None:
    """B2: deleting the record would invite a second effect.

    Without a commit point, it is passed on entry.
    """
    if named:

        @app.command(name="charge")
        async def handler(cents: int, ctx: Context) -> Any:
            await ctx.commit_point()
            world.act(cents)
            raise RuntimeError("secret")
    else:

        @app.command(name="charge")
        async def plain(cents: int) -> Any:
            world.act(cents)
            raise RuntimeError("secret")

    refused = error(await app.handle(charge()))
    assert (refused["code"], refused["data"]) == (-32603, {"ran": "unknown"})
    record = await ledger.get(ID)
    assert record is not None and record.state is State.UNKNOWN
    is_unknown(error(await app.handle(charge())), record)
    assert world.effects == [5]


async def test_domain_error_before_the_commit_point_is_recorded(app: App, ledger: Ledger) -> None:
    calls: list[int] = []

    @app.command(name="charge")
    async def handler(cents: int, ctx: Context) -> None:
        calls.append(cents)
        if cents:
            raise DomainError(4020, "no")
        await ctx.commit_point()

    for _ in range(2):
        assert error(await app.handle(charge()))["code"] == 4020
    assert await stands(ledger) is State.DONE
    assert calls == [5]


async def test_commit_point_works_in_a_sync_handler(app: App, ledger: Ledger, world: World) -> None:
    """`commit_point` blocks, so the function runs in a thread."""

    @app.command(name="charge")
    def handler(cents: int, ctx: Context) -> Any:
        if not world.seen:
            world.seen.append(ctx)
            raise RuntimeError("before")
        ctx.commit_point()
        world.act(cents)
        raise RuntimeError("after")

    assert error(await app.handle(charge()))["data"] == {"ran": "no"}
    assert await ledger.get(ID) is None
    assert error(await app.handle(charge()))["data"] == {"ran": "unknown"}
    assert await stands(ledger) is State.UNKNOWN
    assert world.effects == [5]


# --- the lease ------------------------------------------------------------------------------------


async def test_commit_point_after_the_lease_is_refused(
    app: App, ledger: Ledger, store: Store, world: World
) -> None:
    """B2: a paused holder stops before its effect, because a successor may be at work."""
    app.command(name="charge")(world.held_before)
    first = asyncio.create_task(app.handle(charge()))
    await world.begun.wait()
    store.age(ID, LEASE + 1)
    world.gate.set()
    refused = error(await first)
    assert refused["data"]["ran"] in ("no", "unknown")
    assert world.effects == []
    assert result(await app.handle(charge()))["number"] == 1


async def test_holder_that_lost_its_lease_stops_at_its_commit_point(
    new_app: NewApp, store: Store, world: World
) -> None:
    here = new_app()
    there = new_app()
    here.command(name="charge")(world.held_before)
    there.command(name="charge")(world.charge)
    first = asyncio.create_task(here.handle(charge()))
    await world.begun.wait()
    store.age(ID, LEASE + 1)
    assert result(await there.handle(charge()))["number"] == 1
    world.gate.set()
    assert "error" in read(await first)
    assert result(await here.handle(charge()))["number"] == 1
    assert world.effects == [5]


async def test_lease_is_renewed_while_the_handler_runs(
    app: App, ledger: Ledger, world: World
) -> None:
    app.command(name="charge", lease=0.2)(world.held_after)
    beats = await watch(app, "heartbeat")
    first = asyncio.create_task(app.handle(charge()))
    for _ in range(3):
        assert await beats.get() is True
    world.gate.set()
    assert result(await first)["number"] == 1
