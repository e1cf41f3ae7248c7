"""Retries: what may be repeated, with the same key and within one deadline; and nothing else."""

import asyncio
import math
import re
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.client.peers import PATIENCE, Peer, Writer, answers, http, ok, served, until
from tests.clock import LoopClock
from wirecall import App, Retry, UsageError, connect
from wirecall.client.delivery import mint_key
from wirecall.errors import (
    BadAnswer,
    Busy,
    ConnectionLost,
    KeyConflict,
    KeyInProgress,
    NotSent,
    OutcomeUnknown,
    RpcError,
    TimedOut,
)
from wirecall.testing import FakeClock, Faults
from wirecall.testing import client as in_memory

encode = msgspec.json.encode


def counter() -> tuple[App, list[str]]:
    app = App("counter")
    ran = []

    @app.command
    async def add(name: str) -> int:
        ran.append(name)
        return len(ran)

    @app.query
    def look() -> int:
        return len(ran)

    return app, ran


def test_minted_key_is_a_uuid_of_version_7() -> None:
    keys = [mint_key() for _ in range(1000)]
    assert all(
        re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", key)
        for key in keys
    )
    assert len(set(keys)) == 1000
    assert abs(int(keys[0].replace("-", "")[:12], 16) / 1000 - time.time()) < 60


@pytest.mark.parametrize("key", [None, True, "mine"])
async def test_command_whose_answer_is_lost_is_repeated_and_runs_once(key: Any) -> None:
    app, ran = counter()
    async with in_memory(app, faults=Faults(drop_reply=3), clock=FakeClock()) as client:
        async with client.batch() as batch:
            entry = batch.call("add", {"name": "tea"}, key=key)
        assert entry.result() == 1
        assert entry.replayed and entry.attempts == 4
        assert ran == ["tea"]


async def test_command_without_a_key_is_not_repeated() -> None:
    app, ran = counter()
    async with in_memory(app, faults=Faults(drop_reply=1)) as client:
        with pytest.raises(ConnectionLost) as caught:
            await client.call("add", {"name": "tea"}, key=False)
        assert caught.value.ran == "unknown"
        assert ran == ["tea"]


async def test_query_is_repeated_and_has_no_key() -> None:
    app, _ = counter()
    async with in_memory(app, faults=Faults(drop_reply=1), clock=FakeClock()) as client:
        async with client.batch() as batch:
            entry = batch.call("look")
        assert (entry.result(), entry.key, entry.attempts) == (0, None, 2)


# --- a query that ends its server -----------------------------------------------------------------


async def dies(_peer: Peer, _body: bytes, writer: Writer) -> None:
    writer.transport.abort()


async def dies_in_the_answer(_peer: Peer, body: bytes, writer: Writer) -> None:
    writer.write(http(encode(ok(msgspec.json.decode(body)["id"])))[:-10])
    await writer.drain()
    writer.transport.close()


TWICE = "x: two connections were lost in the same way, so this query is not sent again: the connection broke"


@pytest.mark.parametrize("how", [dies, dies_in_the_answer])
async def test_query_whose_connection_dies_twice_in_the_same_way_is_not_sent_again(
    how: Any,
) -> None:
    async with Peer(how) as peer, connect(peer.url, discover=False, retry=Retry(first=0)) as client:
        with pytest.raises(ConnectionLost, match=TWICE) as caught:
            await client.call("x", query=True)
        assert caught.value.ran == "unknown"
        assert len(peer.calls) == 2


async def test_query_counts_only_equal_deaths_of_its_connection() -> None:
    """Before the answer, in it, and then an answer; a 503 in between changes nothing."""
    busy = answers(lambda _m: http(b"later", "503 Service Unavailable"))
    steps = [
        dies,
        busy,
        dies_in_the_answer,
        busy,
        answers(lambda message: http(encode(ok(message["id"])))),
    ]

    async def in_turn(peer: Peer, body: bytes, writer: Writer) -> None:
        await steps[len(peer.calls) - 1](peer, body, writer)

    async with (
        Peer(in_turn) as peer,
        connect(peer.url, discover=False, retry=Retry(first=0)) as client,
    ):
        assert await client.call("x", query=True) == "fine"
    steps[2] = dies
    async with (
        Peer(in_turn) as peer,
        connect(peer.url, discover=False, retry=Retry(first=0)) as client,
    ):
        with pytest.raises(ConnectionLost, match=TWICE):
            await client.call("x", query=True)
        assert len(peer.calls) == 3


