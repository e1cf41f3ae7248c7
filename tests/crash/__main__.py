"""The long run: `python -m tests.crash --kills 10000 --seed 1 --ledger all`.

Random cells of the matrix, kills at random moments, retries that are killed as well, retries that
compete; all from one seed. Ends with a table, and with code 1 if any answer or any number of
effects was wrong.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path
from typing import Any

from tests.crash.harness import STEPS, Bench, Crew, Story, Trial, random_trials, summary
from tests.servers import DURABLE, Postgres, Redis, RedisCluster, make_store

SERVERS = {"redis_server": Redis, "cluster_server": RedisCluster, "postgres_server": Postgres}


def main() -> int:
    options = _options()
    # So that the servers end in this case too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    ledgers = DURABLE if options.ledger == "all" else (options.ledger,)
    print(f"seed {options.seed}, {options.kills} kills, ledgers: {', '.join(ledgers)}", flush=True)
    run = Run(options.kills, options.seconds)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wirecall-crash-")))
        benches = {kind: _bench(kind, folder / kind, stack) for kind in ledgers}
        crew = Crew(folder, options.workers)
        stack.callback(crew.close)
        trials = takewhile(run.goes_on, random_trials(ledgers, random.Random(options.seed)))
        for story in crew.run(trials, benches, f"k{options.seed}"):
            run.note(story)
        log = crew.log.read_text()
    return _report(run, log)


class Run:
    """The stories so far, and whether the run continues."""

    def __init__(self, kills: int, seconds: float) -> None:
        self._most = kills
        self._seconds = seconds
        self._began = self._shown = time.monotonic()
        self.stories: list[Story] = []
        self.wrong: list[Story] = []
        self.kills = 0

    def goes_on(self, _: Trial) -> bool:
        return self.kills < self._most and self.seconds < self._seconds

    def note(self, story: Story) -> None:
        self.stories.append(story)
        self.kills += story.kills
        if story.faults:
            self.wrong.append(story)
            print(f"\n{story}", file=sys.stderr)
        if time.monotonic() > self._shown + 1:
            self._shown = time.monotonic()
            print(f"\r{self}", end=" ", file=sys.stderr, flush=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def __str__(self) -> str:
        return f"{self.kills} kills, {len(self.stories)} keys, {len(self.wrong)} wrong, {self.seconds:.0f} s"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tests.crash", description="Kill processes, and check their successors."
    )
    parser.add_argument("--kills", type=int, default=10_000, help="how many, about")
    parser.add_argument(
        "--seed", type=int, default=random.randrange(1 << 32), help="repeats the choices of a run"
    )
    parser.add_argument("--ledger", choices=(*DURABLE, "cluster", "all"), default="all")
    parser.add_argument("--workers", type=int, default=8, help="keys at a time")
    parser.add_argument("--seconds", type=float, default=3600, help="begin nothing new after that")
    return parser.parse_args()


def _bench(kind: str, folder: Path, stack: ExitStack) -> Bench:
    def server(name: str) -> Any:
        started: Redis | RedisCluster | Postgres = SERVERS[name]()
        stack.callback(started.close)
        started.start()
        return started

    folder.mkdir()
    return Bench(make_store(kind, folder, server), folder)


def _report(run: Run, log: str) -> int:
    stories = sorted(
        run.stories, key=lambda story: (*_row(story)[:2], STEPS.index(story.trial.steps[0]))
    )
    print(
        f"\n{summary(stories, _row)}\n\n{summary(stories, lambda story: (story.trial.ledger,))}\n\n{run}"
    )
    for story in run.wrong:
        print(story)
    if run.wrong:
        print(log[-5000:], file=sys.stderr)
    return 1 if run.wrong else 0


def _row(story: Story) -> tuple[str, ...]:
    trial = story.trial
    return trial.ledger, trial.mode, trial.steps[0] + ", ..." * (len(trial.steps) > 1)


if __name__ == "__main__":
    sys.exit(main())
