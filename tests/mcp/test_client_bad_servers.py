"""Servers of MCP that misbehave, on raw sockets: every call ends with an error that docs/client.md
lists, in time.
"""

import asyncio
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from tests.client.conftest import nothing_is_left as nothing_is_left
from tests.client.peers import PATIENCE, Peer, Writer, http, until
from tests.clock import LoopClock
from tests.mcp.bad_peers import QUICK, Answer, McpPeer, encode, no_stream, result, stream
from tests.mcp.clients import client_of
from wirecall.errors import BadAnswer, ConnectionLost, NotAuthorized, Refused, TimedOut
from wirecall.mcp.client import results
from wirecall.testing import FakeClock

done = result({"resultType": "complete", "content": []})


# --- the session id -------------------------------------------------------------------------------


@pytest.mark.parametrize("session", [b"a\x01b", b"\x7f", b"a\tb", b"\x1b[31m", b"\xff\xfe"])
async def test_session_id_with_control_characters_is_a_bad_answer(session: bytes) -> None:
    async with McpPeer(done, session=session) as peer:
        with pytest.raises(
            BadAnswer, match="the session id must be text without control"
        ) as caught:
            async with client_of(peer.url, "2025-11-25"):
                raise AssertionError
        assert caught.value.ran == "unknown"
        assert peer.methods() == ["initialize"]  # the client never sends it back


@pytest.mark.parametrize("session", [b"a b", b"x" * 8000, "é".encode()])
async def test_session_id_without_control_characters_is_sent_back_unchanged(session: bytes) -> None:
    async with McpPeer(done, session=session) as peer, client_of(peer.url, "2025-11-25") as client:
        await client.call_tool("t")
    assert all(session in head for head in peer.heads[1:])


async def test_session_id_that_is_empty_counts_as_none() -> None:
    async with McpPeer(done, session=b"") as peer, client_of(peer.url, "2025-11-25") as client:
        await client.call_tool("t")
    assert not any(b"mcp-session-id" in head.lower() for head in peer.heads)


# --- streams --------------------------------------------------------------------------------------


def resumed(answer: Answer) -> Answer:
    """Answer GETs that resume a stream; there is no standing stream."""
    return lambda head: answer(head) if b"last-event-id" in head.lower() else no_stream(head)


async def test_stream_with_retry_0_is_resumed_with_a_pause() -> None:
    """`retry: 0` with a new event id each time: there is progress, so the client pauses and
    continues.
    """
    clock = FakeClock()
    ids = list[int]()
    places = iter(range(100))

    def begin(message: Any) -> bytes:
        ids.append(message["id"])
        return stream(b"id: begin\nretry: 0\n\n")(message)

    def go_on(head: Any) -> bytes:
        place = next(places)
        if place < 30:
            return stream(b"id: n%d\nretry: 0\n\n" % place)(head)
        return stream(b'data: {"jsonrpc":"2.0","id":%d,"result":{"content":[]}}\n\n' % ids[0])(head)

    async with (
        McpPeer(begin, get=resumed(go_on)) as peer,
        client_of(peer.url, "2025-11-25", clock=clock) as client,
    ):
        assert (await client.call_tool("t")).content == []
    assert len(clock.slept) == 31 and min(clock.slept) >= 0.05


async def test_stream_that_brings_nothing_is_resumed_less_and_less_often() -> None:
    clock = FakeClock()
    begin = stream(b"id: 1\nretry: 0\n\n")
    go_on = resumed(stream(b""))
    async with (
        McpPeer(begin, get=go_on) as peer,
        client_of(peer.url, "2025-11-25", clock=clock) as client,
    ):
        with pytest.raises(ConnectionLost, match="cannot be resumed") as caught:
            await client.call_tool("t")
        assert caught.value.ran == "unknown"
    assert clock.slept == sorted(clock.slept) and clock.slept[-1] > 1 and len(clock.slept) == 5


async def test_call_is_lost_if_its_client_is_closed_before_its_stream_is_resumed() -> None:
    """The call was sent and may have run, although the request for the rest of its stream cannot be
    sent.
    """
    is_pausing = asyncio.Event()
    may_go = asyncio.Event()

    class Pausing(FakeClock):
        async def sleep(self, seconds: float) -> None:
            is_pausing.set()
            await may_go.wait()

    async with McpPeer(stream(b"id: 1\nretry: 0\n\n")) as peer:
        async with client_of(peer.url, "2025-11-25", clock=Pausing()) as client:
            calling = asyncio.create_task(client.call_tool("t"))
            await is_pausing.wait()
        may_go.set()
        with pytest.raises(
            ConnectionLost, match="cannot be resumed: the client is closed"
        ) as caught:
            await calling
    assert caught.value.ran == "unknown"


