"""Lines of input as they come: from a file at once, from a pipe or a terminal when somebody writes them.

Who writes to a pipe may pause, as `tail -f` does, and wants the answers meanwhile. So what comes is given in blocks: a block
is over when it is full, or `LINGER` after its first line, or with the input. The event loop runs on while nothing comes:
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


class Lines:
    """The lines of an input that are not blank, with their numbers from 1."""

    def __init__(self, source: BinaryIO) -> None:
        self._may_wait = _may_wait(source)
        self._number = 0
        self._numbered = self._of(source)
        self._source = source
        self._come: deque[Numbered] = deque()
        self._begun: list[bytes] = []  # of a line whose end has not come
        self._is_over = False

    async def block(self, most: int) -> list[Numbered]:
        """The next lines, `most` of them at the most; none if there are no more."""
        if not self._may_wait:
            with reading():
                return list(islice(self._numbered, most))
        loop = asyncio.get_running_loop()
        due = loop.time() + LINGER if self._come else None
        while len(self._come) < most and not self._is_over:
            try:
                async with asyncio.timeout_at(due):
                    self._feed(await self._read())
            except TimeoutError:
                break
            due = due or (loop.time() + LINGER if self._come else None)
        return [self._come.popleft() for _ in range(min(most, len(self._come)))]

    async def each(self) -> AsyncIterator[bytes]:
        """One after the other, without their numbers."""
        while block := await self.block(1):
            yield block[0][1]

    async def _read(self) -> bytes:
        """What is there, as soon as there is something; nothing at the end. Only then is the descriptor read: it is shared
        with who started us, so that it must not be made one that never blocks."""
        loop, handle = asyncio.get_running_loop(), self._source.fileno()
        ready = asyncio.Event()
        loop.add_reader(handle, ready.set)
        try:
            with idle():
                await ready.wait()
        finally:
            loop.remove_reader(handle)
        return os.read(handle, CHUNK)

    def _feed(self, data: bytes) -> None:
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


def _may_wait(source: BinaryIO) -> bool:
    """Whether the next line may not have been written yet, and the event loop can tell us when it is."""
    try:
        mode = os.fstat(source.fileno()).st_mode
    except (OSError, ValueError):  # bytes that only look like a file
        return False
    return sys.platform != "win32" and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or source.isatty())
