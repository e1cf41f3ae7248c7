"""The bus of a ledger in a file: a socket for each process, in a folder beside the file.

The folder is not among temporary files: those may be private to a unit of systemd or to a
container, while all processes of a ledger see its file.
"""

import asyncio
import os
import socket
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path

from wirecall.errors import UsageError
from wirecall.ledger.base import MAX_MESSAGE, LedgerDown, Receive
from wirecall.ledger.bus import QUIET, Listening

# Seconds for a process to take a message.
PATIENCE = 5.0
# Messages that wait to be received. A process that has so many misses further ones.
MAX_RECEIVED = 1000
# Connections of other processes that wait to be accepted.
BACKLOG = 1024


class FolderBus(Listening):
    """One socket in a folder that only its user can enter."""

    def __init__(self, folder: str, channel: str, receive: Receive) -> None:
        self._folder = Path(folder)
        self._channel = channel
        self._name = f"{channel}.{os.getpid()}-{os.urandom(3).hex()}"
        super().__init__(folder, receive)

    async def send(self, message: str) -> None:
        try:
            with _Folder(self._folder) as folder:
                others = [
                    name
                    for name in os.listdir(folder.descriptor)
                    if name.startswith(f"{self._channel}.") and name != self._name
                ]
                await asyncio.gather(*(_send(folder, name, message.encode()) for name in others))
        except FileNotFoundError:  # no process listens
            return
        except (OSError, UsageError) as error:
            raise LedgerDown(f"{self._folder}: {error}") from error

    async def _messages(self) -> AsyncGenerator[str | None, None]:
        if not hasattr(socket, "AF_UNIX"):
            raise LedgerDown("this system has no Unix sockets")
        received: asyncio.Queue[str] = asyncio.Queue(MAX_RECEIVED)

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(OSError, TimeoutError, ValueError, asyncio.QueueFull):
                async with asyncio.timeout(PATIENCE):
                    message = await reader.read(MAX_MESSAGE + 1)
                    while chunk := await reader.read(MAX_MESSAGE + 1 - len(message)):
                        message += chunk
                received.put_nowait(message.decode("ascii"))
            writer.close()

        with suppress(FileExistsError):
            self._folder.mkdir(mode=0o700)
        with _Folder(self._folder) as folder:
            # The others see the socket only when it listens: before, it would refuse them as that
            # of a dead process does.
            early = f".{self._name}"
            server = await asyncio.start_unix_server(
                take, sock=folder.bound(early), backlog=BACKLOG
            )
            try:
                folder.rename(early, self._name)
                yield None
                while True:
                    message: str | None = None
                    with suppress(TimeoutError):
                        async with asyncio.timeout(QUIET):
                            message = await received.get()
                    if message is not None:
                        yield message
                    elif not folder.has(self._name):
                        raise LedgerDown("the folder was removed")
            finally:
                server.close()
                folder.remove(self._name)
                folder.remove(early)
                with suppress(OSError):  # others are in it
                    self._folder.rmdir()


class _Folder:
    """An open folder.

    Where the system allows it, a path begins with its descriptor: the path of a socket has at most
    107 characters, and that of a ledger may be longer.
    """

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        self._start = path
        if os.path.isdir(f"/proc/self/fd/{self.descriptor}"):
            self._start = Path(f"/proc/self/fd/{self.descriptor}")
        found = os.fstat(self.descriptor)
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            os.close(self.descriptor)
            raise UsageError(
                f"{path} belongs to another user, or other users may enter it.",
                "a process of another user could listen",
                "remove it; run the processes of one ledger as one user",
            )

    def __enter__(self) -> "_Folder":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def path(self, name: str) -> str:
        return str(self._start / name)

    def bound(self, name: str) -> socket.socket:
        bound = socket.socket(socket.AF_UNIX)
        try:
            bound.bind(self.path(name))
        except BaseException:
            bound.close()
            raise
        return bound

    def rename(self, name: str, to: str) -> None:
        os.rename(name, to, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def has(self, name: str) -> bool:
        return name in os.listdir(self.descriptor)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)


async def _send(folder: _Folder, name: str, message: bytes) -> None:
    """Send a message to one process. One that does not take it in time misses it."""
    try:
        async with asyncio.timeout(PATIENCE):
            _, writer = await asyncio.open_unix_connection(folder.path(name))
            writer.write(message)
            await writer.drain()
            writer.close()
            await writer.wait_closed()
    except (ConnectionRefusedError, FileNotFoundError):  # it died, and left its socket behind
        folder.remove(name)
    except (OSError, TimeoutError):
        return
