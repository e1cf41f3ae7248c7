"""A store that comes back empty, older or as another one: commands are refused until an operator
accepts it, and what was acknowledged and lost is named and never runs again.
"""

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest

from tests.calls import call, error, result
from tests.cli import wirecall
from tests.faults import PATIENCE, eventually
from tests.faults.probe import Probe
from tests.servers import Postgres, PostgresReplica, Redis, RedisCluster
from tests.transports import ask
from wirecall import App
from wirecall.ledger.redis.connection import PREFIX

REASON = "the backup of 03:00 was restored"


class Shop:
    """A server that counts how often each command ran."""

    def __init__(self, url: str, **options: Any) -> None:
        self.ran: list[str] = []
        self.app = App("shop", ledger=url, mode="development", **options)
        self.probe = Probe(self.app)

        @self.app.command
        async def pay(order: str) -> str:
            self.ran.append(order)
            return f"paid {order}"

        # A command that runs until the test lets it end.
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()

        @self.app.command
        async def send(order: str) -> str:
            self.ran.append(order)
            self.begun.set()
            await self.gate.wait()
            if order == "broken":
                raise ConnectionError("it may have been sent")
            return f"sent {order}"

        @self.app.query
        async def price(order: str) -> int:
            return 5

    async def pay(self, key: str) -> Any:
        return await self.app.handle(call("pay", {"order": key}, key=key))

    async def pays(self, *keys: str) -> None:
        for key in keys:
            assert result(await self.pay(key)) == f"paid {key}"

    async def send(self, key: str) -> Any:
        return await self.app.handle(call("send", {"order": key}, key=key))

    async def is_paid(self, key: str) -> bool:
        return "result" in json.loads(await self.pay(key))

    async def refuses(self, key: str) -> bool:
        refused = json.loads(await self.pay(key)).get("error")
        if refused is None:
            return False
        assert (refused["code"], refused["data"]["ran"]) == (50310, "no")
        return "not as this server knew it" in refused["data"].get("reason", "")

    async def doubts(self) -> bool:
        """Whether it says on `/readyz` that an operator is needed; it may not see the store yet."""
        reply = await ask(self.app.asgi(), "/readyz", method="GET")
        return reply.status == 503 and "wirecall ledger accept" in reply.json["reason"]

    async def answers_queries(self) -> None:
        assert result(await self.app.handle(call("price", {"order": "a"}))) == 5


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often, so that the tests need not wait."""
    monkeypatch.setattr("wirecall.app.ASK_EVERY", 0.02)
    monkeypatch.setattr("wirecall.commands.background.LOOK_EVERY", 0.02)
    monkeypatch.setattr("wirecall.commands.witness.SETTLE", 0.2)


@asynccontextmanager
async def serving(url: str, **options: Any) -> AsyncIterator[Shop]:
    shop = Shop(url, **options)
    async with shop.app:
        yield shop


async def accept(url: str) -> Any:
    """Accept the ledger as an operator does; return what the verb prints."""
    words = ("ledger", "accept", url, "--reason", REASON, "--yes", "--json")
    done = await asyncio.to_thread(wirecall, *words)
    assert done.returncode == 0, done.stdout
    return json.loads(done.stdout)["result"]


# --- SQLite ---------------------------------------------------------------------------------------


def copy(file: Path, to: Path) -> None:
    """Back a file up while servers use it."""
    with (
        closing(apsw.Connection(str(file))) as source,
        closing(apsw.Connection(str(to))) as made,
        made.backup("main", source, "main") as backup,
    ):
        backup.step()


def remove(file: Path) -> None:
    for each in (file, Path(f"{file}-wal"), Path(f"{file}-shm")):
        each.unlink(missing_ok=True)


async def test_sqlite_file_that_an_older_copy_replaces_is_doubted(tmp_path: Path) -> None:
    file = tmp_path / "ledger.db"
    backup = tmp_path / "backup.db"

    async with serving(f"sqlite:{file}") as one, serving(f"sqlite:{file}") as two:
        await one.pays("a")
        await two.pays("warm")
        copy(file, backup)
        await one.pays("b", "c")
        remove(file)
        shutil.move(backup, file)
        await is_named(one, two, f"sqlite:{file}", kinds=("older", "lost"), lost=["b", "c"])
        assert sorted(one.ran + two.ran) == ["a", "b", "c", "new", "warm"]
        assert result(await two.pay("a")) == "paid a"


async def is_named(
    one: Shop, two: Shop, url: str, *, kinds: tuple[str, ...], lost: list[str]
) -> None:
    """The store lacks what the first host acknowledged, and an operator accepts it."""
    await eventually(one.doubts)
    await eventually(two.doubts)
    reason = await one.probe.reason()
    assert any(f"({kind})" in reason for kind in kinds), reason
    for shop in (one, two):
        assert await shop.refuses("new")
        await shop.answers_queries()
    for key in lost:  # the host that has acknowledged it knows better than "nothing ran"
        assert 50910 in [error(await shop.pay(key))["code"] for shop in (one, two)]
    accepted = await accept(url)
    assert sorted(each["key"] for each in accepted["unknown"]) == lost
    await eventually(one.probe.is_ready)
    await eventually(two.probe.is_ready)
    for key in lost:
        for shop in (one, two):
            assert error(await shop.pay(key))["code"] == 50910
    await two.pays("new")


async def test_sqlite_file_that_is_swapped_for_another_is_doubted(tmp_path: Path) -> None:
    file = tmp_path / "ledger.db"
    other = tmp_path / "other.db"
    async with serving(f"sqlite:{other}") as stranger:
        await stranger.pays("x")
    async with serving(f"sqlite:{file}") as one, serving(f"sqlite:{file}") as two:
        await one.pays("a")
        await two.pays("warm")
        remove(file)
        shutil.move(other, file)
        await is_named(one, two, f"sqlite:{file}", kinds=("other",), lost=["a", "warm"])
        assert sorted(one.ran + two.ran) == ["a", "new", "warm"]


async def test_sqlite_file_that_was_deleted_is_not_made_again(tmp_path: Path) -> None:
    file = tmp_path / "ledger.db"
    async with serving(f"sqlite:{file}") as shop:
        await shop.pays("a")
        remove(file)
        await eventually(shop.probe.is_not_ready)
        assert error(await shop.pay("b"))["code"] == 50310
        assert not file.exists()
        # An operator makes a new one, and says that it is right.
        made = await asyncio.to_thread(wirecall, "ledger", "migrate", f"sqlite:{file}")
        assert made.returncode == 0
        await eventually(shop.doubts)
        accepted = await accept(f"sqlite:{file}")
        assert [each["key"] for each in accepted["unknown"]] == ["a"]
        await eventually(shop.probe.is_ready)
        assert error(await shop.pay("a"))["code"] == 50910
        assert shop.ran == ["a"]


async def test_file_that_comes_back_is_served_without_an_acceptance(tmp_path: Path) -> None:
    file = tmp_path / "ledger.db"
    async with serving(f"sqlite:{file}") as shop:
        await shop.pays("a")
        copy(file, tmp_path / "copy.db")
        remove(file)
        await eventually(shop.probe.is_not_ready)
        shutil.move(tmp_path / "copy.db", file)
        await eventually(shop.probe.is_ready)
        assert result(await shop.pay("a")) == "paid a"
        assert shop.ran == ["a"]


# --- Redis ----------------------------------------------------------------------------------------


@pytest.fixture
def primary() -> Iterator[Redis]:
    server = Redis()
    try:
        server.start()
        yield server
    finally:
        server.close()


async def test_redis_that_is_flushed_is_doubted(primary: Redis) -> None:
    async with serving(primary.url) as one, serving(primary.url) as two:
        await one.pays("a", "b")
        await two.pays("warm")
        primary.ask("FLUSHALL")
        # Even before a look: a command that this process has acknowledged does not run again.
        assert error(await one.pay("b"))["code"] == 50910
        await is_named(one, two, primary.url, kinds=("empty", "lost"), lost=["a", "b", "warm"])
        assert sorted(one.ran + two.ran) == ["a", "b", "new", "warm"]


async def test_redis_replica_that_lacks_the_last_writes_is_doubted(primary: Redis) -> None:
    replica = Redis()
    try:
        replica.start()
        replica.ask("REPLICAOF", "127.0.0.1", primary.port)
        await eventually(in_step(replica))
        async with serving(primary.url) as one, serving(primary.url) as two:
            await one.pays("a")
            await two.pays("warm")
            await eventually(has_received(primary, replica))
            replica.kill()
            await one.pays("b", "c")
            primary.kill()
            # It takes over at the same address.
            replica.port = primary.port
            replica.url = primary.url
            replica.start()
            await is_named(one, two, primary.url, kinds=("lost",), lost=["b", "c"])
            assert sorted(one.ran + two.ran) == ["a", "b", "c", "new", "warm"]
            assert result(await two.pay("a")) == "paid a"
    finally:
        replica.close()


@asynccontextmanager
async def failed_over(
    primary: Redis, one: Shop, order: str = "slow"
) -> AsyncIterator["tuple[asyncio.Task[Any], Callable[[], None]]"]:
    """`one` has a command in flight whose claim the replica does not have.

    Yield that call, and what lets the replica take over at the same address.
    """
    replica = Redis()
    try:
        replica.start()
        replica.ask("REPLICAOF", "127.0.0.1", primary.port)
        await eventually(in_step(replica))
        replica.kill()
        running = asyncio.create_task(one.send(order))
        await one.begun.wait()
        primary.kill()

        def take_over() -> None:
            replica.port = primary.port
            replica.url = primary.url
            replica.start()

        yield running, take_over
    finally:
        replica.close()


async def test_command_whose_claim_was_lost_while_it_ran_is_recorded_and_does_not_run_again(
    primary: Redis,
) -> None:
    async with serving(primary.url) as one, serving(primary.url) as two:
        await one.pays("a")
        await two.pays("warm")
        async with failed_over(primary, one) as (running, take_over):
            take_over()
            await eventually(one.probe.is_ready)
            one.gate.set()
            assert result(await running) == "sent slow"
            await eventually(two.probe.is_ready)
            two.gate.set()
            assert result(await two.send("slow")) == "sent slow"
            assert sorted(one.ran + two.ran) == ["a", "slow", "warm"]


async def test_command_that_ended_while_the_ledger_was_away_is_recorded_although_its_claim_is_lost(
    primary: Redis,
) -> None:
    async with serving(primary.url) as one, serving(primary.url) as two:
        await one.pays("a")
        await two.pays("warm")
        async with failed_over(primary, one) as (running, take_over):
            one.gate.set()
            assert result(await running) == "sent slow"
            take_over()
            await eventually(one.probe.is_ready)
            await eventually(two.probe.is_ready)
            two.gate.set()
            assert result(await two.send("slow")) == "sent slow"
            assert sorted(one.ran + two.ran) == ["a", "slow", "warm"]


async def test_command_whose_claim_was_lost_and_that_fails_is_unknown(primary: Redis) -> None:
    async with serving(primary.url) as one, serving(primary.url) as two:
        await two.pays("warm")
        async with failed_over(primary, one, "broken") as (running, take_over):
            take_over()
            await eventually(one.probe.is_ready)
            one.gate.set()
            assert error(await running)["data"]["ran"] == "unknown"
            await eventually(two.probe.is_ready)
            two.gate.set()
            assert error(await two.send("broken"))["code"] == 50910
            assert sorted(one.ran + two.ran) == ["broken", "warm"]


async def test_command_in_flight_claims_its_lost_record_again_before_others_may(
    primary: Redis,
) -> None:
    """A retry at another host waits until all have looked, and then for the first run."""
    async with serving(primary.url) as one, serving(primary.url) as two:
        await one.pays("a")
        await two.pays("warm")
        async with failed_over(primary, one) as (running, take_over):
            take_over()
            await eventually(one.probe.is_ready)
            await eventually(two.probe.is_ready)
            again = error(await two.send("slow"))
            assert (again["code"], again["data"]["ran"]) == (40910, "unknown")
            one.gate.set()
            assert result(await running) == "sent slow"
            assert sorted(one.ran + two.ran) == ["a", "slow", "warm"]


async def test_redis_replica_that_lacks_nothing_takes_over_without_an_acceptance(
    primary: Redis,
) -> None:
    replica = Redis()
    try:
        replica.start()
        replica.ask("REPLICAOF", "127.0.0.1", primary.port)
        await eventually(in_step(replica))
        async with serving(primary.url) as shop:
            await shop.pays("a", "b")
            await eventually(has_received(primary, replica))
            replica.kill()
            primary.kill()
            replica.port = primary.port
            replica.url = primary.url
            replica.start()
            await eventually(shop.probe.is_ready)
            await shop.pays("a", "b", "c")
            assert shop.ran == ["a", "b", "c"]
    finally:
        replica.close()


def in_step(replica: Redis) -> Callable[[], Awaitable[bool]]:
    """Whether it has all data, and has written them to its file."""

    async def is_in_step() -> bool:
        if not replica.is_in_step():
            return False
        state = replica.ask("INFO", "persistence")
        return not state["aof_rewrite_in_progress"] and not state["aof_rewrite_scheduled"]

    return is_in_step


def has_received(primary: Redis, replica: Redis) -> Callable[[], Awaitable[bool]]:
    """Whether the replica has all that the primary has written by now.

    WAIT only waits for the writes of the connection that sends it.
    """
    written = primary.ask("INFO", "replication")["master_repl_offset"]

    async def has_it() -> bool:
        found = replica.ask("INFO", "replication")
        return bool(found["slave_repl_offset"] >= written)

    return has_it


# --- a cluster of Redis ---------------------------------------------------------------------------


@contextmanager
def cluster_of(replicas: int) -> Iterator[RedisCluster]:
    """A cluster that serves what it has when a primary is gone."""
    cluster = RedisCluster(replicas)
    try:
        cluster.start()
        for node in cluster.nodes:
            node.ask("CONFIG", "SET", "cluster-require-full-coverage", "no")
        yield cluster
    finally:
        cluster.close()


def keys_of(cluster: RedisCluster, primary: Redis, keys: Iterable[str]) -> list[str]:
    """Return the keys whose records are on a primary."""
    slots = {key: cluster.nodes[0].ask("CLUSTER", "KEYSLOT", f"{PREFIX}:pay:{key}") for key in keys}
    return [key for key, slot in slots.items() if cluster.holder(slot) is primary]


@pytest.mark.parametrize("number", range(3))
async def test_redis_cluster_without_a_primary_runs_the_commands_of_the_others(number: int) -> None:
    """Also without the one that has the identity of the store."""
    with cluster_of(replicas=0) as cluster:
        gone = cluster.nodes[number]
        first = [f"first-{n}" for n in range(12)]
        new = [f"new-{n}" for n in range(12)]
        of_gone = keys_of(cluster, gone, new)
        async with serving(cluster.url) as shop:
            await shop.pays(*first)
            gone.kill()
            for key in of_gone:
                assert error(await shop.pay(key))["code"] == 50310
            others = [key for key in new if key not in of_gone]
            await shop.pays(*others)
            assert 0 < len(of_gone) < len(new)
            gone.start()
            await eventually(shop.probe.is_ready)
            for key in of_gone:
                await eventually(partial(shop.is_paid, key))
            await shop.pays(*first)
            assert sorted(shop.ran) == sorted([*first, *new])


async def test_redis_cluster_that_forbids_info_runs_commands() -> None:
    """As managed clusters may."""
    with cluster_of(replicas=0) as cluster:
        for node in cluster.nodes:
            node.ask("ACL", "SETUSER", "app", "on", ">word", "~*", "&*", "+@all", "-info")
        async with serving(cluster.url.replace("redis://", "redis://app:word@")) as shop:
            async with asyncio.timeout(PATIENCE):
                await shop.pays("a", "b", "a")
            assert shop.ran == ["a", "b"]


async def test_redis_cluster_replica_that_lacks_the_last_writes_is_doubted() -> None:
    """It takes over from one primary of three."""
    with cluster_of(replicas=1) as cluster:
        primary = cluster.nodes[1]
        replica = cluster.nodes[4]
        before, last = (
            keys_of(cluster, primary, [f"{word}-{n}" for n in range(9)])
            for word in ("before", "last")
        )
        assert before and last
        async with serving(cluster.url) as one, serving(cluster.url) as two:
            await one.pays(*before)
            await two.pays("warm")
            await eventually(in_step(replica))
            await eventually(has_received(primary, replica))
            replica.kill()
            await one.pays(*last)
            primary.kill()
            replica.start()
            replica.ask("CLUSTER", "FAILOVER", "TAKEOVER")
            await is_named(one, two, cluster.url, kinds=("lost",), lost=sorted(last))
            assert sorted(one.ran + two.ran) == sorted([*before, *last, "warm", "new"])
            for key in before:
                assert result(await two.pay(key)) == f"paid {key}"


# --- PostgreSQL -----------------------------------------------------------------------------------


class Successor(PostgresReplica):
    """A replica that can take over at the address of its primary."""

    def take_over(self) -> None:
        """Serve at the address of the primary, which was killed, and become one."""
        self.POSTMASTER_OPTIONS = (
            *Postgres.POSTMASTER_OPTIONS,
            "-c",
            "primary_conninfo=",
            "-k",
            str(self._primary.folder),
        )
        self.url = self._primary.url
        self.start()
        self.run("SELECT pg_promote()")


@pytest.fixture
def database() -> Iterator[Postgres]:
    """One for each test: what a test has paid is paid."""
    server = Postgres()
    try:
        server.start()
        yield server
    finally:
        server.close()


def copy_folder(folder: Path, to: Path) -> None:
    """Copy a folder with its owners: PostgreSQL does not run as root."""
    subprocess.run(["cp", "-a", folder, to], check=True)


async def test_postgres_restored_from_a_backup_is_doubted(
    database: Postgres, tmp_path: Path
) -> None:
    url = database.url
    async with serving(url) as one, serving(url) as two:
        await one.pays("a")
        await two.pays("warm")
        database.stop()
        copy_folder(database.folder / "data", tmp_path / "backup")
        database.start()
        await eventually(one.probe.is_ready)
        await one.pays("b", "c")
        database.kill()
        shutil.rmtree(database.folder / "data")
        copy_folder(tmp_path / "backup", database.folder / "data")
        database.start()
        await is_named(one, two, url, kinds=("older", "lost"), lost=["b", "c"])
        assert sorted(one.ran + two.ran) == ["a", "b", "c", "new", "warm"]
        assert result(await two.pay("a")) == "paid a"


async def test_postgres_replica_that_lacks_the_last_writes_is_doubted(database: Postgres) -> None:
    url = database.url
    replica = Successor(database)
    try:
        replica.start()
        async with serving(url) as one, serving(url) as two:
            await one.pays("f")
            await two.pays("hot")
            await eventually(has_replayed(database, replica))
            replica.kill()
            await one.pays("g", "h")
            database.kill()
            replica.take_over()
            await is_named(one, two, url, kinds=("lost",), lost=["g", "h"])
            assert sorted(one.ran + two.ran) == ["f", "g", "h", "hot", "new"]
            assert result(await two.pay("f")) == "paid f"
    finally:
        replica.close()


async def test_postgres_replica_that_lacks_the_claim_of_a_running_command_gets_it_again() -> None:
    primary = Postgres()
    servers = [primary]
    try:
        primary.start()
        replica = Successor(primary)
        servers.append(replica)
        replica.start()
        async with serving(primary.url) as one, serving(primary.url) as two:
            await one.pays("a")
            await two.pays("warm")
            await eventually(has_replayed(primary, replica))
            replica.kill()
            running = asyncio.create_task(one.send("slow"))
            await one.begun.wait()
            primary.kill()
            replica.take_over()
            await eventually(one.probe.is_ready)
            await eventually(two.probe.is_ready)
            again = error(await two.send("slow"))
            assert (again["code"], again["data"]["ran"]) == (40910, "unknown")
            one.gate.set()
            assert result(await running) == "sent slow"
            assert result(await two.send("slow")) == "sent slow"
            assert sorted(one.ran + two.ran) == ["a", "slow", "warm"]
    finally:
        for each in reversed(servers):
            each.close()


def has_replayed(primary: Postgres, replica: Postgres) -> Callable[[], Awaitable[bool]]:
    """Whether the replica has all that the primary has written by now."""
    with psycopg.connect(primary.url) as db:
        row = db.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
    assert row is not None

    async def has_it() -> bool:
        with psycopg.connect(replica.url) as db:
            found = db.execute(
                "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", (row[0],)
            ).fetchone()
        return bool(found and found[0])

    return has_it