async def test_call_is_lost_if_its_stream_is_resumed_without_a_token() -> None:
    """A token that expires between the call and its answer does not show whether the call ran."""

    async def token() -> str:
        if "tools/call" in peer.methods():
            raise NotAuthorized("the login has ended")
        return "secret"

    go_on = resumed(lambda _: http(b"", "401 Unauthorized"))
    peer = McpPeer(stream(b"id: 1\nretry: 0\n\n"), get=go_on)
    async with peer, client_of(peer.url, "2025-11-25", clock=FakeClock(), auth=token) as client:
        with pytest.raises(
            ConnectionLost, match="cannot be resumed: the login has ended"
        ) as caught:
            await client.call_tool("t")
    assert caught.value.ran == "unknown" and caught.value.status == 401


async def test_standing_stream_that_ends_at_once_is_reopened_every_half_minute() -> None:
    """After any number of tries: the pause does not double indefinitely."""
    clock = FakeClock()
    async with (
        McpPeer(done, get=stream(b"retry: 0\n\n")) as peer,
        client_of(peer.url, "2025-11-25", clock=clock),
    ):
        await until(lambda: len(clock.slept) > 1100)
    assert clock.slept[:3] == [0.4, 0.8, 1.6] and clock.slept[1100] == 30.0


@pytest.mark.parametrize("wish", [b"600000", b"9" * 12, b"9" * 5000])
async def test_retry_with_a_long_pause_is_honoured_up_to_the_deadline(
    wish: bytes, clock: LoopClock
) -> None:
    asked: list[bytes] = []

    def go_on(head: Any) -> bytes:
        asked.append(head)
        return no_stream(head)

    begin = stream(b"id: 1\nretry: " + wish + b"\n\n")
    async with (
        McpPeer(begin, get=resumed(go_on)) as peer,
        client_of(peer.url, "2025-11-25") as client,
    ):
        calling = asyncio.create_task(client.call_tool("t", timeout=PATIENCE / 2))
        await until(lambda: "tools/call" in peer.methods())
        clock.advance(PATIENCE / 2)
        with pytest.raises(TimedOut):
            await calling
    assert asked == []


async def test_event_id_that_does_not_fit_a_header_is_not_used_to_resume() -> None:
    begin = stream(b"id: a\x01b\nretry: 0\n\n")
    async with (
        McpPeer(begin, get=resumed(stream(b""))) as peer,
        client_of(peer.url, "2025-11-25", retry=QUICK) as client,
    ):
        with pytest.raises(ConnectionLost, match="cannot be resumed"):
            await client.call_tool("t")


@pytest.mark.parametrize(
    "address", ["http://[::1", "//[", "http://127.0.0.1:99999999/", "javascript:1", "\x01"]
)
async def test_client_does_not_wait_for_an_invalid_address(address: str) -> None:
    """Transport of 2024-11-05: with an invalid address, the error is the refusal of the newer
    transport.
    """

    async def behave(peer: Peer, _body: bytes, writer: Writer) -> None:
        is_get = peer.heads[-1].startswith(b"GET")
        writer.write(
            stream(f"event: endpoint\ndata: {address}\n\n".encode())(b"")
            if is_get
            else no_stream(b"")
        )
        if is_get:
            await writer.drain()
            writer.close()

    class Old(Peer):
        PATH = "/mcp"

    async with Old(behave) as peer:
        with pytest.raises(Refused, match="405"):
            async with client_of(peer.url, timeout=5.0):
                raise AssertionError


# --- the beginning --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("got", "slept"), [("7", [7.0, 7.0]), ("9" * 30, []), ("Fri, 31 Dec 9999 23:59:59 GMT", [])]
)
async def test_handshake_waits_as_long_as_the_server_asks_up_to_its_timeout(
    got: str, slept: list[float]
) -> None:
    clock = FakeClock()

    async def busy(_peer: Peer, _body: bytes, writer: Writer) -> None:
        writer.write(http(b"", "503 Service Unavailable", f"Retry-After: {got}"))

    async with Peer(busy) as peer:
        with pytest.raises(BadAnswer, match="503"):
            async with client_of(
                peer.url, "2025-11-25", clock=clock, chance=lambda: 0.0, timeout=20.0
            ):
                raise AssertionError
    assert clock.slept == slept


