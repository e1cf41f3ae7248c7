"""Tasks that change hands: calls that become tasks, and servers that differ in their tools."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.calls import make_app
from tests.mcp.asgi import KEY, REPLAYED, HttpClient
from tests.mcp.task_talk import BOOL, OVER, Desk, get, start, talk, until
from wirecall import App, Context, Limits, UsageError
from wirecall.errors import Busy
from wirecall.ledger.base import Ledger, RecordId
from wirecall.protocol.sender import ANONYMOUS

YES = {"input-1": {"action": "accept", "content": {"sure": True}}}


# --- a question at the moment when a call becomes a task ------------------------------------------


class Asking:
    """An app whose tool becomes a task after a moment, and asks when the test lets it."""

    def __init__(self) -> None:
        self.app = make_app()
        self.may_ask = asyncio.Event()
        self.effects = list[str]()

        @self.app.command(task=0.01)
        async def render(ctx: Context) -> str:
            await self.may_ask.wait()
            answer = await ctx.elicit("Sure?", BOOL)
            await ctx.commit_point()
            self.effects.append(str(answer.content))
            return "rendered"

    async def ledger(self) -> Ledger:
        return await self.app.ledger()


async def test_task_question_asked_during_handover_belongs_to_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Asking()
    ledger = await desk.ledger()
    begin = ledger.begin_task

    async def slow(*given: Any) -> bool:
        begun = await begin(*given)
        desk.may_ask.set()
        for _ in range(100):  # turns of the loop, during which the handler asks
            await asyncio.sleep(0)
        return begun

    monkeypatch.setattr(ledger, "begin_task", slow)
    async with talk(desk.app) as client:
        task = await start(client, "render")
        asked = await until(client, task, "input_required", *OVER)
        assert list(asked["inputRequests"]) == ["input-1"]
        await client.result("tasks/update", {"taskId": task["taskId"], "inputResponses": YES})
        assert (await until(client, task, "input_required", *OVER))["status"] == "completed"
    assert desk.effects == ["{'sure': True}"]


async def test_call_that_asks_before_its_time_is_over_does_not_become_a_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its time is over while the ledger records that it waits: the question belongs to the request."""
    desk = Asking()
    desk.may_ask.set()
    ledger = await desk.ledger()
    suspend = ledger.suspend
    begin = ledger.begin_task
    tried = asyncio.Event()

    async def noted(*given: Any) -> bool:
        tried.set()
        return await begin(*given)

    async def slow(*given: Any) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(tried.wait(), 0.1)
        for _ in range(100):
            await asyncio.sleep(0)
        return await suspend(*given)

    monkeypatch.setattr(ledger, "begin_task", noted)
    monkeypatch.setattr(ledger, "suspend", slow)
    async with talk(desk.app) as client:
        first = await client.tool("render", {})
        assert first["resultType"] == "input_required"
        again = await client.tool(
            "render", {}, members={"requestState": first["requestState"], "inputResponses": YES}
        )
        if again["resultType"] == "task":
            again = (await until(client, again, *OVER))["result"]
        assert again["content"][0]["text"] == "rendered"
    assert desk.effects == ["{'sure': True}"]


