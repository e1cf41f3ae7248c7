"""Streams of answers whose client is slow, leaves, or loses some of them, and sends calls again."""

import asyncio
import json
import socket
import struct
import time
from typing import Any

import pytest

from tests.clock import LoopClock
from tests.commands.charges import watch
from tests.servers import Store
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
from wirecall import Context, Limits
from wirecall.server.context import Next

every_front = pytest.mark.parametrize("front", FRONTS)

MANY = 200
# Bytes of one long result. All of them are more than the buffers of two kernels hold.
LONG = 200_000


async def next_of(queue: "asyncio.Queue[int]") -> int:
    async with asyncio.timeout(PATIENCE):
        return await queue.get()


async def closed(reading: Reading) -> bytes:
    """Return what a client can still read before the end of its connection."""
    async with asyncio.timeout(PATIENCE):
        try:
            return await reading.reader.read()
        except ConnectionError:
            return b""


def reset(reading: Reading) -> None:
    """End the connection so that the server sees a reset."""
    connection: socket.socket = reading.writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    reading.cut()


# --- slow readers ---------------------------------------------------------------------------------


@every_front
async def test_slow_reader_stops_new_entries_and_is_disconnected(
    front: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries are cancelled; the command that runs is recorded; the one behind it does not begin."""
    shop = Shop(limits=Limits(batch=MANY + 3, bytes_out=100 << 20))
    async with shop.serving(front) as port:
        clock = LoopClock(monkeypatch)
        held = [call(1, "wait", 1), charge(2, 2, "key"), charge(3, 103)]
        many = [call(number, "big", LONG) for number in range(10, 10 + MANY)]
        reading = await post(port, [*held, *many], buffer=4096)
        await shop.has_begun(1, 2)
        while not shop.cancelled.qsize():
            clock.advance(31)
            await asyncio.sleep(0.01)
        assert shop.cancelled.get_nowait() == 1
        assert shop.begun.qsize() < MANY
        shop.gate(2).set()
        assert await next_of(shop.done) == 2
        assert shop.charged == [2]
        again = await post(port, [charge(5, 2, "key")])
        assert await again.records() == [result(5, 2, replayed=True), end(1, 5)]
        await again.close()
        # The connection is closed: what the client reads now has no end record.
        assert b"rpc.end" not in await closed(reading)
        reading.cut()


async def test_slow_reader_that_reads_on_gets_everything() -> None:
    shop = Shop(limits=Limits(batch=MANY, bytes_out=100 << 20))
    async with shop.serving("granian") as port:
        batch = [call(number, "big", LONG) for number in range(MANY)]
        reading = await post(port, batch, buffer=4096)
        await shop.has_begun(LONG, LONG, LONG)
        *records, last = await reading.records()
        assert sorted(record["id"] for record in records) == [*range(MANY)]
        assert last == end(MANY)
        await reading.close()


async def test_stream_in_input_order_stops_new_entries_behind_one_that_waits() -> None:
    """The answers behind it are kept in memory, so there are few of them."""
    shop = Shop(limits=Limits(batch=MANY, bytes_out=100 << 20))
    async with shop.serving("uvicorn") as port:
        batch = [call(0, "wait", 1), *(call(number, "big", LONG) for number in range(1, MANY))]
        reading = await post(port, batch, "application/jsonl; order=input")
        # A megabyte of answers, and the entries that run side by side.
        await shop.has_begun(1, *[LONG] * 6)
        other = await post(port, [call(1, "add", 1, 2)])
        assert await other.records() == [result(1, 3), end(1)]
        assert shop.begun.qsize() < 16
        shop.gate(1).set()
        *records, last = await reading.records()
        assert [record["id"] for record in records] == [*range(MANY)]
        assert last == end(MANY)
        await reading.close()
        await other.close()


async def test_stream_in_input_order_begins_the_entry_that_is_due_though_the_queue_is_full() -> (
    None
):
    """The command that is due waits for an earlier one, and later queries fill the queue."""
    shop = Shop(limits=Limits(batch=MANY))
    async with shop.serving("uvicorn") as port:
        queries = [call(number, "add", number, 0) for number in range(3, 150)]
        reading = await post(
            port, [charge(1, 1), charge(2, 102), *queries], "application/jsonl; order=input"
        )
        await shop.has_begun(1)
        shop.gate(1).set()
        *records, last = await reading.records()
        assert [record["id"] for record in records] == [*range(1, 150)]
        assert last == end(149)
        await reading.close()


async def test_stream_writes_between_entries_that_block_the_loop() -> None:
    shop = Shop()
    seen: list[Any] = []

    def block() -> int:
        time.sleep(0.006)
        return len(seen)

    shop.app.query(block)
    async with shop.serving("uvicorn") as port:
        reading = await post(port, [call(number, "block") for number in range(20)])
        while len(seen) < 20:
            seen.append(await reading.record())
        assert seen[-1]["result"] > 0
        await reading.close()


# --- clients that leave ---------------------------------------------------------------------------


@every_front
@pytest.mark.parametrize("is_reset", [False, True])
async def test_client_that_leaves_cancels_queries_and_lets_commands_end(
    front: str, is_reset: bool
) -> None:
    shop = Shop()
    async with shop.serving(front) as port:
        batch = [call(1, "wait", 1), charge(2, 2, "key"), charge(3, 103), call(4, "add", 1, 1)]
        reading = await post(port, batch)
        assert await reading.record() == result(4, 2)
        await shop.has_begun(1, 2)
        if is_reset:
            reset(reading)
        else:
            reading.cut()
        assert await next_of(shop.cancelled) == 1
        shop.gate(2).set()
        assert await next_of(shop.done) == 2
        again = await post(port, [charge(2, 2, "key"), charge(3, 103)])
        assert await again.records() == [result(2, 2, replayed=True), result(3, 103), end(2, 2)]
        assert shop.charged == [2, 103]
        await again.close()


async def test_client_that_leaves_does_not_stop_a_command_without_a_record() -> None:
    shop = Shop()
    async with shop.serving("granian") as port:
        reading = await post(port, [call(1, "pay", 1), call(2, "add", 1, 1)])
        await reading.record()
        await shop.has_begun(1)
        reading.cut()
        shop.gate(1).set()
        assert await next_of(shop.done) == 1


# --- cuts at each record --------------------------------------------------------------------------

NUMBERS = (1, 2, 3)


def commands(numbers: tuple[int, ...], *, has_keys: bool) -> list[Any]:
    return [charge(each, each, f"key-{each}" if has_keys else None) for each in numbers]


async def warm(shop: Shop, port: int) -> None:
    """Let the server learn how long its own header is, with a stream that it watches."""
    reading = await post(port, [charge(1, 101), call(2, "wait", 50)])
    await reading.record()
    await shop.has_begun(50, 101)
    marks = await watch(shop.app, "deliver")
    async with asyncio.timeout(PATIENCE):
        await marks.get()
    shop.gate(50).set()
    assert await reading.records() == [result(2, 50), end(2)]
    await reading.close()
    shop.charged.clear()
    await next_of(shop.done)


@every_front
@pytest.mark.parametrize("has_keys", [True, False])
@pytest.mark.parametrize("is_noticed", [True, False])
async def test_stream_cut_after_each_record_is_completed_by_sending_the_rest_again(
    front: str, has_keys: bool, is_noticed: bool
) -> None:
    """Rule 6: what the client has received is delivered, and what it has not received is lost."""
    shop = Shop()
    async with shop.serving(front) as port:
        if not has_keys:
            await warm(shop, port)
        for received in range(len(NUMBERS) + 1):
            await cut_and_send_again(shop, port, received, has_keys, is_noticed)


async def cut_and_send_again(
    shop: Shop, port: int, received: int, has_keys: bool, is_noticed: bool
) -> None:
    numbers = tuple(10 * received + number for number in NUMBERS)
    watcher = 10 * received + 9
    batch = [call(9, "wait", watcher), *commands(numbers, has_keys=has_keys)]
    reading = await post(port, batch)
    await shop.has_begun(watcher, numbers[0])
    for place, number in enumerate(numbers[:received], 1):
        shop.gate(number).set()
        assert await reading.record() == result(number, number)
        await shop.has_begun(*numbers[place : place + 1])
    reading.cut()
    if is_noticed:
        assert await next_of(shop.cancelled) == watcher
    for number in numbers:
        shop.gate(number).set()
    rest = numbers[received:]
    if rest:
        again = await post(port, commands(rest, has_keys=has_keys))
        *records, last = await again.records()
        assert [(each["id"], each["result"]) for each in records] == [(id, id) for id in rest]
        if is_noticed:
            # The command that ran when the client left has an outcome; the others did not begin.
            assert last == end(len(rest), rest[0])
        await again.close()
    assert sorted(shop.charged) == [*numbers]
    if not has_keys and received:
        # The client has the first answer, so this is another intent.
        intended = await post(port, commands(numbers[:1], has_keys=False))
        assert await intended.records() == [result(numbers[0], numbers[0]), end(1)]
        await intended.close()
    shop.charged.clear()
    shop.begun = asyncio.Queue()
    shop.cancelled = asyncio.Queue()


@every_front
async def test_records_that_a_reset_client_has_not_read_are_lost(front: str) -> None:
    """Its kernel has acknowledged them, which does not say that the client has them."""
    shop = Shop()
    async with shop.serving(front) as port:
        batch = [charge(1, 101), charge(2, 102), call(3, "wait", 3)]
        reading = await post(port, batch)
        await shop.has_begun(3, 101, 102)
        await reading.head()
        reset(reading)
        assert await next_of(shop.cancelled) == 3
        again = await post(port, [charge(1, 101), charge(2, 102)])
        assert await again.records() == [
            result(1, 101, replayed=True),
            result(2, 102, replayed=True),
            end(2, 1, 2),
        ]
        assert shop.charged == [101, 102]
        await again.close()


async def test_records_that_are_acknowledged_for_a_second_are_delivered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client has not reset its connection by then, so it has read them."""
    shop = Shop()
    async with shop.serving("uvicorn") as port:
        clock = LoopClock(monkeypatch)
        reading = await post(port, [charge(1, 101), call(3, "wait", 3)])
        assert await reading.record() == result(1, 101)
        await asyncio.sleep(0.01)
        clock.advance(1.1)
        ledger = await shop.app.ledger()
        async with asyncio.timeout(PATIENCE):
            while [record.delivery for record in await ledger.list()] != ["written"]:
                await asyncio.sleep(0.005)
                clock.advance(0.2)
        reset(reading)
        assert await next_of(shop.cancelled) == 3
        intended = await post(port, [charge(1, 101)])
        assert await intended.records() == [result(1, 101), end(1)]
        assert shop.charged == [101, 101]
        await intended.close()


@every_front
async def test_equal_commands_of_one_stream_are_separate(front: str) -> None:
    shop = Shop()
    async with shop.serving(front) as port:
        reading = await post(port, [charge(1, 101), charge(2, 101), charge(3, 101)])
        assert await reading.records() == [*(result(id, 101) for id in (1, 2, 3)), end(3)]
        assert shop.charged == [101, 101, 101]
        await reading.close()


@every_front
async def test_equal_command_after_a_delivered_stream_is_separate(front: str) -> None:
    shop = Shop()
    async with shop.serving(front) as port:
        for _ in range(3):
            reading = await post(port, [charge(1, 101), call(2, "wait", 2)])
            await reading.record()
            shop.gate(2).set()
            assert await reading.records() == [result(2, 2), end(2)]
            shop.gate(2).clear()
            await reading.close()
        assert shop.charged == [101, 101, 101]


# --- arrays of MCP 2025-03-26 ---------------------------------------------------------------------


def tool(id: int, name: str, number: int) -> Any:
    return call(id, "tools/call", params={"name": name, "arguments": {"number": number}})


async def post_array(port: int, *messages: Any) -> Reading:
    """Send an array of a client that prefers events. Without a header it is of this revision."""
    accept = "text/event-stream, application/json;q=0.5"
    return await post(port, list(messages), accept, path="/mcp")


async def event(reading: Reading) -> Any:
    """Return the next answer of a stream."""
    while not (line := await reading.until(b"\n")).startswith(b"data: "):
        pass
    return json.loads(line.removeprefix(b"data: "))


@every_front
async def test_array_stream_that_is_cut_has_delivered_the_answers_that_were_read(
    front: str,
) -> None:
    """An equal call of an answer that was read is new; that of a lost one gets it again."""
    shop = Shop()
    async with shop.serving(front) as port:
        await warm(shop, port)
        reading = await post_array(port, tool(9, "wait", 9), tool(1, "charge", 1))
        await shop.has_begun(9, 1)
        shop.gate(1).set()
        assert (await event(reading))["id"] == 1
        await reading.close()
        lost = await post_array(port, tool(8, "wait", 8), tool(2, "charge", 2))
        await shop.has_begun(8, 2)
        marks = await watch(shop.app, "deliver")
        lost.cut()
        async with asyncio.timeout(PATIENCE):
            await marks.get()
        for number in (2, 8, 9):
            shop.gate(number).set()
        again = await post_array(port, tool(1, "charge", 1), tool(2, "charge", 2))
        answers = [await event(again), await event(again)]
        await again.close()
    replayed = [each["result"].get("_meta", {}) for each in answers]
    assert [bool(each.get("io.wirecall/replayed")) for each in replayed] == [False, True]
    assert shop.charged == [1, 2, 1]


# --- another process ------------------------------------------------------------------------------


class Door:
    """A middleware that holds a call before its command begins."""

    def __init__(self) -> None:
        self.is_shut = False
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()
        self.passed = asyncio.Event()

    async def __call__(self, ctx: Context, call_next: Next) -> object:
        if not self.is_shut:
            return await call_next(ctx)
        self.reached.set()
        await self.opened.wait()
        try:
            return await call_next(ctx)
        finally:
            self.passed.set()


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
@pytest.mark.parametrize("front", ["granian", "uvicorn"])
@pytest.mark.parametrize("form", ["stream", "array", "single"])
async def test_call_that_its_repetition_overtook_in_another_process_does_not_run(
    form: str, front: str, store: Store
) -> None:
    """Its client had left before the server came to serve it, and its repetition was answered."""
    door = Door()
    first = Shop(ledger=store.url, middleware=[door])
    second = Shop(ledger=store.url)
    accept = JSONL if form == "stream" else None

    def message(number: int) -> Any:
        return charge(1, number) if form == "single" else [charge(1, number)]

    async with first.serving(front) as port, second.serving(front) as other:
        warmed = await post(port, message(101), accept)
        await warmed.rest()
        await warmed.close()
        door.is_shut = True
        overtaken = await post(port, message(102), accept)
        async with asyncio.timeout(PATIENCE):
            await door.reached.wait()
        overtaken.cut()
        marks = await watch(second.app, "deliver")
        repetition = await post(other, message(102), accept)
        assert b'"result":102' in await repetition.rest()
        await repetition.close()
        async with asyncio.timeout(PATIENCE):
            await marks.get()  # from now on, an equal call is a new one
        door.opened.set()
        async with asyncio.timeout(PATIENCE):
            await door.passed.wait()
    assert second.charged == [102]
    assert first.charged == [101]
