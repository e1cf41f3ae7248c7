"""Arrays of messages: served at 2025-03-26 in every legal shape, refused as a whole elsewhere (V1
to V6).
"""

import asyncio
import json
from typing import Any

import pytest

from tests import rsgi
from tests.calls import make_app
from tests.mcp.asgi import (
    BASIC,
    KEY,
    LEGACY,
    PATIENCE,
    R1,
    R2,
    R3,
    R4,
    R5,
    REPLAYED,
    REVISIONS,
    TRANSPORTS,
    Client,
    HttpClient,
    LineClient,
    enveloped,
    hello,
    notification,
    over_http,
    over_stdio,
    request,
    response,
    speak,
)
from wirecall import App, Context, Limits, ToolAnnotations

OTHERS = [revision for revision in REVISIONS if revision != R2]

every_transport = pytest.mark.parametrize("transport", TRANSPORTS)


@pytest.fixture(autouse=True, params=rsgi.INTERFACES)
def interface(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here runs over both interfaces."""
    monkeypatch.setattr(rsgi, "interface", request.param)


class Shop:
    """An app that records what ran."""

    def __init__(self, **options: Any) -> None:
        self.app: App = make_app(**options)
        self.ran: list[Any] = []
        self.entered = asyncio.Event()
        self.gate = asyncio.Event()
        app = self.app
        reads = ToolAnnotations(readOnlyHint=True)

        @app.command
        async def buy(what: str) -> str:
            self.ran.append(what)
            await asyncio.sleep(0)
            self.ran.append(f"{what}.")
            return what

        @app.query
        def look(what: str = "x") -> str:
            self.ran.append(what)
            return what

        @app.tool(annotations=reads)
        async def wait(ctx: Context) -> str:
            self.entered.set()
            await self.gate.wait()
            return "waited"

        @app.tool(annotations=reads)
        async def steps(count: int, ctx: Context) -> str:
            for step in range(1, count + 1):
                await ctx.progress(step)
            return f"{count} steps"

        @app.tool(annotations=reads)
        async def think(about: str, ctx: Context) -> str:
            return (await ctx.sample(about)).text


def tool(name: str, id: Any = 1, meta: Any = None, **arguments: Any) -> Any:
    params = {"name": name, "arguments": arguments, **({"_meta": meta} if meta else {})}
    return request("tools/call", params, id)


ping = request("ping", id=9)


def by_id(answers: list[Any]) -> dict[Any, Any]:
    """The order is free, so tests must not depend on it."""
    found = {json.dumps(answer.get("id")): answer for answer in answers}
    assert len(found) == len(answers), answers
    return {json.loads(id): answer for id, answer in found.items()}


def text(answer: Any) -> Any:
    return answer["result"]["content"][0]["text"]


async def send(client: Client, message: Any) -> Any:
    """Send a message, and return its one JSON answer."""
    if isinstance(client, LineClient):
        client.write(message)
        return await client.line()
    assert isinstance(client, HttpClient)
    return await client.post(message).json()


async def send_in_vain(client: Client, message: Any) -> None:
    """Send a message, and check that the server does not answer."""
    if isinstance(client, LineClient):
        client.write(message)
        await client.end()
        assert client.unasked.empty()
    else:
        assert isinstance(client, HttpClient)
        answered = await client.post(message).started()
        assert (answered.status, await answered.read()) == (202, b"")


# --- refused --------------------------------------------------------------------------------------

SHAPES: dict[str, Any] = {
    "one request": [tool("buy", what="a")],
    "requests": [tool("buy", 1, what="a"), request("ping", id=2), tool("look", 3)],
    "requests and notifications": [
        tool("buy", what="a"),
        notification("notifications/cancelled", {"requestId": 9}),
    ],
    "notifications": [
        notification("notifications/cancelled", {"requestId": 9}),
        notification("notifications/unheard_of"),
    ],
    "responses": [response("s-1"), response("s-2")],
    "both": [tool("buy", what="a"), response("s-1")],
    "invalid among valid": [tool("buy", what="a"), 17, {"jsonrpc": "2.0"}],
    "a nested array": [[tool("buy", what="a")]],
}


@every_transport
@pytest.mark.parametrize("revision", [R1, R3, R4])
@pytest.mark.parametrize("shape", SHAPES)
async def test_array_is_refused_as_a_whole(transport: str, revision: str, shape: str) -> None:
    """V2: -32600, the error names the revision, nothing runs, never silence."""
    shop = Shop()
    async with speak(transport, shop.app, revision) as client:
        answer = await send(client, SHAPES[shape])
    assert isinstance(answer, dict) and answer["error"]["code"] == -32600
    assert revision in json.dumps(answer["error"])
    assert answer.get("id") is None and ("id" in answer) == (revision != R4)
    assert shop.ran == []


@pytest.mark.parametrize("revision", OTHERS)
@pytest.mark.parametrize("shape", SHAPES)
async def test_array_refused_has_status_400(revision: str, shape: str) -> None:
    shop = Shop()
    async with over_http(shop.app, revision) as client:
        answered = await client.post(SHAPES[shape]).started()
        error = (await answered.json())["error"]
    assert (answered.status, error["code"]) == (400, -32600)
    assert revision in json.dumps(error)
    assert shop.ran == []


@every_transport
async def test_array_of_enveloped_requests_is_refused(transport: str) -> None:
    """V2 at 2026-07-28, where only its entries show the revision of an array."""
    shop = Shop()
    batch = [
        enveloped("tools/call", {"name": "buy", "arguments": {"what": "a"}}, 1),
        enveloped("tools/list", id=2),
    ]
    async with speak(transport, shop.app, R5) as client:
        if isinstance(client, LineClient):
            client.write(batch)
            answer = await client.line()
        else:
            # Without any header that names the revision.
            answered = await client.post(batch, BASIC).started()
            assert answered.status == 400
            answer = await answered.json()
    assert (answer["error"]["code"], shop.ran) == (-32600, [])
    assert R5 in json.dumps(answer["error"])


@pytest.mark.parametrize(
    "odd",
    [
        {"io.modelcontextprotocol/protocolVersion": 5},
        {"io.modelcontextprotocol/protocolVersion": R2},
    ],
)
async def test_array_with_an_envelope_is_refused_whatever_the_envelope_says(odd: Any) -> None:
    shop = Shop()
    async with over_http(shop.app, R2) as client:
        answered = await client.post([tool("buy", what="a"), tool("look", 2, odd)]).started()
        assert (answered.status, (await answered.json())["error"]["code"], shop.ran) == (
            400,
            -32600,
            [],
        )


@every_transport
@pytest.mark.parametrize("revision", LEGACY)
async def test_empty_array_is_answered_with_one_error(transport: str, revision: str) -> None:
    async with speak(transport, Shop().app, revision) as client:
        answer = await send(client, [])
    assert isinstance(answer, dict) and answer["error"]["code"] == -32600


@every_transport
async def test_array_over_the_limit_is_refused_as_a_whole(transport: str) -> None:
    """J11: before anything runs; the error has the numbers."""
    shop = Shop(limits=Limits(batch=3))
    async with speak(transport, shop.app, R2) as client:
        answer = await send(client, [tool("buy", id, what="a") for id in range(4)])
        assert isinstance(answer, dict) and answer["error"]["code"] == -32600
        assert (answer["error"]["data"]["limit"], answer["error"]["data"]["max"]) == ("batch", 3)
        assert len(await send(client, [tool("look", id) for id in range(3)])) == 3
    assert shop.ran == ["x"] * 3


@every_transport
async def test_array_must_not_mix_requests_and_responses(transport: str) -> None:
    shop = Shop()
    async with speak(transport, shop.app, R2) as client:
        answer = await send(client, SHAPES["both"])
    assert (answer["error"]["code"], shop.ran) == (-32600, [])


@every_transport
async def test_array_of_broken_json_is_a_parse_error(transport: str) -> None:
    """J8: syntax outranks shape."""
    shop = Shop()
    async with speak(transport, shop.app, R2) as client:
        answer = await send(client, json.dumps([tool("buy", what="a")]).encode()[:-1] + b",{]")
    assert isinstance(answer, dict)
    assert (answer["error"]["code"], shop.ran) == (-32700, [])


# --- initialize inside ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rest", [[], [request("ping", id=7)], [notification("notifications/initialized")]]
)
@pytest.mark.parametrize("version", [None, *REVISIONS])
async def test_initialize_in_an_array_does_not_open_a_session(
    rest: list[Any], version: str | None
) -> None:
    """V3, over HTTP: whatever the header says, and whatever it offers."""
    async with over_http(Shop().app) as client:
        told = {} if version is None else {"mcp-protocol-version": version}
        answered = await client.post([hello(R2), *rest], {**BASIC, **told}).started()
        assert (answered.status, (await answered.json())["error"]["code"]) == (400, -32600)
        assert answered.header("mcp-session-id") is None


@pytest.mark.parametrize("rest", [[], [request("ping", id=7)]])
async def test_initialize_in_an_array_leaves_a_pipe_unchanged(rest: list[Any]) -> None:
    """V3, on stdio: the client can still send its handshake."""
    client = LineClient(Shop().app, R3)
    await client.open(handshake=False)
    try:
        client.write([hello(R2), *rest])
        refused = await client.line()
        assert isinstance(refused, dict) and refused["error"]["code"] == -32600
        assert (await client.exchange(request("tools/list", id=8)))["error"]["code"] == -32600
        assert (await client.exchange(hello(R3)))["result"]["protocolVersion"] == R3
    finally:
        await client.close()


@every_transport
async def test_initialize_in_an_array_of_a_session_changes_nothing(transport: str) -> None:
    shop = Shop()
    async with speak(transport, shop.app, R2) as client:
        assert (await send(client, [tool("buy", what="a"), hello(R4, id=2)]))["error"][
            "code"
        ] == -32600
        assert shop.ran == []
        assert len(await send(client, [request("ping")])) == 1  # still 2025-03-26


async def test_array_of_plain_json_rpc_is_served_until_a_revision_is_negotiated() -> None:
    """After that the pipe carries MCP, and the revision decides."""
    shop = Shop()
    plain = [
        {"jsonrpc": "2.0", "id": 1, "method": "look", "params": ["p"]},
        {"jsonrpc": "2.0", "id": 2, "method": "look"},
    ]
    client = LineClient(shop.app, R4)
    await client.open(handshake=False)
    try:
        client.write(plain)
        assert {answer["id"]: answer["result"] for answer in await client.line()} == {
            1: "p",
            2: "x",
        }
        await client.exchange(hello(R4))
        client.write(plain)
        assert (await client.line())["error"]["code"] == -32600
    finally:
        await client.close()
    assert shop.ran == ["p", "x"]


# --- which revision counts (V5) -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "served"),
    [(None, True), (R2, True), (R1, False), (R3, False), (R4, False), (R5, False), ("v9", False)],
)
async def test_revision_comes_from_the_header_without_a_session(
    version: str | None, served: bool
) -> None:
    """No session, no header, no envelope: 2025-03-26 (trap 2)."""
    shop = Shop()
    async with over_http(shop.app) as client:
        told = {} if version is None else {"mcp-protocol-version": version}
        answered = await client.post([tool("look")], {**BASIC, **told}).started()
        assert answered.status == (200 if served else 400)
        assert isinstance(await answered.json(), list) == served
    assert shop.ran == (["x"] if served else [])


@pytest.mark.parametrize("header", [None, R2, R4])
@pytest.mark.parametrize("revision", LEGACY)
async def test_revision_of_the_session_outranks_the_header(
    revision: str, header: str | None
) -> None:
    """Trap 1."""
    async with over_http(Shop().app, revision) as client:
        headers = {**BASIC, "mcp-session-id": client.session or ""}
        answered = await client.post(
            [tool("look")], {**headers, **({"mcp-protocol-version": header} if header else {})}
        ).started()
        assert answered.status == (200 if revision == R2 else 400)


async def test_array_of_an_unknown_session_is_404() -> None:
    shop = Shop()
    async with over_http(shop.app) as client:
        answered = await client.post(
            [tool("buy", what="a")], {**BASIC, "mcp-session-id": "nobody"}
        ).started()
    assert (answered.status, shop.ran) == (404, [])


# --- served (V1, V4) ------------------------------------------------------------------------------


@every_transport
async def test_array_answers_every_request_and_no_notification(transport: str) -> None:
    batch = [
        request("ping", id="a"),
        notification("notifications/unheard_of"),
        tool("look", 2, what="b"),
        request("no/such", id=3),
    ]
    async with speak(transport, Shop().app, R2) as client:
        found = by_id(await send(client, batch))
    assert found.keys() == {"a", 2, 3}
    assert found["a"]["result"] == {}
    assert text(found[2]) == "b"
    assert found[3]["error"]["code"] == -32601


@every_transport
@pytest.mark.parametrize(
    "entry", [request("ping", id=0), tool("look", "s"), request("no/such", id=5)]
)
async def test_array_of_one_entry_is_answered_with_an_array(transport: str, entry: Any) -> None:
    async with speak(transport, Shop().app, R2) as client:
        answers = await send(client, [entry])
    assert isinstance(answers, list) and [answer["id"] for answer in answers] == [entry["id"]]


@every_transport
@pytest.mark.parametrize("shape", ["notifications", "responses"])
async def test_array_without_requests_gets_no_reply(transport: str, shape: str) -> None:
    """Never `[]`: 202 without a body, or no line."""
    async with speak(transport, Shop().app, R2) as client:
        await send_in_vain(client, SHAPES[shape])


@every_transport
async def test_array_entry_that_is_bad_fails_alone(transport: str) -> None:
    shop = Shop()
    batch = [
        1,
        tool("look", 2),
        {"jsonrpc": "2.0", "id": 3},
        [],
        tool("buy", 4, what="a"),
        {"jsonrpc": "1.0", "id": 5, "method": "ping"},
    ]
    async with speak(transport, shop.app, R2) as client:
        answers = await send(client, batch)
    assert sorted(answer["id"] for answer in answers if "result" in answer) == [2, 4]
    assert [answer["error"]["code"] for answer in answers if "error" in answer] == [-32600] * 4
    assert shop.ran == ["x", "a", "a."]


@every_transport
@pytest.mark.parametrize("bad", [None, 1.5, True, [], {}])
async def test_array_entry_with_a_bad_id_fails_alone(transport: str, bad: Any) -> None:
    shop = Shop()
    async with speak(transport, shop.app, R2) as client:
        answers = await send(client, [tool("buy", bad, what="a"), tool("look", 2)])
    assert sorted(answer.get("error", {}).get("code", 0) for answer in answers) == [-32600, 0]
    assert shop.ran == ["x"]


@every_transport
async def test_array_entry_with_positional_params_fails_alone(transport: str) -> None:
    shop = Shop()
    async with speak(transport, shop.app, R2) as client:
        found = by_id(
            await send(client, [request("tools/call", ["buy", {"what": "a"}], 1), tool("look", 2)])
        )
    assert found[1]["error"]["code"] in (-32600, -32602)
    assert shop.ran == ["x"]


@every_transport
async def test_array_runs_an_id_used_twice_once(transport: str) -> None:
    """No answer may replace another; 1 and "1" are two ids."""
    shop = Shop()
    async with speak(transport, shop.app, R2) as client:
        answers = await send(
            client, [tool("buy", 1, what="a"), tool("buy", 1, what="b"), tool("buy", "1", what="c")]
        )
    assert [answer["id"] for answer in answers if "result" in answer] == [1, "1"]
    assert [answer["error"]["code"] for answer in answers if "error" in answer] == [-32600]
    assert 1 not in [answer["id"] for answer in answers if "error" in answer]
    assert shop.ran == ["a", "a.", "c", "c."]


@every_transport
async def test_array_runs_commands_one_after_another_in_order(transport: str) -> None:
    """J13."""
    shop = Shop()
    async with speak(transport, shop.app, R2) as client:
        answers = await send(client, [tool("buy", id, what=str(id)) for id in range(6)])
    assert len(answers) == 6
    assert shop.ran == [mark for id in range(6) for mark in (f"{id}", f"{id}.")]


@every_transport
async def test_array_with_a_key_twice_has_one_effect(transport: str) -> None:
    shop = Shop()
    batch = [
        tool("buy", 1, {KEY: "k"}, what="a"),
        tool("buy", 2, {KEY: "k"}, what="a"),
        tool("buy", 3, {KEY: "k"}, what="b"),
    ]
    async with speak(transport, shop.app, R2) as client:
        found = by_id(await send(client, batch))
    assert shop.ran == ["a", "a."]
    assert text(found[1]) == text(found[2]) == "a"
    assert found[2]["result"]["_meta"][REPLAYED] is True
    assert found[3]["error"]["data"]["type"] == "idempotency_key_conflict"


async def test_array_header_names_replayed_entries() -> None:
    """docs/commands.md: `Idempotent-Replayed` is true for one call, and for an array the ids."""
    async with over_http(Shop().app, R2) as client:
        await client.tool("buy", {"what": "a"}, meta={KEY: "k"})
        answered = await client.post(
            [tool("look", 1), tool("buy", 2, {KEY: "k"}, what="a")]
        ).started()
    assert json.loads(answered.header("idempotent-replayed") or "null") == [2]


async def test_array_with_a_key_in_the_header_is_refused() -> None:
    shop = Shop()
    async with over_http(shop.app, R2) as client:
        headers = {**client.headers(), "idempotency-key": "k"}
        answered = await client.post(
            [tool("buy", 1, what="a"), tool("buy", 2, what="b")], headers
        ).started()
        assert (answered.status, (await answered.json())["error"]["code"], shop.ran) == (
            400,
            -32602,
            [],
        )


# --- streams, progress, cancellation --------------------------------------------------------------


async def test_array_becomes_a_stream_when_an_entry_streams() -> None:
    """One message per event: no client reads arrays there (trap 6).

    The stream ends after the last answer.
    """
    batch = [
        tool("look", 1),
        tool("steps", 2, {"progressToken": 0}, count=2),
        tool("steps", "3", {"progressToken": "t"}, count=1),
    ]
    async with over_http(Shop().app, R2) as client:
        answered = await client.post(batch).started()
        assert (answered.status, answered.header("content-type")) == (200, "text/event-stream")
        messages = await answered.messages()
    assert all(isinstance(message, dict) for message in messages)
    told = [message["params"] for message in messages if "method" in message]
    assert [p["progress"] for p in told if p["progressToken"] == 0] == [1, 2]
    assert [p["progress"] for p in told if p["progressToken"] == "t"] == [1]
    found = by_id([message for message in messages if "id" in message])
    assert {id: text(answer) for id, answer in found.items()} == {
        1: "x",
        2: "2 steps",
        "3": "1 steps",
    }


async def test_array_stream_is_resumed() -> None:
    shop = Shop()
    async with over_http(shop.app, R2) as client:
        cut = client.post(
            [tool("wait", 1), tool("steps", 2, {"progressToken": 5}, count=1), tool("look", 3)]
        )
        first = await cut.event()
        assert first is not None
        cut.leave()
        shop.gate.set()
        messages = await client.listen(first.id).messages()
    assert {message["id"] for message in messages} == {1, 2, 3}


async def test_array_answers_do_not_wait_for_the_slowest_once_the_stream_is_open() -> None:
    shop = Shop()
    async with over_http(shop.app, R2) as client:
        answered = await client.post(
            [tool("wait", 1), tool("steps", 2, {"progressToken": 5}, count=1)]
        ).started()
        first = [await answered.message(), await answered.message()]
        assert [message.get("id") for message in first] == [None, 2]
        shop.gate.set()
        assert [message["id"] for message in await answered.messages()] == [1]


async def test_array_answers_that_are_ready_before_the_stream_do_not_wait_for_the_slowest() -> None:
    shop = Shop()
    async with over_http(shop.app, R2) as client:
        answered = await client.post(
            [tool("wait", 1), tool("look", 2), tool("steps", 3, {"progressToken": 5}, count=1)]
        ).started()
        first = [await answered.message() for _ in range(3)]
        assert [message.get("id") for message in first] == [None, 2, 3]
        shop.gate.set()
        assert [message["id"] for message in await answered.messages()] == [1]


EVENTS_FIRST = {"accept": "text/event-stream, application/json;q=0.5"}


def preferring(client: HttpClient, batch: Any) -> Any:
    """Send an array of a client that prefers events."""
    return client.post(batch, {**client.headers(batch), **EVENTS_FIRST})


async def test_array_is_a_stream_for_a_client_that_prefers_events() -> None:
    """One message per event, each when it is ready."""
    shop = Shop()
    async with over_http(shop.app, R2) as client:
        batch = [tool("wait", 1), tool("look", 2), tool("buy", 3, {KEY: "k"}, what="a"), ping]
        answered = await preferring(client, batch).started()
        assert (answered.status, answered.header("content-type")) == (200, "text/event-stream")
        first = [await answered.message() for _ in range(3)]
        assert {message["id"] for message in first} == {2, 3, 9}
        shop.gate.set()
        assert [message["id"] for message in await answered.messages()] == [1]


async def test_array_without_requests_is_not_a_stream_for_a_client_that_prefers_events() -> None:
    async with over_http(Shop().app, R2) as client:
        answered = await preferring(client, [notification("notifications/initialized")]).started()
        assert (answered.status, await answered.read()) == (202, b"")


async def test_array_stream_of_a_client_that_prefers_events_is_resumed() -> None:
    shop = Shop()
    async with over_http(shop.app, R2) as client:
        cut = preferring(client, [tool("wait", 1), tool("look", 2)])
        first = await cut.event()
        assert json.loads(first.data)["id"] == 2
        cut.leave()
        shop.gate.set()
        messages = await client.listen(first.id).messages()
    assert [message["id"] for message in messages] == [1]


async def test_array_answers_over_the_limit_are_replaced_in_a_stream() -> None:
    shop = Shop(limits=Limits(bytes_out=4096))

    @shop.app.query
    def long(size: int) -> str:
        return "x" * size

    async with over_http(shop.app, R2) as client:
        batch = [tool("long", 1, size=3000), tool("long", 2, size=3000)]
        answered = await preferring(client, batch).started()
        messages = by_id(await answered.messages())
    assert "result" in messages[1]
    assert messages[2]["error"]["data"]["limit"] == "bytes_out"


async def test_array_progress_on_stdio_precedes_the_answers() -> None:
    async with over_stdio(Shop().app, R2) as client:
        client.write(
            [
                tool("steps", 1, {"progressToken": "a"}, count=2),
                tool("steps", 2, {"progressToken": "b"}, count=1),
            ]
        )
        answers = await client.line()
    assert by_id(answers).keys() == {1, 2}
    assert sorted(params["progressToken"] for params in client.told("notifications/progress")) == [
        "a",
        "a",
        "b",
    ]


@every_transport
async def test_array_entry_is_cancelled_and_the_others_continue(transport: str) -> None:
    """Trap 11."""
    shop = Shop()
    async with speak(transport, shop.app, R2) as client:
        batch = [tool("wait", 1), tool("look", 2)]
        if isinstance(client, LineClient):
            client.write(batch)
        else:
            answered = client.post(batch)
        async with asyncio.timeout(PATIENCE):
            await shop.entered.wait()
        await client.notify(
            "notifications/cancelled", {"requestId": 1, "reason": "changed my mind"}
        )
        answers = await (client.line() if isinstance(client, LineClient) else answered.json())
    assert [answer["id"] for answer in answers] == [2]


@every_transport
async def test_array_whose_requests_are_all_cancelled_gets_no_answer(transport: str) -> None:
    """Matrix 1.3: a 202-style empty body, not `[]`; here the cancellation is in the same array."""
    batch = [tool("wait", 1), notification("notifications/cancelled", {"requestId": 1})]
    async with speak(transport, Shop().app, R2) as client:
        await send_in_vain(client, batch)


async def test_array_that_waits_does_not_block_later_lines() -> None:
    shop = Shop()
    async with over_stdio(shop.app, R2) as client:
        client.write([tool("wait", "w")])
        assert await client.tool("look")
        shop.gate.set()
        assert [answer["id"] for answer in await client.line()] == ["w"]


MODEL = {"role": "assistant", "model": "m", "content": {"type": "text", "text": "deep"}}


@every_transport
async def test_array_of_responses_answers_questions_of_entries(transport: str) -> None:
    """V1 in both roles: the client may answer several requests of the server with one array of
    responses.
    """
    async with speak(transport, Shop().app, R2, capabilities={"sampling": {}}) as client:
        batch = [tool("think", 1, about="a"), tool("think", 2, about="b")]
        if isinstance(client, LineClient):
            client.write(batch)
            asked = [await client.hear(), await client.hear()]
            client.write([response(question["id"], MODEL) for question in asked])
            answers = await client.line()
        else:
            answered = client.post(batch)
            asked = [await answered.message(), await answered.message()]
            taken = await client.post(
                [response(question["id"], MODEL) for question in asked]
            ).started()
            assert (taken.status, await taken.read()) == (202, b"")
            answers = await answered.messages()
    assert {question["method"] for question in asked} == {"sampling/createMessage"}
    assert {id: text(answer) for id, answer in by_id(answers).items()} == {1: "deep", 2: "deep"}


async def test_array_is_not_cancelled_when_its_client_disconnects() -> None:
    shop = Shop()
    async with over_http(shop.app, R2) as client:
        answered = client.post([tool("wait", 1), tool("buy", 2, {KEY: "k"}, what="a")])
        async with asyncio.timeout(PATIENCE):
            await shop.entered.wait()
        answered.leave()
        shop.gate.set()
        again = await client.tool("buy", {"what": "a"}, meta={KEY: "k"})
    assert again["content"][0]["text"] == "a"
    assert shop.ran == ["a", "a."]
