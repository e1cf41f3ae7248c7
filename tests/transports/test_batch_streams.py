"""Streamed answers to an array on /rpc: when, in which form, in which order, and how they end."""

import asyncio
import json
from typing import Any

import pytest

from tests.clock import LoopClock
from tests.transports.batch_streams import (
    FRONTS,
    JSONL,
    PATIENCE,
    Reading,
    Shop,
    call,
    charge,
    end,
    post,
    result,
)
from wirecall import Limits
from wirecall.errors import UsageError
from wirecall.transports import batch_stream

every_front = pytest.mark.parametrize("front", FRONTS)


async def closed(reading: Reading) -> bytes:
    """Return the bytes before the end of a connection that the server closes."""
    async with asyncio.timeout(PATIENCE):
        try:
            return await reading.reader.read()
        except ConnectionError:
            return b""


# --- form -----------------------------------------------------------------------------------------

ONE = b'{"jsonrpc":"2.0","result":3,"id":1}'
TWO = b'{"jsonrpc":"2.0","result":7,"id":2}'
END = b'{"jsonrpc":"2.0","method":"rpc.end","params":{"answered":2,"replayed":[]}}'

FORMS = {
    "application/jsonl": b"%b\n%b\n%b\n",
    "application/x-ndjson": b"%b\n%b\n%b\n",
    "application/json-seq": b"\x1e%b\n\x1e%b\n\x1e%b\n",
    "text/event-stream": b"id: 1\nevent: message\ndata: %b\n\n"
    b"id: 2\nevent: message\ndata: %b\n\nid: 3\nevent: message\ndata: %b\n\n",
}


@every_front
@pytest.mark.parametrize("media", FORMS)
@pytest.mark.parametrize("is_held", [False, True])
async def test_stream_has_the_bytes_of_its_form(front: str, media: str, is_held: bool) -> None:
    """One Response object per record, then the end record; whole, or in pieces."""
    shop = Shop()
    second = call(2, "add", 3, 4)
    if is_held:
        second = call(2, "wait", 7)
    async with shop.serving(front) as port:
        reading = await post(port, [call(1, "add", 1, 2), second], media)
        expected = FORMS[media] % (ONE, TWO, END)
        if is_held:
            begin = expected[: expected.index(ONE) + len(ONE)]
            assert await reading.until(ONE) == begin
            shop.gate(7).set()
            expected = expected[len(begin) :]
        assert await reading.rest() == expected
        assert reading.status == 200
        assert reading.headers["content-type"] == media
        assert reading.headers["cache-control"] == "no-store"
        assert reading.headers["x-accel-buffering"] == "no"
        assert "idempotent-replayed" not in reading.headers
        await reading.close()


@every_front
async def test_stream_leaves_the_connection_usable(front: str) -> None:
    shop = Shop()
    async with shop.serving(front) as port:
        for _ in range(3):
            reading = await post(port, [call(1, "wait", 1), call(2, "add", 1, 1)])
            assert await reading.record() == result(2, 2)
            shop.gate(1).set()
            assert await reading.records() == [result(1, 1), end(2)]
            shop.gate(1).clear()
            data = json.dumps(call(1, "add", 1, 2)).encode()
            head = "POST /rpc HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            reading.writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            again = Reading(reading.reader, reading.writer)
            assert await again.rest() == ONE
            await again.close()


# --- when -----------------------------------------------------------------------------------------


@every_front
@pytest.mark.parametrize(
    "accept",
    [
        None,
        "*/*",
        "application/json",
        "application/json-rpc",
        "application/json, application/jsonl",
        "application/jsonl;q=0.5, */*;q=0.5",
        "text/event-stream, application/json",
    ],
)
async def test_stream_is_not_for_clients_that_take_an_array_as_well(
    front: str, accept: str | None
) -> None:
    """Ties go to the array."""
    async with Shop().serving(front) as port:
        reading = await post(port, [call(1, "add", 1, 2)], accept)
        assert await reading.rest() == b"[" + ONE + b"]"
        assert reading.headers["content-type"] == "application/json"
        await reading.close()


async def test_stream_is_never_the_answer_to_a_single_call() -> None:
    async with Shop().serving("uvicorn") as port:
        reading = await post(port, call(1, "add", 1, 2))
        assert await reading.rest() == ONE
        assert reading.headers["content-type"] == "application/json"
        await reading.close()


@every_front
async def test_accept_that_cannot_be_met_is_refused(front: str) -> None:
    async with Shop().serving(front) as port:
        reading = await post(port, [call(1, "add", 1, 2)], "text/html, application/xml")
        answer = json.loads(await reading.rest())
        assert reading.status == 406
        assert answer["id"] is None
        assert answer["error"]["message"] == (
            "Accept: expected one of application/json, application/jsonl, application/x-ndjson,"
            " application/json-seq, text/event-stream; got text/html, application/xml"
        )
        await reading.close()


