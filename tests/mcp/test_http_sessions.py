"""Sessions over HTTP: their owners, and their end."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests import rsgi
from tests.calls import make_app
from tests.mcp.asgi import (
    BASIC,
    R2,
    R4,
    R5,
    HttpClient,
    hello,
    notification,
    over_http,
    over_stdio,
    request,
    response,
)
from tests.mcp.lab import Lab, every_revision, legacy, pairs
from wirecall.errors import InvalidRequest
from wirecall.mcp.revisions import REVISIONS
from wirecall.mcp.server.changes import Subscribed
from wirecall.mcp.server.peer import Session
from wirecall.mcp.server.sessions import LIFETIME, Known, Sealer, Sessions
from wirecall.transports.request import HttpError


@pytest.fixture(autouse=True, params=rsgi.INTERFACES)
def interface(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here runs over both interfaces."""
    monkeypatch.setattr(rsgi, "interface", request.param)


@legacy
async def test_session_id_is_visible_ascii(revision: str) -> None:
    async with over_http(Lab().app, revision) as client, over_http(Lab().app, revision) as other:
        assert client.session and all("\x21" <= sign <= "\x7e" for sign in client.session)
        assert client.session != other.session


async def test_session_ids_differ() -> None:
    async with over_http(Lab().app, R4) as client:
        again = await client.post(hello(R4), BASIC).started()
        assert again.header("mcp-session-id") not in (None, client.session)


@legacy
@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
async def test_unknown_session_is_404(revision: str, method: str) -> None:
    lab = Lab()
    async with over_http(lab.app, revision) as client:
        body = (
            json.dumps(request("tools/call", {"name": "look"})).encode()
            if method == "POST"
            else b""
        )
        for token in ("nobody", "a.b", "..", "%00", "é"):
            answered = await client.exchange(
                method, {**client.headers(), "mcp-session-id": token}, body
            ).started()
            assert (token, answered.status, lab.ran) == (token, 404, [])


async def test_session_id_that_was_changed_is_404() -> None:
    async with over_http(Lab().app, R4) as client:
        assert client.session
        for place in range(0, len(client.session), 7):
            sign = "A" if client.session[place] != "A" else "B"
            forged = client.session[:place] + sign + client.session[place + 1 :]
            answered = await client.post(
                request("ping"), {**client.headers(), "mcp-session-id": forged}
            ).started()
            assert answered.status == 404, place


async def test_doubled_session_is_400() -> None:
    async with over_http(Lab().app, R4) as client:
        told = pairs(client.headers(), ("mcp-session-id", client.session or ""))
        assert (await client.post(request("ping"), told).started()).status == 400


@legacy
async def test_ended_session_is_404_for_everything(revision: str) -> None:
    lab = Lab()
    async with over_http(lab.app, revision) as client:
        ended = await client.exchange("DELETE").started()
        assert ended.status in (200, 204)
        for message in (
            request("tools/call", {"name": "look"}),
            notification("notifications/initialized"),
            response("s"),
        ):
            assert (await client.post(message).started()).status == 404
        assert (await client.listen().started()).status == 404
        assert (await client.exchange("DELETE").started()).status == 404
    assert lab.ran == []


async def test_ended_session_ends_its_stream() -> None:
    async with over_http(Lab().app, R4) as client:
        stream = await client.listen().started()
        assert stream.status == 200
        await client.exchange("DELETE").started()
        assert await stream.event() is None


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_stream_needs_a_session(method: str) -> None:
    """Matrix 2.3: SSE or 405; with a version that has sessions, a missing one is 400."""
    async with over_http(Lab().app, R5) as client:
        stream = {**BASIC, "accept": "text/event-stream"}
        assert (await client.exchange(method, stream).started()).status in (400, 405)
        assert (
            await client.exchange(method, {**stream, "mcp-protocol-version": R4}).started()
        ).status == 400


async def test_initialize_with_an_old_session_starts_a_new_one() -> None:
    """Trap 44: after a 404 a client starts over; some still send the old id."""
    async with over_http(Lab().app, R4) as client:
        answered = await client.post(hello(R4), {**BASIC, "mcp-session-id": "long gone"}).started()
        assert (answered.status, bool(answered.header("mcp-session-id"))) == (200, True)


async def test_old_session_is_404(monkeypatch: pytest.MonkeyPatch) -> None:
    from wirecall.mcp.server import sessions

    monkeypatch.setattr(sessions, "LIFETIME", -1.0)
    async with over_http(Lab().app, R5) as client:
        session = (await client.post(hello(R4), BASIC).started()).header("mcp-session-id") or ""
        assert (
            await client.post(request("ping"), {**BASIC, "mcp-session-id": session}).started()
        ).status == 404


def who(headers: Mapping[str, str]) -> str | None:
    return headers.get("authorization")


