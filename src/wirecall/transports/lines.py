"""Lines on file descriptors: read, cut and written from the event loop.

1. Whether a descriptor blocks is a setting of all processes that share it, such as the shell that
   started this one. So the setting of an input stays as it is, and that of an output changes only
   if stderr does not share it, and changes back.
2. A reader requests every piece, so the pipe blocks a peer that sends too much.
3. A line is written whole and at once, or waits until the peer has read the lines before. `size`
   counts the waiting bytes.
"""

import asyncio
import contextlib
import os
import queue
import select
import threading
from collections import deque
from collections.abc import Callable

from wirecall.aio import wake
from wirecall.errors import Gone
from wirecall.files import IS_PORTABLE
from wirecall.logs import logger
from wirecall.protocol.receipt import Receipt

# The bytes that a pipe holds.
CHUNK = 1 << 16
# Bytes that wait for the peer. Beyond this, no line begins and senders wait.
HIGH = 1 << 16


# --- reading --------------------------------------------------------------------------------------


def open_input(fd: int, *, portable: bool = IS_PORTABLE) -> "Polled | Threaded":
    """Read a descriptor.

    `portable` reads in a thread, which works with every loop and every kind of descriptor.
    """
    if portable:
        return Threaded(fd)
    try:
        return Polled(fd)
    # Epoll refuses regular files; some loops refuse all of them.
    except (PermissionError, NotImplementedError):
        return Threaded(fd)


class Polled:
    """Reads when the loop reports bytes, so that a blocking descriptor can stay blocking.

    The callback itself reads: one turn of the loop later another process may have taken the bytes,
    and reading would block.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[bytes] | None = None
        self._loop.add_reader(fd, self._ready)
        self._watched = True

    async def read(self) -> bytes:
        """Return some bytes, none at the end."""
        if not self._watched:
            self._loop.add_reader(self._fd, self._ready)
            self._watched = True
        self._future = self._loop.create_future()
        return await self._future

    def _ready(self) -> None:
        if self._future is None or self._future.done():
            self.close()  # no `read` waits; the next one watches again
            return
        with contextlib.suppress(BlockingIOError):
            self._future.set_result(_read(self._fd))

    def close(self) -> None:
        if self._watched:
            self._loop.remove_reader(self._fd)
            self._watched = False


class Threaded:
    """Reads in a thread, one chunk for each `read`.

    The thread closes a descriptor that is `owned`, when it ends.
    """

    def __init__(self, fd: int, *, owned: bool = False) -> None:
        self._owned = owned
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._asked = threading.Semaphore(0)
        self._closed = False
        self._future: asyncio.Future[bytes] | None = None
        threading.Thread(target=self._run, daemon=True).start()

    async def read(self, _most: int = CHUNK) -> bytes:
        """Return some bytes, none at the end."""
        self._future = self._loop.create_future()
        self._asked.release()
        return await self._future

    def _run(self) -> None:
        while self._asked.acquire() and not self._closed:
            data = _read(self._fd)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._give, data)
        if self._owned:
            os.close(self._fd)

    def _give(self, data: bytes) -> None:
        wake(self._future, data)

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


class Splitter:
    """Cuts bytes into lines.

    A line ends with a newline, with or without a carriage return before it, and the last one with
    the stream; empty lines are skipped. A line that is too long is cut one byte beyond the limit,
    so that its reader sees that it is too long.
    """

    # Bytes can always be cut into lines. Other framings have streams that cannot be read further.
    broken: str | None = None

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rest = bytearray()
        self._skipping = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that these bytes complete."""
        pieces = data.split(b"\n")
        rest = pieces.pop()
        if pieces and (self._rest or self._skipping):
            pieces[0] = self._completed(pieces[0])
        lines = [line for piece in pieces if (line := self._line(piece))]
        if rest and not self._skipping:
            self._rest += rest
            # The last byte within the limit may be the \r of the line's end.
            if len(self._rest) > self._limit + 1:
                self._skipping = True
                lines.append(bytes(self._rest[: self._limit + 1]))
                self._rest.clear()
        return lines

    def rest(self) -> list[bytes]:
        """Return the last line, which has no newline."""
        line = self._line(self._completed(b""))
        if not line:
            return []
        return [line]

    def _completed(self, piece: bytes) -> bytes:
        if self._skipping:
            self._skipping = False
            return b""
        line = bytes(self._rest + piece)
        self._rest.clear()
        return line

    def _line(self, piece: bytes) -> bytes:
        line = piece.removesuffix(b"\r")
        if line.isspace():
            return b""
        return line[: self._limit + 1]


# --- writing --------------------------------------------------------------------------------------


def join_line(message: bytes) -> bytes:
    """Return a message as a line."""
    return message + b"\n"


