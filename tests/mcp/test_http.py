"""Streamable HTTP: statuses and headers, sessions, streams, and what is refused before anything runs."""

import asyncio
import base64
import json
from collections.abc import Mapping
from typing import Annotated, Any

import pytest
from msgspec import Meta

from tests.calls import make_app
from tests.client.peers import served
from tests.mcp.asgi import (
    BASIC,
    KEY,
    LEGACY,
    PATIENCE,
    PREFIX,
    R1,
    R2,
    R3,
    R4,
    R5,
    REPLAYED,
    REVISIONS,
    Exchange,
    HttpClient,
    Json,
    enveloped,
    hello,
    notification,
    over_http,
    over_stdio,
    repeated,
    request,
    response,
)
from wirecall import App, Context, Limits, ToolAnnotations

every_revision = pytest.mark.parametrize("revision", REVISIONS)
legacy = pytest.mark.parametrize("revision", LEGACY)

READS = ToolAnnotations(readOnlyHint=True)


class Lab:
    """An app whose tools wait, stream and tell what happened to them."""

    def __init__(self, **options: Any) -> None:
        self.app: App = make_app(**options)
        self.ran: list[str] = []
        self.entered = asyncio.Event()
        self.gate = asyncio.Event()
        self.over = asyncio.Event()
        app = self.app

        @app.query
        def look() -> str:
            self.ran.append("look")
            return "seen"

        @app.tool(annotations=READS)
        async def wait() -> str:
            self.entered.set()
            try:
                await self.gate.wait()
                self.ran.append("waited")
            except asyncio.CancelledError:
                self.ran.append("cancelled")
                raise
            finally:
                self.over.set()
            return "waited"

        @app.tool(annotations=READS)
        async def stream(ctx: Context, count: int = 1) -> str:
            for number in range(count):
                await ctx.log("error", number)
            self.entered.set()
            try:
                await self.gate.wait()
                await ctx.log("error", "last")
                self.ran.append("streamed")
            except asyncio.CancelledError:
                self.ran.append("cancelled")
                raise
            finally:
                self.over.set()
            return "streamed"

        @app.command
        async def pay(ctx: Context) -> str:
            self.entered.set()
            await self.gate.wait()
            await ctx.progress(1)
            self.ran.append("paid")
            self.over.set()
            return "paid"

        @app.tool(annotations=READS)
        async def many(count: int, ctx: Context) -> str:
            for number in range(count):
                await ctx.log("error", number)
            return "all"

        @app.tool(annotations=READS)
        async def hang(ctx: Context) -> str:
            await ctx.log("error", "before")
            await ctx.hang_up(0.5)
            await self.gate.wait()
            return "after"

        @app.tool(annotations=READS)
        def region(
            place: Annotated[str | None, Meta(extra_json_schema={"x-mcp-header": "Place"})] = None,
            count: Annotated[int, Meta(extra_json_schema={"x-mcp-header": "Count"})] = 0,
            deep: Annotated[bool, Meta(extra_json_schema={"x-mcp-header": "Deep"})] = False,
        ) -> str:
            self.ran.append("region")
            return f"{place} {count} {deep}"

        @app.prompt
        def grüße() -> str:
            return "hallo"

        @app.resource("test://ä b")
        def odd() -> str:
            return "odd"

    async def wait_for(self, event: asyncio.Event) -> None:
        async with asyncio.timeout(PATIENCE):
            await event.wait()


async def refused(exchange: Exchange) -> tuple[int, Any]:
    """Status and code of what was refused."""
    await exchange.started()
    body = await exchange.json()
    return exchange.status, body["error"]["code"]


def pairs(headers: Mapping[str, str], *more: tuple[str, str]) -> list[tuple[str, str]]:
    return [*headers.items(), *more]


# --- media types -----------------------------------------------------------------------------------------------------


@every_revision
@pytest.mark.parametrize("media", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""])
async def test_a_body_that_is_not_json_is_415(revision: str, media: str | None) -> None:
    lab = Lab()
    async with over_http(lab.app, revision) as client:
        message = client.message("tools/call", {"name": "look"})
        headers = {n: v for n, v in client.headers(message).items() if n != "content-type"}
        answered = await client.post(message, {**headers, **({} if media is None else {"content-type": media})}).started()
    assert (answered.status, lab.ran) == (415, [])


@every_revision
@pytest.mark.parametrize("media", ["application/json; charset=utf-8", "Application/JSON", "application/json;charset=UTF-8"])
async def test_spellings_of_json(revision: str, media: str) -> None:
    async with over_http(Lab().app, revision) as client:
        assert await client.result("tools/list", headers={"content-type": media})


@every_revision
@pytest.mark.parametrize("accept", ["application/json", "text/event-stream", "text/html", "image/*"])
async def test_accept_must_list_both_kinds_of_answer(revision: str, accept: str) -> None:
    lab = Lab()
    async with over_http(lab.app, revision) as client:
        message = client.message("tools/call", {"name": "look"})
        answered = await client.post(message, {**client.headers(message), "accept": accept}).started()
    assert (answered.status, lab.ran) == (406, [])


@pytest.mark.parametrize("accept", ["*/*", "application/*, text/*", "TEXT/EVENT-STREAM;q=0.5,application/json;q=0.9"])
async def test_accept_in_other_words(accept: str) -> None:
    async with over_http(Lab().app, R4) as client:
        assert await client.result("tools/list", headers={"accept": accept})


async def test_a_get_wants_a_stream() -> None:
    async with over_http(Lab().app, R4) as client:
        answered = await client.exchange("GET", {**client.headers(), "accept": "application/json"}).started()
    assert answered.status == 406


@pytest.mark.parametrize("method", ["PUT", "PATCH", "HEAD", "OPTIONS"])
async def test_other_methods_are_405(method: str) -> None:
    async with over_http(Lab().app, R4) as client:
        answered = await client.exchange(method).started()
    assert answered.status == 405
    assert "POST" in (answered.header("allow") or "")


