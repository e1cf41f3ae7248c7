"""Servers that refuse, processes that are paused, and apps that are stopped."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg
import pytest
import redis

from tests.calls import call, result
from tests.faults import Answer, Caller, Effects, child, eventually, make_shop
from tests.faults.fronts import Front, Pause, Two, durable, find, is_done
from tests.servers import Store, make_store
from wirecall import App, Context
from wirecall.ledger.base import State

# --- servers that refuse --------------------------------------------------------------------------

# Settings that make a server refuse to write, and those that end it.
REFUSALS = {
    "redis-full": ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
    "redis-replica": ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
    "postgres-read-only": (
        "ALTER SYSTEM SET default_transaction_read_only = on",
        "ALTER SYSTEM RESET default_transaction_read_only",
    ),
    "postgres-without-table": (
        "ALTER TABLE wirecall.ledger RENAME TO lost",
        "ALTER TABLE wirecall.lost RENAME TO ledger",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
async def test_server_that_refuses_to_write_refuses_commands(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, effects: Effects, caller: Caller
) -> None:
    store = make_store(name.partition("-")[0], tmp_path, request.getfixturevalue)
    pause = Pause()
    async with (
        make_shop(store.url, effects, pause=pause) as app,
        make_shop(store.url, effects) as other,
    ):
        await caller.call(other, "charge", "first")
        begun = asyncio.create_task(caller.call(app, "hold", "begun"))
        await pause.entered()
        with refusing(store, *REFUSALS[name]):
            refused = await eventually(lambda: refusal(caller, app))
            pause.go.set()
            assert (await begun).error is None, "it has happened, whatever becomes of its record"
            assert result(await app.handle(call("read"))) == 1
        await eventually(lambda: is_done(store, "hold", "begun"))
        assert (await caller.call(other, "hold", "begun")).is_replayed
        for key in ("first", refused.key):
            assert len(effects.of((await caller.insist(app, "charge", key)).key)) == 1


@contextmanager
def refusing(store: Store, begin: str, end: str) -> Iterator[None]:
    order(store, begin)
    try:
        yield
    finally:
        order(store, end)


def order(store: Store, what: str) -> None:
    if store.kind == "redis":
        with closing(redis.Redis.from_url(store.url.partition("?")[0])) as client:
            client.execute_command(*what.split())  # type: ignore[no-untyped-call]
        return
    with psycopg.connect(
        store.url, autocommit=True, options="-c default_transaction_read_only=off"
    ) as db:
        db.execute(what.encode())
        db.execute("SELECT pg_reload_conf()")


async def refusal(caller: Caller, app: App) -> Answer | None:
    """A refused command, once there is one: a setting needs a moment to reach all sessions."""
    answer = await caller.call(app, "charge", f"key-{len(caller.history)}")
    assert answer.error is None or answer.is_refused, answer
    return answer if answer.error else None


async def test_server_that_answers_garbage_refuses_commands(
    front: Front, effects: Effects, caller: Caller
) -> None:
    async def babble(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(range(256)))
        writer.close()

    with front.proxy.away():
        babbler = await asyncio.start_server(babble, "127.0.0.1", front.proxy.port)
        async with babbler, make_shop(front.url, effects) as app:
            refused = await caller.call(app, "charge", "key")
            assert refused.is_refused
            assert result(await app.handle(call("read"))) == 1
    async with make_shop(front.url, effects) as app:
        assert (await caller.call(app, "charge", "key")).error is None


# --- processes that are paused --------------------------------------------------------------------


@durable
async def test_paused_holder_returns_with_its_outcome(
    store: Store, effects: Effects, caller: Caller
) -> None:
    async with child(store.url, effects) as holder, make_shop(store.url, effects) as app:
        await holder.ask("pause", "stop")
        await holder.begin("hold", "key")
        unsure = await caller.call(app, "hold", "key")
        assert unsure.is_unknown
        os.kill(holder.pid, signal.SIGCONT)
        late = await holder.answer()
        assert late.error is None and not late.is_replayed
        again = await caller.call(app, "hold", "key")
        assert again.repeats(late)
    assert len(effects.all()) == 1


@durable
async def test_paused_holder_in_rerun_mode_finds_its_successor(
    store: Store, effects: Effects, caller: Caller
) -> None:
    caller.most = 2
    async with child(store.url, effects) as holder, make_shop(store.url, effects) as app:
        await holder.ask("pause", "stop")
        await holder.begin("hold_rerun", "key")
        successor = await caller.call(app, "hold_rerun", "key")
        assert successor.error is None and not successor.is_replayed
        os.kill(holder.pid, signal.SIGCONT)
        late = await holder.answer()
        assert late.repeats(successor), "its own outcome was refused"
        assert (await caller.call(app, "hold_rerun", "key")).result == successor.result
    assert len(effects.all()) == 2


@durable
async def test_paused_holder_and_its_successor_may_both_work(
    store: Store, effects: Effects, caller: Caller
) -> None:
    """The stale one ends first: its outcome must not count as the successor's."""
    caller.most = 2
    pause = Pause()
    async with (
        child(store.url, effects) as holder,
        make_shop(store.url, effects, pause=pause) as app,
    ):
        await holder.ask("pause", "stop")
        await holder.begin("hold_rerun", "key")
        successor = asyncio.create_task(caller.call(app, "hold_rerun", "key"))
        await pause.entered()
        os.kill(holder.pid, signal.SIGCONT)
        stale = await holder.answer()
        record = await find(store, "hold_rerun", "key")
        assert record is not None and (record.state, record.attempts) == (State.RUNNING, 2)
        pause.go.set()
        assert (await successor).error is None
        assert (await holder.call("hold_rerun", "key")).result == (await successor).result
    assert stale.error is None and stale.result != (await successor).result
    assert len(effects.all()) == 2


