"""The tap: one row per call of every kind, with its phases, its batch and its references."""

import asyncio
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from tests.console.shops import call, make_app, send
from wirecall import App
from wirecall.console.bodies import BODIES, LONGEST_BODY, Bodies
from wirecall.console.ring import SIZE, Ring, Totals, quantile
from wirecall.console.rows import Seen, critical_path, phases_of, seen_of
from wirecall.console.tap import Tap
from wirecall.errors import DependencyFailed, InvalidRequest, ReferenceInvalid
from wirecall.protocol.secrets import text_without_named
from wirecall.server.call import Mark, Passed
from wirecall.server.tapped import More


@pytest.fixture
async def shop() -> AsyncIterator[tuple[App, Tap]]:
    app, tap = make_app()
    async with app:
        yield app, tap


def rows_of(tap: Tap) -> list[dict[str, Any]]:
    return [seen.row for seen in seen_by(tap)]


def seen_by(tap: Tap) -> list[Seen]:
    found = []
    previous = 0.0
    for raw in tap.ring.since(0):
        found.append(seen_of(raw, "w", 0.0, previous))
        previous = raw[1]
    return found


async def test_tap_notes_every_kind_of_single_call(shop: tuple[App, Tap]) -> None:
    app, tap = shop
    await send(app, call(1, "price", sku="abc"))
    await send(app, call("two", "look", sku="abc"))
    await send(app, call(3, "charge", cents=5, idempotency_key="k"))
    await send(app, call(4, "charge", cents=5, idempotency_key="k"))
    await send(app, call(5, "fail", sku="abc"))
    await send(app, call(6, "price", sku=7))
    await send(app, call(7, "prices"))
    await app.handle(b"{")
    rows = rows_of(tap)
    assert [(row["method"], row["kind"], row["outcome"], row["code"]) for row in rows] == [
        ("price", "query", "ok", None),
        ("look", "query", "ok", None),
        ("charge", "command", "ok", None),
        ("charge", "command", "ok", None),
        ("fail", "query", "error", -32603),
        ("price", "query", "error", -32602),
        ("prices", None, "error", -32601),
        ("(invalid)", None, "error", -32700),
    ]
    assert [row["rpc_id"] for row in rows[:3]] == ["1", '"two"', "3"]
    assert [row["replayed"] for row in rows[2:4]] == [False, True]
    assert rows[2]["key"] == rows[3]["key"] == "k"
    assert rows[2]["call_id"] != rows[3]["call_id"]
    assert [row["id"] for row in rows] == [f"w-{number}" for number in range(1, 9)]
    assert all(row["ms"] >= 0 for row in rows)


async def test_tap_notes_a_big_id_exactly_and_cuts_a_long_one(shop: tuple[App, Tap]) -> None:
    app, tap = shop
    await send(app, call(12345678901234567890, "price", sku="a"))
    await send(app, call("x" * 200, "price", sku="a"))
    first, second = rows_of(tap)
    assert first["rpc_id"] == "12345678901234567890"
    assert second["rpc_id"] == json.dumps("x" * 100)


@pytest.mark.parametrize("is_quick", [False, True])
async def test_tap_batch_entries_know_their_batch(shop: tuple[App, Tap], is_quick: bool) -> None:
    """The first batch of a process is measured; one after a quick batch shares its time."""
    app, tap = shop
    if is_quick:
        # A batch of plain queries, long enough to be quick on a slow machine.
        for _ in range(100):
            before = tap.ring.last
            await send(app, *(call(each, "price", sku="a") for each in range(50)))
            if not tap.ring.since(before)[0][2].is_measured:
                break
        else:
            pytest.skip("this machine is too busy: no batch was quick")
    start = tap.ring.last
    await send(
        app,
        call(1, "price", sku="abc"),
        call(2, "charge", cents=5, idempotency_key=f"k{is_quick}"),
        {"jsonrpc": "2.0", "method": "price", "params": {"sku": "x"}},
        call(4, "prices"),
        call(5, "price", sku="abcd"),
    )
    rows = [row for row in rows_of(tap) if int(row["id"].partition("-")[2]) > start]
    rows.sort(key=lambda row: int(row["position"]))
    assert [row["position"] for row in rows] == [0, 1, 2, 3, 4]
    assert {row["size"] for row in rows} == {5}
    assert len({row["batch"] for row in rows}) == 1
    assert [row["method"] for row in rows] == ["price", "charge", "price", "prices", "price"]
    assert [row["rpc_id"] for row in rows] == ["1", "2", None, "4", "5"]
    assert rows[0]["bytes"] > 0 and rows[1]["bytes"] == 0


