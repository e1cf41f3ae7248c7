"""The other workers: processes of one host with the same secret, any of which serves any request.

An answer to a question belongs to the worker whose handler asked, a cancellation to the one that
runs the call, a change to those that have streams open; and a client with two connections meets two
workers. So a worker passes on each message that it cannot use itself, and every other worker checks
whether it can. It sends:

    kind, uri                  a list or a resource has changed: the others notify their listeners
    ended                      a session has ended
    caller, session, message   a message of a session that belongs to another worker, or to all of them

1. Each worker listens on a socket in a folder that only its user can enter. The folder's name
   follows from the secret, so workers with the same secret find each other. Messages are sealed
   with the secret as well.
2. A worker does not wait for the others. It forgets one that is gone; one that does not take a
   message in time misses it; while too many bytes wait for the others, the worker drops further
   messages.
3. A worker that starts later must know the sessions that have ended. Each is a mark: a file in a
   separate folder, named as `EndedSession` says, whose modification time is the time at which the
   session was opened.
4. A worker holds a lock on the folder while it lives. A folder without a lock and without marks
   belonged to workers that were killed: the next worker that starts removes it.
5. A session that has ended stays ended, however many others a caller ends after it. `within` is the
   rule: if too many have ended, one entry replaces all the sessions of the caller with the most:
   the opening of the newest of them. Every session that this caller opened until then counts as
   ended, unless this process knows that it is alive. So a caller that floods the list ends its own
   sessions early, and its client sends `initialize` again.
"""

import asyncio
import os
import re
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from wirecall.errors import UsageError
from wirecall.logs import logger
from wirecall.protocol.messages import JsonObject

if TYPE_CHECKING:
    from wirecall.mcp.server.changes import Hub
    from wirecall.mcp.server.sessions import Sealer

# Seconds for a worker to take a message.
PATIENCE = 5.0
# Seconds for which a sealed message is good.
LIFETIME = 60.0
# Seconds for which a mark is kept: longer than the session it is about could live.
MARKED = 2 * 86_400.0
# Marks, which are files. A worker checks this after every `MARKS_ADDED` marks that it writes.
MAX_MARKS = 10_000
MARKS_ADDED = 1000
# Bytes that the others have not taken yet.
MAX_WAITING = 32 << 20
# Connections of other workers that wait to be accepted.
BACKLOG = 1024

# Stands for the digest of a caller in an entry for all callers.
EVERY_CALLER = "all"
SOCKET = ".socket"
MARKS = "ended"
_FOLDER = re.compile(r"wirecall-[0-9]+-[0-9a-f]{12}")


class EndedSession(Struct, frozen=True):
    """A session that has ended."""

    # A digest of the caller's name.
    caller: str
    id: str
    # Unix time in milliseconds.
    opened: int

    @property
    def name(self) -> str:
        return f"{self.caller}.{self.id}"

    def is_among(self, opened: Callable[[str], int | None]) -> bool:
        """Return whether the list `opened` has the session.

        It may have an entry for all sessions of the caller instead.
        """
        if opened(self.name) is not None:
            return True
        return any((opened(several) or 0) >= self.opened for several in (self.caller, EVERY_CALLER))


def within(ended: Mapping[str, int], oldest: int, limit: int) -> dict[str, int]:
    """Return a list of ended sessions without those too old to matter, cut down to a limit.

    An entry without an id stands for every session of its caller that was opened until then.
    """
    kept = {name: opened for name, opened in ended.items() if opened >= oldest}
    while len(kept) > limit:
        (caller, number), *_ = Counter(name.partition(".")[0] for name in kept).most_common(1)
        if number == 1:  # every caller has one entry, so only an entry for all callers helps
            return {EVERY_CALLER: max(kept.values())}
        last = max(opened for name, opened in kept.items() if name.partition(".")[0] == caller)
        kept = {name: opened for name, opened in kept.items() if name.partition(".")[0] != caller}
        kept[caller] = last
    return kept


