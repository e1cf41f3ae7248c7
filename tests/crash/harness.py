"""Kill a process at a known moment, let new ones retry, and compare answers and effects with the
promise.

`EXPECTED` is the promise, written down from the design (commands.md) and not from runs. A trial is
one key: one or more processes that die over it, then retries, each in a separate process, until
there is a definite answer, then one more. The rules of the checker are E1 to E6 in docs/rules.md.

No test sleeps until a lease expires. Either the test ages it in the store, after a retry got "in
progress" (`aged`); or it is short and the retry waits for it, as every duplicate does that arrives
while the first still runs (`waited`).
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import count, pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, TypeAlias, get_args

import apsw
import msgspec
import psycopg
from msgspec import UNSET, Raw, Struct, UnsetType, structs

from tests.crash import child
from tests.crash.child import METHOD, Facts, Order, Step, read_effects
from tests.servers import TRANSACTIONAL, Store
from wirecall.ledger.base import RecordId
from wirecall.protocol.sender import ANONYMOUS
from wirecall.server.method import OnCrash

# The answer to a retry after a process was killed at a step, and how many effects the key has then.
# The columns say what the method declared; "point" means that its handler calls ctx.commit_point().
# Where that changes nothing, one column holds for both.
#
#   ran          the retry ran the handler, and answers with its result
#   reconciled   its reconcile function said Done, so it answers with that
#   replayed     it answers with the recorded result, marked as a replay
#   unknown      it answers with outcome_unknown
#   ~ before it  as long as the lease of the dead lasts, the answer is idempotency_key_in_progress
#   ~? before it perhaps
#
# There are two answers only where the store may or may not have got the last transition. (A
# completion may even reach a server after the retry got "in progress".)
EXPECTED = """
step            | unknown, point     | unknown           | rerun      | reconcile     | transactional
before_claim    | ran/1              | ran/1             | ran/1      | ran/1         | ran/1
claim_sent      | ~?ran/1            | ran/1, ~unknown/0 | ~?ran/1    | ~?ran/1       | ran/1
claimed         | ~ran/1             | ~unknown/0        | ~ran/1     | ~ran/1        | ran/1
commit_sent     | ~ran/1, ~unknown/0 | -                 | ~ran/1     | ~ran/1        | -
committed       | ~unknown/0         | ~unknown/0        | ~ran/1     | ~ran/1        | ran/1
effect_begun    | ~unknown/0         | ~unknown/0        | ~ran/1     | ~ran/1        | ran/1
effect_done     | ~unknown/1         | ~unknown/1        | ~ran/2     | ~reconciled/1 | ran/1
completion_sent | ~unknown/1, ~?replayed/1 | ~unknown/1, ~?replayed/1 \
                | ~ran/2, ~?replayed/1 | ~reconciled/1, ~?replayed/1 | ran/1, replayed/1
