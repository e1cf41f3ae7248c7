"""The MCP client against scripted servers: negotiation, sessions, streams, headers, lists, retries."""

import asyncio
import json
import math
import sys
from typing import Any

import pytest

from tests.client.conftest import nothing_is_left as nothing_is_left
from tests.client.peers import until
from tests.clock import LoopClock
from tests.mcp.asgi import R2, R3, R4, R5, REVISIONS
from tests.mcp.clients import client_of
from tests.mcp.scripted import (
    PATIENCE,
    Reply,
    Scripted,
    Seen,
    event,
    newest,
    older,
    refusal,
    result,
    text,
)
from wirecall import Retry, RpcError
from wirecall.errors import (
    BadAnswer,
    ConnectionLost,
    HeaderMismatch,
    NotSent,
    Refused,
    TimedOut,
    UnknownVersion,
)
from wirecall.mcp.client.inbox import Change
from wirecall.mcp.headers import fault_of, rendered
from wirecall.testing import FakeClock

QUICK = Retry(attempts=5, first=0.001, cap=0.01)
META = "io.modelcontextprotocol/"
TOOL = {"name": "t", "inputSchema": {"type": "object"}}
KEYS: dict[str, Any] = {"experimental": {"io.wirecall/idempotency": {}}, "tools": {}}


def called(message: Any, _seen: Any) -> Reply:
    return result(message, {"tools": [TOOL]} if message["method"] == "tools/list" else text("done"))


# --- finding a revision ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "discovery",
    [
        Reply(status=400),
        Reply(
            {"jsonrpc": "2.0", "id": None, "error": {"code": -32000, "message": "no session"}}, 400
        ),
        Reply(
            {"jsonrpc": "2.0", "id": "server-error", "error": {"code": -32602, "message": "?"}}, 400
        ),
        Reply(status=404),
        Reply(status=405),
        Reply(status=500),
        Reply({"jsonrpc": "2.0", "id": 1, "result": {}}),
        Reply({"jsonrpc": "2.0", "id": 1, "error": {"code": -32601, "message": "what?"}}),
    ],
)
async def test_any_other_answer_to_the_newest_revision_leads_to_a_handshake(
    discovery: Reply,
) -> None:
    """Trap 24: the body of a 400 decides, not a single code."""
    answer = older(called, "2025-06-18")

    def replied(message: Any, seen: Any) -> Any:
        if seen.method == "server/discover":
            return discovery
        return answer(message, seen)

    async with Scripted(replied) as server, client_of(server.url) as client:
        assert client.revision == R3 and (await client.call_tool("t")).text == "done"
    assert server.methods() == [
        "server/discover",
        "initialize",
        "notifications/initialized",
        "tools/call",
    ]
    assert server.seen[-1].verb == "DELETE"


async def test_version_that_is_not_served_is_replaced_by_a_listed_one() -> None:
    """Trap 23: even if the server lists the very one that was sent; and for any call, not only the
    first.
    """
    refused: set[str] = set()

    def answer(message: Any, seen: Seen) -> Reply:
        if seen.method in ("server/discover", "tools/call") and seen.method not in refused:
            refused.add(seen.method)
            return refusal(
                message, -32022, "no", {"supported": [R5, "2027-01-01"], "requested": R5}, 400
            )
        return newest(called)(message, seen)  # type: ignore[return-value]

    async with Scripted(answer) as server, client_of(server.url) as client:
        assert client.revision == R5 and (await client.call_tool("t")).text == "done"
    assert server.methods() == ["server/discover", "server/discover", "tools/call", "tools/call"]
    ids = [seen.body["id"] for seen in server.seen]
    assert len(set(ids)) == 4


async def test_server_of_other_revisions_only_raises_unknown_version() -> None:
    refuse = lambda message, _: refusal(message, -32022, "no", {"supported": ["2027-01-01"]}, 400)  # noqa: E731
    async with Scripted(refuse) as server:
        with pytest.raises(UnknownVersion):
            async with client_of(server.url):
                raise AssertionError
        assert server.methods() == ["server/discover"]
    async with Scripted(older(called, "1999-01-01")) as server:
        with pytest.raises(UnknownVersion, match="1999-01-01"):
            async with client_of(server.url):
                raise AssertionError


@pytest.mark.parametrize("revision", REVISIONS)
async def test_pinned_revision_is_the_only_one_that_is_tried(revision: str) -> None:
    async with Scripted(older(called, R4 if revision == R3 else R3)) as server:
        with pytest.raises((UnknownVersion, Refused, RpcError)):
            async with client_of(server.url, revision):
                raise AssertionError
    assert server.methods() == ["server/discover" if revision == R5 else "initialize"]