async def test_tap_bundle_does_not_keep_messages_after_a_reading(shop: tuple[App, Tap]) -> None:
    app, tap = shop
    for _ in range(5):
        await send(app, *(call(each, "price", sku="a") for each in range(50)))
    assert len(tap.ring.since(0)) == 250
    assert tap.ring._bundles == []


async def test_tap_knows_the_references_of_a_batch(shop: tuple[App, Tap]) -> None:
    app, tap = shop
    first = call(1, "price", sku="abc")
    second: dict[str, Any] = {**call(2, "charge", idempotency_key="r"), "refs": {"cents": [1, ""]}}
    third = {**call(3, "price", sku="a"), "after": [2]}
    answers = await send(app, first, second, third)
    assert len(answers) == 3
    (waits,) = tap.plans.values()
    assert waits[2] == (1,)
    if "result" in answers[1]:
        assert waits[1] == (0,)


async def test_tap_names_the_method_of_an_entry_whose_references_are_refused(
    shop: tuple[App, Tap],
) -> None:
    app, tap = shop
    wrong: dict[str, Any] = {**call(1, "charge", idempotency_key="r"), "refs": {"cents": "x"}}
    await send(app, wrong, {**call(2, "price", sku="a"), "after": [1]}, call(3, "look", sku="a"))
    await send(app, {**call(4, "price", sku="a"), "after": [1]})
    rows = {row["rpc_id"]: (row["method"], row["kind"], row["code"]) for row in rows_of(tap)}
    assert rows == {
        "1": ("charge", "command", ReferenceInvalid.CODE),
        "2": ("price", "query", DependencyFailed.CODE),
        "3": ("look", "query", None),
        "4": ("price", "query", InvalidRequest.CODE),
    }


async def test_tap_phases_follow_each_other(shop: tuple[App, Tap]) -> None:
    app, tap = shop
    await send(app, call(1, "price", sku="a"), call(2, "charge", cents=1, idempotency_key="p"))
    seen = {each.row["method"]: each for each in seen_by(tap)}
    names = [phase["name"] for phase in phases_of(seen["charge"])]
    assert names == ["waited", "claimed", "ran", "encoded", "written"]
    end = 0.0
    for phase in phases_of(seen["charge"]):
        assert phase["start_ms"] == pytest.approx(end, abs=0.01)
        end = phase["start_ms"] + phase["ms"]
    assert [phase["name"] for phase in phases_of(seen["price"])] == ["waited", "ran", "written"]


async def test_tap_single_calls_do_not_share_their_messages() -> None:
    """Single calls share a frame, so the mark of one must not get into it."""
    app, tap = make_app()
    begun = asyncio.Event()
    goes_on = asyncio.Event()

    @app.query
    async def wait() -> None:
        begun.set()
        await goes_on.wait()
        raise ValueError

    async with app:
        waiting = asyncio.ensure_future(send(app, call(1, "wait")))
        await begun.wait()
        await send(app, call(2, "charge", cents=5, idempotency_key="k"))
        await send(app, call(3, "price", sku="abc"))
        goes_on.set()
        await waiting
    marks = {raw[3]: raw[2] for raw in tap.ring.since(0)}
    assert marks["wait"].begun < marks["charge"].begun < marks["price"].begun
    for name, mark in marks.items():
        assert mark.transport == "rpc", name
        assert mark.bytes > 0, name