async def test_command_with_a_key_is_repeated_however_its_connections_die() -> None:
    async with (
        Peer(dies) as peer,
        connect(peer.url, discover=False, retry=Retry(first=0, attempts=5)) as client,
    ):
        with pytest.raises(ConnectionLost):
            await client.call("x", key="k")
        assert len(peer.calls) == 5
        # One array carries both; after two deaths the command continues alone.
        async with client.batch() as batch:
            query = batch.call("x", query=True)
            command = batch.call("y", key="k")
        assert (query.attempts, command.attempts) == (2, 5)
        with pytest.raises(ConnectionLost, match=TWICE):
            query.result()


SUICIDAL = """
import os, sys
from wirecall import App
app = App("suicidal")
@app.query
def crash() -> int:
    with open(sys.argv[1], "a") as file:
        file.write("x")
    os.abort()
@app.query
def fine() -> int:
    return 1
app.run("stdio")
"""


@pytest.mark.parametrize("protocol", ["jsonrpc", "mcp"])
async def test_query_that_aborts_its_server_does_so_twice_at_most(
    tmp_path: Path, protocol: Any
) -> None:
    """The client learns from the server that it is a query; over MCP it still carries a key."""
    command = [sys.executable, "-c", SUICIDAL, str(tmp_path / "crashes")]
    async with connect(
        command, protocol=protocol, retry=Retry(first=0), timeout=PATIENCE, stderr="keep"
    ) as client:
        call = client.call if protocol == "jsonrpc" else client.call_tool
        with pytest.raises(
            ConnectionLost, match=r"lost in the same way.*ended by signal 6"
        ) as caught:
            await call("crash")
        assert caught.value.ran == "unknown"
        assert (tmp_path / "crashes").read_text() == "xx"
        assert await call("fine", type=int) == 1


async def test_batch_repeats_its_entries_with_their_keys() -> None:
    app, ran = counter()
    async with in_memory(app, faults=Faults(drop_reply=2), clock=FakeClock()) as client:
        async with client.batch() as batch:
            entries = [batch.call("add", {"name": str(n)}) for n in range(3)]
            bare = batch.call("add", {"name": "bare"}, key=False)
        assert [entry.result() for entry in entries] == [1, 2, 3]
        assert isinstance(bare.error, ConnectionLost)
        assert ran == ["0", "1", "2", "bare"]


async def test_back_off_doubles_under_full_jitter_up_to_its_cap() -> None:
    app, _ = counter()
    clock = FakeClock()
    chances = iter([1.0, 0.5, 1.0, 0.0, 1.0, 1.0, 1.0])
    retry = Retry(attempts=8, first=0.1, cap=1.0)
    faults = Faults(cut_after=0)
    async with in_memory(
        app, faults=faults, clock=clock, retry=retry, chance=lambda: next(chances)
    ) as client:
        with pytest.raises(NotSent):
            await client.call("look")
    assert clock.slept == pytest.approx([0.1, 0.1, 0.4, 0.0, 1.0, 1.0, 1.0])


async def test_deadline_covers_all_attempts() -> None:
    app, _ = counter()
    clock = FakeClock()
    retry = Retry(attempts=1000, first=1.0, cap=1.0)
    async with in_memory(
        app, faults=Faults(cut_after=0), clock=clock, retry=retry, chance=lambda: 1.0
    ) as client:
        with pytest.raises(NotSent):
            await client.call("look", timeout=5.0)
    assert clock.now < 5.0
    assert len(clock.slept) == 4


async def test_ran_is_not_no_after_a_lost_attempt() -> None:
    """The first answer is dropped, then the server is unreachable: the last attempt did not run,
    the first may have.
    """
    app, ran = counter()
    faults = Faults(drop_reply=1, cut_after=1)
    async with in_memory(app, faults=faults, clock=FakeClock()) as client:
        with pytest.raises(
            ConnectionLost, match="an attempt was lost, and the last one failed"
        ) as caught:
            await client.call("add", {"name": "tea"})
    assert caught.value.ran == "unknown"
    assert ran == ["tea"]


def error(code: int, kind: str, **data: Any) -> Any:
    body = {"code": code, "message": kind, "data": {"type": kind, **data}}
    return lambda message: http(encode({"jsonrpc": "2.0", "id": message["id"], "error": body}))


async def test_retry_after_is_honoured() -> None:
    replies = [error(40910, "idempotency_key_in_progress", ran="unknown", retry_after_ms=2500)]
    replies += [error(42910, "busy", ran="no", retry_after_ms=700)]
    replies += [lambda _m: http(b"later", "503 Service Unavailable", "Retry-After: 3")]
    replies += [lambda _m: http(b"later", "429 Too Many Requests")]
    replies += [lambda message: http(encode(ok(message["id"])))]
    steps = iter(replies)
    clock = FakeClock()
    async with Peer(answers(lambda message: next(steps)(message))) as peer:
        async with connect(peer.url, discover=False, clock=clock, chance=lambda: 0.0) as client:
            assert await client.call("x", key="k") == "fine"
        assert clock.slept == [2.5, 0.7, 3.0, 0.0]
        assert {body["params"]["idempotency_key"] for body in peer.bodies} == {"k"}
        assert len({body["id"] for body in peer.bodies}) == 5  # every attempt has its own id


