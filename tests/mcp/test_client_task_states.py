"""How the client follows tasks: when it polls, when it listens, and how it treats servers that
misbehave.
"""

import asyncio
from typing import Any

import pytest

from tests.client.conftest import nothing_is_left as nothing_is_left
from tests.client.peers import until
from tests.mcp.scripted import Reply, refusal, text
from tests.mcp.task_servers import (
    CANCELLED,
    CREATED,
    DONE,
    ERRORS,
    ID,
    Asked,
    Pushing,
    Server,
    Still,
    answers,
    asking,
    client_to,
    task,
)
from wirecall.errors import (
    BadAnswer,
    ConnectionLost,
    InternalError,
    MethodNotFound,
    NotSent,
    Refused,
    RpcError,
    TimedOut,
)
from wirecall.testing import FakeClock

# --- how often ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "pause"),
    [
        *((250, 0.25), (0, 0.1), (-5, 0.1), (99, 0.1), (60_001, 60.0), (10**30, 60.0), (1.5, 0.1)),
        *(("500", 1.0), (None, 1.0), ([], 1.0), ({}, 1.0), (True, 1.0)),
    ],
)
async def test_poll_interval_of_the_server_is_kept_within_bounds(wish: Any, pause: float) -> None:
    clock = FakeClock()
    state = task(pollIntervalMs=wish)
    given = Server(state, DONE, created={**CREATED, "pollIntervalMs": wish})
    async with given as server, client_to(server, clock=clock) as client:
        assert (await client.call_tool("t", timeout=600)).text == "done"
    assert clock.slept == [pause] * 2


async def test_poll_interval_follows_the_last_state_and_has_a_default() -> None:
    clock = FakeClock()
    none = {name: value for name, value in task().items() if name != "pollIntervalMs"}
    async with (
        Server(task(pollIntervalMs=3000), none, DONE) as server,
        client_to(server, clock=clock) as client,
    ):
        await client.call_tool("t")
    assert clock.slept == [1.0, 3.0, 1.0]


@pytest.mark.parametrize(("chance", "pause"), [(0.0, 0.9), (1.0, 1.1)])
async def test_poll_interval_is_spread_by_a_tenth(chance: float, pause: float) -> None:
    clock = FakeClock()
    async with (
        Server(DONE) as server,
        client_to(server, clock=clock, chance=lambda: chance) as client,
    ):
        await client.call_tool("t")
    assert clock.slept == pytest.approx([pause])


# --- states that the server sends unasked ---------------------------------------------------------


async def test_server_that_sends_states_is_not_polled() -> None:
    async with Pushing(DONE) as server, client_to(server, clock=Still(), elicit=Asked()) as client:
        for state in (task(), asking("a"), task(statusMessage="half"), DONE):
            server.told.put_nowait(state)
        assert (await client.call_tool("t")).text == "done"
    assert server.sent("subscriptions/listen")[0]["notifications"] == {"taskIds": [ID]}
    assert server.methods() == [
        "server/discover",
        "tools/call",
        "subscriptions/listen",
        "tasks/update",
    ]


async def test_server_that_sends_states_is_polled_rarely() -> None:
    """A notification may be lost."""
    clock = Still()
    async with Pushing(DONE) as server, client_to(server, clock=clock) as client:
        calling = asyncio.create_task(client.call_tool("t", timeout=600))
        server.told.put_nowait(task(statusMessage="half"))
        await until(lambda: clock.slept and clock.slept[-1] == 60.0)
        clock.goes.set()
        assert (await calling).text == "done"
    assert server.methods().count("tasks/get") == 1


async def test_server_that_agrees_and_sends_nothing_is_polled() -> None:
    async with Pushing(task(), DONE) as server, client_to(server) as client:
        assert (await client.call_tool("t")).text == "done"
    assert server.methods().count("tasks/get") == 2


@pytest.mark.parametrize(
    "bad", [task("completed"), {"taskId": ID}, {"taskId": ID, "status": "odd"}, task("failed")]
)
async def test_state_that_cannot_be_used_is_polled(bad: Any) -> None:
    """One page of the extension shows notifications without the result."""
    clock = Still()
    async with Pushing(DONE) as server, client_to(server, clock=clock) as client:
        calling = asyncio.create_task(client.call_tool("t"))
        await until(lambda: clock.slept)
        server.told.put_nowait(bad)
        await until(lambda: len(clock.slept) > 1)
        assert clock.slept == [1.0, 1.0]
        clock.goes.set()
        assert (await calling).text == "done"


