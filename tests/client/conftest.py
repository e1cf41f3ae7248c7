"""After each test of the client there is no task, no socket, no thread and no process that was not
there before.
"""

import asyncio
import os
import socket
import stat
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import suppress

import psutil  # type: ignore[import-untyped]
import pytest

PATIENCE = 60.0
TCP_CLOSE = 7  # the state of a socket that is not connected and does not listen


@pytest.fixture(autouse=True)
async def nothing_is_left(no_garbage: None) -> AsyncIterator[None]:
    process = psutil.Process()
    children = {child.pid for child in process.children()}
    threads = threading.active_count()
    yield
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while left := _left(process, children, threads):
        assert asyncio.get_running_loop().time() < deadline, left
        await asyncio.sleep(0.01)


def _left(process: psutil.Process, children: set[int], threads: int) -> list[str]:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    started = [child for child in process.children() if child.pid not in children]
    more = threading.active_count() - threads
    return [str(one) for one in (*tasks, *started, *_connections(process))] + [
        f"{more} threads"
    ] * (more > 0)


def _connections(process: psutil.Process) -> list[str]:
    """The TCP sockets of this process that are not closed.

    On Linux by its own files: psutil reads the table of the whole machine, which the connections of
    other tests make long.
    """
    if sys.platform != "linux":
        return [
            str(one)
            for one in process.net_connections("tcp")
            if one.status not in ("TIME_WAIT", "NONE")
        ]
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # another thread has closed it by now
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                one = socket.socket(fileno=number)
                try:
                    is_tcp = (
                        one.family in (socket.AF_INET, socket.AF_INET6)
                        and one.type == socket.SOCK_STREAM
                    )
                    if (
                        is_tcp
                        and one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != TCP_CLOSE
                    ):
                        found.append(str(one))
                finally:
                    one.detach()  # it belongs to other code
    return found
