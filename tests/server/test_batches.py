"""Batches: order, concurrency and the answers of each entry (J4, J13)."""

import asyncio
import contextvars
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.calls import batch, call, make_app, read
from tests.server.stage import entries, settle, staged
from wirecall import App, Context, DomainError, Limits, UsageError, jsonrpc


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


async def test_commands_run_one_after_another_in_array_order_beside_queries() -> None:
    app, stage = staged()
    task = asyncio.create_task(
        app.handle(entries("command:a", "query:q", "command:b", "plain:p", "command:c"))
    )
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
    assert [entry for entry in stage.log if entry[1] in "abc"] == [
        "+a",
        "-a",
        "+b",
        "-b",
        "+c",
        "-c",
    ]


async def test_app_can_be_sequential() -> None:
    app, stage = staged(execution="sequential")
    task = asyncio.create_task(app.handle(entries("query:a", "plain:p", "query:b", "free:c")))
    await stage.has_begun("a").wait()
    await settle()
    assert stage.log == ["+a", "+c"]  # `free` itself declares that it is parallel
    for name in "abc":
        stage.gate(name).set()
    await task
    assert [entry for entry in stage.log if entry[1] != "c"] == ["+a", "-a", "=p", "+b", "-b"]


async def test_app_can_be_parallel() -> None:
    app, stage = staged(execution="parallel")
    task = asyncio.create_task(app.handle(entries("command:a", "command:b", "held:c", "held:d")))
    await stage.has_begun("b").wait()
    await stage.has_begun("c").wait()
    await settle()
    assert stage.log == ["+a", "+b", "+c"]  # `held` itself declares that it is sequential
    for name in "abcd":
        stage.gate(name).set()
    assert len(read(await task)) == 4


async def test_entries_run_side_by_side_up_to_the_limit() -> None:
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


async def test_handler_runs_in_one_task_so_that_its_timeouts_and_groups_work() -> None:
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
    assert [answer["result"] for answer in answers] == [
        f"timed out {i}" if i % 2 else sum(range(i)) for i in range(20)
    ]


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
    st.lists(
        st.sampled_from(["now", "later", "put", "fail", "crash", "nobody", "notify", "junk"]),
        min_size=1,
        max_size=12,
    )
)
def test_batch_answers_like_its_entries_sent_alone(kinds: list[str]) -> None:
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
        return [await app.handle(message) for message in messages], await app.handle(
            batch(*messages)
        )

    alone, together = asyncio.run(scenario())
    assert together == jsonrpc.make_reply(alone, is_batch=True)


# --- a batch above the limit ----------------------------------------------------------------------


def refused_app(**options: Any) -> App:
    app = make_app(limits=Limits(batch=2), **options)
    app.query(name="now", notification_allowed=True)(lambda: 1)
    return app


async def test_batch_refusal_is_one_object_by_default() -> None:
    app = refused_app()
    reply = read(await app.handle(batch(*[call("now", id=n) for n in range(3)])))
    assert (reply["id"], reply["error"]["code"], reply["error"]["data"]["max"]) == (None, -32600, 2)


async def test_batch_refusal_by_entries_has_one_error_for_each_id() -> None:
    app = refused_app(batch_refusal="entries")
    message = batch(
        call("now", id=7),
        call("nothing", id="b"),
        jsonrpc.make_notification("now"),
        call("now", id=None),
    )
    reply = read(await app.handle(message))
    assert [answer["id"] for answer in reply] == [7, "b", None]
    assert {answer["error"]["message"] for answer in reply} == {
        "Invalid Request: a batch of 4 entries, 2 are allowed"
    }
    assert all(
        answer["error"]["data"]["limit"] == "batch" and answer["error"]["data"]["max"] == 2
        for answer in reply
    )
    assert [
        answer["result"] for answer in read(await app.handle(batch(call("now"), call("now", id=2))))
    ] == [1, 1]


async def test_batch_refusal_by_entries_answers_under_null_where_an_id_cannot_be_read() -> None:
    app = refused_app(batch_refusal="entries")
    reply = await app.handle(
        '[7,{"id":1.50},{"id":[1]},{"jsonrpc":"2.0","method":"now"},[],{"method":"now","id":"x"}]'
    )
    assert reply is not None
    assert [answer["id"] for answer in read(reply)] == [None, 1.5, None, None, "x"]
    assert b'"id":1.50}' in reply


async def test_batch_refusal_by_entries_answers_notifications_alone_with_one_object() -> None:
    """No id could carry the error; a strict server does not drop it."""
    app = refused_app(batch_refusal="entries")
    reply = read(await app.handle(batch(*[jsonrpc.make_notification("now")] * 3)))
    assert (reply["id"], reply["error"]["data"]["count"]) == (None, 3)


async def test_batch_refusal_by_entries_is_one_object_for_other_refusals() -> None:
    app = refused_app(batch_refusal="entries")
    for message in ("[]", "[1,", "7", f"[{'[' * 99}{']' * 99}]"):
        assert read(await app.handle(message))["id"] is None


async def test_batch_refusal_by_entries_keeps_the_answer_to_a_hostile_array_short() -> None:
    app = refused_app(batch_refusal="entries")
    # Viem's default size.
    assert len(read(await app.handle(batch(*[call("now", id=n) for n in range(1000)])))) == 1000
    reply = await app.handle(f"[{'1,' * 500_000}1]")
    assert read(reply)["error"]["data"]["count"] == 500_001


def test_batch_refusal_must_be_known() -> None:
    with pytest.raises(UsageError, match="batch_refusal='entry' is not a way to refuse a batch"):
        make_app(batch_refusal="entry")
