"""The models of `tests.ledger` around the statements of the SQLite ledger, each in a separate
transaction.

Then every guard of every statement is removed, one at a time, and its model has to notice.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import apsw
import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.ledger.delivery_model import Shop
from tests.ledger.model import QUIET, Attempt, World, searched
from tests.size import sized
from wirecall.ledger.base import Claim, Record
from wirecall.ledger.sqlite.file import SCHEMA, SQL
from wirecall.ledger.sqlite.ledger import SqliteLedger
from wirecall.ledger.sqlite.writer import Job, take_fences


class AtOnce:
    """In place of the writer: does every job at once, on a database in memory."""

    def __init__(self) -> None:
        db = apsw.Connection(":memory:")
        db.execute("".join(SCHEMA))
        self.reader = db.cursor()
        self.reading = threading.Lock()

    async def ask(self, job: Job) -> Any:
        with self.reader.connection:
            return job.work(self.reader, take_fences(self.reader, job.claims) + job.claims)


class AtOnceLedger(SqliteLedger):
    def __init__(self, **clocks: Callable[[], float]) -> None:
        super().__init__("in memory", **clocks)
        self._at_once = AtOnce()

    def _running(self) -> Any:
        return self._at_once


class SqliteWorld(World):
    make_ledger = AtOnceLedger  # type: ignore[assignment]

    def begin(self, claim: Claim, record: Record, before: Record | None) -> Attempt:
        # In this store they grow over all records.
        self.fences = dict.fromkeys(self.fences, max(self.fences.values()))
        return super().begin(claim, record, before)


class SqliteShop(Shop):
    make_ledger = AtOnceLedger


def test_statements_let_a_lost_order_take_effect_once() -> None:
    run_state_machine_as_test(
        SqliteShop, settings=settings(QUIET, max_examples=sized(small=30, full=100))
    )


def test_statements_let_a_command_take_effect_once() -> None:
    run_state_machine_as_test(
        SqliteWorld, settings=settings(QUIET, max_examples=sized(small=30, full=100))
    )


# --- and the model notices ------------------------------------------------------------------------

Mutant = dict[str, list[tuple[str, str]]]  # by statement: what is put in place of what

FENCE = ("fence = :fence", ":fence IS NOT NULL")
NONCE = ("nonce = :nonce", ":nonce IS NOT NULL")
RUNNING = ("AND state = 'running'", "")
COMPLETED = ("AND state IN ('running', 'unknown')", "")
LEASE = ("AND lease_until > :clock AND boot = :boot", "")


def mutants() -> Iterator[tuple[str, Mutant]]:
    for name in ("heartbeat", "suspend", "release", "abandon", "lapse"):
        for guard in (FENCE, NONCE, RUNNING):
            yield f"{name} without {guard[0]}", {name: [guard]}
    for guard in (FENCE, NONCE, LEASE):
        yield f"commit_point without {guard[0]}", {"commit_point": [guard]}
    # Only what is running has a lease.
    yield "commit_point in any state", {"commit_point": [RUNNING, LEASE]}
    for name in ("complete", "complete_late"):
        for guard in (FENCE, NONCE, RUNNING if name == "complete" else COMPLETED):
            yield f"{name} without {guard[0]}", {name: [guard]}
    for name in ("resolve_done", "resolve_absent"):
        yield (
            f"{name} in any state",
            {name: [("AND (state = 'unknown' OR (", "AND (:key IS NOT NULL OR (")]},
        )
        yield f"{name} of a live run", {name: [("lease_until <= :clock OR", ":clock > 0 OR")]}
    yield "a fence that is given again", {"take_fences": [("fence + ?", "max(fence, ?)")]}
    yield (
        "a first claim of anything",
        {"put_new": [("INSERT INTO", "REPLACE INTO"), ("ON CONFLICT DO NOTHING", "")]},
    )
    clocks = (
        ("due <= :wall AND expires_at <= :wall", ":wall > 0"),
        ("lease_until <= :clock OR", ":clock > 0 OR"),
    )
    yield "a sweep at any time", {"due": list(clocks)}
    dead = "lease_until <= :clock - min(:after, due - started_at) OR"
    yield "a sweep of what lives", {"dead": [(dead, ":clock > :after OR")]}
    yield "a sweep of what may run again", {"dead": [("AND may_rerun IS NULL", "")]}
    yield "a sweep of what has done nothing", {"dead": [("AND committed = 1", "")]}
    yield "a sweep of what is unknown", {"due": [("AND state <> 'unknown'", ""), *clocks]}


def mutants_of_delivery() -> Iterator[tuple[str, Mutant]]:
    yield "deliver without deliverer", {"deliver": [("deliverer = :nonce", ":nonce IS NOT NULL")]}
    kept = "CASE :delivery WHEN 'undelivered' THEN likeness END"
    yield "deliver that keeps the likeness", {"deliver": [(kept, "likeness")]}
    yield "deliver that drops the likeness", {"deliver": [(kept, "NULL")]}
    yield "a search of another likeness", {"alike": [("likeness = ?", "likeness <> ?")]}
    end = "answer_at = CASE delivery WHEN 'pending' THEN :clock ELSE answer_at END"
    yield "complete without a time for the answer", {"complete": [(end, "answer_at = -1e9")]}


OF_DELIVERY = dict(mutants_of_delivery())
MUTANTS = dict(mutants()) | OF_DELIVERY


RARE = {f"commit_point without {LEASE[0]}", "a sweep of what has done nothing"}


@pytest.mark.parametrize("name", MUTANTS)
def test_model_notices_a_missing_guard(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for statement, changes in MUTANTS[name].items():
        text = SQL[statement]
        for before, after in changes:
            assert before in text
            text = text.replace(before, after)
        monkeypatch.setitem(SQL, statement, text)
    model = SqliteShop if name in OF_DELIVERY else SqliteWorld
    with pytest.raises((AssertionError, apsw.ConstraintError)):  # the table has its own guards
        searched(model, rare=name in RARE)
