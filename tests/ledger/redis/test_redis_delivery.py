"""Calls without a key in Redis: the index of a likeness, its slot, and its lifetime."""

import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from itertools import product
from typing import Any, TypeAlias

import pytest
import redis
from msgspec import structs

from tests.ledger import LEASE, RETENTION, claim_of, outcome_of, present
from tests.ledger.keyless import (
    LIKENESS,
    WINDOW,
    claimed,
    is_match,
    is_new,
    is_waited_for,
    keyless,
    lose,
    write,
)
from tests.servers import Redis, RedisCluster, Store
from wirecall import UsageError
from wirecall.ledger.base import Keyless, Ledger, Record, RecordId, State, open_ledger, recognise

redis_only = pytest.mark.parametrize("store", ["redis"], indirect=True)
both = pytest.mark.parametrize("store", ["redis", "cluster"], indirect=True)

Leave: TypeAlias = Callable[[Ledger, Store, Record], Awaitable[Any]]


@contextmanager
def client_of(store: Store) -> Iterator[Any]:
    with closing(redis.Redis.from_url(store.url.partition("?")[0])) as client:
        yield client


def names_of(store: Store) -> dict[str, str]:
    """The keys of a ledger on a server alone, and their types."""
    prefix = store.url.partition("?prefix=")[2]
    with client_of(store) as client:
        names = [name.decode() for name in client.scan_iter(f"{prefix}*")]
        # Without what is there for operators.
        others = tuple(f"{prefix}{name}" for name in ("meta", "methods", "newest:"))
        names = [name for name in names if not name.startswith(others)]
        return {name.removeprefix(prefix): client.type(name).decode() for name in names}


# --- names and slots ------------------------------------------------------------------------------


@redis_only
async def test_index_of_a_likeness_is_named_like_its_records(ledger: Ledger, store: Store) -> None:
    record = await claimed(ledger)
    end = record.id.key.rpartition("-")[2]
    tag = f"alice:charge:{{auto-{LIKENESS.hex()}}}"
    assert names_of(store) == {tag: "zset", f"{tag}-{end}": "hash"}


@redis_only
async def test_call_without_a_likeness_has_an_ordinary_name_and_no_index(
    ledger: Ledger, store: Store
) -> None:
    record = await claimed(ledger, likeness=None)
    assert names_of(store) == {f"alice:charge:{record.id.key}": "hash"}


@pytest.mark.parametrize("prefix", ["shop:", "{shop}:", "sh{op:", "sh}op{:"])
async def test_likeness_is_in_one_slot_for_all_names(
    prefix: str, cluster_server: RedisCluster
) -> None:
    """Braces of a caller do not make a hash tag; those of the prefix are the operator's."""
    ledger = await open_ledger(f"{cluster_server.url}?prefix={prefix}")
    terms = [Keyless(os.urandom(16)) for _ in range(12)]
    made: list[RecordId] = []
    for each in terms:
        for _ in range(3):
            id = RecordId("a{b}:c", "{}:%7B", each.make_key(os.urandom(16)))
            beside = frozenset(known.key for known in made)
            made.append(
                (await ledger.claim(claim_of(id, keyless=structs.replace(each, beside=beside)))).id
            )
    assert made == [*dict.fromkeys(made)]
    assert sorted(record.id for record in await ledger.list()) == sorted(made)
    slots: dict[str, set[int]] = {}
    for node in cluster_server.nodes:
        for name in node.ask("KEYS", f"{prefix}a%7B*"):
            slots.setdefault(name.decode().partition("{auto-")[2][:32], set()).add(
                node.ask("CLUSTER", "KEYSLOT", name.decode())
            )
    assert set(slots) == {each.likeness.hex() for each in terms if each.likeness}
    assert all(len(found) == 1 for found in slots.values())
    assert (len(set.union(*slots.values())) > 1) == (prefix != "{shop}:")
    for id in made:
        assert await ledger.release((await present(ledger, id)).token)
    assert not any(node.ask("KEYS", f"{prefix}a%7B*") for node in cluster_server.nodes)
    await ledger.aclose()


