"""Lines of input as they come: from a file at once, from a pipe or a terminal when they are written.

The writer of a pipe may pause, as `tail -f` does, and wants the answers meanwhile. So lines are returned in blocks: a block
ends when it is full, `LINGER` after its first line, or with the input. The event loop runs on while no line comes, because
servers ask their clients things, too.
"""

import asyncio
import os
import stat
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from typing import BinaryIO, TypeAlias

from wirecall.cli.connecting import idle, reading

Numbered: TypeAlias = tuple[int, bytes]

LINGER = 0.2  # seconds from the first line of a block to its end
CHUNK = 1 << 16


class InputLines:
    """The lines of an input that are not blank, with their numbers from 1."""

    def __init__(self, source: BinaryIO) -> None:
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
        self._may_wait = is_pipe and sys.platform != "win32"

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
            with idle():
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
