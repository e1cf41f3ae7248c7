"""The contract of a store, regardless of its kind: the same tests over memory, SQLite, Redis and
PostgreSQL.

The tests share these helpers. A lease is 30 s and a retention 1000 s unless a test says otherwise.
"""

import asyncio
import hashlib
import os
from typing import Any

from msgspec import structs

from tests.servers import Store
from wirecall.ledger.base import Claim, Ledger, LedgerDown, Outcome, Record, RecordId, State

LEASE = 30.0
RETENTION = 1000.0
PRINT = hashlib.sha256(b"params").digest()
OTHER_PRINT = hashlib.sha256(b"other params").digest()
ID = RecordId("alice", "charge", "key-1")


def claim_of(id: RecordId = ID, **fields: Any) -> Claim:
    """A claim with its own nonce."""
    terms = {
        "fingerprint": PRINT,
        "lease": LEASE,
        "retention": RETENTION,
        "on_crash": "unknown",
        "nonce": os.urandom(16),
    }
    return Claim(id=id, **{**terms, **fields})


def outcome_of(payload: bytes | None = b'"done"', kind: Any = "result") -> Outcome:
    return Outcome(kind, payload, hashlib.sha256(payload or b"").digest())


async def granted(ledger: Ledger, id: RecordId = ID, **fields: Any) -> Record:
    """A record that a claim was granted: RUNNING, and the claimer's own."""
    claim = claim_of(id, **fields)
    record = await ledger.claim(claim)
    assert (record.state, record.nonce, record.fingerprint) == (
        State.RUNNING,
        claim.nonce,
        claim.fingerprint,
    )
    return record


async def present(ledger: Ledger, id: RecordId = ID) -> Record:
    record = await ledger.get(id)
    assert record is not None, id
    return record


async def in_state(
    state: State, ledger: Ledger, store: Store, id: RecordId = ID, **fields: Any
) -> Record:
    """A record in that state, with the token of its last holder."""
    record = await granted(ledger, id, **fields)
    if state is State.WAITING:
        assert await ledger.suspend(record.token, outcome_of(b'"interim"'), RETENTION)
    elif state is State.UNKNOWN:
        assert await ledger.abandon(record.token)
    elif state is State.DONE:
        assert await ledger.complete(record.token, outcome_of(), RETENTION)
    elif state is State.TOMBSTONE:
        assert await ledger.complete(record.token, outcome_of(), RETENTION)
        store.age(id, RETENTION + 1)
        await ledger.claim(claim_of(id, **fields))
    record = await present(ledger, id)
    assert record.state is state
    return record


async def answers_again(ledger: Ledger) -> None:
    """Wait for a ledger whose server has returned: it may pause between two attempts to reach it."""
    async with asyncio.timeout(10):
        while True:
            try:
                await ledger.counts()
                return
            except LedgerDown:
                await asyncio.sleep(0.02)


def same(one: Record | None, other: Record | None) -> bool:
    """Whether two views are of one unchanged record: only the clock advanced between them."""
    if one is None or other is None:
        return one is other
    still = structs.replace(one, lease_left=0) == structs.replace(other, lease_left=0)
    return (
        still
        and (one.lease_left > 0) == (other.lease_left > 0)
        and abs(one.lease_left - other.lease_left) < 10
    )
