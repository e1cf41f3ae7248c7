"""One app, several event loops: one after another, in threads side by side, and closed too early."""

import asyncio
import gc
import pkgutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.calls import call, error, make_app, read, result
from wirecall import App
from wirecall.commands.execute import Commands
from wirecall.commands.run import Flight
from wirecall.ledger.base import Ledger, Outcome, RecordId, open_ledger

PATIENCE = 10.0


@pytest.fixture(params=["memory", "sqlite"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> App:
    return make_app(ledger="memory:" if request.param == "memory" else f"sqlite:{tmp_path}/ledger.db")


def in_loop(threads: ThreadPoolExecutor, answer: Callable[[], Any]) -> "Future[Any]":
    """Run a coroutine in an event loop of its own, in a thread of its own."""
    return threads.submit(lambda: asyncio.run(answer()))


def test_a_duplicate_in_another_loop_is_woken_when_the_first_is_done(app: App) -> None:
    """It used to sleep until its own wait was over, although the answer was there."""
    begun, joined, go, effects = threading.Event(), threading.Event(), threading.Event(), list[int]()

    @app.command(wait=10 * PATIENCE)
    async def put() -> int:
        effects.append(1)
        begun.set()
        await asyncio.to_thread(go.wait, PATIENCE)
        return len(effects)

    async def again() -> bytes | None:
        asyncio.get_running_loop().call_later(0.05, joined.set)  # by then it waits
        return await app.handle(call("put", key="k", id=2))

    with ThreadPoolExecutor(2) as threads:
        first = in_loop(threads, lambda: app.handle(call("put", key="k")))
        assert begun.wait(PATIENCE)
        second = in_loop(threads, again)
        assert joined.wait(PATIENCE)
        started = time.monotonic()
        go.set()
        assert (result(first.result(PATIENCE)), result(second.result(PATIENCE))) == (1, 1)
        assert time.monotonic() - started < PATIENCE
    assert effects == [1]
    asyncio.run(app.aclose())


def test_a_run_keeps_its_lease_while_another_loop_has_runs_too(app: App) -> None:
    """A second loop used to take the heartbeats over, and forgot those of the first."""
    begun, go = threading.Event(), threading.Event()

    @app.command(lease=0.3)
    async def slow() -> int:
        begun.set()
        await asyncio.to_thread(go.wait, PATIENCE)
        return 1

    @app.command(lease=0.3)
    async def quick() -> int:
        await asyncio.sleep(0)
        return 1

    async def lease_left() -> float:
        record = await (await app.ledger()).get(RecordId("", "slow", "k"))
        assert record is not None
        return record.lease_left

    with ThreadPoolExecutor(2) as threads:
        first = in_loop(threads, lambda: app.handle(call("slow", key="k")))
        assert begun.wait(PATIENCE)
        in_loop(threads, lambda: app.handle(call("quick", key="k"))).result(PATIENCE)
        left, falls, rises = in_loop(threads, lease_left).result(PATIENCE), 0, 0
        deadline = time.monotonic() + PATIENCE
        while rises < 3 and time.monotonic() < deadline:
            now = in_loop(threads, lease_left).result(PATIENCE)
            rises, falls, left = rises + (now > left), falls + (now < left), now
        go.set()
        assert result(first.result(PATIENCE)) == 1
    assert rises == 3, f"renewed {rises} times, and looked at {rises + falls} times"
    asyncio.run(app.aclose())


def test_an_app_is_closed_from_another_loop_while_one_serves(app: App) -> None:
    """What has done nothing is released there, its caller told, and nobody waits for the end of the grace."""
    begun = threading.Event()

    @app.command(commit_point=True)
    async def put() -> None:
        begun.set()
        await asyncio.sleep(PATIENCE)

    async def serve() -> bytes | None:
        asyncio.get_running_loop().set_debug(True)  # it refuses what another thread does to its tasks
        return await app.handle(call("put", key="k"))

    with ThreadPoolExecutor(1) as threads:
        served = in_loop(threads, serve)
        assert begun.wait(PATIENCE)
        started = time.monotonic()
        asyncio.run(app.aclose(grace=10 * PATIENCE))
        told = error(served.result(PATIENCE))
        assert (told["code"], told["data"]["ran"]) == (50310, "no") and time.monotonic() - started < PATIENCE


def test_every_loop_plans_one_sweep(app: App) -> None:
    """Whichever of them goes on running: two that took turns used to plan one for every turn."""
    app.command(name="put")(lambda: 1)
    loops = [asyncio.new_event_loop(), asyncio.new_event_loop()]
    asked = [timers(loop) for loop in loops]
    for n in range(6):
        assert result(loops[n % 2].run_until_complete(app.handle(call("put", key=f"k{n}")))) == 1
    assert [timers(loop) - before for loop, before in zip(loops, asked, strict=True)] == [1, 1]
    loops[1].close()
    loops[0].run_until_complete(app.aclose())
    loops[0].close()


def timers(loop: asyncio.AbstractEventLoop) -> int:
    return len(loop._scheduled)  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the coroutines that were left behind
@pytest.mark.parametrize("commits", [True, False])
def test_an_app_whose_loop_was_closed_in_the_middle_can_be_closed_and_used_again(app: App, commits: bool) -> None:
    begun = list[int]()

    @app.command(commit_point=not commits)
    async def put() -> None:
        begun.append(1)
        await asyncio.Event().wait()

    app.command(name="other")(lambda: 1)
    loop = asyncio.new_event_loop()
    left = loop.create_task(app.handle(call("put", key="k")))
    while not begun:
        loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    asyncio.run(app.aclose(0.05))
    assert result(asyncio.run(app.handle(call("other", key="k")))) == 1
    asyncio.run(app.aclose())
    assert not left.done()
    del left
    gc.collect()  # here, where what it says about them is expected


def test_of_two_threads_without_a_loop_one_runs_the_command(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """They look whether it is under way at the same moment."""
    effects, together = list[int](), threading.Barrier(2)

    @app.command
    def put() -> int:
        effects.append(1)
        return 1

    def made(fingerprint: bytes) -> Flight:
        with suppress(threading.BrokenBarrierError):
            together.wait(1)
        return Flight(fingerprint)

    monkeypatch.setattr("wirecall.commands.claims.Flight", made)
    with ThreadPoolExecutor(2) as threads:
        answers = [read(answer) for answer in threads.map(lambda id: app.handle_sync(call("put", key="k", id=id)), (1, 2))]
    assert effects == [1]
    assert {answer.get("result") or answer["error"]["code"] for answer in answers} <= {1, 40910}
    asyncio.run(app.aclose())


def test_the_first_two_calls_of_an_app_meet_in_one_dispatcher(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each used to make one if they came at the same moment, and then none knew what was under way in the other."""
    made, together = list[Commands](), threading.Barrier(2)
    app.command(name="put")(lambda: 1)

    def slow(*args: Any) -> Commands:
        made.append(Commands(*args))
        with suppress(threading.BrokenBarrierError):
            together.wait(1)
        return made[-1]

    monkeypatch.setattr("wirecall.commands.execute.Commands", slow)
    with ThreadPoolExecutor(2) as threads:
        answers = threads.map(lambda key: app.handle_sync(call("put", key=key)), ("a", "b"))
        assert [result(answer) for answer in answers] == [1, 1]
    assert len(made) == 1
    asyncio.run(app.aclose())


async def test_who_joins_a_flight_that_has_just_landed_has_the_outcome() -> None:
    """In another thread it may land between the look for it and the wait."""
    flight, outcome = Flight(b"print"), Outcome("result", b"1", b"digest")
    flight.land(outcome)
    async with asyncio.timeout(PATIENCE):
        assert await flight.join(b"print", 10 * PATIENCE) is outcome


def test_loops_that_open_the_ledger_at_the_same_moment_share_one(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the records of the first would be forgotten, where the ledger is in memory."""
    effects, together = list[str](), threading.Barrier(2)
    app.command(name="put")(lambda who: effects.append(who))

    async def opened(url: str) -> Ledger:
        with suppress(threading.BrokenBarrierError):
            together.wait(1)
        return await open_ledger(url)

    monkeypatch.setattr("wirecall.app.open_ledger", opened)
    with ThreadPoolExecutor(2) as threads:
        for _ in range(2):
            calls = [call("put", {"who": who}, key=who) for who in ("ada", "bob")]
            for answer in [in_loop(threads, partial(app.handle, message)) for message in calls]:
                result(answer.result(PATIENCE))
    assert sorted(effects) == ["ada", "bob"]
    asyncio.run(app.aclose())


@pytest.mark.parametrize("part", ["wirecall.mcp.server.catalog.Catalog", "wirecall.mcp.server.server.Server"])
def test_threads_that_ask_first_at_the_same_moment_share_one_server_of_mcp(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who listens to another one would never be told of a change."""
    app, made, both = make_app(), list[Any](), threading.Barrier(2)
    make = pkgutil.resolve_name(part).__init__

    def slowly(self: Any, *given: Any, **named: Any) -> None:
        made.append(self)
        with suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # for another thread to come as far; it must not
        make(self, *given, **named)

    monkeypatch.setattr(f"{part}.__init__", slowly)
    with ThreadPoolExecutor(2) as threads:
        servers = [each.result(PATIENCE) for each in [threads.submit(app.mcp) for _ in range(2)]]
    assert servers[0] is servers[1] is app.mcp()
    assert len(made) == 1