async def test_tap_captures_bodies_without_secrets() -> None:
    app, tap = make_app("bodies")
    async with app:
        await send(app, call(1, "charge", cents=5, card="4111", idempotency_key="k"))
        await send(app, call(2, "price", sku="x" * (LONGEST_BODY + 1)))
        bodies = list(tap.bodies)
        assert json.loads(bodies[0].params or "") == {"cents": 5, "card": "***"}
        assert json.loads(bodies[0].result or "") == {"paid": 5}
        assert "4111" not in repr(list(tap.bodies))
        assert bodies[1].cut and len(bodies[1].params or "") < 200
        tap.is_paused = True
        await send(app, call(3, "price", sku="a"))
        assert len(tap.bodies) == 2
        tap.is_paused = False
        await send(app, call(4, "charge", cents="x"))
        *_, refused = tap.bodies
        assert json.loads(refused.result or "") == {
            "code": -32602,
            "message": "Invalid params",
            "data": {"reason": "params.cents: expected int, got str"},
        }
        for number in range(BODIES + 5):
            await send(app, call(number, "price", sku="a"))
        assert len(tap.bodies) == BODIES


async def test_tap_hides_what_is_named_like_a_secret() -> None:
    """Without a mark at the parameter, as the tools of other servers."""
    app, tap = make_app("bodies")

    @app.query
    async def login(user: str, password: str, options: dict[str, Any]) -> dict[str, Any]:
        return {"user": user, "accessToken": "tok-4711", "max_tokens": 5, "has_token": True}

    async with app:
        options = {"x-api-key": "key-4711", "list": [{"clientSecret": ["sec-4711"]}], "key": "k"}
        await send(app, call(1, "login", user="ada", password="pw-4711", options=options))
        by_position = {**call(2, "login"), "params": ["ada", "pw-4711", {}]}
        await send(app, by_position)
    first, second = tap.bodies
    assert "4711" not in repr(list(tap.bodies))
    assert json.loads(first.params or "") == {
        "user": "ada",
        "password": "***",
        "options": {"x-api-key": "***", "list": [{"clientSecret": "***"}], "key": "k"},
    }
    assert json.loads(first.result or "") == {
        "user": "ada",
        "accessToken": "***",
        "max_tokens": 5,
        "has_token": True,
    }
    assert json.loads(second.params or "") == ["ada", "***", {}]


def test_text_without_named_reads_escaped_names() -> None:
    assert text_without_named(b'{"\\u0070assword": "4711"}') == b'{"password":"***"}'
    assert text_without_named(b'{"a": 1.10}') == b'{"a": 1.10}'


async def test_tap_forgets_the_secrets_of_a_method_that_was_removed() -> None:
    """Another method may get its place in memory, and has other secrets."""
    app, tap = make_app("bodies")
    async with app:
        await send(app, call(1, "charge", cents=1, card="4111", idempotency_key="k"))
        assert len(tap._redactors) == len(tap._plans) == 1
        app.remove("charge")
        gc.collect()
        assert len(tap._redactors) == len(tap._plans) == 0


@pytest.mark.parametrize("text", ["x", "é", "\N{GRINNING FACE}"])
def test_bodies_take_little_memory(text: str) -> None:
    """20 MB with content; a string with one rare character would take four times its bytes."""
    data = json.dumps("a" * LONGEST_BODY + text, ensure_ascii=False).encode()
    gc.collect()
    tracemalloc.start()
    bodies = Bodies()
    for number in range(2 * BODIES):
        bodies.add(number, bytes(bytearray(data)), bytes(bytearray(data)), cut=False)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 18_000_000
    newest = bodies.get(2 * BODIES - 1)
    assert newest is not None and newest.cut and len(newest.params or "") == LONGEST_BODY
    assert bodies.get(0) is None
    bodies.add(9999, b"1", None, cut=False)
    assert len(bodies) < BODIES


async def test_tap_keeps_no_bodies_unless_asked(shop: tuple[App, Tap]) -> None:
    app, tap = shop
    await send(app, call(1, "charge", cents=5, card="4111", idempotency_key="k"))
    assert not tap.bodies
    assert "4111" not in repr(tap.ring.since(0))


