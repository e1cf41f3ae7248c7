"""Connections cut within a transition, cut anywhere, or stalled: commands fail closed, and nothing
doubles.
"""

import asyncio
import time
from collections import Counter

import pytest

from tests.faults import PATIENCE, Caller, Effects, child, eventually, make_shop
from tests.faults.fronts import Front, Loss, Two, find, is_done, lease_is_over, losses, reads_until
from tests.faults.proxy import Direction
from tests.servers import Store
from wirecall import Context
from wirecall.ledger.base import State
from wirecall.ledger.postgres import queue as postgres_queue

# --- connections cut within a transition ----------------------------------------------------------


@losses
async def test_lost_claim_is_refused_and_the_retry_runs(
    front: Front, two: Two, caller: Caller, effects: Effects, loss: Loss
) -> None:
    fault = front.proxy.lose(loss, front.pattern("claim"), times=front.sendings("claim"))
    refused = await caller.call(two.cut, "charge", "key")
    assert refused.is_refused and fault.is_over
    assert effects.of("key") == []
    answers = await asyncio.gather(
        *(caller.insist(app, "charge", "key") for app in (two.cut, two.safe))
    )
    assert Counter(answer.is_replayed for answer in answers) == {False: 1, True: 1}
    assert len(effects.of("key")) == 1


@losses
@pytest.mark.parametrize("front", ["postgres"], indirect=True)
@pytest.mark.parametrize("transition", ["claim", "complete"])
async def test_lost_statement_is_sent_again_if_that_is_safe(
    front: Front, two: Two, caller: Caller, effects: Effects, transition: str, loss: Loss
) -> None:
    fault = front.proxy.lose(loss, front.pattern(transition))
    answer = await caller.call(two.cut, "charge", "key")
    assert answer.error is None and fault.is_over
    again = await caller.call(two.safe, "charge", "key")
    assert again.repeats(answer)
    assert len(effects.of("key")) == 1


