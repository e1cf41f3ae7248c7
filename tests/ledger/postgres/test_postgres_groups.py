"""Statements of PostgreSQL that carry many commands, and what they write."""

import asyncio
from typing import Any

import psycopg
import pytest
from msgspec import structs

from tests.ledger import ID, LEASE, RETENTION, claim_of, granted, outcome_of, present
from tests.servers import Store
from wirecall.ledger.base import Ledger, LedgerDown, RecordId, State
from wirecall.ledger.postgres import pace, queue
from wirecall.ledger.postgres.pace import ENOUGH, Pace
from wirecall.ledger.postgres.queue import SQL, Committing, Connections, Ending, encode

pytestmark = pytest.mark.parametrize("store", ["postgres"], indirect=True)

PATIENCE = 60.0
LONG_AGO = 100.0


def slow_pace() -> Pace:
    """The pace of a server whose statements took long."""
    made = Pace()
    made.landed(1, made.took_off(1) - LONG_AGO)
    return made


def slow_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, each statement of any pace has taken long."""
    real = Pace.took_off
    monkeypatch.setattr(Pace, "took_off", lambda self, items: real(self, items) - LONG_AGO)
    monkeypatch.setattr(pace, "LONGEST", LONG_AGO)


async def begun(made: Pace) -> "asyncio.Task[None]":
    """A wait that has begun."""
    gathering = asyncio.create_task(made.gather())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return gathering


# --- the pace -------------------------------------------------------------------------------------


async def test_pace_lets_a_lone_call_pass(store: Store) -> None:
    assert (await begun(slow_pace())).done()


async def test_pace_of_a_quick_server_waits_for_nothing(store: Store) -> None:
    quick = Pace()
    quick.took_off(1)
    assert (await begun(quick)).done()


async def test_pace_waits_until_the_commands_in_flight_have_landed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "LONGEST", LONG_AGO)
    slow = slow_pace()
    first = slow.took_off(3)
    second = slow.took_off(1)
    gathering = await begun(slow)
    slow.landed(3, first)
    await asyncio.sleep(0)
    assert not gathering.done()
    slow.landed(1, second)
    async with asyncio.timeout(PATIENCE):
        await gathering


async def test_pace_waits_no_longer_than_its_limit(store: Store) -> None:
    slow = slow_pace()
    slow.took_off(1)
    async with asyncio.timeout(PATIENCE):
        await slow.gather()


# --- groups ---------------------------------------------------------------------------------------


class Sent:
    """The statements that a process sends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.seen: asyncio.Queue[str] = asyncio.Queue()
        # While it is not set, a statement waits at the network.
        self.open = asyncio.Event()
        self.open.set()
        real = Connections.ask
        names = {statement: name for name, statement in SQL.items()}

        async def ask(connections: Connections, statement: str, params: Any) -> Any:
            self.names.append(names[statement])
            self.seen.put_nowait(names[statement])
            await self.open.wait()
            return await real(connections, statement, params)

        monkeypatch.setattr(Connections, "ask", ask)


