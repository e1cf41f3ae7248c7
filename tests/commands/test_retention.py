"""Results that are not kept: too large, too old, or not to be encoded (P9); every ledger."""

import asyncio
import hashlib
import time
from typing import Any

import pytest

from tests.calls import error, result
from tests.commands.charges import ID, World, charge, stands, vanish, watch
from tests.servers import DURABLE, PATIENCE, Store
from wirecall import App, DomainError
from wirecall.ledger.base import UNKNOWN_AFTER, Ledger, Record, State


def is_not_retained(refused: Any, digest: bytes, record: Record | None) -> None:
    assert record is not None
    assert refused == {
        "code": 41010,
        "message": refused["message"],
        "data": {
            "type": "result_not_retained",
            "ran": "yes",
            "digest": digest.hex(),
            "completed_at": pytest.approx(record.completed_at, abs=1e-3),
        },
    }


async def test_result_too_large_to_keep_is_answered_once_and_then_named_by_its_digest(
    app: App, ledger: Ledger, world: World
) -> None:
    @app.command(name="charge", max_stored_result=100)
    async def handler(cents: int) -> str:
        world.act(cents)
        return "x" * 99

    assert result(await app.handle(charge())) == "x" * 99
    digest = hashlib.sha256(b'"' + b"x" * 99 + b'"').digest()
    is_not_retained(error(await app.handle(charge())), digest, await ledger.get(ID))
    assert world.effects == [5]


async def test_result_of_exactly_the_limit_is_kept(app: App, world: World) -> None:
    @app.command(name="charge", max_stored_result=100)
    async def handler(cents: int) -> str:
        world.act(cents)
        return "x" * 98

    for _ in range(2):
        assert result(await app.handle(charge())) == "x" * 98
    assert world.effects == [5]


async def test_record_after_its_retention_keeps_only_the_fact(
    app: App, ledger: Ledger, store: Store, world: World
) -> None:
    """P9: a TTL per method."""
    app.command(name="charge", retention=100)(world.charge)
    reply = await app.handle(charge())
    store.age(ID, 90)
    assert await app.handle(charge()) == reply
    store.age(ID, 11)
    digest = hashlib.sha256(b'{"charged":5,"number":1}').digest()
    for _ in range(2):
        is_not_retained(error(await app.handle(charge())), digest, await ledger.get(ID))
    assert await stands(ledger) is State.TOMBSTONE
    assert world.effects == [5]


async def test_recorded_error_expires_after_its_retention(app: App, store: Store) -> None:
    @app.command(name="charge", retention=100)
    async def handler(cents: int) -> None:
        raise DomainError(4020, "no")

    await app.handle(charge())
    store.age(ID, 101)
    assert error(await app.handle(charge()))["data"]["type"] == "result_not_retained"


async def test_key_is_forgotten_after_eight_retentions(
    app: App, ledger: Ledger, store: Store, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.command(name="charge", retention=100)(world.charge)
    await app.handle(charge())
    store.age(ID, 101)
    await app.handle(charge())
    store.age(ID, 701)
    assert await ledger.sweep() == 1
    # The process is as much older as the store.
    monkeypatch.setattr("wirecall.commands.witness.clock", lambda: time.monotonic() + 802)
    assert result(await app.handle(charge()))["number"] == 2


async def test_app_sweeps_its_ledger_periodically_after_its_first_command(
    app: App, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wirecall.commands.background.SWEEP_EVERY", 0.001)
    app.command(name="charge")(world.charge)
    ledger = await app.ledger()
    swept = asyncio.Semaphore(0)

    async def sweep(limit: int = 500) -> int:
        swept.release()
        return 0

    monkeypatch.setattr(ledger, "sweep", sweep)
    await app.handle(charge())
    async with asyncio.timeout(PATIENCE):
        await swept.acquire()
        await swept.acquire()


@pytest.mark.parametrize("store", DURABLE, indirect=True)
async def test_server_sweeps_before_its_first_command(
    app: App, ledger: Ledger, store: Store, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process died and another one starts: the store reports an unknown outcome before any call
    arrives.
    """
    monkeypatch.setattr("wirecall.commands.background.SWEEP_EVERY", 0.001)
    app.command(name="charge")(world.charge)
    await vanish(ledger, store)
    store.age(ID, UNKNOWN_AFTER)
    swept = await watch(app, "sweep")
    messages: asyncio.Queue[Any] = asyncio.Queue()
    answers: asyncio.Queue[Any] = asyncio.Queue()
    serving = asyncio.create_task(app.asgi()({"type": "lifespan"}, messages.get, answers.put))
    await messages.put({"type": "lifespan.startup"})
    async with asyncio.timeout(PATIENCE):
        assert (await answers.get())["type"] == "lifespan.startup.complete"
        while await stands(ledger) is not State.UNKNOWN:
            await swept.get()
        await messages.put({"type": "lifespan.shutdown"})
        await serving


async def test_command_with_an_unencodable_result_is_still_done(
    app: App, ledger: Ledger, world: World
) -> None:
    @app.command(name="charge")
    async def handler(cents: int) -> Any:
        world.act(cents)
        return {"fine": 1, "not": object()}

    refused = error(await app.handle(charge()))
    assert (refused["code"], refused["data"]) == (-32603, {"ran": "yes"})
    refused = error(await app.handle(charge()))
    assert (refused["code"], refused["data"]["type"], refused["data"]["ran"]) == (
        41010,
        "result_not_retained",
        "yes",
    )
    assert set(refused["data"]) == {"type", "ran", "digest", "completed_at"}
    assert await stands(ledger) is State.DONE
    assert world.effects == [5]
