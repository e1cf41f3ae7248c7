"""A child process whose stdin and stdout carry lines, or messages of another framing.

1. Its stderr is forwarded to the stderr of this process. The last part is kept, and an error about
   its end quotes it.
2. `aclose` ends it as MCP requires, with `grace` seconds for each step. It leads its own process
   group, so that the processes it started end with it, and so that Ctrl+C in the terminal reaches
   only this process.
3. However much it writes, other tasks of the event loop get their turn, so deadlines hold. Once
   `aclose` begins, its output is read, so that it can end, and dropped.
4. After `aclose` no process, task or pipe remains, however the child ended. A program that exits
   without `aclose` calls `kill_all`. One that may be killed has a `Reaper`, which then ends the
   child.
"""

import asyncio
import contextlib
import os
import select
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias, cast

from wirecall.aio import wake
from wirecall.errors import CallFailed, ConnectionLost, NotSent, UsageError
from wirecall.files import IS_PORTABLE
from wirecall.logs import printable
from wirecall.transports.framing import LINES, Framing, Split
from wirecall.transports.lines import CHUNK, Threaded
from wirecall.transports.reaper import Reaper

OnLine: TypeAlias = Callable[[bytes], None]
OnEnd: TypeAlias = Callable[[CallFailed], None]
Stderr: TypeAlias = Literal["pass", "keep"]

# Seconds for each step of `aclose`.
GRACE = 2.0
# Characters of stderr that an error quotes.
KEPT = 2000
# Max lines per loop iteration; a pipe may hold 32768.
TURN = 200

_Reader: TypeAlias = asyncio.StreamReader | Threaded

_living: set[asyncio.subprocess.Process] = set()


def kill_all() -> None:
    """Kill all children at once, for a program that is about to exit without cleaning up."""
    for process in list(_living):
        if process.returncode is None:  # else another process may have its pid by now
            _kill(process)


