"""Coalescing (B4): simultaneous calls leave in one array, where that is legal and harmless."""

import asyncio
from typing import Any

import msgspec
import pytest

from tests.client.peers import PATIENCE, Peer, answers, http, ok, until
from tests.clock import LoopClock
from wirecall import UsageError, connect
from wirecall.errors import ConnectionLost, TimedOut

encode = msgspec.json.encode


def answered(message: Any) -> bytes:
    if isinstance(message, list):
        return http(encode([ok(entry["id"], entry["params"]) for entry in message]))
    return http(encode(ok(message["id"], message["params"])))


async def test_simultaneous_calls_are_sent_in_one_array() -> None:
    async with (
        Peer(answers(answered)) as peer,
        connect(peer.url, discover=False, coalesce=0.005) as client,
    ):
        queries = [client.call("q", [n], query=True) for n in range(10)]
        commands = [client.call("c", {"n": n}, key=f"k{n}") for n in range(3)]
        others = [client.call("o", [n]) for n in range(2)]
        results = await asyncio.gather(*queries, *commands, *others)
        assert results[:10] == [[n] for n in range(10)]
        assert results[13:] == [[0], [1]]
        sizes = sorted(len(body) if isinstance(body, list) else 1 for body in peer.bodies)
        assert sizes == [1, 1, 13]  # a call that may not be repeated is sent alone


async def test_single_call_is_not_sent_as_an_array() -> None:
    async with (
        Peer(answers(answered)) as peer,
        connect(peer.url, discover=False, coalesce=0.001) as client,
    ):
        assert await client.call("q", [1], query=True) == [1]
        assert not isinstance(peer.bodies[0], list)


async def test_coalescing_is_off_by_default() -> None:
    async with Peer(answers(answered)) as peer, connect(peer.url, discover=False) as client:
        await asyncio.gather(*(client.call("q", [n], query=True) for n in range(5)))
        assert len(peer.bodies) == 5


async def test_full_array_leaves_at_once() -> None:
    async with (
        Peer(answers(answered)) as peer,
        connect(peer.url, discover=False, coalesce=1.0) as client,
    ):
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*(client.call("q", [n], query=True) for n in range(100)))
        assert [len(body) for body in peer.bodies] == [50, 50]


async def test_server_that_refuses_arrays_gets_single_calls() -> None:
    def refuses(message: Any) -> bytes:
        return http(b"no", "400 Bad Request") if isinstance(message, list) else answered(message)

    async with (
        Peer(answers(refuses)) as peer,
        connect(peer.url, discover=False, coalesce=0.005) as client,
    ):
        assert await asyncio.gather(*(client.call("q", [n], query=True) for n in range(4))) == [
            [n] for n in range(4)
        ]
        assert await client.call("q", [9], query=True) == [9]
        assert [isinstance(body, list) for body in peer.bodies] == [True, *[False] * 5]


async def test_slow_entry_does_not_delay_others_if_answers_come_one_by_one() -> None:
    """A child answers line by line: the quick answers arrive while the slow call still waits for a
    signal.
    """
    import sys

    code = """
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    held = []
    for m in message if isinstance(message, list) else [message]:
        if m["method"] == "slow":
            held.append(m["id"])
        else:
            print(json.dumps({"jsonrpc": "2.0", "id": m["id"], "result": m["method"]}), flush=True)
    for id in held:
        sys.stdin.readline()
        print(json.dumps({"jsonrpc": "2.0", "id": id, "result": "slow"}), flush=True)
"""
    async with connect([sys.executable, "-c", code], discover=False, coalesce=0.02) as client:
        slow = asyncio.create_task(client.call("slow", query=True))
        quick = asyncio.create_task(client.call("quick", query=True))
        assert await asyncio.wait_for(quick, PATIENCE) == "quick"
        assert not slow.done()
        await client.notify("sign")
        assert await asyncio.wait_for(slow, PATIENCE) == "slow"


async def test_call_that_gives_up_and_aclose_do_not_affect_the_others() -> None:
    gate = asyncio.Event()

    async def held(_peer: Peer, body: bytes, writer: Any) -> None:
        await gate.wait()
        writer.write(answered(msgspec.json.decode(body)))

    async with Peer(held) as peer:
        async with connect(peer.url, discover=False, coalesce=0.001) as client:
            calls = [asyncio.create_task(client.call("q", [n], query=True)) for n in range(3)]
            await until(lambda: peer.bodies)
            calls[0].cancel()
            gate.set()
            assert await asyncio.gather(*calls[1:]) == [[1], [2]]
            gate.clear()
            last = [asyncio.create_task(client.call("q", [n], query=True)) for n in range(3)]
            await until(lambda: len(peer.bodies) == 2)
        outcomes = await asyncio.wait_for(asyncio.gather(*last, return_exceptions=True), PATIENCE)
        assert all(isinstance(outcome, ConnectionLost) for outcome in outcomes)


async def test_coalesced_call_keeps_its_own_timeout(clock: LoopClock) -> None:
    gate = asyncio.Event()

    async def held(_peer: Peer, body: bytes, writer: Any) -> None:
        await gate.wait()
        writer.write(answered(msgspec.json.decode(body)))

    async with (
        Peer(held) as peer,
        connect(peer.url, discover=False, coalesce=0.001, clock=clock) as client,
    ):
        short = asyncio.create_task(client.call("q", [1], query=True, timeout=PATIENCE))
        long = asyncio.create_task(client.call("q", [2], query=True, timeout=9 * PATIENCE))
        await until(lambda: peer.bodies)
        clock.advance(PATIENCE)
        with pytest.raises(TimedOut):
            await asyncio.wait_for(short, PATIENCE)
        gate.set()
        assert await asyncio.wait_for(long, PATIENCE) == [2]


def test_window_that_is_too_long() -> None:
    with pytest.raises(UsageError, match="coalesce must be from 0 to 1"):
        connect(["x"], coalesce=60)
