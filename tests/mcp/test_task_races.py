"""Races of tasks: two servers, or a client and a handler, act at the same moment, in many rounds."""

import asyncio
import random
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.calls import make_app
from tests.mcp.asgi import KEY, Client
from tests.mcp.task_talk import BOOL, OVER, get, start, talk, until
from tests.servers import DURABLE, Store
from tests.size import sized
from wirecall import App, Context
from wirecall.ledger.base import Claim, LedgerDown, Record, RecordId
from wirecall.protocol.sender import ANONYMOUS

ROUNDS = sized(small=6, full=200)
SECONDS = 3600.0


class Desk:
    """Apps on one ledger, and the effects of their tools."""

    def __init__(self, store: Store) -> None:
        self.effects: list[str] = []
        self.turns = 0
        self.apps = [self._app(store) for _ in range(2)]

    def _app(self, store: Store) -> App:
        app = make_app(ledger=store.url)

        @app.command(task=True)
        async def pay(name: str, ctx: Context) -> str:
            for _ in range(self.turns):
                await asyncio.sleep(0)
            await ctx.commit_point()
            self.effects.append(name)
            return name

        @app.command(task=True)
        async def ask(name: str, ctx: Context) -> str:
            await ctx.elicit("Sure?", BOOL, key="sure")
            await ctx.commit_point()
            self.effects.append(name)
            return name

        return app


async def late(work: Any, turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)
    await work


@pytest.mark.parametrize("handles", [1, 2])
@pytest.mark.parametrize("tool", ["pay", "ask"])
async def test_task_is_cancelled_or_completed_and_its_effect_agrees(
    store: Store, tool: str, handles: int
) -> None:
    """With two handles, the server that receives the cancellation is not the one that runs the
    task.
    """
    desk = Desk(store)
    ends = set[str]()
    async with AsyncExitStack() as stack:
        first, *others = [await stack.enter_async_context(talk(app)) for app in desk.apps[:handles]]
        canceller = others[0] if others else first
        for number in range(ROUNDS):
            name = f"n{number}"
            desk.turns = random.choice((0, 1, 5, 50, 500))
            task = await start(first, tool, {"name": name})
            params = {"taskId": task["taskId"]}
            work = [
                late(canceller.result("tasks/cancel", params), random.choice((0, 1, 5, 50, 500)))
            ]
            if tool == "ask":
                await until(first, task, "input_required")
                given = {"sure": {"action": "accept", "content": {"sure": True}}}
                answering = first.result("tasks/update", {**params, "inputResponses": given})
                work.append(late(answering, random.choice((0, 1, 5, 50))))
            await asyncio.gather(*work)
            told = await until(first, task, *OVER)
            ends.add(told["status"])
            assert told["status"] in ("cancelled", "completed"), told
            assert (name in desk.effects) == (told["status"] == "completed"), told
            assert (await get(canceller, task))["status"] == told["status"]
    assert len(desk.effects) == len(set(desk.effects))