# --- Host and Origin (matrix 1.12, trap 49) --------------------------------------------------------------------------

EVIL = [
    {"host": "evil.example.com"},
    {"host": "localhost.evil.example.com"},
    {"host": "evil.example.com:8420"},
    {"origin": "http://evil.example.com"},
    {"origin": "https://localhost.evil.example.com"},
    {"origin": "http://localhost@evil.example.com"},
    {"origin": "http://evil.example.com/http://localhost"},
    {"origin": "null"},
    {"origin": "localhost"},
    {"origin": ""},
]


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
@pytest.mark.parametrize("evil", EVIL)
async def test_foreign_names_are_403_for_every_method(method: str, evil: dict[str, str]) -> None:
    lab = Lab()
    async with over_http(lab.app, R4) as client:
        body = json.dumps(request("tools/call", {"name": "look"})).encode() if method == "POST" else b""
        answered = await client.exchange(method, {**client.headers(), **evil}, body).started()
        assert "id" not in json.loads(await answered.read())
    assert (answered.status, lab.ran) == (403, [])


FRIENDS = [
    {"host": "127.0.0.1:8420"},
    {"host": "[::1]:1"},
    {"host": "LOCALHOST"},
    {"origin": "http://localhost:5173"},
    {"origin": "https://127.0.0.1"},
    {"origin": "http://[::1]:9"},
]


@pytest.mark.parametrize("friend", FRIENDS)
async def test_names_of_the_loopback_are_ours(friend: dict[str, str]) -> None:
    async with over_http(Lab().app, R4) as client:
        assert await client.result("tools/list", headers=friend)


async def test_doubled_hosts_and_origins_are_400() -> None:
    async with over_http(Lab().app, R4) as client:
        for name, value in (("host", "evil.example.com"), ("origin", "http://evil.example.com")):
            message = request("tools/list")
            given = pairs({**client.headers(), "origin": "http://localhost"}, (name, value))
            assert (await client.post(message, given).started()).status == 400


# --- bodies ----------------------------------------------------------------------------------------------------------

UNREADABLE = [
    (b"", -32700),
    (b"{", -32700),
    (b'{"jsonrpc":"2.0","id":1,"method":"tools/list"', -32700),
    (b'{"jsonrpc":"2.0","id":1,"method":"tools/list"}{}', -32700),
    (b'{"jsonrpc":"2.0","id":1,"method":"tools/\xff\xfe"}', -32700),
    ('{"jsonrpc":"2.0","id":1,"method":"tools/list"}'.encode("utf-16"), -32700),
    (b'"text"', -32600),
    (b"null", -32600),
    (b"{}", -32600),
    (b'{"jsonrpc":"2.0"}', -32600),
    (b'{"jsonrpc":"2.0","id":1}', -32600),
    (b'{"jsonrpc":"1.0","id":1,"method":"tools/list"}', -32600),
    (b'{"id":1,"method":"tools/list"}', -32600),
    (b'{"jsonrpc":"2.0","id":1,"method":5}', -32600),
    (b'{"jsonrpc":"2.0","id":1,"result":{},"error":{"code":1,"message":""}}', -32600),
]


@every_revision
async def test_what_is_no_message_is_400(revision: str) -> None:
    async with over_http(Lab().app, revision) as client:
        for body, code in UNREADABLE:
            answered = await client.post(body).started()
            told = await answered.json()
            assert (body, answered.status, told["error"]["code"]) == (body, 400, code)
            if revision in (R4, R5):
                assert "id" not in told or told["id"] is not None  # trap 15


@every_revision
@pytest.mark.parametrize("id", [None, True, False, 1.5, [], {}])
async def test_ids_that_are_none_are_400(revision: str, id: Any) -> None:
    """Trap 13: `id: null` is neither a notification nor a request."""
    lab = Lab()
    async with over_http(lab.app, revision) as client:
        message = {**client.message("tools/call", {"name": "look"}), "id": id}
        assert await refused(client.post(message)) == (400, -32600)
    assert lab.ran == []


@every_revision
@pytest.mark.parametrize("id", [0, -1, "", "1", 2**53, 2**63, 10**30, "ü\n"])
async def test_ids_are_echoed_with_their_type(revision: str, id: Any) -> None:
    """Trap 16."""
    async with over_http(Lab().app, revision) as client:
        for method in ("tools/list", "no/such"):
            answer = await client.call(method, id=id)
            assert (answer["id"], type(answer["id"])) == (id, type(id))


@every_revision
@pytest.mark.parametrize("params", [[], ["look"], "look", 5])
async def test_params_are_an_object(revision: str, params: Any) -> None:
    """Matrix 1.2: no params by position."""
    async with over_http(Lab().app, revision) as client:
        status, code = await refused(client.post(request("tools/call", params)))
    assert (status, code) in ((400, -32600), (400, -32602))


@every_revision
async def test_a_body_that_is_too_long_is_413(revision: str) -> None:
    lab = Lab(limits=Limits(bytes_in=2000))
    async with over_http(lab.app, revision) as client:
        message = client.message("tools/call", {"name": "look", "arguments": {"x": "y" * 3000}})
        data = json.dumps(message).encode()
        told = {**client.headers(message), "content-length": str(len(data))}
        assert (await client.exchange("POST", told, data).started()).status == 413
        pieces = [data[start : start + 500] for start in range(0, len(data), 500)]
        assert (await client.exchange("POST", client.headers(message), pieces).started()).status == 413
    assert lab.ran == []


async def test_a_body_in_pieces_is_a_body() -> None:
    async with over_http(Lab().app, R4) as client:
        data = json.dumps(request("tools/list")).encode()
        answered = await client.exchange("POST", None, [data[:9], b"", data[9:20], data[20:]]).json()
    assert answered["result"]["tools"]


