"""After each test of authorization there is no task that was not there before."""

import asyncio
from collections.abc import AsyncIterator

import pytest

PATIENCE = 60.0


@pytest.fixture(autouse=True)
async def nothing_is_left() -> AsyncIterator[None]:
    yield
    if left := asyncio.all_tasks() - {asyncio.current_task()}:
        _, pending = await asyncio.wait(left, timeout=PATIENCE)
        assert not pending