@pytest.mark.parametrize(
    "value", [5, [], {"protocolVersion": []}, b'{"x":' + b"[" * 900 + b"]" * 900 + b"}"]
)
async def test_invalid_answer_to_the_handshake_is_a_bad_answer(value: Any) -> None:
    async def behave(_peer: Peer, body: bytes, writer: Writer) -> None:
        writer.write(result(value)(msgspec.json.decode(body)))

    async with Peer(behave) as peer:
        with pytest.raises(BadAnswer):
            async with client_of(peer.url, "2025-11-25"):
                raise AssertionError


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_newest", [False, True])
@pytest.mark.parametrize(
    "where", [b'"structuredContent":%s', b'"_meta":{"a":%s}', b'"content":[{"type":"x","a":%s}]']
)
async def test_result_of_any_depth_is_read_or_is_a_bad_answer(
    where: bytes, is_newest: bool
) -> None:
    """Each decoder reaches the interpreter's limit somewhere below 1000: there is no third outcome."""
    depths = iter(range(880, 1000))

    def call(message: Any) -> bytes:
        depth = next(depths)
        got = (
            b'{"resultType":"complete","content":[],' + where % (b"[" * depth + b"]" * depth) + b"}"
        )
        return result(got)(message)

    async with McpPeer(call, is_newest=is_newest) as peer, client_of(peer.url) as client:
        for _ in range(120):
            with suppress(BadAnswer):
                assert not (await client.call_tool("t")).is_error


async def test_blob_that_is_not_base64_is_a_bad_answer() -> None:
    async with (
        McpPeer(result({"contents": [{"uri": "x://y", "blob": "é"}]})) as peer,
        client_of(peer.url) as client,
    ):
        with pytest.raises(BadAnswer, match="a blob that is not base64"):
            await client.read_resource("x://y")


@pytest.mark.parametrize("ttl", [b"9" * 400, b"[]", b"true", b"-1", b'"5"'])
async def test_list_may_name_any_time_to_live(ttl: bytes) -> None:
    got = b'{"resultType":"complete","tools":[],"ttlMs":' + ttl + b"}"
    async with McpPeer(result(got), is_newest=True) as peer, client_of(peer.url) as client:
        assert await client.list_tools() == []


TEXT = {"type": "text", "text": "fine"}


@pytest.mark.parametrize(
    "item",
    [
        {"type": "text", "text": 5},
        {**TEXT, "annotations": 5},
        {**TEXT, "_meta": []},
        {"type": ["text"]},
        "text",
        {"type": "image", "data": 5, "mimeType": "image/png"},
        {"type": "image", "data": "aGk=", "mimeType": []},
        {"type": "resource_link", "uri": 5, "name": "a"},
        {"type": "resource", "resource": 5},
        {"type": "resource", "resource": {"uri": "a:b", "text": 5}},
    ],
)
async def test_content_of_wrong_types_is_a_bad_answer_of_a_call_that_ran(item: Any) -> None:
    async with (
        McpPeer(result({"resultType": "complete", "content": [item]}), is_newest=True) as peer,
        client_of(peer.url, "2026-07-28") as client,
    ):
        with pytest.raises(BadAnswer) as caught:
            await client.call_tool("t", type=str)
        assert caught.value.ran == "yes"


async def test_content_that_lacks_a_member_is_returned_as_received() -> None:
    items = [{"type": "image", "data": "aGk="}, TEXT]
    async with (
        McpPeer(result({"resultType": "complete", "content": items}), is_newest=True) as peer,
        client_of(peer.url, "2026-07-28") as client,
    ):
        called = await client.call_tool("t")
    assert called.text == "fine"
    assert [item.on_wire() for item in called.content] == items


@pytest.mark.parametrize("revision", ["2025-11-25", "2026-07-28"])
async def test_error_of_a_stream_without_an_answer_quotes_what_it_brought(revision: str) -> None:
    is_newest = revision == "2026-07-28"
    async with (
        McpPeer(stream(b"data: <html>\n\n"), is_newest=is_newest) as peer,
        client_of(peer.url, revision) as client,
    ):
        with pytest.raises(
            ConnectionLost,
            match="ended before the answer, and cannot be resumed; it sent text that is not JSON",
        ):
            await client.call_tool("t")


# --- without end ----------------------------------------------------------------------------------


class Mute(McpPeer):
    """Does not answer messages of one method."""

    def __init__(self, method: bytes, *, is_newest: bool = False) -> None:
        super().__init__(done, is_newest=is_newest)
        self._method = method

    async def _answer(self, peer: Peer, body: bytes, writer: Writer) -> None:
        if self._method in body:
            await asyncio.Event().wait()
        await super()._answer(peer, body, writer)


