"""One connection over this process's stdin and stdout: a message is a line.

    fd -> Splitter -> Connection.handle -> Output -> fd

1. *Lines begin in the order they come, and do not hold up each other.* One task leads: it takes line after line. A call that
   waits keeps the task it began in (`asyncio.timeout` and `TaskGroup` inside a handler require that), and a new task leads.
   A call that does not wait costs no task.
2. *Reading is pulled.* The leader reads only when it has begun every line that it has read, when a place is free and when
   the peer reads the answers; so a client that sends more than it reads is held back by its own pipe. While no place is
   free, the leader still lets in one line every `STALL` seconds: it may be the answer or the cancellation that the others
   wait for. If it is a call, `Limits.in_flight` judges it.
3. *The end is clean.* After EOF or a signal, the calls in flight have `grace` seconds to be answered. A second signal, or a
   peer that stops reading, cancels them at once. `cleanup` gets the rest of the grace time. If that hangs after a second
   signal, the process exits `LAST` seconds later. So it does after `cleanup`, if a thread or a handler does not end.
4. *Nothing but the protocol is on stdout.* The two descriptors of the protocol are moved out of reach: handlers, C libraries
   and child processes print to stderr, and read nothing. At the end everything is put back, for a program that goes on.
"""

import _thread
import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextvars import copy_context
from types import FrameType
from typing import Any, Protocol, TypeAlias

from wirecall.errors import UsageError
from wirecall.files import IS_PORTABLE
from wirecall.logs import logger
from wirecall.protocol.messages import Limits, Sending
from wirecall.stepping import beside, start, wake
from wirecall.transports.lines import HIGH, Output, Splitter, ThreadedOutput, open_input

Send: TypeAlias = Callable[[bytes], Awaitable[None]]  # writes one line, adds the newline; raises Gone
Startup: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
Cleanup: TypeAlias = Callable[[float], Awaitable[None]]

STALL = 0.05  # seconds that a line waits for a place
LAST = 2.0  # seconds for cancelled calls to end, and for everything after the second signal


class Connection(Protocol):
    """Serves the lines of one peer."""

    def handle(self, line: bytes, sending: Sending, /) -> "bytes | Coroutine[Any, Any, bytes | None] | None":
        """Return the answer, if there is one, or a coroutine that will return it. `sending` hears how it is sent."""

    def ending(self) -> None:
        """Called when no further line will come: calls that only wait for one can end."""

    async def aclose(self) -> None:
        """Cancel the calls in flight: the connection is over."""


Connect: TypeAlias = Callable[[Send], Connection]


def serve(
    connect: Connect,
    *,
    grace: float = 10.0,
    startup: Startup | None = None,
    cleanup: Cleanup | None = None,
    limits: Limits | None = None,
    portable: bool = IS_PORTABLE,
) -> None:
    """Serve stdin and stdout until EOF, SIGTERM or SIGINT. `portable` reads and writes in threads, as on Windows."""
    if os.isatty(0) and sys.stderr is not None:  # a person has started it, not a client
        print("Serving JSON-RPC and MCP on stdin and stdout, one message per line. Ctrl-C stops it.", file=sys.stderr)
    stop = Stop()
    try:
        with signals(stop), protocol_streams() as (reader, writer), asyncio.Runner() as runner:
            options: Any = {"grace": grace, "startup": startup, "cleanup": cleanup, "limits": limits, "portable": portable}
            error: Exception | None = None
            try:
                runner.run(serve_streams(connect, reader, writer, stop=stop, **options))
            except Exception as failure:
                error = failure
                raise
            finally:
                stop.leave(error)
    finally:
        stop.close()


async def serve_streams(
    connect: Connect,
    reader: int,
    writer: int,
    *,
    grace: float = 10.0,
    startup: Startup | None = None,
    cleanup: Cleanup | None = None,
    limits: Limits | None = None,
    stop: "Stop | None" = None,
    portable: bool = IS_PORTABLE,
) -> None:
    """Serve two file descriptors until EOF or until `stop` is called. They stay open."""
    stop = stop or Stop()
    left = grace
    try:
        if startup is not None:
            starting = asyncio.ensure_future(startup())
            stop.attach(starting.cancel)
            with woken_by_signals():
                await asyncio.wait({starting})
            if starting.cancelled():  # by a signal
                return
            starting.result()
        session = _Session(connect, reader, writer, limits or Limits(), portable)
        stop.attach(session.stop)
        with woken_by_signals():
            left = await session.serve(grace)
    finally:
        if cleanup is not None:
            await cleanup(left)
        stop.detach()


