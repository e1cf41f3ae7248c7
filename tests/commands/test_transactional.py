"""`on_crash="transactional"`: effect and record are committed together (B1), over every store that
has transactions.
"""

import asyncio
from typing import Any

import pytest
from msgspec import structs

from tests.calls import call, error, read, result
from tests.clock import LoopClock
from tests.commands.charges import (
    CONFLICT,
    ID,
    PATIENCE,
    PRINT,
    Effects,
    NewApp,
    World,
    charge,
    is_in_progress,
    is_unknown,
    late,
    stands,
    transactional,
)
from tests.ledger import answers_again, claim_of
from tests.servers import Postgres, Server, Store
from wirecall import App, Context, DomainError, connect
from wirecall.errors import InternalError
from wirecall.ledger.base import Ledger, State


@transactional
async def test_effect_and_record_commit_together(
    app: App, effects: Effects, ledger: Ledger
) -> None:
    """B1: until the commit, neither is visible."""
    seen: list[Any] = []

    @app.command(name="charge", on_crash="transactional")
    async def handler(cents: int, ctx: Context) -> Any:
        number = await effects.add(ctx, cents)
        seen.append((effects.all, await ledger.get(ID)))
        return {"number": number}

    replayed: list[Any] = []
    for id in (1, 2, 3):
        assert result(await app.handle(charge(id), replayed=replayed)) == {"number": 1}
    assert seen == [([], None)]
    assert replayed == [2, 3]
    assert effects.all == [5]
    assert await stands(ledger) is State.DONE


@transactional
async def test_transaction_without_a_key_commits_effect_and_record(
    app: App, effects: Effects, ledger: Ledger
) -> None:
    """B1, P4: a generated key holds the record.

    Each such call is a new intent, over JSON-RPC and over MCP.
    """
    keys: list[str | None] = []

    @app.command(name="charge", on_crash="transactional")
    async def handler(cents: int, ctx: Context) -> int:
        keys.append(ctx.idempotency_key)
        number = await effects.add(ctx, cents)
        if cents < 0:
            raise RuntimeError("after its write")
        return number

    assert result(await app.handle(call("charge", {"cents": 5}))) == 1
    assert result(await app.handle(call("charge", {"cents": 5}))) == 2
    async with connect(app, protocol="mcp", revision="2025-06-18") as client:
        assert await client.call_tool("charge", {"cents": 5}, key=False, type=int) == 3
    async with connect(app, protocol="mcp") as client:
        assert await client.call_tool("charge", {"cents": 5}, key=False, type=int) == 4
        with pytest.raises(InternalError):
            await client.call_tool("charge", {"cents": -1}, key=False)
    assert error(await app.handle(call("charge", {"cents": -1})))["data"] == {"ran": "no"}
    assert effects.all == [5, 5, 5, 5]
    assert len({*keys}) == 6 and None not in keys
    assert (await ledger.counts())[State.DONE] == 4


@transactional
async def test_transaction_requires_a_key_in_production(new_app: NewApp, effects: Effects) -> None:
    """P4: JSON-RPC alone; clients of MCP have none."""
    app = new_app(mode="production")

    @app.command(name="charge", on_crash="transactional")
    async def handler(cents: int, ctx: Context) -> int:
        return await effects.add(ctx, cents)

    assert (
        error(await app.handle(call("charge", {"cents": 5})))["data"]["type"]
        == "idempotency_key_required"
    )
    async with connect(app, protocol="mcp") as client:
        assert await client.call_tool("charge", {"cents": 5}, key=False, type=int) == 1
    assert effects.all == [5]


@transactional
async def test_domain_error_undoes_the_transaction_and_is_recorded(
    app: App, effects: Effects, ledger: Ledger
) -> None:
    """B1, P5."""

    @app.command(name="charge", on_crash="transactional")
    async def handler(cents: int, ctx: Context) -> Any:
        await effects.add(ctx, cents)
        raise DomainError(4020, "not enough money", {"cents": cents})

    assert error(await app.handle(charge()))["data"] == {"cents": 5}
    assert error(await app.handle(charge()))["data"] == {"cents": 5, "replayed": True}
    assert effects.all == []
    assert await stands(ledger) is State.DONE


@transactional
async def test_transaction_of_a_handler_that_fails_leaves_nothing(
    app: App, effects: Effects, ledger: Ledger
) -> None:
    """B1: no effect, no record; a retry runs."""
    attempts: list[int] = []

    @app.command(name="charge", on_crash="transactional")
    async def handler(cents: int, ctx: Context) -> Any:
        attempts.append(cents)
        number = await effects.add(ctx, cents)
        if len(attempts) == 1:
            raise RuntimeError("secret")
        return {"number": number}

    refused = error(await app.handle(charge()))
    assert (refused["code"], refused["data"]) == (-32603, {"ran": "no"})
    assert effects.all == []
    assert await ledger.get(ID) is None
    assert result(await app.handle(charge())) == {"number": 1}
    assert effects.all == [5]