async def test_handshake_does_not_wait_for_a_server_that_ignores_its_end(clock: LoopClock) -> None:
    async with Mute(b"notifications/initialized") as peer:
        opening = asyncio.create_task(client_of(peer.url, timeout=PATIENCE / 2).__aenter__())
        await until(lambda: "notifications/initialized" in peer.methods())
        clock.advance(PATIENCE / 2)
        with pytest.raises(TimedOut, match="did not take a message within 30 s"):
            await opening


async def test_list_shares_the_time_of_one_call_among_its_pages() -> None:
    clock = FakeClock()

    def page(message: Any) -> bytes:
        clock.now += 0.4
        return result({"resultType": "complete", "tools": [], "nextCursor": str(clock.now)})(
            message
        )

    async with McpPeer(page, is_newest=True) as peer, client_of(peer.url, clock=clock) as client:
        with pytest.raises(TimedOut, match="tools/list: the list did not end within 1 s"):
            await client.list_tools(timeout=1.0)
        assert 3 <= peer.methods().count("tools/list") <= 5


async def test_list_of_too_many_bytes_is_a_bad_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "LIST_BYTES", 10_000)
    tool = {"name": "t", "description": "x" * 3000, "inputSchema": {}}

    def page(message: Any) -> bytes:
        return result(
            {"resultType": "complete", "tools": [tool], "nextCursor": str(message["id"])}
        )(message)

    async with McpPeer(page, is_newest=True) as peer, client_of(peer.url) as client:
        with pytest.raises(BadAnswer, match="the list has no end"):
            await client.list_tools()
        assert peer.methods().count("tools/list") == 4


async def test_server_cannot_ask_a_thousand_questions_at_once() -> None:
    asked = {
        str(number): {"method": "elicitation/create", "params": {"message": "?"}}
        for number in range(1000)
    }
    shown: list[Any] = []
    questions = result({"resultType": "input_required", "inputRequests": asked})
    async with (
        McpPeer(questions, is_newest=True) as peer,
        client_of(peer.url, elicit=shown.append) as client,
    ):
        with pytest.raises(BadAnswer, match="1000 questions at once; 100 are allowed"):
            await client.call_tool("x")
    assert not shown


async def test_server_cannot_send_the_user_to_a_thousand_pages() -> None:
    pages = [
        {"mode": "url", "elicitationId": str(number), "url": "https://a.b/"}
        for number in range(1000)
    ]
    shown: list[Any] = []

    def refuse(message: Any) -> bytes:
        error = {"code": -32042, "message": "visit", "data": {"elicitations": pages}}
        return http(encode({"jsonrpc": "2.0", "id": message["id"], "error": error}))

    async with McpPeer(refuse) as peer, client_of(peer.url, elicit_url=shown.append) as client:
        with pytest.raises(BadAnswer, match="1000 visits at once; 100 are allowed") as caught:
            await client.call_tool("x")
    assert caught.value.ran == "no" and not shown


async def test_messages_that_wait_for_a_slow_callback_are_bounded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    got = list[Any]()
    may_go = asyncio.Event()

    async def on_log(log: Any) -> None:
        await may_go.wait()
        got.append(log.data)

    def flood(message: Any) -> bytes:
        logs = [
            {
                "jsonrpc": "2.0",
                "method": "notifications/message",
                "params": {"level": "info", "data": n},
            }
            for n in range(1500)
        ]
        events = [
            *logs,
            {
                "jsonrpc": "2.0",
                "id": message["id"],
                "result": {"resultType": "complete", "content": []},
            },
        ]
        return stream(b"".join(b"data: %s\n\n" % encode(event) for event in events))(message)

    async with McpPeer(flood, is_newest=True) as peer, client_of(peer.url, on_log=on_log) as client:
        await client.call_tool("x")
        may_go.set()
        await until(lambda: len(got) >= 1000)
    assert got[:1000] == list(range(1000)) and len(got) < 1500
    assert "1000 messages of the server's wait for callbacks" in caplog.text


async def test_client_that_is_closed_while_it_begins_to_listen_says_so() -> None:
    async with Mute(b"subscriptions/listen", is_newest=True) as peer, client_of(peer.url) as client:
        listening = asyncio.create_task(client.listen(tools=True).__aenter__())
        await until(lambda: "subscriptions/listen" in peer.methods())
        await client.aclose()
        with pytest.raises(ConnectionLost, match="the client was closed"):
            await listening
