"""What is asked of the SQLite ledger in one turn and committed together comes to the same as one after the other in
the memory ledger; whatever goes wrong on the way to the disk.

Two processes take turns on one file. In a turn their tasks ask for any transitions, of any records, with any tokens; some
give up their claims. Then the disk is slow, or another process has the lock of the file, or the disk is full in the middle
of it, or Ctrl-C comes in the middle or when it is done. What is refused has not happened; everything else has, in its order,
and each is told what came of it.

The model is worth something only if it notices mistakes. So some are made, one at a time, and it has to find them.
"""

import tempfile
import threading
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from msgspec import Struct, structs

from tests.ledger.test_ledger_model import IDS, LEASE, ONCE, QUIET, RETENTION, Clock
from tests.size import sized
from wirecall import process
from wirecall.ledger.base import Claim, LedgerDown, Outcome, Record, RecordId, State, Token
from wirecall.ledger.memory import MemoryLedger
from wirecall.ledger.sqlite.commits import Commits
from wirecall.ledger.sqlite.file import Patience, connect, open_file
from wirecall.ledger.sqlite.jobs import Job, nothing, skip
from wirecall.ledger.sqlite.ledger import SqliteLedger
from wirecall.ledger.sqlite.rows import Fences, Row, Table
from wirecall.ledger.sqlite.turns import Turns
from wirecall.ledger.sqlite.writer import WRITES, Writer

LOOP: Any = "the loop"


class ThreadlessWriter(Writer):
    """Does at once what its thread would do; until then, another process may have the lock of the file."""

    def __init__(self, path: str, table: Table) -> None:
        patience = Patience()
        db = connect(path, patience)
        db.pragma("synchronous", "off")  # the machine stays up
        self.pid = process.pid
        self.lent, self.reading = threading.RLock(), threading.Lock()
        self.is_at_work = False
        self.commits = Commits(path, table, db, patience, nothing)
        self.stranger = connect(path)
        self._path = path
        self._asked, self._waiting, self._owed = deque[Job](), deque[Job](), deque[Job]()
        self._reader = connect(path).cursor()
        self.failure = None

    def send(self, jobs: list[Job]) -> None:
        self.unlock()
        self._waiting.extend(jobs)
        self.is_at_work = True
        while self._waiting:
            self._commit(self._take_writes() if self._waiting[0].kind in WRITES else [self._waiting.popleft()])
        self.is_at_work = False

    def unlock(self) -> None:
        if self.stranger.in_transaction:
            self.stranger.execute("ROLLBACK")

    def _deliver(self, jobs: list[Job]) -> None:
        pass

    def close(self) -> None:
        self.commits.close()
        self.stranger.close()
        self.reader.connection.close()


class ThreadlessTurns(Turns):
    """What is asked in a turn is kept until it ends; in `order` is what came of it, in the order in which it happened."""

    def __init__(self, path: str, table: Table) -> None:
        self.writer: ThreadlessWriter = ThreadlessWriter(path, table)
        self.path, self.table = path, table
        self._collected = {LOOP: []}
        self.order: list[Job] = []

    async def ask(self, job: Job, *, on_the_spot: bool = True) -> Any:
        self._collected[LOOP].append(job)
        await pause()
        return job.answer()

    def end(self) -> None:
        self.order = list(self._collected[LOOP])
        with suppress(KeyboardInterrupt):
            self._send_collected(LOOP)
        self._collected[LOOP] = []

    def _unanswered(self, jobs: list[Job]) -> list[Job]:
        left = super()._unanswered(jobs)
        self.order = [job for job in jobs if job not in left] + left
        return left


@types.coroutine
def pause() -> Generator[None, None, None]:
    yield


class ThreadlessLedger(SqliteLedger):
    def __init__(self, path: str, **clocks: Callable[[], float]) -> None:
        super().__init__(path, **clocks)
        self.turns = ThreadlessTurns(path, self._table)

    def _running(self) -> Any:
        return self.turns


