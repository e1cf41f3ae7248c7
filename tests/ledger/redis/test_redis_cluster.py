"""Redis in a cluster, and with replicas: the node that holds a record is found, and no other node
answers for it.

`tests/faults/test_killed_servers.py` kills primaries under load; `tests/ledger` has the contract.
"""

import asyncio
import gc
import re
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio.cluster import ClusterNode
from redis.exceptions import MovedError, RedisError
from redis.exceptions import TimeoutError as RedisTimeout

from tests.faults import Caller, Effects, check, child, eventually, make_shop
from tests.ledger import (
    ID,
    LEASE,
    RETENTION,
    answers_again,
    claim_of,
    granted,
    in_state,
    outcome_of,
    present,
    same,
)
from tests.ledger.keyless import OTHER_LIKENESS, claimed, is_match, is_new, keyless, lose, write
from tests.servers import Redis, RedisCluster, Store, make_store
from wirecall import UsageError
from wirecall.ledger.base import Ledger, LedgerDown, Record, RecordId, State, open_ledger
from wirecall.ledger.redis import connection as redis_connection

IDS = [RecordId("alice", "charge", f"key-{number}") for number in range(60)]


@pytest.fixture
def store(cluster_server: RedisCluster, tmp_path: Path) -> Store:
    return make_store("cluster", tmp_path, lambda _: cluster_server)


@pytest.fixture
def effects(tmp_path: Path) -> Effects:
    return Effects(tmp_path / "effects")


@pytest.fixture
async def other(store: Store) -> AsyncIterator[Ledger]:
    """A second handle, whose map of the cluster is as old as the first one's."""
    opened = await store.open()
    yield opened
    await opened.aclose()


# --- records that move ----------------------------------------------------------------------------


class Move:
    """A slot that moves from one primary to another, by hand: begin, take the keys along, end."""

    def __init__(self, cluster: RedisCluster, store: Store, id: RecordId | str) -> None:
        """With a record, or with another key of the ledger."""
        if isinstance(id, RecordId):
            key = re.sub("^(auto-.*)-", r"{\1}-", id.key)
            id = f"{id.caller}:{id.method}:{key}"
        self._name = store.url.partition("?prefix=")[2] + id
        self._cluster = cluster
        self.slot: int = cluster.nodes[0].ask("CLUSTER", "KEYSLOT", self._name)
        self.source = cluster.holder(self.slot)
        self.target = next(node for node in cluster.nodes if node is not self.source)

    def begin(self) -> None:
        self.target.ask("CLUSTER", "SETSLOT", self.slot, "IMPORTING", _identity(self.source))
        self.source.ask("CLUSTER", "SETSLOT", self.slot, "MIGRATING", _identity(self.target))

    def take_along(self) -> None:
        self.source.ask("MIGRATE", "127.0.0.1", self.target.port, self._name, 0, 5000)

    def take_the_index_along(self) -> None:
        self.source.ask(
            "MIGRATE", "127.0.0.1", self.target.port, self._name.partition("}")[0] + "}", 0, 5000
        )

    def end(self) -> None:
        for node in (
            self.target,
            *(node for node in self._cluster.nodes if node is not self.target),
        ):
            node.ask("CLUSTER", "SETSLOT", self.slot, "NODE", _identity(self.target))

    def undo(self) -> None:
        """Undo the move at any step: the slot, without keys, is where it was."""
        self.end()
        for name in self.target.ask("CLUSTER", "GETKEYSINSLOT", self.slot, 100):
            self.target.ask("DEL", name)
        self.source, self.target = self.target, self.source
        self.begin()
        self.end()


def _identity(node: Redis) -> str:
    identity: str = node.ask("CLUSTER", "MYID").decode()
    return identity


@pytest.fixture
def move(cluster_server: RedisCluster, store: Store) -> Iterator[Move]:
    move = Move(cluster_server, store, ID)
    yield move
    move.undo()