async def test_a_body_that_does_not_come_is_408() -> None:
    async with over_http(Lab(limits=Limits(body_time=1)).app, R5) as client:
        stalled = Exchange(client.asgi, "POST", BASIC, iter([b"{"]))
        stalled._chunks = []  # and nothing ever comes
        assert (await stalled.started()).status == 408


async def test_a_deep_body_is_refused() -> None:
    deep = b'{"jsonrpc":"2.0","id":1,"result":' + b"[" * 500 + b"]" * 500 + b"}"
    async with over_http(Lab().app, R4) as client:
        assert (await client.post(deep).started()).status == 400


# --- the version header ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1999-01-01", "v9", "", "2025-11-25, 2025-11-25", "2025-11-25 x"])
@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
async def test_an_unknown_version_is_400(version: str, method: str) -> None:
    """Matrix 1.1: MUST 400, whatever is sent with it."""
    lab = Lab()
    async with over_http(lab.app, R4) as client:
        headers = {**client.headers(), "mcp-protocol-version": version}
        if method != "POST":
            assert (await client.exchange(method, headers).started()).status == 400
            return
        for message in (request("tools/call", {"name": "look"}), notification("notifications/initialized"), response("x")):
            assert (await client.post(message, headers).started()).status == 400
    assert lab.ran == []


@every_revision
async def test_a_doubled_version_is_400(revision: str) -> None:
    lab = Lab()
    async with over_http(lab.app, revision) as client:
        message = client.message("tools/call", {"name": "look"})
        own = {n: v for n, v in client.headers(message).items() if n != "mcp-protocol-version"}
        told = pairs(own, ("mcp-protocol-version", revision), ("mcp-protocol-version", revision))
        assert (await client.post(message, told).started()).status == 400
    assert lab.ran == []


async def test_initialize_may_have_headers_of_other_revisions() -> None:
    """Trap 21: a version header, and `Mcp-Method` on requests that do not need it, are ignored."""
    async with over_http(Lab().app, R4) as client:
        told = {**BASIC, "mcp-protocol-version": R3, "mcp-method": "wrong"}
        answered = await client.post(hello(R2), told).started()
        assert (await answered.json())["result"]["protocolVersion"] == R2
        assert await client.result("tools/list", headers={"mcp-method": "tools/call", "mcp-name": "x"})


# --- sessions (matrix 2.3, trap 44) ----------------------------------------------------------------------------------


@legacy
async def test_a_session_id_is_visible_ascii(revision: str) -> None:
    async with over_http(Lab().app, revision) as client, over_http(Lab().app, revision) as other:
        assert client.session and all("\x21" <= sign <= "\x7e" for sign in client.session)
        assert client.session != other.session


async def test_two_sessions_have_two_ids() -> None:
    async with over_http(Lab().app, R4) as client:
        again = await client.post(hello(R4), BASIC).started()
        assert again.header("mcp-session-id") not in (None, client.session)


@legacy
@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
async def test_an_unknown_session_is_404(revision: str, method: str) -> None:
    lab = Lab()
    async with over_http(lab.app, revision) as client:
        body = json.dumps(request("tools/call", {"name": "look"})).encode() if method == "POST" else b""
        for token in ("nobody", "a.b", "..", "%00", "é"):
            answered = await client.exchange(method, {**client.headers(), "mcp-session-id": token}, body).started()
            assert (token, answered.status, lab.ran) == (token, 404, [])


async def test_a_session_id_that_was_changed_is_404() -> None:
    async with over_http(Lab().app, R4) as client:
        assert client.session
        for place in range(0, len(client.session), 7):
            sign = "A" if client.session[place] != "A" else "B"
            forged = client.session[:place] + sign + client.session[place + 1 :]
            answered = await client.post(request("ping"), {**client.headers(), "mcp-session-id": forged}).started()
            assert answered.status == 404, place


async def test_a_doubled_session_is_400() -> None:
    async with over_http(Lab().app, R4) as client:
        told = pairs(client.headers(), ("mcp-session-id", client.session or ""))
        assert (await client.post(request("ping"), told).started()).status == 400


@legacy
async def test_an_ended_session_is_404_for_everything(revision: str) -> None:
    lab = Lab()
    async with over_http(lab.app, revision) as client:
        ended = await client.exchange("DELETE").started()
        assert ended.status in (200, 204)
        for message in (request("tools/call", {"name": "look"}), notification("notifications/initialized"), response("s")):
            assert (await client.post(message).started()).status == 404
        assert (await client.listen().started()).status == 404
        assert (await client.exchange("DELETE").started()).status == 404
    assert lab.ran == []


async def test_an_ended_session_ends_its_stream() -> None:
    async with over_http(Lab().app, R4) as client:
        stream = await client.listen().started()
        assert stream.status == 200
        await client.exchange("DELETE").started()
        assert await stream.event() is None


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_without_a_session_there_is_no_stream(method: str) -> None:
    """Matrix 2.3: SSE or 405; with a version that has sessions, a missing one is 400."""
    async with over_http(Lab().app, R5) as client:
        stream = {**BASIC, "accept": "text/event-stream"}
        assert (await client.exchange(method, stream).started()).status in (400, 405)
        assert (await client.exchange(method, {**stream, "mcp-protocol-version": R4}).started()).status == 400


async def test_initialize_with_an_old_session_begins_anew() -> None:
    """Trap 44: after a 404 a client starts over; some still send the old id."""
    async with over_http(Lab().app, R4) as client:
        answered = await client.post(hello(R4), {**BASIC, "mcp-session-id": "long gone"}).started()
        assert (answered.status, bool(answered.header("mcp-session-id"))) == (200, True)


async def test_an_old_session_is_404(monkeypatch: pytest.MonkeyPatch) -> None:
    from wirecall.mcp.server import sessions

    monkeypatch.setattr(sessions, "LIFETIME", -1.0)
    async with over_http(Lab().app, R5) as client:
        session = (await client.post(hello(R4), BASIC).started()).header("mcp-session-id") or ""
        assert (await client.post(request("ping"), {**BASIC, "mcp-session-id": session}).started()).status == 404


