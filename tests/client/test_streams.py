"""Answers as they come: `batch.stream()` over every link, and streams of answers that break."""

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest

from tests.client.graphs import add_graph, expected, graphs, observed, summing_app
from tests.client.peers import PATIENCE, CuttingProxy, Peer, Writer, http, ok, served
from tests.client.shops import WAYS, connected, shop
from tests.clock import LoopClock
from wirecall import App, Limits, Retry, UsageError, connect, connect_sync, testing
from wirecall.errors import (
    BadAnswer,
    ConnectionLost,
    NotSent,
    OutcomeUnknown,
    ResultNotRetained,
    RpcError,
    TimedOut,
)

HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/jsonl\r\nTransfer-Encoding: chunked\r\n"
    b"Connection: close\r\n\r\n"
)
END = {"jsonrpc": "2.0", "method": "rpc.end", "params": {"answered": 1, "replayed": []}}
# Ids that a test cannot know before: the id of the entry at this position.
Make = Callable[[list[Any]], list[Any]]


def chunk(line: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(line), line)


def lines(*records: Any) -> bytes:
    """Return records as chunks of a body. Bytes are sent as they are."""
    written = [each if isinstance(each, bytes) else msgspec.json.encode(each) for each in records]
    return b"".join(chunk(each + b"\n") for each in written)


class Streamer(Peer):
    """A server that answers arrays with streams, of which each is made by a function."""

    def __init__(self, *streams: Make, hangs: bool = False, is_clean: bool = False) -> None:
        super().__init__(self._answer)
        # HTTP ends properly, although the end record is missing.
        self._is_clean = is_clean
        self._streams = list(streams)
        self._hangs = hangs
        self.written = asyncio.Event()

    async def _answer(self, _peer: Peer, body: bytes, writer: Writer) -> None:
        message = msgspec.json.decode(body)
        if not isinstance(message, list):
            writer.write(http(msgspec.json.encode(ok(message["id"], message["method"]))))
            return
        records = self._streams.pop(0)(message)
        writer.write(HEAD + lines(*records))
        is_whole = any(isinstance(each, dict) and "method" in each for each in records)
        if is_whole or self._is_clean:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        self.written.set()
        if self._hangs:
            await asyncio.Event().wait()
        writer.close()


def answered(message: list[Any], name: str = "") -> list[Any]:
    return [ok(each["id"], f"{each['method']}{name}") for each in message]


def whole(message: list[Any]) -> list[Any]:
    return [*answered(message, " again"), END]


# --- every link -----------------------------------------------------------------------------------


@WAYS
async def test_stream_yields_every_entry(way: str) -> None:
    async with connected(way) as client:
        batch = client.batch()
        price = batch.call("price", {"sku": "tea"})
        batch.notify("note", {"text": "seen"})
        missing = batch.call("nothing")
        added = batch.rpc.stock.add(sku="tea", number=2)
        found = [entry async for entry in batch.stream()]
        assert batch.wire == ("stream" if way in ("uvicorn", "granian") else "array")
        assert {*found} == {price, missing, added} and len(found) == 3
        assert (price.ok, missing.ok, added.result()) == (True, False, 2)


@pytest.mark.parametrize("server", ["uvicorn", "granian"])
async def test_stream_yields_quick_answers_before_slow_ones(server: str) -> None:
    app = App("slow", references=True)
    gate = asyncio.Event()

    @app.query
    async def slow() -> int:
        await gate.wait()
        return 1

    @app.query
    def quick(n: int) -> int:
        return n

    async with served(app, server) as url, connect(f"{url}/rpc") as client:
        batch = client.batch()
        first = batch.call("slow")
        second = batch.call("quick", {"n": 2})
        third = batch.call("quick", {"n": first.ref()})
        found = []
        async for entry in batch.stream():
            found.append(entry)
            gate.set()
        assert batch.wire == "stream"
        assert found == [second, first, third]
        assert [entry.result() for entry in found] == [2, 1, 1]