async def test_commit_points_of_many_calls_are_one_statement(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [structs.replace(ID, key=str(number)) for number in range(20)]
    records = [await granted(ledger, id, committed=False) for id in ids]
    stale = structs.replace(records[7].token, nonce=b"another")
    tokens = [record.token for record in records]
    tokens[7] = stale
    sent = Sent(monkeypatch)
    marked = await asyncio.gather(*(ledger.commit_point(token, LEASE) for token in tokens))
    assert sent.names == ["commit_point"]
    assert marked == [number != 7 for number in range(20)]
    assert [(await present(ledger, id)).committed for id in ids] == marked


async def test_calls_in_flight_join_the_next_statement(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a slow server: outcomes wait for claims that are on the wire, whose outcomes follow."""
    slow_down(monkeypatch)
    first = await granted(ledger)
    sent = Sent(monkeypatch)

    async def run(key: str) -> bool:
        record = await granted(ledger, structs.replace(ID, key=key))
        return await ledger.complete(record.token, outcome_of(), RETENTION)

    sent.open.clear()
    others = [asyncio.create_task(run(str(number))) for number in range(3)]
    assert await sent.seen.get() == "claim"
    ending = asyncio.create_task(ledger.complete(first.token, outcome_of(), RETENTION))
    for _ in range(10):
        await asyncio.sleep(0)
    assert sent.names == ["claim"]
    sent.open.set()
    async with asyncio.timeout(PATIENCE):
        assert await asyncio.gather(ending, *others) == [True] * 4
    assert sent.names == ["claim", "complete"]


async def test_enough_calls_do_not_wait(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch)
    await granted(ledger)
    sent = Sent(monkeypatch)
    sent.open.clear()
    claims = [ledger.claim(claim_of(structs.replace(ID, key=f"first-{n}"))) for n in range(2)]
    first = [asyncio.ensure_future(claim) for claim in claims]
    assert await sent.seen.get() == "claim"
    ids = [RecordId("", "m", str(number)) for number in range(ENOUGH)]
    more = [asyncio.ensure_future(ledger.claim(claim_of(id))) for id in ids]
    async with asyncio.timeout(PATIENCE):
        assert await sent.seen.get() == "claim"
        sent.open.set()
        records = await asyncio.gather(*first, *more)
    assert {record.state for record in records} == {State.RUNNING}


@pytest.mark.parametrize("name", ["claim", "commit_point", "complete"])
async def test_call_that_fails_in_a_group_fails_alone(
    name: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL undoes the whole statement, so each of its calls is sent again alone."""
    ids = [structs.replace(ID, key=str(number)) for number in range(5)]
    bad = 2
    calls: list[Any] = []
    if name == "claim":
        ids[bad] = structs.replace(ID, key="k" * 300)
        calls = [ledger.claim(claim_of(id)) for id in ids]
    else:
        tokens = [(await granted(ledger, id, committed=False)).token for id in ids]
        tokens[bad] = structs.replace(tokens[bad], fence=2**70)
    if name == "commit_point":
        calls = [ledger.commit_point(token, LEASE) for token in tokens]
    elif name == "complete":
        calls = [ledger.complete(token, outcome_of(), RETENTION) for token in tokens]
    sent = Sent(monkeypatch)
    answers: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
    assert sent.names == [name] * 6
    assert isinstance(answers.pop(bad), LedgerDown)
    del ids[bad]
    for id, answer in zip(ids, answers, strict=True):
        record = await present(ledger, id)
        assert answer is True or (answer.nonce, answer.attempts) == (record.nonce, 1)
        assert record.committed is (name != "complete")
        assert (record.state is State.DONE) is (name == "complete")


async def test_caller_that_leaves_a_group_does_not_disturb_it(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its statement leaves, and while it is on the wire."""
    await granted(ledger)
    sent = Sent(monkeypatch)
    sent.open.clear()
    ids = [structs.replace(ID, key=f"{number}") for number in range(4)]
    claims = [asyncio.ensure_future(ledger.claim(claim_of(id))) for id in ids]
    await asyncio.sleep(0)  # they are in the queue
    claims[0].cancel()
    assert await sent.seen.get() == "claim"
    claims[1].cancel()
    sent.open.set()
    answers = await asyncio.gather(*claims, return_exceptions=True)
    assert [isinstance(answer, asyncio.CancelledError) for answer in answers] == [
        True,
        True,
        False,
        False,
    ]
    found = [await ledger.get(id) for id in ids]
    assert [record is not None for record in found] == [False, True, True, True]
    assert sent.names.count("claim") == 1


async def test_calls_that_wait_when_the_ledger_stops_are_refused(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that no statement carries yet: the server does not answer."""
    token = (await granted(ledger)).token
    monkeypatch.setattr(queue, "PATIENCE", 0.05)
    sent = Sent(monkeypatch)
    sent.open.clear()
    # Each of one id needs another statement.
    ends = [ledger.complete(token, outcome_of(), RETENTION) for _ in range(4)]
    calls = [asyncio.ensure_future(end) for end in ends]
    async with asyncio.timeout(PATIENCE):
        assert await sent.seen.get() == "complete"
        await ledger.aclose()
        ended = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in ended] == [LedgerDown] * 4


# --- what they write ------------------------------------------------------------------------------


async def test_commit_point_and_outcome_write_to_no_index(ledger: Ledger, store: Store) -> None:
    record = await granted(ledger, committed=False)
    token = record.token
    point = Committing(token.id, token.fence, token.nonce, LEASE)
    ending = Ending(token.id, token.fence, token.nonce, outcome_of(), RETENTION)
    with psycopg.connect(store.url) as db:
        cursor = psycopg.ClientCursor(db)
        for name, item in (("commit_point", point), ("complete", ending)):
            items = {"items": encode([item]).decode(), "again": False}
            assert len(cursor.execute(SQL[name].encode(), items).fetchall()) == 1
        cursor.execute(
            "SELECT pg_stat_get_xact_tuples_updated(oid), pg_stat_get_xact_tuples_hot_updated(oid) "
            "FROM pg_class WHERE oid = 'wirecall.ledger'::regclass"
        )
        assert cursor.fetchall() == [(2, 2)]
    assert (await present(ledger)).state is State.DONE


async def test_no_index_but_the_primary_key_could_be_taken_for_it(
    ledger: Ledger, store: Store
) -> None:
    """A plan that is made while the table is small may prefer any index that has a part of the id."""
    with psycopg.connect(store.url) as db:
        rows = db.execute(
            "SELECT c.relname, a.attname FROM pg_index AS i "
            "JOIN pg_class AS c ON c.oid = i.indexrelid "
            "JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey) "
            "WHERE i.indrelid = 'wirecall.ledger'::regclass"
        ).fetchall()
    columns = {(index, column) for index, column in rows}
    assert {index for index, column in columns if column in ("caller", "method", "key")} == {
        "ledger_pkey"
    }
    assert not {column for _, column in columns} & {"state", "expires_at", "lease_until", "nonce"}
