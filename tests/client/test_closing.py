"""A start or a close that is interrupted leaves nothing behind: no process, no pipe, no reader."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from tests.client.peers import PATIENCE, until
from wirecall.client.client import Client
from wirecall.client.delivery import Delivery, Dialect, Options
from wirecall.client.exchange import Exchange
from wirecall.client.links import LineLink
from wirecall.errors import CallFailed, NotSent
from wirecall.mcp.client.links import McpLineLink
from wirecall.transports.child import Child

WAITS = [sys.executable, "-c", "import sys; sys.stdin.read()"]
# It has its own child, which ignores the end of its input.
PARENT = """
import pathlib, subprocess, sys
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1] + ".new").write_text(str(other.pid))
pathlib.Path(sys.argv[1] + ".new").rename(sys.argv[1])
sys.stdin.read()
"""


class Gates:
    """Events by name, for two tasks that have to act in one order."""

    def __init__(self) -> None:
        self._events: dict[str, asyncio.Event] = {}

    def __getattr__(self, name: str) -> asyncio.Event:
        return self._events.setdefault(name, asyncio.Event())


def ignore(_value: object) -> None: ...


async def interrupted(task: "asyncio.Task[Any]", times: int = 1) -> None:
    """Cancel a task, and wait for its end."""
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.wait([task], timeout=PATIENCE)
    assert task.cancelled()


# --- the start of a child -------------------------------------------------------------------------


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("cancels", [1, 2])
async def test_child_is_killed_if_its_start_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, portable: bool, cancels: int
) -> None:
    """With the processes that it has started, and however often the caller is cancelled."""
    gates = Gates()
    started: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def slow_start(*command: str, **options: Any) -> asyncio.subprocess.Process:
        process = await start(*command, **options)
        started.append(process)
        gates.started.set()
        await gates.go_on.wait()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slow_start)
    pid_file = tmp_path / "pid"
    child = Child([sys.executable, "-c", PARENT, str(pid_file)], portable=portable)
    opening = asyncio.create_task(child.open(ignore, ignore))
    await gates.started.wait()
    await until(pid_file.exists)
    opening.cancel()
    if cancels == 2:
        await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait([opening])
    gates.go_on.set()
    await asyncio.wait([opening])
    assert opening.cancelled()
    async with asyncio.timeout(PATIENCE):
        await started[0].wait()
    other = int(pid_file.read_text())
    await until(lambda: not psutil.pid_exists(other) or psutil.Process(other).status() == "zombie")


async def test_child_does_not_survive_a_cancel_in_any_turn_of_its_start() -> None:
    """The cancel arrives one turn of the loop later each time, until the start is faster."""
    here = psutil.Process()
    before = {one.pid for one in here.children()}
    turns = 0
    is_faster = False
    while not is_faster:
        child = Child(WAITS, grace=PATIENCE)
        opening = asyncio.create_task(child.open(ignore, ignore))
        for _ in range(turns):
            await asyncio.sleep(0)
        is_faster = not opening.cancel()
        await asyncio.wait([opening])
        if is_faster:
            await child.aclose()
        await until(lambda: not [one for one in here.children() if one.pid not in before])
        turns += 1


async def test_child_that_cannot_be_started_leaves_no_descriptor() -> None:
    here = psutil.Process()
    with pytest.raises(NotSent, match="cannot be started"):
        await Child(["/nowhere/server"]).open(ignore, ignore)
    await asyncio.sleep(0)
    before = here.num_fds()
    for _ in range(10):
        with pytest.raises(NotSent, match="cannot be started"):
            await Child(["/nowhere/server"]).open(ignore, ignore)
    await until(lambda: here.num_fds() <= before)


# --- the close of a link --------------------------------------------------------------------------


class SlowPipe:
    """A pipe that waits at gates while it opens and while it closes."""

    def __init__(self, gates: Gates, made: "list[SlowPipe]", is_deaf: bool = False) -> None:
        self._gates = gates
        self._is_deaf = is_deaf
        self.is_open = False
        made.append(self)

    async def open(
        self, _on_line: Callable[[bytes], None], on_end: Callable[[CallFailed], None]
    ) -> None:
        self.end = on_end
        self._gates.opening.set()
        try:
            await self._gates.may_open.wait()
        except asyncio.CancelledError:
            if not self._is_deaf:
                raise
        self.is_open = True

    async def write(self, _line: bytes) -> None: ...

    async def aclose(self) -> None:
        self._gates.closing.set()
        try:
            await self._gates.may_close.wait()
        finally:
            self.is_open = False


@pytest.mark.parametrize("is_deaf", [False, True], ids=["stops", "opens anyway"])
async def test_link_closes_a_pipe_that_is_being_opened(is_deaf: bool) -> None:
    """A call that waits for the same pipe opens no other one."""
    gates = Gates()
    made: list[SlowPipe] = []
    link = LineLink(lambda: SlowPipe(gates, made, is_deaf))
    gates.may_close.set()
    calls = [asyncio.create_task(link.exchange(Exchange(b"{}", [], False))) for _ in range(3)]
    await gates.opening.wait()
    async with asyncio.timeout(PATIENCE):
        await link.aclose()
        assert [pipe.is_open for pipe in made] == [False]
        for call in calls:
            with pytest.raises(NotSent, match="the client is closed"):
                await call
    assert len(made) == 1


async def test_link_closes_a_pipe_that_opens_in_the_turn_of_its_close() -> None:
    gates = Gates()
    made: list[SlowPipe] = []
    link = LineLink(lambda: SlowPipe(gates, made))
    gates.may_close.set()
    call = asyncio.create_task(link.exchange(Exchange(b"{}", [], False)))
    await gates.opening.wait()
    gates.may_open.set()
    async with asyncio.timeout(PATIENCE):
        await link.aclose()
        with pytest.raises(NotSent, match="the client is closed"):
            await call
    assert [pipe.is_open for pipe in made] == [False]


async def test_link_closes_a_pipe_that_is_being_opened_even_if_its_close_is_cancelled() -> None:
    gates = Gates()
    made: list[SlowPipe] = []
    link = LineLink(lambda: SlowPipe(gates, made, is_deaf=True))
    call = asyncio.create_task(link.exchange(Exchange(b"{}", [], False)))
    await gates.opening.wait()
    closing = asyncio.create_task(link.aclose())
    await gates.closing.wait()  # by the call, whose pipe is of no use any more
    await interrupted(closing)
    gates.may_close.set()
    with pytest.raises(NotSent, match="the client is closed"):
        await call
    assert [pipe.is_open for pipe in made] == [False]


@pytest.mark.parametrize("cancels", [1, 2, 3])
async def test_link_closes_every_pipe_even_if_its_close_is_cancelled(cancels: int) -> None:
    gates = Gates()
    made: list[SlowPipe] = []
    link: Any = LineLink(lambda: SlowPipe(gates, made))
    gates.may_open.set()
    for _ in range(3):
        pipe = SlowPipe(gates, made)
        await pipe.open(ignore, ignore)
        link._over.append(pipe)
    closing = asyncio.create_task(link.aclose())
    await gates.closing.wait()
    for _ in range(cancels):
        closing.cancel()
        await asyncio.sleep(0)
    gates.may_close.set()
    await asyncio.wait([closing], timeout=PATIENCE)
    assert closing.cancelled()
    assert [pipe.is_open for pipe in made] == [False] * 3


async def test_link_that_is_closed_opens_no_pipe_for_a_late_call() -> None:
    gates = Gates()
    made: list[SlowPipe] = []
    link = LineLink(lambda: SlowPipe(gates, made))
    gates.may_open.set()
    gates.may_close.set()
    await link.open()
    await link.aclose()
    with pytest.raises(NotSent, match="the client is closed"):
        await link.exchange(Exchange(b"{}", [], False))
    assert len(made) == 1
    await link.open()  # but it may be opened again
    assert [pipe.is_open for pipe in made] == [False, True]
    await link.aclose()


async def test_mcp_link_closes_its_pipe_even_if_its_close_is_cancelled() -> None:
    """While it waits for the messages that report callers that stopped waiting."""
    gates = Gates()
    made: list[SlowPipe] = []
    link: Any = McpLineLink(lambda: SlowPipe(gates, made), 1000)
    gates.may_open.set()
    gates.may_close.set()
    await link.open()

    async def report() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            gates.stopping.set()
            await gates.may_stop.wait()

    reporting = asyncio.create_task(report())
    await asyncio.sleep(0)
    link._cancels.add(reporting)
    closing = asyncio.create_task(link.aclose())
    await gates.stopping.wait()
    await interrupted(closing)
    await interrupted(reporting)
    assert [pipe.is_open for pipe in made] == [False]


# --- the close of a client ------------------------------------------------------------------------


class SlowEnd(Dialect):
    """A dialect that waits at a gate while it ends."""

    def __init__(self, gates: Gates) -> None:
        self._gates = gates

    async def end(self) -> None:
        self._gates.ending.set()
        await self._gates.may_end.wait()


async def test_client_closes_its_link_even_if_its_close_is_cancelled() -> None:
    gates = Gates()
    made: list[SlowPipe] = []
    client = Client(LineLink(lambda: SlowPipe(gates, made)), SlowEnd(gates), Options())
    gates.may_open.set()
    gates.may_close.set()
    await client.open()
    closing = asyncio.create_task(client.aclose())
    await gates.ending.wait()
    await interrupted(closing)
    assert [pipe.is_open for pipe in made] == [False]


async def test_client_closes_its_link_even_if_the_end_of_merged_calls_is_cancelled() -> None:
    gates = Gates()
    made: list[SlowPipe] = []
    link = LineLink(lambda: SlowPipe(gates, made))
    delivery: Any = Delivery(link, Dialect(), Options(coalesce=0.001))
    gates.may_open.set()
    gates.may_close.set()
    await delivery.open()

    async def send() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            gates.stopping.set()
            await gates.may_stop.wait()

    sending = asyncio.create_task(send())
    await asyncio.sleep(0)
    delivery._coalescer._sending.add(sending)
    closing = asyncio.create_task(delivery.aclose())
    await gates.stopping.wait()
    await interrupted(closing)
    await interrupted(sending)
    assert [pipe.is_open for pipe in made] == [False]
