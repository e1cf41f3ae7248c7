"""One connection over this process's stdin and stdout: a message is a line.

    fd -> Lines -> Connection.handle -> Output -> fd

1. *Lines begin in the order they come, and hold nobody up.* One task leads: it takes line after line. A call that waits
   keeps the task it began in (`asyncio.timeout` and `TaskGroup` inside a handler require that), and a new task leads on.
   A call that does not wait costs no task.
2. *Reading is pulled.* The leader reads only when it has begun all it has read, when a place is free and when the answers
   are being read; so a client that sends more than it reads is held back by its own pipe. While no place is free, a line
   is let in every `STALL` seconds all the same: it may be the answer or the cancellation that the others wait for. If it is
   a call, `Limits.in_flight` judges it.
3. *Nothing but the protocol is on stdout.* The two descriptors of the protocol are moved out of everybody's reach. What
   handlers, C libraries and child processes print goes to stderr, and what they read is empty.
4. *The end is clean.* After EOF or a signal, the calls under way have `grace` seconds to be answered. A second signal, or a
   peer that stops listening, ends them at once. `cleanup` is given what is left of the grace.
"""

import _thread
import asyncio
import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextvars import copy_context
from types import CoroutineType, FrameType, coroutine
from typing import Any, Protocol, TypeAlias

from wirecall.errors import Gone, UsageError
from wirecall.lanes import resume
from wirecall.logs import logger
from wirecall.policy import Limits

Send: TypeAlias = Callable[[bytes], Awaitable[None]]  # writes one line, adds the newline; raises Gone
Cleanup: TypeAlias = Callable[[float], Awaitable[None]]

CHUNK = 1 << 16  # what a pipe holds
HIGH = 1 << 16  # bytes that wait for the peer: beyond, no line is begun, and who sends waits
STALL = 0.05  # seconds that a line waits for a place
LAST = 2.0  # seconds for what was cancelled to end, and for everything after the second signal


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
    with _signals(stop), _streams() as (reader, writer), asyncio.Runner() as runner:
        runner.run(serve_streams(connect, reader, writer, grace=grace, cleanup=cleanup, limits=limits, stop=stop))


async def serve_streams(
    connect: Connect,
    reader: int,
    writer: int,
    *,
    grace: float = 10.0,
    cleanup: Cleanup | None = None,
    limits: Limits | None = None,
    stop: "Stop | None" = None,
) -> None:
    """Serve two file descriptors until EOF or until `stop` is called. They stay open."""
    stop = stop or Stop()
    left = grace
    try:
        session = _Session(connect, reader, writer, limits or Limits())
        stop.attach(session.stop)
        with _woken_by_signals():
            left = await session.serve(grace)
    finally:
        if cleanup is not None:
            await cleanup(left)
        stop.detach()


class Stop:
    """Called once, it asks the server to end; called twice, to end at once. Made to be called by a signal."""

    def __init__(self) -> None:
        self._asked = 0
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tell: Callable[[], None] | None = None

    def __call__(self, number: int = 0, _frame: FrameType | None = None) -> None:
        self._asked += 1
        if self._asked == 2:
            # Not a `threading.Thread`: the signal may have come while this very thread holds one of that module's locks.
            _thread.start_new_thread(self._watch, (number,))
        if self._tell is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._tell)

    def attach(self, tell: Callable[[], None]) -> None:
        self._loop, self._tell = asyncio.get_running_loop(), tell
        for _ in range(self._asked):  # before there was a loop
            self._loop.call_soon(tell)

    def detach(self) -> None:
        self._tell = None

    def close(self) -> None:
        self._closed = True

    def _watch(self, number: int) -> None:
        """Nobody can end a thread, or a handler that never gives the loop back: the process goes, and they go with it."""
        time.sleep(LAST)
        if not self._closed:
            os._exit(128 + number)


# --- the connection ----------------------------------------------------------------------------------------------------


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
            self._input = _open_input(reader)
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
        leader = self._loop.create_task(self._lead(), context=self._context.copy())
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


