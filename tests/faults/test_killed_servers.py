"""Servers killed under load, and transactions cut in their commit: nothing is doubled or lost."""

import asyncio
import gc
import select
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing
from itertools import count, cycle
from pathlib import Path
from typing import Any, TypeAlias

import psycopg
import pytest
import redis

from tests.calls import call, make_app, result
from tests.faults import LEASE, Caller, Effect, Effects, check, eventually, make_shop
from tests.faults.fronts import Front, Loss, find, losses
from tests.servers import Postgres, Redis, RedisCluster, make_store
from wirecall import App, Context, DomainError
from wirecall.ledger.postgres import queue as postgres_queue
from wirecall.ledger.postgres import transaction as postgres_transaction

# --- servers killed under load --------------------------------------------------------------------

CLIENTS = 8


class OnePrimary(RedisCluster):
    """A cluster of which one primary is killed, with a third of the records; the server that the
    URL names comes first.
    """

    def __init__(self) -> None:
        super().__init__()
        self._next = cycle(self.nodes)

    def kill(self) -> None:
        next(self._next).kill()


Servers: TypeAlias = Redis | OnePrimary | Postgres


@pytest.fixture(params=[Redis, OnePrimary, Postgres])
def own_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Servers]:
    """A server that this test may kill.

    PostgreSQL is that of all tests: a new one takes longer than most of them.
    """
    if request.param is Postgres:
        make_store("postgres", tmp_path, request.getfixturevalue)  # empties it
        shared: Postgres = request.getfixturevalue("postgres_server")
        yield shared
        if shared.process is None:  # the test failed
            shared.start()
        return
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


@pytest.mark.long
async def test_server_killed_under_load_doubles_nothing_and_loses_nothing(
    own_server: Servers, effects: Effects, caller: Caller
) -> None:
    app = make_shop(own_server.url, effects)
    again = make_shop(own_server.url, effects)

    @app.command
    async def work(order: int, context: Context) -> str:
        await asyncio.sleep(0.001)
        run = effects.add(context)
        await asyncio.sleep(0.001)
        return run

    again.command(name="work")(nothing_to_do)
    async with app, again:
        results = await results_while_killed(own_server, app, caller)
        assert {answer.code for answer in caller.history} == {0, 50310}
        assert len(effects.all()) == len(results)
        await all_is_replayed(again, caller, results)


@pytest.fixture
def replicated() -> Iterator[RedisCluster]:
    """A cluster with a replica for each primary; pytest reports connections that a test does not
    close.
    """
    cluster = RedisCluster(replicas=1)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
        gc.collect()


async def test_replica_that_takes_over_under_load_doubles_nothing_and_loses_nothing(
    effects: Effects, caller: Caller, replicated: RedisCluster
) -> None:
    """With `replicas=1`, acknowledged writes are on the replica, and so are all outcomes of
    callers.
    """
    cluster = replicated
    url = f"{cluster.nodes[1].url}?replicas=1"
    app = make_shop(url, effects)
    again = make_shop(url, effects)

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
            await asyncio.to_thread(
                cluster.wait_until, lambda: cluster.nodes[3].ask("ROLE")[0] == b"master"
            )
            await asyncio.to_thread(cluster.nodes[0].start)  # a replica, from now on
            await load.more("results", 100)
            # It leads again, and the old connections to it are closed.
            await asyncio.to_thread(cluster.wait_until, cluster.nodes[0].is_in_step)
            # At once: an election may fail on a busy machine.
            cluster.nodes[0].ask("CLUSTER", "FAILOVER", "TAKEOVER")
            await asyncio.to_thread(
                cluster.wait_until, lambda: cluster.nodes[0].ask("ROLE")[0] == b"master"
            )
            await load.more("results", 100)
        results = {answer.key: answer.result for answer in caller.history if answer.error is None}
        assert len(effects.all()) == len(results) >= 200
        await all_is_replayed(again, caller, results)


@pytest.mark.parametrize("own_server", [Postgres], indirect=True)
async def test_transactions_in_a_server_killed_under_load_take_effect_exactly_once(
    own_server: Postgres,
) -> None:
    bank = Bank(own_server.url, own_server.url)
    caller = Caller()
    bank.safe.command(name="work")(nothing_to_do)

    @bank.app.query
    async def read() -> int:
        return 1

    @bank.app.command(on_crash="transactional")
    async def work(order: int, context: Context) -> str:
        return await bank.book(context)

    async with bank.app, bank.safe:
        # They wait for the result of their commit.
        results = await results_while_killed(own_server, bank.app, caller, refusals=0)
        assert {answer.code for answer in caller.history} <= {0, 40910, 50310, 50910}
        assert Counter(row.key for row in bank.rows()) == dict.fromkeys(results, 1)
        await all_is_replayed(bank.safe, caller, results)
    check(caller.history, bank.rows())


async def results_while_killed(
    server: Servers, app: App, caller: Caller, refusals: int = 20
) -> dict[str, str]:
    """The results that callers got while the server was killed and started again, several times."""
    rounds = 2 if isinstance(server, OnePrimary) else 3  # it needs time to become complete again
    async with Load(app, caller) as load:
        for _ in range(rounds):
            await load.more("results", 40)
            await asyncio.to_thread(server.kill)
            await load.more("refusals", refusals)
            await load.more("queries", 40)
            await asyncio.to_thread(start, server)
        await load.more("results", 40)
    results = {answer.key: answer.result for answer in caller.history if answer.error is None}
    assert len(results) >= 40 * (rounds + 1)
    return results