FINAL = [
    (50910, "outcome_unknown", OutcomeUnknown, "unknown"),
    (42210, "idempotency_key_conflict", KeyConflict, "no"),
]


@pytest.mark.parametrize(("code", "kind", "expected", "ran"), FINAL)
async def test_errors_that_only_the_caller_can_decide_are_not_retried(
    code: int, kind: str, expected: Any, ran: str
) -> None:
    async with (
        Peer(answers(error(code, kind, ran=ran))) as peer,
        connect(peer.url, discover=False) as client,
    ):
        with pytest.raises(expected) as caught:
            await client.call("x", key="k")
        assert caught.value.ran == ran
        assert len(peer.bodies) == 1


async def test_pause_longer_than_the_deadline_ends_the_call_at_once() -> None:
    busy = error(40910, "idempotency_key_in_progress", ran="unknown", retry_after_ms=60_000)
    async with Peer(answers(busy)) as peer, connect(peer.url, discover=False) as client:
        with pytest.raises(KeyInProgress):
            await asyncio.wait_for(client.call("x", key="k", timeout=5.0), PATIENCE)
        assert len(peer.bodies) == 1


def later(*fields: str, status: str = "503 Service Unavailable") -> Any:
    return lambda _message: http(b"later", status, *fields)


LONG = "9" * 5000
busy = error(42910, "busy", ran="no")
# What the server says, and the pause; None: longer than any deadline.
WISHES: list[tuple[str, Any, float | None]] = [
    ("a number of 400 digits", error(42910, "busy", ran="no", retry_after_ms=10**400), None),
    ("a number that fits a float", error(42910, "busy", ran="no", retry_after_ms=1e300), None),
    ("a fraction", error(42910, "busy", ran="no", retry_after_ms=1500.5), 1.5005),
    ("below zero", error(42910, "busy", ran="no", retry_after_ms=-(10**400)), 0.0),
    ("true", error(42910, "busy", ran="no", retry_after_ms=True), 0.0),
    ("a string", error(42910, "busy", ran="no", retry_after_ms="5000"), 0.0),
    ("an array", error(42910, "busy", ran="no", retry_after_ms=[5000]), 0.0),
    ("seconds", later("Retry-After: 7"), 7.0),
    ("seven digits", later("Retry-After: 1000000"), None),
    ("5000 digits", later(f"Retry-After: {LONG}"), None),
    (
        "a date",
        later("Date: Wed, 21 Oct 2015 07:28:00 GMT", "Retry-After: Wed, 21 Oct 2015 07:28:09 GMT"),
        9.0,
    ),
    ("a date in the past", later("Retry-After: Wed, 21 Oct 2015 07:28:09 GMT"), 0.0),
    ("a date far away", later("Retry-After: Fri, 31 Dec 9999 23:59:59 GMT"), None),
    (
        "a date without a zone",
        later("Date: Wed, 21 Oct 2015 07:28:00", "Retry-After: Wed, 21 Oct 2015 07:28:09"),
        9.0,
    ),
    ("a date that is none", later("Retry-After: Wed, 99 Oct 99999999999 99:99:99 +9999"), 0.0),
    ("below zero in the header", later("Retry-After: -5"), 0.0),
    ("nothing", later("Retry-After:"), 0.0),
    ("digits of another script", later("Retry-After: \u0663"), 0.0),
    (
        "a header beside an error",
        lambda m: http(busy(m).partition(b"\r\n\r\n")[2], "429 No", "Retry-After: 4"),
        4.0,
    ),
]


@pytest.mark.parametrize(
    ("wish", "pause"), [wish[1:] for wish in WISHES], ids=[wish[0] for wish in WISHES]
)
async def test_retry_after_is_honoured_up_to_the_deadline(wish: Any, pause: float | None) -> None:
    """The call waits as long as the server says, or ends at once with the server's own error."""

    async def behave(peer: Peer, body: bytes, writer: Writer) -> None:
        message = msgspec.json.decode(body)
        writer.write(wish(message) if len(peer.calls) == 1 else http(encode(ok(message["id"]))))

    clock = FakeClock()
    options: dict[str, Any] = {"clock": clock, "chance": lambda: 0.0, "timeout": 1e5}
    async with Peer(behave) as peer, connect(peer.url, discover=False, **options) as client:
        if pause is None:
            with pytest.raises((Busy, BadAnswer)) as caught:
                await client.call("x", key="k")
            assert not isinstance(caught.value, BadAnswer) or caught.value.status == 503
            assert clock.slept == []
        else:
            assert await client.call("x", key="k") == "fine"
            assert clock.slept == pytest.approx([pause])


