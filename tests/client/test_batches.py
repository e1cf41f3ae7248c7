"""Batches (V7): one array where that is legal, single requests elsewhere, and each entry with its
own outcome.
"""

import asyncio
from typing import Any

import msgspec
import pytest

from tests.client.peers import PATIENCE, Peer, Writer, answers, http, ok, served, until
from tests.client.shops import WAYS, connected, shop
from tests.clock import LoopClock
from wirecall import App, Limits, UsageError, connect
from wirecall.errors import BadAnswer, MethodNotFound, NotSent, RpcError, TimedOut
from wirecall.testing import client as in_memory

encode = msgspec.json.encode


@WAYS
async def test_batch_is_one_array(way: str) -> None:
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


async def test_block_that_fails_sends_nothing() -> None:
    async with in_memory(shop()) as client:
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with client.batch() as batch:
                entry = batch.call("stock.add", {"sku": "tea", "number": 1})
                raise ZeroDivisionError
        with pytest.raises(UsageError, match="has not been sent"):
            entry.result()
        assert batch.wire is None
        assert await client.call("stock.count", ["tea"]) == 0


async def test_batch_of_no_entry_and_of_one() -> None:
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


async def test_entry_that_cannot_be_written_fails_alone() -> None:
    async with in_memory(shop()) as client:
        async with client.batch() as batch:
            bad = batch.call("price", {"sku": object()})
            good = batch.call("price", ["tea"])
            also = batch.call("price", ["tea"])
        assert isinstance(bad.error, NotSent)
        assert good.ok and also.ok


async def test_answers_are_matched_by_id_in_any_order() -> None:
    def mixed(message: Any) -> bytes:
        """The last first, the second missing, the third twice, the fourth under another id, the
        fifth malformed.
        """
        ids = [entry["id"] for entry in message]
        broken = {"jsonrpc": "2.0", "id": ids[4]}
        return http(
            encode(
                [
                    ok(ids[5], "last"),
                    ok(ids[2]),
                    ok(ids[0], "first"),
                    ok(ids[2]),
                    ok(str(ids[3])),
                    broken,
                    7,
                ]
            )
        )

    async with Peer(answers(mixed)) as peer, connect(peer.url, discover=False) as client:
        async with client.batch() as batch:
            entries = [batch.call("x") for _ in range(6)]
        assert entries[0].result() == "first" and entries[5].result() == "last"
        words = [
            "gave no answer to this call; it sent",
            "answered this call twice",
            "gave no answer",
            "either a result or",
        ]
        for entry, expected in zip(entries[1:5], words, strict=True):
            with pytest.raises(BadAnswer, match=expected) as caught:
                entry.result()
            assert caught.value.ran == "unknown"
        assert len(peer.bodies) == 1


async def test_single_object_may_answer_an_array() -> None:
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
    http(
        b'{"jsonrpc":"2.0","id":"server-error","error":{"code":-32602,"message":"bad"}}',
        "400 Bad Request",
    ),
    http(b'{"jsonrpc":"2.0","error":{"code":-32700,"message":"bad"}}', "400 Bad Request"),
    http(b"what is that", "400 Bad Request"),
]


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_server_that_refuses_arrays_receives_single_calls_afterwards(refusal: bytes) -> None:
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


async def test_array_that_may_have_run_is_not_sent_again() -> None:
    failure = http(
        b'{"jsonrpc":"2.0","id":null,"error":{"code":-32603,"message":"Internal error"}}'
    )
    async with (
        Peer(answers(lambda _m: failure)) as peer,
        connect(peer.url, discover=False) as client,
    ):
        async with client.batch() as batch:
            entries = [batch.call("x") for _ in range(3)]
        assert batch.wire == "array"
        assert all(
            isinstance(entry.error, RpcError) and entry.error.ran == "unknown" for entry in entries
        )
        assert len(peer.bodies) == 1


def watched(limits: Limits, **options: Any) -> tuple[App, list[int], list[int]]:
    """An app, the sizes of the arrays that it gets, and the numbers that its command has received,
    in order.
    """
    app = App("small", limits=limits, **options)
    sizes = list[int]()
    numbers = list[int]()

    @app.query
    def double(n: int) -> int:
        return 2 * n

    @app.query
    def size(text: str) -> int:
        return len(text)

    @app.command(key="auto")
    async def note(n: int) -> int:
        await asyncio.sleep(0)
        numbers.append(n)
        return n

    answer = app._answer

    def watch(data: Any, sender: Any, replayed: Any, key: Any) -> Any:
        message = msgspec.json.decode(data)
        if isinstance(message, list):
            sizes.append(len(message))
        return answer(data, sender, replayed, key)

    app._answer = watch  # type: ignore[method-assign]
    return app, sizes, numbers


@pytest.mark.parametrize("refusal", ["single", "entries"])
async def test_client_learns_the_size_of_arrays_from_a_refusal(refusal: Any) -> None:
    app, sizes, numbers = watched(Limits(batch=7), batch_refusal=refusal)
    async with served(app) as url, connect(f"{url}/rpc", discover=False) as client:
        for _ in range(2):
            async with client.batch() as batch:
                entries = [batch.call("note", {"n": n}, key=f"k-{n}") for n in range(20)]
            assert [entry.result() for entry in entries] == list(range(20))
            assert (batch.wire, client.arrays.chunk) == ("arrays(3)", 7)
    assert sizes == [20, 7, 7, 6, 7, 7, 6]
    assert numbers == list(range(20))


