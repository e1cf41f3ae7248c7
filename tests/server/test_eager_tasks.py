"""Loops whose tasks begin at once (`asyncio.eager_task_factory`): everything holds that holds in
any other loop.
"""

import asyncio
import gc
import os
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from tests.calls import batch, call, error, make_app, read, result
from tests.servers import Store
from wirecall import App, Context
from wirecall.aio import start
from wirecall.limits import Limits
from wirecall.protocol.receipt import Receipt
from wirecall.transports.stdio import serve_streams

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="tasks begin at once since Python 3.12"
)

PATIENCE = 60.0


@pytest.fixture(autouse=True)
async def eager() -> None:
    if sys.version_info >= (3, 12):
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)


@pytest.fixture
async def app(store: Store) -> AsyncIterator[App]:
    async with make_app(ledger=store.url, limits=Limits(concurrency=1000, batch=1000)) as app:
        yield app


async def done() -> None:
    """An awaitable that never waits."""


def tasks_in_memory() -> int:
    gc.collect()
    return sum(isinstance(thing, asyncio.Task) for thing in gc.get_objects())


async def test_command_and_its_duplicates_take_effect_once(app: App) -> None:
    effects: list[int] = []

    @app.command
    async def put(n: int) -> int:
        effects.append(n)
        await asyncio.sleep(0.01)
        return len(effects)

    replies = await asyncio.gather(
        *(app.handle(call("put", {"n": 7}, id=i, key="k")) for i in range(20))
    )
    assert [result(reply) for reply in replies] == [1] * 20
    assert result(await app.handle(call("put", {"n": 7}, key="k"))) == 1
    assert effects == [7]


async def test_command_that_is_over_at_once_leaves_no_task_behind() -> None:
    """Its task used to end before it was in the table of tasks in flight, and stayed there forever."""
    async with make_app() as app:

        @app.command
        async def put() -> int:
            await done()
            return 1

        before = tasks_in_memory()
        for number in range(50):
            assert result(await app.handle(call("put", key=str(number)))) == 1
        assert tasks_in_memory() < before + 10


async def test_batch_entries_wait_side_by_side(app: App) -> None:
    """Each worker used to begin inside the one before: 500 of them were deeper than Python's stack."""
    gate = asyncio.Event()
    begun = list[int]()

    @app.query
    async def wait(n: int) -> int:
        begun.append(n)
        if len(begun) == 500:
            gate.set()
        await gate.wait()
        return n

    async with asyncio.timeout(PATIENCE):
        reply = await app.handle(batch(*(call("wait", {"n": n}, id=n) for n in range(500))))
    assert [answer.get("result") for answer in read(reply)] == list(range(500))
    assert begun == list(range(500))


async def test_caller_that_leaves_before_the_commit_point_undoes_the_command(app: App) -> None:
    begun = asyncio.Event()
    effects = list[int]()

    @app.command
    async def put(ctx: Context, n: int) -> int:
        begun.set()
        if not effects and n == 1:
            await asyncio.sleep(PATIENCE)
        await ctx.commit_point()
        effects.append(n)
        return n

    first = asyncio.ensure_future(app.handle(call("put", {"n": 1}, key="k")))
    await asyncio.wait_for(begun.wait(), PATIENCE)
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first
    effects.append(0)  # from here on it does not wait
    assert result(await app.handle(call("put", {"n": 1}, key="k"))) == 1
    assert effects == [0, 1]


async def test_timeout_ends_a_command_that_started_eagerly(app: App) -> None:
    @app.command(timeout=0.05)
    async def put(ctx: Context) -> None:
        await asyncio.sleep(PATIENCE)
        await ctx.commit_point()

    assert error(await app.handle(call("put", key="k")))["data"]["ran"] == "no"


async def test_handler_keeps_its_task_from_its_first_line_to_its_last(app: App) -> None:
    @app.command
    async def put() -> bool:
        mine = asyncio.current_task()
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
            group.create_task(done())
            group.create_task(asyncio.sleep(0))
        return asyncio.current_task() is mine

    many = batch(*(call("put", id=i, key=str(i)) for i in range(3)))
    assert [answer.get("result") for answer in read(await app.handle(many))] == [True] * 3


async def test_lines_are_answered(tmp_path: Any) -> None:
    """The first line waits at once, with many more behind it."""
    lines = tmp_path / "in"
    answers = tmp_path / "out"
    lines.write_bytes(b"".join(call("wait", {"n": n}, id=n) + b"\n" for n in range(300)))
    async with make_app() as app:

        @app.query
        async def wait(n: int) -> int:
            await asyncio.sleep(0)
            return n

        reader = os.open(lines, os.O_RDONLY)
        writer = os.open(answers, os.O_WRONLY | os.O_CREAT)
        try:
            async with asyncio.timeout(PATIENCE):
                await serve_streams(lambda _send: Plain(app), reader, writer)
        finally:
            os.close(reader)
            os.close(writer)
    assert sorted(read(line)["result"] for line in answers.read_bytes().splitlines()) == list(
        range(300)
    )


async def test_work_that_was_cancelled_before_it_began_never_begins() -> None:
    """Python does not warn about a coroutine that was never awaited either."""
    begun: list[int] = []

    async def work() -> None:
        begun.append(1)

    task = start(asyncio.get_running_loop(), work())
    assert begun == []
    task.cancel()
    await asyncio.wait([task], timeout=PATIENCE)
    assert task.cancelled() and begun == []


class Plain:
    """A connection that is nothing but its app."""

    def __init__(self, app: App) -> None:
        self._app = app

    def handle(self, line: bytes, receipt: Receipt, /) -> "Coroutine[Any, Any, bytes | None]":
        return self._app.handle(line)

    def ending(self) -> None:
        pass

    async def aclose(self) -> None:
        pass