async def test_retry_after_of_one_entry_does_not_end_the_others() -> None:
    def refuse(entry: Any) -> Any:
        data = {"type": "busy", "retry_after_ms": 100 if entry["method"] == "short" else 10**30}
        return {
            "jsonrpc": "2.0",
            "id": entry["id"],
            "error": {"code": 42910, "message": "busy", "data": data},
        }

    async def behave(peer: Peer, body: bytes, writer: Writer) -> None:
        message = msgspec.json.decode(body)
        writer.write(
            http(encode([refuse(m) if len(peer.calls) == 1 else ok(m["id"]) for m in message]))
        )

    async with Peer(behave) as peer, connect(peer.url, discover=False, clock=FakeClock()) as client:
        async with client.batch() as batch:
            short = batch.call("short", key="a")
            long = batch.call("long", key="b")
        assert short.result() == "fine"
        assert isinstance(long.error, Busy)


async def test_back_off_does_not_overflow_after_thousands_of_attempts() -> None:
    app, _ = counter()
    retry = Retry(attempts=3000, first=0.001, cap=0.002)
    async with in_memory(app, faults=Faults(cut_after=0), clock=FakeClock(), retry=retry) as client:
        with pytest.raises(NotSent):
            await client.call("look")


async def test_silence_is_a_lost_attempt(clock: LoopClock) -> None:
    async def deaf_at_first(peer: Peer, body: bytes, writer: Writer) -> None:
        if len(peer.bodies) < 3:
            await asyncio.Event().wait()
        writer.write(http(encode(ok(msgspec.json.decode(body)["id"]))))

    options: Any = {
        "discover": False,
        "retry": Retry(silence=PATIENCE, first=0.01),
        "clock": clock,
        "timeout": 9 * PATIENCE,
    }
    async with Peer(deaf_at_first) as peer, connect(peer.url, **options) as client:
        calling = asyncio.create_task(client.call("x", query=True))
        for attempts in (1, 2):
            await until(lambda attempts=attempts: len(peer.bodies) == attempts)  # type: ignore[misc]
            clock.advance(PATIENCE)
        assert await calling == "fine"
        assert len(peer.bodies) == 3
    async with Peer(deaf_at_first) as peer, connect(peer.url, **options) as client:
        # May not be repeated: it has all the time of the call.
        calling = asyncio.create_task(client.call("x"))
        await until(lambda: peer.bodies)
        clock.advance(9 * PATIENCE)
        with pytest.raises(TimedOut, match="within 540 s"):
            await calling


async def test_refusal_after_a_lost_attempt_is_unknown() -> None:
    async def lose_then_refuse(peer: Peer, body: bytes, writer: Writer) -> None:
        if len(peer.bodies) == 1:
            writer.transport.abort()
        else:
            id = msgspec.json.decode(body)["id"]
            writer.write(
                http(
                    encode(
                        {"jsonrpc": "2.0", "id": id, "error": {"code": -32601, "message": "gone"}}
                    )
                )
            )

    async with (
        Peer(lose_then_refuse) as peer,
        connect(peer.url, discover=False, retry=Retry(first=0)) as client,
    ):
        with pytest.raises(RpcError) as caught:
            await client.call("x", key="k")
        assert (caught.value.code, caught.value.ran) == (-32601, "unknown")


async def test_kinds_are_discovered_so_that_commands_have_keys() -> None:
    app, ran = counter()
    async with served(app) as url, connect(f"{url}/rpc") as client:
        async with client.batch() as batch:
            command = batch.call("add", {"name": "tea"})
            query = batch.call("look")
            unknown = batch.call("nothing")
        assert command.key is not None and command.safe
        assert query.key is None and query.safe
        assert unknown.key is None and not unknown.safe
        assert ran == ["tea"]


async def test_options_that_cannot_be_followed() -> None:
    with pytest.raises(UsageError):
        Retry(attempts=0)
    with pytest.raises(UsageError):
        connect(App("x"), timeout=0)
    with pytest.raises(UsageError):
        async with connect(App("x")) as client:
            await client.call("x", timeout=-1)


async def test_time_that_is_not_a_number_is_refused() -> None:
    """A timer at NaN is before no other and after none, so it would delay the deadlines of all
    calls.
    """
    with pytest.raises(UsageError, match="silence > 0"):
        Retry(silence=math.nan)
    with pytest.raises(UsageError, match="timeout must be greater than 0, got nan"):
        connect(App("x"), timeout=math.nan)
    async with connect(App("x")) as client:
        with pytest.raises(UsageError, match="timeout must be greater than 0, got nan"):
            await client.call("x", timeout=math.nan)
