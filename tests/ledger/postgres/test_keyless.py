"""Claims without a key in PostgreSQL: the table of recognition, lists of equal calls, and
statements that are sent twice.
"""

import asyncio
import itertools
from typing import Any

import psycopg
import pytest
from msgspec import json, structs

from tests.ledger import ID, LEASE, PRINT, RETENTION, claim_of, outcome_of, present
from tests.ledger.keyless import LIKENESS, WINDOW, claimed, keyless, lose, write
from tests.servers import Store
from wirecall.ledger.base import (
    Claim,
    Delivered,
    Delivery,
    Ledger,
    Record,
    State,
    open_ledger,
    recognise,
)
from wirecall.ledger.postgres.queue import SQL, Connections

pytestmark = pytest.mark.parametrize("store", ["postgres"], indirect=True)

STATES = (State.RUNNING, State.WAITING, State.DONE, State.UNKNOWN)


def test_recognition_is_that_of_the_contract(store: Store, ledger: Ledger) -> None:
    """Every state, delivery and deliverer, beside or not, around every limit in time."""
    sinces = (
        1,
        LEASE - 5,
        LEASE + 5,
        WINDOW - 5,
        WINDOW + 5,
        LEASE + WINDOW - 5,
        LEASE + WINDOW + 5,
    )
    deliveries: tuple[Delivery, ...] = ("pending", "undelivered", "written")
    cases = itertools.product(STATES, deliveries, (False, True), (False, True), (0, 10), sinces)
    statement = b"""
        SELECT wirecall.recognise(
            jsonb_populate_record(NULL::wirecall.ledger, l), (wirecall.keyless_of(%s::json))[1]
        )
        FROM (
            SELECT %s::jsonb || jsonb_build_object(
                'lease_until', clock_timestamp() + make_interval(secs => %s),
                'completed_at', clock_timestamp() - make_interval(secs => %s),
                'lost_at', clock_timestamp() - make_interval(secs => %s)
            )
        ) AS f (l)
    """
    with psycopg.connect(store.url) as db:
        for state, delivery, is_own, is_beside, left, since in cases:
            claim = keyless(beside=frozenset({"x", "k"} if is_beside else {"x"}))
            deliverer = claim.nonce if is_own else b"another"
            record = Record(
                structs.replace(claim.id, key="k"),
                PRINT,
                state,
                1,
                b"n",
                True,
                1,
                left,
                0,
                delivery=delivery,
                deliverer=deliverer,
            )
            row = json.encode(
                {
                    "key": "k",
                    "state": state,
                    "delivery": delivery,
                    "deliverer": f"\\x{deliverer.hex()}",
                }
            )
            # A pending record that runs is counted from the end of its lease.
            ends_in = left or -since
            found = db.execute(
                statement, (f"[{json.encode(claim).decode()}]", row.decode(), ends_in, since, since)
            ).fetchone()
            assert found == (recognise(record, claim, since),), (
                state,
                delivery,
                is_own,
                is_beside,
                left,
                since,
            )


async def test_equal_calls_of_one_process_at_once_are_all_new(ledger: Ledger) -> None:
    """Each names those before it. They are sent in few statements, in the order of the calls."""
    claims: list[Claim] = []
    for _ in range(40):
        claims.append(keyless(beside=frozenset(claim.id.key for claim in claims)))
    found = await asyncio.gather(*(ledger.claim(claim) for claim in claims))
    assert [(record.id, record.nonce) for record in found] == [
        (claim.id, claim.nonce) for claim in claims
    ]
    assert [record.fence for record in found] == sorted(record.fence for record in found)


async def test_equal_calls_of_several_processes_at_once_are_new_once(
    ledger: Ledger, store: Store
) -> None:
    """As if each came from a separate process: while one is pending, the others wait for it."""
    other = await store.open()
    claims = [keyless() for _ in range(40)]
    found = await asyncio.gather(
        *((ledger, other)[n % 2].claim(claim) for n, claim in enumerate(claims))
    )
    assert len({record.id for record in found}) == 1
    assert (
        sum(record.nonce == claim.nonce for record, claim in zip(found, claims, strict=True)) == 1
    )
    await other.aclose()


