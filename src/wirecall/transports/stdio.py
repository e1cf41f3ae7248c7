"""One connection over this process's stdin and stdout: a message is a line.

    fd -> Lines -> Connection.handle -> Output -> fd

1. *Lines begin in the order they come, and hold nobody up.* One task leads: it takes line after line. A call that waits
   keeps the task it began in (`asyncio.timeout` and `TaskGroup` inside a handler require that), and a new task leads on.
   A call that does not wait costs no task.
2. *Reading is pulled.* The leader reads only when it has begun all it has read, when a place is free and when the answers
   are being read; so a client that sends more than it reads is held back by its own pipe. While no place is free, a line
   is let in every `STALL` seconds all the same: it may be the answer or the cancellation that the others wait for. If it is
   a call, `Limits.in_flight` judges it.
3. *The end is clean.* After EOF or a signal, the calls under way have `grace` seconds to be answered. A second signal, or a
   peer that stops listening, ends them at once. `cleanup` is given what is left of the grace.

How stdout is kept for the protocol alone is told in `process`.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import copy_context
from types import CoroutineType, coroutine
from typing import Any, Protocol, TypeAlias

from wirecall.logs import logger
from wirecall.protocol.limits import Limits
from wirecall.stepping import resume, start
from wirecall.transports.descriptors import HIGH, Output, open_input
from wirecall.transports.lines import Lines
from wirecall.transports.process import LAST, Stop, protocol_streams, signals, woken_by_signals

Send: TypeAlias = Callable[[bytes], Awaitable[None]]  # writes one line, adds the newline; raises Gone
Cleanup: TypeAlias = Callable[[float], Awaitable[None]]

STALL = 0.05  # seconds that a line waits for a place


class Connection(Protocol):
    """What serves the lines of one peer."""

    def handle(self, line: bytes) -> "bytes | Coroutine[Any, Any, bytes | None] | None":
        """The answer, if there is one, or a coroutine that will give it."""

    def ending(self) -> None:
        """No further line will come: what only waits for one may end."""

    async def aclose(self) -> None:
        """The connection is over: cancel what is under way."""


Connect: TypeAlias = Callable[[Send], Connection]


def serve(connect: Connect, *, grace: float = 10.0, cleanup: Cleanup | None = None, limits: Limits | None = None) -> None:
    """Serve stdin and stdout until EOF, SIGTERM or SIGINT."""
    stop = Stop()
    with signals(stop), protocol_streams() as (reader, writer), asyncio.Runner() as runner:
        runner.run(serve_streams(connect, reader, writer, grace=grace, cleanup=cleanup, limits=limits, stop=stop))


async def serve_streams(
    connect: Connect,
    reader: int,
    writer: int,
    *,
    grace: float = 10.0,
    cleanup: Cleanup | None = None,
    limits: Limits | None = None,
    stop: Stop | None = None,
) -> None:
    """Serve two file descriptors until EOF or until `stop` is called. They stay open."""
    stop = stop or Stop()
    left = grace
    try:
        session = _Session(connect, reader, writer, limits or Limits())
        stop.attach(session.stop)
        with woken_by_signals():
            left = await session.serve(grace)
    finally:
        if cleanup is not None:
            await cleanup(left)
        stop.detach()


class _Session:
    """The lines that were read, the task that leads, the calls under way, and the end of them all."""

    def __init__(self, connect: Connect, reader: int, writer: int, limits: Limits) -> None:
        self._loop = asyncio.get_running_loop()
        self.deadline = self._loop.time()
        # Half of what may be under way: batches count for many, and lines that were let in need a place, too.
        self._places = max(1, limits.in_flight // 2)
        self._cut = Lines(limits.bytes_in)
        self._lines: deque[bytes] = deque()
        self._calls: set[asyncio.Task[None]] = set()
        self._over: asyncio.Future[None] = self._loop.create_future()  # no further line will begin
        self._freed: asyncio.Future[None] | None = None  # somebody waits for a place, or for the last call to end
        self._stops = 0
        self._error: BaseException | None = None
        self._output = Output(writer, self._give_up)
        try:
            self._connection = connect(self._output.send)
            self._input = open_input(reader)
        except BaseException:
            self._output.close()
            raise
        self._context = copy_context()
        self._leader = self._lead_on()

    async def serve(self, grace: float) -> float:
        """Serve until the end of the last call, or of the grace: gives what is left of it."""
        await self._over
        if self._stops < 2:
            self.deadline = self._loop.time() + grace
        self._leader.cancel()
        self._input.close()
        self._connection.ending()
        if self._output.gone:
            self._give_up()
        await self._ended(0)
        await self._output.drain(self.deadline)  # before anybody prints about the end, as stderr may be the same pipe
        await self._close()
        if self._error is not None:
            raise self._error
        return max(0.0, self.deadline - self._loop.time())

    def stop(self) -> None:
        """The first time: begin nothing more. The second time: end."""
        self._stops += 1
        _resolve(self._over)
        if self._stops > 1:
            self.deadline = self._loop.time()
            self._give_up()

    def _give_up(self) -> None:
        """Nobody is there to be answered, or nobody has the time."""
        self._output.abandon()
        for call in self._calls:
            call.cancel()
        _resolve(self._over)
        _resolve(self._freed)

    async def _close(self) -> None:
        try:
            async with asyncio.timeout(LAST):
                await self._connection.aclose()
        except Exception:
            logger.exception("the connection could not be closed")
        for call in self._calls:
            call.cancel()
        await self._ended(LAST)
        await self._output.drain(self.deadline)
        self._output.close()

    async def _ended(self, more: float) -> None:
        """Wait for the calls under way until the grace is over, and `more` seconds."""
        while self._calls and (left := self.deadline + more - self._loop.time()) > 0:
            self._freed = self._loop.create_future()
            await asyncio.wait((self._freed,), timeout=left)

    # --- lines

    def _lead_on(self) -> "asyncio.Task[None]":
        # Each leader begins with the context variables of the connection, not with those of the call before.
        leader = start(self._loop, self._lead(), self._context.copy())
        leader.add_done_callback(self._left)
        return leader

    def _left(self, task: "asyncio.Task[None]") -> None:
        self._calls.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = task.exception()
            self._give_up()
        _resolve(self._freed)

    async def _lead(self) -> None:
        """Begin line after line, until one of them waits: that one keeps this task."""
        task, lines, output = asyncio.current_task(), self._lines, self._output
        assert task is not None
        fresh = copy_context()
        while not self._over.done() and (lines or await self._read()):
            if len(self._calls) >= self._places or output.size > HIGH:
                await self._room()
            answer = await self._answer(lines.popleft())
            if answer is not None:
                output.write(answer)
            if self._leader is not task:
                return
            if task.cancelling() or copy_context() != fresh:  # a handler left its traces; to compare costs 40 ns
                self._leader = self._lead_on()
                return
        _resolve(self._over)

    async def _read(self) -> bool:
        """Read some more lines. False at the end."""
        while not self._lines:
            data = await self._input.read()
            if not data:
                self._lines.extend(self._cut.rest())
                return bool(self._lines)
            self._lines.extend(self._cut.feed(data))
        return True

    async def _room(self) -> None:
        await self._output.shrink(HIGH)
        if len(self._calls) >= self._places:
            self._freed = self._loop.create_future()
            await asyncio.wait((self._freed,), timeout=STALL)

    @coroutine
    def _answer(self, line: bytes) -> Generator[Any, Any, bytes | None]:
        try:
            answer = self._connection.handle(line)
            if type(answer) is not CoroutineType:
                return answer  # type: ignore[return-value]
            try:
                awaited = answer.send(None)
            except StopIteration as finished:
                return finished.value  # type: ignore[no-any-return]
            self._calls.add(self._leader)
            self._leader = self._lead_on()
            return (yield from resume(answer, awaited))  # type: ignore[no-any-return]
        except Exception:
            logger.exception("a line could not be answered")
            return None


def _resolve(future: "asyncio.Future[None] | None") -> None:
    if future is not None and not future.done():
        future.set_result(None)