# --- apps that are stopped ------------------------------------------------------------------------


class Stages:
    """Commands that stand still before their commit point, and after it."""

    def __init__(self, url: str, effects: Effects) -> None:
        self.before = Pause()
        self.after = Pause()
        self.app = make_shop(url, effects)

        @self.app.command(commit_point=True)
        async def early(order: int, context: Context) -> str:
            await self.before()
            await context.commit_point()
            return effects.add(context)

        @self.app.command(commit_point=True)
        async def late(order: int, context: Context) -> str:
            await context.commit_point()
            await self.after()
            return effects.add(context)


@durable
async def test_stop_finishes_commands_past_their_commit_point_and_releases_the_others(
    store: Store, effects: Effects, caller: Caller
) -> None:
    stopped = Stages(store.url, effects)
    other = Stages(store.url, effects)
    other.before.go.set()
    async with other.app:
        early = asyncio.create_task(caller.call(stopped.app, "early", "early"))
        late = asyncio.create_task(caller.call(stopped.app, "late", "late"))
        await stopped.before.entered()
        await stopped.after.entered()
        stop = asyncio.create_task(stopped.app.aclose())
        assert (await early).is_refused
        assert await find(store, "early", "early") is None
        assert not stop.done() and not late.done()
        stopped.after.go.set()
        assert (await late).error is None
        await stop
        again = await caller.call(other.app, "late", "late")
        assert again.repeats(await late)
        assert (await caller.call(other.app, "early", "early")).error is None
    assert len(effects.all()) == 2


@durable
async def test_app_that_stops_does_not_claim(
    store: Store, effects: Effects, caller: Caller
) -> None:
    stopped = Stages(store.url, effects)
    late = asyncio.create_task(caller.call(stopped.app, "late", "late"))
    await stopped.after.entered()
    stop = asyncio.create_task(stopped.app.aclose())
    await asyncio.sleep(0)
    try:
        refused = await caller.call(stopped.app, "charge", "new")
        assert result(await stopped.app.handle(call("read"))) == 1
    finally:
        stopped.after.go.set()
        await asyncio.gather(late, stop)
        await stopped.app.aclose()
    assert refused.is_refused
    assert await find(store, "charge", "new") is None


@durable
async def test_handler_that_outlives_the_grace_has_an_unknown_outcome(
    store: Store, effects: Effects, caller: Caller
) -> None:
    stopped = Stages(store.url, effects)
    other = Stages(store.url, effects)
    async with other.app:
        late = asyncio.create_task(caller.call(stopped.app, "late", "late"))
        await stopped.after.entered()
        await stopped.app.aclose(grace=0.05)
        assert (await late).ran == "unknown"
        unsure = await caller.call(other.app, "late", "late")
        assert unsure.is_unknown
    assert effects.all() == []


@durable
async def test_stop_may_come_at_any_moment(store: Store, effects: Effects, caller: Caller) -> None:
    async with make_shop(store.url, effects) as other:
        for moment in range(25):
            keys = [f"key-{moment}-{number}" for number in range(8)]
            stopped = make_shop(store.url, effects)
            await caller.call(stopped, "charge", f"first-{moment}")
            calls = [asyncio.create_task(caller.call(stopped, "charge", key)) for key in keys]
            for _ in range(moment):
                await asyncio.sleep(0)
            await stopped.aclose()
            for answer in await asyncio.gather(*calls):
                assert answer.error is None or answer.is_refused, answer
            answers = await asyncio.gather(*(caller.call(other, "charge", key) for key in keys))
            assert all(answer.error is None for answer in answers), answers
    assert len(effects.all()) == 25 * 9


async def test_stop_releases_a_claim_that_is_in_flight(
    front: Front, two: Two, caller: Caller, effects: Effects
) -> None:
    claim = front.proxy.delay(front.pattern("claim"))
    under_way = asyncio.create_task(caller.call(two.cut, "hold", "key"))
    await claim.wait()
    stop = asyncio.create_task(two.cut.aclose())
    await asyncio.sleep(0)
    front.proxy.flow()
    await stop
    assert (await under_way).is_refused
    assert await find(front.store, "hold", "key") is None
    assert (await caller.call(two.safe, "hold", "key")).error is None
    assert len(effects.of("key")) == 1


async def test_stop_retries_writes_that_failed_at_first(
    front: Front, two: Two, caller: Caller, effects: Effects
) -> None:
    first = await two.held(caller, "hold")
    with front.proxy.away():
        two.pause.go.set()
        assert (await first).error is None
        stop = asyncio.create_task(two.cut.aclose())
        assert result(await two.safe.handle(call("read"))) == 1
    await stop
    assert await is_done(front.store, "hold", "key")
    assert (await caller.call(two.safe, "hold", "key")).result == (await first).result
