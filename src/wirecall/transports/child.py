"""A child process whose stdin and stdout carry lines.

1. What it writes to stderr is passed on to ours, and the last of it is kept: an error about its end quotes it.
2. It is ended as MCP asks for: its stdin is closed and it is given `grace` seconds, then SIGTERM and as long again, then
   SIGKILL. It leads a process group of its own, so that what it started goes with it, and so that the terminal's Ctrl+C is
   ours to act on.
3. However much it says, the others of the event loop have their turn: deadlines hold. From `aclose` on it is read, so that
   it can end, and not heard.
4. After `aclose` there is neither process nor task nor pipe, however it ended. Who leaves without it calls `kill_all`.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

from wirecall.errors import CallFailed, ConnectionLost, NotSent, UsageError
from wirecall.logs import printable
from wirecall.transports.descriptors import CHUNK
from wirecall.transports.lines import Lines

OnLine: TypeAlias = Callable[[bytes], None]
OnEnd: TypeAlias = Callable[[CallFailed], None]
Stderr: TypeAlias = Literal["pass", "keep"]

GRACE = 2.0
KEPT = 2000  # characters of stderr that an error quotes
TURN = 200  # lines that are heard at one go; a pipe may hold 32768

_living: set[asyncio.subprocess.Process] = set()


def kill_all() -> None:
    """End all of them at once, for a process that is about to end itself in the middle of everything."""
    for process in list(_living):
        if process.returncode is None:  # else its number may be another's by now
            _kill(process, signal.SIGKILL)


class Child:
    """One life of a process. `on_line` gets what it says; `on_end` is told once that it will say no more."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        max_bytes: int = 10 << 20,
        stderr: Stderr = "pass",
        grace: float = GRACE,
    ) -> None:
        if not command or not all(isinstance(word, str) for word in command):
            raise UsageError(f"{command!r} is not a command line.", fix='use a list of strings: ["python", "server.py"]')
        self._command = list(command)
        self._env = None if env is None else {**os.environ, **env}
        self._cwd = cwd
        self._max_bytes = max_bytes
        self._passes = stderr == "pass"
        self._grace = grace
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._kept = b""

    async def open(self, on_line: OnLine, on_end: OnEnd) -> None:
        """Start the process."""
        pipe = asyncio.subprocess.PIPE
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env=self._env,
                cwd=self._cwd,
                start_new_session=True,
            )
        except OSError as error:
            raise NotSent(f"{self._command[0]} cannot be started: {error}") from error
        _living.add(self._process)
        stderr = asyncio.create_task(self._hear(self._process.stderr))
        self._tasks = [stderr, asyncio.create_task(self._listen(self._process, stderr, on_line, on_end))]

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
        try:
            await self._end(process)
        finally:
            _kill(process, signal.SIGKILL)  # who was started by the child, and outlived it
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await process.wait()
            _living.discard(process)
            _close(process)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        process.stdin.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), self._grace)
                return
            _kill(process, number)

    # --- hearing it --------------------------------------------------------------------------------------------------

    async def _listen(
        self, process: asyncio.subprocess.Process, stderr: "asyncio.Task[None]", on_line: OnLine, on_end: OnEnd
    ) -> None:
        assert process.stdout is not None
        lines = Lines(self._max_bytes)
        while data := await process.stdout.read(CHUNK):
            if self._process is process:
                await self._tell(lines.feed(data), on_line)
        await self._tell(lines.rest(), on_line)
        # Who closes stdout is about to end, and its last words on stderr are on their way.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace):
                await process.wait()
                await asyncio.shield(stderr)
        on_end(ConnectionLost(self._last_words(process)))

    async def _tell(self, lines: list[bytes], on_line: OnLine) -> None:
        for number, line in enumerate(lines, start=1):
            if self._process is None:
                return
            on_line(line)
            if number % TURN == 0:
                await asyncio.sleep(0)

    def _last_words(self, process: asyncio.subprocess.Process) -> str:
        code = process.returncode
        how = "closed a pipe" if code is None else f"ended with {code}" if code >= 0 else f"was ended by signal {-code}"
        return f"the server process {how}" + (f"; its last words: {self.said}" if self.said else "")

    async def _hear(self, stderr: asyncio.StreamReader | None) -> None:
        assert stderr is not None
        while data := await stderr.read(CHUNK):
            self._kept = (self._kept + data)[-KEPT:]
            if self._passes and sys.stderr is not None:
                text = data.decode("utf-8", "replace")
                sys.stderr.write(printable(text) if sys.stderr.isatty() else text)
                sys.stderr.flush()


def _kill(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _close(process: asyncio.subprocess.Process) -> None:
    """Without it, the pipes wait for the garbage collector, and are heard of then."""
    transport = getattr(process, "_transport", None)
    if transport is not None:
        transport.close()