async def test_stream_that_the_app_does_not_allow_is_refused_or_an_array() -> None:
    async with Shop(stream=False).serving("uvicorn") as port:
        reading = await post(port, [call(1, "add", 1, 2)])
        answer = json.loads(await reading.rest())
        assert reading.status == 406
        assert (
            answer["error"]["message"]
            == "Accept: expected one of application/json; got application/jsonl"
        )
        other = await post(port, [call(1, "add", 1, 2)], "application/jsonl, */*;q=0.1")
        assert await other.rest() == b"[" + ONE + b"]"
        await reading.close()
        await other.close()


async def test_stream_above_the_limit_of_streams_is_an_array_or_refused() -> None:
    shop = Shop(limits=Limits(streams=1))
    async with shop.serving("uvicorn") as port:
        first = await post(port, [call(1, "wait", 1)])
        await shop.has_begun(1)
        second = await post(port, [call(1, "add", 1, 2)], "application/jsonl, */*;q=0.1")
        assert await second.rest() == b"[" + ONE + b"]"
        third = await post(port, [call(1, "add", 1, 2)])
        assert b"no more streams" in await third.rest()
        assert third.status == 503
        for reading in (first, second, third):
            await reading.close()


async def test_stream_can_be_turned_off_by_configure() -> None:
    """As `[server] stream` in wirecall.toml does."""
    shop = Shop()
    shop.app.configure(stream=False)
    async with shop.serving("uvicorn") as port:
        reading = await post(port, [call(1, "add", 1, 2)])
        await reading.head()
        assert reading.status == 406
        await reading.close()


def test_app_refuses_an_unknown_way_to_stream() -> None:
    with pytest.raises(UsageError, match="stream=2 is not a way to stream answers"):
        Shop().app.configure(stream=2)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="stream='yes' is not a way to stream answers"):
        Shop(stream="yes")


# --- order ----------------------------------------------------------------------------------------


@every_front
async def test_stream_is_in_completion_order(front: str) -> None:
    shop = Shop()
    async with shop.serving(front) as port:
        reading = await post(port, [call(number, "wait", number) for number in (1, 2, 3)])
        await shop.has_begun(1, 2, 3)
        for number in (3, 1, 2):
            shop.gate(number).set()
            assert await reading.record() == result(number, number)
        assert await reading.records() == [end(3)]
        await reading.close()


@every_front
async def test_stream_in_input_order_waits_for_the_first_entry(front: str) -> None:
    shop = Shop()
    async with shop.serving(front) as port:
        batch = [
            call(1, "wait", 1),
            call(None, "note", 2),
            call(3, "wait", 3),
            call(4, "add", 2, 2),
        ]
        reading = await post(port, batch, "application/jsonl; order=input")
        await shop.has_begun(1, 2, 3)
        for number in (2, 3):
            shop.gate(number).set()
        shop.gate(1).set()
        assert await reading.records() == [result(1, 1), result(3, 3), result(4, 4), end(3)]
        await reading.close()


async def test_stream_refuses_an_unknown_order() -> None:
    async with Shop().serving("uvicorn") as port:
        reading = await post(port, [call(1, "add", 1, 2)], "application/jsonl; order=random")
        assert b"expected order=completion or order=input, got 'random'" in await reading.rest()
        assert reading.status == 406
        await reading.close()


async def test_stream_begins_commands_in_array_order() -> None:
    shop = Shop()
    async with shop.serving("uvicorn") as port:
        reading = await post(port, [charge(1, 1), charge(2, 102), call(3, "add", 1, 1)])
        assert await reading.record() == result(3, 2)
        assert shop.charged == [1]
        shop.gate(1).set()
        assert await reading.records() == [result(1, 1), result(2, 102), end(3)]
        assert shop.charged == [1, 102]
        await reading.close()


# --- the first byte -------------------------------------------------------------------------------


