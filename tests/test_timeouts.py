"""Time limits with one timer for many blocks: they end what `asyncio.timeout` would end, and
nothing else.
"""

import asyncio

import pytest

from wirecall.aio import Timeouts


async def test_block_that_takes_longer_ends_and_the_others_continue() -> None:
    timeouts = Timeouts()
    ended = asyncio.Event()

    async def short() -> None:
        with pytest.raises(TimeoutError), timeouts.within(0.001):
            await asyncio.Event().wait()
        ended.set()

    async def long() -> str:
        with timeouts.within(3600):
            await ended.wait()
        return "in time"

    # The long one is first, so that the timer has to be set again for the short one.
    results = await asyncio.gather(long(), short(), short())
    assert results[0] == "in time"
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0


async def test_timer_serves_blocks_that_began_after_it_was_set() -> None:
    timeouts = Timeouts()
    with timeouts.within(0.001):
        pass
    for _ in range(2):
        with pytest.raises(TimeoutError), timeouts.within(0.002):
            await asyncio.Event().wait()


async def test_paused_limit_does_not_end_its_block_until_it_moves() -> None:
    timeouts = Timeouts()
    moved = False

    async def block() -> None:
        nonlocal moved
        with timeouts.within(0.001) as limit:
            limit.move(None)
            with pytest.raises(TimeoutError), timeouts.within(0.002):  # fires after the first limit
                await asyncio.Event().wait()
            moved = True
            limit.move(asyncio.get_running_loop().time())
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await block()
    assert moved


async def test_cancel_from_outside_is_not_a_timeout() -> None:
    timeouts = Timeouts()
    begun = asyncio.Event()

    async def block() -> None:
        with timeouts.within(3600):
            begun.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancel_from_outside_during_a_timeout_remains_a_cancel() -> None:
    timeouts = Timeouts()
    begun = asyncio.Event()

    async def block() -> None:
        with timeouts.within(3600) as limit:
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                limit.expire()  # in the same iteration of the loop
                raise

    task = asyncio.create_task(block())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_timeouts_work_in_one_event_loop_after_another() -> None:
    timeouts = Timeouts()

    async def block() -> None:
        with timeouts.within(3600):
            pass
        with pytest.raises(TimeoutError), timeouts.within(0.001):
            await asyncio.Event().wait()

    for _ in range(2):
        asyncio.run(block())


async def test_error_of_the_block_propagates() -> None:
    with pytest.raises(ZeroDivisionError), Timeouts().within(3600):
        raise ZeroDivisionError
