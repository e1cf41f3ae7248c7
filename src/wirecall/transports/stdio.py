"""One connection over this process's stdin and stdout.

    fd -> Splitter -> Connection.handle -> Output -> fd

A message is a line, or has a header: `transports.framing` decides. The text below says "line" for
both. `transports.sockets` serves each of its connections with the same `Session`.

1. *Lines begin in the order of arrival, and do not block each other.* One task leads: it handles
   line after line. A call that waits keeps the task it began in (`asyncio.timeout` and `TaskGroup`
   inside a handler require that), and a new task leads. A call that does not wait costs no task.
2. *Backpressure.* The leader reads only when it has begun every line that it has read, when a place
   is free and when the peer reads the answers; so the pipe blocks a client that sends more than it
   reads. While no place is free, the leader still begins one line every `STALL` seconds: it may be
   the answer or the cancellation that the others wait for. If it is a call, `Limits.in_flight`
   decides about it.
3. *Clean shutdown.* After EOF or a signal, the calls in flight have `grace` seconds to be answered.
   A second signal, or a peer that stops reading, cancels them at once. `cleanup` gets the rest of
   the grace time. If it hangs after a second signal, the process exits `LAST` seconds later. It
   also does so after `cleanup`, if a thread or a handler does not end.
4. *Only the protocol is on stdout.* The two descriptors of the protocol are moved out of reach:
   handlers, C libraries and child processes print to stderr, and read nothing. At the end
   everything is restored, for a program that continues.
5. *A stream that cannot be cut into messages ends.* The client gets one error without an id that
   says why. Then everything happens as after EOF.
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

from wirecall.aio import beside, start, wake
from wirecall.errors import ParseError, UsageError
from wirecall.files import IS_PORTABLE
from wirecall.limits import Limits
from wirecall.logs import announce, logger
from wirecall.protocol.messages import encode, failure
from wirecall.protocol.receipt import Receipt
from wirecall.transports.framing import LINES, Framing
from wirecall.transports.lines import HIGH, Output, ThreadedOutput, open_input
from wirecall.transports.workers import HANG_UP, log_unused, stopping_signals, unused_signals

# Writes one line, adds the newline; raises Gone.
Send: TypeAlias = Callable[[bytes], Awaitable[None]]
Startup: TypeAlias = Callable[[], Coroutine[Any, Any, None]]
Cleanup: TypeAlias = Callable[[float], Awaitable[None]]

# Seconds that a line waits for a free place.
STALL = 0.05
# Seconds for cancelled calls to end, and for everything after the second signal.
LAST = 2.0


class Connection(Protocol):
    """Serves the lines of one peer."""

    def handle(
        self, line: bytes, receipt: Receipt, /
    ) -> "bytes | Coroutine[Any, Any, bytes | None] | None":
        """Return the answer, None, or a coroutine for either.

        `receipt` learns whether it is sent.
        """

    def ending(self) -> None:
        """Called after the last line: calls that only wait for another one can end."""

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
    framing: Framing = LINES,
    portable: bool = IS_PORTABLE,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Serve stdin and stdout until EOF, SIGTERM, SIGINT or SIGHUP.

    `portable` reads and writes in threads, as on Windows. `loop_factory` makes the event loop.
    """
    if os.isatty(0) and sys.stderr is not None:  # a person has started it, not a client
        how = "one message per line"
        if framing is not LINES:
            how = "each message after a header with Content-Length"
        announce(f"Serving JSON-RPC and MCP on stdin and stdout, {how}. Ctrl-C stops it.")
    stop = Stop()
    try:
        runs = asyncio.Runner(loop_factory=loop_factory)
        with signals(stop), protocol_streams() as (reader, writer), runs as runner:
            options: Any = {
                "grace": grace,
                "startup": startup,
                "cleanup": cleanup,
                "limits": limits,
                "framing": framing,
                "portable": portable,
            }
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
    framing: Framing = LINES,
    portable: bool = IS_PORTABLE,
) -> None:
    """Serve two file descriptors until EOF or until `stop` is called. They stay open."""

    def session() -> Session:
        return Session(connect, reader, writer, limits or Limits(), portable, framing)

    await serve_work(session, grace=grace, startup=startup, cleanup=cleanup, stop=stop or Stop())


class Work(Protocol):
    """What a server does between its startup and its cleanup."""

    def stop(self) -> None:
        """Begin nothing more; the second time, end at once."""

    async def serve(self, grace: float) -> float:
        """Serve until the end, or until `stop`; return the rest of the grace time."""
        ...


