"""Streams over HTTP: what is sent on which, clients that leave, and clients that do not read."""

import asyncio
import json
from typing import Any

import pytest

from tests import rsgi
from tests.calls import make_app
from tests.client.peers import served
from tests.mcp.asgi import (
    BASIC,
    KEY,
    PATIENCE,
    PREFIX,
    R2,
    R3,
    R4,
    R5,
    REPLAYED,
    Exchange,
    HttpClient,
    Json,
    enveloped,
    hello,
    over_http,
    over_stdio,
    repeated,
    request,
)
from tests.mcp.lab import READS, Lab, every_revision, legacy
from wirecall import Context, Limits

# --- streams of the older revisions ---------------------------------------------------------------


# For tests whose client does not read, or is cut.
only_asgi = pytest.mark.parametrize("interface", ["asgi"], indirect=True)


@pytest.fixture(autouse=True, params=rsgi.INTERFACES)
def interface(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here runs over both interfaces."""
    monkeypatch.setattr(rsgi, "interface", request.param)


@every_revision
async def test_answer_is_json_until_something_comes_before_it(revision: str) -> None:
    async with over_http(Lab().app, revision) as client:
        await client.tool("look")
        first = client.last
        assert first is not None and first.header("content-type") == "application/json"
        await client.tool("many", {"count": 1}, meta={f"{PREFIX}logLevel": "debug"})
        assert client.last is not None and client.last.header("content-type") == "text/event-stream"
        assert client.last.header("cache-control") in ("no-store", "no-cache")
        assert client.last.header("x-accel-buffering") == "no"


@every_revision
async def test_shape_of_events(revision: str) -> None:
    """A priming event at 2025-11-25 only; ids if a stream can be resumed; no id or retry at
    2026-07-28.
    """
    async with over_http(Lab().app, revision) as client:
        message = client.message(
            "tools/call",
            {"name": "many", "arguments": {"count": 2}},
            meta={f"{PREFIX}logLevel": "debug"},
        )
        events = await client.post(message).events()
    primed = [event for event in events if not event.data]
    told = [event for event in events if event.data]
    assert len(told) == 3
    assert all(event.kind in (None, "message") and "\n" not in (event.data or "") for event in told)
    assert (len(primed), events[0] in primed) == ((1, True) if revision == R4 else (0, False))
    ids = [event.id for event in events]
    if revision in (R2, R3, R4):
        assert None not in ids and len(set(ids)) == len(ids)
    else:
        assert ids == [None] * 3
    assert all(event.retry is None for event in events)


@pytest.mark.parametrize("revision", [R2, R3, R4])
async def test_stream_that_was_cut_is_resumed(revision: str) -> None:
    """The call continues; a GET with Last-Event-ID returns the later events, once."""
    lab = Lab()
    async with over_http(lab.app, revision) as client:
        cut = client.post(
            client.message("tools/call", {"name": "stream", "arguments": {"count": 3}}, 7)
        )
        seen = [
            event
            for event in [await cut.event() for _ in range(3 if revision == R4 else 2)]
            if event and event.data
        ]
        await lab.wait_for(lab.entered)
        cut.leave()
        resumed = await client.listen(seen[-1].id).started()
        assert (resumed.status, resumed.header("content-type")) == (200, "text/event-stream")
        lab.gate.set()
        later = [json.loads(event.data) for event in await resumed.events() if event.data]
    numbers = [json.loads(event.data or "")["params"]["data"] for event in seen]
    numbers += [message["params"]["data"] for message in later if "method" in message]
    assert numbers == [0, 1, 2, "last"]
    assert later[-1]["id"] == 7
    assert lab.ran == ["streamed"]


@pytest.mark.parametrize("revision", [R2, R3, R4])
async def test_answer_without_a_reader_is_kept(revision: str) -> None:
    lab = Lab()
    async with over_http(lab.app, revision) as client:
        cut = client.post(client.message("tools/call", {"name": "stream"}, 7))
        first = await cut.event()
        assert first
        cut.leave()
        lab.gate.set()
        await lab.wait_for(lab.over)
        messages = [
            json.loads(event.data) for event in await client.listen(first.id).events() if event.data
        ]
        assert messages[-1]["result"]["content"][0]["text"] == "streamed"
        again = [
            json.loads(event.data) for event in await client.listen(first.id).events() if event.data
        ]
    assert again == messages


async def test_events_are_not_sent_to_another_session() -> None:
    lab = Lab()
    lab.gate.set()
    async with over_http(lab.app, R4) as client:
        events = await client.post(client.message("tools/call", {"name": "stream"}, 7)).events()
        other = HttpClient(client.asgi, R4)
        await other.open()
        answered = await other.listen(events[0].id).started()
        assert answered.status >= 400


@pytest.mark.parametrize("last", ["nobody.1", "x", "", "1", "..", "nobody.-1"])
async def test_unknown_event_id_does_not_end_the_session(last: str) -> None:
    """404 would mean that the session is over (trap 44), and it is not."""
    async with over_http(Lab().app, R4) as client:
        answered = await client.listen(last).started()
        assert answered.status in (200, 400)
        assert await client.result("ping") == {}


async def test_event_ids_are_unique_in_a_session() -> None:
    """Trap 47: an id is the cursor of one stream."""
    lab = Lab()
    lab.gate.set()
    async with over_http(lab.app, R4) as client:
        ids = []
        for id in range(3):
            events = await client.post(
                client.message("tools/call", {"name": "stream"}, id)
            ).events()
            ids += [event.id for event in events]
    assert len(set(ids)) == len(ids)


@only_asgi
async def test_reader_misses_no_event_however_fast_they_are_sent() -> None:
    async with over_http(Lab().app, R4) as client:
        await client.tool("many", {"count": 1500})
    assert [params["data"] for params in client.told("notifications/message")] == list(range(1500))


@legacy
async def test_answer_follows_an_event_that_is_still_pending(revision: str) -> None:
    """The call ends while its client is still reading earlier events."""
    lab = Lab()
    async with over_http(lab.app, revision) as client:
        stream = client.post(client.message("tools/call", {"name": "stream"}, 7))
        stream.reads.clear()
        await stream.started()
        lab.gate.set()
        await asyncio.wait_for(_quiet(client), PATIENCE)
        stream.reads.set()
        assert [message.get("id") for message in await stream.messages()] == [None, None, 7]


@legacy
async def test_server_hangs_up_only_at_2025_11_25(revision: str) -> None:
    """Matrix 2.3: there a server MAY end the connection early, after `retry`; before, it SHOULD
    NOT.
    """
    lab = Lab()
    async with over_http(lab.app, revision) as client:
        stream = client.post(client.message("tools/call", {"name": "hang"}, 7))
        if revision != R4:
            assert (await stream.message())["method"] == "notifications/message"
            lab.gate.set()
            assert [message["id"] for message in await stream.messages()] == [7]
            return
        events = await stream.events()
        assert events[-1].id is not None and 400 <= int(events[-1].retry or 0) <= 600
        lab.gate.set()
        later = await client.listen(events[-1].id).messages()
    assert [message["id"] for message in later] == [7]


async def test_tool_that_hangs_up_does_not_end_the_stream_at_2026_07_28() -> None:
    lab = Lab()
    lab.gate.set()
    async with over_http(lab.app, R5) as client:
        assert (await client.tool("hang"))["content"][0]["text"] == "after"


async def test_message_is_sent_on_one_stream() -> None:
    """Trap 47: a client with two GET streams receives a change once."""
    lab = Lab()
    async with over_http(lab.app, R4) as client:
        streams = [await client.listen().started(), await client.listen().started()]
        assert 200 in [stream.status for stream in streams]
        lab.app.changed("tools")
        lab.app.changed("prompts")
        await asyncio.wait_for(_quiet(client), PATIENCE)
        for stream in streams:
            stream.leave()
        client.exchange("DELETE")
        heard = [part for stream in streams if stream.status == 200 for part in _arrived(stream)]
    assert sorted(heard) == [
        "notifications/prompts/list_changed",
        "notifications/tools/list_changed",
    ]


async def _quiet(client: HttpClient) -> None:
    """Make some rounds through the server, so that pending messages have arrived."""
    for _ in range(5):
        await client.result("ping")


def _arrived(stream: Exchange) -> list[str]:
    parts = []
    while not stream._parts.empty():
        parts.append(stream._parts.get_nowait() or b"")
    lines = b"".join(parts).decode().splitlines()
    return [
        json.loads(line.removeprefix("data:"))["method"]
        for line in lines
        if line.startswith("data:")
    ]


# --- disconnects (trap 34) ------------------------------------------------------------------------


@every_revision
@pytest.mark.parametrize("tool", ["wait", "stream"])
async def test_disconnect_cancels_only_at_2026_07_28(revision: str, tool: str) -> None:
    lab = Lab()
    async with over_http(lab.app, revision) as client:
        message = client.message("tools/call", {"name": tool}, 7, {f"{PREFIX}logLevel": "debug"})
        answered = client.post(message)
        await lab.wait_for(lab.entered)
        answered.leave()
        if revision != R5:
            lab.gate.set()
        await lab.wait_for(lab.over)
    ended = "streamed"
    if revision == R5:
        ended = "cancelled"
    elif tool == "wait":
        ended = "waited"
    assert lab.ran == [ended]


@every_revision
async def test_command_past_its_commit_point_outlives_its_caller(revision: str) -> None:
    """commands.md: shielded from a disconnect, it finishes and its outcome is recorded, whatever it
    sends.
    """
    lab = Lab()
    async with over_http(lab.app, revision) as client:
        meta = {KEY: "k", "progressToken": 1}
        answered = client.post(client.message("tools/call", {"name": "pay"}, 7, meta))
        await lab.wait_for(lab.entered)
        answered.leave()
        await asyncio.wait([answered.task], timeout=1.0 if revision == R5 else 0.01)
        lab.gate.set()
        again = await client.tool("pay", meta={KEY: "k"})
    assert again["content"][0]["text"] == "paid"
    assert lab.ran == ["paid"]


async def test_command_on_a_pipe_outlives_its_caller() -> None:
    lab = Lab()
    async with over_stdio(lab.app, R5) as client:
        client.write(
            client.message("tools/call", {"name": "pay"}, 7, {KEY: "k", "progressToken": 1})
        )
        await lab.wait_for(lab.entered)
        await client.notify("notifications/cancelled", {"requestId": 7})
        lab.gate.set()
        assert (await client.tool("pay", meta={KEY: "k"}))["content"][0]["text"] == "paid"
    assert lab.ran == ["paid"]


# --- clients that do not read, and limits ---------------------------------------------------------


@legacy
async def test_call_does_not_wait_for_a_reader_that_has_left(revision: str) -> None:
    """The call ends even if it sends more events than are kept."""
    lab = Lab()
    async with over_http(lab.app, revision) as client:
        gone = client.post(
            client.message("tools/call", {"name": "stream", "arguments": {"count": 3000}}, 7)
        )
        await gone.event()
        gone.leave()
        lab.gate.set()
        await lab.wait_for(lab.over)
    assert lab.ran == ["streamed"]


@only_asgi
@pytest.mark.parametrize("revision", [R4, R5])
async def test_client_that_does_not_read_is_disconnected(revision: str) -> None:
    """Limits.write_time; until 2025-11-25 its call continues, at 2026-07-28 it completes or is
    cancelled.
    """
    lab = Lab(limits=Limits(write_time=1))
    async with over_http(lab.app, revision) as client:
        meta = {f"{PREFIX}logLevel": "debug"}
        stuck = client.post(
            client.message("tools/call", {"name": "stream", "arguments": {"count": 3000}}, 7, meta)
        )
        stuck.reads.clear()
        lab.gate.set()
        await lab.wait_for(lab.over)
        done, _ = await asyncio.wait([stuck.task], timeout=PATIENCE)
        assert done
        assert await client.tool("look")
    if revision != R5:
        assert lab.ran == ["streamed", "look"]


@every_revision
async def test_answer_is_sent_without_its_events_when_all_streams_are_taken(revision: str) -> None:
    """Limits.streams: the effect happens before the first event, so the call is answered, not
    refused.
    """
    lab = Lab(limits=Limits(streams=1))
    lab.gate.set()
    async with over_http(lab.app, revision) as client:
        message = enveloped(
            "subscriptions/listen", {"notifications": {"toolsListChanged": True}}, "l"
        )
        standing = client.post(message, {**BASIC, **repeated(message)})
        await standing.message()
        first = await client.tool("pay", meta={KEY: "k", "progressToken": 1})
        assert client.last is not None and client.last.header("content-type") == "application/json"
        again = await client.tool("pay", meta={KEY: "k"})
    assert [answer["content"][0]["text"] for answer in (first, again)] == ["paid", "paid"]
    assert (lab.ran, client.heard) == (["paid"], [])


@every_revision
async def test_answer_is_sent_without_its_events_when_the_server_stops(revision: str) -> None:
    lab = Lab()
    async with over_http(lab.app, revision) as client:
        first = client.post(
            client.message("tools/call", {"name": "pay"}, 7, {KEY: "k", "progressToken": 1})
        )
        await lab.wait_for(lab.entered)
        client.asgi.stop(20.0)  # type: ignore[attr-defined]
        lab.gate.set()
        await first.started()
        assert (first.status, first.header("content-type")) == (200, "application/json")
        assert (await first.json())["result"]["content"][0]["text"] == "paid"
        again = await client.tool("pay", meta={KEY: "k"})
    assert again["content"][0]["text"] == "paid"
    assert lab.ran == ["paid"]


async def test_array_is_answered_without_its_events_when_all_streams_are_taken() -> None:
    lab = Lab(limits=Limits(streams=1))
    lab.gate.set()
    async with over_http(lab.app, R2) as client:
        await (await client.listen().started())._part()
        meta = {"progressToken": 1, f"{PREFIX}logLevel": "debug"}
        calls = [
            request("tools/call", {"name": name, "_meta": meta}, name)
            for name in ("pay", "stream", "hang", "look")
        ]
        exchange = client.post(calls)
        answers = await exchange.messages()
    assert (exchange.status, exchange.header("content-type")) == (200, "application/json")
    assert {answer["id"]: answer["result"]["content"][0]["text"] for answer in answers} == {
        "pay": "paid",
        "stream": "streamed",
        "hang": "after",
        "look": "seen",
    }


async def test_question_that_finds_no_stream_is_an_error_of_the_tool() -> None:
    """The tool may have had an effect before it asked; so the call is answered, not refused."""
    app = make_app(limits=Limits(streams=1))

    @app.tool
    async def ask(ctx: Context) -> str:
        answer = await ctx.elicit(
            "Sure?", {"type": "object", "properties": {"sure": {"type": "boolean"}}}
        )
        return str(answer.content)

    async with over_http(app, R4, capabilities={"elicitation": {}}) as client:
        await (await client.listen().started())._part()
        told = await client.tool("ask")
    assert told["isError"] is True and "could not be sent" in told["content"][0]["text"]


class Broken(Exchange):
    """A transport that breaks: from the start of an answer on, every operation raises the given
    error.
    """

    def __init__(self, fault: BaseException, *given: Any) -> None:
        self._fault: BaseException = fault
        super().__init__(*given)

    async def _receive(self) -> Json:
        if self._chunks:
            return await super()._receive()
        raise self._fault

    async def _send(self, message: Any) -> None:
        raise self._fault


@every_revision
@pytest.mark.parametrize(
    "fault", [AttributeError("done"), OSError(), Exception(), asyncio.CancelledError()], ids=repr
)
async def test_transport_fault_does_not_reach_a_handler(
    revision: str, fault: BaseException
) -> None:
    app = make_app()
    over = asyncio.Event()
    met = list[BaseException]()

    @app.command
    async def pay(ctx: Context) -> str:
        try:
            for number in range(3):
                await ctx.progress(number)
                await ctx.log("error", number)
                await ctx.hang_up(1.0)
        except BaseException as error:
            met.append(error)
            raise
        finally:
            over.set()
        return "paid"

    async with over_http(app, revision) as client:
        message = client.message(
            "tools/call",
            {"name": "pay"},
            7,
            {KEY: "k", "progressToken": 1, f"{PREFIX}logLevel": "debug"},
        )
        broken = Broken(
            fault, client.asgi, "POST", client.headers(message), json.dumps(message).encode()
        )
        async with asyncio.timeout(PATIENCE):
            await over.wait()
        again = await client.tool("pay", meta={KEY: "k"})
        await broken.close()
    assert met == []
    assert (again["content"][0]["text"], again["_meta"][REPLAYED]) == ("paid", True)


async def test_command_whose_client_hangs_up_is_recorded_over_granian() -> None:
    """granian's `receive` returns a future while the client is connected, then an object without
    `done`.
    """
    app = make_app()
    ran = list[int]()
    calls = 100

    @app.command
    async def pay(number: int, ctx: Context) -> str:
        ran.append(number)
        for step in range(20):
            await ctx.progress(step)
            if step % 3 == 0:
                await asyncio.sleep(0)
        return "paid"

    async with served(app, "granian") as url:
        for number in range(calls):
            message = enveloped(
                "tools/call", {"name": "pay", "arguments": {"number": number}}, number
            )
            message["params"]["_meta"] |= {KEY: f"k{number}", "progressToken": "p"}
            body = json.dumps(message).encode()
            head = "".join(
                f"{name}: {value}\r\n" for name, value in (BASIC | repeated(message)).items()
            )
            _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(
                f"POST /mcp HTTP/1.1\r\n{head}content-length: {len(body)}\r\n\r\n".encode() + body
            )
            await writer.drain()
            writer.close()
        client = HttpClient(app.asgi(), R5)
        for number in range(calls):
            told = await client.tool("pay", {"number": number}, meta={KEY: f"k{number}"})
            assert told["content"][0]["text"] == "paid", number
        # granian may still read the last requests: only the end of the server closes the app, and
        # with it the ledger.
        await client.close()
    assert sorted(ran) == list(range(calls))


@every_revision
async def test_stream_is_silent_after_the_answer(revision: str) -> None:
    """Matrix 1.5: progress stops with the completion, also for a handler that leaves a task
    running.
    """
    app = make_app()
    gate = asyncio.Event()
    tasks = list[asyncio.Task[None]]()

    @app.tool(annotations=READS)
    async def late(ctx: Context) -> str:
        async def later() -> None:
            await gate.wait()
            await ctx.progress(1)
            await ctx.log("error", "late")

        tasks.append(asyncio.get_running_loop().create_task(later()))
        return "done"

    meta = {"progressToken": 1, f"{PREFIX}logLevel": "debug"}
    async with over_http(app, revision) as client, over_stdio(app, revision) as pipe:
        await client.tool("late", meta=meta)
        await pipe.tool("late", meta=meta)
        assert client.last is not None
        gate.set()
        await asyncio.wait(tasks, timeout=PATIENCE)
        assert [task.exception() for task in tasks] == [None, None]
        assert await client.last.read() == b""
        assert client.last.header("content-type") == "application/json"
        await pipe.result("tools/list")
        assert pipe.heard == []


async def test_session_id_fits_into_a_header() -> None:
    """Whatever a client declares: its own header limit must not lock it out."""
    async with over_http(Lab().app) as client:
        declared = {
            "sampling": {f"mode{number}": {} for number in range(5000)},
            "experimental": {"x": "y" * 50_000},
        }
        answered = await client.post(hello(R4, declared), BASIC).started()
        session = answered.header("mcp-session-id") or ""
        assert answered.status == 400 or 0 < len(session) < 8000


async def test_stopping_server_ends_its_streams() -> None:
    lab = Lab()
    async with over_http(lab.app, R4) as client:
        stream = await client.listen().started()
        listening = client.post(
            enveloped("subscriptions/listen", {"notifications": {"toolsListChanged": True}}, "l"),
            {
                **BASIC,
                **repeated({"method": "subscriptions/listen"}),
            },
        )
        assert (await listening.message())["method"] == "notifications/subscriptions/acknowledged"
        client.asgi.stop(5.0)  # type: ignore[attr-defined]
        assert await stream.messages() == []
        assert [message["id"] for message in await listening.messages()] == ["l"]
