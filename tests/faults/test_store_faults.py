"""Stores that go away, lose answers, fill up or stand still: commands fail closed and tell the truth, and nothing doubles.

In the order of the file: servers killed under load; connections cut within a transition, and anywhere; transactions cut in
their commit; servers that refuse; SQLite files that cannot be used, and disks that fail; processes that are paused; apps
that are stopped.
"""

import asyncio
import os
import pwd
import shutil
import signal
import sqlite3
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from itertools import count, cycle
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import parse_qs, urlsplit

import apsw
import psycopg
import pytest
import redis

from tests.calls import call, make_app, result
from tests.faults import LEASE, PATIENCE, Answer, Caller, Effect, Effects, check, child, eventually, make_shop
from tests.faults.proxy import Direction, Proxy
from tests.servers import DURABLE, Postgres, Redis, RedisCluster, Store, make_store
from wirecall import App, Context, DomainError
from wirecall.ledger.base import Record, RecordId, State
from wirecall.ledger.postgres import queue as postgres_queue
from wirecall.ledger.postgres import transaction as postgres_transaction
from wirecall.ledger.redis import scripts as redis_scripts
from wirecall.ledger.sqlite import file as sqlite_file

Loss = Literal["request", "answer"]

durable = pytest.mark.parametrize("store", DURABLE, indirect=True)
losses = pytest.mark.parametrize("loss", ["request", "answer"])

# What a transition looks like on its way to the server.
TRANSITIONS = {
    "redis": {
        "claim": redis_scripts.CLAIM.sha.encode(),
        "commit_point": redis_scripts.COMMIT_POINT.sha.encode(),
        "complete": redis_scripts.COMPLETE.sha.encode(),
        "release": redis_scripts.RELEASE.sha.encode(),
        "abandon": redis_scripts.ABANDON.sha.encode(),
        "heartbeat": redis_scripts.HEARTBEAT.sha.encode(),
        "get": redis_scripts.GET.sha.encode(),
    },
    "postgres": {
        "claim": b"wirecall.claim(",
        "commit_point": b"SET committed = true",
        "complete": b"wirecall.complete(",
        "release": b"DELETE FROM wirecall.ledger",
        "abandon": b"SET state = 'unknown'",
        "heartbeat": b"SET lease_until = clock_timestamp() + wirecall.seconds(",
        "get": b"SELECT seen.*",
    },
}

# How often the ledger sends it before it gives up: PostgreSQL's sends claims and completions a second time.
SENDINGS = {("postgres", "claim"): 2, ("postgres", "complete"): 2}


@pytest.fixture
def effects(tmp_path: Path) -> Effects:
    return Effects(tmp_path / "effects")


@pytest.fixture
def caller(effects: Effects) -> Iterator[Caller]:
    """At the end of the test, what it was told is compared with what happened."""
    caller = Caller()
    yield caller
    check(caller.history, effects.all(), most=caller.most)


class Pause:
    """Where a handler stands still: `entered` waits until it is there, `go` lets it go on."""

    def __init__(self) -> None:
        self._entered = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self) -> None:
        self._entered.set()
        await self.go.wait()

    async def entered(self) -> None:
        async with asyncio.timeout(PATIENCE):
            await self._entered.wait()


# --- servers killed under load ---------------------------------------------------------------------------------------

CLIENTS = 8


class OnePrimary(RedisCluster):
    """A cluster of which one primary is killed, with a third of the records; the server that the URL names comes first."""

    def __init__(self) -> None:
        super().__init__()
        self._next = cycle(self.nodes)

    def kill(self) -> None:
        next(self._next).kill()


Servers: TypeAlias = Redis | OnePrimary | Postgres


@pytest.fixture(params=[Redis, OnePrimary, Postgres])
def own_server(request: pytest.FixtureRequest) -> Iterator[Servers]:
    """A server that nobody misses."""
    server: Servers = request.param()
    try:
        start(server)
        yield server
    finally:
        server.close()


def start(server: Servers) -> None:
    server.start()
    if isinstance(server, Redis):
        with closing(redis.Redis.from_url(server.url)) as client:
            client.config_set("appendfsync", "always")


async def test_a_server_killed_under_load_doubles_nothing_and_loses_nothing(
    own_server: Servers, effects: Effects, caller: Caller
) -> None:
    app, again = make_shop(own_server.url, effects), make_shop(own_server.url, effects)

    @app.command
    async def work(order: int, context: Context) -> str:
        await asyncio.sleep(0.001)
        run = effects.add(context)
        await asyncio.sleep(0.001)
        return run

    again.command(name="work")(nothing_to_do)
    async with app, again:
        told = await told_while_killed(own_server, app, caller)
        assert {answer.code for answer in caller.history} == {0, 50310}
        assert len(effects.all()) == len(told)
        await all_is_replayed(again, caller, told)


async def test_a_replica_that_takes_over_under_load_doubles_nothing_and_loses_nothing(
    effects: Effects, caller: Caller
) -> None:
    """With `replicas=1`, what was acknowledged is on the replica; and who was not told so was not told that it is done."""
    cluster = RedisCluster(replicas=1)
    try:
        cluster.start()
        url = f"{cluster.nodes[1].url}?replicas=1"
        app, again = make_shop(url, effects), make_shop(url, effects)

        @app.command
        async def work(order: int, context: Context) -> str:
            await asyncio.sleep(0.001)
            return effects.add(context)

        again.command(name="work")(nothing_to_do)
        async with app, again:
            async with Load(app, caller) as load:
                await load.more("results", 100)
                await asyncio.to_thread(cluster.nodes[0].kill)
                await load.more("refusals", 20)
                await asyncio.to_thread(cluster.wait_until, lambda: cluster.nodes[3].ask("ROLE")[0] == b"master")
                await asyncio.to_thread(cluster.nodes[0].start)  # a replica, from now on
                await load.more("results", 100)
            told = {answer.key: answer.result for answer in caller.history if answer.error is None}
            assert len(effects.all()) == len(told) >= 200
            await all_is_replayed(again, caller, told)
    finally:
        cluster.close()


