"""A model of workers, a clock and an operator around the memory ledger: a command takes effect
once.

Three workers claim two commands, one of them `unknown`, the other `rerun`. They pass commit points,
have effects, complete, release, suspend and abandon; they crash (their token is forgotten), pause
(others continue) and return late. The clock jumps, the sweep runs, an operator resolves unknown
outcomes, and strangers try tokens that are old, forged, or right at the wrong time.

The model is worth something only if it notices when a guard is missing. So every guard of every
transition is removed, one at a time, and the model has to notice.
"""

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any, TypeAlias
from unittest import mock

import msgspec
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    run_state_machine_as_test,
)
from msgspec import structs

from tests.ledger.model import ALLOWED, QUIET, World, searched
from tests.size import sized
from wirecall.ledger import memory
from wirecall.ledger.base import (
    Claim,
    Outcome,
    Record,
    RecordId,
    State,
    Token,
    Verdict,
    decide,
)
from wirecall.ledger.memory import MemoryLedger

# --- the model holds ------------------------------------------------------------------------------


def test_command_takes_effect_once_in_every_history_of_the_model() -> None:
    """P5, B2: over random histories; a failure is shrunk to the shortest one."""
    run_state_machine_as_test(
        World, settings=settings(QUIET, max_examples=sized(small=60, full=300))
    )


# --- and it notices -------------------------------------------------------------------------------

Decide: TypeAlias = Callable[..., Verdict]


class Mutant(msgspec.Struct, kw_only=True):
    """A ledger, or a worker, with one guard removed."""

    ledger: type[MemoryLedger] = MemoryLedger
    decide: Decide = decide
    reads_back: bool = True


def without(transition: str, guard: str) -> type[MemoryLedger]:
    """A ledger whose transition does not compare one part of the token, or the state."""

    def held(ledger: MemoryLedger, token: Token, *states: State) -> Any:
        row = ledger._rows.get(token.id)
        if row is None:
            return None
        compared = {
            "fence": row.fence == token.fence,
            "nonce": row.nonce == token.nonce,
            "state": row.state in states,
        }
        return row if all(fits for name, fits in compared.items() if name != guard) else None

    async def lax(self: MemoryLedger, token: Token, *args: Any) -> bool:
        with mock.patch.object(self, "_held", lambda *asked: held(self, *asked)):
            accepted: bool = await getattr(MemoryLedger, transition)(self, token, *args)
        return accepted

    return type("Mutant", (MemoryLedger,), {transition: lax})


def judging(**seen: Any) -> Decide:
    """A claim that sees the record differently from what it is."""

    def mutant(record: Record | None, claim: Claim, *, expired: bool) -> Verdict:
        fields = {"fingerprint": claim.fingerprint} if seen.get("fingerprint") else seen
        return decide(record and structs.replace(record, **fields), claim, expired=expired)

    return mutant


def never_expires(record: Record | None, claim: Claim, *, expired: bool) -> Verdict:
    return decide(record, claim, expired=False)


def always_continues(record: Record | None, claim: Claim, *, expired: bool) -> Verdict:
    return decide(record, structs.replace(claim, continues=True), expired=expired)


def runs_what_is(state: State) -> Decide:
    def mutant(record: Record | None, claim: Claim, *, expired: bool) -> Verdict:
        is_it = (
            record is not None and record.state is state and record.fingerprint == claim.fingerprint
        )
        return "take_over" if is_it else decide(record, claim, expired=expired)

    return mutant


class CommitsLate(MemoryLedger):
    async def commit_point(self, token: Token, lease: float) -> bool:
        row = self._held(token, State.RUNNING)
        if row is not None:
            row.lease_until = self._clock() + 1
        return await super().commit_point(token, lease)


class CommitsAnything(MemoryLedger):
    """Only a RUNNING record has a lease, so each guard covers for the other: here both are removed."""

    async def commit_point(self, token: Token, lease: float) -> bool:
        row = self._rows.get(token.id)
        if (
            row is None
            or (row.fence, row.nonce) != (token.fence, token.nonce)
            or row.state is State.RUNNING
        ):
            return await super().commit_point(token, lease)
        row.committed = True
        row.hold(self._clock(), lease)
        return True


class ForgetsCommitPoint(MemoryLedger):
    async def claim(self, claim: Claim) -> Record:
        if (
            (row := self._rows.get(claim.id))
            and row.lease_until <= self._clock()
            and claim.on_crash == "rerun"
        ):
            row.committed = False
        return await super().claim(claim)


class SweepsEverything(MemoryLedger):
    async def sweep(self, limit: int = 500) -> int:
        for row in self._rows.values():
            row.expires = self._clock()
        return await super().sweep(limit)


class ResolvesAnything(MemoryLedger):
    async def resolve(
        self,
        id: RecordId,
        outcome: Outcome | None,
        retention: float = 86_400,
        *,
        fence: int | None = None,
    ) -> bool:
        if row := self._rows.get(id):
            row.state = State.UNKNOWN
        return await super().resolve(id, outcome, retention, fence=fence)


class NumbersNobody(MemoryLedger):
    def __init__(self, **clocks: Any) -> None:
        super().__init__(**clocks)
        self._fences = repeat(1)  # type: ignore[assignment]


class KeepsNothing(MemoryLedger):
    """The record is removed when its lease ends."""

    async def claim(self, claim: Claim) -> Record:
        row = self._rows.get(claim.id)
        if row and row.state is State.RUNNING and row.lease_until <= self._clock():
            del self._rows[claim.id]
        return await super().claim(claim)


def mutants() -> Iterator[tuple[str, Mutant]]:
    for transition in ALLOWED:
        for guard in ("fence", "nonce", "state"):
            yield f"{transition} without {guard}", Mutant(ledger=without(transition, guard))
    yield "commit_point without lease", Mutant(ledger=CommitsLate)
    yield "commit_point without state", Mutant(ledger=CommitsAnything)
    yield "claim without fingerprint", Mutant(decide=judging(fingerprint=True))
    yield "claim without lease", Mutant(decide=judging(lease_left=0.0))
    yield "claim without commit point", Mutant(decide=judging(committed=False))
    yield "claim without end of attempts", Mutant(decide=judging(attempts=1))
    yield "claim without end of retention", Mutant(decide=never_expires)
    yield "claim without continuation", Mutant(decide=always_continues)
    for state in (State.DONE, State.UNKNOWN, State.TOMBSTONE):
        yield f"claim without state {state.value}", Mutant(decide=runs_what_is(state))
    yield "claim without read-back", Mutant(reads_back=False)
    yield "claim without memory of the commit point", Mutant(ledger=ForgetsCommitPoint)
    yield "claim without growing fence", Mutant(ledger=NumbersNobody)
    yield "claim without evidence", Mutant(ledger=KeepsNothing)
    yield "sweep without time", Mutant(ledger=SweepsEverything)
    yield "resolve without state", Mutant(ledger=ResolvesAnything)


MUTANTS = dict(mutants())
RARE = {"claim without continuation", "commit_point without lease"}


@pytest.mark.parametrize("name", MUTANTS)
def test_model_notices_a_missing_guard(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    monkeypatch.setattr(memory, "decide", mutant.decide)
    watched = type(
        "Watched", (World,), {"make_ledger": mutant.ledger, "reads_back": mutant.reads_back}
    )
    with pytest.raises(AssertionError):
        searched(watched, rare=name in RARE)
