"""The server's memory is bounded, and one client cannot touch the state of another."""

import asyncio
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any

import pytest
from msgspec import Raw

from tests.calls import make_app
from tests.clock import LoopClock
from tests.mcp.asgi import (
    KEY,
    LEGACY,
    PATIENCE,
    R2,
    R4,
    REVISIONS,
    Exchange,
    HttpClient,
    over_http,
    over_stdio,
    request,
    response,
)
from tests.mcp.lab import FORM, READS
from wirecall import App, Context, Limits
from wirecall.errors import HeaderMismatch
from wirecall.mcp.headers import check_marked
from wirecall.mcp.server import changes, sessions, streams
from wirecall.transports.headers import Headers
from wirecall.transports.request import HttpRequest


@asynccontextmanager
async def asking(
    app: App, capabilities: Any = None
) -> AsyncIterator[tuple[HttpClient, Exchange, Any]]:
    """A client of 2025-11-25 with a call that waits for its answer."""

    @app.tool
    async def ask(ctx: Context) -> str:
        answer = await ctx.elicit("Who?", FORM)
        return f"hello {answer.content['name']}"

    async with over_http(app, R4, capabilities=capabilities or {"elicitation": {}}) as client:
        waiting = client.post(client.message("tools/call", {"name": "ask"}, 7))
        yield client, waiting, await waiting.message()


async def test_session_that_waits_is_not_cut_off_by_many_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 5)
    async with asking(make_app()) as (client, waiting, question):
        listening = await client.listen().started()
        await listening._part()
        for _ in range(20):
            other = HttpClient(client.asgi, R4)
            await other.open()
            await other.close()
        taken = await client.post(
            response(question["id"], {"action": "accept", "content": {"name": "Ann"}})
        ).started()
        assert taken.status == 202
        assert (await waiting.message())["result"]["content"][0]["text"] == "hello Ann"
        endpoint = client.asgi.routes["/mcp"]  # type: ignore[attr-defined]
        assert len(endpoint.sessions) == 5


async def test_stream_that_cannot_be_opened_does_not_end_another() -> None:
    app = make_app(limits=Limits(streams=1))
    app.query(name="look")(lambda: "seen")
    async with over_http(app, R4) as client:
        first = await client.listen().started()
        assert (await client.listen().started()).status == 503
        app.changed("tools")
        assert (await first.message())["method"] == "notifications/tools/list_changed"


async def test_session_end_ends_its_questions() -> None:
    async with asking(make_app()) as (client, waiting, _):
        assert (await client.exchange("DELETE").started()).status == 204
        assert (await waiting.message())["result"]["isError"] is True


async def test_question_that_is_never_answered_ends() -> None:
    async with asking(make_app(limits=Limits(answer_time=1))) as (_, waiting, _question):
        assert (await waiting.message())["result"]["isError"] is True


@asynccontextmanager
async def traced() -> AsyncIterator[None]:
    """Count the memory that Python allocates inside the block."""
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


async def test_finished_streams_hold_bounded_memory() -> None:
    app = make_app(limits=Limits(resume_bytes=50_000))

    @app.tool(annotations=READS)
    async def tell(ctx: Context) -> str:
        await ctx.log("error", "x" * 9000)
        return "told"

    async with over_http(app, R4) as client:
        ids = []
        for number in range(10):
            exchange = client.post(client.message("tools/call", {"name": "tell"}, number))
            ids.append((await exchange.events())[0].id)
        endpoint = client.asgi.routes["/mcp"]  # type: ignore[attr-defined]
        assert endpoint.store.size <= 50_000
        assert (await client.listen(ids[0]).started()).status == 400
        again = await client.listen(ids[-1]).started()
        assert [message.get("id") for message in await again.messages()] == [None, 9]


def tell_much(app: App) -> None:
    @app.tool(annotations=READS)
    async def tell(ctx: Context) -> str:
        await ctx.log("error", "x" * 9000)
        return "told"


async def finish(client: HttpClient, number: int) -> str | None:
    """Run a call to its end, and return the id of its first event."""
    events = await client.post(client.message("tools/call", {"name": "tell"}, number)).events()
    return events[0].id


async def test_stream_store_limits_the_bytes_of_each_caller_over_all_its_sessions() -> None:
    limits = Limits(resume_bytes_per_caller=30_000)
    app = make_app(limits=limits, authenticate=lambda headers: headers.get("x-name"))
    tell_much(app)
    asgi = app.asgi()
    async with AsyncExitStack() as stack:

        async def enter(name: str) -> HttpClient:
            client = HttpClient(asgi, R4, headers={"x-name": name})
            stack.push_async_callback(client.close)
            await client.open()
            return client

        bob = await enter("bob")
        kept = await finish(bob, 1)
        sessions = [await enter("ann") for _ in range(6)]
        ids = [await finish(ann, 1) for ann in sessions]
        store = asgi.routes["/mcp"].store  # type: ignore[attr-defined]
        assert store.held["ann"] <= 30_000
        assert store.size == sum(store.held.values())
        assert (await sessions[0].listen(ids[0]).started()).status == 400
        assert (await sessions[-1].listen(ids[-1]).started()).status == 200
        assert (await bob.listen(kept).started()).status == 200


