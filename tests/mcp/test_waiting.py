"""Calls that wait for their client do not block other callers, have their own limits, and end with
it.
"""

import asyncio
import gc
from collections.abc import Mapping
from typing import Any

import pytest

from tests.calls import make_app
from tests.mcp.asgi import (
    KEY,
    PATIENCE,
    R1,
    R3,
    R4,
    Exchange,
    HttpClient,
    LineClient,
    over_http,
    over_stdio,
)
from wirecall import App, Context, Limits, ToolAnnotations
from wirecall.errors import NotCapable
from wirecall.mcp.server import streams

READS = ToolAnnotations(readOnlyHint=True)
CAPABLE: dict[str, Any] = {"sampling": {}, "elicitation": {}, "roots": {}}
THOUGHT = {"role": "assistant", "model": "m-1", "content": {"type": "text", "text": "deep"}}


def who(headers: Mapping[str, str]) -> str | None:
    return headers.get("authorization")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the server write often: it notices that a reader has left when it writes."""
    monkeypatch.setattr(streams, "KEEP_ALIVE", 0.01)


class Desk:
    """A tool and a command that ask, and a tool that does not.

    `ended` says why waits ended unanswered.
    """

    def __init__(self, **limits: Any) -> None:
        self.app = make_app(limits=Limits(**limits), authenticate=who)
        self.ended: asyncio.Queue[str] = asyncio.Queue()

        @self.app.tool(annotations=READS)
        async def think(ctx: Context) -> str:
            return await self.asked(ctx)

        @self.app.tool(annotations=READS)
        async def think_twice(ctx: Context) -> str:
            try:
                first, second = await ctx.ask(ctx.sample("First?"), ctx.sample("Second?"))
                return f"{first.text} {second.text}"
            finally:
                self.ended.put_nowait("both")

        @self.app.command
        async def decide(ctx: Context) -> str:
            return await self.asked(ctx)

        @self.app.tool(annotations=READS)
        async def plain() -> str:
            await asyncio.sleep(0)
            return "plain"

    async def asked(self, ctx: Context) -> str:
        try:
            return (await ctx.sample("Well?")).text
        except NotCapable as error:
            self.ended.put_nowait(error.data["reason"])
            raise

    async def why(self) -> str:
        async with asyncio.timeout(PATIENCE):
            return await self.ended.get()


async def asks(
    client: HttpClient, id: int, tool: str = "think", **more: Any
) -> tuple[Exchange, Any]:
    """A call that waits, and its question."""
    exchange = client.post(client.message("tools/call", {"name": tool}, f"asking-{id}", **more))
    return exchange, await exchange.message()


async def settles(client: HttpClient, exchange: Exchange, question: Any) -> Any:
    await client.post({"jsonrpc": "2.0", "id": question["id"], "result": THOUGHT}).started()
    return (await exchange.message())["result"]["content"][0]["text"]


def ann(app: App, revision: str = R4) -> Any:
    return over_http(app, revision, capabilities=CAPABLE, headers={"authorization": "ann"})


async def another(client: HttpClient, name: str) -> HttpClient:
    other = HttpClient(client.asgi, R4, CAPABLE, headers={"authorization": name})
    await other.open()
    return other


@pytest.mark.parametrize("revision", [R1, R3, R4])
async def test_call_that_waits_for_its_client_does_not_count_as_in_flight(revision: str) -> None:
    desk = Desk(in_flight=2, waiting_per_session=20)
    async with ann(desk.app, revision) as client:
        open_ones = [await asks(client, number) for number in range(20)]
        bob = await another(client, "bob")
        assert (await bob.tool("plain"))["content"][0]["text"] == "plain"
        for exchange, question in open_ones:
            assert await settles(client, exchange, question) == "deep"
        assert (await bob.tool("plain"))["content"][0]["text"] == "plain"


async def test_calls_abandoned_after_their_question_do_not_block_other_callers() -> None:
    """1,100 of them used to answer every other caller with 42910 for up to an hour."""
    desk = Desk(in_flight=8)
    async with ann(desk.app) as client:
        for number in range(40):
            exchange = client.post(
                client.message("tools/call", {"name": "think"}, f"asking-{number}")
            )
            # Then there are too many of them.
            assert await exchange.messages() if number >= 32 else await exchange.message()
            await exchange.close()
        bob = await another(client, "bob")
        assert (await bob.tool("plain"))["content"][0]["text"] == "plain"
        _, question = await asks(bob, 1)
        assert question["method"] == "sampling/createMessage"


async def test_waiting_calls_per_session_are_limited() -> None:
    desk = Desk(waiting_per_session=2, waiting_per_caller=100)
    async with ann(desk.app) as client:
        first = await asks(client, 1)
        await asks(client, 2)
        error = await client.tool_error("think")
        assert (error["code"], error["data"]["limit"], error["data"]["max"]) == (
            42910,
            "waiting_per_session",
            2,
        )
        assert error["data"]["ran"] == "no" and error["data"]["retry_after_ms"] > 0
        assert (await client.tool("plain"))["content"][0]["text"] == "plain"
        again = await another(client, "ann")
        await asks(again, 1)  # another session of the same caller
        assert await settles(client, *first) == "deep"
        await asks(client, 4)


async def test_waiting_calls_per_caller_are_limited_over_all_sessions() -> None:
    desk = Desk(waiting_per_session=2, waiting_per_caller=3)
    async with ann(desk.app) as client:
        sessions = [client, await another(client, "ann")]
        open_ones = [await asks(sessions[number % 2], number) for number in range(3)]
        error = await sessions[1].tool_error("think")
        assert (error["code"], error["data"]["limit"], error["data"]["max"]) == (
            42910,
            "waiting_per_caller",
            3,
        )
        await asks(await another(client, "bob"), 1)
        assert await settles(client, *open_ones[0]) == "deep"
        await asks(sessions[1], 10)


async def test_waiting_call_with_several_questions_counts_once() -> None:
    desk = Desk(waiting_per_session=1)
    async with ann(desk.app) as client:
        exchange, first = await asks(client, 1, "think_twice")
        second = await exchange.message()
        for question in (first, second):
            await client.post({"jsonrpc": "2.0", "id": question["id"], "result": THOUGHT}).started()
        assert (await exchange.message())["result"]["content"][0]["text"] == "deep deep"


@pytest.mark.parametrize("revision", [R1, R3, R4])
async def test_waiting_call_whose_tasks_ask_counts_once(revision: str) -> None:
    """Each task used to release the call's one place in flight, so others could take more than
    there are.
    """
    app = make_app(limits=Limits(in_flight=2, waiting_per_session=1))
    entered = asyncio.Semaphore(0)
    gate = asyncio.Event()

    @app.tool(annotations=READS)
    async def think(ctx: Context) -> str:
        said = await asyncio.gather(*(ctx.sample(f"{number}?") for number in range(3)))
        return " ".join(each.text for each in said)

    @app.tool(annotations=READS)
    async def wait() -> str:
        entered.release()
        await gate.wait()
        return "waited"

    async with over_http(app, revision, capabilities=CAPABLE) as client:
        exchange = client.post(client.message("tools/call", {"name": "think"}))
        questions = [await exchange.message() for _ in range(3)]
        waiting = [client.post(client.message("tools/call", {"name": "wait"})) for _ in range(2)]
        async with asyncio.timeout(PATIENCE):
            for _ in waiting:
                await entered.acquire()
        assert "42910" in str(await client.call("tools/call", {"name": "wait"}))
        for question in questions[1:]:
            await client.post({"jsonrpc": "2.0", "id": question["id"], "result": THOUGHT}).started()
        assert await settles(client, exchange, questions[0]) == "deep deep deep"
        assert "42910" in str(await client.call("tools/call", {"name": "wait"}))
        gate.set()
        for each in waiting:
            assert "waited" in str(await each.messages())


async def test_command_that_may_not_wait_has_not_run() -> None:
    desk = Desk(waiting_per_session=1)
    async with ann(desk.app) as client:
        first = await asks(client, 1)
        meta = {KEY: "k"}
        error = await client.tool_error("decide", meta=meta)
        assert (error["code"], error["data"]["ran"]) == (42910, "no")
        assert await settles(client, *first) == "deep"
        assert await settles(client, *await asks(client, 2, "decide", meta=meta)) == "deep"


# --- the end of a wait ----------------------------------------------------------------------------


@pytest.mark.parametrize("revision", [R1, R3, R4])
async def test_wait_ends_when_its_client_stays_away(revision: str) -> None:
    desk = Desk(away_time=1.0)
    async with ann(desk.app, revision) as client:
        exchange, _ = await asks(client, 1)
        await exchange.close()
        assert await desk.why() == "the client has left without an answer"


async def test_client_that_comes_back_may_still_answer() -> None:
    """Until 2025-11-25 a disconnect is not a cancellation: the client resumes where it was cut off."""
    desk = Desk()
    async with ann(desk.app) as client:
        cut = client.post(client.message("tools/call", {"name": "think"}, 1))
        primer = await cut.event()
        asked = await cut.event()
        assert primer is not None and asked is not None
        await cut.close()
        back = client.listen(primer.id)
        assert await settles(client, back, await back.message()) == "deep"


async def test_client_that_reads_has_not_left() -> None:
    desk = Desk(away_time=1.0)
    async with ann(desk.app) as client:
        cut = client.post(client.message("tools/call", {"name": "think"}, 1))
        primer = await cut.event()
        asked = await cut.event()
        assert primer is not None and asked is not None
        back = client.listen(primer.id)
        question = await back.message()
        await cut.close()
        other, _ = await asks(client, 2)
        await other.close()
        await desk.why()  # a client that left later has stayed away for long enough by now
        assert await settles(client, back, question) == "deep"


async def test_wait_ends_with_its_session() -> None:
    desk = Desk()
    async with ann(desk.app) as client:
        await asks(client, 1)
        await client.exchange("DELETE").started()
        assert await desk.why() == "the client has left without an answer"


# Python closes the coroutines of a loop that is closed, and they can no longer cancel tasks there.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_question_is_not_reported_as_lost_when_the_loop_ends_with_its_session() -> None:
    """A loop that stops at the same moment never resumes the call, so no code can retrieve the
    exception.
    """
    reports: list[str] = []
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _, context: reports.append(context["message"]))

    async def ask_and_leave() -> None:
        client = HttpClient(Desk().app.asgi(), R4, CAPABLE, headers={"authorization": "ann"})
        await client.open()
        await asks(client, 1)
        client.exchange("DELETE").task.add_done_callback(lambda _: loop.stop())

    leaving = loop.create_task(ask_and_leave())
    loop.run_forever()
    assert leaving.done() and leaving.exception() is None
    loop.close()
    gc.collect()
    assert not [report for report in reports if "never retrieved" in report]


async def test_wait_ends_with_its_connection() -> None:
    desk = Desk()
    async with over_stdio(desk.app, R4, capabilities=CAPABLE) as client:
        client.write(client.message("tools/call", {"name": "think"}, 1))
        await client.hear()
        client.hang_up()
        assert await desk.why() == "the client has left without an answer"


async def test_wait_ends_when_its_call_is_cancelled() -> None:
    """A command without a commit point continues when its caller cancels, but stops waiting for an
    answer.
    """
    desk = Desk(waiting_per_session=1)
    async with ann(desk.app) as client:
        await asks(client, 1, "decide", meta={KEY: "k"})
        await client.notify("notifications/cancelled", {"requestId": "asking-1"})
        assert await desk.why() == "the client has left without an answer"
        await asks(client, 2)


async def test_wait_ends_after_the_answer_time() -> None:
    desk = Desk(answer_time=1.0)
    async with over_stdio(desk.app, R4, capabilities=CAPABLE) as client:
        found = await client.tool("think")
        assert found["isError"] is True
        assert await desk.why() == "the client has not answered within 1 s"


async def test_refused_question_ends_the_wait_for_the_others() -> None:
    desk = Desk(waiting_per_session=1)
    async with over_stdio(desk.app, R4, capabilities=CAPABLE) as client:
        assert isinstance(client, LineClient)
        client.write(client.message("tools/call", {"name": "think_twice"}, 1))
        first, _ = [await client.hear() for _ in range(2)]
        client.write({"jsonrpc": "2.0", "id": first["id"], "error": {"code": -1, "message": "no"}})
        await client.line()
        client.write(client.message("tools/call", {"name": "think"}, 2))
        assert (await client.hear())["method"] == "sampling/createMessage"