@pytest.mark.parametrize("store", DURABLE, indirect=True)
async def test_task_cancelled_by_another_server_does_not_continue(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer arrives first, but the next leg's claim reaches the ledger after the record was
    released.
    """
    desk = Desk(store)
    claims = asyncio.Queue[Claim]()
    gate = asyncio.Event()
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(talk(app)) for app in desk.apps]
        task = await start(first, "ask", {"name": "n"})
        await until(first, task, "input_required")
        ledger = await desk.apps[0].ledger()
        inner = ledger.claim

        async def late_claim(claim: Claim) -> Record:
            claims.put_nowait(claim)
            await gate.wait()
            return await inner(claim)

        async def stay_away(_id: str) -> None: ...

        monkeypatch.setattr(ledger, "claim", late_claim)
        # The second server, which looks for tasks when it starts, may find this one ready.
        monkeypatch.setattr(desk.apps[1].mcp().task_runner, "resume", stay_away)
        given = {"sure": {"action": "accept", "content": {"sure": True}}}
        await first.result("tasks/update", {"taskId": task["taskId"], "inputResponses": given})
        claim = await claims.get()
        await second.result("tasks/cancel", {"taskId": task["taskId"]})
        await until(second, task, "cancelled")
        gate.set()
        while desk.apps[0].mcp().task_runner.runs:
            await get(first, task)
        assert (await get(first, task))["status"] == "cancelled"
        assert await ledger.get(claim.id) is None
    assert desk.effects == []


async def test_task_that_asks_before_it_learns_of_its_cancellation_ends(store: Store) -> None:
    """Another server receives the cancellation; the task's server learns of it when it renews its
    lease.
    """
    begun = asyncio.Event()
    gate = asyncio.Event()

    def make() -> App:
        app = make_app(ledger=store.url)

        @app.command(task=True, lease=SECONDS)
        async def ask(ctx: Context) -> None:
            begun.set()
            await gate.wait()
            await ctx.elicit("Sure?", BOOL)

        return app

    async with talk(make()) as first, talk(make()) as second:
        task = await start(first, "ask")
        await begun.wait()
        await second.result("tasks/cancel", {"taskId": task["taskId"]})
        gate.set()
        assert (await until(first, task, *OVER))["status"] == "cancelled"


async def test_answer_that_arrives_before_its_server_knows_that_the_task_waits_is_used(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger shows the question to every server before the one that asked learns that it was
    recorded.
    """
    desk = Desk(store)
    suspended = asyncio.Event()
    gate = asyncio.Event()
    ledger = await desk.apps[0].ledger()
    suspend = ledger.suspend

    async def slow(*given: Any) -> bool:
        is_waiting = await suspend(*given)
        suspended.set()
        await gate.wait()
        return is_waiting

    monkeypatch.setattr(ledger, "suspend", slow)
    async with talk(desk.apps[0]) as client:
        task = await start(client, "ask", {"name": "n"})
        await suspended.wait()
        given = {"sure": {"action": "accept", "content": {"sure": True}}}
        await client.result("tasks/update", {"taskId": task["taskId"], "inputResponses": given})
        for _ in range(3):  # the server checks its task, which it still runs
            await get(client, task)
        gate.set()
        assert (await until(client, task, *OVER))["status"] == "completed"
    assert desk.effects == ["n"]


async def test_question_that_is_written_again_does_not_undo_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ledger has the question, its reply is lost, and the client answers before the server
    tries again.
    """
    app = make_app()
    effects = list[str]()

    @app.command(task=True)
    async def ask(ctx: Context) -> None:
        await ctx.elicit("Sure?", BOOL, key="sure")
        await ctx.commit_point()
        effects.append("done")

    ledger = await app.ledger()
    suspend = ledger.suspend
    find = ledger.task
    asked = asyncio.Event()
    answered = asyncio.Event()
    again = asyncio.Event()
    is_down = False

    async def lost(*given: Any) -> bool:
        nonlocal is_down
        is_waiting = await suspend(*given)
        if asked.is_set():
            again.set()
            return is_waiting
        asked.set()
        await answered.wait()
        is_down = True
        raise LedgerDown("the reply was lost")

    async def task(id: str) -> Any:
        if is_down:
            raise LedgerDown("still")
        return await find(id)

    monkeypatch.setattr(ledger, "suspend", lost)
    monkeypatch.setattr(ledger, "task", task)
    async with talk(app) as client:
        made = await start(client, "ask")
        await asked.wait()
        given = {"sure": {"action": "accept", "content": {"sure": True}}}
        await client.result("tasks/update", {"taskId": made["taskId"], "inputResponses": given})
        answered.set()
        for _ in range(100):  # turns of the loop, during which the leg ends
            await asyncio.sleep(0)
        assert not app.mcp().task_runner.runs
        is_down = False
        await again.wait()
        assert list(await ledger.orphans()) == [made["taskId"]]
        await app.mcp().task_runner.adopt()
        assert (await until(client, made, *OVER))["status"] == "completed"
    assert effects == ["done"]


@pytest.mark.parametrize("store", DURABLE, indirect=True)
async def test_server_with_a_late_claim_continues_with_the_current_answers(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then the other one has run two legs, and the task waits for its third answer."""
    keys = ("a", "b", "c")

    def make() -> App:
        app = make_app(ledger=store.url)

        @app.command(task=True, lease=SECONDS)
        async def ask(ctx: Context) -> int:
            return sum(
                [(await ctx.elicit(f"{key}?", BOOL, key=key)).content["sure"] for key in keys]
            )

        return app

    apps = [make() for _ in range(2)]
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(talk(app)) for app in apps]
        task = await start(first, "ask")

        async def answer(client: Client, key: str) -> None:
            while list((await until(client, task, "input_required"))["inputRequests"]) != [key]:
                continue
            given = {key: {"action": "accept", "content": {"sure": True}}}
            await client.result("tasks/update", {"taskId": task["taskId"], "inputResponses": given})

        ledger = await apps[1].ledger()
        inner = ledger.claim
        claimed = asyncio.Event()
        gate = asyncio.Event()

        async def late_claim(claim: Claim) -> Record:
            claimed.set()
            await gate.wait()
            return await inner(claim)

        monkeypatch.setattr(ledger, "claim", late_claim)
        await answer(second, "a")
        await claimed.wait()
        await apps[0].mcp().task_runner.resume(task["taskId"])
        await answer(first, "b")
        while list((await until(first, task, "input_required"))["inputRequests"]) != ["c"]:
            continue
        gate.set()
        while apps[1].mcp().task_runner.runs:
            await get(second, task)
        assert (await get(second, task))["status"] == "input_required"
        await answer(second, "c")
        assert (await until(first, task, *OVER))["result"]["structuredContent"] == 3