@pytest.mark.parametrize("own_server", [Postgres], indirect=True)
async def test_transactions_in_a_server_killed_under_load_take_effect_exactly_once(own_server: Postgres) -> None:
    bank, caller = Bank(own_server.url, own_server.url), Caller()
    bank.safe.command(name="work")(nothing_to_do)

    @bank.app.query
    async def read() -> int:
        return 1

    @bank.app.command(on_crash="transactional")
    async def work(order: int, context: Context) -> str:
        return await bank.book(context)

    async with bank.app, bank.safe:
        told = await told_while_killed(own_server, bank.app, caller, refusals=0)  # they wait for news of their commit
        assert {answer.code for answer in caller.history} <= {0, 40910, 50310, 50910}
        assert Counter(row.key for row in bank.rows()) == dict.fromkeys(told, 1)
        await all_is_replayed(bank.safe, caller, told)
    check(caller.history, bank.rows())


async def told_while_killed(server: Servers, app: App, caller: Caller, refusals: int = 20) -> dict[str, str]:
    """The results that callers were given while the server was killed and started again, several times."""
    rounds = 2 if isinstance(server, OnePrimary) else 3  # it takes its time to become whole again
    async with Load(app, caller) as load:
        for _ in range(rounds):
            await load.more("results", 40)
            await asyncio.to_thread(server.kill)
            await load.more("refusals", refusals)
            await load.more("queries", 40)
            await asyncio.to_thread(start, server)
        await load.more("results", 40)
    told = {answer.key: answer.result for answer in caller.history if answer.error is None}
    assert len(told) >= 40 * (rounds + 1)
    return told


async def all_is_replayed(app: App, caller: Caller, told: dict[str, str]) -> None:
    answers = await asyncio.gather(*(caller.call(app, "work", key) for key in told))
    assert {answer.key: answer.result for answer in answers} == told
    assert all(answer.is_replayed for answer in answers)


async def nothing_to_do(order: int, context: Context) -> str:
    raise AssertionError("it was done before")


class Load:
    """Clients that send one command after another, and one that reads, for as long as the block lasts."""

    def __init__(self, app: App, caller: Caller) -> None:
        self._app = app
        self._caller = caller
        self._numbers = count()
        self._is_over = False
        self.queries = 0

    async def __aenter__(self) -> "Load":
        self._tasks = [asyncio.create_task(self._send()) for _ in range(CLIENTS)]
        self._tasks.append(asyncio.create_task(self._read()))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)

    @property
    def results(self) -> int:
        return sum(answer.error is None for answer in self._caller.history)

    @property
    def refusals(self) -> int:
        return sum(answer.code == 50310 for answer in self._caller.history)

    async def more(self, what: str, number: int) -> None:
        """Until there are so many more of them."""
        enough = getattr(self, what) + number

        async def are_there() -> bool:
            failed = [task for task in self._tasks if task.done()]
            for task in failed:
                task.result()
            return bool(getattr(self, what) >= enough)

        await eventually(are_there)

    async def _send(self) -> None:
        while not self._is_over:
            await self._caller.insist(self._app, "work", f"key-{next(self._numbers)}")

    async def _read(self) -> None:
        while not self._is_over:
            async with asyncio.timeout(1):
                assert result(await self._app.handle(call("read"))) == 1
            self.queries += 1
            await asyncio.sleep(0.002)


# --- connections cut within a transition -----------------------------------------------------------------------------


class Front:
    """A store behind a proxy: `url` leads through it, `store.url` past it."""

    def __init__(self, kind: str, store: Store, proxy: Proxy) -> None:
        self.kind = kind
        self.store = store
        self.proxy = proxy
        port = urlsplit(store.url).port
        self.url = (
            store.url.replace(f":{port}/", f":{proxy.port}/")
            if kind == "redis"
            else f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres?sslmode=disable&gssencmode=disable"
        )

    def pattern(self, transition: str) -> bytes:
        return TRANSITIONS[self.kind][transition]

    def sendings(self, transition: str) -> int:
        return SENDINGS.get((self.kind, transition), 1)


@pytest.fixture(params=["redis", "postgres"])
def front(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Front]:
    store = make_store(request.param, tmp_path, request.getfixturevalue)
    with Proxy(target(store)) as proxy:
        yield Front(request.param, store, proxy)


def target(store: Store) -> tuple[str, int] | str:
    parts = urlsplit(store.url)
    if store.kind == "redis":
        return "127.0.0.1", parts.port or 0
    return parse_qs(parts.query)["host"][0] + "/.s.PGSQL.5432"


class Two:
    """The app whose connections are cut, and one that nothing happens to, with the same commands."""

    def __init__(self, front: Front, effects: Effects) -> None:
        self._failed: set[str | None] = set()
        self._effects = effects
        self.pause = Pause()
        self.cut = self._with_more(make_shop(front.url, effects, pause=self.pause))
        self.safe = self._with_more(make_shop(front.store.url, effects))

    async def held(self, caller: Caller, method: str) -> asyncio.Task[Answer]:
        """A call of the app that is cut, which stands still in its pause."""
        held = asyncio.create_task(caller.call(self.cut, method, "key"))
        await self.pause.entered()
        return held

    def _with_more(self, app: App) -> App:
        @app.command(commit_point=True, lease=LEASE)
        async def careful(order: int, context: Context) -> str:
            await context.commit_point()
            return self._effects.add(context)

        @app.command(commit_point=True, lease=LEASE)
        def careful_in_a_thread(order: int, context: Context) -> str:
            context.commit_point()
            return self._effects.add(context)

        @app.command(lease=LEASE)
        async def break_after(order: int, context: Context) -> str:
            self._effects.add(context)
            raise ValueError("after the effect")

        @app.command(commit_point=True, lease=LEASE)
        async def fail_once(order: int, context: Context) -> str:
            if context.idempotency_key not in self._failed:
                self._failed.add(context.idempotency_key)
                raise ValueError("before the commit point")
            await context.commit_point()
            return self._effects.add(context)

        return app


@pytest.fixture
async def two(front: Front, effects: Effects, caller: Caller) -> AsyncIterator[Two]:
    two = Two(front, effects)
    async with two.cut, two.safe:
        for app in (two.cut, two.safe):  # scripts are known, connections are there
            for method in ("charge", "careful"):
                assert (await caller.call(app, method, f"{method}-{id(app)}")).error is None
        yield two


@losses
async def test_a_lost_claim_is_refused_and_the_retry_runs(
    front: Front, two: Two, caller: Caller, effects: Effects, loss: Loss
) -> None:
    fault = front.proxy.lose(loss, front.pattern("claim"), times=front.sendings("claim"))
    refused = await caller.call(two.cut, "charge", "key")
    assert refused.is_refused and fault.is_over
    assert effects.of("key") == []
    answers = await asyncio.gather(*(caller.insist(app, "charge", "key") for app in (two.cut, two.safe)))
    assert Counter(answer.is_replayed for answer in answers) == {False: 1, True: 1}
    assert len(effects.of("key")) == 1