async def test_stream_store_drops_streams_when_their_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = make_app(limits=Limits(resume_time=60))
    tell_much(app)
    async with over_http(app, R4) as client:
        clock = LoopClock(monkeypatch)
        first = await finish(client, 1)
        clock.advance(40)
        second = await finish(client, 2)
        store = client.asgi.routes["/mcp"].store  # type: ignore[attr-defined]
        assert store.size > 18_000
        clock.advance(30)
        await turns()
        assert store.size < 18_000
        assert (await client.listen(first).started()).status == 400
        assert (await client.listen(second).started()).status == 200
        clock.advance(200)
        await turns()
        assert store.size == 0
        assert store.held == {}
        assert (await client.listen(second).started()).status == 400


async def turns() -> None:
    """Let due timers fire."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("revision", LEGACY)
async def test_unread_events_are_limited_by_bytes_not_by_number(revision: str) -> None:
    """Limits.unread_bytes: however large an event is, the call waits once its client is that far
    behind.
    """
    app = make_app(limits=Limits(unread_bytes=50_000))
    told = list[int]()

    @app.tool(annotations=READS)
    async def tell(ctx: Context) -> str:
        for number in range(30):
            told.append(number)
            await ctx.log("error", "x" * 9000)
        return "told"

    async with over_http(app, revision) as client:
        exchange = client.post(client.message("tools/call", {"name": "tell"}, 7))
        exchange.reads.clear()
        await exchange.started()
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(told) == 6  # five events are within the limit, the sixth is beyond it
        exchange.reads.set()
        answers = [message for message in await exchange.messages() if "id" in message]
    assert (answers[0]["result"]["content"][0]["text"], len(told)) == ("told", 30)


@pytest.mark.parametrize("revision", LEGACY)
async def test_unread_events_that_are_small_wait_for_their_reader(revision: str) -> None:
    """An event costs more than its text, and the server keeps each until its reader has it."""
    app = make_app()

    @app.tool(annotations=READS)
    async def tell(ctx: Context) -> str:
        for number in range(5000):
            await ctx.log("error", number)
        return "told"

    async with over_http(app, revision) as client:
        exchange = client.post(client.message("tools/call", {"name": "tell"}, 7))
        exchange.reads.clear()
        await exchange.started()
        for _ in range(100):
            await asyncio.sleep(0)
        exchange.reads.set()
        messages = await exchange.messages()
    assert [message["params"]["data"] for message in messages if "params" in message] == list(
        range(5000)
    )


async def test_calls_without_a_reader_hold_no_more_than_all_streams_may() -> None:
    limits = Limits(resume_bytes=1_000_000)
    app = make_app(limits=limits)
    left = asyncio.Semaphore(0)
    gate = asyncio.Event()
    told = asyncio.Semaphore(0)

    @app.tool(annotations=READS)
    async def tell(ctx: Context) -> str:
        await ctx.log("error", "first")
        await left.acquire()
        for _ in range(20):
            await ctx.log("error", "x" * 90_000)
            await asyncio.sleep(0)
        told.release()
        await gate.wait()
        return "told"

    async with over_http(app, R4) as client, traced():
        before = tracemalloc.get_traced_memory()[0]
        for number in range(5):
            exchange = client.post(client.message("tools/call", {"name": "tell"}, number))
            await exchange.event()
            exchange.leave()
            left.release()
            async with asyncio.timeout(PATIENCE):
                await told.acquire()
        held = tracemalloc.get_traced_memory()[0] - before
        gate.set()
    # The newest event of each call stays, and some is not about events.
    assert held < 1_000_000 + 5 * 100_000 + 500_000


async def test_call_that_outlives_its_client_does_not_keep_the_http_request() -> None:
    """This holds while it runs, and also when its events are kept for a reader that comes back."""
    app = make_app()
    left = asyncio.Event()
    gate = asyncio.Event()

    @app.tool(annotations=READS)
    async def tell(ctx: Context) -> str:
        await ctx.log("error", "first")
        await left.wait()
        await ctx.log("error", "second")
        await gate.wait()
        return "told"

    def requests() -> int:
        gc.collect()
        return sum(isinstance(each, HttpRequest) for each in gc.get_objects())

    before = requests()
    async with over_http(app, R4) as client:
        exchange = client.post(client.message("tools/call", {"name": "tell"}, 7))
        await exchange.event()
        first = await exchange.event()
        exchange.leave()
        left.set()
        async with asyncio.timeout(PATIENCE):
            await exchange.task
        assert requests() == before
        gate.set()
        rest = await client.listen(first.id if first else None).messages()
        assert [message.get("id") for message in rest] == [None, 7]
        assert requests() == before


@pytest.mark.parametrize("revision", REVISIONS)
async def test_progress_token_is_bounded(revision: str) -> None:
    app = make_app()

    @app.tool(annotations=READS)
    async def tell(ctx: Context) -> str:
        await ctx.progress(1)
        return "told"

    async with over_http(app, revision) as client:
        assert (await client.tool("tell", meta={"progressToken": "t" * 1024}))["content"][0][
            "text"
        ] == "told"
        error = await client.tool_error("tell", meta={"progressToken": "t" * 1025})
        assert error["code"] == -32602
        assert (
            "params._meta.progressToken: expected str of length <= 1024" in error["data"]["reason"]
        )
        long = await client.post(
            {**client.message("tools/call", {"name": "tell"}), "id": "i" * 4301}
        ).json()
        assert "id: longer than 4300 characters" in long["error"]["data"]["reason"]


@pytest.mark.parametrize("kind", ["callers", "sessions"])
async def test_streams_per_caller_leave_streams_to_other_callers(kind: str) -> None:
    """Limits.streams_per_caller counts the streams of a caller, and those of a session if callers
    have no names.
    """
    more: Any = (
        {"authenticate": lambda headers: headers.get("authorization")} if kind == "callers" else {}
    )
    app = make_app(limits=Limits(streams=3, streams_per_caller=2), **more)
    told = asyncio.Event()

    @app.tool(annotations=READS)
    async def tell(ctx: Context) -> str:
        await ctx.log("error", "told")
        await told.wait()
        return "told"

    async with (
        over_http(app, R4, headers={"authorization": "ann"}) as ann,
        over_http(app, R4, headers={"authorization": "bob"}) as bob,
    ):
        bob.asgi = ann.asgi  # one server, two clients
        await bob.open()
        held = [
            ann.post(ann.message("tools/call", {"name": "tell"}, number)) for number in range(2)
        ]
        for exchange in held:
            event = await exchange.event()
        assert (await ann.listen().started()).status == 503
        # A resumed stream counts, too.
        assert event is not None and (await ann.listen(event.id).started()).status == 503
        assert (await bob.listen().started()).status == 200
        told.set()
        for exchange in held:
            await exchange.messages()
        assert (await ann.listen().started()).status == 200


async def test_stream_cannot_be_resumed_from_events_that_it_has_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "MAX_BYTES", 50_000)
    app = make_app()

    @app.tool(annotations=READS)
    async def tell(ctx: Context) -> str:
        for _ in range(20):
            await ctx.log("error", "x" * 9000)
        return "told"

    async with over_http(app, R4) as client:
        exchange = client.post(client.message("tools/call", {"name": "tell"}, 7))
        events = await exchange.events()
        assert len([event for event in events if event.data]) == 21
        name = (events[0].id or "").partition(".")[0]
        for last in (
            events[1].id,
            f"{name}.{'9' * 5000}",
            f"{name}.999",
            f"{name}.-1",
            f"{name}.",
            name,
        ):
            assert (await client.listen(last).started()).status == 400
        rest = await client.listen(events[-2].id).started()
        assert [message["id"] for message in await rest.messages()] == [7]


@pytest.mark.parametrize("revision", LEGACY)
async def test_subscriptions_are_bounded(monkeypatch: pytest.MonkeyPatch, revision: str) -> None:
    monkeypatch.setattr(changes, "MAX_SUBSCRIPTIONS", 3)
    monkeypatch.setattr(changes, "MAX_SUBSCRIBED", 100)
    app = make_app()

    @app.resource("test://{name}")
    def thing(name: str) -> str:
        return name

    async with over_http(app, revision) as client:
        assert (await client.error("resources/subscribe", {"uri": f"test://{'x' * 100}"}))[
            "code"
        ] == -32600
        for name in ("a", "b", "c", "c"):
            assert await client.result("resources/subscribe", {"uri": f"test://{name}"}) == {}
        assert (await client.error("resources/subscribe", {"uri": "test://d"}))["code"] == -32600


async def test_subscriptions_are_bounded_over_all_sessions_of_a_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 4)
    app = make_app(
        limits=Limits(subscribed_bytes=4000), authenticate=lambda headers: headers.get("x-name")
    )

    @app.resource("test://{name}")
    def thing(name: str) -> str:
        return name

    def params(name: str) -> Any:
        return {"uri": f"test://{name * 1000}"}

    http = app.asgi()
    clients = [
        HttpClient(http, R4, headers={"x-name": name})
        for name in ("ann", "ann", "ann", "ann", "bob", "bob")
    ]
    one, two, three, four, other, another = clients
    for client in (one, two, three):
        await client.open()
        await client.result("resources/subscribe", params("a"))
        await client.result("resources/subscribe", params("a"))  # it counts once
    await four.open()
    error = await four.error("resources/subscribe", params("a"))
    assert (error["code"], error["data"]["limit"], error["data"]["ran"]) == (
        42910,
        "subscribed_bytes",
        "no",
    )
    assert "unsubscribe, or end a session" in error["message"]

    # A subscription no longer counts after a call ends it, or after its session ends.
    await one.result("resources/unsubscribe", params("a"))
    await one.result("resources/unsubscribe", params("a"))
    await four.result("resources/subscribe", params("b"))
    assert (await two.exchange("DELETE").started()).status == 204
    await one.result("resources/subscribe", params("b"))
    await three.error("resources/subscribe", params("c"))

    # Another caller has its own limit. A session of Bob displaces one of Ann, with its
    # subscriptions.
    await other.open()
    await other.result("resources/subscribe", params("a"))
    await another.open()
    await another.result("resources/subscribe", params("a"))
    await one.result("resources/subscribe", params("c"))
    await app.aclose()


async def test_streams_of_changes_count_as_subscriptions() -> None:
    app = make_app(limits=Limits(subscribed_bytes=4000))

    @app.resource("test://{name}")
    def thing(name: str) -> str:
        return name

    wanted = {"notifications": {"resourceSubscriptions": [f"test://{'a' * 2500}"]}}
    async with over_http(app) as client:
        first = client.post(client.message("subscriptions/listen", wanted))
        assert (await first.message())["method"] == "notifications/subscriptions/acknowledged"
        error = await client.error("subscriptions/listen", wanted)
        assert (error["code"], error["data"]["limit"]) == (42910, "subscribed_bytes")
        await first.close()
        again = client.post(client.message("subscriptions/listen", wanted))
        assert (await again.message())["method"] == "notifications/subscriptions/acknowledged"
        await again.close()


async def test_array_is_answered_within_the_limit() -> None:
    """Limits.bytes_out limits the whole reply; an entry that does not fit gets an error."""
    app = make_app(limits=Limits(bytes_out=10_000))

    @app.query
    def much() -> str:
        return "x" * 4000

    calls = [request("tools/call", {"name": "much"}, number) for number in range(5)]
    async with over_http(app, R2) as client, over_stdio(app, R2) as pipe:
        pipe.write(calls)
        for answers in (await client.post(calls).json(), await pipe.line()):
            assert [answer["id"] for answer in answers] == [0, 1, 2, 3, 4]
            assert ["result" in answer for answer in answers] == [True, True, False, False, False]
            assert answers[4]["error"]["data"]["limit"] == "bytes_out"


@pytest.mark.parametrize("way", ["http", "stdio"])
async def test_array_keeps_no_more_than_one_reply_may_hold(way: str) -> None:
    """J11: an answer that does not fit is dropped once ready.

    A command that ran says so, and is recorded.
    """
    app = make_app(limits=Limits(bytes_out=1_000_000))
    effects = list[int]()

    @app.command
    def much() -> str:
        effects.append(1)
        return "x" * 900_000

    calls = [
        request("tools/call", {"name": "much", "_meta": {KEY: f"k-{number}"}}, number)
        for number in range(50)
    ]
    async with over_http(app, R2) as client, over_stdio(app, R2) as pipe:
        tracemalloc.start()
        try:
            if way == "stdio":
                pipe.write(calls)
            answers = await (client.post(calls).json() if way == "http" else pipe.line())
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert ["result" in answer for answer in answers] == [True, *[False] * 49]
        assert {answer["error"]["data"]["ran"] for answer in answers[1:]} == {"yes"}
        assert peak < 25_000_000
        again = await client.post({**calls[49], "id": 99}).json()
        assert again["error"]["code"] == 41010 and len(effects) == 50


@pytest.mark.parametrize(
    ("header", "value", "is_same"),
    [
        (str(2**53 + 1), 2**53 + 1, True),
        (str(2**53 + 1), 2**53, False),
        (str(2**53), 2**53 + 1, False),
        ("1.50", 1.5, True),
        ("1", 1.0, True),
        ("9" * 10_000, 9, False),
    ],
)
def test_header_with_a_number_is_compared_exactly(header: str, value: float, is_same: bool) -> None:
    fields = Headers([("mcp-param-n", header)])
    with nullcontext() if is_same else pytest.raises(HeaderMismatch):
        check_marked(fields, Raw(json.dumps({"n": value}).encode()), {("n",): "N"})
