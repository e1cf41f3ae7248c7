"""A record whose outcome is unknown."""

import msgspec

from tests.ledger import claim_of
from wirecall.ledger.base import Ledger, Record, RecordId, State

ID = RecordId("", "charge", "order-4711")


async def unknown(ledger: Ledger, id: RecordId = ID, nonce: bytes = b"n" * 16) -> Record:
    claim = msgspec.structs.replace(claim_of(), id=id, nonce=nonce)
    record = await ledger.claim(claim)
    assert await ledger.abandon(record.token)
    found = await ledger.get(id)
    assert found is not None and found.state is State.UNKNOWN
    return found