@pytest.mark.parametrize("server", ["uvicorn", "granian"])
async def test_stream_of_an_mcp_array_yields_quick_answers_before_slow_ones(server: str) -> None:
    """2025-03-26: a server may send each answer of an array as an event."""
    app = App("slow")
    gate = asyncio.Event()

    @app.query
    async def slow() -> int:
        await gate.wait()
        return 1

    @app.query
    def quick() -> int:
        return 2

    mcp = partial(connect, protocol="mcp", revision="2025-03-26")
    async with served(app, server) as url, mcp(f"{url}/mcp") as client:
        batch = client.batch()
        first = batch.call_tool("slow")
        second = batch.call_tool("quick")
        found = []
        async for entry in batch.stream():
            found.append(entry)
            gate.set()
        assert (batch.wire, found) == ("stream", [second, first])
        async with client.batch() as together:
            together.call_tool("quick")
            together.call_tool("quick")
        assert together.wire == "array"


async def test_stream_of_singles_yields_quick_answers_before_slow_ones() -> None:
    app = App("slow")
    gate = asyncio.Event()

    @app.query
    async def slow() -> int:
        await gate.wait()
        return 1

    @app.query
    def quick() -> int:
        return 2

    async with connect(app, protocol="mcp") as client:
        batch = client.batch()
        first = batch.call_tool("slow")
        second = batch.call_tool("quick")
        found = []
        async for entry in batch.stream():
            found.append(entry)
            gate.set()
        assert (batch.wire, found) == ("singles", [second, first])


@pytest.mark.parametrize("only_after", [False, True], ids=["refs", "after"])
async def test_all_small_graphs_have_the_answers_of_the_oracle_in_a_stream(
    only_after: bool,
) -> None:
    """R5, R6."""
    async with served(summing_app(references=True)) as url, connect(f"{url}/rpc") as client:
        for graph in graphs(4):
            for failing in range(-1, len(graph)):
                batch = client.batch()
                entries = add_graph(batch, graph, failing, call=batch.call, only_after=only_after)
                yielded = [entry async for entry in batch.stream()]
                found = observed(entries, lambda entry: entry.result()["sum"])
                assert found == expected(graph, failing, only_after=only_after), graph
                assert len(yielded) == len(entries)


async def test_stream_in_waves_yields_each_wave() -> None:
    async with connect(summing_app()) as client:
        batch = client.batch()
        entries = add_graph(batch, ((), (0,), (1,)), 1, call=batch.call)
        assert [entry async for entry in batch.stream()] == entries
        assert batch.wire == "waves(2)"


def test_sync_stream_yields_every_entry() -> None:
    with connect_sync(shop()) as client:
        batch = client.batch()
        entries = [batch.call("price", {"sku": "t" * n}) for n in range(3)]
        assert list(batch.stream()) == entries
        assert [entry.result()["cents"] for entry in entries] == [0, 100, 200]
        left = client.batch()
        for _ in range(3):
            left.call("price", {"sku": "tea"})
        for entry in left.stream():
            assert entry.ok
            break


async def test_batch_is_sent_once_by_its_stream_or_its_block() -> None:
    async with connect(shop()) as client:
        async with client.batch() as batch:
            batch.call("stock.add", {"sku": "tea", "number": 1})
            async for entry in batch.stream():
                assert entry.result() == 1
            with pytest.raises(UsageError, match="was sent already"):
                batch.call("price", {"sku": "tea"})
        with pytest.raises(UsageError, match="was sent already"):
            await anext(batch.stream())
        assert await client.call("stock.count", ["tea"]) == 1
        assert [entry async for entry in client.batch().stream()] == []


async def test_stream_of_a_client_that_is_not_open_says_so() -> None:
    client = connect(shop())
    batch = client.batch()
    entry = batch.call("price", {"sku": "tea"})
    with pytest.raises(UsageError, match="not open"):
        await anext(batch.stream())
    assert isinstance(entry.error, ConnectionLost)


async def test_stream_closed_early_fails_the_other_entries() -> None:
    app = App("slow")

    @app.query
    async def slow() -> None:
        await asyncio.Event().wait()

    @app.query
    def quick() -> int:
        return 2

    async with served(app) as url, connect(f"{url}/rpc") as client:
        batch = client.batch()
        first = batch.call("slow")
        second = batch.call("quick")
        answers = batch.stream()
        assert await anext(answers) is second
        await answers.aclose()
        assert isinstance(first.error, ConnectionLost) and first.error.ran == "unknown"
        assert await client.call("quick") == 2