completed       | replayed/1         | replayed/1        | replayed/1 | replayed/1    | replayed/1
half_answered   | replayed/1         | replayed/1        | replayed/1 | replayed/1    | replayed/1
"""

# The fewest and the most effects of one key, whatever happens to it, and however often.
BOUNDS: dict[OnCrash, tuple[int, float]] = {
    "unknown": (0, 1),
    "reconcile": (0, 1),
    "transactional": (1, 1),
    "rerun": (1, float("inf")),
}

# The answer to one more retry after an answer.
AFTERWARDS = {
    "ran": "replayed",
    "reconciled": "replayed",
    "replayed": "replayed",
    "unknown": "unknown",
}

# Of the trials that age it, and of those that wait for it.
LEASE = 30.0
SHORT_LEASE = 1.0
# How long a duplicate waits in these two.
BRIEFLY = 0.05
LONG = 10.0
PATIENCE = 60.0  # for a definite answer

STEPS: tuple[Step, ...] = get_args(Step)

Cell: TypeAlias = tuple[Step, OnCrash, bool]
Matrix: TypeAlias = dict[Cell, frozenset[str]]


def read_matrix(table: str) -> Matrix:
    """Return a table by step, mode and commit point.

    `commit_sent` is only where a handler has such a point.
    """
    head, *rows = [
        [cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()
    ]
    matrix: Matrix = {}
    for step, *cells in rows:
        for column, cell in zip(head[1:], cells, strict=True):
            mode, _, point = column.partition(", ")
            points = [False, True]  # of this mode, the answers do not depend on it
            if point:
                points = [True]
            elif mode == "unknown":
                points = [False]
            for has_point in points:
                if cell != "-" and (has_point or step != "commit_sent"):
                    matrix[msgspec.convert((step, mode, has_point), Cell)] = frozenset(
                        _allowed(cell)
                    )
    return matrix


def _allowed(cell: str) -> Iterator[str]:
    for entry in cell.split(", "):
        yield from (entry[2:], f"~{entry[2:]}") if entry.startswith("~?") else (entry,)


def _anytime(matrix: Matrix) -> Matrix:
    """Killed at an unknown moment: everything that a kill at any of the steps may lead to."""
    kinds = {(mode, point) for _, mode, point in matrix}
    return {
        ("anytime", *kind): frozenset().union(*(matrix[c] for c in matrix if c[1:] == kind))
        for kind in kinds
    }


MATRIX = read_matrix(EXPECTED)
MATRIX_AND_CHANCE = MATRIX | _anytime(MATRIX)


# --- trials ---------------------------------------------------------------------------------------


class Trial(Struct, frozen=True, kw_only=True):
    """The events of one key."""

    ledger: str
    mode: OnCrash
    point: bool
    steps: tuple[Step, ...]  # where the first process dies, and the next one, ...
    rivals: int = 1  # so many retries at once
    by_parent: bool = False
    plain: bool = False
    lapse: Literal["aged", "waited"] = "aged"
    delay: float = 0.0
    turns: int = 2

    @property
    def is_leased(self) -> bool:
        return self.mode != "transactional"

    @property
    def is_foreseen(self) -> bool:
        """Whether it is known which retries get "in progress"."""
        return self.is_leased and self.lapse == "aged" and len(self.steps) == 1 and self.rivals == 1


def cells(ledger: str, matrix: Matrix = MATRIX) -> list[Cell]:
    return [cell for cell in matrix if cell[1] != "transactional" or ledger in TRANSACTIONAL]


def all_trials(ledger: str, rng: random.Random) -> list[Trial]:
    """Every cell of a ledger once; if the kill must come before an answer, once by each possible
    killer.
    """
    return [
        shaken(
            Trial(ledger=ledger, mode=mode, point=point, steps=(step,), by_parent=by_parent), rng
        )
        for step, mode, point in cells(ledger)
        for by_parent in ((False, True) if step.endswith("_sent") else (False,))
    ]


def random_trials(ledgers: Sequence[str], rng: random.Random) -> Iterator[Trial]:
    """Random cells, without end; now and then a retry is killed as well, or there are several at
    once.
    """
    while True:
        ledger = rng.choice(ledgers)
        step, mode, point = rng.choice(cells(ledger, MATRIX_AND_CHANCE))
        more = rng.choices(STEPS, k=rng.choice((0, 0, 0, 0, 1, 2)))
        steps = (step, *(each for each in more if (each, mode, point) in MATRIX_AND_CHANCE))
        rivals = rng.choice((1, 1, 1, 1, 3))
        by_parent = rng.random() < 0.5
        trial = Trial(
            ledger=ledger, mode=mode, point=point, steps=steps, rivals=rivals, by_parent=by_parent
        )
        yield shaken(trial, rng)


def shaken(trial: Trial, rng: random.Random) -> Trial:
    """The same trial, with random values for everything that must not matter."""
    may_be_plain = trial.is_leased or trial.ledger != "postgres"  # ctx.db has to be awaited there
    return structs.replace(
        trial,
        plain=rng.random() < 0.3 and may_be_plain,
        lapse="waited" if rng.random() < 0.2 else "aged",
        delay=rng.uniform(0, 0.08) if "anytime" in trial.steps else 2 ** rng.uniform(-17, -7),
        # The first few are before anything goes out.
        turns=rng.choice((1, 2, 4, int(2 ** rng.uniform(3, 11)))),
    )


# --- processes ------------------------------------------------------------------------------------


class End(Struct):
    """How a process ended, and what it said before."""

    exit: int = 0
    reply: bytes = b""
    facts: Facts | None = None

    @property
    def is_killed(self) -> bool:
        """Before it had answered."""
        return self.exit == -signal.SIGKILL and self.facts is None


class Workshop:
    """A fork server.

    Every process it forks ends, if need be by its own alarm, so this class needs no timeouts.
    """

    def __init__(self, log: Path) -> None:
        with open(log, "ab") as stderr:
            self._server = subprocess.Popen(
                [sys.executable, child.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )

    def run(self, order: Order, delay: float = 0.0) -> list[End]:
        """How the processes with the order ended.

        One that waits is killed so many seconds later.
        """
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(msgspec.json.encode(order) + b"\n")
        self._server.stdin.flush()
        ends: dict[int, End] = {}
        over = 0
        while over < order.rivals:
            pid, word, rest = _line(self._server.stdout.readline())
            over += word == "ended"
            if word == "sent":
                time.sleep(delay)
                with suppress(ProcessLookupError):  # it may have ended
                    os.kill(pid, signal.SIGKILL)
            elif word:
                _note(ends.setdefault(pid, End()), word, rest)
        return list(ends.values())

    def close(self) -> None:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()


def _line(line: bytes) -> tuple[int, str, bytes]:
    if not line:
        raise RuntimeError("the fork server ended")
    pid, _, rest = line.rstrip(b"\n").partition(b" ")
    word, _, rest = rest.partition(b" ")
    return int(pid or 0), word.decode(), rest


def _note(end: End, word: str, rest: bytes) -> None:
    if word == "ended":
        end.exit = int(rest)
    elif word == "facts":
        end.facts = msgspec.json.decode(rest, type=Facts)
    else:
        end.reply = rest


class Bench:
    """A ledger under test, and where the effects of its commands are."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self._folder = folder
        if store.kind in TRANSACTIONAL:
            self._ask("DROP TABLE IF EXISTS crash_effects")
            self._ask("CREATE TABLE crash_effects (key text, attempt integer, fence bigint)")

    @property
    def url(self) -> str:
        return self.store.url

    def log(self, key: str) -> str:
        """The file that stands for a foreign system: one for each key, so that it is quick to read."""
        return str(self._folder / key)

    def effects(self, trial: Trial, key: str) -> list[str]:
        if trial.is_leased:
            return read_effects(self.log(key))
        rows = self._ask(
            f"SELECT key, attempt, fence FROM crash_effects WHERE key = '{key}' ORDER BY fence"
        )
        return [" ".join(map(str, row)) for row in rows]

    def end_lease(self, key: str) -> None:
        self.store.age(RecordId(ANONYMOUS, METHOD, key), LEASE + 1)

    def _ask(self, statement: str) -> list[Any]:
        return (
            _ask_sqlite(self.url, statement)
            if self.store.kind == "sqlite"
            else _ask_postgres(self.url, statement)
        )