class _Lines(asyncio.Protocol):
    """Passes lines on as they come, at most `TURN` of them in each turn of the loop."""

    def __init__(self, splitter: Split, take: OnLine) -> None:
        self.splitter = splitter
        self._take = take
        self._loop = asyncio.get_running_loop()
        # Done when all lines are passed on, or the rest cannot be read.
        self.over: asyncio.Future[None] = self._loop.create_future()
        self._waiting: deque[bytes] = deque()
        self._has_ended = False
        # None: a thread reads.
        self._transport: asyncio.ReadTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Those of uvloop are not subclasses.
        self._transport = cast(asyncio.ReadTransport, transport)

    def data_received(self, data: bytes) -> None:
        self._waiting.extend(self.splitter.feed(data))
        self._pass_on()

    def connection_lost(self, _error: Exception | None) -> None:
        self._has_ended = True
        self._waiting.extend(self.splitter.rest())
        self._pass_on()

    async def pump(self, source: Threaded) -> None:
        """Take the bytes that a thread reads."""
        while data := await source.read():
            self.data_received(data)
            while self._waiting:  # noqa: ASYNC110  # a few turns, of which each takes some
                await asyncio.sleep(0)
        self.connection_lost(None)

    def _pass_on(self) -> None:
        waiting = self._waiting
        for _ in range(min(TURN, len(waiting))):
            self._take(waiting.popleft())
        if waiting:
            self._pause()
            self._loop.call_soon(self._pass_on)
        elif self.splitter.broken is not None:
            self._pause()
            wake(self.over, None)
        elif self._has_ended:
            wake(self.over, None)
        elif self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _pause(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()


class Child:
    """One run of a process.

    `on_line` receives each line of output; `on_end` is called once, at the end.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        max_bytes: int = 10 << 20,
        stderr: Stderr = "pass",
        grace: float = GRACE,
        framing: Framing = LINES,
        portable: bool = IS_PORTABLE,
        reaper: Reaper | None = None,
    ) -> None:
        if not command or not all(isinstance(word, str) for word in command):
            raise UsageError(
                f"{command!r} is not a command line.",
                fix='use a list of strings: ["python", "server.py"]',
            )
        self._command = list(command)
        self._env: dict[str, str] | None = None
        if env is not None:
            self._env = {**os.environ, **env}
        self._cwd = cwd
        self._max_bytes = max_bytes
        self._passes = stderr == "pass"
        self._grace = grace
        self._framing = framing
        # Whether to read in threads, without process groups.
        self._portable = portable
        # Ends the process if this one is killed.
        self._reaper = reaper
        self._process: asyncio.subprocess.Process | None = None
        # Reports that no process reads our lines any more. None: this system cannot.
        self._unread: select.poll | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._pipes: list[asyncio.ReadTransport | Threaded] = []
        # `aclose` has begun.
        self._is_closing = False
        # The last part of its stderr.
        self._kept = b""

    async def open(self, on_line: OnLine, on_end: OnEnd) -> None:
        """Start the process. If this fails or is cancelled, nothing of it remains.

        The pipes are ready before the process starts, and nothing waits after the start: no cancel
        can arrive between the start and the point where `aclose` knows the process.
        """
        if self._reaper is not None:
            await self._reaper.open()
        lines = _Lines(
            self._framing.splitter(self._max_bytes), lambda line: self._take(line, on_line)
        )
        stderr = asyncio.StreamReader()
        try:
            with contextlib.ExitStack() as theirs:
                out, its_stdout = await self._output(lines, theirs)
                err, its_stderr = await self._output(asyncio.StreamReaderProtocol(stderr), theirs)
                process = await self._start(its_stdout, its_stderr, theirs.pop_all())
        except BaseException as error:
            for pipe in self._pipes:
                pipe.close()
            if isinstance(error, OSError):
                raise NotSent(f"{self._command[0]} cannot be started: {error}") from error
            raise
        self._process = process
        self._unread = _watched(process.stdin)
        _living.add(process)
        if self._reaper is not None:
            self._reaper.watch(process.pid)
        errors = asyncio.create_task(self._read_stderr(err or stderr))
        end = asyncio.create_task(self._await_end(process, out, lines, errors, on_end))
        self._tasks = [errors, end]

    async def _output(
        self, protocol: asyncio.Protocol, theirs: contextlib.ExitStack
    ) -> tuple[Threaded | None, int]:
        """Let a protocol read a new pipe; return the child's end of it, which `theirs` closes.

        Where the loop cannot watch pipes, the first value is the thread that reads, in place of the
        protocol.

        The pipe is our own: a process that the child started may hold the child's end open, and we
        have to close ours.
        """
        ours, its = os.pipe()
        theirs.callback(os.close, its)
        if self._portable:
            threaded = Threaded(ours, owned=True)
            self._pipes.append(threaded)
            return threaded, its
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: protocol, os.fdopen(ours, "rb", 0)
        )
        self._pipes.append(transport)
        return None, its

    async def _start(
        self, stdout: int, stderr: int, theirs: contextlib.ExitStack
    ) -> asyncio.subprocess.Process:
        """Start the process. If this is cancelled, the start completes and the process is killed.

        asyncio would kill only the process itself, and wait for the processes that it started.
        """
        starting = asyncio.create_task(
            asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                env=self._env,
                cwd=self._cwd,
                start_new_session=True,
            )
        )
        starting.add_done_callback(lambda _: theirs.close())
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_kill_started)
            await asyncio.wait([starting])
            raise

    @property
    def said(self) -> str:
        """The last part of its stderr."""
        return self._kept.decode("utf-8", "replace").strip()

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int | None:
        if self._process is None:
            return None
        return self._process.pid

    async def write(self, line: bytes) -> None:
        """Write one message. Waits while the child does not read.

        Raises `NotSent` if the child ended before, although the loop has not seen its end.
        """
        process = self._process
        if process is None or process.stdin is None:
            raise NotSent("the server process has ended")
        lost: type[CallFailed] = NotSent
        if not process.stdin.is_closing() and not self._is_unread():
            try:
                process.stdin.write(self._framing.join(line))
                await process.stdin.drain()
                return
            except OSError:
                lost = ConnectionLost
        # A child that has closed its stdin is about to end: the error says how it ended, and quotes
        # its last words.
        await asyncio.wait(self._tasks, timeout=self._grace)
        raise lost(self._last_words(process))

    def _is_unread(self) -> bool:
        """Return whether no process reads our lines any more."""
        return self._unread is not None and bool(self._unread.poll(0))

    async def aclose(self) -> None:
        """End the process and everything that belongs to it."""
        process = self._process
        self._process = None
        self._is_closing = True
        if process is None:
            return
        assert process.stdin is not None
        try:
            # Close stdin, wait, then SIGTERM, wait, then SIGKILL (MCP 2025-03-26, lifecycle,
            # shutdown of stdio).
            process.stdin.close()
            for gently in (True, False):
                with contextlib.suppress(TimeoutError):
                    # Not `wait_for`: until Python 3.12 it drops a cancel that arrives in the turn
                    # when the process ends.
                    async with asyncio.timeout(self._grace):
                        await process.wait()
                    break
                _kill(process, gently=gently)
        finally:
            _kill(process)  # processes that the child started, and that outlived it
            _living.discard(process)
            for task in self._tasks:
                task.cancel()
            for pipe in self._pipes:
                pipe.close()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await process.wait()
            if self._reaper is not None:
                self._reaper.forget(process.pid)

    # --- reading its output -----------------------------------------------------------------------

    def _take(self, line: bytes, on_line: OnLine) -> None:
        if not self._is_closing:
            on_line(line)

    async def _await_end(
        self,
        process: asyncio.subprocess.Process,
        stdout: Threaded | None,
        lines: _Lines,
        errors: "asyncio.Task[None]",
        on_end: OnEnd,
    ) -> None:
        """Wait for the end of the output, and report it."""
        if stdout is not None:
            await lines.pump(stdout)
        await lines.over
        broken = lines.splitter.broken
        if broken is not None:
            on_end(ConnectionLost(f"the server sent bytes that cannot be read: {broken}"))
            return
        # A child that closes stdout is about to end, and its last words on stderr are still
        # pending.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace):
                await process.wait()
                await asyncio.shield(errors)
        on_end(ConnectionLost(self._last_words(process)))

    def _last_words(self, process: asyncio.subprocess.Process) -> str:
        """Return how the process ended, and the last part of its stderr."""
        message = f"the server process {_how_it_ended(process.returncode)}"
        if self.said:
            message += f"; its last words: {self.said}"
        return message

    async def _read_stderr(self, stderr: _Reader) -> None:
        while data := await stderr.read(CHUNK):
            self._kept = (self._kept + data)[-KEPT:]
            if self._passes and sys.stderr is not None:
                text = data.decode("utf-8", "replace")
                if sys.stderr.isatty():
                    text = printable(text)
                sys.stderr.write(text)
                sys.stderr.flush()


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "closed a pipe"
    if code >= 0:
        return f"ended with {code}"
    return f"was ended by signal {-code}"


def _watched(stdin: asyncio.StreamWriter | None) -> "select.poll | None":
    """Return what reports the end of a pipe's readers; None if the system or the loop has nothing."""
    if stdin is None or not hasattr(select, "poll"):
        return None
    # asyncio has the one, uvloop the other.
    pipe = stdin.get_extra_info("pipe") or stdin.get_extra_info("socket")
    if pipe is None or stdin.is_closing():  # it may have ended already
        return None
    found = select.poll()
    found.register(pipe.fileno(), 0)  # errors are reported in any case
    return found


def _kill_started(starting: "asyncio.Task[asyncio.subprocess.Process]") -> None:
    """Kill a process that started although no caller waits for it any more."""
    if not starting.cancelled() and starting.exception() is None:
        _kill(starting.result())


def _kill(process: asyncio.subprocess.Process, *, gently: bool = False) -> None:
    """End a process, and with process groups the processes that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            number = signal.SIGKILL
            if gently:
                number = signal.SIGTERM
            os.killpg(process.pid, number)
        elif process.returncode is None:  # Windows: both are TerminateProcess
            process.terminate()
