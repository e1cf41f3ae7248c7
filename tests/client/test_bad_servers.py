"""Servers that misbehave: each call ends with its own clear error within its timeout, and the
client stays usable.
"""

import asyncio
import contextlib
import socket
import time
from typing import Any

import msgspec
import pytest

from tests.client.peers import PATIENCE, Behaviour, Peer, Writer, answers, http, ok, until
from tests.clock import LoopClock
from wirecall import connect
from wirecall.client import jsonrpc
from wirecall.errors import (
    BadAnswer,
    CallFailed,
    ConnectionLost,
    NotSent,
    Refused,
    RpcError,
    TimedOut,
)

encode = msgspec.json.encode


async def never(_peer: Peer, _body: bytes, _writer: Writer) -> None:
    await asyncio.Event().wait()


async def dies(_peer: Peer, _body: bytes, writer: Writer) -> None:
    writer.transport.abort()


async def half(_peer: Peer, body: bytes, writer: Writer) -> None:
    answer = http(encode(ok(msgspec.json.decode(body)["id"])))
    writer.write(answer[:-10])
    await writer.drain()
    writer.transport.close()


async def too_late(peer: Peer, body: bytes, writer: Writer) -> None:
    """The answer to the first call comes while the second one waits for its own, on whatever
    connection.
    """
    if len(peer.bodies) > 1:
        writer.write(http(encode(ok(msgspec.json.decode(body)["id"], "second"))))
        return
    await asyncio.Event().wait()


def says(text: bytes, status: str = "200 OK") -> Behaviour:
    return answers(lambda _message: http(text, status))


def replies(make: Any) -> Behaviour:
    return answers(lambda message: http(encode(make(message["id"]))))


CASES: list[tuple[str, Behaviour, type[Exception], str]] = [
    ("never", never, TimedOut, "no answer within 60 s"),  # the call's whole time, not the remainder
    ("dies", dies, ConnectionLost, "the connection broke"),
    ("half an answer", half, ConnectionLost, "the connection broke"),
    (
        "garbage",
        says(b"<html>hello</html>"),
        BadAnswer,
        "it sent text that is not JSON: invalid character",
    ),
    (
        "not even HTTP",
        answers(lambda _m: b"220 smtp ready\r\n\r\n"),
        BadAnswer,
        "not an HTTP answer",
    ),
    ("nothing", says(b""), BadAnswer, "gave no answer"),
    (
        "no content",
        answers(lambda _m: b"HTTP/1.1 204 No Content\r\n\r\n"),
        BadAnswer,
        "gave no answer",
    ),
    ("a number", says(b"7"), BadAnswer, "a message that is not JSON-RPC"),
    ("broken UTF-8", says(b'{"jsonrpc":"2.0","id":1,"result":"\xff"}'), BadAnswer, "not JSON"),
    ("deep", says(b"[" * 100_000), BadAnswer, "not JSON"),
    ("an array", replies(lambda id: [ok(id)]), BadAnswer, "answered with an array"),
    ("an empty array", says(b"[]"), BadAnswer, "an empty array"),
    ("twice", replies(lambda id: [ok(id), ok(id)]), BadAnswer, "answered with an array"),
    (
        "the id as a string",
        replies(lambda id: ok(str(id))),
        BadAnswer,
        "an answer to id '1', which was not asked",
    ),
    (
        "another id",
        replies(lambda id: ok(id + 100)),
        BadAnswer,
        "an answer to id 101, which was not asked",
    ),
    (
        "true as the id",
        says(b'{"jsonrpc":"2.0","id":true,"result":1}'),
        BadAnswer,
        "it sent a message that is not JSON-RPC",
    ),
    ("no id", says(b'{"jsonrpc":"2.0","result":1}'), BadAnswer, "an answer without an id"),
    (
        "another version",
        replies(lambda id: {**ok(id), "jsonrpc": "1.0"}),
        BadAnswer,
        "a message that is not JSON-RPC",
    ),
    (
        "result and error",
        replies(lambda id: {**ok(id), "error": {"code": 1, "message": ""}}),
        BadAnswer,
        "either",
    ),
    (
        "neither",
        replies(lambda id: {"jsonrpc": "2.0", "id": id}),
        BadAnswer,
        "either a result or an error",
    ),
    (
        "a request",
        replies(lambda id: {"jsonrpc": "2.0", "id": id, "method": "y"}),
        BadAnswer,
        "where an answer was due",
    ),
    (
        "an echo",
        replies(lambda id: {"jsonrpc": "2.0", "id": id, "method": "x"}),
        BadAnswer,
        "sent back the request itself",
    ),
    (
        "an error for all",
        says(b'{"jsonrpc":"2.0","id":null,"error":{"code":7,"message":"no"}}'),
        RpcError,
        r"no \(7\)",
    ),
    ("404", says(b"not here", "404 Not Found"), Refused, "HTTP 404: not here"),
    ("500", says(b"oh", "500 Internal Server Error"), BadAnswer, "HTTP 500: oh"),
    (
        "413 in JSON",
        says(b'{"jsonrpc":"2.0","error":{"code":-32600,"message":"large"}}', "413 Large"),
        RpcError,
        "large",
    ),
]
RAN = {Refused: "no", RpcError: None}


