"""A model of workers, a clock and an operator around the memory ledger: whatever they do, a command takes effect once.

Three workers claim two commands, one of them `unknown`, the other `rerun`. They pass commit points, have effects, complete,
release, suspend and abandon; they crash (their token is forgotten), pause (others go on) and come back late. The clock
jumps, the sweep comes by, an operator resolves what is unknown, and strangers try tokens that are old, forged, or right at
the wrong time.

The model is worth something only if it notices when a guard is missing. So every guard of every transition is taken out,
one at a time, and the model has to find that out.
"""

from collections.abc import Callable, Coroutine, Iterator
from itertools import count, repeat
from typing import Any, ClassVar, TypeAlias
from unittest import mock

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from msgspec import structs

from tests.size import sized
from wirecall.ledger import memory
from wirecall.ledger.base import (
    MAX_ATTEMPTS,
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

LEASE = 10.0
RETENTION = 100.0
ONCE = RecordId("", "unknown", "key")
AGAIN = RecordId("", "rerun", "key")
IDS = (ONCE, AGAIN)
WORKERS = 3

ALLOWED = {
    "heartbeat": (State.RUNNING,),
    "commit_point": (State.RUNNING,),
    "complete": (State.RUNNING, State.UNKNOWN),
    "suspend": (State.RUNNING,),
    "release": (State.RUNNING,),
    "abandon": (State.RUNNING,),
    "lapse": (State.RUNNING,),
}

ids = st.sampled_from(IDS)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Attempt(msgspec.Struct):
    """A worker at work: what it was granted, and how far it came."""

    token: Token
    fingerprint: bytes
    generation: int
    lease_until: float
    committed: bool
    effect: Outcome | None = None

    @property
    def id(self) -> RecordId:
        return self.token.id


class World(RuleBasedStateMachine):
    """The state that an omniscient observer keeps beside the ledger's own."""

    make_ledger: ClassVar[Callable[..., MemoryLedger]] = MemoryLedger
    reads_back: ClassVar[bool] = True  # a worker runs only what the ledger gave back with its own nonce

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.ledger = self.make_ledger(clock=self.clock, wall=self.clock)
        self.attempts: list[Attempt] = []  # what the workers are at
        self.tokens: list[Token] = []
        self.fences = dict.fromkeys(IDS, 0)
        self.numbers = count(1)
        self.generations = dict.fromkeys(IDS, 0)  # a record that was swept away makes room for a new command
        self.effects: dict[tuple[RecordId, int], list[Outcome]] = {}
        self.done: dict[RecordId, tuple[bytes, Outcome, float]] = {}

    # --- workers -----------------------------------------------------------------------------------------------------

    @rule(id=ids, fingerprint=st.sampled_from([b"a", b"a", b"b"]), careful=st.booleans(), goes_on=st.booleans())
    def claim(self, id: RecordId, fingerprint: bytes, careful: bool, goes_on: bool) -> None:
        if len(self.attempts) < WORKERS:
            self.ask(id, fingerprint, careful, goes_on)

    @rule(id=ids, times=st.integers(1, MAX_ATTEMPTS + 1))
    def claim_and_crash(self, id: RecordId, times: int) -> None:
        for _ in range(times):
            attempt = self.ask(id, b"a", careful=False)
            if attempt is not None:
                self.attempts.remove(attempt)
            self.clock.now += LEASE

    @rule(id=ids)
    def claim_and_complete(self, id: RecordId) -> None:
        attempt = self.ask(id, b"a", careful=True)
        if attempt is not None:
            self.pass_commit_point(attempt)
            self.take_effect(attempt)
            self.complete(attempt)

    @precondition(lambda self: self.attempts)
    @rule(
        worker=st.integers(0, WORKERS - 1),
        act=st.sampled_from(
            ["pass_commit_point", "take_effect", "complete", "heartbeat", "release", "suspend", "abandon", "lapse", "crash"]
        ),
    )
    def work(self, worker: int, act: str) -> None:
        attempt = self.attempts[worker % len(self.attempts)]
        if act in ("suspend", "abandon", "lapse"):
            self.step_back(attempt, act)
        elif act == "crash":
            self.attempts.remove(attempt)
        else:
            getattr(self, act)(attempt)

    def ask(self, id: RecordId, fingerprint: bytes, careful: bool, goes_on: bool = False) -> Attempt | None:
        """A claim. The attempt, if the worker was granted the command; or believes so."""
        before = self.look(id)
        claim = Claim(
            id=id,
            fingerprint=fingerprint,
            nonce=b"nonce %d" % next(self.numbers),
            lease=LEASE,
            retention=RETENTION,
            on_crash="unknown" if id == ONCE else "rerun",
            committed=not careful,
            continues=goes_on,
        )
        record = step(self.ledger.claim(claim))
        if before is not None and before.fingerprint != fingerprint:
            assert record == before == self.look(id), "other params changed a record"
        if (record.state is State.RUNNING and record.nonce == claim.nonce) or not self.reads_back:
            return self.begin(claim, record, before)
        self.hear(claim, record)
        return None

    def begin(self, claim: Claim, record: Record, before: Record | None) -> Attempt:
        id = claim.id
        assert record.fingerprint == claim.fingerprint
        assert record.fence > self.fences[id], "a fence did not grow"
        assert record.lease_left == LEASE
        if before is not None:
            assert before.fingerprint == claim.fingerprint, "other params ran"
            assert before.state in (State.RUNNING, State.WAITING), "what had ended ran again"
            assert before.state is State.RUNNING or claim.continues, "a call that waits for input went on without"
            assert before.lease_left == 0, "a live holder was taken over"
            assert record.committed or not before.committed, "a commit point was forgotten"
            if before.state is State.RUNNING and before.committed:
                assert id == AGAIN, "an unknown command ran again after its commit point"
                assert record.attempts <= MAX_ATTEMPTS
        self.fences[id] = record.fence
        self.tokens = [*self.tokens[-4:], record.token]
        token = Token(id, record.fence, claim.nonce)
        lease_until = self.clock.now + LEASE
        attempt = Attempt(token, claim.fingerprint, self.generations[id], lease_until, claim.committed)
        self.attempts.append(attempt)
        return attempt

    def hear(self, claim: Claim, record: Record) -> None:
        """The worker got the state of the command, and passes it on to its caller."""
        if record.fingerprint == claim.fingerprint and record.state is State.DONE:
            fingerprint, outcome, until = self.done[record.id]
            assert (record.fingerprint, record.outcome) == (fingerprint, outcome), "an answer was not the recorded one"
            assert self.clock.now < until, "an answer came after its retention"

    def pass_commit_point(self, attempt: Attempt) -> None:
        if attempt.committed:
            return
        holds = self.holds(attempt.token, "commit_point") and attempt.lease_until > self.clock.now
        accepted = step(self.ledger.commit_point(attempt.token, LEASE))
        assert accepted == holds, "a commit point after the lease, or none within it"
        if accepted:
            attempt.committed = True
            attempt.lease_until = self.clock.now + LEASE
        else:
            self.attempts.remove(attempt)

    def take_effect(self, attempt: Attempt) -> None:
        if attempt.committed and attempt.effect is None:
            payload = b"%b by %b" % (attempt.fingerprint, attempt.token.nonce)
            attempt.effect = Outcome("result", payload, b"digest of " + payload)
            self.effects.setdefault((attempt.id, attempt.generation), []).append(attempt.effect)

    def complete(self, attempt: Attempt) -> None:
        """In time or late."""
        if attempt.effect is None:
            return
        holds = self.holds(attempt.token, "complete")
        accepted = step(self.ledger.complete(attempt.token, attempt.effect, RETENTION))
        assert accepted == holds
        if accepted:
            self.record(attempt.id, attempt.fingerprint, attempt.effect)
        self.attempts.remove(attempt)

    def heartbeat(self, attempt: Attempt) -> None:
        holds = self.holds(attempt.token, "heartbeat")
        assert step(self.ledger.heartbeat(attempt.token, LEASE)) == holds
        if holds:
            attempt.lease_until = self.clock.now + LEASE

    def release(self, attempt: Attempt) -> None:
        """Only by a holder that has done nothing."""
        if attempt.effect is None:
            holds = self.holds(attempt.token, "release")
            assert step(self.ledger.release(attempt.token)) == holds
            assert not holds or self.look(attempt.id) is None
            self.attempts.remove(attempt)

    def step_back(self, attempt: Attempt, how: str) -> None:
        """The worker stops, and says so: it needs input, or does not know how far it came."""
        if how == "suspend" and attempt.effect is not None:
            return
        holds = self.holds(attempt.token, how)
        assert self.try_token(how, attempt.token) == holds
        self.attempts.remove(attempt)

    # --- the rest of the world ---------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1.0, LEASE / 2, LEASE, LEASE + 1, RETENTION, 8 * RETENTION, 7 * 86_400.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(limit=st.integers(1, 3))
    def sweep(self, limit: int) -> None:
        before = {id: self.look(id) for id in IDS}
        changed = step(self.ledger.sweep(limit))
        after = {id: self.look(id) for id in IDS}
        differing = [id for id in IDS if after[id] != before[id]]
        assert changed == len(differing) <= limit
        for id in differing:
            self.check_swept(id, before[id], after[id])

    def check_swept(self, id: RecordId, before: Record | None, after: Record | None) -> None:
        assert before is not None and before.lease_left == 0, "the sweep touched a live lease"
        if after is None:
            did_nothing = before.state is State.WAITING or (before.state is State.RUNNING and not before.committed)
            assert did_nothing or before.state is State.TOMBSTONE, "evidence was swept away"
            if before.state is State.TOMBSTONE:
                self.generations[id] += 1
                self.done.pop(id, None)
        elif before.state is State.DONE:
            assert after.state is State.TOMBSTONE
        else:
            assert before.state is State.RUNNING
            assert after.state is State.UNKNOWN

    @rule(id=ids)
    def resolve(self, id: RecordId) -> None:
        """An operator finds out the truth, once no worker is busy any more."""
        before = self.look(id)
        had = self.effects.get((id, self.generations[id]), [])
        if before is None or before.state is not State.UNKNOWN:
            assert not step(self.ledger.resolve(id, Outcome("result", b"guess", b"")))
            assert not step(self.ledger.resolve(id, None))
            assert self.look(id) == before
        elif had:
            assert step(self.ledger.resolve(id, had[-1], RETENTION))
            self.record(id, before.fingerprint, had[-1])
        elif all(attempt.id != id for attempt in self.attempts):
            assert step(self.ledger.resolve(id, None))
            assert self.look(id) is None

    @invariant()
    def strangers_are_refused(self) -> None:
        """With tokens that are right but for the fence or the nonce, or right at the wrong moment, or old."""
        for id in IDS:
            before = self.look(id)
            tokens = [token for token in self.tokens if token.id == id]
            if before is not None:
                forged = [Token(id, before.fence + 1, before.nonce), Token(id, before.fence, b"forged")]
                tokens = [before.token, *forged, *tokens]
            for token in tokens:
                is_current = before is not None and before.token == token
                for transition, states in ALLOWED.items():
                    if is_current and before is not None and before.state in states:
                        continue
                    assert not self.try_token(transition, token), f"{transition} was accepted from a stranger"
            assert self.look(id) == before, "what was refused took place"

    # --- what must hold at every moment ------------------------------------------------------------------------------

    @invariant()
    def a_live_holder_has_its_record(self) -> None:
        live = [attempt for attempt in self.attempts if attempt.lease_until > self.clock.now]
        assert len({attempt.id for attempt in live}) == len(live), "two live holders"
        for attempt in live:
            record = self.look(attempt.id)
            assert record is not None and record.token == attempt.token, "a live holder lost its record"
            assert record.state is State.RUNNING
            assert record.lease_left == attempt.lease_until - self.clock.now

    @invariant()
    def an_unknown_command_takes_effect_at_most_once(self) -> None:
        for (id, _), effects in self.effects.items():
            assert id != ONCE or len(effects) <= 1, "two effects"

    @invariant()
    def what_is_done_stays_as_it_was_recorded(self) -> None:
        for id, (fingerprint, outcome, _) in self.done.items():
            record = self.look(id)
            assert record is not None, "what was done is forgotten"
            kept = outcome if record.state is State.DONE else structs.replace(outcome, payload=None)
            assert record.state in (State.DONE, State.TOMBSTONE)
            assert (record.fingerprint, record.outcome) == (fingerprint, kept), "a recorded outcome changed"

    @invariant()
    def a_recorded_outcome_is_that_of_an_effect(self) -> None:
        for id, (_, outcome, _) in self.done.items():
            assert outcome in self.effects[id, self.generations[id]]

    # --- the observer's means ----------------------------------------------------------------------------------------

    def look(self, id: RecordId) -> Record | None:
        record: Record | None = step(self.ledger.get(id))
        return record

    def holds(self, token: Token, transition: str) -> bool:
        record = self.look(token.id)
        return record is not None and record.token == token and record.state in ALLOWED[transition]

    def record(self, id: RecordId, fingerprint: bytes, outcome: Outcome) -> None:
        assert id not in self.done, "what was done was recorded again"
        self.done[id] = (fingerprint, outcome, self.clock.now + RETENTION)

    def try_token(self, transition: str, token: Token) -> bool:
        outcome = Outcome("result", b"intruder", b"")
        more: dict[str, tuple[Any, ...]] = {
            "heartbeat": (LEASE,),
            "commit_point": (LEASE,),
            "complete": (outcome, RETENTION),
            "suspend": (outcome, RETENTION),
        }
        accepted: bool = step(getattr(self.ledger, transition)(token, *more.get(transition, ())))
        return accepted


def step(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Nothing in the memory ledger waits."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("it waited")


# --- the model holds -------------------------------------------------------------------------------------------------

QUIET = settings(
    database=None,
    deadline=None,
    derandomize=True,
    print_blob=False,
    report_multiple_bugs=False,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)


def test_whatever_workers_clock_sweep_and_operator_do_a_command_takes_effect_once() -> None:
    """P5, B2: over random histories; a failure is shrunk to the shortest one."""
    run_state_machine_as_test(World, settings=settings(QUIET, max_examples=sized(small=60, full=300)))


# --- and it notices --------------------------------------------------------------------------------------------------

Decide: TypeAlias = Callable[..., Verdict]


class Mutant(msgspec.Struct, kw_only=True):
    """A ledger, or a worker, with one guard taken out."""

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
    """A claim that sees the record otherwise than it is."""

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
        is_it = record is not None and record.state is state and record.fingerprint == claim.fingerprint
        return "take_over" if is_it else decide(record, claim, expired=expired)

    return mutant


class CommitsLate(MemoryLedger):
    async def commit_point(self, token: Token, lease: float) -> bool:
        row = self._held(token, State.RUNNING)
        if row is not None:
            row.lease_until = self._clock() + 1
        return await super().commit_point(token, lease)


class CommitsAnything(MemoryLedger):
    """Only a RUNNING record has a lease, so the one guard stands in for the other: here both are gone."""

    async def commit_point(self, token: Token, lease: float) -> bool:
        row = self._rows.get(token.id)
        if row is None or (row.fence, row.nonce) != (token.fence, token.nonce) or row.state is State.RUNNING:
            return await super().commit_point(token, lease)
        row.committed = True
        row.hold(self._clock(), lease)
        return True


class ForgetsCommitPoint(MemoryLedger):
    async def claim(self, claim: Claim) -> Record:
        if (row := self._rows.get(claim.id)) and row.lease_until <= self._clock() and claim.on_crash == "rerun":
            row.committed = False
        return await super().claim(claim)


class SweepsEverything(MemoryLedger):
    async def sweep(self, limit: int = 500) -> int:
        for row in self._rows.values():
            row.expires = self._clock()
        return await super().sweep(limit)


class ResolvesAnything(MemoryLedger):
    async def resolve(self, id: RecordId, outcome: Outcome | None, retention: float = 86_400) -> bool:
        if row := self._rows.get(id):
            row.state = State.UNKNOWN
        return await super().resolve(id, outcome, retention)


class NumbersNobody(MemoryLedger):
    def __init__(self, **clocks: Any) -> None:
        super().__init__(**clocks)
        self._fences = repeat(1)  # type: ignore[assignment]


class KeepsNothing(MemoryLedger):
    """The record goes when its lease does."""

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


def searched(model: type[RuleBasedStateMachine], *, rare: bool, first: int = 0) -> None:
    """Run a model until it notices something. A search begins with short histories; what they rarely show is found sooner
    by many searches, each of which comes to long histories at once; `first` is the seed of the first of them."""
    if not rare:
        run_state_machine_as_test(model, settings=settings(QUIET, max_examples=2000, phases=[Phase.generate]))
    for number in range(first, first + 200):
        again = seed(number)(type("Again", (model,), {}))
        run_state_machine_as_test(again, settings=settings(QUIET, max_examples=10, phases=[Phase.generate]))


@pytest.mark.parametrize("name", MUTANTS)
def test_the_model_notices_a_missing_guard(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    monkeypatch.setattr(memory, "decide", mutant.decide)
    watched = type("Watched", (World,), {"make_ledger": mutant.ledger, "reads_back": mutant.reads_back})
    with pytest.raises(AssertionError):
        searched(watched, rare=name in RARE)