@pytest.mark.parametrize("front", ["postgres"], indirect=True)
async def test_claim_keeps_its_record_if_its_answer_is_lost_for_longer_than_its_lease(
    front: Front, caller: Caller, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger sends it again, after 0.3 s: its first record must not stand for a holder that
    vanished.
    """
    async with make_shop(impatient(front, monkeypatch), effects) as app:

        @app.command(lease=0.05)
        async def brief(order: int, context: Context) -> str:
            return effects.add(context)

        await caller.call(app, "charge", "first")
        fault = front.proxy.lose("hush", front.pattern("claim"))
        answer = await caller.call(app, "brief", "key")
        assert answer.error is None and not answer.is_replayed and fault.is_over
        assert (await caller.call(app, "brief", "key")).repeats(answer)
    assert len(effects.of("key")) == 1


@pytest.mark.parametrize("front", ["postgres"], indirect=True)
@pytest.mark.parametrize("missing", [1, 5, 6])  # bytes; a Sync, where there is one, has 5
async def test_host_that_vanishes_within_its_claim_does_not_lock_the_key(
    front: Front, two: Two, caller: Caller, effects: Effects, missing: int
) -> None:
    before = front.proxy.passed["up"]
    two.pause.go.set()
    first = await two.held(caller, "hold")
    length = front.proxy.passed["up"] - before
    await first
    fault = front.proxy.vanish_after(length - missing)
    await caller.call(two.cut, "hold", "yek")
    assert fault.is_over
    assert (await caller.insist(two.safe, "hold", "yek", seconds=10)).error is None
    assert len(effects.of("yek")) == 1


async def test_lost_claim_is_released_even_if_the_store_is_away_for_longer_than_the_lease(
    front: Front, two: Two, caller: Caller, effects: Effects
) -> None:
    front.proxy.refuse()
    front.proxy.lose("answer", front.pattern("claim"))
    refused = await caller.call(two.cut, "hold", "key")
    assert refused.is_refused
    await lease_is_over(front.store, "hold", "key")
    front.proxy.admit()
    two.pause.go.set()
    # Perhaps before the clean-up; then it is unknown, for a moment.
    unsure = await caller.call(two.safe, "hold", "key")
    assert unsure.error is None or unsure.ran == "unknown"
    assert (await caller.insist(two.cut, "hold", "key", seconds=5)).error is None
    assert len(effects.of("key")) == 1


async def test_claim_that_arrives_after_its_clean_up_is_released(
    front: Front, effects: Effects, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wirecall.commands.background.UNCLAIM_AGAIN", 1.0)
    patience = postgres_queue.PATIENCE
    async with (
        make_shop(impatient(front, monkeypatch), effects) as app,
        make_shop(front.store.url, effects) as safe,
    ):
        await caller.call(app, "charge", "first")
        late = front.proxy.delay(front.pattern("claim"), times=front.sendings("claim"))
        looked = front.proxy.note(front.pattern("get"))
        refused = await caller.call(app, "charge", "key")
        assert refused.is_refused and late.is_over
        await looked.wait()
        # Other ledgers have the time that a busy machine needs.
        monkeypatch.setattr(postgres_queue, "PATIENCE", patience)
        assert await find(front.store, "charge", "key") is None
        front.proxy.flow()
        await eventually(lambda: find(front.store, "charge", "key"))
        assert (await caller.call(safe, "charge", "key")).error is None
    assert len(effects.of("key")) == 1


async def test_caller_that_leaves_in_the_middle_of_its_claim_leaves_nothing_behind(
    front: Front, two: Two, caller: Caller, effects: Effects
) -> None:
    late = front.proxy.delay(front.pattern("claim"))
    task = asyncio.create_task(caller.call(two.cut, "charge", "key"))
    await late.wait()
    task.cancel()
    second = asyncio.create_task(caller.call(two.cut, "charge", "key"))
    front.proxy.flow()
    assert (await second).error is None
    assert task.cancelled() and len(effects.of("key")) == 1


@pytest.mark.parametrize("how", ["lost", "cancelled"])
async def test_lost_take_over_does_not_remove_the_record_of_the_first_holder(
    front: Front, two: Two, caller: Caller, effects: Effects, how: str
) -> None:
    two.pause.go.set()
    async with child(front.store.url, effects) as first:
        await first.begin("hold_reconcile", "key")
        await first.kill()
    assert len(effects.of("key")) == 1
    await lease_is_over(front.store, "hold_reconcile", "key")
    if how == "lost":
        front.proxy.lose("answer", front.pattern("claim"), times=front.sendings("claim"))
        refused = await caller.call(two.cut, "hold_reconcile", "key")
        assert refused.is_refused
    else:
        front.proxy.stall("down")
        task = asyncio.create_task(caller.call(two.cut, "hold_reconcile", "key"))
        await eventually(lambda: is_claimed_again(front.store, "hold_reconcile", "key"))
        task.cancel()
        front.proxy.flow()
    answer = await caller.insist(two.cut, "hold_reconcile", "key")
    assert [effect.run for effect in effects.of("key")] == [answer.result], (
        "it was done; reconcile would have found out"
    )


@losses
@pytest.mark.parametrize("method", ["careful", "careful_in_a_thread"])
async def test_lost_commit_point_stops_the_handler_before_its_effect(
    front: Front, two: Two, caller: Caller, effects: Effects, loss: Loss, method: str
) -> None:
    times = front.sendings("commit_point")
    fault = front.proxy.lose(loss, front.pattern("commit_point"), times=times)
    refused = await caller.call(two.cut, method, "key")
    assert refused.is_refused and fault.is_over
    assert effects.of("key") == []
    assert (await caller.insist(two.safe, method, "key")).error is None
    assert len(effects.of("key")) == 1


@losses
async def test_lost_completion_costs_the_caller_nothing_and_is_recorded_later(
    front: Front, two: Two, caller: Caller, effects: Effects, loss: Loss
) -> None:
    fault = front.proxy.lose(loss, front.pattern("complete"), times=front.sendings("complete"))
    answer = await caller.call(two.cut, "charge", "key")
    assert answer.error is None and fault.is_over
    again = await caller.call(two.safe, "charge", "key")
    assert again.repeats(answer)
    assert len(effects.of("key")) == 1


async def test_completion_is_recorded_once_the_store_is_back(
    front: Front, two: Two, caller: Caller, effects: Effects
) -> None:
    first = await two.held(caller, "hold")
    with front.proxy.away():
        two.pause.go.set()
        answer = await first
        assert answer.error is None
        unsure = await Caller().call(two.safe, "hold", "key")
        assert unsure.is_unknown
    await eventually(lambda: is_done(front.store, "hold", "key"))
    again = await caller.call(two.safe, "hold", "key")
    assert again.repeats(answer)
    assert len(effects.of("key")) == 1


@losses
async def test_lost_release_ends_with_the_lease(
    front: Front, two: Two, caller: Caller, effects: Effects, loss: Loss
) -> None:
    fault = front.proxy.lose(loss, front.pattern("release"))
    failed = await caller.call(two.cut, "fail_once", "key")
    assert (failed.code, failed.ran) == (-32603, "no") and fault.is_over
    assert (await caller.insist(two.safe, "fail_once", "key")).error is None
    assert len(effects.of("key")) == 1


@losses
async def test_lost_abandon_ends_with_the_lease_and_the_command_is_not_run_again(
    front: Front, two: Two, caller: Caller, effects: Effects, loss: Loss
) -> None:
    fault = front.proxy.lose(loss, front.pattern("abandon"))
    failed = await caller.call(two.cut, "break_after", "key")
    assert (failed.code, failed.ran) == (-32603, "unknown") and fault.is_over
    unsure = await caller.call(two.safe, "break_after", "key")
    assert unsure.is_unknown
    assert len(effects.of("key")) == 1


@losses
async def test_lost_heartbeat_does_not_lose_the_record(
    front: Front, two: Two, caller: Caller, effects: Effects, loss: Loss
) -> None:
    fault = front.proxy.lose(loss, front.pattern("heartbeat"))
    first = await two.held(caller, "hold")
    second = asyncio.create_task(caller.call(two.safe, "hold", "key"))
    await fault.wait()
    await beats(front.store, "hold", "key", times=3)
    two.pause.go.set()
    answers = await asyncio.gather(first, second)
    assert answers[0].error is None and answers[0].result == answers[1].result
    assert (answers[0].is_replayed, answers[1].is_replayed) == (False, True)
    assert len(effects.of("key")) == 1


async def test_holder_cut_off_for_longer_than_its_lease_still_reports_its_outcome(
    front: Front, two: Two, caller: Caller, effects: Effects
) -> None:
    first = await two.held(caller, "hold")
    with front.proxy.away():
        unsure = await caller.call(two.safe, "hold", "key")
        assert unsure.is_unknown
    await caller.insist(two.cut, "charge", "back-again")
    two.pause.go.set()
    answer = await first
    again = await caller.insist(two.safe, "hold", "key")
    assert again.repeats(answer)
    assert len(effects.of("key")) == 1


async def test_holder_cut_off_in_rerun_mode_yields_to_its_successor(
    front: Front, two: Two, caller: Caller, effects: Effects
) -> None:
    caller.most = 2
    first = await two.held(caller, "hold_rerun")
    with front.proxy.away():
        successor = await caller.call(two.safe, "hold_rerun", "key")
        assert successor.error is None and not successor.is_replayed
    await caller.insist(two.cut, "charge", "back-again")
    two.pause.go.set()
    assert (await first).result == successor.result, (
        "the first came too late, and got the outcome that counts instead"
    )
    assert (await caller.call(two.safe, "hold_rerun", "key")).result == successor.result
    assert len(effects.of("key")) == 2, "rerun means: it may happen twice"


async def is_claimed_again(store: Store, method: str, key: str) -> bool:
    record = await find(store, method, key)
    return record is not None and record.attempts == 2


async def beats(store: Store, method: str, key: str, *, times: int) -> None:
    """Wait until the lease has been renewed so many times."""
    left = 0.0
    async with asyncio.timeout(PATIENCE):
        while times:
            record = await find(store, method, key)
            assert record is not None and record.state is State.RUNNING
            times -= record.lease_left > left
            left = record.lease_left
            await asyncio.sleep(0.01)


# --- connections cut anywhere, and stalled --------------------------------------------------------


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_connection_may_be_cut_after_any_number_of_bytes(
    front: Front, two: Two, caller: Caller, effects: Effects, direction: Direction
) -> None:
    lengths: list[int] = []
    for number in range(5):
        before = front.proxy.passed[direction]
        await caller.call(two.cut, "charge", f"key-no-{number:04}")
        lengths.append(front.proxy.passed[direction] - before)
    # A server also looks at its ledger once a second, on the same connection.
    length = min(lengths)
    cuts = 0
    for place in sorted({1, *range(length // 20, length, length // 20), length - 1}):
        key = f"key-at-{place:04}"
        fault = front.proxy.cut_after(place, direction)
        first = await caller.call(two.cut, "charge", key)
        fault.end()
        assert first.error is None or first.is_refused
        assert (await caller.insist(two.safe, "charge", key)).error is None
        assert len(effects.of(key)) == 1
        cuts += fault.happened
    # Numbers in the traffic have more or fewer digits, so the very last bytes may not be reached.
    assert cuts >= 19


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_silent_store_refuses_commands_but_not_queries(
    front: Front,
    effects: Effects,
    caller: Caller,
    direction: Direction,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with make_shop(impatient(front, monkeypatch), effects) as app:
        await caller.call(app, "charge", "first")
        front.proxy.stall(direction)
        silent = asyncio.create_task(caller.call(app, "charge", "key"))
        queries = await reads_until(app, silent)
        assert (await silent).is_refused
        assert queries > 10
        front.proxy.flow()
        await caller.insist(app, "charge", "key")
    assert len(effects.of("key")) == 1


async def test_duplicates_of_a_refused_command_are_not_refused_one_after_another(
    front: Front, effects: Effects, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_shop(impatient(front, monkeypatch, 1.0), effects) as app:
        await caller.call(app, "charge", "first")
        front.proxy.stall("up")
        duplicates = [asyncio.create_task(caller.call(app, "charge", "key")) for _ in range(16)]
        await asyncio.wait(duplicates, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(duplicates, timeout=10.0)  # one after another they would take 15 s
        answered = sum(task.done() for task in duplicates)
        front.proxy.flow()
        await asyncio.gather(*duplicates)
    assert answered == 16


async def test_refusals_stay_quick_after_many_of_them(
    front: Front, effects: Effects, caller: Caller
) -> None:
    async with make_shop(front.url, effects) as app:
        await caller.call(app, "charge", "first")
        spent = []  # processor time, since others may keep this machine busy
        with front.proxy.away():
            for many in (60, 600):
                began = time.process_time()
                async with asyncio.timeout(PATIENCE):
                    answers = await asyncio.gather(
                        *(caller.call(app, "charge", f"{many}-{n}") for n in range(many))
                    )
                spent.append(time.process_time() - began)
                assert all(answer.is_refused for answer in answers)
        assert (await caller.insist(app, "charge", "afterwards")).error is None
    assert [effect.key for effect in effects.all()] == ["first", "afterwards"]
    assert spent[1] < 40 * spent[0], (
        "ten times as many cost a hundred times as much if each looks at all that came before"
    )


def impatient(front: Front, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.3) -> str:
    """The URL, with a ledger behind it that waits for an answer for so long instead of 5 s."""
    if front.kind == "redis":
        return f"{front.url}&socket_timeout={seconds}"
    monkeypatch.setattr(postgres_queue, "PATIENCE", seconds)
    return f"{front.url}&connect_timeout=2"
