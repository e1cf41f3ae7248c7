"""Calls without a key over real servers, cut at random and at the moments that matter; and their
harness.
"""

import asyncio
import os
import random
from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Literal

import pytest

from tests.faults import eventually
from tests.lost.harness import (
    BATCHES,
    BEHIND,
    LONG,
    UNKNOWN,
    WAYS,
    Run,
    Story,
    Teller,
    Trial,
    check,
    official_senders,
    random_trials,
    raw_sender,
    summary,
)
from tests.lost.senders import PARTS, PATIENCE, Answer, How, Order, Sender
from tests.lost.shop import Effect
from tests.lost.stand import Delivery, Plan, Stand
from tests.mcp.asgi import LEGACY, R4, R5
from tests.servers import DURABLE, TRANSACTIONAL, Store
from tests.size import sized
from wirecall.ledger.base import RecordId

SEED = int(os.environ.get("LOST_SEED") or random.randrange(1 << 32))

in_memory = pytest.mark.parametrize("store", ["memory"], indirect=True)
both_servers = pytest.mark.parametrize("server", ["granian", "uvicorn"])


@pytest.fixture
def log(tmp_path: Path) -> Iterator[IO[bytes]]:
    with open(tmp_path / "log", "ab") as log:
        yield log


def make_stand(
    plan: Plan, store: Store, tmp_path: Path, log: IO[bytes], key: Literal["auto", "off"] = "auto"
) -> Stand:
    """A stand on a busy machine: there, a transport may take long to notice that a client has left."""
    return Stand(plan, store, tmp_path, log, key=key, noticed_after=PATIENCE)


