"""Tasks (SEP-2663, 2026-07-28): how a call becomes one, what its client sees of it, and how it
ends.
"""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from tests.calls import make_app
from tests.mcp.asgi import (
    KEY,
    PATIENCE,
    R4,
    REPLAYED,
    TRANSPORTS,
    Client,
    HttpClient,
    over_http,
)
from tests.mcp.task_talk import BOOL, DECLARED, OVER, TASKS, Desk, get, start, talk, until
from wirecall import (
    Context,
    DomainError,
    Limits,
    NotDone,
    ProtocolError,
    ToolAnnotations,
    UsageError,
)

READS = ToolAnnotations(readOnlyHint=True)


async def code_of(client: Client, method: str, params: Any) -> int:
    return int((await client.call(method, params))["error"]["code"])


# --- how a call becomes a task --------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_call_of_a_declared_tool_becomes_a_task(transport: str) -> None:
    desk = Desk()
    desk.app.command(name="render", task=True, task_ttl=60, retention=40)(desk.act)
    async with talk(desk.app, transport) as client:
        task = await start(client, "render", {"name": "film"})
        assert (task["status"], task["ttlMs"], task["pollIntervalMs"]) == ("working", 100_000, 1000)
        assert task["createdAt"] == task["lastUpdatedAt"]
        assert len(task["taskId"]) >= 43  # 32 random bytes, encoded
        await desk.begun.wait()
        assert (await get(client, task))["status"] == "working"
        desk.gate.set()
        told = await until(client, task, *OVER)
        assert (told["status"], told["result"]["content"][0]["text"]) == (
            "completed",
            "film is done",
        )
    assert desk.effects == ["film"]


