"""Calls that do not claim, handlers that change their own call, and background sweeps; every
ledger.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.calls import batch, call, error, make_app, read, result
from tests.ledger import claim_of, granted, outcome_of
from tests.servers import Store
from wirecall import App, Context, Limits, RpcError, jsonrpc
from wirecall.ledger.base import Ledger, LedgerDown, RecordId, State


@pytest.fixture
async def app(store: Store) -> AsyncIterator[App]:
    async with make_app(ledger=store.url, limits=Limits(in_flight=2)) as app:
        yield app


# --- refused before anything runs: no record (P3, P4, P7) -----------------------------------------


async def test_call_refused_before_it_runs_leaves_no_record(app: App, ledger: Ledger) -> None:
    effects: list[int] = []
    app.command(name="put")(lambda n: effects.append(n))

    @app.middleware
    async def only_ada(ctx: Context, call_next: Any) -> Any:
        if ctx.caller != "ada":
            raise RpcError(40300, "members only")
        return await call_next(ctx)

    async def code(message: bytes, caller: str = "ada") -> int:
        found: int = error(await app.handle(message, caller=caller))["code"]
        return found

    assert await code(call("put", {"n": 1}, key="k"), "bob") == 40300
    assert await code(call("push", {"n": 1}, key="k")) == -32601
    assert await code(call("put", {"m": 1}, key="k")) == -32602
    assert await code(call("put", {"n": 1}, key="two words")) == -32602
    assert await code(call("put", {"n": 1}, id=None, key="k")) == -32600
    assert await code(jsonrpc.make_notification("put", {"n": 1, "idempotency_key": "k"})) == -32600
    assert await code(call("put", {"n": "x" * (2 << 20)}, key="k")) == -32600
    assert sum((await ledger.counts()).values()) == 0
    assert effects == []


async def test_busy_app_takes_no_claim(app: App, ledger: Ledger) -> None:
    begun = asyncio.Event()
    go = asyncio.Event()

    @app.command(execution="parallel")
    async def put(n: int) -> int:
        begun.set()
        await go.wait()
        return n

    two = asyncio.create_task(
        app.handle(batch(call("put", {"n": 1}, 1, "a"), call("put", {"n": 2}, 2, "b")))
    )
    await begun.wait()
    busy = error(await app.handle(call("put", {"n": 3}, key="c")))
    assert (busy["code"], busy["data"]["ran"], busy["data"]["retry_after_ms"] > 0) == (
        42910,
        "no",
        True,
    )
    assert await ledger.get(RecordId("", "put", "c")) is None
    go.set()
    assert [answer["result"] for answer in read(await two)] == [1, 2]
    assert result(await app.handle(call("put", {"n": 3}, key="c"))) == 3


# --- the identity is fixed before the handler runs ------------------------------------------------


async def test_record_is_not_affected_by_a_handler_that_changes_its_params_and_context(
    app: App,
) -> None:
    """Other libraries hash params that the handler has changed, and record its outcome under
    another key.
    """
    effects: list[int] = []

    @app.command
    async def put(items: list[int], ctx: Context) -> Any:
        seen = (ctx.idempotency_key, ctx.attempt, ctx.caller)
        effects.append(1)
        items.append(len(effects))
        ctx.caller = "eve"
        ctx.record = "other"
        ctx.method = "other"
        with pytest.raises(AttributeError):
            ctx.__setattr__("idempotency_key", "other")
        return [items, seen]

    for id in (1, 2):
        assert result(await app.handle(call("put", {"items": [7]}, id, "k"), caller="ada")) == [
            [7, 1],
            ["k", 1, "ada"],
        ]
    assert (
        error(await app.handle(call("put", {"items": [7, 1]}, key="k"), caller="ada"))["code"]
        == 42210
    )
    assert effects == [1]


# --- the sweep ------------------------------------------------------------------------------------


async def old_records(ledger: Ledger, store: Store, count: int) -> None:
    for n in range(count):
        record = await granted(ledger, RecordId("", "put", f"old-{n:03}"))
        assert await ledger.complete(record.token, outcome_of(), 1000)
        store.age(record.id, 1001)


async def test_sweep_runs_in_small_batches_and_continues_after_errors(
    app: App, ledger: Ledger, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wirecall.commands.background.SWEEP_EVERY", 0.02)
    monkeypatch.setattr("wirecall.commands.background.SWEEP_BATCH", 3)
    await old_records(ledger, store, 10)
    own = await app.ledger()
    sweep = own.sweep
    limits = list[int]()
    trouble = [LedgerDown("away")]
    left = 10
    is_clean = asyncio.Event()

    async def watched(limit: int = 500) -> int:
        nonlocal left
        limits.append(limit)
        if trouble:
            raise trouble.pop()
        changed = await sweep(limit)
        left -= changed
        if left == 0:
            is_clean.set()
        return changed

    monkeypatch.setattr(own, "sweep", watched)
    app.command(name="put")(lambda: 1)
    # The first command starts the sweep.
    assert result(await app.handle(call("put", key="new"))) == 1
    async with asyncio.timeout(20):
        await is_clean.wait()
    assert set(limits) == {3}
    counts = await ledger.counts()
    assert (counts[State.TOMBSTONE], counts[State.DONE]) == (10, 1)


async def test_commands_run_while_the_ledger_is_swept(
    app: App, ledger: Ledger, store: Store
) -> None:
    effects: list[int] = []
    app.command(name="put")(lambda n: effects.append(n))
    await old_records(ledger, store, 60)

    async def sweep() -> int:
        changed = 0
        while found := await ledger.sweep(5):
            changed += found
        return changed

    async with asyncio.timeout(30):
        swept = asyncio.create_task(sweep())
        for n in range(40):
            result(await app.handle(call("put", {"n": n}, key=f"k{n}")))
            result(await app.handle(call("put", {"n": n}, key=f"k{n}")))
        assert await swept == 60
    assert effects == list(range(40))


async def test_sweep_and_claim_of_one_record_at_once_leave_it_done(
    store: Store, ledger: Ledger
) -> None:
    """In either order, the command does not run a second time."""
    await old_records(ledger, store, 8)
    others = [await store.open() for _ in range(2)]
    claims = [claim_of(RecordId("", "put", f"old-{n:03}")) for n in range(8)]
    sweeps = [other.sweep() for other in others for _ in range(3)]
    records, _ = await asyncio.gather(
        asyncio.gather(*map(ledger.claim, claims)), asyncio.gather(*sweeps)
    )
    assert {record.state for record in records} == {State.TOMBSTONE}
    for other in others:
        await other.aclose()