async def test_session_belongs_to_its_caller() -> None:
    lab = Lab(authenticate=who)
    async with over_http(lab.app, R4, headers={"authorization": "ann"}) as client:
        bob = {**client.headers(), "authorization": "bob"}
        assert (
            await client.post(request("tools/call", {"name": "look"}), bob).started()
        ).status == 404
        assert (await client.exchange("DELETE", bob).started()).status == 404
        assert (
            await client.exchange("GET", {**bob, "accept": "text/event-stream"}).started()
        ).status == 404
        assert lab.ran == []
        assert await client.tool("look")


async def test_request_without_credentials_is_401() -> None:
    lab = Lab(authenticate=who)
    async with over_http(lab.app, R5, headers={"authorization": "ann"}) as client:
        for method in ("POST", "GET", "DELETE"):
            answered = await client.exchange(method, BASIC, b"{}").started()
            assert (answered.status, answered.header("www-authenticate")) == (401, "Bearer")


async def test_session_is_served_by_any_worker() -> None:
    """The session id contains the negotiated terms."""
    one = Lab(secret="s3cret")
    two = Lab(secret="s3cret")
    stranger = Lab(secret="another")
    async with over_http(one.app, R2, capabilities={"sampling": {}}) as client:
        for lab, status in ((two, 200), (stranger, 404)):
            elsewhere = HttpClient(lab.app.asgi(), R2)
            answered = await elsewhere.post(
                [request("tools/call", {"name": "look"})], client.headers()
            ).started()
            assert answered.status == status
    assert (two.ran, stranger.ran) == (["look"], [])


@pytest.mark.parametrize(
    ("first", "second"),
    [("old", ["old", "new"]), (["old", "new"], ["new", "old"]), (["new", "old"], "new")],
)
async def test_session_is_served_by_both_sides_of_each_step_that_replaces_a_secret(
    first: str | list[str], second: str | list[str]
) -> None:
    for secret, other in ((first, second), (second, first)):
        lab = Lab(secret=secret)
        elsewhere = Lab(secret=other)
        async with over_http(lab.app, R4) as client:
            there = HttpClient(elsewhere.app.asgi(), R4)
            message = request("tools/call", {"name": "look"})
            assert (await there.post(message, client.headers()).started()).status == 200
        assert elsewhere.ran == ["look"]


async def test_id_is_in_use_until_it_is_answered() -> None:
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
async def test_id_is_in_use_on_a_pipe_until_it_is_answered(revision: str) -> None:
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
    "params",
    [None, {}, {"requestId": 99}, {"requestId": None}, {"requestId": [7]}, {"requestId": 7.5}],
)
async def test_cancellation_of_an_unknown_request_is_ignored(revision: str, params: Any) -> None:
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


async def test_cancellation_is_only_for_the_session_s_own_calls() -> None:
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
async def test_cancelled_call_is_not_answered(revision: str) -> None:
    lab = Lab()
    async with over_http(lab.app, revision) as client:
        first = client.post(request("tools/call", {"name": "wait"}, 7))
        await lab.wait_for(lab.entered)
        await client.notify("notifications/cancelled", {"requestId": 7})
        assert await first.read() == b""
    assert lab.ran == ["cancelled"]


@legacy
async def test_notification_is_202_without_a_body(revision: str) -> None:
    async with over_http(Lab().app, revision) as client:
        for message in (notification("notifications/initialized"), response("nobody asked")):
            answered = await client.post(message).started()
            assert (answered.status, await answered.read()) == (202, b"")


async def test_session_token_that_was_accepted_is_refused_once_it_has_expired() -> None:
    now = [1000.0]

    async def meet(_: Known) -> bool:
        return True

    sessions = Sessions(Sealer("secret", clock=lambda: now[0]), meet, (), Subscribed(1000))
    token = sessions.token("ann", Session(REVISIONS[R4]))
    known = await sessions.find("ann", token)
    assert await sessions.find("ann", token) is known
    with pytest.raises(HttpError, match="404"):
        await sessions.find("bob", token)
    now[0] += LIFETIME + 1
    with pytest.raises(HttpError, match="404"):
        await sessions.find("ann", token)


@legacy
async def test_plain_function_that_returns_an_awaitable_is_answered(revision: str) -> None:
    app = make_app()

    async def later(fails: bool) -> str:
        await asyncio.sleep(0)
        if fails:
            raise InvalidRequest("not now")
        return "done"

    @app.query
    def begin(fails: bool = False) -> Any:
        return later(fails)

    async with over_http(app, revision) as client:
        told = await client.post(request("tools/call", {"name": "begin"})).json()
        assert told["result"]["content"] == [{"type": "text", "text": "done"}]
        told = await client.post(
            request("tools/call", {"name": "begin", "arguments": {"fails": True}})
        ).json()
        assert told["error"]["code"] == -32600