async def test_refused_client_gets_the_refusal() -> None:
    async with Scripted(lambda message, seen: Reply(status=401)) as server:
        with pytest.raises(Refused) as barred:
            async with client_of(server.url):
                raise AssertionError
    assert barred.value.status == 401 and server.methods() == ["server/discover"]


@pytest.mark.parametrize("revision", [None, R5])
async def test_server_without_a_handshake_works_without_one(revision: str | None) -> None:
    """2026-07-28 without `server/discover`: the server must have it, but the client can do without."""

    def answer(message: Any, seen: Seen) -> Reply:
        known = seen.method == "tools/call" and seen.headers.get("mcp-protocol-version") == R5
        return result(message, text("done")) if known else refusal(message, -32601, status=404)

    async with Scripted(answer) as server, client_of(server.url, revision) as client:
        assert client.revision == R5 and (await client.call_tool("t")).text == "done"


async def test_server_that_never_answers_is_given_up_in_time(clock: LoopClock) -> None:
    async def never(_message: Any, _seen: Seen) -> Reply:
        clock.advance(PATIENCE / 2)
        await server.over.wait()
        return Reply()

    async with Scripted(never) as server:
        with pytest.raises(TimedOut):
            async with client_of(server.url, timeout=PATIENCE / 2, clock=clock):
                raise AssertionError
    assert server.methods() == ["server/discover"]


@pytest.mark.parametrize(
    ("endpoint", "error"),
    [("/mcp?session=1", None), ("http://127.0.0.1:9/mcp", Refused), (None, Refused)],
)
async def test_old_transport_is_detected_and_stays_at_its_server(
    endpoint: str | None, error: Any
) -> None:
    """2024-11-05: a stream names an address; the client does not send to another host."""
    answers: list[str] = []

    async def answer(message: Any, seen: Seen) -> Reply:
        if seen.verb == "GET" and endpoint is not None:
            return Reply(events=[f"event: endpoint\ndata: {endpoint}\n\n"], more=served)
        if "session" not in seen.query:
            return Reply(status=405)
        if "id" in message:
            got = (
                {"protocolVersion": "2024-11-05", "capabilities": {}}
                if seen.method == "initialize"
                else text("done")
            )
            answers.append(event({"jsonrpc": "2.0", "id": message["id"], "result": got}))
        return Reply(status=202)

    async def served() -> str | None:
        await until(lambda: answers or server.over.is_set())
        return answers.pop() if answers else None

    async with Scripted(answer) as server:
        if error is not None:
            with pytest.raises(error):
                async with client_of(server.url):
                    raise AssertionError
            return
        async with client_of(server.url) as client:
            assert client.revision == "2024-11-05" and (await client.call_tool("t")).text == "done"


OLD_CHILD = """
import json, sys
silent, revision = sys.argv[1] == "silent", "2025-11-25"
for line in sys.stdin:
    message = json.loads(line)
    if isinstance(message, list):
        continue
    say = lambda **more: print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **more}), flush=True)
    if message["method"] == "server/discover":
        if sys.argv[1] == "dies":
            sys.exit(3)
        if not silent:
            say(error={"code": -32602, "message": "what?"})
    elif message["method"] == "initialize":
        revision = message["params"]["protocolVersion"]
        say(result={"protocolVersion": revision, "capabilities": {}, "serverInfo": {"name": "old"}})
    elif message["method"] == "tools/call":
        say(result={"content": [{"type": "text", "text": "done"}]})
    elif "id" in message:
        say(result={})
"""


