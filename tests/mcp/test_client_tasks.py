"""Calls of tools that become tasks, as their caller sees them (extension
io.modelcontextprotocol/tasks).
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.client.conftest import nothing_is_left as nothing_is_left
from tests.client.peers import until
from tests.mcp.asgi import R4
from tests.mcp.clients import client_of
from tests.mcp.scripted import Reply, Scripted, older, refusal, result, text
from tests.mcp.task_servers import (
    CANCELLED,
    CREATED,
    DONE,
    ERRORS,
    ID,
    KEY,
    KEYS,
    META,
    TASKS,
    TIMES,
    Asked,
    Server,
    Still,
    answers,
    asking,
    client_to,
    question,
    task,
)
from wirecall import UsageError, connect_sync
from wirecall.errors import (
    BadAnswer,
    BadInput,
    InternalError,
    MethodNotFound,
    NotSent,
    OutcomeUnknown,
    Refused,
    RpcError,
    TaskCancelled,
    TaskGone,
    TimedOut,
    ToolError,
    WirecallError,
)
from wirecall.mcp.client.client import McpClient
from wirecall.mcp.client.inbox import Form
from wirecall.mcp.client.tasks import TaskState
from wirecall.testing import FakeClock


async def outcome(client: McpClient, **options: Any) -> Any:
    try:
        return await client.call_tool("t", **options)
    except WirecallError as error:
        shown = (
            (error.code, error.message, error.data) if isinstance(error, RpcError) else str(error)
        )
        return type(error), shown, getattr(error, "ran", None)


# --- a call that becomes a task -------------------------------------------------------------------


async def test_call_waits_for_its_task() -> None:
    clock = FakeClock()
    async with Server(task(), task(), DONE) as server, client_to(server, clock=clock) as client:
        called = await client.call_tool("t", {"a": 1})
    assert (called.text, called.is_error) == ("done", False)
    assert server.methods() == [
        "server/discover",
        "tools/call",
        "subscriptions/listen",
        *["tasks/get"] * 3,
    ]
    assert clock.slept == [1.0] * 3


async def test_every_request_declares_the_extension_and_names_its_task_in_a_header() -> None:
    async with (
        Server(asking("a"), task(), CANCELLED) as server,
        client_to(server, elicit=Asked()) as client,
    ):
        with pytest.raises(TaskCancelled):
            await client.call_tool("t")
        await client.task(ID).cancel()
    declared = [
        one.body["params"]["_meta"][f"{META}clientCapabilities"]["extensions"]
        for one in server.seen
    ]
    assert declared == [{TASKS: {}}] * len(server.seen)
    named = {
        one.method: one.headers.get("mcp-name")
        for one in server.seen
        if one.method.startswith("tasks/")
    }
    assert named == {"tasks/get": ID, "tasks/update": ID, "tasks/cancel": ID}
    assert all(one.headers["mcp-method"] == one.method for one in server.seen)


@pytest.mark.parametrize("id", ["é", "a b ", "x\r\nHost: y", "x" * 4096])
async def test_task_id_of_any_characters_fits_a_header(id: str) -> None:
    created = {**CREATED, "taskId": id}
    done = {**DONE, "taskId": id}
    async with Server(done, created=created) as server, client_to(server) as client:
        assert (await client.call_tool("t")).text == "done"
    assert server.sent("tasks/get")[0]["taskId"] == id


RESULTS: list[Any] = [
    text("done"),
    {"content": [], "structuredContent": {"a": 1}, "resultType": "complete"},
    {**text("broke"), "isError": True},
    {
        **text("broke"),
        "isError": True,
        "_meta": {"io.wirecall/error": {"code": 42210, "data": {"ran": "no"}}},
    },
    {**text("again"), "_meta": {"io.wirecall/replayed": True}},
    {"content": 7},
]


@pytest.mark.parametrize("options", [{}, {"check": False}, {"type": dict[str, int]}])
@pytest.mark.parametrize("given", RESULTS)
async def test_task_result_is_that_of_the_plain_call(given: Any, options: Any) -> None:
    async with Server(given, created=given) as plain, client_to(plain) as client:
        wanted = await outcome(client, **options)
    async with Server(task("completed", result=given)) as server, client_to(server) as client:
        assert await outcome(client, **options) == wanted


@pytest.mark.parametrize("given", ERRORS)
async def test_task_error_is_that_of_the_plain_call(given: Any) -> None:
    failed = lambda message: refusal(message, given["code"], given["message"], given.get("data"))  # noqa: E731
    async with Server(DONE, created=failed) as plain, client_to(plain) as client:
        wanted = await outcome(client)
    async with Server(task("failed", error=given)) as server, client_to(server) as client:
        assert await outcome(client) == wanted
    assert "tasks/cancel" not in server.methods()


async def test_failed_task_raises_the_class_of_its_code() -> None:
    async with Server(task("failed", error=ERRORS[1])) as server, client_to(server) as client:
        with pytest.raises(OutcomeUnknown):
            await client.call_tool("t")


async def test_raw_call_waits_as_well() -> None:
    async with Server(DONE) as server, client_to(server) as client:
        assert await client.call("tools/call", {"name": "t"}) == {**text("done"), "isError": False}


async def test_questions_before_the_task_are_rounds_of_the_call() -> None:
    asked = {
        "resultType": "input_required",
        "inputRequests": {"a": question("a")},
        "requestState": "s",
    }
    created = lambda message: CREATED if "requestState" in message["params"] else asked  # noqa: E731
    async with (
        Server(DONE, created=created) as server,
        client_to(server, elicit=lambda _: {"name": "Ann"}) as client,
    ):
        assert (await client.call_tool("t")).text == "done"
    assert server.methods().count("tools/call") == 2 and "tasks/update" not in server.methods()


async def test_lost_answer_is_requested_again_with_the_same_key() -> None:
    """The ids of tasks are the server's, so only the key leads to a task whose id was lost
    (SEP-2663 has no list).
    """
    lost = [Reply(events=["data: {"], tear=True)]
    made: list[str] = []

    def created(message: Any) -> Any:
        made.append(message["params"]["_meta"][KEY])
        return lost.pop() if lost else {**CREATED, "_meta": {"io.wirecall/replayed": True}}

    given = Server(DONE, created=created, capabilities=KEYS)
    async with given as server, client_to(server) as client, client.batch() as batch:
        entry = batch.call_tool("t", key="k")
    assert entry.result().text == "done" and entry.replayed and entry.attempts == 2
    assert made == ["k", "k"] and server.methods().count("tasks/get") == 1


async def test_batch_calls_wait_for_their_tasks() -> None:
    def created(message: Any) -> Any:
        name = message["params"]["name"]
        return text("at once") if name == "plain" else {**CREATED, "taskId": name}

    def got(message: Any) -> Any:
        id = message["params"]["taskId"]
        over = task("failed", error=ERRORS[0]) if id == "bad" else DONE
        return {**over, "taskId": id}

    async with (
        Server(got, created=created) as server,
        client_to(server) as client,
        client.batch() as batch,
    ):
        entries = {name: batch.call_tool(name) for name in ("plain", "good", "bad")}
    assert [entries[name].result().text for name in ("plain", "good")] == ["at once", "done"]
    assert isinstance(entries["bad"].error, InternalError) and not entries["bad"].ok


async def test_batch_entry_is_not_settled_while_its_task_runs() -> None:
    held = asyncio.Event()

    async def got(message: Any) -> Reply:
        await held.wait()
        return result(message, DONE)

    async with Server(got) as server, client_to(server) as client:
        batch = client.batch()
        entry = batch.call_tool("t")
        leaving = asyncio.create_task(batch.__aexit__(None))
        await until(lambda: "tasks/get" in server.methods())
        assert not entry.is_settled and not entry.ok
        held.set()
        await leaving
        assert entry.ok and entry.result().text == "done"


# --- without tasks --------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["connect", "call"])
async def test_client_that_does_not_want_tasks_does_not_declare_them(where: str) -> None:
    options: Any = {"tasks": False}
    async with (
        Server(DONE, created=text("done")) as server,
        client_to(server, **(options if where == "connect" else {})) as client,
    ):
        called = await client.call_tool("t", **(options if where == "call" else {}))
    declared = server.sent("tools/call")[0]["_meta"][f"{META}clientCapabilities"]
    assert called.text == "done" and declared == {}


@pytest.mark.parametrize("where", ["connect", "call"])
async def test_task_that_was_not_agreed_to_is_an_invalid_answer(where: str) -> None:
    options: Any = {"tasks": False}
    async with (
        Server(DONE) as server,
        client_to(server, **(options if where == "connect" else {})) as client,
    ):
        with pytest.raises(BadAnswer, match="unknown type 'task'"):
            await client.call_tool("t", **(options if where == "call" else {}))
    assert "tasks/get" not in server.methods()


@pytest.mark.parametrize("call", ["list_tools", "get_prompt", "read_resource"])
async def test_task_instead_of_another_result_is_an_invalid_answer(call: str) -> None:
    async with Server(DONE) as server, client_to(server) as client:
        with pytest.raises(BadAnswer, match="unknown type 'task'"):
            await getattr(client, call)(*([] if call == "list_tools" else ["x://y"]))


async def test_tasks_do_not_exist_at_older_revisions() -> None:
    answer = lambda message, _: result(message, text("done"))  # noqa: E731
    async with Scripted(older(answer, R4)) as server, client_to(server) as client:
        assert (await client.call_tool("t")).text == "done"
        started = await client.start_tool("t")
        assert (started.id, started.status, (await started).text) == (None, "completed", "done")
        with pytest.raises(UsageError, match="no tasks"):
            client.task(ID)
    (greeting,) = [one.body["params"] for one in server.seen if one.method == "initialize"]
    assert greeting["capabilities"] == {}


async def test_extension_is_declared_in_one_way() -> None:
    with pytest.raises(UsageError, match="not for extensions="):
        async with client_of("http://127.0.0.1:9/mcp", extensions={TASKS: {}}):
            raise AssertionError


# --- started, and picked up again -----------------------------------------------------------------


async def test_started_tool_is_a_task() -> None:
    states = [task(statusMessage="half"), task(statusMessage="half"), asking("a"), DONE]
    async with Server(*states) as server, client_to(server, elicit=Asked()) as client:
        started = await client.start_tool("t", {"a": 1})
        assert (started.id, started.status, started.message, started.is_over) == (
            ID,
            "working",
            None,
            False,
        )
        assert server.methods() == ["server/discover", "tools/call"]
        seen = [(state.status, state.message) async for state in started]
        assert seen == [
            ("working", None),
            ("working", "half"),
            ("input_required", None),
            ("completed", None),
        ]
        assert started.is_over and (await started).text == (await started).text == "done"
        assert (await started.refresh()).created == TIMES["createdAt"]
        assert [state.status async for state in started] == ["completed"]
        await started.cancel()
    assert server.methods().count("tasks/get") == 4 and "tasks/cancel" not in server.methods()


async def test_tool_that_is_answered_at_once_is_a_task_that_is_over() -> None:
    async with (
        Server(DONE, created={"structuredContent": 7, "content": []}) as server,
        client_to(server) as client,
    ):
        started = await client.start_tool("t", type=int)
        assert (started.id, started.status, started.is_over) == (None, "completed", True)
        assert await started == 7 and [state.status async for state in started] == ["completed"]
        await started.cancel()
        assert (await started.refresh()).status == "completed"
    assert server.methods() == ["server/discover", "tools/call"]


@pytest.mark.parametrize(
    ("created", "error"),
    [
        (lambda message: refusal(message, -32601), MethodNotFound),
        ({**text("broke"), "isError": True}, ToolError),
        (Reply(status=401), Refused),
        ({**CREATED, "status": "odd"}, BadAnswer),
    ],
)
async def test_tool_that_is_not_started_raises_at_once(
    created: Any, error: type[Exception]
) -> None:
    async with Server(DONE, created=created) as server, client_to(server) as client:
        with pytest.raises(error):
            await client.start_tool("t")


async def test_task_may_finish_although_it_was_cancelled_on_demand() -> None:
    async with Server(task(), CANCELLED) as server, client_to(server) as client:
        started = await client.start_tool("t")
        await started.cancel()
        assert (await started.refresh()).status == "working"
        with pytest.raises(TaskCancelled, match=ID) as caught:
            await started
        assert caught.value.ran == "unknown" and started.status == "cancelled"
    async with Server(DONE) as server, client_to(server) as client:
        started = await client.start_tool("t")
        await started.cancel()
        assert (await started).text == "done"


async def test_task_is_picked_up_by_its_id() -> None:
    async with Server(task(statusMessage="half"), DONE) as server, client_to(server) as client:
        picked = client.task(ID)
        assert (picked.id, picked.status, picked.is_over) == (ID, None, False)
        times = TIMES["createdAt"], TIMES["lastUpdatedAt"]
        assert await picked.refresh() == TaskState(ID, "working", "half", *times, ttl_ms=60_000)
        assert (await picked).text == "done"
    given = task("completed", result={"structuredContent": {"a": 1}, "content": []})
    async with Server(given) as server, client_to(server) as client:
        assert await client.task(ID, type=dict[str, int]) == {"a": 1}


@pytest.mark.parametrize("id", ["", "x" * 4097])
async def test_task_id_that_is_impossible_is_a_usage_error(id: str) -> None:
    async with Server(DONE) as server, client_to(server) as client:
        with pytest.raises(UsageError, match="1 to 4096 characters"):
            client.task(id)


async def test_task_that_the_server_does_not_know_is_gone() -> None:
    gone = lambda message: refusal(message, -32602, "Task not found")  # noqa: E731
    on = {"tasks/cancel": gone, "tasks/update": gone}
    async with Server(task(), gone, **on) as server, client_to(server, elicit=Asked()) as client:
        with pytest.raises(TaskGone, match="Task not found") as caught:
            await client.call_tool("t")
        assert caught.value.ran == "unknown"
        assert "tasks/cancel" not in server.methods()
        for ask in (client.task(ID).refresh(), client.task(ID).cancel(), client.task(ID).result()):
            with pytest.raises(TaskGone):
                await ask
    async with (
        Server(asking("a"), gone, **on) as server,
        client_to(server, elicit=Asked()) as client,
    ):
        with pytest.raises(TaskGone):
            await client.call_tool("t")


CHILD = """
import asyncio, sys
from wirecall import connect

