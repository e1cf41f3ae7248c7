"""After each test of the client there is no task, no socket, no thread and no process that was not there before."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator

import psutil  # type: ignore[import-untyped]
import pytest

PATIENCE = 60.0


@pytest.fixture(autouse=True)
async def nothing_is_left() -> AsyncIterator[None]:
    process = psutil.Process()
    gc.collect()
    children, threads = {child.pid for child in process.children()}, threading.active_count()
    yield
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while left := _left(process, children, threads):
        assert asyncio.get_running_loop().time() < deadline, left
        await asyncio.sleep(0.01)


def _left(process: psutil.Process, children: set[int], threads: int) -> list[str]:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    started = [child for child in process.children() if child.pid not in children]
    # The sockets of the loop itself are a pair without addresses.
    sockets = [one for one in process.net_connections("tcp") if one.status not in ("TIME_WAIT", "NONE")]
    more = threading.active_count() - threads
    return [str(one) for one in (*tasks, *started, *sockets)] + [f"{more} threads"] * (more > 0)