@pytest.mark.parametrize("manner", ["answers", "silent", "dies"])
async def test_old_server_on_a_pipe_is_detected(
    manner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wirecall.mcp.client.negotiate.PROBE", 0.2)
    async with client_of([sys.executable, "-c", OLD_CHILD, manner]) as client:
        assert client.revision == R4 and (await client.call_tool("t")).text == "done"


async def test_server_on_a_pipe_that_drops_arrays_gets_single_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """V7: on a pipe a server cannot refuse an array; the client risks only a ping to find out."""
    monkeypatch.setattr("wirecall.mcp.client.conversation.ARRAY_PROBE", 0.3)
    async with client_of([sys.executable, "-c", OLD_CHILD, "answers"], R2) as client:
        for _ in range(2):
            async with client.batch() as batch:
                entries = [batch.call_tool("t") for _ in range(3)]
            assert (batch.wire, batch.reason) == ("singles", "the server did not answer an array")
            assert [entry.result().text for entry in entries] == ["done"] * 3


# --- sessions and streams -------------------------------------------------------------------------


async def test_session_headers_are_sent() -> None:
    async with Scripted(older(called, R4)) as server, client_of(server.url) as client:
        await client.call_tool("t")
    versions = [seen.headers.get("mcp-protocol-version") for seen in server.seen]
    sessions = [seen.headers.get("mcp-session-id") for seen in server.seen]
    assert versions == [R5, None, R4, R4, R4, R4] and sessions == [
        None,
        None,
        "s1",
        "s1",
        "s1",
        "s1",
    ]
    assert [seen.verb for seen in server.seen] == ["POST", "POST", "POST", "GET", "POST", "DELETE"]
    assert all("mcp-method" not in seen.headers for seen in server.seen[1:])


async def test_lost_session_is_renewed_once() -> None:
    """Trap 44: 404 for a session; the client resends the message, whatever it is, since it did not
    run.
    """
    live = ["s1"]

    def answer(message: Any, seen: Seen) -> Reply:
        if seen.method == "initialize":
            got = {"protocolVersion": R4, "capabilities": {}}
            return result(message, got, headers={"mcp-session-id": live[0]})
        if seen.headers.get("mcp-session-id") != live[0]:
            return Reply(status=404)
        made = older(called, R4)(message, seen)
        assert isinstance(made, Reply)
        return made

    async with Scripted(answer) as server, client_of(server.url, R4) as client:
        live[0] = "s2"
        assert (await client.call_tool("t")).text == "done"
        live[0] = "never"
        answers = await asyncio.gather(*(client.call_tool("t") for _ in range(4)))
        assert [one.text for one in answers] == ["done"] * 4
    assert server.methods().count("initialize") == 3


async def test_session_that_cannot_be_renewed_is_retried_by_the_next_call() -> None:
    state = {"session": "s1", "is_well": True}

    def answer(message: Any, seen: Seen) -> Any:
        if seen.method == "initialize":
            got = result(
                message, {"protocolVersion": R4}, headers={"mcp-session-id": state["session"]}
            )
            return got if state["is_well"] else Reply(status=500)
        if seen.headers.get("mcp-session-id") != state["session"]:
            return Reply(status=404 if "mcp-session-id" in seen.headers else 400)
        return older(called, R4)(message, seen)

    async with Scripted(answer) as server, client_of(server.url, R4) as client:
        state.update(session="s2", is_well=False)
        with pytest.raises(BadAnswer, match="500"):
            await client.call_tool("t")
        state["is_well"] = True
        assert (await client.call_tool("t")).text == "done"


async def test_process_with_a_slow_handshake_does_not_get_a_second_one() -> None:
    """A call that times out during the handshake with a new process leaves nothing half done."""
    async with client_of([sys.executable, "-c", OLD_CHILD, "answers"], R4) as client:
        way: Any = client._conversation.link
        way._pipe._process.kill()
        await until(lambda: way._pipe is None)
        with pytest.raises(NotSent):
            await client.call_tool("t", timeout=0.01)
        assert (await client.call_tool("t")).text == "done"


async def test_notifications_may_be_answered_with_a_body() -> None:
    """Trap 43."""

    def answer(message: Any, seen: Seen) -> Any:
        if seen.method == "notifications/initialized":
            return Reply({"jsonrpc": "2.0", "result": {}})
        return older(called, R4)(message, seen)

    async with Scripted(answer) as server, client_of(server.url, R4) as client:
        assert (await client.call_tool("t")).text == "done"


@pytest.mark.parametrize("tear", [False, True])
async def test_stream_that_ends_early_is_resumed(tear: bool) -> None:
    """Trap 48: also after a clean end, not before the time that `retry` names, and from the last
    event.
    """
    times: list[float] = []

    def answer(message: Any, seen: Seen) -> Reply:
        times.append(asyncio.get_running_loop().time())
        if seen.verb == "POST":
            ids.append(message["id"])
            return Reply(events=["id: a.0\nretry: 300\ndata: \n\n", "data: {half"], tear=tear)
        if seen.headers["last-event-id"] == "a.0":
            progress = {
                "jsonrpc": "2.0",
                "method": "notifications/progress",
                "params": {"progressToken": ids[0], "progress": 1},
            }
            return Reply(
                events=["id: a.1\nretry: 0\ndata: \n\n", event(progress, "a.2")], tear=tear
            )
        assert seen.headers["last-event-id"] == "a.2"
        return Reply(
            events=[event({"jsonrpc": "2.0", "id": ids[0], "result": text("done")}, "a.3")]
        )

    ids: list[int] = []
    received: list[float] = []
    async with Scripted(older(answer, R4)) as server, client_of(server.url, R4) as client:
        done = await client.call_tool("t", progress=lambda progress, *_: received.append(progress))
    assert done.text == "done" and received == [1] and server.methods().count("tools/call") == 1
    assert times[1] - times[0] >= 0.29


async def test_stream_that_cannot_be_resumed_is_a_lost_connection() -> None:
    def answer(message: Any, seen: Seen) -> Reply:
        return (
            Reply(events=["id: a.0\nretry: 1\ndata: \n\n"])
            if seen.verb == "POST"
            else Reply(status=404)
        )

    async with Scripted(older(answer, R4)) as server, client_of(server.url, R4) as client:
        with pytest.raises(ConnectionLost, match="cannot be resumed") as lost:
            await client.call_tool("t")
        assert lost.value.ran == "unknown"


async def test_broken_stream_at_the_newest_revision_is_retried_with_a_new_id_and_the_same_key() -> (
    None
):
    def answer(message: Any, seen: Seen) -> Reply:
        if len(server.seen) < 4:
            progress = {
                "progressToken": message["params"]["_meta"].get("progressToken", 0),
                "progress": 1,
            }
            got = {"jsonrpc": "2.0", "method": "notifications/progress", "params": progress}
            return Reply(events=[event(got, "ignored")], tear=len(server.seen) == 2)
        return result(message, text("done"))

    async with (
        Scripted(newest(answer, KEYS)) as server,
        client_of(server.url, retry=QUICK) as client,
    ):
        received: list[float] = []
        assert (
            await client.call_tool("t", progress=lambda done, *_: received.append(done))
        ).text == "done"
    attempts = [seen.body for seen in server.seen if seen.method == "tools/call"]
    keys = {body["params"]["_meta"]["io.wirecall/idempotency-key"] for body in attempts}
    assert len(attempts) == 3 and len(keys) == 1 and len({body["id"] for body in attempts}) == 3
    assert {seen.verb for seen in server.seen} == {"POST"} and received == [1, 1]
    assert not any({"last-event-id", "mcp-session-id"} & set(seen.headers) for seen in server.seen)


async def test_tool_of_a_foreign_server_is_repeated_only_if_the_server_is_trusted() -> None:
    """A server that does not honour keys still gets a given key, but the key does not make a retry
    safe.
    """
    hints = {
        "name": "t",
        "inputSchema": {"type": "object"},
        "annotations": {"idempotentHint": True},
    }
    lost: list[Any] = []

    def answer(message: Any, _seen: Seen) -> Reply:
        if message["method"] == "tools/list":
            return result(message, {"tools": [hints]})
        lost.append(message["params"]["_meta"].get("io.wirecall/idempotency-key"))
        return (
            Reply(events=["data: {\n\n"], tear=True)
            if len(lost) % 2
            else result(message, text("done"))
        )

    async with Scripted(newest(answer)) as server:
        async with client_of(server.url, retry=QUICK) as client:
            with pytest.raises(ConnectionLost):
                await client.call_tool("t", key="k")
            lost.append(None)
            with pytest.raises(ConnectionLost):
                await client.call_tool("t")
            lost.append(None)
            assert (await client.call_tool("t", query=True)).text == "done"
        async with client_of(server.url, retry=QUICK, trust=True) as client:
            assert (await client.call_tool("t")).text == "done"
    assert lost == ["k", None, None, None, None, None, None, None]


# --- arrays of 2025-03-26 -------------------------------------------------------------------------


async def test_arrays_are_accepted_wherever_they_may_arrive() -> None:
    """Trap 10: in JSON, in an event, and with the server's own requests in them."""
    answered: list[Any] = []

    def answer(message: Any, seen: Seen) -> Reply:
        if isinstance(message, list):
            return Reply(
                [
                    {"jsonrpc": "2.0", "id": one["id"], "result": text(str(one["id"]))}
                    for one in reversed(message)
                ]
            )
        if "result" in message:
            answered.append(message)
            return Reply(status=202)
        reply = {"jsonrpc": "2.0", "id": message["id"], "result": text("done")}
        ping = {"jsonrpc": "2.0", "id": "p", "method": "ping"}
        note = {
            "jsonrpc": "2.0",
            "method": "notifications/message",
            "params": {"level": "info", "data": 1},
        }
        return (
            Reply([reply])
            if seen.headers.get("x-way") == "json"
            else Reply(events=[event([ping, note]), event([reply])])
        )

    logs: list[Any] = []
    async with (
        Scripted(older(answer, R2)) as server,
        client_of(server.url, R2, on_log=logs.append) as client,
    ):
        assert (await client.call_tool("t")).text == "done"
        async with client.batch() as batch:
            entries = [batch.call_tool("t") for _ in range(3)]
        assert batch.wire == "array" and [entry.result().text for entry in entries] == [
            str(entry.id) for entry in entries
        ]
        await until(lambda: answered)
    assert answered == [{"jsonrpc": "2.0", "id": "p", "result": {}}] and logs[0].data == 1
    async with (
        Scripted(older(answer, R2)) as server,
        client_of(server.url, R2, headers={"x-way": "json"}) as client,
    ):
        assert (await client.call_tool("t")).text == "done"
    async with (
        Scripted(older(answer, R4)) as server,
        client_of(server.url, R4, headers={"x-way": "json"}) as client,
    ):
        with pytest.raises(BadAnswer, match="array"):
            await client.call_tool("t")


@pytest.mark.parametrize("id", [None, "server-error"])
async def test_server_that_refuses_arrays_gets_single_calls(id: Any) -> None:
    """V7: nothing in the refused array ran, so the client resends the same calls under the same
    keys.
    """

    def answer(message: Any, seen: Seen) -> Reply:
        if isinstance(message, list):
            return Reply(
                {
                    "jsonrpc": "2.0",
                    "id": id,
                    "error": {"code": -32602, "message": "Validation error"},
                },
                400,
            )
        return called(message, seen)

    async with (
        Scripted(older(answer, R2, capabilities=KEYS)) as server,
        client_of(server.url, R2) as client,
    ):
        for _ in range(2):
            async with client.batch() as batch:
                entries = [batch.call_tool("t") for _ in range(3)]
            assert batch.wire == "singles" and "refused an array" in batch.reason
            assert [entry.result().text for entry in entries] == ["done"] * 3
    arrays = [seen.body for seen in server.seen if isinstance(seen.body, list)]
    assert len(arrays) == 1
    keys = [one["params"]["_meta"] for one in arrays[0]]
    assert (
        keys
        == [seen.body["params"]["_meta"] for seen in server.seen if seen.method == "tools/call"][:3]
    )


# --- headers of 2026-07-28 ------------------------------------------------------------------------


def test_header_values_are_encoded() -> None:
    plain = ["a", "us west 1", "", "a=?base64?b?=", 7, -3, True]
    assert [rendered(value) for value in plain] == [
        "a",
        "us west 1",
        "",
        "a=?base64?b?=",
        "7",
        "-3",
        "true",
    ]
    assert rendered("é") == "=?base64?w6k=?=" and rendered(" a") == "=?base64?IGE=?="
    assert rendered("=?base64?YQ==?=").startswith("=?base64?PT9")
    assert rendered("a\nb").startswith("=?base64?") and rendered("\x7f").startswith("=?base64?")


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"properties": {"a": {"type": "string", "x-mcp-header": "A"}}}, None),
        ({"properties": {"x-mcp-header": {"type": "string"}}}, None),
        (
            {"properties": {"a": {"properties": {"b": {"type": "boolean", "x-mcp-header": "B"}}}}},
            None,
        ),
        ({"properties": {"a": {"default": {"x-mcp-header": "A"}}}}, None),
        ({"properties": {"a": {"type": "number", "x-mcp-header": "A"}}}, "marks a 'number'"),
        ({"properties": {"a": {"type": "string", "x-mcp-header": ""}}}, "not a valid header name"),
        (
            {"properties": {"a": {"type": "string", "x-mcp-header": "a b"}}},
            "not a valid header name",
        ),
        ({"properties": {"a": {"type": "string", "x-mcp-header": 7}}}, "not a valid header name"),
        (
            {
                "properties": {
                    n: {"type": "string", "x-mcp-header": h} for n, h in (("a", "X"), ("b", "x"))
                }
            },
            "twice",
        ),
        (
            {"properties": {"a": {"items": {"type": "string", "x-mcp-header": "A"}}}},
            "on plain properties only",
        ),
        (
            {"allOf": [{"properties": {"a": {"type": "string", "x-mcp-header": "A"}}}]},
            "on plain properties only",
        ),
        ({"$defs": {"d": {"type": "string", "x-mcp-header": "A"}}}, "on plain properties only"),
    ],
)
def test_header_marks_are_checked_against_the_rules(schema: Any, fault: str | None) -> None:
    found = fault_of(schema)
    assert (found is None) if fault is None else (found is not None and fault in found)