async def test_prefix_that_would_split_a_likeness_is_refused() -> None:
    with pytest.raises(UsageError, match=r"prefix is a\{\}:"):
        await open_ledger("redis://127.0.0.1:1/0?prefix=a{}:")


# --- an index does not outlive what is in it ------------------------------------------------------


async def _released(ledger: Ledger, _: Store, record: Record) -> None:
    assert await ledger.release(record.token)


async def _written(ledger: Ledger, _: Store, record: Record) -> None:
    await write(ledger, record)


async def _written_after_all(ledger: Ledger, _: Store, record: Record) -> None:
    await lose(ledger, record)
    await write(ledger, record)


async def _written_by_a_repetition(ledger: Ledger, _: Store, record: Record) -> None:
    await lose(ledger, record)
    await write(ledger, await ledger.claim(keyless()))


async def _written_by_a_successor(ledger: Ledger, store: Store, record: Record) -> None:
    store.age(record.id, LEASE + 1)
    taken = await ledger.claim(keyless(on_crash="rerun"))
    assert taken.attempts == 2
    await write(ledger, taken)


async def _resolved(ledger: Ledger, _: Store, record: Record) -> None:
    assert await ledger.abandon(record.token)
    assert await ledger.resolve(record.id, None)


async def _buried(ledger: Ledger, store: Store, record: Record) -> None:
    assert await ledger.complete(record.token, outcome_of(), RETENTION)
    store.age(record.id, RETENTION + 1)
    assert (await ledger.claim(claim_of(record.id))).state is State.TOMBSTONE


async def _buried_by_a_repetition(ledger: Ledger, store: Store, record: Record) -> None:
    assert await ledger.complete(record.token, outcome_of(), 1)
    store.age(record.id, 2)
    await lose(ledger, record)
    assert (await ledger.claim(keyless())).state is State.TOMBSTONE


async def _swept_when_done(ledger: Ledger, store: Store, record: Record) -> None:
    assert await ledger.complete(record.token, outcome_of(), RETENTION)
    store.age(record.id, RETENTION + 1)
    assert await ledger.sweep() == 1


async def _swept_when_running(ledger: Ledger, store: Store, record: Record) -> None:
    store.age(record.id, LEASE + RETENTION + 1)
    assert await ledger.sweep() == 1
    if record.committed:  # equal calls match an unknown outcome until it is resolved
        assert await ledger.resolve(record.id, None)


async def _swept_when_waiting(ledger: Ledger, store: Store, record: Record) -> None:
    assert await ledger.suspend(record.token, outcome_of(), RETENTION)
    store.age(record.id, RETENTION + 1)
    assert await ledger.sweep() == 1


@redis_only
@pytest.mark.parametrize(
    "leave",
    [
        _released,
        _written,
        _written_after_all,
        _written_by_a_repetition,
        _written_by_a_successor,
        _resolved,
        _buried,
        _buried_by_a_repetition,
        _swept_when_done,
        _swept_when_running,
        _swept_when_waiting,
    ],
)
@pytest.mark.parametrize("committed", [True, False])
async def test_index_is_removed_with_its_last_record(
    leave: Leave, committed: bool, ledger: Ledger, store: Store
) -> None:
    record = await claimed(ledger, committed=committed)
    assert "zset" in names_of(store).values()
    await leave(ledger, store, record)
    assert "zset" not in names_of(store).values()
    await lose(ledger, record)  # too late: it does not return
    assert "zset" not in names_of(store).values()


@redis_only
async def test_index_has_no_expiry(ledger: Ledger, store: Store) -> None:
    """A server's clock that jumps forward must not make lost answers look like new calls."""
    await lose(ledger, await claimed(ledger))
    with client_of(store) as client:
        assert {
            client.ttl(store.url.partition("?prefix=")[2] + name) for name in names_of(store)
        } == {-1}


