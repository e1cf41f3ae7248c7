"""Marks, which all processes find, and the bus that wakes these."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import psycopg
import pytest
import redis

from tests.faults import eventually
from tests.ledger.bus import Heard, channel_of, listening
from tests.ledger.contract import durable_only
from tests.servers import Store, redis_key
from wirecall.ledger.base import MAX_MESSAGE, Ledger, LedgerDown, Mark
from wirecall.ledger.sqlite import bus as sqlite_bus

# Every operation on marks, on a handle that cannot do it.
METHODS: dict[str, Callable[[Ledger], Awaitable[Any]]] = {
    "mark": lambda ledger: ledger.mark("c", Mark("a", b"1"), 60),
    "marked": lambda ledger: ledger.marked("c", "a"),
    "marks": lambda ledger: ledger.marks("c", 60),
}


@pytest.fixture
async def ledger(store: Store) -> AsyncIterator[Ledger]:
    ledger = await store.open()
    yield ledger
    await ledger.aclose()


@pytest.fixture
async def other(store: Store) -> AsyncIterator[Ledger]:
    """A second handle on the same marks."""
    ledger = await store.open()
    yield ledger
    await ledger.aclose()


async def test_marks_are_found_by_name_and_in_their_order(ledger: Ledger, other: Ledger) -> None:
    content = b"\0\xff" + b"x" * 20_000
    made = [Mark("b.1", content), Mark("a", b""), Mark("C d{}:é%", b"3")]
    for mark in made:
        await ledger.mark("channel", mark, 60)
    assert await other.marks("channel", 60) == made
    assert [await other.marked("channel", mark.name) for mark in made] == made
    assert await other.marked("channel", "absent") is None
    assert await other.marked("another", "a") is None
    assert await other.marks("another", 60) == []


async def test_mark_replaces_one_of_its_name(ledger: Ledger, other: Ledger) -> None:
    for name, content in (("a", b"1"), ("b", b"2"), ("a", b"3")):
        await ledger.mark("c", Mark(name, content), 60)
    assert await other.marked("c", "a") == Mark("a", b"3")
    assert await other.marks("c", 60) == [Mark("b", b"2"), Mark("a", b"3")]


async def test_marks_expire(ledger: Ledger, other: Ledger) -> None:
    await ledger.mark("c", Mark("short", b"1"), 0.001)
    await ledger.mark("c", Mark("long", b"2"), 1e6)

    async def is_over() -> bool:
        return await other.marked("c", "short") is None

    await eventually(is_over)
    assert await other.marks("c", 1e6) == [Mark("long", b"2")]


async def test_marks_are_asked_for_by_their_age(ledger: Ledger) -> None:
    await ledger.mark("c", Mark("old", b"1"), 60)

    async def is_older() -> bool:
        return await ledger.marks("c", 0.001) == []

    await eventually(is_older)
    assert await ledger.marks("c", 60) == [Mark("old", b"1")]


async def test_marks_are_listed_for_as_long_as_their_channel_asks(
    store: Store, ledger: Ledger
) -> None:
    for name in ("a", "b"):
        await ledger.mark("long", Mark(name, b""), 200_000, 100_000)
        await ledger.mark("short", Mark(name, b""), 200_000)
    assert [mark.name for mark in await ledger.marks("long", 100_000)] == ["a", "b"]
    if store.kind in ("redis", "cluster"):  # the others list a mark as long as they keep it
        for channel, seconds in (("long", 100_000), ("short", 3600)):
            with redis_key(store.url, f"{{marks-{channel}}}") as (client, name):
                assert seconds - 60 < client.ttl(name) <= seconds


async def test_many_marks_at_once_are_all_kept(ledger: Ledger, other: Ledger) -> None:
    """Also while others of the same time have expired, and are removed."""
    for number in range(30):
        await ledger.mark("c", Mark(f"over{number}", b""), 0.001)
    marks = [Mark(f"{number}", b"%d" % number) for number in range(50)]
    await asyncio.gather(
        *(each.mark("c", mark, 60) for each, mark in zip([ledger, other] * 25, marks, strict=True))
    )
    found = [mark for mark in await ledger.marks("c", 60) if not mark.name.startswith("over")]
    assert sorted(found, key=lambda mark: int(mark.name)) == marks


async def test_marks_are_not_records(ledger: Ledger) -> None:
    await ledger.mark("c", Mark("a", b"1"), 60)
    assert await ledger.list() == []
    await ledger.sweep()
    assert await ledger.marked("c", "a") == Mark("a", b"1")


@durable_only
@pytest.mark.parametrize("name", METHODS)
async def test_marks_of_a_closed_ledger_are_down(store: Store, name: str) -> None:
    ledger = await store.open()
    await ledger.aclose()
    with pytest.raises(LedgerDown):
        await METHODS[name](ledger)


# --- the bus --------------------------------------------------------------------------------------


async def test_bus_of_a_ledger_in_memory_is_none(store: Store, ledger: Ledger) -> None:
    if store.kind == "memory":
        assert ledger.join("c", Heard()) is None


@durable_only
async def test_bus_reaches_all_listeners_of_its_channel(ledger: Ledger, other: Ledger) -> None:
    channel = channel_of()
    strange = channel_of()
    async with (
        listening(ledger, channel) as (one, _),
        listening(other, channel) as (two, heard),
        listening(other, channel) as (_, third),
        listening(other, strange) as (stranger, strange_heard),
    ):
        await stranger.send("strange")
        sent = ["first", "x" * MAX_MESSAGE, "last"]
        for message in sent:
            await one.send(message)
        for each in (heard, third):
            await each.until(lambda each=each: len(each.messages) >= 3)  # type: ignore[misc]
        assert heard.messages == third.messages == sent
        await two.send("back")
        await third.until(lambda: "back" in third.messages)
        assert set(strange_heard.messages) <= {"strange"}


@durable_only
async def test_bus_that_is_closed_receives_nothing(ledger: Ledger, other: Ledger) -> None:
    channel = channel_of()
    async with listening(ledger, channel) as (bus, heard):
        async with listening(other, channel) as (_, gone):
            pass
        async with listening(other, channel) as (_, alive):
            await bus.send("later")
            await alive.until(lambda: alive.messages == ["later"])
        assert gone.messages == []
        assert heard.beginnings == 1


def interrupt(store: Store, cluster: Any) -> None:
    """End all connections that listen."""
    if store.kind == "sqlite":
        shutil.rmtree(f"{store.url.removeprefix('sqlite:')}-bus")
    elif store.kind == "postgres":
        with psycopg.connect(store.url, autocommit=True) as db:
            db.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE query LIKE 'LISTEN%' AND pid <> pg_backend_pid()"
            )
    else:
        urls = [node.url for node in cluster.nodes] if cluster else [store.url.partition("?")[0]]
        for url in urls:
            with redis.Redis.from_url(url) as client:
                client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")


@durable_only
async def test_bus_listens_again_after_an_interruption(
    store: Store,
    ledger: Ledger,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It reports that messages may have been lost."""
    monkeypatch.setattr(sqlite_bus, "QUIET", 0.01)
    cluster = request.getfixturevalue("cluster_server") if store.kind == "cluster" else None
    channel = channel_of()
    async with listening(ledger, channel) as (_, heard):
        for beginnings in (2, 3):
            await asyncio.to_thread(interrupt, store, cluster)
            await heard.until(lambda least=beginnings: heard.beginnings >= least)  # type: ignore[misc]
            async with listening(ledger, channel) as (other, _):
                await other.send(f"after {beginnings}")
                await heard.until(lambda told=f"after {beginnings}": told in heard.messages)  # type: ignore[misc]