def who(headers: Mapping[str, str]) -> str | None:
    return headers.get("authorization")


async def test_a_session_belongs_to_its_caller() -> None:
    lab = Lab(authenticate=who)
    async with over_http(lab.app, R4, headers={"authorization": "ann"}) as client:
        bob = {**client.headers(), "authorization": "bob"}
        assert (await client.post(request("tools/call", {"name": "look"}), bob).started()).status == 404
        assert (await client.exchange("DELETE", bob).started()).status == 404
        assert (await client.exchange("GET", {**bob, "accept": "text/event-stream"}).started()).status == 404
        assert lab.ran == []
        assert await client.tool("look")


async def test_who_does_not_say_who_he_is_is_401() -> None:
    lab = Lab(authenticate=who)
    async with over_http(lab.app, R5, headers={"authorization": "ann"}) as client:
        for method in ("POST", "GET", "DELETE"):
            answered = await client.exchange(method, BASIC, b"{}").started()
            assert (answered.status, answered.header("www-authenticate")) == (401, "Bearer")


async def test_any_worker_serves_any_session() -> None:
    """What was negotiated travels in the session id."""
    one, two, stranger = Lab(secret="s3cret"), Lab(secret="s3cret"), Lab(secret="another")
    async with over_http(one.app, R2, capabilities={"sampling": {}}) as client:
        for lab, status in ((two, 200), (stranger, 404)):
            elsewhere = HttpClient(lab.app.asgi(), R2)
            answered = await elsewhere.post([request("tools/call", {"name": "look"})], client.headers()).started()
            assert answered.status == status
    assert (two.ran, stranger.ran) == (["look"], [])


async def test_an_id_is_in_use_until_it_is_answered() -> None:
    lab = Lab()
    async with over_http(lab.app, R4) as client:
        first = client.post(request("tools/call", {"name": "wait"}, 7))
        await lab.wait_for(lab.entered)
        again = await client.call("tools/call", {"name": "wait"}, id=7)
        assert again["error"]["code"] == -32600
        lab.gate.set()
        assert (await first.json())["result"]
        assert await client.result("tools/call", {"name": "wait"}, id="7")


@every_revision
async def test_an_id_is_in_use_on_a_pipe_until_it_is_answered(revision: str) -> None:
    lab = Lab()
    async with over_stdio(lab.app, revision) as client:
        client.write(client.message("tools/call", {"name": "wait"}, 7))
        await lab.wait_for(lab.entered)
        client.write(client.message("tools/call", {"name": "wait"}, 7))
        assert (await client.line())["error"]["code"] == -32600
        assert await client.tool("look", id="7")
        lab.gate.set()
        answer = await client.line()
        assert (answer["id"], answer["result"]["content"][0]["text"]) == (7, "waited")
        lab.gate.set()
        assert await client.tool("wait", id=7)  # free again


@every_revision
@pytest.mark.parametrize(
    "params", [None, {}, {"requestId": 99}, {"requestId": None}, {"requestId": [7]}, {"requestId": 7.5}]
)
async def test_a_cancellation_of_nothing_is_met_with_silence(revision: str, params: Any) -> None:
    lab = Lab()
    async with over_stdio(lab.app, revision) as client:
        client.write(client.message("tools/call", {"name": "wait"}, 7))
        await lab.wait_for(lab.entered)
        client.write(notification("notifications/cancelled", params))
        lab.gate.set()
        lines = [await client.line()]
        await client.end()
        while not client.unasked.empty():
            lines.append(client.unasked.get_nowait())
    assert [line["id"] for line in lines] == [7]


async def test_cancelling_is_for_ones_own_calls() -> None:
    lab = Lab()
    async with over_http(lab.app, R4) as client:
        first = client.post(request("tools/call", {"name": "wait"}, 7))
        await lab.wait_for(lab.entered)
        other = HttpClient(client.asgi, R4)
        await other.open()
        await other.notify("notifications/cancelled", {"requestId": 7})
        await client.notify("notifications/cancelled", {"requestId": "7"})
        lab.gate.set()
        assert (await first.json())["result"]["content"]


@legacy
async def test_a_cancelled_call_is_not_answered(revision: str) -> None:
    lab = Lab()
    async with over_http(lab.app, revision) as client:
        first = client.post(request("tools/call", {"name": "wait"}, 7))
        await lab.wait_for(lab.entered)
        await client.notify("notifications/cancelled", {"requestId": 7})
        assert await first.read() == b""
    assert lab.ran == ["cancelled"]


@legacy
async def test_a_notification_is_202_without_a_body(revision: str) -> None:
    async with over_http(Lab().app, revision) as client:
        for message in (notification("notifications/initialized"), response("nobody asked")):
            answered = await client.post(message).started()
            assert (answered.status, await answered.read()) == (202, b"")


# --- streams of the older revisions ----------------------------------------------------------------------------------


@every_revision
async def test_an_answer_is_json_until_something_comes_before_it(revision: str) -> None:
    async with over_http(Lab().app, revision) as client:
        await client.tool("look")
        first = client.last
        assert first is not None and first.header("content-type") == "application/json"
        await client.tool("many", {"count": 1}, meta={f"{PREFIX}logLevel": "debug"})
        assert client.last is not None and client.last.header("content-type") == "text/event-stream"
        assert client.last.header("cache-control") in ("no-store", "no-cache")
        assert client.last.header("x-accel-buffering") == "no"