async def test_list_may_have_new_calls_repetitions_and_calls_that_wait(ledger: Ledger) -> None:
    kinds = "lost", "open", "written", "new", "unknown caller"
    likenesses = {kind: bytes([number]) * 16 for number, kind in enumerate(kinds)}
    lost, held, done = [await claimed(ledger, likeness=likenesses[kind]) for kind in kinds[:3]]
    await lose(ledger, lost)
    await write(ledger, done)
    claims = {
        kind: keyless(None if kind == "unknown caller" else likenesses[kind]) for kind in kinds
    }
    found = dict(
        zip(claims, await asyncio.gather(*map(ledger.claim, claims.values())), strict=True)
    )
    assert (found["lost"].id, found["lost"].deliverer) == (lost.id, claims["lost"].nonce)
    assert (found["open"].id, found["open"].deliverer) == (held.id, held.deliverer)
    for kind in kinds[2:]:
        assert (found[kind].id, found[kind].deliverer) == (claims[kind].id, claims[kind].nonce)


async def test_delivery_that_is_twice_in_one_list_is_the_written_one(ledger: Ledger) -> None:
    """A stream was lost, and resumed before its loss was marked; or the reverse, which is too late."""
    told: Any
    for told in (("undelivered", "written"), ("written", "undelivered")):
        record = await claimed(ledger)
        await ledger.deliver([Delivered(record.id, record.deliverer, end) for end in told])
        assert (await present(ledger, record.id)).delivery == "written"


async def test_statements_that_are_sent_twice_have_one_effect(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply to the first was lost.

    Also if the deliverer was found to be gone between the two.
    """
    once = Connections.ask

    async def ask(self: Connections, *args: Any) -> Any:
        await once(self, *args)
        return await once(self, *args)

    monkeypatch.setattr(Connections, "ask", ask)
    record = await claimed(ledger)
    assert record.attempts == 1
    await claimed(ledger, likeness=None)
    await lose(ledger, record)
    claim = keyless()
    taken = await ledger.claim(claim)
    assert (taken.id, taken.deliverer, taken.delivery) == (record.id, claim.nonce, "pending")
    assert len(await ledger.list()) == 2


async def test_claim_that_is_sent_again_after_a_lapse_still_holds_its_record(
    ledger: Ledger, store: Store
) -> None:
    claim = keyless()
    record = await ledger.claim(claim)
    await lose(ledger, record)
    store.age(record.id, LEASE + 1)
    again = await ledger.claim(claim)
    assert (again.token, again.state, again.delivery) == (record.token, State.RUNNING, "pending")
    assert again.lease_left > LEASE / 2


async def test_record_that_is_written_or_swept_leaves_the_index(
    ledger: Ledger, store: Store
) -> None:
    """Otherwise the claim of a call that is often repeated would look at all of them."""
    written, swept, open = [
        await claimed(ledger, likeness=bytes([number]) * 16) for number in range(3)
    ]
    await write(ledger, written)
    assert await ledger.complete(swept.token, outcome_of(), RETENTION)
    store.age(swept.id, RETENTION + 1)
    assert await ledger.sweep() == 1
    with psycopg.connect(store.url) as db:
        assert db.execute(
            b"SELECT key FROM wirecall.ledger WHERE likeness IS NOT NULL"
        ).fetchall() == [(open.id.key,)]


async def test_database_of_an_older_version_is_migrated(store: Store, ledger: Ledger) -> None:
    """P9: its records are found, and lost answers are recognised from now on."""
    await ledger.aclose()
    with psycopg.connect(store.url, autocommit=True) as db:
        db.execute(b"DROP SCHEMA IF EXISTS wirecall CASCADE")
        for name in ("create schema", "schema 1"):
            db.execute(SQL[name].encode())
        db.execute(b"INSERT INTO wirecall.version (number) VALUES (1), (2)")
        db.execute(
            b"INSERT INTO wirecall.ledger VALUES (%s, %s, %s, %s, 'done', 0, '', true, 1, clock_timestamp(),"
            b" clock_timestamp(), '1h', clock_timestamp() + '1h', clock_timestamp(), 'result', '1', '')",
            (*structs.astuple(ID), PRINT),
        )
    ledger = await open_ledger(store.url, "update")
    try:
        record = await ledger.claim(claim_of())
        assert (record.state, record.delivery, record.deliverer) == (State.DONE, None, b"")
        lost = await claimed(ledger, likeness=LIKENESS)
        await lose(ledger, lost)
        assert (await ledger.claim(keyless(LIKENESS))).id == lost.id
    finally:
        await ledger.aclose()
