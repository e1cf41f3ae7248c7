"""Workers of one host tell each other what only one of them can use.

Any worker serves any request. But an answer to a question belongs to the worker whose handler asked, a cancellation to the
one that runs the call, and a change to those who have streams open; and a client that uses two connections meets two
workers. So a worker passes on what it has no use for, and every other looks whether it has.

Each listens on a socket in a folder that only its user can enter; the folder's name follows from the secret, so workers
with the same secret find each other. Messages are sealed with it as well. Nobody waits for anybody: a worker that is gone is
forgotten, one that does not take a message in time misses it, and while too much waits for the others nothing is added to
it. What a worker must know that starts later, the sessions that have ended, stays in a folder of its own as marks; there,
the oldest make room.
"""

import asyncio
import os
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from wirecall.errors import UsageError
from wirecall.logs import logger
from wirecall.mcp.server.sealed import BrokenSeal, Seals

PATIENCE = 5.0  # seconds for a worker to take a message
LIFETIME = 60.0
MARKED = 2 * 86_400.0  # seconds that a mark is kept: longer than anything it is about
MAX_MARKS = 10_000  # files; what is beyond is cleared away with every `MARKS_ADDED` of a worker's own
MARKS_ADDED = 1000
MAX_WAITING = 32 << 20  # bytes that the others have not taken yet
BACKLOG = 1024

SOCKET, MARKS = ".socket", "ended"


class Relay:
    """One worker among those with the same secret."""

    def __init__(self, seals: Seals, hear: Callable[[dict[str, Any]], None], folder: Path | None = None) -> None:
        user = os.getuid() if hasattr(os, "getuid") else 0
        self._folder = folder or Path(tempfile.gettempdir()) / f"wirecall-{user}-{seals.name}"
        self._seals = seals
        self._hear = hear
        self._server: asyncio.AbstractServer | None = None
        self._path: Path | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting = 0
        self._marked = 0

    async def open(self) -> None:
        """Listen. In a folder that is not ours alone we do not."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        found = self._folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077 or found.st_uid != os.getuid():
            why = "somebody else could pretend to be a worker"
            raise UsageError(f"{self._folder} is not ours alone.", why, "remove it, or set TMPDIR to a folder of your own")
        self._marks.mkdir(mode=0o700, exist_ok=True)
        self._forget_old_marks()
        name = f"{os.getpid()}-{os.urandom(3).hex()}"
        early = self._folder / f".{name}"
        self._server = await asyncio.start_unix_server(self._received, early, backlog=BACKLOG)
        # Seen by the others only now: between binding and listening it would refuse them, as a dead one does.
        self._path = early.rename(self._folder / f"{name}{SOCKET}")

    def tell(self, message: dict[str, Any]) -> None:
        """Tell all the others; does not wait."""
        if self._server is None:
            return
        sealed = self._seals.seal("relay", "", message, LIFETIME).encode()
        for path in self._folder.glob(f"[0-9]*{SOCKET}"):
            if path != self._path and self._waiting + len(sealed) <= MAX_WAITING:
                self._waiting += len(sealed)
                task = asyncio.get_running_loop().create_task(self._send(path, sealed))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def mark(self, name: str) -> None:
        """Leave a mark for those who start later."""
        self._marked += 1
        if self._marked % MARKS_ADDED == 0:
            self._forget_old_marks()
        try:
            (self._marks / name).touch()
        except OSError as error:  # the disk is full, or somebody has tidied up
            logger.warning("a session that has ended is not known to workers that start later: %s", error)

    def is_marked(self, name: str) -> bool:
        return (self._marks / name).exists()

    @property
    def _marks(self) -> Path:
        return self._folder / MARKS

    def _forget_old_marks(self) -> None:
        with suppress(OSError), os.scandir(self._marks) as found:
            marks = sorted((mark.stat().st_mtime, mark.path) for mark in found)
            too_many = len(marks) - MAX_MARKS
            for place, (made, path) in enumerate(marks):
                if place < too_many or time.time() - made > MARKED:
                    Path(path).unlink(missing_ok=True)

    async def aclose(self) -> None:
        if self._server is None or self._path is None:
            return
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1)
        self._server.close()
        self._server = None
        self._path.unlink(missing_ok=True)
        with suppress(OSError):  # there are others, or marks
            self._marks.rmdir()
            self._folder.rmdir()

    async def _send(self, path: Path, data: bytes) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                _, writer = await asyncio.open_unix_connection(path)
                writer.write(data)
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (ConnectionRefusedError, FileNotFoundError):  # it died, and left its socket behind
            path.unlink(missing_ok=True)  # noqa: ASYNC240  # as quick as the connection itself
        except (OSError, TimeoutError) as error:
            logger.warning("another worker could not be told: %s", str(error) or "it takes too long")
        finally:
            self._waiting -= len(data)

    async def _received(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                sealed = await self._read(reader)
            _, value = self._seals.open("relay", "", sealed)
            self._hear(msgspec.json.decode(value))
        except (BrokenSeal, UnicodeError, OSError, TimeoutError, LookupError) as error:
            logger.warning("a message from another worker is of no use: %r", error)
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> str:
        data = bytearray()
        while chunk := await reader.read(1 << 16):
            data += chunk
            if len(data) > MAX_WAITING:
                raise BrokenSeal("too long")
        return data.decode("ascii")