# --- at random ------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("store", "plan"),
    [
        ("memory", Plan("granian", "memory", "single user")),
        ("sqlite", Plan("granian", "sqlite")),
        ("redis", Plan("uvicorn", "redis")),
        ("postgres", Plan("uvicorn", "postgres")),
    ],
    indirect=["store"],
    ids=str,
)
async def test_effects_are_not_doubled_and_repeats_are_not_swallowed(
    store: Store, plan: Plan, tmp_path: Path, log: IO[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(make_stand(plan, store, tmp_path, log), f"{SEED} {plan}")
    cuts, repeats = sized(small=(12, 36), full=(200, 400))
    # Those come below, each at its moment, and at random in `make lost`.
    await run.live(cuts, repeats, kills=0)
    with capsys.disabled():
        print(f"\nLOST_SEED={SEED}\n{summary(run.stories, lambda _: str(plan))}")
    wrong = [str(story) for story in run.stories if story.faults]
    assert not wrong, "\n".join([f"LOST_SEED={SEED}", *wrong])
    assert [told for told in run.repeats if told.replays or told.swallowed] == []


# --- at the moments that matter -------------------------------------------------------------------


async def live(stand: Stand, trials: dict[str, list[Trial]]) -> list[Story]:
    """The stories of trials, by the transport of their sender, in this order."""
    stories: list[Story] = []
    async with stand.opened(), AsyncExitStack() as stack:
        for way, told in trials.items():
            sender = raw_sender(stand, way, f"raw {way}")
            stack.push_async_callback(sender.close)
            await sender.open()
            for nth, trial in enumerate(told):
                stories.append(await Teller(stand, sender, None, trial, f"{way} {nth}").tell())
        effects = stand.effects()
        for story in stories:
            await check(
                story, stand, [effect for effect in effects if effect.order == story.order.name]
            )
    assert [str(story) for story in stories if story.faults] == []
    return stories


@in_memory
@both_servers
async def test_server_notices_that_a_client_has_left(
    server: Literal["granian", "uvicorn"], store: Store, tmp_path: Path, log: IO[bytes]
) -> None:
    """On every transport, in streams and through the batch tool: while the handler runs, and in the
    middle of a long answer.

    Before the commit point, a call that is cancelled has done nothing.
    """
    stand = make_stand(Plan(server, "memory"), store, tmp_path, log)
    acted = Trial(mode="unknown", moment="acted", is_watched=True)
    overlapping = Trial(
        mode="unknown", moment="acted", is_watched=True, is_overlapping=True, delay=0.001
    )
    writing = Trial(mode="unknown", moment="writing", short_of=100)
    cancelled = Trial(mode="unknown", moment="acted", how="cancel", is_watched=True)
    trials = {
        way: [acted, overlapping, writing, *([cancelled] if way in LEGACY else [])]
        for way in (*WAYS, *BATCHES)
    }
    # There, a client that leaves has cancelled.
    trials[R5].append(Trial(mode="point", moment="entered", is_watched=True))
    trials[R4].append(Trial(mode="point", moment="entered", how="cancel", is_watched=True))
    for story in await live(stand, trials):
        assert story.answer is not None and story.answer.is_replayed is (
            story.trial.mode != "point"
        ), story
        assert (story.cuts, len(story.effects), story.unseen) == (1, 1, 0), story


every_front = pytest.mark.parametrize("server", ["granian", "granian-asgi", "uvicorn"])


@in_memory
@every_front
async def test_arrivals_see_a_client_that_left_with_bytes_behind_its_call(
    server: Literal["granian", "granian-asgi", "uvicorn"],
    store: Store,
    tmp_path: Path,
    log: IO[bytes],
) -> None:
    """While the handler runs, on every transport.

    Servers that read ahead do not see the connection end. uvicorn closes it when it reads bytes
    that are not a request. Then the call that came before them is not served.
    """
    stand = make_stand(Plan(server, "memory"), store, tmp_path, log)
    watched = [
        Trial(mode="unknown", moment="acted", is_watched=True, behind=behind) for behind in BEHIND
    ]
    overlapping = Trial(
        mode="unknown", moment="acted", is_overlapping=True, delay=0.001, behind=BEHIND[0]
    )
    for story in await live(stand, {way: [*watched, overlapping] for way in WAYS}):
        is_served = server != "uvicorn" or story.trial.behind != b"x"
        assert story.answer is not None and story.answer.is_replayed in (True, is_served), story
        assert (story.cuts, len(story.effects), story.unseen) == (1, 1, 0), story


@in_memory
@every_front
async def test_arrivals_see_a_client_that_read_a_part_of_its_answer(
    server: Literal["granian", "granian-asgi", "uvicorn"],
    store: Store,
    tmp_path: Path,
    log: IO[bytes],
) -> None:
    """The client's kernel has acknowledged all of it; the connection is reset, because some of it
    is not read.
    """
    stand = make_stand(Plan(server, "memory"), store, tmp_path, log)
    sizes = sized(small=(10, 300_000), full=(10, 1000, 30_000, 300_000))
    trials = [
        Trial(mode="unknown", moment="reading", part=part, size=size)
        for part in PARTS
        for size in sizes
    ]
    for story in await live(stand, dict.fromkeys(sized(small=("/rpc", R4, R5), full=WAYS), trials)):
        assert story.answer is not None and story.answer.is_replayed, story
        assert (story.cuts, len(story.effects), story.unseen) == (1, 1, 0), story


async def is_written(stand: Stand, id: RecordId) -> bool:
    return await stand.delivery(id) == ("done", "written")


@in_memory
@pytest.mark.parametrize(
    ("server", "behind", "is_read"),
    [
        ("granian", b"", False),
        ("granian-asgi", b"", False),
        ("uvicorn", b"", False),
        ("granian", b"\r\n", True),
        ("granian-asgi", b"\r\n", True),
    ],
)
async def test_arrivals_count_a_client_that_ended_its_sending_side_as_left_unless_it_reads_the_answer(
    server: Literal["granian", "granian-asgi", "uvicorn"],
    behind: bytes,
    is_read: bool,
    store: Store,
    tmp_path: Path,
    log: IO[bytes],
) -> None:
    stand = make_stand(Plan(server, "memory"), store, tmp_path, log)
    async with stand.opened():
        sender = raw_sender(stand, "/rpc", "raw")
        order = Order("unknown", "half")
        held = stand.hold(order.name, "acted")
        flight = sender.begin_bare(order, behind=behind, half_close_at=held.reached)
        await held.reached.wait()
        assert held.record is not None
        assert await stand.end_of(held.record, PATIENCE) == ("running", "undelivered")
        held.release()
        await asyncio.wait([flight.task])
        assert (flight.answered() is not None) is is_read
        if is_read:
            await eventually(partial(is_written, stand, held.record))
        again = await sender.begin(order).answer()
        assert again.is_replayed is not is_read
        await sender.close()
    assert len(stand.effects()) == (2 if is_read else 1)


@pytest.mark.parametrize("store", sized(small=("sqlite",), full=DURABLE), indirect=True)
async def test_call_of_a_killed_server_is_recognised(
    store: Store, tmp_path: Path, log: IO[bytes]
) -> None:
    """As a retry with a key, in every mode."""
    stand = make_stand(Plan("granian", store.kind), store, tmp_path, log)
    modes = [
        "unknown",
        "rerun",
        "reconcile",
        *(["transactional"] if store.kind in TRANSACTIONAL else []),
    ]
    stories = await live(
        stand, {"/rpc": [Trial(mode=mode, moment="acted", how="kill") for mode in modes]}
    )
    told = {
        story.trial.mode: (story.answer.code if story.answer else None, len(story.effects))
        for story in stories
    }
    expected = {
        "unknown": (UNKNOWN, 1),
        "rerun": (None, 2),
        "reconcile": (None, 1),
        "transactional": (None, 1),
    }
    assert told == {mode: expected[mode] for mode in modes}
    assert len(stand.kills) == len(modes)


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
async def test_official_clients_get_the_unknown_outcome_of_a_killed_server(
    store: Store, tmp_path: Path, log: IO[bytes]
) -> None:
    """It is an answer, and not a lost one: every equal call gets it again."""
    stand = make_stand(Plan("granian", store.kind, "single user"), store, tmp_path, log)
    trial = Trial(mode="unknown", moment="acted", how="kill")
    async with stand.opened(), AsyncExitStack() as stack:
        senders = official_senders(stand)
        for sender in sized(small=[senders[0], senders[-2]], full=senders):
            stack.push_async_callback(sender.close)
            await sender.open()
            story = await Teller(stand, sender, None, trial, sender.name).tell()
            assert (story.faults, story.answer) == ([], Answer(code=UNKNOWN)), story
            assert (story.cuts, story.kills) == (1, 1), story


# --- the harness ----------------------------------------------------------------------------------


@in_memory
async def test_harness_finds_a_server_that_recognises_nothing(
    store: Store, tmp_path: Path, log: IO[bytes]
) -> None:
    stand = make_stand(Plan("uvicorn", "memory"), store, tmp_path, log, key="off")
    with pytest.raises(AssertionError, match="doubled: 2 effects"):
        await live(stand, {"/rpc": [Trial(mode="unknown", moment="acted")]})


@in_memory
async def test_harness_knows_whether_a_cut_met_the_answer(
    store: Store, tmp_path: Path, log: IO[bytes]
) -> None:
    """A stream begins with another entry while the handler of the call has not even continued."""
    stand = make_stand(Plan("granian", "memory"), store, tmp_path, log)
    async with stand.opened(), AsyncExitStack() as stack:
        stream, single = (raw_sender(stand, way, f"raw {way}") for way in ("stream", "/rpc"))
        for sender in (stream, single):
            stack.push_async_callback(sender.close)
        early = Order("unknown", "early", size=LONG)
        held = stand.hold(early.name, "entered")
        flight = stream.begin(early, short_of=1)
        await asyncio.wait([flight.task], timeout=PATIENCE)
        assert flight.task.done() and flight.answered() is None
        assert flight.is_cut_in_answer() is False
        held.release()
        for name, sender in (("stream", stream), ("single", single)):
            flight = sender.begin(Order("unknown", name, size=LONG), short_of=LONG // 2)
            await asyncio.wait([flight.task], timeout=PATIENCE)
            assert flight.task.done() and flight.is_cut_in_answer() is True


class Silent(Stand):
    """A stand without a server, whose records are what a test says."""

    found: Delivery = None

    async def end_of(self, id: RecordId, patience: float) -> Delivery:
        return self.found


MINE = [Effect("o", "me", key, run) for key, run in (("k1", "r1"), ("k2", "r2"))]
TWICE = [MINE[0], Effect("o", "me", "k1", "r9", 2)]
OTHER = Effect("o", "other", "k3", "r3")
SENT = Trial(mode="unknown", moment="sent")


@pytest.mark.parametrize(
    ("must_be_seen", "answer", "effects", "found", "fault"),
    [
        (False, Answer("r1"), MINE[:1], None, ""),
        (False, Answer("r2"), MINE, ("done", "written"), ""),
        (False, Answer("r2"), MINE, ("done", "undelivered"), "doubled"),
        (False, Answer("r2"), MINE, ("running", "pending"), "doubled"),
        (False, Answer("r2"), MINE, None, "doubled"),
        (True, Answer("r2"), MINE, ("done", "written"), "doubled"),
        (True, Answer("r2"), MINE, ("done", "undelivered"), "doubled"),
        (False, Answer("r1"), TWICE, None, "doubled"),
        (False, Answer("r3"), [MINE[0], OTHER], None, "of another caller"),
        (False, Answer("r4"), MINE[:1], None, "of another caller"),
        (False, Answer(code=UNKNOWN), MINE[:1], None, "answered with"),
        (False, Answer(code=-32603), MINE[:1], None, "answered with"),
        (False, None, [], None, "not answered"),
    ],
)
async def test_checker_judges_stories(
    must_be_seen: bool,
    answer: Answer | None,
    effects: list[Effect],
    found: Delivery,
    fault: str,
    tmp_path: Path,
    log: IO[bytes],
) -> None:
    stand = Silent(Plan("uvicorn", "memory"), Store("memory", "memory:"), tmp_path, log)
    stand.found = found
    story = Story(
        SENT,
        Order("unknown", "o"),
        "me",
        "raw /rpc",
        cuts=1,
        answer=answer,
        must_be_seen=must_be_seen,
    )
    await check(story, stand, effects)
    assert bool(story.faults) is bool(fault)
    assert any(fault in told for told in story.faults) or not fault


@pytest.mark.parametrize(
    ("mode", "kills", "again"), [("rerun", 1, 1), ("rerun", 0, 0), ("unknown", 1, 0)]
)
async def test_checker_allows_a_second_run_after_a_kill_in_one_mode(
    mode: str, kills: int, again: int, tmp_path: Path, log: IO[bytes]
) -> None:
    stand = Silent(Plan("uvicorn", "sqlite"), Store("memory", "memory:"), tmp_path, log)
    trial = Trial(mode=mode, moment="acted", how="kill")
    story = Story(trial, Order(mode, "o"), "me", "raw /rpc", kills=kills, answer=Answer("r9"))
    await check(story, stand, TWICE)
    assert (story.again, bool(story.faults)) == (again, not again)


@pytest.mark.parametrize(
    ("kills", "at", "forgotten"), [(0, 10.001, 1), (0, 9.0, 0), (0, 60.0, 0), (1, 10.001, 0)]
)
async def test_checker_allows_a_kill_to_lose_the_mark_of_a_written_answer(
    kills: int, at: float, forgotten: int, tmp_path: Path, log: IO[bytes]
) -> None:
    stand = Silent(Plan("uvicorn", "sqlite"), Store("memory", "memory:"), tmp_path, log)
    stand.found = ("done", "pending")
    stand.kills = [at]
    story = Story(
        SENT, Order("unknown", "o"), "me", "raw /rpc", kills=kills, ended=10.0, answer=Answer("r2")
    )
    await check(story, stand, MINE)
    assert (story.forgotten, bool(story.faults)) == (forgotten, not forgotten)


@pytest.mark.parametrize("workers", [1, 2])
async def test_checker_allows_another_worker_to_miss_a_recent_loss(
    workers: int, tmp_path: Path, log: IO[bytes]
) -> None:
    stand = Silent(
        Plan("uvicorn", "sqlite", workers=workers), Store("memory", "memory:"), tmp_path, log
    )
    stand.found = ("done", "undelivered")
    story = Story(SENT, Order("unknown", "o"), "me", "raw /rpc", answer=Answer("r2"))
    await check(story, stand, MINE)
    assert (story.elsewhere, bool(story.faults)) == (workers - 1, workers == 1)


@pytest.mark.parametrize(
    ("how", "end", "kills", "overtaken"),
    [
        ("cancel", "undelivered", 0, 1),
        ("cut", "undelivered", 0, 0),
        ("cancel", "pending", 1, 1),
        ("cancel", "pending", 0, 0),
    ],
)
async def test_checker_allows_a_cancellation_to_overtake_its_call(
    how: How, end: str, kills: int, overtaken: int, tmp_path: Path, log: IO[bytes]
) -> None:
    stand = Silent(Plan("uvicorn", "sqlite"), Store("memory", "memory:"), tmp_path, log)
    stand.found = ("done", end)
    trial = Trial(mode="unknown", moment="sent", how=how)
    story = Story(trial, Order("unknown", "o"), "me", "raw /rpc", kills=kills, answer=Answer("r2"))
    await check(story, stand, MINE)
    assert (story.overtaken, bool(story.faults)) == (overtaken, not overtaken)


def test_seed_repeats_the_choices_of_a_run(tmp_path: Path, log: IO[bytes]) -> None:
    stand = Silent(Plan("uvicorn", "sqlite"), Store("sqlite", "sqlite:"), tmp_path, log)
    sender = Sender("any", "me")
    sender.can_cancel = True
    one, other = (
        list(islice(random_trials(sender, stand, random.Random("7"), kills=0.1), 300))
        for _ in range(2)
    )
    assert one == other
    assert {trial.how for trial in one} == {"cut", "cancel", "kill"}
