"""Batches (V7): one array where that is legal, single requests elsewhere, and every entry for itself."""

import asyncio
from typing import Any

import msgspec
import pytest

from tests.client.peers import PATIENCE, Peer, Writer, answers, http, ok, served, until
from tests.client.test_calls import WAYS, connected, shop
from tests.clock import LoopClock
from wirecall import App, Limits, UsageError, connect
from wirecall.errors import BadAnswer, MethodNotFound, NotSent, RpcError, TimedOut
from wirecall.testing import client as in_memory

encode = msgspec.json.encode


@WAYS
async def test_a_batch_is_one_array(way: str) -> None:
    async with connected(way) as client:
        async with client.batch() as batch:
            price = batch.call("price", {"sku": "tea"}, type=dict[str, Any])
            batch.notify("note", {"text": "seen"})
            missing = batch.call("nothing")
            added = batch.rpc.stock.add(sku="tea", number=2)
        assert (batch.wire, batch.reason) == ("array", "JSON-RPC 2.0 has arrays")
        assert price.ok and price.result() == {"sku": "tea", "cents": 300}
        assert not missing.ok and isinstance(missing.error, MethodNotFound)
        with pytest.raises(MethodNotFound):
            missing.result()
        assert added.result() == 2
        assert await client.call("stock.count", ["seen"]) == 1


async def test_a_block_that_fails_sends_nothing() -> None:
    async with in_memory(shop()) as client:
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with client.batch() as batch:
                entry = batch.call("stock.add", {"sku": "tea", "number": 1})
                raise ZeroDivisionError
        with pytest.raises(UsageError, match="has not been sent"):
            entry.result()
        assert batch.wire is None
        assert await client.call("stock.count", ["tea"]) == 0


async def test_an_empty_batch_and_one_of_one() -> None:
    async with in_memory(shop()) as client:
        async with client.batch() as batch:
            pass
        assert (batch.wire, batch.reason) == (None, "nothing was sent")
        async with client.batch() as batch:
            entry = batch.call("price", ["tea"])
        assert (batch.wire, batch.reason) == ("singles", "there is one entry")
        assert entry.ok
        with pytest.raises(UsageError, match="was sent already"):
            batch.call("price", ["tea"])


async def test_an_entry_that_cannot_be_written_fails_alone() -> None:
    async with in_memory(shop()) as client:
        async with client.batch() as batch:
            bad = batch.call("price", {"sku": object()})
            good = batch.call("price", ["tea"])
            also = batch.call("price", ["tea"])
        assert isinstance(bad.error, NotSent)
        assert good.ok and also.ok


async def test_answers_are_matched_by_id_in_any_order() -> None:
    def mixed(message: Any) -> bytes:
        """The last first, the second missing, the third twice, the fourth to a strange id, the fifth without sense."""
        ids = [entry["id"] for entry in message]
        broken = {"jsonrpc": "2.0", "id": ids[4]}
        return http(encode([ok(ids[5], "last"), ok(ids[2]), ok(ids[0], "first"), ok(ids[2]), ok(str(ids[3])), broken, 7]))

    async with Peer(answers(mixed)) as peer, connect(peer.url, discover=False) as client:
        async with client.batch() as batch:
            entries = [batch.call("x") for _ in range(6)]
        assert entries[0].result() == "first" and entries[5].result() == "last"
        words = ["gave no answer to this call; it sent", "answered this call twice", "gave no answer", "either a result or"]
        for entry, expected in zip(entries[1:5], words, strict=True):
            with pytest.raises(BadAnswer, match=expected) as caught:
                entry.result()
            assert caught.value.ran == "unknown"
        assert len(peer.bodies) == 1


async def test_a_single_object_may_answer_an_array() -> None:
    """Some servers do so where one answer is owed."""
    async with (
        Peer(answers(lambda message: http(encode(ok(message[0]["id"]))))) as peer,
        connect(peer.url, discover=False) as client,
    ):
        async with client.batch() as batch:
            entry = batch.call("x")
            batch.notify("y")
        assert batch.wire == "array"
        assert entry.result() == "fine"


