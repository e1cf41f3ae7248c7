"""F1 and F2: real processes, killed at every step of a command, and the answers to their
successors.
"""

import os
import random
from collections.abc import Iterable, Iterator
from itertools import count, islice
from pathlib import Path

import pytest

from tests.crash.harness import (
    MATRIX,
    STEPS,
    Bench,
    Crew,
    Story,
    Trial,
    all_trials,
    random_trials,
    summary,
)
from tests.servers import DURABLE, Store
from tests.size import sized
from wirecall.server.method import OnCrash

SEED = int(os.environ.get("CRASH_SEED") or random.randrange(1 << 32))

durable = pytest.mark.parametrize("store", DURABLE, indirect=True)


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    crew = Crew(tmp_path_factory.mktemp("crew"), sized(small=3, full=8))
    yield crew
    crew.close()


@pytest.fixture
def bench(store: Store, tmp_path: Path) -> Bench:
    return Bench(store, tmp_path)


def tell(crew: Crew, bench: Bench, trials: Iterable[Trial]) -> list[Story]:
    return list(crew.run(trials, {bench.store.kind: bench}, f"k{SEED}"))


def check(stories: Iterable[Story], crew: Crew) -> None:
    wrong = [str(story) for story in stories if story.faults]
    assert not wrong, "\n".join([f"CRASH_SEED={SEED}", *wrong, crew.log.read_text()[-2000:]])


def test_kills_cover_every_step_in_every_mode() -> None:
    steps = {*STEPS} - {"anytime"}
    assert {step for step, _, _ in MATRIX} == steps
    # In four modes, with and without a commit point; but there is none to send without one, or
    # within a transaction.
    assert len(MATRIX) == 4 * 2 * len(steps) - 4 - 1
    assert sum(len(all_trials(kind, random.Random(SEED))) for kind in DURABLE) >= 200


@pytest.mark.long
@durable
def test_retry_gets_the_promised_answer(
    bench: Bench, crew: Crew, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(SEED)
    trials = all_trials(bench.store.kind, rng)
    trials = sized(small=rng.sample(trials, 16), full=trials)
    stories = tell(crew, bench, trials)
    with capsys.disabled():
        print(
            f"\nCRASH_SEED={SEED}\n{summary(stories, lambda story: (story.trial.ledger, story.trial.mode))}"
        )
    check(stories, crew)
    assert sum(story.kills for story in stories) == len(trials)


@durable
def test_retries_may_be_killed_too_or_come_together(bench: Bench, crew: Crew) -> None:
    check(
        tell(
            crew,
            bench,
            islice(
                random_trials((bench.store.kind,), random.Random(SEED)), sized(small=4, full=16)
            ),
        ),
        crew,
    )


@durable
def test_command_does_not_run_again_after_five_runs(bench: Bench, crew: Crew) -> None:
    trial = Trial(ledger=bench.store.kind, mode="rerun", point=False, steps=("effect_done",) * 5)
    (story,) = tell(crew, bench, [trial])
    assert (story.kills, story.answer, len(story.effects_again)) == (5, "unknown", 5), story


@pytest.mark.parametrize("mode", ["unknown", "rerun", "reconcile"])
def test_checker_finds_a_ledger_that_forgets(mode: OnCrash, tmp_path: Path, crew: Crew) -> None:
    numbers = count()

    class Forgetful(Bench):
        @property
        def url(self) -> str:
            return f"{self.store.url}{next(numbers)}"

    bench = Forgetful(Store("sqlite", f"sqlite:{tmp_path}/ledger"), tmp_path)
    trial = Trial(ledger="sqlite", mode=mode, point=False, steps=("completed",))
    (story,) = tell(crew, bench, [trial])
    assert "expected replayed/1" in story.faults
    assert "the next retry was told ran" in story.faults
    assert ("3 effects" in story.faults) == (mode != "rerun")
