"""An app belongs to one event loop at a time: one after another, a second one beside it, one that
is closed too early.
"""

import asyncio
import gc
import pkgutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.calls import call, make_app, read, result
from wirecall import App, UsageError
from wirecall.commands.claim import Flight, FlightState
from wirecall.commands.commands import Commands
from wirecall.ledger.base import Outcome

PATIENCE = 60.0


@pytest.fixture(params=["memory", "sqlite"])
def app(request: pytest.FixtureRequest, tmp_path: Path) -> App:
    return make_app(
        ledger="memory:" if request.param == "memory" else f"sqlite:{tmp_path}/ledger.db"
    )


def test_second_loop_is_refused_while_the_first_is_alive_and_nothing_runs(app: App) -> None:
    """Connections, timers and commands in flight belong to one loop; asyncpg and SQLAlchemy have
    the same rule.
    """
    effects = list[int]()
    app.command(name="put")(lambda n: effects.append(n))
    app.query(name="add")(lambda a, b: a + b)
    first = asyncio.new_event_loop()
    second = asyncio.new_event_loop()
    result(first.run_until_complete(app.handle(call("put", {"n": 1}, key="a"))))
    with pytest.raises(UsageError, match="another event loop"):
        second.run_until_complete(app.handle(call("put", {"n": 2}, key="b")))
    with pytest.raises(UsageError, match="another event loop"):
        second.run_until_complete(app.aclose())
    # A query needs no loop.
    assert result(second.run_until_complete(app.handle(call("add", {"a": 1, "b": 2})))) == 3
    result(first.run_until_complete(app.handle(call("put", {"n": 3}, key="c"))))
    first.run_until_complete(app.aclose())
    first.close()
    result(second.run_until_complete(app.handle(call("put", {"n": 4}, key="d"))))
    second.run_until_complete(app.aclose())
    second.close()
    assert effects == [1, 3, 4]


def test_loops_one_after_another_share_the_records(app: App) -> None:
    effects = list[int]()

    @app.command
    async def put(n: int) -> int:
        await asyncio.sleep(0)
        effects.append(n)
        return len(effects)

    assert [
        result(asyncio.run(app.handle(call("put", {"n": 7}, key="k", id=id)))) for id in (1, 2, 3)
    ] == [1, 1, 1]
    asyncio.run(app.aclose())
    assert effects == [7]


# From the abandoned coroutines.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("commits", [True, False])
def test_app_whose_loop_was_closed_during_a_call_can_be_closed_and_used_again(
    app: App, commits: bool
) -> None:
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
    gc.collect()  # here, where its warnings about them are expected


def test_command_runs_in_one_of_two_threads_without_a_loop(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both check at the same moment whether it is in flight."""
    effects = list[int]()
    together = threading.Barrier(2)

    @app.command
    def put() -> int:
        effects.append(1)
        return 1

    def made(fingerprint: bytes) -> Flight:
        with suppress(threading.BrokenBarrierError):
            together.wait(1)
        return Flight(fingerprint)

    monkeypatch.setattr("wirecall.commands.claim.Flight", made)
    with ThreadPoolExecutor(2) as threads:
        answers = [
            read(answer)
            for answer in threads.map(
                lambda id: app.handle_sync(call("put", key="k", id=id)), (1, 2)
            )
        ]
    assert effects == [1]
    assert {answer.get("result") or answer["error"]["code"] for answer in answers} <= {1, 40910}
    asyncio.run(app.aclose())


def test_first_two_calls_of_an_app_share_one_dispatcher(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each used to make one if both came at the same moment, and neither knew the other's calls in
    flight.
    """
    made = list[Commands]()
    together = threading.Barrier(2)
    app.command(name="put")(lambda: 1)

    def slow(*args: Any) -> Commands:
        made.append(Commands(*args))
        with suppress(threading.BrokenBarrierError):
            together.wait(1)
        return made[-1]

    monkeypatch.setattr("wirecall.commands.commands.Commands", slow)
    with ThreadPoolExecutor(2) as threads:
        answers = threads.map(lambda key: app.handle_sync(call("put", key=key)), ("a", "b"))
        assert [result(answer) for answer in answers] == [1, 1]
    assert len(made) == 1
    asyncio.run(app.aclose())


async def test_duplicate_of_a_run_that_has_just_ended_gets_its_outcome() -> None:
    """In another thread the run may end between the lookup and the wait."""
    outcome = Outcome("result", b"1", b"digest")
    flight = Flight(b"print", FlightState.LANDED, outcome)
    async with asyncio.timeout(PATIENCE):
        assert await flight.join(b"print", 10 * PATIENCE) is outcome


@pytest.mark.parametrize(
    "part", ["wirecall.mcp.server.catalog.Catalog", "wirecall.mcp.server.server.Server"]
)
def test_threads_that_ask_first_at_the_same_moment_share_one_server_of_mcp(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listener of another one would never get a change."""
    app = make_app()
    made = list[Any]()
    both = threading.Barrier(2)
    make = pkgutil.resolve_name(part).__init__

    def slowly(self: Any, *given: Any, **named: Any) -> None:
        made.append(self)
        with suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # gives another thread time to get here; it must not
        make(self, *given, **named)

    monkeypatch.setattr(f"{part}.__init__", slowly)
    with ThreadPoolExecutor(2) as threads:
        servers = [each.result(PATIENCE) for each in [threads.submit(app.mcp) for _ in range(2)]]
    assert servers[0] is servers[1] is app.mcp()
    assert len(made) == 1
