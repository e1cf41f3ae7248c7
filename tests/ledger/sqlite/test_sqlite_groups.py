"""Transitions that the SQLite ledger commits together give the same records as one after the other
in the memory ledger, for every failure between the task and the disk.

Two processes take turns on one file. In a turn their tasks ask for any transitions, of any records,
with any tokens; some give up their claims. Then another process has the lock of the file, or the
disk is full in the middle of it. Refused transitions have not happened; all others have, in their
order, and each task gets its true answer.

The model is worth something only if it notices mistakes. So some are made, one at a time, and it
has to find them.
"""

import tempfile
import threading
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

import apsw
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from msgspec import Struct, structs

from tests.ledger.model import IDS, LEASE, ONCE, QUIET, RETENTION, Clock, searched
from tests.size import sized
from wirecall.ledger.base import (
    Claim,
    Delivered,
    Keyless,
    LedgerDown,
    Outcome,
    Record,
    RecordId,
    State,
    Token,
)
from wirecall.ledger.memory import MemoryLedger
from wirecall.ledger.sqlite import file as sqlite_file
from wirecall.ledger.sqlite import ledger as sqlite_ledger
from wirecall.ledger.sqlite import writer as sqlite_writer
from wirecall.ledger.sqlite.file import LedgerFile
from wirecall.ledger.sqlite.ledger import SqliteLedger
from wirecall.ledger.sqlite.writer import Job, Writer, nothing, take_fences