class Lines:
    """Cuts what is read into lines. Of a line that is too long, one byte more than is allowed is kept."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rest = bytearray()
        self._skipping = False

    def feed(self, data: bytes) -> list[bytes]:
        pieces = data.split(b"\n")
        rest = pieces.pop()
        if pieces and (self._rest or self._skipping):
            pieces[0] = self._completed(pieces[0])
        lines = [line for piece in pieces if (line := self._line(piece))]
        if rest and not self._skipping:
            self._rest += rest
            if len(self._rest) > self._limit + 1:  # the last byte within the limit may be the \r of the line's end
                self._skipping = True
                lines.append(bytes(self._rest[: self._limit + 1]))
                self._rest.clear()
        return lines

    def rest(self) -> list[bytes]:
        """The last line, which nothing has ended."""
        line = self._line(self._completed(b""))
        return [line] if line else []

    def _completed(self, piece: bytes) -> bytes:
        if self._skipping:
            self._skipping = False
            return b""
        line = bytes(self._rest + piece)
        self._rest.clear()
        return line

    def _line(self, piece: bytes) -> bytes:
        line = piece.removesuffix(b"\r")
        return b"" if line.isspace() else line[: self._limit + 1]


# --- reading -----------------------------------------------------------------------------------------------------------


def _open_input(fd: int) -> "_Polled | _Threaded":
    try:
        return _Polled(fd)
    except (PermissionError, NotImplementedError):  # epoll refuses regular files; some loops refuse all of them
        return _Threaded(fd)


class _Polled:
    """Reads when the loop says that there is something, so that a blocking descriptor may stay one.

    Whether it blocks belongs to all who share it, such as the shell that started us. The callback itself reads: one turn of
    the loop later, what it was told may be no longer true, and reading would block.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[bytes] | None = None
        self._loop.add_reader(fd, self._ready)
        self._watched = True

    async def read(self) -> bytes:
        """Some bytes, none at the end."""
        if not self._watched:
            self._loop.add_reader(self._fd, self._ready)
            self._watched = True
        self._future = self._loop.create_future()
        return await self._future

    def _ready(self) -> None:
        if self._future is None or self._future.done():
            self.close()  # nobody wants it now; the next `read` looks again
            return
        with contextlib.suppress(BlockingIOError):
            self._future.set_result(_read(self._fd))

    def close(self) -> None:
        if self._watched:
            self._loop.remove_reader(self._fd)
            self._watched = False