async def test_task_refusal_during_handover_ends_the_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The handler did nothing, and the task says so: it ends before its record is released."""
    app = make_app()
    may_refuse = asyncio.Event()

    @app.command(task=0.01)
    async def render(ctx: Context) -> None:
        await may_refuse.wait()
        raise Busy("come later", ran="no")

    ledger = await app.ledger()
    begin = ledger.begin_task

    async def slow(*given: Any) -> bool:
        begun = await begin(*given)
        may_refuse.set()
        for _ in range(100):  # turns of the loop, during which the handler refuses
            await asyncio.sleep(0)
        return begun

    monkeypatch.setattr(ledger, "begin_task", slow)
    async with talk(app) as client:
        told = await until(client, await start(client, "render"), *OVER)
        assert "come later" in str(told) and "unknown" not in str(told), told


# --- transactions ---------------------------------------------------------------------------------


def test_transaction_is_not_handed_over_in_its_middle(tmp_path: Path) -> None:
    """SQLite has one writer, so the row of the task would wait for the transaction, and the
    transaction for the row.
    """

    async def render(ctx: Context) -> str:
        await ctx.hand_over()
        return "done"

    for task in (True, 2.0):
        app = make_app(ledger=f"sqlite:{tmp_path}/ledger.db")
        with pytest.raises(UsageError, match=r"ctx.hand_over\(\) inside its transaction"):
            app.command(task=task, on_crash="transactional")(render)


def test_transaction_does_not_become_a_task_after_some_seconds(tmp_path: Path) -> None:
    app = make_app(ledger=f"sqlite:{tmp_path}/ledger.db")
    with pytest.raises(UsageError, match="after 2 seconds"):
        app.command(name="render", task=2.0, on_crash="transactional")(lambda: 1)


async def test_transaction_that_starts_as_a_task_is_already_handed_over(tmp_path: Path) -> None:
    app = make_app(ledger=f"sqlite:{tmp_path}/ledger.db")

    async def hidden(ctx: Context) -> None:
        await ctx.hand_over()

    @app.command(task=True, on_crash="transactional")
    async def render(ctx: Context) -> str:
        await hidden(ctx)
        return "done"

    async with talk(app) as client:
        told = await until(client, await start(client, "render"), *OVER)
        assert told["result"]["content"][0]["text"] == "done"


# --- servers that differ --------------------------------------------------------------------------

SECONDS = 3600.0


def server(folder: Path, *tools: str, effects: list[str] | None = None, **options: Any) -> App:
    app = make_app(ledger=f"sqlite:{folder}/ledger.db", **options)
    for tool in tools:

        @app.command(name=tool, task=True, on_crash="rerun", lease=SECONDS, task_ttl=60)
        async def act(tool: str = tool) -> str:
            if effects is None:
                await asyncio.Event().wait()
            else:
                effects.append(tool)
            return f"{tool} is done"

    return app


async def orphan(folder: Path, tool: str) -> Any:
    """A task that its server has abandoned, as a killed server would."""
    app = server(folder, tool)
    async with talk(app) as client:
        task = await start(client, tool, meta={KEY: "k"})
        ledger = await app.ledger()
        while (
            not (record := await ledger.get(RecordId(ANONYMOUS, f"tools/call:{tool}", "k")))
            or not record.committed
        ):
            await get(client, task)
        await ledger.lapse(record.token)
    return task


async def test_server_that_lacks_a_tool_leaves_its_tasks_to_one_that_has_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = await orphan(tmp_path, "new")
    effects = list[str]()
    old = server(tmp_path, "old")
    async with talk(old) as client:
        for _ in range(3):
            await old.mcp().task_runner.adopt()
            await old.mcp().task_runner.resume(task["taskId"])
        assert (await get(client, task))["status"] == "working"
    assert [line for line in caplog.messages if "'new'" in line] == [
        "tasks of 'new' wait for a server that has this tool: this one has not"
    ]
    async with talk(server(tmp_path, "old", "new", effects=effects)) as client:
        told = await until(client, task, *OVER)
        assert (told["status"], told["result"]["content"][0]["text"]) == (
            "completed",
            "new is done",
        )
    assert effects == ["new"]


async def test_task_whose_tool_no_server_has_fails_when_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await orphan(tmp_path, "gone")
    app = server(tmp_path, "other")
    async with talk(app) as client:
        ledger = await app.ledger()
        find = ledger.task

        async def later(id: str) -> Any:
            found = await find(id)
            assert found is not None
            # Its 60 seconds are over, its retention is not.
            return msgspec.structs.replace(found, ttl_left=86_000.0)

        monkeypatch.setattr(ledger, "task", later)
        await app.mcp().task_runner.resume(task["taskId"])
        told = await get(client, task)
    assert (told["status"], told["error"]["code"]) == ("failed", -32602)
    assert "there is no tool 'gone' any more" in told["error"]["data"]["reason"]
    assert told["error"]["data"]["ran"] == "unknown"


async def test_task_that_the_next_server_refuses_may_have_acted(tmp_path: Path) -> None:
    """Its arguments no longer fit.

    The refusal must not read like the result of a call that did nothing.
    """
    task = await orphan(tmp_path, "render")
    app = make_app(ledger=f"sqlite:{tmp_path}/ledger.db")

    @app.command(task=True, on_crash="rerun", lease=SECONDS, task_ttl=60)
    async def render(pages: int) -> str:
        return f"{pages} pages"

    async with talk(app) as client:
        told = await until(client, task, *OVER)
    assert (told["status"], told["error"]["data"]["ran"]) == ("failed", "unknown")
    assert "pages" in told["error"]["data"]["reason"]


async def test_tasks_of_tools_that_a_server_lacks_do_not_hide_its_own(tmp_path: Path) -> None:
    effects = list[str]()
    for tool in ("first", "second"):
        await orphan(tmp_path, tool)
    task = await orphan(tmp_path, "third")
    app = server(tmp_path, "third", effects=effects, limits=Limits(tasks=1))
    async with talk(app) as client:
        while (told := await get(client, task))["status"] not in OVER:
            await app.mcp().task_runner.adopt()
    assert (told["status"], effects) == ("completed", ["third"])


# --- a ledger in memory ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "times"), [({"mode": "production"}, 1), ({"mode": "development"}, 0)]
)
async def test_server_warns_once_if_its_tasks_end_with_it(
    options: Any, times: int, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def warnings() -> int:
        return sum("tasks end with this process" in line for line in caplog.messages)

    app = make_app(**options)
    app.query(name="plain")(lambda: 1)
    async with talk(app):
        assert warnings() == 0
    app.query(name="render", task=True)(lambda: 1)
    for _ in range(2):
        async with talk(app):
            assert warnings() == times
    durable = make_app(**options, ledger=f"sqlite:{tmp_path}/ledger.db")
    durable.query(name="render", task=True)(lambda: 1)
    async with talk(durable):
        assert warnings() == times


# --- a limit for each caller ----------------------------------------------------------------------


def whose(headers: Any) -> str | None:
    return str(headers.get("authorization"))


async def test_tasks_per_caller_are_limited() -> None:
    desk = Desk(limits=Limits(tasks_per_caller=2), authenticate=whose)
    desk.app.command(name="pay", task=True)(desk.act)

    async with talk(desk.app) as client:

        async def call(name: str, caller: str = "ada") -> Any:
            params = {"name": "pay", "arguments": {"name": name}}
            return await client.call(
                "tools/call", params, meta={KEY: name}, headers={"authorization": caller}
            )

        first, second = [(await call(name))["result"] for name in "ab"]
        refused = (await call("c"))["error"]
        data = refused["data"]
        assert (refused["code"], data["ran"], data["limit"], data["max"]) == (
            42910,
            "no",
            "tasks_per_caller",
            2,
        )
        assert data["retry_after_ms"] > 0
        # The refused call left no record, a retry finds its earlier task, and each caller has its
        # own limit.
        assert {record.id.key for record in await (await desk.app.ledger()).list()} == {"a", "b"}
        assert (await call("a"))["result"]["taskId"] == first["taskId"]
        assert (await call("d", "eve"))["result"]["resultType"] == "task"
        desk.gate.set()
        for task in (first, second):
            params = {"taskId": task["taskId"]}
            while (await client.result("tasks/get", params, headers={"authorization": "ada"}))[
                "status"
            ] not in OVER:
                pass
        while "error" in (again := await call("c")):  # its place is free a moment after its end
            assert again["error"]["code"] == 42910
        assert again["result"]["resultType"] == "task"
    assert sorted(desk.effects) == ["a", "b", "c", "d"]


async def test_tasks_that_wait_for_an_answer_count_until_they_end() -> None:
    app = make_app(limits=Limits(tasks_per_caller=1))

    @app.command(task=True)
    async def ask(ctx: Context) -> str:
        return str((await ctx.elicit("Sure?", BOOL)).content)

    async with talk(app) as client:
        task = await start(client, "ask")
        await until(client, task, "input_required")
        assert (await client.call("tools/call", {"name": "ask", "arguments": {}}))["error"][
            "code"
        ] == 42910
        await client.result("tasks/cancel", {"taskId": task["taskId"]})
        await until(client, task, "cancelled")
        while "error" in (
            again := await client.call("tools/call", {"name": "ask", "arguments": {}})
        ):
            assert again["error"]["code"] == 42910
        assert again["result"]["resultType"] == "task"


async def test_task_that_another_server_has_ended_no_longer_counts(tmp_path: Path) -> None:
    first, second = (
        Desk(ledger=f"sqlite:{tmp_path}/ledger.db", limits=Limits(tasks_per_caller=1))
        for _ in range(2)
    )
    for desk in (first, second):

        @desk.app.command(task=True)
        async def ask(ctx: Context) -> str:
            return str((await ctx.elicit("Sure?", BOOL)).content)

    async with talk(first.app) as client, talk(second.app) as other:
        task = await start(client, "ask")
        await until(client, task, "input_required")
        await other.result("tasks/update", {"taskId": task["taskId"], "inputResponses": YES})
        await until(other, task, "completed")
        assert (await start(client, "ask"))["taskId"] != task["taskId"]


async def test_call_beyond_the_limit_does_not_become_a_task_after_some_seconds() -> None:
    desk = Desk(limits=Limits(tasks_per_caller=1))
    desk.app.command(name="pay", task=True)(desk.act)
    desk.app.command(name="slow", task=0.01)(desk.act)
    async with talk(desk.app) as client:
        await start(client, "pay", {"name": "a"})
        calling = asyncio.ensure_future(client.tool("slow", {"name": "b"}))
        await asyncio.wait({calling}, timeout=0.1)  # its time is over, or the machine is slow
        desk.gate.set()
        assert (await calling)["content"][0]["text"] == "b is done"


# --- replays, and what arrives too late -----------------------------------------------------------


async def test_task_that_is_found_by_its_key_is_a_replay(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk()
    desk.app.command(name="pay", task=True)(desk.act)
    caplog.set_level("INFO", "wirecall")
    async with talk(desk.app) as client:
        task = await start(client, "pay", {"name": "x"}, meta={KEY: "k"})
        await desk.begun.wait()
        assert "replayed" not in {getattr(line, "outcome", None) for line in caplog.records}
        assert (await start(client, "pay", {"name": "x"}, meta={KEY: "k"}))["taskId"] == task[
            "taskId"
        ]
        assert isinstance(client, HttpClient) and client.last is not None
        assert client.last.header("idempotent-replayed") == "true"
        assert [
            line.__dict__["outcome"] for line in caplog.records if "outcome" in line.__dict__
        ] == ["replayed"]
        desk.gate.set()


async def test_task_that_has_ended_does_not_take_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger has recorded the end of the task, and its server does not know that yet."""
    app = make_app()
    late = list[Any]()
    ledger = await app.ledger()
    complete = ledger.complete
    told = asyncio.Event()
    go_on = asyncio.Event()

    @app.command(task=True)
    async def render(ctx: Context) -> str:
        late.append(ctx)
        return "done"

    async def slow(*given: Any) -> bool:
        is_done = await complete(*given)
        told.set()
        await go_on.wait()
        return is_done

    monkeypatch.setattr(ledger, "complete", slow)
    async with talk(app) as client:
        task = await start(client, "render")
        await told.wait()
        ended = await get(client, task)
        assert ended["status"] == "completed"
        await late[0].progress(1, 2, "still at it")
        for _ in range(100):
            await asyncio.sleep(0)
        assert await get(client, task) == ended
        go_on.set()