def _ask_sqlite(url: str, statement: str) -> list[Any]:
    """Not by Python's sqlite3:

    `age` uses apsw, and two copies of SQLite in one process release each other's locks.
    """
    with closing(apsw.Connection(url.removeprefix("sqlite:"))) as db:
        db.set_busy_timeout(int(PATIENCE * 1000))
        return db.execute(statement).fetchall()


def _ask_postgres(url: str, statement: str) -> list[Any]:
    with psycopg.connect(url) as db:
        found = db.execute(statement)
        return found.fetchall() if found.description else []


# --- one trial ------------------------------------------------------------------------------------


class Answer(Struct, frozen=True):
    """The answer to a retry: a word of the table above, or another that is not in it; and the bytes
    of the result.
    """

    word: str
    result: bytes | None = None


class Story(Struct):
    """The outcome of a trial."""

    trial: Trial
    key: str
    kills: int = 0
    told_to_wait: bool = False
    answers: list[Answer] = []
    effects: list[str] = []
    again: Answer | None = None
    effects_again: list[str] = []
    faults: list[str] = []

    @property
    def answer(self) -> str:
        """One word for all rivals: of those with the same outcome one made it, and the others
        received it.
        """
        words = {answer.word for answer in self.answers}
        return " and ".join(sorted(words - {"replayed"} or words))

    @property
    def told(self) -> str:
        return f"{'~' * self.told_to_wait}{self.answer}/{len(self.effects)}"

    def __str__(self) -> str:
        trial = self.trial
        ways = {"+point": trial.point, "plain": trial.plain, "by parent": trial.by_parent}
        shape = " ".join([*(way for way, is_so in ways.items() if is_so), trial.lapse])
        where = f"{trial.ledger} {trial.mode} {'>'.join(trial.steps)} {shape} x{trial.rivals} {self.key}"
        return f"{where}: {self.told}: {'; '.join(self.faults)}"