class Wish(Struct, frozen=True):
    """A transition that a task asks for: with one of the tokens that there are, where it needs one."""

    name: str
    id: RecordId
    token: int
    flag: bool  # of a claim: its caller gives it up; of others: with a wrong nonce
    continues: bool

    def made(self, number: int) -> Claim:
        return Claim(
            id=self.id,
            fingerprint=b"b" if number % 7 == 0 else b"a",
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
}
RARELY = st.sampled_from([False, False, False, True])
names = st.sampled_from([*["claim"] * 8, *["complete"] * 3, *ARGUMENTS])
wishes = st.builds(Wish, names, st.sampled_from(IDS), st.integers(0, 9), RARELY, st.booleans())
troubles = st.sampled_from(["", "", "slow", "locked", "full once", "full twice", "full", "ctrl-c", "ctrl-c at the end"])


class Asked(Struct):
    """What came of a wish; `error` says that it was refused, and `order` when it happened."""

    wish: Wish
    claim: Claim | None
    tokens: tuple[Token, Token] | None  # in the memory ledger, and in the file
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
        self.keeper = open_file(path, Row._fields)
        clocks = {"clock": self.clock, "wall": self.clock}
        self.model = MemoryLedger(**clocks)
        self.processes = [ThreadlessLedger(path, **clocks) for _ in range(2)]
        self.tokens: list[tuple[Token, Token]] = []
        self.numbers = count(1)
        self.fence = 0

    def teardown(self) -> None:
        for ledger in self.processes:
            ledger.turns.writer.close()
        for connection in self.keeper[:2]:
            connection.close()
        self.folder.cleanup()

    @rule(seconds=st.sampled_from([1.0, LEASE, LEASE + 1, RETENTION, 8 * RETENTION, 7 * 86_400.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(
        which=st.integers(0, 1), wishes=st.lists(wishes, min_size=1, max_size=6), trouble=troubles, place=st.integers(0, 5)
    )
    def turn(self, which: int, wishes: list[Wish], trouble: str, place: int) -> None:
        ledger = self.processes[which]
        asked = [self.ask(ledger, wish) for wish in wishes]
        writer, commits = ledger.turns.writer, ledger.turns.writer.commits
        commits.pace = commits.last = 1.0 if trouble == "slow" else 0.0
        if trouble == "locked":
            writer.stranger.execute("BEGIN IMMEDIATE")
        elif trouble == "ctrl-c at the end":
            commits._db.set_wal_hook(_interrupted(writer))
        elif trouble and trouble != "slow":
            _disturb(asked[place % len(asked)], trouble, writer)
        try:
            ledger.turns.end()
            writer.unlock()
            commits._db.set_wal_hook(commits._count_pages)
            assert not commits._db.in_transaction and not commits._patience.is_over
            self.compare(ledger, asked, trouble)
        finally:
            for each in asked:
                if each.coroutine is not None:
                    each.coroutine.close()

    def ask(self, ledger: ThreadlessLedger, wish: Wish) -> Asked:
        """Of the ledger in the file; the other one is asked when it is known in which order things have happened."""
        claim = wish.made(next(self.numbers)) if wish.name == "claim" else None
        asked = Asked(wish, claim, self.tokens[wish.token % len(self.tokens)] if self.tokens else None)
        asked.coroutine = self.called(ledger, asked, 1)
        if asked.coroutine is not None:
            asked.coroutine.send(None)
            asked.job = ledger.turns._collected[LOOP][-1]
        if claim is not None and wish.flag:
            assert asked.coroutine is not None
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
        elif wish.name != "sweep":
            if asked.tokens is None:
                return None
            token = asked.tokens[which]
            arguments = (structs.replace(token, nonce=b"wrong") if wish.flag else token, *arguments)
        called: Coroutine[Any, Any, Any] = getattr(ledger, wish.name)(*arguments)
        return called

    def compare(self, ledger: ThreadlessLedger, asked: list[Asked], trouble: str) -> None:
        for each in asked:
            if each.coroutine is not None:
                try:
                    each.coroutine.send(None)
                except StopIteration as ended:
                    each.result = ended.value
                except LedgerDown as error:
                    each.error = error
        refused = [each for each in asked if each.error is not None]
        assert len(refused) <= trouble.startswith("full"), "one was too large, and others paid for it"
        told = {id(each.job): each for each in asked if each.job is not None and each.error is None}
        for job in ledger.turns.order:
            if id(job) in told:
                self.check(told[id(job)])

    def check(self, asked: Asked) -> None:
        expected = step(self.called(self.model, asked, 0))
        if asked.claim is None:
            assert asked.result == expected, asked.wish
            return
        assert _seen(asked.result) == _seen(expected), asked.wish
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


def _disturb(asked: Asked, trouble: str, writer: ThreadlessWriter) -> None:
    """The disk is full when this one has been written, however small it is; or Ctrl-C comes, which no thread hears of."""
    if asked.job is None:
        return
    work, tries = asked.job.work, count(1)

    def disturbed(*args: Any) -> Any:
        done, number = work(*args), next(tries)
        if trouble == "ctrl-c" and not writer.is_at_work:
            raise KeyboardInterrupt
        if trouble == "full" or (trouble == "full twice" and number < 3) or (trouble == "full once" and number < 2):
            raise apsw.FullError("on purpose")
        return done

    if asked.job.kind == "write" and asked.job.claim is None:
        asked.job.work = _in_a_transaction(disturbed)
    else:
        asked.job.work = disturbed


def _in_a_transaction(work: Callable[..., Any]) -> Callable[..., Any]:
    """What comes alone, and is disturbed after its statement, is undone as the statement would be."""

    def undone(db: apsw.Cursor, fences: Fences) -> Any:
        with db.connection:
            return work(db, fences)

    return undone


def _interrupted(writer: ThreadlessWriter) -> Callable[[apsw.Connection, str, int], int]:
    def count_pages(db: apsw.Connection, name: str, pages: int) -> int:
        writer.commits._count_pages(db, name, pages)
        if not writer.is_at_work:
            raise KeyboardInterrupt
        return apsw.SQLITE_OK

    return count_pages


def step(coroutine: Coroutine[Any, Any, Any] | None) -> Any:
    assert coroutine is not None
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("it waited")


def test_what_is_committed_together_comes_to_the_same_as_one_after_the_other() -> None:
    """P5: in every order, with every trouble."""
    run_state_machine_as_test(
        Groups, settings=settings(QUIET, max_examples=sized(small=20, full=60), stateful_step_count=25)
    )


# --- and the model notices -------------------------------------------------------------------------------------------


def _reversed(commits: Commits, jobs: list[Job]) -> None:
    _together(commits, jobs[::-1])


def _told_before_it_is_committed(commits: Commits, job: Job) -> Any:
    job.result, job.error = end = _attempt(commits, job)
    return end


def _all_for_one(writer: Writer, jobs: list[Job], error: Exception) -> None:
    for job in jobs:
        job.error = LedgerDown(str(error))


_together, _attempt = Commits.together, Commits._attempt

MUTANTS: dict[str, tuple[type, str, Any]] = {
    "a group in another order": (Commits, "together", _reversed),
    "told before it is committed": (Commits, "_attempt", _told_before_it_is_committed),
    "a commit that nobody noticed": (Commits, "_is_committed", property(lambda _: False, lambda *_: None)),
    "a group that is not undone": (Commits, "_undo", skip),
    "a fence of a block that is behind": (Fences, "begin", skip),
    "a fence that was undone": (Fences, "forget", skip),
    "what was given up is done": (Job, "cancel", skip),
    "all pay for one": (Writer, "_commit_each", _all_for_one),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_model_notices_a_mistake(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[name], raising=False)
    with pytest.raises((AssertionError, apsw.Error)):
        run_state_machine_as_test(Groups, settings=settings(QUIET, max_examples=500, phases=[Phase.generate]))