async def test_headers_repeat_the_body_and_are_corrected_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """-32020: the client reads the list of tools again, and resends the call accordingly; once."""
    marked = {
        "type": "object",
        "properties": {"region": {"type": "string", "x-mcp-header": "Region"}},
    }
    broken = {"type": "object", "properties": {"x": {"type": "number", "x-mcp-header": "X"}}}
    strict = [True]

    def answer(message: Any, seen: Seen) -> Reply:
        if seen.method == "tools/list":
            return result(
                message,
                {
                    "tools": [
                        {"name": "t", "inputSchema": marked},
                        {"name": "bad", "inputSchema": broken},
                    ]
                },
            )
        if "mcp-param-region" not in seen.headers or strict[0] is None:
            return refusal(message, -32020, "missing", status=400)
        return result(message, text(seen.headers["mcp-param-region"]))

    async with Scripted(newest(answer)) as server, client_of(server.url) as client:
        assert (await client.call_tool("t", {"region": "north"})).text == "north"
        assert (await client.call_tool("t", {"region": "nörd"})).text == "=?base64?bsO2cmQ=?="
        assert [tool.name for tool in await client.list_tools()] == [
            "t"
        ] and "'bad' is left out" in caplog.text
        with pytest.raises(NotSent, match="x-mcp-header"):
            await client.call_tool("bad", {"x": 1})
        strict[0] = None  # type: ignore[call-overload]
        with pytest.raises(HeaderMismatch):
            await client.call_tool("t", {"region": "south"})
    methods = server.methods()
    assert methods[:4] == ["server/discover", "tools/call", "tools/list", "tools/call"]
    for seen in server.seen:
        meta = seen.body["params"]["_meta"]
        assert seen.headers["mcp-protocol-version"] == R5 == meta[f"{META}protocolVersion"]
        assert (
            seen.headers["mcp-method"] == seen.method
            and meta[f"{META}clientInfo"]["name"] == "wirecall"
        )
        assert seen.headers.get("mcp-name") == seen.body["params"].get("name")


