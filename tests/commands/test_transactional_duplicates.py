"""`on_crash="transactional"`: many transactions at once, and duplicates that wait for an open one
(B1).
"""

import asyncio
import sys
import time
from typing import Any

import psycopg
import pytest

from tests.calls import call, error, make_app, result
from tests.commands.charges import Effects, NewApp, World, charge, is_in_progress, transactional
from tests.servers import Store
from wirecall import App, Context
from wirecall.ledger.postgres import transaction as postgres_transaction


@transactional
async def test_duplicates_at_once_take_effect_once(new_app: NewApp, effects: Effects) -> None:
    """B1, over what counts as three processes."""
    apps = [new_app() for _ in range(3)]
    for each in apps:

        @each.command(name="charge", on_crash="transactional")
        async def handler(cents: int, ctx: Context) -> Any:
            return {"number": await effects.add(ctx, cents)}

    replayed: list[Any] = []
    calls = [apps[n % 3].handle(charge(n), replayed=replayed) for n in range(18)]
    assert [result(reply) for reply in await asyncio.gather(*calls)] == [{"number": 1}] * 18
    assert len(replayed) == 17
    assert effects.all == [5]


@transactional
async def test_commands_at_once_with_different_keys_all_take_effect(
    new_app: NewApp, effects: Effects
) -> None:
    apps = [new_app() for _ in range(3)]
    for each in apps:

        @each.command(name="charge", on_crash="transactional")
        async def handler(cents: int, ctx: Context) -> Any:
            await effects.add(ctx, cents)
            return cents

    calls = [apps[n % 3].handle(charge(n, cents=n, key=f"k{n}")) for n in range(15)]
    assert [result(reply) for reply in await asyncio.gather(*calls)] == list(range(15))
    assert effects.all == list(range(15))


# --- an open transaction --------------------------------------------------------------------------

only_postgres = pytest.mark.parametrize("store", ["postgres"], indirect=True)


def declare_held(app: App, effects: Effects, world: World, **terms: Any) -> None:
    """A transaction that has done its work, and stays open until the gate is."""

    @app.command(name="charge", on_crash="transactional", **terms)
    async def handler(cents: int, ctx: Context) -> Any:
        number = await effects.add(ctx, cents)
        world.begun.set()
        await world.gate.wait()
        return {"number": number}


@transactional
async def test_duplicate_of_an_open_transaction_in_another_process_waits_for_its_commit(
    new_app: NewApp, effects: Effects, world: World
) -> None:
    """B1."""
    here = new_app()
    there = new_app()
    for each in (here, there):
        declare_held(each, effects, world)
    first = asyncio.create_task(here.handle(charge(1)))
    await world.begun.wait()
    replayed: list[Any] = []
    second = asyncio.create_task(there.handle(charge(2), replayed=replayed))
    await asyncio.sleep(0)
    world.gate.set()
    assert result(await first) == result(await second) == {"number": 1}
    assert replayed == [2]
    assert effects.all == [5]