# --- the stream itself ----------------------------------------------------------------------------


async def test_stream_is_asked_for_as_json_lines() -> None:
    async with Streamer(whole) as peer, connect(peer.url, discover=False) as client:
        batch = client.batch()
        entries = [batch.call("x"), batch.call("y")]
        assert [entry async for entry in batch.stream()] == entries
        assert b"Accept: application/jsonl, application/json;q=0.9\r\n" in peer.heads[-1]
        await client.call("z")
        assert b"Accept: application/json\r\n" in peer.heads[-1]


async def test_stream_marks_replayed_answers_in_records_and_at_the_end() -> None:
    def replayed(message: list[Any]) -> list[Any]:
        first, second, third = answered(message)
        end = {"answered": 3, "replayed": [second["id"], True, "x", None]}
        return [{**first, "replayed": True}, second, third, {**END, "params": end}]

    async with Streamer(replayed) as peer, connect(peer.url, discover=False) as client:
        batch = client.batch()
        entries = [batch.call("x") for _ in range(3)]
        seen = [(entry, entry.replayed) async for entry in batch.stream()]
    assert seen[0] == (entries[0], True)
    assert [entry.replayed for entry in entries] == [True, True, False]


async def test_stream_with_heartbeats_strangers_and_garbage() -> None:
    """The first of two answers counts, because the program may already have it."""

    def odd(message: list[Any]) -> list[Any]:
        first, second, third = answered(message)
        return [
            b"",
            first,
            b"\r",
            {**first, "result": "another"},
            ok(999, "of a stranger"),
            b"garbage",
            b"\xff\xfe",
            {"jsonrpc": "2.0", "id": None, "error": {"code": -32600, "message": "a note"}},
            {"jsonrpc": "2.0", "method": "notice"},
            second,
            [third],
            END,
        ]

    async with Streamer(odd) as peer, connect(peer.url, discover=False) as client:
        batch = client.batch()
        entries = [batch.call(name) for name in "xyz"]
        found = [entry async for entry in batch.stream()]
    assert found == entries
    assert [entry.result() for entry in entries] == ["x", "y", "z"]


async def test_stream_without_an_answer_fails_that_entry() -> None:
    def short(message: list[Any]) -> list[Any]:
        return [answered(message)[0], ok("1"), {"jsonrpc": "2.0", "id": 5}, END]

    async with Streamer(short) as peer, connect(peer.url, discover=False) as client:
        batch = client.batch()
        first = batch.call("x")
        second = batch.call("y")
        assert [entry async for entry in batch.stream()] == [first, second]
    assert first.result() == "x"
    assert isinstance(second.error, BadAnswer)
    assert "gave no answer" in str(second.error)
    assert second.error.ran == "unknown"


async def test_stream_that_is_too_long_fails_the_rest() -> None:
    def long(message: list[Any]) -> list[Any]:
        return [answered(message)[0], b"x" * 5000, END]

    async with Streamer(long) as peer, connect(peer.url, discover=False, max_bytes=2000) as client:
        batch = client.batch()
        first = batch.call("x")
        second = batch.call("y")
        assert len([entry async for entry in batch.stream()]) == 2
    # Both came in one piece, or the first alone.
    assert first.ok or isinstance(first.error, BadAnswer)
    assert isinstance(second.error, BadAnswer)


async def test_stream_that_hangs_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_alone(message: list[Any]) -> list[Any]:
        return answered(message)[:1]

    clock = LoopClock(monkeypatch)
    async with (
        Streamer(first_alone, hangs=True) as peer,
        connect(peer.url, discover=False, clock=clock, timeout=PATIENCE) as client,
    ):
        batch = client.batch()
        first = batch.call("x")
        second = batch.call("y", query=True)
        found = []
        async for entry in batch.stream():
            found.append(entry)
            clock.advance(PATIENCE + 1)
    assert found == [first, second]
    assert first.result() == "x"
    assert isinstance(second.error, TimedOut)