# --- lists ----------------------------------------------------------------------------------------


async def test_pages_are_followed_to_the_end() -> None:
    """Trap 54: an empty string is a cursor.

    The client omits an entry that it cannot read, and no other.
    """
    pages: dict[Any, Any] = {
        None: {"tools": [{"name": "a"}, {"name": 7}], "nextCursor": ""},
        "": {"tools": [{"name": "b"}], "nextCursor": "x"},
        "x": {
            "tools": [{"name": "c", "inputSchema": {"$ref": "http://127.0.0.1:9/never"}}],
            "nextCursor": None,
        },
    }
    answer = lambda message, _: result(message, pages[message.get("params", {}).get("cursor")])  # noqa: E731
    async with Scripted(older(answer, R4)) as server, client_of(server.url, R4) as client:
        tools = await client.list_tools()
    assert [tool.name for tool in tools] == ["a", "b", "c"]
    assert tools[2].input_schema == {"$ref": "http://127.0.0.1:9/never"}


async def test_list_without_an_end_is_a_bad_answer() -> None:
    answer = lambda message, _: result(message, {"tools": [], "nextCursor": "same"})  # noqa: E731
    async with Scripted(older(answer, R4)) as server, client_of(server.url, R4) as client:
        with pytest.raises(BadAnswer, match="no end"):
            await client.list_tools()
    assert server.methods().count("tools/list") == 2


