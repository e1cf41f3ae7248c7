"""Lost answers in front of the gateway: servers without keys behind it, and every process killed."""

import os
import random
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.lost.relayed import (
    Door,
    Hall,
    HttpDoor,
    PipeDoor,
    Run,
    Story,
    Teller,
    Trial,
    check,
    summary,
)
from tests.lost.senders import Answer, Order, Raw
from tests.lost.shop import Effect
from tests.mcp.asgi import R4, R5, REVISIONS
from tests.size import sized
from wirecall.ledger.base import State

SEED = int(os.environ.get("LOST_SEED") or random.randrange(1 << 32))

REPLAYED = [
    Trial(moment="entered", is_watched=True),
    Trial(moment="acted", is_watched=True),
    Trial(moment="acted", is_overlapping=True, delay=0.001),
]
WRITTEN = [
    Trial(moment="writing", short_of=100),
    Trial(moment="reading", part="half", size=1000),
]
CANCELLED = Trial(moment="acted", how="cancel", is_watched=True)
SILENT = Trial(moment="acted", how="silence", is_overlapping=True, delay=0.001)
# A kill makes the outcome unknown, and after that answer the call runs again.
UPSTREAM = Trial(moment="acted", how="upstream")
ORPHAN = Trial(moment="acted", how="orphan")
GATEWAY = Trial(moment="acted", how="gateway")


@pytest.fixture
def hall(tmp_path: Path) -> Iterator[Hall]:
    with open(tmp_path / "log", "ab") as log:
        yield Hall(tmp_path, log, children=1)


async def live(hall: Hall, trials: dict[Door, list[Trial]]) -> list[Story]:
    """The stories of trials, by their client, in this order."""
    stories = []
    async with hall.opened(), AsyncExitStack() as stack:
        for door, told in trials.items():
            stack.push_async_callback(door.aclose)
            await door.open()
            for nth, trial in enumerate(told):
                tool = f"pay-{door.kind.replace(' ', '-')}-{nth}"
                story = await Teller(hall, door, trial, tool).tell()
                await check(story, door, hall.effects(story.order.name))
                stories.append(story)
    assert [str(story) for story in stories if story.faults] == []
    return stories


def judge(stories: list[Story]) -> None:
    for story in stories:
        killed = story.trial.how in ("upstream", "orphan", "gateway")
        assert (story.unknowns, story.effects) == ((1, 2) if killed else (0, 1)), story
        assert story.answer is not None and story.answer.is_replayed is not killed, story
        assert story.unseen == 0, story


async def test_gateway_gives_lost_answers_of_a_child_again(hall: Hall) -> None:
    door = HttpDoor(hall, "child0", R4)
    judge(await live(hall, {door: [*REPLAYED, *WRITTEN, CANCELLED, UPSTREAM, GATEWAY]}))


async def test_gateway_gives_lost_answers_of_a_server_over_http_again(hall: Hall) -> None:
    """The server speaks another era than its client."""
    door = HttpDoor(hall, "web", R5)
    judge(await live(hall, {door: [*REPLAYED, *WRITTEN, UPSTREAM, ORPHAN]}))


async def test_wrap_gives_lost_answers_again(hall: Hall) -> None:
    door = PipeDoor(hall, "pipe", ["--", *hall.till()])
    judge(await live(hall, {door: [REPLAYED[1], CANCELLED, SILENT, UPSTREAM, GATEWAY]}))


@pytest.mark.long
async def test_effects_are_not_doubled_behind_the_gateway_and_repeats_are_not_swallowed(
    hall: Hall, capsys: pytest.CaptureFixture[str]
) -> None:
    """At random moments; every process is killed now and then, and none remains."""
    run = Run(hall, str(SEED), sized(small=(R4, R5), full=REVISIONS))
    sendings, repeats = sized(small=(12, 24), full=(200, 200))
    await run.live(sendings, repeats, kills=0.05)
    with capsys.disabled():
        print(f"\nLOST_SEED={SEED}\n{summary(run.stories, lambda story: story.kind)}")
    wrong = [str(story) for story in run.stories if story.faults]
    assert not wrong, "\n".join([f"LOST_SEED={SEED}", *wrong])
    assert [told for told in run.repeats if told.replays or told.swallowed] == []
    assert run.left == []


async def test_harness_of_the_gateway_finds_a_server_without_one(hall: Hall) -> None:
    bare = HttpDoor(hall, "web", R5, Raw(R5, "bare", hall.web_port))
    with pytest.raises(AssertionError, match="doubled"):
        await live(hall, {bare: [Trial(moment="acted")]})


class Shown:
    """Records of a trial, as a ledger shows them."""

    def __init__(self, *ends: tuple[State, str]) -> None:
        self._records = [SimpleNamespace(state=state, delivery=end) for state, end in ends]

    async def until_lost(self, tool: str, patience: float) -> bool:
        return False

    async def records(self, tool: str) -> Any:
        return self._records


async def judged(*ends: tuple[State, str], losses: int) -> Story:
    """Return a story with two effects, of which the first was followed by `ran: "no"`."""
    order = Order("pay", "pay")
    story = Story("web", order, WRITTEN[0], losses=losses, denied=1, answer=Answer(run="two"))
    effects = [Effect("pay", "web", "", run) for run in ("one", "two")]
    door: Any = SimpleNamespace(books=Shown(*ends))
    await check(story, door, effects)
    return story


async def test_harness_of_the_gateway_knows_that_an_unseen_call_is_followed_by_a_new_one() -> None:
    """The connection of a client ended while it read "unknown", of which it had every byte."""
    seen = await judged((State.UNKNOWN, "written"), (State.DONE, "written"), losses=2)
    assert (seen.unseen, seen.faults) == (1, [])
    doubled = await judged((State.UNKNOWN, "undelivered"), (State.DONE, "written"), losses=2)
    assert [fault.split(":")[0] for fault in doubled.faults] == [
        "doubled",
        "an answer says ran",
    ]