@both
async def test_index_member_without_a_record_is_skipped_and_removed(
    ledger: Ledger, store: Store, request: pytest.FixtureRequest
) -> None:
    """An operator removed it by hand."""
    nodes: list[Redis] = (
        [request.getfixturevalue("redis_server")]
        if store.kind == "redis"
        else request.getfixturevalue("cluster_server").nodes
    )
    prefix = store.url.partition("?prefix=")[2]

    def indexed() -> set[bytes]:
        """The ends of the keys in the index."""
        indexes = [
            (node, name.decode()) for node in nodes for name in node.ask("KEYS", f"{prefix}*}}")
        ]
        return {member[:24] for node, name in indexes for member in node.ask("ZRANGE", name, 0, -1)}

    mine = frozenset[str]()
    records = []
    for _ in range(3):
        records.append(await claimed(ledger, beside=mine))
        mine |= {records[-1].id.key}
    gone, kept, lost = records
    await lose(ledger, lost)
    for node in nodes:
        for name in node.ask("KEYS", f"{prefix}*{gone.id.key[-24:]}"):
            node.ask("DEL", name.decode())
    assert await is_match(ledger, keyless(), lost)
    mine = frozenset({lost.id.key})
    assert await is_waited_for(ledger, keyless(beside=mine), kept)
    mine |= {kept.id.key}
    claim = keyless(beside=mine)
    assert await is_new(ledger, claim)
    assert indexed() == {id.key[-24:].encode() for id in (kept.id, lost.id, claim.id)}


@both
async def test_index_has_the_fence_of_a_successor(ledger: Ledger, store: Store) -> None:
    """A poll with the generated key took the oldest record over, so it is no longer the oldest."""
    first = await claimed(ledger)
    second = await claimed(ledger, beside=frozenset({first.id.key}))
    for record in (first, second):
        assert await ledger.lapse(record.token)
    taken = await ledger.claim(claim_of(first.id, on_crash="rerun"))
    assert taken.fence > second.fence
    assert await ledger.lapse(taken.token)
    assert await is_match(ledger, keyless(on_crash="rerun"), second)
    assert await is_match(
        ledger, keyless(beside=frozenset({second.id.key}), on_crash="rerun"), first
    )


# --- the table of base.py -------------------------------------------------------------------------


@redis_only
async def test_script_recognises_the_same_calls_as_the_table(ledger: Ledger, store: Store) -> None:
    prefix = store.url.partition("?prefix=")[2]
    ages = [
        -10.0,
        10.0,
        LEASE - 10,
        LEASE + 10,
        WINDOW - 10,
        WINDOW + 10,
        LEASE + WINDOW - 10,
        LEASE + WINDOW + 10,
    ]
    cases = product(
        [state for state in State if state is not State.TOMBSTONE],  # it is never in an index
        ["pending", "undelivered", "written"],
        [True, False],
        [True, False],
        ages,
    )
    seen = set[str]()
    with client_of(store) as client:
        for state, delivery, is_beside, is_mine, age in cases:
            if age < 0 and (state is not State.RUNNING or delivery != "pending"):
                continue  # only the end of a lease may lie ahead
            terms = Keyless(os.urandom(16), WINDOW)
            made = await ledger.claim(
                claim_of(RecordId("alice", "charge", terms.make_key(os.urandom(16))), keyless=terms)
            )
            name = f"{prefix}alice:charge:{{{made.id.key[:-25]}}}-{made.id.key[-24:]}"
            if state is State.UNKNOWN:  # it keeps its place in the index
                assert await ledger.abandon(made.token)
            if delivery == "undelivered":
                await lose(ledger, made)
            moment = int(made.fence - age * 1e6)
            fields = {
                "lost_at": moment,
                "taken_at": moment,
                "completed_at": moment,
                "lease_until": moment,
            }
            client.hset(name, mapping={"state": state.value, "delivery": delivery, **fields})
            terms = structs.replace(terms, beside=frozenset({made.id.key} if is_beside else ()))
            own = {"nonce": made.deliverer} if is_mine else {}
            claim = claim_of(
                RecordId("alice", "charge", terms.make_key(os.urandom(16))), keyless=terms, **own
            )
            expected = recognise(await present(ledger, made.id), claim, age)
            found = await ledger.claim(claim)
            if found.id == claim.id:
                recognition = "pass"
            elif found.deliverer == claim.nonce:
                recognition = "match"
            else:
                recognition = "wait"
            assert recognition == expected, (state, delivery, is_beside, is_mine, age)
            seen.add(recognition)
    assert seen == {"match", "wait", "pass"}