async def test_list_that_changes_while_it_is_read_is_read_again() -> None:
    asked: list[Any] = []

    def answer(message: Any, _seen: Seen) -> Reply:
        cursor = message.get("params", {}).get("cursor")
        asked.append(cursor)
        if cursor == "old":
            return refusal(message, -32602, "no such cursor")
        following = {None: "old" if len(asked) == 1 else "new"}.get(cursor)
        return result(
            message,
            {"tools": [{"name": str(cursor)}], **({"nextCursor": following} if following else {})},
        )

    async with Scripted(older(answer, R4)) as server, client_of(server.url, R4) as client:
        assert [tool.name for tool in await client.list_tools()] == ["None", "new"]
    assert asked == [None, "old", None, "new"]


async def test_list_gives_each_page_its_own_ttl() -> None:
    def answer(message: Any, _seen: Seen) -> Reply:
        first = "cursor" not in message["params"]
        return result(
            message,
            {
                "prompts": [],
                "ttlMs": 60_000 if first else 2_000,
                **({"nextCursor": "2"} if first else {}),
            },
        )

    clock = FakeClock()
    async with Scripted(newest(answer)) as server, client_of(server.url, clock=clock) as client:
        for now, count in ((0.0, 2), (1.9, 2), (2.1, 4)):
            clock.now = now
            await client.list_prompts()
            assert server.methods().count("prompts/list") == count


