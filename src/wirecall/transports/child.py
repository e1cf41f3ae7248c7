"""A child process whose stdin and stdout carry lines.

1. Its stderr is passed on to the stderr of this process, and the last of it is kept: an error about its end quotes it.
2. It is ended as MCP asks for, with `grace` seconds for each step. It leads a process group of its own, so that the
   processes it started end with it, and so that Ctrl+C in the terminal reaches this process alone.
3. However much it writes, other tasks of the event loop have their turn: deadlines hold. After `aclose` begins its output is
   read, so that it can end, and dropped.
4. After `aclose` there is neither process nor task nor pipe, however it ended. A program that ends without it calls
   `kill_all`.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

from wirecall.errors import CallFailed, ConnectionLost, NotSent, UsageError
from wirecall.files import IS_PORTABLE
from wirecall.logs import printable
from wirecall.transports.lines import CHUNK, Splitter, Threaded

OnLine: TypeAlias = Callable[[bytes], None]
OnEnd: TypeAlias = Callable[[CallFailed], None]
Stderr: TypeAlias = Literal["pass", "keep"]

GRACE = 2.0
KEPT = 2000  # characters of stderr that an error quotes
TURN = 200  # lines that are heard at one go; a pipe may hold 32768

_Reader: TypeAlias = asyncio.StreamReader | Threaded

_living: set[asyncio.subprocess.Process] = set()


def kill_all() -> None:
    """Kill all children at once, for a program that is about to end itself in the middle of everything."""
    for process in list(_living):
        if process.returncode is None:  # else another process may have its number by now
            _kill(process)


class Child:
    """One life of a process. `on_line` gets each line of its output; `on_end` is called once, when no more will come."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        max_bytes: int = 10 << 20,
        stderr: Stderr = "pass",
        grace: float = GRACE,
        portable: bool = IS_PORTABLE,
    ) -> None:
        if not command or not all(isinstance(word, str) for word in command):
            raise UsageError(f"{command!r} is not a command line.", fix='use a list of strings: ["python", "server.py"]')
        self._command = list(command)
        self._env = None if env is None else {**os.environ, **env}
        self._cwd = cwd
        self._max_bytes = max_bytes
        self._passes = stderr == "pass"
        self._grace = grace
        self._portable = portable  # read in threads, and do without process groups
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._pipes: list[asyncio.ReadTransport | Threaded] = []
        self._kept = b""

    async def open(self, on_line: OnLine, on_end: OnEnd) -> None:
        """Start the process."""
        # Pipes of our own for its output: a process that it started may hold the other ends open, and we have to close ours.
        (out, its_out), (err, its_err) = os.pipe(), os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=its_out,
                stderr=its_err,
                env=self._env,
                cwd=self._cwd,
                start_new_session=True,
            )
        except BaseException as error:
            os.close(out)
            os.close(err)
            if isinstance(error, OSError):
                raise NotSent(f"{self._command[0]} cannot be started: {error}") from error
            raise
        finally:
            os.close(its_out)
            os.close(its_err)
        self._process = process
        _living.add(process)
        stdout, stderr = await self._reader(out), await self._reader(err)
        hearing = asyncio.create_task(self._hear(stderr))
        self._tasks = [hearing, asyncio.create_task(self._listen(process, stdout, hearing, on_line, on_end))]

    async def _reader(self, descriptor: int) -> _Reader:
        if self._portable:
            threaded = Threaded(descriptor, owned=True)
            self._pipes.append(threaded)
            return threaded
        reader, loop = asyncio.StreamReader(), asyncio.get_running_loop()
        file = os.fdopen(descriptor, "rb", 0)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
        self._pipes.append(transport)
        return reader

    @property
    def said(self) -> str:
        """The last of what it wrote to stderr."""
        return self._kept.decode("utf-8", "replace").strip()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def write(self, line: bytes) -> None:
        """Write one line and its end. Waits while the child does not read."""
        process = self._process
        if process is None or process.stdin is None:
            raise NotSent("the server process has ended")
        lost: type[CallFailed] = NotSent
        if not process.stdin.is_closing():
            try:
                process.stdin.write(line + b"\n")
                await process.stdin.drain()
                return
            except OSError:
                lost = ConnectionLost
        # A child that has closed its stdin is about to end: the error tells how, and quotes its last words.
        await asyncio.wait(self._tasks, timeout=self._grace)
        raise lost(self._last_words(process))

    async def aclose(self) -> None:
        """End the process, and all that belongs to it."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        try:
            # Close stdin, wait, then SIGTERM, wait, then SIGKILL (MCP 2025-03-26, lifecycle, shutdown of stdio).
            process.stdin.close()
            for gently in (True, False):
                with contextlib.suppress(TimeoutError):
                    # Not `wait_for`: until Python 3.12 it drops a cancel that comes in the turn in which the process ends.
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

    # --- hearing it --------------------------------------------------------------------------------------------------

    async def _listen(
        self,
        process: asyncio.subprocess.Process,
        stdout: _Reader,
        hearing: "asyncio.Task[None]",
        on_line: OnLine,
        on_end: OnEnd,
    ) -> None:
        lines = Splitter(self._max_bytes)
        is_over = False
        while not is_over:
            data = await stdout.read(CHUNK)
            is_over = not data
            for number, line in enumerate(lines.rest() if is_over else lines.feed(data), start=1):
                if self._process is not process:  # `aclose` has begun: its output is read and dropped
                    break
                on_line(line)
                if number % TURN == 0:
                    await asyncio.sleep(0)
        # A child that closes stdout is about to end, and its last words on stderr are on their way.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace):
                await process.wait()
                await asyncio.shield(hearing)
        on_end(ConnectionLost(self._last_words(process)))

    def _last_words(self, process: asyncio.subprocess.Process) -> str:
        code = process.returncode
        how = "closed a pipe" if code is None else f"ended with {code}" if code >= 0 else f"was ended by signal {-code}"
        return f"the server process {how}" + (f"; its last words: {self.said}" if self.said else "")

    async def _hear(self, stderr: _Reader) -> None:
        while data := await stderr.read(CHUNK):
            self._kept = (self._kept + data)[-KEPT:]
            if self._passes and sys.stderr is not None:
                text = data.decode("utf-8", "replace")
                sys.stderr.write(printable(text) if sys.stderr.isatty() else text)
                sys.stderr.flush()


def _kill(process: asyncio.subprocess.Process, *, gently: bool = False) -> None:
    """End a process, and with process groups the processes that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGTERM if gently else signal.SIGKILL)
        elif process.returncode is None:  # Windows: both are TerminateProcess
            process.terminate()
