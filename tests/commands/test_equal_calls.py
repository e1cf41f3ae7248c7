"""Equal calls without a key at once, in one process: each is a separate command, over every ledger."""

import asyncio
from typing import Any

import pytest

from tests.calls import call, result
from tests.commands.charges import PARAMS, Effects, World, transactional
from wirecall import App, Context
from wirecall.commands import receipts

CALLS = 20


async def charge_at_once(app: App) -> list[Any]:
    """A caller that the server knows, so that it compares these calls with each other."""
    calls = (
        app.handle(call("charge", PARAMS, id=number), caller="alice") for number in range(CALLS)
    )
    return [result(reply)["number"] for reply in await asyncio.gather(*calls)]


@pytest.mark.parametrize("wait", [0.001, 25.0])
async def test_equal_calls_at_once_do_not_wait_for_each_other(
    app: App, world: World, wait: float
) -> None:
    """Neither do those that arrive before the ledger has answered the claim of the first."""
    app.command(name="charge", key="auto", wait=wait)(world.charge)
    assert sorted(await charge_at_once(app)) == list(range(1, CALLS + 1))
    assert sorted(await charge_at_once(app)) == list(range(CALLS + 1, 2 * CALLS + 1))


async def test_equal_calls_in_memory_do_not_wait_for_a_transport(
    app: App, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, the server notices at once that a caller leaves."""
    monkeypatch.setattr(receipts, "NOTICED_AFTER", 3600.0)
    app.command(name="charge", key="auto")(world.charge)
    assert sorted(await charge_at_once(app)) == list(range(1, CALLS + 1))


@transactional
async def test_equal_transactions_at_once_all_act(app: App, effects: Effects) -> None:
    """One after another. Each gets its own answer."""

    @app.command(name="charge", key="auto", on_crash="transactional")
    async def handler(cents: int, ctx: Context) -> Any:
        return {"number": await effects.add(ctx, cents)}

    assert sorted(await charge_at_once(app)) == list(range(1, CALLS + 1))