# --- questions and changes ------------------------------------------------------------------------


async def test_state_of_a_call_is_sent_back_byte_by_byte_with_its_key() -> None:
    state = '{"b": 1,  "a":\\u00e9}'

    def answer(message: Any, _seen: Seen) -> Reply:
        if "requestState" not in message["params"]:
            return result(message, {"resultType": "input_required", "requestState": state})
        return result(message, {"resultType": "complete", **text("done")})

    async with Scripted(newest(answer, KEYS)) as server, client_of(server.url) as client:
        assert (await client.call_tool("t", {"a": 1})).text == "done"
    first, second = (seen.body for seen in server.seen[1:])
    assert (
        second["params"] == {**first["params"], "requestState": state}
        and first["id"] != second["id"]
    )


@pytest.mark.parametrize(
    ("got", "error"),
    [
        ({"resultType": "job", "taskId": "1"}, "unknown type 'job'"),
        ({"resultType": "task", "taskId": "1"}, "cannot be read"),
        (
            {"resultType": "input_required", "inputRequests": {"a": {"method": "roots/list"}}},
            "cannot answer",
        ),
        ({"resultType": "input_required", "inputRequests": 7}, "cannot be read"),
        ({"resultType": "input_required", "requestState": "again"}, "still asks"),
    ],
)
async def test_invalid_result_is_reported(got: Any, error: str) -> None:
    async with (
        Scripted(newest(lambda message, _: result(message, got))) as server,
        client_of(server.url) as client,
    ):
        with pytest.raises((BadAnswer, NotSent), match=error):
            await client.call_tool("t")


async def test_request_of_the_newest_revision_is_not_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def answer(message: Any, _seen: Seen) -> Reply:
        asked = {"jsonrpc": "2.0", "id": 1, "method": "roots/list"}
        return Reply(
            events=[
                event(asked),
                event({"jsonrpc": "2.0", "id": message["id"], "result": text("done")}),
            ]
        )

    async with Scripted(newest(answer)) as server, client_of(server.url, roots=[]) as client:
        assert (await client.call_tool("t")).text == "done"
    assert server.methods() == ["server/discover", "tools/call"] and "gets no answer" in caplog.text


async def test_questions_that_cannot_be_answered_are_refused() -> None:
    """With a handshake, the server gets an answer, whatever a handler does."""
    answers: list[Any] = []
    asked = [
        ("roots/list", {}),
        ("tools/list", {}),
        ("elicitation/create", {"mode": "url"}),
        ("sampling/createMessage", {}),
    ]

    def answer(message: Any, _seen: Seen) -> Reply:
        if "method" not in message:
            answers.append((message["id"], message["error"]["code"]))
            return Reply(status=202)
        questions = [
            {"jsonrpc": "2.0", "id": n, "method": m, "params": p} for n, (m, p) in enumerate(asked)
        ]
        return Reply(
            events=[
                *map(event, questions),
                event({"jsonrpc": "2.0", "id": message["id"], "result": text("done")}),
            ]
        )

    def sample(_: Any) -> int:
        return 7

    async with (
        Scripted(older(answer, R4)) as server,
        client_of(server.url, R4, sample=sample, elicit=dict) as client,
    ):
        assert (await client.call_tool("t")).text == "done"
        await until(lambda: len(answers) == 4)
    assert sorted(answers) == [(0, -32601), (1, -32601), (2, -32602), (3, -32603)]