async def test_record_is_found_after_its_slot_moved(
    ledger: Ledger, other: Ledger, move: Move
) -> None:
    """MOVED: at any step of the move, both handles see one record, and only one claim is granted."""
    record = await granted(ledger)
    move.begin()
    assert same(await other.get(ID), record)  # it has not left yet
    move.take_along()
    assert same(await other.get(ID), record)  # ASK
    assert (await other.claim(claim_of())).token == record.token
    move.end()
    assert await other.heartbeat(record.token, LEASE)  # MOVED
    assert await ledger.complete(record.token, outcome_of(), RETENTION)
    assert (await other.claim(claim_of())).state is State.DONE
    assert (await ledger.counts())[State.DONE] == 1
    assert [record.id for record in await other.list()] == [ID]


async def test_new_record_is_made_on_the_node_that_imports_its_slot(
    ledger: Ledger, other: Ledger, move: Move
) -> None:
    """ASK: the old server has no such key, so only the new one may make it."""
    move.begin()
    claims = [claim_of() for _ in range(20)]
    records = await asyncio.gather(
        *((ledger, other)[n % 2].claim(claim) for n, claim in enumerate(claims))
    )
    assert (
        sum(record.nonce == claim.nonce for record, claim in zip(records, claims, strict=True)) == 1
    )
    assert len({record.token for record in records}) == 1
    move.end()
    assert same(await other.get(ID), await present(ledger))


async def test_claims_race_while_their_slot_moves(
    ledger: Ledger, other: Ledger, move: Move
) -> None:
    """In any order of the two, a key is granted once."""
    record = await granted(ledger)

    async def ask(handle: Ledger) -> None:
        for _ in range(60):
            seen = await handle.claim(claim_of(on_crash="rerun"))
            assert (seen.state, seen.token, seen.attempts) == (State.RUNNING, record.token, 1)

    def carry() -> None:
        move.begin()
        move.take_along()
        move.end()

    await asyncio.gather(ask(ledger), ask(other), asyncio.to_thread(carry))