class Relay:
    """One worker among those with the same secret.

    If it is not `shared`, it is alone and sends nothing. `on_end` and `on_message` take the
    messages of the others about sessions.
    """

    def __init__(
        self,
        hub: "Hub",
        sealer: "Sealer",
        *,
        shared: bool,
        on_end: Callable[[EndedSession], None],
        on_message: Callable[[str, str, bytes], None],
        folder: Path | None = None,
    ) -> None:
        user = os.getuid() if hasattr(os, "getuid") else 0
        self._folder = folder or Path(tempfile.gettempdir()) / f"wirecall-{user}-{sealer.name}"
        self._marks = self._folder / MARKS
        self._hub = hub
        self._sealer = sealer
        self._shared = shared
        self._on_end = on_end
        self._on_message = on_message
        self._server: asyncio.AbstractServer | None = None
        # The path of our socket.
        self._path: Path | None = None
        # The descriptor that holds our lock on the folder; -1 if we hold none.
        self._lock = -1
        # Messages that are being sent.
        self._tasks: set[asyncio.Task[None]] = set()
        # Bytes that the others have not taken yet.
        self._waiting = 0
        # Marks that this worker has written.
        self._marked = 0

    async def open(self) -> None:
        """Listen to the others, if there may be any.

        Raises `UsageError` if another user may enter the folder.
        """
        if not self._shared:
            return
        with suppress(OSError):  # a folder of temporary files need not be readable
            for path in self._folder.parent.iterdir():
                if path != self._folder and _FOLDER.fullmatch(path.name):
                    _remove_abandoned(path)
        self._lock_folder()
        self._marks.mkdir(mode=0o700, exist_ok=True)
        self._forget_marks()
        name = f"{os.getpid()}-{os.urandom(3).hex()}"
        early = self._folder / f".{name}"
        self._server = await asyncio.start_unix_server(self._received, early, backlog=BACKLOG)
        # The others see the socket only now: before it listens, it would refuse them as a dead one
        # does.
        self._path = early.rename(self._folder / f"{name}{SOCKET}")
        loop = asyncio.get_running_loop()

        def changed(kind: str, uri: str | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._send_all, {"kind": kind, "uri": uri})

        self._hub.beyond = changed

    def _lock_folder(self) -> None:
        """Make the folder if it is missing, and hold a lock on it.

        Raises `UsageError` if another user may enter it.
        """
        while self._lock < 0:  # try again if another worker removes the folder between these steps
            self._folder.mkdir(mode=0o700, exist_ok=True)
            with suppress(FileNotFoundError):
                found = self._folder.lstat()
                is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
                if not is_ours or found.st_mode & 0o077:
                    raise UsageError(
                        f"{self._folder} belongs to another user, or other users may enter it.",
                        "another user could pretend to be a worker",
                        "remove it, or set TMPDIR to a folder of your own",
                    )
                lock = _locked(self._folder, exclusive=False)
                if self._folder.exists() and os.fstat(lock).st_ino == self._folder.lstat().st_ino:
                    self._lock = lock
                else:
                    os.close(lock)

    async def aclose(self) -> None:
        """Leave the others. The last one removes the folder, unless it has marks."""
        if self._server is None or self._path is None:
            return
        self._hub.beyond = None
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1)
        self._server.close()
        self._server = None
        self._path.unlink(missing_ok=True)
        os.close(self._lock)
        self._lock = -1
        with suppress(OSError):  # another worker is alive, or there are marks
            lock = _locked(self._folder, exclusive=True)
            try:
                self._marks.rmdir()
                self._folder.rmdir()
            finally:
                os.close(lock)

    # --- messages to the others -------------------------------------------------------------------

    def pass_on(self, caller: str, token: str | None, data: bytes) -> None:
        """Send the others a message of a session."""
        if token is not None:
            self._send_all({"caller": caller, "session": token, "message": data.decode()})

    def announce_end(self, session: EndedSession) -> None:
        """Notify the others that a session has ended, also those that start later."""
        if self._server is None:
            return
        self._send_all({"ended": session})
        self._marked += 1
        if self._marked % MARKS_ADDED == 0:
            self._forget_marks()
        try:
            self._mark(session.name, session.opened)
        except OSError as error:  # the disk is full, or the folder was removed
            logger.warning(
                "the end of a session was not recorded for workers that start later: %s", error
            )

    def know_ended(self, session: EndedSession) -> bool:
        """Return whether a worker has seen the end of a session."""

        def opened(name: str) -> int | None:
            try:
                return (self._marks / name).stat().st_mtime_ns // 1_000_000
            except OSError:
                return None

        return self._server is not None and session.is_among(opened)

    def _send_all(self, message: JsonObject) -> None:
        """Send the others a message, without waiting for them."""
        if self._server is None:
            return
        # Sealed, because a process without the secret could otherwise speak for any caller.
        sealed = self._sealer.seal("relay", "", message, LIFETIME).encode()
        for path in self._folder.glob(f"[0-9]*{SOCKET}"):
            if path != self._path and self._waiting + len(sealed) <= MAX_WAITING:
                self._waiting += len(sealed)
                task = asyncio.get_running_loop().create_task(self._send(path, sealed))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

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
            logger.warning(
                "sending a message to another worker failed: %s", str(error) or "timed out"
            )
        finally:
            self._waiting -= len(data)

    # --- marks ------------------------------------------------------------------------------------

    def _mark(self, name: str, opened: int) -> None:
        path = self._marks / name
        path.touch()
        os.utime(path, ns=(opened * 1_000_000, opened * 1_000_000))

    def _forget_marks(self) -> None:
        """Remove the marks that are too old or too many (`within`)."""
        with suppress(OSError):
            with os.scandir(self._marks) as found:
                marks = {mark.name: mark.stat().st_mtime_ns // 1_000_000 for mark in found}
            kept = within(marks, int((time.time() - MARKED) * 1000), MAX_MARKS)
            # Before removing the marks that it replaces.
            for name, opened in kept.items() - marks.items():
                self._mark(name, opened)
            for name in marks.keys() - kept.keys():
                (self._marks / name).unlink(missing_ok=True)

    # --- messages of the others -------------------------------------------------------------------

    async def _received(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            data = bytearray()
            async with asyncio.timeout(PATIENCE):
                while chunk := await reader.read(1 << 16):
                    data += chunk
                    if len(data) > MAX_WAITING:
                        raise ValueError("too long")
            found = self._sealer.open("relay", "", data.decode("ascii"))
            if found is None:
                raise ValueError("not sealed by a worker")
            message = msgspec.json.decode(found.value)
            if "kind" in message:
                self._hub.notify_here(message["kind"], message["uri"])
            elif "ended" in message:
                self._on_end(msgspec.convert(message["ended"], EndedSession))
            else:
                passed_on = message["message"].encode()
                self._on_message(message["caller"], message["session"], passed_on)
        except (ValueError, OSError, TimeoutError, LookupError) as error:
            logger.warning("a message from another worker is not readable: %r", error)
        finally:
            writer.close()


def _locked(folder: Path, *, exclusive: bool) -> int:
    """Return a descriptor that holds a lock on a folder.

    Raises `BlockingIOError` if another process has a lock that excludes it.
    """
    import fcntl  # late: Windows does not have it

    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB if exclusive else fcntl.LOCK_SH)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _remove_abandoned(folder: Path) -> None:
    """Remove a folder of this user in which no worker lives.

    It stays if one of its marks is young enough to matter.
    """
    with suppress(OSError):
        lock = _locked(folder, exclusive=True)
        try:
            found = os.fstat(lock)
            young = time.time() - MARKED
            if found.st_uid != os.getuid() or found.st_mode & 0o077:
                return
            if any(mark.stat().st_mtime > young for mark in (folder / MARKS).glob("*")):
                return
            for left in [*(folder / MARKS).glob("*"), *folder.iterdir()]:
                if left.name == MARKS:
                    left.rmdir()
                else:
                    left.unlink()
            folder.rmdir()
        finally:
            os.close(lock)