@losses
@pytest.mark.parametrize("front", ["postgres"], indirect=True)
@pytest.mark.parametrize("transition", ["claim", "complete"])
async def test_what_is_lost_once_is_sent_again_where_that_is_safe(
    front: Front, two: Two, caller: Caller, effects: Effects, transition: str, loss: Loss
) -> None:
    fault = front.proxy.lose(loss, front.pattern(transition))
    answer = await caller.call(two.cut, "charge", "key")
    assert answer.error is None and fault.is_over
    again = await caller.call(two.safe, "charge", "key")
    assert again.repeats(answer)
    assert len(effects.of("key")) == 1


@pytest.mark.parametrize("front", ["postgres"], indirect=True)
async def test_a_claim_whose_answer_is_lost_for_longer_than_its_lease_is_still_its_own(
    front: Front, caller: Caller, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger sends it again, after 0.3 s: its first record must not stand for a holder that vanished."""
    async with make_shop(impatient(front, monkeypatch), effects) as app:

        @app.command(lease=0.05)
        async def brief(order: int, context: Context) -> str:
            return effects.add(context)

        await caller.call(app, "charge", "first")
        fault = front.proxy.lose("hush", front.pattern("claim"))
        answer = await caller.call(app, "brief", "key")
        assert answer.error is None and not answer.is_replayed and fault.is_over
        assert (await caller.call(app, "brief", "key")).repeats(answer)
    assert len(effects.of("key")) == 1


@pytest.mark.parametrize("front", ["postgres"], indirect=True)
@pytest.mark.parametrize("missing", [1, 5, 6])  # bytes; a Sync, where there is one, has 5
async def test_a_host_that_vanishes_within_its_claim_does_not_lock_the_key(
    front: Front, two: Two, caller: Caller, effects: Effects, missing: int
) -> None:
    before = front.proxy.passed["up"]
    two.pause.go.set()
    first = await two.held(caller, "hold")
    length = front.proxy.passed["up"] - before
    await first
    fault = front.proxy.vanish_after(length - missing)
    await caller.call(two.cut, "hold", "yek")
    assert fault.is_over
    assert (await caller.insist(two.safe, "hold", "yek", seconds=10)).error is None
    assert len(effects.of("yek")) == 1


async def test_a_lost_claim_is_taken_back_even_if_the_store_stays_away_for_longer_than_the_lease(
    front: Front, two: Two, caller: Caller, effects: Effects
) -> None:
    front.proxy.refuse()
    front.proxy.lose("answer", front.pattern("claim"))
    refused = await caller.call(two.cut, "hold", "key")
    assert refused.is_refused
    await lease_is_over(front.store, "hold", "key")
    front.proxy.admit()
    two.pause.go.set()
    unsure = await caller.call(two.safe, "hold", "key")  # perhaps before the clean-up; then nobody knows, for a moment
    assert unsure.error is None or unsure.ran == "unknown"
    assert (await caller.insist(two.cut, "hold", "key", seconds=5)).error is None
    assert len(effects.of("key")) == 1


async def test_a_claim_that_arrives_after_its_clean_up_is_taken_back_too(
    front: Front, effects: Effects, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wirecall.commands.background.UNCLAIM_AGAIN", 1.0)
    async with make_shop(impatient(front, monkeypatch), effects) as app, make_shop(front.store.url, effects) as safe:
        await caller.call(app, "charge", "first")
        late = front.proxy.delay(front.pattern("claim"), times=front.sendings("claim"))
        looked = front.proxy.note(front.pattern("get"))
        refused = await caller.call(app, "charge", "key")
        assert refused.is_refused and late.is_over
        await looked.wait()
        assert await find(front.store, "charge", "key") is None
        front.proxy.flow()
        await eventually(lambda: find(front.store, "charge", "key"))
        assert (await caller.call(safe, "charge", "key")).error is None
    assert len(effects.of("key")) == 1


async def test_a_caller_that_leaves_in_the_middle_of_its_claim_leaves_nothing_behind(
    front: Front, two: Two, caller: Caller, effects: Effects
) -> None:
    late = front.proxy.delay(front.pattern("claim"))
    task = asyncio.create_task(caller.call(two.cut, "charge", "key"))
    await late.wait()
    task.cancel()
    second = asyncio.create_task(caller.call(two.cut, "charge", "key"))
    front.proxy.flow()
    assert (await second).error is None
    assert task.cancelled() and len(effects.of("key")) == 1


@pytest.mark.parametrize("how", ["lost", "cancelled"])
async def test_a_lost_take_over_does_not_take_the_record_of_the_first_holder_with_it(
    front: Front, two: Two, caller: Caller, effects: Effects, how: str
) -> None:
    two.pause.go.set()
    async with child(front.store.url, effects) as first:
        await first.begin("hold_reconcile", "key")
        await first.kill()
    assert len(effects.of("key")) == 1
    await lease_is_over(front.store, "hold_reconcile", "key")
    if how == "lost":
        front.proxy.lose("answer", front.pattern("claim"), times=front.sendings("claim"))
        refused = await caller.call(two.cut, "hold_reconcile", "key")
        assert refused.is_refused
    else:
        front.proxy.stall("down")
        task = asyncio.create_task(caller.call(two.cut, "hold_reconcile", "key"))
        await eventually(lambda: is_claimed_again(front.store, "hold_reconcile", "key"))
        task.cancel()
        front.proxy.flow()
    answer = await caller.insist(two.cut, "hold_reconcile", "key")
    assert [effect.run for effect in effects.of("key")] == [answer.result], "it was done; reconcile would have found out"


@losses
@pytest.mark.parametrize("method", ["careful", "careful_in_a_thread"])
async def test_a_lost_commit_point_stops_the_handler_before_its_effect(
    front: Front, two: Two, caller: Caller, effects: Effects, loss: Loss, method: str
) -> None:
    fault = front.proxy.lose(loss, front.pattern("commit_point"))
    refused = await caller.call(two.cut, method, "key")
    assert refused.is_refused and fault.is_over
    assert effects.of("key") == []
    assert (await caller.insist(two.safe, method, "key")).error is None
    assert len(effects.of("key")) == 1


@losses
async def test_a_lost_completion_costs_the_caller_nothing_and_is_recorded_later(
    front: Front, two: Two, caller: Caller, effects: Effects, loss: Loss
) -> None:
    fault = front.proxy.lose(loss, front.pattern("complete"), times=front.sendings("complete"))
    answer = await caller.call(two.cut, "charge", "key")
    assert answer.error is None and fault.is_over
    again = await caller.call(two.safe, "charge", "key")
    assert again.repeats(answer)
    assert len(effects.of("key")) == 1


async def test_a_completion_is_recorded_once_the_store_is_back(
    front: Front, two: Two, caller: Caller, effects: Effects
) -> None:
    first = await two.held(caller, "hold")
    with front.proxy.away():
        two.pause.go.set()
        answer = await first
        assert answer.error is None
        unsure = await Caller().call(two.safe, "hold", "key")
        assert unsure.is_unknown
    await eventually(lambda: is_done(front.store, "hold", "key"))
    again = await caller.call(two.safe, "hold", "key")
    assert again.repeats(answer)
    assert len(effects.of("key")) == 1


@losses
async def test_a_lost_release_ends_with_the_lease(
    front: Front, two: Two, caller: Caller, effects: Effects, loss: Loss
) -> None:
    fault = front.proxy.lose(loss, front.pattern("release"))
    failed = await caller.call(two.cut, "fail_once", "key")
    assert (failed.code, failed.ran) == (-32603, "no") and fault.is_over
    assert (await caller.insist(two.safe, "fail_once", "key")).error is None
    assert len(effects.of("key")) == 1


@losses
async def test_a_lost_abandon_ends_with_the_lease_and_nobody_runs_it_again(
    front: Front, two: Two, caller: Caller, effects: Effects, loss: Loss
) -> None:
    fault = front.proxy.lose(loss, front.pattern("abandon"))
    failed = await caller.call(two.cut, "break_after", "key")
    assert (failed.code, failed.ran) == (-32603, "unknown") and fault.is_over
    unsure = await caller.call(two.safe, "break_after", "key")
    assert unsure.is_unknown
    assert len(effects.of("key")) == 1


@losses
async def test_a_lost_heartbeat_does_not_lose_the_record(
    front: Front, two: Two, caller: Caller, effects: Effects, loss: Loss
) -> None:
    fault = front.proxy.lose(loss, front.pattern("heartbeat"))
    first = await two.held(caller, "hold")
    second = asyncio.create_task(caller.call(two.safe, "hold", "key"))
    await fault.wait()
    await beats(front.store, "hold", "key", times=3)
    two.pause.go.set()
    answers = await asyncio.gather(first, second)
    assert answers[0].error is None and answers[0].result == answers[1].result
    assert (answers[0].is_replayed, answers[1].is_replayed) == (False, True)
    assert len(effects.of("key")) == 1


async def test_a_holder_cut_off_for_longer_than_its_lease_still_brings_the_truth(
    front: Front, two: Two, caller: Caller, effects: Effects
) -> None:
    first = await two.held(caller, "hold")
    with front.proxy.away():
        unsure = await caller.call(two.safe, "hold", "key")
        assert unsure.is_unknown
    await caller.insist(two.cut, "charge", "back-again")
    two.pause.go.set()
    answer = await first
    again = await caller.insist(two.safe, "hold", "key")
    assert again.repeats(answer)
    assert len(effects.of("key")) == 1


async def test_a_holder_cut_off_in_rerun_mode_yields_to_its_successor(
    front: Front, two: Two, caller: Caller, effects: Effects
) -> None:
    caller.most = 2
    first = await two.held(caller, "hold_rerun")
    with front.proxy.away():
        successor = await caller.call(two.safe, "hold_rerun", "key")
        assert successor.error is None and not successor.is_replayed
    await caller.insist(two.cut, "charge", "back-again")
    two.pause.go.set()
    assert (await first).result == successor.result, "the first heard that it was too late, and what counts instead"
    assert (await caller.call(two.safe, "hold_rerun", "key")).result == successor.result
    assert len(effects.of("key")) == 2, "rerun means: it may happen twice"


async def reads_until(app: App, *calls: asyncio.Task[Answer]) -> int:
    """Queries go on while commands wait: how many there were until these calls had ended."""
    queries = 0
    while not all(one.done() for one in calls):
        assert result(await app.handle(call("read"))) == 1
        queries += 1
        await asyncio.sleep(0.005)
    return queries


async def find(store: Store, method: str, key: str) -> Record | None:
    ledger = await store.open()
    try:
        return await ledger.get(RecordId("", method, key))
    finally:
        await ledger.aclose()


async def lease_is_over(store: Store, method: str, key: str) -> None:
    async def is_over() -> bool:
        record = await find(store, method, key)
        return record is not None and record.lease_left == 0

    await eventually(is_over)


async def is_done(store: Store, method: str, key: str) -> bool:
    record = await find(store, method, key)
    return record is not None and record.state is State.DONE


async def is_claimed_again(store: Store, method: str, key: str) -> bool:
    record = await find(store, method, key)
    return record is not None and record.attempts == 2


async def beats(store: Store, method: str, key: str, *, times: int) -> None:
    """Until the lease has been renewed so many times."""
    left = 0.0
    async with asyncio.timeout(PATIENCE):
        while times:
            record = await find(store, method, key)
            assert record is not None and record.state is State.RUNNING
            times -= record.lease_left > left
            left = record.lease_left
            await asyncio.sleep(0.01)


# --- connections cut anywhere, and stalled ---------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_a_connection_may_be_cut_after_any_number_of_bytes(
    front: Front, two: Two, caller: Caller, effects: Effects, direction: Direction
) -> None:
    before = front.proxy.passed[direction]
    await caller.call(two.cut, "charge", "key-at-0000")
    length = front.proxy.passed[direction] - before
    cuts = 0
    for place in sorted({1, *range(length // 20, length, length // 20), length - 1}):
        key = f"key-at-{place:04}"
        fault = front.proxy.cut_after(place, direction)
        first = await caller.call(two.cut, "charge", key)
        fault.end()
        assert first.error is None or first.is_refused
        assert (await caller.insist(two.safe, "charge", key)).error is None
        assert len(effects.of(key)) == 1
        cuts += fault.happened
    assert cuts >= 19  # numbers in the traffic have more or fewer digits, so the very last bytes may not be reached


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_a_store_that_falls_silent_refuses_commands_and_lets_queries_go_on(
    front: Front, effects: Effects, caller: Caller, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_shop(impatient(front, monkeypatch), effects) as app:
        await caller.call(app, "charge", "first")
        front.proxy.stall(direction)
        silent = asyncio.create_task(caller.call(app, "charge", "key"))
        queries = await reads_until(app, silent)
        assert (await silent).is_refused
        assert queries > 10
        front.proxy.flow()
        await caller.insist(app, "charge", "key")
    assert len(effects.of("key")) == 1


async def test_duplicates_of_a_refused_command_are_not_refused_one_after_another(
    front: Front, effects: Effects, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_shop(impatient(front, monkeypatch), effects) as app:
        await caller.call(app, "charge", "first")
        front.proxy.stall("up")
        duplicates = [asyncio.create_task(caller.call(app, "charge", "key")) for _ in range(16)]
        await asyncio.wait(duplicates, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(duplicates, timeout=2.0)
        answered = sum(task.done() for task in duplicates)
        front.proxy.flow()
        await asyncio.gather(*duplicates)
    assert answered == 16


async def test_refusals_stay_quick_however_many_there_were(front: Front, effects: Effects, caller: Caller) -> None:
    async with make_shop(front.url, effects) as app:
        await caller.call(app, "charge", "first")
        with front.proxy.away():
            calls = [asyncio.create_task(caller.call(app, "charge", f"key-{number}")) for number in range(600)]
            _, slow_ones = await asyncio.wait(calls, timeout=3)
            for one in slow_ones:
                one.cancel()
        answers = [one.result() for one in calls if one not in slow_ones]
        assert answers and all(answer.is_refused for answer in answers)
        assert (await caller.insist(app, "charge", "afterwards")).error is None
    assert [effect.key for effect in effects.all()] == ["first", "afterwards"]
    assert not slow_ones, f"{len(slow_ones)} of 600 were not refused within 3 s"


def impatient(front: Front, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL, with a ledger behind it that waits for an answer for 0.3 s instead of 5 s."""
    if front.kind == "redis":
        return f"{front.url}&socket_timeout=0.3"
    monkeypatch.setattr(postgres_queue, "PATIENCE", 0.3)
    return f"{front.url}&connect_timeout=2"


# --- a transaction cut in its commit ---------------------------------------------------------------------------------


class Bank:
    """Transactional commands; their effects are rows of the same database."""

    def __init__(self, url: str, safe_url: str) -> None:
        self._url = safe_url
        self.runs = 0
        self.app = self._make(url)
        self.safe = self._make(safe_url)
        with psycopg.connect(self._url, autocommit=True) as db:
            db.execute("DROP TABLE IF EXISTS public.bookings")
            db.execute("CREATE TABLE public.bookings (key text, attempt bigint, run text)")

    def _make(self, url: str) -> App:
        app = make_app(ledger=url)

        @app.command(on_crash="transactional", lease=LEASE)
        async def book(order: int, context: Context) -> str:
            return await self.book(context)

        return app

    async def book(self, context: Context) -> str:
        self.runs += 1
        row = (context.idempotency_key, context.meta["attempt"], f"run-{self.runs}")
        await context.db.execute("INSERT INTO public.bookings VALUES (%s, %s, %s)", row)
        return row[2]

    async def book_order(self, order: int, context: Context) -> str:
        return await self.book(context)

    def rows(self) -> list[Effect]:
        with psycopg.connect(self._url, autocommit=True) as db:
            return [Effect(*row) for row in db.execute("SELECT * FROM public.bookings").fetchall()]


@pytest.fixture
async def bank(front: Front) -> AsyncIterator[Bank]:
    bank = Bank(front.url, front.store.url)
    async with bank.app, bank.safe:
        yield bank


only_postgres = pytest.mark.parametrize("front", ["postgres"], indirect=True)


@only_postgres
@losses
async def test_a_commit_that_was_not_confirmed_is_settled_by_asking_the_server(front: Front, bank: Bank, loss: Loss) -> None:
    caller = Caller()
    await caller.call(bank.app, "book", "first")
    lost = front.proxy.lose(loss, b"COMMIT")
    asked = front.proxy.note(b"pg_xact_status")
    answer = await caller.call(bank.app, "book", "key")
    assert answer.error is None and not answer.is_replayed
    assert lost.is_over and asked.is_over
    assert bank.runs == (2 if loss == "answer" else 3), "what was not committed ran again, what was did not"
    again = await caller.call(bank.safe, "book", "key")
    assert again.repeats(answer)
    assert [row.key for row in bank.rows()] == ["first", "key"]
    check(caller.history, bank.rows())


@only_postgres
@losses
async def test_a_commit_that_nobody_can_be_asked_about_is_said_to_be_unknown_and_the_retry_is_definite(
    front: Front, bank: Bank, loss: Loss, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_transaction, "SETTLE", 0.3)
    caller = Caller()
    await caller.call(bank.app, "book", "first")
    front.proxy.refuse()
    front.proxy.lose(loss, b"COMMIT")
    unsure = await caller.call(bank.app, "book", "key")
    assert unsure.is_unknown
    front.proxy.admit()
    answer = await caller.insist(bank.app, "book", "key")
    assert answer.is_replayed == (loss == "answer")
    assert [row.key for row in bank.rows()] == ["first", "key"]
    check(caller.history, bank.rows())


@only_postgres
@losses
@pytest.mark.parametrize("statement", [b"SAVEPOINT wirecall", b"INSERT INTO public.bookings"], ids=["begin", "handler"])
async def test_a_transaction_cut_before_its_commit_leaves_nothing(
    front: Front, bank: Bank, loss: Loss, statement: bytes
) -> None:
    caller = Caller()
    await caller.call(bank.app, "book", "first")
    front.proxy.lose(loss, statement)
    refused = await caller.call(bank.app, "book", "key")
    assert refused.is_refused
    assert [row.key for row in bank.rows()] == ["first"]
    assert await find(front.store, "book", "key") is None
    await caller.insist(bank.app, "book", "key")
    assert [row.key for row in bank.rows()] == ["first", "key"]
    check(caller.history, bank.rows())


@only_postgres
@pytest.mark.parametrize(("part", "steps"), [("begin", 20), ("end", 3)])
async def test_a_host_that_vanishes_within_a_message_locks_its_key_for_a_while_at_most(
    front: Front, bank: Bank, part: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server hears no end of the connection, and must not wait for the rest while it holds the record."""
    monkeypatch.setattr(postgres_transaction, "SILENCE", 1.0)  # seconds that a handler may be silent
    monkeypatch.setattr(postgres_transaction, "SETTLE", 0.01)  # nobody is left to ask what became of its commit
    caller, passed = Caller(), dict[str, int]()
    place: int | None = None

    @bank.app.command(on_crash="transactional", lease=LEASE)
    async def work(order: int, context: Context) -> str:
        passed["begun"] = front.proxy.passed["up"]
        run = await bank.book(context)
        passed["handled"] = front.proxy.passed["up"]
        if part == "end" and place is not None:
            front.proxy.vanish_after(place)
            front.proxy.refuse()
        return run

    bank.safe.command(on_crash="transactional", name="work")(bank.book_order)
    await caller.call(bank.app, "book", "first")
    passed["idle"] = front.proxy.passed["up"]
    await caller.call(bank.app, "work", "whole")
    passed["done"] = front.proxy.passed["up"]
    length = passed["begun"] - passed["idle"] if part == "begin" else passed["done"] - passed["handled"]
    keys = ["first", "whole"]
    for place in (length * step // steps for step in range(steps + 1)):
        keys += [f"connect-{place}", f"vanish-{place}"]
        await caller.insist(bank.app, "book", f"connect-{place}")
        if part == "begin":
            front.proxy.vanish_after(place)
        lost = await caller.call(bank.app, "work", f"vanish-{place}")
        assert lost.is_refused or lost.is_unknown
        assert (await caller.insist(bank.safe, "work", f"vanish-{place}", seconds=10)).error is None
        if part == "end":
            front.proxy.admit()
    assert [row.key for row in bank.rows()] == keys
    check(caller.history, bank.rows())


# What a handler does after its session was ended: nothing that would notice, one more statement, an error of its own.
AFTERWARDS: dict[str, Callable[[Context], Awaitable[Any]]] = {
    "returns": lambda context: asyncio.sleep(0),
    "writes": lambda context: context.db.execute("SELECT 1"),
    "fails": lambda context: fail(),
}


async def fail() -> None:
    raise DomainError(4020, "not enough money")


@pytest.mark.parametrize("own_server", [Postgres], indirect=True)
@pytest.mark.parametrize("afterwards", AFTERWARDS)
async def test_a_server_killed_while_a_handler_runs_has_committed_nothing(own_server: Postgres, afterwards: str) -> None:
    """COMMIT was not sent, so nobody need be asked: the answer is definite, and it is there at once."""
    bank, caller = Bank(own_server.url, own_server.url), Caller()

    @bank.app.command(on_crash="transactional")
    async def work(order: int, context: Context) -> str:
        run = await bank.book(context)
        if bank.runs == 1:
            await asyncio.to_thread(own_server.kill)
            await AFTERWARDS[afterwards](context)
        return run

    async with bank.app, bank.safe:
        async with asyncio.timeout(postgres_transaction.SETTLE - 5):
            refused = await caller.call(bank.app, "work", "key")
        assert (refused.code, refused.ran, bank.runs) == (50310, "no", 1)
        await asyncio.to_thread(start, own_server)
        assert bank.rows() == []
        answer = await caller.insist(bank.app, "work", "key")
        assert [row.run for row in bank.rows()] == [answer.result]
    check(caller.history, bank.rows())


@only_postgres
@pytest.mark.parametrize("how", ["ended by the server", "cut"])
@pytest.mark.parametrize("afterwards", AFTERWARDS)
async def test_a_session_ended_while_its_handler_runs_has_committed_nothing(
    front: Front, bank: Bank, how: str, afterwards: str
) -> None:
    """The server is there, but the handler may have been too slow for it: to run it again is for the caller to decide."""
    caller = Caller()

    @bank.app.command(on_crash="transactional")
    async def work(order: int, context: Context) -> str:
        run = await bank.book(context)
        if bank.runs == 1:
            await end_session(front, context, how)
            await AFTERWARDS[afterwards](context)
        return run

    refused = await caller.call(bank.app, "work", "key")
    assert (refused.code, refused.ran, bank.runs) == (50310, "no", 1)
    answer = await caller.call(bank.app, "work", "key")
    assert answer.error is None and bank.runs == 2
    assert [row.run for row in bank.rows()] == [answer.result]
    check(caller.history, bank.rows())


async def end_session(front: Front, context: Context, how: str) -> None:
    row = await (await context.db.execute("SELECT pg_backend_pid()")).fetchone()
    if how == "cut":
        front.proxy.cut()
    async with await psycopg.AsyncConnection.connect(front.store.url, autocommit=True) as db:
        if how == "ended by the server":
            await db.execute("SELECT pg_terminate_backend(%s)", row)

        async def is_gone() -> bool:
            return (await db.execute("SELECT FROM pg_stat_activity WHERE pid = %s", row)).rowcount == 0

        await eventually(is_gone)


@only_postgres
async def test_transactions_are_refused_together_where_no_connection_can_be_made(front: Front, bank: Bank) -> None:
    caller = Caller()
    await caller.call(bank.app, "book", "first")
    with front.proxy.away():
        calls = [asyncio.create_task(caller.call(bank.app, "book", f"key-{number}")) for number in range(600)]
        _, slow_ones = await asyncio.wait(calls, timeout=3)
        answers = await asyncio.gather(*calls)
    assert {(answer.code, answer.ran) for answer in answers} == {(50310, "no")}
    assert not slow_ones, f"{len(slow_ones)} of 600 were not refused within 3 s"
    assert (await caller.insist(bank.app, "book", "afterwards")).error is None
    assert [row.key for row in bank.rows()] == ["first", "afterwards"]


# --- servers that refuse ---------------------------------------------------------------------------------------------

# What makes a server refuse to write, and what ends that.
REFUSALS = {
    "redis-full": ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
    "redis-replica": ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
    "postgres-read-only": (
        "ALTER SYSTEM SET default_transaction_read_only = on",
        "ALTER SYSTEM RESET default_transaction_read_only",
    ),
    "postgres-without-table": ("ALTER TABLE wirecall.ledger RENAME TO lost", "ALTER TABLE wirecall.lost RENAME TO ledger"),
}


@pytest.mark.parametrize("name", REFUSALS)
async def test_a_server_that_refuses_to_write(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, effects: Effects, caller: Caller
) -> None:
    store = make_store(name.partition("-")[0], tmp_path, request.getfixturevalue)
    pause = Pause()
    async with make_shop(store.url, effects, pause=pause) as app, make_shop(store.url, effects) as other:
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
    with psycopg.connect(store.url, autocommit=True, options="-c default_transaction_read_only=off") as db:
        db.execute(what.encode())
        db.execute("SELECT pg_reload_conf()")


async def refusal(caller: Caller, app: App) -> Answer | None:
    """A refused command, once there is one: a setting takes a moment to reach all sessions."""
    answer = await caller.call(app, "charge", f"key-{len(caller.history)}")
    assert answer.error is None or answer.is_refused, answer
    return answer if answer.error else None


async def test_a_server_that_answers_garbage(front: Front, effects: Effects, caller: Caller) -> None:
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


# --- SQLite files that cannot be used --------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def url_of(path: Path) -> str:
    return f"sqlite:{path}"


def the_file_is_no_database(path: Path) -> Callable[[], None]:
    path.write_bytes(b"Dear diary, " * 500)
    return path.unlink


def the_file_is_a_folder(path: Path) -> Callable[[], None]:
    path.mkdir()
    return path.rmdir


def the_folder_is_a_file(path: Path) -> Callable[[], None]:
    path.parent.write_text("no folder")
    return path.parent.unlink


def the_file_is_another_program_s(path: Path) -> Callable[[], None]:
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA application_id = 252006673")
        db.execute("CREATE TABLE configuration (name TEXT)")
    return path.unlink


def the_file_is_from_the_future(path: Path) -> Callable[[], None]:
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE wirecall_meta (only INTEGER PRIMARY KEY, version INTEGER, fence INTEGER)")
        db.execute("CREATE TABLE wirecall_commands (caller TEXT, method TEXT, key TEXT)")
        db.execute("INSERT INTO wirecall_meta VALUES (1, 999, 0)")
        db.commit()
    return path.unlink


@pytest.mark.parametrize(
    "spoil",
    [
        the_file_is_no_database,
        the_file_is_a_folder,
        the_folder_is_a_file,
        the_file_is_another_program_s,
        the_file_is_from_the_future,
    ],
)
async def test_a_file_that_cannot_be_a_ledger(
    spoil: Callable[[Path], Callable[[], None]], tmp_path: Path, effects: Effects, caller: Caller
) -> None:
    path = tmp_path / "folder" / "ledger.db"
    if spoil is not the_folder_is_a_file:
        path.parent.mkdir()
    repair = spoil(path)
    async with make_shop(url_of(path), effects) as app:
        for _ in range(2):
            refused = await caller.call(app, "charge", "key")
            assert refused.is_refused
            assert result(await app.handle(call("read"))) == 1
        repair()
        assert (await caller.call(app, "charge", "key")).error is None
    assert len(effects.all()) == 1


@pytest.mark.parametrize("what", ["file", "folder"])
async def test_a_file_or_folder_that_may_only_be_read(what: str) -> None:
    with folder_of_a_mere_user() as (folder, user):
        path, effects = folder / "kept" / "ledger.db", Effects(folder / "effects")
        async with child(url_of(path), effects) as before:
            await before.ask("become", *user)
            known = await before.call("charge", "known")
        closed = path if what == "file" else path.parent
        mode = closed.stat().st_mode
        async with child(url_of(path), effects) as one:
            await one.ask("become", *user)
            closed.chmod(mode & ~0o222)
            for _ in range(2):
                refused = await one.call("charge", "key")
                assert refused.is_refused
                assert await one.ask("read") == 1
            closed.chmod(mode)
            answers = [known, refused, await one.call("charge", "key"), await one.call("charge", "known")]
        assert [answer.is_replayed for answer in answers] == [False, False, False, True]
        check(answers, effects.all())


@contextmanager
def folder_of_a_mere_user() -> Iterator[tuple[Path, tuple[int, int]]]:
    """A folder, and a user whom its permissions bind: root passes by all of them, so there it is `nobody`."""
    folder = Path(tempfile.mkdtemp(prefix="wirecall-"))
    nobody = pwd.getpwnam("nobody")
    user = (nobody.pw_uid, nobody.pw_gid) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    try:
        (folder / "kept").mkdir()
        for one in (folder, folder / "kept"):
            os.chown(one, *user)
        yield folder, user
    finally:
        shutil.rmtree(folder)


async def test_a_file_that_is_moved_away_and_back_while_it_is_open(path: Path, effects: Effects, caller: Caller) -> None:
    away = path.with_name("away")
    async with make_shop(url_of(path), effects) as app:
        known = await caller.call(app, "charge", "known")
        path.rename(away)
        refused = await caller.call(app, "charge", "key")
        assert refused.is_refused
        assert (await caller.call(app, "charge", "known")).result == known.result
        assert result(await app.handle(call("read"))) == 1
        away.rename(path)
        assert (await caller.call(app, "charge", "key")).error is None
    assert len(effects.all()) == 2


async def test_a_file_that_is_removed_and_made_anew_does_not_part_the_apps(
    path: Path, effects: Effects, caller: Caller
) -> None:
    async with make_shop(url_of(path), effects) as app:
        await caller.call(app, "charge", "known")
        for name in path.parent.glob("ledger.db*"):
            name.unlink()
        async with make_shop(url_of(path), effects) as other:
            assert (await caller.call(other, "charge", "key")).error is None
            refused = await Caller().call(app, "charge", "key")
            assert refused.is_refused, "its own file knows nothing of this key"
    assert len(effects.of("key")) == 1


async def test_a_file_that_another_process_locks_for_long(
    path: Path, effects: Effects, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file, "PATIENCE", 0.3)
    pause = Pause()
    async with child(url_of(path), effects) as locker, make_shop(url_of(path), effects, pause=pause) as app:
        known = await caller.call(app, "charge", "known")
        begun = asyncio.create_task(caller.call(app, "hold", "begun"))
        await pause.entered()
        await locker.ask("lock", str(path))
        refused = asyncio.create_task(caller.call(app, "charge", "key"))
        pause.go.set()
        queries = await reads_until(app, refused, begun)
        assert (await refused).is_refused and queries > 10
        assert (await caller.call(app, "charge", "known")).result == known.result, "to read it, no lock is needed"
        await locker.ask("unlock")
        await eventually(lambda: is_done(Store("sqlite", url_of(path)), "hold", "begun"))
        assert (await caller.insist(app, "charge", "key")).error is None
        again = await locker.call("hold", "begun")
        assert again.repeats(await begun)
    assert len(effects.all()) == 3


# --- SQLite on a disk that fails -------------------------------------------------------------------------------------


async def test_a_process_that_may_write_no_more_bytes(path: Path, effects: Effects) -> None:
    """The kernel's own refusal: RLIMIT_FSIZE, which is for a process what a full disk is for all of them."""
    async with child(url_of(path), effects) as one, child(url_of(path), effects) as other:
        answers = [await one.call("charge", "first")]
        await one.begin("hold", "begun")
        await one.ask("limit", 0)
        await one.tell("go")
        begun = await one.answer()
        assert begun.error is None, "it has happened, whatever becomes of its record"
        answers.append(await one.call("charge", "key"))
        assert answers[-1].is_refused
        assert await one.ask("read") == 1
        await one.ask("limit", -1)
        await eventually(lambda: is_done(Store("sqlite", url_of(path)), "hold", "begun"))
        answers += [
            begun,
            await other.call("hold", "begun"),
            await one.call("charge", "key"),
            await other.call("charge", "key"),
        ]
    assert [answer.is_replayed for answer in answers] == [False, False, False, True, False, True]
    check(answers, effects.all())
    assert len(effects.all()) == 3


class Disk(apsw.VFS):
    """The disk below all SQLite connections that are opened meanwhile. It can be told to fail."""

    def __init__(self) -> None:
        self.base = apsw.vfs_names()[0]
        self.writes = 0
        self.fails_from = 0  # the write or flush from which on it fails; 0 for none
        self.trouble: type[apsw.Error] = apsw.FullError
        super().__init__("failing", self.base, makedefault=True)

    def xOpen(self, name: Any, flags: Any) -> "DiskFile":  # noqa: N802
        return DiskFile(self, name, flags)

    def fail_after(self, writes: int, trouble: type[apsw.Error]) -> None:
        self.trouble = trouble
        self.fails_from = self.writes + writes + 1

    def heal(self) -> None:
        self.fails_from = 0

    def count(self) -> None:
        self.writes += 1
        if self.fails_from and self.writes >= self.fails_from:
            raise self.trouble("on purpose")


class DiskFile(apsw.VFSFile):
    def __init__(self, disk: Disk, name: Any, flags: Any) -> None:
        self._disk = disk
        super().__init__(disk.base, name, flags)

    def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802
        self._disk.count()
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:  # noqa: N802
        self._disk.count()
        super().xSync(flags)


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    yield disk
    disk.unregister()


@pytest.mark.parametrize("trouble", [apsw.FullError, apsw.IOError])
@pytest.mark.parametrize("method", ["charge", "book"])
async def test_a_disk_that_fails_at_any_write(
    disk: Disk, trouble: type[apsw.Error], method: str, path: Path, effects: Effects
) -> None:
    """A leased command, and one in a transaction with its effect. First every write fails, then all but one, and so on."""
    app, caller = make_shop(url_of(path), effects), Caller()

    @app.command(on_crash="transactional")
    async def book(order: int, context: Context) -> str:
        context.db.execute("CREATE TABLE IF NOT EXISTS bookings (key, attempt, run)")
        row = (context.idempotency_key, context.meta["attempt"], f"run-{context.meta['attempt']}")
        context.db.execute("INSERT INTO bookings VALUES (?, ?, ?)", row)
        return row[2]

    async with app:
        await caller.call(app, method, "first")
        before = disk.writes
        await caller.call(app, method, "second")
        writes = disk.writes - before
        assert writes > 2
        for number in range(writes + 1):
            disk.fail_after(number, trouble)
            answer = await caller.call(app, method, f"key-{number}")
            assert answer.error is None or answer.code in (50310, 50910), answer
            disk.heal()
            assert (await caller.insist(app, method, f"key-{number}", seconds=5)).error is None
    done = [Effect(*row) for row in rows(path)] if method == "book" else effects.all()
    assert len(done) == writes + 3
    check(caller.history, done)


def rows(path: Path) -> list[Any]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute("SELECT * FROM bookings").fetchall()


# --- processes that are paused ---------------------------------------------------------------------------------------


@durable
async def test_a_paused_holder_comes_back_with_the_truth(store: Store, effects: Effects, caller: Caller) -> None:
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
async def test_a_paused_holder_in_rerun_mode_finds_its_successor(store: Store, effects: Effects, caller: Caller) -> None:
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
async def test_a_paused_holder_and_its_successor_both_at_work(store: Store, effects: Effects, caller: Caller) -> None:
    """The stale one ends first: its outcome must not be taken for the successor's."""
    caller.most = 2
    pause = Pause()
    async with child(store.url, effects) as holder, make_shop(store.url, effects, pause=pause) as app:
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


# --- apps that are stopped -------------------------------------------------------------------------------------------


class Stages:
    """Commands that stand still before their commit point, and after it."""

    def __init__(self, url: str, effects: Effects) -> None:
        self.before, self.after = Pause(), Pause()
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
async def test_a_stop_finishes_what_has_begun_and_releases_the_rest(store: Store, effects: Effects, caller: Caller) -> None:
    stopped, other = Stages(store.url, effects), Stages(store.url, effects)
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
async def test_an_app_that_stops_claims_nothing_more(store: Store, effects: Effects, caller: Caller) -> None:
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
async def test_a_handler_that_outlives_the_grace_is_said_to_be_unknown(
    store: Store, effects: Effects, caller: Caller
) -> None:
    stopped, other = Stages(store.url, effects), Stages(store.url, effects)
    async with other.app:
        late = asyncio.create_task(caller.call(stopped.app, "late", "late"))
        await stopped.after.entered()
        await stopped.app.aclose(grace=0.05)
        assert (await late).ran == "unknown"
        unsure = await caller.call(other.app, "late", "late")
        assert unsure.is_unknown
    assert effects.all() == []


@durable
async def test_a_stop_may_come_at_any_moment(store: Store, effects: Effects, caller: Caller) -> None:
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


async def test_a_stop_gives_back_a_claim_that_is_under_way(front: Front, two: Two, caller: Caller, effects: Effects) -> None:
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


async def test_a_stop_records_what_the_store_could_not_take_at_first(
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
