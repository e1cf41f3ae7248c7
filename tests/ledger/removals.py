"""The ways in which a record is removed."""

from tests.ledger import (
    ID,
    RETENTION,
    outcome_of,
)
from tests.servers import Store
from wirecall.ledger.base import (
    TOMBSTONE_FACTOR,
    Ledger,
    Record,
)


async def remove_by_release(ledger: Ledger, store: Store, record: Record) -> None:
    assert await ledger.release(record.token)


async def remove_by_resolve(ledger: Ledger, store: Store, record: Record) -> None:
    assert await ledger.abandon(record.token)
    assert await ledger.resolve(ID, None)


async def remove_by_sweep(ledger: Ledger, store: Store, record: Record) -> None:
    assert await ledger.complete(record.token, outcome_of(), RETENTION)
    for retentions in (1, TOMBSTONE_FACTOR - 1):
        store.age(ID, retentions * RETENTION + 1)
        assert await ledger.sweep() == 1