class _Session:
    """The lines that were read, the task that leads, and the calls in flight."""

    def __init__(self, connect: Connect, reader: int, writer: int, limits: Limits, portable: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self.deadline = self._loop.time()
        # Half of the calls that may be in flight: batches count for many, and lines that were let in need a place, too.
        self._places = max(1, limits.in_flight // 2)
        self._cut = Splitter(limits.bytes_in)
        self._lines: deque[bytes] = deque()
        self._calls: set[asyncio.Task[None]] = set()
        self._over: asyncio.Future[None] = self._loop.create_future()  # no further line will begin
        self._freed: asyncio.Future[None] | None = None  # the leader waits for a place, or `serve` for the last call to end
        self._stops = 0
        self._error: BaseException | None = None
        self._output = ThreadedOutput(writer, self._give_up) if portable else Output(writer, self._give_up)
        try:
            self._connection = connect(self._output.send)
            self._input = open_input(reader, portable=portable)
        except BaseException:
            self._output.close()
            raise
        self._context = copy_context()
        self._leader = self._lead_on()

    async def serve(self, grace: float) -> float:
        """Serve until the end of the last call, or of the grace time; return the rest of it."""
        await self._over
        if self._stops < 2:
            self.deadline = self._loop.time() + grace
        self._leader.cancel()
        self._input.close()
        self._connection.ending()
        if self._output.gone:
            self._give_up()
        await self._ended(0)
        await self._output.drain(self.deadline)  # before anything is logged about the end, as stderr may be the same pipe
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
        if self._error is not None:
            raise self._error
        return max(0.0, self.deadline - self._loop.time())

    def stop(self) -> None:
        """Begin no further line; the second time, cancel the calls."""
        self._stops += 1
        wake(self._over, None)
        if self._stops > 1:
            self.deadline = self._loop.time()
            self._give_up()

    def _give_up(self) -> None:
        """Cancel the calls: the peer does not read, or the time is over."""
        self._output.abandon()
        for call in self._calls:
            call.cancel()
        wake(self._over, None)
        wake(self._freed, None)

    async def _ended(self, more: float) -> None:
        """Wait for the calls in flight until the grace time is over, and `more` seconds."""
        while self._calls and (left := self.deadline + more - self._loop.time()) > 0:
            self._freed = self._loop.create_future()
            await asyncio.wait((self._freed,), timeout=left)

    # --- lines

    def _lead_on(self) -> "asyncio.Task[None]":
        # Each leader begins with the context variables of the connection, not with those of the last call.
        leader = start(self._loop, self._lead(), self._context.copy())
        leader.add_done_callback(self._left)
        return leader

    def _left(self, task: "asyncio.Task[None]") -> None:
        self._calls.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = task.exception()
            self._give_up()
        wake(self._freed, None)

    async def _lead(self) -> None:
        """Begin line after line, until one of them waits: that call keeps this task."""
        task, lines, output = asyncio.current_task(), self._lines, self._output
        assert task is not None
        fresh = copy_context()
        while not self._over.done():
            while not lines:
                data = await self._input.read()
                lines.extend(self._cut.feed(data) if data else self._cut.rest())
                if not data and not lines:
                    wake(self._over, None)
                    return
            if len(self._calls) >= self._places or output.size > HIGH:
                await output.shrink(HIGH)
                if len(self._calls) >= self._places:
                    self._freed = self._loop.create_future()
                    await asyncio.wait((self._freed,), timeout=STALL)
            answer, sending = None, Sending()
            try:
                answer = self._connection.handle(lines.popleft(), sending)
                if answer is not None and not isinstance(answer, bytes):
                    answer = await beside(answer, self._lead_another)
            except Exception:
                logger.exception("a line could not be answered")
            except BaseException:  # the peer is gone, or the time is over: entries of an array may have been answered
                sending.lost()
                raise
            if isinstance(answer, bytes):
                output.write(answer, sending)
            else:
                sending.lost()
            if self._leader is not task:
                return
            if task.cancelling() or copy_context() != fresh:  # a handler changed the context; the comparison costs 40 ns
                self._leader = self._lead_on()
                return

    def _lead_another(self) -> None:
        """Let a new task lead: the call of the leader waits."""
        self._calls.add(self._leader)
        self._leader = self._lead_on()


# --- the process: its signals, its stdin and stdout ------------------------------------------------------------------


class Stop:
    """Asks the server to end when it is called, and to end at once when it is called again. Made to be a signal handler."""

    def __init__(self) -> None:
        self._asked = 0
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tell: Callable[[], object] | None = None

    def __call__(self, number: int = 0, _frame: FrameType | None = None) -> None:
        self._asked += 1
        if self._asked == 2:
            # Not a `threading.Thread`: the signal may have come while this very thread holds a lock of that module.
            _thread.start_new_thread(self._watch, (128 + number,))
        if self._tell is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._tell)

    def attach(self, tell: Callable[[], object]) -> None:
        self._loop, self._tell = asyncio.get_running_loop(), tell
        for _ in range(self._asked):  # before there was a loop
            self._loop.call_soon(tell)

    def detach(self) -> None:
        self._tell = None

    def leave(self, error: Exception | None) -> None:
        """Let the process end soon: the server has ended, and its loop waits for threads and for cancelled tasks."""
        why = str(error or "stopping with handlers at work that do not end")
        if self._asked < 2:  # else it ends soon anyway
            threading.Thread(target=self._watch, args=(1 if error else 0, why), daemon=True).start()

    def close(self) -> None:
        self._closed = True

    def _watch(self, code: int, why: str = "") -> None:
        # A thread, or a handler that never gives the loop back or ignores its cancellation, cannot be ended: the process
        # ends, and they end with it.
        time.sleep(LAST)
        if not self._closed:
            if why:
                logger.error("%s", why)
            os._exit(code)


@contextlib.contextmanager
def signals(stop: Stop) -> Iterator[None]:
    """Let SIGTERM and SIGINT call `stop`, so that no KeyboardInterrupt is raised anywhere."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread has signals
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextlib.contextmanager
def woken_by_signals() -> Iterator[None]:
    """Wake the loop on signals: any thread may take one, but handlers run in the main thread, which sleeps in the loop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    woken, waking = socket.socketpair()
    with woken, waking:
        woken.setblocking(False)
        waking.setblocking(False)
        try:
            loop.add_reader(woken, woken.recv, 64)
        except NotImplementedError:  # the loop of Windows, which signals wake anyway
            yield
            return
        before = signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            loop.remove_reader(woken)


@contextlib.contextmanager
def protocol_streams() -> Iterator[tuple[int, int]]:
    """Yield the descriptors of the protocol, which no handler, C library or child process can reach (rule 4)."""
    reader, writer = _moved(0, "stdin"), _moved(1, "stdout")
    stdout = sys.stdout
    _flush(stdout)
    _replace(0, os.open(os.devnull, os.O_RDONLY))
    try:
        os.dup2(2, 1)
    except OSError:  # there is no stderr
        _replace(1, os.open(os.devnull, os.O_WRONLY))
    sys.stdout = sys.stderr
    try:
        yield reader, writer
    finally:
        _flush(stdout)
        try:  # the same for C's stdout, which has a buffer of its own
            import ctypes  # late: only at the end

            ctypes.CDLL(None).fflush(None)
        except (ImportError, OSError, AttributeError, TypeError):
            pass
        sys.stdout = stdout
        _replace(0, reader)
        _replace(1, writer)


def _moved(fd: int, name: str) -> int:
    """Return a duplicate above the three standard descriptors, which children do not inherit."""
    made: list[int] = []
    try:
        while not made or made[-1] < 3:
            made.append(os.dup(fd))  # the lowest free one; children do not inherit it
        return made.pop()
    except OSError:
        raise UsageError(f"{name} is closed.", "the protocol needs stdin and stdout", "start the server with both") from None
    finally:
        for each in made:
            os.close(each)


def _replace(fd: int, by: int) -> None:
    os.dup2(by, fd)
    os.close(by)


def _flush(stream: Any) -> None:
    """Write out what was printed before the change."""
    with contextlib.suppress(AttributeError, ValueError, OSError):  # no stream, a closed one, or no reader
        stream.flush()
