"""The bus of a cluster of Redis 7: messages stay on the node that serves the slot of their channel."""

import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.faults import eventually
from tests.ledger.bus import Heard, channel_of, listening
from tests.servers import Redis, RedisCluster, Store, make_store
from wirecall.ledger.base import Bus, Ledger

MISSING = "Redis 7 is not installed: apt-get install redis-server"


def newer() -> str:
    """Return the program of a Redis that has sharded channels, or skip the test."""
    program = os.environ.get("TEST_REDIS_SERVER") or shutil.which("redis-server")
    if program is None:
        pytest.skip(MISSING)
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"v=(\d+)", said)
    if found is None or int(found[1]) < 7:
        pytest.skip(f"{MISSING}; found {said.strip()}")
    return program


@contextmanager
def cluster_of(replicas: int, program: str | None) -> Iterator[RedisCluster]:
    cluster = RedisCluster(replicas, dead_after=3000, program=program)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with cluster_of(replicas=0, program=newer()) as cluster:
        yield cluster


@pytest.fixture
def store(cluster: RedisCluster, tmp_path: Path) -> Store:
    return make_store("cluster", tmp_path, lambda _: cluster)


class Channel:
    """A channel of a ledger in a cluster."""

    def __init__(self, cluster: RedisCluster, store: Store) -> None:
        self.name = channel_of()
        self._cluster = cluster
        prefix = store.url.partition("?prefix=")[2]
        self.full_name = f"{prefix}{{marks-{self.name}}}"
        self.slot: int = cluster.nodes[0].ask("CLUSTER", "KEYSLOT", self.full_name)

    @property
    def holder(self) -> Redis:
        return self._cluster.holder(self.slot)

    def move(self) -> None:
        """Move its slot to another primary. It has no keys."""
        source = self.holder
        target = next(node for node in self._cluster.nodes if node is not source)
        identity = target.ask("CLUSTER", "MYID").decode()
        for node in (target, source, *self._cluster.nodes):
            node.ask("CLUSTER", "SETSLOT", self.slot, "NODE", identity)


@asynccontextmanager
async def opened(store: Store) -> AsyncIterator[Ledger]:
    ledger = await store.open()
    try:
        yield ledger
    finally:
        await ledger.aclose()


async def is_reached(bus: Bus, heard: Heard, message: str) -> bool:
    """Send a message, and return whether it has arrived: it may be lost while a server changes."""
    await bus.send(message)
    return message in heard.messages


async def test_messages_of_a_cluster_stay_on_the_node_of_their_slot(
    cluster: RedisCluster, store: Store
) -> None:
    channel = Channel(cluster, store)
    async with (
        opened(store) as one,
        opened(store) as other,
        listening(one, channel.name) as (bus, _),
        listening(other, channel.name) as (_, heard),
    ):
        sent = ["first", "x" * 6000, "last"]
        for message in sent:
            await bus.send(message)
        await heard.until(lambda: heard.messages == sent)
        sharded = [node for node in cluster.nodes if node.ask("PUBSUB", "SHARDCHANNELS")]
        assert sharded == [channel.holder]
        assert channel.holder.ask("PUBSUB", "SHARDNUMSUB", channel.full_name)[1] == 2
        assert [node.ask("PUBSUB", "CHANNELS") for node in cluster.nodes] == [[]] * 3


async def test_bus_listens_at_the_node_that_its_slot_has_moved_to(
    cluster: RedisCluster, store: Store
) -> None:
    """It reports that messages may have been lost."""
    channel = Channel(cluster, store)
    async with (
        opened(store) as one,
        opened(store) as other,
        listening(one, channel.name) as (bus, _),
        listening(other, channel.name) as (_, heard),
    ):
        for least in (2, 3):
            channel.move()
            await heard.until(lambda least=least: heard.beginnings >= least)  # type: ignore[misc]
            await eventually(partial(is_reached, bus, heard, f"after move {least}"))


@pytest.mark.parametrize("is_sharded", [False, True], ids=["plain", "sharded"])
async def test_bus_listens_at_the_replica_of_a_primary_that_is_gone(
    tmp_path: Path, is_sharded: bool
) -> None:
    """No command shows it that the map of the cluster has changed."""
    program = newer() if is_sharded else None
    with cluster_of(replicas=1, program=program) as cluster:
        store = make_store("cluster", tmp_path, lambda _: cluster)
        channel = Channel(cluster, store)
        primary = channel.holder
        replica = cluster.nodes[cluster.nodes.index(primary) + 3]
        async with opened(store) as one, listening(one, channel.name) as (_, heard):
            primary.kill()
            replica.ask("CLUSTER", "FAILOVER", "TAKEOVER")
            await heard.until(lambda: heard.beginnings >= 2)
            # The address of the store may be that of the node that was killed.
            alive = Store(store.kind, store.url.replace(cluster.url, replica.url))
            async with opened(alive) as other, listening(other, channel.name) as (bus, _):
                await eventually(partial(is_reached, bus, heard, "after failover"))