@every_front
async def test_stream_begins_after_a_second_without_an_answer(
    front: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Shop()
    async with shop.serving(front) as port:
        clock = LoopClock(monkeypatch)
        reading = await post(port, [call(1, "wait", 1)])
        await shop.has_begun(1)
        clock.advance(0.9)
        await asyncio.sleep(0.05)
        assert not reading.reader._buffer  # type: ignore[attr-defined]
        clock.advance(0.2)
        await reading.head()
        assert reading.status == 200
        shop.gate(1).set()
        assert [each for each in (await reading.rest()).split(b"\n") if each] == [
            b'{"jsonrpc":"2.0","result":1,"id":1}',
            b'{"jsonrpc":"2.0","method":"rpc.end","params":{"answered":1,"replayed":[]}}',
        ]
        await reading.close()


WHOLE = {
    "not JSON": (b"[1,", -32700),
    "empty": (b"[]", -32600),
    "too long": (json.dumps([call(1, "add", 1, 2)] * 51).encode(), -32600),
}


@every_front
@pytest.mark.parametrize("name", WHOLE)
async def test_batch_that_is_wrong_as_a_whole_gets_one_object(front: str, name: str) -> None:
    data, code = WHOLE[name]
    async with Shop().serving(front) as port:
        reading = await post(port, data)
        answer = json.loads(await reading.rest())
        assert (reading.status, answer["id"], answer["error"]["code"]) == (200, None, code)
        assert reading.headers["content-type"] == "application/json"
        await reading.close()


async def test_batch_of_an_unknown_caller_gets_no_stream() -> None:
    async with Shop(authenticate=lambda _headers: None).serving("uvicorn") as port:
        reading = await post(port, [call(1, "add", 1, 2)])
        assert json.loads(await reading.rest())["error"]["message"] == "not authenticated"
        assert reading.status == 401
        await reading.close()


@every_front
async def test_batch_of_notifications_gets_no_stream(
    front: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """204, however long they take."""
    shop = Shop()
    async with shop.serving(front) as port:
        clock = LoopClock(monkeypatch)
        reading = await post(port, [call(None, "note", 1), call(None, "note", 2)])
        await shop.has_begun(1, 2)
        clock.advance(5)
        await asyncio.sleep(0.05)
        shop.gate(1).set()
        shop.gate(2).set()
        await reading.head()
        assert reading.status == 204
        await reading.close()


@every_front
async def test_silent_stream_gets_a_heartbeat(front: str, monkeypatch: pytest.MonkeyPatch) -> None:
    beats = {
        JSONL: b"\n",
        "application/json-seq": b"\x1e",
        "text/event-stream": b": keep-alive\n\n",
    }
    for media, beat in beats.items():
        shop = Shop()
        async with shop.serving(front) as port:
            reading = await post(port, [call(1, "add", 1, 2), call(2, "wait", 7)], media)
            await reading.until(ONE)
            rest = await reading.until(b"\n\n" if media == "text/event-stream" else b"\n")
            assert rest.strip() == b""
            clock = LoopClock(monkeypatch)
            for _ in range(2):
                clock.advance(15.1)
                assert await reading.piece() == beat
            shop.gate(7).set()
            assert TWO in await reading.rest()
            await reading.close()


# --- failures -------------------------------------------------------------------------------------


@every_front
async def test_failure_of_an_entry_is_its_own_record(front: str) -> None:
    async with Shop().serving(front) as port:
        batch = [call(1, "refuse"), call(2, "nothing"), call(3, "add", 1, 1), 7]
        reading = await post(port, batch)
        *records, last = await reading.records()
        assert {record["id"]: record.get("error", {}).get("code") for record in records} == {
            1: 4001,
            2: -32601,
            3: None,
            None: -32600,
        }
        assert last == end(4)
        await reading.close()


async def test_result_that_cannot_be_sent_is_its_own_record() -> None:
    """The records around it are encoded together with it."""
    shop = Shop()
    shop.app.query(name="huge")(lambda: 1 << 100)
    async with shop.serving("uvicorn") as port:
        batch = [call(1, "add", 1, 1), call(2, "huge"), call(3, "add", 2, 1), call(4, "add", 2, 2)]
        reading = await post(port, batch)
        *records, last = await reading.records()
        array = await post(port, batch, None)
        assert records == json.loads(await array.rest())
        assert [record.get("result") for record in records][::2] == [2, 3]
        assert last == end(4)
        await reading.close()
        await array.close()


@every_front
async def test_failure_of_the_server_answers_every_entry(front: str) -> None:
    """Each says whether its call ran; then comes the end record."""
    shop = Shop()
    async with shop.serving(front) as port:
        batch = [
            call(1, "break_all"),
            call(2, "add", 1, 1),
            call(3, "wait", 3),
            charge(4, 4),
            charge(5, 105),
        ]
        reading = await post(port, batch)
        assert await reading.record() == result(2, 2)
        await shop.has_begun(3, 4)
        shop.gate(0).set()
        *records, last = await reading.records()
        assert {record["id"]: record["error"]["data"] for record in records} == {
            1: {"ran": "no"},
            3: {"ran": "no"},
            4: {"ran": "unknown"},
            5: {"ran": "no"},
        }
        assert {record["error"]["code"] for record in records} == {-32603}
        assert last == end(5)
        await reading.close()


@every_front
async def test_stop_of_the_server_answers_every_entry(
    front: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that is not too busy to write them in a second."""
    monkeypatch.setattr(batch_stream, "LAST_WORDS", PATIENCE)
    shop = Shop()
    async with shop.serving(front) as port:
        reading = await post(port, [call(1, "add", 1, 1), call(2, "wait", 2), charge(3, 3, "k")])
        assert await reading.record() == result(1, 2)
        await shop.has_begun(2, 3)
        shop.task.cancel()
        records = {record.get("id"): record for record in await reading.records()}
        assert records.pop(None) == end(3)
        assert records[2]["error"]["code"] == 50410
        assert records[2]["error"]["data"]["ran"] == "no"
        assert records[3]["error"]["data"]["ran"] == "unknown"
        await reading.close()


# --- marks ----------------------------------------------------------------------------------------


@every_front
async def test_stream_marks_replays_in_records_and_at_the_end(front: str) -> None:
    shop = Shop()
    async with shop.serving(front) as port:
        first = await post(port, [charge(1, 101, "a"), charge(2, 102, "b")])
        assert await first.records() == [result(1, 101), result(2, 102), end(2)]
        second = await post(port, [charge(3, 101, "a"), charge(4, 103, "c")])
        assert await second.records() == [
            result(3, 101, replayed=True),
            result(4, 103),
            end(2, 3),
        ]
        assert shop.charged == [101, 102, 103]
        await first.close()
        await second.close()


# --- limits ---------------------------------------------------------------------------------------


async def test_stream_counts_bytes_over_all_records() -> None:
    """Those that ran get their digest, and the rest does not begin."""
    shop = Shop(limits=Limits(bytes_out=2000, concurrency=2))
    async with shop.serving("uvicorn") as port:
        batch = [
            call(1, "big", 1500),
            call(2, "big", 1500),
            charge(3, 103),
            call(4, "big", 10),
        ]
        reading = await post(port, batch)
        records = {record.get("id"): record for record in await reading.records()}
        assert records[1]["result"] == "x" * 1500
        assert records[2]["error"]["code"] == 41010
        data = records[2]["error"]["data"]
        assert (data["ran"], data["limit"], data["max"]) == ("yes", "bytes_out", 2000)
        assert len(data["digest"]) == 64
        for number in (3, 4):
            error = records[number]["error"]
            assert error["code"] == 42910
            assert (error["data"]["type"], error["data"]["ran"]) == ("response_too_large", "no")
        assert shop.charged == []
        assert records[None] == end(4)
        await reading.close()


# --- arrays in pieces -----------------------------------------------------------------------------


@every_front
async def test_array_in_pieces_is_in_input_order(front: str) -> None:
    shop = Shop(stream="array")
    async with shop.serving(front) as port:
        batch = [call(1, "add", 1, 2), call(2, "wait", 7), call(3, "add", 1, 1)]
        reading = await post(port, batch, "*/*")
        assert await reading.until(ONE) == b"[" + ONE
        assert reading.headers["content-type"] == "application/json"
        shop.gate(7).set()
        assert await reading.rest() == b"," + TWO + b',{"jsonrpc":"2.0","result":2,"id":3}]'
        await reading.close()


async def test_array_in_pieces_that_is_ready_at_once_has_its_length_and_its_marks() -> None:
    shop = Shop(stream="array")
    async with shop.serving("uvicorn") as port:
        for marks in (None, "[1]"):
            reading = await post(port, [charge(1, 101, "a")], None)
            assert json.loads(await reading.rest()) == [result(1, 101)]
            assert reading.headers.get("idempotent-replayed") == marks
            assert "content-length" in reading.headers
            await reading.close()
        quiet = await post(port, [call(None, "add", 1, 1)], None)
        await quiet.head()
        await quiet.close()


async def test_array_in_pieces_is_not_for_a_client_that_prefers_a_stream() -> None:
    async with Shop(stream="array").serving("uvicorn") as port:
        reading = await post(port, [call(1, "add", 1, 2)])
        assert await reading.records() == [result(1, 3), end(1)]
        await reading.close()


# --- references -----------------------------------------------------------------------------------


@every_front
@pytest.mark.parametrize("order", ["completion", "input"])
async def test_stream_runs_entries_with_references(front: str, order: str) -> None:
    shop = Shop(references=True)
    async with shop.serving(front) as port:
        refs: dict[str, Any] = {"/number": {"id": 1, "path": "/number"}}
        batch = [
            call(1, "order", 107),
            call(2, "charge", params={}, refs=refs),
            call(3, "add", 1, 1),
            call(4, "add", 2, 2, after=[2]),
        ]
        reading = await post(port, batch, f"application/jsonl; order={order}")
        await shop.has_begun(107)
        if order == "completion":
            assert await reading.record() == result(3, 2)
        shop.gate(107).set()
        records = await reading.records()
        expected = [result(1, {"number": 107}), result(2, 107), result(4, 4), end(4)]
        if order == "input":
            expected.insert(2, result(3, 2))
        assert records == expected
        assert shop.charged == [107]
        await reading.close()