@transactional
async def test_duplicate_of_an_open_transaction_waits_as_long_as_its_method_declares(
    new_app: NewApp, effects: Effects, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than one turn of its store, but not indefinitely."""
    here = new_app()
    patient = new_app()
    hasty = new_app()
    await here.ledger()
    turn = in_short_turns(monkeypatch)
    for each, wait in ((here, 25), (patient, 25), (hasty, 3 * turn)):
        declare_held(each, effects, world, wait=wait)
    first = asyncio.create_task(here.handle(charge(1)))
    await world.begun.wait()
    replayed: list[Any] = []
    second = asyncio.create_task(patient.handle(charge(2), replayed=replayed))
    began = asyncio.get_running_loop().time()
    is_in_progress(error(await hasty.handle(charge(3))))
    assert asyncio.get_running_loop().time() - began >= 3 * turn
    assert not second.done()
    world.gate.set()
    assert result(await first) == result(await second) == {"number": 1}
    assert replayed == [2]
    assert effects.all == [5]


def in_short_turns(monkeypatch: pytest.MonkeyPatch) -> float:
    """Shorten the turns in which stores wait for a lock (SQLite 5 s, PostgreSQL 1 s); return their
    length.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("wirecall.ledger.sqlite") and hasattr(module, "PATIENCE"):
            monkeypatch.setattr(module, "PATIENCE", 0.2)
    monkeypatch.setattr(postgres_transaction, "TURN", 0.2)
    return 0.2


def holding(app: App, effects: Effects, world: World, **terms: Any) -> None:
    """Give an app a transactional command that waits after its effect."""

    @app.command(name="charge", on_crash="transactional", **terms)
    async def handler(cents: int, ctx: Context) -> Any:
        number = await effects.add(ctx, cents)
        world.begun.set()
        await world.gate.wait()
        return {"number": number}


@only_postgres
async def test_duplicate_of_an_open_transaction_may_have_a_short_wait(
    new_app: NewApp, effects: Effects, world: World, store: Store
) -> None:
    """SQLite's lock is the file's, and does not name the command that holds it: there it is 5 s at
    least.
    """
    here = new_app()
    there = new_app()
    for each in (here, there):
        holding(each, effects, world, wait=0.3)
    first = asyncio.create_task(here.handle(charge(1)))
    await world.begun.wait()
    async with asyncio.timeout(2.5):
        is_in_progress(error(await there.handle(charge(2))))
    world.gate.set()
    assert result(await first) == {"number": 1}
    assert effects.all == [5]


@only_postgres
async def test_duplicates_that_wait_for_open_transactions_leave_connections_to_others(
    new_app: NewApp, effects: Effects, world: World, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_short_turns(monkeypatch)
    here = new_app()
    async with make_app(ledger=f"{store.url}&pool=2") as there:
        for each in (here, there):
            holding(each, effects, world)

        @there.command
        async def other() -> int:
            return 1

        keys = [f"key-{number}" for number in range(6)]
        firsts = [asyncio.create_task(here.handle(charge(key=key))) for key in keys]
        await eventually_open(store, len(keys))
        seconds = [asyncio.create_task(there.handle(charge(key=key))) for key in keys]
        await eventually_open(store, len(keys) + 2)
        async with asyncio.timeout(10):
            assert result(await there.handle(call("other", key="k"))) == 1
        assert not any(task.done() for task in seconds)
        world.gate.set()
        assert [result(await task) for task in firsts] == [result(await task) for task in seconds]
    assert effects.all == [5] * len(keys)


async def eventually_open(store: Store, number: int) -> None:
    """Wait until so many transactions have written a record, or wait for one."""
    statement = (
        "SELECT count(*) FROM pg_stat_activity WHERE xact_start IS NOT NULL "
        "AND application_name = 'wirecall'"
    )
    async with (
        asyncio.timeout(10),
        await psycopg.AsyncConnection.connect(store.url, autocommit=True) as db,
    ):
        while True:
            row = await (await db.execute(statement)).fetchone()
            if row is not None and row[0] >= number:
                return
            await asyncio.sleep(0.01)


@only_postgres
async def test_statement_that_a_failed_handler_left_running_is_waited_for(
    store: Store, effects: Effects
) -> None:
    """The server does not probe a session while a caller waits for its answer: the probe would take
    the answer.
    """
    left: list[asyncio.Task[Any]] = []
    async with make_app(ledger=f"{store.url}&pool=1") as app:

        @app.command(name="charge", on_crash="transactional")
        async def handler(cents: int, ctx: Context) -> Any:
            if not left:
                left.append(asyncio.create_task(ctx.db.execute("SELECT pg_sleep(0.05)")))
                await asyncio.sleep(0.01)
                time.sleep(0.2)  # noqa: ASYNC251  # the answer has arrived by now, and is still unread
                raise psycopg.OperationalError("of another server")
            return await effects.add(ctx, cents)

        refused = error(await app.handle(charge(1)))
        assert (refused["code"], refused["data"]["ran"]) == (-32603, "no")
        async with asyncio.timeout(10):
            assert result(await app.handle(charge(2))) == 1
            await left[0]
    assert effects.all == [5]


@transactional
@pytest.mark.parametrize("how", ["deadline", "hung up", "stop"])
async def test_duplicate_that_waits_for_an_open_transaction_can_be_cancelled(
    how: str, new_app: NewApp, effects: Effects, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A duplicate that leaves gets "unknown" about the first call, and an app that stops does not
    wait for it.
    """
    here = new_app()
    there = new_app()
    await here.ledger()
    await (await there.ledger()).counts()  # connected: the deadline is for the wait
    in_short_turns(monkeypatch)
    for each in (here, there):
        holding(each, effects, world, timeout=1.0 if how == "deadline" and each is there else None)
    first = asyncio.create_task(here.handle(charge(1)))
    await world.begun.wait()
    second = asyncio.create_task(there.handle(charge(2)))
    async with asyncio.timeout(10):  # `wait` is 25 s
        if how == "deadline":
            refused = error(await second)
            assert (refused["code"], refused["data"]["ran"]) == (50410, "unknown")
        elif how == "hung up":
            await asyncio.sleep(0.1)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
        else:
            await asyncio.sleep(0.1)
            await there.aclose()
            assert error(await second)["code"] == 50310
    world.gate.set()
    assert result(await first) == {"number": 1}
    assert effects.all == [5]