async def test_stream_with_pauses_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Retry(silence=)` counts from the last record, and not from the first."""
    clock = LoopClock(monkeypatch)
    steps = [asyncio.Event() for _ in range(4)]

    async def behave(_peer: Peer, body: bytes, writer: Writer) -> None:
        writer.write(HEAD)
        for step, record in zip(steps, [*answered(msgspec.json.decode(body)), END], strict=True):
            await step.wait()
            writer.write(lines(record))
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    retry = Retry(silence=PATIENCE, first=0.0, cap=0.0)
    async with (
        Peer(behave) as peer,
        connect(peer.url, discover=False, clock=clock, timeout=1000, retry=retry) as client,
    ):
        batch = client.batch()
        for name in "xyz":
            batch.call(name, query=True)
        steps[0].set()
        found = []
        async for entry in batch.stream():
            found.append(entry.result())
            clock.advance(PATIENCE * 0.6)
            steps[len(found)].set()
    assert found == ["x", "y", "z"]
    assert len(peer.bodies) == 1


async def test_server_that_refuses_the_array_gets_single_calls() -> None:
    async def behave(peer: Peer, body: bytes, writer: Writer) -> None:
        message = msgspec.json.decode(body)
        if isinstance(message, list):
            error = {"code": -32600, "message": "no arrays"}
            refusal = {"jsonrpc": "2.0", "id": None, "error": error}
            writer.write(http(msgspec.json.encode(refusal)))
        else:
            writer.write(http(msgspec.json.encode(ok(message["id"], message["method"]))))
        await writer.drain()

    async with Peer(behave) as peer, connect(peer.url, discover=False) as client:
        batch = client.batch()
        entries = [batch.call("x"), batch.call("y")]
        found = [entry async for entry in batch.stream()]
    assert batch.wire == "singles"
    assert {*found} == {*entries}
    assert [entry.result() for entry in entries] == ["x", "y"]


async def test_entries_that_a_full_stream_did_not_begin_are_sent_again() -> None:
    app = App("long", limits=Limits(bytes_out=4_000, concurrency=1))

    @app.query
    async def text(n: int) -> str:
        return f"{n} " * 500

    async with (
        served(app, "granian") as url,
        connect(f"{url}/rpc", clock=testing.FakeClock()) as client,
    ):
        batch = client.batch()
        entries = [batch.call("text", {"n": n}) for n in range(10)]
        found = [entry async for entry in batch.stream()]
    assert {*found} == {*entries}
    # One that ran and did not fit any more; the ones after it had not begun.
    dropped = [entry for entry in entries if not entry.ok]
    assert 0 < len(dropped) < 5
    assert all(isinstance(entry.error, ResultNotRetained) for entry in dropped)
    assert entries[0].attempts == 1 < entries[-1].attempts


# --- cuts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_clean", [False, True], ids=["broken", "ended"])
@pytest.mark.parametrize("records", range(5))
async def test_stream_cut_at_each_record_sends_the_rest_again(records: int, is_clean: bool) -> None:
    """Answers are final. Queries and keyed commands are sent again, others are unknown."""

    def cut(message: list[Any]) -> list[Any]:
        return answered(message)[:records]

    async with (
        Streamer(cut, whole, is_clean=is_clean) as peer,
        connect(peer.url, discover=False, retry=Retry(first=0.0, cap=0.0)) as client,
    ):
        batch = client.batch()
        entries = [
            batch.call("ask", query=True),
            batch.call("plain"),
            batch.call("act", key="k-1"),
            batch.call("also", key=True),
        ]
        found = [entry async for entry in batch.stream()]
    assert batch.wire == "stream"
    assert {*found} == {*entries} and len(found) == 4
    repeated = [each["method"] for body in peer.bodies[1:] for each in body]
    assert repeated == [
        each.method for each in entries[records:] if each.query or each.key is not None
    ]
    keys = {
        each["method"]: each["params"]["idempotency_key"]
        for body in peer.bodies
        for each in body
        if "params" in each
    }
    assert keys == {"act": "k-1", "also": entries[3].key}
    for position, entry in enumerate(entries):
        if position < records:
            assert entry.result() == entry.method
        elif entry.method == "plain":
            assert isinstance(entry.error, OutcomeUnknown)
            assert entry.error.ran == "unknown"
            assert "end record" in entry.error.data["reason"]
        else:
            assert entry.result() == f"{entry.method} again"


@pytest.mark.parametrize("records", range(4))
async def test_stream_with_references_cut_at_each_record(records: int) -> None:
    """R10: answered targets go with the array again, and their first answers count."""

    def cut(message: list[Any]) -> list[Any]:
        return answered(message)[:records]

    async with (
        Streamer(cut, whole) as peer,
        connect(peer.url, retry=Retry(first=0.0, cap=0.0)) as client,
    ):
        client._dialect._announced = {"references": 1}  # type: ignore[attr-defined]
        client._dialect._kinds = {"find": "query", "charge": "command"}  # type: ignore[attr-defined]
        batch = client.batch()
        found = batch.call("find")
        paid = batch.call("charge", {"order": found.ref()}, key="k-1")
        last = batch.call("charge", {"order": found.ref("/x")}, after=[paid])
        yielded = [entry async for entry in batch.stream()]
    assert yielded == [found, paid, last]
    names = ["find", "charge", "charge"]
    again = [" again"] * 3
    again[:records] = [""] * records
    assert [entry.result() for entry in yielded] == [
        f"{name}{suffix}" for name, suffix in zip(names, again, strict=True)
    ]
    if records < 3:
        second = peer.bodies[1]
        assert [each["method"] for each in second] == names
        find, first, other = second
        assert first["refs"] == {"/order": {"id": find["id"], "path": ""}}
        assert other["refs"] == {"/order": {"id": find["id"], "path": "/x"}}
        assert other["after"] == [first["id"]]
        assert first["params"] == {"idempotency_key": "k-1"}
        assert other["params"] == {"idempotency_key": last.key}
    assert len(peer.bodies) == 1 + (records < 3)


async def test_target_that_must_not_run_again_leaves_its_dependants() -> None:
    """R10: a keyed command that may have run is unknown, and a query is sent with the value."""

    def cut(message: list[Any]) -> list[Any]:
        return answered(message)[:1]

    async with (
        Streamer(cut) as peer,
        connect(peer.url, discover=False, retry=Retry(first=0.0, cap=0.0)) as client,
    ):
        client._dialect._announced = {"references": 1}  # type: ignore[attr-defined]
        batch = client.batch()
        first = batch.call("act")
        paid = batch.call("charge", {"order": first.ref()}, key="k-1")
        asked = batch.call("ask", {"order": first.ref()}, query=True)
        hurt = batch.call("ask", after=[paid], query=True)
        _ = [entry async for entry in batch.stream()]
    assert first.result() == "act"
    assert isinstance(paid.error, OutcomeUnknown)
    assert "must not run again" in paid.error.data["reason"]
    assert asked.result() == "ask"
    assert peer.bodies[1]["params"] == {"order": "act"}
    assert isinstance(hurt.error, RpcError)
    assert hurt.error.data["type"] == "dependency_unknown"


async def test_streams_through_a_proxy_that_cuts_take_effect_once_each() -> None:
    app = App("bank", references=True)
    charged = Counter[str]()

    @app.query
    async def price(order: str) -> dict[str, int]:
        return {"cents": len(order)}

    @app.command
    async def charge(order: str, cents: int) -> str:
        charged[order] += 1
        await asyncio.sleep(0)
        return f"{order} paid {cents}"

    # A query is sent again only once after two equal losses, so the batches are repeated with keys.
    retry = Retry(attempts=1000, first=0.005, cap=0.05)
    unknown = 0
    async with (
        served(app) as url,
        CuttingProxy(url, 5, longest=4000) as proxy,
        connect(f"{proxy.url}/rpc", timeout=60.0, retry=retry) as client,
    ):
        for number in range(40):
            batch = client.batch()
            for position in range(4):
                order = f"o{number}-{position}"
                asked = batch.call("price", {"order": order})
                batch.call("charge", {"order": order, "cents": asked.ref("/cents")})
            async for entry in batch.stream():
                if entry.method == "charge" and not entry.ok:
                    assert isinstance(entry.error, (RpcError, ConnectionLost, NotSent))
                    unknown += 1
    assert proxy.cuts > 5
    assert max(charged.values()) == 1
    assert len(charged) + unknown >= 160
