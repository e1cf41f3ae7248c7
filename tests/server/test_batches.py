"""Batches: order, concurrency and the answers of each entry (J4, J13)."""

import asyncio
import contextvars
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.calls import batch, call, make_app, read
from tests.server.stage import entries, settle, staged
from wirecall import Context, DomainError, Limits, jsonrpc


async def test_queries_run_side_by_side_and_answers_keep_the_order_of_the_input() -> None:
    app, stage = staged()
    task = asyncio.create_task(app.handle(entries("query:a", "plain:p", "query:b", "query:c")))
    for name in "abc":
        await stage.has_begun(name).wait()
    for name in "cba":
        stage.gate(name).set()
        await settle()
    assert [answer["result"] for answer in read(await task)] == ["a", "p", "b", "c"]
    assert stage.log == ["+a", "=p", "+b", "+c", "-c", "-b", "-a"]


async def test_commands_run_one_after_another_in_array_order_while_queries_go_on() -> None:
    app, stage = staged()
    task = asyncio.create_task(app.handle(entries("command:a", "query:q", "command:b", "plain:p", "command:c")))
    await stage.has_begun("q").wait()
    await settle()
    assert stage.log == ["+a", "+q", "=p"]
    stage.gate("b").set()
    await settle()
    assert "+b" not in stage.log
    stage.gate("a").set()
    await stage.has_begun("c").wait()
    stage.gate("c").set()
    stage.gate("q").set()
    assert [answer["result"] for answer in read(await task)] == ["a", "q", "b", "p", "c"]
    assert [entry for entry in stage.log if entry[1] in "abc"] == ["+a", "-a", "+b", "-b", "+c", "-c"]


async def test_an_app_can_be_sequential() -> None:
    app, stage = staged(execution="sequential")
    task = asyncio.create_task(app.handle(entries("query:a", "plain:p", "query:b", "free:c")))
    await stage.has_begun("a").wait()
    await settle()
    assert stage.log == ["+a", "+c"]  # `free` says for itself that it is parallel
    for name in "abc":
        stage.gate(name).set()
    await task
    assert [entry for entry in stage.log if entry[1] != "c"] == ["+a", "-a", "=p", "+b", "-b"]


async def test_an_app_can_be_parallel() -> None:
    app, stage = staged(execution="parallel")
    task = asyncio.create_task(app.handle(entries("command:a", "command:b", "held:c", "held:d")))
    await stage.has_begun("b").wait()
    await stage.has_begun("c").wait()
    await settle()
    assert stage.log == ["+a", "+b", "+c"]  # `held` says for itself that it is sequential
    for name in "abcd":
        stage.gate(name).set()
    assert len(read(await task)) == 4


async def test_no_more_entries_run_side_by_side_than_the_limit() -> None:
    app, stage = staged(limits=Limits(concurrency=2))
    task = asyncio.create_task(app.handle(entries("query:a", "query:b", "query:c", "query:d")))
    await stage.has_begun("b").wait()
    await settle()
    assert stage.log == ["+a", "+b"]
    stage.gate("b").set()
    await stage.has_begun("c").wait()
    await settle()
    assert stage.log == ["+a", "+b", "-b", "+c"]
    for name in "acd":
        stage.gate(name).set()
    assert [answer["result"] for answer in read(await task)] == ["a", "b", "c", "d"]


async def test_a_handler_lives_in_one_task_so_that_its_timeouts_and_groups_work() -> None:
    app = make_app()

    @app.query
    async def timed(n: int) -> str:
        begun_in = asyncio.current_task()
        try:
            async with asyncio.timeout(0.001 * n):
                await asyncio.Event().wait()
        except TimeoutError:
            assert asyncio.current_task() is begun_in
            return f"timed out {n}"
        return "never"

    @app.query
    async def grouped(n: int) -> int:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(asyncio.sleep(0, i)) for i in range(n)]
        return sum(task.result() for task in tasks)

    messages = [call("timed" if i % 2 else "grouped", [i], id=i) for i in range(20)]
    answers = read(await app.handle(batch(*messages)))
    assert [answer["result"] for answer in answers] == [f"timed out {i}" if i % 2 else sum(range(i)) for i in range(20)]


async def test_context_variables_of_one_entry_do_not_leak_into_another() -> None:
    app = make_app()
    variable = contextvars.ContextVar("variable", default="clean")

    @app.middleware
    async def mark(ctx: Context, call_next: Any) -> Any:
        token = variable.set(str(ctx.id))
        try:
            return await call_next(ctx)
        finally:
            variable.reset(token)

    @app.query
    async def look() -> str:
        before = variable.get()
        await asyncio.sleep(0)
        return f"{before} {variable.get()}"

    answers = read(await app.handle(batch(*[call("look", id=i) for i in range(5)])))
    assert [answer["result"] for answer in answers] == [f"{i} {i}" for i in range(5)]


@given(
    st.lists(st.sampled_from(["now", "later", "put", "fail", "crash", "nobody", "notify", "junk"]), min_size=1, max_size=12)
)
def test_a_batch_answers_as_its_entries_do_alone(kinds: list[str]) -> None:
    """J4, J5, over handlers that wait and handlers that do not."""
    app = make_app()
    app.query(name="now", notification_allowed=True)(lambda n: n)

    @app.query
    async def later(n: int) -> int:
        await asyncio.sleep(0)
        return n

    @app.command
    async def put(n: int) -> int:
        await asyncio.sleep(0)
        return n

    @app.query
    def fail(n: int) -> int:
        raise DomainError(n, "no")

    @app.query
    async def crash(n: int) -> int:
        raise ValueError

    def entry(kind: str, n: int) -> bytes:
        if kind == "junk":
            return b'{"id":%d}' % n
        return jsonrpc.make_notification("now", [n]) if kind == "notify" else call(kind, [n], id=n)

    async def scenario() -> tuple[list[bytes | None], bytes | None]:
        messages = [entry(kind, n) for n, kind in enumerate(kinds)]
        return [await app.handle(message) for message in messages], await app.handle(batch(*messages))

    alone, together = asyncio.run(scenario())
    assert together == jsonrpc.make_reply(alone, is_batch=True)