async def test_states_of_other_tasks_are_ignored() -> None:
    async with Pushing(DONE) as server, client_to(server, clock=Still()) as client:
        server.told.put_nowait({**CANCELLED, "taskId": "another"})
        server.told.put_nowait(DONE)
        assert (await client.call_tool("t")).text == "done"


async def test_stream_that_ends_is_replaced_after_a_poll() -> None:
    clock = Still()
    async with Pushing(task(), DONE) as server, client_to(server, clock=clock) as client:
        calling = asyncio.create_task(client.call_tool("t", timeout=600))
        server.told.put_nowait(task(statusMessage="half"))
        await until(lambda: clock.slept and clock.slept[-1] == 60.0)
        server.told.put_nowait(None)
        await until(lambda: clock.slept[-1] == 1.0)
        assert (
            server.methods().count("subscriptions/listen") == 1
            and "tasks/get" not in server.methods()
        )
        clock.goes.set()
        assert (await calling).text == "done"
    assert server.methods()[-4:] == [
        "subscriptions/listen",
        "tasks/get",
        "subscriptions/listen",
        "tasks/get",
    ]


@pytest.mark.parametrize("manner", ["refuses", "leaves out", "is silent"])
async def test_server_that_does_not_agree_is_polled_and_not_asked_again(
    manner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wirecall.mcp.client.conversation.AGREEING", 0.2)
    held = {"subscriptions/listen": lambda _message: Reply(events=[], hold=True)}
    made = {
        "refuses": Server(DONE),
        "leaves out": Pushing(DONE, honours=False),
        "is silent": Server(DONE, **held),
    }
    async with made[manner] as server, client_to(server) as client:
        for _ in range(3):
            assert (await client.call_tool("t")).text == "done"
    assert (
        server.methods().count("subscriptions/listen") == 1
        and server.methods().count("tasks/get") == 3
    )


async def test_client_listens_to_few_tasks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a connection, and requests need some as well."""
    monkeypatch.setattr("wirecall.mcp.client.conversation.STREAMS", 2)
    created = lambda message: {**CREATED, "taskId": message["params"]["name"]}  # noqa: E731
    clock = Still()
    async with Pushing(DONE, created=created) as server, client_to(server, clock=clock) as client:
        calls = [asyncio.create_task(client.call_tool(f"t{number}")) for number in range(5)]
        await until(lambda: len(clock.slept) == 5)
        assert server.methods().count("subscriptions/listen") == 2
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_client_keeps_its_lists_while_it_listens_to_a_task() -> None:
    listed: Any = {"tools/list": {"tools": [], "ttlMs": 60_000}}
    async with Pushing(DONE, **listed) as server, client_to(server, clock=Still()) as client:
        await client.list_tools()
        server.told.put_nowait(DONE)
        await client.call_tool("t")
        await client.list_tools()
    assert server.methods().count("tools/list") == 1


# --- servers that are away ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trouble",
    [
        Reply(events=["data: {"], tear=True),
        Reply(status=503),
        Reply(status=429, headers={"retry-after": "7"}),
        Reply(status=502),
        lambda message: refusal(message, 50310, data={"type": "ledger_unavailable", "ran": "no"}),
        lambda message: refusal(
            message, 42910, data={"type": "busy", "retry_after_ms": 1, "ran": "no"}
        ),
    ],
)
async def test_server_that_is_unavailable_does_not_end_the_wait(trouble: Any) -> None:
    async with Server(*[trouble] * 6, task(), trouble, DONE) as server, client_to(server) as client:
        assert (await client.call_tool("t", timeout=600)).text == "done"
        assert (await client.task(ID)).text == "done"


async def test_server_that_cannot_be_reached_does_not_end_the_wait() -> None:
    server = await Server(task()).__aenter__()
    async with client_to(server) as client:
        started = await client.start_tool("t")
        await server.__aexit__()
        with pytest.raises(TimedOut, match="was not over within 5 s"):
            await started.result(timeout=5)
        assert not started.is_over


@pytest.mark.parametrize(
    ("trouble", "error"),
    [
        (Reply(status=401), Refused),
        (Reply(status=404), Refused),
        (Reply(status=500), BadAnswer),
        (Reply({"jsonrpc": "1.0"}), BadAnswer),
        (lambda message: refusal(message, -32601), MethodNotFound),
        (lambda message: refusal(message, -32603), InternalError),
        (lambda message: refusal(message, 4711), RpcError),
    ],
)
async def test_refusal_of_any_other_kind_ends_the_wait_with_an_unknown_outcome(
    trouble: Any, error: type[Exception]
) -> None:
    async with Server(task(), trouble) as server, client_to(server) as client:
        with pytest.raises(error) as caught:
            await client.call_tool("t")
        assert getattr(caught.value, "ran", None) == "unknown"
        await until(lambda: "tasks/cancel" in server.methods())


async def test_client_that_is_closed_ends_the_wait() -> None:
    clock = Still()
    async with Server(task()) as server, client_to(server, clock=clock) as client:
        started = await client.start_tool("t")
        waiting = asyncio.create_task(started.result())
        await until(lambda: clock.slept)
        await client.aclose()
        with pytest.raises(ConnectionLost, match="the client was closed"):
            await waiting
        with pytest.raises(ConnectionLost, match="the client was closed"):
            await started
        with pytest.raises(NotSent, match="the client is closed"):
            await started.refresh()
    assert "tasks/cancel" not in server.methods()


# --- servers that misbehave -----------------------------------------------------------------------


async def test_state_may_have_the_type_of_a_task() -> None:
    """Two examples of the extension show it, although its text says otherwise."""
    async with (
        Server({**task(), "resultType": "task"}, {**DONE, "resultType": "task"}) as server,
        client_to(server) as client,
    ):
        assert (await client.call_tool("t")).text == "done"


@pytest.mark.parametrize("status", ["completed", "failed", "cancelled", "input_required"])
async def test_answer_to_the_call_only_begins_a_task(status: str) -> None:
    """The answer may say that the task is over, but never has the result."""
    created = {
        **CREATED,
        "status": status,
        "result": text("not this"),
        "error": ERRORS[0],
        "inputRequests": 7,
    }
    clock = FakeClock()
    async with Server(DONE, created=created) as server, client_to(server, clock=clock) as client:
        assert (await client.call_tool("t")).text == "done"
    assert clock.slept == []


async def test_state_members_that_the_client_does_not_need_may_be_missing_or_unexpected() -> None:
    bare = {"resultType": "task", "taskId": ID, "status": "working"}
    strange = task(result=text("not this"), error=7, inputRequests=[], other={})
    over = {"taskId": ID, "status": "completed", "result": text("done"), "error": 7}
    async with Server(strange, bare, over, created=bare) as server, client_to(server) as client:
        started = await client.start_tool("t")
        assert (await started).text == "done" and (await started.refresh()).created is None


@pytest.mark.parametrize(
    "bad",
    [
        task("paused"),
        task(""),
        {name: value for name, value in task().items() if name != "status"},
        {name: value for name, value in task().items() if name != "taskId"},
        {**task(), "taskId": "another"},
        {**task(), "taskId": 7},
        {**task(), "taskId": "x" * (1 << 20)},
        task("completed"),
        task("completed", result=None),
        task("completed", result=[]),
        task("completed", result={**CREATED}),
        task("completed", result={"resultType": "input_required", "requestState": "s"}),
        task("completed", result={"resultType": "odd"}),
        task("failed"),
        task("failed", error=None),
        task("failed", error={"code": "x", "message": 7}),
        task("failed", result=text("done")),
        task("input_required", inputRequests=7),
        task("input_required", inputRequests={"a": {"params": {}}}),
        task(statusMessage=7),
        task(ttlMs="soon"),
        {**task(), "resultType": "odd"},
        [],
        7,
    ],
)
async def test_invalid_state_is_a_bad_answer(bad: Any) -> None:
    async with Server(task(), bad) as server, client_to(server, elicit=Asked()) as client:
        with pytest.raises(BadAnswer) as caught:
            await client.call_tool("t")
        assert len(str(caught.value)) < 1000
        with pytest.raises(BadAnswer):
            await client.task(ID)


@pytest.mark.parametrize("id", ["", "x" * (1 << 20), None, 7])
async def test_invalid_id_is_a_bad_answer(id: Any) -> None:
    async with (
        Server(DONE, created={**CREATED, "taskId": id}) as server,
        client_to(server) as client,
    ):
        with pytest.raises(BadAnswer, match="taskId"):
            await client.call_tool("t")
    assert server.methods() == ["server/discover", "tools/call"]


async def test_input_required_without_questions_is_polled_again() -> None:
    """`input_required` without questions, or only with answered ones."""
    states = [task("input_required"), asking("a"), asking("a"), asking("a"), DONE]
    async with Server(*states) as server, client_to(server, elicit=Asked()) as client:
        assert (await client.call_tool("t")).text == "done"
    assert answers(server) == [{"a": "a!"}]


@pytest.mark.parametrize("ack", [{"resultType": "task"}, {"resultType": "odd"}])
async def test_answer_must_be_acknowledged(ack: Any) -> None:
    async with (
        Server(asking("a"), **{"tasks/update": ack}) as server,
        client_to(server, elicit=Asked()) as client,
    ):
        with pytest.raises(BadAnswer, match="unknown type"):
            await client.call_tool("t")