def fields(*lines: bytes, status: bytes = b"200 OK", body: bytes | None = None) -> Behaviour:
    """A proper answer, if only its header were better."""

    def make(message: Any) -> bytes:
        text = encode(ok(message["id"])) if body is None else body
        return b"\r\n".join(
            (b"HTTP/1.1 " + status, *lines, b"Content-Length: %d" % len(text), b"", text)
        )

    return answers(make)


OK = b"HTTP/1.1 200 OK\r\n"


def deep_error(message: Any) -> bytes:
    data = b"[" * 900 + b"]" * 900
    return http(
        b'{"jsonrpc":"2.0","id":%d,"error":{"code":-32600,"message":"no","data":%s}}'
        % (message["id"], data)
    )


CASES += [
    ("a NUL in a header", fields(b"X: a\0b"), BadAnswer, "not an HTTP answer"),
    ("a header without a colon", fields(b"nonsense"), BadAnswer, "not an HTTP answer"),
    ("a header of 20 kB", fields(b"X: " + b"a" * 20_000), BadAnswer, "not an HTTP answer"),
    ("a thousand headers", fields(*[b"X: y"] * 1000), BadAnswer, "not an HTTP answer"),
    ("two lengths", fields(b"Content-Length: 5"), BadAnswer, "not an HTTP answer"),
    (
        "a length of 18 digits",
        answers(lambda _m: b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 18 + b"\r\n\r\n"),
        BadAnswer,
        "allowed",
    ),
    (
        "a chunk without a size",
        answers(lambda _m: b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
        BadAnswer,
        "HTTP",
    ),
    (
        "not gzip",
        fields(b"Content-Encoding: gzip"),
        BadAnswer,
        "does not match its Content-Encoding",
    ),
    (
        "an encoding that was not asked for",
        fields(b"Content-Encoding: br"),
        BadAnswer,
        "one that was not asked for",
    ),
    (
        "another protocol",
        fields(b"Upgrade: x", b"Connection: upgrade", status=b"101 Switching"),
        BadAnswer,
        "HTTP 101",
    ),
    ("a status below 100", says(b"", "007 James"), BadAnswer, "HTTP 7"),
    (
        "a redirect to bytes",
        fields(b"Location: \xff\x01", status=b"302 Found", body=b""),
        Refused,
        r"a redirect to \\udcff\\x01, wh",
    ),
    ("an error of depth 900", answers(deep_error), RpcError, "no"),
]
ODD_BUT_FINE: list[tuple[str, Behaviour]] = [
    ("deep ids of replays", fields(b"Idempotent-Replayed: " + b"[" * 5000)),
    ("a long id of a replay", fields(b"Idempotent-Replayed: [" + b"9" * 5000 + b"]")),
    ("bytes as ids of replays", fields(b"Idempotent-Replayed: \xff\xfe")),
    ("other things as ids of replays", fields(b'Idempotent-Replayed: [{}, [], null, 1.5, "1"]')),
    ("a control character", fields(b"X: a\x01b")),
    ("a cookie that is none", fields(b"Set-Cookie: \xff=;;;\x01")),
    ("a type that is none", fields(b"Content-Type: \xff/\x01; charset=\xff")),
]


@pytest.mark.parametrize(
    "behave", [case[1] for case in ODD_BUT_FINE], ids=[case[0] for case in ODD_BUT_FINE]
)
async def test_odd_header_does_not_matter_to_the_answer(behave: Behaviour) -> None:
    async with (
        Peer(behave) as peer,
        connect(peer.url, discover=False) as client,
        client.batch() as batch,
    ):
        entry = batch.call("x")
    assert entry.result() == "fine" and not entry.replayed


def test_error_with_deep_data_can_be_shown() -> None:
    data: Any = []
    for _ in range(100_000):
        data = [data]
    assert str(RpcError(7, "no", data)) == "no (7): data nested too deep to show"


def test_error_with_megabytes_of_data_has_a_short_message() -> None:
    text = str(RpcError(7, "no", "x" * 5_000_000))
    assert text == f"no (7): {'x' * 1000}... (5,000,000 characters)"


@pytest.mark.parametrize(
    ("behave", "kind", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
async def test_call_ends_with_one_clear_error_in_time(
    behave: Behaviour, kind: type[Exception], words: str, clock: LoopClock
) -> None:
    async with Peer(behave) as peer, connect(peer.url, discover=False) as client:
        began = time.monotonic()
        calling = asyncio.create_task(client.call("x", timeout=PATIENCE))
        if kind is TimedOut:
            await until(lambda: peer.bodies)
            clock.advance(PATIENCE)
        with pytest.raises(kind, match=words) as caught:
            await calling
        assert time.monotonic() - began < PATIENCE / 2
        expected = RAN.get(kind, "unknown")
        assert expected is None or caught.value.ran == expected  # type: ignore[attr-defined]
        assert len(peer.calls) == 1  # a call that may not be repeated is sent once


@pytest.mark.parametrize("behave", [case[1] for case in CASES], ids=[case[0] for case in CASES])
async def test_batch_ends_with_an_error_per_entry(behave: Behaviour) -> None:
    """Every entry has its own error, and nothing hangs, whatever the server did."""

    async def first_of_many(peer: Peer, body: bytes, writer: Writer) -> None:
        message = msgspec.json.decode(body)
        await behave(peer, encode(message[0] if isinstance(message, list) else message), writer)

    async with (
        Peer(first_of_many) as peer,
        connect(peer.url, discover=False, timeout=0.5) as client,
    ):
        async with asyncio.timeout(PATIENCE), client.batch() as batch:
            entries = [batch.call("x") for _ in range(3)]
        assert entries[1].error is not None and entries[2].error is not None
        assert all(
            isinstance(entry.error, CallFailed | RpcError) for entry in entries if not entry.ok
        )


async def test_answer_after_the_deadline_is_dropped(clock: LoopClock) -> None:
    async with Peer(too_late) as peer, connect(peer.url, discover=False) as client:
        first = asyncio.create_task(client.call("first", timeout=PATIENCE))
        await until(lambda: peer.bodies)
        clock.advance(PATIENCE)
        with pytest.raises(TimedOut):
            await first
        assert await client.call("second") == "second"


async def test_calls_in_flight_have_their_own_deadlines(clock: LoopClock) -> None:
    async with Peer(never) as peer, connect(peer.url, discover=False) as client:
        calls = []
        # Each ends before the calls that began earlier.
        for timeout in (9 * PATIENCE, 6 * PATIENCE, 3 * PATIENCE):
            calls.append(asyncio.create_task(client.call("x", timeout=timeout)))
            await until(lambda: len(peer.bodies) == len(calls))
        patient = calls[0]
        for hasty, longer in ((calls[2], calls[1]), (calls[1], patient)):
            clock.advance(3 * PATIENCE)
            with pytest.raises(TimedOut):
                await hasty
            assert not longer.done()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await client.call("x", timeout=PATIENCE)
        patient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await patient


async def test_answer_that_is_too_large_is_not_read() -> None:
    async with (
        Peer(says(b'"' + b"x" * 5000 + b'"')) as peer,
        connect(peer.url, discover=False, max_bytes=1000) as client,
    ):
        with pytest.raises(BadAnswer, match="an answer of 5002 bytes; 1000 are allowed"):
            await client.call("x")

    async def endless(_peer: Peer, _body: bytes, writer: Writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"400\r\n" + b" " * 1024 + b"\r\n")
            await writer.drain()

    async with (
        Peer(endless) as peer,
        connect(peer.url, discover=False, max_bytes=100_000) as client,
    ):
        with pytest.raises(BadAnswer, match="more than 100000 bytes"):
            await client.call("x")


async def test_client_remains_usable() -> None:
    async def moody(peer: Peer, body: bytes, writer: Writer) -> None:
        if len(peer.bodies) % 2:
            writer.transport.abort()
        else:
            writer.write(http(encode(ok(msgspec.json.decode(body)["id"]))))

    async with Peer(moody) as peer, connect(peer.url, discover=False) as client:
        for _ in range(5):
            with pytest.raises(ConnectionLost):
                await client.call("x")
            assert await client.call("x") == "fine"


async def test_call_that_is_cancelled_leaves_nothing_behind() -> None:
    async with Peer(never) as peer, connect(peer.url, discover=False) as client:
        call = asyncio.create_task(client.call("x"))
        await until(lambda: peer.calls)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_aclose_ends_the_calls_in_flight() -> None:
    async with Peer(never) as peer:
        async with connect(peer.url, discover=False) as client:
            calls = [asyncio.create_task(client.call("x", key=True)) for _ in range(3)]
            await until(lambda: len(peer.calls) == 3)
        outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), PATIENCE)
        assert all(isinstance(outcome, ConnectionLost) for outcome in outcomes)


async def test_server_that_does_not_accept_receives_nothing() -> None:
    """Without a connection within the timeout, the call is known not to have run."""
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):  # more than the kernel accepts without the server
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        async with connect(
            f"http://127.0.0.1:{full.getsockname()[1]}/rpc", discover=False
        ) as client:
            with pytest.raises(NotSent, match=r"could not be reached within 0\.1 s"):
                await client.call("x", timeout=0.1)