async def test_redirections_in_a_circle_are_ledger_down(
    ledger: Ledger, move: Move, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each says that the other has it, and none has run anything."""
    move.begin()
    monkeypatch.setattr(redis_connection, "HOPS", 1)
    with pytest.raises(LedgerDown, match="sent from server to server"):
        await ledger.claim(claim_of())
    monkeypatch.undo()
    assert (await granted(ledger)).attempts == 1


# --- records of calls without a key that move -----------------------------------------------------


@pytest.fixture
async def lost(
    ledger: Ledger, cluster_server: RedisCluster, store: Store
) -> AsyncIterator[tuple[Record, Move]]:
    """A record that is done and whose answer is lost, and the move of its slot."""
    record = await claimed(ledger)
    assert await ledger.complete(record.token, outcome_of(), RETENTION)
    await lose(ledger, record)
    move = Move(cluster_server, store, record.id)
    yield record, move
    move.undo()


@pytest.mark.parametrize("is_index_first", [True, False])
async def test_lost_answer_is_not_overlooked_while_its_slot_moves(
    is_index_first: bool, ledger: Ledger, other: Ledger, lost: tuple[Record, Move]
) -> None:
    """While a slot has only the record or only the index, it refuses equal calls: no command runs
    twice.
    """
    record, move = lost
    first = move.take_the_index_along
    second = move.take_along
    move.begin()
    if not is_index_first:
        first, second = second, first
    first()
    for handle in (ledger, other):
        with pytest.raises(
            LedgerDown, match="moves this slot" if is_index_first else "non local key"
        ):
            await handle.claim(keyless())
    assert [each.id for each in await ledger.list()] == [record.id]
    second()
    assert await is_match(other, keyless(), record)  # ASK
    await lose(ledger, await present(ledger, record.id))
    move.end()
    assert await is_match(other, keyless(), record)  # MOVED
    assert (await ledger.counts())[State.DONE] == 1


@pytest.mark.parametrize("is_index_first", [True, False])
async def test_delivery_is_recorded_while_its_slot_moves(
    is_index_first: bool, ledger: Ledger, lost: tuple[Record, Move]
) -> None:
    """The index that is elsewhere keeps a member that matches nothing."""
    record, move = lost
    first = move.take_the_index_along
    second = move.take_along
    move.begin()
    if not is_index_first:
        first, second = second, first
    first()
    await write(ledger, record)
    second()
    move.end()
    assert (await present(ledger, record.id)).delivery == "written"
    assert await is_new(ledger, keyless())


async def test_call_without_a_key_is_recorded_on_the_node_that_imports_its_slot(
    ledger: Ledger, other: Ledger, cluster_server: RedisCluster, store: Store
) -> None:
    first = keyless()
    move = Move(cluster_server, store, first.id)
    move.begin()
    try:
        assert await is_new(ledger, first)  # ASK
        assert await is_new(other, keyless(beside=frozenset({first.id.key})))
        await lose(ledger, await present(ledger, first.id))
        move.end()
        assert await is_match(other, keyless(), await present(ledger, first.id))  # MOVED
    finally:
        move.undo()


# --- tasks that move ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [f"{ID.caller}:{ID.method}:{ID.key}", "task:old", "task:new", "tasks-5"]
)
async def test_task_is_begun_changed_and_found_while_one_of_its_keys_moves(
    name: str, ledger: Ledger, other: Ledger, cluster_server: RedisCluster, store: Store
) -> None:
    """The record, a task that is there, one that is new, or the set that has both."""
    record = await granted(ledger)
    assert await ledger.begin_task(record.token, "old", b"{}", LEASE)
    move = Move(cluster_server, store, name)

    async def change(handle: Ledger, id: str, version: int) -> None:
        task = await handle.task(id)
        assert task is not None and same(task.now, record) and task.version == version
        assert await handle.change_task(task)

    move.begin()
    try:
        await change(other, "old", 1)
        assert await other.begin_task(record.token, "new", b"{}", LEASE)
        move.take_along()
        await change(ledger, "old", 2)
        await change(ledger, "new", 1)
        assert await ledger.begin_task(record.token, "new", b"{}", LEASE)
        assert (task := await other.task_of(ID)) is not None and task.id == "new"
        move.end()
        await change(other, "old", 3)
        await change(ledger, "new", 2)
        assert await ledger.lapse(record.token)
        assert sorted(await other.orphans()) == sorted(await ledger.orphans()) == ["new", "old"]
    finally:
        move.undo()


# --- opening --------------------------------------------------------------------------------------


async def test_cluster_is_opened_through_any_node(
    cluster_server: RedisCluster, store: Store, ledger: Ledger
) -> None:
    await asyncio.gather(*(granted(ledger, id) for id in IDS))
    query = store.url.partition("?")[2]
    for node in cluster_server.nodes:
        assert 0 < node.ask("DBSIZE") < sum(each.ask("DBSIZE") for each in cluster_server.nodes)
        one = await open_ledger(f"{node.url}?{query}")
        assert sorted(record.id for record in await one.list()) == sorted(IDS)
        await one.aclose()


async def test_cluster_has_every_primary_checked(
    cluster_server: RedisCluster, store: Store
) -> None:
    last = cluster_server.nodes[2]
    last.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    last.ask("CONFIG", "SET", "maxmemory", "100mb")
    try:
        with pytest.raises(
            LedgerDown, match=rf"127.0.0.1:{last.port}/0 cannot be a ledger(.|\n)*allkeys-lru"
        ):
            await store.open()
    finally:
        last.ask("CONFIG", "SET", "maxmemory", "0")
        last.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")


@pytest.mark.parametrize("database", [1, 99])
async def test_missing_database_is_reported_at_once(database: int, store: Store) -> None:
    """A cluster has only the first (Valkey 9 has as many as configured)."""
    with pytest.raises(
        LedgerDown, match=r"SELECT is not allowed in cluster mode|DB index is out of range"
    ):
        await open_ledger(store.url.replace("/0?", f"/{database}?"))


async def test_cluster_that_forbids_info_is_detected(
    cluster_server: RedisCluster, store: Store
) -> None:
    """A managed server may forbid INFO: then the first record on another node shows that it is a
    cluster.
    """
    for node in cluster_server.nodes:
        node.ask("ACL", "SETUSER", "guest", "on", "nopass", "~*", "+@all", "-info")
    try:
        ledger = await open_ledger(store.url.replace("redis://", "redis://guest:any@"))
        await asyncio.gather(*(granted(ledger, id) for id in IDS))
        assert len(await eventually(ledger.list)) == len(IDS)
        await ledger.aclose()
    finally:
        for node in cluster_server.nodes:
            node.ask("ACL", "DELUSER", "guest")


async def test_cluster_without_a_server_for_every_slot_is_down() -> None:
    with _started(Redis(**{"cluster-enabled": "yes"})) as node:
        node.ask("CLUSTER", "ADDSLOTS", *range(16_000))
        with pytest.raises(LedgerDown, match="16000 of 16384"):
            await open_ledger(node.url)
        node.ask("CLUSTER", "ADDSLOTS", *range(16_000, 16_384))
        ledger = await open_ledger(node.url)  # a node that is alone does not know its own name
        await eventually(lambda: _is_granted(ledger))
        await ledger.aclose()


async def _is_granted(ledger: Ledger) -> bool:
    try:
        return bool(await granted(ledger))
    except LedgerDown:  # the node needs a moment to find that the cluster is complete
        return False


# --- a primary that is gone -----------------------------------------------------------------------


async def test_operation_on_all_records_fails_if_a_primary_is_gone() -> None:
    """The sweep continues with the others, as long as they serve without the one."""
    cluster = RedisCluster()
    try:
        cluster.start()
        for node in cluster.nodes:
            node.ask("CONFIG", "SET", "cluster-require-full-coverage", "no")
        ledger = await open_ledger(cluster.url + "?prefix=test:")
        away = Store("cluster", cluster.url + "?prefix=test:")
        for id in IDS:
            await in_state(State.DONE, ledger, away, id)
            away.age(id, RETENTION + 1)
        gone = cluster.nodes[1]
        gone.kill()
        for action in (ledger.list, ledger.counts):
            with pytest.raises(LedgerDown, match=str(gone.port)):
                await action()
        swept = [await _swept(ledger) for _ in range(4)]
        assert None in swept
        gone.start()
        await answers_again(ledger)
        left = (await ledger.counts())[State.DONE]
        assert 0 < left == gone.ask("DBSIZE") < len(IDS)
        assert await ledger.sweep() == left
        await ledger.aclose()
    finally:
        cluster.close()


async def _swept(ledger: Ledger) -> int | None:
    try:
        return await ledger.sweep()
    except LedgerDown:
        return None


async def test_silent_primary_delays_only_its_own_records(
    cluster_server: RedisCluster, store: Store
) -> None:
    ledger = await open_ledger(store.url + "&socket_timeout=2")
    await asyncio.gather(*(granted(ledger, id) for id in IDS))
    silent = cluster_server.nodes[1]
    its = {id for id in IDS if Move(cluster_server, store, id).source is silent}
    assert silent.process is not None and 0 < len(its) < len(IDS)
    silent.process.send_signal(signal.SIGSTOP)
    try:
        refusals = [asyncio.ensure_future(ledger.get(id)) for id in its]
        await asyncio.gather(*(present(ledger, id) for id in IDS if id not in its))
        assert not any(refusal.done() for refusal in refusals)
        told = await asyncio.gather(*refusals, return_exceptions=True)
        assert {type(each) for each in told} == {LedgerDown}
    finally:
        silent.process.send_signal(signal.SIGCONT)
    await answers_again(ledger)
    await asyncio.gather(*(present(ledger, id) for id in IDS))
    await ledger.aclose()


# --- closing --------------------------------------------------------------------------------------


@pytest.fixture
def watched() -> Iterator[None]:
    """pytest reports a connection that a test has left open when it is collected."""
    yield
    gc.collect()


@pytest.mark.usefixtures("watched")
async def test_operation_that_fails_while_its_ledger_closes_leaves_no_connection_open(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failure the client reads the map again, but not on connections that are being closed."""

    async def fail(*_: object) -> None:
        raise RedisError("cut")

    for _ in range(20):  # redis-py asks the nodes for the map in a random order
        ledger = await store.open()
        with monkeypatch.context() as patch:
            patch.setattr(redis_connection.Connections, "exchange", fail)
            asked = asyncio.ensure_future(ledger.get(ID))
            closed = asyncio.ensure_future(ledger.aclose())
            await closed
            with pytest.raises(LedgerDown, match="cut"):
                await asked


@pytest.mark.usefixtures("watched")
async def test_operation_that_is_redirected_while_its_ledger_closes_is_answered(
    cluster_server: RedisCluster, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = MovedError(f"0 127.0.0.1:{cluster_server.nodes[1].port}")
    exchange = redis_connection.Connections.exchange

    async def move(connections: redis_connection.Connections, node: Any, asks: Any) -> Any:
        monkeypatch.setattr(redis_connection.Connections, "exchange", exchange)
        return [moved] * len(asks)

    for id in IDS[:10]:
        ledger = await store.open()
        monkeypatch.setattr(redis_connection.Connections, "exchange", move)
        asked = asyncio.ensure_future(ledger.get(id))
        closed = asyncio.ensure_future(ledger.aclose())
        await closed
        assert asked.done() and await asked is None


@pytest.mark.usefixtures("watched")
async def test_ledger_that_is_closed_while_it_reads_the_map_leaves_no_connection_open(
    store: Store,
) -> None:
    # In this loop the map is read again.
    ledger = await asyncio.to_thread(lambda: asyncio.run(store.open()))
    asked = asyncio.ensure_future(ledger.get(ID))
    closed = asyncio.ensure_future(ledger.aclose())
    await closed
    with pytest.raises(LedgerDown, match="the ledger is closed"):
        await asked


@pytest.mark.usefixtures("watched")
async def test_node_that_takes_too_long_to_close_leaves_no_other_open(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, the two seconds that redis-py allows may pass."""
    disconnect = ClusterNode.disconnect

    async def late(_: ClusterNode) -> None:
        monkeypatch.setattr(ClusterNode, "disconnect", disconnect)
        raise RedisTimeout("too late")

    ledger = await store.open()
    monkeypatch.setattr(ClusterNode, "disconnect", late)
    await ledger.aclose()


# --- two processes --------------------------------------------------------------------------------


async def test_cluster_runs_commands_of_two_processes_once(store: Store, effects: Effects) -> None:
    caller = Caller()
    keys = [f"key-{number}" for number in range(60)]
    async with child(store.url, effects) as there, make_shop(store.url, effects) as here:
        await there.send("race", keys, 4, 20)
        await there.next_value("ready")
        await there.send("go")
        answers = [
            await caller.call(here, "charge", key) for key in reversed(keys) for _ in range(4)
        ]
        told = await there.next_value("race")
    assert all(answer.error is None for answer in answers), answers
    done = {effect.key: effect.run for effect in effects.all()}
    assert len(effects.all()) == len(done) == len(keys)
    assert {answer.key: answer.result for answer in answers} == done
    assert {key: list(heard) for key, heard in told.items()} == {
        key: [f'jsonrpc:"2.0"result:"{run}"'] for key, run in done.items()
    }
    check(caller.history, effects.all())


# --- replicas -------------------------------------------------------------------------------------


@contextmanager
def _started(server: Redis) -> Iterator[Redis]:
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def pair() -> Iterator[tuple[Redis, Redis]]:
    """A primary and its replica."""
    with (
        _started(Redis()) as primary,
        _started(Redis(replicaof=f"127.0.0.1 {primary.port}")) as replica,
    ):
        RedisCluster.wait_until(replica.is_in_step)
        yield primary, replica


async def test_acknowledged_writes_are_on_the_replica(pair: tuple[Redis, Redis]) -> None:
    primary, replica = pair
    ledger = await open_ledger(primary.url + "?replicas=1")
    records = await asyncio.gather(*(granted(ledger, id) for id in IDS))
    assert len(replica.ask("KEYS", "*:*:*:*")) == len(IDS)
    assert all(
        await asyncio.gather(
            *(ledger.complete(record.token, outcome_of(), RETENTION) for record in records)
        )
    )
    primary.kill()
    replica.ask("REPLICAOF", "NO", "ONE")
    successor = await open_ledger(replica.url)
    assert (await successor.counts())[State.DONE] == len(IDS)
    await successor.aclose()
    await ledger.aclose()


async def test_claim_without_enough_replicas_runs_nothing_and_leaves_no_record(
    pair: tuple[Redis, Redis], effects: Effects
) -> None:
    """The claim that too few hold is refused and released; with the replica, everything continues."""
    primary, replica = pair
    caller = Caller()
    async with make_shop(primary.url + "?replicas=1", effects) as app:
        done = await caller.call(app, "charge", "before")
        replica.kill()
        refused = await caller.call(app, "charge", "key")
        assert (refused.code, refused.ran) == (50310, "no")
        # A replay too, until the replica returns.
        assert (await caller.call(app, "charge", "before")).code == 50310
        assert len(effects.all()) == 1
        ledger = await open_ledger(primary.url)
        await eventually(lambda: _is_absent(ledger, RecordId("", "charge", "key")))
        await ledger.aclose()
        replica.start()
        await caller.insist(app, "charge", "key")
        assert (await caller.call(app, "charge", "before")).result == done.result
    assert len(effects.all()) == 2
    check(caller.history, effects.all())


async def test_outcome_that_only_the_primary_holds_is_not_replayed(
    pair: tuple[Redis, Redis],
) -> None:
    """A replica that takes over would not have the answer that this caller got."""
    primary, replica = pair
    writer = await open_ledger(primary.url)
    ledger = await open_ledger(primary.url + "?replicas=1")
    token = (await granted(ledger)).token
    assert replica.process is not None
    replica.process.send_signal(signal.SIGSTOP)
    try:
        assert await writer.complete(token, outcome_of(), RETENTION)
        with pytest.raises(LedgerDown, match="replicas=1"):
            await ledger.claim(claim_of())
    finally:
        replica.process.send_signal(signal.SIGCONT)
    done = await ledger.claim(claim_of())
    assert (done.state, done.outcome) == (State.DONE, outcome_of())
    await writer.aclose()
    await ledger.aclose()


async def test_equal_call_does_not_get_a_record_that_only_the_primary_holds(
    pair: tuple[Redis, Redis],
) -> None:
    """Whether the call waits for the record or takes it over."""
    primary, replica = pair
    writer = await open_ledger(primary.url)
    ledger = await open_ledger(primary.url + "?replicas=1")
    assert await is_new(ledger, keyless(OTHER_LIKENESS))
    assert replica.process is not None
    replica.process.send_signal(signal.SIGSTOP)
    try:
        record = await claimed(writer)
        with pytest.raises(LedgerDown, match="replicas=1"):
            await ledger.claim(keyless())
        with pytest.raises(LedgerDown, match="replicas=1"):
            await lose(ledger, record)
    finally:
        replica.process.send_signal(signal.SIGCONT)
    assert await is_match(ledger, keyless(), record)
    await writer.aclose()
    await ledger.aclose()


async def _is_absent(ledger: Ledger, id: RecordId) -> bool:
    return await ledger.get(id) is None


async def test_effect_without_enough_replicas_is_answered_and_recorded_later(
    pair: tuple[Redis, Redis], effects: Effects
) -> None:
    primary, replica = pair
    caller = Caller()
    entered = asyncio.Event()
    go = asyncio.Event()

    async def pause() -> None:
        entered.set()
        await go.wait()

    async with make_shop(primary.url + "?replicas=1", effects, pause=pause) as app:
        first = asyncio.create_task(caller.call(app, "hold", "key"))
        await entered.wait()
        replica.kill()
        go.set()
        assert (await first).result == effects.all()[0].run
        replica.start()
        assert (await caller.insist(app, "hold", "key")).is_replayed
    check(caller.history, effects.all())


async def test_primary_with_fewer_replicas_than_the_url_asks_for_is_refused(
    pair: tuple[Redis, Redis],
) -> None:
    primary, _ = pair
    with pytest.raises(LedgerDown, match="it has 1 replicas, and with replicas=2"):
        await open_ledger(primary.url + "?replicas=2")


@pytest.mark.parametrize("number", ["-1", "some", "1.5"])
async def test_replicas_must_be_a_number(number: str) -> None:
    with pytest.raises(UsageError, match="not one that redis-py takes"):
        await open_ledger(f"redis://127.0.0.1:1/0?replicas={number}")
