"""The model of answers: calls without a key whose answers are written or lost."""

from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any, ClassVar

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)
from msgspec import structs

from tests.ledger.model import Clock, step
from wirecall.ledger.base import (
    Claim,
    Delivered,
    Keyless,
    Outcome,
    Record,
    RecordId,
    State,
    Token,
)
from wirecall.ledger.memory import MemoryLedger

LEASE = 10.0


WINDOW = 60.0


RETENTION = 10_000.0


LIKENESS = b"the same order.."


processes = st.integers(0, 1)


places = st.integers(0, 9)


class Sent(msgspec.Struct, eq=False):
    """A call in a process; once the ledger has found its record, that record's answer is pending."""

    order: int
    process: int
    claim: Claim
    is_answered: bool = False  # claim.id is the record
    ready_at: float | None = None  # when that had an outcome


class Run(msgspec.Struct, eq=False):
    """A handler at work."""

    process: int
    token: Token
    outcome: Outcome | None = None


class Shop(RuleBasedStateMachine):
    """The users, and what an omniscient observer counts."""

    make_ledger: ClassVar[Callable[..., Any]] = MemoryLedger

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.ledger = self.make_ledger(clock=self.clock, wall=self.clock)
        self.numbers = count(1)
        self.orders = 0
        self.lost: dict[int, float] = {}  # orders whose users have no answer, and since when
        self.sent: list[Sent] = []
        self.cut: list[Sent] = []  # calls whose streams may be resumed
        self.runs: list[Run] = []
        self.beside: list[set[str]] = [set(), set()]  # by process
        self.marks: list[tuple[int, Delivered]] = []  # of written answers, by process
        self.effects = 0
        self.got: Counter[RecordId] = Counter()  # users with the outcome of a record

    # --- users ------------------------------------------------------------------------------------

    @rule(process=processes)
    def place(self, process: int) -> None:
        self.orders += 1
        self.send(self.orders, process)

    @precondition(lambda self: self.lost)
    @rule(place=places, process=processes)
    def repeat(self, place: int, process: int) -> None:
        order = [*self.lost][place % len(self.lost)]
        self.send(order, process)

    def send(self, order: int, process: int) -> None:
        self.lost.pop(order, None)
        number = next(self.numbers)
        claim = Claim(
            id=RecordId("alice", "order", f"auto-{number}"),
            fingerprint=b"f",
            nonce=b"nonce %d" % number,
            lease=LEASE,
            retention=RETENTION,
            on_crash="unknown",
            keyless=Keyless(LIKENESS, WINDOW),
        )
        call = Sent(order, process, claim)
        self.sent.append(call)
        self.ask(call)

    def ask(self, call: Sent) -> Record:
        """Claim for a call: without a key until the ledger has found its record, then with its key."""
        if call.claim.keyless is not None:
            known = structs.replace(call.claim.keyless, beside=frozenset(self.beside[call.process]))
            call.claim = structs.replace(call.claim, keyless=known)
        record: Record = step(self.ledger.claim(call.claim))
        if not call.is_answered and record.deliverer == call.claim.nonce:
            call.is_answered = True
            call.claim = structs.replace(call.claim, id=record.id, keyless=None)
            self.beside[call.process].add(record.id.key)
            if record.state is State.RUNNING and record.nonce == call.claim.nonce:
                self.runs.append(Run(call.process, record.token))
        elif not call.is_answered:
            assert record.id.key not in self.beside[call.process], (
                "a call waits for an equal one of the same process"
            )
        if call.is_answered and record.state is not State.RUNNING and call.ready_at is None:
            call.ready_at = self.clock.now
        return record

    # --- processes --------------------------------------------------------------------------------

    @precondition(lambda self: self.runs)
    @rule(place=places)
    def work(self, place: int) -> None:
        """A handler has its effect; the next time, it is recorded."""
        run = self.runs[place % len(self.runs)]
        if run.outcome is None:
            self.effects += 1
            run.outcome = Outcome("result", b"%d" % self.effects, b"digest")
        else:
            self.runs.remove(run)
            assert step(self.ledger.complete(run.token, run.outcome, RETENTION))

    @precondition(lambda self: self.sent)
    @rule(place=places, is_written=st.booleans())
    def answer(self, place: int, is_written: bool) -> None:
        call = self.sent[place % len(self.sent)]
        self.ask(call)
        if not is_written:
            self.hang_up(call)
        elif call.ready_at is not None:
            self.write(call)

    def write(self, call: Sent) -> None:
        self.sent.remove(call)
        record = step(self.ledger.get(call.claim.id))
        # The user asks a person about one that is unknown.
        self.got[record.id] += record.state is State.DONE
        self.marks.append((call.process, Delivered(call.claim.id, call.claim.nonce, "written")))

    def hang_up(self, call: Sent) -> None:
        self.sent.remove(call)
        self.lost[call.order] = self.clock.now
        if call.is_answered:
            self.beside[call.process].discard(call.claim.id.key)
            step(self.ledger.deliver([Delivered(call.claim.id, call.claim.nonce, "undelivered")]))
            self.cut.append(call)

    @precondition(lambda self: self.cut)
    @rule(place=places)
    def resume(self, place: int) -> None:
        """A stream that was cut writes its answer later; but another call may have the answer by
        now.
        """
        call = self.cut.pop(place % len(self.cut))
        before = step(self.ledger.get(call.claim.id))
        if call.order not in self.lost or before.state is State.RUNNING:
            return
        step(self.ledger.deliver([Delivered(call.claim.id, call.claim.nonce, "written")]))
        if before.deliverer == call.claim.nonce:
            del self.lost[call.order]
            self.got[before.id] += before.state is State.DONE
        else:
            assert step(self.ledger.get(call.claim.id)) == before, (
                "a call ended the answer of another"
            )

    @rule()
    def mark(self) -> None:
        marks = self.marks
        self.marks = []
        step(self.ledger.deliver([mark for _, mark in marks]))
        for process, mark in marks:
            self.beside[process].discard(mark.id.key)

    @rule(process=processes)
    def die(self, process: int) -> None:
        """With its calls, handlers and memory; but not between the last byte of an answer and its
        mark: that looks lost.
        """
        self.mark()
        for call in [call for call in self.sent if call.process == process]:
            self.sent.remove(call)
            self.lost[call.order] = self.clock.now
        self.runs = [run for run in self.runs if run.process != process]
        self.beside[process] = set()

    @rule(seconds=st.sampled_from([1.0, LEASE / 2, LEASE - 1]))
    def wait(self, seconds: float) -> None:
        """Processes renew leases, and write and mark answers, within a lease; users repeat their
        calls within the window.
        """
        for call in [*self.sent]:
            self.ask(call)
            if call.ready_at is not None and call.ready_at + LEASE <= self.clock.now + seconds:
                self.write(call)
        self.mark()
        self.clock.now += seconds
        for run in self.runs:
            assert step(self.ledger.heartbeat(run.token, LEASE))
        for call in [*self.sent]:
            self.ask(call)
        for order, since in [*self.lost.items()]:
            if self.clock.now - since > WINDOW / 2:
                self.send(order, order % 2)

    # --- invariants -------------------------------------------------------------------------------

    @invariant()
    def there_are_not_more_effects_than_orders(self) -> None:
        assert self.effects <= self.orders, "a repetition took effect"

    @invariant()
    def an_effect_has_one_answer(self) -> None:
        assert max(self.got.values(), default=0) <= 1, "a new order got the answer of another"