async def test_key_of_an_adopted_task_that_did_nothing_is_free_after_its_cancellation(
    tmp_path: Path,
) -> None:
    """Also for other arguments: no server, the first or the one that adopted it, passed the commit
    point.
    """
    effects = list[str]()
    begun = asyncio.Queue[str]()

    def make() -> App:
        app = make_app(ledger=f"sqlite:{tmp_path}/ledger.db")

        @app.command(task=True, lease=SECONDS)
        async def pay(name: str, ctx: Context) -> str:
            begun.put_nowait(name)
            if name == "first":
                await asyncio.Event().wait()
            await ctx.commit_point()
            effects.append(name)
            return name

        return app

    async with talk(make()) as client:
        task = await start(client, "pay", {"name": "first"}, meta={KEY: "k"})
        assert await begun.get() == "first"
    async with talk(make()) as client:  # the first server has stopped
        assert await begun.get() == "first"
        await client.result("tasks/cancel", {"taskId": task["taskId"]})
        await until(client, task, "cancelled")
        other = {"name": "pay", "arguments": {"name": "b"}}
        # A moment after its end.
        while "error" in (again := await client.call("tools/call", other, meta={KEY: "k"})):
            assert again["error"]["code"] == 42210
        assert (await until(client, again["result"], *OVER))["status"] == "completed"
    assert effects == ["b"]