@transactional
@pytest.mark.parametrize("how", ["deadline", "cancel"])
async def test_transaction_that_is_interrupted_leaves_nothing(
    how: str, app: App, effects: Effects, ledger: Ledger, world: World, clock: LoopClock
) -> None:
    """B1: until the commit, everything can be undone."""

    @app.command(
        name="charge", on_crash="transactional", timeout=PATIENCE if how == "deadline" else None
    )
    async def handler(cents: int, ctx: Context) -> Any:
        number = await effects.add(ctx, cents)
        world.begun.set()
        await world.gate.wait()
        return {"number": number}

    first = asyncio.create_task(app.handle(charge()))
    await world.begun.wait()
    if how == "cancel":
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
    else:
        clock.advance(PATIENCE)
        refused = error(await first)
        assert refused == late("no", PATIENCE)
    assert effects.all == []
    assert await ledger.get(ID) is None
    world.gate.set()
    assert result(await app.handle(charge())) == {"number": 1}
    assert effects.all == [5]


@transactional
@pytest.mark.parametrize("is_late", [True, False])
async def test_transaction_past_its_own_commit_point_is_finished(
    app: App, effects: Effects, ledger: Ledger, world: World, clock: LoopClock, is_late: bool
) -> None:
    """B1: it may have acted in another system, so its caller can no longer stop it."""

    runs = []

    @app.command(name="charge", on_crash="transactional", timeout=PATIENCE if is_late else None)
    async def handler(cents: int, ctx: Context) -> Any:
        runs.append(1)
        await ctx.commit_point()
        number = await effects.add(ctx, cents)
        world.begun.set()
        await world.gate.wait()
        return {"number": number}

    first = asyncio.create_task(app.handle(charge()))
    await world.begun.wait()
    if is_late:
        clock.advance(PATIENCE)
        assert error(await first)["data"]["ran"] == "unknown"
    else:
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
    world.gate.set()
    assert result(await app.handle(charge())) == {"number": 1}
    assert effects.all == [5] and len(runs) == 1


@transactional
async def test_transaction_with_other_params_is_a_conflict(app: App, effects: Effects) -> None:
    @app.command(name="charge", on_crash="transactional")
    async def handler(cents: int, ctx: Context) -> Any:
        return await effects.add(ctx, cents)

    assert result(await app.handle(charge())) == 1
    refused = error(await app.handle(charge(cents=6)))
    assert (refused["code"], refused["data"]) == (42210, CONFLICT)
    assert effects.all == [5]


@transactional
async def test_transaction_result_that_is_not_stored_is_not_retained(
    app: App, effects: Effects, ledger: Ledger, store: Store
) -> None:
    @app.command(name="charge", on_crash="transactional", retention=100, max_stored_result=100)
    async def handler(cents: int, ctx: Context) -> Any:
        await effects.add(ctx, cents)
        return {1: "small", 2: "x" * 99, 3: object()}[cents]

    for cents in (1, 2, 3):
        await app.handle(charge(cents=cents, key=str(cents)))
    assert effects.all == [1, 2, 3]
    store.age(structs.replace(ID, key="1"), 101)
    for cents in (1, 2, 3):
        refused = error(await app.handle(charge(cents=cents, key=str(cents))))
        assert (refused["code"], refused["data"]["type"], refused["data"]["ran"]) == (
            41010,
            "result_not_retained",
            "yes",
        )
    assert effects.all == [1, 2, 3]


@transactional
@pytest.mark.parametrize("state", [State.RUNNING, State.UNKNOWN])
async def test_transaction_respects_a_record_that_another_mode_left(
    state: State, app: App, effects: Effects, ledger: Ledger
) -> None:
    """The method was declared differently before: a command that it began does not begin again."""

    @app.command(name="charge", on_crash="transactional", wait=0.1)
    async def handler(cents: int, ctx: Context) -> Any:
        return await effects.add(ctx, cents)

    record = await ledger.claim(claim_of(ID, fingerprint=PRINT))
    if state is State.RUNNING:
        is_in_progress(error(await app.handle(charge())))
    else:
        assert await ledger.abandon(record.token)
        is_unknown(error(await app.handle(charge())), record)
    assert effects.all == []
    assert await stands(ledger) is state


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
@pytest.mark.parametrize("when", ["before the effect", "after the effect"])
async def test_transaction_leaves_nothing_or_everything_if_its_server_dies(
    when: str, app: App, effects: Effects, postgres_server: Postgres
) -> None:
    """B1: exactly one effect in the end, whatever the first answer was."""
    deaths = [when]

    @app.command(name="charge", on_crash="transactional")
    async def handler(cents: int, ctx: Context) -> Any:
        if deaths == ["before the effect"]:
            deaths.clear()
            restart(postgres_server)
        number = await effects.add(ctx, cents)
        if deaths:
            deaths.clear()
            restart(postgres_server)
        return {"number": number}

    first = read(await app.handle(charge()))
    if "error" in first:
        assert (first["error"]["code"], first["error"]["data"]["ran"]) == (50310, "no")
        assert effects.all == []
        await answers_again(await app.ledger())
    assert result(await app.handle(charge())) == {"number": 1}
    assert effects.all == [5]


def restart(server: Server) -> None:
    server.kill()
    server.start()
