"""A model of users that place equal orders without a key, repeat the lost ones, and wait for the
others.

Two processes serve them over one ledger. Answers are written, and marked a little later; callers
hang up; processes die with their memory. In every history, there are at most as many effects as
orders, and no two users get one effect's answer.

The model is worth something only if it notices when a rule is missing. So rules of recognition and
of delivery are removed, one at a time, and the model has to notice.
"""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import (
    run_state_machine_as_test,
)
from msgspec import structs

from tests.ledger.delivery_model import Shop
from tests.ledger.model import QUIET, searched
from tests.size import sized
from wirecall.ledger import memory
from wirecall.ledger.base import (
    Claim,
    Recognition,
    Record,
    recognise,
)
from wirecall.ledger.memory import MemoryLedger


def test_lost_order_takes_effect_once_and_a_new_one_is_not_swallowed() -> None:
    """P5: over random histories; a failure is shrunk to the shortest one."""
    run_state_machine_as_test(
        Shop, settings=settings(QUIET, max_examples=sized(small=60, full=300))
    )


# --- and the model notices ------------------------------------------------------------------------


def never_waits(record: Record, claim: Claim, since: float) -> Recognition:
    recognition = recognise(record, claim, since)
    return "match" if recognition == "wait" else recognition


def waits_for_nothing(record: Record, claim: Claim, since: float) -> Recognition:
    recognition = recognise(record, claim, since)
    return "pass" if recognition == "wait" else recognition


def knows_no_deaths(record: Record, claim: Claim, since: float) -> Recognition:
    is_marked = record.delivery == "undelivered" or record.deliverer == claim.nonce
    return recognise(record, claim, since) if is_marked else "pass"


def forgets_its_own(record: Record, claim: Claim, since: float) -> Recognition:
    assert claim.keyless is not None
    return recognise(
        record,
        structs.replace(claim, keyless=structs.replace(claim.keyless, beside=frozenset())),
        since,
    )


class DeliversForAll(MemoryLedger):
    async def deliver(self, ends: Any) -> None:
        for end in ends:
            row = self._rows.get(end.id)
            if row is not None:
                await super().deliver([structs.replace(end, deliverer=row.deliverer)])


class LosesWhatIsWritten(MemoryLedger):
    async def deliver(self, ends: Any) -> None:
        for end in ends:
            await super().deliver([structs.replace(end, delivery="undelivered")])


class KeepsTheDeliverer(MemoryLedger):
    """One lost call matches any number of repetitions."""

    async def claim(self, claim: Claim) -> Record:
        before = {id: row.delivery for id, row in self._rows.items()}
        record = await super().claim(claim)
        if before.get(record.id) == "undelivered":
            row = self._rows[record.id]
            row.delivery = "undelivered"
        return record


class CountsFromTheLoss(MemoryLedger):
    """An answer that a repetition took over looks as old as its loss."""

    async def claim(self, claim: Claim) -> Record:
        before = {id: row.answer_at for id, row in self._rows.items()}
        record = await super().claim(claim)
        row = self._rows[record.id]
        row.answer_at = before.get(record.id, row.answer_at)
        return record


MUTANTS: dict[str, tuple[type[MemoryLedger], Callable[..., Recognition]]] = {
    "a claim that does not wait for other processes": (MemoryLedger, never_waits),
    "a claim that passes other processes by": (MemoryLedger, waits_for_nothing),
    "a claim that does not know that a process may die": (MemoryLedger, knows_no_deaths),
    "a claim that takes answers of the same process for lost": (MemoryLedger, forgets_its_own),
    "an end by another than the deliverer": (DeliversForAll, recognise),
    "an answer that is written, and lost": (LosesWhatIsWritten, recognise),
    "an answer that is lost, and taken twice": (KeepsTheDeliverer, recognise),
    "an answer that is taken over, and looks lost already": (CountsFromTheLoss, recognise),
}


RARE = {
    "a claim that passes other processes by",
    "a claim that does not know that a process may die",
    "an answer that is lost, and taken twice",
    "an answer that is taken over, and looks lost already",
}


@pytest.mark.parametrize("name", MUTANTS)
def test_model_notices_a_missing_rule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, mutant = MUTANTS[name]
    monkeypatch.setattr(memory, "recognise", mutant)
    watched = type("Watched", (Shop,), {"make_ledger": ledger})
    with pytest.raises(AssertionError):
        searched(watched, rare=name in RARE)