@pytest.mark.parametrize("store", DURABLE, indirect=True)
async def test_server_that_finds_another_at_work_does_not_end_the_task(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops waiting at the moment when the other server's leg ends with a question."""
    begun = asyncio.Event()
    gate = asyncio.Event()

    def make() -> App:
        app = make_app(ledger=store.url)

        @app.command(task=True, lease=SECONDS, wait=0.001)
        async def ask(ctx: Context) -> None:
            await ctx.elicit("Sure?", BOOL, key="sure")
            begun.set()
            await gate.wait()
            await ctx.elicit("Really?", BOOL, key="really")

        return app

    apps = [make() for _ in range(2)]
    async with talk(apps[0]) as first:
        task = await start(first, "ask")
        await until(first, task, "input_required")
        async with talk(apps[1]) as second:
            ledger = await apps[1].ledger()
            inner = ledger.claim
            claims = asyncio.Queue[Claim]()
            turns = asyncio.Semaphore(0)

            async def late_claim(claim: Claim) -> Record:
                claims.put_nowait(claim)
                await turns.acquire()
                return await inner(claim)

            monkeypatch.setattr(ledger, "claim", late_claim)
            given = {"sure": {"action": "accept", "content": {"sure": True}}}
            await second.result("tasks/update", {"taskId": task["taskId"], "inputResponses": given})
            await claims.get()
            working = asyncio.create_task(apps[0].mcp().task_runner.resume(task["taskId"]))
            await begun.wait()
            for _ in range(2):  # it claims, waits for a moment, and claims for the last time
                turns.release()
            while apps[1].mcp().task_runner.runs:
                await get(second, task)
            gate.set()
            await working
            turns.release()
        assert (await get(first, task))["status"] == "input_required"


# In SQLite a handler's transaction locks the file, so its task cannot be adopted.
ADOPTED = [*((kind, "unknown") for kind in DURABLE), ("postgres", "transactional")]


@pytest.mark.parametrize(("store", "mode"), ADOPTED, indirect=["store"])
async def test_server_whose_task_was_adopted_does_not_end_it(store: Store, mode: Any) -> None:
    begun = asyncio.Queue[int]()
    gates = [asyncio.Event(), asyncio.Event()]
    runs = list[int]()

    def make(number: int) -> App:
        app = make_app(ledger=store.url)

        @app.command(task=True, on_crash=mode, lease=SECONDS)
        async def pay(ctx: Context) -> str:
            begun.put_nowait(number)
            await gates[number].wait()
            await ctx.commit_point()
            runs.append(number)
            return f"by {number}"

        return app

    apps = [make(number) for number in range(2)]
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(talk(apps[0]))
        task = await start(first, "pay", meta={KEY: "k"})
        assert await begun.get() == 0
        store.age(RecordId(ANONYMOUS, "tools/call:pay", "k"), SECONDS + 1)
        second = await stack.enter_async_context(talk(apps[1]))
        assert await begun.get() == 1
        gates[0].set()
        while apps[0].mcp().task_runner.runs:
            await get(first, task)
        assert (await get(second, task))["status"] == "working"
        gates[1].set()
        told = await until(second, task, *OVER)
        assert (told["status"], told["result"]["content"][0]["text"]) == ("completed", "by 1")
        assert await get(first, task) == told
    if mode == "unknown":
        assert runs == [1]


@pytest.mark.parametrize("turns", range(8))
async def test_stream_of_tasks_ends_although_a_task_changes_in_the_same_turn(turns: int) -> None:
    async def send(state: Any) -> None:
        raise AssertionError(f"no task has this id: {state}")

    server = make_app().mcp()
    following = asyncio.create_task(server.tasks.listen(frozenset({"a"}), ANONYMOUS, send))
    for _ in range(5):
        await asyncio.sleep(0)
    server.hub.notify("task", "a")
    for _ in range(turns):
        await asyncio.sleep(0)
    following.cancel()
    await asyncio.wait({following}, timeout=60)
    assert following.cancelled()
