"""The model of a ledger: a world in which claims, clocks and crashes come in any order."""

from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, ClassVar

import msgspec
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec import structs

from wirecall.ledger.base import (
    MAX_ATTEMPTS,
    Claim,
    Outcome,
    Record,
    RecordId,
    State,
    Token,
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
    """A worker at work: its grant, and its progress."""

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
    # A worker runs only what the ledger gave back with its own nonce.
    reads_back: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.ledger = self.make_ledger(clock=self.clock, wall=self.clock)
        self.attempts: list[Attempt] = []  # of the workers
        self.tokens: list[Token] = []
        self.fences = dict.fromkeys(IDS, 0)
        self.numbers = count(1)
        # A record that was swept away makes room for a new command.
        self.generations = dict.fromkeys(IDS, 0)
        self.effects: dict[tuple[RecordId, int], list[Outcome]] = {}
        self.done: dict[RecordId, tuple[bytes, Outcome, float]] = {}

    # --- workers ----------------------------------------------------------------------------------

    @rule(
        id=ids,
        fingerprint=st.sampled_from([b"a", b"a", b"b"]),
        careful=st.booleans(),
        goes_on=st.booleans(),
    )
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
            [
                "pass_commit_point",
                "take_effect",
                "complete",
                "heartbeat",
                "release",
                "suspend",
                "abandon",
                "lapse",
                "crash",
            ]
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

    def ask(
        self, id: RecordId, fingerprint: bytes, careful: bool, goes_on: bool = False
    ) -> Attempt | None:
        """A claim. Return the attempt if the worker was granted the command, or believes so."""
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
            assert before.state is State.RUNNING or claim.continues, (
                "a call that waits for input continued without it"
            )
            assert before.lease_left == 0, "a live holder was taken over"
            assert record.committed or not before.committed, "a commit point was forgotten"
            if before.state is State.RUNNING and before.committed:
                assert id == AGAIN, "an unknown command ran again after its commit point"
                assert record.attempts <= MAX_ATTEMPTS
        self.fences[id] = record.fence
        self.tokens = [*self.tokens[-4:], record.token]
        token = Token(id, record.fence, claim.nonce)
        lease_until = self.clock.now + LEASE
        attempt = Attempt(
            token, claim.fingerprint, self.generations[id], lease_until, claim.committed
        )
        self.attempts.append(attempt)
        return attempt

    def hear(self, claim: Claim, record: Record) -> None:
        """The worker got the state of the command, and passes it on to its caller."""
        if record.fingerprint == claim.fingerprint and record.state is State.DONE:
            fingerprint, outcome, until = self.done[record.id]
            assert (record.fingerprint, record.outcome) == (fingerprint, outcome), (
                "an answer was not the recorded one"
            )
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

    # --- the rest of the world --------------------------------------------------------------------

    @rule(
        seconds=st.sampled_from(
            [1.0, LEASE / 2, LEASE, LEASE + 1, RETENTION, 8 * RETENTION, 7 * 86_400.0]
        )
    )
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
            did_nothing = before.state is State.WAITING or (
                before.state is State.RUNNING and not before.committed
            )
            assert did_nothing or before.state is State.TOMBSTONE, "evidence was swept away"
            if before.state is State.TOMBSTONE:
                self.generations[id] += 1
                self.done.pop(id, None)
        elif before.state is State.DONE:
            assert after.state is State.TOMBSTONE
        else:
            assert before.state is State.RUNNING
            assert after.state is State.UNKNOWN
            assert before.committed, "a run that has done nothing became unknown"
            is_over = self.clock.now >= before.started_at + RETENTION
            assert id == ONCE or is_over, (
                "a command that may run again became unknown before its retention was over"
            )

    @rule(id=ids)
    def resolve(self, id: RecordId) -> None:
        """An operator finds out the truth, once all workers are idle."""
        before = self.look(id)
        had = self.effects.get((id, self.generations[id]), [])
        if before is None or before.standing is not State.UNKNOWN:
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
        """With tokens that are right but for the fence or the nonce, or right at the wrong moment,
        or old.
        """
        for id in IDS:
            before = self.look(id)
            tokens = [token for token in self.tokens if token.id == id]
            if before is not None:
                forged = [
                    Token(id, before.fence + 1, before.nonce),
                    Token(id, before.fence, b"forged"),
                ]
                tokens = [before.token, *forged, *tokens]
            for token in tokens:
                is_current = before is not None and before.token == token
                for transition, states in ALLOWED.items():
                    if is_current and before is not None and before.state in states:
                        continue
                    assert not self.try_token(transition, token), (
                        f"{transition} was accepted from a stranger"
                    )
            assert self.look(id) == before, "what was refused took place"

    # --- invariants -------------------------------------------------------------------------------

    @invariant()
    def a_live_holder_has_its_record(self) -> None:
        live = [attempt for attempt in self.attempts if attempt.lease_until > self.clock.now]
        assert len({attempt.id for attempt in live}) == len(live), "two live holders"
        for attempt in live:
            record = self.look(attempt.id)
            assert record is not None and record.token == attempt.token, (
                "a live holder lost its record"
            )
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
            assert (record.fingerprint, record.outcome) == (fingerprint, kept), (
                "a recorded outcome changed"
            )

    @invariant()
    def a_recorded_outcome_is_that_of_an_effect(self) -> None:
        for id, (_, outcome, _) in self.done.items():
            assert outcome in self.effects[id, self.generations[id]]

    # --- the observer's tools ---------------------------------------------------------------------

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


QUIET = settings(
    database=None,
    deadline=None,
    derandomize=True,
    print_blob=False,
    report_multiple_bugs=False,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)


def searched(model: type[RuleBasedStateMachine], *, rare: bool, first: int = 0) -> None:
    """Run a model until it notices something.

    A search begins with short histories; what they rarely show is found sooner by many searches,
    each of which comes to long histories at once; `first` is the seed of the first of them.
    """
    if not rare:
        run_state_machine_as_test(
            model, settings=settings(QUIET, max_examples=2000, phases=[Phase.generate])
        )
    for number in range(first, first + 200):
        again = seed(number)(type("Again", (model,), {}))
        run_state_machine_as_test(
            again, settings=settings(QUIET, max_examples=10, phases=[Phase.generate])
        )