async def main():
    async with connect(sys.argv[1], protocol="mcp") as client:
        task = await client.start_tool("t")
        print(task.id, flush=True)
        await task

asyncio.run(main())
"""


async def test_task_of_a_killed_client_is_picked_up_by_another_process() -> None:
    is_over = asyncio.Event()
    states = lambda _message: DONE if is_over.is_set() else task(pollIntervalMs=1)  # noqa: E731
    async with Server(states) as server:
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CHILD, server.url, stdout=pipe
        )
        assert child.stdout is not None
        id = (await child.stdout.readline()).decode().strip()
        await until(lambda: "tasks/get" in server.methods())
        os.kill(child.pid, signal.SIGKILL)
        await child.communicate()
        is_over.set()
        async with client_to(server) as client:
            assert (await client.task(id)).text == "done"
    assert server.methods().count("tools/call") == 1 and "tasks/cancel" not in server.methods()


# --- leaving --------------------------------------------------------------------------------------


async def test_call_whose_time_is_over_cancels_its_task() -> None:
    clock = FakeClock()
    async with Server(task()) as server, client_to(server, clock=clock) as client:
        with pytest.raises(TimedOut, match="was not over within 5 s") as caught:
            await client.call_tool("t", timeout=5)
        assert caught.value.ran == "unknown" and clock.now == pytest.approx(5)
        await until(lambda: "tasks/cancel" in server.methods())
    assert (
        server.sent("tasks/cancel")[0]["taskId"] == ID and server.methods().count("tasks/get") == 4
    )


async def test_call_that_is_cancelled_cancels_its_task_before_the_client_is_closed() -> None:
    clock = Still()
    async with Server(task()) as server:
        async with client_to(server, clock=clock) as client:
            calling = asyncio.create_task(client.call_tool("t"))
            await until(lambda: clock.slept)
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
        assert server.methods()[-1] == "tasks/cancel"


async def test_started_task_continues_without_its_caller() -> None:
    clock = Still()
    async with Server(task()) as server, client_to(server, clock=clock) as client:
        started = await client.start_tool("t")
        waiting = asyncio.create_task(started.result())
        await until(lambda: clock.slept)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        async for _state in started:
            break
    assert "tasks/cancel" not in server.methods()


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
async def test_task_timeout_must_be_above_zero(timeout: float) -> None:
    async with Server(task()) as server, client_to(server) as client:
        with pytest.raises(UsageError, match="timeout must be greater than 0"):
            await client.task(ID).result(timeout)


# --- questions ------------------------------------------------------------------------------------


async def test_task_asks_each_question_once() -> None:
    user = Asked()
    states = [asking("a", "b"), asking("a", "b"), asking("b"), task(), asking("c", "a"), DONE]
    async with Server(*states) as server, client_to(server, elicit=user) as client:
        assert (await client.call_tool("t")).text == "done"
    assert user.messages == ["a", "b", "c"] and answers(server) == [
        {"a": "a!", "b": "b!"},
        {"c": "c!"},
    ]
    assert server.sent("tasks/update")[0]["inputResponses"]["a"] == {
        "action": "accept",
        "content": {"name": "a!"},
    }


async def test_task_passes_all_kinds_of_questions_to_the_host() -> None:
    sampling = {"method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 1}}
    asked = {"s": sampling, "r": {"method": "roots/list"}, "e": question("a")}
    state = task("input_required", inputRequests=asked)
    handlers: dict[str, Any] = {
        "sample": lambda _: "yes",
        "roots": ["file:///x"],
        "elicit": lambda _: None,
    }
    async with Server(state, DONE) as server, client_to(server, **handlers) as client:
        await client.call_tool("t")
    given = server.sent("tasks/update")[0]["inputResponses"]
    assert given["s"]["content"]["text"] == "yes" and given["r"] == {
        "roots": [{"uri": "file:///x"}]
    }
    assert given["e"] == {"action": "decline"}


async def test_answer_that_is_lost_is_sent_again_without_asking_twice() -> None:
    user = Asked()
    lost = [Reply(status=503)] * 5
    update = {"tasks/update": lambda _message: lost.pop() if lost else {}}
    async with (
        Server(*[asking("a")] * 4, DONE, **update) as server,
        client_to(server, elicit=user) as client,
    ):
        assert (await client.call_tool("t", timeout=600)).text == "done"
    assert user.messages == ["a"] and answers(server) == [{"a": "a!"}] * 6


async def test_answer_that_the_server_refuses_is_the_error_of_the_call() -> None:
    invalid = {"type": "input_invalid", "reason": "name: expected a number", "ran": "no"}
    update = {"tasks/update": lambda message: refusal(message, -32602, "Invalid params", invalid)}
    async with Server(asking("a"), **update) as server, client_to(server, elicit=Asked()) as client:
        with pytest.raises(BadInput, match="expected a number") as caught:
            await client.call_tool("t")
        assert caught.value.ran == "unknown"
        await until(lambda: "tasks/cancel" in server.methods())


@pytest.mark.parametrize("handlers", [{}, {"elicit": lambda _form: 1 / 0}])
async def test_question_that_the_client_cannot_answer_ends_the_call(handlers: Any) -> None:
    async with Server(asking("a")) as server, client_to(server, **handlers) as client:
        with pytest.raises(BadAnswer, match="cannot answer"):
            await client.call_tool("t")
        await until(lambda: "tasks/cancel" in server.methods())
    assert "tasks/update" not in server.methods()


async def test_question_that_was_not_answered_is_asked_by_the_next_waiter() -> None:
    user = Asked()
    held = asyncio.Event()

    async def hesitates(form: Form) -> dict[str, str]:
        user(form)
        await held.wait()
        return {"name": "late"}

    async with (
        Server(asking("a"), asking("a"), DONE) as server,
        client_to(server, elicit=hesitates) as client,
    ):
        started = await client.start_tool("t")
        waiting = asyncio.create_task(started.result())
        await until(lambda: user.messages)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        held.set()
        assert (await started).text == "done"
    assert user.messages == ["a", "a"] and answers(server) == [{"a": "late"}]


async def test_question_is_asked_once_for_two_waiters() -> None:
    user = Asked()
    held = asyncio.Event()

    async def slow(form: Form) -> dict[str, str]:
        user(form)
        await held.wait()
        return {"name": "Ann"}

    def states(_message: Any) -> Any:
        if server.methods().count("tasks/get") > 3:
            held.set()
        return DONE if "tasks/update" in server.methods() else asking("a")

    async with Server(states) as server, client_to(server, elicit=slow) as client:
        started = await client.start_tool("t")
        both = await asyncio.gather(started.result(), started.result())
    assert [one.text for one in both] == ["done", "done"]
    assert user.messages == ["a"] and answers(server) == [{"a": "Ann"}]


async def test_timeout_does_not_count_the_time_of_a_person() -> None:
    clock = FakeClock()

    def ponders(_form: Form) -> dict[str, str]:
        clock.now += 3600
        return {"name": "Ann"}

    async with (
        Server(asking("a"), task(), DONE) as server,
        client_to(server, clock=clock, elicit=ponders) as client,
    ):
        assert (await client.call_tool("t", timeout=5)).text == "done"


async def test_task_that_never_stops_asking_is_given_up() -> None:
    asked = iter(range(1000))
    states = lambda _message: asking(f"q{next(asked)}")  # noqa: E731
    async with Server(states) as server, client_to(server, elicit=Asked()) as client:
        with pytest.raises(BadAnswer, match="still asks after 16 rounds"):
            await client.call_tool("t")
        await until(lambda: "tasks/cancel" in server.methods())
    assert len(answers(server)) == 16


# --- without an event loop ------------------------------------------------------------------------


async def in_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(pool, work), 60)


async def test_scripts_have_the_same_methods() -> None:
    def script() -> None:
        with connect_sync(server.url, protocol="mcp", clock=FakeClock(), elicit=Asked()) as client:
            assert client.call_tool("t").text == "done"
            started = client.start_tool("t", type=str)
            assert (started.id, started.status, started.message, started.is_over) == (
                ID,
                "working",
                None,
                False,
            )
            assert [state.status for state in started] == ["working", "input_required", "completed"]
            assert started.is_over and started.result() == "done"

    states = iter([DONE, asking("a"), DONE])
    async with Server(lambda _message: next(states)) as server:
        await in_thread(script)


async def test_script_picks_a_task_up_and_stops_waiting_for_it() -> None:
    def script() -> None:
        with connect_sync(server.url, protocol="mcp", clock=FakeClock()) as client:
            picked = client.task(ID)
            assert picked.refresh().status == "working"
            for state in picked:
                assert state.status == "working"
                break
            with pytest.raises(TimedOut):
                picked.result(timeout=5)
            picked.cancel()

    async with Server(task()) as server:
        await in_thread(script)
    assert server.methods().count("tasks/cancel") == 1


async def test_script_that_leaves_a_loop_over_states_leaves_nothing_behind() -> None:
    def script() -> None:
        client = connect_sync(server.url, protocol="mcp")
        states = iter(client.task(ID))
        assert next(states).status == "working"
        client.close()
        with pytest.raises(NotSent):
            next(states)

    async with Server(task()) as server:
        await in_thread(script)


async def test_task_questions_are_those_that_it_waits_for() -> None:
    async with Server(asking("a", "b"), task()) as server, client_to(server) as client:
        started = client.task(ID)
        assert started.questions == {}
        await started.refresh()
        assert {key: asked.method for key, asked in started.questions.items()} == dict.fromkeys(
            "ab", "elicitation/create"
        )
        await started.refresh()
        assert started.questions == {}