async def serve_work(
    make: Callable[[], Work],
    *,
    grace: float,
    startup: Startup | None,
    cleanup: Cleanup | None,
    stop: "Stop",
) -> None:
    """Run a server from its startup to its cleanup."""
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
        work = make()
        stop.attach(work.stop)
        with woken_by_signals():
            left = await work.serve(grace)
    finally:
        if cleanup is not None:
            await cleanup(left)
        stop.detach()


class Session:
    """The lines that were read, the task that leads, and the calls in flight."""

    def __init__(
        self,
        connect: Connect,
        reader: int,
        writer: int,
        limits: Limits,
        portable: bool,
        framing: Framing = LINES,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.deadline = self._loop.time()
        # Half of the calls that may be in flight: batches count for many, and lines begun after a
        # stall need a place, too.
        self._places = max(1, limits.in_flight // 2)
        self._splitter = framing.splitter(limits.bytes_in)
        self._lines: deque[bytes] = deque()
        self._calls: set[asyncio.Task[None]] = set()
        # Done when no more lines will begin.
        self._over: asyncio.Future[None] = self._loop.create_future()
        # Done when a place is free, or a call has ended.
        self._freed: asyncio.Future[None] | None = None
        # How often the server was asked to stop.
        self._stops = 0
        self._error: BaseException | None = None
        kind = ThreadedOutput if portable else Output
        self._output = kind(writer, self._give_up, framing.join)
        try:
            self._connection = connect(self._output.send)
            self._input = open_input(reader, portable=portable)
        except BaseException:
            self._output.close()
            raise
        self._context = copy_context()
        self._leader = self._lead_on()

    async def serve(self, grace: float) -> float:
        """Serve until the last call or the grace time ends; return the rest of the grace time."""
        await self._over
        if self._stops < 2:
            self.deadline = self._loop.time() + grace
        self._leader.cancel()
        self._input.close()
        self._connection.ending()
        if self._output.gone:
            self._give_up()
        await self._ended(0)
        # Before logging anything: stderr may be the same pipe.
        await self._output.drain(self.deadline)
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
        """Begin no more lines; the second time, cancel the calls."""
        self._stops += 1
        wake(self._over, None)
        if self._stops > 1:
            self.deadline = self._loop.time()
            self._give_up()

    def _give_up(self) -> None:
        """Cancel the calls: the peer does not read, or the time limit has passed."""
        self._output.abandon()
        for call in self._calls:
            call.cancel()
        wake(self._over, None)
        wake(self._freed, None)

    async def _ended(self, more: float) -> None:
        """Wait for the calls in flight until `more` seconds after the grace time."""
        while self._calls and (left := self.deadline + more - self._loop.time()) > 0:
            self._freed = self._loop.create_future()
            await asyncio.wait((self._freed,), timeout=left)

    # --- lines ------------------------------------------------------------------------------------

    def _lead_on(self) -> "asyncio.Task[None]":
        # Each leader begins with the context variables of the connection, not with those of the
        # last call.
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
        task = asyncio.current_task()
        lines = self._lines
        output = self._output
        assert task is not None
        fresh = copy_context()
        while not self._over.done():
            while not lines:
                if self._splitter.broken is not None:
                    self._break(self._splitter.broken)
                    return
                data = await self._input.read()
                if data:
                    lines.extend(self._splitter.feed(data))
                    continue
                lines.extend(self._splitter.rest())
                if not lines and self._splitter.broken is None:
                    wake(self._over, None)
                    return
            if len(self._calls) >= self._places or output.size > HIGH:
                await output.shrink(HIGH)
                if len(self._calls) >= self._places:
                    self._freed = self._loop.create_future()
                    await asyncio.wait((self._freed,), timeout=STALL)
            answer = None
            receipt = Receipt(session=self)
            try:
                answer = self._connection.handle(lines.popleft(), receipt)
                if answer is not None and not isinstance(answer, bytes):
                    answer = await beside(answer, self._lead_another)
            except Exception:
                logger.exception("a line could not be answered")
            # Peer gone, or time is up: entries of an array may have been answered.
            except BaseException:
                receipt.lost()
                raise
            if isinstance(answer, bytes):
                output.write(answer, receipt)
            else:
                receipt.lost()
            if self._leader is not task:
                return
            # A handler changed the context; the comparison costs 40 ns.
            if task.cancelling() or copy_context() != fresh:
                self._leader = self._lead_on()
                return

    def _break(self, reason: str) -> None:
        """End a stream that cannot be cut into messages, and say why (rule 5)."""
        logger.warning("a client sent bytes that cannot be read: %s", reason)
        self._output.write(encode(failure(None, ParseError(reason))))
        wake(self._over, None)

    def _lead_another(self) -> None:
        """Let a new task lead: the call of the leader waits."""
        self._calls.add(self._leader)
        self._leader = self._lead_on()


# --- the process: its signals, its stdin and stdout -----------------------------------------------


class Stop:
    """A signal handler that asks the server to end, and to end at once when it is called again."""

    def __init__(self) -> None:
        self._asked = 0
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        # Stops what runs in the loop.
        self._on_stop: Callable[[], object] | None = None

    def __call__(self, number: int = 0, _frame: FrameType | None = None) -> None:
        # A closed terminal sends several; no person is waiting.
        if self._asked and number == HANG_UP:
            return
        self._asked += 1
        if self._asked == 2:
            # Not a `threading.Thread`: the signal may have arrived while this very thread holds a
            # lock of that module.
            _thread.start_new_thread(self._watch, (128 + number,))
        if self._on_stop is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._on_stop)

    def note(self, number: int, _frame: FrameType | None) -> None:
        """Log a signal that is ignored. A handler interrupts anything, so the loop logs it."""
        if self._loop is not None and self._on_stop is not None:
            self._loop.call_soon_threadsafe(log_unused, number)

    def attach(self, on_stop: Callable[[], object]) -> None:
        """Call a function in the running loop for each signal, earlier ones included."""
        self._loop = asyncio.get_running_loop()
        self._on_stop = on_stop
        for _ in range(self._asked):
            self._loop.call_soon(on_stop)

    def detach(self) -> None:
        """Call no function any more."""
        self._on_stop = None

    def leave(self, error: Exception | None) -> None:
        """Let the process end soon: the server has ended.

        Its loop waits for threads and for cancelled tasks.
        """
        if self._asked >= 2:
            return  # it ends soon anyway
        why = str(error or "stopping with handlers at work that do not end")
        code = int(error is not None)
        threading.Thread(target=self._watch, args=(code, why), daemon=True).start()

    def close(self) -> None:
        """Let the process live: everything has ended."""
        self._closed = True

    def _watch(self, code: int, why: str = "") -> None:
        # A thread, or a handler that blocks the loop or ignores its cancellation, cannot be
        # stopped: the process exits, and they end with it.
        time.sleep(LAST)
        if not self._closed:
            if why:
                logger.error("%s", why)
            os._exit(code)


@contextlib.contextmanager
def signals(stop: Stop) -> Iterator[None]:
    """Let SIGTERM, SIGINT and SIGHUP call `stop`, so that KeyboardInterrupt is never raised."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread has signals
        return
    before = {number: signal.signal(number, stop) for number in stopping_signals()}
    before |= {number: signal.signal(number, stop.note) for number in unused_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextlib.contextmanager
def woken_by_signals() -> Iterator[None]:
    """Wake the loop on signals.

    Any thread may take one, but handlers run in the main thread, which sleeps in the loop.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    woken, waking = socket.socketpair()
    with woken, waking:
        woken.setblocking(False)
        waking.setblocking(False)
        try:
            # A function of Python's, since handlers run between its steps: uvloop has none itself.
            loop.add_reader(woken, lambda: woken.recv(64))
        except NotImplementedError:  # Windows' loop, which signals wake anyway
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
    """Yield the descriptors of the protocol, which only this module can reach (rule 4)."""
    reader = _moved(0, "stdin")
    writer = _moved(1, "stdout")
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
        try:  # the same for C's stdout, which has its own buffer
            import ctypes  # imported only at the end

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
        raise UsageError(
            f"{name} is closed.",
            "the protocol needs stdin and stdout",
            "start the server with both",
        ) from None
    finally:
        for each in made:
            os.close(each)


def _replace(fd: int, by: int) -> None:
    os.dup2(by, fd)
    os.close(by)


def _flush(stream: Any) -> None:
    """Write what was printed before the change."""
    # No stream, a closed one, or no reader.
    with contextlib.suppress(AttributeError, ValueError, OSError):
        stream.flush()
