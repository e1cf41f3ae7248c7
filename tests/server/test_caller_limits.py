"""Limits per caller: a rate, and calls in flight."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.calls import batch, call, error, make_app, read, result
from tests.mcp.asgi import R5, HttpClient
from tests.servers import Store
from wirecall import App, Context, Limits, UsageError, connect
from wirecall.ledger.base import LedgerDown
from wirecall.ratelimit import LEAST, RateLimit
from wirecall.testing import FakeClock

PATIENCE = 60.0


def shop(limit: RateLimit | None, **options: Any) -> App:
    app = make_app(middleware=[limit] if limit else [], **options)
    app.query(name="one")(lambda: 1)
    app.query(name="two")(lambda: 2)
    app.command(name="put")(lambda: 3)
    return app


async def admitted(app: App, method: str = "one", caller: str = "ada", most: int = 50) -> int:
    """Return how many calls are admitted before the first is refused."""
    for number in range(most):
        if "error" in read(await app.handle(call(method), caller=caller)):
            return number
    return most


async def test_burst_is_admitted_then_calls_at_the_rate() -> None:
    clock = FakeClock(1000.0)
    app = shop(RateLimit(10, per=1, burst=4, clock=clock.time))
    assert await admitted(app) == 4
    refused = error(await app.handle(call("one"), caller="ada"))
    assert (refused["code"], refused["data"]["type"], refused["data"]["ran"]) == (
        42910,
        "busy",
        "no",
    )
    assert refused["data"]["retry_after_ms"] == 100
    clock.now += 0.05
    assert error(await app.handle(call("one"), caller="ada"))["data"]["retry_after_ms"] == 50
    clock.now += 0.05
    assert await admitted(app) == 1
    clock.now += 0.25
    assert await admitted(app) == 2
    clock.now += 3600
    assert await admitted(app) == 4


async def test_greedy_caller_does_not_use_up_the_limit_of_another_or_of_another_method() -> None:
    clock = FakeClock()
    app = shop(RateLimit(3, per=60, clock=clock.time))
    assert await admitted(app, "one", "greedy") == 3
    assert await admitted(app, "one", "greedy") == 0
    assert await admitted(app, "two", "greedy") == 3
    assert await admitted(app, "one", "polite") == 3


async def test_limit_may_cover_all_methods_with_costs() -> None:
    def by_caller(ctx: Context) -> str:
        return ctx.caller

    def doubled(ctx: Context) -> float:
        return 2 if ctx.method == "two" else 1

    for cost in ({"two": 2}, doubled):
        clock = FakeClock()
        app = shop(RateLimit(6, per=6, key=by_caller, cost=cost, clock=clock.time))
        assert await admitted(app, "two") == 3
        assert await admitted(app, "one") == 0
        clock.now += 1
        assert error(await app.handle(call("two"), caller="ada"))["data"]["retry_after_ms"] == 1000
        assert await admitted(app, "one") == 1


async def test_cost_above_the_burst_counts_as_the_burst() -> None:
    clock = FakeClock()
    app = shop(RateLimit(10, burst=2, cost={"one": 100}, clock=clock.time))
    assert await admitted(app, "one") == 1
    clock.now += 0.2
    assert await admitted(app, "one") == 1


async def test_entries_of_a_batch_count_one_by_one_and_a_refused_command_can_be_sent_again() -> (
    None
):
    clock = FakeClock()
    app = shop(RateLimit(2, per=1, clock=clock.time))
    answers = read(await app.handle(batch(*(call("one", id=i) for i in range(4))), caller="ada"))
    assert ["result" in answer for answer in answers] == [True, True, False, False]
    for key in "ab":
        assert result(await app.handle(call("put", key=key), caller="ada")) == 3
    assert error(await app.handle(call("put", key="c"), caller="ada"))["data"]["ran"] == "no"
    clock.now += 1
    assert result(await app.handle(call("put", key="c"), caller="ada")) == 3


async def test_client_waits_and_repeats_the_call() -> None:
    clock = FakeClock()
    app = shop(RateLimit(1, per=0.5, clock=clock.time))
    async with connect(app, clock=clock) as client:
        assert [await client.call("one") for _ in range(3)] == [1, 1, 1]
    assert all(slept >= 0.5 for slept in clock.slept)
    assert len(clock.slept) == 2


async def test_callers_that_are_inactive_are_forgotten() -> None:
    clock = FakeClock()
    limit = RateLimit(1, per=1, clock=clock.time)
    app = shop(limit)
    for number in range(LEAST):
        await app.handle(call("one"), caller=str(number))
    clock.now += 2
    await app.handle(call("one"), caller="last")
    assert len(limit._free) == 1


@pytest.mark.parametrize(
    "options", [{"calls": 0}, {"calls": 1, "per": -1}, {"calls": 1, "burst": 0}]
)
def test_numbers_that_are_not_a_limit(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="must be a number above 0"):
        RateLimit(**options)
    with pytest.raises(UsageError, match="cost of one"):
        RateLimit(1, cost={"one": 0})


@pytest.mark.parametrize("store", ["redis", "cluster"], indirect=True)
async def test_processes_share_a_limit_in_the_redis_of_the_ledger(store: Store) -> None:
    """Two apps stand for two processes.

    The clock is the server's, so the limit is one that it does not reach.
    """
    apps = []
    for _ in range(2):
        app = shop(None, ledger=store.url)
        app.middleware(RateLimit(3, per=3600, burst=3, ledger=app.ledger))
        apps.append(app)
    async with apps[0], apps[1]:
        assert await admitted(apps[0]) == 3
        refused = error(await apps[1].handle(call("one"), caller="ada"))
        assert 0 < refused["data"]["retry_after_ms"] <= 1_200_000
        assert await admitted(apps[1], caller="bob") == 3


@pytest.mark.parametrize("url", ["sqlite:ledger.db", "postgresql://me:secret@127.0.0.1:1/shop"])
async def test_rate_limit_refuses_at_start_a_ledger_that_does_not_count(url: str) -> None:
    app = shop(None, ledger=url)
    app.middleware(RateLimit(3, ledger=app.ledger))
    for start in (
        app.__aenter__,
        lambda: app.asgi().open(),
        lambda: asyncio.to_thread(app.run, "http", port=0),
    ):
        with pytest.raises(UsageError, match=r"needs a ledger in Redis(.|\n)*redis://") as refused:
            await start()
        assert "secret" not in str(refused.value)


async def test_rate_limit_counts_in_the_process_where_the_ledger_is_in_memory() -> None:
    app = shop(None)
    app.middleware(RateLimit(3, per=3600, ledger=app.ledger))
    async with app:
        assert await admitted(app) == 3


async def test_rate_limit_reports_a_function_that_returns_a_ledger_that_does_not_count() -> None:
    async def elsewhere() -> Any:
        return object()

    assert error(await shop(RateLimit(3, ledger=elsewhere)).handle(call("one")))["code"] == -32603


async def test_rate_limit_counts_in_the_process_while_the_ledger_is_away() -> None:
    async def away() -> Any:
        raise LedgerDown("no route")

    clock = FakeClock()
    app = shop(RateLimit(3, ledger=away, clock=clock.time))
    assert await admitted(app) == 3


# --- calls in flight ------------------------------------------------------------------------------


class Slow:
    """An app whose calls wait, and a function that releases them."""

    def __init__(self, **limits: int) -> None:
        self.app = make_app(
            limits=Limits(**limits), authenticate=lambda headers: headers.get("authorization")
        )
        self.go = asyncio.Event()
        self.begun = asyncio.Semaphore(0)
        self.app.query(name="slow")(self.slow)

    async def slow(self) -> str:
        self.begun.release()
        await self.go.wait()
        return "done"

    async def start(self, count: int, send: Callable[[], Any]) -> list["asyncio.Task[Any]"]:
        tasks = [asyncio.create_task(send()) for _ in range(count)]
        for _ in range(count):
            await self.begun.acquire()
        return tasks


async def test_caller_cannot_take_all_places() -> None:
    slow = Slow(in_flight=10, in_flight_per_caller=2)
    async with asyncio.timeout(PATIENCE):
        greedy = await slow.start(2, lambda: slow.app.handle(call("slow"), caller="greedy"))
        refused = error(await slow.app.handle(call("slow"), caller="greedy"))
        assert (refused["code"], refused["data"]["ran"]) == (42910, "no")
        assert refused["data"]["retry_after_ms"] > 0
        several = read(
            await slow.app.handle(batch(call("slow", id=1), call("slow", id=2)), caller="greedy")
        )
        assert [answer["error"]["code"] for answer in several] == [42910, 42910]
        polite = await slow.start(1, lambda: slow.app.handle(call("slow"), caller="polite"))
        anonymous = await slow.start(3, lambda: slow.app.handle(call("slow")))
        slow.go.set()
        for task in (*greedy, *polite, *anonymous):
            assert result(await task) == "done"
        assert result(await slow.app.handle(call("slow"), caller="greedy")) == "done"


async def test_places_of_an_mcp_caller_are_limited() -> None:
    slow = Slow(in_flight=10, in_flight_per_caller=2)
    served = slow.app.asgi()
    greedy, polite = (
        HttpClient(served, R5, headers={"authorization": name}) for name in ("greedy", "polite")
    )
    async with asyncio.timeout(PATIENCE):
        running = await slow.start(2, lambda: greedy.tool("slow"))
        refused = await greedy.call("tools/call", {"name": "slow"})
        assert "42910" in str(refused) or "Busy" in str(refused)
        running += await slow.start(1, lambda: polite.tool("slow"))
        slow.go.set()
        assert ["done" in str(await task) for task in running] == [True] * 3


async def test_caller_may_take_all_places_by_default() -> None:
    slow = Slow(in_flight=4)
    async with asyncio.timeout(PATIENCE):
        tasks = await slow.start(4, lambda: slow.app.handle(call("slow"), caller="ada"))
        assert error(await slow.app.handle(call("slow"), caller="bob"))["code"] == 42910
        slow.go.set()
        assert [result(await task) for task in tasks] == ["done"] * 4
