"""Helpers for calls without a key: their claims, and what becomes of their answers."""

import os
from typing import Any

from tests.ledger import claim_of
from wirecall.ledger.base import (
    Claim,
    Delivered,
    Keyless,
    Ledger,
    Record,
    RecordId,
    State,
)

LIKENESS = bytes(range(16))


OTHER_LIKENESS = bytes(16)


WINDOW = 120.0


def keyless(
    likeness: bytes | None = LIKENESS, *, beside: frozenset[str] = frozenset(), **fields: Any
) -> Claim:
    """The claim of a call without a key."""
    terms = Keyless(likeness, WINDOW, beside)
    return claim_of(
        RecordId("alice", "charge", terms.make_key(os.urandom(16))), keyless=terms, **fields
    )


async def claimed(ledger: Ledger, **fields: Any) -> Record:
    """A record that such a claim has made."""
    claim = keyless(**fields)
    record = await ledger.claim(claim)
    assert (record.id, record.nonce, record.state) == (claim.id, claim.nonce, State.RUNNING)
    assert (record.delivery, record.deliverer) == ("pending", claim.nonce)
    return record


async def lose(ledger: Ledger, record: Record) -> None:
    await ledger.deliver([Delivered(record.id, record.deliverer, "undelivered")])


async def write(ledger: Ledger, record: Record) -> None:
    await ledger.deliver([Delivered(record.id, record.deliverer, "written")])


async def is_new(ledger: Ledger, claim: Claim) -> bool:
    """Whether the claim made its own record."""
    record = await ledger.claim(claim)
    return record.id == claim.id and record.nonce == claim.nonce


async def is_match(ledger: Ledger, claim: Claim, earlier: Record) -> bool:
    record = await ledger.claim(claim)
    return record.id == earlier.id and (record.deliverer, record.delivery) == (
        claim.nonce,
        "pending",
    )


async def is_waited_for(ledger: Ledger, claim: Claim, earlier: Record) -> bool:
    record = await ledger.claim(claim)
    return record.id == earlier.id and record.deliverer == earlier.deliverer