class Teller:
    """Runs a trial, and returns its story."""

    def __init__(self, trial: Trial, bench: Bench, workshop: Workshop, key: str) -> None:
        self._trial = trial
        self._workshop = workshop
        self._bench = bench
        self._ids = count(1)
        self._story = Story(trial, key)

    def tell(self) -> Story:
        story = self._story
        try:
            self._go_through(story)
            story.faults += faults_of(story)
        except Exception as error:  # the other trials continue
            story.faults.append(repr(error))
        return story

    def _go_through(self, story: Story) -> None:
        for step in self._trial.steps:
            if not story.answers:
                self._kill(step)
        if not story.answers:
            story.answers = self._until_definite(None, self._trial.rivals)
        story.effects = self._effects()
        (story.again,) = self._until_definite(None, 1)
        story.effects_again = self._effects()

    def _kill(self, step: Step) -> None:
        """Let a process die.

        A later one may be answered before that; then this returns the answer.
        """
        answers = self._until_definite(step, 1)
        if not answers:
            self._story.kills += 1
        elif self._story.kills == 0 and step != "anytime":
            self._story.faults.append(f"was not killed at {step}")
        self._story.answers = answers

    def _until_definite(self, step: Step | None, rivals: int) -> list[Answer]:
        """The answers to the processes; none, if they were killed."""
        deadline = time.monotonic() + PATIENCE
        told: list[Answer] = []
        while True:
            ends = self._workshop.run(self._order(step, rivals), self._trial.delay)
            if step and all(end.is_killed for end in ends):
                return []
            answers = [read_answer(end) for end in ends]
            told += [answer for answer in answers if answer.word != "in_progress"]
            if all(answer in told for answer in answers) or time.monotonic() > deadline:
                return told or answers
            self._story.told_to_wait = True
            if self._trial.is_leased and self._trial.lapse == "aged":
                self._bench.end_lease(self._story.key)

    def _order(self, step: Step | None, rivals: int) -> Order:
        trial = self._trial
        short = trial.lapse == "waited"
        return Order(
            url=self._bench.url,
            mode=trial.mode,
            key=self._story.key,
            id=next(self._ids) * 10,
            effects=self._bench.log(self._story.key),
            point=trial.point,
            plain=trial.plain,
            lease=SHORT_LEASE if short else LEASE,
            wait=LONG if short else BRIEFLY,
            die_at=step,
            by_parent=trial.by_parent,
            delay=trial.delay,
            turns=trial.turns,
            rivals=rivals,
        )

    def _effects(self) -> list[str]:
        return self._bench.effects(self._trial, self._story.key)


class Reply(Struct):
    result: Raw | UnsetType = UNSET
    error: dict[str, Any] | UnsetType = UNSET


_ERRORS = {
    (50910, "outcome_unknown", "unknown"): "unknown",
    (40910, "idempotency_key_in_progress", "unknown"): "in_progress",
}
_RESULTS = {(1, False): "ran", (0, True): "replayed", (0, False): "reconciled"}


def read_answer(end: End) -> Answer:
    # A kill that came after the answer.
    if end.facts is None or end.exit not in (0, -signal.SIGKILL):
        return Answer(f"process ended with {end.exit}")
    reply = msgspec.json.decode(end.reply, type=Reply)
    if reply.error is not UNSET:
        data = reply.error.get("data", {})
        error = reply.error["code"], data.get("type"), data.get("ran")
        return Answer(_ERRORS.get(error, f"error {error}"))
    assert reply.result is not UNSET
    word = _RESULTS.get((end.facts.ran, end.facts.replayed), f"confused {end.facts}")
    return Answer(word, bytes(reply.result))


# --- the checker ----------------------------------------------------------------------------------


def faults_of(story: Story) -> list[str]:
    return [
        fault
        for rule in (_bounds, _expected, _one_answer, _afterwards, _fences)
        for fault in rule(story)
    ]


def _bounds(story: Story) -> Iterator[str]:
    """E1, E6."""
    least, most = BOUNDS[story.trial.mode]
    if not least <= len(story.effects_again) <= most:
        yield f"{len(story.effects_again)} effects"


def _expected(story: Story) -> Iterator[str]:
    """The matrix.

    After several kills: what one of them alone may lead to; of `rerun`, whose effects add up, the
    word.
    """
    trial = story.trial
    allowed = set[str]().union(
        *(MATRIX_AND_CHANCE[step, trial.mode, trial.point] for step in trial.steps)
    )
    told = story.told
    if not trial.is_foreseen:
        allowed = {each.strip("~") for each in allowed}
        told = told.strip("~")
    if len(trial.steps) > 1 and trial.mode == "rerun":
        allowed = {each.partition("/")[0] for each in allowed}
        told = told.partition("/")[0]
    if told not in allowed:
        yield f"expected {' or '.join(sorted(allowed))}"