class ThreadlessWriter(Writer):
    """Does at the end of a turn what its thread would do; in `order` are the jobs of the turn."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.failure = None
        self.holder = None
        self.file = LedgerFile(path)
        self.file.db.pragma("synchronous", "off")  # the machine stays up
        self.stranger = self.file.connect()
        self.reader = self.file.reader.cursor()
        self.reading = threading.Lock()
        self.order: list[Job] = []
        self._cursor = self.file.db.cursor()
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._ringing = None
        self._asked = deque[Job]()
        self._waiting = deque[Job]()
        self._owed = deque[Job]()

    async def ask(self, job: Job) -> Any:
        self.order.append(job)
        self.send(job)
        await pause()
        if job.error is not None:
            raise job.error
        return job.result

    def end_turn(self) -> None:
        while self._asked or self._waiting:
            self._serve()

    def close(self) -> None:
        self.stranger.close()
        self.file.close()


@types.coroutine
def pause() -> Generator[None, None, None]:
    yield


class ThreadlessLedger(SqliteLedger):
    def __init__(self, path: str, **clocks: Callable[[], float]) -> None:
        super().__init__(path, **clocks)
        self.writer = ThreadlessWriter(path)

    def _running(self) -> Any:
        return self.writer


class Wish(Struct, frozen=True):
    """A transition that a task asks for: with one of the tokens that there are, where it needs one."""

    name: str
    id: RecordId
    token: int
    flag: bool  # of a claim: its caller gives it up; of others: with a wrong nonce
    continues: bool  # of an answer: that it is written

    def made(self, number: int, known: list[Delivered]) -> Claim:
        """The claim of the wish; without a key, some of the `known` answers are pending beside it."""
        keyless = None
        if self.name == "claim keyless":
            beside = {answer.id.key for answer in known[: self.token]}
            keyless = Keyless(
                b"likeness of a call" if number % 3 else None, 2 * LEASE, frozenset(beside)
            )
        return Claim(
            id=self.id if keyless is None else structs.replace(self.id, key=f"auto-{number}"),
            keyless=keyless,
            fingerprint=b"b" if number % 7 == 0 and keyless is None else b"a",
            nonce=b"nonce %d" % number,
            lease=LEASE,
            retention=RETENTION if number % 5 else RETENTION / 2,
            on_crash="unknown" if self.id == ONCE else "rerun",
            committed=number % 3 > 0,
            continues=self.continues,
        )


DONE = Outcome("result", b"payload", b"digest")
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "heartbeat": (LEASE,),
    "commit_point": (LEASE,),
    "complete": (DONE, RETENTION),
    "suspend": (DONE, RETENTION),
    "release": (),
    "abandon": (),
    "lapse": (),
    "resolve": (DONE, RETENTION),
    "sweep": (),
    "deliver": (),
}
RARELY = st.sampled_from([False, False, False, True])
names = st.sampled_from([*["claim", "claim keyless"] * 6, *["complete", "deliver"] * 3, *ARGUMENTS])
wishes = st.builds(Wish, names, st.sampled_from(IDS), st.integers(0, 9), RARELY, st.booleans())
troubles = st.sampled_from(["", "", "locked", "full once", "full twice", "full"])


class Asked(Struct):
    """The outcome of a wish; `error` means that it was refused.

    Without a job it was answered by a read.
    """

    wish: Wish
    claim: Claim | None
    tokens: tuple[Token, Token] | None  # in the memory ledger, and in the file
    ends: list[Delivered]
    coroutine: Coroutine[Any, Any, Any] | None = None
    job: Job | None = None
    result: Any = None
    error: Exception | None = None


class Groups(RuleBasedStateMachine):
    """Both ledgers, and the tokens that were given in each."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.folder = tempfile.TemporaryDirectory()
        path = str(Path(self.folder.name) / "ledger.db")
        clocks = {"clock": self.clock, "wall": self.clock}
        self.model = MemoryLedger(**clocks)
        self.processes = [ThreadlessLedger(path, **clocks) for _ in range(2)]
        self.tokens: list[tuple[Token, Token]] = []
        self.answers: list[Delivered] = []  # to calls without a key
        self.numbers = count(1)
        self.fence = 0

    def teardown(self) -> None:
        for ledger in self.processes:
            ledger.writer.close()
        self.folder.cleanup()

    @rule(seconds=st.sampled_from([1.0, LEASE, LEASE + 1, RETENTION, 8 * RETENTION, 7 * 86_400.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(
        which=st.integers(0, 1),
        wishes=st.lists(wishes, min_size=1, max_size=6),
        trouble=troubles,
        place=st.integers(0, 5),
    )
    def turn(self, which: int, wishes: list[Wish], trouble: str, place: int) -> None:
        ledger = self.processes[which]
        writer = ledger.writer
        writer.order.clear()
        asked = [self.ask(ledger, wish) for wish in wishes]
        if trouble == "locked":
            writer.stranger.execute("BEGIN IMMEDIATE")
        elif trouble:
            _disturb(asked[place % len(asked)], trouble)
        try:
            writer.end_turn()
            if trouble == "locked":
                writer.stranger.execute("ROLLBACK")
                writer.send(Job(nothing))  # abandoned claims are released with the next job
                writer.end_turn()
            assert not writer.file.db.in_transaction
            self.compare(asked, trouble)
        finally:
            for each in asked:
                if each.coroutine is not None:
                    each.coroutine.close()
            writer.end_turn()

    def ask(self, ledger: ThreadlessLedger, wish: Wish) -> Asked:
        """In the ledger in the file; the other one is asked once the order of the transitions is
        known.
        """
        claim = (
            wish.made(next(self.numbers), self.answers) if wish.name.startswith("claim") else None
        )
        tokens = self.tokens[wish.token % len(self.tokens)] if self.tokens else None
        delivery: Literal["written", "undelivered"] = "written" if wish.continues else "undelivered"
        ends = [structs.replace(end, delivery=delivery) for end in self.answers[wish.token :: 3]]
        asked = Asked(wish, claim, tokens, ends)
        asked.coroutine = self.called(ledger, asked, 1)
        if asked.coroutine is None:
            return asked
        try:
            asked.coroutine.send(None)
            asked.job = ledger.writer.order[-1]
        # A claim that a read has answered; nothing of this turn has happened yet.
        except StopIteration as ended:
            asked.result = ended.value
            asked.coroutine = None
            self.check(asked)
        if claim is not None and wish.flag and asked.coroutine is not None:
            asked.coroutine.close()
            asked.job = asked.coroutine = None
        return asked

    def called(self, ledger: Any, asked: Asked, which: int) -> Coroutine[Any, Any, Any] | None:
        wish = asked.wish
        if asked.claim is not None:
            return ledger.claim(asked.claim)  # type: ignore[no-any-return]
        arguments: tuple[Any, ...] = ARGUMENTS[wish.name]
        if wish.name == "resolve":
            arguments = (wish.id, *(arguments if wish.flag else (None,)))
        elif wish.name == "deliver":
            if not asked.ends:
                return None
            arguments = (
                [
                    structs.replace(end, deliverer=b"wrong") if wish.flag else end
                    for end in asked.ends
                ],
            )
        elif wish.name != "sweep":
            if asked.tokens is None:
                return None
            token = asked.tokens[which]
            arguments = (structs.replace(token, nonce=b"wrong") if wish.flag else token, *arguments)
        called: Coroutine[Any, Any, Any] = getattr(ledger, wish.name)(*arguments)
        return called

    def compare(self, asked: list[Asked], trouble: str) -> None:
        for each in asked:
            if each.coroutine is not None:
                try:
                    each.coroutine.send(None)
                except StopIteration as ended:
                    each.result = ended.value
                except LedgerDown as error:
                    each.error = error
        refused = [each for each in asked if each.error is not None]
        assert trouble == "locked" or len(refused) <= trouble.startswith("full"), (
            "one was too large, and others paid for it"
        )
        for each in asked:
            if each.job is not None and each.error is None:
                assert trouble != "locked", "it got an answer about a write that has not happened"
                self.check(each)

    def check(self, asked: Asked) -> None:
        expected = step(self.called(self.model, asked, 0))
        if asked.claim is None:
            assert asked.result == expected, asked.wish
            return
        assert _seen(asked.result) == _seen(expected), asked.wish
        if expected.deliverer == asked.claim.nonce:
            self.answers = [
                *self.answers[-5:],
                Delivered(expected.id, expected.deliverer, "written"),
            ]
        if expected.state is State.RUNNING and expected.nonce == asked.claim.nonce:
            assert asked.result.fence > self.fence, "a fence did not grow"
            self.fence = asked.result.fence
            self.tokens = [*self.tokens[-3:], (expected.token, asked.result.token)]

    @invariant()
    def both_ledgers_hold_the_same(self) -> None:
        expected = [_seen(record) for record in step(self.model.list())]
        for ledger in self.processes:
            assert [_seen(record) for record in step(ledger.list())] == expected


def _seen(record: Record) -> Record:
    """Fences grow in both, but by other steps."""
    return structs.replace(record, fence=0)


def _disturb(asked: Asked, trouble: str) -> None:
    """The disk is full when this one has been written, however small it is."""
    if asked.job is None:
        return
    work = asked.job.work
    tries = count(1)

    def disturbed(*args: Any) -> Any:
        done = work(*args)
        number = next(tries)
        if trouble == "full" or number < {"full once": 2, "full twice": 3}[trouble]:
            raise apsw.FullError("on purpose")
        return done

    asked.job.work = disturbed


def step(coroutine: Coroutine[Any, Any, Any] | None) -> Any:
    assert coroutine is not None
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("it waited")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "PATIENCE", 0.0)


def test_group_commit_gives_the_same_records_as_single_commits() -> None:
    """P5: in every order, with every fault."""
    run_state_machine_as_test(
        Groups,
        settings=settings(QUIET, max_examples=sized(small=20, full=60), stateful_step_count=25),
    )


# --- and the model notices ------------------------------------------------------------------------


def _reversed(writer: Writer, jobs: list[Job]) -> None:
    _commit(writer, jobs[::-1])


def _all_for_one(writer: Writer, jobs: list[Job]) -> None:
    _commit(writer, jobs)
    if any(job.error for job in jobs):
        for job in jobs:
            job.error = job.error or LedgerDown("all pay")


def _same_fence(db: apsw.Cursor, number: int) -> int:
    return max(0, take_fences(db, number) - 1)


def _with(name: str, before: str, after: str) -> dict[str, str]:
    """The statements, with a change in one of them."""
    assert before in sqlite_file.SQL[name]
    return {**sqlite_file.SQL, name: sqlite_file.SQL[name].replace(before, after)}


_commit = Writer._commit
_without_undo = {**sqlite_file.SQL, "rollback": "COMMIT"}
_keeps_the_time = ("answer_at = :clock", "answer_at = coalesce(answer_at, :clock)")

MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "a group in another order": (Writer, "_commit", _reversed),
    "a group that is not undone": (sqlite_writer, "SQL", _without_undo),
    "a fence that was given before": (sqlite_writer, "take_fences", _same_fence),
    "all pay for one": (Writer, "_commit", _all_for_one),
    "an end of what is written": (
        sqlite_ledger,
        "SQL",
        _with("deliver", "AND delivery IN ('pending', 'undelivered')", ""),
    ),
    "a loss that counts from the end of the command": (
        sqlite_ledger,
        "SQL",
        _with("deliver", *_keeps_the_time),
    ),
    "a lease that was never ended": (
        sqlite_ledger,
        "SQL",
        _with("lapse", "lease_until = :clock", "lease_until = 0"),
    ),
}


RARE = {
    "an end of what is written",
    "a loss that counts from the end of the command",
    "a lease that was never ended",
}


@pytest.mark.parametrize("name", MUTANTS)
def test_model_notices_a_mistake(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[name])
    with pytest.raises((AssertionError, apsw.Error, LedgerDown)):
        # The searches before it find none of the rarest mistake.
        searched(Groups, rare=name in RARE, first=14)
