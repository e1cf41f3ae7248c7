"""A batch that becomes a task: its status, its questions, a cancel, and calls that repeat it."""

import asyncio
from typing import Any

import pytest

from tests.calls import make_app
from tests.mcp.asgi import KEY, R4, HttpClient, over_stdio
from tests.mcp.batches import entry, ref, results, run
from tests.mcp.task_talk import BOOL, DECLARED, get, start, talk, until
from wirecall import App, BatchTool, Context

YES = {"action": "accept", "content": {"sure": True}}


class Shop:
    """An app whose batches are tasks, and what its tools have done."""

    def __init__(self, **options: Any) -> None:
        tool = BatchTool(tools="all", destructive="allow", task=True)
        self.app: App = make_app(batch_tool=tool, single_user=True, **options)
        self.done: list[str] = []
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()

        @self.app.command
        async def act(name: str) -> str:
            self.done.append(name)
            return name

        @self.app.command
        async def slow(name: str, ctx: Context) -> str:
            self.begun.set()
            await self.gate.wait()
            await ctx.commit_point()
            self.done.append(name)
            return name

        @self.app.command
        async def sure(name: str, ctx: Context) -> str:
            answer = await ctx.elicit(f"Sure about {name}?", BOOL)
            self.done.append(f"{name} {answer.content['sure']}")
            return name


CALLS = {
    "calls": [
        entry("act", {"name": "a"}, "a"),
        entry("slow", {"name": "b"}, "b"),
        entry("act", {"name": ref("b")}, "c"),
    ]
}


async def test_batch_is_a_task_for_clients_with_tasks() -> None:
    """A11: the answer is a task, whose message counts entries; its result is the batch's."""
    shop = Shop()
    async with talk(shop.app) as client:
        task = await start(client, "batch", CALLS)
        await shop.begun.wait()
        found: dict[str, Any] = {}
        while "statusMessage" not in found:
            found = await get(client, task)
        shop.gate.set()
        ended = await until(client, task, "completed", "failed")
    assert found["statusMessage"] == "1 of 3: act"
    assert [each["result"] for each in results(ended["result"])] == ["a", "b", "b"]
    assert shop.done == ["a", "b", "b"]


async def test_batch_is_not_a_task_for_other_clients() -> None:
    """A11: older revisions, and clients that do not declare tasks."""
    shop = Shop()
    shop.gate.set()
    async with over_stdio(shop.app, R4) as client:
        found = await run(client, *CALLS["calls"], meta={KEY: "k"})
        again = await run(client, *CALLS["calls"], meta={KEY: "k"})
    assert shop.done == ["a", "b", "b"]
    assert "replayed" not in found["a"]
    assert again["c"]["replayed"]


async def test_batch_with_one_key_is_one_task() -> None:
    """A6, A11: one key, one task."""
    shop = Shop()
    async with talk(shop.app) as client:
        first = await start(client, "batch", CALLS, meta={KEY: "k"})
        second = await start(client, "batch", CALLS, meta={KEY: "k"})
        shop.gate.set()
        await until(client, first, "completed")
        third = await start(client, "batch", CALLS, meta={KEY: "k"})
    assert first["taskId"] == second["taskId"] == third["taskId"]
    assert shop.done == ["a", "b", "b"]


async def test_lost_batch_task_without_a_key_is_recognised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A6, A11: the client lost the answer that names the task, and sends the batch again."""
    shop = Shop()
    async with talk(shop.app) as client:
        assert isinstance(client, HttpClient)
        message = client.message("tools/call", {"name": "batch", "arguments": CALLS})
        ledger = await shop.app.ledger()
        begin = ledger.begin_task
        lost = asyncio.Event()

        async def slow(*given: Any) -> bool:
            begun = await begin(*given)
            exchange.leave()
            await exchange.close()
            lost.set()
            return begun

        monkeypatch.setattr(ledger, "begin_task", slow)
        exchange = client.post(message)
        await lost.wait()
        monkeypatch.setattr(ledger, "begin_task", begin)
        task = await start(client, "batch", CALLS)
        shop.gate.set()
        ended = await until(client, task, "completed", "failed")
    assert ended["status"] == "completed"
    assert shop.done == ["a", "b", "b"]


async def test_batch_task_asks_and_continues() -> None:
    """A10, A11: the questions of entries are those of the task; the next leg replays."""
    shop = Shop()
    calls = {
        "calls": [
            entry("act", {"name": "a"}, "a"),
            entry("sure", {"name": ref("a")}, "s"),
            entry("act", {"name": "z"}, "z"),
        ]
    }
    async with talk(shop.app) as client:
        task = await start(client, "batch", calls)
        asked = await until(client, task, "input_required")
        assert list(asked["inputRequests"]) == ["s/input-1"]
        assert shop.done == ["a"]
        answers = {"taskId": task["taskId"], "inputResponses": {"s/input-1": YES}}
        await client.result("tasks/update", answers)
        ended = await until(client, task, "completed", "failed")
    found = results(ended["result"])
    assert [each.get("replayed", False) for each in found] == [True, False, False]
    assert shop.done == ["a", "a True", "z"]


async def test_batch_task_asks_for_consent() -> None:
    """A7, A11: destructive entries are confirmed by the client of the task."""
    app = make_app(batch_tool=BatchTool(tools="all", task=True))
    done: list[str] = []

    @app.command
    def delete(name: str) -> None:
        done.append(name)

    async with talk(app, capabilities=DECLARED) as client:
        task = await start(client, "batch", {"calls": [entry("delete", {"name": "x"})]})
        asked = await until(client, task, "input_required")
        assert list(asked["inputRequests"]) == ["confirm"]
        assert done == []
        yes = {"confirm": {"action": "accept", "content": {}}}
        await client.result("tasks/update", {"taskId": task["taskId"], "inputResponses": yes})
        await until(client, task, "completed")
    assert done == ["x"]


async def test_batch_task_is_cancelled() -> None:
    """A9, A11: a cancel of the task stops what has not passed its commit point."""
    shop = Shop()
    async with talk(shop.app) as client:
        task = await start(client, "batch", CALLS)
        await shop.begun.wait()
        await client.result("tasks/cancel", {"taskId": task["taskId"]})
        ended = await until(client, task, "completed", "failed", "cancelled")
    assert ended["status"] == "cancelled"
    assert shop.done == ["a"]


async def test_batch_that_may_become_a_task_asks_in_rounds() -> None:
    """A10, A11: a batch that is not handed over yet asks in its request, and continues there."""
    tool = BatchTool(tools="all", destructive="allow", task=60.0)
    app = make_app(batch_tool=tool, single_user=True)
    done: list[str] = []

    @app.command
    async def act(name: str) -> str:
        done.append(name)
        return name

    @app.command
    async def sure(ctx: Context) -> str:
        answer = await ctx.elicit("Sure?", BOOL)
        done.append(f"sure {answer.content['sure']}")
        return "sure"

    calls = {"calls": [entry("act", {"name": "a"}, "a"), entry("sure", id="s")]}
    async with talk(app) as client:
        asked = await client.tool("batch", calls)
        assert list(asked["inputRequests"]) == ["s/input-1"]
        members = {
            "requestState": asked["requestState"],
            "inputResponses": {"s/input-1": YES},
        }
        first = await client.tool("batch", calls, members=members)
        again = await client.tool("batch", calls, members=members)
    assert [each["ok"] for each in results(first)] == [True, True]
    assert results(first)[0]["replayed"]
    assert results(again) == results(first)
    assert done == ["a", "sure True"]