async def test_client_sends_notifications_of_an_array_that_was_refused_by_its_entries_again() -> (
    None
):
    app, sizes, _ = watched(Limits(batch=2), batch_refusal="entries")
    seen = []
    app.query(name="see", notification_allowed=True)(lambda n: seen.append(n))
    async with served(app) as url, connect(f"{url}/rpc", discover=False) as client:
        async with client.batch() as batch:
            entry = batch.call("double", [1])
            for n in range(3):
                batch.notify("see", [n])
        assert (entry.result(), batch.wire) == (2, "arrays(2)")
    assert (sorted(seen), sizes[0]) == ([0, 1, 2], 4)


async def test_client_that_coalesces_is_refused_by_entries_and_sends_again() -> None:
    app, sizes, _ = watched(Limits(batch=2), batch_refusal="entries")
    async with served(app) as url, connect(f"{url}/rpc", discover=False, coalesce=0.01) as client:
        calls = [client.call("double", [n], query=True) for n in range(6)]
        assert await asyncio.gather(*calls) == [0, 2, 4, 6, 8, 10]
    assert max(sizes[1:]) == 2


@pytest.mark.parametrize("limit", [7, 100])
async def test_client_knows_the_size_of_arrays_from_the_description(limit: int) -> None:
    """It does not send larger arrays or smaller ones."""
    app, sizes, _ = watched(Limits(batch=limit))
    async with served(app) as url, connect(f"{url}/rpc") as client:
        async with client.batch() as batch:
            entries = [batch.call("double", [n]) for n in range(2 * limit)]
        assert [entry.result() for entry in entries] == [2 * n for n in range(2 * limit)]
        assert batch.wire == "arrays(2)"
    assert sizes == [limit, limit]


async def test_client_asks_for_the_size_of_arrays_if_all_calls_have_keys() -> None:
    app, sizes, numbers = watched(Limits(batch=100))
    async with served(app) as url, connect(f"{url}/rpc") as client:
        async with client.batch() as batch:
            entries = [batch.call("note", {"n": n}, key=f"k-{n}") for n in range(60)]
        assert [entry.result() for entry in entries] == list(range(60))
        assert batch.wire == "array"
    assert (sizes, numbers) == ([60], list(range(60)))


async def test_client_of_an_app_in_memory_knows_the_size_of_arrays() -> None:
    app, _, numbers = watched(Limits(batch=7))
    async with in_memory(app) as client:
        async with client.batch() as batch:
            entries = [batch.call("note", {"n": n}) for n in range(20)]
        assert (batch.wire, [entry.result() for entry in entries]) == ("arrays(3)", list(range(20)))
    assert numbers == list(range(20))


async def test_client_keeps_the_order_of_commands_across_arrays() -> None:
    """The second array waits for the first one, even if that is slow and in part sent again."""
    order: list[int] = []
    failed: list[int] = []

    def answer(message: Any) -> bytes:
        if isinstance(message, dict):
            return http(b"", "204 No Content")
        if not failed:
            failed.append(1)
            return http(b"later", "503 Service Unavailable")
        order.extend(entry["params"]["n"] for entry in message)
        return http(encode([ok(entry["id"], entry["params"]["n"]) for entry in message]))

    async with Peer(answers(answer)) as peer, connect(peer.url, discover=False) as client:
        async with client.batch() as batch:
            entries = [batch.call("x", {"n": n}, key=f"k-{n}") for n in range(120)]
        assert [entry.result() for entry in entries] == list(range(120))
    assert (batch.wire, order) == ("arrays(3)", list(range(120)))


async def test_client_sends_arrays_of_queries_side_by_side() -> None:
    inside = 0
    gate = asyncio.Event()

    async def meet(_peer: Peer, body: bytes, writer: Writer) -> None:
        nonlocal inside
        inside += 1
        if inside == 3:
            gate.set()
        await gate.wait()
        writer.write(http(encode([ok(entry["id"]) for entry in msgspec.json.decode(body)])))

    async with Peer(meet) as peer, connect(peer.url, discover=False) as client:
        async with client.batch() as batch:
            entries = [batch.call("x", query=True) for _ in range(150)]
        assert all(entry.ok for entry in entries) and batch.wire == "arrays(3)"


async def test_client_fills_arrays_up_to_the_bytes_that_the_server_takes() -> None:
    app, sizes, _ = watched(Limits(bytes_in=1000))
    async with served(app) as url, connect(f"{url}/rpc") as client:
        async with client.batch() as batch:
            entries = [batch.call("size", {"text": "x" * 200}) for _ in range(9)]
        assert [entry.result() for entry in entries] == [200] * 9
        assert batch.wire == "arrays(3)"
        assert sorted(sizes) == [3, 3, 3]  # the transport has refused the first one
        async with client.batch() as batch:  # short entries are not split
            entries = [batch.call("double", [n]) for n in range(12)]
        assert all(entry.ok for entry in entries) and batch.wire == "array"
        async with client.batch() as batch:  # one that is too long for any array fails alone
            entries = [batch.call("size", {"text": "x" * length}) for length in (2000, 1, 1)]
        assert [entry.ok for entry in entries] == [False, True, True]


async def test_entries_have_their_own_timeouts(clock: LoopClock) -> None:
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


async def test_batch_of_a_thousand_entries_over_http() -> None:
    async with served(shop()) as url, connect(f"{url}/rpc") as client:
        async with client.batch() as batch:
            entries = [batch.call("price", {"sku": "x" * (n % 9)}) for n in range(1000)]
        assert [entry.result()["cents"] for entry in entries] == [n % 9 * 100 for n in range(1000)]
