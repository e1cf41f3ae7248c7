"""The long run: `python -m tests.lost --cuts 5000 --repeats 10000 --resends 5000 --seed 7`.

Runs one stand after another, and then the gateway, all from one seed. Ends with a table, and with
code 1 if anything was wrong.
"""

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from tests.lost import relayed
from tests.lost.harness import Repeats, Run, Story, summary
from tests.lost.stand import Plan, Stand
from tests.servers import Postgres, Redis, make_store
from wirecall.commands.receipts import NOTICED_AFTER

SERVERS = {"redis_server": Redis, "postgres_server": Postgres}

# Each plan has a share of the cuts.
PLANS = [
    (Plan("granian", "memory", "single user"), 8),
    (Plan("uvicorn", "memory"), 8),
    (Plan("granian", "sqlite"), 8),
    (Plan("uvicorn", "sqlite", "single user"), 8),
    (Plan("granian", "sqlite", "anonymous"), 4),
    (Plan("granian-asgi", "sqlite"), 8),
    (Plan("granian", "redis"), 8),
    (Plan("uvicorn", "redis", "single user"), 8),
    (Plan("uvicorn", "redis", "anonymous"), 4),
    (Plan("granian", "redis", workers=2), 8),
    (Plan("granian", "postgres", "single user"), 8),
    (Plan("uvicorn", "postgres"), 8),
    (Plan("uvicorn", "postgres", workers=2), 8),
]
KILLS = 0.03  # of the trials
CHILDREN = 3  # servers on stdio behind the gateway
REPEATS_OF_GATEWAY = 5  # one of so many repeats goes through the gateway


def main() -> int:
    options = _options()
    # So that the servers end in this case too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(f"seed {options.seed}, {options.cuts} cuts, {options.repeats} repeats", flush=True)
    began = time.monotonic()
    stories: dict[Plan, list[Story]] = {}
    repeats: dict[Plan, list[Repeats]] = {}
    kills = 0
    plans = [(plan, share) for plan, share in PLANS if options.only in str(plan)]
    shares = sum(share for _, share in plans)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wirecall-lost-")))
        log = stack.enter_context(open(folder / "log", "ab"))
        servers: dict[str, Any] = {}

        def server(name: str) -> Any:
            if name not in servers:
                servers[name] = SERVERS[name]()
                stack.callback(servers[name].close)
                servers[name].start()
            return servers[name]

        for plan, share in plans:
            place = Path(tempfile.mkdtemp(dir=folder))
            store = make_store(plan.ledger, place, server)
            stand = Stand(plan, store, place, log, noticed_after=options.noticed_after)
            run = Run(stand, f"{options.seed} {plan}")
            asyncio.run(
                run.live(
                    -(-options.cuts * share // shares), -(-options.repeats * share // shares), KILLS
                )
            )
            stories[plan] = run.stories
            repeats[plan] = run.repeats
            kills += len(stand.kills)
            _report_stand(plan, run, time.monotonic() - began)
        wrong = 0
        if options.only in "gateway" and options.resends:
            wrong = _run_gateway(folder, log, options, began)
        text = (folder / "log").read_text(errors="replace")
    if plans:
        wrong += _report(stories, repeats, kills, time.monotonic() - began, text)
    return int(bool(wrong))


def _run_gateway(folder: Path, log: IO[bytes], options: argparse.Namespace, began: float) -> int:
    """Lose answers in front of the gateway; return how much was wrong."""
    place = Path(tempfile.mkdtemp(dir=folder))
    hall = relayed.Hall(place, log, CHILDREN)
    run = relayed.Run(hall, f"{options.seed} gateway")
    asyncio.run(run.live(options.resends, options.repeats // REPEATS_OF_GATEWAY, KILLS))
    wrong = [story for story in run.stories if story.faults]
    rows: list[Callable[[relayed.Story], str]] = [
        lambda story: story.kind,
        lambda story: str(story.trial),
    ]
    for row in rows:
        print(f"\n{relayed.summary(run.stories, row)}")
    for story in run.stories:
        if story.faults or story.unseen:
            print(f"    {story}")
    again = sum(story.sendings - 1 for story in run.stories)
    calls, swallowed, replays = (
        sum(getattr(told, name) for told in run.repeats)
        for name in ("calls", "swallowed", "replays")
    )
    print(
        f"\n{time.monotonic() - began:6.0f} s  gateway: {again} sent again, {len(hall.kills)} kills "
        f"of it and of its servers, {len(wrong)} wrong; {calls} repeats, {swallowed} swallowed, "
        f"{replays} replayed; {len(run.left)} processes left\n",
        flush=True,
    )
    if wrong:
        print(hall.gateway.log(), file=sys.stderr)
    return len(wrong) + int(swallowed) + int(replays) + len(run.left)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tests.lost", description="Cut calls, send them again, and count effects."
    )
    parser.add_argument("--cuts", type=int, default=5000, help="how many, about")
    parser.add_argument("--repeats", type=int, default=10_000, help="intended repeats, about")
    parser.add_argument(
        "--resends", type=int, default=5000, help="how many in front of the gateway, about"
    )
    parser.add_argument(
        "--seed", type=int, default=random.randrange(1 << 32), help="repeats the choices of a run"
    )
    parser.add_argument(
        "--only",
        default="",
        help='stands with this in their name: "sqlite", "granian, redis", "gateway"',
    )
    parser.add_argument(
        "--noticed-after",
        type=float,
        default=NOTICED_AFTER,
        help="seconds that a server waits for a transport to notice a loss; "
        "on a machine that is overloaded, more than usual",
    )
    return parser.parse_args()


def _report_stand(plan: Plan, run: Run, seconds: float) -> None:
    wrong = [story for story in run.stories if story.faults]
    calls = sum(repeat.calls for repeat in run.repeats)
    swallowed = sum(repeat.swallowed for repeat in run.repeats)
    cuts = sum(story.cuts for story in run.stories)
    ends = f"{cuts} cuts, {len(run.stand.kills)} kills, {len(wrong)} wrong"
    print(f"{seconds:6.0f} s  {plan}: {ends}; {calls} repeats, {swallowed} swallowed", flush=True)
    for story in wrong:
        print(f"    {story}", flush=True)


def _report(
    stories: dict[Plan, list[Story]],
    repeats: dict[Plan, list[Repeats]],
    kills: int,
    seconds: float,
    log: str,
) -> int:
    plans = {id(story): plan for plan, told in stories.items() for story in told}
    every = [story for told in stories.values() for story in told]
    again = [told for each in repeats.values() for told in each]
    rows = (
        lambda story: str(plans[id(story)]),
        lambda story: story.kind,
        lambda story: f"{story.trial.moment}, by {story.trial.how}",
        lambda story: story.trial.detail,
        lambda story: story.trial.mode,
    )
    for row in rows:
        print(f"\n{summary(every, row)}")
    wrong = [story for story in every if story.faults]
    calls, swallowed, replays = (
        sum(getattr(told, name) for told in again) for name in ("calls", "swallowed", "replays")
    )
    print(
        f"\n{sum(story.cuts for story in every)} cuts, {kills} kills, {len(wrong)} wrong in {seconds:.0f} s"
    )
    print(f"{calls} intended repeats, {swallowed} swallowed, {replays} replayed")
    if wrong or swallowed or replays:
        print(log[-5000:], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
