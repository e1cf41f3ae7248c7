"""The user's side of a verb that runs: Ctrl-C, and the lines of its input.

1. Ctrl-C cancels the verb, so that its calls in flight are cancelled at their server too; a second one ends the process.
2. The writer of a pipe may pause, as `tail -f` does, and wants the answers meanwhile. So lines are returned in blocks: a
   block ends when it is full, `LINGER` after its first line, or with the input. The event loop runs on while no line
   comes, because servers ask their clients things, too.
"""

import asyncio
import os
import signal
import stat
import sys
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import IO, Any, BinaryIO, Literal, TypeAlias, TypeVar

import click

from wirecall.cli.failures import Exit, Interrupted
from wirecall.files import IS_PORTABLE

T = TypeVar("T")
Numbered: TypeAlias = tuple[int, bytes]

LINGER = 0.2  # seconds from the first line of a block to its end
CHUNK = 1 << 16


# --- Ctrl-C ---------------------------------------------------------------------------------------------------------


class _Now:
    """The state of the command when Ctrl-C arrives."""

    waits: Literal["", "blocked", "idle"] = ""  # for its user: no call is in flight that Ctrl-C could cancel
    asked = False  # Ctrl-C was pressed before


@contextmanager
def reading(*, blocks: bool = True) -> Iterator[None]:
    """Mark a wait for the user, which Ctrl-C ends. A read that blocks the event loop is ended at once."""
    _Now.waits = "blocked" if blocks else "idle"
    try:
        if _Now.asked:  # the loop has not cancelled this task yet
            raise asyncio.CancelledError
        yield
    finally:
        _Now.waits = ""


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine. Ctrl-C cancels it, so that calls in flight are cancelled at their server too."""
    from wirecall.transports.child import kill_all

    _Now.asked = False

    async def guarded() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def interrupt(*_: object) -> None:
            if _Now.asked:
                kill_all()  # the server processes that this command started
                os._exit(Exit.INTERRUPTED)
            _Now.asked = True
            # The empty line is for the ^C that a terminal shows.
            print("" if _Now.waits else "\nCancelling; Ctrl-C again stops at once.", file=sys.stderr, flush=True)
            if _Now.waits == "blocked":
                raise asyncio.CancelledError
            loop.call_soon_threadsafe(task.cancel)

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            return await work
        finally:
            signal.signal(signal.SIGINT, before)

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        raise Interrupted from None


# --- lines -----------------------------------------------------------------------------------------------------------


def stdin() -> BinaryIO:
    """Return standard input, unless the parent process closed it."""
    if sys.stdin is None:
        raise click.UsageError("There is no standard input: it is closed.")
    return sys.stdin.buffer


class Input(click.File):
    """A file of bytes to read, or `-` for standard input: the `type=` of an argument."""

    def __init__(self) -> None:
        super().__init__("rb")

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> IO[bytes]:  # type: ignore[override]
        return stdin() if value == "-" else super().convert(value, param, ctx)


class InputLines:
    """The lines of an input that are not blank, with their numbers from 1."""

    def __init__(self, source: BinaryIO, *, portable: bool = IS_PORTABLE) -> None:
        self._source = source
        self._number = 0
        self._numbered = self._of(source)
        self._come: deque[Numbered] = deque()
        self._begun: list[bytes] = []  # the parts of a line whose end has not come
        self._is_over = False
        try:
            mode = os.fstat(source.fileno()).st_mode
            is_pipe = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or source.isatty()
        except (OSError, ValueError):  # bytes that only look like a file
            is_pipe = False
        # Whether the next line may not be written yet, and the event loop can wait for it.
        self._may_wait = is_pipe and not portable

    async def block(self, most: int) -> list[Numbered]:
        """Return the next lines, at most `most`; an empty list at the end of the input."""
        if not self._may_wait:
            with reading():
                return list(islice(self._numbered, most))
        loop = asyncio.get_running_loop()
        due = loop.time() + LINGER if self._come else None
        while len(self._come) < most and not self._is_over:
            try:
                async with asyncio.timeout_at(due):
                    await self._read()
            except TimeoutError:
                break
            due = due or (loop.time() + LINGER if self._come else None)
        return [self._come.popleft() for _ in range(min(most, len(self._come)))]

    async def each(self) -> AsyncIterator[bytes]:
        """Yield one line after the other, without numbers."""
        while block := await self.block(1):
            yield block[0][1]

    async def _read(self) -> None:
        """Wait for data and take the whole lines in it."""
        loop, handle = asyncio.get_running_loop(), self._source.fileno()
        ready = asyncio.Event()
        # The descriptor is shared with the parent process, so it must stay blocking: it is read only when data is there.
        loop.add_reader(handle, ready.set)
        try:
            with reading(blocks=False):
                await ready.wait()
        finally:
            loop.remove_reader(handle)
        data = os.read(handle, CHUNK)
        *whole, rest = data.split(b"\n")
        if whole:
            whole[0] = b"".join([*self._begun, whole[0]])
            self._begun = []
        self._begun.append(rest)
        if not data:
            self._is_over = True
            whole.append(b"".join(self._begun))
        self._come.extend(self._of(whole))

    def _of(self, lines: "BinaryIO | list[bytes]") -> Iterator[Numbered]:
        for line in lines:
            self._number += 1
            if line.strip():
                yield self._number, line.rstrip(b"\r\n")