async def test_mute_server_delays_the_first_call_by_half_its_timeout_at_most(
    clock: LoopClock,
) -> None:
    async def only_discover_is_mute(_peer: Peer, body: bytes, writer: Writer) -> None:
        message = msgspec.json.decode(body)
        if message["method"] == "rpc.discover":
            await asyncio.Event().wait()
        writer.write(http(encode(ok(message["id"]))))

    async with Peer(only_discover_is_mute) as peer, connect(peer.url, clock=clock) as client:
        first = asyncio.create_task(client.call("x", timeout=PATIENCE))
        await until(lambda: peer.bodies)
        clock.advance(PATIENCE / 2)
        assert await first == "fine"
        assert await client.call("x", timeout=PATIENCE) == "fine"


async def test_call_waits_for_rpc_discover_no_longer_than_its_own_timeout(
    monkeypatch: pytest.MonkeyPatch, clock: LoopClock
) -> None:
    monkeypatch.setattr(jsonrpc, "DISCOVERY", 10 * PATIENCE)
    async with Peer(never) as peer, connect(peer.url) as client:
        first = asyncio.create_task(client.call("x", timeout=20 * PATIENCE))
        await until(lambda: peer.bodies)
        second = asyncio.create_task(client.call("x", timeout=PATIENCE))
        await asyncio.sleep(0)
        clock.advance(0.6 * PATIENCE)
        await until(lambda: peer.calls)  # without the answer to `rpc.discover`
        clock.advance(PATIENCE)
        with pytest.raises(TimedOut):
            await second
        assert not first.done()
        first.cancel()
        await asyncio.wait({first})


async def test_batch_that_is_cancelled_leaves_nothing_behind() -> None:
    async with Peer(never) as peer, connect(peer.url, discover=False) as client:
        client.arrays.legal = False
        batch = client.batch()
        for _ in range(50):
            batch.call("x")
        sending = asyncio.create_task(batch.__aexit__(None))
        await until(lambda: peer.bodies)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