def _one_answer(story: Story) -> Iterator[str]:
    """E2, E3, E4: all results are the same bytes, and name an existing effect."""
    results = {
        answer.result
        for answer in (*story.answers, story.again)
        if answer and answer.result is not None
    }
    if len(results) > 1:
        yield f"different results: {results}"
    for result in results:
        if msgspec.json.decode(result, type=dict[str, str])["effect"] not in story.effects:
            yield f"the result {result!r} names an effect that is not in the log: {story.effects}"


def _afterwards(story: Story) -> Iterator[str]:
    again = story.again.word if story.again else "nothing"
    if again != AFTERWARDS.get(story.answer) and (story.answer, again) not in _late(story.trial):
        yield f"the next retry was told {again}"
    if story.effects_again != story.effects:
        yield f"the next retry had an effect: {story.effects_again}"


def _late(trial: Trial) -> list[tuple[str, str]]:
    """A completion that is in flight when its sender dies may arrive late: it turns UNKNOWN into
    DONE.
    """
    return (
        [("unknown", "replayed")]
        if {"completion_sent", "anytime"}.intersection(trial.steps)
        else []
    )


def _fences(story: Story) -> Iterator[str]:
    """Each run has a later attempt and a greater fence than the one before."""
    runs = [tuple(map(int, effect.split()[1:])) for effect in story.effects_again]
    if any(not (a[0] < b[0] and a[1] < b[1]) for a, b in pairwise(runs)):
        yield f"attempts and fences do not grow: {runs}"


# --- many trials ----------------------------------------------------------------------------------


class Crew:
    """Workshops that work side by side."""

    def __init__(self, folder: Path, size: int) -> None:
        self.log = folder / "stderr"
        self._workshops = [Workshop(self.log) for _ in range(size)]
        self._free: SimpleQueue[Workshop] = SimpleQueue()
        for workshop in self._workshops:
            self._free.put(workshop)

    def run(
        self, trials: Iterable[Trial], benches: Mapping[str, Bench], prefix: str
    ) -> Iterator[Story]:
        """The stories of the trials, in their order. Their keys are the prefix and a number."""

        def tell(trial: Trial, number: int) -> Story:
            workshop = self._free.get()
            try:
                return Teller(trial, benches[trial.ledger], workshop, f"{prefix}-{number}").tell()
            finally:
                self._free.put(workshop)

        waiting: deque[Future[Story]] = deque()
        with ThreadPoolExecutor(len(self._workshops)) as pool:
            for number, trial in enumerate(trials):
                waiting.append(pool.submit(tell, trial, number))
                if len(waiting) > 4 * len(self._workshops):
                    yield waiting.popleft().result()
            for last in waiting:
                yield last.result()

    def close(self) -> None:
        for workshop in self._workshops:
            workshop.close()


class Tally(Struct):
    """The outcomes of the trials in one row of the summary."""

    kills: int = 0
    effects: Counter[str] = msgspec.field(default_factory=Counter)
    answers: Counter[str] = msgspec.field(default_factory=Counter)
    faults: int = 0


def summary(stories: Iterable[Story], row: Callable[[Story], tuple[str, ...]]) -> str:
    """A table of kills, effects and answers. `row` names the row that a story belongs to."""
    tallies: dict[tuple[str, ...], Tally] = {}
    for story in stories:
        tally = tallies.setdefault(row(story), Tally())
        tally.kills += story.kills
        tally.effects["012"[min(len(story.effects), 2)]] += 1
        tally.answers[story.answer] += 1
        tally.faults += bool(story.faults)
    lines = [f"{'':46}{'kills':>6}  effects: {'0':>5}{'1':>6}{'2+':>6}  wrong  answers"]
    for name, tally in tallies.items():
        effects = "".join(f"{tally.effects[number]:6}" for number in "012")
        answers = ", ".join(f"{word} {number}" for word, number in sorted(tally.answers.items()))
        title = "".join(f"{part:16}" for part in name)
        lines.append(f"{title:46}{tally.kills:6}         {effects}{tally.faults:7}  {answers}")
    return "\n".join(lines)