class _Threaded:
    """Reads in a thread, one chunk whenever it is asked to."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._asked = threading.Semaphore(0)
        self._closed = False
        self._future: asyncio.Future[bytes] | None = None
        threading.Thread(target=self._run, daemon=True).start()

    async def read(self) -> bytes:
        self._future = self._loop.create_future()
        self._asked.release()
        return await self._future

    def _run(self) -> None:
        while self._asked.acquire() and not self._closed:
            data = _read(self._fd)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._give, data)

    def _give(self, data: bytes) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(data)

    def close(self) -> None:
        self._closed = True
        self._asked.release()


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, CHUNK)
    except BlockingIOError:
        raise
    except OSError:  # a terminal hung up, a socket was reset
        return b""


# --- writing -----------------------------------------------------------------------------------------------------------


class Output:
    """Writes lines, each of them whole and at once, or as soon as the peer has read what came before."""

    def __init__(self, fd: int, on_gone: Callable[[], None]) -> None:
        self.size = 0  # bytes that wait
        self.gone = False
        self._fd = fd
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._queue: deque[memoryview] = deque()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._poll: select.poll | None = None
        self._was_blocking = os.get_blocking(fd)
        if _is_shared(fd):
            self._poll = select.poll()
            self._poll.register(fd, select.POLLOUT)
        else:
            os.set_blocking(fd, False)

    def write(self, line: bytes) -> None:
        """Without waiting; who writes much looks at `size`."""
        if self.gone:
            return
        data = line + b"\n"
        done = 0 if self._queue else self._put(data)
        if done < len(data) and not self.gone:
            if not self._queue:
                self._loop.add_writer(self._fd, self._flush)
            self._queue.append(memoryview(data)[done:])
            self.size += len(data) - done

    async def send(self, line: bytes) -> None:
        self.write(line)
        await self.shrink(HIGH)
        if self.gone:
            raise Gone

    async def shrink(self, size: int) -> None:
        """Wait until no more than `size` bytes wait to be read, or nobody reads them."""
        while self.size > size:
            future = self._loop.create_future()
            self._waiting.append((size, future))
            await future

    def abandon(self) -> None:
        """Write nothing more."""
        self.gone = True
        if self._queue:
            self._loop.remove_writer(self._fd)
            self._queue.clear()
            self.size = 0
        self._wake()

    async def drain(self, deadline: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self.shrink(0)

    def close(self) -> None:
        self.abandon()
        os.set_blocking(self._fd, self._was_blocking)

    def _put(self, data: bytes | memoryview) -> int:
        """How much of it could be written now."""
        done = 0
        if len(data) > CHUNK:
            data = memoryview(data)  # what is cut from it is not copied
        try:
            while done < len(data):
                if self._poll is None:
                    done += os.write(self._fd, data[done:])
                elif self._poll.poll(0):
                    done += os.write(self._fd, data[done : done + select.PIPE_BUF])
                else:
                    break
        except BlockingIOError:
            pass
        except OSError as error:
            if not isinstance(error, ConnectionError):  # BrokenPipeError is one: the ordinary end of a peer
                logger.error("stdout cannot be written to: %s", error)
            self.abandon()
            self._on_gone()
        return done

    def _flush(self) -> None:
        while self._queue:
            data = self._queue[0]
            done = self._put(data)
            if self.gone:
                return
            self.size -= done
            if done < len(data):
                self._queue[0] = data[done:]
                break
            self._queue.popleft()
        if not self._queue:
            self._loop.remove_writer(self._fd)
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for size, future in waiting:
            if future.done():
                continue
            if self.size <= size:
                future.set_result(None)
            else:
                self._waiting.append((size, future))


def _is_shared(fd: int) -> bool:
    """Whether stderr is the same: then it must not stop blocking, or whoever logs would meet EAGAIN.

    Such a descriptor is written to in steps of PIPE_BUF bytes, which poll says will not block. A terminal is always shared.
    """
    try:
        return os.isatty(fd) or os.path.sameopenfile(fd, 2)
    except OSError:  # there is no stderr
        return False


# --- the process -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _signals(stop: Stop) -> Iterator[None]:
    """SIGTERM and SIGINT call `stop`, so that no KeyboardInterrupt is raised anywhere."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread has signals
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        stop.close()
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextlib.contextmanager
def _woken_by_signals() -> Iterator[None]:
    """A signal may be taken by any thread, and its handler runs in the main one, which sleeps in the loop: wake it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    woken, waking = socket.socketpair()
    with woken, waking:
        woken.setblocking(False)
        waking.setblocking(False)
        loop.add_reader(woken, woken.recv, 64)
        before = signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            loop.remove_reader(woken)


@contextlib.contextmanager
def _streams() -> Iterator[tuple[int, int]]:
    """The descriptors of the protocol, which no handler, C library or child process can reach (rule 3)."""
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
        _flush_c()
        sys.stdout = stdout
        _replace(0, reader)
        _replace(1, writer)


def _moved(fd: int, name: str) -> int:
    """A duplicate above the three standard descriptors, which children do not inherit."""
    import fcntl

    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    except OSError:
        raise UsageError(f"{name} is closed.", "the protocol needs stdin and stdout", "start the server with both") from None


def _replace(fd: int, by: int) -> None:
    os.dup2(by, fd)
    os.close(by)


def _flush(stream: Any) -> None:
    """What was printed before the change must not come out after it."""
    with contextlib.suppress(AttributeError, ValueError, OSError):  # there is none, it is closed, nobody reads it
        stream.flush()


def _flush_c() -> None:
    """The same for C's stdout, which has a buffer of its own."""
    try:
        import ctypes  # late: only at the end

        ctypes.CDLL(None).fflush(None)
    except (ImportError, OSError, AttributeError, TypeError):
        pass