class Output:
    """Writes lines, each whole and at once, or as soon as the peer has read the lines before.

    `join` returns a message as another framing sends it.
    """

    def __init__(
        self, fd: int, on_gone: Callable[[], None], join: Callable[[bytes], bytes] = join_line
    ) -> None:
        self._join = join
        # The bytes that are not written yet.
        self.size = 0
        # Whether the peer has gone, or nothing more is written.
        self.gone = False
        self._fd = fd
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[memoryview, Receipt | None]] = deque()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._poll: select.poll | None = None
        self._was_blocking = os.get_blocking(fd)
        # A descriptor that stderr shares must stay blocking, or logging would fail with EAGAIN. It
        # is written in steps of PIPE_BUF bytes, which do not block when poll reports it writable. A
        # terminal is always shared.
        try:
            is_shared = os.isatty(fd) or os.path.sameopenfile(fd, 2)
        except OSError:  # there is no stderr
            is_shared = False
        if is_shared:
            self._poll = select.poll()
            self._poll.register(fd, select.POLLOUT)
        else:
            os.set_blocking(fd, False)

    def write(self, line: bytes, receipt: Receipt | None = None) -> None:
        """Write without waiting.

        `size` counts the pending bytes; `receipt` is notified at the end.
        """
        data = self._join(line)
        done = 0
        if not self._queue and not self.gone:
            done = self._put(data)
        if self.gone:
            if receipt is not None:
                receipt.lost()
        elif done < len(data):
            if not self._queue:
                self._loop.add_writer(self._fd, self._flush)
            self._queue.append((memoryview(data)[done:], receipt))
            self.size += len(data) - done
        elif receipt is not None:
            receipt.written()

    async def send(self, line: bytes) -> None:
        """Write a line, and wait while too many bytes are pending; Gone if the peer has gone."""
        self.write(line)
        await self.shrink(HIGH)
        if self.gone:
            raise Gone

    async def shrink(self, size: int) -> None:
        """Wait until at most `size` bytes are not written yet, or the peer has gone."""
        while self.size > size:
            future = self._loop.create_future()
            self._waiting.append((size, future))
            await future

    def abandon(self) -> None:
        """Write nothing more."""
        self.gone = True
        if self._queue:
            self._loop.remove_writer(self._fd)
            for _, receipt in self._queue:
                if receipt is not None:
                    receipt.lost()
            self._queue.clear()
            self.size = 0
        self._wake()

    async def drain(self, deadline: float) -> None:
        """Wait until all bytes are written, or until a loop time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self.shrink(0)

    def close(self) -> None:
        """Write nothing more, and restore the descriptor."""
        self.abandon()
        os.set_blocking(self._fd, self._was_blocking)

    def _put(self, data: bytes | memoryview) -> int:
        """Write as many bytes as possible now; return how many."""
        done = 0
        if len(data) > CHUNK:
            data = memoryview(data)  # slices of it are not copies
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
            # BrokenPipeError is one: the ordinary end of a peer.
            if not isinstance(error, ConnectionError):
                logger.error("the answers cannot be written: %s", error)
            self.abandon()
            self._on_gone()
        return done

    def _flush(self) -> None:
        while self._queue:
            data, receipt = self._queue[0]
            done = self._put(data)
            if self.gone:
                return
            self.size -= done
            if done < len(data):
                self._queue[0] = data[done:], receipt
                break
            self._queue.popleft()
            if receipt is not None:
                receipt.written()
        if not self._queue:
            self._loop.remove_writer(self._fd)
        self._wake()

    def _wake(self) -> None:
        waiting = self._waiting
        self._waiting = []
        for size, future in waiting:
            if future.done():
                continue
            if self.size <= size:
                future.set_result(None)
            else:
                self._waiting.append((size, future))


class ThreadedOutput(Output):
    """An `Output` that writes in a thread, for event loops that cannot watch pipes.

    The descriptor blocks.
    """

    def __init__(
        self, fd: int, on_gone: Callable[[], None], join: Callable[[bytes], bytes] = join_line
    ) -> None:
        self._join = join
        self.size = 0
        self.gone = False
        self._fd = fd
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._waiting = []
        self._lines: queue.SimpleQueue[tuple[bytes, Receipt | None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def write(self, line: bytes, receipt: Receipt | None = None) -> None:
        if self.gone:
            if receipt is not None:
                receipt.lost()
            return
        data = self._join(line)
        self.size += len(data)
        self._lines.put((data, receipt))

    def abandon(self) -> None:
        self.gone = True
        self.size = 0
        self._wake()

    def close(self) -> None:
        self.abandon()
        self._lines.put(None)

    def _run(self) -> None:
        while (item := self._lines.get()) is not None:
            data, receipt = item
            error: OSError | None = None
            try:
                done = 0
                while done < len(data) and not self.gone:
                    done += os.write(self._fd, data[done:])
                is_written = done == len(data)
            except OSError as raised:
                error = raised
                is_written = False
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._ended, len(data), receipt, is_written, error)

    def _ended(
        self, size: int, receipt: Receipt | None, is_written: bool, error: OSError | None
    ) -> None:
        """Called in the loop when a line is written, or cannot be."""
        self.size = max(0, self.size - size)
        if receipt is not None:
            if is_written:
                receipt.written()
            else:
                receipt.lost()
        if error is not None and not self.gone:
            if not isinstance(error, ConnectionError):
                logger.error("the answers cannot be written: %s", error)
            self.abandon()
            self._on_gone()
        self._wake()