async def test_retry_gets_the_task_from_the_server_that_has_adopted_it(tmp_path: Path) -> None:
    """At once, as from every other server: it does not wait for the end of the task."""
    begun = asyncio.Queue[None]()
    gate = asyncio.Event()

    def make() -> App:
        app = make_app(ledger=f"sqlite:{tmp_path}/ledger.db")

        @app.command(task=True, lease=SECONDS, wait=SECONDS)
        async def pay(ctx: Context) -> str:
            begun.put_nowait(None)
            await gate.wait()
            await ctx.commit_point()
            return "paid"

        return app

    async with talk(make()) as client:
        task = await start(client, "pay", meta={KEY: "k"})
        await begun.get()
    async with talk(make()) as client:  # the first server has stopped
        await begun.get()
        again = await start(client, "pay", meta={KEY: "k"})
        assert (again["taskId"], again["_meta"][REPLAYED]) == (task["taskId"], True)
        gate.set()
        assert (await until(client, task, *OVER))["status"] == "completed"


async def test_task_whose_first_server_passed_the_commit_point_is_not_cancelled_in_the_next(
    tmp_path: Path,
) -> None:
    """Its effect may have happened, so it finishes, although the handler has started from the top."""
    effects = list[int]()
    begun = asyncio.Queue[int]()
    gate = asyncio.Event()

    def make(number: int) -> App:
        app = make_app(ledger=f"sqlite:{tmp_path}/ledger.db")

        @app.command(task=True, on_crash="rerun", lease=SECONDS)
        async def pay(ctx: Context) -> str:
            if number == 1:
                begun.put_nowait(number)
                await gate.wait()
            await ctx.commit_point()
            effects.append(number)
            if number == 0:
                begun.put_nowait(number)
                await asyncio.Event().wait()
            return "paid"

        return app

    first = make(0)
    async with talk(first) as client:
        task = await start(client, "pay", meta={KEY: "k"})
        assert await begun.get() == 0
        ledger = await first.ledger()
        (record,) = await ledger.list()
        await ledger.lapse(record.token)  # its process counts as dead
        async with talk(make(1)) as other:
            assert await begun.get() == 1
            await other.result("tasks/cancel", {"taskId": task["taskId"]})
            for _ in range(10):  # the server checks its task
                assert (await get(other, task))["status"] == "working"
            gate.set()
            assert (await until(other, task, *OVER))["status"] == "completed"
    assert effects == [0, 1]  # as "rerun" allows