async def test_answer_that_json_cannot_carry_is_an_error_of_the_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server waits for an answer, so it gets one; the log says what the handler returned."""
    answers: list[Any] = []
    questions = [
        {"jsonrpc": "2.0", "id": n, "method": method, "params": {}}
        for n, method in enumerate(("elicitation/create", "sampling/createMessage", "roots/list"))
    ]

    def answer(message: Any, _seen: Seen) -> Reply:
        if "method" not in message:
            answers.append((message["id"], message["error"]["code"]))
            return Reply(status=202)
        return Reply(
            events=[
                *map(event, questions),
                event({"jsonrpc": "2.0", "id": message["id"], "result": text("done")}),
            ]
        )

    def roots() -> Any:
        raise RpcError(7, "no roots", {"why": math.nan})

    async with (
        Scripted(older(answer, R4)) as server,
        client_of(
            server.url, R4, elicit=lambda _: {"n": math.nan}, sample=lambda _: "\ud800", roots=roots
        ) as client,
    ):
        assert (await client.call_tool("t")).text == "done"
        await until(lambda: len(answers) == 3)
    assert sorted(answers) == [(0, -32603), (1, -32603), (2, -32603)]
    assert (
        caplog.text.count("cannot be written as JSON") == 3
        and "NaN and infinity are not JSON" in caplog.text
    )


async def test_stream_of_changes_that_breaks_is_requested_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("wirecall.mcp.client.inbox.FIRST", 0.01)

    def answer(message: Any, seen: Seen) -> Reply:
        meta = {f"{META}subscriptionId": message["id"]}
        ack = {"_meta": meta, "notifications": message["params"]["notifications"]}
        got = event(
            {"jsonrpc": "2.0", "method": "notifications/subscriptions/acknowledged", "params": ack}
        )
        again = server.methods().count("subscriptions/listen") > 1
        return Reply(events=[got], hold=again, tear=not again)

    async with Scripted(newest(answer)) as server, client_of(server.url) as client:
        listening = client.listen(prompts=True, uris=["x://y"])
        async with listening as changes:
            assert changes.honoured == {
                "promptsListChanged": True,
                "resourceSubscriptions": ["x://y"],
            }
            assert [await anext(changes), await anext(changes)] == [
                Change("prompts"),
                Change("updated", "x://y"),
            ]
    assert server.methods().count("subscriptions/listen") == 2


async def test_listening_to_a_server_without_subscriptions_raises() -> None:
    answer = newest(lambda message, _: refusal(message, -32601, status=404))
    async with Scripted(answer) as server, client_of(server.url) as client:
        with pytest.raises(RpcError, match="-32601"):
            async with client.listen(tools=True):
                raise AssertionError


async def test_subscription_that_fails_leaves_those_of_others_alone() -> None:
    def answer(message: Any, seen: Seen) -> Reply:
        return (
            refusal(message, -32602)
            if message["params"] == {"uri": "x://bad"}
            else result(message, {})
        )

    async with (
        Scripted(older(answer)) as server,
        client_of(server.url, R4) as client,
        client.listen(uris=["x://y"]),
    ):
        with pytest.raises(RpcError, match="-32602"):
            async with client.listen(uris=["x://bad", "x://y"]):
                raise AssertionError
        ended = [
            one.body["params"]["uri"]
            for one in server.seen
            if one.method == "resources/unsubscribe"
        ]
        assert "x://y" not in ended


@pytest.mark.parametrize("id", [{}, [], 1.5, None])
async def test_change_of_an_unknown_subscription_is_reported(id: Any) -> None:
    params = {"_meta": {f"{META}subscriptionId": id}}
    got = event({"jsonrpc": "2.0", "method": "notifications/tools/list_changed", "params": params})

    def answer(message: Any, seen: Seen) -> Reply:
        return Reply(
            events=[got, event({"jsonrpc": "2.0", "id": message["id"], "result": text("done")})]
        )

    received: list[Change] = []
    async with (
        Scripted(older(answer)) as server,
        client_of(server.url, R4, on_change=received.append) as client,
    ):
        assert (await client.call_tool("t")).text == "done"
    assert received == [Change("tools")]


# --- servers that talk nonsense -------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"7",
        b'{"jsonrpc":"2.0","id":99,"result":{}}',
        b'{"jsonrpc":"2.0","id":"2","result":{}}',
    ],
)
async def test_nonsense_is_a_bad_answer_to_its_own_call_only(body: bytes) -> None:
    def answer(message: Any, seen: Seen) -> Reply:
        if message["params"]["name"] == "bad":
            return (
                Reply(events=[f"data: {body.decode()}\n\n"])
                if seen.headers.get("x-way")
                else Reply(_Literal(body))
            )
        return called(message, seen)

    for headers in ({}, {"x-way": "events"}):
        async with (
            Scripted(newest(answer)) as server,
            client_of(server.url, headers=headers) as client,
        ):
            with pytest.raises((BadAnswer, ConnectionLost)):
                await client.call_tool("bad")
            assert (await client.call_tool("good")).text == "done"


class _Literal(dict[str, Any]):
    """A body that is sent unchanged."""

    def __init__(self, body: bytes) -> None:
        super().__init__()
        self.body = body


_dumps = json.dumps


@pytest.fixture(autouse=True)
def literal_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.mcp.scripted.json.dumps",
        lambda value: value.body.decode() if isinstance(value, _Literal) else _dumps(value),
    )
