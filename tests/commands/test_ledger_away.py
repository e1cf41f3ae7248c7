"""The ledger is away: before the effect the command is refused, after it the caller loses nothing
(P5, P9); every ledger.
"""

import asyncio
from typing import Any

import pytest

from tests.calls import batch, call, error, lose_completions, read, result
from tests.commands.charges import NewApp, World, charge, lose_claim, stands
from tests.ledger import answers_again
from tests.servers import Server, Store
from wirecall import App, DomainError
from wirecall.ledger.base import Ledger, LedgerDown, State

with_server = pytest.mark.parametrize("store", ["redis", "postgres"], indirect=True)

UNAVAILABLE = {"type": "ledger_unavailable", "ran": "no"}


async def test_claim_with_a_lost_answer_runs_nothing_and_is_released(
    app: App, ledger: Ledger, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An honest retry does not end in "unknown"."""
    app.command(world.charge)
    await lose_claim(app, monkeypatch)
    refused = error(await app.handle(charge()))
    assert (refused["code"], refused["data"]) == (50310, UNAVAILABLE)
    assert world.effects == []
    assert result(await app.handle(charge()))["number"] == 1


async def test_outcome_that_cannot_be_recorded_is_answered_and_recorded_later(
    app: App, ledger: Ledger, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P5: the ledger is lost after the effect; the caller gets the true outcome, and so does the
    retry.
    """
    app.command(world.charge)
    failures = lose_completions(monkeypatch, await app.ledger(), times=2)
    assert result(await app.handle(charge(1)))["number"] == 1
    replayed: list[Any] = []
    assert result(await app.handle(charge(2), replayed=replayed))["number"] == 1
    assert replayed == [2]
    assert failures == []
    assert await stands(ledger) is State.DONE
    assert world.effects == [5]


async def test_error_that_cannot_be_recorded_says_so(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The true outcome with `recorded: false`."""

    @app.command(name="charge")
    async def handler(cents: int) -> None:
        raise DomainError(4020, "not enough money", {"balance": 3})

    lose_completions(monkeypatch, await app.ledger(), times=1)
    assert error(await app.handle(charge(1)))["data"] == {"balance": 3, "recorded": False}
    assert error(await app.handle(charge(2)))["data"] == {"balance": 3, "replayed": True}


async def test_commit_point_that_cannot_be_written_stops_the_handler(
    app: App, ledger: Ledger, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.command(name="charge")(world.held_between)
    world.gate.set()
    handle = await app.ledger()

    async def away(*args: Any) -> bool:
        raise LedgerDown("away")

    with monkeypatch.context() as patched:
        patched.setattr(handle, "commit_point", away)
        assert error(await app.handle(charge()))["data"]["ran"] in ("no", "unknown")
    assert world.effects == []


@with_server
async def test_ledger_that_is_unreachable_refuses_commands_but_not_queries(
    store: Store, new_app: NewApp, world: World, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(f"{store.kind}_server")
    opened = new_app()
    fresh = new_app()
    for app in (opened, fresh):
        app.command(world.charge)
        app.query(name="look")(lambda: len(world.effects))
    assert result(await opened.handle(charge(key="before")))["number"] == 1
    server.kill()
    try:
        for app in (opened, fresh):
            refused = error(await app.handle(charge()))
            assert (refused["code"], refused["data"]) == (50310, UNAVAILABLE)
            assert result(await app.handle(call("look"))) == 1
            mixed = read(await app.handle(batch(call("look", id=1), charge(2), call("look", id=3))))
            assert [answer.get("result") for answer in mixed] == [1, None, 1]
    finally:
        server.start()
    for app in (opened, fresh):
        await answers_again(await app.ledger())
        assert result(await app.handle(charge()))["number"] == 2
        assert result(await app.handle(charge(key="before")))["number"] == 1


@with_server
async def test_ledger_server_that_dies_after_the_effect_costs_the_caller_nothing(
    store: Store, app: App, ledger: Ledger, world: World, request: pytest.FixtureRequest
) -> None:
    """P5, P9: the true outcome is answered; when the server is back, it is recorded, and a retry
    gets it.
    """
    server: Server = request.getfixturevalue(f"{store.kind}_server")
    app.command(name="charge")(world.held_after)
    first = asyncio.create_task(app.handle(charge(1)))
    await world.begun.wait()
    server.kill()
    try:
        world.gate.set()
        assert result(await first)["number"] == 1
    finally:
        server.start()
    await answers_again(await app.ledger())
    replayed: list[Any] = []
    assert result(await app.handle(charge(2), replayed=replayed))["number"] == 1
    assert replayed == [2]
    assert world.effects == [5]