async def test_tap_totals_count_methods_errors_and_replays(shop: tuple[App, Tap]) -> None:
    app, tap = shop
    for number in range(3):
        await send(app, call(number, "charge", cents=5, idempotency_key="k"))
    await send(app, *(call(number, "price", sku="a") for number in range(10)))
    await send(app, call(1, "nothing"))
    await send(app, call(1, "price", sku=1))
    tap.totals.count()
    methods = tap.totals.methods
    assert methods["charge"].calls == 3 and methods["charge"].replays == 2
    assert methods["price"].calls == 11 and methods["price"].errors == {-32602: 1}
    assert methods["(other)"].errors == {-32601: 1}
    assert sum(methods["price"].buckets) == 11
    assert tap.totals.missed == 0
    assert {name: trip.number for name, trip in tap.trips.items()}["claim"] == 3


def test_totals_say_how_many_rows_they_missed() -> None:
    ring = Ring(4)
    totals = Totals(ring)
    for _ in range(10):
        ring.note(1.0, Mark(0.5), "price", 1, None, None, None)
    totals.count()
    assert totals.missed == 6
    assert totals.methods["price"].calls == 4


def test_ring_since_returns_only_what_is_new() -> None:
    ring = Ring()
    for number in range(SIZE + 10):
        ring.note(1.0, Mark(0.5), "price", number, None, None, None)
    assert ring.last == SIZE + 10
    assert len(ring.since(0)) == SIZE
    assert [row[0] for row in ring.since(SIZE + 7)] == [SIZE + 8, SIZE + 9, SIZE + 10]
    assert ring.find(3) is None
    assert ring.since(0, 5)[0][0] == SIZE + 6


@pytest.mark.parametrize("is_command", [False, True])
def test_ring_takes_little_memory(is_command: bool) -> None:
    gc.collect()
    tracemalloc.start()
    ring = Ring()
    for number in range(SIZE):
        mark = Mark(number + 0.2)
        if is_command:
            id = f"call-{number:016}"
            more = More("command", "ok", "yes", f"k-{number}", started=number + 0.1, call_id=id)
            ring.note_packed(number + 0.5, mark, "charge", number, None, None, more)
        else:
            ring.note(number + 0.5, mark, "charge", number, None, None, None)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 2_000_000


def test_ring_keeps_every_fact_of_a_packed_row() -> None:
    ring = Ring()
    mark = Mark(0.5, "ada")
    passed = Passed("bank", "2025-06-18", id=7)
    more = More("command", "error", "no", "k", True, attempt=2, entered=0.7, passed=passed)
    number = ring.note_packed(1.0, mark, "charge", 2**80, -32602, 3, more)
    mark.ended = 2.0
    row = ring.find(number)
    assert row is not None
    assert row[2] is mark
    expected = (1, 1.0, mark, "charge", 2**80, -32602, 3, more)
    assert msgspec.to_builtins(row) == msgspec.to_builtins(expected)


def test_quantile_lies_in_the_bucket_of_its_call() -> None:
    ring = Ring()
    totals = Totals(ring)
    for _ in range(95):
        ring.note(1.001, Mark(1.0), "price", 1, None, None, None)
    for _ in range(5):
        ring.note(2.0, Mark(1.0), "price", 1, None, None, None)
    totals.count()
    buckets = totals.methods["price"].buckets
    assert 0.8 <= quantile(buckets, 0.5) <= 1.6
    assert 800 <= quantile(buckets, 0.99) <= 1640
    assert quantile([0] * len(buckets), 0.95) == 0


def test_critical_path_follows_references() -> None:
    mark = Mark(0.0, batch=1, size=3)

    def entry(position: int, start: float, end: float) -> Seen:
        raw = (position + 1, end, mark, "m", position, None, position, None)
        return Seen(raw, "w", 0.0, start)

    entries = [entry(0, 0.0, 5.0), entry(1, 0.0, 7.0), entry(2, 5.0, 9.0)]
    assert critical_path(entries, {2: [0]}) == {0, 2}
    assert critical_path(entries[:2], {}) == {1}


async def test_tap_of_a_lax_app_notes_calls() -> None:
    app, tap = make_app(strict=False)
    async with app:
        assert await app.handle(b'{"method":"price","params":["abc"],"id":1}') is not None
    assert [row["method"] for row in rows_of(tap)] == ["price"]


def test_app_without_a_tap_has_the_plain_dispatcher() -> None:
    from wirecall.server.dispatch import Dispatcher

    app = App("shop")
    assert type(app._serving()) is Dispatcher