REFUSALS = [
    http(b'{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"no arrays"}}'),
    http(b'{"jsonrpc":"2.0","id":"server-error","error":{"code":-32602,"message":"bad"}}', "400 Bad Request"),
    http(b'{"jsonrpc":"2.0","error":{"code":-32700,"message":"bad"}}', "400 Bad Request"),
    http(b"what is that", "400 Bad Request"),
]


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_a_server_that_refuses_arrays_gets_singles_from_then_on(refusal: bytes) -> None:
    def no_arrays(message: Any) -> bytes:
        if isinstance(message, list):
            return refusal
        return http(encode(ok(message["id"]))) if "id" in message else http(b"", "202 Accepted")

    async with Peer(answers(no_arrays)) as peer, connect(peer.url, discover=False) as client:
        async with client.batch() as batch:
            entries = [batch.call("x", {"n": n}, key=f"k-{n}") for n in range(3)]
            batch.notify("y")
        assert batch.wire == "singles"
        assert batch.reason.startswith("the server refused an array: ")
        assert all(entry.result() == "fine" for entry in entries)
        array, *singles = peer.bodies
        assert [entry["params"] for entry in array[:3]] == sorted(
            [one["params"] for one in singles if "id" in one], key=lambda params: params["n"]
        )  # the keys too
        assert not {entry.get("id") for entry in array[:3]} & {one.get("id") for one in singles}
        async with client.batch() as again:
            entries = [again.call("x") for _ in range(3)]
        assert again.wire == "singles"
        assert not any(isinstance(body, list) for body in peer.bodies[1:])


async def test_an_array_that_may_have_run_is_not_sent_again() -> None:
    failure = http(b'{"jsonrpc":"2.0","id":null,"error":{"code":-32603,"message":"Internal error"}}')
    async with Peer(answers(lambda _m: failure)) as peer, connect(peer.url, discover=False) as client:
        async with client.batch() as batch:
            entries = [batch.call("x") for _ in range(3)]
        assert batch.wire == "array"
        assert all(isinstance(entry.error, RpcError) and entry.error.ran == "unknown" for entry in entries)
        assert len(peer.bodies) == 1


async def test_chunks_of_the_server_s_limit_are_learned() -> None:
    app = App("small", limits=Limits(batch=7))
    sizes: list[int] = []

    @app.query
    def double(n: int) -> int:
        return 2 * n

    handle = app.handle

    async def watched(data: Any, **options: Any) -> bytes | None:
        message = msgspec.json.decode(data)
        sizes.append(len(message) if isinstance(message, list) else 1)
        return await handle(data, **options)

    app.handle = watched  # type: ignore[method-assign]
    async with in_memory(app) as client:
        for _ in range(2):
            async with client.batch() as batch:
                entries = [batch.call("double", [n]) for n in range(20)]
            assert [entry.result() for entry in entries] == [2 * n for n in range(20)]
            assert batch.wire == "array"
        assert sizes == [20, 7, 7, 6, 7, 7, 6]


async def test_an_array_of_too_many_bytes_is_halved() -> None:
    app = App("small", limits=Limits(bytes_in=1000))

    @app.query
    def size(text: str) -> int:
        return len(text)

    async with served(app) as url, connect(f"{url}/rpc") as client:
        async with client.batch() as batch:
            entries = [batch.call("size", {"text": "x" * 300}) for _ in range(8)]
        assert [entry.result() for entry in entries] == [300] * 8


async def test_each_entry_has_its_own_timeout(clock: LoopClock) -> None:
    gate = asyncio.Event()

    async def slow(_peer: Peer, body: bytes, writer: Writer) -> None:
        message = msgspec.json.decode(body)
        await gate.wait()
        writer.write(http(encode([ok(entry["id"]) for entry in message])))

    async with Peer(slow) as peer, connect(peer.url, discover=False) as client:
        batch = client.batch()
        short = batch.call("x", timeout=PATIENCE)
        long = batch.call("x", timeout=9 * PATIENCE)
        sending = asyncio.create_task(batch.__aexit__(None))
        await until(lambda: peer.bodies)
        clock.advance(PATIENCE)
        await until(lambda: short.is_settled)
        gate.set()
        await asyncio.wait_for(sending, PATIENCE)
        assert isinstance(short.error, TimedOut)
        assert long.result() == "fine"


async def test_a_thousand_entries_over_http() -> None:
    async with served(shop()) as url, connect(f"{url}/rpc") as client:
        async with client.batch() as batch:
            entries = [batch.call("price", {"sku": "x" * (n % 9)}) for n in range(1000)]
        assert [entry.result()["cents"] for entry in entries] == [n % 9 * 100 for n in range(1000)]