async def all_is_replayed(app: App, caller: Caller, results: dict[str, str]) -> None:
    answers = await asyncio.gather(*(caller.call(app, "work", key) for key in results))
    assert {answer.key: answer.result for answer in answers} == results
    assert all(answer.is_replayed for answer in answers)


async def nothing_to_do(order: int, context: Context) -> str:
    raise AssertionError("it was done before")


class Load:
    """Clients that send one command after another, and one that reads, for as long as the block
    lasts.
    """

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
        """Wait until there are so many more of them."""
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


# --- a transaction cut in its commit --------------------------------------------------------------


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
async def test_commit_that_was_not_confirmed_is_settled_by_asking_the_server(
    front: Front, bank: Bank, loss: Loss
) -> None:
    caller = Caller()
    await caller.call(bank.app, "book", "first")
    lost = front.proxy.lose(loss, b"COMMIT")
    asked = front.proxy.note(b"pg_xact_status")
    answer = await caller.call(bank.app, "book", "key")
    assert answer.error is None and not answer.is_replayed
    assert lost.is_over and asked.is_over
    assert bank.runs == (2 if loss == "answer" else 3), (
        "what was not committed ran again, what was did not"
    )
    again = await caller.call(bank.safe, "book", "key")
    assert again.repeats(answer)
    assert [row.key for row in bank.rows()] == ["first", "key"]
    check(caller.history, bank.rows())


@only_postgres
@losses
async def test_commit_that_cannot_be_checked_is_unknown_and_the_retry_is_definite(
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
@pytest.mark.parametrize(
    "statement", [b"SAVEPOINT wirecall", b"INSERT INTO public.bookings"], ids=["begin", "handler"]
)
async def test_transaction_cut_before_its_commit_leaves_nothing(
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
async def test_host_that_vanishes_within_a_message_locks_its_key_for_a_while_at_most(
    front: Front, bank: Bank, part: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server does not see the connection end, and must not hold the record during its wait."""
    # Seconds that a handler may be silent.
    monkeypatch.setattr(postgres_transaction, "SILENCE", 1.0)
    # There is no server to ask about its commit.
    monkeypatch.setattr(postgres_transaction, "SETTLE", 0.01)
    # Only the bytes of commands count.
    monkeypatch.setattr("wirecall.commands.background.LOOK_EVERY", 1000)
    caller = Caller()
    passed = dict[str, int]()
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
    length = (
        passed["begun"] - passed["idle"] if part == "begin" else passed["done"] - passed["handled"]
    )
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


# What a handler does after its session has ended: nothing that notices, one more statement, its own
# error.
AFTERWARDS: dict[str, Callable[[Context], Awaitable[Any]]] = {
    "returns": lambda context: asyncio.sleep(0),
    "writes": lambda context: context.db.execute("SELECT 1"),
    "fails": lambda context: fail(),
}


async def fail() -> None:
    raise DomainError(4020, "not enough money")


@pytest.mark.parametrize("own_server", [Postgres], indirect=True)
@pytest.mark.parametrize("afterwards", AFTERWARDS)
async def test_server_killed_while_a_handler_runs_has_committed_nothing(
    own_server: Postgres, afterwards: str
) -> None:
    """COMMIT was not sent, so there is nothing to ask: the answer is definite and immediate."""
    bank = Bank(own_server.url, own_server.url)
    caller = Caller()

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
async def test_session_ended_while_its_handler_runs_has_committed_nothing(
    front: Front, bank: Bank, how: str, afterwards: str
) -> None:
    """The server is available, but the handler may have been too slow: the caller decides about a
    retry.
    """
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
    cursor = await context.db.execute("SELECT pg_backend_pid()")
    row = await cursor.fetchone()
    file = cursor.connection.fileno()
    if how == "cut":
        front.proxy.cut()
    async with await psycopg.AsyncConnection.connect(front.store.url, autocommit=True) as db:
        if how == "ended by the server":
            await db.execute("SELECT pg_terminate_backend(%s)", row)

        async def is_gone() -> bool:
            return (
                await db.execute("SELECT FROM pg_stat_activity WHERE pid = %s", row)
            ).rowcount == 0

        await eventually(is_gone)

    async def has_arrived() -> bool:  # the proxy is between them, and passes it on a moment later
        return bool(select.select([file], [], [], 0)[0])

    if how == "ended by the server":
        await eventually(has_arrived)


@only_postgres
async def test_transactions_are_refused_together_where_no_connection_can_be_made(
    front: Front, bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not wait for a connection to become free: there cannot be one."""
    caller = Caller()
    await caller.call(bank.app, "book", "first")
    monkeypatch.setattr(postgres_queue, "FREE_WITHIN", 600.0)  # the pool itself gives up after 30 s
    with front.proxy.away():
        calls = [
            asyncio.create_task(caller.call(bank.app, "book", f"key-{number}"))
            for number in range(600)
        ]
        _, slow_ones = await asyncio.wait(calls, timeout=25)
        answers = await asyncio.gather(*calls)
    assert {(answer.code, answer.ran) for answer in answers} == {(50310, "no")}
    assert not slow_ones, f"{len(slow_ones)} of 600 waited for a connection"
    assert (await caller.insist(bank.app, "book", "afterwards")).error is None
    assert [row.key for row in bank.rows()] == ["first", "afterwards"]