@every_revision
async def test_the_shape_of_events(revision: str) -> None:
    """A priming event at 2025-11-25 alone; ids where a stream can be resumed; neither id nor retry at 2026-07-28."""
    async with over_http(Lab().app, revision) as client:
        message = client.message(
            "tools/call", {"name": "many", "arguments": {"count": 2}}, meta={f"{PREFIX}logLevel": "debug"}
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
async def test_a_stream_that_was_cut_is_resumed(revision: str) -> None:
    """The call goes on; a GET with Last-Event-ID brings what came later, once."""
    lab = Lab()
    async with over_http(lab.app, revision) as client:
        cut = client.post(client.message("tools/call", {"name": "stream", "arguments": {"count": 3}}, 7))
        seen = [event for event in [await cut.event() for _ in range(3 if revision == R4 else 2)] if event and event.data]
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
async def test_an_answer_that_came_while_nobody_read_is_kept(revision: str) -> None:
    lab = Lab()
    async with over_http(lab.app, revision) as client:
        cut = client.post(client.message("tools/call", {"name": "stream"}, 7))
        first = await cut.event()
        assert first
        cut.leave()
        lab.gate.set()
        await lab.wait_for(lab.over)
        messages = [json.loads(event.data) for event in await client.listen(first.id).events() if event.data]
        assert messages[-1]["result"]["content"][0]["text"] == "streamed"
        again = [json.loads(event.data) for event in await client.listen(first.id).events() if event.data]
    assert again == messages


async def test_events_of_one_session_are_not_for_another() -> None:
    lab = Lab()
    lab.gate.set()
    async with over_http(lab.app, R4) as client:
        events = await client.post(client.message("tools/call", {"name": "stream"}, 7)).events()
        other = HttpClient(client.asgi, R4)
        await other.open()
        answered = await other.listen(events[0].id).started()
        assert answered.status >= 400


@pytest.mark.parametrize("last", ["nobody.1", "x", "", "1", "..", "nobody.-1"])
async def test_an_unknown_event_id_does_not_end_the_session(last: str) -> None:
    """404 would tell the client that its session is over (trap 44), and it is not."""
    async with over_http(Lab().app, R4) as client:
        answered = await client.listen(last).started()
        assert answered.status in (200, 400)
        assert await client.result("ping") == {}


async def test_ids_of_events_are_unique_in_a_session() -> None:
    """Trap 47: an id is the cursor of one stream."""
    lab = Lab()
    lab.gate.set()
    async with over_http(lab.app, R4) as client:
        ids = []
        for id in range(3):
            events = await client.post(client.message("tools/call", {"name": "stream"}, id)).events()
            ids += [event.id for event in events]
    assert len(set(ids)) == len(ids)


async def test_a_reader_misses_nothing_however_fast_it_is_told() -> None:
    async with over_http(Lab().app, R4) as client:
        await client.tool("many", {"count": 1500})
    assert [params["data"] for params in client.told("notifications/message")] == list(range(1500))


@legacy
async def test_an_answer_that_comes_while_an_event_is_on_its_way_follows_it(revision: str) -> None:
    """The call ends while its client is still reading what came before."""
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
async def test_a_server_hangs_up_at_2025_11_25_alone(revision: str) -> None:
    """Matrix 2.3: an early end of the connection MAY come there, after `retry`; earlier it SHOULD NOT."""
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


async def test_a_tool_that_hangs_up_ends_nothing_at_2026_07_28() -> None:
    lab = Lab()
    lab.gate.set()
    async with over_http(lab.app, R5) as client:
        assert (await client.tool("hang"))["content"][0]["text"] == "after"


async def test_each_message_is_on_one_stream() -> None:
    """Trap 47: a client with two GET streams hears of a change once."""
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
    assert sorted(heard) == ["notifications/prompts/list_changed", "notifications/tools/list_changed"]


async def _quiet(client: HttpClient) -> None:
    """Some rounds through the server, so that what is on its way has arrived."""
    for _ in range(5):
        await client.result("ping")


def _arrived(stream: Exchange) -> list[str]:
    parts = []
    while not stream._parts.empty():
        parts.append(stream._parts.get_nowait() or b"")
    lines = b"".join(parts).decode().splitlines()
    return [json.loads(line.removeprefix("data:"))["method"] for line in lines if line.startswith("data:")]


# --- who leaves (trap 34) --------------------------------------------------------------------------------------------


@every_revision
@pytest.mark.parametrize("tool", ["wait", "stream"])
async def test_leaving_is_cancelling_at_2026_07_28_alone(revision: str, tool: str) -> None:
    lab = Lab()
    async with over_http(lab.app, revision) as client:
        message = client.message("tools/call", {"name": tool}, 7, {f"{PREFIX}logLevel": "debug"})
        answered = client.post(message)
        await lab.wait_for(lab.entered)
        answered.leave()
        if revision != R5:
            lab.gate.set()
        await lab.wait_for(lab.over)
    assert lab.ran == (["cancelled"] if revision == R5 else ["waited" if tool == "wait" else "streamed"])


@every_revision
async def test_a_command_past_its_commit_point_outlives_its_caller(revision: str) -> None:
    """commands.md: disconnect after it: the handler is shielded, finishes, its outcome is recorded, whatever it tells."""
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


async def test_a_command_on_a_pipe_outlives_its_caller() -> None:
    lab = Lab()
    async with over_stdio(lab.app, R5) as client:
        client.write(client.message("tools/call", {"name": "pay"}, 7, {KEY: "k", "progressToken": 1}))
        await lab.wait_for(lab.entered)
        await client.notify("notifications/cancelled", {"requestId": 7})
        lab.gate.set()
        assert (await client.tool("pay", meta={KEY: "k"}))["content"][0]["text"] == "paid"
    assert lab.ran == ["paid"]


# --- headers of 2026-07-28 (matrix 1.11, 2.5; traps 22, 28 to 32) ----------------------------------------------------


def call(name: str = "look", **arguments: Any) -> Any:
    return enveloped("tools/call", {"name": name, "arguments": arguments}, 5)


WRONG = [
    {"mcp-method": "tools/list"},
    {"mcp-method": "TOOLS/CALL"},
    {"mcp-method": ""},
    {"mcp-method": None},
    {"mcp-name": "other"},
    {"mcp-name": "Look"},
    {"mcp-name": ""},
    {"mcp-name": None},
    {"mcp-name": "=?base64?bG9vaw?="},
    {"mcp-name": "=?base64?bG9v*aw==?="},
    {"mcp-name": "=?base64?/w==?="},
    {"mcp-name": "=?BASE64?bG9vaw==?="},
    {"mcp-name": "=?base64?bG9vaw=="},
    {"mcp-protocol-version": R4},
    {"mcp-protocol-version": "v999.0.0"},
    {"mcp-protocol-version": ""},
    {"mcp-protocol-version": None},
]


@pytest.mark.parametrize("wrong", WRONG)
async def test_headers_that_do_not_repeat_the_body_are_refused(wrong: dict[str, str | None]) -> None:
    lab = Lab()
    async with over_http(lab.app) as client:
        headers = {**client.headers(call()), **wrong}
        answered = await client.post(call(), {n: v for n, v in headers.items() if v is not None}).started()
        told = await answered.json()
    assert (answered.status, told["id"], told["error"]["code"], lab.ran) == (400, 5, -32020, [])


@pytest.mark.parametrize("name", ["mcp-method", "mcp-name", "mcp-protocol-version"])
async def test_doubled_headers_are_refused(name: str) -> None:
    lab = Lab()
    async with over_http(lab.app) as client:
        headers = client.headers(call())
        assert (await client.post(call(), pairs(headers, (name, headers[name]))).started()).status == 400
    assert lab.ran == []


@pytest.mark.parametrize(
    "right",
    [{"mcp-name": "  look\t"}, {"MCP-NAME": "look"}, {"mcp-name": "=?base64?bG9vaw==?="}, {"mcp-method": " tools/call "}],
)
async def test_blanks_case_of_names_and_base64_do_not_matter(right: dict[str, str]) -> None:
    async with over_http(Lab().app) as client:
        names = {name.lower() for name in right}
        headers = {n: v for n, v in client.headers(call()).items() if n not in names}
        assert (await client.post(call(), {**headers, **right}).json())["result"]


def base64ed(text: str) -> str:
    return f"=?base64?{base64.b64encode(text.encode()).decode()}?="


@pytest.mark.parametrize(
    ("method", "member", "name"), [("prompts/get", "name", "grüße"), ("resources/read", "uri", "test://ä b")]
)
async def test_names_that_a_header_cannot_carry_come_as_base64(method: str, member: str, name: str) -> None:
    message = enveloped(method, {member: name})
    async with over_http(Lab().app) as client:
        told = {**BASIC, **repeated(message), "mcp-name": base64ed(name)}
        assert "result" in await client.post(message, told).json()


@pytest.mark.parametrize("method", ["tools/list", "server/discover", "no/such"])
async def test_methods_without_a_name_need_no_name_header(method: str) -> None:
    async with over_http(Lab().app) as client:
        answer = await client.call(method)
        assert answer.get("error", {}).get("code") in (None, -32601)


LADDER = [
    ("no envelope beats everything", request("no/such", {}, 5), {"mcp-protocol-version": R5}, 400, -32602),
    ("no capabilities", request("no/such", {"_meta": {f"{PREFIX}protocolVersion": "v9"}}, 5), {}, 400, -32602),
    ("headers beat the version", enveloped("no/such", id=5, version="v9"), {"mcp-protocol-version": R5}, 400, -32020),
    (
        "the version beats the method",
        enveloped("no/such", id=5, version="v9"),
        repeated({"method": "no/such"}, "v9"),
        400,
        -32022,
    ),
    ("the method", enveloped("no/such", id=5), repeated({"method": "no/such"}), 404, -32601),
    ("a body with an envelope is modern without headers", enveloped("tools/list", id=5), {}, 400, -32020),
    ("whatever the header says", enveloped("tools/list", id=5), {"mcp-protocol-version": R4}, 400, -32020),
]


@pytest.mark.parametrize(
    ("message", "headers", "status", "code"), [row[1:] for row in LADDER], ids=[row[0] for row in LADDER]
)
async def test_the_order_of_the_checks(message: Any, headers: dict[str, str], status: int, code: int) -> None:
    """Trap 22; every error echoes the id."""
    async with over_http(Lab().app) as client:
        answered = await client.post(message, {**BASIC, **headers}).started()
        told = await answered.json()
    assert (answered.status, told["error"]["code"], told["id"]) == (status, code, 5)


PARAMS: list[tuple[dict[str, Any], dict[str, str], bool]] = [
    ({}, {}, True),
    ({"place": "eu"}, {"mcp-param-place": "eu"}, True),
    ({"place": "eu"}, {"mcp-param-place": " eu "}, True),
    ({"place": "eu"}, {"mcp-param-place": base64ed("eu")}, True),
    ({"place": "zürich"}, {"mcp-param-place": base64ed("zürich")}, True),
    ({"place": " edge "}, {"mcp-param-place": base64ed(" edge ")}, True),
    ({"place": "=?base64?eA==?="}, {"mcp-param-place": base64ed("=?base64?eA==?=")}, True),
    ({"place": "=?base64?eA=="}, {"mcp-param-place": "=?base64?eA=="}, True),
    ({"place": "eA==?="}, {"mcp-param-place": "eA==?="}, True),
    ({"place": ""}, {"mcp-param-place": ""}, True),
    ({"place": None}, {}, True),
    ({"count": 42}, {"mcp-param-count": "42"}, True),
    ({"count": -7}, {"mcp-param-count": "-7"}, True),
    ({"count": 9007199254740991}, {"mcp-param-count": "9007199254740991"}, True),
    ({"deep": True}, {"mcp-param-deep": "true"}, True),
    ({"deep": False}, {"mcp-param-deep": "false"}, True),
    ({"place": "eu", "count": 1}, {"mcp-param-place": "eu", "mcp-param-count": "1"}, True),
    ({"place": "eu"}, {}, False),
    ({"place": "eu"}, {"mcp-param-place": "us"}, False),
    ({"place": "eu"}, {"mcp-param-place": "EU"}, False),
    ({"place": "eu"}, {"mcp-param-place": ""}, False),
    ({"place": "Hello"}, {"mcp-param-place": "=?base64?SGVsbG8?="}, False),
    ({"place": "Hello"}, {"mcp-param-place": "=?base64?SGV*sbG8=?="}, False),
    ({"place": ""}, {}, False),
    ({}, {"mcp-param-place": "eu"}, False),
    ({"count": 42}, {"mcp-param-count": "43"}, False),
    ({"count": 42}, {"mcp-param-count": "4_2"}, False),
    ({"count": 42}, {}, False),
    ({"deep": True}, {"mcp-param-deep": "1"}, False),
    ({"deep": True}, {"mcp-param-deep": "True"}, False),
    ({"deep": False}, {}, False),
]


@pytest.mark.parametrize(("arguments", "headers", "agree"), PARAMS)
async def test_marked_arguments_are_repeated(arguments: dict[str, Any], headers: dict[str, str], agree: bool) -> None:
    lab = Lab()
    message = call("region", **arguments)
    async with over_http(lab.app) as client:
        answered = await client.post(message, {**client.headers(message), **headers}).started()
        told = await answered.json()
    if agree:
        assert answered.status == 200 and "result" in told, told
    else:
        assert (answered.status, told["error"]["code"], lab.ran) == (400, -32020, [])


async def test_a_doubled_argument_header_is_refused() -> None:
    message = call("region", place="eu")
    async with over_http(Lab().app) as client:
        told = pairs(client.headers(message), ("mcp-param-place", "eu"), ("mcp-param-place", "eu"))
        assert await refused(client.post(message, told)) == (400, -32020)


@legacy
async def test_older_revisions_do_not_look_at_these_headers(revision: str) -> None:
    async with over_http(Lab().app, revision) as client:
        assert await client.tool("region", {"place": "eu"}, headers={"mcp-param-place": "us", "mcp-name": "x"})


# --- the rest of 2026-07-28 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_there_is_only_post(method: str) -> None:
    async with over_http(Lab().app) as client:
        answered = await client.exchange(method, {**BASIC, "mcp-protocol-version": R5}).started()
    assert (answered.status, answered.header("allow")) == (405, "POST")


async def test_a_response_is_not_for_a_server_that_asks_nothing() -> None:
    """Matrix 2.4: array or response => 400."""
    async with over_http(Lab().app) as client:
        assert (await client.post(response("x")).started()).status == 400


async def test_a_notification_is_taken_without_headers_and_checked_with_them() -> None:
    """Open point 9: accept without; validate if present."""
    message = notification("notifications/cancelled", {"requestId": 1, "_meta": {f"{PREFIX}protocolVersion": R5}})
    async with over_http(Lab().app) as client:
        answered = await client.post(message, {**BASIC, "mcp-protocol-version": R5}).started()
        assert (answered.status, await answered.read()) == (202, b"")
        wrong = {**BASIC, "mcp-protocol-version": R5, "mcp-method": "tools/call"}
        assert await refused(client.post(message, wrong)) == (400, -32020)


async def test_sessions_and_event_ids_are_ignored_and_never_made() -> None:
    async with over_http(Lab().app) as client:
        await client.tool("look", headers={"mcp-session-id": "nobody", "last-event-id": "9"})
        assert client.last is not None and client.last.status == 200
        assert client.last.header("mcp-session-id") is None


async def test_nothing_is_remembered_between_requests() -> None:
    """Matrix 1.1: a server infers nothing from earlier requests."""
    async with over_http(Lab().app, capabilities={"sampling": {}}) as client:
        await client.tool("many", {"count": 1}, meta={f"{PREFIX}logLevel": "debug"})
        assert len(client.heard) == 1
        await client.tool("many", {"count": 1})
        assert len(client.heard) == 1


@pytest.mark.parametrize("revision", [R1, R2, R3, R4])
async def test_no_session_no_header_is_2025_03_26(revision: str) -> None:
    """Without anything that tells: 2025-03-26. With a version header of an older revision: that one."""
    async with over_http(Lab().app) as client:
        bare = await client.post(request("tools/list"), BASIC).json()
        assert "annotations" in bare["result"]["tools"][0] and "title" not in bare["result"]["tools"][0]
        told = await client.post(request("tools/list"), {**BASIC, "mcp-protocol-version": revision}).json()
        assert ("annotations" in told["result"]["tools"][0]) == (revision != R1)


# --- clients that do not read, and limits ----------------------------------------------------------------------------


@legacy
async def test_a_call_does_not_wait_for_a_reader_who_is_gone(revision: str) -> None:
    """More events than are kept: the call ends all the same."""
    lab = Lab()
    async with over_http(lab.app, revision) as client:
        gone = client.post(client.message("tools/call", {"name": "stream", "arguments": {"count": 3000}}, 7))
        await gone.event()
        gone.leave()
        lab.gate.set()
        await lab.wait_for(lab.over)
    assert lab.ran == ["streamed"]


@pytest.mark.parametrize("revision", [R4, R5])
async def test_a_reader_who_does_not_read_is_cut(revision: str) -> None:
    """Limits.write_time; until 2025-11-25 its call goes on, at 2026-07-28 it is over one way or the other."""
    lab = Lab(limits=Limits(write_time=1))
    async with over_http(lab.app, revision) as client:
        meta = {f"{PREFIX}logLevel": "debug"}
        stuck = client.post(client.message("tools/call", {"name": "stream", "arguments": {"count": 3000}}, 7, meta))
        stuck.reads.clear()
        lab.gate.set()
        await lab.wait_for(lab.over)
        done, _ = await asyncio.wait([stuck.task], timeout=PATIENCE)
        assert done
        assert await client.tool("look")
    if revision != R5:
        assert lab.ran == ["streamed", "look"]


@every_revision
async def test_an_answer_comes_without_its_events_when_no_stream_is_left(revision: str) -> None:
    """Limits.streams: the effect is made before the first event, so the call is answered, not refused."""
    lab = Lab(limits=Limits(streams=1))
    lab.gate.set()
    async with over_http(lab.app, revision) as client:
        message = enveloped("subscriptions/listen", {"notifications": {"toolsListChanged": True}}, "l")
        standing = client.post(message, {**BASIC, **repeated(message)})
        await standing.message()
        first = await client.tool("pay", meta={KEY: "k", "progressToken": 1})
        assert client.last is not None and client.last.header("content-type") == "application/json"
        again = await client.tool("pay", meta={KEY: "k"})
    assert [answer["content"][0]["text"] for answer in (first, again)] == ["paid", "paid"]
    assert (lab.ran, client.heard) == (["paid"], [])


@every_revision
async def test_an_answer_comes_without_its_events_when_the_server_stops(revision: str) -> None:
    lab = Lab()
    async with over_http(lab.app, revision) as client:
        first = client.post(client.message("tools/call", {"name": "pay"}, 7, {KEY: "k", "progressToken": 1}))
        await lab.wait_for(lab.entered)
        client.asgi.stop(20.0)  # type: ignore[attr-defined]
        lab.gate.set()
        await first.started()
        assert (first.status, first.header("content-type")) == (200, "application/json")
        assert (await first.json())["result"]["content"][0]["text"] == "paid"
        again = await client.tool("pay", meta={KEY: "k"})
    assert again["content"][0]["text"] == "paid"
    assert lab.ran == ["paid"]


async def test_an_array_is_answered_without_its_events_when_no_stream_is_left() -> None:
    lab = Lab(limits=Limits(streams=1))
    lab.gate.set()
    async with over_http(lab.app, R2) as client:
        await (await client.listen().started())._part()
        meta = {"progressToken": 1, f"{PREFIX}logLevel": "debug"}
        calls = [request("tools/call", {"name": name, "_meta": meta}, name) for name in ("pay", "stream", "hang", "look")]
        exchange = client.post(calls)
        answers = await exchange.messages()
    assert (exchange.status, exchange.header("content-type")) == (200, "application/json")
    assert {answer["id"]: answer["result"]["content"][0]["text"] for answer in answers} == {
        "pay": "paid",
        "stream": "streamed",
        "hang": "after",
        "look": "seen",
    }


async def test_a_question_that_finds_no_stream_is_an_error_of_the_tool() -> None:
    """The tool may have made an effect before it asked; so the call is answered, not refused."""
    app = make_app(limits=Limits(streams=1))

    @app.tool
    async def ask(ctx: Context) -> str:
        answer = await ctx.elicit("Sure?", {"type": "object", "properties": {"sure": {"type": "boolean"}}})
        return str(answer.content)

    async with over_http(app, R4, capabilities={"elicitation": {}}) as client:
        await (await client.listen().started())._part()
        told = await client.tool("ask")
    assert told["isError"] is True and "could not be sent" in told["content"][0]["text"]


class Broken(Exchange):
    """A transport that breaks: from the start of an answer on, whatever it is asked, it fails in the given way."""

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
@pytest.mark.parametrize("fault", [AttributeError("done"), OSError(), Exception(), asyncio.CancelledError()], ids=repr)
async def test_no_fault_of_a_transport_reaches_a_handler(revision: str, fault: BaseException) -> None:
    app, over, met = make_app(), asyncio.Event(), list[BaseException]()

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
            "tools/call", {"name": "pay"}, 7, {KEY: "k", "progressToken": 1, f"{PREFIX}logLevel": "debug"}
        )
        broken = Broken(fault, client.asgi, "POST", client.headers(message), json.dumps(message).encode())
        async with asyncio.timeout(PATIENCE):
            await over.wait()
        again = await client.tool("pay", meta={KEY: "k"})
        await broken.close()
    assert met == []
    assert (again["content"][0]["text"], again["_meta"][REPLAYED]) == ("paid", True)