async def test_task_id_begins_with_a_letter_or_a_digit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command line takes a word that begins with "-" for an option."""
    drawn = [b"\xf8" * 32, b"\xfc" * 32]  # "-..." and "_..."
    real = os.urandom
    monkeypatch.setattr(
        os, "urandom", lambda size: drawn.pop() if size == 32 and drawn else real(size)
    )
    desk = Desk()
    desk.gate.set()
    desk.app.command(name="render", task=True)(desk.act)
    async with talk(desk.app) as client:
        task = await start(client, "render", {"name": "film"})
        assert not drawn and task["taskId"][0].isalnum()
        assert (await until(client, task, *OVER))["status"] == "completed"


@pytest.mark.parametrize(
    "capabilities", [{"elicitation": {}}, {"extensions": {}}, {"extensions": {TASKS: 1}}]
)
async def test_client_that_does_not_declare_the_extension_gets_the_result(
    capabilities: Any,
) -> None:
    desk = Desk()
    desk.gate.set()
    desk.app.command(name="render", task=True)(desk.act)
    desk.app.command(name="must", task="required")(desk.act)
    async with talk(desk.app, capabilities=capabilities) as client:
        assert (await client.tool("render", {"name": "film"}))["content"][0][
            "text"
        ] == "film is done"
        refused = (
            await client.call("tools/call", {"name": "must", "arguments": {"name": "film"}})
        )["error"]
        assert (refused["code"], refused["data"]["requiredCapabilities"]) == (
            -32021,
            {"extensions": {TASKS: {}}},
        )
        for method in ("tasks/get", "tasks/cancel", "tasks/update"):
            assert (
                await code_of(client, method, {"taskId": "unknown", "inputResponses": {}}) == -32021
            )
    assert desk.effects == ["film"]


async def test_older_revision_gets_the_result_of_every_tool() -> None:
    desk = Desk()
    desk.gate.set()
    desk.app.command(name="must", task="required")(desk.act)
    async with over_http(desk.app, R4, capabilities=DECLARED) as client:
        assert (await client.tool("must", {"name": "film"}))["content"][0]["text"] == "film is done"
        assert await code_of(client, "tasks/get", {"taskId": "x"}) == -32601


async def test_server_without_such_tools_does_not_have_the_extension() -> None:
    app = make_app()
    app.command(name="plain")(lambda: 1)
    async with talk(app) as client:
        assert TASKS not in (await client.result("server/discover"))["capabilities"].get(
            "extensions", {}
        )
        assert await code_of(client, "tasks/get", {"taskId": "x"}) == -32601


async def test_call_becomes_a_task_after_some_seconds() -> None:
    desk = Desk()
    desk.app.command(name="render", task=0.05)(desk.act)
    async with talk(desk.app) as client:
        task = await start(client, "render", {"name": "slow"})
        assert desk.effects == ["slow"]
        desk.gate.set()
        assert (await until(client, task, *OVER))["status"] == "completed"
    assert desk.effects == ["slow"]


async def test_call_that_ends_in_time_stays_a_call() -> None:
    desk = Desk()
    desk.gate.set()
    desk.app.command(name="render", task=PATIENCE)(desk.act)
    async with talk(desk.app) as client:
        assert (await client.tool("render", {"name": "quick"}))["content"][0][
            "text"
        ] == "quick is done"


async def test_call_asks_in_its_request_and_becomes_a_task_where_it_hands_over() -> None:
    app = make_app()
    runs = list[str]()

    @app.command(task=True)
    async def render(ctx: Context) -> str:
        answer = await ctx.elicit("Sure?", BOOL)
        await ctx.hand_over()
        runs.append("task")
        second = await ctx.elicit("Really?", BOOL)
        return f"{answer.content['sure']} {second.content['sure']}"

    async with talk(app) as client:
        first = await client.tool("render", {})
        assert first["resultType"] == "input_required"
        given = {"input-1": {"action": "accept", "content": {"sure": True}}}
        members = {"requestState": first["requestState"], "inputResponses": given}
        task = await start(client, "render", members=members)
        asked = await until(client, task, "input_required")
        assert list(asked["inputRequests"]) == ["input-2"]
        answer = {"input-2": {"action": "accept", "content": {"sure": False}}}
        await client.result("tasks/update", {"taskId": task["taskId"], "inputResponses": answer})
        told = await until(client, task, *OVER)
        assert told["result"]["content"][0]["text"] == "True False"
    assert runs == ["task", "task"]


@pytest.mark.parametrize("task", [0, -1, "maybe", False, float("nan")])
def test_task_declaration_that_is_invalid_is_refused(task: Any) -> None:
    with pytest.raises(UsageError, match="task must be True"):
        make_app().command(name="render", task=task)(lambda: 1)


# --- how it ends ----------------------------------------------------------------------------------


async def test_task_returns_what_the_call_would_have_returned() -> None:
    app = make_app()

    @app.tool(annotations=READS, task=True)
    async def refuse() -> None:
        raise DomainError(4020, "no money")

    @app.tool(annotations=READS, task=True)
    async def end() -> None:
        raise ProtocolError(-32000, "gone", {"why": "x"})

    @app.tool(annotations=READS, task=True)
    async def fail() -> None:
        raise ValueError("secret")

    @app.tool(annotations=READS, task=True)
    def plain(n: int) -> int:
        return n + 1

    async with talk(app) as client:
        told = await until(client, await start(client, "refuse"), *OVER)
        assert (told["status"], told["result"]["isError"]) == ("completed", True)
        told = await until(client, await start(client, "end"), *OVER)
        assert (told["status"], told["error"]) == (
            "failed",
            {"code": -32000, "message": "gone", "data": {"why": "x"}},
        )
        assert "result" not in told
        told = await until(client, await start(client, "fail"), *OVER)
        assert (told["status"], told["result"]["isError"]) == ("completed", True)
        assert "secret" not in str(told)
        told = await until(client, await start(client, "plain", {"n": 1}), *OVER)
        assert told["result"]["structuredContent"] == 2
        plainly = await client.result("tools/call", {"name": "plain", "arguments": {"n": "x"}})
        assert plainly["isError"] is True  # arguments that do not fit make no task


async def test_unknown_outcome_is_a_failed_task_and_stays_one() -> None:
    app = make_app()

    @app.command(task=True)
    async def pay(ctx: Context) -> str:
        await ctx.commit_point()
        raise ValueError

    async with talk(app) as client:
        task = await start(client, "pay", meta={KEY: "k"})
        told = await until(client, task, *OVER)
        assert (told["status"], told["error"]["code"], told["error"]["data"]["ran"]) == (
            "failed",
            50910,
            "unknown",
        )
        assert await app.resolve("tools/call:pay", "k", NotDone(), reason="the bank knows nothing")
        assert (await get(client, task))["error"] == told["error"]


async def test_task_status_shows_progress_and_log() -> None:
    app = make_app()
    gate = asyncio.Event()

    @app.command(task=True)
    async def render(ctx: Context) -> str:
        await ctx.progress(1, 4, "frame 1")
        await gate.wait()
        return "done"

    async with talk(app) as client:
        task = await start(client, "render")
        while "statusMessage" not in (told := await get(client, task)):
            continue
        assert told["statusMessage"] == "frame 1"
        gate.set()
        await until(client, task, *OVER)
        assert not client.heard


async def test_task_survives_a_status_that_json_cannot_carry() -> None:
    """Python strings have lone surrogates where the name of a file is not UTF-8."""
    app = make_app()

    @app.command(task=True)
    async def scan(ctx: Context) -> str:
        await ctx.progress(1, 2, os.fsdecode(b"caf\xe9.txt"))
        return "done"

    async with talk(app) as client:
        told = await until(client, await start(client, "scan"), *OVER)
        assert (told["status"], told["result"]["content"][0]["text"]) == ("completed", "done")


# --- questions ------------------------------------------------------------------------------------


async def test_task_asks_and_takes_each_answer_once() -> None:
    app = make_app()

    @app.command(task=True)
    async def close(ctx: Context) -> list[Any]:
        return [
            answer.content
            for answer in await ctx.ask(
                ctx.elicit("A?", BOOL, key="a"), ctx.elicit("B?", BOOL, key="b")
            )
        ]

    async with talk(app) as client:
        task = await start(client, "close")
        told = await until(client, task, "input_required")
        assert {
            key: each["method"] for key, each in told["inputRequests"].items()
        } == dict.fromkeys("ab", "elicitation/create")

        async def answer(**given: Any) -> Any:
            responses = {
                key: {"action": "accept", "content": content} for key, content in given.items()
            }
            return await client.call(
                "tasks/update", {"taskId": task["taskId"], "inputResponses": responses}
            )

        # It does not fit, and nothing is lost.
        assert (await answer(a={"sure": "perhaps"}))["error"]["code"] == -32602
        assert (await answer(other={"sure": True}))["result"]["resultType"] == "complete"
        await answer(a={"sure": True})
        assert list((await get(client, task))["inputRequests"]) == ["b"]
        await answer(a={"sure": False})  # too late
        await answer(b={"sure": False})
        told = await until(client, task, *OVER)
        assert told["result"]["structuredContent"] == [{"sure": True}, {"sure": False}]
        await answer(b={"sure": True})
        assert await get(client, task) == told


async def test_question_under_a_used_key_is_an_error_of_the_function(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = make_app()
    questions = iter(["First?", "Another?"])

    @app.command(task=True)
    async def ask(ctx: Context) -> None:
        await ctx.elicit(next(questions), BOOL, key="same")

    async with talk(app) as client:
        task = await start(client, "ask")
        await until(client, task, "input_required")
        given = {"same": {"action": "accept", "content": {"sure": True}}}
        await client.result("tasks/update", {"taskId": task["taskId"], "inputResponses": given})
        assert (await until(client, task, *OVER))["status"] == "failed"
    assert "'same' of ask is another one than before" in caplog.text


# --- cancelling -----------------------------------------------------------------------------------


async def test_task_that_has_done_nothing_is_cancelled() -> None:
    app = make_app()
    begun = asyncio.Event()
    cancelled = asyncio.Event()

    @app.command(task=True)
    async def pay(ctx: Context) -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        await ctx.commit_point()
        return "paid"

    async with talk(app) as client:
        task = await start(client, "pay", meta={KEY: "k"})
        await begun.wait()
        for _ in range(2):
            acknowledged = await client.result("tasks/cancel", {"taskId": task["taskId"]})
            assert not {"taskId", "status"} & acknowledged.keys()
        await cancelled.wait()
        assert (await until(client, task, *OVER))["status"] == "cancelled"
        again = await start(client, "pay", meta={KEY: "k"})
        assert again["taskId"] != task["taskId"], "nothing was done, so the key is free"
        assert (await get(client, task))["status"] == "cancelled"


async def test_task_past_its_commit_point_finishes() -> None:
    desk = Desk()
    desk.app.command(name="pay", task=True)(desk.act)
    async with talk(desk.app) as client:
        task = await start(client, "pay", {"name": "x"})
        await desk.begun.wait()
        await client.result("tasks/cancel", {"taskId": task["taskId"]})
        assert "it finishes" in (await get(client, task))["statusMessage"]
        desk.gate.set()
        assert (await until(client, task, *OVER))["status"] == "completed"


async def test_task_that_waits_for_an_answer_is_cancelled() -> None:
    app = make_app()

    @app.command(task=True)
    async def ask(ctx: Context) -> None:
        await ctx.elicit("Sure?", BOOL)

    async with talk(app) as client:
        task = await start(client, "ask")
        await until(client, task, "input_required")
        await client.result("tasks/cancel", {"taskId": task["taskId"]})
        assert (await until(client, task, *OVER))["status"] == "cancelled"
        assert [record.state.value for record in await (await app.ledger()).list()] == []


async def test_task_is_not_cancelled_by_a_disconnect_after_the_answer() -> None:
    desk = Desk()
    desk.app.command(name="pay", task=True)(desk.act)
    async with talk(desk.app, "stdio") as client:
        task = await start(client, "pay", {"name": "x"}, id=7)
        await client.notify("notifications/cancelled", {"requestId": 7})
        desk.gate.set()
        assert (await until(client, task, *OVER))["status"] == "completed"


# --- keys and callers -----------------------------------------------------------------------------


async def test_key_identifies_one_task() -> None:
    desk = Desk()
    desk.app.command(name="pay", task=True)(desk.act)
    async with talk(desk.app) as client:
        first = await start(client, "pay", {"name": "x"}, meta={KEY: "k"})
        await desk.begun.wait()
        second = await start(client, "pay", {"name": "x"}, meta={KEY: "k"})
        assert (second["taskId"], second["_meta"][REPLAYED]) == (first["taskId"], True)
        desk.gate.set()
        await until(client, first, *OVER)
        third = await start(client, "pay", {"name": "x"}, meta={KEY: "k"})
        assert third["taskId"] == first["taskId"]
        conflict = await client.call(
            "tools/call", {"name": "pay", "arguments": {"name": "y"}}, meta={KEY: "k"}
        )
        assert conflict["error"]["code"] == 42210
    assert desk.effects == ["x"]


async def test_task_of_another_caller_is_unknown() -> None:
    def authenticate(headers: Any) -> str | None:
        return str(headers.get("authorization"))

    desk = Desk(authenticate=authenticate)
    desk.app.command(name="pay", task=True)(desk.act)
    async with talk(desk.app) as client:
        call = {"name": "pay", "arguments": {"name": "x"}}
        task = await client.result("tools/call", call, headers={"authorization": "ada"})
        params = {"taskId": task["taskId"], "inputResponses": {}}
        for method in ("tasks/get", "tasks/cancel", "tasks/update"):
            theirs = await client.call(method, params, headers={"authorization": "eve"})
            unknown = await client.call(
                method, {**params, "taskId": "A" * 43}, headers={"authorization": "eve"}
            )
            assert theirs["error"] == unknown["error"]
            assert theirs["error"]["code"] == -32602
        desk.gate.set()


async def test_tasks_beyond_the_limit_wait() -> None:
    desk = Desk(limits=Limits(tasks=1))
    desk.app.command(name="pay", task=True, lease=0.2)(desk.act)
    async with talk(desk.app) as client:
        tasks = [await start(client, "pay", {"name": name}) for name in "ab"]
        await desk.begun.wait()
        assert desk.effects == ["a"]
        assert (await get(client, tasks[1]))["status"] == "working"
        desk.gate.set()
        for task in tasks:
            assert (await until(client, task, *OVER))["status"] == "completed"
    assert desk.effects == ["a", "b"]


async def test_listener_receives_the_states_of_its_tasks() -> None:
    desk = Desk()
    desk.app.command(name="pay", task=True)(desk.act)
    async with talk(desk.app) as client:
        assert isinstance(client, HttpClient)
        task = await start(client, "pay", {"name": "x"})
        ids = [task["taskId"], "unknown"]
        exchange = client.post(
            client.message("subscriptions/listen", {"notifications": {"taskIds": ids}}, 9)
        )
        acknowledged = await exchange.message()
        assert acknowledged["params"]["notifications"] == {"taskIds": [task["taskId"]]}
        first = await exchange.message()
        assert (first["method"], first["params"]["status"]) == ("notifications/tasks", "working")
        desk.gate.set()
        while (heard := (await exchange.message())["params"])["status"] == "working":
            continue
        assert (heard["status"], heard["result"]["content"][0]["text"]) == (
            "completed",
            "x is done",
        )
        await exchange.close()
    async with talk(desk.app, capabilities={"elicitation": {}}) as client:
        assert (
            await code_of(client, "subscriptions/listen", {"notifications": {"taskIds": ids}})
            == -32021
        )


async def test_mismatched_name_header_is_refused() -> None:
    desk = Desk()
    desk.app.command(name="pay", task=True)(desk.act)
    async with talk(desk.app) as client:
        task = await start(client, "pay", {"name": "x"})
        answer = await client.call(
            "tasks/get", {"taskId": task["taskId"]}, headers={"mcp-name": "other"}
        )
        assert answer["error"]["code"] == -32020
        desk.gate.set()


async def test_retry_continues_the_task_of_a_frozen_process(tmp_path: Path) -> None:
    """The first process's lease has expired, and the retry arrives before a process looks for such
    tasks.
    """
    first, second = (Desk(ledger=f"sqlite:{tmp_path}/ledger.db") for _ in range(2))
    for desk in (first, second):
        desk.app.command(name="pay", task=True, on_crash="rerun")(desk.act)
    second.gate.set()
    async with talk(first.app) as client:
        task = await start(client, "pay", {"name": "x"}, meta={KEY: "k"})
        await first.begun.wait()
        ledger = await first.app.ledger()
        (record,) = await ledger.list()
        assert await ledger.lapse(record.token)
        async with talk(second.app) as other:
            again = await start(other, "pay", {"name": "x"}, meta={KEY: "k"})
            assert again["taskId"] == task["taskId"]
            assert (await until(other, task, *OVER))["status"] == "completed"
        first.gate.set()
        assert (await get(client, task))["status"] == "completed"
    assert (first.effects, second.effects) == (["x"], ["x"])  # as "rerun" allows