async def test_a_command_whose_client_hangs_up_is_recorded_over_granian() -> None:
    """granian's `receive` gives a future while the client is there, and an object without `done` afterwards."""
    app, ran, calls = make_app(), list[int](), 100

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
            message = enveloped("tools/call", {"name": "pay", "arguments": {"number": number}}, number)
            message["params"]["_meta"] |= {KEY: f"k{number}", "progressToken": "p"}
            body = json.dumps(message).encode()
            head = "".join(f"{name}: {value}\r\n" for name, value in (BASIC | repeated(message)).items())
            _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(f"POST /mcp HTTP/1.1\r\n{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
            writer.close()
        async with over_http(app) as client:
            for number in range(calls):
                told = await client.tool("pay", {"number": number}, meta={KEY: f"k{number}"})
                assert told["content"][0]["text"] == "paid", number
    assert sorted(ran) == list(range(calls))


@every_revision
async def test_nothing_is_told_after_the_answer(revision: str) -> None:
    """Matrix 1.5: progress stops with the completion, also of a handler that leaves a task behind."""
    app, gate, tasks = make_app(), asyncio.Event(), list[asyncio.Task[None]]()

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


async def test_a_session_id_fits_into_a_header() -> None:
    """Whatever a client declares: its own header limit must not lock it out."""
    async with over_http(Lab().app) as client:
        declared = {"sampling": {f"mode{number}": {} for number in range(5000)}, "experimental": {"x": "y" * 50_000}}
        answered = await client.post(hello(R4, declared), BASIC).started()
        session = answered.header("mcp-session-id") or ""
        assert answered.status == 400 or 0 < len(session) < 8000


async def test_a_stopping_server_ends_its_streams() -> None:
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
